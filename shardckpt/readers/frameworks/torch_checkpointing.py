"""Reader of folders by `torch_checkpointing` (Meta, 0.1): one file per item and rank, and `metadata.pkl`.

`{item}_{rank}.pt` contains a rank's state, with sharded tensors as DTensors. The metadata names each of these tensors,
its global shape, and each rank's file if it is not the usual one. Paths are the item, followed by keys. Items that were
saved without a resharder are not in the metadata: the lowest rank's files are read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

from shardckpt.encodings import typed_json
from shardckpt.encodings.pickle_reader import Limits, load
from shardckpt.errors import FormatError, IncompleteError, UnsafeError, UnsupportedError
from shardckpt.manifest import Manifest, Path, dotted
from shardckpt.reader import Evidence, Format, Reader, Source
from shardckpt.readers.ranks.merge_local_states import MergedTorchReader
from shardckpt.readers.ranks.rank_files import RankFile
from shardckpt.readers.torchsave.reader import open_files
from shardckpt.storage.store import read_bytes

METADATA = "metadata.pkl"
_FILE = re.compile(r"(?P<item>[a-zA-Z0-9_-]+)_(?P<rank>\d{1,7})\.pt")
_LIMITS = Limits(nbytes=1 << 29)
_MAX_RANKS = 1 << 20
_HEAD_BYTES = 512


def recognize(source: Source) -> Evidence:
    """Recognize a folder by words in its metadata that no other writer uses."""
    if source.file is not None or METADATA not in source.files:
        return Evidence.NONE
    head = source.head(METADATA, _HEAD_BYTES)
    is_pickle = head[:1] == b"\x80" and b"nested_path_to_metadata" in head
    return Evidence.STRUCTURE if is_pickle else Evidence.NONE


def open_source(source: Source) -> Reader:
    """Open a recognized source."""
    size = source.listing[METADATA].size
    where = f"{source.store.url}/{METADATA}"
    if size > _LIMITS.nbytes:
        raise UnsafeError(
            "the metadata is larger than in any checkpoint",
            where=where,
            found=f"{size} bytes",
            expected=f"at most {_LIMITS.nbytes}",
        )
    metadata = load(read_bytes(source.store, METADATA, 0, size), where=where, limits=_LIMITS)
    world, items = _read_items(metadata, where)
    ranked = list(_files(items, world, source, where))
    known = {file.name for file in ranked}
    other_files = {
        name: _FILE.fullmatch(name) for name in source.files if name not in known and not name.startswith(METADATA)
    }
    alone = {name: str(match["item"]) for name, match in other_files.items() if match and int(match["rank"]) == 0}
    prefixes: dict[str, Path] = {file.name: file.prefix for file in ranked}
    prefixes |= {name: (item,) for name, item in alone.items()}
    sizes = {name: source.listing[name].size for name in prefixes}
    reader = MergedTorchReader(open_files(source.store, sizes, prefixes, FORMAT.name, allow_shards=True), ranked)
    _check_shapes(reader.manifest, items, where)
    others = [name for name, match in other_files.items() if match and int(match["rank"]) > 0]
    note = (f"{others[0]} and {len(others) - 1} more are other ranks' own and are not read",) if others else ()
    manifest = reader.manifest
    reader.manifest = replace(manifest, format=FORMAT.name, warnings=(*manifest.warnings, *note))
    return reader


def _read_items(metadata: object, where: str) -> tuple[int, dict[str, Mapping[object, object]]]:
    """Return how many ranks there are, and each item's metadata."""
    world = metadata.get("world_size") if isinstance(metadata, dict) else None
    items = metadata.get("metadata") if isinstance(metadata, dict) else None
    if type(world) is not int or not 0 < world <= _MAX_RANKS or not isinstance(items, dict):
        raise FormatError("the metadata names no ranks and no items", where=where, found=metadata)
    if not all(isinstance(key, str) and isinstance(value, dict) for key, value in items.items()):
        raise FormatError("the metadata's items must be a dict", where=where)
    return world, {str(key): value for key, value in items.items()}


def _files(items: Mapping[str, Mapping[object, object]], world: int, source: Source, where: str) -> Iterator[RankFile]:
    """Yield every rank's file for every item."""
    seen: set[str] = set()
    for item, fields in items.items():
        layouts = fields.get("rank_to_layout_info")
        for rank in range(world):
            layout = layouts.get(rank) if isinstance(layouts, dict) else None
            name = _name(item, rank, layout, where)
            if name not in source.listing or source.listing[name].is_folder:
                raise IncompleteError(
                    f"the file of rank {rank} of {item!r} is not there",
                    where=source.url,
                    found=f"{len(source.files)} files",
                    expected=name,
                    fix="Copy the missing file next to the others.",
                )
            if name in seen:
                raise FormatError("the metadata gives two ranks one file", where=where, found=name)
            seen.add(name)
            yield RankFile(name, (name,), (item,), rank, world)


def _name(item: str, rank: int, layout: object, where: str) -> str:
    """Return one file's name."""
    if layout is None:
        return f"{item}_{rank}.pt"
    name = layout.get("file_path") if isinstance(layout, dict) else None
    if not isinstance(name, str) or not name.endswith(".pt") or "/" in name:
        raise UnsupportedError(
            f"{item!r} is not in torch.save files in this folder",
            where=where,
            found=name,
            expected=f"{item}_{rank}.pt",
            fix="Merge safetensors items with torch_checkpointing.hf, and point at the result.",
        )
    return name


def _check_shapes(manifest: Manifest, items: Mapping[str, Mapping[object, object]], where: str) -> None:
    """Require that the files' global shapes equal the shapes in the metadata."""
    for item, fields in items.items():
        tensors = fields.get("nested_path_to_metadata")
        for key, groups in tensors.items() if isinstance(tensors, dict) else ():
            path: Path = (item, *_keys(key, where))
            entry = manifest.tensors.get(path)
            shape = _shape(groups)
            if entry is None or (shape is not None and entry.shape != shape):
                raise FormatError(
                    f"{dotted(path)!r} is not as in its metadata",
                    where=where,
                    found="nothing" if entry is None else entry.shape,
                    expected=shape or "a tensor",
                    fix="The files are from different saves, or one is damaged.",
                )


def _keys(text: object, where: str) -> Path:
    """Return a path's keys, which the metadata stores as a JSON list."""
    return typed_json.load(Path, text.encode("utf-8", "surrogatepass") if isinstance(text, str) else b"", where=where)


def _shape(groups: object) -> tuple[int, ...] | None:
    """Return a tensor's global shape in the metadata; None if it is not stored."""
    first = groups[0] if isinstance(groups, list) and groups else None
    sharding = first.get("sharding_metadata") if isinstance(first, dict) else None
    data = sharding.get("data") if isinstance(sharding, dict) else None
    shape = data.get("global_shape") if isinstance(data, dict) else None
    return tuple(shape) if isinstance(shape, list | tuple) else None


FORMAT = Format(
    name="torch-checkpointing",
    title="folder by torch_checkpointing",
    looks_for="torch_checkpointing's metadata.pkl next to <item>_<rank>.pt",
    recognize=recognize,
    open=open_source,
)
