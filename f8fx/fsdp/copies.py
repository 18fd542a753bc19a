"""Which float8 copies of a weight a gather carries.

Recipes that scale rows read a weight in two formats: the forward's gemm one copy, the backward's the other. FSDP2
gathers for each half of a step anew, so that a gather need only carry the copy its own half reads: one byte an
element instead of two. But what a half reads is the graphs' affair:

* a forward that checkpointing runs again in the backward reads its copy there once more, and so may a graph whose
  partitioner recomputes to save memory;
* eager autograd, and graphs that f8fx did not compile, may read the forward's copy in the backward, too.

So, with ``"auto"``, all gathers of the first step carry both copies, and it is noted who reads which. Graphs compiled
by f8fx say so whenever they run (:mod:`f8fx.halves`), and eager reads are seen; a weight that no graph of f8fx reads
keeps both copies. When the first forward after a backward begins, the ranks of a shard group put together what
they have seen, in one all-reduce of a few numbers a weight, and from then on a gather carries what its half was seen to
read. Where a half finds only the other's copy in memory, since a gather began early or was kept, the copy it
needs is gathered there. A graph that reads more than was ever seen is an error that names the weight. What cannot be
seen is a weight that is read by a graph of f8fx and, with gradients, by one of another compiler as well.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal
from weakref import ReferenceType, ref

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from f8fx.ranks.peers import Peers
from f8fx.report import log
from f8fx.torch_private import (
    backward_was_interrupted,
    fsdp_parameters,
    gather_group,
    gather_outputs,
    in_backward,
    keep_padded_shard,
    local_tensor,
    reshard_group,
    reshards_after_forward,
    saved_tensors_are_read,
    set_gather_outputs,
    sharded_parameter,
    storage_key,
)

from .reduce import SAME_FORWARDS, maximum

if TYPE_CHECKING:
    from .shard import Float8Shard

Wanted = Literal["auto", "both"]

_FORWARD, _BACKWARD = 0, 1
#: To settle a weight that not all ranks have read.
_ATTEMPTS = 3


@dataclass(eq=False)
class Copies:
    """The copies of one weight: which there are, which are in memory, and who reads them.

    Attributes:
        fqn: of the weight.
        count: one for recipes whose halves read the same copy, else two: the forward's, the backward's.
        wanted: ``"auto"``, or ``"both"``: all of them, always.
        peers: the ranks that compile what reads it.
        present: what the last gather brought.
        read_early: the backward reads the forward's copy.
        read_late: the forward reads the backward's.
        sent: copies of the forward's and of the backward's gather, once that is settled.
        attempts: how often the ranks have tried to settle it.
        has_warned: an operator outside of a graph has read it.
    """

    fqn: str
    count: int
    wanted: Wanted
    peers: Peers
    present: tuple[int, ...] = (_FORWARD, _BACKWARD)
    read_early: bool = False
    read_late: bool = False
    sent: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    attempts: int = 0
    has_warned: bool = False
    mesh: DeviceMesh | None = None
    _begun: tuple[int, ...] = (_FORWARD, _BACKWARD)
    _found: tuple[ReferenceType[Any], ReferenceType[Any]] | None = field(default=None, repr=False)
    _outputs: list[Tensor] | None = field(default=None, repr=False)
    _alternates: bool | None = field(default=None, repr=False)
    _said: bool = field(default=False, repr=False)
    _stays: bool = field(default=False, repr=False)
    _trained: bool = field(default=False, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        # a copy of a model is sharded anew
        made = Copies(self.fqn, self.count, self.wanted, self.peers)
        return made.__dict__

    # -- where FSDP2 holds it

    def held_by(self, group: Any, parameter: Any) -> None:
        """Notes the group and the parameter of FSDP2, unless it is noted."""
        if self._found is None:
            self._found = ref(group), ref(parameter)

    def _find(self) -> tuple[Any, Any]:
        """FSDP2's group and parameter, which hold the weight: not to be held by it. ``None`` twice if there are none."""
        if self._found is None:
            # all there are: each by itself would look through those of the others
            for group, parameter in fsdp_parameters():
                local: Any = local_tensor(sharded_parameter(parameter))
                copies = getattr(getattr(local, "weight", None), "copies", None)
                if isinstance(copies, Copies):
                    copies.held_by(group, parameter)
            if self._found is None:
                return None, None
        return self._found[0](), self._found[1]()

    @property
    def _group(self) -> Any:
        return self._find()[0]

    @property
    def _parameter(self) -> Any:
        return self._find()[1]

    def sharded_parameter(self) -> Tensor | None:
        """The parameter that FSDP2 holds while its module holds the gathered weight."""
        return sharded_parameter(self._parameter)

    # -- what is sent

    @property
    def alternates(self) -> bool:
        """Whether gathers may carry one copy: known from the first on."""
        return bool(self._alternates)

    def _decide(self, mesh: DeviceMesh) -> None:
        """At the first gather.

        Raises:
            NotImplementedError: for ``reshard_after_forward=<int>``, which FSDP2 lacks for parameters that
                say how they are sent.
        """
        reshards = self._reshards()
        if reshards is not None and not isinstance(reshards, bool):
            raise NotImplementedError(
                f"f8fx.fsdp: {self.fqn!r}: FSDP2 cannot reshard a float8 weight to a smaller group; use "
                "reshard_after_forward=True or False"
            )
        if self._alternates is None:
            self.mesh = mesh
            several = self.count > 1 and mesh.size() > 1
            self._alternates = self.wanted == "auto" and several and reshards is True

    def sends(self, mesh: DeviceMesh) -> tuple[int, ...]:
        """Which copies the gather that begins now carries."""
        self._begun = tuple(range(self.count))
        self._decide(mesh)
        if not self.alternates:
            return self._begun
        backward = in_backward()
        self._trained |= backward
        if self._outputs is None:
            # what the first gather was received in is there from the second on
            self._outputs = gather_outputs(self._parameter) or None
        if self.sent is None or self._outputs is None:
            return self._begun
        if self._reshards() is True:  # else the backward gets what the forward gathered
            self._begun = self.sent[backward]
        set_gather_outputs(self._parameter, [self._outputs[index] for index in self._begun])
        return self._begun

    def drop_backward_copy(self) -> None:
        """Frees what a backward has gathered, or has begun to, so that the next forward gathers its own copy.

        FSDP2 keeps it after ``set_reshard_after_backward(False)``, and may after ``set_is_last_backward(False)``.

        Raises:
            RuntimeError: after a backward that ended in an exception: FSDP2 takes some blocks to be in it still, and
                would not gather for the next one.
        """
        if self.sent is None:
            return
        if backward_was_interrupted(self._group):
            raise RuntimeError(
                "f8fx.fsdp: the last backward ended in an exception, and FSDP2 takes it to be running. Call "
                "reset_iter_state() on the root module before the next forward (torch 2.13; with older ones resume from "
                "a checkpoint)"
            )
        if _FORWARD not in self._begun:
            reshard_group(self._group)
            self._begun = (_FORWARD, _BACKWARD)

    def drop_kept(self) -> None:
        """Frees what FSDP2 has gathered and kept."""
        if self._group is not None:
            reshard_group(self._group)

    def _reshards(self) -> bool | str | None:
        return reshards_after_forward(self._group)

    def stays_in_memory(self, shard: Float8Shard) -> None:
        """Somebody shares the memory of a shard, who is not to be left behind when FSDP2 looks at it again."""
        is_padded = shard.plain.untyped_storage().nbytes() > shard.plain.nbytes
        if self._stays or not is_padded:
            return
        parameter = self._parameter
        if parameter is not None:
            keep_padded_shard(parameter, lambda local: storage_key(local.plain))
            self._stays = True

    # -- what is read

    def said(self, early: bool, late: bool) -> None:
        """A graph compiled by f8fx is called, and reads copies in the other's half, or does not.

        Raises:
            RuntimeError: if it, or the backward it is called in, reads more than was seen before.
        """
        self._said = True
        if not self.alternates:
            return
        early |= in_backward()
        late |= torch.is_grad_enabled() and saved_tensors_are_read()
        if self.sent is None:
            self.read_early |= early
            self.read_late |= late
            return
        again = early and _FORWARD not in self.sent[_BACKWARD]
        if again or (late and _BACKWARD not in self.sent[_FORWARD]):
            what = (
                "the forward's copy is read again in the backward, as activation checkpointing does"
                if again
                else "the backward's copy is read in the forward, as hooks of saved tensors do"
            )
            raise RuntimeError(
                f"f8fx.fsdp: {self.fqn!r}: {what}. When it was settled what its gathers carry, none did. Use "
                'enable_float8_all_gather(..., copies="both")'
            )
        self._need(_FORWARD, *((_BACKWARD,) if late else ()))

    def backward_begins(self, early: bool) -> None:
        """The backward of a graph compiled by f8fx begins; what it reads is gathered if it is not there."""
        if self.sent is not None:
            self._need(_BACKWARD, *((_FORWARD,) if early else ()))

    def _need(self, *copies: int) -> None:
        if not set(copies) <= set(self.present):
            reshard_group(self._group)
            gather_group(self._group)
        if not set(copies) <= set(self.present):
            raise RuntimeError(
                f"f8fx.fsdp: the copy of {self.fqn!r} that is read now is not in memory, and FSDP2 does not gather it while it "
                'keeps the other. Use enable_float8_all_gather(..., copies="both"), or call reshard() on the module before'
            )

    def computed_with(self) -> None:
        """An operator reads the weight, outside of any graph.

        Raises:
            RuntimeError: if the forward's copy is not in memory.
        """
        if self.sent is None:
            self.read_early |= in_backward() or torch.is_grad_enabled()
        elif _FORWARD not in self.present:
            raise RuntimeError(
                f"f8fx.fsdp: {self.fqn!r} is read outside of a compiled graph, and what is in memory is the copy that a "
                'backward has gathered. Use enable_float8_all_gather(..., copies="both")'
            )

    # -- what is settled

    @property
    def open(self) -> bool:
        """Whether a step was watched and nothing is settled yet; the same on all ranks of a shard group."""
        return self.alternates and self._trained and self.sent is None and self.attempts < _ATTEMPTS

    @property
    def seen(self) -> list[bool]:
        """Two copies where one would do, and whether it is not known: what the ranks put together."""
        return [self.read_early, self.read_late, not self._said]

    def settle(self, read_early: bool, read_late: bool, unknown: bool) -> None:
        """From now on gathers carry what is read, if that is known."""
        self.attempts += 1
        if not unknown:
            if read_early and read_late:
                log.warning(
                    "f8fx.fsdp: gathers of %r carry both of its float8 copies, as many bytes as in bf16: forward and backward "
                    "read each other's. Weights of experts do if they are [experts, in, out] and their module's `is_transposed` "
                    "is not true, or the other way round",
                    self.fqn,
                )
            everything = (_FORWARD, _BACKWARD)
            self.sent = (
                everything if read_late else (_FORWARD,),
                everything if read_early else (_BACKWARD,),
            )


def settle(found: Iterable[Copies]) -> None:
    """Puts together what the ranks of each shard group have seen; on all ranks, between steps.

    One all-reduce a group, whose result the host waits for: once for each weight, a few times for one that no graph
    of f8fx reads on some rank.
    """
    by_group: dict[tuple[int, ...], list[Copies]] = defaultdict(list)
    for copies in found:
        if copies.open:
            assert copies.mesh is not None
            by_group[tuple(copies.mesh.mesh.flatten().tolist())].append(copies)
    for members in by_group.values():
        mesh = members[0].mesh
        assert mesh is not None
        seen = torch.tensor([c.seen for c in members], dtype=torch.uint8, device=mesh.device_type)
        maximum(seen, mesh.get_group(), f"what {len(members)} weights are read for", SAME_FORWARDS)
        for copies, row in zip(members, seen.tolist(), strict=True):
            copies.settle(*map(bool, row))
