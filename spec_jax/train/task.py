"""From a drafter's training forward to the loss of a step: anchors, features, labels, laws, objective."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from spec_jax.train import anchors as anchoring
from spec_jax.train import branches, features, inside, objective, redraft, vocabulary
from spec_jax.train.features import Teacher
from spec_jax.train.loader import Batch, Texts
from spec_jax.train.objective import Metrics, Objective
from spec_jax.train.slots import Said, Slots
from spec_jax.train.tree_loss import Judge

LABELS = ("text", "rollout", "inside", "draft", "again")
"""Whose text the slots are to match (see `Task`)."""


@dataclasses.dataclass(frozen=True)
class Asked:
    """What a drafter is asked in training: R blocks in each of B texts.

    Attributes:
        tokens: the texts [B, T].
        features: the target's features [B, T, taps, hidden]: those of the forward's `taps`, maybe others behind them.
        anchors: positions [B, R], ascending; those that are not `real` are 0.
        real: which anchors count.
        blocks: the tokens [B, R, K] at the slots, for heads that read those before a slot (teacher forcing).
        key: a typed key, for dropout and the like.
        target: the target's parameters, for its embedding and head.
        shared: arrays of the drafter that are not trained.
        carried: what the blocks before these left (`drafters.block.carry`), all B * R of them; None: nothing.
    """

    tokens: Int[Array, "b t"]
    features: Float[Array, "b t taps hidden"]
    anchors: Int[Array, "b r"]
    real: Bool[Array, "b r"]
    blocks: Int[Array, "b r k"]
    key: Array
    target: Any
    shared: Any
    carried: Any = None


class Forward(Protocol):
    """What a drafter offers to be trained: its outputs at K slots behind each anchor, for given parameters."""

    @property
    def slots(self) -> int:
        """K."""
        ...

    @property
    def taps(self) -> tuple[int, ...]:
        """Which of the target's layers it reads, as `Llama.taps` counts them."""
        ...

    def __call__(self, params: Any, asked: Asked) -> Said:
        """The logits [B, R, K, draft vocabulary], and whatever else `Said` holds."""
        ...


class Trainable(Forward, Protocol):
    """A forward whose parameters have a beginning and, in the end, an engine's drafter and a directory to go to."""

    @property
    def config(self) -> Any:
        """The drafter's sizes and settings."""
        ...

    def init(self, key: Array, target_params: Any, kept: Any = None) -> Any:
        """The parameters before the first step; kept: the token ids of a reduced vocabulary."""
        ...

    def as_drafter(self, trained: Any, target_params: Any, shared: Any = None) -> Any:
        """The parameters as the drafter takes them."""
        ...

    def trained(self, params: Any) -> Any:
        """What is trained of a drafter's parameters."""
        ...

    def drafter(self, shape: Any) -> Any:
        """The drafter with drafts of a `Growth`."""
        ...

    def tapped(self, target: Any) -> Any:
        """The target with the taps that are read."""
        ...

    def save(self, directory: str | Path, params: Any, target: str, dtype: Any = None) -> None:
        """Write a drafter's parameters as a directory; `target` names what it was trained for."""
        ...


@dataclasses.dataclass(frozen=True)
class Task:
    """A drafter's training: static, hashable parts of the loss.

    Attributes:
        forward: the drafter's training forward.
        target: the target, with the forward's taps and, if laws are needed, its last layer's output as the last one
            (see `features.with_last`).
        objective: the objective.
        anchors: blocks per text (DFlash 512, DSpark 512, Domino 256).
        steps: steps of the whole training, for a curriculum.
        seed: of anchors and whatever the forward draws.
        labels: whose text the slots are to match. "text": the texts'. "rollout": the target's own greedy continuation
            behind every anchor, whatever the text says (ALR, arXiv 2609.38795), which costs K target passes over the
            anchors. "inside": the same, and blocks inside a rollout of every text, behind its tokens 2 .. K - 1 (IRA of
            the same paper, which draws these places; here each is taken once). "draft": the drafter's own tokens,
            judged by the target's law along them (on-policy distillation, with the divergence "reverse_kl" AdaFlash's).
            "again": the texts', and blocks behind where the drafts of the first ones are rejected (see `redraft`), for
            drafters that read what those leave, which take no other.
        eos: tokens that end a text, behind which nothing counts in a rollout or draft.
        kept: the name under which `Batch.shared` holds the draft vocabulary's ids, None for the whole vocabulary.
        reference: for an objective with `tree`, the name under which `Batch.shared` holds a frozen drafter's parameters
            (see `tree_loss`); None: there is none. A copy of the drafter itself gives no place an advantage.
    """

    forward: Forward
    target: Teacher
    objective: Objective
    anchors: int
    steps: int
    seed: int = 0
    labels: str = "text"
    eos: tuple[int, ...] = ()
    kept: str | None = None
    reference: str | None = None

    def __post_init__(self) -> None:
        """Check that the parts fit together."""
        for name in ("anchors", "steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: got {getattr(self, name)}, takes 1 or more")
        if self.labels not in LABELS:
            raise ValueError(f"labels: got {self.labels!r}, takes {', '.join(map(repr, LABELS))}")
        carries = getattr(getattr(self.forward, "config", None), "rejected", None)
        if (carries is not None) != (self.labels == "again"):
            raise ValueError(f"labels: got {self.labels!r} for a drafter with rejected={carries}; 'again' is for such")
        if self.labels == "inside" and self.forward.slots < 3:
            raise ValueError(f"labels: got 'inside' for {self.forward.slots} slots, takes a drafter of 3 or more")
        if self.reference is not None and not self.objective.tree:
            raise ValueError(f"reference: got {self.reference!r} with an objective without tree, takes None")
        if self.target.taps[: len(self.forward.taps)] != self.forward.taps:
            raise ValueError(f"target: got taps {self.target.taps}, takes the forward's first, {self.forward.taps}")

    def loss(self, params: Any, batch: Batch) -> tuple[Array, Metrics]:
        """The loss of a batch and its metrics, as `step.make_step` takes it.

        Raises ValueError for texts with weights, which group tree optimisation knows nothing of.
        """
        if self.objective.tree > 0 and batch.texts.weight is not None:
            raise ValueError("texts: got weights with an objective with tree, takes texts without")
        slots, said, asked = self.run(params, batch)
        total, metrics = self.objective(slots, said, batch.step / self.steps)
        if self.objective.tree > 0:
            judge = Judge(self.target, self.objective.tree_nodes, self.objective.tree_children)
            logits, r = said.logits.reshape(-1, *said.logits.shape[-2:]), asked.anchors.size
            logits = logits[:r].reshape(*asked.anchors.shape, *logits.shape[1:])
            old = None
            if self.reference is not None:
                old = lax.stop_gradient(self.forward(batch.shared[self.reference], asked).logits)
            kept = None if self.kept is None else batch.shared[self.kept]
            real = asked.real
            if said.kept is not None:
                real &= said.kept.reshape(-1, said.kept.shape[-1])[:r].all(-1).reshape(real.shape)
            given = (batch.target, asked.tokens, asked.anchors, real, kept)
            part, reward = judge(logits, old, *given)
            total += self.objective.tree * part
            metrics |= {"loss": total, "tree_loss": part, "tree_reward": reward}
        return total, metrics | objective.accuracy(slots)

    def slots(self, params: Any, batch: Batch) -> tuple[Slots, Said]:
        """What the drafter says in a batch, beside what is right: [B, R] blocks, or with others inside [N]."""
        return self.run(params, batch)[:2]

    def run(self, params: Any, batch: Batch) -> tuple[Slots, Said, Asked]:
        """`slots`, and what was asked behind the anchors in the texts."""
        texts, t = batch.texts, batch.texts.tokens.shape[1]
        key = jax.random.fold_in(jax.random.key(self.seed), batch.step)
        draw, inner, sample = jax.random.split(key, 3)
        mask = texts.mask & (jnp.arange(t) < texts.length[:, None])
        keys = jax.random.split(draw, mask.shape[0])
        places, real = jax.vmap(lambda k, m: anchoring.random_anchors(k, m, self.anchors))(keys, mask)
        found = texts.features
        if found is None:
            found = features.read(self.target, batch.target, texts.tokens, texts.length)
        found = lax.stop_gradient(found.astype(jnp.float32))
        label = jax.vmap(functools.partial(anchoring.labels, slots=self.forward.slots))
        blocks, scored = label(texts.tokens, mask, places, real)

        def asked(blocks: Array) -> Asked:
            return Asked(texts.tokens, found, places, real, blocks, inner, batch.target, batch.shared)

        kept = None if self.kept is None else batch.shared[self.kept]
        law = grown = None
        if self.labels in ("text", "again"):
            if self.objective.needs_law:
                law = self._law(batch, found[:, :, -1], places)
        elif self.labels in ("rollout", "inside"):
            grown = branches.rollout(self.target, batch.target, texts.tokens, places, self.forward.slots)
            blocks, law = grown.tokens, grown.logits
            scored = real[..., None] & branches.alive(blocks, self.eos)
        else:
            logits = lax.stop_gradient(self.forward(params, asked(blocks)).logits)
            drafted = jax.random.categorical(sample, logits).astype(jnp.int32)
            blocks = drafted if kept is None else kept[drafted]
            law = branches.read(self.target, batch.target, texts.tokens, places, blocks).logits
            scored = real[..., None] & branches.alive(blocks, self.eos)
        given = asked(blocks)
        said = self.forward(params, given)
        right = self._right(texts, said, blocks, scored, law, kept)
        if self.labels == "again":
            drafter: Any = self.forward
            within, scored = redraft.ask(given, said, scored, mask, self.target, drafter.config, kept)
            law = self._law(batch, found[:, :, -1], within.anchors) if self.objective.needs_law else None
        elif self.labels == "inside":
            assert grown is not None
            within, law, scored = inside.ask(given, grown, sample, self.eos)
        else:
            return right, said, given
        rest = self.forward(params, within)
        more = self._right(texts, rest, within.blocks, scored, law, kept)
        flat = lambda x: x.reshape(-1, *x.shape[given.anchors.ndim :])  # noqa: E731
        join = lambda a, b: jnp.concatenate([flat(a), flat(b)])  # noqa: E731
        return jax.tree.map(join, right, more), jax.tree.map(join, said, rest), given

    def _right(
        self, texts: Texts, said: Said, blocks: Array, scored: Array, law: Array | None, kept: Array | None
    ) -> Slots:
        weight = None if texts.weight is None else jnp.broadcast_to(texts.weight[:, None], blocks.shape[:2])
        law = None if law is None else lax.stop_gradient(vocabulary.restrict(law, kept))
        scored = scored if said.kept is None else scored & said.kept
        return Slots.of(said.logits, vocabulary.to_draft(blocks, kept), scored, law, weight)

    def _law(self, batch: Batch, hidden: Float[Array, "b t hidden"], places: Int[Array, "b r"]) -> Array:
        """The target's logits for every slot, from the last layer's output at the token before it."""
        k, t = self.forward.slots, hidden.shape[1]
        at = jnp.minimum(places[..., None] + jnp.arange(k), t - 1).reshape(places.shape[0], -1)
        rows = jax.vmap(lambda h, at: h[at])(hidden, at)
        logits = self.target.logits(batch.target, rows)
        return logits.reshape(*places.shape, k, -1)


def measure_loss(task: Task, batches: Any, count: int) -> Callable[[Any], dict[str, float]]:
    """A held-out measure for `fit`: the loss and metrics over the first `count` batches, named held_out_*."""
    step = jax.jit(lambda params, batch: task.loss(params, batch)[1])

    def measure(params: Any) -> dict[str, float]:
        rows = [jax.device_get(step(params, batches[i])) for i in range(count)]
        return {f"held_out_{name}": float(sum(row[name] for row in rows) / count) for name in rows[0]}

    return measure
