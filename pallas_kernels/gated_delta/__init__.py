"""Draft trees on recurrent targets: the gated delta rule and its relatives, without a state per node."""

from pallas_kernels.gated_delta.api import gated_delta
from pallas_kernels.gated_delta.chunks import chunked
from pallas_kernels.gated_delta.factors import Pending, Result, Staged, fold, gather

__all__ = ["Pending", "Result", "Staged", "chunked", "fold", "gated_delta", "gather"]
