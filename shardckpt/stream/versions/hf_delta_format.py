"""Recognize versions in the folder dialect of slime, miles and ModelExpress, without importing what reads them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardckpt.native.payload import HF_INDEX
from shardckpt.reader import Evidence, Format, Source

if TYPE_CHECKING:
    from shardckpt.reader import Reader

__all__ = ["FORMAT"]

_HEAD_BYTES = 1 << 16  # all writers put the metadata first
_KEYS = (b'"delta_encoding"', b'"checksum_format"')


def recognize(source: Source) -> Evidence:
    """Recognize a version by the metadata in its index: the encoding of changes, or the kind of checksums."""
    if source.file is not None or HF_INDEX not in source.listing:
        return Evidence.NONE
    head = source.head(HF_INDEX, _HEAD_BYTES)
    return Evidence.STRUCTURE if any(key in head for key in _KEYS) else Evidence.NONE


def open_source(source: Source) -> Reader:
    """Open a version."""
    from shardckpt.stream.versions.hf_delta_reader import open_version  # noqa: PLC0415  (few folders with an index)

    return open_version(source)


FORMAT = Format(
    name="hf-delta",
    title="version of slime, miles or ModelExpress",
    looks_for=f"{HF_INDEX} with `delta_encoding` or `checksum_format`",
    recognize=recognize,
    open=open_source,
)
