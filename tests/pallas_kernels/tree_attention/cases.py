"""Random trees with NaN wherever nobody may look, and a dense softmax in float64 to compare with."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Case:
    """Shapes and options of one call. `lengths` gives the batch size; `used` counts each row's real nodes."""

    lengths: tuple[int, ...]
    used: tuple[int, ...]
    n: int = 16
    m: int | None = None
    heads: int = 4
    kv: int = 2
    d: int = 64
    slots: int = 300
    window: int | None = None
    sinks: int = 0
    ring: bool = False
    soft_cap: float | None = None
    dtype: str = "float32"
    scale: float = 0.3

    def options(self):
        return {"window": self.window, "sinks": self.sinks, "ring": self.ring, "soft_cap": self.soft_cap}


CASES = {
    "ragged": Case(lengths=(0, 1, 129, 300), used=(16, 1, 9, 16)),
    "block edges": Case(lengths=(127, 128, 255, 256), used=(16, 16, 16, 16)),
    "one node": Case(lengths=(5, 131), used=(1, 1), n=1),
    "odd nodes": Case(lengths=(140, 7), used=(13, 4), n=13, heads=3, kv=1),
    "three per group": Case(lengths=(200,), used=(12,), n=12, heads=6, kv=2, d=32),
    "no groups": Case(lengths=(33, 260), used=(8, 8), n=8, heads=2, kv=2, d=128),
    "64 nodes": Case(lengths=(170, 20), used=(64, 40), n=64, heads=2, kv=1),
    "128 nodes": Case(lengths=(170,), used=(100,), n=128, heads=1, kv=1),
    "head_dim 96": Case(lengths=(300, 11), used=(16, 5), d=96),
    "head_dim 256": Case(lengths=(290, 40), used=(16, 16), d=256),
    "short cache": Case(lengths=(0, 9, 20), used=(6, 6, 3), n=6, slots=20, d=32),
    "rectangular": Case(lengths=(50, 270), used=(24, 24), n=8, m=24),
    "window": Case(lengths=(0, 3, 129, 300), used=(16, 16, 9, 16), window=40),
    "window under the depth": Case(lengths=(100, 256), used=(16, 16), window=3),
    "window of one": Case(lengths=(0, 128, 200), used=(16, 16, 16), window=1),
    "wide window": Case(lengths=(2, 300), used=(16, 16), window=200),
    "sinks": Case(lengths=(0, 2, 129, 300), used=(16, 16, 9, 16), window=20, sinks=4),
    "many sinks": Case(lengths=(20, 150, 300), used=(16, 16, 16), window=9, sinks=140),
    "sinks and no window left": Case(lengths=(256, 128), used=(16, 16), window=1, sinks=5),
    "ring": Case(lengths=(0, 90, 256, 257, 1000), used=(16, 9, 16, 1, 16), slots=256, window=200, ring=True),
    "ring that ends in a block": Case(
        lengths=(1, 299, 301, 650, 913), used=(16, 16, 3, 16, 16), slots=300, window=301, ring=True, heads=2, kv=1
    ),
    "short ring": Case(lengths=(0, 3, 8, 9, 22), used=(6, 6, 6, 2, 6), n=6, slots=8, window=6, ring=True, d=32),
    "ring for a window of one": Case(lengths=(0, 8, 13), used=(6, 6, 6), n=6, slots=8, window=1, ring=True, d=32),
    "ring, bfloat16": Case(
        lengths=(150, 384, 500), used=(16, 7, 16), slots=384, window=300, ring=True, soft_cap=3.0, dtype="bfloat16"
    ),
    "soft cap": Case(lengths=(0, 150, 300), used=(16, 16, 2), soft_cap=2.0, scale=1.0),
    "all together": Case(lengths=(1, 150, 300), used=(16, 7, 16), window=50, sinks=3, soft_cap=3.0, heads=8),
    "bfloat16": Case(lengths=(0, 1, 129, 300), used=(16, 1, 9, 16), dtype="bfloat16"),
    "bfloat16, all together": Case(
        lengths=(1, 150, 300), used=(16, 7, 16), window=50, sinks=3, soft_cap=3.0, dtype="bfloat16", d=128
    ),
}


def arrays(case: Case, seed: int = 0) -> tuple:
    """The positional arguments of tree_attention. Every row that no real node sees holds NaN, key and value."""
    rng = np.random.default_rng(seed)
    b, m = len(case.lengths), case.m or case.n
    normal = lambda *shape: rng.normal(size=shape)  # noqa: E731
    q = normal(b, case.n, case.heads, case.d)
    cache = normal(2, b, case.kv, case.slots, case.d)
    tree = normal(2, b, case.kv, m, case.d)
    mask = np.zeros((b, m, m), bool)
    for row, used in enumerate(case.used):
        for i in range(m):  # as spec_jax.tree.ancestors has them: an unused node hangs from the root and sees itself
            if i:
                mask[row, i] = mask[row, 0 if i >= used else rng.integers(max(0, i - 3), i)]
            mask[row, i, i] = True
    mask = mask[:, m - case.n :]
    for row in range(b):
        cache[:, row, :, ~seen_slots(case, row, mask[row]).any(0)] = np.nan
        tree[:, row, :, case.used[row] :] = np.nan
    as_jax = lambda x: jnp.asarray(x, case.dtype)  # noqa: E731
    return (
        as_jax(q),
        as_jax(cache[0]),
        as_jax(cache[1]),
        jnp.asarray(case.lengths, jnp.int32),
        as_jax(tree[0]),
        as_jax(tree[1]),
        jnp.asarray(mask),
        case.scale,
    )


def real(case: Case) -> np.ndarray:
    """[b, n]: which query nodes are real."""
    m = case.m or case.n
    return np.arange(m - case.n, m) < np.array(case.used)[:, None]


def seen_slots(case: Case, row: int, mask: np.ndarray) -> np.ndarray:
    """[n, slots]: which cache slots a row's nodes see, position by position; later ones go around a ring."""
    length, seen = case.lengths[row], np.zeros((mask.shape[0], case.slots), bool)
    assert case.ring or length <= case.slots
    for i in range(mask.shape[0]):
        position = length + mask[i].sum() - 1
        for at in range(length):
            near = case.window is None or position - at < case.window or at < case.sinks
            seen[i, at % case.slots] = near
    return seen


def seen_nodes(case: Case, row: int, mask: np.ndarray) -> np.ndarray:
    """[n, m]: which tree rows a row's nodes see: the text is the prefix and then the node's path, root first."""
    seen = np.zeros_like(mask)
    for i in range(mask.shape[0]):
        path = np.flatnonzero(mask[i])
        for at, j in enumerate(path):
            near = case.window is None or len(path) - 1 - at < case.window
            seen[i, j] = near or case.lengths[row] + at < case.sinks
    return seen


def dense(case: Case, args: tuple) -> np.ndarray:
    """[b, n, heads, d]: one softmax over prefix and tree for every node, in float64."""
    q, cache_k, cache_v, _, tree_k, tree_v, mask, scale = (np.asarray(x, np.float64) for x in args)
    b, n, heads, d = q.shape
    out = np.zeros((b, n, heads, d))
    for row in range(b):
        seen = np.concatenate([seen_slots(case, row, mask[row] > 0), seen_nodes(case, row, mask[row] > 0)], axis=1)
        for head in range(heads):
            kv = head // (heads // case.kv)
            keys = np.concatenate([cache_k[row, kv], tree_k[row, kv]])
            values = np.concatenate([cache_v[row, kv], tree_v[row, kv]])
            for i in range(n):
                logits = keys[seen[i]] @ q[row, i, head] * scale
                if case.soft_cap is not None:
                    logits = case.soft_cap * np.tanh(logits / case.soft_cap)
                weights = np.exp(logits - logits.max())
                out[row, i, head] = weights @ values[seen[i]] / weights.sum()
    return out
