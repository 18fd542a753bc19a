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
from functools import partial
from types import MappingProxyType
from typing import Any

from torch import fx

from . import ahead, canary, executor, halves, inference_inputs, kernel_forms, lowerings
from .cache import CacheKey, devices_of, has_report, load_report, load_weights, store_report, store_weights
from .graph_pass import GraphPass, PassError
from .options import Options, as_passes
from .partition import Partitioner
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
    inductor_cache_hits,
    inductor_config,
    joint_custom_pre_pass,
    keep_out_of_packages,
    repeatable_backwards,
    runs_joint_passes,
)
from .tuning import tuning
from .weights import inputs as weight_inputs

CompileFx = Callable[..., Any]


Run = Callable[[fx.GraphModule, Sequence[Any], GraphPass | None], Callable[..., Any]]


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
    compile_fx = partial(compile_fx, **arguments)
    graph_pass = _graph_pass(gm, example_inputs, options, config)
    peers.compare(example_inputs, options)
    weights = halves.positions(example_inputs)
    own_split = _partitions(options, config) and not _copies_inputs(config)
    reads = ANYTHING if weights and not own_split else NOTHING
    # compilers take over the graph they are given: keep one for another attempt
    spare = copy_of_graph(gm) if weights or not options.strict else None

    def attempt(graph: fx.GraphModule, keep_to_halves: bool) -> Callable[..., Any]:
        run = _runner(options, config, compile_fx, keep_to_halves)
        # a backward that fails must fail here, where there is something to fall back to, and one that is compiled
        # when it first runs would take what that call retains for what all calls do
        with repeatable_backwards(), eager_backward_lowering():
            if options.weights == "dynamic":
                return run(graph, example_inputs, graph_pass)
            return _run_with_weights(graph, example_inputs, options, config, graph_pass, run)

    def finished(compiled: Callable[..., Any], reads: Reads) -> Callable[..., Any]:
        return halves.saying(checked(compiled, graph_pass.confirmed, example_inputs), weights, reads)

    def unchanged(compiled: Callable[..., Any]) -> Callable[..., Any]:
        if options.weights != "dynamic" and weight_inputs.may_train(example_inputs):
            compiled = weight_inputs.noting_training(compiled)
        return finished(compiled, ANYTHING)

    if options.executor == "inductor" and not runs_joint_passes(config):
        run = _runner(options, config, compile_fx)
        return unchanged(_without_passes(options, lambda: run(gm, example_inputs, None)))
    try:
        try:
            compiled = attempt(gm, keep_to_halves=bool(weights) and own_split)
        except Exception as error:
            other = ReadsOther.within(error)
            if other is None or spare is None:
                raise
            reads = other.reads
            graph_pass.begin_again(reads)
            compiled = attempt(copy_of_graph(spare), keep_to_halves=False)
    except Exception as error:
        sends_float8 = any(g.moved for report in graph_pass.reports for g in report.gathers)
        # the other ranks go on: this one must not send something else
        is_ours = not begins_anew(error) and _is_ours(error, graph_pass)
        if options.strict or spare is None or sends_float8 or not is_ours:
            raise
        run = _runner(options, config, compile_fx)
        return unchanged(_fall_back(error, graph_pass, options, lambda: run(spare, example_inputs, None)))
    _publish(graph_pass, options)
    return finished(inference_inputs.savable(compiled, example_inputs), reads)


def _entry() -> CompileFx:
    """Inductor's entry, without what is installed over it (:mod:`f8fx.installation`): its options are not this graph's."""
    entry = compile_fx_module().compile_fx
    while (installation := getattr(entry, "installation", None)) is not None:
        entry = installation.replaced
    return entry


def _run_with_weights(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    options: Options,
    config: Mapping[str, Any],
    graph_pass: GraphPass,
    run: Run,
) -> Callable[..., Any]:
    """Compiles a graph so that it takes the float8 copies of its weights as inputs, where it can."""
    frozen = config.get("freezing", inductor_config().freezing)  # weights are constants of the compiled code
    if frozen or not weight_inputs.candidates(example_inputs, options.experts).weights:
        return run(gm, example_inputs, graph_pass)
    plain, training = (graph_pass.pipeline, graph_pass.key), False
    try:
        casts_of = partial(_casts, gm, example_inputs, options, graph_pass)
        inputs, training = weight_inputs.learned(example_inputs, casts_of, options.weights, options.experts)
        if inputs.copies:
            last = not training or inputs.last
            graph_pass.pipeline = _pipeline(options, inputs)
            graph_pass.key = graph_pass.key.extended(inputs)
            longer, examples = weight_inputs.extended(gm, example_inputs, inputs, is_static=last)
            return weight_inputs.wrapped(run(longer, examples, graph_pass), inputs, training, last)
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
        training = weight_inputs.may_train(example_inputs)
    compiled = run(gm, example_inputs, graph_pass)
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


def _partitions(options: Options, config: Mapping[str, Any]) -> bool:
    """Whether f8fx's partitioner splits the graphs: not where the user has one."""
    own = config.get("custom_partitioner_fn", inductor_config().custom_partitioner_fn) is None
    return own or options.executor == "eager"


def _copies_inputs(config: Mapping[str, Any]) -> bool:
    """Whether graphs are replayed as CUDA graphs, into whose memory inputs are copied."""
    return bool(config.get("triton.cudagraphs", inductor_config().triton.cudagraphs))


def _runner(
    options: Options, config: Mapping[str, Any], compile_fx: CompileFx, keep_to_halves: bool = False
) -> Run:
    """What compiles a graph: with the pass, or, given none, as if f8fx were not there.

    Args:
        keep_to_halves: see :class:`~f8fx.partition.Partitioner`.
    """

    def run_eagerly(
        graph: fx.GraphModule, example_inputs: Sequence[Any], graph_pass: GraphPass | None
    ) -> Callable[..., Any]:
        return executor.compile_eager(graph, example_inputs, graph_pass, None, options.save, keep_to_halves)

    def run_inductor(
        graph: fx.GraphModule, example_inputs: Sequence[Any], graph_pass: GraphPass | None
    ) -> Callable[..., Any]:
        if graph_pass is None:
            return compile_fx(graph, example_inputs, config_patches=dict(config))
        ours: dict[str, Any] = {"joint_custom_pre_pass": graph_pass}
        # as they are: lowering changes them, and Inductor sets them back after the compile
        ours.update({key: getattr(inductor_config(), key) for key in graph_pass.tuning})
        if _partitions(options, config):
            ours["custom_partitioner_fn"] = Partitioner(options.save, keep_to_halves)
        spare = None if has_report(graph_pass.key) else copy_of_graph(graph)
        hits = inductor_cache_hits()
        compiled = compile_fx(graph, example_inputs, config_patches={**config, **ours})
        if spare is not None and inductor_cache_hits() > hits:
            _decide_again(spare, example_inputs, graph_pass)
        return compiled

    if options.executor == "eager":
        return run_eagerly
    lowerings.register()
    return run_inductor


def _decide_again(graph: fx.GraphModule, example_inputs: Sequence[Any], graph_pass: GraphPass) -> None:
    """What was decided for a graph from a cache that does not say: to be reported, and compared with other ranks."""
    if graph_pass.reports or graph_pass.met_again:
        return  # only a half of it was there
    executor.trace(graph, example_inputs, graph_pass)
    forget_traced_regions()
    for report in graph_pass.reports:
        report.cached = True


def _graph_pass(
    gm: fx.GraphModule, example_inputs: Sequence[Any], options: Options, config: Mapping[str, Any]
) -> GraphPass:
    previous = as_passes(config.get("joint_custom_pre_pass", joint_custom_pre_pass()))
    key = CacheKey.of(gm, example_inputs, options).after(previous)
    if replaced := kernel_forms.key(devices_of(example_inputs)):
        key = key.extended(replaced)
    once = ahead.casts_once(config) if compiles_ahead_of_time() else False
    return GraphPass(
        _pipeline(options, constants=once), key, previous, tuning(config), KnownInputs.of(example_inputs)
    )


def _pipeline(options: Options, weights: WeightInputs | None = None, constants: bool = False) -> Pipeline:
    watch = None
    if options.debug:

        def watch(name: str, text: str) -> None:
            log.debug("after %s:\n%s", name, text)

    return options.pipeline(watch=watch, weights=weights, constants=constants, runs=True)


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


def _publish(graph_pass: GraphPass, options: Options) -> None:
    """Logs what was decided; on a cache hit, what was decided when the graph was built."""
    reports = GraphReport.merged(graph_pass.reports or graph_pass.met_again)
    if reports:
        store_report(graph_pass.key, reports)
    else:
        reports = load_report(graph_pass.key, options.recipe.name)
        for report in reports:
            graph_pass.confirm(report.traffic)
    for report in reports:
        publish(report)
        if options.verbose:
            from .show import print_report

            print_report(report)


def _warn_version() -> None:
    if (message := check_version()) is not None:
        _warn_once(message)


def _warn_once(message: str) -> None:
    if message not in _WARNED:
        _WARNED.add(message)
        warnings.warn(message, stacklevel=4)


_WARNED: set[str] = set()

logging.getLogger("f8fx").addHandler(logging.NullHandler())
