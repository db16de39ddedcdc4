"""Drawn trees: their shape, and that the rules for them emit exactly the target's law."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax import noise
from spec_jax.sampling.settings import Sampling
from spec_jax.topology.dynamic import dynamic
from spec_jax.topology.sampled import branching, by_depth, delayed, draw_key, siblings
from spec_jax.topology.stochastic_beam import beam_step, stochastic_beam
from spec_jax.verify.rejection import rejection
from tests.faults.laws import fit
from tests.topology import kit
from tests.verify.walks import keys, scores

V, N, M = 4, 100_000, 3
POSITION = jnp.int32(5)
ROOT = jnp.int32(0)
_rng = np.random.default_rng(11)
TARGET = np.log(_rng.dirichlet(np.full(V, 0.8), V)).astype(np.float32)
with np.errstate(divide="ignore"):
    GUESS = _rng.dirichlet(np.full(V, 0.8), V)
    GUESS[2] = [0.6, 0.0, 0.4, 0.0]
    LAWS = np.log(GUESS).astype(np.float32)


def after(token, depth):
    return jnp.asarray(LAWS)[token]


BUILDERS = {
    "MCSD": lambda key: branching(key, ROOT, after, (2, 2), POSITION, True),
    "K-SEQ candidates": lambda key: branching(key, ROOT, after, (3, 1), POSITION, True),
    "delayed": lambda key: branching(key, ROOT, after, delayed(1, 3, 1), POSITION, True),
    "RSD-C": lambda key: branching(key, ROOT, after, (2, 3), POSITION, False),
    "RSD-S": lambda key: stochastic_beam(key, ROOT, after, 3, 2, POSITION),
    "DySpec": lambda key: dynamic(key, ROOT, after, 7, POSITION, 2),
}
MANY = {"MCSD", "K-SEQ candidates", "delayed"}


def emitted(build, rule=rejection):
    """The first M tokens of each key: what the rule emits, and then the target's own draws."""

    def one(key):
        draft = build(key)
        tables = jnp.asarray(TARGET)
        verdict = rule(key, draft, scores(tables[draft.tree.tokens], Sampling(temperature=1.0), position=POSITION), M)
        own = noise.stream(noise.stream(key, "draft"), "residual")
        tokens, last = [], ROOT
        for i in range(M):
            fresh = jnp.argmax(tables[last] + noise.gumbel(own, POSITION + i, jnp.arange(V)))
            last = jnp.where(i <= verdict.accepted, verdict.tokens[i], fresh)
            tokens.append(last)
        return jnp.stack(tokens), verdict.accepted

    return jax.device_get(jax.jit(jax.vmap(one))(keys(N)))


def target_law():
    p = np.exp(TARGET.astype(float))
    p /= p.sum(-1, keepdims=True)
    return {
        text: np.prod([p[a, b] for a, b in zip((0, *text), text, strict=False)])
        for text in itertools.product(range(V), repeat=M)
    }


@pytest.mark.parametrize("name", BUILDERS)
def test_the_text_has_the_target_s_law(name):
    texts, accepted = emitted(BUILDERS[name])
    assert fit(texts, target_law()).ok
    assert 0.3 < accepted.mean() < 2


@functools.cache
def drafts(name, count=300):
    return jax.device_get(jax.jit(jax.vmap(BUILDERS[name]))(keys(count, seed=5)))


@pytest.mark.parametrize("name", BUILDERS)
def test_shape(name):
    """Used nodes first; no repeats among siblings drawn without them; the law of each is its parent's."""
    draft = drafts(name)
    assert draft.proposal == ("sampled" if name in MANY else "without_replacement")
    single = jax.jit(BUILDERS[name])(keys(300, seed=5)[3])
    kit.same(single.tree, kit.row(draft, 3).tree)
    full = 0
    for i in range(300):
        d = kit.row(draft, i)
        if name not in MANY:
            kit.paths(d)
        used = int(d.tree.valid.sum())
        assert d.tree.valid[:used].all() and d.tree.parent[0] == -1 and not d.tree.tokens[used:].any()
        assert (d.tree.parent[1:used] < np.arange(1, used)).all()
        above = d.tree.parent[1:used]
        np.testing.assert_allclose(d.law.log_probs[1:used], LAWS[d.tree.tokens[above]], rtol=1e-6)
        assert (d.law.log_probs[np.arange(1, used), d.tree.tokens[1:used]] > -np.inf).all()
        assert (name in MANY or (d.confidence[1:used] > 0).all()) and not d.confidence[used:].any()
        full += used == len(d.tree.valid)
    assert full > 10


@pytest.mark.parametrize("name", BUILDERS)
def test_confidence_is_said_before_the_token_is_known(name):
    """The likeliest chance that elder siblings left; a node's own token plays no part."""
    for i in range(50):
        d = kit.row(drafts(name), i)
        for node in range(1, int(d.tree.valid.sum())):
            elder = [j for j in range(1, node) if d.tree.parent[j] == d.tree.parent[node]]
            left = GUESS[d.tree.tokens[d.tree.parent[node]]].copy()
            left[d.tree.tokens[elder]] = 0
            assert d.confidence[node] == pytest.approx(left.max(), rel=1e-4)


def test_a_node_is_not_dropped_by_its_own_token():
    """DySpec's tree without the unlikely draws: the builder's promise broken, and the gate sees it."""

    def biased(key):
        draft = BUILDERS["DySpec"](key)
        q = jnp.take_along_axis(draft.law.log_probs, draft.tree.tokens[:, None], axis=1)[:, 0]
        tree = draft.tree.replace(valid=draft.tree.valid & ((q > np.log(0.3)) | (jnp.arange(7) == 0)))
        return draft.replace(tree=tree)

    assert not fit(emitted(biased)[0], target_law()).ok


def test_siblings_must_stand_in_the_order_they_were_drawn_in():
    def turned(key):
        drawn = siblings(key, jnp.asarray(LAWS)[0], 2, POSITION, False, 1)
        draft = branching(key, ROOT, after, (2,), POSITION, False)
        return draft.replace(tree=draft.tree.replace(tokens=draft.tree.tokens.at[1:].set(jnp.sort(drawn.tokens))))

    assert not fit(emitted(turned)[0], target_law()).ok


def order_law(q, k):
    """The chance of every ordered draw of k tokens without repeats."""
    found = {}
    for drawn in itertools.permutations(np.flatnonzero(q), k):
        chance, left = 1.0, 1.0
        for token in drawn:
            chance, left = chance * q[token] / left, left - q[token]
        found[drawn] = chance
    return found


@pytest.mark.parametrize("replacement", [True, False])
def test_siblings(replacement):
    q = GUESS[0]
    draw = lambda key: siblings(key, jnp.log(jnp.asarray(q)), 3, POSITION, replacement).tokens  # noqa: E731
    got = np.asarray(jax.jit(jax.vmap(draw))(keys(N)))
    alone = {drawn: np.prod(q[list(drawn)]) for drawn in itertools.product(range(V), repeat=3)}
    assert fit(got, alone if replacement else order_law(q, 3)).ok


def test_a_support_that_is_too_small():
    log_q = jnp.log(jnp.array([0.0, 0.7, 0.0, 0.3]))
    key = noise.request_key(0)
    draw = jax.jit(lambda q, replacement: siblings(key, q, 6, POSITION, replacement), static_argnums=1)
    drawn = draw(log_q, False)
    assert drawn.valid.tolist() == [True, True] + [False] * 4 and set(drawn.tokens[:2].tolist()) == {1, 3}
    assert draw(log_q, True).valid.all()
    none = draw(jnp.full(V, -jnp.inf), True)
    assert not none.valid.any() and not none.tokens.any()
    grow = jax.jit(lambda laws: dynamic(key, ROOT, by_depth(laws), 9, POSITION).tree)
    ends = jnp.where(jnp.arange(9)[:, None] < 2, log_q, -jnp.inf)
    assert grow(ends).valid.tolist() == [True] * 7 + [False] * 2
    lone = grow(jnp.broadcast_to(jnp.log(jnp.array([1.0, 0, 0, 0])), (9, V)))
    assert lone.parent.tolist() == list(range(-1, 8))


def test_stochastic_beams_are_draws_of_whole_paths_without_replacement():
    """Two beams of two tokens, against the chances of ordered pairs of distinct paths."""
    q = GUESS[0][:, None] * GUESS
    pairs = list(np.ndindex(V, V))
    found = order_law(q.ravel(), 2)
    law = {(*pairs[a], *pairs[b]): chance for (a, b), chance in found.items()}

    def one(key):
        log_q = jnp.asarray(LAWS)
        top = beam_step(key, log_q[:1], jnp.zeros(1), jnp.zeros(1), V, POSITION, jnp.zeros(1, jnp.int32))
        nodes = 1 + jnp.arange(V)
        end = beam_step(key, log_q[top.tokens], top.log_prob, top.perturbed, 2, POSITION + 1, nodes)
        return jnp.stack([top.tokens[end.parent], end.tokens], axis=1).reshape(-1)

    assert fit(np.asarray(jax.jit(jax.vmap(one))(keys(N))), law).ok


def test_beams_carry_their_paths_log_probs():
    def one(key):
        log_q = jnp.asarray(LAWS)
        top = beam_step(key, log_q[:1], jnp.zeros(1), jnp.zeros(1), 3, POSITION, jnp.zeros(1, jnp.int32))
        return top, beam_step(key, log_q[top.tokens], top.log_prob, top.perturbed, 3, POSITION, 1 + jnp.arange(3))

    top, end = jax.device_get(jax.jit(jax.vmap(one))(keys(200)))
    np.testing.assert_allclose(top.log_prob, LAWS[0][top.tokens], rtol=1e-5)
    above = np.take_along_axis(top.tokens, end.parent, axis=1)
    np.testing.assert_allclose(end.log_prob, LAWS[0][above] + LAWS[above, end.tokens], rtol=1e-5)
    assert (np.diff(end.perturbed, axis=1) <= 0).all()
    given = np.take_along_axis(top.perturbed, end.parent, axis=1)
    assert (end.perturbed <= given + 1e-5).all() and np.isclose(end.perturbed[:, 0], top.perturbed.max(1)).all()


def test_dynamic_grows_where_the_next_draw_is_likeliest_to_be_needed():
    """Replayed in plain Python from the tokens it drew."""
    for i in range(50):
        d = jax.device_get(kit.row(drafts("DySpec"), i))
        place, gone, depth = {0: 1.0}, {0: 0.0}, {0: 0}
        values = []
        for node in range(1, int(d.tree.valid.sum())):
            at = int(d.tree.parent[node])
            assert place[at] == pytest.approx(max(place.values()), rel=1e-4)
            values.append(place[at])
            q = GUESS[d.tree.tokens[at], d.tree.tokens[node]]
            share = q / (1 - gone[at])
            depth[node] = depth[at] + 1
            place[node] = place[at] * share if depth[node] < 2 else 0.0
            place[at], gone[at], gone[node] = place[at] * (1 - share), gone[at] + q, 0.0
        assert kit.descends(values) and max(depth.values()) <= 2


def test_per_depth_marginals_are_a_source():
    laws = jnp.log(jnp.array([[1.0, 0, 0, 0], [0, 0, 1.0, 0]]))
    draft = jax.jit(lambda key: branching(key, ROOT, by_depth(laws), (1, 2), POSITION, True))(noise.request_key(3))
    assert draft.tree.tokens.tolist() == [0, 0, 2, 2] and draft.tree.parent.tolist() == [-1, 0, 1, 1]
    assert delayed(2, 3, 2) == (1, 1, 3, 1)


def test_draws_have_noise_of_their_own():
    key = noise.request_key(9)
    drawn = [draw_key(key, i).tolist() for i in range(50)] + [
        noise.stream(key, s).tolist() for s in ("draft", "accept")
    ]
    assert len({*map(tuple, drawn), tuple(key.tolist())}) == 53


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda key: branching(key, ROOT, after, (), POSITION, True), "widths: got"),
        (lambda key: branching(key, ROOT, after, (2, 0), POSITION, True), "widths: got"),
        (lambda key: stochastic_beam(key, ROOT, after, 0, 2, POSITION), "width: got 0"),
        (lambda key: stochastic_beam(key, ROOT, after, 2, 0, POSITION), "width: got 2 down to depth 0"),
        (lambda key: dynamic(key, ROOT, after, 0, POSITION), "nodes: got 0"),
    ],
)
def test_sizes_that_cannot_be_are_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build(noise.request_key(0))
