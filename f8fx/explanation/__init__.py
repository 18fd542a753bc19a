"""``f8fx.explain``: what float8 would do to a model on any hardware, without that hardware.

    print(f8fx.explain(model, tokens, target="h100").gemm_speedup)

The model is traced with tensors that have shapes and no data (:mod:`f8fx.explanation.trace`), so a
model of any size is explained in the memory of its graph. Every matmul gets a row: its module, sizes,
what was decided and why, and what the cost model predicts.

What is *not* predicted: everything that is no matmul (attention kernels, norms, optimizer), so the
speedup of a training step is smaller than that of its matmuls; and the gain from kernels better or worse
than those the cost model was fitted to. Where a graph breaks inside a module, names are relative to that
module, as everywhere in ``torch.compile``.
"""

from .model import explain
from .replica import ExplainError
from .result import Explanation, Row

__all__ = ["ExplainError", "Explanation", "Row", "explain"]
