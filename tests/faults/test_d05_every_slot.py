"""D05: temperature and truncation act on verified slots and on the bonus slot alike."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.sampling.settings import Sampling
from tests.faults.lawkit import MATCH, PLAIN, ROWS, TABLES, engine, gate, gate_rule, guess, requests_of, sample
from tests.faults.planted import SLOT_FAULTS, slot_rule

SETTINGS = [
    Sampling(temperature=1.0, top_k=3),
    Sampling(temperature=1.0, top_p=0.7),
    Sampling(temperature=1.0, min_p=0.2),
    Sampling(temperature=0.6, top_k=4, top_p=0.8, min_p=0.1),
]
TARGET, PARTLY = TABLES["RND"]
NEVER = -10.0 * TARGET


@pytest.mark.parametrize("draft", [TARGET, PARTLY, NEVER], ids=["all accepted", "some", "few"])
@pytest.mark.parametrize("sampling", SETTINGS)
def test_law(draft, sampling):
    same = sampling if draft is TARGET else PLAIN
    assert gate(engine(), (TARGET, draft), guess(draft, same), sampling).ok


@pytest.mark.parametrize("sampling", SETTINGS)
def test_law_of_matched_text(sampling):
    assert gate(MATCH, (TARGET, PARTLY), guess(PARTLY, PLAIN), sampling).ok


def test_full_acceptance_is_forced():
    _, state = sample(engine(), TARGET, guess(TARGET, SETTINGS[0]), SETTINGS[0], 3)
    assert (state.rows.counters.rounds == 1).all()


@pytest.mark.parametrize("name", TABLES)
def test_a_temperature_on_the_bonus_slot_only_is_caught(name):
    tables, tag = TABLES[name], SLOT_FAULTS.index("bonus temperature")
    assert not gate_rule(slot_rule, tables, guess(tables[1], PLAIN, tag=tag)).ok


def test_a_truncation_on_verified_slots_only_is_caught():
    top_k, tables = SETTINGS[0], TABLES["RND"]
    assert gate_rule(slot_rule, tables, guess(PARTLY, PLAIN), top_k).ok
    draft = guess(PARTLY, PLAIN, tag=SLOT_FAULTS.index("verified only"))
    fit = gate_rule(slot_rule, tables, draft, PLAIN, law_of=top_k)
    assert fit.outside > 100


def test_settings_differ_by_row():
    """Rows of one batch with settings of their own give the texts of batches in which all rows share them."""
    draft, which = guess(PARTLY, PLAIN), np.arange(ROWS) % len(SETTINGS)
    texts = np.stack([sample(MATCH, TARGET, draft, s, 3)[0] for s in SETTINGS])
    rows = [requests_of(MATCH, s, 3) for s in SETTINGS]
    mixed = jax.tree.map(lambda *x: np.choose(which.reshape(-1, *[1] * (x[0].ndim - 1)), x), *rows)
    state = sample(MATCH, TARGET, draft, SETTINGS[0], 3, requests=jax.tree.map(jnp.asarray, mixed))[1]
    assert (state.rows.tokens[:, 1:4] == texts[which, np.arange(ROWS)]).all()
    assert (texts[0] != texts[3]).any()
