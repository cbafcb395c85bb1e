"""`open`: a checkpoint that is looked into: one tensor, or a slice of it, without reading the rest."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch

from shardckpt.boxes import Box
from shardckpt.checkpoint.load.source import CheckpointSource, Verify, allocate, torch_dtype
from shardckpt.errors import UsageError
from shardckpt.format.opened.mapping import Opened, StoredTensor
from shardckpt.format.reader import NamedBases
from shardckpt.state.local.local_shards import LocalShard, TensorShards
from shardckpt.storage.resolve_url import as_url

OpenedTensors: TypeAlias = Opened[CheckpointSource]


class SavedTensor(StoredTensor[CheckpointSource, torch.Tensor]):
    """A tensor of an open checkpoint; indexing reads what is asked for, `[...]` all of it."""

    @property
    def shape(self) -> torch.Size:
        """Its shape, in elements."""
        return torch.Size(self._entry.shape)

    @property
    def dtype(self) -> torch.dtype:
        """The type of its tensors."""
        return torch_dtype(self._entry)

    def _read(self, saved: CheckpointSource, box: Box) -> torch.Tensor:
        (entry,) = saved.locate([self._entry])  # before memory is taken for it
        tensor = allocate(entry, box.size)
        saved.elements.read([(entry, TensorShards(entry.shape, tensor.dtype, (LocalShard(box, tensor),)))])
        return tensor

    def _pick(self, read: torch.Tensor, index: tuple[int | slice, ...]) -> torch.Tensor:
        steps = [pick.step for pick in index if isinstance(pick, slice)]
        return read[index].clone() if any(step != 1 for step in steps) else read[index]


def open(path: Any, *, verify: Verify = "read", base: NamedBases | None = None) -> OpenedTensors:
    """Open a checkpoint of any format to look into it: `open(path)["model.layers.0.weight"][0:128]`.

    `with open(path) as checkpoint:` closes its files at the end of the block.

    Args:
        path: The path or URL of the checkpoint.
        verify: `"read"`: blocks that are touched are checked against their hashes; False: they are not.
        base: As `load` takes it.

    Raises:
        SourceNotFoundError: Nothing is stored there.
        CheckpointError: It cannot be read.
        UsageError: An unknown way to verify.
    """
    if verify == "full":
        raise UsageError("what is opened is verified as it is read", found=verify, expected="False or 'read'")
    return Opened(CheckpointSource(as_url(path), verify, bases=base or ""), SavedTensor)
