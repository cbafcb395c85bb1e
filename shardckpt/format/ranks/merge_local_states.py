"""Rank files put together: what each rank saved as it lay (LOCAL states) becomes whole tensors, without a job.

Every part of a shard is a box of the tensor it belongs to, and a piece that points into the rank's file. Where several
ranks hold the same part (hybrid sharding, replicas), the lowest one's is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from math import prod

from shardckpt.boxes import Box, Shape, strides
from shardckpt.errors import FormatError, UnsupportedError
from shardckpt.format.ranks.local_state_metadata import (
    Known,
    Member,
    RankState,
    RankUnit,
    group_units,
    order_states,
    parse,
)
from shardckpt.format.torchsave.tensor_views import RankNote, UnreadableTensor, narrow_layout
from shardckpt.layout import DimLayout, FlatLayout
from shardckpt.manifest import Lazy, Manifest, ObjectEntry, Path, Piece, TensorEntry, dotted

FORMAT_NAME = "local"
_STATE, _GROUPS, _UNITS = "state", "param_groups", "units"
_SHOWN = 64
"""Missing parts of a unit that are named one by one; beyond, elements that nobody holds say enough."""

Part = tuple[RankState, RankUnit]
Find = Callable[[RankState, str], TensorEntry | None]


def merge_local_states(manifest: Manifest, notes: Sequence[RankNote], url: str) -> Manifest:
    """Merge the LOCAL states of all ranks into full tensors.

    Args:
        manifest: The files as they are, paths starting with each file's prefix.
        notes: What the states in them say.
        url: Of the store, for messages.

    Raises:
        FormatError: The files are of different saves, a note is damaged, or a shard does not fit its layout.
        UnsupportedError: A layout that is not read.
    """
    known: Known = {}
    states = [parse(note, url, known) for note in notes]
    contents = _LocalStateContents(manifest, states)
    groups: dict[tuple[Path, bool], list[RankState]] = {}
    for state in states:
        key = (state.root[len(state.prefix) :], contents.is_optimizer(state))
        groups.setdefault(key, []).append(state)
    beside = contents.beside(url)
    made = _LocalManifestBuilder(url)
    is_alone = len(groups) == 1 and not beside.tensors and not beside.objects
    for (root, is_optimizer), group in groups.items():
        target = root or (() if is_alone else ("optimizer",) if is_optimizer else ("model",))
        ranks = order_states(group, url)
        _LocalStateMerger(contents, made, target, ranks).join(is_optimizer)
        made.note_missing(ranks)
    made.add(beside)
    return replace(
        manifest,
        format=FORMAT_NAME,
        files={**manifest.files, **made.absent},
        tensors=made.tensors,
        objects=made.objects,
        aliases=made.aliases,
        warnings=(*manifest.warnings, *beside.warnings, *made.warnings),
        missing=(*manifest.missing, *made.missing),
    )


@dataclass(slots=True)
class _Beside:
    """What rank files hold beside their states: that of the lowest rank, and whatever other files hold."""

    tensors: dict[Path, TensorEntry] = field(default_factory=dict)
    objects: dict[Path, ObjectEntry] = field(default_factory=dict)
    aliases: dict[Path, Path] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()


class _LocalStateContents:
    """The content of each rank's state, and everything else.

    Args:
        manifest: The files as they are.
        states: The states in them.
    """

    def __init__(self, manifest: Manifest, states: Sequence[RankState]) -> None:
        self._manifest = manifest
        self._states = states
        self._roots = {state.root for state in states}
        self._depths = sorted({len(root) for root in self._roots})
        self.tensors: dict[Path, dict[Path, TensorEntry]] = {root: {} for root in self._roots}
        self.objects: dict[Path, dict[Path, ObjectEntry]] = {root: {} for root in self._roots}
        for path, tensor in manifest.tensors.items():
            if (root := self._find_root(path)) is not None:
                self.tensors[root][path[len(root) :]] = tensor
        for path, value in manifest.objects.items():
            if (root := self._find_root(path)) is not None:
                self.objects[root][path[len(root) :]] = value

    def _find_root(self, path: Path) -> Path | None:
        return next((path[:n] for n in self._depths if path[:n] in self._roots), None)

    def is_optimizer(self, state: RankState) -> bool:
        """Return True if a state is an optimizer's."""
        held = (*self.tensors[state.root], *self.objects[state.root])
        return {_STATE, _GROUPS} <= {path[0] for path in held if path}

    def alias(self, path: Path) -> Path:
        """Return the first path of the same elements in the same file."""
        return self._manifest.aliases.get(path, path)

    def beside(self, url: str) -> _Beside:
        """Return what lies outside of the states."""
        lowest = min(self._states, key=lambda state: state.rank)
        prefixes = {state.prefix: state for state in self._states}
        moved: dict[Path, Path] = {}
        left_out = False
        for path in (*self._manifest.tensors, *self._manifest.objects):
            if self._find_root(path) is not None:
                continue
            owner = prefixes.get(path[:1]) or prefixes.get(())
            if owner is None:
                moved[path] = path
            elif owner.rank == lowest.rank:
                moved[path] = path[len(owner.prefix) :]
            else:
                left_out = True
        if len(set(moved.values())) < len(moved):
            raise FormatError("a file has the name of a value in the rank files", where=url)
        warning = f"what lies beside the states is that of rank {lowest.rank}; the other ranks' own is left out"
        manifest = self._manifest
        return _Beside(
            {q: manifest.tensors[p]._replace(path=q) for p, q in moved.items() if p in manifest.tensors},
            {q: replace(manifest.objects[p], path=q) for p, q in moved.items() if p in manifest.objects},
            {moved[a]: moved[b] for a, b in manifest.aliases.items() if a in moved and b in moved},
            (warning,) if left_out else (),
        )


class _LocalManifestBuilder:
    """Collects the merged tensors and values.

    Args:
        url: Of the store, for messages.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.tensors: dict[Path, TensorEntry] = {}
        self.objects: dict[Path, ObjectEntry] = {}
        self.aliases: dict[Path, Path] = {}
        self.absent: dict[str, int] = {}
        self.warnings: list[str] = []
        self.missing: list[str] = []

    def put(self, entry: TensorEntry) -> None:
        """Add a tensor.

        Raises:
            FormatError: There is one of this path.
        """
        if entry.path in self.tensors:
            raise FormatError(f"{dotted(entry.path)!r} is in two places", where=self.url)
        self.tensors[entry.path] = entry

    def put_object(self, entry: ObjectEntry) -> None:
        """Add a value."""
        self.objects[entry.path] = entry

    def tie(self, name: Path, first: Path) -> None:
        """Add another name of a tensor."""
        entry = self.tensors[first]
        if name not in self.tensors:
            self.tensors[name] = entry._replace(path=name)
            self.aliases[name] = first

    def note_missing_file(self, label: str) -> str:
        """Note that a rank's file is not there; return its name."""
        self.absent[label] = -1
        return label

    def add(self, beside: _Beside) -> None:
        """Add what lies beside the states."""
        for entry in beside.tensors.values():
            self.put(entry)
        self.objects |= beside.objects
        self.aliases |= beside.aliases

    def note_missing(self, states: Sequence[RankState]) -> None:
        """Say which ranks are not there; nobody can tell what they held where ranks hold different parameters."""
        world = states[0].world
        if len(states) == world:
            return
        present = {state.rank for state in states}
        first = next(rank for rank in range(world) if rank not in present)
        more = f" and {world - len(states) - 1} more" if world - len(states) > 1 else ""
        self.warnings.append(f"of {world} ranks, rank {first}{more} left no file here")
        names = {tuple(m.name for unit in state.units for m in unit.members) for state in states}
        if len(names) > 1:
            self.missing.append(f"that of rank {first} of {world}")


class _LocalStateMerger:
    """Merges one state.

    Args:
        contents: What the files hold.
        made: Where whole tensors go.
        root: Path of the state in the result.
        states: Its ranks' states, in their order.
    """

    def __init__(
        self, contents: _LocalStateContents, made: _LocalManifestBuilder, root: Path, states: Sequence[RankState]
    ) -> None:
        self._contents, self._made, self._root, self._states = contents, made, root, states
        self._units = group_units(states, made.url)
        self._known_boxes: dict[tuple[int, int], dict[int, list[tuple[Box, int]]]] = {}

    def join(self, is_optimizer: bool) -> None:
        """Add everything of the state."""
        if is_optimizer:
            self._join_optimizer()
        else:
            self._join_model()

    # --------------------------------------------------------------------------------------------------- models

    def _join_model(self) -> None:
        whole: dict[str, TensorEntry] = {}
        members: dict[str, Member] = {}
        for parts in self._units:
            for index, member in enumerate(parts[0][1].members):
                members[member.name] = member
                entry = self._tensor(parts, index, (*self._root, member.name), self._parameter)
                if entry is None or entry.stored != member.dtype:
                    self._refuse(f"{member.name!r} is not as the unit says", entry and entry.stored, member.dtype)
                else:
                    whole[member.name] = entry
        known = {name for parts in self._units for name in _names(parts[0][1])}
        rest = self._rest(lambda path: path[0] not in known)
        for name in self._order(whole, rest):
            if name in whole:
                self._made.put(whole[name])
                for alias in members[name].aliases:
                    self._made.tie((*self._root, alias), (*self._root, name))
            for path in rest.get(name, ()):
                self._put_rest(*path)

    def _order(self, whole: Iterable[str], rest: Iterable[str | int]) -> list[str | int]:
        """Return names in the order of the unsharded model."""
        place = {name: at for at, name in reversed(list(enumerate(self._states[0].names)))}
        names: dict[str | int, None] = dict.fromkeys((*whole, *rest))
        return sorted(names, key=lambda name: place.get(str(name), len(place)))

    def _parameter(self, state: RankState, key: str) -> TensorEntry | None:
        return self._contents.tensors[state.root].get((key,))

    # ----------------------------------------------------------------------------------------------- optimizers

    def _join_optimizer(self) -> None:
        known = {name for parts in self._units for name in _names(parts[0][1])}
        slots = self._slots(known)
        for parts in self._units:
            for index, member in enumerate(parts[0][1].members):
                for slot in slots.get(_key(parts[0][1], index), ()):
                    self._put_slot(parts, index, (*self._root, _STATE, member.name, *slot), slot)
        if units := [_unit_json(parts[0][1]) for parts in self._units if parts[0][1].flat]:
            self._made.put_object(ObjectEntry((*self._root, _UNITS), units))
        rest = self._rest(
            lambda path: path[0] != _UNITS and (path[0] != _STATE or path[1:2] == () or path[1] not in known)
        )
        for paths in rest.values():
            for path in paths:
                self._put_rest(*path)

    def _slots(self, known: set[str]) -> dict[str, dict[Path, None]]:
        """Return what ranks keep of each parameter or flat parameter."""
        found: dict[str, dict[Path, None]] = {}
        for state in self._states:
            for path in (*self._contents.tensors[state.root], *self._contents.objects[state.root]):
                if len(path) > 2 and path[0] == _STATE and path[1] in known:
                    found.setdefault(str(path[1]), {})[path[2:]] = None
        return found

    def _put_slot(self, parts: Sequence[Part], index: int, path: Path, slot: Path) -> None:
        def find(state: RankState, key: str) -> TensorEntry | None:
            return self._contents.tensors[state.root].get((_STATE, key, *slot))

        key = _key(parts[0][1], index)
        values = [self._contents.objects[s.root].get((_STATE, key, *slot)) for s, _ in parts]
        value = next((value for value in values if value is not None), None)
        if value is not None:
            self._made.put_object(replace(value, path=path))
            return
        tensors = [(state, tensor) for state, _ in parts if (tensor := find(state, key)) is not None]
        scalar = next((tensor for _, tensor in tensors if not tensor.shape), None)
        if scalar is not None:
            self._made.put(scalar._replace(path=path))
        elif tensors and not self._is_shaped(parts, index, tensors):
            self._put_opaque(tensors, path, parts[0][1].parts)
        elif (entry := self._tensor(parts, index, path, find)) is not None:
            self._made.put(entry)

    def _is_shaped(self, parts: Sequence[Part], index: int, tensors: Sequence[tuple[RankState, TensorEntry]]) -> bool:
        """Return True if a value of the optimizer's is sharded as its parameter: on one rank it may be chance."""
        units = {state.rank: unit for state, unit in parts}
        return all(tensor.shape in self._forms(units[state.rank], index) for state, tensor in tensors)

    def _put_opaque(self, tensors: Sequence[tuple[RankState, TensorEntry]], path: Path, parts: int) -> None:
        """Add a value of a shape of its own: whole where there is one part, otherwise nobody knows how it is cut."""
        tensor = tensors[0][1]
        if parts > 1:
            kind = "a part of something that is not shaped like its parameter"
            self._made.warnings.append(f"{dotted(path)} is {kind} and cannot be read")
            piece = tensor.pieces[0]
            tensor = tensor._replace(pieces=(piece._replace(layout=Lazy(0, 0, UnreadableTensor(path, kind))),))
        self._made.put(tensor._replace(path=path))

    # -------------------------------------------------------------------------------------------------- tensors

    def _tensor(self, parts: Sequence[Part], index: int, path: Path, find: Find) -> TensorEntry | None:
        """Return the whole of one member, from the parts of all ranks; None where none has any."""
        by_place: dict[int, Part] = {}
        for state, unit in parts:
            by_place.setdefault(unit.place, (state, unit))
        pieces: list[Piece] = []
        stored = ""
        for state, unit in by_place.values():
            if stored and unit.flat and not self._boxes(unit, unit.place, index):
                continue  # most ranks have nothing of a member of a flat parameter
            tensor = find(state, _key(unit, index))
            if tensor is None:
                continue
            if stored not in ("", tensor.stored):
                self._refuse(f"{dotted(path)!r} has a type of its own on rank {state.rank}", tensor.stored, stored)
            stored = tensor.stored
            pieces += self._pieces(state, unit, index, tensor)
        if not stored:
            return None
        first = parts[0][1]
        pieces += self._absent(first, index, by_place, path, parts[0][0].world)
        return TensorEntry(path, first.members[index].shape, stored, tuple(pieces))

    def _pieces(self, state: RankState, unit: RankUnit, index: int, tensor: TensorEntry) -> Iterator[Piece]:
        forms = self._forms(unit, index)
        if tensor.shape not in forms:
            self._refuse(
                f"what rank {state.rank} holds of {unit.members[index].name!r} does not fit its layout",
                tensor.shape,
                forms[0],
                UnsupportedError if unit.layout is None else FormatError,
            )
        [piece] = tensor.pieces
        boxes = self._boxes(unit, unit.place, index)
        if isinstance(unit.layout, FlatLayout) and tensor.shape == forms[0]:
            base = boxes[0][1] if boxes and not unit.flat else 0
            order = unit.layout.specs[index].order
            assert isinstance(piece.layout, Lazy), "files of torch.save are opened lazily"
            for box, at in boxes:
                yield piece._replace(box=box, layout=narrow_layout(piece.layout, at - base, _steps(box, order)))
        else:
            for box, _ in boxes:
                yield piece._replace(box=box)

    def _boxes(self, unit: RankUnit, place: int, index: int) -> list[tuple[Box, int]]:
        """Return a member's boxes in one part of a unit, and where in it each begins."""
        key = (id(unit), place)
        if key not in self._known_boxes:
            self._known_boxes[key] = unit.boxes(place)
        return self._known_boxes[key].get(index, [])

    def _forms(self, unit: RankUnit, index: int) -> tuple[Shape, ...]:
        """Return the shapes that a rank's tensor of a member may have, the laid out one first."""
        layout, shape = unit.layout, unit.members[index].shape
        if layout is None:
            return (shape,)
        if isinstance(layout, DimLayout):
            return (layout.box(index, unit.place).size,)
        if unit.flat:
            return ((layout.get_unpadded_size(unit.place),),)
        laid = (sum(box.volume for box, _ in self._boxes(unit, unit.place, index)),)
        return (laid, shape) if layout.world == 1 else (laid,)

    def _absent(
        self, unit: RankUnit, index: int, places: Mapping[int, Part], path: Path, world: int
    ) -> Iterator[Piece]:
        """Yield pieces for the parts that no rank left: reading them says whose file is missing."""
        gone = (place for place in range(unit.parts) if place not in places) if len(places) < unit.parts else iter(())
        for place in islice(gone, _SHOWN):
            label = f"the file of rank {place}" if unit.parts == world else f"a file with part {place} of {unit.parts}"
            for box, _ in self._boxes(unit, place, index):
                layout = Lazy(0, 0, UnreadableTensor(path, f"partly in {label}, which is missing"))
                yield Piece(box, self._made.note_missing_file(label), layout)

    # ----------------------------------------------------------------------------------------------------- rest

    def _rest(self, is_rest: Callable[[Path], bool]) -> dict[str | int, list[tuple[RankState, Path]]]:
        """Return what is in no unit, by its first name: buffers, groups; of the lowest rank that has it."""
        found: dict[str | int, list[tuple[RankState, Path]]] = {}
        for state in self._states:
            mine: dict[str | int, list[tuple[RankState, Path]]] = {}
            for path in (*self._contents.tensors[state.root], *self._contents.objects[state.root]):
                if path and is_rest(path):
                    mine.setdefault(path[0], []).append((state, path))
            found = {**mine, **found}
        return found

    def _put_rest(self, state: RankState, path: Path) -> None:
        tensor = self._contents.tensors[state.root].get(path)
        if tensor is None:
            value = self._contents.objects[state.root][path]
            self._made.put_object(replace(value, path=(*self._root, *path)))
            return
        first = self._contents.alias((*state.root, *path))
        target = (*self._root, *first[len(state.root) :])
        if first[: len(state.root)] == state.root and target in self._made.tensors:
            self._made.tie((*self._root, *path), target)
        else:
            self._made.put(tensor._replace(path=(*self._root, *path)))

    def _refuse(
        self, what: str, found: object, expected: object, kind: type[FormatError | UnsupportedError] = FormatError
    ) -> None:
        raise kind(
            what,
            where=self._made.url,
            found=found,
            expected=expected,
            fix="The files are not of one save, or one is damaged."
            if kind is FormatError
            else "Save it as FULL or SHARDED.",
        )


def _names(unit: RankUnit) -> list[str]:
    """Return every name that a unit's values may have in a state."""
    own = [name for member in unit.members for name in (member.name, *member.aliases)]
    return [unit.flat, *own] if unit.flat else own


def _unit_json(unit: RankUnit) -> dict[str, object]:
    """Return what lies in a flat parameter, by names of the unsharded model, as plain JSON values."""
    assert isinstance(unit.layout, FlatLayout), "flat parameters are laid out flat"
    specs = tuple(
        replace(spec, name=member.name, aliases=member.aliases)
        for spec, member in zip(unit.layout.specs, unit.members, strict=True)
    )
    return {"flat": unit.flat, "layout": replace(unit.layout, specs=specs).to_json()}


def _key(unit: RankUnit, index: int) -> str:
    return unit.flat or unit.members[index].name


def _steps(box: Box, order: Sequence[int]) -> Shape | None:
    """Return the strides of a box whose elements lie in another order; None for row-major."""
    if not order or prod(box.size) < 2:
        return None
    steps = strides(tuple(box.size[dim] for dim in order))
    place = {dim: at for at, dim in enumerate(order)}
    return tuple(steps[place[dim]] for dim in range(len(order)))
