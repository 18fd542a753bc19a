"""What the Triton kernels become on each GPU generation, compiled here without a GPU.

Registers and spills are those of the machine code (``cuobjdump --dump-resource-usage``), the width of memory
accesses and the conversions are read in the PTX. Sizes are said to be multiples of 16, as Triton's launcher
finds for itself when they are.

``CASES``, the kernels as they are launched for bfloat16, are compiled for every target; tiles, warps and other types
for sm_90, and for every target with ``--long``, which adds the tiles and rows of float16 and float32.
"""

from __future__ import annotations

import collections
import re
import subprocess
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from f8fx.kernels import (
    cast_transpose,
    column_scale,
    computed_amaxes,
    groups,
    launch,
    row_cast,
    row_cast_columns,
)
from f8fx.recipe import EPS
from f8fx.torch_private import jit_function
from tests.kernels import written

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(launch.interpreted(), reason="Triton interprets in this process")

TARGETS = (89, 90, 100, 120)
#: Of what is compiled for Hopper alone unless ``--long`` is given.
HOPPER_FIRST = [pytest.param(target, marks=[] if target == 90 else pytest.mark.long) for target in TARGETS]
TRITON = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
E4M3 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Case:
    """A kernel with its compile-time arguments; ``pointers`` by name, all other arguments are sizes.

    ``module`` is one of :mod:`kernels`, or the text of one.
    """

    module: str
    kernel: str
    pointers: dict[str, str]
    constants: dict[str, Any]
    warps: int
    #: Sizes that are not multiples of 16.
    odd: tuple[str, ...] = ()

    def compile(self, capability: int) -> Compiled:
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        if "\n" in self.module:
            fn = jit_function(self.module, self.kernel)
        else:
            fn = getattr(launch.kernels(self.module), self.kernel)
        constants = {"stride_n": 1, **self.constants}
        signature = {
            name: "constexpr"
            if name in constants
            else "*" + self.pointers[name]
            if name in self.pointers
            else "i32"
            for name in fn.arg_names
        }
        at = {name: (index,) for index, name in enumerate(fn.arg_names)}
        source = ASTSource(
            fn,
            signature,
            constexprs={at[name]: value for name, value in constants.items() if name in at},
            attrs={
                at[name]: [["tt.divisibility", 16]]
                for name, kind in signature.items()
                if kind != "constexpr" and name not in self.odd
            },
        )
        target = GPUTarget("cuda", capability, 32)
        return Compiled(triton.compile(source, target=target, options={"num_warps": self.warps}))


@dataclass
class Compiled:
    """A compiled kernel: the mnemonics of its PTX, and what it occupies."""

    kernel: Any
    ptx: collections.Counter[str] = field(init=False)

    def __post_init__(self) -> None:
        text = self.kernel.asm["ptx"]
        self.ptx = collections.Counter(
            re.findall(r"^\s*(?:@!?%p\d+ )?([a-z]\w*\.[\w.:]+)", text, re.MULTILINE)
        )

    def usage(self, folder: Any) -> dict[str, int]:
        """REG (registers a thread), STACK and LOCAL (bytes of spills), ... of the machine code."""
        from triton import knobs

        path = folder / "kernel.cubin"
        path.write_bytes(self.kernel.asm["cubin"])
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return {
            name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL|SHARED):(\d+)", done.stdout)
        }

    def still_on_their_way(self) -> int:
        """How many copies to shared memory, at most, a wait leaves under way; 0: each wait is for all of them."""
        waits = re.findall(r"cp\.async\.wait_group\s+(\d+)", self.kernel.asm["ptx"])
        return max(map(int, waits), default=0)

    def widths(self, access: str) -> dict[str, int]:
        """How often each form of ``ld.global`` or ``st.global`` occurs."""
        return {name: count for name, count in self.ptx.items() if name.startswith(access + ".")}


def cast_transpose_case(tile, high="bf16", fp8=E4M3, dim=None, dim_t=None, odd=(), **flags) -> Case:
    name = launch.TRITON_FLOAT8[fp8]
    pointers = {"x": high, "scale": "fp32", "scale_t": "fp32", "out": name, "out_t": name}
    constants = cast_transpose.constants(fp8, dim, dim_t, **flags)
    constants |= {"BLOCK_M": tile.rows, "BLOCK_N": tile.columns}
    return Case("cast_transpose", "cast_transpose_kernel", pointers, constants, tile.warps, odd)


def row_cast_case(columns, high="bf16", fp8=E4M3, **flags) -> Case:
    tile = row_cast.tile_of(columns)
    constants = {
        "LIMIT": torch.finfo(fp8).max,
        "EPS": EPS,
        "POWER_OF_2": False,
        "PADDED": False,
        "CLAMP": True,
    }
    constants |= {"LOOP": columns > tile.columns, "ROWS": tile.rows, "BLOCK": tile.columns, **flags}
    pointers = {"x": high, "out": launch.TRITON_FLOAT8[fp8], "scale": "fp32"}
    return Case("row_cast", "row_cast_kernel", pointers, constants, tile.warps)


def row_cast_columns_case(columns, high="bf16", choice=0, **flags) -> Case:
    constants = row_cast_columns.constants(columns, 32, E4M3, True) | flags
    pointers = {f"x{index}": high for index in range(row_cast_columns.MOST)}
    pointers |= {"out": "fp8e4nv", "inverse": "fp32", "amaxes": "i32"}
    warps = row_cast_columns.choices(columns)[choice]["num_warps"]
    return Case("row_cast_columns", "row_cast_columns_kernel", pointers, constants, warps)


def computed_amaxes_case(text, pointers, columns, summed=0, choice=0) -> Case:
    chosen = dict(computed_amaxes.choices(summed)[choice])
    warps = chosen.pop("num_warps")
    constants = computed_amaxes.constants(columns, summed) | chosen
    return Case(text, computed_amaxes.NAME, {**pointers, "amaxes": "i32"}, constants, warps)


def groups_case(kernel, high="bf16", tile=groups.TILES[0]) -> Case:
    pointers = {"x": high, "offsets": "i32"}
    constants: dict[str, Any] = {"BLOCK_M": tile.rows, "BLOCK_N": tile.columns}
    if kernel == "amax":
        pointers["amaxes"] = "fp32"
    else:
        pointers |= {"scale": "fp32", "ends": "i32", "out": "fp8e4nv"}
        constants |= groups.constants(E4M3)
    return Case("groups", f"{kernel}_groups_kernel", pointers, constants, tile.warps, odd=("M", "G"))


STARTING = cast_transpose.starting_tile(8192, 4096, 2, 132)
COLUMN_AMAX = Case(
    "column_scale",
    "column_amax_kernel",
    {"x": "bf16", "partial": "fp32"},
    {"BLOCK_M": column_scale.TILE.rows, "BLOCK_N": column_scale.TILE.columns},
    column_scale.TILE.warps,
)
SCALES = Case(
    "column_scale",
    "scale_of_partials_kernel",
    {"partial": "fp32", "scale": "fp32"},
    {"LIMIT": 448.0, "EPS": EPS, "POWER_OF_2": True, "BLOCK_P": 32, "BLOCK_N": 64},
    4,
    odd=("P",),
)
GATE = {"in0": "bf16", "in1": "bf16"}
SUMS = {"sums": "fp32"}
COMPUTED = {
    "computed amaxes": (written.gate(14336), GATE, 14336),
    "computed amaxes and sums": (written.gate(14336, (0, 1)), GATE | SUMS, 14336, 2),
    "parts in memory": (
        written.parts(4, 4096, True),
        {f"in{index}": "bf16" for index in range(4)} | SUMS,
        4096,
        4,
    ),
}
#: What every target must take without spills.
CASES = {
    "both, tensorwise": cast_transpose_case(STARTING),
    "both, rowwise": cast_transpose_case(STARTING, dim=1, dim_t=0),
    "rows": row_cast_case(4096),
    "long rows": row_cast_case(16384),
    "rows, columns": row_cast_columns_case(4096),
    "long rows, columns": row_cast_columns_case(14336),
    "rows, columns of experts": row_cast_columns_case(4096, EACH=14336),
    **{name: computed_amaxes_case(*arguments) for name, arguments in COMPUTED.items()},
    **{
        f"{name}, fetched ahead": computed_amaxes_case(*arguments, choice=-1)
        for name, arguments in COMPUTED.items()
    },
    "column amax": COLUMN_AMAX,
    "scales": SCALES,
    "amaxes of groups": groups_case("amax"),
    "groups": groups_case("quantize"),
}
NEVER = ("min.NaN", "max.NaN")


#: What one compiler spills of one candidate of the tuning, bytes a thread: by release of Triton, target, case.
SPILLS = {("3.7", 100, "computed amaxes and sums, fetched ahead"): 8}


def check_occupancy(compiled, folder, spills=0):
    usage = compiled.usage(folder)
    assert usage["STACK"] <= spills and usage["LOCAL"] == 0, f"register spills: {usage}"
    # float minimum and maximum that keep NaN: triton-lang/triton#11111
    assert not any(name.startswith(NEVER) for name in compiled.ptx)
    return usage


def check_conversions(compiled, capability, fp8="e4m3x2"):
    from triton.backends.compiler import GPUTarget

    conversions = {name for name in compiled.ptx if name.startswith("cvt.") and fp8 in name}
    if launch.unsupported_by_target(GPUTarget("cuda", capability, 32), E4M3):
        assert conversions == {f"cvt.rn.satfinite.{fp8}.f16x2"}  # rounds twice; the definition runs instead
        return
    # all conversions saturate and round to nearest even, two at a time
    assert conversions == {f"cvt.rn.satfinite.{fp8}.f32"}


@pytest.mark.parametrize("capability", TARGETS)
@pytest.mark.parametrize("name", CASES)
def test_no_spills(name, capability, tmp_path):
    import triton

    compiled = CASES[name].compile(capability)
    release = ".".join(triton.__version__.split(".")[:2])
    usage = check_occupancy(compiled, tmp_path, SPILLS.get((release, capability, name), 0))
    computed = name.startswith(tuple(COMPUTED))
    assert usage["REG"] <= (168 if computed else 128 if name == "long rows, columns" else 80)
    if not computed and name not in ("column amax", "scales", "amaxes of groups"):
        check_conversions(compiled, capability)
    if "both" in name:
        # 8 + 8 accesses of 16 bytes for 64 elements a thread, and none narrower; scales are loaded besides
        assert compiled.widths("st.global") == {"st.global.v4.b32": 8}
        assert compiled.ptx["ld.global.v4.b32"] >= 8
        # transposed as 16-bit words in shared memory, not byte by byte
        assert not any(".shared" in access and access.endswith("b8") for access in compiled.ptx)
        assert any(access.startswith("ldmatrix") and ".trans" in access for access in compiled.ptx)
    if "columns" in name or "ahead" in name:
        # what comes next is on its way to shared memory, 16 bytes at a time, while the loop works on what has arrived
        assert compiled.ptx["cp.async.cg.shared.global"] and compiled.still_on_their_way() > 0
    if "columns" in name:
        assert compiled.ptx["st.global.v4.b32"]
    elif "rows" in name:
        assert set(compiled.widths("ld.global")) == {"ld.global.v4.b32"}
        assert compiled.ptx["st.global.v4.b32"]
    if computed and "ahead" not in name:
        assert set(compiled.widths("ld.global")) == {"ld.global.v4.b32"}
    if name == "computed amaxes":
        assert not compiled.widths("st.global")
    if name == "groups":
        # transposed as words of 16 bits in shared memory, and stored 16 bytes at a time
        assert set(compiled.widths("st.global")) == {"st.global.v4.b32"}
        assert any(access.startswith("ldmatrix") and ".trans" in access for access in compiled.ptx)
    if name in ("groups", "amaxes of groups"):
        assert compiled.ptx["ld.global.v4.b32"] or compiled.ptx["cp.async.cg.shared.global"]
    if name == "column amax":
        assert set(compiled.widths("ld.global")) == {"ld.global.v4.b32"}


@pytest.mark.long
@pytest.mark.parametrize("capability", HOPPER_FIRST)
@pytest.mark.parametrize("dims", [(None, None), (1, 0)], ids=["tensorwise", "rowwise"])
@pytest.mark.parametrize("high", TRITON)
@pytest.mark.parametrize("tile", cast_transpose.TILES, ids=str)
def test_all_tiles(tile, high, dims, capability, tmp_path):
    compiled = cast_transpose_case(tile, high, dim=dims[0], dim_t=dims[1]).compile(capability)
    assert check_occupancy(compiled, tmp_path)["REG"] <= 128
    assert set(compiled.widths("st.global")) == {"st.global.v4.b32"}
    assert compiled.ptx["ld.global.v4.b32"]


VARIANTS = {
    "fp32": cast_transpose_case(cast_transpose.starting_tile(8192, 4096, 4, 132), "fp32"),
    "e5m2": cast_transpose_case(STARTING, "fp16", torch.float8_e5m2),
    "row-major": cast_transpose_case(STARTING, write_t=False),
    "transposed": cast_transpose_case(STARTING, write=False),
    "padded": cast_transpose_case(STARTING, padded=True),
    "no clamp": cast_transpose_case(STARTING, clamp=False),
    "fp32 rows": row_cast_case(16384, "fp32"),
    "looped rows": row_cast_case(28672),
    "short rows": row_cast_case(256, POWER_OF_2=True),
    "rows, columns, fewer warps": row_cast_columns_case(4096, choice=1),
    "long rows, columns, more warps": row_cast_columns_case(14336, choice=1),
    "groups, larger tile": groups_case("quantize", tile=groups.TILES[1]),
    "groups of fp32": groups_case("quantize", "fp32"),
    "computed amaxes, more warps": computed_amaxes_case(*COMPUTED["computed amaxes"], choice=1),
}
#: What is left of the sources, lengths of rows and warps, and the tile of small tensors.
LONG_VARIANTS = {
    f"{high} {name}": case
    for high in TRITON
    for name, case in {
        "small": cast_transpose_case(cast_transpose.starting_tile(64, 64, 2, 132), high),
        "column amax": replace(COLUMN_AMAX, pointers={**COLUMN_AMAX.pointers, "x": high}),
        **{f"rows of {columns}": row_cast_case(columns, high) for columns in (256, 4096, 16384, 28672)},
        **{
            f"rows of {columns}, columns, {chosen['num_warps']} warps": row_cast_columns_case(
                columns, high, choice
            )
            for columns in (1024, 4096, row_cast_columns.LONGEST_ROW // TRITON[high].itemsize)
            for choice, chosen in enumerate(row_cast_columns.choices(columns))
        },
    }.items()
}


@pytest.mark.parametrize("capability", HOPPER_FIRST)
@pytest.mark.parametrize(
    "case",
    [
        *(pytest.param(case, id=name) for name, case in VARIANTS.items()),
        *(pytest.param(case, id=name, marks=pytest.mark.long) for name, case in LONG_VARIANTS.items()),
    ],
)
def test_variants(case, capability, tmp_path):
    compiled = case.compile(capability)
    check_occupancy(compiled, tmp_path)
    assert compiled.ptx["ld.global.v4.b32"] or compiled.ptx["cp.async.cg.shared.global"]
    if "out" in case.pointers:
        check_conversions(compiled, capability, "e5m2x2" if "fp8e5" in case.pointers.values() else "e4m3x2")
        assert compiled.ptx["st.global.v4.b32"]


def test_spills_are_seen(tmp_path):
    """Of 256 float32 elements a thread, which has 255 registers."""
    compiled = cast_transpose_case(launch.Tile(64, 128, 1), "fp32").compile(90)
    with pytest.raises(AssertionError, match="register spills"):
        check_occupancy(compiled, tmp_path)


def test_float32_scales_need_no_float64():
    compiled = CASES["rows"].compile(90)
    assert not any("f64" in name for name in compiled.ptx)
    assert any(name.startswith("div.rn.f32") for name in compiled.ptx)


@pytest.mark.parametrize("capability", HOPPER_FIRST)
def test_odd_sizes_take_narrow_accesses_and_no_spills(capability, tmp_path):
    """A row stride that is no multiple of 16 bytes cannot be read 16 bytes at a time."""
    case = cast_transpose_case(STARTING, odd=("M", "N", "stride_m"), padded=True)
    compiled = case.compile(capability)
    check_occupancy(compiled, tmp_path)
    assert set(compiled.widths("st.global")) == {"st.global.v4.b32"}  # the padded copies
