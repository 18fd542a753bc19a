"""Names of modules in a graph that begins after a graph break.

In ``self.head(self.backbone(x))`` Python loads ``self.head`` first; where the call of ``backbone`` breaks the graph, the
rest of the frame has it on its stack, and Dynamo knows it as ``L['___stack0']``. Its name is that in the module whose
``forward`` was interrupted.
"""

from __future__ import annotations

import inspect

from torch import fx, nn
from torch.nn.parameter import is_lazy

from .torch_private import modules_on_stack


def name_modules(gm: fx.GraphModule) -> None:
    """Puts names in the place of positions on a stack, in the metadata of a graph that Dynamo is about to compile."""
    held = modules_on_stack()
    names = {source: name for source, module in held.items() if (name := _name_of(module))}
    if not names:
        return
    for graph in (module.graph for module in gm.modules() if isinstance(module, fx.GraphModule)):
        for node in graph.nodes:
            if stack := node.meta.get("nn_module_stack"):
                node.meta["nn_module_stack"] = {
                    key: (_renamed(path, names), kind) for key, (path, kind) in stack.items()
                }


def _renamed(path: str, names: dict[str, str]) -> str:
    root = path.partition("]")[0] + "]"
    return f"L['self'].{names[root]}{path[len(root) :]}" if root in names else path


def _name_of(module: nn.Module) -> str | None:
    """Its name in the module whose ``forward`` is running, if any.

    Dynamo runs the graph of one module for others that are equal but for their weights. So one of a list has none, and one of
    several side by side has the names of all: ``policy|value``.
    """
    frame = inspect.currentframe()
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and not isinstance(owner, fx.GraphModule):
            name = next((name for name, inner in owner.named_modules() if inner is module), None)
            if name:
                if any(part.isdigit() for part in name.split(".")):
                    return None
                parent = name.rpartition(".")[0]
                siblings = owner.get_submodule(parent).named_children()
                alike = "|".join(each for each, inner in siblings if _form(inner) == _form(module))
                return f"{parent}.{alike}" if parent else alike
        frame = frame.f_back  # type: ignore[assignment]
    return None


def _form(module: nn.Module) -> tuple[object, ...]:
    """Different for modules whose graphs Dynamo keeps apart."""
    shapes = ((name, None if is_lazy(each) else each.shape) for name, each in module.named_parameters())
    return type(module), *shapes
