"""D24: counters of drafted, accepted and emitted tokens, against a count on the script; and what must always add up."""

import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.engine import round as rounds
from spec_jax.engine.requests import request
from tests.faults import kit
from tests.faults.oracle import generate

TABLES = kit.row_tables(24)
BUDGETS = [1 + r % 23 for r in range(kit.ROWS)]
LONG = [generate(kit.logits_of(TABLES[r]), [r % 8], 30).tokens for r in range(kit.ROWS)]
# An end in the middle of a block, or none.
EOS = [LONG[r][2 + r % 11 : 3 + r % 11] if r % 3 else [] for r in range(kit.ROWS)]
WANT = [generate(kit.logits_of(TABLES[r]), [r % 8], BUDGETS[r], eos=EOS[r]) for r in range(kit.ROWS)]
# Wrong at place 1 only (accepted 1, though 2 and 3 are right again), all right, none right.
COUNTS = np.array([[1, 7, 0, 2, 5]])
LENGTHS = np.array([[0, 1, 5, 7][r % 4] for r in range(kit.ROWS)])


def requests(e):
    return kit.batch([request(e, [r % 8], BUDGETS[r], eos=EOS[r]) for r in range(kit.ROWS)])


def count(row):
    """The counters of one row, from its script and its text."""
    done, total, length = 0, len(WANT[row].tokens), int(LENGTHS[row])
    c = {"rounds": 0, "drafted": 0, "accepted": 0, "emitted": total, "trimmed": 0}
    reached, accepted = np.zeros(kit.K, int), np.zeros(kit.K, int)
    while done < total:
        drafted = min(length, BUDGETS[row] - done - 1)
        right = min(drafted, int(COUNTS[0, c["rounds"] % 5]))
        kept = min(right, total - done)
        c["rounds"] += 1
        c["drafted"] += drafted
        c["accepted"] += kept
        c["trimmed"] += total - done <= right
        reached[:drafted] += 1
        accepted[:kept] += 1
        done += min(right + 1, total - done)
    return c, reached, accepted


def adds_up(state):
    c, r = state.rows.counters, state.rows
    assert (c.emitted == r.length - r.prompt_length).all()
    assert (c.emitted == c.accepted + c.rounds - c.trimmed).all()
    assert ((c.accepted <= c.drafted) & (c.trimmed <= 1)).all()
    assert (c.depth_accepted <= c.depth_reached).all() and (c.depth_reached <= c.rounds[:, None]).all()
    assert (c.depth_accepted.sum(1) == c.accepted).all() and (np.diff(c.depth_accepted, axis=1) <= 0).all()


def test_chain():
    texts = [[r % 8, *LONG[r]] for r in range(kit.ROWS)]
    e, params = kit.follow(TABLES, texts, COUNTS, LENGTHS)
    state = kit.run(e, params, requests(e))
    adds_up(state)
    for r in range(kit.ROWS):
        assert kit.same_text(state, r, WANT[r])
        wanted, reached, accepted = count(r)
        assert wanted == {name: getattr(state.rows.counters, name)[r] for name in wanted}
        assert (state.rows.counters.depth_reached[r] == reached).all()
        assert (state.rows.counters.depth_accepted[r] == accepted).all()
    assert state.rows.counters.trimmed.any() and not state.rows.counters.trimmed.all()


def test_tree():
    e, params = kit.tree(TABLES)
    state = kit.run(e, params, requests(e))
    adds_up(state)
    assert all(kit.same_text(state, r, WANT[r]) for r in range(kit.ROWS))
    c = state.rows.counters
    assert (c.drafted > c.depth_reached.sum(1)).any()


def test_rows_that_have_finished_do_not_count():
    texts = [[r % 8, *LONG[r]] for r in range(kit.ROWS)]
    e, params = kit.follow(TABLES, texts, COUNTS, LENGTHS)
    early = kit.run(e, params, requests(e), 3)
    late = kit.run(e, params, requests(e), 9)
    ended = early.rows.finish != 0
    assert ended.any() and not ended.all()
    assert (early.rows.counters.rounds[ended] == late.rows.counters.rounds[ended]).all()
    assert (early.rows.counters.rounds <= 3).all()


def test_accepted_tokens_that_were_cut_off_and_yet_counted_are_caught(monkeypatch):
    def untrimmed(rows, draft, width, verdict, keep):
        more = jnp.where(rows.running, verdict.accepted, 0)
        return whole(rows, draft, width, verdict, keep).replace(accepted=rows.counters.accepted + more)

    whole = rounds._count
    monkeypatch.setattr(rounds, "_count", untrimmed)
    e, params = kit.follow(TABLES, [[r % 8, *LONG[r]] for r in range(kit.ROWS)], COUNTS, LENGTHS)
    with pytest.raises(AssertionError):
        adds_up(kit.run_anew(e, params, requests(e)))
