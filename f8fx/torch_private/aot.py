"""AOTAutograd: its backend and its partitioner."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from .patch import patched_attribute

if TYPE_CHECKING:

    class CustomPartitionerFn:
        """Base class of partitioners that Inductor can put into its cache keys."""

        def __call__(self, gm: fx.GraphModule, joint_inputs: Sequence[Any], **kwargs: Any) -> Any: ...

        def uuid(self) -> Any: ...

else:
    from torch._inductor.custom_graph_pass import CustomPartitionerFn as CustomPartitionerFn


def input_position(placeholder: fx.Node) -> int | None:
    """Which input of Dynamo's graph a placeholder of AOTAutograd's is, or is a part of (``meta["desc"]``).

    A tensor subclass arrives as the tensors in it. Sizes, tangents and what else AOTAutograd adds are no input.
    """
    from torch._functorch._aot_autograd.descriptors import PlainAOTInput

    described = _whole(placeholder.meta.get("desc"))
    return described.idx if isinstance(described, PlainAOTInput) else None


def overwritten_inputs(graph: fx.Graph) -> list[fx.Node]:
    """Placeholders whose tensors get new values after the forward: in the graph, or by AOTAutograd from its results."""
    from torch._functorch._aot_autograd.descriptors import InputMutationAOTOutput

    inside = {
        node.args[0] for node in graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    }
    (output,) = graph.find_nodes(op="output")
    results = [_whole(described) for described in output.meta.get("desc") or ()]
    after = {_whole(found.mutated_input) for found in results if isinstance(found, InputMutationAOTOutput)}
    return [
        node
        for node in graph.find_nodes(op="placeholder")
        if node in inside or _whole(node.meta.get("desc")) in after
    ]


def _whole(described: Any) -> Any:
    """The input or output that one is a part of, of a tensor subclass."""
    from torch._functorch._aot_autograd.descriptors import SubclassGetAttrAOTInput, SubclassGetAttrAOTOutput

    while isinstance(described, (SubclassGetAttrAOTInput, SubclassGetAttrAOTOutput)):
        described = described.base
    return described


_PARTITIONING = threading.RLock()


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


def aot_backend(
    compiler: Callable[..., Any], inference_compiler: Callable[..., Any], partitioner: Callable[..., Any]
) -> Callable[..., Any]:
    """A Dynamo backend made of AOTAutograd, which traces as for Inductor.

    Args:
        compiler: of forwards and backwards.
        inference_compiler: of graphs without a backward.
        partitioner: splits joint graphs.
    """
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor.decomposition import select_decomp_table

    return aot_autograd(
        fw_compiler=compiler,
        bw_compiler=compiler,
        inference_compiler=inference_compiler,
        partition_fn=partitioner,
        decompositions=select_decomp_table(),
        keep_inference_input_mutations=True,
    )


def boxed(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A compiled function with AOTAutograd's boxed calling convention."""
    from functorch.compile import make_boxed_func

    return make_boxed_func(fn)
