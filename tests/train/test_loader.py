"""Batches by number; rows that hold what the loss counts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("grain", reason="reads the batches")

from spec_jax.train.loader import Batch, Feed, windows  # noqa: E402
from spec_jax.train.mesh import data_mesh  # noqa: E402
from spec_jax.train.store import Text  # noqa: E402


def texts():
    rng = np.random.default_rng(0)
    made = []
    for i, length in enumerate(rng.integers(2, 40, 30)):
        made.append(Text(i, np.arange(100 * i, 100 * i + length, dtype=np.int32), np.arange(length) >= length // 2))
    return [*made, Text(30, np.arange(5, dtype=np.int32), np.zeros(5, bool))]


def test_a_batch_depends_on_its_number_alone():
    first, again = (windows(texts(), 12, 4, seed=3) for _ in range(2))
    forward = [first[i] for i in range(20)]
    for i in reversed(range(20)):
        jax.tree.map(np.testing.assert_array_equal, again[i], forward[i])
    other = windows(texts(), 12, 4, seed=4)[0]
    assert not np.array_equal(other["tokens"], forward[0]["tokens"])


def test_rows_are_windows_with_something_that_counts():
    made, seen, starts = texts(), [], set()
    dataset = windows(made, 12, 4, seed=0)
    per_epoch = 30 // 4
    for i in range(6 * per_epoch):
        rows = dataset[i]
        for tokens, mask, length in zip(rows["tokens"], rows["mask"], rows["length"], strict=True):
            text = made[tokens[0] // 100]
            start = tokens[0] % 100
            assert length == min(12, len(text.tokens)) and mask[1:length].any()
            np.testing.assert_array_equal(tokens[:length], text.tokens[start : start + length])
            np.testing.assert_array_equal(mask[:length], text.mask[start : start + length])
            assert not mask[length:].any() and not tokens[length:].any()
            if i < per_epoch:
                seen.append(text.number)
            starts.add((text.number, int(start)))
    assert len(set(seen)) == len(seen) and 30 not in seen
    assert max(sum(n == number for n, _ in starts) for number in range(30)) > 2  # cut anew


def test_cached_features_go_with_their_tokens():
    made = texts()
    cached = [np.stack([text.tokens, -text.tokens], -1)[..., None].astype(np.float16) for text in made]
    rows = windows(made, 12, 4, seed=0, features=cached)[3]
    found = np.where(np.arange(12)[:, None, None] < rows["length"][:, None, None, None], rows["features"], 0)
    np.testing.assert_array_equal(found[..., 0, 0], rows["tokens"].astype(np.float16))
    np.testing.assert_array_equal(found[..., 1, 0], -rows["tokens"].astype(np.float16))


def test_too_few_texts_are_refused():
    with pytest.raises(ValueError, match="texts: got 30 in which the loss counts a token, takes at least a batch, 31"):
        windows(texts(), 12, 31, seed=0)


def test_a_step_is_fed_what_it_reads():
    feed = Feed(windows(texts(), 12, 4, seed=0), {"w": jnp.ones(3)}, {"kept": jnp.arange(2)})
    batch = feed[7]
    assert isinstance(batch, Batch) and batch.step == 7 and batch.step.dtype == jnp.int32
    np.testing.assert_array_equal(batch.texts.tokens, windows(texts(), 12, 4, seed=0)[7]["tokens"])
    assert batch.target["w"] is feed[8].target["w"]


def test_a_mesh_holds_the_same():
    dataset = windows(texts(), 12, 4, seed=0)
    plain, spread = Feed(dataset, {"w": jnp.ones(3)}), Feed(dataset, {"w": jnp.ones(3)}, mesh=data_mesh(1))
    jax.tree.map(np.testing.assert_array_equal, plain[2], spread[2])
    with pytest.raises(ValueError, match="devices: got 99"):
        data_mesh(99)
