"""Sampling settings: what a person writes for a request, and the row of arrays that the compiled program reads."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import flax.struct
import jax
import numpy as np
from jaxtyping import Array, Float, Int

from spec_jax.checks import check_number

_LARGE = 1e30
"""Beyond this, products with a logit or with noise leave float32."""


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How a request's tokens are chosen; every default is neutral, and temperature 0 is greedy.

    Attributes:
        temperature: 0 takes the most likely token; above 0 (1e-30 at least) samples from softmax(logits / temperature).
        top_k: keep the k most likely tokens (ties with the k-th are kept); 0 keeps all.
        top_p: keep the smallest set of likeliest tokens whose mass, within top_k, reaches top_p (arXiv 1904.09751).
        min_p: keep tokens at least min_p times as likely as the likeliest (arXiv 2407.01082).
        repetition_penalty: logits of tokens in the prompt or the output are divided (if positive) or multiplied by it
            (arXiv 1909.05858).
        presence_penalty: subtracted from the logit of every token in the output.
        frequency_penalty: subtracted once for every occurrence in the output.
        logit_bias: token id -> number added to its logit.
        banned_tokens: token ids that are never emitted.
        min_new_tokens: no end-of-sequence token is emitted, and no stop sequence ends the text, before so many tokens.

    The order is: penalties, bias and bans, minimum length, constraint, temperature, top_k, top_p, min_p.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict)
    banned_tokens: tuple[int, ...] = ()
    min_new_tokens: int = 0

    def __post_init__(self) -> None:
        """Refuse values outside their range, and truncation that greedy decoding would ignore."""
        check_number("temperature", self.temperature, 0.0, _LARGE)
        if 0 < self.temperature < 1 / _LARGE:
            raise ValueError(f"temperature: got {self.temperature}, takes 0 or a number in [{1 / _LARGE}, {_LARGE}]")
        check_number("top_k", self.top_k, 0, math.inf, integer=True)
        check_number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        check_number("min_p", self.min_p, 0.0, 1.0)
        check_number("repetition_penalty", self.repetition_penalty, 1 / _LARGE, _LARGE)
        check_number("presence_penalty", self.presence_penalty, -_LARGE, _LARGE)
        check_number("frequency_penalty", self.frequency_penalty, -_LARGE, _LARGE)
        check_number("min_new_tokens", self.min_new_tokens, 0, math.inf, integer=True)
        if self.temperature == 0 and (self.top_k or self.top_p < 1 or self.min_p):
            raise ValueError(
                "top_k, top_p, min_p: got a truncation with temperature 0, which takes the likeliest token anyway; "
                "set temperature above 0 or leave them out"
            )
        for name, kind in (("logit_bias", Mapping), ("banned_tokens", Sequence)):
            ids = getattr(self, name)
            if isinstance(ids, str) or not isinstance(ids, kind):
                raise ValueError(f"{name}: got {ids!r}, takes a {kind.__name__.lower()} of token ids")
            for token in ids:
                check_number(name, token, 0, math.inf, integer=True)
        for token, value in self.logit_bias.items():
            if value != -math.inf:
                check_number(f"logit_bias[{token}]", value, -_LARGE, _LARGE)
        both = set(self.logit_bias) & set(self.banned_tokens)
        if both:
            raise ValueError(
                f"banned_tokens: got tokens {sorted(both)} that logit_bias names too; takes one or the other"
            )


@flax.struct.dataclass
class SamplingRow:
    """One request's settings as arrays (with a leading batch axis in the engine). Unused ids are -1."""

    temperature: Float[Array, "*b"]
    top_k: Int[Array, "*b"]
    top_p: Float[Array, "*b"]
    min_p: Float[Array, "*b"]
    repetition: Float[Array, "*b"]
    presence: Float[Array, "*b"]
    frequency: Float[Array, "*b"]
    bias_ids: Int[Array, "*b m"]
    bias: Float[Array, "*b m"]
    min_new: Int[Array, "*b"]
    eos: Int[Array, "*b e"]

    @property
    def sampled(self) -> Array:
        """Whether the row draws at random."""
        return self.temperature > 0

    @property
    def adjusted(self) -> Array:
        """Whether the row changes logits before the temperature (a constraint aside)."""
        return (
            (self.repetition != 1)
            | (self.presence != 0)
            | (self.frequency != 0)
            | (self.bias_ids >= 0).any(-1)
            | (self.min_new > 0)
        )


def to_row(
    sampling: Sampling,
    vocab_size: int,
    eos: tuple[int, ...] = (),
    max_bias: int = 16,
    max_eos: int = 4,
    batch: int | None = None,
) -> SamplingRow:
    """The arrays of one request; with `batch`, of so many rows that all have its settings.

    Raises:
        ValueError: for token ids outside the vocabulary, or more biases, bans or eos ids than the program has room for.
    """
    ids = [*sampling.logit_bias, *sampling.banned_tokens]
    values = [*sampling.logit_bias.values(), *[-math.inf] * len(sampling.banned_tokens)]
    for name, given, room in (("logit_bias and banned_tokens", ids, max_bias), ("eos_token_ids", eos, max_eos)):
        outside = [t for t in given if not 0 <= t < vocab_size]
        if outside:
            raise ValueError(f"{name}: got token ids {outside}, takes ids 0 .. {vocab_size - 1}")
        if len(given) > room:
            raise ValueError(f"{name}: got {len(given)} tokens, takes at most {room} (a limit of the compiled program)")
    pad = lambda x, n, fill: np.array([*x, *[fill] * (n - len(x))])  # noqa: E731
    real = lambda x: np.asarray(x, np.float32)  # noqa: E731
    whole = lambda x: np.asarray(x, np.int32)  # noqa: E731
    row = {
        "temperature": real(sampling.temperature),
        "top_k": whole(min(sampling.top_k, vocab_size)),
        "top_p": real(sampling.top_p),
        "min_p": real(sampling.min_p),
        "repetition": real(sampling.repetition_penalty),
        "presence": real(sampling.presence_penalty),
        "frequency": real(sampling.frequency_penalty),
        "bias_ids": whole(pad(ids, max_bias, -1)),
        "bias": real(pad(values, max_bias, 0.0)),
        "min_new": whole(sampling.min_new_tokens),
        "eos": whole(pad(eos, max_eos, -1)),
    }
    if batch is not None:
        row = {name: np.broadcast_to(x, (batch, *x.shape)) for name, x in row.items()}
    return SamplingRow(**jax.device_put(row))  # one transfer: a request is made for every prompt
