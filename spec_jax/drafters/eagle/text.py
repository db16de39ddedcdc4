"""EAGLE heads over whole texts, differentiable: EAGLE-3's training-time test, and P-EAGLE's masked depths."""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from spec_jax.drafters.eagle import network
from spec_jax.drafters.eagle.config import EagleConfig
from spec_jax.drafters.eagle.network import EagleParams


@flax.struct.dataclass
class TextSteps:
    """What the head says at d depths behind [b, a] anchors: logits of depth i are for the token at anchor + i + 1.

    outputs are the head's hidden states, which EAGLE-1 fits to `features`, the target's own at those places (its input
    made of them; zeros behind the text).
    """

    logits: Float[Array, "b a d draft_vocab"]
    outputs: Float[Array, "b a d hidden"]
    features: Float[Array, "b a d hidden"]


def text_steps(
    config: EagleConfig,
    params: EagleParams,
    features: Float[Array, "b t taps hidden"],
    tokens: Int[Array, "b t"],
    anchors: Int[Array, "b a"],
    blocks: Int[Array, "b a d"],
) -> TextSteps:
    """Run d steps behind anchors at text positions 1 .. t - 1, given the right tokens `blocks` behind each.

    The first step is one pass over the pairs of the text: feature i and token i + 1, for the token at i + 2. Each
    further step pairs its own last output with the next right token, and sees the text's pairs up to the anchor's and
    those of its own chain (training-time test, arXiv 2503.01840). With a mask_token all further depths are one pass
    over masked pairs (arXiv 2602.01469). An anchor at position 0 has no pair: its logits are zeros.
    """
    c, (b, t), (_, a, d) = config, tokens.shape, blocks.shape
    context = network.feature(c, params, features)
    row = jnp.maximum(anchors - 1, 0)
    pick = lambda x: jnp.take_along_axis(x, row[:, :, None], axis=1)  # noqa: E731
    text_k, text_v = [], []

    def attend(_: int, q: Array, k: Array, v: Array) -> Array:
        text_k.append(k)
        text_v.append(v)
        return jax.nn.dot_product_attention(q, k, v, is_causal=True)

    at = jnp.broadcast_to(jnp.arange(t), (b, t))
    first = network.run(c, params, context, jnp.roll(tokens, -1, axis=1), at, t + d, attend)
    outputs = [pick(first)[:, :, None]]
    held_k, held_v = [[] for _ in text_k], [[] for _ in text_v]

    def more(x: Array, tokens: Array, positions: Array) -> Array:
        s = tokens.shape[2]

        def attend(i: int, q: Array, k: Array, v: Array) -> Array:
            held_k[i].append(k)
            held_v[i].append(v)
            own_k, own_v = jnp.concatenate(held_k[i], axis=2), jnp.concatenate(held_v[i], axis=2)
            before = own_k.shape[2] - s
            mask = jnp.tril(jnp.ones((s, s + before), bool), k=before)
            return _attend(q, text_k[i], text_v[i], row, own_k, own_v, mask)

        return network.run(c, params, x, tokens, positions, t + d, attend)

    if c.mask_token is not None and d > 1:
        masked = jnp.broadcast_to(network.masked_feature(c, params), (b, a, d - 1, c.hidden_size))
        ids = jnp.full((b, a, d - 1), c.mask_token, jnp.int32)
        outputs.append(more(masked, ids, row[:, :, None] + 1 + jnp.arange(d - 1)))
    elif d > 1:
        for step in range(1, d):
            outputs.append(more(outputs[-1], blocks[:, :, step - 1 : step], row[:, :, None] + step))
    x = jnp.concatenate(outputs, axis=2)
    logits = network.draft_logits(c, params, x)
    place = anchors[:, :, None] + jnp.arange(d)
    true = jnp.take_along_axis(context, jnp.minimum(place, t - 1).reshape(b, -1, 1), axis=1).reshape(x.shape)
    real = (anchors > 0)[:, :, None, None]
    return TextSteps(jnp.where(real, logits, 0.0), x, jnp.where((place < t)[..., None], true, 0.0))


def _attend(
    q: Float[Array, "b a s heads d"],
    text_k: Float[Array, "b t kv d"],
    text_v: Float[Array, "b t kv d"],
    row: Int[Array, "b a"],
    k: Float[Array, "b a m kv d"],
    v: Float[Array, "b a m kv d"],
    mask: Bool[Array, "s m"],
) -> Float[Array, "b a s heads d"]:
    """Chains behind places of whole texts: each sees the text's pairs up to `row`, and of its own what `mask` says."""
    b, a, s, _, d = q.shape
    t, kv = text_k.shape[1:3]
    grouped = (q * d**-0.5).reshape(b, a, s, kv, -1, d)
    far = jnp.einsum("baskgd,btkd->bakgst", grouped, text_k, preferred_element_type=jnp.float32)
    near = jnp.einsum("baskgd,bamkd->bakgsm", grouped, k, preferred_element_type=jnp.float32)
    seen = jnp.arange(t) <= row[:, :, None]
    far = jnp.where(seen[:, :, None, None, None], far, -jnp.inf)
    near = jnp.where(mask, near, -jnp.inf)
    weights = jax.nn.softmax(jnp.concatenate([far, near], axis=-1), axis=-1).astype(v.dtype)
    out = jnp.einsum("bakgst,btkd->baskgd", weights[..., :t], text_v)
    return (out + jnp.einsum("bakgsm,bamkd->baskgd", weights[..., t:], v)).reshape(q.shape)
