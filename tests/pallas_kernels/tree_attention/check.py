"""An implementation against the dense softmax, on one case."""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np

from tests.pallas_kernels.tree_attention.cases import Case, arrays, dense, real


def check(implementation: Callable, case: Case, seed: int = 0) -> None:
    args = arrays(case, seed)
    got = jax.jit(lambda *x: implementation(*x, case.scale, **case.options()))(*args[:-1])
    assert got.dtype == args[0].dtype and got.shape == args[0].shape
    atol = 1e-5 if case.dtype == "float32" else 2e-2  # bfloat16 holds 8 bits, and values reach about 4
    counts = real(case)
    np.testing.assert_allclose(np.asarray(got, np.float64)[counts], dense(case, args)[counts], atol=atol, rtol=0)
