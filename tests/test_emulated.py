"""What Inductor generates for an H100 computes what the passes' graphs define: run on the CPU, no GPU needed.

The halves of a training graph are run node by node, by the definitions, and as generated code
(:mod:`tests.emulated`). With Inductor's ``emulate_precision_casts`` both round at the same places and the bits are equal,
but where functions of the device's library differ in the last one; as users run it, intermediate values
are rounded less often, and results are close.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from f8fx import canary, canary_cases
from f8fx.demo.model import DecoderBlock, DecoderConfig
from f8fx.kernel_forms import FORMS
from f8fx.kernels.grouped import grouped_mm
from f8fx.passes import amaxes
from f8fx.recipe import PRESETS
from tests.emulated import Case, every_rounding, multiplied
from tests.helpers import BatchedExperts, Block, Experts, bf16, sqnr
from tests.long import seldom, with_long
from tests.random_nets import random_case
from tests.test_unbacked import Chosen, ChosenExperts

pytest.importorskip("triton")
codegen = pytest.importorskip("benchmarks.codegen")

ODD = 37  # tokens


class GateUp(nn.Module):
    """One layer for gate and up, sizes that are padded."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(72)
        self.gate_up, self.down = nn.Linear(72, 2 * 88, bias=False), nn.Linear(88, 72, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(self.norm(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Gelu(nn.Module):
    """Layer norm and biases."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x)), approximate="tanh"))


class Fused(nn.Module):
    """A layer whose gradient is results of matmuls side by side, and its bias."""

    def __init__(self) -> None:
        super().__init__()
        self.whole, self.first, self.second = nn.Linear(64, 96), nn.Linear(48, 32), nn.Linear(48, 64)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.whole(x).chunk(2, -1)
        return torch.cat([self.first(a), self.second(b)], -1)


class OneGradient(nn.Module):
    """Two layers whose gradients are one expression, and whose biases' gradients are the same sums."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(64, 48) for _ in range(3))
        self.down = nn.Linear(48, 64)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.c(x))
        return self.down(self.a(x) * hidden + self.b(x) * hidden)


class Heads(nn.Module):
    """Norms over the heads of q and k."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(64, size, bias=False) for size in (64, 32, 32))
        self.q_norm, self.k_norm = nn.RMSNorm(16), nn.RMSNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, 16)) for layer in (self.q, self.k, self.v))
        q, k = self.q_norm(q), self.k_norm(k)
        return q * (k + v).repeat_interleave(2, -2)


class Parallel(nn.Module):
    """Projections for attention and MLP, each in one layer, that are merged: parts of three widths, two of them moved."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.gate_up = nn.Linear(64, 128), nn.Linear(64, 192, bias=False)
        self.o, self.down = nn.Linear(64, 64), nn.Linear(96, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).split([64, 32, 32], -1)
        q, k = (torch.cat([-t[..., 16:], t[..., :16]], -1) for t in (q, k))
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.o(q.sin() * torch.cat([k, torch.tanh(v)], -1)) + self.down(F.silu(gate) * up)


def decoder_block() -> nn.Module:
    """RoPE, heads that share keys and values, attention that is one operator of the library."""
    return DecoderBlock(DecoderConfig(dim=64, heads=4, kv_heads=2, ffn_dim=96))


#: A model, the shape of its input, options, and whether every rounding of eager execution is made.
MODELS = dict(
    with_long(
        (),
        ("odd sizes", (GateUp, (ODD, 72), {}, True)),
        ("layer norm and biases", (Gelu, (2, 24, 64), {}, True)),
    )
)
AS_USERS_RUN_IT = (Block, (48, 64), {}, False)
MORE = {
    "tensorwise": {
        "save=fast": (Block, (48, 64), {"save": "fast"}, True),
        "as users run it": AS_USERS_RUN_IT,
    },
    "rowwise": {
        "a block": (Block, (48, 64), {}, True),
        **dict(
            with_long(
                (),
                ("a decoder's block", (decoder_block, (2, 13, 64), {}, True)),
                ("parts in memory", (Fused, (2, 24, 64), {}, True)),
                ("one gradient of two layers", (OneGradient, (48, 64), {}, False)),
                ("merged layers of parts", (Parallel, (48, 64), {}, False)),
                ("as users run it", AS_USERS_RUN_IT),
                ("norms of heads", (Heads, (2, 24, 64), {}, True)),
                ("biases, as users run them", (Gelu, (2, 24, 64), {}, False)),
            )
        ),
    },
}


class Definitions(fx.Interpreter):
    """A half of a graph, node by node."""

    def call_function(self, target, args, kwargs):
        if target is torch.ops.aten._scaled_mm.default:
            return multiplied(*args, **kwargs)
        if target is torch.ops.aten._scaled_grouped_mm.default:
            *operands, _, _, dtype, _ = args
            return grouped_mm(*operands, dtype)
        return super().call_function(target, args, kwargs)


def as_it_lies(x: Tensor) -> Tensor:
    """A copy with the strides of x: ``clone`` makes what is not dense so."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype).copy_(x)


def halves(model, *inputs, precise, rows=None, **options):
    """Generated code of forward and backward with inputs, as a :class:`Case`, and what they should return.

    Under ``torch.no_grad`` of the one graph of inference.

    Args:
        inputs: of the model. The graphs are given random numbers instead, but where dtypes are not floating.
        rows: the number that sizes known only at run time have.
    """
    known = {x.dtype: x for x in inputs if not x.dtype.is_floating_point}
    inputs = [x.to(inputs[0].device) for x in inputs]
    graphs, _ = codegen.halves(model, *inputs, **options)
    for graph in graphs:
        for node in graph.graph.nodes:
            if "device" in node.kwargs:
                node.kwargs = {**node.kwargs, "device": torch.device("cpu")}  # what is defined is run there
        graph.recompile()
    generator = torch.Generator().manual_seed(0)
    expected = []

    def value(node):
        fake = node.meta["val"]
        for key in (node.name, getattr(fake, "dtype", None)):
            if key in known:
                return known[key]
        shape = [size if isinstance(size, int) else rows for size in fake.shape]
        drawn = torch.randn(shape, generator=generator) / 2
        return torch.empty_strided(shape, fake.stride(), dtype=fake.dtype).copy_(drawn)

    for graph in graphs:
        values = [value(node) for node in graph.graph.find_nodes(op="placeholder")]
        with torch.no_grad():
            copies = (as_it_lies(x) if isinstance(x, Tensor) else x for x in values)
            results = Definitions(graph).run(*copies)
        (output,) = graph.graph.find_nodes(op="output")
        known |= {n.name: x for n, x in zip(output.args[0], results, strict=True) if isinstance(n, fx.Node)}
        expected.append((values, results))
    with codegen.h100(), every_rounding() if precise else contextlib.nullcontext():
        codes = [
            codegen.generate(graph, is_backward=index > 0, is_inference=len(graphs) == 1).code
            for index, graph in enumerate(graphs)
        ]
    return [(Case(code, values), want) for code, (values, want) in zip(codes, expected, strict=True)]


def run(cases: list[Case], folder: Path) -> list[list[Tensor] | str]:
    """All cases in one process under Triton's interpreter; a text says what went wrong."""
    torch.save(cases, folder / "cases.pt")
    command = [sys.executable, "-W", "ignore", "-m", "tests.emulated", "cases.pt", "results.pt"]
    command[-2:] = [str(folder / name) for name in command[-2:]]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=Path(__file__).parents[1], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return torch.load(folder / "results.pt")


def differing(got: Tensor, want: Tensor) -> float:
    """Share of the elements that are not the same number: beside the largest one not a few of its last bits."""
    assert got.shape == want.shape and got.dtype == want.dtype and got.stride() == want.stride()
    if not got.dtype.is_floating_point:
        return (got != want).double().mean().item()
    a, b = got.double(), want.double()
    largest = b.abs().max().item()
    return 1 - torch.isclose(a, b, rtol=1e-6, atol=1e-6 * largest).double().mean().item()


@pytest.mark.parametrize(
    "recipe",
    [pytest.param(name, marks=() if name == "rowwise" else pytest.mark.long) for name in PRESETS],
)
def test_generated_code_computes_the_definitions(recipe, tmp_path, monkeypatch):
    monkeypatch.setattr(
        amaxes, "CACHED", 0
    )  # a gradient's amax is taken where a bias is summed, also of a small one
    torch.manual_seed(0)
    cases, named = [], []
    for name, (build, shape, options, precise) in (MODELS | MORE.get(recipe, {})).items():
        x = torch.randn(shape, dtype=bf16, requires_grad=True)
        for case, want in halves(build().to(bf16), x, precise=precise, recipe=recipe, **options):
            cases.append(case)
            named.append((name, precise, want))
    for results, (name, precise, want) in zip(run(cases, tmp_path), named, strict=True):
        assert isinstance(results, list), (name, results)
        for index, (a, b) in enumerate(zip(results, want, strict=True)):
            if b is None:
                assert a is None
            elif precise:
                assert differing(a, b) <= 0.002, (name, index, tuple(b.shape), differing(a, b))
            elif b.dim() in (1, 2) and b.dtype == bf16:
                assert torch.equal(a, b) or sqnr(b, a) > 25, (name, index, tuple(b.shape), sqnr(b, a))


@pytest.mark.long
@pytest.mark.parametrize("rows", [[1, 2, 3, 7], [16, 0, 20, 12]], ids=sum)
@pytest.mark.parametrize(
    ("recipe", "experts"),
    [("tensorwise", "convert"), ("rowwise", "convert"), ("rowwise", "with_grad_weight")],
)
def test_rows_whose_number_is_known_only_at_run_time(recipe, experts, rows, tmp_path):
    torch.manual_seed(0)
    mask, counts = torch.arange(64) < sum(rows), torch.tensor(rows)
    x = torch.randn(64, 32, dtype=bf16, device="meta", requires_grad=True)
    model = ChosenExperts().to(bf16) if recipe == "rowwise" else Chosen()
    inputs = (x, mask, counts) if recipe == "rowwise" else (x, mask)
    with (
        torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True),
        torch.fx.experimental._config.patch(meta_nonzero_assume_all_nonzero=True),
    ):
        found = halves(
            model.to("meta"), *inputs, precise=True, rows=sum(rows), recipe=recipe, experts=experts
        )
    gemm = "_scaled_grouped_mm" if recipe == "rowwise" else "_scaled_mm"
    assert all(f"extern_kernels.{gemm}(" in case.code for case, _ in found)
    for results, (_, want) in zip(run([case for case, _ in found], tmp_path), found, strict=True):
        assert isinstance(results, list), results
        for index, (a, b) in enumerate(zip(results, want, strict=True)):
            if isinstance(b, Tensor):
                assert differing(a, b) <= 0.002, (index, tuple(b.shape), differing(a, b))
            else:
                assert a == b


def assert_computed(found: list[tuple[Case, list[Tensor]]], folder: Path) -> None:
    """The code of both halves gives what they should return, but for last bits of what the device's library computes."""
    for results, (_, want) in zip(run([case for case, _ in found], folder), found, strict=True):
        assert isinstance(results, list), results
        for index, (a, b) in enumerate(zip(results, want, strict=True)):
            if b is None:  # the gradient of an input that has none
                assert a is None
                continue
            ratio = sqnr(b, a)
            assert differing(a, b) <= 0.002 or ratio > 45, (index, tuple(b.shape), differing(a, b), ratio)


@pytest.mark.parametrize("turned", [False, *seldom(True)], ids=["nk", "kn"])
def test_experts_in_batches(turned, tmp_path):
    """Grouped float8 gemms of as many rows each; the gradients of weights are batched ones."""
    torch.manual_seed(0)
    experts = BatchedExperts(turned=turned).to(bf16).to("meta")
    x = torch.randn(4 * 12, 32, dtype=bf16, device="meta", requires_grad=True)
    found = halves(lambda x: experts(x, None), x, precise=True, recipe="rowwise", experts="convert")
    codes = [case.code for case, _ in found]
    assert [code.count("extern_kernels._scaled_grouped_mm(") for code in codes] == [3, 3]
    assert [code.count("extern_kernels.bmm(") for code in codes] == [0, 3]
    assert_computed(found, tmp_path)


@pytest.mark.parametrize(
    ("counts", "strided"),
    [
        ([16, 0, 20, 9], True),
        pytest.param([1, 33, 0, 14], False, marks=pytest.mark.long),
        pytest.param([0, 0, 48, 0], False, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_gradients_of_experts_weights(counts, strided, tmp_path):
    """Summed over the rows of each, which are padded: memory that is not written to is NaN here. The last rows are of no expert.

    Where rows end may be every other number of a tensor, which torch 2.15 refuses itself, and rows may lie apart.
    """
    torch.manual_seed(0)
    experts = Experts().to(bf16).to("meta")
    x = torch.randn(48, 48 if strided else 32, dtype=bf16, device="meta", requires_grad=True)
    options = {"recipe": "rowwise", "experts": "with_grad_weight"}
    ends = torch.tensor(counts).cumsum(0, dtype=torch.int32)
    every = 2 if strided and tuple(map(int, torch.__version__.split(".")[:2])) < (2, 15) else 1

    def model(x, ends):
        x, ends = x[:, -32:], ends[::every]
        hidden = [torch._grouped_mm(x, w.mT, ends) for w in (experts.gate, experts.up)]
        return torch._grouped_mm(F.silu(hidden[0]) * hidden[1], experts.down.mT, ends)

    found = halves(model, x, ends.repeat_interleave(every), precise=True, **options)
    codes = [case.code for case, _ in found]
    assert [code.count("extern_kernels._scaled_grouped_mm(") for code in codes] == [3, 6]
    assert not any("_grouped_mm(" in code.replace("_scaled_grouped_mm(", "") for code in codes)
    assert_computed(found, tmp_path)


class Norms(nn.Module):
    """Gradients of a norm's rows, and of its weights, which are sums of columns."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(dim), nn.Linear(dim, hidden), nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x)), approximate="tanh"))


@pytest.mark.long
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_rows_and_columns_that_one_kernel_of_inductor_reduces(recipe, tmp_path):
    """Of tall tensors; here of all, or the interpreter would take minutes. The last program has fewer rows than the others."""
    torch.manual_seed(0)
    x = torch.randn(150, 64, dtype=bf16, requires_grad=True)
    at_any_size = {"triton.mix_order_reduction_non_strict_mode": True}
    with torch._inductor.config.patch(at_any_size):
        found = halves(Norms(64, 96).to(bf16), x, precise=True, recipe=recipe)
    _, (backward, _) = found
    assert "RSPLIT_SIZE" in backward.code
    assert_computed(found, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize(
    ("recipe", "dim", "hidden"), [("tensorwise", 2112, 32), ("rowwise", 2112, 32), ("rowwise", 32, 2112)]
)
def test_rows_that_no_block_holds(recipe, dim, hidden, tmp_path):
    """They are reduced in a loop whose last turn is cut off. (Of 2112 elements Inductor pads no row.)"""
    torch.manual_seed(0)
    x = torch.randn(3, dim, dtype=bf16, requires_grad=True)
    found = halves(Norms(dim, hidden).to(bf16), x, precise=True, recipe=recipe)
    assert any("for r0_offset in " in case.code for case, _ in found)
    assert_computed(found, tmp_path)


class Largest(nn.Module):
    """A result and an operand by their largest elements, which a kernel of their own finds."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.up(x)
        g = F.gelu(h)
        y = self.down(g) + (g / g.abs().amax(0))[:, :64] + (h / h.abs().amax(0))[:, 64:]
        return y, h >= h.amax(0)


@pytest.mark.long
def test_the_largest_element_is_equal_to_the_largest(tmp_path):
    """As users run it: without rounding there is none, and its gradient is 0 / 0."""
    torch.manual_seed(0)
    x = torch.randn(512, 64, dtype=bf16, requires_grad=True)
    found = halves(Largest().to(bf16), x, precise=False, recipe="tensorwise")
    forward, backward = run([case for case, _ in found], tmp_path)
    assert isinstance(forward, list) and isinstance(backward, list), (forward, backward)
    masks = [result for result in forward if result.dtype == torch.bool and result.shape == (512, 128)]
    assert masks and all(mask.any(0).all() for mask in masks)
    assert all(grad.isfinite().all() for grad in backward if grad is not None)


class Stacked(nn.Module):
    """Layers whose float8 weights lie in one tensor and the scales of their rows in another, not all where a gemm can read."""

    def __init__(self) -> None:
        super().__init__()
        self.data = nn.Parameter(torch.zeros(3, 64, 64).to(torch.float8_e4m3fn), requires_grad=False)
        self.scales = nn.Parameter(torch.ones(3 * 66, 1), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        for data, scale in zip(self.data, self.scales.chunk(3), strict=True):  # the scales from 0, 66 and 132
            x = F.linear(x, (data.float() * scale[:64]).to(x.dtype))
        return x


@pytest.mark.long
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_scales_that_lie_inside_of_others(recipe, tmp_path):
    with torch.no_grad():
        found = halves(Stacked(), torch.randn(48, 64, dtype=bf16), precise=True, recipe=recipe)
    assert found[0][0].code.count("extern_kernels._scaled_mm(") == 3
    assert_computed(found, tmp_path)


@pytest.mark.long
def test_a_power_of_a_number_is_as_large_as_the_exponent(tmp_path):
    """The number is a block of one element; what the library gives is multiplied by a result for each row."""
    x = torch.randn(64, 48)
    graph = make_fx(lambda x: 1.5**x * x.amax(-1, keepdim=True), tracing_mode="fake")(x)
    with codegen.h100():
        code = codegen.generate(graph, is_backward=False).code
    assert "libdevice.pow" in code
    for results in run([Case(code, (x,), candidate) for candidate in range(3)], tmp_path):
        assert isinstance(results, list), results
        assert differing(results[0], graph(x)) == 0


@pytest.mark.long
def test_another_tuning_candidate_gives_the_same(tmp_path):
    """Of sizes that no block divides; grids and masks follow from the candidate."""
    torch.manual_seed(0)
    x = torch.randn(ODD, 72, dtype=bf16, requires_grad=True)
    found = halves(GateUp().to(bf16), x, precise=True, recipe="rowwise")
    cases = [dataclasses.replace(case, candidate=1) for case, _ in found]
    for results, (_, want) in zip(run(cases, tmp_path), found, strict=True):
        assert isinstance(results, list), results
        assert all(differing(a, b) <= 0.002 for a, b in zip(results, want, strict=True))


@pytest.mark.long
def test_faults_are_seen(tmp_path):
    """The tests above can fail."""
    torch.manual_seed(0)
    x = torch.randn(48, 64, dtype=bf16, requires_grad=True)
    (case, want), _ = halves(Block().to(bf16), x, precise=True, recipe="rowwise")
    launch = r"(row_cast_columns_kernel_\d+\.run\(.*), (\d+), 1, 1, stream"
    faults = [
        (r"xmask = xindex < xnumel", "xmask = xindex < xnumel + 64", "writes beyond a tensor"),
        (launch, r"\1, \2, stream", "missing 2 required positional arguments"),
        (r"(scaled_mm\(.*?\), \(1, )(\d+)\)", r"\g<1>1)", "not row-major"),
    ]
    stores = (r"tl\.store\(out_ptr0", "(lambda *_: 0)(out_ptr0")
    codes = [re.sub(what, instead, case.code) for what, instead, *_ in (*faults, stores)]
    *results, unwritten = run([dataclasses.replace(case, code=code) for code in codes], tmp_path)
    for result, (_, _, seen) in zip(results, faults, strict=True):
        assert seen in result
    assert isinstance(unwritten, list) and differing(unwritten[0], want[0]) == 1  # NaN


@pytest.mark.long
@pytest.mark.parametrize("choice", [0, 1])
def test_canaries_raise_no_false_alarm(choice, tmp_path):
    """The functions that are compiled on a GPU's first use, with their infinities and NaN.

    Args:
        choice: of the forms of each kind of kernel, the preferred one first; the definition is no generated code.
    """
    host, gpu = torch.device("cpu"), torch.device("cuda", 0)
    forms = {kind: forms[choice] for kind, forms in FORMS.items() if forms[choice] != "definition"}
    used = {"cast": "fused", "transpose": "fused", **forms}
    cases, wanted = [], []
    for function in canary_cases.cases(host, torch.float8_e4m3fn, torch.float8_e5m2):
        if function.kind not in forms:
            continue
        x, y = canary_cases.data(function.shape, host, function.dtype)
        graph = make_fx(function.run, tracing_mode="fake")(x, y)
        with codegen.h100(), canary._trying(gpu, used), torch._inductor.config.patch(canary._patches(used)):
            code = codegen.generate(graph, False).code
        own = {
            "row cast and column amax": "row_cast_columns_kernel",
            "amaxes of a computed tensor": "computed_amaxes_kernel",
        }
        written = {name for name in own.values() if name in code}
        assert written == ({own[function.name]} if choice == 0 and function.name in own else set())
        for inputs in ((x, y), (canary_cases.special(x), y)):
            cases.append(Case(code, inputs))
            wanted.append((function, function.run(*inputs)))
    assert {function.kind for function, _ in wanted} == set(forms)
    for results, (function, want) in zip(run(cases, tmp_path), wanted, strict=True):
        assert isinstance(results, list), (function.name, results)
        assert all(canary._same(a, b) for a, b in zip(want, results, strict=True)), function.name


@pytest.mark.long
@pytest.mark.parametrize("seed", range(0, 30, 6))
def test_random_networks_compute_the_definitions(seed, tmp_path, monkeypatch):
    monkeypatch.setattr(amaxes, "CACHED", 0)
    cases, named = [], []
    for each in range(seed, seed + 6):
        torch._dynamo.reset()
        net, x, options = random_case(each)
        for case, want in halves(net, x, precise=True, **options):
            cases.append(case)
            named.append((each, options, want))
    for results, (each, options, want) in zip(run(cases, tmp_path), named, strict=True):
        assert isinstance(results, list), (each, options, results)
        for index, (a, b) in enumerate(zip(results, want, strict=True)):
            if b is not None and b.dtype.is_floating_point and b.dtype.itemsize > 1 and b.any():
                ratio = sqnr(b.double(), a.double())
                assert torch.equal(a, b) or ratio > 30, (each, options, index, tuple(b.shape), ratio)
