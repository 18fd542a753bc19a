"""``f8fx doctor``."""

from __future__ import annotations

import argparse
import json
from typing import Any


def add(commands: Any) -> None:
    """Describes the command."""
    doctor = commands.add_parser(
        "doctor", help="versions, devices and what they can run, known upstream bugs"
    )
    doctor.set_defaults(run=run)
    doctor.add_argument("--json", action="store_true", help="print JSON")
    doctor.add_argument(
        "--canaries", action="store_true", help="also check the kernels that Inductor generates for the CPU"
    )


def run(args: argparse.Namespace) -> int:
    """Prints what there is and returns the exit code."""
    from f8fx.doctor import diagnose

    diagnosis = diagnose(args.canaries)
    if args.json:
        print(json.dumps(diagnosis.to_dict(), indent=2))
    else:
        diagnosis.print()
    return 0
