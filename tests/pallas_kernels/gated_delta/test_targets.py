"""Relatives of the gated delta rule through the same function, each against its own recurrence as its paper has it."""

import numpy as np
import pytest

from pallas_kernels.gated_delta import gated_delta
from tests.pallas_kernels.gated_delta.cases import ancestors, close, random_parents

N, HEADS, DK, DV = 16, 2, 8, 12


def over_tree(parent, state, step):
    """step(state, node) -> (state, output) along each root path from one state."""
    states, outputs = {-1: state}, []
    for node in range(len(parent)):
        states[node], output = step(states[parent[node]], node)
        outputs.append(output)
    return np.stack(outputs)


@pytest.fixture
def rng():
    return np.random.default_rng(11)


@pytest.fixture
def parent(rng):
    return random_parents(rng, N, N, 7)


def call(q, k, v, decay, beta, parent, state, scale=1.0):
    mask = ancestors(parent)
    arrays = [None if x is None else x.astype(np.float32)[None] for x in (q, k, v, decay, beta, state)]
    return np.asarray(gated_delta(*arrays[:5], mask[None], arrays[5], scale=scale).output[0])


def draws(rng, *shapes):
    return [rng.normal(size=shape) for shape in shapes]


def unit(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def test_mamba_2(rng, parent):
    """h = exp(dt A) h + dt x B, y = C h + D x (SSD, arXiv 2405.21060; on trees: STree), one B and C for all heads."""
    x, b, c, state = draws(rng, (N, HEADS, DV), (N, 1, DK), (N, 1, DK), (HEADS, DV, DK))
    dt, a, skip = rng.uniform(0.01, 1, (N, HEADS)), -rng.uniform(1, 16, HEADS), rng.normal(size=HEADS)

    def step(h, i):
        h = np.exp(dt[i] * a)[:, None, None] * h + (dt[i][:, None] * x[i])[:, :, None] * b[i, 0]
        return h, h @ c[i, 0] + skip[:, None] * x[i]

    got = call(c, b, dt[..., None] * x, dt * a, None, parent, state.swapaxes(1, 2))
    close(got + skip[:, None] * x, over_tree(parent, state, step), 2e-6)


def test_retnet(rng, parent):
    """s = gamma_h s + k v (arXiv 2307.08621)."""
    q, k, v, state = draws(rng, (N, HEADS, DK), (N, HEADS, DK), (N, HEADS, DV), (HEADS, DK, DV))
    gamma = 1 - 2.0 ** (-5 - np.arange(HEADS))

    def step(s, i):
        s = gamma[:, None, None] * s + k[i][..., None] * v[i][:, None]
        return s, np.einsum("hk,hkv->hv", q[i], s)

    decay = np.broadcast_to(np.log(gamma), (N, HEADS))
    close(call(q, k, v, decay, None, parent, state), over_tree(parent, state, step), 2e-6)


def test_linear_attention(rng, parent):
    """A sum over the path, in one go."""
    q, k, v, state = draws(rng, (N, HEADS, DK), (N, HEADS, DK), (N, HEADS, DV), (HEADS, DK, DV))
    mask = ancestors(parent)
    want = np.einsum("ihk,hkv->ihv", q, state) + np.einsum("ihk,jhk,ij,jhv->ihv", q, k, mask, v)
    close(call(q, k, v, np.zeros((N, HEADS)), None, parent, state), want, 2e-6)


@pytest.mark.parametrize("channels", (False, True), ids=("simple GLA", "GLA"))
def test_gated_linear_attention(rng, parent, channels):
    """s = alpha s + k v, alpha a number per head or per channel (arXiv 2312.06635)."""
    q, k, v, state = draws(rng, (N, HEADS, DK), (N, HEADS, DK), (N, HEADS, DV), (HEADS, DK, DV))
    alpha = rng.uniform(0.05, 1, (N, HEADS, DK) if channels else (N, HEADS))

    def step(s, i):
        gate = alpha[i][..., None] if channels else alpha[i][:, None, None]
        s = gate * s + k[i][..., None] * v[i][:, None]
        return s, np.einsum("hk,hkv->hv", q[i], s) * DK**-0.5

    close(call(q, k, v, np.log(alpha), None, parent, state, DK**-0.5), over_tree(parent, state, step), 2e-6)


@pytest.mark.parametrize("gate", ("none", "head", "channel"), ids=("DeltaNet", "Gated DeltaNet", "KDA"))
def test_delta_rules(rng, parent, gate):
    """s = (I - beta k k^T) alpha s + beta k v^T, as matrices."""
    q, k, v, state = draws(rng, (N, HEADS, DK), (N, HEADS, DK), (N, HEADS, DV), (HEADS, DK, DV))
    k, beta = unit(k), rng.uniform(0, 1, (N, HEADS))
    alpha = rng.uniform(0.05, 1, (N, HEADS, DK))
    if gate != "channel":
        alpha = np.broadcast_to(alpha[..., :1], alpha.shape) if gate == "head" else np.ones_like(alpha)

    def step(s, i):
        outer = beta[i][:, None, None] * k[i][..., None]
        s = (np.eye(DK) - outer * k[i][:, None]) @ (alpha[i][..., None] * s) + outer * v[i][:, None]
        return s, np.einsum("hk,hkv->hv", q[i], s)

    decay = np.log(alpha if gate == "channel" else alpha[..., 0])
    close(call(q, k, v, decay, beta, parent, state), over_tree(parent, state, step), 2e-6)


def test_gated_delta_product(rng):
    """Three Householder steps per token: a token is a chain of three nodes, with the gate at the first (2502.10297)."""
    tokens, steps = 6, 3
    parent = random_parents(rng, tokens, tokens, 4)
    q, state = draws(rng, (tokens, HEADS, DK), (HEADS, DK, DV))
    k, v = draws(rng, (tokens, steps, HEADS, DK), (tokens, steps, HEADS, DV))
    k, beta, alpha = unit(k), rng.uniform(0, 2, (tokens, steps, HEADS)), rng.uniform(0.05, 1, (tokens, HEADS))

    def step(s, i):
        s = alpha[i][:, None, None] * s
        for j in range(steps):
            u = beta[i, j][:, None] * (v[i, j] - np.einsum("hk,hkv->hv", k[i, j], s))
            s = s + k[i, j][..., None] * u[:, None]
        return s, np.einsum("hk,hkv->hv", q[i], s)

    nodes = np.arange(tokens * steps)
    expanded = np.where(nodes % steps, nodes - 1, parent[nodes // steps] * steps + steps - 1)
    expanded = np.where((nodes % steps == 0) & (parent[nodes // steps] < 0), -1, expanded)
    decay = np.zeros((tokens, steps, HEADS))
    decay[:, 0] = np.log(alpha)
    flat = lambda x: x.reshape(tokens * steps, *x.shape[2:])  # noqa: E731
    got = call(np.repeat(q, steps, axis=0), flat(k), flat(v), flat(decay), flat(beta), expanded, state)
    close(got[steps - 1 :: steps], over_tree(parent, state, step), 2e-6)
