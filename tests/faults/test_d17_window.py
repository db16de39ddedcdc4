"""D17: at the edge of a sliding window every query of a round has a window of its own, in the cache and in the tree.

The cache here holds the whole text, so nothing is ever written over; what is behind the window may hold anything.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.tree_attention import gpu, tpu, tree_attention
from spec_jax import tree as trees
from spec_jax.engine.requests import request
from spec_jax.models.toy import AuditTarget, audit_table
from spec_jax.tree import Tree
from tests.faults import kit
from tests.faults.drafters import Follow
from tests.faults.oracle import generate

WINDOW, K, BUDGET = 6, 3, 20
LENGTHS = range(3, 10)
COUNTS = np.array([*itertools.product(range(K + 1), repeat=3)])
LUT = np.asarray(audit_table(kit.WORDS))
PROMPTS = [[(5 * n + 3 * i * i) % kit.WORDS for i in range(n)] for n in LENGTHS]
PARENTS = (-1, 0, 0, 1, 3, 4, 5, 6, 2)  # deeper than the window


def digest(text):
    last = range(max(0, len(text) - WINDOW), len(text))
    return sum((text[i] + 1) * pow(5, i, 97) for i in last) % 97


TEXTS = [generate(lambda text: LUT[digest(text)], p, BUDGET) for p in PROMPTS]


def run(target):
    size = len(COUNTS) * len(PROMPTS)
    e = dataclasses.replace(kit.engine(Follow(K, kit.WORDS)), target=target, log_probs=False)
    texts = [PROMPTS[r % 7] + TEXTS[r % 7].tokens for r in range(size)]
    params = kit.engine_params(e, jnp.asarray(LUT), kit.plan(texts, COUNTS[np.arange(size) // 7], K, size))
    return kit.run(e, params, kit.batch([request(e, PROMPTS[r % 7], BUDGET) for r in range(size)], size))


def right(state, row):
    """Plain decoding's text, and the hash of the last six tokens at every committed position."""
    text, start = PROMPTS[row % 7] + TEXTS[row % 7].tokens, len(PROMPTS[row % 7]) - 1
    length = int(state.rows.length[row])
    return state.rows.tokens[row, :length].tolist() == text and state.drafter.hashes[
        row, start : length - 1
    ].tolist() == [digest(text[: i + 1]) for i in range(start, length - 1)]


def test_text_and_every_query_s_window():
    state = run(AuditTarget(kit.WORDS, WINDOW))
    assert all(right(state, row) for row in range(len(state.rows.length)))


@dataclasses.dataclass(frozen=True)
class OneWindowARound(AuditTarget):
    """All queries of a round have the root's window, as when the mask is cut to the window once."""

    def near(self, position, own):
        return super().near(position, own[:, :1])


@pytest.mark.parametrize("fault", [OneWindowARound(kit.WORDS, WINDOW), AuditTarget(kit.WORDS, WINDOW + 1)])
def test_a_slip_at_the_edge_is_caught(fault):
    state = run(fault)
    assert not any(right(state, row) for row in np.flatnonzero((COUNTS > 0).all(1).repeat(7)))


def test_every_node_of_a_tree():
    """Also of nodes that are not accepted, at every distance from the window's edge."""
    rng = np.random.default_rng(0)
    texts = rng.integers(0, kit.WORDS, (30, 30)).astype(np.int32)
    nodes = rng.integers(0, kit.WORDS, (30, len(PARENTS))).astype(np.int32)
    target = AuditTarget(kit.WORDS, WINDOW)
    state = target.init_state(None, 30, 40)
    _, state = target.prefill(None, state, jnp.asarray(texts), jnp.arange(30))
    tree = Tree(jnp.asarray(nodes), jnp.broadcast_to(jnp.asarray(PARENTS), nodes.shape), jnp.ones(nodes.shape, bool))
    hashes = jax.jit(target.score)(jnp.asarray(LUT), state, tree)[0].features[..., 0]
    reach = np.asarray(trees.ancestors(jnp.asarray(PARENTS)))
    want = [[digest([*texts[row, :row], *nodes[row, reach[i]]]) for i in range(len(PARENTS))] for row in range(30)]
    np.testing.assert_array_equal(hashes, want)


BACKENDS = {
    "xla": tree_attention,
    "tpu": functools.partial(tpu.tree_attention, interpret=True),
    "gpu": functools.partial(gpu.tree_attention, interpret=True),
}


@pytest.mark.parametrize("sinks", (0, 2))
@pytest.mark.parametrize("backend", BACKENDS)
def test_what_attention_weighs(backend, sinks):
    """Keys are alike and values name their position, so that the output is the visible set. Others' rows hold NaN."""
    lengths, n, slots, d = np.arange(3, 31), len(PARENTS), 32, 64
    reach = np.asarray(trees.ancestors(jnp.asarray(PARENTS)))
    depth = reach.sum(1) - 1
    cache = np.broadcast_to(np.eye(d)[:slots], (len(lengths), 1, slots, d)).copy()
    position = np.arange(slots)
    for row, length in enumerate(lengths):
        unseen = (position >= length) | ((position <= length - WINDOW) & (position >= sinks))
        cache[row, 0, unseen] = np.nan
    tree = np.eye(d)[lengths[:, None] + depth][:, None]
    array = lambda x: jnp.asarray(x, jnp.float32)  # noqa: E731
    got = jax.jit(functools.partial(BACKENDS[backend], scale=1.0, window=WINDOW, sinks=sinks))(
        jnp.zeros((len(lengths), n, 1, d)), jnp.where(jnp.isnan(array(cache)), jnp.nan, 0.0), array(cache),
        jnp.asarray(lengths, jnp.int32), jnp.zeros_like(array(tree)), array(tree),
        jnp.broadcast_to(jnp.asarray(reach), (len(lengths), n, n)),
    )  # fmt: skip
    own = (lengths[:, None] + depth)[:, :, None]
    seen = (np.arange(d) <= own) & ((np.arange(d) > own - WINDOW) | (np.arange(d) < sinks))
    np.testing.assert_allclose(got[:, :, 0], seen / seen.sum(-1, keepdims=True), atol=1e-6)
