"""Trees grown with a model: the target itself (always right), and another one (sometimes right)."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.audit.law import check_law
from spec_jax.drafters.model_tree import ModelTree
from spec_jax.engine.decoder import Decoder
from spec_jax.engine.engine import Engine, EngineParams
from spec_jax.models import views
from spec_jax.models.config import LlamaConfig
from spec_jax.models.llama import Llama, from_tensors
from spec_jax.models.toy import AuditTarget, audit_table
from spec_jax.sampling.constraint import free
from spec_jax.sampling.settings import Sampling
from spec_jax.topology.branching import Branching
from spec_jax.topology.coupling import Learner
from spec_jax.topology.growth import Growth
from spec_jax.verify.match import match
from spec_jax.verify.rejection import rejection

V = 8
TARGET = AuditTarget(V)
PROMPTS = [[1, 2, 3], [4], [5, 6]]
SETTINGS = {
    "greedy": Sampling(),
    "sampled": Sampling(temperature=0.9, top_p=0.9),
    "penalties": Sampling(temperature=1.0, presence_penalty=0.7, repetition_penalty=1.3, banned_tokens=(2,)),
}
GROWTHS = {
    "coupled": Growth(nodes=8, depth=4, width=3, children=3, ranking="coupled"),
    "point": Growth(nodes=8, depth=4, width=3, children=3),
    "chain": Growth(nodes=4, depth=3, width=1, children=1, ranking="coupled"),
    "one level": Growth(nodes=4, depth=1, width=1, children=3, ranking="coupled"),
}


@functools.cache
def tables():
    big = audit_table(V, seed=1)
    return big, 0.7 * big + audit_table(V, seed=2, scale=0.8)


@functools.cache
def decoder(name, own):
    big, small = tables()
    learner = Learner(1.0, 1.0, pooling=1e8) if own else Learner()
    engine = Engine(TARGET, 48, drafter=ModelTree(TARGET, GROWTHS[name], learner), log_probs=True)
    return Decoder(engine, big, big if own else small, batch=3)


@functools.cache
def plain(name):
    results = Decoder(Engine(TARGET, 48, log_probs=True), tables()[0], batch=3)
    return results.generate(PROMPTS, 30, key=6, sampling=SETTINGS[name])


@pytest.mark.parametrize("name", SETTINGS)
def test_the_target_as_its_own_drafter_is_right_on_its_first_path(name):
    results = decoder("chain", True).generate(PROMPTS, 30, key=6, sampling=SETTINGS[name])
    for result, want in zip(results, plain(name), strict=True):
        assert result.tokens == want.tokens
        assert result.counters["rounds"] == 8 and result.counters["accepted"] == result.counters["drafted"] == 22


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("growth", GROWTHS)
def test_text_is_plain_decodings_while_the_weights_are_fitted(growth, name):
    d = decoder(growth, False)
    for _ in range(2):
        results = d.generate(PROMPTS, 30, key=6, sampling=SETTINGS[name])
        for result, want in zip(results, plain(name), strict=True):
            assert result.tokens == want.tokens
            np.testing.assert_allclose(result.log_probs, want.log_probs, atol=1e-5)
    assert all(0 < r.counters["accepted"] < r.counters["drafted"] for r in results)
    fit = d._state.drafter.fit
    assert (fit is None) == (growth == "point")
    assert fit is None or (np.asarray(fit.h[0]) != 0).any()


@pytest.mark.parametrize("growth", GROWTHS)
def test_its_state_follows_every_verdict(growth):
    d = decoder(growth, False)
    for i, prompt in enumerate(PROMPTS):
        d.submit(prompt, 30 - 7 * i, key=6 + i, sampling=SETTINGS["sampled"])
    ended_on_a_leaf = []
    while d.busy:
        d.step(1)
        rows, state = d._state.rows, d._state.drafter
        for row in np.flatnonzero(np.asarray(rows.running)):
            length = int(rows.length[row]) - 1 - int(state.behind[row])
            assert int(state.model.length[row]) == length
            want = TARGET.entry(rows.tokens[row, :length], jnp.arange(length))
            assert (np.asarray(state.model.slots[row, :length]) == np.asarray(want)).all()
            if state.behind[row]:
                assert state.last[row] == rows.tokens[row, length]
            ended_on_a_leaf.append(int(state.behind[row]))
    assert np.mean(ended_on_a_leaf) < 1 and (any(ended_on_a_leaf) or growth == "point")


BRANCHINGS = {"RSD": Branching((2, 2)), "iid": Branching((2, 1), replacement=True), "chain": Branching((1, 1))}


@functools.cache
def law(name):
    big, small = tables()
    engine = Engine(TARGET, 16, drafter=ModelTree(TARGET, BRANCHINGS[name]), rule=rejection)
    params = EngineParams(big, small, free(V), jnp.ones(1))
    return check_law(engine, params, [1, 2], [0, 3, 4, 5, 7], draws=40_000, batch=1024)


@pytest.mark.parametrize("name", BRANCHINGS)
def test_drawn_trees_keep_the_law(name):
    report = law(name)
    assert report.passed and report.acceptance > 0.2


def test_a_tree_gains_more_tokens_than_a_chain():
    gained = {name: law(name).acceptance * (BRANCHINGS[name].nodes - 1) for name in BRANCHINGS}
    assert gained["RSD"] > gained["iid"] + 0.05 > gained["chain"] + 0.1


@pytest.mark.parametrize("name", BRANCHINGS)
def test_the_state_follows_the_verdicts_on_drawn_trees(name):
    big, small = tables()
    engine = Engine(TARGET, 48, drafter=ModelTree(TARGET, BRANCHINGS[name]), rule=rejection)
    d = Decoder(engine, big, small, batch=2)
    d.submit([1, 2, 3], 30, n=2, sampling=SETTINGS["penalties"])
    while d.busy:
        d.step(1)
        rows, state = d._state.rows, d._state.drafter
        for row in np.flatnonzero(np.asarray(rows.running)):
            length = int(rows.length[row]) - 1 - int(state.behind[row])
            want = TARGET.entry(rows.tokens[row, :length], jnp.arange(length))
            assert int(state.model.length[row]) == length
            assert (np.asarray(state.model.slots[row, :length]) == np.asarray(want)).all()


def test_rows_that_come_and_go_leave_the_text_alone_and_keep_what_was_learned():
    d = decoder("coupled", False)
    alone = [d.generate([p], 12, key=3, sampling=SETTINGS["sampled"])[0].tokens for p in PROMPTS]
    seen = np.asarray(d._state.drafter.fit.h[0, 0, 0])
    ids = [i for p in PROMPTS * 2 for i in d.submit(p, 12, key=3, sampling=SETTINGS["sampled"])]
    done = {u.id: u.result.tokens for u in d.run(2) if u.result}
    assert [done[i] for i in ids] == alone * 2
    assert d._state.drafter.fit.h[0, 0, 0] != seen > 0


def test_a_model_of_another_vocabulary_is_refused():
    with pytest.raises(ValueError, match="drafter: got one for 6"):
        Engine(TARGET, 16, drafter=ModelTree(AuditTarget(6), GROWTHS["point"]))
    engine = Engine(TARGET, 16, drafter=ModelTree(TARGET, GROWTHS["coupled"]), rule=rejection)
    with pytest.raises(ValueError, match="takes a 'sampled'"):
        Decoder(engine, *tables()).generate([[1]], 2)


@pytest.mark.parametrize("growth", ("coupled", "RSD"))
def test_a_views_cache_is_that_of_a_fresh_run_after_every_count_of_accepted_nodes(growth):
    target, params = tiny_llama()
    view, fewer = views.skip(target, params, (1,))
    shape = (
        Growth(nodes=6, depth=2, width=2, children=3, ranking="coupled") if growth == "coupled" else Branching((2, 2))
    )
    rule = match if growth == "coupled" else rejection
    engine = Engine(target, 40, drafter=ModelTree(view, shape), rule=rule, prefill_chunk=8)
    d = Decoder(engine, params, fewer, batch=3)
    for i, prompt in enumerate(PROMPTS):
        d.submit(prompt, 30, key=i, sampling=Sampling(temperature=0.7))
    fresh = jax.jit(lambda tokens, n: view.prefill(fewer, view.init_state(fewer, 3, 40), tokens, n)[1])
    seen, before = set(), np.zeros(3, int)
    while d.busy:
        d.step(1)
        rows, state = d._state.rows, d._state.drafter
        running = np.flatnonzero(np.asarray(rows.running))
        length = jnp.maximum(rows.length - 1 - state.behind, 0)
        want = fresh(rows.tokens, length)
        for row in running:
            n = int(length[row])
            assert int(state.model.length[row]) == n
            for got, right in zip(jax.tree.leaves(state.model), jax.tree.leaves(want), strict=True):
                if got.ndim == 4:
                    np.testing.assert_allclose(got[row, :, :n], right[row, :, :n], atol=2e-5)
            seen.add((int(rows.counters.accepted[row]) - before[row], int(state.behind[row])))
        before = np.asarray(rows.counters.accepted)
    assert {count for count, _ in seen} == {0, 1, 2} and {behind for _, behind in seen} == {0, 1}


def tiny_llama():
    config = LlamaConfig(
        vocab_size=16, hidden_size=16, intermediate_size=24, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=4
    )
    shapes = {"self_attn.q_proj": (16, 16), "self_attn.k_proj": (8, 16), "self_attn.v_proj": (8, 16)}
    shapes |= {"self_attn.o_proj": (16, 16), "mlp.gate_proj": (24, 16), "mlp.up_proj": (24, 16)}
    shapes |= {"mlp.down_proj": (16, 24), "input_layernorm": (16,), "post_attention_layernorm": (16,)}
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.normal(0, 0.3, shape) if len(shape) > 1 else 1 + rng.normal(0, 0.1, shape)  # noqa: E731
    tensors = {f"model.layers.{i}.{name}.weight": draw(*shape) for i in range(3) for name, shape in shapes.items()}
    tensors |= {
        "model.embed_tokens.weight": draw(16, 16),
        "model.norm.weight": draw(16),
        "lm_head.weight": 2 * draw(16, 16),
    }
    return Llama(config), from_tensors(config, tensors)
