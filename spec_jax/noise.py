"""Counter-based Gumbel noise, keyed by (request key, position, token).

The token at text position t is argmax over v of z(v) + T * G(key, t, v). The noise depends on nothing else: not on the
drafter, the tree, the batch slot, or how far an earlier round got. Drafters share it to propose what the target is
about to choose. The generator is threefry2x32 with 20 rounds (Salmon et al., SC 2011), one block per token, elementwise
over an iota, so that it fuses, shards, and can be drawn for a subset of tokens. Changing it is a major version.
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt32

Key = UInt32[Array, "2"]
Keys = UInt32[Array, "*b 2"]
Stream = Literal["draft", "accept", "residual"]

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_STREAMS: dict[Stream, int] = {"draft": 1, "accept": 2, "residual": 3}
_STREAM_WORD, _SAMPLE_WORD = np.uint32(0xFFFFFFFF), np.uint32(0xFFFFFFFE)


def request_key(key: Array | np.ndarray | int) -> Keys:
    """The two words that key a request, from a seed, a typed threefry key, or raw uint32[2] (or [B, 2]) words.

    A seed's 64 bits are the words, high one first; below 2**32 they are those of `jax.random.key(seed)`.

    Raises:
        ValueError: for a seed outside 0 .. 2**64 - 1.
        TypeError: for a typed key of another generator (rbg keys change with sharding), or another dtype or shape.
    """
    if isinstance(key, int) and not isinstance(key, bool):
        if not 0 <= key < 2**64:
            raise ValueError(f"key: got the seed {key}, takes 0 .. 2**64 - 1")
        return jnp.asarray(np.array([key >> 32, key & 0xFFFFFFFF], np.uint32))
    if not isinstance(key, jax.Array | np.ndarray):
        raise TypeError(f"key: got {type(key).__name__}, takes an int seed, a threefry2x32 key or uint32[2] words")
    if jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        if jax.random.key_impl(key) != "threefry2x32":
            raise TypeError(f"key: got a {jax.random.key_impl(key)} key, takes threefry2x32")
        return jax.random.key_data(key)
    if key.dtype != jnp.uint32 or key.shape[-1:] != (2,):
        raise TypeError(f"key: got {key.dtype}{list(key.shape)}, takes uint32[..., 2]")
    return jnp.asarray(key)


def stream(key: Key, name: Stream) -> Key:
    """A key independent of the request's own noise: no text position reaches the counter it is drawn at."""
    return jnp.stack(threefry(key, _STREAM_WORD, jnp.uint32(_STREAMS[name])))


def sample_key(key: Key, index: int) -> Key:
    """The key of a request's index-th sample; the first sample has the request's own key."""
    return key if index == 0 else jnp.stack(threefry(key, _SAMPLE_WORD, jnp.uint32(index)))


def gumbel(key: Key, position: Int[Array, ""], tokens: Int[Array, "*v"]) -> Float[Array, "*v"]:
    """Standard Gumbel noise of the given tokens at a text position (the index of the token being chosen)."""
    return -jnp.log(_exponential(key, position, tokens))


def uniform(key: Key, position: Int[Array, ""], index: Int[Array, ""]) -> Float[Array, ""]:
    """A uniform number in (0, 1) for the index-th test at a text position."""
    return -jnp.expm1(-_exponential(key, position, index))


def threefry(key: Key, count0: Array | np.uint32, count1: Array) -> tuple[Array, Array]:
    """The threefry2x32-20 block of each counter pair. Unrolled, so that XLA fuses it into its consumer."""
    ks = (key[0], key[1], key[0] ^ key[1] ^ np.uint32(0x1BD11BDA))
    x0 = jnp.broadcast_to(count0 + ks[0], jnp.shape(count1))
    x1 = count1 + ks[1]
    for i in range(5):
        for r in _ROTATIONS[i % 2]:
            x0 = x0 + x1
            x1 = (x1 << np.uint32(r)) | (x1 >> np.uint32(32 - r))
            x1 = x0 ^ x1
        x0 = x0 + ks[(i + 1) % 3]
        x1 = x1 + ks[(i + 2) % 3] + np.uint32(i + 1)
    return x0, x1


def _exponential(key: Key, position: Array, tokens: Array) -> Array:
    """Exponential noise with full float32 resolution near zero, where the Gumbel maximum comes from: 64 random bits."""
    hi, lo = threefry(key, jnp.asarray(position).astype(jnp.uint32), jnp.asarray(tokens).astype(jnp.uint32))
    u = (hi.astype(jnp.float32) + (lo.astype(jnp.float32) + 0.5) * np.float32(2**-32)) * np.float32(2**-32)
    return -jnp.log1p(-jnp.minimum(u, np.float32(1 - 2**-24)))
