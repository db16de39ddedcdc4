import dataclasses
import tracemalloc

import gguf
import numpy as np
import pytest

from spec_jax.models.checkpoint import CheckpointError, required_tensors
from spec_jax.models.config import RopeConfig
from spec_jax.models.gguf import load_gguf
from spec_jax.models.gguf_file import read_gguf
from spec_jax.models.rope import inverse_frequencies


def _read_all(checkpoint):
    return {name: np.asarray(tensor) for name, tensor in checkpoint.tensors.items()}


@pytest.mark.parametrize("kind", ["tiny", "tied", "biased"])
def test_reads_back_what_a_converter_wrote(kind, request, write_gguf, make_tensors):
    config = request.getfixturevalue(kind)
    checkpoint = load_gguf(write_gguf(config))
    assert dataclasses.replace(checkpoint.config, rms_norm_eps=config.rms_norm_eps) == config
    assert checkpoint.config.rms_norm_eps == np.float32(config.rms_norm_eps)
    loaded, expected = _read_all(checkpoint), make_tensors(config)
    assert loaded.keys() == expected.keys() == required_tensors(config).keys()
    for name, array in expected.items():
        assert checkpoint.tensors[name].shape == array.shape
        assert loaded[name].dtype == checkpoint.tensors[name].dtype == np.float32
        assert loaded[name].flags.writeable
        np.testing.assert_array_equal(loaded[name], array)
    assert checkpoint.tokenizer is not None
    assert checkpoint.tokenizer.vocab_size == config.vocab_size


def test_dequantises(write_gguf, tiny, make_tensors):
    names = ["model.layers.0.self_attn.q_proj.weight", "model.layers.1.mlp.down_proj.weight", "lm_head.weight"]
    half = {"blk.0.attn_norm.weight": np.full(32, 1.5, np.float16)}
    loaded = _read_all(load_gguf(write_gguf(quantize=names, tensors=half)))
    for name in names:
        expected = make_tensors(tiny)[name]
        assert 0 < np.abs(loaded[name] - expected).max() <= np.abs(expected).max() / 127
    np.testing.assert_array_equal(loaded["model.layers.0.input_layernorm.weight"], np.full(32, 1.5, np.float32))


def test_end_of_text(write_gguf):
    def ends(**changes):
        metadata = {f"tokenizer.{name.replace('__', '.')}": value for name, value in changes.items()}
        return load_gguf(write_gguf(metadata=metadata)).eos_token_ids

    assert ends(chat_template=None) == (0,)
    assert ends() == (0, 2), "the chat template ends a turn with <|im_end|>"
    assert ends(ggml__eot_token_id=1) == (0, 1)
    assert ends(ggml__eos_token_id=2, ggml__eot_token_id=2, ggml__eom_token_id=0) == (2, 0)
    assert ends(ggml__eos_token_id=None, chat_template=None) == ()


@pytest.mark.parametrize(
    ("metadata", "rope"),
    [
        ({}, RopeConfig()),
        ({"llama.rope.scaling.type": "none"}, RopeConfig()),
        ({"llama.rope.freq_base": None}, RopeConfig()),
        ({"llama.rope.freq_base": 5e5}, RopeConfig(theta=5e5)),
        ({"llama.rope.scale_linear": 2.0}, RopeConfig("linear", factor=2.0)),
        ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}, RopeConfig("linear", factor=4.0)),
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 4.0,
                "llama.rope.scaling.original_context_length": 16,
                "llama.rope.scaling.yarn_beta_fast": 16.0,
            },
            RopeConfig("yarn", factor=4.0, original_max_position_embeddings=16, beta_fast=16.0),
        ),
    ],
)
def test_rotary_metadata(metadata, rope, write_gguf):
    assert load_gguf(write_gguf(metadata=metadata)).config.rope == rope


def test_rope_divisors_are_the_llama3_rule(write_gguf):
    rule = RopeConfig("llama3", 10000.0, 8.0, 4096, 1.0, 4.0)
    scaled, plain = inverse_frequencies(rule, 8, 64)[0], inverse_frequencies(RopeConfig(), 8, 64)[0]
    config = load_gguf(write_gguf(tensors={"rope_freqs.weight": plain / scaled})).config
    for length in (None, 1, 10**6):
        frequencies, factor = inverse_frequencies(config.rope, 8, 64, length)
        np.testing.assert_allclose(frequencies, scaled, rtol=1e-6)
        assert factor == 1.0
    assert not np.allclose(scaled, plain)


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({"general.architecture": "qwen2"}, "general.architecture.*qwen2.*llama"),
        ({"llama.block_count": None}, "llama.block_count is missing"),
        ({"llama.block_count": 3}, "missing tensors: .*layers.2"),
        ({"llama.block_count": 1}, "unexpected tensors: .*layers.1"),
        ({"llama.block_count": 2**31 - 1}, "2147483647 layers"),
        ({"llama.block_count": "2"}, "num_layers.*'2'"),
        ({"llama.embedding_length": 64}, r"wrong tensors: .*q_proj.*\[32, 32\], not \[64, 64\]"),
        ({"llama.embedding_length": [32]}, "embedding_length"),
        ({"llama.attention.head_count": 0}, "head_count"),
        ({"llama.attention.head_count_kv": 4}, "k_proj"),
        ({"llama.attention.head_count_kv": 3}, "num_kv_heads"),
        ({"llama.attention.head_count_kv": [2, 2]}, "num_kv_heads"),
        ({"llama.rope.dimension_count": 4}, "rope.dimension_count is 4.*8"),
        ({"llama.rope.scaling.type": "longrope"}, "rope.scaling.type is 'longrope'"),
        ({"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 2.0}, "rope.scaling.type is 'none'"),
        ({"llama.rope.scaling.type": "yarn"}, "yarn.*needs factor"),
        ({"llama.rope.scaling.attn_factor": 2.0}, "attn_factor is 2.0"),
        ({"llama.expert_count": 8}, "llama.expert_count is 8"),
        ({"llama.logit_scale": 2.0}, "llama.logit_scale is 2.0"),
        ({"llama.vocab_size": 100}, "tokens, but a vocabulary of 100"),
        ({"split.count": 2}, "one of 2 files"),
        ({"tokenizer.ggml.tokens": ["a", "b"]}, "2 tokens, but a vocabulary of"),
        ({"tokenizer.ggml.tokens": None}, "tokenizer.ggml.tokens"),
        ({"tokenizer.ggml.merges": None}, "tokenizer.ggml.merges"),
        ({"tokenizer.ggml.merges": ["q zebra"]}, "damaged"),
        ({"tokenizer.ggml.merges": ["justone"]}, "damaged"),
        ({"tokenizer.ggml.token_type": [1, 1]}, "tokenizer.ggml.token_type"),
        ({"tokenizer.ggml.model": "bert"}, "tokenizer.ggml.model is 'bert'"),
        ({"tokenizer.ggml.pre": None}, "tokenizer.ggml.pre is None; taken: gpt-2, smollm"),
        ({"tokenizer.ggml.pre": "mystery"}, "tokenizer.ggml.pre is 'mystery'"),
        ({"tokenizer.ggml.add_space_prefix": True}, "add_space_prefix"),
        ({"tokenizer.ggml.eos_token_id": 10**6}, "eos_token_id is 1000000"),
        ({"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.bos_token_id": None}, "no tokenizer.ggml.bos_token_id"),
        ({"tokenizer.chat_template": 7}, "chat_template is 7"),
    ],
)
def test_refuses_metadata_that_do_not_fit(metadata, words, write_gguf):
    with pytest.raises(CheckpointError, match=words):
        load_gguf(write_gguf(metadata=metadata))


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"blk.1.ffn_up.weight": None}, "missing tensors: model.layers.1.mlp.up_proj.weight"),
        ({"token_embd.weight": None}, "missing tensors: model.embed_tokens.weight"),
        ({"blk.0.attn_q.bias": np.zeros(32, np.float32)}, "missing tensors: model.layers.0.self_attn.k_proj.bias"),
        ({"blk.0.attn_qkv.weight": np.zeros((4, 4), np.float32)}, "unexpected tensors: blk.0.attn_qkv.weight"),
        ({"extra.weight": np.zeros((4, 4), np.float32)}, "unexpected tensors: extra.weight"),
        ({"output_norm.weight": np.zeros(31, np.float32)}, r"model.norm.weight float32\[31\], not \[32\]"),
        ({"blk.0.attn_k.weight": np.zeros((32, 16), np.float32)}, r"k_proj.weight float32\[32, 16\], not \[16, 32\]"),
        ({"rope_freqs.weight": np.ones(3, np.float32)}, "rope_freqs.weight has shape"),
        ({"output_norm.weight": np.zeros(32, np.int32)}, "output_norm.weight.*type.*can't be dequantised"),
    ],
)
def test_refuses_tensors_that_do_not_fit(tensors, words, write_gguf):
    with pytest.raises(CheckpointError, match=words):
        load_gguf(write_gguf(tensors=tensors))


def test_a_tokenizer_can_be_given(write_gguf, backend):
    from spec_jax.models.tokenizer import Tokenizer

    path, given = write_gguf(metadata={"tokenizer.ggml.model": "bert"}), Tokenizer(backend, eos_token_ids=(2,))
    checkpoint = load_gguf(path, tokenizer=given)
    assert checkpoint.tokenizer is given
    assert checkpoint.eos_token_ids == (2,)
    given.backend.add_tokens(["one too many"])
    with pytest.raises(CheckpointError, match="the tokenizer has"):
        load_gguf(path, tokenizer=Tokenizer(given.backend))


def test_no_file(tmp_path):
    for path in (tmp_path / "none.gguf", tmp_path):
        with pytest.raises(FileNotFoundError, match=str(path)):
            load_gguf(path)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "cut off in the header"),
        (b"GGML", "starts with b'GGML'"),
        (b"GGUF" + (1).to_bytes(4, "little"), "version is 1"),
        (b"GGUF" + (3).to_bytes(4, "big"), "version is 50331648"),
        (b"GGUF\3\0\0\0" + (2**60).to_bytes(8, "little") + bytes(8), f"claims {2**60} tensors"),
        (b"GGUF\3\0\0\0" + bytes(8) + (2**60).to_bytes(8, "little"), f"claims {2**60} metadata entries"),
        (b"GGUF\3\0\0\0" + bytes(16), "general.architecture is None"),
    ],
)
def test_hostile_headers(data, words, tmp_path):
    (tmp_path / "bad.gguf").write_bytes(data)
    with pytest.raises(CheckpointError, match=words):
        load_gguf(tmp_path / "bad.gguf")


def _with_entry(tmp_path, *entry):
    count = len(entry).to_bytes(8, "little")
    path = tmp_path / "bad.gguf"
    path.write_bytes(b"GGUF\3\0\0\0" + bytes(8) + count + b"".join(entry) + bytes(64))
    return path


def _text(text):
    return len(text).to_bytes(8, "little") + text


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ([(2**63).to_bytes(8, "little")], "cut off in metadata entry 0"),
        ([_text(b"\xff")], "decode"),
        ([_text(b"a") + (99).to_bytes(4, "little")], "'a' has the unknown type 99"),
        ([_text(b"a") + (9).to_bytes(4, "little") * 2], "'a' is an array of type 9"),
        ([_text(b"a") + b"\x09\0\0\0\x04\0\0\0" + (2**61).to_bytes(8, "little")], f"claims {2**61} numbers"),
        ([_text(b"a") + b"\x09\0\0\0\x08\0\0\0" + (2**61).to_bytes(8, "little")], f"claims {2**61} strings"),
        ([_text(b"a") + b"\0\0\0\0\1"] * 2, "'a' is there twice"),
        ([_text(b"general.alignment") + b"\4\0\0\0" + (24).to_bytes(4, "little")], "general.alignment is 24"),
        ([_text(b"general.alignment") + b"\4\0\0\0" + (0).to_bytes(4, "little")], "general.alignment is 0"),
    ],
)
def test_hostile_metadata(entries, words, tmp_path):
    with pytest.raises(CheckpointError, match=words):
        read_gguf(_with_entry(tmp_path, *entries))


def _patched(path, name, what, value, width=8):
    """Overwrite one number of a tensor's table entry."""
    data = bytearray(path.read_bytes())
    at = data.index(_text(name.encode())) + 8 + len(name)
    dimensions = int.from_bytes(data[at : at + 4], "little")
    offset = {"dimensions": 0, "size": 4, "type": 4 + 8 * dimensions, "offset": 8 + 8 * dimensions}[what]
    data[at + offset : at + offset + width] = value.to_bytes(width, "little")
    path.write_bytes(data)
    return path


@pytest.mark.parametrize(
    ("what", "value", "width", "words"),
    [
        ("offset", 2**62, 8, "ends at byte"),
        ("offset", 1, 8, "not aligned to 32"),
        ("offset", 0, 8, "overlap"),
        ("size", 2**60, 8, "ends at byte"),
        ("size", 0, 8, "taken: positive"),
        ("dimensions", 0, 4, "has 0 dimensions"),
        ("dimensions", 2**32 - 1, 4, "dimensions; taken: 1 to 4"),
        ("type", 99, 4, "type, 99"),
        ("type", int(gguf.GGMLQuantizationType.Q4_K), 4, "multiple of 256"),
    ],
)
def test_hostile_tensor_table(what, value, width, words, write_gguf):
    path = _patched(write_gguf(), "blk.1.ffn_up.weight", what, value, width)
    with pytest.raises(CheckpointError, match=words):
        load_gguf(path)


def test_a_tensor_named_twice(write_gguf):
    path = write_gguf()
    path.write_bytes(path.read_bytes().replace(b"blk.1.ffn_up.weight", b"blk.0.ffn_up.weight"))
    with pytest.raises(CheckpointError, match="'blk.0.ffn_up.weight' is there twice"):
        load_gguf(path)


def test_a_file_cut_after_loading(write_gguf):
    path = write_gguf()
    checkpoint = load_gguf(path)
    with open(path, "r+b") as file:
        file.truncate(path.stat().st_size // 2)
    with pytest.raises(CheckpointError, match="cut off inside tensor"):
        _read_all(checkpoint)


def test_every_truncation_is_noticed(write_gguf):
    path = write_gguf()
    end = max(tensor.offset + tensor.size for tensor in read_gguf(path).tensors.values())
    data = path.read_bytes()
    header = read_gguf(path).tensors["token_embd.weight"].offset
    for size in [*range(0, 600), *range(600, header, 97), *range(header, end, 4999), end - 1]:
        path.write_bytes(data[:size])
        with pytest.raises(CheckpointError, match=str(path)):
            load_gguf(path)


def _outcome(path):
    try:
        with np.errstate(all="ignore"):
            _read_all(load_gguf(path))
    except CheckpointError:
        return "refused"
    return "loaded"


def _broken_copies(path, count):
    """The file with one to three bytes of its header changed, again and again."""
    data = path.read_bytes()
    header = min(tensor.offset for tensor in read_gguf(path).tensors.values())
    rng = np.random.default_rng(0)
    for _ in range(count):
        broken = bytearray(data)
        for at in rng.integers(0, header, rng.integers(1, 4)):
            broken[at] ^= 1 << rng.integers(8) if rng.random() < 0.5 else rng.integers(1, 256)
        path.write_bytes(broken)
        yield path


def test_no_flipped_byte_does_harm(write_gguf):
    outcomes = [_outcome(path) for path in _broken_copies(write_gguf(), 400)]
    assert 150 < outcomes.count("refused") < 400


def test_memory_follows_the_size_of_the_file_not_its_claims(write_gguf):
    path = write_gguf()
    size = path.stat().st_size
    tracemalloc.start()
    try:
        for broken in _broken_copies(path, 30):
            _outcome(broken)
        for what in ("size", "offset"):
            _outcome(_patched(write_gguf(), "blk.1.ffn_up.weight", what, 2**40))
        assert tracemalloc.get_traced_memory()[1] < 50 * size
    finally:
        tracemalloc.stop()


def test_smollm2(smollm2):
    checkpoint = load_gguf(smollm2)
    config = checkpoint.config
    assert (config.num_layers, config.hidden_size, config.num_heads, config.num_kv_heads) == (30, 576, 9, 3)
    assert config.rope == RopeConfig(theta=100000.0)
    assert config.tie_word_embeddings
    assert checkpoint.eos_token_ids == (2,)
    key = np.asarray(checkpoint.tensors["model.layers.3.self_attn.k_proj.weight"])
    assert key.shape == (192, 576)
    assert np.isfinite(key).all()
