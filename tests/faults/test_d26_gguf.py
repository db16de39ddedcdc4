"""D26 for GGUF files: tensors that are missing, unused, misshapen, or under another format's names are named.

Each tensor of a toy Llama is left out, misshapen, repeated under another name, or has other numbers. A file without
output.weight is a tied model in this format, and the loaded config says so.
"""

import functools

import gguf
import jax
import numpy as np
import pytest

from spec_jax.models import gguf as reader
from spec_jax.models.checkpoint import CheckpointError, required_tensors
from spec_jax.models.config import LlamaConfig
from spec_jax.models.gguf import load_gguf
from spec_jax.models.load import load_target
from tests.faults.test_d26_weights import kinds_of

SIZES = dict(vocab_size=12, hidden_size=16, intermediate_size=24, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=8)
CONFIGS = {
    "separate head": LlamaConfig(**SIZES),
    "tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "biased": LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
}
NAMES = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, SIZES["num_layers"])


@functools.cache
def shapes(name):
    """The file's tensors: their names in other formats, and their shapes."""
    found = required_tensors(CONFIGS[name])
    return {NAMES.get_name(n, try_suffixes=(".weight", ".bias")): (n, shape) for n, shape in found.items()}


def drawn(name):
    rng = np.random.default_rng(0)
    return {n: rng.normal(0, 1, shape).astype(np.float32) for n, (_, shape) in shapes(name).items()}


def save(path, name, tensors):
    c, writer = CONFIGS[name], gguf.GGUFWriter(path, "llama")
    writer.add_block_count(c.num_layers)
    writer.add_context_length(64)
    writer.add_embedding_length(c.hidden_size)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_head_count(c.num_heads)
    writer.add_head_count_kv(c.num_kv_heads)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(c.vocab_size)
    for n, x in tensors.items():
        writer.add_tensor(n, np.ascontiguousarray(x))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def slips(folder, name):
    """What the loader takes that it should name."""
    tensors, found, path = drawn(name), [], folder / "toy.gguf"

    def says(changed, one):
        """Whether loading these tensors is refused by a name."""
        try:
            load_gguf(save(path, name, changed))
        except CheckpointError as error:
            return one in str(error)
        return False

    for one in kinds_of(tensors):
        other, _ = shapes(name)[one]
        rest = {n: x for n, x in tensors.items() if n != one}
        if one != "output.weight" and not says(rest, other):
            found.append(f"{one} missing")
        if not says(tensors | {one: np.concatenate([tensors[one], tensors[one][-1:]])}, other):
            found.append(f"{one} misshapen")
        inner = f"blk.0.{other.split('.')[3]}.weight" if other.startswith("model.layers.") else f"blk.{one}"
        for wrong in (other, inner, f"other.{one}"):
            if not says(tensors | {wrong: tensors[one]}, wrong):
                found.append(f"{one} again as {wrong}")
            if not says(rest | {wrong: tensors[one]}, wrong):
                found.append(f"{one} as {wrong}")
    return found


@pytest.mark.parametrize("name", CONFIGS)
def test_what_is_missing_unused_or_misshapen_is_named(name, tmp_path):
    assert slips(tmp_path, name) == []


def test_a_bias_that_one_map_alone_lacks_is_named(tmp_path):
    """Whichever layer's and map's it is, the first one's as well."""
    tensors = drawn("biased")
    for one in (n for n in tensors if n.endswith("bias")):
        path = save(tmp_path / "toy.gguf", "biased", {n: x for n, x in tensors.items() if n != one})
        with pytest.raises(CheckpointError, match=f"missing tensors: {shapes('biased')[one][0]}$"):
            load_gguf(path)


@pytest.mark.parametrize("name", CONFIGS)
def test_every_number_comes_from_the_file_and_what_is_tied_is_told(name, tmp_path):
    tensors = drawn(name)
    load = lambda changed: load_target(save(tmp_path / "toy.gguf", name, changed))  # noqa: E731
    whole = load(tensors)
    assert whole.target.config.tie_word_embeddings == (name == "tied") == (whole.params.head is None)
    before = jax.tree_util.tree_leaves_with_path(whole.params)
    for one in [None, *(kinds_of(tensors) if name == "biased" else [])]:
        changed = load({n: 0.5 * x + 1 if one in (None, n) else x for n, x in tensors.items()}).params
        moved = [(at, (a != b).mean()) for (at, a), b in zip(before, jax.tree.leaves(changed), strict=True)]
        assert all(share > 0.99 for _, share in moved) if one is None else any(share > 0 for _, share in moved), moved
    if name == "separate head":
        headless = load({n: x for n, x in tensors.items() if n != "output.weight"})
        assert headless.target.config.tie_word_embeddings and headless.params.head is None


def test_a_reader_that_checks_nothing_is_caught(tmp_path, monkeypatch):
    monkeypatch.setattr(reader, "validate", lambda checkpoint: None)
    found = slips(tmp_path, "separate head")
    for kind in (" missing", " misshapen", " again as "):
        assert any(kind in slip for slip in found)
