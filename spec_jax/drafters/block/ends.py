"""The target's embedding, final norm and head, as its drafters use them: the same arrays, not copies."""

from __future__ import annotations

from typing import Any

import flax.struct
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from spec_jax.models.linear import PLAIN, Dense, Embedding, Linear, Projection, RowEmbedding, TransposedDense
from spec_jax.models.norms import rms_norm


@flax.struct.dataclass
class Ends:
    """The embedding [hidden, vocab], the final norm, and the head; None where the embedding is the head as well."""

    embedding: Embedding
    norm: Float[Array, "hidden"]
    head: Linear | None = None

    @property
    def output(self) -> Linear:
        """The map to logits: the head, or the embedding where that is the head as well."""
        if self.head is not None:
            return self.head
        return self.embedding.map if isinstance(self.embedding, RowEmbedding) else Dense(self.embedding)

    def embed(self, tokens: Int[Array, "*b"]) -> Float[Array, "*b hidden"]:
        """The tokens' embeddings as the table holds them.

        A Gemma's own layers read them times the root of hidden_size, its drafters do not: DFlash's release takes the
        weights alone, times its config's `input_embedding_scale`, and speculators' and SGLang's EAGLE-3 copy them.
        """
        return self.embedding[:, tokens.reshape(-1)].T.reshape(*tokens.shape, -1)

    def logits(self, x: Float[Array, "*b hidden"]) -> Float[Array, "*b vocab"]:
        """Logits of normed hidden states, in float32."""
        return apply(self.output, x).astype(jnp.float32)

    def some_logits(self, x: Float[Array, "b k hidden"], ids: Int[Array, "b m"]) -> Float[Array, "b k m"]:
        """Logits of some tokens of each row alone, in float32."""
        head = self.output
        if not isinstance(head, PLAIN):  # other leaves can't be read in part
            return jnp.take_along_axis(self.logits(x), ids[:, None], axis=-1)
        y = jnp.einsum("bkh,hbm->bkm", x, head.columns(ids))
        return (y if head.bias is None else y + head.bias[ids][:, None]).astype(jnp.float32)

    def columns(self, kept: Int[Array, "n"] | None = None) -> Dense | TransposedDense:
        """The head's columns for some tokens, in their order (None: all). ValueError for a head that can't be cut."""
        head = self.output
        if isinstance(head, Projection) and head.a is None and head.step is None:
            head = Dense(head.kernel.reshape(self.norm.shape[-1], -1), head.bias)
        if not isinstance(head, PLAIN):
            raise ValueError(f"ends: got a head that is a {type(head).__name__}, takes a dense one")
        if kept is None:
            return head
        return Dense(head.columns(kept), None if head.bias is None else head.bias[kept])

    def drafted(self, own: Linear | None, kept: Int[Array, "n"] | None) -> Linear | None:
        """A drafter's map to logits: its own, or else the columns of a reduced vocabulary (None: `output` as it is)."""
        return self.columns(kept) if own is None and kept is not None else own

    def final(self, x: Float[Array, "*b hidden"], eps: float) -> Float[Array, "*b hidden"]:
        """The final norm."""
        return rms_norm(x, self.norm, eps)


def ends_of(params: Any) -> Ends:
    """Those of a Llama's or a Qwen's parameters."""
    return Ends(params.embedding, params.norm, params.head)


def apply(linear: Linear, x: Float[Array, "*b n"]) -> Float[Array, "*b m"]:
    """A linear leaf on arrays of any rank."""
    return linear(x.reshape(-1, x.shape[-1])).reshape(*x.shape[:-1], -1)
