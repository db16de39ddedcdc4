"""Which cache blocks a row reads: all that hold a visible slot, each once, and nothing more of the cache."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.experimental import pallas as pl

from pallas_kernels.traffic import dma_bytes
from pallas_kernels.tree_attention import gpu, tpu
from pallas_kernels.tree_attention.blocks import Blocks
from pallas_kernels.tree_attention.ring import Ring


@given(
    size=st.sampled_from([4, 7]),
    slots=st.integers(1, 40),
    length=st.integers(0, 40),
    window=st.none() | st.integers(1, 45),
    sinks=st.integers(0, 12),
)
def test_every_visible_block_once(size, slots, length, window, sinks):
    length, sinks = min(length, slots), 0 if window is None else sinks
    blocks = Blocks(size, slots, window, sinks)
    seen = np.array([bool(blocks.visible(slot, length, 0)) for slot in range(slots)])
    needed = set(np.flatnonzero(seen) // size)
    count = int(blocks.count(jnp.int32(length)))
    read = [int(blocks.at(step, jnp.int32(length))) for step in range(blocks.steps + 2)]
    assert needed <= set(read[:count]) and len(set(read[:count])) == count <= blocks.steps
    assert len(needed) == count or window == 1  # such a node sees no slot, but its own position's block is read
    assert set(read[count:]) <= {read[max(count - 1, 0)]} and max(read) <= (slots - 1) // size
    for block in range(-(-slots // size)):
        inside = [blocks.visible(slot, length, 5) for slot in range(block * size, (block + 1) * size)]
        assert not blocks.whole(block, length, 5) or all(inside)


@given(size=st.sampled_from([4, 7]), slots=st.integers(1, 30), length=st.integers(0, 100), narrower=st.integers(0, 30))
def test_every_visible_block_of_a_ring_once(size, slots, length, narrower):
    window = max(1, slots + 1 - narrower)
    ring = Ring(size, slots, window)
    visible = {p % slots for p in range(max(0, length - window + 1), length)}
    at = jnp.int32(length)
    assert visible == {slot for slot in range(slots + size) if ring.visible(slot, at, 0)}
    count, every = int(ring.count(at)), -(-slots // size)
    read = [int(ring.at(step, at)) for step in range(ring.steps + 2)]
    assert {slot // size for slot in visible} == set(read[:count]) and len(set(read[:count])) == count <= ring.steps
    assert set(read[count:]) <= {read[max(count - 1, 0)]} and 0 <= min(read) <= max(read) < every
    assert max([0, *(slot // size + 1 for slot in visible)]) <= ring.used(at) <= every
    for block in range(every):
        inside = [ring.visible(slot, at, 5) for slot in range(block * size, (block + 1) * size)]
        assert not ring.whole(block, at, 5) or all(inside)


def shapes(n, lengths, slots=8192, kv=8, heads=32, d=128):
    array = lambda *shape: jax.ShapeDtypeStruct((len(lengths), *shape), jnp.bfloat16)  # noqa: E731
    return array(n, heads, d), array(kv, slots, d), array(kv, n, d), np.array(lengths)


@pytest.mark.parametrize("n", (8, 16, 32, 64))
def test_the_tpu_kernel_reads_each_live_row_once(n):
    """At 8 rows of 8 key/value heads and 8,192 tokens: at most a tenth over keys and values alone."""
    minimum = 2 * 8 * 8 * (8192 + n) * 128 * 2
    assert 1 <= tpu.bytes_moved(*shapes(n, [8192] * 8)) / minimum < 1.1


@pytest.mark.parametrize("kernel", (tpu, gpu), ids=("tpu", "gpu"))
def test_bytes_follow_the_text_and_the_window(kernel):
    whole = kernel.bytes_moved(*shapes(8, [8192] * 2))
    ragged = kernel.bytes_moved(*shapes(8, [8192, 0]))
    windowed = kernel.bytes_moved(*shapes(8, [8192] * 2), window=1024, sinks=4)
    assert 0.49 < ragged / whole < 0.56 and 0.1 < windowed / whole < 0.27
    ring = kernel.bytes_moved(*shapes(8, [8192] * 2, slots=1024), window=1024, ring=True)
    assert 0.1 < ring / whole and ring <= kernel.bytes_moved(*shapes(8, [8192] * 2), window=1024)


def test_blocks_are_counted_when_their_index_changes():
    lengths = jnp.asarray([0, 2])
    follows = pl.BlockSpec((1, 4), lambda i, j, n: (i, jnp.minimum(j, n[i])))
    stays = pl.BlockSpec((8,), lambda i, j, n: (0,))
    assert dma_bytes((2, 5), [(follows, jnp.float32)], lengths) == (1 + 3) * 4 * 4
    assert dma_bytes((2, 5), [(follows, jnp.bfloat16), (stays, jnp.int8)], lengths) == (1 + 3) * 4 * 2 + 8
