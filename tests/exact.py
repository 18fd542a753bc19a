"""Rewritten graphs run with float8 numbers that do not round, so that nothing but a wrong rewrite is seen.

The eager executor runs every operator by its definition. Here those that make or multiply float8 numbers
compute in float64 and leave out the cast, and so do casts to bfloat16, in which rowwise recipes have results: scales, layouts, padding
and all other nodes stay what they are. What float8 loses, all but 25 to 30 dB of a result, would hide an error in one row or one term.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from f8fx import executor, ops


def _quantize(
    x: Tensor,
    scale: Tensor,
    *,
    dtype: torch.dtype | None,
    dim: int | None = None,
    transpose: bool = False,
    align: Sequence[int] = (1, 1),
) -> Tensor:
    factor = scale if dim is None else scale.unsqueeze(dim)
    scaled = x.double() * factor.double()
    return _laid_out(scaled.t() if transpose else scaled, align)


def _laid_out(x: Tensor, align: Sequence[int]) -> Tensor:
    rows, columns = (-size % multiple for size, multiple in zip(x.shape, align, strict=True))
    return F.pad(x, (0, columns, 0, rows)).contiguous()


def _quantize_both(
    x: Tensor,
    scale: Tensor,
    scale_t: Tensor,
    *,
    dtype: torch.dtype,
    dim: int | None = None,
    dim_t: int | None = None,
    align: Sequence[int] = (1, 1),
    align_t: Sequence[int] = (1, 1),
) -> tuple[Tensor, Tensor]:
    turned = _quantize(x, scale_t, dtype=dtype, dim=dim_t, transpose=True, align=align_t)
    return _quantize(x, scale, dtype=dtype, dim=dim, align=align), turned


def _quantize_rowwise(
    tensors: Sequence[Tensor],
    groups: Sequence[int],
    *,
    dtype: torch.dtype,
    power_of_2: bool = False,
    matrices: int = 1,
) -> list[Tensor]:
    results = []
    for group in ops.in_groups(tensors, groups):
        x = torch.cat(group)
        scale = ops.scale(ops.amax(x, 1), dtype=dtype, power_of_2=power_of_2)
        columns = torch.cat([ops.amax(part, 0) for part in x.chunk(matrices)])
        results += [_quantize(x, scale, dtype=dtype, dim=1), scale.reciprocal(), columns]
    return results


def _relayout(data: Tensor, *, transpose: bool = False, align: Sequence[int] = (1, 1)) -> Tensor:
    return _laid_out(data.t() if transpose else data, align)


def _scaled_mm(
    left: Tensor,
    right: Tensor,
    left_scale: Tensor,
    right_scale: Tensor,
    bias: Tensor | None = None,
    result_scale: Tensor | None = None,
    dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> Tensor:
    assert left.dtype == right.dtype == torch.float64, "an operand that was not quantized here"
    product = left @ right * left_scale.double() * right_scale.double()
    return (product if bias is None else product + bias).to(_whole(dtype))


def _convert(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(_whole(dtype))


def _whole(dtype: torch.dtype | None) -> torch.dtype | None:
    return torch.float32 if dtype is torch.bfloat16 else dtype


_EXACT: dict[Any, Callable[..., Any]] = {
    ops.quantize: _quantize,
    ops.quantize_both: _quantize_both,
    ops.quantize_rowwise: _quantize_rowwise,
    ops.relayout: _relayout,
    torch.ops.aten._scaled_mm.default: _scaled_mm,
    torch.ops.prims.convert_element_type.default: _convert,
}


@contextmanager
def exact() -> Iterator[list[Any]]:
    """A block in which the eager executor compiles graphs that do not round; the operators that were replaced."""
    boxed, replaced = executor.boxed, []

    def without_rounding(forward: Any) -> Any:
        whole: fx.GraphModule = forward.__self__
        for graph in (module for module in whole.modules() if isinstance(module, fx.GraphModule)):
            for node in graph.graph.nodes:
                if node.target in _EXACT:
                    replaced.append(node.target)
                    node.target = _EXACT[node.target]
            graph.recompile()
        return boxed(whole.forward)

    executor.boxed = without_rounding
    try:
        yield replaced
    finally:
        executor.boxed = boxed
