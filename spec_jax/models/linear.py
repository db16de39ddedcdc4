"""Linear leaves of a parameter tree: dense, LoRA, weight-quantised or in place, all called the same way."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import flax.struct
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Int8


@flax.struct.dataclass
class Dense:
    """A dense map x @ kernel + bias.

    The kernel is stored [in, out]: XLA's CPU matrix product for a few rows is up to 1.4 times faster in that layout.
    """

    kernel: Float[Array, "*l in out"]
    bias: Float[Array, "*l out"] | None = None

    def __call__(self, x: Float[Array, "rows in"]) -> Float[Array, "rows out"]:
        """Apply the map to rows."""
        y = x @ self.kernel
        return y if self.bias is None else y + self.bias


@flax.struct.dataclass
class LoRA:
    """A base leaf plus a low-rank update: base(x) + scale * (x @ a) @ b (arXiv 2106.09685, eq. 3)."""

    base: Dense | Int8Dense
    a: Float[Array, "in rank"]
    b: Float[Array, "rank out"]
    scale: Float[Array, ""]

    def __call__(self, x: Float[Array, "rows in"]) -> Float[Array, "rows out"]:
        """Apply the map to rows."""
        return self.base(x) + ((x @ self.a) @ self.b) * self.scale.astype(x.dtype)


@flax.struct.dataclass
class Int8Dense:
    """A dense map with int8 weights and one scale per output: (x @ kernel) * scale + bias."""

    kernel: Int8[Array, "*l in out"]
    scale: Float[Array, "*l out"]
    bias: Float[Array, "*l out"] | None = None

    def __call__(self, x: Float[Array, "rows in"]) -> Float[Array, "rows out"]:
        """Apply the map to rows."""
        y = (x @ self.kernel.astype(x.dtype)) * self.scale.astype(x.dtype)
        return y if self.bias is None else y + self.bias


@flax.struct.dataclass
class Projection:
    """A linear leaf over an einsum kernel whose first `inputs` axes are contracted, maybe with a bias and a LoRA pair.

    So other libraries' arrays are used as they are, without a copy. The pair is qwix's: a [inputs .., rank] and
    b [rank, outputs ..], whose product counts `scale` times (alpha / rank).
    """

    kernel: Float[Array, "..."]
    bias: Float[Array, "out"] | None = None
    a: Float[Array, "..."] | None = None
    b: Float[Array, "..."] | None = None
    inputs: int = flax.struct.field(pytree_node=False, default=1)
    scale: float = flax.struct.field(pytree_node=False, default=0.0)

    def __call__(self, x: Float[Array, "rows in"]) -> Float[Array, "rows out"]:
        """Apply the map to rows."""
        size = math.prod(self.kernel.shape[: self.inputs])
        cast = lambda w: w.astype(x.dtype)  # noqa: E731
        y = x @ cast(self.kernel).reshape(size, -1)
        if self.a is not None and self.b is not None:
            rank = self.b.shape[0]
            y = y + ((x @ cast(self.a).reshape(size, rank)) @ cast(self.b).reshape(rank, -1)) * self.scale
        return y if self.bias is None else y + cast(self.bias)


@flax.struct.dataclass
class RowEmbedding:
    """An embedding stored [vocab, hidden] that reads like one stored [hidden, vocab]: `[:, ids]` and `x @ it`."""

    table: Float[Array, "vocab hidden"]
    dtype: Any = flax.struct.field(pytree_node=False)

    def __getitem__(self, index: tuple[slice, Int[Array, "n"]]) -> Float[Array, "hidden n"]:
        """Columns of the given tokens."""
        return self.table[index[1]].astype(self.dtype).T

    def __rmatmul__(self, x: Float[Array, "rows hidden"]) -> Float[Array, "rows vocab"]:
        """The tied head."""
        return x @ self.table.astype(self.dtype).T


Linear = Dense | LoRA | Int8Dense | Projection

if TYPE_CHECKING:
    Embedding = Array
else:
    Embedding = Float[Array, "hidden vocab"] | RowEmbedding
    """An embedding stored [hidden, vocab], or what reads like one."""


def quantize_int8(dense: Dense) -> Int8Dense:
    """Round a dense leaf to int8 with a symmetric scale per output column; the error is at most half a scale step.

    Of stacked layers (a leading axis more) each has scales of its own.
    """
    peak = jnp.max(jnp.abs(dense.kernel), axis=-2)
    scale = jnp.where(peak > 0, peak / 127.0, 1.0).astype(dense.kernel.dtype)
    return Int8Dense(jnp.round(dense.kernel / scale[..., None, :]).astype(jnp.int8), scale, dense.bias)
