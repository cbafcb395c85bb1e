"""Parse and check the metadata in LOCAL states: ranks, and layouts of units.

`shardckpt.state` stores it as `_metadata["shardckpt"]`; its content is not trusted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from shardckpt import dtypes
from shardckpt.boxes import Box, Shape
from shardckpt.encodings.budget import MAX_ELEMENTS, check_count, check_list, check_shape, check_text
from shardckpt.errors import FormatError, UnsupportedError
from shardckpt.layout import DimLayout, FlatLayout, Layout, from_json
from shardckpt.manifest import Path
from shardckpt.readers.merge_shards import OTHER_SAVE
from shardckpt.readers.torchsave.tensor_views import RankNote

_VERSION = 1
_MAX_RANKS = 1 << 32


@dataclass(frozen=True, slots=True)
class Member:
    """One parameter in a unit."""

    name: str  # first name in the unsharded model
    aliases: tuple[str, ...]
    shape: Shape
    dtype: str  # stored dtype


@dataclass(frozen=True, slots=True)
class RankUnit:
    """Parameters that are sharded together, and one rank's shard."""

    members: tuple[Member, ...]  # parameters in order
    layout: Layout | None  # layout over ranks; None if every rank has the full parameters
    place: int  # index of this rank in the layout
    flat: str  # name of the one tensor with all members; empty if each has its own

    @property
    def parts(self) -> int:
        """Number of parts."""
        return self.layout.world if self.layout is not None else 1

    def same_as(self, other: RankUnit) -> bool:
        """Return True if two ranks describe the same unit and layout."""
        return (self.members, self.layout, self.flat) == (other.members, other.layout, other.flat)

    def boxes(self, place: int) -> dict[int, list[tuple[Box, int]]]:
        """Return each member's boxes on a rank, with offsets in the shard."""
        found: dict[int, list[tuple[Box, int]]] = {}
        if self.layout is None:
            return {i: [(Box((0,) * len(m.shape), m.shape), 0)] for i, m in enumerate(self.members)}
        for index, box, at in self.layout.boxes(place):
            found.setdefault(index, []).append((box, at))
        return found


@dataclass(frozen=True, slots=True)
class RankState:
    """One rank's LOCAL state."""

    file: str  # file name, relative to the store
    prefix: Path
    root: Path  # full path of the state
    rank: int
    world: int
    units: tuple[RankUnit, ...]  # units of parameters
    names: tuple[str, ...]  # all names of the unsharded model in order; empty if not stored


Described = tuple[object, object, tuple[Member, ...], Layout]  # members and layout of a unit, as stored and as parsed
Known = dict[str, Described]  # cache of units by first name: most ranks describe them equally, so each is parsed once


def parse(note: RankNote, url: str, known: Known) -> RankState:
    """Parse one state's metadata."""
    where = f"{url}/{note.file}"
    try:
        return _parse_state(note, known)
    except (FormatError, UnsupportedError) as error:
        at = f"{where}, {error.where}" if error.where else where
        raise type(error)(error.what, where=at, found=error.found, expected=error.expected, fix=error.fix) from None
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError, RecursionError) as error:
        what = f"a rank's state has an unreadable layout: {type(error).__name__} {error}"
        raise FormatError(what, where=where) from None


def _parse_state(note: RankNote, known: Known) -> RankState:
    fields = note.fields
    if fields["version"] != _VERSION:
        raise UnsupportedError(
            "a rank's state has another version", found=fields["version"], expected=_VERSION, fix="Update shardckpt."
        )
    world, rank = check_count(fields["world"], _MAX_RANKS), check_count(fields["rank"], _MAX_RANKS)
    if rank >= world:
        raise FormatError("a state's rank is impossible", found=f"rank {rank}", expected=f"below {world}")
    units = tuple(_parse_unit(unit, known) for unit in check_list(fields["units"]))
    names = tuple(check_text(name) for name in check_list(fields.get("names", [])))
    return RankState(note.file, note.prefix, note.root, rank, world, units, names)


def _parse_unit(value: object, known: Known) -> RankUnit:
    if not isinstance(value, Mapping):
        raise FormatError("a unit must be a mapping", found=type(value).__name__)
    flat = value.get("flat")
    name = "" if flat is None else check_text(flat)
    if value.get("layout") is None:
        members = _parse_members(value["entries"])
        if name or len(members) != 1:
            raise FormatError("parameters are one unit, and nothing says how", found=f"{len(members)} parameters")
        return RankUnit(members, None, 0, "")
    members, layout = _parse_layout(value["entries"], value["layout"], known)
    if name and isinstance(layout, DimLayout):
        raise FormatError("a flat parameter is split by rows", found=name)
    place = check_count(value["place"], _MAX_RANKS)
    if place >= layout.world:
        raise FormatError("a unit has fewer parts than this", found=f"part {place}", expected=f"below {layout.world}")
    return RankUnit(members, layout, place, name)


def _parse_layout(entries: object, layout: object, known: Known) -> tuple[tuple[Member, ...], Layout]:
    first = check_list(entries)[:1]
    key = str(first[0].get("name")) if first and isinstance(first[0], Mapping) else ""
    if key in known and known[key][:2] == (entries, layout):
        return known[key][2:]
    members, parsed = _parse_members(entries), from_json(layout)
    _check_layout(members, parsed)
    known[key] = (entries, layout, members, parsed)
    return members, parsed


def _parse_members(entries: object) -> tuple[Member, ...]:
    return tuple(_parse_member(entry) for entry in check_list(entries))


def _check_layout(members: Sequence[Member], layout: Layout) -> None:
    if layout.world > _MAX_RANKS or (isinstance(layout, FlatLayout) and layout.alignment > MAX_ELEMENTS):
        raise FormatError("a layout is larger than any machine", found=f"{layout.world} ranks")
    if len(layout.specs) != len(members):
        raise FormatError(
            "a unit and its layout differ", found=f"{len(layout.specs)} parameters", expected=len(members)
        )
    for spec, member in zip(layout.specs, members, strict=True):
        if spec.shape != member.shape:
            raise UnsupportedError(
                f"{member.name!r} is sharded in more than one way",
                found=f"a layout of {spec.shape}",
                expected=member.shape,
                fix="Save it as FULL or SHARDED.",
            )
        if spec.dtype != member.dtype:
            raise FormatError(f"{member.name!r} has two dtypes", found=spec.dtype, expected=member.dtype)


def _parse_member(value: object) -> Member:
    if not isinstance(value, Mapping):
        raise FormatError("a parameter must be a mapping", found=type(value).__name__)
    name, dtype = check_text(value["name"]), check_text(value["dtype"])
    if not dtypes.is_known(dtype):
        raise FormatError("a parameter has an unknown dtype", where=name, found=dtype)
    aliases = tuple(check_text(alias) for alias in check_list(value.get("aliases", [])))
    return Member(name, aliases, check_shape(value["shape"], name), dtype)


def group_units(states: Iterable[RankState], where: str) -> list[list[tuple[RankState, RankUnit]]]:
    """Return each unit's ranks that have a part."""
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
                    fix=OTHER_SAVE,
                )
            group.append((state, unit))
    return list(groups.values())
