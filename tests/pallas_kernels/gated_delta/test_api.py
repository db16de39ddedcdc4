"""The public function: what it refuses, and which implementation it takes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.gated_delta import Pending, Staged, api, gated_delta
from pallas_kernels.gated_delta.factors import UnsupportedError
from tests.pallas_kernels.gated_delta.cases import Case, inputs

X = inputs(Case(used=(4, 3), n=4, dk=16, dv=32))
ARGS, OPTIONS = tuple(map(jnp.asarray, X.args())), X.options()
PENDING = Pending(
    jnp.zeros((2, 3, 2, 16)), jnp.zeros((2, 3, 2)), jnp.zeros((2, 4, 3, 32)), jnp.zeros((2, 4, 3)), jnp.zeros((2, 4))
)
STAGED = Staged(jnp.zeros((2, 5, 2, 16)), jnp.zeros((2, 5, 2)), jnp.zeros((2, 4, 5, 32)), jnp.zeros((2, 5, 4)))


def changed(index, value):
    return (*ARGS[:index], value, *ARGS[index + 1 :])


@pytest.mark.parametrize(
    ("args", "options", "message"),
    [
        (changed(0, jnp.zeros((2, 4, 16))), {}, r"q: got shape \(2, 4, 16\), takes \[b, n, hk, dk\]"),
        (changed(0, jnp.zeros((2, 4, 2, 16), int)), {}, "q: got int32, takes floating point"),
        (changed(1, jnp.zeros((2, 4, 2, 8))), {}, r"k: got shape \(2, 4, 2, 8\), takes \(2, 4, 2, 16\)"),
        (changed(2, jnp.zeros((2, 4, 3, 32))), {}, "v: got 3 heads, takes a multiple of q's 2"),
        (changed(2, jnp.zeros((2, 4, 32))), {}, "v: got shape"),
        (changed(2, jnp.zeros((2, 5, 4, 32))), {}, r"v: got shape \(2, 5, 4, 32\), takes \(2, 4, 4, 32\)"),
        (changed(3, jnp.zeros((2, 4, 2))), {}, r"decay: got shape \(2, 4, 2\), takes \(2, 4, 4\)"),
        (changed(3, jnp.zeros((2, 4, 4, 8))), {}, r"decay: got shape .*, takes \(2, 4, 4, 16\)"),
        (changed(4, jnp.zeros((2, 4))), {}, "beta: got shape"),
        (changed(5, jnp.zeros((4, 4), bool)), {}, r"mask: got shape \(4, 4\), takes \(2, 4, 4\)"),
        (changed(5, jnp.zeros((2, 4, 4), int)), {}, "mask: got int32, takes bool"),
        (changed(6, jnp.zeros((2, 4, 32, 16))), {}, r"state: got shape .*, takes \(2, 4, 16, 32\)"),
        (changed(6, jnp.zeros((2, 4, 16, 32), int)), {}, "state: got int32, takes floating point"),
        (ARGS, {"q_norm": jnp.zeros((2, 4, 4))}, "q_norm: got shape"),
        (ARGS, {"k_norm": jnp.zeros((2, 4))}, "k_norm: got shape"),
        (ARGS, {"depth": 0}, "depth: got 0, takes None or a number from 1"),
        (ARGS, {"implementation": "cuda"}, "implementation: got 'cuda', takes None or one of xla, pallas_tpu"),
        (ARGS, {"staged": STAGED}, r"mask: got shape \(2, 4, 4\), takes \(2, 4, 9\)"),
        ((*ARGS, PENDING.replace(u=jnp.zeros((2, 4, 2, 32)))), {}, r"pending.u: got shape .*, takes \(2, 4, 3, 32\)"),
        ((*ARGS, PENDING.replace(weight=jnp.zeros((2, 3, 4)))), {}, "pending.weight: got shape"),
        ((*ARGS, PENDING.replace(decay=jnp.zeros((4,)))), {}, "pending.decay: got shape"),
        ((*ARGS, PENDING.replace(k_norm=jnp.zeros((2, 3)))), {}, "pending.k_norm: got shape"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_named(args, options, message):
    with pytest.raises(ValueError, match=message):
        gated_delta(*args, **(OPTIONS | options))


@pytest.mark.parametrize("field", ("k", "k_norm", "u", "decay"))
def test_wrong_staged_rows_are_named(field):
    mask = jnp.zeros((2, 4, 9), bool)
    wrong = STAGED.replace(**{field: jnp.zeros((2, 5))})
    with pytest.raises(ValueError, match=r"staged\.(k|k_norm|u|decay): got shape"):
        gated_delta(*changed(5, mask), **OPTIONS, staged=wrong)


def spies(monkeypatch, backend, refused=()):
    taken = []

    def spy(name):
        def call(*_, **__):
            taken.append(name)
            if name in refused:
                raise UnsupportedError(name)

        return call

    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    monkeypatch.setattr(api, "_load", spy)
    return taken


@pytest.mark.parametrize(("backend", "kernel"), [("tpu", "pallas_tpu"), ("gpu", "pallas_gpu"), ("cpu", "xla")])
def test_the_platform_chooses(backend, kernel, monkeypatch):
    taken = spies(monkeypatch, backend)
    gated_delta(*ARGS, **OPTIONS)
    assert taken == [kernel]


def test_xla_takes_over_what_the_platform_s_kernel_cannot_serve(monkeypatch):
    taken = spies(monkeypatch, "gpu", refused=("pallas_gpu",))
    gated_delta(*ARGS, **OPTIONS)
    assert taken == ["pallas_gpu", "xla"]
    with pytest.raises(UnsupportedError):
        gated_delta(*ARGS, **OPTIONS, implementation="pallas_gpu")


@pytest.mark.parametrize(
    ("args", "options", "reason"),
    [
        (ARGS, {"staged": STAGED}, "staged: got rows of earlier nodes"),
        (changed(3, jnp.zeros((2, 4, 4, 16))), {}, "decay: got one per channel"),
        (changed(0, ARGS[0].astype(jnp.float16)), {}, "q: got float16, pallas_gpu takes float32 or bfloat16"),
        (tuple(map(jnp.asarray, inputs(Case(used=(4,), n=4, dk=24)).args())), {}, "q: got heads of 24"),
        (tuple(map(jnp.asarray, inputs(Case(used=(4,), n=4, dv=24)).args())), {}, "v: got heads of 24"),
        (tuple(map(jnp.asarray, inputs(Case(used=(4,), n=130, dv=16)).args())), {}, "q: got 130 rows"),
    ],
)
def test_the_gpu_kernel_says_why_it_cannot_serve(args, options, reason):
    if "staged" in options:
        args = changed(5, jnp.zeros((2, 4, 9), bool))
    with pytest.raises(UnsupportedError, match=reason):
        gated_delta(*args, scale=1.0, implementation="pallas_gpu", **options)


def test_without_a_kernel_the_call_may_be_vmapped():
    norms = {name: OPTIONS[name] for name in ("q_norm", "k_norm")}
    one = lambda *x: gated_delta(*(y[None] for y in x[:-2]), scale=0.25, q_norm=x[-2][None], k_norm=x[-1][None]).output  # noqa: E731
    got = jax.jit(jax.vmap(one))(*ARGS, *map(jnp.asarray, norms.values()))
    np.testing.assert_allclose(got[:, 0], gated_delta(*ARGS, **OPTIONS).output, atol=1e-5)
