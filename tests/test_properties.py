"""Properties over shapes, dtypes, layouts and options (hypothesis)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from f8fx import Options, recording
from f8fx.kernels import cast
from f8fx.recipe import PRESETS
from tests.helpers import compiled, randn
from tests.long import with_long

SIZES = st.sampled_from([1, 2, 3, 8, 15, 16, 17, 31, 32, 48, 65])
FP8 = st.sampled_from([torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz])
HIGH = st.sampled_from([torch.bfloat16, torch.float16, torch.float32])
quick = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
slow = settings(max_examples=with_long((15,), 30)[-1], deadline=None, suppress_health_check=list(HealthCheck))
few = settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))


@st.composite
def matrices(draw):
    """A matrix of any small shape, dtype, magnitude and strides."""
    rows, columns = draw(SIZES), draw(SIZES)
    magnitude = 10.0 ** draw(st.integers(-6, 4))
    x = randn(rows * 2, columns * 2, dtype=torch.float32, grad=False, seed=draw(st.integers(0, 99)))
    x = (x * magnitude).to(draw(HIGH))
    layout = draw(st.sampled_from(["contiguous", "strided", "transposed", "expanded"]))
    if layout == "contiguous":
        return x[:rows, :columns].contiguous()
    if layout == "strided":
        return x[::2, ::2][:rows, :columns]
    if layout == "transposed":
        return x[:columns, :rows].t()
    return x[:1, :columns].expand(rows, columns)


@quick
@given(x=matrices(), dtype=FP8, dim=st.sampled_from([None, 0, 1]), power_of_2=st.booleans())
def test_quantize_is_within_half_a_unit_and_uses_the_range(x, dtype, dim, power_of_2):
    scale = cast.scale(cast.amax(x, dim), dtype, power_of_2)
    data = cast.quantize(x, scale, dtype, dim, False, [1, 1])
    assert data.is_contiguous() and data.shape == x.shape and torch.isfinite(data.float()).all()
    error = (cast.dequantize(data, scale, torch.float32, dim) - x.float()).abs()
    # relative to the number itself for normals, to the smallest step below them
    # (not finfo.eps: torch 2.13 reports half of it for e5m2fnuz)
    eps = 2.0 ** (-2 if "e5m2" in str(dtype) else -3)
    step = torch.finfo(dtype).smallest_normal * eps / cast.broadcast(scale, dim)
    assert (error <= x.float().abs() * (eps / 2) * 1.01 + step).all()


@quick
@given(x=matrices(), dtype=FP8, align=st.tuples(st.sampled_from([1, 16]), st.sampled_from([1, 16])))
def test_transposed_and_padded_copies_hold_the_same_bytes(x, dtype, align):
    scale = cast.scale(cast.amax(x, None), dtype, False)
    plain = cast.quantize(x, scale, dtype, None, False, [1, 1]).view(torch.uint8)
    both = cast.quantize(x, scale, dtype, None, True, list(align)).view(torch.uint8)
    rows, columns = x.shape
    assert torch.equal(both[:columns, :rows], plain.t())
    assert both.shape[0] % align[0] == 0 and both.shape[1] % align[1] == 0
    assert both[columns:].sum() == 0 and both[:, rows:].sum() == 0


@slow
@given(
    m=SIZES,
    k=SIZES,
    n=SIZES,
    recipe=st.sampled_from(sorted(PRESETS)),
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
    bias=st.booleans(),
)
def test_any_linear_converts_and_stays_close(m, k, n, recipe, dtype, bias):
    """Every shape is legal once padded, and no element is further off than rounding explains.

    A factor is rounded by at most half a unit, 1/16 in e4m3 and 1/8 in e5m2, a product so by less
    than 0.2; what is tiny beside the tensor's amax is rounded to a multiple of the smallest step.
    """
    x, w = randn(m, k, dtype=dtype, seed=1), randn(n, k, dtype=dtype, seed=2)
    b = randn(n, dtype=dtype, seed=3) if bias else None
    with recording() as reports:
        y = compiled(F.linear, recipe=recipe)(x, w, b)
        grad = randn(m, n, dtype=dtype, grad=False, seed=4)
        y.backward(grad)
    skipped = {d.reason for d in reports[0].decisions if not d.converted}
    allowed = {"kept in high precision by the recipe"}
    if 1 in (m, k, n):  # Inductor decomposes products of vectors on CPU: the forward then is no matmul
        allowed.add("no forward matmul it is the gradient of")
    assert skipped <= allowed, skipped
    assert_product(y, x, w.t(), b)
    assert_product(x.grad, grad, w)
    assert_product(w.grad, grad.t(), x)


def assert_product(got, left, right, bias=None):
    left, right = left.detach().double(), right.detach().double()
    error = (got.detach().double() - left @ right - (0 if bias is None else bias.detach().double())).abs()
    magnitude = left.abs() @ right.abs()
    step = 1e-4 * (
        left.abs().max() * right.abs().sum(0) + right.abs().max() * left.abs().sum(1, keepdim=True)
    )
    rounding = 2**-7 * (got.detach().double().abs() + (0 if bias is None else bias.detach().double().abs()))
    assert (error <= 0.2 * magnitude + step + rounding).all()


@st.composite
def inputs(draw, rows: int, columns: int, seed: int):
    """A parameter or an activation, of any strides a model may give it."""
    layout = draw(st.sampled_from(["contiguous", "strided", "transposed", "expanded"]))
    x = randn(rows * 2, columns * 2, grad=False, seed=seed)
    if layout == "contiguous":
        x = x[:rows, :columns].contiguous()
    elif layout == "strided":
        x = x[::2, ::2]
    elif layout == "transposed":
        x = randn(columns, rows, grad=False, seed=seed).t()
    else:
        x = x[:1, :columns].expand(rows, columns)
    assert x.shape == (rows, columns)
    return x.requires_grad_()


@st.composite
def gates(draw):
    """Input and weights of two layers that read one input, as in a gated MLP, of [m, k] and [n, k]."""
    odd = draw(st.booleans())  # odd sizes are padded, and what needs padding is not merged
    m, k, n_gate, n_up = (draw(SIZES if odd else st.sampled_from([16, 32, 48])) for _ in range(4))
    return (
        draw(inputs(m, k, 1)),
        nn.Parameter(draw(inputs(n_gate, k, 2))),
        nn.Parameter(draw(inputs(n_up, k, 3))),
    )


@few
@given(
    tensors=gates(),
    options=st.fixed_dictionaries(
        {
            "recipe": st.sampled_from(sorted(PRESETS)),
            "pad": st.sampled_from(["auto", "never"]),
            "merge": st.sampled_from(["auto", "never"]),
            "activations": st.sampled_from(["leave", "convert"]),
            "save": st.sampled_from(["lean", "fast"]),
            "dynamic": st.sampled_from([False, True, None]),
            "target": st.sampled_from([None, "h100"]),  # a CPU merges nothing
        }
    ),
)
def test_any_options_and_strides_stay_close(tensors, options):
    """Two layers of one input: no option and no layout changes what they compute."""
    x, gate, up = tensors
    with recording() as reports:
        ys = compiled(lambda x: (F.linear(x, gate), F.linear(x, up)), **options)(x)
        grads = [randn(*y.shape, grad=False, seed=4 + i) for i, y in enumerate(ys)]
        torch.autograd.backward(ys, grads)
    skipped = {d.reason for d in reports[0].decisions if not d.converted}
    allowed = {"kept in high precision by the recipe"}
    if 1 in (*x.shape, *gate.shape, *up.shape):  # as above
        allowed.add("no forward matmul it is the gradient of")
    if options["pad"] == "never":
        allowed.add("not a multiple of 16")
    assert skipped <= allowed, skipped
    for y, grad, w in zip(ys, grads, (gate, up), strict=True):
        assert_product(y, x, w.t())
        assert_product(w.grad, grad.t(), x)
    assert_product(x.grad, torch.cat(grads, 1), torch.cat([gate, up]))


@quick
@given(
    st.fixed_dictionaries(
        {},
        optional={
            "recipe": st.sampled_from(sorted(PRESETS)),
            "select": st.sampled_from(["auto", "all"]),
            "filter_fqns": st.lists(st.sampled_from(["lm_head", "auto_filter_small_kn", "x"]), max_size=2),
            "pad": st.sampled_from(["auto", "never"]),
            "strict": st.booleans(),
            "target": st.sampled_from([None, "h100", "B200"]),
        },
    )
)
def test_options_parse_or_say_why(given_options):
    try:
        options = Options.parse(given_options)
    except ValueError as error:
        assert "auto_filter_small_kn" in str(error) and given_options["select"] == "all"
        return
    assert "auto_filter_small_kn" not in options.filter_fqns
    assert hash(options.decision_key()) == hash(Options.parse(given_options).decision_key())
