"""Decide which versions of a stream may go, without I/O."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from shardckpt.errors import UsageError
from shardckpt.stream.format.stream_records import Version
from shardckpt.stream.retention.leases import VersionLease

__all__ = ["plan_removal", "require_anchors"]


def plan_removal(
    bases: Mapping[Version, Version | None],
    anchors: Collection[Version],
    leases: Sequence[VersionLease],
    keep_anchors: int,
    kept: Collection[int],
) -> list[Version]:
    """Return the versions that nothing needs, in order.

    Args:
        bases: Each published version's base; None for an anchor alone.
        anchors: Versions that have an anchor.
        leases: Readers that may still read.
        keep_anchors: How many of the newest anchors stay, with all versions after them.
        kept: Numbers of versions that stay readable, such as the numbers of kept training steps.
    """
    if not bases:
        return []
    newest = max(bases)
    stays = set(_walk_back(newest, bases, anchors, keep_anchors))
    if not stays & set(anchors):
        return []  # no anchor reaches the newest version: nothing may go
    for lease in leases:
        stays.update(lease.needs)
        stays.update(_walk_to(newest, lease.held, bases))
    for version in bases:
        if version.number in kept:
            stays.update(_walk_back(version, bases, anchors, 1))
    return sorted(version for version in bases if version not in stays)


def _walk_back(
    version: Version, bases: Mapping[Version, Version | None], anchors: Collection[Version], count: int
) -> Iterator[Version]:
    """Yield a version and those before it, to an anchor."""
    now: Version | None = version
    while now is not None and now in bases and count:
        yield now
        count -= now in anchors
        now = bases[now]


def _walk_to(newest: Version, held: Version | None, bases: Mapping[Version, Version | None]) -> list[Version]:
    """Return the versions after a held one; empty if the chain does not lead there."""
    passed = []
    now: Version | None = newest
    while now is not None and now in bases:
        passed.append(now)
        if now == held:
            return passed
        now = bases[now]
    return []


def require_anchors(keep_anchors: object) -> None:
    """Require a number of anchors to keep. Raises UsageError."""
    if type(keep_anchors) is not int or keep_anchors < 1:
        raise UsageError("`keep_anchors` must be a number from 1", found=repr(keep_anchors))
