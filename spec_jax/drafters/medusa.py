"""Medusa's heads (arXiv 2401.10774), and Hydra's (arXiv 2402.05109), which also read the tokens before theirs."""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from spec_jax.drafters import prefix_attention
from spec_jax.drafters.block.ends import Ends, apply
from spec_jax.drafters.depth_tree import DepthShape, DepthTree, context_free
from spec_jax.drafters.prefix_attention import Prefix, PrefixReader
from spec_jax.models.config import LlamaConfig, check_types, require
from spec_jax.models.linear import Dense, Linear
from spec_jax.topology.branching import Branching
from spec_jax.topology.coupling import Learner
from spec_jax.topology.expander import Expander
from spec_jax.topology.growth import Growth
from spec_jax.tree import Tree


@dataclasses.dataclass(frozen=True)
class MedusaConfig:
    """The sizes of small heads on the target's last hidden state: head i is for the i-th token behind the anchor.

    Medusa: residual blocks and a map to logits, each head on its own. Hydra (`sequential`): head i reads the hidden
    state, the anchor's embedding and those of the i - 1 tokens drafted before its own; its first block narrows them.
    Hydra++ (`prefix`): the hidden state goes through attention over the whole text's first (`prefix_attention`).

    Attributes:
        vocab_size, hidden_size: the target's.
        num_heads: most tokens of a draft's root path.
        num_blocks: residual blocks per head.
        sequential: Hydra's heads.
        own_head: whether each head has a map to logits of its own, or all use the target's as it is.
        prefix: Hydra++'s decoder layer, as a Llama of one layer (its vocabulary is not read); None: none.
        final_norm_eps: of the target's final norm, behind which the hidden state is read.

    Raises:
        ValueError: naming the field, for anything that does not fit.
    """

    vocab_size: int
    hidden_size: int
    num_heads: int = 4
    num_blocks: int = 1
    sequential: bool = False
    final_norm_eps: float = 1e-6
    own_head: bool = True
    prefix: LlamaConfig | None = None

    def __post_init__(self) -> None:
        """Check every field."""
        check_types(MedusaConfig, vars(self))
        if self.prefix is not None:
            require(self.sequential, "prefix", "a layer", "None where the heads are not sequential")
            prefix_attention.check(self.prefix, self.hidden_size)


@flax.struct.dataclass
class Residual:
    """x + silu(linear(x)); where the size changes, short(x) + silu(linear(x))."""

    linear: Linear
    short: Linear | None = None

    def __call__(self, x: Float[Array, "*b n"]) -> Float[Array, "*b m"]:
        """Apply the block."""
        return (x if self.short is None else apply(self.short, x)) + jax.nn.silu(apply(self.linear, x))


@flax.struct.dataclass
class MedusaParams:
    """Each head's blocks and map to logits and Hydra++'s layer, which are trained, and the target's ends.

    Without maps of their own (`own_head`) outputs is empty.
    """

    blocks: tuple[tuple[Residual, ...], ...]
    outputs: tuple[Linear, ...]
    ends: Ends
    prefix: Prefix | None = None


@flax.struct.dataclass
class Paths:
    """Hydra's scratch: the tokens on the root path of every expanded node, the anchor first, and the next depth."""

    tokens: Int[Array, "b n d"]
    depth: Int[Array, ""]
    count: Int[Array, ""]


@dataclasses.dataclass(frozen=True)
class HydraExpander:
    """Sequential heads as an `Expander`; params are (`MedusaParams`, the hidden state)."""

    config: MedusaConfig

    def expand(
        self, params: Any, pool: Paths, parent: Int[Array, "b k"], token: Int[Array, "b k"]
    ) -> tuple[Paths, Float[Array, "b k vocab"]]:
        """The next depth's nodes."""
        weights, hidden = params
        above = jax.vmap(lambda x, at: x[at])(pool.tokens, jnp.maximum(parent, 0))
        paths = jnp.where(jnp.arange(above.shape[2]) == pool.depth, token[:, :, None], above)
        hidden = jnp.broadcast_to(hidden[:, None], (*token.shape, hidden.shape[-1]))
        one = lambda i: lambda h, p: head_logits(self.config, weights, i, h, p)  # noqa: E731
        logits = lax.switch(pool.depth, [one(i) for i in range(paths.shape[2])], hidden, paths)
        tokens = lax.dynamic_update_slice_in_dim(pool.tokens, paths, pool.count, axis=1)
        return Paths(tokens, pool.depth + 1, pool.count + token.shape[1]), logits


@dataclasses.dataclass(frozen=True)
class LastHidden:
    """What heads share that read the target's last hidden state alone and keep nothing of committed pairs.

    Their configs have vocab_size, hidden_size and final_norm_eps, their parameters the target's `ends`.
    """

    config: Any

    @property
    def vocab_size(self) -> int:
        """The target's."""
        return self.config.vocab_size

    def taken(self, features: Float[Array, "b n taps hidden"]) -> Float[Array, "b n hidden"]:
        """The one tapped state; ValueError for others."""
        if features.shape[2:] != (1, self.config.hidden_size):
            raise ValueError(
                f"features: got {features.shape[2]} of size {features.shape[3]}, takes 1 of size "
                f"{self.config.hidden_size} (see `tapped`)"
            )
        return features[:, :, 0]

    def init(self, params: Any, batch: int, max_len: int) -> tuple[Any, Float[Array, "b hidden"]]:
        """Nothing, and zeros."""
        return (), jnp.zeros((batch, self.config.hidden_size), params.ends.norm.dtype)

    def context(self, params: Any, taken: Float[Array, "b n hidden"]) -> Float[Array, "b n hidden"]:
        """Behind the target's final norm."""
        return params.ends.final(taken, self.config.final_norm_eps)

    def score(
        self,
        params: Any,
        state: Any,
        context: Float[Array, "b n hidden"],
        tree: Tree,
        staged: Any = None,
        nodes: tuple[Int[Array, ""] | int, int] | None = None,
    ) -> tuple[Float[Array, "b n hidden"], Any]:
        """The target's own state is the context behind a pair."""
        return context, ()

    def commit(self, state: Any, staged: Any, length: Int[Array, "b"]) -> Any:
        """Nothing is kept."""
        return state

    def insert(self, state: Any, rows: Int[Array, "r"], other: Any) -> Any:
        """Nothing is kept."""
        return state

    def release(self, state: Any, rows: Int[Array, "r"]) -> Any:
        """Nothing is kept."""
        return state


def own_parts(params: Any) -> dict[str, Any]:
    """What is a head's own of its parameters, by field: all but the target's ends."""
    return {f.name: getattr(params, f.name) for f in dataclasses.fields(params) if f.name != "ends"}


@dataclasses.dataclass(frozen=True)
class MedusaHead(LastHidden):
    """The heads as a `DepthHead`: their context is the target's normed hidden state, and they keep nothing else."""

    config: MedusaConfig

    @property
    def depth(self) -> int:
        """As many as there are heads."""
        return self.config.num_heads

    def logits(self, params: MedusaParams, context: Float[Array, "b n hidden"]) -> Float[Array, "b n vocab"]:
        """The first head's, which needs no drafted token; ValueError for Hydra's, which needs the anchor."""
        if self.config.sequential:
            raise ValueError("head: got Hydra's heads without the anchor; they draft as a DepthTree")
        return head_logits(self.config, params, 0, context, None)

    def root(
        self,
        params: MedusaParams,
        state: Any,
        context: Float[Array, "b hidden"],
        anchor: Int[Array, "b"],
        shape: Growth | Branching,
    ) -> tuple[Expander, Any, Any, Float[Array, "b vocab"]]:
        """All heads at once, or Hydra's first one."""
        if not self.config.sequential:
            return context_free(_marginals(self.config, params, context, shape.depth))
        paths = jnp.zeros((context.shape[0], shape.expanded, shape.depth), jnp.int32)
        pool = Paths(paths.at[:, 0, 0].set(anchor), jnp.int32(1), jnp.int32(1))
        logits = head_logits(self.config, params, 0, context, anchor[:, None])
        return HydraExpander(self.config), (params, context), pool, logits


@dataclasses.dataclass(frozen=True)
class PrefixedHead(PrefixReader, MedusaHead):
    """Hydra++'s heads: Hydra's behind a layer of attention, whose keys and values they keep."""

    config: MedusaConfig


@dataclasses.dataclass(frozen=True)
class IndependentHead(MedusaHead):
    """Medusa's heads, which also give all depths' logits to shapes that combine them."""

    def marginals(
        self, params: MedusaParams, state: tuple[()], context: Float[Array, "b hidden"], depth: int
    ) -> Float[Array, "b d vocab"]:
        """Every head's logits."""
        return _marginals(self.config, params, context, depth)


def head_logits(
    config: MedusaConfig,
    params: MedusaParams,
    index: int,
    hidden: Float[Array, "*b hidden"],
    path: Int[Array, "*b d"] | None,
) -> Float[Array, "*b vocab"]:
    """Logits of head `index`, from 0, given the root path's tokens, the anchor first (None: heads that read none)."""
    x = hidden
    if config.sequential:
        assert path is not None
        read = params.ends.embed(path[..., : index + 1]).astype(x.dtype)
        x = jnp.concatenate([x, read.reshape(*x.shape[:-1], -1)], axis=-1)
    for block in params.blocks[index]:
        x = block(x)
    output = params.outputs[index] if config.own_head else params.ends.output
    return apply(output, x).astype(jnp.float32)


def hidden_before(
    config: Any, ends: Ends, features: Float[Array, "b t taps hidden"], anchors: Int[Array, "b a"]
) -> Float[Array, "b a hidden"]:
    """The target's normed hidden states that heads read for anchors of whole texts: those one position before."""
    hidden = _at(features[:, :, 0], anchors)
    return ends.final(hidden.astype(ends.norm.dtype), config.final_norm_eps)


def text_logits(
    config: MedusaConfig,
    params: MedusaParams,
    features: Float[Array, "b t taps hidden"],
    tokens: Int[Array, "b t"],
    anchors: Int[Array, "b a"],
    blocks: Int[Array, "b a d"],
) -> Float[Array, "b a d vocab"]:
    """What the heads say behind anchors at text positions 1 .. t - 1, given the right tokens `blocks` behind each.

    Differentiable. Logits of depth i are for blocks[..., i]; an anchor at position 0 has no hidden state: zeros.
    """
    hidden = _before(config, params, features, anchors)
    path = jnp.concatenate([jnp.take_along_axis(tokens, anchors, axis=1)[:, :, None], blocks], axis=2)
    depths = [head_logits(config, params, i, hidden, path) for i in range(blocks.shape[2])]
    return jnp.where((anchors > 0)[:, :, None, None], jnp.stack(depths, axis=2), 0.0)


def init_params(
    config: MedusaConfig, key: Array, ends: Ends, dtype: Any = jnp.float32, scale: float = 0.02
) -> MedusaParams:
    """Heads that begin as the target's own: blocks that leave the hidden state as it is, and copies of its head.

    Without maps of their own there are no copies. Hydra's first blocks pass the hidden state on, and little of the
    embeddings. Raises ValueError for a target's head that can't be copied.
    """
    h = config.hidden_size

    def block(index: int, number: int) -> Residual:
        wide = h * (2 + index if config.sequential and number == 0 else 1)
        linear = Dense(jnp.zeros((wide, h), dtype), jnp.zeros(h, dtype))
        if wide == h:
            return Residual(linear)
        noise = scale * jax.random.normal(jax.random.fold_in(key, index), (wide, h))
        return Residual(linear, Dense(noise.at[:h].set(jnp.eye(h)).astype(dtype), jnp.zeros(h, dtype)))

    blocks = tuple(tuple(block(i, j) for j in range(config.num_blocks)) for i in range(config.num_heads))
    prefix = None
    if config.prefix is not None:
        own = jax.random.fold_in(key, config.num_heads)
        prefix = prefix_attention.init_prefix(config.prefix, own, dtype, scale)
    if not config.own_head:
        return MedusaParams(blocks, (), ends, prefix)
    copy = jax.tree.map(lambda x: x.astype(dtype), ends.columns())
    return MedusaParams(blocks, (copy,) * config.num_heads, ends, prefix)


def drafter(config: MedusaConfig, shape: Growth | Branching | DepthShape, learner: Learner | None = None) -> DepthTree:
    """A drafter for `tapped(config, target)`; its parameters are `MedusaParams`.

    Medusa's static trees are a `depth_tree.Choices`; a `BestFirst` or `Growth` picks by the heads' own chances. Hydra
    takes a `Growth` or `Branching`, which are as its published choice lists but follow the heads' chances too.
    """
    head = PrefixedHead if config.prefix is not None else MedusaHead if config.sequential else IndependentHead
    return DepthTree(head(config), shape, learner or Learner())


def tapped(config: Any, target: Any) -> Any:
    """The target (a `Llama` or `Qwen`) that returns its last hidden state, for a config as `LastHidden` takes it.

    Raises ValueError for a target of another vocabulary, hidden size, or norm.
    """
    found = target.config
    pairs = (("vocab_size", "vocab_size"), ("hidden_size", "hidden_size"), ("final_norm_eps", "rms_norm_eps"))
    for own, its in pairs:
        want, got = getattr(config, own), getattr(found, its)
        require(want == got, "target", f"one of {its} {got}", f"one of {want}")
    return dataclasses.replace(target, taps=(found.num_layers,))


def _at(rows: Float[Array, "b t hidden"], anchors: Int[Array, "b a"]) -> Float[Array, "b a hidden"]:
    return jnp.take_along_axis(rows, jnp.maximum(anchors - 1, 0)[:, :, None], axis=1)


def _before(config: MedusaConfig, params: MedusaParams, features: Array, anchors: Array) -> Array:
    if config.prefix is None or params.prefix is None:
        return hidden_before(config, params.ends, features, anchors)
    whole = params.ends.final(features[:, :, 0].astype(params.ends.norm.dtype), config.final_norm_eps)
    return _at(prefix_attention.text(config.prefix, params.prefix, whole), anchors)


def _marginals(config: MedusaConfig, params: MedusaParams, context: Array, depth: int) -> Array:
    return jnp.stack([head_logits(config, params, i, context, None) for i in range(depth)], axis=1)
