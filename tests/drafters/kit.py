"""What the drafter tests share: contexts from plain lists, and drafts as paths of tokens."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.drafters.drafter import Context
from spec_jax.sampling.constraint import free
from spec_jax.sampling.settings import Sampling, to_row

WORDS = 12
SIZE = 24


def context(texts, room=SIZE, prompt_length=1, active=True, size=SIZE):
    """Rows of the given texts; behind each text stand tokens that look real."""
    b = len(texts)
    tokens = np.full((b, size), WORDS - 1)
    for row, text in zip(tokens, texts, strict=True):
        row[: len(text)] = text
    whole = lambda x: np.broadcast_to(np.asarray(x, np.int32), b)  # noqa: E731
    return Context(
        tokens=jnp.asarray(tokens, jnp.int32),
        length=jnp.asarray(whole([len(text) for text in texts])),
        prompt_length=jnp.asarray(whole(prompt_length)),
        room=jnp.asarray(whole(room)),
        active=jnp.asarray(whole(active) > 0),
        **_defaults(b),
    )


@functools.cache
def _defaults(b):
    """The parts that are alike in all contexts."""
    sampling = jax.tree.map(lambda x: jnp.broadcast_to(x, (b, *x.shape)), to_row(Sampling(), WORDS))
    off = jnp.bool_(False)
    return {
        "key": jnp.zeros((b, 2), jnp.uint32),
        "sampling": sampling,
        "state": jnp.zeros(b, jnp.int32),
        "constraint": free(WORDS),
        "sampled": off,
        "adjusted": off,
    }


def paths(draft, row=0):
    """The valid nodes in order: (tokens on the root path without the anchor, confidence)."""
    tree, confidence = draft.tree, np.asarray(draft.confidence)[row]
    tokens, parent, valid = (np.asarray(x)[row] for x in (tree.tokens, tree.parent, tree.valid))
    found = [()]
    for i in range(1, len(tokens)):
        assert 0 <= parent[i] < i or not valid[i]
        assert not valid[i] or valid[parent[i]]
        found.append((*found[max(parent[i], 0)], int(tokens[i])))
    assert parent[0] == -1 and valid[0]
    return [(found[i], float(confidence[i])) for i in range(1, len(tokens)) if valid[i]]


def chances(draft, row=0):
    """Products of confidences along the root paths of the valid nodes, in order."""
    known = {(): 1.0}
    for path, confidence in paths(draft, row):
        known[path] = known[path[:-1]] * confidence
    return list(known.values())[1:]


def trie(found):
    """Confidence of every prefix of the candidates."""
    weight = {}
    for m, tokens in found:
        for d in range(len(tokens)):
            path = tuple(tokens[: d + 1])
            weight[path] = weight.get(path, 0) + (m + d) ** 1.5
    total = {}
    for path, w in weight.items():
        total[path[:-1]] = total.get(path[:-1], 0) + w
    return {path: w / (total[path[:-1]] + 5) for path, w in weight.items()}


def check_merged(draft, row, found, nodes):
    """The draft is the likeliest prefixes of the candidates found, (match length, continuation) each."""
    confidence = trie(found)
    chance = {path: np.prod([confidence[path[: i + 1]] for i in range(len(path))]) for path in confidence}
    got = paths(draft, row)
    assert len(got) == len({path for path, _ in got}) == min(nodes - 1, len(confidence))
    for path, c in got:
        assert c == pytest.approx(confidence[path], rel=1e-4)
    chosen = [chance[path] for path, _ in got]
    assert chosen == pytest.approx(sorted(chance.values(), reverse=True)[: nodes - 1], rel=1e-4)
    assert all(a >= b * (1 - 1e-5) for a, b in zip(chosen, chosen[1:], strict=False))
