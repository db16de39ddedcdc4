"""What a score changed in the target's state: what it left alone stays outside of the switch over widths.

A switch copies what its branches return, key/value caches too. And a score may change the state's structure: a lazy
commit that it folds in is gone from the state it returns.
"""

from __future__ import annotations

from typing import Any

import flax.struct
import jax
from jaxtyping import Array


@flax.struct.dataclass
class Changes:
    """The arrays of a new state that are not the old one's, in order.

    source: for every leaf of the new state the old state's leaf that it is, or None; structure: the new state's.
    """

    arrays: list[Array]
    source: tuple[int | None, ...] = flax.struct.field(pytree_node=False)
    structure: Any = flax.struct.field(pytree_node=False)


def changes(old: Any, new: Any) -> Changes:
    """The difference of two states; a leaf is the same if it is the very same array."""
    place = {id(leaf): i for i, leaf in enumerate(jax.tree.leaves(old))}
    leaves, structure = jax.tree.flatten(new)
    source = tuple(place.get(id(leaf)) for leaf in leaves)
    return Changes([leaf for leaf, at in zip(leaves, source, strict=True) if at is None], source, structure)


def changed(old: Any, changes: Changes) -> Any:
    """The new state."""
    leaves, arrays = jax.tree.leaves(old), iter(changes.arrays)
    return changes.structure.unflatten([next(arrays) if at is None else leaves[at] for at in changes.source])
