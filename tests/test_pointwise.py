"""What the graph computes, written as Triton statements, and computed here by reading these statements as PyTorch."""

from __future__ import annotations

import itertools
import re
import types
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import sympy
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._inductor.sizevars import SizeVarAllocator
from torch._inductor.virtualized import V

from f8fx import kernel_lowerings
from f8fx.kernels import computed_amaxes
from f8fx.torch_private import EXPRESSION_IMPORTS, Expressions, expressions
from f8fx.torch_private.pointwise import _Unsupported, _Writer
from tests.kernels.test_compile import TARGETS, check_occupancy, computed_amaxes_case
from tests.test_codegen import generated

pytest.importorskip("triton")

ROWS, COLUMNS, WIDTH = 48, 1040, 4096


class Activated(nn.Module):
    """A layer, an activation function and a layer that reads what it gives."""

    function: Callable[[Tensor], Tensor]

    def __init__(self):
        super().__init__()
        self.gate, self.up = (nn.Linear(WIDTH, COLUMNS, bias=False) for _ in range(2))
        self.down = nn.Linear(COLUMNS, WIDTH, bias=False)

    def forward(self, x):
        return self.down(self.function(self.gate(x)))


class Gated(Activated):
    """The two layers that read the input are merged: their results lie side by side."""

    def forward(self, x):
        return self.down(self.function(self.gate(x)) * self.up(x))


class Biased(Activated):
    """The gradient of the bias is the sum of the columns."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(WIDTH, COLUMNS)


class Masked(Activated):
    """What a mask, of truth values in memory, leaves."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mask", torch.empty(ROWS, COLUMNS, dtype=torch.bool))

    def forward(self, x):
        return self.down(self.function(self.gate(x)).masked_fill(self.mask.bool(), 0))


class Address:
    """A tensor's memory: an index added to it gives its elements there."""

    def __init__(self, tensor: Tensor) -> None:
        self.elements = tensor.reshape(-1)

    def __add__(self, index: Tensor) -> Tensor:
        inside = (index >= 0) & (index < len(self.elements))
        assert inside.all(), "reads beyond a tensor"
        return self.elements[index]


def computed(written: Expressions, inputs: Sequence[Tensor]) -> list[Tensor]:
    """The values that the statements give, on one tile of the tensors' size."""
    names = {
        "tl": types.SimpleNamespace(
            bfloat16=torch.bfloat16,
            float32=torch.float32,
            int1=torch.bool,
            int16=torch.int16,
            broadcast_to=torch.broadcast_to,
            load=lambda elements, mask, other: elements,
            sigmoid=torch.sigmoid,
            sqrt_rn=torch.sqrt,
            where=lambda condition, *values: torch.where(condition, *map(torch.as_tensor, values)),
        ),
        "tl_math": types.SimpleNamespace(abs=torch.abs, log=torch.log),
        "libdevice": torch,
        "STEP": ROWS,
        "BLOCK": COLUMNS,
        "m": torch.arange(ROWS)[:, None],
        "n": torch.arange(COLUMNS)[None, :],
        "inside": None,
        **{f"in{index}": Address(tensor) for index, tensor in enumerate(inputs)},
    }
    lines = (re.sub(r"\.to\((tl\.\w+), bitcast=True\)", r".view(\1)", line) for line in written.lines)
    exec("\n".join(lines), names)
    return [names[result] for result in written.results]


def form_of(x: Any) -> tuple[Any, ...]:
    """What tells inputs apart, of a tensor or a value of Inductor's."""
    if isinstance(x, Tensor):
        return (*x.shape, x.dtype == torch.bool)
    return (*map(int, x.get_size()), x.get_dtype() == torch.bool)


def written_for(
    module: type[Activated], function: Callable[[Tensor], Tensor], shape: tuple[int, ...] = (ROWS, WIDTH)
) -> tuple[list[Any], str]:
    """What is written for the gradient of the function, and the backward's code."""
    found = []

    def recorded(values):
        # sizes while they can be asked
        written = expressions(values)
        found.append((written, [form_of(x) for x in written.inputs]) if written else None)
        return written

    kind = type(module.__name__, (module,), {"function": staticmethod(function)})
    with mock.patch.object(kernel_lowerings, "expressions", recorded):
        _, backward = generated(kind, shape, recipe="rowwise")
    return found, backward.code


FUNCTIONS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu, tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu squared": lambda x: F.relu(x).square(),
    "leaky relu": F.leaky_relu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "softcap": lambda x: 30.0 * torch.tanh(x / 30.0),
    "hard swish": F.hardswish,
    "mish": F.mish,
    "clamped": lambda x: torch.clamp(x, -0.5, 0.5),
}


#: The functions that stand for all, one of a gate and one without.
USUAL = ((Gated, "silu"), (Activated, "gelu"))


@pytest.mark.parametrize(
    ("module", "name"),
    [
        pytest.param(*case, marks=() if case in USUAL else pytest.mark.long)
        for case in itertools.product((Activated, Gated, Masked), FUNCTIONS)
    ],
)
def test_activation_functions(name, module):
    function = FUNCTIONS[name]
    ((written, forms),), code = written_for(module, function)
    assert re.search(r"computed_amaxes_kernel_\d+\.run\(", code)
    generator = torch.Generator().manual_seed(0)
    grad = torch.randn(ROWS, COLUMNS, generator=generator)
    gate, up = (torch.randn(ROWS, COLUMNS, generator=generator, requires_grad=True) for _ in range(2))
    before = (gate, up) if module is Gated else (gate,)
    mask = torch.rand(ROWS, COLUMNS, generator=generator) < 0.5
    after = function(gate) * (up if module is Gated else ~mask if module is Masked else 1)
    wanted = [*torch.autograd.grad(after, before, grad), after]
    # which input is which follows from its form, where these differ
    inputs = (grad, torch.cat(before, 1).detach(), *([mask] if module is Masked else ()))
    orders = [given for given in itertools.permutations(inputs) if [*map(form_of, given)] == forms]
    errors = []
    for given in orders:
        values = computed(written, given)
        errors.append(max((a - b).abs().max().item() for a, b in zip(values, wanted, strict=True)))
    # a result that the gradient is computed of, and other kernels read, has the digits of bfloat16
    is_rounded = any("bitcast" in line for line in written.lines)
    assert is_rounded == (module is Activated and name in ("relu", "tanh", "sigmoid"))
    assert orders and min(errors) < (0.03 if is_rounded else 1e-5), errors


@pytest.mark.parametrize(
    ("module", "choice"),
    [
        pytest.param(module, n, marks=() if n == 0 else pytest.mark.long)
        for module in (Gated, Biased)
        for n in range(len(computed_amaxes.choices(module is Biased)))
    ],
)
@pytest.mark.parametrize("capability", TARGETS)
def test_the_generated_kernel_has_no_spills(capability, choice, module, codes, tmp_path):
    """With libdevice's functions in it."""
    pattern = r"@triton\.jit\ndef computed_amaxes_kernel\((.*?), M, N: tl.*?(?=^'{3})"
    (body,) = re.finditer(pattern, codes[module], re.S | re.M)
    text = (
        computed_amaxes.source(0, [], ["x"], 1, (), EXPRESSION_IMPORTS).partition("@triton.jit")[0] + body[0]
    )
    pointers = dict.fromkeys(body[1].split(", "), "bf16") | {"amaxes": "i32"}
    assert ("sums" in pointers) == (module is Biased)
    if module is Biased:
        pointers["sums"] = "fp32"
    compiled = computed_amaxes_case(text, pointers, COLUMNS, "sums" in pointers, choice).compile(capability)
    assert check_occupancy(compiled, tmp_path)["REG"] <= 168
    assert compiled.ptx["ld.global.v4.b32"] or compiled.still_on_their_way()


@pytest.fixture(scope="module")
def codes() -> dict[type[Activated], str]:
    return {Gated: written_for(Gated, F.silu)[1], Biased: written_for(Biased, F.gelu)[1]}


def test_what_is_summed_is_computed_once():
    ((written, _),), _ = written_for(Biased, F.gelu)
    gradient, _, summed = written.results
    assert gradient == summed


@pytest.mark.long
def test_there_are_no_words_for_everything():
    """Then the amaxes are Inductor's."""
    found, code = written_for(Activated, torch.atan)
    assert found == [None] and "computed_amaxes" not in code


class Kept(nn.Module):
    """What the gate gives is added to what the layer makes of it."""

    def __init__(self):
        super().__init__()
        self.gate, self.up, self.out = (nn.Linear(COLUMNS, COLUMNS, bias=False) for _ in range(3))

    def forward(self, x):
        h = F.silu(self.gate(x)) * self.up(x)
        return self.out(h) + h


class Repeated(nn.Module):
    """Layers between which the sums of all before them go."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(COLUMNS, COLUMNS, bias=False) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(F.silu(x))
        return x


@pytest.mark.long
@pytest.mark.parametrize("module", [Kept, Repeated])
def test_inputs_that_inductor_writes_to_buffers(module):
    """Their strides are settled before they are written into the kernel."""
    _, backward = generated(module, (ROWS, COLUMNS), recipe="rowwise")
    assert re.search(r"computed_amaxes_kernel_\d+\.run\(", backward.code)


@pytest.mark.long
@pytest.mark.parametrize("module", [Activated, Gated])
def test_batches_of_sequences(module):
    """[batch, sequence, width] is [tokens, width] in memory."""
    found, code = written_for(module, F.silu, (2, ROWS // 2, WIDTH))
    assert found != [None] and re.search(r"computed_amaxes_kernel_\d+\.run\(", code)
    ((flat, _),), _ = written_for(module, F.silu)
    assert found[0][0].lines == flat.lines


def test_a_number_in_the_memory_of_the_cpu_is_no_input():
    """Kernels are given its value, which is no address."""
    number = types.SimpleNamespace(get_device=lambda: torch.device("cpu"))
    graph = types.SimpleNamespace(
        get_dtype=lambda name: torch.float32, graph_inputs={"number": number}, sizevars=SizeVarAllocator()
    )
    with V.set_graph_handler(graph):
        assert _Writer((4, 4), torch.device("cpu"))._load("number", sympy.Integer(0))
        with pytest.raises(_Unsupported):
            _Writer((4, 4), torch.device("cuda", 0))._load("number", sympy.Integer(0))


def test_floats_and_truth_values_are_inputs_and_integers_are_not():
    """What is computed of integers, in integers, is not computed in float32."""

    def loaded(dtype):
        graph = types.SimpleNamespace(
            get_dtype=lambda name: dtype,
            graph_inputs={"x": types.SimpleNamespace(get_device=lambda: torch.device("cpu"))},
            sizevars=SizeVarAllocator(),
        )
        writer = _Writer((4, 4), torch.device("cpu"))
        with V.set_graph_handler(graph):
            writer._load("x", sympy.Integer(0))
        return re.search(r"to\(tl\.(\w+)\)$", writer.lines[0])[1]

    assert {loaded(dtype) for dtype in (torch.bfloat16, torch.float16, torch.float32)} == {"float32"}
    assert loaded(torch.bool) == "int1"
    for dtype in (torch.int64, torch.uint8, torch.float64, torch.float8_e4m3fn):
        with pytest.raises(_Unsupported):
            loaded(dtype)


@pytest.mark.parametrize("value", [True, sympy.Symbol("s0")], ids=str)
def test_a_constant_is_a_number(value):
    """Neither a condition nor a size that is known only at run time."""
    writer = _Writer((4, 4), torch.device("cpu"))
    assert writer("constant", 2, torch.float32) == "2.0"
    with pytest.raises(_Unsupported):
        writer("constant", value, torch.float32)


def test_columns_far_apart_are_counted_in_64_bits():
    """Of a transposed input a column is a row of memory: two billion elements are 32 bits' worth."""
    writer = _Writer((1 << 14, 1 << 18), torch.device("cpu"))
    m, n = writer.ranges
    with V.set_graph_handler(types.SimpleNamespace(sizevars=SizeVarAllocator())):
        assert writer._index(m + n * (1 << 14)) == "1*m + 16384*n.to(tl.int64) + 0"
        assert writer._index(m * (1 << 18) + n + 5) == "262144*m + 1*n + 5"
