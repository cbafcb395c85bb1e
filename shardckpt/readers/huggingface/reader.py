"""Reader of safetensors in Hugging Face's layouts: one file, shards with or without index, adapters, DCP's layout.

Also reads the optimizer that `consolidate` writes next to a model: `optimizer*.safetensors` and `param_groups.json`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, islice

from shardckpt.boxes import Box, Shape, full_box
from shardckpt.dtypes import UNKNOWN
from shardckpt.encodings.safetensors import Header, looks_like_safetensors, parse_json, read_headers
from shardckpt.errors import CheckpointError, FormatError
from shardckpt.manifest import Manifest, ObjectEntry, Path, Piece, Span, TensorEntry
from shardckpt.native.payload import KEY
from shardckpt.reader import Evidence, Format, Reader, Source
from shardckpt.readers.huggingface.index_files import (
    INDEX_SUFFIX,
    OPTIMIZER,
    SUFFIX,
    Files,
    choose,
    payload_sizes,
    read_json,
    two_files_error,
    unindexed_error,
)
from shardckpt.readers.huggingface.optimizer_keys import OptimizerFile
from shardckpt.readers.torchsave.reader import CONFIGURATION, SUFFIXES
from shardckpt.readers.torchsave.replicas import join_replicas, resolve_replicas
from shardckpt.storage.store import Store

_SHARDED_FOLDER = "sharded"
_SHARDING_INFO = "DCP_SHARDING_INFO"
_STATE = "state"
_SHOWN = 4
_OTHERS = ("DCP_", KEY)  # prefixes of metadata keys that describe one file and do not apply to converted files


def recognize(source: Source) -> Evidence:
    """Recognize a safetensors file, or a folder that contains some."""
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
    """Open a recognized source."""
    if source.file is not None:
        if source.file.endswith(INDEX_SUFFIX):
            return _open_files(source.store, choose(source.store, payload_sizes(source.store), [source.file]))
        return _open_files(source.store, Files({source.file: source.listing[source.file].size}))
    sizes = payload_sizes(source.store)
    if not sizes and _SHARDED_FOLDER in source.folders:
        sizes = payload_sizes(source.store, _SHARDED_FOLDER)
    indexes = [n for n in source.files if n.endswith(INDEX_SUFFIX)]
    files = choose(source.store, sizes, indexes)
    others = [name for name in source.files if name.endswith(SUFFIXES) and name not in CONFIGURATION]
    return _open_files(
        source.store, replace(files, warnings=(*files.warnings, *_list_ignored(others)), unread=tuple(others))
    )


def _list_ignored(others: Sequence[str]) -> list[str]:
    """Return a warning about skipped `torch.save` files: a Trainer's optimizer, or the same model."""
    shown = ", ".join(others[:_SHOWN])
    more = f" and {len(others) - _SHOWN} more" if len(others) > _SHOWN else ""
    return [f"torch files here are ignored, name one to read it: {shown}{more}"] if others else []


class _ShardReader(Reader):
    """Reads shards that several ranks wrote, and compares replicas before it reads them."""

    def resolve(self, pieces: Sequence[Piece]) -> list[Piece]:
        return resolve_replicas(self, pieces, super().resolve)


def _open_files(store: Store, files: Files) -> Reader:
    sizes = files.sizes
    headers = read_headers(store, {name: size for name, size in sizes.items() if size >= 0})
    for file, header in headers.items():
        _require_end(f"{store.url}/{file}", sizes[file], header.data_start + header.data_bytes)
    is_dcp = any(_SHARDING_INFO in header.metadata for header in headers.values())
    of_model, of_optimizer = (
        _join_dcp_boxes(store, chosen) if is_dcp else _full_tensors(store, chosen, weight_map)
        for chosen, weight_map in _split_files(headers, files.weight_map)
    )
    metadata = dict(chain.from_iterable(h.metadata.items() for h in headers.values()))
    tensors, aliases = of_model, _aliases(of_model, metadata)
    for name in aliases:
        tensors[name] = TensorEntry(name, *_same_as(tensors[aliases[name]]))
    objects: dict[Path, ObjectEntry] = {}
    if any(name.startswith(OPTIMIZER) for name in sizes):
        groups = _param_groups(store, files.param_groups)
        tensors = {("model", *path): entry._replace(path=("model", *path)) for path, entry in tensors.items()}
        tensors |= _name_slots(of_optimizer, groups)
        values = {(OPTIMIZER, "param_groups"): groups.groups, **_state_values(groups.values)}
        if not any(path[:2] == (OPTIMIZER, _STATE) for path in (*tensors, *values)):
            values[OPTIMIZER, _STATE] = {}
        if groups.units:
            values[OPTIMIZER, "units"] = groups.units_json
        objects = {path: ObjectEntry(path, value) for path, value in values.items()}
        aliases = {("model", *name): ("model", *kept) for name, kept in aliases.items()}
    return (_ShardReader if is_dcp else Reader)(
        store,
        Manifest(
            format="adapter" if any(n.startswith("adapter_model") for n in sizes) else "safetensors",
            files=dict(sizes),
            tensors=tensors,
            objects=objects,
            aliases=aliases,
            metadata={k: v for k, v in metadata.items() if (k,) not in aliases and not k.startswith(_OTHERS)},
            warnings=files.warnings,
            missing=files.missing,
            unread=files.unread,
            has_shapes=not is_dcp,
        ),
    )


def _require_end(where: str, size: int, end: int) -> None:
    """Reject bytes after the data, as the safetensors library does: another format's file may start there."""
    if size > end:
        raise FormatError(
            "bytes follow the tensors' data", where=where, found=size, expected=end, fix="Copy the file again."
        )


def _full_tensors(
    store: Store, headers: Mapping[str, Header], weight_map: Mapping[str, str]
) -> dict[Path, TensorEntry]:
    tensors: dict[Path, TensorEntry] = {}
    names: set[str] = set()
    for file, header in headers.items():
        for name, (dtype, shape, start, end) in header.tensors.items():
            if weight_map.get(name, file) != file:
                continue
            path = (name,)
            names.add(name)
            if path in tensors:
                other = tensors[path].pieces[0].file
                raise two_files_error(name, f"{store.url}/{file}", other)
            span = Span(header.data_start + start, end - start)
            tensors[path] = TensorEntry(path, shape, dtype, (Piece(full_box(shape), file, span),))
    for name, file in weight_map.items():
        if name in names:
            continue
        if file in headers:
            raise unindexed_error(name, f"{store.url}/{file}")
        tensors[(name,)] = TensorEntry((name,), (), UNKNOWN, (Piece(full_box(()), file, Span(0, 0)),))
    return tensors


def _join_dcp_boxes(store: Store, headers: Mapping[str, Header]) -> dict[Path, TensorEntry]:
    """Merge the chunks that HuggingFaceStorageWriter writes to a file per rank."""
    # A tensor's shape is the bounding box of its chunks, since the layout does not store it; `--shapes-from` checks it.
    chunks: dict[str, dict[Box, list[Piece]]] = {}
    dtypes: dict[str, str] = {}
    for file, header in headers.items():
        offsets = _sharding_info(header, f"{store.url}/{file}")
        for name, (dtype, shape, start, end) in header.tensors.items():
            offset = offsets.get(name, (0,) * len(shape))
            piece = Piece(Box(offset, shape), file, Span(header.data_start + start, end - start))
            known = chunks.setdefault(name, {})
            if len(offset) != len(shape) or any(len(box.size) != len(shape) for box in islice(known, 1)):
                raise FormatError(f"chunks of {name!r} differ in their dimensions", where=f"{store.url}/{file}")
            if dtypes.setdefault(name, dtype) != dtype:
                raise FormatError(
                    f"chunks of {name!r} differ in dtype",
                    where=f"{store.url}/{file}",
                    found=dtype,
                    expected=dtypes[name],
                )
            known.setdefault(piece.box, []).append(piece)
    return {(name,): _join_chunks(name, dtypes[name], known) for name, known in chunks.items()}


def _join_chunks(name: str, dtype: str, chunks: Mapping[Box, Sequence[Piece]]) -> TensorEntry:
    pieces = (join_replicas(name, dtype, each) for box, each in chunks.items() if box.volume)
    return TensorEntry((name,), _hull(chunks), dtype, tuple(pieces))


def _hull(boxes: Iterable[Box]) -> Shape:
    return tuple(max(stops) for stops in zip(*(box.stop for box in boxes), strict=True))


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
    """Return the names that safetensors' `save_model` drops: `dropped: kept`. `consolidate` writes them too."""
    return {(k,): (v,) for k, v in metadata.items() if (k,) not in tensors and (v,) in tensors}


def _same_as(entry: TensorEntry) -> tuple[Shape, str, tuple[Piece, ...]]:
    return entry.shape, entry.stored, entry.pieces


def _split_files(
    headers: Mapping[str, Header], weight_map: Mapping[str, str]
) -> Iterator[tuple[dict[str, Header], dict[str, str]]]:
    """Yield the model's files and index, then the optimizer's, whose names differ."""
    for is_optimizer in (False, True):
        yield (
            {file: header for file, header in headers.items() if file.startswith(OPTIMIZER) == is_optimizer},
            {name: file for name, file in weight_map.items() if file.startswith(OPTIMIZER) == is_optimizer},
        )


def _name_slots(tensors: Mapping[Path, TensorEntry], groups: OptimizerFile) -> dict[Path, TensorEntry]:
    """Return the tensors in the optimizer's files by parameter and slot."""
    named: dict[Path, TensorEntry] = {}
    for path, entry in tensors.items():
        for rest, each in groups.entries(str(path[0]), entry):
            place = (OPTIMIZER, _STATE, *rest)
            named[place] = each._replace(path=place)
    return named


def _state_values(values: object) -> dict[Path, object]:
    """Return the optimizer's values by parameter and slot; tensors are stored separately."""
    held = {key: slots for key, slots in values.items() if isinstance(slots, dict)} if isinstance(values, dict) else {}
    return {(OPTIMIZER, _STATE, key, slot): value for key, slots in held.items() for slot, value in slots.items()}


def _param_groups(store: Store, name: str) -> OptimizerFile:
    raw = read_json(store, name) if any(entry.name == name for entry in store.list()) else {}
    return OptimizerFile.from_json(raw, f"{store.url}/{name}")


FORMAT = Format(
    name="safetensors",
    title="Hugging Face safetensors",
    looks_for="*.safetensors files, or model.safetensors.index.json",
    recognize=recognize,
    open=open_source,
)
