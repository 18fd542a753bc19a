"""Where a module holds a parameter, which may have got a parametrization since."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from f8fx.torch_private import own_parameters


def held(module: nn.Module, name: str) -> Any:
    """What a module holds under the name of a parameter, or under the one that its parametrization has given it.

    It is not computed: a parametrization is the user's code, and may count its calls or change its buffers.
    """
    own = own_parameters(module).get(name)
    if own is None and is_parametrized(module, name):
        own = own_parameters(module.get_submodule(f"parametrizations.{name}")).get("original")
    return own


def key_of(module: nn.Module, name: str) -> str:
    """Its name from the module on: what its keys in state dicts end in."""
    return f"parametrizations.{name}.original" if is_parametrized(module, name) else name
