"""The law check: short strings over a few tokens, drawn many times, against the target's exact law for them."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from spec_jax.audit.replay import chain_logits
from spec_jax.engine import loop, rows
from spec_jax.engine.engine import Engine, EngineParams
from spec_jax.engine.requests import request
from spec_jax.engine.state import EngineState
from spec_jax.sampling import history, transform
from spec_jax.sampling.constraint import from_transitions
from spec_jax.sampling.settings import Sampling, to_row


@dataclasses.dataclass(frozen=True)
class LawReport:
    """Observed against exact counts of all strings.

    p_value: of Pearson's chi-square over cells with an expectation of at least 10, the others pooled; total_variation
    between the observed and the exact law (its noise shrinks with the draws); off_support: strings drawn that have no
    probability; acceptance: drafted tokens that were accepted, of those drafted.
    """

    draws: int
    p_value: float
    total_variation: float
    off_support: int
    acceptance: float

    @property
    def passed(self) -> bool:
        """No string off the support, and p at least 1e-6."""
        return self.off_support == 0 and self.p_value >= 1e-6


def check_law(
    engine: Engine,
    params: EngineParams,
    prompt: Sequence[int],
    tokens: Sequence[int],
    length: int = 3,
    draws: int = 2000,
    batch: int = 64,
    sampling: Sampling | None = None,
    seed: int = 0,
) -> LawReport:
    """Draw strings of `length` out of `tokens` (a constraint allows no others) with independent keys; compare the law.

    The exact law is enumerated by scoring every prefix once with the target alone, under the same settings.
    """
    vocab, sampling = engine.target.vocab_size, sampling or Sampling(temperature=1.0)
    allowed = np.full((1, vocab), -1)
    allowed[0, list(tokens)] = 0
    constraint = from_transitions(allowed)
    params = dataclasses.replace(params, constraint=constraint)
    exact = exact_law(engine, params, prompt, tokens, length, sampling)
    one = request(engine, prompt, length, sampling=sampling, constraint_start=1)
    many = jax.tree.map(lambda x: jnp.broadcast_to(x, (batch, *x.shape[1:])), one)

    start = jax.jit(rows.init, static_argnums=0)(engine, params, many)

    @jax.jit
    def run(params: EngineParams, start: EngineState, seed: Array) -> tuple[Array, Array, Array]:
        keys = jax.random.bits(jax.random.key(seed), (batch, 2), jnp.uint32)
        state = dataclasses.replace(start, rows=dataclasses.replace(start.rows, key=keys))
        after = loop.decode(engine, params, state).rows
        drawn = lax.dynamic_slice_in_dim(after.tokens, len(prompt), length, axis=1)
        return drawn, after.counters.drafted.sum(), after.counters.accepted.sum()

    strings, drafted, accepted = [], 0, 0
    for i in range(-(-draws // batch)):
        drawn, d, a = run(params, start, jnp.uint32(seed + i))
        strings.append(np.asarray(drawn))
        drafted, accepted = drafted + int(d), accepted + int(a)
    drawn = np.concatenate(strings)[:draws]
    index = {t: i for i, t in enumerate(tokens)}
    cells = np.array([sum(index[int(t)] * len(tokens) ** (length - 1 - j) for j, t in enumerate(s)) for s in drawn])
    observed = np.bincount(cells, minlength=len(exact))
    return LawReport(
        draws=len(drawn),
        p_value=chi_square(observed, exact),
        total_variation=float(np.abs(observed / len(drawn) - exact).sum() / 2),
        off_support=int(observed[exact == 0].sum()),
        acceptance=accepted / max(1, drafted),
    )


def exact_law(
    engine: Engine, params: EngineParams, prompt: Sequence[int], tokens: Sequence[int], length: int, sampling: Sampling
) -> np.ndarray:
    """Probabilities of all strings of `length` over `tokens`, first token most significant, in float64."""
    row = to_row(sampling, engine.target.vocab_size, (), engine.max_bias, engine.max_eos)

    @jax.jit
    def law(text: Array, size: Array) -> Array:
        logits = chain_logits(engine.target, params.target, text, 16)[size - 1]
        past = history.from_text(text, jnp.int32(len(prompt)), size, jnp.int32(1), logits.shape[0])
        return transform.log_probs(transform.adjust(logits, row, past, params.constraint), row)

    chance = np.ones(1)
    for n in range(length):
        steps = []
        for prefix in itertools.product(tokens, repeat=n):
            text = [*prompt, *prefix, *[0] * (length - n)]
            log = np.asarray(law(jnp.asarray(text, jnp.int32), jnp.int32(len(prompt) + n)), np.float64)
            p = np.exp(log[list(tokens)])
            steps.append(p / p.sum())
        chance = (chance[:, None] * np.stack(steps)).reshape(-1)
    return chance


def chi_square(observed: np.ndarray, exact: np.ndarray) -> float:
    """The p-value of Pearson's test; cells with an expectation under 10 are pooled."""
    expected = exact * observed.sum()
    big = expected >= 10
    o, e = list(observed[big]), list(expected[big])
    if expected[~big].sum() >= 10:
        o.append(observed[~big].sum())
        e.append(expected[~big].sum())
    statistic = sum((a - b) ** 2 / b for a, b in zip(o, e, strict=True))
    return _chi_square_tail(float(statistic), len(o) - 1)


def _chi_square_tail(x: float, df: int) -> float:
    """P(chi-square with df degrees of freedom > x), by the recurrence from one or two degrees."""
    if df < 1:
        return 1.0
    q, term = (math.exp(-x / 2), math.exp(-x / 2)) if df % 2 == 0 else (math.erfc(math.sqrt(x / 2)), 0.0)
    if df % 2 == 0:
        for i in range(1, df // 2):
            term *= x / 2 / i
            q += term
        return min(1.0, q)
    term = math.sqrt(2 * x / math.pi) * math.exp(-x / 2)
    for i in range(1, (df - 1) // 2 + 1):
        q += term
        term *= x / (2 * i + 1)
    return min(1.0, q)
