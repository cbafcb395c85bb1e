"""A resume is proven once all recorded steps are equal; the first divergence stays."""

from __future__ import annotations

from dataclasses import replace

from shardckpt.divergence import Divergence
from shardckpt.witness.records.resumes import MAX_RESUMES, add_compared_step, find_verdict, merge_resumes, start_resume
from shardckpt.witness.records.step_records import Environment, StepRecord, WitnessRecord

BEFORE = Environment(2, 7, "Net", True, 1e-4, {}, {})
RECORD = WitnessRecord("0123456789abcde", 8, BEFORE, (StepRecord(9), StepRecord(10)))
FOUND = Divergence("schedule", 9, "optim.lr", "optim.lr is 1", "Put it into the state", (0,))
NEW = start_resume(RECORD, resume_id="0mwtgz5lmk45jxm", began_at=5.0, ranks=2)


def test_a_resume_is_proven_after_the_last_recorded_step() -> None:
    one = add_compared_step(NEW, BEFORE, BEFORE, None)
    assert (NEW.verdict, one.verdict, one.compared) == ("unproven", "unproven", 1)
    both = add_compared_step(one, BEFORE, BEFORE, None)
    assert (both.verdict, both.has_equal_layout, both.is_deterministic) == ("proven", True, True)


def test_the_first_divergence_stays_and_later_steps_do_not_count() -> None:
    found = add_compared_step(NEW, BEFORE, replace(BEFORE, world=3), FOUND)
    later = add_compared_step(found, BEFORE, BEFORE, replace(FOUND, name="later"))
    assert (found.verdict, found.has_equal_layout, later.divergence, later.compared) == ("diverged", False, FOUND, 0)
    assert add_compared_step(found, BEFORE, BEFORE, None).verdict == "diverged"


def test_long_names_and_many_ranks_are_shortened() -> None:
    long = replace(FOUND, name="x" * 10_000, sentence="y" * 10_000, ranks=tuple(range(5_000)))
    found = add_compared_step(NEW, BEFORE, replace(BEFORE, style="z" * 10_000), long)
    assert len(repr(found)) < 5_000


def test_a_resume_without_a_recorded_step_is_not_proven() -> None:
    assert replace(NEW, steps=()).verdict == "unproven"


def test_merged_resumes_are_in_order_each_once_and_the_newest_are_kept() -> None:
    many = [replace(NEW, id=f"{at:015}", began_at=float(at)) for at in range(MAX_RESUMES + 6)]
    newer = replace(many[-1], compared=2)
    merged = merge_resumes(reversed(many), [newer])
    assert (len(merged), merged[0], merged[-1]) == (MAX_RESUMES, many[6], newer)


def test_the_verdict_on_a_step_is_that_of_its_last_resume_that_was_compared() -> None:
    proven, diverged = replace(NEW, compared=2), replace(NEW, divergence=FOUND)
    assert find_verdict([]) == find_verdict([NEW]) == "unproven"
    assert find_verdict([proven, diverged, NEW]) == "diverged"
    assert find_verdict([diverged, proven]) == "proven"
