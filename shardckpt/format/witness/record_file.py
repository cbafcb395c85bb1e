"""Witness records: `step-00001000.witness.json` next to the step with that name."""

from __future__ import annotations

from shardckpt.format.native.run_directory import witness_name
from shardckpt.format.witness.line_file import line_url, read_line, write_line
from shardckpt.format.witness.record_json import decode_record, encode_record
from shardckpt.plan.resume.step_records import WitnessRecord
from shardckpt.storage.store import Store

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
