"""Reader of one version in a stream, and the versions' names: `STREAM@12`, `STREAM@latest`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress

import numpy as np

from shardckpt.boxes import Box
from shardckpt.errors import ShardckptError, SourceNotFoundError, UnknownFormatError
from shardckpt.reader import Checksum, Evidence, Format, HashBlocks, Source
from shardckpt.storage.resolve_url import split
from shardckpt.stream.format.digest import ZERO, digest_box
from shardckpt.stream.format.stream_folder import StreamFolder
from shardckpt.stream.format.stream_records import COMMIT, STREAM, Version
from shardckpt.stream.versions.made_file import MADE_FILE, MadeReader
from shardckpt.stream.versions.version_content import VersionContent

__all__ = ["FORMAT", "VersionReader", "find_version"]

_CONTENT = re.compile(r"COMMIT\.json|anchor|delta-\d{5}-[0-9a-f]{8}\.safetensors")  # of a version's folder
_DIGEST = "digest of a tensor"


class VersionReader(MadeReader):
    """An open version. Its tensors are checked against the commit's digests when they are read."""

    def __init__(self, content: VersionContent) -> None:
        self.content = content
        record, version = content.folder.record, content.commit.version
        ties = {name: kept for name, kept in record.ties.items() if kept in record.tensors}
        metadata = {"stream": record.id, "version": str(version.number), "epoch": str(version.epoch)}
        super().__init__(content, "stream", ties, metadata, missing=content.missing)

    @property
    def algorithms(self) -> Mapping[str, HashBlocks]:
        """The digests of tensors."""
        return {_DIGEST: _digest_blocks}

    def checksums(self) -> Iterator[Checksum]:
        """Yield each tensor's digest."""
        for start, box in self.iter_places():
            value = int(self.content.commit.digests.get(box.name, "0"), 16)
            yield Checksum(MADE_FILE, start, box.nbytes, _DIGEST, value)


def _digest_blocks(blocks: Iterable[memoryview]) -> int:
    total, at = ZERO, 0
    for block in blocks:
        values = np.frombuffer(block, np.uint8)
        total += digest_box(values, (at + len(values),), Box((at,), (len(values),)))
        at += len(values)
    return int(total.hex(), 16)


def find_version(url: str, number: int | None) -> str:
    """Return the path or URL of a version's folder; the newest one without a number. Raises SourceNotFoundError."""
    folder = StreamFolder(url)
    commit = folder.find_newest() if number is None else folder.find_number(number)
    if commit is None:
        numbers = [version.number for version in folder.list_folders()]
        raise SourceNotFoundError(
            "no version is published here" if number is None else f"version {number} is not published here",
            where=url,
            found=f"versions {numbers[0]} to {numbers[-1]}" if numbers else "",
            fix=f"`shardckpt stream ls {url}` lists the versions." if numbers else "Start the publisher first.",
        )
    return f"{folder.url}/{commit.version.folder}"


def recognize(source: Source) -> Evidence:
    """Recognize a stream, or a version's folder by its name."""
    if source.file is not None:
        return Evidence.NONE
    if STREAM in source.listing:
        return Evidence.STRUCTURE if b'"shardckpt-stream"' in source.head(STREAM) else Evidence.NAME
    is_version = _parse_version(source) is not None and any(map(_CONTENT.fullmatch, source.listing))
    return Evidence.STRUCTURE if is_version else Evidence.NONE


def _parse_version(source: Source) -> Version | None:
    return Version.from_folder(source.store.url.rstrip("/").rpartition("/")[2])


def open_source(source: Source) -> VersionReader:
    """Open a version."""
    version = _parse_version(source)
    if version is None or STREAM in source.listing:
        raise _stream_error(source.store.url)
    parent, _ = split(source.store.url)
    folder = StreamFolder(parent)
    commit = folder.find_commit(version)
    if commit is None:
        raise SourceNotFoundError("this version is not published", where=source.url, found=f"no {COMMIT}")
    return VersionReader(VersionContent(folder, commit))


def _stream_error(url: str) -> UnknownFormatError:
    """Return the error for a stream without a version's name."""
    place = url.rstrip("/")
    newest = None
    with suppress(ShardckptError):
        newest = StreamFolder(url).find_number(None)
    if newest is None:
        return UnknownFormatError("this is a stream of weights without a version", where=url)
    name = f"{place}@{newest.version.number}"
    return UnknownFormatError(
        "this is a stream of weights, not one version",
        where=url,
        found=f"the newest version is {newest.version}",
        fix=f"Name one: {name}, or {place}@latest. `shardckpt stream ls {place}` lists them.",
        nearby=name,
    )


FORMAT = Format(
    name="stream",
    title="version in a stream of weights",
    looks_for=f"{STREAM} next to folders such as {Version(1, 12).folder}",
    recognize=recognize,
    open=open_source,
)
