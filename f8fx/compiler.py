"""What compiles a graph: Inductor, or ``executor="eager"``, with our pass or as if f8fx were not there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from . import executor, lowerings
from .cache import has_report
from .graph_pass import GraphPass
from .options import Options
from .partition import Partitioner
from .torch_private import (
    copy_of_graph,
    forget_traced_regions,
    inductor_cache_hits,
    inductor_config,
    runs_joint_passes,
)
from .tuning import patches_for

CompileFx = Callable[..., Any]


@dataclass(frozen=True)
class Compiler:
    """Compiles graphs under one set of options.

    Attributes:
        config: Inductor options.
        compile_fx: Inductor's entry.
        keep_to_halves: see :class:`~f8fx.partition.Partitioner`.
    """

    options: Options
    config: Mapping[str, Any]
    compile_fx: CompileFx
    keep_to_halves: bool = False

    @property
    def runs_passes(self) -> bool:
        """Whether anything asks our pass."""
        return self.options.executor == "eager" or runs_joint_passes(self.config)

    @property
    def partitions(self) -> bool:
        """Whether f8fx's partitioner splits the graphs: not where the user has one."""
        own = self.config.get("custom_partitioner_fn", inductor_config().custom_partitioner_fn) is None
        return own or self.options.executor == "eager"

    @property
    def copies_inputs(self) -> bool:
        """Whether graphs are replayed as CUDA graphs, into whose memory inputs are copied."""
        return bool(self.config.get("triton.cudagraphs", inductor_config().triton.cudagraphs))

    @property
    def freezes(self) -> bool:
        """Whether weights are constants of the compiled code."""
        return bool(self.config.get("freezing", inductor_config().freezing))

    def __call__(
        self, graph: fx.GraphModule, example_inputs: Sequence[Any], graph_pass: GraphPass | None = None
    ) -> Callable[..., Any]:
        """Compiles a graph with the pass, or, given none, as if f8fx were not there."""
        partitioner = Partitioner(self.options.save, self.keep_to_halves)
        if self.options.executor == "eager":
            return executor.compile_eager(graph, example_inputs, graph_pass, partitioner)
        lowerings.register()
        if graph_pass is None:
            return self.compile_fx(graph, example_inputs, config_patches=dict(self.config))
        ours = patches_for(graph_pass)
        if self.partitions:
            ours["custom_partitioner_fn"] = partitioner
        spare = None if has_report(graph_pass.key) else copy_of_graph(graph)
        hits = inductor_cache_hits()
        compiled = self.compile_fx(graph, example_inputs, config_patches={**self.config, **ours})
        if spare is not None and inductor_cache_hits() > hits:
            _decide_again(spare, example_inputs, graph_pass)
        return compiled


def _decide_again(graph: fx.GraphModule, example_inputs: Sequence[Any], graph_pass: GraphPass) -> None:
    """What was decided for a graph from a cache that does not say: to be reported, and compared with other ranks."""
    if graph_pass.reports or graph_pass.met_again:
        return  # only a half of it was there
    executor.trace(graph, example_inputs, graph_pass)
    forget_traced_regions()
    for report in graph_pass.reports:
        report.cached = True
