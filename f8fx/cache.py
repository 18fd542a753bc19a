"""What a compiled graph depends on, for Inductor's caches.

Inductor's keys hold the graph, the inputs' metadata, its configuration and ``uuid()`` of each custom
pass. They do not hold module names, and a joint graph's decisions may depend on them: with a filter,
two models of equal graphs and different names want different code, and without one, reports of their
own. So everything a decision depends on goes into the uuid here: the code of f8fx, the options, module
names, and values of dynamic sizes where the cost model reads them.

A cache hit skips the passes, and with them the record of what was decided. The record is therefore
kept beside Inductor's cache, under the same key, and what Inductor's keys hold besides: of the graph, of its own
options and AOTAutograd's, under which the graph that the passes saw was made of it, and of the machine.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from .hardware import of_device
from .options import Options
from .passes.parameters import KnownInputs
from .passes.reuse import CastFormat, Place, ScaleFormat, WeightInputs
from .records import load_json, store_json
from .report import GraphReport, dtype_name, log
from .sources import source_hash
from .torch_private import (
    CustomGraphPass,
    group_backends,
    inductor_cache_dir,
    place_in_mesh,
    settings,
    size_hint,
)


@dataclass(frozen=True)
class CacheKey:
    """The key of one compiled Dynamo graph, in Inductor's caches and for the record of decisions beside them.

    Attributes:
        uuid: what the passes' decisions depend on beyond the graph; ``None``: not cacheable.
        graph: identifies Dynamo's graph and its inputs, what PyTorch's compilers are set to, and the machine, for the
            record of decisions.
    """

    uuid: str | None
    graph: str

    def extended(self, decided: Any) -> CacheKey:
        """The key of the same graph compiled with something more decided, told apart by its ``repr``."""
        return CacheKey(self.uuid and _digest([self.uuid, decided]), self.graph)

    def after(self, passes: Sequence[Any]) -> CacheKey:
        """The key of a graph that a user's passes see first; not cacheable if one of them says not what it does."""
        if not passes:
            return self
        names = [each.uuid() if isinstance(each, CustomGraphPass) else None for each in passes]
        return CacheKey(None, self.graph) if None in names else self.extended(names)

    @staticmethod
    def of(
        gm: fx.GraphModule,
        example_inputs: Sequence[Any],
        options: Options,
        config: Mapping[str, Any] = MappingProxyType({}),
    ) -> CacheKey:
        """The key of one Dynamo graph under these options, with Inductor patched by ``config``."""
        known = KnownInputs.of(example_inputs)
        inputs = [sorted(positions) for positions in (known.parameters, known.held, known.uneven)]
        parts: list[Any] = [source_hash(), options.decision_key(), _module_names(gm), inputs]
        if options.wire in ("auto", "float8"):
            parts.append(group_backends())
        if sizes := _dynamic_sizes(example_inputs):  # the cost models of several passes decide by them
            parts.append(sizes)
        local = [_local(value) for value in example_inputs if hasattr(value, "__tensor_flatten__")]
        if local:
            parts.append(local)
        machine = [torch.__version__, *map(of_device, devices_of(example_inputs))]
        graph = _digest(
            [_code(gm), [_metadata(x) for x in example_inputs], _ambient(), settings(config), machine]
        )
        if options.filter_fn is None:
            return CacheKey(_digest(parts), graph)
        uuid = getattr(options.filter_fn, "uuid", None)
        return CacheKey(_digest([*parts, uuid]) if isinstance(uuid, str) else None, graph)


def _digest(parts: Any) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _code(gm: fx.GraphModule) -> list[Any]:
    """Of the graph, of its bodies, such as checkpointed regions, and what the tensors are that it holds."""
    bodies = [(name, m.code) for name, m in gm.named_modules() if isinstance(m, fx.GraphModule)]
    held = (*gm.named_parameters(), *gm.named_buffers())
    return [bodies, [(name, _metadata(tensor)) for name, tensor in held]]


def _module_names(gm: fx.GraphModule) -> list[str]:
    """Names of the modules in graph order, from Dynamo's own metadata; then of bodies, such as checkpointed regions."""
    from .passes.fqn import of_node

    graphs = [module.graph for module in gm.modules() if isinstance(module, fx.GraphModule)]
    nodes = (node for graph in graphs for node in graph.nodes if node.op not in ("placeholder", "output"))
    return [of_node(node) for node in nodes]


def _dynamic_sizes(example_inputs: Sequence[Any]) -> list[int | None]:
    sizes: list[int | None] = []
    for value in example_inputs:
        if isinstance(value, torch.SymInt):
            sizes.append(size_hint(value))
        elif isinstance(value, torch.Tensor):
            sizes += [size_hint(s) for s in value.shape if isinstance(s, torch.SymInt)]
    return sizes


def _local(value: torch.Tensor) -> list[Any]:
    """Layouts of the tensors inside a subclass, how it is sharded, and where this rank is among those that have its other parts.

    A DTensor that is sharded unevenly has other local sizes on other ranks, code that shards one takes this rank's part,
    and gathers name this rank's group. AOTAutograd's key holds none of that (torch 2.12 to 2.15; 2.11 caches no such
    graph), so with a cache directory in common one rank would be served another's code.
    https://github.com/pytorch/pytorch/issues/188390
    """
    names, _ = value.__tensor_flatten__()  # type: ignore[attr-defined]
    inner = [getattr(value, name) for name in names]
    parts = [_local(x) if hasattr(x, "__tensor_flatten__") else _metadata(x) for x in inner]
    return [*parts, *place_in_mesh(value)]


def devices_of(example_inputs: Sequence[Any]) -> list[torch.device]:
    """The devices that the inputs are on, each once."""
    return list(dict.fromkeys(x.device for x in example_inputs if isinstance(x, torch.Tensor)))


def _ambient() -> list[Any]:
    """State beside the graph that AOTAutograd traces under."""
    autocast = [
        (torch.is_autocast_enabled(kind), str(torch.get_autocast_dtype(kind))) for kind in ("cpu", "cuda")
    ]
    return [torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *autocast]


def _metadata(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        layout = str(tuple(value.shape)), str(value.stride()), str(value.dtype)
        return *layout, str(value.device), value.requires_grad
    return type(value).__name__


def _record(key: CacheKey, kind: str = "") -> Path:
    return Path(inductor_cache_dir()) / "f8fx" / f"{_digest([key.uuid, key.graph])}{kind}.json"


def store_report(key: CacheKey, reports: list[GraphReport]) -> None:
    """Keeps what was decided for a graph, for later cache hits. Failing to is not an error."""
    if key.uuid is not None:
        store_json(_record(key), [report.to_dict() for report in reports])


def has_report(key: CacheKey) -> bool:
    """Whether a graph that comes from a cache, if it does, has its report there too.

    Caches may be carried elsewhere without it (``torch.compiler.load_cache_artifacts``, remote caches).
    """
    return key.uuid is None or _read_report(key) is not None


def load_report(key: CacheKey, recipe: str) -> list[GraphReport]:
    """What was decided when a cached graph was built."""
    reports = _read_report(key)
    if reports is None:
        log.info("f8fx: graph from a cache (%s); its record of decisions is gone", recipe)
        return []
    for report in reports:
        report.cached = True
    return reports


def _read_report(key: CacheKey) -> list[GraphReport] | None:
    return load_json(_record(key), lambda reports: [*map(GraphReport.from_dict, reports)]) or None


def store_weights(key: CacheKey, inputs: WeightInputs, training: bool) -> None:
    """Keeps which casts of weights a graph makes, so that a later process need not trace it to learn them."""
    if key.uuid is None:
        return
    casts = [
        [
            *copies.place,
            *(dtype_name(cast.scale.dtype), cast.scale.dim, cast.scale.power_of_2),
            *(cast.transpose, cast.align),
        ]
        for copies in inputs.copies
        for cast in copies.casts
    ]
    store_json(_record(key, "-weights"), {"casts": casts, "training": training})


def load_weights(key: CacheKey, candidates: WeightInputs) -> tuple[WeightInputs, bool] | None:
    """What :func:`store_weights` kept for a graph with these candidates, which are part of the key."""
    if key.uuid is None:
        return None

    def parse(data: Any) -> tuple[WeightInputs, bool]:
        seen: dict[Place, list[CastFormat]] = {}
        for positions, along, dtype, dim, power_of_2, transpose, (rows, columns) in data["casts"]:
            scale = ScaleFormat(getattr(torch, dtype), dim, power_of_2)
            place = Place(tuple(positions), along)
            seen.setdefault(place, []).append(CastFormat(scale, transpose, (rows, columns)))
        return candidates.with_casts(seen), bool(data["training"])

    return load_json(_record(key, "-weights"), parse)
