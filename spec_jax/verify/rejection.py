"""The classical rule: try a node's children in turn, keep one with probability min(1, p / q), else use the residual."""

from __future__ import annotations

from collections.abc import Callable

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from spec_jax import noise
from spec_jax.sampling import reduce
from spec_jax.tree import Draft
from spec_jax.verify.proposal import drawn_from, require
from spec_jax.verify.scores import Scores
from spec_jax.verify.verdict import Verdict, Walk


@flax.struct.dataclass
class _Trial:
    walk: Walk
    cursor: Int[Array, ""]
    fresh: Bool[Array, ""]
    p: Float[Array, "vocab"]


def rejection(key: noise.Key, draft: Draft, scores: Scores, m: int) -> Verdict:
    """Emit tokens of the target's law from drawn drafts: accept x with min(1, p / q), else p becomes the residual.

    On a chain this is speculative sampling. Siblings are tried in node order against the residual of those before
    them: multi-candidate speculative decoding (MCSD, SpecInfer) if they are independent draws ("sampled"), recursive
    rejection sampling (RSD, EAGLE) if they come without repeats ("without_replacement"), where q loses every sibling
    tried and is renormalised. A token that its law lacks can't have been drawn and is passed over. Text has the law of
    plain decoding but not its tokens: it depends on the draft. The acceptance tests and the replacement draw use noise
    streams of their own, independent of the draft's.

    Raises:
        ValueError: if the draft's tokens were not drawn from a law: p/q would bias the text. Use `point_mass`.

    Source: Leviathan et al., arXiv 2211.17192, algorithm 1; Chen et al., arXiv 2302.01318; siblings: MCSD, arXiv
    2401.06706; SpecInfer, arXiv 2305.09781; RSD, arXiv 2402.14160.
    """
    require(draft, "sampled", "without_replacement")
    vocab = scores.logits.shape[1]
    return ratio_walk(key, draft, scores, m, lambda node: drawn_from(draft, node, vocab))


def point_mass(key: noise.Key, draft: Draft, scores: Scores, m: int) -> Verdict:
    """The classical rule for drafts that were not drawn: q is one at the drafted token, so x is kept with p(x).

    After a rejection the residual is p without x, renormalised; so a sibling is kept with its share of what is left,
    and together they are accepted with the sum of their p. Exact for every draft that does not look at the acceptance
    noise. Source: arXiv 2211.17192, algorithm 1, with q a point mass.
    """
    vocab = jnp.arange(scores.logits.shape[1], dtype=jnp.int32)
    return ratio_walk(key, draft, scores, m, lambda node: (vocab == draft.tree.tokens[node]).astype(jnp.float32))


def ratio_walk(
    key: noise.Key,
    draft: Draft,
    scores: Scores,
    m: int,
    law: Callable[[Array], Array],
    lenience: float = 1.0,
    stand_in: Callable[..., Array] | None = None,
    passes: Callable[[Array], Array] | None = None,
) -> Verdict:
    """The walk of all p/q rules; strict as long as nothing but the law is given.

    law(node) is q of a node's own token. The rest is for `verify.relaxed`: lenience multiplies q in the test;
    stand_in(p, q, z, node, tried) is the law that stands for p; passes(z) are the nodes that need no test.
    """
    tree, n = draft.tree, scores.logits.shape[0]
    accept_key, residual_key = noise.stream(key, "accept"), noise.stream(key, "residual")
    index = jnp.arange(n, dtype=jnp.int32)
    vocab = jnp.arange(scores.logits.shape[1], dtype=jnp.int32)

    def step(t: _Trial) -> _Trial:
        walk, position = t.walk, scores.position + t.walk.verdict.accepted
        z = scores.z(walk.node, walk.history)
        child = jnp.where((tree.parent == walk.node) & tree.valid & (index > t.cursor), index, n).min()
        tried = child < n
        q, x = law(child), tree.tokens[child]
        p = jnp.exp(scores.log_probs(z))
        p = lax.select(t.fresh, p if stand_in is None else stand_in(p, q, z, walk.node, tried), t.p)
        possible = q[x] > 0
        keep = possible & (noise.uniform(accept_key, position, child) * (lenience * q[x]) < p[x])
        if passes is not None:
            keep = keep | passes(z)[jnp.minimum(child, n - 1)]
        keep = tried & keep
        rest = jnp.maximum(p - q, 0.0)
        mass = reduce.total(rest)
        rest = jnp.where(possible & (mass > 0), rest / mass, p)
        drawn = reduce.argmax(jnp.log(p) + noise.gumbel(residual_key, position, vocab))
        moved = walk.emit(jnp.where(keep, x, drawn), jnp.where(keep, child, n), z, scores)
        ends = keep | ~tried
        walk = _select(ends, moved, walk)
        return _Trial(walk, jnp.where(tried, child, t.cursor), ends, jnp.where(ends, p, rest))

    start = _Trial(Walk.start(scores, m), jnp.int32(0), jnp.bool_(True), jnp.zeros(vocab.shape))
    return lax.while_loop(lambda t: ~t.walk.done, step, start).walk.verdict


def _select(condition: Array, yes: Walk, no: Walk) -> Walk:
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), yes, no)
