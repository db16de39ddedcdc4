"""OUTLETS: a regression head on features of an EAGLE-3-like drafter (arXiv 2503.01840) says how long responses get.

After its abstract. Here any features of the prompts will do. Where OUTLETS serves, short requests go first; in a
rollout, which ends with its longest row, the longest do.
"""

from collections.abc import Callable, Sequence
from typing import Any

from jaxtyping import Array, Float

from spec_jax.drafters.drafter import Drafter
from spec_jax.engine.engine import Engine
from spec_jax.models.target import Target
from spec_jax.rollout.schedule import LengthHead


def engine(target: Target, max_len: int, drafter: Drafter) -> Engine:
    """All that the drafter drafts; the target has the taps that it reads."""
    return Engine(target, max_len, drafter=drafter)


def rollout(length: LengthHead, features: Callable[[Sequence[Sequence[int]]], Float[Array, "g f"]]) -> dict[str, Any]:
    """Prompts by the lengths that `length`, fitted on earlier rollouts, expects of their features."""
    return {"order": lambda prompts, seen: length(features(prompts))}
