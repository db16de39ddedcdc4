import dataclasses
import math

import numpy as np
import pytest

from spec_jax.sampling.settings import Sampling, to_row

V = 10


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", 1e31),
        ("temperature", 1e-31),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", math.nan),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", -1.0),
        ("repetition_penalty", math.inf),
        ("presence_penalty", math.nan),
        ("presence_penalty", math.inf),
        ("frequency_penalty", -math.inf),
        ("frequency_penalty", 1e39),
        ("min_new_tokens", -1),
        ("banned_tokens", (-1,)),
        ("logit_bias", {-1: 1.0}),
    ],
)
def test_a_value_outside_its_range_is_refused_by_name(name, value):
    with pytest.raises(ValueError, match=rf"^{name}: got .*, takes "):
        Sampling(**{"temperature": 1.0, name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", "1"),
        ("top_k", 1.5),
        ("top_k", True),
        ("min_new_tokens", 1.0),
        ("banned_tokens", ("a",)),
        ("banned_tokens", (1.0,)),
        ("banned_tokens", "ab"),
        ("banned_tokens", 3),
        ("logit_bias", {True: 1.0}),
        ("logit_bias", [(3, 1.0)]),
        ("logit_bias", {3: "x"}),
    ],
)
def test_a_value_of_another_type_is_refused_by_name(name, value):
    """By us, or by the checker that tests run under."""
    with pytest.raises((ValueError, TypeError), match=name):
        Sampling(**{"temperature": 1.0, name: value})


@pytest.mark.parametrize("bias", [math.nan, math.inf, 1e39])
def test_a_bias_that_would_leave_float32_is_refused(bias):
    with pytest.raises(ValueError, match=r"logit_bias\[3\]: got"):
        Sampling(logit_bias={3: bias})


@pytest.mark.parametrize("truncation", [{"top_k": 2}, {"top_p": 0.9}, {"min_p": 0.1}])
def test_a_truncation_that_greedy_decoding_would_ignore_is_refused(truncation):
    with pytest.raises(ValueError, match="temperature 0"):
        Sampling(**truncation)


def test_a_token_biased_and_banned_is_refused():
    with pytest.raises(ValueError, match=r"banned_tokens: got tokens \[3\]"):
        Sampling(logit_bias={3: 1.0}, banned_tokens=(3, 4))


def test_neutral_defaults():
    row = to_row(Sampling(), V)
    assert not row.sampled and not row.adjusted
    assert to_row(Sampling(temperature=1.0, top_p=0.5), V).sampled


@pytest.mark.parametrize(
    "change",
    [
        {"repetition_penalty": 1.1},
        {"presence_penalty": -0.1},
        {"frequency_penalty": 0.1},
        {"logit_bias": {0: 0.5}},
        {"banned_tokens": (9,)},
        {"min_new_tokens": 1},
    ],
)
def test_adjusted_rows_are_known(change):
    assert to_row(Sampling(**change), V).adjusted


def test_row():
    s = Sampling(0.5, 20, 0.9, 0.1, 1.2, 0.3, 0.4, {2: 1.5, 0: -1.0}, (7,), 3)
    row = to_row(s, V, eos=(4, 5), max_bias=4, max_eos=3)
    assert row.top_k == V and row.min_new == 3
    assert row.bias_ids.tolist() == [2, 0, 7, -1] and row.bias.tolist() == [1.5, -1.0, -math.inf, 0.0]
    assert row.eos.tolist() == [4, 5, -1]
    numbers = [row.temperature, row.top_p, row.min_p, row.repetition, row.presence, row.frequency]
    np.testing.assert_allclose(numbers, [0.5, 0.9, 0.1, 1.2, 0.3, 0.4], rtol=1e-6)


@pytest.mark.parametrize(
    ("sampling", "eos", "message"),
    [
        (Sampling(logit_bias={10: 1.0}), (), r"logit_bias and banned_tokens: got token ids \[10\], takes ids 0 .. 9"),
        (Sampling(banned_tokens=(1, 2)), (), "logit_bias and banned_tokens: got 2 tokens, takes at most 1"),
        (Sampling(), (10,), r"eos_token_ids: got token ids \[10\]"),
        (Sampling(), (1, 2), "eos_token_ids: got 2 tokens, takes at most 1"),
    ],
)
def test_ids_that_do_not_fit_are_refused(sampling, eos, message):
    with pytest.raises(ValueError, match=message):
        to_row(sampling, V, eos, max_bias=1, max_eos=1)


def test_every_setting_reaches_the_row():
    """A setting that the row does not tell from its default would be ignored."""
    default = to_row(Sampling(temperature=1.0), V)
    changes = {"logit_bias": {1: 2.0}, "banned_tokens": (3,)}
    for field in dataclasses.fields(Sampling):
        change = changes.get(field.name, {"top_k": 3, "min_new_tokens": 2}.get(field.name, 0.5))
        row = to_row(Sampling(**{"temperature": 1.0, field.name: change}), V)
        same = [np.array_equal(getattr(row, f.name), getattr(default, f.name)) for f in dataclasses.fields(row)]
        assert not all(same), field.name
