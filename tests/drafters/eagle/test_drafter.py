"""Heads on features in the engine: plain text, inputs as in training, a state that follows every verdict."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.audit.law import check_law
from spec_jax.drafters.block.ends import ends_of
from spec_jax.drafters.block.shape import BestFirst
from spec_jax.drafters.eagle import head, network
from spec_jax.drafters.eagle.head import EagleHead
from spec_jax.drafters.head_tree import HeadTree
from spec_jax.engine.engine import Engine, EngineParams
from spec_jax.sampling.constraint import free
from spec_jax.topology.branching import Branching
from spec_jax.verify.rejection import rejection
from tests.drafters.block import kit as base
from tests.drafters.eagle import kit

ROWS = len(base.SETTINGS) * len(base.PROMPTS)
UNADJUSTED = slice(0, 2 * len(base.PROMPTS))  # greedy and sampled rows: their candidates show the logits as they are


@functools.cache
def plain():
    engine = Engine(base.llama()[0], 24, prefill_chunk=8)
    return np.asarray(base.decoded(engine).tokens)


@pytest.mark.parametrize("name", kit.CONFIGS)
def test_text_inputs_and_state_round_by_round(name):
    """Text is plain decoding's; every draft's logits are a whole pass's (D25); the state is a fresh run's."""
    config, own = kit.CONFIGS[name], kit.params(kit.CONFIGS[name])
    engine = kit.engine(config)
    together, state = base.start(engine, own)
    worst, accepted, checked = np.zeros(kit.K), set(), 0
    while np.asarray(state.rows.running).any():
        before = state.rows
        state = base.go_on(engine, together, state, 1)
        known = (np.asarray(before.length) > 1) & np.asarray(before.running)
        apart = kit.difference(config, own, before.tokens, before.length, state.drafter.seen)
        worst = np.maximum(worst, np.where(known[:, None], apart, 0)[UNADJUSTED].max(0))
        accepted |= set(
            (np.asarray(state.rows.counters.accepted) - np.asarray(before.counters.accepted))[known].tolist()
        )
        if checked < 2 and np.asarray(state.rows.running).all():
            kit.same_as_fresh(kit.fresh(engine, together, state).drafter, state.drafter, state.rows.length - 1)
            checked += 1
    np.testing.assert_array_equal(state.rows.tokens, plain())
    assert worst.max() < 5e-4, worst  # logits are of the order of 20
    assert len(accepted) > 1 and checked == 2


@dataclasses.dataclass(frozen=True)
class Faulty(EagleHead):
    """A head with a slip in what it is fed."""

    fault: str = "none"

    def score(self, params, state, context, tree, staged=None, nodes=None):
        if self.fault == "position" and staged is not None:  # of drafted pairs alone: all moved alike changes nothing
            state = dataclasses.replace(state, length=state.length + 1)
        return super().score(params, state, context, tree, staged, nodes)

    def commit(self, state, staged, length):
        new = super().commit(state, staged, length)
        return dataclasses.replace(new, length=new.length - 1) if self.fault == "a pair short" else new


@dataclasses.dataclass(frozen=True)
class Shifted(HeadTree):
    """Every feature beside its own token, not the next one."""

    def observe(self, params, state, committed):
        c = committed
        last = jnp.take_along_axis(c.tokens, jnp.maximum(c.length - 1, 0)[:, None], axis=1)[:, 0]
        return super().observe(
            params, state, dataclasses.replace(c, tokens=jnp.roll(c.tokens, 1, axis=1), next_token=last)
        )


FLIPPED = {"normed residual": {"norm_before_residual": True}, "normed output": {"norm_output": True}}


@pytest.mark.parametrize("fault", ("none", "shift", "position", "a pair short", *FLIPPED))
def test_a_slip_in_the_inputs_is_caught(fault):
    config, own = kit.CONFIGS["eagle3"], kit.params(kit.CONFIGS["eagle3"])
    served = dataclasses.replace(config, **FLIPPED.get(fault, {}))
    right = kit.drafter(config)
    make = Shifted if fault == "shift" else HeadTree
    drafter = make(Faulty(served, fault), right.shape, right.learner)
    engine = Engine(kit.tapped(config), 24, drafter=drafter, prefill_chunk=8)
    state, _, after = kit.first_draft(engine, own)
    apart = kit.difference(config, own, state.rows.tokens, state.rows.length, after.seen)[UNADJUSTED]
    apart = apart[np.asarray(state.rows.length)[UNADJUSTED] > 1]
    if fault == "none":
        assert apart.max() < 5e-4
    else:
        assert apart[:, 1].max() > 1e-2


def test_a_head_that_is_the_target_is_always_right():
    """A target whose next token follows from its last one alone, and an EAGLE-1 layer with its feed-forward part.

    The head's logits are the target's times a positive number, since its output stands for a normed state: the same
    greedy choices.
    """
    _, params = base.llama()
    zero = lambda x: jax.tree.map(jnp.zeros_like, x)  # noqa: E731
    layers = [dataclasses.replace(layer, o=zero(layer.o), down=zero(layer.down)) for layer in params.layers]
    layers[0] = dataclasses.replace(layers[0], down=params.layers[0].down)
    target = dataclasses.replace(params, layers=tuple(layers), norm=jnp.ones(base.H))
    config = dataclasses.replace(kit.CONFIGS["eagle1"], fc_bias=False, rms_norm_eps=kit.EPS)
    made = network.init_params(config, jax.random.key(0), ends_of(target))
    kernel = jnp.concatenate([jnp.eye(base.H), jnp.zeros((base.H, base.H))])
    (own,), first = made.network.layers, layers[0]
    own = dataclasses.replace(
        own, o=zero(own.o), mlp_norm=first.mlp_norm, gate=first.gate, up=first.up, down=first.down
    )
    fc = dataclasses.replace(made.network.fc, kernel=kernel)
    made = dataclasses.replace(made, network=dataclasses.replace(made.network, fc=fc, layers=(own,)))
    got = base.decoded(kit.engine(config), made, target)
    greedy = slice(0, len(base.PROMPTS))
    assert (got.counters.accepted[greedy] == got.counters.drafted[greedy]).all()
    assert (got.counters.accepted[greedy] > 10).all()


@pytest.mark.parametrize(
    "name, widths", [("eagle3", (1, 1)), ("eagle3", (2, 1)), ("p_eagle", (2, 1)), ("hydra", (2, 1))]
)
def test_drawn_drafts_carry_their_laws(name, widths):
    """D04: q is the law that a node was drawn from, -inf for tokens that can't be drafted."""
    config = kit.CONFIGS[name]
    engine = kit.engine(config, Branching(widths, replacement=widths == (1, 1)))
    _, draft, _ = kit.first_draft(engine, kit.params(config))
    assert draft.proposal == ("sampled" if widths == (1, 1) else "without_replacement")
    law = np.exp(np.asarray(draft.law.log_probs))[UNADJUSTED, 1:]
    np.testing.assert_allclose(law.sum(-1), 1, atol=1e-5)
    tokens, valid = np.asarray(draft.tree.tokens)[UNADJUSTED, 1:], np.asarray(draft.tree.valid)[UNADJUSTED, 1:]
    assert (np.take_along_axis(law, tokens[..., None], axis=2)[..., 0][valid] > 0).all()
    assert valid[3].all() and not valid[4].any()  # sampled rows: of a text of one token there is no pair yet
    if name == "eagle3":
        missing = sorted(set(range(base.V)) - set(kit.KEPT))
        assert (law[..., missing] == 0).all() and np.isin(tokens[valid], kit.KEPT).all()


def test_drawn_drafts_of_a_reduced_vocabulary_keep_the_law():
    config = kit.CONFIGS["eagle3"]
    engine = kit.engine(config, Branching((2, 1)), max_len=8, rule=rejection)
    together = EngineParams(base.llama()[1], kit.params(config), free(base.V), jnp.ones(1))
    report = check_law(engine, together, [1, 2], [1, 3, 5, 6], draws=6000, batch=1000)  # 3 and 6 can't be drafted
    assert report.passed and report.acceptance > 0.05


def test_what_does_not_fit_is_refused():
    config, (target, params) = kit.CONFIGS["eagle3"], base.llama()
    with pytest.raises(ValueError, match="shape: got BestFirst"):
        head.drafter(config, BestFirst(nodes=4, depth=2))
    with pytest.raises(ValueError, match="shape is 'BestFirst with MedusaHead'"):
        kit.drafter(kit.CONFIGS["hydra"], BestFirst(nodes=4, depth=2))
    with pytest.raises(ValueError, match="shape is 'one of depth 4'; taken: at most 3"):
        kit.drafter(kit.CONFIGS["medusa"], head.chain(4))
    with pytest.raises(ValueError, match="target is 'one of hidden_size 16'"):
        head.tapped(dataclasses.replace(config, hidden_size=32), target)
    with pytest.raises(ValueError, match="target is 'one of 3 layers'"):
        head.tapped(dataclasses.replace(config, taps=(1, 2, 4)), target)
    with pytest.raises(ValueError, match="taps is .2,.; taken: the target's last layer"):
        head.tapped(dataclasses.replace(kit.CONFIGS["eagle1"], taps=(2,)), target)
    for change, message in (
        ({"mask_token": 20}, "mask_token is 20"),
        ({"draft_vocab_size": 21}, "draft_vocab_size is 21"),
        ({"inputs": "fused"}, "taps is"),
        ({"head_dim": 3}, "head_dim is 3"),
    ):
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(config, **change)
    with pytest.raises(ValueError, match="kept: got None tokens, takes as many as draft_vocab_size says, 14"):
        network.init_params(config, jax.random.key(0), ends_of(params))
    own = kit.params(config)
    other = Engine(dataclasses.replace(target, taps=(1,)), 24, drafter=kit.drafter(config))
    with pytest.raises(ValueError, match="features: got 1 of size 16, takes 3 of size 16"):
        jax.eval_shape(lambda: base.start(other, own)[1])
