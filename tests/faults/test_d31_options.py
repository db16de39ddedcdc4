"""D31: every option of a request acts with every drafter, or is refused by name."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.control.budget import WidestLive
from spec_jax.engine.requests import request
from spec_jax.sampling.settings import Sampling
from spec_jax.verify.match import match
from spec_jax.verify.rejection import point_mass, rejection
from tests.faults import kit, lawkit
from tests.faults.drafters import Guess, TableDrafter
from tests.faults.lawkit import PLAIN, V, gate, gate_rule, guess, law_of, sample, sample_rule
from tests.faults.laws import fit
from tests.faults.oracle import generate

PROMPT, BUDGET, EOS = [1, 2, 6], 30, 6
TABLES = jnp.repeat(kit.row_tables(31, 1), kit.ROWS, axis=0)
GRAMMAR = np.where(np.arange(kit.WORDS) % 2 == np.array([[0], [1]]), np.array([[1], [0]]), -1)
BASE = {"temperature": 1.0}
SAMPLINGS = {
    "temperature": {"temperature": 0.5},
    "top_k": {"top_k": 2},
    "top_p": {"top_p": 0.5},
    "min_p": {"min_p": 0.5},
    "repetition_penalty": {"repetition_penalty": 3.0},
    "presence_penalty": {"presence_penalty": 2.0},
    "frequency_penalty": {"frequency_penalty": 1.0},
    "logit_bias": {"logit_bias": {3: 4.0}},
    "banned_tokens": {"banned_tokens": (0, 5)},
    "min_new_tokens": {"min_new_tokens": 25},
}
# What the oracle is told, beside the defaults, for each option of `request`.
OPTIONS = {
    **{name: {"sampling": Sampling(**{**BASE, **change})} for name, change in SAMPLINGS.items()},
    "max_new_tokens": {"max_new_tokens": 4},
    "key": {"key": 1},
    "eos": {"eos": []},
    "stops": {"stops": [[3, 4], [1]]},
    "constraint_start": {"constraint_start": 1},
    "none": {},
}
SAMPLED = {"sampling": Sampling(**BASE), "max_new_tokens": BUDGET, "key": 0}
DEFAULT = {**SAMPLED, "eos": [EOS], "stops": (), "constraint_start": 0}


def wanted(name):
    o = {**DEFAULT, **OPTIONS[name]}
    noise = kit.gumbels(kit.key_of(o["key"])[None])[0]
    grammar = (GRAMMAR, 0) if o["constraint_start"] else None
    given = (o["max_new_tokens"], o["sampling"], noise, o["eos"], o["stops"], grammar)
    return generate(kit.logits_of(TABLES[0]), PROMPT, *given)


WANT = {name: wanted(name) for name in OPTIONS}


def engines():
    plain, cut = kit.engine(), {"controller": WidestLive(), "widths": (1, 4), "log_probs": False}
    texts = [PROMPT + WANT[name].tokens for name in OPTIONS]
    return {
        "none": (plain, kit.engine_params(plain, TABLES)),
        "chain": kit.follow(TABLES, texts, [3, 0, 7, 1]),
        "tree": kit.tree(TABLES),
        "widths": kit.follow(TABLES, texts, [3, 0, 1], [r % 2 * 3 for r in range(kit.ROWS)], 3, **cut),
    }


@pytest.mark.parametrize("drafter", ["none", "chain", "tree", "widths"])
def test_every_option_of_a_request_acts(drafter):
    e, params = engines()[drafter]
    params = params.replace(constraint=kit.room_for(GRAMMAR, kit.WORDS))
    state = kit.run(e, params, kit.batch([request(e, PROMPT, **{**DEFAULT, **OPTIONS[name]}) for name in OPTIONS]))
    wrong = [name for row, name in enumerate(OPTIONS) if not kit.same_text(state, row, WANT[name])]
    assert not wrong
    assert not any(WANT[name].tokens == WANT["none"].tokens for name in OPTIONS if name != "none")


LAWS = {
    "banned_tokens": Sampling(temperature=1.0, banned_tokens=(1, 3)),
    "logit_bias": Sampling(temperature=1.0, logit_bias={0: 2.0, 4: -1.0}),
    "min_new_tokens": Sampling(temperature=1.0, min_new_tokens=2),
    "repetition_penalty": Sampling(temperature=1.0, repetition_penalty=2.0),
    "min_p": Sampling(temperature=1.0, min_p=0.3),
}


@functools.cache
def default_texts(rule):
    target, draft = lawkit.TABLES["RND"]
    if rule is rejection:
        return sample(target, guess(draft, PLAIN), PLAIN, 3, eos=(2,))[0]
    return sample_rule(rule, target, guess(draft, PLAIN), PLAIN)


@pytest.mark.parametrize("option", LAWS)
def test_every_option_acts_on_the_law(option):
    (target, draft), sampling = lawkit.TABLES["RND"], LAWS[option]
    assert gate(target, guess(draft, PLAIN), sampling, eos=(2,)).ok
    assert not fit(default_texts(rejection), law_of(target, sampling, eos=(2,))).ok


@pytest.mark.parametrize("option", [name for name in LAWS if name != "min_new_tokens"])
def test_every_option_acts_on_the_law_of_the_point_mass_rule(option):
    (target, draft), sampling = lawkit.TABLES["RND"], LAWS[option]
    assert gate_rule(point_mass, target, guess(draft, PLAIN), sampling).ok
    assert not fit(default_texts(point_mass), law_of(target, sampling)).ok


@pytest.mark.parametrize("mode", ["point", "coupled", "sampled"])
@pytest.mark.parametrize("rule", [match, rejection, point_mass])
def test_a_rule_takes_a_draft_or_refuses_it(rule, mode):
    e = kit.engine(TableDrafter((-1, 0), mode), rule=rule)
    guess = Guess(TABLES[0, 0], TABLES[0, 0], jnp.int32(1), jnp.int32(0), jnp.int32(0))
    params, one = kit.engine_params(e, TABLES[:1], guess), request(e, [1])
    build = lambda: jax.eval_shape(lambda p, r: kit.decode_from(e, p, r, 1), params, one)  # noqa: E731
    if rule is rejection and mode != "sampled":
        with pytest.raises(ValueError, match=f"draft: got a '{mode}' draft.*, takes a 'sampled' or"):
            build()
    else:
        build()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_len": 0}, "max_len: got 0"),
        ({"prefill_chunk": 0}, "prefill_chunk: got 0"),
        ({"widths": (2, 1)}, "widths: got"),
        ({"widths": (1, 2)}, "widths: got .* end in the drafter's 1"),
        ({"drafter": kit.Follow(3, V)}, f"drafter: got one for {V} token ids, takes one for the target's {kit.WORDS}"),
    ],
)
def test_an_engine_that_cannot_work_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        kit.engine(**change)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"prompt": []}, "prompt: got no tokens"),
        ({"prompt": [8]}, r"prompt: got token ids \[8\]"),
        ({"prompt": [-1]}, r"prompt: got token ids \[-1\]"),
        ({"max_new_tokens": -1}, "max_new_tokens: got -1"),
        ({"max_new_tokens": kit.MAX_LEN}, "max_new_tokens: got"),
        ({"generated": [1] * 9, "max_new_tokens": 8}, "generated: got 9 tokens"),
        ({"generated": [9]}, r"token ids \[9\]"),
        ({"eos": [8]}, r"eos_token_ids: got token ids \[8\]"),
        ({"eos": [1, 2, 3]}, "eos_token_ids: got 3 tokens, takes at most 2"),
        ({"stops": [[1], [2], [3]]}, "stops: got 3 sequences, takes at most 2"),
        ({"stops": [[]]}, r"stops\[0\]: got 0 tokens"),
        ({"stops": [[1, 2, 3, 4, 5]]}, r"stops\[0\]: got 5 tokens, takes 1 .. 4"),
        ({"stops": [[9]]}, r"stops\[0\]: got token ids \[9\]"),
        ({"sampling": Sampling(logit_bias={9: 1.0})}, r"logit_bias and banned_tokens: got token ids \[9\]"),
        (
            {"sampling": Sampling(banned_tokens=(1, 2, 3))},
            "logit_bias and banned_tokens: got 3 tokens, takes at most 2",
        ),
        ({"sampling": Sampling(min_new_tokens=9), "max_new_tokens": 8}, "min_new_tokens: got 9"),
        ({"key": jnp.zeros((3, 2), jnp.uint32)}, r"key: got keys of shape \[3, 2\], takes one key"),
    ],
)
def test_a_request_that_does_not_fit_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        request(kit.engine(), **{"prompt": PROMPT, **given})
