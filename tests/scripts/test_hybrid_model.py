"""The small hybrid's sizes and export: what is written is the model that was trained, for us and for transformers."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers

from scripts.hybrid import export, objective, shape
from scripts.hybrid.vocabulary import EOS
from spec_jax.models import mtp, qwen_text
from spec_jax.models.load import load_target

SMALL = shape.config(
    "vocab_size=97 hidden_size=32 num_hidden_layers=2 full_attention_interval=2 head_dim=16 linear_key_head_dim=8 "
    "linear_value_head_dim=16 num_experts=4 moe_intermediate_size=16 shared_expert_intermediate_size=24".split()
)
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, SMALL.vocab_size, (2, 73)), jnp.int32)
T = 70


@pytest.fixture(scope="module")
def params():
    """Fresh parameters, every one of them moved, so that none hides behind a zero or a one."""
    fresh = qwen_text.init_params(SMALL, jax.random.key(0), scale=None, memory=(10.0, 1000.0))
    leaves, tree = jax.tree.flatten(fresh)
    rng = np.random.default_rng(1)
    return jax.tree.unflatten(tree, [x + jnp.asarray(0.1 * rng.normal(size=x.shape), x.dtype) for x in leaves])


@pytest.fixture(scope="module")
def text(params):
    """Over two chunks of the gated delta rule."""
    return jax.jit(qwen_text.forward_text, static_argnums=0)(SMALL, params, TOKENS[:, :T])


@pytest.fixture(scope="module")
def directory(params, tmp_path_factory):
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({EOS: 0, "a": 1}, []))
    backend.add_special_tokens([EOS])
    directory = tmp_path_factory.mktemp("exported")
    export.save(directory, params, SMALL, backend, np.float32)
    return directory


def test_logits_are_those_of_transformers(text, directory):
    torch = pytest.importorskip("torch", reason="the implementation that ours is compared with")
    transformers = pytest.importorskip("transformers", reason="the implementation that ours is compared with")
    model, info = transformers.Qwen3NextForCausalLM.from_pretrained(directory, output_loading_info=True)
    assert not info["missing_keys"] and all(name.startswith("mtp.") for name in info["unexpected_keys"])
    with torch.no_grad():
        expected = model(torch.tensor(np.asarray(TOKENS[:, :T]))).logits.numpy()
    np.testing.assert_allclose(text.logits, expected, atol=2e-4)
    assert np.abs(expected).max() > 1


def test_what_is_written_is_read_back(params, directory):
    loaded = load_target(directory, stacked=False, transposed=False)
    assert loaded.target.config == SMALL and loaded.eos_token_ids == (0,)
    assert jax.tree.structure(loaded.params) == jax.tree.structure(params)
    for a, b in zip(jax.tree.leaves(loaded.params), jax.tree.leaves(params), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-7)  # norms are 1 + w here and w there
    fields = json.loads((directory / "config.json").read_text())
    assert fields["full_attention_interval"] == 2 and fields["num_hidden_layers"] == 2


def test_numbers_that_a_type_cannot_hold_are_refused(params, tmp_path):
    huge = jax.tree.map(lambda x: 1e6 * x, params)
    with pytest.raises(ValueError, match=r"params: .* has numbers that float16 can't hold"):
        export.save(tmp_path, huge, SMALL, tokenizers.Tokenizer(tokenizers.models.BPE()), np.float16)


def test_the_measure_is_a_count_over_places(params, text):
    """Losses and agreements of batches, against the formulas, from the logits of the model and of its head's steps."""
    figures = objective.measure(SMALL, params, np.asarray(TOKENS)[None], 2.0)
    context = qwen_text.final_norm(SMALL, params, text.hidden)
    steps, _ = jax.jit(mtp.forward_steps, static_argnums=(0, 4))(SMALL, params, context, TOKENS[:, 1 : T + 2], 2)
    places, want = T - 2, {}

    def nats(logits, ahead):
        law, next_ones = jax.nn.log_softmax(logits[:, :places]), TOKENS[:, ahead : ahead + places, None]
        return -np.take_along_axis(np.asarray(law), np.asarray(next_ones), -1).mean()

    want["held_out_loss"] = nats(text.logits, 1)
    want["held_out_bits"] = want["held_out_loss"] / np.log(2) / 2.0
    choice = text.logits.argmax(-1)
    for s, step in enumerate(steps, 1):
        want[f"mtp_{s}_nats"] = nats(step.logits, s + 1)
        want[f"mtp_{s}_agrees"] = np.mean(step.logits[:, :places].argmax(-1) == choice[:, s : s + places])
    assert figures.keys() == want.keys()
    for name, value in want.items():
        assert figures[name] == pytest.approx(float(value), rel=1e-5), name


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("linear_num_value_heads=3", "linear_num_value_heads is 3"),
        ("num_experts_per_tok=9", "num_experts_per_tok is 9"),
        ("head_dim=2", "rotary_dim is 1"),
        ("hidden_size=big", "--size: got 'hidden_size=big', takes NAME=NUMBER"),
        ("mtp=1", "--size: got 'mtp=1', takes NAME=NUMBER"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(entry, message):
    with pytest.raises(ValueError, match=message):
        shape.config([entry])
