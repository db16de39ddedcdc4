"""Rules on a whole tree by enumeration, in numpy float64; shares no code with the library.

p and q are functions from the path's tokens to a law. Emissions are {emitted tokens: chance}; one less is
accepted than emitted.
"""

from __future__ import annotations

import itertools

import numpy as np


def children(parents, node):
    return [i for i in range(1, len(parents)) if parents[i] == node]


def drafts(parents, q, replacement):
    """All (tokens by node, chance); None where the law has nothing left for a node."""

    def extend(tokens, chance):
        i = len(tokens)
        if i == len(parents):
            yield tokens, chance
            return
        path, node = [], parents[i]
        while node > 0:
            path, node = [tokens[node], *path], parents[node]
        law = np.zeros(1) if None in path else np.array(q(tuple(path)))
        if not replacement:
            for j in children(parents[:i], parents[i]):
                if tokens[j] is not None:
                    law[tokens[j]] = 0
        if law.sum() <= 0:
            yield from extend([*tokens, None], chance)
            return
        for x in np.flatnonzero(law):
            yield from extend([*tokens, int(x)], chance * law[x] / law.sum())

    return list(extend([None], 1.0))


def less(law, x, replacement):
    """The law that the next sibling is drawn from."""
    if replacement:
        return law
    law = np.where(np.arange(len(law)) == x, 0, law)
    return law / max(law.sum(), 1e-300)


def by_rejection(parents, tokens, p, q, replacement):
    out = {}

    def at(node, path, chance):
        left, law = np.array(p(path)), np.array(q(path))
        for c in children(parents, node):
            x = tokens[c]
            if x is None:
                continue
            keep = min(1.0, left[x] / law[x])
            at(c, (*path, x), chance * keep)
            chance, rest = chance * (1 - keep), np.maximum(left - law, 0)
            left, law = rest / rest.sum() if rest.sum() > 1e-12 else left, less(law, x, replacement)
        add(out, path, chance * left)

    at(0, (), 1.0)
    return out


def by_traversal(parents, tokens, p, q, replacement):
    """Leaves before their parents. `at` returns how often it accepts something in its subtree, for these tokens."""
    out = {}

    def at(node, path, alpha, chance):
        left, law, here = np.array(p(path)), np.array(q(path)), 1.0
        for c in children(parents, node):
            x = tokens[c]
            if x is None:
                continue
            enter = min(1.0, alpha * left[x] / law[x])
            accepted = at(c, (*path, x), enter, chance * here)
            rest = np.maximum(alpha * left - law, 0)
            mass, here = rest.sum(), here * (1 - accepted)
            left = rest / mass if mass > 1e-12 else left
            alpha = 1.0 if node == 0 else mass / max(mass + 1 - alpha, 1e-300)
            law = less(law, x, replacement)
        add(out, path, chance * here * alpha * left)
        return 1 - here * (1 - alpha)

    at(0, (), 1.0, 1.0)
    return out


def add(out, path, masses):
    for token in np.flatnonzero(masses > 1e-16):
        emitted = (*path, int(token))
        out[emitted] = out.get(emitted, 0) + masses[token]


def text_law(emissions, p, n):
    """The law of the first n tokens when the rest is drawn from p."""
    law = {}
    for emitted, chance in emissions.items():
        tails = itertools.product(range(len(p(()))), repeat=max(0, n - len(emitted)))
        for tail in tails:
            text, mass = emitted[:n], chance
            for x in tail:
                mass *= p(text)[x]
                text = (*text, x)
            if mass > 0:
                law[text] = law.get(text, 0) + mass
    return law


def plain_law(p, n):
    return text_law({(x,): mass for x, mass in enumerate(p(())) if mass > 0}, p, n)


def tables(rows, start):
    """A law by the path's last token; `start` before the first."""
    rows = np.asarray(rows, np.float64)
    return lambda path: rows[path[-1] if path else start].copy()
