"""Witness records as JSON that is decoded without trust: `step-00001000.witness.json` next to the step.

A column has one number from each rank, packed and in base64; one number if all are equal. Tensor names are a compressed
table, which the states in a record share.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Annotated

from shardckpt.encodings.budget import require_small
from shardckpt.encodings.safetensors import parse_json
from shardckpt.encodings.typed_json import JsonForm, decode, dump, load, must_be
from shardckpt.errors import ChecksumError, FormatError, MissingFileError, UnsupportedError
from shardckpt.native.records import NEWER, SaveId
from shardckpt.native.run_directory import witness_name
from shardckpt.storage.store import Store, read_bytes
from shardckpt.witness.records.step_records import (
    BatchDigests,
    Environment,
    HexFloat,
    Part,
    RankValues,
    Setting,
    StateDigests,
    StepNumber,
    StepRecord,
    TensorDigest,
    WitnessRecord,
)

_MAX_BYTES = 64 << 20

_VERSION = 1

_MAX_STEPS = 1024
# Maximum numbers in a record's columns: a column of equal numbers is shorter than what it becomes.
_MAX_NUMBERS = 1 << 22

_MAX_TEXT = 1 << 25  # maximum bytes of a decompressed table


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


def _read_version(value: object) -> int:
    if type(value) is not int or value < 1:
        raise must_be("an integer from 1", value)
    if value > _VERSION:
        raise UnsupportedError("a newer version wrote this", found=value, fix=NEWER)
    return value


@dataclass(frozen=True, slots=True)
class Versioned:
    """A file with a version, which is its first field."""

    version: Annotated[int, JsonForm(_read_version)] = field(default=_VERSION, kw_only=True)


def _from_base64(value: object) -> bytes:
    try:
        return base64.b64decode(value if isinstance(value, str) else "?", validate=True)
    except (binascii.Error, ValueError) as error:
        raise must_be("text in base64", value) from error


def _to_base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _unpack(code: str, value: object) -> RankValues:
    data = _from_base64(value)
    if len(data) % struct.calcsize(f"<{code}"):
        raise FormatError("packed numbers end early", found=f"{len(data)} bytes")
    return tuple(number for (number,) in struct.iter_unpack(f"<{code}", data))


def _pack(code: str, values: RankValues) -> str:
    return _to_base64(struct.pack(f"<{len(values)}{code}", *values))


def _pack_column(code: str, values: RankValues) -> str:
    return _pack(code, values[:1] if len(set(values)) == 1 else values)


Packed = Annotated[RankValues, JsonForm(partial(_unpack, "I"), partial(_pack, "I"))]
Column = Annotated[RankValues, JsonForm(partial(_unpack, "I"), partial(_pack_column, "I"))]
WideColumn = Annotated[RankValues, JsonForm(partial(_unpack, "Q"), partial(_pack_column, "Q"))]
Row = tuple[str, Part, str]


@dataclass(frozen=True, slots=True)
class _PackedBatch:
    ordered: Column
    multisets: Column
    counts: Column
    samples: Packed


@dataclass(frozen=True, slots=True)
class _PackedState:
    names: int  # index of a table
    digests: Packed
    settings: int  # index of a table
    ties: Mapping[str, str]
    uneven: frozenset[str]


@dataclass(frozen=True, slots=True)
class _PackedStep:
    step: StepNumber
    batch: _PackedBatch | None
    loss: WideColumn
    grad_norm: WideColumn
    random_before: Mapping[str, Column] | None
    random_after: Mapping[str, Column] | None  # columns are empty if the step left them as they were
    before: _PackedState | None
    after: _PackedState | None


@dataclass(frozen=True, slots=True)
class _PackedRecord(Versioned):
    save: SaveId
    number: StepNumber
    environment: Environment
    steps: Annotated[tuple[_PackedStep, ...], range(_MAX_STEPS + 1)]
    first_batch: _PackedBatch | None
    last_batch: _PackedBatch | None
    noise: HexFloat | None
    tables: tuple[Annotated[bytes, JsonForm(_from_base64, _to_base64)], ...]


def encode_record(record: WitnessRecord) -> bytes:
    """Return a record as JSON."""
    tables: dict[bytes, int] = {}
    steps = tuple(_pack_step(step, tables) for step in record.steps)
    first, last = _pack_batch(record.first_batch), _pack_batch(record.last_batch)
    return dump(
        _PackedRecord(record.save, record.number, record.environment, steps, first, last, record.noise, (*tables,))
    )


def decode_record(data: bytes, *, where: str) -> WitnessRecord:
    """Decode what `encode_record` returned, in time and memory proportional to the data."""
    record = load(_PackedRecord, data, where=where)
    one = _Expander(1, [], where)
    first, last = one.expand_batch(record.first_batch), one.expand_batch(record.last_batch)
    expander = _Expander(record.environment.world, _unpack_tables(record.tables, where), where)
    steps = tuple(map(expander.expand_step, record.steps))
    return WitnessRecord(record.save, record.number, record.environment, steps, first, last, record.noise)


def _pack_step(step: StepRecord, tables: dict[bytes, int]) -> _PackedStep:
    known = step.random_before or {}
    after = step.random_after and {
        name: () if values == known.get(name) else values for name, values in step.random_after.items()
    }
    states = [_pack_state(state, tables) for state in (step.before, step.after)]
    return _PackedStep(
        step.step, _pack_batch(step.batch), step.loss, step.grad_norm, step.random_before, after, *states
    )


def _pack_batch(batch: BatchDigests | None) -> _PackedBatch | None:
    return None if batch is None else _PackedBatch(batch.ordered, batch.multisets, batch.counts, batch.all_samples)


def _pack_state(state: StateDigests | None, tables: dict[bytes, int]) -> _PackedState | None:
    if state is None:
        return None

    def add(rows: list[Row]) -> int:
        return tables.setdefault(zlib.compress(json.dumps(rows, separators=(",", ":")).encode("ascii"), 9), len(tables))

    names = add([(name, each.part, each.dtype) for name, each in state.tensors.items()])
    settings = add([(name, each.part, each.text) for name, each in state.settings.items()])
    digests = tuple(each.digest for each in state.tensors.values())
    return _PackedState(names, digests, settings, state.ties, state.uneven)


def _unpack_tables(tables: Sequence[bytes], where: str) -> list[list[Row]]:
    left, found = _MAX_TEXT, []
    for packed in tables:
        unpacker = zlib.decompressobj()
        try:
            data = unpacker.decompress(packed, max(left, 1))
        except zlib.error as error:
            raise FormatError("a table is damaged", where=where, found=error) from error
        if not unpacker.eof:
            raise FormatError("a table ends early, or is too large", where=where, found=f"{len(data)} bytes")
        found.append(decode(list[Row], parse_json(data, where=where), where=where))
        left -= len(data)
    return found


class _Expander:
    """Expands a record's columns to all ranks, and its tables' rows, up to a limit."""

    def __init__(self, world: int, tables: list[list[Row]], where: str) -> None:
        self._world, self._tables, self._where, self._numbers = world, tables, where, 0

    def expand_step(self, step: _PackedStep) -> StepRecord:
        before = self._expand_random(step.random_before, {})
        return StepRecord(
            step.step,
            self.expand_batch(step.batch),
            self._expand(step.loss),
            self._expand(step.grad_norm),
            before,
            self._expand_random(step.random_after, before or {}),
            self._expand_state(step.before),
            self._expand_state(step.after),
        )

    def expand_batch(self, batch: _PackedBatch | None) -> BatchDigests | None:
        if batch is None:
            return None
        ordered, multisets, counts = map(self._expand_full, (batch.ordered, batch.multisets, batch.counts))
        flat = batch.samples
        if not flat:
            return BatchDigests(ordered, multisets, counts)
        if len(flat) != sum(counts):
            raise self._error("samples do not fit their counts", len(flat))
        ends = accumulate(counts)
        samples = tuple(flat[end - n : end] for n, end in zip(counts, ends, strict=True))
        return BatchDigests(ordered, multisets, counts, samples)

    def _error(self, what: str, found: object) -> FormatError:
        return FormatError(f"not a witness record: {what}", where=self._where, found=found)

    def _count(self, numbers: int) -> bool:
        """Add numbers; return True if there are not too many."""
        self._numbers += numbers
        return self._numbers <= _MAX_NUMBERS

    def _expand(self, values: RankValues) -> RankValues:
        if not values:
            return ()
        if len(values) not in (1, self._world) or not self._count(self._world):
            raise self._error("a column must have one number from each rank", len(values))
        return values if len(values) == self._world else values * self._world

    def _expand_full(self, values: RankValues) -> RankValues:
        if not values:
            raise self._error("a column is empty", "")
        return self._expand(values)

    def _expand_random(
        self, random: Mapping[str, RankValues] | None, before: Mapping[str, RankValues]
    ) -> dict[str, RankValues] | None:
        if random is None:
            return None
        return {
            name: before[name] if not column and name in before else self._expand_full(column)
            for name, column in random.items()
        }

    def _expand_state(self, state: _PackedState | None) -> StateDigests | None:
        if state is None:
            return None
        if not (0 <= state.names < len(self._tables) and 0 <= state.settings < len(self._tables)):
            raise self._error("a state's table is not there", [state.names, state.settings])
        names, settings = self._tables[state.names], self._tables[state.settings]
        if len(names) != len(state.digests) or not self._count(len(names) + len(settings)):
            raise self._error("digests do not fit their names", len(state.digests))
        tensors = {
            name: TensorDigest(part, dtype, digest)
            for (name, part, dtype), digest in zip(names, state.digests, strict=True)
        }
        return StateDigests(
            tensors, {name: Setting(part, text) for name, part, text in settings}, state.ties, state.uneven
        )
