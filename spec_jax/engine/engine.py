"""The static side of an engine: which pieces, which sizes. What is traced stands in EngineParams and EngineState."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.struct
from jaxtyping import Array, Float

from spec_jax.checks import check_sizes
from spec_jax.control.budget import Always, BudgetController
from spec_jax.drafters.drafter import Drafter
from spec_jax.drafters.none import NoDrafter
from spec_jax.models.target import Target
from spec_jax.sampling.constraint import Constraint
from spec_jax.verify.match import match
from spec_jax.verify.verdict import Verdict

Rule = Callable[..., Verdict]


@dataclasses.dataclass(frozen=True)
class Engine:
    """A target, a drafter, a rule, a controller and the static sizes of the compiled program. Hashable.

    Attributes:
        target: the model whose text is wanted.
        max_len: longest text of a row, prompt and output together.
        drafter: the proposer; NoDrafter is plain decoding.
        rule: the verifier rule, (key, draft, scores, m) -> Verdict; `match` by default.
        controller: chooses one of `widths` per round.
        widths: compiled node counts, ascending, the last of which is the drafter's; 1 is a plain step. Empty: the full
            draft only.
        log_probs: record log-probs of emitted tokens.
        prefill_chunk: tokens per prefill pass.
        max_eos, max_stops, max_stop_length, max_bias: room per request for end-of-sequence ids, stop sequences, tokens
            in one, and biased or banned tokens.
    """

    target: Target
    max_len: int
    drafter: Drafter = NoDrafter()
    rule: Rule = match
    controller: BudgetController = Always()
    widths: tuple[int, ...] = ()
    log_probs: bool = False
    prefill_chunk: int = 64
    max_eos: int = 4
    max_stops: int = 4
    max_stop_length: int = 8
    max_bias: int = 16

    def __post_init__(self) -> None:
        """Check that the pieces fit together."""
        check_sizes(self, max_len=1, prefill_chunk=1, max_eos=1, max_stops=1, max_stop_length=1, max_bias=1)
        nodes, vocab = self.drafter.nodes, self.drafter.vocab_size
        if not self.widths:
            object.__setattr__(self, "widths", (nodes,))
        if list(self.widths) != sorted(set(self.widths)) or self.widths[0] < 1 or self.widths[-1] != nodes:
            raise ValueError(
                f"widths: got {self.widths}, takes ascending node counts that end in the drafter's {nodes}"
            )
        if vocab is not None and vocab != self.target.vocab_size:
            raise ValueError(
                f"drafter: got one for {vocab} token ids, takes one for the target's {self.target.vocab_size}"
            )

    @property
    def block(self) -> int:
        """Most tokens a round can emit: the drafter's depth plus the bonus token."""
        return self.drafter.depth + 1

    @property
    def slots(self) -> int:
        """Slots of the target's state: the longest text, and room behind it for a commit or prefill chunk to write."""
        return self.max_len + max(self.block, self.prefill_chunk)


@flax.struct.dataclass
class EngineParams:
    """What requests share: parameters of target and drafter, the constraint table, and the cost of a round by width.

    cost[i] is the time of a round that verifies `engine.widths[i]` nodes a row, in any unit; the controller reads it.
    """

    target: Any
    drafter: Any
    constraint: Constraint
    cost: Float[Array, "w"]
