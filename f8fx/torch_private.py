"""Every private PyTorch interface f8fx uses, in one place.

Checked on torch 2.11, 2.13 and 2.15. Each entry says what it is used for, so that a reader of a
newer torch knows what to look for when one has moved. Nothing outside this file imports a name
with a leading underscore from torch, or a module under ``torch._inductor``, ``torch._functorch``,
``torch._dynamo`` or ``torch._subclasses``.
"""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import fx

#: The torch releases the test suite passes on.
SUPPORTED_TORCH: tuple[str, ...] = ("2.11", "2.13", "2.15")


def check_version(version: str = torch.__version__) -> str | None:
    """A warning for a torch version the suite is not run on; ``None`` for a supported one."""
    if ".".join(version.split("+")[0].split(".")[:2]) in SUPPORTED_TORCH:
        return None
    return (
        f"f8fx is tested on torch {', '.join(SUPPORTED_TORCH)}; this is {version}, which is none of them. "
        "Compiling goes on; if a graph fails it falls back to plain Inductor with a warning"
    )


# -- fake tensors ---------------------------------------------------------------------------------


def detect_fake_mode(values: Sequence[Any]) -> Any:
    """The FakeTensorMode the values live in, or None (``torch._guards.detect_fake_mode``)."""
    from torch._guards import detect_fake_mode as detect

    return detect(values)


def fake_tensor_mode(**kwargs: Any) -> Any:
    """A new ``torch._subclasses.FakeTensorMode``."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(**kwargs)


def is_fake(tensor: Any) -> bool:
    """Whether a value is a ``torch._subclasses.FakeTensor``: shape and dtype, no data."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(tensor, FakeTensor)


def fake_like(
    like: Any, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device
) -> torch.Tensor | None:
    """A new fake tensor in the mode of another, made without dispatch (``FakeTensor.__new__``).

    ``None`` where a mode is active that catches the making of its meta tensor.
    """
    meta = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
    if type(meta) is not torch.Tensor:
        return None
    return type(like)(like.fake_mode, meta, device)


def storage_key(tensor: torch.Tensor) -> int:
    """Equal for tensors, fake ones too, that are views of one memory (``UntypedStorage._cdata``)."""
    return tensor.untyped_storage()._cdata


def managed_by_fsdp(parameter: torch.Tensor) -> bool:
    """Whether a parameter may be one that FSDP fills by all-gathers, preserving ``_version``.

    FSDP1 marks them (``_fsdp_flattened``). FSDP2 does not: once a module of this process is sharded
    (its class is then a subclass of ``FSDPModule``), any plain parameter may be one.
    """
    if getattr(parameter, "_fsdp_flattened", False):
        return True
    module = sys.modules.get("torch.distributed.fsdp")
    return module is not None and bool(module.FSDPModule.__subclasses__())


# -- distributed ----------------------------------------------------------------------------------


def local_tensor(tensor: Any) -> torch.Tensor:
    """The local tensor of a DTensor itself (``_local_tensor``); ``to_local`` gives an alias of it."""
    return tensor._local_tensor


def in_backward() -> bool:
    """Whether this thread is running a backward (``torch._C._current_graph_task_id``)."""
    return torch._C._current_graph_task_id() != -1


def infinity_norms(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Largest magnitudes of non-empty tensors, in their dtypes, by as few kernels as there can be."""
    return torch._foreach_norm(list(tensors), float("inf"))


def fsdp_group_of(model: Any, is_local: Callable[[torch.Tensor], bool]) -> Any:
    """FSDP2's parameter group, below ``model``, whose parameter has such a local tensor; ``None`` if none has.

    ``FSDPModule._get_fsdp_state()``, its ``_fsdp_param_groups`` (2.11: ``_fsdp_param_group``), their
    ``fsdp_params`` and ``sharded_param``.
    """
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        state: Any = module._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None)
        for group in [state._fsdp_param_group] if groups is None else groups:
            params = group.fsdp_params if group is not None else ()
            if any(is_local(local_tensor(param.sharded_param)) for param in params):
                return group
    return None


def reshards_after_forward(group: Any) -> bool | str | None:
    """Whether FSDP2 frees a group's parameters after the forward; ``"smaller"``: it keeps a part of them.

    ``None`` for no group. Properties ``_reshard_after_forward`` and ``_use_post_forward_mesh``.
    """
    if group is None:
        return None
    if not group._reshard_after_forward:
        return False
    return "smaller" if group._use_post_forward_mesh else True


def move_pre_hook_first(module: Any, key: int) -> None:
    """Makes a forward pre-hook the first to run; ``key`` is its handle's ``id``."""
    module._forward_pre_hooks.move_to_end(key, last=False)


def disabled_torch_function() -> Any:
    """What a tensor subclass that acts in ``__torch_dispatch__`` alone has as ``__torch_function__``."""
    return torch._C._disabled_torch_function_impl


def is_mutating(operator: Any) -> bool:
    """Whether an operator writes to one of its arguments (``OpOverload._schema``)."""
    return operator._schema.is_mutable


# -- symbolic sizes -------------------------------------------------------------------------------


def size_hint(size: int | torch.SymInt) -> int | None:
    """The value a symbolic size had when it was traced; None where it has none (unbacked)."""
    if isinstance(size, int):
        return size
    node = size.node
    return int(node.hint) if node.has_hint() else None


def statically_true(condition: bool | torch.SymBool) -> bool:
    """Whether a condition on symbolic sizes always holds, without adding a guard."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(condition)


# -- distributed ----------------------------------------------------------------------------------


def fake_store() -> Any:
    """For ``init_process_group("fake", ...)``: ranks that only exist on paper (``fake_pg``, which adds that backend)."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


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
    """This process's rank in the group that a collective names."""
    found = process_group(group)
    return None if found is None else found.rank()


def group_ranks(group: Any) -> tuple[int, ...]:
    """Global ranks of the group that a collective names; none where there is no such group, or only on paper."""
    found = process_group(group)
    if found is None:
        return ()
    from torch.distributed import get_backend, get_process_group_ranks

    return () if get_backend(found) == "fake" else tuple(get_process_group_ranks(found))


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


def group_backend(group: Any, device: torch.device) -> str | None:
    """Name of the backend that carries a group's tensors on a device (``distributed_c10d.BackendConfig``)."""
    found = process_group(group)
    if found is None:
        return None
    from torch.distributed import Backend, distributed_c10d, get_backend_config

    config = distributed_c10d.BackendConfig(Backend(get_backend_config(found)))
    return config.get_device_backend_map().get(device.type)


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


# -- Dynamo ---------------------------------------------------------------------------------------


@contextmanager
def unnoticed_by_dynamo() -> Iterator[None]:
    """Whatever is compiled inside the block is forgotten after it, and nothing else is.

    Dynamo keeps, for each code object, what it compiled (``_debug_get_cache_entry_list``) and, for
    each line of source, the sizes it saw, from which it later guesses what is dynamic
    (``torch._dynamo.pgo``). ``torch.compiler.reset()`` would clear both for everybody.
    """
    from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list, reset_code
    from torch._dynamo import convert_frame, pgo
    from torch._dynamo.guards import DeletedGuardManagerWrapper

    def codes() -> list[Any]:
        return [code for code in (seen() for seen in convert_frame.input_codes.seen) if code is not None]

    before = {
        id(code): [id(entry.guard_manager) for entry in _debug_get_cache_entry_list(code)] for code in codes()
    }
    known = set(before)
    kept = codes()  # alive until the end, so that no id is used twice
    with patched_attribute(pgo, "_CODE_STATE", type(pgo.get_code_state())(pgo.CodeState)):
        try:
            yield
        finally:
            for code in codes():
                if id(code) not in known:
                    reset_code(code)
                    continue
                for entry in _debug_get_cache_entry_list(code):
                    manager = entry.guard_manager
                    if id(manager) not in before[id(code)] and manager.extra_state is not None:
                        manager.extra_state.invalidate(entry, DeletedGuardManagerWrapper("explained"))
            del kept


# -- Inductor -------------------------------------------------------------------------------------

if TYPE_CHECKING:

    class CustomGraphPass:
        """Base class of graph passes that Inductor can put into its cache keys."""

        def __call__(self, graph: fx.Graph) -> None: ...

        def uuid(self) -> Any: ...

else:
    from torch._inductor.custom_graph_pass import CustomGraphPass as CustomGraphPass


def inductor_config() -> Any:
    """The module ``torch._inductor.config``; only read, and patched for one compile at a time."""
    from torch._inductor import config

    return config


def inductor_mode_options(mode: str) -> dict[str, Any]:
    """Inductor options a ``torch.compile`` mode stands for; KeyError-free: unknown modes raise."""
    from torch._inductor import list_mode_options

    return dict(list_mode_options(mode))


def inductor_modes() -> tuple[str, ...]:
    """Names ``torch.compile(mode=...)`` knows."""
    from torch._inductor import list_mode_options

    return tuple(list_mode_options())


def compile_fx_module() -> Any:
    """The module that holds ``compile_fx``, which both the stock backend and f8fx end in."""
    return importlib.import_module("torch._inductor.compile_fx")


def joint_custom_pre_pass() -> Any:
    """The pass or passes a user has already put into ``joint_custom_pre_pass`` (2.11: one object)."""
    return inductor_config().joint_custom_pre_pass


def inductor_cache_dir() -> str:
    """Directory of Inductor's on-disk caches."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return cache_dir()


def mark_as_dynamo_graph(copied: fx.GraphModule, original: fx.GraphModule) -> None:
    """Gives a copy of a Dynamo graph what AOTAutograd reads in one beside its nodes.

    ``_dynamo_source`` of placeholders, ``_param_name_to_source`` and ``meta["dynamo_compile_id"]``: without them
    it would not know which inputs keep their address (``_try_get_metadata_from_dynamo``).
    """
    copied.meta.update(original.meta)
    if hasattr(original, "_param_name_to_source"):
        copied._param_name_to_source = original._param_name_to_source
    for new, old in zip(copied.graph.nodes, original.graph.nodes, strict=True):
        if hasattr(old, "_dynamo_source"):
            new._dynamo_source = old._dynamo_source


def untraced() -> Any:
    """A block in which compiling is no part of the compilation going on (``torch._guards.tracing``)."""
    from torch._guards import tracing

    return tracing(None)


# -- AOTAutograd ----------------------------------------------------------------------------------


def decompositions() -> Mapping[Any, Callable[..., Any]]:
    """The decomposition table Inductor traces with."""
    from torch._inductor.decomposition import select_decomp_table

    return select_decomp_table()


if TYPE_CHECKING:

    class CustomPartitionerFn:
        """Base class of partitioners that Inductor can put into its cache keys."""

        def __call__(self, gm: fx.GraphModule, joint_inputs: Sequence[Any], **kwargs: Any) -> Any: ...

        def uuid(self) -> Any: ...

else:
    from torch._inductor.custom_graph_pass import CustomPartitionerFn as CustomPartitionerFn

_PARTITIONING = threading.Lock()


def min_cut_partition(
    joint: fx.GraphModule,
    inputs: Sequence[Any],
    recomputable: Collection[Any] = (),
    **kwargs: Any,
) -> Any:
    """Inductor's partitioner: joint graph -> forward and backward graph.

    Args:
        recomputable: operators (packets) it may recompute in the backward and counts as fusible, beside
            those it knows. It has no interface for that, so the function that lists them
            (``torch._functorch.partitioners.get_default_op_list``) is replaced for the call.
    """
    from torch._functorch import partitioners

    kwargs.setdefault("compiler", "inductor")
    if not recomputable:
        return partitioners.min_cut_rematerialization_partition(joint, inputs, **kwargs)
    known = partitioners.get_default_op_list

    def extended() -> Any:
        types = known()
        types.recomputable_ops.update(recomputable)
        types.fusible_ops.update(recomputable)
        return types

    with _PARTITIONING, patched_attribute(partitioners, "get_default_op_list", extended):
        return partitioners.min_cut_rematerialization_partition(joint, inputs, **kwargs)


def eager_backward_lowering() -> Any:
    """A block in which AOTAutograd compiles a backward together with its forward and raises its errors.

    By default it compiles some backwards when they first run, and forgets an error until then
    (``torch._functorch.config.force_non_lazy_backward_lowering``).
    """
    from torch._functorch import config

    return config.patch(force_non_lazy_backward_lowering=True)


def aot_backend(**kwargs: Any) -> Callable[..., Any]:
    """A Dynamo backend made of AOTAutograd with the given compilers and partitioner."""
    from torch._dynamo.backends.common import aot_autograd

    return aot_autograd(**kwargs)


def boxed(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A compiled function with AOTAutograd's boxed calling convention."""
    from functorch.compile import make_boxed_func

    return make_boxed_func(fn)


def supports_rowwise_scaled_mm(device_type: str, version: str = torch.__version__) -> bool:
    """Whether ``torch._scaled_mm`` takes scale vectors there: on CPU, 2.11 does not.

    2.12 is not tested and counts with 2.11: the scales are then applied to the result, which is right anywhere.
    """
    major_minor = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    return device_type != "cpu" or major_minor >= (2, 13)


@contextmanager
def patched_attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Sets an attribute for the length of a block."""
    previous = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, previous)


def is_present(device: torch.device) -> bool:
    """Whether a GPU is really there, not only in the shapes of fake tensors (``torch._C._cuda_getDeviceCount``)."""
    count = getattr(torch._C, "_cuda_getDeviceCount", None)  # missing in builds for the CPU
    return count is not None and count() > (device.index or 0)


class Parts(NamedTuple):
    """Values that stand side by side along a dimension."""

    values: tuple[Any, ...]
    dim: int


class Lowering:
    """Inductor's lowerings, called on its IR values (``torch._inductor.lowering``, ``ir``)."""

    #: Devices that the options of a pass (:meth:`_tune`) are for.
    tuned_devices: frozenset[str] = frozenset(("cuda", "xpu"))

    def __init__(self) -> None:
        from torch._inductor import ir, lowering

        self._ir = ir
        self._lowering = lowering

    def register(self, target: Any, fn: Callable[..., Any]) -> None:
        """Makes ``fn`` the lowering of an operator."""

        def lower(*args: Any, **kwargs: Any) -> Any:
            self._tune()
            return fn(*args, **kwargs)

        self._lowering.register_lowering(target, type_promotion_kind=None)(lower)

    def _tune(self) -> None:
        """Sets the Inductor options that the pass carries, for the graph being compiled.

        ``compile_fx`` restores them afterwards: they are among the options it was given for this compile.
        """
        from torch._inductor.virtualized import V

        config = inductor_config()
        tuning = getattr(config.joint_custom_pre_pass, "tuning", None)
        if tuning and any(device in self.tuned_devices for device in V.graph.device_types):
            for key, value in tuning.items():
                if getattr(config, key) != value:
                    setattr(config, key, value)

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> Any:
        """The lowering of an aten operator applied to IR values."""
        return self._lowering.lowerings[target](*args, **kwargs)

    def to_dtype(self, x: Any, dtype: torch.dtype) -> Any:
        """A cast, kept out of Inductor's cast elimination."""
        return self._lowering.to_dtype(x, dtype)

    def constant_like(self, constant: float, x: Any) -> Any:
        """A constant of the shape, dtype and device of ``x``."""
        return self._lowering.constant_like(constant)(x)

    def realized(self, x: Any) -> Any:
        """The value, written to a buffer of its own instead of being inlined into its readers."""
        x.realize()
        return x

    def alone(self, x: Any) -> Any:
        """:meth:`realized`, in a kernel that is fused with no other (``V.graph.no_fuse_buffer_names``)."""
        from torch._inductor.virtualized import V

        x.realize()
        V.graph.no_fuse_buffer_names.add(x.get_name())
        if self.parts(x) is not None:
            x.f8fx_parts = None
        return x

    def definition(self, op: Any, *args: Any, **kwargs: Any) -> Any:
        """A call of the operator itself out of the generated code (``fallback_handler``)."""
        return self._lowering.fallback_handler(op, add_to_fallback_set=False)(*args, **kwargs)

    def copied(self, x: Any) -> Any:
        """A copy of the value that is not removed as a no-op where ``x`` is a view."""
        return self._ir.ExternKernel.copy_input(x)

    def row_major(self, x: Any) -> Any:
        """The 2-D value in a buffer of its own with contiguous strides."""
        return self._ir.ExternKernel.require_stride_order(x, [1, 0])

    def concatenation(self, values: Sequence[Any], dim: int) -> Any:
        """The values side by side, as a value that remembers its :meth:`parts`."""
        whole = self._lowering.pointwise_cat(list(values), dim)
        whole.f8fx_parts = Parts(tuple(values), dim)
        return whole

    def parts(self, x: Any) -> Parts | None:
        """What a :meth:`concatenation` was made of; ``None`` for any other value."""
        return getattr(x, "f8fx_parts", None)

    def filled(self, values: Sequence[Any], dim: int) -> Any:
        """One contiguous buffer that the kernels of the 2-D values write into, side by side.

        What ``ir.ConcatKernel.create`` does, without the padding of strides, which float8 gemms do not take.
        """
        from torch._inductor.virtualized import V

        ir = self._ir
        sizes = list(values[0].get_size())
        ends: list[Any] = []
        for value in values:
            ends.append((ends[-1] if ends else 0) + value.get_size()[dim])
        sizes[dim] = ends[-1]
        layout = ir.FixedLayout(
            device=values[0].get_device(),
            dtype=values[0].get_dtype(),
            size=sizes,
            stride=ir.FlexibleLayout.contiguous_strides(sizes),
        )
        kernel = ir.ConcatKernel(name=None, layout=layout, inputs=[])
        buffer = ir.StorageBox(kernel)
        for value, start, end in zip(values, [0, *ends], ends, strict=False):
            place = ir.SliceView.create(buffer, dim, start, end, clamp=False)
            kernel.inputs.append(ir.ConcatKernel.realize_into(value, place))
        kernel.name = V.graph.register_buffer(kernel)
        kernel.inputs = ir.ConcatKernel.unwrap_storage(kernel.inputs)
        V.graph.register_operation(kernel)
        return ir.TensorBox(buffer)

    def is_large(self, x: Any, rows: int = 1024) -> bool:
        """Whether a 2-D value is known to have at least so many rows and is on a GPU."""
        from torch._inductor.virtualized import V

        return x.get_device().type != "cpu" and V.graph.sizevars.statically_known_geq(x.get_size()[0], rows)

    def is_normalized(self, target: Any) -> bool:
        """Whether the node being lowered is a `target` of something pointwise over a tensor and one number a row."""
        from torch._inductor.virtualized import V

        if V.graph.current_node.target is not target:
            return False
        source = cast("fx.Node", V.graph.current_node.args[0])
        columns = source.meta["val"].shape[-1]
        seen: set[fx.Node] = set()
        todo = [source]
        while todo:
            node = todo.pop()
            if node in seen or not isinstance(node.meta.get("val"), torch.Tensor):
                continue
            seen.add(node)
            shape = node.meta["val"].shape
            if len(shape) > 1 and shape[-1] == 1 and columns != 1:
                return True
            tags = getattr(node.target, "tags", ())
            if torch.Tag.pointwise in tags or getattr(node.target, "is_view", False):
                todo.extend(node.all_input_nodes)
        return False

    def missing(self, size: Any, multiple: int) -> Any:
        """How many elements take a size (a number or a sympy expression) to a multiple."""
        if multiple == 1:
            return 0
        from torch._inductor.virtualized import V

        expression = (-size) % multiple
        return V.graph.sizevars.simplify(expression) if not isinstance(expression, int) else expression


def express_min_max_as_where() -> None:
    """Makes Inductor's Triton code write ``minimum`` and ``maximum`` as ``tl.where``; results are the same.

    Since torch 2.14 it writes ``tl.maximum(a, b, tl.PropagateNan.ALL)``. In a kernel that also stores a
    transposed float8 copy, Triton then writes garbage bytes (https://github.com/triton-lang/triton/issues/11111), and
    any min or max of the user's model can be fused into such a kernel. torchao does the same for the same reason
    (``torchao/float8/_inductor_patch.py``). Can go when the oldest supported Triton has the fix.
    """
    major_minor = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if major_minor < (2, 14):
        return
    from torch._inductor.codegen.triton import TritonOverrides

    def written(sign: str) -> staticmethod[..., str]:
        # a != a lets a NaN in a through; a NaN in b makes the comparison false, which chooses b
        return staticmethod(lambda a, b: f"tl.where(({a} {sign} {b}) | ({a} != {a}), {a}, {b})")

    setattr(TritonOverrides, "minimum", written("<"))  # noqa: B010
    setattr(TritonOverrides, "maximum", written(">"))  # noqa: B010


def inductor_lowering() -> Lowering:
    """See :class:`Lowering`."""
    return Lowering()
