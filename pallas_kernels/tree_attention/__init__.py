"""Attention of draft-tree nodes: a committed prefix by its length, and the tree's own rows by an N x N mask."""

from pallas_kernels.tree_attention.api import tree_attention

__all__ = ["tree_attention"]
