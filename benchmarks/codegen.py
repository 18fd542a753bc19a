"""What Inductor would run on an H100, found out on a machine without a GPU.

A graph is traced and rewritten on whatever device there is, split by the partitioner, retraced on
fake CUDA tensors and lowered by Inductor's scheduler and Triton code generator under a stand-in for
the device. Nothing is compiled or run. What comes out is the list of kernels with the bytes that each has
to move at least: tensors read once, tensors written once; and what the generated code moves beyond that
(:mod:`benchmarks.rereads`).

Private interfaces of torch 2.11 to 2.15, used here for measuring and testing only, never by f8fx: what stands in
for a device (:mod:`benchmarks.stand_in`) goes deeper into Inductor than :mod:`f8fx.torch_private`, and no other file may.
"""

from __future__ import annotations

import contextlib
import types
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import fx

from f8fx import executor, lowerings
from f8fx.graph_bytes import saved_bytes
from f8fx.options import Options
from f8fx.partition import Partitioner
from f8fx.passes.parameters import KnownInputs
from f8fx.torch_private import detect_fake_mode, fake_tensor_mode, live_bytes
from f8fx.tuning import patches_for, tuning

from .rereads import Tensor, reread_bytes, scattered_bytes, strided_bytes
from .stand_in import h100 as h100


@dataclass(frozen=True)
class Kernel:
    """One launch.

    Attributes:
        name: the library's, or ``triton_`` and the operators it was generated from.
        bytes: moved at least: every tensor read or written once.
        reread: read again, and no longer in the cache.
        strided: of these bytes, those that a reduction stores transposed, and those of tensors read element by element, each
            far from the next.
    """

    name: str
    bytes: int
    reread: int = 0
    strided: int = 0

    @property
    def is_triton(self) -> bool:
        return self.name.startswith("triton_")


@dataclass(frozen=True)
class Generated:
    """What Inductor made of one half of a graph.

    Attributes:
        kernels: launches in their order.
        code: the whole module.
        named: the Triton kernels by the name they have in ``code``, and in a profile.
        peak: bytes of the half's own tensors where these are most: parameters, inputs and the gradients that arrive
            are not counted, nor what libraries' kernels need.
    """

    kernels: tuple[Kernel, ...]
    code: str
    named: Mapping[str, Kernel]
    peak: int

    @property
    def triton(self) -> tuple[Kernel, ...]:
        """The kernels that are no gemm and no other library call."""
        return tuple(kernel for kernel in self.kernels if kernel.is_triton)


def halves(
    model: Callable[..., Any], *args: Any, float8: bool = True, dynamic: bool | None = None, **options: Any
) -> tuple[list[fx.GraphModule], int]:
    """Forward and backward graph of a model after the passes (or without), and bytes saved between them.

    Under ``torch.no_grad`` the one graph there is, which saves nothing.

    Args:
        dynamic: as of ``torch.compile``: whether sizes of inputs are symbols, and bytes are those of the sizes given.
    """
    from torch._inductor.fx_passes.post_grad import remove_noop_ops

    parsed = Options.parse({"select": "all", "target": "h100", **options})
    pipeline = parsed.pipeline(
        rowwise_scales=lambda device: parsed.rowwise_scales or "by_size",
        kernels=lambda device: parsed.kernels == "auto",
    )
    found: list[fx.GraphModule] = []
    whole: list[fx.GraphModule] = []
    saved, known = 0, KnownInputs()

    def transform(graph: fx.Graph) -> None:
        assert graph.owning_module is not None
        whole.append(graph.owning_module)
        if float8:
            known.mark(graph)
            pipeline(graph)
        # as in Inductor's joint passes: an alias would be one more thing that the partitioner can save
        remove_noop_ops(graph)

    def partition(*args: Any, **kwargs: Any) -> Any:
        found.extend(halves := Partitioner(parsed.save)(*args, **kwargs))
        return halves

    def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        nonlocal saved, known
        known = KnownInputs.of(inputs)
        executor.compile_eager(gm, inputs, transform, partition)
        if not found:
            found.append(whole[0])
            return gm.forward
        parameters = [index for index, value in enumerate(inputs) if isinstance(value, torch.nn.Parameter)]
        (output,) = gm.graph.find_nodes(op="output")
        given = found[0].graph.find_nodes(op="placeholder")
        there = {given[index] for index in parameters}
        saved = saved_bytes(found[0].graph, len(output.args[0]), there.__contains__)
        return gm.forward

    torch.compiler.reset()
    torch.compile(model, backend=backend, fullgraph=True, dynamic=dynamic)(*args)
    return found, saved


def of_any_size(tensors: Sequence[Any], dim: int) -> None:
    """What is compiled for these tensors is for any size of that dimension."""
    for tensor in tensors:
        torch._dynamo.mark_dynamic(tensor, dim)


def generate(half: fx.GraphModule, is_backward: bool, is_inference: bool = False) -> Generated:
    """Lowers one half, or the graph of inference, for the stand-in H100; call inside :func:`h100`."""
    from torch._inductor import config
    from torch._inductor.compile_fx import _recursive_post_grad_passes
    from torch._inductor.debug import DebugContext
    from torch._inductor.fx_passes.replace_random import replace_random_passes
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V

    lowerings.register()
    graph, inputs, mode = _on_cuda(half)
    options: dict[str, Any] = {
        "force_disable_caches": True,
        "compile_threads": 1,
        "triton.autotune_at_compile_time": False,
        **patches_for(types.SimpleNamespace(tuning=tuning({}))),
    }
    with V.set_fake_mode(mode), config.patch(options):
        # one of Inductor's joint passes, which leaves tensors on the meta device as they are
        replace_random_passes(graph)
        _recursive_post_grad_passes(graph, is_inference=is_inference)
        lowering = GraphLowering(
            graph,
            example_inputs=inputs,
            shape_env=mode.shape_env,
            is_backward=is_backward,
            is_inference=is_inference,
        )
        with V.set_graph_handler(lowering), V.set_debug_handler(DebugContext()), _recorded() as sources:
            lowering.run(*inputs)
            code = lowering.codegen()[0]
            # Inductor counts 4-byte words
            counted = [(node, 4 * words) for node, words in lowering.count_bytes()[1]]
            kernels = tuple(
                kernel
                for node, moved in counted
                if _name(node)
                for kernel in _kernels(lowering, node, moved, sources)
            )
            names, peak = named(lowering, sources), max(live_bytes(lowering.scheduler), default=0)
    return Generated(kernels, code if isinstance(code, str) else code.value, names, peak)


@dataclass(frozen=True)
class _Source:
    """Name, text and kernel object of a generated kernel, and the scheduler's nodes it computes."""

    name: str
    text: str
    kernel: Any
    nodes: Sequence[Any]


#: What was generated for a scheduler node, by its name.
_Sources = dict[str, list[_Source]]


@contextlib.contextmanager
def _recorded() -> Iterator[_Sources]:
    """Keeps the text of every Triton kernel that is generated in the block."""
    from torch._inductor.codegen.triton import TritonScheduling

    define, combine, sources = (
        TritonScheduling.define_kernel,
        TritonScheduling.generate_combo_kernel_code,
        _Sources(),
    )
    combined: dict[int, tuple[Any, Sequence[Any]]] = {}

    def defining(self: Any, source: str, nodes: Sequence[Any], kernel: Any) -> Any:
        name = define(self, source, nodes, kernel)
        given = [node for node in nodes if hasattr(node, "get_name")]
        parts = combined[id(kernel)][1] if id(kernel) in combined else given
        for node in given:
            sources.setdefault(node.get_name(), []).append(_Source(str(name), source, kernel, parts))
        return name

    def combining(self: Any, *args: Any, **kwargs: Any) -> Any:
        # nodes to be combined may become several kernels after all
        made = combine(self, *args, **kwargs)
        combined.update({id(kernel): (kernel, nodes) for _, kernel, nodes in made})
        return made

    with (
        mock.patch.object(TritonScheduling, "define_kernel", defining),
        mock.patch.object(TritonScheduling, "generate_combo_kernel_code", combining),
    ):
        yield sources


@dataclass(frozen=True)
class Lowered:
    """One graph that Inductor compiled.

    Attributes:
        is_backward: whether it is the backward half of a training graph.
        kernels: its Triton kernels by the name they have in a profile.
    """

    is_backward: bool
    kernels: Mapping[str, Kernel]


@contextlib.contextmanager
def watched() -> Iterator[list[Lowered]]:
    """Keeps what Inductor generates in the block, for any device; its caches must be off."""
    from torch._inductor.graph import GraphLowering

    original, found = GraphLowering.codegen, list[Lowered]()

    with _recorded() as sources:

        def codegen(self: Any) -> Any:
            sources.clear()  # nodes of two graphs have the same names
            code = original(self)
            try:
                kernels = named(self, sources)
            except Exception as error:  # private interfaces; the compile goes on, these kernels have no floor
                warnings.warn(f"the kernels of a graph were not counted: {error!r}", stacklevel=2)
                kernels = {}
            found.append(Lowered(bool(self.is_backward), kernels))
            return code

        with mock.patch.object(GraphLowering, "codegen", codegen):
            yield found


def named(lowering: Any, sources: _Sources) -> dict[str, Kernel]:
    """The Triton kernels of a graph that was lowered, by name; of one of ours that runs several times, the mean."""
    kernels = {}
    own: dict[str, list[int]] = {}
    for node in lowering.scheduler.nodes:
        if _is_own(node):
            own.setdefault(_own_name(node), []).append(_own_bytes(lowering, node))
        elif not node.is_extern():
            for source in _sources_of(node, sources):
                kernels[source.name] = _counted(lowering, node, source)
    means = {name: sum(sizes) // len(sizes) for name, sizes in own.items()}
    return {**kernels, **{name: Kernel(f"triton_{name}", size) for name, size in means.items()}}


def _sources_of(node: Any, sources: _Sources) -> list[_Source]:
    names = (node.get_name(), *(part.get_name() for part in node.get_nodes()))
    return next((sources[name] for name in names if name in sources), [])


def _counted(lowering: Any, node: Any, source: _Source) -> Kernel:
    """One generated kernel of a scheduler node; a combo node may be several."""
    touched = _touched(node)
    own: Counter[str] = Counter()
    for part in source.nodes:
        own.update(_touched(part))
    tensors, moved = {}, {}
    arguments = source.kernel.args
    for buffers in (arguments.input_buffers, arguments.output_buffers, arguments.inplace_buffers):
        for buffer, argument in buffers.items():
            if buffer in touched:
                itemsize = lowering.get_dtype(buffer).itemsize
                tensors[getattr(argument, "inner_name", argument)] = Tensor(touched[buffer], itemsize)
                moved[buffer] = min(own[buffer], touched[buffer])  # parts may read the same
    return Kernel(
        _operators(source.nodes),
        sum(moved.values()),
        reread_bytes(source.text, tensors),
        strided_bytes(source.text, tensors) + scattered_bytes(source.text, tensors),
    )


def _touched(node: Any) -> Mapping[str, int]:
    """Bytes that a scheduler node reads or writes of each buffer."""
    return node.get_read_write_buffer_accesses(include_reads=True, include_writes=True)


def _kernels(lowering: Any, node: Any, moved: int, sources: _Sources) -> list[Kernel]:
    """The launches of a scheduler node in the generated code.

    Inductor counts a combo node as one kernel, which it need not be: parts of unlike tiling, and large ones, are
    launched by themselves, and read by themselves what others have read. And it counts tensors that are not written
    after all, as nothing but the kernel itself reads them. So what counts is what the generated code is given.
    """
    if _is_own(node):
        return [Kernel(_name(node), _own_bytes(lowering, node))]
    if node.is_extern():
        return [Kernel(_name(node), moved)]
    parts = [_counted(lowering, node, source) for source in _sources_of(node, sources)]
    if len(parts) == 1:
        (part,) = parts
        return [Kernel(_name(node), part.bytes, part.reread, part.strided)]
    return parts or [Kernel(_name(node), moved)]


def _name(node: Any) -> str:
    """``triton_`` and the operators it came from, the library's kernel, or "" for what runs nothing."""
    if type(node).__name__.startswith("Nop"):
        return ""
    if _is_own(node):
        return f"triton_{_own_name(node)}"
    if node.is_extern():
        return str(getattr(node.node, "python_kernel_name", None) or type(node.node).__name__)
    return _operators(node.get_nodes())


def _operators(nodes: Sequence[Any]) -> str:
    parts = [part for node in nodes for part in node.get_nodes()]
    targets = [origin.target for part in parts for origin in part.node.origins]
    names = {target.overloadpacket.__name__ for target in targets if hasattr(target, "overloadpacket")}
    return "triton_" + "_".join(sorted(names))


def _is_own(node: Any) -> bool:
    """Whether a scheduler node launches a Triton kernel that was written by hand."""
    return type(node.node).__name__ == "UserDefinedTritonKernel"


def _own_name(node: Any) -> str:
    return str(node.node.get_kernel_and_metadata()[0].__name__)


def _own_bytes(lowering: Any, node: Any) -> int:
    """Of all arguments, which what it writes are too."""
    return sum(_bytes(lowering, name) for name in {x.get_name() for x in node.node.inputs})


def _bytes(lowering: Any, name: str) -> int:
    elements = lowering.sizevars.optimization_hint(lowering.get_numel(name))
    return int(elements) * lowering.get_dtype(name).itemsize


def _on_cuda(half: fx.GraphModule) -> tuple[fx.GraphModule, list[Any], Any]:
    """The graph retraced on fake CUDA tensors of the same layouts."""
    from torch.fx.experimental.proxy_tensor import make_fx

    cuda = torch.device("cuda", 0)
    for node in half.graph.nodes:
        if "device" in node.kwargs:
            node.kwargs = {**node.kwargs, "device": cuda}
    half.recompile()
    values = [node.meta["val"] for node in half.graph.find_nodes(op="placeholder")]
    computed = [node.meta["val"] for node in half.graph.nodes if "val" in node.meta]  # of sizes no input has
    dynamic = any(isinstance(size, torch.SymInt) for v in computed for size in getattr(v, "shape", (v,)))
    mode = detect_fake_mode(values) if dynamic else fake_tensor_mode(allow_non_fake_inputs=True)
    with mode:
        inputs = [
            torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device=cuda)
            if isinstance(v, torch.Tensor)
            else v
            for v in values
        ]
        with fx.traceback.preserve_node_meta():  # kernels are named after the operators they came from
            trace = make_fx(
                lambda *args: fx.Interpreter(half).run(*args),
                tracing_mode="symbolic" if dynamic else "real",
                _allow_non_fake_inputs=True,
            )
            graph = trace(*inputs)
    _name_inputs(graph, half)
    return graph, inputs, mode


def _name_inputs(graph: fx.GraphModule, half: fx.GraphModule) -> None:
    """Inputs get names as in AOTAutograd's graphs: by them Inductor tells what it may free after its last use."""
    for node, was in zip(
        graph.graph.find_nodes(op="placeholder"), half.graph.find_nodes(op="placeholder"), strict=True
    ):
        kept = was.name.startswith(("primals_", "tangents_"))
        node.name = node.target = was.name if kept else f"saved_{was.name}"
    graph.recompile()
