"""A small model that drafts all depths in one pass over mask tokens (PARD, arXiv 2504.18583)."""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.struct
import jax.numpy as jnp
from jaxtyping import Array, Int

from spec_jax.drafters import growing
from spec_jax.drafters.drafter import Committed, Context
from spec_jax.models.config import LlamaConfig, is_size, require
from spec_jax.models.linear import RowEmbedding
from spec_jax.models.llama import Llama
from spec_jax.models.qwen import Qwen
from spec_jax.models.qwen_config import QwenConfig
from spec_jax.models.target import Output, Target
from spec_jax.topology.branching import Branching
from spec_jax.topology.coupling import Candidates, Fit, Learner
from spec_jax.topology.expander import ContextFree, Marginals
from spec_jax.topology.growth import Growth
from spec_jax.tree import Draft, Tree


@dataclasses.dataclass(frozen=True)
class ParallelConfig:
    """A model that drafts over masks. Raises ValueError, naming the field, for anything that does not fit.

    Attributes:
        model: the model's own config.
        mask_token: the id that stands where a token is to be predicted (published: `pard_token` of the config).
        depth: most tokens of a draft that it was trained for (published: 8).
    """

    model: LlamaConfig | QwenConfig
    mask_token: int
    depth: int = 8

    def __post_init__(self) -> None:
        """Check every field."""
        mask, vocab = self.mask_token, self.model.vocab_size
        inside = isinstance(mask, int) and not isinstance(mask, bool) and 0 <= mask < vocab
        require(inside, "mask_token", mask, f"a token id under {vocab}")
        require(is_size(self.depth), "depth", self.depth, "a positive integer")

    @property
    def vocab_size(self) -> int:
        """The model's."""
        return self.model.vocab_size

    def target(self, taps: tuple[int, ...] = ()) -> Llama | Qwen:
        """The model."""
        return Qwen(self.model, taps) if isinstance(self.model, QwenConfig) else Llama(self.model, taps)


@flax.struct.dataclass
class ParallelState:
    """The model's state over the committed text without its anchor; number, seen and fit are as for a `ModelTree`."""

    model: Any
    number: Int[Array, "b n"]
    seen: Candidates | None
    fit: Fit | None


@dataclasses.dataclass(frozen=True)
class ParallelModel(growing.Shaped):
    """Drafts with another model of the same vocabulary, tuned to predict tokens behind masks; it reads no features.

    A round's pass scores the anchor and depth - 1 masks, which the model's state never holds; what was committed is
    read as a prompt is, one pass more. (PARD reads it in the drafting pass.) A chain has width = children = 1; a tree
    combines the depths' tokens, whatever stands before them. max_len and block fix the state's size and must be at
    least the engine's.

    Attributes:
        model: the model; its parameters are the drafter's.
        mask_token: the id that stands where a token is to be predicted (published: `pard_token` of the config).
        shape: the drafts.
        learner: how weights are fitted, for a coupled shape.
        block: tokens of a prefill chunk.
    """

    model: Target
    mask_token: int
    shape: Growth | Branching
    learner: Learner = Learner()
    block: int = 64

    def __post_init__(self) -> None:
        """Check the mask."""
        inside = 0 <= self.mask_token < self.model.vocab_size
        require(inside, "mask_token", self.mask_token, f"a token id under {self.model.vocab_size}")

    @property
    def vocab_size(self) -> int:
        """That of the model."""
        return self.model.vocab_size

    def init(self, params: Any, batch: int, max_len: int) -> ParallelState:
        """Empty rows."""
        seen, fit = growing.blank(self.shape, self.learner, batch, self.vocab_size)
        model = self.model.init_state(params, batch, max_len + max(self.block, self.depth + 1))
        return ParallelState(model, jnp.full((batch, self.nodes), -1, jnp.int32), seen, fit)

    def tap(self, output: Output) -> None:
        """The target's outputs are not needed."""

    def observe(self, params: Any, state: ParallelState, committed: Committed) -> ParallelState:
        """Read what was committed, a chunk or a verdict's path, and learn from a verdict."""
        c, fit = committed, state.fit
        if c.tree is not None:
            fit = growing.learn(self.learner, fit, state.seen, c, growing.on_path(state.number, c))
        _, model = self.model.prefill(params, state.model, c.tokens, c.length)
        return dataclasses.replace(state, model=model, fit=fit)

    def propose(self, params: Any, state: ParallelState, context: Context) -> tuple[Draft, ParallelState]:
        """The draft; the state keeps the candidates behind its nodes."""
        batch, d = context.tokens.shape[0], self.depth
        tokens = jnp.full((batch, d), self.mask_token, jnp.int32).at[:, 0].set(context.anchor)
        parent = jnp.broadcast_to(jnp.arange(-1, d - 1, dtype=jnp.int32), tokens.shape)
        output, _, model = self.model.score(params, state.model, Tree(tokens, parent, jnp.ones(tokens.shape, bool)))
        draft, number, seen, _ = growing.draft(
            self.shape,
            self.learner,
            ContextFree(),
            None,
            Marginals(output.logits, jnp.int32(1)),
            output.logits[:, 0],
            state.fit,
            context,
        )
        return draft, dataclasses.replace(state, model=model, number=number, seen=seen)

    def insert(self, state: ParallelState, rows: Int[Array, "r"], other: ParallelState) -> ParallelState:
        """Rows replaced; what was learned is the batch's, and that of the other state is left behind."""
        model = self.model.insert(state.model, rows, self.model.materialize(other.model))
        return dataclasses.replace(state, model=model)

    def release(self, state: ParallelState, rows: Array, tokens: Array, length: Array) -> ParallelState:
        """Rows emptied; what was learned stays."""
        return dataclasses.replace(state, model=self.model.release(state.model, rows))


def with_mean_mask(params: Any, mask_token: int) -> Any:
    """A model's parameters with the mean of all embeddings as the mask's, in a copy of the embedding."""
    e = params.embedding
    if isinstance(e, RowEmbedding):
        e = dataclasses.replace(e, table=e.table.at[mask_token].set(e.table.mean(0)))
    else:
        e = e.at[:, mask_token].set(e.mean(1))
    return dataclasses.replace(params, embedding=e)


def drafter(config: ParallelConfig, shape: Growth | Branching, learner: Learner | None = None) -> ParallelModel:
    """A drafter for any target of the same vocabulary; its parameters are the model's."""
    return ParallelModel(config.target(), config.mask_token, shape, learner or Learner())
