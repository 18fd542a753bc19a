"""The collectives that f8fx adds to FSDP2's: all of them maxima, each with a name for when it fails."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

#: What collectives at the beginning of a forward need.
SAME_FORWARDS = "every rank must begin the same forwards"


def maximum(tensor: Tensor, group: Any, what: str, cause: str) -> None:
    """The largest of all ranks' numbers, in place.

    Args:
        group: ``None``: all ranks.
        what: is reduced.
        cause: what the ranks must do for it to succeed.

    Raises:
        RuntimeError: if the collective fails, as gloo's do where a rank died or did not come in time. NCCL's
            run on the device: there its watchdog ends the process.
    """
    try:
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=group)
    except RuntimeError as error:
        among = dist.get_process_group_ranks(group) if group is not None else range(dist.get_world_size())
        raise RuntimeError(
            f"f8fx.fsdp: the all-reduce of {what} over ranks {list(among)} failed. A rank has died, has not come "
            f"within the process group's timeout, or is at another collective: {cause}"
        ) from error
