"""The multi-token-prediction (NEXTN) head of Qwen3-Next and Qwen3.5 as a drafter: chains and trees.

DeepSeek-V3's head (arXiv 2412.19437), used again and again on its own output, as FastMTP does (arXiv 2509.18362): each
step pairs the drafted token's embedding with the head's output behind the token before.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from spec_jax.checks import check_sizes
from spec_jax.drafters.head_tree import HeadTree
from spec_jax.models import mtp, on_mesh, qwen
from spec_jax.models.gated_attention import KeyValues
from spec_jax.models.mtp import MtpState
from spec_jax.models.qwen import Qwen, QwenParams
from spec_jax.models.qwen_text import final_norm
from spec_jax.models.target import Target
from spec_jax.topology.branching import Branching
from spec_jax.topology.coupling import Learner
from spec_jax.topology.growth import Growth
from spec_jax.tree import Tree


@dataclasses.dataclass(frozen=True)
class Window:
    """What the head remembers of a text: the first `sinks` pairs and the last `size` ones.

    Windowed-MTP: StreamingLLM's window and sinks (arXiv 2309.17453) for the draft head's attention alone. The cache is
    a ring of sinks + size slots, whatever the text's length. Pairs that are read together, in a prefill chunk, a commit
    or a draft, see each other besides; the target reads all of the text, so only acceptance can change.
    """

    size: int
    sinks: int = 4

    def __post_init__(self) -> None:
        """Check the settings."""
        check_sizes(self, size=1, sinks=0)


@dataclasses.dataclass(frozen=True)
class MtpHead:
    """The head as a `Head`; its parameters are `params` of the target's.

    Raises ValueError for a target without an MTP head, or without the tap that the head reads (see `tapped`).
    """

    target: Qwen
    window: Window | None = None

    def __post_init__(self) -> None:
        """Check that the target has what is needed."""
        if not isinstance(self.target, Qwen) or not self.target.config.mtp:
            raise ValueError(f"target: got {self.target!r}, takes a Qwen model whose config has an MTP head")
        last = self.target.config.num_layers
        if last not in self.target.taps:
            raise ValueError(f"target: got taps {self.target.taps}, takes taps that hold {last}, the last hidden state")

    @property
    def vocab_size(self) -> int:
        """The target's."""
        return self.target.vocab_size

    def init(self, params: QwenParams, batch: int, max_len: int) -> tuple[MtpState, Float[Array, "b hidden"]]:
        """No pairs, with room for all of a text, or for the window."""
        slots = None if self.window is None else self.window.sinks + self.window.size
        target = self.target if self.target.mesh is None else on_mesh.whole(self.target)
        state = mtp.init_state(target.config, params, batch, max_len, slots)
        if self.target.mesh is not None:
            state = on_mesh.settled(self.target, state)
        return state, jnp.zeros((batch, self.target.config.hidden_size), params.embedding.dtype)

    def taken(self, features: Float[Array, "b n taps hidden"]) -> Float[Array, "b n hidden"]:
        """The last hidden state."""
        return features[:, :, self.target.taps.index(self.target.config.num_layers)]

    def context(self, params: QwenParams, taken: Float[Array, "b n hidden"]) -> Float[Array, "b n hidden"]:
        """Behind the target's final norm, as the head's output is behind its own."""
        return final_norm(self.target.config, params, taken)

    def score(
        self,
        params: QwenParams,
        state: MtpState,
        context: Float[Array, "b n hidden"],
        tree: Tree,
        staged: KeyValues | None = None,
        nodes: tuple[Int[Array, ""] | int, int] | None = None,
    ) -> tuple[Float[Array, "b n hidden"], KeyValues]:
        """See `models.mtp.score`; its logits are left aside, so that a compiler drops them."""
        target, args = self.target, (params, state, context, tree, staged)
        nodes = (0, tree.tokens.shape[1]) if nodes is None else nodes
        if target.mesh is None:
            return _score(target, *args, nodes)
        return on_mesh.score(target, _score, *args, nodes=nodes, batch=tree.tokens.shape[0])

    def logits(self, params: QwenParams, context: Float[Array, "b n hidden"]) -> Float[Array, "b n vocab"]:
        """By the target's head."""
        if self.target.mesh is None:
            return qwen.head(params, context)
        part = lambda _, params, context: {"logits": qwen.head(params, context)}  # noqa: E731
        return on_mesh.call(self.target, part, params, context, batch=context.shape[0])["logits"]

    def commit(self, state: MtpState, staged: KeyValues, length: Int[Array, "b"]) -> MtpState:
        """The first `length` pairs behind the others; with a window, in the place of the oldest."""
        b, m = length.shape[0], staged.k.shape[2]
        path = jnp.broadcast_to(jnp.arange(m), (b, m))
        sinks = self.window.sinks if self.window else 0
        if self.target.mesh is None:
            return mtp.commit(state, staged, path, length, sinks)
        part = lambda _own, _none, *args: mtp.commit(*args, sinks=sinks)  # noqa: E731
        return on_mesh.call(self.target, part, None, state, staged, path, length, batch=b)

    def insert(self, state: MtpState, rows: Int[Array, "r"], other: MtpState) -> MtpState:
        """Rows replaced."""
        return mtp.insert(state, rows, other)

    def release(self, state: MtpState, rows: Int[Array, "r"]) -> MtpState:
        """Rows emptied."""
        return mtp.release(state, rows)


def _score(
    target: Qwen, params: QwenParams, state: MtpState, context: Array, tree: Tree, staged: KeyValues | None, nodes: Any
) -> tuple[Array, KeyValues]:
    output, rows = mtp.score(target.config, params, state, context, tree, staged, nodes)
    return output.context, rows


def tapped(target: Target) -> Qwen:
    """The target, made to return its last hidden state, which the head reads, beside its other taps."""
    if not isinstance(target, Qwen):
        raise ValueError(f"target: got {target!r}, takes a Qwen model whose config has an MTP head")
    last = target.config.num_layers
    return target if last in target.taps else dataclasses.replace(target, taps=(*target.taps, last))


def params(target: QwenParams) -> QwenParams:
    """The drafter's parameters: those of the target that the head uses, the same arrays, none copied.

    Raises ValueError for a model without an MTP head.
    """
    if target.mtp is None:
        raise ValueError("target: got parameters without an MTP head, takes those of a model with mtp.* tensors")
    return dataclasses.replace(target, layers=())


def drafter(
    target: Target, growth: Growth | Branching, window: Window | None = None, learner: Learner | None = None
) -> HeadTree:
    """A drafter for `tapped(target)`, which the engine's target has to be; its parameters are `params(...)`."""
    return HeadTree(MtpHead(tapped(target), window), growth, learner or Learner())


def chain(k: int) -> Growth:
    """k steps of the head's likeliest token, k + 1 nodes; verify with `match`."""
    if not isinstance(k, int) or isinstance(k, bool) or k < 1:
        raise ValueError(f"k: got {k!r}, takes an integer of at least 1")
    return Growth(nodes=k + 1, depth=k, width=1, children=1)
