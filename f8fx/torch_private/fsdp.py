"""FSDP and DTensor: whose parameter it is, how its group gathers it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch


def local_tensor(tensor: Any) -> torch.Tensor:
    """The local tensor of a DTensor itself (``_local_tensor``); ``to_local`` gives an alias of it."""
    return tensor._local_tensor


def replace_local_tensor(tensor: Any, local: torch.Tensor) -> None:
    """Gives a DTensor another local tensor of the same layout; what shares its version counter still does (``_local_tensor``)."""
    tensor._local_tensor = local


def local_part(value: Any) -> Any:
    """:func:`local_tensor` of a DTensor, anything else itself."""
    return getattr(value, "_local_tensor", value)


def managed_by_fsdp(parameter: torch.Tensor) -> bool:
    """Whether a parameter may be one that FSDP fills by all-gathers, preserving ``_version``.

    FSDP1 marks them (``_fsdp_flattened``). FSDP2 does not: once a module of this process is sharded
    (its class is then derived from ``FSDPModule`` too), any plain parameter may be one.
    """
    if getattr(parameter, "_fsdp_flattened", False):
        return True
    module = sys.modules.get("torch.distributed.fsdp")
    return module is not None and _is_base_of_modules(module.FSDPModule)


def _is_base_of_modules(mixin: type[Any]) -> bool:
    """Whether a class of modules is derived from a mixin; other mixins (``ReplicateModule``) are not, they only may be."""
    return any(
        issubclass(derived, torch.nn.Module) or _is_base_of_modules(derived)
        for derived in mixin.__subclasses__()
    )


def fsdp_parameters() -> Iterator[tuple[Any, Any]]:
    """FSDP2's parameters in this process, each after its group.

    The states of all modules that there are, ``_composable_state._module_state_mapping``; their ``_fsdp_param_groups``
    (2.11: ``_fsdp_param_group``), their ``fsdp_params`` and ``sharded_param``.
    """
    from torch.distributed._composable_state import _module_state_mapping
    from torch.distributed.fsdp import FSDPModule

    for module, reference in list(_module_state_mapping.items()):
        state: Any = reference()
        if not isinstance(module, FSDPModule) or state is None:
            continue
        groups = getattr(state, "_fsdp_param_groups", None)
        for group in [state._fsdp_param_group] if groups is None else groups:
            for param in group.fsdp_params if group is not None else ():
                yield group, param


def sharded_parameter(parameter: Any) -> torch.Tensor | None:
    """The ``nn.Parameter`` of a parameter of FSDP2's, ``FSDPParam.sharded_param``; ``None`` for ``None``."""
    return None if parameter is None else parameter.sharded_param


def keep_padded_shard(parameter: Any, memory_of: Callable[[Any], Any]) -> None:
    """From now on FSDP2 leaves a shard where it is if it has padded it before, as it does with plain tensors.

    ``FSDPParam.reset_sharded_param``, called before the first forward and after ``load_state_dict``, copies a smaller
    shard of a tensor subclass into new memory each time, since it does not know its memory again; what shares it, such
    as a state dict, is left behind. ``_sharded_param_data`` is the padded memory.

    Args:
        parameter: of FSDP2, with a shard that is a tensor subclass.
        memory_of: tells one memory from another, for the subclass.
    """
    reset, info = parameter.reset_sharded_param, parameter._module_info

    def reset_unless_known() -> None:
        now = getattr(info.module, info.param_name)
        # another, which somebody has put there, need not be of the subclass
        is_known = now is parameter.sharded_param and (
            memory_of(local_tensor(now)) == memory_of(parameter._sharded_param_data)
        )
        if not is_known:
            reset()

    parameter.reset_sharded_param = reset_unless_known


def gather_outputs(parameter: Any) -> list[torch.Tensor]:
    """What FSDP2 receives a parameter's gathers in, one tensor for each that a rank sends; empty before the first.

    ``FSDPParam.all_gather_outputs``: memory is given to them when a gather arrives, and taken when it is freed.
    """
    return list(parameter.all_gather_outputs)


def set_gather_outputs(parameter: Any, outputs: list[torch.Tensor]) -> None:
    """What the next gather is received in, as many as it sends; to be called while nothing is gathered."""
    parameter.all_gather_outputs = outputs


def reshards_after_forward(group: Any) -> bool | str | None:
    """Whether FSDP2 frees a group's parameters after the forward; ``"smaller"``: it keeps a part of them.

    ``None`` for no group. Properties ``_reshard_after_forward`` and ``_use_post_forward_mesh``.
    """
    if group is None:
        return None
    if not group._reshard_after_forward:
        return False
    return "smaller" if group._use_post_forward_mesh else True


def pre_hooks(module: torch.nn.Module) -> list[Any]:
    """A module's forward pre-hooks, in the order in which they run (``_forward_pre_hooks``)."""
    return list(module._forward_pre_hooks.values())


def own_parameters(module: torch.nn.Module) -> Mapping[str, Any]:
    """What a module has registered as its parameters, by name (``_parameters``).

    ``getattr`` computes a parameter where it has a parametrization.
    """
    return vars(module).get("_parameters") or {}


def gather_group(group: Any) -> None:
    """Gathers a group's parameters and waits, if they are not gathered (``unshard``, ``wait_for_unshard``)."""
    group.unshard()
    group.wait_for_unshard()


def reshard_group(group: Any) -> None:
    """Frees what a group has gathered, or is gathering.

    ``wait_for_unshard``, a no-op where no gather is under way, and ``reshard``, one where nothing is gathered.
    """
    group.wait_for_unshard()
    group.reshard()


def backward_was_interrupted(group: Any) -> bool:
    """Whether the last backward over a group's model ended in an exception, asked outside of a backward.

    ``_state_ctx.post_backward_final_callback_queued``: a callback of autograd's clears it, and so does
    ``FSDPModule.reset_iter_state`` (since 2.13).
    """
    return group.modules[0]._get_fsdp_state()._state_ctx.post_backward_final_callback_queued


def move_pre_hook_first(module: Any, key: int) -> None:
    """Makes a forward pre-hook the first to run; ``key`` is its handle's ``id``."""
    module._forward_pre_hooks.move_to_end(key, last=False)
