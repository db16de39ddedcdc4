"""The Tunix engine: the actor's arrays in place, Tunix's own logits and conventions."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytestmark = pytest.mark.filterwarnings("default")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("tunix", reason="needs google-tunix (the extra rl)")
    import qwix
    from flax import nnx
    from tunix.models.gemma3 import model as gemma3
    from tunix.models.llama3 import model as llama3
    from tunix.models.qwen2 import model as qwen2
    from tunix.models.qwen3 import model as qwen3
    from tunix.rl import common
    from tunix.rl.rollout import base_rollout, vanilla_rollout

    from spec_jax.rollout import tunix_models
    from spec_jax.rollout.tunix import SpecRollout, grouped

from spec_jax.drafters.eagle.config import EagleConfig  # noqa: E402
from spec_jax.drafters.siblings import Siblings  # noqa: E402
from spec_jax.drafters.small_model import SmallModel  # noqa: E402
from spec_jax.engine.engine import Engine  # noqa: E402
from spec_jax.models import views  # noqa: E402
from spec_jax.rollout.log_probs import teacher_forced  # noqa: E402
from spec_jax.rollout.refresh import Refresh  # noqa: E402
from spec_jax.topology.growth import Growth  # noqa: E402
from spec_jax.train import heads  # noqa: E402
from spec_jax.train.objective import Objective  # noqa: E402
from spec_jax.train.task import Task  # noqa: E402

WORDS, EOS, PAD = 30, 1, 30  # a pad that is no token: Tunix takes pads out of the text wherever they stand
QUERY_NORM = gemma3.QueryPreAttentionNormalisation.BY_ONE_OVER_SQRT_EMBED_DIM_DIV_NUM_HEADS
SIZES = dict(num_layers=2, vocab_size=WORDS, embed_dim=16, hidden_dim=24, num_heads=2, head_dim=8, num_kv_heads=1)
BASE = dict(SIZES, rope_theta=10_000, norm_eps=1e-5)
MAKERS = {
    "llama3": lambda: llama3.Llama3(llama3.ModelConfig(**BASE, weight_tying=True), rngs=nnx.Rngs(0)),
    "llama3_head": lambda: llama3.Llama3(llama3.ModelConfig(**BASE), rngs=nnx.Rngs(0)),
    "qwen2": lambda: qwen2.Qwen2(qwen2.ModelConfig(**BASE), rngs=nnx.Rngs(0)),
    "qwen3": lambda: qwen3.Qwen3(qwen3.ModelConfig(**BASE, use_tied_embedding=True), rngs=nnx.Rngs(0)),
    "qwen3_moe": lambda: qwen3.Qwen3(qwen3.ModelConfig(**BASE, num_experts=4, num_experts_per_tok=2), rngs=nnx.Rngs(0)),
}


def gemma(**changes):
    sizes = {"num_embed" if k == "vocab_size" else k: v for k, v in SIZES.items()} | {"num_layers": 7}
    ropes = {"local_base_frequency": 100, "global_base_frequency": 10_000, "global_scale_factor": 2.0}
    settings = {**sizes, **ropes, "sliding_window_size": 5, "param_dtype": jnp.float32, **changes}
    return gemma3.Gemma3(gemma3.ModelConfig(**settings), rngs=nnx.Rngs(0))


MAKERS |= {"gemma3": gemma, "gemma3_heads": lambda: gemma(num_kv_heads=2, query_pre_attn_norm=QUERY_NORM)}


class Letters:
    """A tokenizer of single letters; end and begin are 1 and 2."""

    def encode(self, text, **_):
        return [3 + ord(c) - ord("a") for c in text]

    def decode(self, ids, **_):
        return "".join(chr(ord("a") + i - 3) for i in ids)

    def bos_id(self):
        return 2

    def eos_id(self):
        return EOS

    def pad_id(self):
        return PAD


def randomise(model, seed=0):
    """Biases and zero kernels too; far enough from uniform that texts repeat themselves."""
    rng = np.random.default_rng(seed)
    state = nnx.state(model, nnx.Param)
    draw = lambda x: jnp.asarray(rng.normal(1.0 if x.ndim == 1 and (x == 1).all() else 0.0, 0.4, x.shape), x.dtype)  # noqa: E731
    nnx.update(model, jax.tree.map(draw, state))
    return model


@functools.cache
def actor(name):
    return randomise(MAKERS[name]())


def config(**changes):
    settings = dict(max_tokens_to_generate=12, temperature=1.0, max_prompt_length=8, kv_cache_size=24)
    return base_rollout.RolloutConfig(**{**settings, "return_logprobs": True, **changes})


def logits(model, tokens):
    n = tokens.shape[1]
    mask = jnp.broadcast_to(jnp.tril(jnp.ones((n, n), bool)), (len(tokens), n, n))
    return model(tokens, jnp.broadcast_to(jnp.arange(n), tokens.shape), None, mask)[0]


@pytest.mark.parametrize("name", MAKERS)
def test_logits_are_tunix_own(name):
    model = actor(name)
    rollout = SpecRollout(model, Letters(), toggle=None)
    tokens = jnp.asarray(np.random.default_rng(1).integers(0, WORDS, (2, 20)))
    want = jax.nn.log_softmax(logits(model, tokens) / 0.7, axis=-1)[:, :-1]
    want = jnp.take_along_axis(want, tokens[:, 1:, None], axis=-1)[..., 0]
    got = teacher_forced(rollout._target, rollout._params(), tokens, jnp.array([20, 20]), 0.7)
    np.testing.assert_allclose(got[:, 1:], want, rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", MAKERS)
def test_arrays_are_not_copied(name):
    model = actor(name)
    own = {id(x) for x in jax.tree.leaves(nnx.to_pure_dict(nnx.state(model, nnx.Param)))}
    mapped = jax.tree.leaves(SpecRollout(model, Letters())._params())
    assert mapped and {id(x) for x in mapped} == own


def test_another_model_is_caught():
    """A norm's epsilon that is not the model's."""
    model = randomise(MAKERS["llama3"]())
    for layer in model.layers:
        layer.input_layernorm.norm_eps = 0.5
    with pytest.raises(ValueError, match="log-probs"):
        SpecRollout(model, Letters())


def small(target, max_len):
    return Engine(target, max_len, drafter=Siblings(nodes=4, longest=4, memory=64), prefill_chunk=8)


@pytest.fixture(scope="module")
def rollout():
    return SpecRollout(actor("llama3"), Letters(), build=small, sizes=(6,), toggle=None, key=3)


PROMPTS = ["abcab"] * 3 + ["hg"] * 3


def test_output_is_as_vanillas(rollout):
    """Shapes, pads and types of Tunix's own rollout; log-probs that its own function computes for these tokens."""
    got = rollout.generate(PROMPTS, config())
    cache = base_rollout.CacheConfig(24, 2, 1, 8)
    vanilla = vanilla_rollout.VanillaRollout(actor("llama3"), Letters(), cache).generate(PROMPTS, config())
    np.testing.assert_array_equal(got.left_padded_prompt_tokens, vanilla.left_padded_prompt_tokens)
    assert len(got.text) == len(got.tokens) == len(got.logprobs) == 6 and got.logits == vanilla.logits
    assert len({tuple(t) for t in got.tokens}) == 6
    for text, tokens, logs in zip(got.text, got.tokens, got.logprobs, strict=True):
        assert isinstance(tokens, np.ndarray) and tokens.shape == logs.shape and len(tokens) <= 12
        assert EOS not in tokens and text == Letters().decode(tokens)
    graph, state = nnx.split(actor("llama3"))
    padded = np.full((6, 12), PAD)
    for row, tokens in zip(padded, got.tokens, strict=True):
        row[: len(tokens)] = tokens
    given = (jnp.asarray(got.left_padded_prompt_tokens), jnp.asarray(padded))
    want = common.compute_per_token_logps(graph, state, *given, PAD, EOS)
    again = rollout.get_per_token_logps(*given)
    for row, logs in enumerate(got.logprobs):
        np.testing.assert_allclose(logs, want[row, : len(logs)], rtol=0, atol=2e-5)
        np.testing.assert_allclose(again[row, : len(logs)], want[row, : len(logs)], rtol=0, atol=2e-5)


def test_greedy_is_vanillas_greedy(rollout):
    cache = base_rollout.CacheConfig(24, 2, 1, 8)
    vanilla = vanilla_rollout.VanillaRollout(actor("llama3"), Letters(), cache)
    want = vanilla.generate(["abcab", "hg"], config(temperature=0.0, top_p=None))
    got = rollout.generate(["abcab", "hg"], config(temperature=0.0, top_p=None))
    for a, b, x, y in zip(got.tokens, want.tokens, got.logprobs, want.logprobs, strict=True):
        np.testing.assert_array_equal(a, b)
        np.testing.assert_allclose(x, np.asarray(y), rtol=0, atol=2e-5)


def test_new_parameters_and_lora():
    """All parameters, and LoRA pairs alone; the adapted model's logits are what rolls out."""
    base = randomise(MAKERS["qwen3"]())
    rules = qwix.LoraProvider(module_path=".*(q_proj|o_proj|gate_proj)", rank=2, alpha=4.0)
    model = qwix.apply_lora_to_model(base, rules, **base.get_model_input())
    with pytest.raises(ValueError, match="lora_scale"):
        SpecRollout(model, Letters())
    rollout = SpecRollout(model, Letters(), lora_scale=2.0, toggle=None)
    tokens = jnp.asarray(np.random.default_rng(1).integers(3, WORDS, (2, 12)))
    first = rollout.get_per_token_logps(tokens[:, :4], tokens[:, 4:])
    pairs = nnx.state(model, nnx.LoRAParam)
    assert len(jax.tree.leaves(pairs)) == 2 * 3 * 2
    other = jax.tree.map(lambda x: x + 0.3, pairs)
    rollout.update_params(other, (nnx.LoRAParam,))
    want = jax.nn.log_softmax(logits(model, tokens), axis=-1)[:, 3:-1]
    want = jnp.take_along_axis(want, tokens[:, 4:, None], axis=-1)[..., 0]
    got = rollout.get_per_token_logps(tokens[:, :4], tokens[:, 4:])
    np.testing.assert_allclose(got, want, rtol=0, atol=5e-5)
    assert abs(got - first).max() > 1e-2


def same(one, other):
    for a, b in zip(one.tokens, other.tokens, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("name", ["llama3_head", "qwen2", "gemma3", "gemma3_heads"])
def test_a_policy_in_eight_bits(name):
    """Every kernel of every layer is int8, whatever its layout, and the log-probs are nearly the actor's."""
    rollout = SpecRollout(actor(name), Letters(), toggle=None)
    params = rollout._params()
    low = views.int8(params)
    kernels = [x for x in jax.tree.leaves((low.layers, low.head)) if x.ndim > 1]
    assert len(kernels) >= 7 * len(low.layers) and {x.dtype for x in kernels} == {jnp.dtype(jnp.int8)}
    tokens = jnp.asarray(np.random.default_rng(1).integers(0, WORDS, (2, 20)))
    got, want = (teacher_forced(rollout._target, p, tokens, jnp.array([20, 20])) for p in (low, params))
    assert 0 < abs(got - want).mean() < 0.1


def low_bits(target, max_len):
    return Engine(target, max_len, drafter=SmallModel(target, 3, block=8), prefill_chunk=8)


def plain(target, max_len):
    return Engine(target, max_len, prefill_chunk=8)


def test_drafters_with_parameters():
    """The policy in eight bits drafts, made of every policy or given: texts are plain's, and drafts are accepted."""
    model = randomise(randomise(MAKERS["llama3"]()))  # the first time, norms are drawn around one
    settings = {"sizes": (6,), "toggle": None, "key": 3}
    make = lambda build, **options: SpecRollout(model, Letters(), build=build, **settings, **options)  # noqa: E731
    other = views.int8(make(plain)._params())
    rollouts = make(plain), make(low_bits, derive=views.int8), make(low_bits, drafter_params=other)
    lengths = []
    for seed in (0, 1):
        randomise(model, seed)
        want, *found = (r.generate(PROMPTS, config()) for r in rollouts)
        for got in found:
            same(got, want)
        lengths.append([r.last.acceptance_length for r in rollouts])
    assert lengths[0][1] == lengths[0][2] > 2 and lengths[1][1] > 2 > lengths[1][2]
    rollouts[2].update_drafter(views.int8(rollouts[2]._params()))
    same(rollouts[2].generate(PROMPTS, config()), rollouts[0].generate(PROMPTS, config()))
    assert rollouts[2].last.acceptance_length > 2
    with pytest.raises(ValueError, match="drafter_params: got some"):
        rollouts[1].update_drafter(other)
    with pytest.raises(ValueError, match="drafter_params, derive: got all"):
        make(low_bits, derive=views.int8, drafter_params=other)


def test_a_head_is_refreshed():
    """An EAGLE head behind the actor learns what each policy says; texts are plain's under every one."""
    model = randomise(MAKERS["llama3_head"]())
    c, settings = tunix_models.target_for(model).config, {"sizes": (6,), "toggle": None, "key": 3}
    sizes = {field: getattr(c, field) for field in ("vocab_size", "hidden_size", "num_heads", "head_dim")}
    forward = heads.EagleForward(EagleConfig(**sizes, intermediate_size=24, num_kv_heads=1, taps=(1, 2)), 2)
    drafter = forward.drafter(Growth(nodes=3, depth=2, width=1, children=1, candidates=4))

    def refresh(target, policy):
        task = Task(forward, forward.tapped(target), Objective(), anchors=8, steps=1)
        begun = forward.init(jax.random.key(0), policy)
        return Refresh(task, begun, length=24, capacity=6, rows=6, steps=100, rate=0.01)

    build = lambda target, n: Engine(forward.tapped(target), n, drafter=drafter, prefill_chunk=8)  # noqa: E731
    ours = SpecRollout(model, Letters(), build=build, refresh=refresh, **settings)
    theirs, lengths = SpecRollout(model, Letters(), build=plain, **settings), []
    for seed in (0, 0, 0, 1, 1, 1):
        randomise(model, seed)  # new arrays, even of the same policy
        got, want = (r.generate(PROMPTS, config(temperature=0.0, top_p=None)) for r in (ours, theirs))
        same(got, want)
        lengths.append(ours.last.acceptance_length)
    assert ours.refresh.programs == 2
    assert lengths[2] > lengths[0] + 0.3 and lengths[5] > lengths[3] + 0.3


def test_what_is_remembered_outlives_an_engine_and_a_process():
    """A call that asks for a longer text has a new engine; a rollout that is restored goes on like the one saved."""
    make = lambda: SpecRollout(actor("llama3"), Letters(), build=small, sizes=(6,), toggle=None, key=3)  # noqa: E731
    first, later = make(), make()
    with pytest.raises(ValueError, match="state: got no call so far"):
        first.state()
    first.generate(PROMPTS, config())
    before, memory = first.engine, jax.tree.map(np.array, first.engine.carried.memory)
    assert any(x.any() for x in jax.tree.leaves(memory))
    later.restore(first.state())
    same(first.generate(PROMPTS, config()), later.generate(PROMPTS, config()))
    assert first.last.acceptance_length == later.last.acceptance_length and first.engine is before
    memory = jax.tree.map(np.array, before.carried.memory)
    assert first._engine_for(6, 8, config(max_tokens_to_generate=24)) is not before
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.array, first.engine.carried.memory), memory)


def test_prompts_of_a_group_are_found():
    a, b = [1, 2], [3]
    assert grouped([a, a, b, b]) == ([a, b], 2)
    assert grouped([a, a, a, a, b, b]) == ([a, a, b], 2)
    assert grouped([a, b, a]) == ([a, b, a], 1)


def test_other_families_are_refused():
    class Gemma4:
        config = None

    with pytest.raises(ValueError, match="Gemma4"):
        tunix_models.target_for(Gemma4())
