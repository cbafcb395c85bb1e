"""Recognize versions in the folder dialect of slime, miles and ModelExpress, without importing what reads them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from shardckpt.native.payload import HF_INDEX
from shardckpt.reader import Evidence, Format, Source

if TYPE_CHECKING:
    from shardckpt.reader import Reader

__all__ = ["FORMAT"]

_HEAD_BYTES = 1 << 16  # all writers put the metadata first
_KEYS = (b'"delta_encoding"', b'"checksum_format"')
_NUMBERED = re.compile(r".*\d")  # writers end a folder's name with the version
_CHANGES = re.compile(r".*weight_v\d+")  # slime's and ModelExpress's name
_DTYPE = re.compile(rb'"dtype":\s*"(\w+)"')


def recognize(source: Source) -> Evidence:
    """Recognize a version by the metadata in its index: the encoding of changes, or the kind of checksums."""
    if source.file is not None or not _NUMBERED.fullmatch(source.url.rstrip("/")):
        return Evidence.NONE
    if HF_INDEX not in source.files:
        return Evidence.STRUCTURE if _has_changes_alone(source) else Evidence.NONE
    head = source.head(HF_INDEX, _HEAD_BYTES)
    return Evidence.STRUCTURE if any(key in head for key in _KEYS) else Evidence.NONE


def _has_changes_alone(source: Source) -> bool:
    """Return True for changes whose index is missing: as tensors they would be bytes without a meaning."""
    files = [name for name in source.files if name.endswith(".safetensors")]
    if not files or not _CHANGES.fullmatch(source.url.rstrip("/")):
        return False
    return {*_DTYPE.findall(source.head(files[0], _HEAD_BYTES))} == {b"U8"}


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
