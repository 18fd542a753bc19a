"""The hint about a name that nobody knows."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


def did_you_mean(name: str, known: Iterable[str], most: int = 1) -> str:
    """``"; did you mean 'tensorwise'?"``; nothing where no known name is like it.

    Args:
        most: so many names are suggested.
    """
    near = difflib.get_close_matches(name, list(known), n=most, cutoff=0.4 if most == 1 else 0.5)
    return f"; did you mean {' or '.join(map(repr, near))}?" if near else ""


def unmatched(filters: Sequence[str], names: Iterable[str]) -> list[str]:
    """Filters that are part of no name, each with the name that is most like it: ``"'lm_hed'; did you mean 'lm_head'?"``."""
    names = set(names)
    parts = sorted({part for name in names for part in name.split(".") if not part.isdigit()})
    return [
        f"{each!r}{did_you_mean(each, parts)}" for each in filters if not any(each in name for name in names)
    ]
