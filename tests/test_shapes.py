"""The checker that the whole suite runs under: what it must catch, and what it must let through."""

from typing import Protocol

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Float, Int, TypeCheckError, jaxtyped

from tests.shapes import check


@jaxtyped(typechecker=check)
@flax.struct.dataclass
class Pair:
    tokens: Int[Array, "*b n"]
    scores: Float[Array, "*b n"] | None = None
    name: str = flax.struct.field(pytree_node=False, default="pair")


@jaxtyped(typechecker=check)
def weighted(pair: Pair, weight: float) -> Float[Array, "n"]:
    return pair.scores * weight


class Named(Protocol):
    def title(self) -> str: ...


@jaxtyped(typechecker=check)
def named(thing: Named | None) -> str:
    return "" if thing is None else thing.title()


def pair(n=3):
    return Pair(jnp.arange(n), jnp.ones(n))


def test_a_wrong_result_shape_is_caught():
    batch = jax.tree.map(lambda x: x[None], pair())
    with pytest.raises(TypeCheckError, match="return value"):
        weighted(batch, 1.0)


def test_a_wrong_argument_is_caught():
    with pytest.raises(TypeCheckError, match="weight"):
        weighted(pair(), "1.0")


def test_a_constructor_called_by_us_is_checked():
    with pytest.raises(TypeCheckError, match="scores"):
        Pair(jnp.arange(3), jnp.ones(4))
    with pytest.raises(TypeCheckError, match="scores"):
        jax.jit(lambda p: p.replace(scores=jnp.ones(4)))(pair())


def test_numpy_in_place_of_a_jax_array_is_caught():
    with pytest.raises(TypeCheckError, match="scores"):
        Pair(jnp.arange(3), np.ones(3, np.float32))


def test_what_lacks_a_protocol_s_members_is_caught():
    assert named(None) == ""
    with pytest.raises(TypeCheckError, match="thing"):
        named(pair())


@pytest.mark.parametrize(
    "use",
    [
        lambda p: jax.tree.map(lambda leaf: True, p),
        lambda p: jax.tree.map(lambda leaf: leaf[None, :2], p),
        lambda p: jax.eval_shape(lambda q: q, p),
        lambda p: jax.grad(lambda q: q.scores.sum(), allow_int=True)(p),
        lambda p: jax.vmap(weighted, in_axes=(Pair(0, 0), None))(jax.tree.map(lambda x: x[None], p), 2.0),
        lambda p: Pair(jax.sharding.PartitionSpec("data"), None),
        lambda p: Pair(jax.ShapeDtypeStruct((3,), jnp.int32)),
        lambda p: jax.lax.while_loop(lambda q: q.scores.sum() < 9, lambda q: q.replace(scores=q.scores + 1), p),
        lambda p: weighted(p, 2),
    ],
)
def test_what_jax_does_to_a_tree_is_let_through(use):
    use(pair())
