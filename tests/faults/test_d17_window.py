"""D17: at the edge of a sliding window every query of a round has a window of its own, in the cache and in the tree.

The cache is a ring that is no longer than the window takes, so a slip writes over what is still to be seen, or reads
what is long gone.
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
from spec_jax.drafters.none import NoDrafter
from spec_jax.engine import rows
from spec_jax.engine.requests import request
from spec_jax.models import attention, llama
from spec_jax.models.checkpoint import required_tensors
from spec_jax.models.config import LlamaConfig
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


def engine(target, drafter):
    return dataclasses.replace(kit.engine(drafter, prefill_chunk=4), target=target, log_probs=False)


def forced(target, params, texts):
    """Every prompt with every order of accepted counts, a row each; texts are the prompts with what follows."""
    size = len(COUNTS) * len(PROMPTS)
    e, texts = engine(target, Follow(K, kit.WORDS)), [texts[r % 7] for r in range(size)]
    given = kit.engine_params(e, params, kit.plan(texts, COUNTS[np.arange(size) // 7], K, size))
    return kit.run(e, given, kit.batch([request(e, PROMPTS[r % 7], BUDGET) for r in range(size)], size))


def run(target):
    return forced(target, jnp.asarray(LUT), [p + t.tokens for p, t in zip(PROMPTS, TEXTS, strict=True)])


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
    assert state.target.slots.shape[1] == 8 <= WINDOW + K + 1


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


@pytest.mark.parametrize(("slots", "sinks"), [(32, 0), (32, 2), (8, 0)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_what_attention_weighs(backend, slots, sinks):
    """Keys are alike and values name their position, so that the output is the visible set. Others' rows hold NaN."""
    lengths, n, d, ring = np.arange(3, 31), len(PARENTS), 64, slots < 31
    reach = np.asarray(trees.ancestors(jnp.asarray(PARENTS)))
    depth = reach.sum(1) - 1
    cache = np.full((len(lengths), 1, slots, d), np.nan)
    for row, length in enumerate(lengths):
        for position in range(length):
            if position > length - WINDOW or position < sinks:
                cache[row, 0, position % slots] = np.eye(d)[position]
    tree = np.eye(d)[lengths[:, None] + depth][:, None]
    array = lambda x: jnp.asarray(x, jnp.float32)  # noqa: E731
    options = {"scale": 1.0, "window": WINDOW, "sinks": sinks, "ring": ring}
    got = jax.jit(functools.partial(BACKENDS[backend], **options))(
        jnp.zeros((len(lengths), n, 1, d)), jnp.where(jnp.isnan(array(cache)), jnp.nan, 0.0), array(cache),
        jnp.asarray(lengths, jnp.int32), jnp.zeros_like(array(tree)), array(tree),
        jnp.broadcast_to(jnp.asarray(reach), (len(lengths), n, n)),
    )  # fmt: skip
    own = (lengths[:, None] + depth)[:, :, None]
    seen = (np.arange(d) <= own) & ((np.arange(d) > own - WINDOW) | (np.arange(d) < sinks))
    np.testing.assert_allclose(got[:, :, 0], seen / seen.sum(-1, keepdims=True), atol=1e-6)


CONFIG = LlamaConfig(kit.WORDS, 16, 24, 2, 4, 2, 8, sliding_window=WINDOW)


@dataclasses.dataclass(frozen=True)
class WholeText(llama.Llama):
    """The model with a slot for every token, none of which is written twice."""

    def init_state(self, params, batch, slots):
        unbounded = llama.Llama(dataclasses.replace(self.config, sliding_window=None))
        return unbounded.init_state(params, batch, slots)


@functools.cache
def weights():
    rng = np.random.default_rng(2)
    normal = {name: rng.normal(0, 0.6, shape).astype(np.float32) for name, shape in required_tensors(CONFIG).items()}
    return llama.from_tensors(CONFIG, normal)


@functools.cache
def plain():
    """The prompts with what the model writes behind them, by plain decoding over a cache of the whole text."""
    e = engine(WholeText(CONFIG), NoDrafter())
    requests = kit.batch([request(e, p, BUDGET) for p in PROMPTS], len(PROMPTS))
    state = kit.run(e, kit.engine_params(e, weights()), requests)
    assert state.target.k[0].shape[2] == e.slots
    texts = [state.rows.tokens[row, : len(p) + BUDGET].tolist() for row, p in enumerate(PROMPTS)]
    assert min(len(set(text)) for text in texts) > 3
    return texts


def same_texts(state):
    return np.array([plain()[r % 7] == state.rows.tokens[r, :n].tolist() for r, n in enumerate(state.rows.length)])


def test_a_model_s_text_and_ring():
    """Rejections at every position: text and keys are those of plain decoding over the whole text, in bounded room."""
    state = forced(llama.Llama(CONFIG), weights(), plain())
    assert same_texts(state).all()
    size, length = len(state.rows.length), state.target.length
    assert state.target.k[0].shape == (size, 2, 8, 8) and (length == state.rows.length - 1).all()
    e = engine(WholeText(CONFIG), NoDrafter())
    given = {f: jax.tree.map(lambda x: jnp.asarray(x[:7]), getattr(state.rows, f)) for f in FIELDS}
    prefill = kit.jit(functools.partial(rows.init, e))
    fresh = jax.device_get(prefill(kit.engine_params(e, weights()), rows.Requests(**given)).target)
    for own, whole in zip((*state.target.k, *state.target.v), (*fresh.k, *fresh.v), strict=True):
        for row in range(size):
            for position in range(length[row] - WINDOW + 1, length[row]):
                np.testing.assert_allclose(own[row, :, position % 8], whole[row % 7, :, position], atol=1e-4)


FIELDS = rows.Requests.__dataclass_fields__


@dataclasses.dataclass(frozen=True)
class Faulty(llama.Llama):
    """A ring with another modulo when it is written than when it is read, or one whose writes stop at its end."""

    slots: int | None = None

    def commit(self, state, staged, path, length):
        def write(cache, new):
            if self.slots is None:
                return attention.commit_rows(cache, new, path, jnp.minimum(state.length, cache.shape[2]))
            ring = attention.commit_ring(cache[:, :, : self.slots], new, path, state.length, length)
            return cache.at[:, :, : self.slots].set(ring)

        k, v = (tuple(map(write, *pair)) for pair in ((state.k, staged.k), (state.v, staged.v)))
        return dataclasses.replace(state, k=k, v=v, length=state.length + length)


@pytest.mark.parametrize("slots", (WINDOW, None))
def test_a_ring_that_is_written_elsewhere_than_read_is_caught(slots):
    assert not same_texts(forced(Faulty(CONFIG, slots=slots), weights(), plain())).any()
