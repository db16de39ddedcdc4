"""What a block-parallel drafter is: its sizes, which rows its layers see, and which slot predicts which token."""

from __future__ import annotations

import dataclasses
from typing import Literal

from spec_jax.drafters.block.carry import KINDS, Kind
from spec_jax.models.config import RopeConfig, check_types, require
from spec_jax.models.fields import is_whole

FULL, SLIDING = "full_attention", "sliding_attention"

Slots = Literal["fill_in", "shifted"]


@dataclasses.dataclass(frozen=True)
class BlockConfig:
    """The sizes and settings of a DFlash-style network (arXiv 2602.06036). It owns no embedding and no head.

    Attributes:
        vocab_size: the target's number of token ids.
        hidden_size: the target's and the network's.
        block_size: slots of a block: the anchor and block_size - 1 masks.
        mask_token: the id whose embedding stands in the masked slots.
        taps: the target layers that are read, as `Llama.taps` counts them: i is the hidden state after i layers, which
            published configs call layer i - 1 (z-lab) or i (speculators).
        layer_types: "full_attention" or "sliding_attention" per layer; the latter sees `sliding_window` positions.
        causal: whether a layer's block rows see earlier rows of their block alone. JetSpec: all of them.
        slots: "fill_in": slot k predicts the token at slot k, and slot 0 is unused (DFlash); "shifted": slot k predicts
            the token behind slot k (DSpark, Domino).
        conv_kernel_size, conv_group_size: of DFlash 2's dynamic convolution; None for a network without it.
        per_layer_features: every layer has its own mix of the tapped layers (DFlare, arXiv 2606.02091).
        draft_vocab_size: tokens that can be drafted; None: all.
        own_head: with a draft_vocab_size, whether the map to logits is the drafter's own (trained, and in its file) or
            the target's columns for those tokens.
        rejected: what of a draft's rejected part the next block reads (see `carry`): "carryover", "retrace", or None.
        embedding_scale, output_multiplier, softcap: what multiplies embeddings and logits, and bounds the latter.
            embedding_scale is the drafter's own, whatever the target's layers do with embeddings (see `Ends.embed`).

    Raises:
        ValueError: naming the field, for anything that does not fit.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    mask_token: int
    taps: tuple[int, ...]
    layer_types: tuple[str, ...]
    causal: tuple[bool, ...]
    slots: Slots = "fill_in"
    sliding_window: int | None = None
    rms_norm_eps: float = 1e-6
    rope: RopeConfig = RopeConfig(theta=1e6)
    max_position_embeddings: int = 32768
    conv_kernel_size: int | None = None
    conv_group_size: int | None = None
    per_layer_features: bool = False
    draft_vocab_size: int | None = None
    own_head: bool = True
    rejected: Kind | None = None
    embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    softcap: float | None = None

    def __post_init__(self) -> None:
        """Check every field."""
        numbers = {k: v for k, v in vars(self).items() if k != "mask_token"}
        check_types(BlockConfig, numbers | {"mask_token": 1})
        inside = is_whole(self.mask_token) and self.mask_token < self.vocab_size
        require(inside, "mask_token", self.mask_token, f"a token id under vocab_size, {self.vocab_size}")
        require(self.slots in ("fill_in", "shifted"), "slots", self.slots, "fill_in or shifted")
        require(self.rejected in (None, *KINDS), "rejected", self.rejected, f"None, {', '.join(KINDS)}")
        require(self.depth >= 1, "block_size", self.block_size, "at least 2 with fill_in slots, 1 with shifted ones")
        require(self.num_heads % self.num_kv_heads == 0, "num_heads", self.num_heads, "a multiple of num_kv_heads")
        require(self.head_dim % 2 == 0, "head_dim", self.head_dim, "an even number")
        require(len(self.layer_types) > 0, "layer_types", self.layer_types, "at least one layer")
        for kind in self.layer_types:
            require(kind in (FULL, SLIDING), "layer_types", kind, f"{FULL}, {SLIDING}")
        layers = len(self.layer_types)
        require(len(self.causal) == layers, "causal", self.causal, f"a flag for each of {layers} layers")
        require(bool(self.taps) and min(self.taps) >= 0, "taps", self.taps, "at least one layer count, 0 or more")
        needs = SLIDING in self.layer_types
        require(not needs or self.sliding_window is not None, "sliding_window", None, "a number for sliding layers")
        both = (self.conv_kernel_size is None) == (self.conv_group_size is None)
        require(both, "conv_group_size", self.conv_group_size, "a number with conv_kernel_size, None without")
        group = self.conv_group_size or 1
        require(self.hidden_size % group == 0, "conv_group_size", group, "a divisor of hidden_size")
        small = self.draft_vocab_size is None or self.draft_vocab_size <= self.vocab_size
        require(small, "draft_vocab_size", self.draft_vocab_size, f"at most vocab_size, {self.vocab_size}")

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return len(self.layer_types)

    @property
    def depth(self) -> int:
        """Tokens that a block predicts."""
        return self.block_size - (self.slots == "fill_in")

    @property
    def first_slot(self) -> int:
        """The slot that predicts the token behind the anchor."""
        return self.block_size - self.depth

    @property
    def logit_size(self) -> int:
        """Number of the network's own logits."""
        return self.draft_vocab_size or self.vocab_size


def causal_layers(layer_types: tuple[str, ...], is_causal: bool | None) -> tuple[bool, ...]:
    """Which layers are causal by a published config: all or none as it says, else the sliding ones."""
    return tuple(kind == SLIDING if is_causal is None else is_causal for kind in layer_types)


def default_taps(target_layers: int, layers: int) -> tuple[int, ...]:
    """DFlash's own choice of target layers, evenly from the second to the third from last, as tap counts."""
    if layers == 1:
        return (target_layers // 2 + 1,)
    return tuple(round(1 + i * (target_layers - 4) / (layers - 1)) + 1 for i in range(layers))
