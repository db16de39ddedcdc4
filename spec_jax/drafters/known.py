"""What a drafter's config.json may say beside what its reader reads: no field twice, and nothing that is not built."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from spec_jax.models.fields import object_of, require, require_only

_TRANSFORMERS = {  # what transformers writes of any model, and with which no network is another
    *("architectures", "model_type", "transformers_version", "dtype", "torch_dtype", "auto_map", "_name_or_path"),
    *("name_or_path", "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "tokenizer_class", "prefix"),
    *("tie_word_embeddings", "use_cache", "return_dict", "output_hidden_states", "output_attentions", "torchscript"),
    *("use_bfloat16", "tf_legacy_loss", "pruned_heads", "chunk_size_feed_forward", "is_encoder_decoder", "is_decoder"),
    *("cross_attention_hidden_size", "add_cross_attention", "tie_encoder_decoder", "finetuning_task", "id2label"),
    *("label2id", "problem_type", "task_specific_params", "decoder_start_token_id", "has_no_defaults_at_init"),
    *("max_length", "min_length", "do_sample", "early_stopping", "num_beams", "num_beam_groups", "diversity_penalty"),
    *("temperature", "top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty", "no_repeat_ngram_size"),
    *("encoder_no_repeat_ngram_size", "bad_words_ids", "num_return_sequences", "output_scores"),
    *("return_dict_in_generate", "forced_bos_token_id", "forced_eos_token_id", "remove_invalid_values"),
    *("exponential_decay_length_penalty", "suppress_tokens", "begin_suppress_tokens", "trust_remote_code"),
}
_OFF = {  # settings of other models' layers and logits, and the values with which they do nothing
    **dict.fromkeys(("final_logit_softcapping", "attn_logit_softcapping", "clip_qkv"), (None, 0)),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), (None, 0)),
    **dict.fromkeys(("query_pre_attn_scalar", "attention_multiplier", "q_lora_rank", "kv_lora_rank"), (None,)),
    **dict.fromkeys(("embedding_multiplier", "residual_multiplier", "logits_scaling", "logit_scale"), (None, 1)),
    **dict.fromkeys(("partial_rotary_factor", "input_embedding_scale", "output_multiplier"), (None, 1)),
}

_SETTINGS = ("algorithm", "proposal_methods", "default_proposal_method", "verifier")
_SPECULATOR = {
    *("speculators_model_type", "speculators_version", "speculators_config", "transformer_layer_config"),
    *("draft_vocab_size", "target_hidden_size"),
}


def check_known(fields: Mapping[str, Any], known: Collection[str], where: str = "config.json") -> None:
    """ValueError naming every field that is not known."""
    if unknown := [name for name, value in fields.items() if value is not None and name not in known]:
        taken = ", ".join(sorted({*known} - _TRANSFORMERS))
        raise ValueError(f"{where} has {', '.join(sorted(unknown))}; taken: {taken}")


def check_off(fields: Mapping[str, Any], known: Collection[str]) -> None:
    """ValueError for what is on and not built: a switch that is not known, or what other models do in their layers."""
    require_only(fields, *((name, None, values) for name, values in _OFF.items() if name not in known))
    for name, value in fields.items():
        on = value is True and name not in known and name not in _TRANSFORMERS
        require(not on, name, value, "false: it is not built here")


def check_same(fields: Mapping[str, Any], inside: Mapping[str, Any], where: str) -> None:
    """ValueError for a field that says one thing in an object of a config.json, and another outside."""
    for name, value in inside.items():
        other = fields.get(name)
        same = value == other and isinstance(value, bool) == isinstance(other, bool)
        if not same and value is not None and other is not None:
            raise ValueError(f"{name} is {value!r} in {where} and {other!r} outside; taken: one of them")


def check_speculator(fields: Mapping[str, Any], name: str, known: Collection[str]) -> None:
    """ValueError for a speculators config whose architectures or algorithm are another type's, or of unknown fields.

    name: what the type's architectures begin with, as in DFlashSpeculator; known: the fields of its own.
    """
    kind, names = fields.get("speculators_model_type"), fields.get("architectures")
    taken = [f"{name}Speculator", f"{name}DraftModel"]
    fits = names is None or names in [[one] for one in taken]
    require(fits, "architectures", names, f"{' or '.join(taken)} with speculators_model_type {kind!r}")
    settings = object_of(fields, "speculators_config")
    require_only(settings, ("algorithm", None, (None, kind)))
    check_known(settings, _SETTINGS, "speculators_config")
    check_known(fields, {*_TRANSFORMERS, *_SPECULATOR, *known})
