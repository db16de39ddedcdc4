"""Feed-forward parts of a layer: a gated MLP, and sparse experts with a shared one (Qwen's mixture of experts)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.platform import platform
from spec_jax.models.linear import Linear

Form = Literal["dense", "loop", "ragged", "blocks"]

_BLOCK = 128


@flax.struct.dataclass
class Mlp:
    """down(silu(gate x) * up x), or with the tanh form of gelu in place of silu."""

    gate: Linear
    up: Linear
    down: Linear
    gelu: bool = flax.struct.field(pytree_node=False, default=False)

    def __call__(self, x: Float[Array, "rows hidden"]) -> Float[Array, "rows hidden"]:
        """Apply to rows."""
        act = jax.nn.gelu if self.gelu else jax.nn.silu
        return self.down(act(self.gate(x)) * self.up(x))


@dataclasses.dataclass(frozen=True)
class Part:
    """What of the experts a device has: mesh axes over which their number and their inner width are split (None: not).

    rows: the devices along `number` hold rows of their own, which come together for the experts.
    """

    number: str | None
    inner: str | None
    rows: bool


@flax.struct.dataclass
class Experts:
    """A router, the experts' maps in one array each, and a gated expert that every token goes through.

    They may be in another dtype than the rows, which each product converts them to.
    part: these are a device's part of them (inside a shard_map), None where they are whole.
    """

    router: Float[Array, "*l hidden experts"]
    gate: Float[Array, "*l own hidden inner"]
    up: Float[Array, "*l own hidden inner"]
    down: Float[Array, "*l own inner hidden"]
    shared: Mlp | None = None
    shared_gate: Float[Array, "*l hidden 1"] | None = None
    part: Part | None = flax.struct.field(pytree_node=False, default=None)


@flax.struct.dataclass
class Routing:
    """Each row's chosen experts and their weights, and the chance of every expert (float32)."""

    index: Int[Array, "rows k"]
    weight: Float[Array, "rows k"]
    chance: Float[Array, "rows experts"]


def route(leaves: Experts, x: Float[Array, "rows hidden"], k: int, normed: bool) -> Routing:
    """The k likeliest experts of each row; `normed` makes their weights sum to one."""
    chance = jax.nn.softmax((x @ leaves.router.astype(x.dtype)).astype(jnp.float32), axis=-1)
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
        form = "loop" if platform() == "cpu" else "ragged"
    if leaves.part is not None:
        return _mix_part(leaves, leaves.part, x, routing, form)
    y = _FORMS[form](leaves, x, routing)
    return y if leaves.shared is None else y + _shared(leaves, x)


def text_form() -> Form:
    """The form for whole texts and their gradients: each row's own experts alone, by what the backend does well."""
    return "blocks" if platform() == "cpu" else "ragged"


def balance(routing: Routing) -> Float[Array, ""]:
    """The load-balancing loss (arXiv 2101.03961, equations 4 to 6): 1 for even use of experts, up to experts / k."""
    experts = routing.chance.shape[-1]
    used = jax.nn.one_hot(routing.index, experts).sum(1).mean(0)
    return experts * (used * routing.chance.mean(0)).sum() / routing.index.shape[1]


def _shared(leaves: Experts, x: Array) -> Array:
    assert leaves.shared is not None and leaves.shared_gate is not None
    return jax.nn.sigmoid(x @ leaves.shared_gate) * leaves.shared(x)


def _mix_part(leaves: Experts, part: Part, x: Array, routing: Routing, form: Form) -> Array:
    """The whole mix: every device its own experts, or its part of their width, for all rows, and one sum."""
    rows, index, weight = x, routing.index, routing.weight
    spread = part.number is not None and part.rows
    if spread:
        rows, index, weight = (lax.all_gather(a, part.number, tiled=True) for a in (x, index, weight))
    if part.number is not None:
        own = leaves.gate.shape[0]
        index = index - lax.axis_index(part.number) * own
        mine = (index >= 0) & (index < own)
        index, weight = jnp.where(mine, index, own), jnp.where(mine, weight, 0)
    own_form = _ragged_turns if form == "ragged" and part.number is not None else _FORMS[form]
    y = own_form(leaves, rows, Routing(index, weight, routing.chance))
    if spread:
        y = lax.psum_scatter(y, part.number, tiled=True)
    axes = tuple(axis for axis in (None if spread else part.number, part.inner) if axis is not None)
    shared = None if leaves.shared is None else _shared(leaves, x)
    if shared is not None and part.inner is not None:
        first = True if spread or part.number is None else lax.axis_index(part.number) == 0
        y, shared = y + jnp.where(first, shared, 0), None
    y = lax.psum(y, axes) if axes else y
    return y if shared is None else y + shared


def _inner(x: Array, gate: Array, up: Array, product: Callable[[Array, Array], Array]) -> Array:
    return jax.nn.silu(product(x, gate)) * product(x, up)


def _by_expert(routing: Routing, experts: int) -> Float[Array, "rows experts"]:
    rows = jnp.arange(routing.index.shape[0])[:, None]
    none = jnp.zeros((rows.shape[0], experts), routing.weight.dtype)
    return none.at[rows, routing.index].add(routing.weight, mode="drop")


def _dense(leaves: Experts, x: Array, routing: Routing) -> Array:
    weight = _by_expert(routing, leaves.gate.shape[0])
    product = lambda x, w: jnp.einsum("th,ehi->eti", x, w.astype(x.dtype))  # noqa: E731
    inner = _inner(x, leaves.gate, leaves.up, product) * weight.T[..., None]
    return jnp.einsum("eti,eih->th", inner, leaves.down.astype(x.dtype))


def _loop(leaves: Experts, x: Array, routing: Routing) -> Array:
    experts = leaves.gate.shape[0]
    weight = _by_expert(routing, experts)
    chosen = jnp.zeros(experts, bool).at[routing.index.reshape(-1)].set(True, mode="drop")
    order = jnp.argsort(~chosen)

    def add(i: Array, y: Array) -> Array:
        take = lambda w: lax.dynamic_index_in_dim(w, order[i], keepdims=False).astype(x.dtype)  # noqa: E731
        inner = _inner(x, take(leaves.gate), take(leaves.up), jnp.matmul)
        return y + (inner * lax.dynamic_index_in_dim(weight, order[i], axis=1)) @ take(leaves.down)

    return lax.fori_loop(0, chosen.sum(), add, jnp.zeros_like(x))


def _ragged(leaves: Experts, x: Array, routing: Routing) -> Array:
    (rows, k), experts = routing.index.shape, leaves.gate.shape[0]
    expert = routing.index.reshape(-1)
    order = jnp.argsort(expert)[: rows * min(k, experts)]  # a row's experts differ, so that no more are here
    sizes = jnp.bincount(expert, length=experts).astype(jnp.int32)
    product = lambda x, w: lax.ragged_dot(x, w.astype(x.dtype), sizes)  # noqa: E731
    y = product(_inner(x[order // k], leaves.gate, leaves.up, product), leaves.down)
    y = jnp.where(expert[order, None] < experts, y * routing.weight.reshape(-1)[order, None], 0)
    return jnp.zeros_like(x).at[order // k].add(y)


def _ragged_turns(leaves: Experts, x: Array, routing: Routing) -> Array:
    """`_ragged` where most choices are experts of other devices (past the last index): memory follows the own ones.

    A turn takes up to twice an even share of the choices. Where more fall to this device it takes more turns, so that
    none is dropped. There is no reverse gradient.
    """
    (rows, k), experts = routing.index.shape, leaves.gate.shape[0]
    share = -(-2 * rows * k * experts // routing.chance.shape[1])
    size = min(max(share, _BLOCK), rows * min(k, experts))
    expert = routing.index.reshape(-1)
    ends = jnp.cumsum(jnp.bincount(expert, length=experts)).astype(jnp.int32)
    order = jnp.pad(jnp.argsort(expert), (0, size), constant_values=rows * k)

    def turn(carry: tuple[Array, Array]) -> tuple[Array, Array]:
        start, y = carry
        inside = jnp.clip(ends - start, 0, size)
        sizes, mine = jnp.diff(inside, prepend=0), jnp.arange(size) < inside[-1]
        choice = jnp.where(mine, lax.dynamic_slice_in_dim(order, start, size), 0)
        product = lambda x, w: lax.ragged_dot(x, w.astype(x.dtype), sizes)  # noqa: E731
        out = product(_inner(x[choice // k], leaves.gate, leaves.up, product), leaves.down)
        out = jnp.where(mine[:, None], out * routing.weight.reshape(-1)[choice, None], 0)
        return start + size, y.at[choice // k].add(out)

    return lax.while_loop(lambda carry: carry[0] < ends[-1], turn, (jnp.int32(0), jnp.zeros_like(x)))[1]


def _blocks(leaves: Experts, x: Array, routing: Routing) -> Array:
    """Rows in blocks of one expert each; there are at most rows * k / block + experts of them."""
    (rows, k), experts = routing.index.shape, leaves.gate.shape[0]
    block = min(_BLOCK, -(-rows * k // experts))
    chosen = jnp.minimum(routing.index, experts - 1).reshape(-1)
    row_of_slot, slot_of_row, expert_of_block = _places(chosen, experts, block)
    pick = jax.nn.one_hot(expert_of_block, experts, dtype=x.dtype)
    flat = lambda w: w.astype(x.dtype).reshape(experts, -1)  # noqa: E731
    own = lambda w: (pick @ flat(w)).reshape(-1, *w.shape[1:])  # noqa: E731, has a product as gradient
    taken = _permute(jnp.repeat(x, k, axis=0), row_of_slot, slot_of_row).reshape(-1, block, x.shape[1])
    product = lambda x, w: jnp.einsum("nbh,nhi->nbi", x, own(w))  # noqa: E731
    y = product(_inner(taken, leaves.gate, leaves.up, product), leaves.down).reshape(-1, x.shape[1])
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
