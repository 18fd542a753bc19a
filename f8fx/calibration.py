"""How far real kernels stay below a GPU's peaks: the constants of the cost model (:mod:`f8fx.cost`)."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from f8fx.hardware import Hardware
from f8fx.recipe import OperandKind


@dataclass(frozen=True)
class Calibration:
    """Fractions of the datasheet's peaks that real kernels reach.

    Fitted to torchao's published H100 figures (``tests/data/torchao_h100.json``; how well they fit:
    ``tests/test_cost.py``) by least absolute log error over the 216 points of the rowwise table and
    the measured gemm times together. They describe cuBLAS and the quantize kernels that Inductor
    writes for torchao today; for f8fx's own see :func:`own_calibration`.

    Attributes:
        bf16_efficiency: of the bfloat16 peak. Fit; torchao PR 940 measured 0.66 at 8192^3.
        fp8_efficiency: of the float8 peak, before ``fp8_k_fill``. Fit; with it 0.78 at 8192^3, where
            torchao PR 940 measured 0.75.
        grouped_efficiency: of *that*, for float8 gemms by the matrices of experts, and those that sum over the rows of each.
        fill: waves of output tiles lost per gemm. Fit.
        fp8_k_fill: elements of k lost per float8 gemm, which is why a short k gains little; the
            fit gives bfloat16 none. Fit.
        memory_efficiency: of the bandwidth, for elementwise and row-major quantize kernels. torchao
            (``roofline_utils``, pct_achievable_mem_bw), from pointwise Triton kernels.
        transpose_efficiency: of *that*, for the transposed copy of a tensorwise cast. A compromise
            between the two tensorwise points of torchao's README and the boundary of its filter at
            N = 1024, K = 4096; there is no readable table.
        input_column_efficiency, weight_column_efficiency, grad_output_column_efficiency: of *that*,
            for the transposed copy of a rowwise cast, whose amax runs down the columns. Fit. The
            likely reasons for the order: Inductor computes a norm's output again for the input's, and
            fuses the gradient's with the activation's backward.
        exact_rowwise_bytes, exact_rowwise_double_bytes: a rowwise gemm that accumulates exactly and applies the scales itself
            takes longer than others where its operands have more bytes than the first, and twice as long where they have so many more
            as the second says. By default nowhere.
        scale_kernels: launches for the second amax stage and the scale of a tensorwise tensor.
        margin: fraction of its time in high precision that a layer must gain to be converted. What is predicted
            to gain less may as well lose.
    """

    bf16_efficiency: float = 0.67
    fp8_efficiency: float = 0.85
    grouped_efficiency: float = 1.0
    fill: float = 0.18
    fp8_k_fill: float = 740.0
    memory_efficiency: float = 0.92
    transpose_efficiency: float = 0.7
    input_column_efficiency: float = 0.21
    weight_column_efficiency: float = 0.29
    grad_output_column_efficiency: float = 0.50
    exact_rowwise_bytes: float = math.inf
    exact_rowwise_double_bytes: float = math.inf
    scale_kernels: int = 1
    margin: float = 0.0

    def store_efficiency(self, kind: OperandKind, rowwise: bool, transposed: bool) -> float:
        """Fraction of the achievable bandwidth at which one float8 copy is written."""
        if not transposed:
            return 1.0
        return getattr(self, f"{kind}_column_efficiency") if rowwise else self.transpose_efficiency


def default_calibration(hardware: Hardware) -> Calibration:
    """The fitted constants on Hopper; elsewhere the same with bfloat16 given float8's efficiency.

    On Hopper large bfloat16 gemms stay further below their peak than float8 ones. Nothing published says so
    of other GPUs, so there a float8 gemm may gain what the peaks promise (2x) and no more.
    """
    fitted = Calibration()
    if hardware.capability == (9, 0):
        return fitted
    return dataclasses.replace(fitted, bf16_efficiency=fitted.fp8_efficiency)


def own_calibration(hardware: Hardware) -> Calibration:
    """What f8fx decides by: the casts that f8fx's graphs are compiled to, and on Hopper what was measured there.

    Chosen with ``python -m benchmarks.calibrate`` by results of November 2026 (torch 2.11, CUDA 13;
    ``benchmarks/results``), in round numbers: the gemms of an H100 and an H200, 39 shapes each, of whose times these constants are
    7 and 9 % off on average (those of :class:`Calibration`: 11 and 13 %; cuBLAS's bfloat16 gemms have come nearer to
    their peak), copies on both, and 13 linear layers on the H100, of whose speedups they are 0.04 off: of what was near, those by
    which "auto" decides as it did there, where it was slower than bfloat16 nowhere. The two of large exact rowwise gemms are an
    H100's alone: there those with operands of 470 MB and more took 1.19 to 1.81 times as long as tensorwise ones, those of 75 to 360 MB
    1.00 to 1.09; on the H200 all of these 0.98 to 1.04. That of grouped gemms makes up for what one run on the H100 lacked: three layers
    of Mixtral's experts took 1.57 ms less than in bfloat16, and not the 2.4 ms less that is predicted without it.
    Elsewhere :func:`default_calibration`, but for the rowwise casts: its constants are of kernels that store transposed
    copies element by element, and f8fx's are tiled. The margin is what the model was off by on average in the table it was
    first fitted to.
    """
    calibration = default_calibration(hardware)
    if hardware.capability == (9, 0):
        calibration = dataclasses.replace(
            calibration,
            bf16_efficiency=0.74,
            fp8_efficiency=0.78,
            grouped_efficiency=0.83,
            fill=0.2,
            fp8_k_fill=250.0,
            memory_efficiency=0.9,
            transpose_efficiency=0.6,
        )
    if hardware.name == "h100":
        calibration = dataclasses.replace(
            calibration, exact_rowwise_bytes=360e6, exact_rowwise_double_bytes=750e6
        )
    return dataclasses.replace(
        calibration,
        input_column_efficiency=0.6,
        weight_column_efficiency=0.6,
        grad_output_column_efficiency=0.6,
        margin=0.05,
    )
