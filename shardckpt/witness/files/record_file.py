"""Witness records as JSON that is decoded without trust: `step-00001000.witness.json` next to the step.

A column has one number from each rank, packed and in base64; one number if all are equal. Tensor names are a compressed
table, which the states in a record share.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, get_args

import numpy as np

from shardckpt.encodings.budget import require_small
from shardckpt.encodings.safetensors import parse_json
from shardckpt.errors import ChecksumError, FormatError, MissingFileError, UnsupportedError
from shardckpt.native.records import NEWER, read_fields, read_integer, read_list, read_save
from shardckpt.native.run_directory import witness_name
from shardckpt.storage.store import Store, read_bytes
from shardckpt.witness.records.step_records import (
    BatchDigests,
    Environment,
    Part,
    RankValues,
    Setting,
    StateDigests,
    StepRecord,
    TensorDigest,
    WitnessRecord,
)

_MAX_BYTES = 64 << 20

_VERSION = 1

_PARTS = get_args(Part)
_SMALL, _WIDE = "<u4", "<u8"
_MAX_STEPS = 1024
_MAX_RANKS = 1 << 20
# Maximum numbers in a record's columns: a column of equal numbers is shorter than what it becomes.
_MAX_NUMBERS = 1 << 22

_MAX_TEXT = 1 << 25  # maximum bytes of a decompressed table

_MAX_STEP = 10**18


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


def encode_record(record: WitnessRecord) -> bytes:
    """Return a record as JSON."""
    tables = _Tables()
    content = {
        "version": _VERSION,
        "save": record.save,
        "number": record.number,
        "environment": _environment_json(record.environment),
        "steps": [_step_json(step, tables) for step in record.steps],
        "first_batch": _batch_json(record.first_batch),
        "last_batch": _batch_json(record.last_batch),
        "noise": None if record.noise is None else record.noise.hex(),
        "tables": tables.texts,
    }
    return json.dumps(content, separators=(",", ":")).encode("ascii")


def decode_record(data: bytes, *, where: str) -> WitnessRecord:
    """Decode what `encode_record` returned, in time and memory proportional to the data."""
    return _RecordDecoder(where).record(parse_json(data, where=where))


class _Tables:
    """Compressed name tables, each stored once."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._known: dict[str, int] = {}

    def add(self, rows: object) -> int:
        text = _compress(rows)
        if text not in self._known:
            self._known[text] = len(self.texts)
            self.texts.append(text)
        return self._known[text]


def _compress(rows: object) -> str:
    return base64.b64encode(zlib.compress(json.dumps(rows, separators=(",", ":")).encode("ascii"), 9)).decode("ascii")


def _column(values: RankValues, dtype: str = _SMALL) -> str:
    kept = values[:1] if len(set(values)) == 1 else values
    return base64.b64encode(np.array(kept, dtype).tobytes()).decode("ascii")


def _environment_json(environment: Environment) -> dict[str, object]:
    return {
        "world": environment.world,
        "layout": environment.layout,
        "style": environment.style,
        "is_deterministic": environment.is_deterministic,
        "rtol": environment.rtol.hex(),
        "versions": dict(environment.versions),
        "flags": dict(environment.flags),
    }


def _batch_json(batch: BatchDigests | None) -> object:
    if batch is None:
        return None
    samples = np.array(batch.all_samples, _SMALL).tobytes()
    return {
        "ordered": _column(batch.ordered),
        "multisets": _column(batch.multisets),
        "counts": _column(batch.counts),
        "samples": base64.b64encode(samples).decode("ascii"),
    }


def _step_json(step: StepRecord, tables: _Tables) -> dict[str, object]:
    return {
        "step": step.step,
        "batch": _batch_json(step.batch),
        "loss": _column(step.loss, _WIDE),
        "grad_norm": _column(step.grad_norm, _WIDE),
        "random_before": _random_json(step.random_before),
        "random_after": _random_json(step.random_after, step.random_before),
        "before": _state_json(step.before, tables),
        "after": _state_json(step.after, tables),
    }


def _random_json(random: Mapping[str, RankValues] | None, before: Mapping[str, RankValues] | None = None) -> object:
    """Return the generators' columns; an empty one if the step drew nothing, which leaves it as it was before."""
    if random is None:
        return None
    known = before or {}
    return {name: "" if values == known.get(name) else _column(values) for name, values in random.items()}


def _state_json(state: StateDigests | None, tables: _Tables) -> object:
    if state is None:
        return None
    names = tables.add([[name, each.part, each.dtype] for name, each in state.tensors.items()])
    digests = np.array([each.digest for each in state.tensors.values()], _SMALL)
    settings = tables.add([[name, each.part, each.text] for name, each in state.settings.items()])
    return {
        "names": names,
        "digests": base64.b64encode(digests.tobytes()).decode("ascii"),
        "settings": settings,
        "ties": dict(state.ties),
        "uneven": sorted(state.uneven),
    }


class _RecordDecoder:
    """Decodes one record and checks each value."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._world = 1
        self._numbers = 0
        self._tables: list[list[tuple[str, str, str]]] = []

    def record(self, value: object) -> WitnessRecord:
        version = read_fields(value, {"version": int}, self._where)["version"]
        if type(version) is not int or version < 1:
            raise self._error("its version must be an integer from 1", version)
        if version > _VERSION:
            raise UnsupportedError("a newer version wrote this record", where=self._where, found=version, fix=NEWER)
        kinds = {"save": str, "number": int, "environment": dict, "steps": list, "tables": list}
        raw = read_fields(value, {**kinds, "first_batch": object, "last_batch": object, "noise": object}, self._where)
        environment = self._environment(raw["environment"])
        first_batch, last_batch = self._batch(raw["first_batch"]), self._batch(raw["last_batch"])  # as of one rank
        self._world = environment.world
        left = _MAX_TEXT
        for text in raw["tables"]:
            rows, left = self._table(text, left)
            self._tables.append(rows)
        if len(raw["steps"]) > _MAX_STEPS:
            raise self._error("too many steps", len(raw["steps"]))
        return WitnessRecord(
            read_save(raw["save"], self._where),
            self._number(raw["number"]),
            environment,
            tuple(self._step(step) for step in raw["steps"]),
            first_batch,
            last_batch,
            None if raw["noise"] is None else self._float(raw["noise"]),
        )

    def _error(self, what: str, found: object) -> FormatError:
        return FormatError(f"not a witness record: {what}", where=self._where, found=found)

    def _number(self, value: object) -> int:
        return read_integer(value, "step", self._where, below=_MAX_STEP)

    def _float(self, value: object) -> float:
        try:
            number = float.fromhex(value) if isinstance(value, str) else None
        except (ValueError, OverflowError):
            number = None
        if number is None or not number >= 0.0:
            raise self._error("invalid tolerance", value)
        return number

    def _environment(self, value: object) -> Environment:
        kinds = {"world": int, "layout": int, "style": str, "is_deterministic": bool, "versions": dict, "flags": dict}
        raw = read_fields(value, {**kinds, "rtol": str}, self._where)
        world = read_integer(raw["world"], "world", self._where, below=_MAX_RANKS)
        if not world:
            raise self._error("no ranks", world)
        rtol = self._float(raw["rtol"])
        texts = [self._texts(raw[name]) for name in ("versions", "flags")]
        return Environment(world, raw["layout"], raw["style"], raw["is_deterministic"], rtol, *texts)

    def _texts(self, value: Mapping[str, object]) -> dict[str, str]:
        if not all(isinstance(text, str) for text in value.values()):
            raise self._error("a flag, version or name is not text", value)
        return {name: str(text) for name, text in value.items()}

    def _names(self, value: Sequence[object]) -> frozenset[str]:
        if not all(isinstance(name, str) for name in value):
            raise self._error("a name is not text", value)
        return frozenset(map(str, value))

    def _bytes(self, value: object) -> bytes:
        try:
            return base64.b64decode(value, validate=True) if isinstance(value, str) else self._refuse(value)
        except (binascii.Error, ValueError) as error:
            raise self._error("no base64", value) from error

    def _refuse(self, value: object) -> bytes:
        raise self._error("packed numbers must be text", value)

    def _packed(self, value: object, dtype: str) -> list[int]:
        data = self._bytes(value)
        if len(data) % np.dtype(dtype).itemsize:
            raise self._error("packed numbers end early", len(data))
        numbers: list[int] = np.frombuffer(data, dtype).tolist()
        return numbers

    def _column(self, value: object, dtype: str = _SMALL) -> RankValues:
        values = self._packed(value, dtype)
        if not values:
            return ()
        self._numbers += self._world
        if len(values) not in (1, self._world) or self._numbers > _MAX_NUMBERS:
            raise self._error("a column must have one number from each rank", len(values))
        return tuple(values) if len(values) == self._world else tuple(values) * self._world

    def _full_column(self, value: object) -> RankValues:
        values = self._column(value)
        if not values:
            raise self._error("a column is empty", "")
        return values

    def _batch(self, value: object) -> BatchDigests | None:
        if value is None:
            return None
        raw = read_fields(value, dict.fromkeys(("ordered", "multisets", "counts", "samples"), str), self._where)
        ordered, multisets, counts = (self._full_column(raw[name]) for name in ("ordered", "multisets", "counts"))
        flat = self._packed(raw["samples"], _SMALL)
        if not flat:
            return BatchDigests(ordered, multisets, counts)
        if len(flat) != sum(counts):
            raise self._error("samples do not fit their counts", len(flat))
        ends = np.cumsum(counts).tolist()
        samples = tuple(tuple(flat[end - n : end]) for n, end in zip(counts, ends, strict=True))
        return BatchDigests(ordered, multisets, counts, samples)

    def _step(self, value: object) -> StepRecord:
        names = ("batch", "random_before", "random_after", "before", "after")
        kinds = {"step": int, "loss": str, "grad_norm": str, **dict.fromkeys(names, object)}
        raw = read_fields(value, kinds, self._where)
        random_before = self._random(raw["random_before"], {})
        return StepRecord(
            self._number(raw["step"]),
            self._batch(raw["batch"]),
            self._column(raw["loss"], _WIDE),
            self._column(raw["grad_norm"], _WIDE),
            random_before,
            self._random(raw["random_after"], random_before or {}),
            self._state(raw["before"]),
            self._state(raw["after"]),
        )

    def _random(self, value: object, before: Mapping[str, RankValues]) -> dict[str, RankValues] | None:
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self._error("random states must be an object", value)
        return {
            name: before[name] if column == "" and name in before else self._full_column(column)
            for name, column in value.items()
        }

    def _table(self, value: object, left: int) -> tuple[list[tuple[str, str, str]], int]:
        unpacker = zlib.decompressobj()
        try:
            data = unpacker.decompress(self._bytes(value), max(left, 1))
        except zlib.error as error:
            raise self._error("a table is damaged", error) from error
        if not unpacker.eof:
            raise self._error("a table ends early, or is too large", len(data))
        rows = read_list(parse_json(data, where=self._where), "tables", self._where)
        for row in rows:
            if not (isinstance(row, list) and len(row) == 3 and all(isinstance(text, str) for text in row)):
                raise self._error("invalid row in a table", row)
            if row[1] not in _PARTS:
                raise self._error("an unknown part in a state", row[1])
        return [(name, part, text) for name, part, text in rows], left - len(data)

    def _find_table(self, at: object) -> Sequence[tuple[str, Any, str]]:
        return self._tables[read_integer(at, "tables", self._where, below=len(self._tables))]

    def _state(self, value: object) -> StateDigests | None:
        if value is None:
            return None
        kinds = {"names": int, "digests": str, "settings": int, "ties": dict, "uneven": list}
        raw = read_fields(value, kinds, self._where)
        names, digests = self._find_table(raw["names"]), self._packed(raw["digests"], _SMALL)
        settings = self._find_table(raw["settings"])
        self._numbers += len(names) + len(settings)
        if len(names) != len(digests) or self._numbers > _MAX_NUMBERS:
            raise self._error("digests do not fit their names", len(digests))
        return StateDigests(
            {
                name: TensorDigest(part, dtype, digest)
                for (name, part, dtype), digest in zip(names, digests, strict=True)
            },
            {name: Setting(part, text) for name, part, text in settings},
            self._texts(raw["ties"]),
            self._names(raw["uneven"]),
        )
