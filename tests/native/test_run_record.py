"""A run's record: read back as written; which captures belong to the run, and which restores failed."""

import hashlib
import json
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shardckpt.native.commit import SaveMark
from shardckpt.native.run_directory import RECORD, RunDirectory, StepFolder
from shardckpt.native.run_record import (
    RunRecord,
    RunStart,
    find_run,
    read_run_record,
    select_captures,
    write_run_record,
)
from shardckpt.storage.resolve_url import open_store

COUNTS = st.integers(0, 10**9 - 1)
STARTS = st.builds(
    RunStart, st.text("0a", min_size=1), COUNTS, st.none() | st.tuples(COUNTS, COUNTS), st.booleans(), st.booleans()
)
RECORDS = st.builds(
    RunRecord, st.sampled_from(["", "ab"]), st.booleans(), st.lists(STARTS).map(tuple), st.sampled_from(["", "/nvme"])
)


@given(record=RECORDS)
def test_a_record_is_read_back(tmp_path_factory, record):
    store = open_store(str(tmp_path_factory.mktemp("run")))
    write_run_record(store, record)
    assert read_run_record(store) == record


JSON = st.recursive(
    st.none() | st.integers() | st.text(), lambda each: st.lists(each) | st.dictionaries(st.text(), each)
)


def sign(line: bytes) -> bytes:
    return line + b"\n" + hashlib.sha256(line).hexdigest().encode() + b"\n"


@given(
    data=st.binary()
    | JSON.map(lambda found: sign(json.dumps(found).encode()))
    | JSON.map(lambda found: sign(json.dumps({"run": "a", "is_rooted": True, "starts": found}).encode()))
)
@example(data=sign(b"[" * 100_000))
@example(data=b"x" * 100_000)
def test_other_bytes_are_a_damaged_record(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("run")
    (folder / RECORD).write_bytes(data)
    record = read_run_record(open_store(str(folder)))
    assert (record.is_damaged and record == RunRecord(is_damaged=True)) or record.starts == ()


def test_each_flipped_bit_of_a_record_is_noticed(tmp_path):
    store = open_store(str(tmp_path))
    write_run_record(store, RunRecord("ab", starts=(RunStart("c", 1, None),)))
    data = (tmp_path / RECORD).read_bytes()
    for at in range(len(data.rstrip()) * 8):
        flipped = bytearray(data)
        flipped[at // 8] ^= 1 << at % 8
        (tmp_path / RECORD).write_bytes(flipped)
        assert read_run_record(store).is_damaged or not flipped.strip()


def test_a_run_without_a_record_has_an_empty_one(tmp_path):
    assert read_run_record(open_store(str(tmp_path))) == RunRecord()


@pytest.mark.parametrize(("before", "after"), [(1, 64), (64, 1)], ids=["by a longer one", "by a shorter one"])
def test_a_record_that_is_replaced_between_two_requests_is_read_whole(tmp_path, monkeypatch, before, after):
    store = open_store(str(tmp_path))
    starts = tuple(RunStart("0" * 8, 10**8 + at, (10**9, 10**15)) for at in range(64))
    old, new = (RunRecord("a", starts=starts[:count]) for count in (before, after))
    write_run_record(store, old)
    size = type(store).size

    def size_and_replace(self, name):
        found = size(self, name)
        monkeypatch.setattr(type(store), "size", size)
        write_run_record(store, new)
        return found

    monkeypatch.setattr(type(store), "size", size_and_replace)
    assert read_run_record(store) == new


def test_the_last_64_starts_are_kept_and_a_start_replaces_itself():
    record = RunRecord("a")
    for epoch in range(1, 100):
        record = record.with_start(RunStart("b", epoch, None))
    assert [start.epoch for start in record.starts] == [*range(36, 100)] and record.last_epoch == 99
    done = RunStart("b", 99, None, has_saved=True)
    assert record.with_start(done).starts == (*record.starts[:-1], done)


def test_starts_are_in_the_order_of_their_epochs_whichever_saves_last():
    record = RunRecord("a").with_start(RunStart("a", 1, (0, 5))).with_start(RunStart("b", 2, (0, 5), has_saved=True))
    record = record.with_start(RunStart("a", 1, (0, 5), has_saved=True))
    assert [start.epoch for start in record.starts] == [1, 2] and record.last_saved == 2
    assert not record.is_on_course((1, 6))


def record_of(*starts: tuple) -> RunRecord:
    """Return a record with starts: the step that each restored, and whether it saved."""
    return RunRecord(
        "a", starts=tuple(RunStart(f"{at}", at + 1, each[0], each[1], each[1]) for at, each in enumerate(starts))
    )


def test_failures_count_until_a_start_from_that_step_completes_another():
    tried, done = ((0, 9), False), ((0, 9), True)
    assert record_of(tried, tried).count_failures() == {(0, 9): 2}
    assert record_of(tried, ((0, 8), False), tried).count_failures() == {(0, 9): 2, (0, 8): 1}
    assert record_of(tried, done, tried).count_failures() == {(0, 9): 1}
    assert record_of((None, True)).count_failures() == {}


def test_steps_are_on_the_course_unless_a_later_start_went_back_before_them():
    assert RunRecord("a").is_on_course((0, 9))
    went_on = record_of((None, True), ((1, 9), True))
    assert went_on.is_on_course((1, 9)) and not went_on.is_on_course((1, 10)) and went_on.is_on_course((2, 3))
    assert went_on.is_on_course((3, 1)), "by a start that the record does not have"
    assert record_of((None, True), ((1, 9), False)).is_on_course((1, 10)), "the later start saved nothing"
    twice = record_of((None, True), ((1, 9), True), ((1, 5), True))
    assert not twice.is_on_course((2, 10)) and twice.is_on_course((1, 5)) and not twice.is_on_course((1, 6))
    assert not record_of((None, True), (None, True)).is_on_course((1, 1)), "it started from scratch"


@given(st.lists(st.tuples(st.integers(1, 20), st.booleans()), max_size=12), st.data())
def test_the_course_is_what_each_start_restored_and_what_it_saved(kept, data):
    """A model: each start restores one of the steps so far, and saves two more unless it fails."""
    record, courses, steps = RunRecord("a"), {}, []
    for epoch, (_, has_saved) in enumerate(kept, 1):
        restored = data.draw(st.sampled_from(steps)) if steps else None
        record = record.with_start(RunStart("0", epoch, restored, has_saved, has_saved))
        course = [*courses.get(restored, [])]
        if has_saved:
            for number in (1, 2):
                course = [*course, (epoch, number)]
                courses[epoch, number] = course
                steps.append((epoch, number))
            last = course
    if steps:
        assert [step for step in steps if record.is_on_course(step)] == last


def step(branch: int, number: int, run: str = "", **fields: object) -> StepFolder:
    mark = SaveMark(run, "0", 1) if run else None
    return StepFolder(number, f"step-{number:08d}", f"{branch}{number}", branch, mark, **fields)


EMPTY = RunDirectory((), ())
BEGUN = RunDirectory(
    (step(0, 5, fault="not committed", is_ours=True, held={"0123456789abcde-00000-00.safetensors": 1}),), ()
)
FULL = RunDirectory((step(1, 5, "a"), step(2, 4, "b"), step(0, 9)), ())


@pytest.mark.parametrize(
    ("record", "root", "run"),
    [
        (RunRecord("a"), EMPTY, "a"),
        (RunRecord("a", is_rooted=True), FULL, "a"),
        (RunRecord("a", is_rooted=True), EMPTY, ""),
        (RunRecord("a", is_rooted=True), BEGUN, ""),
        (RunRecord("a"), BEGUN, "a"),
        (RunRecord(), FULL, "b"),
        (RunRecord(), EMPTY, ""),
        (RunRecord(is_damaged=True), EMPTY, "c"),
        (RunRecord(is_damaged=True), FULL, "b"),
    ],
)
def test_the_run_is_the_records_unless_the_root_was_emptied(record, root, run):
    assert find_run(record, root, [step(3, 1, "c")]) == run
    assert find_run(replace(record, is_damaged=False), root) == (
        "" if run == "c" and root is EMPTY else run.replace("c", "b")
    )


def test_captures_of_another_run_and_without_a_mark_are_not_of_the_run():
    captures = [step(1, 1, "a"), step(1, 2, "b"), step(1, 3)]
    assert select_captures(captures, "a") == captures[:1]
    assert select_captures(captures, "") == []
