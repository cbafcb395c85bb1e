"""Witness records survive encoding, are small, and are refused when they lie."""

from __future__ import annotations

import base64
import contextlib
import json
import random
import zlib
from dataclasses import replace
from pathlib import Path

import pytest

from shardckpt.errors import CheckpointError, ChecksumError, FormatError, UnsupportedError
from shardckpt.native.run_directory import witness_name
from shardckpt.storage.local import LocalStore
from shardckpt.witness.files import record_file
from shardckpt.witness.files.record_file import copy_record, decode_record, encode_record, read_record, write_record
from shardckpt.witness.records.step_records import (
    BatchDigests,
    Environment,
    Setting,
    StateDigests,
    StepRecord,
    TensorDigest,
    WitnessRecord,
)

GIB = 1 << 30


def make_record(world: int, tensors: int = 20, steps: int = 2) -> WitnessRecord:
    dice = random.Random(world)

    def column(bits: int = 32) -> tuple[int, ...]:
        return tuple(dice.getrandbits(bits) for _ in range(world))

    names = [f"model.layers.{at // 10}.block.{at % 10}.weight" for at in range(tensors)]
    state = StateDigests(
        {name: TensorDigest("parameter", "float32", dice.getrandbits(32)) for name in names},
        {"optim.param_groups.0.lr": Setting("schedule", "0.1")},
        {"model.head.weight": "model.embed.weight"},
        frozenset({"model.mean"}),
    )
    samples = tuple(tuple(dice.getrandbits(32) for _ in range(2)) for _ in range(world)) if world < 1000 else ()
    batch = BatchDigests(column(), column(), (2,) * world, samples)
    environment = Environment(world, 5, "Net", True, 1e-4, {"torch": "2.13"}, {"threads": "1"})
    before = {"python": column(), "numpy": column(), "torch": column()}
    after = {**before, "torch": column()}
    made = [StepRecord(9 + at, batch, column(64), column(64), before, after, None, state, None) for at in range(steps)]
    first = batch.join_ranks()
    return WitnessRecord("0123456789abcde", 8, environment, tuple(made), first, replace(first, samples=()), 2e-7)


@pytest.mark.parametrize("world", [1, 2, 7])
def test_a_record_is_decoded_as_it_was(world: int) -> None:
    record = make_record(world)
    assert decode_record(encode_record(record), where="x") == record


def test_a_step_of_a_thousand_ranks_takes_64_kb() -> None:
    assert len(encode_record(make_record(1000, steps=1))) <= 64_000


def test_a_deep_step_of_three_thousand_tensors_takes_64_kb() -> None:
    assert len(encode_record(make_record(8, tensors=3000, steps=1))) <= 64_000


@pytest.mark.parametrize("seed", range(60))
def test_a_record_that_lies_is_refused_with_a_typed_error(seed: int) -> None:
    dice = random.Random(seed)
    content = json.loads(encode_record(make_record(2)))
    place, key = content, None
    while True:
        key = dice.choice(list(place) if isinstance(place, dict) else range(len(place)))
        if not (isinstance(place[key], dict | list) and place[key]) or dice.random() < 0.2:
            break
        place = place[key]
    place[key] = dice.choice(
        [None, -1, 10**30, "?", [], {}, [[[]]], True, 1.5, "AAAA", base64.b64encode(b"x").decode()]
    )
    with contextlib.suppress(CheckpointError):
        decode_record(json.dumps(content).encode(), where="x")


def test_a_table_that_expands_a_thousandfold_is_refused_early() -> None:
    content = json.loads(encode_record(make_record(2)))
    content["tables"] = [base64.b64encode(zlib.compress(b" " * (GIB // 16), 9)).decode()] * 3
    with pytest.raises(FormatError):
        decode_record(json.dumps(content).encode(), where="x")


def test_a_table_behind_those_that_use_up_the_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    content = json.loads(encode_record(make_record(2)))
    first = len(zlib.decompress(base64.b64decode(content["tables"][0])))
    monkeypatch.setattr(record_file, "_MAX_TEXT", first)
    with pytest.raises(FormatError, match="too large"):
        decode_record(json.dumps(content).encode(), where="x")


def test_columns_that_expand_to_millions_of_numbers_are_refused() -> None:
    content = json.loads(encode_record(make_record(1)))
    one = base64.b64encode(bytes(4)).decode()
    content["environment"]["world"] = 1 << 19
    content["first_batch"] = None
    content["steps"] = [{**content["steps"][0], "batch": None, "random_before": {str(at): one for at in range(64)}}]
    with pytest.raises(FormatError, match="column"):
        decode_record(json.dumps(content).encode(), where="x")


def test_a_record_of_a_newer_version_is_named_as_such() -> None:
    content = json.loads(encode_record(make_record(1)))
    with pytest.raises(UnsupportedError, match="newer"):
        decode_record(json.dumps({**content, "version": 2}).encode(), where="x")


@pytest.mark.parametrize("version", [0, -1, True])
def test_a_version_below_the_first_is_refused(version: object) -> None:
    content = json.loads(encode_record(make_record(1)))
    with pytest.raises(FormatError, match="version"):
        decode_record(json.dumps({**content, "version": version}).encode(), where="x")


def test_a_record_lies_beside_its_step_and_a_flipped_bit_in_it_is_found(tmp_path: Path) -> None:
    record = make_record(3)
    write_record(LocalStore(str(tmp_path)), "step-00000008", record)
    path = tmp_path / witness_name("step-00000008")
    assert read_record(LocalStore(str(tmp_path)), "step-00000008") == record
    assert read_record(LocalStore(str(tmp_path)), "step-00000009") is None
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 1
    path.write_bytes(data)
    with pytest.raises(ChecksumError):
        read_record(LocalStore(str(tmp_path)), "step-00000008")


def test_a_record_is_copied_byte_for_byte(tmp_path: Path) -> None:
    write_record(LocalStore(str(tmp_path / "a")), "step-00000008", make_record(3))
    copy_record(LocalStore(str(tmp_path / "a")), "step-00000008", LocalStore(str(tmp_path / "b")), "step-00000008")
    names = [tmp_path / folder / witness_name("step-00000008") for folder in "ab"]
    assert names[0].read_bytes() == names[1].read_bytes()
