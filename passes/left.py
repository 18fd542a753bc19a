"""Matmuls that are seen, and left as they are, with the reason."""

from __future__ import annotations

from typing import Any

import torch

aten = torch.ops.aten

UNEVEN = "split unevenly by tensor parallelism"
ACTIVATIONS = "matmul of two activations"
DISTANCES = "distances from products and squared norms"
HELD = "matmul of buffers or of an optimizer's state"
BATCHED = "batched matmul of two activations"
BATCHED_WEIGHT = "batched matmul with a weight for each batch"
BATCHED_MATRIX = "batched matmul with one matrix"
BATCHED_GRADIENT = "batched gradient of one matrix"
BATCHED_WEIGHT_GRADIENT = "batched gradient of a weight for each batch"
GROUPED = "grouped matmul of experts"
GROUPED_GRADIENT = "grouped gradient of experts"
GROUPED_ACTIVATIONS = "grouped matmul of two activations"
GROUPED_MATRIX = "grouped matmul with one matrix"
GROUPED_FORM = "grouped matmul of another form"
GROUPED_DYNAMIC = "grouped matmul of matrices whose sizes change"
_VECTOR = "matrix times vector"
_FUSED = "inside a fused operator"
_FLOAT8 = "already float8"
_INTEGER = "integer matmul"
_SPARSE = "sparse matmul"
_RESULT = "matmul with a result of another dtype"

#: Operators that no pass converts.
LEFT: dict[Any, str] = {
    aten.baddbmm.default: BATCHED,
    aten.mv.default: _VECTOR,
    aten.addmv.default: _VECTOR,
    aten._scaled_mm.default: _FLOAT8,
    aten._grouped_mm.default: GROUPED,
    aten._scaled_grouped_mm.default: _FLOAT8,
    aten._scaled_mm_v2.default: _FLOAT8,
    aten._scaled_grouped_mm_v2.default: _FLOAT8,
    aten.mm.dtype: _RESULT,
    aten.addmm.dtype: _RESULT,
    aten.bmm.dtype: _RESULT,
    aten.baddbmm.dtype: _RESULT,
    aten._int_mm.default: _INTEGER,
    aten._weight_int8pack_mm.default: _INTEGER,
    aten._weight_int4pack_mm.default: _INTEGER,
    aten._trilinear.default: _FUSED,
    aten._transformer_encoder_layer_fwd.default: _FUSED,
    aten._native_multi_head_attention.default: _FUSED,
    aten.mkldnn_rnn_layer.default: _FUSED,
}
#: Those that not every torch has.
_SOME_HAVE: dict[str, str] = {
    "_weight_int4pack_mm_for_cpu": _INTEGER,
    "_weight_int4pack_mm_with_scales_and_zeros": _INTEGER,
    "_dyn_quant_matmul_4bit": _INTEGER,
    "_sparse_semi_structured_mm": _SPARSE,
    "_sparse_semi_structured_linear": _SPARSE,
    "_sparse_semi_structured_addmm": _SPARSE,
    "_cslt_sparse_mm": _SPARSE,
    "_cudnn_rnn": _FUSED,
}
LEFT |= {getattr(aten, name).default: reason for name, reason in _SOME_HAVE.items() if hasattr(aten, name)}
#: Where the left operand is, ``[..., m, k]``: the first argument but of these.
LEFT_OPERAND: dict[Any, int] = {
    aten.baddbmm.default: 1,
    aten.addmv.default: 1,
    aten.addmm.dtype: 1,
    aten.baddbmm.dtype: 1,
}
