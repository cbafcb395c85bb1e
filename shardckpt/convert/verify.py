"""The verb `verify`: structure, coverage, sizes, and the checksums that a format stores."""

from __future__ import annotations

import zlib

from shardckpt.convert.report import NO_SHAPES, Verification
from shardckpt.errors import CheckpointError, ChecksumError, escape
from shardckpt.format.detect import open_checkpoint
from shardckpt.format.reader import Checksum, Reader
from shardckpt.plan.coverage import faults
from shardckpt.storage.store import Read

_BLOCK_BYTES = 1 << 22
_MOST_FAULTS = 1000


def verify(src: str) -> Verification:
    """Check that a checkpoint is whole: every element once, every file long enough, every stored checksum right.

    A damaged checkpoint is reported, not raised; only one that no reader recognises, or storage that fails, raises.

    Args:
        src: Checkpoint in any readable format: a folder or file, a path or URL.

    Returns:
        Every problem found.

    Raises:
        UsageError: Nothing there, or nothing that a reader recognises.
        StorageError: Reading failed.
    """
    try:
        reader = open_checkpoint(src)
    except CheckpointError as error:
        return Verification(src, "", 0, 0, (str(error),), ())
    manifest = reader.manifest
    problems = [escape(f) for f in faults(manifest, manifest.tensors.values(), limit=_MOST_FAULTS)]
    problems += [escape(f"{name} is missing") for name in manifest.missing]
    checked = 0
    if not problems:
        problems += _containers(reader)
    if not problems:
        checked, wrong = _checksums(reader)
        problems += wrong
    warnings = (*manifest.warnings, *(() if manifest.has_shapes else (NO_SHAPES,)))
    return Verification(src, manifest.format, len(manifest.tensors), checked, tuple(problems), warnings)


def _containers(reader: Reader) -> list[str]:
    """Open every container a tensor lies in."""
    try:
        reader.resolve([piece for entry in reader.manifest.tensors.values() for piece in entry.pieces])
    except CheckpointError as error:
        return [str(error)]
    return []


def _checksums(reader: Reader) -> tuple[int, list[str]]:
    checked, problems = 0, []
    try:
        for checksum in reader.checksums():
            value = _crc32(reader, checksum)
            if value == checksum.value:
                checked += checksum.nbytes
            else:
                error = ChecksumError(
                    f"bytes {checksum.offset} to {checksum.offset + checksum.nbytes} do not match their checksum",
                    where=f"{reader.store.url}/{checksum.file}",
                    found=f"{value:08x}",
                    expected=f"{checksum.value:08x}",
                    fix="Restore the file from another copy.",
                )
                problems.append(str(error))
    except CheckpointError as error:
        problems.append(str(error))
    return checked, problems


def _crc32(reader: Reader, checksum: Checksum) -> int:
    buffer = memoryview(bytearray(min(_BLOCK_BYTES, max(checksum.nbytes, 1))))
    value = 0
    for start in range(0, checksum.nbytes, _BLOCK_BYTES):
        block = buffer[: min(_BLOCK_BYTES, checksum.nbytes - start)]
        reader.store.read([Read(checksum.file, checksum.offset + start, block)])
        value = zlib.crc32(block, value)
    return value
