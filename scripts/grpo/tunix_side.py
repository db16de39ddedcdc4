"""The same task trained by Tunix's GRPO learner: with its vanilla rollout, and with ours in its place.

Their keys differ, so their texts do: rewards are compared as curves, and rollout times over the tokens they gave.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from spec_jax.models.qwen import QwenParams
from spec_jax.models.qwen_config import QwenConfig

from .policy import END, LETTERS
from .tasks import Task


class Letters:
    """The toy's tokenizer, as Tunix asks for one; it has no beginning-of-sequence token."""

    def encode(self, text: str, **_: Any) -> list[int]:
        """A token per letter."""
        return [LETTERS.index(c) for c in text]

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        """The letters of tokens; those that are none are left out."""
        return "".join(LETTERS[i] for i in ids if i < END)

    def bos_id(self) -> int:
        """None."""
        return 0

    def eos_id(self) -> int:
        """The end."""
        return END

    def pad_id(self) -> int:
        """Behind the end."""
        return END + 1


def model_of(config: QwenConfig, params: QwenParams) -> Any:
    """Tunix's Qwen 3 with copies of the parameters."""
    from tunix.models.qwen3 import model as qwen3

    sizes = {
        "num_layers": config.num_layers,
        "vocab_size": config.vocab_size,
        "embed_dim": config.hidden_size,
        "hidden_dim": config.intermediate_size,
        "num_heads": config.num_heads,
        "head_dim": config.head_dim,
        "num_kv_heads": config.num_kv_heads,
        "rope_theta": int(config.rope.theta),
        "norm_eps": config.rms_norm_eps,
    }
    model = qwen3.Qwen3(qwen3.ModelConfig(**sizes), rngs=nnx.Rngs(0))
    tree: Any = params
    layers = {}
    for i, layer in enumerate(tree.layers):
        a, m = layer.mixer, layer.mlp
        maps = {f"{n}_proj": {"w": getattr(a, n).kernel} for n in "qkvo"}
        layers[i] = {
            "input_layernorm": {"w": layer.mixer_norm},
            "post_attention_layernorm": {"w": layer.mlp_norm},
            "attn": maps | {"q_norm": {"w": a.q_norm}, "k_norm": {"w": a.k_norm}},
            "mlp": {f"{n}_proj": {"kernel": getattr(m, n).kernel} for n in ("gate", "up", "down")},
        }
    new = {
        "embedder": {"input_embedding": tree.embedding.T},
        "layers": layers,
        "final_norm": {"w": tree.norm},
        "lm_head": {"w": tree.head.kernel},
    }
    state = nnx.state(model, nnx.Param)
    old = nnx.to_pure_dict(state)
    nnx.replace_by_pure_dict(state, jax.tree.map(lambda x, y: jnp.array(y.reshape(x.shape)), old, new))
    nnx.update(model, state)
    return model


def compare(
    config: QwenConfig, params: QwenParams, task: Task, batch: int, group: int, max_new: int, steps: int, rate: float
) -> dict[str, Any]:
    """Rewards, tokens and rollout seconds by step, of both rollout engines."""
    from spec_jax.rollout.tunix import SpecRollout

    ours = functools.partial(SpecRollout, key=0)
    given = (config, params, task, batch, group, max_new, steps, rate)
    return {name: _train(engine, *given) for name, engine in (("vanilla", "vanilla"), ("ours", ours))}


def _train(
    engine: Any,
    config: QwenConfig,
    params: QwenParams,
    task: Task,
    batch: int,
    group: int,
    max_new: int,
    steps: int,
    rate: float,
) -> dict[str, list[float]]:
    from tunix.rl import rl_cluster
    from tunix.rl.grpo import grpo_learner
    from tunix.rl.rollout import base_rollout

    places = {prompt: i for i, prompt in enumerate(task.prompts)}
    found: dict[str, list[float]] = {"reward": [], "seconds": [], "tokens": []}

    def reward(prompts: Sequence[str], completions: Sequence[str], **_: Any) -> list[float]:
        rewards = [task.reward(places[p], c) for p, c in zip(prompts, completions, strict=True)]
        found["reward"].append(float(np.mean(rewards)))
        return rewards

    longest = max(map(len, task.prompts))
    width = 1 << (longest - 1).bit_length()
    roles = (rl_cluster.Role.ACTOR, rl_cluster.Role.ROLLOUT, rl_cluster.Role.REFERENCE)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    cluster_config = rl_cluster.ClusterConfig(
        role_to_mesh=dict.fromkeys(roles, mesh),
        rollout_engine=engine,
        training_config=rl_cluster.RLTrainingConfig(
            actor_optimizer=optax.adam(rate), eval_every_n_steps=10**6, max_steps=steps
        ),
        rollout_config=base_rollout.RolloutConfig(
            max_tokens_to_generate=max_new,
            temperature=1.0,
            max_prompt_length=width,
            kv_cache_size=width + max_new,
        ),
    )
    make = getattr(rl_cluster, "RLEngine", rl_cluster.RLCluster)
    cluster = make(actor=model_of(config, params), tokenizer=Letters(), cluster_config=cluster_config)
    inner = cluster.rollout.generate

    def timed(*args: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter()
        out = inner(*args, **kwargs)
        found["seconds"].append(time.perf_counter() - begin)
        found["tokens"].append(float(sum(map(len, out.tokens))))
        return out

    cluster.rollout.generate = timed
    names = inspect.signature(grpo_learner.GRPOLearner.__init__).parameters
    algorithm = grpo_learner.GRPOConfig(num_generations=group, beta=0.0)
    learner = grpo_learner.GRPOLearner(
        **{"rl_engine" if "rl_engine" in names else "rl_cluster": cluster}, algo_config=algorithm, reward_fns=reward
    )
    count = len(task.prompts)
    data = [{"prompts": [task.prompts[(s * batch + i) % count] for i in range(batch)]} for s in range(steps)]
    learner.train(data)
    return found
