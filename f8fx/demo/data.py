"""Real text with no download: the Python standard library's own sources, one token per byte.

Every Python install has them, they are tens of megabytes of code and English, and a byte-level
model learns visibly from them within a minute. Test suites and installed packages are left out: the
first are missing from many distributions, the second differ everywhere. The text depends on the
Python version, batches on nothing else but the seed.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

_LEFT_OUT = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}
)

#: Put between two files; it occurs in no source file.
SEPARATOR = b"\0"


@dataclass(frozen=True)
class Corpus:
    """Text as byte tokens.

    Attributes:
        tokens: [N] uint8, the files one after the other with a zero byte after each.
        files: how many there are.
        root: the folder they were read from.
    """

    tokens: Tensor
    files: int
    root: Path

    def __len__(self) -> int:
        return self.tokens.numel()

    def batches(self, steps: int, batch: int, seq: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        """``steps`` pairs of inputs and targets, each [batch, seq] int64 on CPU.

        Every row is a random window of the text and its target the window one byte further on. The
        same arguments give the same batches.

        Raises:
            ValueError: if the text is shorter than one window.
        """
        if len(self) < seq + 1:
            raise ValueError(f"the text has {len(self)} bytes: too few for windows of {seq + 1}")
        generator = torch.Generator().manual_seed(seed)
        window = torch.arange(seq + 1)
        for _ in range(steps):
            start = torch.randint(len(self) - seq, (batch, 1), generator=generator)
            rows = self.tokens[start + window].long()
            yield rows[:, :-1], rows[:, 1:]


def stdlib() -> Path:
    """The folder of the standard library's sources of the running Python."""
    return Path(sysconfig.get_path("stdlib"))


def load(root: Path | None = None, max_bytes: int = 64 << 20) -> Corpus:
    """Reads the ``.py`` files under ``root``, sorted by path, up to about ``max_bytes``.

    Files that are not valid UTF-8 are left out.

    Raises:
        FileNotFoundError: if there are no sources, as in a Python whose library is a zip file.
    """
    root = stdlib() if root is None else root
    paths = sorted(
        (path for path in root.rglob("*.py") if not _LEFT_OUT.intersection(path.relative_to(root).parts)),
        key=lambda path: path.relative_to(root).as_posix(),
    )
    parts: list[bytes] = []
    size = 0
    for path in paths:
        if size >= max_bytes:
            break
        try:
            text = path.read_bytes()
            text.decode("utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        parts.append(text + SEPARATOR)
        size += len(parts[-1])
    if not parts:
        raise FileNotFoundError(
            f"no Python sources under {root}: the demo reads the standard library's own .py files, "
            "which this Python was installed without; use a Python from python.org, your "
            "distribution, conda or uv"
        )
    tokens = torch.frombuffer(bytearray().join(parts), dtype=torch.uint8)
    return Corpus(tokens, len(parts), root)
