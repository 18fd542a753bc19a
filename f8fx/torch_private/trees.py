"""Nested lists, tuples and dicts of values (``torch.utils._pytree``)."""

from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

__all__ = ["tree_leaves", "tree_map", "tree_map_only"]
