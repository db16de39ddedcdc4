"""The card of a trained drafter: what it is, what it learnt from, what it reached."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spec_jax.train.recipe import Recipe

_LICENCES = {
    "smollm2": "SmolLM2-135M-Instruct (Apache-2.0), whose own answers are all of the training text",
    "small_hybrid": "small_hybrid (in this repository), whose own continuations are all of the training text",
}


def text(path: Path, target: str, recipe: Recipe, about: Mapping[str, Any]) -> str:
    """Markdown."""
    data, training = recipe.data, recipe.training
    said = [f"{data.made_up} prompts that the target made up"] if data.made_up else []
    said += [f"{data.asked} everyday requests (scripts/drafting/topics.py)"] if data.asked else []
    said += [f"{data.passages} passages of the standard library's sources (PSF License)"] if data.passages else []
    reached = "".join(f"| {name} | {value:.3f} |\n" for name, value in about["reached"].items())
    settings = "".join(
        f"| {name} | {value} |\n" for name, value in dataclasses.asdict(recipe.drafter).items() if value is not None
    )
    drawn = f"temperature {data.temperature}, top-p {data.top_p}, top-k {data.top_k}"
    held, classes = recipe.held_out, ", ".join(recipe.held_out.classes)
    blocks = f"{training.batch} windows of {training.length} tokens with {training.anchors} blocks each"
    return f"""# {path.stem}

A drafter for {_LICENCES.get(target, target)}; `spec_jax.drafters.load.load_drafter` reads this directory.
Stored in float16, meant for float32. Nothing of the target is in it. Apache-2.0.

| {about["parameters"]:,} parameters | {about["kind"]} |
|---|---|
{settings}
## Data

{about["texts"]:,} answers of the target's own, {about["tokens"]:,} tokens (at most {data.max_new_tokens} each), to
{" and ".join(said)};
{data.greedy_share:.0%} of them greedy, the others at {drawn}. Prompts that share 13 tokens in a row with
a benchmark's were left out.

## Training

{about["steps"]:,} steps of {blocks}, AdamW, rate {training.rate}.
Objective: {recipe.objective}.

| at the end, greedy, {held.count} prompts of each class ({classes}; held-out files if the target does not chat) | |
|---|---|
{reached}
    scripts/train_drafter.py --config scripts/drafting/recipes/{path.name} --target {target} --run DIR
"""
