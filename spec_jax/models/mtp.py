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
from spec_jax.models import attention, gated_attention
from spec_jax.models.experts import Form
from spec_jax.models.gated_attention import Attention, KeyValues
from spec_jax.models.norms import rms_norm
from spec_jax.models.qwen import Mtp, Nodes, QwenParams, embed, head, score_layer
from spec_jax.models.qwen_config import ATTENTION, QwenConfig
from spec_jax.models.qwen_text import second_half
from spec_jax.models.text_attention import attend_text
from spec_jax.tree import Tree


@flax.struct.dataclass
class MtpState:
    """Keys and values of the committed pairs, and how many there were.

    With fewer slots than the `room` that a whole text takes they are a ring (see `commit`); all its slots are seen.
    """

    rows: KeyValues
    length: Int[Array, "b"]
    room: int = flax.struct.field(pytree_node=False)


@flax.struct.dataclass
class MtpOutput:
    """Logits behind each pair's token, and the context for the next one."""

    logits: Float[Array, "b n vocab"]
    context: Float[Array, "b n hidden"]


def init_state(config: QwenConfig, params: QwenParams, batch: int, room: int, slots: int | None = None) -> MtpState:
    """No pairs, with room for `room` of them, or for a ring of `slots`."""
    slots = room if slots is None else min(room, slots)
    rows = gated_attention.empty(config, batch, slots, params.embedding.dtype)
    return MtpState(rows, jnp.zeros(batch, jnp.int32), room)


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
    place = Nodes(rows(position), rows(reach), None, held, start, state.room)
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
    write = lambda to, x: attention.commit_ring(to, x, path, state.length, length, sinks)  # noqa: E731
    rows = KeyValues(write(state.rows.k, staged.k), write(state.rows.v, staged.v))
    return MtpState(rows, state.length + length, state.room)


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
    form: Form | None = None,
) -> tuple[MtpOutput, Float[Array, ""]]:
    """All pairs of whole texts, differentiable: tokens[:, t] is the one that follows context[:, t].

    Returns the output and the load-balancing loss (0 without experts).
    """
    (output,), balance = forward_steps(config, params, context, tokens, 1, form)
    return output, balance


def forward_steps(
    config: QwenConfig,
    params: QwenParams,
    context: Float[Array, "b t hidden"],
    tokens: Int[Array, "b more"],
    steps: int,
    form: Form | None = None,
) -> tuple[list[MtpOutput], Float[Array, ""]]:
    """The head `steps` times over whole texts, differentiable, as it drafts with true tokens (arXiv 2509.18362).

    tokens: t + steps - 1 of them, tokens[:, t] the one that follows context[:, t]. Step s pairs token t + s - 1 with
    the output of the step before (the context for the first); it sees the pairs of step 1 up to t, and at t the
    later steps' and its own. Returns each step's output, whose logits at t are those of token t + s, and the mean
    load-balancing loss (0 without experts).

    Raises ValueError for tokens of another length.
    """
    t = context.shape[1]
    if steps < 1 or tokens.shape[1] != t + steps - 1:
        raise ValueError(f"tokens: got {tokens.shape[1]}, takes {t} + steps - 1 with steps, here {steps}, from 1")
    own, outputs, losses, passes = _head(params).layer, [], [], []
    assert isinstance(own.mixer, Attention)
    for s in range(steps):
        x = _pairs(config, params, context, tokens[:, s : s + t])
        y, rows = attend_text(config, own.mixer, rms_norm(x, own.mixer_norm, config.rms_norm_eps), passes=passes)
        x, loss = second_half(config, own, x + y, form)
        passes.append(rows)
        outputs.append(_output(config, params, x))
        losses += [] if loss is None else [loss]
        context = outputs[-1].context
    return outputs, jnp.stack(losses).mean() if losses else jnp.zeros(())


def _head(params: QwenParams) -> Mtp:
    if params.mtp is None:
        raise ValueError("params: got a model without an MTP head, takes one with mtp.* tensors")
    return params.mtp


def _one_layer(config: QwenConfig) -> QwenConfig:
    """The head's layer is attention, whatever the model's last one is."""
    return dataclasses.replace(config, layer_types=(ATTENTION,), sparse=config.sparse[-1:])


def _pairs(config: QwenConfig, params: QwenParams, context: Array, tokens: Array) -> Float[Array, "b n hidden"]:
    own, eps = _head(params), config.rms_norm_eps
    both = [rms_norm(embed(config, params, tokens), own.embedding_norm, eps), rms_norm(context, own.hidden_norm, eps)]
    x = jnp.concatenate(both, axis=-1).reshape(-1, 2 * context.shape[-1])
    return own.fc(x).reshape(context.shape)


def _output(config: QwenConfig, params: QwenParams, x: Array) -> MtpOutput:
    context = rms_norm(x, _head(params).norm, config.rms_norm_eps)
    return MtpOutput(head(params, context), context)
