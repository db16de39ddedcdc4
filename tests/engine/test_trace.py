"""A trace is the decode itself, round by round, and its records tell every node's fate and every token's reason."""

import dataclasses
import functools
import json

import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.engine import trace
from spec_jax.engine.requests import request, stack
from spec_jax.sampling.settings import Sampling
from spec_jax.verify.relaxed import Relaxed
from tests.faults import kit
from tests.faults.oracle import generate, softmax

TABLES = kit.row_tables(50, 1)
LOGITS = kit.logits_of(TABLES[0])
PROMPT, BUDGET = [3, 1, 4], 30
SETTINGS = {"greedy": Sampling(), "sampled": Sampling(temperature=0.8, top_k=5, presence_penalty=0.3)}


def rounds_of(sampling=None, rule=None, eos=(), **changes):
    e, params = kit.tree(TABLES, log_probs=False, **({"rule": rule} if rule else {}), **changes)
    return list(trace.trace(e, params, request(e, PROMPT, BUDGET, 7, sampling, eos)))


@functools.cache
def greedy_rounds():
    return rounds_of()


def text_of(rounds):
    return [token for r in rounds for token in r.kept]


@pytest.mark.parametrize("name", SETTINGS)
def test_text_and_reasons(name):
    sampling = SETTINGS[name]
    noise = kit.gumbels(kit.key_of(7)[None])[0]
    want = generate(LOGITS, PROMPT, BUDGET, sampling, noise)
    rounds = rounds_of(sampling)
    assert text_of(rounds) == want.tokens and rounds[-1].finish == "budget"
    assert {r.finish for r in rounds[:-1]} == {"running"}
    kinds, text = set(), list(PROMPT)
    for r in rounds:
        assert r.position == len(text) and r.width == len(kit.TREE)
        assert r.nodes[0] == trace.Node(text[-1], -1, 1.0, "root")
        path = [0]
        for i, step in enumerate(r.steps):
            kinds.add(step.kind)
            assert step.node == path[-1] and step.token == step.choice and step.probability == step.choice_probability
            if sampling.temperature == 0:
                assert abs(step.probability - softmax(LOGITS([*text, *r.kept[:i]]))[step.token]) < 1e-6
            children = [v for v, node in enumerate(r.nodes) if node.parent == path[-1]]
            hit = [v for v in children if r.nodes[v].token == step.token]
            assert step.kind == ("accepted" if hit else "correction" if children else "bonus")
            assert all((r.nodes[v].fate == "rejected") == (v not in hit) for v in children)
            path += hit[:1]
        text += r.kept
        for v, node in enumerate(r.nodes[1:], 1):
            on_path = v in path
            assert (node.fate in ("accepted", "trimmed")) == on_path
            assert (node.fate == "unreached") == (not on_path and node.parent not in path)
    assert kinds == {"accepted", "correction", "bonus"} if name == "greedy" else kinds >= {"accepted", "correction"}


def test_a_text_that_ends_inside_a_round():
    """Two texts that do, and one that ends with its round."""
    whole = greedy_rounds()
    full, trimmed = text_of(whole), 0
    last = set(np.cumsum([len(r.kept) for r in whole]) - 1)
    first = {t: full.index(t) for t in full}
    inside, between = ([t for t, at in first.items() if (at in last) == known] for known in (False, True))
    for token in [*inside[:2], *between[:1]]:
        at = first[token]
        rounds = rounds_of(eos=[token])
        assert text_of(rounds) == full[: at + 1] and rounds[-1].finish == "eos"
        behind = [step for step in rounds[-1].steps if not step.kept and step.kind == "accepted"]
        assert [node.fate for node in rounds[-1].nodes].count("trimmed") == len(behind)
        trimmed += len(behind)
    assert trimmed > 0


def test_the_choice_is_the_targets_own_where_a_rule_takes_another():
    rounds = rounds_of(rule=Relaxed.top(kit.WORDS))
    text, other = list(PROMPT), 0
    for r in rounds:
        for i, step in enumerate(r.steps):
            assert step.choice == int(np.argmax(LOGITS([*text, *[s.token for s in r.steps[:i]]])))
            assert step.choice_probability >= step.probability > 0
            other += step.choice != step.token
        text += r.kept
    assert other > 0


def test_nodes_beyond_the_width_are_cut():
    @dataclasses.dataclass(frozen=True)
    class Narrow:
        uses_cost = False

        def init(self, batch):
            return ()

        def decide(self, state, draft, active, cost, widths):
            return jnp.int32(0)

        def observe(self, state, draft, width, verdict, active):
            return state

    rounds = rounds_of(widths=(3, 8), controller=Narrow())
    assert text_of(rounds) == text_of(greedy_rounds())
    for r in rounds:
        assert r.width == 3 and all((n.fate == "cut") == (i >= 3) for i, n in enumerate(r.nodes))


def test_records_go_through_json_and_back():
    rounds = greedy_rounds()
    assert [trace.from_dict(json.loads(json.dumps(trace.as_dict(r)))) for r in rounds] == rounds


def test_a_trace_is_cut_to_a_shorter_text():
    rounds = greedy_rounds()
    full = text_of(rounds)
    for n in range(1, len(full) + 1):
        short = trace.cut(rounds, n, "stop")
        assert text_of(short) == full[:n] and short[-1].finish == "stop"
        assert all(r == other for r, other in zip(short[:-1], rounds, strict=False))


def test_one_request_at_a_time():
    e, params = kit.tree(TABLES, log_probs=False)
    with pytest.raises(ValueError, match="request: got a batch of 2"):
        next(trace.trace(e, params, stack([request(e, PROMPT, 3)] * 2)))
