"""What a recipe's table `drafter` says, for every kind of drafter: what makes its training forward for a target."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from spec_jax.drafters.eagle.config import EagleConfig, default_taps
from spec_jax.drafters.early_exit import EarlyExitConfig
from spec_jax.drafters.medusa import MedusaConfig
from spec_jax.drafters.mlp_speculator import MlpConfig
from spec_jax.drafters.parallel_model import ParallelConfig
from spec_jax.drafters.recurrent import RecurrentConfig
from spec_jax.models.config import LlamaConfig
from spec_jax.models.gguf import load_gguf
from spec_jax.models.huggingface import load_description
from spec_jax.models.load import model_path
from spec_jax.train.block_recipe import BlockRecipe
from spec_jax.train.early_exit import EarlyExitForward
from spec_jax.train.heads import EagleForward, MtpForward
from spec_jax.train.last_hidden import MedusaForward, MlpForward, RecurrentForward
from spec_jax.train.parallel import ParallelForward, first_layers
from spec_jax.train.tables import Settings, sizes, tapped
from spec_jax.train.task import Trainable


@dataclasses.dataclass(frozen=True)
class EagleRecipe(Settings):
    """An EAGLE head; what is None follows the target. EAGLE-1 and -2 are inputs = "fused", P-EAGLE has a mask_token.

    Attributes:
        slots: steps of the training-time test, and tokens that it drafts.
        layers, inputs, taps, mask_token, norm_output, own_head: see `EagleConfig`; feature_norm ("none", "each" or
            "all") and norm_before_residual too.
        intermediate_size: None: the target's, or four times the hidden size if it has experts.
        draft_vocab_size: the most frequent tokens of the training text; None: all tokens.
    """

    slots: int = 4
    layers: int = 1
    inputs: Literal["joined", "fused"] = "joined"
    taps: tuple[int, ...] | None = None
    mask_token: int | None = None
    norm_output: bool = False
    feature_norm: Literal["none", "each", "all"] = "none"
    norm_before_residual: bool = False
    intermediate_size: int | None = None
    draft_vocab_size: int | None = None
    own_head: bool = False

    def forward(self, target: Any) -> Trainable:
        """The training forward for a target's config."""
        default = (target.num_layers,) if self.inputs == "fused" else default_taps(target.num_layers)
        config = EagleConfig(
            **sizes(target, self.intermediate_size),
            taps=tapped(self.taps, default, target),
            num_layers=self.layers,
            inputs=self.inputs,
            norm_output=self.norm_output,
            feature_norm=self.feature_norm,
            norm_before_residual=self.norm_before_residual,
            mask_token=self.mask_token,
            final_norm_eps=target.rms_norm_eps if self.inputs == "fused" else None,
            own_head=self.own_head,
            draft_vocab_size=self.draft_vocab_size,
        )
        return EagleForward(config, self.slots)


@dataclasses.dataclass(frozen=True)
class MedusaRecipe(Settings):
    """Medusa's heads, or Hydra's (`sequential`), or Hydra++'s (`prefix` as well); see `MedusaConfig`."""

    heads: int = 3
    blocks: int = 1
    sequential: bool = False
    own_head: bool = True
    prefix: bool = False

    def forward(self, target: Any) -> Trainable:
        """The training forward for a target's config."""
        vocab, eps = (target.vocab_size, target.hidden_size), target.rms_norm_eps
        layer = LlamaConfig(**sizes(target, None), num_layers=1) if self.prefix else None
        config = MedusaConfig(*vocab, self.heads, self.blocks, self.sequential, eps, self.own_head, layer)
        return MedusaForward(config, target.num_layers)


@dataclasses.dataclass(frozen=True)
class MtpRecipe(Settings):
    """The target's own MTP head, trained on to be used `slots` times on its own output (FastMTP)."""

    slots: int = 3

    def forward(self, target: Any) -> Trainable:
        """The training forward for a target's config; ValueError for a target without such a head."""
        if not getattr(target, "mtp", False):
            raise ValueError("drafter: got kind 'mtp' for a target without an MTP head, takes one that has it")
        return MtpForward(target, self.slots)


@dataclasses.dataclass(frozen=True)
class MlpRecipe(Settings):
    """The MLP speculator's stages; see `MlpConfig`. inner_size: None: the target's hidden size."""

    stages: int = 3
    inner_size: int | None = None
    tie_weights: bool = False
    scale_input: bool = False

    def forward(self, target: Any) -> Trainable:
        """The training forward for a target's config."""
        sizes = (target.vocab_size, target.hidden_size, self.stages, self.inner_size)
        config = MlpConfig(*sizes, self.tie_weights, self.scale_input, target.rms_norm_eps)
        return MlpForward(config, target.num_layers)


@dataclasses.dataclass(frozen=True)
class RecurrentRecipe(Settings):
    """ReDrafter's head: `slots` tokens that it is trained to draft, and `RecurrentConfig`'s blocks."""

    slots: int = 5
    blocks: int = 2

    def forward(self, target: Any) -> Trainable:
        """The training forward for a target's config."""
        config = RecurrentConfig(target.vocab_size, target.hidden_size, self.blocks, target.rms_norm_eps)
        return RecurrentForward(config, target.num_layers, self.slots)


@dataclasses.dataclass(frozen=True)
class ParallelRecipe(Settings):
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
class EarlyExitRecipe(Settings):
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
    "mlp_speculator": MlpRecipe,
    "recurrent": RecurrentRecipe,
    "parallel": ParallelRecipe,
    "early_exit": EarlyExitRecipe,
}
"""What `kind` in the table drafter says; "block" if it is not there."""

DrafterRecipe = (
    BlockRecipe
    | EagleRecipe
    | MedusaRecipe
    | MlpRecipe
    | MtpRecipe
    | RecurrentRecipe
    | ParallelRecipe
    | EarlyExitRecipe
)
