"""When does float8 pay? Seconds per gemm, per cast and per layer, from shapes and one hardware table.

A float8 gemm is up to twice as fast as a bfloat16 one, but its operands must be quantized first, and
that is memory traffic. A layer pays where what the gemms gain exceeds what the casts cost. Formulas
are sympy expressions in ``M``, ``K``, ``N`` (of the *forward* gemm: input [M, K], weight [N, K]), so
that any of them can be evaluated for many M, as thresholds (:mod:`passes.thresholds`) need; they are
compiled once, and the results cached by shape.

**Gemm** [m, k] x [k, n], following the roofline of torchao (``torchao/testing/training/roofline_utils``)
with one change: a GPU takes time to fill, so both the tile grid and the k loop are extended by a constant::

    compute = 2 (m n + fill sms TILE) (k + k_fill) / (efficiency peak)
    memory  = (itemsize (m k + k n) + 2 m n) / (memory_efficiency bandwidth)
    seconds = max(compute, memory) + launch_overhead

``fill`` waves of idle tiles stand for wave quantisation and saturation, ``k_fill`` for the prologue and
epilogue of each tile. Both are smooth, where real wave quantisation is a staircase, so that verdicts do
not flicker with M. No split-k is modelled. A grouped gemm reads every expert's matrix, and half of the last tile of each
expert's rows is idle: ``experts k n`` for ``k n``, ``m + experts TILE_ROWS / 2`` for the ``m`` that is computed. One that sums
over the rows of each, k, writes a matrix for each, ``experts m n`` for ``m n``, and half of the last step over the rows of each is
idle: ``k / experts + k_fill + STEP / 2`` for ``k + k_fill``.

**Rescale**: where a rowwise gemm without fast accumulation does not scale its accumulator (``rescales``), its bfloat16
result is multiplied by the scales in a kernel of its own: 2 bytes read and 2 written per element. Where it does, ``compute``
grows with the bytes of large operands on an H100 (``exact_rowwise_bytes``).

**Cast** of one tensor: an amax read (none if its producer computes it), then for each layout copy one
read and a 1-byte write, at an efficiency that falls for the transposed copy, whose stores are not
coalesced, and falls far for the transposed *rowwise* copy, a reduction over the slow dimension.

**Padding** of sizes to multiples of 16 costs nothing for operands, whose casts write zeros beside what they cast, and nothing
in gemms, whose tiles are larger than what is added. A result with columns too many is copied without them (:meth:`CostModel.copy_seconds`).

The constants are in :mod:`f8fx.calibration`, each with its origin.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Literal

import sympy

from f8fx.calibration import Calibration, default_calibration
from f8fx.hardware import Hardware
from f8fx.recipe import ROLE_OPERANDS, ROLES, OperandKind, Recipe, Role

#: Sizes of the forward gemm; the gradients' gemms are [M, N] x [N, K] and [N, M] x [M, K].
M, K, N = sympy.symbols("M K N", positive=True)

TILE_ROWS = 128  #: rows of that tile
STEP = 64  #: of k, that such a tile advances by at least
TILE = TILE_ROWS * 256  #: elements of the output tile one multiprocessor works on (cuBLAS, CUTLASS on Hopper)
MAX_M = 1 << 20  #: the largest M that is looked at for a threshold


@dataclass(frozen=True)
class LayerCost:
    """Seconds of one layer's gemms in high precision, and in float8 with all its casts.

    Attributes:
        margin: fraction of the former that must be gained (``Calibration.margin``).
    """

    high_seconds: float
    float8_seconds: float
    margin: float = 0.0

    @property
    def speedup(self) -> float:
        return self.high_seconds / self.float8_seconds

    @property
    def pays(self) -> bool:
        return self.float8_seconds < (1 - self.margin) * self.high_seconds


@dataclass(frozen=True)
class _Cast:
    """One copy of one tensor that a recipe asks for; ``amax`` marks the copy that also pays the amax."""

    kind: OperandKind
    transposed: bool
    rowwise: bool
    amax: bool


_TENSOR_SHAPE = {"input": (M, K), "weight": (N, K), "grad_output": (M, N)}
_GEMM_SHAPE: dict[Role, tuple[sympy.Expr, sympy.Expr, sympy.Expr]] = {
    "output": (M, K, N),
    "grad_input": (M, N, K),
    "grad_weight": (N, M, K),
}
# Which operands lie in memory with the contracted dimension outermost.
_TRANSPOSED = {("grad_input", "weight"), ("grad_weight", "grad_output"), ("grad_weight", "input")}


#: What a gemm's scales cost: nothing, a kernel of their own, or what they cost a rowwise gemm that accumulates exactly.
_Scaling = Literal["free", "after", "exact"]


def _gemm(
    hw: Hardware,
    c: Calibration,
    float8: bool,
    scaling: _Scaling,
    itemsize: int,
    experts: int = 0,
    sums_groups: bool = False,
) -> sympy.Expr:
    """Seconds of a gemm [M, K] x [K, N]; see the module's docstring."""
    if not float8:
        flops, efficiency, k_fill = hw.bf16_flops * min(1.0, 2 / itemsize), c.bf16_efficiency, 0.0
    elif hw.fp8_flops:
        flops, efficiency, k_fill, itemsize = hw.fp8_flops, c.fp8_efficiency, c.fp8_k_fill, 1
    else:
        return sympy.oo
    if experts and float8:
        efficiency *= c.grouped_efficiency
    bandwidth = hw.memory_bandwidth * c.memory_efficiency
    rows, depth = M + experts * (TILE_ROWS // 2), K + k_fill
    read, written = M * K + max(experts, 1) * K * N, M * N
    if sums_groups:
        rows, depth = experts * M, K / experts + k_fill + STEP // 2
        read, written = (M + N) * K, experts * M * N
    compute = 2 * (rows * N + c.fill * hw.sms * TILE) * depth / (efficiency * flops)
    memory = (itemsize * read + 2 * written) / bandwidth
    if scaling == "exact" and float8 and math.isfinite(c.exact_rowwise_bytes):
        beyond = M * K + K * N - c.exact_rowwise_bytes
        compute *= 1 + sympy.Max(0, beyond) / c.exact_rowwise_double_bytes
    seconds = sympy.Max(compute, memory) + hw.launch_overhead
    if scaling == "after" and float8:
        seconds += 4 * M * N / bandwidth + hw.launch_overhead
    return seconds


def _amax(hw: Hardware, c: Calibration, itemsize: int, fused: bool) -> sympy.Expr:
    """Seconds until one [M, K] tensor's one scale is known (M, K stand for its rows and columns)."""
    launches = hw.launch_overhead * (c.scale_kernels + (not fused))
    if fused:
        return sympy.Float(launches)
    return itemsize * M * K / (hw.memory_bandwidth * c.memory_efficiency) + launches


def _copy(
    hw: Hardware, c: Calibration, itemsize: int, rowwise: bool, transposed: bool, kind: OperandKind
) -> sympy.Expr:
    """Seconds to write one float8 copy of an [M, K] tensor (M, K stand for its rows and columns).

    Rowwise, the amax belongs to the copy: a row stays on the chip between amax and cast.
    """
    bandwidth = hw.memory_bandwidth * c.memory_efficiency * c.store_efficiency(kind, rowwise, transposed)
    column_amax = itemsize if rowwise and transposed else 0
    return (itemsize + 1 + column_amax) * M * K / bandwidth + hw.launch_overhead * (1 + bool(column_amax))


@cache
def _compiled(build: Callable[..., sympy.Expr], *args: Hashable) -> Callable[[int, int, int], float]:
    return lru_cache(maxsize=1 << 16)(sympy.lambdify((M, K, N), build(*args), modules="math"))


class CostModel:
    """Predicts what float8 costs and gains on one accelerator.

    Args:
        hardware: from :func:`f8fx.hardware.find` or :func:`f8fx.hardware.of_device`.
        calibration: how far real kernels stay below the peaks; by default :func:`default_calibration`.
        rescales: whether rowwise gemms without fast accumulation are followed by a kernel that applies their
            scales (``GemmSpec.scales_after_gemm``), as torchao's are, or apply them themselves; ``None``: what is faster.
    """

    def __init__(
        self, hardware: Hardware, calibration: Calibration | None = None, rescales: bool | None = True
    ) -> None:
        self.hardware = hardware
        self.calibration = calibration or default_calibration(hardware)
        self.rescales = rescales

    @property
    def can_pay(self) -> bool:
        """Whether float8 can be faster here at all."""
        return self.hardware.float8_tensor_cores

    def gemm_seconds(
        self,
        m: int,
        k: int,
        n: int,
        float8: bool,
        rowwise: bool = False,
        rescale: bool = False,
        itemsize: int = 2,
        experts: int = 0,
        sums_groups: bool = False,
    ) -> float:
        """Seconds of a gemm [m, k] x [k, n] with a bfloat16 result.

        Args:
            float8: else the operands are ``itemsize`` bytes wide; 4 is taken to run at half the bfloat16
                rate (TF32), which understates what float8 gains where TF32 is off.
            rowwise: scale vectors instead of scalars; by itself as fast (pytorch issue 147971: 90 to 100%).
            rescale: it accumulates exactly, so that here the scales may not be applied inside the gemm
                (``GemmSpec.scales_after_gemm``).
            experts: each row is multiplied by one of so many matrices [k, n]; 0: there is one. All are read, and of
                each one's last tile half is idle.
            sums_groups: k is the rows of so many experts, and is summed for each of them.
        """
        given = itemsize, experts, sums_groups
        return min(
            _compiled(_gemm, self.hardware, self.calibration, float8, scaling, *given)(m, k, n)
            for scaling in self._scalings(rowwise and rescale)
        )

    def scales_after(self, m: int, k: int, n: int) -> bool:
        """Whether a rowwise gemm [m, k] x [k, n] that accumulates exactly is followed by a kernel that applies its scales."""
        if self.rescales is not None:
            return self.rescales
        after, exact = (
            _compiled(_gemm, self.hardware, self.calibration, True, scaling, 2, 0)(m, k, n)
            for scaling in self._scalings(True)
        )
        return after < exact

    def _scalings(self, exact: bool) -> tuple[_Scaling, ...]:
        """The ways to apply scales; ``exact``: of a float8 gemm that is rowwise and accumulates exactly."""
        if not exact:
            return ("free",)
        if self.rescales is None:
            return ("after", "exact")
        return ("after",) if self.rescales else ("exact",)

    def copy_seconds(self, size: int) -> float:
        """Seconds to copy ``size`` bytes, beside what the kernel does anyway."""
        return 2 * size / (self.hardware.memory_bandwidth * self.calibration.memory_efficiency)

    def cast_up_seconds(self, elements: int, itemsize: int) -> float:
        """Seconds of the kernel that casts float8 elements to ``itemsize`` bytes."""
        bandwidth = self.hardware.memory_bandwidth * self.calibration.memory_efficiency
        return (1 + itemsize) * elements / bandwidth + self.hardware.launch_overhead

    def gemm_expression(self, float8: bool, rescale: bool = False, itemsize: int = 2) -> sympy.Expr:
        """Seconds of a gemm [M, K] x [K, N] in :data:`M`, :data:`K`, :data:`N`: what :meth:`gemm_seconds` evaluates."""
        return sympy.Min(
            *(
                _gemm(self.hardware, self.calibration, float8, each, itemsize)
                for each in self._scalings(rescale)
            )
        )

    def amax_seconds(self, rows: int, cols: int, itemsize: int = 2, fused: bool = False) -> float:
        """Seconds for one tensorwise amax and scale; ``fused``: the producer does the reading."""
        return _compiled(_amax, self.hardware, self.calibration, itemsize, fused)(rows, cols, 1)

    def cast_seconds(
        self,
        rows: int,
        cols: int,
        itemsize: int,
        rowwise: bool,
        transposed: bool,
        kind: OperandKind = "input",
    ) -> float:
        """Seconds for one float8 copy of a [rows, cols] tensor; tensorwise, its scale is known.

        Args:
            itemsize: bytes per element of the tensor that is quantized.
            kind: what the tensor is to its layer; the default is the dearest.
        """
        copy = _compiled(_copy, self.hardware, self.calibration, itemsize, rowwise, transposed, kind)
        return copy(rows, cols, 1)

    def _casts(self, recipe: Recipe, roles: Sequence[Role]) -> list[_Cast]:
        """The distinct copies a layer's gemms need; the first tensorwise one of a tensor has the amax."""
        casts: dict[tuple[Hashable, ...], _Cast] = {}
        have_amax: set[str] = set()
        for role in roles:
            gemm = recipe.gemm(role)
            if gemm is None:
                continue
            for kind, spec in zip(ROLE_OPERANDS[role], (gemm.left, gemm.right), strict=True):
                rowwise = spec.granularity == "rowwise"
                transposed = (role, kind) in _TRANSPOSED
                if (kind, spec, transposed) not in casts:
                    amax = not rowwise and kind not in have_amax
                    casts[kind, spec, transposed] = _Cast(kind, transposed, rowwise, amax)
                    if amax:
                        have_amax.add(kind)
        return list(casts.values())

    def layer(
        self,
        m: int,
        k: int,
        n: int,
        recipe: Recipe,
        roles: Sequence[Role] = ROLES,
        itemsize: int = 2,
    ) -> LayerCost:
        """Cost of one layer, input [m, k], weight [n, k], in high precision and under a recipe.

        Args:
            roles: which of the three gemms exist (inference has only ``"output"``).
            itemsize: bytes per element in high precision.
        """
        sizes = {M: m, K: k, N: n}
        high = float8 = 0.0
        for role in roles:
            gm, gk, gn = (sizes[size] for size in _GEMM_SHAPE[role])
            spec = recipe.gemm(role)
            in_high = self.gemm_seconds(gm, gk, gn, False, itemsize=itemsize)
            high += in_high
            float8 += (
                in_high
                if spec is None
                else self.gemm_seconds(gm, gk, gn, True, spec.is_rowwise, spec.scales_after_gemm)
            )
        for cast in self._casts(recipe, roles):
            rows, cols = (sizes[size] for size in _TENSOR_SHAPE[cast.kind])
            seconds = self.cast_seconds(rows, cols, itemsize, cast.rowwise, cast.transposed, cast.kind)
            if cast.amax:
                seconds += self.amax_seconds(rows, cols, itemsize, fused=cast.kind == "input")
            float8 += seconds
        return LayerCost(high, float8, self.calibration.margin)

    def expression(
        self, recipe: Recipe, float8: bool, roles: Sequence[Role] = ROLES, itemsize: int = 2
    ) -> sympy.Expr:
        """Seconds of a layer in :data:`M`, :data:`K`, :data:`N`: what :meth:`layer` evaluates."""
        hw, c = self.hardware, self.calibration
        total: sympy.Expr = sympy.Integer(0)
        for role in roles:
            spec = recipe.gemm(role) if float8 else None
            rescale = spec is not None and spec.scales_after_gemm
            seconds = self.gemm_expression(spec is not None, rescale, itemsize)
            shape = dict(zip((M, K, N), _GEMM_SHAPE[role], strict=True))
            total += seconds.subs(shape, simultaneous=True)
        for cast in self._casts(recipe, roles) if float8 else ():
            seconds = _copy(hw, c, itemsize, cast.rowwise, cast.transposed, cast.kind)
            if cast.amax:
                seconds += _amax(hw, c, itemsize, cast.kind == "input")
            shape = dict(zip((M, K), _TENSOR_SHAPE[cast.kind], strict=True))
            total += seconds.subs(shape, simultaneous=True)
        return total
