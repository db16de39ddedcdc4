"""The block-parallel drafter: one network pass a round, then a chain or tree with whatever causal head there is."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from spec_jax import tree as trees
from spec_jax.drafters import features, growing, ranking
from spec_jax.drafters.block import carry
from spec_jax.drafters.block.carry import Carried
from spec_jax.drafters.block.config import BlockConfig
from spec_jax.drafters.block.expander import BlockExpander
from spec_jax.drafters.block.heads.head import PLAIN, Block, Head, Plain
from spec_jax.drafters.block.network import (
    BlockParams,
    Context,
    context_rows,
    draft_rows,
    empty_context,
    full_logits,
    slot_inputs,
)
from spec_jax.drafters.block.shape import BestFirst
from spec_jax.drafters.block.text import make_block
from spec_jax.drafters.drafter import Committed
from spec_jax.drafters.drafter import Context as View
from spec_jax.models import attention
from spec_jax.models.config import require
from spec_jax.models.target import Output
from spec_jax.sampling.reduce import argmax
from spec_jax.topology.branching import Branching
from spec_jax.topology.coupling import Candidates, Fit, Learner
from spec_jax.topology.growth import Growth, Ranked
from spec_jax.tree import Draft


@flax.struct.dataclass
class BlockState:
    """Keys and values of the committed text without its anchor, and the tapped features of its last token.

    number[i] says where the candidates behind node i of the draft stand in `seen`, -1: nowhere; seen and fit are None
    without coupling. carried is what the last draft's rejected part left, and rows the last block's own, where the
    network reads them (None: it does not).
    """

    context: Context
    feature: Float[Array, "b taps hidden"]
    number: Int[Array, "b n"]
    seen: Candidates | None
    fit: Fit | None
    carried: Carried | None = None
    rows: Float[Array, "b s hidden"] | None = None


@dataclasses.dataclass(frozen=True)
class BlockDrafter(growing.Shaped):
    """DFlash (arXiv 2602.06036) and its family: a network, a causal head, and the shape of a draft.

    A `Growth` asks the head behind every expanded node: a chain has width and children 1, a tree more. `BestFirst`
    combines marginals. Both are verified by `match`, and coupled ones rank by the target's noise too, with weights that
    `learner` fits while decoding. A `Branching` draws tokens, for p/q rules: a chain is (1, 1, ..), with replacement.

    The target must tap what the network reads (`tapped`). `block` fixes the state's size, with max_len, and must be at
    least the engine's prefill_chunk.

    Attributes:
        config: the network's.
        shape: the drafts.
        head: the causal head.
        learner: how weights are fitted, for a coupled shape.
        block: tokens of a prefill chunk.
    """

    config: BlockConfig
    shape: Growth | BestFirst | Branching
    head: Head = Plain()
    learner: Learner = Learner()
    block: int = 64

    def __post_init__(self) -> None:
        """Check that the pieces fit together."""
        deepest = self.config.depth
        got = f"one of depth {self.shape.depth}"
        require(self.shape.depth <= deepest, "shape", got, f"at most the block's {deepest}")
        if isinstance(self.shape, BestFirst):
            free = isinstance(self.head, Plain) or hasattr(self.head, "marginals")
            require(free, "shape", "BestFirst with a head that reads the path", "a Growth or Branching")

    @property
    def vocab_size(self) -> int:
        """That of the config."""
        return self.config.vocab_size

    @property
    def reads(self) -> int:
        """How many hidden states of the target it reads."""
        return len(self.config.taps) + self.head.final_tap

    def tapped(self, target: Any) -> Any:
        """The target (a `Llama` or `Qwen`) with the taps that this drafter reads.

        Raises:
            ValueError: for a target of another vocabulary or hidden size, or with fewer layers than are read.
        """
        c, layers = self.config, target.config.num_layers
        for name in ("vocab_size", "hidden_size"):
            want, got = getattr(c, name), getattr(target.config, name)
            require(want == got, "target", f"one of {name} {got}", f"one of {want}")
        require(max(c.taps) <= layers, "target", f"one of {layers} layers", f"one of at least {max(c.taps)}")
        return dataclasses.replace(target, taps=c.taps + (layers,) * self.head.final_tap)

    def init(self, params: BlockParams, batch: int, max_len: int) -> BlockState:
        """Empty rows."""
        c, dtype = self.config, params.network.norm.dtype
        seen, fit = growing.blank(self._growth, self.learner, batch, c.vocab_size)
        sizes = (batch, c.block_size, len(c.taps), c.hidden_size)
        carried = None if c.rejected is None else carry.nothing(c.rejected, *sizes, dtype)
        return BlockState(
            context=empty_context(c, batch, max_len + max(self.block, self.depth + 1), dtype),
            feature=jnp.zeros((batch, self.reads, c.hidden_size), dtype),
            number=jnp.full((batch, self.nodes), -1, jnp.int32),
            seen=seen,
            fit=fit,
            carried=carried,
            rows=None if carried is None else carried.hidden,
        )

    def tap(self, output: Output) -> Float[Array, "b n taps hidden"]:
        """The target's tapped hidden states."""
        return self._checked(features.required(output.features))

    def observe(self, params: BlockParams, state: BlockState, committed: Committed) -> BlockState:
        """Keys and values of the committed tokens' features, and of nothing else, behind the context."""
        c, old = committed, state.context
        rows = features.along_path(c, self._checked).astype(state.feature.dtype)
        m, room = rows.shape[1], max(self.block, self.depth + 1)
        if m > room:
            raise ValueError(f"block: got {self.block}, takes at least the engine's prefill_chunk, {m}")
        positions = old.length[:, None] + jnp.arange(m)
        used = rows[:, :, : len(self.config.taps)]
        k, v = context_rows(self.config, params.network, used, positions, old.room)
        in_order = jnp.broadcast_to(jnp.arange(m), rows.shape[:2])
        place = (in_order, old.length, c.length, old.room)
        write = lambda cache, new: attention.commit(cache, new.swapaxes(1, 2), *place)  # noqa: E731
        put = lambda caches, new: tuple(write(*pair) for pair in zip(caches, new, strict=True))  # noqa: E731
        fit = state.fit
        if c.tree is not None:
            fit = growing.learn(self.learner, fit, state.seen, c, growing.on_path(state.number, c))
        last = jnp.take_along_axis(rows, jnp.maximum(c.length - 1, 0)[:, None, None, None], axis=1)[:, 0]
        return dataclasses.replace(
            state,
            context=Context(put(old.k, k), put(old.v, v), old.length + c.length, old.room),
            feature=jnp.where((c.length > 0)[:, None, None], last, state.feature),
            fit=fit,
            carried=self._carried(state, c),
        )

    def propose(self, params: BlockParams, state: BlockState, context: View) -> tuple[Draft, BlockState]:
        """The draft; the state keeps the candidates behind its nodes."""
        block, shape = self.run(params, state, context), self.shape
        if isinstance(shape, BestFirst):
            found = self._rank_depths(params, block, context, state.fit)
            draft = jax.vmap(shape.tree)(found.tokens, found.log_chance, context.anchor)
            number = jax.vmap(trees.depth)(draft.tree.parent)
            number = jnp.where(number < shape.depth, number, -1)
            return draft, dataclasses.replace(state, number=number, seen=found.trace, rows=self._kept(block, state))
        expander = BlockExpander(self.head)
        pool, logits = expander.root(params, block, shape.expanded)
        draft, number, seen, _ = growing.draft(shape, self.learner, expander, params, pool, logits, state.fit, context)
        state = dataclasses.replace(state, number=number, seen=seen, rows=self._kept(block, state))
        return self._sure(params, block, draft), state

    def insert(self, state: BlockState, rows: Int[Array, "r"], other: BlockState) -> BlockState:
        """Rows replaced; what was learned is the batch's, and that of the other state is left behind."""
        put = lambda x, y: x.at[rows].set(y, mode="drop")  # noqa: E731
        return dataclasses.replace(
            state,
            context=jax.tree.map(put, state.context, other.context),
            feature=put(state.feature, other.feature),
            carried=jax.tree.map(put, state.carried, other.carried),
            rows=jax.tree.map(put, state.rows, other.rows),
        )

    def release(self, state: BlockState, rows: Array, tokens: Array, length: Array) -> BlockState:
        """Rows emptied; what was learned stays."""
        cleared = lambda x: x.at[rows].set(0, mode="drop")  # noqa: E731
        context = dataclasses.replace(state.context, length=cleared(state.context.length))
        carried = jax.tree.map(cleared, state.carried)
        return dataclasses.replace(state, context=context, feature=cleared(state.feature), carried=carried)

    def run(self, params: BlockParams, state: BlockState, context: View) -> Block:
        """The network's pass over each row's block."""
        c, anchor = self.config, context.anchor
        at = jnp.maximum(context.length - 2, 0)[:, None]
        before = jnp.take_along_axis(context.tokens, at, axis=1)[:, 0]
        before = jnp.where(context.length > 1, before, anchor)
        inputs = slot_inputs(c, params.ends, anchor).astype(params.network.norm.dtype)
        hidden = draft_rows(c, params.network, inputs, state.context, state.carried)
        return make_block(c, params, self.head, anchor, before, state.feature, hidden)

    def _carried(self, state: BlockState, committed: Committed) -> Carried | None:
        """What a verdict's rejected part leaves for the next block; a prefill chunk leaves nothing."""
        c, old = committed, state.carried
        if old is None:
            return None
        if c.tree is None:
            return dataclasses.replace(old, valid=old.valid & (c.length == 0)[:, None])
        depth = jax.vmap(trees.depth)(c.tree.parent)
        seen = c.taps[:, :, : len(self.config.taps)].astype(old.features.dtype)
        return carry.carried(self.config.block_size, seen, depth, c.tree.valid, c.length, state.rows)

    def _kept(self, block: Block, state: BlockState) -> Array | None:
        return None if state.rows is None else block.normed.astype(state.rows.dtype)

    def _rank_depths(self, params: BlockParams, block: Block, context: View, fit: Fit | None) -> Ranked:
        """The candidates of every depth [b, d, m], with what holds after the marginals' likeliest tokens before it."""
        growth, d = self._growth, self.depth
        assert isinstance(growth, Growth)
        rank = ranking.ranker(growth, context, None if fit is None else self.learner.weights(fit))
        likeliest = jax.vmap(jax.vmap(argmax))

        def ranked(logits: Array) -> Ranked:
            z = full_logits(self.config, params, logits[:, :d])
            path = jnp.maximum(likeliest(z), 0)[:, None]
            each = jax.vmap(lambda z, at: rank(z[:, None], path, at), (1, 0), 1)(z, jnp.arange(d))
            return jax.tree.map(lambda x: x[:, :, 0], each)

        if isinstance(self.head, Plain):
            return ranked(block.logits)
        marginals: Any = self.head
        best = lambda logits: jnp.take_along_axis(  # noqa: E731
            (r := ranked(logits)).tokens, jnp.argmax(r.log_chance, axis=-1)[..., None], axis=-1
        )[..., 0]
        return ranked(marginals.marginals(params, block, best))

    def _sure(self, params: BlockParams, block: Block, draft: Draft) -> Draft:
        """A chain's confidences by the head's own estimate, if it has one."""
        head: Any = self.head
        if self.nodes != self.depth + 1 or not hasattr(head, "confidence_logits"):
            return draft
        logits = head.confidence_logits(params, block, draft.tree.tokens[:, :-1])
        if logits is None:
            return draft
        sure = jnp.concatenate([jnp.ones((logits.shape[0], 1)), jax.nn.sigmoid(logits)], axis=1)
        return dataclasses.replace(draft, confidence=jnp.where(draft.tree.valid, sure, 0.0))

    def _checked(self, tapped: Array) -> Array:
        want = (self.reads, self.config.hidden_size)
        if tapped.shape[2:] != want:
            got = " of size ".join(map(str, tapped.shape[2:]))
            raise ValueError(f"target: got one with taps of {got}, takes {want[0]} of size {want[1]} (see `tapped`)")
        return tapped


def chain(
    config: BlockConfig, head: Head = PLAIN, ranking: Literal["point", "coupled"] = "coupled"
) -> Growth | BestFirst:
    """The shape of a chain as deep as the block, or by all slots at once where the head allows it."""
    d = config.depth
    if isinstance(head, Plain) or hasattr(head, "marginals"):
        return BestFirst(nodes=d + 1, depth=d, children=1, ranking=ranking)
    return Growth(nodes=d + 1, depth=d, width=1, children=1, ranking=ranking)
