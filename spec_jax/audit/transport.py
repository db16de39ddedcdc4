"""How close a rule comes to the best: the chance that one of a node's siblings is accepted, and the most it can be.

A rule that emits a token of law p and accepts it if it is among the candidates is a transport plan between the law of
the candidates and p; the best one is the solution of a linear program (SpecTr, arXiv 2310.15141).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array
from scipy.optimize import linprog

from spec_jax import noise
from spec_jax.sampling import constraint
from spec_jax.sampling.history import History
from spec_jax.sampling.settings import Sampling, SamplingRow, to_row
from spec_jax.tree import Draft, Law, Proposal, Tree
from spec_jax.verify.scores import Scores
from spec_jax.verify.verdict import Verdict

_MOST_TOKENS = 10
"""The linear program has a variable for each token of each set of candidates."""

Probabilities = Sequence[float] | np.ndarray
Rule = Callable[[noise.Key, Draft, Scores, int], Verdict]


@dataclasses.dataclass(frozen=True)
class Acceptance:
    """The chance that a rule accepts a candidate, and the standard error of its measurement."""

    chance: float
    standard_error: float


def candidate_sets(q: Probabilities, k: int, replacement: bool) -> dict[frozenset[int], float]:
    """The law of the set of k tokens drawn from q, independently or without repeats."""
    laws = {frozenset[int](): 1.0}
    for _ in range(k):
        grown: dict[frozenset[int], float] = {}
        for drawn, chance in laws.items():
            left = [0.0 if not replacement and v in drawn else mass for v, mass in enumerate(q)]
            total = sum(left)
            if total <= 0:
                grown[drawn] = grown.get(drawn, 0.0) + chance
                continue
            for v, mass in enumerate(left):
                if mass > 0:
                    grown[drawn | {v}] = grown.get(drawn | {v}, 0.0) + chance * mass / total
        laws = grown
    return laws


def optimum(p: Probabilities, q: Probabilities, k: int, replacement: bool = True) -> float:
    """The greatest chance that a token of law p is one of k candidates from q; a linear program, for tiny vocabularies.

    Args:
        p: the target's probabilities [V].
        q: the drafter's.
        k: candidates.
        replacement: independent draws, or without repeats.

    Raises:
        ValueError: for laws that do not fit, or a vocabulary of more than 10 tokens.

    Source: Sun et al., SpecTr, arXiv 2310.15141.
    """
    p, q = _laws(p, q)
    if len(p) > _MOST_TOKENS:
        raise ValueError(f"p: got {len(p)} tokens, takes at most {_MOST_TOKENS} (see optimum_independent)")
    sets = candidate_sets(q, k, replacement)
    pairs = [(i, v) for i, drawn in enumerate(sets) for v in drawn]
    limits = np.zeros((len(sets) + len(p), len(pairs)))
    for column, (i, v) in enumerate(pairs):
        limits[i, column] = limits[len(sets) + v, column] = 1
    best = linprog(-np.ones(len(pairs)), limits, [*sets.values(), *p], method="highs")
    return float(-best.fun)


def optimum_independent(p: Probabilities, q: Probabilities, k: int) -> float:
    """The optimum for k independent draws in closed form, for a vocabulary of any size.

    Tokens outside a set S are accepted at most as often as a candidate is outside, those in S at most with p(S): the
    optimum is the least 1 - q(S)^k + p(S), and the least has the tokens of smallest p / q in S.

    Source: arXiv 2410.18234 for k = 2, where it is proved; tests hold it to `optimum`.
    """
    p, q = _laws(p, q)
    order = np.argsort(np.divide(p, q, out=np.full(len(p), np.inf), where=q > 0))
    inside = np.cumsum(q[order]) ** k - np.cumsum(p[order])
    return float(1 - max(0.0, inside.max()))


def acceptance(
    rule: Rule,
    p: Probabilities,
    q: Probabilities,
    k: int,
    proposal: Proposal = "sampled",
    runs: int = 40_000,
    width: int | None = None,
    seed: int = 0,
) -> Acceptance:
    """How often a rule accepts one of k siblings: every draft as often as its chance, each run with a key of its own.

    Args:
        rule: a verifier rule.
        p: the target's probabilities [V].
        q: the drafter's: what candidates are drawn from, or ranked by.
        k: siblings of the root.
        proposal: "sampled" and "without_replacement" try all drafts; "point" has the k likeliest tokens of q;
            "coupled" the k greatest of log q + G under each key's noise.
        runs: of the rule. The drafts' part of the noise is taken out, so the error is at most that stated.
        width: siblings that the compiled program has room for; k by default.
        seed: of the keys.

    Raises:
        ValueError: for laws that do not fit, or k outside 1 .. width.
    """
    p, q = _laws(p, q)
    vocab, width = len(p), width or k
    if not 1 <= k <= width:
        raise ValueError(f"k: got {k}, takes 1 .. width ({width})")
    rng = np.random.default_rng(seed)
    drafts, chances = _drafts(q, k, width, proposal)
    at = np.searchsorted(np.cumsum(chances) / chances.sum(), (np.arange(runs) + rng.random()) / runs)
    tokens = drafts[np.minimum(at, len(drafts) - 1)]
    words = rng.integers(0, 2**32, (runs, 2), dtype=np.uint32)
    with np.errstate(divide="ignore"):
        logs = jnp.asarray(np.log([p, q]), jnp.float32)
    row = to_row(Sampling(temperature=1.0), vocab)
    accepted = _accepted(rule, proposal, logs, jnp.asarray(tokens), jnp.int32(k), row, jnp.asarray(words))
    chance = float(np.mean(np.asarray(accepted), dtype=np.float64))
    return Acceptance(chance, (chance * (1 - chance) / runs) ** 0.5)


def _drafts(q: np.ndarray, k: int, width: int, proposal: Proposal) -> tuple[np.ndarray, np.ndarray]:
    """Every draft [n, width] and its chance [n]; -1 where there is no sibling."""
    if proposal in ("point", "coupled"):
        best = np.argsort(-q, kind="stable")
        return np.array([[*best[:k], *[-1] * (width - min(k, len(q)))]]), np.ones(1)
    drafts: list[tuple[tuple[int, ...], float]] = [((), 1.0)]
    for _ in range(k):
        grown = []
        for drawn, chance in drafts:
            left = q if proposal == "sampled" else np.where(np.isin(np.arange(len(q)), drawn), 0.0, q)
            more = [((*drawn, int(v)), chance * left[v] / left.sum()) for v in np.flatnonzero(left)]
            grown += more or [(drawn, chance)]
        drafts = grown
    tokens = [[*drawn, *[-1] * (width - len(drawn))] for drawn, _ in drafts]
    return np.array(tokens), np.array([chance for _, chance in drafts])


@functools.partial(jax.jit, static_argnums=(0, 1))
def _accepted(
    rule: Rule, proposal: Proposal, logs: Array, tokens: Array, k: Array, row: SamplingRow, keys: Array
) -> Array:
    width, vocab = tokens.shape[1], logs.shape[1]
    parent = jnp.concatenate([jnp.array([-1]), jnp.zeros(width, jnp.int32)])
    rows = lambda x: jnp.broadcast_to(x, (width + 1, vocab))  # noqa: E731
    position, zero, free = jnp.int32(1), jnp.int32(0), constraint.free(vocab)

    def one(key: Array, tokens: Array) -> Array:
        if proposal == "coupled":
            noisy = logs[1] + noise.gumbel(key, position, jnp.arange(vocab))
            tokens = jnp.where(jnp.arange(width) < k, jax.lax.top_k(noisy, width)[1], -1)
        valid = jnp.concatenate([jnp.ones(1, bool), tokens >= 0])
        tree = Tree(jnp.concatenate([zero[None], jnp.maximum(tokens, 0)]), parent, valid)
        law = None if proposal == "point" else Law(rows(logs[1]))
        draft = Draft(tree, jnp.ones(width + 1), law, proposal)
        scores = Scores(rows(logs[0]), row, History(zero, zero), position, free, adjusted=False)
        return rule(key, draft, scores, 2).accepted

    return jax.vmap(one)(keys, tokens)


def _laws(p: Probabilities, q: Probabilities) -> tuple[np.ndarray, np.ndarray]:
    laws = []
    for name, law in (("p", p), ("q", q)):
        x = np.asarray(law, np.float64)
        if x.ndim != 1 or (x < 0).any() or not abs(x.sum() - 1) < 1e-5:
            raise ValueError(f"{name}: got {law!r}, takes probabilities of the tokens")
        laws.append(x / x.sum())
    if len(laws[0]) != len(laws[1]):
        raise ValueError(f"p, q: got {len(laws[0])} and {len(laws[1])} tokens, take as many of each")
    return laws[0], laws[1]
