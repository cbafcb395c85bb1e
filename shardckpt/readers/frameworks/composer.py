"""Reader of Composer's checkpoints in parts, and its pointer files.

Parts are `model/` and `optim/` (DCP), or `model.pt` and `optim.pt`. Next to them are `composer_metadata.json` and
`resumption.pkl`, the training loop's state. A file `*.symlink` contains a checkpoint's path. DCP folders `ep{}-ba{}`
and single files store everything below `state`; other readers read them. Written from the documented layout; not tested
with files that Composer wrote.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from shardckpt.errors import FormatError, IncompleteError
from shardckpt.manifest import Path
from shardckpt.reader import Evidence, Format, Reader, Source
from shardckpt.readers.dcp import reader as dcp
from shardckpt.readers.frameworks import torch_files
from shardckpt.readers.frameworks.composite import SubReader, join
from shardckpt.readers.torchsave.reader import open_files
from shardckpt.storage.store import read_bytes

_METADATA = "composer_metadata.json"
_LOOP = "resumption.pkl"
_POINTER = ".symlink"
_PARTS = ("model", "optim")
_MAX_POINTER_BYTES = 4096


def recognize(source: Source) -> Evidence:
    """Recognize a folder by metadata next to a part, and a pointer by its suffix."""
    if source.file is not None:
        return Evidence.STRUCTURE if source.file.endswith(_POINTER) else Evidence.NONE
    return Evidence.STRUCTURE if _METADATA in source.files and any(True for _ in _find_parts(source)) else Evidence.NONE


def _find_parts(source: Source) -> Iterator[str]:
    """Yield the files and folders with parts of the checkpoint."""
    for part in _PARTS:
        if part in source.folders:
            yield part
        elif f"{part}.pt" in source.files:
            yield f"{part}.pt"


def open_source(source: Source) -> Reader:
    """Open a recognized source. `resumption.pkl` is one object, read on demand."""
    if source.file is not None:
        return _follow_pointer(source, source.file)
    store = source.store
    parts = []
    names = list(_find_parts(source))
    for name in names:
        slot = name.removesuffix(".pt")
        if name == slot:
            parts.append(SubReader(dcp.open_folder(store, name), partial(_below, slot)))
        else:
            reader = open_files(store, {name: source.listing[name].size}, {name: ()}, FORMAT.name)
            parts.append(SubReader(reader, partial(_below, slot)))
    other_files = {_LOOP: source.listing[_LOOP].size} if _LOOP in source.files else {}
    return join(FORMAT.name, store, parts, other_files)


def _below(slot: str, path: Path) -> Path:
    """Return a path below its part's name, which some files already contain."""
    return path if path[0] == slot and len(path) > 1 else (slot, *path)


def _follow_pointer(source: Source, pointer: str) -> Reader:
    """Open the file or folder that a pointer names in its own folder; ignore the stored path's other folders."""
    where = f"{source.store.url}/{pointer}"
    size = source.store.size(pointer)
    if size > _MAX_POINTER_BYTES:
        raise FormatError("a pointer is longer than any path", where=where, found=f"{size} bytes")
    try:
        target = read_bytes(source.store, pointer, 0, size).decode().strip()
    except UnicodeDecodeError as error:
        raise FormatError("a pointer holds no path", where=where) from error
    parts = [part for part in target.replace("\\", "/").split("/") if part not in ("", ".")]
    names = {entry.name: entry for entry in source.store.list()}
    name = next((part for part in reversed(parts) if part in names and part != pointer), "")
    if not name or name == "..":
        raise IncompleteError(
            "a pointer's target is not next to it",
            where=where,
            found=target[:200],
            fix="Copy it here, or point at the checkpoint itself.",
        )
    if names[name].is_folder:
        return dcp.open_folder(source.store, name)
    return torch_files.open_file(Source(source.store, name))


FORMAT = Format(
    name="composer",
    title="Composer checkpoint, in parts",
    looks_for=f"{_METADATA} next to model or optim, or a *{_POINTER} file that names a checkpoint",
    recognize=recognize,
    open=open_source,
)
