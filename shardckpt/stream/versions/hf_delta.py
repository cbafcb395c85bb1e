"""Write versions in the folder dialect of slime, miles and ModelExpress.

Each version is a folder `weight_v000012` of safetensors with an index, which is written last. A full version has plain
tensors. Another one has, for each changed tensor, a zstd frame of the XOR with the version before as bytes, and
checksums of the new bytes in `__metadata__`.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import xxhash
import zstandard

from shardckpt.encodings.safetensors import HeaderTensor, encode_header, parse_json
from shardckpt.errors import MissingFileError, TargetExistsError, UsageError
from shardckpt.storage.resolve_url import as_url, open_place
from shardckpt.storage.store import Store, read_bytes
from shardckpt.stream.format.chain import plan_chain
from shardckpt.stream.format.stream_folder import StreamFolder
from shardckpt.stream.format.stream_records import VersionCommit
from shardckpt.stream.versions.version_content import VersionContent
from shardckpt.stream.versions.version_list import VersionList, describe_versions, find_commits

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["export_versions"]

_INDEX = "model.safetensors.index.json"
_FILE = "model-00001-of-00001.safetensors"
_OWN_KEY = "shardckpt_stream"  # in the index: the stream that the folder was written from
_LEVEL = 1
_MAX_INDEX_BYTES = 1 << 28
_CHECKSUMS: Mapping[str, Callable[[bytes], str]] = {
    "xxh3-128": lambda data: str(xxhash.xxh3_128_hexdigest(data)),
    "adler32": lambda data: f"{zlib.adler32(data):08x}",
}


def export_versions(
    src: str | os.PathLike[str], dst: str | os.PathLike[str], *, checksum: str = "xxh3-128"
) -> VersionList:
    """Write versions as folders that slime, miles and ModelExpress read.

    Versions with an anchor become full versions, others changes of the version before. Versions that are in `dst`
    already stay, so that a later call adds the new ones.

    Args:
        src: Path or URL of a stream; of one version (`STREAM@12`) to write it with what leads to it.
        dst: Folder or URL to write.
        checksum: `"xxh3-128"`, or `"adler32"`, which ModelExpress needs.

    Returns:
        The versions in `dst`, in order.

    Raises:
        UsageError: An argument has an unknown value, or the versions' numbers do not ascend.
        SourceNotFoundError: No stream is here, or it has no such version.
        TargetExistsError: `dst` has a version of another stream.
        CheckpointError: The stream is damaged.
        StorageError: Reading or writing failed.
    """
    if checksum not in _CHECKSUMS:
        raise UsageError("unknown `checksum`", found=repr(checksum), expected=" or ".join(_CHECKSUMS))
    dst = as_url(dst)
    folder, commits = find_commits(as_url(src))
    lineage = _find_lineage(folder, commits[-1], is_short=len(commits) == 1) if commits else []
    store = open_place(dst)
    before: VersionCommit | None = None
    for commit in lineage:
        if not _is_written(store, folder, commit, dst):
            if before is None or folder.has_anchor(commit.version):
                _write_full(store, folder, commit)
            else:
                _write_changes(store, folder, before, commit, checksum)
        before = commit
    return replace(describe_versions(folder, lineage), target=dst)


def _find_lineage(folder: StreamFolder, last: VersionCommit, *, is_short: bool) -> Sequence[VersionCommit]:
    """Return the versions that lead to the last one, from the first anchor; from its own if short."""
    chain = plan_chain(last, None, folder.find_commit, folder.has_anchor, folder.url)
    found = [last]
    while not (is_short and found[-1].version == chain.anchor):
        base = None if found[-1].base is None else folder.find_commit(found[-1].base)
        if base is None or base.result_digest != found[-1].base_digest:
            break
        found.append(base)
    first = max(at for at, each in enumerate(found) if folder.has_anchor(each.version))
    lineage = found[first::-1]
    numbers = [each.version.number for each in lineage]
    if numbers != sorted(set(numbers)):
        raise UsageError(
            "the numbers of the versions must ascend in this dialect",
            where=folder.url,
            found=", ".join(str(each.version) for each in lineage[-4:]),
            fix="Export one version after the last restart: STREAM@NUMBER.",
        )
    return lineage


def _name_folder(commit: VersionCommit) -> str:
    return f"weight_v{commit.version.number:06d}"


def _is_written(store: Store, folder: StreamFolder, commit: VersionCommit, dst: str) -> bool:
    """Return True if the target has a version. Raises TargetExistsError if it is of another stream."""
    name = f"{_name_folder(commit)}/{_INDEX}"
    try:
        size = min(store.size(name), _MAX_INDEX_BYTES)
        index = parse_json(read_bytes(store, name, 0, size), where=f"{dst}/{name}")
    except MissingFileError:
        return False
    metadata = index.get("metadata") if isinstance(index, dict) else None
    found = metadata.get(_OWN_KEY) if isinstance(metadata, dict) else None
    if found != _name_source(folder, commit):
        raise TargetExistsError(
            "this folder has a version of another stream",
            where=f"{dst}/{_name_folder(commit)}",
            found=repr(found),
            expected=_name_source(folder, commit),
            fix="Choose another folder.",
        )
    return True


def _name_source(folder: StreamFolder, commit: VersionCommit) -> str:
    return f"{folder.record.id} {commit.result_digest}"


def _write_full(store: Store, folder: StreamFolder, commit: VersionCommit) -> None:
    """Write all tensors of a version, a group at a time."""
    content = VersionContent(folder, commit)
    tensors = folder.record.tensors
    header = encode_header(
        [HeaderTensor(name, each.dtype, tuple(each.shape)) for name, each in tensors.items()], {"format": "pt"}
    )
    with store.create(f"{_name_folder(commit)}/{_FILE}") as writer:
        writer.write(header)
        for boxes in content.groups:
            buffer = content.read(boxes)
            content.check(boxes, buffer)
            for box in boxes:
                writer.write(buffer[box.start : box.start + box.nbytes].tobytes())
    metadata = {"total_size": commit.full_bytes, "version": f"{commit.version.number:06d}"}
    _write_index(store, folder, commit, metadata, tensors)


def _write_changes(
    store: Store, folder: StreamFolder, before: VersionCommit, commit: VersionCommit, checksum: str
) -> None:
    """Write the changes from one version to the next."""
    frames: dict[str, bytes] = {}
    checksums: dict[str, str] = {}
    compress = zstandard.ZstdCompressor(level=_LEVEL).compress
    for name, xor, new in _iter_changed(VersionContent(folder, before), VersionContent(folder, commit)):
        frames[name] = compress(xor.tobytes())
        checksums[name] = _CHECKSUMS[checksum](new.tobytes())
    if frames:
        header = encode_header([HeaderTensor(name, "uint8", (len(each),)) for name, each in frames.items()], checksums)
        with store.create(f"{_name_folder(commit)}/{_FILE}") as writer:
            writer.write(header)
            for frame in frames.values():
                writer.write(frame)
    metadata = {
        "version": f"{commit.version.number:06d}",
        "base_version": f"{before.version.number:06d}",
        "delta_encoding": "xor",
        "compression_format": "zstd",
        "checksum_format": checksum,
    }
    _write_index(store, folder, commit, metadata, frames)


def _iter_changed(
    before: VersionContent, after: VersionContent
) -> Iterator[tuple[str, NDArray[np.uint8], NDArray[np.uint8]]]:
    """Yield the name of each changed tensor, the XOR of its bytes, and the new bytes."""
    for boxes in after.groups:
        old, new = before.read(boxes), after.read(boxes)
        before.check(boxes, old)
        after.check(boxes, new)
        for box in boxes:
            part = slice(box.start, box.start + box.nbytes)
            xor = old[part] ^ new[part]
            if xor.any():
                yield box.name, xor, new[part]


def _write_index(
    store: Store,
    folder: StreamFolder,
    commit: VersionCommit,
    metadata: Mapping[str, object],
    names: Mapping[str, object],
) -> None:
    own = {**metadata, _OWN_KEY: _name_source(folder, commit)}
    index = {"metadata": own, "weight_map": dict.fromkeys(names, _FILE)}
    with store.create(f"{_name_folder(commit)}/{_INDEX}") as writer:
        writer.write(json.dumps(index, indent=1).encode())
