"""The TPU kernel through the chips' own compiler, with no chip: it builds, is used, and doesn't grow in bundles."""

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import aot
from pallas_kernels.gated_delta import Pending, gated_delta

pytestmark = pytest.mark.slow

# n, depth, pending rows, key heads, value heads, dk, dv, dtype of q, k and v, dtype of the state
SHAPES = {
    "qwen 3.5, 35B": (16, 8, 8, 16, 32, 128, 128, "bfloat16", "float32"),
    "one token": (1, 1, 8, 16, 32, 128, 128, "bfloat16", "float32"),
    "one token, nothing pending": (1, 1, 0, 16, 32, 128, 128, "bfloat16", "float32"),
    "a chunk": (64, 64, 64, 16, 32, 128, 128, "bfloat16", "float32"),
    "128 nodes, three value heads": (128, 16, 16, 16, 48, 128, 128, "bfloat16", "float32"),
    "qwen 3.5, 397B, odd sizes": (33, 9, 9, 16, 64, 128, 128, "bfloat16", "bfloat16"),
    "float32": (16, 8, 8, 4, 8, 128, 128, "float32", "float32"),
    "heads of 64 and 96": (32, 8, 8, 4, 4, 64, 96, "bfloat16", "float32"),
    "heads of 96 and 64": (16, 8, 8, 4, 12, 96, 64, "float32", "float32"),
    "heads of 256": (64, 16, 16, 4, 8, 256, 256, "bfloat16", "float32"),
    "no delta rule": (16, 8, 8, 16, 32, 128, 64, "bfloat16", "float32"),
}
# Scheduled bundles per value head with the commit at Qwen3.5 35B's size, by chip and number of nodes, for the libtpu
# that counted them.
LIBTPU, BUNDLES = (
    "0.0.42.1",
    {
        "v5e": {1: 136, 8: 140, 16: 145, 32: 201, 64: 426},
        "v6e": {16: 136},
    },
)
MOST = {16: 175, 64: 457}  # on v5e


EVERYWHERE = ("qwen 3.5, 35B", "a chunk")
BUILDS = [("v5e", shape) for shape in SHAPES] + [(c, s) for c in aot.TPU if c != "v5e" for s in EVERYWHERE]


@pytest.mark.parametrize(("chip", "shape"), BUILDS)
def test_builds_and_is_used(chip, shape):
    if lacks := aot.missing(chip):
        pytest.skip(lacks)
    n, depth, p, hk, hv, dk, dv, dtype, state = SHAPES[shape]
    number = lambda *x: jax.ShapeDtypeStruct((2, *x), jnp.float32)  # noqa: E731
    rows = lambda *x: jax.ShapeDtypeStruct((2, *x), jnp.dtype(dtype))  # noqa: E731
    args = [rows(n, hk, dk), rows(n, hk, dk), rows(n, hv, dv), number(n, hv), number(n, hv)]
    args += [jax.ShapeDtypeStruct((2, n, n), jnp.bool_), jax.ShapeDtypeStruct((2, hv, dk, dv), jnp.dtype(state))]
    args += [number(n, hk), number(n, hk)]
    if p:
        args += [rows(p, hk, dk), number(p, hk), number(hv, p, dv), number(hv, p), number(hv)]

    def call(q, k, v, decay, beta, mask, state, q_norm, k_norm, *pending):
        pending = Pending(*pending) if pending else None
        options = {"scale": dk**-0.5, "q_norm": q_norm, "k_norm": k_norm, "depth": depth}
        beta = None if shape == "no delta rule" else beta
        return gated_delta(q, k, v, decay, beta, mask, state, pending, implementation="pallas_tpu", **options)

    compiled = aot.compile(call, tuple(args), chip)
    calls = [line for line in compiled.as_text().splitlines() if 'custom_call_target="tpu_custom_call"' in line]
    assert len(calls) == 1 and "gated_delta" in calls[0]


@pytest.mark.parametrize("chip", ("v5e", "v6e", "h100"))
def test_bench_counts_bundles_and_errors(chip):
    if lacks := aot.missing(chip):
        pytest.skip(lacks)
    bench = Path(__file__).parents[3] / "scripts" / "bench.py"
    command = [sys.executable, str(bench), "kernels", "--op", "gated_delta", "--chip", chip]
    command += [] if chip == "v5e" else ["--quick"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    cases = result["cases"]
    assert all(case["compiled"] and (case["bundles_per_head"] is None) == (chip == "h100") for case in cases)
    assert all(max(case["error_output"], case["error_state"]) <= 1e-5 for case in cases)
    if chip not in aot.TPU:
        return
    version = importlib.metadata.version("libtpu")
    assert result["libtpu"] == version
    if version != LIBTPU:
        pytest.skip(f"the regression figures are libtpu {LIBTPU}'s, this is {version}")
    got = {case["n"]: case["bundles_per_head"] for case in cases if case["fused_commit"]}
    assert all(got[n] <= 1.05 * most for n, most in BUNDLES[chip].items()), (got, BUNDLES[chip])
    assert chip != "v5e" or all(got[n] <= most for n, most in MOST.items())
