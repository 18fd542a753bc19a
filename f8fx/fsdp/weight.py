"""The gathered weight: float8 data and scales, in the shape and dtype of the weight they stand for."""

from __future__ import annotations

import hashlib
import warnings
from typing import Any

import torch
from torch import Tensor

from f8fx import ops
from f8fx.report import log
from f8fx.torch_private import (
    disabled_torch_function,
    is_fake,
    tree_leaves,
    tree_map,
    wrapper_tensor,
    written,
)

from .copies import Copies
from .formats import Format

aten = torch.ops.aten

_ALIASES = frozenset((aten.detach.default, aten.alias.default))
#: Same elements where the sizes asked for are those there are: FSDP2 makes its parameter so.
_SAME_SIZE = frozenset((aten.as_strided.default, aten.view.default, aten._unsafe_view.default))
_FACTORIES = frozenset(
    (
        aten.empty_like.default,
        aten.zeros_like.default,
        aten.ones_like.default,
        aten.full_like.default,
        aten.new_empty.default,
        aten.new_zeros.default,
        aten.new_empty_strided.default,
    )
)


class Float8Weight(torch.Tensor):
    """A weight ``[n, k]``, or experts' ``[experts, n, k]``, of which float8 copies exist, and nothing else.

    A graph that AOTAutograd traces gets data and scales as inputs. Every operator reads the weight through
    ``f8fx::dequantize``; the passes fold that into the gemms. Where nothing folds it (eager execution, a
    matmul that is not converted) the operator runs on the dequantized weight, that is on the float8
    rounding of it, since the weight itself was not sent: results are those of a layer whose weight is
    rounded and whose input is not. Eagerly, the first such use of each weight warns.

    Args:
        data: one float8 tensor of the weight's shape for each format, contiguous.
        scales: float32, of the shapes that their formats' directions give.
        formats: the forward's, and where it differs the backward's.
        dtype: of the weight it stands for.
        fqn: for messages.
        copies: what is known of the copies it was gathered in, shared by all tensors on this memory; ``None`` for
            one that a graph is traced with.
        alternate: the forward's copy may be in memory in the forward only, the backward's in the backward.
    """

    formats: tuple[Format, ...]
    fqn: str
    alternate: bool
    copies: Copies | None

    @staticmethod
    def __new__(
        cls,
        data: tuple[Tensor, ...],
        scales: tuple[Tensor, ...],
        formats: tuple[Format, ...],
        dtype: torch.dtype,
        fqn: str = "",
        alternate: bool = False,
        copies: Copies | None = None,
    ) -> Float8Weight:
        self = wrapper_tensor(
            cls,
            data[0].size(),
            strides=data[0].stride(),
            dtype=dtype,
            layout=torch.strided,
            device=data[0].device,
            requires_grad=False,
        )
        self.formats, self.fqn, self.alternate = formats, fqn, alternate
        self.copies = copies
        for index, (copy, scale) in enumerate(zip(data, scales, strict=True)):
            setattr(self, f"_data_{index}", copy)
            setattr(self, f"_scale_{index}", scale)
        return self

    __torch_function__ = disabled_torch_function()

    def arrived(self, scales: tuple[Tensor, ...]) -> None:
        """New data was gathered: these are its scales."""
        for index, scale in enumerate(scales):
            setattr(self, f"_scale_{index}", scale)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        names = [f"_{what}_{index}" for index in range(len(self.formats)) for what in ("data", "scale")]
        return names, (self.formats, self.dtype, self.alternate)

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], meta: Any, size: Any, stride: Any) -> Float8Weight:
        formats, dtype, alternate = meta
        count = range(len(formats))
        return Float8Weight(
            tuple(inner[f"_data_{index}"] for index in count),
            tuple(inner[f"_scale_{index}"] for index in count),
            formats,
            dtype,
            alternate=alternate,
        )

    def _stable_hash_for_caching(self) -> str:
        """What compiled graphs that read it depend on: part of the key of torch's cache on disk, from 2.12 on."""
        tensors = [(t.dtype, t.shape, t.stride(), t.device) for t in self._tensors()]
        own = (self.formats, self.dtype, self.alternate, self.shape, self.stride(), self.requires_grad)
        return hashlib.blake2b(repr((own, tensors)).encode(), digest_size=16).hexdigest()

    def _tensors(self) -> list[Tensor]:
        """data, scale, data, scale, ... in the order of the formats."""
        return [getattr(self, name) for name in self.__tensor_flatten__()[0]]

    def alias(self) -> Float8Weight:
        """Another tensor object on the same memory."""
        tensors = self._tensors()
        return Float8Weight(
            tuple(tensors[::2]),
            tuple(tensors[1::2]),
            self.formats,
            self.dtype,
            self.fqn,
            self.alternate,
            self.copies,
        )

    def dequantize_marked(self) -> Tensor:
        """The plain tensor it stands for, by the operator that the passes know as a mark."""
        tensors = self._tensors()
        first = self.formats[0]
        if len(self.formats) == 1:
            return ops.dequantize(*tensors, dtype=self.dtype, dim=first.dim, power_of_2=first.power_of_2)
        other = self.formats[1]
        return ops.dequantize_both(
            *tensors,
            dtype=self.dtype,
            dim=first.dim,
            dim_other=other.dim,
            power_of_2=first.power_of_2,
            power_of_2_other=other.power_of_2,
            alternate=self.alternate,
        )

    # frames that Dynamo skips run inside a compiled call, and what they call would be compiled
    @classmethod
    @torch.compiler.disable
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        weight = args[0] if args else None
        if isinstance(weight, Float8Weight):
            if func in _ALIASES:
                return weight.alias()
            if func in _SAME_SIZE and tuple(args[1]) == tuple(weight.shape):
                return weight.alias()
            if func in _FACTORIES:
                like = torch.empty_strided(
                    weight.shape, weight.stride(), dtype=weight.dtype, device=weight.device
                )
                return func(like, *args[1:], **kwargs)
        targets = [a for a in tree_leaves(written(func, args, kwargs)) if isinstance(a, Float8Weight)]
        if targets:
            raise RuntimeError(
                f"f8fx.fsdp: {func} would change {_named(targets[0])}, which was gathered in float8; what is "
                "gathered is a copy. Change the sharded parameter, outside of forward and backward"
            )

        def plain(value: Any) -> Any:
            if not isinstance(value, Float8Weight):
                return value
            _warn_if_eager(value, func)
            if value.copies is not None and value.alternate:
                value.copies.computed_with()
            return value.dequantize_marked()

        return func(*tree_map(plain, args), **tree_map(plain, kwargs))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return (
            f"Float8Weight({self.fqn or '?'}, shape={tuple(self.shape)}, dtype={self.dtype}, {self.formats})"
        )


def _named(weight: Any) -> str:
    return repr(getattr(weight, "fqn", "") or "a weight")


def _warn_if_eager(weight: Float8Weight, func: Any) -> None:
    copies = weight.copies
    if copies is None or not copies.fqn or copies.has_warned or is_fake(weight._tensors()[0]):
        return
    copies.has_warned = True
    text = f"f8fx.fsdp: {func} reads {_named(weight)} outside of a graph compiled by f8fx"
    if copies.peers.has_warned:  # the others of a model that is not compiled are hundreds
        log.info(text)
        return
    copies.peers.has_warned = True
    warnings.warn(
        f"{text}. The weight was gathered in float8, so it is its float8 rounding that is read. Compile the block that "
        'holds it with backend="f8fx", or leave the weight out with filter_fqns. Further weights of the model that are '
        "read so are logged at INFO",
        stacklevel=4,
    )
