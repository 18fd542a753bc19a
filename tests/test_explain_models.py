"""``explain``: models and functions of all kinds, which it leaves as they were."""

from __future__ import annotations

import io
import resource
import threading
import types
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._higher_order_ops.while_loop import while_loop
from torch.utils.checkpoint import checkpoint

import f8fx
from f8fx.demo.model import Decoder, DecoderBlock, DecoderConfig
from f8fx.explanation import ExplainError
from f8fx.torch_private.versions import release
from tests.explained import Mlp, meta_input, meta_mlp, tiny_decoder
from tests.helpers import bf16, compiled, randn
from tests.long import seldom


def test_a_block_of_8b_widths_needs_no_memory():
    with torch.device("meta"):
        block = DecoderBlock(DecoderConfig.named("llama3_8b")).bfloat16()
        x = torch.empty(1, 8192, 4096, dtype=torch.bfloat16)
    f8fx.explain(meta_mlp(), meta_input(16, 2048))  # imports what it needs
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    e = f8fx.explain(block, x, target="h100")
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 200_000  # kB; its weights alone would be 436 MB
    assert e.total == 21 and e.converted == 21
    # `benchmarks.traffic` counts 1146.2 MB of a block whose RoPE tables are inputs (4.2 MB) and whose attention gives what
    # `o_proj` reads: here that is a copy, [S, H, D] of [H, S, D], and both are kept
    assert e.saved_bytes_high == pytest.approx(1146.2e6 - 4.2e6 + 2 * 8192 * 4096, rel=1e-4)


def test_functions_and_what_they_close_over():
    model = meta_mlp()
    e = f8fx.explain(lambda x, scale: model(x) * scale, meta_input(16384, 2048), 2.0)
    assert [row.fqn for row in e.rows[:2]] == ["up", "down"] and e.converted == 5
    assert all(p.device.type == "meta" for p in model.parameters())


def test_functions_that_call_themselves_and_variables_without_a_value():
    def built(again: bool):
        layer = meta_mlp()
        if again:
            other = meta_mlp()

        def model(x: Tensor, depth: int = 1) -> Tensor:
            x = other(x) if again and not depth else layer(x)
            return model(x, depth - 1) if depth else x

        return model

    for again in (False, True):
        e = f8fx.explain(built(again), meta_input(16384, 2048))
        assert e.converted == e.total == 2 * 5 + 1


def test_a_compiled_model_is_explained_from_its_source():
    model = meta_mlp()
    compiled = torch.compile(model, backend="f8fx")
    assert (
        f8fx.explain(compiled, meta_input(16384, 2048)).to_dict()["rows"]
        == (f8fx.explain(model, meta_input(16384, 2048)).to_dict()["rows"])
    )


def test_keyword_inputs():
    e = f8fx.explain(meta_mlp(), kwargs={"x": meta_input(16384, 2048)})
    assert e.total == 5


@pytest.mark.parametrize("dynamic", [False, pytest.param(True, marks=pytest.mark.long)])
@pytest.mark.parametrize("mode", ["inference", "training", *seldom("frozen")])
@pytest.mark.parametrize("weights", ["cached", "reused"])
def test_weights_that_are_quantized_elsewhere(weights: str, mode: str, dynamic: bool):
    """Their casts cost nothing, as for the backend: a layer pays that would not with them."""
    kept = mode == "inference" or (mode == "frozen" and weights == "cached")

    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wide = nn.Linear(4096, 4096, bias=False).requires_grad_(mode == "training")
            self.narrow = nn.Linear(4096, 16, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(lambda x: self.wide(x) + self.narrow(x).sum(), x, use_reentrant=False)

    model = Layers().bfloat16()
    x = torch.ones(64, 4096, dtype=bf16, requires_grad=mode == "frozen")
    options = {"recipe": "rowwise", "weights": weights, "select": "auto", "target": "h100"}
    with torch.set_grad_enabled(mode != "inference"):
        explained = f8fx.explain(model, x, dynamic=dynamic, **options)
        torch._dynamo.reset()
        with f8fx.recording() as reports:
            compiled(model, dynamic=dynamic, **options)(x)
    decided = [(d.fqn, d.role, d.converted, d.detail) for report in reports for d in report.decisions]
    assert [(row.fqn, row.role, row.converted, row.detail) for row in explained.rows] == decided
    assert [graph.reused_weights for graph in explained.graphs] == [r.reused_weights for r in reports]
    assert any(row.converted for row in explained.rows if row.fqn == "wide") == kept
    assert explained.saved_bytes_float8 == explained.saved_bytes_high  # copies are there anyway


def test_tied_weights_stay_tied():
    config = DecoderConfig.named("tiny").replace(tied=True)
    model = Decoder(config).bfloat16()
    e = f8fx.explain(model, torch.zeros(2, 16, dtype=torch.long), select="all")
    assert {row.role for row in e.rows if row.fqn == "output"} == {"output", "grad_input", "grad_weight"}


class Broken(nn.Module):
    """A graph break between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.second(x)


def test_graph_breaks_make_graphs():
    e = f8fx.explain(Broken().bfloat16(), torch.ones(32, 64, dtype=torch.bfloat16), select="all")
    assert len(e.graphs) == 2
    assert {(row.graph, row.fqn) for row in e.rows} == {(0, "first"), (1, "second")}
    assert e.training


def test_the_model_is_left_as_it_was():
    model, tokens = tiny_decoder()
    model.train()
    before = {name: (id(p), p._version, p.clone()) for name, p in model.named_parameters()}
    f8fx.explain(model, tokens)
    for name, p in model.named_parameters():
        identity, version, value = before[name]
        assert id(p) == identity and p._version == version and torch.equal(p, value) and p.grad is None
    model(tokens).sum().backward()  # still runs


def test_batch_norm_statistics_stay():
    model = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16))
    f8fx.explain(model, torch.randn(8, 16))
    f8fx.explain(lambda x: model(x), torch.randn(8, 16))
    assert model[1].running_mean.eq(0).all() and model[1].num_batches_tracked == 0


@pytest.mark.parametrize("model", [Broken(), Mlp(64, 64)], ids=["broken", "whole"])
def test_compiled_code_of_the_user_survives(model: nn.Module):
    compiles: list[int] = []

    def counting(gm, inputs):
        compiles.append(len(inputs))
        return gm.forward

    torch.compiler.reset()
    compiled = torch.compile(model, backend=counting)
    compiled(torch.ones(32, 64))
    first = len(compiles)
    f8fx.explain(model, torch.ones(48, 64))
    compiled(torch.ones(32, 64))
    assert len(compiles) == first  # found in the cache, not compiled again
    sizes: list[object] = []

    def looking(gm, inputs):
        sizes.extend(i.shape[0] for i in inputs if isinstance(i, Tensor) and not isinstance(i, nn.Parameter))
        return gm.forward

    torch.compiler.reset()
    f8fx.explain(model, torch.ones(32, 64))
    torch.compile(model, backend=looking)(torch.ones(48, 64))
    assert all(isinstance(size, int) for size in sizes)  # the size seen by `explain` was not remembered


class Cache:
    def __init__(self) -> None:
        self.keys = torch.zeros(1, 64, dtype=torch.bfloat16)

    def update(self, keys: Tensor) -> Tensor:
        self.keys = torch.cat([self.keys, keys])
        return self.keys


class Counting(nn.Module):
    """Writes a buffer, and holds a tensor in an object that is no module."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.register_buffer("seen", torch.zeros((), dtype=torch.bfloat16))
        self.table = types.SimpleNamespace(rows=torch.ones(64, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.seen + 1
        return self.linear(x) + self.table.rows


class Remembering(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.bn, self.last = nn.Linear(64, 64), nn.BatchNorm1d(64), None

    def forward(self, x: Tensor) -> Tensor:
        self.last = x
        return self.bn(self.a(x))

    @torch.compile
    def step(self, x: Tensor) -> Tensor:
        return self.a(x)


def test_functions_that_a_module_holds_are_copied_with_it():
    """Its own forward, compiled in place; a hook that closes over the model."""

    def hooked(model: Remembering) -> Remembering:
        model.a.register_forward_hook(lambda module, args, result: setattr(model, "last", result))
        return model

    def replaced(model: Remembering) -> Remembering:
        model.forward = torch.compile(model.forward, backend="f8fx")  # type: ignore[method-assign]
        return model

    x = torch.randn(32, 64, dtype=torch.bfloat16)
    for change in (hooked, replaced):
        model = change(Remembering().bfloat16())
        e = f8fx.explain(model, x, select="all")
        assert {row.fqn for row in e.rows} == {"a"} and e.converted == e.total > 0
        assert model.last is None and model.bn.num_batches_tracked == 0
        with torch.device("meta"):
            on_meta = change(Remembering().bfloat16())
        assert f8fx.explain(on_meta, x.to("meta"), select="all").converted == e.converted


class Calls:
    """An object that holds a function."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        self.function = function

    def __call__(self, x: Tensor) -> Tensor:
        return self.function(x)


@pytest.mark.parametrize("within", ["partial", "object", "list", "default", "keyword"])
def test_functions_are_copied_with_what_they_close_over_wherever_they_are(within: str):
    model, x = Remembering().bfloat16(), torch.randn(32, 64, dtype=torch.bfloat16)

    def one(x: Tensor) -> Tensor:
        return model(x)

    ones = [one]

    def by_name(x: Tensor, *, inner: Callable[..., Tensor] = one) -> Tensor:
        return inner(x)

    function = {
        "partial": partial(one),
        "object": Calls(one),
        "list": lambda x: ones[0](x),
        "default": lambda x, inner=model: inner(x),
        "keyword": by_name,
    }[within]
    e = f8fx.explain(function, x, select="all")
    assert e.converted == e.total > 0
    assert model.last is None and model.bn.num_batches_tracked == 0


def test_a_method_that_was_compiled_where_it_is_defined():
    e = f8fx.explain(Remembering().bfloat16().step, torch.randn(32, 64, dtype=torch.bfloat16), select="all")
    assert e.converted == e.total > 0


def test_what_is_called_with_is_left_as_it_was():
    """Models and caches among the arguments are copied, once each."""
    model, cache, x = Counting().bfloat16(), Cache(), torch.randn(32, 64, dtype=torch.bfloat16)
    keys = cache.keys

    def step(model: nn.Module, same: nn.Module, cache: Cache, x: Tensor) -> Tensor:
        assert model is same
        return cache.update(model(x)).float().sum()

    e = f8fx.explain(step, model, model, cache, x, select="all")
    assert e.converted == e.total > 0 and e.training
    assert type(model.seen) is Tensor and model.seen == 0
    assert cache.keys is keys


def test_arguments_on_meta_follow_the_others():
    def step(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).float().sum()

    with torch.device("meta"):
        model = nn.Linear(64, 64).bfloat16()
        x = torch.zeros(32, 64, dtype=torch.bfloat16)
    assert f8fx.explain(step, model, x, select="all").training


def test_tensors_of_plain_objects_are_not_copied(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Tensor, "__deepcopy__", lambda tensor, memo: pytest.fail(f"copied {tensor.shape}"))
    assert f8fx.explain(Counting().bfloat16(), torch.randn(32, 64, dtype=torch.bfloat16)).total


def test_what_cannot_be_copied_is_shared():
    """Meshes (whose ranks are numbers in a tensor), process groups, locks."""
    dist = pytest.importorskip("torch.distributed")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    class OnMesh(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.mesh.size()  # pyright: ignore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        mesh = init_device_mesh("cpu", (4,))
        model = OnMesh(64, 64).bfloat16()
        model.mesh, model.held = mesh, (mesh.get_group(), threading.Lock(), torch.Generator())  # pyright: ignore
        x = torch.randn(32, 64, dtype=torch.bfloat16)
        assert f8fx.explain(model, x, select="all").converted
        assert f8fx.explain(lambda model, mesh, x: model(x) * mesh.size(), model, mesh, x).total
        assert mesh.mesh.tolist() == [0, 1, 2, 3]
    finally:
        dist.destroy_process_group()


def test_a_stance_of_the_users_holds_for_calls_only():
    for stance in ("force_eager", "fail_on_recompile"):
        with torch.compiler.set_stance(stance):
            assert f8fx.explain(meta_mlp(), meta_input(64, 2048)).total == 5


def test_what_dynamo_did_not_trace_is_not_called_free_of_matmuls():
    shown = io.StringIO()
    with torch._dynamo.config.patch(disable=True):
        f8fx.explain(meta_mlp(), meta_input(64, 2048)).print(shown)
    assert "none: Dynamo traced nothing of it" in shown.getvalue()


def test_inputs_by_name_are_asked_for_as_such():
    with pytest.raises(f8fx.OptionError, match=r"x is no option but an input: .* kwargs=\{'x': ...\}"):
        f8fx.explain(meta_mlp(), x=meta_input(64, 2048))


def test_arguments_of_the_model_are_told_from_options():
    class Scaled(nn.Linear):
        def forward(self, x, scale=1.0, select="none"):
            return super().forward(x) * scale

    with torch.device("meta"):
        model = Scaled(32, 32)
    x = torch.zeros(16, 32, device="meta")
    with pytest.raises(
        f8fx.OptionError, match=r"scale is no option but an argument .* kwargs=\{'scale': ...\}"
    ):
        f8fx.explain(model, x, scale=2.0, select="all")
    assert f8fx.explain(model, x, kwargs={"scale": 2.0}, select="all").total == 2


def test_a_lazy_module_is_to_be_called_first():
    model = nn.Sequential(nn.LazyLinear(32))
    with pytest.raises(
        ExplainError, match=r"0\.weight of Sequential has no shape yet: call the model once before"
    ):
        f8fx.explain(model, torch.ones(4, 32))


def test_models_made_of_fakes():
    from torch._subclasses import FakeTensorMode

    def explained() -> int:
        return f8fx.explain(model, torch.empty(16, 32, dtype=bf16), select="all").converted

    with FakeTensorMode():
        model = nn.Linear(32, 32, dtype=bf16)
        assert explained() == 2
    assert explained() == 2


def test_frozen_weights_made_in_inference_mode():
    """Eager autograd refuses to save them; what f8fx compiles saves what it may."""
    with torch.inference_mode():
        frozen = nn.Linear(32, 32, bias=False, dtype=bf16).requires_grad_(False)
    model = nn.Sequential(nn.Linear(32, 32, bias=False, dtype=bf16), frozen)
    x = torch.ones(16, 32, dtype=bf16, requires_grad=True)
    with f8fx.recording() as reports:
        compiled(model)(x).sum().backward()
    assert f8fx.explain(model, x, select="all").converted == reports[0].converted == 5


@pytest.mark.parametrize("broadcast", ["none", "queries", "keys", "values"])
@pytest.mark.parametrize("heads", [*seldom(4), 2], ids=["heads", "shared heads"])
def test_attention_that_flash_attention_does_not_take(broadcast: str, heads: int):
    """Values narrower than queries (DeepSeek's), one of the three of another batch size."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Linear(4 * 16, 32, bias=False, dtype=bf16)

        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            y = F.scaled_dot_product_attention(q, k, v, enable_gqa=heads < 4)
            return self.out(y.transpose(1, 2).flatten(2))

    shapes = {"queries": (4, 8, 32), "keys": (heads, 8, 32), "values": (heads, 8, 16)}
    inputs = [
        torch.ones(1 if name == broadcast else 2, *shape, dtype=bf16, requires_grad=True)
        for name, shape in shapes.items()
    ]
    e = f8fx.explain(Attention(), *inputs, select="all")
    assert [row.m for row in e.rows if row.fqn == "out" and row.role == "output"] == [16]
    assert any(row.fqn != "out" for row in e.rows) == (broadcast != "none")  # else one kernel


@pytest.mark.parametrize("dims", [*seldom(2), 3, *seldom(4)])
@pytest.mark.parametrize("dynamic", [False, True])
def test_attention_of_any_rank(dims: int, dynamic: bool):
    layer, shape = nn.Linear(16, 16, bias=False, dtype=bf16), (2, 4, 8, 16)[-dims:]

    def attend(x: Tensor) -> Tensor:
        return layer(F.scaled_dot_product_attention(x, x, x))

    x = torch.ones(shape, dtype=bf16, requires_grad=True)
    assert f8fx.explain(attend, x, select="all", dynamic=dynamic).total >= 3


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_flex_attention_is_trained(device: str):
    """On a CPU torch refuses: it has no kernel for the backward."""
    from torch.nn.attention.flex_attention import flex_attention

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.out = (nn.Linear(64, n, bias=False, dtype=bf16) for n in (192, 64))

        def forward(self, x: Tensor) -> Tensor:
            heads = (t.unflatten(-1, (4, 16)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
            mixed = flex_attention(*heads, score_mod=lambda score, b, h, i, j: score - (i - j).abs())
            return self.out(mixed.transpose(1, 2).flatten(2))

    with torch.device(device):
        model, x = Attention(), torch.ones(2, 128, 64, dtype=bf16)
    e = f8fx.explain(model, x, select="all", target="h100")
    roles = [(row.fqn, row.role) for row in e.rows if row.converted]
    backward = [("out", "grad_input"), ("out", "grad_weight"), ("qkv", "grad_weight")]
    assert sorted(roles) == sorted([("qkv", "output"), ("out", "output"), *backward])
    if device == "cpu":  # as before
        with pytest.raises(Exception, match="FlexAttention does not support backward on CPU"):
            torch.compile(model, backend="eager")(x)


def test_other_threads_compile_meanwhile():
    """What they compiled stays, and nothing of it is freed while it runs."""
    model, x, ended, compiles = meta_mlp(), meta_input(64, 2048), threading.Event(), []
    functions: list[int] = []

    def counting(gm: torch.fx.GraphModule, _: object) -> object:
        compiles.append(1)
        return gm.forward

    def compile_and_call() -> None:
        while not ended.is_set():

            def shift(x: Tensor) -> Tensor:
                return x + 1

            own = types.FunctionType(shift.__code__.replace(), shift.__globals__)
            call = torch.compile(own, backend=counting)
            functions.append(1)
            made = 0
            while made < 20:
                try:
                    call(torch.ones(3))
                    made += 1
                except RuntimeError as error:
                    # before torch 2.15 it takes a trace of any thread for one of its own
                    if release() >= (2, 15) or "FX to symbolically trace" not in str(error):
                        raise

    with ThreadPoolExecutor(3) as pool:
        others = pool.submit(compile_and_call)
        found = list(pool.map(lambda _: f8fx.explain(model, x).total, range(2)))
        ended.set()
        others.result()
    assert found == [5, 5] and len(compiles) == len(functions)


def test_nothing_to_explain():
    e = f8fx.explain(lambda x: x + 1, torch.ones(4))
    assert e.total == 0 and e.gemm_speedup == 1
    e.print(io.StringIO())
    assert "no matmuls" in e.to_html()


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Linear(64, 64, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda x: self.a(x), lambda x: self.b(x), (x,))


@torch.compiler.nested_compile_region
def region(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x).sin()


class Regions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = region(layer, x)
        return x


class Loop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(64, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, self.a(x).tanh()), (torch.tensor(0), x))[1]


@pytest.mark.parametrize(
    ("make", "training"),
    [
        (Branches, True),
        pytest.param(Branches, False, marks=pytest.mark.long),
        pytest.param(Regions, True, marks=pytest.mark.long),
        (Regions, False),
        (Loop, False),
    ],
)
def test_bodies_of_higher_order_operators_are_counted_as_the_backend_counts_them(make, training: bool):
    model, x = make().bfloat16(), torch.zeros(32, 64, dtype=torch.bfloat16)
    with torch.set_grad_enabled(training):
        with f8fx.recording() as reports:
            compiled(model)(x)
        e = f8fx.explain(model, x, select="all")
    found = [(row.fqn, row.role, row.converted, row.reason) for row in e.rows]
    assert found == [(d.fqn, d.role, d.converted, d.reason) for r in reports for d in r.decisions] and found


@pytest.mark.filterwarnings("ignore:f8fx. a weight is not cached")
@pytest.mark.parametrize(("kept", "count"), [("cached", 1), ("constant", 4)])
def test_weights_that_are_not_kept_are_not_said_to_be(kept, count):
    """A slice of a larger tensor, one made in inference mode, one that is shared with other processes."""
    flat = randn(64 * 32 + 1, grad=False)
    with torch.inference_mode():
        inference = nn.Parameter(torch.randn(64, 32).to(bf16), requires_grad=False)
    weights = [
        nn.Parameter(flat[1:].view(64, 32), requires_grad=False),
        inference,
        nn.Parameter(randn(64, 32, grad=False), requires_grad=False).share_memory_(),
        nn.Parameter(randn(64, 32, grad=False), requires_grad=False),
    ]

    def f(x):
        return sum(F.linear(x, weight).sin() for weight in weights)

    x, options = randn(16, 32, grad=False), {"select": "all", "weights": kept, "merge": "never"}
    with f8fx.recording() as reports, torch.no_grad():
        compiled(f, **options)(x)
    told = f8fx.explain(f, x, **options)
    assert (
        [report.reused_weights for report in told.graphs]
        == [count]
        == [report.reused_weights for report in reports]
    )
