"""What an EAGLE head is: its sizes, what its pairs are made of, and where it is normed."""

from __future__ import annotations

import dataclasses
from typing import Literal

from spec_jax.models.config import RopeConfig, check_types, require
from spec_jax.models.fields import is_whole

Inputs = Literal["joined", "fused"]
FeatureNorm = Literal["none", "each", "all"]


@dataclasses.dataclass(frozen=True)
class EagleConfig:
    """The sizes and settings of an EAGLE head; the embedding is the target's, and the head too where it has no own.

    EAGLE-3 (arXiv 2503.01840) is inputs="joined". EAGLE-1 (arXiv 2401.15077) and EAGLE-2 (arXiv 2406.16858), which
    share a network, are inputs="fused" with the target's last layer as the only tap. P-EAGLE (arXiv 2602.01469) is
    EAGLE-3 with a mask_token, usually of 4 layers: all depths in one pass.

    Attributes:
        vocab_size: the target's number of token ids.
        hidden_size: the target's and the head's.
        taps: the target layers that are read, as `Llama.taps` counts them: i is the hidden state after i layers.
        num_layers: layers of the head.
        inputs: "joined": the first layer attends with [norm(embedding); norm(feature)] and adds to the feature as it
            was before that norm; "fused": a map of [embedding; feature] is what a layer without a norm in front reads,
            and its output stands for the target's normed hidden state.
        norm_output: the normed output is what goes on to the next step (EAGLE-3.1).
        feature_norm: "each": every tapped state is normed before they are joined (`fc_norm`); "all": the joined ones
            are (`norm_before_fc`).
        norm_before_residual: the first layer adds to the normed feature instead.
        qk_norm, attention_bias: whether the attention has norms of queries and keys, and biases.
        fc_bias: whether the map in front has a bias.
        mask_token: P-EAGLE's id whose embedding stands in for tokens that are not drafted yet.
        final_norm_eps: of the target's final norm, which "fused" inputs apply; None: rms_norm_eps.
        own_head: whether the map to logits is its own, as most published ones have it, or the target's: with a
            draft_vocab_size its columns for those tokens.
        draft_vocab_size: tokens that can be drafted; None: all.

    Raises:
        ValueError: naming the field, for anything that does not fit.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    taps: tuple[int, ...]
    num_layers: int = 1
    inputs: Inputs = "joined"
    norm_output: bool = False
    feature_norm: FeatureNorm = "none"
    norm_before_residual: bool = False
    qk_norm: bool = False
    attention_bias: bool = False
    fc_bias: bool = False
    mask_token: int | None = None
    rms_norm_eps: float = 1e-6
    final_norm_eps: float | None = None
    rope: RopeConfig = RopeConfig()
    max_position_embeddings: int = 32768
    own_head: bool = False
    draft_vocab_size: int | None = None

    def __post_init__(self) -> None:
        """Check every field."""
        check_types(EagleConfig, {k: v for k, v in vars(self).items() if k != "mask_token"})
        mask = self.mask_token
        inside = mask is None or (is_whole(mask) and mask < self.vocab_size)
        require(inside, "mask_token", mask, f"None or a token id under vocab_size, {self.vocab_size}")
        require(self.inputs in ("joined", "fused"), "inputs", self.inputs, "joined or fused")
        require(self.feature_norm in ("none", "each", "all"), "feature_norm", self.feature_norm, "none, each or all")
        require(bool(self.taps) and min(self.taps) >= 0, "taps", self.taps, "at least one layer count, 0 or more")
        require(self.num_heads % self.num_kv_heads == 0, "num_heads", self.num_heads, "a multiple of num_kv_heads")
        require(self.head_dim % 2 == 0, "head_dim", self.head_dim, "an even number")
        small = self.draft_vocab_size is None or self.draft_vocab_size <= self.vocab_size
        require(small, "draft_vocab_size", self.draft_vocab_size, f"at most vocab_size, {self.vocab_size}")
        if self.inputs == "fused":
            require(len(self.taps) == 1, "taps", self.taps, "the last layer alone with fused inputs")
            for name, only in (("norm_output", False), ("feature_norm", "none"), ("norm_before_residual", False)):
                require(getattr(self, name) == only, name, getattr(self, name), f"{only} with fused inputs")
            require(mask is None, "mask_token", mask, "None with fused inputs")

    @property
    def logit_size(self) -> int:
        """Number of its own logits."""
        return self.draft_vocab_size or self.vocab_size


def default_taps(target_layers: int) -> tuple[int, ...]:
    """EAGLE-3's own choice of target layers: an early, a middle and a late one."""
    return (2, target_layers // 2, target_layers - 3)
