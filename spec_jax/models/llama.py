"""The Llama family as pure functions over a parameter tree (arXiv 2302.13971; grouped-query attention 2305.13245)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy.typing as npt
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.tree_attention import tree_attention
from spec_jax import tree as trees
from spec_jax.models import attention, layers, lazy, on_mesh
from spec_jax.models.config import LlamaConfig
from spec_jax.models.layers import Periods, Skippable
from spec_jax.models.linear import Dense, Embedding, Linear
from spec_jax.models.norms import rms_norm
from spec_jax.models.rope import inverse_frequencies, rotate
from spec_jax.models.target import Output
from spec_jax.tree import Tree


@flax.struct.dataclass
class Layer:
    """One decoder layer's leaves."""

    attention_norm: Float[Array, "*l hidden"]
    q: Linear
    k: Linear
    v: Linear
    o: Linear
    mlp_norm: Float[Array, "*l hidden"]
    gate: Linear
    up: Linear
    down: Linear


@flax.struct.dataclass
class LlamaParams:
    """The whole model. `layers` is a tuple of Layer, or stacked (scanned).

    The embedding is stored [hidden, vocab]; with a tied head it is the head as well, and `head` is None.
    """

    embedding: Embedding
    layers: tuple[Layer | Skippable, ...] | Periods
    norm: Float[Array, "hidden"]
    head: Linear | None = None


@flax.struct.dataclass
class AttentionState:
    """Committed keys and values: per layer a [B, kv, slots, head_dim] array, in the form of the parameters' layers.

    `room` is the slots that a whole text takes; a cache of fewer is a ring (see `models.attention`).
    """

    k: Any
    v: Any
    length: Int[Array, "b"]
    room: int = flax.struct.field(pytree_node=False)


@flax.struct.dataclass
class StagedRows:
    """Keys and values of a scored tree's nodes: per layer [B, kv, N, head_dim], laid out as in AttentionState."""

    k: Any
    v: Any


@dataclasses.dataclass(frozen=True)
class Llama:
    """A Llama-family target (or small drafter). `taps` names the layers whose outputs are returned as features.

    Tap i is the hidden state after i layers, so 0 is the embedding, as in transformers' `output_hidden_states`.

    With a `mesh` (`placement.make_mesh`) parameters and states are split over it, and every device runs its part.
    """

    config: LlamaConfig
    taps: tuple[int, ...] = ()
    mesh: Mesh | None = dataclasses.field(default=None, kw_only=True)

    @property
    def vocab_size(self) -> int:
        """Number of logits."""
        return self.config.vocab_size

    def init_state(self, params: LlamaParams, batch: int, slots: int) -> AttentionState:
        """An empty state of `batch` rows, each with room for `slots` tokens.

        A row of text length L needs L slots plus one per node of the widest commit. With a sliding window fewer are
        kept, whatever the text's length (`attention.kept_slots`).
        """
        if self.mesh is not None:
            return on_mesh.settled(self, on_mesh.whole(self).init_state(params, batch, slots))
        c, dtype = self.config, params.embedding.dtype
        shape = (batch, c.num_kv_heads, attention.kept_slots(slots, c.sliding_window), c.head_dim)
        zeros = lambda: layers.each(lambda _: jnp.zeros(shape, dtype), params.layers)  # noqa: E731
        return AttentionState(zeros(), zeros(), jnp.zeros(batch, jnp.int32), slots)

    def prefill(
        self, params: LlamaParams, state: AttentionState, tokens: Int[Array, "b p"], count: Int[Array, "b"]
    ) -> tuple[Array | None, AttentionState]:
        """Append the first `count` of p tokens to every row; returns features [B, p, taps, hidden] and the state."""
        b, p = tokens.shape
        if self.mesh is not None:
            return on_mesh.call(self, Llama.prefill, params, state, tokens, count, batch=b)
        offset = jnp.arange(p)
        mask = jnp.broadcast_to((offset[None, :] <= offset[:, None]), (b, p, p))
        _, staged, features = self._forward(params, state, tokens, state.length[:, None] + offset, mask)
        return features, self.commit(state, staged, jnp.broadcast_to(offset, (b, p)), count)

    def score(
        self,
        params: LlamaParams,
        state: AttentionState,
        tree: Tree,
        staged: StagedRows | None = None,
        nodes: tuple[Int[Array, ""] | int, int] | None = None,
    ) -> tuple[Output, StagedRows, AttentionState]:
        """Logits of every node of a [B, N] tree, given its ancestors; the state's value does not change.

        nodes = (start, n) scores only nodes start .. start + n - 1 and extends `staged`, which already holds the nodes
        before `start` (n static; start may be traced); the output then has n rows.
        """
        start, n = (0, tree.tokens.shape[1]) if nodes is None else nodes
        if self.mesh is not None:
            part = lambda own, *args: Llama.score(own, *args)[:2]  # noqa: E731, the state stays the same arrays
            args = (params, state, tree, staged)
            return *on_mesh.score(self, part, *args, nodes=(start, n), batch=tree.tokens.shape[0]), state
        reach = jax.vmap(trees.ancestors)(tree.parent)
        position = state.length[:, None] + reach.sum(-1, dtype=jnp.int32) - 1
        rows = lambda x: lax.dynamic_slice_in_dim(x, start, n, axis=1)  # noqa: E731
        hidden, staged, features = self._forward(
            params, state, rows(tree.tokens), rows(position), rows(reach), staged, start
        )
        return Output(self.logits(params, hidden), features), staged, state

    def commit(
        self, state: AttentionState, staged: StagedRows, path: Int[Array, "b m"], length: Int[Array, "b"]
    ) -> AttentionState:
        """Move the state forward by the first `length` nodes of `path`."""
        if self.mesh is not None:
            part = lambda own, _, *args: Llama.commit(own, *args)  # noqa: E731
            return on_mesh.call(self, part, None, state, staged, path, length, batch=length.shape[0])
        place = (path, state.length, length, state.room)
        write = lambda cache, rows: attention.commit(cache, rows, *place)  # noqa: E731
        k, v = layers.each(write, state.k, staged.k), layers.each(write, state.v, staged.v)
        return AttentionState(k, v, state.length + length, state.room)

    def materialize(self, state: AttentionState) -> AttentionState:
        """The state with nothing pending; an attention cache never has anything pending."""
        return state

    def take(self, state: AttentionState, rows: Int[Array, "r"]) -> AttentionState:
        """Copies of the given rows."""
        return self._settled(_map_rows(lambda x, axis: jnp.take(x, rows, axis=axis), state))

    def insert(self, state: AttentionState, rows: Int[Array, "r"], other: AttentionState) -> AttentionState:
        """The state with its rows `rows` replaced by those of `other`; an index out of range is left out."""
        put = lambda x, y, axis: (  # noqa: E731
            x.at[rows].set(y, mode="drop") if axis == 0 else x.at[:, rows].set(y, mode="drop")
        )
        return self._settled(_map_rows(put, state, other))

    def release(self, state: AttentionState, rows: Int[Array, "r"]) -> AttentionState:
        """The state with the given rows empty."""
        return self._settled(dataclasses.replace(state, length=state.length.at[rows].set(0, mode="drop")))

    def _settled(self, state: AttentionState) -> AttentionState:
        return state if self.mesh is None else on_mesh.settled(self, state)

    def logits(self, params: LlamaParams, hidden: Float[Array, "b n hidden"]) -> Float[Array, "b n vocab"]:
        """The head, with the final norm in front."""
        b, n, d = hidden.shape
        x = rms_norm(hidden, params.norm, self.config.rms_norm_eps).reshape(b * n, d)
        y = x @ params.embedding if params.head is None else params.head(x)
        return y.reshape(b, n, -1).astype(jnp.float32)

    def layer(
        self,
        state: AttentionState,
        position: Int[Array, "b n"],
        mask: Bool[Array, "b n m"],
        start: Int[Array, ""] | int = 0,
    ) -> Callable:
        """One layer over nodes of a tree, for `layers.run`: of hidden states [B, N, hidden], outputs and (k, v) rows.

        It takes (hidden, index, leaves, k cache, v cache, k rows, v rows), where rows are those of the m nodes of the
        tree before `start`, not read if all its nodes are given.
        """
        c, (b, n) = self.config, position.shape
        inv_freq, factor = inverse_frequencies(c.rope, c.head_dim, c.max_position_embeddings, length=state.room)
        extend = lambda old, new: lax.dynamic_update_slice_in_dim(old, new, start, axis=2)  # noqa: E731

        def layer(x, _, leaves: Layer, k_cache, v_cache, k_old, v_old):
            flat = rms_norm(x, leaves.attention_norm, c.rms_norm_eps).reshape(b * n, -1)
            heads = lambda y: y.reshape(b, n, -1, c.head_dim)  # noqa: E731
            q = rotate(heads(leaves.q(flat)), position, inv_freq, factor)
            k = rotate(heads(leaves.k(flat)), position, inv_freq, factor).swapaxes(1, 2)
            v = heads(leaves.v(flat)).swapaxes(1, 2)
            if mask.shape[2] != n:
                k, v = extend(k_old, k), extend(v_old, v)
            options = {"window": c.sliding_window, "ring": k_cache.shape[2] < state.room}
            out = tree_attention(q, k_cache, v_cache, state.length, k, v, mask, c.head_dim**-0.5, **options)
            x = x + leaves.o(out.reshape(b * n, -1)).reshape(b, n, -1)
            flat = rms_norm(x, leaves.mlp_norm, c.rms_norm_eps).reshape(b * n, -1)
            return x + leaves.down(jax.nn.silu(leaves.gate(flat)) * leaves.up(flat)).reshape(b, n, -1), (k, v)

        return layer

    def _forward(
        self,
        params: LlamaParams,
        state: AttentionState,
        tokens: Int[Array, "b n"],
        position: Int[Array, "b n"],
        mask: Bool[Array, "b n m"],
        staged: StagedRows | None = None,
        start: Int[Array, ""] | int = 0,
    ) -> tuple[Array, StagedRows, Array | None]:
        layer = self.layer(state, position, mask, start)
        x = params.embedding[:, tokens.reshape(-1)].T.reshape(*tokens.shape, -1)
        old = staged or self.stage(state, mask.shape[2])
        hidden, rows = layers.run(layer, x, params.layers, state.k, state.v, old.k, old.v)
        staged = StagedRows(*(layers.zipped(lambda kv, i=i: kv[i], rows) for i in range(2)))
        features = jnp.stack([hidden[i] for i in self.taps], axis=2) if self.taps else None
        return hidden[-1], staged, features

    def widen(self, staged: StagedRows, n: int) -> StagedRows:
        """Staged rows with room for n nodes, zeros in the new ones."""
        pad = lambda x: jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, n - x.shape[-2]), (0, 0)])  # noqa: E731
        return jax.tree.map(pad, staged)

    def stage(self, state: AttentionState, n: int) -> StagedRows:
        """Room for the staged rows of n nodes."""
        empty = lambda x: jnp.zeros((*x.shape[:-2], n, x.shape[-1]), x.dtype)  # noqa: E731
        return StagedRows(jax.tree.map(empty, state.k), jax.tree.map(empty, state.v))


def from_tensors(config: LlamaConfig, tensors: Mapping[str, npt.ArrayLike], dtype: Any = jnp.float32) -> LlamaParams:
    """Parameters, per layer, from tensors in Hugging Face's names and [out, in] orientation.

    The tensors must have passed `checkpoint.validate`. Layers stay a tuple; `stack_layers` stacks them.
    """
    return lazy.whole(lazy_params(config, tensors, dtype))


def lazy_params(config: LlamaConfig, tensors: Mapping[str, npt.ArrayLike], dtype: Any = jnp.float32) -> LlamaParams:
    """The parameters that `from_tensors` reads, as a tree of `Lazy` arrays, none of which is read yet."""
    tensor = lambda name: lazy.tensor(tensors[name], dtype)  # noqa: E731
    vector = lambda name: lazy.leaf(tensor(name))  # noqa: E731

    def dense(name: str, biased: bool) -> Dense:
        kernel = lazy.leaf(lazy.transpose(tensor(f"{name}.weight")))
        return Dense(kernel, vector(f"{name}.bias") if biased else None)

    def layer(i: int) -> Layer:
        at, mlp = f"model.layers.{i}.self_attn", f"model.layers.{i}.mlp"
        return Layer(
            attention_norm=vector(f"model.layers.{i}.input_layernorm.weight"),
            **{p: dense(f"{at}.{p}_proj", config.attention_bias) for p in "qkvo"},
            mlp_norm=vector(f"model.layers.{i}.post_attention_layernorm.weight"),
            **{p: dense(f"{mlp}.{p}_proj", config.mlp_bias) for p in ("gate", "up", "down")},
        )

    return LlamaParams(
        embedding=dense("model.embed_tokens", False).kernel,
        layers=tuple(layer(i) for i in range(config.num_layers)),
        norm=vector("model.norm.weight"),
        head=None if config.tie_word_embeddings else dense("lm_head", False),
    )


def stack_layers(params: LlamaParams) -> LlamaParams:
    """The same parameters with the layers stacked on a leading axis and scanned: compile time does not grow with depth.

    On CPU the scan copies each layer's weights before use, so the tuple is faster there.
    """
    assert isinstance(params.layers, tuple)
    return dataclasses.replace(params, layers=layers.stack(params.layers, 1))


def _map_rows(f: Callable, state: AttentionState, *others: AttentionState) -> AttentionState:
    """Apply f(leaf, *other leaves, row axis) to every array of the state."""
    k, v = (layers.map_rows(f, *(getattr(s, name) for s in (state, *others))) for name in ("k", "v"))
    return AttentionState(k, v, f(state.length, *(o.length for o in others), 0), state.room)
