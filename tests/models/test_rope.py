import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.models.config import LlamaConfig, RopeConfig
from spec_jax.models.rope import inverse_frequencies, rotate

HEADS, HEAD_DIM, TRAINED = 4, 16, 128
KINDS = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 3.0},
    "llama3": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 32},
    "yarn-all": {
        "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 8, "beta_slow": 2.0, "mscale": 0.7,
        "mscale_all_dim": 0.4, "truncate": False,
    },
    "yarn-attention": {"factor": 40.0, "original_max_position_embeddings": 32, "attention_factor": 1.25},
    "longrope": {
        "original_max_position_embeddings": 32, "factor": 4.0,
        "short_factor": [1.0 + i / 8 for i in range(8)], "long_factor": [1.5 + i for i in range(8)],
    },
}  # fmt: skip


def _configs(kind):
    transformers = pytest.importorskip("transformers", reason="the reference")
    rope = {"rope_type": kind.split("-")[0], "rope_theta": 2e4} | KINDS[kind]
    reference = transformers.LlamaConfig(
        vocab_size=8, hidden_size=HEADS * HEAD_DIM, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=HEADS, max_position_embeddings=TRAINED, rope_parameters=dict(rope),
    )  # fmt: skip
    return reference, LlamaConfig.from_hf(reference.to_dict() | {"rope_parameters": rope})


@pytest.mark.parametrize("length", [20, 100, 300])
@pytest.mark.parametrize("kind", KINDS)
def test_a_text_that_fills_its_state_rotates_as_in_transformers(kind, length):
    torch = pytest.importorskip("torch", reason="the reference")
    from transformers.models.llama import modeling_llama

    reference, config = _configs(kind)
    q = np.random.default_rng(0).standard_normal((2, length, HEADS, HEAD_DIM)).astype(np.float32)
    positions = np.arange(length)[None].repeat(2, 0)
    cos, sin = modeling_llama.LlamaRotaryEmbedding(reference)(torch.tensor(q), torch.tensor(positions))
    expected, _ = modeling_llama.apply_rotary_pos_emb(torch.tensor(q), torch.tensor(q), cos, sin, unsqueeze_dim=2)
    frequencies, factor = inverse_frequencies(config.rope, HEAD_DIM, TRAINED, length)
    assert frequencies.dtype == np.float32
    assert frequencies.shape == (HEAD_DIM // 2,)
    actual = rotate(jnp.asarray(q), jnp.asarray(positions), frequencies, factor)
    # a unit in the last place of a frequency, 1.2e-7 of it, turns the farthest position by 4e-5
    np.testing.assert_allclose(actual, expected.numpy(), atol=2e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_frequencies_equal_those_of_transformers(kind):
    pytest.importorskip("torch", reason="the reference")
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    reference, config = _configs(kind)
    module = LlamaRotaryEmbedding(reference)
    frequencies, factor = inverse_frequencies(config.rope, HEAD_DIM, TRAINED)
    np.testing.assert_allclose(frequencies, module.inv_freq.numpy(), rtol=5e-7)
    assert factor == pytest.approx(module.attention_scaling, rel=1e-12)


@pytest.mark.parametrize(("kind", "trained"), [("dynamic", TRAINED), ("longrope", 32)])
def test_only_a_state_over_the_trained_length_changes_the_frequencies(kind, trained):
    _, config = _configs(kind)
    at = lambda length: inverse_frequencies(config.rope, HEAD_DIM, TRAINED, length)[0]  # noqa: E731
    np.testing.assert_array_equal(at(None), at(trained))
    np.testing.assert_array_equal(at(1), at(trained))
    assert not np.array_equal(at(trained), at(trained + 1))


def test_half_precision_is_rotated_in_float32():
    frequencies, factor = inverse_frequencies(RopeConfig(), HEAD_DIM, TRAINED)
    x = jnp.asarray(np.random.default_rng(0).standard_normal((7, 2, HEAD_DIM)), jnp.bfloat16)
    exact = rotate(x.astype(jnp.float32), jnp.arange(7), frequencies, factor)
    rotated = rotate(x, jnp.arange(7), frequencies, factor)
    assert rotated.dtype == jnp.bfloat16
    np.testing.assert_array_equal(rotated, exact.astype(jnp.bfloat16))


def test_scores_depend_on_the_distance_only():
    frequencies, factor = inverse_frequencies(RopeConfig(), HEAD_DIM, TRAINED)
    rng = np.random.default_rng(0)
    q, k = (jnp.asarray(rng.standard_normal((1, 1, HEAD_DIM)), jnp.float32) for _ in range(2))
    score = lambda i, j: jnp.vdot(  # noqa: E731
        rotate(q, jnp.array([i]), frequencies, factor), rotate(k, jnp.array([j]), frequencies, factor)
    )
    np.testing.assert_allclose(score(9, 4), score(105, 100), rtol=1e-5)
