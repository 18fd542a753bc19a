"""Inductor's lowerings and IR, for operators of our own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import sympy
import torch
from torch import fx

from .inductor import inductor_config
from .pointwise import tuned
from .scheduling import fused_only_with
from .tensors import storage_key


class Parts(NamedTuple):
    """Values that stand side by side along a dimension."""

    values: tuple[Any, ...]
    dim: int


class Lowering:
    """Inductor's lowerings, called on its IR values (``torch._inductor.lowering``, ``ir``)."""

    def __init__(self) -> None:
        from torch._inductor import ir, lowering

        self._ir = ir
        self._lowering = lowering

    def register(self, target: Any, fn: Callable[..., Any]) -> None:
        """Makes ``fn`` the lowering of an operator."""
        self._lowering.register_lowering(target, type_promotion_kind=None)(fn)

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> Any:
        """The lowering of an aten operator applied to IR values."""
        return self._lowering.lowerings[target](*args, **kwargs)

    def to_dtype(self, x: Any, dtype: torch.dtype) -> Any:
        """A cast, kept out of Inductor's cast elimination."""
        return self._lowering.to_dtype(x, dtype)

    def rounded(self, x: Any) -> Any:
        """A 16-bit floating-point value with no more digits than its dtype has.

        Generated code computes with the float32 that was rounded, and C++ code even where that is cast back and forth
        (``CppOverrides.to_dtype``); but the bits of a number are those of its dtype.
        """
        from torch._inductor.virtualized import ops

        dtype = x.get_dtype()

        def through_bits(value: Any) -> Any:
            bits = ops.to_dtype_bitcast(value, torch.int16, dtype)
            return ops.to_dtype_bitcast(bits, dtype, torch.int16)

        return self._lowering.make_pointwise(through_bits)(x)

    def constant_like(self, constant: float, x: Any) -> Any:
        """A constant of the shape, dtype and device of ``x``."""
        return self._lowering.constant_like(constant)(x)

    def realized(self, x: Any) -> Any:
        """The value, written to a buffer of its own instead of being inlined into its readers."""
        x.realize()
        return x

    def alone(self, x: Any) -> Any:
        """:meth:`realized`, in a kernel that is fused with no other (``V.graph.no_fuse_buffer_names``)."""
        from torch._inductor.virtualized import V

        x.realize()
        V.graph.no_fuse_buffer_names.add(x.get_name())
        x.f8fx_parts = None  # what reads it reads that buffer
        return x

    def fused_only_with(self, label: str, first: bool = False) -> contextlib.AbstractContextManager[None]:
        """See :func:`.scheduling.fused_only_with`."""
        return fused_only_with(label, first)

    def in_one_stage(self) -> contextlib.AbstractContextManager[None]:
        """Reductions made here are one kernel each, however long they are (``config.split_reductions``)."""
        return inductor_config().patch(split_reductions=False)

    def longer_rows(self, x: Any, parts: int, most: int = 8192) -> Any:
        """A 2-D value seen as fewer, longer rows if it lies in memory so; ``most``: rows of all ``parts`` together.

        More than these Inductor reduces in two stages.
        """
        rows, columns = (self.numbers((size,)) for size in x.get_size())
        if rows is None or columns is None or not self.is_contiguous_input(x):
            return x
        (height,), (width,) = rows, columns
        factor = 1
        while parts * height > most * factor and height % (2 * factor) == 0:
            factor *= 2
        return x if factor == 1 else self(torch.ops.aten.view, x, [height // factor, width * factor])

    def is_contiguous_input(self, x: Any) -> bool:
        """Whether a value is a contiguous input of the graph."""
        data = getattr(getattr(x, "data", None), "data", None)
        if not isinstance(data, self._ir.InputBuffer):
            return False
        size, stride = (self.numbers(values) for values in (data.get_size(), data.get_stride()))
        return size is not None and stride == tuple(self._ir.FlexibleLayout.contiguous_strides(list(size)))

    def definition(self, op: Any, *args: Any, **kwargs: Any) -> Any:
        """A call of the operator itself out of the generated code (``fallback_handler``)."""
        return self._lowering.fallback_handler(op, add_to_fallback_set=False)(*args, **kwargs)

    def copied(self, x: Any) -> Any:
        """A copy of the value that is not removed as a no-op where ``x`` is a view."""
        return self._ir.ExternKernel.copy_input(x)

    def in_own_memory(self, x: Any) -> Any:
        """The value in a buffer that begins with it: a copy, if it is a view or an input."""
        is_view = isinstance(x.data, self._ir.BaseView)
        return (
            self.copied(x) if is_view or isinstance(x.data.data, self._ir.InputBuffer) else self.realized(x)
        )

    def row_major(self, x: Any) -> Any:
        """The 2-D value in a buffer of its own with contiguous strides."""
        return self._ir.ExternKernel.require_stride_order(x, [1, 0])

    def concatenation(self, values: Sequence[Any], dim: int) -> Any:
        """The values side by side, as a value that remembers its :meth:`parts`."""
        whole = self._lowering.pointwise_cat(list(values), dim)
        whole.f8fx_parts = Parts(tuple(values), dim)
        return whole

    def side_by_side(self, x: Any, parts: Parts) -> Any:
        """The value, which remembers what stands side by side in it."""
        x.f8fx_parts = parts
        return x

    def parts(self, x: Any) -> Parts | None:
        """What a :meth:`concatenation` was made of; ``None`` for any other value.

        Also if a part has been overwritten since: before Inductor overwrites a tensor it has written to memory all that is
        computed from it (``GraphLowering.mark_buffer_mutated``), so the whole is there, and a part is not any more.
        """
        from torch._inductor.virtualized import V

        parts = getattr(x, "f8fx_parts", None)
        if parts is None or self._buffer(x) is None:
            return parts
        read = (name for part in parts.values for name in self._read_by(part))
        return None if any(name in V.graph.mutated_buffers for name in read) else parts

    def _read_by(self, x: Any) -> Iterable[str]:
        """The names of buffers that are read where a value is."""
        buffer = self._buffer(x)
        return x.get_read_names() if buffer is None else [buffer.get_name()]

    def _buffer(self, x: Any) -> Any:
        """The buffer that a value, or what it is a view of, lies in; ``None`` if it is not in memory."""
        while x is not None and not isinstance(x, self._ir.Buffer):
            x = getattr(x, "data", None)
        return x

    def filled(
        self, values: Sequence[Any], dim: int, zeros: Sequence[Any] = (0, 0), are_ours: bool = True
    ) -> Any:
        """One contiguous buffer that the kernels of the 2-D values write into, side by side.

        What ``ir.ConcatKernel.create`` does, without the padding of strides, which float8 gemms do not take.

        Args:
            zeros: rows and columns of zeros behind the values. A kernel of their own writes them, so that those of
                the values run over the values' sizes, as others that read the same tensors do.
            are_ours: nothing else has the values, and so nothing writes to them.
        """
        from torch._inductor.virtualized import V

        options = {} if are_ours else _as_written_to(V.graph)
        ir = self._ir
        inner = list(values[0].get_size())
        ends: list[Any] = []
        for value in values:
            ends.append((ends[-1] if ends else 0) + value.get_size()[dim])
        inner[dim] = ends[-1]
        outer = [size + more for size, more in zip(inner, zeros, strict=True)]
        layout = ir.FixedLayout(
            device=values[0].get_device(),
            dtype=values[0].get_dtype(),
            size=outer,
            stride=ir.FlexibleLayout.contiguous_strides(outer),
        )
        kernel = ir.ConcatKernel(name=None, layout=layout, inputs=[])
        buffer = ir.StorageBox(kernel)

        def fill(value: Any, rows: tuple[Any, Any], columns: tuple[Any, Any]) -> None:
            place = ir.SliceView.create(buffer, 0, *rows, clamp=False)
            place = ir.SliceView.create(place, 1, *columns, clamp=False)
            kernel.inputs.append(ir.ConcatKernel.realize_into(value, place, **options))

        for value, start, end in zip(values, [0, *ends], ends, strict=False):
            whole = [(0, size) for size in inner]
            whole[dim] = (start, end)
            fill(value, *whole)
        for along, more in enumerate(zeros):
            if more == 0:
                continue
            sizes = [inner[0], outer[1]]  # behind the columns, and below all of them
            sizes[along] = more
            place = [(0, inner[0]), (0, outer[1])]
            place[along] = (inner[along], outer[along])
            zero = self(torch.ops.aten.full, sizes, 0.0, dtype=torch.float32, device=values[0].get_device())
            fill(self.to_dtype(zero, values[0].get_dtype()), *place)
        kernel.name = V.graph.register_buffer(kernel)
        kernel.inputs = ir.ConcatKernel.unwrap_storage(kernel.inputs)
        V.graph.register_operation(kernel)
        return ir.TensorBox(buffer)

    def launched(
        self,
        kernel: Any,
        programs: Any,
        choices: Sequence[Mapping[str, int]],
        arguments: Mapping[str, Any],
        written: Collection[str],
    ) -> None:
        """A launch of a Triton kernel by the generated code, which compiles it as one of its own.

        ``triton_kernel_wrapper_mutation`` of ``torch._higher_order_ops.triton_kernel_wrap``, ``ir.UserDefinedTritonKernel``.

        Args:
            programs: how many; a number or an expression.
            choices: of ``num_warps`` and compile-time constants; of several the fastest is found when the kernel first runs.
            arguments: IR values, numbers, expressions and compile-time constants, by name.
            written: the names of those that the kernel writes; torch finds them in the kernel's code.

        Raises:
            RuntimeError: torch thinks that it writes others too.
        """
        from torch._higher_order_ops.triton_kernel_wrap import (
            kernel_side_table,
            triton_kernel_wrapper_mutation,
        )
        from torch._inductor.virtualized import V

        values = {name: x for name, x in arguments.items() if isinstance(x, self._ir.IRNode)}
        constants = {name: x for name, x in arguments.items() if name not in values}
        self._lowering.lowerings[triton_kernel_wrapper_mutation](
            kernel_idx=kernel_side_table.add_kernel(tuned(kernel, choices)),
            constant_args_idx=kernel_side_table.add_constant_args(constants),
            grid=[(programs, 1, 1)],  # the generated launcher takes three numbers
            tma_descriptor_metadata={},
            kwargs=values,
        )
        launch: Any = V.graph.operations[-1]
        found = {id(x) for x in launch.mutable_args}
        if found != {id(values[name]) for name in written}:
            raise RuntimeError(
                f"of the arguments of {kernel.__name__}, torch takes others for written than {set(written)}"
            )

    def empty(self, sizes: Sequence[Any], dtype: torch.dtype, like: Any) -> Any:
        """A contiguous buffer that nothing is written to yet."""
        strides = self._ir.FlexibleLayout.contiguous_strides(list(sizes))
        target = torch.ops.aten.empty_strided.default
        return self.realized(self(target, list(sizes), strides, dtype=dtype, device=like.get_device()))

    def zeros(self, sizes: Sequence[Any], dtype: torch.dtype, like: Any) -> Any:
        """A contiguous buffer of zeros."""
        full = torch.ops.aten.full.default
        return self.realized(self(full, list(sizes), 0, dtype=dtype, device=like.get_device()))

    def numbers(self, sizes: Iterable[Any]) -> tuple[int, ...] | None:
        """Sizes or strides of a value as numbers; ``None`` if one is not known."""
        given = tuple(sizes)
        return tuple(map(int, given)) if all(isinstance(x, (int, sympy.Integer)) for x in given) else None

    def hint(self, size: Any) -> int:
        """A size, or where it is not known what it was when the graph was traced."""
        from torch._inductor.virtualized import V

        return int(V.graph.sizevars.optimization_hint(size))

    def is_positive(self, size: Any) -> bool:
        """Whether a size is known not to be zero."""
        from torch._inductor.virtualized import V

        return V.graph.sizevars.statically_known_geq(size, 1)

    def ceil_div(self, size: Any, divisor: int) -> Any:
        """A size divided by a number, rounded up (``torch.utils._sympy.functions.FloorDiv``)."""
        from torch.utils._sympy.functions import FloorDiv

        return FloorDiv(size + divisor - 1, divisor)

    def part(self, x: Any, start: Any, end: Any) -> Any:
        """The elements of a buffer from one place to another, both within it."""
        if start == 0 and end == x.get_size()[0]:
            return x
        return self._ir.TensorBox(self._ir.SliceView.create(x.data, 0, start, end, clamp=False))

    def multiprocessors(self, device: torch.device) -> int:
        """Of a GPU, or of the one that code is generated for (``torch._inductor.runtime.hints.DeviceProperties``)."""
        from torch._inductor.runtime.hints import DeviceProperties

        return DeviceProperties.create(device).multi_processor_count or 1

    def is_large(self, x: Any, rows: int = 1024) -> bool:
        """Whether a 2-D value is known to have at least so many rows and is on a GPU."""
        from torch._inductor.virtualized import V

        return x.get_device().type != "cpu" and V.graph.sizevars.statically_known_geq(x.get_size()[0], rows)

    def is_row(self, x: Any, most: int = 1 << 14) -> bool:
        """Whether a 2-D value is known to be one row of at most so many elements."""
        from torch._inductor.virtualized import V

        (rows, columns), sizes = x.get_size(), V.graph.sizevars
        return sizes.statically_known_equals(rows, 1) and sizes.statically_known_leq(columns, most)

    def is_normalized(self, target: Any) -> bool:
        """Whether the node being lowered is a `target` of something pointwise over a tensor and one number a row."""
        from torch._inductor.virtualized import V

        if V.graph.current_node.target is not target:
            return False
        source = cast("fx.Node", V.graph.current_node.args[0])
        columns = source.meta["val"].shape[-1]
        seen: set[fx.Node] = set()
        todo = [source]
        while todo:
            node = todo.pop()
            if node in seen or not isinstance(node.meta.get("val"), torch.Tensor):
                continue
            seen.add(node)
            shape = node.meta["val"].shape
            if len(shape) > 1 and shape[-1] == 1 and columns != 1:
                return True
            tags = getattr(node.target, "tags", ())
            if torch.Tag.pointwise in tags or getattr(node.target, "is_view", False):
                todo.extend(node.all_input_nodes)
        return False

    def is_turned(self, target: Any) -> bool:
        """Whether what the operator that is lowered, if it is ``target``, takes first are transposes of matrices, below each other.

        What does the transposing is a copy that no kernel of its own makes.
        """
        from torch._inductor.virtualized import V

        node: Any = V.graph.current_node
        if node.target is not target:
            return False
        aten, copy = torch.ops.aten, None
        if node.args[0].target in (aten.view.default, aten.reshape.default):
            copy = node.args[0].args[0]
        if copy is None or copy.target is not aten.clone.default:
            return False
        source = copy.args[0]
        return source.target is aten.permute.default and list(source.args[1])[-2:] == [2, 1]

    def floor_div(self, size: Any, divisor: int) -> Any:
        """A size divided by a number, rounded down (``torch.utils._sympy.functions.FloorDiv``)."""
        from torch.utils._sympy.functions import FloorDiv

        return FloorDiv(size, divisor)

    def missing(self, size: Any, multiple: int) -> Any:
        """How many elements take a size (a number or a sympy expression) to a multiple, a size of zero to the first."""
        if multiple == 1:
            return 0
        from torch._inductor.virtualized import V
        from torch.utils._sympy.functions import FloorDiv, Max

        if V.graph.sizevars.statically_known_geq(size, 1):
            expression = (-size) % multiple
        else:
            expression = multiple * Max(1, FloorDiv(size + multiple - 1, multiple)) - size
        return V.graph.sizevars.simplify(expression) if not isinstance(expression, int) else expression


def _as_written_to(graph: Any) -> dict[str, bool]:
    """How ``ConcatKernel.realize_into`` is to take what the node being lowered reads: as a copy, if the graph writes to any of it.

    It may be a ``concat``, which is never written itself, so what that reads counts too. Needed since torch 2.15
    (``GraphLowering.mutated_storages``); before, Inductor gives what is written to a buffer of its own.
    """
    written = getattr(graph, "mutated_storages", None)
    if not written:
        return {}
    read = set(graph.current_node.all_input_nodes)
    read |= {source for node in read for source in node.all_input_nodes}
    values = [node.meta.get("val") for node in read]
    storages = {storage_key(value) for value in values if isinstance(value, torch.Tensor)}
    return {"allow_alias": storages.isdisjoint(written)}
