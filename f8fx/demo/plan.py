"""What a run of the demo is determined by, from the command line and the device."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch

from f8fx.demo.distributed import launched
from f8fx.demo.model import DecoderConfig
from f8fx.hardware import Hardware

#: Bytes of parameter, gradient and AdamW state per parameter, plus its bf16 copy under autocast.
_BYTES_PER_PARAMETER = 18


@dataclass(frozen=True)
class Plan:
    """Everything a run is determined by, apart from its backend.

    Attributes:
        warm_up: the share of the steps in which the learning rate rises.
    """

    config: DecoderConfig
    device: torch.device
    steps: int
    batch: int
    seq: int
    learning_rate: float
    recipe: str = "tensorwise"
    select: str = "all"
    executor: str = "inductor"
    seed: int = 0
    ranks: int = 1
    warm_up: float = 0.1

    @property
    def tokens_per_step(self) -> int:
        """Tokens in the batches of all ranks."""
        return self.ranks * self.batch * self.seq


def device_note(device: torch.device, hardware: Hardware) -> str:
    """One sentence on what float8 means on this device."""
    if device.type == "cpu":
        return (
            "CPU: float8 is emulated by PyTorch. The losses are the point here; the times say nothing "
            "about a GPU."
        )
    if not hardware.float8_tensor_cores:
        return (
            f"{torch.cuda.get_device_name(device)} has no float8 tensor cores: nothing will be "
            "converted, so both runs are bf16."
        )
    return f"{torch.cuda.get_device_name(device)}: float8 tensor cores ({', '.join(hardware.granularities)})."


def ranks_note(plan: Plan, asked: str | None) -> str:
    """One sentence on how the ranks work together."""
    if plan.ranks == 1:
        return ""
    backend = "gloo" if plan.device.type == "cpu" else "NCCL"
    text = f" {plan.ranks} ranks, FSDP2 over {backend}, weights gathered in bf16 and in float8."
    if plan.executor == "eager" and asked is None:
        text += (
            " Graphs run without code generation, as Inductor would take minutes on every rank "
            "(--executor inductor to have it)."
        )
    return text


def executor_for(args: argparse.Namespace, device: torch.device) -> str:
    """The executor asked for; by default Inductor, but on CPU for several ranks."""
    several = args.nproc is not None or launched()
    return args.executor or ("eager" if several and device.type == "cpu" else "inductor")


def plan_for(args: argparse.Namespace, device: torch.device, ranks: int = 1) -> Plan:
    """The plan that the command line and the device ask for.

    On CUDA the ``1b`` model loses blocks until its training state fits in the free memory.
    """
    large = device.type == "cuda" and not args.smoke
    config = DecoderConfig.named(args.model or ("tiny" if args.smoke else "1b" if large else "small"))
    if large and args.model is None:
        free, _ = torch.cuda.mem_get_info(device)
        while config.layers > 1 and config.parameters * _BYTES_PER_PARAMETER * 1.6 > free:
            config = config.replace(layers=config.layers - 1)
    wide = config.dim >= 1024
    seq = min(config.max_seq, 2048 if wide else 128)
    return Plan(
        config=config,
        device=device,
        steps=args.steps or (6 if args.smoke else 200),
        batch=args.batch or (4 if wide or args.smoke else 8),
        seq=seq,
        learning_rate=3e-4 if wide else 3e-3,
        recipe=args.recipe,
        select=args.select or ("auto" if large else "all"),
        executor=executor_for(args, device),
        seed=args.seed,
        ranks=ranks,
        # AdamW's first steps change every weight alike: steeper, the loss of a wide model rises before it falls
        warm_up=0.5 if wide else 0.1,
    )


def pick_device(wanted: str | None) -> torch.device:
    """The device of that name, or CUDA where there is one.

    Raises:
        ValueError: for a device that is not CPU or CUDA, or is not there.
    """
    if wanted is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(wanted)
    except RuntimeError as error:
        raise ValueError(f"--device {wanted!r} is no device: {error}") from None
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"--device {wanted!r}: the demo runs on cpu and cuda")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"--device {wanted!r}: this machine has {torch.cuda.device_count()} CUDA devices")
    return device
