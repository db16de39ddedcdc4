"""Sparse experts for training: every row goes through its own experts, none is dropped, few rows are padding."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array


def experts(params: dict[str, Array], x: Array, top_k: int, block: int) -> tuple[Array, Array]:
    """Rows [T, d] through the `top_k` likeliest experts of each and the shared expert; the output and the balance loss.

    Rows are sorted by expert and cut into blocks of one expert each, so that the work is a batched product of at most
    T * top_k / block + E blocks. The balance loss is that of the Switch Transformer (arXiv 2101.03961, equations 4 to
    6): 1 if the experts are used alike.
    """
    count, rows = params["router"].shape[1], x.shape[0] * top_k
    chance = jax.nn.softmax(x @ params["router"])
    weight, chosen = jax.lax.top_k(chance, top_k)
    weight = weight / weight.sum(-1, keepdims=True)
    used = jax.nn.one_hot(chosen, count).sum((0, 1)) / rows
    balance = count * jnp.sum(used * chance.mean(0))

    row_of_slot, slot_of_row, expert_of_block = _blocks(chosen.reshape(rows), count, block)
    pick = jax.nn.one_hot(expert_of_block, count, dtype=x.dtype)
    blocks = _permute(jnp.repeat(x, top_k, axis=0), row_of_slot, slot_of_row).reshape(-1, block, x.shape[1])
    up = jnp.einsum("nbd,ndf->nbf", blocks, _take(pick, params["gate_up"]))
    out = jnp.einsum("nbf,nfd->nbd", _swiglu(up), _take(pick, params["down"]))
    out = _permute(out.reshape(-1, x.shape[1]), slot_of_row, row_of_slot)
    out = jnp.sum(out.reshape(-1, top_k, x.shape[1]) * weight[..., None], 1)
    shared = _swiglu(x @ params["shared_gate_up"]) @ params["shared_down"]
    return out + jax.nn.sigmoid(x @ params["shared_gate"]) * shared, balance


def _blocks(expert: Array, count: int, block: int) -> tuple[Array, Array, Array]:
    """Where rows go: the row of each slot (or one past the last: none), the slot of each row, the expert of a block."""
    rows = expert.shape[0]
    number = min(-(-rows // block) + count, rows + count)
    order = jnp.argsort(expert, stable=True)
    size = jnp.sum(jax.nn.one_hot(expert, count, dtype=jnp.int32), 0)
    end = jnp.cumsum(-(-size // block))  # in blocks
    start = (end - -(-size // block)) * block
    sorted_expert = expert[order]
    slot = start[sorted_expert] + jnp.arange(rows) - (jnp.cumsum(size) - size)[sorted_expert]
    row_of_slot = jnp.full(number * block, rows).at[slot].set(order, unique_indices=True)
    slot_of_row = jnp.zeros(rows, slot.dtype).at[order].set(slot, unique_indices=True)
    return row_of_slot, slot_of_row, jnp.searchsorted(end, jnp.arange(number), side="right").clip(max=count - 1)


@jax.custom_vjp
def _permute(x: Array, source: Array, target: Array) -> Array:
    """x[source], zero where source is past the end; `target` is the inverse, by which the gradient is gathered."""
    return x.at[source].get(mode="fill", fill_value=0)


def _permute_forward(x: Array, source: Array, target: Array) -> tuple[Array, Any]:
    return _permute(x, source, target), target


def _permute_backward(target: Array, g: Array) -> tuple[Array, None, None]:
    return g.at[target].get(mode="fill", fill_value=0), None, None


_permute.defvjp(_permute_forward, _permute_backward)


def _take(pick: Array, weights: Array) -> Array:
    """Each block's matrix; a product with a one-hot matrix, whose gradient is one too."""
    return (pick @ weights.reshape(weights.shape[0], -1)).reshape(-1, *weights.shape[1:])


def _swiglu(x: Array) -> Array:
    gate, up = jnp.split(x, 2, -1)
    return jax.nn.silu(gate) * up
