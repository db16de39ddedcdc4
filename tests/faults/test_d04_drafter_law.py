"""D04: temperature and truncation on the drafter: any law may be drawn from, as long as the draft tells which."""

import pytest

from spec_jax.sampling.settings import Sampling
from spec_jax.verify.match import match
from tests.faults.lawkit import PLAIN, TABLES, gate, gate_rule, guess

SETTINGS = {
    "cold": Sampling(temperature=0.6),
    "hot": Sampling(temperature=1.7),
    "top-k": Sampling(temperature=1.0, top_k=3),
    "top-p": Sampling(temperature=1.0, top_p=0.8),
    "all": Sampling(temperature=0.6, top_k=4, top_p=0.9, min_p=0.05),
}
# No top-k on ADV: its likeliest tokens tie.
CASES = [(name, s) for name in TABLES for s in SETTINGS if name == "RND" or s in ("cold", "hot", "top-p")]


@pytest.mark.parametrize("drafter", ["the same", "none"])
@pytest.mark.parametrize(("name", "setting"), CASES)
def test_law_whatever_the_drafter_draws_from(name, setting, drafter):
    (target, draft), sampling = TABLES[name], SETTINGS[setting]
    assert gate(target, guess(draft, sampling if drafter == "the same" else PLAIN), sampling).ok


@pytest.mark.parametrize(("name", "setting"), [("RND", "cold"), ("ADV", "hot"), ("RND", "all")])
def test_law_with_another_temperature_and_truncation_on_the_drafter(name, setting):
    target, draft = TABLES[name]
    assert gate(target, guess(draft, Sampling(temperature=2.0, min_p=0.1)), SETTINGS[setting]).ok


@pytest.mark.parametrize(("name", "setting"), [("RND", "cold"), ("ADV", "cold"), ("RND", "hot"), ("RND", "all")])
def test_law_of_matched_text(name, setting):
    target, draft = TABLES[name]
    assert gate_rule(match, target, guess(draft, PLAIN), SETTINGS[setting]).ok


@pytest.mark.parametrize(("name", "drawn"), [(n, s) for n, s in CASES if s in ("cold", "top-k")])
def test_a_draft_that_hides_its_law_is_caught(name, drawn):
    """Drawn with the temperature or from the top-k, and said to be drawn without."""
    target, draft = TABLES[name]
    assert not gate(target, guess(draft, SETTINGS[drawn], said=PLAIN)).ok
