"""Qwen parameters from tensors in Hugging Face's names, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from spec_jax.models import layers, lazy
from spec_jax.models.delta_mixer import Delta
from spec_jax.models.experts import Experts, Mlp
from spec_jax.models.gated_attention import Attention
from spec_jax.models.lazy import Lazy
from spec_jax.models.linear import PLAIN, Dense, Linear
from spec_jax.models.qwen import Layer, Mtp, QwenParams
from spec_jax.models.qwen_config import DELTA, QwenConfig
from spec_jax.models.qwen_shapes import MTP_LAYER, fused_experts, layer_norms, packed_projections


def from_tensors(config: QwenConfig, tensors: Mapping[str, npt.ArrayLike], dtype: Any = jnp.float32) -> QwenParams:
    """Parameters, per layer, from tensors in Hugging Face's names and [out, in] orientation, in any of their layouts.

    The tensors must have passed `checkpoint.validate`. Gate parameters and (1 + w) norms are float32 in any case.
    Layers stay a tuple; `qwen.stack_layers` stacks them.
    """
    return lazy.whole(lazy_params(config, tensors, dtype))


def lazy_params(config: QwenConfig, tensors: Mapping[str, npt.ArrayLike], dtype: Any = jnp.float32) -> QwenParams:
    """The parameters that `from_tensors` reads, as a tree of `Lazy` arrays, none of which is read yet."""
    read = _Reader(config, tensors, dtype)
    kinds = zip(config.layer_types, config.sparse, strict=True)
    own = tuple(read.layer(f"model.layers.{i}", kind == DELTA, sparse) for i, (kind, sparse) in enumerate(kinds))
    return QwenParams(
        embedding=read.dense("model.embed_tokens").kernel,
        layers=own,
        norm=read.norm("model.norm"),
        head=None if config.tie_word_embeddings else read.dense("lm_head"),
        mtp=lazy_mtp(config, tensors, dtype) if config.mtp else None,
    )


def lazy_mtp(config: QwenConfig, tensors: Mapping[str, npt.ArrayLike], dtype: Any = jnp.float32) -> Mtp:
    """The same of the MTP head alone; only its own tensors need to be there."""
    read = _Reader(config, tensors, dtype)
    return Mtp(
        embedding_norm=read.norm("mtp.pre_fc_norm_embedding"),
        hidden_norm=read.norm("mtp.pre_fc_norm_hidden"),
        fc=read.dense("mtp.fc"),
        layer=read.layer(MTP_LAYER, False, config.sparse[-1]),
        norm=read.norm("mtp.norm"),
    )


class _Reader:
    def __init__(self, config: QwenConfig, tensors: Mapping[str, npt.ArrayLike], dtype: Any) -> None:
        self.config, self.tensors, self.dtype = config, tensors, dtype

    def raw(self, name: str, dtype: Any = None) -> Lazy:
        return lazy.tensor(self.tensors[name], dtype or self.dtype)

    def norm(self, name: str) -> Any:
        if not self.config.offset_norms:
            return lazy.leaf(self.raw(f"{name}.weight"))
        return lazy.leaf(lazy.plus_one(self.raw(f"{name}.weight")))

    def dense(self, name: str) -> Dense:
        bias = f"{name}.bias"
        return self.map(self.raw(f"{name}.weight"), self.raw(bias) if bias in self.tensors else None)

    def map(self, weight: Lazy, bias: Lazy | None = None) -> Dense:
        return Dense(self.turned(weight), None if bias is None else lazy.leaf(bias))

    def turned(self, weight: Lazy) -> Any:
        return lazy.leaf(lazy.transpose(weight))

    def layer(self, at: str, delta: bool, sparse: bool) -> Layer:
        before, between, *after = (self.norm(f"{at}.{name}") for name in layer_norms(self.config))
        return Layer(
            before,
            self.delta(at) if delta else self.attention(f"{at}.self_attn"),
            between,
            self.experts(at) if sparse else self.mlp(f"{at}.mlp"),
            *after,
        )

    def attention(self, at: str) -> Attention:
        heads, d = self.config.num_heads, self.config.head_dim
        if self.config.output_gate:  # per head: its query, then its gate
            rows = np.arange(2 * heads * d).reshape(heads, 2, d)
            weight, name = self.raw(f"{at}.q_proj.weight"), f"{at}.q_proj.bias"
            bias = self.raw(name) if name in self.tensors else None

            def half(i: int) -> Dense:
                own = rows[:, i].reshape(-1)
                return self.map(lazy.pick(weight, own), None if bias is None else lazy.pick(bias, own))

            q, gate = half(0), half(1)
        else:
            q, gate = self.dense(f"{at}.q_proj"), None
        k, v, o = (self.dense(f"{at}.{name}_proj") for name in "kvo")
        return Attention(q, k, v, o, self.norm(f"{at}.q_norm"), self.norm(f"{at}.k_norm"), gate)

    def delta(self, layer: str) -> Delta:
        c, at = self.config, f"{layer}.linear_attn"
        weight = lambda name: self.raw(f"{at}.in_proj_{name}.weight")  # noqa: E731
        rows = lambda x: np.arange(x.shape[0]).reshape(c.linear_num_key_heads or 1, -1)  # noqa: E731
        apart = _by_key_head(c)
        if packed_projections(layer, self.tensors):  # by key head: its query, key, values and their z
            qkvz, ba = weight("qkvz"), weight("ba")
            ours, last = np.split(rows(qkvz), [apart.size // len(rows(qkvz))], axis=1)
            before, after = np.split(rows(ba), 2, axis=1)
            taken = ((qkvz, ours), (qkvz, last), (ba, before), (ba, after))
            qkv, z, b, a = (lazy.pick(x, y.reshape(-1)) for x, y in taken)
        else:
            qkv, z, b, a = (weight(name) for name in ("qkv", "z", "b", "a"))
            qkv = lazy.pick(qkv, apart)
        gate = lambda name: lazy.leaf(self.raw(f"{at}.{name}", jnp.float32))  # noqa: E731
        return Delta(
            qkv=self.map(qkv),
            z=self.map(z),
            b=self.turned(b),
            a=self.turned(a),
            conv=self.turned(lazy.pick(lazy.flat(self.raw(f"{at}.conv1d.weight")), apart)),
            a_log=gate("A_log"),
            dt_bias=gate("dt_bias"),
            norm=lazy.leaf(self.raw(f"{at}.norm.weight")),
            out=self.dense(f"{at}.out_proj"),
        )

    def experts(self, layer: str) -> Experts:
        at, count = f"{layer}.mlp", self.config.num_experts or 0
        if fused_experts(layer, self.tensors):
            both, down = self.raw(f"{at}.experts.gate_up_proj"), self.raw(f"{at}.experts.down_proj")
            gate, up = lazy.halves(both, 1)
        else:
            each = lambda name: lazy.stack(  # noqa: E731
                [self.raw(f"{at}.experts.{i}.{name}_proj.weight") for i in range(count)]
            )
            gate, up, down = (each(name) for name in ("gate", "up", "down"))
        shared = f"{at}.shared_expert_gate.weight" in self.tensors
        turned = lambda x: lazy.leaf(lazy.transpose(x, 0, 2, 1))  # noqa: E731
        return Experts(
            router=self.turned(self.raw(f"{at}.gate.weight")),
            gate=turned(gate),
            up=turned(up),
            down=turned(down),
            shared=self.mlp(f"{at}.shared_expert") if shared else None,
            shared_gate=self.turned(self.raw(f"{at}.shared_expert_gate.weight")) if shared else None,
        )

    def mlp(self, at: str) -> Mlp:
        return Mlp(*(self.dense(f"{at}.{name}_proj") for name in ("gate", "up", "down")), gelu=self.config.gelu)


def to_tensors(config: QwenConfig, params: QwenParams, fused: bool = True) -> dict[str, np.ndarray]:
    """The parameters under Hugging Face's names, in Qwen3-Next's layout of projections.

    fused: a layer's experts as one tensor per map, which is how transformers holds them, or as tensors of each expert,
    which is how published files do.

    Raises ValueError for linear leaves that are not dense.
    """
    out: dict[str, np.ndarray] = {}
    put = lambda name, x: out.update({name: np.ascontiguousarray(np.asarray(x))})  # noqa: E731
    norm = lambda name, x: put(f"{name}.weight", x - 1 if config.offset_norms else x)  # noqa: E731

    def dense(name: str, leaf: Linear) -> None:
        weight, bias = _plain(name, leaf)
        put(f"{name}.weight", weight)
        if bias is not None:
            put(f"{name}.bias", bias)

    def mlp(at: str, leaves: Mlp) -> None:
        for name in ("gate", "up", "down"):
            dense(f"{at}.{name}_proj", getattr(leaves, name))

    def attention(at: str, leaves: Attention) -> None:
        for name in "qkvo":
            dense(f"{at}.{name}_proj", getattr(leaves, name))
        norm(f"{at}.q_norm", leaves.q_norm)
        norm(f"{at}.k_norm", leaves.k_norm)
        if leaves.gate is not None:
            both = [_plain(at, leaf) for leaf in (leaves.q, leaves.gate)]
            heads = lambda x: x.reshape(config.num_heads, config.head_dim, *x.shape[1:])  # noqa: E731
            for i, kind in enumerate(("weight", "bias")):
                if both[0][i] is not None:
                    pair = np.concatenate([heads(x[i]) for x in both], axis=1)
                    put(f"{at}.q_proj.{kind}", pair.reshape(-1, *pair.shape[2:]))

    def delta(at: str, leaves: Delta) -> None:
        group = lambda x: np.asarray(x).reshape(config.linear_num_key_heads or 1, -1, config.hidden_size)  # noqa: E731
        join = lambda *x: np.concatenate([group(y) for y in x], 1).reshape(-1, config.hidden_size)  # noqa: E731
        put(f"{at}.in_proj_qkvz.weight", join(*(_plain(at, leaf)[0] for leaf in (leaves.qkv, leaves.z))))
        put(f"{at}.in_proj_ba.weight", join(leaves.b.T, leaves.a.T))
        put(f"{at}.conv1d.weight", np.asarray(leaves.conv).T[np.argsort(_by_key_head(config)), None])
        put(f"{at}.A_log", leaves.a_log)
        put(f"{at}.dt_bias", leaves.dt_bias)
        put(f"{at}.norm.weight", leaves.norm)
        dense(f"{at}.out_proj", leaves.out)

    def layer(at: str, leaves: Layer) -> None:
        norms = (leaves.mixer_norm, leaves.mlp_norm, leaves.mixer_after, leaves.mlp_after)
        for name, weight in zip(layer_norms(config), norms, strict=False):
            norm(f"{at}.{name}", weight)
        if isinstance(leaves.mixer, Delta):
            delta(f"{at}.linear_attn", leaves.mixer)
        else:
            attention(f"{at}.self_attn", leaves.mixer)
        if isinstance(leaves.mlp, Mlp):
            mlp(f"{at}.mlp", leaves.mlp)
            return
        e = leaves.mlp
        put(f"{at}.mlp.gate.weight", np.asarray(e.router).T)
        gate, up, down = (np.asarray(x).swapaxes(1, 2) for x in (e.gate, e.up, e.down))
        if fused:
            put(f"{at}.mlp.experts.gate_up_proj", np.concatenate([gate, up], axis=1))
            put(f"{at}.mlp.experts.down_proj", down)
        else:
            for i, maps in enumerate(zip(gate, up, down, strict=True)):
                for name, x in zip(("gate", "up", "down"), maps, strict=True):
                    put(f"{at}.mlp.experts.{i}.{name}_proj.weight", x)
        if e.shared is not None and e.shared_gate is not None:
            mlp(f"{at}.mlp.shared_expert", e.shared)
            put(f"{at}.mlp.shared_expert_gate.weight", np.asarray(e.shared_gate).T)

    put("model.embed_tokens.weight", np.asarray(params.embedding).T)
    for i, leaves in enumerate(layers.unstack(params.layers)):
        layer(f"model.layers.{i}", leaves)
    norm("model.norm", params.norm)
    if params.head is not None:
        dense("lm_head", params.head)
    if params.mtp is not None:
        norm("mtp.pre_fc_norm_embedding", params.mtp.embedding_norm)
        norm("mtp.pre_fc_norm_hidden", params.mtp.hidden_norm)
        dense("mtp.fc", params.mtp.fc)
        layer(MTP_LAYER, params.mtp.layer)
        norm("mtp.norm", params.mtp.norm)
    return out


def _by_key_head(config: QwenConfig) -> np.ndarray:
    """Channels that stand as queries, keys and values of all heads, in our order: by key head."""
    key, heads = config.key_size, config.linear_num_key_heads or 1
    kinds = np.split(np.arange(config.conv_size), [key, 2 * key])
    return np.concatenate([x.reshape(heads, -1) for x in kinds], axis=1).reshape(-1)


def _plain(name: str, leaf: Linear) -> tuple[Any, Any]:
    if not isinstance(leaf, PLAIN):
        raise ValueError(f"params: {name} is {type(leaf).__name__}, takes dense leaves only")
    return np.asarray(leaf.kernel).T, None if leaf.bias is None else np.asarray(leaf.bias)
