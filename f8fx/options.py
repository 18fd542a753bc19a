"""``torch.compile(model, backend="f8fx", options=..., mode=...)``: what a user may say, checked.

Every key and value is validated here and nowhere else; the rest of f8fx sees an :class:`Options`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any, Literal

from . import hardware
from .hardware import Hardware
from .nearest import did_you_mean
from .partition import Save
from .passes import Pipeline
from .passes.collectives import Wire
from .passes.experts import Experts
from .passes.select import FilterFn, Policy
from .recipe import PRESETS, Recipe
from .torch_private import inductor_config, inductor_mode_options, inductor_modes, inductor_option_type

#: TorchTitan's name, in a skip list, for "leave out what is too small to gain".
AUTO_FILTER = "auto_filter_small_kn"
#: Options that are no part of :meth:`Options.decision_key`. What ``filter_fn`` says goes into keys as its ``uuid``, ``inductor``
#: is part of Inductor's; the eager executor has no cache.
NOT_IN_KEY = frozenset(("filter_fn", "inductor", "executor", "strict", "verbose", "debug"))


class OptionError(ValueError):
    """An option f8fx does not know, or a value it cannot take; the message says what to write."""


@dataclass(frozen=True)
class Options:
    """The options of the backend, with their defaults.

    Attributes:
        recipe: name of a preset, or a :class:`~f8fx.recipe.Recipe`.
        select: ``"auto"`` converts a matmul where the cost model says it pays on the target;
            ``"all"`` wherever it is legal.
        filter_fqns: matmuls whose module name contains one of these stay as they are. TorchTitan's
            entry ``"auto_filter_small_kn"`` is accepted and means ``select="auto"``.
        only_fqns: if given, only matmuls whose module name contains one of these are converted.
        filter_fn: ``filter_fn(fqn, gemm) -> bool``, false leaves the matmul alone; ``gemm`` is a
            :class:`~f8fx.report.GemmInfo`. Compiled graphs are then kept out of the on-disk caches,
            unless the function has an attribute ``uuid``: a string that changes when its answers do.
        pad: ``"auto"`` zero-pads sizes that are no multiple of 16 (under ``select="auto"`` where
            that pays); ``"never"`` leaves such matmuls alone.
        activations: ``"leave"`` leaves matmuls of two activations (similarities, attention without a batch, an
            optimizer's) in high precision; ``"convert"`` takes the right one for the weight. Batched ones are left
            in any case.
        experts: ``"leave"`` leaves the matmuls of mixtures of experts in high precision, grouped ones (``torch._grouped_mm``) and
            batched ones with a weight for each batch; ``"convert"`` treats them as others, but for the gradients of
            their weights; ``"with_grad_weight"`` these, too (:mod:`passes.experts`, :mod:`passes.batched_experts`).
        merge: ``"auto"`` runs matmuls that read one input (q, k, v) as one where the cost model says that
            it is faster; ``"never"`` leaves them separate, each with scales of its own.
        rowwise_scales: where rowwise scales are applied when the recipe wants exact accumulation:
            ``"in_gemm"``, to the accumulator, or ``"torchao"``, by a kernel of its own to the rounded
            result, which is torchao's arithmetic to the bit. Default: what is faster on the device for the gemm.
        bias: ``"torchao"`` adds a bias to the rounded result, which is torchao's arithmetic to the bit; ``"in_gemm"``
            lets the gemm add it to its accumulator where it can: a kernel less where attention reads the result, and
            one rounding instead of two.
        save: ``"lean"`` lets the backward redo casts of what is saved anyway, so that no more bytes are
            saved than in high precision, scales excepted; ``"fast"`` saves what the forward has cast of weights for
            the backward, where that moves fewer bytes.
        wire: dtype in which float8 tensors are gathered: ``"float8"`` (NCCL), ``"uint8"``, a view of them, for
            backends that reject float8 (gloo), ``"auto"``, by backend. ``"off"``: gathers stay in high precision.
        weights: ``"dynamic"`` quantizes weights in every call; ``"cached"`` keeps their float8 copies from
            call to call of inference graphs, and those of frozen weights from step to step of training graphs
            (:mod:`f8fx.weights`); ``"constant"`` does so with weights, too, of which not every write can be noticed, those of
            DTensors among them, and takes the user's word that :func:`f8fx.refresh_weights` is called after one that is
            not; ``"reused"`` lets training graphs take all of theirs from :func:`f8fx.reuse_weights`,
            and is ``"cached"`` in inference. In packages of AOTInductor all three make
            Inductor cast weights when a package is loaded (:mod:`f8fx.ahead`).
        kernels: ``"auto"``: a Triton kernel of ours where it reads fewer bytes than Inductor's code would: rowwise
            tensors that are in memory and wanted in both layouts (:mod:`passes.one_read`), and amaxes of rows and columns
            of what is computed (:mod:`passes.amax_both`); ``"inductor"``: never.
        strict: raise on an internal failure. Default: the graph falls back to plain Inductor with a
            warning.
        executor: ``"inductor"``, or ``"eager"``: same passes and partitioner, no code generation.
        target: name of the hardware decisions are made for; default: where the tensors are. What the
            tensors' device cannot run stays as it is all the same, except in ``explain``.
        inductor: Inductor options for this compile, as in ``torch.compile(options=...)``.
        verbose: print every decision to stderr.
        debug: check the graph after every pass and log its text at DEBUG.
    """

    recipe: Recipe = PRESETS["tensorwise"]
    select: Literal["auto", "all"] = "auto"
    filter_fqns: tuple[str, ...] = ()
    only_fqns: tuple[str, ...] = ()
    filter_fn: FilterFn | None = None
    pad: Literal["auto", "never"] = "auto"
    activations: Literal["leave", "convert"] = "leave"
    experts: Experts = "leave"
    merge: Literal["auto", "never"] = "auto"
    rowwise_scales: Literal["in_gemm", "torchao"] | None = None
    bias: Literal["torchao", "in_gemm"] = "torchao"
    save: Save = "lean"
    wire: Wire = "auto"
    weights: Literal["dynamic", "cached", "constant", "reused"] = "dynamic"
    kernels: Literal["auto", "inductor"] = "auto"
    strict: bool = False
    executor: Literal["inductor", "eager"] = "inductor"
    target: Hardware | None = None
    inductor: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    verbose: bool = False
    debug: bool = False

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "inductor": dict(self.inductor)}  # a view of a dict cannot be pickled

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, inductor=MappingProxyType(state["inductor"]))

    @staticmethod
    def parse(options: Mapping[str, Any] | None = None, mode: str | None = None) -> Options:
        """Checks what ``torch.compile`` was given.

        Args:
            options: any of the attributes above, by name.
            mode: an Inductor mode, a recipe name, or both joined by ``"+"``, as in
                ``"max-autotune+rowwise"``, for launchers that pass nothing else.

        Raises:
            OptionError: for an unknown key or value, naming the nearest valid one.
        """
        given = dict(options or {})
        known = {f.name for f in fields(Options)}
        for key in given:
            if key not in known:
                raise OptionError(_belongs_elsewhere(key) or _unknown("option", key, known))
        from_mode, mode_patches = _parse_mode(mode)
        if from_mode is not None:
            if "recipe" in given and _recipe(given["recipe"]) != from_mode:
                raise OptionError(f"mode={mode!r} names a recipe and so does options['recipe']; give one")
            given["recipe"] = from_mode
        values = {key: _PARSERS[key](value) for key, value in given.items()}
        filters = values.get("filter_fqns", ())
        if AUTO_FILTER in filters:
            values["filter_fqns"] = tuple(part for part in filters if part != AUTO_FILTER)
            if given.get("select", "auto") != "auto":
                raise OptionError(f'filter_fqns has {AUTO_FILTER!r}, which means select="auto"; give one')
        values["inductor"] = MappingProxyType({**mode_patches, **values.get("inductor", {})})
        return Options(**values)

    def policy(self) -> Policy:
        """The options that `select` needs."""
        return Policy(self.select, self.filter_fqns, self.only_fqns, self.filter_fn, self.pad)

    def pipeline(self, **overrides: Any) -> Pipeline:
        """The passes under these options; ``overrides`` are further arguments of the pipeline."""
        scales = self.rowwise_scales
        arguments: dict[str, Any] = {
            "debug": self.debug,
            "rowwise_scales": None if scales is None else (lambda device: scales),
            "leave_activations": self.activations == "leave",
            "experts": self.experts,
            "merge": self.merge,
            "bias": self.bias,
            "weights_at_once": self.save == "fast",
            "wire": self.wire,
            "kernels": lambda device: self.kernels == "auto" and device.type == "cuda",
            **overrides,
        }
        return Pipeline(self.recipe, self.policy(), self.target, **arguments)

    def decision_key(self) -> tuple[Any, ...]:
        """All options but those that do not decide which graph comes out, or have keys of their own."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in NOT_IN_KEY}
        if hw := self.target:  # not only its name: it may be the user's own
            values["target"] = tuple((f.name, str(getattr(hw, f.name))) for f in fields(hw))
        return tuple(values.items())


#: What takes the place of a setting of torchao's ``Float8LinearConfig``.
_TORCHAO = {
    "enable_fsdp_float8_all_gather": "call f8fx.fsdp.enable_float8_all_gather(model) before fully_shard",
    "pad_inner_dim": 'it is pad="auto", the default',
    "force_recompute_fp8_weight_in_bwd": 'it is save="lean", the default',
    "recipe_name": "it is recipe",
    "round_scales_to_power_of_2": "it belongs to the recipe: QuantSpec(power_of_2_scale=True)",
    "module_filter_fn": "it is filter_fn(fqn, gemm) -> bool, or filter_fqns",
    "emulate": 'select="all" emulates float8 on a CPU',
}


def _belongs_elsewhere(key: object) -> str | None:
    """What to do with an option of Inductor's, or an argument of ``torch.compile``."""
    if key in ("mode", "fullgraph", "dynamic", "backend", "disable"):
        return f"{key!r} is an argument of torch.compile, not an option"
    if instead := _TORCHAO.get(str(key)):
        return f"{key!r} is a setting of torchao's; here {instead}"
    if str(key).replace("-", "_") in inductor_config().get_config_copy():
        return f'{key!r} is an Inductor option: give it as options={{"inductor": {{{str(key)!r}: ...}}}}'
    return None


def _unknown(what: str, value: object, allowed: Iterable[str | None]) -> str:
    allowed = list(allowed)
    known = sorted(map(str, allowed))
    names = sorted(name for name in allowed if name is not None)
    hint = did_you_mean(str(value).lower(), names, 2)
    return f"unknown {what} {value!r}{hint} (known: {', '.join(known)})"


def _choice(key: str, *allowed: str | None) -> Callable[[Any], str | None]:
    def parse(value: Any) -> str | None:
        if value not in allowed:
            raise OptionError(_unknown(f"value of {key}:", value, allowed))
        return value

    return parse


def _bool(key: str) -> Callable[[Any], bool]:
    def parse(value: Any) -> bool:
        if not isinstance(value, bool):
            raise OptionError(f"{key} must be True or False, got {value!r}")
        return value

    return parse


def _names(key: str) -> Callable[[Any], tuple[str, ...]]:
    def parse(value: Any) -> tuple[str, ...]:
        # an iterator would be empty for the second graph
        if isinstance(value, (str, Iterator)) or not isinstance(value, Iterable):
            raise OptionError(f"{key} must be a list of substrings of module names, got {value!r}")
        parts = tuple(value)
        for part in parts:
            if not isinstance(part, str) or not part:
                raise OptionError(f"{key} must hold non-empty strings, got {part!r}")
        # the order of a set differs from process to process, and would keep graphs out of the caches
        return tuple(sorted(parts)) if isinstance(value, Set) else parts

    return parse


def _recipe(value: Any) -> Recipe:
    if isinstance(value, Recipe):
        return value
    if isinstance(value, str) and value in PRESETS:
        return PRESETS[value]
    if isinstance(value, str):
        raise OptionError(_unknown("recipe", value, PRESETS))
    raise OptionError(f"recipe must be the name of one ({', '.join(PRESETS)}) or a Recipe, got {value!r}")


def _filter_fn(value: Any) -> FilterFn | None:
    if value is not None and not callable(value):
        raise OptionError(f"filter_fn must be a function (fqn, gemm) -> bool, got {value!r}")
    return value


def _target(value: Any) -> Hardware | None:
    if value is None or isinstance(value, Hardware):
        return value
    if not isinstance(value, str):
        raise OptionError(f"target must be the name of a GPU or a Hardware, got {value!r}")
    try:
        return hardware.find(value)
    except ValueError as error:
        raise OptionError(f"target: {error}") from None


def _inductor(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise OptionError(f"inductor must be a dict of Inductor options, got {value!r}")
    known = inductor_config().get_config_copy()
    checked: dict[str, Any] = {}
    for key, given in value.items():
        name = str(key).replace("-", "_")  # as torch.compile(options=...) has it
        if name not in known:
            hint = did_you_mean(name, known, 3)
            raise OptionError(f"unknown Inductor option {key!r}{hint}")
        wanted = inductor_option_type(name)
        if wanted is not None and not isinstance(given, wanted):
            raise OptionError(f"Inductor option {key!r} must be of type {wanted.__name__}, got {given!r}")
        if name == "joint_custom_pre_pass" and not all(map(callable, as_passes(given))):
            raise OptionError(f"Inductor option {key!r} must be a pass or a list of passes, got {given!r}")
        checked[name] = given
    return checked


def as_passes(value: Any) -> tuple[Any, ...]:
    """What ``joint_custom_pre_pass`` holds: nothing, a pass, or several (torch 2.13)."""
    if value is None:
        return ()
    return tuple(value) if isinstance(value, (list, tuple)) else (value,)


_PARSERS: Mapping[str, Callable[[Any], Any]] = {
    "recipe": _recipe,
    "select": _choice("select", "auto", "all"),
    "filter_fqns": _names("filter_fqns"),
    "only_fqns": _names("only_fqns"),
    "filter_fn": _filter_fn,
    "pad": _choice("pad", "auto", "never"),
    "activations": _choice("activations", "leave", "convert"),
    "experts": _choice("experts", "leave", "convert", "with_grad_weight"),
    "merge": _choice("merge", "auto", "never"),
    "rowwise_scales": _choice("rowwise_scales", "in_gemm", "torchao", None),
    "bias": _choice("bias", "torchao", "in_gemm"),
    "save": _choice("save", "lean", "fast"),
    "wire": _choice("wire", "auto", "float8", "uint8", "off"),
    "weights": _choice("weights", "dynamic", "cached", "constant", "reused"),
    "kernels": _choice("kernels", "auto", "inductor"),
    "strict": _bool("strict"),
    "executor": _choice("executor", "inductor", "eager"),
    "target": _target,
    "inductor": _inductor,
    "verbose": _bool("verbose"),
    "debug": _bool("debug"),
}


def _parse_mode(mode: str | None) -> tuple[Recipe | None, dict[str, Any]]:
    if mode is None:
        return None, {}
    if not isinstance(mode, str):
        raise OptionError(f"mode must be a string, got {mode!r}")
    recipe: Recipe | None = None
    inductor_mode: str | None = None
    for part in map(str.strip, mode.split("+")):
        if part in PRESETS:
            if recipe is not None:
                raise OptionError(f"mode={mode!r} names two recipes")
            recipe = PRESETS[part]
        elif part in inductor_modes():
            if inductor_mode is not None:
                raise OptionError(f"mode={mode!r} names two Inductor modes")
            inductor_mode = part
        else:
            raise OptionError(_unknown("mode", part, {*inductor_modes(), *PRESETS}))
    return recipe, {} if inductor_mode is None else inductor_mode_options(inductor_mode)
