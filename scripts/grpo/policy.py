"""The policies: a small transformer over letters, or a model that `load_target` knows; and their training forward."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from spec_jax.models.config import RopeConfig
from spec_jax.models.llama import Llama, LlamaParams
from spec_jax.models.load import load_target
from spec_jax.models.qwen import Qwen, QwenParams
from spec_jax.models.qwen_config import ATTENTION, QwenConfig
from spec_jax.models.qwen_text import forward_text, init_params

LETTERS = "0123456789+=;."
END = len(LETTERS)
ROLES = ("user", "assistant")


@dataclasses.dataclass(frozen=True)
class Policy:
    """A target, its parameters, and how prompts become tokens and tokens text."""

    target: Llama | Qwen
    params: LlamaParams | QwenParams
    eos: tuple[int, ...]
    pad: int
    tokenizer: Any = None

    def encode(self, prompt: str) -> list[int]:
        """A prompt's tokens; a chat model's in its template, paragraphs in turns the user's and the model's own."""
        if self.tokenizer is None:
            return [LETTERS.index(c) for c in prompt]
        if not getattr(self.tokenizer, "chat_template", None):
            return list(self.tokenizer.encode(prompt))
        turns = [{"role": ROLES[i % 2], "content": text} for i, text in enumerate(prompt.split("\n\n"))]
        return list(self.tokenizer.encode(self.tokenizer.apply_chat(turns), special=False))

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of a response, without its end."""
        kept = [int(t) for t in tokens if int(t) not in self.eos]
        if self.tokenizer is not None:
            return self.tokenizer.decode(kept)
        return "".join(LETTERS[t] for t in kept if t < len(LETTERS))


def load(name: str, seed: int) -> Policy:
    """The toy, or a model by name or path."""
    if name != "toy":
        model = load_target(name)
        pad = model.eos_token_ids[0] if model.eos_token_ids else 0
        return Policy(model.target, model.params, model.eos_token_ids, pad, model.tokenizer)
    sizes: dict[str, Any] = {"vocab_size": END + 2, "hidden_size": 96, "intermediate_size": 192, "head_dim": 24}
    sizes |= {"rope": RopeConfig(theta=1_000_000)}  # Tunix 0.1.7's Qwen 3 knows no other
    config = QwenConfig(layer_types=(ATTENTION,) * 3, sparse=(False,) * 3, num_heads=4, num_kv_heads=2, **sizes)
    return Policy(Qwen(config), init_params(config, jax.random.key(seed), scale=None), (END,), END + 1)


def logits(target: Llama | Qwen, params: Any, tokens: Int[Array, "b t"]) -> Float[Array, "b t vocab"]:
    """Next-token logits of whole texts; differentiable."""
    if isinstance(target, Qwen):
        return forward_text(target.config, params, tokens).logits
    b, t = tokens.shape
    tapped = dataclasses.replace(target, taps=(target.config.num_layers,))
    features, _ = tapped.prefill(params, tapped.init_state(params, b, t), tokens, jnp.full(b, t))
    assert features is not None
    return target.logits(params, features[:, :, 0])


def log_probs(target: Llama | Qwen, params: Any, tokens: Int[Array, "b t"], temperature: float) -> Float[Array, "b t"]:
    """The tempered log-prob of every token but the first, which has 0."""
    law = jax.nn.log_softmax(logits(target, params, tokens)[:, :-1] / (temperature or 1.0))
    return jnp.pad(jnp.take_along_axis(law, tokens[:, 1:, None], axis=-1)[..., 0], ((0, 0), (1, 0)))
