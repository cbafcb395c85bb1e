"""Whether the parts of all workers add up to a version."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

from shardckpt.boxes import Box, Shape, full_box, intersect
from shardckpt.errors import ChecksumError
from shardckpt.stream.format.digest import ZERO, Digest
from shardckpt.stream.format.stream_records import StreamTensor, VersionCommit

__all__ = ["WorkerBox", "build_digest_error", "count_once", "find_wrong_digests"]

WorkerBox: TypeAlias = tuple[str, Sequence[int], Sequence[int]]  # name, offset and size of a box that a worker holds


def count_once(workers: Sequence[Sequence[WorkerBox]], tensors: Mapping[str, StreamTensor]) -> list[dict[str, bool]]:
    """Return for each worker whether its part of a tensor counts, by name.

    Parts count if they cover the tensor once; of equal ones the first does.
    """
    counted: list[dict[str, bool]] = [{} for _ in workers]
    held: dict[str, dict[tuple[Box, ...], int]] = {}
    for rank, boxes in enumerate(workers):
        own: dict[str, list[Box]] = {}
        for name, offset, size in boxes:
            own.setdefault(name, []).append(Box(tuple(offset), tuple(size)))
        for name, each in own.items():
            held.setdefault(name, {}).setdefault(tuple(each), rank)
    for name, parts in held.items():
        boxes_of_all = [box for part in parts for box in part]
        if _covers_once(boxes_of_all, tuple(tensors[name].shape)):
            for rank in parts.values():
                counted[rank][name] = True
    return counted


def _covers_once(boxes: Sequence[Box], shape: Shape) -> bool:
    if sum(box.volume for box in boxes) != full_box(shape).volume:
        return False
    ordered = sorted(boxes)
    return all(
        intersect(one, other) is None
        for at, one in enumerate(ordered)
        for other in ordered[at + 1 :]
        if other.offset[:1] < one.stop[:1]
    )


def find_wrong_digests(commit: VersionCommit, parts: Iterable[Mapping[str, str]]) -> list[str]:
    """Return the tensors whose parts on all workers do not add up to a version's digests."""
    sums: dict[str, Digest] = {}
    for part in parts:
        for name, text in part.items():
            sums[name] = sums.get(name, ZERO) + Digest.from_hex(text)
    return [name for name, digest in sums.items() if digest.hex() != commit.digests.get(name, ZERO.hex())]


def build_digest_error(commit: VersionCommit, wrong: Sequence[str], where: str) -> ChecksumError:
    """Return the error for tensors that differ from a version's digests."""
    return ChecksumError(
        f"version {commit.version} has other weights than its commit says, in {len(wrong)} tensors",
        where=where,
        found=", ".join(wrong[:4]),
        fix="Call stage() again: it starts at an anchor. If that fails too, the stream is damaged.",
    )
