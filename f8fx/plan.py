"""Which gemms of a graph to convert, given that casts are shared.

:mod:`f8fx.cost` knows what one gemm and one cast cost. A graph's gemms share casts (q, k and v read one
input, a layer's gemms read each other's operands), so what one of them gains depends on which others
are converted.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

from .cost import CostModel
from .recipe import ROLE_OPERANDS, Role


@dataclass(frozen=True)
class PlannedOperand:
    """One operand of a gemm that could be converted.

    Attributes:
        key: what makes two operands one cast: the source tensor, and whatever else tells two casts of it
            apart (the float8 format, say).
        rows, cols: shape of the tensor as it lies in memory.
        transposed: whether the gemm contracts over ``rows`` and so needs the transposed copy.
        rowwise: whether it is scaled rowwise.
        itemsize: bytes per element of the high-precision tensor.
        amax_fused: whether the tensor's producer can compute the amax (a norm, an activation).
        cached: whether the cast was made before and costs nothing.
        stored: whether the tensor exists in float8 alone, so that the gemm as it is needs a cast up.
    """

    key: Hashable
    rows: int
    cols: int
    transposed: bool
    rowwise: bool
    itemsize: int = 2
    amax_fused: bool = False
    cached: bool = False
    stored: bool = False


@dataclass(frozen=True)
class PlannedGemm:
    """One gemm [m, k] x [k, n] that could be converted; gemms of one ``layer`` decide together.

    Attributes:
        itemsize: bytes per element of the gemm as it is.
        rowwise: whether its operands have scale vectors.
        rescale: whether it accumulates exactly, so that a kernel of its own may apply these
            (:meth:`f8fx.cost.CostModel.gemm_seconds`).
        operands: left and right.
        experts, sums_groups: see :meth:`f8fx.cost.CostModel.gemm_seconds`.
        cut_bytes: of its float8 result, where that is copied out of one with padded columns; else 0.
    """

    role: Role
    m: int
    k: int
    n: int
    itemsize: int
    rowwise: bool
    rescale: bool
    operands: tuple[PlannedOperand, PlannedOperand]
    layer: Hashable
    experts: int = 0
    sums_groups: bool = False
    cut_bytes: int = 0


@dataclass(frozen=True)
class Verdict:
    """What :func:`plan` says of one gemm.

    Attributes:
        convert: whether to convert it.
        high_seconds: of the gemm as it is, casts up from float8 included.
        float8_seconds: of the gemm in float8, its share of the casts and the copy of a padded result included.
        cast_seconds: that share.
        reason: one short line for ``explain``.
    """

    convert: bool
    high_seconds: float
    float8_seconds: float
    cast_seconds: float
    reason: str


def plan(model: CostModel, gemms: Sequence[PlannedGemm], drop: bool = True) -> list[Verdict]:
    """Which of a graph's gemms to convert.

    Every distinct cast is paid once and split evenly over the converted gemms that use it. The
    start is everything converted. A role whose conversion costs more than it gains, counting only
    casts that nobody else needs, is dropped; a layer that loses as a whole is dropped with all its
    roles; then the layers that shared casts with what was dropped are looked at again, until
    nothing changes. A layer that gains less than the model's margin (``Calibration.margin``) counts as one that loses.

    An even split is a fair start and may drop too much: k and v lose by their third of the input's cast, which
    is made for q all the same. So in the end what was dropped comes back, all of a layer's roles together, where it pays for the
    casts that nobody else makes, and only those are counted for it.

    Args:
        drop: whether to drop anything; if not, the verdicts say what everything converted costs.

    Returns:
        One verdict per gemm, in their order.
    """
    return _Plan(model, gemms).run(drop)


class _Plan:
    """The state of one run of :func:`plan`: gemms, the casts they use, who still uses them."""

    # A drop makes its neighbours' casts dearer, so layers are looked at again. Real graphs settle in
    # two or three rounds.
    ROUNDS = 32

    def __init__(self, model: CostModel, gemms: Sequence[PlannedGemm]) -> None:
        self.model, self.gemms = model, gemms
        self.high = list(map(self._high_seconds, gemms))
        self.margin = [model.calibration.margin * high for high in self.high]
        self.float8 = list(map(self._float8_seconds, gemms))
        self.seconds: dict[Hashable, float] = {}
        self.users: dict[Hashable, set[int]] = {}
        self.items = [self._items(i, gemm) for i, gemm in enumerate(gemms)]
        self.layers: dict[Hashable, list[int]] = {}
        for i, gemm in enumerate(gemms):
            self.layers.setdefault(gemm.layer, []).append(i)
        self.dropped: dict[int, Verdict] = {}
        self.returned: set[int] = set()

    def _high_seconds(self, gemm: PlannedGemm) -> float:
        """Of a gemm as it is, and of what casts its operands up from float8."""
        model = self.model
        seconds = model.gemm_seconds(
            *(gemm.m, gemm.k, gemm.n, False),
            itemsize=gemm.itemsize,
            experts=gemm.experts,
            sums_groups=gemm.sums_groups,
        )
        ups = (model.cast_up_seconds(op.rows * op.cols, op.itemsize) for op in gemm.operands if op.stored)
        return seconds + sum(ups)

    def _float8_seconds(self, gemm: PlannedGemm) -> float:
        """Of a gemm in float8, without its casts."""
        model, rescale = self.model, gemm.rescale and not gemm.experts
        seconds = model.gemm_seconds(
            *(gemm.m, gemm.k, gemm.n, True, gemm.rowwise, rescale),
            experts=gemm.experts,
            sums_groups=gemm.sums_groups,
        )
        if gemm.cut_bytes:
            seconds += model.copy_seconds(gemm.cut_bytes) + model.hardware.launch_overhead
        return seconds

    def _items(self, index: int, gemm: PlannedGemm) -> list[Hashable]:
        """The casts and amaxes that a gemm needs; enters their cost and this user."""
        model, found = self.model, list[Hashable]()
        for op, kind in zip(gemm.operands, ROLE_OPERANDS[gemm.role], strict=True):
            if op.cached:
                continue
            cast, amax = (op.key, op.transposed, op.rowwise), (op.key, "amax")
            if cast not in self.seconds:
                self.seconds[cast] = model.cast_seconds(
                    op.rows, op.cols, op.itemsize, op.rowwise, op.transposed, kind
                )
            if not op.rowwise and amax not in self.seconds:
                self.seconds[amax] = model.amax_seconds(op.rows, op.cols, op.itemsize, op.amax_fused)
            found += [cast] if op.rowwise else [cast, amax]
        found = list(dict.fromkeys(found))  # both operands may be one tensor
        for item in found:
            self.users.setdefault(item, set()).add(index)
        return found

    def _share(self, index: int, leaving: Sequence[int] = ()) -> float:
        """Seconds of a gemm's casts, each divided by the gemms that use it once ``leaving`` are gone."""
        return sum(self.seconds[item] / users for item, users in self._users_left(index, leaving))

    def _own(self, index: int, leaving: Sequence[int]) -> float:
        """Seconds of the casts that no gemm but this one needs once ``leaving`` are gone."""
        return sum(self.seconds[item] for item, users in self._users_left(index, leaving) if users == 1)

    def _users_left(self, index: int, leaving: Sequence[int]) -> Iterator[tuple[Hashable, int]]:
        """Each cast of a gemm, and how many gemms use it once ``leaving`` are gone: the gemm itself stays."""
        for item in self.items[index]:
            users = self.users[item]
            yield item, len(users) - sum(i in users for i in leaving)

    def _gain(self, index: int) -> float:
        """Seconds that a gemm in float8 gains beyond the margin, without its casts."""
        return self.high[index] - self.margin[index] - self.float8[index]

    def _verdict(self, index: int, convert: bool, reason: str, cast: float) -> Verdict:
        return Verdict(convert, self.high[index], self.float8[index] + cast, cast, reason)

    def _settle(self, layer: Hashable) -> set[Hashable]:
        """Drops what a layer loses by; returns the casts that this makes dearer for their other users."""
        active = [i for i in self.layers[layer] if i not in self.dropped]
        losers: list[int] = []
        for i in active:
            if self.float8[i] + self._own(i, losers) > self.high[i]:
                losers.append(i)
        rest = [i for i in active if i not in losers]
        gain = sum(self._gain(i) - self._share(i, losers) for i in rest)
        dropped: dict[int, str] = {}
        if rest and gain > 0:
            for i in losers:
                speedup = self.high[i] / (self.float8[i] + self._share(i))
                dropped[i] = f"{self.gemms[i].role} alone loses: float8 would be {speedup:.2f}x"
        elif active:
            float8 = sum(self.float8[i] + self._share(i) for i in active)
            speedup = sum(self.high[i] for i in active) / float8
            reason = f"too small: float8 would be {speedup:.2f}x"
            if speedup > 1:
                reason += f", which is within the model's error of {self.model.calibration.margin:.0%}"
            dropped = dict.fromkeys(active, reason)
        for i, reason in dropped.items():
            self.dropped[i] = self._verdict(i, False, reason, self._share(i))
        for i in dropped:
            for item in self.items[i]:
                self.users[item].discard(i)
        return {item for i in dropped for item in self.items[i]}

    def _return(self, layer: Hashable) -> bool:
        """Converts again what pays, of a layer, beside all that is converted; whether anything does."""
        absent = [i for i in self.layers[layer] if i in self.dropped]
        rest = list(absent)
        for i in absent:
            others = {item for j in rest if j != i for item in self.items[j]}
            own = sum(self.seconds[item] for item in self._unpaid((i,)) if item not in others)
            if self.float8[i] + own > self.high[i]:
                rest.remove(i)
        unpaid = self._unpaid(rest)
        gain = sum(map(self._gain, rest)) - sum(map(self.seconds.__getitem__, unpaid))
        if not rest or gain <= 0:
            return False
        for i in rest:
            self.items[i] = [item for item in self.items[i] if item in unpaid]
            for item in self.items[i]:
                self.users[item].add(i)
            del self.dropped[i]
        self.returned.update(rest)
        return True

    def _unpaid(self, gemms: Sequence[int]) -> dict[Hashable, None]:
        """The casts of gemms that no converted gemm needs."""
        return {item: None for i in gemms for item in self.items[i] if not self.users[item]}

    def run(self, drop: bool) -> list[Verdict]:
        if not self.model.can_pay:
            reason = f"{self.model.hardware.name} has no float8 tensor cores"
            return [self._verdict(i, False, reason, self._share(i)) for i in range(len(self.gemms))]
        dirty = list(self.layers) if drop else []
        for _ in range(self.ROUNDS):
            dearer: set[Hashable] = set()
            for layer in dirty:
                dearer |= self._settle(layer)
            touched = {self.gemms[i].layer for item in dearer for i in self.users[item]}
            dirty = [layer for layer in self.layers if layer in touched] if touched else []
            if not dirty:
                break
        for _ in range(self.ROUNDS):  # what comes back may make casts that others want
            absent = dict.fromkeys(self.gemms[i].layer for i in self.dropped)
            returned = [self._return(layer) for layer in absent]
            if not any(returned):
                break
        return self._verdicts()

    def _verdicts(self) -> list[Verdict]:
        verdicts = dict(self.dropped)
        for gemms in self.layers.values():
            kept = {i: self._share(i) for i in gemms if i not in self.dropped}
            if kept:
                speedup = sum(self.high[i] for i in kept) / sum(self.float8[i] + kept[i] for i in kept)
                reason = f"{'pays' if speedup > 1 else 'loses'}: {speedup:.2f}x"
                if any(i in self.returned for i in kept):
                    reason += "; others make casts it needs"
                verdicts |= {i: self._verdict(i, True, reason, kept[i]) for i in kept}
        return [verdicts[i] for i in range(len(self.gemms))]
