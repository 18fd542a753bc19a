"""In CI hypothesis draws the same examples every time, so that a run says something of the change alone.

With several workers (``-n``) tests that share a dear fixture run in one of them.
"""

from __future__ import annotations

import os

import pytest
from hypothesis import settings

settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")


def pytest_configure(config: pytest.Config) -> None:
    """``--dist loadgroup`` where pytest-xdist would take its default, ``load``."""
    if getattr(config.option, "dist", None) == "load":
        config.option.dist = "loadgroup"
