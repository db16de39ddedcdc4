"""Train a drafter for a target on the target's own answers, from here or from there.

    train_drafter.py --config scripts/drafting/recipes/dflash_smollm2.toml --run .cache/dflash   # all of it
    train_drafter.py --config ... --run ... --texts-only       # the answers alone; called again, it goes on
    train_drafter.py --config ... --run ... --resume           # go on; settings that make it another run are refused

The run (checkpoints, log.jsonl, TensorBoard events) is in --run, answers in --texts, which several runs can share.
When training ends, weights (for load_drafter), a card and plots go to --out.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import hashlib
import json
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parents[1] / ".cache" / "jax"))

import choose  # noqa: E402
import jax  # noqa: E402
import numpy as np  # noqa: E402
from drafting import asks, card  # noqa: E402
from drafting.plan import Plan  # noqa: E402

from spec_jax.engine.decoder import Decoder  # noqa: E402
from spec_jax.engine.engine import Engine  # noqa: E402
from spec_jax.models.load import LoadedTarget, load_target  # noqa: E402
from spec_jax.sampling.settings import Sampling  # noqa: E402
from spec_jax.train import block, features, logs, mesh  # noqa: E402
from spec_jax.train import step as steps  # noqa: E402
from spec_jax.train.checkpoints import Checkpoints  # noqa: E402
from spec_jax.train.confidence import calibrated  # noqa: E402
from spec_jax.train.evaluate import Evaluation  # noqa: E402
from spec_jax.train.fit import fit  # noqa: E402
from spec_jax.train.loader import Feed, windows  # noqa: E402
from spec_jax.train.progress import Progress  # noqa: E402
from spec_jax.train.recipe import Data, Recipe  # noqa: E402
from spec_jax.train.responses import regenerate  # noqa: E402
from spec_jax.train.store import Store, Text, counted  # noqa: E402

SHOWN = ("loss", "right_1", "in_a_row", "gradient", "acceptance_length")


def main() -> None:
    """Answers, run, weights."""
    args = _parse()
    recipe, model = Recipe.load(args.config), load_target(args.target)
    plan = Plan.of(recipe, model, args.config.parent, args.devices)
    texts = _texts(args, recipe, model)
    if not args.texts_only:
        _train(args, recipe, model, plan, texts)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True, metavar="FILE", help="the recipe (see train/recipe.py)")
    parser.add_argument("--target", default="smollm2", help="smollm2 (default), a .gguf file or a model directory")
    parser.add_argument("--run", type=Path, required=True, metavar="DIR", help="checkpoints and logs")
    parser.add_argument("--texts", type=Path, metavar="DIR", help="the target's answers (texts in --run)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="weights and plots (out in --run)")
    parser.add_argument("--texts-only", action="store_true", help="write answers and train nothing")
    parser.add_argument("--as-they-are", action="store_true", help="train on the answers there are, write no more")
    parser.add_argument("--resume", action="store_true", help="go on with the run in --run")
    parser.add_argument("--cache-features", action="store_true", help="keep the target's features on disk, in bfloat16")
    parser.add_argument("--devices", type=int, metavar="N", help="train on N devices (1)")
    parser.add_argument("--save-every", type=float, default=5.0, metavar="MINUTES")
    args = parser.parse_args()
    args.texts, args.out = args.texts or args.run / "texts", args.out or args.run / "out"
    if not args.resume and (args.run / "checkpoints").exists():
        raise ValueError(f"--run: {args.run} holds a run; go on with it by --resume, or name another folder")
    return args


def _texts(args: argparse.Namespace, recipe: Recipe, model: LoadedTarget) -> list[Text]:
    """The target's answers, written now as far as they are not there yet."""
    data = recipe.data
    about = {"vocab_size": model.target.vocab_size, "target": _fingerprint(model), **dataclasses.asdict(data)}
    store = Store(args.texts, {name: value for name, value in about.items() if name != "batch"})
    listed = args.texts / "prompts.json"

    @functools.cache
    def decoder() -> Decoder:
        engine = Engine(model.target, max_len=data.longest_prompt + data.max_new_tokens)
        return Decoder(engine, model.params, tokenizer=model.tokenizer, batch=data.batch, eos=model.eos_token_ids)

    if not listed.exists():
        made = asks.training_prompts(model, data, decoder)
        part = listed.with_suffix(".part")
        part.write_text(json.dumps(made), encoding="utf-8")
        os.replace(part, listed)
    prompts = [tuple(prompt) for prompt in json.loads(listed.read_text(encoding="utf-8"))]
    if store.numbers() != set(range(len(prompts))) and not (args.as_they_are and store.numbers()):
        _answer(data, decoder(), prompts, store)
    found = store.read()
    print(f"{len(found)} texts, {counted(found):,} tokens of the target's own", flush=True)
    return found


def _answer(data: Data, decoder: Decoder, prompts: list[tuple[int, ...]], store: Store) -> None:
    """The answers that are missing: the first prompts' greedy, the others' sampled."""
    greedy = round(data.greedy_share * len(prompts))
    warm = Sampling(temperature=data.temperature, top_p=data.top_p, top_k=data.top_k) if data.temperature else None
    written = [len(store.numbers())]

    def report(tokens: int) -> None:
        written[0] += 1
        if written[0] % 50 == 0:
            print(f"{written[0]} of {len(prompts)} answers", flush=True)

    for sampling, some in ((None, prompts[:greedy]), (warm, prompts)):
        regenerate(decoder, some, data.max_new_tokens, store, key=data.seed, sampling=sampling, report=report)


def _train(args: argparse.Namespace, recipe: Recipe, model: LoadedTarget, plan: Plan, texts: list[Text]) -> None:
    training, forward, task = recipe.training, plan.forward, plan.task
    shared = plan.shared(model, [text.tokens[text.mask] for text in texts])
    kept = shared.get(block.KEPT)
    cached = _features(args, plan.teacher, model, texts) if args.cache_features else None
    dataset = windows(texts, training.length, training.batch, training.seed, cached)
    feed = Feed(dataset, model.params, shared or None, plan.mesh)
    params = plan.earlier.begin or forward.init(jax.random.key(training.seed), model.params, kept)
    optimizer = steps.adamw(params, training.clip, training.weight_decay)
    whole = lambda params: forward.as_drafter(params, model.params, shared)  # noqa: E731
    evaluation = Evaluation(
        plan.engine,
        model.params,
        plan.held_out,
        recipe.held_out.max_new_tokens,
        as_drafter=whole,
        eos=model.eos_token_ids,
        sampling=Sampling(temperature=recipe.held_out.temperature),
    )
    vocabulary_map = None if kept is None else np.asarray(kept).tolist()
    settings = recipe.describe() | {"target": _fingerprint(model), "vocabulary": vocabulary_map}
    with Checkpoints(args.run / "checkpoints", settings) as checkpoints:
        start = mesh.replicate(steps.init(params, optimizer), plan.mesh)
        state = checkpoints.restore(start) or start
        size = sum(x.size for x in jax.tree.leaves(params))
        print(f"{size:,} parameters; step {int(state.step)} of {training.steps}", flush=True)
        tokens = training.batch * training.length
        bar = Progress(training.steps, SHOWN, tokens, always=SHOWN[-1:])
        with logs.Log(args.run, int(state.step)) as log, bar as progress:
            state = fit(
                state,
                steps.make_step(task.loss, optimizer),
                feed,
                training.schedule(),
                log,
                checkpoints,
                save_every=60 * args.save_every,
                measure_every=training.measure_every,
                measure=evaluation,
                report=progress.report,
            )
    rows = logs.read(args.run)
    shown = {k: v for k, v in rows[-1].items() if k.startswith(("accept", "loss"))}
    about = {
        "kind": recipe.kind,
        "parameters": size,
        "steps": int(state.step),
        "texts": len(texts),
        "tokens": counted(texts),
        "reached": shown,
    }
    done = state.params
    if recipe.objective.confidence and int(state.step) == training.steps:
        done = _calibrated(recipe, plan, model, shared, evaluation, done)
        about["temperatures"] = np.asarray(done.head.temperature).tolist()
    forward.save(args.out, whole(done), args.target, np.float16)
    (args.out / "training.json").write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
    (args.out / "README.md").write_text(card.text(args.config, args.target, recipe, about), encoding="utf-8")
    curves = {"loss": "loss", "draft_loss": "of the drafted logits"}
    logs.plot(rows, args.out / "loss.png", curves, args.config.stem)
    by_depth = {f"accepted_{k + 1}": f"depth {k + 1}" for k in range(forward.slots)}
    logs.plot(rows, args.out / "acceptance.png", by_depth, "accepted, by depth", ylabel="part of the drafts that deep")
    print(f"{args.out}: " + ", ".join(f"{k} {v:.3f}" for k, v in shown.items()))


def _calibrated(
    recipe: Recipe, plan: Plan, model: LoadedTarget, shared: Any, evaluation: Evaluation, params: Any
) -> Any:
    """The parameters with a confidence head calibrated on the answers to held-out prompts, if these are long enough."""
    texts = []
    for i, (prompt, result) in enumerate(zip(plan.held_out, evaluation.results, strict=True)):
        tokens = np.array([*prompt, *result.tokens], np.int32)
        texts.append(Text(i, tokens, np.arange(len(tokens)) >= len(prompt)))
    length, slots = max(len(text.tokens) for text in texts), plan.forward.slots
    if all(len(result.tokens) < slots for result in evaluation.results):
        print(f"no held-out answer has {slots} tokens: confidences stay as they are", flush=True)
        return params
    feed = Feed(windows(texts, length, 1, recipe.training.seed), model.params, shared or None)
    every = dataclasses.replace(plan.task, anchors=length)
    return calibrated(every, params, feed, len(texts), recipe.held_out.temperature)


def _features(args: argparse.Namespace, teacher: Any, model: LoadedTarget, texts: list[Text]) -> features.Cache:
    folder = args.texts / ("features_" + "_".join(str(tap) for tap in teacher.taps))
    try:
        cache = features.Cache(folder)
        if cache.about["lengths"] == [len(text.tokens) for text in texts]:
            return cache
    except FileNotFoundError:
        pass
    return features.Cache.write(folder, teacher, model.params, texts)


def _fingerprint(model: LoadedTarget) -> str:
    """A hash of the target's sizes and of one of its arrays.

    Settings at their defaults are left out: a setting that configs get later does not make it another target.
    """
    digest = hashlib.sha256(repr(_told(model.target.config)).encode())
    digest.update(np.asarray(model.params.norm, np.float32).tobytes())
    return digest.hexdigest()[:16]


def _told(config: Any) -> Any:
    """A config's fields, by name, that are not at their defaults."""
    if not dataclasses.is_dataclass(config):
        return config
    given = [
        (f.name, getattr(config, f.name)) for f in dataclasses.fields(config) if getattr(config, f.name) != f.default
    ]
    return sorted((name, _told(value)) for name, value in given)


if __name__ == "__main__":
    choose.run(main)
