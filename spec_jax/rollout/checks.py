"""What a rollout engine takes: settings, calls, policies and states, checked before anything moves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax.checks import check_size
from spec_jax.engine import devices
from spec_jax.engine.engine import Engine
from spec_jax.engine.requests import check_ids
from spec_jax.rollout.records import Sync
from spec_jax.rollout.toggle import RoundCost, Toggle
from spec_jax.sampling.settings import Sampling
from spec_jax.tree import Tree

ORDERS = ("longest_first", "given")


def check_kind(name: str, value: Any, kind: type, optional: bool = True) -> None:
    """ValueError for a value of another kind; None is one if `optional`."""
    if not isinstance(value, kind) and not (optional and value is None):
        article = "an" if kind.__name__[0] in "AEIOU" else "a"
        raise ValueError(f"{name}: got {value!r}, takes {'None or ' if optional else ''}{article} {kind.__name__}")


def check_settings(
    engine: Engine, sizes: Sequence[int], eos: Any, pad_id: Any, derive: Any, toggle: Any, sync: Any, costs: Any
) -> None:
    """ValueError for settings of another kind, ends that the engine has no room for, or costs of no size."""
    check_kind("toggle", toggle, Toggle)
    check_kind("sync", sync, Sync)
    if derive is not None and not callable(derive):
        raise ValueError(f"derive: got {derive!r}, takes None or a function of the policy")
    if len(check_ids("eos", eos, engine.target.vocab_size)) > engine.max_eos:
        raise ValueError(f"eos: got {len(eos)} tokens, takes at most {engine.max_eos} (Engine.max_eos)")
    if not isinstance(pad_id, int | np.integer) or isinstance(pad_id, bool) or not 0 <= pad_id < 2**31:
        raise ValueError(f"pad_id: got {pad_id!r}, takes an integer in 0 .. 2**31 - 1")
    check_kind("costs", costs, Mapping)
    for size, cost in (costs or {}).items():
        if size not in sizes or not isinstance(cost, RoundCost):
            raise ValueError(f"costs: got {cost!r} for {size!r}, takes a RoundCost for a size in {sizes}")


def check_order(order: Any) -> None:
    """ValueError for an order that is none."""
    if not callable(order) and order not in ORDERS:
        raise ValueError(f"order: got {order!r}, takes {', '.join(map(repr, ORDERS))} or a function (`schedule.Order`)")


def check_lengths(lengths: Any, count: int) -> np.ndarray:
    """What an order says of `count` prompts as an array; ValueError unless it is a number for each."""
    found = np.asarray(lengths)
    if found.shape != (count,) or found.dtype.kind not in "iuf" or np.isnan(found).any():
        raise ValueError(f"order: got the lengths {lengths!r}, takes a number for each of {count} prompts")
    return found.astype(np.float32)


def check_call(max_new_tokens: Any, group: Any, sampling: Any) -> None:
    """ValueError for what no call takes; that it fits the engine is `request`'s to say."""
    check_size("max_new_tokens", max_new_tokens, 0)
    check_size("group", group, 1)
    check_kind("sampling", sampling, Sampling)


def check_prompts(engine: Engine, prompts: Any) -> None:
    """ValueError for what is no sequence of prompts, or holds none, naming the prompt that is not one."""
    if not isinstance(prompts, Sequence | np.ndarray | jax.Array) or isinstance(prompts, str | bytes):
        raise ValueError(f"prompts: got {prompts!r}, takes a sequence of prompts of token ids")
    if len(prompts) == 0:
        raise ValueError("prompts: got none, takes at least one")
    for i, prompt in enumerate(prompts):
        check_ids(f"prompts[{i}]", prompt, engine.target.vocab_size)


def check_numbers(numbers: Any, count: int, group: int) -> np.ndarray:
    """Numbers of `count` prompts as an array, or those from 0 on; ValueError unless they are different ones."""
    if numbers is None:
        return np.arange(count)
    found, most = np.asarray(numbers), (2**31 - 1) // group
    good = found.shape == (count,) and found.dtype.kind in "iu" and len(set(found.tolist())) == count
    if not good or found.min() < 0 or found.max() >= most:
        takes = f"different integers in 0 .. {most - 1}, one for each of {count} prompts"
        raise ValueError(f"numbers: got {numbers!r}, takes {takes}")
    return found.astype(np.int64)


def shapes(tree: Any) -> dict[str, str]:
    """Type and shape of every leaf by its place."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(at): f"{getattr(x, 'dtype', type(x).__name__)}{list(np.shape(x))}" for at, x in leaves}


def check_params(engine: Engine, params: Any) -> None:
    """ValueError for parameters that do not run in the target; shapes alone are looked at, and nothing on a mesh."""
    if devices.mesh_of(engine) is not None:
        return
    target = engine.target

    def logits(params: Any) -> Any:
        one = Tree(jnp.zeros((1, 1), jnp.int32), jnp.full((1, 1), -1), jnp.ones((1, 1), bool))
        return target.score(params, target.init_state(params, 1, engine.slots), one)[0].logits

    why = ""
    try:
        if jax.eval_shape(logits, params).shape[-1] == target.vocab_size:
            return
    except Exception as error:  # whatever a model runs into
        why = f" ({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''})"
    found = ", ".join(f"{at} {shape}".strip() for at, shape in list(shapes(params).items())[:4])
    raise ValueError(f"target_params: got {found}, takes parameters of the engine's {type(target).__name__}{why}")


def check_state(state: Any, own: Mapping[str, Any]) -> Any:
    """Copies of a saved state's arrays in the structure of an engine's own.

    Raises ValueError naming the first leaf that only one of both has, or whose type or shape is another.
    """
    check_kind("state", state, Mapping, optional=False)
    found, wanted = shapes(dict(state)), shapes(own)
    for at in (*wanted, *found):
        if found.get(at) != wanted.get(at):
            raise ValueError(f"state{at}: got {found.get(at, 'nothing')}, takes {wanted.get(at, 'nothing')}")
    leaves = {jax.tree_util.keystr(at): x for at, x in jax.tree_util.tree_flatten_with_path(dict(state))[0]}
    return jax.tree.structure(own).unflatten([jnp.array(leaves[at]) for at in wanted])
