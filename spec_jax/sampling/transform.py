"""The one logits transform: plain decoding, drafting and verifying all choose tokens through it.

For one row. `adjust` is the history-dependent part, `support` the truncation, `choose` the draw.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from spec_jax import noise
from spec_jax.sampling import reduce
from spec_jax.sampling.constraint import Constraint
from spec_jax.sampling.history import History
from spec_jax.sampling.settings import SamplingRow


def adjust(
    logits: Float[Array, "vocab"], row: SamplingRow, history: History, constraint: Constraint
) -> Float[Array, "vocab"]:
    """Logits after penalties, bias and bans, minimum length and constraint; -inf where a token may not come.

    The history must hold counts.
    """
    assert history.counts is not None and history.in_prompt is not None
    seen = history.in_prompt | (history.counts > 0)
    z = jnp.where(seen, jnp.where(logits > 0, logits / row.repetition, logits * row.repetition), logits)
    z = z - row.presence * (history.counts > 0) - row.frequency * history.counts
    vocab = logits.shape[0]
    spare = lambda ids: jnp.where(ids < 0, vocab, ids)  # noqa: E731
    z = z.at[spare(row.bias_ids)].add(row.bias, mode="drop")
    early = history.generated < row.min_new
    z = z.at[spare(row.eos)].add(jnp.where(early, -jnp.inf, 0.0), mode="drop")
    return jnp.where(constraint.mask(history.state), z, -jnp.inf)


def support(z: Float[Array, "vocab"], row: SamplingRow) -> Bool[Array, "vocab"]:
    """The tokens that top-k, top-p and min-p keep, by bisection on a threshold rather than a sort.

    A token is kept if fewer than top_k tokens are strictly likelier, the strictly likelier ones (within top-k) hold
    less than top_p of the mass, and it is at least min_p times as likely as the likeliest.
    """
    order, weight, top = _keys(z), _weights(z, row), reduce.peak(z)
    active = (row.top_k > 0) & (row.top_k < z.shape[0])
    low_k = _bisect(order, lambda above: reduce.total(above.astype(jnp.int32)) < row.top_k, active, top)
    weight = jnp.where(order > low_k, weight, 0.0)
    need = row.top_p * reduce.total(weight)
    low_p = _bisect(order, lambda above: reduce.total(jnp.where(above, weight, 0.0)) < need, row.top_p < 1, top)
    return (order > jnp.maximum(low_k, low_p)) & (weight >= row.min_p) & (z > -jnp.inf)


def log_probs(z: Float[Array, "vocab"], row: SamplingRow) -> Float[Array, "vocab"]:
    """The log of the law that a row's token is drawn from; for temperature 0 the point mass on the argmax."""
    scaled = (z - reduce.peak(z)) / jnp.where(row.sampled, row.temperature, 1.0)
    drawn = jnp.where(support(z, row), scaled, -jnp.inf)
    drawn = drawn - reduce.log_sum_exp(drawn)
    greedy = jnp.where(jnp.arange(z.shape[0]) == reduce.argmax(z), 0.0, -jnp.inf)
    return jnp.where(row.sampled, drawn, greedy)


def choose(
    z: Float[Array, "vocab"], row: SamplingRow, key: noise.Key, position: Int[Array, ""], sampled: bool = True
) -> Int[Array, ""]:
    """The token at a text position: argmax of z + T * G over the support, lowest id on a tie; -1 on NaN, inf, no token.

    sampled=False leaves the noise out of the program, for batches in which every temperature is 0. The truncation is
    looked for only if the untruncated choice falls outside it, which its own mass and rank decide in one pass.
    """
    if not sampled:
        return reduce.argmax(z)
    tokens = jnp.arange(z.shape[0], dtype=jnp.int32)
    noisy = z + row.temperature * noise.gumbel(key, position, tokens)
    token = reduce.argmax(noisy)
    cut = row.sampled & (token >= 0) & ~_kept(token, z, row)
    return _rarely(cut, lambda _: reduce.argmax(jnp.where(support(z, row), noisy, -jnp.inf)), token)


def _kept(token: Array, z: Array, row: SamplingRow) -> Array:
    """Whether a token is surely in the support; where both top-k and top-p are on, False may mean not known."""
    weight, above = _weights(z, row), z > z[token]
    k_off = (row.top_k <= 0) | (row.top_k >= z.shape[0])
    p_off = row.top_p >= 1
    in_k = k_off | (reduce.total(above.astype(jnp.int32)) < row.top_k)
    in_p = p_off | (k_off & (reduce.total(jnp.where(above, weight, 0.0)) < row.top_p * reduce.total(weight)))
    return in_k & in_p & (weight[token] >= row.min_p)


def _weights(z: Array, row: SamplingRow) -> Array:
    """Probabilities relative to the likeliest token's."""
    return jnp.exp((z - reduce.peak(z)) / jnp.where(row.sampled, row.temperature, 1.0))


def _keys(z: Array) -> Array:
    """int32 that order as the floats do; -0.0 and 0.0 are one."""
    bits = lax.bitcast_convert_type(jnp.where(z == 0, 0.0, z).astype(jnp.float32), jnp.int32)
    return jnp.where(bits < 0, bits ^ jnp.int32(0x7FFFFFFF), bits)


def _bisect(order: Array, enough, active: Array, top: Array) -> Array:
    """The largest key so that the tokens strictly above it are the support, for `enough(above)` monotone in the key.

    Invariant: enough(order > high) holds, enough(order > low) does not. Ends when one key, or one token, is between.
    """
    floor = jnp.int32(-(2**31))
    count = lambda key: reduce.total((order > key).astype(jnp.int32))  # noqa: E731

    def body(carry):
        low, high, n_low, n_high, _ = carry
        middle = (low & high) + ((low ^ high) >> 1)
        above = order > middle
        yes, n = enough(above), reduce.total(above.astype(jnp.int32))
        low, n_low = jnp.where(yes, low, middle), jnp.where(yes, n_low, n)
        high, n_high = jnp.where(yes, middle, high), jnp.where(yes, n, n_high)
        return low, high, n_low, n_high, (n_low - n_high > 1) & (high - 1 > low)

    high = _keys(top)
    carry = (floor, high, count(floor), count(high), active)
    return lax.while_loop(lambda carry: carry[-1], body, carry)[0]


def _rarely(condition: Array, f, value: Array) -> Array:
    """f(value) where the condition holds; a loop of at most one turn, which stays a branch under vmap."""
    return lax.while_loop(lambda c: c[0], lambda c: (jnp.zeros_like(c[0]), f(c[1])), (condition, value))[1]
