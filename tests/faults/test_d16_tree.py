"""D16: a tree's mask, its positions by depth, and the commit of the accepted path, for every node as the last accepted.

The tree is that of the fault report, [-1, -1, 0, 0, 1, 2], with the anchor in front as its root.
"""

import dataclasses
import itertools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from spec_jax import tree as trees
from spec_jax.engine.requests import request
from spec_jax.models.target import Output
from spec_jax.models.toy import AuditTarget
from spec_jax.tree import Draft, Tree
from tests.faults import kit
from tests.faults.oracle import generate
from tests.faults.test_d15_audit import LUT, PROMPTS, digest, logits, term

PARENT = (-1, 0, 0, 1, 1, 2, 3)
N, PLAIN, BUDGET = len(PARENT), -1, 24
PATHS = [[0], [0, 1], [0, 2], [0, 1, 3], [0, 1, 4], [0, 2, 5], [0, 1, 3, 6]]
DEPTH = [len(path) - 1 for path in PATHS]
# Two trees, each accepted up to each of its nodes, then three plain rounds.
GOALS = np.array([[*pair, PLAIN, PLAIN, PLAIN] for pair in itertools.product(range(N), repeat=2)])
ROUNDS, ROWS = GOALS.shape[1], len(GOALS)
TEXTS = [PROMPTS[r % 4] + generate(logits, PROMPTS[r % 4], BUDGET).tokens for r in range(ROWS)]
STARTS = [len(PROMPTS[r % 4]) for r in range(ROWS)]


@flax.struct.dataclass
class Seen:
    """Rounds so far; the tokens of each round's tree, and the tapped feature of each of its nodes."""

    round: Array
    tokens: Array
    hashes: Array


@flax.struct.dataclass
class Goals:
    text: Array
    goals: Array


@dataclasses.dataclass(frozen=True)
class Paths:
    """The tree with right tokens on the root path of the round's goal, and wrong ones everywhere else."""

    vocab_size: int = kit.WORDS
    nodes: int = N
    depth: int = max(DEPTH)

    def init(self, params: Any, batch: int, max_len: int) -> Seen:
        nothing = jnp.full((batch, ROUNDS, N), -1)
        return Seen(jnp.zeros(batch, jnp.int32), nothing, nothing)

    def tap(self, output: Output) -> Array | None:
        return output.features

    def observe(self, params: Any, state: Seen, committed: Any) -> Seen:
        if committed.tree is None:
            return state
        put = jax.vmap(lambda old, i, new: old.at[i].set(new, mode="drop"))
        tokens = put(state.tokens, state.round, committed.tree.tokens)
        return Seen(state.round + 1, tokens, put(state.hashes, state.round, committed.taps[..., 0]))

    def propose(self, params: Goals, state: Seen, context: Any) -> tuple[Draft, Seen]:
        index, depth = jnp.arange(N), jnp.asarray(DEPTH)
        on_path = jnp.asarray([[node in PATHS[goal] for node in range(N)] for goal in range(N)])

        def one(text, goals, n, anchor, length):
            goal = goals[jnp.minimum(n, ROUNDS - 1)]
            right = text.at[length + depth - 1].get(mode="fill", fill_value=0)
            tokens = jnp.where(on_path[goal], right, (right + 1 + index % 3) % self.vocab_size)
            return Tree(tokens.at[0].set(anchor), jnp.asarray(PARENT), (goal >= 0) | (index == 0))

        c = context
        tree = jax.vmap(one)(params.text, params.goals, state.round, c.anchor, c.length)
        return Draft(tree, jnp.ones(tree.tokens.shape)), state

    def insert(self, state: Seen, rows: Array, other: Seen) -> Seen:
        return jax.tree.map(lambda x, y: x.at[rows].set(y, mode="drop"), state, other)

    def release(self, state: Seen, rows: Array, tokens: Array, length: Array) -> Seen:
        return state


@dataclasses.dataclass(frozen=True)
class Faulty(AuditTarget):
    """The audit target with a fault in its tree."""

    fault: str = "none"

    def score(self, params, state, tree, staged=None, nodes=None):
        n = tree.parent.shape[1]
        reach = jax.vmap(trees.ancestors)(tree.parent)
        position = state.length[:, None] + reach.sum(-1) - 1
        if self.fault == "mask off by one":
            reach = jnp.roll(reach, 1, axis=2).at[:, :, 0].set(True) & (jnp.arange(n)[:, None] >= jnp.arange(n))
        if self.fault == "causal mask":
            reach = jnp.broadcast_to(jnp.arange(n)[:, None] >= jnp.arange(n), reach.shape)
        if self.fault == "position by index":
            position = state.length[:, None] + jnp.arange(n)
        terms = self.entry(tree.tokens, position)
        prefix = jnp.where(jnp.arange(state.slots.shape[1]) < state.length[:, None], state.slots, 0).sum(-1)
        h = (prefix[:, None] + jnp.where(reach, terms[:, None], 0).sum(-1)) % 97
        return Output(params[h], h[..., None]), terms, state

    def commit(self, state, staged, path, length):
        if self.fault == "path not gathered":
            path = jnp.broadcast_to(jnp.arange(path.shape[1]), path.shape)
        return super().commit(state, staged, path, length)


def run(target, max_rounds):
    e = dataclasses.replace(kit.engine(Paths(), log_probs=False), target=target)
    text = np.zeros((ROWS, kit.MAX_LEN), np.int32)
    for row, tokens in zip(text, TEXTS, strict=True):
        row[: len(tokens)] = tokens
    params = kit.engine_params(e, jnp.asarray(LUT), Goals(jnp.asarray(text), jnp.asarray(GOALS)))
    requests = kit.batch([request(e, PROMPTS[r % 4], BUDGET) for r in range(ROWS)], ROWS)
    return kit.run(e, params, requests, max_rounds)


def right(state, row, rounds):
    """Every node's hash, the accepted path of every round, the text, and the target's state."""
    length, at = int(state.rows.length[row]), STARTS[row]
    text = state.rows.tokens[row, :length].tolist()
    for i in range(rounds):
        tokens, hashes, goal = (
            x.tolist() for x in (state.drafter.tokens[row, i], state.drafter.hashes[row, i], GOALS[row, i])
        )
        for node in range(N if goal != PLAIN else 1):
            if hashes[node] != digest([*TEXTS[row][: at - 1], *[tokens[v] for v in PATHS[node]]]):
                return False
        at += 1 + (DEPTH[goal] if goal != PLAIN else 0)
    entries = [term(t, i) for i, t in enumerate(text[:-1])]
    return length == at and text == TEXTS[row][:at] and kit.holds_text(state, row, entries)


@pytest.mark.parametrize("target", [AuditTarget(kit.WORDS), Faulty(kit.WORDS)], ids=["toy", "ours, without a fault"])
@pytest.mark.parametrize("rounds", [1, 2, ROUNDS])
def test_every_node_as_the_last_accepted(target, rounds):
    state = run(target, rounds)
    assert all(right(state, row, rounds) for row in range(ROWS))
    assert state.rows.counters.accepted.tolist() == [
        sum(DEPTH[g] for g in goals[:rounds] if g != PLAIN) for goals in GOALS
    ]


def test_text_to_the_end():
    state = run(AuditTarget(kit.WORDS), kit.ALL)
    for row in range(ROWS):
        text = state.rows.tokens[row, : int(state.rows.length[row])].tolist()
        assert text == TEXTS[row]
        assert kit.holds_text(state, row, [term(t, i) for i, t in enumerate(text[:-1])])


@pytest.mark.parametrize("fault", ["mask off by one", "causal mask", "position by index"])
def test_a_fault_in_mask_or_position_is_caught_by_every_tree(fault):
    state = run(Faulty(kit.WORDS, fault=fault), 1)
    assert not any(right(state, row, 1) for row in range(ROWS))


def test_a_path_that_is_not_gathered_is_caught_unless_it_is_a_prefix_of_the_tree():
    state = run(Faulty(kit.WORDS, fault="path not gathered"), 1)
    assert [right(state, row, 1) for row in range(ROWS)] == [GOALS[row, 0] in (0, 1) for row in range(ROWS)]
