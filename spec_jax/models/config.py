"""What a Llama-family model is: its sizes, its rotary embedding, and how both are read from a config.json."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from spec_jax.models.fields import (
    is_positive,
    is_size,
    is_whole,
    number_of,
    object_of,
    require,
    require_only,
    size_of,
)

_NEEDS = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor", "original_max_position_embeddings"),
    "longrope": ("factor", "original_max_position_embeddings", "short_factor", "long_factor"),
}
_MAY_HAVE = {
    "yarn": ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    "longrope": ("attention_factor",),
}


T = TypeVar("T")


def parse(kind: type[T], **values: Any) -> T:
    """kind(**values) for a config dataclass and values of any type; ValueError, naming the field, for a wrong one."""
    check_types(kind, values)
    return kind(**values)


def check_types(kind: type, values: Mapping[str, Any]) -> None:
    """ValueError, naming the field, for a value that is not of its field's type."""
    for field in dataclasses.fields(kind):
        annotation, value = str(field.type), values.get(field.name, field.default)
        if value is None and annotation.endswith(" | None"):
            continue
        fits, taken = _TYPES.get(annotation.removesuffix(" | None"), (None, ""))
        require(fits is None or fits(value), field.name, value, taken)


_TYPES = {  # by annotation: the test, and what to tell the user
    "int": (is_size, "a positive integer under 2**31"),
    "float": (is_positive, "a positive number"),
    "bool": (lambda value: isinstance(value, bool), "true or false"),
    "str": (lambda value: isinstance(value, str), "a text"),
    "tuple[float, ...]": (
        lambda value: isinstance(value, tuple) and all(map(is_positive, value)),
        "a list of positive numbers",
    ),
    "tuple[int, ...]": (
        lambda value: isinstance(value, tuple) and all(map(is_whole, value)),
        "a list of integers, 0 or more",
    ),
    "tuple[str, ...]": (
        lambda value: isinstance(value, tuple) and all(isinstance(x, str) for x in value),
        "a list of texts",
    ),
    "tuple[bool, ...]": (
        lambda value: isinstance(value, tuple) and all(isinstance(x, bool) for x in value),
        "a list of true or false",
    ),
}


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """The rotary embedding. `type` is default, linear, dynamic, llama3, yarn or longrope, as transformers names them.

    Parameters that the type does not use stay None; setting one, or leaving out one it needs, raises ValueError.
    """

    type: str = "default"
    theta: float = 10000.0
    factor: float | None = None
    original_max_position_embeddings: int | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    attention_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool | None = None
    short_factor: tuple[float, ...] | None = None
    long_factor: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        """Check the parameters against the type."""
        check_types(RopeConfig, vars(self))
        require(self.type in _NEEDS, "rope type", self.type, ", ".join(_NEEDS))
        given = {name: value for name, value in vars(self).items() if value is not None}
        known = {"type", "theta", *_NEEDS[self.type], *_MAY_HAVE.get(self.type, ())}
        if extra := given.keys() - known:
            raise ValueError(f"rope type {self.type!r} has no parameter {', '.join(sorted(extra))}")
        if missing := set(_NEEDS[self.type]) - given.keys():
            raise ValueError(f"rope type {self.type!r} needs {', '.join(sorted(missing))}")
        require(self.theta > 1, "rope theta", self.theta, "a number over 1")
        if self.type == "dynamic":
            require(given["factor"] >= 1, "rope factor", self.factor, "a number, 1 or more")
        if self.type == "llama3":
            low, high = given["low_freq_factor"], given["high_freq_factor"]
            require(high > low, "rope high_freq_factor", high, f"more than low_freq_factor, {low}")
        if self.type == "yarn":
            slow, fast = given.get("beta_slow", 1), given.get("beta_fast", 32)
            require(fast >= slow, "rope beta_fast", fast, f"at least beta_slow, {slow}")


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    """The sizes and settings of a Llama-family model.

    Raises ValueError for sizes that are not positive integers, heads that are no multiple of the key/value heads, an
    odd head_dim, or longrope factors that are not head_dim / 2 long.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-5
    rope: RopeConfig = RopeConfig()
    max_position_embeddings: int = 2048
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    sliding_window: int | None = None

    def __post_init__(self) -> None:
        """Check every field."""
        check_types(LlamaConfig, vars(self))
        kv_heads = self.num_kv_heads
        require(self.num_heads % kv_heads == 0, "num_heads", self.num_heads, f"a multiple of num_kv_heads, {kv_heads}")
        smallest = 4 if self.rope.type == "dynamic" else 2
        require(
            self.head_dim % 2 == 0 and self.head_dim >= smallest,
            "head_dim",
            self.head_dim,
            f"an even number from {smallest}",
        )
        for name in ("short_factor", "long_factor"):
            if (value := getattr(self.rope, name)) is not None and len(value) != self.head_dim // 2:
                raise ValueError(f"rope {name} has {len(value)} numbers; taken: head_dim / 2, {self.head_dim // 2}")

    def with_layers(self, kept: Sequence[int]) -> LlamaConfig:
        """The model of some of its layers, which are all alike."""
        return dataclasses.replace(self, num_layers=len(kept))

    @classmethod
    def from_hf(cls, fields: Mapping[str, Any]) -> LlamaConfig:
        """Read a parsed config.json of model type llama or mistral.

        The sizes of layers, heads and matrices must be there; other absent fields have transformers' defaults. Rotary
        parameters are in `rope_parameters`, or in the older `rope_theta` and `rope_scaling`. Raises ValueError, naming
        the field, for anything that would make another model: other activations, a sliding window in a Llama,
        partial or interleaved rotation, quantised weights.
        """

        require_only(
            fields,
            ("model_type", None, ("llama", "mistral")),
            ("hidden_act", "silu", ("silu",)),
            ("partial_rotary_factor", None, (None, 1)),
            ("rope_interleaved", None, (None, False)),
            ("quantization_config", None, (None,)),
        )
        mistral = fields["model_type"] == "mistral"
        window = fields.get("sliding_window", 4096 if mistral else None)
        require(window is None or mistral, "sliding_window", window, "None in a llama")
        kinds = [] if fields.get("layer_types") is None else fields["layer_types"]
        full = isinstance(kinds, list) and all(kind == "full_attention" for kind in kinds)
        require(full, "layer_types", kinds, "'full_attention' in every layer")
        size = functools.partial(size_of, fields)
        heads, hidden = size("num_attention_heads"), size("hidden_size")
        taken = f"a multiple of num_attention_heads, {heads}, unless head_dim is given"
        require(fields.get("head_dim") is not None or hidden % heads == 0, "hidden_size", hidden, taken)
        positions = size("max_position_embeddings", 131072 if mistral else 2048)
        return parse(
            cls,
            vocab_size=size("vocab_size"),
            hidden_size=hidden,
            intermediate_size=size("intermediate_size"),
            num_layers=size("num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=size("num_key_value_heads", 8 if mistral and "num_key_value_heads" not in fields else heads),
            head_dim=size("head_dim", hidden // heads or None),
            rms_norm_eps=fields.get("rms_norm_eps", 1e-6),
            rope=rope_from_hf(fields, positions),
            max_position_embeddings=positions,
            tie_word_embeddings=fields.get("tie_word_embeddings", False),
            attention_bias=fields.get("attention_bias", False),
            mlp_bias=fields.get("mlp_bias", False),
            sliding_window=window,
        )


def rope_from_hf(fields: Mapping[str, Any], max_position: int) -> RopeConfig:
    """The rotary embedding of a parsed config.json; ValueError for one that is none, or rotates a part of each head."""
    spellings = [x for name in ("rope_parameters", "rope_scaling") if (x := object_of(fields, name))]
    if len(spellings) == 2 and spellings[0] != spellings[1]:
        raise ValueError(f"rope_parameters {spellings[0]!r} and rope_scaling {spellings[1]!r} differ; give one")
    given = {k: v for k, v in spellings[0].items() if v is not None} if spellings else {}
    for name in ("rope_type", "type"):
        require(isinstance(given.get(name, ""), str), name, given.get(name), ", ".join(_NEEDS))
    if "type" in given and given.setdefault("rope_type", given["type"]) != given["type"]:
        raise ValueError(f"rope_type {given['rope_type']!r} and type {given['type']!r} differ; give one")
    require_only(given, ("partial_rotary_factor", 1, (1,)))
    given.pop("partial_rotary_factor", None)
    given.pop("type", None)
    given.pop("finetuned", None)  # only records that the model was trained with the scaling
    kind = given.pop("rope_type", "default")
    theta = number_of({"rope_theta": fields.get("rope_theta")} | given, "rope_theta", 10000.0)
    given.pop("rope_theta", None)
    if unknown := given.keys() - {f.name for f in dataclasses.fields(RopeConfig)}:
        raise ValueError(f"rope type {kind!r} has no parameter {', '.join(sorted(unknown))}")
    for name in ("short_factor", "long_factor"):
        if isinstance(given.get(name), list):
            given[name] = tuple(given[name])
    original = "original_max_position_embeddings"
    if kind in ("llama3", "yarn", "longrope"):
        outside = {} if fields.get(original) is None else {original: fields[original]}
        given[original] = size_of(given | outside, original, max_position)
    if kind in ("yarn", "longrope"):
        given.setdefault("factor", max_position / given[original])
    return parse(RopeConfig, type=kind, theta=theta, **given)
