"""Plain decoding and its law, one token at a time in numpy float64. Shares no code with the library.

Sampled text takes its noise from the caller, as an array [position, token].
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from spec_jax.sampling.settings import Sampling

Logits = Callable[[Sequence[int]], np.ndarray]
Grammar = tuple[np.ndarray, int]


@dataclasses.dataclass
class Text:
    tokens: list[int]
    finish: str
    raw_log_probs: list[float]
    log_probs: list[float]


def adjusted(
    z: np.ndarray, s: Sampling, prompt: Sequence[int], output: Sequence[int], eos: Sequence[int] = (), allowed=None
) -> np.ndarray:
    """Penalties, bias and bans, minimum length, constraint."""
    z = np.array(z, np.float64)
    for v in {*prompt, *output}:
        z[v] = z[v] / s.repetition_penalty if z[v] > 0 else z[v] * s.repetition_penalty
    for v in set(output):
        z[v] -= s.presence_penalty
    for v in output:
        z[v] -= s.frequency_penalty
    for v, bias in s.logit_bias.items():
        z[v] += bias
    z[list(s.banned_tokens)] = -np.inf
    if len(output) < s.min_new_tokens:
        z[list(eos)] = -np.inf
    if allowed is not None:
        z[~allowed] = -np.inf
    return z


def kept(z: np.ndarray, s: Sampling) -> np.ndarray:
    """The tokens left by top-k, then top-p, then min-p; tied tokens stay or go together."""
    z = np.asarray(z, np.float64) / (s.temperature or 1.0)
    keep = z > -np.inf
    if 0 < s.top_k < len(z):
        keep &= z >= np.sort(z)[::-1][s.top_k - 1]
    if s.top_p < 1:
        p = np.where(keep, softmax(np.where(keep, z, -np.inf)), 0.0)
        order = np.argsort(-z, kind="stable")
        before = np.concatenate([[0.0], np.cumsum(p[order])[:-1]])
        first = np.searchsorted(-z[order], -z)
        keep &= before[first] < s.top_p
    return keep & (softmax(z) >= s.min_p * softmax(z).max())


def softmax(z: np.ndarray) -> np.ndarray:
    e = np.exp(z - z.max())
    return e / e.sum()


def law(z: np.ndarray, s: Sampling) -> np.ndarray:
    """Probabilities of the token drawn from adjusted logits."""
    if s.temperature == 0:
        return np.eye(len(z))[np.argmax(z)]
    return softmax(np.where(kept(z, s), z, -np.inf) / s.temperature)


def generate(
    logits: Logits,
    prompt: Sequence[int],
    budget: int,
    sampling: Sampling | None = None,
    noise: np.ndarray | None = None,
    eos: Sequence[int] = (),
    stops: Sequence[Sequence[int]] = (),
    grammar: Grammar | None = None,
) -> Text:
    """Plain decoding. grammar is a [states, vocab] table of next states, -1 for not allowed, and the first state."""
    s = sampling or Sampling()
    out = Text([], "BUDGET", [], [])
    table, state = grammar or (None, 0)
    while len(out.tokens) < budget:
        raw = np.asarray(logits([*prompt, *out.tokens]), np.float64)
        z = adjusted(raw, s, prompt, out.tokens, eos, None if table is None else table[state] >= 0)
        at = len(prompt) + len(out.tokens)
        noisy = z if s.temperature == 0 else np.where(kept(z, s), z + s.temperature * noise[at], -np.inf)
        token = int(np.argmax(noisy))
        out.tokens.append(token)
        with np.errstate(divide="ignore"):
            out.raw_log_probs.append(float(np.log(softmax(raw)[token])))
            out.log_probs.append(float(np.log(law(z, s)[token])))
        state = 0 if table is None else table[state][token]
        if token in eos:
            return dataclasses.replace(out, finish="EOS")
        ended = any(out.tokens[-len(stop) :] == list(stop) for stop in stops)
        if ended and len(out.tokens) >= s.min_new_tokens:
            return dataclasses.replace(out, finish="STOP")
    return out


def strings(
    logits: Logits,
    prompt: Sequence[int],
    n: int,
    sampling: Sampling,
    eos: Sequence[int] = (),
    grammar: Grammar | None = None,
) -> dict[tuple[int, ...], float]:
    """The exact law of the first n tokens (fewer where one of eos ends the text), all strings of the support."""
    table, start = grammar or (None, 0)

    def extend(output: tuple[int, ...], p: float, state: int) -> Iterator[tuple[tuple[int, ...], float]]:
        if len(output) == n or (output and output[-1] in eos):
            yield output, p
            return
        allowed = None if table is None else table[state] >= 0
        z = adjusted(logits([*prompt, *output]), sampling, prompt, output, eos, allowed)
        for token, q in enumerate(law(z, sampling)):
            if q > 0:
                yield from extend((*output, token), p * q, 0 if table is None else table[state][token])

    return dict(extend((), 1.0, start))
