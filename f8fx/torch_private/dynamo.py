"""Dynamo: compiling without a trace, and what a graph of its carries beside its nodes."""

from __future__ import annotations

import copy
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import fx, nn

from .patch import patched_attribute

_FORGETTING = threading.RLock()


@contextmanager
def unnoticed_by_dynamo(backend: Any) -> Iterator[None]:
    """What this thread compiles with a backend of its own inside the block is forgotten after it, and nothing else is.

    Dynamo keeps, for each code object, what it compiled, whether it is to be skipped, and, for each line of source, the
    sizes it saw, from which it later guesses what is dynamic
    (``torch._dynamo.pgo``). ``torch.compiler.reset()`` would clear all of it for everybody. Other threads may compile and run
    meanwhile; the sizes that those see are forgotten too. Blocks of several threads wait for each other.
    """
    from torch._dynamo import convert_frame, pgo

    no_sizes = type(pgo.get_code_state())(pgo.CodeState)
    with _FORGETTING, patched_attribute(pgo, "_CODE_STATE", no_sizes), _visited_codes() as visited:
        try:
            yield
        finally:
            with convert_frame.compile_lock:  # others are at none of these
                for code, was_known in visited.values():
                    _forget(code, backend, was_known)


@contextmanager
def _visited_codes() -> Iterator[dict[int, tuple[types.CodeType, bool]]]:
    """The code that this thread has Dynamo look at inside the block, by id, and whether Dynamo knew it before (``input_codes``)."""
    from torch._dynamo import convert_frame

    tracker, this_thread = convert_frame.input_codes, threading.get_ident()
    visited: dict[int, tuple[types.CodeType, bool]] = {}  # code that reads alike is equal
    add = tracker.add

    def noted(code: types.CodeType) -> None:
        if threading.get_ident() == this_thread:
            visited.setdefault(id(code), (code, code in tracker))
        add(code)

    with patched_attribute(tracker, "add", noted):
        yield visited


def _forget(code: types.CodeType, backend: Any, was_known: bool) -> None:
    """Drops what was compiled of some code with a backend; all that Dynamo knows of it, if that was all."""
    from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list, reset_code
    from torch._dynamo.guards import DeletedGuardManagerWrapper

    entries = _debug_get_cache_entry_list(code)
    ours = [entry for entry in entries if getattr(entry.backend, "compiler_fn", None) is backend]
    if not was_known and len(ours) == len(entries):
        reset_code(code)
        return
    for entry in ours:
        if (state := entry.guard_manager.extra_state) is not None:
            state.invalidate(entry, DeletedGuardManagerWrapper("explained"))


def keep_out_of_packages(gm: fx.GraphModule) -> None:
    """Of a Dynamo graph about to be compiled: nothing is to be put into Dynamo's own packages (``caching_precompile``).

    They are found by the function alone: with other options, or another backend, the same code would be run, and nobody told.
    """
    if torch._dynamo.config.caching_precompile:
        gm._backend_id = None  # type: ignore[assignment]  # by which AOTAutograd records what a package is to hold


def cause_of(error: BaseException) -> BaseException:
    """What stopped a trace: not Dynamo's report of it (``torch._dynamo.exc``), but what was raised, if anything was.

    A compiler's error is wrapped too, with the error in ``inner_exception``.
    """
    error = getattr(error, "inner_exception", None) or error
    cause: BaseException | None = error
    while cause is not None and type(cause).__module__ == "torch._dynamo.exc":
        cause = cause.__cause__ or cause.__context__
    return cause or error


def begins_anew(error: BaseException) -> bool:
    """Whether an exception is Dynamo's way to trace a function once more, and no failure (``RestartAnalysis``)."""
    from torch._dynamo.exc import RestartAnalysis

    return isinstance(error, RestartAnalysis)


def copy_of_graph(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy of a Dynamo graph with what AOTAutograd reads in one beside its nodes; modules and tensors are shared.

    ``_dynamo_source`` of placeholders, ``_param_name_to_source`` and ``meta["dynamo_compile_id"]``: without them
    it would not know which inputs keep their address (``_try_get_metadata_from_dynamo``). Without ``meta["grapharg"]``, which
    holds weak references to the inputs: while there are such, ``swap_tensors`` refuses them.
    """
    copied = fx.GraphModule(gm, copy.deepcopy(gm.graph))
    copied.meta.update(gm.meta)
    if hasattr(gm, "_param_name_to_source"):
        copied._param_name_to_source = gm._param_name_to_source
    for new, old in zip(copied.graph.nodes, gm.graph.nodes, strict=True):
        if hasattr(old, "_dynamo_source"):
            new._dynamo_source = old._dynamo_source
        new.meta.pop("grapharg", None)
    return copied


def forget_traced_regions() -> None:
    """Regions that are traced once for all their calls (``nested_compile_region``) are traced anew by the next trace.

    The graphs kept of an earlier one (``TracingContext.hop_dispatch_set_cache``) are those that passes have rewritten.
    """
    from torch._higher_order_ops.invoke_subgraph import invoke_subgraph

    context = torch._guards.TracingContext.try_get()
    cache = context and context.hop_dispatch_set_cache.get_cache(invoke_subgraph)
    for kept in ("autograd_cache", "proxy_dispatch_cache", "lazy_bwd_cache"):
        if hasattr(cache, kept):
            getattr(cache, kept).clear()


def modules_on_stack() -> dict[str, nn.Module]:
    """The modules on the stack of the frame that is compiled, one resumed after a graph break, by Dynamo's name for them.

    ``InstructionTranslator.current_tx()``, its ``output.root_tx.f_locals``, and locals called ``___stack0``.
    """
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        frame = InstructionTranslator.current_tx().output.root_tx.f_locals
    except AttributeError:  # Dynamo is at no frame
        return {}
    return {
        f"L[{name!r}]": value
        for name, value in frame.items()
        if name.startswith("___stack") and isinstance(value, nn.Module)
    }


def keeps_its_address(value: Any) -> bool:
    """Whether an input of a Dynamo graph is held by a module or an optimizer (``_dynamo_static_input_type``)."""
    return getattr(value, "_dynamo_static_input_type", None) is not None


def mark_as_dynamo_input(node: fx.Node, is_static: bool) -> None:
    """Gives a placeholder added to a Dynamo graph what AOTAutograd reads in Dynamo's own.

    ``_dynamo_source``; ``_dynamo_static_input_type`` in ``meta["tensor_dict"]``.

    Args:
        is_static: what it stands for keeps its address from call to call: CUDA graphs need not copy it.
    """
    node.meta["tensor_dict"] = {"_dynamo_static_input_type": "unguarded"} if is_static else {}
    node._dynamo_source = None  # type: ignore[attr-defined]


def opens_autocast(node: fx.Node) -> bool:
    """Whether a node of a Dynamo graph opens an autocast region (``autocast_mode._enter_autocast``)."""
    return node.target is torch.amp.autocast_mode._enter_autocast


def untraced() -> Any:
    """A block in which compiling is no part of the compilation going on (``torch._guards.tracing``)."""
    from torch._guards import tracing

    return tracing(None)


def flex_attention_with_gradients() -> AbstractContextManager[None]:
    """A block in which FlexAttention is traced on CPU tensors that need gradients too.

    It refuses since it has no backward kernel for them (``flex_attention._validate_device``); tracing needs none.
    """
    from torch.nn.attention import flex_attention

    return patched_attribute(flex_attention, "_validate_device", lambda query, key, value: None)


class _Marked(torch._TorchCompileInductorWrapper):
    """What ``torch.compile`` makes for the stock backend, equal only to what has its mark."""

    mark: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Marked) and self.mark is other.mark and super().__eq__(other)

    __hash__ = None  # type: ignore[assignment]


def mark_stock_wrappers(mark: Callable[[], Any]) -> Callable[[], None]:
    """From now on ``torch.compile`` marks what it makes for the stock backend; the way back.

    ``torch._TorchCompileInductorWrapper``: where two are equal, Dynamo takes graphs of one for the other's.

    Args:
        mark: what to mark one with that is made now, ``None``: with nothing.
    """
    wrapper: Any = torch._TorchCompileInductorWrapper
    original = wrapper.__init__

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        found = mark()
        if found is not None and type(self) is wrapper:
            self.__class__ = _Marked
            self.mark = found

    def undo() -> None:
        if wrapper.__init__ is __init__:  # else others lie over it, and it marks nothing any more
            wrapper.__init__ = original

    wrapper.__init__ = __init__
    return undo


def uncompiled(model: Callable[..., Any]) -> Callable[..., Any]:
    """The module or function inside ``torch.compile(...)``: ``_orig_mod``, ``_torchdynamo_orig_callable``."""
    for attribute in ("_orig_mod", "_torchdynamo_orig_callable"):
        inner = getattr(model, attribute, model)
        if (
            inner is not model
            and isinstance(model, types.MethodType)
            and not isinstance(inner, types.MethodType)
        ):
            inner = types.MethodType(inner, model.__self__)  # a method that was decorated
        model = inner
    return model
