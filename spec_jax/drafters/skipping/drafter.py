"""The target without some layers as its own drafter, where the set of layers changes while decoding."""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Array, Bool, Int

from spec_jax.drafters.drafter import Chain, Committed, Context
from spec_jax.drafters.small_model import SmallModel
from spec_jax.models import views
from spec_jax.models.llama import Llama
from spec_jax.models.target import Output
from spec_jax.tree import Draft


@runtime_checkable
class Search(Protocol):
    """How the set is found: one for the whole batch, from what was committed before. Static and hashable."""

    def check(self, layers: int) -> None:
        """ValueError for a model of so many layers that it can't search in."""
        ...

    def init(self, model: Llama, params: Any, batch: int) -> Any:
        """The state before the first round."""
        ...

    def tap(self, output: Output) -> Any:
        """What it wants to keep of every node that the target scores; as a drafter's."""
        ...

    def observe(self, state: Any, committed: Committed) -> Any:
        """The state after a block was committed."""
        ...

    def choose(self, model: Llama, params: Any, state: Any, context: Context) -> tuple[Bool[Array, "l"], Any]:
        """The layers that the next draft keeps, and the state."""
        ...

    def insert(self, state: Any, rows: Int[Array, "r"], other: Any) -> Any:
        """Rows replaced by those of another state of r rows; what is the batch's stays."""
        ...


@dataclasses.dataclass(frozen=True)
class Skipping(Chain):
    """Drafts a chain of k tokens with the target's kept layers, coupled to the target's noise; verify it with `match`.

    It has no cache: a draft reads the target's own, which holds every layer's rows of all committed text, whichever
    layers drafted it, as in SWIFT and CLaSp. So another set leaves no holes, and no prompt is read twice. Rows of
    drafted tokens last as long as the draft. One set serves the whole batch, since a branch that rows decide for
    themselves would compute both sides.

    The parameters are the target's, and so is the model, a `Llama` on one device, its layers a tuple; a search says
    which taps it reads.

    Attributes:
        model: the target.
        search: how the set of layers is found.
        k: most tokens of a draft.
        least: a row's draft ends before a token of which the model is less sure; see `SmallModel`.
    """

    model: Llama
    search: Search
    k: int
    least: float = 0.0

    def __post_init__(self) -> None:
        """Check the settings."""
        if not isinstance(self.model, Llama) or self.model.mesh is not None:
            raise ValueError(f"model: got {self.model!r}, takes a Llama without a mesh")
        if self.model.config.sliding_window is not None:  # searches read rows back that a ring may have lost
            raise ValueError(f"model: got one with a window of {self.model.config.sliding_window}, takes one without")
        object.__setattr__(self, "model", dataclasses.replace(self.model, taps=()))
        _ = self.chain
        self.search.check(self.model.config.num_layers)

    @property
    def vocab_size(self) -> int:
        """The target's."""
        return self.model.vocab_size

    @property
    def chain(self) -> SmallModel:
        """The model as one that drafts chains."""
        return SmallModel(self.model, self.k, least=self.least)

    def init(self, params: Any, batch: int, max_len: int) -> Any:
        """The search's state."""
        return self.search.init(self.model, params, batch)

    def tap(self, output: Output) -> Any:
        """What the search keeps."""
        return self.search.tap(output)

    def observe(self, params: Any, state: Any, committed: Committed) -> Any:
        """The search's state after a block was committed."""
        return self.search.observe(state, committed)

    def propose(self, params: Any, state: Any, context: Context) -> tuple[Draft, Any]:
        """The chain; raises ValueError for a context without the target's state."""
        if context.target is None:
            raise ValueError("context: got one without the target's state, takes that of a round (`context_of`)")
        keep, state = self.search.choose(self.model, params, state, context)
        view, chain = views.masked(params, keep), self.chain
        blank = chain.blank(params, context.target, context.tokens.shape[0])
        return chain.chain(view, context.target, blank, context, whole=False)[0], state

    def insert(self, state: Any, rows: Int[Array, "r"], other: Any) -> Any:
        """Rows replaced in the search's state."""
        return self.search.insert(state, rows, other)

    def release(self, state: Any, rows: Array, tokens: Array, length: Array) -> Any:
        """Nothing of a row's is kept."""
        return state


def spread(layers: int, skips: int) -> Bool[np.ndarray, "l"]:
    """A set to begin with: layers that are kept, the skipped ones spread evenly between the first and the last."""
    keep = np.ones(layers, bool)
    keep[1 + np.arange(skips) * (layers - 2) // max(skips, 1)] = False
    return keep


def check_skips(skips: int, layers: int) -> None:
    """ValueError for a number of skipped layers that leaves the first or the last one out."""
    if not isinstance(skips, int) or isinstance(skips, bool) or not 1 <= skips <= layers - 2:
        raise ValueError(f"skips: got {skips!r}, takes an integer of 1 .. {layers - 2}, for a model of {layers} layers")
