"""``explain``: decisions and figures, without a GPU."""

from __future__ import annotations

import io
import json
import re

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import f8fx
from f8fx import hardware
from f8fx.demo.model import DecoderBlock, DecoderConfig
from f8fx.explanation import Explanation
from f8fx.passes.worth import cost_model
from f8fx.report import GemmInfo
from tests.explained import Mlp, meta_input, meta_mlp, tiny_decoder
from tests.helpers import bf16
from tests.long import seldom


@pytest.mark.parametrize("target", ["h100", "b200"])
def test_large_matmuls_pay(target: str):
    e = f8fx.explain(meta_mlp(), meta_input(32768, 2048), target=target)
    assert (e.model, e.target, e.recipe, e.training) == ("Mlp", target, "tensorwise", True)
    # the input wants no gradient, so `up` has two gemms
    assert [(row.fqn, row.role, row.m, row.k, row.n) for row in e.rows] == [
        ("up", "output", 32768, 2048, 4096),
        ("down", "output", 32768, 4096, 2048),
        ("down", "grad_weight", 2048, 32768, 4096),
        ("down", "grad_input", 32768, 2048, 4096),
        ("up", "grad_weight", 4096, 32768, 2048),
    ]
    assert e.converted == 5 and not e.reasons
    assert 1 < e.gemm_speedup < 2
    assert sum(row.share or 0 for row in e.rows) == pytest.approx(1)
    for row in e.rows:
        assert row.speedup is not None and row.high_seconds == pytest.approx(row.float8_seconds * row.speedup)


def test_without_float8_tensor_cores_nothing_converts():
    e = f8fx.explain(meta_mlp(), meta_input(16384, 2048), target="a100")
    assert e.converted == 0 and e.gemm_speedup == 1
    assert e.reasons == {"no float8 tensor cores on a100": 5}
    assert e.saved_bytes_float8 == e.saved_bytes_high
    assert all(row.share for row in e.rows)  # time goes somewhere on any hardware


def test_select_all_converts_what_would_lose_and_says_so():
    model, x = meta_mlp(width=64, hidden=64), meta_input(64, 64)
    auto, everything = (f8fx.explain(model, x, select=select) for select in ("auto", "all"))
    assert auto.converted == 0 and auto.gemm_speedup == 1
    assert everything.converted == 5 and everything.gemm_speedup < 1
    # the prediction is there whether it decides or not
    assert [row.speedup for row in auto.rows] == pytest.approx([row.speedup for row in everything.rows])
    assert all(row.detail.startswith("loses: 0.") for row in everything.rows)


def test_where_inductor_runs_no_passes_there_is_nothing_to_explain():
    with pytest.raises(f8fx.OptionError, match="use_joint_graph_passes=False Inductor runs no passes"):
        f8fx.explain(meta_mlp(), meta_input(4096, 4096), inductor={"use_joint_graph_passes": False})


def test_what_merging_gains_the_rows_gain():
    class Projections(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k = nn.Linear(1024, 1024, bias=False), nn.Linear(1024, 256, bias=False)

        def forward(self, x):
            return self.q(x).sin().sum() + self.k(x).cos().sum()

    with torch.device("meta"):
        model = Projections().to(bf16)
    found = [
        f8fx.explain(model, meta_input(8192, 1024), merge=merge, select="all") for merge in ("never", "auto")
    ]
    apart, merged = (sum(row.float8_seconds or 0.0 for row in e.rows) for e in found)
    (decision,) = found[1].graphs[0].merges
    assert decision.merged and apart > merged
    assert apart - merged == pytest.approx(decision.separate_seconds - decision.merged_seconds)
    costs, sizes = cost_model(hardware.find("h100"), None), ((8192, 1024, 1280), (1280, 8192, 1024))
    assert decision.roles == ("output", "grad_weight")
    assert decision.merged_seconds == pytest.approx(sum(costs.gemm_seconds(*each, True) for each in sizes))


def test_a_filtered_matmul_has_a_time_and_no_prediction():
    e = f8fx.explain(meta_mlp(), meta_input(16384, 2048), filter_fqns=["down"])
    down = [row for row in e.rows if row.fqn == "down"]
    assert len(down) == 3
    assert all(row.reason == "filtered" and row.share and row.speedup is None for row in down)


def test_without_gradients_only_the_forward_is_traced():
    with torch.no_grad():
        e = f8fx.explain(meta_mlp(), meta_input(16384, 2048))
    assert not e.training and [row.role for row in e.rows] == ["output", "output"]
    assert e.saved_bytes_high == e.saved_bytes_float8 == 0
    assert not f8fx.explain(meta_mlp().requires_grad_(False), meta_input(64, 2048)).training


def thresholds(model, tokens, width, **options):
    """By layer and role: whether it was converted, and from how many rows on it is said to pay."""
    e = f8fx.explain(model, meta_input(tokens, width), dynamic=True, **options)
    assert all(isinstance(row.m, str) or isinstance(row.k, str) for row in e.rows)
    found = {}
    for row in e.rows:
        (said,) = re.findall(r"pays for M >= (\d+)|(never pays)", row.detail)
        found[row.fqn, row.role] = row.converted, int(said[0]) if said[0] else None
    return found


@pytest.mark.parametrize("recipe", ["tensorwise", *seldom("rowwise")])
def test_a_dynamic_size_gets_the_threshold_of_its_decision(recipe):
    """Layers that share their input's casts, a small one beside a large one: each has a threshold of its own."""

    class Projections(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k = nn.Linear(4096, 4096, bias=False), nn.Linear(4096, 1024, bias=False)

        def forward(self, x):
            return self.q(x).sin().sum() + self.k(x).cos().sum()

    with torch.device("meta"):
        model = Projections().to(bf16)
    at = {tokens: thresholds(model, tokens, 4096, recipe=recipe) for tokens in (512, 2048, 16384)}
    for tokens, found in at.items():
        for converted, rows in found.values():
            assert converted == (rows is not None and rows <= tokens)
    # and it is where the decision changes
    (layer, (_, rows)) = next(item for item in at[2048].items() if item[1][1] not in (None, 16))
    below, there = (thresholds(model, tokens, 4096, recipe=recipe)[layer] for tokens in (rows - 16, rows))
    assert not below[0] and there == (True, rows)


def test_what_never_pays_says_so():
    layer = nn.Linear(16, 16, device="meta", dtype=bf16).requires_grad_(False)
    assert list(thresholds(layer, 4096, 16).values()) == [(False, None)]


def test_a_marked_dimension_is_dynamic_too():
    x = meta_input(16384, 2048)
    torch._dynamo.mark_dynamic(x, 0)
    assert isinstance(f8fx.explain(meta_mlp(), x).rows[0].m, str)


def test_attention_is_traced_as_the_target_runs_it():
    model, tokens = tiny_decoder()
    e = f8fx.explain(model, tokens)
    assert not any("batched" in row.reason for row in e.rows)
    masked = f8fx.explain(
        lambda q, mask: F.scaled_dot_product_attention(q, q, q, mask),
        torch.ones(1, 2, 8, 16, requires_grad=True),
        torch.ones(8, 8, dtype=torch.bool),
    )
    assert masked.training and not masked.rows


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, None])
def test_autocast_for_cuda_is_explained_on_a_machine_without(dtype: torch.dtype | None):
    """In the dtype that is asked for, or CUDA's own."""
    seen = set[torch.dtype]()

    def forward(x: Tensor, weight: Tensor) -> Tensor:
        with torch.autocast("cuda", dtype):
            return x @ weight

    def filter_fn(fqn: str, gemm: GemmInfo) -> bool:
        seen.add(gemm.dtype)
        return True

    weight = torch.empty(2048, 4096, requires_grad=True, device="meta")
    with torch.device("meta"):
        x = torch.empty(16384, 2048)
    e = f8fx.explain(forward, x, weight, filter_fn=filter_fn)
    assert e.rows[0].converted, e.rows[0]
    assert seen == {dtype or torch.float16}


def test_checkpointed_regions_are_traced_as_on_the_target():
    """Autocast for CUDA inside of one, and attention with dropout, which a CPU decomposes."""

    def cast(x: Tensor, weight: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return x @ weight

    def attend(x: Tensor, weight: Tensor) -> Tensor:
        heads = (x @ weight).view(2, 64, 4, 16).transpose(1, 2)
        return F.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.1)

    weight = torch.empty(64, 64, requires_grad=True)
    for function, x in ((cast, torch.empty(128, 64)), (attend, torch.empty(2, 64, 64))):
        if function is attend:
            x, weight = x.bfloat16(), weight.detach().bfloat16().requires_grad_()
        plain = f8fx.explain(function, x, weight, select="all")
        inside = f8fx.explain(
            lambda *args, function=function: checkpoint(function, *args, use_reentrant=False),
            *(x, weight),
            select="all",
        )
        assert plain.converted == plain.total == inside.converted == inside.total > 0


def test_a_batched_matmul_takes_the_time_of_all_its_members():
    model = cost_model(hardware.find("h100"), None)
    for batch in (2, 16):
        (row,) = f8fx.explain(lambda x: x @ x, meta_input(batch, 4096, 4096)).rows
        assert not row.converted
        assert row.high_seconds == model.gemm_seconds(batch * 4096, 4096, 4096, float8=False)


def test_saved_bytes_by_hand():
    tokens, width, hidden = 16384, 2048, 4096
    x = meta_input(tokens, width)
    e = f8fx.explain(meta_mlp(width=width, hidden=hidden), x)
    # in bfloat16 x, which some other graph has made, and relu's output, which the backward of `down` and of relu read
    assert e.saved_bytes_high == 2 * tokens * (width + hidden)
    # of x what the gradient of `up` reads; scales, and their reciprocals, of two inputs and the weight of `down`
    assert e.saved_bytes_float8 - 4 * 2 * 3 <= tokens * width + 2 * tokens * hidden <= e.saved_bytes_float8
    none = f8fx.explain(meta_mlp(width=width, hidden=hidden), x, filter_fqns=["up", "down"])
    assert none.saved_bytes_float8 == none.saved_bytes_high


def test_without_a_target_it_is_the_device_of_the_matmuls():
    """Of which the graph before the break has none."""

    def model(x: Tensor, w: Tensor) -> Tensor:
        x = x.sin()
        torch._dynamo.graph_break()
        return x @ w

    e = f8fx.explain(model, meta_input(32, 64), meta_input(64, 48), target=None)
    assert len(e.graphs) == 2 and e.target == "cpu"


def test_scales_are_applied_where_the_user_wants_them():
    def seconds(**options):
        e = f8fx.explain(meta_mlp(), meta_input(32768, 2048), recipe="rowwise", target="h200", **options)
        return e.float8_seconds

    assert seconds() == seconds(rowwise_scales="in_gemm") < seconds(rowwise_scales="torchao")


def test_what_modules_hold_is_not_saved():
    """Neither a weight nor a buffer takes memory of its own where the backward reads it."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2048, 4096, bias=False)
            self.register_buffer("mask", torch.ones(4096, 4096))

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) * self.mask

    with torch.device("meta"):
        model = Masked().bfloat16()
    x = meta_input(4096, 2048).requires_grad_()
    assert f8fx.explain(model, x).saved_bytes_high == 2 * x.numel()


def test_bytes_in_collectives():
    dist = pytest.importorskip("torch.distributed")
    from torch.distributed._functional_collectives import all_gather_tensor
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def forward(x: Tensor) -> Tensor:
        return all_gather_tensor(x, 0, group=dist.group.WORLD) * 2

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        e = f8fx.explain(forward, torch.ones(8, 16))
    finally:
        dist.destroy_process_group()
    assert e.communicated_bytes_high == e.communicated_bytes == 4 * 8 * 16 * 4
    assert f8fx.explain(Mlp(16, 16), torch.ones(4, 16)).communicated_bytes == 0


def test_gathers_are_shown_with_their_reasons():
    dist = pytest.importorskip("torch.distributed")
    from torch.distributed._functional_collectives import all_gather_tensor
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def forward(x: Tensor, weight: Tensor, other: Tensor) -> Tensor:
        weight, other = (all_gather_tensor(w, 0, group=dist.group.WORLD) for w in (weight, other))
        return F.linear(x, weight) + F.linear(x, other * 2)

    args = [meta_input(2048, 1024), *(meta_input(256, 1024) for _ in range(2))]
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        e = f8fx.explain(forward, *args, select="all")
    finally:
        dist.destroy_process_group()
    text = io.StringIO()
    e.print(text)
    printed = " ".join(text.getvalue().split())
    assert "(no module) 1024 x 1024 bfloat16 4 yes moved: 2097152 bytes become" in printed
    assert "(no module) 1024 x 1024 bfloat16 4 - no float8 matmul reads it: mul" in printed
    assert 'id="gathers"' in e.to_html() and "no float8 matmul reads it: mul" in e.to_html()
    none = f8fx.explain(Mlp(16, 16), torch.ones(4, 16))
    assert 'id="gathers"' not in none.to_html()


def test_merging_is_predicted():
    """q, k, v and gate, up are one gemm each, in every role: 12 gemms for 21 matmuls."""
    with torch.device("meta"):
        block = DecoderBlock(DecoderConfig.named("llama3_8b")).bfloat16()
        x = torch.empty(1, 8192, 4096, dtype=torch.bfloat16)
    merged, apart = (f8fx.explain(block, x, merge=mode) for mode in ("auto", "never"))
    assert (merged.converted, merged.gemms, apart.gemms) == (21, 12, 21)
    assert [merge.layers for merge in merged.merges] == [
        ("attention.q_proj", "attention.k_proj", "attention.v_proj"),
        ("ffn.gate_proj", "ffn.up_proj"),
    ]
    gain = sum(merge.separate_seconds - merge.merged_seconds for merge in merged.merges)
    assert gain > 0 and apart.float8_seconds - merged.float8_seconds == pytest.approx(gain)
    assert merged.line().endswith("in float8 (tensorwise) on h100, merged into 12 gemms")
    why = {row.fqn: row.merge for row in merged.rows}
    assert why["attention.q_proj"] == "merged with k_proj, v_proj" and why["attention.o_proj"] == ""
    assert {row.merge for row in apart.rows} == {"", "not merged: switched off"}

    text = io.StringIO()
    merged.print(text)
    assert "merged with k_proj, v_proj" in text.getvalue() and "run as 12 float8 gemms" in text.getvalue()
    assert (
        "merged with k_proj, v_proj" in merged.to_html() and "float8 gemms, after merging" in merged.to_html()
    )
    assert "after merging" not in apart.to_html()
    assert merged.to_dict()["totals"]["gemms"] == 12
    assert Explanation.from_dict(json.loads(merged.to_json())) == merged
