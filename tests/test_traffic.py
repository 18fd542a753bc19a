"""Kernels and bytes of a block as counted without a GPU: the figures that have been reached, and how they are counted."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from benchmarks import floor
from benchmarks.blocks import rotate
from benchmarks.rereads import Tensor, inlined, reread_bytes, scattered_bytes, strided_bytes
from f8fx.recipe import PRESETS

pytest.importorskip("triton")
traffic = pytest.importorskip("benchmarks.traffic")
codegen = pytest.importorskip("benchmarks.codegen")

GB, MB = 1e9, 1e6


_README = Path(__file__).parents[1] / "README.md"


def published():
    """The rows of README's table: recipe, what is saved, and the figures as they stand there."""
    row = r'^\| (\w+)(?:: (\w+)(?:, `save="(\w+)"`)?)? \| (\S+) \| (\S+) \| (\S+) \| (\S+) \| (\S+) \|$'
    rows = re.findall(row, _README.read_text(), re.MULTILINE)
    return {
        traffic.Case(recipe if by else None, save or "lean", by or "f8fx"): figures
        for recipe, by, save, *figures in rows
    }


def test_readme_has_every_recipe():
    assert {(case.recipe, case.by) for case in published()} == {
        (case.recipe, case.by) for case in traffic.CASES
    }


@pytest.mark.skipif(not torch.__version__.startswith("2.13"), reason="what is fused is a release's own")
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=pytest.mark.long)
        if case.by == "torchao" or case.save == "fast" or case.recipe == "rowwise_with_gw_hp"
        else case
        for case in traffic.CASES
    ],
    ids=lambda case: case.label,
)
def test_a_llama_block_of_8192_tokens(case):
    """The goals hold, and what README says is what is counted."""
    row = traffic.measure("llama", 8192, [case])[case.label]
    for key, goal in row["goals"].items():
        assert row[key] <= goal, key
    # q, k and v are one gemm, gate and up another; each has three roles
    assert row["gemms"] == (12 if case.recipe and case.by == "f8fx" else 21)
    # nothing is counted that would have to be faster than possible
    assert row["floor_bytes"] <= row["bytes"] <= row["est_bytes"]
    figures = [format(row["est_bytes"] / GB, ".2f"), str(row["triton_kernels"]), str(row["gemms"])]
    figures += [format(row[key] / MB, ".0f") for key in ("saved_bytes", "peak_bytes")]
    assert published().get(case, figures) == figures


@pytest.mark.long
@pytest.mark.skipif(not torch.__version__.startswith("2.13"), reason="what is fused is a release's own")
@pytest.mark.parametrize("recipe", PRESETS)
def test_a_llama_block_of_sequences_of_any_length(recipe):
    """What README says of it, and no more saved than of one length."""
    case = traffic.Case(recipe)
    row = traffic.measure("llama", 8192, [case], dynamic=True)[case.label]
    goal = traffic.GOALS[case.label]
    assert row["saved_bytes"] <= goal["saved_bytes"] and row["gemms"] == 12
    (text,) = re.findall(
        r"^- Sequences whose length.*?(?=^- )", _README.read_text(), re.MULTILINE | re.DOTALL
    )
    (said,) = re.findall(rf"(\d+) \(`{recipe}`\)", text)
    assert row["triton_kernels"] == int(said)
    assert row["est_bytes"] / GB == pytest.approx(float(published()[case][0]), abs=0.015)


@pytest.mark.long
@pytest.mark.parametrize("model", ["mlp", "norm_linear"])
def test_the_command_counts_every_recipe(model, tmp_path, capsys):
    path = tmp_path / "traffic.json"
    assert traffic.main(["--model", model, "--sequence", "256", "--json", str(path)]) == 0
    printed = capsys.readouterr().out
    result = json.loads(path.read_text())
    assert (result["model"], result["sequence"]) == (model, 256)
    assert list(result["rows"]) == [case.label for case in traffic.CASES]
    for label, row in result["rows"].items():
        assert label in printed
        assert row["triton_kernels"] > 0 and row["gemms"] > 0 and row["goals"] == {}
        assert 0 < row["bytes"] <= row["est_bytes"]
    assert "est GB" in printed and "floor GB" in printed and "strided GB" in printed


def test_goals_stand_beside_the_figures_they_were_set_for():
    case = traffic.Case("tensorwise")
    row = {"triton_kernels": 30, "saved_bytes": 777_060_440, "gemms": 12, "strided_bytes": 0}
    row |= {"bytes": 7_330_988_260, "est_bytes": 7_330_988_260, "floor_bytes": 7_159_676_928}
    row["peak_bytes"] = 1_662_000_000
    assert traffic.goals("llama", 4096, case) == traffic.goals("mlp", 8192, case) == {}
    row["goals"] = traffic.goals("llama", 8192, case)
    (cells,) = traffic.grid("llama", 8192, {case.label: row}).rows
    assert cells == (
        "tensorwise, lean",
        "30 (<= 30)",
        "7.33",
        "7.33 (<= 7.40)",
        "0.00",
        "7.16",
        "777 (<= 777)",
        "1662",
        "12 (<= 12)",
    )


def test_the_floor_line_by_line():
    """One token, so that sizes can be checked by eye: 4096 elements, or 14336 of them in the MLP."""
    lines = [
        f"{line.phase:8} {line.read:10,} {line.written:10,}  {line.name}"
        for line in floor.lines("mlp", 1, "tensorwise")
    ]
    assert lines == [
        "forward  352,321,536          0  amaxes of weights",
        "forward  352,321,536 176,160,768  casts of weights",
        "backward 352,321,536 176,160,768  transposed casts of weights",
        "forward       8,192          0  norm: amax",
        "forward       8,192      4,096  norm: cast",
        "forward      57,344          0  SwiGLU: amax",
        "forward      57,344     14,336  SwiGLU: cast",
        "forward      16,384      8,192  residual",
        "backward      8,192          0  gradient of the output: amax",
        "backward      8,192      8,192  gradient of the output: casts",
        "backward     86,016          0  SwiGLU backward: amax",
        "backward     86,016     71,680  SwiGLU backward: casts, and SwiGLU transposed",
        "backward     24,576     12,288  norm backward",
    ]


@pytest.mark.parametrize(
    ("recipe", "save", "x", "h", "rotated", "qkv", "head", "weights"),
    [
        (None, "lean", 40, 16, 8, 0, 8, 0),
        (None, "fast", 40, 16, 8, 0, 8, 0),
        ("tensorwise", "lean", 56, 26, 4, 6, 12, 8),
        ("tensorwise", "fast", 54, 26, 4, 6, 12, 6),
        ("rowwise", "lean", 50, 22, 4, 6, 12, 6),
        ("rowwise", "fast", 50, 22, 4, 6, 12, 6),
        ("rowwise_with_gw_hp", "lean", 43, 19, 6, 3, 8, 6),
        ("rowwise_with_gw_hp", "fast", 43, 19, 6, 3, 8, 6),
    ],
)
def test_the_floor_of_a_block_by_hand(recipe, save, x, h, rotated, qkv, head, weights):
    """How often a byte is moved per element of each tensor, kernel by kernel with pencil and paper."""
    per_token = x * 4096 + h * 14336 + rotated * (32 + 8) * 128 + qkv * (32 + 2 * 8) * 128 + head * 128
    of_weights = weights * 4096 * (4096 + 2 * 1024 + 4096 + 3 * 14336)
    for tokens in (0, 1, 8192):
        assert floor.total("llama", tokens, recipe, save) == tokens * per_token + of_weights


@pytest.mark.parametrize(("recipe", "first"), [("tensorwise", 0), ("rowwise", 6144)])
def test_the_floor_of_gradients_of_queries_keys_and_values(recipe, first):
    """Rowwise, the row-wise cast is written in the first reading; one token has 6144 of them."""
    rope = [
        (line.read, line.written)
        for line in floor.lines("llama", 1, recipe)
        if line.name.startswith("RoPE backward")
    ]
    read = 2 * 6144 + 4 * 128
    assert rope == [(read, first), (read, 2 * 6144 - first)]


@pytest.mark.parametrize(
    ("recipe", "x", "y", "weights"),
    [
        (None, 10, 10, 0),
        ("tensorwise", 12, 14, 8),
        ("rowwise", 10, 14, 6),
        ("rowwise_with_gw_hp", 11, 11, 6),
    ],
)
def test_the_floor_of_a_layer_by_hand(recipe, x, y, weights):
    per_token, of_weights = x * 4096 + y * 8192, weights * 4096 * 8192
    assert floor.total("norm_linear", 16, recipe) == 16 * per_token + of_weights


def test_the_floor_of_more_precision_or_more_saved_bytes():
    def total(recipe, save="lean"):
        return floor.total("llama", 8192, recipe, save)

    assert total(None) < total("rowwise_with_gw_hp") < total("rowwise") < total("tensorwise")
    assert total("tensorwise", "fast") < total("tensorwise")


_ROWS = """
@triton_heuristics.reduction(
def kernel(in_ptr0, out_ptr0):
    r0_numel = {length}
    for r0_offset in tl.range(0, r0_numel, R0_BLOCK):
        tmp0 = tl.load(in_ptr0 + ({first}), r0_mask & xmask, other=0.0).to(tl.float32)
    for r0_offset in tl.range(0, r0_numel, R0_BLOCK):
        tmp1 = tl.load(in_ptr0 + ({first}), r0_mask & xmask, other=0.0).to(tl.float32)
        tl.store(out_ptr0 + ({stored}), tmp9, r0_mask & xmask)
"""
_COMBO = """
@triton_heuristics.pointwise(
def kernel(in_ptr0):
    if pid < num_xblocks_0:
        tmp0 = tl.load(in_ptr0 + ({first}), xmask)
    elif pid < num_xblocks_1:
        tmp1 = tl.load(in_ptr0 + ({second}), xmask)
"""


class TwoLayers(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4096, 8192, bias=False), nn.Linear(8192, 1024, bias=False)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


def test_the_peak_tensor_by_tensor():
    """Parameters, input and the gradient that arrives do not count, nor what is written over something else."""
    x = torch.empty(2048, 4096, dtype=torch.bfloat16, device="meta", requires_grad=True)
    graphs, _ = codegen.halves(TwoLayers().to(torch.bfloat16).to("meta"), x, float8=False)
    with codegen.h100():
        forward, backward = (codegen.generate(half, index > 0) for index, half in enumerate(graphs))
    hidden, result, grad_input = (2 * 2048 * size for size in (8192, 1024, 4096))
    grads = 2 * 8192 * (4096 + 1024)  # of both weights
    assert forward.peak == hidden + result
    assert backward.peak == hidden + grads + grad_input  # hidden: its gradient


def test_a_graph_that_runs_nothing_takes_nothing():
    graph = make_fx(lambda x: x.view(-1), tracing_mode="fake")(torch.empty(4, 8))
    with codegen.h100():
        generated = codegen.generate(graph, False)
    assert not generated.kernels and generated.peak == 0


def test_parts_that_are_functions_are_read_in_their_places():
    """As torch 2.15 writes them; two parts may be one function."""
    source = """
@triton.jit
def kernel_body_0(in_ptr0, out_ptr0, x_pid_offset, XBLOCK : tl.constexpr):
    x0 = x_pid_offset * XBLOCK

    tmp0 = tl.load(in_ptr0 + (x0), xmask)
    tl.store(out_ptr0 + (x0), tmp0, xmask)
@triton_heuristics.pointwise(
@triton.jit
def kernel(in_ptr0, in_ptr1, out_ptr0, out_ptr1, XBLOCK_0 : tl.constexpr, XBLOCK_1 : tl.constexpr):
    if pid < num_blocks_0:
        kernel_body_0(in_ptr0, out_ptr0, x_pid_offset, XBLOCK_0)
    elif pid < num_blocks_1:
        kernel_body_0(in_ptr0, out_ptr1, x_pid_offset, XBLOCK_1)
"""
    text = inlined(source)
    assert text.count("tl.load(in_ptr0 + (x0)") == 2 and "tl.store(out_ptr1 + (x0)" in text
    assert "_body_" not in text and inlined(text) == text
    assert reread_bytes(source, {"in_ptr0": Tensor(64 << 20, 2)}) == 64 << 20


@pytest.mark.parametrize(
    "first, length, size, again",
    [
        ("r0_1 + 4096*x0", 4096, 64 << 20, 0),  # 264 rows of 8 kB are in flight: in the cache
        ("r0_1 + 131072*x0", 131072, 64 << 20, 64 << 20),  # rows of 256 kB are not
        ("x0 + 4096*r0_1", 8192, 64 << 20, 64 << 20),  # columns: all of the tensor in between
        ("x0 + 4096*r0_1", 8192, 16 << 20, 0),  # but the tensor is in the cache
    ],
)
def test_a_second_loop_reads_again_what_the_cache_does_not_hold(first, length, size, again):
    source = _ROWS.format(first=first, length=length, stored=first)
    assert reread_bytes(source, {"in_ptr0": Tensor(size, 2)}) == again
    assert reread_bytes(source, {}) == 0


@pytest.mark.parametrize("second, again", [("x1", 64 << 20), ("4096 + x1", 0)])
def test_parts_of_a_combo_kernel_read_on_their_own(second, again):
    source = _COMBO.format(first="x0", second=second)
    assert reread_bytes(source, {"in_ptr0": Tensor(64 << 20, 2)}) == again


@pytest.mark.parametrize("stored, strided", [("x0 + 8192*r0_1", 32 << 20), ("r0_1 + 4096*x0", 0)])
def test_a_reduction_that_stores_across_its_rows(stored, strided):
    source = _ROWS.format(first="r0_1 + 4096*x0", length=4096, stored=stored)
    tensors = {"in_ptr0": Tensor(64 << 20, 2), "out_ptr0": Tensor(32 << 20, 1)}
    assert strided_bytes(source, tensors) == strided
    assert strided_bytes(source.replace("reduction(", "pointwise("), tensors) == 0


_SCATTERED = """
@triton_heuristics.reduction(
def kernel(in_ptr0):
    if pid < num_xblocks_0:
        x0 = (xindex % 32)
        x1 = xindex // 32
        r0_2 = r0_index
        tmp4 = x0 < 16
        tmp0 = tl.load(in_ptr0 + ({index}), r0_mask & tmp4, eviction_policy='evict_last', other=0.0)
"""


@pytest.mark.parametrize(
    "index, scattered",
    [
        ("x1 + 4096*r0_2 + 1048576*x0", True),  # splits of a column side by side, and rows 8 kB apart
        ("128*(x1 // 128) + 4096*r0_2 + 1048576*x0 + ((x1 % 128))", True),
        ("32*x1 + x0 + 131072*r0_2", False),
        ("r0_2 + 4096*x0 + 131072*x1", False),
        ("4096*x1 + x0 // 4 + 131072*r0_2", False),  # four read one
        ("x0 + tmp4*r0_2", False),  # where, is in memory
    ],
)
def test_a_load_whose_neighbours_are_far_apart(index, scattered):
    source = _SCATTERED.format(index=index)
    assert scattered_bytes(source, {"in_ptr0": Tensor(64 << 20, 2)}) == scattered * (64 << 20)
    assert scattered_bytes(source, {"in_ptr0": Tensor(16 << 20, 2)}) == 0  # out of the cache
    assert scattered_bytes(source, {}) == 0


@pytest.mark.long
@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise"])
def test_nothing_is_read_or_stored_against_its_order(recipe):
    """On any release: RoPE's gradients were, on torch 2.11."""
    row = traffic.count(*traffic.block("llama", 8192), traffic.Case(recipe))
    assert row["strided_bytes"] == 0


@pytest.mark.long
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_an_odd_number_of_tokens(recipe):
    """Float8 copies are padded for the gradient of the weight: by zeros beside them, not by kernels of their own."""
    case = traffic.Case(recipe)
    even, odd = (traffic.count(*traffic.block("mlp", tokens), case) for tokens in (8192, 8191))
    assert odd["est_bytes"] <= 1.05 * even["est_bytes"]
    assert odd["triton_kernels"] <= even["triton_kernels"] + 3


class Between(nn.Module):
    """A linear layer whose input and result other kernels compute and read."""

    def __init__(self, k: int, n: int):
        super().__init__()
        self.linear = nn.Linear(k, n, bias=False, dtype=torch.bfloat16)

    def forward(self, x):
        return torch.relu(self.linear(torch.relu(x)))


@pytest.mark.parametrize("k, n", [(1024, 4090), pytest.param(1020, 4096, marks=pytest.mark.long)])
def test_padding_moves_no_more_than_results_without_it(k, n):
    """What the cost model counts of it (``cut_bytes`` of :class:`f8fx.plan.PlannedGemm`): operands are padded where they are cast."""

    def moved(k: int, n: int) -> int:
        with torch.device("meta"):
            layer, x = Between(k, n), torch.zeros(2048, k, dtype=torch.bfloat16, requires_grad=True)
        return traffic.count(layer, (x,), traffic.Case("tensorwise"))["est_bytes"]

    copied = 2048 * n * (n % 16 > 0) + (2048 + n) * k * (
        k % 16 > 0
    )  # product, or gradients of input and weight
    assert moved(k, n) <= moved(1024, 4096) + 2 * 2 * copied


@pytest.mark.long
def test_more_tokens_are_no_more_launches():
    """Amaxes of rows are reduced by one kernel, however many rows there are."""
    case = traffic.Case("tensorwise")
    few, many = (
        traffic.count(*traffic.block("mlp", tokens), case)["triton_kernels"] for tokens in (8192, 65536)
    )
    assert many <= few + 2


class Head(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(1024, 65536, bias=False, dtype=torch.bfloat16)

    def forward(self, x, targets, weights):
        logits = self.head(x).float()
        is_target = torch.arange(logits.shape[-1], device=targets.device) == targets[:, None]
        losses = torch.logsumexp(logits, -1) - (logits * is_target).sum(-1)
        return (losses * weights).sum() / weights.sum()


def test_the_gradient_of_a_cross_entropy_is_not_written_in_high_precision():
    """It reads the logits and some numbers and vectors, so its amax and its casts may read the logits instead."""
    tokens, width, vocabulary = 2048, 1024, 65536
    with torch.device("meta"):
        args = (
            torch.zeros(tokens, width, dtype=torch.bfloat16, requires_grad=True),
            torch.zeros(tokens, dtype=torch.int64),
            torch.ones(tokens),
        )
        row = traffic.count(Head(), args, traffic.Case("tensorwise"))
    logits, weight, x = tokens * vocabulary, width * vocabulary, tokens * width
    # read for the loss, the amax and the casts, and two copies written; amax, cast and transposed cast of the others
    assert row["est_bytes"] < 1.02 * (3 * 2 * logits + 2 * logits + 8 * weight + 8 * x)


class NormedHeads(torch.nn.Module):
    """Projections to heads that are normalized and rotated before attention, as Qwen3's."""

    def __init__(self):
        super().__init__()
        self.norms = torch.nn.ModuleList(torch.nn.RMSNorm(128) for _ in range(2))
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4096, n, bias=False) for n in (4096, 1024, 1024))

    def forward(self, x, cos, sin):
        q, k, v = (layer(x).unflatten(-1, (-1, 128)) for layer in self.layers)
        q, k = (rotate(norm(y), cos, sin) for norm, y in zip(self.norms, (q, k), strict=True))
        heads = (t.transpose(1, 2) for t in (q, k, v))
        return torch.ops.aten._scaled_dot_product_flash_attention(*heads, 0.0, True)[0]


@pytest.mark.long
@pytest.mark.skipif(not torch.__version__.startswith("2.13"), reason="what is fused is a release's own")
@pytest.mark.parametrize("recipe", PRESETS)
def test_norms_of_heads(recipe):
    """The gradients of q, k and v are written once, in bfloat16; in float32 and twice they were more than torchao moves."""
    tokens = 8192
    with torch.device("meta"):
        model = NormedHeads().to(torch.bfloat16)
        x = torch.empty(1, tokens, 4096, dtype=torch.bfloat16, requires_grad=True)
        args = (x, torch.empty(1, tokens, 1, 64), torch.empty(1, tokens, 1, 64))
    ours, theirs = (traffic.count(model, args, traffic.Case(recipe, by=by)) for by in ("f8fx", "torchao"))
    assert ours["est_bytes"] < theirs["est_bytes"] and ours["triton_kernels"] < theirs["triton_kernels"]
