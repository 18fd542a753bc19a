"""``f8fx explain``."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from f8fx.passes.experts import Experts
from f8fx.recipe import PRESETS as RECIPES

from .usage import UsageError

if TYPE_CHECKING:
    from f8fx.communication import World


def add(commands: Any) -> None:
    """Describes the command."""
    explain = commands.add_parser(
        "explain", help="which matmuls of a model would run in float8, and why; needs no GPU"
    )
    explain.set_defaults(run=run)
    explain.add_argument(
        "model",
        nargs="?",  # else it is missed behind --filter-fqns NAME, which takes all that follows
        metavar="package.module:function",
        help="a function that returns (model, args), args a tuple or list of inputs, or a dict of them by name",
    )
    explain.add_argument(
        "--target", metavar="NAME", help="hardware to decide for: h100, b200, ... (default: h100)"
    )
    explain.add_argument(
        "--recipe", choices=tuple(RECIPES), default="tensorwise", help="(default: tensorwise)"
    )
    explain.add_argument(
        "--select",
        choices=("auto", "all"),
        default="auto",
        help="convert what pays, or whatever is legal (default: auto)",
    )
    explain.add_argument(
        "--experts",
        choices=get_args(Experts),
        default="leave",
        help="grouped and batched matmuls of a mixture of experts (default: leave)",
    )
    for option, what in (("--filter-fqns", "leave"), ("--only-fqns", "convert only")):
        explain.add_argument(
            option,
            nargs="+",
            metavar="NAME",
            default=[],
            help=f"{what} modules whose name contains one of these",
        )
    explain.add_argument(
        "--option",
        action="append",
        metavar="KEY=VALUE",
        default=[],
        help="any other option of the backend, such as merge=never; may be given several times",
    )
    explain.add_argument(
        "--world",
        metavar="N",
        help="also what a training step sends under FSDP2 on N ranks; 8x4: FSDP x tensor parallelism",
    )
    explain.add_argument(
        "--mesh",
        metavar="fsdp=N[,tp=M][,replicate=R]",
        help="the same by the names of the dimensions; replicate: HSDP",
    )
    explain.add_argument(
        "--copies",
        choices=("auto", "both"),
        default="auto",
        help="with --world or --mesh: of rowwise weights, as enable_float8_all_gather takes it (default: auto)",
    )
    for option, what in (
        ("--param-dtype", "weights are gathered"),
        ("--reduce-dtype", "gradients are reduced"),
    ):
        explain.add_argument(
            option,
            choices=("bfloat16", "float16", "float32"),
            help=f"with --world or --mesh: what {what} in, as FSDP2's MixedPrecisionPolicy says (default: the parameters')",
        )
    explain.add_argument(
        "--parallelize",
        metavar="package.module:function",
        help="with --world 8x4 or --mesh fsdp=8,tp=4: a function that splits a model over a mesh of the last dimension, (model, mesh); what "
        "tensor parallelism sends is then counted",
    )
    explain.add_argument("--json", metavar="FILE", help='write the figures as JSON ("-": print them)')
    explain.add_argument("--html", metavar="FILE", help="write one self-contained HTML page")


def run(args: argparse.Namespace) -> int:
    """Explains a model and returns the exit code."""
    if args.model is None:
        args.model = _taken_for_a_filter(args)
    _check_target(args.target)
    if args.html == "-":
        raise UsageError("--html: give the name of a file; a page is not printed")
    if args.html is not None and args.json is not None and Path(args.html) == Path(args.json):
        raise UsageError(f"--json and --html: both would be written to {args.html!r}")
    for option in ("json", "html"):
        path = getattr(args, option)
        if path is not None and (option, path) != ("json", "-"):
            _check_writable(f"--{option}", Path(path))
    world = _world(args)
    options = {**_backend_options(args), **_options_of_world(args, world)}
    function = _function(args.model)
    _check_is_no_module(args.model, function)
    parallelize = args.parallelize
    options["parallelize"] = None if parallelize is None else _function(parallelize, "--parallelize")
    try:
        made = function()
    except Exception as error:
        traceback.print_exc()
        print(f"f8fx explain: {args.model}() raised {type(error).__name__}", file=sys.stderr)
        return 1
    model, inputs = _checked(args, made, world)

    from f8fx.explanation import ExplainError, explain

    try:
        args_, kwargs = ((), inputs) if isinstance(inputs, dict) else (inputs, None)
        explanation = explain(model, *args_, kwargs=kwargs, **options)
    except ExplainError as error:
        print(f"f8fx explain: {error}", file=sys.stderr)
        return 1
    if args.json == "-":
        print(json.dumps(explanation.to_dict(), indent=2))
    else:
        explanation.print()
    if args.json not in (None, "-"):
        _write("--json", Path(args.json), json.dumps(explanation.to_dict(), indent=2) + "\n")
    if args.html is not None:
        _write("--html", Path(args.html), explanation.to_html())
    return 0


def _check_is_no_module(name: str, function: Any) -> None:
    from torch import nn

    if isinstance(function, nn.Module):
        raise UsageError(f"{name} is a module; give the name of a function that returns (model, args)")


def _taken_for_a_filter(args: argparse.Namespace) -> str:
    """The function, where it stands behind a list of names."""
    for names in (args.filter_fqns, args.only_fqns):
        if len(names) > 1 and ":" in names[-1]:
            return names.pop()
    raise UsageError("give the function: f8fx explain package.module:function")


def _check_target(name: str | None) -> None:
    from f8fx.hardware import find

    if name is not None:
        try:
            find(name)
        except ValueError as error:
            raise UsageError(f"--target: {error}") from None


def _checked(args: argparse.Namespace, made: Any, world: World | None) -> tuple[Any, Any]:
    """The model and its inputs, if that is what the user's function returned."""
    wanted = f"{args.model}() must return (model, args), args a tuple or list of the model's inputs, or a dict of them by name"
    if not (isinstance(made, tuple) and len(made) == 2):
        raise UsageError(f"{wanted}; it returned {_kind(made)}")
    model, inputs = made
    if not isinstance(inputs, (tuple, list, dict)):
        raise UsageError(f"{wanted}; args was {_kind(inputs)}")
    if not callable(model):
        raise UsageError(f"{wanted}; model was {_kind(model)}")
    if world is not None:
        from torch import nn

        if not isinstance(model, nn.Module):
            option = "--world" if args.mesh is None else "--mesh"
            raise UsageError(
                f"{option}: {args.model}() must return a module, it returned {type(model).__name__}"
            )
    return model, inputs


def _options_of_world(args: argparse.Namespace, world: World | None) -> dict[str, Any]:
    """What is sent among the ranks, and in which dtypes."""
    import torch

    policy = {
        "--copies": args.copies != "auto",
        "--param-dtype": args.param_dtype,
        "--reduce-dtype": args.reduce_dtype,
    }
    if world is None and (given := [option for option, value in policy.items() if value]):
        raise UsageError(f"{given[0]}: is about what ranks send; give --world or --mesh too")
    if args.parallelize is not None and (world is None or world.tp == 1):
        raise UsageError(
            "--parallelize: needs ranks to split over, such as --world 8x4 or --mesh fsdp=8,tp=4"
        )
    dtypes = {name: getattr(args, name) for name in ("param_dtype", "reduce_dtype")}
    return {
        "world": world,
        "copies": args.copies,
        **{name: dtype and getattr(torch, dtype) for name, dtype in dtypes.items()},
    }


def _backend_options(args: argparse.Namespace) -> dict[str, Any]:
    """Those that have an argument of their own, and what ``--option`` names."""
    from f8fx.options import OptionError, Options

    own = ("recipe", "select", "experts", "filter_fqns", "only_fqns")
    options = {name: getattr(args, name) for name in own}
    for text in args.option:
        key, equals, value = text.partition("=")
        if not equals:
            raise UsageError(f"--option: must be KEY=VALUE, got {text!r}")
        if key in own or key == "target":
            raise UsageError(f"--option: {key} has an argument of its own, --{key.replace('_', '-')}")
        if key in options:
            raise UsageError(f"--option: {key} is given twice")
        options[key] = {"true": True, "false": False, "none": None}.get(value.lower(), value)
    try:
        Options.parse(options)
    except OptionError as error:
        raise UsageError(str(error)) from None
    if args.target is not None:
        options["target"] = args.target
    return options


def _kind(value: Any) -> str:
    """What a value is: ``Tensor``, ``a tuple of 3``."""
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)}"
    return type(value).__name__


def _check_writable(option: str, path: Path) -> None:
    """Refuses, before any work is done, a file that cannot be written because of the folder it is to be in."""
    if not path.parent.is_dir():
        raise UsageError(f"{option}: there is no folder {str(path.parent)!r}")
    if path.is_dir():
        raise UsageError(f"{option}: {str(path)!r} is a folder; give the name of a file")


def _write(option: str, path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
        print(f"f8fx explain: wrote {path}", file=sys.stderr)
    except OSError as error:
        raise UsageError(f"{option}: cannot write {str(path)!r}: {error.strerror or error}") from None


def _world(args: argparse.Namespace) -> World | None:
    """What ``--world`` and ``--mesh`` say; if both are given, of how many ranks the mesh is."""
    from f8fx.communication import World

    given: dict[str, World] = {}
    for option, text in (("--world", args.world), ("--mesh", args.mesh)):
        if text is not None:
            try:
                given[option] = World.parse(text)
            except ValueError as error:
                raise UsageError(f"{option}: {error}") from None
    world, mesh = given.get("--world"), given.get("--mesh")
    if world is None or mesh is None:
        return world or mesh
    if world not in (mesh, World(mesh.size)):
        raise UsageError(
            f"--world {args.world} and --mesh {args.mesh} contradict each other: give one of them"
        )
    return mesh


def _function(spec: str, what: str = "the model") -> Callable[..., Any]:
    """The function that ``package.module:function`` names; the current folder is searched too.

    Args:
        what: is given so, for errors.
    """
    module_name, colon, name = spec.partition(":")
    if not (module_name and colon and name):
        raise UsageError(f"{what} must be given as package.module:function, got {spec!r}")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    path = Path(module_name)
    if path.is_file() or not all(part.isidentifier() for part in module_name.split(".")):
        hint = (
            f"; for the file {module_name} in its folder write {path.stem}:{name}"
            if path.suffix == ".py"
            else ""
        )
        raise UsageError(f"{module_name!r} is not the name of a module{hint}")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise UsageError(f"importing {module_name!r} failed: {error}") from None
        raise UsageError(f"there is no module {module_name!r} here or on the Python path") from None
    except Exception as error:
        traceback.print_exc()
        raise UsageError(f"importing {module_name!r} raised {type(error).__name__}") from None
    function = getattr(module, name, None)
    if not callable(function):
        raise UsageError(f"module {module_name!r} has no function {name!r}")
    return function
