"""Which torch releases f8fx is tested on, and what differs between them."""

from __future__ import annotations

import torch

#: The torch releases the test suite passes on.
SUPPORTED_TORCH: tuple[str, ...] = ("2.11", "2.13", "2.15")


def check_version(version: str = torch.__version__) -> str | None:
    """A warning for a torch version the suite is not run on; ``None`` for a supported one."""
    if ".".join(version.split("+")[0].split(".")[:2]) in SUPPORTED_TORCH:
        return None
    return (
        f"f8fx is tested on torch {', '.join(SUPPORTED_TORCH)}; this is {version}, which is none of them. "
        "Compiling goes on; if a graph fails it falls back to plain Inductor with a warning"
    )


def supports_rowwise_scaled_mm(device_type: str, version: str = torch.__version__) -> bool:
    """Whether ``torch._scaled_mm`` takes scale vectors there: on CPU, 2.11 does not.

    2.12 is not tested and counts with 2.11: the scales are then applied to the result, which is right anywhere.
    """
    major_minor = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    return device_type != "cpu" or major_minor >= (2, 13)
