"""Scales of weights no rank holds: one all-reduce of all their amaxes a step.

A weight's scale comes from the amax of the whole weight, and every rank holds a shard. So ranks take the
amaxes of their shards, and one ``all_reduce(MAX)`` over all of them, for all weights at once, gives the
amaxes of the weights. Rowwise scales are handled alike: a shard's rows are put at their places in a vector
of zeros. The maximum is taken of the floats' bits as integers: for magnitudes the order is the same, and a
NaN wins, as it does on one device.

**When.** A scale is good for as long as the weights stay as they are. Amaxes can be taken at two points:

* when the model's forward begins: a hook on the model passed to ``enable_float8_all_gather``;
* when FSDP2 gathers outside of a forward and a backward (``model.unshard()``, a call of a submodule).

By default (``"step"``) they are taken there if a weight can have changed since the last time: an optimizer
that holds one has stepped (a hook of all optimizers tells; fused and compiled ones leave no other trace), a state dict was
loaded, or a version counter has moved: the shard's own, that of the parameter around it, which
compiled functions advance, or the count of operators that wrote to it, which ``.data`` cannot hide. With
gradient accumulation or an evaluation in between that is one reduction for several forwards. No rank asks
another whether to reduce: that would be a collective as small as the reduction, and one whose answer the host has
to wait for. So ranks must make the same changes, as training loops do: one that changes its shard alone enters a
collective that the others do not. A write that leaves no trace at all (through ``.data`` of a tensor out of
``state_dict()``, by a replayed CUDA graph or a kernel that was handed an address) leaves the scale as it was.

A forward that is captured into a CUDA graph takes them at every replay, whatever the weights were when it was captured.

``"forward"`` infers nothing and takes them at every such point, at the cost of one read of the local shards
and one small all-reduce a forward: right whoever changed weights, in whichever way, on however few ranks.
``"manual"`` leaves it to the user.

The gathers of the backward, those of checkpointing included, use the scales of the last forward: weights do
not change between the two, and where they are seen to, that is an error.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from f8fx.kernels import cast
from f8fx.report import log
from f8fx.streams import capturing
from f8fx.torch_private import in_backward, move_pre_hook_first

from .amaxes import Place, Reduced, amaxes, largest, ranks
from .copies import settle
from .formats import Layout, scale_shape
from .steps import watch_optimizers
from .weight_scales import WeightScales

if TYPE_CHECKING:
    from .shard import Float8Shard

Mode = Literal["step", "forward", "manual"]


class Scales:
    """Takes the amaxes of all converted weights of a model, see above.

    Args:
        mode: ``"step"``, ``"forward"``, or ``"manual"``: only when :meth:`refresh` is called.
    """

    def __init__(self, mode: Mode) -> None:
        self.mode = mode
        self.weights: list[WeightScales] = []
        self.lost: set[WeightScales] = set()
        self.running = False  # a forward of the model, as far as hooks tell: Ctrl-C ends one without its own
        self.fresh = False  # taken for gathers outside a forward that have not arrived yet
        self.outdated = (
            True  # an optimizer has stepped, or a state dict was loaded, since they were last taken
        )
        if mode == "step":
            watch_optimizers()

    def __getstate__(self) -> dict[str, Any]:
        # the weights of a copied model come by themselves, and those of one from a file are plain tensors
        return self.__dict__ | Scales(self.mode).__dict__

    # -- events

    def begin_forward(self) -> None:
        """The model's forward begins."""
        if not in_backward():
            self._settle()
            for weight in self.weights:
                weight.copies.drop_backward_copy()
        self.fresh = False
        recomputed = in_backward() and all(weight.reduced for weight in self.weights)
        if self.due(self.weights) and not recomputed:
            self.drop_kept()
            self.refresh()
        self.running = True

    def drop_kept(self) -> None:
        """Has FSDP2 gather anew what it has kept, if weights have changed: the new scales are not those of the old data."""
        if in_backward() or capturing():
            return
        if self.outdated or any(weight.changed() for weight in self.weights):
            for weight in self.weights:
                weight.copies.drop_kept()

    def _settle(self) -> None:
        """What gathers carry from now on, if a step was watched."""
        if not capturing():  # the host waits for that
            settle(weight.copies for weight in self.weights)

    def due(self, weights: Iterable[WeightScales]) -> bool:
        """Whether amaxes are to be taken where that is possible, as far as these weights tell."""
        if self.mode != "step":
            return self.mode == "forward"
        # captured into a CUDA graph, they are taken at every replay, when nobody looks at weights
        return self.outdated or capturing() or any(weight.changed() for weight in weights)

    def loaded(self) -> None:
        """A state dict was loaded."""
        self.outdated = True

    def stepped(self) -> None:
        """An optimizer that holds some of the weights begins or ends a step."""
        self.outdated = True
        self.running = False

    def end_forward(self) -> None:
        """The model's forward has ended, also by an exception."""
        self.running = False

    def gathered(self) -> None:
        """A gather has arrived."""
        self.fresh = False

    def prepare(self, weight: WeightScales, shard: Float8Shard, mesh: DeviceMesh) -> str | None:
        """Makes sure, just before a gather, that the weight's amaxes are those of now.

        Returns:
            In a backward, what is wrong if the weight was changed since the last forward. That is no matter if
            nobody reads what is gathered: FSDP2 gathers ahead what it takes to be next, which may be a block of an
            evaluation, whose weights an optimizer that runs within the backward has changed already.

        Raises:
            RuntimeError: if they are seen not to be: in a forward, if it was changed since that began; with
                ``"manual"``, since they were last taken.
        """
        problem = None
        outside = not self.running and not in_backward()
        if outside and weight.copies.open:
            self._settle()  # no forward of the model begins where its parts are called, or methods of it
        # of the others each is looked at when it is gathered itself
        if outside and not self.fresh and self.due([weight]):
            self.refresh()
            self.fresh = True
        elif self.mode == "manual" or not in_backward():
            self._check(weight, shard)
        elif in_backward() and weight.version not in (None, weight.version_now(shard)):
            problem = (
                f"f8fx.fsdp: {weight.fqn!r} was changed between a forward and a backward, and its scale is that of "
                "the last forward. Run the backward before changing weights (an evaluation with averaged "
                "weights in between changes them, too)"
            )
        if weight.reduced is None or weight.mesh is None or ranks(weight.mesh) != ranks(mesh):
            self._reduce([(weight, shard, mesh)])
            self.outdated |= capturing()
        weight.mesh = mesh
        return problem

    def _check(self, weight: WeightScales, shard: Float8Shard) -> None:
        if weight.reduced is None:
            if self.mode != "manual":
                return  # its mesh was not known before this gather
            problem = "has no scale yet"
        elif weight.version != weight.version_now(shard):
            problem = "was changed since its scale was computed"
        else:
            return
        if self.mode != "manual":
            remedy = "Change weights before a forward begins (Ctrl-C in one does not end it), or call"
        else:
            remedy = 'With scales="manual", after every change of the weights, call'
        raise RuntimeError(
            f"f8fx.fsdp: {weight.fqn!r} {problem}. {remedy} f8fx.fsdp.precompute_scales(model) on all ranks"
        )

    # -- the amaxes

    @torch.no_grad()
    def refresh(self) -> None:
        """Takes the amaxes of all weights: one all-reduce for each mesh that weights are sharded over."""
        jobs = []
        for weight in self.weights:
            shard = weight.shard()
            if shard is None:
                self._warn_of_lost(weight)
                continue
            mesh = None if shard.plain.is_meta else weight.shard_mesh()
            if mesh is not None:  # else it is learned at the first gather
                jobs.append((weight, shard, mesh))
        by_group: dict[Any, list[Any]] = defaultdict(list)
        for job in jobs:
            by_group[ranks(job[2])].append(job)
        for group_jobs in by_group.values():
            self._reduce(group_jobs)
        self.outdated = capturing()  # then nothing has run yet

    def _warn_of_lost(self, weight: WeightScales) -> None:
        if weight not in self.lost and any(weight.holders()):
            self.lost.add(weight)
            log.warning(
                "f8fx.fsdp: the parameter %r was replaced after enable_float8_all_gather (tensor parallelism "
                "comes before it) and is not gathered in float8",
                weight.fqn,
            )

    @torch.inference_mode(False)
    @torch.no_grad()
    def _reduce(self, jobs: Sequence[tuple[WeightScales, Float8Shard, DeviceMesh]]) -> None:
        """The amaxes of some weights sharded over one group of ranks."""
        mesh = jobs[0][2]
        parts: list[Tensor] = []
        places: dict[tuple[Hashable, int | None], Place] = {}
        whole = iter(amaxes(shard.plain for weight, shard, _ in jobs if None in weight.dims))
        start = 0
        for weight, shard, _ in jobs:
            # else FSDP2 moves a padded one at its first forward, which on this rank alone would be a change
            weight.copies.stays_in_memory(shard)
            layout = Layout(shard.plain, weight.outer_size, mesh, weight.is_sharded())
            for dim in weight.dims:
                amax = next(whole) if dim is None else cast.amax(shard.plain, dim)
                parts.append(layout.spread(amax, dim))
                places[weight, dim] = (start, scale_shape(weight.outer_size, dim))
                start += parts[-1].numel()
        vector = torch.cat(parts).to(mesh.device_type)
        if mesh.size() > 1:
            largest(vector, mesh, len(jobs))
        reduced = Reduced(vector, places)
        for weight, shard, _ in jobs:
            weight.reduced, weight.mesh, weight.version = reduced, mesh, weight.version_now(shard)


class BeginForward:
    """The forward pre-hook; an object, so that a copied model gets hooks of its own.

    Args:
        holders: the modules that hold the weights, which live as long as the hook (:mod:`f8fx.fsdp.weight_scales`).
    """

    def __init__(self, scales: Scales, holders: Sequence[nn.Module]) -> None:
        self.scales = scales
        self.holders = holders
        self.key: int | None = None

    @torch.compiler.disable
    def __call__(self, module: nn.Module, args: Any) -> None:
        if self.key is not None:
            # `fully_shard` puts its hook, which gathers, before those there are
            move_pre_hook_first(module, self.key)
            self.key = None
        self.scales.begin_forward()


class EndForward:
    """The forward hook."""

    def __init__(self, scales: Scales) -> None:
        self.scales = scales

    @torch.compiler.disable
    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        self.scales.end_forward()
