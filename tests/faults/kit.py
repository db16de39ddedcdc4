"""What the fault tests share: toy tables, drafters with chosen tokens and laws, rules with planted faults, runners."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from spec_jax import noise
from spec_jax.drafters.drafter import Stateless
from spec_jax.engine.engine import Engine, EngineParams
from spec_jax.engine.loop import decode
from spec_jax.engine.requests import request, stack
from spec_jax.engine.rows import Requests, init
from spec_jax.engine.state import EngineState
from spec_jax.models.target import Output
from spec_jax.models.toy import TableTarget
from spec_jax.sampling import constraint, transform
from spec_jax.sampling.constraint import FREE, Constraint
from spec_jax.sampling.history import History, from_text
from spec_jax.sampling.settings import Sampling, SamplingRow, to_row
from spec_jax.tree import Draft, Law, Proposal, Tree
from spec_jax.verify.rejection import rejection
from spec_jax.verify.scores import Scores
from spec_jax.verify.verdict import Walk

# ---

V = 5
START = 5
ROWS = 50_000


def table(rows: np.ndarray) -> jax.Array:
    """A [V + 1, V] table of logits as TableTarget reads it: token V only starts a text and is never emitted."""
    return jnp.asarray(np.concatenate([rows, np.full((V + 1, 1), -np.inf)], axis=1), jnp.float32)
