"""What the text of a Triton kernel says of its traffic beyond one read and one write of each tensor.

Inductor counts each tensor of a kernel once. Three things in the code it generates are more than that:

* a **looped reduction** reads a row for each of its loops: for the mean of squares, for the amax, for the cast.
  A later loop finds the row in the L2 cache if the rows that all programs work on at a time fit there,
  or if the whole tensor does; where the loops run across rows (column amaxes), only the latter;
* a **combo kernel** runs the parts it was combined from one after the other; each reads its tensors anew;
* a **transposed store** of a reduction goes to addresses far apart, a few bytes each: Inductor tiles
  pointwise kernels through shared memory, but not reductions. So does a **scattered load**, where neither the next output
  nor the next element to reduce is near in memory: each element is then a transaction of 32 bytes.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

#: Of an H100.
L2_BYTES, PROCESSORS = 50 << 20, 132
#: A tensor stays in the cache between two passes if it fills at most half of it: outputs pass through it, too.
_STAYS = L2_BYTES // 2
#: Programs that run on a multiprocessor at a time, each with a row.
_PROGRAMS = 2
#: Bytes that memory is read by.
_SECTOR = 32

_LOOP = re.compile(r"\s+for \w*offset in ")
_PART = re.compile(r"\s+(?:el)?if pid < ")
_LENGTH = re.compile(r"\br0_numel = (\d+)")
_LOAD = re.compile(r"tl\.load\((\w+) \+ \((.*?)\), ")
_STORE = re.compile(r"tl\.store\((\w+) \+ \((.*?)\), ")
#: An index in which the reduction's variable counts single elements, or steps over many.
_ALONG = re.compile(r"(?:^|\+ )r0_\d+(?: \+|$)")
_ACROSS = re.compile(r"\d+\*r0_\d+")
_CONSTANT = re.compile(r"(?:^|\+ )(\d+)(?: \+|$)")
_X_ALONG = re.compile(r"(?:^|\+ )x\d+(?: \+|$)")
#: Variables of an index, by those that count a program's elements.
_VARIABLE = re.compile(r"^\s+([xyz]\d+|r\d_\d+) = (.+)$")
_COUNTERS = ("xindex", "yindex", "zindex", "r0_index", "r1_index")
_ARITHMETIC = re.compile(r"[\w\s+*/%()-]+")
#: Places at which neighbours are looked for; some are at the end of a row.
_PLACES = (0, 1, 5, 9, 17)


@dataclass(frozen=True)
class Tensor:
    """A tensor that a kernel reads or writes.

    Attributes:
        bytes: of what the kernel touches of it.
        itemsize: bytes of an element.
    """

    bytes: int
    itemsize: int


@dataclass
class _Part:
    """A kernel, or one of those that a combo kernel consists of."""

    length: int = 0
    loops: int = 0
    loads: dict[str, dict[int, list[str]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(list))
    )
    stores: list[tuple[str, str]] = field(default_factory=list)
    variables: dict[str, str] = field(default_factory=dict)


def reread_bytes(source: str, tensors: Mapping[str, Tensor]) -> int:
    """Bytes that a kernel reads again and that cannot have stayed in the L2 cache.

    Args:
        tensors: by the name of the kernel's argument; others are not counted.
    """
    source = inlined(source)
    cooperative = "@triton_heuristics.cooperative_reduction" in source
    total = 0
    seen: set[tuple[str, int]] = set()
    for part in _parts(source):
        for name, passes in part.loads.items():
            if name not in tensors:
                continue
            tensor = tensors[name]
            if tensor.bytes <= _STAYS:
                continue
            rows = any(_ALONG.search(index) for index in _indices(passes))
            in_flight = part.length * tensor.itemsize * PROCESSORS * _PROGRAMS
            if not (rows and not cooperative and part.length and in_flight <= L2_BYTES):
                total += tensor.bytes * (len(passes) - 1)
            # what begins at different columns (q, k and v of their product) shares nothing
            begins = {(name, _begin(index)) for index in _indices(passes)}
            total += tensor.bytes * len(begins & seen) // len(begins)
            seen |= begins
    return total


def strided_bytes(source: str, tensors: Mapping[str, Tensor]) -> int:
    """Bytes that a reduction stores transposed, element by element."""
    if "reduction(" not in source:
        return 0
    source, total = inlined(source), 0
    for part in _parts(source):
        if any(_ALONG.search(index) for passes in part.loads.values() for index in _indices(passes)):
            for name, index in part.stores:
                if name in tensors and _ACROSS.search(index) and _X_ALONG.search(index):
                    total += tensors[name].bytes
    return total


def scattered_bytes(source: str, tensors: Mapping[str, Tensor]) -> int:
    """Bytes of the tensors that a kernel reads element by element, each far from the next, and that fill the L2 cache."""
    total = 0
    for part in _parts(inlined(source)):
        for name, passes in part.loads.items():
            tensor = tensors.get(name)
            if tensor is None or tensor.bytes <= _STAYS:
                continue
            steps = [_step(index, part.variables) for index in _indices(passes)]
            if any(step is not None and step * tensor.itemsize >= _SECTOR for step in steps):
                total += tensor.bytes
    return total


def _step(index: str, variables: Mapping[str, str]) -> int | None:
    """Elements to the nearest neighbour, in whichever direction; ``None`` where an index is read from memory."""
    known = set(variables) | set(_COUNTERS)
    if not _ARITHMETIC.fullmatch(index) or not known.issuperset(re.findall(r"[a-z]\w*", index)):
        return None

    def address(**counters: int) -> int:
        places = dict.fromkeys(_COUNTERS, 0) | counters
        values = {name: eval(text, {}, places) for name, text in variables.items()}
        return int(eval(index, {}, {**places, **values}))

    steps = []
    whole = re.sub(r"\w+", lambda name: variables.get(name[0], name[0]), index)
    for counter in _COUNTERS:
        if counter in whole:
            at = [abs(address(**{counter: place + 1}) - address(**{counter: place})) for place in _PLACES]
            steps.append(sorted(at)[len(at) // 2])
    return min(steps, default=0)


_BODY = re.compile(r"^def (\w+_body_\d+)\(([^)]*)\):\n((?:(?:[ \t].*)?\n)*)", re.MULTILINE)


def inlined(source: str) -> str:
    """The text of a kernel with the functions in it, as torch 2.15 writes the parts of a combo kernel, in their places."""
    bodies = {
        name: ([parameter.split(":")[0].strip() for parameter in parameters.split(",")], body)
        for name, parameters, body in _BODY.findall(source)
    }
    if not bodies:
        return source

    def body_of(call: re.Match[str]) -> str:
        parameters, body = bodies[call[2]]
        given = dict(zip(parameters, (argument.strip() for argument in call[3].split(",")), strict=True))
        pattern = re.compile(r"\b(" + "|".join(map(re.escape, given)) + r")\b")
        return "".join(
            f"{call[1]}{pattern.sub(lambda name: given[name[1]], line)}\n" for line in body.splitlines()
        )

    return re.sub(r"^([ \t]+)(\w+_body_\d+)\((.*)\)\n", body_of, _BODY.sub("", source), flags=re.MULTILINE)


def _indices(passes: Mapping[int, Iterable[str]]) -> list[str]:
    return [index for indices in passes.values() for index in indices]


def _begin(index: str) -> int:
    constant = _CONSTANT.search(index)
    return int(constant[1]) if constant else 0


def _parts(source: str) -> Iterator[_Part]:
    part = _Part()
    for line in source.splitlines():
        if _PART.match(line):
            yield part
            part = _Part()
        if length := _LENGTH.search(line):
            part.length = int(length[1])
        if (variable := _VARIABLE.match(line)) and _ARITHMETIC.fullmatch(variable[2]):
            part.variables[variable[1]] = variable[2]
        if _LOOP.match(line):
            part.loops += 1
        for name, index in _LOAD.findall(line):
            part.loads[name][part.loops].append(index)
        part.stores.extend(_STORE.findall(line))
    yield part
