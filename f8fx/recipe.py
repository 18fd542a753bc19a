"""What "float8" means for one model: recipes, as plain data.

A matmul layer runs three gemms, named as torchao names them::

    output      = input       @ weight.T        forward
    grad_input  = grad_output @ weight          backward
    grad_weight = grad_output.T @ input         backward

A :class:`Recipe` says, for each of the three, how its two operands are quantized
(:class:`QuantSpec`) and how the gemm accumulates; a gemm whose entry is ``None`` stays in high
precision. Nothing here knows about graphs: a new recipe is new data.

Scales *multiply on the way in*: ``float8 = saturate(high_precision * scale)`` and the gemm
multiplies its result by the reciprocals.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import torch

from .nearest import did_you_mean

if TYPE_CHECKING:
    from torchao.float8 import Float8LinearConfig
    from torchao.float8.config import Float8LinearRecipeName

Role = Literal["output", "grad_input", "grad_weight"]
OperandKind = Literal["input", "weight", "grad_output"]
Float8Format = Literal["e4m3", "e5m2"]
Granularity = Literal["tensorwise", "rowwise"]
Scaling = Literal["dynamic"]

ROLES: tuple[Role, ...] = ("output", "grad_input", "grad_weight")

#: The two operands of each gemm, in the order in which :class:`GemmSpec` holds their specs.
ROLE_OPERANDS: Mapping[Role, tuple[OperandKind, OperandKind]] = MappingProxyType(
    {
        "output": ("input", "weight"),
        "grad_input": ("grad_output", "weight"),
        "grad_weight": ("grad_output", "input"),
    }
)

#: What tensors are quantized from.
HIGH_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

#: Smallest amax a scale is computed from, so that an all-zero tensor gets a finite scale.
#: The value is torchao's (``torchao.float8.float8_utils.EPS``).
EPS = 1e-12

_FORMATS = ("e4m3", "e5m2")
_GRANULARITIES = ("tensorwise", "rowwise")
_SCALINGS = ("dynamic",)


def _check(value: object, allowed: tuple[str, ...], what: str) -> None:
    if value not in allowed:
        hint = did_you_mean(str(value), allowed)
        raise ValueError(f"{what} must be one of {', '.join(map(repr, allowed))}, got {value!r}{hint}")


@dataclass(frozen=True)
class QuantSpec:
    """How one operand of one gemm becomes float8.

    Attributes:
        dtype: ``"e4m3"`` (3 bits of mantissa) or ``"e5m2"`` (more range). The hardware table turns
            the format into a torch dtype (``float8_e4m3fn``, or the ``fnuz`` flavour on MI300).
        granularity: ``"tensorwise"``, one scale for the tensor, or ``"rowwise"``, one scale for
            each row of the left operand and each column of the right one (torchao's *axiswise*:
            the amax runs over the contracted dimension).
        scaling: ``"dynamic"``: the scale comes from the amax of the very tensor it scales.
        power_of_2_scale: round the scale down to a power of two.
    """

    dtype: Float8Format = "e4m3"
    granularity: Granularity = "tensorwise"
    scaling: Scaling = "dynamic"
    power_of_2_scale: bool = False

    def __post_init__(self) -> None:
        _check(self.dtype, _FORMATS, "QuantSpec.dtype")
        _check(self.granularity, _GRANULARITIES, "QuantSpec.granularity")
        _check(self.scaling, _SCALINGS, "QuantSpec.scaling")
        if not isinstance(self.power_of_2_scale, bool):
            raise ValueError(
                f"QuantSpec.power_of_2_scale must be True or False, got {self.power_of_2_scale!r}"
            )

    def __str__(self) -> str:
        return f"{self.dtype}/{self.granularity}" + ("/pow2" if self.power_of_2_scale else "")


@dataclass(frozen=True)
class GemmSpec:
    """How one gemm runs in float8.

    Attributes:
        left, right: specs of the two operands, in the order of :data:`ROLE_OPERANDS`.
        use_fast_accum: accumulate in the tensor core's reduced precision (faster on Hopper,
            slightly less exact; no effect elsewhere).
    """

    left: QuantSpec = QuantSpec()
    right: QuantSpec = QuantSpec()
    use_fast_accum: bool = False

    def __post_init__(self) -> None:
        for side in ("left", "right"):
            if not isinstance(getattr(self, side), QuantSpec):
                raise ValueError(f"GemmSpec.{side} must be a QuantSpec, got {getattr(self, side)!r}")
        if not isinstance(self.use_fast_accum, bool):
            raise ValueError(f"GemmSpec.use_fast_accum must be True or False, got {self.use_fast_accum!r}")
        if self.left.dtype == self.right.dtype == "e5m2":
            raise ValueError(
                "GemmSpec: e5m2 x e5m2 is not a float8 gemm that any supported hardware has; "
                "make one of the two operands e4m3"
            )

    @property
    def is_rowwise(self) -> bool:
        """Whether any operand carries a scale per row: the gemm then takes two scale vectors."""
        return "rowwise" in (self.left.granularity, self.right.granularity)

    @property
    def scales_after_gemm(self) -> bool:
        """Whether torchao applies the scales to the gemm's result instead of inside it.

        It runs a rowwise gemm without fast accumulation with unit scales and multiplies the bfloat16
        result by the outer product of the reciprocal scales. f8fx does so where it must be equal to the
        bit, or where the device's gemm is slow at it (``passes.quantize.RowwiseScales``).
        """
        return self.is_rowwise and not self.use_fast_accum


@dataclass(frozen=True)
class Recipe:
    """Which gemms run in float8 and how; ``None`` keeps a gemm in high precision.

    Attributes:
        name: what logs and reports call it.
        output, grad_input, grad_weight: one :class:`GemmSpec` each, or ``None``.
        convert_dtypes: result dtypes of the matmuls the recipe applies to. float32 is left out by
            default: a model that computes in float32 asked for more precision than bfloat16, so
            going below it must be asked for too.

    Raises:
        ValueError: for a combination that means nothing, saying why.
    """

    name: str = "custom"
    output: GemmSpec | None = GemmSpec(use_fast_accum=True)
    grad_input: GemmSpec | None = GemmSpec(left=QuantSpec("e5m2"))
    grad_weight: GemmSpec | None = GemmSpec(left=QuantSpec("e5m2"))
    convert_dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16)

    def __post_init__(self) -> None:
        for role in ROLES:
            spec = getattr(self, role)
            if spec is not None and not isinstance(spec, GemmSpec):
                raise ValueError(f"Recipe.{role} must be a GemmSpec or None, got {spec!r}")
        if self.output is self.grad_input is self.grad_weight is None:
            raise ValueError(
                "Recipe: every gemm is None, so nothing would run in float8; compile with "
                'backend="inductor" for that'
            )
        if not isinstance(self.name, str):
            raise ValueError(f"Recipe.name must be a string, got {self.name!r}")
        if (
            not isinstance(self.convert_dtypes, tuple)
            or not self.convert_dtypes
            or any(d not in HIGH_DTYPES for d in self.convert_dtypes)
        ):
            raise ValueError(
                f"Recipe.convert_dtypes must be a tuple of some of {HIGH_DTYPES}, got {self.convert_dtypes!r}"
            )

    def gemm(self, role: Role) -> GemmSpec | None:
        """The spec of the gemm in this role, or ``None`` where it stays in high precision."""
        return getattr(self, role)

    def operand(self, role: Role, kind: OperandKind) -> QuantSpec | None:
        """The spec of one operand of the gemm in this role.

        Raises:
            ValueError: if the gemm has no operand of that kind.
        """
        spec = self.gemm(role)
        if spec is None:
            return None
        left, right = ROLE_OPERANDS[role]
        if kind == left:
            return spec.left
        if kind == right:
            return spec.right
        raise ValueError(f"the {role} gemm has operands {left} and {right}, not {kind}")

    def replace(self, **changes: Any) -> Recipe:
        """A copy with some fields changed, checked like a new one."""
        return dataclasses.replace(self, **changes)

    @staticmethod
    def named(name: str) -> Recipe:
        """The preset of that name.

        Raises:
            ValueError: for an unknown name, naming the nearest one.
        """
        _check(name, tuple(PRESETS), "recipe")
        return PRESETS[name]

    @staticmethod
    def from_torchao(config: Float8LinearConfig | Float8LinearRecipeName | str) -> Recipe:
        """The recipe that means exactly what a torchao ``Float8LinearConfig``, or the name of one, means.

        Raises:
            ValueError: for an unknown name, and for settings that no graph rewrite can honour (``emulate``,
                ``enable_fsdp_float8_all_gather``), saying what to use instead.
            TypeError: for anything else.
        """
        if isinstance(config, str):
            return Recipe.named(config)
        if isinstance(config, type) or not hasattr(config, "cast_config_input"):
            name = getattr(config, "value", None)  # torchao's names are an enum of strings
            if isinstance(name, str):
                return Recipe.named(name)
            raise TypeError(
                "Recipe.from_torchao takes a torchao.float8.Float8LinearConfig or the name of its recipe, "
                f"got {config!r}"
            )
        if config.emulate:
            raise ValueError(
                "Float8LinearConfig.emulate=True has no counterpart: on a device without float8 "
                'tensor cores f8fx converts nothing, and on CPU select="all" emulates by itself'
            )
        if config.enable_fsdp_float8_all_gather:
            raise ValueError(
                "Float8LinearConfig.enable_fsdp_float8_all_gather is about how weights are gathered, which a recipe does not "
                "say: make the recipe of a config without it, and call f8fx.fsdp.enable_float8_all_gather(model, "
                "recipe=...) before fully_shard"
            )
        pow2 = config.round_scales_to_power_of_2

        def quant(cast: Any) -> QuantSpec | None:
            if cast.scaling_type.value == "disabled":
                return None
            fmt: Float8Format = "e5m2" if "e5m2" in str(cast.target_dtype) else "e4m3"
            rowwise = cast.scaling_granularity.value == "axiswise"
            return QuantSpec(fmt, "rowwise" if rowwise else "tensorwise", "dynamic", pow2)

        def gemm(left: Any, right: Any, gemm_config: Any) -> GemmSpec | None:
            specs = quant(left), quant(right)
            if specs[0] is None or specs[1] is None:
                return None
            return GemmSpec(specs[0], specs[1], gemm_config.use_fast_accum)

        recipe = Recipe(
            "torchao",
            gemm(config.cast_config_input, config.cast_config_weight, config.gemm_config_output),
            gemm(
                config.cast_config_grad_output,
                config.cast_config_weight_for_grad_input,
                config.gemm_config_grad_input,
            ),
            gemm(
                config.cast_config_grad_output_for_grad_weight,
                config.cast_config_input_for_grad_weight,
                config.gemm_config_grad_weight,
            ),
        )
        for preset in PRESETS.values():
            if preset.replace(name="torchao") == recipe:
                return preset
        return recipe


_TENSORWISE = QuantSpec("e4m3")
_TENSORWISE_POW2 = QuantSpec("e4m3", power_of_2_scale=True)
_GRAD_TENSORWISE = QuantSpec("e5m2")
_ROWWISE = QuantSpec("e4m3", "rowwise", power_of_2_scale=True)

#: The presets, with torchao's meaning of each name (torchao 0.18, ``torchao/float8/config.py``).
PRESETS: Mapping[str, Recipe] = MappingProxyType(
    {
        "tensorwise": Recipe(
            "tensorwise",
            output=GemmSpec(_TENSORWISE, _TENSORWISE, use_fast_accum=True),
            grad_input=GemmSpec(_GRAD_TENSORWISE, _TENSORWISE),
            grad_weight=GemmSpec(_GRAD_TENSORWISE, _TENSORWISE),
        ),
        "rowwise": Recipe(
            "rowwise",
            output=GemmSpec(_ROWWISE, _ROWWISE, use_fast_accum=True),
            grad_input=GemmSpec(_ROWWISE, _ROWWISE),
            grad_weight=GemmSpec(_ROWWISE, _ROWWISE),
        ),
        "rowwise_with_gw_hp": Recipe(
            "rowwise_with_gw_hp",
            output=GemmSpec(_ROWWISE, _ROWWISE, use_fast_accum=True),
            grad_input=GemmSpec(_ROWWISE, _TENSORWISE_POW2),
            grad_weight=None,
        ),
    }
)
