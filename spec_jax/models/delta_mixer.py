"""Gated delta layers (arXiv 2412.06464) as Qwen3-Next and Qwen3.5 have them, and their state.

A scored node stages a row of k and one of u in place of a state; what was accepted of them waits as `pending` rows
until the next score folds them in.
"""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.gated_delta import Pending, Staged, chunked, fold, gated_delta, gather
from spec_jax.models import delta_conv
from spec_jax.models.linear import Linear
from spec_jax.models.norms import gated_rms_norm
from spec_jax.models.qwen_config import QwenConfig

_NORM_EPS = 1e-6


@flax.struct.dataclass
class Delta:
    """The leaves. The gates' parameters, a_log and dt_bias, are float32 whatever the model's dtype.

    Channels of qkv and conv stand by key head: its query, its key, the values of its value heads. So a device that has
    some of the key heads has a range of the channels.
    """

    qkv: Linear
    z: Linear
    b: Float[Array, "*l hidden hv"]
    a: Float[Array, "*l hidden hv"]
    conv: Float[Array, "*l width channels"]
    a_log: Float[Array, "*l hv"]
    dt_bias: Float[Array, "*l hv"]
    norm: Float[Array, "*l dv"]
    out: Linear


@flax.struct.dataclass
class DeltaState:
    """The recurrent state (float32), the last conv inputs, and accepted rows that the recurrent state lacks.

    pending is None between score, which folds it, and commit, which sets it.
    """

    recurrent: Float[Array, "*l b hv dk dv"]
    conv: Float[Array, "*l b before channels"]
    pending: Pending | None


@flax.struct.dataclass
class StagedDelta:
    """What scored nodes leave: their factors and their conv inputs."""

    factors: Staged
    conv: Float[Array, "*l b m channels"]


@flax.struct.dataclass
class Rows:
    """A layer's inputs to the delta rule: q, k (with the norms to multiply them by), v, log decay and beta."""

    q: Float[Array, "b n hk dk"]
    k: Float[Array, "b n hk dk"]
    v: Float[Array, "b n hv dv"]
    q_norm: Float[Array, "b n hk"]
    k_norm: Float[Array, "b n hk"]
    decay: Float[Array, "b n hv"]
    beta: Float[Array, "b n hv"]


def empty(config: QwenConfig, batch: int, pending: int, dtype: jnp.dtype) -> DeltaState:
    """The state of no text, with room for `pending` rows."""
    heads, dk, dv = config.linear_num_value_heads or 0, config.linear_key_head_dim or 0, config.linear_value_head_dim
    before = (config.linear_conv_kernel_dim or 1) - 1
    return DeltaState(
        recurrent=jnp.zeros((batch, heads, dk, dv or 0), jnp.float32),
        conv=jnp.zeros((batch, before, config.conv_size), dtype),
        pending=nothing(config, batch, pending, dtype),
    )


def nothing(config: QwenConfig, batch: int, rows: int, dtype: jnp.dtype) -> Pending:
    """Pending rows of which none is accepted."""
    hv, hk = config.linear_num_value_heads or 0, config.linear_num_key_heads or 0
    zeros = lambda *shape: jnp.zeros((batch, *shape), jnp.float32)  # noqa: E731
    k = jnp.zeros((batch, rows, hk, config.linear_key_head_dim or 0), dtype)
    u = zeros(hv, rows, config.linear_value_head_dim or 0)
    return Pending(k, zeros(rows, hk), u, zeros(hv, rows), zeros(hv))


def score(
    config: QwenConfig,
    leaves: Delta,
    x: Float[Array, "b n hidden"],
    state: DeltaState,
    window: Int[Array, "b n width"],
    mask: Bool[Array, "b n m"],
    old: StagedDelta | None,
    start: Int[Array, ""] | int,
) -> tuple[Float[Array, "b n hidden"], StagedDelta, Array | None]:
    """Nodes along their ancestors; returns outputs, staged rows, and the state with `pending` folded in (None: none).

    With `old`, the n nodes are rows start .. start + n - 1 of its m.
    """
    inputs = channels(leaves, x)
    conv = inputs if old is None else _put(old.conv, inputs, start, 1)
    rows = gates(config, leaves, x, delta_conv.along_tree(state.conv, conv, window, leaves.conv))
    seen, n = mask, x.shape[1]
    if old is not None:
        own = lax.dynamic_slice_in_dim(mask, start, n, axis=2)
        at = jnp.arange(mask.shape[2])
        seen = jnp.concatenate([mask & ~((at >= start) & (at < start + n)), own], axis=2)
    result = gated_delta(
        rows.q,
        rows.k,
        rows.v,
        rows.decay,
        rows.beta,
        seen,
        state.recurrent,
        state.pending,
        scale=rows.q.shape[-1] ** -0.5,
        q_norm=rows.q_norm,
        k_norm=rows.k_norm,
        staged=None if old is None else old.factors,
    )
    factors = Staged(rows.k, rows.k_norm, result.u, rows.decay)
    if old is not None:
        f = old.factors
        assert f.k_norm is not None
        factors = Staged(
            _put(f.k, rows.k, start, 1),
            _put(f.k_norm, rows.k_norm, start, 1),
            _put(f.u, result.u, start, 2),
            _put(f.decay, rows.decay, start, 1),
        )
    folded = None if state.pending is None else result.state
    return combine(config, leaves, x, result.output), StagedDelta(factors, conv), folded


def read_text(
    config: QwenConfig,
    leaves: Delta,
    x: Float[Array, "b t hidden"],
    state: DeltaState,
    count: Int[Array, "b"] | None = None,
    differentiable: bool = False,
) -> tuple[Float[Array, "b t hidden"], DeltaState]:
    """Texts behind the state, which moves by the first `count` tokens of each row; nothing is pending afterwards."""
    inputs = channels(leaves, x)
    rows = gates(config, leaves, x, delta_conv.along_text(state.conv, inputs, leaves.conv))
    recurrent = state.recurrent if state.pending is None else fold(state.recurrent, state.pending)
    options = {"scale": rows.q.shape[-1] ** -0.5, "q_norm": rows.q_norm, "k_norm": rows.k_norm}
    arrays = (rows.q, rows.k, rows.v, rows.decay, rows.beta, recurrent, count)
    out, recurrent = chunked(*arrays, **options, implementation="xla" if differentiable else None)
    length = jnp.full(x.shape[0], x.shape[1], jnp.int32) if count is None else count
    pending = None if state.pending is None else jax.tree.map(jnp.zeros_like, state.pending)
    return combine(config, leaves, x, out), DeltaState(recurrent, delta_conv.last(state.conv, inputs, length), pending)


def commit(
    config: QwenConfig,
    state: DeltaState,
    staged: StagedDelta,
    path: Int[Array, "b p"],
    length: Int[Array, "b"],
    room: int,
) -> DeltaState:
    """The first `length` nodes of `path` pending, in `room` rows; a path with more entries is folded in at once."""
    pending, recurrent = gather(staged.factors, path, length), state.recurrent
    if (more := room - path.shape[1]) < 0:
        recurrent = fold(recurrent, pending)
        pending = nothing(config, path.shape[0], room, pending.k.dtype)
    else:
        p = pending
        assert p.k_norm is not None
        k, k_norm, u, weight = (
            _widened(x, axis, more) for x, axis in ((p.k, 1), (p.k_norm, 1), (p.u, 2), (p.weight, 2))
        )
        pending = Pending(k, k_norm, u, weight, p.decay)
    inputs = jnp.take_along_axis(staged.conv, jnp.clip(path, 0, staged.conv.shape[1] - 1)[:, :, None], axis=1)
    return DeltaState(recurrent, delta_conv.last(state.conv, inputs, length), pending)


def folded(state: DeltaState) -> DeltaState:
    """The same state with nothing to fold: pending None."""
    if state.pending is None:
        return state
    return DeltaState(fold(state.recurrent, state.pending), state.conv, None)


def widen(staged: StagedDelta, n: int) -> StagedDelta:
    """Room for n nodes, zeros in the new ones."""
    f, more = staged.factors, n - staged.conv.shape[-2]
    assert f.k_norm is not None
    k, k_norm, u, decay = (_widened(x, a, more) for x, a in ((f.k, -3), (f.k_norm, -2), (f.u, -2), (f.decay, -2)))
    return StagedDelta(Staged(k, k_norm, u, decay), _widened(staged.conv, -2, more))


def channels(leaves: Delta, x: Float[Array, "b n hidden"]) -> Float[Array, "b n channels"]:
    """The convolution's inputs: queries, keys and values."""
    return leaves.qkv(x.reshape(-1, x.shape[-1])).reshape(*x.shape[:2], -1)


def gates(
    config: QwenConfig, leaves: Delta, x: Float[Array, "b n hidden"], mixed: Float[Array, "b n channels"]
) -> Rows:
    """q, k and v of the convolution's outputs, and the gates of the layer's inputs, in float32."""
    b, n, _ = x.shape
    dk, dv = config.linear_key_head_dim or 1, config.linear_value_head_dim or 1
    heads = mixed.reshape(b, n, config.linear_num_key_heads or 1, -1)
    q, k, v = heads[..., :dk], heads[..., dk : 2 * dk], heads[..., 2 * dk :].reshape(b, n, -1, dv)
    beta = jax.nn.sigmoid((x @ leaves.b).astype(jnp.float32))
    decay = -jnp.exp(leaves.a_log) * jax.nn.softplus((x @ leaves.a).astype(jnp.float32) + leaves.dt_bias)
    norm = lambda y: lax.rsqrt(jnp.square(y.astype(jnp.float32)).sum(-1) + _NORM_EPS)  # noqa: E731
    return Rows(q, k, v, norm(q), norm(k), decay, beta)


def combine(
    config: QwenConfig, leaves: Delta, x: Float[Array, "b n hidden"], out: Float[Array, "b n hv dv"]
) -> Float[Array, "b n hidden"]:
    """The heads' outputs, normed and gated, through the output map; x is the layer's input."""
    b, n, hidden = x.shape
    flat = x.reshape(b * n, hidden)
    z = leaves.z(flat).reshape(out.shape)
    y = gated_rms_norm(out.astype(x.dtype), z, leaves.norm, config.rms_norm_eps)
    return leaves.out(y.reshape(b * n, -1)).reshape(b, n, hidden)


def _put(old: Array, new: Array, start: Array | int, axis: int) -> Array:
    return lax.dynamic_update_slice_in_dim(old, new, start, axis=axis)


def _widened(x: Array, axis: int, more: int) -> Array:
    return jnp.pad(x, [(0, more if i == axis % x.ndim else 0) for i in range(x.ndim)])
