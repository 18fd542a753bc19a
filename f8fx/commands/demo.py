"""``f8fx demo``."""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from f8fx.demo.model import PRESETS as MODELS
from f8fx.recipe import PRESETS as RECIPES

from .usage import UsageError


def add(commands: Any) -> None:
    """Describes the command."""
    demo = commands.add_parser(
        "demo", help="train a small language model in bf16 and in float8, side by side"
    )
    demo.set_defaults(run=run)
    demo.add_argument("--steps", type=_positive, help="training steps of each run (default: 200; smoke: 6)")
    demo.add_argument("--recipe", choices=tuple(RECIPES), default="tensorwise")
    demo.add_argument(
        "--select",
        choices=("auto", "all"),
        help="which matmuls: those that pay, or all that are legal (default: auto on CUDA, all on CPU)",
    )
    demo.add_argument("--device", help="cpu, cuda, cuda:1, ... (default: cuda if there is one)")
    demo.add_argument("--model", choices=tuple(MODELS), help="size of the model (default: by device)")
    demo.add_argument("--batch", type=_positive, help="sequences in a batch (default: by model)")
    demo.add_argument("--seed", type=_seed, default=0, help="of weights and batches (default: 0)")
    demo.add_argument(
        "--executor",
        choices=("inductor", "eager"),
        help="eager: the same graphs without code generation, needs no C++ compiler "
        "(default: inductor; on several CPU ranks eager)",
    )
    demo.add_argument(
        "--out",
        type=Path,
        default=Path("f8fx-demo"),
        metavar="DIR",
        help="where losses.png and results.json go (default: f8fx-demo)",
    )
    demo.add_argument(
        "--nproc",
        type=_positive,
        metavar="N",
        help="train on N ranks with FSDP2, weights gathered in bf16 and in float8; gloo on CPU, NCCL on CUDA",
    )
    demo.add_argument("--smoke", action="store_true", help="a few steps of a tiny model, to see it run")
    demo.add_argument(
        "--json",
        action="store_true",
        help="print the results as JSON instead of a table; losses that are not finite are null",
    )


def run(args: argparse.Namespace) -> int:
    """Trains, on this machine, and returns the exit code."""
    from f8fx.demo import distributed, plan, train
    from f8fx.doctor import cpp_compiler

    try:
        device = plan.pick_device(args.device)
        if args.nproc is not None:
            distributed.local_device(args, device)
    except ValueError as error:
        raise UsageError(str(error)) from None
    if device.type == "cpu" and plan.executor_for(args, device) == "inductor" and cpp_compiler() is None:
        raise UsageError(
            "Inductor needs a C++ compiler to compile for CPU and found none; install g++ or clang++, "
            "set CXX, or pass --executor eager"
        )
    if not distributed.launched():
        try:
            args.out.mkdir(parents=True, exist_ok=True)
            with TemporaryFile(dir=args.out):
                pass
        except OSError as error:
            raise UsageError(
                f"--out: cannot write to the folder {str(args.out)!r}: {error.strerror}"
            ) from None
    if args.nproc is not None and not distributed.launched():
        return distributed.launch(args.argv, args.nproc)
    if distributed.launched():
        # Ctrl-C ends a rank that waits in a collective too, at once; whoever launched it says so
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        code = train.main(args)
    except FileNotFoundError as error:
        print(f"f8fx demo: {error}", file=sys.stderr)
        code = 1
    if distributed.launched():
        distributed.leave(code)
    return code


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return int(text)


def _seed(text: str) -> int:
    if not text.isdecimal() or int(text) >= 1 << 63:
        raise argparse.ArgumentTypeError(f"must be a whole number from 0 to 2**63 - 1, got {text!r}")
    return int(text)
