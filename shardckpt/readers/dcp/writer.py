"""Write torch's distributed checkpoints (DCP) without torch. Slices are torch archives, `.metadata` is a pickle.

Follows `torch.distributed.checkpoint.save` in torch 2.13 with its file system writer. It writes one slice for each
tensor chunk and object, concatenated in `__{rank}_{n}.distcp`. `.metadata` stores each slice's location.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from shardckpt.boxes import Shape
from shardckpt.encodings.pickle_writer import GlobalCall, GlobalName, Pairs, encode_pickle
from shardckpt.errors import NameCollisionError
from shardckpt.manifest import Path, dotted
from shardckpt.native.payload import PayloadChunk
from shardckpt.readers.torchsave.writer import (
    ALIGNMENT,
    Storage,
    TensorValue,
    TorchArchive,
    encode_archive,
    plan_archive,
)

METADATA = ".metadata"
VERSION = "1.0.0"

_CLASSES = "torch.distributed.checkpoint.metadata"
_FILE = GlobalName("torch.distributed.checkpoint.filesystem", "_StorageInfo")
_CONTIGUOUS = 0  # value of `torch.contiguous_format` in the enumeration of the metadata


class SliceObject(NamedTuple):
    """An object that is stored as a slice."""

    path: Path  # path in the saved state
    content: bytes  # Torch archive of the value


class WrittenSlice(NamedTuple):
    """A slice in a file."""

    what: PayloadChunk | SliceObject  # tensor chunk or object in the slice
    archive: TorchArchive | None  # archive that the chunk's bytes are written to; None for an object
    offset: int  # offset of the first byte in the file
    nbytes: int


@dataclass(frozen=True, slots=True)
class SliceFile:
    """A planned `.distcp` file."""

    name: str  # file name in the checkpoint's folder
    slices: tuple[WrittenSlice, ...]  # slices in file order, with padding between them

    @property
    def nbytes(self) -> int:
        """File size in bytes."""
        return self.slices[-1].offset + self.slices[-1].nbytes if self.slices else 0


def make_object(path: Path, value: object) -> SliceObject:
    """Encode an object as a slice."""
    return SliceObject(path, encode_archive(value))


def slice_files(
    rank: int, chunks: Sequence[PayloadChunk], items: Sequence[SliceObject], *, most_bytes: int, unique_suffix: str = ""
) -> list[SliceFile]:
    """Plan one rank's files; objects follow the chunks."""
    files: list[SliceFile] = []
    slices: list[WrittenSlice] = []
    at = 0
    mark = f"-{unique_suffix}" if unique_suffix else ""

    def finish() -> None:
        files.append(SliceFile(f"__{rank}_{len(files)}{mark}.distcp", tuple(slices)))

    everything: list[PayloadChunk | SliceObject] = [*chunks, *items]
    for what in everything:
        archive = _archive(what) if isinstance(what, PayloadChunk) else None
        size = archive.nbytes if archive is not None else len(what.content) if isinstance(what, SliceObject) else 0
        start = at + -at % ALIGNMENT
        if slices and start + size > most_bytes:
            finish()
            slices, start = [], 0
        slices.append(WrittenSlice(what, archive, start, size))
        at = start + size
    if slices or not files:
        finish()
    return files


def _archive(chunk: PayloadChunk) -> TorchArchive:
    value = TensorValue(0, chunk.dtype, chunk.box.size)
    return plan_archive(value, [Storage(chunk.dtype, chunk.box.volume)])


def encode_metadata(files: Iterable[SliceFile], ties: Mapping[Path, Path], order: Iterable[Path] = ()) -> bytes:
    """Return the content for `.metadata`."""
    names = _FlatNames()
    also: dict[Path, list[Path]] = {}
    for path, kept in ties.items():
        also.setdefault(kept, []).append(path)
    records: dict[str, Any] = {}
    places: list[tuple[object, object]] = []
    chunks: dict[str, list[object]] = {}
    for file in files:
        for what, _, offset, size in file.slices:
            for path in (what.path, *also.get(what.path, ())):
                name = names.flatten_path(path)
                info = _instance(_FILE, {"relative_path": file.name, "offset": offset, "length": size})
                if isinstance(what, SliceObject):
                    records[name] = _class("BytesStorageMetadata", {})
                    places.append((_index(name, None, None), info))
                    continue
                if name not in chunks:
                    chunks[name] = []
                    records[name] = _tensor(what, chunks[name])
                chunks[name].append(
                    _class("ChunkStorageMetadata", {"offsets": _size(what.box.offset), "sizes": _size(what.box.size)})
                )
                places.append((_index(name, what.box.offset, len(chunks[name]) - 1), info))
    paths = {name: path for path, name in names.known.items()}
    first = [names.known[path] for path in order if path in names.known]
    state = {
        "state_dict_metadata": {name: records[name] for name in dict.fromkeys((*first, *records))},
        "planner_data": {name: paths[name] for name in dict.fromkeys((*first, *paths))},
        "storage_data": Pairs(places),
        "storage_meta": None,
        "version": VERSION,
    }
    return encode_pickle(_class("Metadata", state))


class _FlatNames:
    """Assigns each path a unique flat name."""

    def __init__(self) -> None:
        self.known: dict[Path, str] = {}
        self._taken: set[str] = set()

    def flatten_path(self, path: Path) -> str:
        name = self.known.get(path)
        if name is None:
            name = dotted(path)
            if name in self._taken:
                raise NameCollisionError(
                    f"two values in a DCP checkpoint would both be named {name!r}",
                    fix="Torch joins keys with dots: rename one.",
                )
            self._taken.add(name)
            self.known[path] = name
        return name


def _index(name: str, offset: Shape | None, number: int | None) -> GlobalCall:
    state: dict[str, object] = {"fqn": name, "index": number}
    if offset is not None:
        state["offset"] = _size(offset)
    return _class("MetadataIndex", state)


def _tensor(chunk: PayloadChunk, chunks: list[object]) -> GlobalCall:
    layout = GlobalCall(GlobalName("torch.serialization", "_get_layout"), ("torch.strided",))
    memory = GlobalCall(GlobalName(_CLASSES, "_MEM_FORMAT_ENCODING"), (_CONTIGUOUS,))
    properties = (GlobalName("torch", chunk.dtype), layout, False, memory, False)
    state = {
        "properties": _class("TensorProperties", properties),
        "size": _size(chunk.shape),
        "chunks": chunks,
    }
    return _class("TensorStorageMetadata", state)


def _size(value: Shape) -> GlobalCall:
    return GlobalCall(GlobalName("torch", "Size"), (tuple(value),))


def _class(name: str, state: object) -> GlobalCall:
    return _instance(GlobalName(_CLASSES, name), state)


def _instance(name: GlobalName, state: object) -> GlobalCall:
    return GlobalCall(name, (), state, is_new=True)
