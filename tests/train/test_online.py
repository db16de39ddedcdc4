"""Learning from serving: the buffer, a step from it, and parameters swapped under a running engine."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.drafters.small_model import SmallModel
from spec_jax.engine.decoder import Decoder
from spec_jax.engine.engine import Engine
from spec_jax.models.toy import AuditTarget, TableTarget, audit_table
from spec_jax.train import evaluate, online
from spec_jax.train.loader import Texts
from spec_jax.train.objective import Objective
from spec_jax.train.step import adamw, init, make_step
from spec_jax.train.task import Task
from tests.train import toy

V = 8


def test_the_buffer_keeps_the_newest_rows():
    buffer = online.empty({"x": jnp.zeros((1, 2)), "n": jnp.zeros(1, jnp.int32)}, 4)
    push = jax.jit(online.push)
    sent = []
    for start, keep in ((0, [1, 0, 1]), (3, [1, 1, 1]), (6, [0, 0, 0]), (9, [0, 1, 1])):
        n = jnp.arange(start, start + 3)
        buffer = push(buffer, {"x": jnp.stack([n, -n], 1).astype(float), "n": n}, jnp.array(keep, bool))
        sent += [i for i, k in zip(n.tolist(), keep, strict=True) if k]
        there = set(buffer.rows["n"][: int(buffer.count)].tolist())
        assert there == set(sent[-4:]) and buffer.pushed == len(sent)
    np.testing.assert_array_equal(buffer.rows["x"][:, 1], -buffer.rows["n"])
    many = online.push(buffer, {"x": jnp.zeros((9, 2)), "n": jnp.arange(20, 29)}, jnp.ones(9, bool))
    assert set(many.rows["n"].tolist()) == {25, 26, 27, 28}
    with pytest.raises(ValueError, match="capacity: got 0"):
        online.empty({"x": jnp.zeros((1, 2))}, 0)


def test_only_rows_that_are_there_are_drawn():
    buffer = online.empty(jnp.zeros(1, jnp.int32), 5)
    assert not online.draw(buffer, jax.random.key(0), 3)[1].any()
    buffer = online.push(buffer, jnp.array([7, 8]), jnp.ones(2, bool))
    rows, real = online.draw(buffer, jax.random.key(0), 50)
    assert real.all() and set(rows.tolist()) == {7, 8}


def test_a_step_learns_from_what_was_served():
    """Requests of the toy target, their features, and steps of a drafter on them: one compiled program each."""
    weights, target = toy.params(), toy.target()
    decoder = Decoder(Engine(toy.target(()), max_len=20, prefill_chunk=8), weights, batch=2)
    results = decoder.generate([(1, 2), (3,), (4, 5, 6)], 14)
    texts = online.served(results, 12)
    assert (
        texts.length.tolist() == [12, 12, 12]
        and texts.tokens[0].tolist() == [*results[0].prompt, *results[0].tokens][-12:]
    )
    like = dataclasses.replace(texts, features=jnp.zeros((3, 12, 2, 16), jnp.bfloat16))
    buffer = jax.jit(lambda b, t: online.remember(b, target, weights, t))(online.empty(like, 8), texts)
    assert buffer.pushed == 3 and buffer.rows.features.dtype == jnp.bfloat16
    forward = toy.Linear()
    task = Task(forward, target, Objective((("forward_kl", 1.0),)), anchors=4, steps=100)
    optimizer = adamw(forward.init(), weight_decay=0.0)
    step, state = make_step(task.loss, optimizer), init(forward.init(), optimizer)
    first = jax.tree.map(jnp.copy, state.params)
    losses = []
    for i in range(30):
        state, metrics = online.update(step, state, buffer, jax.random.key(i), 0.05, 4, weights)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < 0.5 * losses[0] and step._cache_size() == 1  # pyright: ignore[reportFunctionMemberAccess]
    nothing = online.empty(like, 8)
    idle, metrics = online.update(step, init(first, optimizer), nothing, jax.random.key(0), 0.05, 4, weights)
    assert metrics["loss"] == 0 and metrics["gradient"] == 0
    assert step._cache_size() == 1  # pyright: ignore[reportFunctionMemberAccess]


def decoder_of(table):
    drafter = SmallModel(TableTarget(V), 3, block=8)
    return Decoder(Engine(AuditTarget(V), max_len=40, drafter=drafter, prefill_chunk=8), audit_table(V), table, batch=2)


def test_swapped_parameters_compile_nothing_and_change_no_text():
    rng = np.random.default_rng(0)
    old, new = (jnp.asarray(rng.normal(size=(V, V)), jnp.float32) for _ in range(2))
    decoder = decoder_of(old)
    prompts = [(1, 2, 3), (4, 5), (6,)]
    expected = [r.tokens for r in decoder.generate(prompts, 20)]
    programs = decoder.programs
    ids = [decoder.submit(p, 20)[0] for p in prompts]
    done = {}
    for i in range(100):
        if not decoder.busy:
            break
        done |= {u.id: u.result for u in decoder.step(1) if u.result is not None}
        kept = (new, old)[i % 2]
        evaluate.swap(decoder, kept)  # in the middle of the requests
    assert [done[i].tokens for i in ids] == expected and decoder.programs == programs
    evaluate.swap(decoder, new)
    np.testing.assert_array_equal(decoder.params.drafter, new)
    assert decoder.params.drafter.unsafe_buffer_pointer() != new.unsafe_buffer_pointer()  # a step may use up `new`


def test_other_parameters_are_refused():
    decoder = decoder_of(jnp.zeros((V, V)))
    for wrong in (jnp.zeros((V, V + 1)), jnp.zeros((V, V), jnp.int32), {"table": jnp.zeros((V, V))}):
        with pytest.raises(ValueError, match="drafter_params: got other arrays"):
            evaluate.swap(decoder, wrong)


def test_acceptance_is_counted_over_all_results():
    decoder = decoder_of(jnp.zeros((V, V)))
    results = decoder.generate([(1, 2, 3), (4, 5), (6,)], 20)
    found = evaluate.acceptance(results)
    rounds = sum(r.counters["rounds"] for r in results)
    assert found["acceptance_length"] == pytest.approx(60 / rounds)
    reached = np.sum([r.counters["depth_reached"] for r in results], 0)
    accepted = np.sum([r.counters["depth_accepted"] for r in results], 0)
    assert found["accepted_1"] == pytest.approx(accepted[0] / reached[0])
    assert set(found) == {"acceptance_length", "accepted_1", "accepted_2", "accepted_3"}


def test_feedback_is_its_formula():
    rng = np.random.default_rng(0)
    z = rng.normal(size=(3, 4, V)).astype(np.float32)
    q = np.exp(z) / np.exp(z).sum(-1, keepdims=True)
    committed, accepted = rng.integers(0, V, (3, 4)), np.array([0, 2, 4])
    drafted = (committed + 1) % V
    committed[1, 1] = -1
    nats, judged = 0.0, 0
    for b in range(3):
        for k in range(min(accepted[b] + 1, 4)):
            if committed[b, k] < 0:
                continue
            judged += 1
            nats -= np.log(q[b, k, committed[b, k]])
            if k == accepted[b]:
                nats -= 0.5 * np.log(1 - q[b, k, drafted[b, k]])
    given = [jnp.asarray(x) for x in (z, committed, drafted, accepted)]
    np.testing.assert_allclose(online.feedback(*given, penalty=0.5), nats / judged, rtol=1e-5)
    sure = jnp.where(jnp.arange(V) == given[2][..., None], 1e4, 0.0)
    value, gradient = jax.value_and_grad(online.feedback)(sure, *given[1:])
    assert np.isfinite(value) and np.isfinite(gradient).all()


def test_served_texts_are_cut_in_front():
    decoder = decoder_of(jnp.zeros((V, V)))
    results = decoder.generate([(1, 2, 3)], 5)
    whole, cut = online.served(results, 10), online.served(results, 6)
    assert isinstance(whole, Texts) and whole.length.tolist() == [8] and cut.length.tolist() == [6]
    assert whole.mask[0].tolist() == [False] * 3 + [True] * 5 + [False] * 2
    np.testing.assert_array_equal(cut.tokens[0], whole.tokens[0, 2:8])
