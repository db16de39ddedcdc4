"""GRPO whose rollouts speculate, beside the same rollouts without: same keys, same tokens, and the time of both.

    rollout_grpo.py                                    # a small transformer learns to add; starts by imitation
    rollout_grpo.py --model small_hybrid               # Python that parses
    rollout_grpo.py --model smollm2 --prompts 4 --batch 2 --group 4 --max-new 24 --rate 1e-5 --steps 6
    rollout_grpo.py --run DIR --steps 40 --resume      # go on with a run
    rollout_grpo.py --plot curves.png --json result.json

Every step prints reward, rollout seconds of both sides, tokens per target pass, and whether the toggle let it draft;
then come both sides' reward curves compared and the toggle's choices, and as the last line one of JSON
(grpo/grpo.schema.json). The run (checkpoints, log.jsonl) is in --run. With --tunix, where google-tunix is installed,
Tunix trains the toy or SmolLM2 too, from the same parameters, with its vanilla rollout and with ours.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import os
import statistics
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parents[1] / ".cache" / "jax"))

import choose  # noqa: E402
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from grpo import policy as policies  # noqa: E402
from grpo import tasks, trainer  # noqa: E402

from benches import intervals, output, schema  # noqa: E402
from spec_jax.audit.replay import Replay, replay  # noqa: E402
from spec_jax.control.throughput import Throughput  # noqa: E402
from spec_jax.drafters.siblings import Siblings  # noqa: E402
from spec_jax.engine.engine import Engine  # noqa: E402
from spec_jax.rollout.engine import RolloutEngine  # noqa: E402
from spec_jax.rollout.records import Rollout  # noqa: E402
from spec_jax.rollout.toggle import Toggle  # noqa: E402
from spec_jax.sampling.settings import Sampling  # noqa: E402
from spec_jax.train import checkpoints, logs, step  # noqa: E402

ROOT = Path(__file__).parents[1]
KEYS = ("model", "seed", "prompts", "batch", "group", "max_new", "temperature", "rate", "warm_up", "always")


def main() -> None:
    """Policy, engines, steps, result."""
    args = _parse()
    model = policies.load(args.model, args.seed)
    task = tasks.TASKS.get(args.model, tasks.chat_sums)(args.prompts, args.seed)
    prompts = [model.encode(p) for p in task.prompts]
    run = _Run(args, model, task, prompts)
    kept = checkpoints.Checkpoints(args.run / "checkpoints", {k: getattr(args, k) for k in KEYS})
    with kept:
        if not args.resume and kept.settings() is not None:
            raise ValueError(f"--run: {args.run} holds a run; go on with it by --resume or name another folder")
        run.begin(kept)
        with logs.Log(args.run, int(run.state.step)) as log:
            while int(run.state.step) < args.steps:
                row = run.step()
                log.write(int(row["step"]), row)
                kept.save(run.saved())
                print(_line(row), flush=True)
    result = run.result(logs.read(args.run))
    print(_summary(result), flush=True)
    result["tunix"] = run.tunix() if args.tunix else None
    if result["tunix"] is not None:
        print(_beside(result["tunix"]), flush=True)
    output.finish(result, schema.load("grpo", Path(__file__).parent / "grpo"), args, _plot)


class _Run:
    """The policy in training, and the engines that roll it out."""

    def __init__(
        self, args: argparse.Namespace, model: policies.Policy, task: tasks.Task, prompts: list[list[int]]
    ) -> None:
        self.args, self.model, self.task, self.prompts = args, model, task, prompts
        self.sampling = Sampling(temperature=args.temperature)
        self.size = -(-(max(map(len, prompts)) + args.max_new) // 16) * 16
        rows = args.batch * args.group
        shared: dict[str, Any] = {
            "key": args.seed,
            "eos": model.eos,
            "pad_id": model.pad,
            "prompts": len(prompts),
            "prefill_rows": args.batch,
        }
        drafter = Siblings(nodes=args.nodes, memory=2048 if args.max_new > 64 else 512)
        widths = tuple(w for w in (1, 4, 8, 16, 32) if w < args.nodes) + (args.nodes,)
        engine = Engine(model.target, self.size, drafter=drafter, controller=Throughput(prior=64.0), widths=widths)
        sizes = sorted({-(-rows // 4), rows})
        toggle = None if args.always else Toggle()
        self.drafting = RolloutEngine(engine, model.params, sizes=sizes, toggle=toggle, **shared)
        plain = Engine(model.target, self.size)
        self.plain = RolloutEngine(plain, model.params, sizes=sizes, **shared) if args.compare else None
        self.optimizer = step.adamw(model.params, weight_decay=0.0)
        loss = trainer.loss(model.target, args.temperature)
        self._update = step.make_step(loss, self.optimizer)
        self.state = step.init(jax.tree.map(jnp.array, model.params), self.optimizer)
        self.begun: Any = None
        self.checked = {"rows": 0, "equal_rows": 0, "near_tie": 0, "different": 0}

    def begin(self, kept: checkpoints.Checkpoints) -> None:
        """Go on with what is kept, or warm up."""
        found = kept.restore(self.saved())
        if found is not None:
            assert isinstance(found, trainer.RunState)
            self.state = step.TrainState(found.step, found.params, found.optimizer)
            self.drafting.restore(found.rollout)
            if self.plain is not None:
                self.plain.calls = self.drafting.calls
        elif self.task.solved and self.args.warm_up:
            self._imitate()
        self.begun = jax.tree.map(jnp.copy, self.state.params) if self.args.tunix else None
        for engine in (self.drafting, self.plain):
            if engine is not None:
                engine.update_params(self.state.params, new=False)
                engine.warm_up(self.prompts[0], self.args.max_new, self.sampling, self.args.batch, self.args.group)

    def saved(self) -> trainer.RunState:
        """Policy, optimizer and rollout state."""
        return trainer.RunState(self.state.step, self.state.params, self.state.optimizer, self.drafting.state())

    def step(self) -> dict[str, float]:
        """One rollout of both engines (or several from one state, for their time), rewards, one update."""
        args, at = self.args, int(self.state.step)
        batches = -(-len(self.prompts) // args.batch)
        some = [(at % batches * args.batch + i) % len(self.prompts) for i in range(args.batch)]
        prompts = [self.prompts[i] for i in some]
        sides = [e for e in (self.drafting, self.plain) if e is not None]
        before = [e.state() for e in sides] if args.repeats > 1 else []
        found: list[list[tuple[Rollout, float]]] = [[] for _ in sides]
        for i in range(args.repeats):
            for side in range(len(sides))[:: 1 if (at + i) % 2 else -1]:  # in turns the first
                if i:
                    sides[side].restore(before[side])
                found[side].append(self._roll(sides[side], prompts))
        rollout, seconds = found[0][-1][0], statistics.median(s for _, s in found[0])
        row: dict[str, float] = {"step": at + 1, "epoch": at // batches + 1}
        if self.plain is not None:
            other, row["plain_seconds"] = found[1][-1][0], statistics.median(s for _, s in found[1])
            self._check(prompts, rollout, other)
            row["plain_reward"] = float(self._rewards(some, other).mean())
        rewards = self._rewards(some, rollout)
        better = trainer.advantages(rewards, args.group)
        repeated = [p for p in prompts for _ in range(args.group)]
        given = (rollout.tokens, rollout.mask, rollout.log_probs, better)
        begin = time.perf_counter()
        self.state, metrics = self._update(self.state, trainer.batch_of(repeated, *given, self.size), args.rate)
        metrics = jax.device_get(metrics)
        rounds = sum(s.rounds for s in rollout.segments)
        drafted = sum(s.rounds for s in rollout.segments if s.drafting)
        return row | {
            "reward": float(rewards.mean()),
            "tokens": int(rollout.mask.sum()),
            "seconds": seconds,
            "acceptance_length": rollout.acceptance_length,
            "drafting": drafted / max(1, rounds),
            "off_policy": float(metrics["off_policy"]),
            "train_seconds": time.perf_counter() - begin,
        }

    def result(self, rows: list[logs.Row]) -> dict[str, Any]:
        """All steps, and what they come to."""
        whole = ("step", "epoch", "tokens")
        rows = [{k: int(v) if k in whole else v for k, v in row.items()} for row in rows]
        epochs = [_epoch([r for r in rows if r["epoch"] == e]) for e in sorted({row["epoch"] for row in rows})]
        ratios = [e["ratio"] for e in epochs if e["ratio"] is not None]
        apart = [abs(row["reward"] - row["plain_reward"]) for row in rows if "plain_reward" in row]
        paired = [row["plain_seconds"] / row["seconds"] for row in rows if "plain_seconds" in row]
        state = self.drafting.carried.toggle
        gains = [] if state is None else np.asarray(state.gain).tolist()
        args = self.args
        return {
            "model": args.model,
            "temperature": args.temperature,
            "prompts": args.prompts,
            "group": args.group,
            "max_new_tokens": args.max_new,
            "repeats": args.repeats,
            "steps": rows,
            "replay": self.checked if self.plain is not None else None,
            "reward_apart": max(apart, default=None),
            "speedup": statistics.median(paired) if paired else None,
            "whole_run": _whole(rows),
            "slowest_epoch": min(ratios) if ratios else None,
            "epochs": epochs,
            "toggle": [{"size": s, "gain": g} for s, g in zip(self.drafting.sizes, gains, strict=False)],
        }

    def tunix(self) -> dict[str, Any]:
        """The same task in Tunix, from the same warm-up, with its rollout and with ours."""
        from grpo import tunix_side

        print("training in Tunix, with its vanilla rollout and with ours", flush=True)
        args, policy = self.args, dataclasses.replace(self.model, params=self.begun)
        sizes = (args.batch, args.group, args.max_new, args.steps)
        return tunix_side.compare(policy, self.task, *sizes, args.rate, args.samples)

    def _roll(self, engine: RolloutEngine, prompts: list[list[int]]) -> tuple[Rollout, float]:
        engine.update_params(self.state.params)
        begin = time.perf_counter()
        rollout = engine.generate(prompts, self.args.max_new, group=self.args.group, sampling=self.sampling)
        return rollout, time.perf_counter() - begin

    def _rewards(self, some: list[int], rollout: Rollout) -> np.ndarray:
        texts = [self.model.decode(t[m]) for t, m in zip(rollout.tokens, rollout.mask, strict=True)]
        return np.array([self.task.reward(some[i // self.args.group], text) for i, text in enumerate(texts)])

    def _check(self, prompts: list[list[int]], one: Rollout, other: Rollout) -> None:
        """Both sides' tokens, row by row; where they differ, each is scored anew."""
        call = self.drafting.calls - 1
        key = jax.random.fold_in(jax.random.key(self.args.seed, impl="threefry2x32"), call)
        found = Replay(0, 0, 0)
        for row in range(len(one.tokens)):
            texts = [x.tokens[row][x.mask[row]].tolist() for x in (one, other)]
            self.checked["rows"] += 1
            self.checked["equal_rows"] += texts[0] == texts[1]
            if texts[0] != texts[1]:
                own = {"key": jax.random.fold_in(key, row), "sampling": self.sampling, "max_len": self.size}
                prompt = prompts[row // self.args.group]
                for text in texts:
                    found += replay(self.model.target, self.state.params, prompt, text, **own)
        self.checked["near_tie"] += found.near_tie
        self.checked["different"] += found.different

    def _imitate(self) -> None:
        """Warm up on solved prompts of another seed."""
        args = self.args
        task = tasks.TASKS[args.model](4096, args.seed + 1)
        asked = [self.model.encode(p) for p in task.prompts]
        solved = [[*self.model.encode(s), *self.model.eos] for s in task.solved]
        mask = np.zeros((len(solved), args.max_new), bool)
        tokens = np.zeros_like(mask, np.int32)
        for i, text in enumerate(solved):
            tokens[i, : len(text)], mask[i, : len(text)] = text[: args.max_new], True
        whole = trainer.batch_of(asked, tokens, mask, np.zeros(mask.shape), np.zeros(len(solved)), self.size)
        update, state, rng = step.make_step(trainer.imitate(self.model.target), self.optimizer), self.state, None
        rng = np.random.default_rng(args.seed)
        for i in range(args.warm_up):
            at = rng.integers(0, len(solved), 64)
            state, metrics = update(state, jax.tree.map(lambda x: x[at], whole), 3e-3 * min(1.0, (i + 1) / 20))  # noqa: B023
            if (i + 1) % 100 == 0:
                print(f"imitation {i + 1}: {float(metrics['loss']):.4f} nats per token", flush=True)
        self.state = step.init(state.params, self.optimizer)


def _epoch(rows: list[logs.Row]) -> dict[str, Any]:
    """An epoch's figures; ratio is plain seconds over seconds, both summed."""
    timed = all("plain_seconds" in r for r in rows)
    return {
        "epoch": rows[0]["epoch"],
        "acceptance_length": statistics.mean(r["acceptance_length"] for r in rows),
        "drafting": statistics.mean(r["drafting"] for r in rows),
        "ratio": sum(r["plain_seconds"] for r in rows) / sum(r["seconds"] for r in rows) if timed else None,
    }


def _whole(rows: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Plain seconds over seconds of all steps, and its interval over steps: an epoch of a few may be noise alone."""
    timed = [(r["plain_seconds"], r["seconds"]) for r in rows if "plain_seconds" in r]
    if not timed:
        return None
    plain, own = zip(*timed, strict=True)
    return {"ratio": intervals.ratio(plain, own)[0], "ci95": intervals.interval(plain, own)}


def _line(row: dict[str, float]) -> str:
    plain = f" (plain {row['plain_seconds']:.2f} s)" if "plain_seconds" in row else ""
    return (
        f"step {row['step']:.0f} epoch {row['epoch']:.0f}: reward {row['reward']:.3f}, "
        f"rollout {row['seconds']:.2f} s{plain}, {row['acceptance_length']:.2f} tokens a pass, "
        f"drafting {row['drafting']:.0%}, update {row['train_seconds']:.2f} s"
    )


def _summary(result: dict[str, Any]) -> str:
    """Both sides' reward curves, times by epoch, and the toggle's choices."""
    lines, apart, checked = [], result["reward_apart"], result["replay"]
    if apart is not None:
        same = "equal" if apart == 0 else f"up to {apart:.3g} apart"
        lines.append(f"reward curves with and without drafts: {same} over {len(result['steps'])} steps")
    if checked is not None:
        found = f"{checked['near_tie']} near ties, {checked['different']} different"
        lines.append(f"rows of this call: {checked['equal_rows']} of {checked['rows']} equal, {found}")
    for row in result["epochs"]:
        times = f", {row['ratio']:.3f} times as fast as plain" if row["ratio"] is not None else ""
        drafting = f"drafting in {row['drafting']:.0%} of rounds"
        lines.append(f"epoch {row['epoch']}: {row['acceptance_length']:.2f} tokens a pass, {drafting}{times}")
    if whole := result["whole_run"]:
        low, high = whole["ci95"] or (whole["ratio"],) * 2
        lines.append(f"all steps: {whole['ratio']:.3f} [{low:.3f}, {high:.3f}] times as fast as plain")
    for row in result["toggle"]:
        brought = f"a round with drafts brought {row['gain']:.2f} times a plain one's tokens for its time"
        lines.append(f"batches of {row['size']}: {brought if row['gain'] else 'drafts not tried yet'}")
    return "\n".join(lines)


def _beside(tunix: dict[str, Any]) -> str:
    """What Tunix's vanilla rollout and ours have in common."""
    law = tunix["law"]
    lines = [f"law of {law['samples']} samples of {law['prompts']} prompts: {'equal' if law['equal'] else 'different'}"]
    for name, f in law["figures"].items():
        means = f"vanilla {f['first']:.4g}, ours {f['second']:.4g}"
        lines.append(f"  {name}: {means}, apart {f['difference']:.2g} +- {f['half_width']:.2g}, p {f['p_value']:.3f}")
    lines.append(f"  texts: p {law['texts_p_value']:.3f}")
    apart = tunix["reward_difference"]
    lines.append(f"reward curves: ours less vanilla's {apart['mean']:.3g} +- {apart['half_width']:.2g}")
    for name in ("vanilla", "ours"):
        own = tunix[name]
        rate = sum(own["tokens"][1:]) / sum(own["seconds"][1:]) if len(own["tokens"]) > 1 else 0.0
        lines.append(
            f"  {name}: reward {own['reward'][0]:.3f} to {own['reward'][-1]:.3f}, {rate:.0f} tokens a second behind "
            f"the first step, ratios up to {max(own['off_policy']):.1e} from one"
        )
    return "\n".join(lines)


def _plot(result: dict[str, Any], figure: Any) -> None:
    axes = figure.subplots(3, 1, sharex=True)
    rows = result["steps"]
    names = (("reward", "plain_reward"), ("seconds", "plain_seconds"), ("acceptance_length",))
    for part, group in zip(axes, names, strict=True):
        for name in group:
            found = [(row["step"], row[name]) for row in rows if name in row]
            if found:
                part.plot(*zip(*found, strict=True), ".-", label=name.replace("_", " "))
        part.legend()
        part.grid(alpha=0.3)
    tunix = result["tunix"] or {}
    for name in [side for side in ("vanilla", "ours") if side in tunix]:
        own = tunix[name]["reward"]
        axes[0].plot(range(1, len(own) + 1), own, ".--", label=f"in Tunix, {name}")
    axes[0].legend()
    axes[-1].set_xlabel("step")
    axes[0].set_title(f"GRPO rollouts, {result['model']}, temperature {result['temperature']}")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="toy", help="toy (default), small_hybrid, smollm2, or a path")
    default = ROOT / ".cache" / "rollout_grpo"
    parser.add_argument("--run", type=Path, default=default, metavar="DIR", help="checkpoints and log (%(default)s)")
    parser.add_argument("--resume", action="store_true", help="go on with the run in --run")
    whole = {"type": int, "metavar": "N"}
    parser.add_argument("--steps", **whole, default=16, help="updates in all (%(default)s)")
    parser.add_argument("--prompts", **whole, default=32, help="different prompts (%(default)s)")
    parser.add_argument("--batch", **whole, default=8, help="prompts a step (%(default)s)")
    parser.add_argument("--group", **whole, default=8, help="samples a prompt (%(default)s)")
    parser.add_argument("--max-new", **whole, default=40, help="most tokens of a sample (%(default)s)")
    parser.add_argument("--nodes", **whole, default=8, help="nodes of a draft tree (%(default)s)")
    parser.add_argument(
        "--repeats", **whole, default=1, help="times that each rollout is timed, in turns; seconds are the median (1)"
    )
    parser.add_argument(
        "--warm-up", **whole, default=300, help="steps of imitation, where a task is solved (%(default)s)"
    )
    parser.add_argument("--temperature", type=float, default=1.0, help="(%(default)s)")
    parser.add_argument("--rate", type=float, default=None, help="learning rate (3e-4 for the toy, else 1e-6)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--tunix", action="store_true", help="train in Tunix too, with its rollout and with ours (needs it; no hybrids)"
    )
    parser.add_argument(
        "--samples", **whole, default=64, help="of each prompt and side, compared in law in Tunix (%(default)s)"
    )
    parser.add_argument("--always", action="store_true", help="draft in every round, whether it pays or not")
    parser.add_argument("--no-compare", dest="compare", action="store_false", help="leave out the plain rollouts")
    output.add_arguments(parser)
    args = parser.parse_args()
    ones = dict.fromkeys(("steps", "prompts", "batch", "max_new", "repeats"), 1)
    for name, low in {**ones, "group": 2, "nodes": 2, "samples": 2, "warm_up": 0}.items():
        if getattr(args, name) < low:
            parser.error(f"--{name.replace('_', '-')}: got {getattr(args, name)}, takes a number from {low} on")
    if args.quick:
        args.steps, args.prompts, args.batch = min(args.steps, 3), min(args.prompts, 2), min(args.batch, 2)
        args.group, args.warm_up, args.max_new = min(args.group, 4), min(args.warm_up, 5), min(args.max_new, 16)
    if args.seed < 0:
        parser.error(f"--seed: got {args.seed}, takes 0 or more")
    if args.rate is not None and not 0 < args.rate < float("inf"):
        parser.error(f"--rate: got {args.rate}, takes a number above 0")
    if args.run.exists() and not args.run.is_dir():
        parser.error(f"--run: got {args.run}, which is a file, takes a folder")
    if args.batch > args.prompts:
        parser.error(f"--batch: got {args.batch}, takes at most --prompts, {args.prompts}")
    if args.tunix and (args.model == "small_hybrid" or importlib.util.find_spec("tunix") is None):
        parser.error("--tunix: takes a model without a hybrid's layers, and google-tunix (pip install 'spec_jax[rl]')")
    if args.rate is None:
        args.rate = 3e-4 if args.model == "toy" else 1e-6
    return args


if __name__ == "__main__":
    choose.run(main)
