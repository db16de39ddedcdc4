"""Parity with transformers: whole texts, step by step, ragged batches, and files in all their layouts."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from spec_jax.models import mtp, qwen, qwen_tensors, qwen_text
from spec_jax.models.checkpoint import CheckpointError, required_tensors
from spec_jax.models.load import load_target
from spec_jax.models.qwen_config import QwenConfig
from tests.models import qwen_kit as kit
from tests.models.qwen_kit import VOCAB, chain_of, ours, score, their_logits, theirs

VARIANTS = {
    **{name: (name, {}) for name in kit.FAMILIES},
    "tied_biased": ("Qwen3Next", {"tie_word_embeddings": True, "attention_bias": True}),
    "some_dense": ("Qwen3Next", {"mlp_only_layers": [1], "norm_topk_prob": False}),
    "window": ("Qwen3", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_transformers(variant):
    kind, changes = VARIANTS[variant]
    model = theirs(kind, **changes)
    target, params = ours(model)
    tokens = jnp.asarray(np.random.default_rng(1).integers(0, VOCAB, (2, 21)), jnp.int32)
    want = their_logits(model, tokens)
    output, _, _ = score(target, params, target.init_state(params, 2, 64), chain_of(tokens))
    np.testing.assert_allclose(output.logits, want, atol=1e-4)
    text = jax.jit(qwen_text.forward_text, static_argnums=0)(target.config, params, tokens)
    np.testing.assert_allclose(text.logits, want, atol=1e-4)


@pytest.mark.parametrize("variant", ["Qwen3Next", "Qwen3Moe", "window", "window, stacked", "Gemma3, stacked"])
def test_ragged_prefill_then_steps_equal_transformers(variant):
    kind, changes = VARIANTS[variant.split(",")[0]]
    model = theirs(kind, **changes)
    target, params = ours(model)
    if "stacked" in variant:
        params = qwen.stack_layers(target.config, params)
    rng = np.random.default_rng(2)
    texts = [rng.integers(0, VOCAB, n) for n in (3, 17, 9)]
    padded = np.stack([np.pad(t, (0, 17 - len(t)), constant_values=96) for t in texts])
    state = target.init_state(params, 3, 64)
    for at in (0, 10):  # two chunks, of which some rows need one
        count = jnp.asarray([min(max(len(t) - at, 0), 10) for t in texts])
        block = jnp.asarray(np.pad(padded, ((0, 0), (0, 3)))[:, at : at + 10])
        _, state = kit.prefill(target, params, state, block, count)
    for _ in range(3):
        new = rng.integers(0, VOCAB, 3)
        output, staged, state = score(target, params, state, chain_of(new[:, None]))
        state = kit.commit(target, state, staged, jnp.zeros((3, 1), jnp.int32), jnp.ones(3, jnp.int32))
        texts = [np.append(t, n) for t, n in zip(texts, new, strict=True)]
        for row, text in enumerate(texts):
            np.testing.assert_allclose(output.logits[row, 0], their_logits(model, text[None])[0, -1], atol=1e-4)


def test_taps_are_hidden_states_as_transformers_counts_them():
    import torch

    model = theirs("Qwen3Next")
    target, params = ours(model)
    tokens = jnp.asarray(np.random.default_rng(1).integers(0, VOCAB, (1, 9)), jnp.int32)
    target = dataclasses.replace(target, taps=(0, 1, 2))
    features = score(target, params, target.init_state(params, 1, 32), chain_of(tokens))[0].features
    with torch.inference_mode():
        hidden = model(torch.tensor(np.asarray(tokens)), output_hidden_states=True).hidden_states
    for i in range(2):
        np.testing.assert_allclose(features[0, :, i], hidden[i][0].numpy(), atol=1e-4)
    last = qwen_text.final_norm(target.config, params, features[:, :, 2])  # transformers' last one is normed
    np.testing.assert_allclose(last, hidden[2].numpy(), atol=1e-4)


@pytest.mark.parametrize("kind", ["Qwen3Next", "Qwen3_5", "Qwen3_5Moe", "Qwen3", "Gemma3"])
def test_a_directory_that_transformers_wrote(kind, tmp_path):
    model = theirs(kind)
    model.save_pretrained(tmp_path)
    loaded = load_target(tmp_path, transposed=False)
    target, params = ours(model)
    assert loaded.target == target
    for got, want in zip(jax.tree.leaves(loaded.params), jax.tree.leaves(params), strict=True):
        np.testing.assert_array_equal(got, want)


def write(tmp_path, config, tensors, fields=None):
    (tmp_path / "config.json").write_text(json.dumps(config.to_hf() | (fields or {})))
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path


MTP = dataclasses.replace(kit.HYBRID, mtp=True)


def per_expert(tensors):
    """The same tensors with a tensor for each expert, and the projections of gated delta layers apart."""
    out = {}
    for name, x in tensors.items():
        if name.endswith("experts.gate_up_proj"):
            for i, (gate, up) in enumerate(np.split(e, 2) for e in x):
                at = name.removesuffix("gate_up_proj")
                out |= {f"{at}{i}.gate_proj.weight": gate.copy(), f"{at}{i}.up_proj.weight": up.copy()}
        elif name.endswith("experts.down_proj"):
            at = name.removesuffix("down_proj")
            out |= {f"{at}{i}.down_proj.weight": e.copy() for i, e in enumerate(x)}
        elif name.endswith("in_proj_qkvz.weight"):
            q, k, v, z = (p.reshape(-1, 32) for p in np.split(x.reshape(2, -1, 32), [8, 16, 32], axis=1))
            at = name.removesuffix("qkvz.weight")
            out |= {f"{at}qkv.weight": np.concatenate([q, k, v]), f"{at}z.weight": z.copy()}
        elif name.endswith("in_proj_ba.weight"):
            b, a = (p.reshape(-1, 32) for p in np.split(x.reshape(2, -1, 32), 2, axis=1))
            at = name.removesuffix("ba.weight")
            out |= {f"{at}b.weight": b.copy(), f"{at}a.weight": a.copy()}
        else:
            out[name] = x
    return out


@pytest.mark.parametrize("layout", ["fused", "apart", "multimodal"])
def test_all_layouts_load_alike(layout, tmp_path):
    tensors, fields = kit.random_tensors(MTP), {}
    want = qwen_tensors.from_tensors(MTP, tensors)
    if layout != "fused":
        tensors = per_expert(tensors)
    if layout == "multimodal":
        rename = lambda name: name.replace("model.", "model.language_model.", 1)  # noqa: E731
        tensors = {n if n.startswith("mtp") else rename(n): x for n, x in tensors.items()}
        tensors |= {"model.visual.blocks.0.norm.weight": np.ones(3, np.float32)}
        text = dict(MTP.to_hf(), eos_token_id=7)
        sparse_only = {n: x for n, x in text.items() if n not in ("model_type", "mlp_only_layers")}
        config = dataclasses.replace(MTP, sparse=(True,) * 3)
        tensors = {n: x for n, x in tensors.items() if ".layers.1.mlp" not in n}
        extra = per_expert(kit.random_tensors(dataclasses.replace(config, mtp=False)))
        tensors |= {rename(n): x for n, x in extra.items() if ".layers.1.mlp" in n}
        tensors = {n: x for n, x in tensors.items() if not n.startswith("mtp.layers.0.mlp")}
        head = {n: x for n, x in per_expert(kit.random_tensors(config)).items() if n.startswith("mtp.layers.0.mlp")}
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_5_moe", "text_config": sparse_only}))
        save_file(tensors | head, tmp_path / "model.safetensors")
        loaded = load_target(tmp_path, transposed=False)
        assert loaded.target.config == dataclasses.replace(config, intermediate_size=None)
        assert loaded.eos_token_ids == (7,)
        return
    loaded = load_target(write(tmp_path, MTP, tensors, fields), transposed=False)
    assert loaded.target.config == MTP
    for got, x in zip(jax.tree.leaves(loaded.params), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(got, x)
    back = qwen_tensors.to_tensors(MTP, qwen.stack_layers(MTP, loaded.params))
    again = kit.random_tensors(MTP)
    assert back.keys() == again.keys()
    for name, x in again.items():
        np.testing.assert_allclose(back[name], x, atol=1e-6)


def test_tensors_that_do_not_fit_are_refused_by_name(tmp_path):
    tensors = kit.random_tensors(MTP)
    for layout, gone in ((tensors, "model.layers.0.mlp.experts.down_proj"), (per_expert(tensors), "mtp.norm.weight")):
        less = {n: x for n, x in layout.items() if n != gone} | {"model.layers.0.extra": np.ones(1, np.float32)}
        with pytest.raises(CheckpointError, match=f"missing tensors: {gone}; unexpected tensors: model.layers.0.extra"):
            load_target(write(tmp_path, MTP, less))
    less = {n: x for n, x in per_expert(tensors).items() if n != "model.layers.2.mlp.experts.1.up_proj.weight"}
    with pytest.raises(CheckpointError, match="missing tensors: model.layers.2.mlp.experts.1.up_proj.weight$"):
        load_target(write(tmp_path, MTP, less))
    wide = dict(tensors, **{"model.layers.0.linear_attn.A_log": np.zeros(5, np.float32)})
    with pytest.raises(CheckpointError, match=r"wrong tensors: model.layers.0.linear_attn.A_log float32\[5\]"):
        load_target(write(tmp_path, MTP, wide))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"attn_output_gate": False}, "attn_output_gate is False"),
        ({"linear_num_key_heads": None}, "linear_num_key_heads is None"),
        ({"linear_num_value_heads": 3}, "linear_num_value_heads is 3"),
        ({"layer_types": ["linear_attention"]}, "layer_types"),
        ({"layer_types": ["mamba"] * 3}, "layer_types is 'mamba'"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok is 9"),
        ({"num_hidden_layers": 2**30}, "num_hidden_layers is 1073741824"),
        ({"rope_parameters": {"rope_type": "new"}}, "rope type is 'new'"),
        ({"quantization_config": {}}, "quantization_config"),
    ],
)
def test_configs_that_do_not_fit_are_refused(fields, words):
    with pytest.raises(ValueError, match=words):
        QwenConfig.from_hf(kit.HYBRID.to_hf() | fields)


def test_a_config_survives_its_own_json():
    assert QwenConfig.from_hf(json.loads(json.dumps(kit.HYBRID.to_hf()))) == kit.HYBRID
    assert dataclasses.replace(kit.HYBRID, layer_types=("linear_attention",) * 4, sparse=(True, False) * 2).period == 2
    assert kit.HYBRID.period == 3 and kit.HYBRID.with_layers((0, 1)).sparse == (True, False)


def test_transformers_reads_what_we_write(tmp_path):
    transformers = pytest.importorskip("transformers", reason="parity with transformers needs it")
    target, params = kit.small(MTP)
    write(tmp_path, MTP, qwen_tensors.to_tensors(MTP, params))
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    tokens = jnp.asarray(np.random.default_rng(3).integers(0, VOCAB, (1, 12)), jnp.int32)
    output, _, _ = score(target, params, target.init_state(params, 1, 32), chain_of(tokens))
    np.testing.assert_allclose(output.logits, their_logits(model, tokens), atol=1e-4)


def test_bfloat16():
    target, params = kit.small()
    tokens = jnp.asarray(np.random.default_rng(3).integers(0, VOCAB, (1, 12)), jnp.int32)
    low = qwen_tensors.from_tensors(kit.HYBRID, kit.random_tensors(kit.HYBRID), jnp.bfloat16)
    state = target.init_state(low, 1, 32)
    got, staged, after = score(target, low, state, chain_of(tokens))
    want, _, _ = score(target, params, target.init_state(params, 1, 32), chain_of(tokens))
    error = float(jnp.abs(got.logits - want.logits).max()) / float(jnp.abs(want.logits).max())
    assert 1e-4 < error < 0.3
    kinds = {str(x.dtype) for x in jax.tree.leaves(staged)}
    assert kinds == {"bfloat16", "float32"} and staged.layers[0].factors.u.dtype == jnp.float32
    assert after.layers[0].recurrent.dtype == jnp.float32 and after.layers[0].conv.dtype == jnp.bfloat16


def test_gradients_reach_every_leaf():
    config = dataclasses.replace(MTP, num_experts=2, tie_word_embeddings=True)
    params = qwen_text.init_params(config, jax.random.key(0))
    assert required_tensors(config).keys() == qwen_tensors.to_tensors(config, params).keys()
    tokens = jnp.asarray(np.random.default_rng(4).integers(0, VOCAB, (2, 9)), jnp.int32)

    def loss(p):
        out = qwen_text.forward_text(config, p, tokens, remat=True)
        context = qwen_text.final_norm(config, p, out.hidden)
        more, balance = mtp.forward_text(config, p, context[:, :-1], tokens[:, 1:])
        return (out.logits**2).mean() + (more.logits**2).mean() + out.balance + balance

    value, gradient = jax.jit(jax.value_and_grad(loss))(params)
    assert value > 1.5  # two balance losses of about 1, and logits
    for path, leaf in jax.tree_util.tree_flatten_with_path(gradient)[0]:
        assert np.isfinite(leaf).all() and np.abs(leaf).max() > 0, jax.tree_util.keystr(path)


mtp_score, mtp_commit = jax.jit(mtp.score, static_argnums=0), jax.jit(mtp.commit)


def test_the_mtp_head_scores_as_it_reads_texts():
    target, params = kit.small(MTP)
    rng = np.random.default_rng(5)
    context = jnp.asarray(rng.normal(size=(2, 9, 32)), jnp.float32)
    tokens = jnp.asarray(rng.integers(0, VOCAB, (2, 9)), jnp.int32)
    want, _ = jax.jit(mtp.forward_text, static_argnums=0)(MTP, params, context, tokens)
    state = mtp.init_state(MTP, params, 2, 16)
    _, staged = mtp_score(MTP, params, state, context[:, :5], chain_of(tokens[:, :5]))
    state = mtp_commit(state, staged, jnp.broadcast_to(jnp.arange(5), (2, 5)), jnp.asarray([5, 5]))
    output, staged = mtp_score(MTP, params, state, context[:, 5:], chain_of(tokens[:, 5:]))
    np.testing.assert_allclose(output.logits, want.logits[:, 5:], atol=2e-5)
    np.testing.assert_allclose(output.context, want.context[:, 5:], atol=2e-5)
    tree, whole = chain_of(tokens[:, 5:]), output
    one_node = jax.jit(lambda rows, staged, start: mtp.score(MTP, params, state, rows, tree, staged, (start, 1)))
    for start in range(4):
        output, staged = one_node(context[:, 5 + start : 6 + start], staged, start)
        np.testing.assert_allclose(output.logits[:, 0], whole.logits[:, start], atol=2e-5)
    with pytest.raises(ValueError, match="MTP head"):
        mtp.score(kit.HYBRID, kit.small()[1], state, context[:, :5], chain_of(tokens[:, :5]))


def test_further_steps_of_the_mtp_head_are_those_it_drafts():
    """Behind the committed pairs up to some place, a chain of the head's own outputs."""
    target, params = kit.small(MTP)
    rng = np.random.default_rng(6)
    t, steps = 9, 3
    context = jnp.asarray(rng.normal(size=(2, t, 32)), jnp.float32)
    tokens = jnp.asarray(rng.integers(0, VOCAB, (2, t + steps - 1)), jnp.int32)
    run = jax.jit(mtp.forward_steps, static_argnums=(0, 4))
    outputs, balance = run(MTP, params, context, tokens, steps)
    assert len(outputs) == steps and balance > 0
    state = mtp.init_state(MTP, params, 2, 16)
    for place in (4, 0, 8):
        now, first = state, 0
        for s, output in enumerate(outputs):
            rows = context[:, : place + 1] if s == 0 else outputs[s - 1].context[:, place : place + 1]
            drafted, staged = mtp_score(MTP, params, now, rows, chain_of(tokens[:, first : place + 1 + s]))
            np.testing.assert_allclose(drafted.logits[:, -1], output.logits[:, place], atol=3e-5)
            n = place + 1 + s - first
            now = mtp_commit(now, staged, jnp.broadcast_to(jnp.arange(n), (2, n)), jnp.asarray([n, n]))
            first = place + 1 + s
    for short in ((tokens, steps - 1), (tokens[:, :0], 0)):
        with pytest.raises(ValueError, match="tokens: got"):
            mtp.forward_steps(MTP, params, context, *short)


def test_gates_that_remember():
    config = dataclasses.replace(kit.HYBRID, layer_types=("linear_attention",) * 3, linear_num_value_heads=64)
    params = qwen_text.init_params(config, jax.random.key(1), scale=None, memory=(10.0, 1000.0))
    for layer in params.layers:
        step = jax.nn.softplus(layer.mixer.dt_bias)
        assert (step > 0.99e-3).all() and (step < 1.01e-1).all() and 0.9 < np.std(np.log(step)) < 1.8
        assert (jnp.exp(layer.mixer.a_log) >= 0.999).all() and (jnp.exp(layer.mixer.a_log) < 16.001).all()
        assert abs(np.std(layer.mixer.qkv.kernel) * 32**0.5 - 1) < 0.1
        assert abs(np.std(layer.mixer.out.kernel) * 512**0.5 - 6**-0.5) < 0.05
    assert abs(np.std(params.embedding) * 32**0.5 - 1) < 0.1
