"""A model in rank files of torch's FSDP1: its flat parameters, and the parameters that are found in them.

With `use_orig_params=True` a rank also holds each parameter by its name, as a fragment without its shape.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod

from shardckpt.boxes import Box, Shape
from shardckpt.errors import FormatError, UsageError
from shardckpt.format.ranks.fsdp1_flat_param import FLAT, FlatParamUnit, Fragments, are_fragments, storage_key
from shardckpt.format.ranks.rank_files import ManifestBuilder, RankContent, RankGroup
from shardckpt.format.reader import ParamShapes
from shardckpt.format.torchsave.dtensor_spec import SHARDED_TENSOR, ShardInfo
from shardckpt.format.torchsave.tensor_views import UnreadableTensor
from shardckpt.layout import FlatLayout, ParamSpec
from shardckpt.manifest import Lazy, Path, Piece, TensorEntry
from shardckpt.parameter_names import strip_wrappers

GIVE_SHAPES = (
    "Give --shapes-from SRC, any checkpoint of the same model that holds whole tensors, or load into the model."
)
_GIVE_ORDER = "Give a file that torch.save wrote of the model's state_dict; a model on the meta device will do."
_NO_SHAPES = "flat: its parameters' shapes stand nowhere in these files"


def has_flat_parameters(shares: Mapping[Path, ShardInfo]) -> bool:
    """Return True if any share is one of a flat parameter."""
    return any(_is_named_flat(path, share) for path, share in shares.items())


def _is_named_flat(path: Path, share: ShardInfo) -> bool:
    is_named = bool(path) and str(path[-1]).rpartition(".")[2] == FLAT
    return is_named and share.kind == SHARDED_TENSOR and len(share.shape) == 1


def is_flat(path: Path, content: RankContent) -> bool:
    """Return True if a rank's file holds a chunk of a flat parameter at a path."""
    return path in content.shares and _is_named_flat(path, content.shares[path])


class FlatModel:
    """The flat parameters of one model.

    Args:
        group: Its files.
        base: Where in them it is.
        made: Where whole arrays go.
        known: Shapes and names of the parameters, where they are told.
    """

    def __init__(self, group: RankGroup, base: Path, made: ManifestBuilder, known: ParamShapes | None) -> None:
        self.group, self.base = group, base
        self._made, self._known = made, known
        self.units: dict[str, FlatParamUnit] = {}
        self.places: dict[int, int] = {}
        self.warnings: list[str] = []
        self.fragments: dict[str, Fragments] = {}
        self.ties: dict[str, str] = dict(known.aliases) if known else {}
        self._stored: dict[str, Path] = {}
        self._paths = group.paths()
        n = len(base)
        for path, holders in self._paths.items():
            if path[:n] != base or len(path) != n + 1:
                continue
            if any(is_flat(path, c) for c in holders):
                self._add_unit(path, holders)
            elif any(path in c.tensors for c in holders):
                self._stored[strip_wrappers(str(path[-1]))] = path
        self._prefixes = sorted(self.units.values(), key=lambda unit: -len(unit.prefix))
        if known is not None:
            self._fit(known)

    def _add_unit(self, path: Path, holders: Sequence[RankContent]) -> None:
        name = strip_wrappers(str(path[-1]))
        first: ShardInfo | None = None
        for content in holders:
            share = content.shares.get(path)
            if share is None or share.refused or (first and (share.shape, share.parts) != (first.shape, first.parts)):
                raise FormatError(
                    f"ranks hold the flat parameter {name!r} in different ways",
                    where=f"{self._made.url}/{content.file}",
                    fix="The files are not of one save: keep those of one, and nothing else, in a folder.",
                )
            first = first or share
            unit = self.units.setdefault(
                name,
                FlatParamUnit(
                    name, name.removesuffix(FLAT), share.shape[0], share.parts, share.parts == self.group.world
                ),
            )
            unit.add(self._made.url, content, content.tensors[path], share)
            self.places.setdefault(content.rank, share.place)

    def find_unit(self, name: str) -> FlatParamUnit | None:
        """Return the innermost unit that a parameter's name lies in."""
        return next((unit for unit in self._prefixes if name.startswith(unit.prefix)), None)

    def _fit(self, known: ParamShapes) -> None:
        """Find the members of every unit, and how they lie in it."""
        members: dict[str, list[str]] = {name: [] for name in self.units}
        owner = {name: flat for flat, names in known.units.items() for name in names}
        for name, shape in known.shapes.items():
            unit = self.units.get(owner[name]) if name in owner else None if owner else self.find_unit(name)
            if unit is None or name in known.aliases:
                continue
            if name in self._stored:
                found = self._collect_fragments(name, unit)
                if not are_fragments(found, shape, unit):
                    continue
                if self._first_name(name) in self.fragments:
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

    def _collect_fragments(self, name: str, unit: FlatParamUnit) -> Fragments:
        path = self._stored[name]
        found: Fragments = {}
        for content in self._paths[path]:
            share = content.shares.get((*self.base, *path[len(self.base) :]))
            entry = content.tensors.get(path)
            place = self.places.get(content.rank)
            if share is None and entry is not None and place is not None:
                found.setdefault(place % unit.parts, (content, entry))
        return found

    def _first_name(self, name: str) -> str:
        """Return the first name in the files of the elements that a name has there; empty where it is its own."""
        path = self._stored[name]
        firsts = {content.aliases[path] for content in self.group.ranks if path in content.aliases}
        return strip_wrappers(str(firsts.pop()[-1])) if len(firsts) == 1 else ""

    def _tie_stored(self, known: ParamShapes) -> None:
        """Note the names in the files that share their elements with a parameter."""
        for name in self._stored:
            first = self._first_name(name)
            if first in self.fragments and name not in self.fragments:
                self.ties[name] = first
            elif name in self.fragments and first in self._stored and first not in known.shapes:
                self.ties[first] = name

    def _lay_out(self, unit: FlatParamUnit, names: list[str], known: ParamShapes) -> None:
        """Find how members lie in a unit; a name too many is a tie, where only one name can be it."""
        dtype = next(iter(unit.chunks.values()))[1].stored
        fragments = {name: self.fragments[name] for name in names if name in self.fragments}

        def laid(kept: Sequence[str]) -> FlatLayout | None:
            if fragments and any(name not in fragments for name in kept):
                return None
            specs = tuple(ParamSpec(n, known.shapes[n], dtype, (), self.aliases(n)) for n in kept)
            return unit.fit_layout(specs, fragments)

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
                    fix=GIVE_SHAPES,
                )
            [(tied, first)] = repeats
            self.ties[tied] = first
            self.warnings.append(f"{unit.name} has no room for {tied}: it is taken for another name of {first}")
            unit.layout = laid([name for name in names if name != tied])
        assert unit.layout is not None, "what fits was tried"
        unit.members = unit.layout.specs

    def put(self) -> set[Path]:
        """Add every parameter, or the flat parameters as they are where nothing tells their members."""
        taken: set[Path] = set()
        is_known = self._known is not None
        for path, holders in self._paths.items():
            if path[:-1] != self.base:
                continue
            name = strip_wrappers(str(path[-1]))
            if name in self.units and any(path in c.shares for c in holders):
                taken.add(path)
                if not is_known:
                    self._put_unread(path, (self.units[name].numel,), holders)
            elif name in self.fragments or (name in self.ties and is_known):
                taken.add(path)
            elif not is_known and self._looks_sharded(path, holders):
                taken.add(path)
                numel = sum(c.tensors[path].shape[0] for c in self._once(holders))
                self._put_unread(path, (numel,), holders)
        for name, entry in self._in_order(self._full_params()):
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

    def _full_params(self) -> dict[str, TensorEntry]:
        found: dict[str, TensorEntry] = {}
        below = (*self.group.root, *self.base)
        for unit in self.units.values():
            if any(spec.name in self.fragments for spec in unit.members):
                found |= {
                    s.name: unit.member(self._made, s.name, self.fragments[s.name], (*below, s.name))
                    for s in unit.members
                }
            else:
                found |= unit.split_members(self._made, unit.chunks, below)
        return found

    def _in_order(self, wholes: Mapping[str, TensorEntry]) -> Iterator[tuple[str, TensorEntry]]:
        """Yield the parameters in the order of the unsharded model, where it is told."""
        order = list(self._known.shapes) if self._known else []
        place = {name: at for at, name in enumerate(order)}
        for name in sorted(wholes, key=lambda name: place.get(name, len(place))):
            yield name, wholes[name]

    def _looks_sharded(self, path: Path, holders: Sequence[RankContent]) -> bool:
        """Return True if an array looks like a fragment, where nothing tells: of its own length, or inside a chunk."""
        entries = [c.tensors[path] for c in holders if path in c.tensors and path not in c.shares]
        unit = self.find_unit(strip_wrappers(str(path[-1])))
        if unit is None or len(entries) < len(holders) or not all(len(entry.shape) == 1 for entry in entries):
            return False
        keys = {_storage(entry) for _, entry in unit.chunks.values()} - {None}
        return len({entry.shape for entry in entries}) > 1 or any(
            (content.file, storage_key(content.tensors[path])) in keys for content in holders
        )

    def _once(self, holders: Sequence[RankContent]) -> list[RankContent]:
        """Return one file for each place."""
        return list({self.places.get(c.rank, c.rank): c for c in reversed(holders)}.values())

    def _put_unread(self, path: Path, shape: Shape, holders: Sequence[RankContent]) -> None:
        whole = (*self.group.root, *path)
        stored = holders[0].tensors[path].stored
        detail = UnreadableTensor(whole, _NO_SHAPES, GIVE_SHAPES)
        pieces = (Piece(Box((0,), shape), holders[0].file, Lazy(0, 0, detail)),) if prod(shape) else ()
        self._made.put(TensorEntry(whole, shape, stored, pieces))

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
            name = strip_wrappers(str(path[-1])) if path[:-1] == self.base else ""
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


def _repeats(names: Sequence[str], shapes: Mapping[str, Shape]) -> Iterator[tuple[str, str]]:
    """Yield matrices and the one other of the same shape before each: perhaps an embedding and its tied head."""
    alike: dict[Shape, list[str]] = {}
    for name in names:
        if len(shapes[name]) > 1:
            alike.setdefault(shapes[name], []).append(name)
    yield from ((found[1], found[0]) for found in alike.values() if len(found) == 2)


def _storage(entry: TensorEntry) -> tuple[str, object] | None:
    return (entry.pieces[0].file, storage_key(entry)) if entry.pieces and storage_key(entry) is not None else None
