"""A Tunix rollout engine that speculates: a class for `ClusterConfig.rollout_engine`, or a functools.partial over it.

    ClusterConfig(..., rollout_engine=SpecRollout)
    ClusterConfig(..., rollout_engine=functools.partial(SpecRollout, sizes=(8, 32), lora_scale=2.0))

Needs google-tunix (extra `rl`); nothing else in spec_jax does.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from tunix.generate import tokenizer_adapter
from tunix.rl.rollout import base_rollout

from spec_jax.control.throughput import Throughput
from spec_jax.drafters.siblings import Siblings
from spec_jax.engine.engine import Engine
from spec_jax.models.llama import Llama
from spec_jax.models.qwen import Qwen
from spec_jax.rollout import tunix_models
from spec_jax.rollout.engine import RolloutEngine
from spec_jax.rollout.log_probs import teacher_forced
from spec_jax.rollout.records import Rollout
from spec_jax.rollout.toggle import Toggle
from spec_jax.sampling.settings import Sampling

_USED_THETA = 1_000_000


def siblings(target: Llama | Qwen, max_len: int) -> Engine:
    """The default engine: earlier and concurrent samples of the same prompt draft, in trees of up to 15 tokens."""
    controller = Throughput(prior=64.0)
    return Engine(target, max_len, drafter=Siblings(), controller=controller, widths=(1, 4, 8, 16))


class SpecRollout(base_rollout.BaseRollout):
    """Rolls out a Tunix Llama 3, Qwen 2 / 2.5, Qwen 3 (dense or sparse) or Gemma 3 (text) on the actor's own arrays.

    In the conventions of Tunix's vanilla rollout: tokens end before the first end-of-sequence token; log-probs are
    log_softmax(logits / T) of the token, whatever the truncation; prompts are left-padded. Greedy where top_p is None
    or the temperature 0. Unlike there every row has a key of its own, and every call other keys: `rollout_config.seed`
    if set, else `key`, with the number of the call folded in.
    """

    def __init__(
        self,
        rollout_actor: Any = None,
        tokenizer: Any = None,
        mesh: Any = None,
        rollout_config: Any = None,
        *,
        build: Callable[[Any, int], Engine] = siblings,
        sizes: Sequence[int] | None = None,
        key: Array | int = 0,
        toggle: Toggle | None = Toggle(),  # noqa: B008
        lora_scale: float | None = None,
        check: bool = True,
        drafter_params: Any = None,
        refresh: Callable[[Any, Any], Any] | None = None,
        **options: Any,
    ) -> None:
        """Set up; RLCluster gives the first four.

        Args:
            rollout_actor: the policy; its arrays are read anew in every call, so that weights shared with the trainer
                are always the newest.
            tokenizer: with encode, decode, bos_id, eos_id and pad_id, as Tunix wraps them.
            mesh: not used: programs follow their parameters' sharding.
            rollout_config: not used: every call brings its own.
            build: (target, max_len) -> engine.
            sizes: compiled batch sizes; None: the first call's rows, and a quarter of them.
            key: where the rows' keys come from when the config has no seed.
            toggle: see `RolloutEngine`; None always speculates.
            lora_scale: alpha / rank of the actor's LoRA parameters, if it has some.
            check: compare log-probs with the actor's first. It also tells which rotary base the model uses.
            drafter_params: those of a drafter that `build` gives; `update_drafter` takes others. One that shares arrays
                of the policy, as an EAGLE head does its embedding, is made of every policy by `derive` or `refresh`.
            refresh: (target, policy) -> a `Refresh`, which is told of every call's rollouts, and trains the drafter
                before the next call.
            options: further ones of `RolloutEngine`.

        Raises:
            ValueError: for a model that can't be mapped, or whose logits are not the actor's; for more than one of
                drafter_params, refresh and derive.
        """
        given = {"drafter_params": drafter_params, "refresh": refresh, "derive": options.get("derive")}
        if len(several := [name for name, x in given.items() if x is not None]) > 1:
            raise ValueError(f"{', '.join(several)}: got all of these, takes one")
        if rollout_actor is None or tokenizer is None:
            raise ValueError("rollout_actor, tokenizer: got None, takes a Tunix model and its tokenizer")
        if not isinstance(tokenizer, tokenizer_adapter.TokenizerAdapter):
            tokenizer = tokenizer_adapter.TokenizerAdapter(tokenizer)
        self._actor, self._tokenizer, self._lora_scale = rollout_actor, tokenizer, lora_scale
        self._build, self._sizes, self._key, self._options = build, sizes, key, {"toggle": toggle, **options}
        self._calls, self._engine, self._seen, self._saved = 0, None, [], None
        self._drafter_params, self.refresh = drafter_params, None
        self._target = self._matching() if check else tunix_models.target_for(rollout_actor)
        if refresh is not None:
            self.refresh = refresh(self._target, self._params())
            self._options["derive"] = self.refresh.derive
        self.last: Rollout | None = None

    @property
    def engine(self) -> RolloutEngine | None:
        """The rollout engine; None before the first call."""
        return self._engine

    def generate(self, prompts: list[str], rollout_config: Any, **kwargs: Any) -> Any:
        """Generate for every prompt; Tunix has repeated them for their group already. The first call compiles all."""
        if kwargs:
            raise ValueError(f"generate: got {', '.join(sorted(kwargs))}, takes prompts and rollout_config only")
        c = rollout_config
        tokens = [self._encode(p) for p in prompts]
        unique, group = grouped(tokens)
        last, engine = self._engine, self._engine_for(len(tokens), max(map(len, tokens)), c)
        engine.update_params(self._params(), self._drafter_params, new=self._is_new())
        if engine is not last:
            engine.warm_up(unique[0], c.max_tokens_to_generate, _sampling(c), len(unique), group)
        if self._saved is not None:
            engine.restore(self._saved)
            self._saved = None
        settings = {"group": group, "sampling": _sampling(c), "key": self._call_key(c)}
        self.last = rollout = engine.generate(unique, c.max_tokens_to_generate, **settings)
        engine.release_params()
        if self.refresh is not None:
            self.refresh.tell(unique, rollout)
        eos = np.array(self._eos(c))
        kept = [row[mask][: _until(row[mask], eos)] for row, mask in zip(rollout.tokens, rollout.mask, strict=True)]
        logs = None
        if c.return_logprobs:
            logs = [x[: len(k)].copy() for x, k in zip(rollout.log_probs, kept, strict=True)]
        width = c.max_prompt_length
        if width is None or width < max(map(len, tokens)):
            width = 1 << (max(map(len, tokens)) - 1).bit_length()
        padded = np.full((len(tokens), width), self.pad_id(), np.int32)
        for row, ids in zip(padded, tokens, strict=True):
            row[width - len(ids) :] = ids
        text = [self._tokenizer.decode(k.tolist()) for k in kept]
        return base_rollout.RolloutOutput(
            text=text, logits=[], tokens=kept, left_padded_prompt_tokens=padded, logprobs=logs
        )

    def get_per_token_logps(self, prompt_tokens: Array, completion_tokens: Array) -> Array:
        """Log-probs [B, T] of completions under the policy at temperature 1, as Tunix's; 0 for pad tokens."""
        return _per_token(self._target, self._params(), prompt_tokens, completion_tokens, self.pad_id())

    def update_params(self, params: Any, filter_types: tuple[Any, ...] | None = None) -> None:
        """Take new parameters, all or (LoRA) some of them, in the actor's sharding and dtype; their paths say which.

        Raises ValueError for a path that the actor lacks.
        """
        like = dict(jax.tree.flatten_with_path(nnx.state(self._actor))[0])

        def fitting(path: Any, x: Array) -> Array:
            old = like.get(path)
            if old is None:
                raise ValueError(f"params: got {jax.tree_util.keystr(path)}, takes parameters of the actor")
            x = x if x.dtype == old.dtype else x.astype(old.dtype)
            return x if x.sharding == old.sharding else jax.device_put(x, old.sharding)

        nnx.update(self._actor, jax.tree.map_with_path(fitting, params))

    def update_drafter(self, drafter_params: Any) -> None:
        """Take other parameters of the drafter, of the same shapes; ValueError where there were none to begin with."""
        if self._drafter_params is None:
            raise ValueError("drafter_params: got some, takes none for an engine that began without")
        self._drafter_params = drafter_params

    def state(self) -> dict[str, Any]:
        """What the next call depends on besides the actor and the drafter, to be saved with them.

        Raises ValueError before the first call.
        """
        if self._engine is None:
            raise ValueError("state: got no call so far, takes one before")
        self._engine.update_params(self._params(), new=False)
        found = self._engine.state()
        self._engine.release_params()
        return {"calls": np.int32(self._calls), "engine": found}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a state of a rollout of the same settings, with the next call, which raises what doesn't fit."""
        self._calls, self._saved = int(state["calls"]), state["engine"]

    def pad_id(self) -> int:
        """The tokenizer's."""
        return self._tokenizer.pad_id()

    def eos_id(self) -> int:
        """The tokenizer's."""
        return self._tokenizer.eos_id()

    def model(self) -> Any:
        """The actor."""
        return self._actor

    def _state(self) -> dict[str, Any]:
        return nnx.to_pure_dict(nnx.state(self._actor, nnx.Param))

    def _params(self) -> Any:
        return tunix_models.params_of(self._actor, jax.tree.map(_alone, self._state()), self._lora_scale)

    def _is_new(self) -> bool:
        """Whether the actor holds other arrays than the last call read, of which none is kept alive."""
        leaves, seen = jax.tree.leaves(self._state()), self._seen
        self._seen = [weakref.ref(x) for x in leaves]
        return len(seen) != len(leaves) or any(ref() is not x for ref, x in zip(seen, leaves, strict=True))

    def _engine_for(self, rows: int, longest: int, config: Any) -> RolloutEngine:
        """The engine, or a new one, which remembers as much, where a call asks for a longer text or other ends."""
        need = longest + config.max_tokens_to_generate
        room = max(need, config.kv_cache_size or 0)
        eos = self._eos(config)
        old = self._engine
        if old is not None and old.engine.max_len >= need and old.eos == eos:
            return old
        sizes = self._sizes or sorted({-(-rows // 4), rows})
        engine = self._build(self._target, room)
        self._engine = RolloutEngine(
            engine, None, key=self._key, sizes=sizes, eos=eos, pad_id=self.pad_id(), **self._options
        )
        if old is not None:
            self._engine.take_over(old)
        return self._engine

    def _call_key(self, config: Any) -> Array:
        key = self._key if config.seed is None else config.seed
        if isinstance(key, int | np.integer):
            key = jax.random.key(int(key), impl="threefry2x32")
        elif not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
            key = jax.random.wrap_key_data(key, impl="threefry2x32") if key.ndim else jax.random.key(key)
        self._calls += 1
        return jax.random.fold_in(key, self._calls - 1)

    def _eos(self, config: Any) -> tuple[int, ...]:
        return tuple(int(t) for t in config.eos_tokens or [self.eos_id()])

    def _encode(self, prompt: str) -> list[int]:
        """A prompt's tokens, behind one beginning-of-sequence token, as Tunix's sampler has them."""
        bos = [self._tokenizer.bos_id()] if self._tokenizer.bos_id() else []
        return list(self._tokenizer.dedup_bos_ids(bos + list(self._tokenizer.encode(prompt))))

    def _matching(self) -> Llama | Qwen:
        """The target whose logits are the actor's, by a text of a few tokens."""
        c, params = self._actor.config, self._params()
        n = 16
        tokens = jnp.arange(1, n + 1)[None] * 7 % tunix_models.target_for(self._actor).vocab_size
        mask = jnp.tril(jnp.ones((1, n, n), bool))
        want = self._actor(tokens, jnp.arange(n)[None], None, mask)[0].astype(jnp.float32)
        want = jax.nn.log_softmax(want, axis=-1)
        after = jnp.take_along_axis(want[:, :-1], tokens[:, 1:, None], axis=-1)[..., 0]
        best, apart = None, math.inf
        own = getattr(c, "rope_theta", None)  # a Gemma 3 has two, and uses them
        for theta in (None,) if own is None else dict.fromkeys((float(own), float(_USED_THETA))):
            target = tunix_models.target_for(self._actor, theta)
            got = teacher_forced(target, params, tokens, jnp.array([n]), 1.0, n)[:, 1:]
            difference = float(jnp.abs(got - after).max())
            if difference < apart:
                best, apart = target, difference
        exact = jax.tree.leaves(self._state())[0].dtype == jnp.float32
        most = 1e-3 if exact and getattr(c, "dtype", jnp.float32) == jnp.float32 else 0.25
        if best is None or not apart <= most:
            raise ValueError(
                f"rollout_actor: got a {type(self._actor).__name__} whose log-probs are {apart:.2g} from the mapped "
                f"model's, takes one within {most}"
            )
        return best


def grouped(prompts: Sequence[Sequence[int]]) -> tuple[list[Sequence[int]], int]:
    """Prompts without their repeats, and how often each stood in a row; all of them and 1 where that differs."""
    ends = [i for i in range(len(prompts)) if i + 1 == len(prompts) or list(prompts[i]) != list(prompts[i + 1])]
    runs = [b - a for a, b in zip([-1, *ends[:-1]], ends, strict=True)]
    group = math.gcd(*runs)
    return list(prompts[::group]), group


def _alone(x: Array) -> Array:
    """An array on a mesh of one device as one without a mesh, of the same buffer, whatever axes its trainer names."""
    return x.addressable_data(0) if len(x.sharding.device_set) == 1 and hasattr(x.sharding, "mesh") else x


def _until(tokens: np.ndarray, eos: np.ndarray) -> int:
    """How many tokens stand before the first end-of-sequence token."""
    hits = np.flatnonzero(np.isin(tokens, eos))
    return int(hits[0]) if len(hits) else len(tokens)


def _sampling(config: Any) -> Sampling:
    """Tunix's settings as ours; a top_p of None means greedy there."""
    if config.top_p is None or config.temperature == 0:
        return Sampling()
    top_k = config.top_k if config.top_k and config.top_k > 0 else 0
    return Sampling(temperature=config.temperature, top_p=config.top_p, top_k=top_k)


def _per_token(target: Any, params: Any, prompts: Array, completions: Array, pad_id: int) -> Array:
    """Left-padded prompts and right-padded completions as texts from position 0, scored, and cut to the completions."""
    size = prompts.shape[1]
    before = size - (prompts != pad_id).sum(1)
    text = jnp.concatenate([prompts, completions], axis=1)
    text = jax.vmap(lambda row, n: jnp.roll(row, -n))(text, before)
    count = (completions != pad_id).sum(1)
    logs = teacher_forced(target, params, text, size - before + count)
    logs = jax.vmap(lambda row, n: jnp.roll(row, n))(logs, before)[:, size:]
    return jnp.where(jnp.arange(completions.shape[1]) < count[:, None], logs, 0.0)
