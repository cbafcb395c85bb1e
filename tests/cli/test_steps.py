"""`shardckpt ls` and `shardckpt prune`: numbers for scripts on stdout, what is wrong on stderr, exit codes."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from shardckpt_cli import exits

from shardckpt import Checkpointer, Witness, ls
from shardckpt.native import apply_retention, run_directory
from shardckpt.native.payload import new_save_id
from shardckpt.native.run_directory import step_name
from shardckpt.results import Divergence, Resume
from shardckpt.storage.local import LocalStore
from shardckpt.storage.orphans import make_partial, release
from shardckpt.witness.files.resume_file import add_capture_resume, add_resumes
from shardckpt.witness.records.resumes import CaptureResume
from tests.kit.runs.command import run, run_here
from tests.kit.writers.native_writer import write_step


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Steps 5, 10, 15 and 20, of which 20 was never committed."""
    for number in (5, 10, 15, 20):
        write_step(tmp_path / "run" / step_name(number), {"w": torch.ones(4)}, save=new_save_id())
    (tmp_path / "run" / step_name(20) / "COMMIT").unlink()
    return tmp_path / "run"


def test_ls_prints_a_complete_step_a_line_and_the_others_on_stderr(root: Path) -> None:
    found = run_here("ls", root)
    assert (found.code, found.out) == (0, "5\n10\n15\n")
    assert len(found.err.splitlines()) == 1
    assert step_name(20) in found.err


def test_ls_shows_sizes_times_and_metrics_of_steps(tmp_path: Path) -> None:
    ck = Checkpointer(tmp_path)
    ck.save(7, {"w": torch.ones(4)}, metrics={"loss": 0.25, "a\nb": float("nan")})
    ck.save(12, {"w": torch.ones(4)})
    now = time.strftime("%Y-%m-%d", time.gmtime())
    for option in ("-l", "--long"):
        lines = run_here("ls", tmp_path, option).out.splitlines()
        assert lines[0].split() == ["step", "size", "saved", "metrics", "best"]
        assert re.fullmatch(rf" +7  +\d+.\d kB  {now} ..:..:..Z  loss=0.25 a\\nb=nan  lowest loss", lines[1])
        assert re.fullmatch(rf" +12  +\d+.\d kB  {now} ..:..:..Z", lines[2])
    listed = json.loads(run_here("ls", tmp_path, "--json").out)["complete"]
    assert [step["metrics"] for step in listed] == [{"a\nb": "nan", "loss": 0.25}, {}]


def test_ls_marks_the_best_step_and_leaves_out_timings(tmp_path: Path) -> None:
    ck = Checkpointer(tmp_path)
    timings = {"eval_runtime": 0.5, "eval_samples_per_second": 300.0}
    for step, (loss, accuracy) in enumerate([(3.0, 0.1), (1.0, 0.7), (1.0, 0.5), (float("nan"), 0.9)], 1):
        ck.save(step, {"w": torch.ones(4)}, metrics={"eval_loss": loss, "eval_accuracy": accuracy, **timings})

    def list_best(*options: str) -> list[str]:
        lines = run_here("ls", tmp_path, "-l", *options).out.splitlines()
        assert "per_second" not in "".join(lines) and "runtime" not in "".join(lines)
        return [re.split("  +", line.strip())[4:] for line in lines[1:]]

    assert list_best() == [[], [], ["lowest eval_loss"], []], "of equal steps the later"
    assert list_best("--metric", "eval_accuracy", "--mode", "max")[3] == ["highest eval_accuracy"]
    assert run_here("ls", tmp_path, "--metric", "eval_loss").out == run_here("ls", tmp_path, "-l").out
    assert "eval_runtime" in run_here("ls", tmp_path, "--json").out
    wrong = run_here("ls", tmp_path, "-l", "--metric", "acc")
    assert (wrong.code, wrong.out) == (2, "")
    assert "no step has a number for the metric 'acc'; found eval_accuracy, eval_loss" in wrong.err
    assert ls(tmp_path, metrics=True).find_best("eval_loss").number == 3  # type: ignore[union-attr]


def test_ls_of_steps_without_metrics_marks_none(root: Path) -> None:
    assert "best" not in run_here("ls", root, "-l").out
    wrong = run_here("ls", root, "--metric", "loss")
    assert wrong.code == 2
    assert "found no metrics. Give metrics to each save." in wrong.err


def test_unfinished_steps_are_one_line(root: Path) -> None:
    for number in range(30, 60):
        write_step(root / step_name(number), {"w": torch.ones(4)}, save=new_save_id())
        (root / step_name(number) / "COMMIT").unlink()
    (root / step_name(15) / "COMMIT").write_bytes(b"{")
    damaged, unfinished = run_here("ls", root).err.splitlines()
    assert step_name(15) in damaged
    assert unfinished.startswith(
        "not complete: 31 steps whose save or removal was interrupted, or still runs: 20, 30, 31,"
    )
    assert " and 19 more. `shardckpt prune` removes them a day after" in unfinished
    assert len(unfinished) < 300


def test_ls_names_steps_whose_statistics_were_stored(tmp_path: Path) -> None:
    ck = Checkpointer(tmp_path)
    ck.save(7, {"w": torch.ones(4)}, stats=True)
    ck.save(12, {"w": torch.ones(4)})
    header, first, second = run_here("ls", tmp_path, "-l").out.splitlines()
    assert header.split()[-1] == "statistics"
    assert [line.split()[-1] == "stored" for line in (first, second)] == [True, False]
    listed = json.loads(run_here("ls", tmp_path, "--json").out)["complete"]
    assert [step["has_stats"] for step in listed] == [True, False]
    assert [step.has_stats for step in ls(tmp_path).complete] == [None, None], "no manifest was read"


RESUME = Resume("1" * 15, 1.5, (16, 17), 2, 2, 2, "Net", "Net", has_equal_layout=True, is_deterministic=True)
FOUND = Divergence("schedule", 16, "optim.lr", "optim.lr is 1 after step 16", "Put the schedule into the state")


def add_resume(root: Path, number: int, resume: Resume) -> None:
    store = LocalStore(str(root))
    add_resumes(store, step_name(number), run_directory.read_step(store, number).save, resume)


def test_ls_and_prove_show_verdicts_on_resumes_and_prove_exits_1_for_a_divergence(root: Path) -> None:
    add_resume(root, 10, replace(RESUME, rank_count=4))
    assert run_here("ls", root, "--proof").out.splitlines() == [
        "step  proof",
        "   5  no record",
        "  10  proven, 2 of 2 steps",
        "  15  no record",
    ]
    assert [step["proof"] for step in json.loads(run_here("ls", root, "--json").out)["complete"]][1] == "proven"
    assert [step.proof for step in ls(root).complete] == [None] * 3, "no verdict was read"
    assert run_here("prove", root).code == 0
    add_resume(root, 15, replace(RESUME, compared=0, divergence=FOUND))
    found = run_here("prove", root)
    assert found.code == 1
    assert found.out.splitlines() == [
        "step  verdict    resumed               ranks   equal steps",
        "   5  no record",
        "  10  proven     1970-01-01 00:00:01Z  2 to 4  2 of 2",
        "  15  diverged   1970-01-01 00:00:01Z  2       0 of 2",
        "step 15, resumed 1970-01-01 00:00:01Z: optim.lr is 1 after step 16. Put the schedule into the state",
        f"{root}: 3 steps: 1 diverged, 1 proven, 1 no record",
    ]
    assert json.loads(run_here("prove", root, "--json").out)["ok"] is False


def test_the_verdict_on_a_resume_outlives_its_step(root: Path) -> None:
    add_resume(root, 5, replace(RESUME, compared=0, divergence=FOUND))
    add_resume(root, 10, RESUME)
    assert run_here("prune", root, "--keep-last", 1).code == 0
    assert not (root / step_name(5)).exists()
    found = run_here("prove", root)
    assert found.code == 1
    assert found.out.splitlines() == [
        "        step  verdict    resumed               ranks  equal steps",
        " 5 (removed)  diverged   1970-01-01 00:00:01Z  2      0 of 2",
        "10 (removed)  proven     1970-01-01 00:00:01Z  2      2 of 2",
        "          15  no record",
        "step 5 (removed), resumed 1970-01-01 00:00:01Z: optim.lr is 1 after step 16. Put the schedule into the state",
        f"{root}: 1 step, 2 removed steps: 1 diverged, 1 proven, 1 no record",
    ]
    assert [step["number"] for step in json.loads(run_here("prove", root, "--json").out)["removed"]] == [5, 10]


def test_the_verdicts_on_a_step_that_is_saved_again_do_not_count(root: Path) -> None:
    add_resume(root, 5, RESUME)
    run_here("prune", root, "--keep-last", 1)
    Checkpointer(root).save(5, {"w": torch.ones(4)})
    assert run_here("prove", root).out.splitlines()[1] == "   5  no record"


def test_prove_of_a_run_without_a_witness_says_what_to_do(root: Path) -> None:
    found = run_here("prove", root)
    assert found.code == 0
    assert found.err.startswith("no resume can be proven: pass witness=shardckpt.Witness() to Checkpointer")
    add_resume(root, 10, RESUME)
    assert run_here("prove", root).err == ""


def test_a_step_with_a_record_that_was_never_resumed_says_so(tmp_path: Path) -> None:
    ck = Checkpointer(tmp_path, witness=Witness(steps=2))
    ck.save(1, {"w": torch.ones(4)})
    for step in (2, 3):
        ck.witness(step, loss=1.0)
    assert run_here("prove", tmp_path).out.splitlines()[1].split("  ")[-1] == "0 of 2"
    assert "unproven  never" in run_here("prove", tmp_path).out
    assert run_here("ls", tmp_path, "--proof").out.splitlines()[1] == "   1  unproven, 0 of 2 steps"


def test_ls_and_prove_show_resumes_from_captures_that_the_run_does_not_have(root: Path) -> None:
    captured = CaptureResume(12, "memory", "shardckpt-memory:1/step-00000012", "1" * 15, RESUME)
    add_capture_resume(LocalStore(str(root)), captured)
    assert run_here("ls", root, "--proof").out.splitlines()[-1] == "12 (memory)  proven, 2 of 2 steps"
    assert json.loads(run_here("ls", root, "--json").out)["captures"][0]["verdict"] == "proven"
    found = run_here("prove", root)
    assert found.code == 0
    assert found.out.splitlines()[-2:] == [
        "12 (memory)  proven     1970-01-01 00:00:01Z  2      2 of 2",
        f"{root}: 3 steps and 1 capture: 1 proven, 3 no record",
    ]
    add_capture_resume(LocalStore(str(root)), replace(captured, resume=replace(RESUME, id="2" * 15, divergence=FOUND)))
    found = run_here("prove", root)
    assert found.code == 1
    assert "step 12 (memory), resumed" in found.out
    page = run_here("prove", root, "--html", root.parent / "page.html")
    assert (page.code, page.out.splitlines()[0]) == (1, f"wrote {root.parent}/page.html")


def test_a_plain_ls_reads_no_manifest(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[object] = []
    read_contents = run_directory.read_contents
    monkeypatch.setattr(run_directory, "read_contents", lambda *step: read.append(step) or read_contents(*step))
    assert run_here("ls", root).code == 0
    assert read == []
    assert run_here("ls", root, "-l").code == 0
    assert len(read) == 3


def test_ls_of_an_empty_folder_says_so_on_stderr(tmp_path: Path) -> None:
    found = run_here("ls", tmp_path)
    assert (found.code, found.out) == (0, "")
    assert found.err == f"{tmp_path}: no step is here; the folder is empty\n"


@pytest.mark.parametrize("verb", ["ls", "prune"])
def test_a_dcp_folder_named_like_a_step_is_called_one(verb: str, fixtures: Path, tmp_path: Path) -> None:
    shutil.copytree(fixtures / "dcp_plain_nasty_w1" / "ckpt", tmp_path / "step-100")
    found = run_here(verb, tmp_path)
    assert found.code == 0
    assert "named like a step, but no shardckpt save wrote it; found a checkpoint (torch distributed" in found.err
    assert f"shardckpt.load('{tmp_path}/step-100', state), and save steps into another folder" in found.err
    assert not any(word in found.err for word in ("interrupted", "repair", "remove"))


def test_ls_of_an_accelerate_project_names_its_checkpoints(fixtures: Path, tmp_path: Path) -> None:
    shutil.copytree(fixtures / "accelerate_fsdp2_full_llama_w2" / "ckpt", tmp_path / "checkpoints" / "checkpoint_0")
    found = run_here("ls", tmp_path)
    assert found.code == 2
    assert "no step of a run is here; found checkpoints/checkpoint_0 (accelerate)" in found.err


def test_prune_removes_what_no_rule_keeps(root: Path) -> None:
    found = run_here("prune", root, "--keep-last", 1, "--keep-every", 10)
    assert found.code == 0
    assert found.out.splitlines()[0].startswith("removed 5, ")
    assert found.out.splitlines()[1:] == ["kept 2, the newest 15"]
    assert step_name(20) in found.err
    assert run_here("ls", root).out == "10\n15\n"


def test_prune_knows_the_rules_that_a_checkpointer_has(tmp_path: Path) -> None:
    ck = Checkpointer(tmp_path)
    for number, loss in enumerate((3.0, 1.0, 2.0, 5.0), 1):
        ck.save(number, {"w": torch.ones(4)}, metrics={"loss": loss, "score": loss})
    dry = run_here("prune", tmp_path, "--keep-for", "2h", "--dry-run")
    assert dry.out == "would keep 4, the newest 4\n"
    best = run_here("prune", tmp_path, "--keep-best", 1, "--metric", "score", "--mode", "max", "--dry-run")
    assert best.out.endswith("would keep 1, the newest 4\n")
    assert run_here("prune", tmp_path, "--keep-best", 2).code == 0
    assert run_here("ls", tmp_path).out == "2\n3\n4\n"
    wrong = run_here("prune", tmp_path, "--keep-for", "soon")
    assert wrong.code == 2
    assert "--keep-for must be a time; found 'soon'" in wrong.err
    bare = run_here("prune", tmp_path, "--keep-for", "7")
    assert bare.code == 2
    assert "--keep-for must have a unit; found '7'; expected 7h, 7d or 7w" in bare.err
    assert run_here("ls", tmp_path).out == "2\n3\n4\n"


def test_prune_without_a_rule_says_that_all_steps_stay(root: Path) -> None:
    found = run_here("prune", root)
    assert found.out == "kept 3, the newest 15\n"
    rules = "name --keep-last, --keep-every, --keep-best or --keep-for"
    assert f"no rule is given: all complete steps stay; {rules}" in found.err
    assert "no rule" not in run_here("prune", root, "--keep-last", 9).err
    assert "no rule" not in run_here("prune", f"{root}@latest").err, "steps that are named are no rule's matter"


@pytest.mark.parametrize("option", [("--metric", "loss"), ("--mode", "max")])
def test_a_metric_without_keep_best_is_refused(option: tuple[str, str], root: Path) -> None:
    found = run_here("prune", root, *option, "--keep-last", 1)
    assert found.code == 2
    assert f"{option[0]} does nothing without --keep-best" in found.err
    assert run_here("ls", root).out == "5\n10\n15\n"


def test_prune_says_what_it_leaves_in_a_removed_step(root: Path) -> None:
    (root / step_name(5) / "thesis.txt").write_text("mine")
    dry = run_here("prune", root, "--keep-last", 2, "--dry-run")
    assert f"would leave {step_name(5)}/thesis.txt, which no save wrote" in dry.out
    done = run_here("prune", root, "--keep-last", 2)
    assert (done.code, done.out.splitlines()[1]) == (0, f"left {step_name(5)}/thesis.txt, which no save wrote")
    assert os.listdir(root / step_name(5)) == ["thesis.txt"]
    again = run_here("prune", root, "--keep-last", 2)
    assert (again.code, again.out) == (0, "kept 2, the newest 15\n")
    assert step_name(5) not in again.err


@pytest.mark.parametrize("dry", [(), ("--dry-run",)])
def test_prune_by_a_metric_that_no_step_has_removes_nothing(dry: tuple[str, ...], tmp_path: Path) -> None:
    ck = Checkpointer(tmp_path)
    for number in (1, 2, 3):
        ck.save(number, {"w": torch.ones(4)}, metrics={"accuracy": number})
    found = run_here("prune", tmp_path, "--keep-best", 1, "--metric", "acc", "--keep-last", 1, *dry)
    assert (found.code, found.out) == (2, "")
    assert "metric 'acc', which no step has; found accuracy" in found.err
    assert run_here("ls", tmp_path).out == "1\n2\n3\n"


def test_prune_that_is_interrupted_does_not_say_that_nothing_was_done(root: Path, monkeypatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(apply_retention, "delete_steps", interrupted)
    monkeypatch.setattr(exits, "_interrupt_messages", exits._interrupt_messages[:1])
    found = run_here("prune", root, "--keep-last", "1")
    assert found.code == 130
    assert "steps removed so far are gone, all others are complete" in found.err


def test_a_dry_run_removes_nothing(root: Path) -> None:
    found = run_here("prune", root, "--keep-last", 1, "--dry-run")
    assert [line.split(",")[0] for line in found.out.splitlines()] == [
        "would remove 5",
        "would remove 10",
        "would keep 1",
    ]
    assert run_here("ls", root).out == "5\n10\n15\n"


def test_prune_says_what_a_killed_prune_left_and_from_when_it_may_go(root: Path) -> None:
    for number in (5, 10):
        (root / step_name(number) / "COMMIT").unlink()
    killed = root / f".{step_name(25)}.partial-0123456789ab"
    killed.mkdir()
    (killed / "data").write_bytes(bytes(5000))
    (line,) = run_here("prune", root, "--keep-last", 9).err.splitlines()
    assert line.startswith("not complete: 4 folders, ")
    assert f"{killed.name}, {step_name(5)}, {step_name(10)}, {step_name(20)}. They may go from 20" in line
    assert line.endswith("if no job saves into this run, --unfinished-for 0 removes them now")
    left = json.loads(run_here("prune", root, "--json").out)["unfinished"]
    assert [each["name"] for each in left] == [killed.name, *(step_name(number) for number in (5, 10, 20))]
    assert left[0]["nbytes"] == 5000 < sum(each["nbytes"] for each in left)
    assert all(abs(each["removable_at"] - time.time() - 24 * 3600) < 600 for each in left)
    later = json.loads(run_here("prune", root, "--unfinished-for", "7d", "--json").out)["unfinished"]
    assert all(abs(each["removable_at"] - time.time() - 7 * 24 * 3600) < 600 for each in later)
    dry = run_here("prune", root, "--unfinished-for", "0", "--dry-run")
    done = run_here("prune", root, "--unfinished-for", "0")
    assert (done.err, dry.err) == ("", "")
    assert done.out == dry.out.replace("would remove", "removed").replace("would keep", "kept")
    assert os.listdir(root) == [step_name(15)]
    assert run_here("prune", root, "--unfinished-for", "soon").code == 2


def test_a_save_that_goes_on_is_not_removed_as_unfinished(root: Path) -> None:
    path, lock = make_partial(str(root / step_name(25)))
    try:
        assert run_here("prune", root, "--unfinished-for", "0").code == 0
        assert os.path.isdir(path)
    finally:
        release(lock)
    assert run_here("prune", root, "--unfinished-for", "0").code == 0
    assert not os.path.exists(path)


def test_prune_says_where_nothing_can_be_loaded(root: Path) -> None:
    for number in (5, 10, 15):
        (root / step_name(number) / "COMMIT").unlink()
    found = run_here("prune", root, "--keep-last", 1)
    assert (found.code, found.out) == (0, "kept none: none is complete\n")
    assert len(os.listdir(root)) == 4


@pytest.mark.parametrize("verb", ["ls", "prune"])
def test_json_of_both_parses(verb: str, root: Path) -> None:
    found = run_here(verb, root, "--json")
    assert (found.code, found.err) == (0, "")
    assert [step["number"] for step in json.loads(found.out)["complete" if verb == "ls" else "kept"]] == [5, 10, 15]


@pytest.mark.parametrize(
    "args", [("ls", "NONE"), ("ls",), ("prune", "NONE"), ("prune", "ROOT", "--keep-last", "0"), ("ls", "STEP")]
)
def test_a_call_that_cannot_be_is_2(args: tuple[str, ...], root: Path) -> None:
    places = {"NONE": root / "none", "ROOT": root, "STEP": root / step_name(5)}
    found = run_here(*(places.get(arg, arg) for arg in args))
    assert found.code == 2
    assert len(found.err.splitlines()) == 1


def test_a_folder_of_steps_names_the_command_for_the_newest_complete_one(root: Path) -> None:
    for given in (str(root), f"{root}/", str(root.parent)):
        done = run("verify", given, "--json")
        assert done.code == 2
        assert done.err.endswith(f"such as the newest. Type `shardckpt verify {root}/{step_name(15)} --json`\n")


def test_a_folder_of_one_checkpoint_or_of_several_runs_names_no_newest_step(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_step(tmp_path / name / step_name(1), {"w": torch.ones(4)}, save=new_save_id())
    assert run("inspect", tmp_path).err.endswith("Point at one of them.\n")
    step = tmp_path / "a" / step_name(1)
    assert run("inspect", tmp_path / "a").err.endswith(f"Point at one of them. Type `shardckpt inspect {step}`\n")
