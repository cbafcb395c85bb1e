"""A model in rank files of torch's FSDP1: flat parameters and their members.

With `use_orig_params=True` a rank also stores each parameter by name, as a fragment without its shape.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

from shardckpt.boxes import Box, Shape
from shardckpt.errors import FormatError, UsageError
from shardckpt.layout import FlatLayout, ParamSpec
from shardckpt.manifest import Lazy, Path, Piece, TensorEntry
from shardckpt.plan.naming.fqn import require_unique, strip_wrappers
from shardckpt.reader import ParamShapes
from shardckpt.readers.merge_shards import OTHER_SAVE, ManifestBuilder
from shardckpt.readers.ranks.fsdp1_flat_param import (
    FLAT,
    FlatParamUnit,
    Fragments,
    are_fragments,
    join_parts,
    storage_key,
)
from shardckpt.readers.ranks.rank_files import RankContent, RankGroup
from shardckpt.readers.torchsave.dtensor_spec import SHARDED_TENSOR, ShardInfo
from shardckpt.readers.torchsave.storages import UnreadableTensor

GIVE_SHAPES = (
    "Give --shapes-from SRC, any checkpoint of the same model that holds full tensors, or load into the model."
)
_GIVE_ORDER = "Give a torch.save file with the model's state_dict; a model on the meta device will do."
_NO_SHAPES = "flat: these files do not store the shapes of its parameters"


def has_flat_parameters(shards: Mapping[Path, ShardInfo]) -> bool:
    """Return True if any shard is a flat parameter's chunk."""
    return any(_is_named_flat(path, shard) for path, shard in shards.items())


def _is_named_flat(path: Path, shard: ShardInfo) -> bool:
    is_named = bool(path) and str(path[-1]).rpartition(".")[2] == FLAT
    return is_named and shard.kind == SHARDED_TENSOR and len(shard.shape) == 1


def is_flat(path: Path, content: RankContent) -> bool:
    """Return True if a rank's file contains a flat parameter's chunk at a path."""
    return path in content.shards and _is_named_flat(path, content.shards[path])


@dataclass(frozen=True)
class FlatModel:
    """One model's flat parameters, and its other tensors."""

    group: RankGroup  # rank files of the model
    base: Path
    known: ParamShapes | None  # names and shapes of the parameters, if the caller provides them
    paths: Mapping[Path, Sequence[RankContent]]  # paths of the model with the files that contain them
    units: Mapping[str, FlatParamUnit]  # flat parameters by name
    places: Mapping[int, int]  # rank to its rank in the sharding group
    stored: Mapping[str, Path]  # names of the other tensors to their paths
    # Parameter names to the ranks' fragments.
    fragments: Mapping[str, Fragments] = field(default_factory=dict)
    ties: Mapping[str, str] = field(default_factory=dict)  # further names of parameters to the first
    warnings: tuple[str, ...] = ()  # warnings, one sentence each

    def find_unit(self, name: str) -> FlatParamUnit | None:
        """Return the innermost unit that contains a parameter, by name."""
        inner = [unit for unit in self.units.values() if name.startswith(unit.prefix)]
        return max(inner, key=lambda unit: len(unit.prefix), default=None)

    def aliases(self, name: str) -> tuple[str, ...]:
        """Return a parameter's further names."""
        return tuple(alias for alias, first in self.ties.items() if first == name)

    def first_name(self, name: str) -> str:
        """Return the first name in the files for equal elements; empty for the first."""
        path = self.stored[name]
        firsts = {content.aliases[path] for content in self.group.ranks if path in content.aliases}
        return strip_wrappers(str(firsts.pop()[-1])) if len(firsts) == 1 else ""


def read_flat_model(group: RankGroup, base: Path, url: str, known: ParamShapes | None) -> FlatModel:
    """Read one model's flat parameters."""
    paths = {path: contents for path, contents in group.paths().items() if len(path) > 0 and path[:-1] == base}
    require_unique({str(path[-1]): strip_wrappers(str(path[-1])) for path in paths})
    units: dict[str, FlatParamUnit] = {}
    places: dict[int, int] = {}
    stored: dict[str, Path] = {}
    for path, contents in paths.items():
        name = strip_wrappers(str(path[-1]))
        if any(is_flat(path, content) for content in contents):
            units[name] = _read_unit(name, path, contents, group.world, url)
            for content in contents:
                places.setdefault(content.rank, content.shards[path].place)
        elif any(path in content.tensors for content in contents):
            stored[name] = path
    model = FlatModel(group, base, known, paths, units, places, stored)
    return model if known is None else _fit_shapes(model, known)


def _read_unit(name: str, path: Path, contents: Sequence[RankContent], world: int, url: str) -> FlatParamUnit:
    first = contents[0].shards.get(path)
    for content in contents:
        shard = content.shards.get(path)
        if not first or not shard or shard.refusal or (shard.shape, shard.parts) != (first.shape, first.parts):
            raise FormatError(
                f"ranks hold the flat parameter {name!r} in different ways",
                where=f"{url}/{content.file}",
                fix=OTHER_SAVE,
            )
    assert first is not None
    unit = FlatParamUnit(name, name.removesuffix(FLAT), first.shape[0], first.parts, world, {})
    for content in contents:
        unit.require_chunk(url, content, content.tensors[path], content.shards[path])
    found = ((content.shards[path].place, content, content.tensors[path]) for content in contents)
    return replace(unit, chunks=join_parts(path, found))


def _fit_shapes(model: FlatModel, known: ParamShapes) -> FlatModel:
    """Find every unit's members, and their positions."""
    members, fragments = _assign_members(model, known)
    ties = {**known.aliases, **_find_stored_ties(model, fragments, known)}
    warnings: list[str] = []
    units: dict[str, FlatParamUnit] = {}
    order = {name: at for at, name in enumerate(model.stored)}
    for unit in model.units.values():
        names = members[unit.name]
        if all(name in fragments for name in names):
            names.sort(key=order.__getitem__)
        elif len(names) > 1 and not known.is_ordered:
            raise UsageError(
                f"nothing says in which order parameters are in {unit.name!r}",
                where=known.where,
                found="names without the model's order, as in safetensors files",
                expected="names in the model's order",
                fix=_GIVE_ORDER,
            )
        layout, tie = _fit_unit(unit, names, known, fragments, ties)
        if tie is not None:
            ties[tie[0]] = tie[1]
            warnings.append(f"{unit.name} has no room for {tie[0]}: it is taken for another name of {tie[1]}")
        units[unit.name] = replace(unit, layout=layout)
    return replace(model, units=units, fragments=fragments, ties=ties, warnings=tuple(warnings))


def _assign_members(model: FlatModel, known: ParamShapes) -> tuple[dict[str, list[str]], dict[str, Fragments]]:
    """Return each unit's member names, and the fragments stored by name."""
    members: dict[str, list[str]] = {name: [] for name in model.units}
    fragments: dict[str, Fragments] = {}
    owners = {name: flat for flat, names in known.units.items() for name in names}
    for name, shape in known.shapes.items():
        unit = model.units.get(owners.get(name, "")) if owners else model.find_unit(name)
        if unit is None or name in known.aliases:
            continue
        if name in model.stored:
            parts = _collect_fragments(model, name, unit)
            if not are_fragments(parts, shape, unit) or model.first_name(name) in fragments:
                continue
            fragments[name] = parts
        members[unit.name].append(name)
    return members, fragments


def _collect_fragments(model: FlatModel, name: str, unit: FlatParamUnit) -> Fragments:
    path = model.stored[name]
    contents = (content for content in model.paths[path] if path in content.tensors and path not in content.shards)
    places = ((model.places.get(content.rank), content) for content in contents)
    return join_parts(
        path, ((place % unit.parts, each, each.tensors[path]) for place, each in places if place is not None)
    )


def _find_stored_ties(model: FlatModel, fragments: Mapping[str, Fragments], known: ParamShapes) -> dict[str, str]:
    """Return the names in the files that share elements with a parameter."""
    ties: dict[str, str] = {}
    for name in model.stored:
        first = model.first_name(name)
        if first in fragments and name not in fragments:
            ties[name] = first
        elif name in fragments and first in model.stored and first not in known.shapes:
            ties[first] = name
    return ties


def _fit_unit(
    unit: FlatParamUnit,
    names: Sequence[str],
    known: ParamShapes,
    fragments: Mapping[str, Fragments],
    ties: Mapping[str, str],
) -> tuple[FlatLayout, tuple[str, str] | None]:
    """Return a unit's layout; if one name too many can only be a tie, also that name and the first."""
    dtype = next(iter(unit.chunks.values()))[1].stored
    parts = {name: fragments[name] for name in names if name in fragments}

    def fit(members: Sequence[str]) -> FlatLayout | None:
        if parts and any(name not in parts for name in members):
            return None
        aliases = {name: tuple(alias for alias, first in ties.items() if first == name) for name in members}
        specs = tuple(ParamSpec(name, known.shapes[name], dtype, (), aliases[name]) for name in members)
        return unit.fit_layout(specs, parts)

    layout = fit(names)
    if layout is not None:
        return layout, None
    fits = [
        (layout, tie)
        for tie in _list_repeats(names, known.shapes)
        if (layout := fit([name for name in names if name != tie[0]])) is not None
    ]
    if len(fits) != 1:
        total = sum(prod(known.shapes[name]) for name in names)
        raise UsageError(
            f"the shapes do not fit the flat parameter {unit.name!r}: the unit has another size",
            where=known.where,
            found=f"{total} elements in {len(names)} parameters of {unit.prefix or 'the outermost module'!r}",
            expected=f"{unit.numel} elements, as in the files",
            fix=GIVE_SHAPES,
        )
    layout, (alias, first) = fits[0]
    specs = tuple(
        replace(spec, aliases=(*spec.aliases, alias)) if spec.name == first else spec for spec in layout.specs
    )
    return replace(layout, specs=specs), (alias, first)


def _list_repeats(names: Sequence[str], shapes: Mapping[str, Shape]) -> Iterator[tuple[str, str]]:
    """Yield matrices with the only earlier one with an equal shape: maybe a tied head."""
    groups: dict[Shape, list[str]] = {}
    for name in names:
        if len(shapes[name]) > 1:
            groups.setdefault(shapes[name], []).append(name)
    yield from ((group[1], group[0]) for group in groups.values() if len(group) == 2)


def put_flat_model(builder: ManifestBuilder, model: FlatModel) -> set[Path]:
    """Add every parameter, and return the added paths; flat parameters with unknown members stay unchanged."""
    done: set[Path] = set()
    is_known = model.known is not None
    for path, contents in model.paths.items():
        name = strip_wrappers(str(path[-1]))
        if name in model.units and any(path in content.shards for content in contents):
            done.add(path)
            if not is_known:
                _put_unread(builder, model, path, model.units[name].numel)
        elif name in model.fragments or (name in model.ties and is_known):
            done.add(path)
        elif not is_known and _looks_sharded(model, path, contents):
            done.add(path)
            once = {model.places.get(c.rank, c.rank): c for c in reversed(contents)}
            _put_unread(builder, model, path, sum(c.tensors[path].shape[0] for c in once.values()))
    below = (*model.group.root, *model.base)
    params = _merge_params(builder, model, below)
    order = {name: at for at, name in enumerate(model.known.shapes if model.known else ())}
    for name in sorted(params, key=lambda name: order.get(name, len(order))):
        builder.put((*below, name), params[name])
        for alias in model.aliases(name):
            builder.tie((*below, alias), (*below, name))
    return done


def _merge_params(builder: ManifestBuilder, model: FlatModel, below: Path) -> dict[str, TensorEntry]:
    params: dict[str, TensorEntry] = {}
    for unit in model.units.values():
        names = [spec.name for spec in unit.members]
        if any(name in model.fragments for name in names):
            for name in names:
                params[name] = unit.merge_member(builder, name, model.fragments[name], (*below, name))
        else:
            params |= unit.merge_members(builder, unit.chunks, below)
    return params


def _looks_sharded(model: FlatModel, path: Path, contents: Sequence[RankContent]) -> bool:
    """Return True if a tensor's length differs between ranks, or it is in a chunk's storage, as with a fragment."""
    entries = [c.tensors[path] for c in contents if path in c.tensors and path not in c.shards]
    unit = model.find_unit(strip_wrappers(str(path[-1])))
    if unit is None or len(entries) < len(contents) or not all(len(entry.shape) == 1 for entry in entries):
        return False
    storages = {(c.file, storage_key(entry)) for c, entry in unit.chunks.values() if storage_key(entry) is not None}
    return len({entry.shape for entry in entries}) > 1 or any(
        (content.file, storage_key(content.tensors[path])) in storages for content in contents
    )


def _put_unread(builder: ManifestBuilder, model: FlatModel, path: Path, numel: int) -> None:
    content = model.paths[path][0]
    target = (*model.group.root, *path)
    detail = UnreadableTensor(target, _NO_SHAPES, GIVE_SHAPES)
    pieces = (Piece(Box((0,), (numel,)), content.file, Lazy(0, 0, detail)),) if numel else ()
    builder.put(target, TensorEntry(target, (numel,), content.tensors[path].stored, pieces))


def list_candidates(model: FlatModel) -> list[tuple[str, object]]:
    """Return the names that ids may have, in the model's order, with layouts."""
    places: Collection[int] = sorted(set(model.places.values()))
    candidates: dict[str, object] = {}
    if model.fragments and model.known:
        for name in model.stored:
            if name in model.fragments:
                lengths = {place: entry.shape[0] for place, (_, entry) in model.fragments[name].items()}
                candidates[name] = ("flat", tuple(lengths.get(place, 0) for place in places))
            elif name not in model.ties:
                candidates[name] = _describe_stored(model, name, len(places))
        return list(candidates.items())
    for path in model.paths:
        name = strip_wrappers(str(path[-1]))
        if name in candidates:
            continue
        if name in model.units:
            candidates[name] = ("flat", (model.units[name].chunk,) * len(places))
        elif name in model.stored:
            candidates[name] = _describe_stored(model, name, len(places))
    return list(candidates.items())


def _describe_stored(model: FlatModel, name: str, places: int) -> object:
    path = model.stored[name]
    shape = next(c.tensors[path].shape for c in model.paths[path] if path in c.tensors)
    return ("flat", (shape[0],) * places) if len(shape) == 1 else ("full", shape)
