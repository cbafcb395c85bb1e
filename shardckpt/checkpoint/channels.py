"""Channels through which the ranks of a process group send messages."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch.distributed as dist

from shardckpt.groups import Coordinator, new_coordinator


class Channels:
    """Coordinators of one process group: one for this process's calls, one for threads in the background.

    Args:
        main: For calls of the training loop.

    Attributes:
        main: As given.
    """

    def __init__(self, main: Coordinator) -> None:
        self.main = main
        self._background: Coordinator | None = None

    @property
    def has_lost_rank(self) -> bool:
        """Whether a rank is lost: no more messages may be sent."""
        return self.main.has_lost_rank or (self._background is not None and self._background.has_lost_rank)

    def background_coordinator(self, group: dist.ProcessGroup | None) -> Coordinator:
        """Return the coordinator of threads in the background. Collective at the first call.

        Args:
            group: The process group of these channels.
        """
        if self._background is None:
            self._background = new_coordinator(group)
        return self._background


_CHANNELS: WeakKeyDictionary[dist.ProcessGroup, Channels] = WeakKeyDictionary()
ALONE = Channels(Coordinator(None))
"""Channels of a process that is alone."""


def resolve_process_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """Return a process group, all ranks for None; None without `torch.distributed`, where this process is alone."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    given = dist.group.WORLD if group is None else group
    assert given is not None
    return given


def get_channels(group: dist.ProcessGroup | None, refusal: Exception | None = None) -> Channels:
    """Return the channels of a process group: made by the first call, and again once a rank is lost. Collective then.

    Args:
        group: The ranks; all if None.
        refusal: Raised if a rank is lost, since no other rank can receive it.
    """
    key = resolve_process_group(group)
    if key is None:
        return ALONE
    known = _CHANNELS.get(key)
    if known is not None and known.has_lost_rank and refusal is not None:
        raise refusal
    if known is None or known.has_lost_rank:
        known = _CHANNELS[key] = Channels(new_coordinator(group))
    return known
