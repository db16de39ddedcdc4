"""Feed-forward parts of a layer: a gated MLP, and sparse experts with a shared one (Qwen's mixture of experts)."""

from __future__ import annotations

from typing import Literal

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from spec_jax.models.linear import Linear

Form = Literal["dense", "loop", "ragged", "blocks"]

_BLOCK = 128


@flax.struct.dataclass
class Mlp:
    """down(silu(gate x) * up x)."""

    gate: Linear
    up: Linear
    down: Linear

    def __call__(self, x: Float[Array, "rows hidden"]) -> Float[Array, "rows hidden"]:
        """Apply to rows."""
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))


@flax.struct.dataclass
class Experts:
    """A router, experts in one array each for their two maps, and a gated expert that every token goes through."""

    router: Float[Array, "*l hidden experts"]
    gate_up: Float[Array, "*l experts hidden inner2"]
    down: Float[Array, "*l experts inner hidden"]
    shared: Mlp | None = None
    shared_gate: Float[Array, "*l hidden 1"] | None = None


@flax.struct.dataclass
class Routing:
    """Each row's chosen experts and their weights, and the chance of every expert (float32)."""

    index: Int[Array, "rows k"]
    weight: Float[Array, "rows k"]
    chance: Float[Array, "rows experts"]


def route(leaves: Experts, x: Float[Array, "rows hidden"], k: int, normed: bool) -> Routing:
    """The k likeliest experts of each row; `normed` makes their weights sum to one."""
    chance = jax.nn.softmax((x @ leaves.router).astype(jnp.float32), axis=-1)
    weight, index = lax.top_k(chance, k)
    if normed:
        weight = weight / weight.sum(-1, keepdims=True)
    return Routing(index, weight.astype(x.dtype), chance)


def mix(
    leaves: Experts, x: Float[Array, "rows hidden"], routing: Routing, form: Form | None = None
) -> Float[Array, "rows hidden"]:
    """The weighted sum of each row's experts, and the shared expert.

    form: "dense" applies every expert to every row; "loop" reads only the experts that some row chose, one after
    another, and has no reverse gradient; "ragged" sorts rows by expert for a grouped product; "blocks" sorts them too
    and cuts them into blocks of one expert each, for a batched product. None: the loop on CPU, where XLA's grouped
    product reads all experts; ragged elsewhere.
    """
    if form is None:
        form = "loop" if jax.default_backend() == "cpu" else "ragged"
    y = _FORMS[form](leaves, x, routing)
    if leaves.shared is not None and leaves.shared_gate is not None:
        y = y + jax.nn.sigmoid(x @ leaves.shared_gate) * leaves.shared(x)
    return y


def text_form() -> Form:
    """The form for whole texts and their gradients: each row's own experts alone, by what the backend does well."""
    return "blocks" if jax.default_backend() == "cpu" else "ragged"


def balance(routing: Routing) -> Float[Array, ""]:
    """The load-balancing loss (arXiv 2101.03961, equations 4 to 6): 1 for even use of experts, up to experts / k."""
    experts = routing.chance.shape[-1]
    used = jax.nn.one_hot(routing.index, experts).sum(1).mean(0)
    return experts * (used * routing.chance.mean(0)).sum() / routing.index.shape[1]


def _activate(h: Array) -> Array:
    gate, up = jnp.split(h, 2, axis=-1)
    return jax.nn.silu(gate) * up


def _by_expert(routing: Routing, experts: int) -> Float[Array, "rows experts"]:
    rows = jnp.arange(routing.index.shape[0])[:, None]
    return jnp.zeros((rows.shape[0], experts), routing.weight.dtype).at[rows, routing.index].add(routing.weight)


def _dense(leaves: Experts, x: Array, routing: Routing) -> Array:
    weight = _by_expert(routing, leaves.gate_up.shape[0])
    inner = _activate(jnp.einsum("th,ehi->eti", x, leaves.gate_up)) * weight.T[..., None]
    return jnp.einsum("eti,eih->th", inner, leaves.down)


def _loop(leaves: Experts, x: Array, routing: Routing) -> Array:
    experts = leaves.gate_up.shape[0]
    weight = _by_expert(routing, experts)
    chosen = jnp.zeros(experts, bool).at[routing.index.reshape(-1)].set(True)
    order = jnp.argsort(~chosen)

    def add(i: Array, y: Array) -> Array:
        take = lambda w: lax.dynamic_index_in_dim(w, order[i], keepdims=False)  # noqa: E731
        inner = _activate(x @ take(leaves.gate_up)) * lax.dynamic_index_in_dim(weight, order[i], axis=1)
        return y + inner @ take(leaves.down)

    return lax.fori_loop(0, chosen.sum(), add, jnp.zeros_like(x))


def _ragged(leaves: Experts, x: Array, routing: Routing) -> Array:
    k, experts = routing.index.shape[1], leaves.gate_up.shape[0]
    expert = routing.index.reshape(-1)
    order = jnp.argsort(expert)
    sizes = jnp.bincount(expert, length=experts).astype(jnp.int32)
    inner = _activate(lax.ragged_dot(x[order // k], leaves.gate_up, sizes))
    y = lax.ragged_dot(inner, leaves.down, sizes) * routing.weight.reshape(-1)[order, None]
    return jnp.zeros_like(x).at[order // k].add(y)


def _blocks(leaves: Experts, x: Array, routing: Routing) -> Array:
    """Rows in blocks of one expert each; there are at most rows * k / block + experts of them."""
    (rows, k), experts = routing.index.shape, leaves.gate_up.shape[0]
    block = min(_BLOCK, -(-rows * k // experts))
    row_of_slot, slot_of_row, expert_of_block = _places(routing.index.reshape(-1), experts, block)
    pick = jax.nn.one_hot(expert_of_block, experts, dtype=x.dtype)
    own = lambda w: (pick @ w.reshape(experts, -1)).reshape(-1, *w.shape[1:])  # noqa: E731, has a product as gradient
    taken = _permute(jnp.repeat(x, k, axis=0), row_of_slot, slot_of_row).reshape(-1, block, x.shape[1])
    inner = _activate(jnp.einsum("nbh,nhi->nbi", taken, own(leaves.gate_up)))
    y = jnp.einsum("nbi,nih->nbh", inner, own(leaves.down)).reshape(-1, x.shape[1])
    y = _permute(y, slot_of_row, row_of_slot).reshape(rows, k, -1)
    return (y * routing.weight[..., None]).sum(1)


def _places(expert: Int[Array, "rows"], experts: int, block: int) -> tuple[Array, Array, Array]:
    """The row of each slot (or one past the last: none), the slot of each row, the expert of each block."""
    rows = expert.shape[0]
    number = min(-(-rows // block) + experts, rows)
    order = jnp.argsort(expert)
    size = jnp.bincount(expert, length=experts)
    blocks = -(-size // block)
    start = (jnp.cumsum(blocks) - blocks) * block
    ordered = expert[order]
    slot = start[ordered] + jnp.arange(rows) - (jnp.cumsum(size) - size)[ordered]
    row_of_slot = jnp.full(number * block, rows).at[slot].set(order, unique_indices=True)
    slot_of_row = jnp.zeros(rows, slot.dtype).at[order].set(slot, unique_indices=True)
    expert_of_block = jnp.searchsorted(jnp.cumsum(blocks), jnp.arange(number), side="right").clip(max=experts - 1)
    return row_of_slot, slot_of_row, expert_of_block


@jax.custom_vjp
def _permute(x: Array, source: Array, target: Array) -> Array:
    """x[source], zero where source is past the end; by `target`, its inverse, the gradient is a gather as well."""
    return x.at[source].get(mode="fill", fill_value=0)


def _permute_forward(x: Array, source: Array, target: Array) -> tuple[Array, Array]:
    return _permute(x, source, target), target


def _permute_backward(target: Array, g: Array) -> tuple[Array, None, None]:
    return g.at[target].get(mode="fill", fill_value=0), None, None


_permute.defvjp(_permute_forward, _permute_backward)

_FORMS = {"dense": _dense, "loop": _loop, "ragged": _ragged, "blocks": _blocks}
