"""The suite on every supported torch, each in its own environment: ``nox``.

``nox -s "tests-2.15"`` runs one of them; arguments after ``--`` go to pytest.
"""

import nox

nox.options.reuse_existing_virtualenvs = True
nox.options.stop_on_first_error = False

TORCH = {
    "2.11": "torch==2.11.0",
    "2.12": "torch==2.12.1",
    "2.13": "torch==2.13.0",
    "2.14": "torch==2.14.1",
    "2.15": "torch==2.15.0",
}


@nox.session(venv_backend="venv")
@nox.parametrize("torch", [nox.param(v, id=v) for v in TORCH])
def tests(session: nox.Session, torch: str) -> None:
    """pytest on one torch release."""
    session.install(TORCH[torch], "-e", ".[test]")
    session.run("pytest", "-n", "auto", "--dist", "loadfile", "--long", *session.posargs)


@nox.session(venv_backend="venv")
def lint(session: nox.Session) -> None:
    """ruff and mypy."""
    session.install("-c", "constraints.txt", "-e", ".[dev]")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("mypy")
