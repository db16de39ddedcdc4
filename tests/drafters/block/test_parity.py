"""Against the published implementations, `dflash` and `speculators` (torch), on small random checkpoints."""

import dataclasses
import functools
import importlib

import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.drafters.block import network
from spec_jax.drafters.block.drafter import BlockDrafter, chain
from spec_jax.drafters.block.expander import teacher_logits
from spec_jax.drafters.block.heads.head import Plain
from spec_jax.drafters.block.heads.jacobi import Jacobi
from spec_jax.drafters.block.heads.markov import Markov
from spec_jax.drafters.block.heads.selector import Selector
from spec_jax.drafters.block.text import make_block, text_blocks
from spec_jax.drafters.block.weights import from_tensors, save_speculators
from spec_jax.drafters.files import read_directory
from spec_jax.engine.engine import Engine, EngineParams
from spec_jax.engine.requests import request
from spec_jax.models import llama
from spec_jax.models.linear import Dense
from spec_jax.sampling.constraint import free
from tests.drafters.block import kit

torch = pytest.importorskip("torch", reason="the reference implementations are written in torch")
B, T = 5, 7
FIELDS = dict(
    vocab_size=kit.V,
    hidden_size=kit.H,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=4,
    max_position_embeddings=64,
    rms_norm_eps=1e-6,
)
FULL, SLIDING = "full_attention", "sliding_attention"
SELECTOR = {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 6, "selector_top_k": 4}
KINDS = {
    "full": ("DFlashDraftModel", {"layer_types": [FULL, FULL]}, {}),
    "mixed, no is_causal": ("DFlashDraftModel", {"layer_types": [SLIDING, FULL], "sliding_window": 3}, {}),
    "causal": ("DFlashDraftModel", {"layer_types": [FULL, FULL], "is_causal": True}, {}),
    "DFlash 2": (
        "DFlash2DraftModel",
        {"layer_types": [SLIDING, SLIDING], "sliding_window": 3, "is_causal": False},
        SELECTOR,
    ),
    "DFlash 2, wide": (
        "DFlash2DraftModel",
        {"layer_types": [SLIDING, SLIDING], "sliding_window": 64, "is_causal": False},
        SELECTOR,
    ),
    "scaled": (
        "DFlashDraftModel",
        {"layer_types": [FULL, FULL]},
        {"output_multiplier": 0.5, "final_logit_softcapping": 3.0},
    ),
}


def randomised(model, seed=0):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in sorted(model.named_parameters()):
            p.copy_(torch.randn(p.shape, generator=generator) * 0.3 + (1.0 if name.endswith("norm.weight") else 0.0))
    return model.eval()


@functools.cache
def reference(kind, ids=(0, 2)):
    dflash = pytest.importorskip("dflash.model", reason="the PyPI package dflash is not installed")
    from transformers import Qwen3Config

    architecture, top, own = KINDS[kind]
    own = {"mask_token_id": kit.MASK, "target_layer_ids": list(ids), **own}
    settings = {**FIELDS, **top, "use_sliding_window": "sliding_window" in top}
    config = Qwen3Config(**settings, num_target_layers=3, block_size=B, dflash_config=own)
    model = randomised(getattr(dflash, architecture)(config))
    fields = {**config.to_dict(), "architectures": [architecture], **top}
    if "is_causal" not in top:
        fields.pop("is_causal", None)
    tensors = {name: x.numpy() for name, x in model.state_dict().items()}
    return model, fields, tensors


def tensor(x):
    return torch.tensor(np.array(x))


@pytest.mark.parametrize("kind", KINDS)
def test_draft_logits_are_those_of_dflash(kind):
    model, fields, tensors = reference(kind)
    target = kit.llama()[1]
    config, head, params = from_tensors("here", fields, tensors, target, 3)
    features = kit.features(1, T)
    anchor = jnp.array([3])
    inputs = network.slot_inputs(config, params.ends, anchor)
    k, v = network.context_rows(config, params.network, features, jnp.arange(T)[None], T + B)
    room = lambda x: jnp.pad(x.swapaxes(1, 2), ((0, 0), (0, 0), (0, B), (0, 0)))  # noqa: E731
    context = network.Context(tuple(map(room, k)), tuple(map(room, v)), jnp.array([T]), T + B)
    hidden = kit.jit(lambda x: network.draft_rows(config, params.network, x, context))(inputs)
    block = make_block(config, params, head, anchor, anchor, features[:, -1], hidden)
    with torch.no_grad():
        want = model(
            position_ids=torch.arange(T + B)[None],
            noise_embedding=tensor(inputs),
            target_hidden=tensor(features.reshape(1, T, -1)),
        )
        lm_head = torch.nn.Linear(kit.H, kit.V, bias=False)
        lm_head.weight.copy_(tensor(target.head.kernel).T)
        logits = model.compute_logits(want, lm_head)
    np.testing.assert_allclose(block.normed, want.numpy(), atol=1e-4)
    np.testing.assert_allclose(block.logits, logits[:, 1:].numpy(), atol=1e-4)
    if kind.startswith("DFlash 2"):
        tokens, candidates, _ = model.propose(want[:, 1:], torch.tensor([3]), lm_head, 0.0)
        path = jnp.concatenate([anchor[:, None], jnp.asarray(tokens.numpy())[:, :-1]], axis=1)
        ours = np.asarray(teacher_logits(head, params, block, path))
        assert (ours.argmax(-1) == tokens.numpy()).all()
        for d in range(B - 1):
            assert set(np.flatnonzero(ours[0, d] > -np.inf)) == set(candidates[0, d].tolist())


def hf_target(tensors):
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {n: FIELDS[n] for n in ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")}
    config = LlamaConfig(
        **sizes, num_hidden_layers=3, num_key_value_heads=2, head_dim=4, rms_norm_eps=1e-5, tie_word_embeddings=False
    )
    model = LlamaForCausalLM(config).eval()
    model.load_state_dict({name: tensor(x).float() for name, x in tensors.items()})
    return model


LONG = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("causal", "DFlash 2, wide")]


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("kind", ["full", *LONG])
def test_rounds_accept_as_many_tokens_as_dflashs(kind, monkeypatch):
    # transformers' last hidden state is normed, ours is not: published drafters read earlier ones
    model, fields, tensors = reference(kind, (0, 1))
    dflash = importlib.import_module("dflash.model")
    monkeypatch.setattr(dflash, "_cuda_time", lambda: 0.0)
    target, found = kit.llama()[0], kit.tensors()
    found["lm_head.weight"][4:] *= 0.2  # few tokens come up, so that a random drafter is right at times
    params = llama.from_tensors(kit.LLAMA, found)
    config, head, own = from_tensors("here", fields, tensors, params, 3)
    drafter = BlockDrafter(config, chain(config, head, "point"), head, block=8)
    engine = Engine(drafter.tapped(target), 40, drafter=drafter, prefill_chunk=8)
    counts = []
    for prompt in kit.PROMPTS:
        with torch.no_grad():
            stats = dflash.dflash_generate(
                model, hf_target(found), torch.tensor([prompt]), 40 - len(prompt), None, return_stats=True
            )
        text = stats.output_ids[0].tolist()
        begun = text[: len(prompt) + 1]  # its first token comes from the prompt's pass
        together = EngineParams(params, own, free(kit.V), jnp.ones(1))
        state = kit.begin(engine, together, request(engine, begun, 40 - len(begun)))
        emitted = []
        while state.rows.running.any():
            before = int(state.rows.length[0])
            state = kit.go_on(engine, together, state, 1)
            emitted.append(int(state.rows.length[0]) - before)
        assert state.rows.tokens[0].tolist() == text
        place = len(prompt) + np.cumsum([0, *emitted[:-1]])
        whole = int((place + B <= 40).sum())  # behind that, theirs drafts shorter blocks
        assert emitted[:whole] == stats.acceptance_lengths[:whole]
        counts += emitted[:whole]
    assert max(counts) > 1


def speculators(kind, **settings):
    """A random drafter of the package, and our reading of what it would save."""
    pytest.importorskip("speculators", reason="the PyPI package speculators is not installed")
    from transformers import Qwen3Config

    package = importlib.import_module(f"speculators.models.{kind}")
    name = {"dflash": "DFlash", "dspark": "DSpark", "xpress": "XPress", "dflash2": "DFlash2"}[kind]
    sliding = settings.pop("sliding", False)
    layer = Qwen3Config(**FIELDS, layer_types=[SLIDING if sliding else FULL] * 2, sliding_window=3 if sliding else None)
    layer._attn_implementation = "eager"
    config = getattr(package, f"{name}SpeculatorConfig")(
        transformer_layer_config=layer,
        block_size=B,
        aux_hidden_state_layer_ids=[1, 3],
        mask_token_id=kit.MASK,
        **({"draft_vocab_size": kit.V} | settings),
    )
    return randomised(getattr(package, f"{name}DraftModel")(config)), config


class Seen(Exception):  # noqa: N818
    """All that was wanted is known."""


SPECULATORS = {
    "dflash": {},
    "dspark": {"markov_rank": 6},
    "dspark gated": {"markov_rank": 6, "markov_head_type": "gated"},
    "dspark rnn": {"markov_rank": 6, "markov_head_type": "rnn"},
    "dspark small": {"markov_rank": 6, "draft_vocab_size": 12},
    "xpress": {"xpress_rank": 6},
    "dflash2": {"conv_group_size": 8, "selector_rank": 6, "selector_top_k": 4},
}


@pytest.mark.parametrize("name", SPECULATORS)
def test_draft_logits_are_those_of_speculators(name, monkeypatch):
    kind = name.split()[0]
    model, config = speculators(kind, **SPECULATORS[name])
    target = kit.llama()[1]
    rng = np.random.default_rng(4)
    tokens = rng.integers(0, kit.V - 1, (1, 16))
    small = config.draft_vocab_size != kit.V
    with torch.no_grad():
        model.embed_tokens.weight.copy_(tensor(target.embedding).T)
        if small:
            kept = np.sort(rng.permutation(kit.V)[: config.draft_vocab_size])
            mask = np.zeros(kit.V, bool)
            mask[kept] = True
            model.load_vocab_mappings(torch.tensor(mask), torch.tensor(kept - np.arange(len(kept))))
        else:
            model.lm_head.weight.copy_(tensor(target.head.kernel).T)
    ignored = ("embed_tokens.weight", "verifier_norm.weight", "verifier_lm_head.weight")
    tensors = {n: x.numpy() for n, x in model.state_dict().items() if n not in ignored}
    if not small:
        tensors = {n: x for n, x in tensors.items() if n not in ("lm_head.weight", "t2d", "d2t")}
    fields = config.to_dict()
    ours, head, params = from_tensors("here", fields, tensors, target, 3)
    features = kit.features(1, 16)
    seen = {}
    module = importlib.import_module(type(model).__module__)

    def spy(*args, **kwargs):
        seen["args"], seen["logits"] = args, args[0] if args else kwargs["unary_logits"]
        seen["ids"], seen["scores"] = kwargs.get("training_candidate_ids"), kwargs.get("candidate_logits")
        raise Seen

    anchors = np.array([2, 9])
    monkeypatch.setattr(module, "compute_metrics", spy)
    core = importlib.import_module("speculators.models.dflash.core")
    monkeypatch.setattr(core, "select_anchors", lambda *_: (torch.tensor(anchors), torch.ones(2, dtype=torch.bool)))
    last = torch.zeros(1, 16, kit.H)
    inputs = (tensor(features.reshape(1, 16, -1)), torch.tensor(tokens), torch.ones(1, 16), last)
    with torch.no_grad(), pytest.raises(Seen):
        model(*inputs, torch.zeros(1, 16, dtype=torch.long), max_anchors=2)
    at = jnp.asarray(anchors)[None]
    out = kit.jit(lambda f: text_blocks(ours, params, f, jnp.asarray(tokens), at, head))(features)
    want = seen["logits"].reshape(2, B, -1)[:, ours.first_slot :].numpy()
    got = np.asarray(out.base if kind == "dflash2" else out.logits)[0]
    np.testing.assert_allclose(got, want, atol=1e-4)
    if kind == "dflash2":
        slots = lambda x: x.reshape(2, B, -1)[:, 1:].numpy()  # noqa: E731
        ours = np.take_along_axis(np.asarray(out.logits)[0], slots(seen["ids"]), axis=-1)
        drafted = ours > -np.inf  # a candidate that training puts in is none here
        assert drafted[..., :-1].all()
        np.testing.assert_allclose(ours[drafted], slots(seen["scores"])[drafted], atol=1e-4)
    if kind == "dspark":
        path = jnp.asarray(np.stack([tokens[0, a : a + ours.depth] for a in anchors]))
        sure = head.confidence_logits(params, out.block, path)
        np.testing.assert_allclose(sure, seen["args"][2].reshape(2, B).numpy(), atol=1e-4)


@pytest.mark.parametrize("name", ("dflash", "dspark small", "xpress", "dflash2"))
def test_speculators_reads_what_we_write(name, tmp_path):
    kind = name.split()[0]
    model, config = speculators(kind, **SPECULATORS[name])
    head = {"dflash": Plain(), "dspark": Markov(6), "xpress": Jacobi(6), "dflash2": Selector(6, 4)}[kind]
    small = config.draft_vocab_size if config.draft_vocab_size != kit.V else None
    conv = {"conv_kernel_size": 2, "conv_group_size": 8} if kind == "dflash2" else {}
    c = kit.config(slots="shifted" if kind == "dspark" else "fill_in", draft_vocab_size=small, **conv)
    params = kit.params(c, head)
    if kind == "dspark":
        params = dataclasses.replace(params, head=dataclasses.replace(params.head, temperature=jnp.ones(c.depth)))
    if small:
        lm_head = Dense(jnp.zeros((kit.H, small)))
        params = dataclasses.replace(params, lm_head=lm_head, kept=jnp.arange(1, small + 1))
    save_speculators(tmp_path, c, head, params, {"name_or_path": None, "architectures": ["LlamaForCausalLM"]})
    fields, tensors = read_directory(tmp_path)
    read = type(config)(**fields)
    theirs = read.transformer_layer_config
    assert (theirs.hidden_size, theirs.num_hidden_layers, theirs.head_dim) == (kit.H, 2, 4)
    assert read.aux_hidden_state_layer_ids == [1, 3] and read.block_size == B
    assert read.sample_from_anchor == (c.slots == "shifted") and read.draft_vocab_size == c.logit_size
    found = model.load_state_dict({n: torch.tensor(x) for n, x in tensors.items()}, strict=False)
    targets = {"embed_tokens.weight", "lm_head.weight", "verifier_norm.weight", "verifier_lm_head.weight"}
    assert not found.unexpected_keys and set(found.missing_keys) <= targets
