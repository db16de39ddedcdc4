"""The replay check: emitted text is scored once more at a reference width, and every token must be the choice there."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from spec_jax import noise
from spec_jax.models.target import Target
from spec_jax.sampling import history, transform
from spec_jax.sampling.constraint import Constraint, free
from spec_jax.sampling.settings import Sampling, SamplingRow, to_row
from spec_jax.tree import Tree


@dataclasses.dataclass(frozen=True)
class Replay:
    """Token counts: equal to the reference's choice; a near tie; different, which an exact engine never has."""

    equal: int
    near_tie: int
    different: int

    def __add__(self, other: Replay) -> Replay:
        """Counts of both texts."""
        return Replay(self.equal + other.equal, self.near_tie + other.near_tie, self.different + other.different)


def replay(
    target: Target,
    params: Any,
    prompt: Sequence[int],
    emitted: Sequence[int],
    key: Array | int = 0,
    sampling: Sampling | None = None,
    eos: Sequence[int] = (),
    constraint: Constraint | None = None,
    constraint_start: int = 0,
    width: int = 16,
    other_width: int = 1,
    max_len: int | None = None,
) -> Replay:
    """Check emitted text against the target alone, without the engine.

    The text is scored in chains of `width` nodes. A token that is not the choice there is a near tie if the two stand
    closer than twice the logit difference between the two widths at that position, in noisy logits or in distance to
    the edge of the truncation; floating point explains those. Everything else is `different`. max_len pads the text, so
    that texts of all lengths share one program.
    """
    sampling, text = sampling or Sampling(), [*prompt, *emitted]
    if not emitted:
        return Replay(0, 0, 0)
    size = max(max_len or 0, len(text))
    room = max(16, len(sampling.logit_bias) + len(sampling.banned_tokens))
    position = _Position(
        tokens=jnp.asarray([*text, *[0] * (size - len(text))], jnp.int32),
        prompt_length=jnp.int32(len(prompt)),
        key=noise.request_key(key),
        row=to_row(sampling, target.vocab_size, tuple(eos), room, max(4, len(eos))),
        constraint=constraint or free(target.vocab_size),
        start=jnp.int32(constraint_start),
    )
    here = np.arange(len(prompt), len(text))
    logits = chain_logits(target, params, position.tokens, width)
    same = np.asarray(_choices(position, logits))[here] == np.asarray(text)[here]
    near = np.zeros_like(same)
    if not same.all():
        others = chain_logits(target, params, position.tokens, other_width)
        near = np.asarray(_near(position, logits, others))[here] & ~same
    return Replay(int(same.sum()), int(near.sum()), int((~same & ~near).sum()))


@functools.partial(jax.jit, static_argnums=(0, 3))
def chain_logits(target: Target, params: Any, tokens: Int[Array, "text"], width: int) -> Float[Array, "text vocab"]:
    """Next-token logits behind every token of a text, scored in chains of `width` nodes."""
    blocks = -(-tokens.shape[0] // width)
    padded = jnp.pad(tokens, (0, blocks * width - tokens.shape[0])).reshape(blocks, 1, width)
    parent, valid = jnp.arange(-1, width - 1)[None], jnp.ones((1, width), bool)

    def block(state: Any, nodes: Array) -> tuple[Any, Array]:
        output, staged, state = target.score(params, state, Tree(nodes, parent, valid))
        return target.commit(state, staged, parent + 1, jnp.full(1, width)), output.logits[0]

    logits = lax.scan(block, target.init_state(params, 1, (blocks + 1) * width), padded)[1]
    return logits.reshape(blocks * width, -1)[: tokens.shape[0]]


@flax.struct.dataclass
class _Position:
    """A text, and what its tokens were chosen by."""

    tokens: Array
    prompt_length: Array
    key: Array
    row: SamplingRow
    constraint: Constraint
    start: Array

    def each(self, f: Callable[..., Array], *logits: Array) -> Array:
        """f(z, position, token, logits before it ...) at every position of the text, the first left out as zero."""

        def step(state: Array, at: Array) -> tuple[Array, Array]:
            past = history.from_text(self.tokens, self.prompt_length, at, state, logits[0].shape[1])
            z = transform.adjust(logits[0][at - 1], self.row, past, self.constraint)
            after = self.constraint.step(state, self.tokens[at])
            out = f(z, at, self.tokens[at], *(x[at - 1] for x in logits))
            return jnp.where(at < self.prompt_length, state, after), out

        out = lax.scan(step, self.start, jnp.arange(1, self.tokens.shape[0]))[1]
        return jnp.concatenate([jnp.zeros(1, out.dtype), out])


@jax.jit
def _choices(text: _Position, logits: Array) -> Array:
    """The token chosen at every position."""
    return text.each(lambda z, at, *_: transform.choose(z, text.row, text.key, at), logits)


@jax.jit
def _near(text: _Position, logits: Array, others: Array) -> Array:
    """Whether each token is as good a choice as the chosen one, within the difference of two sets of logits."""
    row = text.row

    def near(z: Array, at: Array, token: Array, mine: Array, other: Array) -> Array:
        slack = 2 * jnp.max(jnp.abs(mine - other))
        noisy = z + row.temperature * noise.gumbel(text.key, at, jnp.arange(z.shape[0]))
        best = transform.choose(z, row, text.key, at)
        ease = slack / jnp.where(row.sampled, row.temperature, 1.0)

        def kept(token: Array, sign: int) -> Array:
            edge = dataclasses.replace(
                row,
                top_p=jnp.where(row.top_p < 1, row.top_p * jnp.exp(2 * sign * ease), 1.0),
                min_p=row.min_p * jnp.exp(-sign * ease),
            )
            moved = z.at[token].add(jnp.where(row.top_k > 0, sign * slack, 0.0))
            return ~row.sampled | transform.support(moved, edge)[token]

        close = (noisy[best] - noisy[token] <= slack) | ~kept(best, -1)
        return (z[token] > -jnp.inf) & kept(token, 1) & close

    return text.each(near, logits, others)
