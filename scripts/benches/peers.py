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

from spec_jax.models.load import LoadedTarget, load_target
from spec_jax.sampling.settings import Sampling

from . import output, runs, schema
from .reference import to_transformers


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
    engine = runs.fewer_widths(engine, args)
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
        for decoder in ours.values():
            decoder.forget()
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
        self._model = to_transformers(model)
        import torch

        self._torch = torch
        torch.set_num_threads(os.cpu_count() or 1)
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
