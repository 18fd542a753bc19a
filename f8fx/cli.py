"""The command line: ``f8fx demo``, ``f8fx explain``, ``f8fx doctor``, ``f8fx --version``.

Exit codes: 0 for success, 1 for a failure while running, 2 for a command line that asks for
something that cannot be, 130 after Ctrl-C. The commands are in :mod:`f8fx.commands`.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
from collections.abc import Sequence
from typing import Any

from f8fx.commands import UsageError, demo, doctor, explain


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code.

    Raises:
        SystemExit: from argparse, with code 0 for ``--help`` and ``--version`` and 2 for bad usage.
    """
    parser = _parser()
    args = parser.parse_args(argv)
    args.argv = list(sys.argv[1:] if argv is None else argv)
    if args.run is None:
        parser.print_help(sys.stderr)
        return 2
    try:
        return args.run(args)
    except UsageError as error:
        print(f"f8fx {args.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"\nf8fx {args.command}: interrupted", file=sys.stderr)
        return 130


def version() -> str:
    """Versions of f8fx and torch, in a line."""
    import torch

    try:
        own = importlib.metadata.version("f8fx")
    except importlib.metadata.PackageNotFoundError:
        own = "(not installed)"
    return f"f8fx {own}, torch {torch.__version__}"


class _Version(argparse.Action):
    """``--version``: asks only when told to, since importing torch takes a second."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        print(version())
        parser.exit()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="f8fx", description='float8 for torch.compile: torch.compile(model, backend="f8fx")'
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the versions and exit")
    parser.set_defaults(run=None)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for command in (demo, explain, doctor):
        command.add(commands)
    return parser
