"""The hardware table: names, figures that must hang together, and devices the table does not know."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from f8fx import hardware
from f8fx.passes import best_rowwise_scales


def test_names() -> None:
    hopper = ("h100", "h100-pcie", "h100-nvl", "h20", "h200", "h200-nvl")
    assert hardware.names() == ("a100", "l40s", "rtx4090", *hopper, "b200", "rtx5090", "mi300x", "cpu")


@pytest.mark.parametrize(
    ("figure", "value"),
    [
        ("bf16_flops", 0.0),
        ("fp8_flops", 0.0),
        ("memory_bandwidth", "3e12"),
        ("memory_bandwidth", float("nan")),
        ("launch_overhead", -1e-6),
        ("granularities", ["tensorwise"]),
    ],
)
def test_figures_that_no_time_can_be_computed_from(figure: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"Hardware.{figure} must be .*, got "):
        dataclasses.replace(hardware.find("h100"), **{figure: value})


def test_a_launch_may_cost_nothing_and_no_rate_may_be_zero() -> None:
    h100 = hardware.find("h100")
    assert dataclasses.replace(h100, launch_overhead=0.0).launch_overhead == 0
    with pytest.raises(ValueError, match="launch_overhead must be a number that is not negative, got -1"):
        dataclasses.replace(h100, launch_overhead=-1.0)
    with pytest.raises(ValueError, match="memory_bandwidth must be a positive number, got 0"):
        dataclasses.replace(h100, memory_bandwidth=0)


def test_a_figure_is_the_same_whatever_its_source() -> None:
    h100 = hardware.find("h100")
    measured = dataclasses.replace(h100, sources={"sms": "counted"})
    assert measured == h100 and hash(measured) == hash(h100)
    assert "counted" not in repr(measured)


def test_grouped_float8_gemms_are_for_hopper() -> None:
    """And for the CPU, on which they are emulated."""
    have = [name for name in hardware.names() if hardware.find(name).grouped_gemm]
    assert have == ["h100", "h100-pcie", "h100-nvl", "h20", "h200", "h200-nvl", "cpu"]


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("h100", "h100"),
        ("H100", "h100"),
        ("H100-SXM", "h100"),
        ("hopper", "h100"),
        ("RTX 4090", "rtx4090"),
        ("GB200", "b200"),
        ("gfx942", "mi300x"),
        ("CPU", "cpu"),
        ("sm_120", "rtx5090"),
        # as torch.cuda.get_device_name() gives them
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("h100-pcie", "h100-pcie"),
        ("NVIDIA H100 NVL", "h100-nvl"),
        ("NVIDIA H20", "h20"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA H200 NVL", "h200-nvl"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("A100-SXM4-80GB", "a100"),
        ("NVIDIA GH200 480GB", "h200"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("AMD Instinct MI300X VF", "mi300x"),
        ("gfx942:sramecc+:xnack-", "mi300x"),
    ],
)
def test_find(name: str, found: str) -> None:
    assert hardware.find(name).name == found


def test_find_names_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"got 'h10O'; did you mean 'h100'\?"):
        hardware.find("h10O")
    with pytest.raises(ValueError, match="hardware must be one of 'a100', 'l40s'"):
        hardware.find("")
    with pytest.raises(ValueError) as error:
        hardware.find("gpu")
    assert "did you mean 'cpu'" not in str(error.value)


@pytest.mark.parametrize(
    "name", ["H1000", "NVIDIA RTX PRO 6000 Blackwell", "H100 or B200", "NVIDIA L4", "ghost"]
)
def test_names_that_only_look_like_one_are_not_found(name: str) -> None:
    with pytest.raises(ValueError, match="hardware must be one of"):
        hardware.find(name)


def test_sizes_are_aligned_upwards() -> None:
    assert [hardware.aligned(size) for size in (0, 1, 16, 17, 4097)] == [0, 16, 16, 32, 4112]


def test_aliases_are_unambiguous() -> None:
    spelled = [hardware._canonical(n) for hw in hardware.HARDWARE.values() for n in (hw.name, *hw.aliases)]
    assert len(set(spelled)) == len(spelled)


@pytest.mark.parametrize("name", hardware.names())
def test_figures_hang_together(name: str) -> None:
    hw = hardware.find(name)
    assert hash(hw) == hash(hardware.find(name.upper()))
    assert hw.bf16_flops > 0 and hw.memory_bandwidth > 0 and hw.sms > 0 and hw.l2_bytes > 0
    assert 0 < hw.launch_overhead < 1e-4
    assert bool(hw.float8_dtypes) == bool(hw.granularities) == (hw.fp8_flops > 0)
    if hw.float8_tensor_cores:
        # Dense peaks: float8 is twice bfloat16, up to rounding in the datasheets (L40S: 733 / 362).
        assert hw.fp8_flops / hw.bf16_flops == pytest.approx(2, rel=0.03)
    needed = {"bf16_flops", "fp8_flops", "memory_bandwidth", "launch_overhead", "l2_bytes", "sms"}
    assert needed <= set(hw.sources)
    assert all(hw.sources.values())


def test_float8_dtypes() -> None:
    assert hardware.find("h100").float8_dtypes["e4m3"] is torch.float8_e4m3fn
    assert hardware.find("mi300x").float8_dtypes["e4m3"] is torch.float8_e4m3fnuz
    assert hardware.find("mi300x").float8_dtypes["e5m2"] is torch.float8_e5m2fnuz
    assert not hardware.find("a100").float8_dtypes
    assert hardware.find("cpu").float8_dtypes["e5m2"] is torch.float8_e5m2, "emulated, for tests"


def test_operand_layouts() -> None:
    assert hardware.find("b200").any_operand_layout
    assert not hardware.find("h100").any_operand_layout
    assert not hardware.find("rtx5090").any_operand_layout, "GeForce Blackwell is NT only"


def _pretend(
    monkeypatch: pytest.MonkeyPatch, name: str, capability: tuple[int, int], cuda: str = "13.0"
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.version, "cuda", cuda)


@pytest.mark.parametrize(
    ("name", "capability", "found"),
    [
        ("NVIDIA A100-SXM4-80GB", (8, 0), "a100"),
        ("NVIDIA H100 80GB HBM3", (9, 0), "h100"),
        ("NVIDIA H200", (9, 0), "h200"),
        ("NVIDIA H200 NVL", (9, 0), "h200-nvl"),
        ("NVIDIA H100 PCIe", (9, 0), "h100-pcie"),
        ("NVIDIA H100 NVL", (9, 0), "h100-nvl"),
        ("NVIDIA H20", (9, 0), "h20"),
        ("NVIDIA H800", (9, 0), "h100"),
        ("NVIDIA GH200 480GB", (9, 0), "h200"),
        ("NVIDIA B200", (10, 0), "b200"),
        ("NVIDIA L40S", (8, 9), "l40s"),
        ("NVIDIA GeForce RTX 4090", (8, 9), "rtx4090"),
        ("NVIDIA GeForce RTX 5090", (12, 0), "rtx5090"),
        # Not in the table: nearest by capability, never above.
        ("NVIDIA L4", (8, 9), "l40s"),
        ("NVIDIA RTX PRO 6000", (12, 0), "rtx5090"),
        ("NVIDIA RTX PRO 6000 Blackwell", (12, 0), "rtx5090"),
        ("NVIDIA B300", (10, 3), "b200-like"),
        ("NVIDIA Thor", (11, 0), "b200-like"),
        ("NVIDIA Something", (99, 0), "rtx5090-like"),
    ],
)
def test_of_device(
    monkeypatch: pytest.MonkeyPatch, name: str, capability: tuple[int, int], found: str
) -> None:
    _pretend(monkeypatch, name, capability)
    hw = hardware.of_device(torch.device("cuda"))
    assert hw.name == found
    assert hw.capability == capability


@pytest.mark.parametrize("capability", [(6, 0), (7, 0), (7, 5), (8, 0), (8, 6), (8, 7)])
def test_no_float8_before_sm89(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    _pretend(monkeypatch, "NVIDIA Old", capability)
    hw = hardware.of_device(torch.device("cuda", 0))
    assert not hw.float8_tensor_cores and not hw.float8_dtypes and not hw.granularities
    assert hw.fp8_flops == 0 and hw.aliases == (), "what else is known of a GPU is not of this one"


@pytest.mark.parametrize("device", ["mps", "xpu"])
def test_no_float8_where_nothing_was_tried(device: str) -> None:
    hw = hardware.of_device(torch.device(device))
    assert hw.name == device and not hw.float8_tensor_cores and not hw.float8_dtypes and not hw.granularities


@pytest.mark.parametrize(
    ("capability", "cuda", "expected"),
    [
        ((9, 0), "12.8", "torchao"),
        ((9, 0), "12.9", "by_size"),
        ((9, 0), "13.0", "by_size"),
        ((10, 0), "12.8", "in_gemm"),
        ((12, 0), "13.0", "in_gemm"),
        ((8, 9), "13.0", "torchao"),
    ],
)
def test_where_rowwise_scales_are_applied(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], cuda: str, expected: str
) -> None:
    _pretend(monkeypatch, "NVIDIA Something", capability, cuda)
    assert best_rowwise_scales(torch.device("cuda")) == expected


def test_rowwise_needs_a_recent_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    _pretend(monkeypatch, "NVIDIA B200", (10, 0), cuda="12.6")
    assert hardware.of_device(torch.device("cuda")).granularities == ("tensorwise",)
    _pretend(monkeypatch, "NVIDIA B200", (10, 0), cuda="12.8")
    assert hardware.of_device(torch.device("cuda")).granularities == ("tensorwise", "rowwise")


@pytest.mark.parametrize(
    ("arch", "float8"), [("gfx942:sramecc+:xnack-", True), ("gfx90a", False), ("gfx950", False)]
)
def test_amd(monkeypatch: pytest.MonkeyPatch, arch: str, float8: bool) -> None:
    _pretend(monkeypatch, "AMD Instinct", (9, 4))
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device=None: SimpleNamespace(gcnArchName=arch)
    )
    hw = hardware.of_device(torch.device("cuda"))
    assert hw.float8_tensor_cores is float8
    assert hw.capability == arch.split(":")[0]


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_everything_else_is_the_cpu(device: str) -> None:
    assert hardware.of_device(torch.device(device)).name == "cpu"
