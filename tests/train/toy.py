"""A Llama small enough to train a drafter for in seconds, and texts that it writes."""

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax.drafters.block.config import FULL, BlockConfig
from spec_jax.models.checkpoint import required_tensors
from spec_jax.models.config import LlamaConfig, RopeConfig
from spec_jax.models.llama import Llama, from_tensors
from spec_jax.train.loader import Batch, Texts
from spec_jax.train.slots import Said
from spec_jax.train.store import Text

V, LAYERS = 24, 2
CONFIG = LlamaConfig(
    vocab_size=V,
    hidden_size=16,
    intermediate_size=32,
    num_layers=LAYERS,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    max_position_embeddings=256,
)


def block_config(slots="fill_in", block_size=4, **changes):
    given = dict(
        vocab_size=V,
        hidden_size=16,
        intermediate_size=32,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
        block_size=block_size,
        mask_token=V - 1,
        taps=(1, 2),
        layer_types=(FULL,),
        causal=(False,),
        slots=slots,
        rope=RopeConfig(theta=1e4),
    )
    return BlockConfig(**(given | changes))


def target(taps=(1, LAYERS)):
    return Llama(CONFIG, taps)


def params(seed=0, scale=0.7):
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, shape in required_tensors(CONFIG).items():
        norm = len(shape) == 1
        tensors[name] = np.ones(shape) if norm else rng.normal(0, scale / np.sqrt(shape[-1]), shape)
    tensors["model.embed_tokens.weight"] = rng.normal(0, 1, (V, CONFIG.hidden_size))
    tensors["lm_head.weight"] *= 3
    return from_tensors(CONFIG, {name: x.astype(np.float32) for name, x in tensors.items()})


def texts(count=16, length=20, prompt=4, seed=0):
    rng = np.random.default_rng(seed)
    return [Text(i, rng.integers(0, V, length).astype(np.int32), np.arange(length) >= prompt) for i in range(count)]


def batch(rows=2, length=12, prompt=3, step=0, weights=None, seed=0, shared=None):
    rng = np.random.default_rng(seed)
    tokens = jnp.asarray(rng.integers(0, V, (rows, length)), jnp.int32)
    mask = jnp.broadcast_to(jnp.arange(length) >= prompt, (rows, length))
    given = Texts(tokens, mask, jnp.full(rows, length, jnp.int32))
    return Batch(given, jnp.int32(step), params() if weights is None else weights, shared)


class Linear:
    """A drafter in one line: logits of slot k are a linear map of the feature before the anchor, and of the anchor."""

    taps = (1,)

    def __init__(self, slots=3, draft=V):
        self.slots, self.draft = slots, draft

    def init(self, seed=0):
        a, b = jax.random.split(jax.random.key(seed))
        h = CONFIG.hidden_size
        return {
            "feature": 0.1 * jax.random.normal(a, (self.slots, h, self.draft)),
            "token": 0.1 * jax.random.normal(b, (self.slots, V, self.draft)),
        }

    def __call__(self, weights, asked):
        before = jnp.maximum(asked.anchors - 1, 0)
        feature = jax.vmap(lambda f, at: f[at])(asked.features[:, :, 0], before)
        anchor = jnp.take_along_axis(asked.tokens, asked.anchors, axis=1)
        logits = jnp.einsum("brh,khv->brkv", feature, weights["feature"])
        return Said(logits + weights["token"][:, anchor].transpose(1, 2, 0, 3))
