"""DFlash 2's grouped dynamic causal convolution over the rows of a block."""

from __future__ import annotations

import flax.struct
import jax.numpy as jnp
from jaxtyping import Array, Float

from spec_jax.drafters.block.ends import apply
from spec_jax.models.linear import Linear


@flax.struct.dataclass
class Conv:
    """Kernels before and after a sublayer, and what each row adds to both, shared by groups of channels.

    base [2, K, hidden]; projection: hidden -> 2 K groups.
    """

    base: Float[Array, "2 k hidden"]
    projection: Linear


def before(
    conv: Conv, x: Float[Array, "b s hidden"]
) -> tuple[Float[Array, "b s hidden"], Float[Array, "b s k groups"]]:
    """The sublayer's convolved input, and the dynamic kernels for its output."""
    dynamic = apply(conv.projection, x).reshape(*x.shape[:2], 2, conv.base.shape[1], -1)
    return convolve(x, conv.base[0], dynamic[:, :, 0]), dynamic[:, :, 1]


def after(
    conv: Conv, x: Float[Array, "b s hidden"], dynamic: Float[Array, "b s k groups"]
) -> Float[Array, "b s hidden"]:
    """The sublayer's convolved output."""
    return convolve(x, conv.base[1], dynamic)


def convolve(
    x: Float[Array, "b s hidden"], base: Float[Array, "k hidden"], dynamic: Float[Array, "b s k groups"]
) -> Float[Array, "b s hidden"]:
    """out[i, c] = sum over taps t of (base[t, c] + dynamic[i, t, group of c]) x[i - t, c]; nothing before the block."""
    each = x.shape[-1] // dynamic.shape[-1]
    kernel = base + jnp.repeat(dynamic, each, axis=-1)
    shifted = lambda t: jnp.pad(x, ((0, 0), (t, 0), (0, 0)))[:, : x.shape[1]]  # noqa: E731
    return sum((kernel[:, :, t] * shifted(t) for t in range(base.shape[0])), jnp.zeros_like(x))
