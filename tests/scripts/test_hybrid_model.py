"""The small hybrid's training pass is transformers' Qwen3-Next, and its MTP head drafts as it is trained."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers

from scripts.hybrid import export, forward, mixers
from scripts.hybrid.experts import experts
from scripts.hybrid.shape import Shape
from scripts.hybrid.vocabulary import EOS
from spec_jax.models import mtp, qwen_text
from spec_jax.models.load import load_target
from spec_jax.tree import Tree

SHAPE = Shape(
    vocab_size=97,
    hidden_size=32,
    num_hidden_layers=2,
    full_attention_interval=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    partial_rotary_factor=0.5,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=8,
    linear_value_head_dim=16,
    num_experts=4,
    moe_intermediate_size=16,
    shared_expert_intermediate_size=24,
)
TOKENS = np.random.default_rng(0).integers(0, SHAPE.vocab_size, (2, 70))


@pytest.fixture(scope="module")
def params():
    """Fresh parameters, every one of them moved, so that none hides behind a zero or a one."""
    fresh = forward.init(jax.random.key(0), SHAPE)
    leaves, tree = jax.tree.flatten(fresh)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    moved = [x + 0.1 * jax.random.normal(k, x.shape) for x, k in zip(leaves, keys, strict=True)]
    return jax.tree.unflatten(tree, moved)


@pytest.fixture(scope="module")
def logits(params):
    states, _ = jax.jit(forward.hidden, static_argnums=2)(params, TOKENS[:, :64], SHAPE)
    return states @ params["embed"].T


@pytest.fixture(scope="module")
def directory(params, tmp_path_factory):
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({EOS: 0, "a": 1}, []))
    backend.add_special_tokens([EOS])
    directory = tmp_path_factory.mktemp("exported")
    export.save(directory, params, SHAPE, backend, np.float32)
    return directory


def test_logits_are_those_of_transformers(logits, directory):
    torch = pytest.importorskip("torch", reason="the implementation that ours is compared with")
    transformers = pytest.importorskip("transformers", reason="the implementation that ours is compared with")
    model, info = transformers.Qwen3NextForCausalLM.from_pretrained(directory, output_loading_info=True)
    assert not info["missing_keys"] and all(name.startswith("mtp.") for name in info["unexpected_keys"])
    with torch.no_grad():
        expected = model(torch.tensor(TOKENS[:, :64])).logits.numpy()
    np.testing.assert_allclose(logits, expected, atol=2e-4)
    assert np.abs(expected).max() > 1


def test_logits_and_drafts_are_those_of_the_target(params, logits, directory):
    loaded = load_target(directory)
    config, own = loaded.target.config, loaded.params
    assert config.mtp and loaded.eos_token_ids == (0,)
    out = jax.jit(qwen_text.forward_text, static_argnums=0)(config, own, jnp.asarray(TOKENS[:, :64]))
    np.testing.assert_allclose(logits, out.logits, atol=2e-4)
    _, balance, found = _read(params)
    np.testing.assert_allclose(balance, out.balance, rtol=1e-4)
    context = qwen_text.final_norm(config, own, out.hidden)
    first, _ = jax.jit(mtp.forward_text, static_argnums=0)(config, own, context, jnp.asarray(TOKENS[:, 1:65]))
    np.testing.assert_allclose(found[0] @ params["embed"].T, first.logits, atol=2e-4)
    # the second step as the head drafts: one more node behind the committed pairs
    t = 9
    state = mtp.init_state(config, own, 2, 16)
    score = jax.jit(mtp.score, static_argnums=0)
    _, staged = score(config, own, state, context[:, : t + 1], _chain(TOKENS[:, 1 : t + 2]))
    state = mtp.commit(state, staged, jnp.tile(jnp.arange(t + 1), (2, 1)), jnp.full(2, t + 1))
    second, _ = score(config, own, state, first.context[:, t : t + 1], _chain(TOKENS[:, t + 2 : t + 3]))
    np.testing.assert_allclose(found[1][:, t] @ params["embed"].T, second.logits[:, 0], atol=3e-4)


@jax.jit
def _read(params):
    states, balance = forward.hidden(params, TOKENS[:, :64], SHAPE)
    return states, balance, forward.predict_further(params, states, TOKENS[:, :66], SHAPE, 2)[0]


def _chain(tokens):
    batch, n = tokens.shape
    parent = jnp.tile(jnp.arange(-1, n - 1), (batch, 1))
    return Tree(tokens=jnp.asarray(tokens), parent=parent, valid=jnp.ones((batch, n), bool))


def test_tensors_come_back(params):
    tensors = export.to_tensors(params, SHAPE)
    back = export.from_tensors(tensors, SHAPE)
    assert jax.tree.structure(back) == jax.tree.structure(jax.tree.map(np.asarray, params))
    jax.tree.map(np.testing.assert_array_equal, back, params)
    assert Shape.from_hf(SHAPE.to_hf(0)) == SHAPE
    assert sum(t.size for t in tensors.values()) == sum(x.size for x in jax.tree.leaves(params))


def test_the_state_runs_through_chunks(params, logits, monkeypatch):
    monkeypatch.setattr(forward, "CHUNK", 8)
    monkeypatch.setattr(forward, "BLOCK", 3)
    states, _ = jax.jit(lambda p: forward.hidden(p, TOKENS[:, :64], SHAPE))(params)
    np.testing.assert_allclose(states @ params["embed"].T, logits, atol=1e-4)


def test_no_token_sees_a_later_one(params, logits):
    changed = TOKENS[:, :64].copy()
    changed[:, 40] += 1
    states, _ = jax.jit(forward.hidden, static_argnums=2)(params, changed % SHAPE.vocab_size, SHAPE)
    other = states @ params["embed"].T
    np.testing.assert_allclose(other[:, :40], logits[:, :40], atol=1e-5)
    assert np.abs(other[:, 40] - logits[:, 40]).max() > 0.01


def test_experts_are_those_of_a_loop_over_rows():
    rng = np.random.default_rng(2)
    d, count, inner = 8, 4, 6
    shapes = {"router": (d, count), "gate_up": (count, d, 2 * inner), "down": (count, inner, d)}
    shapes |= {"shared_gate": (d, 1), "shared_gate_up": (d, 10), "shared_down": (5, d)}
    p = {name: rng.normal(size=size).astype(np.float32) for name, size in shapes.items()}
    x = rng.normal(size=(13, d)).astype(np.float32)

    def ffn(row, up, down):
        gate, up = np.split(row @ up, 2, -1)
        return (gate / (1 + np.exp(-gate)) * up) @ down

    def slow(x):
        out = []
        for row in x:
            logits = row @ p["router"]
            chance = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
            best = np.argsort(-chance)[:2]
            mixed = sum(chance[e] / chance[best].sum() * ffn(row, p["gate_up"][e], p["down"][e]) for e in best)
            gate = 1 / (1 + np.exp(-row @ p["shared_gate"]))
            out.append(mixed + gate * ffn(row, p["shared_gate_up"], p["shared_down"]))
        return np.stack(out)

    run = jax.jit(experts, static_argnums=(2, 3))
    for block in (1, 4, 64):
        np.testing.assert_allclose(run(p, jnp.asarray(x), 2, block)[0], slow(x), rtol=1e-4, atol=1e-4)
    moved = x.copy()
    moved[3, 5] += 1e-2
    moved_back = x.copy()
    moved_back[3, 5] -= 1e-2
    slope = jax.grad(lambda x: run(p, x, 2, 4)[0].sum())(jnp.asarray(x))[3, 5]
    np.testing.assert_allclose(slope, (slow(moved).sum() - slow(moved_back).sum()) / 2e-2, rtol=1e-2)


def test_balance_is_one_when_experts_are_used_alike():
    p = {
        "router": jnp.eye(4) * 20,
        "gate_up": jnp.zeros((4, 4, 2)),
        "down": jnp.zeros((4, 1, 4)),
        "shared_gate": jnp.zeros((4, 1)),
        "shared_gate_up": jnp.zeros((4, 2)),
        "shared_down": jnp.zeros((1, 4)),
    }
    run = jax.jit(experts, static_argnums=(2, 3))
    np.testing.assert_allclose(run(p, jnp.eye(4), 1, 2)[1], 1, rtol=1e-4)
    one = jnp.tile(jnp.eye(4)[:1], (4, 1))
    np.testing.assert_allclose(run(p, one, 1, 2)[1], 4, rtol=1e-4)


def test_the_head_drafts_as_it_is_trained(params):
    """Steps in parallel equal a head that drafts place by place, with its own cache of committed tokens."""
    states, _, found = _read(params)
    head, eps = params["mtp"], SHAPE.rms_norm_eps

    def fuse(tokens, states):
        embedded = mixers.rms_norm(params["embed"][tokens], head["norm_embedding"], eps)
        return jnp.concatenate([embedded, mixers.rms_norm(states, head["norm_hidden"], eps)], -1) @ head["fc"]

    @jax.jit
    def run(x):
        """The head's layer over a row of inputs, each of which sees those before it."""
        p = head["layer"]
        x = x + mixers.attention(p["mixer"], mixers.rms_norm(x, p["input_norm"], eps), SHAPE)[0]
        rows = mixers.rms_norm(x, p["post_norm"], eps).reshape(-1, SHAPE.hidden_size)
        x = x + experts(p["experts"], rows, SHAPE.num_experts_per_tok, 4)[0].reshape(x.shape)
        return mixers.rms_norm(x, head["norm"], eps)

    for t in (5, 63):
        first = fuse(TOKENS[:, 1 : t + 2], states[:, : t + 1])
        one = run(first)[:, -1:]
        np.testing.assert_allclose(one[:, 0], found[0][:, t], atol=1e-4)
        two = run(jnp.concatenate([first, fuse(TOKENS[:, t + 2 : t + 3], one)], 1))[:, -1]
        np.testing.assert_allclose(two, found[1][:, t], atol=1e-4)


@pytest.mark.parametrize(
    ("field", "value"), [("num_attention_heads", 3), ("linear_num_value_heads", 3), ("num_experts_per_tok", 9)]
)
def test_sizes_that_do_not_fit_are_refused(field, value):
    with pytest.raises(ValueError, match=field):
        dataclasses.replace(SHAPE, **{field: value})
