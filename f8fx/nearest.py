"""The hint in an error about a name that nobody knows."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, known: Iterable[str], most: int = 1) -> str:
    """``"; did you mean 'tensorwise'?"``; nothing where no known name is like it.

    Args:
        most: so many names are suggested.
    """
    near = difflib.get_close_matches(name, list(known), n=most, cutoff=0.4 if most == 1 else 0.5)
    return f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
