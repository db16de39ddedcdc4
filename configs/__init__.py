"""Published systems, a short file each: which pieces, which settings, the paper. Imported as `spec_jax.configs`.

Every file defines `engine(target, max_len)`, with further parameters for the parts that the system takes (`parts`):
`draft_model` where a small model drafts; `network` where a trained drafter of some config does, and beside a block-
parallel one `head`, its causal head, which has the published sizes if left out; `drafter` where any drafter is part
of it. Where a part of the target drafts, `drafter_params(target_params)` gives that part's parameters, the target's own
arrays as far as they are. A system for rollouts has `rollout()` as well: settings of `RolloutEngine`, with parameters
for what it takes beside the engine's parts.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from typing import Any

from spec_jax.drafters.block.config import BlockConfig
from spec_jax.drafters.block.heads.head import Head
from spec_jax.drafters.drafter import Drafter
from spec_jax.drafters.eagle.config import EagleConfig
from spec_jax.drafters.early_exit import EarlyExitConfig
from spec_jax.drafters.medusa import MedusaConfig
from spec_jax.drafters.mlp_speculator import MlpConfig
from spec_jax.drafters.parallel_model import ParallelConfig
from spec_jax.drafters.recurrent import RecurrentConfig
from spec_jax.engine.engine import Engine
from spec_jax.models.target import Target
from spec_jax.rollout.engine import RolloutEngine

Network = BlockConfig | EagleConfig | MedusaConfig | MlpConfig | RecurrentConfig | ParallelConfig | EarlyExitConfig


def names() -> list[str]:
    """The names that `build` takes."""
    return sorted(m.name for m in pkgutil.iter_modules(__path__) if not m.name.startswith("_"))


def build(
    name: str,
    target: Target,
    max_len: int,
    draft_model: Target | None = None,
    network: Network | None = None,
    head: Head | None = None,
    drafter: Drafter | None = None,
) -> Engine:
    """The engine of a published system for a target.

    Raises:
        ValueError: for a name that is none, or a part (draft model, network, head, drafter) that the system lacks or
            does not use.
    """
    wanted = parts(name)
    given = {"draft_model": draft_model, "network": network, "head": head, "drafter": drafter}
    for part, value in given.items():
        if value is None and wanted.get(part) or value is not None and part not in wanted:
            raise ValueError(f"{part}: {name} {'needs one' if wanted.get(part) else 'uses none, got one'}")
    return _module(name).engine(target, max_len, **{part: value for part, value in given.items() if value is not None})


def parts(name: str) -> dict[str, bool]:
    """The parts of a system that `build` takes beside the target, and whether it needs them.

    Raises ValueError for a name that is none.
    """
    wanted = list(inspect.signature(_module(name).engine).parameters.values())[2:]
    return {part.name: part.default is inspect.Parameter.empty for part in wanted}


def rollout(name: str, target: Target, max_len: int, target_params: Any, **given: Any) -> RolloutEngine:
    """The rollout engine of a published system, or of any other one here, for a policy.

    Args:
        name: the system. What its drafter takes of the policy is derived anew from every policy.
        target: the policy's model.
        max_len: longest text of a row.
        target_params: the policy.
        given: the parts that `build` takes, what the system's `rollout` takes, and settings of `RolloutEngine`, which
            come before the system's own.

    Raises:
        ValueError: as `build` and `RolloutEngine`, or for what the system's `rollout` needs and did not get.
    """
    built = {part: given.pop(part) for part in ("draft_model", "network", "head", "drafter") if part in given}
    engine = build(name, target, max_len, **built)
    settings = getattr(_module(name), "rollout", dict)
    wanted = inspect.signature(settings).parameters if settings is not dict else {}
    for part in wanted:
        if part not in given:
            raise ValueError(f"{part}: {name} needs one")
    own = settings(**{part: given.pop(part) for part in wanted})
    if hasattr(_module(name), "drafter_params"):
        own["derive"] = _module(name).drafter_params
    return RolloutEngine(engine, target_params, **{**own, **given})


def _module(name: str) -> Any:
    if name not in names():
        raise ValueError(f"config: got {name!r}, takes one of {', '.join(names())}")
    return importlib.import_module(f"{__name__}.{name}")


def drafter_params(name: str, target_params: Any) -> Any:
    """What a system's drafter takes of the target's parameters; None if nothing."""
    take = getattr(_module(name), "drafter_params", None)
    return None if take is None else take(target_params)
