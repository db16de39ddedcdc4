"""The target's word on branches against plain passes over whole texts."""

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax.train import branches, features
from spec_jax.train.branches import Branches
from tests.train import toy

TARGET, PARAMS = toy.target(), toy.params()
TOKENS = jnp.asarray(np.random.default_rng(3).integers(0, toy.V, (2, 7)), jnp.int32)
ANCHORS = jnp.array([[0, 3, 6], [1, 1, 5]])
K = 3
READ = jax.jit(lambda tokens, length: features.read(TARGET, PARAMS, tokens, length))
ROLLOUT = jax.jit(branches.rollout, static_argnums=(0, 4))
ALONG = jax.jit(branches.read, static_argnums=0)


def plain(text):
    """Logits and features at every token of a text."""
    tokens = jnp.zeros((1, 12), jnp.int32).at[0, : len(text)].set(jnp.array(text))
    found = READ(tokens, jnp.array([len(text)]))
    return np.asarray(TARGET.logits(PARAMS, found[:, :, -1])[0]), np.asarray(found[0])


def check(found, tokens):
    for b, r in np.ndindex(2, 3):
        at = int(ANCHORS[b, r])
        text = [*np.asarray(TOKENS[b, : at + 1]).tolist(), *np.asarray(tokens[b, r]).tolist()]
        logits, taps = plain(text)
        np.testing.assert_allclose(found.logits[b, r], logits[at : at + K], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(found.features[b, r], taps[at : at + K], rtol=1e-4, atol=1e-5)


def test_drafts_are_read_along_their_own_path():
    drafted = jnp.asarray(np.random.default_rng(4).integers(0, toy.V, (2, 3, K)), jnp.int32)
    found = ALONG(TARGET, PARAMS, TOKENS, ANCHORS, drafted)
    np.testing.assert_array_equal(found.tokens, drafted)
    check(found, drafted)


def test_a_rollout_is_what_greedy_decoding_writes():
    found = ROLLOUT(TARGET, PARAMS, TOKENS, ANCHORS, K)
    check(found, found.tokens)
    np.testing.assert_array_equal(found.tokens, jnp.argmax(found.logits, -1))


def test_one_slot_needs_no_branch():
    found = ROLLOUT(TARGET, PARAMS, TOKENS, ANCHORS, 1)
    again = ALONG(TARGET, PARAMS, TOKENS, ANCHORS, found.tokens)
    np.testing.assert_allclose(found.logits, again.logits, rtol=1e-5, atol=1e-6)


def test_secondary_blocks_are_inside_their_rollout():
    b, r, k = 2, 3, 4
    tokens = jnp.arange(b * r * k).reshape(b, r, k)
    made = Branches(tokens, 10.0 * tokens[..., None])
    parent, offset = jnp.array([[0, 2], [1, 1]]), jnp.array([[1, 3], [2, 4]])
    labels, logits, counts = branches.secondary(made, parent, offset, jnp.array([[True, True], [True, False]]))
    for i, j in np.ndindex(2, 2):
        for slot in range(k):
            inside = int(offset[i, j]) + slot < k and not (i == 1 and j == 1)
            assert counts[i, j, slot] == inside
            if inside:
                assert labels[i, j, slot] == tokens[i, parent[i, j], offset[i, j] + slot]
                assert logits[i, j, slot, 0] == 10 * labels[i, j, slot]


def test_a_branch_lives_up_to_its_end():
    found = branches.alive(jnp.array([[1, 9, 2, 9], [9, 1, 1, 1], [1, 2, 3, 8]]), (9, 8))
    np.testing.assert_array_equal(found, [[1, 1, 0, 0], [1, 0, 0, 0], [1, 1, 1, 1]])
    assert branches.alive(jnp.array([9]), ()).all()
