"""What is kept on disk beside Inductor's caches."""

from __future__ import annotations

import json
import os
import uuid
from pathlib import Path
from typing import Any

from .report import log


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
