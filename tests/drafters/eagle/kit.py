"""What the tests of heads on features share: configs and random parameters over the tiny Llama, their text logits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax.drafters import early_exit, medusa, mlp_speculator, recurrent
from spec_jax.drafters.block.ends import ends_of
from spec_jax.drafters.eagle import head, network
from spec_jax.drafters.eagle.config import EagleConfig
from spec_jax.drafters.eagle.text import text_steps
from spec_jax.drafters.early_exit import EarlyExitConfig
from spec_jax.drafters.medusa import MedusaConfig
from spec_jax.drafters.mlp_speculator import MlpConfig
from spec_jax.drafters.parallel_model import ParallelConfig
from spec_jax.engine import rows
from spec_jax.engine.engine import Engine
from spec_jax.engine.round import context_of
from spec_jax.topology.coupling import Learner
from spec_jax.topology.growth import Growth
from tests.drafters.block import kit
from tests.drafters.block.kit import H, V, llama, noisy
from tests.faults.kit import jit

EPS = kit.LLAMA.rms_norm_eps
K, MASK, KEPT = 3, 19, (0, 1, 2, 4, 5, 7, 8, 9, 11, 12, 13, 15, 16, 18)
SIZES = {
    "vocab_size": V, "hidden_size": H, "intermediate_size": 24, "num_heads": 4, "num_kv_heads": 2, "head_dim": 4
}  # fmt: skip
CHAIN = Growth(nodes=K + 1, depth=K, width=1, children=1, ranking="coupled")
CONFIGS = {
    "eagle3": EagleConfig(**SIZES, taps=(1, 2, 3), own_head=True, draft_vocab_size=len(KEPT)),
    "eagle3.1": EagleConfig(
        **SIZES, taps=(0, 2, 3), norm_output=True, feature_norm="each", qk_norm=True, norm_before_residual=True
    ),
    "eagle1": EagleConfig(**SIZES, taps=(3,), inputs="fused", fc_bias=True, final_norm_eps=EPS),
    "p_eagle": EagleConfig(**SIZES, taps=(1, 3), num_layers=2, mask_token=MASK, feature_norm="all"),
    "medusa": MedusaConfig(V, H, num_heads=K, final_norm_eps=EPS),
    "hydra": MedusaConfig(V, H, num_heads=K, num_blocks=2, sequential=True, final_norm_eps=EPS),
    "hydra++": MedusaConfig(V, H, num_heads=K, sequential=True, final_norm_eps=EPS, prefix=kit.LLAMA.with_layers([0])),
    "mlp_speculator": MlpConfig(V, H, num_stages=K, inner_size=12, scale_input=True, final_norm_eps=EPS),
}


def is_eagle(config):
    return isinstance(config, EagleConfig)


def module(config):
    return head if is_eagle(config) else mlp_speculator if isinstance(config, MlpConfig) else medusa


@functools.cache
def params(config, seed=0, scale=0.3):
    """Random parameters over the tiny Llama; nothing is zero or one. A parallel model has the Llama's own, scaled."""
    if isinstance(config, ParallelConfig):
        return jax.tree.map(lambda x: 0.9 * x, llama(config.model.num_layers)[1])
    if isinstance(config, EarlyExitConfig):
        return early_exit.init_params(config, llama()[1]).over(config, llama()[1])
    ends, key = ends_of(llama()[1]), jax.random.key(seed)
    if is_eagle(config):
        kept = None if config.draft_vocab_size is None else jnp.asarray(KEPT)
        made = network.init_params(config, key, ends, kept)
        own = noisy((made.network, made.lm_head), seed, scale)
        return network.EagleParams(own[0], ends, own[1], kept)
    if isinstance(config, recurrent.RecurrentConfig):
        made = recurrent.init_params(config, key, ends)
        own = noisy((made.across, made.into, made.blocks, made.output), seed, scale)
        return recurrent.RecurrentParams(*own, ends)
    made = module(config).init_params(config, key, ends)
    return type(made)(**noisy(medusa.own_parts(made), seed, scale), ends=ends)


def tapped(config, target=None):
    target = llama()[0] if target is None else target
    return (head if is_eagle(config) else medusa).tapped(config, target)


def drafter(config, shape=CHAIN, learner=None):
    return module(config).drafter(config, shape, learner or Learner(1.0, 1.0, pooling=1e8))


def engine(config, shape=CHAIN, max_len=24, **changes):
    return Engine(tapped(config), max_len, drafter=drafter(config, shape), prefill_chunk=8, **changes)


def text_logits(config, own, features, tokens, anchors, blocks):
    """[b a d vocab] over the target's vocabulary."""
    if is_eagle(config):
        z = text_steps(config, own, features, tokens, anchors, blocks).logits
        return network.full_logits(config, own, z)
    return module(config).text_logits(config, own, features, tokens, anchors, blocks)


@functools.cache
def _whole(config):
    target = tapped(config)

    def run(own, tokens, anchors, blocks):
        state = target.init_state(llama()[1], *tokens.shape)
        features, _ = target.prefill(llama()[1], state, tokens, jnp.full(tokens.shape[0], tokens.shape[1]))
        return text_logits(config, own, features, tokens, anchors[:, None], blocks[:, None])[:, 0]

    return jit(run)


def difference(config, own, tokens, length, seen):
    """How far the logits behind a drafted chain are from those of a pass over the whole text [b k]; inf: other tokens.

    tokens and length are the texts before the draft; `seen` its candidates, which are all tokens.
    """
    drafted = seen.tokens[:, :, 0]
    text = jnp.where(jnp.arange(tokens.shape[1]) < length[:, None], tokens, 0)
    want = np.asarray(_whole(config)(own, text, length - 1, drafted))
    got = np.full_like(want, -np.inf)
    real = np.asarray(seen.z) > -np.inf
    b, k, m = np.nonzero(real)
    got[b, k, np.asarray(seen.tokens)[b, k, m]] = np.asarray(seen.z)[b, k, m]
    want = want - want.max(-1, keepdims=True)
    both = np.isfinite(want) & np.isfinite(got)
    apart = np.where(both, np.abs(np.where(both, want, 0) - np.where(both, got, 0)), 0).max(-1)
    return np.where((np.isfinite(want) == np.isfinite(got)).all(-1), apart, np.inf)


def first_draft(engine, own):
    """The state after prefill, and the draft and drafter state behind it."""
    together, state = kit.start(engine, own)
    run = jit(lambda p, s: engine.drafter.propose(p.drafter, s.drafter, context_of(s.rows, p.constraint)))
    return (state, *run(together, state))


def fresh(engine, together, state):
    """The state of a fresh run on the texts so far."""
    given = {f: getattr(state.rows, f) for f in rows.Requests.__dataclass_fields__}
    return kit.begin(engine, together, rows.Requests(**given))


def same_as_fresh(want, got, length):
    """Fails unless a head's state is another one up to the rows' lengths."""
    np.testing.assert_allclose(got.context, want.context, atol=5e-5)
    np.testing.assert_array_equal(got.known, want.known)
    if got.head == ():
        return
    np.testing.assert_array_equal(got.head.length, length)
    live = (jnp.arange(got.head.k[0].shape[2]) < length[:, None])[:, None, :, None]
    for a, b in zip(
        jax.tree.leaves((got.head.k, got.head.v)), jax.tree.leaves((want.head.k, want.head.v)), strict=True
    ):
        np.testing.assert_allclose(jnp.where(live, a, 0), jnp.where(live, b, 0), atol=5e-5)
