"""The law gate: Pearson's chi-square of sampled strings against their exact law."""

from __future__ import annotations

import dataclasses

import numpy as np
from scipy.stats import chi2

ALPHA = 1e-6


@dataclasses.dataclass
class Fit:
    """p-value, draws outside the support, and total variation of the empirical law."""

    p: float
    outside: int
    distance: float

    @property
    def ok(self) -> bool:
        return self.outside == 0 and self.p > ALPHA


def fit(samples: np.ndarray, law: dict[tuple[int, ...], float]) -> Fit:
    """Samples [N, n], padded with -1, against a law over strings; cells expected fewer than 10 times are pooled."""
    width, base = samples.shape[1], int(samples.max()) + 2
    base = max(base, 2 + max(max(s) for s in law))
    code = lambda s: int(np.dot(np.pad(np.array(s) + 1, (0, width - len(s))), base ** np.arange(width)))  # noqa: E731
    counts = np.bincount((samples + 1) @ base ** np.arange(width), minlength=base**width)
    n = len(samples)
    seen = np.array([counts[code(s)] for s in law], np.float64)
    expected = n * np.array(list(law.values()))
    assert abs(expected.sum() / n - 1) < 1e-9
    big = expected >= 10
    pooled = [(seen[~big].sum(), expected[~big].sum())] if expected[~big].sum() >= 10 else []
    observed, wanted = np.array([*zip(seen[big], expected[big], strict=True), *pooled]).T
    statistic = ((observed - wanted) ** 2 / wanted).sum()
    p = chi2.sf(statistic, max(1, len(wanted) - 1))
    return Fit(float(p), int(n - seen.sum()), float(abs(seen - expected).sum() / n / 2))
