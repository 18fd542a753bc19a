"""Fake tensors, symbolic sizes and what else is private about tensors and operators."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch


def detect_fake_mode(values: Sequence[Any]) -> Any:
    """The FakeTensorMode the values live in, or None (``torch._guards.detect_fake_mode``)."""
    from torch._guards import detect_fake_mode as detect

    return detect(values)


def fake_tensor_mode(symbols: bool = False, **kwargs: Any) -> Any:
    """A new ``torch._subclasses.FakeTensorMode``.

    Args:
        symbols: sizes may be symbols (``symbolic_shapes.ShapeEnv``), as those of nested tensors are, and what a
            ``while_loop`` carries.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    return FakeTensorMode(shape_env=ShapeEnv() if symbols else None, **kwargs)


def is_fake(tensor: Any) -> bool:
    """Whether a value is a ``torch._subclasses.FakeTensor``: shape and dtype, no data."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(tensor, FakeTensor)


@contextmanager
def as_it_runs() -> Iterator[None]:
    """A block in which operators act as they do when a program runs, not when one is traced.

    Outside of an active ``FakeTensorMode`` (``unset_fake_temporarily``) and of Python's own meta functions
    (``no_python_dispatcher``).
    """
    from torch._dispatch.python import no_python_dispatcher
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    with unset_fake_temporarily(), no_python_dispatcher():
        yield


def outside_of_tracers() -> AbstractContextManager[None]:
    """A block in which operators run, and nobody is told: modes, function transforms or ``torch.jit.trace``.

    Where there is nothing to leave it costs next to nothing: it is entered for every read of a parameter's ``data``.
    """
    modes = torch._C._len_torch_dispatch_stack() or torch._ops._len_torch_dispatch_stack_pre_dispatch()
    transforms = torch._C._functorch.peek_interpreter_stack() is not None
    if modes or transforms or torch._C._get_tracing_state() is not None:
        return _tracers_left()
    return _NOTHING


_NOTHING = nullcontext()


@contextmanager
def _tracers_left() -> Iterator[None]:
    """``_disable_current_modes``, ``temporarily_clear_interpreter_stack`` and ``torch._C._set_tracing_state``, where due."""
    with ExitStack() as stack:
        if (state := torch._C._get_tracing_state()) is not None:
            set_state: Any = torch._C._set_tracing_state  # type: ignore[attr-defined]
            set_state(None)
            stack.callback(set_state, state)
        if torch._C._functorch.peek_interpreter_stack() is not None:
            from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

            stack.enter_context(temporarily_clear_interpreter_stack())
        if torch._C._len_torch_dispatch_stack() or torch._ops._len_torch_dispatch_stack_pre_dispatch():
            from torch.utils._python_dispatch import _disable_current_modes

            stack.enter_context(_disable_current_modes())
        yield


@contextmanager
def unlogged_fake_errors() -> Iterator[None]:
    """A block in which an operator that refuses its fake inputs raises its error, and does not log it as well."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)


def carry_grad_dtype(parameter: Any, to: Any) -> None:
    """Gives a tensor the dtype in which a parameter wants its gradients, where it was told one (``_has_grad_dtype_override``).

    FSDP2 heeds it since torch 2.15. Earlier torch does not tell whether there is one, and its FSDP2 heeds none.
    """
    if getattr(parameter, "_has_grad_dtype_override", False):
        to.grad_dtype = parameter.grad_dtype


def fake_like(
    like: Any, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device
) -> torch.Tensor | None:
    """A new fake tensor in the mode of another, made without dispatch (``FakeTensor.__new__``).

    ``None`` where another mode than a fake one is active, which catches the making of its meta tensor. While a graph is
    compiled a fake one is always active (``unset_fake_temporarily``).
    """
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    with unset_fake_temporarily():
        meta = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        if type(meta) is not torch.Tensor:
            return None
        return type(like)(like.fake_mode, meta, device)


def fake_view(
    like: Any, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype, offset: int
) -> torch.Tensor | None:
    """A fake tensor in the memory of another, made as :func:`fake_like` makes one; ``None`` where that is."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    with unset_fake_temporarily():
        meta = torch.empty(0, dtype=dtype, device="meta")
        if type(meta) is not torch.Tensor:
            return None
        meta.set_(like.untyped_storage(), offset, shape, stride)  # type: ignore[call-overload]
        return type(like)(like.fake_mode, meta, like.device)


def size_hint(size: int | torch.SymInt) -> int | None:
    """The value a symbolic size had when it was traced; None where it has none (unbacked, or ragged)."""
    if isinstance(size, int):
        return size
    from torch.fx.experimental.symbolic_shapes import has_free_unbacked_symbols

    node = size.node
    if node.is_nested_int():
        return None
    if node.has_hint():
        return int(node.hint)
    # of a size that was unbacked first, and was found to be another since, it is not on record
    return None if has_free_unbacked_symbols(node.expr) else _hint_of(node)


def _hint_of(node: Any) -> int | None:
    """Computed anew, as a new ``SymNode`` would."""
    hint = node.shape_env._maybe_evaluate_static(node.expr, compute_hint=True)
    return None if hint is None else int(hint)


def statically_true(condition: bool | torch.SymBool) -> bool:
    """Whether a condition on symbolic sizes always holds, without adding a guard."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(condition)


def storage_key(tensor: torch.Tensor) -> int:
    """Equal for tensors, fake ones too, that are views of one memory (``UntypedStorage._cdata``)."""
    return tensor.untyped_storage()._cdata


def version_counter(tensor: torch.Tensor) -> int:
    """Counts the operators that have written to a tensor's memory, as far as autograd sees them (``_version``)."""
    return tensor._version


def infinity_norms(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Largest magnitudes of non-empty tensors, in their dtypes, by as few kernels as there can be."""
    return torch._foreach_norm(list(tensors), float("inf"))


def disabled_torch_function() -> Any:
    """What a tensor subclass that acts in ``__torch_dispatch__`` alone has as ``__torch_function__``."""
    return torch._C._disabled_torch_function_impl


def wrapper_tensor(cls: type, size: Sequence[int], **kwargs: Any) -> Any:
    """A tensor of a subclass, without memory of its own (``torch.Tensor._make_wrapper_subclass``)."""
    return torch.Tensor._make_wrapper_subclass(cls, size, **kwargs)  # type: ignore[attr-defined]


def is_operator(target: Any) -> bool:
    """Whether a node's target is one overload of an operator (``torch._ops.OpOverload``)."""
    return isinstance(target, torch._ops.OpOverload)


def is_of_torch(target: Any) -> bool:
    """Whether an overload of an operator is PyTorch's own, whose name tells what it does."""
    return target.namespace in ("aten", "prims", "_c10d_functional", "_c10d_functional_autograd")


def is_higher_order(target: Any) -> bool:
    """Whether a node's target is an operator that calls a graph (``torch._ops.HigherOrderOperator``)."""
    return isinstance(target, torch._ops.HigherOrderOperator)


def schema_of(target: Any) -> Any:
    """The schema of an operator (``OpOverload._schema``); ``None`` for other targets of nodes."""
    return getattr(target, "_schema", None)


def is_composite(operator: Any) -> bool:
    """Whether an operator is made of others (``torch._C._dispatch_has_kernel_for_dispatch_key``).

    In inference mode a subclass is handed it whole: autograd, which takes it apart elsewhere, is left out.
    """
    return torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), "CompositeImplicitAutograd")


def saved_tensors_are_read() -> bool:
    """Whether hooks read what is saved for a backward (``torch._C._autograd._top_saved_tensors_default_hooks``).

    Checkpointing's do not.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return hooks is not None and getattr(hooks[0], "__module__", "") != "torch.utils.checkpoint"


def in_backward() -> bool:
    """Whether this thread is running a backward (``torch._C._current_graph_task_id``)."""
    return torch._C._current_graph_task_id() != -1
