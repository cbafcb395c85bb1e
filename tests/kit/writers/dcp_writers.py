"""Checkpoints written by torch's own DCP writers, in one process or as if by several."""

from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from tests.kit.writers.torch_writers import ALONE


def save(state: Mapping[str, Any], folder: Path, **options: Any) -> Path:
    """Save `state` with one process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch notes that there is one process
        dcp.save(dict(state), storage_writer=FileSystemWriter(folder, **options), **ALONE)
    return folder


class _Chunks(DefaultSavePlanner):
    """Saves some tensors as several chunks: `(offset, size)` boxes by name."""

    def __init__(self, boxes: Mapping[str, Sequence[tuple[tuple[int, ...], tuple[int, ...]]]]) -> None:
        super().__init__()
        self.boxes = boxes

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        items = [part for item in plan.items for part in self._split(item)]
        return replace(plan, items=items)

    def _split(self, item: WriteItem) -> list[WriteItem]:
        if item.index.fqn not in self.boxes:
            return [item]
        return [
            WriteItem(
                index=MetadataIndex(item.index.fqn, torch.Size(offset)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(torch.Size(offset), torch.Size(size)),
                    properties=item.tensor_data.properties,
                    size=item.tensor_data.size,
                ),
            )
            for offset, size in self.boxes[item.index.fqn]
        ]

    def lookup_object(self, index: MetadataIndex) -> Any:
        if index.fqn not in self.boxes:
            return super().lookup_object(index)
        size = dict(self.boxes[index.fqn])[tuple(index.offset)]
        at = tuple(slice(o, o + n) for o, n in zip(index.offset, size, strict=True))
        return self.state_dict[index.fqn][at]


def save_chunked(
    state: Mapping[str, Any],
    boxes: Mapping[str, Sequence[tuple[tuple[int, ...], tuple[int, ...]]]],
    folder: Path,
    **options: Any,
) -> Path:
    """Save `state` with one process, the tensors named in `boxes` as several chunks."""
    writer = FileSystemWriter(folder, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        dcp.save(dict(state), storage_writer=writer, planner=_Chunks(boxes), **ALONE)
    return folder


def edit_metadata(folder: Path, change: Callable[[Metadata], object], name: str = ".metadata") -> None:
    """Change a `.metadata` in place; what `change` returns, if anything, is pickled in its stead."""
    file = folder / name
    metadata = pickle.loads(file.read_bytes())
    changed = change(metadata)
    file.write_bytes(pickle.dumps(metadata if changed is None else changed))


def tensor_record(
    size: Sequence[int], chunks: Sequence[tuple[Sequence[int], Sequence[int]]], dtype: torch.dtype = torch.float32
) -> TensorStorageMetadata:
    """Return a tensor's entry of `state_dict_metadata`."""
    return TensorStorageMetadata(
        TensorProperties(dtype),
        torch.Size(size),
        [ChunkStorageMetadata(torch.Size(o), torch.Size(n)) for o, n in chunks],
    )


def put_object(folder: Path, name: str, raw: bytes) -> None:
    """Add an object to a checkpoint whose slice is exactly `raw`."""
    (folder / f"{name}.distcp").write_bytes(raw)

    def add(metadata: Metadata) -> None:
        metadata.state_dict_metadata[name] = BytesStorageMetadata()
        metadata.storage_data[MetadataIndex(name)] = _StorageInfo(f"{name}.distcp", 0, len(raw))

    edit_metadata(folder, add)


def archive(value: Any) -> bytes:
    """Return the torch archive of a value."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


class Malicious:
    """Unpickled for real, it would leave a file behind."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        import os

        return os.system, (f"touch {self.trace}",)
