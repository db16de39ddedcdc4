"""Every block-parallel system end to end on a tiny Llama: greedy and sampled rows have plain decoding's text."""

import dataclasses
import functools

import numpy as np
import pytest

from spec_jax import configs
from spec_jax.drafters.block.ends import ends_of
from spec_jax.engine.engine import Engine
from spec_jax.verify.match import match
from tests.configs.targets import BLOCK, names, narrow, weak
from tests.drafters.block import kit

HEADS = {
    "dflash2": "selector",
    "dspark": "vanilla",
    "domino": "domino",
    "domino_tree": "domino",
    "treeflash": "swiglu",
    "xpress": "jacobi",
    "weaver": "ancestor",
    "lilicorr": "lattice",
    "dels_spec": "local",
    "pctree": "selector",
    "dartree": "gated",
    "dblast": "mixture",
}
NETWORKS = {
    "dspark": {"slots": "shifted", "block_size": 3},
    "domino": {"slots": "shifted", "block_size": 3},
    "dflash2": {"conv_kernel_size": 2, "conv_group_size": 8},
    "jetspec": {"causal": (True,)},
    "dflare": {"per_layer_features": True},
    "carryover": {"rejected": "carryover"},
    "retrace": {"rejected": "retrace"},
}

ALIKE = {
    "domino",  # domino_tree
    *("dart", "dartree", "pctree"),  # weaver, and dspark's and dflash2's heads
    *("cast", "ddtree"),  # jetspec
    *("carryover", "retrace"),  # dflash, and tests/drafters/block/test_carry.py
}


def texts(engine, own=None):
    engine = dataclasses.replace(narrow(engine), max_len=20, prefill_chunk=8)
    return kit.decoded(engine, own, kit.llama(1)[1])


@functools.cache
def plain():
    return np.asarray(texts(Engine(kit.llama(1)[0], 24)).tokens)


@pytest.mark.parametrize("name", names(BLOCK, ALIKE))
def test_text_is_plain_decodings(name):
    target, params = kit.llama(1)
    small = {"block_size": 4, "taps": (0, 1), "layer_types": ("full_attention",), "causal": (False,)}
    network = kit.config(**(small | NETWORKS.get(name, {})))
    head = kit.HEADS[HEADS[name]] if name in HEADS else None
    engine = configs.build(name, target, 24, network=network, head=head)
    own = dataclasses.replace(kit.params(network, engine.drafter.head), ends=ends_of(params))
    assert weak(engine, params, own) == []
    got = texts(engine, own)
    assert int(got.counters.accepted.sum()) > 0 and (got.length == 20).all()
    exact = slice(None) if engine.rule is match else slice(len(kit.PROMPTS))
    np.testing.assert_array_equal(np.asarray(got.tokens)[exact], plain()[exact])


def test_networks_that_a_system_cannot_use_are_refused():
    network = kit.config()
    for name, message in (
        ("dflash2", "conv_kernel_size"),
        ("jetspec", "causal"),
        ("dflare", "per_layer_features"),
        ("retrace", "rejected"),
    ):
        with pytest.raises(ValueError, match=message):
            configs.build(name, kit.llama()[0], 24, network=network)
    with pytest.raises(ValueError, match="network: dflash needs one"):
        configs.build("dflash", kit.llama()[0], 24)
    with pytest.raises(ValueError, match="network: plain uses none"):
        configs.build("plain", kit.llama()[0], 24, network=network)
