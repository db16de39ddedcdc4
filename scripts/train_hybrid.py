"""Train the small hybrid, a Qwen3-Next of a few million parameters, on the sources of Python's standard library.

    train_hybrid.py --steps 8000 --decay-steps 1600             # a run that comes out the same each time
    train_hybrid.py --stop-at 23:58 --decay 20                  # by the clock: the rate falls in the last 20 minutes
    train_hybrid.py --resume --steps 16000 --decay-steps 3000   # go on with a run; another one's settings are refused
    train_hybrid.py --resume --export-only                      # write what the last checkpoint holds

The run (checkpoints, log.jsonl, TensorBoard events) is in --run; weights, card and plot go to --out when it ends.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import os
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parents[1] / ".cache" / "jax"))

import choose  # noqa: E402
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import tokenizers  # noqa: E402
from hybrid import card, corpus, export, objective, shape, vocabulary  # noqa: E402

from spec_jax.models.load import load_target  # noqa: E402
from spec_jax.models.qwen import Qwen, QwenParams  # noqa: E402
from spec_jax.models.qwen_config import QwenConfig  # noqa: E402
from spec_jax.models.qwen_text import init_params  # noqa: E402
from spec_jax.train import checkpoints, data, fit, logs, schedule, step  # noqa: E402
from spec_jax.train.progress import Progress  # noqa: E402

ROOT = Path(__file__).parents[1]
FIGURES = ("loss", "mtp_1", "mtp_2", "gradient", "rate", "held_out_loss", "mtp_1_agrees", "mtp_2_agrees")
LONG = 4  # times the training context: text that long is measured too
MEMORY = (10.0, 1000.0)  # tokens
CURVES = {
    "loss": "next token",
    "mtp_1": "MTP, step 1",
    "mtp_2": "MTP, step 2",
    "held_out_loss": "held out (a part), next token",
}


def main() -> None:
    """Corpus, run, export."""
    args = _parse()
    if args.resume != any(args.run.glob("checkpoints/*")):
        other = (
            "no checkpoint to go on from" if args.resume else "a run; go on with it by --resume or name another folder"
        )
        raise ValueError(f"--{'resume' if args.resume else 'run'}: {args.run} holds {other}")
    config, begin = _weights(args.weights) if args.weights else (args.config, None)
    train, held_out = corpus.split(corpus.stdlib_sources(args.tests))
    train, held_out = (part[: args.files] for part in (train, held_out))
    tokenizer = _tokenizer(args, train)
    config = dataclasses.replace(config, vocab_size=tokenizer.get_vocab_size())
    eos = vocabulary.eos_id(tokenizer)
    tokens, unseen = (
        data.pack([e.ids for e in tokenizer.encode_batch([s.text for s in part])], eos) for part in (train, held_out)
    )
    length, overlap = objective.lengths(args.context)
    bytes_per_token = sum(len(source.text.encode()) for source in held_out) / len(unseen)
    windows = data.whole(unseen, length, overlap, args.batch)
    long = data.whole(unseen, *objective.lengths(LONG * args.context), 1)

    def measure(params: Any, batches: np.ndarray = windows[: args.measure_batches]) -> dict[str, float]:
        return objective.measure(config, params, batches, bytes_per_token)

    settings = {
        "config": dataclasses.asdict(config),
        "corpus": corpus.fingerprint(train),
        "vocabulary": tokenizer.to_str(),
        "batch": args.batch,
        "context": args.context,
        "seed": args.seed,
    }
    with checkpoints.Checkpoints(args.run / "checkpoints", settings) as kept:
        if begin is None:
            begin = init_params(config, jax.random.key(args.seed), scale=None, memory=MEMORY)
        optimizer = step.adamw(begin, b2=0.99)
        state = step.init(jax.tree.map(jnp.asarray, begin), optimizer)
        state = kept.restore(state) or state
        print(
            f"{_count(state.params):,} parameters, {len(train)} files, {len(tokens):,} tokens, "
            f"{len(unseen):,} held out; step {int(state.step)}",
            flush=True,
        )
        if not args.export_only:
            state = _train(
                args,
                config,
                state,
                optimizer,
                data.windows(tokens, length, args.context, args.batch, args.seed),
                kept,
                measure,
            )
            if args.schedule(int(state.step)) is not None:
                print(f"stopped at step {int(state.step)}; --resume goes on, --resume --export-only writes the weights")
                return
    args.out.mkdir(parents=True, exist_ok=True)
    export.save(args.out, state.params, config, tokenizer, np.float16)
    written = load_target(args.out, transposed=False).params
    figures = measure(written, windows) | {"long_loss": measure(written, long)["held_out_loss"]}
    rows = logs.read(args.run)
    logs.plot(rows, args.out / "loss.png", CURVES, "small hybrid")
    seen = int(state.step) * args.batch * args.context
    facts = card.Facts(
        config,
        train,
        held_out,
        tokens=len(tokens),
        held_out_tokens=len(unseen),
        context=args.context,
        seen=seen,
        steps=int(state.step),
        figures=figures,
        tests=args.tests,
        parameters=_count(state.params),
        mtp_parameters=_count(state.params.mtp),
        command=f"python scripts/train_hybrid.py --steps {int(state.step)} {' '.join(_not_default(args))}".rstrip(),
    )
    (args.out / "README.md").write_text(card.render(facts), encoding="utf-8")
    print(f"{args.out}: " + ", ".join(f"{name} {value:.4f}" for name, value in figures.items()))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cache, out = ROOT / ".cache" / "small_hybrid", ROOT / "spec_jax" / "models" / "small_hybrid"
    parser.add_argument("--run", type=Path, default=cache, metavar="DIR", help="checkpoints and logs (%(default)s)")
    parser.add_argument("--out", type=Path, default=out, metavar="DIR", help="weights and card (%(default)s)")
    parser.add_argument("--resume", action="store_true", help="go on with the run in --run")
    parser.add_argument("--export-only", action="store_true", help="train no further")
    parser.add_argument("--weights", type=Path, metavar="DIR", help="begin with the weights of an earlier --out")
    ends = parser.add_mutually_exclusive_group()
    ends.add_argument("--steps", type=int, default=10000, help="steps in all (%(default)s)")
    ends.add_argument("--stop-at", metavar="HH:MM", help="train until then instead")
    parser.add_argument("--decay-steps", type=int, metavar="N", help="the rate falls over the last N (half of --steps)")
    parser.add_argument("--decay", type=float, default=20.0, metavar="MINUTES", help="with --stop-at (%(default)s)")
    parser.add_argument("--rate", type=float, default=3e-3, help="learning rate at its peak (%(default)s)")
    parser.add_argument("--warmup", type=int, default=100, metavar="N", help="steps (%(default)s)")
    parser.add_argument("--batch", type=int, default=2, metavar="ROWS")
    parser.add_argument("--context", type=int, default=512, metavar="TOKENS")
    parser.add_argument("--mtp-rows", type=int, default=1, metavar="ROWS", help="of the batch, for the MTP head")
    parser.add_argument("--vocabulary", type=int, default=4096, metavar="TOKENS")
    parser.add_argument("--size", action="append", default=[], metavar="NAME=N", help="as in config.json; repeatable")
    parser.add_argument("--tests", action="store_true", help="train on the library's test suite too (twice the text)")
    parser.add_argument("--files", type=int, metavar="N", help="use the first N files only (a trial)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log-every", type=int, default=1, metavar="STEPS")
    parser.add_argument("--save-every", type=float, default=5.0, metavar="MINUTES")
    parser.add_argument(
        "--measure-every", type=int, default=500, metavar="STEPS", help="on held-out text (%(default)s)"
    )
    parser.add_argument(
        "--measure-batches", type=int, default=8, metavar="N", help="of it (%(default)s; all at the end)"
    )
    return parser


def _parse() -> argparse.Namespace:
    args = _parser().parse_args()
    args.config, args.schedule = shape.config(args.size), _schedule(args)
    if args.context <= objective.MTP_STEPS:
        raise ValueError(f"--context: got {args.context}, takes more than the MTP head's {objective.MTP_STEPS} steps")
    for name in ("batch", "log_every", "measure_batches"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')}: got {getattr(args, name)}, takes 1 or more")
    if args.weights and args.size:
        raise ValueError(f"--size: got {args.size[0]}, takes nothing with --weights, which has its own sizes")
    if args.export_only and not args.resume:
        raise ValueError("--export-only: got no --resume, takes a run to export")
    return args


def _count(params: Any) -> int:
    return sum(x.size for x in jax.tree.leaves(params))


def _not_default(args: argparse.Namespace) -> list[str]:
    """The options that make the run what it is, as given."""
    parser, found = _parser(), []
    for name in ("rate", "warmup", "batch", "context", "mtp_rows", "vocabulary", "seed"):
        if getattr(args, name) != parser.get_default(name):
            found.append(f"--{name.replace('_', '-')} {getattr(args, name)}")
    return found + [f"--size {entry}" for entry in args.size] + ["--tests"] * args.tests


def _weights(directory: Path) -> tuple[QwenConfig, QwenParams]:
    """A model to begin with."""
    model = load_target(directory, stacked=False, transposed=False)
    if not isinstance(model.target, Qwen) or not isinstance(model.params, QwenParams) or model.params.mtp is None:
        raise ValueError(f"--weights: got a {type(model.target).__name__}, takes a Qwen model with an MTP head")
    return model.target.config, model.params


def _tokenizer(args: argparse.Namespace, train: list[corpus.Source]) -> tokenizers.Tokenizer:
    """That of the run or of --weights, or a new one, kept with the run."""
    path = args.run / "tokenizer.json"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        if args.weights:
            if not (args.weights / path.name).is_file():
                raise FileNotFoundError(f"--weights: {args.weights} holds no {path.name}")
            tokenizers.Tokenizer.from_file(str(args.weights / path.name)).save(str(path))
        else:
            vocabulary.build((source.text for source in train), args.vocabulary).save(str(path))
    return tokenizers.Tokenizer.from_file(str(path))


def _train(
    args: argparse.Namespace,
    config: QwenConfig,
    state: step.TrainState,
    optimizer: Any,
    batches: Any,
    kept: Any,
    measure: Any,
) -> step.TrainState:
    loss = objective.make_loss(config, objective.Weights(mtp_rows=args.mtp_rows))
    shown = Progress(
        None if args.stop_at else args.steps, FIGURES, args.batch * args.context, always=("held_out_loss",)
    )
    with logs.Log(args.run, int(state.step)) as log, shown as progress:
        return fit.fit(
            state,
            step.make_step(loss, optimizer),
            batches,
            args.schedule,
            log,
            kept,
            log_every=args.log_every,
            save_every=60 * args.save_every,
            measure_every=args.measure_every,
            measure=measure,
            report=progress.report,
        )


def _schedule(args: argparse.Namespace) -> schedule.Schedule:
    if not args.stop_at:
        decay = args.steps // 2 if args.decay_steps is None else args.decay_steps
        return schedule.BySteps(args.rate, args.warmup, args.steps, decay)
    try:
        at = datetime.datetime.strptime(args.stop_at, "%H:%M")
    except ValueError as wrong:
        raise ValueError(f"--stop-at: got {args.stop_at!r}, takes a time of day such as 23:58") from wrong
    now = datetime.datetime.now()
    stop = now.replace(hour=at.hour, minute=at.minute, second=0, microsecond=0)
    stop += datetime.timedelta(days=stop <= now)
    return schedule.ByClock(args.rate, args.warmup, time.mktime(stop.timetuple()), 60 * args.decay)


if __name__ == "__main__":
    choose.run(main)
