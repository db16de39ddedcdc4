"""Random trees and gates in the regimes that break such code, and the recurrence along every root path in float64."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.gated_delta import Staged, fold, gather

REGIMES = ("init", "slow", "fast", "hicorr", "adv")


@dataclasses.dataclass(frozen=True)
class Case:
    """Shapes and kind of one call. `used` counts each row's real nodes, and gives the batch size."""

    used: tuple[int, ...] = (16, 9)
    n: int = 16
    hk: int = 2
    hv: int = 4
    dk: int = 16
    dv: int = 24
    depth: int = 8
    regime: str = "init"
    delta: bool = True
    channels: bool = False
    chain: bool = False
    norms: bool = True
    most_beta: float = 1.0


@dataclasses.dataclass
class Inputs:
    """Arrays of a call in float64; rows that no node uses are NaN. parent is -1 for children of the state."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    decay: np.ndarray
    beta: np.ndarray | None
    mask: np.ndarray
    state: np.ndarray
    q_norm: np.ndarray | None
    k_norm: np.ndarray | None
    parent: np.ndarray
    scale: float = 0.25

    def args(self, dtype="float32"):
        """Positional arguments of gated_delta."""
        arrays = (self.q, self.k, self.v, self.decay, self.beta, self.mask, self.state)
        return tuple(None if x is None else x if x.dtype == bool else x.astype(dtype) for x in arrays)

    def options(self, dtype="float32"):
        norms = {"q_norm": self.q_norm, "k_norm": self.k_norm}
        return {"scale": self.scale} | {k: None if x is None else x.astype(dtype) for k, x in norms.items()}


def random_parents(rng: np.random.Generator, used: int, n: int, depth: int, chain: bool = False) -> np.ndarray:
    """Parents of a tree `depth` nodes deep (if it has as many) in a random topological order; -2 for unused nodes.

    As many as n - used unused nodes lie anywhere between the others.
    """
    parent, level = np.full(used, -1), np.zeros(used, int)
    for i in range(1, used):
        spine = i < depth or chain
        able = np.flatnonzero(level[:i] < depth - 1)
        parent[i] = i - 1 if spine else rng.choice([-1, *able])
        level[i] = level[parent[i]] + 1 if parent[i] >= 0 else 0
    order, ready = [], [i for i in range(used) if parent[i] < 0]
    while ready:
        node = ready.pop(rng.integers(len(ready)))
        order.append(node)
        ready += [i for i in range(used) if parent[i] == node]
    slots = np.sort(rng.choice(n, used, replace=False)) if not chain else np.arange(used)
    place = dict(zip(order, slots, strict=True)) | {-1: -1}
    out = np.full(n, -2)
    for node in range(used):
        out[place[node]] = place[parent[node]]
    return out


def ancestors(parent: np.ndarray) -> np.ndarray:
    """[n, n] mask of each node's ancestors and itself; unused nodes (-2) see nothing."""
    mask = np.zeros((len(parent), len(parent)), bool)
    for i, p in enumerate(parent):
        if p >= 0:
            mask[i] = mask[p]
        mask[i, i] = p > -2
    return mask


def gates(rng: np.random.Generator, shape: tuple[int, ...], regime: str) -> np.ndarray:
    """Log decays: as a fresh model has them, near 0, some of them down to -400, or none."""
    if regime == "slow":
        return -np.exp(rng.uniform(np.log(1e-4), np.log(0.1), shape))
    if regime == "fast":
        return np.where(rng.random(shape) < 0.3, -rng.uniform(20, 400, shape), -rng.uniform(0, 1, shape))
    if regime == "adv":
        return np.zeros(shape)
    rate = rng.uniform(0.01, 16, shape[-1:]) if regime == "init" else 0.02
    return -rate * np.log1p(np.exp(1 + 0.5 * rng.normal(size=shape)))


def inputs(case: Case, seed: int = 0) -> Inputs:
    rng = np.random.default_rng(seed)
    b, n, hk, hv, dk, dv = len(case.used), case.n, case.hk, case.hv, case.dk, case.dv
    parent = np.stack([random_parents(rng, used, n, case.depth, case.chain) for used in case.used])
    mask = np.stack([ancestors(p) for p in parent])
    q, k, v = rng.normal(size=(b, n, hk, dk)), rng.normal(size=(b, n, hk, dk)), rng.normal(size=(b, n, hv, dv))
    same = rng.normal(size=(b, 1, hk, dk))
    share = {"hicorr": 0.9, "adv": 1.0}.get(case.regime, 0.0)
    k = np.sqrt(share) * same + np.sqrt(1 - share) * k
    beta = {"hicorr": 0.95, "adv": 1.0}.get(case.regime, rng.uniform(0, 1, (b, n, hv))) * np.ones((b, n, hv))
    norms = [1 / np.sqrt((x**2).sum(-1) + 1e-6) for x in (q, k)]
    decay = gates(rng, (b, n, hv, dk) if case.channels else (b, n, hv), case.regime)
    if not case.norms:
        q, k = (x * norm[..., None] for x, norm in zip((q, k), norms, strict=True))
    out = Inputs(
        q, k, v, decay, case.most_beta * beta if case.delta else None, mask, rng.normal(size=(b, hv, dk, dv)),
        *(norms if case.norms else (None, None)), parent, 
    )  # fmt: skip
    for x in (out.q, out.k, out.v, out.decay, out.beta, out.q_norm, out.k_norm):
        if x is not None:
            x[~mask.any(-1)] = np.nan
    return rounded(out)


def rounded(x: Inputs) -> Inputs:
    """Every array as float32 holds it, so that errors are those of the arithmetic."""
    fields = {f.name: getattr(x, f.name) for f in dataclasses.fields(x)}
    narrow = lambda y: isinstance(y, np.ndarray) and y.dtype == np.float64  # noqa: E731
    return Inputs(**{name: y.astype(np.float32).astype(np.float64) if narrow(y) else y for name, y in fields.items()})


def step(state, q, k, v, decay, beta, scale):
    """One token of one head: (output, u, state)."""
    state = np.exp(decay)[..., None] * state if np.ndim(decay) else np.exp(decay) * state
    u = v if beta is None else beta * (v - state.T @ k)
    state = state + np.outer(k, u)
    return scale * state.T @ q, u, state


def sequential(x: Inputs) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Outputs [b, n, hv, dv], u [b, hv, n, dv] and each node's state [b, n, hv, dk, dv]: one path after another."""
    b, n, hv, dv = x.v.shape
    group = hv // x.k.shape[2]
    q, k = (y if norm is None else y * norm[..., None] for y, norm in ((x.q, x.q_norm), (x.k, x.k_norm)))
    out, u, states = np.zeros(x.v.shape), np.zeros((b, hv, n, dv)), np.zeros((b, n, *x.state.shape[1:]))
    for row in range(b):
        for node in np.flatnonzero(x.parent[row] > -2):
            path = [node]
            while x.parent[row, path[0]] >= 0:
                path.insert(0, x.parent[row, path[0]])
            for h in range(hv):
                s = x.state[row, h]
                for i in path:
                    beta = None if x.beta is None else x.beta[row, i, h]
                    at = (q[row, i, h // group], k[row, i, h // group], x.v[row, i, h], x.decay[row, i, h], beta)
                    out[row, node, h], u[row, h, node], s = step(s, *at, x.scale)
                states[row, node, h] = s
    return out, u, states


def path_to(parent: np.ndarray, node: int, size: int) -> tuple[np.ndarray, int]:
    """The root path of a node (-1: none), padded with -1, and its length."""
    path = []
    while node >= 0:
        path.insert(0, node)
        node = parent[node]
    return np.array(path + [-1] * (size - len(path))), len(path)


def close(got, want, tolerance: float) -> None:
    """Largest error over the largest value."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape
    np.testing.assert_array_less(np.abs(got - want).max(), tolerance * np.abs(want).max() + 1e-300)


def accept(x: Inputs, u, nodes, size: int, dtype="float32"):
    """Pending rows of the root paths of these nodes, from staged rows u."""
    k, k_norm, decay = (None if y is None else jnp.asarray(y, dtype) for y in (x.k, x.k_norm, x.decay))
    paths = [path_to(parent, node, size) for parent, node in zip(x.parent, nodes, strict=True)]
    path, length = (jnp.asarray(np.stack(y)) for y in zip(*paths, strict=True))
    return _gather(Staged(k, k_norm, u, decay), path, length)


_gather, _fold = jax.jit(gather), jax.jit(fold)


@functools.cache
def _compiled(implementation, depth: int, scale: float):
    return jax.jit(functools.partial(implementation, depth=depth, scale=scale))


def check(implementation, case: Case, seed: int = 0, tolerance: float = 2e-6, dtype="float32", shared=False) -> None:
    """Outputs, u and the state of an accepted node that is not the last, against the recurrence.

    `shared` takes the program of an earlier call: not where a fault may be planted.
    """
    x = inputs(case, seed)
    depth = case.n if case.chain else case.depth
    norms = x.options(dtype)
    call = (_compiled if shared else _compiled.__wrapped__)(implementation, depth, norms.pop("scale"))
    got = call(*x.args(dtype), **norms)
    out, u, states = sequential(x)
    assert got.output.dtype == dtype and got.state.dtype == dtype
    close(got.output, out, tolerance)
    close(got.u, u, tolerance)
    np.testing.assert_array_equal(got.state, x.state.astype(dtype))
    nodes = [
        np.flatnonzero(parent > -2)[-2 if used > 1 else 0] for parent, used in zip(x.parent, case.used, strict=True)
    ]
    state = _fold(jnp.asarray(x.state, dtype), accept(x, got.u, nodes, depth, dtype))
    close(state, states[np.arange(len(nodes)), nodes], tolerance)
