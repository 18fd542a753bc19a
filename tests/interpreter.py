"""Triton's interpreter with the arithmetic of a GPU, for processes started with ``TRITON_INTERPRET=1``.

It converts floats by its own arithmetic, which rounds half up, loses NaN and gets subnormals wrong (Triton 3.6 to
3.9; https://github.com/triton-lang/triton/pull/11897 mends it). That one instruction is replaced by torch's conversion, which
rounds to nearest even as GPUs do. It has no functions of the device's library (libdevice): NumPy's stand in. It
runs the programs of a launch one after the other, which hides it where two write to one place; here they run in an order drawn by lot. And
it is slow where it need not be: it replaces the language anew in every call of a device function, and takes a maximum
element by element.
"""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import torch

from f8fx.kernels import launch

#: libdevice's functions that generated code calls, in NumPy.
LIBDEVICE: dict[str, Callable[..., Any]] = {
    "abs": np.abs,
    "ceil": np.ceil,
    "cos": np.cos,
    "erf": np.vectorize(math.erf, otypes=[np.float32]),
    "exp": np.exp,
    "exp2": np.exp2,
    "expm1": np.expm1,
    "floor": np.floor,
    "log": np.log,
    "log1p": np.log1p,
    "log2": np.log2,
    "pow": np.power,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "sin": np.sin,
    "sqrt": np.sqrt,
    "tanh": np.tanh,
}
#: Those that answer by an integer.
LIBDEVICE_TESTS: dict[str, Callable[..., Any]] = {"isinf": np.isinf, "isnan": np.isnan}


def torch_conversion(input: Any, input_dtype: Any, output_dtype: Any, rounding_mode: Any) -> Any:
    """``triton.runtime.interpreter._convert_float`` with torch's arithmetic."""
    floats = {name: dtype for dtype, name in launch.TRITON_FLOAT8.items()}
    floats |= {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}
    carriers = {8: torch.uint8, 16: torch.int16, 32: torch.int32, 64: torch.int64}
    sizes = {8: np.uint8, 16: np.int16, 32: np.int32, 64: np.int64}
    bits = np.ascontiguousarray(input).view(sizes[input_dtype.primitive_bitwidth])
    source = torch.from_numpy(bits.copy()).view(floats[str(input_dtype)])
    result = source.to(floats[str(output_dtype)])
    raw = result.view(carriers[output_dtype.primitive_bitwidth]).numpy()
    return raw.view(getattr(np, f"uint{output_dtype.primitive_bitwidth}")).reshape(input.shape)


@contextlib.contextmanager
def as_on_gpus() -> Iterator[None]:
    """Replaces what the interpreter gets wrong, and what it lacks, in the block."""
    from triton.runtime import interpreter

    original = interpreter._patch_lang_tensor

    def patch_lang_tensor(tensor: Any, scope: Any) -> None:
        """Loop bounds: Triton 3.6 calls ``int`` on a one-element array, which NumPy 2.4 rejects; 3.9 does not."""
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))

    order, builder = _Order(interpreter.interpreter_builder), interpreter.interpreter_builder
    with (
        mock.patch.object(builder, "set_grid_dim", order.set_grid_dim),
        mock.patch.object(builder, "set_grid_idx", order.set_grid_idx),
        mock.patch.object(interpreter, "_convert_float", torch_conversion),
        mock.patch.object(interpreter, "_patch_lang_tensor", patch_lang_tensor),
        mock.patch.object(interpreter, "_patch_lang", _Once(interpreter._patch_lang)),
    ):
        yield


class _Order:
    """Which program of a launch runs when."""

    def __init__(self, builder: Any) -> None:
        self.dim, self.idx = builder.set_grid_dim, builder.set_grid_idx
        self.random = random.Random(0)
        self.places: list[list[int]] = []

    def set_grid_dim(self, *sizes: int) -> None:
        """At the start of a launch."""
        self.dim(*sizes)
        self.places = [self.random.sample(range(size), size) for size in sizes]

    def set_grid_idx(self, *index: int) -> None:
        """At the start of a program."""
        self.idx(*(places[each] for places, each in zip(self.places, index, strict=True)))


class _Once:
    """``triton.runtime.interpreter._patch_lang``, which a kernel needs once, and not in every function it calls."""

    def __init__(self, patch: Callable[[Any], Any]) -> None:
        self.patch = patch
        self.done: set[frozenset[int]] = set()
        self.scopes: list[Any] = []

    def __call__(self, function: Any) -> _Once:
        import triton.language as tl

        languages = frozenset(id(x) for x in function.__globals__.values() if x is tl or x is tl.core)
        if languages not in self.done:
            self.scopes.append(self.patch(function))
            self.done.add(languages)
        return self

    def restore(self) -> None:
        """At the end of a launch."""
        while self.scopes:
            self.scopes.pop().restore()
        self.done.clear()


@contextlib.contextmanager
def generated_code() -> Iterator[None]:
    """Gives the code that Inductor generates a libdevice, and quick reductions, in the block."""
    from torch._inductor.runtime import triton_helpers
    from torch._inductor.runtime.triton_compat import libdevice
    from triton.runtime.interpreter import ReduceOps

    original = ReduceOps.apply_impl
    extremes = {id(triton_helpers.maximum): np.max, id(triton_helpers.minimum): np.min}  # NaN wins in both

    def apply(self: Any, values: Any) -> Any:
        extreme = extremes.get(id(self.combine_fn))
        return self.min_max(values[0], extreme) if extreme else original(self, values)

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(ReduceOps, "apply_impl", apply))
        for name, function in LIBDEVICE.items():
            stack.enter_context(mock.patch.object(libdevice, name, _elementwise(function), create=True))
        for name, test in LIBDEVICE_TESTS.items():
            stack.enter_context(mock.patch.object(libdevice, name, _tested(test), create=True))
        yield


def _elementwise(function: Callable[..., Any]) -> Callable[[Any], Any]:
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    def apply(x: Any, *more: Any) -> Any:
        others = [y.handle.data if isinstance(y, tl.tensor) else y for y in more]
        values = function(x.handle.data, *others).astype(x.handle.data.dtype)
        blocks = any(isinstance(y, tl.tensor) and y.type.is_block() for y in (x, *more))
        # x may be a number beside a block, or a block of one element
        kind = tl.block_type(x.dtype, list(values.shape)) if blocks else x.type
        return tl.tensor(TensorHandle(values, x.handle.dtype), kind)

    return apply


def _tested(test: Callable[..., Any]) -> Callable[[Any], Any]:
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    def apply(x: Any) -> Any:
        values = test(x.handle.data).astype(np.int32)
        kind = tl.block_type(tl.int32, x.type.get_block_shapes()) if x.type.is_block() else tl.int32
        return tl.tensor(TensorHandle(values, tl.int32), kind)

    return apply
