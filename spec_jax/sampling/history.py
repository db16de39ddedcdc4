"""What the logits of a position may depend on besides the model: the text before it, inside a draft block as well."""

from __future__ import annotations

import flax.struct
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from spec_jax.sampling.constraint import Constraint


@flax.struct.dataclass
class History:
    """The text up to a position, as the transforms see it. Stepped by every token of an accepted path.

    counts[v] is how often v was generated and in_prompt[v] whether the prompt has it; both are None where no row of the
    batch needs them. generated is the number of tokens generated, state the constraint's state.
    """

    generated: Int[Array, ""]
    state: Int[Array, ""]
    counts: Int[Array, "vocab"] | None = None
    in_prompt: Bool[Array, "vocab"] | None = None

    def step(self, token: Int[Array, ""], constraint: Constraint) -> History:
        """The history after one more token."""
        return History(
            generated=self.generated + 1,
            state=constraint.step(self.state, token),
            counts=None if self.counts is None else self.counts.at[token].add(1),
            in_prompt=self.in_prompt,
        )


def from_text(
    tokens: Int[Array, "text"],
    prompt_length: Int[Array, ""],
    length: Int[Array, ""],
    state: Int[Array, ""],
    vocab_size: int | None,
) -> History:
    """The history of the first `length` tokens of a buffer; vocab_size None leaves the counts out."""
    if vocab_size is None:
        return History(length - prompt_length, state)
    index = jnp.arange(tokens.shape[0])
    generated = ((index >= prompt_length) & (index < length)).astype(jnp.int32)
    count = lambda weight: jnp.zeros(vocab_size, jnp.int32).at[tokens].add(weight, mode="drop")  # noqa: E731
    return History(
        length - prompt_length, state, count(generated), count((index < prompt_length).astype(jnp.int32)) > 0
    )
