"""This engine against transformers on the same prompts in the same run: greedy, and prompt lookup with 10 tokens.

Both sides have the same float32 weights and the same number of threads. Ratios are of tokens per second; the time of a
one-token generation is taken off transformers' for the pair without prefill.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections import defaultdict
from typing import Any

import choose
import numpy as np

from spec_jax.models.load import LoadedTarget, load_target
from spec_jax.sampling.settings import Sampling

from . import output, runs, schema


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand's arguments."""
    choose.add_model_arguments(parser)
    runs.add_arguments(parser)
    output.add_arguments(parser)


def run(args: argparse.Namespace) -> None:
    """Measure and print."""
    runs.quicken(args)
    model = load_target(args.model)
    engine, drafter_params = choose.build(args, model, choose.config_of(args, "suffix_decoding"))
    plain_engine, _ = choose.build(argparse.Namespace(**{**vars(args), "draft_model": None}), model, "plain")
    cases = runs.cases(model, args)
    ours = {"speculative": choose.decoder(model, engine, drafter_params), "plain": choose.decoder(model, plain_engine)}
    for decoder in ours.values():
        runs.warm(decoder, cases[0], Sampling())
    theirs = {"transformers": {}, "prompt_lookup": {"prompt_lookup_num_tokens": 10}}
    peer = _Transformers(model)
    seconds: dict[tuple[str, bool, str], list[float]] = defaultdict(list)
    tokens: dict[tuple[str, str], int] = {}
    for repeat in range(args.repeats):
        for case in cases:
            for name, decoder in ours.items():
                done, without, whole = runs.timed(decoder, case.ids, args.tokens, Sampling(), 0)
                seconds[name, False, case.name].append(without)
                seconds[name, True, case.name].append(whole)
                tokens[name, case.name] = len(done.tokens)
            for name, options in theirs.items():
                count, without, whole = peer.timed(case.ids, args.tokens, options)
                seconds[name, False, case.name].append(without)
                seconds[name, True, case.name].append(whole)
                tokens[name, case.name] = count
        print(f"run {repeat + 1} of {args.repeats} done", file=sys.stderr)

    def rate(name: str, prefill: bool) -> float:
        spent = sum(statistics.median(seconds[name, prefill, c.name]) for c in cases)
        return sum(tokens[name, c.name] for c in cases) / spent

    pairs = {
        "plain_vs_transformers": ("plain", "transformers"),
        "speculative_vs_prompt_lookup": ("speculative", "prompt_lookup"),
    }
    result: dict[str, Any] = {key: rate(a, False) / rate(b, False) for key, (a, b) in pairs.items()}
    result |= {f"{key}_with_prefill": rate(a, True) / rate(b, True) for key, (a, b) in pairs.items()}
    result["tokens_per_second"] = {name: rate(name, False) for name in (*ours, *theirs)}
    output.finish(result, schema.load("peers"), args, _plot)


class _Transformers:
    """transformers' LlamaForCausalLM with our dequantised weights."""

    def __init__(self, model: LoadedTarget) -> None:
        try:
            import torch
            from transformers import LlamaConfig, LlamaForCausalLM
        except ModuleNotFoundError as missing:
            raise ModuleNotFoundError(f"{missing.name} is missing: pip install 'spec_jax[reference]'") from missing
        self._torch, c, p = torch, model.target.config, model.params
        torch.set_num_threads(os.cpu_count() or 1)
        if c.rope.type != "default" or c.attention_bias or c.mlp_bias or p.head is not None:
            raise ValueError("--model: peers takes models with plain RoPE, no biases and a tied head")
        config = LlamaConfig(
            vocab_size=c.vocab_size,
            hidden_size=c.hidden_size,
            intermediate_size=c.intermediate_size,
            num_hidden_layers=c.num_layers,
            num_attention_heads=c.num_heads,
            num_key_value_heads=c.num_kv_heads,
            head_dim=c.head_dim,
            rms_norm_eps=c.rms_norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": c.rope.theta},
            max_position_embeddings=c.max_position_embeddings,
            tie_word_embeddings=True,
        )
        self._model: Any = LlamaForCausalLM(config).eval()
        tensor = lambda x: torch.from_numpy(np.array(x))  # noqa: E731
        weights = {"model.embed_tokens.weight": tensor(p.embedding).T, "model.norm.weight": tensor(p.norm)}
        assert isinstance(p.layers, tuple)
        for i, layer in enumerate(p.layers):
            at = f"model.layers.{i}"
            weights[f"{at}.input_layernorm.weight"] = tensor(layer.attention_norm)
            weights[f"{at}.post_attention_layernorm.weight"] = tensor(layer.mlp_norm)
            for name in ("q", "k", "v", "o"):
                weights[f"{at}.self_attn.{name}_proj.weight"] = tensor(getattr(layer, name).kernel).T
            for name in ("gate", "up", "down"):
                weights[f"{at}.mlp.{name}_proj.weight"] = tensor(getattr(layer, name).kernel).T
        missing = self._model.load_state_dict({k: v.contiguous() for k, v in weights.items()}, strict=False)
        assert missing.missing_keys in ([], ["lm_head.weight"]) and not missing.unexpected_keys, missing
        self._model.tie_weights()
        self._eos = list(model.eos_token_ids)

    def timed(self, ids: tuple[int, ...], tokens: int, options: dict[str, Any]) -> tuple[int, float, float]:
        """Tokens after the first, their seconds, and the seconds of everything; the first token is the prefill's."""
        first = self._generate(ids, 1, {})[1]
        count, whole = self._generate(ids, tokens, options)
        return count, max(whole - first, 1e-9) * count / max(1, count - 1), whole

    def _generate(self, ids: tuple[int, ...], tokens: int, options: dict[str, Any]) -> tuple[int, float]:
        inputs = self._torch.tensor([ids])
        fixed = {"do_sample": False, "eos_token_id": self._eos, "pad_token_id": self._eos[0]}
        with self._torch.inference_mode():
            begin = time.perf_counter()
            out = self._model.generate(
                inputs, attention_mask=self._torch.ones_like(inputs), max_new_tokens=tokens, **fixed, **options
            )
            return out.shape[1] - len(ids), time.perf_counter() - begin


def _plot(result: dict[str, Any], figure: Any) -> None:
    axes = figure.subplots()
    rates = result["tokens_per_second"]
    axes.bar_label(axes.bar(list(rates), list(rates.values())), [f"{v:.1f}" for v in rates.values()])
    axes.set_ylabel("tokens/s, prefill left out")
