"""Lookahead decoding (arXiv 2402.02057): n-grams that the target wrote beside its text, by Jacobi iteration."""

from spec_jax.control.budget import WidestLive
from spec_jax.drafters.lookahead import Lookahead
from spec_jax.engine.engine import Engine
from spec_jax.models.target import Target


def engine(target: Target, max_len: int) -> Engine:
    """W = 15, N = 5, G = 15, the paper's for 7B models: 120 nodes, or 60 where no n-gram begins with the anchor."""
    drafter = Lookahead(window=15, ngram=5, guesses=15)
    widths = (drafter.window_nodes, drafter.nodes)
    return Engine(target, max_len, drafter=drafter, controller=WidestLive(), widths=widths)
