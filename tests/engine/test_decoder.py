"""The decoder on toy targets: requests in and out, streaming, stop strings, pause and resume, bad input."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax import noise
from spec_jax.control.budget import WidestLive
from spec_jax.drafters.scripted import Script, Scripted
from spec_jax.drafters.suffix import Suffix
from spec_jax.engine.decoder import Decoder
from spec_jax.engine.engine import Engine
from spec_jax.engine.text import GrowingText, held_back
from spec_jax.models.toy import AuditTarget, audit_table
from spec_jax.sampling.constraint import from_transitions
from spec_jax.sampling.settings import Sampling

V = 8
LETTERS = "abcdefgh"


class Letters:
    """A tokenizer of single letters; h is the end of a text."""

    vocab_size = V
    eos_token_ids = (7,)

    def encode(self, text):
        return [LETTERS.index(c) for c in text]

    def stream(self):
        return self

    def push(self, ids):
        return "".join(LETTERS[i] for i in ids)

    def flush(self):
        return ""


@functools.cache
def table():
    return audit_table(V, seed=3)


def engine(speculative=False, **options):
    drafter = {"drafter": Scripted(3, V), "widths": (1, 4), "controller": WidestLive()} if speculative else {}
    return Engine(AuditTarget(V), 40, prefill_chunk=4, log_probs=True, **drafter, **options)


@functools.cache
def decoder(speculative=False, batch=2):
    """One decoder for all tests: each leaves it idle."""
    rng = np.random.default_rng(0)
    script = Script(jnp.asarray(rng.integers(0, V, (batch, 40))), jnp.full((batch, 40), 3)) if speculative else None
    return Decoder(engine(speculative), table(), script, Letters(), batch)


SAMPLED = Sampling(temperature=1.0)


@functools.cache
def plain(prompt, tokens, key, temperature=1.0, **options):
    sampling = Sampling(temperature=temperature)
    return decoder().generate([prompt], tokens, key=key, sampling=sampling, eos=(), **options)[0]


@pytest.mark.parametrize("speculative", (False, True))
def test_more_requests_than_slots_each_as_if_alone(speculative):
    prompts = ["abc", "a", "bbbbbb", "cde", "aced"]
    results = decoder(speculative).generate(prompts, 12, key=5, sampling=SAMPLED, eos=())
    for prompt, result in zip(prompts, results, strict=True):
        assert result.tokens == plain(prompt, 12, 5).tokens
        assert result.finish == "budget" and result.prompt == tuple(LETTERS.index(c) for c in prompt)
        np.testing.assert_allclose(result.log_probs, plain(prompt, 12, 5).log_probs, atol=1e-5)
        counters = result.counters
        assert counters["emitted"] == counters["accepted"] + counters["rounds"] - counters["trimmed"] == 12


def test_samples_of_a_prompt_have_their_own_keys_and_one_prefill():
    d, calls = decoder(), []
    prefill, d._prefill = d._prefill, lambda *a: calls.append(1) or prefill(*a)
    try:
        results = d.generate(["abc"], 10, n=5, key=9, sampling=SAMPLED, eos=())
    finally:
        d._prefill = prefill
    assert len(calls) == 1 and len({r.tokens for r in results}) > 1
    first = noise.request_key(9)
    for i, result in enumerate(results):
        alone = d.generate(["abc"], 10, key=noise.sample_key(first, i), sampling=SAMPLED, eos=())[0]
        assert result.tokens == alone.tokens


@pytest.mark.parametrize("chunk", (1, 2, 5, 64))
def test_stream_delivers_every_token_and_character_once(chunk):
    d = decoder(True)
    ids = [d.submit(p, 14, key=1, sampling=SAMPLED, eos=())[0] for p in ("abc", "b", "cc")]
    updates = list(d.run(chunk))
    for prompt, id in zip(("abc", "b", "cc"), ids, strict=True):
        mine = [u for u in updates if u.id == id]
        result = mine[-1].result
        assert sum(u.result is not None for u in mine) == 1
        assert tuple(t for u in mine for t in u.tokens) == result.tokens == plain(prompt, 14, 1).tokens
        assert "".join(u.text for u in mine) == result.text == "".join(LETTERS[t] for t in result.tokens)


@pytest.mark.parametrize("chunk", (1, 3, 64))
@pytest.mark.parametrize("speculative", (False, True))
def test_stop_strings_end_the_text_before_them(chunk, speculative):
    d, whole = decoder(speculative), plain("abc", 30, 2)
    text = "".join(LETTERS[t] for t in whole.tokens)
    for begin, size in ((0, 1), (4, 2), (9, 3)):
        stop = text[begin : begin + size]
        at = text.index(stop)
        (id,) = d.submit("abc", 30, key=2, sampling=SAMPLED, eos=(), stop_strings=[stop, "hhhhhhhhhh"])
        updates = list(d.run(chunk))
        result = updates[-1].result
        assert result.finish == "stop" and result.text == text[:at] == "".join(u.text for u in updates)
        assert result.tokens == whole.tokens[: at + size]
        assert tuple(t for u in updates for t in u.tokens) == result.tokens
        assert len(result.log_probs) == len(result.tokens) and not d.busy


def test_stop_tokens_and_eos_are_emitted_but_not_text():
    d, whole = decoder(True), plain("abc", 30, 2)
    stop = whole.tokens[5:8]
    first = next(i for i in range(30) if whole.tokens[i : i + 3] == stop)
    for chunk in (1, 64):
        d.submit("abc", 30, key=2, sampling=SAMPLED, eos=(), stops=[stop])
        updates = list(d.run(chunk))
        result = updates[-1].result
        assert result.finish == "stop" and result.tokens == whole.tokens[: first + 3]
        want = "".join(LETTERS[t] for t in whole.tokens[:first])
        assert result.text == want == "".join(u.text for u in updates)
    end = whole.tokens[6]
    result = d.generate(["abc"], 30, key=2, sampling=SAMPLED, eos=[end])[0]
    at = whole.tokens.index(end)
    assert result.finish == "eos" and result.tokens == whole.tokens[: at + 1]
    assert result.text == "".join(LETTERS[t] for t in whole.tokens[:at])


def test_minimum_length_holds_off_eos_stops_and_stop_strings():
    d, whole = decoder(), plain("abc", 30, 2)
    text = "".join(LETTERS[t] for t in whole.tokens)
    result = d.generate(
        ["abc"], 30, key=2, sampling=Sampling(temperature=1.0, min_new_tokens=9), eos=(), stop_strings=[text[2]]
    )[0]
    assert len(result.tokens) == text.index(text[2], 8) + 1
    stops = [[whole.tokens[2]]]
    result = d.generate(["abc"], 30, key=2, sampling=Sampling(temperature=1.0, min_new_tokens=9), eos=(), stops=stops)[
        0
    ]
    assert len(result.tokens) == text.index(text[2], 8) + 1
    banned = d.generate(["abc"], 30, key=2, sampling=Sampling(temperature=1.0, min_new_tokens=20), eos=list(range(4)))[
        0
    ]
    assert min(banned.tokens[:20]) >= 4


@pytest.mark.parametrize("chunks", (1, 2, 4))
def test_saved_requests_go_on_in_another_decoder(tmp_path, chunks):
    d = decoder(True)
    ids = [d.submit(p, 20, key=3, sampling=SAMPLED, eos=(), stop_strings=["zz"])[0] for p in ("abc", "bd")]
    updates = [u for _ in range(chunks) for u in d.step(2)]
    path = tmp_path / "paused.safetensors"
    d.save(str(path))
    for id in ids:
        d.close(id)
    assert all(u.result.finish == "closed" for u in d.run())
    other = Decoder(engine(True), table(), d.params.drafter, Letters(), 2)
    other.restore(str(path))
    updates += list(other.run(2))
    for prompt, id in zip(("abc", "bd"), ids, strict=True):
        mine = [u for u in updates if u.id == id]
        want = plain(prompt, 20, 3).tokens
        assert tuple(t for u in mine for t in u.tokens) == want == mine[-1].result.tokens
        assert "".join(u.text for u in mine) == mine[-1].result.text
    assert not list(tmp_path.glob("*.part"))


def test_saved_state_of_another_engine_or_damaged_is_refused(tmp_path):
    path = tmp_path / "paused.safetensors"
    d = decoder()
    d.save(str(path))
    longer = Decoder(dataclasses.replace(engine(), max_len=41), table(), None, Letters(), 2)
    with pytest.raises(ValueError, match="the engine takes"):
        longer.restore(str(path))
    with pytest.raises(ValueError, match="another engine"):
        Decoder(dataclasses.replace(engine(), log_probs=False), table(), None, Letters(), 2).restore(str(path))
    path.write_bytes(path.read_bytes()[:-50])
    with pytest.raises(ValueError, match="damaged"):
        d.restore(str(path))
    with pytest.raises((ValueError, FileNotFoundError)):
        d.restore(str(tmp_path / "none"))


def test_text_so_far_recomputes_what_was_evicted():
    whole = plain("abc", 20, 4)
    for cut in (0, 1, 7, 20):
        result = decoder(True).generate(["abc"], 20, key=4, sampling=SAMPLED, eos=(), generated=whole.tokens[:cut])[0]
        assert result.tokens == whole.tokens
        assert np.isnan(result.log_probs[:cut]).all()
        np.testing.assert_allclose(result.log_probs[cut:], whole.log_probs[cut:], atol=1e-5)


def test_a_request_closed_while_it_waits_has_a_result():
    d = decoder()
    ids = [d.submit("abc", 4, eos=())[0] for _ in range(4)]
    d.close(ids[3])
    results = {u.id: u.result for u in d.run() if u.result}
    assert set(results) == set(ids) and results[ids[3]].finish == "closed" and results[ids[3]].tokens == ()
    d.submit("abc", 4)
    d.close(ids[3] + 1)
    assert [u.result.finish for u in d.run()] == ["closed"] and not d.busy
    with pytest.raises(ValueError, match="id: got 99999"):
        d.close(99999)


def test_constraints_by_index():
    only = [from_transitions(np.where(np.isin(np.arange(V), keep), 0, -1)[None]) for keep in ([0, 1], [2, 3, 4])]
    d = Decoder(engine(), table(), None, Letters(), 2, constraints=only)
    first, second = (d.generate(["abc"], 12, sampling=SAMPLED, eos=(), constraint=i)[0] for i in (0, 1))
    assert set(first.tokens) == {0, 1} and set(second.tokens) == {2, 3, 4}
    assert d.generate(["abc"], 12, key=1, sampling=SAMPLED, eos=())[0].tokens == plain("abc", 12, 1).tokens


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf])
def test_invalid_logits_end_the_request_and_no_other(bad):
    d = Decoder(engine(), table().at[:, 1].set(bad), None, Letters(), 2)
    result = d.generate(["abc"], 5, eos=())[0]
    assert result.finish == "invalid" and result.tokens == ()
    banned = Sampling(banned_tokens=tuple(range(V)))
    results = decoder().generate(["abc"], 5, sampling=banned, eos=())
    assert results[0].finish == "invalid" and results[0].tokens == ()


def test_nothing_compiles_after_warm_up():
    d = decoder(True)
    d.generate(["abc", "b", "c"], 8, n=2, sampling=SAMPLED, eos=(), stop_strings=["q"])
    d.submit("abc", 8)
    d.close(d.submit("a", 8)[0])
    list(d.run())
    before = d.programs
    settings = (Sampling(), Sampling(temperature=0.5, top_p=0.9), Sampling(presence_penalty=0.3, banned_tokens=(3,)))
    for i, sampling in enumerate(settings * 4):
        d.generate(["abcdefg"[: 1 + i % 7]], 3 + i, key=i, sampling=sampling, stops=[[1, 2]] if i % 2 else [])
    assert d.programs == before


def test_a_decoder_of_an_equal_engine_compiles_nothing():
    """Made anew, of the same batch size and for other parameters too; one of another engine has its own programs."""
    first, again, other = (Decoder(engine(max_eos=n), table(), batch=3) for n in (3, 3, 2))
    text = first.generate([[1, 2, 3]], 8, key=1, sampling=SAMPLED)[0].tokens
    assert again.programs == first.programs == 4 and other.programs == 0
    assert again.generate([[1, 2, 3]], 8, key=1, sampling=SAMPLED)[0].tokens == text
    swapped = Decoder(engine(max_eos=3), -table(), batch=3)
    assert swapped.generate([[1, 2, 3]], 8, key=1, sampling=SAMPLED)[0].tokens != text
    assert swapped.programs == 4


BAD = [
    ("prompt: got no tokens", {"prompt": []}),
    ("prompt: got token ids", {"prompt": [1, V]}),
    ("prompt: got 41 tokens", {"prompt": [1] * 41}),
    ("max_new_tokens: got 38", {"max_new_tokens": 38}),
    ("max_new_tokens: got -1", {"max_new_tokens": -1}),
    ("n: got 0", {"n": 0}),
    ("key: got a rbg key", {"key": "rbg"}),
    ("eos_token_ids: got token ids", {"eos": [V]}),
    ("eos_token_ids: got 5 tokens", {"eos": [0, 1, 2, 3, 4]}),
    ("stops: got 5 sequences", {"stops": [[1]] * 5}),
    (r"stops\[0\]: got 0 tokens", {"stops": [[]]}),
    (r"stops\[0\]: got 9 tokens", {"stops": [[1] * 9]}),
    ("stop_strings: got", {"stop_strings": [""]}),
    ("stop_strings: got", {"stop_strings": "abc"}),
    ("constraint: got 0", {"constraint": 0}),
    ("min_new_tokens: got 9", {"max_new_tokens": 8, "sampling": Sampling(min_new_tokens=9)}),
    ("banned_tokens: got token ids", {"sampling": Sampling(banned_tokens=(V,))}),
    ("generated: got 3", {"max_new_tokens": 2, "generated": [1, 2, 3]}),
]


@pytest.mark.parametrize(("message", "options"), BAD, ids=[m for m, _ in BAD])
def test_bad_requests_are_refused_and_leave_nothing_behind(message, options):
    d = decoder()
    given = {"prompt": [1, 2, 3], "max_new_tokens": 4, **options}
    if given.get("key") == "rbg":
        given["key"] = jax.random.key(0, impl="rbg")
    with pytest.raises((ValueError, TypeError), match=message):
        d.submit(given.pop("prompt"), given.pop("max_new_tokens"), **given)
    assert not d.busy


def test_generate_queues_all_prompts_or_none():
    with pytest.raises(ValueError, match="prompt"):
        decoder().generate(["abc", []], 4)
    assert not decoder().busy
    with pytest.raises(ValueError, match="prompts: got one string"):
        decoder().generate("abc", 4)


def test_prompt_at_the_limit_gives_no_tokens():
    result = decoder().generate([[1] * 40])[0]
    assert (result.tokens, result.finish, result.counters["rounds"]) == ((), "max_len", 0)
    assert decoder().generate([[1] * 39])[0].finish in ("max_len", "eos")


def test_pieces_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="widths"):
        engine(True).__class__(AuditTarget(V), 40, drafter=Scripted(3, V), widths=(1, 8))
    with pytest.raises(ValueError, match="max_len: got 0"):
        Engine(AuditTarget(V), 0)
    with pytest.raises(ValueError, match="batch: got 0"):
        Decoder(engine(), table(), batch=0)
    with pytest.raises(ValueError, match=r"constraints\[0\]"):
        Decoder(engine(), table(), constraints=[from_transitions(np.zeros((1, V + 1), int))])
    with pytest.raises(ValueError, match="has no tokenizer"):
        Decoder(engine(), table()).submit("abc")


def test_held_back_ends_may_still_become_a_stop():
    assert held_back("abcd", ["de", "cde"]) == 2
    assert held_back("abcd", ["xx"]) == 0
    assert held_back([1, 2, 3], [[3, 4], [2, 3, 4, 5]]) == 2
    assert held_back("abc", []) == 0


def test_growing_text_takes_the_earliest_stop():
    text = GrowingText(Letters(), ["cd", "bcde"])
    assert text.push([0, 1]) == "a"
    assert text.push([2, 3, 4]) == "b" and text.stopped_after == 4 and text.text == "ab"
    assert text.finish() == ""


def test_what_was_learned_is_forgotten():
    drafter = Suffix(nodes=8, longest=8, store=64)
    e = Engine(AuditTarget(V), 40, prefill_chunk=4, drafter=drafter, controller=WidestLive(), widths=(1, 8))
    made = Decoder(e, table(), None, Letters())

    def passes() -> tuple[tuple[int, ...], int]:
        result = made.generate([[1, 2, 3]], 24, key=5, sampling=Sampling(temperature=1.0), eos=())[0]
        return result.tokens, result.counters["rounds"]

    first, again = passes(), passes()
    assert again[0] == first[0] and again[1] < first[1]
    made.forget()
    assert passes() == first
    made.submit([1, 2], 4)
    with pytest.raises(ValueError, match="forget: got a decoder with requests"):
        made.forget()
