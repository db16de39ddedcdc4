import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.random import threefry_2x32
from scipy.stats import chi2, kstest

from spec_jax import noise

KEY = noise.request_key(2024)
IDS = jnp.arange(50_000)

# Text that was emitted once must come out again, so these values never change. Key words, position, token: G.
GOLDEN = {
    ((0, 0), 0, 0): 0.6123591,
    ((0, 1), 5, 151_935): 0.9844301,
    ((0xDEADBEEF, 42), 131_071, 7): -0.4500827,
    ((2**32 - 1, 2**32 - 1), 1, 50_256): 0.2777088,
}


def words(n, seed=0):
    return jnp.asarray(np.random.default_rng(seed).integers(0, 2**32, (n, 2), dtype=np.uint32))


@pytest.mark.parametrize("place", GOLDEN)
def test_golden_values(place):
    key, position, token = place
    value = noise.gumbel(jnp.asarray(np.array(key, np.uint32)), jnp.int32(position), jnp.int32(token))
    assert float(value) == pytest.approx(GOLDEN[place], abs=1e-6)


def test_threefry_is_the_published_generator():
    """Against JAX's own, and against the known answers of the Random123 distribution."""
    counts = words(200, 1)
    for key in words(3):
        ours = jnp.concatenate(noise.threefry(key, counts[:, 0], counts[:, 1]))
        assert (ours == threefry_2x32(key, jnp.concatenate([counts[:, 0], counts[:, 1]]))).all()
    ones, zero = np.uint32(0xFFFFFFFF), np.uint32(0)
    for key, count, block in [
        ((zero, zero), (zero, zero), (0x6B200159, 0x99BA4EFE)),
        ((ones, ones), (ones, ones), (0x1CB996FC, 0xBB002BE7)),
        ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
    ]:
        k, c = (jnp.asarray(np.array(x, np.uint32)) for x in (key, count))
        assert tuple(int(x) for x in noise.threefry(k, c[0], c[1])) == block


def test_gumbel_has_full_resolution():
    """Against the formula in float64 on the same 64 bits; 23 random bits would be 5 % off in the largest values."""
    ids = jnp.arange(2_000_000)
    got = np.asarray(noise.gumbel(KEY, jnp.int32(17), ids), np.float64)
    hi, lo = (np.asarray(x, np.float64) for x in noise.threefry(KEY, jnp.uint32(17), ids.astype(jnp.uint32)))
    want = -np.log(-np.log1p(-(hi + (lo + 0.5) / 2**32) / 2**32))
    assert (want > 13).any()
    np.testing.assert_allclose(got[want > 0], want[want > 0], rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(got, want, rtol=0, atol=0.01)


def test_uniform_is_inside_the_open_interval():
    u = jax.vmap(noise.uniform, (None, None, 0))(KEY, jnp.int32(5), IDS)
    assert (u > 0).all() and (u < 1).all()
    assert kstest(np.asarray(u), "uniform").pvalue > 1e-6


def test_a_subset_of_tokens_gets_the_same_noise():
    all_of_them = noise.gumbel(KEY, jnp.int32(3), jnp.arange(1000))
    some = jnp.array([[999, 0], [7, 512]])
    assert (noise.gumbel(KEY, jnp.int32(3), some) == all_of_them[some]).all()


@pytest.mark.parametrize("logits", [[0.0, 1.0, -2.0, 0.5, 3.0], [0.0] * 7, [-1.0, -jnp.inf, 2.0]])
def test_argmax_has_the_law_of_softmax(logits):
    z, n = jnp.array(logits), 50_000
    tokens = jnp.arange(len(logits))
    drawn = jax.vmap(lambda key: jnp.argmax(z + noise.gumbel(key, jnp.int32(11), tokens)))(words(n))
    seen, want = np.bincount(drawn, minlength=len(logits)), n * np.asarray(jax.nn.softmax(z), np.float64)
    assert not seen[want == 0].any()
    seen, want = seen[want > 0], want[want > 0]
    assert chi2.sf(((seen - want) ** 2 / want).sum(), len(want) - 1) > 1e-6


def test_streams_keys_positions_and_tokens_are_independent():
    """The largest of many sample correlations stays where that of independent noise does."""
    keys = [KEY, *(noise.stream(KEY, name) for name in ("draft", "accept", "residual"))]
    keys += [noise.sample_key(KEY, 1), noise.sample_key(KEY, 2), noise.request_key(2025)]
    rows = [noise.gumbel(key, jnp.int32(t), IDS) for key in keys for t in (0, 1, 2**20)]
    rows.append(noise.gumbel(KEY, jnp.int32(0), IDS + 1))
    correlation = np.corrcoef(np.stack(rows)) - np.eye(len(rows))
    assert abs(correlation).max() < 6 / len(IDS) ** 0.5
    assert len({tuple(np.asarray(key).tolist()) for key in keys}) == len(keys)


def test_the_first_sample_has_the_request_key():
    assert (noise.sample_key(KEY, 0) == KEY).all()


def test_request_keys():
    assert (noise.request_key(5) == jax.random.key_data(jax.random.key(5, impl="threefry2x32"))).all()
    assert (noise.request_key(jax.random.key(5, impl="threefry2x32")) == noise.request_key(5)).all()
    raw = np.array([[1, 2], [3, 4]], np.uint32)
    assert (noise.request_key(raw) == raw).all() and (noise.request_key(jnp.asarray(raw[0])) == raw[0]).all()


def test_seeds_are_used_whole():
    seeds = [0, 1, 2**31, 2**32 - 1, 2**32, 2**32 + 1, 2**63, 2**64 - 1]
    assert len({tuple(noise.request_key(s).tolist()) for s in seeds}) == len(seeds)
    assert noise.request_key(2**32 - 1).tolist() == jax.random.key_data(jax.random.key(2**32 - 1)).tolist()


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_seeds_that_do_not_fit_are_refused(seed):
    with pytest.raises(ValueError, match="key: got the seed"):
        noise.request_key(seed)


@pytest.mark.parametrize(
    "key",
    [
        lambda: jax.random.key(0, impl="rbg"),
        lambda: jax.random.key(0, impl="unsafe_rbg"),
        lambda: jnp.zeros(2, jnp.int32),
        lambda: jnp.zeros(4, jnp.uint32),
        lambda: True,
    ],
)
def test_other_keys_are_refused(key):
    with pytest.raises(TypeError, match="key: got"):
        noise.request_key(key())
