"""On-disk caches: hits across processes, and never another configuration's graph."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import fx, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import f8fx
import f8fx.hardware
from f8fx.backend import _graph_pass
from f8fx.cache import CacheKey, has_report, load_report, store_report
from f8fx.passes import Pipeline
from f8fx.records import store_json
from f8fx.report import GraphReport
from f8fx.torch_private import CustomGraphPass
from tests.helpers import bf16, randn
from tests.long import with_long
from tests.processes import printed_by

pytestmark = pytest.mark.slow

#: Compiles a one-layer model under the given layer name and options; prints what happened.
CHILD = """
import json, sys, torch
from torch import nn
import f8fx
from torch._dynamo.utils import counters
name, options = json.loads(sys.argv[1])
if name == "wrong-uuid":
    # what FACTS of the matter are: a key that leaves the module names out
    import f8fx.cache
    f8fx.cache._module_names = lambda gm: []
    name = sys.argv[2]
class Layer(nn.Module):
    def forward(self, x, weight):
        return nn.functional.linear(x, weight)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        setattr(self, name, Layer())
        self.name = name
    def forward(self, x, weight):
        return getattr(self, self.name)(x, weight)
torch.manual_seed(0)
ran = []
from f8fx.passes import Find
original = Find.__call__
Find.__call__ = lambda self, *args: (ran.append(1), original(self, *args))[1]
model = torch.compile(Net(), backend="f8fx", options={"select": "all", "strict": True, **options})
x = torch.ones(16, 32, dtype=torch.bfloat16).div_(3).requires_grad_()
weight = torch.randn(48, 32).to(torch.bfloat16).requires_grad_()
with f8fx.recording() as reports:
    y = model(x, weight)
    y.backward(torch.ones_like(y))
aot = counters["aot_autograd"]
print(json.dumps({
    "passes": len(ran),
    "aot_hits": aot["autograd_cache_hit"],
    "aot_bypass": aot["autograd_cache_bypass"],
    "lines": [r.line() for r in reports],
    "converted": [r.converted for r in reports],
    "names": [d.fqn for r in reports for d in r.decisions],
    "sum": y.float().sum().item(),
    "grad": x.grad.float().sum().item(),
}))
"""


def child(directory, name="layer", *args, **options):
    printed = printed_by(CHILD, json.dumps([name, options]), *args, caches=directory)
    return json.loads(printed.splitlines()[-1])


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("inductor")


@pytest.fixture(scope="module")
def cold(cache):
    """What the first process found, which fills the cache."""
    return child(cache)


def test_a_second_process_hits_and_still_knows_the_decisions(cache, cold):
    warm = child(cache)
    assert (cold["passes"], cold["aot_hits"]) == (1, 0)
    assert (warm["passes"], warm["aot_hits"]) == (0, 1)
    assert warm["lines"] == [cold["lines"][0] + " [cached]"]
    assert (warm["sum"], warm["grad"]) == (cold["sum"], cold["grad"])


@pytest.mark.long
@pytest.mark.parametrize("options", [{}, {"weights": "reused"}])
def test_a_cache_without_the_record_of_decisions(tmp_path, options):
    """As one that ``torch.compiler.load_cache_artifacts`` filled: they are made again, and kept."""
    first = child(tmp_path, **options)
    records = list(tmp_path.rglob("f8fx/*.json"))
    assert records
    for record in records:
        record.unlink()
    moved, again = child(tmp_path, **options), child(tmp_path, **options)
    assert [(found["aot_hits"], found["passes"] > 0) for found in (first, moved, again)] == [
        (0, True),
        (1, True),
        (1, False),
    ]
    for found in (moved, again):
        assert found["lines"] == [first["lines"][0] + " [cached]"]
        assert (found["sum"], found["grad"], found["names"]) == (first["sum"], first["grad"], first["names"])


def test_a_record_that_cannot_be_read_is_no_record(tmp_path, monkeypatch):
    monkeypatch.setattr("f8fx.cache.inductor_cache_dir", lambda: tmp_path)
    key = CacheKey("uuid", "graph")
    store_report(key, [GraphReport("tensorwise")])
    assert has_report(key) and len(load_report(key, "tensorwise")) == 1
    (record,) = tmp_path.rglob("*.json")
    for text in (record.read_text()[:5], "[]", "{}", "null"):
        record.write_text(text)
        assert not has_report(key) and load_report(key, "tensorwise") == [], text


def test_others_may_read_a_record(tmp_path):
    """The files that Inductor keeps beside it can be read, too."""
    store_json(tmp_path / "record.json", {})
    (tmp_path / "other").touch()
    assert (tmp_path / "record.json").stat().st_mode == (tmp_path / "other").stat().st_mode


def test_other_options_never_get_that_graph(cache, cold):
    for options in with_long(({"recipe": "rowwise"},), {"filter_fqns": ["layer"]}):
        other = child(cache, **options)
        assert other["passes"] == 1 and other["aot_hits"] == 0, options
        if "recipe" in options:
            assert other["sum"] != cold["sum"]


def test_names_are_part_of_the_key_where_a_filter_reads_them(cache):
    """Two models of equal graphs: the filter means one of them."""
    assert child(cache, "head", filter_fqns=["head"])["converted"] == [0]
    body = child(cache, "body", filter_fqns=["head"])
    assert body["converted"] == [3] and body["aot_hits"] == 0


@pytest.mark.long
def test_a_report_from_a_cache_names_the_modules_of_its_own_model(cache):
    """Two models of equal graphs, their weights among the inputs, and no filter."""
    names = {name: child(cache, name)["names"] for name in ("mine", "yours")}
    assert names == {"mine": ["mine"] * 3, "yours": ["yours"] * 3}
    again = child(cache, "mine")
    assert again["names"] == ["mine"] * 3 and (again["passes"], again["aot_hits"]) == (0, 1)


def test_without_names_in_the_key_the_wrong_graph_is_served(tmp_path):
    """The failure the key prevents, reproduced by taking the names out of it."""
    assert child(tmp_path, "wrong-uuid", "head", filter_fqns=["head"])["converted"] == [0]
    body = child(tmp_path, "wrong-uuid", "body", filter_fqns=["head"])
    assert body["aot_hits"] == 1 and body["passes"] == 0  # "body" was not filtered, yet runs unconverted


# -- the key itself


def key(model=None, **options):
    keys = []

    def backend(gm, inputs):
        keys.append(CacheKey.of(gm, inputs, f8fx.Options.parse(options)))
        return gm.forward

    torch._dynamo.reset()
    torch.compile(model or nn.Linear(32, 48, dtype=bf16), backend=backend)(randn(16, 32))
    return keys[0]


def test_names_in_checkpointed_regions_are_in_the_key():
    from torch.utils.checkpoint import checkpoint

    class Layer(nn.Module):
        def forward(self, x, weight):
            return F.linear(x, weight)

    class Net(nn.Module):
        def __init__(self, name):
            super().__init__()
            self.name = name
            setattr(self, name, Layer())

        def forward(self, x):
            return checkpoint(getattr(self, self.name), x, x, use_reentrant=False)

    assert key(Net("a")).uuid == key(Net("a")).uuid != key(Net("b")).uuid


def test_what_checkpointed_regions_compute_is_in_the_key_of_the_record():
    """Two bodies of the same number of operations: in float32 nothing is converted, in float16 the matmul is."""
    from torch.utils.checkpoint import checkpoint

    class Net(nn.Module):
        def __init__(self, dtype):
            super().__init__()
            self.weight, self.dtype = nn.Parameter(randn(32, 48)), dtype

        def body(self, x):
            return (x.to(self.dtype) @ self.weight.to(self.dtype)).to(x.dtype)

        def forward(self, x):
            return checkpoint(self.body, x, use_reentrant=False)

    assert key(Net(torch.float16)).graph == key(Net(torch.float16)).graph != key(Net(torch.float32)).graph


def test_which_inputs_are_parameters_is_in_the_key():
    """It decides which operand of a matmul is the weight, and the graphs of these two are equal."""

    def layer(weight):
        return lambda x: F.linear(x, weight * 0.5)

    parameter = nn.Parameter(randn(48, 32, grad=False))
    tensor = parameter.detach().clone().requires_grad_()
    assert key(layer(parameter)).uuid == key(layer(parameter)).uuid != key(layer(tensor)).uuid


def test_a_filter_function_is_not_cacheable_unless_it_says_what_it_is():
    def keep(fqn, gemm):
        return True

    assert key(filter_fn=keep).uuid is None
    keep.uuid = "v1"
    first = key(filter_fn=keep).uuid
    keep.uuid = "v2"
    assert first is not None and first != key(filter_fn=keep).uuid


#: Another value of each option that decides which graph comes out.
DECIDING = {
    "recipe": ["rowwise", f8fx.Recipe("tensorwise", grad_weight=None)],
    "select": ["all"],
    "filter_fqns": [["x"]],
    "only_fqns": [["x"]],
    "pad": ["never"],
    "activations": ["convert"],
    "experts": ["convert"],
    "merge": ["never"],
    "rowwise_scales": ["in_gemm", "torchao"],
    "bias": ["in_gemm"],
    "save": ["fast"],
    "wire": ["off", "uint8", "float8"],
    "weights": ["cached", "reused"],
    "kernels": ["inductor"],
    "target": ["h100"],
}
#: And of those that do not, or are in Inductor's key.
OTHERS = {
    "verbose": True,
    "debug": True,
    "strict": True,
    "executor": "eager",
    "inductor": {"max_autotune": True},
}


def test_a_users_own_passes_are_in_the_key_of_the_record(tmp_path, monkeypatch):
    monkeypatch.setattr("f8fx.cache.inductor_cache_dir", lambda: str(tmp_path))

    class Own(CustomGraphPass):
        def __init__(self, name):
            self.name = name

        def __call__(self, graph):
            pass

        def uuid(self):
            return self.name

    def key(*passes):
        gm, options = fx.symbolic_trace(nn.Linear(16, 16)), f8fx.options.Options.parse({})
        return _graph_pass(gm, [torch.zeros(2, 16)], options, {"joint_custom_pre_pass": [*passes]}).key

    store_report(key(Own("a")), [GraphReport("tensorwise")])
    assert has_report(key(Own("a")))
    assert not has_report(key(Own("b"))) and not has_report(key(Own("a"), Own("b"))) and not has_report(key())
    assert key(Own("a"), Own(None)).uuid is None and key(lambda graph: None).uuid is None


def test_every_option_that_decides_is_in_the_key():
    assert {*DECIDING, *OTHERS, "filter_fn"} == {field.name for field in dataclasses.fields(f8fx.Options)}
    base = key().uuid
    others = [key(**{name: value}).uuid for name, values in DECIDING.items() for value in values]
    assert len({base, *others}) == len(others) + 1
    assert key(**OTHERS).uuid == base


def test_what_carries_collectives_is_in_the_key(monkeypatch):
    """What float8 travels as depends on it."""
    keys = []
    for backends in (["gloo"], ["nccl"]):
        monkeypatch.setattr(f8fx.cache, "group_backends", lambda backends=backends: backends)
        keys.append([key(wire=wire).uuid for wire in ("auto", "float8", "uint8", "off")])
    assert [one != other for one, other in zip(*keys, strict=True)] == [True, True, False, False]


def test_a_rank_s_place_in_a_mesh_is_in_the_key():
    """Code that shards takes that rank's part, and gathers name its group: (0, 2) and (1, 3) of a row of a 2 x 2 mesh."""

    def of_rank(rank, dim):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=4)
        try:
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))[dim]
            weight = DTensor.from_local(torch.randn(8, 16), mesh, [Shard(0)], run_check=False)
            gm = fx.symbolic_trace(lambda w: w.full_tensor())
            found = CacheKey.of(gm, [weight], f8fx.Options.parse({}))
            return found.uuid
        finally:
            dist.destroy_process_group()

    keys = {(rank, dim): of_rank(rank, dim) for rank in range(4) for dim in ("a", "b")}
    assert len({*keys.values()}) == len(keys)
    assert all(of_rank(*place) == key for place, key in keys.items())


def test_how_a_tensor_is_sharded_is_in_the_key():
    """Over a 2 x 2 mesh, shards of one shape are parts of tensors that are split otherwise, and gathered otherwise."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        mesh, local = init_device_mesh("cpu", (2, 2)), torch.randn(8, 16)
        found = []
        for placements in ((Shard(0), Shard(1)), (Shard(1), Shard(0))):
            weight = DTensor.from_local(local, mesh, placements, run_check=False)
            assert weight.shape == (16, 32)
            found.append(
                CacheKey.of(fx.symbolic_trace(lambda w: w + 1), [weight], f8fx.Options.parse({})).uuid
            )
    finally:
        dist.destroy_process_group()
    assert found[0] != found[1]


def test_every_figure_of_the_target_is_in_the_key():
    """Not only its name: a user may describe hardware of their own."""
    h100 = f8fx.hardware.find("h100")
    other = dataclasses.replace(h100, fp8_flops=h100.fp8_flops / 2)
    assert key(target=h100).uuid == key(target="h100").uuid != key(target=other).uuid


def test_the_record_of_decisions_knows_autocast():
    """The same Dynamo graph is another graph under autocast."""
    linear = nn.Linear(32, 48)

    def record():
        keys = []

        def backend(gm, inputs):
            keys.append(CacheKey.of(gm, inputs, f8fx.Options.parse({})).graph)
            return gm.forward

        torch._dynamo.reset()
        torch.compile(linear, backend=backend)(torch.ones(16, 32))
        return keys[0]

    plain = record()
    with torch.autocast("cpu", dtype=bf16):
        assert record() != plain
    assert record() == plain


def test_the_record_of_decisions_knows_what_the_compilers_are_set_to():
    """Inductor's own passes before ours may change which matmuls there are."""
    graph = fx.Graph()
    graph.output(graph.placeholder("x"))
    module, x = fx.GraphModule({}, graph), torch.ones(2)

    def record(**patches):
        return CacheKey.of(module, [x], f8fx.Options.parse({}), patches).graph

    class Pass:
        def __call__(self, graph):
            pass

    fused = {"pre_grad_fusion_options": {"batch_linear": {"min_fuse_set_size": 2}}}
    plain = record()
    assert record(**fused) != plain
    with torch._inductor.config.patch(fused):
        assert record() == record(**fused)
    with torch._functorch.config.patch(activation_memory_budget=0.5):
        assert record() != plain
    assert record(post_grad_custom_pre_pass=Pass()) == record(post_grad_custom_pre_pass=Pass()) != plain
    assert record() == plain


def test_the_record_of_decisions_knows_the_machine(monkeypatch):
    """A directory may be shared by machines with other GPUs, or kept over an upgrade; what pays there is something else."""
    graph = fx.Graph()
    graph.output(graph.placeholder("x"))
    module, x = fx.GraphModule({}, graph), torch.ones(2)

    def record():
        return CacheKey.of(module, [x], f8fx.Options.parse({})).graph

    plain = record()
    with monkeypatch.context() as other:
        other.setattr("f8fx.cache.of_device", lambda device: f8fx.hardware.find("h100"))
        assert record() != plain
    with monkeypatch.context() as other:
        other.setattr(torch, "__version__", "2.99.0")
        assert record() != plain
    assert record() == plain


def test_hints_of_dynamic_sizes_are_in_the_key():
    """The cost model decides by the size it sees; a graph decided at 8192 rows is not one for 16.

    Under ``select="all"`` it still decides what is merged.
    """

    def sized(m, **options):
        keys = []

        def backend(gm, inputs):
            keys.append(CacheKey.of(gm, inputs, f8fx.Options.parse(options)).uuid)
            return gm.forward

        torch._dynamo.reset()
        weight = nn.Parameter(randn(48, 32, grad=False))
        torch.compile(lambda x: F.linear(x, weight), backend=backend, dynamic=True)(randn(m, 32))
        return keys[0]

    assert sized(16) != sized(8192)
    assert sized(16, select="all") != sized(8192, select="all")
    assert sized(16) == sized(16)


def test_pipeline_has_no_state_outside_its_key():
    """Two pipelines of equal options make equal graphs."""
    from f8fx.passes import describe
    from tests.helpers import joint_graphs

    texts = []
    for _ in range(2):
        parsed = f8fx.Options.parse({"select": "all"})

        def transform(graph, parsed=parsed):
            Pipeline(parsed.recipe, parsed.policy())(graph)
            texts.append(describe(graph))

        joint_graphs(F.linear, randn(16, 32), randn(48, 32), transform=transform)
    assert texts[0] == texts[1]


def test_a_record_is_written_whole_or_not_at_all(tmp_path):
    """And nothing of the attempt stays behind."""
    path = tmp_path / "f8fx" / "record.json"
    store_json(path, {"a": 1})
    with pytest.raises(TypeError):
        store_json(path, {"a": object()})
    (tmp_path / "file").write_text("")
    store_json(tmp_path / "file" / "record.json", {"a": 2})  # no folder can be made there, which is no error
    (tmp_path / "f8fx" / "folder").mkdir()
    store_json(tmp_path / "f8fx" / "folder", {"a": 2})  # it cannot take the place of one
    assert json.loads(path.read_text()) == {"a": 1}
    assert {file.name for file in path.parent.iterdir()} == {"record.json", "folder"}


def test_one_report_of_a_graph_and_its_regions_is_cached_if_all_are():
    parts = [GraphReport("tensorwise", cached=True), GraphReport("tensorwise", cached=True)]
    assert GraphReport.merged(parts)[0].cached
    parts[1].cached = False
    assert not GraphReport.merged(parts)[0].cached


#: Compiles a layer under the given backend and options, with Dynamo's own packages, and saves those.
PACKAGED = """
import json, sys, torch
from torch import nn
import f8fx
from torch._dynamo.precompile_context import PrecompileContext
torch._dynamo.config.caching_precompile = True
torch.manual_seed(0)
model, x = nn.Linear(32, 48, dtype=torch.bfloat16), torch.randn(16, 32, dtype=torch.bfloat16)
with torch.no_grad(), f8fx.recording() as reports:
    y = torch.compile(model, fullgraph=True, **json.loads(sys.argv[1]))(x)
    PrecompileContext.save_to_dynamo_cache()
    print(json.dumps({"lines": [r.line() for r in reports], "equal": torch.equal(y, model(x))}))
"""


@pytest.mark.long
def test_a_package_of_dynamo_never_runs_with_other_options(tmp_path):
    """They are found by the function alone (``torch._dynamo.config.caching_precompile``)."""

    def run(**arguments):
        printed = printed_by(PACKAGED, json.dumps(arguments), caches=tmp_path)
        return json.loads(printed.splitlines()[-1])

    for recipe in ("tensorwise", "rowwise"):
        found = run(backend="f8fx", options={"select": "all", "strict": True, "recipe": recipe})
        assert found == {"lines": [f"f8fx: 1 of 1 matmuls in float8 ({recipe})"], "equal": False}
    assert run(backend="inductor") == {"lines": [], "equal": True}
