"""Verdicts on resumes survive encoding, are merged in copies, and are refused when they are not what they seem."""

from __future__ import annotations

import contextlib
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardckpt.divergence import Divergence
from shardckpt.encodings.typed_json import dump, load
from shardckpt.errors import CheckpointError, ChecksumError, FormatError, UnsafeError, UnsupportedError
from shardckpt.native.run_directory import CAPTURE_RESUMES, resumes_name, step_name
from shardckpt.storage.local import LocalStore
from shardckpt.witness.files.resume_file import (
    SavedCaptureResumes,
    SavedResumes,
    add_capture_resume,
    add_resumes,
    copy_resumes,
    read_capture_resumes,
    read_resumes,
)
from shardckpt.witness.files.step_witness import read_capture_witnesses
from shardckpt.witness.records.resumes import MAX_RESUMES, CaptureResume, Resume

SAVE, STEP = "0123456789abcde", step_name(8)
FOUND = Divergence("schedule", 9, "optim.lr\n\ud800", "optim.lr is 1", "Put it into the state", (0, 5), "load")
PROVEN = Resume("0mwtgz5lmk45jxm", 5.25, (9, 10), 2, 2, 3, "Net", "FSDP2", False, True)
DIVERGED = Resume("0mwtgz6i8zqkt25", 6.5, (9, 10), 0, 2, 2, "Net", divergence=FOUND)


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(str(tmp_path))


def test_resumes_are_decoded_as_they_were() -> None:
    saved = SavedResumes(SAVE, (PROVEN, DIVERGED))
    assert load(SavedResumes, dump(saved), where="x") == saved


def test_a_file_of_the_most_and_longest_resumes_is_small() -> None:
    found = replace(FOUND, name="x" * 1000, sentence="x" * 1000, fix="x" * 1000, ranks=(100_000,) * 64)
    resume = replace(DIVERGED, steps=(10**9,) * 64, divergence=found)
    assert len(dump(SavedResumes(SAVE, (resume,) * MAX_RESUMES))) < 1 << 19


def test_a_resume_replaces_an_earlier_one_with_its_id(store: LocalStore) -> None:
    add_resumes(store, STEP, SAVE, DIVERGED)
    add_resumes(store, STEP, SAVE, PROVEN)
    add_resumes(store, STEP, SAVE, replace(DIVERGED, divergence=None))
    assert read_resumes(store, STEP, SAVE) == (PROVEN, replace(DIVERGED, divergence=None))


def test_resumes_of_a_step_that_was_replaced_do_not_count(store: LocalStore) -> None:
    add_resumes(store, STEP, SAVE, DIVERGED)
    assert read_resumes(store, STEP, "0" * 15) == ()
    add_resumes(store, STEP, "0" * 15, PROVEN)
    assert read_resumes(store, STEP, "0" * 15) == (PROVEN,)


def test_a_copy_has_the_resumes_of_both(tmp_path: Path) -> None:
    source, target = LocalStore(str(tmp_path / "a")), LocalStore(str(tmp_path / "b"))
    copy_resumes(source, STEP, target, STEP)
    assert read_resumes(target, STEP, SAVE) == ()
    add_resumes(source, STEP, SAVE, PROVEN)
    add_resumes(target, STEP, SAVE, DIVERGED)
    copy_resumes(source, STEP, target, STEP)
    assert read_resumes(target, STEP, SAVE) == (PROVEN, DIVERGED)


CAPTURED = CaptureResume(8, "memory", "shardckpt-memory:1/step-00000008", SAVE, PROVEN)


def test_resumes_from_captures_are_in_one_file_of_the_run(store: LocalStore) -> None:
    add_capture_resume(store, replace(CAPTURED, resume=DIVERGED))
    add_capture_resume(store, CAPTURED)
    local = replace(CAPTURED, tier="local", resume=replace(PROVEN, id="2" * 15, began_at=7.5))
    add_capture_resume(store, local)
    assert read_capture_resumes(store) == (CAPTURED, replace(CAPTURED, resume=DIVERGED), local)
    assert [entry.name for entry in store.list()] == [CAPTURE_RESUMES]
    (first, second), faults = read_capture_witnesses(store)
    assert (first.last.tier, first.verdict, len(first.resumes), second.last.tier) == ("memory", "diverged", 2, "local")
    assert faults == ()


def test_the_newest_resumes_from_captures_are_kept(store: LocalStore) -> None:
    for at in range(MAX_RESUMES + 3):
        resume = replace(PROVEN, id=f"{at:015d}", began_at=float(at))
        add_capture_resume(store, replace(CAPTURED, path="x" * 5000, resume=resume))
    kept = read_capture_resumes(store)
    assert [each.resume.began_at for each in kept] == [float(at) for at in range(3, MAX_RESUMES + 3)]
    assert {len(each.path) for each in kept} == {1000}


def test_damaged_resumes_from_captures_are_a_fault_and_stay(store: LocalStore, tmp_path: Path) -> None:
    (tmp_path / CAPTURE_RESUMES).write_bytes(b"{}\nnone\n")
    found, (fault,) = read_capture_witnesses(store)
    assert (found, "SHA-256" in fault) == ((), True)
    with pytest.raises(ChecksumError):
        add_capture_resume(store, CAPTURED)
    for change in ({"number": -1}, {"save": "?"}, {"resume": {}}, {"tier": 1}, {"path": None}):
        content = json.loads(dump(SavedCaptureResumes((CAPTURED,))))
        content["captures"][0].update(change)
        with pytest.raises(CheckpointError):
            load(SavedCaptureResumes, json.dumps(content).encode(), where="x")


def test_a_flipped_bit_and_a_file_of_megabytes_are_refused(store: LocalStore, tmp_path: Path) -> None:
    add_resumes(store, STEP, SAVE, PROVEN)
    path = tmp_path / resumes_name(STEP)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(ChecksumError):
        add_resumes(store, STEP, SAVE, DIVERGED)
    assert path.read_bytes() == data, "a file that cannot be read stays"
    with path.open("wb") as file:
        file.truncate((1 << 20) + 1)
    with pytest.raises(UnsafeError):
        read_resumes(store, STEP, SAVE)


@pytest.mark.parametrize("seed", range(60))
def test_a_value_of_another_kind_is_refused_with_a_typed_error(seed: int) -> None:
    dice = random.Random(seed)
    content = json.loads(dump(SavedResumes(SAVE, (PROVEN, DIVERGED))))
    place: Any = content
    while True:
        key = dice.choice(list(place) if isinstance(place, dict) else range(len(place)))
        if not (isinstance(place[key], dict | list) and place[key]) or dice.random() < 0.2:
            break
        place = place[key]
    place[key] = dice.choice([None, -1, 10**30, "?", [], {}, [[[]]], True, 1.5, 1e300])
    with contextlib.suppress(CheckpointError):
        decoded = load(SavedResumes, json.dumps(content).encode(), where="x")
        assert load(SavedResumes, dump(decoded), where="x") == decoded


def test_an_unknown_cause_is_refused() -> None:
    strange = replace(DIVERGED, divergence=replace(FOUND, cause="weather"))
    with pytest.raises(FormatError, match=r"resumes\[0\]\.divergence\.cause: must be one of .*; found weather"):
        load(SavedResumes, dump(SavedResumes(SAVE, (strange,))), where="x")


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"version": 2}, UnsupportedError),
        ({"resumes": [{}] * (MAX_RESUMES + 1)}, FormatError),
        ({"save": "../../etc"}, FormatError),
    ],
)
def test_what_this_version_does_not_know_is_refused(change: dict[str, Any], error: type[Exception]) -> None:
    content = json.loads(dump(SavedResumes(SAVE, ())))
    with pytest.raises(error):
        load(SavedResumes, json.dumps({**content, **change}).encode(), where="x")
