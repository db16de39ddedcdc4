import numpy as np
import pytest

data = pytest.importorskip("spec_jax.train.data", reason="grain reads the batches", exc_type=ImportError)


def test_texts_are_packed_in_order_with_their_end():
    packed = data.pack([[5, 6], [], [7]], 0)
    np.testing.assert_array_equal(packed, [5, 6, 0, 0, 7, 0])
    assert packed.dtype == np.int32
    with pytest.raises(ValueError, match="texts: got none"):
        data.pack([], 0)


def test_a_batch_depends_on_its_number_alone():
    tokens = np.arange(1000, dtype=np.int32)
    first, again = (data.windows(tokens, 20, 10, 4, seed=3) for _ in range(2))
    forward = [first[i] for i in range(60)]
    for i in reversed(range(60)):
        np.testing.assert_array_equal(again[i], forward[i])
    assert not np.array_equal(data.windows(tokens, 20, 10, 4, seed=4)[0], forward[0])


def test_windows_are_whole_and_differ_between_epochs():
    tokens = np.arange(1000, dtype=np.int32)
    batches = data.windows(tokens, 20, 10, 4, seed=0)
    epoch = (1000 - 20 - 10 + 1) // 10 + 1
    rows = np.concatenate([batches[i] for i in range(2 * (epoch // 4))])
    assert rows.shape[1] == 20 and (np.diff(rows) == 1).all() and rows.min() >= 0 and rows.max() < 1000
    starts = rows[:, 0].reshape(2, -1)
    assert len(set(starts[0] // 10)) == starts.shape[1]  # no window twice in an epoch
    assert not np.array_equal(starts[0], starts[1])
    assert set(starts[0] % 10) != {0} and set(starts[0]) != set(starts[1])  # cut anew


def test_too_few_tokens_are_refused():
    exact = np.zeros(20 + 4 * 10 - 1, np.int32)
    assert data.windows(exact, 20, 10, 4, seed=0)[0].shape == (4, 20)
    with pytest.raises(ValueError, match="takes at least 59"):
        data.windows(exact[1:], 20, 10, 4, seed=0)


def test_whole_reads_every_token_once_but_for_the_overlap():
    tokens = np.arange(103, dtype=np.int32)
    found = data.whole(tokens, 13, 3, 2)
    assert found.shape == (5, 2, 13)
    rows = found.reshape(-1, 13)
    np.testing.assert_array_equal(rows[1:, :3], rows[:-1, -3:])
    np.testing.assert_array_equal(np.concatenate([rows[0, :3], *rows[:, 3:]]), tokens)
    with pytest.raises(ValueError, match="takes at least 23"):
        data.whole(tokens[:22], 13, 3, 2)
