"""Log-probs of emitted tokens in a trainer's convention: out of the verify pass, and by teacher forcing."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from spec_jax import noise
from spec_jax.engine.engine import Engine, Rule
from spec_jax.models.target import Target
from spec_jax.sampling import reduce
from spec_jax.tree import Draft, Tree
from spec_jax.verify.scores import Scores
from spec_jax.verify.verdict import Verdict

CONVENTIONS = ("tempered", "law", "raw")
"""tempered: log_softmax(logits / T), whatever the truncation (T = 0 counts as 1), as trainers recompute it; law: under
the law that the token was drawn from, truncation and penalties with it; raw: log_softmax(logits)."""


@flax.struct.dataclass
class _Tempered(Scores):
    """Scores whose first log-prob is that of the tempered, untruncated law."""

    def emitted(self, node: Array, token: Array, z: Array) -> tuple[Array, Array]:
        """Log-probs of an emitted token: tempered, and under the row's law."""
        scaled = self.logits[node] / jnp.where(self.row.sampled, self.row.temperature, 1.0)
        return scaled[token] - reduce.log_sum_exp(scaled), self.log_probs(z)[token]


@dataclasses.dataclass(frozen=True)
class Tempered:
    """A verifier rule that writes tempered log-probs where the engine keeps raw ones; its text is the rule's."""

    rule: Rule

    def __call__(self, key: noise.Key, draft: Draft, scores: Scores, m: int) -> Verdict:
        """The rule's verdict."""
        fields = {f.name: getattr(scores, f.name) for f in dataclasses.fields(Scores)}
        return self.rule(key, draft, _Tempered(**fields), m)


def recording(engine: Engine, convention: str) -> Engine:
    """The engine, recording log-probs of one of `CONVENTIONS`: in `raw_log_probs`, or for "law" in `log_probs`."""
    if convention not in CONVENTIONS:
        raise ValueError(f"convention: got {convention!r}, takes one of {', '.join(CONVENTIONS)}")
    rule = Tempered(engine.rule) if convention == "tempered" else engine.rule
    return dataclasses.replace(engine, rule=rule, log_probs=True)


@functools.partial(jax.jit, static_argnums=(0, 5))
def teacher_forced(
    target: Target,
    params: Any,
    tokens: Int[Array, "b t"],
    length: Int[Array, "b"],
    temperature: Float[Array, ""] | float = 1.0,
    width: int = 64,
) -> Float[Array, "b t"]:
    """The tempered log-prob of every token of texts given those before it, in chains of `width` nodes.

    0 for a row's first token and behind its length. temperature 0 counts as 1. It is not meant to be differentiated: a
    trainer has a forward of its own.
    """
    b, t = tokens.shape
    blocks = -(-t // width)
    padded = jnp.pad(tokens, ((0, 0), (0, blocks * width + 1 - t)))
    cut = lambda x: x.reshape(b, blocks, width).swapaxes(0, 1)  # noqa: E731
    parent = jnp.broadcast_to(jnp.arange(-1, width - 1), (b, width))
    scale = jnp.where(jnp.asarray(temperature) > 0, temperature, 1.0)

    def block(state: Any, own: tuple[Array, Array]) -> tuple[Any, Array]:
        nodes, after = own
        output, staged, state = target.score(params, state, Tree(nodes, parent, jnp.ones((b, width), bool)))
        state = target.commit(state, staged, parent + 1, jnp.full(b, width))
        law = jax.nn.log_softmax(output.logits / scale, axis=-1)
        return state, jnp.take_along_axis(law, after[..., None], axis=-1)[..., 0]

    state = target.init_state(params, b, (blocks + 1) * width)
    found = lax.scan(block, state, (cut(padded[:, :-1]), cut(padded[:, 1:])))[1]
    found = jnp.pad(found.swapaxes(0, 1).reshape(b, -1)[:, : t - 1], ((0, 0), (1, 0)))
    return jnp.where(jnp.arange(t) < length[:, None], found, 0.0)
