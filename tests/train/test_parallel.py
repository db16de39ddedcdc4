"""PARD's training: a packed pass says what the model says over masks when it drafts; rows are dropped in chains."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from spec_jax.drafters import parallel_files, recurrent, recurrent_files
from spec_jax.drafters.block.ends import ends_of
from spec_jax.drafters.early_exit import EarlyExitConfig
from spec_jax.drafters.load import load_drafter
from spec_jax.drafters.parallel_model import ParallelConfig, ParallelModel
from spec_jax.drafters.recurrent import RecurrentConfig
from spec_jax.models.checkpoint import CheckpointError, required_tensors
from spec_jax.models.linear import transposed
from spec_jax.models.load import LoadedTarget
from spec_jax.train.early_exit import EarlyExitForward
from spec_jax.train.parallel import ParallelForward, first_layers
from spec_jax.train.task import Asked
from tests.drafters.hybrid import hybrid
from tests.faults.kit import jit
from tests.train import toy

CONFIG = ParallelConfig(toy.CONFIG.with_layers([0]), mask_token=toy.V - 1, depth=4)
TARGET = LoadedTarget(toy.target(()), toy.params(), None, (), 64)


def asked(tokens, anchors, real, params, depth=4):
    b, r = anchors.shape
    return Asked(
        tokens,
        jnp.zeros((*tokens.shape, 1, 16)),
        anchors,
        real,
        jnp.zeros((b, r, depth), jnp.int32),
        jax.random.key(0),
        params,
        None,
    )


def test_a_packed_pass_is_one_pass_over_text_and_masks_behind_each_anchor():
    rng, params = np.random.default_rng(0), toy.params()
    tokens = jnp.asarray(rng.integers(0, toy.V, (2, 10)), jnp.int32)
    anchors, real = jnp.asarray([[2, 5, 9], [1, 7, 0]]), jnp.asarray([[True] * 3, [True, True, False]])
    forward = ParallelForward(CONFIG, rate=1.0)
    own = forward.init(jax.random.key(0), params)
    said = jit(lambda p: forward(p, asked(tokens, anchors, real, params)))(own)
    assert said.kept.all()
    model = CONFIG.target(taps=(1,))
    run = jit(lambda row, n: model.prefill(own, model.init_state(own, 1, 16), row, n)[0][:, :, 0])
    for b, r in np.ndindex(2, 3):
        at = int(anchors[b, r])
        row = np.full((1, 16), CONFIG.mask_token, np.int32)
        row[0, : at + 1] = tokens[b, : at + 1]
        want = model.logits(own, run(row, jnp.asarray([at + 4])))[0, at : at + 4]
        np.testing.assert_allclose(said.logits[b, r], want, rtol=2e-4, atol=2e-4)


def test_rows_are_dropped_in_chains_of_real_anchors_first():
    params = toy.params()
    real = jnp.asarray([[True] * 8, [True] * 3 + [False] * 5])
    anchors = jnp.where(real, jnp.arange(1, 9), 0)
    forward = ParallelForward(CONFIG, rate=0.5, floor=0.25)
    own = forward.init(jax.random.key(0), params)
    given = asked(jnp.ones((2, 12), jnp.int32), anchors, real, params)
    said, slope = jit(lambda p: (forward(p, given), jax.grad(lambda p: forward(p, given).logits[0].sum())(p)))(own)
    kept = np.asarray(said.kept)
    np.testing.assert_array_equal(kept.sum(1), [[8, 4, 2, 2]] * 2)
    assert (np.diff(kept.astype(int), axis=2) <= 0).all()
    assert kept[1, :3, 1].all() and not kept[1, 3:, 2].any()
    assert not np.asarray(said.logits)[~kept].any()
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(slope)) and np.abs(slope.layers[0].q.kernel).max() > 0


def test_a_hybrids_first_layers_have_a_gradient():
    target, params = hybrid(sparse=False)
    config = ParallelConfig(first_layers(target.config, 2), 15, 2)
    forward = ParallelForward(config, rate=1.0)
    own = forward.init(jax.random.key(0), params)
    assert own.mtp is None
    given = asked(jnp.arange(6)[None], jnp.asarray([[2, 4]]), jnp.ones((1, 2), bool), params, 2)
    slope = jit(jax.grad(lambda p: jax.nn.log_softmax(forward(p, given).logits)[..., 3].sum()))(own)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(slope))
    assert np.abs(jax.tree.leaves(slope.layers[0])[0]).max() > 0


def test_published_weights_are_an_ordinary_models_with_a_mask(tmp_path):
    c = toy.CONFIG
    fields = {"model_type": "llama", "pard_token": 7, "num_hidden_layers": c.num_layers, "num_attention_heads": 2}
    fields |= {"num_key_value_heads": 1, "rms_norm_eps": c.rms_norm_eps}
    fields |= {n: getattr(c, n) for n in ("vocab_size", "hidden_size", "intermediate_size", "head_dim")}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    rng = np.random.default_rng(0)
    tensors = {n: rng.normal(size=shape).astype(np.float32) for n, shape in required_tensors(c).items()}
    save_file(tensors, tmp_path / "model.safetensors")
    loaded = load_drafter(tmp_path, TARGET)
    assert isinstance(loaded.drafter, ParallelModel)
    assert (loaded.drafter.mask_token, loaded.drafter.depth) == (7, 8)
    np.testing.assert_array_equal(loaded.params.head.kernel.T, tensors["lm_head.weight"])
    (tmp_path / "config.json").write_text(json.dumps(fields | {"pard_token": 24}))
    with pytest.raises(CheckpointError, match="pard_token is 24"):
        load_drafter(tmp_path, TARGET)


def test_directories_that_are_not_whole_are_refused(tmp_path):
    params, network = toy.params(), RecurrentConfig(toy.V, 16, 1, toy.CONFIG.rms_norm_eps)
    own = ParallelForward(CONFIG).init(jax.random.key(0), params)
    parallel_files.save(tmp_path / "parallel", CONFIG, own, "toy")
    recurrent_files.save(
        tmp_path / "recurrent", network, recurrent.init_params(network, jax.random.key(0), ends_of(params)), "toy"
    )
    for name, tensor in (("parallel", "layers.0.q.kernel"), ("recurrent", "into.bias")):
        folder = tmp_path / name
        config = json.loads((folder / "config.json").read_text())
        loaded = load_drafter(folder, TARGET)
        assert loaded.drafter.depth == {"parallel": 4, "recurrent": 5}[name]
        file = folder / "model.safetensors"
        tensors = load_file(file)
        save_file({n: x for n, x in tensors.items() if n != tensor} | {"more": tensors[tensor]}, file)
        with pytest.raises(CheckpointError, match=f"missing tensors: {tensor}; unexpected tensors: more"):
            load_drafter(folder, TARGET)
        network = config["network"]
        wrong = {"model": network["model"] | {"vocab_size": 30}} if "model" in network else {"vocab_size": 30}
        (folder / "config.json").write_text(json.dumps(config | {"network": network | wrong}))
        with pytest.raises(CheckpointError):
            load_drafter(folder, TARGET)


def test_a_model_of_other_layers_than_the_targets_needs_a_beginning():
    other = ParallelConfig(toy.CONFIG.with_layers([0, 1, 2]), mask_token=3)
    with pytest.raises(ValueError, match="config: got another model than the target's first layers"):
        ParallelForward(other).init(jax.random.key(0), toy.params())


def test_neither_training_nor_files_depend_on_how_a_target_holds_its_kernels(tmp_path):
    straight, turned = toy.params(), transposed(toy.params(), jnp.transpose)
    network, files = RecurrentConfig(toy.V, 16, 1, toy.CONFIG.rms_norm_eps), []
    for params in (straight, turned):
        made = recurrent.init_params(network, jax.random.key(0), ends_of(params))
        recurrent_files.save(tmp_path, network, made, "toy")
        files.append(load_file(tmp_path / "model.safetensors"))
    jax.tree.map(np.testing.assert_array_equal, *files)
    forward = ParallelForward(CONFIG)
    jax.tree.map(np.testing.assert_array_equal, *(forward.init(jax.random.key(0), p) for p in (straight, turned)))
    exit_ = EarlyExitForward(EarlyExitConfig(toy.CONFIG, 1, 1))
    jax.tree.map(np.testing.assert_array_equal, *(exit_.init(jax.random.key(0), p) for p in (straight, turned)))
