"""Merge the shards that ranks wrote into full tensors.

Parsers return each tensor's box in a file, as `Shard`. This module merges replicas, compares dtypes, and names elements
that no file contains with the file that should contain them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, pairwise
from math import prod
from typing import NamedTuple

from shardckpt.boxes import Box, Shape
from shardckpt.encodings.pickle_stubs import PerRankValue
from shardckpt.errors import AmbiguousError, FormatError
from shardckpt.manifest import Lazy, Manifest, ObjectEntry, Path, Piece, TensorEntry, dotted
from shardckpt.plan.naming.sections import find_sections, model_paths
from shardckpt.plan.naming.weights import names as list_other_weights
from shardckpt.reader import Reader
from shardckpt.readers.torchsave.replicas import (
    Replicas,
    combine_values,
    find_different_pieces,
    find_replicas,
    join_replicas,
)
from shardckpt.readers.torchsave.storages import LEAVE_OUT, UnreadableTensor
from shardckpt.readers.torchsave.tensor_views import slice_layout

KEEP_ONE_SAVE = "Keep each save alone in its own folder."
OTHER_SAVE = "The files are from different saves (keep each save in its own folder), or one is damaged."

MAX_MISSING = 64  # maximum missing boxes of a tensor that are named individually
_MAX_SEARCHED = 1 << 16  # maximum boxes of a tensor for which missing boxes are searched
_MAX_SHOWN = 4  # maximum names in a warning


class Shard(NamedTuple):
    """The part of a tensor that one file has."""

    file: str  # name of the file, for messages
    dtype: str  # stored dtype
    pieces: Sequence[Piece]  # the tensor's boxes with the locations of their bytes


class RankOrigin(NamedTuple):
    """A file, the rank that wrote it, and the rank count; 0 if unknown."""

    file: str
    rank: int
    world: int


@dataclass(slots=True)
class PathContent:
    """Tensors and values below one path in a manifest, by the remaining path."""

    tensors: dict[Path, TensorEntry] = field(default_factory=dict)
    objects: dict[Path, ObjectEntry] = field(default_factory=dict)
    aliases: dict[Path, Path] = field(default_factory=dict)

    def paths(self) -> Iterator[Path]:
        """Yield every path."""
        yield from self.tensors
        yield from self.objects


@dataclass(slots=True)
class ManifestBuilder:
    """Collects merged tensors and values."""

    url: str  # URL of the store, for messages
    content: PathContent = field(default_factory=PathContent)  # tensors, values and tied tensors by path
    missing_files: dict[str, None] = field(default_factory=dict)  # labels of missing files
    warnings: list[str] = field(default_factory=list)  # warnings, one sentence each
    unread: list[str] = field(default_factory=list)  # values that the reader skips
    missing: list[str] = field(default_factory=list)  # missing files whose content is unknown
    # Optimizers whose ids were replaced with names by the order of the model.
    by_order: set[Path] = field(default_factory=set)

    @property
    def tensors(self) -> dict[Path, TensorEntry]:
        """Tensors by path."""
        return self.content.tensors

    @property
    def objects(self) -> dict[Path, ObjectEntry]:
        """Values by path."""
        return self.content.objects

    def put(self, path: Path, entry: TensorEntry | ObjectEntry) -> None:
        """Add a tensor or a value."""
        if isinstance(entry, ObjectEntry):
            self.objects[path] = replace(entry, path=path)
            return
        if path in self.tensors:
            raise FormatError(f"{dotted(path)!r} is in two places", where=self.url)
        self.tensors[path] = entry._replace(path=path)

    def put_value(self, path: Path, value: object) -> None:
        """Add a value."""
        self.objects[path] = ObjectEntry(path, value)

    def put_unreadable(self, path: Path, entry: TensorEntry, kind: str, fix: str = LEAVE_OUT) -> None:
        """Add a tensor that is listed but raises an error when it is read."""
        lost = entry.pieces[0]._replace(layout=Lazy(0, 0, UnreadableTensor(path, kind, fix)))
        self.put(path, entry._replace(pieces=(lost,)))

    def tie(self, alias: Path, first: Path) -> None:
        """Add a tensor's other name, unless the name is in use."""
        if alias not in self.tensors:
            self.put(alias, self.tensors[first])
            self.content.aliases[alias] = first

    def add(self, content: PathContent) -> None:
        """Add tensors and values under their own paths."""
        for path, entry in content.tensors.items():
            self.put(path, entry)
        self.content.objects |= content.objects
        self.content.aliases |= content.aliases

    def build_manifest(self, source: Manifest, format_name: str) -> Manifest:
        """Return the merged checkpoint's manifest; files and warnings are kept."""
        return replace(
            source,
            format=format_name,
            files={**source.files, **dict.fromkeys(self.missing_files, -1)},
            tensors=self.content.tensors,
            objects=self.content.objects,
            aliases=self.content.aliases,
            warnings=(*source.warnings, *self.warnings),
            missing=(*source.missing, *self.missing),
            unread=(*source.unread, *self.unread),
            by_order=frozenset(self.by_order),
        )


def merge_shards(
    builder: ManifestBuilder,
    path: Path,
    shape: Shape,
    shards: Iterable[Shard],
    missing: Iterable[tuple[Box, str]] = (),
    dtype: str = "",
) -> TensorEntry:
    """Merge one tensor's shards; among equal replicas, the first is used."""
    found: dict[Box, list[Piece]] = {}
    first: Shard | None = None
    for shard in shards:
        expected = first.dtype if first else dtype or shard.dtype
        if shard.dtype != expected:
            raise FormatError(
                f"{dotted(path)!r} has several dtypes",
                where=f"{builder.url}/{shard.file}",
                found=shard.dtype,
                expected=f"{expected}, as in {first.file}" if first else expected,
                fix=OTHER_SAVE,
            )
        first = first or shard
        for piece in shard.pieces:
            found.setdefault(piece.box, []).append(piece)
    pieces = {box: join_replicas(dotted(path), first.dtype, each) for box, each in found.items() if first}
    if sum(box.volume for box in pieces) < prod(shape):
        lost = ((box, file) for box, file in islice(missing, _MAX_SEARCHED) if box not in pieces)
        for box, file in islice(lost, MAX_MISSING):
            builder.missing_files[file] = None
            kind = f"partly in {file}, which is missing"
            pieces[box] = Piece(box, file, Lazy(0, 0, UnreadableTensor(path, kind)))
    stored = dtype or (first.dtype if first else "float32")
    return TensorEntry(path, shape, stored, tuple(pieces.values()))


def join_entries(path: Path, entries: Sequence[TensorEntry]) -> TensorEntry:
    """Return one tensor from several ranks, each with at most one piece, like `join_replicas`."""
    first = entries[0]
    for other in entries[1:]:
        if (first.shape, first.stored) != (other.shape, other.stored):
            raise FormatError(
                f"{dotted(path)!r} differs between ranks",
                found=f"{other.stored} {other.shape}",
                expected=f"{first.stored} {first.shape}",
                fix=OTHER_SAVE,
            )
    columns = zip(*(entry.pieces for entry in entries), strict=True)
    return first._replace(pieces=tuple(join_replicas(dotted(path), first.stored, each) for each in columns))


def merge_equal(
    path: Path, files: Sequence[str], entries: Sequence[TensorEntry | ObjectEntry]
) -> TensorEntry | ObjectEntry:
    """Return the one tensor or value that several ranks saved."""
    tensors = [entry for entry in entries if isinstance(entry, TensorEntry)]
    if len(tensors) == len(entries) and len({(entry.shape, entry.stored) for entry in tensors}) == 1:
        return join_entries(path, tensors)
    values = (entry.value if isinstance(entry, ObjectEntry) else entry for entry in entries)
    return ObjectEntry(path, combine_values(path, zip(files, values, strict=True)))


def move_rank_values(reader: Reader, merged: Manifest) -> Manifest:
    """Replace full tensors that differ between ranks by `PerRankValue`, except weights and optimizers; warn of all."""
    moved = _find_rank_values(reader, merged)
    tensors = {path: entry for path, entry in merged.tensors.items() if path not in moved}
    objects = {**merged.objects, **{path: ObjectEntry(path, value) for path, value in moved.items()}}
    return replace(
        merged,
        tensors=tensors,
        objects=objects,
        aliases={alias: path for alias, path in merged.aliases.items() if not {alias, path} & moved.keys()},
        warnings=(*merged.warnings, *_list_different(tensors, objects)),
    )


def _find_rank_values(reader: Reader, merged: Manifest) -> dict[Path, PerRankValue]:
    """Return the values for tensors that each rank has in full, and that are known to differ."""
    full = {path: found for path, entry in merged.tensors.items() if (found := _find_full_replicas(entry))}
    if not full:
        return {}
    try:
        sections = find_sections(merged)
    except AmbiguousError:
        return {}  # any subtree may be a model
    weights = set(model_paths(merged, sections))
    kept = (*sections.optimizers, *((name,) for name in list_other_weights(merged)))
    others = {
        path: replicas
        for path, replicas in full.items()
        if path not in weights and not any(path[: len(root)] == root for root in kept)
    }
    different = find_different_pieces(reader, list(others.values()))
    return {
        path: PerRankValue(replicas.pieces[0].file, piece.file)
        for (path, replicas), piece in zip(others.items(), different, strict=True)
        if piece is not None
    }


def _find_full_replicas(entry: TensorEntry) -> Replicas | None:
    """Return the replicas of a tensor that each rank has in full; None if it has none."""
    is_full = len(entry.pieces) == 1 and entry.pieces[0].box.size == entry.shape
    return find_replicas(entry.pieces[0]) if is_full else None


def _list_different(tensors: Mapping[Path, TensorEntry], objects: Mapping[Path, ObjectEntry]) -> Iterator[str]:
    """Yield a warning that names the tensors and values that are known to differ between ranks."""
    names = [dotted(path) for path, entry in tensors.items() if any(map(_find_different, entry.pieces))]
    names += [dotted(path) for path, entry in objects.items() if isinstance(entry.value, PerRankValue)]
    if names:
        more = f" and {len(names) - _MAX_SHOWN} more" if len(names) > _MAX_SHOWN else ""
        yield f"{', '.join(names[:_MAX_SHOWN])}{more}: the values differ between ranks and cannot be read"


def _find_different(piece: Piece) -> Piece | None:
    replicas = find_replicas(piece)
    return None if replicas is None else replicas.find_different()


def slice_shard(entry: TensorEntry, boxes: Iterable[tuple[Box, int]], order: Sequence[int] = ()) -> list[Piece]:
    """Return the pieces for parts of a rank's 1-D tensor."""
    [piece] = entry.pieces
    return [_slice_piece(piece, box, first, order) for box, first in boxes]


def _slice_piece(piece: Piece, box: Box, first: int, order: Sequence[int]) -> Piece:
    layout, replicas = piece.layout, find_replicas(piece)
    assert isinstance(layout, Lazy), "files of torch.save are opened lazily"
    if replicas is None:
        return piece._replace(box=box, layout=slice_layout(layout, first, box.size, order))
    parts = tuple(_slice_piece(each, box, first, order) for each in replicas.pieces)
    return piece._replace(box=box, layout=layout._replace(detail=replicas._replace(pieces=parts)))


def label_rank_file(place: int, parts: int, world: int) -> str:
    """Return the label for messages of the file with part `place` of `parts`."""
    return f"the file of rank {place}" if parts == world else f"a file with part {place} of {parts}"


def split_content(manifest: Manifest, roots: Collection[Path]) -> tuple[dict[Path, PathContent], PathContent]:
    """Split a manifest by root paths; return their content, and the rest."""
    lengths = sorted({len(root) for root in roots})
    contents, rest = {root: PathContent() for root in roots}, PathContent()

    def find(path: Path) -> tuple[PathContent, int]:
        root = next((path[:n] for n in lengths if path[:n] in contents), None)
        return (rest, 0) if root is None else (contents[root], len(root))

    for path, tensor in manifest.tensors.items():
        content, n = find(path)
        content.tensors[path[n:]] = tensor
    for path, value in manifest.objects.items():
        content, n = find(path)
        content.objects[path[n:]] = value
    for path, first in manifest.aliases.items():
        content, n = find(path)
        if find(first)[0] is content:
            content.aliases[path[n:]] = first[n:]
    return contents, rest


def require_one_save(origins: Iterable[RankOrigin], url: str) -> None:
    """Require that files are from one save: equal rank counts, each rank once."""
    ordered = sorted(origins, key=lambda origin: origin.rank)
    worlds = [origin for origin in ordered if origin.world]
    odd = [
        f"{worlds[0].world} ranks in {worlds[0].file} and {origin.world} in {origin.file}"
        for origin in worlds
        if origin.world != worlds[0].world
    ]
    odd += [
        f"rank {one.rank} in {one.file} and in {other.file}"
        for one, other in pairwise(ordered)
        if one.rank == other.rank and one.file != other.file
    ]
    odd += [
        f"rank {origin.rank} in {origin.file}, of {worlds[0].world} ranks"
        for origin in ordered
        if worlds and origin.rank >= worlds[0].world
    ]
    if odd:
        raise FormatError(
            "rank files from different saves are in one folder", where=url, found=odd[0], fix=KEEP_ONE_SAVE
        )


def note_missing_ranks(builder: ManifestBuilder, world: int, names: Mapping[int, Collection[object]]) -> None:
    """Warn about ranks without a file."""
    # If ranks have different tensor names, the content of missing files is unknown.
    missing = world - len(names)
    if missing <= 0:
        return
    rank = next(rank for rank in range(world) if rank not in names)
    more = f" and {missing - 1} more" if missing > 1 else ""
    builder.warnings.append(f"of {world} ranks, rank {rank}{more} left no file here")
    if len({frozenset(each) for each in names.values()}) > 1:
        builder.missing.append(f"the file of rank {rank} of {world}")
