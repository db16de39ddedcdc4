"""How far drafts get with the parameters so far: acceptance, measured by the engine that will use them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax.engine.decoder import Decoder, Result
from spec_jax.engine.engine import Engine
from spec_jax.sampling.settings import Sampling


class Evaluation:
    """A measure for `fit`: acceptance on held-out prompts. What is compiled at its first call serves all others.

    Attributes:
        results: those of the last call, in the prompts' order.
    """

    def __init__(
        self,
        engine: Engine,
        target_params: Any,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        *,
        as_drafter: Callable[[Any], Any] = lambda params: params,
        batch: int = 8,
        eos: Sequence[int] = (),
        sampling: Sampling | None = None,
        key: int = 0,
    ) -> None:
        """Set up.

        Args:
            engine: the engine, with the drafter that is trained.
            target_params: the target's parameters.
            prompts: held-out prompts, as token ids.
            max_new_tokens: longest answer.
            as_drafter: the drafter's parameters from the trained ones.
            batch: slots.
            eos: end-of-sequence ids.
            sampling: settings; greedy if None.
            key: the seed of all answers.
        """
        if not prompts:
            raise ValueError("prompts: got none, takes at least one")
        self._engine, self._target, self._as_drafter = engine, target_params, as_drafter
        self._prompts, self._most = prompts, max_new_tokens
        self._batch, self._eos = min(batch, len(prompts)), tuple(eos)
        self._options = {"sampling": sampling, "key": key}
        self._decoder: Decoder | None = None
        self.results: list[Result] = []

    def __call__(self, params: Any) -> dict[str, float]:
        """acceptance_length: tokens per target pass; accepted_k: how often a draft's node at depth k was accepted."""
        drafter = self._as_drafter(params)
        if self._decoder is None:
            drafter = jax.tree.map(jnp.copy, drafter)
            self._decoder = Decoder(self._engine, self._target, drafter, batch=self._batch, eos=self._eos)
        else:
            swap(self._decoder, drafter)
            self._decoder.forget()
        self.results = self._decoder.generate(self._prompts, self._most, **self._options)
        return acceptance(self.results)


def acceptance(results: Sequence[Result]) -> dict[str, float]:
    """Acceptance length over all results, and by depth: of the rounds whose draft was that deep, those that accepted.

    A depth that no draft reached is left out.
    """
    total = lambda name: np.sum([r.counters[name] for r in results], axis=0)  # noqa: E731
    found = {"acceptance_length": float(total("emitted") / max(1, total("rounds")))}
    reached, accepted = np.atleast_1d(total("depth_reached")), np.atleast_1d(total("depth_accepted"))
    shares = {f"accepted_{d + 1}": float(a / r) for d, (a, r) in enumerate(zip(accepted, reached, strict=True)) if r}
    return found | shares


def swap(decoder: Decoder, drafter_params: Any) -> None:
    """Give a decoder new parameters of its drafter, between two steps; nothing is compiled, running requests go on.

    The arrays are copied: a training step uses up those that it is given. Texts do not change, only how fast they come.

    Raises ValueError for parameters of another structure, shape or type.
    """
    old, new = decoder.params.drafter, drafter_params
    describe = lambda tree: jax.tree.map(lambda x: (jnp.shape(x), jnp.result_type(x)), tree)  # noqa: E731
    if jax.tree.structure(old) != jax.tree.structure(new) or describe(old) != describe(new):
        raise ValueError("drafter_params: got other arrays than the drafter has, takes the same shapes and types")
    decoder.params = dataclasses.replace(decoder.params, drafter=jax.tree.map(_copied, new, old))


def _copied(x: jax.Array, like: jax.Array) -> jax.Array:
    """A copy where `like` is; if that is bound to no device, neither is the copy: nothing is compiled anew."""
    if like.committed:
        return jax.device_put(jnp.copy(x), like.sharding)
    return jnp.asarray(jax.device_get(x)) if x.committed else jnp.copy(x)
