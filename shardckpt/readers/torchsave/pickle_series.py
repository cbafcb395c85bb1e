"""Read pickles that differ only in small values: interpret one, then fill in the others' values.

Ranks' files differ like this: each pickle names its rank and its device. A `Hole` replaces each differing value, and
nothing can look at it. If the interpreter returns a result, it only moved the holes: the other pickles have the same
result with their own values there. In every other case a pickle is interpreted by itself.

Results share equal parts, so nothing may change them.
"""

# Opening 64 rank files of 1,200 DTensors, a row of `benchmarks/planning.py`, takes 2.6 s of CPU, and 5.0 s without this
# (medians, seven pairs). Only this reader needs it: the interpreter in `encodings` knows no holes.

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from struct import Struct
from typing import Any, NoReturn

from shardckpt.encodings.budget import ReadBudget
from shardckpt.encodings.pickle_reader import Limits, Persistent, PickleMachine, load
from shardckpt.encodings.pickle_stubs import ALLOWED, InstanceStub, Ordered, TensorStub
from shardckpt.errors import FormatError, ShardckptError

__all__ = ["PickleSeries"]

# Bytes that may differ: in any pickle, one per so many bytes, and at most. A hole costs as much as some dozen bytes.
_FEW_HOLES, _BYTES_PER_HOLE, _MAX_HOLES = 64, 64, 1 << 16

_MAX_TRIES = 6  # skeletons to make; each costs more than a pickle

# Opcodes: a one-byte integer, a text, and the mark for a hole, which no pickle has.
_ONE_BYTE, _TEXT, _HOLE = 0x4B, 0x58, 0x01

_SHORT = 16  # bytes of a text that may differ, such as the device name `cuda:3`

_FOUR_BYTES = Struct("<I").unpack_from
_DEVICE = ALLOWED.find("torch", "device")


class Hole:
    """A number that differs between pickles; looking at its value is an error."""

    __slots__ = ("read",)

    def __init__(self, read: Callable[[bytes], object]) -> None:
        self.read = read

    def _refuse(self, *_: object) -> NoReturn:
        raise TypeError("the value of this part matters")

    __len__ = __eq__ = __ne__ = __hash__ = __str__ = __repr__ = __format__ = _refuse


class TextHole(Hole):
    """A text that differs between pickles."""

    __slots__ = ()


_HOLES = frozenset({Hole, TextHole})
_NESTED = frozenset({tuple, list, dict, Ordered, set, frozenset, InstanceStub})
_NO_STORAGES = _HOLES | _NESTED | {TensorStub}


@dataclass(frozen=True, slots=True)
class _Skeleton:
    """A pickle's result with holes."""

    masked: bytes  # the pickle, with zeros in the holes
    places: frozenset[int]  # offsets that may differ
    value: object
    holes: list[Hole]
    changed: frozenset[int]  # ids of containers with holes, at any depth
    left: int  # budget before the pickle
    cost: int  # budget spent

    def fits(self, raw: bytes, budget: ReadBudget) -> bool:
        """Return True if a pickle has the same bytes outside the holes, and no smaller budget."""
        return budget.left >= self.left and len(raw) == len(self.masked) and _mask(raw, self.places) == self.masked

    def fill(self, raw: bytes) -> object:
        """Return another pickle's result; containers without holes are shared."""
        for hole in self.holes:
            hole.read(raw)  # the result may lack a malformed text
        return _Filler(raw, self.changed).fill(self.value)


class _HoleMachine(PickleMachine):
    """Interprets a pickle with holes."""

    atoms = PickleMachine.atoms | {TextHole}
    sized = (*PickleMachine.sized, TextHole)
    texts = (*PickleMachine.texts, TextHole)

    __slots__ = ("holes",)

    def __init__(
        self,
        data: bytes,
        holes: dict[int, tuple[int, Hole]],
        persistent: Persistent | None,
        limits: Limits,
        budget: ReadBudget,
    ) -> None:
        super().__init__(data, persistent, limits, budget)
        self.holes = holes

    def share(self, value: object) -> None:
        """Refuse a hole that is used again: equal integers count once."""
        if isinstance(value, Hole):
            raise _differs()
        super().share(value)

    def call(self, what: object, args: object) -> object:
        """Return the stub for a call; a device name may end with a hole."""
        if what is not _DEVICE or type(args) is not tuple or tuple(map(type, args)) != (str, Hole):
            return super().call(what, args)
        kind, index = args
        super().call(what, (kind, 0))  # which costs as much
        return TextHole(lambda raw: f"{kind}:{index.read(raw)}")


def _take_hole(machine: PickleMachine, pos: int) -> int:
    assert isinstance(machine, _HoleMachine)
    if pos not in machine.holes:
        return PickleMachine.table[_HOLE](machine, pos)
    end, hole = machine.holes.pop(pos)
    machine.stack.append(hole)
    return end


_HoleMachine.table = [_take_hole if code == _HOLE else step for code, step in enumerate(PickleMachine.table)]


def load_holes(
    data: bytes, places: Iterable[int], *, persistent: Persistent | None, limits: Limits, budget: ReadBudget
) -> tuple[object, list[Hole]]:
    """Return a pickle's object, with a `Hole` for each integer and text at `places`, and all holes."""
    marked, holes = bytearray(data), {}
    for place in places:
        start, end, hole = _find_hole(data, place)
        marked[start] = _HOLE
        holes[start + 1] = end, hole
    machine = _HoleMachine(bytes(marked), dict(holes), persistent, limits, budget)
    value = machine.run(0)
    if machine.holes:
        raise _differs()
    return value, [hole for _, hole in holes.values()]  # the object may lack some


def _find_hole(data: bytes, place: int) -> tuple[int, int, Hole]:
    """Find the one-byte integer or short text at `place`; return its start, its end and a hole."""
    # A text's bytes may look like opcodes: only the interpreter knows whether an instruction starts at `start`.
    if data[place - 1] == _ONE_BYTE:
        return place - 1, place + 1, Hole(lambda raw: raw[place])
    for start in range(max(0, place - 4 - _SHORT), place - 4):
        first, length = start + 5, _FOUR_BYTES(data, start + 1)[0]
        if data[start] == _TEXT and length <= _SHORT and place < first + length:
            return start, first + length, _text_hole(first, first + length)
    raise _differs()


def _text_hole(start: int, end: int) -> TextHole:
    return TextHole(lambda raw: raw[start:end].decode("utf-8", "surrogatepass"))


def _differs() -> FormatError:
    return FormatError("the pickles differ in more than small integers and short texts")


class PickleSeries:
    """Reads one pickle after another."""

    def __init__(self, persistent: Callable[[], Persistent], limits: Limits) -> None:
        if not limits.depth:  # results are searched recursively
            raise ValueError("limits.depth must be at least 1, got 0")
        self._persistent = persistent
        self._limits = limits
        self._skeleton: _Skeleton | None = None
        self._last = b""
        self._tries = 0

    def load(self, raw: bytes, *, where: str, budget: ReadBudget) -> object:
        """Return a pickle's object; arguments and errors as for `pickle_reader.load`."""
        if self._skeleton is None or not self._skeleton.fits(raw, budget):
            self._skeleton = self._make_skeleton(raw, budget.left)
        self._last = raw
        if self._skeleton is not None:
            try:
                value = self._skeleton.fill(raw)
            except UnicodeError:
                pass  # interpreted alone, the error has its position
            else:
                budget.left -= self._skeleton.cost
                return value
        return load(raw, where=where, persistent=self._persistent(), limits=self._limits, budget=budget)

    def _make_skeleton(self, raw: bytes, left: int) -> _Skeleton | None:
        """Return the skeleton of the last two pickles; None if they differ in more than small values."""
        if len(raw) != len(self._last) or len(raw) > self._limits.nbytes or self._tries >= _MAX_TRIES:
            return None
        most = min(_FEW_HOLES + len(raw) // _BYTES_PER_HOLE, _MAX_HOLES)
        places = frozenset(islice(_differing(raw, self._last), most + 1))
        places |= self._skeleton.places if self._skeleton else frozenset()
        if len(places) > most:
            return None
        self._tries += 1
        budget = ReadBudget(0)
        budget.left = left
        try:
            value, holes = load_holes(raw, places, persistent=self._persistent(), limits=self._limits, budget=budget)
            found: dict[int, bool] = {}
            _find_changed(value, found)
        except ShardckptError:
            return None
        changed = frozenset(key for key, differs in found.items() if differs)
        return _Skeleton(_mask(raw, places), places, value, holes, changed, left, left - budget.left)


def _differing(one: bytes, other: bytes) -> Iterator[int]:
    """Yield the offsets at which two pickles with equal length differ."""
    bits = int.from_bytes(one, "little") ^ int.from_bytes(other, "little")
    for found in re.finditer(rb"[^\0]", bits.to_bytes(len(one), "little")):
        yield found.start()


def _mask(raw: bytes, places: Iterable[int]) -> bytes:
    masked = bytearray(raw)
    for place in places:
        masked[place] = 0
    return bytes(masked)


def _find_changed(value: object, known: dict[int, bool]) -> bool:
    """Return True if a value is a hole or contains one; note it for each container. `Limits` bound the recursion."""
    kind = value.__class__
    if kind is TensorStub and value.storage.__class__ in _NO_STORAGES:  # type: ignore[attr-defined]
        raise FormatError("a tensor has no storage")
    if kind not in _NESTED:
        return kind in _HOLES
    key = id(value)
    if key not in known:
        keys, parts = _split(value)
        if any(_find_changed(part, known) for part in keys):
            raise FormatError("a key differs")
        known[key] = sum(_find_changed(part, known) for part in parts) > 0  # not any: each part is noted
    return known[key]


def _split(value: object) -> tuple[Iterable[object], Iterable[object]]:
    """Return a container's hashed content, and its other content."""
    if isinstance(value, InstanceStub):
        return (), value.parts
    if isinstance(value, Ordered):
        return value, (*value.values(), value.attributes)
    if isinstance(value, dict):
        return value, value.values()
    assert isinstance(value, tuple | list | set | frozenset)
    return ((), value) if isinstance(value, tuple | list) else (value, ())


class _Filler:
    """Copies a result, with a pickle's values in its holes."""

    def __init__(self, raw: bytes, changed: frozenset[int]) -> None:
        self._raw = raw
        self._changed = changed
        self._done: dict[int, Any] = {}

    def fill(self, value: Any) -> Any:
        """Return a value's copy."""
        key = id(value)
        if key not in self._changed:
            return value.read(self._raw) if value.__class__ in _HOLES else value
        made = self._done.get(key)
        if made is None:
            made = self._done[key] = self._copy(value)
        return made

    def _copy(self, value: Any) -> Any:
        kind, fill = value.__class__, self.fill
        if kind is InstanceStub:
            return InstanceStub(value.name, fill(value.args), fill(value.state), fill(value.items))
        if kind is dict:
            return {name: fill(part) for name, part in value.items()}
        if kind is Ordered:
            made = Ordered([(name, fill(part)) for name, part in value.items()])
            made.attributes = fill(value.attributes)
            return made
        return kind([fill(part) for part in value])
