"""Choose how to reach a version: from the held one by changes, or from an anchor and the changes after it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shardckpt.errors import IncompleteError
from shardckpt.stream.format.stream_records import Version, VersionCommit

__all__ = ["Chain", "plan_chain"]

_MAX_LINKS = 100_000


@dataclass(frozen=True, slots=True)
class Chain:
    """The way to a version."""

    target: VersionCommit
    anchor: Version | None  # to load first; None to start at the held version
    deltas: tuple[VersionCommit, ...]  # commits whose changes follow, in order

    @property
    def base_digest(self) -> str | None:
        """Digest of all tensors before the changes."""
        return self.deltas[0].base_digest if self.deltas else self.target.result_digest


def plan_chain(
    target: VersionCommit,
    held: Version | None,
    find_commit: Callable[[Version], VersionCommit | None],
    has_anchor: Callable[[Version], bool],
    where: str,
) -> Chain:
    """Return the shorter way to a version, in bytes.

    Args:
        target: The version to reach.
        held: Version that the receiver has; None without one.
        find_commit: Returns a version's commit; None if it is gone.
        has_anchor: Whether a version has an anchor.
        where: The stream, for messages.

    Raises:
        IncompleteError: A version between is gone, and no anchor replaces it.
    """
    deltas: list[VersionCommit] = []
    anchored: Chain | None = None
    commit, nbytes = target, 0
    while len(deltas) < _MAX_LINKS:
        if commit.version == held:
            if anchored is not None and nbytes > target.full_bytes:
                return anchored
            return Chain(target, None, tuple(reversed(deltas)))
        if anchored is None and has_anchor(commit.version):
            anchored = Chain(target, commit.version, tuple(reversed(deltas)))
        if anchored is not None and (held is None or nbytes > target.full_bytes):
            return anchored
        if commit.base is None or (held is not None and commit.base < held and anchored is not None):
            break
        deltas.append(commit)
        nbytes += commit.nbytes
        base = find_commit(commit.base)
        if base is None or base.result_digest != commit.base_digest:
            if anchored is not None:
                break
            raise IncompleteError(
                f"version {target.version} cannot be reached: it needs version {commit.base}, which is gone",
                where=where,
                fix="Wait for the next anchor, or take a version after one.",
            )
        commit = base
    if anchored is None:
        raise IncompleteError(
            f"version {target.version} cannot be reached: no version before it has an anchor",
            where=where,
            fix="Wait for the next anchor.",
        )
    return anchored
