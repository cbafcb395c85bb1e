"""`open`: lazy access to a checkpoint's tensors and their slices."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray

from shardckpt.boxes import Box
from shardckpt.checkpoint.load.source import CheckpointSource, Verify, allocate, torch_dtype
from shardckpt.errors import UnsupportedError, UsageError
from shardckpt.manifest import dotted
from shardckpt.reader import NamedBases
from shardckpt.readers.opened.mapping import Opened, StoredTensor
from shardckpt.readers.registry import resolve_step
from shardckpt.state.local.tensor_shards import LocalShard, TensorShards
from shardckpt.storage.resolve_url import fix_folder

OpenedTensors: TypeAlias = Opened[CheckpointSource]


class SavedTensor(StoredTensor[CheckpointSource, torch.Tensor]):
    """Tensor in an open checkpoint; an index reads its elements, `[...]` reads all."""

    @property
    def shape(self) -> torch.Size:
        """The tensor's shape, in elements."""
        return torch.Size(self._entry.shape)

    @property
    def dtype(self) -> torch.dtype:
        """The tensor's torch dtype."""
        return torch_dtype(self._entry)

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray[Any]:
        """Return all elements."""
        self._require_copy(copy)
        try:
            torch.empty(0, dtype=self.dtype).numpy()
        except TypeError as error:
            raise UnsupportedError(
                f"numpy has no {self._entry.dtype}",
                where=dotted(self._entry.path),
                fix="Open the checkpoint with framework='numpy', which uses the dtypes in ml_dtypes.",
            ) from error
        return np.asarray(self[...], dtype)

    def _read(self, saved: CheckpointSource, box: Box) -> torch.Tensor:
        (entry,) = saved.locate([self._entry])  # before memory is allocated
        tensor = allocate(entry, box.size)
        saved.elements.read([(entry, TensorShards(entry.shape, tensor.dtype, (LocalShard(box, tensor),)))])
        return tensor

    def _pick(self, read: torch.Tensor, index: tuple[int | slice, ...]) -> torch.Tensor:
        steps = [pick.step for pick in index if isinstance(pick, slice)]
        return read[index].clone() if any(step != 1 for step in steps) else read[index]


def open(path: Any, *, verify: Verify = "read", base: NamedBases | None = None) -> OpenedTensors:
    """Open a checkpoint in any format: `open(path)["model.layers.0.weight"][0:128]`."""
    # `with open(path) as checkpoint:` closes its files at the end of the block.
    if verify == "full":
        raise UsageError("an open checkpoint is verified only as it is read", found=verify, expected="False or 'read'")
    return Opened(CheckpointSource(fix_folder(resolve_step(path)), verify, bases=base or ""), SavedTensor)
