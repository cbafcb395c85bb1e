"""Checkpoints that tasks write: the same bytes as one process, whatever is killed, repeated or reordered."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch

import shardckpt
from shardckpt.errors import FormatError, StorageError, TargetExistsError, UsageError
from shardckpt.offline.tasks.part_results import PartResults
from shardckpt.offline.tasks.task_plan import WorkPart, read_plan
from tests.kit.ranks.forks import is_killed
from tests.kit.stores.bucket import Bucket, Dead, broken_at
from tests.kit.stores.disk import watched

SMALL = 7_000
"""Bytes of tensor data for each file."""


@pytest.fixture(scope="module")
def step(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A step of a model with an optimizer."""
    model = torch.nn.Sequential(*(torch.nn.Linear(40, 40) for _ in range(6)))
    optim = torch.optim.AdamW(model.parameters())
    model(torch.ones(40)).sum().backward()
    optim.step()
    path = tmp_path_factory.mktemp("source") / "step"
    shardckpt.save({"model": model, "optim": optim}, path)
    return path


def read_files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def run_all(plan: Path | str, seed: int = 0) -> None:
    numbers = [*range(shardckpt.read_plan_status(plan).task_count)]
    random.Random(seed).shuffle(numbers)
    for number in numbers:
        shardckpt.run_task(plan, number)


CALLS = {
    "consolidate": {"max_shard_size": SMALL, "part": "all"},
    "cast": {"max_shard_size": SMALL, "dtype": "bf16"},
    "torch": {"to": "torch", "max_shard_size": SMALL},
    "dcp": {"to": "dcp", "max_shard_size": SMALL, "part": "all"},
    "convert": {"part": "all"},
    "rekey": {"to": "ids", "max_shard_size": SMALL},
}


@pytest.mark.parametrize("name", CALLS)
def test_tasks_in_any_order_write_what_one_process_writes(name, step, tmp_path):
    verb = name if name in ("convert", "rekey") else "consolidate"
    getattr(shardckpt, verb)(step, tmp_path / "one", **CALLS[name])
    shardckpt.plan_tasks(tmp_path / "plan.json", verb, step, tmp_path / "many", **CALLS[name])
    run_all(tmp_path / "plan.json")
    report = shardckpt.commit_plan(tmp_path / "plan.json")
    assert read_files(tmp_path / "many") == read_files(tmp_path / "one")
    assert report.target == str(tmp_path / "many") and report.files
    assert sorted(os.listdir(tmp_path)) == ["many", "one", "plan.json"], "no folder of the plan is left"


def test_a_resharded_step_of_tasks_is_complete_and_equal(step, tmp_path):
    status = shardckpt.plan_tasks(tmp_path / "plan.json", "reshard", step, tmp_path / "many", world_size=5, tasks=3)
    assert status.task_count == 3
    run_all(tmp_path / "plan.json")
    shardckpt.commit_plan(tmp_path / "plan.json")
    verified = shardckpt.verify(tmp_path / "many")
    assert verified.ok and "checksums" in verified.checks
    assert shardckpt.diff(step, tmp_path / "many").same


def test_an_adapter_is_merged_by_tasks(fixtures, tmp_path):
    base, adapter = fixtures / "peft_lora_llama" / "base", fixtures / "peft_lora_llama" / "ckpt"
    shardckpt.merge_adapter(base, adapter, tmp_path / "one", max_shard_size=SMALL)
    shardckpt.plan_tasks(tmp_path / "p", "merge_adapter", base, adapter, tmp_path / "many", max_shard_size=SMALL)
    run_all(tmp_path / "p")
    shardckpt.commit_plan(tmp_path / "p")
    assert read_files(tmp_path / "many") == read_files(tmp_path / "one")


def test_one_file_on_a_disk_is_one_task(step, tmp_path):
    shardckpt.consolidate(step, tmp_path / "one.safetensors")
    status = shardckpt.plan_tasks(tmp_path / "p", "consolidate", step, tmp_path / "many.safetensors", tasks=8)
    assert status.task_count == 1
    run_all(tmp_path / "p")
    shardckpt.commit_plan(tmp_path / "p")
    assert (tmp_path / "many.safetensors").read_bytes() == (tmp_path / "one.safetensors").read_bytes()


def test_a_second_run_skips_what_is_done_and_repeats_what_was_lost(step, tmp_path):
    plan = tmp_path / "plan.json"
    shardckpt.plan_tasks(plan, "consolidate", step, tmp_path / "many", max_shard_size=SMALL, tasks=2)
    first = shardckpt.run_task(plan, 0)
    again = shardckpt.run_task(plan, 0)
    assert (again.done, set(again.skipped)) == ((), set(first.done))
    staging = Path(read_plan(plan).staging)
    (staging / first.done[0]).unlink()
    (staging / first.done[1]).write_bytes(b"0" * (staging / first.done[1]).stat().st_size)
    assert set(shardckpt.run_task(plan, 0).done) == {*first.done[:2]}
    assert set(shardckpt.run_task(plan, share="1/1").skipped) == {*first.done}


def test_a_commit_without_all_tasks_names_them_and_writes_nothing(step, tmp_path):
    plan = tmp_path / "plan.json"
    status = shardckpt.plan_tasks(plan, "consolidate", step, tmp_path / "many", max_shard_size=SMALL)
    assert status.task_count >= 3
    shardckpt.run_task(plan, 1)
    many = status.task_count - 1
    with pytest.raises(UsageError, match=rf"{many} of {many + 1} tasks have .* from 0,2-{many}\. Run these tasks, "):
        shardckpt.commit_plan(plan)
    assert not (tmp_path / "many").exists()
    assert shardckpt.read_plan_status(plan).missing == (0, *range(2, status.task_count))


@contextmanager
def killed_at(change: int) -> Iterator[None]:
    """Kill this process before a change of the disk."""
    left = [change]

    def before(_name: str, _args: tuple) -> None:
        left[0] -= 1
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)

    with watched(before, lambda *_: None):
        yield


@pytest.mark.parametrize("overwrite", [False, True])
def test_tasks_and_commit_killed_at_any_change_of_a_disk_can_be_repeated(overwrite, step, tmp_path):
    shardckpt.consolidate(step, tmp_path / "one", max_shard_size=2 * SMALL)
    target, plan, kills = tmp_path / "many", tmp_path / "plan.json", 0
    for change in range(1, 500):
        shutil.rmtree(target, ignore_errors=True)
        if overwrite:
            shardckpt.consolidate(step, target, dtype="bf16")
        old = read_files(target) if overwrite else None
        plan.unlink(missing_ok=True)
        arguments = {"max_shard_size": 2 * SMALL, "overwrite": overwrite}
        shardckpt.plan_tasks(plan, "consolidate", step, target, tasks=2, **arguments)

        def work(change: int = change) -> None:
            with killed_at(change):
                run_all(plan)
                shardckpt.commit_plan(plan)

        was_killed = is_killed(work)
        kills += was_killed
        found = read_files(target) if target.exists() else None
        assert found in (old, read_files(tmp_path / "one")), f"change {change}"
        if found == old:
            run_all(plan)
            shardckpt.commit_plan(plan)
        assert read_files(target) == read_files(tmp_path / "one"), f"change {change}"
        if not was_killed:
            break
    print(f"killed at each of {kills} changes")
    assert kills > 20


@pytest.mark.parametrize("overwrite", [False, True])
def test_tasks_and_commit_killed_at_any_request_of_a_store_can_be_repeated(overwrite, bucket, step, tmp_path):
    shardckpt.consolidate(step, tmp_path / "one", max_shard_size=2 * SMALL)
    expected = sorted(path.read_bytes() for path in (tmp_path / "one").glob("*.safetensors"))
    plan = tmp_path / "plan.json"
    for request in range(1, 200):
        Bucket.reset()
        if overwrite:
            shardckpt.consolidate(step, f"{bucket}/many", dtype="bf16")
        plan.unlink(missing_ok=True)
        arguments = {"max_shard_size": 2 * SMALL, "overwrite": overwrite}
        shardckpt.plan_tasks(plan, "consolidate", step, f"{bucket}/many", tasks=2, **arguments)
        with broken_at(request, "killed"), suppress(Dead):
            run_all(plan)
            shardckpt.commit_plan(plan)
        is_over = len(Bucket.requests) < request
        with suppress(StorageError, TargetExistsError):  # it may have ended
            run_all(plan)
            shardckpt.commit_plan(plan)
        assert shardckpt.diff(tmp_path / "one", f"{bucket}/many").same, f"request {request}"
        if not overwrite:
            stored = {n: d for n, d in Bucket.objects.items() if n.startswith("b/many/")}
            assert {n for n in stored if not n.endswith(".safetensors")} == {"b/many/model.safetensors.index.json"}
            assert sorted(d for n, d in stored.items() if n.endswith(".safetensors")) == expected, f"request {request}"
        if is_over:
            break
    assert request > 10


def test_a_task_writes_nothing_if_the_source_has_changed(step, tmp_path):
    source, plan = tmp_path / "source", tmp_path / "plan.json"
    shutil.copytree(step, source)
    shardckpt.plan_tasks(plan, "consolidate", source, tmp_path / "many", max_shard_size=SMALL)
    shardckpt.run_task(plan, 0)
    for payload in source.glob("*.safetensors"):  # a task looks at the files that it reads
        payload.write_bytes(payload.read_bytes())
    for act in (lambda: shardckpt.run_task(plan, 1), lambda: shardckpt.commit_plan(plan)):
        with pytest.raises(UsageError, match=r"changed since the plan was made|ha(s|ve) not ended"):
            act()
    assert not (tmp_path / "many").exists()


def test_another_file_that_the_plan_reads_may_not_change_either(step, tmp_path):
    config = tmp_path / "config"
    config.mkdir()
    (config / "config.json").write_text('{"model_type": "llama"}')
    plan = tmp_path / "plan.json"
    shardckpt.plan_tasks(plan, "consolidate", step, tmp_path / "many", config_from=config)
    (config / "config.json").write_text('{"model_type": "gemma"}')
    with pytest.raises(UsageError, match="changed since the plan was made"):
        shardckpt.run_task(plan, 0)


def test_the_newest_step_is_the_one_at_the_time_of_the_plan(tmp_path):
    ck = shardckpt.Checkpointer(tmp_path / "run")
    ck.save(1, {"model": {"w": torch.ones(3)}})
    shardckpt.plan_tasks(tmp_path / "p", "consolidate", f"{tmp_path}/run@latest", tmp_path / "many")
    ck.save(2, {"model": {"w": torch.zeros(3)}})
    run_all(tmp_path / "p")
    shardckpt.commit_plan(tmp_path / "p")
    with shardckpt.open(tmp_path / "many") as opened:
        assert opened["w"][:].tolist() == [1.0] * 3


def test_two_plans_for_one_folder_of_a_store_have_files_of_their_own(bucket, step, tmp_path):
    """A commit is refused while the target has files of another plan, here of the same sizes."""
    plans = {dtype: tmp_path / dtype for dtype in ("bf16", "fp16")}
    for dtype, plan in plans.items():
        shardckpt.plan_tasks(plan, "consolidate", step, f"{bucket}/many", max_shard_size=SMALL, dtype=dtype)
    for plan in plans.values():
        run_all(plan)
    for plan in plans.values():
        with pytest.raises(TargetExistsError, match=r"the target holds files.* discard one of them") as refused:
            shardckpt.commit_plan(plan)
        assert "overwrite" not in str(refused.value), "a commit takes no such option"
    shardckpt.discard_plan(plans["bf16"])
    shardckpt.commit_plan(plans["fp16"])
    shardckpt.consolidate(step, tmp_path / "one", dtype="fp16")
    assert shardckpt.diff(tmp_path / "one", f"{bucket}/many").same


@pytest.mark.parametrize("ending", ["discarded", "being discarded", "committed", "another published"])
def test_a_task_that_ends_after_its_plan_leaves_what_was_published(ending, bucket, step, tmp_path, monkeypatch):
    """A task that is very slow: meanwhile another process ran it again, and ended the plan."""
    plan = tmp_path / "plan.json"
    shardckpt.plan_tasks(plan, "consolidate", step, f"{bucket}/many")
    write, stored = PartResults.write, read_plan(plan)

    def end_first(results: PartResults, part: WorkPart, result: dict[str, str]) -> None:
        monkeypatch.undo()
        if ending == "committed":
            shardckpt.run_task(plan, 0)
            shardckpt.commit_plan(plan)
        elif ending == "being discarded":
            PartResults(stored).mark_discard()
        else:
            written = dict(Bucket.objects)
            shardckpt.discard_plan(plan)
            if ending == "another published":
                shardckpt.consolidate(step, f"{bucket}/many", dtype="bf16")
            Bucket.objects.update({name: data for name, data in written.items() if name.startswith("b/many/")})
        write(results, part, result)

    monkeypatch.setattr(PartResults, "write", end_first)
    with pytest.raises(StorageError, match="the folder of this plan is not here"):
        shardckpt.run_task(plan, 0)
    if ending == "being discarded":
        assert not [name for name in Bucket.objects if name.startswith("b/many/")]
        shardckpt.discard_plan(plan)
    if ending.endswith("discarded"):
        assert not Bucket.objects
    else:
        shardckpt.consolidate(step, tmp_path / "one", dtype="bf16" if ending == "another published" else "")
        assert shardckpt.diff(tmp_path / "one", f"{bucket}/many").same
        assert not [name for name in Bucket.objects if "tasks-" in name]


def test_a_commit_and_a_discard_at_once_lose_nothing(bucket, step, tmp_path, monkeypatch):
    plan = tmp_path / "plan.json"
    shardckpt.plan_tasks(plan, "consolidate", step, f"{bucket}/many")
    run_all(plan)
    mark = PartResults.mark_commit

    def mark_late(results: PartResults) -> None:
        monkeypatch.undo()
        results.mark_discard()
        mark(results)

    monkeypatch.setattr(PartResults, "mark_commit", mark_late)
    with pytest.raises(StorageError, match="a plan that was discarded"):
        shardckpt.commit_plan(plan)
    assert not [name for name in Bucket.objects if name.endswith("index.json")]


def test_a_discard_that_is_killed_can_be_repeated(bucket, step, tmp_path):
    plan = tmp_path / "plan.json"
    for request in range(1, 100):
        Bucket.reset()
        plan.unlink(missing_ok=True)
        shardckpt.plan_tasks(plan, "consolidate", step, f"{bucket}/many", max_shard_size=SMALL)
        run_all(plan)
        with broken_at(request, "killed"), suppress(Dead):
            shardckpt.discard_plan(plan)
        is_over = len(Bucket.requests) < request
        with suppress(StorageError):  # it may have ended
            shardckpt.discard_plan(plan)
        assert not [name for name in Bucket.objects if name.startswith("b/many/")], f"request {request}"
        if is_over:
            break
    assert request > 5


def test_a_commit_takes_no_file_that_changed_after_its_task(step, tmp_path):
    plan = tmp_path / "plan.json"
    shardckpt.plan_tasks(plan, "consolidate", step, tmp_path / "many")
    (name,) = shardckpt.run_task(plan, 0).done
    file = Path(read_plan(plan).staging) / name
    file.write_bytes(b"0" * file.stat().st_size)
    with pytest.raises(UsageError, match="results from 0"):
        shardckpt.commit_plan(plan)
    run_all(plan)
    shardckpt.commit_plan(plan)
    assert shardckpt.verify(tmp_path / "many").ok


@pytest.mark.parametrize("hashes", [None, 5, "zz", "a", "AA BB"])
def test_a_result_of_another_form_is_made_again(hashes, step, tmp_path):
    plan = tmp_path / "plan.json"
    shardckpt.plan_tasks(plan, "consolidate", step, tmp_path / "many")
    run_all(plan)
    stored = read_plan(plan)
    results, (part,) = PartResults(stored), stored.tasks[0]
    results.write(part, {"version": results.read(part)["version"], "hashes": hashes})
    with pytest.raises(UsageError, match="results from 0"):
        shardckpt.commit_plan(plan)
    assert shardckpt.run_task(plan, 0).done == (part.name,)
    shardckpt.commit_plan(plan)


def test_a_result_with_other_hashes_is_made_again(step, tmp_path):
    plan = tmp_path / "plan.json"
    shardckpt.plan_tasks(plan, "reshard", step, tmp_path / "many", world_size=2)
    run_all(plan)
    result = min((Path(read_plan(plan).folder) / "results").iterdir())
    content = json.loads(result.read_bytes())
    digits = content["result"]["hashes"]
    content["result"]["hashes"] = digits[::-1]
    result.write_text(json.dumps(content))
    with pytest.raises(UsageError, match="results from 0"):
        shardckpt.commit_plan(plan)
    run_all(plan)
    shardckpt.commit_plan(plan)
    assert shardckpt.verify(tmp_path / "many").ok


def test_a_step_is_not_published_without_the_hashes_of_its_files(step, tmp_path):
    plan = tmp_path / "plan.json"
    shardckpt.plan_tasks(plan, "reshard", step, tmp_path / "many", world_size=2)
    run_all(plan)
    stored = read_plan(plan)
    results, (part,) = PartResults(stored), stored.tasks[0]
    results.write(part, {"version": results.read(part)["version"], "hashes": ""})
    with pytest.raises(FormatError, match="hashes that do not fit"):
        shardckpt.commit_plan(plan)
    assert not (tmp_path / "many").exists()


def test_the_second_of_two_commits_is_refused(step, tmp_path):
    plan = tmp_path / "plan.json"
    shardckpt.plan_tasks(plan, "consolidate", step, tmp_path / "many")
    run_all(plan)
    shardckpt.commit_plan(plan)
    for act in (shardckpt.commit_plan, shardckpt.read_plan_status, lambda p: shardckpt.run_task(p, 0)):
        with pytest.raises(StorageError, match="the folder of this plan is not here"):
            act(plan)
    assert not list(tmp_path.glob(".many.*"))


def test_a_target_that_appears_before_the_commit_stays(step, tmp_path):
    plan = tmp_path / "plan.json"
    shardckpt.plan_tasks(plan, "consolidate", step, tmp_path / "many")
    run_all(plan)
    shardckpt.consolidate(step, tmp_path / "many", dtype="bf16")
    old = read_files(tmp_path / "many")
    with pytest.raises(TargetExistsError, match=r"exists already\. If another plan .* remove it, then commit again"):
        shardckpt.commit_plan(plan)
    assert read_files(tmp_path / "many") == old
    shutil.rmtree(tmp_path / "many")
    shardckpt.commit_plan(plan)


def test_a_discarded_plan_leaves_the_target_and_no_files(bucket, step, tmp_path):
    for target in (str(tmp_path / "many"), f"{bucket}/many"):
        plan = tmp_path / "plan.json"
        shardckpt.consolidate(step, target, dtype="bf16")
        before = (sorted(os.listdir(tmp_path)), dict(Bucket.objects))
        shardckpt.plan_tasks(plan, "consolidate", step, target, overwrite=True)
        run_all(plan)
        shardckpt.discard_plan(plan)
        plan.unlink()
        assert (sorted(os.listdir(tmp_path)), dict(Bucket.objects)) == before


@pytest.mark.parametrize("where", ["disk", "store"])
def test_a_task_stops_before_its_next_part_once_its_plan_is_discarded(where, bucket, step, tmp_path, monkeypatch):
    plan, target = tmp_path / "plan.json", f"{bucket}/many" if where == "store" else tmp_path / "many"
    shardckpt.plan_tasks(plan, "consolidate", step, target, max_shard_size=SMALL, tasks=1)
    write, written = PartResults.write, []

    def write_late(results: PartResults, part: WorkPart, result: dict[str, str]) -> None:
        written.append(part.name)
        shardckpt.discard_plan(plan)
        write(results, part, result)

    monkeypatch.setattr(PartResults, "write", write_late)
    with pytest.raises(StorageError, match="the folder of this plan is not here"):
        shardckpt.run_task(plan, 0)
    assert len(written) == 1


def test_a_plan_is_discarded_after_a_commit_that_was_refused(bucket, step, tmp_path):
    source, plan = tmp_path / "source", tmp_path / "plan.json"
    shutil.copytree(step, source)
    shardckpt.plan_tasks(plan, "consolidate", source, f"{bucket}/many")
    run_all(plan)
    payload = next(source.glob("*.safetensors"))
    payload.write_bytes(payload.read_bytes())
    with pytest.raises(UsageError, match="changed since the plan was made"):
        shardckpt.commit_plan(plan)
    shardckpt.discard_plan(plan)
    assert not Bucket.objects


def test_a_plan_that_cannot_be_written_leaves_no_folder(step, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError):
        shardckpt.plan_tasks(tmp_path / "file" / "p", "consolidate", step, tmp_path / "many")
    assert os.listdir(tmp_path) == ["file"]


def test_a_plan_discarded_amid_its_commit_takes_nothing_from_the_target(bucket, step, tmp_path):
    """The commit was killed after it published."""
    plan = tmp_path / "plan.json"
    shardckpt.plan_tasks(plan, "consolidate", step, f"{bucket}/many")
    run_all(plan)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Dead):
        patch.setattr(PartResults, "remove_committed", lambda _: (_ for _ in ()).throw(Dead))
        shardckpt.commit_plan(plan)
    shardckpt.discard_plan(plan)
    assert shardckpt.diff(step, f"{bucket}/many").equal == 12
    assert not [name for name in Bucket.objects if "tasks-" in name]


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"verb": "prune"}, "a plan needs a verb"),
        ({"tasks": -1}, "`tasks` must be a number"),
        ({"dry_run": True}, "a plan and `dry_run` exclude each other"),
        ({"parallel": True}, "a plan and `parallel` exclude each other"),
        ({"dtype": object()}, "a plan cannot store `dtype`"),
        ({"sources": ("a",)}, "the call that is planned is not complete"),
    ],
)
def test_calls_that_cannot_be_planned_are_refused(arguments, match, step, tmp_path):
    given = {"verb": "consolidate", "sources": (step, tmp_path / "many"), **arguments}
    with pytest.raises(UsageError, match=match):
        shardckpt.plan_tasks(tmp_path / "p", given.pop("verb"), *given.pop("sources"), **given)
    assert os.listdir(tmp_path) == []


def test_a_target_or_a_plan_that_exists_is_refused_when_it_is_planned(step, tmp_path):
    shardckpt.consolidate(step, tmp_path / "many")
    for plan, target in (("p", "many"), ("many", "other")):
        with pytest.raises(TargetExistsError):
            shardckpt.plan_tasks(tmp_path / plan, "consolidate", step, tmp_path / target)
    assert os.listdir(tmp_path) == ["many"]


def test_a_target_on_a_store_may_end_with_a_slash(bucket, step, tmp_path):
    for plan, target in (("p", f"{bucket}/many/"), ("q", f"{bucket}/a/b c//")):
        shardckpt.plan_tasks(tmp_path / plan, "consolidate", step, target)
        run_all(tmp_path / plan)
        shardckpt.commit_plan(tmp_path / plan)
        assert shardckpt.diff(step, target).equal
    assert not [name for name in Bucket.objects if "tasks-" in name]


def test_one_file_on_a_store_needs_no_plan(bucket, step, tmp_path):
    with pytest.raises(UsageError, match="a plan needs a folder as its target"):
        shardckpt.plan_tasks(tmp_path / "p", "consolidate", step, f"{bucket}/model.safetensors")
    assert not Bucket.objects


def test_a_task_imports_no_torch(step, tmp_path):
    shardckpt.plan_tasks(tmp_path / "p", "consolidate", step, tmp_path / "many")
    code = "import sys, shardckpt; shardckpt.run_task(sys.argv[1], 0); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code, tmp_path / "p"], check=True, timeout=60)
