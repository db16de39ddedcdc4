"""Verifier rules with faults planted in them. The draft's tag tells which one acts, so one program has them all."""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.struct
import jax.numpy as jnp
from jax import lax

from spec_jax import noise
from spec_jax.verify.rejection import rejection
from spec_jax.verify.scores import Scores
from spec_jax.verify.verdict import Verdict, Walk

RULE_FAULTS = (
    "none",
    "replacement from p",
    "one coordinate",
    "lenience",
    "epsilon",
    "uniform",
    "at most",
    "chosen by token",
)
SLOT_FAULTS = ("none", "bonus temperature", "verified only", "ignored", "frozen", "bonus only")


def chain_rule(key, draft, scores, m) -> Verdict:
    """Our own writing of the p/q rule on a chain, with RULE_FAULTS."""
    accept, residual = noise.stream(key, "accept"), noise.stream(key, "residual")
    n, vocab = scores.logits.shape
    tag, ids = draft.law.tag[0, 0], jnp.arange(vocab)

    def step(walk: Walk) -> Walk:
        at, child = scores.position + walk.verdict.accepted, walk.node + 1
        z = scores.z(walk.node, walk.history)
        p, last = jnp.exp(scores.log_probs(z)), child == n
        child = jnp.minimum(child, n - 1)
        x, q = draft.tree.tokens[child], jnp.exp(draft.law.log_probs[child])
        tried = ~last & draft.tree.valid[child] & ((tag != 7) | (x < 2))
        ratio = p[x] / q[x]
        ratio = jnp.where(tag == 3, 1.1 * ratio, jnp.where(tag == 4, p[x] / (q[x] + 0.01), ratio))
        u = noise.uniform(accept, at, child)
        keep = tried & jnp.where(tag == 6, u * q[x] <= p[x], u < ratio)
        rest = jnp.maximum(p - q, 0)
        rest = jnp.where(tag == 1, p, jnp.where(tag == 2, jnp.where(ids == x, rest, p), rest))
        spent = jnp.where(tag == 5, p > 0, p)
        rest = jnp.where(tried, jnp.where(rest.sum() > 0, rest, spent), p)
        drawn = jnp.argmax(jnp.log(rest) + noise.gumbel(residual, at, ids))
        return walk.emit(jnp.where(keep, x, drawn).astype(jnp.int32), jnp.where(keep, child, n), z, scores)

    return lax.while_loop(lambda walk: ~walk.done, step, Walk.start(scores, m)).verdict


def slot_rule(key, draft, scores, m) -> Verdict:
    """The library's rule over scores with SLOT_FAULTS: transforms that miss some slots, or see another history."""
    tree, index = draft.tree, jnp.arange(scores.logits.shape[0])
    has_child = ((tree.parent[None, :] == index[:, None]) & tree.valid).any(-1)
    fields = {f.name: getattr(scores, f.name) for f in dataclasses.fields(Scores)}
    return rejection(key, draft, SlotScores(**fields, leaf=~has_child, tag=draft.law.tag[0, 0]), m)


@flax.struct.dataclass
class SlotScores(Scores):
    leaf: Any = None
    tag: Any = None

    def z(self, node, history):
        raw, right = self.logits[node], super().z(node, history)
        third = jnp.sort(raw)[-3]
        return jnp.stack(
            [
                right,
                jnp.where(self.leaf[node], right / 0.6, right),
                jnp.where(self.leaf[node] | (raw >= third), right, -jnp.inf),
                raw,
                super().z(node, self.history),
                jnp.where(self.leaf[node], right, raw),
            ]
        )[self.tag]


def lenient_match(key, draft, scores, m) -> Verdict:
    """Greedy match that breaks ties toward the draft."""

    def step(walk: Walk) -> Walk:
        z = scores.z(walk.node, walk.history)
        children = (draft.tree.parent == walk.node) & draft.tree.valid & (jnp.arange(draft.tree.tokens.shape[0]) > 0)
        good = children & (z[draft.tree.tokens] >= z.max())
        child = jnp.where(good.any(), jnp.argmax(good), good.shape[0])
        token = jnp.where(good.any(), draft.tree.tokens[jnp.minimum(child, good.shape[0] - 1)], jnp.argmax(z))
        return walk.emit(token.astype(jnp.int32), child, z, scores)

    return lax.while_loop(lambda walk: ~walk.done, step, Walk.start(scores, m)).verdict
