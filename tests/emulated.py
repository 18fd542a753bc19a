"""Runs on the CPU what Inductor generated for an H100: ``TRITON_INTERPRET=1 python -m tests.emulated CASES RESULTS``.

The generated module runs as it is, with Inductor's own launchers: how many numbers a launch is given, its grid for
each of the tuning candidates, what is a constant. Kernels run under Triton's interpreter. In place of the device:

* memory comes with a margin on both sides and is full of NaN before it is written to, so what reads or writes
  beyond a tensor, or reads what nothing has written, shows;
* ``_scaled_mm`` (and its grouped form) is its definition, and takes what the CUDA operator takes (``aten/src/ATen/native/cuda/ScaledBlas.cpp``) and
  cuBLASLt accepts on an H100 (sizes, layouts, scales, alignment), and nothing else.

Private interfaces of torch 2.11 to 2.15, for tests only, as in :mod:`benchmarks.codegen`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import sys
import tempfile
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from f8fx.kernels.grouped import grouped_mm
from tests.interpreter import as_on_gpus, generated_code

#: Bytes on each side of a tensor; what launchers take for aligned stays so.
MARGIN = 256
#: NaN in every floating type but the fnuz ones, -1 in integers.
POISON = 255


@dataclass(frozen=True)
class Case:
    """One half of a graph.

    Attributes:
        code: the module that Inductor generated.
        inputs: what it is called with; sizes are numbers.
        candidate: which of the tuning candidates of each kernel, modulo their number.
    """

    code: str
    inputs: Sequence[Any]
    candidate: int = 0


def guarded(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor in poisoned memory."""
    span = 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True)) if all(size) else 0
    memory = torch.full((span * dtype.itemsize + 2 * MARGIN,), POISON, dtype=torch.uint8)
    return torch.empty(0, dtype=dtype).set_(
        memory.untyped_storage(), MARGIN // dtype.itemsize, tuple(size), tuple(stride)
    )


def in_margins(tensor: Tensor) -> bool:
    """Whether a tensor lies in poisoned memory whose margins are as they were; results of aten operators do not."""
    memory = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    return len(memory) >= 2 * MARGIN and bool(
        (memory[:MARGIN] == POISON).all() and (memory[-MARGIN:] == POISON).all()
    )


class Binary:
    """In place of a compiled kernel: what a launcher calls."""

    metadata = types.SimpleNamespace(
        shared=0, num_warps=4, global_scratch_size=None, profile_scratch_size=None
    )
    packed_metadata = ()
    function = None
    hash = "0" * 64
    n_regs = n_spills = 0

    def __init__(self, source: Any, *_: Any, **__: Any) -> None:
        self.src = source
        self.asm: dict[str, Any] = {}

    def _init_handles(self) -> None:
        """There are none."""

    def launch_metadata(self, *_: Any) -> None:
        """Read by profilers."""

    def run(self, x: int, y: int, z: int, *rest: Any) -> None:
        """
        Args:
            rest: stream, function, two kinds of metadata and two hooks, then the kernel's arguments.
        """
        kernel, arguments = self.src.fn, rest[6:]
        values = dict(zip(kernel.arg_names, arguments, strict=True))
        for name, value in self.src.constants.items():
            values[kernel.arg_names[name[0]] if isinstance(name, tuple) else name] = value
        held = [x for x in arguments if isinstance(x, Tensor) and in_margins(x)]
        if x * y * z:  # as Triton's launcher and torch's
            kernel[(x, y, z)](**values)
        assert all(map(in_margins, held)), f"{kernel.__name__} writes beyond a tensor"


class Kernel:
    """In place of ``AsyncCompile.triton``: a generated kernel with one of its tuning candidates."""

    def __init__(self, name: str, source: str, folder: Path, candidate: int) -> None:
        path = folder / f"{name}_{len(list(folder.iterdir()))}.py"
        path.write_text(source)
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        tuner = getattr(module, name)
        config = tuner.configs[candidate % len(tuner.configs)]
        self.run = tuner._precompile_config(config).make_launcher()


def multiplied(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None = None,
    scale_result: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> Tensor:
    """The definition of ``torch._scaled_mm``, summed so precisely that threads and order do not show."""
    product = (a.double() @ b.double()) * scale_a.double() * scale_b.double()
    return (product if bias is None else product + bias.double()).to(out_dtype)


def scaled_mm(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, *rest: Any, out: Tensor, **more: Any
) -> Tensor:
    """``torch._scaled_mm(..., out=out)`` with what CUDA and cuBLASLt check."""
    (m, k), (inner, n) = a.shape, b.shape
    assert k == inner and k % 16 == 0 and n % 16 == 0, (a.shape, b.shape)
    pair = {a.dtype, b.dtype}
    assert pair <= {torch.float8_e4m3fn, torch.float8_e5m2} and pair != {torch.float8_e5m2}, pair
    for matrix, rows, scale in ((a, m, scale_a), (b.T, n, scale_b.T)):
        line, step = matrix.stride()
        assert step == 1 and line >= k and line % 16 == 0, f"not row-major: {tuple(matrix.stride())}"
        assert matrix.data_ptr() % 16 == 0, "not aligned"
        assert scale.dtype == torch.float32
        if scale_a.numel() == scale_b.numel() == 1:
            continue
        assert scale.shape == (rows, 1) and scale.is_contiguous(), (scale.shape, scale.stride(), rows)
        assert scale.data_ptr() % 16 == 0, "scales are not aligned"
        assert out.dtype == torch.bfloat16, "scales by row are for bfloat16 results"
    result = multiplied(a, b, scale_a, scale_b, *rest, **more)
    assert out.shape == (m, n) and out.stride() == (n, 1) and out.dtype == result.dtype
    bias = rest[0] if rest else more.get("bias")
    assert bias is None or (bias.dtype == out.dtype != torch.float32 and bias.numel() == n)
    assert bias is None or bias.data_ptr() % 16 == 0, "the bias is not aligned"
    return out.copy_(result)


def scaled_grouped_mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    offsets: Tensor,
    out_dtype: torch.dtype,
    use_fast_accum: bool,
) -> Tensor:
    """``torch._scaled_grouped_mm`` of rows by the matrices of their experts, or summing over the rows of each, with what CUDA checks."""
    (m, k), (inner, n), (experts,) = a.shape, b.shape[-2:], offsets.shape
    assert k == inner and k % 16 == 0 and n % 16 == 0, (a.shape, b.shape)
    assert a.dtype == b.dtype == torch.float8_e4m3fn and out_dtype == torch.bfloat16
    assert a.stride(1) == 1 and b.stride(-2) == 1, (a.stride(), b.stride())
    assert a.data_ptr() % 16 == b.data_ptr() % 16 == a.stride(0) % 16 == b.stride(-1) % 16 == 0
    shapes: list[tuple[int, ...]] = [(m,), (experts, n)]
    if b.dim() == 2:
        shapes = [(experts * m,), (experts * n,)]
        # groups begin where the gemm can load, and each has something to sum
        assert (
            not (offsets % 16).any()
            and offsets[-1] <= k
            and (offsets.diff(prepend=offsets[:1] * 0) > 0).all()
        )
    else:
        assert b.shape[0] == experts
    for scale, shape in zip((scale_a, scale_b), shapes, strict=True):
        assert scale.dtype == torch.float32 and scale.shape == shape and scale.is_contiguous()
    assert offsets.dtype == torch.int32
    return grouped_mm(a, b, scale_a, scale_b, offsets, out_dtype)


@contextlib.contextmanager
def stand_in_gpu(candidate: int) -> Iterator[None]:
    """Everything that generated code asks a GPU for."""
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.runtime import triton_helpers, triton_heuristics
    from torch._inductor.select_algorithm import extern_kernels

    def source(fn: Any, signature: Any, constants: Any, *_: Any) -> Any:
        return types.SimpleNamespace(fn=fn, signature=signature, constants=constants)

    def constexprs(kernel: Any) -> list[int]:
        parameters = inspect.signature(kernel.fn).parameters.values()
        return [index for index, p in enumerate(parameters) if "constexpr" in str(p.annotation)]

    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        stack.enter_context(as_on_gpus())
        stack.enter_context(generated_code())

        def triton(self: Any, name: str, text: str, **_: Any) -> Kernel:
            return Kernel(name, text, folder, candidate)

        heuristics = triton_heuristics
        replaced: list[tuple[Any, str, Any]] = [
            (AsyncCompile, "triton", triton),
            (AsyncCompile, "wait", lambda self, scope: None),
            (torch._C, "_cuda_getCurrentRawStream", lambda device: 0),
            (torch.cuda, "_DeviceGuard", lambda device: contextlib.nullcontext()),
            (torch.cuda, "set_device", lambda device: None),
            (torch._C._dynamo.guards, "_empty_strided_cuda", guarded),
            (extern_kernels, "_scaled_mm", scaled_mm),
            (extern_kernels, "_scaled_grouped_mm", scaled_grouped_mm),
            (heuristics, "ASTSource", source),
            (heuristics.triton, "compile", Binary),
            (heuristics, "get_constexprs", constexprs),
            (heuristics.StaticTritonCompileResult, "can_statically_launch", lambda *_, **__: None),
            (heuristics.TritonBundler, "put", lambda *_, **__: None),
            (triton_helpers, "set_driver_to_gpu", lambda: None),
        ]
        for owner, name, value in replaced:
            stack.enter_context(mock.patch.object(owner, name, value, create=True))
        yield


@contextlib.contextmanager
def every_rounding() -> Iterator[None]:
    """In the block code is generated with every rounding that eager execution on a GPU makes, and no other.

    ``x * 0.1`` of a bfloat16 x is computed with the number as it is (CUDA's kernels hold it in float32). Torch 2.15
    rounds it first under ``emulate_precision_casts``, and only there: ``make_pointwise`` casts all inputs, and since
    then ``SymPyOps.to_dtype`` keeps that cast of a number where it was folded before.
    """
    import sympy
    from torch._inductor import config
    from torch._inductor.index_propagation import SymPyOps, TypedExpr

    original = SymPyOps.to_dtype

    def to_dtype(value: Any, dtype: torch.dtype, *args: Any, **kwargs: Any) -> Any:
        if sympy.sympify(value.expr).is_number:
            return TypedExpr(value.expr, dtype)
        return original(value, dtype, *args, **kwargs)

    with (
        config.patch(emulate_precision_casts=True),
        mock.patch.object(SymPyOps, "to_dtype", staticmethod(to_dtype)),
    ):
        yield


def emulate(case: Case) -> list[Any]:
    """What the code returns."""
    inputs = []
    for value in case.inputs:
        if isinstance(value, Tensor):
            held = guarded(value.shape, value.stride(), value.dtype)
            inputs.append(held.copy_(value))
        else:
            inputs.append(value)
    with stand_in_gpu(case.candidate):
        scope: dict[str, Any] = {"__name__": "generated", "__file__": "generated"}
        exec(compile(case.code, "generated", "exec"), scope)
        return list(scope["call"](inputs))


def attempt(case: Case) -> list[Any] | str:
    """What the code returns, or what went wrong."""
    try:
        return emulate(case)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    cases, results = sys.argv[1:]
    torch.save([attempt(case) for case in torch.load(cases, weights_only=False)], results)
