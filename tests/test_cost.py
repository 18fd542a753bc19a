"""The cost model against what torchao publishes for H100, and against its own promises."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import json
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from f8fx import hardware
from f8fx.calibration import default_calibration, own_calibration
from f8fx.cost import MAX_M, CostModel, K, M, N
from f8fx.passes.worth import cost_model
from f8fx.plan import PlannedGemm, PlannedOperand, Verdict, plan
from f8fx.recipe import PRESETS, ROLES, GemmSpec, Recipe, Role
from tests.long import seldom

PUBLISHED = json.loads((Path(__file__).parent / "data" / "torchao_h100.json").read_text())
H100 = CostModel(hardware.find("h100"))

# The machine of the published tables: Meta's H100 has 2.4 TB/s, not the datasheet's 3.35.
META_H100 = CostModel(
    dataclasses.replace(hardware.find("h100"), memory_bandwidth=PUBLISHED["memory_bandwidth"])
)
ROWWISE_TABLE = [
    (m, k, 1024 << column, speedup)
    for m, k, *speedups in PUBLISHED["rowwise"]["rows"]
    for column, speedup in enumerate(speedups)
]
TENSORWISE_POINTS = [tuple(row) for row in PUBLISHED["tensorwise"]["rows"]]


def _near_tie(speedup: float) -> bool:
    return 0.95 <= speedup <= 1.05


def _with_norm_and_sigmoid(m: int, k: int, n: int, recipe: Recipe, model: CostModel = META_H100) -> float:
    """Predicted speedup of what the tables time: LayerNorm -> Linear -> Sigmoid, forward + backward.

    The norm moves 12 bytes per element of the input (2 in, 2 out; backward 4 in, 2 out and a second
    read of 2), the sigmoid 10 per element of the output (2 in, 2 out; backward 4 in, 2 out), in five
    kernels.
    """
    layer, hw = model.layer(m, k, n, recipe), model.hardware
    bandwidth = hw.memory_bandwidth * model.calibration.memory_efficiency
    around = (12 * m * k + 10 * m * n) / bandwidth + 5 * hw.launch_overhead
    return (around + layer.high_seconds) / (around + layer.float8_seconds)


# --- the published tables


def test_every_verdict_of_the_rowwise_table() -> None:
    """216 shapes; no exception is needed. Near ties (0.95 to 1.05) may go either way."""
    recipe = Recipe.named("rowwise")
    wrong = [
        (m, k, n, speedup)
        for m, k, n, speedup in ROWWISE_TABLE
        if not _near_tie(speedup) and META_H100.layer(m, k, n, recipe).pays != (speedup > 1)
    ]
    assert len(ROWWISE_TABLE) == 216
    assert wrong == []


# What f8fx decides by that is not as it was where the table was measured; why it may convert what lost there.
DIFFERENCES = {
    "measured": "transposed copies are written by tiled kernels, not element by element, and gemms are CUDA 13's",
    "rescales": "gemms apply their scales themselves (CUDA 12.9 on), no kernel after them does, but for the largest",
    "bandwidth": "the datasheet's memory, not the 2.4 TB/s of the machine that was measured on",
}


def _decided_by(differences: Sequence[str]) -> CostModel:
    """The published machine and kernels, but for some of the differences; with all it is what f8fx decides by."""
    hw = hardware.find("h100") if "bandwidth" in differences else META_H100.hardware
    calibration = own_calibration(hw) if "measured" in differences else default_calibration(hw)
    return CostModel(hw, calibration, rescales=None if "rescales" in differences else True)


def _reason(m: int, k: int, n: int, recipe: Recipe, pays: bool) -> tuple[str, ...] | None:
    """The fewest differences under which the model gives this verdict; ``None``: under none alone or together."""
    some = (
        found for count in range(len(DIFFERENCES) + 1) for found in itertools.combinations(DIFFERENCES, count)
    )
    return next((found for found in some if _decided_by(found).layer(m, k, n, recipe).pays == pays), None)


def test_what_decides_is_the_published_table_and_the_differences_that_are_written_down() -> None:
    """Every verdict is the table's or follows from one of the differences, or from several together.

    All are the same way round: float8 where torchao's rowwise float8 lost.
    """
    recipe = Recipe.named("rowwise")
    decides = cost_model(hardware.find("h100"), rescales=None)
    assert decides.calibration == _decided_by(tuple(DIFFERENCES)).calibration
    reasons: Counter[tuple[str, ...] | None] = Counter()
    for m, k, n, speedup in ROWWISE_TABLE:
        if _near_tie(speedup) or decides.layer(m, k, n, recipe).pays == (speedup > 1):
            continue
        assert speedup < 1
        reasons[_reason(m, k, n, recipe, True)] += 1
    assert dict(reasons) == {
        ("measured",): 1,
        ("bandwidth",): 9,
        ("measured", "rescales"): 11,
        ("measured", "bandwidth"): 6,
        ("rescales", "bandwidth"): 2,
        ("measured", "rescales", "bandwidth"): 10,
    }


def test_speedups_of_the_rowwise_table() -> None:
    """Mean absolute error 0.047 when the constants were fitted; 0.06 leaves room for rounding them.

    The one point off by more than 0.2 is 32768^3: published 1.52, though every smaller shape beside it has
    1.70 or more, predicted 1.91. A monotonic model cannot follow that.
    """
    recipe = Recipe.named("rowwise")
    errors = {
        (m, k, n): abs(_with_norm_and_sigmoid(m, k, n, recipe) - speedup)
        for m, k, n, speedup in ROWWISE_TABLE
    }
    assert sum(errors.values()) / len(errors) < 0.06
    assert [shape for shape, error in errors.items() if error > 0.2] == [(32768, 32768, 32768)]


@pytest.mark.parametrize(("m", "k", "n", "speedup"), TENSORWISE_POINTS)
def test_tensorwise_points(m: int, k: int, n: int, speedup: float) -> None:
    """All that can be read of the tensorwise tables. The tolerance is wide: the points are from 2024, when
    Inductor's kernels were others, and were not fitted to."""
    recipe = Recipe.named("tensorwise")
    assert META_H100.layer(m, k, n, recipe).pays == (speedup > 1)
    assert _with_norm_and_sigmoid(m, k, n, recipe) == pytest.approx(speedup, abs=0.16)


@pytest.mark.parametrize(("size", "bf16", "float8"), PUBLISHED["square_gemms"]["rows"])
def test_square_gemm_seconds(size: int, bf16: float, float8: float) -> None:
    """Within 35%: the measured points do not lie on a smooth curve (at 1024 both are slower than any
    saturation model that fits the rest, at 2048 bfloat16 is faster)."""
    assert 3 * META_H100.gemm_seconds(size, size, size, False) == pytest.approx(bf16, rel=0.35)
    assert 3 * META_H100.gemm_seconds(size, size, size, True) == pytest.approx(float8, rel=0.35)


# Where the cost model and torchao's auto filter differ at M = 8192 or 16384, by (K, N), and why.
# All of the rowwise ones are ties that we leave in bfloat16.
FILTER_EXCEPTIONS = {
    "rowwise": {
        (2048, 8192): "published 1.01 and 1.05, predicted 0.90 and 0.97",
        (2048, 16384): "published 1.03 at M = 8192, predicted 0.99",
        (4096, 4096): "published 1.00 and 1.02, predicted 0.88 and 0.95",
        (8192, 4096): "published 1.05 at M = 8192, predicted 0.96",
    },
    # The filter, "simple heuristics" by its own words, knows no M and lets K be as small as 16 once N
    # exceeds 1024. At K = 1024 casting grad_output [M, N] twice costs more than 1024
    # multiply-adds per element of it gain, and rowwise the published table agrees: no K = 1024 pays.
    "tensorwise": {
        (1024, 2048): "predicted 0.81 and 0.86",
        (1024, 4096): "predicted 0.89 and 0.93",
        (1024, 8192): "predicted 0.94 and 0.98",
        (1024, 16384): "predicted 0.97 at M = 8192",
    },
}
FILTERS = {
    "tensorwise": lambda k, n: not (k <= 4096 and n <= 1024),
    "rowwise": lambda k, n: not (n <= 2048 or k <= 1024 or (n <= 4096 and k <= 2048)),
}


@pytest.mark.parametrize("name", list(FILTERS))
def test_auto_filter(name: str) -> None:
    sizes = (1024, 2048, 4096, 8192, 16384)
    differ = {
        (k, n)
        for m in (8192, 16384)
        for k in sizes
        for n in sizes
        if META_H100.layer(m, k, n, Recipe.named(name)).pays != FILTERS[name](k, n)
    }
    assert differ == set(FILTER_EXCEPTIONS[name])


#: Where what decides and torchao's auto filter differ at M = 8192 or 16384, by (K, N): the differences that make it so at
#: each such M, in the order of M; none of them: as `FILTER_EXCEPTIONS` says.
DECIDED_EXCEPTIONS: dict[str, dict[tuple[int, int], list[tuple[str, ...]]]] = {
    "rowwise": {
        (2048, 4096): [("measured", "rescales", "bandwidth"), ("measured", "bandwidth")],
        (4096, 2048): [("measured", "rescales", "bandwidth"), ("measured", "rescales", "bandwidth")],
        (8192, 2048): [("measured", "bandwidth"), ("measured", "rescales")],
        (16384, 2048): [("measured", "rescales"), ("measured", "rescales")],
    },
    # gains of less than the margin are left
    "tensorwise": {
        (1024, 2048): [(), ()],
        (1024, 4096): [(), ()],
        (1024, 8192): [(), ()],
        (1024, 16384): [(), ("measured",)],
        (2048, 2048): [("measured",)],
    },
}


@pytest.mark.parametrize("name", list(FILTERS))
def test_auto_filter_beside_what_decides(name: str) -> None:
    """Each difference has its reason: one of `DIFFERENCES`, or several, or that of the published machine, too."""
    recipe, decides = Recipe.named(name), cost_model(hardware.find("h100"), rescales=None)
    sizes = (1024, 2048, 4096, 8192, 16384)
    found: dict[tuple[int, int], list[tuple[str, ...] | None]] = {}
    for k, n, m in itertools.product(sizes, sizes, (8192, 16384)):
        pays = decides.layer(m, k, n, recipe).pays
        if pays != FILTERS[name](k, n):
            found.setdefault((k, n), []).append(_reason(m, k, n, recipe, pays))
    assert found == DECIDED_EXCEPTIONS[name]
    plain = {where for where, reasons in found.items() if () in reasons}
    assert plain <= FILTER_EXCEPTIONS[name].keys()


def test_our_filters_are_torchaos() -> None:
    """The boundaries above are those of the installed torchao."""
    utils = pytest.importorskip("torchao.float8.float8_linear_utils")
    torch = pytest.importorskip("torch")
    for name, ours in FILTERS.items():
        theirs = utils._auto_filter_for_recipe(name, [])
        for k in (16, 1024, 2048, 4096, 8192):
            for n in (1024, 2048, 4096, 8192):
                linear = torch.nn.Linear(k, n, bias=False, device="meta")
                assert theirs(linear, "") == ours(k, n)


# The linears of a Llama 3 8B block: (K, N, how many).
LLAMA_8B = [(4096, 4096, 2), (4096, 1024, 2), (4096, 14336, 2), (14336, 4096, 1)]


def _llama_speedup(model: CostModel, recipe: Recipe) -> float:
    costs = [(model.layer(8192, k, n, recipe), count) for k, n, count in LLAMA_8B]
    return sum(c.high_seconds * i for c, i in costs) / sum(c.float8_seconds * i for c, i in costs)


@pytest.mark.parametrize("gpu", ["h100", "mi300x"])
def test_recipes_rank_as_published(gpu: str) -> None:
    """TorchTitan's tokens/s on Llama 3 8B: tensorwise, rowwise_with_gw_hp (MI300X only), rowwise; all gain.

    Only the order is compared: most of a step is the same in both precisions, so its speedup is smaller
    than the linears'.
    """
    published = PUBLISHED["llama3_8b_tokens_per_second"][gpu]
    model = CostModel(hardware.find(gpu))
    predicted = {name: _llama_speedup(model, Recipe.named(name)) for name in published}
    assert sorted(predicted, key=predicted.__getitem__) == sorted(published, key=published.__getitem__)
    assert min(predicted.values()) > 1


def test_rowwise_with_gw_hp() -> None:
    """No number of its table could be read; what follows from the recipe itself is checked instead."""
    hybrid, rowwise = Recipe.named("rowwise_with_gw_hp"), Recipe.named("rowwise")
    forward_only = H100.layer(4096, 8192, 8192, hybrid, roles=("output",))
    assert forward_only == H100.layer(4096, 8192, 8192, rowwise, roles=("output",))
    # grad_weight stays as it is and needs no cast, so that role alone costs the same both ways ...
    grad_weight = H100.layer(4096, 8192, 8192, hybrid, roles=("grad_weight",))
    assert grad_weight.high_seconds == grad_weight.float8_seconds
    # ... and without the column casts of input and grad_output the recipe pays from a smaller M on,
    # for less in the end.
    assert _pays_from(4096, 14336, hybrid) < _pays_from(4096, 14336, rowwise) < MAX_M
    assert H100.layer(32768, 16384, 16384, hybrid).speedup < H100.layer(32768, 16384, 16384, rowwise).speedup


# --- the model's own promises


@pytest.mark.parametrize("gpu", ["a100", "cpu"])
@pytest.mark.parametrize("name", list(PRESETS))
def test_never_pays_without_float8_tensor_cores(gpu: str, name: str) -> None:
    model, recipe = CostModel(hardware.find(gpu)), Recipe.named(name)
    assert not model.layer(65536, 16384, 16384, recipe).pays
    (verdict,) = plan(model, [_linear("x", "w", 65536, 16384, 16384)[0]])
    assert not verdict.convert
    assert verdict.reason == f"{gpu} has no float8 tensor cores"


SIZES = st.integers(1, 1024).map(lambda i: 16 * i)
RECIPES = st.sampled_from([*PRESETS.values(), Recipe(output=GemmSpec(), grad_input=None, grad_weight=None)])


@given(m=SIZES, k=SIZES, n=SIZES, recipe=RECIPES, roles=st.sampled_from([ROLES, ("output",)]))
@settings(max_examples=10, deadline=None)
def test_expression_is_what_layer_evaluates(
    m: int, k: int, n: int, recipe: Recipe, roles: tuple[Role, ...]
) -> None:
    cost = H100.layer(m, k, n, recipe, roles)
    for float8, seconds in ((False, cost.high_seconds), (True, cost.float8_seconds)):
        expression = H100.expression(recipe, float8, roles)
        assert expression.free_symbols <= {M, K, N}
        assert float(expression.subs({M: m, K: k, N: n})) == pytest.approx(seconds, rel=1e-9)


def _pays_from(k: int, n: int, recipe: Recipe, roles: Sequence[Role] = ROLES) -> int:
    """The smallest M, a multiple of 16, from which converting a layer pays; larger than `MAX_M` if there it does not."""
    rows = range(16, MAX_M + 1, 16)
    place = bisect.bisect_left(rows, True, key=lambda m: H100.layer(m, k, n, recipe, roles).pays)
    return rows[place] if place < len(rows) else MAX_M + 1


@given(k=SIZES, n=SIZES, recipe=RECIPES)
@settings(max_examples=15, deadline=None)
def test_what_pays_keeps_paying(k: int, n: int, recipe: Recipe) -> None:
    start = _pays_from(k, n, recipe)
    larger = (m for m in (start, 2 * start, 5 * start // 16 * 16) if start <= MAX_M)
    assert all(H100.layer(m, k, n, recipe).pays for m in larger)


def test_a_larger_weight_pays_from_a_smaller_batch_on() -> None:
    for name in PRESETS:
        starts = [_pays_from(s, s, Recipe.named(name)) for s in (1024, 2048, 4096, 8192, 16384)]
        assert starts == sorted(starts, reverse=True)


def test_casts() -> None:
    """Bytes per element: amax 2, each copy 2 + 1; a fused amax reads nothing, a known one costs nothing."""
    launch = H100.hardware.launch_overhead
    bandwidth = H100.hardware.memory_bandwidth * H100.calibration.memory_efficiency
    size = 8192 * 4096

    def cast(transposed: bool, rowwise: bool = False) -> float:
        return H100.cast_seconds(8192, 4096, 2, rowwise, transposed)

    def amax(fused: bool) -> float:
        return H100.amax_seconds(8192, 4096, fused=fused)

    assert cast(False) == pytest.approx(3 * size / bandwidth + launch)
    assert cast(False) + amax(True) == pytest.approx(3 * size / bandwidth + 2 * launch)
    assert cast(False) + amax(False) == pytest.approx(5 * size / bandwidth + 3 * launch)
    assert cast(True) > cast(False)
    # Rowwise, the column amax of the transposed copy is the expensive part.
    assert cast(True, rowwise=True) > 2 * cast(False, rowwise=True)


def test_transposed_copies_are_paid_for_on_every_target() -> None:
    """torch's ``_scaled_mm`` takes K-major operands only, also where the hardware would take any."""
    recipe, b200 = Recipe.named("tensorwise"), hardware.find("b200")
    assert b200.any_operand_layout
    strict = CostModel(dataclasses.replace(b200, any_operand_layout=False))
    shape = (8192, 4096, 4096)
    assert CostModel(b200).layer(*shape, recipe) == strict.layer(*shape, recipe)


def test_a_copy_reads_and_writes() -> None:
    bandwidth = H100.hardware.memory_bandwidth * H100.calibration.memory_efficiency
    assert H100.copy_seconds(10**9) == pytest.approx(2e9 / bandwidth)


def test_gemms_by_hand() -> None:
    """Compute that fills the GPU, memory that a single row waits for, and both with experts."""
    hw, c = H100.hardware, H100.calibration
    bandwidth = hw.memory_bandwidth * c.memory_efficiency
    idle = c.fill * hw.sms * 128 * 256
    m, k, n = 8192, 4096, 16384
    high = 2 * (m * n + idle) * k / (c.bf16_efficiency * hw.bf16_flops) + hw.launch_overhead
    assert H100.gemm_seconds(m, k, n, False) == pytest.approx(high)
    # four bytes wide, at half the rate
    twice = 2 * (high - hw.launch_overhead) + hw.launch_overhead
    assert H100.gemm_seconds(m, k, n, False, itemsize=4) == pytest.approx(twice)
    low = 2 * (m * n + idle) * (k + c.fp8_k_fill) / (c.fp8_efficiency * hw.fp8_flops) + hw.launch_overhead
    assert H100.gemm_seconds(m, k, n, True) == pytest.approx(low)
    for float8, itemsize in ((False, 2), (True, 1)):
        memory = (itemsize * (k + k * n) + 2 * n) / bandwidth + hw.launch_overhead
        assert H100.gemm_seconds(1, k, n, float8) == pytest.approx(memory)
        memory = (itemsize * (64 * k + 8 * k * n) + 2 * 64 * n) / bandwidth + hw.launch_overhead
        assert H100.gemm_seconds(64, k, n, float8, experts=8) == pytest.approx(memory)
    rows = m + 8 * 64
    experts = 2 * (rows * n + idle) * k / (c.bf16_efficiency * hw.bf16_flops) + hw.launch_overhead
    assert H100.gemm_seconds(m, k, n, False, experts=8) == pytest.approx(experts)
    # their weights' gradients, of the rows of each: eight times as many tiles, and half a step over the rows idle
    depth = k / 8 + c.fp8_k_fill + 32
    summed = 2 * (8 * m * n + idle) * depth / (c.fp8_efficiency * hw.fp8_flops) + hw.launch_overhead
    assert H100.gemm_seconds(m, k, n, True, experts=8, sums_groups=True) == pytest.approx(summed)
    memory = (2 * (m + n) * 64 + 2 * 8 * m * n) / bandwidth + hw.launch_overhead
    assert H100.gemm_seconds(m, 64, n, False, experts=8, sums_groups=True) == pytest.approx(memory)


def test_grouped_gemms_have_an_efficiency_of_their_own() -> None:
    """Those in float8."""
    hw, c = H100.hardware, dataclasses.replace(H100.calibration, grouped_efficiency=0.5)
    model = CostModel(hw, c)
    for summed in (False, True):
        size = {"experts": 8, "sums_groups": summed}
        once, twice = (
            m.gemm_seconds(8192, 16384, 8192, True, **size) - hw.launch_overhead for m in (H100, model)
        )
        assert twice == pytest.approx(2 * once)
        assert model.gemm_seconds(8192, 16384, 8192, False, **size) == H100.gemm_seconds(
            8192, 16384, 8192, False, **size
        )
    assert model.gemm_seconds(8192, 16384, 8192, True) == H100.gemm_seconds(8192, 16384, 8192, True)


def test_rescale_reads_and_writes_the_result() -> None:
    plain, rescaled = (H100.gemm_seconds(8192, 4096, 4096, True, True, rescale) for rescale in (False, True))
    bandwidth = H100.hardware.memory_bandwidth * H100.calibration.memory_efficiency
    assert rescaled - plain == pytest.approx(4 * 8192 * 4096 / bandwidth + H100.hardware.launch_overhead)


@pytest.mark.parametrize(
    ("m", "k", "n", "measured"),
    [
        (8192, 28672, 4096, 1.03),
        (8192, 28672, 8192, 1.23),
        (57344, 8192, 8192, 1.19),
        (8192, 57344, 8192, 1.81),
    ],
)
def test_large_exact_rowwise_gemms_of_an_h100(m: int, k: int, n: int, measured: float) -> None:
    """Times over the tensorwise gemm without fast accumulation: committed ceilings. A kernel that rescales is faster there."""
    shape = (m, k, n)
    exact, after, best = (cost_model(hardware.find("h100"), rescales) for rescales in (False, True, None))
    plain, scaled, rescaled, fastest = (
        model.gemm_seconds(*shape, True, rowwise, rowwise)
        for model, rowwise in ((exact, False), (exact, True), (after, True), (best, True))
    )
    assert scaled / plain == pytest.approx(measured, abs=0.09)
    assert fastest == min(scaled, rescaled)
    assert best.scales_after(*shape) == (rescaled < scaled) == (measured > 1.1)
    elsewhere = cost_model(hardware.find("h200"), None)
    assert not elsewhere.scales_after(*shape)
    assert elsewhere.gemm_seconds(*shape, True, True, True) == elsewhere.gemm_seconds(*shape, True)


def test_no_rescale_where_the_gemm_applies_the_scales() -> None:
    model = CostModel(H100.hardware, rescales=False)
    recipe = Recipe.named("rowwise")
    gradients = ((8192, 4096, 4096), (4096, 8192, 4096))  # without fast accumulation
    spared = 0.0
    for shape in gradients:
        plain, rescaled = (model.gemm_seconds(*shape, True, True, rescale) for rescale in (False, True))
        assert plain == rescaled == H100.gemm_seconds(*shape, True, True)
        spared += H100.gemm_seconds(*shape, True, True, True) - plain
    shape = (8192, 4096, 4096)
    layers = [each.layer(*shape, recipe).float8_seconds for each in (H100, model)]
    assert spared > 0 and layers[0] - layers[1] == pytest.approx(spared)
    values = dict(zip((M, K, N), shape, strict=True))
    assert float(model.expression(recipe, True).subs(values)) == pytest.approx(layers[1])


# --- plan()


def _linear(
    source: str, layer: str, m: int, k: int, n: int, recipe: Recipe | None = None
) -> tuple[PlannedGemm, ...]:
    """The three gemms of one linear layer that reads ``source``."""
    recipe = recipe or Recipe.named("tensorwise")
    tensors = {
        "input": (f"{source}", m, k),
        "weight": (f"{layer}.weight", n, k),
        "grad_output": (f"{layer}.grad", m, n),
    }
    kinds = {
        "output": ("input", "weight"),
        "grad_input": ("grad_output", "weight"),
        "grad_weight": ("grad_output", "input"),
    }
    transposed = {("grad_input", "weight"), ("grad_weight", "grad_output"), ("grad_weight", "input")}
    shapes = {"output": (m, k, n), "grad_input": (m, n, k), "grad_weight": (n, m, k)}
    gemms = []
    for role in ROLES:
        spec = recipe.gemm(role)
        if spec is None:
            continue
        left, right = (
            PlannedOperand(
                *tensors[kind], (role, kind) in transposed, quant.granularity == "rowwise", 2, kind == "input"
            )
            for kind, quant in zip(kinds[role], (spec.left, spec.right), strict=True)
        )
        gemms.append(
            PlannedGemm(role, *shapes[role], 2, spec.is_rowwise, spec.scales_after_gemm, (left, right), layer)
        )
    return tuple(gemms)


@pytest.mark.parametrize("name", list(PRESETS))
def test_plan_of_one_layer_is_layer(name: str) -> None:
    recipe = Recipe.named(name)
    verdicts = plan(H100, _linear("x", "w", 16384, 8192, 8192, recipe))
    roles: list[Role] = [role for role in ROLES if recipe.gemm(role) is not None]
    layer = H100.layer(16384, 8192, 8192, recipe, roles)
    assert all(v.convert for v in verdicts)
    assert sum(v.float8_seconds for v in verdicts) == pytest.approx(layer.float8_seconds)
    assert {v.reason for v in verdicts} == {f"pays: {layer.speedup:.2f}x"}


def test_plan_counts_the_copy_of_a_padded_result() -> None:
    """Nothing else of padding: casts write zeros beside what they cast."""

    def planned(m: int, k: int, n: int, cut_bytes: int) -> Verdict:
        output, *gradients = _linear("x", "y", m, k, n)
        return plan(H100, [dataclasses.replace(output, cut_bytes=cut_bytes), *gradients])[0]

    large, small = (16384, 8192, 8190), (2048, 4096, 2042)
    for m, k, n in (large, small):
        assert planned(m, k, n, 0).convert
    copied = planned(*large, 2 * 16384 * 8190)
    seconds = H100.copy_seconds(2 * 16384 * 8190) + H100.hardware.launch_overhead
    assert copied.convert
    assert copied.float8_seconds == pytest.approx(planned(*large, 0).float8_seconds + seconds)
    assert not planned(*small, 2 * 2048 * 2042).convert


def test_plan_shares_the_casts_of_qkv() -> None:
    """Three layers that read one tensor pay its two copies and its amax once."""
    shape = (8192, 4096, 4096)
    shared = plan(H100, [g for name in "qkv" for g in _linear("x", name, *shape)])
    apart = plan(H100, [g for name in "qkv" for g in _linear(f"x.{name}", name, *shape)])
    assert all(v.convert for v in shared)
    saved = sum(v.float8_seconds for v in apart) - sum(v.float8_seconds for v in shared)
    casts = sum(H100.cast_seconds(8192, 4096, 2, False, transposed) for transposed in (False, True))
    assert saved == pytest.approx(2 * (casts + H100.amax_seconds(8192, 4096, fused=True)))


def test_plan_converts_in_company_what_it_would_not_alone() -> None:
    """A [4096 -> 1024] linear loses by itself at M = 3072, and gains beside others that share its input."""
    shape = (3072, 4096, 1024)
    alone = plan(H100, _linear("x", "k", *shape))
    together = plan(H100, [g for name in "abcdef" for g in _linear("x", name, *shape)])
    assert not any(v.convert for v in alone)
    assert all(v.convert for v in together)


def _total(gemms: Sequence[PlannedGemm]) -> float:
    """Seconds of all gemms in float8, each distinct cast counted once."""
    return sum(verdict.float8_seconds for verdict in plan(H100, gemms, drop=False))


def test_plan_counts_no_cast_that_is_made_anyway() -> None:
    """Beside q, which pays for the input's casts, k and v pay; by a third of those casts they would lose."""
    q, k, v = (
        _linear("x", name, 6144, 2048, n, PRESETS["tensorwise"])
        for name, n in (("q", 2048), ("k", 512), ("v", 512))
    )
    verdicts = plan(H100, [*q, *k, *v])
    converted = [verdict.convert for verdict in verdicts]
    assert converted == [True, True, True, True, False, True, True, False, True]
    third = plan(H100, [*q, *k, *v], drop=False)
    assert sum(v.float8_seconds for v in third[3:6]) > sum(v.high_seconds for v in third[3:6])
    assert verdicts[3].reason.endswith("; others make casts it needs") and verdicts[3].reason > "pays: 1."
    # what is reported adds up, and is less than without them
    kept = [gemm for gemm, convert in zip([*q, *k, *v], converted, strict=True) if convert]
    assert sum(verdict.float8_seconds for verdict in verdicts if verdict.convert) == pytest.approx(
        _total(kept)
    )
    assert _total(kept) < _total(q) + sum(verdicts[i].high_seconds for i in (3, 5, 6, 8))


@pytest.mark.parametrize("recipe", [*PRESETS])
@pytest.mark.parametrize("m", [512, 2048, 8192])
@pytest.mark.parametrize("k, heads", [(2048, 256), (4096, 1024), (5120, 640)])
def test_plan_leaves_nothing_that_would_pay(recipe: str, m: int, k: int, heads: int) -> None:
    """No matmul that stays as it is would pay for the casts that it alone needs."""
    sizes = {"q": k, "k": heads, "v": heads}
    gemms = [g for name, n in sizes.items() for g in _linear("x", name, m, k, n, PRESETS[recipe])]
    verdicts = plan(H100, gemms)
    kept = [gemm for gemm, verdict in zip(gemms, verdicts, strict=True) if verdict.convert]
    for gemm, verdict in zip(gemms, verdicts, strict=True):
        if not verdict.convert:
            assert _total([*kept, gemm]) - _total(kept) >= verdict.high_seconds * (1 - 1e-9)


def test_plan_drops_small_layers_and_keeps_large_ones() -> None:
    small, large = _linear("x", "small", 256, 512, 512), _linear("y", "large", 16384, 8192, 8192)
    verdicts = plan(H100, [*small, *large])
    assert [v.convert for v in verdicts] == [False] * 3 + [True] * 3
    assert verdicts[0].reason.startswith("too small: float8 would be 0.")
    assert len({v.reason for v in verdicts[:3]}) == 1, "a layer decides as a whole"


def test_plan_may_drop_one_role() -> None:
    """Rowwise at a small M: the forward and grad_input pay, grad_weight with its column casts does not."""
    gemms = _linear("x", "w", 2048, 8192, 16384, Recipe.named("rowwise"))
    verdicts = {gemm.role: verdict for gemm, verdict in zip(gemms, plan(H100, gemms), strict=True)}
    assert verdicts["output"].convert
    assert not verdicts["grad_weight"].convert
    assert verdicts["grad_weight"].reason.startswith("grad_weight alone loses: float8 would be 0.")


def test_plan_judges_a_layer_as_a_whole() -> None:
    """Two gemms share both their casts: each gains beside the other, together they do not earn the casts."""
    x = PlannedOperand("x", 65536, 2048, transposed=True, rowwise=True)
    w = PlannedOperand("w", 65536, 512, transposed=True, rowwise=True)
    gemm = PlannedGemm("grad_weight", 2048, 65536, 512, 2, True, False, (x, w), "layer")
    gain = H100.gemm_seconds(2048, 65536, 512, False) - H100.gemm_seconds(2048, 65536, 512, True)
    two = plan(H100, [gemm] * 2)
    assert 0 < 2 * gain < sum(verdict.cast_seconds for verdict in two)
    assert not any(verdict.convert for verdict in two)
    # Enough of them do.
    assert all(verdict.convert for verdict in plan(H100, [gemm] * 40))


def test_plan_never_loses() -> None:
    """Whatever it converts is, casts included, no slower than bfloat16 in total."""
    gemms = [
        g
        for i in range(40)
        for g in _linear(f"x{i // 3}", f"w{i}", 1024 + 512 * (i % 9), 4096, 1024 * (1 + i % 5))
    ]
    kept = [v for v in plan(H100, gemms) if v.convert]
    assert sum(v.float8_seconds for v in kept) < sum(v.high_seconds for v in kept)


@pytest.mark.parametrize(
    ("margin", "m", "converts"), [(0.0, 4096, True), (0.05, 4096, False), (0.05, 4608, True)]
)
def test_plan_leaves_a_layer_that_gains_less_than_the_margin(margin: float, m: int, converts: bool) -> None:
    model = CostModel(H100.hardware, dataclasses.replace(H100.calibration, margin=margin))
    verdicts = plan(model, _linear("x", "w", m, 2048, 2048))
    assert [v.convert for v in verdicts] == [converts] * 3
    if not converts:
        assert verdicts[0].reason == (
            "too small: float8 would be 1.03x, which is within the model's error of 5%"
        )


def test_plan_counts_a_cast_for_the_gemm_that_alone_is_left_with_it() -> None:
    """The one that leaves needs a cast of its own; the other would pay for a half of what they share, not for all."""
    x, y, z = (PlannedOperand(name, 4096, 4096, False, True, cached=name == "z") for name in "xyz")
    leaving, left = (
        PlannedGemm("output", 4096, 4096, n, 2, True, False, (x, other), "layer")
        for n, other in ((64, y), (256, z))
    )
    verdicts = plan(H100, [leaving, left])
    gain = H100.gemm_seconds(4096, 4096, 256, False) - H100.gemm_seconds(4096, 4096, 256, True)
    cast = H100.cast_seconds(4096, 4096, 2, True, False)
    assert cast / 2 < gain < cast
    assert [v.convert for v in verdicts] == [False, False]
    assert {v.reason for v in verdicts} == {"too small: float8 would be 0.69x"}, "a layer, not one role of it"


def test_plan_looks_again_at_what_shared_a_cast_with_what_is_left() -> None:
    """The first layer pays for a half of its cast, and is judged before the second leaves it all of it."""
    x, y, z = (PlannedOperand(name, 4096, 4096, False, True, cached=name == "z") for name in "xyz")
    first, second = (
        PlannedGemm("output", 4096, 4096, n, 2, True, False, (x, other), n)
        for n, other in ((256, z), (64, y))
    )
    assert [v.convert for v in plan(H100, [first, second])] == [False, False]
    # a half of the cast in bytes: there it pays
    small = dataclasses.replace(x, rows=2048)
    gemms = [dataclasses.replace(gemm, operands=(small, gemm.operands[1])) for gemm in (first, second)]
    assert [v.convert for v in plan(H100, gemms)] == [True, False]


def test_plan_counts_the_cast_up_of_what_is_stored_in_float8() -> None:
    """One byte read and two written per element, by a kernel of its own, of the gemm as it is alone."""
    x, w = (
        PlannedOperand("x", 512, 1024, False, False),
        PlannedOperand("w", 2048, 1024, False, False, stored=True),
    )
    gemm = PlannedGemm("output", 512, 1024, 2048, 2, False, False, (x, w), "layer")
    (stored,) = plan(H100, [gemm], drop=False)
    (plain,) = plan(
        H100,
        [dataclasses.replace(gemm, operands=(x, dataclasses.replace(w, stored=False)))],
        drop=False,
    )
    bandwidth = H100.hardware.memory_bandwidth * H100.calibration.memory_efficiency
    seconds = 3 * 2048 * 1024 / bandwidth + H100.hardware.launch_overhead
    assert stored.high_seconds - plain.high_seconds == pytest.approx(seconds)
    assert stored.float8_seconds == plain.float8_seconds


def test_plan_of_experts_counts_all_their_weights() -> None:
    """As the gemm is and in float8, whose scales it always applies itself."""
    operands = (PlannedOperand("x", 512, 1024, False, True), PlannedOperand("w", 8192, 1024, False, True))
    gemm = PlannedGemm("output", 512, 1024, 1024, 2, True, True, operands, "layer", experts=8)
    (verdict,) = plan(H100, [gemm], drop=False)
    sizes = (512, 1024, 1024)
    assert verdict.high_seconds == H100.gemm_seconds(*sizes, False, experts=8)
    in_float8 = verdict.float8_seconds - verdict.cast_seconds
    assert in_float8 == pytest.approx(H100.gemm_seconds(*sizes, True, True, experts=8))


def test_one_tensor_as_both_operands() -> None:
    """x.T @ x needs one copy of x, once: both sides contract over the rows."""
    x = PlannedOperand("x", 16384, 8192, transposed=True, rowwise=False)
    (verdict,) = plan(H100, [PlannedGemm("output", 8192, 16384, 8192, 2, False, False, (x, x), "gram")])
    cast = H100.cast_seconds(16384, 8192, 2, False, True) + H100.amax_seconds(16384, 8192)
    assert verdict.cast_seconds == pytest.approx(cast)


def test_plan_of_nothing() -> None:
    assert plan(H100, []) == []


@pytest.mark.parametrize("sources", [*seldom(3), 6000], ids=["everything shares", "pairs share"])
def test_plan_is_near_linear(sources: int) -> None:
    """18,000 gemms, half of them losing, some cascading. About 0.3 s here; 3 s says only "not quadratic"."""
    gemms = [
        g
        for i in range(6000)
        for g in _linear(f"x{i % sources}", f"w{i}", 2048, 1024 << (i % 3), 1024 << (i % 4))
    ]
    plan(H100, gemms[:100])
    start = time.process_time()
    verdicts = plan(H100, gemms)
    assert time.process_time() - start < 3
    assert {v.convert for v in verdicts} == {True, False}


def test_a_chain_that_is_dropped_from_its_end_comes_back() -> None:
    """Each gemm shares one cast with the next. Only the last pays for a whole one, and what it loses by, the one before it has to pay."""
    operands = [PlannedOperand(f"x{i}", 2048, 2048, False, False, cached=i == 0) for i in range(61)]
    gemms = [
        PlannedGemm("output", 2048, 2048, 2048, 2, False, False, pair, layer)
        for layer, pair in enumerate(itertools.pairwise(operands))
    ]
    (alone,) = plan(H100, gemms[-1:])
    assert not alone.convert and all(verdict.convert for verdict in plan(H100, gemms))


def test_a_gemm_costs_microseconds() -> None:
    H100.gemm_seconds(4096, 4096, 4096, True)
    start = time.process_time()
    for _ in range(50_000):
        H100.gemm_seconds(4096, 4096, 4096, True)
    assert time.process_time() - start < 1  # 0.03 s here


def test_decisions_are_by_what_was_measured_of_f8fx() -> None:
    """On Hopper; elsewhere by its tiled rowwise casts alone, which torchao's kernels are not."""
    large = {"exact_rowwise_bytes": 360e6, "exact_rowwise_double_bytes": 750e6}
    h100, h200 = (own_calibration(hardware.find(name)) for name in ("h100", "h200"))
    assert h100 == dataclasses.replace(h200, **large) != h200
    blackwell = hardware.find("b200")
    own, default = own_calibration(blackwell), default_calibration(blackwell)
    columns = [f"{kind}_column_efficiency" for kind in ("input", "weight", "grad_output")]
    other = {
        field.name
        for field in dataclasses.fields(own)
        if getattr(own, field.name) != getattr(default, field.name)
    }
    assert other == {*columns, "margin"}


@pytest.mark.parametrize(("day", "points"), [("2026-11-26", 13), ("2026-11-27", 19)])
def test_predictions_are_near_what_was_measured(day: str, points: int) -> None:
    """The committed results of an H100; by those of the 26th the constants were chosen. f8fx ran with scales in the gemm."""
    folder = Path(__file__).parents[1] / "benchmarks" / "results"
    rows = json.loads((folder / f"{day}-nvidia-h100-80gb-hbm3-linear_sweep.json").read_text())["rows"]
    model = cost_model(hardware.find("h100"), rescales=None)
    errors = []
    for row in rows:
        if {"bf16", "f8fx"} <= row["ms"].keys():
            sizes, recipe = (row["m"], row["k"], row["n"]), Recipe.named(row["recipe"])
            measured = row["ms"]["bf16"] / row["ms"]["f8fx"]
            errors.append(abs(_with_norm_and_sigmoid(*sizes, recipe, model) - measured))
    assert len(errors) == points and sum(errors) / len(errors) < 0.05
