"""A separate small model as the drafter: a chain of its own choices, coupled to the target's noise or sampled."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from spec_jax.checks import check_sizes
from spec_jax.drafters.drafter import Chain, Committed, Context
from spec_jax.drafters.stopping import Classifier
from spec_jax.models.target import Output, Target
from spec_jax.sampling import history, transform
from spec_jax.topology.sampled import draw_key
from spec_jax.tree import Draft, Law, Tree


@flax.struct.dataclass
class SmallModelState:
    """The model's own state, and the staged rows of the draft that is being verified."""

    model: Any
    staged: Any


@dataclasses.dataclass(frozen=True)
class SmallModel(Chain):
    """Drafts a chain of k tokens with another model of the same vocabulary (arXiv 2211.17192, 2302.01318).

    "coupled": each token is the model's own argmax of z + T G under the target's noise of that position, so that
    sampled drafts agree with the target as often as greedy ones (verify with `match`). "sampled": each token is drawn
    by an independent stream, keyed by node and position so that no two rounds share a draw, and the draft carries its
    laws (verify with `rejection` or `block`). The row's transforms apply either way.

    The model scores every drafted token, the last one too, so that its state can follow any verdict. max_len and block
    fix the state's size and must be at least the engine's.

    A row's chain ends before a token of which the model is less sure than `least`, as in Draft & Verify (arXiv
    2309.08168) and SVIP; drafting ends with the last row's chain. How sure it is depends on its law alone, not on what
    is drawn from it, so sampled drafts stay exact.

    Attributes:
        model: the model; its parameters are the drafter's.
        k: most tokens of a draft.
        mode: see above.
        block: tokens of a prefill chunk.
        least: how sure the model must be of a token, 0 .. 1; 0: all k are drafted.
        sure: "peak", the likeliest token's chance, or "entropy", 1 - sqrt(entropy in nats), at least 0: SVIP's bound on
            acceptance as its abstract tells it, the factor in it being our reading, or a `stopping.Classifier`. Greedy
            rows have no law to draw from; theirs is that at temperature 1.
    """

    model: Target
    k: int
    mode: Literal["coupled", "sampled"] = "coupled"
    block: int = 64
    least: float = 0.0
    sure: Literal["peak", "entropy"] | Classifier = "peak"

    keeps_draft = True

    def __post_init__(self) -> None:
        """Check the settings."""
        check_sizes(self, k=1)
        if self.mode not in ("coupled", "sampled"):
            raise ValueError(f"mode: got {self.mode!r}, takes 'coupled' or 'sampled'")
        if not 0 <= self.least <= 1:
            raise ValueError(f"least: got {self.least!r}, takes a number in 0 .. 1")
        if self.sure not in ("peak", "entropy") and not isinstance(self.sure, Classifier):
            raise ValueError(f"sure: got {self.sure!r}, takes 'peak', 'entropy' or a Classifier")

    @property
    def vocab_size(self) -> int:
        """The model's."""
        return self.model.vocab_size

    def init(self, params: Any, batch: int, max_len: int) -> SmallModelState:
        """Empty rows."""
        state = self.model.init_state(params, batch, max_len + max(self.block, self.nodes))
        return SmallModelState(state, self.blank(params, state, batch))

    def tap(self, output: Output) -> None:
        """The target's outputs are not needed."""

    def observe(self, params: Any, state: SmallModelState, committed: Committed) -> SmallModelState:
        """Prefill a chunk, or commit the accepted path of the pending draft."""
        if committed.tree is None:
            _, model = self.model.prefill(params, state.model, committed.tokens, committed.length)
        else:
            path = jnp.minimum(committed.path, self.k)
            model = self.model.commit(state.model, state.staged, path, committed.length)
        return dataclasses.replace(state, model=model)

    def propose(self, params: Any, state: SmallModelState, context: Context) -> tuple[Draft, SmallModelState]:
        """The chain, and the state with its rows staged."""
        draft, model, staged = self.chain(params, state.model, state.staged, context)
        return draft, SmallModelState(model, staged)

    def chain(
        self, params: Any, model: Any, staged: Any, context: Context, whole: bool = True
    ) -> tuple[Draft, Any, Any]:
        """A draft behind a state of the model, that state as score leaves it, and the draft's staged rows.

        `staged` is written over, whatever it holds. The rows of a chain's k-th token are staged if `whole`.
        """
        batch, n = context.tokens.shape[0], self.nodes
        parent = jnp.broadcast_to(jnp.arange(-1, self.k), (batch, n))
        tokens = jnp.zeros((batch, n), jnp.int32).at[:, 0].set(context.anchor)
        past = jax.vmap(history.from_text, (0, 0, 0, 0, None))(
            context.tokens, context.prompt_length, context.length, context.state, self.vocab_size
        )
        laws = jnp.zeros((batch, n, self.vocab_size)) if self.mode == "sampled" else None
        confidence = jnp.ones((batch, n))
        valid = jnp.zeros((batch, n), bool).at[:, 0].set(True)

        def score(model: Any, tokens: Array, staged: Any, i: Array | int) -> Any:
            tree = Tree(tokens, parent, jnp.ones((batch, n), bool))
            return self.model.score(params, model, tree, staged, (i, 1))

        def choose(i: Array | int, output: Output, carry):
            tokens, staged, past, laws, confidence, valid = carry
            token, log_law, sure = self._choose(output.logits[:, 0], past, context, i)
            past = jax.vmap(lambda h, t: h.step(t, context.constraint))(past, jnp.maximum(token, 0))
            here = jnp.minimum(i + 1, self.k)
            write = i < self.k
            tokens = tokens.at[:, here].set(jnp.where(write, jnp.maximum(token, 0), tokens[:, here]))
            confidence = confidence.at[:, here].set(jnp.where(write, sure, confidence[:, here]))
            goes_on = valid[:, jnp.minimum(i, self.k)] & context.active & (sure >= self.least)
            valid = valid.at[:, here].set(jnp.where(write, goes_on, valid[:, here]))
            if laws is not None:
                laws = laws.at[:, here].set(jnp.where(write, log_law, laws[:, here]))
            return tokens, staged, past, laws, confidence, valid

        def step(carry):
            i, rest = carry
            output, staged, _ = score(model, rest[0], rest[1], i)
            return i + 1, choose(i, output, (rest[0], staged, *rest[2:]))

        def drafting(carry) -> Array:
            i, rest = carry
            return (i < (n if whole else self.k)) & rest[-1][:, jnp.minimum(i, self.k)].any()

        output, staged, model = score(model, tokens, staged, 0)
        carry = choose(0, output, (tokens, staged, past, laws, confidence, valid))
        _, (tokens, staged, _, laws, confidence, valid) = lax.while_loop(drafting, step, (jnp.int32(1), carry))
        draft = Draft(
            tree=Tree(tokens, parent, valid),
            confidence=confidence,
            law=None if laws is None else Law(laws),
            proposal=self.mode,
        )
        return draft, model, staged

    def insert(self, state: SmallModelState, rows: Int[Array, "r"], other: SmallModelState) -> SmallModelState:
        """Rows replaced."""
        return dataclasses.replace(
            state, model=self.model.insert(state.model, rows, self.model.materialize(other.model))
        )

    def release(self, state: SmallModelState, rows: Array, tokens: Array, length: Array) -> SmallModelState:
        """Rows emptied."""
        return dataclasses.replace(state, model=self.model.release(state.model, rows))

    def _choose(self, logits: Array, past: Any, context: Context, i: Array | int) -> tuple[Array, Array, Array]:
        """Each row's token, the log of its law, and how sure it is: what is known of the token before it is drawn."""

        def one(z, row, past, key, length):
            z = transform.adjust(z, row, past, context.constraint)
            law = transform.log_probs(z, row)
            key = key if self.mode == "coupled" else draw_key(key, i + 1)
            token = transform.choose(z, row, key, length + i)
            return token, law, self._sure(jnp.where(row.sampled, law, jax.nn.log_softmax(z)), i)

        return jax.vmap(one)(logits, context.sampling, past, context.key, context.length)

    def _sure(self, law: Array, depth: Array | int = 0) -> Array:
        """How sure a law is of its token, at a depth counted from 0."""
        if isinstance(self.sure, Classifier):
            return self.sure(law, depth)
        p = jnp.exp(law)
        if self.sure == "peak":
            return p.max()
        entropy = -jnp.where(p > 0, p * law, 0.0).sum()
        return jnp.maximum(0.0, 1 - jnp.sqrt(jnp.maximum(entropy, 0.0)))

    def blank(self, params: Any, state: Any, batch: int) -> Any:
        """Room for a full draft's staged rows; nothing of it is ever committed."""
        parent = jnp.broadcast_to(jnp.arange(-1, self.k), (batch, self.nodes))
        tree = Tree(jnp.zeros_like(parent), parent, jnp.ones(parent.shape, bool))
        shapes = jax.eval_shape(lambda p, s: self.model.score(p, s, tree)[1], params, state)
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
