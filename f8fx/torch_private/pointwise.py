"""Inductor's pointwise values, written as Triton expressions for a kernel of our own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import sympy
import torch

from .patch import patched_attribute

#: Operators of ``ops_handler`` on float32 and conditions, as Inductor's own Triton code has them.
_EXPRESSIONS = {
    "abs": "tl_math.abs({0})",
    "add": "({0} + {1})",
    "and_": "({0} & {1})",
    "eq": "({0} == {1})",
    "erf": "libdevice.erf({0})",
    "exp": "libdevice.exp({0})",
    "ge": "({0} >= {1})",
    "gt": "({0} > {1})",
    "le": "({0} <= {1})",
    "log": "tl_math.log({0})",
    "log1p": "libdevice.log1p({0})",
    "logical_and": "({0} & {1})",
    "logical_not": "({0} == 0)",
    "logical_or": "({0} | {1})",
    "lt": "({0} < {1})",
    "mul": "({0} * {1})",
    "ne": "({0} != {1})",
    "neg": "(-{0})",
    "or_": "({0} | {1})",
    # NaN goes through, as it does through Inductor's
    "maximum": "tl.where(({0} > {1}) | ({0} != {0}), {0}, {1})",
    "minimum": "tl.where(({0} < {1}) | ({0} != {0}), {0}, {1})",
    "relu": "tl.where({0} < 0, 0.0, {0})",
    "reciprocal": "(1.0 / {0})",
    "rsqrt": "libdevice.rsqrt({0})",
    "sigmoid": "tl.sigmoid({0})",
    "sqrt": "tl.sqrt_rn({0})",
    "square": "({0} * {0})",
    "sub": "({0} - {1})",
    "tanh": "libdevice.tanh({0})",
    "truediv": "({0} / {1})",
    "where": "tl.where({0}, {1}, {2})",
}
#: What these need imported, beside ``tl``.
EXPRESSION_IMPORTS = "from torch._inductor.runtime.triton_helpers import libdevice, math as tl_math"
_HALVES = {torch.bfloat16: "tl.bfloat16", torch.float16: "tl.float16"}
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


class Expressions(NamedTuple):
    """How values are computed, element ``[m, n]``.

    Attributes:
        inputs: the IR values that are read.
        lines: statements in Triton, on tiles; ``in0``, ``in1``, ... are the inputs' addresses, and ``inside`` the mask.
        results: the names of the values.
    """

    inputs: tuple[Any, ...]
    lines: tuple[str, ...]
    results: tuple[str, ...]


class _Unsupported(Exception):
    """What a value is computed with cannot be written."""


def expressions(values: Sequence[Any]) -> Expressions | None:
    """The 2-D values, of one shape, as expressions of what is in memory; ``None`` where there are no words for it.

    ``OpsHandler`` and ``V.set_ops_handler`` (``torch._inductor.ops_handler``, ``virtualized``); arithmetic is in float32,
    as in Inductor's Triton code. Inputs whose strides Inductor has not settled get those they have now
    (``FlexibleLayout.allow_indexing``, ``freeze_layout``).
    """
    from torch._inductor.ir import FlexibleLayout

    try:
        with patched_attribute(FlexibleLayout, "allow_indexing", True):
            inputs = _written(values).inputs
        for name in inputs:
            _in_memory(name).freeze_layout()
        written = _written(values)
    except _Unsupported:
        return None
    return Expressions(tuple(map(_in_memory, written.inputs)), tuple(written.lines), tuple(written.results))


def _written(values: Sequence[Any]) -> _Writer:
    from torch._inductor.ops_handler import DefaultHandler
    from torch._inductor.virtualized import V

    writer = _Writer(values[0].get_size(), values[0].get_device())

    class Handler(DefaultHandler):
        def _default(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return writer(name, *args, **kwargs)

    with V.set_ops_handler(Handler()):  # type: ignore[arg-type]
        for value in values:
            writer.finish(str(value.make_loader()([*writer.ranges])))
    return writer


class _Writer:
    """Writes one statement for each operator that is called on it, none twice."""

    def __init__(self, sizes: Sequence[Any], device: torch.device) -> None:
        self.inputs: dict[str, int] = {}
        self.lines: list[str] = []
        self.results: list[str] = []
        self.names: dict[str, str] = {}
        self.device = device
        symbols = sympy.symbols("m n", integer=True, nonnegative=True)
        self.ranges = dict(zip(symbols, sizes, strict=True))

    def __call__(self, op: str, *args: Any, **kwargs: Any) -> str:
        if op == "load":
            return self._load(*args, **kwargs)
        if op == "constant":
            return self._constant(*args, **kwargs)
        if op == "to_dtype":
            return self._to_dtype(*args, **kwargs)
        if op == "to_dtype_bitcast":
            return self._bits(*args, **kwargs)
        if op not in _EXPRESSIONS or kwargs:
            raise _Unsupported(op)
        return self._named(_EXPRESSIONS[op].format(*args))

    def finish(self, name: str) -> None:
        """Takes a value for a result: as float32, in the tile's full shape."""
        if name not in self.names.values():
            raise _Unsupported("a constant")
        self.results.append(self._named(f"tl.broadcast_to(({name}).to(tl.float32), [STEP, BLOCK])"))

    def _named(self, expression: str) -> str:
        if expression not in self.names:
            self.names[expression] = f"tmp{len(self.names)}"
            self.lines.append(f"{self.names[expression]} = {expression}")
        return self.names[expression]

    def _load(self, name: str, index: Any) -> str:
        from torch._inductor.virtualized import V

        dtype = V.graph.get_dtype(name)
        # a number in the CPU's memory is given to kernels as a number
        if (dtype not in _FLOATS and dtype != torch.bool) or _in_memory(name).get_device() != self.device:
            raise _Unsupported(name)
        place = self.inputs.setdefault(name, len(self.inputs))
        address = f"tl.broadcast_to(in{place} + ({self._index(index)}), [STEP, BLOCK])"
        kind, other = ("tl.int1", "0") if dtype == torch.bool else ("tl.float32", "0.0")
        return self._named(f"tl.load({address}, inside, {other}).to({kind})")

    def _index(self, index: Any) -> str:
        """An index that is linear in row and column, as text."""
        from torch._inductor.virtualized import V

        # [batch, sequence, width] seen as [tokens, width] is linear, too
        index = sympy.expand(V.graph.sizevars.simplify_with_ranges(index, self.ranges))
        m, n = self.ranges
        rows, columns = index.coeff(m), index.coeff(n)
        start = sympy.expand(index - rows * m - columns * n)
        if not all(isinstance(part, sympy.Integer) for part in (rows, columns, start)):
            raise _Unsupported(str(index))
        # ``m`` has 64 bits; side by side, columns need no more than 32
        column = "n" if columns in (0, 1) else "n.to(tl.int64)"
        return f"{rows}*m + {columns}*{column} + {start}"

    def _constant(self, value: Any, dtype: torch.dtype) -> str:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise _Unsupported(str(value))
        return f'float("{float(value)}")' if value - value != 0 else repr(float(value))

    def _to_dtype(
        self, x: str, dtype: torch.dtype, src_dtype: Any = None, use_compute_types: bool = True
    ) -> str:
        if dtype not in _FLOATS or not use_compute_types:
            raise _Unsupported(str(dtype))
        return self._named(f"({x}).to(tl.float32)") if x in self.names.values() else x

    def _bits(self, x: str, dtype: torch.dtype, src_dtype: torch.dtype) -> str:
        """The bits of a 16-bit number, or the number of bits (:meth:`.lowering.Lowering.rounded`)."""
        if dtype == torch.int16 and src_dtype in _HALVES:
            return self._named(f"({x}).to({_HALVES[src_dtype]}).to(tl.int16, bitcast=True)")
        if dtype in _HALVES and src_dtype == torch.int16:
            return self._named(f"({x}).to({_HALVES[dtype]}, bitcast=True).to(tl.float32)")
        raise _Unsupported(f"{src_dtype} as {dtype}")


def _in_memory(name: str) -> Any:
    """The IR value of a buffer or an input of the graph."""
    from torch._inductor import ir
    from torch._inductor.virtualized import V

    value = V.graph.graph_inputs.get(name)
    if value is None:
        value = ir.TensorBox(ir.StorageBox(V.graph.get_buffer(name)))
    return value


def jit_function(source: str, name: str) -> Any:
    """A function of a module with this text, kept as a file where Inductor keeps its own (``codecache.PyCodeCache``)."""
    from torch._inductor.codecache import PyCodeCache

    return getattr(PyCodeCache.load(source), name)


def tuned(kernel: Any, choices: Sequence[Mapping[str, int]]) -> Any:
    """A Triton kernel as ``triton.autotune`` would give it.

    The same object for equal choices: Inductor tells kernels apart by their objects.

    Args:
        choices: of ``num_warps`` and compile-time constants.
    """
    return _tuned(kernel, tuple(tuple(choice.items()) for choice in choices))


@lru_cache(maxsize=256)
def _tuned(kernel: Any, choices: tuple[tuple[tuple[str, int], ...], ...]) -> Any:
    from triton import Config, autotune

    constants = [dict(choice) for choice in choices]
    configs = [Config(own, num_warps=own.pop("num_warps")) for own in constants]
    return autotune(configs=configs, key=[])(kernel)
