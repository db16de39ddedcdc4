"""Root-mean-square norms, in float32 whatever the model's dtype."""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


@flax.struct.dataclass
class OnePlus:
    """A norm's weight kept as its distance to one, as other libraries hold it."""

    offset: Float[Array, "*l d"]


def rms_norm(x: Float[Array, "*b d"], weight: Float[Array, "d"] | OnePlus, eps: float) -> Float[Array, "*b d"]:
    """Root-mean-square norm (arXiv 1910.07467) in x's dtype.

    A weight of lower precision is applied in its own dtype, as Llama does; a float32 weight in float32, as the families
    with (1 + w) norms do.
    """
    if isinstance(weight, OnePlus):
        weight = 1 + weight.offset.astype(jnp.float32)
    y = x.astype(jnp.float32)
    y = y * lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
    return (weight * y.astype(weight.dtype)).astype(x.dtype)


def gated_rms_norm(
    x: Float[Array, "*b d"], gate: Float[Array, "*b d"], weight: Float[Array, "d"], eps: float
) -> Float[Array, "*b d"]:
    """The norm of x times silu(gate), in the gate's dtype; the gate is applied in float32."""
    y = rms_norm(x, weight.astype(jnp.float32), eps).astype(jnp.float32)
    return (y * jax.nn.silu(gate.astype(jnp.float32))).astype(gate.dtype)
