"""What a training run is, as a file says it: drafter, data, objective, steps."""

from __future__ import annotations

import dataclasses
import tomllib
from pathlib import Path
from typing import Any

from spec_jax.train.kinds import KINDS, BlockRecipe, DrafterRecipe, table
from spec_jax.train.objective import Objective


@dataclasses.dataclass(frozen=True)
class Data:
    """The text a drafter learns from: the target's own answers to prompts.

    Attributes:
        made_up: prompts that a chat model makes up itself (Magpie).
        asked: everyday requests put to a chat model (those of scripts/drafting/topics.py).
        passages: passages of the standard library's sources; a chat model is asked about them, another goes on.
        longest_prompt: tokens; longer ones are left out.
        max_new_tokens: longest answer.
        batch: rows of the engine that writes them.
        temperature, top_p, top_k: settings of the answers (DSpark: 0.7, 0.8, 20).
        greedy_share: the part of the prompts that is answered greedily.
        seed: of prompts and answers.
        files: sources that passages come from; None: all.
    """

    made_up: int = 0
    asked: int = 0
    passages: int = 256
    longest_prompt: int = 128
    max_new_tokens: int = 128
    batch: int = 16
    temperature: float = 0.7
    top_p: float = 0.8
    top_k: int = 20
    greedy_share: float = 0.5
    seed: int = 0
    files: int | None = None


@dataclasses.dataclass(frozen=True)
class Training:
    """Steps and sizes.

    Attributes:
        steps, batch, length: steps, rows, and tokens of a row.
        anchors: blocks per row.
        rate: learning rate at its peak; warmup and decay: steps of each (BySteps).
        weight_decay, clip: AdamW's.
        labels: see `Task`.
        begin: the folder of a drafter of this kind and sizes, whose weights the training starts from; None: random.
        reference: the same, for a drafter that stays as it is and that group tree optimisation compares with
            (`Task.reference`). Both are relative to the recipe's own folder, and bring their reduced vocabulary.
        seed: of parameters, batches and anchors.
        measure_every: steps between two measures of acceptance; 0: at the end only.
    """

    steps: int = 1000
    batch: int = 8
    length: int = 256
    anchors: int = 32
    rate: float = 6e-4
    warmup: int = 40
    decay: int = 400
    weight_decay: float = 0.0
    clip: float = 1.0
    labels: str = "text"
    begin: str | None = None
    reference: str | None = None
    seed: int = 0
    measure_every: int = 200


@dataclasses.dataclass(frozen=True)
class Held:
    """The prompts that acceptance is measured on, which no training text shares a run of 13 tokens with.

    Attributes:
        classes: of the benchmark's prompts, for chat models; another target goes on from held-out sources.
        count: prompts of each.
        max_new_tokens: longest answer.
        temperature: of the answers.
    """

    classes: tuple[str, ...] = ("humaneval", "mtbench")
    count: int = 4
    max_new_tokens: int = 64
    temperature: float = 0.0


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A whole run."""

    drafter: DrafterRecipe = BlockRecipe()
    data: Data = Data()
    objective: Objective = Objective()
    training: Training = Training()
    held_out: Held = Held()

    @property
    def kind(self) -> str:
        """The drafter's name in KINDS."""
        return next(name for name, kind in KINDS.items() if isinstance(self.drafter, kind))

    @classmethod
    def load(cls, path: str | Path) -> Recipe:
        """From a TOML file with tables drafter, data, objective, training and held_out, any of which may be missing.

        What the table drafter may say depends on its `kind`, a name of KINDS.

        Raises FileNotFoundError, or ValueError naming a table or entry that is none.
        """
        if not Path(path).is_file():
            raise FileNotFoundError(f"config: {path} is no file")
        try:
            given = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except tomllib.TOMLDecodeError as wrong:
            raise ValueError(f"config: {path} is no TOML: {wrong}") from wrong
        kind = given.get("drafter", {}).pop("kind", "block")
        if kind not in KINDS:
            raise ValueError(f"kind: got {kind!r}, takes one of {', '.join(KINDS)}")
        kinds = {"drafter": KINDS[kind], "data": Data, "training": Training, "held_out": Held}
        if unknown := set(given) - {*kinds, "objective"}:
            raise ValueError(f"config: got {sorted(unknown)}, takes tables of {', '.join(kinds)}, objective")
        parts: dict[str, Any] = {name: table(kind, given.get(name, {}), name) for name, kind in kinds.items()}
        return cls(**parts, objective=Objective.from_dict(given.get("objective", {})))

    def describe(self) -> dict[str, Any]:
        """What another run must share to go on with this one, as JSON: all but what is measured, and when."""
        found = dataclasses.asdict(self)
        found["drafter"]["kind"] = self.kind
        del found["held_out"], found["training"]["measure_every"]
        return found
