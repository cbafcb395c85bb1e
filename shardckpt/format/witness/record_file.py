"""Files of witness records: `step-00001000.witness.json` beside the step of that name."""

from __future__ import annotations

from shardckpt.format.native.run_directory import witness_name
from shardckpt.format.witness.line_file import line_url, read_line, write_line
from shardckpt.format.witness.record_json import decode_record, encode_record
from shardckpt.plan.resume.step_records import WitnessRecord
from shardckpt.storage.store import Store

_MOST_BYTES = 64 << 20


def write_record(store: Store, step: str, record: WitnessRecord) -> None:
    """Write the record of a step, in place of an earlier one; it appears at once."""
    write_line(store, witness_name(step), encode_record(record))


def read_record(store: Store, step: str) -> WitnessRecord | None:
    """Return the record of a step; None if it has none."""
    line = _read(store, step)
    return None if line is None else decode_record(line, where=line_url(store, witness_name(step)))


def copy_record(source: Store, step: str, target: Store, name: str) -> None:
    """Copy the record of a step, if it has one, byte for byte."""
    line = _read(source, step)
    if line is not None and line != _read(target, name):
        write_line(target, witness_name(name), line)


def _read(store: Store, step: str) -> bytes | None:
    return read_line(store, witness_name(step), "the witness record", _MOST_BYTES)
