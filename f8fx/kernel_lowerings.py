"""Lowerings to Triton kernels of our own, and to Inductor's where ours are not for.

Ours are for GPUs whose canary (:mod:`f8fx.canary`) found them to be right, and for rows of known length; how many there are
may be found out at run time, if it is known that there are any.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch

from . import ops
from .kernel_forms import candidates, form
from .kernels import computed_amaxes, launch, row_cast_columns
from .torch_private import EXPRESSION_IMPORTS, Lowering, as_strided_keeps_offsets, expressions, jit_function

aten = torch.ops.aten


def quantize_rowwise(
    table: Lowering,
    tensors: Sequence[Any],
    groups: Sequence[int],
    *,
    dtype: torch.dtype,
    power_of_2: bool = False,
    matrices: int = 1,
) -> list[Any]:
    """Row casts and column amaxes."""
    sources = [table.row_major(x) for x in tensors]
    launched = _row_cast_columns(table, sources, groups, dtype, power_of_2, matrices)
    if launched is not None:
        return launched
    results = []
    for group in ops.in_groups(sources, groups):
        x = group[0] if len(group) == 1 else table.concatenation(group, 0)
        scale = table(ops.scale, table(ops.amax, x, 1), dtype=dtype, power_of_2=power_of_2)
        copy = table(ops.quantize, x, scale, dtype=dtype, dim=1)
        results += [copy, table(aten.reciprocal, scale), _amax_of_columns(table, x, matrices)]
    return results


def _amax_of_columns(table: Lowering, x: Any, matrices: int) -> Any:
    """The amaxes of the columns of each matrix, one after the other."""
    if matrices == 1:
        return table(ops.amax, x, 0)
    rows, columns = x.get_size()
    each = table(aten.view, x, [matrices, rows // matrices, columns])
    turned = table(aten.clone, table(aten.permute, each, [0, 2, 1]), memory_format=torch.contiguous_format)
    return table(ops.amax, table(aten.view, turned, [matrices * columns, rows // matrices]), 1)


def _row_cast_columns(
    table: Lowering,
    sources: Sequence[Any],
    groups: Sequence[int],
    dtype: torch.dtype,
    power_of_2: bool,
    matrices: int,
) -> list[Any] | None:
    """One launch of :mod:`kernels.row_cast_columns`; ``None`` where it is not for."""
    kernel = row_cast_columns
    rows = [x.get_size()[0] for x in sources]
    layouts = {table.numbers((x.get_size()[1], *x.get_stride())) for x in sources}
    (layout,) = layouts if len(layouts) == 1 else (None,)
    if layout is None or not _is_allowed(sources[0]) or not all(map(table.is_positive, rows)):
        return None
    columns, stride, inner = layout
    if inner != 1:
        return None
    multiprocessors = table.multiprocessors(sources[0].get_device())
    step = kernel.rows_per_program(sum(map(table.hint, rows)), columns, multiprocessors)
    each = int(rows[0]) // matrices if matrices > 1 else 0
    programs = sum(table.ceil_div(size, step) for size in ([each] * matrices if each else rows))
    copy = table.empty((sum(rows), columns), dtype, sources[0])
    inverse = table.empty((sum(rows),), torch.float32, sources[0])
    amaxes = table.zeros((len(groups), matrices * columns), torch.int32, sources[0])
    arguments = {
        **kernel.arguments(sources, rows, groups, columns, stride, (copy, inverse, amaxes)),
        **kernel.constants(columns, step, dtype, power_of_2, each),
    }
    triton = launch.kernels("row_cast_columns").row_cast_columns_kernel
    table.launched(
        triton, programs, candidates(kernel.choices(columns)), arguments, ("out", "inverse", "amaxes")
    )
    results, start = [], 0
    for index, heights in enumerate(ops.in_groups(rows, groups)):
        end = start + sum(heights)
        amax = table(aten.view.dtype, table(aten.select, amaxes, 0, index), torch.float32)
        part = table.part(inverse, start, end)
        if len(groups) > 1 and not as_strided_keeps_offsets():
            part = table.copied(part)
        results += [table.part(copy, start, end), part, amax]
        start = end
    return results


def amax_both(table: Lowering, x: Any, others: Sequence[Any], summed: Sequence[Any]) -> list[Any]:
    """Amaxes of rows and of columns, of the columns of other tensors, and sums of columns."""
    whole = table.parts(x)
    if whole is None or whole.dim == 1:
        parts = [x] if whole is None else list(whole.values)
        launched = _computed_amaxes(table, parts, others, summed)
        if launched is not None:
            return launched.values()
        if whole is not None:
            return _by_width(table, parts, others, summed)
    amaxes = [table(ops.amax, x, 1), *(table(ops.amax, value, 0) for value in (x, *others))]
    return [*amaxes, *(column_sums(table, value) for value in summed)]


def _by_width(
    table: Lowering, parts: Sequence[Any], others: Sequence[Any], summed: Sequence[Any]
) -> list[Any]:
    """A launch for all parts of one width that there are expressions for."""
    rows: list[Any] = []
    columns: dict[int, Any] = {}
    aside: dict[int, Any] = {}
    sums: dict[int, Any] = {}
    widths = dict.fromkeys(tuple(part.get_size()) for part in parts)
    for shape in widths:
        own, along, added = (
            [value for value in values if tuple(value.get_size()) == shape and expressions([value])]
            for values in (parts, others, summed)
        )
        found = _computed_amaxes(table, own, along, added) if own else None
        if found is None:
            continue
        rows.append(found.rows)
        columns |= {id(part): amax for part, amax in zip(own, found.columns(table), strict=True)}
        aside |= {id(value): amax for value, amax in zip(along, found.others, strict=True)}
        sums |= {id(value): total for value, total in zip(added, found.sums, strict=True)}
    rows += [table.realized(table(ops.amax, part, 1)) for part in parts if id(part) not in columns]
    largest = reduce(lambda a, b: table(aten.maximum, a, b), rows)
    of_parts = [columns[id(part)] if id(part) in columns else table(ops.amax, part, 0) for part in parts]
    return [
        tiled(largest),
        table.concatenation(of_parts, 0),
        *(aside[id(value)] if id(value) in aside else table(ops.amax, value, 0) for value in others),
        *(sums[id(value)] if id(value) in sums else column_sums(table, value) for value in summed),
    ]


def column_sums(table: Lowering, x: Any) -> Any:
    """The sums of the columns, part by part."""
    whole = table.parts(x)
    if whole is None or whole.dim != 1:
        return table(aten.sum.dim_IntList, x, [0])
    return table.concatenation([column_sums(table, part) for part in whole.values], 0)


@dataclass(frozen=True)
class _Launched:
    """What one launch for parts that stand side by side, and others, gave.

    Attributes:
        rows: the amaxes of the parts' rows.
        side_by_side: those of the columns, of one part after the other.
        widths: of the parts.
        others: the amaxes of the others' columns.
        sums: of columns.
    """

    rows: Any
    side_by_side: Any
    widths: tuple[int, ...]
    others: tuple[Any, ...]
    sums: tuple[Any, ...]

    def values(self) -> list[Any]:
        """As :func:`amax_both` gives them."""
        return [self.rows, self.side_by_side, *self.others, *self.sums]

    def columns(self, table: Lowering) -> list[Any]:
        """The amaxes of each part's columns."""
        ends = [0, *itertools.accumulate(self.widths)]
        return [table.part(self.side_by_side, start, end) for start, end in itertools.pairwise(ends)]


def _computed_amaxes(
    table: Lowering, parts: Sequence[Any], others: Sequence[Any], summed: Sequence[Any]
) -> _Launched | None:
    """One launch of a kernel that :mod:`kernels.computed_amaxes` writes; ``None`` where it is not for."""
    kernel, x = computed_amaxes, parts[0]
    values = [*parts, *others]
    shapes = {tuple(value.get_size()) for value in [*values, *summed]}
    (shape,) = shapes if len(shapes) == 1 else (None,)
    if shape is None or not _is_allowed(x):
        return None
    (rows, columns), known = shape, table.numbers(shape[1:])
    if known is None or not table.is_positive(rows):
        return None
    written = expressions([*values, *summed])
    if written is None:
        return None
    results, sums = written.results[: len(values)], written.results[len(values) :]
    distinct = list(dict.fromkeys(sums))  # equal expressions are one name: summed once, read by each
    if not set(sums) <= set(results):
        return None
    (columns,) = known
    arguments: dict[str, Any] = {f"in{index}": value for index, value in enumerate(written.inputs)}
    arguments["amaxes"] = table.zeros((kernel.length(rows, columns, len(values)),), torch.int32, x)
    bands = table.ceil_div(rows, kernel.ROWS)
    if sums:
        arguments["sums"] = table.empty((len(distinct), bands, columns), torch.float32, x)
    text = kernel.source(
        len(written.inputs),
        written.lines,
        results,
        len(parts),
        [*map(results.index, distinct)],
        EXPRESSION_IMPORTS,
    )
    table.launched(
        jit_function(text, kernel.NAME),
        bands * kernel.across(columns),
        candidates(kernel.choices(len(distinct))),
        {**arguments, "M": rows, **kernel.constants(columns, len(distinct))},
        ("amaxes", "sums") if sums else ("amaxes",),
    )
    found = table(aten.view.dtype, arguments["amaxes"], torch.float32)
    ends = [0, rows, *(rows + count * columns for count in range(len(parts), len(values) + 1))]
    amaxes = [table.part(found, start, end) for start, end in itertools.pairwise(ends)]
    totals = []
    for name, value in zip(sums, summed, strict=True):
        place = distinct.index(name)
        total = table(aten.sum.dim_IntList, table(aten.select, arguments["sums"], 0, place), [0])
        totals.append(table.to_dtype(total, value.get_dtype()))
    widths = (columns,) * len(parts)
    return _Launched(tiled(amaxes[0]), amaxes[1], widths, tuple(amaxes[2:]), tuple(totals))


def _is_allowed(x: Any) -> bool:
    device = x.get_device()
    return device.type == "cuda" and form(device, "one read") == "fused"


def tiled(x: Any) -> Any:
    """The value, marked as what a tiled kernel is to cast with."""
    x.f8fx_tiled = True
    return x


def is_tiled(x: Any) -> bool:
    """Whether a value is :func:`tiled`."""
    return getattr(x, "f8fx_tiled", False)
