"""Thompson sampling of a draft's length: acceptance rates drawn from what is known of them (EESD, arXiv 2406.03853)."""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from spec_jax.control.throughput import Calibration, Throughput
from spec_jax.tree import Draft
from spec_jax.verify.verdict import Verdict


@flax.struct.dataclass
class Posterior(Calibration):
    """The counts, and the key of this round's draws."""

    key: UInt32[Array, "2"]


@dataclasses.dataclass(frozen=True)
class Thompson(Throughput):
    """Verifies the width that would be best if the acceptance rates drawn for this round were true.

    Each bin of confidence has one rate, with a Beta law: `prior` nodes of the bin's middle confidence, and the nodes
    that were seen, decayed as in `Throughput`. Every round draws each bin's rate from it, so that a width that looks
    worse is still tried as often as it may be the best one, and less and less as more is known. With one bin it is one
    rate for all nodes, which is EESD's case of a draft that goes on token by token.

    After the paper's abstract. What EESD saves besides is the drafting of tokens behind the length, which is decided
    here when they are drafted; a drafter's own stopping (`SmallModel.least`) is for that.

    Attributes:
        seed: of the draws, which are independent of the text's noise.
    """

    seed: int = 0

    def init(self, batch: int) -> Posterior:
        """Nothing seen."""
        key = jax.random.key_data(jax.random.key(self.seed, impl="threefry2x32"))
        return Posterior(jnp.zeros(self.bins), jnp.zeros(self.bins), key)

    def beta(self, state: Calibration) -> tuple[Float[Array, "bins"], Float[Array, "bins"]]:
        """Both parameters of each bin's Beta law."""
        middle = jnp.asarray(self.prior * self.middles())
        return middle + state.accepted, self.prior - middle + jnp.maximum(state.seen - state.accepted, 0.0)

    def calibrated(self, state: Any, confidence: Float[Array, "*n"]) -> Float[Array, "*n"]:
        """The rate of the confidence's bin that this round draws."""
        own = _split(state.key)[1]
        return jax.random.beta(own, *self.beta(state))[self._bin(confidence)]

    def observe(
        self, state: Any, draft: Draft, width: Int[Array, ""], verdict: Verdict, active: Bool[Array, "b"]
    ) -> Posterior:
        """The counts after a round, and the key of the next one's draws."""
        counts = super().observe(state, draft, width, verdict, active)
        return Posterior(counts.seen, counts.accepted, jax.random.key_data(_split(state.key)[0]))


def _split(key: UInt32[Array, "2"]) -> tuple[Array, Array]:
    """The key of the rounds to come, and this round's own."""
    later, own = jax.random.split(jax.random.wrap_key_data(key, impl="threefry2x32"))
    return later, own
