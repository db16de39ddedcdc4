import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.models import llama
from spec_jax.models.config import LlamaConfig, RopeConfig
from spec_jax.models.linear import Dense, LoRA, quantize_int8
from spec_jax.tree import Tree, chain

VARIANTS = {
    "gqa": {"num_key_value_heads": 2},
    "mha_untied": {"num_key_value_heads": 4, "tie_word_embeddings": False},
    "mqa_biases": {"num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True},
    "head_dim": {"head_dim": 32},
    "window": {"kind": "Mistral", "sliding_window": 7},
    "linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
    "llama3": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
    "yarn": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
}


def reference(kind="Llama", **changes):
    """A small random transformers model and ours with the same weights."""
    transformers = pytest.importorskip("transformers", reason="parity with transformers needs it")
    torch = pytest.importorskip("torch", reason="parity with transformers needs torch")
    torch.manual_seed(0)
    fields = {
        "vocab_size": 97,
        "hidden_size": 64,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.2,
        "tie_word_embeddings": True,
        **changes,
    }
    config = getattr(transformers, f"{kind}Config")(**fields)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.2)
    ours = LlamaConfig.from_hf(config.to_dict())
    tensors = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    return torch, model, ours, llama.from_tensors(ours, tensors)


score = jax.jit(llama.Llama.score, static_argnums=0)
prefill = jax.jit(llama.Llama.prefill, static_argnums=0)
commit = jax.jit(llama.Llama.commit, static_argnums=0)


def their_logits(torch, model, tokens):
    with torch.inference_mode():
        return model(torch.tensor(np.asarray(tokens))).logits.numpy()


def chain_tree(tokens, length=None):
    """Chains of tokens, of which the first `length` are real."""
    drafted = (length or tokens.shape[1]) - 1
    return jax.vmap(chain)(tokens[:, 0], tokens[:, 1:], jnp.full(len(tokens), drafted))


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_transformers(variant):
    torch, model, config, params = reference(**VARIANTS[variant])
    tokens = jnp.asarray(np.random.default_rng(1).integers(0, 97, (2, 24)), jnp.int32)
    target = llama.Llama(config)
    output, _, _ = score(target, params, target.init_state(params, 2, 256), chain_tree(tokens))
    np.testing.assert_allclose(output.logits, their_logits(torch, model, tokens), atol=1e-4)


@pytest.mark.parametrize("variant", [{}, VARIANTS["window"]], ids=["llama", "window"])
def test_ragged_prefill_then_steps_equal_transformers(variant):
    torch, model, config, params = reference(**variant)
    rng = np.random.default_rng(2)
    texts = [rng.integers(0, 97, n) for n in (3, 17, 9)]
    target, longest = llama.Llama(config), 17
    padded = np.stack([np.pad(t, (0, longest - len(t)), constant_values=96) for t in texts])
    state = target.init_state(params, 3, 64)
    _, state = prefill(target, params, state, jnp.asarray(padded), jnp.asarray([len(t) for t in texts]))
    for _ in range(3):
        new = rng.integers(0, 97, 3)
        tree = chain_tree(jnp.asarray(new[:, None]))
        output, staged, state = score(target, params, state, tree)
        state = commit(target, state, staged, jnp.zeros((3, 1), jnp.int32), jnp.ones(3, jnp.int32))
        texts = [np.append(t, n) for t, n in zip(texts, new, strict=True)]
        for row, text in enumerate(texts):
            want = their_logits(torch, model, text[None])[0, -1]
            np.testing.assert_allclose(output.logits[row, 0], want, atol=1e-4)


def small(seed=0, layers=2, taps=(), **changes):
    """A small random model of ours."""
    config = LlamaConfig(61, 32, 48, layers, 4, 2, 8, **changes)
    from spec_jax.models.checkpoint import required_tensors

    rng = np.random.default_rng(seed)
    tensors = {name: rng.normal(0, 0.3, shape).astype(np.float32) for name, shape in required_tensors(config).items()}
    return llama.Llama(config, taps), llama.from_tensors(config, tensors)


def tree_of(parents, batch, seed=3):
    tokens = np.random.default_rng(seed).integers(0, 61, (batch, len(parents)))
    parent = jnp.broadcast_to(jnp.asarray(parents), tokens.shape)
    return Tree(jnp.asarray(tokens, jnp.int32), parent, jnp.ones(tokens.shape, bool))


PARENTS = (-1, 0, 0, 1, 1, 2, 4, 5)


def prefilled(target, params, batch=2, slots=200, text=29):
    tokens = jnp.asarray(np.random.default_rng(5).integers(0, 61, (batch, text)), jnp.int32)
    state = target.init_state(params, batch, slots)
    return tokens, prefill(target, params, state, tokens, jnp.asarray([text - 4 * i for i in range(batch)]))[1]


def path_of(node):
    path = [node]
    while PARENTS[path[0]] >= 0:
        path.insert(0, PARENTS[path[0]])
    return path


def test_tree_nodes_equal_their_own_chains():
    target, params = small()
    _, state = prefilled(target, params)
    tree = tree_of(PARENTS, 2)
    logits = score(target, params, state, tree)[0].logits
    for node in range(len(PARENTS)):
        path = path_of(node)
        own = chain_tree(tree.tokens[:, jnp.asarray(path + [7] * (4 - len(path)))], len(path))
        alone = score(target, params, state, own)[0].logits[:, len(path) - 1]
        np.testing.assert_allclose(logits[:, node], alone, atol=1e-5)


@pytest.mark.parametrize("node", range(len(PARENTS)))
def test_committed_state_equals_a_fresh_run(node):
    target, params = small()
    tokens, state = prefilled(target, params)
    tree = tree_of(PARENTS, 2)
    _, staged, state = score(target, params, state, tree)
    path = path_of(node)
    padded = jnp.asarray([path + [0] * (8 - len(path))] * 2)
    moved = commit(target, state, staged, padded, jnp.full(2, len(path)))
    texts = [np.append(tokens[row, :start], tree.tokens[row, jnp.asarray(path)]) for row, start in enumerate((29, 25))]
    block, count = np.stack([np.pad(t, (0, 40 - len(t))) for t in texts]), [len(t) for t in texts]
    fresh = prefill(target, params, target.init_state(params, 2, 200), jnp.asarray(block), jnp.asarray(count))[1]
    assert moved.length.tolist() == fresh.length.tolist() == count
    for got, want in zip((*moved.k, *moved.v), (*fresh.k, *fresh.v), strict=True):
        for row, n in enumerate(count):
            np.testing.assert_allclose(got[row, :, :n], want[row, :, :n], atol=1e-5)


def test_scoring_leaves_the_state_alone():
    target, params = small()
    _, state = prefilled(target, params)

    def check(state):
        _, _, after = target.score(params, state, tree_of(PARENTS, 2))
        assert all(a is b for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(after), strict=True))

    jax.eval_shape(check, state)


def test_staged_scoring_extends_a_tree():
    target, params = small()
    _, state = prefilled(target, params)
    tree = tree_of(PARENTS, 2)
    whole, rows, _ = score(target, params, state, tree)
    staged, parts = target.stage(state, 8), []
    some = jax.jit(lambda staged, start, n: target.score(params, state, tree, staged, (start, n)), static_argnums=2)
    for start, n in ((0, 1), (1, 2), (3, 3), (6, 2)):
        output, staged, _ = some(staged, start, n)
        parts.append(output.logits)
    np.testing.assert_allclose(jnp.concatenate(parts, 1), whole.logits, atol=1e-5)
    for got, want in zip(jax.tree.leaves(staged), jax.tree.leaves(rows), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5)


@pytest.mark.parametrize("window", (None, 5))
def test_stacked_layers_equal_a_tuple(window):
    target, params = small(layers=3, taps=(0, 2, 3), sliding_window=window)
    stacked = llama.stack_layers(params)
    tree, outputs = tree_of(PARENTS, 2), []
    for p in (params, stacked):
        _, state = prefilled(target, p)
        output, staged, state = score(target, p, state, tree)
        path = jnp.asarray([[0, 1, 4, 6]] * 2)
        state = commit(target, state, target.widen(staged, 12), path, jnp.asarray([4, 2]))
        state = target.insert(state, jnp.asarray([1, 7]), target.take(state, jnp.asarray([0, 0])))
        after = score(target, p, target.release(state, jnp.asarray([0])), tree)[0].logits
        outputs.append((output.logits, output.features, after))
    for a, b in zip(*outputs, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    assert outputs[0][1].shape == (2, 8, 3, 32)


def test_a_ring_is_read_as_the_whole_text_is():
    """Rows that move, too; and frequencies that depend on a text's room, not on the slots that are kept."""
    rope = RopeConfig("dynamic", factor=4.0)
    target, params = small(sliding_window=7, rope=rope, max_position_embeddings=32)
    tokens, ring = prefilled(target, params)
    unbounded = dataclasses.replace(target, config=dataclasses.replace(target.config, sliding_window=None))
    whole = prefill(target, params, unbounded.init_state(params, 2, 200), tokens, jnp.asarray([29, 25]))[1]
    assert ring.k[0].shape[2] == 8 and whole.k[0].shape[2] == 200 and ring.room == whole.room

    @jax.jit
    def after(state, tree):
        output, staged, state = target.score(params, state, tree)
        state = target.commit(state, staged, jnp.asarray([[0, 1, 4, 6]] * 2), jnp.asarray([3, 1]))
        return output.logits, target.insert(state, jnp.asarray([0, 1]), target.take(state, jnp.asarray([1, 0])))

    for seed in range(4):
        tree = tree_of(PARENTS, 2, seed)
        (logits, ring), (want, whole) = after(ring, tree), after(whole, tree)
        np.testing.assert_allclose(logits, want, atol=1e-5)


def test_taps_are_hidden_states_as_transformers_counts_them():
    torch, model, config, params = reference()
    tokens = jnp.asarray(np.random.default_rng(1).integers(0, 97, (1, 9)), jnp.int32)
    target = llama.Llama(config, taps=(0, 1, 2))
    features = score(target, params, target.init_state(params, 1, 32), chain_tree(tokens))[0].features
    with torch.inference_mode():
        hidden = model(torch.tensor(np.asarray(tokens)), output_hidden_states=True).hidden_states
    for i in range(3):
        np.testing.assert_allclose(features[0, :, i], hidden[i][0].numpy(), atol=1e-4)


def test_linear_leaves():
    rng = np.random.default_rng(0)
    x, kernel = jnp.asarray(rng.normal(size=(3, 16))), jnp.asarray(rng.normal(size=(16, 8)))
    dense = Dense(kernel, jnp.asarray(rng.normal(size=8)))
    a, b = jnp.asarray(rng.normal(size=(16, 2))), jnp.asarray(rng.normal(size=(2, 8)))
    merged = dataclasses.replace(dense, kernel=kernel + 0.5 * a @ b)
    np.testing.assert_allclose(LoRA(dense, a, b, jnp.float32(0.5))(x), merged(x), atol=1e-4)
    rounded = quantize_int8(dense)
    step = np.abs(np.asarray(kernel)).max(0) / 127
    assert (np.abs(np.asarray(rounded.kernel * rounded.scale - kernel)) <= step / 2 + 1e-6).all()
    np.testing.assert_allclose(rounded(x), Dense(rounded.kernel * rounded.scale, dense.bias)(x), atol=1e-4)


def test_quantised_and_lora_leaves_run_in_the_model():
    target, params = small()
    layer = params.layers[0]
    zero = LoRA(layer.q, jnp.ones((32, 2)), jnp.zeros((2, 32)), jnp.float32(1.0))
    swapped = dataclasses.replace(params, layers=(dataclasses.replace(layer, q=zero), *params.layers[1:]))
    _, state = prefilled(target, params)
    tree = tree_of(PARENTS, 2)
    want = score(target, params, state, tree)[0].logits
    np.testing.assert_allclose(score(target, swapped, state, tree)[0].logits, want, atol=1e-6)
    low = dataclasses.replace(layer, up=quantize_int8(layer.up))
    low = dataclasses.replace(params, layers=(low, *params.layers[1:]))
    assert 0 < float(jnp.abs(score(target, low, state, tree)[0].logits - want).max()) < 0.5
