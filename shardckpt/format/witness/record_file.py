"""Files of witness records: `step-00001000.witness.json` beside the step of that name.

A file has a line of JSON, and a line with the SHA-256 of the first.
"""

from __future__ import annotations

import hashlib

from shardckpt.errors import ChecksumError
from shardckpt.format.budget import require_small
from shardckpt.format.native.run_directory import witness_name
from shardckpt.format.witness.record_json import decode_record, encode_record
from shardckpt.plan.resume.step_records import WitnessRecord
from shardckpt.storage.store import Store, read_bytes

_MOST_BYTES = 64 << 20


def write_record(store: Store, step: str, record: WitnessRecord) -> None:
    """Write the record of a step, in place of an earlier one; it appears at once.

    Args:
        store: Store whose root is the run.
        step: Name of the step's folder.
        record: The record.

    Raises:
        StorageError: The store failed; the earlier record stays.
    """
    data = encode_record(record)
    _write(store, step, data + b"\n" + hashlib.sha256(data).hexdigest().encode("ascii") + b"\n")


def _write(store: Store, step: str, data: bytes) -> None:
    with store.create(witness_name(step)) as writer:
        writer.write(data)


def read_record(store: Store, step: str) -> WitnessRecord | None:
    """Return the record of a step; None if it has none.

    Args:
        store: Store whose root is the run.
        step: Name of the step's folder.

    Raises:
        CheckpointError: The record is damaged, or of a newer version.
        StorageError: The store failed.
    """
    data = _read(store, step)
    return None if data is None else decode_record(data.partition(b"\n")[0], where=_where(store, step))


def copy_record(source: Store, step: str, target: Store, name: str) -> None:
    """Copy the record of a step, if it has one, byte for byte.

    Args:
        source: Store whose root is the run of the step.
        step: Name of the step's folder.
        target: Store whose root is the run of the copy.
        name: Name of the copy's folder.

    Raises:
        CheckpointError: The record is damaged.
        StorageError: A store failed.
    """
    data = _read(source, step)
    if data is not None and data != _read(target, name):
        _write(target, name, data)


def _where(store: Store, step: str) -> str:
    return f"{store.url.rstrip('/')}/{witness_name(step)}"


def _read(store: Store, step: str) -> bytes | None:
    """Return the bytes of a record that match their SHA-256; None without one."""
    name, where = witness_name(step), _where(store, step)
    size = next((entry.size for entry in store.list() if entry.name == name and not entry.is_folder), None)
    if size is None:
        return None
    require_small("a witness record", size, _MOST_BYTES, where)
    content = read_bytes(store, name, 0, size)
    data, _, rest = content.partition(b"\n")
    digest = hashlib.sha256(data).hexdigest()
    if rest.strip() != digest.encode("ascii"):
        raise ChecksumError("the witness record does not match its SHA-256", where=where, expected=digest)
    return content
