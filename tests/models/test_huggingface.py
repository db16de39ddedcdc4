import dataclasses
import json
import shutil

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from spec_jax.models.checkpoint import Checkpoint, CheckpointError, LazyTensor, required_tensors, validate
from spec_jax.models.config import RopeConfig
from spec_jax.models.huggingface import load_huggingface


def _read_all(checkpoint):
    return {name: np.asarray(tensor) for name, tensor in checkpoint.tensors.items()}


@pytest.mark.parametrize("kind", ["tiny", "tied", "biased"])
def test_reads_back_a_directory(kind, request, write_directory, make_tensors):
    config = request.getfixturevalue(kind)
    checkpoint = load_huggingface(write_directory(shape=config))
    assert checkpoint.config == config
    loaded, expected = _read_all(checkpoint), make_tensors(config)
    assert loaded.keys() == expected.keys()
    for name, array in expected.items():
        assert loaded[name].flags.writeable
        np.testing.assert_array_equal(loaded[name], array)


@pytest.mark.parametrize("stored", [np.float16, ml_dtypes.bfloat16, np.float32])
def test_types(stored, write_directory, tiny, make_tensors):
    arrays = {name: array.astype(stored) for name, array in make_tensors(tiny).items()}
    directory = write_directory(tensors=arrays)
    for dtype in (np.float32, ml_dtypes.bfloat16):
        checkpoint = load_huggingface(directory, dtype)
        for name, array in _read_all(checkpoint).items():
            assert array.dtype == checkpoint.tensors[name].dtype == dtype
            np.testing.assert_array_equal(array, arrays[name].astype(dtype))
    with pytest.raises(ValueError, match="dtype is float16; taken: float32, bfloat16"):
        load_huggingface(directory, np.float16)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"tie_word_embeddings": True, "num_key_value_heads": 4},
        {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1, "head_dim": 16},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}},
    ],
)
@pytest.mark.parametrize("sharded", [False, True])
def test_a_model_that_transformers_saved(settings, sharded, tmp_path):
    torch = pytest.importorskip("torch", reason="the reference")
    transformers = pytest.importorskip("transformers", reason="the reference")
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 60,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "eos_token_id": [1, 2],
    }
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**(sizes | heads | settings)))
    model.save_pretrained(tmp_path, **({"max_shard_size": "20KB"} if sharded else {}))
    assert (tmp_path / "model.safetensors.index.json").exists() is sharded
    checkpoint = load_huggingface(tmp_path)
    expected = model.state_dict()
    if settings.get("tie_word_embeddings"):
        del expected["lm_head.weight"]
    loaded = _read_all(checkpoint)
    assert loaded.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(loaded[name], array.numpy())
    assert checkpoint.tokenizer is None
    assert checkpoint.eos_token_ids == (1, 2)
    if "rope_parameters" in settings:
        assert checkpoint.config.rope == RopeConfig("linear", 5e5, 2.0)


def _split(directory):
    """Turn a single file into two shards with an index."""
    arrays = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    halves = dict.fromkeys(arrays, "a.safetensors") | dict.fromkeys(list(arrays)[::2], "b.safetensors")
    for file in ("a.safetensors", "b.safetensors"):
        save_file({name: array for name, array in arrays.items() if halves[name] == file}, directory / file)
    _write_index(directory, halves)
    return directory, halves


def _write_index(directory, weight_map):
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_shards(write_directory, tiny, make_tensors):
    directory, halves = _split(write_directory())
    for name, array in _read_all(load_huggingface(directory)).items():
        np.testing.assert_array_equal(array, make_tensors(tiny)[name])
    _write_index(directory, {name: file for name, file in halves.items() if name != "lm_head.weight"})
    with pytest.raises(CheckpointError, match="lm_head.weight is in the index or the file, not in both"):
        load_huggingface(directory)
    _write_index(directory, halves | {"model.phantom": "a.safetensors"})
    with pytest.raises(CheckpointError, match="model.phantom is in the index or the file"):
        load_huggingface(directory)
    (directory / "b.safetensors").unlink()
    _write_index(directory, halves)
    with pytest.raises(CheckpointError, match="b.safetensors: no such file"):
        load_huggingface(directory)


@pytest.mark.parametrize("file", ["../b.safetensors", "/etc/passwd", "sub/b.safetensors", "..", "", "a\0b", "..\\b"])
def test_an_index_can_not_leave_the_directory(file, write_directory, tmp_path):
    directory, halves = _split(write_directory())
    inner = directory / "inner"
    inner.mkdir()
    shutil.copy(directory / "config.json", inner)
    _write_index(inner, dict.fromkeys(halves, file))
    with pytest.raises(CheckpointError, match="weight_map names"):
        load_huggingface(inner)


@pytest.mark.parametrize("weight_map", [None, [], {"a": 1}, {}])
def test_a_bad_index(weight_map, write_directory):
    directory, _ = _split(write_directory())
    _write_index(directory, weight_map)
    with pytest.raises(CheckpointError, match="weight_map|0 tensors"):
        load_huggingface(directory)


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"model.norm.weight": None}, "missing tensors: model.norm.weight"),
        ({"model.extra": np.zeros(2, np.float32)}, "unexpected tensors: model.extra"),
        ({"model.layers.2.mlp.up_proj.weight": np.zeros(2, np.float32)}, "unexpected tensors: model.layers.2"),
        ({"model.norm.weight": np.zeros(31, np.float32)}, r"model.norm.weight float32\[31\], not \[32\]"),
        ({"model.norm.weight": np.zeros(32, np.int8)}, "model.norm.weight is stored as I8"),
        ({"model.norm.weight": np.zeros(32, np.float64)}, "model.norm.weight is stored as F64"),
    ],
)
def test_refuses_tensors_that_do_not_fit(tensors, words, write_directory):
    with pytest.raises(CheckpointError, match=words):
        load_huggingface(write_directory(tensors=tensors))


def test_every_problem_is_listed(write_directory):
    changes = {"model.norm.weight": None, "extra": np.zeros(1, np.float32), "lm_head.weight": np.zeros(1, np.float32)}
    with pytest.raises(CheckpointError, match="missing tensors: .*; unexpected tensors: extra; wrong tensors: lm_head"):
        load_huggingface(write_directory(tensors=changes))


def test_rotary_buffers_are_passed_over(write_directory):
    buffers = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32) for i in range(2)}
    checkpoint = load_huggingface(
        write_directory(tensors=buffers | {"model.rotary_emb.inv_freq": np.ones(4, np.float32)})
    )
    assert checkpoint.config.num_layers == 2
    with pytest.raises(CheckpointError, match="unexpected tensors: model.rotary_emb.inv_freq2"):
        load_huggingface(write_directory(tensors={"model.rotary_emb.inv_freq2": np.ones(4, np.float32)}))


def test_a_tied_head_may_be_stored_if_it_is_the_embedding(write_directory, tied, make_tensors):
    head = make_tensors(tied)["model.embed_tokens.weight"]
    load_huggingface(write_directory(shape=tied, tensors={"lm_head.weight": head}))
    head[3, 5] += 1
    with pytest.raises(CheckpointError, match="lm_head.weight differs"):
        load_huggingface(write_directory(shape=tied, tensors={"lm_head.weight": head}))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "gemma"}, "config.json: model_type is 'gemma'"),
        ({"num_hidden_layers": None}, "num_hidden_layers is None"),
        ({"num_hidden_layers": 2**31 - 1}, "2147483647 layers"),
        ({"vocab_size": 7}, "embed_tokens"),
        ({"eos_token_id": 10**6}, "eos token ids .1000000. are outside"),
        ({"eos_token_id": "</s>"}, "eos_token_id is '</s>'"),
        ({"eos_token_id": [True]}, "eos_token_id"),
    ],
)
def test_refuses_configs_that_do_not_fit(config, words, write_directory):
    with pytest.raises(CheckpointError, match=words):
        load_huggingface(write_directory(config=config))


def test_where_the_end_of_text_comes_from(write_directory):
    directory = write_directory(config={"eos_token_id": None})
    assert load_huggingface(directory).eos_token_ids == (2,), "the tokenizer's"
    directory = write_directory(config={"eos_token_id": [1, 0]})
    assert load_huggingface(directory).eos_token_ids == (1, 0), "config.json's"
    (directory / "generation_config.json").write_text('{"eos_token_id": 0}')
    checkpoint = load_huggingface(directory)
    assert checkpoint.eos_token_ids == (0,), "generation_config.json's"
    assert checkpoint.tokenizer is not None
    assert checkpoint.tokenizer.eos_token_ids == (0,)
    directory = write_directory(config={"eos_token_id": None}, tokenizer_config={"eos_token": None})
    (directory / "generation_config.json").unlink()
    assert load_huggingface(directory).eos_token_ids == ()


def test_a_tokenizer_larger_than_the_embedding(write_directory, backend):
    directory = write_directory()
    backend.add_tokens(["one too many"])
    backend.save(str(directory / "tokenizer.json"))
    with pytest.raises(CheckpointError, match=r"the tokenizer has \d+ tokens, the embedding only \d+ rows"):
        load_huggingface(directory)


def test_pickle_is_refused(write_directory):
    directory = write_directory()
    (directory / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="no model.safetensors and no model.safetensors.index.json$"):
        load_huggingface(directory)
    (directory / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match="pytorch_model.bin is pickle, which can run code"):
        load_huggingface(directory)


def test_no_directory(tmp_path):
    with pytest.raises(FileNotFoundError, match="no such directory"):
        load_huggingface(tmp_path / "none")
    with pytest.raises(CheckpointError, match="config.json: no such file"):
        load_huggingface(tmp_path)


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[]", b"\xff\xfe", b'{"a": ' + b"[" * 10**5, b'{"a": 1' + b"0" * 5000 + b"}"]
)
def test_damaged_json(data, write_directory):
    for name in ("config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json"):
        directory = write_directory()
        (directory / name).write_bytes(data)
        with pytest.raises(CheckpointError, match=name):
            load_huggingface(directory)
        (directory / name).unlink()


def test_every_truncation_is_noticed(write_directory):
    directory = write_directory()
    for name in ("model.safetensors", "tokenizer.json", "config.json"):
        data = (directory / name).read_bytes()
        for size in [*range(0, 40), *range(40, len(data), len(data) // 40), len(data) - 1]:
            (directory / name).write_bytes(data[:size])
            with pytest.raises(CheckpointError, match=name):
                load_huggingface(directory)
        (directory / name).write_bytes(data)
    assert load_huggingface(directory).config.num_layers == 2


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "tokenizer_config.json", "config.json"])
def test_no_flipped_byte_does_harm(name, write_directory):
    directory = write_directory()
    data = (directory / name).read_bytes()
    rng, refused = np.random.default_rng(0), 0
    for _ in range(150):
        broken = bytearray(data)
        for at in rng.integers(0, min(len(data), 2500), rng.integers(1, 3)):
            broken[at] ^= rng.integers(1, 256)
        (directory / name).write_bytes(broken)
        try:
            _read_all(load_huggingface(directory))
        except CheckpointError:
            refused += 1
    assert refused > 30


def test_a_file_cut_after_loading(write_directory):
    directory = write_directory()
    checkpoint = load_huggingface(directory)
    with open(directory / "model.safetensors", "r+b") as file:
        file.truncate(5000)
    with pytest.raises(CheckpointError, match="not a whole safetensors file"):
        _read_all(checkpoint)


def test_code_in_a_directory_is_not_run(write_directory):
    directory = write_directory(config={"auto_map": {"AutoModelForCausalLM": "evil.Model"}})
    (directory / "evil.py").write_text("raise SystemExit")
    (directory / "__init__.py").write_text("raise SystemExit")
    assert load_huggingface(directory).config.num_layers == 2


def test_validate_takes_arrays(tiny, make_tensors, tmp_path):
    arrays = make_tensors(tiny)
    validate(Checkpoint(tiny, arrays, None, (0,), tmp_path))
    assert set(required_tensors(tiny)) == set(arrays)
    wrong = arrays | {"model.norm.weight": np.zeros(32, np.float64)}
    with pytest.raises(CheckpointError, match=r"model.norm.weight float64\[32\], not \[32\] of float32 or bfloat16"):
        validate(Checkpoint(tiny, wrong, None, (), tmp_path))
    with pytest.raises(CheckpointError, match="eos token ids"):
        validate(Checkpoint(tiny, arrays, None, (-1,), tmp_path))
    deep = dataclasses.replace(tiny, num_layers=2**31 - 1)
    with pytest.raises(CheckpointError, match="2147483647 layers"):
        validate(Checkpoint(deep, arrays, None, (), tmp_path))


def test_a_lazy_tensor_reads_when_it_is_used():
    reads = []
    lazy = LazyTensor((2,), np.dtype(np.float32), lambda: reads.append(1) or np.ones(2, np.float32))
    assert not reads
    np.testing.assert_array_equal(lazy, np.ones(2))
    assert np.asarray(lazy, np.float64).dtype == np.float64
    with pytest.raises(ValueError, match="copy is False"):
        np.asarray(lazy, copy=False)
    assert len(reads) == 2
