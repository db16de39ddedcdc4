"""Windowed-MTP: the target's MTP head sees a sliding window and attention sinks (StreamingLLM, arXiv 2309.17453).

Its cache is a ring of constant size; the target verifies with all of the text, so the text is what it was.
"""

from spec_jax.drafters import mtp
from spec_jax.engine.engine import Engine
from spec_jax.models.target import Target

drafter_params = mtp.params


def engine(target: Target, max_len: int) -> Engine:
    """Chains of three tokens by a head that sees 4 sinks and the last 512 tokens."""
    target = mtp.tapped(target)
    return Engine(target, max_len, drafter=mtp.drafter(target, mtp.chain(3), mtp.Window(512, sinks=4)))
