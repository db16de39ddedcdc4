"""What a training run is, as a file says it: drafter, data, objective, steps."""

from __future__ import annotations

import dataclasses
import importlib
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

from spec_jax.drafters.block.config import FULL, SLIDING, BlockConfig, causal_layers, default_taps
from spec_jax.drafters.block.heads.head import Head
from spec_jax.drafters.eagle.config import EagleConfig
from spec_jax.drafters.eagle.config import default_taps as default_eagle_taps
from spec_jax.drafters.medusa import MedusaConfig
from spec_jax.train.block import BlockForward
from spec_jax.train.heads import EagleForward, MedusaForward, MtpForward
from spec_jax.train.objective import Objective
from spec_jax.train.task import Trainable

HEADS = {
    "plain": "head.Plain",
    "markov": "markov.Markov",
    "domino": "gru.Domino",
    "selector": "selector.Selector",
    "swiglu": "swiglu.SwiGlu",
    "lattice": "lattice.Lattice",
    "jacobi": "jacobi.Jacobi",
    "local": "local.Local",
    "mixture": "mixture.Mixture",
    "ancestor": "ancestor.Ancestor",
}
T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class BlockRecipe:
    """A block-parallel drafter for whatever target it is trained for; what is None follows the target.

    Attributes:
        layers: layers, all full or all sliding (with `sliding_window`).
        block_size: see `BlockConfig`; slots, is_causal (JetSpec: True), taps, sliding_window and mask_token too.
        head: a name of HEADS; head_settings are its fields.
        intermediate_size: None: the target's, or four times the hidden size if it has experts.
        draft_vocab_size: the most frequent tokens of the training text; None: all tokens.
        own_head: whether a reduced vocabulary's map to logits is trained, or is the target's columns as they are.
        rejected: see `BlockConfig`; with one, the training's labels are "again".
    """

    layers: int = 1
    block_size: int = 8
    slots: Literal["fill_in", "shifted"] = "fill_in"
    is_causal: bool | None = None
    head: str = "plain"
    head_settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    intermediate_size: int | None = None
    taps: tuple[int, ...] | None = None
    sliding_window: int | None = None
    mask_token: int | None = None
    draft_vocab_size: int | None = None
    own_head: bool = True
    rejected: Literal["carryover", "retrace"] | None = None
    conv_kernel_size: int | None = None
    conv_group_size: int | None = None

    def config(self, target: Any) -> BlockConfig:
        """The network's sizes for a target's config."""
        types = (FULL if self.sliding_window is None else SLIDING,) * self.layers
        return BlockConfig(
            **_sizes(target, self.intermediate_size),
            block_size=self.block_size,
            mask_token=target.vocab_size - 1 if self.mask_token is None else self.mask_token,
            taps=default_taps(target.num_layers, self.layers) if self.taps is None else tuple(self.taps),
            layer_types=types,
            causal=causal_layers(types, self.is_causal),
            slots=self.slots,
            sliding_window=self.sliding_window,
            draft_vocab_size=self.draft_vocab_size,
            own_head=self.own_head,
            rejected=self.rejected,
            conv_kernel_size=self.conv_kernel_size,
            conv_group_size=self.conv_group_size,
        )

    def make_head(self) -> Head:
        """The head; ValueError for a name or a setting that is none."""
        if self.head not in HEADS:
            raise ValueError(f"head: got {self.head!r}, takes one of {', '.join(HEADS)}")
        module, name = HEADS[self.head].split(".")
        made = getattr(importlib.import_module(f"spec_jax.drafters.block.heads.{module}"), name)
        return table(made, self.head_settings, "head_settings")

    def forward(self, target: Any) -> Trainable:
        """The training forward for a target's config."""
        return BlockForward(self.config(target), self.make_head())


@dataclasses.dataclass(frozen=True)
class EagleRecipe:
    """An EAGLE head; what is None follows the target. EAGLE-1 and -2 are inputs = "fused", P-EAGLE has a mask_token.

    Attributes:
        slots: steps of the training-time test, and tokens that it drafts.
        layers, inputs, taps, mask_token, norm_output, own_head: see `EagleConfig`.
        intermediate_size: None: the target's, or four times the hidden size if it has experts.
        draft_vocab_size: the most frequent tokens of the training text; None: all tokens.
    """

    slots: int = 4
    layers: int = 1
    inputs: Literal["joined", "fused"] = "joined"
    taps: tuple[int, ...] | None = None
    mask_token: int | None = None
    norm_output: bool = False
    intermediate_size: int | None = None
    draft_vocab_size: int | None = None
    own_head: bool = False

    def forward(self, target: Any) -> Trainable:
        """The training forward for a target's config."""
        last = (target.num_layers,)
        taps = self.taps or (last if self.inputs == "fused" else default_eagle_taps(target.num_layers))
        config = EagleConfig(
            **_sizes(target, self.intermediate_size),
            taps=taps,
            num_layers=self.layers,
            inputs=self.inputs,
            norm_output=self.norm_output,
            mask_token=self.mask_token,
            final_norm_eps=target.rms_norm_eps if self.inputs == "fused" else None,
            own_head=self.own_head,
            draft_vocab_size=self.draft_vocab_size,
        )
        return EagleForward(config, self.slots)


@dataclasses.dataclass(frozen=True)
class MedusaRecipe:
    """Medusa's heads, or Hydra's (`sequential`); see `MedusaConfig`."""

    heads: int = 3
    blocks: int = 1
    sequential: bool = False
    own_head: bool = True

    def forward(self, target: Any) -> Trainable:
        """The training forward for a target's config."""
        sizes, eps = (target.vocab_size, target.hidden_size), target.rms_norm_eps
        config = MedusaConfig(*sizes, self.heads, self.blocks, self.sequential, eps, self.own_head)
        return MedusaForward(config, target.num_layers)


@dataclasses.dataclass(frozen=True)
class MtpRecipe:
    """The target's own MTP head, trained on to be used `slots` times on its own output (FastMTP)."""

    slots: int = 3

    def forward(self, target: Any) -> Trainable:
        """The training forward for a target's config; ValueError for a target without such a head."""
        if not getattr(target, "mtp", False):
            raise ValueError("drafter: got kind 'mtp' for a target without an MTP head")
        return MtpForward(target, self.slots)


KINDS = {"block": BlockRecipe, "eagle": EagleRecipe, "medusa": MedusaRecipe, "mtp": MtpRecipe}
"""What `kind` in the table drafter says; "block" if it is not there."""


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

    drafter: BlockRecipe | EagleRecipe | MedusaRecipe | MtpRecipe = BlockRecipe()
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


def table(kind: type[T], settings: Mapping[str, Any], name: str) -> T:
    """A dataclass from a table; lists become tuples. ValueError for an entry that is none, or one that is missing."""
    assert dataclasses.is_dataclass(kind)
    known = {f.name for f in dataclasses.fields(kind) if f.init}
    if unknown := set(settings) - known:
        raise ValueError(f"{name}: got {sorted(unknown)}, takes some of {', '.join(sorted(known))}")
    try:
        return kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in settings.items()})
    except TypeError as wrong:
        raise ValueError(f"{name}: got {dict(settings)}: {wrong}") from wrong


def _sizes(target: Any, intermediate_size: int | None) -> dict[str, Any]:
    """A drafter's sizes after its target's."""
    inner = intermediate_size or getattr(target, "intermediate_size", None) or 4 * target.hidden_size
    same = ("vocab_size", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "rms_norm_eps")
    return {name: getattr(target, name) for name in (*same, "max_position_embeddings")} | {"intermediate_size": inner}
