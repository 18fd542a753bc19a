"""What tests do beyond the usual where ``--long`` asks for the long ones, also in processes that they start."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, TypeVar

import pytest

#: Set in the environment by ``--long``.
LONG = "F8FX_LONG_TESTS"

T = TypeVar("T")


def with_long(usual: Sequence[T], *more: T) -> tuple[T, ...]:
    """The usual cases, and with ``--long`` those, too."""
    return (*usual, *more) if os.environ.get(LONG) else tuple(usual)


def seldom(*values: Any) -> list[Any]:
    """Values of a parameter with which a test is run with ``--long`` only."""
    return [pytest.param(value, marks=pytest.mark.long) for value in values]
