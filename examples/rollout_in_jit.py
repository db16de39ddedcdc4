"""Policy gradients whose rollouts speculate, in one jit: no engine object, no host between rollout, reward and update.

The policy is a table of logits by the last token; its reward is how often a token is the one before it plus one.
"""

import dataclasses

import jax
import jax.numpy as jnp

from spec_jax import Engine, EngineParams, Sampling, decode, init, request, stack
from spec_jax.drafters.siblings import Siblings
from spec_jax.models.toy import TableTarget
from spec_jax.rollout import memory
from spec_jax.sampling.constraint import free

WORDS, PROMPTS, GROUP, NEW, RATE = 12, 4, 8, 24, 30.0
DRAFTER = Siblings(nodes=8, memory=128, peers=2)
ENGINE = Engine(TableTarget(WORDS), NEW + 8, drafter=DRAFTER, log_probs=True, prefill_chunk=4)
PROMPT = jnp.repeat(jnp.arange(PROMPTS), GROUP)
REQUESTS = stack([request(ENGINE, [int(p)], NEW, sampling=Sampling(temperature=1.0)) for p in PROMPT])


def rollout(policy, earlier, key):
    """Texts of all prompts, what is remembered of them afterwards, and the target passes that they took."""
    params = EngineParams(policy, None, free(WORDS), jnp.ones(1))
    keys = jax.random.key_data(jax.random.split(key, len(PROMPT)))
    state = init(ENGINE, params, dataclasses.replace(REQUESTS, key=keys))
    state = dataclasses.replace(state, drafter=DRAFTER.recall(state.drafter, memory.recall(earlier, PROMPT)))
    rows = decode(ENGINE, params, state).rows
    earlier = memory.remember(earlier, PROMPT, rows.tokens, rows.prompt_length, rows.length)
    return rows.tokens[:, : NEW + 1], rows.raw_log_probs[:, 1 : NEW + 1], earlier, rows.counters.rounds


def advantage(tokens):
    """Rewards against those of each group, and their mean."""
    reward = (tokens[:, 1:] == (tokens[:, :-1] + 1) % WORDS).mean(1).reshape(PROMPTS, GROUP)
    better = (reward - reward.mean(1, keepdims=True)) / (reward.std(1, keepdims=True) + 1e-2)
    return better.reshape(-1, 1), reward.mean()


@jax.jit
def step(policy, earlier, key):
    """One rollout and one update of the policy on it."""
    tokens, old, earlier, rounds = rollout(policy, earlier, key)
    better, reward = advantage(tokens)

    def loss(policy):
        law = jax.nn.log_softmax(policy[tokens[:, :-1]])
        ratio = jnp.exp(jnp.take_along_axis(law, tokens[:, 1:, None], -1)[..., 0] - old)
        return -(ratio * better).mean(), ratio

    gradient, ratio = jax.grad(loss, has_aux=True)(policy)
    figures = {"reward": reward, "tokens_per_pass": tokens[:, 1:].size / rounds.sum(), "ratio": abs(ratio - 1).max()}
    return policy - RATE * gradient, earlier, figures


def main(steps=60):
    """Train, and print as it goes."""
    policy, earlier, history = jnp.zeros((WORDS, WORDS)), memory.empty(PROMPTS, DRAFTER.memory), []
    for i in range(steps):
        policy, earlier, figures = step(policy, earlier, jax.random.fold_in(jax.random.key(0), i))
        history.append({name: float(value) for name, value in figures.items()})
        if i % 10 == 0 or i + 1 == steps:
            print(i, ", ".join(f"{name} {value:.3g}" for name, value in history[-1].items()))
    return history


if __name__ == "__main__":
    main()
