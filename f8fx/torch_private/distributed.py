"""Collectives in a graph, process groups by the names they have there, and the store behind them."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import fx

#: The collectives that stand in graphs, as operators.
c10d = torch.ops._c10d_functional


def is_collective(node: fx.Node) -> bool:
    """Whether a node calls a collective, or waits for one.

    ``_c10d_functional``, ``_c10d_functional_autograd``, and ``_dtensor.shard_dim_alltoall``, which shards another dimension.
    """
    namespace = getattr(node.target, "namespace", "")
    is_of_dtensor = namespace == "_dtensor" and "alltoall" in str(node.target)
    return node.op == "call_function" and (namespace.startswith("_c10d_functional") or is_of_dtensor)


def fake_store() -> Any:
    """For ``init_process_group("fake", ...)``: ranks that only exist on paper (``fake_pg``, which adds that backend)."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


@contextlib.contextmanager
def mesh_on_paper(sizes: Mapping[str, int], name: str) -> Iterator[Any]:
    """One dimension of a ``DeviceMesh`` of CPUs that need not exist, in the only process group; this process is rank 0 there.

    Meshes of equal sizes and names are equal, whatever their process groups and this process' rank, and DTensor remembers what it
    has decided by mesh. So it is made to forget that, before and afterwards.
    """
    from torch import distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    _forget_sharding()
    dist.init_process_group("fake", store=fake_store(), rank=0, world_size=math.prod(sizes.values()))
    try:
        yield init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))[name]
    finally:
        dist.destroy_process_group()
        _forget_sharding()


def _forget_sharding() -> None:
    """What DTensor has decided for operators and redistributions (``_clear_sharding_prop_cache``, ``_redistribute``)."""
    from torch.distributed.tensor import _redistribute
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()
    _redistribute._gen_transform_infos.cache_clear()
    _redistribute.clear_redistribute_planner_cache()


def process_group(group: Any) -> Any:
    """The process group that a collective in a graph names; ``None`` where this process has none such.

    Args:
        group: the collective's last argument: a name (``distributed_c10d._resolve_process_group``), or, in
            graphs that are compiled on one rank for all, a node whose value is the group.
    """
    from torch.distributed import distributed_c10d, is_available, is_initialized

    if isinstance(group, fx.Node):
        return group.meta.get("val")
    if not is_available() or not is_initialized():
        return None
    try:
        return distributed_c10d._resolve_process_group(group)
    except (RuntimeError, KeyError, ValueError):
        return None


def group_rank(group: Any) -> int | None:
    """This process's rank in the group that a collective names; ``None`` in graphs that are for all ranks."""
    found = None if isinstance(group, fx.Node) else process_group(group)
    return None if found is None else found.rank()


def group_ranks(group: Any) -> tuple[int, ...]:
    """Global ranks of the group that a collective names; none where there is no such group, or only on paper."""
    found = process_group(group)
    if found is None:
        return ()
    from torch.distributed import get_backend, get_process_group_ranks

    return () if get_backend(found) == "fake" else tuple(get_process_group_ranks(found))


def group_timeout(group: Any) -> timedelta | None:
    """After which collectives of a group fail, the shortest of its backends'; ``None`` where that is not known.

    ``ProcessGroup._device_types`` and ``_get_backend``, ``Backend.options._timeout``.
    """
    found = process_group(group)
    timeouts: list[timedelta] = []
    for device in () if found is None else found._device_types:
        try:
            timeouts.append(found._get_backend(device).options._timeout)
        except (
            AttributeError,
            RuntimeError,
        ):  # a device without a backend, or a backend without such options
            continue
    return min(timeouts, default=None)


def group_backend(group: Any, device: torch.device) -> str | None:
    """Name of the backend that carries a group's tensors on a device (``distributed_c10d.BackendConfig``)."""
    found = process_group(group)
    if found is None:
        return None
    from torch.distributed import Backend, distributed_c10d, get_backend_config

    config = distributed_c10d.BackendConfig(Backend(get_backend_config(found)))
    return config.get_device_backend_map().get(device.type)


def carries_float8(group: Any, device: torch.device) -> bool:
    """Whether a group's collectives take float8 tensors on a device: NCCL's do; gloo's raise. On paper all do."""
    return group_backend(group, device) in ("nccl", "fake")


def group_backends() -> list[str]:
    """Backends of all process groups (``distributed_c10d._world.pg_map``); none where there are none.

    If they are not all the same, each with its group's name.
    """
    from torch.distributed import distributed_c10d, get_backend_config, is_available, is_initialized

    if not is_available() or not is_initialized():
        return []
    groups = distributed_c10d._world.pg_map
    named = sorted((str(group.group_name), str(get_backend_config(group))) for group in groups)
    kinds = sorted({backend for _, backend in named})
    return kinds if len(kinds) == 1 else [f"{name}={backend}" for name, backend in named]


def same_on_all(value: int, group: Any, device: torch.device) -> torch.Tensor:
    """Whether all ranks of a group call this with one value: a bool on the device, one small all-reduce.

    No value travels between the device and the host.
    """
    extremes = torch.full((2,), value, dtype=torch.int64, device=device)
    extremes[1].neg_()
    largest = c10d.wait_tensor(c10d.all_reduce(extremes, "max", group))
    return largest[0] == -largest[1]


def key_local_tensors(kind: type[torch.Tensor]) -> None:
    """Makes AOTAutograd's cache tell DTensors with local tensors of this class from others (``_stable_hash_for_caching``).

    By itself the key of a DTensor is made of its specification, and code compiled for plain local tensors would be run on
    those of the class, which have no memory of their own. torch 2.11 has no such keys.
    """
    from torch.distributed.tensor import DTensor

    original: Any = getattr(DTensor, "_stable_hash_for_caching", None)
    if original is None or kind in getattr(original, "f8fx_kinds", ()):
        return

    def hashed(self: Any) -> str:
        key = original(self)
        return f"{key} {kind.__qualname__}" if isinstance(self._local_tensor, kind) else key

    hashed.f8fx_kinds = (*getattr(original, "f8fx_kinds", ()), kind)  # type: ignore[attr-defined]
    DTensor._stable_hash_for_caching = hashed  # type: ignore[method-assign]


def place_in_mesh(tensor: torch.Tensor) -> list[Any]:
    """What this process has of a DTensor: its placements, its coordinates in the mesh and the names of the mesh's groups.

    Of other tensors, nothing.

    ``DeviceMesh`` of a rank that is not in it has no coordinates, and one without a backend no groups.
    """
    mesh = getattr(tensor, "device_mesh", None)
    if mesh is None:
        return []
    try:
        groups = [group.group_name for group in mesh.get_all_groups()]
    except RuntimeError:
        groups = []
    return [str(tensor.placements), mesh.get_coordinate(), groups]  # type: ignore[attr-defined]


def assert_on_device(condition: torch.Tensor, message: str) -> None:
    """The device fails where a bool on it is false; the host does not wait (``_assert_async``)."""
    torch._assert_async(condition, message)


def process_store() -> tuple[Any, int] | None:
    """The store that processes found each other through, and this one's rank (``_get_default_store``)."""
    from torch.distributed import distributed_c10d, get_rank, is_available, is_initialized

    if not is_available() or not is_initialized():
        return None
    store = distributed_c10d._get_default_store()
    return None if store is None else (store, get_rank())  # MPI has none


def process_store_read(store: Any, keys: Sequence[str]) -> list[str]:
    """What a store holds under the keys now, without waiting; "" under those not set."""
    if store.check(list(keys)):  # all of them
        values = store.multi_get(list(keys)) if store.has_extended_api() else [store.get(k) for k in keys]
        return [value.decode() for value in values]
    return [store.get(key).decode() if store.check([key]) else "" for key in keys]
