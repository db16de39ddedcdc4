"""Trees drawn from a table, and the texts that a rule alone makes of them."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from spec_jax import noise
from spec_jax.sampling.history import from_text
from spec_jax.sampling.settings import Sampling, to_row
from spec_jax.tree import Draft, Law, Tree
from spec_jax.verify.scores import Scores
from tests.faults import kit
from tests.faults.lawkit import START, V, keys_of, law_of, table
from tests.faults.laws import fit
from tests.faults.oracle import law
from tests.verify import exact

CHAIN, STAR, TREE = (-1, 0, 1), (-1, 0, 0, 0), (-1, 0, 0, 1, 1, 2, 2)


def draw(key, parents, proposal, log_q, anchor, position, by_position=False):
    """A draft of a fixed shape: log_q [tokens, V] by the parent's token. Noise is keyed by the round and the node.

    by_position keys it by the token's text position instead, whatever the round.
    """
    tokens, valid, depth, ids = [anchor], [jnp.bool_(True)], [0], jnp.arange(log_q.shape[1])
    for i, parent in enumerate(parents[1:], 1):
        depth.append(depth[parent] + 1)
        elders = [j for j in range(1, i) if parents[j] == parent]
        source = (elders[0] if elders else i) if proposal == "without_replacement" else i
        at, index = (position + depth[i] - 1, len(elders)) if by_position else (position, source)
        noisy = log_q[tokens[parent]] + noise.gumbel(noise.stream(key, "draft"), at, ids + index * len(ids))
        if proposal == "without_replacement":
            for j in elders:
                noisy = jnp.where(valid[j] & (ids == tokens[j]), -jnp.inf, noisy)
        valid.append(valid[parent] & (noisy.max() > -jnp.inf))
        tokens.append(jnp.where(valid[-1], noisy.argmax(), 0))
    tokens = jnp.stack([jnp.asarray(t, jnp.int32) for t in tokens])
    laws = log_q[tokens[jnp.maximum(jnp.asarray(parents), 0)]]
    tree = Tree(tokens, jnp.asarray(parents, jnp.int32), jnp.stack(valid))
    return Draft(tree, jnp.ones(len(parents)), Law(laws), proposal)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3, 4), compiler_options=kit.FAST_RUN)
def _texts(rule, parents, proposal, m, by_position, target, log_q, valid, row, bound, start, keys):
    size = 4 + m

    def one(key):
        def round_(_, carry):
            text, length, state = carry
            d = draw(key, parents, proposal, log_q, text[length - 1], length, by_position)
            d = d.replace(tree=d.tree.replace(valid=d.tree.valid & valid))
            past = from_text(text, jnp.int32(1), length, state, V + 1)
            v = rule(key, d, Scores(target[d.tree.tokens], row, past, length, bound), m)
            at = jnp.where(jnp.arange(m) <= v.accepted, length + jnp.arange(m), size)
            return text.at[at].set(v.tokens, mode="drop"), length + v.accepted + 1, v.states[v.accepted]

        carry = (jnp.full(size, START), jnp.int32(1), start)
        return lax.fori_loop(0, 3, round_, carry)[0][1:4]

    return jax.vmap(one)(keys)


def gate(rule, name_or_tables, proposal, parents, sampling, said=None, m=3, calls=1, valid=None, grammar=None, **how):
    """Texts of three tokens by a rule on drawn trees, against their exact law. The drafter draws with `said`."""
    target, draft = name_or_tables
    transitions, start = grammar or (None, -1)
    with np.errstate(divide="ignore"):
        log_q = table(np.log([law(z, said or sampling) for z in draft]))
    valid = jnp.ones(len(parents), bool) if valid is None else jnp.asarray(valid)
    row, bound = to_row(sampling, V + 1, (), 2, 1), kit.room_for(transitions, V + 1)
    given = (rule, parents, proposal, m, how.get("by_position", False), table(target), log_q, valid, row, bound)
    texts = [np.asarray(_texts(*given, jnp.int32(start + 1), keys)) for keys in keys_of(calls)]
    return fit(np.concatenate(texts), law_of(target, sampling, grammar=grammar))


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _once(rule, parents, proposal, m, logits, log_q, row, position, keys):
    vocab = logits.shape[1]

    def one(key):
        d = draw(key, parents, proposal, log_q, jnp.int32(vocab - 1), position)
        past = from_text(jnp.full(1, vocab - 1), jnp.int32(1), jnp.int32(1), jnp.int32(0), vocab)
        s = Scores(logits[d.tree.tokens], row, past, position, kit.room_for(None, vocab))
        return d.tree, rule(key, d, s, m)

    return jax.vmap(one)(keys)


def once(rule, parents, proposal, p, q, keys, m=3, sampling=None):
    """One round of a rule over tables of probabilities [V + 1, V] by last token, row V first: trees and verdicts."""
    pad = lambda rows: jnp.asarray(np.pad(np.log(rows), ((0, 0), (0, 1)), constant_values=-np.inf), jnp.float32)  # noqa: E731
    with np.errstate(divide="ignore"):
        logits, log_q = pad(p), pad(q)
    row = to_row(sampling or Sampling(temperature=1.0), len(p), (), 2, 1)
    return jax.device_get(_once(rule, parents, proposal, m, logits, log_q, row, jnp.int32(1), keys))


def cells(trees, verdicts):
    """The drafted tokens (-1 where there is none) and then the emitted ones, of every key."""
    m = verdicts.tokens.shape[1]
    emitted = np.where(np.arange(m) <= verdicts.accepted[:, None], verdicts.tokens, -1)
    return np.concatenate([np.where(trees.valid, trees.tokens, -1)[:, 1:], emitted], axis=1)


def joint(parents, p, q, replacement, by, m):
    """The exact law of those cells."""
    law = {}
    for tokens, chance in exact.drafts(parents, q, replacement):
        drafted = tuple(-1 if x is None else x for x in tokens[1:])
        for emitted, mass in by(parents, tokens, p, q, replacement).items():
            cell = (*drafted, *emitted, *[-1] * (m - len(emitted)))
            law[cell] = law.get(cell, 0) + chance * mass
    return law
