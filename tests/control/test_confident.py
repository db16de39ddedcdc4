"""Confidence pruning: the width holds the believed nodes, and no text changes."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.control.budget import BudgetController
from spec_jax.control.confident import Confident
from spec_jax.tree import Draft, Tree
from tests.control.test_marginal import WIDTHS, N, drafts

COST = jnp.ones(len(WIDTHS))


def decide(least, draft, active=(True, True)):
    return int(Confident(least).decide((), draft, jnp.asarray(active), COST, WIDTHS))


@pytest.mark.parametrize("least", (0.01, 0.1, 0.5))
@pytest.mark.parametrize("active", ((True, True), (True, False), (False, False)))
def test_the_narrowest_width_that_holds_every_believed_node(least, active):
    widths = set()
    for seed in range(30):
        draft = drafts(seed)
        chance = np.where(draft.tree.valid, np.cumprod(draft.confidence, axis=1), 0)
        count = max([1, *((chance[row] >= least).sum() for row in range(2) if active[row])])
        want = min(i for i, w in enumerate(WIDTHS) if w >= count)
        assert decide(least, draft, active) == want
        widths.add(want)
    assert len(widths) > 1 or active == (False, False) or least == 0.01


def test_chances_multiply_along_paths_and_not_along_indices():
    """Four children of the root, each of chance 0.4, are all believed at 0.3; a chain of them ends after one."""
    tokens, valid = jnp.zeros((1, N), jnp.int32), jnp.ones((1, N), bool)
    confidence = jnp.full((1, N), 0.4).at[0, 0].set(1.0)
    star = Draft(Tree(tokens, jnp.zeros((1, N), jnp.int32).at[0, 0].set(-1), valid), confidence)
    chain = Draft(Tree(tokens, jnp.arange(-1, N - 1)[None], valid), confidence)
    assert decide(0.3, star, (True,)) == len(WIDTHS) - 1
    assert decide(0.3, chain, (True,)) == WIDTHS.index(3)


def test_what_does_not_fit_is_refused():
    assert isinstance(Confident(), BudgetController) and not Confident.uses_cost and Confident().init(2) == ()
    for least in (0.0, 1.5):
        with pytest.raises(ValueError, match=f"least: got {least}"):
            Confident(least)
    with pytest.raises(ValueError, match="controller: got Confident with a 'sampled' draft"):
        decide(0.1, dataclasses.replace(drafts(0), proposal="sampled"))
