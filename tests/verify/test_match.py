import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spec_jax import noise
from spec_jax.sampling.settings import Sampling
from spec_jax.verify.match import match
from tests.faults import oracle
from tests.verify.walks import draft, scores

V, N, M = 5, 8, 5
SAMPLING = Sampling(temperature=0.8, top_k=4, presence_penalty=0.5)
verify = jax.jit(lambda key, d, s: match(key, d, s, M))


@st.composite
def trees(draw):
    parent = [-1] + [draw(st.integers(0, i - 1)) for i in range(1, N)]
    depth = [0]
    for p in parent[1:]:
        depth.append(depth[p] + 1)
    valid = [True]
    for p in parent[1:]:
        valid.append(valid[p] and depth[len(valid)] < M and draw(st.integers(0, 9)) > 0)
    return draw(st.lists(st.integers(0, V - 1), min_size=N, max_size=N)), parent, valid


def walk(tokens, parent, valid, logits, sampling, noise_at):
    """Node by node: the chosen token, and the first valid child that holds it."""
    node, emitted, path, raw, law = 0, [], [0], [], []
    while True:
        z = oracle.adjusted(logits[node], sampling, (), emitted)
        keep = oracle.kept(z, sampling) if sampling.temperature else z > -np.inf
        token = int(np.argmax(np.where(keep, z + sampling.temperature * noise_at[len(emitted)], -np.inf)))
        raw.append(np.log(oracle.softmax(logits[node])[token]))
        law.append(np.log(oracle.law(z, sampling)[token]))
        emitted.append(token)
        children = [i for i in range(1, N) if parent[i] == node and tokens[i] == token and valid[i]]
        if not children:
            return emitted, path, raw, law
        node = children[0]
        path.append(node)


@pytest.mark.parametrize("sampling", [Sampling(), SAMPLING], ids=["greedy", "sampled"])
@given(tree=trees(), seed=st.integers(0, 2**16))
@settings(max_examples=60)
def test_walk(sampling, tree, seed):
    logits = np.random.default_rng(seed).normal(0, 2, (N, V)).astype(np.float32)
    key = noise.request_key(seed)
    at = np.stack([noise.gumbel(key, jnp.int32(4 + i), jnp.arange(V)) for i in range(M)])
    v = verify(key, draft(*tree), scores(logits, sampling, want_log_probs=True))
    emitted, path, raw, law = walk(*tree, logits.astype(np.float64), sampling, at)
    n = int(v.accepted) + 1
    assert v.tokens.tolist() == emitted + [0] * (M - n)
    assert v.path.tolist() == path + [0] * (M - n)
    assert v.next_token == emitted[-1]
    np.testing.assert_allclose(v.raw_log_probs, raw + [0] * (M - n), atol=2e-6)
    np.testing.assert_allclose(v.log_probs, law + [0] * (M - n), atol=2e-6)


def test_the_first_of_equal_children_is_taken():
    d = draft([0, 3, 3, 3, 3, 0, 0, 0], [-1, 0, 0, 2, 1, 0, 0, 0])
    v = verify(noise.request_key(0), d, scores(np.eye(V)[[3] * N]))
    assert v.path.tolist() == [0, 1, 4, 0, 0] and v.tokens.tolist() == [3, 3, 3, 0, 0]


@pytest.mark.parametrize("bad", [np.nan, -np.inf, np.inf, np.where(np.arange(V) == 1, np.inf, 0.0)], ids=str)
@pytest.mark.parametrize("sampling", [Sampling(), SAMPLING])
def test_invalid_logits_end_the_walk(bad, sampling):
    """A row that has a NaN, or no token, gives -1 there; what came before it stands."""
    logits = np.eye(V)[[3] * N] * 50
    logits[1] = bad
    v = verify(noise.request_key(0), draft([0, 3, 3, 3, 3, 0, 0, 0], range(-1, N - 1)), scores(logits, sampling))
    assert v.tokens.tolist()[:2] == [3, -1] and v.accepted == 1 and v.next_token == -1


def test_flags_leave_out_what_the_row_does_not_need():
    logits = np.random.default_rng(3).normal(0, 1, (N, V))
    d = draft([0, 1, 2, 3, 4, 0, 1, 2], range(-1, N - 1))
    full = verify(noise.request_key(1), d, scores(logits))
    for flags in ({"sampled": False}, {"adjusted": False}, {"sampled": False, "adjusted": False}):
        jax.tree.map(np.testing.assert_array_equal, verify(noise.request_key(1), d, scores(logits, **flags)), full)
