"""All of a training but its texts, made before these are written: what a recipe asks in vain is refused first."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from drafting import asks, begun
from spec_jax.engine.engine import Engine
from spec_jax.models.load import LoadedTarget
from spec_jax.topology.growth import Growth
from spec_jax.train import block, features, mesh, vocabulary
from spec_jax.train.loader import Batch, Texts
from spec_jax.train.recipe import Recipe, Training
from spec_jax.train.task import Task, Trainable

Prompt = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Plan:
    """A drafter's training forward, what it begins with, its loss, and the engine and prompts that it is measured on.

    teacher: the target with all taps that the loss reads. mesh: None on one device.
    """

    forward: Trainable
    earlier: begun.Earlier
    teacher: Any
    task: Task
    engine: Engine
    held_out: list[Prompt]
    mesh: Any

    @classmethod
    def of(cls, recipe: Recipe, model: LoadedTarget, folder: Path, devices: int | None = None) -> Plan:
        """Make it; `folder` is what the recipe's paths are relative to.

        Raises ValueError, or FileNotFoundError, for whatever the first training step and the first measure would.
        """
        training, forward = recipe.training, recipe.drafter.forward(model.target.config)
        asks.check(model, recipe.data)
        shape = Growth(nodes=forward.slots + 1, depth=forward.slots, width=1, children=1, candidates=16)
        drafter, tapped = forward.drafter(shape), forward.tapped(model.target)
        teacher = features.with_last(tapped, model.target.config.num_layers)
        earlier = begun.Earlier.read(training, forward, model, folder)
        small = getattr(forward.config, "draft_vocab_size", None)
        task = Task(
            forward,
            teacher,
            recipe.objective,
            training.anchors,
            training.steps,
            training.seed,
            training.labels,
            model.eos_token_ids,
            None if small is None else block.KEPT,
            None if earlier.reference is None else begun.REFERENCE,
        )
        over = None if devices in (None, 1) else mesh.data_mesh(devices)
        mesh.split(np.zeros(training.batch), over)
        _trace(task, earlier, _shared(forward, earlier, model, []), training, model)
        prompts = asks.held_out_prompts(model, recipe.held_out, recipe.data.longest_prompt)
        longest = max(len(prompt) for prompt in prompts) + recipe.held_out.max_new_tokens
        engine = Engine(tapped, max_len=longest, drafter=drafter)
        return cls(forward, earlier, teacher, task, engine, prompts, over)

    def shared(self, model: LoadedTarget, written: list[np.ndarray]) -> dict[str, Any]:
        """What the loss reads beside the trained parameters (`Batch.shared`), for texts of the target's own.

        A reduced vocabulary is that of earlier weights, or the most frequent tokens of the texts.
        """
        return _shared(self.forward, self.earlier, model, written)


def _shared(forward: Trainable, earlier: begun.Earlier, model: LoadedTarget, written: list[np.ndarray]) -> Any:
    shared, kept = {}, earlier.kept
    small = getattr(forward.config, "draft_vocab_size", None)
    if small is not None and kept is None:
        counts = vocabulary.count(written, model.target.vocab_size)
        kept = vocabulary.most_frequent(counts, small, model.eos_token_ids)
    if kept is not None:
        shared[block.KEPT] = jnp.asarray(kept)
    table = forward.counted(written) if isinstance(forward, block.BlockForward) else None
    if table is not None:
        shared[block.TABLE] = table
    if earlier.reference is not None:
        shared[begun.REFERENCE] = earlier.reference
    return shared


def _trace(task: Task, earlier: begun.Earlier, shared: Any, training: Training, model: LoadedTarget) -> None:
    """The gradient of the loss for shapes alone, as a step computes it."""
    forward: Any = task.forward
    make = lambda key, target: forward.init(key, target, shared.get(block.KEPT))  # noqa: E731
    begin = earlier.begin or jax.eval_shape(make, jax.random.key(0), model.params)
    rows, of = (training.batch, training.length), jax.ShapeDtypeStruct

    def gradient(params: Any, tokens: Any, mask: Any, length: Any, step: Any) -> Any:
        batch = Batch(Texts(tokens, mask, length), step, model.params, shared or None)
        return jax.grad(task.loss, has_aux=True)(params, batch)

    arrays = of(rows, jnp.int32), of(rows, bool), of(rows[:1], jnp.int32), of((), jnp.int32)
    jax.eval_shape(gradient, begin, *arrays)
