"""An optimizer of FSDP1's flat parameters: replace ids by names, merge shards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, combinations, product
from math import comb, prod

from shardckpt.errors import FormatError
from shardckpt.manifest import Path, TensorEntry, dotted
from shardckpt.plan.naming.fqn import strip_wrappers
from shardckpt.plan.optim.optimizer_state import BY_ORDER, GIVE_NAMES, match_by_kind, match_in_order
from shardckpt.reader import ParamShapes
from shardckpt.readers.merge_shards import ManifestBuilder, join_entries
from shardckpt.readers.ranks.fsdp1_flat_param import FlatParamUnit, join_parts
from shardckpt.readers.ranks.fsdp1_model import GIVE_SHAPES, FlatModel, list_candidates
from shardckpt.readers.ranks.rank_files import GROUPS, STATE, RankContent, RankGroup, merge_values

UNITS = "units"
_MAX_CHOICES = 256  # maximum choices of parameters among buffers that are tried

# Id or key in an optimizer's state to the name of a unit, a member or another parameter.
Names = Mapping[str | int, str]


def put_flat_optimizer(
    builder: ManifestBuilder, group: RankGroup, root: Path, model: FlatModel, known: ParamShapes | None
) -> set[Path]:
    """Add an optimizer's state by name, and its groups; return the added paths."""
    if any(path[: len(root)] == root for content in group.ranks for path in content.shards):
        return set()  # SHARDED states store their own layouts
    return _FlatOptimizer(builder, group, root, model, known).put()


class _FlatOptimizer:
    def __init__(
        self, builder: ManifestBuilder, group: RankGroup, root: Path, model: FlatModel, known: ParamShapes | None
    ) -> None:
        self._builder, self._group, self._root, self._model, self._known = builder, group, root, model, known
        self._state = (*root, STATE)
        self._target = (*group.root, *root)
        self._slots: dict[str | int, dict[Path, list[RankContent]]] = {}
        self._groups: dict[Path, object] = {}
        n = len(self._state)
        for path, contents in group.paths().items():
            if path[:n] == self._state and len(path) >= n + 2:
                self._slots.setdefault(path[n], {})[path[n + 1 :]] = contents
            elif path[:n] == (*root, GROUPS) and path in contents[0].objects:
                self._groups[path] = merge_values(path, contents).value

    def put(self) -> set[Path]:
        names = self._find_names()
        done: set[Path] = set()
        for key, slots in self._slots.items():
            for slot, contents in slots.items():
                done.add((*self._state, key, *slot))
                self._put_slot((*self._state, key, *slot), names.get(key, ""), slot, contents)
        if names:
            done |= {path for path, value in self._groups.items() if self._put_groups(path, value, names)}
        layouts: list[object] = []
        for name in dict.fromkeys(names.values()):
            unit = self._model.units.get(name)
            if unit is not None and unit.layout is not None:
                layouts.append({"flat": unit.name, "layout": unit.layout.to_json()})
        if layouts:  # needed to build flat parameters again
            self._builder.put_value((*self._target, UNITS), layouts)
        return done

    # ---------------------------------------------------------------------------------------------------- names

    def _find_names(self) -> Names:
        """Return a name for each key in the state and the groups."""
        lists = [[param for param in params if type(param) is int] for params in self._list_params()]
        candidates = list_candidates(self._model)
        names: dict[str | int, str] = {key: strip_wrappers(key) for key in self._slots if isinstance(key, str)}
        given = self._find_given_names(lists, {name for name, _ in candidates})
        if given:
            return {**names, **given}
        match = self._match(lists, candidates)
        if match is None:
            if self._known is not None and any(lists):
                title = dotted(self._target) or "the optimizer"
                self._builder.warnings.append(
                    f"{title}: its ids fit the parameters in no way, or in several. {GIVE_NAMES}"
                )
            return {}
        return {**names, **dict(zip((number for ids in lists for number in ids), match, strict=True))}

    def _list_params(self) -> Iterator[Sequence[object]]:
        """Yield each group's `params`."""
        for path, value in self._groups.items():
            if not isinstance(value, list | tuple):
                continue
            if len(path) == len(self._root) + 1:
                for group in value:
                    params = group.get("params") if isinstance(group, dict) else None
                    yield params if isinstance(params, list | tuple) else ()
            elif path[-1] == "params":
                yield value

    def _find_given_names(self, lists: Sequence[Sequence[int]], candidates: set[str]) -> Names:
        """Return the ids' names from the caller or the groups; empty if one lacks a name."""
        given = dict(self._known.ids) if self._known else {}
        if not given:
            groups = self._groups.get((*self._root, GROUPS))
            for group in groups if isinstance(groups, list | tuple) else ():
                fields = group if isinstance(group, dict) else {}
                params, stored = fields.get("params"), fields.get("param_names")
                if isinstance(params, list) and isinstance(stored, list) and len(params) == len(stored):
                    pairs = zip(params, stored, strict=True)
                    given |= {p: name for p, name in pairs if type(p) is int and isinstance(name, str)}
        units = {spec.name: unit.name for unit in self._model.units.values() for spec in unit.members}
        names: dict[str | int, str] = {}
        for number in (number for ids in lists for number in ids):
            name = strip_wrappers(given.get(number, ""))
            names[number] = name if name in candidates else units.get(name, "")
            if names[number] not in candidates:
                return {}
        return names

    def _match(self, lists: Sequence[Sequence[int]], candidates: Sequence[tuple[str, object]]) -> list[str] | None:
        """Return a name for each id: by its layout if unique, else by the model's order."""
        layouts = [[self._describe_layout(number) for number in ids] for ids in lists]
        flat = [layout for ids in layouts for layout in ids]
        match = match_by_kind(flat, candidates)
        if match is not None:
            return match
        in_order = match_in_order(layouts, candidates)
        if in_order is None:  # a buffer may look like a unit, or like a parameter outside of them
            choices = self._choose_stored(flat, candidates)
            fitting = [chosen for chosen in choices if match_by_kind(flat, chosen) or match_in_order(layouts, chosen)]
            if len(fitting) != 1:
                return None
            match, in_order = match_by_kind(flat, fitting[0]), match_in_order(layouts, fitting[0])
            if match is not None or in_order is None:
                return match
        self._builder.warnings.append(f"{dotted(self._target) or 'the optimizer'}: {BY_ORDER}")
        self._builder.by_order.add(self._target)
        return [name for names in in_order for name in names]

    def _choose_stored(
        self, wanted: Sequence[object], candidates: Sequence[tuple[str, object]]
    ) -> list[list[tuple[str, object]]]:
        """Return each choice with all flat parameters, and a tensor with its layout for each other id."""
        # Too many choices return an empty list.
        flat = {*self._model.units, *self._model.fragments}
        others = Counter(wanted)
        others.subtract(layout for name, layout in candidates if name in flat)
        if None in others or any(count < 0 for count in others.values()):
            chosen = [pair for pair in candidates if pair[0] in flat]
            return [chosen] if len(chosen) == len(wanted) else []
        stored = {kind: [name for name, layout in candidates if layout == kind and name not in flat] for kind in others}
        if prod(comb(len(names), others[kind]) for kind, names in stored.items()) > _MAX_CHOICES:
            return []
        ways = product(*(combinations(names, others[kind]) for kind, names in stored.items()))
        found = [{*flat, *chain.from_iterable(way)} for way in ways]
        return [[pair for pair in candidates if pair[0] in names] for names in found]

    def _describe_layout(self, key: int) -> object:
        """Return the layout of an id's state over ranks; None without a dimension."""
        places = self._model.places
        for slot, contents in self._slots.get(key, {}).items():
            path = (*self._state, key, *slot)
            entries = {c.rank: c.tensors[path] for c in contents if path in c.tensors}
            shapes = {entry.shape for entry in entries.values()}
            if not entries or () in shapes:
                continue
            if any(len(shape) != 1 for shape in shapes):
                return "full", next(iter(shapes))
            lengths = dict.fromkeys(places.values(), 0)
            for rank, place in reversed(list(places.items())):
                if rank in entries:
                    lengths[place] = entries[rank].shape[0]
            return "flat", self._pad_lengths(lengths)
        return None

    def _pad_lengths(self, lengths: Mapping[int, int]) -> tuple[int, ...]:
        """Return the lengths of the ranks' tensors, with padding that writers omit."""
        found = tuple(lengths[place] for place in sorted(lengths))
        for unit in self._model.units.values():
            if found == tuple(unit.count_elements(place) for place in sorted(lengths)):
                return (unit.chunk,) * len(found)
        return found

    # ---------------------------------------------------------------------------------------------------- state

    def _put_slot(self, path: Path, name: str, slot: Path, contents: Sequence[RankContent]) -> None:
        """Add a slot for a unit's members, for a member, or for another parameter."""
        unit = self._model.units.get(name)
        members = [spec.name for spec in unit.members] if unit else [name] if name else []
        entries = {c.rank: (c, c.tensors[path]) for c in contents if path in c.tensors}
        if not entries:
            targets = [self._slot_path(member, slot) for member in members] or [(*self._group.root, *path)]
            for target in targets:
                self._builder.put(target, merge_values(path, contents))
            return
        first = next(iter(entries.values()))[1]
        is_full = not first.shape or (unit is None and name not in self._model.fragments)
        has_one_shape = len({entry.shape for _, entry in entries.values()}) == 1
        if has_one_shape and (is_full or not members):
            first = join_entries(path, [entry for _, entry in entries.values()])
        if not members or (is_full and not has_one_shape):
            self._put_unnamed(path, first)
        elif is_full:
            for member in members:
                self._builder.put(self._slot_path(member, slot), first)
        else:
            self._merge_slot(path, name, unit, slot, entries)

    def _slot_path(self, member: str, slot: Path) -> Path:
        return (*self._target, STATE, member, *slot)

    def _put_unnamed(self, path: Path, entry: TensorEntry) -> None:
        """Add a tensor whose id has no name; it can be read only if it has one element."""
        target = (*self._group.root, *path)
        if not entry.shape:
            self._builder.put(target, entry)
            return
        kind = "the state of flat shards whose parameter is unknown"
        self._builder.put_unreadable(target, entry, kind, GIVE_NAMES if self._known is not None else GIVE_SHAPES)

    def _merge_slot(
        self,
        path: Path,
        name: str,
        unit: FlatParamUnit | None,
        slot: Path,
        entries: Mapping[int, tuple[RankContent, TensorEntry]],
    ) -> None:
        places = self._model.places
        parts = join_parts(path, ((places[rank], *pair) for rank, pair in entries.items() if rank in places))
        for place, (content, entry) in parts.items():
            lengths = (
                {unit.chunk, unit.count_elements(place)} if unit else {self._model.fragments[name][place][1].shape[0]}
            )
            if len(entry.shape) != 1 or entry.shape[0] not in lengths:
                raise FormatError(
                    f"the shard of rank {content.rank} of {dotted(path)!r} does not fit {name!r}",
                    where=f"{self._builder.url}/{content.file}",
                    found=entry.shape,
                    expected=" or ".join(f"({n},)" for n in sorted(lengths, reverse=True)),
                )
        if unit:
            below = (*self._target, STATE)
            for entry in unit.merge_members(self._builder, parts, below, slot).values():
                self._builder.put(entry.path, entry)
            return
        owner = self._model.find_unit(name)
        assert owner is not None, "fragments are members of a unit"
        target = self._slot_path(name, slot)
        self._builder.put(target, owner.merge_member(self._builder, name, parts, target))

    # --------------------------------------------------------------------------------------------------- groups

    def _put_groups(self, path: Path, value: object, names: Names) -> bool:
        """Add the groups, or one group's `params`, with names instead of ids; return True if any exist."""
        if not isinstance(value, list | tuple):
            return False
        if len(path) == len(self._root) + 1:
            self._builder.put_value((*self._group.root, *path), [self._rename(group, names) for group in value])
            return True
        if path[-1] == "params":
            self._builder.put_value((*self._group.root, *path), self._expand(value, names))
            return True
        return False

    def _rename(self, group: object, names: Names) -> object:
        if not isinstance(group, dict) or not isinstance(group.get("params"), list | tuple):
            return group
        rest = {key: value for key, value in group.items() if key != "param_names"}
        return {**rest, "params": self._expand(group["params"], names)}

    def _expand(self, params: Sequence[object], names: Names) -> list[object]:
        expanded: list[object] = []
        for param in params:
            name = names.get(param, param) if isinstance(param, int | str) else param
            unit = self._model.units.get(str(name))
            expanded += [spec.name for spec in unit.members] if unit and unit.members else [name]
        return expanded
