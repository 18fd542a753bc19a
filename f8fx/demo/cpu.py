"""Float8 gemms on CPUs: through oneDNN, or without it where that is the faster way."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from f8fx.torch_private import multiplies_float8_slowly


@contextmanager
def float8_gemms(device: torch.device) -> Iterator[None]:
    """A block in which PyTorch multiplies float8 on `device` as fast as it can.

    On a CPU that :func:`~f8fx.torch_private.multiplies_float8_slowly` it leaves oneDNN out.
    """
    if device.type != "cpu" or not multiplies_float8_slowly():
        yield
        return
    onednn: Any = torch.backends.mkldnn  # typed as the descriptor that its flags are
    was = onednn.enabled
    onednn.enabled = False
    try:
        yield
    finally:
        onednn.enabled = was
