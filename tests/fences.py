"""Tensors between pages that nobody may touch: a kernel that reads or writes beside one of them ends the process."""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

_PROT_NONE = 0


def fenced(x: Tensor, at_end: bool = True) -> Tensor:
    """``x``, of the same strides, in memory of its own, all of it that a view spans: what lies in its gaps is kept.

    Args:
        at_end: whether the byte behind the last one is fenced, or the byte before the first; the other side is fenced somewhere within a
            page.
    """
    if not x.numel():
        return x
    elements = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    size, page = elements * x.element_size(), mmap.PAGESIZE
    pages = math.ceil(size / page)
    memory = mmap.mmap(-1, (pages + 2) * page)
    start = pages * page + page - size if at_end else page
    base = torch.frombuffer(memory, dtype=torch.uint8, offset=start, count=size)
    libc = ctypes.CDLL(None, use_errno=True)
    for fence in (base.data_ptr() - start, base.data_ptr() - start + (pages + 1) * page):
        if libc.mprotect(ctypes.c_void_p(fence), ctypes.c_size_t(page), _PROT_NONE):
            raise OSError(ctypes.get_errno(), "a page could not be fenced")
    whole = base.view(x.dtype)
    whole.copy_(x.as_strided((elements,), (1,)))
    return whole.as_strided(x.shape, x.stride())


@contextlib.contextmanager
def around_outputs(at_end: bool = True) -> Iterator[None]:
    """Fences what ``torch.empty`` and ``torch.zeros`` give."""
    empty, zeros = torch.empty, torch.zeros

    def fenced_empty(*args: Any, **options: Any) -> Tensor:
        return fenced(empty(*args, **options), at_end)

    def fenced_zeros(*args: Any, **options: Any) -> Tensor:
        return fenced(zeros(*args, **options), at_end)

    with mock.patch.object(torch, "empty", fenced_empty), mock.patch.object(torch, "zeros", fenced_zeros):
        yield
