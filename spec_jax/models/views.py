"""Cheaper forwards of a target's own parameters, to draft with: layers skipped, a window, or weights in eight bits."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any, TypeVar

import jax
from jaxtyping import Array, Bool

from spec_jax.models.layers import Skippable
from spec_jax.models.linear import PLAIN, ByHead, Projection, quantize_int8
from spec_jax.models.llama import Llama, LlamaParams
from spec_jax.models.qwen import Qwen, QwenParams
from spec_jax.models.qwen_config import ATTENTION, WINDOW, QwenConfig

T = TypeVar("T", bound=Llama | Qwen)
P = TypeVar("P", bound=LlamaParams | QwenParams)


def skip(target: T, params: P, layers: Collection[int]) -> tuple[T, P]:
    """The model without some layers, and its parameters: the same arrays, none copied. Taps are dropped.

    A set found by search is Draft & Verify's self-drafter (arXiv 2309.08168); all layers from l on are an early exit.
    The view keeps a state of its own, whose rows differ from the target's behind the first skipped layer.

    Args:
        target: the whole model.
        params: its parameters, with the layers as a tuple.
        layers: indices of the layers left out.

    Raises:
        ValueError: for an index that is no layer, for all layers, or for stacked layers, which a view can't share.
    """
    return without(target, layers), fewer(params, layers)


def without(target: T, layers: Collection[int]) -> T:
    """The model of `skip`. Raises ValueError for an index that is no layer, or for all layers."""
    kept = _kept(target.config.num_layers, layers)
    return dataclasses.replace(target, config=target.config.with_layers(kept), taps=())  # type: ignore[arg-type]


def fewer(params: P, layers: Collection[int]) -> P:
    """The parameters of `skip`. Raises ValueError as `without` does, and for stacked layers."""
    own = _tuple(params)
    return dataclasses.replace(params, layers=tuple(own[i] for i in _kept(len(own), layers)))


def masked(params: P, keep: Bool[Array, "l"]) -> P:
    """The parameters with the layers that `keep` leaves out skipped: `skip` with a set that may change while decoding.

    For the same model, whose `score` branches at every layer, so that a skipped one costs nothing. The rows that it
    stages are zeros, which a draft under one set never reads; they must not be committed. So such a view drafts over
    the target's own state, which holds every layer's rows of all committed text.

    Raises:
        ValueError: for a mask of another number of layers, or for stacked layers.
    """
    own = _tuple(params)
    if keep.shape != (len(own),):
        raise ValueError(f"keep: got shape {keep.shape}, takes ({len(own)},), a mark for every layer")
    return dataclasses.replace(params, layers=tuple(Skippable(x, keep[i]) for i, x in enumerate(own)))


def windowed(target: T, tokens: int) -> T:
    """The model whose full attention layers see the last `tokens` positions alone; its parameters stay as they are.

    It keeps no more keys and values than that takes, so drafting costs the same however long the text is: MagicDec's
    and StreamingLLM's drafting cache (arXiv 2309.17453) without its sinks. Taps are dropped.

    Raises:
        ValueError: for a model with a window of its own, or a number of tokens that is no window.
    """
    config = target.config
    if config.sliding_window is not None:
        raise ValueError(f"target: got one with a window of {config.sliding_window}, takes one without")
    if tokens < 1:
        raise ValueError(f"tokens: got {tokens}, takes 1 or more")
    changes: dict[str, Any] = {"sliding_window": tokens}
    if isinstance(config, QwenConfig):
        changes["layer_types"] = tuple(WINDOW if kind == ATTENTION else kind for kind in config.layer_types)
    return dataclasses.replace(target, config=dataclasses.replace(config, **changes), taps=())  # type: ignore[arg-type]


def _kept(count: int, layers: Collection[int]) -> list[int]:
    left_out = set(layers)
    if not left_out <= set(range(count)) or len(left_out) == count:
        raise ValueError(f"layers: got {sorted(left_out)}, takes some of 0 .. {count - 1}, not all")
    return [i for i in range(count) if i not in left_out]


def _tuple(params: Any) -> tuple[Any, ...]:
    if not isinstance(params.layers, tuple):
        raise ValueError("params: got stacked layers, takes a tuple of layers, since a view shares arrays as they are")
    return params.layers


def int8(params: P) -> P:
    """The parameters with every dense map's weights rounded to int8, Tunix's einsum kernels too; all else is shared.

    That is embedding, norms and LoRA updates, and of a Qwen model sparse experts, routers, gates and the MTP head.

    For the same target: how the leaves are stored is all that differs. As a drafter it follows Quasar and SubSpec,
    which draft with low-bit copies of the target's own weights.
    """
    is_dense = lambda x: isinstance(x, (*PLAIN, Projection, ByHead))  # noqa: E731
    layers, head = jax.tree.map(
        lambda x: quantize_int8(x) if is_dense(x) else x, (params.layers, params.head), is_leaf=is_dense
    )
    return dataclasses.replace(params, layers=layers, head=head)
