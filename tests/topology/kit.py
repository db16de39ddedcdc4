"""What the topology tests share: random drafts, drafts as paths of tokens, and what holds for every builder's draft."""

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax.tree import Draft, Tree

ANCHOR = jnp.int32(7)
V = 4


def paths(draft):
    """{tokens on the root path: confidence} of the used nodes but the root, in node order; checks the layout."""
    tokens, parent, valid, confidence = (np.asarray(x) for x in (*jax.tree.leaves(draft.tree), draft.confidence))
    assert parent[0] == -1 and valid[0] and confidence[0] == 1
    used = int(valid.sum())
    assert valid[:used].all(), "unused nodes stand at the end"
    assert (tokens[used:] == 0).all() and (parent[used:] == 0).all() and (confidence[used:] == 0).all()
    found, names = {}, [()]
    for i in range(1, used):
        assert 0 <= parent[i] < i, "parents come before children"
        names.append((*names[parent[i]], int(tokens[i])))
        assert names[i] not in found, "two siblings hold one token"
        assert 0 <= confidence[i] <= 1 + 1e-6
        found[names[i]] = float(confidence[i])
    return found


def chances(found):
    """Products of confidences along the paths, in node order."""
    known = {(): 1.0}
    for path, confidence in found.items():
        known[path] = known[path[:-1]] * confidence
    del known[()]
    return known


def descends(values):
    return all(a >= b * (1 - 1e-5) for a, b in zip(values, values[1:], strict=False))


def check_scored(draft, nodes):
    """What holds for a draft that was chosen by score; its paths and their chances."""
    assert draft.tree.tokens.shape == (nodes,) and draft.proposal == "point" and draft.law is None
    known = chances(paths(draft))
    assert descends([1.0, *known.values()])
    return known


def random_draft(seed, n=7, twins=False, anchor=ANCHOR):
    """A tree of random tokens, its nodes in any order that has parents first; some are not valid."""
    rng = np.random.default_rng(seed)
    tokens, parent, seen = [int(anchor)], [-1], set()
    while len(tokens) < n:
        above, token = int(rng.integers(0, len(tokens))), int(rng.integers(0, V))
        if twins or (above, token) not in seen:
            seen.add((above, token))
            tokens.append(token)
            parent.append(above)
    valid = rng.random(n) < 0.9
    valid[0] = True
    for i in range(1, n):
        valid[i] &= valid[parent[i]]
    confidence = np.where(np.arange(n) == 0, 1, rng.uniform(0.02, 1, n))
    return Draft(
        Tree(jnp.asarray(tokens, jnp.int32), jnp.asarray(parent, jnp.int32), jnp.asarray(valid)),
        jnp.asarray(confidence, jnp.float32),
    )


def chain_draft(tokens, confidence):
    n = len(tokens) + 1
    tree = Tree(jnp.array([ANCHOR, *tokens], jnp.int32), jnp.arange(-1, n - 1), jnp.ones(n, bool))
    return Draft(tree, jnp.array([1.0, *confidence], jnp.float32))


def plain_paths(draft):
    """{path: greatest path chance} of the valid nodes, in plain Python, twins made one."""
    tokens, parent, valid, confidence = (np.asarray(x) for x in (*jax.tree.leaves(draft.tree), draft.confidence))
    names, chance, found = [()], [1.0], {}
    for i in range(1, len(tokens)):
        names.append((*names[parent[i]], int(tokens[i])))
        chance.append(chance[parent[i]] * confidence[i])
        if valid[i]:
            found[names[i]] = max(found.get(names[i], 0.0), chance[i])
    return found


def same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def row(tree, i):
    return jax.tree.map(lambda x: x[i], tree)
