"""A decode of one request, a round at a time, written down: the draft, what became of every node, and why."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from spec_jax.control.budget import Around
from spec_jax.engine import rows
from spec_jax.engine.engine import Engine, EngineParams, Rule
from spec_jax.engine.round import decode_round
from spec_jax.engine.state import EngineState, Finish
from spec_jax.noise import Key
from spec_jax.tree import Draft
from spec_jax.verify.scores import Scores
from spec_jax.verify.verdict import Verdict

Fate = Literal["root", "accepted", "rejected", "unreached", "cut", "trimmed"]
Kind = Literal["accepted", "correction", "bonus"]


@dataclasses.dataclass(frozen=True)
class Node:
    """A drafted node, or the anchor (parent -1).

    fate: "rejected" behind an accepted parent, "unreached" behind a node that was not accepted, "cut" not verified,
    "trimmed" accepted behind the end of the text.
    """

    token: int
    parent: int
    confidence: float
    fate: Fate


@dataclasses.dataclass(frozen=True)
class Step:
    """One place of the path: behind `node` the rule emitted `token`, and the target itself would have chosen `choice`.

    The two differ under rules that do not take the target's choice (p/q tests, relaxed rules). Probabilities are the
    target's at temperature 1, after penalties, bans and constraint. kind: the token was drafted and accepted, stands
    in place of rejected children ("correction"), or behind a node without verified children ("bonus"). kept: it
    belongs to the text (a budget, end of sequence or stop may end the text inside a round).
    """

    node: int
    token: int
    choice: int
    probability: float
    choice_probability: float
    kind: Kind
    kept: bool


@dataclasses.dataclass(frozen=True)
class Round:
    """position: text index of the first token emitted; width: nodes verified; finish: "running", or why the text ended.

    nodes are the draft's valid ones, parents first; Node.parent and Step.node are indices among them.
    """

    position: int
    width: int
    nodes: tuple[Node, ...]
    steps: tuple[Step, ...]
    finish: str

    @property
    def kept(self) -> tuple[int, ...]:
        """The tokens that this round added to the text."""
        return tuple(step.token for step in self.steps if step.kept)


@flax.struct.dataclass
class ExplainedVerdict(Verdict):
    """A verdict, with the target's own choice at every node of the path, and both tokens' probabilities there."""

    choices: Int[Array, "*b m"]
    probabilities: Float[Array, "*b m"]
    choice_probabilities: Float[Array, "*b m"]


@dataclasses.dataclass(frozen=True)
class Explained:
    """A rule that also tells what the target would have chosen where it went. Its verdicts are the rule's."""

    rule: Rule

    def __call__(self, key: Key, draft: Draft, scores: Scores, m: int) -> ExplainedVerdict:
        """The rule's verdict, explained."""
        verdict = self.rule(key, draft, scores, m)

        def step(i: Array, carry: Any) -> Any:
            history, choices, ours, own = carry
            z, token = scores.z(verdict.path[i], history), verdict.tokens[i]
            choice, p = scores.choose(z, key, scores.position + i), jax.nn.softmax(z)
            carry = choices.at[i].set(choice), ours.at[i].set(p[token]), own.at[i].set(p[choice])
            return history.step(jnp.maximum(token, 0), scores.constraint), *carry

        carry = (scores.history, jnp.zeros(m, jnp.int32), jnp.zeros(m), jnp.zeros(m))
        _, *found = lax.fori_loop(0, verdict.accepted + 1, step, carry)
        given = {f.name: getattr(verdict, f.name) for f in dataclasses.fields(Verdict)}
        return ExplainedVerdict(**given, choices=found[0], probabilities=found[1], choice_probabilities=found[2])


@flax.struct.dataclass
class Seen:
    """What a round decided: the draft, the width that was verified, and the verdict."""

    draft: Draft
    width: Int[Array, ""]
    verdict: ExplainedVerdict


@dataclasses.dataclass(frozen=True)
class _Recording(Around):
    """A controller that keeps what it is told about the round beside its own state."""

    def observe(self, state: Any, draft: Draft, width: Array, verdict: Verdict, active: Array) -> Any:
        after = super().observe(state, draft, width, verdict, active)
        assert isinstance(verdict, ExplainedVerdict)
        return after, Seen(draft, width, verdict)


def traced_round(engine: Engine, params: EngineParams, state: EngineState) -> tuple[EngineState, Seen]:
    """`decode_round`, and what it decided. Batched and pure, as the round is."""
    watched = dataclasses.replace(engine, controller=_Recording(engine.controller), rule=Explained(engine.rule))
    after = decode_round(watched, params, state)
    controller, seen = after.controller
    return dataclasses.replace(after, controller=controller), seen


def trace(engine: Engine, params: EngineParams, request: rows.Requests) -> Iterator[Round]:
    """The rounds of one request, one by one, until its text ends.

    The host is touched every round, so a trace says nothing about speed.

    Raises:
        ValueError: for a batch of more than one request.
    """
    if request.length.shape[0] != 1:
        raise ValueError(f"request: got a batch of {request.length.shape[0]}, takes one request")
    state = jax.jit(functools.partial(rows.init, engine))(params, request)
    advance = jax.jit(functools.partial(traced_round, engine), donate_argnums=1)
    while bool(state.rows.running[0]):
        position = int(state.rows.length[0])
        state, seen = advance(params, state)
        kept, finish = int(state.rows.length[0]) - position, Finish(int(state.rows.finish[0]))
        yield _round(jax.device_get(jax.tree.map(lambda x: x[0] if jnp.ndim(x) else x, seen)), position, kept, finish)


def cut(rounds: Sequence[Round], tokens: int, finish: str) -> list[Round]:
    """The rounds of a text's first tokens, for a text that ended earlier than the trace (at a stop string)."""
    result: list[Round] = []
    for r in rounds:
        if tokens <= 0:
            break
        steps = tuple(dataclasses.replace(s, kept=s.kept and i < tokens) for i, s in enumerate(r.steps))
        result.append(dataclasses.replace(r, steps=steps))
        tokens -= len(r.kept)
    if result:
        result[-1] = dataclasses.replace(result[-1], finish=finish)
    return result


def as_dict(r: Round) -> dict[str, Any]:
    """A round as plain JSON values."""
    return dataclasses.asdict(r)


def from_dict(values: dict[str, Any]) -> Round:
    """The round that `as_dict` wrote, before or after its way through JSON."""
    nodes, steps = (tuple(make(**x) for x in values[name]) for name, make in (("nodes", Node), ("steps", Step)))
    return Round(**{**values, "nodes": nodes, "steps": steps})


def _round(seen: Seen, position: int, kept: int, finish: Finish) -> Round:
    tree, verdict, width = seen.draft.tree, seen.verdict, int(seen.width)
    accepted, path = int(verdict.accepted), verdict.path.tolist()
    valid = np.flatnonzero(tree.valid).tolist()
    place = {node: i for i, node in enumerate(valid)}
    depth = {node: i for i, node in enumerate(path[: accepted + 1])}

    def fate(node: int) -> Fate:
        if node == 0:
            return "root"
        if node in depth:
            return "accepted" if depth[node] <= kept else "trimmed"
        if node >= width:
            return "cut"
        return "rejected" if int(tree.parent[node]) in depth else "unreached"

    def kind(i: int) -> Kind:
        if i < accepted:
            return "accepted"
        return "correction" if any(tree.parent[v] == path[i] for v in valid if 0 < v < width) else "bonus"

    nodes = [
        Node(
            token=int(tree.tokens[v]),
            parent=place.get(int(tree.parent[v]), -1) if v else -1,
            confidence=float(seen.draft.confidence[v]),
            fate=fate(v),
        )
        for v in valid
    ]
    steps = [
        Step(
            node=place[path[i]],
            token=int(verdict.tokens[i]),
            choice=int(verdict.choices[i]),
            probability=float(verdict.probabilities[i]),
            choice_probability=float(verdict.choice_probabilities[i]),
            kind=kind(i),
            kept=i < kept,
        )
        for i in range(accepted + 1)
    ]
    return Round(position, width, tuple(nodes), tuple(steps), finish.name.lower())
