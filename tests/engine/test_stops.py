"""Where a block ends, against a plain search token by token."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from spec_jax.engine import rows
from spec_jax.engine.requests import request
from spec_jax.engine.state import Finish
from spec_jax.engine.stops import trim
from spec_jax.sampling.settings import Sampling
from spec_jax.verify.verdict import Verdict
from tests.faults import kit

V, M, MAX_LEN = kit.WORDS, 5, 16
ENGINE = kit.engine(max_len=MAX_LEN, max_stops=2, max_stop_length=3, log_probs=False)
EMPTY = rows.empty(ENGINE, kit.engine_params(ENGINE, kit.row_tables(0, 1)), 1).rows
cut = jax.jit(lambda r, v: trim(r, v, MAX_LEN))


def search(prompt, output, block, budget, eos, stops, min_new):
    """Tokens kept and why the text ends, if it does."""
    text = list(output)
    for i, token in enumerate(block):
        if token < 0:
            return i, Finish.INVALID
        text.append(token)
        if token in eos:
            return i + 1, Finish.EOS
        if len(text) >= min_new and any(text[-len(s) :] == list(s) for s in stops):
            return i + 1, Finish.STOP
        if len(text) == budget:
            return i + 1, Finish.MAX_LEN if len(prompt) + budget == MAX_LEN else Finish.BUDGET
    return len(block), Finish.RUNNING


def trimmed(prompt, output, block, budget, eos, stops, min_new, finish=Finish.RUNNING):
    r = request(ENGINE, prompt, budget, sampling=Sampling(min_new_tokens=min_new), eos=eos, stops=stops)
    # What lies behind the text is what would complete a stop.
    tokens = np.resize(stops[0] if stops else [0], MAX_LEN)
    tokens[: len(prompt) + len(output)] = [*prompt, *output]
    state = EMPTY.replace(
        **{name: getattr(r, name) for name in ("prompt_length", "limit", "key", "sampling", "stops", "state")},
        tokens=jnp.asarray(tokens, jnp.int32)[None],
        length=jnp.array([len(prompt) + len(output)]),
        finish=jnp.array([int(finish)]),
    )
    padded = jnp.asarray(np.pad(block, (0, M - len(block))), jnp.int32)[None]
    verdict = Verdict(padded * 0, padded, padded * 0, jnp.array([len(block) - 1]), None, None)
    keep, why = cut(state, verdict)
    return int(keep[0]), Finish(int(why[0]))


small = st.integers(0, 2)


@given(st.data())
@settings(max_examples=150)
def test_any_block(data):
    prompt = data.draw(st.lists(small, min_size=1, max_size=5))
    output = data.draw(st.lists(small, max_size=4))
    block = data.draw(st.lists(st.integers(-1, 2), min_size=1, max_size=M))
    budget = data.draw(st.integers(len(output) + 1, MAX_LEN - len(prompt)))
    eos = data.draw(st.lists(small, max_size=1))
    stops = data.draw(st.lists(st.lists(small, min_size=1, max_size=3), max_size=2))
    min_new = data.draw(st.integers(0, min(6, budget)))
    case = (prompt, output, block, budget, eos, stops, min_new)
    assert trimmed(*case) == search(*case)


def test_an_invalid_token_is_never_kept():
    """Not where the budget ends with it, either."""
    assert trimmed([1], [], [2, -1], 2, [], [], 0) == (1, Finish.INVALID)
    assert trimmed([1], [], [-1], 1, [], [], 0) == (0, Finish.INVALID)


def test_a_stop_across_blocks():
    assert trimmed([0], [1, 2], [3, 4, 5], 9, [], [[2, 3]], 0) == (1, Finish.STOP)
    assert trimmed([0], [1, 2], [3, 4, 5], 9, [], [[1, 2, 3]], 0) == (1, Finish.STOP)
    assert trimmed([0, 2], [], [3, 2, 3, 4], 9, [], [[2, 3]], 0) == (3, Finish.STOP)


def test_the_first_reason_counts():
    assert trimmed([0], [], [3, 4], 2, [4], [[3, 4]], 0) == (2, Finish.EOS)
    assert trimmed([0], [], [3, 4], 2, [5], [[3, 4]], 0) == (2, Finish.STOP)
    assert trimmed([0], [], [3, 4], 2, [5], [[4, 3]], 0) == (2, Finish.BUDGET)


def test_a_row_that_does_not_run_keeps_nothing():
    for finish in (Finish.EOS, Finish.CLOSED, Finish.EMPTY):
        assert trimmed([0], [1], [3, 4], 9, [4], [], 0, finish) == (0, finish)
