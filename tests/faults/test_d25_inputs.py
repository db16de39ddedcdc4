"""D25: what a draft head is fed. A recurrent toy whose head is the target itself: any slip costs acceptance.

And the MTP head of a hybrid: its logits in the serving loop are those of a pass over the whole text, for every depth.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from spec_jax import tree as trees
from spec_jax.audit.law import check_law
from spec_jax.drafters import mtp
from spec_jax.drafters.head_tree import HeadTree
from spec_jax.engine import rows
from spec_jax.engine.engine import Engine, EngineParams
from spec_jax.engine.requests import request, stack
from spec_jax.models import mtp as model
from spec_jax.models.qwen_text import final_norm, forward_text
from spec_jax.models.target import Output
from spec_jax.sampling.constraint import free
from spec_jax.sampling.settings import Sampling
from spec_jax.topology.branching import Branching
from spec_jax.topology.coupling import Learner
from spec_jax.topology.growth import Growth
from spec_jax.verify.rejection import rejection
from tests.drafters.hybrid import V as WORDS
from tests.drafters.hybrid import fair
from tests.faults import kit

V, D, K, BUDGET = 8, 8, 3, 24
SURE, SHARP = Learner(1.0, 1.0, pooling=1e8), Learner(50.0, 50.0, pooling=1e8)
CHAIN = Growth(nodes=K + 1, depth=K, width=1, children=1, ranking="coupled")
TREE = Growth(nodes=9, depth=K, width=3, children=3, ranking="coupled")
PROMPTS = [[1, 2, 3], [4, 0], [5, 6, 7, 1, 2, 3, 0, 4, 6, 6], [2, 2]]
SETTINGS = [Sampling(), Sampling(temperature=0.8)]


def normed(x):
    return x / jnp.sqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6)


@flax.struct.dataclass
class Toy:
    """h' = tanh(W norm(h) + embedding + position's row); logits = head norm(h). The raw h is the feature."""

    w: Array
    embedding: Array
    position: Array
    head: Array

    def step(self, context, token, position):
        """The hidden state, not yet normed, from the normed one before it."""
        return jnp.tanh(context @ self.w + self.embedding[token] + self.position[position])


@flax.struct.dataclass
class ToyState:
    context: Array
    length: Array


@dataclasses.dataclass(frozen=True)
class ToyTarget:
    vocab_size: int = V

    def init_state(self, params: Any, batch: int, slots: int) -> ToyState:
        return ToyState(jnp.zeros((batch, D)), jnp.zeros(batch, jnp.int32))

    def prefill(self, params: Toy, state: ToyState, tokens: Array, count: Array) -> tuple[Array, ToyState]:
        raw = []
        context = state.context
        for i in range(tokens.shape[1]):
            h = params.step(context, tokens[:, i], state.length + i)
            context = jnp.where((i < count)[:, None], normed(h), context)
            raw.append(h)
        return jnp.stack(raw, 1)[:, :, None], ToyState(context, state.length + count)

    def score(self, params: Toy, state: ToyState, tree: Any, staged: Any = None, nodes: Any = None):
        raw = jnp.zeros((*tree.tokens.shape, D))
        depth = jax.vmap(trees.depth)(tree.parent)
        for i in range(tree.tokens.shape[1]):
            own = jax.vmap(lambda x, at: x[at])(raw, jnp.maximum(tree.parent[:, i], 0))
            before = jnp.where((tree.parent[:, i] < 0)[:, None], state.context, normed(own))
            raw = raw.at[:, i].set(params.step(before, tree.tokens[:, i], state.length + depth[:, i]))
        return Output(normed(raw) @ params.head, raw[:, :, None]), raw, state

    def commit(self, state: ToyState, staged: Array, path: Array, length: Array) -> ToyState:
        end = jnp.take_along_axis(path, jnp.maximum(length - 1, 0)[:, None], axis=1)[:, 0]
        new = normed(jax.vmap(lambda x, at: x[at])(staged, end))
        return ToyState(jnp.where((length > 0)[:, None], new, state.context), state.length + length)

    def widen(self, staged: Array, n: int) -> Array:
        return jnp.pad(staged, ((0, 0), (0, n - staged.shape[1]), (0, 0)))

    def materialize(self, state: ToyState) -> ToyState:
        return state

    def take(self, state: ToyState, rows: Array) -> ToyState:
        return jax.tree.map(lambda x: x[rows], state)

    def insert(self, state: ToyState, rows: Array, other: ToyState) -> ToyState:
        return jax.tree.map(lambda x, y: x.at[rows].set(y, mode="drop"), state, other)

    def release(self, state: ToyState, rows: Array) -> ToyState:
        return jax.tree.map(lambda x: x.at[rows].set(0, mode="drop"), state)


FAULTS = ("shift", "no norm", "position", "frozen position")


@dataclasses.dataclass(frozen=True)
class ToyHead:
    """The target's own step on (context at i, token i + 1) at position i + 1; it keeps no pairs, only their number."""

    fault: str = "none"
    vocab_size: int = V

    def init(self, params: Any, batch: int, max_len: int) -> tuple[Array, Array]:
        return jnp.zeros(batch, jnp.int32), jnp.zeros((batch, D))

    def taken(self, features: Array) -> Array:
        return features[:, :, 0]

    def context(self, params: Toy, taken: Array) -> Array:
        return taken if self.fault == "no norm" else normed(taken)

    def score(self, params: Toy, state: Array, context: Array, tree: Any, staged: Any = None, nodes: Any = None):
        start, n = (0, tree.tokens.shape[1]) if nodes is None else nodes
        cut = lambda x: jax.lax.dynamic_slice_in_dim(x, start, n, axis=1)  # noqa: E731
        depth = 0 if self.fault == "frozen position" else cut(jax.vmap(trees.depth)(tree.parent))
        position = jnp.broadcast_to(state[:, None] + 1 + depth + (self.fault == "position"), (state.shape[0], n))
        return normed(params.step(context, cut(tree.tokens), position)), ()

    def logits(self, params: Toy, context: Array) -> Array:
        return context @ params.head

    def commit(self, state: Array, staged: Any, length: Array) -> Array:
        return state + length

    def insert(self, state: Array, rows: Array, other: Array) -> Array:
        return state.at[rows].set(other, mode="drop")

    def release(self, state: Array, rows: Array) -> Array:
        return state.at[rows].set(0, mode="drop")


@dataclasses.dataclass(frozen=True)
class Shifted(HeadTree):
    """Every hidden state beside its own token, not the next one."""

    def observe(self, params, state, committed):
        c = committed
        rolled = dataclasses.replace(
            c,
            tokens=jnp.roll(c.tokens, 1, axis=1),
            next_token=jnp.take_along_axis(c.tokens, jnp.maximum(c.length - 1, 0)[:, None], axis=1)[:, 0],
        )
        return super().observe(params, state, rolled)


@functools.cache
def toy(seed=3):
    rng = np.random.default_rng(seed)
    draw = lambda *shape, scale=1.0: jnp.asarray(rng.normal(0, scale, shape), jnp.float32)  # noqa: E731
    return Toy(draw(D, D, scale=1.0), draw(V, D), draw(64, D, scale=0.7), draw(D, V, scale=1.5))


@functools.cache
def counts(growth, fault="none"):
    """Counters of a serving loop over prompts and settings: greedy rows, then sampled ones."""
    make = Shifted if fault == "shift" else HeadTree
    e = Engine(
        ToyTarget(),
        48,
        drafter=make(ToyHead(fault), growth, SHARP),
        prefill_chunk=4,
        max_eos=2,
        max_stops=2,
        max_bias=2,
    )
    requests = stack([request(e, p, BUDGET, 5, s) for s in SETTINGS for p in PROMPTS])
    return kit.run(e, EngineParams(toy(), toy(), free(V), jnp.ones(1)), requests).rows.counters


@pytest.mark.parametrize("growth", [CHAIN, TREE], ids=["chain", "tree"])
def test_a_head_that_is_the_target_is_always_right(growth):
    c = counts(growth)
    assert (c.rounds == BUDGET // (K + 1)).all() and (c.accepted == BUDGET - c.rounds).all()
    if growth is CHAIN:
        assert (c.accepted == c.drafted).all()


@pytest.mark.parametrize("fault", FAULTS)
def test_a_slip_in_the_inputs_costs_acceptance(fault):
    c = counts(CHAIN, fault)
    assert (c.accepted < c.drafted).mean() > 0.5 and c.accepted.sum() < 0.9 * c.drafted.sum()


@pytest.mark.parametrize("widths", [(1, 1), (2, 1)])
def test_drawn_drafts_of_a_head_keep_the_law(widths):
    shape = Branching(widths, replacement=widths == (1, 1))
    e = Engine(ToyTarget(), 16, drafter=HeadTree(ToyHead(), shape), rule=rejection)
    worse = dataclasses.replace(toy(), head=0.7 * toy().head + 0.3 * toy(4).head)
    params = EngineParams(toy(), worse, free(V), jnp.ones(1))
    report = check_law(e, params, [1, 2], [0, 3, 4, 5, 7], draws=40_000, batch=1024)
    assert report.passed and report.acceptance > 0.2


# The MTP head: logits of the serving loop against those of whole passes.


@dataclasses.dataclass(frozen=True)
class FaultyMtp(mtp.MtpHead):
    fault: str = "none"

    def context(self, params, taken):
        return taken if self.fault == "no norm" else super().context(params, taken)

    def score(self, params, state, context, tree, staged=None, nodes=None):
        if self.fault == "position":  # of drafted pairs alone: a shift of all positions changes nothing
            state = state if staged is None else dataclasses.replace(state, length=state.length + 1)
        return super().score(params, state, context, tree, staged, nodes)

    def commit(self, state, staged, length):
        new = super().commit(state, staged, length)
        return dataclasses.replace(new, length=new.length - 1) if self.fault == "a pair short" else new


class Parts:
    """An engine with a coupled chain of MTP steps, whose candidates (all tokens) tell the logits at every depth."""

    def __init__(self, fault="none"):
        target, self.params = fair()
        self.target = mtp.tapped(target)
        make = Shifted if fault == "shift" else HeadTree
        drafter = make(FaultyMtp(self.target, fault=fault), CHAIN, SURE)
        self.engine = Engine(self.target, 48, drafter=drafter, prefill_chunk=4, max_eos=2, max_stops=2, max_bias=2)
        self.given = EngineParams(self.params, mtp.params(self.params), free(WORDS), jnp.ones(1))

    def start(self):
        requests = stack([request(self.engine, p, BUDGET, 5, s) for s in SETTINGS for p in PROMPTS])
        return kit.jit(functools.partial(rows.init, self.engine))(self.given, requests)


@functools.cache
def whole(config):
    """Logits and contexts of the head over whole texts [B, T] and contexts [B, T, D] of which the first are true."""

    def run(params, tokens):
        return final_norm(config, params, forward_text(config, params, tokens).hidden)

    head = lambda params, context, tokens: model.forward_text(config, params, context, tokens)[0]  # noqa: E731
    return jax.jit(run, compiler_options=kit.FAST_COMPILE), jax.jit(head, compiler_options=kit.FAST_COMPILE)


def parity(parts, rounds=4):
    """The largest difference of drafted log-odds from teacher-forced ones, by depth; and each row's accepted count."""
    state, worst = parts.start(), np.zeros(K)
    target, head = whole(parts.target.config)
    for _ in range(rounds):
        before = np.asarray(state.rows.length)
        state = kit.go_on(parts.engine, parts.given, state, 1, False)
        seen, text = jax.device_get((state.drafter.seen, state.rows.tokens))
        batch, size = text.shape
        contexts = np.array(target(parts.params, text))
        drafted = seen.tokens[:, :, 0]
        after = np.roll(text, -1, axis=1)
        at = before - 2  # the pair of the last hidden state and the anchor
        row = np.arange(batch)
        for depth in range(K):
            out = jax.device_get(head(parts.params, contexts, after))
            z = out.logits[row, at + depth]
            order = np.argsort(seen.tokens[:, depth], axis=1)
            got = np.take_along_axis(seen.z[:, depth], order, axis=1)
            worst[depth] = max(worst[depth], np.abs(got - (z - z.max(1, keepdims=True))).max())
            contexts[row, at + depth + 1] = out.context[row, at + depth]
            after[row, at + depth + 1] = drafted[:, depth]
    return worst, np.asarray(state.rows.counters.accepted)


def test_serving_logits_are_teacher_forced_logits():
    worst, accepted = parity(Parts())
    assert worst.max() < 1e-5 * 20  # logits are of the order of 20
    assert len(set(accepted.tolist())) > 1


@pytest.mark.parametrize("fault", ("shift", "no norm", "position", "a pair short"))
def test_a_slip_in_the_mtp_inputs_is_caught(fault):
    worst, _ = parity(Parts(fault), rounds=1)
    assert worst[0 if fault != "position" else 1] > 1e-2
