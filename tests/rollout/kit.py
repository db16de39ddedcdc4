"""Rollout engines over toy targets, and prompts for them."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax.control.cost import CostModel
from spec_jax.control.throughput import Throughput
from spec_jax.drafters.siblings import Siblings
from spec_jax.engine.engine import Engine
from spec_jax.models import llama
from spec_jax.models.config import LlamaConfig
from spec_jax.models.llama import Llama
from spec_jax.models.toy import AuditTarget, audit_table
from spec_jax.rollout.engine import RolloutEngine
from spec_jax.rollout.toggle import RoundCost

WORDS, MAX_LEN, BUDGET, GROUP = 8, 48, 24, 3
ROOM = {"max_eos": 2, "max_stops": 1, "max_stop_length": 1, "max_bias": 1, "prefill_chunk": 8}
PROMPTS = [[1, 2, 3, 4, 5], [4, 4], [7], [1, 2, 3, 4, 6]]
DRAFTER = Siblings(nodes=6, candidates=4, longest=6, peers=2, memory=64)
TARGET = AuditTarget(WORDS)


@functools.cache
def policy(seed: int = 0, scale: float = 3.0) -> jax.Array:
    return audit_table(WORDS, seed, scale)


def engine(drafter: Any = None, **changes: Any) -> Engine:
    if drafter is not None and "widths" not in changes:
        changes |= {"controller": Throughput(), "widths": (1, drafter.nodes)}
    given = {} if drafter is None else {"drafter": drafter}
    return Engine(changes.pop("target", TARGET), MAX_LEN, **{**ROOM, **given, **changes})


def costs(sizes: tuple[int, ...], plain: float = 1.0, drafted: float = 1.02, nodes: int = DRAFTER.nodes):
    """Rounds that cost the same at every size."""
    return {size: RoundCost(plain, CostModel((1, nodes), (plain, drafted))) for size in sizes}


@functools.cache
def plain(**options: Any) -> RolloutEngine:
    return RolloutEngine(engine(), policy(), sizes=(12,), eos=(0,), **options)


def drafting(sizes: tuple[int, ...] = (2, 5), **options: Any) -> RolloutEngine:
    options = {"costs": costs(sizes), "prompts": 3, "prefill_rows": 2, **options}
    return RolloutEngine(engine(DRAFTER), policy(), sizes=sizes, eos=(0,), pad_id=WORDS, **options)


@functools.cache
def small_llama(vocab: int = 24, seed: int = 0, scale: float = 0.3) -> tuple[Llama, Any]:
    """A random transformer in float32."""
    config = LlamaConfig(vocab, 16, 24, 1, 2, 1, 8, tie_word_embeddings=False)
    rng, shapes = np.random.default_rng(seed), {}
    for i in range(config.num_layers):
        at, mlp = f"model.layers.{i}.self_attn", f"model.layers.{i}.mlp"
        shapes |= {f"{at}.q_proj.weight": (16, 16), f"{at}.k_proj.weight": (8, 16), f"{at}.v_proj.weight": (8, 16)}
        shapes |= {f"{at}.o_proj.weight": (16, 16), f"{mlp}.gate_proj.weight": (24, 16)}
        shapes |= {f"{mlp}.up_proj.weight": (24, 16), f"{mlp}.down_proj.weight": (16, 24)}
        shapes |= {f"model.layers.{i}.{n}_layernorm.weight": (16,) for n in ("input", "post_attention")}
    shapes |= {"model.embed_tokens.weight": (vocab, 16), "model.norm.weight": (16,), "lm_head.weight": (vocab, 16)}
    tensors = {name: np.ones(s) if len(s) == 1 else rng.normal(0, scale, s) for name, s in shapes.items()}
    return Llama(config), llama.from_tensors(config, tensors, jnp.float32)
