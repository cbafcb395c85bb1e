"""An optimizer over flat parameters of torch's FSDP1: each rank's moments of flat shards, by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from shardckpt.errors import FormatError
from shardckpt.format.ranks.fsdp1_flat_param import Fragments
from shardckpt.format.ranks.fsdp1_model import GIVE_SHAPES, FlatModel
from shardckpt.format.ranks.rank_files import GROUPS, STATE, ManifestBuilder, RankContent, RankGroup
from shardckpt.format.reader import ParamShapes
from shardckpt.format.torchsave.tensor_views import UnreadableTensor
from shardckpt.manifest import Lazy, ObjectEntry, Path, dotted
from shardckpt.parameter_names import BY_ORDER, GIVE_NAMES, match_by_kind, match_in_order, strip_wrappers

UNITS = "units"


class FlatOptimizer:
    """An optimizer whose ranks hold moments of flat shards, under numbers.

    Args:
        group: Its files.
        root: Where in them it is.
        model: The flat parameters.
        made: Where whole arrays go.
        known: Names of numbers, where they are told.
    """

    def __init__(
        self, group: RankGroup, root: Path, model: FlatModel, made: ManifestBuilder, known: ParamShapes | None
    ) -> None:
        self._group, self._root, self._model, self._made, self._known = group, root, model, made, known
        self._state = (*root, STATE)
        self._slots: dict[str | int, dict[Path, list[RankContent]]] = {}
        n = len(self._state)
        for path, holders in group.paths().items():
            if path[:n] == self._state and len(path) >= n + 2:
                self._slots.setdefault(path[n], {})[path[n + 1 :]] = holders

    def put(self) -> set[Path]:
        """Add the state of every parameter by name, and the groups; return the paths that were taken care of."""
        if any(path[: len(self._root)] == self._root for c in self._group.ranks for path in c.shares):
            return set()  # sharded states tell their own layouts
        names = self._names()
        taken: set[Path] = set()
        for key, slots in self._slots.items():
            for slot, holders in slots.items():
                path = (*self._state, key, *slot)
                taken.add(path)
                self._put_slot(path, names.get(key), slot, holders)
        groups = [path for path in self._group.paths() if path[: len(self._root) + 1] == (*self._root, GROUPS)]
        for path in groups:
            if self._put_groups(path, names):
                taken.add(path)
        self._put_units(names)
        return taken

    def _names(self) -> dict[str | int, str]:
        """Return what each key of the state, and of the groups, stands for: a unit, a member, another parameter."""
        lists = self._id_lists()
        offered = self._model.candidates()
        known = {name for name, _ in offered}
        found: dict[str | int, str] = {k: strip_wrappers(k) for k in self._slots if isinstance(k, str)}
        told = self._known_names(lists, known)
        if told:
            return {**found, **told}
        match = self._match(lists, offered)
        if match is None:
            if self._known is not None and any(lists):
                self._made.warnings.append(
                    f"the numbers of {self._title} fit the parameters in no way, or in several. {GIVE_NAMES}"
                )
            return {}
        numbers = [number for ids in lists for number in ids]
        return {**found, **dict(zip(numbers, match, strict=True))}

    @property
    def _title(self) -> str:
        return dotted((*self._group.root, *self._root)) or "the optimizer"

    def _match(self, lists: Sequence[Sequence[int]], offered: Sequence[tuple[str, object]]) -> list[str] | None:
        """Return a name for each number: by how its state lies where that decides, else in the order of the model."""
        wanted = [[self._signature(number) for number in ids] for ids in lists]
        every = [kind for kinds in wanted for kind in kinds]
        match = match_by_kind(every, offered)
        if match is not None:
            return match
        in_order = match_in_order(wanted, offered)
        if in_order is None:
            # A buffer as long as a chunk may look like a unit.
            units = [(name, how) for name, how in offered if name in self._model.units]
            in_order = match_in_order(wanted, units) if len(units) == len(every) else None
        if in_order is None:
            return None
        self._made.warnings.append(f"{self._title}: {BY_ORDER}")
        self._made.by_order.add((*self._group.root, *self._root))
        return [name for names in in_order for name in names]

    def _id_lists(self) -> list[list[int]]:
        lists = []
        for _, params in self._params():
            lists.append([p for p in params if type(p) is int])
        return lists

    def _params(self) -> Iterator[tuple[Path, Sequence[object]]]:
        """Yield the `params` of each group, and the path of the value they stand in."""
        n = len(self._root) + 1
        lowest = self._group.ranks[0]
        for path, value in lowest.objects.items():
            if path[:n] != (*self._root, GROUPS):
                continue
            if len(path) == n and isinstance(value.value, list | tuple):
                for group in value.value:
                    params = group.get("params") if isinstance(group, dict) else None
                    yield path, params if isinstance(params, list | tuple) else ()
            elif path[-1] == "params" and isinstance(value.value, list | tuple):
                yield path, value.value

    def _known_names(self, lists: Sequence[Sequence[int]], known: set[str]) -> dict[str | int, str]:
        """Return the names that the caller, or the groups themselves, give the numbers."""
        given = dict(self._known.ids) if self._known else {}
        if not given:
            for path, value in self._group.ranks[0].objects.items():
                groups = value.value if path == (*self._root, GROUPS) else ()
                for group in groups if isinstance(groups, list | tuple) else ():
                    told = group if isinstance(group, dict) else {}
                    params, stored = told.get("params"), told.get("param_names")
                    if isinstance(params, list) and isinstance(stored, list) and len(params) == len(stored):
                        pairs = zip(params, stored, strict=True)
                        given |= {p: n for p, n in pairs if type(p) is int and isinstance(n, str)}
        units = {spec.name: unit.name for unit in self._model.units.values() for spec in unit.members}
        made: dict[str | int, str] = {}
        for number in (number for ids in lists for number in ids):
            name = strip_wrappers(given.get(number, ""))
            if name not in known:
                name = units.get(name, "")
            if name not in known:
                return {}
            made[number] = name
        return made

    def _signature(self, key: int) -> object:
        """Return how the state of a number lies over the places; None where it has no array that tells."""
        for slot, holders in self._slots.get(key, {}).items():
            path = (*self._state, key, *slot)
            entries = {c.rank: c.tensors[path] for c in holders if path in c.tensors}
            shapes = {entry.shape for entry in entries.values()}
            if not entries or () in shapes:
                continue
            if any(len(shape) != 1 for shape in shapes):
                return "whole", next(iter(shapes))
            places: dict[int, int] = {}
            for rank, place in self._model.places.items():
                if rank in entries:
                    places.setdefault(place, entries[rank].shape[0])
            return "flat", self._pad_lengths({place: places.get(place, 0) for place in self._model.places.values()})
        return None

    def _pad_lengths(self, lengths: Mapping[int, int]) -> tuple[int, ...]:
        """Return how long the ranks' arrays are, with the padding that some writers leave out."""
        found = tuple(lengths[place] for place in sorted(lengths))
        for unit in self._model.units.values():
            if found == tuple(unit.count_elements(place) for place in sorted(lengths)):
                return (unit.chunk,) * len(found)
        return found

    def _put_slot(self, path: Path, name: str | None, slot: Path, holders: Sequence[RankContent]) -> None:
        below = (*self._group.root, *self._state)
        unit = self._model.units.get(name or "")
        members = [spec.name for spec in unit.members] if unit else [name] if name else []
        entries = {c.rank: (c, c.tensors[path]) for c in holders if path in c.tensors}
        if not members or not entries:
            self._put_as_it_is(path, members, slot, holders)
            return
        first = next(iter(entries.values()))[1]
        if not first.shape or (unit is None and name not in self._model.fragments):
            for member in members:
                self._made.put(first._replace(path=(*below, member, *slot)))
            return
        home = unit or self._model.find_unit(name or "")
        assert home is not None, "fragments lie in a unit"
        parts: Fragments = {}
        for rank, pair in entries.items():
            if (place := self._model.places.get(rank)) is not None:
                parts.setdefault(place, pair)
        for place, (owner, entry) in parts.items():
            expected = home.chunk if unit else self._model.fragments[str(name)][place][1].shape[0]
            if entry.shape != (expected,) and not (unit and entry.shape == (unit.count_elements(place),)):
                raise FormatError(
                    f"what rank {owner.rank} holds of {dotted(path)!r} does not fit {name!r}",
                    where=f"{self._made.url}/{owner.file}",
                    found=entry.shape,
                    expected=(expected,),
                )
        if unit:
            for entry in unit.split_members(self._made, parts, below, slot).values():
                self._made.put(entry)
        else:
            self._made.put(home.member(self._made, str(name), parts, (*below, str(name), *slot)))

    def _put_as_it_is(self, path: Path, members: Sequence[str], slot: Path, holders: Sequence[RankContent]) -> None:
        """Add a value for every member, or an array that nothing gives a name to."""
        below = (*self._group.root, *self._state)
        entry, value = holders[0].tensors.get(path), holders[0].objects.get(path)
        if value is not None:
            targets = [(*below, member, *slot) for member in members] or [(*self._group.root, *path)]
            self._made.objects |= {target: replace(value, path=target) for target in targets}
            return
        assert entry is not None, "a path holds an array or a value"
        whole = (*self._group.root, *path)
        if not entry.shape:
            self._made.put(entry._replace(path=whole))
            return
        kind = "the state of flat shards, and nothing tells of which parameter"
        fix = GIVE_NAMES if self._known is not None else GIVE_SHAPES
        lost = entry.pieces[0]._replace(layout=Lazy(0, 0, UnreadableTensor(whole, kind, fix)))
        self._made.put(entry._replace(path=whole, pieces=(lost,)))

    def _put_groups(self, path: Path, names: Mapping[str | int, str]) -> bool:
        """Add the groups with names for numbers; tell whether there was anything to replace."""
        value = self._group.ranks[0].objects.get(path)
        if value is None or not names:
            return False
        n = len(self._root) + 1
        if len(path) == n and isinstance(value.value, list | tuple):
            made: object = [self._named(group, names) for group in value.value]
        elif path[-1] == "params" and isinstance(value.value, list | tuple):
            made = self._expand(value.value, names)
        else:
            return False
        whole = (*self._group.root, *path)
        self._made.objects[whole] = ObjectEntry(whole, made)
        return True

    def _named(self, group: object, names: Mapping[str | int, str]) -> object:
        if not isinstance(group, dict) or not isinstance(group.get("params"), list | tuple):
            return group
        rest = {key: value for key, value in group.items() if key != "param_names"}
        return {**rest, "params": self._expand(group["params"], names)}

    def _expand(self, params: Sequence[object], names: Mapping[str | int, str]) -> list[object]:
        found: list[object] = []
        for param in params:
            name = names.get(param, param) if isinstance(param, int | str) else param
            unit = self._model.units.get(str(name))
            found += [spec.name for spec in unit.members] if unit and unit.members else [name]
        return found

    def _put_units(self, names: Mapping[str | int, str]) -> None:
        """Leave how flat parameters are laid out, so that they can be put together again."""
        told: list[dict[str, object]] = []
        for name in dict.fromkeys(names.values()):
            unit = self._model.units.get(name)
            if unit is not None and unit.layout is not None:
                told.append({"flat": unit.name, "layout": unit.layout.to_json()})
        if told:
            whole = (*self._group.root, *self._root, UNITS)
            self._made.objects[whole] = ObjectEntry(whole, told)
