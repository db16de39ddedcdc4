"""The public function: checks, and the choice of an implementation."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, Literal

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from pallas_kernels.gated_delta.factors import Pending, Result, Staged, UnsupportedError
from pallas_kernels.platform import kernels

Implementation = Literal["xla", "pallas_tpu", "pallas_gpu"]

_MODULES = {"xla": "reference", "pallas_tpu": "tpu", "pallas_gpu": "gpu"}
_BY_PLATFORM: dict[str | None, Any] = {"tpu": "pallas_tpu", "gpu": "pallas_gpu"}
_OPTIONAL = ("beta", "q_norm", "k_norm", "staged.k_norm", "pending.k_norm")


def gated_delta(
    q: Float[Array, "b n hk dk"],
    k: Float[Array, "b n hk dk"],
    v: Float[Array, "b n hv dv"],
    decay: Float[Array, "b n hv *dk"],
    beta: Float[Array, "b n hv"] | None,
    mask: Bool[Array, "b n m"],
    state: Float[Array, "b hv dk dv"],
    pending: Pending | None = None,
    *,
    scale: float,
    q_norm: Float[Array, "b n hk"] | None = None,
    k_norm: Float[Array, "b n hk"] | None = None,
    staged: Staged | None = None,
    depth: int | None = None,
    implementation: Implementation | None = None,
) -> Result:
    """Score n draft-tree nodes on a recurrent state that stays as it is, first folding in what was accepted last.

    Each node's output is what the recurrence gives along its root path (gated delta rule, arXiv 2412.06464):

        S <- exp(decay) S;  u = beta (v - S^T k);  S <- S + k u^T;  output = scale S^T q

    and u is what a commit needs of it beside k and decay: `gather` the accepted path of them into the next call's
    `pending`, or `fold` it. Value head h uses key head h // (hv // hk). Sums are float32.

    q, k: raw rows; with q_norm, k_norm each row is multiplied by its norm. decay: at most 0, -inf forgets; per head, or
    per channel of dk (GLA, arXiv 2312.06635; KDA). beta None leaves the delta rule out, u = v: Mamba2/SSD (k = B,
    q = C, v = dt x, decay = dt A; its D skip is the caller's), RetNet, linear attention, GLA. decay 0 is DeltaNet
    (arXiv 2406.06484). Gated DeltaProduct (2502.10297) is a chain of nodes per token: decay at the first, output of the
    last.
    mask: node i's ancestors and itself, a parent before its children; a row that is all False is an unused node, its
    output and u are zeros whatever it holds. A NaN or infinity reaches those that see it, nobody else.
    state: float32, or bfloat16 at the cost of its rounding (some 1e-2 over a text). pending: see `Pending`.
    staged: m - n nodes scored before, seen by mask's first columns. depth: the most nodes on a path, none of `staged`
    among them (None: n); it saves levels of the solve, and a node that is deeper gets NaN.

    implementation: "xla" runs anywhere, has gradients, and float64 for float64 arrays. None takes the kernel of jax's
    default backend, and XLA where that cannot serve the arrays or there is none. Kernels have no gradients, and on one
    the call must not be vmapped.

    Raises ValueError for arrays or options that don't fit, and for arrays that the named implementation can't serve,
    saying why.
    """
    check(q, k, v, decay, beta, mask, state, pending, q_norm, k_norm, staged, depth)
    check_implementation(implementation)
    options: dict[str, Any] = {"scale": scale, "q_norm": q_norm, "k_norm": k_norm, "staged": staged, "depth": depth}
    call = lambda name: _load(name)(q, k, v, decay, beta, mask, state, pending, **options)  # noqa: E731
    if implementation is not None:
        return call(implementation)
    try:
        return call(_BY_PLATFORM.get(kernels(), "xla"))
    except UnsupportedError:
        return call("xla")


def check_implementation(implementation: Any) -> None:
    """ValueError for a name that is none."""
    if implementation is not None and implementation not in _MODULES:
        raise ValueError(f"implementation: got {implementation!r}, takes None or one of {', '.join(_MODULES)}")


def check(q, k, v, decay, beta, mask, state, pending, q_norm, k_norm, staged, depth) -> None:
    """ValueError for the first array of `gated_delta` whose shape or dtype doesn't fit the others."""
    for name, array, dims in (("q", q, "[b, n, hk, dk]"), ("v", v, "[b, n, hv, dv]")):
        if array.ndim != 4:
            raise ValueError(f"{name}: got shape {array.shape}, takes {dims}")
    b, n, hk, dk = q.shape
    hv, dv = v.shape[2:]
    if hv % hk:
        raise ValueError(f"v: got {hv} heads, takes a multiple of q's {hk}")
    m = 0 if staged is None else staged.k.shape[1]
    per_channel = decay.ndim == 4
    gate = (hv, dk) if per_channel else (hv,)
    shapes: dict[str, tuple[Any, tuple[int, ...]]] = {
        "k": (k, (b, n, hk, dk)),
        "v": (v, (b, n, hv, dv)),
        "decay": (decay, (b, n, *gate)),
        "beta": (beta, (b, n, hv)),
        "mask": (mask, (b, n, m + n)),
        "state": (state, (b, hv, dk, dv)),
        "q_norm": (q_norm, (b, n, hk)),
        "k_norm": (k_norm, (b, n, hk)),
    }
    if staged is not None:
        shapes |= {
            "staged.k": (staged.k, (b, m, hk, dk)),
            "staged.k_norm": (staged.k_norm, (b, m, hk)),
            "staged.u": (staged.u, (b, hv, m, dv)),
            "staged.decay": (staged.decay, (b, m, *gate)),
        }
    if pending is not None:
        p = pending.k.shape[1]
        shapes |= {
            "pending.k": (pending.k, (b, p, hk, dk)),
            "pending.k_norm": (pending.k_norm, (b, p, hk)),
            "pending.u": (pending.u, (b, hv, p, dv)),
            "pending.weight": (pending.weight, (b, hv, p, *gate[1:])),
            "pending.decay": (pending.decay, (b, *gate)),
        }
    given = {name: x for name, x in shapes.items() if name not in _OPTIONAL or x[0] is not None}
    for name, (array, shape) in given.items():
        if array.shape != shape:
            raise ValueError(f"{name}: got shape {array.shape}, takes {shape} beside q of {q.shape}, v of {v.shape}")
        if name != "mask" and not jnp.issubdtype(array.dtype, jnp.floating):
            raise ValueError(f"{name}: got {array.dtype}, takes floating point")
    if not jnp.issubdtype(q.dtype, jnp.floating):
        raise ValueError(f"q: got {q.dtype}, takes floating point")
    if mask.dtype != jnp.bool_:
        raise ValueError(f"mask: got {mask.dtype}, takes bool")
    if depth is not None and depth < 1:
        raise ValueError(f"depth: got {depth}, takes None or a number from 1")


def _load(name: str) -> Callable[..., Result]:
    return importlib.import_module(f"pallas_kernels.gated_delta.{_MODULES[name]}").gated_delta
