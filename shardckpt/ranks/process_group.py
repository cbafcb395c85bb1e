"""The ranks of a process group as one linked group, which the first call creates."""

from __future__ import annotations

from typing import TypeAlias
from weakref import WeakKeyDictionary

import torch.distributed as dist

from shardckpt.errors import UsageError
from shardckpt.ranks.linked_group import ALONE, LinkedGroup, RankLink
from shardckpt.ranks.torch_link import link_ranks

__all__ = ["GROUPS", "ProcessGroup", "get_ranks", "has_lost_rank", "link_group", "resolve_process_group"]

ProcessGroup: TypeAlias = "dist.ProcessGroup | RankLink"  # ranks of a save or a load

GROUPS: WeakKeyDictionary[ProcessGroup, LinkedGroup] = WeakKeyDictionary()  # of this process


def get_ranks(group: ProcessGroup | None, refusal: Exception | None = None) -> LinkedGroup:
    """Return a process group's ranks. Collective if they have to be linked."""
    # The first call links them, and the first call after a rank is lost, unless it has a `refusal` to raise.
    key = resolve_process_group(group)
    if key is None:
        return ALONE
    known = GROUPS.get(key)
    if known is not None and known.is_broken and refusal is not None:
        raise refusal
    if known is None or known.is_broken:
        known = GROUPS[key] = link_group(group)
    return known


def has_lost_rank(group: ProcessGroup | None) -> bool:
    """Return True if a process group has lost a rank. Unlike `get_ranks`, this links no ranks."""
    key = resolve_process_group(group)
    known = None if key is None else GROUPS.get(key)
    return known is not None and known.is_broken


def link_group(group: ProcessGroup | None = None) -> LinkedGroup:
    """Return a process group's ranks with a new link between them. Collective."""
    if isinstance(group, RankLink):
        return LinkedGroup(group.renew()) if group.size > 1 else ALONE
    is_alone = not (dist.is_available() and dist.is_initialized()) or dist.get_world_size(group) == 1
    return ALONE if is_alone else LinkedGroup(link_ranks(group))


def resolve_process_group(group: ProcessGroup | None) -> ProcessGroup | None:
    """Return a process group, by default all ranks; None for a single process."""
    if isinstance(group, RankLink):
        return group
    if not (dist.is_available() and dist.is_initialized()):
        return None
    given = dist.group.WORLD if group is None else group
    if not isinstance(given, dist.ProcessGroup):
        raise UsageError("`process_group` must be a process group", found=repr(group))
    return given
