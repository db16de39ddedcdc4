import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.train import features
from spec_jax.tree import Tree
from tests.train import toy

TARGET, PARAMS = toy.target(), toy.params()


@pytest.mark.parametrize(("dtype", "rtol"), [("float16", 2e-3), ("bfloat16", 1e-2)])
def test_a_cache_holds_what_is_read(tmp_path, dtype, rtol):
    texts = [t for n in (3, 9, 17) for t in toy.texts(2, n, 1, seed=n)]
    read = jax.jit(lambda tokens, length: features.read(TARGET, PARAMS, tokens, length)[0])
    written = features.Cache.write(tmp_path, TARGET, PARAMS, texts, dtype, batch=4)
    for cache in (written, features.Cache(tmp_path)):
        assert len(cache) == 6
        for i, text in enumerate(texts):
            expected = read(jnp.asarray(text.tokens)[None], jnp.array([len(text.tokens)]))
            assert cache[i].dtype.name == dtype and cache[i].shape == (len(text.tokens), 2, 16)
            np.testing.assert_allclose(cache[i].astype(np.float32), expected, rtol=rtol, atol=rtol)
    size = (tmp_path / "features.npy").stat().st_size
    assert size < sum(len(t.tokens) for t in texts) * 2 * 16 * 2 + 200


def test_the_last_tap_gives_the_law():
    tokens = jnp.arange(8)[None]

    @jax.jit
    def both():
        found = features.read(TARGET, PARAMS, tokens, jnp.array([8]))
        _, state = TARGET.prefill(PARAMS, TARGET.init_state(PARAMS, 1, 16), tokens, jnp.array([7]))
        tree = Tree(tokens[:, 7:], jnp.array([[-1]]), jnp.ones((1, 1), bool))
        return TARGET.logits(PARAMS, found[:, -1:, -1]), TARGET.score(PARAMS, state, tree)[0].logits

    np.testing.assert_allclose(*both(), rtol=1e-4, atol=1e-5)


def test_with_last_adds_it_once():
    assert features.with_last(toy.target((1,)), 2).taps == (1, 2)
    assert features.with_last(toy.target((1, 2)), 2).taps == (1, 2)


def test_mistakes_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="no complete cache"):
        features.Cache(tmp_path)
    with pytest.raises(ValueError, match="dtype: got 'int8'"):
        features.Cache.write(tmp_path, TARGET, PARAMS, toy.texts(1), "int8")
    with pytest.raises(ValueError, match="texts: got none"):
        features.Cache.write(tmp_path, TARGET, PARAMS, [])
    bare = dataclasses.replace(TARGET, taps=())
    with pytest.raises(ValueError, match="target: got one without taps"):
        features.read(bare, PARAMS, jnp.zeros((1, 4), jnp.int32), jnp.array([4]))
