"""D26: weights that are missing, unused or misshapen are named, and nothing is left as it was made.

Targets and every kind of drafter, as directories on disk: each tensor is left out, misshapen, or stands under another
top-level name; and every number of what is loaded comes from the files, and every tensor goes somewhere.
"""

import json
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from spec_jax.drafters import medusa_files, mlp_speculator_files, mtp
from spec_jax.drafters.block import native
from spec_jax.drafters.block import weights as block
from spec_jax.drafters.eagle import weights as eagle
from spec_jax.drafters.load import load_drafter
from spec_jax.models import shards
from spec_jax.models.checkpoint import CheckpointError, required_tensors
from spec_jax.models.load import load_target
from tests.drafters import hybrid
from tests.drafters.block import kit
from tests.drafters.block.test_weights import PUBLISHED, SPECULATORS, drawn
from tests.drafters.eagle import kit as heads

TARGET = types.SimpleNamespace(target=kit.llama()[0], params=kit.llama()[1])
VERIFIER = {"name_or_path": "somewhere", "architectures": ["LlamaForCausalLM"]}
BLOCKS = ("DFlash", "DFlash 2", "DSpark, gated", "Domino", "TreeFlash")
DRAFTERS = (*BLOCKS, "dspark", "xpress", "native", *heads.CONFIGS)
TARGETS = ("llama", "hybrid with an MTP head")
# What a file may have but need not: copies of the target's own ends.
COPIES = {"embed_tokens.weight", "lm_head.weight"}


def write(name, folder):
    """A directory of the kind; its tensors by name."""
    if name in TARGETS:
        c = kit.LLAMA if name == "llama" else hybrid.config()
        rng = np.random.default_rng(0)
        tensors = {n: rng.normal(0, 1, s).astype(np.float32) for n, s in required_tensors(c).items()}
        save_file(tensors, folder / "model.safetensors")
        if name == "llama":
            same = ("vocab_size", "hidden_size", "intermediate_size", "head_dim", "rms_norm_eps")
            fields = {n: getattr(c, n) for n in same} | {"model_type": "llama", "num_hidden_layers": c.num_layers}
            fields |= {"num_attention_heads": c.num_heads, "num_key_value_heads": c.num_kv_heads}
            fields |= {"max_position_embeddings": 64}
        else:
            fields = c.to_hf()
        (folder / "config.json").write_text(json.dumps(fields))
    elif name in BLOCKS:
        head, changes = PUBLISHED[name]
        block.save_published(folder, *drawn_of(head, changes), 3)
    elif name in SPECULATORS:
        head, changes = SPECULATORS[name]
        block.save_speculators(folder, *drawn_of(head, changes), VERIFIER)
    elif name == "native":
        head = kit.HEADS["lattice"]
        native.save_native(folder, *drawn_of(head, {"draft_vocab_size": 9}))
    elif heads.is_eagle(config := heads.CONFIGS[name]):
        eagle.save(folder, config, heads.params(config), VERIFIER)
    else:
        files = mlp_speculator_files if name == "mlp_speculator" else medusa_files
        files.save(folder, config, heads.params(config), "somewhere")
    return load_file(folder / "model.safetensors")


def drawn_of(head, changes):
    config, params = drawn(head, changes)
    return config, head, params


def load(name, folder):
    """The parameters that come from the directory, as a list of (path, array)."""
    made = load_target(folder).params if name in TARGETS else load_drafter(folder, TARGET).params
    leaves = [(jax.tree_util.keystr(at), np.asarray(x)) for at, x in jax.tree_util.tree_leaves_with_path(made)]
    return [(at, x) for at, x in leaves if not at.startswith(".ends")]


def kinds_of(names):
    """One of the tensors that differ in their layer's or head's number alone."""
    return list({re.sub(r"\d+", "0", name): name for name in names}.values())


def slips(name, folder, tensors, load=load):
    """What a loader takes that it should name, and what it leaves unread or unmade."""
    found, path = [], folder / "model.safetensors"
    optional = COPIES if name == "DSpark, gated" else ()

    def says(changed, one):
        """Whether loading these tensors is refused by a name."""
        save_file(changed, path)
        try:
            load(name, folder)
        except CheckpointError as error:
            return one.removeprefix("model.") in str(error)
        return False

    for one in kinds_of(tensors):
        if one not in optional and not says({n: x for n, x in tensors.items() if n != one}, one):
            found.append(f"{one} missing")
        if not says(tensors | {one: np.concatenate([tensors[one], tensors[one][-1:]])}, one):
            found.append(f"{one} misshapen")
    if not says(tensors | {"layers.0.extra.weight": np.zeros(2, np.float32)}, "layers.0.extra.weight"):
        found.append("an unknown tensor")
    top = next(n for n in tensors if n not in optional and n.endswith(("weight", "kernel")))
    if not says({(f"other.{n}" if n == top else n): x for n, x in tensors.items()}, f"other.{top}"):
        found.append("another top-level name")
    if name not in TARGETS:
        found += strangers(name, folder, tensors, load, optional)
    save_file(tensors, path)
    return found


def strangers(name, folder, tensors, load, optional):
    """Tensors that no parameter has the numbers of, and parameters with numbers of no tensor: each holds its own."""
    floats = [n for n, x in tensors.items() if x.dtype == np.float32]
    mark = {n: np.float32(2 + i) for i, n in enumerate(floats)}
    save_file(tensors | {n: np.full_like(tensors[n], mark[n]) for n in floats}, folder / "model.safetensors")
    found, seen = [], set()
    for path, leaf in load(name, folder):
        if np.issubdtype(leaf.dtype, np.floating):
            values = set(np.unique(leaf).tolist())
            seen |= values
            # published files have no place for a confidence head's temperature, which is 1
            if strange := values - set(mark.values()) - ({1.0} if "temperature" in path else set()):
                found.append(f"{path} holds {sorted(strange)[:3]}, which no tensor does")
    return found + [f"{n} unread" for n in floats if mark[n] not in seen and n not in optional]


@pytest.mark.parametrize("name", (*DRAFTERS, *TARGETS))
def test_what_is_missing_unused_or_misshapen_is_named(name, tmp_path):
    tensors = write(name, tmp_path)
    assert slips(name, tmp_path, tensors) == []


@pytest.mark.parametrize(
    ("name", "one", "other"),
    [("TreeFlash", "norm.weight", "model.norm.weight"), ("medusa", "0.1.weight", "medusa_head.0.1.weight")],
)
def test_one_tensor_by_two_names_is_named(name, one, other, tmp_path):
    tensors = write(name, tmp_path)
    made = next(x for n, x in tensors.items() if n in (one, other))
    save_file(tensors | {one: made, other: made}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"{one} is there by two names"):
        load(name, tmp_path)


@pytest.mark.parametrize("name", TARGETS)
def test_every_number_of_a_target_comes_from_its_files(name, tmp_path):
    tensors = write(name, tmp_path)
    before = load(name, tmp_path)
    for one in [None, *kinds_of(tensors)]:
        save_file(
            {n: 0.5 * x + 1 if one in (None, n) else x for n, x in tensors.items()}, tmp_path / "model.safetensors"
        )
        moved = [(path, (a != b).mean()) for (path, a), (_, b) in zip(before, load(name, tmp_path), strict=True)]
        if one is None:
            assert all(share > 0.99 for _, share in moved), moved
        else:
            assert any(share > 0 for _, share in moved), one


def test_an_mtp_head_that_is_not_there_is_named(tmp_path):
    tensors = write("hybrid with an MTP head", tmp_path)
    save_file({n: x for n, x in tensors.items() if not n.startswith("mtp.")}, tmp_path / "model.safetensors")
    loaded = load_target(tmp_path)
    with pytest.raises(ValueError, match="takes those of a model with mtp"):
        mtp.params(loaded.params)
    with pytest.raises(ValueError, match="takes a Qwen model whose config has an MTP head"):
        mtp.drafter(loaded.target, mtp.chain(2))


def random_like(x):
    return jnp.asarray(np.random.default_rng(1).normal(0, 1, x.shape), x.dtype)


def lax_about_missing(name, folder):
    """Fills up what is not there with noise."""
    path, whole = folder / "model.safetensors", load_file(folder.parent / "whole.safetensors")
    save_file({n: np.array(random_like(x)) for n, x in whole.items()} | load_file(path), path)
    return load(name, folder)


def lax_about_unknown(name, folder):
    """Reads what it knows."""
    path, whole = folder / "model.safetensors", load_file(folder.parent / "whole.safetensors")
    save_file({n: x for n, x in load_file(path).items() if n in whole}, path)
    return load(name, folder)


def lax_about_shapes(name, folder):
    """Cuts tensors to what it wants."""
    path, whole = folder / "model.safetensors", load_file(folder.parent / "whole.safetensors")
    cut = lambda n, x: x[: len(whole[n])] if n in whole else x  # noqa: E731
    save_file({n: np.ascontiguousarray(cut(n, x)) for n, x in load_file(path).items()}, path)
    return load(name, folder)


def forgetful(name, folder):
    """Leaves one parameter as it was made."""
    (path, leaf), *rest = load(name, folder)
    return [(path, np.asarray(random_like(leaf))), *rest]


FAULTS = {
    lax_about_missing: " missing",
    lax_about_unknown: "an unknown tensor",
    lax_about_shapes: " misshapen",
    forgetful: "which no tensor does",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_loader_with_a_slip_is_caught(fault, tmp_path):
    folder = tmp_path / "drafter"
    folder.mkdir()
    tensors = write("eagle1", folder)
    save_file(tensors, tmp_path / "whole.safetensors")
    assert any(FAULTS[fault] in slip for slip in slips("eagle1", folder, tensors, fault))


def test_a_drafter_in_shards_needs_all_of_them(tmp_path):
    tensors = write("eagle3", tmp_path)
    whole = load("eagle3", tmp_path)
    (tmp_path / shards.SINGLE).unlink()
    files = {n: f"{'ab'[i % 2]}.safetensors" for i, n in enumerate(tensors)}
    for file in ("a.safetensors", "b.safetensors"):
        save_file({n: x for n, x in tensors.items() if files[n] == file}, tmp_path / file)
    index = lambda names: (tmp_path / shards.INDEX).write_text(json.dumps({"weight_map": names}))  # noqa: E731
    index(files)
    for (path, a), (_, b) in zip(load("eagle3", tmp_path), whole, strict=True):
        np.testing.assert_array_equal(a, b, path)
    for wrong, message in (
        (
            {n: f for n, f in files.items() if n != "norm.weight"},
            "norm.weight is in the index or the file, not in both",
        ),
        (files | {"phantom": "a.safetensors"}, "phantom is in the index or the file, not in both"),
        (files | {"norm.weight": "../a.safetensors"}, "weight_map names '../a.safetensors'"),
        (files | {"norm.weight": "c.safetensors"}, "c.safetensors: no such file|not in both"),
    ):
        index(wrong)
        with pytest.raises(CheckpointError, match=message):
            load("eagle3", tmp_path)
    index(files)
    save_file({"norm.weight": tensors["norm.weight"].astype(np.float64)}, tmp_path / "b.safetensors")
    with pytest.raises(CheckpointError, match="stored as F64|not in both"):
        load("eagle3", tmp_path)
