"""Prompt lookup (arXiv 2304.04487; `prompt_lookup_num_tokens` in transformers): copy what followed the last n-gram."""

from spec_jax.control.budget import WidestLive
from spec_jax.drafters.ngram import NGram
from spec_jax.engine.engine import Engine
from spec_jax.models.target import Target


def engine(target: Target, max_len: int) -> Engine:
    """Seven tokens behind a match of two or three; a plain step where nothing matches."""
    return Engine(target, max_len, drafter=NGram(k=7, n_max=3, n_min=2), controller=WidestLive(), widths=(1, 8))
