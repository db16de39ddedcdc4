"""In which order prompts roll out, and which of them are the tail: from what their responses took before."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from spec_jax.checks import check_number, check_size

Order = Callable[[Sequence[Sequence[int]], Float[np.ndarray, "g"]], Any]
"""Lengths to expect of g prompts, of their tokens and what their history says (`expected`): a number for each."""


@flax.struct.dataclass
class History:
    """By prompt: the running mean of its responses' lengths, and how many responses that were."""

    length: Float[Array, "p"]
    count: Int[Array, "p"]


def empty(prompts: int) -> History:
    """Nothing seen of `prompts` prompts. Raises ValueError for fewer than one."""
    check_size("prompts", prompts, 1)
    return History(jnp.zeros(prompts), jnp.zeros(prompts, jnp.int32))


def observe(history: History, at: Int[Array, "r"], length: Int[Array, "r"], decay: float = 0.7) -> History:
    """The history after r responses; each prompt's mean of them weighs 1 - decay. Prompts out of range are left out.

    A partial response's length so far counts as well: a lower bound, which is what singles the tail out.
    """
    prompts = history.count.shape[0]
    at = jnp.where(at < 0, prompts, at)
    total = jnp.zeros(prompts).at[at].add(length.astype(jnp.float32), mode="drop")
    number = jnp.zeros(prompts, jnp.int32).at[at].add(1, mode="drop")
    mean = total / jnp.maximum(number, 1)
    mixed = jnp.where(history.count > 0, decay * history.length + (1 - decay) * mean, mean)
    return History(jnp.where(number > 0, mixed, history.length), history.count + number)


def clear(history: History, at: Int[Array, "r"]) -> History:
    """The history without r prompts; those out of range are left out."""
    at = jnp.where(at < 0, history.count.shape[0], at)
    return dataclasses.replace(history, count=history.count.at[at].set(0, mode="drop"))


def expected(history: History, at: Int[Array, "r"]) -> Float[Array, "r"]:
    """The length to expect of r prompts; the mean of all that were seen for one that was not."""
    known = history.count > 0
    mean = jnp.where(known, history.length, 0).sum() / jnp.maximum(known.sum(), 1)
    inside = (at >= 0) & (at < known.shape[0])
    at = jnp.where(inside, at, 0)
    return jnp.where(inside & known[at], history.length[at], mean)


def longest_first(length: Float[Array, "r"]) -> Int[Array, "r"]:
    """The order that starts the longest expected responses first; of equals, the first ones."""
    return jnp.argsort(-length, stable=True)


def tail(work: Float[Array, "g"], k: int) -> Bool[Array, "g"]:
    """The k groups of most expected work, all if they are fewer: TailSieve's top-k, close to the best routing.

    Raises ValueError for a k that is no integer of at least 0.
    """
    check_size("k", k, 0)
    return jnp.argsort(jnp.argsort(-work, stable=True)) < k


def unfinished(running: Bool[Array, "n"], group: int) -> Bool[Array, "g"]:
    """The groups of which some response still ran when a partial rollout was cut off: the candidates for the tail.

    Raises ValueError for a group that does not divide the number of rows.
    """
    check_size("group", group, 1)
    if running.shape[0] % group:
        raise ValueError(f"group: got {group}, takes one that divides the {running.shape[0]} rows of running")
    return running.reshape(-1, group).any(1)


@dataclasses.dataclass(frozen=True)
class Split:
    """How TailSieve divides a rollout: groups that are the tail, and replicas that serve them; the time it takes."""

    groups: int
    replicas: int
    time: float


def split(
    length: Float[Array, "g"],
    group: int,
    replicas: int,
    step: Callable[[Float[Array, "*x"]], Float[Array, "*x"]],
    speedup: float = 1.0,
) -> Split:
    """The number of tail groups and their share of the replicas with the shortest makespan.

    The abstract names a measured concurrency-throughput model and a search over both numbers, no formula. Our reading:
    a pool decodes all its rows at once, spread evenly over its replicas, and a step takes as long as `step` says for
    the rows that still run on each; the makespan is the slower pool's. The tail pool's steps bring `speedup` tokens,
    since speculation pays at low concurrency.

    Args:
        length: expected response length by group.
        group: responses of a group.
        replicas: replicas in all; one alone can't be split.
        step: seconds of a decoding step by rows on a replica; vectorised.
        speedup: tokens of a step in the tail pool.

    Raises:
        ValueError: for no lengths, or any that is no finite number of at least 0; for any of the other three that is
            not above 0.
    """
    check_size("group", group, 1)
    check_size("replicas", replicas, 1)
    check_number("speedup", speedup, 0, open_low=True)
    if length.shape[0] == 0 or not (jnp.isfinite(length) & (length >= 0)).all():
        raise ValueError(f"length: got {length}, takes finite numbers of at least 0, one at least")
    order = jnp.sort(length)[::-1]
    index = jnp.arange(order.shape[0])

    def pool(start: Array, end: Array, share: Array) -> Array:
        """Time of groups start .. end - 1 in descending order of length: between two ends, as many rows run."""
        shorter = jnp.where(index + 1 < end, jnp.append(order[1:], 0.0), 0.0)
        rows = (index - start + 1) * group / jnp.maximum(share, 1)
        spent = (order - shorter) * step(jnp.maximum(rows, 1.0))
        return jnp.where((index >= start) & (index < end), spent, 0.0).sum()

    def makespan(k: Array, r: Array) -> Array:
        rest = pool(k, jnp.int32(order.shape[0]), replicas - r)
        both = jnp.maximum(pool(jnp.int32(0), k, r) / speedup, rest)
        return jnp.where((k > 0) == (r > 0), both, jnp.inf)

    k, r = jnp.meshgrid(index, jnp.arange(replicas), indexing="ij")
    time = jax.vmap(jax.vmap(makespan))(k, r)
    best = jnp.argmin(time)
    return Split(int(k.reshape(-1)[best]), int(r.reshape(-1)[best]), float(time.reshape(-1)[best]))


@flax.struct.dataclass
class LengthHead:
    """A linear map from a prompt's features to the log of its response's length: a hook after OUTLETS.

    OUTLETS reads an EAGLE-3-like drafter's features; here any features will do, such as the target's taps at the
    prompt's last token. Its output goes to `longest_first`, `tail` or `split` like a history's.
    """

    weight: Float[Array, "f"]
    bias: Float[Array, ""]

    def __call__(self, features: Float[Array, "r f"]) -> Float[Array, "r"]:
        """Expected lengths."""
        return jnp.exp(features @ self.weight + self.bias)


def fit_length_head(features: Float[Array, "r f"], length: Int[Array, "r"], penalty: float = 1.0) -> LengthHead:
    """The ridge regression of log lengths on features, in closed form; the bias is not penalised.

    Raises ValueError for no rows, another number of lengths, or a penalty that is negative or no number.
    """
    check_number("penalty", penalty, 0)
    if features.shape[0] == 0:
        raise ValueError("features: got no rows, takes one at least")
    if length.shape != features.shape[:1]:
        raise ValueError(
            f"length: got {list(length.shape)}, takes one for each of {features.shape[0]} rows of features"
        )
    y = jnp.log(jnp.maximum(length, 1).astype(jnp.float32))
    x = features.astype(jnp.float32)
    center, level = x.mean(0), y.mean()
    x, y = x - center, y - level
    gram = x.T @ x + penalty * jnp.eye(x.shape[1])
    weight = jnp.linalg.solve(gram, x.T @ y)
    return LengthHead(weight, level - center @ weight)
