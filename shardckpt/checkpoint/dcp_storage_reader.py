"""`StorageReader`: with it, `torch.distributed.checkpoint` loads checkpoints in every readable format.

Nothing from a file is unpickled: a value is decoded, and then given to the planner in the form that it expects.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.checkpoint import storage
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from shardckpt.boxes import Box
from shardckpt.checkpoint.load.source import CheckpointSource, Verify, require_way_to_verify, torch_dtype
from shardckpt.checkpoint.load.tensor_loader import ReadRequest
from shardckpt.checkpoint.stateful.stateful import check_tensor, require_memory
from shardckpt.errors import FormatError, UnsupportedError
from shardckpt.manifest import Path, dotted
from shardckpt.plan.subclass_record import find_record
from shardckpt.readers.opened.state_tree import TensorRef
from shardckpt.state.local.tensor_shards import LocalShard, TensorShards
from shardckpt.storage.resolve_url import as_url

__all__ = ["StorageReader"]


class StorageReader(storage.StorageReader):
    """Reader for `torch.distributed.checkpoint.load`.

    It reads steps, DCP folders, and the other formats that `shardckpt.load` reads, on any number of ranks.

    Args:
        path: Checkpoint path or URL; None if each load has a `checkpoint_id`.
        verify: `"read"` to check the hashes of the blocks read; `"full"` to check all blocks before anything is
            changed; False for no checks.

    Attributes:
        checkpoint_id: Checkpoint path or URL.
        nbytes: Tensor bytes that the last load filled on this rank.

    Raises:
        UsageError: `verify` has an unknown value.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None, *, verify: Verify = "read") -> None:
        require_way_to_verify(verify)
        self.checkpoint_id, self.nbytes, self._verify = path, 0, verify
        self._source: CheckpointSource | None = None
        self._failure: Exception | None = None
        self._nodes: dict[str, Any] = {}

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return True for a path or a URL."""
        return isinstance(checkpoint_id, (str, os.PathLike))

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Start another load, from another path if one is given."""
        self._source, self._failure, self._nodes = None, None, {}
        self.checkpoint_id = self.checkpoint_id if checkpoint_id is None else checkpoint_id

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:  # noqa: ARG002
        """Open the checkpoint, and return its contents.

        `set_up_storage_reader` raises the error: torch would replace an exception raised here.
        """
        try:
            return self._open()
        except Exception as error:  # noqa: BLE001  (raised by the next call)
            self._failure = error
            return Metadata({})

    def _open(self) -> Metadata:
        self._source = source = CheckpointSource(as_url(self.checkpoint_id), self._verify)
        source.expect_most()
        if self._verify == "full":
            source.check_blocks()
        paths: dict[str, Path] = {}
        for path, node in _flatten(source.tree, ()):
            name = dotted(path)
            if name in paths:
                raise FormatError("two values have the same name", where=source.url, found=name)
            paths[name], self._nodes[name] = path, node
        contents = {name: self._metadata(node) for name, node in self._nodes.items()}
        meta = StorageMeta(checkpoint_id=source.url, save_id=source.identity.hex())
        return Metadata(contents, planner_data=paths, storage_meta=meta)

    def _metadata(self, node: Any) -> TensorStorageMetadata | BytesStorageMetadata:
        """Return what torch's planners need to know about a value."""
        # A tensor counts as one chunk, so that each shard to load is one request; its pieces are found when it is read.
        if not (isinstance(node, TensorRef) and node.kind == "tensor"):
            return BytesStorageMetadata()
        assert self._source is not None
        entry = self._source.arrays[node.path]
        shape = torch.Size(entry.shape)
        chunk = ChunkStorageMetadata(torch.Size([0] * len(shape)), shape)
        return TensorStorageMetadata(TensorProperties(torch_dtype(entry)), shape, [chunk])

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Raise the error of `read_metadata`, if it failed."""
        if self._failure is not None:
            raise self._failure

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Add the checkpoint's identity, which all ranks compare."""
        assert self._source is not None
        return replace(plan, storage_data=self._source.identity)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans unchanged.

        Raises:
            FormatError: Ranks opened different checkpoints.
        """
        if len({plan.storage_data for plan in plans}) > 1:
            raise FormatError("ranks see different checkpoints under this name", where=self.checkpoint_id)
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the planned values and tensors.

        Raises:
            UnsupportedError: A value can only be read by the library that wrote it, or a target is not a dense tensor
                with memory.
            PrecisionError: A tensor has a value that its target's dtype cannot represent.
            CheckpointError: Elements are missing or damaged.
            StorageError: The storage failed.
        """
        assert self._source is not None
        values = [(item, self._encode_value(item)) for item in plan.items if not _is_tensor(item)]
        tensors = [(item, planner.resolve_tensor(item).detach()) for item in plan.items if _is_tensor(item)]
        for item, tensor in tensors:
            check_tensor(tensor, self._nodes[item.storage_index.fqn].path)
            require_memory(tensor, self._nodes[item.storage_index.fqn].path)
        self.nbytes = sum(tensor.nbytes for _, tensor in tensors)
        self._source.fill([self._request(item, tensor) for item, tensor in tensors])
        for item, tensor in tensors:
            planner.commit_tensor(item, tensor)
        for item, data in values:
            planner.load_bytes(item, data)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _encode_value(self, item: ReadItem) -> io.BytesIO:
        """Return a value as `torch.save` writes it, which is what planners take."""
        assert self._source is not None
        node, data = self._nodes[item.storage_index.fqn], io.BytesIO()
        if (record := find_record(node)) is not None:
            raise UnsupportedError(
                f"torch's load cannot fill a tensor that was saved as a {record.kind}",
                where=item.storage_index.fqn,
                fix="Load the state with `shardckpt.load`, or without this tensor.",
            )
        torch.save(self._source.read_tree(node), data)
        data.seek(0)
        return data

    def _request(self, item: ReadItem, tensor: torch.Tensor) -> ReadRequest:
        assert self._source is not None
        entry = self._source.arrays[self._nodes[item.storage_index.fqn].path]
        shard = LocalShard(Box(tuple(item.storage_offsets), tuple(item.lengths)), tensor)
        return entry, TensorShards(entry.shape, tensor.dtype, (shard,))


def _is_tensor(item: ReadItem) -> bool:
    return item.type == LoadItemType.TENSOR


def _flatten(node: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    """Yield a tree's values as torch flattens a state: dicts, and lists with tensors or dicts in them."""
    if isinstance(node, Mapping):
        if find_record(node) is not None:
            yield path, node  # to refuse a load of the tensor by its name
        for key, item in node.items():
            yield from _flatten(item, (*path, str(key)))
    elif type(node) is list and _has_parts(node):
        for at, item in enumerate(node):
            yield from _flatten(item, (*path, at))
    else:
        yield path, node


def _has_parts(items: list[Any]) -> bool:
    """Return True if a list has a dict or a tensor, also inside further lists."""
    return any(
        _has_parts(item) if type(item) is list else isinstance(item, Mapping) or _is_tensor_ref(item) for item in items
    )


def _is_tensor_ref(node: Any) -> bool:
    return isinstance(node, TensorRef) and node.kind == "tensor"
