"""Reader of one version in a stream, and the versions' names: `STREAM@12`, `STREAM@latest`."""

from __future__ import annotations

import re
import threading
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import accumulate, chain

import numpy as np

from shardckpt.boxes import Box
from shardckpt.dtypes import nbytes
from shardckpt.errors import ShardckptError, SourceNotFoundError, TruncatedError, UnknownFormatError
from shardckpt.manifest import Manifest, Path, Piece, Span, TensorEntry
from shardckpt.reader import Checksum, Evidence, Format, HashBlocks, Reader, Source
from shardckpt.storage.resolve_url import split
from shardckpt.storage.store import Capabilities, Listed, Read, WrappedStore
from shardckpt.stream.format.digest import ZERO, digest_box
from shardckpt.stream.format.held_boxes import HeldBox
from shardckpt.stream.format.stream_folder import StreamFolder
from shardckpt.stream.format.stream_records import COMMIT, STREAM, Version
from shardckpt.stream.versions.version_content import VersionContent

__all__ = ["FORMAT", "VersionReader", "find_version"]

_FILE = "model.safetensors"  # name of the file that the tensors seem to be in
_CONTENT = re.compile(r"COMMIT\.json|anchor|delta-\d{5}-[0-9a-f]{8}\.safetensors")  # of a version's folder
_DIGEST = "digest of elements of {} bytes"


class _MadeFile(WrappedStore):
    """A version's folder, whose only file is the tensors' bytes one after the other, made on demand.

    It keeps the last group of tensors that it made.
    """

    def __init__(self, content: VersionContent, *, checks: bool) -> None:
        super().__init__(content.folder.store)
        self._content, self._checks = content, checks
        self._boxes: list[tuple[int, HeldBox]] = [(at, box) for at, boxes in enumerate(content.groups) for box in boxes]
        self.starts = [0, *accumulate(box.nbytes for _, box in self._boxes)]
        self._lock = threading.Lock()
        self._group, self._buffer = -1, np.empty(0, np.uint8)

    @property
    def url(self) -> str:
        """Path or URL of the version's folder."""
        return f"{self._content.folder.url}/{self._content.commit.version.folder}"

    @property
    def capabilities(self) -> Capabilities:
        """Reads are not cheap, wherever the stream is."""
        return Capabilities(renames=False, is_local=False)

    def list(self, folder: str = "") -> list[Listed]:
        """Return the file."""
        return [] if folder else [Listed(_FILE, self.starts[-1], False)]

    def size(self, name: str) -> int:  # noqa: ARG002  (there is one file)
        """Return the file's size."""
        return self.starts[-1]

    def read(self, reads: Sequence[Read]) -> None:
        """Fill every buffer, in the file's order, so that each group is made once."""
        for read in sorted(reads, key=lambda each: each.offset):
            end = read.offset + len(read.buffer)
            if end > self.starts[-1]:
                raise TruncatedError.from_size(f"{self.url}/{_FILE}", self.starts[-1], end)
            self._fill(read.offset, read.buffer)

    def _fill(self, offset: int, buffer: memoryview) -> None:
        at = bisect_right(self.starts, offset) - 1
        with self._lock:
            while len(buffer):
                group, box = self._boxes[at]
                skipped = offset - self.starts[at]
                size = min(box.nbytes - skipped, len(buffer))
                if size:
                    made = self._make(group)
                    buffer[:size] = memoryview(made[box.start + skipped : box.start + skipped + size])  # type: ignore[arg-type]
                offset, buffer, at = offset + size, buffer[size:], at + 1

    def _make(self, group: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        if group != self._group:
            self._group, self._buffer = -1, np.empty(0, np.uint8)  # one at a time
            boxes = self._content.groups[group]
            self._buffer = self._content.read(boxes)
            if self._checks:
                self._content.check(boxes, self._buffer)
            self._group = group
        return self._buffer


class VersionReader(Reader):
    """An open version. Its tensors are checked against the commit's digests when they are read."""

    def __init__(self, content: VersionContent) -> None:
        self.content = content
        made = _MadeFile(content, checks=True)
        self._unchecked = _MadeFile(content, checks=False)
        version = content.commit.version
        tensors = content.folder.record.tensors
        entries: dict[Path, TensorEntry] = {}
        for start, box in zip(made.starts, chain.from_iterable(content.groups), strict=False):
            piece = Piece(box.box, _FILE, Span(start, box.nbytes))
            entries[box.name,] = TensorEntry((box.name,), box.shape, box.dtype, (piece,))
        ties = {name: kept for name, kept in content.folder.record.ties.items() if kept in tensors}
        for name, kept in ties.items():
            entries[name,] = entries[kept,]._replace(path=(name,))
        manifest = Manifest(
            format="stream",
            files={_FILE: made.starts[-1]},
            tensors=entries,
            aliases={(name,): (kept,) for name, kept in ties.items()},
            metadata={"stream": content.folder.record.id, "version": str(version.number), "epoch": str(version.epoch)},
            missing=content.missing,
        )
        super().__init__(made, manifest)

    @property
    def raw_store(self) -> _MadeFile:
        """The tensors without a comparison of digests; the files' hashes are compared."""
        return self._unchecked

    @property
    def algorithms(self) -> Mapping[str, HashBlocks]:
        """The digests of tensors."""
        return {_DIGEST.format(width): partial(_digest_blocks, width) for width in (1, 2, 4, 8)}

    def checksums(self) -> Iterator[Checksum]:
        """Yield each tensor's digest."""
        for start, box in zip(self._unchecked.starts, chain.from_iterable(self.content.groups), strict=False):
            algorithm = _DIGEST.format(nbytes(box.dtype, 1))
            value = int(self.content.commit.digests.get(box.name, "0"), 16)
            yield Checksum(_FILE, start, box.nbytes, algorithm, value)


def _digest_blocks(width: int, blocks: Iterable[memoryview]) -> int:
    total, at = ZERO, 0
    for block in blocks:
        values = np.frombuffer(block, f"u{width}")
        total += digest_box(values, (at + len(values),), Box((at,), (len(values),)))
        at += len(values)
    return int(total.hex(), 16)


def find_version(url: str, number: int | None) -> str:
    """Return the path or URL of a version's folder; the newest one without a number. Raises SourceNotFoundError."""
    folder = StreamFolder(url)
    commit = folder.find_number(number)
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
