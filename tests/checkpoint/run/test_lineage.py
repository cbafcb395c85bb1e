"""The starts of a run: their epochs, their marks, and what happens if the root loses the record."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from shardckpt import Checkpointer
from shardckpt.checkpoint.run.lineage import Lineage
from shardckpt.errors import StorageError
from shardckpt.native.commit import SaveMark, read_save_mark
from shardckpt.native.run_directory import RECORD, RunDirectory, StepFolder, read_run
from shardckpt.native.run_record import RunRecord, RunStart, read_run_record, write_run_record
from shardckpt.storage.local import LocalStore

EMPTY = RunDirectory((), ())


def start(root: Path, **options: object) -> Lineage:
    """Start a process of a run with tiers."""
    return Lineage(str(root), None, None, options.pop("max_failed", None), has_tiers=True, **options)


def read(root: Path) -> RunRecord:
    return read_run_record(LocalStore(str(root)))


def make_capture(branch: int, number: int, mark: str) -> StepFolder:
    return StepFolder(number, f"step-{number:08d}", mark, branch, read_save_mark({"run.mark": mark}))


def test_each_start_that_saves_has_a_later_epoch_and_the_same_run(tmp_path):
    starts = [start(tmp_path) for _ in range(3)]
    assert [each.open_epoch(0, is_for_root=False) for each in starts] == [1, 2, 3]
    assert [each.open_epoch(0, is_for_root=False) for each in starts] == [1, 2, 3], "until it restores"
    assert len({each.run for each in starts}) == 1
    assert [each.is_completed for each in read(tmp_path).starts] == [True] * 3


def test_an_epoch_is_later_than_all_steps_that_were_seen(tmp_path):
    assert start(tmp_path).open_epoch(7, is_for_root=False) == 8
    assert start(tmp_path).open_epoch(2, is_for_root=False) == 9


def test_a_start_that_restored_counts_as_failed_until_a_further_step_is_completed(tmp_path):
    lineage = start(tmp_path)
    lineage.record_restore((1, 5), 1)
    assert read(tmp_path).starts[-1][1:] == (2, (1, 5), False, False)
    lineage.record_completed(5)
    assert not read(tmp_path).starts[-1].is_completed
    lineage.record_completed(6)
    assert read(tmp_path).starts[-1][1:] == (2, (1, 5), True, True)
    assert lineage.open_epoch(1, is_for_root=False) == 2, "it was opened by the restore"


def test_a_process_that_restores_again_has_a_new_epoch(tmp_path):
    lineage = start(tmp_path, max_failed=0)
    assert lineage.open_epoch(0, is_for_root=False) == 1
    lineage.record_restore((1, 5), 1)
    assert read(tmp_path).last_epoch == 1, "nothing is counted, so the next save opens it"
    assert lineage.open_epoch(1, is_for_root=False) == 2
    assert read(tmp_path).starts[-1].restored == (1, 5)


def test_marks_of_one_start_are_numbered_and_those_of_two_starts_differ(tmp_path):
    first, second = start(tmp_path), start(tmp_path)
    for each in (first, second):
        each.open_epoch(0, is_for_root=False)
    marks = [read_save_mark({"run.mark": each.make_mark()}) for each in (first, first, second)]
    assert [mark.sequence for mark in marks] == [1, 2, 1]
    assert len({mark.run for mark in marks}) == 1 and marks[0].start == marks[1].start != marks[2].start


@pytest.mark.parametrize(
    "text", ["", "x", "ab.cd", "ab.cd.x", "AB.cd.1", "ab.cd.1.2", "ab.cd." + "9" * 10, f"{'a' * 33}.b.1"]
)
def test_other_text_than_a_mark_is_none(text):
    assert read_save_mark({"run.mark": text}) is None
    assert read_save_mark({"run.mark": SaveMark("ab", "cd", 3).encode()}) == SaveMark("ab", "cd", 3)


def test_a_run_without_tiers_has_no_record_and_numbers_branches_by_its_steps(tmp_path):
    lineage = Lineage(str(tmp_path), None, None, None, has_tiers=False)
    assert lineage.open_epoch(4, is_for_root=False) == 4 and lineage.make_mark() == ""
    assert read(tmp_path) == RunRecord()


def test_a_process_without_tiers_takes_part_in_a_run_that_has_a_record(tmp_path):
    start(tmp_path).open_epoch(0, is_for_root=False)
    ck = Checkpointer(tmp_path)
    ck.save(3, {"x": 3})
    ck.save(4, {"x": 4})
    steps = read_run(LocalStore(str(tmp_path))).steps
    assert [step.order for step in steps] == [(2, 3), (2, 4)]
    assert {step.mark.run for step in steps} == {read(tmp_path).run}


def test_a_start_in_an_emptied_root_is_a_new_run_with_later_epochs(tmp_path):
    first = start(tmp_path)
    first.open_epoch(0, is_for_root=False)
    first.note_root_step(5)
    old = make_capture(9, 5, first.make_mark())
    second = start(tmp_path)
    assert second.start_restore(EMPTY, [old]) not in ("", first.run)
    assert second.open_epoch(9, is_for_root=False) == 10
    assert read(tmp_path).run == second.run and len(read(tmp_path).starts) == 1


def test_two_processes_that_start_a_run_at_once_are_in_one_run(tmp_path):
    first, second = start(tmp_path), start(tmp_path)
    for each in (first, second):
        each.start_restore(EMPTY)
    assert [each.open_epoch(0, is_for_root=False) for each in (first, second)] == [1, 2]
    assert first.run == second.run == read(tmp_path).run


def test_a_record_that_somebody_removed_is_written_again(tmp_path):
    lineage = start(tmp_path, local="/nvme")
    lineage.open_epoch(0, is_for_root=False)
    before = read(tmp_path)
    (tmp_path / RECORD).unlink()
    lineage.look()
    assert lineage.open_epoch(0, is_for_root=False) == 1
    assert read(tmp_path) == before and before.local == "/nvme"


@pytest.mark.parametrize("is_for_root", [False, True])
def test_a_process_that_goes_on_after_a_later_start_saved_takes_a_new_epoch(tmp_path, is_for_root):
    first, second = start(tmp_path), start(tmp_path)
    assert [each.open_epoch(0, is_for_root=True) for each in (first, second)] == [1, 2]
    first.look()  # in the background of a capture
    assert first.open_epoch(0, is_for_root=is_for_root) == 3
    assert second.open_epoch(0, is_for_root=True) == 4


def test_steps_stay_on_the_course_of_a_process_that_was_overtaken(tmp_path):
    first, second = start(tmp_path), start(tmp_path)
    assert first.open_epoch(0, is_for_root=True) == 1
    capture = make_capture(1, 9, first.make_mark())
    first.record_save(9, 1)
    second.open_epoch(0, is_for_root=True)
    assert first.select_found_again([capture], EMPTY) == []
    assert first.open_epoch(1, is_for_root=True) == 3
    assert first.select_found_again([capture], EMPTY) == [capture]


def test_a_later_start_that_saved_nothing_overtakes_no_one(tmp_path):
    first, second = start(tmp_path), start(tmp_path)
    first.open_epoch(0, is_for_root=True)
    second.record_restore((1, 5), 1)
    assert first.open_epoch(1, is_for_root=True) == 1


def test_an_epoch_is_later_than_those_of_a_record_that_is_gone_since(tmp_path):
    start(tmp_path).open_epoch(4, is_for_root=False)
    lineage = start(tmp_path, max_failed=0)
    lineage.start_restore(EMPTY)
    (tmp_path / RECORD).unlink()
    assert lineage.open_epoch(0, is_for_root=False) == 6


def test_a_process_without_tiers_sees_by_the_marks_that_the_run_had_a_record(tmp_path):
    first = start(tmp_path)
    first.open_epoch(0, is_for_root=False)
    mark = first.make_mark()
    (tmp_path / RECORD).unlink()
    plain = Lineage(str(tmp_path), None, None, None, has_tiers=False)
    plain.note_read(RunDirectory((make_capture(1, 5, mark),), ()))
    assert plain.open_epoch(1, is_for_root=True) == 2


def test_a_start_that_saves_the_restored_step_again_has_saved_and_may_have_failed(tmp_path):
    lineage = start(tmp_path)
    lineage.record_restore((1, 5), 1)
    lineage.open_epoch(1, is_for_root=False)
    lineage.record_completed(5)
    assert read(tmp_path).starts[-1][3:] == (True, False)
    assert not read(tmp_path).is_on_course((1, 6))


def test_a_record_of_a_new_run_is_left_to_it(tmp_path):
    lineage = start(tmp_path)
    lineage.open_epoch(0, is_for_root=False)
    other = RunRecord("abc", starts=(RunStart("d", 1, None),))
    write_run_record(LocalStore(str(tmp_path)), other)
    lineage.follow(EMPTY)
    assert read(tmp_path) == other
    assert lineage.select_found_again([make_capture(1, 5, lineage.make_mark())], EMPTY) == []


def test_captures_are_found_again_unless_the_run_left_their_course(tmp_path):
    first = start(tmp_path)
    first.open_epoch(0, is_for_root=False)
    captures = [make_capture(1, number, first.make_mark()) for number in (5, 9)]
    assert first.select_found_again(captures, EMPTY) == captures
    second = start(tmp_path, max_failed=0)
    second.start_restore(EMPTY)
    second.record_restore((1, 5), 1)
    second.open_epoch(1, is_for_root=False)
    assert first.select_found_again(captures, EMPTY) == captures[:1]
    second.note_root_step(6)
    assert first.select_found_again(captures, EMPTY) == []


def test_a_root_that_takes_no_record_refuses_the_epoch_and_not_the_restore(tmp_path, monkeypatch, caplog):
    lineage = start(tmp_path)

    def refuse(self, name: str):
        raise StorageError("read only")

    monkeypatch.setattr(LocalStore, "create", refuse)
    lineage.start_restore(EMPTY)
    lineage.record_restore((1, 5), 1)
    assert "is not recorded" in caplog.text
    with pytest.raises(StorageError, match="read only"):
        lineage.open_epoch(1, is_for_root=False)


def test_steps_in_the_root_keep_the_run_if_the_record_is_gone(tmp_path):
    lineage = start(tmp_path)
    lineage.open_epoch(0, is_for_root=False)
    root = RunDirectory((make_capture(1, 5, lineage.make_mark()),), ())
    shutil.rmtree(tmp_path)
    later = start(tmp_path)
    assert later.start_restore(root) == lineage.run
    later.open_epoch(1, is_for_root=False)
    assert read(tmp_path).run == lineage.run and read(tmp_path).is_rooted
