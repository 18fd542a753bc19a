"""What is kept on disk beside Inductor's caches."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from .report import log

T = TypeVar("T")


def store_json(path: Path, data: Any) -> None:
    """Writes a file whole or not at all, for other processes to read, those of other users too where the umask lets them.

    Failing to is no error.
    """
    new = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            new.write_text(json.dumps(data))
            os.replace(new, path)
        except BaseException:
            new.unlink(missing_ok=True)
            raise
    except OSError as error:
        log.debug("f8fx: could not keep %s: %s", path.name, error)


def load_json(path: Path, parse: Callable[[Any], T]) -> T | None:
    """What ``parse`` makes of a file's data; ``None`` where there is no such file, or another kind of data in it."""
    try:
        return parse(json.loads(path.read_text()))
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
