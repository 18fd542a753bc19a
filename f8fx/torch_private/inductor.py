"""Inductor around a compile: ``compile_fx``, its configuration, its passes' base class, its caches."""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, get_origin

from torch import fx

from .versions import release

if TYPE_CHECKING:

    class CustomGraphPass:
        """Base class of graph passes that Inductor can put into its cache keys."""

        def __call__(self, graph: fx.Graph) -> None: ...

        def uuid(self) -> Any: ...

else:
    from torch._inductor.custom_graph_pass import CustomGraphPass as CustomGraphPass


def compile_fx_module() -> Any:
    """The module that holds ``compile_fx``, which both the stock backend and f8fx end in."""
    return importlib.import_module("torch._inductor.compile_fx")


def inductor_config() -> Any:
    """The module ``torch._inductor.config``; only read, and patched for one compile at a time."""
    from torch._inductor import config

    return config


def differs_from_default(name: str) -> bool:
    """Whether an option of ``torch._inductor.config`` has another value than PyTorch's own.

    An assignment of the default itself leaves no trace that is reliable: ``config.patch`` leaves the same one.
    ``ConfigModule._config``.
    """
    config = inductor_config()
    return bool(getattr(config, name) != config._config[name].default)


def settings(patches: Mapping[str, Any]) -> str:
    """What Inductor and AOTAutograd are set to under these options: a text that is the same in another process.

    ``save_config_portable`` is what their own cache keys are made of. It leaves out what changes no code.
    """
    from torch._functorch import config as functorch_config

    values = {**inductor_config().save_config_portable(), **patches}
    text = repr((sorted(values.items()), sorted(functorch_config.save_config_portable().items())))
    return re.sub(r" at 0x[0-9a-f]+", "", text)


def inductor_mode_options(mode: str) -> dict[str, Any]:
    """Inductor options a ``torch.compile`` mode stands for; KeyError-free: unknown modes raise."""
    from torch._inductor import list_mode_options

    return dict(list_mode_options(mode))


def inductor_modes() -> tuple[str, ...]:
    """Names ``torch.compile(mode=...)`` knows."""
    from torch._inductor import list_mode_options

    return tuple(list_mode_options())


def runs_joint_passes(config: Mapping[str, Any]) -> bool:
    """Whether Inductor runs passes on joint graphs under these options (``use_joint_graph_passes``; ``mode="lite"`` does without)."""
    return bool(config.get("use_joint_graph_passes", inductor_config().use_joint_graph_passes))


def inductor_option_type(name: str) -> Any:
    """What ``torch.compile(options=...)`` asks an option's value to be an instance of; ``None``: it takes any value.

    As ``torch._TorchCompileInductorWrapper.apply_options`` checks it, but an annotation that is a string, which
    ``isinstance`` refuses, is taken to allow any value.
    """
    annotated = inductor_config().get_type(name)
    return annotated if isinstance(annotated, type) and get_origin(annotated) is None else None


def joint_custom_pre_pass() -> Any:
    """The pass or passes a user has already put into ``joint_custom_pre_pass`` (2.11: one object)."""
    return inductor_config().joint_custom_pre_pass


def compiles_ahead_of_time() -> bool:
    """Whether Inductor is at work on a package of AOTInductor (``V.aot_compilation``)."""
    from torch._inductor.virtualized import V

    return bool(V.aot_compilation)


def just_in_time() -> AbstractContextManager[Any]:
    """A block in which Inductor compiles what can be called at once, whatever it is at work on."""
    from torch._inductor.virtualized import V

    return V.set_aot_compilation(False)


def inductor_cache_dir() -> str:
    """Directory of Inductor's on-disk caches."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return cache_dir()


def inductor_cache_hits() -> int:
    """How many graphs this process has found in the caches of Inductor and AOTAutograd (``_dynamo.utils.counters``)."""
    from torch._dynamo.utils import counters

    return counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"]


def as_strided_keeps_offsets() -> bool:
    """Whether Inductor's ``as_strided`` of a view begins where the view does; those of torch 2.11 and 2.12 begin at its buffer."""
    return release() >= (2, 13)


def express_min_max_as_where() -> None:
    """Makes Inductor's Triton code write ``minimum`` and ``maximum`` as ``tl.where``; results are the same.

    Since torch 2.14 it writes ``tl.maximum(a, b, tl.PropagateNan.ALL)``. In a kernel that also stores a
    transposed float8 copy, Triton then writes garbage bytes (https://github.com/triton-lang/triton/issues/11111), and
    any min or max of the user's model can be fused into such a kernel. torchao does the same for the same reason
    (``torchao/float8/_inductor_patch.py``). Can go when the oldest supported Triton has the fix.
    """
    if release() < (2, 14):
        return
    from torch._inductor.codegen.triton import TritonOverrides

    def written(sign: str) -> staticmethod[..., str]:
        # a != a lets a NaN in a through; a NaN in b makes the comparison false, which chooses b
        return staticmethod(lambda a, b: f"tl.where(({a} {sign} {b}) | ({a} != {a}), {a}, {b})")

    setattr(TritonOverrides, "minimum", written("<"))  # noqa: B010
    setattr(TritonOverrides, "maximum", written(">"))  # noqa: B010
