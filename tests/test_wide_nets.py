"""Random networks of the forms that models have: code for an H100 computes what the graphs define.

The generated code runs on the CPU with every rounding of the definitions (:mod:`tests.test_emulated`). Where
a function of the device's library differs in the last bit, what is next to the middle of two float8 values
may be cast to the other one: results are close, and not all equal. Strides are not compared, as Inductor may
pad those of what is saved.
"""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import Tensor

from f8fx.passes import amaxes
from tests.helpers import sqnr
from tests.test_emulated import halves, run
from tests.wide_nets import wide_case

#: dB, as for the networks of :mod:`tests.random_nets`.
CLOSE = 30
#: All seeds below these.
LAST = {"training": 44, "inference": 14}


def groups():
    """Seeds that are run in one process."""
    for mode, last in LAST.items():
        for start in range(0, last, 4):
            yield pytest.param(mode, range(start, min(start + 4, last)), id=f"{mode}-{start}")


def difference(got: Tensor | None, want: Tensor | None) -> str | None:
    """What differs by more than it may, if anything does."""
    if want is None or got is None:
        return None if got is want else f"{got}, not {want}"
    if (got.shape, got.dtype) != (want.shape, want.dtype):
        return f"{got.dtype} {tuple(got.shape)}"
    if not want.dtype.is_floating_point:
        return None if torch.equal(got, want) else "other integers"
    a, b = got.double(), want.double()
    finite = b.isfinite()
    if not torch.equal(a.isfinite(), finite) or not torch.equal(a[~finite].sign(), b[~finite].sign()):
        return "other values that are not finite"
    a, b = a[finite], b[finite]
    return None if torch.equal(a, b) or sqnr(b, a) > CLOSE else f"{sqnr(b, a):.1f} dB"


@pytest.mark.long
@pytest.mark.parametrize(("mode", "seeds"), groups())
def test_generated_code_computes_the_definitions(mode, seeds, tmp_path, monkeypatch):
    monkeypatch.setattr(amaxes, "CACHED", 0)
    cases, named = [], []
    for seed in seeds:
        torch._dynamo.reset()
        net, x, options = wide_case(seed)
        with torch.no_grad() if mode == "inference" else contextlib.nullcontext():
            found = halves(net, x, precise=True, **options)
        assert len(found) == (1 if mode == "inference" else 2)
        for case, want in found:
            cases.append(case)
            named.append((seed, options, want))
    for results, (seed, options, want) in zip(run(cases, tmp_path), named, strict=True):
        assert isinstance(results, list), (seed, options, results)
        for index, (a, b) in enumerate(zip(results, want, strict=True)):
            found = difference(a, b)
            assert found is None, (seed, options, index, b.shape, b.dtype, found)
