"""The head of a law: its likeliest tokens and their log-probs, which is what drafters keep of logits they have seen."""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from spec_jax.drafters.matches import NO_TOKEN
from spec_jax.sampling.reduce import log_sum_exp, top_tokens


@flax.struct.dataclass
class Laws:
    """The k likeliest tokens of each of several laws, likeliest first, and their log-probs; NO_TOKEN: no more."""

    ids: Int[Array, "*b k"]
    log_probs: Float[Array, "*b k"]


def likeliest(logits: Float[Array, "b n vocab"], k: int) -> Laws:
    """The heads of softmax(logits), of k tokens or the whole vocabulary."""
    z = logits.astype(jnp.float32)
    ids = top_tokens(z, min(k, z.shape[-1]))
    mass = jax.vmap(jax.vmap(log_sum_exp))(z)
    log_probs = jnp.take_along_axis(z, jnp.maximum(ids, 0), axis=-1) - mass[..., None]
    return Laws(ids, jnp.where(ids == NO_TOKEN, -jnp.inf, log_probs))
