"""What is kept on disk beside Inductor's caches."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from .report import log


def store_json(path: Path, data: Any) -> None:
    """Writes a file whole or not at all, for other processes to read. Failing to is no error."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            try:
                json.dump(data, file)
                file.flush()
                os.replace(file.name, path)
            except BaseException:
                os.unlink(file.name)
                raise
    except OSError as error:
        log.debug("f8fx: could not keep %s: %s", path.name, error)
