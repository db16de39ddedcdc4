"""The relaxed acceptance family: rules that let more drafted tokens pass, and so CHANGE the text. Never a default."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool

from spec_jax import noise
from spec_jax.sampling import reduce, transform
from spec_jax.tree import Draft
from spec_jax.verify.acceptable import Acceptable
from spec_jax.verify.proposal import law_of
from spec_jax.verify.rejection import ratio_walk
from spec_jax.verify.scores import Scores
from spec_jax.verify.verdict import Verdict, Walk, child_with

Judge = Callable[[Array], Array]
Weight = Callable[[Array | None, Array, Array], Array]


@dataclasses.dataclass(frozen=True)
class Relaxed:
    """A strict rule, relaxed: more drafted tokens pass, so the text is no longer plain decoding's and has another law.

    A drafted token is kept if the strict rule keeps it, if `accepts` lets it pass, or if `judge` does. With nothing set
    the verdicts are the strict rule's, bit by bit. Bans, constraints and truncation hold in any case: a token that may
    not come at a place is not accepted there. Children are tried in node order; over "match" a child that holds the
    target's own choice goes first, so that text changes only where that choice was not drafted. What the text loses
    has to be measured on the task at hand; many settings count on a drafter that is a good language model itself.

    `accepts` judges a row by its own law (temperature and truncation in it), a greedy row by softmax of its adjusted
    logits. Recorded log-probs are the target's under the row's settings, as ever, and may be -inf.

    Attributes:
        strict: the rule that is relaxed: "match", "rejection" or "point_mass" (the p/q test, for drafts that say what
            they were drawn from, or for any).
        accepts: tokens that pass by the target's law.
        judge: features [...] of a drafted node -> bool; needs a target that returns features (`taps` of Llama).
        lenience: q is multiplied by it in the p/q test; 1 is strict. No effect on greedy rows, whose p is one token.
        weight: w of the law w p + (1 - w) q that stands for p wherever something was drafted; 1 is strict. A number, or
            a function of (the node's features or None, p, q).
    """

    strict: Literal["match", "rejection", "point_mass"] = "match"
    accepts: Acceptable = Acceptable()
    judge: Judge | None = None
    lenience: float = 1.0
    weight: float | Weight = 1.0

    def __post_init__(self) -> None:
        """Check the settings."""
        if self.strict not in ("match", "rejection", "point_mass"):
            raise ValueError(f"strict: got {self.strict!r}, takes 'match', 'rejection' or 'point_mass'")
        if not 0 < self.lenience <= 1:
            raise ValueError(f"lenience: got {self.lenience!r}, takes a number in (0, 1]")
        if not callable(self.weight) and not 0 <= self.weight <= 1:
            raise ValueError(f"weight: got {self.weight!r}, takes a number in [0, 1] or a function")
        for name in ("lenience", "weight"):
            if self.strict == "match" and getattr(self, name) != 1:
                raise ValueError(f"{name}: got {getattr(self, name)!r} with strict 'match', which has no p/q test")

    @staticmethod
    def specdec(top_k: int, tau: float) -> Relaxed:
        """SpecDec's Spec-Verification (arXiv 2203.16487): among the top beta, and at most tau nats below the best."""
        return Relaxed(accepts=Acceptable(top_k=top_k, log_gap=tau))

    @staticmethod
    def typical(epsilon: float = 0.09, delta: float = 0.3) -> Relaxed:
        """Typical acceptance of Medusa (arXiv 2401.10774): p(x) > min(epsilon, delta exp(-H(p))).

        Strict at epsilon 1 and delta infinite. Medusa takes the longest path of a tree; here children are tried in
        order.
        """
        return Relaxed(accepts=Acceptable(epsilon=epsilon, delta=delta))

    @staticmethod
    def top(k: int) -> Relaxed:
        """Top-k acceptance: among the k likeliest. Strict at 0, and on greedy rows at 1."""
        return Relaxed(accepts=Acceptable(top_k=k))

    @staticmethod
    def additive(gap: float) -> Relaxed:
        """Less than `gap` below the likeliest token's probability; strict at 0."""
        return Relaxed(accepts=Acceptable(gap=gap))

    @staticmethod
    def multiplicative(ratio: float) -> Relaxed:
        """More than `ratio` times the likeliest token's probability; strict at 1. Lenience, for greedy rows."""
        if not 0 < ratio <= 1:
            raise ValueError(f"ratio: got {ratio!r}, takes a number in (0, 1]")
        return Relaxed(accepts=Acceptable(log_gap=-math.log(ratio)))

    @staticmethod
    def margin(delta: float) -> Relaxed:
        """Margin-Aware Speculative Verification (arXiv 2601.15498): the runner-up where the two best are close.

        delta is in logits (over the temperature, if the row samples): their difference must be below it. Strict at 0.
        """
        return Relaxed(accepts=Acceptable(top_k=2, log_gap=delta))

    @staticmethod
    def entropy(min_entropy: float, top_k: int) -> Relaxed:
        """The top k wherever the target's own entropy exceeds min_entropy nats; strict above log(vocabulary)."""
        return Relaxed(accepts=Acceptable(top_k=top_k, min_entropy=min_entropy))

    @staticmethod
    def lenient(lenience: float, strict: Literal["rejection", "point_mass"] = "rejection") -> Relaxed:
        """Lenience of Leviathan et al. (arXiv 2211.17192, appendix): keep x with min(1, p / (l q)); strict at 1.

        No token is emitted with more than 1 / l times its probability under the target.
        """
        return Relaxed(strict=strict, lenience=lenience)

    @staticmethod
    def blend(weight: float | Weight) -> Relaxed:
        """DIVERSED: verify against w p + (1 - w) q, w a number or learned; strict at 1, everything passes at 0.

        The text has just that law wherever a token was drafted, and the target's where none was.
        """
        return Relaxed(strict="rejection", weight=weight)

    @staticmethod
    def judged(head: Judge) -> Relaxed:
        """Judge Decoding (arXiv 2501.19309): a head on a drafted token's features finds it fit, chosen or not."""
        return Relaxed(judge=head)

    def __call__(self, key: noise.Key, draft: Draft, scores: Scores, m: int) -> Verdict:
        """The verdict; as the rules of `verify.match` and `verify.rejection`.

        Raises:
            ValueError: if a judge has no features to look at, or, over "rejection", for a draft that was not drawn from
                a law.
        """
        if self.judge is not None and scores.features is None:
            raise ValueError("judge: got a target without features, takes one that returns them (taps)")
        if self.strict == "match":
            return self._match(key, draft, scores, m)
        if self.strict == "rejection" and (draft.proposal != "sampled" or draft.law is None):
            raise ValueError(
                f"draft: got a {draft.proposal!r} draft, takes a 'sampled' one with the law its tokens came from"
            )
        return self._ratio(key, draft, scores, m)

    def _passes(self, z: Array, draft: Draft, scores: Scores) -> Bool[Array, "n"]:
        """The drafted nodes whose tokens would pass behind a node with adjusted logits z."""
        if self.judge is None and self.accepts == Acceptable():
            return jnp.zeros(draft.tree.tokens.shape, bool)
        row = dataclasses.replace(scores.row, temperature=jnp.where(scores.row.sampled, scores.row.temperature, 1.0))
        log_p, tokens = transform.log_probs(z, row), draft.tree.tokens
        passes = self.accepts.mask(log_p)[tokens]
        if self.judge is not None and scores.features is not None:
            passes = passes | jax.vmap(self.judge)(scores.features)
        return passes & (log_p[tokens] > -jnp.inf)

    def _match(self, key: noise.Key, draft: Draft, scores: Scores, m: int) -> Verdict:
        tree, n = draft.tree, scores.logits.shape[0]
        index = jnp.arange(n, dtype=jnp.int32)

        def step(walk: Walk) -> Walk:
            z = scores.z(walk.node, walk.history)
            choice = scores.choose(z, key, scores.position + walk.verdict.accepted)
            children = (tree.parent == walk.node) & tree.valid & (index > 0) & (choice >= 0)
            own = child_with(tree, walk.node, choice)
            other = jnp.where(children & self._passes(z, draft, scores), index, n).min()
            child = jnp.where(own < n, own, other)
            token = jnp.where(child < n, tree.tokens[jnp.minimum(child, n - 1)], choice)
            return walk.emit(token, child, z, scores)

        return lax.while_loop(lambda walk: ~walk.done, step, Walk.start(scores, m)).verdict

    def _ratio(self, key: noise.Key, draft: Draft, scores: Scores, m: int) -> Verdict:
        vocab = scores.logits.shape[1]

        def law(node: Array) -> Array:
            if self.strict == "rejection":
                return law_of(draft, node, vocab)
            return (jnp.arange(vocab) == draft.tree.tokens[node]).astype(jnp.float32)

        blended = lambda p, q, z, node, tried: self._blended(p, q, z, node, tried, scores)  # noqa: E731
        passes = lambda z: self._passes(z, draft, scores)  # noqa: E731
        return ratio_walk(key, draft, scores, m, law, self.lenience, blended, passes)

    def _blended(self, p: Array, q: Array, z: Array, node: Array, tried: Array, scores: Scores) -> Array:
        """The law that stands for p: p itself if nothing was drafted here, if w is 1, or if p has no token."""
        if not callable(self.weight) and self.weight == 1:
            return p
        q = jnp.where(z > -jnp.inf, q, 0.0)
        mass = reduce.total(q)
        q = jnp.where(mass > 0, q / mass, p)
        features: Any = None if scores.features is None else scores.features[node]
        w = self.weight(features, p, q) if callable(self.weight) else self.weight
        return jnp.where(tried & (reduce.total(p) > 0), w * p + (1 - w) * q, p)
