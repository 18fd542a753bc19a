"""Names of modules, read from the metadata that Dynamo and AOTAutograd leave on nodes.

Forward nodes carry ``nn_module_stack``, backward ones ``fwd_nn_module_stack``: the chain of modules
whose ``forward`` was running, as Python source (``L['self'].layers[0].attn``). A user knows
``layers.0.attn``, the name ``named_modules()`` gives.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence

from torch import fx

#: A local or global variable, one of a function's ``*args``, or what a function in one closes over.
_ROOT = re.compile(r"^(?:L\['args'\]\[\d+\]|[LG]\['[^']*'\])(?:\.__closure__\[\d+\]\.cell_contents)*")
_OF_FUNCTION = r"\.__closure__\[\d+\]\.cell_contents|\.__wrapped__|\._torchdynamo_inline|\.__self__"
_OF_PARTIAL = r"\.func|\.args\[0\]"
#: The module whose ``forward`` is replaced by a function that calls it, or a copy of it under another name: TorchTitan's
#: ``parallelize`` and accelerate's hooks. What a ``partial`` has (``func``, ``args``) a module may have as well, but for
#: one of the name of the method.
_REPLACED = re.compile(
    rf"\.(?:\w*forward\w*(?:{_OF_FUNCTION})|forward(?:{_OF_PARTIAL}))(?:{_OF_FUNCTION}|{_OF_PARTIAL})*(?=[.\[]|$)"
)
#: The object that a bound method belongs to.
_BOUND = re.compile(r"^.*\.__self__(?=[.\[]|$)")
#: A module that a property's getter calls: TorchTitan's SimpleFSDP gathers all weights with one.
_GETTER = re.compile(r"__dict__\)?\[['\"]\w+['\"]\]\.fget\b")
#: A child reached through ``_modules``, and, in modules with a ``__getattr__`` of their own, ``__dict__``.
_MODULES = re.compile(r"\.(?:__dict__\['_modules'\]|_modules)(?=\[)")
#: A number, or a key as ``repr`` writes it, whatever is in it.
_INDEX = re.compile(r"""\[('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|[^\]'"]+)\]""")
_GETATTR = re.compile(r"getattr\(([^(),]*(?:\([^()]*\))?[^(),]*), '([^']+)'\)")
#: Wrappers that add a level to the path but none to the name a user knows.
_WRAPPERS = frozenset(("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"))


def clean(path: str) -> str:
    """The dotted name for a path in Dynamo's notation; "" for the compiled module itself."""
    previous = None
    while previous != path:
        previous, path = path, _GETATTR.sub(r"\1.\2", path)
    path = _REPLACED.sub("", path)
    path = _BOUND.sub("", path)
    path = _ROOT.sub("", path)
    path = _MODULES.sub("", path)
    path = _INDEX.sub(lambda found: f".{_key(found[1])}", path)
    return without_wrappers(path)


def _key(source: str) -> str:
    return str(ast.literal_eval(source)) if source[0] in "'\"" else source


def without_wrappers(name: str) -> str:
    """A dotted name without the levels that checkpointing, compiling and sharding in place add to it."""
    return ".".join(part for part in name.split(".") if part and part not in _WRAPPERS)


def of_node(node: fx.Node) -> str:
    """Name of the innermost module a node belongs to, forward or backward; "" where there is none."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not stack:
        # what TorchTitan's graph_trainer, which traces without Dynamo, writes instead
        custom = node.meta.get("custom")
        return str(custom.get("module_fqn") or "") if isinstance(custom, dict) else ""
    paths = [path for path, _ in stack.values() if not _GETTER.search(path)]
    return clean(paths[-1]) if paths else ""


def short_names(names: Sequence[str]) -> list[str]:
    """The names without the modules that all of them are in: ``wq`` and ``wk`` for two of one attention."""
    parts = [name.split(".") for name in names]
    common = 0
    while all(len(own) > common + 1 for own in parts) and len({own[common] for own in parts}) == 1:
        common += 1
    return [".".join(own[common:]) for own in parts]
