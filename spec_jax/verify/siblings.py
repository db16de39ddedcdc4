"""A walk that looks at all children of a node at once: one decision a node, which child it is or what is left of p."""

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
from spec_jax.verify.proposal import law_of, require
from spec_jax.verify.scores import Scores
from spec_jax.verify.verdict import Verdict, Walk


@flax.struct.dataclass
class Siblings:
    """The children of one node, independent draws from one law.

    p is the target's law there and q the drafter's; k is the number of children, those of the N nodes where `here`
    holds. u has a uniform number for each node; u[0] belongs to no child.
    """

    p: Float[Array, "vocab"]
    q: Float[Array, "vocab"]
    tokens: Int[Array, "n"]
    here: Bool[Array, "n"]
    k: Int[Array, ""]
    u: Float[Array, "n"]

    def first(self, kept: Bool[Array, "n"]) -> Int[Array, ""]:
        """The first kept child; n if none is."""
        n = kept.shape[0]
        return jnp.where(kept & self.here, jnp.arange(n, dtype=jnp.int32), n).min()


Decide = Callable[[Siblings], tuple[Array, Array]]


def walk(key: noise.Key, draft: Draft, scores: Scores, m: int, decide: Decide) -> Verdict:
    """Emit tokens down the tree; `decide` gives the child accepted (n: none) and the residual, in any scale.

    A decision may look at all of a node's children, so how many there are must not depend on their own tokens.

    Raises:
        ValueError: if the draft's siblings are not independent draws from a law that it carries.
    """
    require(draft, "sampled")
    tree, (n, vocab) = draft.tree, scores.logits.shape
    accept_key, residual_key = noise.stream(key, "accept"), noise.stream(key, "residual")
    index, ids = jnp.arange(n, dtype=jnp.int32), jnp.arange(vocab, dtype=jnp.int32)

    def step(walk: Walk) -> Walk:
        position = scores.position + walk.verdict.accepted
        z = scores.z(walk.node, walk.history)
        p = jnp.exp(scores.log_probs(z))
        here = (tree.parent == walk.node) & tree.valid & (index > 0)
        u = jax.vmap(lambda i: noise.uniform(accept_key, position, i))(index)
        q = law_of(draft, jnp.argmax(here), vocab)
        child, rest = decide(Siblings(p, q, tree.tokens, here, here.sum(dtype=jnp.int32), u))
        rest = jnp.where(here.any() & (reduce.total(rest) > 0), rest, p)
        drawn = reduce.argmax(jnp.log(rest) + noise.gumbel(residual_key, position, ids))
        return walk.emit(jnp.where(child < n, tree.tokens[child], drawn), child, z, scores)

    return lax.while_loop(lambda walk: ~walk.done, step, Walk.start(scores, m)).verdict


def least(holds: Callable[[Array], Array], low: Array, high: Array, active: Array) -> Float[Array, ""]:
    """The least number in [low, high] where a monotone condition holds, to float32; it is taken to hold at `high`.

    The condition holds at the number returned. Not looked for where not `active`: that returns `high`.
    """

    def halve(_, bounds):
        low, high = bounds
        middle = 0.5 * (low + high)
        yes = holds(middle)
        return jnp.where(yes, low, middle), jnp.where(yes, middle, high)

    return lax.fori_loop(0, jnp.where(active, 26, 0), halve, (low, high))[1]
