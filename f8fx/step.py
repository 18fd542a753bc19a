"""The collectives of a training step under FSDP2, one by one, from a model's parameters.

How the model is taken to be sharded stands in :mod:`f8fx.communication`, which adds them up; what their bytes and
seconds mean, in :mod:`f8fx.wire`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from .fsdp.copies import Wanted
from .fsdp.formats import Format, scale_shape
from .fsdp.judge import GatherDecision, judge
from .options import Options
from .report import dtype_name
from .torch_private import local_tensor
from .wire import Call, World


@dataclass(frozen=True)
class _Parameter:
    """One parameter as a rank of the tensor-parallel group holds it."""

    shape: tuple[int, ...]
    gather_dtype: torch.dtype
    reduce_dtype: torch.dtype
    trained: bool
    formats: tuple[Format, ...]
    recomputed: bool = False

    def shard(self, ranks: int) -> int:
        """Elements of a shard, padding included."""
        first, *rest = self.shape or (1,)  # one number is split as a vector of one is
        return -(-first // ranks) * math.prod(rest)


@dataclass(frozen=True)
class Sharded:
    """The parameters of a model, by the module that FSDP2 wraps, and what is decided about them.

    Attributes:
        units: fqn of a wrapped module, "" for the root -> its parameters.
        gathered_again: those of them that are gathered again in the backward.
        gathers: each 2-D parameter, and those of experts, and whether it is gathered in float8.
    """

    world: World
    units: Mapping[str, Sequence[_Parameter]]
    gathered_again: frozenset[str]
    gathers: tuple[GatherDecision, ...]

    @staticmethod
    def of(
        model: nn.Module,
        world: World,
        options: Options,
        param_dtype: torch.dtype | None = None,
        reduce_dtype: torch.dtype | None = None,
        recomputed: Collection[str] = (),
    ) -> Sharded:
        """Only looks at the model, which may be on ``"meta"``.

        Args:
            options: recipe, filters and target.
            param_dtype, reduce_dtype: FSDP2's mixed-precision policy.
            recomputed: modules whose matmuls activation checkpointing runs again in the backward.
        """
        verdicts = judge(model, options, world.tp)
        formats = {id(verdict.candidate.param): verdict.formats for verdict in verdicts}
        again = {
            id(verdict.candidate.param)
            for verdict in verdicts
            if any(module in recomputed for module, _, _ in verdict.candidate.owners)
        }
        blocks = _blocks(model)
        units: dict[str, list[_Parameter]] = {name: [] for name in (*blocks, "")}
        seen: set[int] = set()
        for unit in units:
            for param in model.get_submodule(unit).parameters():
                if id(param) in seen:
                    continue
                seen.add(id(param))
                gathered = param_dtype or param.dtype
                units[unit].append(
                    _Parameter(
                        _local_shape(param, world.tp),
                        gathered,
                        reduce_dtype or gathered,
                        param.requires_grad,
                        formats.get(id(param), ()),
                        id(param) in again,
                    )
                )
        gathers = tuple(verdict.decision for verdict in verdicts)
        return Sharded(world, units, _gathered_again(model, blocks), gathers)

    def calls(self, float8: bool, training: bool = True, copies: Wanted = "auto") -> list[Call]:
        """The collectives of one step, not the first; see :mod:`f8fx.fsdp.copies`."""
        ranks, stride, replicas = self.world.fsdp, self.world.tp, self.world.replicate
        found: list[Call] = []
        converted = self._converted()
        # of weights that do not change the amaxes have been taken
        if float8 and training and any(p.trained for p in converted):
            amaxes = sum(map(_amaxes, converted))
            found.append(Call("all_reduce", "amaxes", "", False, ranks, {"int32": 4 * amaxes}, stride))
        for unit, params in self.units.items():
            if not params:
                continue
            again = unit in self.gathered_again
            for backward in (False, True)[: 1 + (training and again)]:
                content = int(backward) if copies == "auto" and again and training else None
                sizes = _summed(self._gathered(p, content if float8 else None, float8) for p in params)
                found.append(Call("all_gather", "weights", unit, backward, ranks, sizes, stride))
            shards = _summed(
                [(dtype_name(p.reduce_dtype), p.shard(ranks) * p.reduce_dtype.itemsize)]
                for p in params
                if p.trained and training
            )
            if shards:
                whole = {dtype: ranks * count for dtype, count in shards.items()}
                found.append(Call("reduce_scatter", "gradients", unit, True, ranks, whole, stride))
                found.append(Call("all_reduce", "gradients", unit, True, replicas, shards, stride * ranks))
        return [call for call in found if call.ranks > 1]

    def _converted(self) -> list[_Parameter]:
        return [p for params in self.units.values() for p in params if p.formats]

    def _gathered(self, p: _Parameter, content: int | None, float8: bool) -> list[tuple[str, int]]:
        """dtype and bytes that a gather of a parameter takes from a rank."""
        elements = p.shard(self.world.fsdp)
        if not float8 or not p.formats:
            return [(dtype_name(p.gather_dtype), elements * p.gather_dtype.itemsize)]
        sent = p.formats
        if content is not None and len(sent) > 1 and not (content and p.recomputed):
            sent = sent[content : content + 1]
        return [(dtype_name(form.dtype), elements * form.dtype.itemsize) for form in sent]


def _blocks(model: nn.Module) -> list[str]:
    """The elements of the outermost lists of modules that hold parameters."""
    found: list[str] = []

    def visit(module: nn.Module, prefix: str) -> None:
        for name, child in module.named_children():
            fqn = f"{prefix}{name}"
            if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
                found.extend([fqn] if next(child.parameters(), None) is not None else [])
            else:
                visit(child, f"{fqn}.")

    visit(model, "")
    return found


def _gathered_again(model: nn.Module, blocks: Sequence[str]) -> frozenset[str]:
    """The modules, of those that FSDP2 wraps, that are gathered in the backward.

    Gradients flow back to the first parameter that is trained, in the order in which modules define them. The backward
    of its block gathers the block before in advance, though that has none.
    """
    if not blocks:
        return frozenset(("",))  # it is a block of a larger model
    behind = -1  # the last block that came by
    for name, param in model.named_parameters():
        own = next((index for index, block in enumerate(blocks) if name.startswith(f"{block}.")), None)
        behind = behind if own is None else own
        if param.requires_grad:
            first = behind + 1 if own is None else own
            return frozenset(blocks[max(first - 1, 0) :])
    return frozenset()


def _local_shape(param: nn.Parameter, tp: int) -> tuple[int, ...]:
    if isinstance(param, DTensor):
        return tuple(local_tensor(param).shape)
    shape = tuple(param.shape)
    return (-(-shape[0] // tp), *shape[1:]) if len(shape) > 1 else shape


def _amaxes(p: _Parameter) -> int:
    """Numbers that the all-reduce of the amaxes holds for a weight."""
    return sum(math.prod(scale_shape(p.shape, dim)) for dim in {form.dim for form in p.formats})


def _summed(parts: Iterable[Iterable[tuple[str, int]]]) -> dict[str, int]:
    result: dict[str, int] = {}
    for part in parts:
        for dtype, count in part:
            result[dtype] = result.get(dtype, 0) + count
    return result
