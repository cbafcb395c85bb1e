"""The start of a run that captured last: later starts see whether they reach its captures."""

import os

import pytest

from shardckpt.errors import StorageError
from shardckpt.storage.resolve_url import open_store
from shardckpt.tiers.durability.run_record import RECORD, RunRecord, read_run_record, write_run_record
from shardckpt.tiers.lineage.last_start import LastStart, read_number, read_start


@pytest.fixture
def open_root(tmp_path):
    return lambda: open_store(str(tmp_path))


def find_least_branch(start: LastStart, attempts: list[str]) -> int:
    start.read()
    return start.find_least_branch(attempts)


def test_a_run_that_never_captured_begins_at_branch_0(open_root):
    assert find_least_branch(LastStart(open_root), []) == 0


@pytest.mark.parametrize(("seen", "least"), [(("first",), 0), (("other", "first"), 0), (("other",), 3), ((), 3)])
def test_a_start_that_reads_no_capture_of_the_last_one_saves_to_the_next_branch(open_root, seen, least):
    first, other = LastStart(open_root), LastStart(open_root)
    attempts = {"first": first.make_attempt(), "other": other.make_attempt()}
    other.record(1)
    first.record(2)
    assert find_least_branch(LastStart(open_root), [attempts[name] for name in seen]) == least


def test_a_start_follows_its_own_captures(open_root):
    start = LastStart(open_root)
    start.record(5)
    assert find_least_branch(start, []) == 0


def test_a_start_is_recorded_once_a_branch_beside_what_the_record_has(open_root, tmp_path):
    write_run_record(open_root(), RunRecord("/nvme/run"))
    start = LastStart(open_root, "/nvme/run")
    start.record(0)
    record = read_run_record(open_root())
    assert record.local == "/nvme/run" and record.start.branch == 0 and record.start.id
    os.remove(tmp_path / RECORD)
    start.record(0)
    assert not (tmp_path / RECORD).exists(), "one write at the first capture"
    start.is_in_doubt = True
    start.record(0)
    assert read_run_record(open_root()) == record
    start.record(1)
    assert read_run_record(open_root()).start == record.start._replace(branch=1)


def test_a_start_in_doubt_does_not_replace_the_record_of_another_one(open_root):
    start, other = LastStart(open_root), LastStart(open_root)
    start.record(0)
    other.record(0)
    record = read_run_record(open_root())
    start.is_in_doubt = True
    start.record(0)
    assert read_run_record(open_root()) == record


def test_only_captures_of_the_start_that_went_on_survive_the_loss_of_earlier_steps(open_root):
    start, other = LastStart(open_root), LastStart(open_root)
    assert not start.record_lost((0, 10)), "nothing was captured"
    start.record(0)
    assert start.record_lost((0, 10)) and not start.record_lost((0, 10))
    after = LastStart(open_root)
    assert not after.has_lost((0, 10), start.make_attempt())
    after.read()
    assert after.has_lost((0, 10), start.make_attempt()) and after.has_lost((0, 8), start.make_attempt())
    assert not after.has_lost((0, 11), start.make_attempt()) and not after.has_lost((0, 10), other.make_attempt())


def test_a_start_that_could_not_be_recorded_is_recorded_at_the_next_capture(open_root, tmp_path):
    start = LastStart(open_root)
    (tmp_path / RECORD).mkdir()
    with pytest.raises(StorageError):
        start.record(0)
    (tmp_path / RECORD).rmdir()
    start.record(0)
    assert read_run_record(open_root()).start.id


def test_captures_of_earlier_starts_count_only_below_those_of_the_last_one(open_root):
    last, other = LastStart(open_root), LastStart(open_root)
    other.record(0)
    last.record(1)
    by_last, by_other = last.make_attempt(), other.make_attempt()
    captured = {
        "own": ((1, 4), by_last),
        "own next": ((1, 6), by_last),
        "older": ((1, 3), by_other),
        "same step": ((1, 4), by_other),
        "higher": ((1, 9), by_other),
        "without attempt": ((1, 9), ""),
        "branch before": ((0, 9), by_other),
        "branch after": ((2, 1), by_other),
    }
    start = LastStart(open_root)
    assert start.find_replaced(captured) == set()
    start.read()
    assert start.find_replaced(captured) == {"same step", "higher", "branch after"}
    del captured["own"], captured["own next"]
    assert start.find_replaced(captured) == set(), "nothing of the last start is left"


def test_of_several_saves_of_a_step_the_last_starts_count_then_those_of_this_run(open_root):
    last, other, elsewhere = LastStart(open_root), LastStart(open_root), LastStart(open_root)
    other.record(1)
    last.record(0)
    attempts = {
        "other": other.make_attempt(),
        "own": last.make_attempt(),
        "foreign": elsewhere.make_attempt(),
        "unknown": "",
    }
    start = LastStart(open_root)
    start.read()
    assert start.select_saves(attempts) == ["own", "unknown"]
    del attempts["own"]
    assert start.select_saves(attempts) == ["other", "unknown"]
    assert start.select_saves({"foreign": attempts["foreign"]}) == ["foreign"]


def test_attempts_of_a_start_are_numbered(open_root):
    start, other = LastStart(open_root), LastStart(open_root)
    first, second, of_other = (each.make_attempt() for each in (start, start, other))
    assert [read_number(each) for each in (first, second, of_other)] == [1, 2, 1]
    assert read_start(first) == read_start(second) != read_start(of_other)


@pytest.mark.parametrize("text", ["", "id", f"id-{'1' * 16}", f"id-{'9' * 5000}-0", "id-1.5-0", "id--0"])
def test_other_text_than_an_attempt_has_no_number(text):
    assert read_number(text) == 0


def test_captures_of_starts_that_captured_for_this_root_are_known_to_later_starts(open_root, tmp_path):
    first, second, elsewhere = LastStart(open_root), LastStart(open_root), LastStart(open_root)
    attempts = [each.make_attempt() for each in (first, second)]
    first.record(0)
    second.record(0)
    later = LastStart(open_root)
    assert later.has_captured(elsewhere.make_attempt()), "nothing has been read"
    later.read()
    assert all(map(later.has_captured, ["", later.make_attempt(), *attempts]))
    assert not later.has_captured(elsewhere.make_attempt())


def test_starts_found_by_captures_without_a_record_are_known_from_the_next_capture(open_root, tmp_path):
    found, last = LastStart(open_root), LastStart(open_root)
    last.record(0)
    (tmp_path / RECORD).unlink()
    start = LastStart(open_root)
    start.read()
    start.add_found([found.make_attempt(), ""])
    start.record(0)
    later = LastStart(open_root)
    later.read()
    assert later.has_captured(found.make_attempt()) and later.has_captured(start.make_attempt())
    assert not later.has_captured(last.make_attempt())


def test_a_start_that_only_saves_in_a_root_without_starts_is_recorded_once(open_root, tmp_path):
    elsewhere, start = LastStart(open_root), LastStart(open_root)
    write_run_record(open_root(), RunRecord(local="/nvme/run"))
    start.read()
    start.record_save()
    later = LastStart(open_root)
    later.read()
    assert later.has_captured(start.make_attempt()) and not later.has_captured(elsewhere.make_attempt())
    assert later.find_least_branch([]) == 0, "it has captured nothing that a later start could miss"
    assert read_run_record(open_root()).local == "/nvme/run"
    (tmp_path / RECORD).unlink()
    start.record_save()
    assert not (tmp_path / RECORD).exists()
    start.record_lost((0, 2))
    start.record_save()
    assert (tmp_path / RECORD).exists(), "the root was emptied meanwhile"


def test_a_start_that_only_saves_leaves_the_record_of_starts_that_captured(open_root):
    first = LastStart(open_root)
    first.record(0)
    before = read_run_record(open_root())
    for start in (LastStart(open_root), LastStart(open_root)):
        start.record_save()
        assert read_run_record(open_root()) == before


def test_the_record_names_the_last_64_starts(open_root):
    starts = [LastStart(open_root) for _ in range(66)]
    for start in starts:
        start.record(0)
    later = LastStart(open_root)
    later.read()
    assert [later.has_captured(each.make_attempt()) for each in starts] == [False] * 2 + [True] * 64
