"""The parameter's local shard: a tensor that knows how it is sent."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from f8fx.torch_private import (
    carries_float8,
    disabled_torch_function,
    gives_views,
    is_composite,
    local_part,
    storage_key,
    tree_leaves,
    tree_map,
    tree_map_only,
    version_counter,
    wrapper_tensor,
    written,
)

from .formats import Layout
from .weight import Float8Weight

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    from .weight_scales import WeightScales

aten = torch.ops.aten

#: What FSDP2, DTensor and ``Module.to`` make of a parameter to put in its place. All else gives plain tensors:
#: optimizer states and copies that users make are nobody's parameters.
_STAYS = frozenset(
    (
        aten.alias.default,
        aten.as_strided.default,
        aten.clone.default,
        aten._pin_memory.default,
        aten._to_copy.default,
        aten.detach.default,
        aten.empty_like.default,
        aten.new_zeros.default,
        aten.slice.Tensor,
        aten.split.Tensor,
        aten.view.default,
    )
)


@dataclass(frozen=True)
class _Of:
    """Which weight a shard is of, for the guards of a compiled function that gets the shard.

    Dynamo keeps a deep copy and compares: the copy is the same, and no model is copied.
    """

    weight: WeightScales

    def __deepcopy__(self, memo: Any) -> _Of:
        return self


class Float8Shard(torch.Tensor):
    """A local shard, in high precision, of a weight that is gathered in float8.

    Every operator runs on the plain tensor inside; what it gives is plain as well, but for views, through which the shard can be
    written to, and the few that FSDP2 uses to make a shard. Optimizers, ``clip_grad_norm_`` and the like see an ordinary tensor.

    Args:
        tensor: the shard; before ``fully_shard``, the whole weight (its TP-local part on a 2-D mesh).
        weight: what is known of the weight, shared by all tensors that stand for it.
        changes: how often an operator has written to this memory, shared by all tensors on it.
    """

    plain: Tensor
    weight: WeightScales
    changes: list[int]

    @staticmethod
    def __new__(cls, tensor: Tensor, weight: WeightScales, changes: list[int] | None = None) -> Float8Shard:
        self = wrapper_tensor(
            cls,
            tensor.size(),
            strides=tensor.stride(),
            storage_offset=tensor.storage_offset(),
            dtype=tensor.dtype,
            layout=tensor.layout,
            device=tensor.device,
            requires_grad=tensor.requires_grad,
        )
        self.plain, self.weight = tensor, weight
        self.changes = [0] if changes is None else changes
        return self

    __torch_function__ = disabled_torch_function()

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["plain"], _Of(self.weight)

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], meta: _Of, size: Any, stride: Any) -> Float8Shard:
        return Float8Shard(inner["plain"], meta.weight)

    def __deepcopy__(self, memo: dict[int, Any]) -> Float8Shard:
        if any(id(module) in memo for module, _ in self.weight.holders()):
            # a copied model has weights, and scales, of its own
            weight = copy.deepcopy(self.weight, memo)
            if id(self) in memo:
                return memo[id(self)]  # tied to another layer, which was copied along
            made: Any = Float8Shard(copy.deepcopy(self.plain.detach(), memo), weight)
        else:
            # of the parameter alone, in an optimizer say, it is the plain tensor, as a clone is
            made = copy.deepcopy(self.plain.detach(), memo)
        if isinstance(self, nn.Parameter):
            made = nn.Parameter(made, self.requires_grad)
        memo[id(self)] = made
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        # pickled, it is the plain tensor: a file must not need f8fx to be read
        if isinstance(self, nn.Parameter):
            return nn.Parameter(self.plain.detach(), self.requires_grad).__reduce_ex__(protocol)
        return self.plain.__reduce_ex__(protocol)

    # frames that Dynamo skips run inside a compiled call, and what they call would be compiled
    @classmethod
    @torch.compiler.disable
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if torch.is_inference_mode_enabled() and (func in _STAYS or is_composite(func)):
            # what FSDP2 makes of a shard outlives the mode; and operators are taken apart outside of it alone
            with torch.inference_mode(False), torch.no_grad():
                return func(*args, **(kwargs or {}))
        wrappers: dict[int, Float8Shard] = {}

        def unwrap(value: Any) -> Any:
            if not isinstance(value, Float8Shard):
                return value
            value.check_device()
            wrappers.setdefault(id(value.plain), value)
            return value.plain

        plain_args, plain_kwargs = tree_map(unwrap, (args, kwargs or {}))
        result = func(*plain_args, **plain_kwargs)
        targets = written(func, args, kwargs or {})
        if targets:
            for target in tree_leaves(targets):
                if isinstance(target, Float8Shard):
                    target.changes[0] += 1
            return tree_map(lambda value: wrappers.get(id(value), value), result)
        source = args[0] if args else None
        if not isinstance(source, Float8Shard) or not (func in _STAYS or gives_views(func)):
            return result

        def wrap(value: Tensor) -> Float8Shard:
            is_view = storage_key(value) == storage_key(source.plain)
            return Float8Shard(value, source.weight, source.changes if is_view else None)

        return tree_map_only(Tensor, wrap, result)

    def version(self) -> tuple[Any, ...]:
        """Differs from an earlier one if an operator may have changed the elements since."""
        # a compiled function writes to the inside, and AOTAutograd counts that on the outside
        counters = version_counter(self), version_counter(self.plain)
        return self.changes[0], *counters, storage_key(self.plain)

    def check_device(self) -> None:
        """Raises where ``tensor.data = ...`` has moved the outside and left the inside."""
        if self.plain.device != self.device:
            raise RuntimeError(
                f"f8fx.fsdp: {self.weight.fqn!r} was moved from {self.plain.device} to {self.device} by "
                "fully_shard, which cannot move a tensor subclass. Move the model to its device (or build it on "
                '"meta") before enable_float8_all_gather'
            )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Float8Shard({self.plain!r})"

    # -- what is no operator: the outside has no memory of its own

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        """As of any tensor; to set it replaces what is inside, too."""
        return torch.Tensor.data.__get__(self)  # type: ignore[attr-defined]

    @data.setter
    def data(self, value: Tensor) -> None:
        torch.Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        self.plain = (value.plain if isinstance(value, Float8Shard) else value).detach()
        self.changes[0] += 1

    def data_ptr(self) -> int:
        """Of the elements: by it tools tell parameters apart (accelerate, whose optimizers are older than the shards)."""
        return self.plain.data_ptr()

    def numpy(self, **kwargs: Any) -> Any:
        return self.plain.numpy(**kwargs)

    def tolist(self) -> Any:
        return self.plain.tolist()

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return self.plain.__array__(*args, **kwargs)

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self.plain.__dlpack__(**kwargs)

    def apply_(self, *args: Any) -> Float8Shard:
        return self._written("apply_", *args)

    def map_(self, *args: Any) -> Float8Shard:
        return self._written("map_", *args)

    def map2_(self, *args: Any) -> Float8Shard:
        return self._written("map2_", *args)

    def share_memory_(self) -> Float8Shard:
        return self._written("share_memory_")

    def _written(self, method: str, *args: Any) -> Float8Shard:
        args = tuple(arg.plain if isinstance(arg, Float8Shard) else arg for arg in args)
        getattr(self.plain, method)(*args)
        self.changes[0] += 1
        return self

    # -- what FSDP2 calls

    def fsdp_pre_all_gather(
        self,
        mesh: DeviceMesh,
        outer_size: torch.Size,
        outer_stride: tuple[int, ...],
        module: nn.Module,
        mp_policy: MixedPrecisionPolicy,
    ) -> tuple[tuple[Tensor, ...], Any]:
        """What is sent: one tensor, of a byte an element and the padded size of a shard, for each copy.

        The weight is rounded to ``mp_policy.param_dtype`` first, as it is when FSDP2 gathers it in high
        precision, so that both give the same float8 numbers.
        """
        self.check_device()
        weight = self.weight
        weight.copies.stays_in_memory(self)
        source = mp_policy.param_dtype or self.dtype
        layout = Layout(self.plain, tuple(outer_size), mesh, weight.is_sharded())
        scales, problem = weight.scales(self, mesh, source)
        x = self.plain.to(source)
        wire = _wire_dtype(weight.wire, mesh)
        chosen = weight.copies.sends(mesh)
        sent = []
        for index, (form, scale) in enumerate(zip(weight.formats, scales, strict=True)):
            if index not in chosen:
                continue
            data = form.quantize(x, layout.local(scale, form.dim)).view(torch.uint8)
            if data.shape[0] != layout.padded_rows:
                padded = data.new_zeros((layout.padded_rows, *data.shape[1:]))
                padded[: data.shape[0]] = data
                data = padded
            sent.append(data.view(wire or form.dtype))
        # a group of one gathers the first tensor only (torch 2.13)
        local = tuple(sent[1:]) if layout.is_whole else ()
        return tuple(sent[: len(sent) - len(local)]), (scales, tuple(outer_size), local, chosen, problem)

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[Tensor, ...],
        metadata: Any,
        param_dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> Any:
        """What is made of what arrived: a :class:`Float8Weight`, or new scales for the one there is.

        Raises:
            RuntimeError: if the scales are not those of what was gathered.
        """
        scales, size, local, chosen, problem = metadata
        if problem is not None:
            raise RuntimeError(problem)
        formats = self.weight.formats
        copies = self.weight.copies
        copies.present = chosen
        self.weight.manager.gathered()
        if out is not None:
            target = local_part(out)
            if not isinstance(target, Float8Weight):
                raise RuntimeError(f"f8fx.fsdp: FSDP2 handed back {type(target)} for {self.weight.fqn!r}")
            target.arrived(scales)
            for index, new in enumerate(local, start=1):
                # not seen by autograd, which may hold it for the backward, like FSDP2's own writes
                getattr(target, f"_data_{index}").data.view(torch.uint8).copy_(new.view(torch.uint8))
            return None
        data = tuple(
            # padding is at the end: the shards before the last are full
            gathered.view(form.dtype).view(-1)[: math.prod(size)].view(size)
            for gathered, form in zip((*all_gather_outputs, *local), formats, strict=True)
        )
        alternate = copies.alternates
        made = Float8Weight(data, scales, formats, param_dtype, self.weight.fqn, alternate, copies)
        return made, ()  # all memory is FSDP2's own: nothing more to free


def _wire_dtype(wire: str, mesh: DeviceMesh) -> torch.dtype | None:
    """The dtype of what is sent, ``None`` for float8 itself."""
    if wire == "uint8":
        return torch.uint8
    native = carries_float8(mesh.get_group().group_name, torch.device(mesh.device_type))
    if wire == "float8" and not native:
        raise ValueError('f8fx.fsdp: wire="float8" needs NCCL; other backends carry float8 as wire="uint8"')
    return None if native else torch.uint8
