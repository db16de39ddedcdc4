"""How a drafter that grows trees chooses tokens in a row: by its law, by law and noise together, or by drawing."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from spec_jax.drafters.drafter import Context
from spec_jax.sampling import history, transform
from spec_jax.sampling.reduce import top_tokens
from spec_jax.sampling.settings import SamplingRow
from spec_jax.topology import coupling
from spec_jax.topology.branching import Branching, Draw
from spec_jax.topology.coupling import Weights
from spec_jax.topology.growth import Growth, Rank, Ranked
from spec_jax.topology.sampled import Siblings, siblings


def ranker(growth: Growth, context: Context, weights: Weights | None = None) -> Rank:
    """The `rank` of `growth.grow` for the batch's rows, with the rows' transforms.

    "point" ranks by the law that the row's tokens have (temperature 1 where it is 0). "coupled" ranks by
    `coupling.log_chance` with the weights, and leaves the candidates as the trace.

    Raises:
        ValueError: for a coupled growth without weights.
    """
    if growth.ranking == "coupled" and weights is None:
        raise ValueError("weights: got None with ranking='coupled', takes its weights")

    def point(z: Array, row: SamplingRow, depth: Array) -> Ranked:
        warm = dataclasses.replace(row, temperature=jnp.where(row.sampled, row.temperature, 1.0))
        law = transform.log_probs(z, warm)
        ids = top_tokens(law, min(growth.candidates, z.shape[0]))
        return Ranked(jnp.maximum(ids, 0), jnp.where(ids < 0, -jnp.inf, law[ids]))

    def coupled(z: Array, row: SamplingRow, depth: Array, noisy: Array) -> Ranked:
        assert weights is not None
        a, b = weights.a[depth], weights.b[depth]
        found = coupling.candidates(z, row, noisy, a, b, min(growth.candidates, z.shape[0]))
        return Ranked(found.tokens, coupling.log_chance(found, a, b), found)

    def rank(logits: Float[Array, "b k vocab"], paths: Int[Array, "b k d"], depth: Int[Array, ""]) -> Ranked:
        z, c = adjusted(logits, paths, depth, context), context
        if growth.ranking == "point":
            return jax.vmap(jax.vmap(point, (0, None, None)), (0, 0, None))(z, c.sampling, depth)
        draw = jax.vmap(lambda row, key, at: coupling.scaled_noise(row, key, at, z.shape[-1]))
        none = lambda *_: jnp.zeros((z.shape[0], z.shape[-1]))  # noqa: E731
        noisy = lax.cond(c.sampled, draw, none, c.sampling, c.key, c.length + depth)
        return jax.vmap(jax.vmap(coupled, (0, None, None, None)), (0, 0, None, 0))(z, c.sampling, depth, noisy)

    return rank


def drawer(shape: Branching, context: Context) -> Draw:
    """The `draw` of `branching.branch` for the batch's rows: from the law that the row's tokens have."""

    def one(z: Array, first: Array, row: SamplingRow, key: Array, position: Array) -> tuple[Siblings, Array]:
        law = transform.log_probs(z, row)
        return siblings(key, law, max(shape.widths), position, shape.replacement, first), law

    def draw(
        logits: Float[Array, "b k vocab"], paths: Int[Array, "b k d"], depth: Int[Array, ""], first: Int[Array, "k"]
    ) -> tuple[Siblings, Array]:
        z = adjusted(logits, paths, depth, context)
        nodes = jax.vmap(one, (0, 0, None, None, None))
        return jax.vmap(nodes, (0, None, 0, 0, 0))(z, first, context.sampling, context.key, context.length + depth)

    return draw


def adjusted(
    logits: Float[Array, "b k vocab"], paths: Int[Array, "b k d"], depth: Int[Array, ""], context: Context
) -> Float[Array, "b k vocab"]:
    """Logits behind nodes of one depth, with the penalties, bans and constraint that hold after their root paths."""
    return lax.cond(context.adjusted, _adjust, lambda logits, *_: logits, logits, paths, depth, context)


def _adjust(logits: Array, paths: Array, depth: Array, context: Context) -> Array:
    c, vocab = context, logits.shape[-1]

    def row(logits, paths, sampling, tokens, prompt_length, length, state):
        text = history.from_text(tokens, prompt_length, length, state, vocab)

        def node(z: Array, path: Array) -> Array:
            past = lax.fori_loop(0, depth, lambda i, past: past.step(path[i], c.constraint), text)
            return transform.adjust(z, sampling, past, c.constraint)

        return jax.vmap(node)(logits, paths)

    return jax.vmap(row)(logits, paths, c.sampling, c.tokens, c.prompt_length, c.length, c.state)
