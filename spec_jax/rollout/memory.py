"""Earlier outputs of every prompt: arrays of fixed size that outlive a batch, an epoch and a policy.

A store of texts can slow a rollout down, never change it: what it drafts is verified like any other draft.
"""

from __future__ import annotations

import dataclasses

import flax.struct
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from spec_jax.checks import check_size
from spec_jax.drafters.matches import NO_TOKEN
from spec_jax.drafters.suffix import append

LEAD = 8
"""Tokens of the prompt's end that are kept before each output: what its first tokens are found by."""


@flax.struct.dataclass
class Memory:
    """A ring of tokens per prompt, each output with NO_TOKEN behind it, and the policy version that wrote last."""

    tokens: Int[Array, "p m"]
    head: Int[Array, "p"]
    version: Int[Array, "p"]


def empty(prompts: int, size: int) -> Memory:
    """Nothing remembered of `prompts` prompts, `size` tokens each."""
    check_size("prompts", prompts, 1)
    check_size("size", size, 1)
    zeros = lambda: jnp.zeros(prompts, jnp.int32)  # noqa: E731, two arrays: a caller may donate them
    return Memory(jnp.full((prompts, size), NO_TOKEN, jnp.int32), zeros(), zeros())


def remember(
    memory: Memory,
    at: Int[Array, "r"],
    tokens: Int[Array, "r text"],
    prompt_length: Int[Array, "r"],
    length: Int[Array, "r"],
    version: Int[Array, ""] | int = 0,
) -> Memory:
    """The memory with the outputs tokens[prompt_length:length] of r rows, over the oldest ones of their prompts.

    at: each row's prompt; a row whose `at` is out of range, or that has no output, is left out.
    """
    prompts = memory.head.shape[0]
    at = jnp.where((at < 0) | (length <= prompt_length), prompts, at)
    begin = jnp.maximum(prompt_length - LEAD, 0)

    def one(carry: Memory, row: tuple[Array, ...]) -> tuple[Memory, None]:
        slot, text, first, last = row
        inside = jnp.minimum(slot, prompts - 1)
        ring, head = append(carry.tokens[inside], carry.head[inside], text, first, last)
        put = lambda x, value: x.at[slot].set(value, mode="drop")  # noqa: E731
        return Memory(put(carry.tokens, ring), put(carry.head, head), put(carry.version, version)), None

    return lax.scan(one, memory, (at, tokens, begin, length))[0]


def recall(memory: Memory, at: Int[Array, "r"]) -> Int[Array, "r m"]:
    """What is remembered of r prompts; nothing of one out of range."""
    inside = (at >= 0) & (at < memory.head.shape[0])
    return jnp.where(inside[:, None], memory.tokens[jnp.where(inside, at, 0)], NO_TOKEN)


def clear(memory: Memory, at: Int[Array, "r"]) -> Memory:
    """The memory without r prompts; those out of range are left out."""
    at = jnp.where(at < 0, memory.head.shape[0], at)
    return dataclasses.replace(
        memory,
        tokens=memory.tokens.at[at].set(NO_TOKEN, mode="drop"),
        head=memory.head.at[at].set(0, mode="drop"),
    )


def drop_older(memory: Memory, version: Int[Array, ""] | int) -> Memory:
    """The memory without prompts that no policy from `version` on has written."""
    old = memory.version < version
    return dataclasses.replace(memory, tokens=jnp.where(old[:, None], NO_TOKEN, memory.tokens))
