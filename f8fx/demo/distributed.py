"""The demo on several ranks: ``f8fx demo --nproc 8``, or ``torchrun --nproc-per-node 8 -m f8fx demo``.

Both runs are FSDP2's: float32 shards, computation in bfloat16, gradients reduced in float32. They differ in what the
gathers carry, bf16 or float8, and in the backend that the blocks are compiled with. Every rank has batches of its own.
gloo on CPU, NCCL on CUDA.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from os import _exit
from typing import TYPE_CHECKING, Any, NoReturn
from unittest import mock

import torch
import torch.distributed as dist

from f8fx.demo.model import Decoder

if TYPE_CHECKING:  # the demo on one rank runs where torch is built without torch.distributed
    from torch.distributed.device_mesh import DeviceMesh

    from f8fx.demo.plan import Plan

#: Parameters are gathered in the first, gradients reduced in the second.
PARAM_DTYPE, REDUCE_DTYPE = torch.bfloat16, torch.float32


def launch(argv: list[str], nproc: int) -> int:
    """Starts the command line again on ``nproc`` local ranks, with torchrun's launcher; its exit code."""
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    # what torchrun would set, without its warning
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        # "--": options that follow are the command's, though torchrun's begin alike
        run.main(["--standalone", f"--nproc-per-node={nproc}", "-m", "--", "f8fx", *argv])
    except ChildFailedError:
        return 1  # the rank has said why
    except SignalException:
        raise KeyboardInterrupt from None
    return 0


def launched() -> bool:
    """Whether this process is one of torchrun's."""
    return dist.is_available() and dist.is_torchelastic_launched()


def leave(code: int) -> NoReturn:
    """Ends a rank's process with an exit code, at once.

    A rank that had trained to its end was seen to die while Python was taken down: "terminate called without an active
    exception", exit code -6. It is what becomes of a thread, such as gloo's, that asks for Python then.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    _exit(code)


@dataclass(frozen=True)
class Ranks:
    """The process group, as the demo uses it.

    Attributes:
        rank, size: this rank, and how many there are.
        mesh: all of them.
    """

    rank: int
    size: int
    mesh: DeviceMesh

    @staticmethod
    @contextmanager
    def joined(device: torch.device) -> Iterator[Ranks]:
        """Joins the ranks that torchrun started, and leaves them at the end."""
        from torch.distributed.device_mesh import init_device_mesh

        cuda = device.type == "cuda"
        if cuda:
            torch.cuda.set_device(device)
        dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)
        try:
            yield Ranks(
                dist.get_rank(),
                dist.get_world_size(),
                init_device_mesh(device.type, (dist.get_world_size(),)),
            )
        finally:
            dist.destroy_process_group()

    def shard(self, model: Decoder, plan: Plan, backend: Any, options: dict[str, Any] | None) -> Decoder:
        """Compiles and shards the blocks, in place; with options of f8fx, weights are gathered in float8."""
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        from f8fx.fsdp import enable_float8_all_gather

        compile_options: dict[str, Any] = {}
        if options is not None:
            enable_float8_all_gather(model, plan.recipe, filter_fqns=options["filter_fqns"])
            compile_options["options"] = options
        # inputs are as wanted: RoPE's angles stay float32
        policy = MixedPrecisionPolicy(PARAM_DTYPE, REDUCE_DTYPE, cast_forward_inputs=False)
        for block in model.blocks:
            block.compile(backend=backend, **compile_options)
            fully_shard(block, mesh=self.mesh, mp_policy=policy)
        fully_shard(model, mesh=self.mesh, mp_policy=policy)
        return model

    def mean(self, loss: torch.Tensor) -> float:
        """The mean of a scalar over the ranks."""
        total = loss.detach().clone()
        dist.all_reduce(total)
        return total.item() / self.size


class Gathered:
    """What a rank receives in all-gathers, counted from what is handed to torch.distributed."""

    def __init__(self) -> None:
        self.bytes = 0

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Counts inside the block."""
        with ExitStack() as stack:
            for name in ("all_gather_into_tensor", "all_gather_single"):  # its name from torch 2.13 on
                call = getattr(dist, name, None)
                if call is not None:
                    stack.enter_context(mock.patch.object(dist, name, self._counted(call)))
            yield

    def _counted(self, call: Any) -> Any:
        def counted(*args: Any, **kwargs: Any) -> Any:
            names = ("output_tensor", "input_tensor")
            output, own = (kwargs[n] if n in kwargs else args[i] for i, n in enumerate(names))
            before = self.bytes
            work = call(*args, **kwargs)
            # the one may call the other
            self.bytes = before + output.nbytes - own.nbytes
            return work

        return counted


def local_device(args: argparse.Namespace, device: torch.device) -> torch.device:
    """This rank's device.

    Raises:
        ValueError: for a device that not every rank can have, or more ranks than GPUs.
    """
    if device.type != "cuda":
        return device
    if device.index is not None:
        raise ValueError(f"--device {args.device}: on several ranks each takes a GPU of its own; pass cuda")
    ranks = int(os.environ["LOCAL_WORLD_SIZE"]) if launched() else args.nproc
    if ranks > torch.cuda.device_count():
        raise ValueError(
            f"{ranks} ranks need {ranks} GPUs and this machine has {torch.cuda.device_count()}; pass fewer, "
            "or --device cpu"
        )
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
