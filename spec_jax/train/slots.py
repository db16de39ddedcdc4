"""What a drafter said where it was asked, beside what was right there: all that a training objective looks at."""

from __future__ import annotations

import dataclasses

import flax.struct
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from spec_jax.train import divergence


@flax.struct.dataclass
class Said:
    """A drafter's outputs at K slots behind each anchor: slot k (from 0) is for the token at anchor + k + 1.

    logits are those that tokens are drafted from, over the draft vocabulary; base those of the backbone under a head
    (None: no head); confidence the confidence head's logit of being accepted (None: no such head); regression how far
    the drafter's hidden states are from the target's (None: not taken); rows a block's normed last rows, where the
    next block reads them (None: it does not); kept which slots were asked at all (None: all of them).
    """

    logits: Float[Array, "*b k draft"]
    base: Float[Array, "*b k draft"] | None = None
    confidence: Float[Array, "*b k"] | None = None
    regression: Float[Array, "*b k"] | None = None
    rows: Float[Array, "*b s hidden"] | None = None
    kept: Bool[Array, "*b k"] | None = None


@flax.struct.dataclass
class Slots:
    """Drafted slots beside the truth, in blocks of K slots one after another; all but `target` in draft ids.

    labels: the right tokens, -1 where the draft vocabulary lacks them. scored: whether a slot has a label that counts.
    target: the target's logits over the draft vocabulary (None where only labels are known). weight: how much each
    block counts, as its text does (None: all alike).
    """

    logits: Float[Array, "*b k draft"]
    labels: Int[Array, "*b k"]
    scored: Bool[Array, "*b k"]
    target: Float[Array, "*b k draft"] | None = None
    weight: Float[Array, "*b"] | None = None

    @classmethod
    def of(
        cls,
        logits: Float[Array, "*b k draft"],
        labels: Int[Array, "*b k"],
        scored: Bool[Array, "*b k"],
        target: Float[Array, "*b k draft"] | None = None,
        weight: Float[Array, "*b"] | None = None,
    ) -> Slots:
        """Slots of which those that do not count hold nothing: zeros, whatever was there, NaN included."""
        scored = scored & (labels >= 0)
        blank = lambda x: jnp.where(scored[..., None], x, 0.0)  # noqa: E731
        law = None if target is None else blank(target)
        return cls(blank(logits), jnp.where(scored, labels, 0), scored, law, weight)

    def over(self, logits: Float[Array, "*b k draft"]) -> Slots:
        """The same slots for other logits of the drafter, such as its backbone's."""
        return dataclasses.replace(self, logits=jnp.where(self.scored[..., None], logits, 0.0))

    def backed(self, logits: Float[Array, "*b k draft"]) -> Slots:
        """The same slots, with other logits where the drafter leaves the label no chance, and so would not learn it."""
        own = jnp.take_along_axis(self.logits, self.labels[..., None], axis=-1)
        return dataclasses.replace(self, logits=jnp.where(own > -jnp.inf, self.logits, self.over(logits).logits))

    @property
    def law(self) -> Float[Array, "*b k draft"]:
        """The target's logits; ValueError if they are not known."""
        if self.target is None:
            raise ValueError("target: got None, takes the target's logits for a divergence between laws")
        return self.target

    def draft_chance(self) -> Float[Array, "*b k"]:
        """q(label), without gradient; 0 where no label counts, so that a block ends there."""
        nats = divergence.cross_entropy(lax.stop_gradient(self.logits), self.labels)
        return jnp.where(self.scored, jnp.exp(-nats), 0.0)

    def target_chance(self) -> Float[Array, "*b k"]:
        """p(label); 0 where no label counts."""
        return jnp.where(self.scored, jnp.exp(-divergence.cross_entropy(self.law, self.labels)), 0.0)

    def overlap(self) -> Float[Array, "*b k"]:
        """Sum of min(p, q), the chance that a token drawn from q is accepted, without gradient; 0 where none counts."""
        log = divergence.log_overlap(lax.stop_gradient(self.logits), self.law)
        return jnp.where(self.scored, jnp.exp(log), 0.0)

    def correct(self) -> Bool[Array, "*b k"]:
        """Whether the drafter's likeliest token is the label."""
        return self.scored & (jnp.argmax(self.logits, -1) == self.labels)

    def rank(self) -> Int[Array, "*b k"]:
        """How many tokens the drafter finds likelier than the label."""
        own = jnp.take_along_axis(self.logits, self.labels[..., None], axis=-1)
        return (self.logits > own).sum(-1)


def so_far(x: Float[Array, "*b k"]) -> Float[Array, "*b k"]:
    """Products of the slots before each one, 1 at the first."""
    return jnp.cumprod(jnp.concatenate([jnp.ones_like(x[..., :1]), x[..., :-1]], axis=-1), axis=-1)


def expected_length(chance: Float[Array, "*b k"]) -> Float[Array, "*b"]:
    """Expected number of accepted slots of a block, sum over j of the product of the first j chances.

    The bonus token makes it an acceptance length: add 1. Differentiable in the chances.
    """
    return jnp.cumprod(chance, axis=-1).sum(-1)
