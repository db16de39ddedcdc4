"""A recurrent model as the drafter, of itself: always right, so its own state follows every verdict."""

import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.drafters.model_tree import ModelTree
from spec_jax.drafters.small_model import SmallModel
from spec_jax.engine.engine import Engine, EngineParams
from spec_jax.engine.requests import request, stack
from spec_jax.models.qwen_config import ATTENTION, DELTA
from spec_jax.sampling.constraint import free
from spec_jax.sampling.settings import Sampling
from spec_jax.topology.coupling import Learner
from spec_jax.topology.growth import Growth
from tests.drafters.hybrid import V, hybrid
from tests.faults import kit

PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11, 12, 13, 1, 2]]
CHAIN = Growth(nodes=4, depth=3, width=1, children=1, ranking="coupled")
TREE = Growth(nodes=7, depth=3, width=2, children=2, ranking="coupled")
SURE, SHARP = Learner(1.0, 1.0, pooling=1e8), Learner(50.0, 50.0, pooling=1e8)


@pytest.mark.parametrize("name", ["small model", "chain", "tree"])
def test_a_recurrent_model_drafts_for_itself(name):
    target, params = hybrid((DELTA, ATTENTION), sparse=False, mtp=False)
    made = {"small model": SmallModel(target, 3), "chain": ModelTree(target, CHAIN, SURE)}
    drafter = made.get(name) or ModelTree(target, TREE, SHARP)
    e = Engine(target, 48, drafter=drafter, prefill_chunk=8, max_eos=2, max_stops=2, max_bias=2)
    settings = (Sampling(), Sampling(temperature=0.9))
    requests = stack([request(e, p, 30, 3, s) for s in settings for p in PROMPTS])
    state = kit.run(e, EngineParams(params, params, free(V), jnp.ones(1)), requests)
    c = state.rows.counters
    assert (c.rounds == 8).all() and (c.accepted == 22).all()
    if name != "tree":
        np.testing.assert_array_equal(c.accepted, c.drafted)
