"""What most tests need: joint graphs as text, and models compiled with float8 forced on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.distributed.tensor import DTensor

import f8fx
from f8fx import executor, ops
from f8fx.partition import Partitioner
from f8fx.passes.parameters import KnownInputs
from f8fx.report import GraphReport, recording

bf16 = torch.bfloat16

#: All operators of the IR.
IR = frozenset(op for op in vars(ops).values() if getattr(op, "namespace", None) == "f8fx")

#: tensorwise with e4m3 gradients: e5m2 has 2 bits of mantissa, not enough for 20 dB
E4M3 = f8fx.Recipe(
    "tensorwise, e4m3 gradients",
    output=f8fx.GemmSpec(use_fast_accum=True),
    grad_input=f8fx.GemmSpec(),
    grad_weight=f8fx.GemmSpec(),
)


class Block(nn.Module):
    """Norm, two layers that share their input, a gated product, a layer with or without bias, a residual."""

    def __init__(self, dim: int = 64, hidden: int = 96, bias: bool = True) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(dim)
        self.gate = nn.Linear(dim, hidden, bias=False)
        self.up = nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """[..., dim] -> [..., dim]."""
        h = self.norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def gradients(model: nn.Module, call: Callable[..., Tensor], x: Tensor, grad: Tensor) -> dict[str, Tensor]:
    """Output, input gradient and parameter gradients of ``call``, which runs ``model``."""
    x = x.detach().clone().requires_grad_()
    model.zero_grad()
    y = call(x)
    y.backward(grad)
    assert x.grad is not None
    found = {"output": y.detach(), "input": x.grad}
    return found | {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def compiled(model: Any, **options: Any) -> Any:
    """The model through f8fx: eager executor, every legal matmul, checks on but on ranks, failures raised."""
    defaults = {"executor": "eager", "select": "all", "debug": not dist.is_initialized(), "strict": True}
    dynamic = options.pop("dynamic", False)
    fullgraph = options.pop("fullgraph", True)
    torch._dynamo.reset()
    return torch.compile(
        model, backend=f8fx.f8fx, options={**defaults, **options}, dynamic=dynamic, fullgraph=fullgraph
    )


def shown(partitioner: Callable[..., Any], look: Callable[..., None]) -> Callable[..., Any]:
    """A partitioner that shows the forwards and backwards that it gives."""

    def partition(*args: Any, **kwargs: Any) -> Any:
        halves = partitioner(*args, **kwargs)
        look(*halves)
        return halves

    return partition


def joint_graphs(
    fn: Callable[..., Any],
    *args: Any,
    transform: Callable[[fx.Graph], Any],
    dynamic: bool = False,
    on_partition: Callable[[fx.GraphModule, fx.GraphModule], None] | None = None,
    save: Any = "lean",
    known: bool = False,
) -> None:
    """Traces `fn` as Inductor would and calls `transform` on its joint (or inference) graph.

    Args:
        known: mark which inputs are parameters, as the backend does.
    """

    def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        def marked(graph: fx.Graph) -> Any:
            if known:
                KnownInputs.of(inputs).mark(graph)
            return transform(graph)

        partitioner: Callable[..., Any] = Partitioner(save)
        if on_partition is not None:
            partitioner = shown(partitioner, on_partition)
        executor.compile_eager(gm, inputs, marked, partitioner)
        return gm.forward  # the rewritten graph is looked at, not run

    torch._dynamo.reset()
    torch.compile(fn, backend=backend, fullgraph=True, dynamic=dynamic)(*args)


def graph_after(
    fn: Callable[..., Any],
    *args: Any,
    dynamic: bool = False,
    rowwise_scales: str = "torchao",
    known: bool = False,
    **kwargs: Any,
) -> str:
    """Text of the graph of `fn` after the whole pipeline, without what nothing reads."""
    from f8fx.passes import describe

    texts: list[str] = []
    options = f8fx.Options.parse({"select": "all", **kwargs})
    pipeline = options.pipeline(debug=True, rowwise_scales=lambda device: rowwise_scales)

    def transform(graph: fx.Graph) -> None:
        pipeline(graph)
        graph.eliminate_dead_code()
        texts.append(describe(graph))

    joint_graphs(fn, *args, transform=transform, dynamic=dynamic, known=known)
    return texts[0]


def report_of(fn: Callable[..., Any], *args: Any, **options: Any) -> GraphReport:
    """The report of the one graph that `fn` compiles to; runs the backward as well."""
    with recording() as reports:
        result = compiled(fn, **options)(*args)
        if isinstance(result, Tensor) and result.requires_grad:
            result.sum().backward()
    assert len(reports) == 1, reports
    return reports[0]


def same_bits(got: Tensor, want: Tensor) -> None:
    """Equal bits, but for those of a NaN: its sign, on which processors do not agree (Inf * 0), and its payload."""
    assert got.shape == want.shape and got.dtype == want.dtype and got.stride() == want.stride()
    nan = want.float().isnan()
    assert torch.equal(got.float().isnan(), nan)
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[want.itemsize]
    assert torch.equal(got.view(words)[~nan], want.view(words)[~nan])


class Experts(nn.Module):
    """The SwiGLU experts of a mixture, as TorchTitan has them: rows come sorted by expert.

    Args:
        turned: weights as Transformers' gpt-oss has them, ``[experts, k, n]``.
    """

    def __init__(self, experts: int = 4, dim: int = 32, hidden: int = 48, turned: bool = False) -> None:
        super().__init__()
        self.turned = turned
        generator = torch.Generator().manual_seed(7)

        def weight(n: int, k: int) -> nn.Parameter:
            data = torch.randn(experts, n, k, generator=generator) / k**0.5
            return nn.Parameter(data.mT.contiguous() if turned else data)

        self.gate, self.up, self.down = weight(hidden, dim), weight(hidden, dim), weight(dim, hidden)

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        """[rows, dim], and how many rows each expert has -> [rows, dim]"""
        offsets = torch.cumsum(counts, 0, dtype=torch.int32)

        def layer(x: Tensor, weight: Tensor) -> Tensor:
            return torch._grouped_mm(x, self.matrices(weight), offs=offsets)

        return layer(F.silu(layer(x, self.gate)) * layer(x, self.up), self.down)

    def matrices(self, weight: Tensor) -> Tensor:
        """What rows are multiplied by: ``[experts, k, n]``"""
        weight = (weight.to_local() if isinstance(weight, DTensor) else weight).to(bf16)
        return weight if self.turned else weight.mT


class BatchedExperts(Experts):
    """The same, each of as many rows, in one batched matmul a layer, as Llama 4 has them."""

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        """[rows, dim], and how many rows each expert has -> [rows, dim]"""
        gate, up, down = map(self.matrices, (self.gate, self.up, self.down))
        x = x.view(len(gate), -1, x.shape[-1])
        return torch.bmm(F.silu(torch.bmm(x, gate)) * torch.bmm(x, up), down).flatten(0, 1)


def randn(*shape: int, dtype: torch.dtype = bf16, grad: bool = True, seed: int = 0) -> Tensor:
    """A normal tensor from its own seed."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype).requires_grad_(grad)


def sqnr(reference: Tensor, value: Tensor) -> float:
    """Signal to quantization noise ratio in decibels."""
    reference, value = reference.double(), value.double()
    noise = torch.linalg.vector_norm(reference - value)
    return float(20 * torch.log10(torch.linalg.vector_norm(reference) / noise))
