"""Draft trees whose tokens are drawn from the drafter's laws: independent siblings, or siblings without repeats.

Builders take `next_law(token, depth)`: the log-probs over the vocabulary of what follows a node at a depth, -inf
outside the support. A drafter that grows such a tree with a model, level by level, calls `siblings` for every node.

Draws are independent of each other, of the target's noise and of the rules'. A drawn node's confidence is what could be
said before its token was known: the likeliest chance that its elder siblings left. So a rule that stops at the first
node that is not worth it, in node order, decides about no node by its own token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from spec_jax import noise
from spec_jax.sampling import reduce
from spec_jax.topology.compact import compact
from spec_jax.tree import Draft, Law, Tree

NextLaw = Callable[[Int[Array, ""], Int[Array, ""]], Float[Array, "v"]]

_DRAW_WORD = np.uint32(0xFFFFFFFD)


def draw_key(key: noise.Key, index: Int[Array, ""] | int) -> noise.Key:
    """The key of a draft's index-th draw: independent of the other draws, of the target's noise and of a rule's."""
    return jnp.stack(noise.threefry(noise.stream(key, "draft"), _DRAW_WORD, jnp.asarray(index).astype(jnp.uint32)))


def by_depth(log_probs: Float[Array, "d v"]) -> NextLaw:
    """Per-depth marginals as a source of laws: what is drawn at depth d + 1 does not depend on the path."""
    return lambda token, depth: log_probs[depth]


@flax.struct.dataclass
class Siblings:
    """Children of one node in draw order; those behind the support's last token are not valid."""

    tokens: Int[Array, "*b k"]
    valid: Bool[Array, "*b k"]
    confidence: Float[Array, "*b k"]


def siblings(
    key: noise.Key,
    log_q: Float[Array, "v"],
    k: int,
    position: Int[Array, ""],
    replacement: bool,
    first: Int[Array, ""] | int = 0,
) -> Siblings:
    """k children of a node, drawn from its law: independently, or one after another without repeats.

    Independent ones are the candidates of MCSD (arXiv 2401.06706), SpecInfer and SpecTr K-SEQ (arXiv 2310.15141):
    "sampled". Without repeats, by the Gumbel-top-k trick, they are those of RSD-C (arXiv 2402.14160), in the order in
    which they would have been drawn: "without_replacement".

    Args:
        key: the request's key.
        log_q: log-probs of the law.
        k: how many.
        position: text position of these tokens.
        replacement: whether a token may come twice.
        first: the index in the draft of the first of them; the draws are keyed by node.
    """
    vocab = log_q.shape[0]
    ids = jnp.arange(vocab, dtype=jnp.int32)
    noisy = lambda i: log_q + noise.gumbel(draw_key(key, first + i), position, ids)  # noqa: E731
    if replacement:
        tokens = jax.vmap(lambda i: reduce.argmax(noisy(i)))(jnp.arange(k))
        valid = tokens >= 0
    else:
        top, tokens = lax.top_k(noisy(0), min(k, vocab))
        fill = lambda x, value: jnp.pad(x, (0, k - x.shape[0]), constant_values=value)  # noqa: E731
        tokens, valid = fill(tokens, 0), fill(top > -jnp.inf, False)
    tokens = jnp.where(valid, tokens, 0)
    likely, likely_ids = (jnp.broadcast_to(x, (k, x.shape[0])) for x in lax.top_k(log_q, min(k, vocab)))
    elder = jnp.tril(jnp.ones((k, k), bool), -1) & valid
    confidence = unseen_peak(likely, likely_ids, tokens, elder)
    return Siblings(tokens, valid, jnp.where(valid, confidence, 0.0))


def unseen_peak(
    log_probs: Float[Array, "k m"], ids: Int[Array, "k m"], tokens: Int[Array, "k"], elder: Bool[Array, "k k"]
) -> Float[Array, "k"]:
    """For each of k draws, the chance of the likeliest token that none of its elder siblings is.

    log_probs and ids are the m likeliest tokens of the law each was drawn from; elder[i, j]: j is drawn before i.
    """
    seen = (elder[:, :, None] & (tokens[None, :, None] == ids[:, None, :])).any(1)
    return jnp.exp(jnp.where(seen, -jnp.inf, log_probs).max(-1))


def branching(
    key: noise.Key,
    anchor: Int[Array, ""],
    next_law: NextLaw,
    widths: Sequence[int],
    position: Int[Array, ""],
    replacement: bool,
) -> Draft:
    """A tree in which every node at depth d has widths[d] drawn children; 1 + w0 + w0 w1 + .. nodes, level by level.

    Settings, with replacement: MCSD and SpecInfer (expansion widths); SpecTr K-SEQ, k independent continuations:
    (k, 1, 1, ..); delayed tree expansion (arXiv 2602.16994), which branches once, behind a chain: `delayed`. Without
    replacement: RSD-C, constant branching (arXiv 2402.14160).

    `position` is the text position of the token after the anchor.

    Raises:
        ValueError: for a width below 1.
    """
    if not widths or min(widths) < 1:
        raise ValueError(f"widths: got {widths}, takes at least one, each at least 1")
    tokens, valid = [jnp.asarray(anchor, jnp.int32)[None]], [jnp.ones(1, bool)]
    confidence, laws, parent, start, count = [jnp.ones(1)], [], [np.array([-1])], 0, 1
    for depth, k in enumerate(widths):
        law = jax.vmap(next_law, (0, None))(tokens[-1], jnp.int32(depth))
        first = start + count + k * jnp.arange(count)
        one = lambda q, i, k=k, d=depth: siblings(key, q, k, position + d, replacement, i)  # noqa: E731
        drawn = jax.vmap(one)(law, first)
        laws += ([jnp.zeros((1, law.shape[1]))] if depth == 0 else []) + [jnp.repeat(law, k, axis=0)]
        parent.append(np.repeat(start + np.arange(count), k))
        start, count = start + count, count * k
        for rows, new in ((tokens, drawn.tokens), (valid, drawn.valid), (confidence, drawn.confidence)):
            rows.append(new.reshape(-1))
    tree = Tree(jnp.concatenate(tokens), jnp.asarray(np.concatenate(parent), jnp.int32), jnp.concatenate(valid))
    proposal = "sampled" if replacement else "without_replacement"
    draft = Draft(tree, jnp.concatenate(confidence), Law(jnp.concatenate(laws)), proposal)
    return compact(draft, tree.valid)


def delayed(chain: int, k: int, after: int) -> tuple[int, ...]:
    """The widths of a delayed tree: a chain, then k branches, each of `after` tokens (arXiv 2602.16994)."""
    return (1,) * chain + (k,) + (1,) * (after - 1)
