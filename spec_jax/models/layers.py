"""A model's layers, one after another or scanned: parameters, state and staged rows of both forms alike.

A tuple holds one tree per layer. On CPU it is the faster form, since a scan copies every layer's weights before use.
`Periods` holds layers of equal kind stacked on a leading axis, so that compile time does not grow with depth.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool


@flax.struct.dataclass
class Periods:
    """Layers whose kinds repeat: stacked[j] holds layers j, j + period, j + 2 * period ... on a leading axis.

    period is len(stacked); rest are the layers behind the last whole period.
    """

    stacked: tuple[Any, ...]
    rest: tuple[Any, ...] = ()


@flax.struct.dataclass
class Skippable:
    """A layer, and whether it is there; one that is not leaves its input as it is, and costs nothing."""

    layer: Any
    keep: Bool[Array, "*l"]


def stack(layers: Sequence[Any], period: int, join: Callable[[Sequence[Any]], Any] = jnp.stack) -> Periods:
    """The trees of all layers as periods; layers that are `period` apart must have equal structures and shapes.

    join: stacks the leaves of one place on a new leading axis.
    """
    whole = len(layers) // period * period
    together = lambda j: jax.tree.map(lambda *x: join(x), *layers[j:whole:period])  # noqa: E731
    return Periods(tuple(together(j) for j in range(period)) if whole else (), tuple(layers[whole:]))


def unstack(layers: tuple[Any, ...] | Periods) -> tuple[Any, ...]:
    """The trees of all layers as a tuple."""
    if isinstance(layers, tuple):
        return layers
    count = jax.tree.leaves(layers.stacked)[0].shape[0] if layers.stacked else 0
    return (*(jax.tree.map(lambda x: x[i], t) for i in range(count) for t in layers.stacked), *layers.rest)  # noqa: B023


def run(layer: Callable, x: Array, *trees: Any) -> tuple[list[Array], Any]:
    """x through all layers: (x, out) = layer(x, index, *its trees), where index counts within a period.

    The first tree is the layers' parameters; of a `Skippable` that is not there, out is zeros.

    Returns the hidden states, that before the first layer first, and the layers' outs in the form of the trees.
    """
    if isinstance(trees[0], tuple):
        hidden, outs = [x], []
        for index, own in enumerate(zip(*trees, strict=True)):
            x, out = _through(layer, x, index, *own)
            hidden.append(x)
            outs.append(out)
        return hidden, tuple(outs)
    hidden, stacked = [x], ()
    if trees[0].stacked:

        def period(x: Array, own: tuple) -> tuple[Array, tuple]:
            inside, outs = run(layer, x, *own)
            return inside[-1], (inside[1:], outs)

        x, (inside, stacked) = lax.scan(period, x, tuple(t.stacked for t in trees))
        hidden += [h[i] for i in range(inside[0].shape[0]) for h in inside]
    after, rest = run(layer, x, *(t.rest for t in trees))
    return hidden + after[1:], Periods(stacked, rest)


def _through(layer: Callable, x: Array, index: int, leaves: Any, *rest: Any) -> tuple[Array, Any]:
    """One layer, if it is there."""
    if not isinstance(leaves, Skippable):
        return layer(x, index, leaves, *rest)
    there = lambda: layer(x, index, leaves.layer, *rest)  # noqa: E731
    nothing = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(there)[1])
    return lax.cond(leaves.keep, there, lambda: (x, nothing))


def zipped(f: Callable, *trees: Any) -> Any:
    """f of every layer's trees, or of those of layers stacked together: for what only takes trees apart."""
    if isinstance(trees[0], tuple):
        return tuple(f(*own) for own in zip(*trees, strict=True))
    return Periods(zipped(f, *(t.stacked for t in trees)), zipped(f, *(t.rest for t in trees)))


def each(f: Callable, *trees: Any) -> Any:
    """f of every layer's trees, vmapped where layers are stacked."""
    if isinstance(trees[0], tuple):
        return zipped(f, *trees)
    return Periods(zipped(jax.vmap(f), *(t.stacked for t in trees)), zipped(f, *(t.rest for t in trees)))


def map_rows(f: Callable, *trees: Any) -> Any:
    """f(leaf, its counterparts ..., axis) for every array of the layers' states, whose batch rows are on that axis."""
    at = lambda axis: lambda *x: f(*x, axis)  # noqa: E731
    if isinstance(trees[0], tuple):
        return jax.tree.map(at(0), *trees)
    stacked = jax.tree.map(at(1), *(t.stacked for t in trees))
    return Periods(stacked, jax.tree.map(at(0), *(t.rest for t in trees)))
