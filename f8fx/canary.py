"""Does the generated code write the right bytes? Asked once per device, before the first graph is compiled for it.

Compilers have bugs that show in float8 only. Triton writes garbage in a transposed 1-byte store that stands
next to a NaN-propagating maximum (https://github.com/triton-lang/triton/issues/11111), rounds twice on Ada before 3.9
(https://github.com/triton-lang/triton/pull/11753), and Inductor's reductions over rows and columns in one
kernel ("mix order") had masks wrong. None of them raises; a model trains worse.

So a few small functions of each *kind* of kernel are compiled by Inductor with the lowerings in force, and
compared byte for byte with the definitions (:mod:`kernels.cast`). A kind that fails is compiled in the
next safer form, until one passes:

=============  ====================================================  ==========================================
 kind           kernels                                               safer forms
=============  ====================================================  ==========================================
 ``cast``       row-major float8 copies                               ``definition``
 ``transpose``  transposed copies, and both copies at once            ``realized``, ``definition``
 ``reduction``  amaxes over the tensor, rows, columns, with casts     ``separate``, ``definition``
 ``one read``   :mod:`kernels.row_cast_columns`, ``computed_amaxes``  ``composed``
 ``groups``     :mod:`kernels.groups`                                 ``definition``
=============  ====================================================  ==========================================

``realized`` writes the source to memory in a kernel of its own, so that what computes it does not stand in one
with the transposed store; ``separate`` turns mix-order reductions off; ``composed`` makes the same of Inductor's own kernels; ``definition`` calls eager PyTorch out of the compiled code:
slow, and right.

Results are kept in the process and, unless a kernel raised (for want of memory, say), beside Inductor's cache on disk,
under the device's name and the versions of torch, Triton and f8fx. What was chosen is part of the key of every graph compiled with anything but the first form. A launch
configuration that autotuning picks later, for other sizes, is not covered.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from .canary_cases import Case, cases, data, special
from .hardware import of_device
from .kernel_forms import FORMS, NOT_EVERYWHERE, TRYING, VERDICTS, Form, Verdict, numbered
from .lowerings import register
from .records import load_json, store_json
from .sources import source_hash
from .torch_private import (
    compile_fx_module,
    inductor_cache_dir,
    inductor_config,
    is_present,
    just_in_time,
    untraced,
)
from .tuning import patches_for, tuning

#: Inductor options by which kernels reduce in several ways at once; not every torch has all of them.
_MIXING = ("triton.mix_order_reduction", "triton.nested_reduction")

CompileFx = Callable[..., Any]

_LOCK = threading.RLock()


# -- running them ----------------------------------------------------------------------------------


def check(device: torch.device, compile_fx: CompileFx | None = None) -> Verdict:
    """Compiles and compares, and chooses a form for each kind. Raises nothing; warns once if anything failed.

    Args:
        compile_fx: Inductor's entry, default the current one.
    """
    compile_fx = compile_fx or compile_fx_module().compile_fx
    start = time.perf_counter()
    chosen: dict[str, Form] = {}
    failures: list[str] = []
    raised = False
    try:
        hardware = of_device(device)
        types = hardware.float8_dtypes
        functions = cases(device, types["e4m3"], types["e5m2"], hardware.grouped_gemm)
        for kind, forms in FORMS.items():
            own = [case for case in functions if case.kind == kind and _runs(case, device)]
            if not own:
                continue  # there are no kernels of it
            chosen[kind] = forms[-1]
            for form in forms[:-1]:
                with _trying(device, {**chosen, kind: form}):
                    wrong = _first_failure(own, device, compile_fx)
                if wrong is None:
                    chosen[kind] = form
                    break
                raised |= isinstance(wrong, _Raised)
                failures.append(f"{kind} in its form {form!r}: {wrong}")
    except Exception as error:  # an unknown device, say: then nothing is known to be right
        raised = True
        failures.append(f"the check itself failed: {type(error).__name__}: {error}")
        chosen = {kind: forms[-1] for kind, forms in FORMS.items()}
    verdict = Verdict(_name(device), chosen, tuple(failures), time.perf_counter() - start, not raised)
    if not verdict.ok:
        _warn(verdict)
    return verdict


class _Raised(str):
    """A failure that is an exception, not a difference."""


def _first_failure(functions: Iterable[Case], device: torch.device, compile_fx: CompileFx) -> str | None:
    """What is wrong with the first function that does not give the bytes of its definition."""
    for case in functions:
        if not _runs(case, device):
            continue
        try:
            output = _first_difference(case, device, compile_fx)
        except Exception as error:
            return _Raised(
                f"{case.name!r} failed: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
            )
        if output is not None:
            return f"output {output} of {case.name!r} differs from its definition"
    return None


def _runs(case: Case, device: torch.device) -> bool:
    return device.type == "cuda" or not case.gpu_only


def _first_difference(case: Case, device: torch.device, compile_fx: CompileFx) -> int | None:
    """Which output of a function differs from its definition, with any candidate that its kernels are tuned among."""
    TRYING.candidates = 1
    TRYING.candidate = 0
    try:
        while TRYING.candidate < TRYING.candidates:
            output = _first_difference_of_one(case, device, compile_fx)
            if output is not None:
                return output
            TRYING.candidate += 1
    finally:
        TRYING.candidate = None
    return None


def _first_difference_of_one(case: Case, device: torch.device, compile_fx: CompileFx) -> int | None:
    x, y = data(case.gpu_shape if device.type == "cuda" else case.shape, device, case.dtype)
    # Inductor's caches do not know forms, and would give one the code of another
    config = {**patches_for(_Tuned()), **_patches(TRYING.forms), "force_disable_caches": True}
    compiled = compile_fx(fx.symbolic_trace(case.run), [x, y], config_patches=config)
    for inputs in ((x, y), (special(x), y)):
        for index, (want, got) in enumerate(zip(case.run(*inputs), compiled(*inputs), strict=True)):
            if not _same(want, got):
                return index
    return None


def _same(want: Tensor, got: Tensor) -> bool:
    """Bytewise, and in layout; NaNs are equal whatever their bits."""
    if want.shape != got.shape or want.stride() != got.stride() or want.dtype != got.dtype:
        return False
    if want.dtype.itemsize > 1:
        return torch.equal(want.nan_to_num(-1.0), got.nan_to_num(-1.0))
    nan = want.float().isnan()
    bits = want.view(torch.uint8) == got.view(torch.uint8)
    return bool((bits | (nan & got.float().isnan())).all())


@contextmanager
def _trying(device: torch.device, forms: Mapping[str, Form]) -> Iterator[None]:
    TRYING.device, TRYING.forms = numbered(device), forms
    try:
        with contextlib.ExitStack() as stack:
            for block in (untraced(), just_in_time(), torch.inference_mode(False), torch.no_grad()):
                stack.enter_context(block)
            stack.enter_context(torch.autocast(device.type, enabled=False))
            if device.type == "cuda":
                stack.enter_context(torch.cuda.device(device))
            yield
    finally:
        TRYING.device, TRYING.forms = None, {}


def applies(device: torch.device) -> bool:
    """Whether a device is checked before graphs are compiled for it: GPUs that can run float8 gemms."""
    return device.type == "cuda" and is_present(device) and bool(of_device(device).float8_dtypes)


def ensure(devices: Iterable[torch.device], compile_fx: CompileFx | None = None) -> dict[str, Any]:
    """Checks devices that were not; returns Inductor options that the verdicts ask for."""
    patches: dict[str, Any] = {}
    for device in dict.fromkeys(devices):
        if TRYING.device is None and applies(device):
            patches |= _patches(verdict_on(device, compile_fx).forms)
    return patches


def verdict_on(device: torch.device, compile_fx: CompileFx | None = None) -> Verdict:
    """The verdict on a device: of this process, else of an earlier one with the same versions, else a new one."""
    device = numbered(device)
    with _LOCK:
        found = VERDICTS.get(device)
        if found is None:
            found = _load(device)
            if found is None:
                register()
                found = check(device, compile_fx)
                if found.lasting:
                    _store(device, found)
            elif not found.ok:
                _warn(found)
            VERDICTS[device] = found
        return found


class _Tuned:
    """In the place of our pass: functions are compiled as rewritten graphs are, in which one launch may be several kernels."""

    def __init__(self) -> None:
        self.tuning: Mapping[str, Any] = tuning({})

    def __call__(self, graph: fx.Graph) -> None:
        """A function of our operators is as it should be."""


def _patches(forms: Mapping[str, Form]) -> dict[str, Any]:
    if forms.get("reduction", "fused") == "fused":
        return {}
    return {option: False for option in _MIXING if option in inductor_config().get_config_copy()}


def _warn(verdict: Verdict) -> None:
    warnings.warn(
        f"f8fx: on {verdict.device} some float8 kernels that Inductor generates are wrong with these versions of "
        f"torch and Triton, and are replaced by slower ones: {verdict}",
        stacklevel=2,
    )


# -- on disk ---------------------------------------------------------------------------------------


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def triton_version() -> str | None:
    """Of the Triton that is imported, whatever its distribution is called (pytorch-triton, triton-windows); None without."""
    try:
        return str(importlib.import_module("triton").__version__)
    except Exception:  # not there, or broken
        return None


def _path(device: torch.device) -> Path:
    parts = [_name(device), str(torch.__version__), triton_version(), source_hash()]
    digest = hashlib.sha256(repr(parts).encode()).hexdigest()
    return Path(inductor_cache_dir()) / "f8fx" / f"canary-{digest}.json"


def _load(device: torch.device) -> Verdict | None:
    def parse(found: Any) -> Verdict | None:
        checked = found["forms"]
        known = FORMS.keys() - NOT_EVERYWHERE <= checked.keys() <= FORMS.keys()
        known = known and all(form in FORMS[kind] for kind, form in checked.items())
        return Verdict(found["device"], found["forms"], tuple(found["failures"])) if known else None

    return load_json(_path(device), parse)


def _store(device: torch.device, verdict: Verdict) -> None:
    store_json(_path(device), asdict(verdict))
