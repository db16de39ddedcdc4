"""The multi-token-prediction head of Qwen3-Next and Qwen3.5: one layer that drafts from the target's hidden states.

Its input at a position pairs the context there with the embedding of the next token; its output predicts the token
after that one. The context is the target's hidden state after the final norm, and for further tokens the head's own
output, which is normed as well.
"""

from __future__ import annotations

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from spec_jax import tree as trees
from spec_jax.models import gated_attention
from spec_jax.models.experts import Form
from spec_jax.models.gated_attention import KeyValues
from spec_jax.models.norms import rms_norm
from spec_jax.models.qwen import Mtp, Nodes, QwenParams, head, score_layer
from spec_jax.models.qwen_config import ATTENTION, QwenConfig
from spec_jax.models.qwen_text import text_layer
from spec_jax.tree import Tree


@flax.struct.dataclass
class MtpState:
    """Keys and values of the committed pairs, and how many there were.

    With fewer slots than pairs the rest is a ring (see `commit`), whose slots are in no order; all of them are seen.
    """

    rows: KeyValues
    length: Int[Array, "b"]


@flax.struct.dataclass
class MtpOutput:
    """Logits behind each pair's token, and the context for the next one."""

    logits: Float[Array, "b n vocab"]
    context: Float[Array, "b n hidden"]


def init_state(config: QwenConfig, params: QwenParams, batch: int, slots: int) -> MtpState:
    """No pairs, room for `slots`."""
    rows = gated_attention.empty(config, batch, slots, params.embedding.dtype)
    return MtpState(rows, jnp.zeros(batch, jnp.int32))


def score(
    config: QwenConfig,
    params: QwenParams,
    state: MtpState,
    context: Float[Array, "b n hidden"],
    tree: Tree,
    staged: KeyValues | None = None,
    nodes: tuple[Int[Array, ""] | int, int] | None = None,
) -> tuple[MtpOutput, KeyValues]:
    """Pairs over the committed ones and their ancestors; the state does not change.

    tree: the pairs' tokens as a [B, M] tree, node i's pair standing one position after its parent's. context has a row
    per scored node. nodes and staged are those of `Target.score`.
    """
    start, n = (0, tree.tokens.shape[1]) if nodes is None else nodes
    rows = lambda x: lax.dynamic_slice_in_dim(x, start, n, axis=1)  # noqa: E731
    reach = jax.vmap(trees.ancestors)(tree.parent)
    position = state.length[:, None] + reach.sum(-1, dtype=jnp.int32) - 1
    held = jnp.minimum(state.length, state.rows.k.shape[-2])
    place = Nodes(rows(position), rows(reach), None, held, start)
    own = _head(params)
    x = _pairs(config, params, context, rows(tree.tokens))
    x, (new, _) = score_layer(_one_layer(config), x, 0, own.layer, state.rows, staged, place)
    return _output(config, params, x), new


def commit(
    state: MtpState, staged: KeyValues, path: Int[Array, "b m"], length: Int[Array, "b"], sinks: int = 0
) -> MtpState:
    """The first `length` nodes of `path` behind the committed pairs.

    A state with fewer slots than pairs keeps the first `sinks` of them, and in the other slots the last ones
    (Windowed-MTP). Keys are rotated for their own positions, so the order of slots does not matter.
    """
    slots, offset = state.rows.k.shape[-2], jnp.arange(path.shape[1])
    at, ring = state.length[:, None] + offset, slots - sinks
    end = (state.length + length)[:, None]
    kept = (offset < length[:, None]) & ((at < sinks) | (at >= end - ring))
    slot = jnp.where(at < slots, at, sinks + (at - sinks) % max(ring, 1))
    slot = jnp.where(kept, slot, slots)
    one = lambda to, x, path, slot: to.at[:, slot].set(x[:, path].astype(to.dtype), mode="drop")  # noqa: E731
    write = lambda to, x: jax.vmap(one)(to, x, path, slot)  # noqa: E731
    return MtpState(KeyValues(write(state.rows.k, staged.k), write(state.rows.v, staged.v)), state.length + length)


def insert(state: MtpState, rows: Int[Array, "r"], other: MtpState) -> MtpState:
    """The state with its rows `rows` replaced by those of `other`; an index out of range is left out."""
    return jax.tree.map(lambda x, y: x.at[rows].set(y, mode="drop"), state, other)


def release(state: MtpState, rows: Int[Array, "r"]) -> MtpState:
    """The state with the given rows empty."""
    return dataclasses.replace(state, length=state.length.at[rows].set(0, mode="drop"))


def forward_text(
    config: QwenConfig,
    params: QwenParams,
    context: Float[Array, "b t hidden"],
    tokens: Int[Array, "b t"],
    form: Form = "dense",
) -> tuple[MtpOutput, Float[Array, ""]]:
    """All pairs of whole texts, differentiable: tokens[:, t] is the one that follows context[:, t].

    Returns the output and the load-balancing loss (0 without experts).
    """
    x, balance = text_layer(_one_layer(config), _pairs(config, params, context, tokens), 0, _head(params).layer, form)
    return _output(config, params, x), jnp.zeros(()) if balance is None else balance


def _head(params: QwenParams) -> Mtp:
    if params.mtp is None:
        raise ValueError("params: got a model without an MTP head, takes one with mtp.* tensors")
    return params.mtp


def _one_layer(config: QwenConfig) -> QwenConfig:
    """The head's layer is attention, whatever the model's last one is."""
    return dataclasses.replace(config, layer_types=(ATTENTION,), sparse=config.sparse[-1:])


def _pairs(config: QwenConfig, params: QwenParams, context: Array, tokens: Array) -> Float[Array, "b n hidden"]:
    own, eps = _head(params), config.rms_norm_eps
    embedding = params.embedding[:, tokens.reshape(-1)].T.reshape(context.shape)
    both = [rms_norm(embedding, own.embedding_norm, eps), rms_norm(context, own.hidden_norm, eps)]
    x = jnp.concatenate(both, axis=-1).reshape(-1, 2 * context.shape[-1])
    return own.fc(x).reshape(context.shape)


def _output(config: QwenConfig, params: QwenParams, x: Array) -> MtpOutput:
    context = rms_norm(x, _head(params).norm, config.rms_norm_eps)
    return MtpOutput(head(params, context), context)
