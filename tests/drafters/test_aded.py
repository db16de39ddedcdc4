"""ADED's search against plain Python: the same walks through the same laws find the same tree."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spec_jax.drafters.aded import Aded
from tests.drafters import kit
from tests.drafters.test_stand import GUMBEL, LONGEST, MOST, K, V, behind, context, known

D = Aded(V, nodes=8, max_depth=3, longest=LONGEST, entries=1 << 14, most=MOST, kept=K, explore=0.7, walks=12)
PROPOSE = jax.jit(lambda drafter, state, c: drafter.propose(None, state, c)[0], static_argnums=0)


def search(want, text, key, temperature, room, explore=D.explore):
    """{path: chance of its last token}, in the order in which the walks find them."""
    found, taken, worth, candidates = {(): 1.0}, {}, {}, {}

    def behind_path(path):
        if path not in candidates:
            whole = [*text, *path]
            law = behind(want, (whole[-1], whole[-2] if len(whole) > 1 else -1))
            if len(path) == D.max_depth or len(path) + 1 >= room:
                law = {}
            noisy = temperature * np.asarray(GUMBEL(key, jnp.int32(len(whole)), jnp.arange(V)))
            score = {t: np.exp(np.log(p) + noisy[t]) for t, p in law.items()}
            candidates[path] = {t: s / sum(score.values()) for t, s in score.items()}
        return candidates[path]

    for _ in range(D.walks):
        path, steps, product, tokens = (), [], 1.0, 0.0
        while (law := behind_path(path)) and path in found:
            total = sum(taken.get((*path, t), 0) for t in law)
            bound = {}
            for t, p in law.items():
                n = taken.get((*path, t), 0)
                bound[t] = worth.get((*path, t), 0) / max(n, 1) + explore * p * np.sqrt(1 + total) / (1 + n)
            best = max(bound, key=lambda t: bound[t])
            path = (*path, best)
            steps.append(path)
            product *= law[best]
            tokens += product
        if path not in found:
            found[path] = behind_path(path[:-1])[path[-1]]
        for step in steps:
            taken[step] = taken.get(step, 0) + 1
            worth[step] = worth.get(step, 0) + tokens / D.max_depth
        if len(found) == D.nodes:
            break
    return {path: chance for path, chance in found.items() if path}


@settings(max_examples=40)
@given(st.integers(0, 2**16), st.sampled_from([0.0, 1.0]), st.integers(1, 6))
def test_walks_find_the_same_tree_in_the_same_order(seed, temperature, room):
    rng = np.random.default_rng(seed)
    table, want = known(rng, rounds=12)
    state = dataclasses.replace(D.init(None, 2, kit.SIZE), table=table)
    texts = [rng.integers(0, 4, n).tolist() for n in (1, 5)]
    c = context(texts, temperature, room)
    draft = jax.device_get(PROPOSE(D, state, c))
    for row, text in enumerate(texts):
        tree = search(want, text, c.key[row], temperature, room)
        got = kit.paths(draft, row)
        assert [path for path, _ in got] == list(tree)
        assert [p for _, p in got] == pytest.approx(list(tree.values()), rel=1e-3)
        assert draft.tree.tokens[row, 0] == text[-1]
    assert draft.proposal == "coupled"


def test_what_was_seldom_tried_is_explored():
    """Without exploring, the first walks go down one path; and that the oracle explores is what tells them apart."""
    table, want = known(np.random.default_rng(3), rounds=40)
    state, text = dataclasses.replace(D.init(None, 2, kit.SIZE), table=table), [1, 2, 3]
    c = context([text, text], 0.0)
    drafters = (D, dataclasses.replace(D, explore=0.0))
    drafts = [[path for path, _ in kit.paths(PROPOSE(d, state, c))] for d in drafters]
    wanted = [list(search(want, text, c.key[0], 0.0, kit.SIZE, d.explore)) for d in drafters]
    assert drafts == wanted
    branches = [len({path[0] for path in tree}) for tree in wanted]
    assert branches[0] > branches[1] == 1


def test_nothing_is_drafted_where_nothing_is_known_or_no_row_runs():
    table, _ = known(np.random.default_rng(1), rounds=20)
    state = dataclasses.replace(D.init(None, 2, kit.SIZE), table=table)
    some, none = PROPOSE(D, state, context([[2], [2]], 0.0, active=[True, False])).tree.valid.sum(1).tolist()
    assert some > none == 1
    draft = PROPOSE(D, D.init(None, 2, kit.SIZE), context([[2], [2]], 0.0))
    assert draft.tree.valid.sum(1).tolist() == [1, 1] and draft.tree.tokens[:, 0].tolist() == [2, 2]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"nodes": 1}, "nodes: got 1"),
        ({"longest": 0}, "longest: got 0"),
        ({"kept": 0}, "kept: got 0"),
        ({"kept": 101}, "kept: got 101, takes at most vocab_size, which is 100"),
        ({"walks": 30}, "walks: got 30, takes an integer of at least 31"),
        ({"explore": -0.1}, r"explore: got -0\.1"),
        ({"a": -1.0}, r"a: got -1\.0"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Aded(**{"vocab_size": 100, **settings})
