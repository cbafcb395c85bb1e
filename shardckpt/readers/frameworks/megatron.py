"""Reader of Megatron's `iter_*` folders in the format `torch_dist`.

They contain a DCP checkpoint, `metadata.json` and `common.pt`. Paths are the DCP folder's paths; `common.pt` is one
object, read on demand. Layers that Megatron stacked along their first dimension stay stacked; rules can split them.
"""

from __future__ import annotations

import re

from shardckpt.encodings.safetensors import parse_json
from shardckpt.errors import UnsupportedError
from shardckpt.manifest import dotted
from shardckpt.reader import Evidence, Format, Reader, Source
from shardckpt.readers.dcp import reader as dcp
from shardckpt.readers.frameworks.composite import SubReader, join
from shardckpt.storage.store import read_bytes

METADATA, COMMON = "metadata.json", "common.pt"
_BACKEND = "sharded_backend"
_HEAD_BYTES = 512
_MAX_BYTES = 1 << 20
_STACKED = re.compile(r"(.*\.)?layers\.[a-zA-Z_].*")  # names of layers without a number: one tensor contains all layers


def recognize(source: Source) -> Evidence:
    """Recognize a folder whose `metadata.json` names a backend."""
    if source.file is not None or METADATA not in source.files:
        return Evidence.NONE
    head = source.head(METADATA, _HEAD_BYTES)
    return Evidence.STRUCTURE if head[:1] == b"{" and f'"{_BACKEND}"'.encode() in head else Evidence.NONE


def open_source(source: Source) -> Reader:
    """Open a recognized source."""
    size = min(source.listing[METADATA].size, _MAX_BYTES)
    metadata = parse_json(read_bytes(source.store, METADATA, 0, size), where=f"{source.store.url}/{METADATA}")
    backend = metadata.get(_BACKEND) if isinstance(metadata, dict) else None
    if backend != "torch_dist":
        raise UnsupportedError(
            "Megatron saved this with another backend",
            where=source.url,
            found=backend,
            expected="torch_dist",
            fix="Load it in Megatron and save it with --ckpt-format torch_dist.",
        )
    part = SubReader(dcp.open_folder(source.store))
    stacked = [dotted(path) for path in part.reader.manifest.tensors if _STACKED.fullmatch(dotted(path))]
    many = f"{len(stacked)} tensors hold all layers on their first axis: `unstack` of --rules splits them"
    warnings = [f"{many}; the first is {stacked[0]}"] if stacked else []
    other_files = {COMMON: source.listing[COMMON].size} if COMMON in source.files else {}
    return join(FORMAT.name, source.store, [part], other_files, warnings)


FORMAT = Format(
    name="megatron",
    title="Megatron's distributed checkpoint",
    looks_for="metadata.json that names a sharded_backend, next to .metadata",
    recognize=recognize,
    open=open_source,
)
