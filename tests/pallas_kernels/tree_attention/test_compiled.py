"""The kernels through the chips' own compilers, with no chip: they build, are used, and don't grow in bundles."""

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import aot
from pallas_kernels.tree_attention import tree_attention

pytestmark = pytest.mark.slow

# kv heads, query heads, head_dim, n, m, slots, dtype, options
SHAPES = {
    "llama 3, 8B": (8, 32, 128, 64, 64, 8192, "bfloat16", {}),
    "llama 3, 8B, one node": (8, 32, 128, 1, 1, 8192, "bfloat16", {}),
    "llama 3, 8B, 128 nodes": (8, 32, 128, 128, 128, 2048, "bfloat16", {}),
    "smollm2": (3, 9, 64, 13, 13, 2000, "bfloat16", {}),
    "smollm2, float32": (3, 9, 64, 16, 16, 2048, "float32", {}),
    "phi 3": (32, 32, 96, 32, 32, 2048, "bfloat16", {"window": 2047}),
    "gemma 2": (4, 8, 256, 8, 16, 4096, "bfloat16", {"window": 4096, "soft_cap": 50.0}),
    "gemma 2, float32": (4, 8, 256, 16, 16, 4096, "float32", {"soft_cap": 50.0}),
    "ring": (8, 32, 128, 16, 16, 4096, "bfloat16", {"window": 4096, "ring": True}),
    "ring of no whole blocks": (3, 9, 64, 13, 13, 200, "float32", {"window": 100, "ring": True}),
    "sinks": (8, 32, 128, 16, 16, 4096, "bfloat16", {"window": 1024, "sinks": 4}),
}
TARGETS = {"pallas_tpu": "tpu_custom_call", "pallas_gpu": "__gpu$xla.gpu.triton"}
# Scheduled bundles of 8 rows of Llama 3 8B by chip and number of nodes, for the libtpu that counted them.
LIBTPU, BUNDLES = "0.0.42.1", {
    "v5e": {8: 2993, 16: 4610, 32: 4278, 64: 3297, 128: 3271},
    "v6e": {8: 2825, 16: 4006, 32: 3398, 64: 3222, 128: 2725},
}  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("chip", aot.CHIPS)
def test_builds_and_is_used(chip, shape):
    if lacks := aot.missing(chip):
        pytest.skip(lacks)
    kv, heads, d, n, m, slots, dtype, options = SHAPES[shape]
    implementation = "pallas_tpu" if chip in aot.TPU else "pallas_gpu"
    array = lambda *x: jax.ShapeDtypeStruct((4, *x), jnp.dtype(dtype))  # noqa: E731
    cache, tree = array(kv, slots, d), array(kv, m, d)
    length, mask = jax.ShapeDtypeStruct((4,), jnp.int32), jax.ShapeDtypeStruct((4, n, m), jnp.bool_)
    call = lambda *x: tree_attention(*x, d**-0.5, implementation=implementation, **options)  # noqa: E731
    compiled = aot.compile(call, (array(n, heads, d), cache, cache, length, tree, tree, mask), chip)
    calls = [
        line for line in compiled.as_text().splitlines() if f'custom_call_target="{TARGETS[implementation]}"' in line
    ]
    assert len(calls) == 1 and "tree_attention" in calls[0]


@pytest.mark.parametrize("chip", aot.CHIPS)
def test_bench_counts_bundles_and_bytes(chip):
    if lacks := aot.missing(chip):
        pytest.skip(lacks)
    bench = Path(__file__).parents[3] / "scripts" / "bench.py"
    command = [sys.executable, str(bench), "kernels", "--op", "tree_attention", "--chip", chip]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    cases = json.loads(done.stdout.splitlines()[-1])["cases"]
    assert all(case["compiled"] and (case["bundles"] is None) == (chip == "h100") for case in cases)
    if chip in aot.TPU:
        assert all(c["bytes_over_minimum"] <= 1.1 for c in cases if c["context"] == 8192 and c["n"] <= 64)
    if chip in BUNDLES and importlib.metadata.version("libtpu") == LIBTPU:
        worst = {n: max(c["bundles"] for c in cases if c["n"] == n) for n in BUNDLES[chip]}
        assert all(worst[n] <= 1.05 * BUNDLES[chip][n] for n in worst), (worst, BUNDLES[chip])


def test_an_unknown_chip_is_refused():
    with pytest.raises(ValueError, match="chip: got 'a100', takes one of v5e, v5p, v6e, h100"):
        aot.missing("a100")
