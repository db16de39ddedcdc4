"""What the engine asks of a target: score a tree without changing the state's value, then commit a path."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import flax.struct
from jaxtyping import Array, Float, Int

from spec_jax.tree import Tree


@flax.struct.dataclass
class Output:
    """A scored tree: next-token logits per node, and the tapped features [B, N, ...] (None without taps)."""

    logits: Float[Array, "b n vocab"]
    features: Array | None = None


@runtime_checkable
class Target(Protocol):
    """A model that can be speculated on. Static and hashable; parameters and state are explicit pytrees."""

    @property
    def vocab_size(self) -> int:
        """Number of logits."""
        ...

    def init_state(self, params: Any, batch: int, slots: int) -> Any:
        """An empty state of `batch` rows, each with room for `slots` tokens (text plus the widest commit)."""
        ...

    def prefill(self, params: Any, state: Any, tokens: Int[Array, "b p"], count: Int[Array, "b"]) -> tuple[Any, Any]:
        """Append the first `count` tokens to each row; returns (features, state)."""
        ...

    def score(
        self, params: Any, state: Any, tree: Tree, staged: Any = None, nodes: tuple[Any, int] | None = None
    ) -> tuple[Output, Any, Any]:
        """Returns (output, staged, state); the returned state has the same value, maybe another representation.

        What an earlier commit left pending may be folded in here, so commit takes the returned state.
        """
        ...

    def widen(self, staged: Any, n: int) -> Any:
        """Staged rows of fewer nodes with room for n, so that compiled widths share one commit."""
        ...

    def commit(self, state: Any, staged: Any, path: Int[Array, "b m"], length: Int[Array, "b"]) -> Any:
        """Move the state that score returned forward by the first `length` nodes of `path`."""
        ...

    def materialize(self, state: Any) -> Any:
        """The state with nothing pending, in its structure of between rounds, for every reader but score and commit."""
        ...

    def take(self, state: Any, rows: Int[Array, "r"]) -> Any:
        """Copies of rows."""
        ...

    def insert(self, state: Any, rows: Int[Array, "r"], other: Any) -> Any:
        """Rows replaced by those of another state."""
        ...

    def release(self, state: Any, rows: Int[Array, "r"]) -> Any:
        """Rows emptied."""
        ...
