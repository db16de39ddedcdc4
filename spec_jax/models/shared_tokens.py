"""Two vocabularies: whether ids mean the same tokens, and a model that drafts for a target of another vocabulary.

Text is never translated: a draft is made of the target's own tokens, each of which is a token of the drafter's or none.
Writing a draft in one tokenizer and cutting it anew in another is string work, which a compiled round has no place for.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.struct
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from spec_jax.models.target import Output, Target
from spec_jax.models.tokenizer import Tokenizer
from spec_jax.tree import Tree


def require_same_ids(target: Tokenizer, draft: Tokenizer, name: str = "draft") -> None:
    """ValueError, naming the first id that means another token, unless both tokenizers have the same id for every one.

    Equal sizes say nothing: drafts with ids of another meaning are right text's words in a wrong place, which no rule
    accepts. `SharedTokens` drafts with such a model, of the tokens that both have.
    """
    if target.fingerprint() == draft.fingerprint():
        return
    theirs, ours = ({i: token for token, i in t.backend.get_vocab().items()} for t in (target, draft))
    first = min(i for i in theirs.keys() | ours.keys() if theirs.get(i) != ours.get(i))
    says = lambda token: "no token" if token is None else repr(token)  # noqa: E731
    raise ValueError(
        f"{name}: got token ids of another meaning, id {first} is {says(ours.get(first))}, "
        f"takes the target's, where it is {says(theirs.get(first))}; text is not translated between tokenizers"
    )


def shared_ids(target: Tokenizer, draft: Tokenizer, vocab_size: int) -> Int[np.ndarray, "vocab"]:
    """The draft model's id of each of the target's tokens, -1 for those that it lacks; tokens are equal if spelled so.

    vocab_size: the target's number of logits, maybe more than its tokenizer has tokens.
    """
    found = np.full(vocab_size, -1, np.int32)
    known = draft.backend.get_vocab()
    for token, number in target.backend.get_vocab().items():
        if number < vocab_size:
            found[number] = known.get(token, -1)
    return found


@flax.struct.dataclass
class SharedParams:
    """The model's parameters, and its id of each of the target's tokens (-1: none), as `shared_ids` gives them."""

    model: Any
    ids: Int[Array, "vocab"]


@dataclasses.dataclass(frozen=True)
class SharedTokens:
    """A model of another vocabulary as one of the target's, for a drafter to hold: token-level intersection.

    Its logits are the model's for the tokens that both have and -inf elsewhere, so whatever is drawn from them has the
    law that is left of the model's, renormalised, and every rule stays exact. Target tokens that the model lacks stand
    in its text as `unknown`. Parameters are `SharedParams`. Source: Timor et al., arXiv 2502.05202 (TLI).

    Attributes:
        model: the model, with its own vocabulary.
        vocab_size: the target's number of logits.
        unknown: one of the model's ids.
    """

    model: Target
    vocab_size: int
    unknown: int = 0

    def __post_init__(self) -> None:
        """Check the settings."""
        if not 0 <= self.unknown < self.model.vocab_size:
            raise ValueError(f"unknown: got {self.unknown}, takes one of the model's, 0 .. {self.model.vocab_size - 1}")

    def params(self, model: Any, ids: Int[np.ndarray, "vocab"]) -> SharedParams:
        """The parameters; ValueError for ids that are not one for each of the target's tokens, or all -1."""
        most = self.model.vocab_size
        if ids.shape != (self.vocab_size,) or ids.min() < -1 or not 0 <= ids.max() < most:
            raise ValueError(
                f"ids: got {list(ids.shape)} of {ids.min()} .. {ids.max()}, takes [{self.vocab_size}] of the model's "
                f"0 .. {most - 1}, -1 for tokens it lacks, at least one that it has"
            )
        return SharedParams(model, jnp.asarray(ids, jnp.int32))

    def init_state(self, params: SharedParams, batch: int, slots: int) -> Any:
        """The model's."""
        return self.model.init_state(params.model, batch, slots)

    def prefill(self, params: SharedParams, state: Any, tokens: Int[Array, "b p"], count: Int[Array, "b"]) -> Any:
        """Append the model's ids of the first `count` tokens to each row."""
        return self.model.prefill(params.model, state, self._own(params, tokens), count)

    def score(
        self, params: SharedParams, state: Any, tree: Tree, staged: Any = None, nodes: tuple[Any, int] | None = None
    ) -> tuple[Output, Any, Any]:
        """The model's scores, over the target's tokens."""
        own = dataclasses.replace(tree, tokens=self._own(params, tree.tokens))
        output, staged, state = self.model.score(params.model, state, own, staged, nodes)
        logits = jnp.where(params.ids >= 0, output.logits[..., jnp.maximum(params.ids, 0)], -jnp.inf)
        return dataclasses.replace(output, logits=logits), staged, state

    def widen(self, staged: Any, n: int) -> Any:
        """The model's."""
        return self.model.widen(staged, n)

    def commit(self, state: Any, staged: Any, path: Int[Array, "b m"], length: Int[Array, "b"]) -> Any:
        """The model's."""
        return self.model.commit(state, staged, path, length)

    def materialize(self, state: Any) -> Any:
        """The model's."""
        return self.model.materialize(state)

    def take(self, state: Any, rows: Int[Array, "r"]) -> Any:
        """The model's."""
        return self.model.take(state, rows)

    def insert(self, state: Any, rows: Int[Array, "r"], other: Any) -> Any:
        """The model's."""
        return self.model.insert(state, rows, other)

    def release(self, state: Any, rows: Int[Array, "r"]) -> Any:
        """The model's."""
        return self.model.release(state, rows)

    def _own(self, params: SharedParams, tokens: Int[Array, "b n"]) -> Int[Array, "b n"]:
        own = params.ids[jnp.clip(tokens, 0, self.vocab_size - 1)]
        return jnp.where(own >= 0, own, self.unknown)
