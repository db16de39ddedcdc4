"""What a rule sees of the target: transformed logits of one node at a time, so that a walk pays for its path alone."""

from __future__ import annotations

import flax.struct
from jaxtyping import Array, Float, Int, Num

from spec_jax import noise
from spec_jax.sampling import reduce, transform
from spec_jax.sampling.constraint import Constraint
from spec_jax.sampling.history import History
from spec_jax.sampling.settings import SamplingRow


@flax.struct.dataclass
class Scores:
    """The target's logits over one draft tree, with the row's settings.

    position is the text index of the token chosen at the root. `history` is that of the text up to and with the anchor.
    The static flags leave parts out of the program that no row of the batch needs: `sampled` the noise and truncation,
    `adjusted` the history-dependent transforms; `want_log_probs` adds the log-probs of emitted tokens. features are the
    target's tapped ones, for rules that judge by them; exact rules look at logits alone.
    """

    logits: Float[Array, "n vocab"]
    row: SamplingRow
    history: History
    position: Int[Array, ""]
    constraint: Constraint
    sampled: bool = flax.struct.field(pytree_node=False, default=True)
    adjusted: bool = flax.struct.field(pytree_node=False, default=True)
    want_log_probs: bool = flax.struct.field(pytree_node=False, default=False)
    features: Num[Array, "n ..."] | None = None

    def z(self, node: Int[Array, ""], history: History) -> Float[Array, "vocab"]:
        """Node's logits, adjusted for the history at the node; not yet divided by the temperature or truncated."""
        if not self.adjusted:
            return self.logits[node]
        return transform.adjust(self.logits[node], self.row, history, self.constraint)

    def choose(self, z: Float[Array, "vocab"], key: noise.Key, position: Int[Array, ""]) -> Int[Array, ""]:
        """The token that the row's transform and noise pick at a text position."""
        return transform.choose(z, self.row, key, position, self.sampled)

    def log_probs(self, z: Float[Array, "vocab"]) -> Float[Array, "vocab"]:
        """Log-probs of the law that the row's tokens have."""
        return transform.log_probs(z, self.row)

    def emitted(self, node: Array, token: Array, z: Array) -> tuple[Array, Array]:
        """Log-probs of an emitted token: under the model (temperature 1, no transform), and under the row's law."""
        raw = self.logits[node, token] - reduce.log_sum_exp(self.logits[node])
        return raw, self.log_probs(z)[token]
