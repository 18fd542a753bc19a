"""What a step under FSDP2 sends, by hand; :mod:`tests.distributed.test_communication` compares it with real runs."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import f8fx
from f8fx.cli import main
from f8fx.communication import Call, Communication, Sharded, World, predict
from f8fx.demo.model import Decoder, DecoderConfig
from f8fx.explanation import Explanation
from f8fx.explanation.show import wire_note
from f8fx.interconnect import INTERCONNECTS
from f8fx.options import Options
from f8fx.torch_private import fake_store


class Net(nn.Module):
    """One block with a matrix [64, 32] and a bias [64], and a head that is filtered."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(32, 64)])
        self.head = nn.Linear(64, 16, bias=False)

    def forward(self, x):
        return self.head(self.blocks[0](x))


def net() -> Net:
    with torch.device("meta"):
        return Net().bfloat16()


def options(recipe: str = "tensorwise", **more) -> Options:
    return Options.parse({"recipe": recipe, "target": "h100", "filter_fqns": ["head"], **more})


def sent(c: Communication) -> list[tuple[str, str, str, int, int]]:
    return [tuple(row) for row in c.rows]  # type: ignore[misc]


def test_every_byte_of_a_small_model():
    """On 4 ranks a ring sends 3 of 4 parts: of 2048 + 64 elements of the block, and of 1024 of the head."""
    assert sent(predict(net(), 4, options())) == [
        # the block's twice, the head's, which is the root's, once; two bytes an element
        ("all_gather", "weights", "bfloat16", (2 * 2112 + 1024) * 2 * 3 // 4, (2 * 64 + 1024) * 2 * 3 // 4),
        ("all_gather", "weights", "float8_e4m3fn", 0, 2 * 2048 * 3 // 4),
        ("reduce_scatter", "gradients", "bfloat16", 3136 * 2 * 3 // 4, 3136 * 2 * 3 // 4),
        ("all_reduce", "amaxes", "int32", 0, 2 * 4 * 3 // 4),
    ]


def test_without_a_backward_weights_are_gathered_once():
    c = predict(net(), 4, options(), training=False)
    assert sent(c)[:2] == [
        ("all_gather", "weights", "bfloat16", 3136 * 2 * 3 // 4, (64 + 1024) * 2 * 3 // 4),
        ("all_gather", "weights", "float8_e4m3fn", 0, 2048 * 3 // 4),
    ]
    assert len(c.rows) == 2


def test_rowwise_sends_both_copies_or_each_in_its_half():
    sizes = {}
    for copies in ("both", "auto"):
        c = predict(net(), 2, options("rowwise"), copies=copies)  # type: ignore[arg-type]
        assert c.doubled == (copies == "both")
        sizes[copies] = next(row[4] for row in c.rows if row[2] == "float8_e4m3fn")
        # an amax for each row and each column
        assert c.rows[-1] == ("all_reduce", "amaxes", "int32", 0, 4 * (64 + 32))
    assert sizes == {"both": 2 * 2 * 2048 // 2, "auto": 2 * 2048 // 2}
    # which half reads what is not known without a backward
    forwards = [predict(net(), 2, options("rowwise"), copies=copies, training=False) for copies in sizes]  # type: ignore[arg-type]
    assert forwards[0].rows == forwards[1].rows and not any(c.doubled for c in forwards)
    assert not predict(net(), 1, options("rowwise"), copies="both").doubled  # nothing is gathered
    assert not predict(net(), 2, options("tensorwise"), copies="both").doubled  # one serves both halves


class Checkpointed(nn.Module):
    """Two layers, the second run again in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False)])

    def forward(self, x):
        return checkpoint(lambda y: self.blocks[1](y).sin(), self.blocks[0](x), use_reentrant=False).sin()


def test_what_is_recomputed_is_gathered_in_both_copies():
    """In the backward, which then has a forward in it; what is not is gathered once in each half."""
    with torch.device("meta"):
        model, x = Checkpointed().bfloat16(), torch.empty(64, 32, dtype=torch.bfloat16)
    explained = f8fx.explain(model, x, world=2, recipe="rowwise", select="all", target="h100")
    outputs = [d for report in explained.graphs for d in report.decisions if d.role == "output"]
    assert [(d.fqn, d.recomputed) for d in outputs] == [("blocks.0", False), ("blocks.1", True)]
    assert explained.communication is not None
    (row,) = [row for row in explained.communication.rows if row[2] == "float8_e4m3fn"]
    assert row[4] == (2 + 3) * 32 * 32 // 2


def test_shards_that_are_not_even_carry_padding():
    (weights, *_) = predict(net(), 3, options()).high
    shard = 22 * 32 + 22  # 64 rows on 3 ranks
    assert weights.input_bytes == (2 * shard + 6 * 64) * 2


def test_a_parameter_of_no_dimension_is_one_of_one_number():
    """Such as CLIP's logit_scale."""
    model = net()
    without = predict(model, 4, options()).high[0].input_bytes
    model.logit_scale = nn.Parameter(torch.tensor(2.65, dtype=torch.bfloat16, device="meta"))
    assert predict(model, 4, options()).high[0].input_bytes == without + 2


def test_a_lone_block_is_one_of_a_larger_model():
    with torch.device("meta"):
        c = predict(nn.Linear(32, 64, bias=False).bfloat16(), 2, options())
    assert c.high[0].calls == 2 and c.high[0].input_bytes == 2 * 1024 * 2


def test_frozen_weights_have_no_gradients_to_reduce():
    model = net()
    model.blocks[0].weight.requires_grad_(False)
    c = predict(model, 2, options())
    assert next(row for row in c.rows if row[0] == "reduce_scatter")[3] == (64 + 1024) * 2 // 2


def test_amaxes_of_weights_that_stay_are_not_taken_in_every_step():
    model = net()
    for block in model.blocks:
        block.requires_grad_(False)
    assert [row[1] for row in predict(model, 2, options()).rows] == ["weights", "weights", "gradients"]
    model.blocks[0].weight.requires_grad_(True)
    assert predict(model, 2, options()).rows[-1][1] == "amaxes"


def test_mixed_precision_gathers_and_reduces_in_its_dtypes():
    c = predict(net().float(), 2, options(), param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    assert [row[2] for row in c.rows] == ["bfloat16", "float8_e4m3fn", "float32", "int32"]


def test_tensor_parallelism_divides_the_matrices():
    whole, split = (predict(net(), world, options()) for world in ("2", "2x2"))
    assert whole.gathers[0].shape == (64, 32) and split.gathers[0].shape == (32, 32)
    # the bias stays whole
    assert whole.high[0].input_bytes == (2 * 2112 + 1024) and split.high[0].input_bytes == (2 * 1088 + 512)
    assert predict(net(), "2x8", options()).gathers[0].reason == "not a multiple of 16"


def test_the_table_is_said_to_be_of_the_whole_model():
    """Where the gathers change what is cast and merged."""
    said = "of the model before it is sharded"
    assert said in wire_note(predict(net(), 2, options()))
    assert said not in wire_note(predict(net(), 2, options("rowwise_with_gw_hp", only_fqns=["nothing"])))
    assert said not in wire_note(predict(net(), World.parse("replicate=2"), options()))


def test_one_rank_sends_nothing():
    c = predict(net(), 1, options(), interconnect=INTERCONNECTS["h100"])
    assert c.rows == [] and c.high_bytes == 0 and c.high_seconds == 0
    for recipe in ("tensorwise", "rowwise"):
        for world in (1, "1x2"):
            note = wire_note(predict(net(), world, options(recipe)))
            assert "gathered in float8" not in note and "two float8 copies" not in note


@pytest.mark.parametrize(
    ("text", "world"),
    [
        (8, World(8)),
        ("8", World(8)),
        ("8x4", World(8, 4)),
        ("fsdp=8,tp=4", World(8, 4)),
        ("tp=4, fsdp=8", World(8, 4)),
        ("fsdp=2", World(2)),
        ("replicate=4,fsdp=8", World(8, replicate=4)),
        ("replicate=8", World(1, replicate=8)),
        ("tp=4", World(1, 4)),
        ("fsdp=8,tp=4,replicate=2", World(8, 4, 2)),
    ],
)
def test_worlds(text, world: World):
    assert World.parse(text) == world


@pytest.mark.parametrize(
    "text",
    ["0", "eight", "8x", "dp=4", "tp=4,tp=4", "fsdp=4,fsdp=8", "tp=4,fsdp=0", "8x4x2", "replicate=2,", -1],
)
def test_worlds_that_cannot_be(text):
    with pytest.raises(ValueError, match="world"):
        World.parse(text)


def test_replicas_reduce_their_shards():
    """Beside what their group of ranks sends: an all-reduce of the gradients' shards, over ranks a group apart."""
    alone, hsdp = (
        Sharded.of(net(), World.parse(w), options()).calls(True) for w in (4, "replicate=2,fsdp=4")
    )
    added = [call for call in hsdp if call not in alone]
    assert [call for call in hsdp if call in alone] == alone
    scattered = [call for call in alone if call.op == "reduce_scatter"]
    assert {call.op for call in added} == {"all_reduce"} and len(added) == len(scattered)
    for call, whole in zip(added, scattered, strict=True):
        assert (call.ranks, call.stride, call.backward) == (2, 4, True)
        assert {dtype: 4 * count for dtype, count in call.bytes.items()} == dict(whole.bytes)
    assert str(World.parse("replicate=2,fsdp=4")) == "2 x 4 (replicas x FSDP)"
    assert (
        Communication.from_dict(predict(net(), "replicate=2,fsdp=4", options()).to_dict()).world.replicate
        == 2
    )


# -- seconds --------------------------------------------------------------------------------------


def test_seconds_are_bytes_over_the_narrowest_link_and_the_hops():
    h100 = INTERCONNECTS["h100"]

    def seconds(ranks: int, tp: int = 1, op: str = "all_gather") -> float:
        return Call(op, "weights", "", False, ranks, {"bfloat16": 10**9}, tp).seconds(h100)  # type: ignore[arg-type]

    assert seconds(8) == pytest.approx(8.4e-6 + 7 * (3.4e-6 + 1e9 / 450e9))
    # two nodes: eight ports of 50 GB/s are narrower than NVLink
    assert seconds(16) == pytest.approx(8.4e-6 + 14 * 3.4e-6 + 14e-6 + 15e9 / 400e9)
    # tensor parallelism fills the node: every hop is over one port
    assert seconds(2, tp=8) == pytest.approx(8.4e-6 + 14e-6 + 1e9 / 50e9)


@pytest.mark.parametrize("name", INTERCONNECTS)
def test_interconnects_have_sources(name: str):
    cluster = INTERCONNECTS[name]
    assert cluster.name == name
    assert (
        cluster.network_bandwidth < cluster.link_bandwidth and cluster.link_latency < cluster.network_latency
    )
    assert {"link_bandwidth", "network_bandwidth", "link_latency"} <= set(cluster.sources)


# -- in `explain` ---------------------------------------------------------------------------------


def tiny() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    with torch.device("meta"):
        model = Decoder(DecoderConfig.named("tiny")).bfloat16()
        return model, (torch.zeros(2, 16, dtype=torch.long),)


def test_explain_shows_the_wire_everywhere():
    model, args = tiny()
    e = f8fx.explain(model, *args, world=8, filter_fqns=["output"])
    c = e.communication
    assert c is not None and c.training and c.converted == 14 and c.interconnect == "h100"
    assert c.float8_bytes < c.high_bytes and c.float8_seconds and c.high_seconds
    assert Explanation.from_dict(json.loads(e.to_json())) == e
    assert e.to_dict()["communication"]["totals"]["high_bytes"] == c.high_bytes
    text = io.StringIO()
    e.print(text)
    for shown in ("each rank of 8", "reduce_scatter", "float8_e4m3fn", "ring formula", "predicted time"):
        assert shown in text.getvalue()
    page = e.to_html()
    assert 'id="wire"' in page and "reduce_scatter" in page


def test_without_a_world_there_is_no_wire():
    model, args = tiny()
    e = f8fx.explain(model, *args)
    assert e.communication is None and e.to_dict()["communication"] is None
    assert "wire" not in e.to_html()


@pytest.mark.long
def test_a_page_of_a_world_in_which_nothing_is_sent():
    model, args = tiny()
    e = f8fx.explain(model, *args, world=1)
    assert e.communication is not None and not e.communication.rows
    assert 'id="wire"' in e.to_html()


def test_a_world_needs_a_module():
    with pytest.raises(TypeError, match="model must be a module"):
        f8fx.explain(lambda x: x, torch.ones(2), world=2)


def test_the_command_line(capsys: pytest.CaptureFixture[str]):
    spec = "tests.test_communication:tiny"
    assert main(["explain", spec, "--world", "8x4", "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["communication"]["tp"] == 4
    assert main(["explain", spec, "--mesh", "fsdp=8", "--recipe", "rowwise", "--copies", "both"]) == 0
    assert "each rank of 8" in capsys.readouterr().out
    assert main(["explain", spec, "--world", "many"]) == 2
    assert "world must be like 8, 8x4" in capsys.readouterr().err


@pytest.mark.long
def test_a_mesh_on_the_command_line(capsys: pytest.CaptureFixture[str]):
    spec = "tests.test_communication:tiny"
    for mesh in (["--mesh", "tp=4,fsdp=8"], ["--world", "32", "--mesh", "fsdp=8,tp=4"]):
        assert main(["explain", spec, *mesh, "--json", "-"]) == 0
        found = json.loads(capsys.readouterr().out)["communication"]
        assert (found["fsdp"], found["tp"]) == (8, 4)
    assert main(["explain", spec, "--world", "8", "--mesh", "fsdp=4"]) == 2
    assert "--world 8 and --mesh fsdp=4 contradict each other" in capsys.readouterr().err
    assert main(["explain", spec, "--mesh", "fsdp=many"]) == 2
    assert "--mesh: world must be like" in capsys.readouterr().err
    function = "tests.test_communication:no_module"
    assert main(["explain", function, "--mesh", "fsdp=4"]) == 2
    assert f"--mesh: {function}() must return a module" in capsys.readouterr().err
    assert main(["explain", spec, "--mesh", "fsdp=4", "--parallelize", f"{__name__}:split"]) == 2
    assert "--mesh fsdp=8,tp=4" in capsys.readouterr().err


def no_module():
    return torch.relu, (torch.ones(2),)


# -- tensor parallelism


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.ModuleDict({"up": nn.Linear(32, 64, bias=False)})])
        self.down = nn.Linear(64, 32, bias=False)

    def forward(self, x):
        return self.down(self.blocks[0]["up"](x).relu())


def feed_forward():
    with torch.device("meta"):
        return FeedForward().bfloat16(), (torch.zeros(4, 16, 32, dtype=torch.bfloat16),)


def split(model: nn.Module, mesh) -> None:
    """Activations are shards of the sequence but between the two layers."""
    plan = {
        "blocks.0.up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
    }
    parallelize_module(model, mesh, plan)


class Halved(nn.Module):
    """Its output is rows of a whole, those of this rank."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32, 32))
        self.mesh: Any = None

    def forward(self, x):
        if self.mesh is None:
            return F.linear(x, self.weight)
        whole = (
            t if isinstance(t, DTensor) else DTensor.from_local(t, self.mesh, [Replicate()], run_check=False)
            for t in (x, self.weight)
        )
        return F.linear(*whole).redistribute(placements=[Shard(0)]).to_local()


def on_mesh(model: Halved, mesh) -> None:
    model.mesh = mesh


def on_equal_mesh(model: Halved, mesh) -> None:
    """One that a plan makes for itself, beside the one it is given."""
    model.mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("fsdp", "tp"))["tp"]
    model.weight = nn.Parameter(DTensor.from_local(model.weight, mesh, [Replicate()], run_check=False))


def test_a_plan_that_makes_the_mesh_again():
    f8fx.explain(Halved(), torch.randn(8, 32), world="1x2", parallelize=on_equal_mesh, select="all")


def test_meshes_on_paper_leave_nothing_behind():
    """DTensor keeps what it decides by mesh, and real ranks may have a mesh of the same sizes and names."""
    model, x = Halved(), torch.randn(8, 32)
    f8fx.explain(Halved(), x, world="1x2", parallelize=on_mesh, select="all")
    dist.init_process_group("fake", store=fake_store(), rank=1, world_size=2)
    try:
        model.mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("fsdp", "tp"))["tp"]
        assert torch.equal(model(x), F.linear(x, model.weight)[4:])
    finally:
        dist.destroy_process_group()


@pytest.mark.long
def test_worlds_are_explained_one_after_the_other():
    """The groups of one have other names and sizes than those of the next."""
    model, inputs = feed_forward()

    def in_graph(world: str) -> list[Any]:
        e = f8fx.explain(model, *inputs, world=world, parallelize=split, select="all")
        assert e.communication is not None
        return [row for row in sent(e.communication) if row[1] == "in the graph"]

    first = in_graph("1x2")
    assert len(first) == 4
    assert in_graph("replicate=2,fsdp=1,tp=2") == in_graph("4x2") == in_graph("1x2") == first


def test_what_tensor_parallelism_sends_is_counted():
    """Of two ranks: the input in the forward, the output's gradient in the backward; two reduce-scatters."""
    model, inputs = feed_forward()
    before = {name: (type(p), p.shape) for name, p in model.named_parameters()}
    e = f8fx.explain(model, *inputs, world="1x2", parallelize=split, select="all")
    assert before == {name: (type(p), p.shape) for name, p in model.named_parameters()}
    assert not torch.distributed.is_initialized()
    assert [row.size for row in e.rows[:2]] == ["128 x 32 x 32", "128 x 32 x 32"]
    activation = 2 * 64 * 32  # elements, whole; half of it is on the wire
    assert e.communication is not None and sent(e.communication) == [
        ("all_gather", "in the graph", "bfloat16", 2 * activation, 0),
        ("all_gather", "in the graph", "float8_e4m3fn", 0, activation // 2),
        ("all_gather", "in the graph", "float8_e5m2", 0, activation // 2),
        # the output, and the gradient of the input where that has one
        ("reduce_scatter", "in the graph", "bfloat16", activation, activation),
        # an amax each, 4 bytes twice half of which is sent
        ("all_reduce", "amaxes", "int32", 0, 2 * 4),
    ]
    assert "is not in it" not in wire_note(e.communication)
    both = f8fx.explain(model, *inputs, world="8x2", parallelize=split, select="all").communication
    assert both is not None and {row[:3] for row in both.rows} >= {
        ("all_gather", "weights", "bfloat16"),
        ("all_gather", "in the graph", "bfloat16"),
    }
    # up is split by rows, down by columns, and sharded over rows by FSDP2
    assert {g.fqn: g.shape for g in both.gathers} == {
        "blocks.0.up.weight": (32, 32),
        "down.weight": (32, 32),
    }


@pytest.mark.parametrize(
    ("how", "row"),
    [
        (lambda c, x, w: c.broadcast(x, 0, w), ("broadcast", 2 * 64 * 64)),
        (
            lambda c, x, w: c.all_gather_into_tensor_coalesced([x, x], w)[0],
            ("all_gather", 2 * 2 * 64 * 64 * 3),
        ),
        (
            lambda c, x, w: c.reduce_scatter_tensor_coalesced([x, x], "sum", [0, 0], w)[0],
            ("reduce_scatter", 2 * 2 * 64 * 64 * 3 // 4),
        ),
        (
            lambda c, x, w: c.all_reduce_coalesced([x, x], "sum", w)[0],
            ("all_reduce", 2 * 2 * 64 * 64 * 2 * 3 // 4),
        ),
    ],
    ids=["broadcast", "all_gather", "reduce_scatter", "all_reduce"],
)
def test_collectives_of_several_tensors_are_counted(how, row: tuple[str, int]):
    """Of four ranks."""
    from torch.distributed import _functional_collectives as collectives
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def forward(x, weight):
        return nn.functional.linear(how(collectives, x, torch.distributed.group.WORLD), weight)

    inputs = [torch.zeros(64, 64, dtype=torch.bfloat16) for _ in range(2)]
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    try:
        c = f8fx.explain(forward, *inputs).communication
    finally:
        torch.distributed.destroy_process_group()
    assert c is not None and sent(c) == [(row[0], "in the graph", "bfloat16", row[1], row[1])]


def test_without_a_plan_it_says_that_it_is_not_counted():
    model, inputs = feed_forward()
    c = f8fx.explain(model, *inputs, world="8x2", select="all").communication
    assert c is not None and not c.graphs_counted and "is not in it" in wire_note(c)


def test_plans_that_cannot_be():
    model, inputs = feed_forward()
    for world in (None, 8):
        with pytest.raises(ValueError, match="ranks of tensor parallelism"):
            f8fx.explain(model, *inputs, world=world, parallelize=split)
    command = ["explain", f"{__name__}:feed_forward", "--parallelize", f"{__name__}:split"]
    assert main([*command, "--world", "8"]) == 2


def test_a_plan_on_the_command_line(capsys: pytest.CaptureFixture[str]):
    assert main(["explain", f"{__name__}:feed_forward", "--parallelize", "split", "--world", "4x2"]) == 2
    assert "--parallelize must be given as package.module:function, got 'split'" in capsys.readouterr().err
    command = ["explain", f"{__name__}:feed_forward", "--parallelize", f"{__name__}:split", "--world", "4x2"]
    assert main([*command, "--select", "all"]) == 0
    assert "in the graph" in capsys.readouterr().out
