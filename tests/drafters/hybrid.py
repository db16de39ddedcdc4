"""A small Qwen3-Next-like hybrid with an MTP head, for tests: random, and with a head that agrees with the target."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax.models.qwen import Qwen
from spec_jax.models.qwen_config import ATTENTION, DELTA, QwenConfig
from spec_jax.models.qwen_text import init_params

V = 16
MEMORY = (200.0, 2000.0)  # tokens at rest, over a factor of 1 to 16


def config(kinds=(DELTA, ATTENTION), sparse=True, **changes):
    sizes = {
        "vocab_size": V, "hidden_size": 16, "num_heads": 2, "num_kv_heads": 1, "head_dim": 8, "intermediate_size": 24,
        "linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
        "linear_conv_kernel_dim": 4, "partial_rotary_factor": 0.5, "output_gate": True, "offset_norms": True,
        "mtp": True,
    }  # fmt: skip
    if sparse:
        sizes |= {
            "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8,
            "shared_expert_intermediate_size": 8,
        }  # fmt: skip
    return QwenConfig(**{**sizes, "layer_types": kinds, "sparse": (sparse,) * len(kinds), **changes})


def hybrid(kinds=(DELTA, ATTENTION), sparse=True, seed=0, sharp=3.0, **changes):
    """A random model that remembers dozens of tokens: norms that differ from 1, logits spread enough to choose by."""
    c = config(kinds, sparse, **changes)
    params = init_params(c, jax.random.key(seed), scale=0.3, memory=MEMORY)
    rng = np.random.default_rng(seed)
    vary = lambda x: x * jnp.asarray(rng.uniform(0.5, 1.5, x.shape), x.dtype)  # noqa: E731
    mtp = own = params.mtp
    if own is not None:
        norms = {"embedding_norm": vary(own.embedding_norm), "hidden_norm": vary(own.hidden_norm)}
        mtp = dataclasses.replace(own, **norms, norm=sharp * vary(own.norm))
    return Qwen(c), dataclasses.replace(params, norm=sharp * vary(params.norm), mtp=mtp)


def agreeing(seed=0, sparse=True, **changes):
    """A target without memory, and a head with its layer: drafts are always right.

    The layer's attention puts out nothing, embeddings have root mean square 1 so that the head's norm leaves them, and
    the head's first map passes the embedding on; whatever comes from the hidden state is left out.
    """
    target, params = hybrid((ATTENTION,), sparse, seed, **changes)
    (layer,) = params.layers
    still = dataclasses.replace(layer.mixer.o, kernel=jnp.zeros_like(layer.mixer.o.kernel))
    layer = dataclasses.replace(layer, mixer=dataclasses.replace(layer.mixer, o=still))
    e = params.embedding
    embedding = e / jnp.sqrt(jnp.square(e).mean(0, keepdims=True) + 1e-12)
    hidden = e.shape[0]
    kernel = jnp.concatenate([jnp.eye(hidden), jnp.zeros((hidden, hidden))])
    mtp = dataclasses.replace(
        params.mtp,
        embedding_norm=jnp.ones(hidden),
        fc=dataclasses.replace(params.mtp.fc, kernel=kernel),
        layer=layer,
        norm=params.norm,
    )
    return target, dataclasses.replace(params, embedding=embedding, layers=(layer,), mtp=mtp)


def fair(seed=0, mixing=0.4, **changes):
    """A hybrid with memory, and a head that is often right: what it can't know weighs less."""
    target, params = hybrid(sparse=False, seed=seed, **changes)
    turned = lambda x, by: dataclasses.replace(x, kernel=by * x.kernel)  # noqa: E731
    delta, attention = params.layers
    delta = dataclasses.replace(delta, mixer=dataclasses.replace(delta.mixer, out=turned(delta.mixer.out, mixing)))
    mixer = attention.mixer
    attention = dataclasses.replace(attention, mixer=dataclasses.replace(mixer, o=turned(mixer.o, mixing)))
    delta = dataclasses.replace(delta, mlp=dataclasses.replace(delta.mlp, down=turned(delta.mlp.down, mixing)))
    e = params.embedding
    embedding = e / jnp.sqrt(jnp.square(e).mean(0, keepdims=True) + 1e-12)
    hidden = e.shape[0]
    rng = np.random.default_rng(seed)
    kernel = jnp.concatenate([jnp.eye(hidden), jnp.asarray(rng.normal(0, 0.05, (hidden, hidden)), jnp.float32)])
    mtp = dataclasses.replace(
        params.mtp, fc=dataclasses.replace(params.mtp.fc, kernel=kernel), layer=attention, norm=params.norm
    )
    return target, dataclasses.replace(params, embedding=embedding, layers=(delta, attention), mtp=mtp)
