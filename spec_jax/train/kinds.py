"""What a recipe's table `drafter` says, for every kind of drafter: what makes its training forward for a target."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

from spec_jax.drafters.block.config import FULL, SLIDING, BlockConfig, causal_layers, default_taps
from spec_jax.drafters.block.heads.head import Head
from spec_jax.drafters.eagle.config import EagleConfig
from spec_jax.drafters.eagle.config import default_taps as default_eagle_taps
from spec_jax.drafters.early_exit import EarlyExitConfig
from spec_jax.drafters.medusa import MedusaConfig
from spec_jax.drafters.parallel_model import ParallelConfig
from spec_jax.drafters.recurrent import RecurrentConfig
from spec_jax.models.gguf import load_gguf
from spec_jax.models.huggingface import load_description
from spec_jax.models.load import model_path
from spec_jax.train.block import BlockForward
from spec_jax.train.early_exit import EarlyExitForward
from spec_jax.train.heads import EagleForward, MtpForward
from spec_jax.train.last_hidden import MedusaForward, RecurrentForward
from spec_jax.train.parallel import ParallelForward, first_layers
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
        embedding_scale: see `BlockConfig`; hidden_size**0.5 reads a Gemma's as its own layers do.
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
    embedding_scale: float = 1.0

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
            embedding_scale=self.embedding_scale,
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


@dataclasses.dataclass(frozen=True)
class RecurrentRecipe:
    """ReDrafter's head: `slots` tokens that it is trained to draft, and `RecurrentConfig`'s blocks."""

    slots: int = 5
    blocks: int = 2

    def forward(self, target: Any) -> Trainable:
        """The training forward for a target's config."""
        config = RecurrentConfig(target.vocab_size, target.hidden_size, self.blocks, target.rms_norm_eps)
        return RecurrentForward(config, target.num_layers, self.slots)


@dataclasses.dataclass(frozen=True)
class ParallelRecipe:
    """PARD: a whole model that drafts over masks; see `ParallelForward`.

    Attributes:
        model: the small model to start from, as `load_target` takes it; None: the target's own first `layers`.
        layers: of the target's, without a model.
        slots: tokens that it drafts.
        mask_token: None: the vocabulary's last id.
        rate, floor: of conditional drop.
    """

    model: str | None = None
    layers: int | None = None
    slots: int = 8
    mask_token: int | None = None
    rate: float = 0.7
    floor: float = 0.2

    def forward(self, target: Any) -> Trainable:
        """The training forward for a target's config; ValueError for a model of another vocabulary."""
        if (self.model is None) == (self.layers is None):
            raise ValueError(f"model, layers: got {self.model!r} and {self.layers}, takes one of them")
        if self.model is None:
            own = first_layers(target, self.layers or 0)
        else:
            place = model_path(self.model)
            own = (load_gguf if place.is_file() else load_description)(place).config
            if own.vocab_size != target.vocab_size:
                raise ValueError(
                    f"model: got one of vocab_size {own.vocab_size}, takes the target's {target.vocab_size}"
                )
        mask = own.vocab_size - 1 if self.mask_token is None else self.mask_token
        return ParallelForward(ParallelConfig(own, mask, self.slots), self.rate, self.floor, self.model)


@dataclasses.dataclass(frozen=True)
class EarlyExitRecipe:
    """An adapter behind the target's first `layers`; see `EarlyExitConfig`. adapter: None: the target's last layer."""

    layers: int = 1
    adapter: int | None = None
    slots: int = 4

    def forward(self, target: Any) -> Trainable:
        """The training forward for a target's config."""
        adapter = target.num_layers - 1 if self.adapter is None else self.adapter
        return EarlyExitForward(EarlyExitConfig(target, self.layers, adapter, self.slots))


KINDS = {
    "block": BlockRecipe,
    "eagle": EagleRecipe,
    "medusa": MedusaRecipe,
    "mtp": MtpRecipe,
    "recurrent": RecurrentRecipe,
    "parallel": ParallelRecipe,
    "early_exit": EarlyExitRecipe,
}
"""What `kind` in the table drafter says; "block" if it is not there."""

DrafterRecipe = (
    BlockRecipe | EagleRecipe | MedusaRecipe | MtpRecipe | RecurrentRecipe | ParallelRecipe | EarlyExitRecipe
)


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
