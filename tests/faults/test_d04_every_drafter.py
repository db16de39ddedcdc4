"""D04 and D09 for every family of drafters: what is drawn has the law that the draft tells, under the row's transforms,
and its noise is neither the target's nor a rule's.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax import noise
from spec_jax.drafters import mtp
from spec_jax.drafters.block.drafter import BlockDrafter
from spec_jax.engine.engine import Engine, EngineParams
from spec_jax.engine.requests import request
from spec_jax.engine.round import context_of
from spec_jax.sampling.constraint import free
from spec_jax.sampling.settings import Sampling
from spec_jax.topology.branching import Branching
from spec_jax.topology.sampled import draw_key
from tests.drafters.block import kit
from tests.drafters.eagle import kit as heads
from tests.drafters.hybrid import fair
from tests.faults.laws import fit

ROWS, PROMPT = 8000, [1, 2, 3, 4, 5]
SETTING = Sampling(temperature=0.8, top_k=6, top_p=0.95)
CHAIN = Branching((1, 1), replacement=True)


def block():
    config, head = kit.config(), kit.HEADS["domino"]
    drafter = BlockDrafter(config, CHAIN, head, block=8)
    return drafter.tapped(kit.llama()[0]), kit.llama()[1], drafter, kit.params(config, head)


def head(name):
    config = heads.CONFIGS[name]
    return heads.tapped(config), kit.llama()[1], heads.drafter(config, CHAIN), heads.params(config)


def own():
    target, params = fair()
    target = mtp.tapped(target)
    return target, params, mtp.drafter(target, CHAIN), mtp.params(params)


FAMILIES = {"block": block, "eagle": lambda: head("eagle3"), "medusa": lambda: head("medusa"), "mtp": own}


@functools.cache
def drawn(family):
    """Drafts [ROWS, 2] behind one prompt with many keys, their laws, and other noise at their places."""
    target, params, drafter, weights = FAMILIES[family]()
    engine = Engine(target, 24, drafter=drafter, prefill_chunk=8)
    together = EngineParams(params, weights, free(target.vocab_size), jnp.ones(1))
    state = kit.begin(engine, together, request(engine, PROMPT, 8, sampling=SETTING))
    many = lambda x: jnp.repeat(x, ROWS, axis=0) if x.ndim and x.shape[0] == 1 else x  # noqa: E731
    keys = jax.random.bits(jax.random.key(4), (ROWS, 2), jnp.uint32)

    @kit.jit
    def run(weights, state):
        context = dataclasses.replace(context_of(jax.tree.map(many, state.rows), together.constraint), key=keys)
        draft, _ = drafter.propose(weights, jax.tree.map(many, state.drafter), context)
        return draft.tree.tokens[:, 1:], draft.law.log_probs[:, 1:]

    @jax.jit
    def others(law):
        ids, at = jnp.arange(law.shape[0]), jnp.int32(len(PROMPT))
        choose = lambda key: jnp.argmax(law + noise.gumbel(key, at, ids))  # noqa: E731
        streams = {
            "the target's": lambda key: key,
            "a refusal's": lambda key: noise.stream(key, "residual"),
            "its own": lambda key: draw_key(key, 1),
        }
        found = {name: jax.vmap(lambda key, s=s: choose(s(key)))(keys) for name, s in streams.items()}
        u = jax.vmap(lambda key: noise.uniform(noise.stream(key, "accept"), at, jnp.int32(1)))(keys)
        return found | {"an acceptance's": (4 * u).astype(int)}

    tokens, laws = map(np.asarray, run(weights, state))
    return tokens, np.exp(laws.astype(np.float64)), jax.device_get(others(jnp.asarray(laws[0, 0])))


def share(p):
    return {int(x): q / p.sum() for x, q in enumerate(p) if q > 0}


def told(tokens, laws):
    """The law of both tokens that the drafts tell: the second's may depend on the first."""
    behind = {int(x): share(laws[np.flatnonzero(tokens[:, 0] == x)[0], 1]) for x in np.unique(tokens[:, 0])}
    first = {x: q for x, q in share(laws[0, 0]).items() if x in behind}
    mass = sum(first.values())
    return {(x, y): q / mass * r for x, q in first.items() for y, r in behind[x].items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_drafts_are_drawn_from_the_law_they_tell(family):
    tokens, laws, _ = drawn(family)
    assert (np.ptp(laws[:, 0], axis=0) < 1e-6).all()
    support = (laws[:2] > 0).sum(-1)
    assert (support <= SETTING.top_k).all() and support[0, 0] > 1
    assert fit(tokens, told(tokens, laws)).ok
    raw = np.where(laws > 0, laws**SETTING.temperature, 0)  # drawn with the temperature, and told without it
    assert not fit(tokens, told(tokens, raw)).ok


@pytest.mark.parametrize("family", FAMILIES)
def test_a_drafts_noise_is_its_own(family):
    tokens, laws, others = drawn(family)
    first = share(laws[0, 0])

    def independent(name):
        own = share(np.ones(4)) if name == "an acceptance's" else first
        pairs = np.stack([tokens[:, 0], others[name]], axis=1)
        return fit(pairs, {(x, y): p * q for x, p in first.items() for y, q in own.items()}).ok

    assert all(independent(name) for name in ("the target's", "a refusal's", "an acceptance's"))
    assert not independent("its own")
