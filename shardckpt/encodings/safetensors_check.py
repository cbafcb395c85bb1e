"""Check written safetensors files with the safetensors library before publishing.

The reader of this package would repeat a misunderstanding of its writer
(docs/decisions/0031-the-library-checks-written-files.md).
"""

from __future__ import annotations

import json
import re
import struct
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import safetensors

from shardckpt.dtypes import TORCH_NAMES
from shardckpt.encodings.safetensors import MAX_HEADER_BYTES
from shardckpt.errors import FormatError, TruncatedError
from shardckpt.storage.publication import Publication
from shardckpt.storage.store import ClosingWriter, Store, Writer, convert_os_errors, read_bytes

_SUFFIX = ".safetensors"
_LENGTH_BYTES = 8
_END = re.compile(rb'"data_offsets":\[\d+,(\d+)\]')
_FIX = "The writer is at fault, not the checkpoint that was read; nothing was published."


@contextmanager
def create_checked(publication: Publication, name: str) -> Iterator[Writer]:
    """Start a file of the result; check a safetensors file after it is closed."""
    # A file on a local disk is read back. For other files, a copy of the written header is checked.
    if not name.endswith(_SUFFIX):
        with publication.create(name) as writer:
            yield writer
        return
    path = publication.find_written(name)
    with publication.create(name) as writer:
        header = HeaderCopy(writer)
        yield writer if path else header
    content, nbytes = _read_header(path) if path else (bytes(header.content), header.nbytes)
    require_readable(content, nbytes, where=name)


def _read_header(path: str) -> tuple[bytes, int]:
    """Return a file's header, including its length, and the file's size."""
    with convert_os_errors("cannot read back", path), open(path, "rb") as file:
        nbytes = file.seek(0, 2)
        file.seek(0)
        start = file.read(_LENGTH_BYTES)
        return start + file.read(_get_header_bytes(start)), nbytes


def _get_header_bytes(start: bytes | bytearray) -> int:
    """Return the length of a header's JSON, at most the format's limit."""
    return min(int.from_bytes(start, "little"), MAX_HEADER_BYTES)


def require_readable(header: bytes, nbytes: int, *, where: str) -> None:
    """Require that the safetensors library accepts a header; warn if it lacks one of the format's dtypes."""
    refusal = _parse(header)
    if refusal not in {"", _get_missing_data()}:
        unknown = _list_unknown_dtypes(header)
        if not unknown:
            raise FormatError("the safetensors library refuses the written file", where=where, found=refusal, fix=_FIX)
        warnings.warn(
            f"safetensors {safetensors.__version__} does not know the type {', '.join(unknown)}:"
            " written files of it were not checked by it",
            RuntimeWarning,
            stacklevel=2,
        )
        return
    end = len(header) + _find_end(header, nbytes - len(header))
    if end != nbytes:
        raise TruncatedError(
            "the written file does not end with its data",
            where=where,
            found=f"{nbytes} bytes",
            expected=f"{end} bytes",
            fix=_FIX,
        )


def _parse(header: bytes) -> str:
    """Return the library's error for a file with only this header; else empty."""
    try:
        safetensors.deserialize(header)
    except safetensors.SafetensorError as error:
        return str(error)
    return ""


@lru_cache(maxsize=1)
def _get_missing_data() -> str:
    """Return the library's error for a correct header without its data."""
    return _parse(_encode_tensor("U8", 1))


def _find_end(header: bytes, expected: int) -> int:
    """Return how many data bytes a correct header describes."""
    if max(map(int, _END.findall(header)), default=-1) == expected:
        return expected
    return max((entry["data_offsets"][1] for entry in _parse_entries(header).values()), default=0)


def _list_unknown_dtypes(header: bytes) -> list[str]:
    """Return a header's documented dtypes that the installed library lacks."""
    try:
        dtypes = {entry["dtype"] for entry in _parse_entries(header).values()}
    except (ValueError, TypeError, KeyError, AttributeError):
        return []
    return sorted(dtype for dtype in dtypes & TORCH_NAMES.keys() if _parse(_encode_tensor(dtype, 0)))


def _parse_entries(header: bytes) -> dict[str, dict[str, Any]]:
    entries: dict[str, dict[str, Any]] = json.loads(header[_LENGTH_BYTES:])
    entries.pop("__metadata__", None)
    return entries


def _encode_tensor(dtype: str, elements: int) -> bytes:
    """Return a header with one 1-D tensor, whose elements have one byte."""
    body = json.dumps({"a": {"dtype": dtype, "shape": [elements], "data_offsets": [0, elements]}}).encode()
    return struct.pack("<Q", len(body)) + body


class HeaderCopy(ClosingWriter):
    """A writer that keeps a copy of the written header."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self.content = bytearray()  # length and JSON of the header, as far as written
        self.nbytes = 0  # number of written bytes

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Append data. Raises StorageError."""
        self._writer.write(data)
        rest = memoryview(data).cast("B")
        self.nbytes += len(rest)
        while rest and (missing := self._count_missing()):
            self.content += rest[:missing]
            rest = rest[missing:]

    def copy_from(self, source: Store, name: str, offset: int, nbytes: int) -> None:
        """Append a range from a file in `source`. Raises errors like `Writer.copy_from`."""
        while nbytes and (missing := min(self._count_missing(), nbytes)):
            self.write(read_bytes(source, name, offset, missing))
            offset, nbytes = offset + missing, nbytes - missing
        self._writer.copy_from(source, name, offset, nbytes)
        self.nbytes += nbytes

    def _count_missing(self) -> int:
        """Return how many header bytes are missing, as far as known."""
        start = self.content[:_LENGTH_BYTES]
        wanted = _LENGTH_BYTES if len(start) < _LENGTH_BYTES else _LENGTH_BYTES + _get_header_bytes(start)
        return wanted - len(self.content)

    def close(self) -> None:
        """Finish the file. Raises StorageError."""
        self._writer.close()

    def abort(self) -> None:
        """Remove the written bytes; never raises."""
        self._writer.abort()
