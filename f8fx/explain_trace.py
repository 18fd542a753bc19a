"""Tracing a model for :mod:`f8fx.explain`: nothing runs and nothing is allocated.

The model is copied with a *fake* tensor, shape and dtype without data, in the place of each of its
tensors, and the copy is called under ``torch.compile`` with fakes as inputs. The backend there only
looks: it has AOTAutograd build the joint graph, partitions it as it is and as the passes rewrite it,
and returns Dynamo's graph, which yields more fakes. So graph breaks, several graphs and
Python between them work as they do in earnest.

Most laptops have no device to trace for, so tracing happens on the CPU unless the model lies
elsewhere. Two things in a graph depend on the device and are put right (:func:`_as_on_target`): which
kernel attention becomes, and which device an autocast region speaks of.
"""

from __future__ import annotations

import copy
import functools
import math
import re
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from .graph_bytes import communicated_bytes, saved_bytes
from .parallelized import dtensor_like
from .partition import Partitioner
from .parts import is_dtensor
from .passes import Pipeline
from .passes.decided import is_decided, mark_decided
from .passes.parameters import KnownInputs, is_there
from .report import GraphReport
from .resumed import name_modules
from .torch_private import (
    aot_backend,
    boxed,
    cause_of,
    decompositions,
    fake_tensor_mode,
    is_fake,
    min_cut_partition,
    opens_autocast,
    tree_leaves,
    tree_map,
    unlogged_fake_errors,
    unnoticed_by_dynamo,
)
from .wire import Call, calls_of

aten = torch.ops.aten


class ExplainError(RuntimeError):
    """The model could not be copied or traced; the cause is attached."""


@dataclass(frozen=True)
class GraphTrace:
    """What was found out about one graph.

    Attributes:
        report: what the passes decided.
        saved_bytes_high, saved_bytes_float8: bytes that are kept from forward to backward, in high precision and
            in float8 (:func:`f8fx.graph_bytes.saved_bytes`).
        communicated_bytes_high, communicated_bytes: bytes in the collectives, likewise.
        calls_high, calls: the collectives of forward and backward, likewise; what is recomputed is there twice.
    """

    report: GraphReport
    saved_bytes_high: int = 0
    saved_bytes_float8: int = 0
    communicated_bytes_high: int = 0
    communicated_bytes: int = 0
    calls_high: tuple[Call, ...] = ()
    calls: tuple[Call, ...] = ()


def trace(
    model: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    pipeline: Pipeline,
    partitioner: Partitioner,
    like_gpu: bool,
    dynamic: bool,
) -> list[GraphTrace]:
    """Traces a call of a module or function with its gradients, if any are asked for.

    Args:
        pipeline: the passes.
        partitioner: what the float8 graph is split with.
        like_gpu: trace attention and autocast as on a GPU, wherever the tensors are.
        dynamic: all sizes of inputs are symbolic.

    Raises:
        ExplainError: if the model cannot be copied or traced.
    """
    if lazy := _uninitialized(model):
        raise ExplainError(f"{lazy} of {name_of(model)} has no shape yet: call the model once before")
    mode = fake_tensor_mode(symbols=True, allow_non_fake_inputs=True)
    replica = _Replica(mode, (model, args, kwargs))
    call = replica.of_callable(model)
    fake_args, fake_kwargs = replica.of_inputs((tuple(args), dict(kwargs)))
    collector = _Collector(pipeline, partitioner, like_gpu)
    try:
        with (
            torch.compiler.set_stance("default"),
            unnoticed_by_dynamo(collector),
            unlogged_fake_errors(),
            mode,
            warnings.catch_warnings(),
        ):
            # of no consequence: see _as_on_target
            warnings.filterwarnings("ignore", ".*CUDA is not available.*Disabling autocast")
            torch.compile(call, backend=collector, dynamic=dynamic)(*fake_args, **fake_kwargs)
    except Exception as error:
        raise _explained(model, error) from error
    return collector.graphs


def _uninitialized(model: Callable[..., Any]) -> str | None:
    """The name of a parameter or buffer of a lazy module that has not been called."""
    model = _uncompiled(model)
    if not isinstance(model, nn.Module):
        return None
    named = (*model.named_parameters(), *model.named_buffers())
    return next((name for name, tensor in named if nn.parameter.is_lazy(tensor)), None)


def _explained(model: Callable[..., Any], error: Exception) -> ExplainError:
    cause = cause_of(error)
    lines = str(cause).strip().splitlines()
    text = f"{type(cause).__name__}: {lines[0] if lines else ''}"
    hint = _line_of_user(error)
    if "DataDependent" in text or "DynamicOutputShape" in text:
        hint += "; its sizes or branches depend on values, and explain has none: it only traces"
    return ExplainError(f"could not trace {name_of(model)}: {text}{hint}")


def _line_of_user(error: Exception) -> str:
    """Where in the user's code Dynamo says that it was: it lists lines of torch's modules there too."""
    _, _, traceback = str(error).partition("from user code:")
    frames = re.findall(r'File "([^"]+)", line (\d+), in .*\n *(.*)', traceback)
    inside = (str(Path(torch.__file__).parent), str(Path(__file__).parent))
    for file, number, code in reversed(frames):
        if not file.startswith(inside):
            return f" (at {Path(file).name}:{number}: {code})"
    return ""


def name_of(model: Callable[..., Any]) -> str:
    """What to call a module or function."""
    model = _uncompiled(model)
    return (
        model.__class__.__name__ if isinstance(model, nn.Module) else getattr(model, "__name__", "function")
    )


def _uncompiled(model: Callable[..., Any]) -> Callable[..., Any]:
    """The module or function inside ``torch.compile(...)``."""
    for attribute in ("_orig_mod", "_torchdynamo_orig_callable"):
        model = getattr(model, attribute, model)
    return model


# -- the copy -------------------------------------------------------------------------------------


class _Replica:
    """Copies of modules and functions in which every tensor is a fake; tied tensors stay tied."""

    def __init__(self, mode: Any, everything: Any) -> None:
        self.mode = mode
        self.memo: dict[int, Any] = {}
        devices = (leaf.device for leaf in _tensors(everything))
        # a model on "meta" is explained on the device of its inputs, by default the CPU
        self.device = next((d for d in devices if d.type != "meta"), torch.device("cpu"))

    def of_callable(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function whose code object is its own: Dynamo keeps what it learns there."""
        function = _uncompiled(function)
        if isinstance(function, types.FunctionType):
            cells = tuple(
                types.CellType(self._of_cell(cell.cell_contents)) for cell in function.__closure__ or ()
            )
            copied = types.FunctionType(
                function.__code__.replace(),
                function.__globals__,
                function.__name__,
                function.__defaults__,
                cells,
            )
            copied.__kwdefaults__ = function.__kwdefaults__  # pyright: ignore[reportAttributeAccessIssue]
            return copied
        copied = self._deepcopy(function)

        def call(*args: Any, **kwargs: Any) -> Any:
            return copied(*args, **kwargs)

        return types.FunctionType(call.__code__.replace(), call.__globals__, "call", None, call.__closure__)

    def _of_cell(self, content: Any) -> Any:
        if isinstance(content, types.FunctionType):
            return self.of_callable(content)
        return self._deepcopy(content) if _tensors(content) else content

    def of_inputs(self, inputs: Any) -> Any:
        """The same nest of inputs with fakes for tensors."""
        return tree_map(lambda leaf: self._fake(leaf) if isinstance(leaf, Tensor) else leaf, inputs)

    def _deepcopy(self, value: Any) -> Any:
        for tensor in _tensors(value):
            self._fake(tensor)
        try:
            return copy.deepcopy(value, self.memo)
        except Exception as error:
            raise ExplainError(
                f"could not copy {name_of(value)} ({type(error).__name__}: {error}); explain traces a copy, "
                "so that yours is left as it is"
            ) from error

    def _fake(self, tensor: Tensor) -> Tensor:
        if id(tensor) in self.memo:
            return self.memo[id(tensor)]
        if tensor.device.type == "meta" and is_dtensor(tensor):
            fake = dtensor_like(tensor, self._fake)
        elif tensor.device.type == "meta" or is_fake(tensor) or _made_in_inference_mode(tensor):
            # of this mode and no other; the fake of an inference tensor would be one, which no backward takes
            device = self.device if tensor.device.type == "meta" else tensor.device
            with self.mode:
                fake = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)
        else:
            fake = self.mode.from_tensor(tensor, static_shapes=True)
        if isinstance(tensor, nn.Parameter) and not isinstance(fake, nn.Parameter):
            with self.mode:  # not a mode that is on around
                fake = nn.Parameter(fake, requires_grad=False)
        if fake.is_leaf:
            fake.requires_grad_(tensor.requires_grad)
        for name, value in vars(tensor).items():  # such as torch._dynamo.mark_dynamic leaves
            if name not in vars(fake):
                setattr(fake, name, value)
        self.memo[id(tensor)] = fake
        return fake


def _made_in_inference_mode(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, nn.Parameter) and tensor.is_inference()


def _tensors(value: Any) -> list[Tensor]:
    """Every tensor in a nest of containers, modules (their plain attributes too) and functions."""
    found: list[Tensor] = []
    seen: set[int] = set()

    def visit(value: Any) -> None:
        for leaf in tree_leaves(value):
            if isinstance(leaf, Tensor):
                found.append(leaf)
            elif id(leaf) in seen:
                continue
            elif isinstance(leaf, nn.Module):
                seen.add(id(leaf))
                visit(dict(vars(leaf)))
            elif isinstance(leaf, types.MethodType):
                visit(leaf.__self__)
            elif isinstance(leaf, functools.partial):
                visit([leaf.func, leaf.args, leaf.keywords])
            elif isinstance(leaf, types.FunctionType):
                seen.add(id(leaf))
                visit([cell.cell_contents for cell in leaf.__closure__ or ()])

    visit(value)
    return found


# -- the backend ----------------------------------------------------------------------------------


class _Collector:
    """A Dynamo backend that looks at each graph and hands it back as it was."""

    def __init__(self, pipeline: Pipeline, partitioner: Partitioner, like_gpu: bool) -> None:
        self.pipeline = pipeline
        self.partitioner = partitioner
        self.like_gpu = like_gpu
        self.known = KnownInputs()
        self.graphs: list[GraphTrace] = []

    def __call__(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        name_modules(gm)
        if self.like_gpu:
            _as_on_target(gm)
        self.known = KnownInputs.of(inputs)
        look = aot_backend(
            fw_compiler=_keep,
            bw_compiler=_keep,
            inference_compiler=self._infer,
            partition_fn=self._partition,
            decompositions=decompositions(),
            keep_inference_input_mutations=True,
        )
        look(gm, inputs)
        return gm.forward

    def _infer(self, graph: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        self.known.mark(graph.graph)
        rewritten = _copied(graph.graph)
        report = self._report(rewritten, graph)
        communicated = (communicated_bytes(graph.graph), communicated_bytes(rewritten))
        calls = (tuple(calls_of(g, backward=False)) for g in (graph.graph, rewritten))
        self.graphs.append(GraphTrace(report, 0, 0, *communicated, *calls))
        return boxed(graph.forward)

    def _partition(self, joint: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
        self.known.mark(joint.graph)
        rewritten = fx.GraphModule(joint, _copied(joint.graph))
        report = self._report(rewritten.graph, joint)
        communicated = (communicated_bytes(joint.graph), communicated_bytes(rewritten.graph))
        outputs = kwargs["num_fwd_outputs"]
        halves = min_cut_partition(joint, inputs, **kwargs)
        float8 = halves
        if report.converted:
            rewritten.recompile()
            float8 = self.partitioner(rewritten, inputs, **kwargs)
        high, low = (saved_bytes(forward.graph, outputs, is_there) for forward, _ in (halves, float8))
        calls = ((*calls_of(f.graph, False), *calls_of(b.graph, True)) for f, b in (halves, float8))
        self.graphs.append(GraphTrace(report, high, low, *communicated, *calls))
        return halves

    def _report(self, rewritten: fx.Graph, whole: fx.GraphModule) -> GraphReport:
        """Rewrites the copy of a graph; what is decided in it and in the bodies of its higher-order operators."""
        reports = [self.pipeline(rewritten)]
        for body in whole.modules():
            if isinstance(body, fx.GraphModule):
                if body is not whole and not is_decided(body.graph):
                    reports.append(self.pipeline(_copied(body.graph)))
                mark_decided(body.graph)
        return GraphReport.merged(reports)[0]


def _keep(graph: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
    return boxed(graph.forward)


def _copied(graph: fx.Graph) -> fx.Graph:
    """A copy with the same metadata (``deepcopy`` would also copy, and warn about, pytree specs)."""
    copied = fx.Graph()
    result: Any = copied.graph_copy(graph, {})
    copied.output(result).meta = copy.copy(graph.output_node().meta)
    return copied


# -- as on the target -----------------------------------------------------------------------------


def _as_on_target(gm: fx.GraphModule) -> None:
    """Replaces in Dynamo's graph what would be traced otherwise on a CPU than on a GPU."""
    for node in gm.graph.nodes:
        if node.target is F.scaled_dot_product_attention:
            node.target = _attention
        elif opens_autocast(node) and node.args[0] == "cuda":
            dtype = node.args[1] if len(node.args) > 1 else None
            node.args = ("cpu", dtype or torch.get_autocast_dtype("cuda"), *node.args[2:])
    gm.recompile()


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """``F.scaled_dot_product_attention`` as one fused CUDA kernel, called on fake CPU tensors.

    What it keeps for the backward is then what the target would keep: not the [S, S] scores. Flash attention takes
    values as wide as queries only, and neither kernel broadcasts.
    """

    def broadcasts() -> bool:
        batch, heads = query.shape[:2]
        other_batch = key.shape[0] != batch or value.shape[0] != batch
        return other_batch or (not enable_gqa and key.shape[1] != heads)

    if not query.dim() == key.dim() == value.dim() == 4 or broadcasts() or query.device.type != "cpu":
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    half = query.dtype in (torch.bfloat16, torch.float16)
    if attn_mask is None and half and query.shape[-1] == value.shape[-1]:
        return aten._scaled_dot_product_flash_attention(
            query, key, value, dropout_p, is_causal, False, scale=scale
        )[0]
    if enable_gqa:
        sharers = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(sharers, 1), value.repeat_interleave(sharers, 1)
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(~attn_mask, -math.inf)
        attn_mask = attn_mask.to(query.dtype).expand(*query.shape[:3], key.shape[2])
    return aten._scaled_dot_product_efficient_attention(
        query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale
    )[0]
