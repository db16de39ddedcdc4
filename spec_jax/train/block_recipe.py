"""What a recipe's table `drafter` says of a block-parallel drafter."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping
from typing import Any, Literal

from spec_jax.drafters.block.config import FULL, SLIDING, BlockConfig, causal_layers, default_taps
from spec_jax.drafters.block.heads.head import Head
from spec_jax.models.config import check_types
from spec_jax.train.block import BlockForward
from spec_jax.train.tables import Settings, sizes, table, tapped
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
    "bigram": "bigram.Bigram",
}


@dataclasses.dataclass(frozen=True)
class BlockRecipe(Settings):
    """A block-parallel drafter for whatever target it is trained for; what is None follows the target.

    Attributes:
        layers: layers; without layer_types all full, or all sliding with a `sliding_window`.
        layer_types: "full_attention" or "sliding_attention" for each of them.
        is_causal: of all layers (JetSpec: True), or a list with a flag for each; None: the sliding ones are.
        block_size: see `BlockConfig`; slots, taps, sliding_window, mask_token and per_layer_features (DFlare) too.
        head: a name of HEADS; head_settings are its fields. A "bigram" (DART) is counted in the training text.
        intermediate_size: None: the target's, or four times the hidden size if it has experts.
        draft_vocab_size: the most frequent tokens of the training text; None: all tokens.
        own_head: whether a reduced vocabulary's map to logits is trained, or is the target's columns as they are.
        rejected: see `BlockConfig`; with one, the training's labels are "again".
        embedding_scale: see `BlockConfig`; hidden_size**0.5 reads a Gemma's as its own layers do.
    """

    layers: int = 1
    block_size: int = 8
    slots: Literal["fill_in", "shifted"] = "fill_in"
    layer_types: tuple[str, ...] | None = None
    is_causal: bool | tuple[bool, ...] | None = None
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
    per_layer_features: bool = False
    embedding_scale: float = 1.0

    def __post_init__(self) -> None:
        """Check every field that says without a target what it takes."""
        super().__post_init__()
        types, window, n = self.layer_types, self.sliding_window, self.layers
        if types is not None and len(types) != n:
            raise ValueError(f"layer_types: got {types}, takes a kind for each of the layers, {n}")
        if window is not None and types is not None and SLIDING not in types:
            raise ValueError(f"sliding_window: got {window} with no sliding layer in layer_types, takes None")
        flags = self.is_causal if isinstance(self.is_causal, tuple) else (self.is_causal or False,) * n
        if len(flags) != n or not all(isinstance(flag, bool) for flag in flags):
            raise ValueError(f"is_causal: got {self.is_causal!r}, takes true, false, or a list of these for {n} layers")
        if self.head == "bigram" and self.draft_vocab_size is not None:
            raise ValueError(f"draft_vocab_size: got {self.draft_vocab_size}, takes None with the head 'bigram'")

    def config(self, target: Any) -> BlockConfig:
        """The network's sizes for a target's config."""
        types = self.layer_types or (FULL if self.sliding_window is None else SLIDING,) * self.layers
        each = self.is_causal if isinstance(self.is_causal, tuple) else causal_layers(types, self.is_causal)
        return BlockConfig(
            **sizes(target, self.intermediate_size),
            block_size=self.block_size,
            mask_token=target.vocab_size - 1 if self.mask_token is None else self.mask_token,
            taps=tapped(self.taps, default_taps(target.num_layers, self.layers), target),
            layer_types=types,
            causal=each,
            slots=self.slots,
            sliding_window=self.sliding_window,
            draft_vocab_size=self.draft_vocab_size,
            own_head=self.own_head,
            rejected=self.rejected,
            conv_kernel_size=self.conv_kernel_size,
            conv_group_size=self.conv_group_size,
            per_layer_features=self.per_layer_features,
            embedding_scale=self.embedding_scale,
        )

    def make_head(self) -> Head:
        """The head; ValueError for a name or a setting that is none."""
        if self.head not in HEADS:
            raise ValueError(f"head: got {self.head!r}, takes one of {', '.join(HEADS)}")
        module, name = HEADS[self.head].split(".")
        made = getattr(importlib.import_module(f"spec_jax.drafters.block.heads.{module}"), name)
        head = table(made, self.head_settings, "head_settings")
        check_types(made, vars(head) | {"pure": 1})  # Domino's, which may be 0
        return head

    def forward(self, target: Any) -> Trainable:
        """The training forward for a target's config."""
        return BlockForward(self.config(target), self.make_head())
