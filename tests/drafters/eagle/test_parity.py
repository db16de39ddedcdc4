"""Against `speculators` (torch) and transformers' own layer, on small random checkpoints: logits of every step, and
accepted tokens of every round."""

import copy
import functools
import importlib

import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.drafters.eagle import head, weights
from spec_jax.drafters.eagle.text import text_steps
from spec_jax.engine.engine import Engine, EngineParams
from spec_jax.engine.requests import request
from spec_jax.models import llama as models
from spec_jax.sampling.constraint import free
from tests.drafters.block import kit
from tests.drafters.block.kit import LLAMA, H, V, llama
from tests.drafters.eagle.kit import KEPT, MASK
from tests.faults.kit import jit

torch = pytest.importorskip("torch", reason="the reference implementations are written in torch")
pytestmark = pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")  # by the package's call
T, STEPS = 8, 3
FIELDS = {
    "vocab_size": V, "hidden_size": H, "intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 4, "max_position_embeddings": 64, "rms_norm_eps": 1e-6,
}  # fmt: skip
KINDS = {
    "llama": ("llama", 1, {}),
    "llama small": ("llama", 1, {"draft_vocab_size": len(KEPT), "norm_before_residual": True}),
    "qwen3 each, output normed": ("qwen3", 1, {"fc_norm": True, "norm_output": True}),
    "two layers, all normed": ("qwen3", 2, {"norm_before_fc": True}),
}


def randomised(model, seed=0):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in sorted(model.named_parameters()):
            p.copy_(torch.randn(p.shape, generator=generator) * 0.3 + (1.0 if "norm" in name else 0.0))
    return model.eval()


def texts(taps, seed=4):
    """Features [1, T + 1, taps, H] and tokens [1, T + 1]: what the package calls input i is token i + 1."""
    rng = np.random.default_rng(seed)
    features = rng.normal(0, 1, (1, T + 1, taps, H)).astype(np.float32)
    return features, rng.integers(0, V - 1, (1, T + 1))


@functools.cache
def reference(kind, package="eagle3"):
    """A random head of the package, its config's fields, and the tensors that it would save."""
    pytest.importorskip("speculators", reason="the PyPI package speculators is not installed (it needs --no-deps)")
    import transformers

    family, layers, settings = KINDS[kind]
    name = {"eagle3": "Eagle3", "peagle": "PEagle"}[package]
    layer = {"llama": transformers.LlamaConfig, "qwen3": transformers.Qwen3Config}[family]
    layer = layer(**FIELDS, num_hidden_layers=layers)
    layer._attn_implementation = "eager"
    module = importlib.import_module(f"speculators.models.{package}")
    own = {"mask_token_id": MASK} if package == "peagle" else {}
    config = getattr(module, f"{name}SpeculatorConfig")(
        transformer_layer_config=layer,
        eagle_aux_hidden_state_layer_ids=[1, 2, 3],
        **({"draft_vocab_size": V} | settings | own),
    )
    model = randomised(getattr(module, f"{name}DraftModel")(config))
    if config.draft_vocab_size != V:
        mask = np.isin(np.arange(V), KEPT)
        model.load_vocab_mappings(torch.tensor(mask), torch.tensor(np.array(KEPT) - np.arange(len(KEPT))))
    tensors = {n: x.numpy() for n, x in model.state_dict().items() if not n.startswith("verifier_")}
    return model, config.to_dict(), tensors


def logits_of(model, *inputs, **settings):
    """Logits of every pass through the head."""
    seen = []
    hook = model.lm_head.register_forward_hook(lambda _, __, out: seen.append(out.detach().numpy()[0]))
    with torch.no_grad():
        model(*inputs, **settings)
    hook.remove()
    return seen


def ours(fields, tensors, features, tokens, anchors, steps):
    target, params = llama()
    config, own = weights.from_tensors("here", fields, tensors, target, params)
    at = np.minimum(anchors[:, None] + 1 + np.arange(steps), tokens.shape[1] - 1)
    run = jit(lambda f, t, b: text_steps(config, own, f, t, jnp.asarray(anchors)[None], b).logits)
    return np.asarray(run(jnp.asarray(features), jnp.asarray(tokens), jnp.asarray(tokens[:, at])))[0]


@pytest.mark.parametrize("kind", KINDS)
def test_eagle3_logits_are_those_of_speculators(kind):
    model, fields, tensors = reference(kind)
    features, tokens = texts(3)
    want = logits_of(
        model,
        torch.tensor(features[:, :T].reshape(1, T, -1)),
        torch.tensor(tokens[:, 1:]),
        torch.zeros(1, T, dtype=torch.long),
        ttt_steps=STEPS,
    )
    rows = np.arange(T - STEPS + 1)  # from here on the package's shifted inputs run out of text
    got = ours(fields, tensors, features, tokens, rows + 1, STEPS)
    for step in range(STEPS):
        np.testing.assert_allclose(got[:, step], want[step][rows], atol=1e-4)


def rounds(model, whole, text, room, k):
    """A greedy loop around the package's module: the text up to `room`, and how many tokens each round added.

    Everything is computed anew for every token: `whole(text)` are the target's features and choices behind every token
    (numpy), and step d of the module, fed with true features up to the anchor and with what was drafted, is the
    logits of draft d.
    """
    text, added = list(text), []
    while (place := len(text)) < room:
        features, drafted = whole(text)[0], []
        for d in range(k):
            tokens = [*text[1:], *drafted]
            hidden = np.zeros((1, len(tokens), features[0].size), np.float32)
            hidden[0, : place - 1] = features[: place - 1].reshape(place - 1, -1)
            inputs = (torch.tensor(hidden), torch.tensor([tokens]), torch.zeros(1, len(tokens), dtype=torch.long))
            drafted.append(KEPT[logits_of(model, *inputs, ttt_steps=d + 1)[d][place - 2].argmax()])
        chosen = whole([*text, *drafted])[1][place - 1 :]
        right = int(np.cumprod([a == b for a, b in zip(drafted, chosen, strict=False)]).sum())
        text = [*text, *drafted[:right], int(chosen[right])][:room]
        added.append(len(text) - place)
    return text, added


@pytest.mark.slow
def test_rounds_accept_as_many_tokens_as_a_loop_around_speculators():
    """Greedy chains over three layers' features, a reduced vocabulary, several rounds: the same counts in each."""
    k, room = 3, 30
    model, fields, tensors = reference("llama small")
    found = kit.tensors()
    found["lm_head.weight"][4:] *= 0.05  # few tokens come up, so that a random drafter is right at times
    tensors = tensors | {"lm_head.weight": tensors["lm_head.weight"] * np.where(np.array(KEPT) < 4, 1, 0.05)[:, None]}
    model = copy.deepcopy(model)
    model.lm_head.weight.data.copy_(torch.tensor(tensors["lm_head.weight"]))
    params = models.from_tensors(LLAMA, found)
    config, own = weights.from_tensors("here", fields, tensors, llama()[0], params)
    target = head.tapped(config, llama()[0])
    assert target.taps[-1] == LLAMA.num_layers  # the last hidden state, which the choices are computed from
    state = target.init_state(params, 1, room + k)
    length = jnp.full(1, room + k)
    features = jit(lambda text: target.prefill(params, state, text, length)[0][0])

    def whole(text):
        taps = np.asarray(features(jnp.asarray([[*text, *[0] * (room + k - len(text))]])))[: len(text)]
        last = taps[:, -1] / np.sqrt(np.square(taps[:, -1]).mean(-1, keepdims=True) + LLAMA.rms_norm_eps)
        return taps, (last * found["model.norm.weight"] @ found["lm_head.weight"].T).argmax(-1)

    engine = Engine(target, room, drafter=head.drafter(config, head.chain(k, "point")), prefill_chunk=8)
    together, counts = EngineParams(params, own, free(V), jnp.ones(1)), []
    for prompt in kit.PROMPTS:
        begun = [*prompt, int(whole(prompt)[1][-1])]
        text, added = rounds(model, whole, begun, room, k)
        state_of = kit.begin(engine, together, request(engine, begun, room - len(begun)))
        emitted = []
        while state_of.rows.running.any():
            before = int(state_of.rows.length[0])
            state_of = kit.go_on(engine, together, state_of, 1)
            emitted.append(int(state_of.rows.length[0]) - before)
        assert state_of.rows.tokens[0].tolist() == text and emitted == added
        counts += added
    assert sum(n > 1 for n in counts) > 2 and len(counts) > 20, counts


def test_p_eagle_logits_are_those_of_speculators(monkeypatch):
    model, fields, tensors = reference("two layers, all normed", "peagle")
    features, tokens = texts(3)
    chains = np.array([1, 4])
    anchor = np.concatenate([np.arange(T), *[chains] * (STEPS - 1)])
    depth = np.concatenate([np.zeros(T, int), *[np.full(2, d) for d in range(1, STEPS)]])
    core = importlib.import_module("speculators.models.peagle.core")
    sampled = lambda **_: (torch.tensor(anchor), torch.tensor(depth))  # noqa: E731
    monkeypatch.setattr(core, "generate_cod_sample_indices", sampled)
    monkeypatch.setattr(core, "compute_metrics", lambda **_: (None, {}))  # its losses need Triton
    inputs = (torch.tensor(features[:, :T].reshape(1, T, -1)), torch.tensor(tokens[:, 1:]))
    last = torch.zeros(1, T, H)
    (want,) = logits_of(model, *inputs, torch.zeros(1, T, dtype=torch.long), verifier_last_hidden_states=last)
    got = ours(fields, tensors, features, tokens, chains + 1, STEPS)
    np.testing.assert_allclose(got[:, 0], want[chains], atol=1e-4)
    np.testing.assert_allclose(got[:, 1:], want[T:].reshape(STEPS - 1, 2, V).swapaxes(0, 1), atol=1e-4)


def test_eagle1_logits_are_those_of_a_llama_layer_without_norms_at_its_ends():
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    model = transformers.LlamaModel(transformers.LlamaConfig(**FIELDS, num_hidden_layers=1))
    model.layers[0].input_layernorm = model.norm = torch.nn.Identity()
    model.fc = torch.nn.Linear(2 * H, H)
    randomised(model)
    target = llama()[1]
    fields = {**FIELDS, "num_hidden_layers": 1, "model_type": "llama", "architectures": ["LlamaForCausalLMEagle"]}
    tensors = {name: x.numpy() for name, x in model.state_dict().items()}
    features, tokens = texts(1)
    got = ours(fields, tensors, features, tokens, np.arange(1, T + 1), 1)
    state = (
        target.norm
        * features[:, :T, 0]
        / np.sqrt(np.square(features[:, :T, 0]).mean(-1, keepdims=True) + LLAMA.rms_norm_eps)
    )
    with torch.no_grad():
        both = torch.cat([model.embed_tokens(torch.tensor(tokens[:, 1:])), torch.tensor(np.array(state))], dim=-1)
        out = model(inputs_embeds=model.fc(both)).last_hidden_state[0].numpy()
    np.testing.assert_allclose(got[:, 0], out @ np.asarray(target.head.kernel), atol=1e-4)
