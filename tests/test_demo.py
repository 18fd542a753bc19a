"""The demo: the decoder's arithmetic, the text, the training loop and what is shown of it."""

from __future__ import annotations

import argparse
import dataclasses
import io
import json
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import Progress

from f8fx import hardware
from f8fx.cli import main
from f8fx.demo import data, show
from f8fx.demo.distributed import Ranks
from f8fx.demo.model import (
    PRESETS,
    Attention,
    Decoder,
    DecoderBlock,
    DecoderConfig,
    RMSNorm,
    rotate,
    rotation,
)
from f8fx.demo.plan import Plan, device_note, executor_for, pick_device, plan_for, ranks_note
from f8fx.demo.train import Batches, Run, compare, learning_rate_factor, train

TINY = PRESETS["tiny"]


@pytest.fixture
def decoder() -> Decoder:
    torch.manual_seed(0)
    return Decoder(TINY)


# -- model ----------------------------------------------------------------------------------------


def test_logits_have_a_row_per_token(decoder: Decoder):
    assert decoder(torch.zeros(3, 7, dtype=torch.long)).shape == (3, 7, TINY.vocab)


def test_a_block_works_alone_and_as_in_the_decoder(decoder: Decoder):
    block = decoder.blocks[0]
    x = torch.randn(2, 9, TINY.dim)
    by = rotation(9, TINY.head_dim, TINY.rope_theta, x.device)
    torch.testing.assert_close(block(x), block(x, by), rtol=0, atol=0)


def test_a_block_written_out(decoder: Decoder):
    block = decoder.blocks[0]
    x = torch.randn(2, 9, TINY.dim)
    by = rotation(9, TINY.head_dim, TINY.rope_theta, x.device)
    attended = x + block.attention(block.attention_norm(x), by)
    h = block.ffn_norm(attended)
    gate, up, down = (getattr(block.ffn, f"{name}_proj").weight for name in ("gate", "up", "down"))
    expected = attended + (F.silu(h @ gate.t()) * (h @ up.t())) @ down.t()
    torch.testing.assert_close(block(x), expected)


def test_rope_by_hand():
    """Position p turns pair e of a head of E by p * theta ** (-2 e / E)."""
    cos, sin = rotation(3, 4, 100.0, torch.device("cpu"))
    angles = torch.tensor([[0.0, 0.0], [1.0, 0.1], [2.0, 0.2]])
    torch.testing.assert_close((cos, sin), (angles.cos(), angles.sin()))
    turned = rotate(torch.tensor([1.0, 0.0, 0.0, 1.0]).expand(1, 1, 3, 4), (cos, sin))
    a, b = angles.unbind(1)
    torch.testing.assert_close(turned[0, 0], torch.stack((a.cos(), -b.sin(), a.sin(), b.cos()), 1))


@pytest.mark.parametrize("tied", [False, True])
def test_what_weights_start_from(tied: bool):
    torch.manual_seed(0)
    model = Decoder(TINY.replace(layers=8, tied=tied))
    spread = {name: weight.std().item() for name, weight in model.named_parameters() if weight.dim() == 2}
    assert spread.pop("embedding.weight") == pytest.approx(0.02 if tied else 1.0, rel=0.05)
    for name, found in spread.items():
        small = name.endswith(("o_proj.weight", "down_proj.weight"))
        assert found == pytest.approx(0.02 / 4 if small else 0.02, rel=0.06), name
    assert (model.output.weight is model.embedding.weight) == tied


def test_a_later_token_changes_no_earlier_logit(decoder: Decoder):
    tokens = torch.randint(256, (2, 12))
    changed = tokens.clone()
    changed[:, 8] = (changed[:, 8] + 1) % 256
    before, after = decoder(tokens), decoder(changed)
    torch.testing.assert_close(before[:, :8], after[:, :8])
    assert not torch.allclose(before[:, 8:], after[:, 8:])


def test_grouped_query_attention_is_attention_with_repeated_keys_and_values():
    """Against full attention written out, in float64 so that only mistakes show."""
    torch.manual_seed(0)
    config = DecoderConfig(dim=64, heads=8, kv_heads=2)
    attention = Attention(config).double()
    x = torch.randn(2, 11, 64, dtype=torch.float64, requires_grad=True)
    by = rotation(11, config.head_dim, config.rope_theta, x.device)

    def heads(linear: torch.nn.Linear, count: int) -> torch.Tensor:
        return linear(x).view(2, 11, count, config.head_dim).transpose(1, 2)

    q = rotate(heads(attention.q_proj, 8), by)
    k = rotate(heads(attention.k_proj, 2), by).repeat_interleave(4, dim=1)
    v = heads(attention.v_proj, 2).repeat_interleave(4, dim=1)
    scores = q @ k.transpose(2, 3) / config.head_dim**0.5
    scores = scores.masked_fill(torch.ones(11, 11, dtype=torch.bool).triu(1), float("-inf"))
    expected = attention.o_proj((scores.softmax(-1) @ v).transpose(1, 2).reshape(2, 11, 64))

    # rotate() works in float32, alike on both sides; the rest is float64.
    actual = attention(x, by)
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)
    (grad_actual,) = torch.autograd.grad(actual.square().sum(), x)
    (grad_expected,) = torch.autograd.grad(expected.square().sum(), x)
    torch.testing.assert_close(grad_actual, grad_expected, rtol=1e-6, atol=1e-8)


def test_rope_keeps_lengths_and_makes_products_depend_on_distance_only():
    q, k = torch.randn(1, 1, 1, 16), torch.randn(1, 1, 1, 16)
    by = rotation(32, 16, 10_000.0, q.device)
    turned_q, turned_k = rotate(q.expand(1, 1, 32, 16), by), rotate(k.expand(1, 1, 32, 16), by)
    torch.testing.assert_close(turned_q.norm(dim=-1), q.norm(dim=-1).expand(1, 1, 32))
    products = (turned_q @ turned_k.transpose(2, 3))[0, 0]
    torch.testing.assert_close(products.diagonal(-5), products[5, 0].expand(27), rtol=1e-4, atol=1e-4)


def test_rms_norm_is_torchs():
    norm = RMSNorm(48, 1e-5)
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(4, 48)
    torch.testing.assert_close(norm(x), F.rms_norm(x, (48,), norm.weight, 1e-5))


@pytest.mark.parametrize("tied", [False, True])
def test_the_parameter_count_is_exact(tied: bool):
    config = TINY.replace(tied=tied)
    assert sum(p.numel() for p in Decoder(config).parameters()) == config.parameters


def test_the_presets_are_the_published_sizes():
    assert PRESETS["llama3_8b"].parameters == 8_030_261_248
    assert PRESETS["llama3_70b"].parameters == 70_553_706_496
    assert PRESETS["llama3_405b"].parameters == 405_853_388_800
    assert 0.9e9 < PRESETS["1b"].parameters < 1.1e9
    with torch.device("meta"):
        block = DecoderBlock(PRESETS["llama3_70b"])
    assert block.ffn.gate_proj.weight.shape == (28672, 8192)
    assert block.attention.k_proj.weight.shape == (8 * 128, 8192)


def test_the_state_dict_is_the_parameters(decoder: Decoder):
    assert set(decoder.state_dict()) == {name for name, _ in decoder.named_parameters()}


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"heads": 3}, "even integer"),
        ({"dim": 4, "heads": 4, "kv_heads": 4}, "even integer"),
        ({"kv_heads": 3}, "multiple of kv_heads"),
        ({"layers": 0}, "layers must be at least 1"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(changes: dict[str, int], why: str):
    with pytest.raises(ValueError, match=why):
        TINY.replace(**changes)


def test_a_sequence_that_is_too_long_is_refused(decoder: Decoder):
    with pytest.raises(ValueError, match="max_seq is 64"):
        decoder(torch.zeros(1, 65, dtype=torch.long))


def test_an_unknown_preset_names_the_nearest():
    with pytest.raises(ValueError, match="did you mean 'small'"):
        DecoderConfig.named("smal")


# -- data -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def corpus() -> data.Corpus:
    return data.load(max_bytes=200_000)


def test_the_text_is_the_standard_librarys_own_source(corpus: data.Corpus):
    assert corpus.root == Path(json.__file__).parents[1]
    text = bytes(corpus.tokens.tolist())
    first = sorted(
        (p for p in corpus.root.glob("*.py")), key=lambda p: p.relative_to(corpus.root).as_posix()
    )[0]
    assert first.read_bytes() in text
    assert text.count(data.SEPARATOR) == corpus.files
    assert b"def " in text and b"import " in text


def test_tests_and_installed_packages_are_left_out(tmp_path: Path):
    for name in ("a.py", "test/b.py", "site-packages/c.py", "pkg/tests/d.py", "pkg/e.py", "f.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "latin.py").write_bytes(b"\xe9")
    corpus = data.load(tmp_path)
    assert bytes(corpus.tokens.tolist()) == b"a.py\0pkg/e.py\0"
    assert corpus.files == 2


@pytest.mark.parametrize(("most", "files"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_no_file_is_read_beyond_the_most_bytes(most: int, files: int, tmp_path: Path):
    """Four bytes each, with the one after it."""
    for name in "abcd":
        (tmp_path / f"{name}.py").write_text("x=1")
    if not files:
        with pytest.raises(FileNotFoundError):
            data.load(tmp_path, most)
        return
    corpus = data.load(tmp_path, most)
    assert (corpus.files, len(corpus)) == (files, 4 * files)


def test_a_python_without_sources_gets_a_sentence(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match="without"):
        data.load(tmp_path)


def test_targets_are_the_inputs_one_byte_on(corpus: data.Corpus):
    (inputs, targets), *_ = corpus.batches(1, batch=4, seq=16, seed=0)
    assert inputs.shape == targets.shape == (4, 16)
    assert inputs.dtype == torch.int64
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert bytes(inputs[0].tolist()) in bytes(corpus.tokens.tolist())


def test_a_seed_fixes_the_batches(corpus: data.Corpus):
    def batches(seed: int) -> list[torch.Tensor]:
        return [inputs for inputs, _ in corpus.batches(3, batch=2, seq=8, seed=seed)]

    assert all(map(torch.equal, batches(1), batches(1)))
    assert not any(map(torch.equal, batches(1), batches(2)))


def test_windows_reach_both_ends_of_the_text():
    corpus = data.Corpus(torch.arange(6, dtype=torch.uint8), 1, Path())
    starts = {int(inputs[0, 0]) for inputs, _ in corpus.batches(50, batch=1, seq=4, seed=0)}
    assert starts == {0, 1}


def test_a_text_of_one_window_is_one_window():
    corpus = data.Corpus(torch.arange(5, dtype=torch.uint8), 1, Path())
    ((inputs, targets),) = corpus.batches(1, batch=2, seq=4, seed=0)
    assert inputs.tolist() == [[0, 1, 2, 3]] * 2 and targets.tolist() == [[1, 2, 3, 4]] * 2


def test_a_text_shorter_than_a_window_is_refused():
    corpus = data.Corpus(torch.zeros(16, dtype=torch.uint8), 1, Path())
    with pytest.raises(ValueError, match="too few"):
        next(corpus.batches(1, 1, 16, 0))


# -- what a run is determined by ------------------------------------------------------------------

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def _asked(**options: object) -> argparse.Namespace:
    """What the command line gives if only these options are passed."""
    names = ("model", "steps", "batch", "select", "executor", "nproc")
    return argparse.Namespace(
        **{**dict.fromkeys(names), "smoke": False, "recipe": "rowwise", "seed": 3, **options}
    )


def test_the_plan_of_a_laptop():
    plan = plan_for(_asked(), CPU)
    assert plan == Plan(PRESETS["small"], CPU, 200, 8, 128, 3e-3, "rowwise", "all", "inductor", 3, 1, 0.1)
    assert plan.tokens_per_step == 1024
    smoke = plan_for(_asked(smoke=True), CPU, ranks=2)
    assert smoke == dataclasses.replace(plan, config=TINY, steps=6, batch=4, seq=64, ranks=2)
    assert smoke.tokens_per_step == 2 * 4 * 64
    own = plan_for(_asked(steps=7, batch=5, model="llama3_8b", select="auto"), CPU)
    assert (own.steps, own.batch, own.select, own.config) == (7, 5, "auto", PRESETS["llama3_8b"])
    assert (own.seq, own.learning_rate, own.warm_up) == (2048, 3e-4, 0.5)


@pytest.mark.parametrize(("layers", "spare", "left"), [(5, 0, 5), (5, -1, 4), (3, 0, 3), (1, -1, 1)])
def test_the_model_of_a_gpu_has_as_many_blocks_as_fit(
    layers: int, spare: int, left: int, monkeypatch: pytest.MonkeyPatch
):
    """18 bytes for a parameter, and six tenths of that for the rest."""
    needed = int(PRESETS["1b"].replace(layers=layers).parameters * 18 * 1.6) + 1
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (needed + 2 * spare, 1 << 40))
    plan = plan_for(_asked(), CUDA)
    config = PRESETS["1b"].replace(layers=left)
    assert plan == Plan(config, CUDA, 200, 4, 2048, 3e-4, "rowwise", "auto", "inductor", 3, 1, 0.5)
    assert plan_for(_asked(model="1b"), CUDA).config == PRESETS["1b"]  # as asked for
    smoke = plan_for(_asked(smoke=True), CUDA)
    assert (smoke.config, smoke.select, smoke.steps) == (TINY, "all", 6)


@pytest.mark.parametrize(
    ("asked", "device", "executor"),
    [
        ({}, CPU, "inductor"),
        ({"nproc": 2}, CPU, "eager"),
        ({"nproc": 2, "executor": "inductor"}, CPU, "inductor"),
        ({"nproc": 2}, CUDA, "inductor"),
        ({"executor": "eager"}, CUDA, "eager"),
    ],
)
def test_only_several_ranks_on_a_cpu_do_without_generated_code(
    asked: dict[str, object], device: torch.device, executor: str
):
    assert executor_for(_asked(**asked), device) == executor


def test_a_rank_of_torchrun_is_one_of_several(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("f8fx.demo.plan.launched", lambda: True)
    assert [executor_for(_asked(), device) for device in (CPU, CUDA)] == ["eager", "inductor"]


def test_what_is_said_of_the_device_and_the_ranks(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A GPU")
    notes = [
        device_note(CUDA, hardware.find("h100")),
        device_note(CUDA, hardware.find("a100")),
        device_note(CPU, hardware.find("cpu")),
    ]
    assert [note.split(":")[0] for note in notes] == ["A GPU", "A GPU has no float8 tensor cores", "CPU"]
    assert notes[0] == "A GPU: float8 tensor cores (tensorwise, rowwise)."
    plan = dataclasses.replace(_plan(1), ranks=2, executor="eager")
    assert ranks_note(dataclasses.replace(plan, ranks=1), None) == ""
    assert "2 ranks, FSDP2 over gloo" in ranks_note(plan, None)
    assert ["--executor inductor" in ranks_note(plan, asked) for asked in (None, "eager")] == [True, False]
    on_cuda = ranks_note(dataclasses.replace(plan, device=CUDA, executor="inductor"), None)
    assert "FSDP2 over NCCL" in on_cuda and "--executor" not in on_cuda


@pytest.mark.parametrize("gpus", [0, 2])
def test_the_device_is_a_gpu_where_there_is_one(gpus: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert pick_device(None) == (CUDA if gpus else CPU) and pick_device("cpu") == CPU
    for name, there in (("cuda", gpus > 0), ("cuda:1", gpus > 1), ("cuda:2", False)):
        if there:
            assert pick_device(name) == torch.device(name)
        else:
            with pytest.raises(ValueError, match=f"this machine has {gpus} CUDA devices"):
                pick_device(name)


# -- training and what is shown -------------------------------------------------------------------


@pytest.mark.parametrize(("share", "first"), [(0.1, 2), (0.5, 10), (0.0, 1)])
def test_the_learning_rate_rises_and_falls_to_a_tenth(share: float, first: int):
    factors = [learning_rate_factor(step, 20, share) for step in range(21)]
    assert factors[:first] == [(step + 1) / first for step in range(first)]
    assert factors[first] == 1.0 and factors[20] == pytest.approx(0.1)
    assert factors[first:] == sorted(factors[first:], reverse=True)
    middle = 0.1 + 0.45 * (1 + math.cos(math.pi * 5 / (20 - first)))
    assert factors[first + 5] == pytest.approx(middle)


def _plan(steps: int) -> Plan:
    return Plan(TINY, torch.device("cpu"), steps, batch=4, seq=32, learning_rate=3e-3)


def test_training_learns_and_repeats_itself(corpus: data.Corpus):
    plan = _plan(12)
    runs = [train("eager", lambda model: model, plan, corpus.batches(12, 4, 32, 0)) for _ in range(2)]
    assert runs[0].losses == runs[1].losses
    assert runs[0].losses[0] == pytest.approx(5.545, abs=0.1)  # ln 256: nothing is known at first
    assert runs[0].final_loss < 0.9 * runs[0].losses[0]


def test_training_leaves_the_callers_random_state_alone(corpus: data.Corpus):
    before = torch.get_rng_state()
    train("eager", lambda model: model, _plan(1), corpus.batches(1, 4, 32, 0))
    assert torch.equal(before, torch.get_rng_state())


def _run(name: str, losses: tuple[float, ...], **more: object) -> Run:
    return Run(name, losses, (500.0,) + (10.0,) * (len(losses) - 1), 128, **more)  # pyright: ignore


def test_compile_time_is_not_in_the_median():
    run = _run("bf16", (3.0, 2.0, 1.0))
    assert run.median_ms == 10.0
    assert run.tokens_per_second == 12_800


@pytest.mark.parametrize(("steps", "last"), [(1, [0]), (19, [18]), (20, [18, 19]), (39, [36, 37, 38])])
def test_the_final_loss_is_of_the_last_tenth(steps: int, last: list[int]):
    run = Run("bf16", tuple(map(float, range(steps))), (1.0,), 1)
    assert run.final_loss == sum(last) / len(last)


@pytest.mark.parametrize(("steps", "warm_up"), [(1, 0), (2, 1), (12, 3), (50, 10), (60, 10)])
def test_the_first_fifth_of_the_steps_is_no_measurement(steps: int, warm_up: int):
    rest = [float(step) for step in range(steps - warm_up)]
    assert Run("bf16", (1.0,), (1e6,) * warm_up + tuple(rest), 1).median_ms == (len(rest) - 1) / 2


def test_the_table_holds_every_figure():
    bf16 = _run("bf16", (3.0, 2.5), peak_bytes=2**31)
    float8 = _run(
        "float8", (3.0, 2.25), peak_bytes=2**30, converted=40, total=45, reasons={"too small": 3, "tiny": 2}
    )
    with Path("/dev/null").open("w") as nowhere:
        console = Console(record=True, width=100, file=nowhere)
        show.table(bf16, float8, console)
    text = " ".join(console.export_text().split())
    for figure in ("2.5000", "2.2500", "12,800", "2.00 1.00 0.50", "0.2500, at step 1", "40 of 45"):
        assert figure in text
    assert "3 skipped: too small" in text


def test_the_picture_is_a_png(tmp_path: Path):
    show.picture(_plan(2), _run("bf16", (3.0, 2.5)), _run("float8", (3.0, float("nan"))), tmp_path / "p.png")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def _drawn(monkeypatch: pytest.MonkeyPatch, bf16: Run, float8: Run) -> Figure:
    kept: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda self, path: kept.append(self))
    show.picture(_plan(2), bf16, float8, Path("unused"))
    return kept[0]


def test_the_picture_has_both_losses_and_their_difference(monkeypatch: pytest.MonkeyPatch):
    float8 = _run("float8", (3.0, 2.25, 1.6), converted=40, total=45)
    figure = _drawn(monkeypatch, _run("bf16", (3.0, 2.5, 1.5)), float8)
    curves, gaps = figure.axes
    drawn = {line.get_label(): line.get_xydata().tolist() for line in curves.lines}
    assert drawn == {
        "bf16": [[1, 3.0], [2, 2.5], [3, 1.5]],
        "float8 (tensorwise)": [[1, 3.0], [2, 2.25], [3, 1.6]],
    }
    assert [text.get_text() for text in curves.get_legend().get_texts()] == list(drawn)
    _, difference = gaps.lines  # on zero
    assert difference.get_ydata() == pytest.approx([0, -0.25, 0.1])
    assert gaps.get_ylim() == pytest.approx((-1.15 * 0.25, 1.15 * 0.25)) and gaps.get_xlim() == (1, 3)
    assert curves.get_xlim() == gaps.get_xlim()
    labels = (curves.get_ylabel(), gaps.get_ylabel(), gaps.get_xlabel())
    assert labels == ("loss (nats per byte)", "float8 - bf16", "step")
    assert figure.get_suptitle() == (
        "Llama-style decoder, 0.13 M parameters, same weights and batches: 40 of 45 matmuls in float8"
    )


def test_the_picture_of_one_step_or_of_no_difference_has_an_extent(monkeypatch: pytest.MonkeyPatch):
    for float8 in (3.0, float("nan")):
        _, gaps = _drawn(monkeypatch, _run("bf16", (3.0,)), _run("float8", (float8,))).axes
        assert gaps.get_ylim() == (-1e-3, 1e-3) and gaps.get_xlim() == (1, 2)


def test_what_is_trained_is_said_before(corpus: data.Corpus):
    shown = io.StringIO()
    plan = dataclasses.replace(_plan(20), ranks=3, config=PRESETS["1b"])
    text = data.Corpus(torch.zeros(1_260_000, dtype=torch.uint8), 7, Path("lib"))
    show.introduce(plan, text, "On a GPU.", Console(file=shown, width=300))
    assert shown.getvalue().splitlines() == [
        "f8fx demo: a Llama-style decoder, 1.09 B parameters (5 blocks, dim 4096), learns to write Python's standard library",
        "Text: 7 files, 1.3 MB, from lib; 20 steps of 12 x 32 bytes, twice",
        "On a GPU.",
    ]


def test_figures_that_only_one_run_has_are_in_no_table():
    with Path("/dev/null").open("w") as nowhere:
        console = Console(record=True, width=100, file=nowhere)
        for bf16, float8 in (({"peak_bytes": 1}, {}), ({}, {"peak_bytes": 1, "gathered_bytes": 1})):
            show.table(_run("bf16", (3.0,), **bf16), _run("float8", (3.0,), **float8), console)
        text = console.export_text()
        assert "peak memory" not in text and "MB/step/rank" not in text
        gathered = [
            _run(name, (3.0,), gathered_bytes=size) for name, size in (("a", 2_500_000), ("b", 1_500_000))
        ]
        show.table(*gathered, console)
    text = " ".join(console.export_text().split())
    assert "gathered (MB/step/rank) 2.500 1.500 0.60" in text
    assert "Matmuls in float8: 0 of 0 of the graph that all blocks share" in text


def test_numbers_that_are_not_finite_are_null_in_json(corpus: data.Corpus):
    bf16, float8 = _run("bf16", (3.0, 2.5)), _run("float8", (float("inf"), float("nan")))
    results = json.loads(
        show.json_text(show.results(_plan(2), corpus, bf16, float8)),
        parse_constant=lambda text: pytest.fail(text),
    )
    assert results["bf16"]["losses"] == [3.0, 2.5] and results["float8"]["losses"] == [None, None]
    assert results["largest_difference"] == {"value": None, "step": 0}
    assert show.largest_difference(bf16, _run("float8", (3.0, float("nan"))))[1] == 1


def test_paths_are_printed_as_they_are(corpus: data.Corpus):
    shown = io.StringIO()
    odd = dataclasses.replace(corpus, root=Path("/[old]/[/x]"))
    show.introduce(_plan(2), odd, "a GPU [b]", Console(file=shown, width=300))
    assert "from /[old]/[/x];" in shown.getvalue() and "a GPU [b]" in shown.getvalue()


@pytest.mark.long
def test_the_whole_demo_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """With no code generation: same graphs and passes, seconds instead of a minute. Rowwise: on two ranks."""
    command = ["demo", "--smoke", "--device=cpu", "--executor=eager", "--json", "--recipe=tensorwise"]
    assert main([*command, "--out", str(tmp_path)]) == 0
    shown = capsys.readouterr()
    assert "bf16    step 2 of" in shown.err and "float8  step 2 of" in shown.err  # no terminal, no bar
    results = json.loads(shown.out)
    assert results == json.loads((tmp_path / "results.json").read_text())
    assert (tmp_path / "losses.png").stat().st_size > 10_000
    matmuls = results["float8"]["matmuls"]
    # Seven linears a block, three gemms each; the output projection's three are kept in bf16.
    assert matmuls["converted"] == 3 * 7 * TINY.layers
    assert matmuls["total"] == matmuls["converted"] + 3
    assert sum(matmuls["skipped"].values()) == 3
    # Measured 0.003 to 0.005 over four seeds and three recipes, at losses of 5.5 to 4.6.
    assert results["largest_difference"]["value"] < 0.02


@pytest.mark.parametrize(
    ("loss", "converted", "select", "said"),
    [
        (2.0, 3, "all", None),
        (2.0, 0, "auto", None),
        (2.0, 0, "all", 'select="all" converted nothing'),
        (math.nan, 3, "all", "A loss is not finite"),
        (math.inf, 3, "auto", "A loss is not finite"),
    ],
)
def test_a_run_without_float8_or_with_broken_losses_has_failed(
    loss: float,
    converted: int,
    select: str,
    said: str | None,
    corpus: data.Corpus,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
):
    runs = _run("bf16", (3.0, 2.5)), _run("float8", (3.0, loss), converted=converted, total=3)
    monkeypatch.setattr("f8fx.demo.data.load", lambda: corpus)
    monkeypatch.setattr("f8fx.demo.train.compare", lambda *_: runs)
    command = ["demo", "--device=cpu", "--executor=eager", "--select", select, "--out", str(tmp_path)]
    assert main(command) == (said is not None)
    shown = capsys.readouterr().out
    assert (said or "") in shown and ("this run failed" in shown) == (said is not None)
    assert {path.name for path in tmp_path.iterdir()} == {"losses.png", "results.json"}


@pytest.mark.parametrize("seed", [0, 5, 2**63 - 1])
def test_each_rank_has_batches_of_its_own(seed: int, corpus: data.Corpus, monkeypatch: pytest.MonkeyPatch):
    """In both runs the same; also from the largest seed that the command line takes."""
    first: list[list[int]] = []

    def trained(name: str, compiled: object, plan: Plan, batches: Batches, *_: object) -> Run:
        ((inputs, _),) = batches
        first.append(inputs[0].tolist())
        return Run(name, (1.0,), (1.0,), 1)

    monkeypatch.setattr("f8fx.demo.train.train", trained)
    plan = dataclasses.replace(_plan(1), seed=seed, executor="eager")
    for rank in range(4):
        compare(plan, corpus, Progress(disable=True), Ranks(rank, 4, None))  # type: ignore[arg-type]
    assert first[0::2] == first[1::2] and len(set(map(tuple, first))) == 4


@pytest.mark.parametrize("slow", [False, True])
def test_float8_runs_without_onednn_where_that_is_slow(
    slow: bool, corpus: data.Corpus, monkeypatch: pytest.MonkeyPatch
):
    was = torch.backends.mkldnn.enabled
    seen = []

    def trained(name: str, *args: object) -> Run:
        seen.append((name, torch.backends.mkldnn.enabled))
        return Run(name, (1.0,), (1.0,), 1)

    monkeypatch.setattr("f8fx.demo.cpu.multiplies_float8_slowly", lambda: slow)
    monkeypatch.setattr("f8fx.demo.train.train", trained)
    compare(_plan(1), corpus, Progress(disable=True))
    assert seen == [("bf16", was), ("float8", was and not slow)]
    assert torch.backends.mkldnn.enabled == was
