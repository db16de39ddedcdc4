"""A classifier that ends drafts: its examples against drafts made one by one, its fit, and that texts stay the same."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file
from scipy.special import expit, log_expit

from spec_jax.drafters import stopping
from spec_jax.drafters.small_model import SmallModel
from spec_jax.drafters.stopping import Classifier
from spec_jax.engine.decoder import Decoder
from spec_jax.engine.engine import Engine
from spec_jax.tree import Tree
from tests.drafters.test_small_model import SETTINGS, plain, tables, target

PROMPTS = [[1, 2, 3], [4], [5, 6]]
K = 5


@functools.cache
def data():
    """Features and outcomes of drafts on the greedy texts, of each text apart."""
    texts = [(prompt, r.tokens) for prompt, r in zip(PROMPTS, plain("greedy"), strict=True)]
    return [stopping.examples(target(), tables()[1], [*p, *t], len(p), K) for p, t in texts]


def together():
    x, y = (np.concatenate(each) for each in zip(*data(), strict=True))
    return x, y


@jax.jit
def logits_behind(params, tokens, length):
    """The model's logits behind tokens[:length]."""
    state = target().init_state(params, 1, 64)
    _, state = target().prefill(params, state, tokens[None], (length - 1)[None])
    anchor = Tree(tokens[length - 1][None, None], jnp.full((1, 1), -1), jnp.ones((1, 1), bool))
    return target().score(params, state, anchor)[0].logits[0, 0]


def test_examples_are_drafts_made_one_by_one():
    prompt, text = PROMPTS[2], [*PROMPTS[2], *plain("greedy")[2].tokens]
    want, ends = [], []
    for start in range(len(prompt), len(text)):
        drafted = list(text[:start])
        for depth in range(min(K, len(text) - start)):
            z = logits_behind(tables()[1], jnp.asarray(drafted + [0] * (40 - len(drafted))), jnp.int32(len(drafted)))
            p = np.exp(np.asarray(z, float) - np.logaddexp.reduce(np.asarray(z, float)))
            peak = np.clip(p.max(), 1e-3, 1 - 1e-3)
            want.append((np.log(peak / (1 - peak)), -(p * np.log(p)).sum(), depth))
            drafted.append(int(np.argmax(p)))
            ends.append(drafted[-1] == text[len(drafted) - 1])
            if not ends[-1]:
                break
    got, accepted = data()[2]
    np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-4)
    assert accepted.tolist() == ends and 0 < np.mean(ends) < 1 and got[:, 2].max() == K - 1


def loss(classifier, x, y):
    z = x @ np.array(classifier.weights) + classifier.bias
    return -(np.where(y, log_expit(z), log_expit(-z))).mean()


def test_a_fit_is_where_the_likelihood_is_greatest():
    rng = np.random.default_rng(0)
    x, true = rng.normal(0, 1, (20_000, 3)), Classifier((0.8, -0.5, 0.3), -0.2)
    y = rng.random(len(x)) < expit(x @ np.array(true.weights) + true.bias)
    found = stopping.fit(x, y, ridge=1e-6)
    np.testing.assert_allclose([*found.weights, found.bias], [*true.weights, true.bias], atol=0.06)
    gap = y - expit(x @ np.array(found.weights) + found.bias)
    np.testing.assert_allclose([*(x.T @ gap / len(x)), gap.mean()], 0, atol=1e-5)
    always = stopping.fit(np.ones((4, 3)), np.ones(4))
    assert np.isfinite(always.weights).all() and always(jnp.log(jnp.array([0.9, 0.1])), 0) > 0.9


def test_untrained_the_chance_is_the_likeliest_tokens():
    law = jnp.log(jnp.array([[0.5, 0.25, 0.25], [0.9, 0.1, 0.0]]))
    np.testing.assert_allclose(Classifier()(law, jnp.array([0, 3])), [0.5, 0.9], rtol=1e-5)
    np.testing.assert_allclose(Classifier((0.0, 1.0, 0.5), 0.2)(law[0], 2), expit(1.5 * np.log(2) + 1.2), rtol=1e-5)


def test_text_is_plain_decodings_and_drafts_are_shorter_where_they_would_fail(tmp_path):
    """With a classifier of these very texts, from a file."""
    stopping.fit(*together()).save(tmp_path / "classifier.safetensors")
    learned = stopping.load(tmp_path / "classifier.safetensors")
    x, y = together()
    assert learned == stopping.fit(x, y) and loss(learned, x, y) < loss(Classifier(), x, y)
    sure = x @ np.array(learned.weights) + learned.bias >= 0
    assert y[sure].mean() > 0.5 > y[~sure].mean()
    drafter = SmallModel(target(), K, least=0.5, sure=learned)
    decoder = Decoder(Engine(target(), 48, drafter=drafter), *tables(), batch=3)
    for name in ("greedy", "sampled"):
        results = decoder.generate(PROMPTS, 30, key=6, sampling=SETTINGS[name])
        assert [r.tokens for r in results] == [r.tokens for r in plain(name)]
        drafted, rounds, accepted = (sum(r.counters[c] for r in results) for c in ("drafted", "rounds", "accepted"))
        assert 0 < accepted and drafted < K * rounds


def test_what_does_not_fit_is_refused(tmp_path):
    save_file({"weights": np.zeros(2)}, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match=r"path: got arrays {'weights': \(2,\)}, takes"):
        stopping.load(tmp_path / "other.safetensors")
    with pytest.raises((ValueError, TypeError), match="weights"):
        Classifier((1.0,))  # pyright: ignore
    with pytest.raises(ValueError, match="takes finite numbers"):
        Classifier(bias=float("nan"))
    with pytest.raises(ValueError, match=r"features: got shape \(4, 2\)"):
        stopping.fit(np.ones((4, 2)), np.ones(4))
    with pytest.raises(ValueError, match="ridge: got 0"):
        stopping.fit(np.ones((4, 3)), np.ones(4), ridge=0)
    with pytest.raises(ValueError, match="prompt_length: got 3"):
        stopping.examples(target(), tables()[1], [1, 2, 3], 3, K)
