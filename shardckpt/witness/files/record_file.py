"""Witness records: `step-00001000.witness.json` next to the step with that name."""

from __future__ import annotations

import hashlib

from shardckpt.encodings.budget import require_small
from shardckpt.errors import ChecksumError, MissingFileError
from shardckpt.native.run_directory import witness_name
from shardckpt.storage.store import Store, read_bytes
from shardckpt.witness.files.record_json import decode_record, encode_record
from shardckpt.witness.records.step_records import WitnessRecord

_MAX_BYTES = 64 << 20


def write_record(store: Store, step: str, record: WitnessRecord) -> None:
    """Write a step's record atomically over an earlier one, which stays if the store fails."""
    write_line(store, witness_name(step), encode_record(record))


def read_record(store: Store, step: str) -> WitnessRecord | None:
    """Return a step's record; None if it has none."""
    line = _read(store, step)
    return None if line is None else decode_record(line, where=line_url(store, witness_name(step)))


def copy_record(source: Store, step: str, target: Store, name: str) -> None:
    """Copy a step's record, if it has one, byte for byte."""
    line = _read(source, step)
    if line is not None and line != _read(target, name):
        write_line(target, witness_name(name), line)


def _read(store: Store, step: str) -> bytes | None:
    return read_line(store, witness_name(step), "the witness record", _MAX_BYTES)


def write_line(store: Store, name: str, line: bytes) -> None:
    """Write a file atomically over an earlier one, which stays if the store fails."""
    with store.create(name) as writer:
        writer.write(line + b"\n" + hashlib.sha256(line).hexdigest().encode("ascii") + b"\n")


def read_line(store: Store, name: str, what: str, most_bytes: int) -> bytes | None:
    """Return a file's JSON; None if it does not exist."""
    try:
        size = store.size(name)
    except MissingFileError:
        return None
    where = line_url(store, name)
    require_small(what, size, most_bytes, where)
    line, _, rest = read_bytes(store, name, 0, size).partition(b"\n")
    digest = hashlib.sha256(line).hexdigest()
    if rest.strip() != digest.encode("ascii"):
        raise ChecksumError(f"{what} does not match its SHA-256", where=where, expected=digest)
    return line


def line_url(store: Store, name: str) -> str:
    """Return a file's path or URL."""
    return f"{store.url.rstrip('/')}/{name}"
