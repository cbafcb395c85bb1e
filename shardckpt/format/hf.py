"""Safetensors as Hugging Face lays them out: one file, shards with or without an index, adapters, DCP's own layout.

Also what `consolidate` itself writes beside a model: `optimizer*.safetensors` and `param_groups.json`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain

from shardckpt.boxes import Box, Shape, whole
from shardckpt.errors import CheckpointError, FormatError, IncompleteError, UnsafeError
from shardckpt.format.reader import Evidence, Format, Reader, Source
from shardckpt.format.safetensors import Header, looks_like_safetensors, parse_json, read_headers
from shardckpt.manifest import Manifest, ObjectEntry, Path, Piece, Span, TensorEntry
from shardckpt.storage.store import Store, read_bytes

SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
PARAM_GROUPS = "param_groups.json"
OPTIMIZER = "optimizer"
_SHARDED_FOLDER = "sharded"
_SHARDING_INFO = "DCP_SHARDING_INFO"
_MAX_INDEX_BYTES = 200_000_000
_NUMBERED = re.compile(r"(?P<stem>.+)-(?P<i>\d{5})-of-(?P<n>\d{5})\.safetensors")
_RANKED = re.compile(r"shard-(?P<rank>\d{5})-(?P<rest>.+)\.safetensors")


def recognise(source: Source) -> Evidence:
    """Recognise a safetensors file, or a folder that holds some."""
    if source.file is not None and source.file.endswith(INDEX_SUFFIX):
        return Evidence.NAME
    names = _payload_names(source)
    if not names:
        return Evidence.NONE
    try:
        fits = looks_like_safetensors(source.head(names[0], 16))
    except (CheckpointError, OSError):
        return Evidence.NAME
    if fits:
        return Evidence.STRUCTURE
    return Evidence.NAME if names[0].endswith((SUFFIX, INDEX_SUFFIX)) else Evidence.NONE


def _payload_names(source: Source) -> list[str]:
    if source.file is not None:
        return [source.file]
    names = [n for n in source.files if n.endswith(SUFFIX)] or [n for n in source.files if n.endswith(INDEX_SUFFIX)]
    if not names and _SHARDED_FOLDER in source.folders:
        names = [e.name for e in source.store.list(_SHARDED_FOLDER) if e.name.endswith(SUFFIX)]
    return names


def open_source(source: Source) -> Reader:
    """Open a recognised source.

    Raises:
        CheckpointError: A header or an index is damaged, or a file that the names promise is missing.
        StorageError: The store failed.
    """
    if source.file is not None:
        if source.file.endswith(INDEX_SUFFIX):
            return _open_listed(source.store, _sizes(source.store, ""), [source.file])
        return _open_files(source.store, {source.file: source.listing[source.file].size}, {})
    sizes = _sizes(source.store, "")
    if not sizes and _SHARDED_FOLDER in source.folders:
        sizes = _sizes(source.store, _SHARDED_FOLDER)
    indexes = [n for n in source.files if n.endswith(INDEX_SUFFIX)]
    return _open_listed(source.store, sizes, indexes)


def _sizes(store: Store, folder: str) -> dict[str, int]:
    return {e.name: e.size for e in store.list(folder) if e.name.endswith(SUFFIX) and not e.is_folder}


def _open_listed(store: Store, sizes: Mapping[str, int], indexes: Sequence[str]) -> Reader:
    """Open the files that the indexes name, and of the rest those that no index competes with."""
    weight_map: dict[str, str] = {}
    for index in indexes:
        weight_map |= _read_index(store, index)
    model_indexed = any(not name.startswith(OPTIMIZER) for name in indexes)
    wanted = set(weight_map.values())
    loose = [n for n in sizes if n not in wanted and not (model_indexed and not n.startswith(OPTIMIZER))]
    chosen = {name: sizes.get(name, -1) for name in sorted(wanted | set(_preferred(loose)))}
    missing = [name for name, size in chosen.items() if size < 0]
    if missing:
        tensor = next(t for t, f in weight_map.items() if f == missing[0])
        raise IncompleteError(
            f"{missing[0]} is missing, and with it the whole of {tensor!r}",
            where=store.url,
            found=f"{len(chosen) - len(missing)} of {len(chosen)} files of the index",
            fix="Copy the missing files beside the others.",
        )
    _check_numbering(store, chosen)
    ignored = sorted(n for n in sizes if n not in chosen)
    warnings = [f"{len(ignored)} safetensors files are not in the index and are ignored: {', '.join(ignored[:4])}"]
    return _open_files(store, chosen, weight_map, warnings if ignored else [])


def _preferred(loose: Sequence[str]) -> list[str]:
    """Of files that no index names: the one that readers load by default, else all of them."""
    optimizer = [n for n in loose if n.startswith(OPTIMIZER)]
    others = [n for n in loose if not n.startswith(OPTIMIZER)]
    for name in ("model.safetensors", "adapter_model.safetensors"):
        if name in others:
            return [name, *optimizer]
    return [*others, *optimizer]


def _read_index(store: Store, name: str) -> dict[str, str]:
    where = f"{store.url}/{name}"
    size = store.size(name)
    if size > _MAX_INDEX_BYTES:
        raise UnsafeError("the index is too large", where=where, found=f"{size} bytes", expected=_MAX_INDEX_BYTES)
    raw = parse_json(read_bytes(store, name, 0, size), where=where)
    weight_map = raw.get("weight_map") if isinstance(raw, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(f, str) for f in weight_map.values()):
        raise FormatError("the index has no `weight_map` from names to files", where=where)
    folder = name.rpartition("/")[0]
    for file in set(weight_map.values()):
        if not _is_plain(file):
            raise UnsafeError("the index names a file outside its folder", where=where, found=file)
    return {key: f"{folder}/{file}" if folder else file for key, file in weight_map.items()}


def _is_plain(name: str) -> bool:
    return bool(name) and not set(name) & set("/\\\0") and name not in {".", ".."}


def _check_numbering(store: Store, names: Iterable[str]) -> None:
    """Refuse a folder in which `-i-of-n` names, or DCP's rank numbers, are not all there."""
    groups: dict[tuple[str, int], set[int]] = {}
    ranks: dict[int, set[str]] = {}
    for name in names:
        if match := _NUMBERED.fullmatch(name.rpartition("/")[2]):
            groups.setdefault((match["stem"], int(match["n"])), set()).add(int(match["i"]))
        if match := _RANKED.fullmatch(name.rpartition("/")[2]):
            ranks.setdefault(int(match["rank"]), set()).add(match["rest"])
    holes = [
        f"{stem}-{i:05d}-of-{n:05d}{SUFFIX}"
        for (stem, n), seen in groups.items()
        if not stem.startswith("shard-")
        for i in range(1, min(n, 100_000) + 1)
        if i not in seen
    ]
    if ranks:
        rests = set().union(*ranks.values())
        holes += [
            f"shard-{rank:05d}-{rest}{SUFFIX}"
            for rank in range(1, max(ranks) + 1)
            for rest in sorted(rests)
            if rest not in ranks.get(rank, set())
        ]
    if holes:
        raise IncompleteError(
            f"{len(holes)} files are missing, the first is {holes[0]}",
            where=store.url,
            fix="Copy the missing files beside the others.",
        )


def _open_files(
    store: Store, sizes: Mapping[str, int], weight_map: Mapping[str, str], warnings: Sequence[str] = ()
) -> Reader:
    headers = read_headers(store, sizes)
    if any(_SHARDING_INFO in header.metadata for header in headers.values()):
        tensors = _boxes_of_dcp(store, headers)
    else:
        tensors = _whole_tensors(store, headers, weight_map)
    notes = [
        f"{name} is {sizes[name] - header.data_start - header.data_bytes} bytes longer than its header says"
        for name, header in headers.items()
        if sizes[name] > header.data_start + header.data_bytes
    ]
    metadata = dict(chain.from_iterable(h.metadata.items() for h in headers.values()))
    aliases = _aliases(tensors, metadata)
    for name in aliases:
        tensors[name] = TensorEntry(name, *_same_as(tensors[aliases[name]]))
    objects: dict[Path, ObjectEntry] = {}
    if any(name.startswith(OPTIMIZER) for name in sizes):
        tensors = _split_optimizer(tensors)
        objects = _param_groups(store)
        aliases = {("model", *name): ("model", *kept) for name, kept in aliases.items()}
    return Reader(
        store,
        Manifest(
            format="adapter" if any(n.startswith("adapter_model") for n in sizes) else "safetensors",
            files=dict(sizes),
            tensors=tensors,
            objects=objects,
            aliases=aliases,
            metadata={k: v for k, v in metadata.items() if (k,) not in aliases and not k.startswith("DCP_")},
            warnings=(*warnings, *notes),
        ),
    )


def _whole_tensors(
    store: Store, headers: Mapping[str, Header], weight_map: Mapping[str, str]
) -> dict[Path, TensorEntry]:
    tensors: dict[Path, TensorEntry] = {}
    for file, header in headers.items():
        for name, (dtype, shape, begin, end) in header.tensors.items():
            if weight_map.get(name, file) != file:
                continue
            path = (name,)
            if path in tensors:
                other = tensors[path].pieces[0].file
                raise FormatError(f"tensor {name!r} is in two files", where=f"{store.url}/{file}", found=other)
            span = Span(header.data_start + begin, end - begin)
            tensors[path] = TensorEntry(path, shape, dtype, (Piece(whole(shape), file, span),))
    for name, file in weight_map.items():
        if (name,) not in tensors:
            raise IncompleteError(
                f"tensor {name!r} is not in the file the index names", where=f"{store.url}/{file}", found="no such key"
            )
    return tensors


def _boxes_of_dcp(store: Store, headers: Mapping[str, Header]) -> dict[Path, TensorEntry]:
    """Join the chunks that torch's HuggingFaceStorageWriter leaves in one file per rank.

    A tensor's shape is the hull of its chunks: the layout does not store it. `--shapes-from` checks it.
    """
    chunks: dict[str, list[Piece]] = {}
    dtypes: dict[str, str] = {}
    for file, header in headers.items():
        offsets = _sharding_info(header, f"{store.url}/{file}")
        for name, (dtype, shape, begin, end) in header.tensors.items():
            offset = offsets.get(name, (0,) * len(shape))
            piece = Piece(Box(offset, shape), file, Span(header.data_start + begin, end - begin))
            known = chunks.setdefault(name, [])
            if len(offset) != len(shape) or (known and len(known[0].box.size) != len(shape)):
                raise FormatError(f"chunks of {name!r} differ in their dimensions", where=f"{store.url}/{file}")
            if dtypes.setdefault(name, dtype) != dtype:
                raise FormatError(
                    f"chunks of {name!r} differ in dtype",
                    where=f"{store.url}/{file}",
                    found=dtype,
                    expected=dtypes[name],
                )
            if all(piece.box != other.box for other in known):
                known.append(piece)
    return {
        (name,): TensorEntry((name,), _hull(pieces), dtypes[name], tuple(p for p in pieces if p.box.volume))
        for name, pieces in chunks.items()
    }


def _hull(pieces: Sequence[Piece]) -> Shape:
    return tuple(max(stops) for stops in zip(*(piece.box.stop for piece in pieces), strict=True))


def _sharding_info(header: Header, where: str) -> dict[str, Shape]:
    raw = parse_json(header.metadata.get(_SHARDING_INFO, "{}").encode(), where=where)
    offsets: dict[str, Shape] = {}
    try:
        for name, info in raw.items():  # type: ignore[attr-defined]
            offset = info["saved_offsets"]
            if not all(type(n) is int and 0 <= n < 1 << 62 for n in offset):
                raise TypeError
            offsets[name] = tuple(offset)
    except (TypeError, KeyError, AttributeError) as error:
        raise FormatError(f"{_SHARDING_INFO} does not map names to saved_offsets", where=where) from error
    return offsets


def _aliases(tensors: Mapping[Path, TensorEntry], metadata: Mapping[str, str]) -> dict[Path, Path]:
    """Read the names that `save_model` of safetensors (and `consolidate`) drop, left as metadata `dropped: kept`."""
    return {(k,): (v,) for k, v in metadata.items() if (k,) not in tensors and (v,) in tensors}


def _same_as(entry: TensorEntry) -> tuple[Shape, str, tuple[Piece, ...]]:
    return entry.shape, entry.stored, entry.pieces


def _split_optimizer(tensors: Mapping[Path, TensorEntry]) -> dict[Path, TensorEntry]:
    """Put what `optimizer*.safetensors` holds below `optimizer`, the rest below `model`."""
    moved: dict[Path, TensorEntry] = {}
    for path, entry in tensors.items():
        name = str(path[0])
        file = entry.pieces[0].file if entry.pieces else ""
        if file.startswith(OPTIMIZER):
            fqn, _, slot = name.rpartition("/")
            path = (OPTIMIZER, "state", fqn, slot)
        else:
            path = ("model", name)
        moved[path] = TensorEntry(path, entry.shape, entry.stored, entry.pieces)
    return moved


def _param_groups(store: Store) -> dict[Path, ObjectEntry]:
    listed = {e.name: e.size for e in store.list()}
    groups: object = []
    scalars: object = {}
    if PARAM_GROUPS in listed:
        where = f"{store.url}/{PARAM_GROUPS}"
        if listed[PARAM_GROUPS] > _MAX_INDEX_BYTES:
            raise UnsafeError("the file is too large", where=where, found=f"{listed[PARAM_GROUPS]} bytes")
        raw = parse_json(read_bytes(store, PARAM_GROUPS, 0, listed[PARAM_GROUPS]), where=where)
        if not isinstance(raw, dict):
            raise FormatError("no JSON object", where=where)
        groups, scalars = raw.get("param_groups", []), raw.get("non_tensor_state", {})
    objects: dict[Path, ObjectEntry] = {}
    for path, value in (((OPTIMIZER, "param_groups"), groups), ((OPTIMIZER, "state"), scalars)):
        objects[path] = ObjectEntry(path, value)
    return objects


FORMAT = Format(
    name="safetensors",
    title="Hugging Face safetensors",
    looks_for="*.safetensors files, or model.safetensors.index.json",
    recognise=recognise,
    open=open_source,
)
