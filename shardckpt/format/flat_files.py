"""Flat parameters of torch's FSDP1 taken apart: LOCAL states and the optimizers of flat shards, as ranks saved them.

A file holds `{module}._flat_param`, this rank's chunk of the parameters of a unit laid end to end; with
`use_orig_params=True` also each parameter by its name, as a fragment without its shape. Neither shapes nor, otherwise,
names stand in the files: they come from a note beside them, or from another checkpoint of the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import prod

from shardckpt.boxes import Box, Shape
from shardckpt.dtypes import bits
from shardckpt.errors import FormatError, UsageError
from shardckpt.format.rank_contents import GROUPS, STATE, Made, RankContent, RankGroup
from shardckpt.format.reader import WholeShapes
from shardckpt.format.sharded_values import SHARDED_TENSOR, Shards, Share
from shardckpt.format.torch_nest import Refused, narrowed
from shardckpt.layout import ALIGNMENT, FlatLayout, ParamSpec
from shardckpt.manifest import Lazy, ObjectEntry, Path, Piece, TensorEntry, dotted
from shardckpt.parameter_names import unique_match, unwrapped

FLAT = "_flat_param"
UNITS = "units"
_GIVE_SHAPES = (
    "Give --shapes-from SRC, any checkpoint of the same model that holds whole tensors, or load into the model."
)
_GIVE_ORDER = "Give a file that torch.save wrote of the model's state_dict; a model on the meta device will do."
_GIVE_NAMES = "Give --param-names FILE, a JSON object from id to name or an array of names."
_NO_SHAPES = "flat: its parameters' shapes stand nowhere in these files"

_Fragments = dict[int, tuple[RankContent, TensorEntry]]
"""Place in the sharding group to the file that holds that part, and the part."""


@dataclass(slots=True)
class _Unit:
    """A flat parameter.

    Attributes:
        name: Cleaned.
        prefix: What the names of its members start with.
        numel: Elements of the whole, holes counted.
        parts: Ranks that share it.
        chunks: What each of those holds.
        members: Its parameters, once they are known.
        layout: How they lie in it, once that is known.
        boxes: Place to what lies there of each member, kept once it was asked for.
    """

    name: str
    prefix: str
    numel: int
    parts: int
    chunks: _Fragments = field(default_factory=dict)
    members: tuple[ParamSpec, ...] = ()
    layout: FlatLayout | None = None
    boxes: dict[int, list[tuple[int, Box, int]]] = field(default_factory=dict)

    @property
    def chunk(self) -> int:
        """Elements of each rank's part, padding counted."""
        return -(-self.numel // self.parts)

    @property
    def filled(self) -> int:
        """Ranks that hold an element; those behind them have padding alone, or nothing."""
        return -(-self.numel // self.chunk) if self.chunk else 0

    def lying_at(self, place: int) -> list[tuple[int, Box, int]]:
        """Return `(member, box, offset in the chunk)` of everything at a place."""
        if place not in self.boxes:
            self.boxes[place] = self.layout.boxes(place) if self.layout is not None else []
        return self.boxes[place]


class FlatStates:
    """The flat parameters in rank files, and the optimizers over them.

    Args:
        groups: All rank files.
        made: Where whole arrays go.
        known: Shapes and names of the parameters, where they are told.

    Raises:
        FormatError: Files contradict one another.
        UsageError: The shapes do not fit.
    """

    def __init__(self, groups: Mapping[Path, RankGroup], made: Made, known: WholeShapes | None) -> None:
        self._made, self._known = made, known
        self._models: dict[tuple[Path, Path], _FlatModel] = {}
        for group in groups.values():
            bases = {path[:-1] for content in group.ranks for path in content.shares if _is_flat(path, content)}
            for base in sorted(bases, key=str):
                self._models[group.root, base] = _fitting(group, base, made, known)

    def _model_of(self, root: Path) -> _FlatModel | None:
        """Return the model that the optimizers in a group are of: the only one, or the one of the same number."""
        models = [model for (of, _), model in self._models.items() if of == root or _number(of) == _number(root)]
        every = list(self._models.values())
        return every[0] if len(every) == 1 else models[0] if len(models) == 1 else None

    def put(self, group: RankGroup) -> set[Path]:
        """Add what is flat in a group, and return the paths that were taken care of."""
        taken: set[Path] = set()
        for (root, base), model in self._models.items():
            if root == group.root:
                taken |= model.put()
                self._made.warnings += model.warnings
                taken.add(base)
        mine = self._model_of(group.root)
        if mine is not None:
            for root in group.optimizers():
                taken |= _FlatOptimizer(group, root, mine, self._made, self._known).put()
        return taken


def _fitting(group: RankGroup, base: Path, made: Made, known: WholeShapes | None) -> _FlatModel:
    """Return the flat parameters of a model, taken for the first of the known models that fits them."""
    if known is None or not known.others:
        return _FlatModel(group, base, made, known)
    try:
        return _FlatModel(group, base, made, replace(known, others=()))
    except UsageError:
        for other in known.others:
            with suppress(UsageError):
                return _FlatModel(group, base, made, other)
        raise


def _number(root: Path) -> str:
    """Return which of several models or optimizers a group is, by the number at the end of its name."""
    return str(root[0]).rpartition("_")[2] if root and str(root[0])[-1:].isdigit() else ""


def has_flat_parameters(shares: Mapping[Path, Share]) -> bool:
    """Tell whether any share is one of a flat parameter."""
    return any(_is_named_flat(path, share) for path, share in shares.items())


def _is_named_flat(path: Path, share: Share) -> bool:
    is_named = bool(path) and str(path[-1]).rpartition(".")[2] == FLAT
    return is_named and share.kind == SHARDED_TENSOR and len(share.shape) == 1


def _is_flat(path: Path, content: RankContent) -> bool:
    return path in content.shares and _is_named_flat(path, content.shares[path])


class _FlatModel:
    """The flat parameters of one model.

    Args:
        group: Its files.
        base: Where in them it is.
        made: Where whole arrays go.
        known: Shapes and names of the parameters, where they are told.
    """

    def __init__(self, group: RankGroup, base: Path, made: Made, known: WholeShapes | None) -> None:
        self.group, self.base = group, base
        self._made, self._known = made, known
        self.units: dict[str, _Unit] = {}
        self.places: dict[int, int] = {}
        self.warnings: list[str] = []
        self.fragments: dict[str, _Fragments] = {}
        self.ties: dict[str, str] = dict(known.aliases) if known else {}
        self._stored: dict[str, Path] = {}
        self._paths = group.paths()
        n = len(base)
        for path, holders in self._paths.items():
            if path[:n] != base or len(path) != n + 1:
                continue
            if any(_is_flat(path, c) for c in holders):
                self._add_unit(path, holders)
            elif any(path in c.tensors for c in holders):
                self._stored[unwrapped(str(path[-1]))] = path
        self._prefixes = sorted(self.units.values(), key=lambda unit: -len(unit.prefix))
        if known is not None:
            self._fit(known)

    def _add_unit(self, path: Path, holders: Sequence[RankContent]) -> None:
        name = unwrapped(str(path[-1]))
        first: Share | None = None
        for content in holders:
            share = content.shares.get(path)
            if share is None or share.refused or (first and (share.shape, share.parts) != (first.shape, first.parts)):
                raise FormatError(
                    f"ranks hold the flat parameter {name!r} in different ways",
                    where=f"{self._made.url}/{content.file}",
                    fix="The files are not of one save: keep those of one, and nothing else, in a folder.",
                )
            first = first or share
            unit = self.units.setdefault(name, _Unit(name, name.removesuffix(FLAT), share.shape[0], share.parts))
            entry = content.tensors[path]
            listed = sum(1 for box in share.cut.boxes if box.volume) if isinstance(share.cut, Shards) else -1
            if listed != unit.filled:
                raise FormatError(
                    f"{name!r} is not cut into equal chunks",
                    where=f"{self._made.url}/{content.file}",
                    found=f"{listed} shards",
                    expected=f"{unit.filled}, of {unit.numel} elements over {unit.parts} ranks",
                )
            held = min(max(unit.numel - share.place * unit.chunk, 0), unit.chunk)
            expected = [Box((share.place * unit.chunk,), (held,))] if held else []
            if [piece.box for piece in entry.pieces] != expected:
                raise FormatError(
                    f"what rank {content.rank} holds of {name!r} is not its chunk",
                    where=f"{self._made.url}/{content.file}",
                    found=", ".join(str(piece.box) for piece in entry.pieces) or "nothing",
                    expected=", ".join(map(str, expected)) or "nothing",
                )
            unit.chunks.setdefault(share.place, (content, entry))
            self.places.setdefault(content.rank, share.place)

    # ------------------------------------------------------------------------------------------------- members

    def unit_of(self, name: str) -> _Unit | None:
        """Return the innermost unit that a parameter's name lies in."""
        return next((unit for unit in self._prefixes if name.startswith(unit.prefix)), None)

    def _fit(self, known: WholeShapes) -> None:
        """Find the members of every unit, and how they lie in it."""
        members: dict[str, list[str]] = {name: [] for name in self.units}
        owner = {name: flat for flat, names in known.units.items() for name in names}
        for name, shape in known.shapes.items():
            unit = self.units.get(owner[name]) if name in owner else None if owner else self.unit_of(name)
            if unit is None or name in known.aliases:
                continue
            if name in self._stored:
                found = self._fragments_of(name, unit)
                if not _are_fragments(found, shape, unit):
                    continue
                if self._first_of(name) in self.fragments:
                    continue
                self.fragments[name] = found
            members[unit.name].append(name)
        self._tie_stored(known)
        place = {name: at for at, name in enumerate(self._stored)}
        for unit in self.units.values():
            names = members[unit.name]
            if all(name in self.fragments for name in names):
                names.sort(key=place.__getitem__)
            elif len(names) > 1 and not known.is_ordered:
                raise UsageError(
                    f"nothing tells in which order parameters lie in {unit.name!r}",
                    where=known.where,
                    found="names without the order of the model, as safetensors files have them",
                    expected="names in the order of the model",
                    fix=_GIVE_ORDER,
                )
            self._lay_out(unit, names, known)

    def _fragments_of(self, name: str, unit: _Unit) -> _Fragments:
        path = self._stored[name]
        found: _Fragments = {}
        for content in self._paths[path]:
            share = content.shares.get((*self.base, *path[len(self.base) :]))
            entry = content.tensors.get(path)
            place = self.places.get(content.rank)
            if share is None and entry is not None and place is not None:
                found.setdefault(place % unit.parts, (content, entry))
        return found

    def _first_of(self, name: str) -> str:
        """Return the first name in the files of the elements that a name has there; empty where it is its own."""
        path = self._stored[name]
        firsts = {content.aliases[path] for content in self.group.ranks if path in content.aliases}
        return unwrapped(str(firsts.pop()[-1])) if len(firsts) == 1 else ""

    def _tie_stored(self, known: WholeShapes) -> None:
        """Note the names in the files that share their elements with a parameter."""
        for name in self._stored:
            first = self._first_of(name)
            if first in self.fragments and name not in self.fragments:
                self.ties[name] = first
            elif name in self.fragments and first in self._stored and first not in known.shapes:
                self.ties[first] = name

    def _lay_out(self, unit: _Unit, names: list[str], known: WholeShapes) -> None:
        """Find how members lie in a unit; a name too many is a tie, where only one name can be it."""
        dtype = next(iter(unit.chunks.values()))[1].stored
        has_fragments = any(name in self.fragments for name in names)

        def laid(kept: Sequence[str]) -> FlatLayout | None:
            if has_fragments and any(name not in self.fragments for name in kept):
                return None
            specs = tuple(ParamSpec(n, known.shapes[n], dtype, (), self.aliases(n)) for n in kept)
            return self._layout(unit, specs, has_fragments)

        unit.layout = laid(names)
        if unit.layout is None:
            repeats = [(n, first) for n, first in _repeats(names, known.shapes) if laid([k for k in names if k != n])]
            if len(repeats) != 1:
                total = sum(prod(known.shapes[name]) for name in names)
                raise UsageError(
                    f"the shapes do not fit the flat parameter {unit.name!r}: the unit is of another size",
                    where=known.where,
                    found=f"{total} elements in {len(names)} parameters of {unit.prefix or 'the outermost module'!r}",
                    expected=f"{unit.numel} elements, as in the files",
                    fix=_GIVE_SHAPES,
                )
            [(tied, first)] = repeats
            self.ties[tied] = first
            self.warnings.append(f"{unit.name} has no room for {tied}: it is taken for another name of {first}")
            unit.layout = laid([name for name in names if name != tied])
        assert unit.layout is not None, "what fits was tried"
        unit.members = unit.layout.specs

    def _layout(self, unit: _Unit, specs: tuple[ParamSpec, ...], has_fragments: bool) -> FlatLayout | None:
        """Return how members lie in a unit so that they fill it, and fit the fragments; None for no such way.

        `use_orig_params=True` leaves fragments, puts each member at a multiple of 16 bytes of the type that is computed
        in, which the files do not tell, and fills the end up to a multiple of the ranks. Where several ways fit, they
        cut every fragment alike, and fragments are what is read.
        """
        width = max(bits(specs[0].dtype) // 8, 1) if specs else 1
        for alignment in dict.fromkeys((ALIGNMENT // width or 1, 8, 4, 2, 16, 1)) if has_fragments else (1,):
            layout = FlatLayout(specs, unit.parts, alignment)
            padded = layout.numel if alignment == 1 else -(-layout.numel // unit.parts) * unit.parts
            if unit.numel in (layout.numel, padded) and self._fits(unit, layout):
                return layout
        return None

    def _fits(self, unit: _Unit, layout: FlatLayout) -> bool:
        """Tell whether fragments are as long as a layout says."""
        for place in unit.chunks:
            runs = {layout.specs[run.index].name: run.numel for run in layout.runs(place)}
            for spec in layout.specs:
                part = self.fragments.get(spec.name, {}).get(place)
                if part is not None and part[1].shape[0] != runs.get(spec.name, 0):
                    return False
        return True

    # --------------------------------------------------------------------------------------------------- arrays

    def put(self) -> set[Path]:
        """Add every parameter, or the flat parameters as they are where nothing tells their members."""
        taken: set[Path] = set()
        is_known = self._known is not None
        for path, holders in self._paths.items():
            if path[:-1] != self.base:
                continue
            name = unwrapped(str(path[-1]))
            if name in self.units and any(path in c.shares for c in holders):
                taken.add(path)
                if not is_known:
                    self._put_unread(path, (self.units[name].numel,), holders)
            elif name in self.fragments or (name in self.ties and is_known):
                taken.add(path)
            elif not is_known and self._looks_cut(path, holders):
                taken.add(path)
                numel = sum(c.tensors[path].shape[0] for c in self._once(holders))
                self._put_unread(path, (numel,), holders)
        for name, entry in self._in_order(self._wholes()):
            self._made.put(entry)
            for alias in self.aliases(name):
                tied = (*self.group.root, *self.base, alias)
                if tied not in self._made.tensors:
                    self._made.put(entry._replace(path=tied))
                    self._made.aliases[tied] = entry.path
        return taken

    def aliases(self, name: str) -> tuple[str, ...]:
        """Return the further names of a parameter."""
        return tuple(alias for alias, first in self.ties.items() if first == name)

    def _wholes(self) -> dict[str, TensorEntry]:
        found: dict[str, TensorEntry] = {}
        below = (*self.group.root, *self.base)
        for unit in self.units.values():
            if any(spec.name in self.fragments for spec in unit.members):
                found |= {
                    s.name: self.member(unit, s.name, self.fragments[s.name], (*below, s.name)) for s in unit.members
                }
            else:
                found |= self.spread(unit, unit.chunks, below)
        return found

    def _in_order(self, wholes: Mapping[str, TensorEntry]) -> Iterator[tuple[str, TensorEntry]]:
        """Yield the parameters in the order of the unsharded model, where it is told."""
        order = list(self._known.shapes) if self._known else []
        place = {name: at for at, name in enumerate(order)}
        for name in sorted(wholes, key=lambda name: place.get(name, len(place))):
            yield name, wholes[name]

    def spread(self, unit: _Unit, parts: _Fragments, below: Path, tail: Path = ()) -> dict[str, TensorEntry]:
        """Return the members of a unit out of the 1-D arrays that ranks hold of it.

        Args:
            unit: Which.
            parts: Place to this rank's array: its chunk.
            below: What the members' paths start with.
            tail: What the members' paths end with.
        """
        if unit.layout is None or not parts:
            return {}
        stored = next(iter(parts.values()))[1].stored
        pieces: dict[int, list[Piece]] = {}
        paths = [(*below, spec.name, *tail) for spec in unit.members]
        for place in range(unit.filled):
            boxes = unit.lying_at(place)
            if place not in parts:
                for index, box, _ in boxes:
                    pieces.setdefault(index, []).append(self._made.lost(box, paths[index], self._label(unit, place)))
                continue
            content, entry = parts[place]
            if entry.stored != stored:
                raise FormatError(
                    f"{unit.name!r} has several types",
                    where=f"{self._made.url}/{content.file}",
                    found=entry.stored,
                    expected=stored,
                )
            for index, box, at in boxes:
                pieces.setdefault(index, []).append(_cut(entry, box, at))
        return {
            spec.name: TensorEntry(path, spec.shape, stored, tuple(pieces.get(index, ())))
            for index, (spec, path) in enumerate(zip(unit.members, paths, strict=True))
        }

    def member(self, unit: _Unit, name: str, parts: _Fragments, path: Path) -> TensorEntry:
        """Return one parameter's array out of fragments, whose lengths are those of the layout."""
        index = next(i for i, spec in enumerate(unit.members) if spec.name == name)
        stored = next(iter(parts.values()))[1].stored
        pieces: list[Piece] = []
        for place in range(unit.filled):
            mine = [(box, at) for i, box, at in unit.lying_at(place) if i == index]
            if mine and place not in parts:
                pieces += [self._made.lost(box, path, self._label(unit, place)) for box, _ in mine]
            elif mine:
                pieces += [_cut(parts[place][1], box, at - mine[0][1]) for box, at in mine]
        return TensorEntry(path, unit.members[index].shape, stored, tuple(pieces))

    def _label(self, unit: _Unit, place: int) -> str:
        is_world = unit.parts == self.group.world
        return f"the file of rank {place}" if is_world else f"a file with part {place} of {unit.parts}"

    def _looks_cut(self, path: Path, holders: Sequence[RankContent]) -> bool:
        """Tell whether an array looks like a fragment, where nothing tells: of its own length, or inside a chunk."""
        entries = [c.tensors[path] for c in holders if path in c.tensors and path not in c.shares]
        unit = self.unit_of(unwrapped(str(path[-1])))
        if unit is None or len(entries) < len(holders) or not all(len(entry.shape) == 1 for entry in entries):
            return False
        keys = {_storage(entry) for _, entry in unit.chunks.values()} - {None}
        return len({entry.shape for entry in entries}) > 1 or any(
            (content.file, _key(content.tensors[path])) in keys for content in holders
        )

    def _once(self, holders: Sequence[RankContent]) -> list[RankContent]:
        """Return one file for each place."""
        return list({self.places.get(c.rank, c.rank): c for c in reversed(holders)}.values())

    def _put_unread(self, path: Path, shape: Shape, holders: Sequence[RankContent]) -> None:
        whole = (*self.group.root, *path)
        stored = holders[0].tensors[path].stored
        detail = Refused(whole, _NO_SHAPES, _GIVE_SHAPES)
        pieces = (Piece(Box((0,), shape), holders[0].file, Lazy(0, 0, detail)),) if prod(shape) else ()
        self._made.put(TensorEntry(whole, shape, stored, pieces))

    # --------------------------------------------------------------------------------------------- optimizers' ids

    def candidates(self) -> list[tuple[str, object]]:
        """Return what an optimizer may count, in the order of the model, each with how it lies over the places."""
        found: list[tuple[str, object]] = []
        seen: set[str] = set()
        places = sorted(set(self.places.values()))
        if self.fragments and self._known:
            for name in self._stored:
                if name in self.fragments:
                    lengths = {place: entry.shape[0] for place, (_, entry) in self.fragments[name].items()}
                    found.append((name, ("flat", tuple(lengths.get(place, 0) for place in places))))
                elif name not in self.ties:
                    found.append((name, self._plain(name)))
            return found
        for path in self._paths:
            name = unwrapped(str(path[-1])) if path[:-1] == self.base else ""
            if not name or name in seen:
                continue
            seen.add(name)
            if name in self.units:
                found.append((name, ("flat", (self.units[name].chunk,) * len(places))))
            elif name in self._stored:
                found.append((name, self._plain(name)))
        return found

    def _plain(self, name: str) -> object:
        path = self._stored[name]
        shape = next(c.tensors[path].shape for c in self._paths[path] if path in c.tensors)
        if len(shape) == 1:
            return "flat", (shape[0],) * len(set(self.places.values()))
        return "whole", shape


class _FlatOptimizer:
    """An optimizer whose ranks hold moments of flat shards, under numbers.

    Args:
        group: Its files.
        root: Where in them it is.
        model: The flat parameters.
        made: Where whole arrays go.
        known: Names of numbers, where they are told.
    """

    def __init__(self, group: RankGroup, root: Path, model: _FlatModel, made: Made, known: WholeShapes | None) -> None:
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

    # ---------------------------------------------------------------------------------------------------- names

    def _names(self) -> dict[str | int, str]:
        """Return what each key of the state, and of the groups, stands for: a unit, a member, another parameter."""
        lists = self._id_lists()
        offered = self._model.candidates()
        known = {name for name, _ in offered}
        found: dict[str | int, str] = {k: unwrapped(k) for k in self._slots if isinstance(k, str)}
        told = self._told(lists, known)
        if told:
            return {**found, **told}
        for ids in lists:
            left = [(name, how) for name, how in offered if name not in found.values()]
            match = unique_match([self._signature(i) for i in ids], left)
            if match is None:
                if self._known is not None and ids:
                    self._made.warnings.append(
                        f"the numbers of {dotted((*self._group.root, *self._root)) or 'the optimizer'} fit the"
                        f" parameters in no way, or in several. {_GIVE_NAMES}"
                    )
                return {}
            found.update(zip(ids, match, strict=True))
        return found

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

    def _told(self, lists: Sequence[Sequence[int]], known: set[str]) -> dict[str | int, str]:
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
            name = unwrapped(given.get(number, ""))
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
            return "flat", tuple(places.get(place, 0) for place in sorted(set(self._model.places.values())))
        return None

    # --------------------------------------------------------------------------------------------------- arrays

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
        home = unit or self._model.unit_of(name or "")
        assert home is not None, "fragments lie in a unit"
        parts: _Fragments = {}
        for rank, pair in entries.items():
            if (place := self._model.places.get(rank)) is not None:
                parts.setdefault(place, pair)
        for place, (owner, entry) in parts.items():
            expected = home.chunk if unit else self._model.fragments[str(name)][place][1].shape[0]
            if entry.shape != (expected,):
                raise FormatError(
                    f"what rank {owner.rank} holds of {dotted(path)!r} does not fit {name!r}",
                    where=f"{self._made.url}/{owner.file}",
                    found=entry.shape,
                    expected=(expected,),
                )
        if unit:
            for entry in self._model.spread(unit, parts, below, slot).values():
                self._made.put(entry)
        else:
            self._made.put(self._model.member(home, str(name), parts, (*below, str(name), *slot)))

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
        fix = _GIVE_NAMES if self._known is not None else _GIVE_SHAPES
        lost = entry.pieces[0]._replace(layout=Lazy(0, 0, Refused(whole, kind, fix)))
        self._made.put(entry._replace(path=whole, pieces=(lost,)))

    # --------------------------------------------------------------------------------------------------- groups

    def _put_groups(self, path: Path, names: Mapping[str | int, str]) -> bool:
        """Add the groups with names for numbers; tell whether there was anything to replace."""
        value = self._group.ranks[0].objects.get(path)
        if value is None or not names:
            return False
        n = len(self._root) + 1
        if len(path) == n and isinstance(value.value, list | tuple):
            made: object = [self._named(group, names) for group in value.value]
        elif path[-1] == "params" and isinstance(value.value, list | tuple):
            made = self._expanded(value.value, names)
        else:
            return False
        whole = (*self._group.root, *path)
        self._made.objects[whole] = ObjectEntry(whole, made)
        return True

    def _named(self, group: object, names: Mapping[str | int, str]) -> object:
        if not isinstance(group, dict) or not isinstance(group.get("params"), list | tuple):
            return group
        rest = {key: value for key, value in group.items() if key != "param_names"}
        return {**rest, "params": self._expanded(group["params"], names)}

    def _expanded(self, params: Sequence[object], names: Mapping[str | int, str]) -> list[object]:
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


def _cut(entry: TensorEntry, box: Box, at: int) -> Piece:
    """Return the piece for some elements of a rank's 1-D array."""
    piece = entry.pieces[0]
    assert isinstance(piece.layout, Lazy), "files of torch.save are opened lazily"
    return piece._replace(box=box, layout=narrowed(piece.layout, at, None))


def _are_fragments(parts: _Fragments, shape: Shape, unit: _Unit) -> bool:
    """Tell whether what ranks hold under a parameter's name are fragments of it, and not each the whole (a buffer).

    Where files are missing, a whole one is a fragment if it lies in the storage of its rank's chunk.
    """
    entries = [entry for _, entry in parts.values()]
    if not entries or any(len(entry.shape) != 1 for entry in entries):
        return False
    if any(entry.shape != shape for entry in entries):
        return True
    if len(parts) < unit.parts:
        return any(_key(entry) == _key(unit.chunks[at][1]) for at, (_, entry) in parts.items() if at in unit.chunks)
    return sum(entry.shape[0] for entry in entries) == prod(shape)


def _repeats(names: Sequence[str], shapes: Mapping[str, Shape]) -> Iterator[tuple[str, str]]:
    """Yield matrices and the one other of the same shape before each: perhaps an embedding and its tied head."""
    alike: dict[Shape, list[str]] = {}
    for name in names:
        if len(shapes[name]) > 1:
            alike.setdefault(shapes[name], []).append(name)
    yield from ((found[1], found[0]) for found in alike.values() if len(found) == 2)


def _key(entry: TensorEntry) -> object:
    """Return what tells one storage of a file from another."""
    layout = entry.pieces[0].layout if entry.pieces else None
    return layout.offset if isinstance(layout, Lazy) and layout.nbytes else None


def _storage(entry: TensorEntry) -> tuple[str, object] | None:
    return (entry.pieces[0].file, _key(entry)) if entry.pieces and _key(entry) is not None else None
