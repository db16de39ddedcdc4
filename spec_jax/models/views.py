"""Cheaper forwards of a target's own parameters, to draft with: layers skipped, or weights in eight bits."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import TypeVar

import jax

from spec_jax.models.linear import Dense, quantize_int8
from spec_jax.models.llama import Llama, LlamaParams
from spec_jax.models.qwen import Qwen, QwenParams

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
    count = target.config.num_layers
    if not isinstance(params.layers, tuple):
        raise ValueError("params: got stacked layers, takes a tuple of layers, since a view shares arrays as they are")
    left_out = set(layers)
    if not left_out <= set(range(count)) or len(left_out) == count:
        raise ValueError(f"layers: got {sorted(left_out)}, takes some of 0 .. {count - 1}, not all")
    kept = [i for i in range(count) if i not in left_out]
    view = dataclasses.replace(target, config=target.config.with_layers(kept), taps=())  # type: ignore[arg-type]
    return view, dataclasses.replace(params, layers=tuple(params.layers[i] for i in kept))


def int8(params: P) -> P:
    """The parameters with every dense map's weights rounded to int8; all else is shared.

    That is embedding, norms and LoRA updates, and of a Qwen model sparse experts, routers, gates and the MTP head.

    For the same target: how the leaves are stored is all that differs. As a drafter it follows Quasar and SubSpec,
    which draft with low-bit copies of the target's own weights.
    """
    is_dense = lambda x: isinstance(x, Dense)  # noqa: E731
    layers, head = jax.tree.map(
        lambda x: quantize_int8(x) if is_dense(x) else x, (params.layers, params.head), is_leaf=is_dense
    )
    return dataclasses.replace(params, layers=layers, head=head)
