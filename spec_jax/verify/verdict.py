"""What a verifier rule returns, and how its walk down the tree is written down."""

from __future__ import annotations

import flax.struct
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from spec_jax.sampling.history import History
from spec_jax.tree import Tree
from spec_jax.verify.scores import Scores


@flax.struct.dataclass
class Verdict:
    """The accepted path and the emitted tokens.

    path[0] is the root and path[1 .. accepted] the accepted nodes; the emitted tokens are those nodes' tokens and then
    next_token (the bonus token, or the correction after a rejection), accepted + 1 in all. next_token is -1 if its
    logits hold a NaN or allow no token. states[i] is the constraint's state after tokens[i].
    Entries past the end are 0.
    """

    path: Int[Array, "*b m"]
    tokens: Int[Array, "*b m"]
    states: Int[Array, "*b m"]
    accepted: Int[Array, "*b"]
    raw_log_probs: Float[Array, "*b m"] | None
    log_probs: Float[Array, "*b m"] | None

    @property
    def next_token(self) -> Int[Array, "*b"]:
        """The last emitted token, which becomes the next anchor."""
        return jnp.take_along_axis(self.tokens, self.accepted[..., None], axis=-1)[..., 0]


@flax.struct.dataclass
class Walk:
    """A walk's place in the tree and what it has written so far; the carry of a rule's loop."""

    node: Int[Array, ""]
    history: History
    verdict: Verdict
    done: Bool[Array, ""]

    @staticmethod
    def start(scores: Scores, m: int) -> Walk:
        """At the root, with room for m emitted tokens."""
        empty = jnp.zeros(m, jnp.int32)
        logs = jnp.zeros(m) if scores.want_log_probs else None
        verdict = Verdict(empty, empty, empty, jnp.int32(0), logs, logs)
        return Walk(jnp.int32(0), scores.history, verdict, jnp.bool_(False))

    def emit(self, token: Array, child: Array, z: Array, scores: Scores) -> Walk:
        """Emit a token and go on at `child` (an index, or anything outside the tree if there is none)."""
        v, i, m = self.verdict, self.verdict.accepted, self.verdict.path.shape[0]
        bad = token < 0
        history = self.history.step(jnp.maximum(token, 0), scores.constraint)
        found = (child > 0) & (child < scores.logits.shape[0]) & ~bad & (i + 1 < m)
        raw, law = scores.emitted(self.node, token, z) if v.log_probs is not None else (None, None)
        verdict = Verdict(
            path=v.path.at[jnp.where(found, i + 1, m)].set(child, mode="drop"),
            tokens=v.tokens.at[i].set(token),
            states=v.states.at[i].set(history.state),
            accepted=i + found,
            raw_log_probs=None if v.raw_log_probs is None else v.raw_log_probs.at[i].set(raw),
            log_probs=None if v.log_probs is None else v.log_probs.at[i].set(law),
        )
        return Walk(jnp.where(found, child, self.node), history, verdict, ~found)


def child_with(tree: Tree, node: Array, token: Array) -> Int[Array, ""]:
    """The first valid child of a node that holds a token; n if there is none."""
    n = tree.tokens.shape[0]
    index = jnp.arange(n, dtype=jnp.int32)
    hit = (tree.parent == node) & (tree.tokens == token) & tree.valid & (index > 0)
    return jnp.where(hit, index, n).min()
