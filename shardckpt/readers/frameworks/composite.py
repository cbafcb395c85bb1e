"""Combine several readers with one store to one checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import NamedTuple

from shardckpt.errors import FormatError, IncompleteError
from shardckpt.manifest import UNREAD, Manifest, ObjectEntry, Path, Piece, Span, TensorEntry, dotted
from shardckpt.reader import Checksum, ParamShapes, Reader
from shardckpt.readers.torchsave.objects import read_object
from shardckpt.storage.store import Store


def _keep_path(path: Path) -> Path:
    return path


class SubReader(NamedTuple):
    """One reader in a composite checkpoint."""

    reader: Reader  # reader over the same store as the others, with files of its own
    # Maps its manifest's paths to the combined manifest's paths; by default the same.
    move: Callable[[Path], Path] = _keep_path


class CompositeReader(Reader):
    """Readers that share a store. Objects in files without a reader are read on demand, as torch saved them."""

    def __init__(
        self,
        store: Store,
        manifest: Manifest,
        owners: Mapping[str, Reader],
        parts: Sequence[SubReader],
        rebuild: Callable[[Sequence[SubReader]], CompositeReader],
    ) -> None:
        super().__init__(store, manifest)
        self._owners = owners
        self._parts = parts
        self._rebuild = rebuild

    @property
    def is_flat(self) -> bool:
        """Whether any reader has flat parameters."""
        return any(part.reader.is_flat for part in self._parts)

    @property
    def needs_param_shapes(self) -> bool:
        """Whether any reader has flat parameters with unknown members."""
        return any(part.reader.needs_param_shapes for part in self._parts)

    def with_param_shapes(self, known: ParamShapes) -> Reader:
        """Return the combined readers with known shapes for flat parameters."""
        if not self.is_flat:
            return self
        return self._rebuild([part._replace(reader=part.reader.with_param_shapes(known)) for part in self._parts])

    def resolve(self, pieces: Sequence[Piece]) -> list[Piece]:
        """Return the pieces with every `Lazy` layout resolved, one batch per reader."""
        out = list(pieces)
        groups: dict[int, list[int]] = {}
        for i, piece in enumerate(pieces):
            groups.setdefault(id(self._owners[piece.file]), []).append(i)
        for places in groups.values():
            owner = self._owners[pieces[places[0]].file]
            for i, piece in zip(places, owner.resolve([pieces[i] for i in places]), strict=True):
                out[i] = piece
        return out

    def load_object(self, entry: ObjectEntry) -> object:
        """Return an object's value, by the reader of its file."""
        if entry.value is not UNREAD:
            return entry.value
        owner = self._owners.get(entry.file)
        if owner is not None:
            return owner.load_object(entry)
        if entry.layout is None:
            raise IncompleteError("this object was listed and never stored", where=dotted(entry.path))
        return read_object(self.store, entry.file, entry.layout)

    @property
    def unverified_files(self) -> tuple[str, ...]:
        """All readers' unverified files."""
        return tuple(chain.from_iterable(part.reader.unverified_files for part in self._parts))

    def checksums(self) -> Iterator[Checksum]:
        """Yield all readers' checksums in turn."""
        readers = {id(reader): reader for reader in self._owners.values()}
        return chain.from_iterable(reader.checksums() for reader in readers.values())


def join(
    format_name: str,
    store: Store,
    parts: Sequence[SubReader],
    other_files: Mapping[str, int],
    warnings: Sequence[str] = (),
    unread: Sequence[str] = (),
) -> CompositeReader:
    """Combine readers into one."""
    tensors: dict[Path, TensorEntry] = {}
    objects: dict[Path, ObjectEntry] = {}
    aliases: dict[Path, Path] = {}
    files: dict[str, int] = dict(other_files)
    metadata: dict[str, str] = {}
    owners: dict[str, Reader] = {}
    for reader, move in parts:
        manifest = reader.manifest
        _add(tensors, {move(p): e._replace(path=move(p)) for p, e in manifest.tensors.items()}, store)
        _add(objects, {move(p): replace(e, path=move(p)) for p, e in manifest.objects.items()}, store)
        aliases |= {move(a): move(b) for a, b in manifest.aliases.items()}
        assert not files.keys() & manifest.files.keys(), "each file has one reader"
        files |= manifest.files
        metadata |= manifest.metadata
        owners |= dict.fromkeys(manifest.files, reader)
    loose: dict[Path, ObjectEntry] = {
        (n,): ObjectEntry((n,), UNREAD, n, Span(0, size)) for n, size in other_files.items()
    }
    _add(objects, loose, store)
    noted = (*chain.from_iterable(part.reader.manifest.warnings for part in parts), *warnings)
    missing = tuple(chain.from_iterable(part.reader.manifest.missing for part in parts))
    passed_over = (*chain.from_iterable(part.reader.manifest.unread for part in parts), *unread)
    by_order = frozenset(part.move(root) for part in parts for root in part.reader.manifest.by_order)
    keeps_order = all(part.reader.manifest.keeps_order for part in parts)
    manifest = Manifest(
        format_name,
        files,
        tensors,
        objects,
        aliases,
        metadata,
        noted,
        missing,
        unread=passed_over,
        keeps_order=keeps_order,
        by_order=by_order,
    )

    def again(changed: Sequence[SubReader]) -> CompositeReader:
        return join(format_name, store, changed, other_files, warnings, unread)

    return CompositeReader(store, manifest, owners, parts, again)


def _add(
    known: dict[Path, TensorEntry] | dict[Path, ObjectEntry],
    more: Mapping[Path, TensorEntry] | Mapping[Path, ObjectEntry],
    store: Store,
) -> None:
    twice = known.keys() & more.keys()
    if twice:
        raise FormatError(f"{dotted(min(twice, key=str))!r} is in two places", where=store.url)
    known.update(more)  # type: ignore[arg-type]  # both of one kind
