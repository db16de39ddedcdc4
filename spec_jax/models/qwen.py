"""The Qwen3, Qwen3-MoE, Qwen3-Next and Qwen3.5 text models: attention and gated delta layers, dense or with experts."""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from spec_jax import tree as trees
from spec_jax.models import attention, delta_conv, delta_mixer, experts, gated_attention, layers, on_mesh
from spec_jax.models.delta_mixer import Delta, DeltaState, StagedDelta
from spec_jax.models.experts import Experts, Mlp
from spec_jax.models.gated_attention import Attention, KeyValues
from spec_jax.models.layers import Periods, Skippable
from spec_jax.models.linear import Embedding, Linear
from spec_jax.models.norms import OnePlus, rms_norm
from spec_jax.models.qwen_config import DELTA, WINDOW, QwenConfig
from spec_jax.models.target import Output
from spec_jax.tree import Tree


@flax.struct.dataclass
class Layer:
    """One decoder layer's leaves. Norm weights are those that multiply; (1 + w) ones are kept in float32.

    mixer_after, mlp_after: norms of what each half adds, where the model has some.
    """

    mixer_norm: Float[Array, "*l hidden"] | OnePlus
    mixer: Attention | Delta
    mlp_norm: Float[Array, "*l hidden"] | OnePlus
    mlp: Mlp | Experts
    mixer_after: Float[Array, "*l hidden"] | OnePlus | None = None
    mlp_after: Float[Array, "*l hidden"] | OnePlus | None = None


@flax.struct.dataclass
class Mtp:
    """A multi-token-prediction head: an attention layer over pairs of a hidden state and the next token's embedding."""

    embedding_norm: Float[Array, "hidden"]
    hidden_norm: Float[Array, "hidden"]
    fc: Linear
    layer: Layer
    norm: Float[Array, "hidden"]


@flax.struct.dataclass
class QwenParams:
    """The whole model. `layers` is a tuple of Layer, or stacked in periods (scanned).

    The embedding is stored [hidden, vocab]; with a tied head it is the head as well, and `head` is None.
    """

    embedding: Embedding
    layers: tuple[Layer | Skippable, ...] | Periods
    norm: Float[Array, "hidden"] | OnePlus
    head: Linear | None = None
    mtp: Mtp | None = None


@flax.struct.dataclass
class QwenState:
    """Each layer's KeyValues or DeltaState, in the form of the parameters' layers, and the row lengths.

    `room` is the slots that a whole text takes; KeyValues of fewer are a ring (see `models.attention`).
    """

    layers: Any
    length: Int[Array, "b"]
    room: int = flax.struct.field(pytree_node=False)


@flax.struct.dataclass
class QwenStaged:
    """Each layer's staged rows: KeyValues or StagedDelta."""

    layers: Any


@flax.struct.dataclass
class Nodes:
    """Where n nodes stand, and what they see of a tree of m: ancestors, and inputs of a short convolution.

    length counts the committed rows that they see, and room those that a whole text takes.
    """

    position: Int[Array, "b n"]
    mask: Bool[Array, "b n m"]
    window: Int[Array, "b n width"] | None
    length: Int[Array, "b"]
    start: Int[Array, ""] | int
    room: int = flax.struct.field(pytree_node=False)


@dataclasses.dataclass(frozen=True)
class Qwen:
    """A Qwen text model as target (or small drafter). `taps` names the layers whose outputs are returned as features.

    Tap i is the hidden state after i layers: 0 is the embedding, num_layers what the final norm takes.

    A gated delta layer's state lags behind: what commit accepts stays pending, as rows, until the next score folds it
    in while it reads the state anyway. `pending_rows` is the room for them; a commit of a longer path folds at once.

    With a `mesh` (`placement.make_mesh`) parameters and states are split over it, and every device runs its part.
    """

    config: QwenConfig
    taps: tuple[int, ...] = ()
    pending_rows: int = 16
    mesh: Mesh | None = dataclasses.field(default=None, kw_only=True)

    @property
    def vocab_size(self) -> int:
        """Number of logits."""
        return self.config.vocab_size

    def init_state(self, params: QwenParams, batch: int, slots: int) -> QwenState:
        """An empty state of `batch` rows, each with room for `slots` tokens.

        A row of text length L needs L slots plus one per node of the widest commit. Layers with a sliding window keep
        fewer, whatever the text's length (`attention.kept_slots`).
        """
        if self.mesh is not None:
            return on_mesh.settled(self, on_mesh.whole(self).init_state(params, batch, slots))
        c, dtype = self.config, params.embedding.dtype

        def layer(x: Array, index: int, leaves: Layer) -> tuple[Array, KeyValues | DeltaState]:
            if isinstance(leaves.mixer, Delta):
                return x, delta_mixer.empty(c, batch, self.pending_rows, dtype)
            return x, gated_attention.empty(c, batch, attention.kept_slots(slots, _window(c, index)), dtype)

        _, empty = layers.run(layer, jnp.zeros(()), params.layers)
        return QwenState(empty, jnp.zeros(batch, jnp.int32), slots)

    def prefill(
        self, params: QwenParams, state: QwenState, tokens: Int[Array, "b p"], count: Int[Array, "b"]
    ) -> tuple[Array | None, QwenState]:
        """Append the first `count` of p tokens to every row; returns features [B, p, taps, hidden] and the state."""
        c, (b, p) = self.config, tokens.shape
        if self.mesh is not None:
            return on_mesh.call(self, Qwen.prefill, params, state, tokens, count, batch=b)
        offset = jnp.broadcast_to(jnp.arange(p), (b, p))
        mask = jnp.broadcast_to(jnp.arange(p) <= jnp.arange(p)[:, None], (b, p, p))
        nodes = Nodes(state.length[:, None] + offset, mask, None, state.length, 0, state.room)

        def layer(x: Array, index: int, leaves: Layer, own: Any) -> tuple[Array, Any]:
            h = rms_norm(x, leaves.mixer_norm, c.rms_norm_eps)
            if isinstance(leaves.mixer, Delta):
                y, out = delta_mixer.read_text(c, leaves.mixer, h, own, count)
            else:
                y, out = _attend(c, leaves.mixer, h, own, nodes, None, index)
            return feed_forward(c, leaves, added(c, x, y, leaves.mixer_after))[0], out

        def keep(old: Any, new: Any) -> Any:
            return _written(state, old, new, offset, count) if isinstance(old, KeyValues) else new

        hidden, new = layers.run(layer, self.embed(params, tokens), params.layers, self._full(state).layers)
        return self._features(hidden), _moved(state, layers.each(keep, state.layers, new), count)

    def score(
        self,
        params: QwenParams,
        state: QwenState,
        tree: Tree,
        staged: QwenStaged | None = None,
        nodes: tuple[Int[Array, ""] | int, int] | None = None,
    ) -> tuple[Output, QwenStaged, QwenState]:
        """Logits of every node of a [B, N] tree, given its ancestors; the state's value does not change.

        The returned state has nothing pending; commit takes it, and not the one that was scored.

        nodes = (start, n) scores only nodes start .. start + n - 1 and extends `staged`, which already holds the nodes
        before `start` (n static; start may be traced); the output then has n rows.
        """
        start, n = (0, tree.tokens.shape[1]) if nodes is None else nodes
        args = (params, state, tree, staged)
        if self.mesh is None:
            output, new, recurrent = self._score(*args, (start, n))
        else:
            shape = {"nodes": (start, n), "batch": tree.tokens.shape[0]}
            output, new, recurrent = on_mesh.score(self, Qwen._score, *args, **shape)

        def settled(own: Any, folded: dict[str, Array | None]) -> Any:
            if isinstance(own, KeyValues) or own.pending is None:
                return own
            assert (recurrent := folded["recurrent"]) is not None
            return DeltaState(recurrent, own.conv, None)

        return output, new, dataclasses.replace(state, layers=layers.zipped(settled, state.layers, recurrent))

    def _score(
        self,
        params: QwenParams,
        state: QwenState,
        tree: Tree,
        staged: QwenStaged | None,
        nodes: tuple[Array | int, int],
    ) -> tuple[Output, QwenStaged, Any]:
        """Output, staged rows, and each layer's recurrent state if pending rows were folded in."""
        c, (start, n) = self.config, nodes
        rows = lambda x: lax.dynamic_slice_in_dim(x, start, n, axis=1)  # noqa: E731
        reach = jax.vmap(trees.ancestors)(tree.parent)
        position = state.length[:, None] + reach.sum(-1, dtype=jnp.int32) - 1
        window = None
        if DELTA in c.layer_types:
            window = rows(jax.vmap(lambda p: delta_conv.windows(p, c.linear_conv_kernel_dim or 1))(tree.parent))
        place = Nodes(rows(position), rows(reach), window, state.length, start, state.room)
        old = layers.zipped(lambda _: None, state.layers) if staged is None else staged.layers
        step = lambda x, index, leaves, own, old: score_layer(c, x, index, leaves, own, old, place)  # noqa: E731
        hidden, outs = layers.run(step, self.embed(params, rows(tree.tokens)), params.layers, state.layers, old)
        output = Output(self.logits(params, hidden[-1]), self._features(hidden))
        folded = layers.zipped(lambda out: {"recurrent": out[1]}, outs)
        return output, QwenStaged(layers.zipped(lambda out: out[0], outs)), folded

    def commit(
        self, state: QwenState, staged: QwenStaged, path: Int[Array, "b m"], length: Int[Array, "b"]
    ) -> QwenState:
        """Move the state forward by the first `length` nodes of `path`.

        Raises ValueError for a state with something pending: that of the last score is the one to commit on.
        """
        if _pending(state):
            raise ValueError("state: got one with accepted rows pending, takes the state that score returned")
        if self.mesh is not None:
            part = lambda own, _, *args: Qwen.commit(own, *args)  # noqa: E731
            return on_mesh.call(self, part, None, state, staged, path, length, batch=length.shape[0])

        def move(own: Any, rows: Any) -> Any:
            if isinstance(own, KeyValues):
                return _written(state, own, rows, path, length)
            return delta_mixer.commit(self.config, own, rows, path, length, self.pending_rows)

        return _moved(state, layers.each(move, state.layers, staged.layers), length)

    def materialize(self, state: QwenState) -> QwenState:
        """The state with everything in its recurrent part, and empty pending rows."""
        pending = _pending(state)
        if self.mesh is not None:
            part = lambda own, _, state: Qwen.materialize(own, state)  # noqa: E731
            return on_mesh.call(self, part, None, state, batch=state.length.shape[0])
        fold = lambda s: delta_mixer.folded(s) if isinstance(s, DeltaState) else s  # noqa: E731
        return self._full(dataclasses.replace(state, layers=layers.each(fold, state.layers)) if pending else state)

    def take(self, state: QwenState, rows: Int[Array, "r"]) -> QwenState:
        """Copies of the given rows."""
        return self._settled(_map_rows(lambda x, axis: jnp.take(x, rows, axis=axis), self._full(state)))

    def insert(self, state: QwenState, rows: Int[Array, "r"], other: QwenState) -> QwenState:
        """The state with its rows `rows` replaced by those of `other`; an index out of range is left out."""
        put = lambda x, y, axis: (  # noqa: E731
            x.at[rows].set(y, mode="drop") if axis == 0 else x.at[:, rows].set(y, mode="drop")
        )
        return self._settled(_map_rows(put, self._full(state), self._full(other)))

    def release(self, state: QwenState, rows: Int[Array, "r"]) -> QwenState:
        """The state with the given rows empty."""
        clear = lambda x, axis: (  # noqa: E731
            x.at[rows].set(0, mode="drop") if axis == 0 else x.at[:, rows].set(0, mode="drop")
        )
        full = self._full(state)
        delta = layers.zipped(lambda s: s if isinstance(s, DeltaState) else None, full.layers)
        cleared = layers.map_rows(clear, delta)
        keep = lambda s, new: new if isinstance(s, DeltaState) else s  # noqa: E731
        length = full.length.at[rows].set(0, mode="drop")
        return self._settled(QwenState(layers.zipped(keep, full.layers, cleared), length, full.room))

    def widen(self, staged: QwenStaged, n: int) -> QwenStaged:
        """Staged rows with room for n nodes, zeros in the new ones."""

        def wider(rows: Any) -> Any:
            if isinstance(rows, StagedDelta):
                return delta_mixer.widen(rows, n)
            pad = lambda x: jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, n - x.shape[-2]), (0, 0)])  # noqa: E731
            return KeyValues(pad(rows.k), pad(rows.v))

        return QwenStaged(layers.zipped(wider, staged.layers))

    def embed(self, params: QwenParams, tokens: Int[Array, "b n"]) -> Float[Array, "b n hidden"]:
        """The tokens' embeddings."""
        return embed(self.config, params, tokens)

    def logits(self, params: QwenParams, hidden: Float[Array, "b n hidden"]) -> Float[Array, "b n vocab"]:
        """The head, with the final norm in front."""
        return head(params, rms_norm(hidden, params.norm, self.config.rms_norm_eps))

    def _features(self, hidden: list[Array]) -> Array | None:
        return jnp.stack([hidden[i] for i in self.taps], axis=2) if self.taps else None

    def _settled(self, state: QwenState) -> QwenState:
        return state if self.mesh is None else on_mesh.settled(self, state)

    def _full(self, state: QwenState) -> QwenState:
        """The state with pending rows, empty ones where there were none."""

        def full(own: Any) -> Any:
            if isinstance(own, KeyValues) or own.pending is not None:
                return own
            batch = own.recurrent.shape[0]
            nothing = delta_mixer.nothing(self.config, batch, self.pending_rows, own.conv.dtype)
            return DeltaState(own.recurrent, own.conv, nothing)

        return dataclasses.replace(state, layers=layers.each(full, state.layers))


def embed(config: QwenConfig, params: QwenParams, tokens: Int[Array, "b n"]) -> Float[Array, "b n hidden"]:
    """The tokens' embeddings, as the first layer takes them."""
    x = params.embedding[:, tokens.reshape(-1)].T.reshape(*tokens.shape, -1)
    return x * jnp.asarray(config.hidden_size**0.5, x.dtype) if config.scaled_embeddings else x


def head(params: QwenParams, normed: Float[Array, "b n hidden"]) -> Float[Array, "b n vocab"]:
    """Logits of hidden states that a final norm has been applied to."""
    b, n, d = normed.shape
    x = normed.reshape(b * n, d)
    y = x @ params.embedding if params.head is None else params.head(x)
    return y.reshape(b, n, -1).astype(jnp.float32)


def score_layer(
    config: QwenConfig, x: Float[Array, "b n hidden"], index: int, leaves: Layer, state: Any, old: Any, nodes: Nodes
) -> tuple[Float[Array, "b n hidden"], tuple[Any, Array | None]]:
    """One layer over the nodes of a tree; returns outputs, and (staged rows, folded recurrent state or None)."""
    h = rms_norm(x, leaves.mixer_norm, config.rms_norm_eps)
    if isinstance(leaves.mixer, Delta):
        assert nodes.window is not None
        y, staged, folded = delta_mixer.score(
            config, leaves.mixer, h, state, nodes.window, nodes.mask, old, nodes.start
        )
    else:
        (y, staged), folded = _attend(config, leaves.mixer, h, state, nodes, old, index), None
    return feed_forward(config, leaves, added(config, x, y, leaves.mixer_after))[0], (staged, folded)


def added(
    config: QwenConfig,
    x: Float[Array, "b n hidden"],
    y: Float[Array, "b n hidden"],
    norm: Float[Array, "hidden"] | OnePlus | None,
) -> Float[Array, "b n hidden"]:
    """x with what half a layer adds to it, y, normed where the model does that."""
    return x + (y if norm is None else rms_norm(y, norm, config.rms_norm_eps))


def feed_forward(
    config: QwenConfig, leaves: Layer, x: Float[Array, "b n hidden"], form: experts.Form | None = None
) -> tuple[Float[Array, "b n hidden"], experts.Routing | None]:
    """The layer's second half: x plus its MLP or experts, and which experts (None: an MLP). form: see `experts.mix`."""
    flat = rms_norm(x, leaves.mlp_norm, config.rms_norm_eps).reshape(-1, x.shape[-1])
    if isinstance(leaves.mlp, Mlp):
        return added(config, x, leaves.mlp(flat).reshape(x.shape), leaves.mlp_after), None
    routing = experts.route(leaves.mlp, flat, config.num_experts_per_tok or 1, config.norm_topk_prob)
    return x + experts.mix(leaves.mlp, flat, routing, form).reshape(x.shape), routing


def stack_layers(config: QwenConfig, params: QwenParams) -> QwenParams:
    """The same parameters with the layers stacked in periods and scanned: compile time does not grow with depth.

    On CPU a scan copies each layer's weights before use, so the tuple is faster there. A model that does not repeat
    stays one long period.
    """
    if not isinstance(params.layers, tuple):
        raise ValueError("params: got stacked layers, takes a tuple of layers")
    return dataclasses.replace(params, layers=layers.stack(params.layers, config.period))


def _attend(
    config: QwenConfig, leaves: Attention, h: Array, cache: KeyValues, nodes: Nodes, old: KeyValues | None, index: int
) -> tuple[Array, KeyValues]:
    place, window = (nodes.length, nodes.position, nodes.mask), _window(config, index)
    return gated_attention.score(config, leaves, h, cache, *place, old, nodes.start, nodes.room, window)


def _window(config: QwenConfig, index: int) -> int | None:
    return config.sliding_window if config.layer_types[index] == WINDOW else None


def _written(state: QwenState, cache: KeyValues, rows: KeyValues, path: Array, count: Array) -> KeyValues:
    write = lambda to, x: attention.commit(to, x, path, state.length, count, state.room)  # noqa: E731
    return KeyValues(write(cache.k, rows.k), write(cache.v, rows.v))


def _moved(state: QwenState, new: Any, count: Array) -> QwenState:
    return QwenState(new, state.length + count, state.room)


def _pending(state: QwenState) -> bool:
    """Whether the state has room for pending rows, hence maybe something in it."""
    parts = jax.tree.leaves(state.layers, is_leaf=lambda x: isinstance(x, DeltaState | KeyValues))
    return any(isinstance(p, DeltaState) and p.pending is not None for p in parts)


def _map_rows(f: Any, state: QwenState, *others: QwenState) -> QwenState:
    """Apply f(leaf, *other leaves, row axis) to every array of the state."""
    rows = layers.map_rows(f, *(s.layers for s in (state, *others)))
    return QwenState(rows, f(state.length, *(o.length for o in others), 0), state.room)
