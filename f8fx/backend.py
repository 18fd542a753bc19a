"""The backend: options -> pipeline -> Inductor.

``torch.compile(model, backend="f8fx")`` calls :func:`f8fx` with Dynamo's graph. It hands the graph to
Inductor's ``compile_fx`` with one addition, the :class:`~f8fx.graph_pass.GraphPass` in ``joint_custom_pre_pass``, so
that every Inductor feature stays the user's. Inductor's configuration is changed for one compile at a time
only; what is global are the lowerings of our operators (:mod:`f8fx.lowerings`).
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

from torch import fx

from . import ahead, canary, executor, halves, inference_inputs, kernel_forms
from .batches import dependence
from .cache import CacheKey, devices_of, load_report, load_weights, store_report, store_weights
from .compiler import CompileFx, Compiler
from .graph_pass import GraphPass, PassError
from .options import Options, as_passes
from .passes import FilterError, Pipeline, WeightInputs
from .passes.halves import ANYTHING, NOTHING, Reads, ReadsOther
from .passes.parameters import KnownInputs
from .ranks import peers
from .ranks.agreement import checked
from .report import GraphReport, log, publish
from .resumed import name_modules
from .torch_private import (
    begins_anew,
    check_version,
    compile_fx_module,
    compiles_ahead_of_time,
    copy_of_graph,
    eager_backward_lowering,
    forget_traced_regions,
    joint_custom_pre_pass,
    keep_out_of_packages,
    repeatable_backwards,
)
from .tuning import tuning
from .weights import inputs as weight_inputs


def f8fx(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> Callable[..., Any]:
    """The Dynamo backend registered as ``"f8fx"``.

    Args:
        gm: Dynamo's graph.
        example_inputs: its inputs.
        mode, options: as given to ``torch.compile``; see :class:`f8fx.options.Options`.
        kwargs: not used by any supported torch; named in the error if one passes more.

    Raises:
        OptionError: for unknown options or values.
        PassError: if a pass fails and ``strict`` is set.
    """
    if kwargs:
        warnings.warn(f"f8fx: ignoring unknown backend arguments {sorted(kwargs)}", stacklevel=2)
    return compile_graph(gm, example_inputs, Options.parse(options, mode))


def compile_graph(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    options: Options,
    compile_fx: CompileFx | None = None,
    patches: Mapping[str, Any] | None = None,
    arguments: Mapping[str, Any] = MappingProxyType({}),
) -> Callable[..., Any]:
    """Compiles one Dynamo graph with validated options.

    Args:
        compile_fx: Inductor's entry, default the current one.
        patches: further Inductor options, for callers that stand in for the stock backend.
        arguments: further keyword arguments of ``compile_fx``, for the same.
    """
    _warn_version()
    name_modules(gm)
    keep_out_of_packages(gm)
    config = {**(patches or {}), **options.inductor}
    if compiles_ahead_of_time():
        options, config = ahead.settled(options, config, gm)
    compile_fx = compile_fx or _entry()
    if options.executor == "inductor":
        # last: what was found to be wrong is not asked for, not even by the user
        config = {**config, **canary.ensure(devices_of(example_inputs), compile_fx)}
    compiler = Compiler(options, config, partial(compile_fx, **arguments))
    graph_pass = _graph_pass(gm, example_inputs, options, config)
    peers.compare(example_inputs, options)
    weights = halves.positions(example_inputs)
    # compilers take over the graph they are given: keep one for another attempt
    spare = copy_of_graph(gm) if weights or not options.strict else None

    def finished(compiled: Callable[..., Any], reads: Reads) -> Callable[..., Any]:
        return halves.saying(checked(compiled, graph_pass.confirmed, example_inputs), weights, reads)

    def unchanged(compiled: Callable[..., Any]) -> Callable[..., Any]:
        if options.weights != "dynamic" and weight_inputs.may_train(example_inputs):
            compiled = weight_inputs.noting_training(compiled)
        return finished(compiled, ANYTHING)

    if not compiler.runs_passes:
        return unchanged(_without_passes(options, lambda: compiler(gm, example_inputs)))
    try:
        compiled, reads = _with_passes(gm, example_inputs, compiler, graph_pass, spare, bool(weights))
    except Exception as error:
        if spare is None or options.strict or not _may_fall_back(error, graph_pass):
            raise
        return unchanged(_fall_back(error, graph_pass, options, lambda: compiler(spare, example_inputs)))
    _publish(graph_pass, options, config)
    return finished(inference_inputs.savable(compiled, example_inputs), reads)


def _entry() -> CompileFx:
    """Inductor's entry, without what is installed over it (:mod:`f8fx.installation`): its options are not this graph's."""
    entry = compile_fx_module().compile_fx
    while (installation := getattr(entry, "installation", None)) is not None:
        entry = installation.replaced
    return entry


def _with_passes(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    compiler: Compiler,
    graph_pass: GraphPass,
    spare: fx.GraphModule | None,
    has_halves: bool,
) -> tuple[Callable[..., Any], Reads]:
    """Compiles a graph with our pass, and says what its forward and its backward read of weights' copies.

    Args:
        spare: a copy of the graph, for another attempt where it reads others than it should (:mod:`f8fx.halves`).
        has_halves: whether there are such weights.
    """
    keeps = has_halves and compiler.partitions and not compiler.copies_inputs
    try:
        compiled = _attempt(gm, example_inputs, replace(compiler, keep_to_halves=keeps), graph_pass)
        return compiled, ANYTHING if has_halves and not keeps else NOTHING
    except Exception as error:
        other = ReadsOther.within(error)
        if other is None or spare is None:
            raise
        graph_pass.begin_again(other.reads)
        return _attempt(copy_of_graph(spare), example_inputs, compiler, graph_pass), other.reads


def _attempt(
    gm: fx.GraphModule, example_inputs: Sequence[Any], compiler: Compiler, graph_pass: GraphPass
) -> Callable[..., Any]:
    # a backward that fails must fail here, where there is something to fall back to, and one that is compiled
    # when it first runs would take what that call retains for what all calls do
    with repeatable_backwards(), eager_backward_lowering():
        if compiler.options.weights == "dynamic":
            return compiler(gm, example_inputs, graph_pass)
        return _compile_with_weights(gm, example_inputs, compiler, graph_pass)


def _compile_with_weights(
    gm: fx.GraphModule, example_inputs: Sequence[Any], compiler: Compiler, graph_pass: GraphPass
) -> Callable[..., Any]:
    """Compiles a graph so that it takes the float8 copies of its weights as inputs, where it can."""
    options = compiler.options
    if compiler.freezes:
        return compiler(gm, example_inputs, graph_pass)
    graph_pass.should_keep = weight_inputs.should_keep_some(example_inputs, options.weights)
    if not weight_inputs.candidates(example_inputs, options.weights, options.experts).weights:
        return compiler(gm, example_inputs, graph_pass)
    plain, training = (graph_pass.pipeline, graph_pass.key), False
    try:
        casts_of = partial(_casts, gm, example_inputs, options, graph_pass)
        inputs, training = weight_inputs.learned(example_inputs, casts_of, options.weights, options.experts)
        if inputs.copies:
            last = not training or inputs.last
            graph_pass.pipeline = _pipeline(options, inputs)
            graph_pass.key = graph_pass.key.extended(inputs)
            longer, examples = weight_inputs.extended(gm, example_inputs, inputs, is_static=last)
            return weight_inputs.wrapped(compiler(longer, examples, graph_pass), inputs, training, last)
    except FilterError:
        raise
    except Exception as error:
        if options.strict or ReadsOther.within(error) is not None or begins_anew(error):
            raise
        what = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        warnings.warn(f"f8fx: the weights of a graph are quantized in each call ({what})", stacklevel=2)
        log.debug("f8fx: no weight inputs", exc_info=error)
        graph_pass.forget()
        graph_pass.pipeline, graph_pass.key = plain
        graph_pass.should_keep = False
        training = weight_inputs.may_train(example_inputs)
    compiled = compiler(gm, example_inputs, graph_pass)
    return weight_inputs.noting_training(compiled) if training else compiled


def _casts(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    options: Options,
    graph_pass: GraphPass,
    found: WeightInputs,
) -> tuple[WeightInputs, bool]:
    """Which candidates a graph casts, and whether it trains: as it was kept, or by tracing it."""
    key = graph_pass.key.extended(found)
    kept = load_weights(key, found)
    if kept is not None:
        return kept
    trial = GraphPass(_pipeline(options, found), graph_pass.key, graph_pass.before, known=graph_pass.known)
    executor.trace(gm, example_inputs, trial)
    forget_traced_regions()
    assert trial.pipeline.reuse is not None
    inputs = found.with_casts(trial.pipeline.reuse.seen)
    training = any(report.training for report in trial.reports)
    store_weights(key, inputs, training)
    return inputs, training


def _graph_pass(
    gm: fx.GraphModule, example_inputs: Sequence[Any], options: Options, config: Mapping[str, Any]
) -> GraphPass:
    previous = as_passes(config.get("joint_custom_pre_pass", joint_custom_pre_pass()))
    key = CacheKey.of(gm, example_inputs, options, config).after(previous)
    if replaced := kernel_forms.key(devices_of(example_inputs)):
        key = key.extended(replaced)
    once = ahead.casts_once(config) if compiles_ahead_of_time() else False
    return GraphPass(
        _pipeline(options, constants=once), key, previous, tuning(config), KnownInputs.of(example_inputs)
    )


def _pipeline(options: Options, weights: WeightInputs | None = None, constants: bool = False) -> Pipeline:
    watch = None
    if options.debug and log.isEnabledFor(logging.DEBUG):

        def watch(name: str, text: str) -> None:
            log.debug("after %s:\n%s", name, text)

    return options.pipeline(watch=watch, weights=weights, constants=constants, runs=True)


def _may_fall_back(error: BaseException, graph_pass: GraphPass) -> bool:
    """Whether a graph can be compiled as if f8fx were not there instead, and f8fx is what failed."""
    # the other ranks go on: this one must not send something else
    sends_float8 = any(g.moved for report in graph_pass.reports for g in report.gathers)
    return not sends_float8 and not begins_anew(error) and _is_ours(error, graph_pass)


def _is_ours(error: BaseException, graph_pass: GraphPass) -> bool:
    """Whether a failure can come from f8fx: a pass raised, or a graph it changed failed to compile."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, (PassError, FilterError)):
            return isinstance(cause, PassError)
        cause = cause.__cause__ or cause.__context__
    return any(report.converted for report in graph_pass.reports)


def _fall_back(
    error: BaseException, graph_pass: GraphPass, options: Options, plain: Callable[[], Any]
) -> Callable[..., Any]:
    forget_traced_regions()
    compiled = plain()  # if this fails too, f8fx is not to blame, and this error is the one to see
    cause = error.__cause__ if isinstance(error, PassError) and error.__cause__ else error
    what = f"{type(cause).__name__}: {str(cause).splitlines()[0] if str(cause) else ''}"
    warnings.warn(
        f"f8fx: a graph runs without float8, as if compiled without f8fx, after an internal failure ({what}). "
        'Compile with options={"strict": True} for the traceback, and please report it',
        stacklevel=2,
    )
    log.debug("f8fx: internal failure", exc_info=error)
    report = next(iter(GraphReport.merged(graph_pass.reports)), GraphReport(options.recipe.name))
    report.fallback = f"internal failure ({what})"
    publish(report)
    return compiled


def _without_passes(options: Options, plain: Callable[[], Any]) -> Callable[..., Any]:
    """A graph that Inductor compiles without asking any pass."""
    compiled = plain()
    report = GraphReport(options.recipe.name)
    report.fallback = 'use_joint_graph_passes=False, as under mode="lite": Inductor runs no passes'
    _warn_once(f"f8fx: graphs run without float8: {report.fallback}")
    publish(report)
    return compiled


def _publish(graph_pass: GraphPass, options: Options, config: Mapping[str, Any]) -> None:
    """Logs what was decided; on a cache hit, what was decided when the graph was built."""
    reports = GraphReport.merged(graph_pass.reports or graph_pass.met_again)
    if reports:
        store_report(graph_pass.key, reports)
    else:
        reports = load_report(graph_pass.key, options.recipe.name)
        for report in reports:
            graph_pass.confirm(report.traffic)
    infers = any(report.converted and not report.training for report in reports)
    if graph_pass.should_keep and infers and not any(report.reused_weights for report in reports):
        _warn_once(
            f'f8fx: weights="{options.weights}" keeps nothing for a graph: no matmul that it converts reads a parameter '
            "that is an input of the graph and may be kept, and what else it reads is quantized in every call"
            + (_MAY_PROMISE if options.weights == "cached" else "")
        )
    if any(report.converted for report in reports) and (depends := dependence(options, config)):
        _warn_once(depends)
    for report in reports:
        publish(report)
        if options.verbose:
            from .show import print_report

            print_report(report)


_MAY_PROMISE = (
    '. Weights that are DTensors, of tensor parallelism say, are kept with weights="constant", which takes your word that '
    "f8fx.refresh_weights is called after writes that leave no trace"
)


def _warn_version() -> None:
    if (message := check_version()) is not None:
        _warn_once(message)


def _warn_once(message: str) -> None:
    if message not in _WARNED:
        _WARNED.add(message)
        warnings.warn(message, stacklevel=4)


_WARNED: set[str] = set()

logging.getLogger("f8fx").addHandler(logging.NullHandler())
