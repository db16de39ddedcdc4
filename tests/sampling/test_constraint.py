import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spec_jax.sampling import constraint

V = 6
step = jax.jit(lambda c, state, token: c.step(state, token))
mask = jax.jit(lambda c, state: c.mask(state))


@st.composite
def tables(draw):
    states = draw(st.integers(1, 4))
    entry = st.integers(-1, states - 1)
    rows = draw(st.lists(st.lists(entry, min_size=V, max_size=V), min_size=states, max_size=states))
    for row in rows:
        if max(row) < 0:
            row[draw(st.integers(0, V - 1))] = 0
    return np.array(rows)


def same(bound, start, table):
    """Whether the states from `start` on are the table's, for masks and for steps."""
    for state in range(len(table)):
        allowed = np.asarray(mask(bound, jnp.int32(start + state)))
        assert (allowed == (table[state] >= 0)).all()
        for token in range(V):
            after = int(step(bound, jnp.int32(start + state), jnp.int32(token)))
            assert after == (start + table[state, token] if table[state, token] >= 0 else -1)


@given(tables())
@settings(max_examples=20)
def test_a_table(table):
    bound = constraint.from_transitions(table)
    same(bound, 1, table)
    assert mask(bound, jnp.int32(constraint.FREE)).all()
    assert all(step(bound, jnp.int32(constraint.FREE), jnp.int32(t)) == constraint.FREE for t in range(V))


@given(st.lists(tables(), min_size=1, max_size=3))
@settings(max_examples=10)
def test_a_bank(many):
    joint, starts = constraint.bank([constraint.from_transitions(t) for t in many])
    for start, table in zip(starts, many, strict=True):
        same(joint, start, table)
    assert mask(joint, jnp.int32(constraint.FREE)).all()


def test_free_allows_everything():
    assert mask(constraint.free(V), jnp.int32(0)).all()
    assert step(constraint.free(V), jnp.int32(0), jnp.int32(3)) == 0


def test_nothing_follows_a_token_that_was_not_allowed():
    bound = constraint.from_transitions(np.array([[0, -1, 0, 0, 0, 0]]))
    dead = step(bound, jnp.int32(1), jnp.int32(1))
    assert dead == -1 and not mask(bound, dead).any()
    assert step(bound, dead, jnp.int32(0)) == -1


def test_equal_columns_are_stored_once():
    table = np.zeros((3, 1000), int)
    table[:, 7] = [1, 2, -1]
    assert constraint.from_transitions(table).table.shape == (4, 2)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (np.zeros(3, int), "takes an integer"),
        (np.zeros((2, 3)), "takes an integer"),
        (np.full((2, 3), 2), "got entries 2 .. 2, takes -1 .. 1"),
        (np.full((2, 3), -2), "got entries -2"),
        (np.array([[0, 0], [-1, -1]]), r"got states \[1\] with no allowed token"),
    ],
)
def test_tables_that_cannot_work_are_refused(table, message):
    with pytest.raises(ValueError, match=f"transitions: .*{message}"):
        constraint.from_transitions(table)


def test_an_empty_bank_is_refused():
    with pytest.raises(ValueError, match="constraints: got an empty list"):
        constraint.bank([])
