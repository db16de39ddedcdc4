"""The cases of `kernels --op gated_delta`: 8 rows of a Qwen3.5-35B layer (16 key and 32 value heads of 128 x 128)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.gated_delta import Pending, reference

_BATCH, _KEY_HEADS, _VALUE_HEADS, _DIM = 8, 16, 32, 128
_TREES = ((1, 1), (8, 4), (16, 8), (32, 8), (64, 16), (128, 16))

Compile = Callable[[Any, tuple], dict[str, Any]]


def cases(kernel: Any, quick: bool, compiled: Compile) -> Iterator[dict[str, Any]]:
    """Case by case; `compiled(function, args)` says whether a program builds, and its bundles."""
    for n, depth in ((16, 8),) if quick else _TREES:
        for fused in (True,) if quick else (True, False):
            args = _arrays(_BATCH, _KEY_HEADS, _VALUE_HEADS, n, depth, fused)
            built = compiled(*_flat(kernel.gated_delta, depth, args))
            bundles = built["bundles"]
            if bundles is not None:
                bundles /= _heads(kernel, args)
            output, state = _errors(kernel, n, depth, fused)
            case = {
                "n": n,
                "depth": depth,
                "fused_commit": fused,
                "compiled": built["compiled"],
                "bundles_per_head": bundles,
                "error_output": output,
                "error_state": state,
            }
            print(case, file=sys.stderr)
            yield case


def plot(result: dict[str, Any], figure: Any) -> None:
    """Bundles per value head and errors over the number of nodes."""
    left, right = figure.subplots(1, 2)
    for fused in (True, False):
        some = [case for case in result["cases"] if case["fused_commit"] == fused]
        n, kind = [case["n"] for case in some], "commit and verify" if fused else "verify"
        counted = [(case["n"], case["bundles_per_head"]) for case in some if case["bundles_per_head"] is not None]
        if counted:
            left.plot(*zip(*counted, strict=True), "o-", label=kind)
        right.plot(n, [case["error_output"] for case in some], "o-", label=f"output, {kind}")
        if fused:
            right.plot(n, [case["error_state"] for case in some], "o--", label="state")
    for axes, title in ((left, "bundles per value head"), (right, "error over the largest entry")):
        axes.set(xscale="log", yscale="log", xlabel="nodes", title=title)
        if axes.lines:
            axes.legend()


def _call(function: Any, depth: int, args: dict[str, Any], **options: Any) -> Any:
    pending = Pending(*args["pending"]) if args["pending"] else None
    names = ("q", "k", "v", "decay", "beta", "mask", "state")
    norms = {name: args[name] for name in ("q_norm", "k_norm")}
    return function(*(args[name] for name in names), pending, scale=_DIM**-0.5, depth=depth, **norms, **options)


def _heads(kernel: Any, args: dict[str, Any]) -> int:
    """Value heads that one program of the kernel has."""
    pending = Pending(*args["pending"]) if args["pending"] else None
    plan = kernel.plan(args["q"], args["v"], args["state"], pending)
    return plan.heads * plan.group


def _flat(function: Any, depth: int, args: dict[str, Any]) -> tuple[Any, tuple[jax.ShapeDtypeStruct, ...]]:
    """The call as a function of arrays alone, and their shapes."""
    leaves, structure = jax.tree.flatten(args)
    shapes = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves)
    return lambda *x: _call(function, depth, structure.unflatten(x)), shapes


def _errors(kernel: Any, n: int, depth: int, fused: bool) -> tuple[float, float]:
    """Largest errors of output and state over their largest entries, in interpret mode, against float64.

    v is widened to float32, which changes none of the kernel's products, so that the output is not rounded at the end.
    """
    args = _arrays(1, 4, 8, n, depth, fused)
    args["v"] = args["v"].astype(jnp.float32)
    got = jax.jit(lambda x: _call(kernel.gated_delta, depth, x, interpret=True))(args)
    with jax.enable_x64(True):
        wide = lambda x: x.astype(jnp.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x  # noqa: E731
        want = _call(reference.gated_delta, depth, jax.tree.map(wide, args))
        want = [np.asarray(x) for x in (want.output, want.state)]
    pairs = zip((got.output, got.state), want, strict=True)
    output, state = (float(np.abs(np.asarray(x, np.float64) - y).max() / np.abs(y).max()) for x, y in pairs)
    return output, state


def _arrays(b: int, hk: int, hv: int, n: int, depth: int, fused: bool) -> dict[str, Any]:
    """Gates as a fresh model has them, some of them near -150, others near 0; keys of a sequence are correlated."""
    rng = np.random.default_rng(n)
    normal = lambda *shape: rng.normal(size=shape)  # noqa: E731
    same = normal(b, 1, hk, _DIM)
    rows = lambda count: jnp.asarray(normal(b, count, hk, _DIM) + 0.5 * same, jnp.bfloat16)  # noqa: E731
    number = lambda x: jnp.asarray(x, jnp.float32)  # noqa: E731
    norm = lambda x: jax.lax.rsqrt((x.astype(jnp.float32) ** 2).sum(-1) + 1e-6)  # noqa: E731
    rate = np.exp(rng.uniform(np.log(1e-3), np.log(16), (b, 1, hv)))
    decay = np.where(rng.random((b, n, hv)) < 0.05, -150, -rate * np.log1p(np.exp(1 + 0.5 * normal(b, n, hv))))
    q, k = rows(n), rows(n)
    args = {
        "q": q,
        "k": k,
        "v": jnp.asarray(normal(b, n, hv, _DIM), jnp.bfloat16),
        "decay": number(decay),
        "beta": number(1 / (1 + np.exp(-normal(b, n, hv)))),
        "mask": jnp.asarray(np.stack([_tree(rng, n, depth) for _ in range(b)])),
        "state": number(0.3 * normal(b, hv, _DIM, _DIM)),
        "q_norm": norm(q),
        "k_norm": norm(k),
        "pending": (),
    }
    if fused:
        k, weight = rows(depth), number(rng.uniform(0, 1, (b, hv, depth)))
        args["pending"] = (k, norm(k), number(normal(b, hv, depth, _DIM)), weight, number(rng.uniform(-2, 0, (b, hv))))
    return args


def _tree(rng: np.random.Generator, n: int, depth: int) -> np.ndarray:
    """The mask of a random tree with one path of `depth` nodes."""
    mask, levels = np.eye(n, dtype=bool), np.zeros(n, int)
    for i in range(1, n):
        parent = i - 1 if i < depth else rng.choice(np.flatnonzero(levels[:i] < depth - 1))
        mask[i] |= mask[parent]
        levels[i] = levels[parent] + 1
    return mask
