"""Draft & Verify (arXiv 2309.08168): the target without some of its layers drafts for itself.

Every second layer is skipped but the first and the last; the paper looks for a set by Bayesian optimisation, once a
model. The draft ends where it is not sure, which the paper does too, adapting the threshold to acceptance.
"""

from typing import Any

from spec_jax.drafters.small_model import SmallModel
from spec_jax.engine.engine import Engine
from spec_jax.models import views


def drafter_params(target_params: Any) -> Any:
    """The layers that are kept, the target's own arrays."""
    return views.fewer(target_params, _skipped(len(target_params.layers)))


def engine(target: Any, max_len: int) -> Engine:
    """Chains of up to eight coupled tokens, for a `Llama` or `Qwen` of at least three layers."""
    view = views.without(target, _skipped(target.config.num_layers))
    return Engine(target, max_len, drafter=SmallModel(view, k=8, least=0.3))


def _skipped(layers: int) -> range:
    if layers < 3:
        raise ValueError(f"target: got one of {layers} layers, takes one of at least 3")
    return range(1, layers - 1, 2)
