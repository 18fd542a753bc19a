"""In which form each kind of float8 kernel is compiled for a device: the preferred one, unless that wrote wrong bytes there.

:mod:`f8fx.canary` finds that out, and says what kinds and forms there are; lowerings ask here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from . import ops
from .canary_cases import Kind
from .torch_private import Lowering

Form = Literal["fused", "realized", "separate", "composed", "definition"]

#: The forms of each kind, the preferred one first. Later kinds are checked with the forms chosen for earlier ones.
FORMS: Mapping[Kind, tuple[Form, ...]] = {
    "cast": ("fused", "definition"),
    "transpose": ("fused", "realized", "definition"),
    "reduction": ("fused", "separate", "definition"),
    "one read": ("fused", "composed"),
    "groups": ("fused", "definition"),
}
#: Kinds that some devices have no kernels of.
NOT_EVERYWHERE = frozenset(("groups",))


@dataclass(frozen=True)
class Verdict:
    """What was found on one device.

    Attributes:
        device: its name.
        forms: the form in which each kind of kernel that there is for it is compiled.
        failures: what went wrong in the forms that were passed over, in sentences.
        seconds: how long it took; 0 for a verdict from disk.
        lasting: whether it is one on these versions, for other processes, too. A kernel that raised may have done so
            for want of memory.
    """

    device: str
    forms: Mapping[str, Form]
    failures: tuple[str, ...] = ()
    seconds: float = 0.0
    lasting: bool = True

    @property
    def ok(self) -> bool:
        """Whether every kind passed in its preferred form."""
        return not self.changed

    @property
    def changed(self) -> dict[str, Form]:
        """The kinds that are compiled in a safer form."""
        return {kind: form for kind, form in self.forms.items() if form != "fused"}

    def __str__(self) -> str:
        if self.ok:
            return "bytes agree in " + ", ".join(self.forms)
        chosen = ", ".join(f"{kind} in its form {form!r}" for kind, form in self.changed.items())
        return f"{chosen}; " + "; ".join(self.failures)


class _Trying(threading.local):
    """What a check is trying out on this thread.

    Attributes:
        device: for which; ``None``: none is running.
        forms: of each kind of kernel.
        candidate: of those that a kernel is tuned among, the one; ``None``: it is tuned.
        candidates: how many some kernel of the function that is compiled has.
    """

    device: torch.device | None = None
    forms: Mapping[str, Form] = {}
    candidate: int | None = None
    candidates: int = 1


TRYING = _Trying()
#: What was found on each device; one that is not here has not been checked.
VERDICTS: dict[torch.device, Verdict] = {}


def form(device: torch.device, kind: Kind) -> Form:
    """The form in which a kind of kernel is to be compiled for a device."""
    device = numbered(device)
    if TRYING.device == device:
        return TRYING.forms.get(kind, "definition")
    verdict = VERDICTS.get(device)
    return "fused" if verdict is None else verdict.forms.get(kind, "fused")


def candidates(choices: Sequence[Mapping[str, int]]) -> Sequence[Mapping[str, int]]:
    """What a kernel is tuned among; while a check runs, the one that is tried out."""
    if TRYING.candidate is None:
        return choices
    TRYING.candidates = max(TRYING.candidates, len(choices))
    return choices[min(TRYING.candidate, len(choices) - 1) :][:1]


def key(devices: Iterable[torch.device]) -> tuple[Any, ...]:
    """What a cache key must hold of the forms in use: nothing where all are the preferred ones."""
    verdicts = (VERDICTS.get(device) for device in dict.fromkeys(map(numbered, devices)))
    return tuple(
        sorted((v.device, *sorted(v.changed.items())) for v in verdicts if v is not None and not v.ok)
    )


def guarded(table: Lowering, op: Any, fused: Callable[..., Any]) -> Callable[..., Any]:
    """The lowering of one of our operators in the form chosen for the device of its first argument."""

    def lower(x: Any, *args: Any, **kwargs: Any) -> Any:
        if op is ops.amax:
            kind: Kind = "reduction"
        else:
            kind = "transpose" if op is ops.quantize_both or kwargs.get("transpose") else "cast"
        chosen = form(x.get_device(), kind)
        if chosen == "definition":
            return table.definition(op, x, *args, **kwargs)
        if chosen == "realized":
            x = table.alone(x)
        return fused(x, *args, **kwargs)

    return lower


def numbered(device: torch.device) -> torch.device:
    """``cuda`` is the current device of that type, as everywhere in torch."""
    if device.type == "cuda" and device.index is None and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return device
