"""Weights that are held outside of the model whose weights are replaced, and would be two from then on."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Iterable

from torch import nn

from f8fx.torch_private import own_parameters


def held_outside(model: nn.Module) -> set[int]:
    """Identities of the model's parameters that a module holds, too, that is no part of it.

    All objects there are, garbage collected before, are looked through only if somebody refers to a parameter beside
    the model's modules.
    """
    modules = list(model.modules())
    held = [param for module in modules for param in own_parameters(module).values()]
    times = Counter(map(id, held))
    others = _references([object()])[0] - 1  # this list's own, and what counting takes
    suspected = {
        id(param)
        for param, count in zip(held, _references(held), strict=True)
        if param is not None and count - others > 2 * times[id(param)]  # each in a module and in the list
    }
    del held
    if not suspected:
        return set()
    gc.collect()  # so that ranks find the same
    inside = set(map(id, modules))
    found: set[int] = set()
    for value in gc.get_objects():
        # not isinstance, which asks objects for their class: lazy ones import it
        if issubclass(type(value), nn.Module) and id(value) not in inside:
            found |= suspected.intersection(map(id, own_parameters(value).values()))
    return found


def _references(values: Iterable[object]) -> list[int]:
    return [sys.getrefcount(value) for value in values]
