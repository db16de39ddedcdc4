"""A toy DFlash learns a toy target: from prompts to the acceptance length of the engine."""

import dataclasses

import jax
import numpy as np
import optax
import pytest

pytest.importorskip("grain", reason="reads the batches")
pytest.importorskip("tensorboardX", reason="writes the events")

from safetensors import safe_open  # noqa: E402

from spec_jax.drafters.block.heads.ancestor import Ancestor  # noqa: E402
from spec_jax.drafters.block.heads.head import Plain  # noqa: E402
from spec_jax.drafters.block.heads.markov import Markov  # noqa: E402
from spec_jax.drafters.block.heads.selector import Selector  # noqa: E402
from spec_jax.drafters.eagle.config import EagleConfig  # noqa: E402
from spec_jax.drafters.load import load_drafter  # noqa: E402
from spec_jax.drafters.medusa import MedusaConfig  # noqa: E402
from spec_jax.drafters.mlp_speculator import MlpConfig  # noqa: E402
from spec_jax.drafters.parallel_model import ParallelConfig  # noqa: E402
from spec_jax.drafters.recurrent import RecurrentConfig  # noqa: E402
from spec_jax.engine.decoder import Decoder  # noqa: E402
from spec_jax.engine.engine import Engine  # noqa: E402
from spec_jax.models.load import LoadedTarget  # noqa: E402
from spec_jax.sampling.settings import Sampling  # noqa: E402
from spec_jax.topology.growth import Growth  # noqa: E402
from spec_jax.train import block, features, heads, last_hidden, parallel, prompts  # noqa: E402
from spec_jax.train.checkpoints import Checkpoints  # noqa: E402
from spec_jax.train.evaluate import Evaluation  # noqa: E402
from spec_jax.train.fit import fit  # noqa: E402
from spec_jax.train.loader import Feed, windows  # noqa: E402
from spec_jax.train.logs import Log, read  # noqa: E402
from spec_jax.train.objective import Objective  # noqa: E402
from spec_jax.train.responses import regenerate  # noqa: E402
from spec_jax.train.schedule import BySteps  # noqa: E402
from spec_jax.train.step import adamw, init, make_step  # noqa: E402
from spec_jax.train.store import Store  # noqa: E402
from spec_jax.train.task import Task  # noqa: E402
from tests.train import toy  # noqa: E402

WEIGHTS = toy.params()
STEPS = 160
REDRAFTER = RecurrentConfig(toy.V, 16, num_blocks=1, final_norm_eps=toy.CONFIG.rms_norm_eps)
HYDRA = MedusaConfig(
    toy.V, 16, 3, sequential=True, final_norm_eps=toy.CONFIG.rms_norm_eps, prefix=toy.CONFIG.with_layers([0])
)
MLP = MlpConfig(toy.V, 16, tie_weights=True, scale_input=True, final_norm_eps=toy.CONFIG.rms_norm_eps)
PARD = ParallelConfig(toy.CONFIG.with_layers([0]), mask_token=toy.V - 1, depth=3)
DSPARK = Objective((("ce", 0.1), ("l1", 0.9)), (("decay", (("gamma", 4.0),)),), confidence=1.0)


def eagle(**changes):
    sizes = {name: getattr(toy.CONFIG, name) for name in ("vocab_size", "hidden_size", "num_heads", "head_dim")}
    return EagleConfig(**sizes, intermediate_size=32, num_kv_heads=1, taps=(1, 2), **changes)


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """The target's answers to passages of noise."""
    rng = np.random.default_rng(0)
    noise = [rng.integers(0, toy.V, 30).tolist() for _ in range(40)]
    decoder = Decoder(Engine(toy.target(()), max_len=32, prefill_chunk=8), WEIGHTS, batch=8)
    store = Store(tmp_path_factory.mktemp("texts"), {"vocab_size": toy.V})
    regenerate(decoder, prompts.beginnings(noise, 64, 2, 6), 24, store, sampling=Sampling(temperature=0.3))
    return store.read()


def trained(folder, texts, forward, objective, steps=STEPS, measured=True, **options):
    """(state, rows, evaluation) of a run in a folder, from its newest checkpoint if there is one."""
    shape = Growth(nodes=forward.slots + 1, depth=forward.slots, width=1, children=1, candidates=4)
    drafter, target = forward.drafter(shape), forward.tapped(toy.target())
    task = Task(forward, features.with_last(target, toy.LAYERS), objective, anchors=8, steps=STEPS)
    held_out = [(3, 1), (5, 9, 2), (7, 7), (2, 11, 13)]
    engine = Engine(target, max_len=32, drafter=drafter, prefill_chunk=8)
    as_drafter = lambda params: forward.as_drafter(params, WEIGHTS)  # noqa: E731
    evaluation = Evaluation(engine, WEIGHTS, held_out, 24, as_drafter=as_drafter, batch=4)
    params = forward.init(jax.random.key(1), WEIGHTS)
    optimizer = adamw(params, weight_decay=0.0)
    feed = Feed(windows(texts, 24, 8, seed=0), WEIGHTS)
    with Checkpoints(folder / "checkpoints", {"anchors": 8}) as kept:
        state = kept.restore(init(params, optimizer)) or init(params, optimizer)
        with Log(folder, int(state.step)) as log:
            schedule = BySteps(1e-2, 10, steps, min(steps, 60))
            measure = evaluation if measured else None
            state = fit(state, make_step(task.loss, optimizer), feed, schedule, log, kept, measure=measure, **options)
    return state, read(folder), evaluation


@pytest.mark.parametrize(
    ("forward", "objective"),
    [
        (block.BlockForward(toy.block_config()), Objective(weights=(("decay", (("gamma", 4.0),)),))),
        (block.BlockForward(toy.block_config("shifted", 3), Markov(rank=8)), DSPARK),
        (heads.EagleForward(eagle(), 3), Objective(weights=(("powers", (("base", 0.8),)),))),
        (
            last_hidden.MedusaForward(MedusaConfig(toy.V, 16, 3, final_norm_eps=toy.CONFIG.rms_norm_eps), toy.LAYERS),
            Objective(),
        ),
        (last_hidden.RecurrentForward(REDRAFTER, toy.LAYERS, 3), Objective(weights=(("powers", (("base", 0.8),)),))),
        pytest.param(last_hidden.MlpForward(MLP, toy.LAYERS), Objective(), marks=pytest.mark.slow),
        pytest.param(last_hidden.MedusaForward(HYDRA, toy.LAYERS), Objective(), marks=pytest.mark.slow),
        (parallel.ParallelForward(PARD), Objective()),
    ],
    ids=["DFlash", "DSpark", "EAGLE-3", "Medusa", "ReDrafter", "MLP speculator", "Hydra++", "PARD"],
)
def test_the_acceptance_length_rises(tmp_path, texts, forward, objective):
    state, rows, evaluation = trained(tmp_path, texts, forward, objective)
    after, text = rows[-1], [r.tokens for r in evaluation.results]
    fresh = forward.init(jax.random.key(1), WEIGHTS)
    before = evaluation(fresh)
    assert [r.tokens for r in evaluation.results] == text  # the drafter changes no text
    assert after["acceptance_length"] > before["acceptance_length"] + 0.5
    assert rows[-1]["step"] == STEPS and after["accepted_1"] > before["accepted_1"]
    whole = forward.as_drafter(state.params, WEIGHTS)
    forward.save(tmp_path / "drafter", whole, "toy")
    loaded = load_drafter(tmp_path / "drafter", LoadedTarget(toy.target(()), WEIGHTS, None, (), 64))
    jax.tree.map(np.testing.assert_array_equal, loaded.params, whole)
    assert loaded.target.taps == forward.tapped(toy.target(())).taps


def test_a_resumed_run_is_the_same_to_the_bit(tmp_path, texts):
    class Died(Exception):
        pass

    def die(row):
        if row["step"] == 7:
            raise Died

    forward = block.BlockForward(toy.block_config())
    whole, rows, _ = trained(tmp_path / "whole", texts, forward, Objective(), 12, False)
    with pytest.raises(Died):
        trained(tmp_path / "cut", texts, forward, Objective(), 12, False, report=die, save_every=0.0)
    resumed, again, _ = trained(tmp_path / "cut", texts, forward, Objective(), 12, False)
    jax.tree.map(np.testing.assert_array_equal, whole, resumed)
    assert [(row["step"], row["loss"]) for row in again] == [(row["step"], row["loss"]) for row in rows]


def test_only_the_drafter_is_trained():
    forward = block.BlockForward(toy.block_config(), Plain())
    params = forward.init(jax.random.key(0), WEIGHTS)
    whole = lambda target: block.drafter_params(params, target).ends.embedding.sum()  # noqa: E731
    gradient = jax.grad(lambda t: whole(t))(WEIGHTS)
    assert all((np.asarray(g) == 0).all() for g in jax.tree.leaves(gradient))


def test_a_reduced_vocabulary_begins_with_the_targets_head():
    kept = np.array([1, 4, 9, 20], np.int32)
    forward = block.BlockForward(toy.block_config(draft_vocab_size=4))
    params = forward.init(jax.random.key(0), WEIGHTS, kept)
    np.testing.assert_array_equal(params.lm_head.kernel, WEIGHTS.head.kernel[:, kept])
    with pytest.raises(ValueError, match="kept: got None"):
        forward.init(jax.random.key(0), WEIGHTS)


def test_a_head_that_is_the_targets_is_neither_trained_nor_written(tmp_path):
    kept = np.array([1, 4, 9, 20], np.int32)
    small = {"draft_vocab_size": 4, "own_head": False}
    shared = {block.KEPT: jax.numpy.asarray(kept)}
    for name, forward in (
        ("block", block.BlockForward(toy.block_config(**small))),
        ("eagle", heads.EagleForward(eagle(**small), 3)),
    ):
        params = forward.init(jax.random.key(0), WEIGHTS, kept)
        assert params.lm_head is None
        whole = forward.as_drafter(params, WEIGHTS, shared)
        np.testing.assert_array_equal(whole.lm_head.kernel, WEIGHTS.head.kernel[:, kept])
        forward.save(tmp_path / name, whole, "toy")
        with safe_open(tmp_path / name / "model.safetensors", "numpy") as file:
            assert not any("lm_head" in tensor for tensor in file.keys())  # noqa: SIM118
        loaded = load_drafter(tmp_path / name, LoadedTarget(toy.target(()), WEIGHTS, None, (), 64))
        jax.tree.map(np.testing.assert_array_equal, loaded.params, whole)


def test_eagles_first_loss_has_the_hidden_states_in_it(texts):
    forward = heads.EagleForward(eagle(), 2)
    task = Task(forward, features.with_last(forward.tapped(toy.target()), 2), Objective(regression=1.0), 4, 10)
    params = forward.init(jax.random.key(0), WEIGHTS)
    total, metrics = jax.jit(task.loss)(params, toy.batch())
    np.testing.assert_allclose(total, metrics["draft_loss"] + metrics["regression_loss"], rtol=1e-6)
    plain = dataclasses.replace(task, forward=block.BlockForward(toy.block_config()), target=toy.target())
    with pytest.raises(ValueError, match="regression: got"):
        plain.loss(plain.forward.init(jax.random.key(0), WEIGHTS), toy.batch())


@pytest.mark.parametrize("head", [Selector(rank=4, candidates=2), Ancestor(size=8, heads=2, inner=8, candidates=2)])
def test_heads_that_score_candidates_alone_train_with_all_tokens(head, texts):
    cut, whole = (
        block.BlockForward(toy.block_config(), dataclasses.replace(head, candidates=candidates))
        for candidates in (2, None)
    )
    params = cut.init(jax.random.key(1), WEIGHTS)
    batch = Feed(windows(texts, 24, 2, seed=0), WEIGHTS)[0]

    def loss(forward):
        task = Task(forward, features.with_last(forward.tapped(toy.target()), toy.LAYERS), Objective(), 4, 1)
        return jax.jit(jax.value_and_grad(task.loss, has_aux=True))(params, batch)

    ((one, _), slope), ((other, _), _) = loss(cut), loss(whole)
    np.testing.assert_allclose(one, other, rtol=1e-6)
    assert optax.tree.norm(slope.network) > 0
