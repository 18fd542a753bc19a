"""The Triton kernels give the bits of the definitions, under Triton's interpreter: no GPU needed.

Triton decides at import whether kernels are compiled or interpreted, so the tests proper run in a
process of their own, with ``TRITON_INTERPRET=1``: in any other, this file is one test that starts it.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from f8fx.kernels import (
    cast,
    cast_transpose,
    column_scale,
    computed_amaxes,
    groups,
    launch,
    row_cast,
    row_cast_columns,
)
from f8fx.recipe import EPS
from f8fx.torch_private import fake_tensor_mode, jit_function
from tests.fences import around_outputs, fenced
from tests.helpers import same_bits
from tests.interpreter import as_on_gpus
from tests.kernels import written as texts
from tests.long import with_long

pytest.importorskip("triton")

INTERPRETED = launch.interpreted()
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
HIGH = (torch.bfloat16, torch.float16, torch.float32)
ALIGN = ([1, 1], [16, 1], [1, 16], [16, 16])
SMALL = launch.Tile(16, 32, 4)
#: A failure is reported as it was drawn: to find a smaller one takes the interpreter minutes.
sweep = settings(
    deadline=None, derandomize=True, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
)


def examples(usual: int, long: int) -> settings:
    return settings(sweep, max_examples=with_long((usual,), long)[-1])


def in_interpreter(test):
    """A test of the other process; here there is nothing to collect, so that no skips are counted."""
    return test if INTERPRETED else None


def on_host(test):
    """A test that launches nothing, for this process only."""
    return None if INTERPRETED else test


@functools.cache
def written():
    """Float8 types that the interpreter knows: Triton 3.6's has no ``fnuz`` ones, 3.9's has."""
    from triton.runtime.errors import InterpreterError

    found = []
    for fp8 in FP8:
        with contextlib.suppress(InterpreterError):
            cast_transpose.cast(torch.zeros(1, 1), torch.ones(()), dtype=fp8, tile=SMALL)
            found.append(fp8)
    assert set(found) >= set(FP8[:2])
    return found


@on_host
def test_interpreted():
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", __file__]
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "COV_"))}
    environment |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


def no_fallback(reason):
    pytest.fail(f"the definition would be compared with itself: {reason}")


@pytest.fixture(autouse=True, scope="module")
def interpreter():
    """In the interpreter, no definition runs in place of a kernel, and no kernel writes beside what it is given."""
    if not INTERPRETED:
        yield
        return
    with as_on_gpus(), around_outputs(), mock.patch.object(launch, "say_fallback", no_fallback):
        yield


def source(shape, dtype, seed, special=False, layout="row-major"):
    """Values over many binades, in one of several layouts; with ``special``, some NaN, Inf and subnormals.

    No kernel can read beside them; of even seeds, not one byte behind them, of odd ones, not one before.
    """
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) * torch.exp2(
        torch.randint(-12, 10, shape, generator=generator).float()
    )
    if special and x.numel():
        values = (torch.nan, torch.inf, -torch.inf, -0.0, 1e-40, 65504.0, 3e38, -3e38)
        where = torch.randint(0, x.numel(), (min(6, x.numel()),), generator=generator)
        which = torch.randint(0, len(values), where.shape, generator=generator)
        x.view(-1)[where] = torch.tensor(values)[which]
    x = x.to(dtype)
    if layout == "column-major":
        x = x.t().contiguous().t()
    elif layout == "strided":
        wide = torch.full((shape[0] * 2, shape[1] * 3), 7.0, dtype=dtype)
        x = wide[::2, ::3].copy_(x)
    elif layout == "offset":
        wide = torch.full((shape[0], shape[1] + 5), 7.0, dtype=dtype)
        x = wide[:, 3 : 3 + shape[1]].copy_(x)
    return fenced(x, seed % 2 == 0)


def scale_of(x, dim, dtype, kind, seed):
    """A scale that fits, one that saturates much, or one that is itself not finite."""
    if kind == "fit":
        return fenced(cast.scale(cast.amax(x, dim), dtype, False))
    shape = () if dim is None else (x.shape[1 - dim],)
    values = torch.exp2(torch.randint(-3, 12, shape, generator=torch.Generator().manual_seed(seed)).float())
    if kind == "wild":
        values = torch.where(values > 200, torch.tensor([torch.nan, torch.inf, 0.0])[seed % 3], values)
    return fenced(values)


shapes = st.tuples(
    st.sampled_from([0, 1, 2, 15, 16, 17, 31, 33, 48, 70]), st.sampled_from([0, 1, 3, 16, 31, 32, 33, 64, 70])
)
sources = {
    "shape": shapes,
    "high": st.sampled_from(HIGH),
    "seed": st.integers(0, 1000),
    "special": st.booleans(),
    "layout": st.sampled_from(["row-major", "row-major", "column-major", "strided", "offset"]),
}
dims = st.sampled_from([None, 0, 1])
float8 = st.deferred(lambda: st.sampled_from(written()))


@in_interpreter
@examples(15, 150)
@given(
    **sources,
    fp8=float8,
    dim=dims,
    dim_t=dims,
    align=st.sampled_from(ALIGN),
    align_t=st.sampled_from(ALIGN),
    kind=st.sampled_from(["fit", "large", "wild"]),
)
def test_cast_transpose(shape, high, seed, special, layout, fp8, dim, dim_t, align, align_t, kind):
    x = source(shape, high, seed, special, layout)
    scale, scale_t = scale_of(x, dim, fp8, kind, seed), scale_of(x, dim_t, fp8, kind, seed + 1)
    arguments = {"dtype": fp8, "dim": dim, "dim_t": dim_t, "align": align, "align_t": align_t}
    want = cast_transpose.reference(x, scale, scale_t, **arguments)
    for copy, expected in zip(
        cast_transpose.cast_transpose(x, scale, scale_t, **arguments, tile=SMALL), want, strict=True
    ):
        same_bits(copy, expected)


@in_interpreter
@pytest.mark.parametrize(("dim", "dim_t"), [(None, None), (0, 1), (1, 0)])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_padding_is_zero_whatever_the_scale(dim, dim_t, value):
    """Zero times NaN is none."""
    x = source((17, 33), torch.bfloat16, 0)
    scale, scale_t = (fenced(torch.full(() if d is None else (x.shape[1 - d],), value)) for d in (dim, dim_t))
    arguments = {
        "dtype": torch.float8_e4m3fn,
        "dim": dim,
        "dim_t": dim_t,
        "align": [16, 16],
        "align_t": [16, 16],
    }
    copies = cast_transpose.cast_transpose(x, scale, scale_t, **arguments, tile=SMALL)
    for copy, expected, (rows, columns) in zip(
        copies,
        cast_transpose.reference(x, scale, scale_t, **arguments),
        (x.shape, x.shape[::-1]),
        strict=True,
    ):
        same_bits(copy, expected)
        assert copy.shape == (-(-rows // 16) * 16, -(-columns // 16) * 16) != (rows, columns)
        assert not copy[rows:].view(torch.uint8).any() and not copy[:, columns:].view(torch.uint8).any()


@in_interpreter
@examples(15, 60)
@given(**sources, fp8=float8, dim=dims, align=st.sampled_from(ALIGN))
def test_one_copy(shape, high, seed, special, layout, fp8, dim, align):
    x = source(shape, high, seed, special, layout)
    scale = scale_of(x, dim, fp8, "fit", seed)
    want = cast.quantize(x, scale, fp8, dim, False, align)
    same_bits(cast_transpose.cast(x, scale, dtype=fp8, dim=dim, align=align, tile=SMALL), want)


@in_interpreter
@examples(15, 80)
@given(
    **sources,
    fp8=float8,
    power_of_2=st.booleans(),
    align=st.sampled_from(ALIGN),
    block=st.sampled_from([16, 128]),
)
def test_row_cast(shape, high, seed, special, layout, fp8, power_of_2, align, block):
    x = source(shape, high, seed, special, layout)
    tile = launch.Tile(4, block, 4)  # 16: rows are looped over, 128: held
    data, scale = row_cast.row_cast(x, dtype=fp8, power_of_2=power_of_2, align=align, tile=tile)
    expected, scales = row_cast.reference(x, dtype=fp8, power_of_2=power_of_2, align=align)
    same_bits(scale, scales)
    same_bits(data, expected)


@in_interpreter
@examples(15, 60)
@given(
    **sources,
    fp8=float8,
    power_of_2=st.booleans(),
    second=st.sampled_from(
        [column_scale._SECOND, launch.Tile(2, 16, 4)]
    ),  # all partial amaxes at once, or two
    multiprocessors=st.sampled_from([4, 64]),  # few partial amaxes, or one for every few rows
)
def test_column_scale(shape, high, seed, special, layout, fp8, power_of_2, second, multiprocessors):
    x = source(shape, high, seed, special, layout)
    with (
        mock.patch.object(column_scale, "_SECOND", second),
        mock.patch.object(launch, "multiprocessors", lambda device: multiprocessors),
    ):
        got = column_scale.column_scale(x, dtype=fp8, power_of_2=power_of_2, tile=launch.Tile(4, 32, 4))
    same_bits(got, column_scale.reference(x, dtype=fp8, power_of_2=power_of_2))


@in_interpreter
@pytest.mark.parametrize("high", HIGH)
@examples(8, 30)
@given(
    # rows of each tensor, and whether it begins a group
    members=st.lists(st.tuples(st.integers(1, 6), st.booleans()), min_size=1, max_size=row_cast_columns.MOST),
    columns=st.sampled_from([1, 3, 16, 31, 32, 33, 64, 70]),
    seed=st.integers(0, 1000),
    special=st.booleans(),
    layout=st.sampled_from(["row-major", "offset"]),
    fp8=float8,
    power_of_2=st.booleans(),
    step=st.sampled_from([1, 2, 4]),
)
def test_row_cast_columns(high, members, columns, seed, special, layout, fp8, power_of_2, step):
    tensors = [
        source((rows, columns), high, seed + index, special, layout)
        for index, (rows, _) in enumerate(members)
    ]
    starts = [index for index, (_, begins) in enumerate(members) if begins or not index]
    groups = [end - start for start, end in itertools.pairwise([*starts, len(members)])]
    assert row_cast_columns.why_not(tensors, fp8) is None
    format = {"dtype": fp8, "power_of_2": power_of_2}
    got = row_cast_columns.row_cast_columns(tensors, groups, **format, step=step)
    for result, expected in zip(got, row_cast_columns.reference(tensors, groups, **format), strict=True):
        same_bits(result, expected)


@in_interpreter
@pytest.mark.parametrize("high", HIGH)
@examples(8, 30)
@given(
    matrices=st.integers(2, 5),
    rows=st.sampled_from([1, 3, 4, 7, 8]),
    columns=st.sampled_from([1, 16, 31, 64, 70]),
    seed=st.integers(0, 1000),
    special=st.booleans(),
    layout=st.sampled_from(["row-major", "offset"]),
    fp8=float8,
    power_of_2=st.booleans(),
    step=st.sampled_from([1, 2, 4, 16]),
)
def test_row_cast_columns_of_matrices(
    high, matrices, rows, columns, seed, special, layout, fp8, power_of_2, step
):
    """Each of one tensor's has amaxes of its own, whether or not its last program has rows left."""
    x = source((matrices * rows, columns), high, seed, special, layout)
    format = {"dtype": fp8, "power_of_2": power_of_2, "matrices": matrices}
    got = row_cast_columns.row_cast_columns([x], **format, step=step)
    assert got[2].shape == (matrices, columns)
    for result, expected in zip(got, row_cast_columns.reference([x], **format), strict=True):
        same_bits(result, expected)


@on_host
@pytest.mark.parametrize(("tensors", "matrices"), [(2, 2), (1, 3)])
def test_matrices_are_of_one_tensor_and_one_height(tensors, matrices):
    with pytest.raises(ValueError, match=f"{tensors} tensors of 8 rows are not one of {matrices} matrices"):
        row_cast_columns.row_cast_columns(
            [torch.ones(8, 16)] * tensors, dtype=torch.float8_e4m3fn, matrices=matrices
        )


@in_interpreter
@pytest.mark.parametrize("high", HIGH)
@examples(8, 40)
@given(
    counts=st.lists(st.sampled_from([0, 0, 1, 5, 15, 16, 17, 70]), min_size=1, max_size=5),
    behind=st.sampled_from([0, 1, 40]),
    columns=st.sampled_from([1, 16, 31, 33, 64, 70]),
    seed=st.integers(0, 1000),
    special=st.booleans(),
    layout=st.sampled_from(["row-major", "offset"]),
    fp8=float8,
    tile=st.sampled_from([launch.Tile(16, 32, 4), launch.Tile(32, 16, 4)]),
)
def test_groups(high, counts, behind, columns, seed, special, layout, fp8, tile):
    """Of rows, ragged and empty ones; rows behind the last belong to none."""
    rows = max(1, sum(counts) + behind)
    x = source((rows, columns), high, seed, special, layout)
    ends = fenced(torch.tensor(counts).cumsum(0, dtype=torch.int32))
    amaxes = groups.amax(x, ends)
    same_bits(groups.amax_groups(x, ends, tile), amaxes)
    scale, padded = fenced(cast.scale(amaxes, fp8, True)), fenced(groups.padded_ends(ends))
    want = groups.quantize(x, scale, ends, padded, fp8)
    same_bits(groups.quantize_groups(x, scale, ends, padded, fp8, tile), want)


@in_interpreter
@pytest.mark.parametrize("last", [21, 64, 2**31 - 64])
def test_a_group_said_to_end_beyond_the_rows(last):
    """Nothing is read or written there."""
    x = source((20, 33), torch.bfloat16, 0)
    ends, tile = fenced(torch.tensor([16, last], dtype=torch.int32)), launch.Tile(16, 32, 4)
    amaxes = groups.amax(x, ends)
    same_bits(groups.amax_groups(x, ends, tile), amaxes)
    scale, padded = fenced(cast.scale(amaxes, torch.float8_e4m3fn, True)), fenced(groups.padded_ends(ends))
    copy = groups.quantize_groups(x, scale, ends, padded, torch.float8_e4m3fn, tile)
    valid = torch.tensor([16, 20], dtype=torch.int32)
    want = groups.quantize(x, scale, valid, groups.padded_ends(valid), torch.float8_e4m3fn)
    same_bits(copy, want)


@in_interpreter
@pytest.mark.parametrize(
    ("reason", "shapes", "high", "layout"),
    [
        ("rows have 1 to 32768 bytes", [(0, 16)], torch.bfloat16, "row-major"),
        ("rows have 1 to 32768 bytes", [(5, 0)], torch.bfloat16, "row-major"),
        ("rows have 1 to 32768 bytes", [(5, 16), (0, 16)], torch.float16, "row-major"),
        ("rows have 1 to 32768 bytes", [(2, 16385)], torch.bfloat16, "row-major"),
        ("rows have 1 to 32768 bytes", [(2, 8193)], torch.float32, "row-major"),
        ("there are more than 8 tensors", [(2, 16)] * 9, torch.bfloat16, "row-major"),
        ("elements of a row do not lie side by side", [(5, 16)], torch.bfloat16, "column-major"),
        ("elements of a row do not lie side by side", [(5, 16), (3, 16)], torch.bfloat16, "strided"),
    ],
)
def test_rows_and_columns_at_once_by_definition(reason, shapes, high, layout, monkeypatch):
    reasons = []
    monkeypatch.setattr(launch, "say_fallback", reasons.append)
    tensors = [source(shape, high, seed, True, layout) for seed, shape in enumerate(shapes)]
    got = row_cast_columns.row_cast_columns(tensors, dtype=torch.float8_e4m3fn)
    for result, expected in zip(
        got, row_cast_columns.reference(tensors, dtype=torch.float8_e4m3fn), strict=True
    ):
        same_bits(result, expected)
    (said,) = reasons
    assert said.startswith(reason)


def check_computed_amaxes(shape, high, seed, special, tile, summed, plus=0.0):
    """``tile``: rows of a program, of a step, and columns; by default those that are launched."""
    rows, columns = shape
    constants = computed_amaxes.constants(columns, len(summed)) | computed_amaxes.choices(len(summed))[-1]
    constants |= dict(zip(("ROWS", "STEP", "BLOCK"), tile or (), strict=False))
    height, blocks = constants["ROWS"], launch.ceil_div(columns, constants["BLOCK"])
    grad, both = (source((rows, columns * times), high, seed + times, special) for times in (1, 2))
    products = [
        x.float() * y.float() + plus
        for x, y in itertools.combinations((grad, both[:, columns:], both[:, :columns]), 2)
    ]
    amaxes = torch.zeros(computed_amaxes.length(rows, columns, 3), dtype=torch.int32)
    sums = fenced(torch.full((len(summed), launch.ceil_div(rows, height), columns), torch.nan))
    kernel = jit_function(texts.gate(columns, summed, f"+ {plus}"), computed_amaxes.NAME)
    outputs = (amaxes, sums) if summed else (amaxes,)
    kernel[(launch.ceil_div(rows, height) * blocks,)](grad, both, *outputs, rows, **constants)
    same_bits(amaxes.view(torch.float32), computed_amaxes.reference(products, 2))
    for own, index in zip(sums, summed, strict=True):
        for place, found in enumerate(own):
            part = products[index][place * height :][:height].double()
            want, bound = part.sum(0), part.abs().nan_to_num(0.0, posinf=0.0).sum(0)
            # up to 64 float32 additions, each off by 2**-24 of what is added up; Inf and NaN are exact
            close = (found.double() - want).abs() <= 1e-5 * bound
            exact = (found == want) | (found.isnan() & want.isnan())
            assert (close | exact)[bound < 1e38].all()


@in_interpreter
@pytest.mark.parametrize("high", HIGH)
@examples(8, 25)
@given(
    shape=st.tuples(
        st.sampled_from([1, 2, 7, 8, 9, 15, 17, 20]), st.sampled_from([1, 3, 15, 16, 17, 31, 33, 40])
    ),
    seed=st.integers(0, 1000),
    special=st.booleans(),
    tile=st.sampled_from([None, (16, 16, 32), (8, 4, 16)]),
    summed=st.sampled_from([(), (0, 1), (2,)]),
    plus=st.sampled_from([0.0, 0.5]),
)
def test_computed_amaxes(high, shape, seed, special, tile, summed, plus):
    check_computed_amaxes(shape, high, seed, special, tile, summed, plus)


@in_interpreter
@pytest.mark.parametrize("shape", [(0, 33), (17, 0), (0, 0), (65, 300)], ids=str)
@pytest.mark.parametrize("summed", [(), (0, 1)], ids=str)
def test_computed_amaxes_as_launched(shape, summed):
    """Of nothing; and of more than one program takes, in both directions."""
    check_computed_amaxes(shape, torch.bfloat16, 0, True, None, summed)


@in_interpreter
def test_starting_tiles():
    x = source((130, 150), torch.bfloat16, 0)
    scale = scale_of(x, None, torch.float8_e4m3fn, "fit", 0)
    want = cast_transpose.reference(x, scale, scale, dtype=torch.float8_e4m3fn)
    for got, expected in zip(
        cast_transpose.cast_transpose(x, scale, scale, dtype=torch.float8_e4m3fn), want, strict=True
    ):
        same_bits(got, expected)
    for got, expected in zip(
        (
            *row_cast.row_cast(x, dtype=torch.float8_e4m3fn),
            *row_cast_columns.row_cast_columns([x[:40], x[40:45]], dtype=torch.float8_e4m3fn),
        ),
        (
            *row_cast.reference(x, dtype=torch.float8_e4m3fn),
            *row_cast_columns.reference([x[:40], x[40:45]], dtype=torch.float8_e4m3fn),
        ),
        strict=True,
    ):
        same_bits(got, expected)


def amaxes_at_every_exponent():
    """All float32 exponents, each with the mantissas around its ends, and a few between; zero, Inf, NaN."""
    generator = torch.Generator().manual_seed(0)
    ends = torch.cat([torch.arange(64), torch.arange(2**23 - 64, 2**23)])
    # 448, 57344 and 240 over these are a few float32 steps above and below powers of two
    limits = [torch.tensor(torch.finfo(dtype).max).view(torch.int32) & 0x7FFFFF for dtype in FP8]
    near = torch.cat([limit + torch.arange(-64, 64) for limit in limits])
    mantissas = torch.cat([ends, near, torch.randint(0, 2**23, (128,), generator=generator)])
    bits = (torch.arange(255)[:, None] << 23) | (mantissas[None, :] & 0x7FFFFF)
    values = bits.to(torch.int32).view(torch.float32).flatten()
    edge = torch.tensor([0.0, torch.inf, torch.nan, EPS, 2 * EPS, torch.finfo(torch.float32).max])
    return torch.cat([values, edge, torch.nextafter(edge[3:4], edge[4:5])])


@in_interpreter
@pytest.mark.parametrize("power_of_2", [False, True])
@pytest.mark.parametrize("fp8", FP8)
def test_scale_at_every_exponent(fp8, power_of_2):
    """One column each; a partial amax of one row is the value itself."""
    amax = amaxes_at_every_exponent()
    got = torch.empty_like(amax)
    kernel = launch.kernels("column_scale").scale_of_partials_kernel
    kernel[(launch.ceil_div(len(amax), 1 << 17),)](
        *(amax[None], got, 1, len(amax)),
        LIMIT=torch.finfo(fp8).max,
        EPS=EPS,
        POWER_OF_2=power_of_2,
        BLOCK_P=1,
        BLOCK_N=1 << 17,
    )
    want = cast.scale(amax, fp8, power_of_2)
    same_bits(got, want)
    if power_of_2:  # the case that exponent bits alone would get wrong is among them
        assert (want > cast.scale(amax, fp8, False)).any()


@on_host
def test_one_float32_division_is_the_definition():
    """What makes float64 unnecessary in the kernels."""
    amax = torch.cat(
        [amaxes_at_every_exponent(), torch.rand(1 << 20, generator=torch.Generator().manual_seed(0))]
    )
    for fp8 in FP8:
        limit = torch.finfo(fp8).max
        single = torch.where(amax <= torch.tensor(EPS), torch.tensor(limit / EPS), torch.tensor(limit) / amax)
        same_bits(single, cast.scale(amax, fp8, False))


@on_host
@pytest.mark.parametrize("fp8", FP8)
def test_on_a_cpu_the_definition_runs(fp8):
    x = source((33, 20), torch.bfloat16, 0)
    scale = scale_of(x, None, fp8, "fit", 0)
    plain, transposed = cast_transpose.reference(x, scale, scale, dtype=fp8)
    both = cast_transpose.cast_transpose(x, scale, scale, dtype=fp8)
    alone = cast_transpose.cast(x, scale, dtype=fp8, align=[1, 1])
    of_rows = zip(row_cast.row_cast(x, dtype=fp8), row_cast.reference(x, dtype=fp8), strict=True)
    of_columns = column_scale.column_scale(x, dtype=fp8), column_scale.reference(x, dtype=fp8)
    for got, expected in (
        *zip((*both, alone), (plain, transposed, plain), strict=True),
        *of_rows,
        of_columns,
    ):
        same_bits(got, expected)


@on_host
def test_what_kernels_take_is_said():
    fp8, x = torch.float8_e4m3fn, torch.zeros(4, 16, dtype=torch.bfloat16)
    for tensor, dtype, reason in (
        (x[0], fp8, "the kernels take 2-D tensors, and this one has 1 dimensions"),
        (x.long(), fp8, "the kernels read bfloat16, float16 and float32, not torch.int64"),
        (x, torch.bfloat16, "the kernels write float8, not torch.bfloat16"),
        (x, fp8, "Triton has no kernels for device 'cpu'"),
    ):
        assert launch.why_not(tensor, dtype) == reason


@on_host
def test_fnuz_needs_an_amd_gpu():
    from triton.backends.compiler import GPUTarget

    hopper, mi300 = GPUTarget("cuda", 90, 32), GPUTarget("hip", "gfx942", 64)
    for fp8, target in itertools.product(FP8, (hopper, mi300)):
        reason = launch.unsupported_by_target(target, fp8)
        assert (reason is None) == ("fnuz" not in str(fp8) or target is mi300)
    assert (
        launch.unsupported_by_target(hopper, torch.float8_e4m3fnuz)
        == "Triton has no torch.float8_e4m3fnuz on cuda:90"
    )


@on_host
def test_without_triton_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(ImportError, match="pip install triton"):
        launch.kernels("cast_transpose")


@on_host
def test_a_scale_that_does_not_fit():
    x = torch.zeros(4, 6)
    with pytest.raises(ValueError, match=r"6 contiguous float32 values, got torch.float32 of shape \(4,\)"):
        cast_transpose.check_scale(x, torch.ones(4), 0)


@on_host
def test_starting_tile_fills_the_machine():
    assert cast_transpose.starting_tile(8192, 4096, 2, 132) == launch.Tile(128, 128, 8)
    assert cast_transpose.starting_tile(8192, 4096, 4, 132) == launch.Tile(64, 128, 4)
    assert cast_transpose.starting_tile(1024, 1024, 2, 132) == launch.Tile(32, 64, 2)
    assert row_cast.tile_of(4096) == launch.Tile(1, 4096, 8)
    assert row_cast.tile_of(64) == launch.Tile(32, 64, 4)
    assert row_cast.tile_of(14336) == launch.Tile(1, 16384, 16)
    assert row_cast.tile_of(28672) == launch.Tile(1, 8192, 16)
    # 132 places, 528, and 528 again; few rows are not spread further
    for rows, columns, step, programs in (
        (4096, 14336, 32, 128),
        (8192, 4096, 16, 512),
        (38912, 4096, 76, 512),
        (65536, 1024, 32, 2048),  # 2112 places
    ):
        assert row_cast_columns.rows_per_program(rows, columns, 132) == step
        assert row_cast_columns.programs([rows], step) == programs
    assert row_cast_columns.rows_per_program(512, 4096, 132) == 8


@on_host
def test_what_rows_and_columns_at_once_are_not_for():
    def why_not(*shape, dtype=torch.bfloat16, strides=None, others=()):
        strides = strides or torch.empty(shape, device="meta").stride()
        x = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
        more = [torch.empty(other, dtype=dtype, device="meta") for other in others]
        return row_cast_columns.why_not([x, *more], torch.float8_e4m3fn)

    assert why_not(8, 16384) is None and why_not(8, 8192, dtype=torch.float32) is None
    assert why_not(8, 16, strides=(48, 1)) is why_not(8, 16, others=[(24, 16), (1, 16)]) is None
    for reason in (
        why_not(8, 16400),
        why_not(8, 8208, dtype=torch.float32),
        why_not(0, 16),
        why_not(8, 16, others=[(0, 16)]),
    ):
        assert reason == "rows have 1 to 32768 bytes"
    for reason in (why_not(8, 16, strides=(1, 8)), why_not(8, 16, strides=(48, 1), others=[(8, 16)])):
        assert "side by side" in reason
    assert "more than 8" in why_not(8, 16, others=[(8, 16)] * 8)
    with fake_tensor_mode(symbols=True) as mode:
        rows = mode.shape_env.create_unbacked_symint()
        assert row_cast_columns.why_not([torch.empty(rows, 16)], torch.float8_e4m3fn) is None
        assert "length of rows" in row_cast_columns.why_not([torch.empty(16, rows)], torch.float8_e4m3fn)
    assert "2-D" in why_not(8, 16, 2) and "float32" in why_not(8, 16, dtype=torch.float64)
