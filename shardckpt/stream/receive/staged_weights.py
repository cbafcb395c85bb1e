"""Stage a version: read and verify what leads to it, and combine its changes, while the server serves."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from shardckpt.boxes import Box, shift
from shardckpt.errors import CheckpointError, MissingFileError
from shardckpt.events.warn_user import warn_user
from shardckpt.stream.format.anchor import open_anchor, read_anchor
from shardckpt.stream.format.chain import Chain
from shardckpt.stream.format.codec import BoxChange, apply_part, compose_changes, shift_positions
from shardckpt.stream.format.delta_file import read_index
from shardckpt.stream.format.digest import ZERO, Digest
from shardckpt.stream.format.held_boxes import (
    HeldBox,
    NewElements,
    PartChange,
    collect_changes,
    digest_change,
    sum_digests,
)
from shardckpt.stream.format.stream_folder import StreamFolder
from shardckpt.stream.format.stream_records import Version, VersionCommit
from shardckpt.stream.receive.mirror import Mirror
from shardckpt.stream.receive.version_chooser import find_chain

__all__ = ["StagedWeights", "stage_version", "view_as_tensor"]


@dataclass(frozen=True, slots=True)
class StagedWeights:
    """A version that is ready to apply: all boxes in a buffer, or new elements of the held ones.

    The digests are made from the same new elements, so that the mirror may be damaged between both.
    """

    target: VersionCommit
    buffer: NDArray[np.uint8] | None  # None if the version is changes of what the mirror holds
    changes: Mapping[HeldBox, NewElements]
    digests: Mapping[str, Digest]  # this worker's part of the result
    versions: int  # how many were combined

    @property
    def changed(self) -> int:
        """Number of elements to write."""
        if self.buffer is not None:
            return len(self.buffer)
        return sum(len(change.values) for change in self.changes.values())


def stage_version(
    folder: StreamFolder, commit: VersionCommit, mirror: Mirror, doomed: Collection[Version], *, is_full: bool
) -> StagedWeights:
    """Read a version by changes of what the mirror holds; if those are damaged, from an anchor, or the one before.

    Args:
        folder: The stream.
        commit: The version.
        mirror: What this worker holds; unchanged.
        doomed: Versions that are being removed.
        is_full: Whether all boxes are needed, because the server has none of the stream's versions.
    """
    if mirror.version is not None:
        with suppress(CheckpointError, MissingFileError):
            chain = find_chain(folder, commit, mirror.version, doomed)
            return _stage_weights(folder, chain, mirror, [], is_full=is_full)
    damaged: list[Version] = []  # anchors
    chain = find_chain(folder, commit, None, doomed)
    while True:
        try:
            return _stage_weights(folder, chain, mirror, damaged, is_full=is_full)
        except (CheckpointError, MissingFileError) as error:
            if chain.anchor not in damaged:
                raise
            try:
                chain = find_chain(folder, commit, None, doomed, damaged)
            except CheckpointError:
                raise error from None
            warn_user(f"the anchor of version {damaged[-1]} is damaged, and an earlier one is used: {error}")


def _stage_weights(
    folder: StreamFolder, chain: Chain, mirror: Mirror, damaged: list[Version], *, is_full: bool
) -> StagedWeights:
    """Read what leads to a version. An anchor that cannot be read is added to `damaged`."""
    if chain.anchor is None and not is_full:
        return _stage_changes(folder, chain, mirror)
    buffer = mirror.allocate()
    try:
        if chain.anchor is None:
            for box in mirror.boxes:
                box.view(buffer)[:] = mirror.view(box)
        else:
            try:
                read_anchor(open_anchor(folder, chain.anchor), mirror.boxes, buffer)
            except (CheckpointError, MissingFileError):
                damaged.append(chain.anchor)
                raise
        collected = _collect(folder, chain.deltas, mirror.boxes)

        def complete(box: HeldBox) -> Digest:
            for change, where in collected.get(box, ()):
                apply_part(change, where, box.view(buffer), box.box)
            return box.digest(buffer)

        return StagedWeights(chain.target, buffer, {}, sum_digests(mirror.boxes, complete), len(chain.deltas))
    except BaseException:
        mirror.discard(buffer)
        raise


def _stage_changes(folder: StreamFolder, chain: Chain, mirror: Mirror) -> StagedWeights:
    composed: dict[HeldBox, NewElements] = {}
    added: dict[str, Digest] = {}
    for box, changes in _collect(folder, chain.deltas, mirror.boxes).items():
        old = mirror.view(box)
        change = _compose(changes, box, old)
        if not len(change.values):
            continue
        digest, composed[box] = digest_change(box, change, old)
        added[box.name] = added.get(box.name, ZERO) + digest
    # The mirror may be damaged: what it holds is digested now, after the old elements were read. So the sums are the
    # digests of what it will hold.
    digests = {name: digest + added[name] for name, digest in mirror.digest_held(added).items()}
    digests = {**mirror.digests, **digests}
    return StagedWeights(chain.target, None, composed, digests, len(chain.deltas))


def _compose(changes: Sequence[PartChange], held: HeldBox, old: NDArray[Any]) -> BoxChange:
    """Return the changes of parts of a held box as one change of the box."""
    if all(where == held.box or not change.is_full for change, where in changes):
        return compose_changes([_widen(change, where, held.box) for change, where in changes])
    made = old.copy()
    for change, where in changes:
        apply_part(change, where, made, held.box)
    xor = old ^ made
    positions = np.flatnonzero(xor)
    return BoxChange(len(old), positions, xor[positions])


def _widen(change: BoxChange, where: Box, held: Box) -> BoxChange:
    """Return a part's change, which has positions, as a change of the held box."""
    if where == held:
        return change
    positions = shift_positions(change, held.size, shift(where, held.offset))
    return BoxChange(held.volume, positions, change.values)


def _collect(
    folder: StreamFolder, commits: Sequence[VersionCommit], boxes: Sequence[HeldBox]
) -> dict[HeldBox, list[PartChange]]:
    tensors = folder.record.tensors
    indexes = (read_index(folder.store, each.version, each.files, each.stream, tensors) for each in commits)
    return collect_changes(folder.store, indexes, tensors, boxes)


def view_as_tensor(dtype: str, values: NDArray[Any]) -> torch.Tensor:
    """Return flat elements as a tensor over the same memory."""
    made: torch.Tensor = torch.from_numpy(values.view(np.uint8)).view(getattr(torch, dtype))
    return made
