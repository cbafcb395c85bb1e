"""Merge all ranks' LOCAL states into full tensors, without running ranks.

Each part of a shard is a tensor's box, and a piece in the rank's file. Replicas, as in hybrid sharding, and values next
to the shards must be equal: tensors are compared by checksums, or where they are read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import Any, NoReturn

from shardckpt.boxes import Box, Shape
from shardckpt.encodings.budget import gc_paused
from shardckpt.errors import FormatError, UnsupportedError
from shardckpt.layout import DimLayout, FlatLayout
from shardckpt.manifest import Manifest, Path, Piece, TensorEntry, dotted
from shardckpt.reader import ParamShapes, Reader
from shardckpt.readers.merge_shards import (
    MAX_MISSING,
    OTHER_SAVE,
    ManifestBuilder,
    PathContent,
    RankOrigin,
    Shard,
    join_entries,
    label_rank_file,
    merge_equal,
    merge_shards,
    move_rank_values,
    note_missing_ranks,
    require_one_save,
    slice_shard,
    split_content,
)
from shardckpt.readers.ranks.fsdp1_model import has_flat_parameters
from shardckpt.readers.ranks.local_state_metadata import Known, Member, RankState, RankUnit, group_units, parse
from shardckpt.readers.ranks.merge_dtensors import merge_dtensor_shards
from shardckpt.readers.ranks.rank_files import GROUPS, STATE, RankFile, parse_rank_names
from shardckpt.readers.torchsave.reader import TorchReader
from shardckpt.readers.torchsave.replicas import combine_values
from shardckpt.readers.torchsave.tensor_views import RankNote

FORMAT_NAME = "local"
_UNITS = "units"


def merge_local_states(manifest: Manifest, notes: Sequence[RankNote], url: str) -> Manifest:
    """Merge all ranks' LOCAL states into full tensors."""
    known: Known = {}
    states = [parse(note, url, known) for note in notes]
    contents, rest = split_content(manifest, {state.root for state in states})
    groups: dict[tuple[Path, bool], list[RankState]] = {}
    for state in states:
        keys = {path[0] for path in contents[state.root].paths() if path}
        groups.setdefault((state.root[len(state.prefix) :], {STATE, GROUPS} <= keys), []).append(state)
    builder = ManifestBuilder(url)
    others = _move_others(builder, rest, states)
    is_alone = len(groups) == 1 and not others.tensors and not others.objects
    for (root, is_optimizer), ranks in groups.items():
        target = root or (() if is_alone else ("optimizer",) if is_optimizer else ("model",))
        require_one_save((RankOrigin(state.file, state.rank, state.world) for state in ranks), url)
        ranks.sort(key=lambda state: state.rank)
        merger = _LocalStateMerger(builder, contents, target, ranks)
        if is_optimizer:
            merger.put_optimizer()
        else:
            merger.put_model()
        names = {state.rank: [m.name for unit in state.units for m in unit.members] for state in ranks}
        note_missing_ranks(builder, ranks[0].world, names)
    builder.add(others)
    return builder.build_manifest(manifest, FORMAT_NAME)


def _move_others(builder: ManifestBuilder, rest: PathContent, states: Sequence[RankState]) -> PathContent:
    """Return the content outside the states: other files, and values next to the states, which must be equal."""
    owners = {state.prefix: state for state in states}
    sources: dict[Path, list[tuple[int, Path]]] = {}
    for path in rest.paths():
        owner = owners.get(path[:1]) or owners.get(())
        rank, target = (-1, path) if owner is None else (owner.rank, path[len(owner.prefix) :])
        sources.setdefault(target, []).append((rank, path))
    if any(len(found) > 1 and min(found)[0] < 0 for found in sources.values()):
        raise FormatError("a file has the name of a value in the rank files", where=builder.url)
    others = PathContent()
    moved: dict[Path, Path] = {}
    for target, found in sources.items():
        paths = [path for _, path in sorted(found, key=lambda pair: pair[0])]
        moved |= dict.fromkeys(paths, target)
        entries = [rest.tensors.get(path) or rest.objects[path] for path in paths]
        merged = merge_equal(target, [str(path[0]) for path in paths], entries)
        if isinstance(merged, TensorEntry):
            others.tensors[target] = merged
        else:
            others.objects[target] = merged
    others.aliases |= {moved[a]: moved[b] for a, b in rest.aliases.items() if a in moved and b in moved}
    return others


@dataclass(frozen=True)
class _Unit:
    """A unit, with the ranks that have each part."""

    parts: Mapping[int, Sequence[RankState]]
    first: RankUnit
    world: int

    @property
    def members(self) -> tuple[Member, ...]:
        return self.first.members

    def key(self, index: int) -> str:
        """Return the name of the tensor with a member: the flat parameter's or its own."""
        return self.first.flat or self.members[index].name

    def names(self) -> list[str]:
        """Return all names that the unit's values may have in a state."""
        names = [name for member in self.members for name in (member.name, *member.aliases)]
        return [self.first.flat, *names] if self.first.flat else names

    @cached_property
    def _boxes(self) -> dict[int, dict[int, list[tuple[Box, int]]]]:
        return {place: self.first.boxes(place) for place in self.parts}

    def boxes(self, place: int, index: int) -> list[tuple[Box, int]]:
        """Return a member's boxes in one part, each with its first element in the shard."""
        return self._boxes[place].get(index, [])

    def missing(self, index: int) -> Iterator[tuple[Box, str]]:
        """Yield a member's boxes in missing ranks' parts, with the file's label."""
        parts = self.first.parts
        missing = (place for place in range(parts) if place not in self.parts) if len(self.parts) < parts else ()
        for place in islice(missing, MAX_MISSING):
            for box, _ in self.first.boxes(place).get(index, ()):
                yield box, label_rank_file(place, parts, self.world)

    def shapes(self, place: int, index: int) -> tuple[Shape, ...]:
        """Return the possible shapes for a rank's tensor; for a flat unit, 1-D first."""
        layout, shape = self.first.layout, self.members[index].shape
        if layout is None:
            return (shape,)
        if isinstance(layout, DimLayout):
            return (layout.box(index, place).size,)
        if self.first.flat:
            return ((layout.get_unpadded_size(place),),)
        flat = (sum(box.volume for box, _ in self.boxes(place, index)),)
        return (flat, shape) if layout.world == 1 else (flat,)

    def slice(self, place: int, index: int, entry: TensorEntry) -> list[Piece]:
        """Return a member's pieces in a rank's tensor."""
        boxes, layout = self.boxes(place, index), self.first.layout
        if not isinstance(layout, FlatLayout) or entry.shape != self.shapes(place, index)[0]:
            [piece] = entry.pieces
            return [piece._replace(box=box) for box, _ in boxes]
        base = boxes[0][1] if boxes and not self.first.flat else 0
        return slice_shard(entry, [(box, first - base) for box, first in boxes], layout.specs[index].order)

    def to_json(self) -> dict[str, object]:
        """Return a flat parameter's layout as JSON, with unsharded names."""
        layout = self.first.layout
        assert isinstance(layout, FlatLayout), "flat parameters have flat layouts"
        specs = tuple(
            replace(spec, name=member.name, aliases=member.aliases)
            for spec, member in zip(layout.specs, self.members, strict=True)
        )
        return {"flat": self.first.flat, "layout": replace(layout, specs=specs).to_json()}


class _LocalStateMerger:
    """Merges one state."""

    def __init__(
        self, builder: ManifestBuilder, contents: Mapping[Path, PathContent], root: Path, states: Sequence[RankState]
    ) -> None:
        self._builder, self._contents, self._root, self._states = builder, contents, root, states
        self._units: list[_Unit] = []
        for ranks in group_units(states, builder.url):
            parts: dict[int, list[RankState]] = {}
            for state, unit in ranks:
                parts.setdefault(unit.place, []).append(state)
            self._units.append(_Unit(parts, ranks[0][1], states[0].world))
        self._names = {name for unit in self._units for name in unit.names()}

    def put_model(self) -> None:
        """Add a model's parameters and buffers."""
        params: dict[str, TensorEntry] = {}
        members: dict[str, Member] = {}
        for unit in self._units:
            for index, member in enumerate(unit.members):
                entry = self._merge(unit, index, (*self._root, member.name), (unit.key(index),))
                if entry is None or entry.stored != member.dtype:
                    found = entry and entry.stored
                    self._refuse(f"{member.name!r} has another dtype than its unit", found, member.dtype)
                params[member.name], members[member.name] = entry, member
        rest = self._list_rest(lambda path: path[0] not in self._names)
        for name in self._sort_names((*params, *rest)):
            if name in params:
                self._builder.put(params[name].path, params[name])
                for alias in members[name].aliases:
                    self._builder.tie((*self._root, alias), (*self._root, name))
            for path, states in rest.get(name, {}).items():
                self._put_rest(path, states)

    def _sort_names(self, names: Iterable[str | int]) -> list[Any]:
        """Return names in the unsharded model's order."""
        order = {name: at for at, name in reversed(list(enumerate(self._states[0].names)))}
        return sorted(dict.fromkeys(names), key=lambda name: order.get(str(name), len(order)))

    def put_optimizer(self) -> None:
        """Add an optimizer's state and groups."""
        slots = self._list_slots()
        for unit in self._units:
            for index, member in enumerate(unit.members):
                for slot in slots.get(unit.key(index), ()):
                    self._put_slot(unit, index, (*self._root, STATE, member.name, *slot), slot)
        if units := [unit.to_json() for unit in self._units if unit.first.flat]:
            self._builder.put_value((*self._root, _UNITS), units)
        rest = self._list_rest(
            lambda path: path[0] != _UNITS and (path[0] != STATE or path[1:2] == () or path[1] not in self._names)
        )
        for paths in rest.values():
            for path, states in paths.items():
                self._put_rest(path, states)

    def _list_slots(self) -> dict[str, dict[Path, None]]:
        """Return the slots for each parameter or flat parameter."""
        slots: dict[str, dict[Path, None]] = {}
        for state in self._states:
            for path in self._contents[state.root].paths():
                if len(path) > 2 and path[0] == STATE and path[1] in self._names:
                    slots.setdefault(str(path[1]), {})[path[2:]] = None
        return slots

    def _put_slot(self, unit: _Unit, index: int, path: Path, slot: Path) -> None:
        """Add a member's slot: a value, a tensor sharded like it, or another."""
        source: Path = (STATE, unit.key(index), *slot)
        ranks = [(place, state, self._contents[state.root]) for place, each in unit.parts.items() for state in each]
        values = [
            (state.file, content.objects[source].value) for _, state, content in ranks if source in content.objects
        ]
        tensors = [(place, content.tensors[source]) for place, _, content in ranks if source in content.tensors]
        if values:
            self._builder.put_value(path, combine_values(path, values))
        elif any(not tensor.shape for _, tensor in tensors):
            self._builder.put(path, join_entries(path, [tensor for _, tensor in tensors]))
        elif all(tensor.shape in unit.shapes(place, index) for place, tensor in tensors):
            if (entry := self._merge(unit, index, path, source)) is not None:
                self._builder.put(path, entry)
        else:
            self._put_opaque([tensor for _, tensor in tensors], path, unit.first.parts)

    def _put_opaque(self, tensors: Sequence[TensorEntry], path: Path, parts: int) -> None:
        """Add a tensor with another shape: complete if there is one part, else unknown."""
        if parts == 1:
            self._builder.put(path, join_entries(path, tensors))
            return
        kind = "a part of a tensor that is not shaped like its parameter"
        self._builder.warnings.append(f"{dotted(path)} is {kind} and cannot be read")
        self._builder.put_unreadable(path, tensors[0], kind)

    def _merge(self, unit: _Unit, index: int, path: Path, source: Path) -> TensorEntry | None:
        """Return a member, or its slot, merged from all ranks; None if no rank has it."""
        shards: list[Shard] = []
        for place, state in ((place, state) for place, ranks in unit.parts.items() for state in ranks):
            if shards and unit.first.flat and not unit.boxes(place, index):
                continue  # most ranks have no elements of a given member of a flat parameter
            entry = self._contents[state.root].tensors.get(source)
            if entry is None:
                continue
            shapes = unit.shapes(place, index)
            if entry.shape not in shapes:
                kind = UnsupportedError if unit.first.layout is None else FormatError
                what = f"the shard of rank {state.rank} of {unit.members[index].name!r} does not fit its layout"
                self._refuse(what, entry.shape, shapes[0], kind)
            shards.append(Shard(state.file, entry.stored, unit.slice(place, index, entry)))
        if not shards:
            return None
        return merge_shards(self._builder, path, unit.members[index].shape, shards, unit.missing(index))

    # ----------------------------------------------------------------------------------------------------- rest

    def _list_rest(self, is_rest: Callable[[Path], bool]) -> dict[str | int, dict[Path, list[RankState]]]:
        """Return the paths outside units by first key, with the ranks that have each."""
        found: dict[str | int, dict[Path, list[RankState]]] = {}
        for state in self._states:
            for path in self._contents[state.root].paths():
                if path and is_rest(path):
                    found.setdefault(path[0], {}).setdefault(path, []).append(state)
        return found

    def _put_rest(self, path: Path, states: Sequence[RankState]) -> None:
        contents, target = [self._contents[state.root] for state in states], (*self._root, *path)
        firsts = {content.aliases.get(path, path) for content in contents}
        first = (*self._root, *firsts.pop())
        if not firsts and first in self._builder.tensors:
            self._builder.tie(target, first)
            return
        entries = [content.tensors.get(path) or content.objects[path] for content in contents]
        self._builder.put(target, merge_equal(path, [state.file for state in states], entries))

    def _refuse(
        self, what: str, found: object, expected: object, kind: type[FormatError | UnsupportedError] = FormatError
    ) -> NoReturn:
        fix = OTHER_SAVE if kind is FormatError else "Save it as FULL or SHARDED."
        raise kind(what, where=self._builder.url, found=found, expected=expected, fix=fix)


class MergedTorchReader(TorchReader):
    """Reads merged rank files, and can merge again after shapes become known."""

    def __init__(self, apart: TorchReader, files: Sequence[RankFile], known: ParamShapes | None = None) -> None:
        manifest = merge_dtensor_shards(apart.manifest, apart.shards, files, apart.store.url, known)
        super().__init__(apart.store, move_rank_values(apart, manifest), apart.archives)
        self._apart = apart
        self._files = files
        self._known = known

    @property
    def is_flat(self) -> bool:
        """Whether the files contain flat parameters."""
        return has_flat_parameters(self._apart.shards)

    @property
    def needs_param_shapes(self) -> bool:
        """Whether the files contain flat parameters without known shapes."""
        return self.is_flat and self._known is None

    def with_param_shapes(self, known: ParamShapes) -> Reader:
        """Return a reader with the given shapes; metadata files in the folder take precedence."""
        if self._known is not None:
            known = replace(self._known, ids=known.ids or self._known.ids)
        if not self.is_flat or not known.shapes:
            return self
        return MergedTorchReader(self._apart, self._files, known)


def merge_rank_files(reader: TorchReader, known: ParamShapes | None = None) -> TorchReader:
    """Return a reader for the merged tensors; the same reader without rank files."""
    with gc_paused():
        if reader.notes:
            merged = merge_local_states(reader.manifest, reader.notes, reader.store.url)
            return reader.with_manifest(move_rank_values(reader, merged))
        if not reader.shards:
            return reader
        names = list(reader.manifest.files)
        if len(names) == 1:
            return MergedTorchReader(reader, [RankFile(names[0], (), (), 0)], known)
        return MergedTorchReader(reader, parse_rank_names(names, {str(path[0]) for path in reader.shards}), known)
