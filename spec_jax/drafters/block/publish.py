"""The config.json of a block drafter in the forms that its authors and speculators publish."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spec_jax.drafters.block.config import SLIDING, BlockConfig, causal_layers
from spec_jax.drafters.block.heads.gru import Domino
from spec_jax.drafters.block.heads.head import Head, Plain
from spec_jax.drafters.block.heads.jacobi import Jacobi
from spec_jax.drafters.block.heads.markov import Markov
from spec_jax.drafters.block.heads.selector import Selector
from spec_jax.drafters.block.heads.swiglu import SwiGlu
from spec_jax.drafters.files import layer_fields
from spec_jax.models.config import require


def write_config(config: BlockConfig, head: Head, target_layers: int) -> dict[str, Any]:
    """The config.json of a network and head in the form that its authors publish (see `published.read_config`).

    Raises ValueError for one that no published form describes.
    """
    c, fields = config, _layer_fields(config)
    own: dict[str, Any] = {"mask_token_id": c.mask_token, "target_layer_ids": [tap - 1 for tap in c.taps]}
    fields |= {"architectures": ["DFlashDraftModel"], "block_size": c.block_size, "num_target_layers": target_layers}
    if len(set(c.causal)) == 1:
        fields["is_causal"] = c.causal[0]
    else:
        require(c.causal == causal_layers(c.layer_types, None), "causal", c.causal, "all, none, or the sliding layers")
    convolved = c.conv_kernel_size is not None
    require(convolved == isinstance(head, Selector), "conv_kernel_size", c.conv_kernel_size, "a number with a selector")
    require(c.draft_vocab_size is None, "draft_vocab_size", c.draft_vocab_size, "None (see write_speculators)")
    require(not isinstance(head, Jacobi), "head", "Jacobi", "the speculators format")
    require(
        (c.slots == "shifted") == isinstance(head, Markov) or isinstance(head, Domino),
        "slots",
        c.slots,
        "shifted with a Markov head, fill_in with others but Domino's",
    )
    for name, value, neutral in (
        ("input_embedding_scale", c.embedding_scale, 1.0),
        ("output_multiplier", c.output_multiplier, 1.0),
        ("final_logit_softcapping", c.softcap, None),
    ):
        if value != neutral:
            own[name] = value
    if isinstance(head, Selector):
        fields["architectures"] = ["DFlash2DraftModel"]
        own |= {"conv_kernel_size": c.conv_kernel_size, "conv_group_size": c.conv_group_size}
        own |= {"selector_rank": head.rank, "selector_top_k": head.candidates}
        require(head.candidates is not None, "candidates", None, "a number, which the file holds")
    elif isinstance(head, Markov):
        fields |= {"architectures": ["Qwen3DSparkModel"], **own, **_markov_fields(head)}
        own = {}
    elif isinstance(head, Domino):
        own |= {"projector_type": "domino", "emb_dim": head.low, "gru_hidden_dim": head.state}
        own |= {"pure_draft_prefix_len": head.pure, "shift_label": c.slots == "shifted"}
        require(head.scale == 1.0, "scale", head.scale, "1.0, since the file holds none")
    elif isinstance(head, SwiGlu):
        fields |= {"architectures": ["TreeFlashDraftModel"], "treeflash_config": {"ar_approximation": "swiglu"}}
    if all(c.causal):
        own["causal_head"] = True
    return fields | ({"dflash_config": own} if own else {})


def write_speculators(config: BlockConfig, head: Head, target: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json in the speculators format; `target` has name_or_path and architectures."""
    c = config
    kind = {Plain: "dflash", Selector: "dflash2", Markov: "dspark", Jacobi: "xpress"}.get(type(head))
    require(kind is not None, "head", type(head).__name__, "Plain, Selector, Markov or Jacobi")
    bidirectional = not any(c.causal)
    rule = c.causal == causal_layers(c.layer_types, False if bidirectional else None)
    require(rule, "causal", c.causal, "none, or the sliding layers")
    neutral = c.embedding_scale == 1.0 and c.output_multiplier == 1.0 and c.softcap is None
    require(neutral, "softcap, output_multiplier, embedding_scale", c.softcap, "none, since the format holds none")
    fields: dict[str, Any] = {
        "speculators_model_type": kind,
        "speculators_version": "0.9.0",
        "architectures": [{"dflash2": "DFlash2DraftModel"}.get(str(kind), _SPECULATOR.get(str(kind)))],
        "transformer_layer_config": _layer_fields(c),
        "draft_vocab_size": c.logit_size,
        "block_size": c.block_size,
        "aux_hidden_state_layer_ids": list(c.taps),
        "mask_token_id": c.mask_token,
        "sliding_window_non_causal": bidirectional,
        "sample_from_anchor": c.slots == "shifted",
        "speculators_config": {
            "algorithm": kind,
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": c.depth}],
            "default_proposal_method": "greedy",
            "verifier": dict(target),
        },
    }
    if isinstance(head, Selector):
        fields |= {"conv_kernel_size": c.conv_kernel_size, "conv_group_size": c.conv_group_size}
        fields |= {"selector_rank": head.rank, "selector_top_k": head.candidates}
    elif isinstance(head, Markov):
        fields |= _markov_fields(head)
    elif isinstance(head, Jacobi):
        fields |= {"xpress_rank": head.rank, "xpress_mlp_ratio": head.ratio, "num_jacobi_passes": head.passes}
    return fields


_SPECULATOR = {"dflash": "DFlashSpeculator", "dspark": "DSparkSpeculator", "xpress": "XPressSpeculator"}


def _markov_fields(head: Markov) -> dict[str, Any]:
    return {
        "markov_rank": head.rank,
        "markov_head_type": head.kind,
        "enable_confidence_head": head.confidence is not None,
        "confidence_head_with_markov": head.confidence == "markov",
    }


def _layer_fields(c: BlockConfig) -> dict[str, Any]:
    return {
        "model_type": "qwen3",
        **layer_fields(c),
        "attention_bias": False,
        "layer_types": list(c.layer_types),
        "use_sliding_window": SLIDING in c.layer_types,
        "sliding_window": c.sliding_window,
    }
