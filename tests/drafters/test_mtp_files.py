"""MTP heads in directories, in every form: the parameters are the target's own, and what does not fit is named."""

import dataclasses
import functools
import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from scripts.drafting.begun import Earlier
from spec_jax import configs
from spec_jax.drafters import mtp, mtp_files
from spec_jax.drafters.files import write_directory
from spec_jax.drafters.load import load_drafter
from spec_jax.models import mtp as model
from spec_jax.models import qwen_tensors
from spec_jax.models.checkpoint import CheckpointError
from spec_jax.models.load import load_target
from spec_jax.models.qwen_text import final_norm
from spec_jax.train.heads import MtpForward
from spec_jax.train.recipe import Training
from tests.drafters.block.kit import llama
from tests.drafters.hybrid import hybrid
from tests.faults.kit import jit
from tests.faults.test_d26_weights import slips

VERIFIER = {"name_or_path": "somewhere", "architectures": ["Qwen3NextForCausalLM"]}
FORMS = ("checkpoint", "checkpoint, experts apart", "ours", "speculators")


@functools.cache
def published(fused):
    """The toy hybrid's config and tensors."""
    target, params = hybrid()
    return target.config.to_hf(), qwen_tensors.to_tensors(target.config, params, fused)


def checkpoint(folder, fused=True):
    """The toy hybrid as a published directory."""
    folder.mkdir(parents=True, exist_ok=True)
    write_directory(folder, *published(fused))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return checkpoint(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def loaded(folder):
    return load_target(folder)


def write(form, folder, target):
    """A directory with the target's head; its tensors by name."""
    if form == "ours":
        mtp_files.save(folder, target.target.config, target.params, "somewhere", steps=2)
    elif form == "speculators":
        mtp_files.save_speculators(folder, target.target.config, target.params, VERIFIER, steps=4)
    else:
        checkpoint(folder, fused=form == "checkpoint")
    return load_file(folder / "model.safetensors")


def same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(np.testing.assert_array_equal, a, b)
    assert [x.dtype for x in jax.tree.leaves(a)] == [x.dtype for x in jax.tree.leaves(b)]


@pytest.mark.parametrize("form", FORMS)
def test_parameters_are_those_of_the_targets_own_head(form, loaded, tmp_path):
    write(form, tmp_path, loaded)
    trained = load_drafter(tmp_path, loaded)
    same(trained.params, mtp.params(loaded.params))
    assert trained.params.embedding is loaded.params.embedding and trained.parts == {}
    assert trained.target == mtp.tapped(loaded.target)
    assert trained.drafter.depth == {"ours": 2, "speculators": 4}.get(form, 3)
    assert load_drafter(tmp_path, loaded, mtp.chain(5)).drafter == mtp.drafter(loaded.target, mtp.chain(5))


@pytest.mark.parametrize("settings", [{"transposed": False}, {"stacked": True}, {"dtype": jnp.bfloat16}], ids=str)
def test_they_are_stored_as_the_target_is(settings, folder, tmp_path):
    target = load_target(folder, **settings)
    for form in FORMS:
        write(form, tmp_path / form, target)
        trained = load_drafter(tmp_path / form, target, dtype=settings.get("dtype", jnp.float32))
        same(trained.params, mtp.params(target.params))


@pytest.mark.parametrize("form", FORMS)
def test_a_target_without_a_head_takes_one(form, loaded, tmp_path):
    write(form, tmp_path, loaded)
    config = dataclasses.replace(loaded.target.config, mtp=False)
    bare = types.SimpleNamespace(
        target=dataclasses.replace(loaded.target, config=config), params=dataclasses.replace(loaded.params, mtp=None)
    )
    trained = load_drafter(tmp_path, bare)
    same(trained.params, mtp.params(loaded.params))
    assert configs.build("mtp", trained.target, 64, **trained.parts).target == mtp.tapped(loaded.target)


@pytest.mark.parametrize("form", FORMS)
def test_what_is_missing_unused_or_misshapen_is_named(form, loaded, tmp_path):
    tensors = write(form, tmp_path, loaded)

    def load(_, folder):
        made = load_drafter(folder, loaded).params.mtp
        return [(jax.tree_util.keystr(at), np.asarray(x)) for at, x in jax.tree_util.tree_leaves_with_path(made)]

    # norms are kept as 1 + w by all but ours, so that numbers can't be followed there
    assert slips(form if form == "ours" else "hybrid with an MTP head", tmp_path, tensors, load) == []


@pytest.mark.parametrize(
    ("form", "change", "message"),
    [
        ("checkpoint", {"vocab_size": 15}, "model.embed_tokens.weight"),
        ("checkpoint", {"rope_parameters": {"rope_theta": 5.0}}, "another target: rope RopeConfig.*, not Rope"),
        ("checkpoint", {"num_experts_per_tok": 1}, "made for another target: num_experts_per_tok 1, not 2"),
        ("speculators", {"transformer_layer_config": {}}, "config.json: model_type"),
        ("speculators", {"num_nextn_predict_layers": 2}, "num_nextn_predict_layers is 2"),
        ("speculators", {"tree_size": 3}, "config.json has tree_size; taken: "),
        ("speculators", {"architectures": ["Eagle3Speculator"]}, "architectures is .*MTPSpeculator or MTPDraftModel"),
        ("ours", {"window": 4}, "config.json has window; taken: network, steps"),
        ("ours", {"steps": 0}, "network, steps: got"),
        ("ours", {"network": {"hidden_size": 16}}, "config.json: .*vocab_size"),
        ("ours", {"network": None}, "network, steps: got None and 2"),
    ],
)
def test_what_does_not_fit_is_refused(form, change, message, loaded, tmp_path):
    write(form, tmp_path, loaded)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(CheckpointError, match=message):
        load_drafter(tmp_path, loaded)


@pytest.mark.parametrize("form", FORMS)
def test_another_target_is_refused(form, loaded, tmp_path):
    write(form, tmp_path, loaded)
    with pytest.raises(CheckpointError, match="an MTP head of a Qwen model; the target is a Llama"):
        load_drafter(tmp_path, types.SimpleNamespace(target=llama()[0], params=llama()[1]))
    config = dataclasses.replace(loaded.target.config, hidden_size=24)
    wider = types.SimpleNamespace(target=dataclasses.replace(loaded.target, config=config), params=loaded.params)
    with pytest.raises(CheckpointError, match=f"^{tmp_path}: made for another target: hidden_size 16, not 24$"):
        load_drafter(tmp_path, wider)


def test_a_model_without_a_head_is_no_drafter(loaded, tmp_path):
    tensors = write("checkpoint", tmp_path, loaded)
    save_file({n: x for n, x in tensors.items() if not n.startswith("mtp.")}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"holds no mtp.\* tensors: a model without an MTP head"):
        load_drafter(tmp_path, loaded)
    with pytest.raises(ValueError, match="target: got parameters without an MTP head"):
        mtp_files.save(tmp_path, loaded.target.config, dataclasses.replace(loaded.params, mtp=None), "somewhere")


@pytest.mark.parametrize("dtype", (None, np.float16))
def test_a_trained_head_is_loaded_and_trained_on(dtype, loaded, tmp_path):
    forward = MtpForward(loaded.target.config, slots=4)
    moved = jax.tree.map(lambda x: 1.25 * x, forward.init(jax.random.key(0), loaded.params))
    whole = forward.as_drafter(moved, loaded.params)
    forward.save(tmp_path, whole, "toy", dtype)
    trained = load_drafter(tmp_path, loaded)
    if dtype is None:
        same(trained.params, whole)
    else:
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-6), trained.params, whole)
    assert trained.drafter.depth == 4 and trained.target.taps == forward.tapped(loaded.target).taps
    training = Training(steps=1, begin=str(tmp_path))
    same(Earlier.read(training, forward, loaded, tmp_path).begin, trained.params.mtp)


@pytest.fixture(scope="module")
def speculators():
    package = pytest.importorskip("speculators", reason="the PyPI package speculators is not installed")
    pytest.importorskip("torch", reason="speculators is written in torch")
    return package


@pytest.mark.parametrize("fused", (True, False))
def test_what_speculators_converts_is_read(fused, speculators, loaded, tmp_path):
    from speculators.convert.mtp import MTPConverter

    source, out = checkpoint(tmp_path / "model", fused), tmp_path / "head"
    MTPConverter().convert(source, out, base_model=str(source), validate=False)
    trained = load_drafter(out, loaded)
    same(trained.params, mtp.params(loaded.params))
    assert trained.drafter.depth == 3


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")  # by the package's call
def test_logits_are_those_of_speculators(speculators, loaded, tmp_path):
    """What ours writes, read by the package: logits of every step on the same hidden states and tokens."""
    import torch
    from speculators.models.mtp import MTPDraftModel

    tensors = write("speculators", tmp_path, loaded)
    config = speculators.SpeculatorModelConfig.from_pretrained(tmp_path)
    config.transformer_layer_config._attn_implementation = "eager"
    theirs = MTPDraftModel(config).eval()
    tensors |= {"embed_tokens.weight": np.asarray(loaded.params.embedding).T}
    tensors |= {"lm_head.weight": np.asarray(loaded.params.head.kernel).T}
    found = theirs.load_state_dict({n: torch.tensor(np.array(x)) for n, x in tensors.items()}, strict=False)
    assert not found.unexpected_keys and set(found.missing_keys) <= {"verifier_lm_head.weight"}
    rng, steps, c = np.random.default_rng(0), 4, loaded.target.config
    hidden = rng.normal(0, 1, (1, 12, c.hidden_size)).astype(np.float32)
    tokens = rng.integers(0, c.vocab_size, (1, 12))
    context = final_norm(c, loaded.params, jnp.asarray(hidden))
    with torch.no_grad():
        want, _, _ = theirs(torch.tensor(tokens), torch.tensor(np.asarray(context)))
    step = jit(functools.partial(model.forward_text, c, loaded.params))
    for k in range(steps):
        out, _ = step(context, jnp.roll(tokens, -k - 1, axis=1))
        context = out.context
        rows = want[k].shape[1]
        np.testing.assert_allclose(out.logits[:, :rows], want[k].numpy(), atol=1e-4)
