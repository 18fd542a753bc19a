"""GB/s of the fused kernels, as a share of what copying the same source reaches on this GPU.

Bytes are those that have to move: the source read once, every float8 copy written once. The same bytes are counted for every version, so that a version
which reads twice shows as half as fast, and 100 % is the speed of ``Tensor.copy_``.

Calls follow each other on sources that rotate, together several times the L2 cache: every call reads from
memory, and meets a cache as full of unwritten lines as it leaves it.

``f8fx`` is the Triton kernel with its starting tile, ``unclamped`` leaves saturation to the conversion,
``tuned`` is the best of its tiles, or warps and stages, ``inductor`` is the definition through ``torch.compile``, and ``torchao`` its eager
functions through ``torch.compile``. Every version's bits are compared with the definition's.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from f8fx.kernels import cast as definition
from f8fx.kernels import (
    cast_transpose,
    column_scale,
    computed_amaxes,
    groups,
    launch,
    row_cast,
    row_cast_columns,
)
from f8fx.torch_private import jit_function, tuned

from . import common, running
from .common import Grid, Row, console, show
from .timing import in_a_row, interleaved
from .variants import one_line

NAME = "kernels"
CASE = ("kernel", "rows", "columns")
#: What the shapes stand for: tokens x width of Llama 8B's block, its widest activation, two of its weights, and
#: one that is too small to fill the machine.
SHAPES = ((8192, 4096), (8192, 14336), (4096, 14336), (4096, 4096), (1024, 1024))
QUICK = ((8192, 4096), (8192, 14336), (1024, 1024))
VERSIONS = ("f8fx", "unclamped", "tuned", "inductor", "torchao")
FP8 = torch.float8_e4m3fn

#: Bytes of the sources that calls rotate among; the L2 cache of an H200 has 50 to 60 MiB.
ROTATED_BYTES, MOST_SOURCES = 256 << 20, 128

Version = Callable[[], Any]
Sources = Sequence[Tensor]
#: Matrices below each other, as the weights of experts are.
MATRICES = 8
_OF_MATRICES = f"row amax + cast, column amax of {MATRICES} matrices"
_CLAMP = {"f8fx": True, "tuned": True, "unclamped": False}


def _copies(xs: Sources, name: str, dim: int | None, dim_t: int | None, both: bool) -> list[Version]:
    """Row-major copy, or both copies, from scales that are at hand."""
    scaled = []
    for x in xs:
        scale = definition.scale(definition.amax(x, dim), FP8, False)
        scale_t = scale if dim == dim_t else definition.scale(definition.amax(x, dim_t), FP8, False)
        scaled.append((x, scale, scale_t))
    run: Callable[..., Any]
    if name in _CLAMP:
        options: dict[str, Any] = {"tile": "auto" if name == "tuned" else None, "clamp": _CLAMP[name]}

        def run(x: Tensor, scale: Tensor, scale_t: Tensor) -> Any:
            if both:
                return cast_transpose.cast_transpose(
                    x, scale, scale_t, dtype=FP8, dim=dim, dim_t=dim_t, **options
                )
            return cast_transpose.cast(x, scale, dtype=FP8, dim=dim, **options)
    else:
        cast = _torchao_cast if name == "torchao" else _definition_cast

        def function(x: Tensor, scale: Tensor, scale_t: Tensor) -> Any:
            copy = cast(x, definition.broadcast(scale, dim), False)
            return (copy, cast(x, definition.broadcast(scale_t, dim_t), True)) if both else copy

        run = _compiled(function, xs[0].device)
    return [functools.partial(run, *arguments) for arguments in scaled]


def _compiled(function: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    backend = "inductor" if device.type == "cuda" else "eager"  # a smoke generates no code
    return torch.compile(function, backend=backend, fullgraph=True, dynamic=False)


def _definition_cast(x: Tensor, scale: Tensor, transpose: bool) -> Tensor:
    """``definition.quantize`` without its last copy, which Inductor would launch."""
    limit = torch.finfo(FP8).max
    copy = (x.to(torch.float32) * scale).clamp(min=-limit, max=limit).to(FP8)
    return copy.t().contiguous() if transpose else copy


def _torchao_cast(x: Tensor, scale: Tensor, transpose: bool) -> Tensor:
    from torchao.float8.float8_utils import to_fp8_saturated

    copy = to_fp8_saturated(x.to(torch.float32) * scale, FP8)
    return copy.t().contiguous() if transpose else copy


def _rows(xs: Sources, name: str) -> list[Version]:
    """Row amax, scale and cast."""
    if name in _CLAMP:
        return [functools.partial(row_cast.row_cast, x, dtype=FP8, clamp=_CLAMP[name]) for x in xs]

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        if name == "torchao":
            scale = _torchao_scale(x, -1)
            return _torchao_cast(x, scale, False), scale.squeeze(-1)
        scale = definition.scale(definition.amax(x, 1), FP8, False)
        return _definition_cast(x, scale[:, None], False), scale

    compiled = _compiled(function, xs[0].device)
    return [functools.partial(compiled, x) for x in xs]


def _torchao_scale(x: Tensor, dim: int) -> Tensor:
    from torchao.float8.config import ScalingGranularity
    from torchao.float8.float8_utils import tensor_to_scale

    return tensor_to_scale(x, FP8, scaling_granularity=ScalingGranularity.AXISWISE, axiswise_dim=dim)


def _columns(xs: Sources, name: str) -> list[Version]:
    """Column amax and scale."""
    if name in _CLAMP:
        return [functools.partial(column_scale.column_scale, x, dtype=FP8) for x in xs]

    def function(x: Tensor) -> Tensor:
        if name == "torchao":
            return _torchao_scale(x, 0).squeeze(0)
        return definition.scale(definition.amax(x, 0), FP8, False)

    compiled = _compiled(function, xs[0].device)
    return [functools.partial(compiled, x) for x in xs]


def _rows_and_columns(xs: Sources, name: str, matrices: int = 1) -> list[Version]:
    """Row amax, scale and cast, and the amaxes of the columns of each of some matrices below each other."""
    if name in _CLAMP:
        run = functools.partial(row_cast_columns.row_cast_columns, dtype=FP8, matrices=matrices)
        return [functools.partial(run, [x]) for x in xs]

    def function(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        scale = definition.scale(definition.amax(x, 1), FP8, False)
        amaxes = x.unflatten(0, (matrices, -1)).abs().amax(1).to(torch.float32)
        return _definition_cast(x, scale[:, None], False), scale.reciprocal(), amaxes

    compiled = _compiled(function, xs[0].device)
    return [functools.partial(compiled, x) for x in xs]


def _amaxes(xs: Sources, name: str) -> list[Version]:
    """Amaxes of rows and columns of what is computed from the source, here no more than the source itself."""
    rows, columns = xs[0].shape
    if name in _CLAMP and xs[0].device.type == "cuda":
        load = f"x = tl.load(in0 + ({columns}*m + n), inside, 0.0).to(tl.float32)"
        kernel = jit_function(computed_amaxes.source(1, [load], ["x"], 1), computed_amaxes.NAME)
        programs = launch.ceil_div(rows, computed_amaxes.ROWS) * computed_amaxes.across(columns)
        constants = computed_amaxes.constants(columns)
        if name == "tuned":
            kernel = tuned(kernel, computed_amaxes.choices())
        else:
            constants |= computed_amaxes.choices()[0]

        def run(x: Tensor) -> Tensor:
            amaxes = torch.zeros(computed_amaxes.length(rows, columns, 1), dtype=torch.int32, device=x.device)
            kernel[(programs,)](x, amaxes, rows, **constants)
            return amaxes.view(torch.float32)

        return [functools.partial(run, x) for x in xs]
    function: Callable[[Tensor], Tensor] = lambda x: computed_amaxes.reference([x], 1)  # noqa: E731
    compiled = _compiled(function, xs[0].device)
    return [functools.partial(compiled, x) for x in xs]


def _ends_of_groups(x: Tensor) -> Tensor:
    """Those of eight groups of as many rows, a multiple of 16."""
    return torch.arange(1, 9, dtype=torch.int32, device=x.device) * (x.shape[0] // 8)


def _groups(xs: Sources, name: str) -> list[Version]:
    """Amaxes, scales and transposed copy of the columns of groups of rows, which are read twice."""
    ends = _ends_of_groups(xs[0])
    padded = groups.padded_ends(ends)
    amax, cast = groups.amax, groups.quantize
    if name in _CLAMP and launch.why_not(xs[0], FP8) is None:
        tile = groups.TILES[0]
        if name == "tuned":
            tile = groups.TILES[-1]
        amax, cast = (
            functools.partial(f, tile=tile)  # type: ignore[assignment]
            for f in (groups.amax_groups, groups.quantize_groups)
        )

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        if (
            name == "torchao" and x.device.type == "cuda"
        ):  # it has a kernel alone; a smoke runs the definition
            from torchao.prototype.moe_training.kernels import triton_fp8_per_group_colwise_scales

            data, scale = triton_fp8_per_group_colwise_scales(x, ends, FP8)
            return data.t(), scale
        scale = definition.scale(amax(x, ends), FP8, False)
        return cast(x, scale, ends, padded, FP8)[:, : x.shape[0]], scale.view(-1)

    run = _compiled(function, xs[0].device) if name == "inductor" else function
    return [functools.partial(run, x) for x in xs]


#: By name: what it is, and float8 copies it writes.
KERNELS: dict[str, tuple[Callable[[Sources, str], list[Version]], int]] = {
    "cast": (lambda xs, name: _copies(xs, name, None, None, False), 1),
    "cast + transpose": (lambda xs, name: _copies(xs, name, None, None, True), 2),
    "cast + transpose, rowwise": (lambda xs, name: _copies(xs, name, 1, 0, True), 2),
    "row amax + cast": (_rows, 1),
    "row amax + cast, column amax": (_rows_and_columns, 1),
    _OF_MATRICES: (
        lambda xs, name: _rows_and_columns(xs, name, MATRICES),
        1,
    ),
    "column scale": (_columns, 0),
    "row amax, column amax": (_amaxes, 0),
    "columns of groups": (_groups, 1),
}
#: Versions that a kernel does not have: nothing is tuned there, or there is nothing to clamp.
_ABSENT = {
    "row amax + cast": ("tuned",),
    "row amax + cast, column amax": ("tuned", "unclamped", "torchao"),
    _OF_MATRICES: ("tuned", "unclamped", "torchao"),
    "column scale": ("tuned", "unclamped"),
    "row amax, column amax": ("unclamped", "torchao"),
    "columns of groups": ("unclamped",),
}


def measure(kernel: str, rows: int, columns: int, seconds: float = 0.5, device: str = "cuda") -> Row:
    """Times all versions of a kernel and a copy of its source."""
    torch.compiler.reset()
    torch.manual_seed(0)
    size = 2 * rows * columns
    count = max(2, min(MOST_SOURCES, -(-ROTATED_BYTES // size)))
    xs = [torch.randn(rows, columns, device=device, dtype=torch.bfloat16) for _ in range(count)]
    targets = [torch.empty_like(x) for x in xs]
    build, copies = KERNELS[kernel]
    versions: dict[str, list[Version]] = {
        "copy": [functools.partial(target.copy_, x) for target, x in zip(targets, xs, strict=True)]
    }
    exact: dict[str, bool] = {}
    errors: dict[str, str] = {}
    want = _bits(_wanted(xs[0], kernel))
    for name in VERSIONS:
        if name in _ABSENT.get(kernel, ()):
            continue
        try:
            calls = build(xs, name)
            got = _bits(calls[0]())
        except Exception as error:  # one version that cannot run must not hide the others
            errors[name] = one_line(error)
            continue
        exact[name] = all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
        versions[name] = calls
    steps = {name: functools.partial(in_a_row, calls) for name, calls in versions.items()}
    timings = interleaved(steps, xs[0].device, seconds)
    moved = xs[0].numel() * (xs[0].element_size() + copies)
    gb_s = {
        name: count * (2 * size if name == "copy" else moved) / timing.ms / 1e6
        for name, timing in timings.items()
    }
    return {
        "gb_s": gb_s,
        "share": {name: gb_s[name] / gb_s["copy"] for name in gb_s if name != "copy"},
        "exact": exact,
        "timings": {name: timing.to_dict() for name, timing in timings.items()},
        "calls": count,
        "errors": errors,
        "clocks": common.clocks(),
    }


def _wanted(x: Tensor, kernel: str) -> Any:
    if kernel == "column scale":
        return column_scale.reference(x, dtype=FP8)
    if kernel in ("row amax + cast, column amax", _OF_MATRICES):
        matrices = MATRICES if kernel == _OF_MATRICES else 1
        return row_cast_columns.reference([x], dtype=FP8, matrices=matrices)
    if kernel == "row amax, column amax":
        return computed_amaxes.reference([x], 1)
    if kernel == "columns of groups":
        ends = _ends_of_groups(x)
        scale = definition.scale(groups.amax(x, ends), FP8, False)
        copy = groups.quantize(x, scale, ends, groups.padded_ends(ends), FP8)
        return copy[:, : x.shape[0]], scale.view(-1)
    if kernel == "row amax + cast":
        return row_cast.reference(x, dtype=FP8)
    dims = (1, 0) if "rowwise" in kernel else (None, None)
    scale, scale_t = (definition.scale(definition.amax(x, dim), FP8, False) for dim in dims)
    copies = cast_transpose.reference(x, scale, scale_t, dtype=FP8, dim=dims[0], dim_t=dims[1])
    return copies if "transpose" in kernel else copies[0]


def _bits(results: Any) -> list[Tensor]:
    tensors = results if isinstance(results, tuple) else (results,)
    return [tensor.contiguous().view(torch.uint8) for tensor in tensors]


def cases(quick: bool) -> list[dict[str, Any]]:
    """All cases, kernel by kernel."""
    shapes = QUICK if quick else SHAPES
    return [
        dict(zip(CASE, (kernel, *shape), strict=True)) for kernel, shape in itertools.product(KERNELS, shapes)
    ]


def grids(result: dict[str, Any]) -> list[Grid]:
    """One table for each kernel: share of the copy's bandwidth."""
    tables = []
    for kernel in KERNELS:
        rows = [row for row in result["rows"] if row["kernel"] == kernel]
        cells = tuple(
            (
                f"{row['rows']} x {row['columns']}",
                show(row["gb_s"].get("copy"), ".0f"),
                show(row["gb_s"].get("f8fx"), ".0f"),
                *(_share(row, name) for name in VERSIONS),
            )
            for row in rows
        )
        if cells:
            headers = ("shape", "copy GB/s", "f8fx GB/s", *VERSIONS)
            tables.append(Grid(f"{kernel}: % of the copy's GB/s (! = bits differ)", headers, cells))
    return tables


def _share(row: Row, name: str) -> str:
    mark = "" if row["exact"].get(name, True) else " !"
    value = row["share"].get(name)
    return show(None if value is None else 100 * value, ".0f") + mark


def summary(rows: list[Row]) -> dict[str, Any]:
    """The lowest share of each kernel on shapes that fill the machine, what is not exact, what did not run."""
    large = [row for row in rows if row["rows"] * row["columns"] >= 1 << 24]
    return {
        "lowest_share": {
            kernel: min(
                (row["share"]["f8fx"] for row in large if row["kernel"] == kernel and "f8fx" in row["share"]),
                default=None,
            )
            for kernel in KERNELS
        },
        "not_exact": [
            {key: row[key] for key in CASE} | {"version": name}
            for row in rows
            for name, same in row["exact"].items()
            if not same
        ],
        "failed": [
            {key: row[key] for key in CASE} | {"errors": row["errors"]} for row in rows if row["errors"]
        ],
    }


def main(argv: list[str] | None = None) -> int:
    args = common.parser(__doc__, smoke=True, ahead=True).parse_args(argv)
    if args.cpu_smoke:
        return smoke()
    return running.run(args, NAME, cases(args.quick), measure, summary, grids, wrong=_is_wrong)


def _is_wrong(rows: list[Row]) -> bool:
    return any(not row["exact"].get("f8fx", True) for row in rows)


def smoke() -> int:
    """Runs every kernel's definition and the copy on a tiny tensor on CPU; times mean nothing and are not kept."""
    rows = []
    for kernel in KERNELS:
        case: dict[str, Any] = {"kernel": kernel, "rows": 64, "columns": 96}
        rows.append({**case, **measure(**case, seconds=0.0, device="cpu")})
    console.print(common.SMOKE)
    for grid in grids({"rows": rows}):
        grid.print()
    found = summary(rows)
    console.print(str({key: found[key] for key in ("not_exact", "failed")}), markup=False)
    return 1 if found["failed"] or found["not_exact"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
