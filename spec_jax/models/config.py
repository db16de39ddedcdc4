"""What a Llama-family model is: its sizes, its rotary embedding, and how both are read from a config.json."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

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


def require(condition: bool, name: str, value: Any, taken: str) -> None:
    """ValueError saying what a field is and what it takes, unless the condition holds."""
    if not condition:
        raise ValueError(f"{name} is {value!r}; taken: {taken}")


def is_size(value: Any) -> bool:
    """Whether a value is a positive integer under 2**31."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**31


def size_of(fields: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """A size in a parsed config.json, or the default where it is absent. ValueError, naming it, for anything else."""
    value = default if fields.get(name) is None else fields[name]
    require(is_size(value), name, value, "a positive integer")
    return int(value)  # type: ignore[arg-type]


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e38  # NaN is not


_TYPES = {  # by annotation: the test, and what to tell the user
    "int": (is_size, "a positive integer under 2**31"),
    "float": (_is_positive, "a positive number"),
    "bool": (lambda value: isinstance(value, bool), "true or false"),
    "str": (lambda value: isinstance(value, str), "a text"),
    "tuple[float, ...]": (
        lambda value: isinstance(value, tuple) and all(map(_is_positive, value)),
        "a list of positive numbers",
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

        def refuse(name: str, value: Any, taken: str) -> None:
            raise ValueError(f"{name} is {value!r}; taken: {taken}")

        model_type = fields.get("model_type")
        if model_type not in ("llama", "mistral"):
            refuse("model_type", model_type, "llama, mistral")
        mistral = model_type == "mistral"
        for name, default, taken in (
            ("hidden_act", "silu", ("silu",)),
            ("partial_rotary_factor", None, (None, 1)),
            ("rope_interleaved", None, (None, False)),
            ("quantization_config", None, (None,)),
        ):
            if fields.get(name, default) not in taken:
                refuse(name, fields.get(name, default), " or ".join(map(repr, taken)))
        window = fields.get("sliding_window", 4096 if mistral else None)
        if window is not None and not mistral:
            refuse("sliding_window", window, "None in a llama")
        kinds = fields.get("layer_types") or []
        if not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds):
            refuse("layer_types", kinds, "'full_attention' in every layer")

        def size(name: str, default: int | None = None) -> int:
            value = default if (got := fields.get(name)) is None else got
            if value is None:
                raise ValueError(f"{name} is missing")
            require(is_size(value), name, value, "a positive integer")
            return value

        heads, hidden = size("num_attention_heads"), size("hidden_size")
        if fields.get("head_dim") is None and hidden % heads:
            refuse("hidden_size", hidden, f"a multiple of num_attention_heads, {heads}, unless head_dim is given")
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
    spellings = [fields[name] for name in ("rope_parameters", "rope_scaling") if fields.get(name)]
    for value in spellings:
        require(isinstance(value, Mapping), "rope_parameters (or rope_scaling)", value, "an object")
    if len(spellings) == 2 and spellings[0] != spellings[1]:
        raise ValueError(f"rope_parameters {spellings[0]!r} and rope_scaling {spellings[1]!r} differ; give one")
    given = {k: v for k, v in spellings[0].items() if v is not None} if spellings else {}
    if "type" in given and given.setdefault("rope_type", given["type"]) != given["type"]:
        raise ValueError(f"rope_type {given['rope_type']!r} and type {given['type']!r} differ; give one")
    require(given.pop("partial_rotary_factor", 1) == 1, "partial_rotary_factor", spellings, "1")
    given.pop("type", None)
    given.pop("finetuned", None)  # only records that the model was trained with the scaling
    kind = given.pop("rope_type", "default")
    theta = given.pop("rope_theta", fields.get("rope_theta") or 10000.0)
    if unknown := given.keys() - {f.name for f in dataclasses.fields(RopeConfig)}:
        raise ValueError(f"rope type {kind!r} has no parameter {', '.join(sorted(unknown))}")
    for name in ("short_factor", "long_factor"):
        if isinstance(given.get(name), list):
            given[name] = tuple(given[name])
    original = "original_max_position_embeddings"
    if kind in ("llama3", "yarn", "longrope"):
        given[original] = fields.get(original) or given.get(original, max_position)
        require(is_size(given[original]), original, given[original], "a positive integer")
    if kind in ("yarn", "longrope"):
        given.setdefault("factor", max_position / given[original])
    return parse(RopeConfig, type=kind, theta=theta, **given)
