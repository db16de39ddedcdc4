"""Position-keyed match: the target chooses with the position's noise; the walk goes on where a child has its token."""

from __future__ import annotations

from jax import lax

from spec_jax import noise
from spec_jax.tree import Draft
from spec_jax.verify.scores import Scores
from spec_jax.verify.verdict import Verdict, Walk, child_with


def match(key: noise.Key, draft: Draft, scores: Scores, m: int) -> Verdict:
    """Emit argmax(z + T G) at every node of the path, exactly as plain decoding does; greedy where T = 0.

    The text depends on the target and the key alone, so any draft may be given, and sampled text is equal, token for
    token, to plain decoding's. Drafts that share the noise ("coupled") are accepted nearly as often as greedy ones,
    and siblings may be coupled too: the k greatest of log q + G. It is the rule for drafts of any kind, since a sibling
    is looked for by its token; how it was found does not matter.

    Args:
        key: the request's key [2].
        draft: N nodes, any proposal.
        scores: the target's logits over those nodes.
        m: room for emitted tokens; the tree's depth plus one.

    Source: Daliri et al., "Coupling without Communication and Drafter-Invariant Speculative Decoding",
    arXiv 2408.07978; the deterministic form of Leviathan et al., arXiv 2211.17192, for T = 0.
    """

    def step(walk: Walk) -> Walk:
        z = scores.z(walk.node, walk.history)
        token = scores.choose(z, key, scores.position + walk.verdict.accepted)
        return walk.emit(token, child_with(draft.tree, walk.node, token), z, scores)

    return lax.while_loop(lambda walk: ~walk.done, step, Walk.start(scores, m)).verdict
