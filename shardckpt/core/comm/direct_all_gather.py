"""All-gathers for large CPU tensors by messages between ranks, which are received where they are needed.

gloo's all-gather receives the output into its own memory, and copies it at the end. An all-gather that runs during
computation then needs twice the memory, at a step's peak.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from shardckpt.devices import has_streams

MIN_SHARD_BYTES = 1 << 18  # smallest shard to send directly; for smaller ones the number of messages counts

_TAG = 0x5A4D  # differs from users' tags


def has_direct_messages(group: dist.ProcessGroup) -> bool:
    """Return True if gloo itself sends a group's CPU tensors, not a wrapper that compares collectives."""
    try:
        return isinstance(_get_backend(group), getattr(dist, "ProcessGroupGloo", ()))
    except RuntimeError:  # the group has no backend for the CPU
        return False


def _get_backend(group: dist.ProcessGroup) -> Any:
    return group._get_backend(torch.device("cpu"))


def is_sent_directly(shard: torch.Tensor) -> bool:
    """Return True if shards like this one are sent directly; equal on all ranks with equal shard sizes."""
    return shard.device.type == "cpu" and shard.nbytes >= MIN_SHARD_BYTES and not has_streams(shard.device)


class DirectMessages:
    """One all-gather's messages, from and to all other ranks."""

    def __init__(self, works: list[dist.Work], timeout: timedelta) -> None:
        # Messages do not follow a changed group timeout by themselves.
        self._works = works
        self._timeout = timeout

    def wait(self) -> None:
        """Wait for all messages."""
        works, self._works = self._works, []
        # After an error the connections are closed, and the messages are dropped: the memory may be freed. An interrupt
        # is raised only when the messages are complete: gloo cannot use the connections again before.
        try:
            self._wait_for(works)
        except RuntimeError:
            works.clear()
            raise
        finally:
            with suppress(RuntimeError):
                self._wait_for(works)
            works.clear()

    def _wait_for(self, works: list[dist.Work]) -> None:
        while works:
            works.pop(0).wait(self._timeout)


def start_all_gather(group: dist.ProcessGroup, full: torch.Tensor, shard: torch.Tensor) -> DirectMessages:
    """Start to fill `full` with all ranks' shards in a group, in rank order. Collective."""
    rank, size = group.rank(), group.size()
    rows = full.view(size, -1)
    works = [dist.irecv(rows[rank - i], group=group, group_src=(rank - i) % size, tag=_TAG) for i in range(1, size)]
    works += [dist.isend(shard, group=group, group_dst=(rank + i) % size, tag=_TAG) for i in range(1, size)]
    if rows[rank].data_ptr() != shard.data_ptr():
        rows[rank].copy_(shard)
    options = getattr(_get_backend(group), "options", None)
    # Torch has no public name for it; 0: the group's initial timeout.
    timeout = getattr(options, "_timeout", timedelta())
    return DirectMessages([work for work in works if work is not None], timeout)
