"""Which torch releases f8fx is tested on, and what differs between them."""

from __future__ import annotations

import re

import torch

#: The torch releases the test suite passes on.
SUPPORTED_TORCH: tuple[str, ...] = ("2.11", "2.12", "2.13", "2.14", "2.15")


def release(version: str = torch.__version__) -> tuple[int, int]:
    """Major and minor number of a torch version, whatever build or pre-release it is: ``(2, 13)``."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None:
        raise ValueError(f"{version!r} is no torch version: it begins with no two numbers")
    return int(found[1]), int(found[2])


def check_version(version: str = torch.__version__) -> str | None:
    """A warning for a torch version the suite is not run on; ``None`` for a supported one."""
    if "{}.{}".format(*release(version)) in SUPPORTED_TORCH:
        return None
    return (
        f"f8fx is tested on torch {', '.join(SUPPORTED_TORCH)}; this is {version}, which is none of them. "
        "Compiling goes on; if a graph fails it falls back to plain Inductor with a warning"
    )


def supports_rowwise_scaled_mm(device_type: str, version: str = torch.__version__) -> bool:
    """Whether ``torch._scaled_mm`` takes scale vectors there: on CPU, 2.11 does not."""
    return device_type != "cpu" or release(version) >= (2, 12)
