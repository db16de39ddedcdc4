"""The short depthwise convolution of recurrent layers, along a text or along each node's ancestors."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def windows(parent: Int[Array, "n"], width: int) -> Int[Array, "n width"]:
    """The inputs that each node's convolution reads, in the order of the text.

    Indices into the width - 1 inputs before the tree followed by the nodes' own.
    """
    at, columns = jnp.arange(parent.shape[0]), []
    for _ in range(width):
        columns.append(width - 1 + at)
        at = jnp.where(at >= 0, parent[jnp.maximum(at, 0)], at - 1)  # below 0: inputs before the tree, counted back
    return jnp.stack(columns[::-1], axis=-1)


def along_tree(
    before: Float[Array, "b before channels"],
    inputs: Float[Array, "b m channels"],
    window: Int[Array, "b n width"],
    weight: Float[Array, "width channels"],
) -> Float[Array, "b n channels"]:
    """silu of the convolution of n nodes, whose windows are among `before` and m nodes' inputs."""
    rows = jnp.concatenate([before, inputs], axis=1)
    taken = [jnp.take_along_axis(rows, window[:, :, w, None], axis=1) for w in range(weight.shape[0])]
    return _convolve(taken, weight)


def along_text(
    before: Float[Array, "b before channels"],
    inputs: Float[Array, "b t channels"],
    weight: Float[Array, "width channels"],
) -> Float[Array, "b t channels"]:
    """silu of the convolution of a text that follows the inputs `before`."""
    rows, t = jnp.concatenate([before, inputs], axis=1), inputs.shape[1]
    return _convolve([rows[:, w : w + t] for w in range(weight.shape[0])], weight)


def last(
    before: Float[Array, "b before channels"], inputs: Float[Array, "b t channels"], length: Int[Array, "b"]
) -> Float[Array, "b before channels"]:
    """The inputs before the next token, after the first `length` of `inputs`."""
    rows = jnp.concatenate([before, inputs.astype(before.dtype)], axis=1)
    at = length[:, None] + jnp.arange(before.shape[1])
    return jnp.take_along_axis(rows, at[:, :, None], axis=1)


def _convolve(taken: list[Array], weight: Array) -> Array:
    out = sum(x.astype(jnp.float32) * w.astype(jnp.float32) for x, w in zip(taken, weight, strict=True))
    return jax.nn.silu(out).astype(taken[0].dtype)
