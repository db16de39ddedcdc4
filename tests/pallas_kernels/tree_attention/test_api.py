"""The public function: what it refuses, and which implementation it takes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.tree_attention import api, tree_attention
from tests.pallas_kernels.tree_attention.cases import CASES, Case, arrays

ARGS = arrays(Case(lengths=(3, 5), used=(4, 2), n=4, slots=16, d=16))


def replaced(index, value):
    return (*ARGS[:index], value, *ARGS[index + 1 :])


@pytest.mark.parametrize(
    ("args", "options", "message"),
    [
        (replaced(0, jnp.zeros((2, 4, 3, 16))), {}, "q: got 3 heads, takes a multiple of the cache's 2"),
        (replaced(2, jnp.zeros((2, 2, 15, 16))), {}, r"cache_v: got shape \(2, 2, 15, 16\), takes \(2, 2, 16, 16\)"),
        (replaced(3, jnp.zeros((3,), jnp.int32)), {}, r"length: got shape \(3,\)"),
        (replaced(4, jnp.zeros((2, 2, 4, 8))), {}, "tree_k: got shape"),
        (replaced(6, jnp.zeros((2, 4, 5), bool)), {}, r"mask: got shape \(2, 4, 5\), takes \(2, 4, 4\)"),
        (replaced(6, jnp.zeros((2, 4, 4), jnp.int32)), {}, "mask: got int32, takes bool"),
        (ARGS, {"window": 0}, "window: got 0"),
        (ARGS, {"sinks": 2}, "sinks: got 2 with window None"),
        (ARGS, {"sinks": -1, "window": 3}, "sinks: got -1"),
        (ARGS, {"ring": True}, "ring: got window None and sinks None with 16 slots, takes a window"),
        (ARGS, {"ring": True, "window": 18}, "ring: got window 18"),
        (ARGS, {"ring": True, "window": 4, "sinks": 1}, "ring: got window 4 and sinks 1"),
        (ARGS, {"soft_cap": 0.0}, "soft_cap: got 0.0"),
        (ARGS, {"implementation": "cuda"}, "implementation: got 'cuda', takes None or one of xla, pallas_tpu"),
        (
            replaced(0, ARGS[0].astype(jnp.float16)),
            {"implementation": "pallas_tpu"},
            "q: got float16, pallas_tpu takes",
        ),
    ],
)
def test_wrong_arguments_are_named(args, options, message):
    with pytest.raises(ValueError, match=message):
        tree_attention(*args, **options)


@pytest.mark.parametrize(
    ("implementation", "case", "reason"),
    [
        ("pallas_gpu", Case(lengths=(3,), used=(4,), n=4, d=24), "head_dim 24, which pallas_gpu cannot tile"),
        ("pallas_tpu", Case(lengths=(3,), used=(4,), n=1024, heads=16, kv=1, d=128), "MiB of VMEM in pallas_tpu"),
    ],
)
def test_a_kernel_says_why_it_cannot_serve_a_shape(implementation, case, reason):
    shape = dataclasses.replace(case, slots=128)
    array = lambda *x: jax.ShapeDtypeStruct((1, *x), jnp.float32)  # noqa: E731
    q, cache = array(shape.n, shape.heads, shape.d), array(shape.kv, shape.slots, shape.d)
    tree, mask = array(shape.kv, shape.n, shape.d), jax.ShapeDtypeStruct((1, shape.n, shape.n), bool)
    length = jax.ShapeDtypeStruct((1,), jnp.int32)
    call = lambda *x, **o: tree_attention(*x, 0.1, **o)  # noqa: E731
    with pytest.raises(ValueError, match=reason):
        jax.eval_shape(lambda *x: call(*x, implementation=implementation), q, cache, cache, length, tree, tree, mask)


@pytest.mark.parametrize(("backend", "kernel"), [("tpu", "pallas_tpu"), ("gpu", "pallas_gpu"), ("cpu", "xla")])
def test_the_platform_chooses(backend, kernel, monkeypatch):
    taken = []

    def spy(name):
        return lambda q, *_, **__: taken.append(name) or q

    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    monkeypatch.setattr(api, "_BY_PLATFORM", {"tpu": spy("pallas_tpu"), "gpu": spy("pallas_gpu")})
    monkeypatch.setattr(api.reference, "tree_attention", spy("xla"))
    tree_attention(*ARGS)
    assert taken == [kernel]


def test_xla_takes_over_what_the_platform_s_kernel_cannot_serve(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    args = arrays(dataclasses.replace(CASES["short cache"], d=24))
    np.testing.assert_array_equal(tree_attention(*args), tree_attention(*args, implementation="xla"))


def test_a_window_wider_than_any_text_is_none():
    wide = tree_attention(*ARGS, window=20, sinks=2)
    np.testing.assert_array_equal(wide, tree_attention(*ARGS))
