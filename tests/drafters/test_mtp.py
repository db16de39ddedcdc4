"""The MTP head as drafter of a small hybrid: chains and trees, one batch of ragged rows and settings per engine."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.drafters import mtp, mtp_files
from spec_jax.drafters.load import load_drafter
from spec_jax.drafters.none import NoDrafter
from spec_jax.engine import rows
from spec_jax.engine.engine import Engine, EngineParams
from spec_jax.engine.requests import request, stack
from spec_jax.engine.round import context_of
from spec_jax.models.delta_mixer import DeltaState
from spec_jax.models.load import LoadedTarget
from spec_jax.models.qwen import Qwen
from spec_jax.models.toy import AuditTarget
from spec_jax.sampling.constraint import free
from spec_jax.sampling.settings import Sampling
from spec_jax.topology.branching import Branching
from spec_jax.topology.coupling import Learner
from spec_jax.topology.growth import Growth
from spec_jax.tree import Tree
from tests.drafters.hybrid import V, agreeing, fair, hybrid
from tests.faults import kit

PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11, 12, 13, 1, 2]]
SETTINGS = {
    "greedy": Sampling(),
    "sampled": Sampling(temperature=0.9, top_p=0.9),
    "penalties": Sampling(temperature=1.0, presence_penalty=0.7, repetition_penalty=1.3, banned_tokens=(2,)),
}
WINDOW = mtp.Window(5, sinks=2)
TREE = {"nodes": 8, "depth": 3, "width": 3, "children": 3}
GROWTHS = {
    "chain": (mtp.chain(3), None),
    "coupled tree": (Growth(**TREE, ranking="coupled"), None),
    "windowed tree": (Growth(**TREE), WINDOW),
}
BUDGET, MAX_LEN = 30, 48
ROWS = [(p, s) for s in SETTINGS for p in PROMPTS]


def engine(target, drafter=None):
    sizes = {"max_eos": 2, "max_stops": 2, "max_bias": 2, "prefill_chunk": 8}
    return Engine(target, MAX_LEN, drafter=drafter or NoDrafter(), **sizes)


def served(make, growth=None, window=None, learner=None, max_rounds=kit.ALL):
    target, params = make()
    target = mtp.tapped(target)
    e = engine(target, None if growth is None else mtp.drafter(target, growth, window, learner))
    p = EngineParams(params, mtp.params(params), free(V), jnp.ones(1))
    requests = stack([request(e, prompt, BUDGET, 3, SETTINGS[s]) for prompt, s in ROWS])
    return e, p, kit.run(e, p, requests, max_rounds)


plain = functools.cache(lambda make: served(make)[2])
begin = kit.jit(rows.init, static_argnums=0)


@functools.cache
def drafted(name, max_rounds=kit.ALL):
    return served(fair, *GROWTHS[name], max_rounds=max_rounds)


@pytest.mark.parametrize("name", GROWTHS)
def test_text_is_plain_decodings(name):
    state = drafted(name)[2]
    for row in range(len(ROWS)):
        assert kit.output(state, row) == kit.output(plain(fair), row)
    accepted, c = state.rows.counters.accepted, state.rows.counters
    assert (accepted > 0).all() and (accepted < c.drafted).all() and len(set(accepted.tolist())) > 2
    assert len(set(state.rows.tokens[3:9, 12:24].sum(1).tolist())) > 2


@pytest.mark.parametrize("rounds", (3, kit.ALL))
@pytest.mark.parametrize("name", GROWTHS)
def test_state_is_a_fresh_runs(name, rounds):
    """Target and head: recurrent state, convolution inputs, keys, values and, without a window, the last output."""
    e, p, state = drafted(name, rounds)
    given = {f: jax.tree.map(jnp.asarray, getattr(state.rows, f)) for f in rows.Requests.__dataclass_fields__}
    fresh = jax.device_get(begin(e, p, rows.Requests(**given)))
    head, want = state.drafter.head, fresh.drafter.head
    assert (head.length == state.rows.length - 1).all() and (want.length == head.length).all()
    if name != "windowed tree":  # which pairs its output saw depends on how many were read together
        np.testing.assert_allclose(state.drafter.context, fresh.drafter.context, atol=1e-5)
    slots = np.arange(head.rows.k.shape[2])
    live = (slots < head.length[:, None])[:, None, :, None]
    for got, right in ((head.rows.k, want.rows.k), (head.rows.v, want.rows.v)):
        np.testing.assert_allclose(np.where(live, got, 0), np.where(live, right, 0), atol=1e-5)
    assert slots.size == (7 if name == "windowed tree" else MAX_LEN)
    delta, attention = kit.settled(e.target, state.target).layers
    delta_fresh, attention_fresh = kit.settled(e.target, fresh.target).layers
    np.testing.assert_allclose(delta.recurrent, delta_fresh.recurrent, atol=1e-5)
    np.testing.assert_allclose(delta.conv, delta_fresh.conv, atol=1e-5)
    live = (np.arange(attention.k.shape[2]) < state.target.length[:, None])[:, None, :, None]
    np.testing.assert_allclose(np.where(live, attention.k, 0), np.where(live, attention_fresh.k, 0), atol=1e-5)


def test_a_head_from_a_directory_writes_the_same_text_in_the_same_rounds(tmp_path):
    """The target has another head, which drafts otherwise; the engine is the one that the target's own had."""
    target, params = fair()
    e, p, want = drafted("chain")
    mtp_files.save(tmp_path, target.config, params, "toy")
    other = dataclasses.replace(params, mtp=dataclasses.replace(params.mtp, norm=-params.mtp.norm))
    trained = load_drafter(tmp_path, LoadedTarget(target, other, None, (), MAX_LEN), mtp.chain(3))
    assert engine(trained.target, trained.drafter) == e
    requests = stack([request(e, prompt, BUDGET, 3, SETTINGS[s]) for prompt, s in ROWS])
    state = kit.run(e, dataclasses.replace(p, drafter=trained.params), requests, kit.ALL)
    jax.tree.map(np.testing.assert_array_equal, state.rows, want.rows)
    state = kit.run(e, dataclasses.replace(p, drafter=mtp.params(other)), requests, kit.ALL)
    assert all(kit.output(state, row) == kit.output(want, row) for row in range(len(ROWS)))
    assert (state.rows.counters.accepted != want.rows.counters.accepted).any()


def test_the_state_remembers_dozens_of_tokens():
    """Texts that differ in their first four tokens alone, 40 tokens on: what is committed shows for long."""
    target, params = fair()
    rng = np.random.default_rng(0)
    tokens = jnp.asarray(rng.integers(0, V, (1, 44)), jnp.int32).repeat(2, 0).at[1, :4].add(V // 2) % V
    state = jax.jit(target.prefill)(params, target.init_state(params, 2, MAX_LEN), tokens, jnp.asarray([44, 44]))[1]
    one, other = state.layers[0].recurrent
    assert np.linalg.norm(one - other) > 0.01 * np.linalg.norm(one)


@dataclasses.dataclass(frozen=True)
class OneTooMany(Qwen):
    """A commit that folds a node more than was accepted, where there is one, into the recurrent state."""

    def commit(self, state, staged, path, length):
        right = super().commit(state, staged, path, length)
        more = super().commit(state, staged, path, jnp.minimum(length + 1, path.shape[1]))
        mixed = [
            dataclasses.replace(b, conv=a.conv) if isinstance(a, DeltaState) else a
            for a, b in zip(right.layers, more.layers, strict=True)
        ]
        return dataclasses.replace(right, layers=tuple(mixed))


def test_a_node_too_many_in_the_recurrent_state_shows_in_the_text():
    def faulty():
        target, params = fair()
        return OneTooMany(target.config), params

    state = served(faulty, *GROWTHS["chain"])[2]
    wrong = [kit.output(state, row) != kit.output(plain(fair), row) for row in range(len(ROWS))]
    assert sum(wrong) >= 3, wrong


def test_a_head_that_agrees_is_always_accepted():
    """Rows of two tokens and more: 30 tokens are 8 rounds of a chain of 3; one of one token is not drafted for once."""
    growth = dataclasses.replace(mtp.chain(3), ranking="coupled")
    state = served(agreeing, growth, learner=Learner(1.0, 1.0, pooling=1e8))[2]
    c = state.rows.counters
    for row, (prompt, _) in enumerate(ROWS):
        assert kit.output(state, row) == kit.output(plain(agreeing), row)
        assert c.accepted[row] == c.drafted[row] and c.rounds[row] == (9 if len(prompt) == 1 else 8)


@pytest.mark.parametrize("sinks", (0, 2))
def test_a_windows_ring_holds_the_first_pairs_and_the_last(sinks):
    target, params = hybrid()
    target = mtp.tapped(target)
    whole, wide, narrow = (mtp.MtpHead(target, w) for w in (None, mtp.Window(40, sinks), mtp.Window(5, sinks)))
    rng = np.random.default_rng(0)
    states = {head: head.init(params, 2, MAX_LEN)[0] for head in (whole, wide, narrow)}
    assert states[narrow].rows.k.shape[2] == 5 + sinks and states[wide].rows.k.shape[2] == 40 + sinks
    score, commit = ({head: kit.jit(getattr(head, name)) for head in states} for name in ("score", "commit"))
    for lengths in ([3, 1], [7, 0], [2, 8], [8, 8], [1, 5]):  # blocks shorter and longer than the window
        context = jnp.asarray(rng.normal(0, 1, (2, 8, 16)), jnp.float32)
        tokens = jnp.asarray(rng.integers(0, V, (2, 8)), jnp.int32)
        parent = jnp.broadcast_to(jnp.arange(-1, 7), (2, 8))
        tree, n = Tree(tokens, parent, jnp.ones((2, 8), bool)), jnp.asarray(lengths)
        outs = {h: score[h](params, s, context, tree) for h, s in states.items()}
        np.testing.assert_array_equal(outs[whole][0], outs[wide][0])
        states = {h: commit[h](s, outs[h][1], n) for h, s in states.items()}
        for row in range(2):
            length, ring = int(states[whole].length[row]), states[narrow].rows.k[row, 0]
            kept = sorted({*range(min(sinks, length)), *range(max(0, length - 5), length)})
            want = states[whole].rows.k[row, 0, jnp.asarray(kept, int)]
            order = [(x if x < 5 + sinks else sinks + (x - sinks) % 5) for x in kept]
            np.testing.assert_array_equal(ring[jnp.asarray(order, int)], want)
    shown, seen = (score[h](params, states[h], context, tree)[0] for h in (narrow, whole))
    assert np.abs(shown - seen).max() > 1e-3


def test_parameters_are_the_targets_own_arrays():
    _, params = hybrid()
    own = mtp.params(params)
    assert own.layers == () and own.embedding is params.embedding and own.mtp is params.mtp
    assert {id(x) for x in jax.tree.leaves(own)} < {id(x) for x in jax.tree.leaves(params)}


def test_what_does_not_fit_is_refused():
    target, params = hybrid()
    for bad in (AuditTarget(8), dataclasses.replace(target, config=dataclasses.replace(target.config, mtp=False))):
        with pytest.raises(ValueError, match="takes a Qwen model whose config has an MTP head"):
            mtp.drafter(bad, mtp.chain(2))
    with pytest.raises(ValueError, match=r"target: got taps \(\), takes taps that hold 2"):
        mtp.MtpHead(target)
    with pytest.raises(ValueError, match="target: got parameters without an MTP head"):
        mtp.params(dataclasses.replace(params, mtp=None))
    for bad, message in (({"size": 0}, "size: got 0"), ({"size": 4, "sinks": -1}, "sinks: got -1")):
        with pytest.raises(ValueError, match=message):
            mtp.Window(**bad)
    with pytest.raises(ValueError, match="k: got 0"):
        mtp.chain(0)
    e = engine(target, mtp.drafter(target, mtp.chain(2)))
    p = EngineParams(params, mtp.params(params), free(V), jnp.ones(1))
    with pytest.raises(ValueError, match="target: got one without taps"):
        jax.eval_shape(lambda: rows.init(e, p, request(e, [1, 2, 3], 4)))


@pytest.mark.parametrize("widths", [(2, 1), (1, 1)])
def test_drawn_drafts_carry_their_laws(widths):
    target, params = fair()
    drafter = mtp.drafter(target, Branching(widths, replacement=widths == (1, 1)))
    assert drafter.nodes == 1 + widths[0] * 2 and drafter.depth == 2 and drafter.vocab_size == V
    e = engine(mtp.tapped(target), drafter)
    p = EngineParams(params, mtp.params(params), free(V), jnp.ones(1))

    def draft(r):
        state = rows.init(e, p, r)
        return drafter.propose(p.drafter, state.drafter, context_of(state.rows, p.constraint))[0]

    requests = stack([request(e, prompt, BUDGET, 3, SETTINGS["sampled"]) for prompt in PROMPTS])
    got = kit.jit(draft)(requests)
    assert got.proposal == ("sampled" if widths == (1, 1) else "without_replacement")
    assert (
        got.tree.valid[0].all()
        and got.tree.valid[2].all()
        and got.tree.valid[1].tolist() == [True] + [False] * (drafter.nodes - 1)
    )
    law = jnp.exp(got.law.log_probs[:, 1:])
    np.testing.assert_allclose(law.sum(-1), 1, atol=1e-5)
    chosen = jnp.take_along_axis(law, got.tree.tokens[:, 1:, None], axis=2)[..., 0]
    assert (chosen[jnp.array([0, 2])] > 0).all()
