"""Trees over a block's marginals: no head behind a node, so all depths are ranked at once."""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from spec_jax.models.config import require
from spec_jax.topology.marginals import best_first
from spec_jax.tree import Draft


@dataclasses.dataclass(frozen=True)
class FanOut:
    """JetSpec's variable fan-out (arXiv 2606.18394): a depth that is surer of its token has fewer candidates.

    Of m candidates a depth keeps max(1, round(m sigmoid(-slope (gap - middle)))), where gap is the log-chance of its
    likeliest token less that of the runner-up.
    """

    slope: float = 1.0
    middle: float = 1.0

    def keep(self, log_chance: Float[Array, "d m"]) -> Float[Array, "d m"]:
        """Log-chances in descending order, -inf behind those kept."""
        m = log_chance.shape[1]
        gap = log_chance[:, 0] - log_chance[:, 1] if m > 1 else jnp.zeros(log_chance.shape[0])
        gap = jnp.where(jnp.isnan(gap), jnp.inf, gap)
        count = jnp.maximum(1, jnp.round(m * jax.nn.sigmoid(-self.slope * (gap - self.middle))))
        return jnp.where(jnp.arange(m) < count[:, None], log_chance, -jnp.inf)


@dataclasses.dataclass(frozen=True)
class BestFirst:
    """The likeliest combinations of the marginals' tokens: DDTree (arXiv 2604.12989); a chain with children=1.

    CaDDTree and CAST are the same tree with a controller that stops at a prefix of it; JetSpec's has 7 children, or a
    `fan_out`.

    Attributes:
        nodes: nodes of the draft, the root among them.
        depth: longest root path, at most the block's.
        children: tokens of each depth that are combined.
        candidates: tokens that a depth's chances are shared out among when coupled; the best `children` are combined.
        ranking: "point" ranks by the drafter's law; "coupled" by law and noise together (see `topology.coupling`).
        fan_out: which candidates are left out where the drafter is sure; None: none.
    """

    nodes: int
    depth: int
    children: int = 16
    candidates: int = 64
    ranking: Literal["point", "coupled"] = "point"
    fan_out: FanOut | None = None

    def __post_init__(self) -> None:
        """Check the settings."""
        for name, least in {"nodes": 2, "depth": 1, "children": 1, "candidates": self.children}.items():
            value = getattr(self, name)
            fine = isinstance(value, int) and not isinstance(value, bool) and value >= least
            require(fine, name, value, f"an integer of at least {least}")
        require(self.ranking in ("point", "coupled"), "ranking", self.ranking, "point or coupled")

    def tree(self, tokens: Int[Array, "d m"], log_chance: Float[Array, "d m"], anchor: Int[Array, ""]) -> Draft:
        """One row's draft from the candidates of every depth, likeliest first."""
        tokens, log_chance = tokens[:, : self.children], log_chance[:, : self.children]
        kept = log_chance if self.fan_out is None else self.fan_out.keep(log_chance)
        return best_first(kept, tokens, anchor, self.nodes, self.ranking)
