"""What LOCAL states say of themselves, checked: which rank of how many, and how each unit is laid out over ranks.

The notes are those that `shardckpt.state` writes into `_metadata["shardckpt"]`; nothing in them is trusted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

from shardckpt import dtypes
from shardckpt.boxes import Box, Shape
from shardckpt.errors import FormatError, UnsupportedError
from shardckpt.format.torchsave.tensor_views import RankNote
from shardckpt.layout import DimLayout, FlatLayout, Layout, from_json
from shardckpt.manifest import Path

_VERSION = 1
_MOST_DIMENSIONS = 64
_MOST_ELEMENTS = 1 << 60
_MOST_RANKS = 1 << 32


@dataclass(frozen=True, slots=True)
class Member:
    """One parameter of a unit.

    Attributes:
        name: Its first name in the unsharded model.
        aliases: Its other names.
        shape: Full shape, in elements.
        dtype: Stored type.
    """

    name: str
    aliases: tuple[str, ...]
    shape: Shape
    dtype: str


@dataclass(frozen=True, slots=True)
class RankUnit:
    """Parameters that are sharded together, and one rank's part in it.

    Attributes:
        members: The parameters, in order.
        layout: How they lie over ranks; None where every rank has them whole.
        place: Which of the layout's ranks this one is.
        flat: Name of the one tensor that holds all of them; empty where each has its own.
    """

    members: tuple[Member, ...]
    layout: Layout | None
    place: int
    flat: str

    @property
    def parts(self) -> int:
        """In how many parts the unit is cut."""
        return self.layout.world if self.layout is not None else 1

    def same_as(self, other: RankUnit) -> bool:
        """Return True if two ranks speak of the same unit, laid out alike."""
        return (self.members, self.layout, self.flat) == (other.members, other.layout, other.flat)

    def boxes(self, place: int) -> dict[int, list[tuple[Box, int]]]:
        """Return, for each member of which a rank holds something, its boxes and where each begins in the shard."""
        found: dict[int, list[tuple[Box, int]]] = {}
        if self.layout is None:
            return {i: [(Box((0,) * len(m.shape), m.shape), 0)] for i, m in enumerate(self.members)}
        for index, box, at in self.layout.boxes(place):
            found.setdefault(index, []).append((box, at))
        return found


@dataclass(frozen=True, slots=True)
class RankState:
    """A state that one rank saved.

    Attributes:
        file: The file it stands in, relative to the store.
        prefix: What the paths of that file start with.
        root: Path of the state, from the top.
        rank: Whose it is.
        world: Of how many ranks.
        units: What it says of the parameters.
        names: Every name of the unsharded model, in its order; empty where it does not tell.
    """

    file: str
    prefix: Path
    root: Path
    rank: int
    world: int
    units: tuple[RankUnit, ...]
    names: tuple[str, ...]


Described = tuple[object, object, tuple[Member, ...], Layout]
"""A unit's members and layout, as they stand in a note and as they were read."""

Known = dict[str, Described]
"""Units by their first name: ranks describe most of them alike, and each needs to be read once."""


def parse(note: RankNote, url: str, known: Known) -> RankState:
    """Return what a note says.

    Args:
        note: As it was found.
        url: Of the store, for messages.
        known: Units that other notes described; more are added.

    Raises:
        FormatError: It is no such note, or it contradicts itself.
        UnsupportedError: It is of a later version, or describes a layout that is not read.
    """
    where = f"{url}/{note.file}"
    try:
        return _state(note, known)
    except (FormatError, UnsupportedError) as error:
        at = f"{where}, {error.where}" if error.where else where
        raise type(error)(error.what, where=at, found=error.found, expected=error.expected, fix=error.fix) from None
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError, RecursionError) as error:
        what = f"what a rank's state says of its layout cannot be read: {type(error).__name__} {error}"
        raise FormatError(what, where=where) from None


def _state(note: RankNote, known: Known) -> RankState:
    said = note.said
    if said["version"] != _VERSION:
        raise UnsupportedError(
            "a rank's state is of another version", found=said["version"], expected=_VERSION, fix="Update shardckpt."
        )
    world, rank = _whole_number(said["world"], _MOST_RANKS), _whole_number(said["rank"], _MOST_RANKS)
    if rank >= world:
        raise FormatError("a state is of a rank that cannot be", found=f"rank {rank}", expected=f"below {world}")
    units = tuple(_unit(each, known) for each in _list(said["units"]))
    names = tuple(_text(name) for name in _list(said.get("names", [])))
    return RankState(note.file, note.prefix, note.root, rank, world, units, names)


def _unit(said: object, known: Known) -> RankUnit:
    if not isinstance(said, Mapping):
        raise FormatError("a unit is no mapping", found=type(said).__name__)
    flat = said.get("flat")
    name = "" if flat is None else _text(flat)
    if said.get("layout") is None:
        members = _members(said["entries"])
        if name or len(members) != 1:
            raise FormatError("parameters lie together and nothing says how", found=f"{len(members)} parameters")
        return RankUnit(members, None, 0, "")
    members, layout = _parse_layout(said["entries"], said["layout"], known)
    if name and isinstance(layout, DimLayout):
        raise FormatError("a flat parameter is cut by rows", found=name)
    place = _whole_number(said["place"], _MOST_RANKS)
    if place >= layout.world:
        raise FormatError("a unit has fewer parts than this", found=f"part {place}", expected=f"below {layout.world}")
    return RankUnit(members, layout, place, name)


def _parse_layout(entries: object, layout: object, known: Known) -> tuple[tuple[Member, ...], Layout]:
    first = _list(entries)[:1]
    key = str(first[0].get("name")) if first and isinstance(first[0], Mapping) else ""
    if key in known and known[key][:2] == (entries, layout):
        return known[key][2:]
    members, made = _members(entries), from_json(layout)
    _check_layout(members, made)
    known[key] = (entries, layout, members, made)
    return members, made


def _members(entries: object) -> tuple[Member, ...]:
    return tuple(_member(each) for each in _list(entries))


def _check_layout(members: Sequence[Member], layout: Layout) -> None:
    if layout.world > _MOST_RANKS or (isinstance(layout, FlatLayout) and layout.alignment > _MOST_ELEMENTS):
        raise FormatError("a layout is larger than any machine", found=f"{layout.world} ranks")
    if len(layout.specs) != len(members):
        raise FormatError(
            "a unit and its layout differ", found=f"{len(layout.specs)} parameters", expected=len(members)
        )
    for spec, member in zip(layout.specs, members, strict=True):
        if spec.shape != member.shape:
            raise UnsupportedError(
                f"{member.name!r} is cut by more than one kind of sharding",
                found=f"a layout of {spec.shape}",
                expected=member.shape,
                fix="Save it as FULL or SHARDED.",
            )
        if spec.dtype != member.dtype:
            raise FormatError(f"{member.name!r} has two types", found=spec.dtype, expected=member.dtype)


def _member(said: object) -> Member:
    if not isinstance(said, Mapping):
        raise FormatError("a parameter is no mapping", found=type(said).__name__)
    name, dtype = _text(said["name"]), _text(said["dtype"])
    shape = tuple(_whole_number(n, _MOST_ELEMENTS) for n in _list(said["shape"]))
    if not dtypes.is_known(dtype):
        raise FormatError("a parameter has a dtype that is not known", where=name, found=dtype)
    if len(shape) > _MOST_DIMENSIONS or prod(shape) > _MOST_ELEMENTS:
        raise FormatError("a parameter is larger than any machine holds", where=name, found=shape)
    return Member(name, tuple(_text(each) for each in _list(said.get("aliases", []))), shape, dtype)


def order_states(states: Iterable[RankState], where: str) -> list[RankState]:
    """Return the states of one save in rank order.

    Raises:
        FormatError: They are not of one save: other numbers of ranks, or one rank twice.
    """
    ordered = sorted(states, key=lambda state: state.rank)
    for one, other in pairwise(ordered):
        odd = (
            f"{one.world} ranks in {one.file} and {other.world} in {other.file}"
            if one.world != other.world
            else f"rank {one.rank} in {one.file} and in {other.file}"
            if one.rank == other.rank
            else ""
        )
        if odd:
            raise FormatError(
                "rank files of different saves lie in one folder",
                where=where,
                found=odd,
                fix="Keep the files of one save, and nothing else, in a folder of their own.",
            )
    return ordered


def group_units(states: Iterable[RankState], where: str) -> list[list[tuple[RankState, RankUnit]]]:
    """Return the ranks that have a part of each unit.

    Raises:
        FormatError: Two ranks describe a unit differently, or a name is in two units.
    """
    groups: dict[tuple[str, ...], list[tuple[RankState, RankUnit]]] = {}
    owner: dict[str, tuple[str, ...]] = {}
    for state in states:
        for unit in state.units:
            key = tuple(member.name for member in unit.members)
            group = groups.setdefault(key, [])
            twice = next((name for name in key if owner.setdefault(name, key) != key), None)
            is_other = bool(group) and not group[0][1].same_as(unit)
            if twice is not None or is_other or (group and group[-1][0] is state) or len(set(key)) < len(key):
                raise FormatError(
                    f"ranks describe the unit of {twice or next(iter(key), '')!r} in different ways",
                    where=f"{where}/{state.file}",
                    fix="The files are not of one save, or one is damaged.",
                )
            group.append((state, unit))
    return list(groups.values())


def _whole_number(value: object, most: int) -> int:
    if type(value) is not int or not 0 <= value <= most:
        raise FormatError("a number is not whole, negative or too large", found=value)
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise FormatError("a name is no text", found=value)
    return value


def _list(value: object) -> Sequence[object]:
    if not isinstance(value, list | tuple):
        raise FormatError("this should be a list", found=type(value).__name__)
    return value
