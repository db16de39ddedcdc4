"""Answer a prompt with speculative decoding, streamed; the text is that of plain decoding for the same seed."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parents[1] / ".cache" / "jax"))

import choose  # noqa: E402
import trace_page  # noqa: E402
from rich.console import Console  # noqa: E402

from benches import prompts  # noqa: E402
from spec_jax.engine import trace  # noqa: E402
from spec_jax.engine.decoder import Decoder, Result  # noqa: E402
from spec_jax.engine.requests import request  # noqa: E402
from spec_jax.models.load import LoadedTarget, load_target  # noqa: E402
from spec_jax.sampling.settings import Sampling  # noqa: E402

_DEMO = 9  # of the code-edit prompts in benches/


def main() -> None:
    """Parse, load, stream, report."""
    args = _parse()
    console = Console(stderr=True, highlight=False)
    prompt = _prompt(args)
    settings = choose.sampling_of(args)
    with console.status(f"loading {args.model}"):
        model = load_target(args.model)
        if model.tokenizer is None:
            raise ValueError(f"--model: {args.model} has no tokenizer, which text needs")
        ids = _encode(args, model, prompt)
        name = choose.config_of(args, "suffix_decoding")
        engine, drafter_params = choose.build(args, model, name)
        request(engine, ids, args.max_new_tokens, args.seed, settings)  # what does not fit is said before the long part
        decoder = choose.decoder(model, engine, drafter_params)
    with console.status("compiling and measuring (the first run of a configuration takes longer)"):
        _warm(decoder, ids)
    quiet = args.json is not None and str(args.json) == "-"
    result, seconds = _stream(decoder, ids, args, settings, not quiet)
    report = _report(name, result, seconds)
    if args.compare:
        with console.status("the same prompt by plain decoding"):
            plain_engine, _ = choose.build(argparse.Namespace(**{**vars(args), "draft_model": None}), model, "plain")
            plain = choose.decoder(model, plain_engine)
            _warm(plain, ids)
            other, plain_seconds = _stream(plain, ids, args, settings, False)
        report["plain"] = _report("plain", other, plain_seconds)
        report["speedup"] = report["tokens_per_second"] / report["plain"]["tokens_per_second"]
        report["same_text"] = result.tokens == other.tokens
    if args.trace is not None:
        with console.status("the same prompt once more, a round at a time"):
            same = _trace(decoder, ids, args, settings, result, report)
        console.print(f"trace: {args.trace}; same text: {'yes' if same else 'NO'}")
    _show(console, report)
    if args.json is not None:
        line = json.dumps({**report, "text": result.text, "tokens": result.tokens})
        print(line) if quiet else Path(args.json).write_text(line + "\n")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("prompt", nargs="?", help="the prompt")
    what.add_argument("--file", type=Path, help="a file that holds the prompt ('-' for standard input)")
    what.add_argument("--demo", action="store_true", help="a code-edit prompt, compared with plain decoding")
    choose.add_model_arguments(parser)
    choose.add_sampling_arguments(parser)
    parser.add_argument(
        "--max-new-tokens", type=int, default=None, metavar="N", help="budget (default: up to --max-len)"
    )
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this text; repeatable")
    parser.add_argument("--raw", action="store_true", help="no chat template: go on from the prompt as it stands")
    parser.add_argument("--compare", action="store_true", help="run plain decoding too and print the ratio")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="write an HTML page that shows every round's draft")
    parser.add_argument("--json", metavar="FILE", help="write the result as JSON ('-': to stdout instead of the text)")
    args = parser.parse_args()
    if args.trace is not None and (args.trace.is_dir() or not args.trace.parent.is_dir()):
        raise ValueError(f"--trace: got {args.trace}, takes a file in a folder that is there")
    args.compare = args.compare or args.demo
    if args.demo and args.max_new_tokens is None:
        args.max_new_tokens = 256
    return args


def _prompt(args: argparse.Namespace) -> str:
    if args.demo:
        return prompts.load("code-edit", _DEMO)[-1].messages[0]["content"]
    if args.file is None:
        return args.prompt
    return sys.stdin.read() if str(args.file) == "-" else args.file.read_text()


def _encode(args: argparse.Namespace, model: LoadedTarget, prompt: str) -> list[int]:
    assert model.tokenizer is not None
    if not prompt:
        raise ValueError("prompt: got an empty text, takes at least one character")
    if args.raw or model.tokenizer.chat_template is None:
        return model.tokenizer.encode(prompt)
    return model.tokenizer.encode(model.tokenizer.apply_chat([{"role": "user", "content": prompt}]), special=False)


def _warm(decoder: Decoder, ids: list[int]) -> None:
    """Compile all programs and measure the cost of a round, so that the run itself is timed alone."""
    decoder.generate([ids], min(2, decoder.engine.max_len - len(ids)))


def _stream(decoder: Decoder, ids: list[int], args: Any, settings: Any, show: bool) -> tuple[Result, float]:
    """The result, and the seconds from the first chunk's start to the end (prefill left out, as for plain decoding)."""
    decoder.submit(ids, args.max_new_tokens, key=args.seed, sampling=settings, stop_strings=args.stop)
    decoder.prefill()
    begin, result = time.perf_counter(), None
    for update in decoder.run(chunk_rounds=4 if show else 64):
        if show:
            print(update.text, end="", flush=True)
        result = update.result or result
    seconds = time.perf_counter() - begin
    if show:
        print(flush=True)
    assert result is not None
    return result, seconds


def _trace(decoder: Decoder, ids: list[int], args: Any, settings: Any, result: Result, report: dict[str, Any]) -> bool:
    """Decode the prompt again, a round at a time and with a fresh state, and write what every round did as a page.

    Returns whether the text was the same.
    """
    assert decoder.tokenizer is not None
    options = {"key": args.seed, "sampling": settings, "eos": decoder.tokenizer.eos_token_ids}
    asked, rounds, tokens = request(decoder.engine, ids, args.max_new_tokens, **options), [], 0
    for r in trace.trace(decoder.engine, decoder.params, asked):
        rounds.append(r)
        tokens += len(r.kept)
        if tokens >= len(result.tokens):
            break
    rounds = trace.cut(rounds, len(result.tokens), result.finish)
    same = tuple(t for r in rounds for t in r.kept) == result.tokens
    asked_for = {k: v for k, v in dataclasses.asdict(settings).items() if v != getattr(Sampling(), k)}
    summary = {
        "config": report["config"],
        "model": args.model,
        "seed": args.seed,
        "sampling": ", ".join(f"{k} {v}" for k, v in asked_for.items()) or "greedy",
        "same text as the run before": "yes" if same else "NO",
        "counters of the run before": result.counters,
        "engine": {f.name: getattr(decoder.engine, f.name) for f in dataclasses.fields(decoder.engine)},
    }
    summary["engine"] = {
        k: v if isinstance(v, int) else getattr(v, "__name__", repr(v)) for k, v in summary["engine"].items()
    }
    page = trace_page.render(
        rounds, trace_page.token_texts(decoder.tokenizer), summary, decoder.tokenizer.decode(ids[-32:])
    )
    args.trace.write_text(page, encoding="utf-8")
    return same


def _report(name: str, result: Result, seconds: float) -> dict[str, Any]:
    return {
        "config": name,
        "finish": result.finish,
        "new_tokens": len(result.tokens),
        "seconds": seconds,
        "tokens_per_second": len(result.tokens) / seconds,
        "target_passes": result.counters["rounds"],
        "acceptance_length": result.acceptance_length,
    }


def _show(console: Console, report: dict[str, Any]) -> None:
    console.print(
        f"[bold]{report['config']}[/bold]: {report['new_tokens']} tokens ({report['finish']}), "
        f"[bold]{report['tokens_per_second']:.1f} tokens/s[/bold], acceptance length "
        f"{report['acceptance_length']:.2f}, {report['target_passes']} target passes"
    )
    if "plain" in report:
        plain = report["plain"]
        console.print(
            f"plain decoding: {plain['tokens_per_second']:.1f} tokens/s, {plain['target_passes']} target passes; "
            f"speed-up [bold]{report['speedup']:.2f}[/bold]; same text: {'yes' if report['same_text'] else 'NO'}"
        )


if __name__ == "__main__":
    choose.run(main)
