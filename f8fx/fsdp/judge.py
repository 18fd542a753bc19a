"""Which weights FSDP2 gathers in float8, and why others stay as they are."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from f8fx import hardware
from f8fx.hardware import ALIGNMENT
from f8fx.options import Options
from f8fx.parts import largest_part
from f8fx.passes.fqn import without_wrappers
from f8fx.passes.left import UNEVEN
from f8fx.recipe import HIGH_DTYPES
from f8fx.report import NO_TENSOR_CORES, dtype_name
from f8fx.torch_private import local_part

from .experts import contracted, may_be_experts, why_no_grouped_gemm
from .formats import Format, formats_of
from .shard import Float8Shard


@dataclass(frozen=True)
class GatherDecision:
    """One weight matrix, or those of all experts of a mixture, and whether it is gathered in float8.

    Attributes:
        fqn: name of the parameter.
        shape: of the whole weight; on a mesh with tensor parallelism, of its local part.
        converted: whether it is gathered in float8.
        reason: why, in a few words.
    """

    fqn: str
    shape: tuple[int, ...]
    converted: bool
    reason: str


@dataclass
class Candidate:
    """A parameter that may be the weight of matmuls, and everybody who holds it.

    Attributes:
        split: the parameter stands for a tensor-parallel one, of which a rank holds this part of the rows.
    """

    param: nn.Parameter
    owners: list[tuple[str, nn.Module, str]]
    split: int = 1

    @property
    def fqn(self) -> str:
        module_fqn, _, name = self.owners[0]
        return f"{module_fqn}.{name}" if module_fqn else name

    @property
    def local(self) -> Tensor:
        return local_part(self.param)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of a tensor-parallel weight, of its largest part: the same on all ranks."""
        if isinstance(self.param, DTensor):
            return largest_part(self.param)[0]
        rows, *rest = self.local.shape
        return (-(-rows // self.split), *rest)

    @property
    def is_uneven(self) -> bool:
        """Whether tensor parallelism has given ranks parts of different sizes."""
        return isinstance(self.param, DTensor) and not largest_part(self.param)[1]


@dataclass(frozen=True)
class Verdict:
    """A parameter and the formats it is gathered in, none if it stays as it is."""

    candidate: Candidate
    formats: tuple[Format, ...]
    decision: GatherDecision


def judge(
    model: nn.Module, options: Options, split: int = 1, outside: Set[int] = frozenset()
) -> list[Verdict]:
    """Which weights are gathered in float8: what :func:`f8fx.fsdp.enable_float8_all_gather` does and `explain` predicts.

    Args:
        split: see :class:`Candidate`; of parameters that are no DTensors.
        outside: identities of parameters that others hold as well (:mod:`f8fx.fsdp.outside`).
    """
    judged: list[Verdict] = []
    for candidate in _candidates(model, split, options.experts != "leave"):
        formats = _judge(candidate, options)
        if id(candidate.param) in outside and not isinstance(formats, str):
            formats = "shared with a module outside of the model"
        reason = formats if isinstance(formats, str) else "converted"
        kept = () if isinstance(formats, str) else formats
        decision = GatherDecision(candidate.fqn, candidate.shape, bool(kept), reason)
        judged.append(Verdict(candidate, kept, decision))
    return judged


def _candidates(model: nn.Module, split: int, experts: bool) -> list[Candidate]:
    by_param: dict[int, Candidate] = {}
    for module_fqn, module in model.named_modules():
        for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
            if param.dim() == 2 or (experts and may_be_experts(module, param)):
                parts = 1 if isinstance(param, DTensor) else split
                candidate = by_param.setdefault(id(param), Candidate(param, [], parts))
                candidate.owners.append((without_wrappers(module_fqn), module, name))
    return list(by_param.values())


def _judge(candidate: Candidate, options: Options) -> tuple[Format, ...] | str:
    """The formats to gather a parameter in, or why it stays as it is."""
    local = candidate.local
    if isinstance(local, Float8Shard):
        raise ValueError(
            f"enable_float8_all_gather: {candidate.fqn!r} is gathered in float8 already; call it once, on the "
            "outermost module"
        )
    of_experts = len(candidate.shape) == 3
    linear = [of_experts or _is_linear_weight(module, name) for _, module, name in candidate.owners]
    if not all(linear):
        return (
            "shared with a module that is no linear layer"
            if any(linear)
            else "not the weight of a linear layer"
        )
    if isinstance(candidate.param, DTensor) and any(p.is_partial() for p in candidate.param.placements):
        return "a partial DTensor"
    if type(local) not in (Tensor, nn.Parameter):
        return f"a {type(local).__name__}"
    for fqn, _, _ in candidate.owners:
        if any(part in fqn for part in options.filter_fqns):
            return "filtered"
        if options.only_fqns and not any(part in fqn for part in options.only_fqns):
            return "filtered"
    if local.dtype not in HIGH_DTYPES:
        return f"{dtype_name(local.dtype)} weight"
    if not local.is_contiguous():
        return "not contiguous"
    if candidate.is_uneven:
        return UNEVEN
    if not local.numel() or any(size % ALIGNMENT for size in candidate.shape[-2:]):
        return f"not a multiple of {ALIGNMENT}"
    chosen = options.target or hardware.of_device(_device(local))
    if not chosen.float8_dtypes:
        return f"{NO_TENSOR_CORES} {chosen.name}"
    if of_experts and (lacks := why_no_grouped_gemm(options.recipe, chosen)):
        return lacks
    order = contracted(candidate.owners[0][1]) if of_experts else (1, 0)
    try:
        return formats_of(options.recipe, chosen, order)
    except ValueError as error:
        return str(error)


def _is_linear_weight(module: nn.Module, name: str) -> bool:
    """Whether all that the module does with the parameter is ``F.linear``."""
    return name == "weight" and isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward


def _device(tensor: Tensor) -> torch.device:
    if tensor.device.type != "meta":
        return tensor.device
    return (
        torch.device("cuda", torch.cuda.current_device())
        if torch.cuda.is_available()
        else torch.device("cpu")
    )
