"""How much each slot of a block counts: weights (masks among them) that depend on the slot, or on what was said there.

Each is a function of `Slots` that returns [*b k], without gradient. Several multiply. Slot k is counted from 1 here, as
papers do.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from spec_jax.checks import check_number
from spec_jax.train.slots import Slots, so_far

Weight = Callable[[Slots], Float[Array, "*b k"]]


def decay(slots: Slots, gamma: float) -> Float[Array, "*b k"]:
    """exp(-(k - 1) / gamma): DFlash (arXiv 2602.06036), gamma 7, 5 and 4 for blocks of 16, 10 and 8; DSpark 4."""
    return _by_slot(slots, jnp.exp(-jnp.arange(slots.labels.shape[-1]) / gamma))


def powers(slots: Slots, base: float, share: bool = False) -> Float[Array, "*b k"]:
    """base^(k - 1): EAGLE-3 (arXiv 2503.01840), Medusa 0.8; with share they add up to 1: FastMTP (2509.18362) 0.6."""
    weight = base ** jnp.arange(slots.labels.shape[-1], dtype=jnp.float32)
    return _by_slot(slots, weight / weight.sum() if share else weight)


def d_pace(slots: Slots, alpha: float = 0.5) -> Float[Array, "*b k"]:
    """Sum over j >= k of the product of s_1 .. s_j, s = (1 - alpha) q(label) + alpha: D-PACE (arXiv 2605.18810).

    With cross-entropy and alpha = 0 the gradient is that of -`expected_length` of q(label). A slot without a label ends
    its block. The paper divides by the number of blocks (`per="block"`).
    """
    return _value(jnp.where(slots.scored, (1 - alpha) * slots.draft_chance() + alpha, 0.0))


def expected(slots: Slots) -> Float[Array, "*b k"]:
    """Sum over j >= k of the product of alpha_1 .. alpha_j, alpha = sum of min(p, q).

    With the divergence "lk" and `per="block"` the gradient is that of -`expected_length` of the alphas, the expected
    number of tokens that strict rejection accepts.
    """
    return _value(slots.overlap())


def until_failure(slots: Slots) -> Float[Array, "*b k"]:
    """1 up to and including the first slot whose likeliest token is not the label: AUF, SpecBlock's valid prefix."""
    return so_far(slots.correct().astype(jnp.float32))


def survival(slots: Slots) -> Float[Array, "*b k"]:
    """Product over j < k of p(label_j): PARD-2's confidence-adaptive token weights (arXiv 2605.08632, their code).

    A label that the target would hardly write makes later labels hardly matter. ALR-IRA (arXiv 2609.38795, eq. 2) calls
    it the erase gate. A slot that is not scored has no vote.
    """
    return so_far(jnp.where(slots.scored, slots.target_chance(), 1.0))


def hard_survival(slots: Slots) -> Float[Array, "*b k"]:
    """1 while all labels before were the target's likeliest tokens (the hard variant of `survival`)."""
    agree = jnp.argmax(slots.law, -1) == slots.labels
    return so_far(jnp.where(slots.scored, agree, True).astype(jnp.float32))


def within_top(slots: Slots, k: int) -> Float[Array, "*b k"]:
    """1 where the label is among the drafter's k likeliest tokens: GRIFFIN's mask, as its abstract describes it.

    Our reading: a slot is highly misaligned if the label is not among them, and each slot is judged by itself.
    """
    return (slots.rank() < k).astype(jnp.float32)


NAMES: dict[str, Callable[..., Array]] = {
    "decay": decay,
    "powers": powers,
    "d_pace": d_pace,
    "expected": expected,
    "until_failure": until_failure,
    "survival": survival,
    "hard_survival": hard_survival,
    "within_top": within_top,
}


_RANGES: dict[str, dict[str, Any]] = {
    "gamma": {"low": 0.0, "open_low": True},
    "base": {"low": 0.0, "open_low": True},
    "alpha": {"low": 0.0, "high": 1.0},
    "k": {"low": 1, "integer": True},
}


def named(name: str, settings: Mapping[str, Any]) -> Weight:
    """A weight by its name, with its settings.

    Raises ValueError for a name or a setting that is none, one that is missing, or a value out of its range.
    """
    if name not in NAMES:
        raise ValueError(f"weights: got {name!r}, takes some of {', '.join(NAMES)}")
    takes = dict(list(inspect.signature(NAMES[name]).parameters.items())[1:])
    missing = [k for k, p in takes.items() if p.default is p.empty and k not in settings]
    if missing or set(settings) - set(takes):
        raise ValueError(f"weights: got {name} with {dict(settings)}, takes {', '.join(takes) or 'no settings'}")
    for setting, value in settings.items():
        if setting in _RANGES:
            check_number(f"weights.{name}.{setting}", value, **_RANGES[setting])
        elif not isinstance(value, bool):
            raise ValueError(f"weights.{name}.{setting}: got {value!r}, takes true or false")
    return functools.partial(NAMES[name], **settings)


def _by_slot(slots: Slots, weight: Array) -> Array:
    return jnp.broadcast_to(weight.astype(jnp.float32), slots.labels.shape)


def _value(chance: Array) -> Array:
    """Sum over j >= k of the products of the first j chances: what is lost in expectation if slot k fails."""
    return lax.stop_gradient(lax.cumsum(jnp.cumprod(chance, axis=-1), axis=chance.ndim - 1, reverse=True))
