"""VocabTrim over EAGLE-3 (arXiv 2503.01840): a head that drafts the most frequent tokens, by the target's own columns.

`spec_jax.train.vocabulary.most_frequent` chooses them; nothing is trained for it, and text keeps all tokens.
"""

from spec_jax.drafters.eagle import head
from spec_jax.drafters.eagle.config import EagleConfig
from spec_jax.engine.engine import Engine
from spec_jax.models.config import require
from spec_jax.models.target import Target


def engine(target: Target, max_len: int, network: EagleConfig) -> Engine:
    """EAGLE-3's tree over a smaller map to logits."""
    require(network.draft_vocab_size is not None, "draft_vocab_size", None, "a number of tokens")
    require(not network.own_head, "own_head", True, "False, since the columns are the target's")
    drafter = head.drafter(network, head.dynamic_tree(60, depth=8, width=10, ranking="coupled"))
    return Engine(head.tapped(network, target), max_len, drafter=drafter)
