"""What a Qwen3, Qwen3-MoE, Qwen3-Next or Qwen3.5 text model is, read from a config.json."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

from spec_jax.models.config import RopeConfig, check_types, parse, rope_from_hf
from spec_jax.models.fields import (
    first_windowed,
    is_whole,
    kinds_of,
    number_of,
    object_of,
    read,
    require,
    require_only,
    size_of,
)

ATTENTION, WINDOW, DELTA = "full_attention", "sliding_attention", "linear_attention"

HYBRIDS = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
WRAPPERS = ("qwen3_5", "qwen3_5_moe")
MODEL_TYPES = ("qwen3", "qwen3_moe", *HYBRIDS, *WRAPPERS)

_HEAD_DIM = {"qwen3": 128} | dict.fromkeys(HYBRIDS, 256)
_MOST_LAYERS, _MOST_EXPERTS = 4096, 65536


@dataclasses.dataclass(frozen=True)
class QwenConfig:
    """The sizes and settings of a decoder whose layers are attention or gated delta layers, dense or sparse.

    layer_types: each layer's mixer: "full_attention", "sliding_attention" or "linear_attention" (gated delta).
    sparse: whether each layer has experts instead of the dense MLP.
    output_gate: attention is multiplied by a sigmoid gate. offset_norms: files hold w for a norm's weight 1 + w.
    post_norms: each half of a layer is normed before it is added. scaled_embeddings: embeddings are multiplied by the
    root of hidden_size. gelu: the MLP's activation, in place of silu. query_scale: that of attention's dot products,
    head_dim**-0.5 if None. local_rope: the rotation in sliding layers, `rope` if None.
    mtp: the model has a multi-token-prediction head.
    Sizes of parts that no layer has are None. Raises ValueError, naming the field, for anything that does not fit.
    """

    vocab_size: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layer_types: tuple[str, ...]
    sparse: tuple[bool, ...]
    intermediate_size: int | None = None
    num_experts: int | None = None
    num_experts_per_tok: int | None = None
    moe_intermediate_size: int | None = None
    shared_expert_intermediate_size: int | None = None
    norm_topk_prob: bool = True
    linear_num_key_heads: int | None = None
    linear_num_value_heads: int | None = None
    linear_key_head_dim: int | None = None
    linear_value_head_dim: int | None = None
    linear_conv_kernel_dim: int | None = None
    rms_norm_eps: float = 1e-6
    rope: RopeConfig = RopeConfig()
    partial_rotary_factor: float = 1.0
    max_position_embeddings: int = 32768
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    output_gate: bool = False
    offset_norms: bool = False
    sliding_window: int | None = None
    mtp: bool = False
    post_norms: bool = False
    scaled_embeddings: bool = False
    gelu: bool = False
    query_scale: float | None = None
    local_rope: RopeConfig | None = None

    def __post_init__(self) -> None:
        """Check every field."""
        check_types(QwenConfig, vars(self))
        layers = len(self.layer_types)
        require(0 < layers <= _MOST_LAYERS, "layer_types", f"{layers} layers", f"1 .. {_MOST_LAYERS}")
        for kind in self.layer_types:
            require(kind in (ATTENTION, WINDOW, DELTA), "layer_types", kind, f"{ATTENTION}, {WINDOW}, {DELTA}")
        require(len(self.sparse) == layers, "sparse", f"{len(self.sparse)} layers", f"layer_types' {layers}")
        require(self.num_heads % self.num_kv_heads == 0, "num_heads", self.num_heads, "a multiple of num_kv_heads")
        require(self.rotary_dim % 2 == 0, "rotary_dim", self.rotary_dim, "an even number")
        require(2 <= self.rotary_dim <= self.head_dim, "rotary_dim", self.rotary_dim, f"2 .. head_dim {self.head_dim}")
        for name in ("short_factor", "long_factor"):
            value = getattr(self.rope, name)
            half = self.rotary_dim // 2
            require(value is None or len(value) == half, f"rope {name}", value, f"rotary_dim / 2, {half} numbers")
        needed = ["sliding_window"] if WINDOW in self.layer_types else []
        if DELTA in self.layer_types:
            needed += [f.name for f in dataclasses.fields(self) if f.name.startswith("linear_")]
        if any(self.sparse):
            needed += ["num_experts", "num_experts_per_tok", "moe_intermediate_size"]
        if not all(self.sparse):
            needed += ["intermediate_size"]
        for name in needed:
            require(getattr(self, name) is not None, name, None, "a positive integer, for the layers that use it")
        if DELTA in self.layer_types:
            key_heads, heads = self.linear_num_key_heads or 1, self.linear_num_value_heads or 1
            taken = f"a multiple of linear_num_key_heads, {key_heads}"
            require(heads % key_heads == 0, "linear_num_value_heads", heads, taken)
            width = self.linear_conv_kernel_dim or 0
            require(width >= 2, "linear_conv_kernel_dim", width, "a number from 2")
        if any(self.sparse):
            experts, chosen = self.num_experts or 0, self.num_experts_per_tok or 0
            require(experts <= _MOST_EXPERTS, "num_experts", experts, f"at most {_MOST_EXPERTS}")
            require(chosen <= experts, "num_experts_per_tok", chosen, f"at most num_experts, {experts}")

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return len(self.layer_types)

    @property
    def rotary_dim(self) -> int:
        """How many elements of each attention head are rotated, the first ones."""
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def attention_scale(self) -> float:
        """What attention's dot products are multiplied by."""
        return self.head_dim**-0.5 if self.query_scale is None else self.query_scale

    def rope_of(self, window: int | None) -> RopeConfig:
        """The rotation of a layer with that window."""
        return self.rope if window is None or self.local_rope is None else self.local_rope

    @property
    def key_size(self) -> int:
        """Size of a gated delta layer's queries, and of its keys."""
        return (self.linear_num_key_heads or 0) * (self.linear_key_head_dim or 0)

    @property
    def value_size(self) -> int:
        """Size of a gated delta layer's values."""
        return (self.linear_num_value_heads or 0) * (self.linear_value_head_dim or 0)

    @property
    def conv_size(self) -> int:
        """Channels of a gated delta layer's convolution: queries, keys and values."""
        return 2 * self.key_size + self.value_size

    @property
    def period(self) -> int:
        """After how many layers their kinds repeat; the number of layers if they do not."""
        kinds = list(zip(self.layer_types, self.sparse, strict=True))
        repeats = lambda p: all(a == b for a, b in zip(kinds, kinds[p:], strict=False))  # noqa: E731
        return next((p for p in range(1, len(kinds) // 2 + 1) if repeats(p)), len(kinds))

    def with_layers(self, kept: Sequence[int]) -> QwenConfig:
        """The model of some of its layers."""
        pick = lambda x: tuple(x[i] for i in kept)  # noqa: E731
        return dataclasses.replace(self, layer_types=pick(self.layer_types), sparse=pick(self.sparse))

    def to_hf(self) -> dict[str, Any]:
        """The fields of a config.json of type qwen3_next, which has gated attention and (1 + w) norms.

        Raises ValueError for a model that is none: no gate, other norms, windows, or another rotation than the default.
        """
        require(self.output_gate and self.offset_norms, "output_gate, offset_norms", "False", "True for a qwen3_next")
        require(self.sliding_window is None, "sliding_window", self.sliding_window, "None for a qwen3_next")
        require(not self.post_norms, "post_norms", self.post_norms, "False for a qwen3_next")
        require(self.rope.type == "default", "rope type", self.rope.type, "default")
        renamed = {"num_heads": "num_attention_heads", "num_kv_heads": "num_key_value_heads"}
        left_out = ("sparse", "rope", "partial_rotary_factor", "output_gate", "offset_norms", "sliding_window", "mtp")
        left_out += ("post_norms", "scaled_embeddings", "gelu", "query_scale", "local_rope")
        names = [f.name for f in dataclasses.fields(self) if f.name not in left_out]
        fields = {renamed.get(n, n): getattr(self, n) for n in names if getattr(self, n) is not None}
        rope = {"rope_type": "default", "rope_theta": self.rope.theta}
        return {
            "model_type": "qwen3_next",
            "architectures": ["Qwen3NextForCausalLM"],
            **fields,
            "num_hidden_layers": self.num_layers,
            "layer_types": list(self.layer_types),
            "mlp_only_layers": [i for i, sparse in enumerate(self.sparse) if not sparse],
            "decoder_sparse_step": 1,
            "hidden_act": "silu",
            "rope_parameters": rope | {"partial_rotary_factor": self.partial_rotary_factor},
        }

    @classmethod
    def from_hf(cls, fields: Mapping[str, Any]) -> QwenConfig:
        """Read a parsed config.json of a model type in MODEL_TYPES; of a multimodal one, its text_config.

        Sizes must be there; other absent fields have transformers' defaults. Raises ValueError, naming the field, for
        anything that would make another model. Rotary sections (mrope) are passed over: they differ for images alone.
        """
        model_type = fields.get("model_type")
        if model_type in WRAPPERS:
            text = fields.get("text_config")
            require(isinstance(text, Mapping), "text_config", text, "an object")
            tied = fields.get("tie_word_embeddings", False)
            return cls.from_hf({"tie_word_embeddings": tied, **dict(text or {}), "model_type": f"{model_type}_text"})
        require(model_type in MODEL_TYPES, "model_type", model_type, ", ".join(MODEL_TYPES))
        hybrid = model_type in HYBRIDS
        if fields.get("num_local_experts") is not None:
            fields = {"num_experts": size_of(fields, "num_local_experts"), **fields}
        require_only(
            fields,
            ("hidden_act", "silu", ("silu",)),
            ("attn_output_gate", hybrid, (hybrid,)),
            ("rope_interleaved", None, (None, False)),
            ("mtp_use_dedicated_embeddings", None, (None, False)),
            ("quantization_config", None, (None,)),
        )
        size = functools.partial(size_of, fields)
        layers, heads, hidden = size("num_hidden_layers"), size("num_attention_heads"), size("hidden_size")
        require(layers <= _MOST_LAYERS, "num_hidden_layers", layers, f"at most {_MOST_LAYERS}: {layers} layers")
        rope, factor = _rope(fields, size("max_position_embeddings"), 0.25 if hybrid else 1.0)
        kinds = _layer_types(fields, layers, hybrid)
        sparse = _sparse(fields, layers, model_type)
        optional = lambda used, *names: {n: size(n) for n in names if used}  # noqa: E731
        experts = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
        delta = [f.name for f in dataclasses.fields(cls) if f.name.startswith("linear_")]
        return parse(
            cls,
            vocab_size=size("vocab_size"),
            hidden_size=hidden,
            num_heads=heads,
            num_kv_heads=size("num_key_value_heads"),
            head_dim=size("head_dim", _HEAD_DIM.get(str(model_type), hidden // heads or None)),
            layer_types=kinds,
            sparse=sparse,
            **optional(not all(sparse), "intermediate_size"),
            **optional(any(sparse), *experts),
            **optional(any(sparse) and hybrid, "shared_expert_intermediate_size"),
            **optional(DELTA in kinds, *delta),
            **optional(WINDOW in kinds, "sliding_window"),
            norm_topk_prob=model_type == "qwen3_5_moe_text" or fields.get("norm_topk_prob", model_type == "qwen3_next"),
            rms_norm_eps=fields.get("rms_norm_eps", 1e-6),
            rope=rope,
            partial_rotary_factor=factor,
            max_position_embeddings=size("max_position_embeddings"),
            tie_word_embeddings=fields.get("tie_word_embeddings", False),
            attention_bias=fields.get("attention_bias", False),
            output_gate=hybrid,
            offset_norms=hybrid,
        )


def _rope(fields: Mapping[str, Any], positions: int, factor: float) -> tuple[RopeConfig, float]:
    """The rotary embedding, and which part of each head it rotates."""
    factor, fields = number_of(fields, "partial_rotary_factor", factor), dict(fields)
    for name in ("rope_parameters", "rope_scaling"):
        own = object_of(fields, name)
        factor = number_of(own, "partial_rotary_factor", factor)
        unread = ("mrope_section", "mrope_interleaved", "partial_rotary_factor")
        fields[name] = {k: v for k, v in own.items() if k not in unread}
    return rope_from_hf(fields, positions), factor


def _layer_types(fields: Mapping[str, Any], layers: int, hybrid: bool) -> tuple[str, ...]:
    kinds = kinds_of(fields, layers)
    if kinds is None and hybrid:
        interval = size_of(fields, "full_attention_interval", 4)
        kinds = tuple(DELTA if (i + 1) % interval else ATTENTION for i in range(layers))
    if kinds is None:
        first = first_windowed(fields, layers, 0 if fields.get("model_type") == "qwen3_moe" else None)
        kinds = tuple(WINDOW if i >= first else ATTENTION for i in range(layers))
    return kinds


def _sparse(fields: Mapping[str, Any], layers: int, model_type: Any) -> tuple[bool, ...]:
    if model_type not in ("qwen3_moe", "qwen3_next", "qwen3_5_moe_text"):
        return (False,) * layers
    if model_type == "qwen3_5_moe_text":
        return (True,) * layers
    dense, step = read(fields, "mlp_only_layers", []), size_of(fields, "decoder_sparse_step", 1)
    require(isinstance(dense, list) and all(map(is_whole, dense)), "mlp_only_layers", dense, "a list of layers")
    return tuple(i not in dense and (i + 1) % step == 0 for i in range(layers))
