"""Write versions in the folder dialect of slime, miles and ModelExpress.

Each version is a folder `weight_v000012` of safetensors with an index, which is written last. A full version has plain
tensors. Another one has, for each changed tensor, a zstd frame of the XOR with the version before as bytes, and
checksums of the new bytes in `__metadata__`. The version before is made from its anchor, a group of tensors at a time.
Then the version's own changes are applied.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import zstandard

from shardckpt.encodings.safetensors import HeaderTensor, encode_header, parse_json
from shardckpt.errors import MissingFileError, TargetExistsError, UsageError
from shardckpt.native.payload import HF_INDEX
from shardckpt.storage.resolve_url import as_url, open_place
from shardckpt.storage.store import read_bytes
from shardckpt.stream.format.chain import plan_chain
from shardckpt.stream.format.codec import apply_part
from shardckpt.stream.format.delta_file import read_index
from shardckpt.stream.format.held_boxes import collect_changes
from shardckpt.stream.format.stream_folder import StreamFolder
from shardckpt.stream.format.stream_records import VersionCommit
from shardckpt.stream.versions.hf_delta_checksums import HASHERS, hash_bytes
from shardckpt.stream.versions.stream_follower import StreamFollower
from shardckpt.stream.versions.version_content import VersionContent, require_digests
from shardckpt.stream.versions.version_list import VersionList, describe_versions, find_commits

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["export_versions"]

_FILE = "model-00001-of-00001.safetensors"
_OWN_KEY = "shardckpt_stream"  # in the index: the stream that the folder was written from
_LEVEL = 1
_MAX_INDEX_BYTES = 1 << 28


def export_versions(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    checksum: str = "xxh3-128",
    follow_s: float = 0.0,
) -> VersionList:
    """Write versions as folders that slime, miles and ModelExpress read.

    Versions with an anchor become full versions, others changes of the version before. Versions that are in `dst`
    already stay, so that a later call adds the new ones.

    Args:
        src: Path or URL of a stream; of one version (`STREAM@12`) to write it with what leads to it.
        dst: Folder or URL to write.
        checksum: `"xxh3-128"`, or `"adler32"`, which ModelExpress needs.
        follow_s: Seconds to wait for a version after the newest one, and for the stream. With it, each new version is
            written once it is published, until none comes for so long. A lease keeps the versions meanwhile.

    Returns:
        The versions in `dst`, in order.

    Raises:
        UsageError: An argument has an unknown value, or the versions' numbers do not ascend.
        SourceNotFoundError: No stream is here, or it has no such version.
        TargetExistsError: `dst` has a version of another stream.
        CheckpointError: The stream is damaged.
        StorageError: Reading or writing failed.
    """
    if checksum not in HASHERS:
        raise UsageError("unknown `checksum`", found=repr(checksum), expected=" or ".join(HASHERS))
    url, dst = as_url(src), as_url(dst)
    follower = StreamFollower(url, follow_s) if follow_s != 0.0 else None
    if follower is not None:
        follower.wait_for_start()
    folder, commits = find_commits(url)
    export = _Export(folder, dst, checksum)
    try:
        lineage = _find_lineage(folder, commits[-1], is_short=len(commits) == 1) if commits else []
        while lineage:
            if follower is not None:
                follower.keep(lineage)
            export.write(lineage)
            newest = None if follower is None else follower.wait_for_version(export.last)
            lineage = [] if newest is None else _find_lineage(folder, newest, is_short=True, known=export.last)
    finally:
        if follower is not None:
            follower.release()
    return replace(describe_versions(folder, export.lineage), target=dst)


def _find_lineage(
    folder: StreamFolder, last: VersionCommit, *, is_short: bool, known: VersionCommit | None = None
) -> Sequence[VersionCommit]:
    """Return the versions that lead to the last one: after a known version, or from the first anchor.

    If short, or if the known version does not lead there, they start at the last version's own anchor.
    """
    chain = plan_chain(last, None, folder.find_commit, folder.has_anchor, folder.url)
    found = [last]
    while known is not None or not is_short or found[-1].version != chain.anchor:
        base = None if found[-1].base is None else folder.find_commit(found[-1].base)
        if base is None or base.result_digest != found[-1].base_digest:
            break
        if known is not None and base.version == known.version:
            return _require_ascending([known, *reversed(found)], folder.url)[1:]
        found.append(base)
    if known is None:
        first = max(at for at, each in enumerate(found) if folder.has_anchor(each.version))
        return _require_ascending(found[first::-1], folder.url)
    own = next(at for at, each in enumerate(found) if each.version == chain.anchor)
    return _require_ascending([known, *found[own::-1]], folder.url)[1:]


def _require_ascending(lineage: Sequence[VersionCommit], where: str) -> Sequence[VersionCommit]:
    numbers = [each.version.number for each in lineage]
    if numbers != sorted(set(numbers)):
        raise UsageError(
            "the numbers of the versions must ascend in this dialect",
            where=where,
            found=", ".join(str(each.version) for each in lineage[-4:]),
            fix="Export one version after the last restart: STREAM@NUMBER.",
        )
    return lineage


class _Export:
    """Writes versions into a folder."""

    def __init__(self, folder: StreamFolder, dst: str, checksum: str) -> None:
        self._folder, self._dst, self._checksum = folder, dst, checksum
        self._store = open_place(dst)
        self.lineage: list[VersionCommit] = []

    @property
    def last(self) -> VersionCommit | None:
        """The last version that is written."""
        return self.lineage[-1] if self.lineage else None

    def write(self, commits: Sequence[VersionCommit]) -> None:
        """Write versions that lead from the last one, or from an anchor, unless they are there."""
        for commit in commits:
            if not self._is_written(commit):
                if self.last is None or commit.base != self.last.version or self._folder.has_anchor(commit.version):
                    self._write_full(commit)
                else:
                    self._write_changes(self.last, commit)
            self.lineage.append(commit)

    def _is_written(self, commit: VersionCommit) -> bool:
        """Return True if the target has a version. Raises TargetExistsError if it is of another stream."""
        name = f"{_name_folder(commit)}/{HF_INDEX}"
        try:
            size = min(self._store.size(name), _MAX_INDEX_BYTES)
            index = parse_json(read_bytes(self._store, name, 0, size), where=f"{self._dst}/{name}")
        except MissingFileError:
            return False
        metadata = index.get("metadata") if isinstance(index, dict) else None
        found = metadata.get(_OWN_KEY) if isinstance(metadata, dict) else None
        if found != self._name_source(commit):
            raise TargetExistsError(
                "this folder has a version of another stream",
                where=f"{self._dst}/{_name_folder(commit)}",
                found=repr(found),
                expected=self._name_source(commit),
                fix="Choose another folder.",
            )
        return True

    def _name_source(self, commit: VersionCommit) -> str:
        return f"{self._folder.record.id} {commit.result_digest}"

    def _write_full(self, commit: VersionCommit) -> None:
        """Write all tensors of a version, a group at a time."""
        content, tensors = VersionContent(self._folder, commit), self._folder.record.tensors
        header = encode_header(
            [HeaderTensor(name, each.dtype, tuple(each.shape)) for name, each in tensors.items()], {"format": "pt"}
        )
        with self._store.create(f"{_name_folder(commit)}/{_FILE}") as writer:
            writer.write(header)
            for boxes in content.groups:
                buffer = content.read(boxes)
                content.check(boxes, buffer)
                for box in boxes:
                    writer.write(buffer[box.start : box.start + box.nbytes].tobytes())
        self._write_index(commit, {"total_size": commit.full_bytes, "version": _name_number(commit)}, tensors)

    def _write_changes(self, before: VersionCommit, commit: VersionCommit) -> None:
        """Write the changes from one version to the next."""
        frames: dict[str, bytes] = {}
        checksums: dict[str, str] = {}
        compress = zstandard.ZstdCompressor(level=_LEVEL).compress
        for name, xor, new in _iter_changed(VersionContent(self._folder, before), commit):
            frames[name] = compress(xor.tobytes())
            checksums[name] = hash_bytes(HASHERS[self._checksum], [new.data])
        if frames:
            header = encode_header(
                [HeaderTensor(name, "uint8", (len(each),)) for name, each in frames.items()], checksums
            )
            with self._store.create(f"{_name_folder(commit)}/{_FILE}") as writer:
                writer.write(header)
                for frame in frames.values():
                    writer.write(frame)
        metadata = {
            "version": _name_number(commit),
            "base_version": _name_number(before),
            "delta_encoding": "xor",
            "compression_format": "zstd",
            "checksum_format": self._checksum,
        }
        self._write_index(commit, metadata, frames)

    def _write_index(self, commit: VersionCommit, metadata: Mapping[str, object], names: Mapping[str, object]) -> None:
        own = {**metadata, _OWN_KEY: self._name_source(commit)}
        index = {"metadata": own, "weight_map": dict.fromkeys(names, _FILE)}
        with self._store.create(f"{_name_folder(commit)}/{HF_INDEX}") as writer:
            writer.write(json.dumps(index, indent=1).encode())


def _name_number(commit: VersionCommit) -> str:
    return f"{commit.version.number:06d}"


def _name_folder(commit: VersionCommit) -> str:
    return f"weight_v{_name_number(commit)}"


def _iter_changed(
    before: VersionContent, commit: VersionCommit
) -> Iterator[tuple[str, NDArray[np.uint8], NDArray[np.uint8]]]:
    """Yield the name of each tensor that a version changes, the XOR of its bytes, and the new bytes."""
    store, tensors = before.folder.store, before.folder.record.tensors
    index = read_index(store, commit.version, commit.files, commit.stream, tensors)
    names = {each.name for each in index}
    for group in before.groups:
        boxes = [box for box in group if box.name in names]
        if not boxes:
            continue
        old = before.read(boxes)
        new = old.copy()
        for held, changes in collect_changes(store, [index], tensors, boxes).items():
            for change, part in changes:
                apply_part(change, part, held.view(new), held.box)
        require_digests(commit, boxes, new, before.folder.url)  # if `old` were damaged, so would be this
        for box in boxes:
            place = slice(box.start, box.start + box.nbytes)
            xor = old[place] ^ new[place]
            if xor.any():
                yield box.name, xor, new[place]
