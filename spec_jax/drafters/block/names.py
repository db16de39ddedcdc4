"""What published files call the tensors of a block drafter."""

from __future__ import annotations

from typing import Any

import jax

from spec_jax.drafters.block.config import BlockConfig
from spec_jax.drafters.block.heads.gru import Domino
from spec_jax.drafters.block.heads.head import Head, Plain
from spec_jax.drafters.block.heads.jacobi import Jacobi
from spec_jax.drafters.block.heads.markov import Markov
from spec_jax.drafters.block.heads.selector import Selector
from spec_jax.drafters.block.heads.swiglu import SwiGlu
from spec_jax.drafters.block.network import init_network
from spec_jax.drafters.named import paths

_NETWORK = {"fc.kernel": "fc.weight", "feature_norm": "hidden_norm.weight", "norm": "norm.weight"}
LAYER = {
    "attention_norm": "input_layernorm.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    **{f"{p}.kernel": f"self_attn.{p}_proj.weight" for p in "qkvo"},
    **{f"{p}_norm": f"self_attn.{p}_norm.weight" for p in "qk"},
    **{f"{p}.kernel": f"mlp.{p}_proj.weight" for p in ("gate", "up", "down")},
    **{f"{c}_conv.base": f"{c}_conv.base_kernel" for c in ("attention", "mlp")},
    **{f"{c}_conv.projection.kernel": f"{c}_conv.kernel_projection.weight" for c in ("attention", "mlp")},
}
_HEADS: dict[type, dict[str, str]] = {
    Markov: {
        "previous": "markov_head.markov_w1.weight",
        "bias.kernel": "markov_head.markov_w2.weight",
        "confidence.kernel": "confidence_head.proj.weight",
        "confidence.bias": "confidence_head.proj.bias",
    },
    Domino: {
        "gru.into.kernel": "prefix_gru.weight_ih_l0",
        "gru.across.kernel": "prefix_gru.weight_hh_l0",
        "low.kernel": "embed_proj.0.weight",
        "out.kernel": "embed_proj.2.weight",
    },
    Selector: {
        "predecessor": "candidate_selector.predecessor_codebook",
        "successor": "candidate_selector.successor_codebook",
        "projection.kernel": "candidate_selector.hidden_projection.weight",
    },
    SwiGlu: {
        "norm": "ar_approximation.norm.weight",
        "up_gate.kernel": "ar_approximation.ug.weight",
        "up_gate.bias": "ar_approximation.ug.bias",
        "down.kernel": "ar_approximation.d.weight",
    },
    Jacobi: {
        "tokens": "refiner_head.token_embed.weight",
        "row.kernel": "refiner_head.down_h.weight",
        "mean.kernel": "refiner_head.down_g.weight",
        "joined.kernel": "refiner_head.in_proj.weight",
        "mixer": "refiner_head.mix_l",
        **{f"{p}.kernel": f"refiner_head.mlp_{p}.weight" for p in ("gate", "up", "down")},
        "readout.kernel": "refiner_head.readout.weight",
    },
    Plain: {},
}


def shapes(config: BlockConfig, head: Head) -> tuple[Any, Any]:
    """The network's and the head's parameters as shapes."""
    made = jax.eval_shape(lambda key: (init_network(config, key), head.init(config, key)), jax.random.key(0))
    return made


def published(config: BlockConfig, head: Head) -> tuple[dict[str, str | None], dict[str, str | None]]:
    """The published name of every parameter of the network and of the head, by our path; None: there is none.

    Kernels (paths that end in .kernel) are stored the other way round, [out, in].

    Raises:
        ValueError: for a head or a network of which no published format is known.
    """
    if type(head) not in _HEADS or config.per_layer_features or config.rejected is not None:
        what = "a network with per-layer features" if config.per_layer_features else f"the head {type(head).__name__}"
        what = what if config.rejected is None else f"a network with rejected={config.rejected!r}"
        raise ValueError(f"head: got {what}, of which no published format is known; takes save_native instead")
    network, own = shapes(config, head)
    return {p: _network_name(p) for p in paths(network)}, {p: _head_name(head, p) for p in paths(own)}


def _network_name(path: str) -> str:
    if path in _NETWORK:
        return _NETWORK[path]
    _, index, leaf = path.split(".", 2)
    return f"layers.{index}.{LAYER[leaf]}"


def _head_name(head: Head, path: str) -> str | None:
    if isinstance(head, Markov) and path.startswith("mixer."):
        leaf = {"kernel": "weight", "bias": "bias"}[path.removeprefix("mixer.")]
        return f"markov_head.{'gate' if head.kind == 'gated' else 'joint'}_proj.{leaf}"
    return _HEADS[type(head)].get(path)
