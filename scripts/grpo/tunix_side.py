"""The same task in Tunix: with its vanilla rollout, and with ours in its place.

Their keys differ, so their texts do. Under one set of parameters many samples of both are compared in law; then
Tunix's GRPO learner trains with each, and their rewards are compared as curves.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from . import two_samples
from .policy import Policy
from .tasks import Task
from .tunix_model import Tokens, model_of

SIDES = ("vanilla", "ours")
Make = Callable[[], Any]


def compare(
    policy: Policy,
    task: Task,
    batch: int,
    group: int,
    max_new: int,
    steps: int,
    rate: float,
    samples: int = 64,
) -> dict[str, Any]:
    """Both in law from the policy's parameters, `samples` of each prompt of a batch; then both trained from there.

    Figures of the training are by step; `reward_difference` is the mean of ours less vanilla's over the steps, and half
    the width of its 95 % interval were the steps independent.
    """
    from spec_jax.rollout.tunix import SpecRollout

    make, tokens = functools.partial(model_of, policy.target, policy.params), Tokens(policy)
    ours = functools.partial(SpecRollout, key=0, sizes=(batch * group,))
    found: dict[str, Any] = {"law": law(make(), tokens, task, task.prompts[:batch], samples, max_new, ours)}
    for name, engine in zip(SIDES, ("vanilla", ours), strict=True):
        found[name] = train(engine, make, tokens, task, batch, group, max_new, steps, rate)
    apart = np.subtract(*(found[name]["reward"] for name in reversed(SIDES)))
    width = 1.96 * float(apart.std(ddof=1)) / len(apart) ** 0.5 if len(apart) > 1 else 0.0
    return found | {"reward_difference": {"mean": float(apart.mean()), "half_width": width}}


def law(
    actor: Any,
    tokens: Tokens,
    task: Task,
    prompts: Sequence[str],
    samples: int,
    max_new: int,
    ours: Any,
    temperature: float = 1.0,
    draws: int = 2000,
) -> dict[str, Any]:
    """Rewards, lengths, log-probs and texts of both rollouts of one actor, by `two_samples.compare`.

    ours: our engine, as `ClusterConfig` takes one; temperature: its, the vanilla rollout's is 1 whatever it is.
    """
    from tunix.rl.rollout import vanilla_rollout

    c = actor.config
    room = rollout_config(tokens, prompts, max_new)
    cache = vanilla_rollout.base_rollout.CacheConfig(room.kv_cache_size, c.num_layers, c.num_kv_heads, c.head_dim)
    engines = (vanilla_rollout.VanillaRollout(actor, tokens, cache), ours(actor, tokens))
    repeated = [p for p in prompts for _ in range(samples)]
    places = [task.prompts.index(p) for p in repeated]
    shaped = lambda x: np.asarray(x, float).reshape(len(prompts), samples)  # noqa: E731
    figures, texts = [], []
    for engine, t in zip(engines, (1.0, temperature), strict=True):
        out = engine.generate(repeated, rollout_config(tokens, prompts, max_new, t))
        logs = [np.sum(x) for x in out.logprobs]
        rewards = [task.reward(i, text) for i, text in zip(places, out.text, strict=True)]
        lengths = [len(t) for t in out.tokens]
        figures.append({"reward": shaped(rewards), "length": shaped(lengths), "log_prob": shaped(logs)})
        rows = [tuple(np.asarray(t).tolist()) for t in out.tokens]
        texts.append([rows[i : i + samples] for i in range(0, len(rows), samples)])
    found = two_samples.compare(figures[0], figures[1], (texts[0], texts[1]), draws)
    return found | {"samples": samples, "prompts": len(prompts)}


def rollout_config(tokens: Tokens, prompts: Sequence[str], max_new: int, temperature: float = 1.0) -> Any:
    """Tunix's settings of a rollout with log-probs."""
    from tunix.rl.rollout import base_rollout

    width = -(-max(len(tokens.encode(p)) for p in prompts) // 8) * 8
    return base_rollout.RolloutConfig(
        max_tokens_to_generate=max_new,
        temperature=temperature,
        max_prompt_length=width,
        kv_cache_size=width + max_new,
        eos_tokens=tokens.ends(),
        return_logprobs=True,
    )


def train(
    engine: Any,
    make: Make,
    tokens: Tokens,
    task: Task,
    batch: int,
    group: int,
    max_new: int,
    steps: int,
    rate: float,
    iterations: int = 1,
) -> dict[str, list[float]]:
    """Tunix's GRPO learner on a model of `make`, with a rollout engine as `ClusterConfig` takes one.

    Returns by step: mean reward, tokens, rollout seconds, and the greatest distance to one of a ratio between the
    trainer's own probability of a token and the rollout's, before the update.
    """
    from tunix.rl import rl_cluster
    from tunix.rl.grpo import grpo_learner

    places = {prompt: i for i, prompt in enumerate(task.prompts)}
    found: dict[str, list[float]] = {"reward": [], "seconds": [], "tokens": [], "off_policy": []}

    def reward(prompts: Sequence[str], completions: Sequence[str], **_: Any) -> list[float]:
        rewards = [task.reward(places[p], c) for p, c in zip(prompts, completions, strict=True)]
        found["reward"].append(float(np.mean(rewards)))
        return rewards

    roles = (rl_cluster.Role.ACTOR, rl_cluster.Role.ROLLOUT, rl_cluster.Role.REFERENCE)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    cluster_config = rl_cluster.ClusterConfig(
        role_to_mesh=dict.fromkeys(roles, mesh),
        rollout_engine=engine,
        training_config=rl_cluster.RLTrainingConfig(
            actor_optimizer=optax.adam(rate), eval_every_n_steps=10**6, max_steps=steps * iterations
        ),
        rollout_config=rollout_config(tokens, task.prompts, max_new),
    )
    # The first is the name on Tunix's main branch.
    make_cluster = getattr(rl_cluster, "RLEngine", None) or rl_cluster.RLCluster
    cluster = make_cluster(actor=make(), tokenizer=tokens, cluster_config=cluster_config)
    inner = cluster.rollout.generate

    def timed(*args: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter()
        out = inner(*args, **kwargs)
        found["seconds"].append(time.perf_counter() - begin)
        found["tokens"].append(float(sum(map(len, out.tokens))))
        found["off_policy"].append(off_policy(cluster.actor_trainer.model, tokens, out, max_new))
        return out

    cluster.rollout.generate = timed
    names = inspect.signature(grpo_learner.GRPOLearner.__init__).parameters
    algorithm = grpo_learner.GRPOConfig(num_generations=group, num_iterations=iterations, beta=0.0)
    learner = grpo_learner.GRPOLearner(
        **{"rl_engine" if "rl_engine" in names else "rl_cluster": cluster}, algo_config=algorithm, reward_fns=reward
    )
    at = np.arange(steps * batch).reshape(steps, batch) % len(task.prompts)
    learner.train([{"prompts": np.array([task.prompts[i] for i in some])} for some in at])
    return found


def off_policy(model: Any, tokens: Tokens, out: Any, size: int) -> float:
    """The greatest distance to one of a ratio of Tunix's own probability of a token to the rollout's.

    size: most tokens of a row. Rows in which the policy emitted the pad id are left out: Tunix takes it for padding.
    """
    from tunix.rl import common

    pad, eos = tokens.pad_id(), tokens.eos_id()
    padded = np.full((len(out.tokens), size), pad)
    for row, kept in zip(padded, out.tokens, strict=True):
        row[: len(kept)] = np.asarray(kept)
    graph, state = nnx.split(model)
    given = (jnp.asarray(out.left_padded_prompt_tokens), jnp.asarray(padded))
    own = np.asarray(common.compute_per_token_logps(graph, state, *given, pad, eos))
    pairs = zip(own, out.logprobs, out.tokens, strict=True)
    apart = [np.abs(np.expm1(a[: len(t)] - np.asarray(b))).max(initial=0.0) for a, b, t in pairs if pad not in t]
    return float(max(apart, default=0.0))
