import numpy as np
import pytest

from spec_jax.train.store import Store, Text, counted


def text(number, length, vocab=1000):
    rng = np.random.default_rng(number)
    return Text(number, rng.integers(0, vocab, length).astype(np.int32), rng.random(length) < 0.5)


@pytest.mark.parametrize(("vocab", "size"), [(1000, 2), (1 << 16, 2), ((1 << 16) + 1, 4)])
def test_texts_come_back_by_number(tmp_path, vocab, size):
    store = Store(tmp_path, {"vocab_size": vocab})
    given = [text(n, length, vocab) for n, length in ((4, 7), (0, 13), (2, 1), (1, 8))]
    store.append(given[:2])
    store.append([])
    store.append(given[2:])
    found = Store.existing(tmp_path).read()
    assert [t.number for t in found] == [0, 1, 2, 4] and store.numbers() == {0, 1, 2, 4}
    for a, b in zip(found, sorted(given, key=lambda t: t.number), strict=True):
        np.testing.assert_array_equal(a.tokens, b.tokens)
        np.testing.assert_array_equal(a.mask, b.mask)
        assert a.tokens.dtype == np.int32 and a.mask.dtype == bool
    assert counted(found) == sum(t.mask.sum() for t in given)
    shards = list(tmp_path.glob("*.safetensors"))
    assert len(shards) == 2
    big = Store(tmp_path / "big", {"vocab_size": vocab})
    big.append([text(0, 10_000, vocab)])
    assert (tmp_path / "big" / "000000.safetensors").stat().st_size < 10_000 * (size + 1 / 8) + 1000


def test_a_shard_that_was_cut_short_is_not_there(tmp_path):
    store = Store(tmp_path, {"vocab_size": 10})
    store.append([text(0, 5, 10)])
    (tmp_path / "000001.part").write_bytes(b"half")
    assert store.numbers() == {0}
    store.append([text(1, 5, 10)])
    assert store.numbers() == {0, 1}


def test_other_texts_are_refused(tmp_path):
    Store(tmp_path, {"vocab_size": 10, "temperature": 0.7})
    Store(tmp_path, {"vocab_size": 10, "temperature": 0.7})
    with pytest.raises(ValueError, match="temperature: got 1.0, takes 0.7"):
        Store(tmp_path, {"vocab_size": 10, "temperature": 1.0})
    with pytest.raises(ValueError, match="target: got 'x', takes None"):
        Store(tmp_path, {"vocab_size": 10, "temperature": 0.7, "target": "x"})


def test_mistakes_are_named(tmp_path):
    with pytest.raises(ValueError, match="about: got {}"):
        Store(tmp_path, {})
    with pytest.raises(FileNotFoundError, match="holds no texts"):
        Store.existing(tmp_path / "nowhere")
    store = Store(tmp_path, {"vocab_size": 10})
    with pytest.raises(ValueError, match="outside 0 .. 9 in text 3"):
        store.append([Text(3, np.array([10], np.int32), np.ones(1, bool))])
    with pytest.raises(ValueError, match="got 1 tokens and 2"):
        store.append([Text(3, np.array([1], np.int32), np.ones(2, bool))])
    assert store.numbers() == set()
