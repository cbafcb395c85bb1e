"""Publish full tensors from one process: the other ranks gather them, and have no part in the stream."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from functools import partial

import torch
from torch import distributed as dist

from shardckpt.errors import NameCollisionError
from shardckpt.storage.resolve_url import as_url, fix_folder
from shardckpt.stream.format.stream_folder import StreamFolder
from shardckpt.stream.publish.ledger import Anchors
from shardckpt.stream.publish.publisher import Publisher
from shardckpt.stream.publish.snapshot import require_range

__all__ = ["FullTensorPublisher"]

_CAST = (torch.float64, torch.float32, torch.float16, torch.bfloat16)  # what a `Publisher` casts


class FullTensorPublisher:
    """Publishes tensors as an iterator yields them, in the process that calls it.

    Arguments are those of `Publisher`.
    """

    def __init__(
        self, url: str | os.PathLike[str], dtype: str | None, key_map: Mapping[str, str] | None, anchors: Anchors
    ) -> None:
        self._make = partial(Publisher, fix_folder(as_url(url)), dtype=dtype, key_map=key_map, anchors=anchors)
        self.url = self._make().url  # an unknown value is refused now
        self._dtype = None if dtype is None else getattr(torch, dtype)
        self._group: dist.ProcessGroup | None = None  # of this process alone
        self._publisher: Publisher | None = None  # once it has resumed
        self._copies: dict[str, torch.Tensor] = {}

    def find_newest(self) -> int | None:
        """Return the number of the newest version; None without one."""
        newest = StreamFolder(self.url).find_number(None)
        return None if newest is None else newest.version.number

    def publish(self, tensors: Iterable[tuple[str, torch.Tensor]], version: int | None = None) -> int:
        """Publish a version.

        Args:
            tensors: Names and full tensors; each may change once the next one is requested.
            version: Number of the version. None takes one more than the newest number; after a restart, the newest one
                itself if it has these tensors.

        Returns:
            The version's number.
        """
        weights = self._copy_all(tensors)
        if self._publisher is None:
            publisher = self._make(process_group=self._require_group())
            found = publisher.resume(weights)
            self._publisher = publisher
            if version is None and found is not None and found == self.find_newest():
                return found
        number = (self.find_newest() or 0) + 1 if version is None else version
        self._publisher.publish(number, weights).result()
        return number

    def close(self) -> None:
        """Release memory and the group."""
        group, self._group, self._publisher = self._group, None, None
        self._copies.clear()
        if group is not None and dist.is_initialized():
            dist.destroy_process_group(group)

    def _copy_all(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        weights: dict[str, torch.Tensor] = {}
        iterator = iter(tensors)
        try:
            for name, tensor in iterator:
                if name in weights:
                    raise NameCollisionError("two tensors have one name", where=name)
                weights[name] = self._copy(name, tensor.detach())
        except BaseException:
            for _ in iterator:  # the other ranks gather each tensor together with this one, and would wait
                pass
            raise
        return weights

    def _copy(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        dtype = self._dtype if self._dtype is not None and tensor.dtype in _CAST else tensor.dtype
        require_range(name, tensor, dtype)
        copy = self._copies.get(name)
        if copy is None or (copy.shape, copy.dtype) != (tensor.shape, dtype):
            copy = self._copies[name] = torch.empty(tensor.shape, dtype=dtype, device="cpu")
        return copy.copy_(tensor)

    def _require_group(self) -> dist.ProcessGroup | None:
        if self._group is None and dist.is_available() and dist.is_initialized():
            self._group = dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)
        return self._group
