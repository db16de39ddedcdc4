"""How a model and its states are split over a mesh: which axis of every array lies on which axis of the devices.

"data" splits rows, "tensor" heads, inner widths and the vocabulary, "expert" sparse experts. Over "expert" rows are
split as well, where their number allows it, and come together for the experts alone. No weight ever moves.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from spec_jax.models.experts import Experts
from spec_jax.models.linear import Dense, Int8Dense, LoRA, Projection, RowEmbedding, TransposedDense
from spec_jax.models.placement import EXPERT, TENSOR, AnyMesh, mesh_of, put, row_axes, shardings, trimmed

LEAVES = (Dense, TransposedDense, Int8Dense, LoRA, Projection, RowEmbedding, Experts)

# The part of a model that a leaf belongs to, by its name, and whether its outputs are split or its inputs.
_ROLES = {
    "embedding": ("vocab", "columns"),
    "head": ("vocab", "columns"),
    "q": ("heads", "columns"),
    "mixer.gate": ("heads", "columns"),
    "o": ("heads", "rows"),
    "k": ("kv", "columns"),
    "v": ("kv", "columns"),
    **{name: ("delta", "columns") for name in ("qkv", "z", "b", "a", "conv", "a_log", "dt_bias")},
    "out": ("delta", "rows"),
    "gate": ("mlp", "columns"),
    "up": ("mlp", "columns"),
    "down": ("mlp", "rows"),
}

# What the last axes of a state's arrays are, by their names; axes before them are stacked layers.
_STATES = {
    "k": ("rows", "cache", None, None),
    "v": ("rows", "cache", None, None),
    "recurrent": ("rows", "delta", None, None),
    "conv": ("rows", None, "delta"),
    "factors.k": ("rows", None, "delta", None),
    "factors.k_norm": ("rows", None, "delta"),
    "factors.u": ("rows", "delta", None, None),
    "factors.decay": ("rows", None, "delta"),
    "pending.k": ("rows", None, "delta", None),
    "pending.k_norm": ("rows", None, "delta"),
    "pending.u": ("rows", "delta", None, None),
    "pending.weight": ("rows", "delta", None),
    "pending.decay": ("rows", "delta"),
    "logits": ("rows", None, "vocab"),
}


@dataclasses.dataclass(frozen=True)
class Split:
    """Which parts of a model the mesh's axes divide; the others are whole on every device.

    heads: attention, by query heads. held: the KV heads that caches hold over all devices. There are more than the
    model has if "tensor" is longer than their number: each device then holds the one that its queries read. kv: whether
    the maps to keys and values are split, which they are if the devices don't share heads. delta: gated delta layers,
    by key heads and the value heads that go with each. mlp: dense MLPs. inner: experts and the shared one, by their
    inner width. experts: by their number. vocab: embedding, head and logits.
    """

    heads: bool
    held: int
    kv: bool
    delta: bool
    mlp: bool
    inner: bool
    experts: bool
    vocab: bool


def split_of(config: Any, mesh: AnyMesh) -> Split:
    """What a mesh splits of a model: a part whose sizes the axis does not divide stays whole on every device."""
    t, e = mesh.shape[TENSOR], mesh.shape[EXPERT]
    size = lambda name: getattr(config, name, None) or 0  # noqa: E731
    divides = lambda name: size(name) % t == 0  # noqa: E731
    kv = config.num_kv_heads
    heads = divides("num_heads") and (kv % t == 0 or t % kv == 0)
    return Split(
        heads=heads,
        held=max(kv, t) if heads else kv,
        kv=heads and kv % t == 0,
        delta=divides("linear_num_key_heads"),
        mlp=divides("intermediate_size"),
        inner=divides("moe_intermediate_size") and divides("shared_expert_intermediate_size"),
        experts=size("num_experts") % e == 0,
        vocab=divides("vocab_size"),
    )


def whole_parts(config: Any, mesh: AnyMesh) -> tuple[str, ...]:
    """Parts of a model that stay whole on every device, each with the size that an axis does not divide."""
    split, t, e = split_of(config, mesh), mesh.shape[TENSOR], mesh.shape[EXPERT]
    kv = f"attention (num_heads {config.num_heads}, num_kv_heads {config.num_kv_heads}, {TENSOR} {t})"
    named = lambda part, name, axis, n: f"{part} ({name} {getattr(config, name)}, {axis} {n})"  # noqa: E731
    found = [] if split.heads else [kv]
    for part, axis, n, name in (
        ("delta", TENSOR, t, "linear_num_key_heads"),
        ("mlp", TENSOR, t, "intermediate_size"),
        ("inner", TENSOR, t, "moe_intermediate_size"),
        ("experts", EXPERT, e, "num_experts"),
        ("vocab", TENSOR, t, "vocab_size"),
    ):
        found += [] if getattr(split, part) else [named(part, name, axis, n)]
    return tuple(found)


def param_specs(target: Any, params: Any, mesh: AnyMesh | None = None) -> Any:
    """A PartitionSpec for every array of a Llama's or a Qwen's parameters, in their form.

    Maps to heads or inner widths are split by their outputs, those back to the hidden size by their inputs, embedding
    and head by the vocabulary, experts by their number and inner width; norms, routers and LoRA's small sides are
    whole. Biases and scales follow their maps.

    Args:
        target: the model (its config and, unless given, its mesh).
        params: the parameters; shapes (`jax.ShapeDtypeStruct`) will do. Layers in a tuple or stacked.
        mesh: the mesh; None takes the target's.

    Raises:
        ValueError: for a target without a mesh where none is given.
    """
    split = split_of(target.config, mesh_of(target, mesh))
    return jax.tree_util.tree_map_with_path(lambda path, x: _leaf(split, path, x), params, is_leaf=is_leaf)


def state_specs(target: Any, state: Any, mesh: AnyMesh | None = None, batch: int | None = None) -> Any:
    """A PartitionSpec for every array of a model's state, staged rows or outputs, in their form.

    Rows are split as `row_axes` says, caches by their KV heads, recurrent states and their factors by their heads,
    logits by the vocabulary.

    Args:
        target: the model (its config and, unless given, its mesh).
        state: the state; shapes will do.
        mesh: the mesh; None takes the target's.
        batch: the number of rows; None reads it off the state's `length`.

    Raises:
        ValueError: for a target without a mesh where none is given.
    """
    on, count = mesh_of(target, mesh), state.length.shape[0] if batch is None else batch
    return _named_specs(target, state, on, count, trimmed(row_axes(on, count) or None))


def cache_specs(target: Any, state: Any, batch: int) -> Any:
    """`state_specs` of a drafter's state around a model: the model's arrays as there, all others whole."""
    return _named_specs(target, state, mesh_of(target), batch, P())


def _named_specs(target: Any, state: Any, mesh: AnyMesh, batch: int, other: P) -> Any:
    split, rows = split_of(target.config, mesh), row_axes(mesh, batch)
    axes = {None: None, "rows": rows or None, "cache": TENSOR if split.heads else None}
    axes |= {name: TENSOR if getattr(split, name) else None for name in ("delta", "vocab")}

    def spec(path: Any, x: Any) -> P:
        named = names(path)
        key = next((n for n in (".".join(named[-2:]), *named[-1:]) if n in _STATES), None)
        if key is None:
            return other if jnp.ndim(x) else P()
        dims = _STATES[key]
        return trimmed(*[None] * (x.ndim - len(dims)), *(axes[d] for d in dims))

    return jax.tree_util.tree_map_with_path(spec, state)


def place(target: Any, params: Any) -> Any:
    """The parameters on the target's mesh, each device with its part; arrays that lie so already are left alone."""
    return put(params, shardings(mesh_of(target), param_specs(target, params)))


def is_leaf(x: Any) -> bool:
    """Whether a node of a parameter tree is split as a whole."""
    return isinstance(x, LEAVES)


def names(path: Any) -> tuple[str, ...]:
    """The fields and keys on a tree path."""
    keys = (getattr(key, "name", getattr(key, "key", None)) for key in path)
    return tuple(key for key in keys if isinstance(key, str))


def role(path: Any) -> tuple[str, str] | None:
    """The part of the model that a leaf belongs to and the side that is split; None where all of it is everywhere."""
    named = names(path)
    return _ROLES.get(".".join(named[-2:])) or (_ROLES.get(named[-1]) if named else None)


def _leaf(split: Split, path: Any, x: Any) -> Any:
    if isinstance(x, Experts):
        return _experts(split, x)
    known = role(path)
    side = known[1] if known and getattr(split, known[0]) else None
    if isinstance(x, RowEmbedding):
        return jax.tree.map(lambda _: P(TENSOR) if side else P(), x)
    if not is_leaf(x):
        return trimmed(*[None] * (x.ndim - 1), TENSOR) if side else P()
    return linear_specs(x, side)


def linear_specs(leaf: Any, side: str | None) -> Any:
    """Specs of a linear leaf that is split by its outputs ("columns"), its inputs ("rows") or not at all."""
    inputs = leaf.inputs if isinstance(leaf, Projection) else 1
    projected = isinstance(leaf, Projection)

    def spec(path: Any, x: Any) -> P:
        name, last = names(path)[-1], x.ndim - 1
        if side is None or x.ndim == 0:
            return P()
        whole = {"columns": ("a",), "rows": ("b", "bias", "scale", "step")}[side]
        if name in whole:
            return P()
        if projected and name in ("kernel", "a", "b"):
            at = 0 if side == "rows" else 1 if name == "b" else inputs
        else:
            at = last if (side == "columns") != (name == "weight") else last - 1
        return trimmed(*[TENSOR if i == at else None for i in range(x.ndim)])

    return jax.tree_util.tree_map_with_path(spec, leaf)


def _experts(split: Split, leaves: Experts) -> Experts:
    number, inner = EXPERT if split.experts else None, TENSOR if split.inner else None

    def one(path: Any, x: Any) -> Any:
        name = names(path)[-1]
        if is_leaf(x):
            return linear_specs(x, {"down": "rows"}.get(name, "columns") if split.inner else None)
        lead = [None] * (x.ndim - 3)
        if name in ("gate", "up"):
            return trimmed(*lead, number, None, inner)
        return trimmed(*lead, number, inner, None) if name == "down" else P()

    flat = lambda x: is_leaf(x) and not isinstance(x, Experts)  # noqa: E731
    return jax.tree_util.tree_map_with_path(one, leaves, is_leaf=flat)
