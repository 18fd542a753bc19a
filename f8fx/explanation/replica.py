"""Copies of modules and functions whose tensors have shapes and no data, for :mod:`f8fx.explanation.trace`.

Every tensor of the copy is a *fake*, so that tracing it allocates nothing and leaves the user's model as it was.
"""

from __future__ import annotations

import copy
import functools
import threading
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from f8fx.parts import dtensor_like, is_dtensor
from f8fx.torch_private import is_fake, local_tensor, tree_leaves, tree_map, uncompiled
from f8fx.weights.copies import note_refusals


class ExplainError(RuntimeError):
    """The model could not be copied or traced; the cause is attached."""


class Replica:
    """Copies of modules and functions in which every tensor is a fake; tied tensors stay tied."""

    def __init__(self, mode: Any, everything: Any) -> None:
        self.mode = mode
        self.memo: dict[int, Any] = {}
        self.functions: dict[types.FunctionType, types.FunctionType] = {}
        devices = (leaf.device for leaf in _tensors(everything))
        # a model on "meta" is explained on the device of its inputs, by default the CPU
        self.device = next((d for d in devices if d.type != "meta"), torch.device("cpu"))

    def of_callable(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function whose code object is its own: Dynamo keeps what it learns there."""
        function = uncompiled(function)
        if isinstance(function, types.FunctionType):
            if function in self.functions:  # it calls itself
                return self.functions[function]
            cells = tuple(types.CellType() for _ in function.__closure__ or ())
            copied = types.FunctionType(
                function.__code__.replace(),
                function.__globals__,
                function.__name__,
                None,
                cells,
            )
            self.functions[function] = copied
            defaults, by_name = function.__defaults__, function.__kwdefaults__
            copied.__defaults__ = defaults and tuple(map(self._of_cell, defaults))
            copied.__kwdefaults__ = by_name and {name: self._of_cell(each) for name, each in by_name.items()}  # pyright: ignore[reportAttributeAccessIssue]
            for cell, given in zip(cells, function.__closure__ or (), strict=True):
                for content in _contents(given):
                    cell.cell_contents = self._of_cell(content)
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
        """The same nest of inputs with fakes for tensors, and copies of what holds tensors: a module, a cache."""

        def of_leaf(leaf: Any) -> Any:
            if isinstance(leaf, Tensor):
                return self._fake(leaf)
            return self._of_cell(leaf) if _tensors(leaf) else leaf

        return tree_map(of_leaf, inputs)

    def _deepcopy(self, value: Any) -> Any:
        for leaf in _leaves(value):
            if isinstance(leaf, Tensor):
                self._fake(leaf)
            elif isinstance(leaf, _SHARED):
                self.memo[id(leaf)] = leaf
            elif uncompiled(leaf) is leaf and _tensors(leaf):
                self.memo[id(leaf)] = self.of_callable(leaf)  # Python copies no function
        is_known = id(value) in self.memo
        try:
            copied = copy.deepcopy(value, self.memo)
        except Exception as error:
            raise ExplainError(
                f"could not copy {name_of(value)} ({type(error).__name__}: {error}); explain traces a copy, "
                "so that yours is left as it is"
            ) from error
        if isinstance(copied, nn.Module) and not is_known:
            for module in copied.modules():
                self._copy_functions(vars(module))
        return copied

    def _copy_functions(self, holder: dict[Any, Any]) -> None:
        """What a module holds that Python does not copy: a forward in the place of its own, hooks, which may close over the module."""
        for name, held in list(holder.items()):
            if name in _HOOKS:
                self._copy_functions(held)
            elif isinstance(held, types.FunctionType):
                inner = uncompiled(held)
                if inner in self.functions.values():
                    continue
                if isinstance(inner, types.MethodType):
                    owner = self.memo.get(id(inner.__self__), inner.__self__)
                    holder[name] = types.MethodType(inner.__func__, owner)
                elif _tensors(inner):
                    holder[name] = self.of_callable(inner)

    def _fake(self, tensor: Tensor) -> Tensor:
        if id(tensor) in self.memo:
            return self.memo[id(tensor)]
        if tensor.device.type == "meta" and is_dtensor(tensor):
            fake = dtensor_like(tensor, self._fake(local_tensor(tensor)).detach())
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
        if type(tensor) is nn.Parameter and tensor.device.type != "meta":
            note_refusals(fake, tensor)
        self.memo[id(tensor)] = fake
        return fake


def _made_in_inference_mode(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, nn.Parameter) and tensor.is_inference()


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
#: What a copy has in common with what it is of: it cannot be copied or, as a mesh with its groups, need not be.
_SHARED: tuple[type, ...] = (
    DeviceMesh,
    torch.Generator,
    torch.Stream,
    type(threading.Lock()),
    type(threading.RLock()),
    *([dist.ProcessGroup] if dist.is_available() else []),
)


def _contents(cell: types.CellType) -> list[Any]:
    """What a function closes over; nothing, where the variable has no value (yet)."""
    try:
        return [cell.cell_contents]
    except ValueError:
        return []


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in _leaves(value) if isinstance(leaf, Tensor)]


def _leaves(value: Any) -> list[Any]:
    """Every tensor and function, and what is shared, in a nest of containers, modules, functions and other objects (their attributes)."""
    found: list[Any] = []
    seen: set[int] = set()

    def visit(value: Any) -> None:
        for leaf in tree_leaves(value):
            if isinstance(leaf, (Tensor, *_SHARED)):
                found.append(leaf)
            elif id(leaf) in seen:
                continue
            elif isinstance(leaf, types.MethodType):
                visit(leaf.__self__)
            elif isinstance(leaf, functools.partial):
                visit([leaf.func, leaf.args, leaf.keywords])
            elif isinstance(leaf, types.FunctionType):
                found.append(leaf)
                seen.add(id(leaf))
                visit([content for cell in leaf.__closure__ or () for content in _contents(cell)])
                visit([leaf.__defaults__, leaf.__kwdefaults__])
            elif hasattr(leaf, "__dict__") and not isinstance(leaf, (type, types.ModuleType)):
                seen.add(id(leaf))
                visit(dict(vars(leaf)))

    visit(value)
    return found


def name_of(model: Callable[..., Any]) -> str:
    """What to call a module or function."""
    model = uncompiled(model)
    return (
        model.__class__.__name__ if isinstance(model, nn.Module) else getattr(model, "__name__", "function")
    )
