"""In CI hypothesis draws the same examples every time, so that a run says something of the change alone."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
from hypothesis import settings

from tests.long import LONG

settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="run the tests marked long, too")
    parser.addoption(
        "--at-once", action="store_true", help="tell why a test failed when it fails, not at the end"
    )


class AtOnce:
    """Tells why a test failed when it fails: the run may be stopped before its end."""

    def __init__(self, terminal: pytest.TerminalReporter) -> None:
        self.terminal = terminal

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.terminal.ensure_newline()
            self.terminal.write_line(report.longreprtext)


def pytest_sessionstart(session: pytest.Session) -> None:
    terminal = session.config.pluginmanager.get_plugin(
        "terminalreporter"
    )  # processes of pytest-xdist have none
    if session.config.getoption("--at-once") and terminal is not None:
        session.config.pluginmanager.register(AtOnce(terminal))


def pytest_configure(config: pytest.Config) -> None:
    """pytest-xdist hands out files in the order given below, not those of many tests first: these are the quick ones.

    Whether the long tests run too is known to processes that tests start.
    """
    if config.getoption("--long"):
        os.environ[LONG] = "1"
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Files of quick tests last, so that all workers end at about the same time.

    First one in which a single process finds out what all others then read from disk: which instructions the CPU has,
    whether generated code is right.
    """
    if not config.getoption("--long"):
        for item in items:
            if item.get_closest_marker("long"):
                item.add_marker(pytest.mark.skip(reason="takes long; --long runs it"))
    first = Path(__file__).with_name("test_inductor.py")
    items.sort(key=lambda item: (item.path.parent.name == "passes", item.path != first))


def pytest_collection_finish(session: pytest.Session) -> None:
    """When all files that are to run have been imported."""
    import tests.preloaded  # noqa: F401

    if "PYTEST_XDIST_WORKER" in os.environ:  # many tests, of which some start processes that generate code
        instructions_found_once()


def instructions_found_once() -> None:
    """Processes that tests start are told that what the CPU says of its instructions is true, if it is.

    To find out, Inductor compiles a program for each set of them and loads it in a process that imports torch: seconds,
    and in every process again.
    """
    from torch._inductor import config, cpu_vec_isa

    with config.patch({"cpp.vec_isa_ok": True}):
        said = cpu_vec_isa.valid_vec_isa_list.__wrapped__()
    if said == cpu_vec_isa.valid_vec_isa_list():
        os.environ["TORCHINDUCTOR_VEC_ISA_OK"] = "1"


@pytest.fixture(autouse=True, scope="module")
def garbage_of_one_file():
    """What earlier files have left, such as caches, the garbage collector never looks at again: there is ever more of it."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def gemms_as_on_a_gpu(monkeypatch):
    """Graphs with float8 gemms are checked as those for a GPU are: of CPUs torch asks nothing about strides and sizes."""
    from torch import _meta_registrations as registrations

    device_of = registrations.device_hint

    def device_hint(tensor):
        return "cuda" if tensor.dtype.itemsize == 1 and tensor.dtype.is_floating_point else device_of(tensor)

    monkeypatch.setattr(registrations, "device_hint", device_hint)


@pytest.fixture
def casts(monkeypatch):
    """Shapes of what is cast, while a test runs."""
    from f8fx.kernels import cast

    shapes: list[tuple[int, ...]] = []
    definition = cast.quantize

    def quantize(x, *args):
        shapes.append(tuple(x.shape))
        return definition(x, *args)

    monkeypatch.setattr(cast, "quantize", quantize)
    return shapes
