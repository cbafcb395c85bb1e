"""A version's tensors, made on demand from an anchor and the changes after it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from shardckpt.errors import CheckpointError, ChecksumError, IncompleteError, MissingFileError
from shardckpt.reader import Reader
from shardckpt.storage.store import Store
from shardckpt.stream.format.anchor import open_anchor, read_anchor
from shardckpt.stream.format.chain import Chain, plan_chain
from shardckpt.stream.format.codec import apply_part
from shardckpt.stream.format.delta_file import LocatedChange, read_index
from shardckpt.stream.format.digest import ZERO, Digest, combine_digests
from shardckpt.stream.format.held_boxes import HeldBox, collect_changes
from shardckpt.stream.format.stream_folder import StreamFolder
from shardckpt.stream.format.stream_records import VersionCommit
from shardckpt.stream.versions.made_file import group_tensors

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["VersionContent", "require_digests"]


class VersionContent:
    """What leads to a version.

    Attributes:
        folder: The stream.
        commit: The version.
        chain: The way to it.
        missing: Files of changes that are gone, by their names in the stream.
    """

    def __init__(self, folder: StreamFolder, commit: VersionCommit) -> None:
        self.folder, self.commit = folder, commit
        _require_sum(commit, folder.url)
        self.chain: Chain = plan_chain(commit, None, folder.find_commit, folder.has_anchor, folder.url)
        self.missing: tuple[str, ...] = ()
        self._indexes: list[Mapping[str, Sequence[LocatedChange]]] = [
            self._read_index(each) for each in self.chain.deltas
        ]

    @property
    def url(self) -> str:
        """Path or URL of the version's folder."""
        return f"{self.folder.url}/{self.commit.version.folder}"

    @property
    def store(self) -> Store:
        """Store of the stream."""
        return self.folder.store

    @cached_property
    def groups(self) -> Sequence[tuple[HeldBox, ...]]:
        """All tensors in full, in groups to read together."""
        tensors = self.folder.record.tensors
        return group_tensors((name, each.dtype, tuple(each.shape)) for name, each in tensors.items())

    def require_files(self) -> None:
        """Require that no file of changes is gone. Raises IncompleteError."""
        if self.missing:
            raise IncompleteError(
                "files of changes are gone",
                where=self.folder.url,
                found=", ".join(self.missing[:4]),
                fix="Take a version after the next anchor.",
            )

    def read(self, boxes: Sequence[HeldBox]) -> NDArray[np.uint8]:
        """Return a buffer with full tensors. Raises CheckpointError, StorageError."""
        self.require_files()
        buffer = np.empty(max((each.start + each.nbytes for each in boxes), default=0), np.uint8)
        read_anchor(self._anchor, boxes, buffer)
        indexes = ([change for each in boxes for change in index.get(each.name, ())] for index in self._indexes)
        for held, changes in collect_changes(self.folder.store, indexes, self.folder.record.tensors, boxes).items():
            values = held.view(buffer)
            for change, box in changes:
                apply_part(change, box, values, held.box)
        return buffer

    def check(self, boxes: Sequence[HeldBox], buffer: NDArray[np.uint8]) -> None:
        """Require that tensors have the digests of the commit. Raises ChecksumError."""
        require_digests(self.commit, boxes, buffer, self.folder.url)

    @cached_property
    def _anchor(self) -> Reader:
        assert self.chain.anchor is not None, "no version is held"
        return open_anchor(self.folder, self.chain.anchor)

    def _read_index(self, commit: VersionCommit) -> Mapping[str, Sequence[LocatedChange]]:
        """Return where a version's files have the changes of each tensor."""
        located: dict[str, list[LocatedChange]] = {}
        for file in commit.files:
            try:
                index = read_index(self.folder.store, commit.version, [file], commit.stream, self.folder.record.tensors)
            except MissingFileError:
                self.missing += (f"{commit.version.folder}/{file.name}",)
                continue
            for each in index:
                located.setdefault(each.name, []).append(each)
        return located


def _require_sum(commit: VersionCommit, where: str) -> None:
    """Require that a commit's digests fit its digest of all tensors. Raises CheckpointError."""
    found = combine_digests({name: Digest.from_hex(text) for name, text in commit.digests.items()}).hex()
    if found != commit.result_digest:
        raise CheckpointError(
            "the digests in the commit do not fit together",
            where=f"{where}/{commit.version.folder}",
            found=found,
            expected=commit.result_digest,
        )


def require_digests(commit: VersionCommit, boxes: Sequence[HeldBox], buffer: NDArray[np.uint8], where: str) -> None:
    """Require that full tensors have the digests of a commit. Raises ChecksumError."""
    for each in boxes:
        found = each.digest(buffer).hex()
        expected = commit.digests.get(each.name, ZERO.hex())  # no rank writes an empty tensor
        if found != expected:
            raise ChecksumError(
                f"version {commit.version} has another tensor than its commit says: {each.name}",
                where=where,
                found=found,
                expected=expected,
                fix="Take a version after the next anchor.",
            )
