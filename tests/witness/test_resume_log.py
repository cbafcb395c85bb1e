"""A resume leaves its verdict beside the step, from the restore on, and in an event."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import shardckpt
from shardckpt.native.run_directory import resumes_name, step_name, witness_name
from shardckpt.results import Proof, StepProof
from tests.kit.ranks.harness import run
from tests.kit.runs.faults import SAVED_AT, STEPS, Job


def job(root: Path, seed: int = 1, *, style: str = "plain", rank: int = 0, world: int = 1, **options: Any) -> Job:
    made = Job(style, rank, world, seed, root)
    made.checkpointer = shardckpt.Checkpointer(root, witness=shardckpt.Witness(), **options)
    return made


def resume(root: Path, steps: int = STEPS, *, is_faulty: bool = False, **options: Any) -> None:
    made = job(root, 2, **options)
    made.restore()
    if is_faulty:
        torch.manual_seed(9)
    made.train(steps)


def find_step(proof: Proof, number: int = SAVED_AT) -> StepProof:
    return next(step for step in proof.steps if step.number == number)


def test_each_resume_of_a_step_has_its_verdict(tmp_path: Path) -> None:
    made = job(tmp_path)
    made.train(SAVED_AT - 1, SAVED_AT - 1)
    made.train(STEPS, SAVED_AT)
    assert [step.verdict for step in shardckpt.prove(tmp_path).steps] == ["unproven", "unproven"]
    resume(tmp_path)
    with pytest.raises(shardckpt.errors.ResumeDivergence):
        resume(tmp_path, is_faulty=True)
    resume(tmp_path, SAVED_AT + 1)
    resume(tmp_path, SAVED_AT)
    found = find_step(shardckpt.prove(tmp_path))
    assert [(each.verdict, each.compared) for each in found.resumes] == [
        ("proven", 2),
        ("diverged", 0),
        ("unproven", 1),
        ("unproven", 0),
    ]
    assert (found.verdict, found.recorded, found.rank_count, found.style) == ("diverged", (4, 5), 1, "Net")
    assert found.resumes[1].divergence is not None
    assert found.resumes[1].divergence.cause == "random state"
    assert not shardckpt.prove(tmp_path).ok
    resume(tmp_path)
    assert shardckpt.prove(tmp_path).ok


def test_a_verdict_is_an_event(tmp_path: Path) -> None:
    job(tmp_path).train(STEPS, SAVED_AT)
    seen: list[shardckpt.events.OperationEvent] = []
    resume(tmp_path, on_event=seen.append)
    with pytest.raises(shardckpt.errors.ResumeDivergence):
        resume(tmp_path, is_faulty=True, on_event=seen.append)
    proven, diverged = (event for event in seen if isinstance(event, shardckpt.events.ResumeEvent))
    assert (proven.verdict, proven.compared, proven.error, proven.step) == ("proven", 2, None, SAVED_AT)
    assert (diverged.verdict, diverged.cause, diverged.name) == ("diverged", "random state", "torch")
    assert isinstance(diverged.error, shardckpt.errors.ResumeDivergence)
    assert json.loads(json.dumps(diverged.as_dict()))["operation"] == "resume"


def test_a_run_without_a_record_leaves_no_verdict(tmp_path: Path) -> None:
    made = job(tmp_path)
    made.checkpointer = shardckpt.Checkpointer(tmp_path)
    made.train(STEPS, SAVED_AT)
    resume(tmp_path)
    assert [step.verdict for step in shardckpt.prove(tmp_path).steps] == ["no record"]
    assert not (tmp_path / resumes_name(step_name(SAVED_AT))).exists()


def test_verdicts_are_copied_with_their_step_and_outlive_it(tmp_path: Path) -> None:
    job(tmp_path / "a").train(STEPS, SAVED_AT)
    resume(tmp_path / "a")
    shardckpt.copy(tmp_path / "a", tmp_path / "b")
    assert shardckpt.prove(tmp_path / "b").steps[0].verdict == "proven"
    made = job(tmp_path / "b", 2, keep_last=1)
    made.restore()
    made.train(STEPS + 1, STEPS + 1)
    assert [path.name for path in (tmp_path / "b").iterdir() if path.is_file()] == [resumes_name(step_name(SAVED_AT))]
    (removed,) = shardckpt.prove(tmp_path / "b").removed
    assert (removed.number, removed.verdict, len(removed.resumes)) == (SAVED_AT, "proven", 2)


def test_a_verdict_that_cannot_be_stored_is_a_warning(tmp_path: Path) -> None:
    job(tmp_path).train(STEPS, SAVED_AT)
    (tmp_path / resumes_name(step_name(SAVED_AT))).write_bytes(b"{}\nnone\n")
    with pytest.warns(UserWarning, match="verdict on the resume of step-00000003 could not be stored"):
        resume(tmp_path)
    proof = shardckpt.prove(tmp_path)
    assert (proof.steps[0].verdict, len(proof.warnings)) == ("unproven", 1)
    (tmp_path / witness_name(step_name(SAVED_AT))).write_bytes(b"?")
    assert len(shardckpt.prove(tmp_path).warnings) == 2


def test_the_verdict_on_other_ranks_names_both_topologies(tmp_path: Path) -> None:
    def body(rank: int, world: int) -> None:
        made = job(tmp_path, 2, style="fully_shard", rank=rank, world=world)
        made.model.eval()
        made.restore()
        made.data.rank, made.data.world = rank, world
        made.train()

    first = job(tmp_path)
    first.model.eval()
    first.train(STEPS, SAVED_AT)
    run(2, body)
    (found,) = shardckpt.prove(tmp_path).steps[0].resumes
    assert (found.verdict, found.rank_count_before, found.rank_count, found.has_equal_layout) == ("proven", 1, 2, False)
    assert found.style_before != found.style
