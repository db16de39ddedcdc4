"""What the engine asks of a drafter, and what it tells it."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from spec_jax.models.target import Output
from spec_jax.noise import Keys
from spec_jax.sampling.constraint import Constraint
from spec_jax.sampling.settings import SamplingRow
from spec_jax.tree import Draft, Tree


@flax.struct.dataclass
class Context:
    """What a drafter may look at. All of it is known before any token that is now to be drafted.

    tokens [B, L] with `length` valid entries a row, the last of which is the anchor; room is how many tokens the row
    may still emit; state is the constraint's state; sampled and adjusted say whether any row needs noise or adjusted
    logits. target is the target's own state, to read: the text without its anchor; None where there is none.
    """

    tokens: Int[Array, "b text"]
    length: Int[Array, "b"]
    prompt_length: Int[Array, "b"]
    room: Int[Array, "b"]
    active: Bool[Array, "b"]
    key: Keys
    sampling: SamplingRow
    state: Int[Array, "b"]
    constraint: Constraint
    sampled: Bool[Array, ""]
    adjusted: Bool[Array, ""]
    target: Any = None

    @property
    def anchor(self) -> Int[Array, "b"]:
        """The last committed token of each row."""
        return jax.vmap(lambda row, n: row[n - 1])(self.tokens, self.length)


@flax.struct.dataclass
class Committed:
    """A block of committed tokens: a prefill chunk, or a verdict.

    tokens[:, :length] now belong to the target's state, at text positions start ..; next_token is the new anchor. path
    [B, M] are the block's nodes in `tree`, and `taps` what the drafter's `tap` returned for all nodes of it. For a
    prefill chunk tree is None, path counts up and taps holds the tapped prefill features (no logits). own are the
    path's nodes in the drafter's own draft, -1 for those it did not draft, where `tree` was joined of several drafts;
    None: `tree` is its draft.
    """

    tokens: Int[Array, "b m"]
    start: Int[Array, "b"]
    length: Int[Array, "b"]
    next_token: Int[Array, "b"]
    path: Int[Array, "b m"]
    taps: Any = None
    tree: Tree | None = None
    own: Int[Array, "b m"] | None = None

    def walked(self, nodes: int) -> Bool[Array, "b n"]:
        """Which nodes of a tree of so many are on the committed path."""
        inside = jnp.arange(self.path.shape[1]) < self.length[:, None]
        return ((self.path[:, :, None] == jnp.arange(nodes)) & inside[:, :, None]).any(1)


@runtime_checkable
class Drafter(Protocol):
    """A proposer of draft trees; batch-native. Static and hashable; parameters and state are explicit pytrees.

    One whose `observe` takes every verdict for one on its own draft says so by an attribute `keeps_draft` that is True.
    One that drafts from earlier outputs of a row's prompt says how many tokens of them by an attribute `memory`, and a
    method recall(state, memory [B, m]) gives it the rows' (`rollout.memory`); a drafter made of others asks them.
    """

    @property
    def nodes(self) -> int:
        """Nodes of a full draft, the root among them; a static size."""
        ...

    @property
    def depth(self) -> int:
        """Most tokens on a root path of a draft, the root left out."""
        ...

    @property
    def vocab_size(self) -> int | None:
        """Number of token ids it was made for; None if it takes any."""
        ...

    def init(self, params: Any, batch: int, max_len: int) -> Any:
        """The state of `batch` empty rows."""
        ...

    def tap(self, output: Output) -> Any:
        """What it wants to keep of every scored node: a pytree of [B, N, ...], or None."""
        ...

    def observe(self, params: Any, state: Any, committed: Committed) -> Any:
        """The state after a block was committed: the same call for prefill chunks and for verdicts."""
        ...

    def propose(self, params: Any, state: Any, context: Context) -> tuple[Draft, Any]:
        """A draft of `nodes` nodes a row, and the state with whatever the draft left pending."""
        ...

    def insert(self, state: Any, rows: Int[Array, "r"], other: Any) -> Any:
        """Rows replaced by those of another state of r rows."""
        ...

    def release(self, state: Any, rows: Int[Array, "r"], tokens: Int[Array, "r text"], length: Int[Array, "r"]) -> Any:
        """Rows emptied; their final texts may be kept for later drafts. Rows out of range are left out."""
        ...


def memory_of(drafter: Any) -> int:
    """How many tokens of earlier outputs of its prompt a drafter wants for each row; 0 if it has no `recall`."""
    return getattr(drafter, "memory", 0) if hasattr(drafter, "recall") else 0


class Chain:
    """The sizes of a drafter whose drafts are chains of up to k tokens."""

    k: int

    @property
    def nodes(self) -> int:
        """The anchor and k tokens."""
        return self.k + 1

    @property
    def depth(self) -> int:
        """k."""
        return self.k


class Stateless:
    """The methods of a drafter that keeps nothing between rounds."""

    vocab_size: int | None = None

    def init(self, params: Any, batch: int, max_len: int) -> tuple[()]:
        """No state."""
        return ()

    def tap(self, output: Output) -> None:
        """Nothing is kept."""

    def observe(self, params: Any, state: tuple[()], committed: Committed) -> tuple[()]:
        """Nothing is kept."""
        return state

    def insert(self, state: tuple[()], rows: Array, other: tuple[()]) -> tuple[()]:
        """No rows to replace."""
        return state

    def release(self, state: tuple[()], rows: Array, tokens: Array, length: Array) -> tuple[()]:
        """No rows to empty."""
        return state
