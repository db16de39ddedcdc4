"""How many nodes a batch verifies this round: one compiled width, chosen from what was known before the tokens."""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from spec_jax import tree as trees
from spec_jax.tree import Draft
from spec_jax.verify.verdict import Verdict


@runtime_checkable
class BudgetController(Protocol):
    """Chooses among the compiled widths. Static and hashable; its state is a pytree of arrays.

    uses_cost says whether `decide` weighs cost at all; if not, nobody has to measure it.
    """

    uses_cost: bool

    def init(self, batch: int) -> Any:
        """The state before the first round."""
        ...

    def decide(
        self, state: Any, draft: Draft, active: Bool[Array, "b"], cost: Float[Array, "w"], widths: tuple[int, ...]
    ) -> Int[Array, ""]:
        """The index of the width to verify; cost[i] is the time of a round that verifies widths[i] nodes a row."""
        ...

    def observe(
        self, state: Any, draft: Draft, width: Int[Array, ""], verdict: Verdict, active: Bool[Array, "b"]
    ) -> Any:
        """The state after a round that verified each row's first `width` nodes."""
        ...


@dataclasses.dataclass(frozen=True)
class Always:
    """Verifies the whole draft in every round."""

    uses_cost = False

    def init(self, batch: int) -> tuple[()]:
        """No state."""
        return ()

    def decide(self, state: tuple[()], draft: Draft, active: Array, cost: Array, widths: tuple[int, ...]) -> Array:
        """The widest width."""
        return jnp.int32(len(widths) - 1)

    def observe(self, state: tuple[()], draft: Draft, width: Array, verdict: Verdict, active: Array) -> tuple[()]:
        """No state."""
        return state


@dataclasses.dataclass(frozen=True)
class WidestLive:
    """The narrowest width that holds every live node of the batch; width 1 when no row has a draft."""

    uses_cost = False

    def init(self, batch: int) -> tuple[()]:
        """No state."""
        return ()

    def decide(self, state: tuple[()], draft: Draft, active: Array, cost: Array, widths: tuple[int, ...]) -> Array:
        """The narrowest width that cuts nothing."""
        n = draft.tree.valid.shape[-1]
        live = draft.tree.valid & active[:, None]
        need = jnp.max(jnp.where(live, jnp.arange(1, n + 1), 1))
        return (jnp.asarray(widths) < need).sum(dtype=jnp.int32)

    def observe(self, state: tuple[()], draft: Draft, width: Array, verdict: Verdict, active: Array) -> tuple[()]:
        """No state."""
        return state


@dataclasses.dataclass(frozen=True)
class Around:
    """Another controller as it is; what is built around one changes some of this."""

    controller: BudgetController

    @property
    def uses_cost(self) -> bool:
        """The other controller's."""
        return self.controller.uses_cost

    def init(self, batch: int) -> Any:
        """The other controller's state."""
        return self.controller.init(batch)

    def decide(
        self, state: Any, draft: Draft, active: Bool[Array, "b"], cost: Float[Array, "w"], widths: tuple[int, ...]
    ) -> Int[Array, ""]:
        """The other controller's width."""
        return self.controller.decide(state, draft, active, cost, widths)

    def observe(
        self, state: Any, draft: Draft, width: Int[Array, ""], verdict: Verdict, active: Bool[Array, "b"]
    ) -> Any:
        """The other controller's state after a round."""
        return self.controller.observe(state, draft, width, verdict, active)


def path_probability(draft: Draft) -> Float[Array, "b n"]:
    """The drafter's estimate that each node is accepted: the product of confidences along its root path."""

    def one(parent, valid, confidence):
        log = jnp.log(jnp.clip(jnp.where(valid, confidence, 0.0), 1e-6, 1.0)).at[0].set(0.0)
        return jnp.where(valid, jnp.exp(trees.ancestors(parent).astype(jnp.float32) @ log), 0.0)

    return jax.vmap(one)(draft.tree.parent, draft.tree.valid, draft.confidence)
