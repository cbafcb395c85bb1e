"""The record of a run: read back as written, and any other bytes are a new record."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardckpt.storage.resolve_url import open_store
from shardckpt.tiers.durability.run_record import (
    NOTHING_LOST,
    RECORD,
    Attempt,
    CapturingStart,
    LostSteps,
    RunRecord,
    find_run_id,
    read_run_record,
    write_run_record,
)

ATTEMPTS = st.lists(st.builds(Attempt, st.integers(), st.integers(), st.integers())).map(tuple)


STARTS = st.builds(CapturingStart, st.text(), st.integers(0, 10**9 - 1))
LOST = st.just(NOTHING_LOST) | st.builds(LostSteps, st.text(min_size=1), st.integers(0), st.integers(0))


IDS = st.lists(st.text(), max_size=64).map(tuple)


@given(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])), ATTEMPTS, STARTS, LOST, IDS)
def test_a_record_is_read_back(folder, attempts, start, lost, starts):
    record = RunRecord(folder, attempts, start, lost, starts)
    assert RunRecord.decode(record.encode()) == record


JSON = st.recursive(
    st.none() | st.integers() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)
)


@given(
    st.binary()
    | JSON.map(lambda found: json.dumps({"local": found, "attempts": found, "start": found}).encode())
    | JSON.map(lambda found: json.dumps({"start": [found, found]}).encode())
    | JSON.map(lambda found: json.dumps({"lost": found}).encode())
    | JSON.map(lambda found: json.dumps({"starts": found}).encode())
    | JSON.map(lambda found: json.dumps({"lost": ["x", found, found]}).encode())
    | JSON.map(lambda found: json.dumps({"attempts": [found, [1, 2, 3]]}).encode())
    | st.just(b"[" * 100_000)
)
def test_other_bytes_are_a_record_of_the_right_types(data):
    record = RunRecord.decode(data)
    assert isinstance(record.local, str)
    assert all(type(number) is int for attempt in record.attempts for number in attempt)
    assert [*map(type, record.start)] == [str, int] and record.start.branch >= 0
    assert [*map(type, record.lost)] == [str, int, int]
    assert all(type(each) is str for each in record.starts)


def test_a_run_without_a_record_or_with_a_huge_one_has_a_new_one(tmp_path):
    store = open_store(str(tmp_path))
    assert read_run_record(store) == RunRecord()
    write_run_record(store, RunRecord("/nvme/run"))
    assert read_run_record(open_store(str(tmp_path))) == RunRecord("/nvme/run")
    (tmp_path / RECORD).write_bytes(RunRecord("x" * 100_000).encode())
    assert read_run_record(open_store(str(tmp_path))) == RunRecord()


@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 1)], ids=["by a longer one", "by a shorter one"])
def test_a_record_that_is_replaced_between_two_requests_is_read_whole(tmp_path, monkeypatch, before, after):
    store = open_store(str(tmp_path))
    old, new = (RunRecord("a", tuple(Attempt(0, n, 1) for n in range(count))) for count in (before, after))
    write_run_record(store, old)
    size = type(store).size

    def size_and_replace(self, name):
        found = size(self, name)
        monkeypatch.setattr(type(store), "size", size)
        write_run_record(store, new)
        return found

    monkeypatch.setattr(type(store), "size", size_and_replace)
    assert read_run_record(store) == new


def test_a_run_has_one_id_whichever_way_its_folder_is_named(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "run")
    assert find_run_id(f"{tmp_path}/run") == find_run_id(f"{tmp_path}/link") == find_run_id(f"file://{tmp_path}/run/")
    assert find_run_id("s3://bucket/run/") == find_run_id("s3://bucket/run") != find_run_id("s3://bucket/other")
