"""Verdicts, statistics and comparisons that tasks compute: equal to those of one process."""

from __future__ import annotations

import json
import random
import shutil
from contextlib import suppress
from pathlib import Path

import pytest
import torch

import shardckpt
from shardckpt.errors import FormatError, MissingFileError, StorageError, TargetExistsError, UsageError
from shardckpt.native.run_directory import step_name
from shardckpt.offline.tasks.part_results import PartResults
from shardckpt.offline.tasks.task_plan import WorkPart, read_plan
from tests.kit.stores.bucket import Bucket


def state(scale: float) -> dict[str, object]:
    generator = torch.Generator().manual_seed(7)
    model = {f"layers.{at}.w": scale * torch.randn(20, 30, generator=generator) for at in range(6)}
    return {"model": {**model, "nan": torch.tensor([float("nan"), scale])}, "epoch": int(scale)}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps 1 and 2 of a run, whose tensors differ."""
    root = tmp_path_factory.mktemp("source") / "run"
    ck = shardckpt.Checkpointer(root)
    for number in (1, 2):
        ck.save(number, state(float(number)))
    return root


@pytest.fixture
def damaged(run: Path, tmp_path: Path) -> Path:
    """A step of several files, of which two have a wrong bit."""
    shardckpt.reshard(run / step_name(1), tmp_path / "damaged", world_size=4)
    for file in sorted((tmp_path / "damaged").glob("*.safetensors"))[1:3]:
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
    return tmp_path / "damaged"


def run_plan(plan: Path, seed: int = 0) -> object:
    numbers = [*range(shardckpt.read_plan_status(plan).task_count)]
    random.Random(seed).shuffle(numbers)
    for number in numbers:
        shardckpt.run_task(plan, number)
    return shardckpt.commit_plan(plan)


@pytest.mark.parametrize("tasks", [0, 2])
@pytest.mark.parametrize("verb", ["verify", "stats", "history", "diff", "verify a range"])
def test_tasks_return_what_one_process_returns(verb, tasks, run, tmp_path):
    steps = [run / step_name(number) for number in (1, 2)]
    sources = {"verify": steps[:1], "stats": steps[:1], "diff": steps}.get(verb, [f"{run}@1..2"])
    verb = verb.partition(" ")[0]
    shardckpt.plan_tasks(tmp_path / "p", verb, *sources, tasks=tasks)
    assert repr(run_plan(tmp_path / "p")) == repr(getattr(shardckpt, verb)(*sources))
    assert [path.name for path in tmp_path.iterdir()] == ["p"]


def test_a_verdict_names_all_damaged_files(damaged, tmp_path):
    status = shardckpt.plan_tasks(tmp_path / "p", "verify", damaged)
    assert status.task_count == 4
    found = run_plan(tmp_path / "p")
    assert found == shardckpt.verify(damaged)
    assert len({problem.file for problem in found.problems}) == 2


def test_options_reach_the_tasks(run, tmp_path):
    step = run / step_name(1)
    shardckpt.plan_tasks(tmp_path / "p", "stats", step, include=["*.0.w", "nan"])
    assert [tensor.name for tensor in run_plan(tmp_path / "p").tensors] == ["layers.0.w", "nan"]
    steps = [run / step_name(number) for number in (1, 2)]
    shardckpt.plan_tasks(tmp_path / "q", "diff", *steps, atol=100.0, html=tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()
    assert run_plan(tmp_path / "q").differences == ()
    assert (tmp_path / "page.html").exists()


def test_what_is_computed_is_not_computed_again(run, tmp_path, monkeypatch):
    shardckpt.plan_tasks(tmp_path / "p", "stats", run / step_name(1), tasks=2)
    shardckpt.run_task(tmp_path / "p", 0)
    status = shardckpt.run_task(tmp_path / "p", share="1/1")
    assert len(status.done) + len(status.skipped) == 7 and len(status.skipped) in (3, 4)


def test_a_source_that_changed_is_refused(damaged, tmp_path):
    shardckpt.plan_tasks(tmp_path / "p", "verify", damaged)
    for number in range(4):
        shardckpt.run_task(tmp_path / "p", number)
    file = next(damaged.glob("*.safetensors"))
    file.write_bytes(file.read_bytes())
    with pytest.raises(UsageError, match="changed since the plan was made"):
        shardckpt.commit_plan(tmp_path / "p")
    next((Path(read_plan(tmp_path / "p").folder) / "results").iterdir()).unlink()
    with pytest.raises(UsageError, match="changed since the plan was made"):
        shardckpt.run_task(tmp_path / "p", share="1/1")


def test_a_step_of_a_range_that_changed_is_refused(run, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    shardckpt.plan_tasks(tmp_path / "p", "verify", f"{tmp_path}/run@1..2")
    file = next((tmp_path / "run" / step_name(2)).glob("*.safetensors"))
    file.write_bytes(file.read_bytes())
    with pytest.raises(UsageError, match="changed since the plan was made"):
        shardckpt.run_task(tmp_path / "p", 0)


def test_values_of_another_form_are_refused(run, tmp_path):
    shardckpt.plan_tasks(tmp_path / "p", "stats", run / step_name(1), tasks=1)
    shardckpt.run_task(tmp_path / "p", 0)
    plan = read_plan(tmp_path / "p")
    results, result = PartResults(plan), min((Path(plan.folder) / "results").iterdir())
    damaged = result.read_text().replace(".w", ".v")
    for values in ([{"name": 3}], ["x"], [None], [], [{}, {}]):
        for part in plan.tasks[0]:
            results.write(part, {"values": values})
        with pytest.raises(FormatError):
            shardckpt.commit_plan(tmp_path / "p")
    for text in (
        "",
        "[]",
        damaged,
        '{"plan": 1}',
        *(json.dumps({"plan": plan.id, "result": r}) for r in ([], {"x": 1})),
    ):
        result.write_text(text)
        with pytest.raises(UsageError, match=r"1 of 1 task has not ended.*Run this task, "):
            shardckpt.commit_plan(tmp_path / "p")


def test_a_discarded_plan_leaves_nothing(run, tmp_path):
    shardckpt.plan_tasks(tmp_path / "p", "stats", run / step_name(1), tasks=1)
    shardckpt.run_task(tmp_path / "p", 0)
    with pytest.raises(TargetExistsError):
        shardckpt.plan_tasks(tmp_path / "p", "stats", run / step_name(1))
    shardckpt.discard_plan(tmp_path / "p")
    assert [path.name for path in tmp_path.iterdir()] == ["p"]


def test_a_step_that_is_removed_meanwhile_is_a_warning(run, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    shardckpt.plan_tasks(tmp_path / "p", "history", tmp_path / "run", tasks=1)
    found = run_plan(tmp_path / "p")
    assert [step.number for step in found.steps] == [1, 2] and found.warnings == ()


def read_files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_a_run_is_copied_by_tasks_without_steps_that_are_saved_meanwhile(run, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    status = shardckpt.plan_tasks(tmp_path / "p", "copy", tmp_path / "run", tmp_path / "copy")
    shardckpt.Checkpointer(tmp_path / "run").save(3, state(3.0))
    assert status.task_count == 2
    found = run_plan(tmp_path / "p", seed=1)
    assert found.copied == (step_name(1), step_name(2)) and found.present == ()
    expected = {name: data for name, data in read_files(run).items() if name.startswith("step-")}
    assert {name: data for name, data in read_files(tmp_path / "copy").items() if name.startswith("step-")} == expected


def test_steps_that_refer_to_each_other_are_one_part_of_a_copy(tmp_path):
    ck = shardckpt.Checkpointer(tmp_path / "run", dedup=True)
    for number in (1, 2, 3):
        ck.save(number, {"big": torch.ones(3_000_000), "small": torch.full((9,), float(number))})
    shardckpt.save({"w": torch.ones(2)}, tmp_path / "run" / step_name(4))
    status = shardckpt.plan_tasks(tmp_path / "p", "copy", tmp_path / "run", tmp_path / "copy")
    assert status.task_count == 2
    run_plan(tmp_path / "p")
    assert all(shardckpt.verify(tmp_path / "copy" / step_name(number)).ok for number in (1, 2, 3, 4))


def test_a_copied_step_that_was_removed_before_the_commit_is_an_error(run, tmp_path):
    shardckpt.plan_tasks(tmp_path / "p", "copy", run, tmp_path / "copy")
    for number in range(2):
        shardckpt.run_task(tmp_path / "p", number)
    shutil.rmtree(tmp_path / "copy" / step_name(1))
    with pytest.raises(MissingFileError, match="a copied step was removed meanwhile"):
        shardckpt.commit_plan(tmp_path / "p")


@pytest.mark.parametrize("where", ["disk", "store"])
def test_a_discard_removes_the_steps_that_tasks_copied_and_no_other(where, bucket, run, tmp_path):
    copied = f"{bucket}/copy" if where == "store" else str(tmp_path / "copy")
    shardckpt.copy(f"{run}@2..2", copied)
    before = (read_files(tmp_path), dict(Bucket.objects))
    shardckpt.plan_tasks(tmp_path / "p", "copy", run, copied)
    shardckpt.run_task(tmp_path / "p", share="1/1")
    assert [step.number for step in shardckpt.ls(copied).complete] == [1, 2]
    shardckpt.discard_plan(tmp_path / "p")
    (tmp_path / "p").unlink()
    assert (read_files(tmp_path), dict(Bucket.objects)) == before


def test_a_discard_keeps_a_step_that_another_save_wrote_since(run, tmp_path):
    copied = tmp_path / "copy"
    shardckpt.plan_tasks(tmp_path / "p", "copy", run, copied)
    shardckpt.run_task(tmp_path / "p", share="1/1")
    shardckpt.save(state(3.0), copied / step_name(1), overwrite=True)
    shardckpt.discard_plan(tmp_path / "p")
    assert [step.number for step in shardckpt.ls(copied).complete] == [1]
    assert shardckpt.verify(copied / step_name(1)).ok


def test_a_discard_keeps_files_that_a_later_step_refers_to(tmp_path):
    for name in ("run", "copy"):
        (tmp_path / name).mkdir()
    shardckpt.save({"big": torch.ones(3_000_000)}, tmp_path / "run" / step_name(1))
    shardckpt.plan_tasks(tmp_path / "p", "copy", tmp_path / "run", tmp_path / "copy")
    shardckpt.run_task(tmp_path / "p", 0)
    ck = shardckpt.Checkpointer(tmp_path / "copy", dedup=True)
    ck.save(2, {"big": torch.ones(3_000_000)})
    shardckpt.discard_plan(tmp_path / "p")
    assert [step.number for step in shardckpt.ls(tmp_path / "copy").complete] == [2]
    assert shardckpt.verify(tmp_path / "copy" / step_name(2)).ok


def test_a_copy_that_ends_after_its_plan_was_discarded_is_removed(run, tmp_path, monkeypatch):
    shardckpt.plan_tasks(tmp_path / "p", "copy", run, tmp_path / "copy")
    write = PartResults.write

    def write_late(results: PartResults, part: WorkPart, result: dict[str, object]) -> None:
        monkeypatch.undo()
        shardckpt.discard_plan(tmp_path / "p")
        write(results, part, result)

    monkeypatch.setattr(PartResults, "write", write_late)
    with pytest.raises(StorageError, match="the folder of this plan is not here"):
        shardckpt.run_task(tmp_path / "p", 0)
    assert list(read_files(tmp_path)) == ["p"]


class Killed(BaseException):
    """The task is gone."""


@pytest.mark.parametrize("repeat", [False, True])
@pytest.mark.parametrize("where", ["disk", "store"])
def test_a_discard_removes_a_copy_whose_task_was_killed_before_its_result(where, repeat, bucket, run, tmp_path):
    copied = f"{bucket}/copy" if where == "store" else str(tmp_path / "copy")
    shardckpt.plan_tasks(tmp_path / "p", "copy", run, copied)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        patch.setattr(PartResults, "write", lambda *_: (_ for _ in ()).throw(Killed))
        shardckpt.run_task(tmp_path / "p", 0)
    assert [step.number for step in shardckpt.ls(copied).complete] == [1]
    if repeat:
        shardckpt.run_task(tmp_path / "p", share="1/1")
    shardckpt.discard_plan(tmp_path / "p")
    assert [*read_files(tmp_path)] == ["p"] and not Bucket.objects


def test_a_repeated_task_says_what_a_killed_one_copied(run, tmp_path):
    shardckpt.plan_tasks(tmp_path / "p", "copy", run, tmp_path / "copy")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        patch.setattr(PartResults, "write", lambda *_: (_ for _ in ()).throw(Killed))
        shardckpt.run_task(tmp_path / "p", 0)
    found = run_plan(tmp_path / "p")
    assert found.copied == (step_name(1), step_name(2)) and found.present == ()


@pytest.mark.parametrize("has_result", [False, True])
def test_a_discard_keeps_the_same_step_if_another_process_copied_it(has_result, run, tmp_path):
    """The task, or somebody, removed what it had copied, or it was killed before that was published."""
    step = tmp_path / "copy" / step_name(1)
    shardckpt.plan_tasks(tmp_path / "p", "copy", run, tmp_path / "copy")
    with pytest.MonkeyPatch.context() as patch, suppress(Killed):
        if not has_result:
            patch.setattr(PartResults, "write", lambda *_: (_ for _ in ()).throw(Killed))
        shardckpt.run_task(tmp_path / "p", 0)
    shutil.rmtree(step)
    shardckpt.copy(run / step_name(1), step)
    if not has_result:
        shardckpt.run_task(tmp_path / "p", share="1/1")
    shardckpt.discard_plan(tmp_path / "p")
    assert [each.number for each in shardckpt.ls(tmp_path / "copy").complete] == [1]
    assert shardckpt.verify(step).ok
