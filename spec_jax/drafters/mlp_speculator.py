"""IBM's MLP speculator (arXiv 2404.19124): a stage per drafted token, over the state and the token before it."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from spec_jax.drafters.block.ends import Ends, apply
from spec_jax.drafters.depth_tree import DepthTree
from spec_jax.drafters.medusa import LastHidden, hidden_before
from spec_jax.models.config import check_types, require
from spec_jax.models.linear import Dense, Linear
from spec_jax.models.norms import rms_norm
from spec_jax.topology.branching import Branching
from spec_jax.topology.coupling import Learner
from spec_jax.topology.expander import Expander
from spec_jax.topology.growth import Growth

EPS = 1e-6
"""Of its norms."""


@dataclasses.dataclass(frozen=True)
class MlpConfig:
    """The sizes of an MLP speculator. Its files call num_stages n_predict, hidden_size emb_dim, inner_size inner_dim.

    Attributes:
        vocab_size, hidden_size: the target's.
        num_stages: most tokens of a draft's root path.
        inner_size: numbers of its state, and of its embeddings; None: hidden_size.
        tie_weights: whether all stages share their weights, but for the first one's map of the hidden state.
        scale_input: whether the hidden state is normed, and divided by the root of 2.
        final_norm_eps: of the target's final norm, behind which the hidden state is read.

    Raises:
        ValueError: naming the field, for anything that does not fit.
    """

    vocab_size: int
    hidden_size: int
    num_stages: int = 3
    inner_size: int | None = None
    tie_weights: bool = False
    scale_input: bool = False
    final_norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        """Check every field."""
        check_types(MlpConfig, vars(self))
        require(self.num_stages > 1 or not self.tie_weights, "tie_weights", True, "false where num_stages is 1")

    @property
    def width(self) -> int:
        """Numbers of the state."""
        return self.hidden_size if self.inner_size is None else self.inner_size

    @property
    def mix(self) -> tuple[float, float]:
        """What state and embedding are multiplied by.

        A stage leaves the state 0.5^(1 / num_stages) of the variance, so half of it behind the last one; the embedding,
        of variance 1 / width, gets the rest of 1/2, about what GELU leaves of 1.
        """
        kept = 0.5 ** (0.5 / self.num_stages)
        return kept, math.sqrt((1 - kept**2) * self.width / 2)


@flax.struct.dataclass
class Norm:
    """A root-mean-square norm with a shift: the release's LayerNorm, which takes no mean off."""

    weight: Float[Array, "n"]
    bias: Float[Array, "n"]

    def __call__(self, x: Float[Array, "*b n"]) -> Float[Array, "*b n"]:
        """Apply the norm."""
        return rms_norm(x, self.weight, EPS) + self.bias


@flax.struct.dataclass
class MlpParams:
    """Each stage's embeddings [vocab, width], map of the state, norm and map to logits; the target's ends.

    Tied ones are there once, and the maps of the state twice: the first one's, and that of all others.
    """

    embeddings: tuple[Float[Array, "vocab n"], ...]
    projections: tuple[Linear, ...]
    norms: tuple[Norm, ...]
    outputs: tuple[Linear, ...]
    ends: Ends


@flax.struct.dataclass
class States:
    """The scratch of a draft: the state behind every expanded node, the next stage, the number of nodes."""

    states: Float[Array, "b n inner"]
    stage: Int[Array, ""]
    count: Int[Array, ""]


@dataclasses.dataclass(frozen=True)
class MlpExpander:
    """Stages as an `Expander`, for drafts of a depth; params are `MlpParams`."""

    config: MlpConfig
    depth: int

    def expand(
        self, params: MlpParams, pool: States, parent: Int[Array, "b k"], token: Int[Array, "b k"]
    ) -> tuple[States, Float[Array, "b k vocab"]]:
        """The next stage for every node."""
        above = jnp.take_along_axis(pool.states, jnp.maximum(parent, 0)[:, :, None], axis=1)
        later = range(1, 2 if self.config.tie_weights else max(2, self.depth))
        made = [functools.partial(step, self.config, params, i) for i in later]
        state, logits = lax.switch(pool.stage - 1, made, above, token)
        states = lax.dynamic_update_slice_in_dim(pool.states, state, pool.count, axis=1)
        return States(states, pool.stage + 1, pool.count + token.shape[1]), logits


@dataclasses.dataclass(frozen=True)
class MlpHead(LastHidden):
    """The stages as a `DepthHead`: their context is the target's normed hidden state, and they keep nothing else."""

    config: MlpConfig

    @property
    def depth(self) -> int:
        """As many as there are stages."""
        return self.config.num_stages

    def logits(self, params: MlpParams, context: Float[Array, "b n hidden"]) -> Float[Array, "b n vocab"]:
        """None: ValueError, since the first stage reads the anchor."""
        raise ValueError("head: got an MLP speculator without the anchor; it drafts as a DepthTree")

    def root(
        self,
        params: MlpParams,
        state: tuple[()],
        context: Float[Array, "b hidden"],
        anchor: Int[Array, "b"],
        shape: Growth | Branching,
    ) -> tuple[Expander, Any, States, Float[Array, "b vocab"]]:
        """The first stage."""
        first, logits = step(self.config, params, 0, begin(self.config, context), anchor)
        states = jnp.zeros((first.shape[0], shape.expanded, first.shape[1]), first.dtype).at[:, 0].set(first)
        pool = States(states, jnp.int32(1), jnp.int32(1))
        return MlpExpander(self.config, shape.depth), params, pool, logits


def begin(config: MlpConfig, hidden: Float[Array, "*b hidden"]) -> Float[Array, "*b hidden"]:
    """What the first stage reads of the target's normed hidden state."""
    if not config.scale_input:
        return hidden
    return rms_norm(hidden, jnp.ones(config.hidden_size, hidden.dtype), EPS) / math.sqrt(2)


def step(
    config: MlpConfig, params: MlpParams, stage: int, state: Float[Array, "*b n"], token: Int[Array, "*b"]
) -> tuple[Float[Array, "*b inner"], Float[Array, "*b vocab"]]:
    """One stage, from 0: the state behind one more token, gelu(norm(state and embedding, mixed)), and its logits."""
    own = lambda parts: parts[min(stage, len(parts) - 1)]  # noqa: E731
    kept, added = config.mix
    mixed = kept * apply(own(params.projections), state) + added * own(params.embeddings)[token]
    state = jax.nn.gelu(own(params.norms)(mixed), approximate=False)
    return state, apply(own(params.outputs), state).astype(jnp.float32)


def text_logits(
    config: MlpConfig,
    params: MlpParams,
    features: Float[Array, "b t taps hidden"],
    tokens: Int[Array, "b t"],
    anchors: Int[Array, "b a"],
    blocks: Int[Array, "b a d"],
) -> Float[Array, "b a d vocab"]:
    """What the stages say behind anchors at text positions 1 .. t - 1, given the right tokens `blocks` behind each.

    Differentiable. Logits of depth i are for blocks[..., i]; an anchor at position 0 has no hidden state: zeros.
    """
    state, found = begin(config, hidden_before(config, params.ends, features, anchors)), []
    before = jnp.concatenate([jnp.take_along_axis(tokens, anchors, axis=1)[:, :, None], blocks[..., :-1]], axis=2)
    for i in range(blocks.shape[2]):
        state, logits = step(config, params, i, state, before[..., i])
        found.append(logits)
    return jnp.where((anchors > 0)[:, :, None, None], jnp.stack(found, axis=2), 0.0)


def init_params(config: MlpConfig, key: Array, ends: Ends, dtype: Any = jnp.float32) -> MlpParams:
    """Random embeddings and maps of variance 1 / width, as the release begins; norms of 1 and 0."""
    n, hidden, vocab = config.width, config.hidden_size, config.vocab_size
    each = 1 if config.tie_weights else config.num_stages

    def draw(number: int, rows: int, columns: int) -> Array:
        return (n**-0.5 * jax.random.normal(jax.random.fold_in(key, number), (rows, columns))).astype(dtype)

    maps = max(each, min(2, config.num_stages))
    return MlpParams(
        tuple(draw(3 * i, vocab, n) for i in range(each)),
        tuple(Dense(draw(3 * i + 1, n if i else hidden, n)) for i in range(maps)),
        tuple(Norm(jnp.ones(n, dtype), jnp.zeros(n, dtype)) for _ in range(each)),
        tuple(Dense(draw(3 * i + 2, n, vocab)) for i in range(each)),
        ends,
    )


def drafter(config: MlpConfig, shape: Growth | Branching, learner: Learner | None = None) -> DepthTree:
    """A drafter for `medusa.tapped(config, target)`; its parameters are `MlpParams`."""
    return DepthTree(MlpHead(config), shape, learner or Learner())
