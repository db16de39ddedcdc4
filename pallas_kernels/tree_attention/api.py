"""The public function: checks, and the choice of an implementation."""

from __future__ import annotations

from typing import Any, Literal

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.platform import kernels
from pallas_kernels.tree_attention import gpu, reference, tpu
from pallas_kernels.tree_attention.blocks import UnsupportedError

Implementation = Literal["xla", "pallas_tpu", "pallas_gpu"]

_IMPLEMENTATIONS: dict[str, Any] = {
    "xla": reference.tree_attention,
    "pallas_tpu": tpu.tree_attention,
    "pallas_gpu": gpu.tree_attention,
}
_BY_PLATFORM: dict[str | None, Any] = {"tpu": tpu.tree_attention, "gpu": gpu.tree_attention}


def tree_attention(
    q: Float[Array, "b n heads d"],
    cache_k: Float[Array, "b kv s d"],
    cache_v: Float[Array, "b kv s d"],
    length: Int[Array, "b"],
    tree_k: Float[Array, "b kv m d"],
    tree_v: Float[Array, "b kv m d"],
    mask: Bool[Array, "b n m"],
    scale: float,
    *,
    window: int | None = None,
    sinks: int | None = None,
    ring: bool = False,
    soft_cap: float | None = None,
    implementation: Implementation | None = None,
) -> Float[Array, "b n heads d"]:
    """Attention of n draft-tree nodes to `length` cached rows and to those of m staged rows that `mask` allows.

    Grouped-query (arXiv 2305.13245): heads is a multiple of kv. Every node sees the whole prefix, so the mask covers
    the tree alone; prefix and tree are merged by their log-sum-exp. mask[i] marks node i's ancestors and itself,
    ancestors in the order of their depth, so that node i is at text position length + mask[i].sum() - 1. Slots and
    staged rows that no node sees may hold anything, NaN too; a node that sees nothing gets zeros. The result has q's
    dtype, and all sums are float32.

    window: a node sees the last `window` text positions up to and with its own, in the prefix and along its path.
    sinks: with a window, the first `sinks` text positions stay visible (StreamingLLM, arXiv 2309.17453).
    ring: the cache keeps the last positions alone: position p is in slot p mod s, and `length` may be more than s. It
    takes a window, at most one wider than the s slots, and no sinks. All implementations read rings.
    soft_cap: logits become soft_cap * tanh(logits / soft_cap) (Gemma 2, arXiv 2408.00118).
    implementation: "xla" runs anywhere; "pallas_tpu" reads each live cache row once, whatever n; "pallas_gpu" splits
    long rows over programs. None takes the kernel of jax's default backend, and XLA where that cannot serve the shapes
    or there is none. On a kernel the call must not be vmapped.

    Raises ValueError for arrays or options that don't fit, and for shapes that the named implementation can't serve,
    saying why.
    """
    _check(q, cache_k, cache_v, length, tree_k, tree_v, mask, window, sinks, ring, soft_cap)
    if window is not None and not ring and window >= cache_k.shape[2] + mask.shape[2]:  # wider than any text can be
        window = sinks = None
    if implementation is not None and implementation not in _IMPLEMENTATIONS:
        raise ValueError(f"implementation: got {implementation!r}, takes None or one of {', '.join(_IMPLEMENTATIONS)}")
    call = lambda function: function(  # noqa: E731
        *(q, cache_k, cache_v, length, tree_k, tree_v, mask, scale),
        **{"window": window, "sinks": sinks or 0, "ring": ring, "soft_cap": soft_cap},
    )
    if implementation is not None:
        return call(_IMPLEMENTATIONS[implementation])
    try:
        return call(_BY_PLATFORM.get(kernels(), reference.tree_attention))
    except UnsupportedError:
        return call(reference.tree_attention)


def _check(q, cache_k, cache_v, length, tree_k, tree_v, mask, window, sinks, ring, soft_cap) -> None:
    b, n, heads, d = q.shape
    kv, m = cache_k.shape[1], tree_k.shape[2]
    if heads % kv:
        raise ValueError(f"q: got {heads} heads, takes a multiple of the cache's {kv} key/value heads")
    shapes = {
        "cache_k": (cache_k, (b, kv, cache_k.shape[2], d)),
        "cache_v": (cache_v, cache_k.shape),
        "length": (length, (b,)),
        "tree_k": (tree_k, (b, kv, m, d)),
        "tree_v": (tree_v, tree_k.shape),
        "mask": (mask, (b, n, m)),
    }
    for name, (array, shape) in shapes.items():
        if array.shape != shape:
            raise ValueError(f"{name}: got shape {array.shape}, takes {shape} beside q of shape {q.shape}")
    if mask.dtype != jnp.bool_:
        raise ValueError(f"mask: got {mask.dtype}, takes bool")
    if window is not None and window < 1:
        raise ValueError(f"window: got {window}, takes None or a number from 1 (the node itself)")
    if sinks and (sinks < 0 or window is None):
        raise ValueError(f"sinks: got {sinks} with window {window}, takes None, 0, or with a window a positive number")
    if ring and (window is None or sinks or window > cache_k.shape[2] + 1):
        raise ValueError(
            f"ring: got window {window} and sinks {sinks} with {cache_k.shape[2]} slots, takes a window of at most one "
            "more than the slots, and no sinks, since only the last positions are kept"
        )
    if soft_cap is not None and not soft_cap > 0:
        raise ValueError(f"soft_cap: got {soft_cap}, takes None or a positive number")
