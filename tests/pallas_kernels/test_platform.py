"""Choices follow the platform that is compiled for, inside the block and nowhere else."""

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.platform import compiling_for, platform
from pallas_kernels.tree_attention import tree_attention
from spec_jax.models import experts


def kernels():
    """The Pallas calls in a traced tree attention of shapes that the TPU's kernel serves."""
    array = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)  # noqa: E731
    cache, tree, count = array(1, 1, 256, 128), array(1, 1, 16, 128), jax.ShapeDtypeStruct((1,), jnp.int32)
    mask = jax.ShapeDtypeStruct((1, 16, 16), jnp.bool_)
    call = lambda *x: tree_attention(*x, 1.0)  # noqa: E731
    return str(jax.make_jaxpr(call)(array(1, 16, 2, 128), cache, cache, count, tree, tree, mask)).count("pallas_call")


def test_a_tpus_choices_are_made_inside_the_block_only():
    own = jax.default_backend()
    with compiling_for("tpu"):
        assert platform() == "tpu" and experts.text_form() == "ragged" and kernels() == 1
        with compiling_for("cpu"):
            assert platform() == "cpu" and kernels() == 0
        assert platform() == "tpu"
    assert platform() == own


def test_an_error_ends_the_block():
    with pytest.raises(KeyError), compiling_for("tpu"):
        raise KeyError
    assert platform() == jax.default_backend()
