"""The command line: what it prints, what it refuses and how, exit codes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from f8fx.cli import main
from tests.processes import printed_by

Capture = pytest.CaptureFixture[str]


def _fails_with_usage(capsys: Capture, *argv: str) -> str:
    """Runs a command line that must end with exit code 2; returns what it wrote to stderr."""
    try:
        code = main(argv)
    except SystemExit as left:
        code = left.code
    assert code == 2
    captured = capsys.readouterr()
    assert not captured.out
    return captured.err


def test_version_names_f8fx_and_torch(capsys: Capture):
    with pytest.raises(SystemExit) as left:
        main(["--version"])
    assert left.value.code == 0
    assert f"torch {torch.__version__}" in capsys.readouterr().out


def test_no_command_shows_the_commands(capsys: Capture):
    shown = _fails_with_usage(capsys)
    assert all(command in shown for command in ("demo", "explain", "doctor"))


def test_an_unknown_command_names_the_known_ones(capsys: Capture):
    assert "'demo', 'explain', 'doctor'" in _fails_with_usage(capsys, "train")


@pytest.mark.parametrize("command", ["demo", "explain", "doctor"])
def test_every_command_has_help(capsys: Capture, command: str):
    with pytest.raises(SystemExit) as left:
        main([command, "--help"])
    assert left.value.code == 0
    assert f"f8fx {command}" in capsys.readouterr().out


def test_doctor_prints_for_people_and_for_programs(capsys: Capture):
    assert main(["doctor"]) == 0
    assert str(torch.__version__) in capsys.readouterr().out
    assert main(["doctor", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["versions"]["torch"] == str(torch.__version__)


def test_python_m_f8fx_is_the_same_command_line(tmp_path: Path):
    code = "import runpy; runpy.run_module('f8fx', run_name='__main__', alter_sys=True)"
    assert json.loads(printed_by(code, "doctor", "--json", caches=tmp_path))["devices"]


# -- demo -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", ["0", "-3", "many"])
def test_demo_refuses_steps_that_are_no_number(capsys: Capture, steps: str):
    assert "whole number of at least 1" in _fails_with_usage(capsys, "demo", f"--steps={steps}")


@pytest.mark.parametrize(
    ("device", "why"),
    [("cuda:99", "CUDA devices"), ("meta", "runs on cpu and cuda"), ("nonsense", "is no device")],
)
def test_demo_refuses_a_device_that_is_not_there(capsys: Capture, device: str, why: str):
    assert why in _fails_with_usage(capsys, "demo", "--device", device)


def test_demo_says_what_to_do_without_a_compiler(capsys: Capture, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "")
    assert "--executor eager" in _fails_with_usage(capsys, "demo", "--device", "cpu")


def test_demo_refuses_ranks_that_have_no_gpu(capsys: Capture, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    wrong = _fails_with_usage(capsys, "demo", "--nproc", "4")
    assert "4 ranks need 4 GPUs and this machine has 2" in wrong and "--device cpu" in wrong
    assert "a GPU of its own" in _fails_with_usage(capsys, "demo", "--nproc", "2", "--device", "cuda:1")
    assert "whole number of at least 1" in _fails_with_usage(capsys, "demo", "--nproc", "0")


def test_demo_says_what_it_is_without(capsys: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    def load() -> None:
        raise FileNotFoundError("no Python sources")

    monkeypatch.setattr("f8fx.demo.data.load", load)
    assert main(["demo", "--device=cpu", "--executor=eager", "--out", str(tmp_path)]) == 1
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("", "f8fx demo: no Python sources\n")


@pytest.mark.parametrize("given", [True, False])
def test_demo_starts_the_same_command_line_on_each_rank(
    given: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    command = ["demo", "--device=cpu", "--nproc", "2", "--steps", "3", "--out", str(tmp_path / "out")]
    started: list[tuple[list[str], int]] = []

    def launch(argv: list[str], nproc: int) -> int:
        started.append((argv, nproc))
        return 7

    monkeypatch.setattr("f8fx.demo.distributed.launch", launch)
    monkeypatch.setattr(sys, "argv", ["f8fx", *([] if given else command)])
    assert main(command if given else None) == 7
    assert started == [(command, 2)]
    assert not list((tmp_path / "out").iterdir())  # it can be written to, and nothing is left of the trial


# -- explain --------------------------------------------------------------------------------------


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of a user's, in the current folder."""
    (tmp_path / "explained_model.py").write_text(
        "import torch\n"
        "def good(): return torch.nn.Linear(32, 32), (torch.ones(16, 32),)\n"
        "def two():\n"
        "    layers = [torch.nn.Linear(32, 32) for _ in range(2)]\n"
        "    model = torch.nn.Sequential(layers[0], torch.nn.ReLU(), layers[1]).bfloat16()\n"
        "    return model, (torch.ones(16, 32, dtype=torch.bfloat16, requires_grad=True),)\n"
        "def listed(): return torch.nn.Linear(32, 32), [torch.ones(16, 32)]\n"
        "def bare(): return torch.nn.Linear(32, 32)\n"
        "def no_nest(): return torch.nn.Linear(32, 32), torch.ones(16, 32)\n"
        "def three(): return torch.nn.Linear(32, 32), torch.ones(16, 32), torch.ones(16)\n"
        "def reversed(): return (torch.ones(16, 32),), torch.nn.Linear(32, 32)\n"
        "def broken(): raise RuntimeError('no weights')\n"
        "def experts():\n"
        "    from tests.helpers import Experts\n"
        "    x = torch.ones(48, 32, dtype=torch.bfloat16)\n"
        "    return Experts().bfloat16(), (x, torch.tensor([16, 0, 20, 12]))\n"
        "def named(): return torch.nn.Linear(32, 32).bfloat16(), {'input': torch.ones(16, 32).bfloat16()}\n"
        "def misfit(): return torch.nn.Linear(32, 32), (torch.ones(4, 7),)\n"
        "def no_module(): return torch.sin, (torch.ones(16, 32),)\n"
        "number = 3\n"
        "model = torch.nn.Linear(32, 32)\n"
    )
    (tmp_path / "needs_something.py").write_text("import surely_not_installed\n")
    (tmp_path / "fails.py").write_text("1 / 0\n")
    (tmp_path / "broken.py").write_text("def f(:\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "explained_model", raising=False)
    return "explained_model"


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        ("explained_model", "package.module:function"),
        (":good", "package.module:function"),
        ("not_there:good", "there is no module 'not_there'"),
        ("explained_model.sub:good", "there is no module 'explained_model.sub'"),
        ("needs_something:good", "No module named 'surely_not_installed'"),
        ("fails:good", "importing 'fails' raised ZeroDivisionError"),
        ("broken:good", "importing 'broken' raised SyntaxError"),
        ("explained_model.py:good", "in its folder write explained_model:good"),
        ("./explained_model.py:good", "in its folder write explained_model:good"),
        (".explained_model:good", "'.explained_model' is not the name of a module"),
        ("explained_model:missing", "has no function 'missing'"),
        ("explained_model:number", "has no function 'number'"),
        (
            "explained_model:bare",
            "must return (model, args), args a tuple or list of the model's inputs, or a dict of them by name; it returned Linear",
        ),
        ("explained_model:model", "explained_model:model is a module; give the name of a function"),
        ("explained_model:three", "it returned a tuple of 3"),
        ("explained_model:no_nest", "args was Tensor"),
        ("explained_model:reversed", "args was Linear"),
    ],
)
@pytest.mark.usefixtures("user_module")
def test_explain_refuses_what_it_cannot_load(capsys: Capture, spec: str, why: str):
    assert why in _fails_with_usage(capsys, "explain", spec)


@pytest.mark.parametrize("option", ["--html", "--json"])
def test_explain_refuses_a_file_that_cannot_be_written(
    capsys: Capture, user_module: str, tmp_path: Path, option: str
):
    """Before anything is traced, in a line."""
    wrong = _fails_with_usage(capsys, "explain", f"{user_module}:good", option, "/nonexistent/x")
    assert wrong == f"f8fx explain: {option}: there is no folder '/nonexistent'\n"
    wrong = _fails_with_usage(capsys, "explain", f"{user_module}:good", option, str(tmp_path))
    assert "is a folder" in wrong
    full = Path("/dev/full")  # a write that fails later than that
    if full.exists():
        assert main(["explain", f"{user_module}:good", option, str(full)]) == 2
        assert capsys.readouterr().err.startswith(
            f"f8fx explain: {option}: cannot write '/dev/full': No space"
        )


def test_explain_refuses_to_write_two_things_to_one_place(capsys: Capture, user_module: str, tmp_path: Path):
    path = str(tmp_path / "x")
    wrong = _fails_with_usage(capsys, "explain", f"{user_module}:good", "--json", path, "--html", path)
    assert wrong == f"f8fx explain: --json and --html: both would be written to {path!r}\n"
    assert "a page is not printed" in _fails_with_usage(
        capsys, "explain", f"{user_module}:good", "--html", "-"
    )


def test_demo_refuses_a_folder_that_cannot_be_made(capsys: Capture, tmp_path: Path):
    (tmp_path / "file").write_text("")
    wrong = _fails_with_usage(
        capsys, "demo", "--device", "cpu", "--executor", "eager", "--out", str(tmp_path / "file")
    )
    assert "--out: cannot write to the folder" in wrong


@pytest.mark.skipif(not Path("/sys").is_dir(), reason="a folder in which nobody can make a file")
def test_demo_refuses_a_folder_that_cannot_be_written_to(capsys: Capture):
    """Before it trains: the results would be lost."""
    wrong = _fails_with_usage(capsys, "demo", "--device", "cpu", "--executor", "eager", "--out", "/sys")
    assert "--out: cannot write to the folder '/sys'" in wrong


@pytest.mark.parametrize(
    ("option", "value"), [("--seed", "9" * 30), ("--seed", "-1"), ("--steps", "²"), ("--steps", "0")]
)
def test_demo_refuses_numbers_that_are_none(capsys: Capture, option: str, value: str):
    wrong = _fails_with_usage(capsys, "demo", option, value)
    assert f"argument {option}: must be a whole number" in wrong


def test_explain_takes_a_list_of_inputs(capsys: Capture, user_module: str):
    assert main(["explain", f"{user_module}:listed"]) == 0
    assert "32 x 32" in capsys.readouterr().out


def test_explain_takes_the_function_behind_filters(capsys: Capture, user_module: str, tmp_path: Path):
    page = tmp_path / "page.html"
    assert main(["explain", "--html", str(page), "--filter-fqns", "a", "b", f"{user_module}:listed"]) == 0
    assert page.exists() and f"f8fx explain: wrote {page}" in capsys.readouterr().err
    for options in ([], ["--filter-fqns", "a"], ["--only-fqns", f"{user_module}:listed"]):
        assert "give the function" in _fails_with_usage(capsys, "explain", *options)


def test_explain_takes_inputs_by_name(capsys: Capture, user_module: str):
    assert main(["explain", f"{user_module}:named", "--select", "all", "--json", "-"]) == 0
    assert len(json.loads(capsys.readouterr().out)["rows"]) == 2


@pytest.mark.parametrize(
    "options", [["--copies", "both"], ["--param-dtype", "bfloat16"], ["--reduce-dtype", "float32"]]
)
def test_explain_refuses_what_is_about_ranks_without_any(
    capsys: Capture, user_module: str, options: list[str]
):
    wrong = _fails_with_usage(capsys, "explain", f"{user_module}:good", *options)
    assert f"{options[0]}: is about what ranks send; give --world or --mesh too" in wrong


@pytest.mark.parametrize(
    ("experts", "converted"), [([], 0), (["--experts", "convert"], 4), (["--experts", "with_grad_weight"], 7)]
)
def test_explain_looks_at_experts_if_asked(
    capsys: Capture, user_module: str, experts: list[str], converted: int
):
    options = ("--recipe", "rowwise", "--select", "all", "--target", "h100", "--json", "-")
    assert main(["explain", f"{user_module}:experts", *options, *experts]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert len(rows) == 7 and sum(row["converted"] for row in rows) == converted


@pytest.mark.parametrize(
    ("options", "converted"),
    [
        (["--filter-fqns", "nothing", "0"], 3),
        (["--only-fqns", "2"], 3),
        (["--filter-fqns", "0", "2"], 0),
        (["--option", "filter_fn=no"], None),
        (["--option", "merge=never", "--option", "pad=never"], 6),
        (["--option", "debug=True", "--option", "rowwise_scales=None"], 6),
    ],
)
def test_explain_takes_the_options_of_the_backend(
    capsys: Capture, user_module: str, options: list[str], converted: int | None
):
    command = ["explain", f"{user_module}:two", "--select", "all", "--json", "-", *options]
    if converted is None:
        assert "filter_fn must be" in _fails_with_usage(capsys, *command)
        return
    assert main(command) == 0
    assert sum(row["converted"] for row in json.loads(capsys.readouterr().out)["rows"]) == converted


def test_explain_refuses_an_option_given_twice(capsys: Capture, user_module: str):
    twice = ("--option", "merge=never", "--option", "merge=auto")
    assert "merge is given twice" in _fails_with_usage(capsys, "explain", f"{user_module}:good", *twice)


@pytest.mark.parametrize(
    ("option", "why"),
    [
        ("merge", "--option: must be KEY=VALUE, got 'merge'"),
        ("merge=always", "merge"),
        ("rowwise_scales=non", "unknown value of rowwise_scales: 'non' (known: None, in_gemm, torchao)"),
        ("mergw=never", "did you mean 'merge'?"),
        ("recipe=rowwise", "recipe has an argument of its own, --recipe"),
        ("filter_fqns=a", "--filter-fqns"),
        ("target=h100", "--target"),
    ],
)
def test_explain_refuses_options_that_mean_nothing(capsys: Capture, user_module: str, option: str, why: str):
    assert why in _fails_with_usage(capsys, "explain", f"{user_module}:good", "--option", option)


def test_explain_takes_the_policy_of_mixed_precision(capsys: Capture, user_module: str):
    command = ["explain", f"{user_module}:good", "--world", "2", "--json", "-"]
    assert main([*command, "--param-dtype", "bfloat16", "--reduce-dtype", "float16"]) == 0
    sent = json.loads(capsys.readouterr().out)["communication"]["high"]
    assert {(each["op"], each["dtype"]) for each in sent} == {
        ("all_gather", "bfloat16"),
        ("reduce_scatter", "float16"),
    }


@pytest.mark.parametrize("option", ["--world", "--mesh"])
def test_explain_refuses_to_shard_what_is_no_module(capsys: Capture, user_module: str, option: str):
    wrong = _fails_with_usage(capsys, "explain", f"{user_module}:no_module", option, "fsdp=2")
    assert f"explain: {option}: {user_module}:no_module() must return a module, it returned builtin" in wrong


def test_explain_says_what_cannot_be_traced(capsys: Capture, user_module: str):
    assert main(["explain", f"{user_module}:misfit"]) == 1
    shown = capsys.readouterr()
    assert shown.err.startswith("f8fx explain: could not trace Linear: ") and shown.out == ""


def test_explain_names_the_nearest_target(capsys: Capture, user_module: str):
    wrong = _fails_with_usage(capsys, "explain", f"{user_module}:good", "--target", "h10")
    assert "did you mean 'h100'?" in wrong


def test_a_failure_in_the_users_function_is_shown_and_is_exit_code_1(capsys: Capture, user_module: str):
    assert main(["explain", f"{user_module}:broken"]) == 1
    shown = capsys.readouterr().err
    assert "no weights" in shown and "raised RuntimeError" in shown


def test_explain_writes_json_and_html(capsys: Capture, user_module: str, tmp_path: Path):
    pytest.importorskip("f8fx.explanation")
    files = ["--json", str(tmp_path / "e.json"), "--html", str(tmp_path / "e.html")]
    assert main(["explain", f"{user_module}:good", "--target", "b200", "--recipe", "rowwise", *files]) == 0
    assert capsys.readouterr().out
    assert json.loads((tmp_path / "e.json").read_text())
    assert "<html" in (tmp_path / "e.html").read_text()
    assert main(["explain", f"{user_module}:good", "--target", "h100", "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)


def test_interrupted(capsys: Capture, monkeypatch: pytest.MonkeyPatch):
    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("f8fx.demo.train.main", interrupt)
    assert main(["demo", "--device", "cpu", "--executor", "eager"]) == 130
    assert capsys.readouterr().err == "\nf8fx demo: interrupted\n"
