"""Every rule for drawn drafts: the text has exactly the target's law, on trees, whatever is asked of the sampling."""

import functools

import numpy as np
import pytest

from spec_jax.sampling.settings import Sampling
from spec_jax.verify.importance import importance
from spec_jax.verify.kseq import kseq
from spec_jax.verify.rejection import rejection
from spec_jax.verify.resispec import resispec
from spec_jax.verify.traversal import block, traversal
from tests.faults.lawkit import PLAIN, TABLES, V
from tests.verify.drawn import CHAIN, TREE, gate

two_steps = functools.partial(importance, levels=4, iterations=6)
SAMPLED, WITHOUT = "sampled", "without_replacement"
RULES = {
    "rejection": (rejection, SAMPLED, TREE),
    "recursive rejection": (rejection, WITHOUT, TREE),
    "K-SEQ": (kseq, SAMPLED, TREE),
    "ResiSpec": (resispec, SAMPLED, TREE),
    "importance": (two_steps, SAMPLED, TREE),
    "traversal": (traversal, SAMPLED, TREE),
    "traversal without replacement": (traversal, WITHOUT, TREE),
    "block": (block, SAMPLED, CHAIN),
}
PENALTIES = Sampling(temperature=0.8, top_k=4, presence_penalty=0.7, frequency_penalty=0.3, repetition_penalty=1.3)
SETTINGS = {
    "top-k": Sampling(temperature=0.6, top_k=3),
    "top-p": Sampling(temperature=1.2, top_p=0.75, min_p=0.05),
    "penalties": PENALTIES,
}
HOLES = tuple(np.where(np.random.default_rng(i).random((V + 1, V)) < 0.4, -30.0, TABLES["RND"][i]) for i in (0, 1))
"""Laws that share few tokens, or none."""
NEXT = np.array([[0, 1, -1, 0, 1, 0], [1, -1, 0, -1, 0, 0]])
"""A grammar of two states: which tokens come next depends on the path."""


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("rule", RULES)
def test_plain_text(rule, name):
    kind, proposal, parents = RULES[rule]
    assert gate(kind, TABLES[name], proposal, parents, PLAIN).ok


@pytest.mark.parametrize("rule", RULES)
def test_text_under_penalties_and_truncation(rule):
    """The drafter knows nothing of them: its law is the plain one."""
    kind, proposal, parents = RULES[rule]
    assert gate(kind, TABLES["RND"], proposal, parents, PENALTIES, said=PLAIN).ok


@pytest.mark.parametrize("rule", RULES)
def test_text_when_the_laws_share_few_tokens(rule):
    kind, proposal, parents = RULES[rule]
    assert gate(kind, HOLES, proposal, parents, PLAIN).ok


@pytest.mark.parametrize("rule", ["rejection", "recursive rejection", "importance", "traversal"])
def test_text_under_a_constraint(rule):
    kind, proposal, parents = RULES[rule]
    assert gate(kind, TABLES["RND"], proposal, parents, PLAIN, grammar=(NEXT, 0)).ok


@pytest.mark.parametrize("rule", RULES)
def test_text_of_trees_with_nodes_that_are_not_valid(rule):
    """The last sibling under the root and one below the first: the draft is what is left."""
    kind, proposal, parents = RULES[rule]
    valid = [True, True, False, True, False, False, False] if parents == TREE else [True, True, False]
    assert gate(kind, TABLES["ADV"], proposal, parents, PLAIN, valid=valid).ok


@pytest.mark.parametrize("rule", ["recursive rejection", "importance", "traversal"])
def test_text_of_trees_deeper_than_the_room(rule):
    kind, proposal, parents = RULES[rule]
    assert gate(kind, TABLES["ADV"], proposal, parents, PLAIN, m=2).ok


# No top-k but on RND: on the others the likeliest tokens tie.
MANY = [
    (name, s) for name in (*TABLES, "HOLES") for s in (*SETTINGS, "plain") if name == "RND" or s in ("top-p", "plain")
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "setting"), MANY)
@pytest.mark.parametrize("rule", RULES)
def test_many_texts(rule, name, setting):
    kind, proposal, parents = RULES[rule]
    sampling = SETTINGS.get(setting, PLAIN)
    assert gate(kind, {**TABLES, "HOLES": HOLES}[name], proposal, parents, sampling, said=PLAIN, calls=4).ok


@pytest.mark.slow
def test_many_texts_of_the_default_levels():
    for name in TABLES:
        assert gate(importance, TABLES[name], SAMPLED, TREE, PLAIN, calls=4).ok


def test_siblings_without_repeats_that_are_said_to_be_independent_are_caught():
    def lies(key, draft, scores, m):
        return rejection(key, draft.replace(proposal="sampled"), scores, m)

    assert not gate(lies, TABLES["ADV"], WITHOUT, TREE, PLAIN).ok


def test_independent_siblings_that_are_said_to_be_without_repeats_keep_the_law():
    """A repeat can't have been drawn and is passed over; the others are draws from what the elders left."""

    def read(key, draft, scores, m):
        return rejection(key, draft.replace(proposal="without_replacement"), scores, m)

    assert gate(read, TABLES["ADV"], SAMPLED, TREE, PLAIN).ok


def test_draft_noise_that_comes_back_is_caught_from_leaf_to_root_and_does_no_harm_from_the_root_down():
    """Noise keyed by the text position draws the token of a rejected node again in the next round."""
    how = {"said": Sampling(temperature=2.0), "calls": 2, "by_position": True}
    assert gate(rejection, TABLES["ADV"], SAMPLED, CHAIN, PLAIN, **how).ok
    assert not gate(block, TABLES["ADV"], SAMPLED, CHAIN, PLAIN, **how).ok
