"""Pass 6b, *materialize*: a residual sum that several kernels read is written to memory once.

``h = x + attention_output`` is read by the norm that follows, once for its amax and once for its
cast, by the next residual sum, and by the norm's backward. Inductor inlines a sum of two tensors into
each of its readers, which then read both; only the matmul's result is saved for the backward, and ``h`` is
summed again there. Written once, ``h`` costs one write and saves a read in every reader.

Only sums are marked whose one summand is the result of a matmul and used nowhere else: saving ``h`` for the
backward then stands in for saving that result, and no byte more is saved.
"""

from __future__ import annotations

import torch
from torch import fx

from f8fx import ops

from .fqn import of_node
from .operand import SAME_ORDER, readers
from .residual import is_residual_sum
from .rewrite import Inserter, Provenance

aten = torch.ops.aten


class Materialize:
    """Marks residual sums, in place."""

    def __call__(self, graph: fx.Graph) -> None:
        for node in graph.find_nodes(op="call_function", target=aten.add.Tensor):
            # with one reader there is nothing to spare
            if is_residual_sum(node) and len(readers(node, SAME_ORDER)) > 1:
                after = node.next
                insert = Inserter(
                    graph, after, Provenance(node.name, of_node(node), "output", "materialize", True)
                )
                written = insert(ops.materialize, node)
                written.meta.update({key: node.meta[key] for key in node.meta if key not in ("val", "f8fx")})
                node.replace_all_uses_with(written, lambda user, own=written: user is not own)
