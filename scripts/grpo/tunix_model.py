"""A policy in Tunix: its tokenizer, and its parameters in Tunix's Llama 3 or Qwen 3."""

# pyright: reportMissingImports=false

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from typing import Any
from unittest import mock

from flax import nnx
from tunix.models.llama3 import model as llama3
from tunix.models.qwen3 import model as qwen3

from spec_jax.models.llama import Llama, LlamaParams
from spec_jax.models.qwen import Qwen, QwenParams
from spec_jax.rollout import tunix_state

from .policy import Policy

THETA = 1_000_000
_ONE = threading.RLock()  # Tunix rolls out in a thread of its own


class Tokens:
    """A policy's tokenizer, as Tunix asks for one: prompts come in the chat template, and with all that it begins with.

    Tunix takes the pad for padding wherever it stands, and trains to NaN on one behind the vocabulary. Where the
    policy's own ends its texts, and so may stand in a prompt, it is the last special token that stands in none.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy, self._pad = policy, policy.pad
        if policy.pad in policy.eos:
            added = policy.tokenizer.backend.get_added_tokens_decoder()
            taken = {*policy.eos, *policy.encode("a\n\nb\n\nc")}
            left = [i for i, token in added.items() if token.special and i not in taken]
            if not left:
                raise ValueError("policy: got special tokens that all have a use, takes one left to pad with")
            self._pad = max(left)

    def encode(self, text: str, **_: Any) -> list[int]:
        """A prompt's tokens."""
        return self._policy.encode(text)

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        """The text of a response's tokens."""
        return self._policy.decode(ids)

    def bos_id(self) -> int:
        """0, which means none there."""
        return 0

    def eos_id(self) -> int:
        """The first token that ends a text."""
        return self._policy.eos[0]

    def ends(self) -> list[int]:
        """All tokens that end a text."""
        return list(self._policy.eos)

    def pad_id(self) -> int:
        """No token of a prompt."""
        return self._pad


class Llama3(llama3.Llama3):
    """Tunix's Llama 3, rotating by its config's base: that of 0.1.7 leaves it out where it calls `apply_rope`."""

    def __call__(self, input_tokens: Any, positions: Any, cache: Any, attention_mask: Any) -> Any:
        """Logits and cache, as Tunix's, which looks at these names to see what a model takes."""
        rope = functools.partial(llama3.apply_rope, rope_theta=self.config.rope_theta)
        with _ONE, mock.patch.object(llama3, "apply_rope", rope):
            return super().__call__(input_tokens, positions, cache, attention_mask)


def model_of(target: Llama | Qwen, params: LlamaParams | QwenParams) -> Any:
    """Tunix's Llama 3 or Qwen 3 with copies of a target's parameters.

    Raises:
        ValueError: for a target that they can't be, such as a Qwen 3 with another rotary base than 0.1.7 always uses.
    """
    family, kind, module = ("Llama3", Llama3, llama3) if isinstance(target, Llama) else ("Qwen3", qwen3.Qwen3, qwen3)
    config = module.ModelConfig(**tunix_state.settings_of(family, target.config))
    if family == "Qwen3" and config.rope_theta != THETA:
        raise ValueError(f"rope_theta: got {config.rope_theta}, takes {THETA} for Tunix's Qwen 3")
    model = kind(config, rngs=nnx.Rngs(0))
    state = nnx.state(model, nnx.Param)
    nnx.replace_by_pure_dict(state, tunix_state.state_of(model, params, nnx.to_pure_dict(state)))
    nnx.update(model, state)
    return model
