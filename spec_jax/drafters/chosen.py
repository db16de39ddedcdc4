"""Several drafters in one engine, one of which drafts each round; a policy learns which."""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol, runtime_checkable

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from spec_jax import tree as trees
from spec_jax.drafters.checks import check_follows
from spec_jax.drafters.drafter import Committed, Context, Drafter
from spec_jax.drafters.several import Several, States
from spec_jax.drafters.small_model import SmallModel
from spec_jax.tree import Draft, Tree


@runtime_checkable
class Policy(Protocol):
    """Chooses an arm, and learns from rewards of 0 .. 1 (`control.bandit`). Static and hashable.

    full says whether it reads every arm's reward, not only that of the arm that it chose.
    """

    full: bool

    def init(self, arms: int) -> Any:
        """The state before the first round."""
        ...

    def choose(self, state: Any) -> tuple[Int[Array, ""], Any]:
        """The arm to play, and the state."""
        ...

    def observe(self, state: Any, arm: Int[Array, ""], reward: Float[Array, "k"]) -> Any:
        """The state after a round in which `arm` was played."""
        ...


@flax.struct.dataclass
class ChosenState(States):
    """The drafters' states, the policy's, the drafter of this round, and all drafts of it if all are scored."""

    policy: Any
    arm: Int[Array, ""]
    drafts: tuple[Tree, ...]


@dataclasses.dataclass(frozen=True)
class Chosen(Several):
    """Drafts with one of several drafters a round, which `policy` chooses from earlier verdicts; verify with `match`.

    BanditSpec (arXiv 2505.15141) with a bandit, which runs the chosen drafter alone; Not-a-Bandit (arXiv 2510.20064)
    with full information, where all of them draft every round and each is scored by the text that was emitted. A draft
    that went unverified is known no further than that text, so it counts for at most one token more than the chosen
    one's. Rewards are tokens, and leave out what a drafter costs.

    One drafter serves a whole batch: a choice by row would run all of them. So what is learned is the batch's too, from
    request to request, where BanditSpec begins anew with each.

    All drafters are told everything that is committed. A `SmallModel` that did not draft reads it, one pass a round.
    The parameters are a tuple, one for each drafter, or None if none takes any.

    Attributes:
        drafters: the drafters, all of the same number of nodes; drafts must not be drawn ones.
        policy: how one of them is chosen.

    Raises:
        ValueError: for drafters that can't be told of others' drafts: a `ModelTree`, `Lookahead`, `Combined` or another
            `Chosen`.
    """

    drafters: tuple[Drafter, ...]
    policy: Policy

    keeps_draft = True

    def __post_init__(self) -> None:
        """Check the settings."""
        if len(self.drafters) < 2 or not isinstance(self.drafters, tuple):
            raise ValueError(f"drafters: got {self.drafters!r}, takes a tuple of at least two")
        if len({d.nodes for d in self.drafters}) > 1:
            raise ValueError(f"drafters: got drafts of {[d.nodes for d in self.drafters]} nodes, takes equal ones")
        for d in self.drafters:
            if not isinstance(d, SmallModel):  # which `observe` has read what others drafted
                check_follows("drafters", d)
        sizes = {d.vocab_size for d in self.drafters} - {None}
        if len(sizes) > 1:
            raise ValueError(f"drafters: got ones for {sizes} token ids, takes ones for the same number")

    @property
    def members(self) -> tuple[Drafter, ...]:
        """The drafters."""
        return self.drafters

    @property
    def nodes(self) -> int:
        """That of each."""
        return self.drafters[0].nodes

    @property
    def depth(self) -> int:
        """That of the deepest."""
        return max(d.depth for d in self.drafters)

    @property
    def vocab_size(self) -> int | None:
        """That of those which have one."""
        return next((d.vocab_size for d in self.drafters if d.vocab_size is not None), None)

    def init(self, params: Any, batch: int, max_len: int) -> ChosenState:
        """All states, empty."""
        states = tuple(d.init(p, batch, max_len) for d, p in self._with(params))
        zeros = jnp.zeros((batch, self.nodes), jnp.int32)
        drafts = (Tree(zeros, zeros, zeros > 0),) * (len(states) if self.policy.full else 0)
        return ChosenState(states, self.policy.init(len(states)), jnp.int32(0), drafts)

    def observe(self, params: Any, state: ChosenState, committed: Committed) -> ChosenState:
        """All states after a block was committed, and what a verdict teaches the policy."""
        c, each = committed, list(zip(self._with(params), state.states, strict=True))
        if c.tree is None:
            return dataclasses.replace(state, states=tuple(d.observe(p, s, c) for (d, p), s in each))
        states = []
        for i, ((drafter, own), s) in enumerate(each):
            drew = state.arm == i
            told = dataclasses.replace(c, taps=c.taps[i], own=jnp.where(drew, c.path, -1))
            if isinstance(drafter, SmallModel):
                count = jnp.broadcast_to(jnp.arange(c.path.shape[1]), c.path.shape)
                read = dataclasses.replace(c, taps=None, tree=None, path=count)
                look = lambda d=drafter, p=own, s=s, x=told: d.observe(p, s, x)  # noqa: E731
                s = lax.cond(drew, look, lambda d=drafter, p=own, s=s, x=read: d.observe(p, s, x))
            else:
                s = drafter.observe(own, s, told)
            states.append(s)
        policy = self.policy.observe(state.policy, state.arm, self.rewards(state, c))
        moved = (c.length > 0).any()
        policy = jax.tree.map(lambda new, old: jnp.where(moved, new, old), policy, state.policy)
        return dataclasses.replace(state, states=tuple(states), policy=policy)

    def rewards(self, state: ChosenState, committed: Committed) -> Float[Array, "k"]:
        """What each drafter's draft brought, or would have: the mean over rows that moved, of the greatest depth.

        The chosen one's alone counts if the policy reads no other; then all are given it.
        """
        moved = committed.length > 0
        if state.drafts:
            found = [jax.vmap(_matched)(tree, committed) for tree in state.drafts]
        else:
            found = [jnp.maximum(committed.length - 1, 0)] * len(self.drafters)
        tokens = jnp.stack([jnp.where(moved, x, 0).sum() for x in found])
        return tokens / (jnp.maximum(moved.sum(), 1) * self.depth).astype(jnp.float32)

    def propose(self, params: Any, state: ChosenState, context: Context) -> tuple[Draft, ChosenState]:
        """The chosen drafter's draft. Raises ValueError for drawn ones: their rules need them whoever drafts."""
        arm, policy = self.policy.choose(state.policy)

        def one(i: int) -> tuple[Draft, tuple[Any, ...]]:
            drafter, own = self._with(params)[i]
            draft, s = drafter.propose(own, state.states[i], context)
            if draft.law is not None:
                raise ValueError(f"drafters: got one whose drafts are {draft.proposal}, takes point or coupled ones")
            return dataclasses.replace(draft, proposal="point"), (*state.states[:i], s, *state.states[i + 1 :])

        each = [lambda i=i: one(i) for i in range(len(self.drafters))]
        if not self.policy.full:
            draft, states = lax.switch(arm, each)
            return draft, ChosenState(states, policy, arm, ())
        drafts = [f() for f in each]
        draft = jax.tree.map(lambda *x: jnp.stack(x)[arm], *(d for d, _ in drafts))
        states = tuple(s[i] for i, (_, s) in enumerate(drafts))
        return draft, ChosenState(states, policy, arm, tuple(d.tree for d, _ in drafts))

    def _with(self, params: Any) -> list[tuple[Drafter, Any]]:
        """Each drafter and its parameters."""
        own = (None,) * len(self.drafters) if params is None else params
        if not isinstance(own, tuple) or len(own) != len(self.drafters):
            raise ValueError(f"params: got {type(own).__name__}, takes a tuple of {len(self.drafters)}, or None")
        return list(zip(self.drafters, own, strict=True))


def _matched(tree: Tree, committed: Committed) -> Int[Array, ""]:
    """How many of a row's emitted tokens a draft begins with."""
    c, reach = committed, trees.ancestors(tree.parent)
    depth = reach.sum(-1) - 1
    emitted = jnp.append(c.tokens[1:], 0)
    emitted = jnp.where(jnp.arange(emitted.shape[0]) == c.length - 1, c.next_token, emitted)
    here = emitted[jnp.clip(depth - 1, 0, emitted.shape[0] - 1)]
    right = (depth == 0) | (tree.valid & (depth <= c.length) & (tree.tokens == here))
    return jnp.where((right | ~reach).all(-1), depth, 0).max()
