"""One weight that FSDP2 gathers in float8: where its shard is, and whether that has changed.

**Who holds whom.** A shard holds what is here, and Python's garbage collector does not look into tensors: a reference
from here to a module or a parameter would keep both for ever. So those are weak. What keeps the modules is the
hook on the model, for as long as that lives: ranks must reduce the same amaxes, and would collect
a layer that was taken out of the model at different times.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from f8fx.torch_private import local_part, version_counter

from .amaxes import Reduced
from .copies import Copies
from .formats import Format
from .held import held

if TYPE_CHECKING:
    from .scales import Scales
    from .shard import Float8Shard


@cache
def _shard_type() -> type[Float8Shard]:
    from .shard import Float8Shard

    return Float8Shard


def _shard_of(param: Tensor) -> Float8Shard | None:
    local = local_part(param)
    return local if isinstance(local, _shard_type()) else None


def _version(param: Tensor, own: Float8Shard) -> tuple[int, Any]:
    return version_counter(param), own.version()


@dataclass(eq=False)
class WeightScales:
    """One weight that is gathered in float8.

    Attributes:
        fqn: its name.
        formats: the float8 copies that are sent.
        wire: ``"auto"``, ``"uint8"`` or ``"float8"``.
        copies: which of them a gather carries.
        outer_size: of the weight as FSDP2 sees it: whole, or the local part of a tensor-parallel one.
        before: how a tensor-parallel weight was placed, by mesh dimension: what FSDP2 did not do.
        owners: modules and attribute names that hold the parameter; see :meth:`holders`.
        manager: what takes the amaxes.
    """

    fqn: str
    formats: tuple[Format, ...]
    wire: str
    copies: Copies
    outer_size: tuple[int, ...]
    before: dict[str, Any]
    owners: list[tuple[ReferenceType[nn.Module], str]]
    manager: Scales
    mesh: DeviceMesh | None = None
    reduced: Reduced | None = None
    version: Any = None

    @property
    def dims(self) -> list[int | None]:
        """The directions in which amaxes are needed."""
        return list(dict.fromkeys(form.dim for form in self.formats))

    def holders(self) -> Iterator[tuple[nn.Module, str]]:
        """Those of the owners that there still are."""
        for reference, name in self.owners:
            module = reference()
            if module is not None:
                yield module, name

    def __getstate__(self) -> dict[str, Any]:
        fresh: dict[str, Any] = {"owners": [], "mesh": None, "reduced": None, "version": None}
        return self.__dict__ | fresh

    def __deepcopy__(self, memo: dict[int, Any]) -> WeightScales:
        """A copied weight is another weight: its manager is the copied model's."""
        made = memo[id(self)] = copy.copy(self)
        made.copies = copy.deepcopy(self.copies, memo)
        made.manager = copy.deepcopy(self.manager, memo)
        made.manager.weights.append(made)
        made.owners = [(ref(copy.deepcopy(module, memo)), name) for module, name in self.holders()]
        return made

    def parameter(self) -> Tensor | None:
        """The parameter as it is now, sharded; ``None`` if it was replaced by another."""
        for module, name in self.holders():
            param = held(module, name)
            if isinstance(param, Tensor) and _shard_of(param) is not None:
                return param
        # gathered at the moment: FSDP2 has put the gathered weight into the module
        return self.copies.sharded_parameter()

    def shard(self) -> Float8Shard | None:
        """The parameter's local shard."""
        param = self.parameter()
        return None if param is None else _shard_of(param)

    def version_now(self, shard: Float8Shard) -> Any:
        """Differs from an earlier one if the weight may have changed since, as far as can be seen.

        Of the parameter's shard, of which FSDP2 may have sent a copy, and of the parameter, whose counter a
        compiled function advances where it writes to the shard.
        """
        param = self.parameter()
        own = None if param is None else _shard_of(param)
        if param is None or own is None:
            return None, shard.version()
        return _version(param, own)

    def changed(self) -> bool:
        """Whether the weight may have changed since its amaxes were taken, as far as can be seen."""
        param = None if self.version is None else self.parameter()
        own = None if param is None else _shard_of(param)
        return param is not None and own is not None and self.version != _version(param, own)

    def _sharded_dims(self) -> list[int]:
        """Of the parameter's mesh, those that FSDP2 shards over."""
        param = self.parameter()
        if not isinstance(param, DTensor):
            return []
        names = param.device_mesh.mesh_dim_names
        return [
            index
            for index, placement in enumerate(param.placements)
            if not placement.is_replicate() and (names is None or names[index] not in self.before)
        ]

    def is_sharded(self) -> bool:
        """Whether FSDP2 splits the weight, as far as its placements tell."""
        return bool(self._sharded_dims())

    def shard_mesh(self) -> DeviceMesh | None:
        """The mesh that FSDP2 shards over, where the placements tell; it is compared at the first gather."""
        param = self.parameter()
        if self.mesh is not None or not isinstance(param, DTensor):
            return self.mesh
        mesh, sharded = param.device_mesh, self._sharded_dims()
        names = mesh.mesh_dim_names
        if len(sharded) != 1 or (names is None and mesh.ndim > 1):
            return None
        return mesh if mesh.ndim == 1 else mesh[names[sharded[0]]]  # type: ignore[index]

    def scales(
        self, shard: Float8Shard, mesh: DeviceMesh, source: torch.dtype
    ) -> tuple[tuple[Tensor, ...], str | None]:
        """One tensor of scales for each format, of the whole weight rounded to ``source``; and why not to use them."""
        problem = self.manager.prepare(self, shard, mesh)
        assert self.reduced is not None
        return tuple(self.reduced.scales(self, form, source) for form in self.formats), problem
