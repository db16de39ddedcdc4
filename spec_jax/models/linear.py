"""Linear leaves of a parameter tree: dense, LoRA, weight-quantised, in place or a part, all called the same way."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, Int8

from pallas_kernels.platform import platform

T = TypeVar("T")


@flax.struct.dataclass
class Dense:
    """A dense map x @ kernel + bias, the kernel stored [in, out]."""

    kernel: Float[Array, "*l in out"]
    bias: Float[Array, "*l out"] | None = None

    def __call__(self, x: Float[Array, "rows in"]) -> Float[Array, "rows out"]:
        """Apply the map to rows."""
        y = x @ self.kernel
        return y if self.bias is None else y + self.bias

    def columns(self, ids: Int[Array, "*b"]) -> Float[Array, "in *b"]:
        """The kernel's columns of the given outputs."""
        return self.kernel[:, ids]


@flax.struct.dataclass
class TransposedDense:
    """`Dense` with its kernel stored [out, in]: products of a few rows are up to 1.7 times faster so on a CPU."""

    weight: Float[Array, "out in"]
    bias: Float[Array, "out"] | None = None

    @property
    def kernel(self) -> Float[Array, "in out"]:
        """The kernel as a `Dense` has it."""
        return self.weight.T

    def __call__(self, x: Float[Array, "rows in"]) -> Float[Array, "rows out"]:
        """Apply the map to rows."""
        y = _rows_by(x, self.weight)
        return y if self.bias is None else y + self.bias

    def columns(self, ids: Int[Array, "*b"]) -> Float[Array, "in *b"]:
        """The kernel's columns of the given outputs."""
        return jnp.moveaxis(self.weight[ids], -1, 0)


PLAIN = (Dense, TransposedDense)


@flax.struct.dataclass
class LoRA:
    """A base leaf plus a low-rank update: base(x) + scale * (x @ a) @ b (arXiv 2106.09685, eq. 3)."""

    base: Dense | TransposedDense | Int8Dense
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
    b [rank, outputs ..], whose product counts `scale` times (alpha / rank). Each output of an int8 kernel counts `step`
    times.
    """

    kernel: Float[Array, "..."] | Int8[Array, "..."]
    bias: Float[Array, "out"] | None = None
    a: Float[Array, "..."] | None = None
    b: Float[Array, "..."] | None = None
    step: Float[Array, "out"] | None = None
    inputs: int = flax.struct.field(pytree_node=False, default=1)
    scale: float = flax.struct.field(pytree_node=False, default=0.0)

    def __call__(self, x: Float[Array, "rows in"]) -> Float[Array, "rows out"]:
        """Apply the map to rows."""
        size = math.prod(self.kernel.shape[: self.inputs])
        cast = lambda w: w.astype(x.dtype)  # noqa: E731
        y = x @ cast(self.kernel).reshape(size, -1)
        y = y if self.step is None else y * cast(self.step)
        if self.a is not None and self.b is not None:
            rank = self.b.shape[0]
            y = y + ((x @ cast(self.a).reshape(size, rank)) @ cast(self.b).reshape(rank, -1)) * self.scale
        return y if self.bias is None else y + cast(self.bias)


@flax.struct.dataclass
class ByHead:
    """A linear leaf over kernels [heads, in, head_dim] as they are, or over one of several stacked on a first axis.

    Each output of an int8 kernel counts `step` times.
    """

    kernel: Float[Array, "..."] | Int8[Array, "..."]
    part: int | None = flax.struct.field(pytree_node=False, default=None)
    step: Float[Array, "out"] | None = None

    def __call__(self, x: Float[Array, "rows in"]) -> Float[Array, "rows out"]:
        """Apply the map to rows."""
        kernel = self.kernel if self.part is None else self.kernel[self.part]
        y = jnp.einsum("ri,nid->rnd", x, kernel.astype(x.dtype)).reshape(x.shape[0], -1)
        return y if self.step is None else y * self.step.astype(x.dtype)


@flax.struct.dataclass
class RowEmbedding:
    """An embedding stored [vocab, hidden] that reads like one stored [hidden, vocab]: `[:, ids]` and `x @ it`."""

    table: Float[Array, "vocab hidden"]
    dtype: Any = flax.struct.field(pytree_node=False)

    @property
    def shape(self) -> tuple[int, int]:
        """That of the embedding it reads like."""
        return self.table.shape[1], self.table.shape[0]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """The embedding it reads like."""
        x = np.asarray(self.table, dtype).T
        return x.copy() if copy else x

    def __getitem__(self, index: tuple[slice, Int[Array, "n"]]) -> Float[Array, "hidden n"]:
        """Columns of the given tokens."""
        return self.table[index[1]].astype(self.dtype).T

    def __rmatmul__(self, x: Float[Array, "rows hidden"]) -> Float[Array, "rows vocab"]:
        """The tied head."""
        return self.map(x)

    @property
    def map(self) -> TransposedDense:
        """The tied head as a linear leaf."""
        return TransposedDense(self.table.astype(self.dtype))


@flax.struct.dataclass
class Summed:
    """A device's rows of a map that is split by its inputs: the parts' outputs are summed over a mesh axis."""

    part: Dense | TransposedDense | LoRA | Int8Dense | Projection
    axis: str = flax.struct.field(pytree_node=False)

    def __call__(self, x: Float[Array, "rows in"]) -> Float[Array, "rows out"]:
        """Apply the whole map to the device's inputs; its bias counts once."""
        part, bias = _without_bias(self.part)
        y = lax.psum(part(x), self.axis)
        return y if bias is None else y + bias.astype(y.dtype)


@flax.struct.dataclass
class Picked:
    """`size` outputs of a whole map, those of the head that `share` devices next to each other on an axis work with."""

    whole: Dense | TransposedDense | LoRA | Int8Dense | Projection
    size: int = flax.struct.field(pytree_node=False)
    share: int = flax.struct.field(pytree_node=False)
    axis: str = flax.struct.field(pytree_node=False)

    def __call__(self, x: Float[Array, "rows in"]) -> Float[Array, "rows size"]:
        """Apply the map to rows."""
        start = lax.axis_index(self.axis) // self.share * self.size
        return lax.dynamic_slice_in_dim(self.whole(x), start, self.size, axis=1)


@flax.struct.dataclass
class SplitEmbedding:
    """A device's part of an embedding that is split by the vocabulary, read like a whole one.

    As a head it gives the logits of the device's own tokens.
    """

    part: Float[Array, "hidden own"] | RowEmbedding
    axis: str = flax.struct.field(pytree_node=False)

    @property
    def dtype(self) -> Any:
        """That of the embeddings."""
        return self.part.dtype

    def __getitem__(self, index: tuple[slice, Int[Array, "n"]]) -> Float[Array, "hidden n"]:
        """Columns of the given tokens, from the devices that have them."""
        own = self.part.table.shape[0] if isinstance(self.part, RowEmbedding) else self.part.shape[1]
        at = index[1] - lax.axis_index(self.axis) * own
        columns = self.part[:, jnp.clip(at, 0, own - 1)]
        return lax.psum(jnp.where((at >= 0) & (at < own), columns, 0), self.axis)

    def __rmatmul__(self, x: Float[Array, "rows hidden"]) -> Float[Array, "rows own"]:
        """The tied head, for the device's own tokens."""
        return x @ self.part


Linear = Dense | TransposedDense | LoRA | Int8Dense | Projection | ByHead | Summed | Picked

if TYPE_CHECKING:
    Embedding = Array
else:
    Embedding = Float[Array, "hidden vocab"] | RowEmbedding | SplitEmbedding
    """An embedding stored [hidden, vocab], or what reads like one."""


def transposed(params: T, swap: Callable[[Any], Any]) -> T:
    """A model's parameters, layers in a tuple, with the embedding and every dense kernel stored [out, in].

    Args:
        params: a Llama's or a Qwen's.
        swap: the transpose of an array of theirs.
    """
    params = turned(params, swap)
    embedding: Any = params.embedding  # type: ignore[attr-defined]
    return dataclasses.replace(params, embedding=RowEmbedding(swap(embedding), embedding.dtype))  # type: ignore[type-var]


def turned(params: T, swap: Callable[[Any], Any]) -> T:
    """A part of a model's parameters with every dense kernel stored [out, in]; see `transposed`."""
    dense = lambda x: isinstance(x, Dense)  # noqa: E731
    one = lambda x: TransposedDense(swap(x.kernel), x.bias) if dense(x) else x  # noqa: E731
    return jax.tree.map(one, params, is_leaf=dense)


def straight(params: T) -> T:
    """The same parameters with every kernel stored [in, out], as `transposed` found them."""
    turned = lambda x: isinstance(x, TransposedDense | RowEmbedding)  # noqa: E731

    def one(leaf: Any) -> Any:
        if isinstance(leaf, TransposedDense):
            return Dense(leaf.kernel, leaf.bias)
        return leaf.table.astype(leaf.dtype).T if isinstance(leaf, RowEmbedding) else leaf

    return jax.tree.map(one, params, is_leaf=turned)


def _rows_by(x: Float[Array, "rows in"], weight: Float[Array, "out in"]) -> Float[Array, "rows out"]:
    if x.shape[0] == 1 or platform() != "cpu":
        return x @ weight.T
    # The weights stay the left operand, which is what is faster: without the barrier XLA would swap both.
    return lax.optimization_barrier(lax.dot_general(weight, x, (((1,), (1,)), ((), ())))).T


def _without_bias(leaf: Any) -> tuple[Any, Array | None]:
    if isinstance(leaf, LoRA):
        base, bias = _without_bias(leaf.base)
        return dataclasses.replace(leaf, base=base), bias
    return dataclasses.replace(leaf, bias=None), leaf.bias


def quantize_int8(dense: Dense | TransposedDense | Projection | ByHead) -> Int8Dense | Projection | ByHead:
    """Round a dense leaf to int8 with a symmetric scale per output column; the error is at most half a scale step.

    Of stacked layers (a leading axis more) each has scales of its own. Einsum kernels keep their form (and are left as
    they are if they are int8 already), so that they lie as they did on a mesh.
    """
    if isinstance(dense, ByHead | Projection) and dense.step is not None:
        return dense
    if isinstance(dense, ByHead):
        low, scale = _rounded(dense.kernel if dense.part is None else dense.kernel[dense.part])
        return ByHead(low, step=scale.reshape(-1))
    if isinstance(dense, Projection):
        shape = dense.kernel.shape
        low, scale = _rounded(dense.kernel.reshape(math.prod(shape[: dense.inputs]), -1))
        return dataclasses.replace(dense, kernel=low.reshape(shape), step=scale)
    return Int8Dense(*_rounded(dense.kernel), dense.bias)


def _rounded(kernel: Float[Array, "*l in out"]) -> tuple[Int8[Array, "*l in out"], Float[Array, "*l out"]]:
    peak = jnp.max(jnp.abs(kernel), axis=-2)
    scale = jnp.where(peak > 0, peak / 127.0, 1.0).astype(kernel.dtype)
    return jnp.round(kernel / scale[..., None, :]).astype(jnp.int8), scale
