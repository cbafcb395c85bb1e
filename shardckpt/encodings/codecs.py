"""Decode a file's compressed bytes as a forward stream in bounded memory."""

from __future__ import annotations

import io
import zlib
from collections.abc import Callable
from typing import Protocol

from shardckpt.errors import FormatError, TruncatedError, UnsupportedError
from shardckpt.manifest import Encoded
from shardckpt.storage.store import Read, Store

# Maximum accepted zstd window, in bytes: as with `zstd --long`. A hostile file could demand more memory.
MAX_WINDOW_BYTES = 1 << 27

_CHUNK_BYTES = 1 << 18


class _ReadsInto(Protocol):
    def read(self, size: int = -1, /) -> bytes | None: ...


class EncodedFile(io.RawIOBase):
    """One piece's encoded bytes as a file object."""

    def __init__(self, store: Store, name: str, offset: int, nbytes: int) -> None:
        super().__init__()
        self._store, self._name, self._at, self._end = store, name, offset, offset + nbytes

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: memoryview, /) -> int:  # type: ignore[override]
        """Read the next bytes into `buffer`; return their number, 0 at the end."""
        n = min(len(buffer), self._end - self._at)
        if n:
            self._store.read([Read(self._name, self._at, memoryview(buffer)[:n])])
            self._at += n
        return n


class _Inflate:
    """Decoder for raw deflate, with at most one output chunk at a time."""

    def __init__(self, source: EncodedFile) -> None:
        self._source, self._inflate = source, zlib.decompressobj(-15)

    def read(self, size: int = -1, /) -> bytes:
        while True:
            data = self._inflate.unconsumed_tail or self._source.read(_CHUNK_BYTES) or b""
            out = self._inflate.decompress(data, max(size, 1))
            # at the end, zlib may report bytes after the stream as unconsumed forever
            if out or not data or self._inflate.eof:
                return out


def _get_error_types() -> tuple[type[Exception], ...]:
    """Return the errors for damaged streams; called only when there is one."""
    import zstandard  # noqa: PLC0415  (as in `_zstd`)

    return zstandard.ZstdError, zlib.error


def _zstd(source: EncodedFile) -> _ReadsInto:
    import zstandard  # noqa: PLC0415  (most checkpoints are not compressed)

    reader: _ReadsInto = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES).stream_reader(
        source,  # type: ignore[arg-type]  # the stubs ask for more than the `read` that is used
        read_size=_CHUNK_BYTES,
        read_across_frames=True,
    )
    return reader


_DECODERS: dict[str, Callable[[EncodedFile], _ReadsInto]] = {"zstd": _zstd, "deflate": _Inflate}


CODECS = frozenset(_DECODERS)  # names of supported codecs


class DecodedStream:
    """The decoded bytes of an `Encoded` layout. Reading forward is cheap; reading backward restarts the decoder."""

    def __init__(self, store: Store, name: str, layout: Encoded) -> None:
        if layout.codec not in _DECODERS:
            raise UnsupportedError(f"no decoder for {layout.codec!r}", where=name, expected=", ".join(_DECODERS))
        self._store, self._name, self._layout = store, name, layout
        self._restart()

    def _restart(self) -> None:
        source = EncodedFile(self._store, self._name, self._layout.offset, self._layout.nbytes)
        self._stream = _DECODERS[self._layout.codec](source)
        self._at = 0

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` with the decoded bytes from `offset`."""
        if offset < self._at:
            self._restart()
        self._skip(offset - self._at)
        filled = 0
        while filled < len(buffer):
            data = self._next(len(buffer) - filled)
            buffer[filled : filled + len(data)] = data
            filled += len(data)

    def head(self, nbytes: int) -> bytes:
        """Restart and return the first decoded bytes, fewer if the stream is shorter."""
        self._restart()
        out = bytearray()
        while len(out) < nbytes:
            try:
                out += self._next(nbytes - len(out))
            except TruncatedError:
                break
        return bytes(out)

    def _skip(self, nbytes: int) -> None:
        while nbytes:
            nbytes -= len(self._next(min(nbytes, _CHUNK_BYTES)))

    def _next(self, most: int) -> bytes:
        try:
            data = self._stream.read(min(most, _CHUNK_BYTES)) or b""
        except _get_error_types() as error:
            raise FormatError(
                f"the {self._layout.codec} stream cannot be decoded: {error}",
                where=f"{self._store.url}/{self._name}",
                found=f"at decoded byte {self._at}",
            ) from error
        if not data:
            raise TruncatedError(
                f"the {self._layout.codec} stream ends early",
                where=f"{self._store.url}/{self._name}",
                found=f"{self._at} decoded bytes",
            )
        self._at += len(data)
        return data
