"""Writes native steps without a training job: the planning is given, the bytes come from tensors in memory."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shardckpt.boxes import Box, full_box
from shardckpt.encodings import tagged_json
from shardckpt.manifest import Path as TreePath
from shardckpt.native.commit import COMMIT, encode_commit, manifest_name
from shardckpt.native.manifest_json import (
    ManifestContents,
    WrittenPayload,
    build_partial,
    encode_manifest,
    merge_partials,
)
from shardckpt.native.payload import HF_INDEX, BlockHasher, PayloadChunk, PayloadFile, hf_index, plan_payloads
from shardckpt.native.reader import NativeReader
from shardckpt.native.records import ArrayRecord, make_record
from shardckpt.readers.registry import open_checkpoint

Boxes = Mapping[TreePath, Sequence[tuple[int, Box]]]
SAVE = "0mwqkzsavex3s13"


def raw(tensor: torch.Tensor) -> bytes:
    """Return a tensor's elements in row-major order."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def scalar(value: np.generic) -> tagged_json.NamedValue:
    return tagged_json.NamedValue("numpy", f"{value.dtype.name} {value.tobytes().hex()}")


def with_grouped_hashes(contents: ManifestContents) -> ManifestContents:
    """Return what a very large step stores, for `write_step(change=...)`."""
    return replace(contents, files=tuple(file.with_groups() for file in contents.files))


class Nest:
    """A nest taken apart: its tensors by path, each once, and its tagged form.

    Args:
        value: Containers, plain values and tensors.
    """

    def __init__(self, value: Any) -> None:
        self.arrays: dict[TreePath, torch.Tensor] = {}
        self.ties: dict[TreePath, int] = {}
        self._known: dict[int, int] = {}
        self.json = tagged_json.encode(value, (), self._leaf)

    def _leaf(self, value: object, path: TreePath) -> tagged_json.ArrayRef | tagged_json.NamedValue | None:
        if isinstance(value, torch.dtype):
            return tagged_json.NamedValue("dtype", str(value).removeprefix("torch."))
        if isinstance(value, np.generic):
            return scalar(value)
        if not isinstance(value, torch.Tensor):
            return None
        if id(value) in self._known:
            self.ties[path] = self._known[id(value)]
        else:
            self._known[id(value)] = len(self.arrays)
            self.arrays[path] = value
        return tagged_json.ArrayRef(self._known[id(value)])


def write_step(
    folder: Path,
    value: Any,
    boxes: Boxes | None = None,
    *,
    save: str = SAVE,
    checksums: bool = True,
    alone: TreePath | None = None,
    most_bytes: int = 1 << 30,
    change: Callable[[ManifestContents], ManifestContents] = lambda contents: contents,
) -> Path:
    """Write a step.

    Args:
        folder: To be made, or one that holds other steps' files.
        value: The nest.
        boxes: Path to who writes which box; writer 0 writes the rest whole.
        save: The save's id.
        checksums: Whether blocks are hashed.
        alone: Where the model is, for a step that is a Hugging Face folder too.
        most_bytes: Of one payload file.
        change: Has the last word on the manifest.
    """
    folder.mkdir(parents=True, exist_ok=True)
    nest = Nest(value)
    records = tuple(ArrayRecord(path, dtype_name(t), tuple(t.shape), array("Q")) for path, t in nest.arrays.items())
    topology, about = {"world_size": 2}, {"shardckpt": "0.1.0"}
    contents = ManifestContents(save, (), records, about=about, topology=topology, ties=nest.ties, tree=nest.json)
    plan = {path: (boxes or {}).get(path) or [(0, full_box(tuple(t.shape)))] for path, t in nest.arrays.items()}
    writers = 1 + max((writer for placed in plan.values() for writer, _ in placed), default=0)
    parts = []
    for writer in range(writers):
        chunks = [
            PayloadChunk(path, tuple(nest.arrays[path].shape), dtype_name(nest.arrays[path]), box)
            for path, placed in plan.items()
            for by, box in placed
            if by == writer
        ]
        carry = contents.carried() if writer == 0 else None
        laid = plan_payloads(save, writer, chunks, most_bytes=most_bytes, model=alone, carry=carry)
        parts.append(build_partial([_write(folder, each, nest, checksums) for each in laid]))
    files, arrays = merge_partials(parts, list(nest.arrays))
    if alone is not None:
        index = hf_index(laid, alone)
        (folder / HF_INDEX).write_bytes(index)
        files = (*files, make_record(HF_INDEX, index, checksums=checksums))
    commit(folder, change(replace(contents, files=files, arrays=arrays)))
    return folder


def opened(folder: Path) -> NativeReader:
    """Open a step of the native format."""
    reader = open_checkpoint(str(folder))
    assert isinstance(reader, NativeReader)
    return reader


def commit(folder: Path, contents: ManifestContents) -> None:
    """Write the manifest and `COMMIT`, whatever the manifest says."""
    manifest = encode_manifest(contents)
    (folder / manifest_name(contents.save)).write_bytes(manifest)
    (folder / COMMIT).write_bytes(encode_commit(contents.save, manifest, contents.files))


def _write(folder: Path, payload: PayloadFile, nest: Nest, checksums: bool) -> WrittenPayload:
    hasher = BlockHasher()
    with (folder / payload.name).open("wb") as file:
        for data in (payload.header, *(_cut(nest.arrays[c.path], c.box) for c in payload.chunks)):
            file.write(data)
            hasher.update(data)
    return WrittenPayload(payload, hasher.digests() if checksums else None)


def _cut(tensor: torch.Tensor, box: Box) -> bytes:
    return raw(tensor[tuple(slice(o, o + n) for o, n in zip(box.offset, box.size, strict=True))])
