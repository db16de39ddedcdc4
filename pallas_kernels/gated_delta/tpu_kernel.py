"""What one program of the TPU kernel computes: some heads of one sequence.

With B = diag(beta), T = (I + L B)^-1, R = V - diag(e^G) K S: u = B T R, and outputs are diag(e^G) Q S + (P B T) R,
where L and P are the products of keys with keys and of queries with keys, times the decay between the nodes. All but R
is known without the state, so that only one step of products waits for it.
"""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
from jax import lax

from pallas_kernels.gated_delta import tpu_passes as passes

COLUMNS = ("decay", "beta", "k_norm", "q_scale", "broken")
_STATES = 8  # heads whose states are in flight; with more, more is spilled than is hidden
_HUGE = 2.0**127


def kernel(*refs: Any, plan: Any, depth: int, delta: bool, terms: int) -> None:
    """The kernel of `tpu.Plan`; terms: bfloat16 arrays that a float32 one is taken as."""
    ancestors_ref, levels_ref, apart_ref, columns_ref, lanes_ref, q_ref, k_ref, v_ref, state_ref, *more = refs
    pending = more[:3] if plan.pending else []
    out_ref, u_ref, *new_state = more[len(pending) :]
    n, each, packs = plan.nodes, plan.heads * plan.group, plan.packs
    dk, dv = state_ref.shape[-2:]
    key = lambda h: h // plan.group  # noqa: E731
    split = functools.partial(passes.split, terms=terms)
    product = functools.partial(passes.product, terms=terms)

    number = {name: columns_ref[0, 0, i * n : (i + 1) * n] for i, name in enumerate(COLUMNS)}
    column = lambda x, h: x[:, h : h + 1]  # noqa: E731
    slot = lax.div(lax.broadcasted_iota(jnp.int32, (n, plan.pack * n), 1), jnp.int32(n))
    ancestors, levels, not_of = ancestors_ref[0], levels_ref[0], apart_ref[0] != 0
    eye = jnp.where(_eye(levels.shape), 1.0, 0.0)
    # Decay since the state: ancestors are exact in bfloat16, and a decay is as the sum of three.
    since = jnp.exp(passes.dot(ancestors, jnp.concatenate(passes.split(number["decay"], 3))))
    on_keys, on_queries = since * number["k_norm"], since * number["q_scale"] + number["broken"]
    on_u = number["beta"] + number["broken"]

    def beside(x, heads):  # a column per head of the pack, each over its head's lanes
        out = column(x, heads[0])
        for t, h in enumerate(heads[1:], 1):
            out = jnp.where(slot == t, column(x, h), out)
        return out

    def apart(x):  # a pack's matrices from beside each other to the diagonal, so that one product serves them all
        return jnp.concatenate([jnp.where(slot == t, x, 0.0) for t in range(plan.pack)]) if plan.pack > 1 else x

    @functools.cache
    def keys(i):
        return split(k_ref[0, :, i * dk : (i + 1) * dk])

    @functools.cache
    def asked(i):
        rows = split(q_ref[0, :, i * dk : (i + 1) * dk])
        return [jnp.concatenate(z) for z in zip(rows, keys(i), strict=True)] if delta else rows

    @functools.cache
    def pending_keys(i):
        # 0 times NaN is NaN, so that rows of weight 0 must be finite; with a weight, what is huge still overflows.
        rows = pending[1][0, :, i * dk : (i + 1) * dk]
        finite = rows.astype(jnp.float32)
        finite = jnp.where(jnp.abs(finite) <= _HUGE, finite, _HUGE)
        return [finite] if rows.dtype == jnp.bfloat16 else split(finite)

    reads, inverses, seen = {}, {}, {}

    def on_state(h):
        """The state with the pending rows in it, and what queries and keys read there."""
        state = state_ref[0, h].astype(jnp.float32)
        if pending:
            weight_ref, _, pending_u_ref = pending
            weight = weight_ref[0, 0, : plan.pending, h : h + 1]
            u = split(jnp.where(weight != 0, weight * pending_u_ref[0, h].astype(jnp.float32), 0.0))
            pairs = [(x, y) for i, x in enumerate(pending_keys(key(h))) for j, y in enumerate(u) if i + j < terms]
            left, right = (jnp.concatenate(x) for x in zip(*pairs, strict=True))
            added = passes.dot(left, right, 0, 0)
            yield
            state = weight_ref[0, 0, plan.pending :, h : h + 1] * state + added
            new_state[0][0, h] = state.astype(state_ref.dtype)
            yield
        rounded = [state.astype(jnp.bfloat16).astype(jnp.float32)]
        seen[h] = product(asked(key(h)), rounded if state_ref.dtype == jnp.bfloat16 else split(state))

    def among_nodes(p):
        """A pack's P B T and T, or its P if there is no delta rule."""
        heads = packs[p]
        path = jnp.where(not_of, beside(number["decay"], heads), 0.0)
        path = passes.dot(ancestors, jnp.concatenate(passes.split(path, 3)))
        yield
        used = sorted({key(h) for h in heads})  # all their rows with all keys of the pack; each head's own are kept
        left = [jnp.concatenate(x) for x in zip(*(asked(i) for i in used), strict=True)]
        right = [jnp.concatenate(x) for x in zip(*(keys(key(h)) for h in heads), strict=True)]
        every = product(left, right, across=1)
        yield
        size, dots = every.shape[0] // len(used), every
        for at, i in enumerate(used):
            first = next(t for t, h in enumerate(heads) if key(h) == i)
            scales = [column(number[name], i * plan.group) for name in ("q_scale", "k_norm")[: 1 + delta]]
            mine = every[at * size : (at + 1) * size] * jnp.concatenate(scales)
            lane = lax.broadcasted_iota(jnp.int32, mine.shape, 1)
            dots = mine if at == 0 else jnp.where(lane >= first * n, mine, dots)
        between = jnp.where(levels >= -1, jnp.exp(path), 0.0) * lanes_ref[0, 0, p : p + 1]
        if not delta:
            reads[p] = [apart(x) for x in split(dots * between)]
            return
        between *= lanes_ref[0, 0, len(packs) + p : len(packs) + p + 1]
        read, lower = dots[:n] * between, jnp.where(levels >= 0, dots[n:] * between, 0.0)
        inverse = yield from _invert(lower, levels, eye, depth, apart, 1 if terms == 2 else terms)
        yield
        if terms > 2:
            read = product(split(read), [apart(x) for x in split(inverse)])
        else:  # one Newton step from a T in bfloat16: T + T (I - (I + L B) T)
            inverse = split(inverse)[0]
            spread = apart(inverse)
            rest = eye - inverse - passes.total(passes.dot(x, spread) for x in split(lower))
            read = passes.total(passes.dot(x, spread) for x in split(read))
            yield
            rest = [apart(x) for x in split(rest)]
            inverse += product([inverse], rest)
            read += product(split(read), rest)
        yield
        reads[p], inverses[p] = ([apart(x) for x in split(y)] for y in (read, inverse))

    def results(p):
        """A pack's outputs and u."""
        heads = packs[p]
        values = [v_ref[0, :, h * dv : (h + 1) * dv] for h in heads]
        if delta:
            right = [v - column(on_keys, h) * seen[h][n:] for v, h in zip(values, heads, strict=True)]
            right = split(jnp.concatenate(right))
            yield
            out, u = product(reads[p], right), product(inverses[p], right)
        else:
            right = [jnp.concatenate(x) for x in zip(*map(split, values), strict=True)]
            out, u = product(reads[p], right), jnp.concatenate(values).astype(jnp.float32)
        yield
        for t, h in enumerate(heads):
            mine = slice(t * n, (t + 1) * n)
            u_ref[0, h] = column(on_u, h) * u[mine] if delta else u[mine] + column(number["broken"], h)
            output = column(on_queries, h) * seen[h][:n] + out[mine]
            out_ref[0, :, h * dv : (h + 1) * dv] = output.astype(out_ref.dtype)

    for first in range(0, each, _STATES):
        _interleave([on_state(h) for h in range(first, min(first + _STATES, each))])
    _interleave([among_nodes(p) for p in range(len(packs))])
    _interleave([results(p) for p in range(len(packs))])


def _interleave(lines):
    """Generators step by step in turn: the scheduler looks no further than the products that stand side by side."""
    while lines:
        lines = [x for x in lines if next(x, x) is None]


def _invert(lower, levels, eye, depth, apart, terms):
    """The inverse of I + `lower` by bisection of depths, as `reference.invert` does it, a pack's matrices at a time."""
    inverse = eye if depth == 1 else eye - jnp.where(levels == 0, lower, 0.0)
    for level in range(1, (depth - 1).bit_length()):
        factors, part = passes.split(inverse, terms), jnp.where(levels == level, lower, 0.0)
        yield
        step = passes.product(factors, [apart(x) for x in passes.split(part, terms)], terms)
        yield
        inverse -= passes.product(passes.split(step, terms), [apart(x) for x in factors], terms)
    return inverse


def _eye(shape):
    row, lane = (lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
    return row == lax.rem(lane, jnp.int32(shape[0]))
