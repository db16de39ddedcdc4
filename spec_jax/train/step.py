"""One training step: gradient, clipping, AdamW, with the learning rate given from outside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Int

Metrics = dict[str, Array]
Loss = Callable[[Any, Any], tuple[Array, Metrics]]


class TrainState(flax.struct.PyTreeNode):
    """What a run has to keep: the number of steps done, the parameters, the optimizer's state."""

    step: Int[Array, ""]
    params: Any
    optimizer: Any


def adamw(
    params: Any, clip: float = 1.0, weight_decay: float = 0.1, b1: float = 0.9, b2: float = 0.95
) -> optax.GradientTransformation:
    """AdamW (arXiv 1711.05101) without its learning rate; gradients are clipped to the norm `clip`.

    Only matrices and stacks of them decay: norms, biases and gates, which have one dimension, do not.
    """
    mask = jax.tree.map(lambda x: jnp.ndim(x) > 1, params)
    return optax.chain(
        optax.clip_by_global_norm(clip),
        optax.scale_by_adam(b1=b1, b2=b2),
        optax.add_decayed_weights(weight_decay, mask),
    )


def init(params: Any, optimizer: optax.GradientTransformation) -> TrainState:
    """The state before the first step."""
    return TrainState(step=jnp.zeros((), jnp.int32), params=params, optimizer=optimizer.init(params))


def make_step(
    loss: Loss, optimizer: optax.GradientTransformation
) -> Callable[[TrainState, Any, float], tuple[TrainState, Metrics]]:
    """The compiled step (state, batch, learning rate) -> (state, metrics); the state given is used up.

    `loss` maps (params, batch) to a scalar and metrics; the step adds the norm of the gradient before clipping.
    """

    def step(state: TrainState, batch: Any, rate: Any) -> tuple[TrainState, Metrics]:
        gradient, metrics = jax.grad(loss, has_aux=True)(state.params, batch)
        updates, optimizer_state = optimizer.update(gradient, state.optimizer, state.params)
        params = jax.tree.map(lambda p, u: p - rate * u, state.params, updates)
        metrics = {**metrics, "gradient": optax.tree.norm(gradient)}
        return TrainState(step=state.step + 1, params=params, optimizer=optimizer_state), metrics

    return jax.jit(step, donate_argnums=0)
