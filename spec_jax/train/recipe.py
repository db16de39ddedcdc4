"""What a training run is, as a file says it: drafter, data, objective, steps."""

from __future__ import annotations

import dataclasses
import tomllib
from pathlib import Path
from typing import Any

from spec_jax.checks import check_number, check_sizes
from spec_jax.sampling.settings import Sampling
from spec_jax.train.kinds import KINDS, BlockRecipe, DrafterRecipe
from spec_jax.train.objective import Objective
from spec_jax.train.schedule import BySteps
from spec_jax.train.tables import of_mapping, table
from spec_jax.train.task import LABELS


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

    def __post_init__(self) -> None:
        """Check every field."""
        check_sizes(self, made_up=0, asked=0, passages=0, longest_prompt=1, max_new_tokens=1, batch=1, seed=0)
        if self.files is not None:
            check_sizes(self, files=1)
        check_number("temperature", self.temperature, 0.0)
        Sampling(temperature=self.temperature or 1.0, top_p=self.top_p, top_k=self.top_k)
        check_number("greedy_share", self.greedy_share, 0.0, 1.0)
        if not self.prompts:
            raise ValueError("made_up, asked, passages: got 0 of each, takes at least one prompt")

    @property
    def prompts(self) -> int:
        """How many there are at most: some are left out."""
        return self.made_up + self.asked + self.passages


@dataclasses.dataclass(frozen=True)
class Training:
    """Steps and sizes.

    Attributes:
        steps, batch, length: steps, rows, and tokens of a row.
        anchors: blocks per row.
        rate: learning rate at its peak; warmup and decay: steps of each (BySteps; decay None: two fifths of the steps).
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
    decay: int | None = None
    weight_decay: float = 0.0
    clip: float = 1.0
    labels: str = "text"
    begin: str | None = None
    reference: str | None = None
    seed: int = 0
    measure_every: int = 200

    def __post_init__(self) -> None:
        """Check every field."""
        check_sizes(self, steps=1, batch=1, length=2, anchors=1, warmup=0, seed=0, measure_every=0)
        if self.decay is not None:
            check_sizes(self, decay=0)
        check_number("rate", self.rate, 0.0, open_low=True)
        check_number("weight_decay", self.weight_decay, 0.0)
        check_number("clip", self.clip, 0.0, open_low=True)
        if self.labels not in LABELS:
            raise ValueError(f"labels: got {self.labels!r}, takes {', '.join(map(repr, LABELS))}")
        for name in ("begin", "reference"):
            if not isinstance(getattr(self, name), str | None):
                raise ValueError(f"{name}: got {getattr(self, name)!r}, takes a drafter's folder, or None")
        self.schedule()

    def schedule(self) -> BySteps:
        """The learning rates; ValueError for a decay of more steps than there are."""
        decay = self.steps * 2 // 5 if self.decay is None else self.decay
        return BySteps(self.rate, self.warmup, self.steps, decay)


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

    def __post_init__(self) -> None:
        """Check every field."""
        check_sizes(self, count=1, max_new_tokens=1)
        Sampling(temperature=self.temperature)
        names = self.classes
        if not isinstance(names, tuple) or not names or not all(isinstance(name, str) for name in names):
            raise ValueError(f"classes: got {names!r}, takes a list of names, at least one")


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A whole run."""

    drafter: DrafterRecipe = BlockRecipe()
    data: Data = Data()
    objective: Objective = Objective()
    training: Training = Training()
    held_out: Held = Held()

    def __post_init__(self) -> None:
        """Check the tables against each other."""
        batch, most = self.training.batch, self.data.prompts
        if batch > most:
            raise ValueError(f"batch: got {batch}, takes at most the number of prompts in data, {most}")
        if self.training.reference is not None and not self.objective.tree:
            taken = "takes None with an objective without tree"
            raise ValueError(f"reference: got {self.training.reference!r}, {taken}")

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
        drafter = of_mapping("drafter", given.get("drafter", {}))
        kind = drafter.pop("kind", "block")
        if not isinstance(kind, str) or kind not in KINDS:
            raise ValueError(f"kind: got {kind!r}, takes one of {', '.join(KINDS)}")
        kinds = {"drafter": KINDS[kind], "data": Data, "training": Training, "held_out": Held}
        if unknown := set(given) - {*kinds, "objective"}:
            raise ValueError(f"config: got {sorted(unknown)}, takes tables of {', '.join(kinds)}, objective")
        given["drafter"] = drafter
        parts: dict[str, Any] = {name: table(kind, given.get(name, {}), name) for name, kind in kinds.items()}
        return cls(**parts, objective=Objective.from_dict(given.get("objective", {})))

    def describe(self) -> dict[str, Any]:
        """What another run must share to go on with this one, as JSON: all but what is measured, and when."""
        found = dataclasses.asdict(self)
        found["drafter"]["kind"] = self.kind
        del found["held_out"], found["training"]["measure_every"]
        return found
