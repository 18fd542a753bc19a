"""The user's calls: which weights are gathered in float8, and how they are kept out of checkpoints."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Literal
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from f8fx.nearest import unmatched
from f8fx.options import Options
from f8fx.parts import dtensor_like
from f8fx.passes.experts import Experts
from f8fx.ranks.peers import Peers
from f8fx.recipe import Recipe
from f8fx.report import log
from f8fx.torch_private import (
    carry_grad_dtype,
    fsdp_parameters,
    group_backend,
    key_local_tensors,
    local_part,
    local_tensor,
    pre_hooks,
    replace_local_tensor,
    sharded_parameter,
    storage_key,
)

from .copies import Copies, Wanted
from .formats import Format
from .held import held, key_of
from .judge import Candidate, GatherDecision, judge
from .outside import held_outside
from .reduce import maximum
from .scales import BeginForward, EndForward, Mode, Scales
from .shard import Float8Shard
from .weight_scales import WeightScales


def enable_float8_all_gather(
    model: nn.Module,
    recipe: str | Recipe = "tensorwise",
    *,
    filter_fqns: Sequence[str] = (),
    only_fqns: Sequence[str] = (),
    experts: Experts = "leave",
    wire: Literal["auto", "uint8", "float8"] = "auto",
    scales: Mode = "step",
    copies: Wanted = "auto",
    mesh: DeviceMesh | None = None,
) -> list[GatherDecision]:
    """Makes FSDP2 gather the weights of linear layers, and of experts, in float8.

    Call it after tensor parallelism and before ``fully_shard``, on the model or on the part of it that is
    wrapped as one, and compile with the same recipe and filters. Parameters are replaced in place, modules
    are not; an optimizer is made after ``fully_shard``, as always with FSDP2.

    Args:
        model: may be on ``"meta"``. A hook on it takes the amaxes of all weights when its forward begins.
        recipe: of the compiled model; name or :class:`~f8fx.recipe.Recipe`.
        filter_fqns: parameters whose module name contains one of these stay as they are.
        only_fqns: if given, only parameters whose module name contains one of these are converted.
        experts: of the compiled model. Not ``"leave"``: the matrices of experts too, 3-D parameters
            ``[experts, out, in]`` that layers read through ``torch._grouped_mm`` or ``torch.bmm``, or ``[experts, in, out]`` where
            the module's ``is_transposed`` is true. Any 3-D parameter of several matrices is taken for such; filter out
            others, since what else reads a weight gets its float8 rounding (there is a warning).
        wire: what float8 travels as. ``"auto"``: float8 with NCCL, else bytes, since gloo takes no float8.
        scales: when amaxes are taken. ``"step"``: when the first forward after an optimizer's step, a
            ``load_state_dict`` or any other visible change of a weight begins, once for several forwards with gradient
            accumulation; all ranks must make the same changes. ``"forward"``: whenever a forward begins, whoever
            changed weights in whichever way, on one rank alone if need be. ``"manual"``: when
            :func:`precompute_scales` is called; a change since that f8fx can see is an error.
        copies: for recipes whose backward reads a weight in another format than the forward (the rowwise
            ones). ``"auto"``: the gathers of the first step carry both copies, as many bytes as in bf16, and the
            following ones what their half of the step was seen to read: half the bytes in the forward, and in the
            backward too, unless activation checkpointing or an eager read takes the forward's copy there. Both
            copies are kept where FSDP2 does not reshard after the forward and where no graph compiled by f8fx reads a
            weight. A graph that reads more than was seen in the first step is an error, and so is a forward after a
            backward that raised, until FSDP2's ``reset_iter_state()`` is called. ``"both"``: every gather carries both.
        mesh: the ranks that must decide alike; default: all of them. Pass the FSDP mesh where ranks hold
            different models (pipeline parallelism).

    Returns:
        One decision for each 2-D parameter, and for those of experts. What is not converted is untouched.

    Raises:
        ValueError: for an unknown recipe, option or mesh, for a model this was called on before, and for weights that
            ``fully_shard`` has sharded already.
        RuntimeError: on every rank, if ranks decide differently.
    """
    options = Options.parse(
        {"recipe": recipe, "filter_fqns": filter_fqns, "only_fqns": only_fqns, "experts": experts}
    )
    if wire not in ("auto", "uint8", "float8"):
        raise ValueError(f"wire must be 'auto', 'uint8' or 'float8', got {wire!r}")
    if scales not in ("step", "forward", "manual"):
        raise ValueError(f"scales must be 'step', 'forward' or 'manual', got {scales!r}")
    if copies not in ("auto", "both"):
        raise ValueError(f"copies must be 'auto' or 'both', got {copies!r}")
    if mesh is not None and not isinstance(mesh, DeviceMesh):
        raise ValueError(f"mesh must be a DeviceMesh, got {mesh!r}")
    manager = Scales(scales)
    judged = judge(model, options, outside=held_outside(model))
    decisions = [verdict.decision for verdict in judged]
    found = [(verdict.candidate, verdict.formats) for verdict in judged if verdict.formats]
    sharded = {
        id(param) for part in model.modules() if isinstance(part, FSDPModule) for param in part.parameters()
    }
    # the part of a sharded model that a caller may name need not be sharded by itself
    sharded |= {id(sharded_parameter(parameter)) for _, parameter in fsdp_parameters()}
    late = [candidate.fqn for candidate, _ in found if id(candidate.param) in sharded]
    if late:
        raise ValueError(
            f"enable_float8_all_gather comes before fully_shard, which {late[0]!r} has been through (of {len(late)} weights)"
        )
    _agree(decisions, (options.recipe, wire, scales, copies), mesh)
    key_local_tensors(Float8Shard)
    peers = _peers([candidate for candidate, _ in found], mesh, options.recipe)
    for candidate, formats in found:
        manager.weights.append(_convert(candidate, formats, wire, copies, manager, peers))
    begin = BeginForward(manager, [module for candidate, _ in found for _, module, _ in candidate.owners])
    begin.key = model.register_forward_pre_hook(begin, prepend=True).id
    model.register_forward_hook(EndForward(manager), always_call=True)
    log.info(_line(decisions, options))
    return decisions


def _line(decisions: list[GatherDecision], options: Options) -> str:
    """The summary that is logged."""
    left = Counter(decision.reason for decision in decisions if not decision.converted)
    text = f"f8fx: {len(decisions) - left.total()} of {len(decisions)} weights gathered in float8 ({options.recipe.name})"
    if left:
        text += f", {left.total()} left: " + ", ".join(f"{n} {reason}" for reason, n in left.most_common())
    for each in unmatched((*options.filter_fqns, *options.only_fqns), [d.fqn for d in decisions]):
        text += f"; no weight's name contains {each}"
    return text


@torch.no_grad()
def precompute_scales(model: nn.Module) -> None:
    """Takes the amaxes of all weights gathered in float8 now: one all-reduce, to be called on all ranks.

    Needed with ``scales="manual"`` after ``optimizer.step()`` and any other change of the weights; else the next
    forward does it, unless the change left no trace and ``scales`` is ``"step"``.

    Args:
        model: one that :func:`enable_float8_all_gather` was called on, or that holds such, after
            ``fully_shard``.

    Raises:
        ValueError: if there is none in it.
    """
    managers = {
        hook.scales
        for module in model.modules()
        for hook in pre_hooks(module)
        if isinstance(hook, BeginForward)
    }
    if not managers:
        raise ValueError("precompute_scales: enable_float8_all_gather was not called on this model")
    for manager in managers:
        manager.drop_kept()
        manager.refresh()


# -- what becomes of them


def _convert(
    candidate: Candidate,
    formats: tuple[Format, ...],
    wire: str,
    wanted: Wanted,
    manager: Scales,
    peers: Peers,
) -> WeightScales:
    param = candidate.param
    before: dict[str, Any] = {}
    if isinstance(param, DTensor):
        names = param.device_mesh.mesh_dim_names or ()
        before = {n: p for n, p in zip(names, param.placements, strict=False) if not p.is_replicate()}
    owners = [(module, name) for _, module, name in candidate.owners]
    copies = Copies(candidate.fqn, len(formats), wanted, peers)
    weak = [(ref(module), name) for module, name in owners]
    weight = WeightScales(candidate.fqn, formats, wire, copies, candidate.shape, before, weak, manager)
    replacement = nn.Parameter(_wrapped(param.detach(), weight), requires_grad=param.requires_grad)
    replacement.__dict__.update(param.__dict__)
    carry_grad_dtype(param, replacement)
    for module, name in owners:
        setattr(module, name, replacement)
        module.register_state_dict_post_hook(_SavePlain(name))
        module.register_load_state_dict_pre_hook(_LoadWrapped(name, weight))
    return weight


def _wrapped(tensor: Tensor, weight: WeightScales) -> Tensor:
    """The tensor, its local part a :class:`Float8Shard` on the same memory."""
    if not isinstance(tensor, DTensor):
        return Float8Shard(tensor, weight)
    return dtensor_like(tensor, Float8Shard(local_tensor(tensor).detach(), weight))


class _SavePlain:
    """State-dict hook: checkpoints hold plain tensors, on the memory of the parameters."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, _: Any) -> None:
        key = prefix + key_of(module, self.name)
        value = state_dict.get(key)
        if isinstance(value, nn.Parameter):
            return  # keep_vars=True asks for the parameters themselves
        local = local_part(value)
        if not isinstance(local, Float8Shard):
            return
        if isinstance(value, DTensor):
            local.weight.copies.stays_in_memory(local)
        plain = _counted(local, held(module, self.name)).detach()
        if isinstance(value, DTensor):  # which counts what a compiled function writes to it
            replace_local_tensor(value, plain)
        else:
            state_dict[key] = plain


def _counted(local: Float8Shard, param: Tensor) -> Tensor:
    """The plain tensor of a shard, or the parameter's own if that is on the same memory.

    They share a version counter only if one is a view of the other, and what was made of the parameter on
    its way into a state dict is none.
    """
    own = local_part(param)
    if not isinstance(own, Float8Shard) or own.shape != local.shape:
        return local.plain
    if storage_key(own.plain) == storage_key(local.plain):
        return own.plain
    return local.plain


class _LoadWrapped:
    """Load hook: with ``assign=True`` what is loaded becomes the parameter, so it must know how it is sent."""

    def __init__(self, name: str, weight: WeightScales) -> None:
        self.name = name
        self.weight = weight

    def __call__(
        self, module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any, *args: Any
    ) -> None:
        if not self.weight.owners:
            return  # of a model out of a file, whose parameters are plain tensors
        self.weight.manager.loaded()
        key = prefix + key_of(module, self.name)
        value = state_dict.get(key)
        if not metadata.get("assign_to_params_buffers", False) or not isinstance(value, Tensor):
            return
        local = local_part(value)
        if not isinstance(local, Float8Shard):
            wrapped = _wrapped(value.detach(), self.weight)
            if isinstance(value, nn.Parameter):
                wrapped = nn.Parameter(wrapped, value.requires_grad)
                carry_grad_dtype(value, wrapped)
            state_dict[key] = wrapped


# -- ranks agree


#: How many models of equal names and shapes have been enabled among the same ranks; all of these count alike.
_MODELS: Counter[Any] = Counter()


def _peers(weights: Iterable[Candidate], mesh: DeviceMesh | None, recipe: Recipe) -> Peers:
    """The ranks that are to compile the model with the same options."""
    ranks: tuple[int, ...] = ()
    if dist.is_available() and dist.is_initialized() and dist.get_backend() != "fake":
        ranks = tuple(range(dist.get_world_size()) if mesh is None else mesh.mesh.flatten().tolist())
    model = tuple(f"{weight.fqn} {weight.shape}" for weight in weights)
    _MODELS[ranks, model] += 1
    return Peers(ranks, (*model, str(_MODELS[ranks, model])), recipe)


def _agree(
    decisions: Iterable[GatherDecision], how: tuple[Recipe, str, str, str], mesh: DeviceMesh | None
) -> None:
    """Raises on every rank if ranks decided differently: their collectives would not match.

    Args:
        how: recipe, wire, scales and copies.
    """
    if not dist.is_available() or not dist.is_initialized():
        return
    text = repr((how, list(decisions)))
    number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
    if mesh is None:
        world: Any = dist.group.WORLD
        accelerator = torch.accelerator.current_accelerator()
        without_cpu = accelerator is not None and not group_backend(world.group_name, torch.device("cpu"))
        kind = accelerator.type if accelerator is not None and without_cpu else "cpu"
        groups: list[Any] = [None]
    else:
        kind, groups = mesh.device_type, mesh.get_all_groups()
    for group in groups:
        extremes = torch.tensor([number, -number], device=kind)
        maximum(extremes, group, "the decisions", "every rank must call enable_float8_all_gather")
        highest, lowest = extremes.tolist()
        if highest != -lowest:
            raise RuntimeError(
                "f8fx.fsdp: ranks would gather different weights in float8, or in different ways. "
                "enable_float8_all_gather must see the same model and arguments on every rank; where models differ "
                f"(pipeline parallelism) pass mesh=. This rank: recipe={how[0].name!r}, wire={how[1]!r}, "
                f"scales={how[2]!r}, copies={how[3]!r}, weights {[d.fqn for d in decisions if d.converted]}"
            )
