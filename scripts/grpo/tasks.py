"""Prompts whose answers a program can check: sums, and Python that has to parse."""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Callable

import numpy as np


@dataclasses.dataclass(frozen=True)
class Task:
    """Prompts, the reward of (prompt's index, response) in 0 .. 1, and texts worth imitating, if there are some."""

    prompts: tuple[str, ...]
    reward: Callable[[int, str], float]
    solved: tuple[str, ...] = ()


def worked_sums(count: int, seed: int) -> Task:
    """Sums of two two-digit numbers, worked column by column, for a model that knows these letters only.

    "47+38=" asks for "7+8=15;1+4+3=8;85.". The reward is half for the ones' column, half for the sum.
    """
    rng = np.random.default_rng(seed)
    pairs = [(int(a), int(b)) for a, b in rng.integers(10, 100, (count, 2))]

    def work(a: int, b: int) -> str:
        carry = (a % 10 + b % 10) // 10
        return f"{a % 10}+{b % 10}={a % 10 + b % 10};{carry}+{a // 10}+{b // 10}={carry + a // 10 + b // 10};{a + b}."

    def reward(i: int, response: str) -> float:
        a, b = pairs[i]
        first, *rest = response.split(";")
        ends = re.fullmatch(r"(\d+)\.", rest[-1]) if rest else None
        return 0.5 * (first == work(a, b).split(";")[0]) + 0.5 * (ends is not None and int(ends[1]) == a + b)

    return Task(tuple(f"{a}+{b}=" for a, b in pairs), reward, tuple(work(a, b) for a, b in pairs))


def chat_sums(count: int, seed: int) -> Task:
    """Sums of two digits, for a chat model, behind two solved ones (paragraphs are turns, see `policy.Policy.encode`).

    The reward goes by the last line of the answer: 0 if it is no integer, 1 if it is the sum; between them 0.2 for an
    integer and up to 0.3 for one that is near, less for each unit that it is off, nothing from 10 on. So a small model,
    which hardly ever adds right but mostly answers with a number, still has better and worse samples in a group.
    """
    rng = np.random.default_rng(seed)
    pairs = [(int(a), int(b)) for a, b in rng.integers(1, 10, (count, 2))]

    def reward(i: int, response: str) -> float:
        last = response.strip().split("\n")[-1]
        if not re.fullmatch(r"[0-9]{1,9}", last):
            return 0.0
        off = abs(int(last) - sum(pairs[i]))
        return 1.0 if off == 0 else 0.2 + 0.3 * max(0, 10 - off) / 10

    return Task(tuple(f"2 + 3 =\n\n5\n\n6 + 7 =\n\n13\n\n{a} + {b} =" for a, b in pairs), reward)


def parsing(count: int, seed: int) -> Task:
    """Beginnings of Python functions. The reward is the part of the lines up to which the whole parses."""
    names = ("read", "close", "add", "remove", "find", "count", "update", "copy", "sort", "merge", "split", "parse")
    rng = np.random.default_rng(seed)
    prompts = tuple(
        f"def {names[i % len(names)]}_{names[int(rng.integers(len(names)))]}(self, name):\n    " for i in range(count)
    )

    def reward(i: int, response: str) -> float:
        lines = (prompts[i] + response).split("\n")
        for end in range(len(lines), 1, -1):
            try:
                ast.parse("\n".join(lines[:end]))
            except (SyntaxError, ValueError, MemoryError, RecursionError):
                continue
            return end / len(lines)
        return 0.0

    return Task(prompts, reward)


TASKS = {"toy": worked_sums, "small_hybrid": parsing}
"""By model; all others are asked in words."""
