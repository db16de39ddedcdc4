"""Our parameters in Tunix's models: one state whatever form they come in, the same logits, and what does not fit."""

import dataclasses
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytestmark = pytest.mark.filterwarnings("default")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("tunix", reason="needs google-tunix (the extra rl)")
    from flax import nnx
    from tunix.models.llama3 import model as llama3
    from tunix.models.qwen3 import model as qwen3

    from scripts.grpo import tunix_model
    from spec_jax.rollout.tunix_state import settings_of, state_of

from scripts.grpo.policy import logits  # noqa: E402
from spec_jax.models import layers, linear  # noqa: E402
from spec_jax.models.config import LlamaConfig, RopeConfig  # noqa: E402
from spec_jax.models.llama import Llama  # noqa: E402
from spec_jax.models.load import abstract_params  # noqa: E402
from spec_jax.models.qwen import Qwen  # noqa: E402
from spec_jax.models.qwen_config import ATTENTION, QwenConfig  # noqa: E402

SIZES = dict(vocab_size=30, hidden_size=16, intermediate_size=24, num_heads=2, num_kv_heads=1, head_dim=8)
LLAMA = LlamaConfig(**SIZES, num_layers=2, rope=RopeConfig(theta=1e6), tie_word_embeddings=True)
QWEN = QwenConfig(**SIZES, layer_types=(ATTENTION,) * 2, sparse=(False,) * 2, rope=RopeConfig(theta=1e6))
MODULES = {"Llama3": llama3, "Qwen3": qwen3}
CASES = {
    "llama3": ("Llama3", LLAMA),
    "llama3_head": ("Llama3", dataclasses.replace(LLAMA, tie_word_embeddings=False)),
    "qwen3": ("Qwen3", QWEN),
    "qwen3_tied": ("Qwen3", dataclasses.replace(QWEN, tie_word_embeddings=True)),
}
TOKENS = jnp.asarray(np.random.default_rng(1).integers(0, 30, (2, 20)))


def drawn(config):
    rng = np.random.default_rng(0)
    draw = lambda x: jnp.asarray(rng.normal(x.ndim == 1, 0.4, x.shape), x.dtype)  # noqa: E731
    return jax.tree.map(draw, abstract_params(config))


def empty(family, config):
    model = getattr(MODULES[family], family)(
        MODULES[family].ModelConfig(**settings_of(family, config)), rngs=nnx.Rngs(0)
    )
    return model, nnx.state(model, nnx.Param)


def theirs(model):
    n = TOKENS.shape[1]
    mask = jnp.broadcast_to(jnp.tril(jnp.ones((n, n), bool)), (2, n, n))
    return model(TOKENS, jnp.broadcast_to(jnp.arange(n), TOKENS.shape), None, mask)[0]


def ours(config, params):
    return logits(Qwen(config) if isinstance(config, QwenConfig) else Llama(config), params, TOKENS)


@pytest.mark.parametrize("name", CASES)
def test_logits_are_ours_in_every_form(name):
    family, config = CASES[name]
    params, (model, state) = drawn(config), empty(family, config)
    names = nnx.to_pure_dict(state)
    forms = (
        params,
        linear.transposed(params, jnp.transpose),
        dataclasses.replace(params, layers=layers.stack(params.layers, 1)),
    )
    first, *others = (state_of(model, form, names) for form in forms)
    for other in others:
        jax.tree.map(np.testing.assert_array_equal, first, other)
    where = lambda tree: {x.unsafe_buffer_pointer() for x in jax.tree.leaves(tree)}  # noqa: E731
    assert where(first).isdisjoint(where(params))
    nnx.replace_by_pure_dict(state, first)
    nnx.update(model, state)
    np.testing.assert_allclose(theirs(model), ours(config, params), rtol=0, atol=1e-4)


def test_a_llama_rotates_by_its_own_base():
    """One class does; Tunix's own, of the same parameters, is another model, before and after."""
    config = dataclasses.replace(LLAMA, rope=RopeConfig(theta=100.0))
    params = drawn(config)
    own = tunix_model.model_of(Llama(config), params)
    plain, state = empty("Llama3", config)
    nnx.update(plain, nnx.state(own, nnx.Param))
    want = ours(config, params)
    first, got, last = (np.asarray(theirs(m)) for m in (plain, own, plain))
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-4)
    np.testing.assert_array_equal(first, last)
    assert abs(first - want).max() > 1e-2
    with pytest.raises(ValueError, match="rope_theta"):
        tunix_model.model_of(Qwen(dataclasses.replace(QWEN, rope=config.rope)), None)


def test_what_is_no_such_model_is_refused():
    for family, config in (
        ("Qwen2", LLAMA),
        ("Llama3", dataclasses.replace(LLAMA, sliding_window=4)),
        ("Llama3", dataclasses.replace(LLAMA, rope=RopeConfig(theta=10.5))),
        ("Qwen3", dataclasses.replace(QWEN, output_gate=True)),
    ):
        with pytest.raises(ValueError, match="family" if family == "Qwen2" else "config"):
            settings_of(family, config)
    model, state = empty("Llama3", LLAMA)
    state = nnx.to_pure_dict(state)
    wrong = {"takes 20": {"tie_word_embeddings": False}, "embedding.table": {"vocab_size": 31}}
    for message, changes in wrong.items():
        with pytest.raises(ValueError, match=message):
            state_of(model, drawn(dataclasses.replace(LLAMA, **changes)), state)
    with pytest.raises(ValueError, match="got a Gemma3"):
        state_of(type("Gemma3", (), {})(), drawn(LLAMA), state)
