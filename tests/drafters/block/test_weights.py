"""Directories of block drafters: every format loads as it was written, and what does not fit is refused by name."""

import dataclasses
import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from spec_jax.drafters.block import native, weights
from spec_jax.drafters.block.config import FULL, SLIDING
from spec_jax.drafters.block.heads.gru import Domino
from spec_jax.drafters.block.heads.head import Plain
from spec_jax.drafters.block.heads.jacobi import Jacobi
from spec_jax.drafters.block.heads.markov import Markov
from spec_jax.drafters.block.heads.selector import Selector
from spec_jax.drafters.block.heads.swiglu import SwiGlu
from spec_jax.drafters.load import load_drafter
from spec_jax.models.checkpoint import CheckpointError
from spec_jax.models.config import RopeConfig
from spec_jax.models.linear import Dense
from tests.drafters.block import kit

CONVOLVED = {"conv_kernel_size": 2, "conv_group_size": 8}
SLIDES = {"layer_types": (SLIDING, FULL), "sliding_window": 4, "causal": (True, False)}
PUBLISHED = {
    "DFlash": (Plain(), {}),
    "DFlash, sliding": (Plain(), SLIDES),
    "JetSpec": (Plain(), {"causal": (True, True)}),
    "scaled": (Plain(), {"embedding_scale": 4.0, "output_multiplier": 0.5, "softcap": 30.0}),
    "yarn": (Plain(), {"rope": RopeConfig("yarn", factor=4.0, original_max_position_embeddings=64)}),
    "DFlash 2": (Selector(6, 4), CONVOLVED),
    "DSpark": (Markov(6), {"slots": "shifted"}),
    "DSpark, rnn": (Markov(6, "rnn", "hidden"), {"slots": "shifted"}),
    "DSpark, gated": (Markov(6, "gated", None), {"slots": "shifted"}),
    "Domino": (Domino(7, 5), {"slots": "shifted"}),
    "Domino, filled in": (Domino(7, 5, pure=2), {}),
    "TreeFlash": (SwiGlu(8), {}),
}
SPECULATORS = {
    "dflash": (Plain(), SLIDES),
    "dflash2": (Selector(6, 4), CONVOLVED),
    "dspark": (Markov(6, "gated"), {"slots": "shifted", "draft_vocab_size": 9}),
    "xpress": (Jacobi(6), {}),
}


def target():
    model, params = kit.llama()
    return types.SimpleNamespace(target=model, params=params)


def drawn(head, changes):
    c = kit.config(**changes)
    params = kit.params(c, head)
    if isinstance(head, Markov) and head.confidence:
        own = dataclasses.replace(params.head, temperature=jnp.ones(c.depth))
        params = dataclasses.replace(params, head=own)
    if c.draft_vocab_size:
        kept = jnp.array([0, 2, 3, 5, 7, 11, 13, 17, 19], jnp.int32)
        lm_head = Dense(jnp.asarray(np.random.default_rng(9).normal(0, 1, (kit.H, 9)), jnp.float32))
        params = dataclasses.replace(params, lm_head=lm_head, kept=kept)
    return c, params


def check(loaded, c, head, params):
    assert loaded.drafter.config == c and loaded.drafter.head == head
    assert jax.tree.structure(loaded.params) == jax.tree.structure(params)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(loaded.params), jax.tree.leaves(params), strict=True):
        assert a.dtype == b.dtype and np.array_equal(a, b), path
    assert loaded.target.taps == c.taps + (3,) * head.final_tap
    assert loaded.params.ends.embedding is kit.llama()[1].embedding
    assert loaded.drafter.depth == c.depth and loaded.drafter.nodes == c.depth + 1


@pytest.mark.parametrize("name", PUBLISHED)
def test_what_is_saved_loads_again(name, tmp_path):
    head, changes = PUBLISHED[name]
    c, params = drawn(head, changes)
    weights.save_published(tmp_path, c, head, params, 3)
    check(load_drafter(tmp_path, target()), c, head, params)
    fields = json.loads((tmp_path / "config.json").read_text())
    assert (fields.get("dflash_config") or {}).get("target_layer_ids", fields.get("target_layer_ids")) == [0, 2]


@pytest.mark.parametrize("name", SPECULATORS)
def test_the_speculators_format_loads_again(name, tmp_path):
    head, changes = SPECULATORS[name]
    c, params = drawn(head, changes)
    weights.save_speculators(tmp_path, c, head, params, {"name_or_path": "x", "architectures": ["LlamaForCausalLM"]})
    check(load_drafter(tmp_path, target()), c, head, params)
    fields = json.loads((tmp_path / "config.json").read_text())
    assert fields["aux_hidden_state_layer_ids"] == [1, 3] and fields["speculators_model_type"] == name


@pytest.mark.parametrize("name", kit.HEADS)
def test_our_own_format_holds_any_head(name, tmp_path):
    head = kit.HEADS[name]
    c, params = drawn(head, {"per_layer_features": True} if name == "plain" else {})
    if name == "bigram":
        params = dataclasses.replace(params, head=head.counted([1, 2, 3, 1, 4], c))
    native.save_native(tmp_path, c, head, params)
    check(load_drafter(tmp_path, target()), c, head, params)


def test_our_own_format_in_half_the_bytes(tmp_path):
    head, c = Markov(6), kit.config(draft_vocab_size=9)
    c, params = drawn(head, {"draft_vocab_size": 9})
    native.save_native(tmp_path, c, head, params, jnp.bfloat16)
    loaded = load_drafter(tmp_path, target())
    assert loaded.params.network.norm.dtype == jnp.float32 and loaded.params.kept.dtype == jnp.int32
    for a, b in zip(jax.tree.leaves(loaded.params), jax.tree.leaves(params), strict=True):
        np.testing.assert_allclose(a, b, rtol=5e-3)


def rewritten(tmp_path, fields=None, drop=(), add=None, rename=None):
    """The directory with fields and tensors changed."""
    config = json.loads((tmp_path / "config.json").read_text())
    for name, value in (fields or {}).items():
        *above, last = name.split("/")
        at = config
        for part in above:
            at = at[part]
        if value is None:
            at.pop(last)
        else:
            at[last] = value
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = load_file(tmp_path / "model.safetensors")
    tensors = {(rename or (lambda n: n))(n): x for n, x in tensors.items() if n not in drop} | (add or {})
    save_file({n: np.ascontiguousarray(x) for n, x in tensors.items()}, tmp_path / "model.safetensors")
    return load_drafter(tmp_path, target())


def saved(tmp_path, name):
    head, changes = PUBLISHED[name]
    c, params = drawn(head, changes)
    weights.save_published(tmp_path, c, head, params, 3)
    return c, params


SMALL = np.zeros(3, np.float32)
REFUSED = {
    "unknown tensor": (
        "DFlash",
        {"add": {"layers.0.self_attn.g_proj.weight": SMALL}},
        "unexpected tensors: layers.0.self_attn.g_proj",
    ),
    "missing tensor": ("DFlash", {"drop": ("hidden_norm.weight",)}, "missing tensors: hidden_norm.weight"),
    "misshapen tensor": ("DFlash", {"add": {"norm.weight": SMALL}}, r"wrong tensors: norm.weight \[3\], not \[16\]"),
    "unknown field": ("DFlash", {"fields": {"dflash_config/aux_norms": True}}, "dflash_config has aux_norms"),
    "another vocabulary": ("DFlash", {"fields": {"vocab_size": 21}}, "vocab_size is 21"),
    "layers the target lacks": ("DFlash", {"fields": {"dflash_config/target_layer_ids": [0, 3]}}, "the target's 3"),
    "fewer layers read": ("DFlash", {"fields": {"dflash_config/target_layer_ids": [0]}}, "wrong tensors: fc.weight"),
    "biases": ("DFlash", {"fields": {"attention_bias": True}}, "attention_bias is True"),
    "another model": ("DFlash", {"fields": {"architectures": ["OtherModel"]}}, "no drafter of a kind known here"),
    "DFlash 2 in a v1 shape": (
        "DFlash 2",
        {
            "fields": {
                "architectures": ["DFlashDraftModel"],
                **{f"dflash_config/{n}": None for n in (*CONVOLVED, "selector_rank", "selector_top_k")},
            }
        },
        "unexpected tensors: .*attention_conv.base_kernel",
    ),
    "DFlash 2 by a v1 name": (
        "DFlash 2",
        {"fields": {"architectures": ["DFlashDraftModel"]}},
        "taken with dflash2 alone",
    ),
    "DFlash 2 without its sizes": (
        "DFlash 2",
        {"fields": {"dflash_config/selector_rank": None}},
        "selector_rank is None",
    ),
    "no mask": ("DFlash", {"fields": {"dflash_config/mask_token_id": None}}, "mask_token_id is None"),
    "LiLiCorr": ("DFlash", {"fields": {"dflash_config/projector_type": "lilicorr"}}, "projector_type is 'lilicorr'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused(name, tmp_path):
    kind, changes, message = REFUSED[name]
    saved(tmp_path, kind)
    with pytest.raises(CheckpointError, match=message):
        rewritten(tmp_path, **changes)


def test_sliding_layers_are_causal_unless_the_config_says_otherwise(tmp_path):
    saved(tmp_path, "DFlash, sliding")
    assert rewritten(tmp_path).drafter.config.causal == (True, False)
    assert rewritten(tmp_path, {"is_causal": False}).drafter.config.causal == (False, False)
    assert rewritten(tmp_path, {"is_causal": True}).drafter.config.causal == (True, True)


def test_files_that_name_things_otherwise(tmp_path):
    c, params = saved(tmp_path / "domino", "Domino")
    older = lambda n: f"logit_head.{n}" if n.startswith(("prefix_gru", "embed_proj")) else n  # noqa: E731
    check(
        rewritten(tmp_path / "domino", {"dflash_config/projector_type": "causal_v5"}, rename=older),
        c,
        PUBLISHED["Domino"][0],
        params,
    )
    c, params = saved(tmp_path / "dspark", "DSpark")
    check(
        rewritten(
            tmp_path / "dspark", {"architectures": ["DFlashDraftModel"]}, drop=("embed_tokens.weight", "lm_head.weight")
        ),
        c,
        PUBLISHED["DSpark"][0],
        params,
    )
    c, params = saved(tmp_path / "default", "DFlash")
    taps = rewritten(tmp_path / "default", {"dflash_config/target_layer_ids": None, "num_target_layers": 3}).target.taps
    assert taps == (2, 1)


def test_a_drafters_own_embedding_and_head_are_kept_where_they_differ(tmp_path):
    c, params = saved(tmp_path, "DSpark")
    embedding = np.asarray(params.ends.embedding).T + 1
    own = rewritten(tmp_path, add={"embed_tokens.weight": embedding}).params.ends
    np.testing.assert_array_equal(own.embedding, embedding.T)
    assert own.head is kit.llama()[1].head
    head = np.asarray(params.ends.head.kernel).T * 2
    own = rewritten(tmp_path, add={"lm_head.weight": head}).params.ends
    np.testing.assert_array_equal(own.head.kernel, head.T)


def test_vocabulary_maps_are_checked(tmp_path):
    head, changes = SPECULATORS["dspark"]
    c, params = drawn(head, changes)
    weights.save_speculators(tmp_path, c, head, params, {})
    offsets = np.asarray(params.kept, np.int64) - np.arange(9)
    for wrong, message in ((offsets.max() - offsets, "d2t leads"), (np.arange(9) * 0, "t2d keeps other tokens")):
        with pytest.raises(CheckpointError, match=message):
            rewritten(tmp_path, add={"d2t": wrong})
    with pytest.raises(CheckpointError, match="missing tensors: lm_head.weight"):
        rewritten(tmp_path, add={"d2t": offsets}, drop=("lm_head.weight",))


def test_no_pickles_and_no_missing_directories(tmp_path):
    with pytest.raises(FileNotFoundError, match="no such directory"):
        load_drafter(tmp_path / "none", target())
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "local_head.pt").write_bytes(b"")
    with pytest.raises(CheckpointError, match="local_head.pt is pickle"):
        load_drafter(tmp_path, target())


def test_a_format_that_has_no_place_for_something_refuses_to_save(tmp_path):
    head, changes = PUBLISHED["DSpark"]
    c, params = drawn(head, changes)
    warm = dataclasses.replace(params.head, temperature=2 * params.head.temperature)
    cases = [
        (c, head, dataclasses.replace(params, head=warm), "temperature"),
        (kit.config(per_layer_features=True), Plain(), None, "per-layer features"),
        (kit.config(), kit.HEADS["lattice"], None, "Lattice"),
        (kit.config(causal=(True, False)), Plain(), None, "causal"),
        (kit.config(), Markov(6), None, "slots"),
        (kit.config(slots="shifted"), Plain(), None, "slots"),
        (kit.config(), Selector(6, 4), None, "conv_kernel_size"),
    ]
    for config, own, given, message in cases:
        with pytest.raises(ValueError, match=message):
            weights.save_published(tmp_path, config, own, given or kit.params(config, own), 3)
    assert not (tmp_path / "config.json").exists()
