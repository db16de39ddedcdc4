"""D05: temperature and truncation act on verified slots and on the bonus slot alike."""

import pytest

from spec_jax.sampling.settings import Sampling
from spec_jax.verify.match import match
from tests.faults.lawkit import PLAIN, TABLES, gate, gate_rule, guess, law_of, sample, sample_rule
from tests.faults.laws import fit
from tests.faults.planted import SLOT_FAULTS, slot_rule

SETTINGS = [
    Sampling(temperature=1.0, top_k=3),
    Sampling(temperature=1.0, top_p=0.7),
    Sampling(temperature=1.0, min_p=0.2),
    Sampling(temperature=0.6, top_k=4, top_p=0.8, min_p=0.1),
]
TARGET, PARTLY = TABLES["RND"]
HARDLY = -3.0 * TARGET


@pytest.mark.parametrize("draft", [TARGET, PARTLY], ids=["all accepted", "some accepted"])
@pytest.mark.parametrize("sampling", SETTINGS)
def test_law(draft, sampling):
    assert gate(TARGET, guess(draft, sampling if draft is TARGET else PLAIN), sampling).ok


def test_law_where_hardly_any_draft_is_accepted():
    texts, state = sample(TARGET, guess(HARDLY, PLAIN), SETTINGS[3], 3)
    assert fit(texts, law_of(TARGET, SETTINGS[3])).ok
    assert state.rows.counters.accepted.mean() < 0.1


def test_full_acceptance_is_forced():
    _, state = sample(TARGET, guess(TARGET, SETTINGS[0]), SETTINGS[0], 3)
    assert (state.rows.counters.rounds == 1).all()


@pytest.mark.parametrize("sampling", SETTINGS)
def test_law_of_matched_text(sampling):
    assert gate_rule(match, TARGET, guess(PARTLY, PLAIN), sampling).ok


@pytest.mark.parametrize("name", TABLES)
def test_a_temperature_on_the_bonus_slot_only_is_caught(name):
    target, draft = TABLES[name]
    assert not gate_rule(slot_rule, target, guess(draft, PLAIN, tag=SLOT_FAULTS.index("bonus temperature"))).ok


def test_a_truncation_on_verified_slots_only_is_caught():
    top_k = SETTINGS[0]
    assert gate_rule(slot_rule, TARGET, guess(PARTLY, PLAIN), top_k).ok
    draft = guess(PARTLY, PLAIN, tag=SLOT_FAULTS.index("verified only"))
    assert fit(sample_rule(slot_rule, TARGET, draft, PLAIN), law_of(TARGET, top_k)).outside > 100
