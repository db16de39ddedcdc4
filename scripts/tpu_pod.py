"""Answer files of prompts on one machine or on a pod: prompts split over hosts, the model over each host's devices.

    tpu_pod.py --prompts prompts.jsonl --out answers --model small_hybrid              # one process
    tpu_pod.py --prompts 'data/*.jsonl' --out answers --model DIR --tensor 4           # on each host of a pod
    tpu_pod.py ... --coordinator HOST:PORT --processes 2 --process-id 0                # by hand, anywhere

A line of a prompts file holds id, prompt (a text or token ids) or messages, and maybe max_new_tokens, seed, stop and
sampling settings. Host i writes results-0000i.jsonl and metrics-0000i.jsonl in --out. Killed and started again, it goes
on behind the last finished prompt, and the results are those of a run that was left alone. docs/pods.md says more.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parents[1] / ".cache" / "jax"))

import choose  # noqa: E402
import jax  # noqa: E402
from pod import hosts, model, prompts, results, serve  # noqa: E402

from benches import output, schema  # noqa: E402
from spec_jax.engine.decoder import Result  # noqa: E402
from spec_jax.models.partition import whole_parts  # noqa: E402

# What may differ between hosts.
_OWN = ("out", "json", "coordinator", "process_id", "progress")


def main() -> None:
    """Start, agree, load, serve, report."""
    args = _parse()
    hosts.start(args.coordinator, args.processes, args.process_id)
    group = hosts.all_or_none(lambda: hosts.group(args.tensor, args.expert))
    lines = hosts.all_or_none(lambda: prompts.read(args.prompts))
    options = {f"--{k.replace('_', '-')}": repr(v) for k, v in vars(args).items() if k not in _OWN}
    contents = {"prompts": prompts.digest([(line.id, line.fields) for line in lines])}
    hosts.agree(options | contents | {"devices": str(jax.local_device_count()), "jax": jax.__version__})
    loaded = hosts.all_or_none(lambda: model.load(args, group.mesh))
    hosts.agree({"model": loaded.digest, "drafter": loaded.drafter})
    _note(group, loaded)
    mine = hosts.all_or_none(lambda: _asked(args, group, lines, loaded))
    with contextlib.ExitStack() as stack:
        files = hosts.all_or_none(lambda: _open(args, group, stack))
        done = hosts.all_or_none(lambda: results.finished(args.out, group.host, group.hosts))
        done = {id: made for part in hosts.gather(json.dumps(done).encode()) for id, made in json.loads(part).items()}
        hosts.all_or_none(lambda: _same(args, mine, done))
        totals = _serve(args, group, loaded, mine, done, files)
    own = {"host": group.host, **_totals(totals)} if group.lead else None
    reports = [json.loads(report) for report in hosts.gather(json.dumps(own).encode())]
    if group.host == 0:
        before = sum(line.id in done for line in lines)
        result = _result(args, group, loaded, [r for r in reports if r], len(lines), before)
        output.finish(result, schema.load("pod", Path(__file__).parent / "pod"), args)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", nargs="+", required=True, metavar="FILE", help="JSON lines; globs are taken too")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where results and metrics go")
    choose.add_model_arguments(parser)
    choose.add_sampling_arguments(parser)
    parser.add_argument("--max-new-tokens", type=int, metavar="N", help="budget of a prompt (default: up to --max-len)")
    parser.add_argument("--dtype", choices=sorted(model.DTYPES), default="float32", help="of the weights (float32)")
    parser.add_argument("--batch", type=int, default=8, metavar="N", help="prompts that a group of hosts runs at once")
    parser.add_argument(
        "--tensor", type=int, default=1, metavar="N", help="devices that heads and widths are split over"
    )
    parser.add_argument("--expert", type=int, default=1, metavar="N", help="devices that experts are split over")
    parser.add_argument("--chunk-rounds", type=int, default=16, metavar="N", help="rounds between looks at the results")
    parser.add_argument("--progress", type=float, default=10.0, metavar="SECONDS", help="between progress lines (10)")
    parser.add_argument(
        "--coordinator", metavar="HOST:PORT", help="of process 0; 'auto' asks the cluster (TPU: default)"
    )
    parser.add_argument("--processes", type=int, metavar="N", help="how many there are, beside --coordinator HOST:PORT")
    parser.add_argument("--process-id", type=int, metavar="I", help="this one's number, from 0")
    output.add_json_argument(parser)
    args = parser.parse_args()
    for name in ("batch", "chunk_rounds"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')}: got {getattr(args, name)}, takes at least 1")
    if not 0 <= args.progress < float("inf"):
        raise ValueError(f"--progress: got {args.progress}, takes seconds, 0 or more")
    if args.out.exists() and not args.out.is_dir():
        raise ValueError(f"--out: got {args.out}, which is a file, takes a folder")
    return args


def _note(group: hosts.Group, loaded: model.Loaded) -> None:
    """Say once what the mesh leaves whole on every device."""
    whole = whole_parts(loaded.target.target.config, group.mesh) if group.mesh is not None else ()
    if whole and group.host == 0:
        print(f"whole on every device: {'; '.join(whole)}", file=sys.stderr)


def _asked(
    args: argparse.Namespace, group: hosts.Group, lines: list[prompts.Line], loaded: model.Loaded
) -> list[prompts.Asked]:
    """The requests of this host's group, held against the engine."""
    defaults = prompts.Defaults(
        args.seed, choose.sampling_of(args), args.max_new_tokens, loaded.decoder.engine.max_len, loaded.digest
    )
    own = [line for line in lines if line.index % group.count == group.index]
    asked = prompts.ask(own, loaded.target.tokenizer, defaults)
    prompts.check(asked, loaded.decoder.engine, loaded.target.eos_token_ids)
    return asked


def _same(args: argparse.Namespace, mine: list[prompts.Asked], done: dict[str, str]) -> None:
    for a in mine:
        if done.get(a.id, a.digest) != a.digest:
            raise ValueError(
                f"--out: {args.out} has a result of {a.id!r} ({a.where}) by another prompt, settings or model; "
                "takes a folder of its own for them"
            )


def _open(args: argparse.Namespace, group: hosts.Group, stack: contextlib.ExitStack) -> list[results.Lines]:
    """The files for answers and metrics, if this host writes."""
    paths = [results.path_of(args.out, group.host, kind) for kind in ("results", "metrics")] if group.lead else []
    return [stack.enter_context(results.Lines(path)) for path in paths]


def _serve(
    args: argparse.Namespace, group: hosts.Group, loaded: model.Loaded, mine: list[prompts.Asked],
    done: dict[str, str], files: list[results.Lines],
) -> serve.Totals:  # fmt: skip
    """Serve what is left of this group's prompts; its lead host writes."""
    left = [a for a in mine if a.id not in done]
    if not group.lead:
        return serve.serve(loaded.decoder, left, lambda *_: None, args.chunk_rounds)
    answers, metrics = files

    def write(a: prompts.Asked, result: Result, seconds: float) -> None:
        metrics.append(_metrics(a, result, seconds))
        answers.append(
            {
                "id": a.id,
                "request": a.digest,
                "text": result.text,
                "tokens": result.tokens,
                "finish": result.finish,
                "prompt_tokens": len(a.ids),
            }
        )

    tell = serve.teller(group.host, len(left), len(mine) - len(left), args.progress)
    totals = serve.serve(loaded.decoder, left, write, args.chunk_rounds, tell)
    results.order(answers.path, {a.id: a.index for a in mine})
    return totals


def _metrics(a: prompts.Asked, result: Result, seconds: float) -> dict[str, Any]:
    return {
        "id": a.id,
        "time": time.time(),
        "seconds": seconds,
        "new_tokens": len(result.tokens),
        "target_passes": result.counters["rounds"],
        "acceptance_length": result.acceptance_length,
    }


def _totals(t: serve.Totals) -> dict[str, Any]:
    return {
        "prompts": t.prompts,
        "tokens": t.tokens,
        "target_passes": t.passes,
        "seconds": t.seconds,
        "finish": dict(t.finish),
    }


def _result(
    args: argparse.Namespace, group: hosts.Group, loaded: model.Loaded, reports: list[dict[str, Any]], asked: int,
    before: int,
) -> dict[str, Any]:  # fmt: skip
    tokens, passes = (sum(r[name] for r in reports) for name in ("tokens", "target_passes"))
    seconds = max(r["seconds"] for r in reports)
    finish = sum((Counter(r["finish"]) for r in reports), Counter())
    return {
        "model": args.model,
        "config": loaded.config,
        "hosts": group.hosts,
        "groups": group.count,
        "mesh": dict(group.mesh.shape) if group.mesh is not None else {},
        "prompts": asked,
        "finished_before": before,
        "tokens": tokens,
        "target_passes": passes,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds if tokens else None,
        "acceptance_length": tokens / passes if passes else None,
        "finish": dict(finish),
        "by_host": reports,
    }


if __name__ == "__main__":
    choose.run(main)
