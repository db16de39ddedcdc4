"""Pruning, merging and grafting against tries in plain Python."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spec_jax.topology.compact import compact, log_chance
from spec_jax.topology.merge import discount, graft, merge, merge_traced, prune, rescore
from tests.topology import kit

SEED = st.integers(0, 2**16)
TWINS = st.booleans()


def top(found, count):
    """The `count` greatest chances, descending."""
    return sorted(found.values(), reverse=True)[:count]


@functools.cache
def merger(nodes, keep_first=False):
    return jax.jit(lambda a, b: merge(a, b, nodes, keep_first))


@given(SEED, SEED, TWINS, st.sampled_from([1, 5, 20]))
def test_merged_is_a_trie_of_both(one, two, twins, nodes):
    first, second = kit.random_draft(one, twins=twins), kit.random_draft(two, n=9, twins=twins)
    want = kit.plain_paths(second)
    for path, chance in kit.plain_paths(first).items():
        want[path] = max(want.get(path, 0.0), chance)
    known = kit.check_scored(merger(nodes)(first, second), nodes)
    assert len(known) == min(nodes - 1, len(want))
    assert known == {path: pytest.approx(want[path], rel=1e-4) for path in known}
    assert list(known.values()) == pytest.approx(top(want, nodes - 1), rel=1e-4)


TRACED = {keep: jax.jit(lambda a, b, keep=keep: merge_traced(a, b, 9, keep)) for keep in (False, True)}


@given(SEED, SEED, TWINS, st.booleans())
def test_a_merged_node_is_traced_to_the_first_draft(one, two, twins, keep):
    first, second = kit.random_draft(one, twins=twins), kit.random_draft(two, n=9, twins=twins)
    draft, origin = TRACED[keep](first, second)
    kit.same(draft, merger(9, keep)(first, second))
    own, names, joined = kit.plain_paths(first), _names(first), _names(draft)
    for i in range(1, 9):
        if not draft.tree.valid[i]:
            assert origin[i] == -1
        elif joined[i] in own:
            assert first.tree.valid[origin[i]] and names[int(origin[i])] == joined[i]
        else:
            assert origin[i] == -1
    assert origin[0] == 0


def _names(draft):
    """Every node's root path of tokens."""
    tree, names = draft.tree, [()]
    for i in range(1, tree.tokens.shape[0]):
        names.append((*names[max(int(tree.parent[i]), 0)], int(tree.tokens[i])))
    return names


@given(SEED, SEED)
def test_merging_is_symmetric_and_a_draft_with_itself_is_itself(one, two):
    first, second = kit.random_draft(one), kit.random_draft(two)
    both = merger(20)
    assert kit.check_scored(both(first, second), 20) == pytest.approx(kit.check_scored(both(second, first), 20))
    assert kit.check_scored(both(first, first), 20) == pytest.approx(kit.plain_paths(first), rel=1e-4)


@given(SEED, st.sampled_from([1, 3, 7, 12]), st.sampled_from([None, 0, 2]))
def test_pruned(seed, nodes, depth):
    draft = kit.random_draft(seed)
    want = {path: c for path, c in kit.plain_paths(draft).items() if depth is None or len(path) <= depth}
    known = kit.check_scored(pruner(nodes, depth)(draft), nodes)
    assert list(known.values()) == pytest.approx(top(want, nodes - 1), rel=1e-4)
    assert known == {path: pytest.approx(want[path], rel=1e-4) for path in known}


@functools.cache
def pruner(nodes, depth):
    return jax.jit(lambda d: prune(d, nodes, depth))


GRAFT = jax.jit(lambda a, b: graft(a, b, 4, 8, 2))


@given(SEED, SEED)
def test_grafted(one, two):
    """The kept nodes all stay, whatever the retrieved ones' chances; those fill the room, likeliest first."""
    draft, retrieved = kit.random_draft(one), kit.random_draft(two, n=9)
    kept = kit.check_scored(pruner(4, 2)(draft), 4)
    extra = {path: c for path, c in kit.plain_paths(retrieved).items() if path not in kept}
    known = kit.check_scored(GRAFT(draft, retrieved), 8)
    assert set(kept) <= set(known) and set(known) <= set(kept) | set(extra)
    assert len(known) == min(7, len(kept) + len(extra))
    chosen = {path: c for path, c in known.items() if path not in kept}
    assert sorted(chosen.values(), reverse=True) == pytest.approx(top(extra, 7 - len(kept)), rel=1e-4)


def test_without_keeping_it_likelier_paths_push_a_draft_out():
    weak, strong = kit.chain_draft([1, 2], [0.2, 0.2]), kit.chain_draft([3, 0], [0.9, 0.9])
    assert list(kit.paths(merger(3)(weak, strong))) == [(3,), (3, 0)]
    assert set(kit.paths(merger(3, True)(weak, strong))) == {(1,), (1, 2)}
    assert list(kit.paths(jax.jit(lambda a, b: graft(a, b, 2, 3))(weak, strong))) == [(3,), (1,)]
    with pytest.raises(ValueError, match="nodes: got 2, takes at least the first draft's 3"):
        merge(weak, strong, 2, keep_first=True)


def test_rasd():
    """A retrieval tree pruned by a model's laws, then merged with the model's own chain."""
    laws = jnp.log(jnp.array([[0.1, 0.6, 0.3, 0.0], [0.5, 0.1, 0.2, 0.2]]))
    retrieved = merger(8)(kit.chain_draft([1, 0, 2], [0.5] * 3), kit.chain_draft([3, 0], [0.9, 0.9]))
    believed = jax.jit(rescore)(retrieved, laws)
    pruned = pruner(3, None)(believed)
    assert kit.chances(kit.paths(pruned)) == pytest.approx({(1,): 0.6, (1, 0): 0.3})
    assert (1, 0, 2) not in kit.paths(pruner(8, None)(believed)), "deeper than the laws"
    fused = merger(6)(kit.chain_draft([1, 2], [0.6, 0.2]), pruned)
    assert kit.chances(kit.paths(fused)) == pytest.approx({(1,): 0.6, (1, 0): 0.3, (1, 2): 0.12})


@given(SEED, st.floats(0.05, 1))
def test_a_discount_is_on_every_path(seed, factor):
    draft = kit.random_draft(seed)
    want = {path: pytest.approx(c * factor, rel=1e-4) for path, c in kit.plain_paths(draft).items()}
    assert kit.plain_paths(DISCOUNT(draft, jnp.float32(factor))) == want


@given(SEED)
def test_log_chance_never_rises_along_a_path(seed):
    draft = kit.random_draft(seed)
    got, parent = np.asarray(LOG(draft)), np.asarray(draft.tree.parent)
    assert got[0] == 0 and (got[1:] <= got[parent[1:]]).all()
    assert ((got > -np.inf) == np.asarray(draft.tree.valid)).all()


LOG, COMPACT, DISCOUNT = jax.jit(log_chance), jax.jit(compact), jax.jit(discount)


@given(SEED, SEED)
def test_compacting_keeps_what_is_kept_in_order(seed, keep):
    draft = kit.random_draft(seed)
    kept = np.random.default_rng(keep).random(7) < 0.7
    got = COMPACT(draft, jnp.asarray(kept))
    names, live = [()], [True]
    for i in range(1, 7):
        above = int(draft.tree.parent[i])
        names.append((*names[above], int(draft.tree.tokens[i])))
        live.append(bool(live[above] and kept[i] and draft.tree.valid[i]))
    assert list(kit.paths(got)) == [name for name, on in zip(names[1:], live[1:], strict=True) if on]


def test_rows_do_not_mix():
    firsts, seconds = [[kit.random_draft(i + o) for i in range(4)] for o in (0, 50)]
    stack = lambda drafts: jax.tree.map(lambda *x: jnp.stack(x), *drafts)  # noqa: E731
    for f in (lambda a, b: merge(a, b, 9), lambda a, b: graft(a, b, 4, 9)):
        many = jax.jit(jax.vmap(f))(stack(firsts), stack(seconds))
        for i in range(4):
            kit.same(kit.row(many, i), jax.jit(f)(firsts[i], seconds[i]))
