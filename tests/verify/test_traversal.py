"""Leaf to root, against its enumeration: the joint law of the drafted and the emitted tokens."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax import noise
from spec_jax.sampling.settings import Sampling
from spec_jax.verify.traversal import block, traversal
from tests.faults.lawkit import P, Q
from tests.faults.laws import fit
from tests.verify import exact
from tests.verify.drawn import CHAIN, cells, joint, once
from tests.verify.walks import draft, keys, scores

BUSHY = (-1, 0, 0, 1, 1)
SMALL = tuple(np.random.default_rng(8).dirichlet(np.full(3, 0.7), (2, 4)))
_ORDER = np.stack([np.random.default_rng(i).permutation(5) for i in range(6)])
ADVERSARIAL = (np.array(P)[_ORDER], np.array(Q)[_ORDER])
MANY = keys(100_000)
accepted = lambda emissions: sum(chance * (len(emitted) - 1) for emitted, chance in emissions.items())  # noqa: E731


def totals(parents, rows, by, replacement=True):
    """The law of three tokens, and the mean number of accepted ones, over all drafts."""
    p, q = (exact.tables(r, len(r) - 1) for r in rows)
    law, mean = {}, 0.0
    for tokens, chance in exact.drafts(parents, q, replacement):
        emissions = by(parents, tokens, p, q, replacement)
        mean += chance * accepted(emissions)
        for text, mass in exact.text_law(emissions, p, 3).items():
            law[text] = law.get(text, 0) + chance * mass
    return law, mean


@pytest.mark.parametrize("replacement", [True, False])
@pytest.mark.parametrize("parents", [CHAIN, (-1, 0, 1, 2), BUSHY, (-1, 0, 0, 1, 2, 2)])
def test_the_enumerated_rule_is_exact_and_accepts_at_least_as_much(parents, replacement):
    """So the oracle that the samples below are held to is right, and so is the claim."""
    plain = exact.plain_law(exact.tables(SMALL[0], 3), 3)
    law, mean = totals(parents, SMALL, exact.by_traversal, replacement)
    slow, less = totals(parents, SMALL, exact.by_rejection, replacement)
    for text, chance in plain.items():
        assert law[text] == pytest.approx(chance, abs=1e-9) and slow[text] == pytest.approx(chance, abs=1e-9)
    assert mean >= less - 1e-12


def test_block_verification_accepts_strictly_more_than_token_by_token():
    """Of 2 drafted tokens on the adversarial table."""
    better, worse = (totals(CHAIN, ADVERSARIAL, by)[1] for by in (exact.by_traversal, exact.by_rejection))
    assert better > worse + 0.02


@pytest.mark.parametrize("proposal", ["sampled", "without_replacement"])
def test_drafts_and_emissions_have_the_enumerated_law(proposal):
    p, q = (exact.tables(rows, 3) for rows in SMALL)
    law = joint(BUSHY, p, q, proposal == "sampled", exact.by_traversal, 3)
    assert fit(cells(*once(traversal, BUSHY, proposal, *SMALL, MANY)), law).ok
    top_down = joint(BUSHY, p, q, proposal == "sampled", exact.by_rejection, 3)
    assert not fit(cells(*once(traversal, BUSHY, proposal, *SMALL, MANY)), top_down).ok


@pytest.mark.parametrize("rule", [block, traversal])
def test_chains_have_the_law_of_block_verification(rule):
    """Algorithm 2 of Sun et al.: the longest prefix whose chance its own number stays under."""
    law = {}
    p, q = (exact.tables(rows, 5) for rows in ADVERSARIAL)
    for (_, x, y), chance in exact.drafts(CHAIN, q, True):
        one = min(1.0, p(())[x] / q(())[x])
        two = min(1.0, one * p((x,))[y] / q((x,))[y])
        rests = [np.maximum(p(()) - q(()), 0), np.maximum(one * p((x,)) - q((x,)), 0), p((x, y))]
        chances = [1.0, rests[1].sum() / (rests[1].sum() + 1 - one) if one < 1 else 1.0, two]
        left = chance
        for n in (2, 1, 0):
            for token, mass in enumerate(rests[n] / rests[n].sum()):
                if mass > 1e-12:
                    law[x, y, *(x, y)[:n], token, *[-1] * (2 - n)] = left * chances[n] * mass
            left *= 1 - chances[n]
    law = {cell: chance for cell, chance in law.items() if chance > 1e-15}
    assert fit(cells(*once(rule, CHAIN, "sampled", *ADVERSARIAL, MANY)), law).ok


@functools.partial(jax.jit, static_argnums=0)
def run(rule, d, s, keys):
    return jax.vmap(lambda key: rule(key, d, s, 3))(keys)


FLAT = {"law": np.log(np.tile(Q, (5, 1))), "proposal": "sampled"}
PEAKED = scores(np.log(np.tile(P, (5, 1))), Sampling(temperature=1.0), want_log_probs=True)


def test_block_follows_first_children():
    """Siblings behind the first are not there for it; on the chain that is left it is traversal, token for token."""
    d = draft([0, 0, 3, 3, 4], BUSHY, **FLAT)
    alone = d.replace(tree=d.tree.replace(valid=jnp.array([True, True, False, True, False])))
    got, want = (run(rule, given, PEAKED, MANY[:2000]) for rule, given in ((block, d), (traversal, alone)))
    jax.tree.map(np.testing.assert_array_equal, got, want)
    assert set(np.unique(got.path)) == {0, 1, 3}


def test_log_probs_of_what_is_emitted():
    v = run(traversal, draft([0, 0, 3, 3, 4], BUSHY, **FLAT), PEAKED, MANY[:2000])
    at = np.arange(3) <= v.accepted[:, None]
    np.testing.assert_allclose(v.log_probs, np.where(at, np.log(P)[v.tokens], 0), atol=1e-5)


@pytest.mark.parametrize("rule", [traversal, block])
def test_greedy_rows_take_the_likeliest_path(rule):
    logits = np.eye(5)[[1, 4, 3, 2, 0]] * 3
    law = {"law": np.log(np.tile([0.1, 0.2, 0.3, 0.2, 0.2], (5, 1))), "proposal": "sampled"}
    v = run(rule, draft([0, 1, 2, 0, 4], (-1, 0, 0, 1, 3), **law), scores(logits), MANY[:1000])
    assert (v.accepted == 1).all() and (v.tokens[:, :2] == np.array([1, 4])).all()
    v = run(rule, draft([0, 1, 2, 4, 2], (-1, 0, 0, 1, 3), **law), scores(logits), MANY[:1000])
    assert (v.accepted == 2).all() and (v.tokens == np.array([1, 4, 2])).all()


@pytest.mark.parametrize("bad", [np.nan, -np.inf, np.inf, np.where(np.arange(5) == 1, np.inf, 0.0)], ids=str)
def test_invalid_logits_end_the_text(bad):
    """The node whose logits are bad may be accepted, its children may not; -1 comes after it."""
    logits = np.log(np.tile(P, (5, 1)))
    logits[1] = bad
    d = draft([0, 3, 4, 3, 4], BUSHY, law=np.log(np.tile(P, (5, 1))), proposal="sampled")
    v = run(traversal, d, scores(logits, Sampling(temperature=1.0)), MANY[:1000])
    at_one = v.path[:, 1] == 1
    assert (v.accepted[at_one] == 1).all() and (v.next_token[at_one] == -1).all() and at_one.any()
    assert (v.next_token[~at_one] >= 0).all()
    logits[0] = bad
    v = run(traversal, d, scores(logits, Sampling(temperature=1.0)), MANY[:100])
    assert (v.accepted == 0).all() and (v.next_token == -1).all()


@pytest.mark.parametrize("kind", ["point", "coupled"])
@pytest.mark.parametrize("rule", [traversal, block])
def test_a_draft_that_was_not_drawn_is_refused(rule, kind):
    given = draft([0, 3], (-1, 0), law=np.zeros((2, 5)), proposal=kind)
    with pytest.raises(ValueError, match=f"draft: got a '{kind}' draft, takes a 'sampled' or 'without_replacement'"):
        rule(noise.request_key(0), given, scores(np.zeros((2, 5)), Sampling(temperature=1.0)), 2)
