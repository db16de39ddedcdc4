"""What `bench.py coupling` computes from a run, and what it refuses."""

import argparse
import types

import jax.numpy as jnp
import numpy as np
import pytest

from scripts.benches import coupling
from spec_jax.models.toy import AuditTarget
from spec_jax.verify.match import match
from spec_jax.verify.rejection import rejection


def parse(*arguments):
    parser = argparse.ArgumentParser()
    coupling.add_arguments(parser)
    return parser.parse_args(arguments)


def state(emitted, rounds):
    counters = types.SimpleNamespace(emitted=jnp.asarray(emitted), rounds=jnp.asarray(rounds))
    return types.SimpleNamespace(rows=types.SimpleNamespace(counters=counters))


def test_tokens_per_pass_is_a_ratio_of_sums_with_its_error_over_rows():
    mean, error = coupling.tokens_per_pass(state([30, 10], [10, 10]))
    assert mean == 2.0 and error == pytest.approx((2 * (10**2 + 10**2)) ** 0.5 / 20)
    rng = np.random.default_rng(0)
    rates = rng.normal(3, 0.5, (4000, 30)).clip(1)
    found = [coupling.tokens_per_pass(state(r * 16, np.full(30, 16))) for r in rates[:400]]
    means, errors = np.array(found).T
    assert means.std() == pytest.approx(errors.mean(), rel=0.15)


def test_every_side_drafts_the_same_number_of_nodes():
    target = AuditTarget(8)
    sides = coupling.engines(parse(), target, target)
    assert {e.drafter.nodes for e in sides.values()} == {16}
    assert [e.rule for e in sides.values()] == [match, match, rejection, rejection]
    assert len({e.slots for e in sides.values()}) == 1
    with pytest.raises(ValueError, match="--widths: got .*, 7 nodes, takes a tree of --nodes, 16"):
        coupling.engines(parse("--widths", "2", "2"), target, target)
