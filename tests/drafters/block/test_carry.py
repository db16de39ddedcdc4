"""What a rejected draft leaves: by hand, in the engine after every verdict, and as training sees it."""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.drafters.block import carry, native, network, weights
from spec_jax.drafters.block.config import SLIDING
from spec_jax.drafters.block.drafter import BlockDrafter, chain
from spec_jax.drafters.block.heads.head import Plain
from spec_jax.drafters.block.shape import BestFirst
from spec_jax.drafters.load import load_drafter
from spec_jax.engine.engine import Engine
from spec_jax.engine.round import context_of
from spec_jax.train import block, redraft
from spec_jax.train.task import Asked
from tests.drafters.block import kit

LEN, GREEDY = 26, len(kit.PROMPTS)
CONFIGS = {
    "carryover": kit.config(rejected="carryover"),
    "retrace": kit.config(rejected="retrace"),
    "carryover, shifted": kit.config(rejected="carryover", slots="shifted"),
}
TREE = BestFirst(nodes=8, depth=4, children=4, ranking="coupled")


def engine_of(drafter):
    return Engine(drafter.tapped(kit.llama()[0]), LEN, drafter=drafter, prefill_chunk=8)


@functools.cache
def plain():
    return np.asarray(kit.decoded(Engine(kit.llama()[0], LEN, prefill_chunk=8)).tokens)


def test_what_is_left_by_hand():
    """A tree of 7 nodes with depths 0 1 1 2 2 3 3, of which the path of 2 was accepted; and a chain accepted whole."""
    depth = jnp.array([[0, 1, 1, 2, 2, 3, 3], [0, 1, 2, 3, 0, 0, 0], [0, 1, 2, 3, 0, 0, 0]])
    there = jnp.array([[1, 1, 1, 0, 1, 1, 1], [1, 1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 0, 0, 0]], bool)
    features = jnp.asarray(np.random.default_rng(0).normal(0, 1, (3, 7, 2, 5)), jnp.float32)
    hidden = jnp.asarray(np.random.default_rng(1).normal(0, 1, (3, 4, 5)), jnp.float32)
    left = carry.carried(4, features, depth, there, jnp.array([2, 4, 0]), hidden)
    np.testing.assert_array_equal(left.valid, [[True, True, False, False], [False] * 4, [False] * 4])
    np.testing.assert_array_equal(left.features[0, :2], features[0, [4, 5]])
    np.testing.assert_array_equal(left.hidden[0, :2], hidden[0, 2:])
    assert not np.asarray(left.features[1:]).any() and not np.asarray(left.hidden[1:]).any()
    short = carry.carried(4, features, depth, there, jnp.array([2, 4, 0]), hidden[:, :3])
    np.testing.assert_array_equal(short.valid[0], [True, False, False, False])


@pytest.mark.parametrize(("name", "window"), [("carryover", None), ("retrace", None), ("carryover", 4)])
def test_a_block_with_nothing_left_is_the_plain_networks(name, window):
    types = (SLIDING, "full_attention") if window else ("full_attention",) * 2
    c = dataclasses.replace(CONFIGS[name], layer_types=types, sliding_window=window, causal=(window is not None, False))
    own = kit.params(c)
    bare = dataclasses.replace(own.network, marker=None, retrace=None)
    b, t, s = 2, 7, c.block_size
    k, v = network.context_rows(c, own.network, kit.features(b, t), jnp.broadcast_to(jnp.arange(t), (b, t)), 20)
    room = lambda rows: tuple(jnp.zeros((b, 2, 20, 4)).at[:, :, :t].set(x.swapaxes(1, 2)) for x in rows)  # noqa: E731
    context = network.Context(room(k), room(v), jnp.array([7, 4]), 20)
    x = network.slot_inputs(c, own.ends, jnp.array([3, 4]))
    left = carry.nothing(c.rejected, b, s, 2, kit.H, jnp.float32)
    run = kit.jit(lambda weights, kept: network.draft_rows(c, weights, x, context, kept))
    want = kit.jit(lambda: network.draft_rows(dataclasses.replace(c, rejected=None), bare, x, context))()
    np.testing.assert_allclose(run(own.network, left), want, atol=1e-5)
    fuller = dataclasses.replace(
        left,
        features=kit.features(b, s),
        hidden=None if left.hidden is None else kit.features(b, s, 1)[:, :, 0],
        valid=jnp.arange(s) < jnp.array([[2], [0]]),
    )
    changed = run(own.network, fuller)
    assert np.abs(np.asarray(changed - want))[0].max() > 1e-2
    np.testing.assert_allclose(changed[1], want[1], atol=1e-5)


@functools.cache
def fresh(name):
    """Features, keys and values of whole texts, as a jitted function of tokens and lengths."""
    c, params = CONFIGS[name], kit.llama()[1]
    own, target = kit.params(c), dataclasses.replace(kit.llama()[0], taps=c.taps)

    def run(tokens, length):
        features, _ = target.prefill(params, target.init_state(params, tokens.shape[0], LEN + 8), tokens, length)
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        return features, network.context_rows(c, own.network, features, positions, LEN + 8)

    return kit.jit(run)


@pytest.mark.parametrize(("name", "shape"), [("carryover", "tree"), ("retrace", "chain")])
def test_text_is_plain_and_committed_context_never_holds_what_was_rejected(name, shape):
    """After every verdict: keys and values are a fresh run's, and what is left are the rejected nodes' features."""
    c = CONFIGS[name]
    own = kit.params(c)
    engine = engine_of(BlockDrafter(c, TREE if shape == "tree" else chain(c), block=8))
    params, state = kit.start(engine, own)
    assert not np.asarray(state.drafter.carried.valid).any()
    propose = kit.jit(lambda s: engine.drafter.propose(own, s.drafter, context_of(s.rows, params.constraint))[0].tree)
    seen = []
    while state.rows.running.any():
        tree, before = jax.device_get(propose(state)), state.rows
        state = kit.go_on(engine, params, state, 1)
        context, rows, left = state.drafter.context, state.rows, jax.device_get(state.drafter.carried)
        features, (k, v) = fresh(name)(rows.tokens, jnp.maximum(rows.length - 1, 0))
        texts = np.array(rows.tokens)
        want_valid, at = np.zeros(left.valid.shape, bool), []
        for row in np.flatnonzero(np.asarray(rows.running)):
            n, old = int(rows.length[row]) - 1, int(before.length[row]) - 1
            for got, want in ((context.k, k), (context.v, v)):
                for a, b in zip(got, want, strict=True):
                    np.testing.assert_allclose(a[row, :, :n], b[row, :n].swapaxes(0, 1), atol=1e-4)
            paths = paths_of({f: getattr(tree, f)[row] for f in ("tokens", "parent", "valid")})
            room = LEN - old - 1
            for slot in range(c.block_size):
                there = [p for p in paths if len(p) == n - old + slot and len(p) < room]
                if there:
                    want_valid[row, slot] = True
                    at.append((row, slot, old, there[0]))
        np.testing.assert_array_equal(left.valid[np.asarray(rows.running)], want_valid[np.asarray(rows.running)])
        row, slot, old, path = at[len(seen) % len(at)] if at else (0, 0, 0, ())
        if at:
            texts[row, old + 1 : old + 1 + len(path)] = path
            again, _ = fresh(name)(jnp.asarray(texts), rows.length + c.block_size)
            np.testing.assert_allclose(left.features[row, slot], again[row, old + len(path)], atol=1e-4)
            seen.append(slot)
    assert len(set(seen)) > 1
    np.testing.assert_array_equal(state.rows.tokens, plain())


def paths_of(tree):
    """The token path of every valid node but the root, in the draft's order."""
    paths = {0: ()}
    for i in range(1, len(tree["tokens"])):
        if tree["valid"][i]:
            paths[i] = (*paths[int(tree["parent"][i])], int(tree["tokens"][i]))
    return [p for i, p in paths.items() if i]


@pytest.mark.parametrize("name", ("retrace", "carryover, shifted"))
def test_serving_sees_what_training_sees(name):
    """The second round's logits are those of the training forward behind where the first round's draft ended."""
    c = CONFIGS[name]
    own, forward = kit.params(c), block.BlockForward(c)
    engine = engine_of(BlockDrafter(c, chain(c), block=8))
    params, state = kit.start(engine, own)
    tokens = kit.go_on(engine, params, state, 2**30).rows.tokens
    anchors = (state.rows.length - 1)[:, None]
    trained = block.Trained(own.network)

    @kit.jit
    def training(tokens):
        target = engine.target
        given = target.init_state(params.target, 9, LEN + 8)
        features, _ = target.prefill(params.target, given, tokens, jnp.full(9, LEN))
        mask = jnp.ones(tokens.shape, bool)
        at = jnp.minimum(anchors[..., None] + 1 + jnp.arange(c.depth), LEN - 1)
        blocks = jax.vmap(lambda x, at: x[at])(tokens, at)
        real = jnp.ones(anchors.shape, bool)
        asked = Asked(tokens, features, anchors, real, blocks, jax.random.key(0), params.target, None)
        said = forward(trained, asked)
        again, counts = redraft.ask(asked, said, real[..., None] & (blocks >= 0), mask, target, c)
        logits, without = (forward(trained, x).logits[:, 0] for x in (again, dataclasses.replace(again, carried=None)))
        return logits, without, again.anchors[:, 0], again.real[:, 0], again.carried.valid, counts[:, 0]

    logits, without, places, real, valid, counts = jax.tree.map(lambda x: np.asarray(x)[:GREEDY], training(tokens))
    run = kit.jit(lambda s: engine.drafter.run(own, s.drafter, context_of(s.rows, params.constraint)).logits)
    state = kit.go_on(engine, params, state, 1)
    assert real.any() and counts[real].any()
    np.testing.assert_array_equal(places[real], np.asarray(state.rows.length)[:GREEDY][real] - 1)
    np.testing.assert_array_equal(valid[real], np.asarray(state.drafter.carried.valid)[:GREEDY][real])
    np.testing.assert_allclose(logits[real], np.asarray(run(state))[:GREEDY][real], rtol=1e-4, atol=1e-3)
    assert np.abs(without - logits)[real].max() > 0.05


@pytest.mark.parametrize("name", ("carryover", "retrace"))
def test_its_weights_are_read_as_they_were_written(name, tmp_path):
    c, model = CONFIGS[name], types.SimpleNamespace(target=kit.llama()[0], params=kit.llama()[1])
    own = kit.params(c)
    native.save_native(tmp_path, c, Plain(), own)
    loaded = load_drafter(tmp_path, model)
    assert loaded.drafter.config == c
    for got, want in zip(jax.tree.leaves(loaded.params.network), jax.tree.leaves(own.network), strict=True):
        np.testing.assert_array_equal(got, want)
    with pytest.raises(ValueError, match=f"a network with rejected='{name}', of which no published format is known"):
        weights.save_published(tmp_path, c, Plain(), own, 3)


def test_a_kind_that_is_none_is_refused():
    with pytest.raises((ValueError, TypeError), match="rejected"):
        kit.config(rejected="both")
