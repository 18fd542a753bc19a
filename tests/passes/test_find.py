"""*find*: which matmuls are seen, in which role, under which name, and reading what."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.two_tensor import TwoTensor

import f8fx
from f8fx.passes import Find, fqn
from f8fx.passes.fake import set_value
from f8fx.passes.find import Found
from f8fx.torch_private import fake_tensor_mode
from tests.helpers import bf16, joint_graphs, randn, report_of, sqnr

aten = torch.ops.aten


def found_in(fn, *args, **kwargs) -> Found:
    result: list[Found] = []
    joint_graphs(fn, *args, transform=lambda graph: result.append(Find()(graph)), **kwargs)
    return result[0]


def summary(found: Found) -> list[str]:
    """``role fqn m x k x n: left @ right``, with ' for a transposed operand."""

    def operand(o):
        return f"{o.kind}({o.node.name}{chr(39) if o.transposed else ''})"

    return [
        f"{g.role} {g.fqn} {g.m}x{g.k}x{g.n}: {operand(g.left)} @ {operand(g.right)}" for g in found.gemms
    ]


def test_linear_has_three_gemms_that_share_three_tensors():
    assert summary(found_in(F.linear, randn(2, 8, 32), randn(48, 32))) == [
        "output  16x32x48: input(view) @ weight(primals_2')",
        "grad_weight  48x16x32: grad_output(view_2') @ input(view)",
        "grad_input  16x48x32: grad_output(view_2) @ weight(primals_2)",
    ]


def test_names_in_forward_and_backward():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(32, 32, dtype=bf16) for _ in range(2)])
            self.head = nn.Sequential(nn.GELU(), nn.Linear(32, 16, dtype=bf16))
            self.register_parameter("free", nn.Parameter(randn(16, 16, grad=False)))

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return F.linear(self.head(x), self.free)

    names = [(g.role, g.fqn) for g in found_in(Net(), randn(16, 32)).gemms]
    for role in ("output", "grad_input", "grad_weight"):
        assert {n for r, n in names if r == role} == {"layers.0", "layers.1", "head.1", ""}


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("L['self'].layers.0.attn", "layers.0.attn"),
        ("L['self']._modules['layers']._modules['0'].attn", "layers.0.attn"),
        ("L['self'].layers[0].attn", "layers.0.attn"),
        ("getattr(L['self'].layers, '0').attn", "layers.0.attn"),
        ("getattr(getattr(L['self'], 'layers'), '0')", "layers.0"),
        ("L['self']._orig_mod.layers.3._checkpoint_wrapped_module.mlp", "layers.3.mlp"),
        ("L['model'].layers['a.b'].mlp", "layers.a.b.mlp"),
        ("L['self'].heads._modules['[INST]'].wq", "heads.[INST].wq"),
        ("L['self'].heads._modules['c\"d]']", 'heads.c"d]'),
        ("L['self'].heads._modules[\"p(q), 'r'\"]", "heads.p(q), 'r'"),
        (r"""L['self'].heads._modules['a\'b"c']""", """heads.a'b"c"""),
        ("G['net'].fc", "fc"),
        ("L['self'].__dict__['_modules']['base_model'].layer", "base_model.layer"),
        ("L['forward'].__closure__[0].cell_contents.blocks.0", "blocks.0"),
        ("L['args'][0].blocks.0", "blocks.0"),
        ("L['args'][0]", ""),
        ("L['layers'][0].attn", "0.attn"),
        ("L['self'].forward._torchdynamo_inline.__self__.net.head", "net.head"),
        ("L['self'].forward.__self__", ""),
        ("L['self'].layers[0].attn.forward.__closure__[0].cell_contents.__self__.wq", "layers.0.attn.wq"),
        ("L['self'].layers.0.attn.forward.__closure__[1].cell_contents.wq", "layers.0.attn.wq"),
        ("L['self'].attn.forward.__wrapped__.__closure__[0].cell_contents.__self__.wq", "attn.wq"),
        ("L['self'].layers.0.attn._old_forward.__self__.wq", "layers.0.attn.wq"),
        ("L['self'].attn.forward.args[0]._old_forward.__self__.wq", "attn.wq"),
        ("L['self'].attn._old_forward.__self__", "attn"),
        ("L['self'].attn.feed_forward.forward.func.__self__.w1", "attn.feed_forward.w1"),
        ("L['self'].attn.forward.args[0].wq", "attn.wq"),
        ("L['self'].attn.my_forward_fn.__wrapped__.func.args[0].wq", "attn.wq"),
        ("L['self'].feed_forward.w1", "feed_forward.w1"),
        ("L['self'].feed_forward.func", "feed_forward.func"),
        ("L['self'].feed_forward.func.forward.__self__.w1", "feed_forward.func.w1"),
        ("L['self'].forward_head.args[0].w", "forward_head.args.0.w"),
        ("L['self'].__self__attention.wo", "__self__attention.wo"),
        ("L['self']", ""),
        ("", ""),
    ],
)
def test_clean_names(path, name):
    assert fqn.clean(path) == name


def test_a_weight_that_a_property_gathers_has_the_name_of_its_layer():
    node = fx.Graph().placeholder("x")
    getter = "dict(type(L['self'].layers['0'].wqkv).__dict__)['weight'].fget.__closure__[0].cell_contents"
    node.meta["nn_module_stack"] = {
        "layer": ("L['self'].layers['0'].wo", nn.Linear),
        "gather": (getter, nn.Module),
    }
    assert fqn.of_node(node) == "layers.0.wo"
    node.meta["nn_module_stack"] = {
        "layer": ("L['self'].layers['0'].fget.linear", nn.Linear)
    }  # a module of that name
    assert fqn.of_node(node) == "layers.0.fget.linear"


def test_names_of_graphs_traced_without_dynamo():
    """Those of TorchTitan's graph_trainer."""
    graph = fx.Graph()
    node = graph.placeholder("x")
    for custom, name in (({"module_fqn": "layers.0.wo"}, "layers.0.wo"), ({}, ""), (None, "")):
        node.meta["custom"] = custom
        assert fqn.of_node(node) == name


FORMS = {
    "mm": (lambda x, w: x @ w, (16, 32), (32, 48)),
    "transposed weight": (lambda x, w: x @ w.t(), (16, 32), (48, 32)),
    "transposed input": (lambda x, w: x.t() @ w, (32, 16), (32, 48)),
    "3-D times 2-D": (lambda x, w: x @ w, (2, 8, 32), (32, 48)),
    "4-D times 2-D": (lambda x, w: torch.matmul(x, w), (2, 2, 4, 32), (32, 48)),
    "einsum": (lambda x, w: torch.einsum("bsd,hd->bsh", x, w), (2, 8, 32), (48, 32)),
    "einsum, head split": (lambda x, w: torch.einsum("bsd,dhe->bshe", x, w), (2, 8, 32), (32, 3, 16)),
    "einsum, head merge": (lambda x, w: torch.einsum("bshe,hed->bsd", x, w), (2, 8, 4, 8), (4, 8, 48)),
    "vector": (lambda x, w: F.linear(x, w), (32,), (48, 32)),
    "vector @": (lambda x, w: x @ w, (32,), (32, 48)),
    "one row": (lambda x, w: F.linear(x, w), (1, 32), (48, 32)),
    "addmm": (lambda x, w: torch.addmm(torch.zeros(48, dtype=bf16), x, w), (16, 32), (32, 48)),
    "weight first": (lambda x, w: w @ x, (32, 16), (48, 32)),
    "tensordot": (lambda x, w: torch.tensordot(x, w, dims=([2], [1])), (2, 8, 32), (48, 32)),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_gemm_has_its_three_roles(form):
    fn, x, w = FORMS[form]
    found = found_in(fn, randn(*x), randn(*w))
    assert sorted(g.role for g in found.gemms) == ["grad_input", "grad_weight", "output"], summary(found)
    assert not found.unmatched
    # forward and backward uses of one tensor are one node
    by_kind = {}
    for gemm in found.gemms:
        for operand in (gemm.left, gemm.right):
            by_kind.setdefault(operand.kind, set()).add(operand.node)
    assert {kind: len(nodes) for kind, nodes in by_kind.items()} == {
        "input": 1,
        "weight": 1,
        "grad_output": 1,
    }


def test_three_layers_with_one_input_read_one_node():
    def qkv(x, q, k, v):
        return F.linear(x, q) + F.linear(x, k) + F.linear(x, v)

    found = found_in(qkv, randn(2, 8, 32), *(randn(48, 32, seed=s) for s in (1, 2, 3)))
    inputs = {o.node for g in found.gemms for o in (g.left, g.right) if o.kind == "input"}
    assert len(inputs) == 1
    # each gradient belongs to the layer of its own weight
    for gemm in found.gemms:
        weights = [o.node for o in (gemm.left, gemm.right) if o.kind == "weight"]
        if weights and gemm.role == "grad_input":
            forward = next(g for g in found.gemms if g.node is gemm.layer)
            assert weights[0] in (forward.left.node, forward.right.node)


def test_frozen_weight_has_no_grad_weight():
    roles = [g.role for g in found_in(F.linear, randn(16, 32), randn(48, 32, grad=False)).gemms]
    assert roles == ["output", "grad_input"]


def test_tied_weight_is_one_tensor():
    def tied(tokens, w):
        return F.linear(F.embedding(tokens, w), w)

    found = found_in(tied, torch.arange(16), randn(48, 32))
    weights = {o.node for g in found.gemms for o in (g.left, g.right) if o.kind == "weight"}
    assert len(weights) == 1


def test_batched_matmul_is_left_with_its_reason():
    found = found_in(torch.bmm, randn(2, 16, 32), randn(2, 32, 16))
    assert not found.gemms
    assert {u.reason for u in found.unmatched} == {"batched matmul of two activations"}


class Experts(nn.Module):
    """A matrix for each of two experts."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(randn(2, 32, 48, grad=False))

    def forward(self, x):
        return torch.einsum("ebd,edh->ebh", x, self.weight)


def test_a_batched_matmul_with_a_parameter_says_so():
    """Forward, backward and inference; what is computed from parameters is an activation."""
    x = randn(2, 16, 32)
    wanted = {"batched matmul with a weight for each batch"}
    decisions = report_of(Experts(), x).decisions
    assert {d.reason for d in decisions} == wanted
    assert sorted(d.role for d in decisions) == ["grad_input", "grad_weight", "output"]
    assert {row.reason for row in f8fx.explain(Experts(), x, select="all").rows} == wanted
    with torch.no_grad():
        assert {d.reason for d in report_of(Experts(), x).decisions} == wanted
    scores = nn.Sequential(Experts(), nn.Tanh())
    reasons = [d.reason for d in report_of(lambda x: scores(x) @ scores(x).mT, x).decisions]
    assert reasons.count("batched matmul of two activations") == 3  # the product and its two gradients
    bias = nn.Parameter(randn(48, grad=False))
    experts = Experts()
    added = report_of(lambda x: torch.baddbmm(bias, x, experts.weight), x)
    assert {d.reason for d in added.decisions} == wanted
    more = nn.Parameter(randn(4, 32, 48, grad=False))
    below = nn.Linear(32, 96, bias=False, dtype=torch.bfloat16).weight  # each other, in one matrix
    for computed in (
        lambda: more[:2],
        lambda: experts.weight * 0.5,
        lambda: below.view(2, 48, 32).mT,
    ):
        decisions = report_of(lambda x, computed=computed: torch.bmm(x, computed()), x).decisions
        assert {d.reason for d in decisions} == wanted
        assert sorted(d.role for d in decisions) == ["grad_input", "grad_weight", "output"]
    heads = report_of(lambda x: x @ experts.weight, randn(3, 2, 16, 32))  # of each of three in the batch
    assert {d.reason for d in heads.decisions} == wanted
    assert sorted(d.role for d in heads.decisions) == ["grad_input", "grad_weight", "output"]


def test_a_matrix_that_is_expanded_and_then_cast_is_one():
    """Autocast casts what the model has expanded."""
    weight = nn.Parameter(randn(32, 48, grad=False).float())

    def expanded(x):
        with torch.autocast("cpu", torch.bfloat16):
            return x @ weight.expand(2, 32, 48)

    decisions = report_of(expanded, randn(2, 16, 32).float()).decisions
    assert [d.reason for d in decisions] == ["batched matmul with one matrix"] * len(decisions)


@pytest.mark.parametrize(("batch", "heads"), [(2, 4), (1, 1)])
def test_attention_is_left_with_its_reason(batch, heads):
    """Also where batch times heads is 1, as an einsum's bmm is."""

    def attention(x):
        q, k, v = x.sin(), x.cos(), x.tanh()
        return torch.softmax(q @ k.transpose(-1, -2), -1) @ v

    found = found_in(attention, randn(batch, heads, 16, 32))
    assert not found.gemms and len(found.unmatched) == 6
    assert {u.reason for u in found.unmatched} == {"batched matmul of two activations"}


@pytest.mark.parametrize(
    "compute",
    [lambda w: w * 0.5, lambda w: w[:48], lambda w: w.chunk(2)[0], lambda w: w + w.mean(1, keepdim=True)],
)
def test_what_is_computed_from_parameters_is_a_weight(compute):
    """Also where what it is multiplied with is an input of the graph, and so could be one."""
    weight = nn.Parameter(randn(96, 32, grad=False))
    x = randn(16, 32)
    report = report_of(lambda x: F.linear(x, compute(weight)), x, recipe="rowwise_with_gw_hp")
    n = compute(weight).shape[0]
    assert {(d.role, d.m, d.k, d.n, d.converted) for d in report.decisions} == {
        ("output", 16, 32, n, True),
        ("grad_input", 16, n, 32, True),
        ("grad_weight", n, 16, 32, False),
    }


def test_an_einsum_with_a_computed_weight_is_a_layer():
    """It arrives as a batched matmul of one, as attention of one head does."""
    weight = nn.Parameter(randn(4, 32, 48, grad=False))
    report = report_of(lambda x: torch.einsum("bshd,hdn->bsn", x, weight * 0.5), randn(2, 16, 4, 32))
    assert {(d.role, d.reason) for d in report.decisions} == {
        (role, "converted") for role in ("output", "grad_input", "grad_weight")
    }


def test_attention_of_learned_queries_is_no_layer():
    """One batch and one head of them: the queries are computed from parameters alone."""
    tokens, weight = (nn.Parameter(randn(*shape, grad=False)) for shape in ((16, 32), (32, 32)))

    def attention(k):
        return torch.softmax((tokens @ weight).mul(0.2)[None] @ k.tanh().mT, -1)

    report = report_of(attention, randn(1, 24, 32))
    wanted = {d.role: d.reason for d in report.decisions if "batched" in d.reason}
    assert wanted == dict.fromkeys(("output", "grad_input"), "batched matmul of two activations")
    assert sum(d.converted for d in report.decisions) == 3  # tokens @ weight and its gradients


@pytest.mark.parametrize("given", ["parameter", "tensor", "two tensors"])
@pytest.mark.parametrize("batch", [1, 4])
def test_learned_tokens_are_an_input(given, batch):
    """Whatever the weight they meet is: a parameter, an input of the graph, a subclass that arrives as its parts."""
    if given == "tensor" and batch == 1:
        pytest.skip("a parameter and an input of the graph: nothing tells which is the weight")
    tokens, value = nn.Parameter(randn(1, 16, 32, grad=False)), randn(48, 32, grad=False)
    weight = {
        "parameter": lambda: nn.Parameter(value),
        "tensor": lambda: value.requires_grad_(),
        "two tensors": lambda: nn.Parameter(TwoTensor(value, value.clone())),
    }[given]()

    def layer(weight, x):
        return F.linear(tokens.expand(batch, -1, -1) * 1.5, weight) + x[0]

    def of_its_own(x):
        return layer(weight, x)

    x = randn(1, grad=False)
    called = (layer, weight, x) if given == "tensor" else (of_its_own, x)
    report = report_of(*called, recipe="rowwise_with_gw_hp", debug=False)
    m = 16 * batch
    assert {(d.role, d.m, d.k, d.n, d.converted) for d in report.decisions} == {
        ("output", m, 32, 48, True),
        ("grad_input", m, 48, 32, True),
        ("grad_weight", 48, m, 32, False),
    }


@pytest.mark.parametrize("compute", [lambda w: w[:48], lambda w: w + w[:, :16] @ w[:16]])
def test_of_two_computed_from_parameters_the_right_one_is_the_weight(compute):
    tokens, weight = nn.Parameter(randn(16, 32, grad=False)), nn.Parameter(randn(96, 32, grad=False))
    n = compute(weight).shape[0]
    report = report_of(lambda x: F.linear(tokens, compute(weight)) + x, randn(1), recipe="rowwise_with_gw_hp")
    assert ("grad_weight", n, 16, 32, False) in {
        (d.role, d.m, d.k, d.n, d.converted) for d in report.decisions
    }


def test_products_added_to_a_weight_leave_it_one():
    """``w + b @ a``, with an input of the graph that could be the weight instead."""
    w, a, b = (nn.Parameter(randn(*shape, grad=False)) for shape in ((48, 32), (16, 32), (48, 16)))
    report = report_of(lambda x: F.linear(x, w + b @ a), randn(64, 32), recipe="rowwise_with_gw_hp")
    of_x = {(d.role, d.converted) for d in report.decisions if 64 in (d.m, d.k, d.n)}
    assert of_x == {("output", True), ("grad_input", True), ("grad_weight", False)}


def test_the_product_of_a_parameters_features_is_no_layer():
    """An image that is learned, as in style transfer: a convolution's result is no weight."""
    image, kernel = (nn.Parameter(randn(*shape, grad=False)) for shape in ((1, 16, 8, 8), (32, 16, 3, 3)))

    def gram(x):
        features = F.conv2d(image, kernel, padding=1).flatten(2)
        return torch.bmm(features, features.mT) + x

    report = report_of(gram, randn(1))
    assert {d.reason for d in report.decisions} == {"batched matmul of two activations"}


def test_a_weight_on_the_left_is_still_one():
    """And what it is multiplied with an activation, computed or not."""
    weight = nn.Parameter(randn(48, 16, grad=False))
    for act in (lambda x: x, torch.tanh):
        report = report_of(lambda x, act=act: weight @ act(x), randn(16, 32), recipe="rowwise_with_gw_hp")
        kept = [(d.role, d.m, d.k, d.n) for d in report.decisions if not d.converted]
        assert kept == [("grad_weight", 48, 32, 16)]


def test_one_input_of_two_layers_has_its_gradients():
    """One of the weights is computed, the other is not; rowwise."""
    weight = nn.Parameter(randn(64, 32, grad=False))
    report = report_of(
        lambda x: F.linear(x, weight[:48]).sum(1) + F.linear(x, weight).sum(1),
        randn(16, 32),
        recipe="rowwise",
    )
    assert {d.reason for d in report.decisions} == {"converted"} and len(report.decisions) == 6


class ByHand(torch.autograd.Function):
    """A layer whose gradients have no number of a forward."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w.t()

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        return grad @ w, grad.t() @ x


def test_a_gradient_by_hand_goes_to_no_layer_that_has_one():
    """The second and the third layer have one gradient; the second has its own number."""

    def f(x, a, b, c):
        return ByHand.apply(x, a).sin() * (F.linear(x, b) + ByHand.apply(x, c))

    weights = [randn(48, 32, seed=seed) for seed in range(3)]
    gemms = found_in(f, randn(16, 32), *weights).gemms
    outputs = [gemm.node for gemm in gemms if gemm.role == "output"]
    assert {gemm.layer for gemm in gemms if gemm.role == "grad_weight"} == {*outputs}


@pytest.mark.parametrize("of_layers", [True, False])
def test_a_gradient_by_hand_has_the_name_of_its_layer(of_layers):
    """Or its own, where the layer has none."""
    found: list[Found] = []

    def find(graph):
        matmuls = graph.find_nodes(op="call_function", target=aten.mm.default)
        for node, name in zip(matmuls[:2] if of_layers else matmuls[2:], "abcd", strict=False):
            node.meta["nn_module_stack"] = {"": (f"L['self'].{name}", nn.Module)}
        found.append(Find()(graph))

    weights = randn(48, 32, seed=1), randn(48, 32, seed=2)
    joint_graphs(
        lambda x, a, b: ByHand.apply(x, a).sin() * ByHand.apply(x, b), randn(16, 32), *weights, transform=find
    )
    gemms = found[0].gemms
    outputs = {gemm.node: gemm for gemm in gemms if gemm.role == "output"}
    assert {gemm.layer for gemm in gemms if gemm.role == "grad_weight"} == outputs.keys()
    gradients = [gemm for gemm in gemms if gemm.role != "output"]
    names = [outputs[gemm.layer].fqn for gemm in gradients] if of_layers else [*"abcd"]
    assert [gemm.fqn for gemm in gradients] == names


def test_a_gradient_by_hand_goes_to_no_layer_of_another_input():
    """One whose weight is frozen, but which has the same gradient."""

    def f(x, z, a, b, c):
        return (ByHand.apply(x, a) + ByHand.apply(z, c)).sin() * ByHand.apply(x, b)

    a, b, c = (randn(48, 32, seed=seed) for seed in range(3))
    gemms = found_in(f, randn(16, 32, grad=False), randn(16, 32), a, b, c.detach()).gemms
    inputs = {gemm.node: gemm.left.node for gemm in gemms if gemm.role == "output"}
    gradients = [gemm for gemm in gemms if gemm.role == "grad_weight"]
    assert [inputs[gemm.layer] for gemm in gradients] == [gemm.right.node for gemm in gradients]


def test_a_sliced_operand_is_not_traced_past_the_slice():
    found = found_in(lambda x, w: F.linear(x[:, :32], w), randn(16, 64), randn(48, 32))
    output = next(g for g in found.gemms if g.role == "output")
    assert output.left.node.name.startswith("slice")


def test_a_permute_that_mixes_dimensions_is_not_a_transpose():
    """[8, 4, 2] read as [4, 2, 8] is a transpose of the matrix; read as [2, 4, 8] it is not."""

    def f(x, w):
        return x.permute(2, 1, 0).reshape(8, 8) @ w

    found = found_in(f, randn(8, 4, 2), randn(8, 16))
    output = next(g for g in found.gemms if g.role == "output")
    assert not output.left.transposed
    assert output.left.node.name != "primals_1"


def test_users_of_existing_float8_are_left():
    def f(a, b):
        one = torch.ones((), dtype=torch.float32)
        fp8 = torch.float8_e4m3fn
        return torch._scaled_mm(a.to(fp8), b.to(fp8).t(), one, one, out_dtype=bf16)

    found = found_in(f, randn(16, 32, grad=False), randn(48, 32, grad=False))
    assert [u.reason for u in found.unmatched] == ["already float8"]


def test_a_gradient_without_tangents_cannot_be_told_from_a_tied_autoencoder():
    """Both multiply what depends on ``x @ w`` with ``w`` again, so both are what the second is for sure."""

    def gradient(x, w):
        return torch.func.grad(lambda x: torch.sin(x @ w).sum())(x)

    def autoencoder(x, w):
        return torch.cos(x @ w) @ w.t()

    x, w = randn(16, 32, grad=False), randn(32, 48, grad=False)
    for f in (gradient, autoencoder):
        assert [gemm.role for gemm in found_in(f, x, w).gemms] == ["output", "output"]


@pytest.mark.parametrize("dtype", [bf16, torch.float32])
def test_gradients_in_the_body_of_a_branch_have_their_roles(dtype):
    """No tangents there: AOTAutograd's mark on the nodes tells. They read weight and input, or roundings, as the forward does."""
    from f8fx import recording
    from tests.helpers import compiled

    weight = nn.Parameter(randn(32, 32, grad=False, dtype=dtype))

    def f(x, flag):
        def product(x):
            return x.to(bf16) @ weight.to(bf16)

        return torch.cond(flag, lambda x: torch.sin(product(x)), lambda x: torch.cos(product(x)), (x,))

    with recording() as reports:
        x = randn(16, 32, dtype=dtype)
        compiled(f, recipe="rowwise_with_gw_hp")(x, torch.tensor(True)).sum().backward()
    assert len(reports) == 1
    roles = {(d.role, d.converted) for d in reports[0].decisions}
    assert ("grad_weight", False) in roles and ("grad_weight", True) not in roles
    assert ("output", True) in roles and ("grad_input", True) in roles


def test_a_batched_matmul_that_adds_is_left_with_sizes_and_the_true_reason():
    weight = nn.Parameter(randn(1, 32, 48, grad=False))
    report = report_of(lambda x: torch.baddbmm(x.new_ones(1), x, weight), randn(1, 16, 32, grad=False))
    left = report.decisions[0]
    assert (left.reason, left.m, left.k, left.n) == ("batched matmul with one matrix", 16, 32, 48)


def test_fused_operators_are_seen_and_left():
    """What PyTorch itself does not take apart: without gradients, and where it always does so."""
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, dtype=bf16).eval()
    left, right = randn(8, 32, grad=False), randn(8, 16, grad=False)
    with torch.no_grad():
        fused = report_of(layer, randn(2, 8, 32, grad=False)).decisions
        bilinear = report_of(nn.Bilinear(32, 16, 48, dtype=bf16), left, right).decisions
    for decisions in (fused, bilinear):
        assert [d.reason for d in decisions] == ["inside a fused operator"]
    assert (bilinear[0].m, bilinear[0].k, bilinear[0].n) == (8, 32, 48)


@pytest.mark.parametrize(
    ("matmul", "sizes", "reason"),
    [
        (torch.mm, [(16, 32), (32, 48)], "matmul with a result of another dtype"),
        (torch.bmm, [(4, 16, 32), (4, 32, 48)], "matmul with a result of another dtype"),
        (torch.addmm, [(16, 48), (16, 32), (32, 48)], "matmul with a result of another dtype"),
        (torch._int_mm, [(16, 32), (32, 48)], "integer matmul"),
    ],
)
def test_matmuls_of_other_forms_are_seen_and_left(matmul, sizes, reason):
    """CUDA's, which a CPU cannot run: traced without data. (Of ``baddbmm`` torch 2.13 itself cannot trace this form.)"""
    if matmul is torch.addmm and torch.__version__ < (2, 13):
        pytest.skip("this torch cannot trace this form either")
    is_integer = matmul is torch._int_mm
    dtype = torch.int8 if is_integer else bf16
    args = [torch.empty(size, dtype=dtype, device="meta") for size in sizes]
    if len(args) == 3:
        args[0] = args[0].float()
    options = {} if is_integer else {"out_dtype": torch.float32}
    with torch.no_grad():
        (row,) = f8fx.explain(lambda *args: matmul(*args, **options), *args, select="all").rows
    assert (row.reason, row.size) == (reason, "16 x 32 x 48")


@pytest.mark.parametrize("part", [lambda w: w[0], lambda w: w[0, :32].to(bf16)])
def test_the_slice_of_an_input_on_the_right_is_the_weight(part):
    """An input on the left is no weight for that: the other's gradient is the weight's, which a recipe may leave."""
    report = report_of(lambda x, w: F.linear(x, part(w)), randn(16, 64), randn(2, 48, 64, seed=1))
    contracted = {d.role: d.k for d in report.decisions}
    assert contracted == {"output": 64, "grad_weight": 16, "grad_input": report.decisions[0].n}


def test_a_cast_that_moves_is_no_part_of_a_weight():
    """As graphs have it that were not decomposed; the amax would be taken on one device, and read on another."""
    with fake_tensor_mode():
        x, w = torch.empty(32, 64, dtype=bf16, device="cuda"), torch.empty(64, 48)
    graph = fx.Graph()
    placeholders = [graph.placeholder(name) for name in ("x", "w")]
    for node, value in zip(placeholders, (x, w), strict=True):
        node.meta["val"] = value
    kwargs = {"dtype": bf16, "device": torch.device("cuda:0")}
    moved = graph.call_function(aten._to_copy.default, (placeholders[1],), kwargs)
    mm = graph.call_function(aten.mm.default, (placeholders[0], moved))
    graph.output(mm)
    for node in (moved, mm):
        set_value(node)
    (gemm,) = Find()(graph).gemms
    assert gemm.right.node is moved


@pytest.mark.skipif(not hasattr(torch.ops.aten, "_weight_int4pack_mm_for_cpu"), reason="not in this torch")
def test_weights_packed_to_four_bits_are_seen_and_left():
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(torch.zeros(64, 128, dtype=torch.int32), 1)

    def f(x, w, scales):
        return torch.ops.aten._weight_int4pack_mm_for_cpu(x, w, 32, scales)

    args = randn(16, 128, grad=False), packed, torch.rand(4, 64, 2).to(bf16)
    (found,) = found_in(f, *args).unmatched
    assert (found.reason, found.m, found.k, found.n) == ("integer matmul", 16, 128, 64)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
@pytest.mark.parametrize(
    "function",
    [
        lambda x, w: x @ w.transpose(0, 1),
        lambda x, w: x.transpose(1, 0).transpose(-1, 0) @ w.t(),
        lambda x, w: (w @ x.transpose(-2, -1)).t(),
        lambda x, w: torch.bmm(x.view(1, 32, -1).transpose(2, -2), w.view(1, 48, 32).transpose(1, -1)),
    ],
)
def test_transposes_that_nothing_has_made_permutes_of(function, recipe):
    """In graphs of ``make_fx`` without decompositions, any dimensions counted from either end."""
    x, w = randn(64, 32, grad=False), randn(48, 32, grad=False, seed=1)
    gm = make_fx(function, tracing_mode="fake")(x, w)
    options = f8fx.Options.parse({"select": "all", "recipe": recipe})
    assert options.pipeline(debug=True)(gm.graph).converted == 1
    gm.recompile()
    assert sqnr(function(x, w), gm(x, w)) > 20
