"""`doctor`: a healthy run has no problem, each fault is a problem with the command that helps; nothing changes."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import shardckpt
from shardckpt.errors import SourceNotFoundError, StorageError, UnknownFormatError, UsageError
from shardckpt.native.run_directory import RECORD, RunDirectory, StepFolder, step_name
from shardckpt.offline.run_history import doctor as doctor_module
from shardckpt.offline.run_history import health_checks
from shardckpt.plan.retention import Retention, decode_retention
from shardckpt.results import Divergence, HealthReport, Resume
from shardckpt.storage.local import LocalStore
from shardckpt.witness.files.resume_file import add_resumes
from tests.kit.runs.command import run_here
from tests.kit.runs.tier_runs import forget_process
from tests.kit.stores.clocks import days_pass
from tests.kit.writers.native_writer import write_step

SAVES = tuple(f"{number:015d}" for number in (1, 2, 3))
FOUND = Divergence("schedule", 3, "lr", "lr is 1", "Put it into the state", (0,))
RESUME = Resume("1" * 15, 1.5, (4, 5), 2, 2, 2, "Net", "Net", has_equal_layout=True, is_deterministic=True)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for number, save in enumerate(SAVES, 1):
        write_step(tmp_path / "run" / step_name(number), {"w": torch.ones(40), "i": torch.ones(3).int()}, save=save)
    return tmp_path / "run"


def find(report: HealthReport, name: str) -> tuple[str, str, str]:
    (check,) = (check for check in report.checks if check.name == name)
    return check.status, check.text, check.next


def list_files(root: Path) -> dict[str, float]:
    return {str(each): each.stat().st_mtime for each in root.rglob("*")}


def payload(root: Path, number: int = 3) -> Path:
    (found,) = (root / step_name(number)).glob("*-00.safetensors")
    return found


def test_a_healthy_run_has_no_problem_and_stays_as_it_is(root: Path) -> None:
    before = list_files(root)
    report = shardckpt.doctor(root)
    assert (report.ok, report.newest, report.problems) == (True, 3, ())
    assert [check.name for check in report.checks] == [
        *("newest step", "values", "damaged steps", "last resume", "disk space", "retention"),
        *("unfinished", "other content", "durability", "record", "versions"),
    ]
    assert find(report, "newest step")[0] == find(report, "values")[0] == "ok"
    assert list_files(root) == before


def flip(root: Path) -> None:
    flip_file(payload(root))


def flip_file(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def make_nan(root: Path) -> None:
    shutil.rmtree(root / step_name(3))
    write_step(root / step_name(3), {"w": torch.tensor([1.0, float("nan"), float("inf")])}, save=SAVES[2])


def make_inf(root: Path) -> None:
    shutil.rmtree(root / step_name(3))
    write_step(root / step_name(3), {"w": torch.tensor([1.0, float("inf")])}, save=SAVES[2])


def diverge(root: Path) -> None:
    store = LocalStore(str(root))
    add_resumes(store, step_name(2), SAVES[1], RESUME)
    add_resumes(store, step_name(1), SAVES[0], replace(RESUME, id="2" * 15, began_at=9.0, divergence=FOUND))


FAULTS: dict[str, tuple[Callable[[Path], object], str, str, str]] = {
    "a flipped bit": (
        flip,
        "newest step",
        "do not match their checksum",
        f"mv RUN/{step_name(3)} RUN/unused-{step_name(3)}",
    ),
    "a flipped bit in a manifest": (
        lambda root: flip_file(next((root / step_name(3)).glob("*.manifest.json"))),
        "newest step",
        "manifest",
        f"shardckpt repair RUN/{step_name(3)}",
    ),
    "a damaged COMMIT": (
        lambda root: (root / step_name(3) / "COMMIT").write_text("junk"),
        "damaged steps",
        "3: .*COMMIT",
        f"shardckpt repair RUN/{step_name(3)}",
    ),
    "a lost manifest": (
        lambda root: next((root / step_name(3)).glob("*.manifest.json")).unlink(),
        "damaged steps",
        "3: .*manifest",
        f"shardckpt repair RUN/{step_name(3)}",
    ),
    "NaN": (make_nan, "values", "1 NaN and 1 Inf in 1 tensor: w", "shardckpt bisect RUN --when nan"),
    "Inf": (make_inf, "values", "0 NaN and 1 Inf in 1 tensor: w", "shardckpt bisect RUN --when inf"),
    "a short file": (
        lambda root: os.truncate(payload(root), 30),
        "damaged steps",
        "3: .*files that were committed are missing or end early",
        f"mv RUN/{step_name(3)} RUN/unused-{step_name(3)}",
    ),
    "no complete step": (
        lambda root: [os.truncate(payload(root, number), 30) for number in (1, 2, 3)],
        "newest step",
        "no step is complete; step 3: .*missing or end early",
        f"mv RUN/{step_name(3)} RUN/unused-{step_name(3)}",
    ),
    "a divergence": (diverge, "last resume", "diverged, from step 1 at 1970.*lr is 1", "shardckpt prove RUN"),
    "an unreadable verdict": (
        lambda root: (root / f"{step_name(1)}.resumes.json").write_text("{"),
        "last resume",
        "a record cannot be read",
        f"rm RUN/{step_name(1)}.resumes.json",
    ),
    "a damaged record": (
        lambda root: (root / RECORD).write_text("junk"),
        "record",
        "is damaged",
        f"rm RUN/{RECORD}",
    ),
    "a newer version": (
        lambda root: rewrite_version(root / step_name(3) / "COMMIT"),
        "versions",
        "step 3: ",
        "pip install --upgrade shardckpt",
    ),
}


def rewrite_version(commit: Path) -> None:
    line = commit.read_bytes().partition(b"\n")[0].replace(b'"version":1', b'"version":9') + b"\n"
    commit.write_bytes(line + hashlib.sha256(line).hexdigest().encode() + b"\n")


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_a_problem_with_what_to_type_next(root: Path, fault: str) -> None:
    make, name, text, command = FAULTS[fault]
    make(root)
    report = shardckpt.doctor(root)
    assert not report.ok
    status, found, following = find(report, name)
    assert status == "problem"
    assert re.search(text, found), found
    assert following == command.replace("RUN", str(root))


def test_folders_of_interrupted_saves_are_a_problem_after_a_day(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (root / step_name(2) / "COMMIT").unlink()
    status, text, _ = find(shardckpt.doctor(root), "unfinished")
    assert (status, text.startswith("1 folder, 4.")) == ("info", True), "a save may still run"
    days_pass(monkeypatch, 2)
    status, text, following = find(shardckpt.doctor(root), "unfinished")
    assert (status, following) == ("problem", f"shardckpt prune {root}")
    assert text == f"1 folder from saves or removals that ended over a day ago: {step_name(2)}"


def test_a_disk_without_space_for_a_step_is_a_problem(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.statvfs(root)

    class Full:
        f_bavail, f_frsize, f_blocks = 1, 100, real.f_blocks

    monkeypatch.setattr(health_checks.os, "statvfs", lambda path: Full)
    assert find(shardckpt.doctor(root), "disk space") == (
        "problem",
        "100 B free, the largest step has 4.6 kB",
        f"shardckpt prune {root} --keep-last 2 --dry-run",
    )
    shutil.rmtree(root / step_name(1))
    assert find(shardckpt.doctor(root), "disk space")[2].endswith(" --keep-last 1 --dry-run"), "2 would free nothing"
    Full.f_blocks = 0
    assert find(shardckpt.doctor(root), "disk space")[0] == "info", "some network disks report nothing"


def test_the_last_resume_counts(root: Path) -> None:
    diverge(root)
    add_resumes(LocalStore(str(root)), step_name(1), SAVES[0], replace(RESUME, id="3" * 15, began_at=10.0))
    status, text, _ = find(shardckpt.doctor(root), "last resume")
    assert status == "ok"
    assert text == "proven, from step 1 at 1970-01-01 00:00:10Z, 2 of 2 recorded steps equal"


def test_content_of_others_is_named_and_no_problem(root: Path) -> None:
    (root / "notes.txt").touch()
    (root / "logs").mkdir()
    (root / step_name(1) / "mine").touch()
    report = shardckpt.doctor(root)
    assert report.ok
    text = find(report, "other content")[1]
    assert all(name in text for name in ("notes.txt", "logs/", f"{step_name(1)}/mine"))


def test_the_rules_that_a_run_stores_say_what_a_save_removes(tmp_path: Path) -> None:
    ck = shardckpt.Checkpointer(tmp_path, keep_last=2, keep_best=1, metric="acc", mode="max")
    for step, acc in ((1, 0.1), (2, 0.9), (3, 0.5), (4, 0.4)):
        ck.save(step, {"w": torch.ones(4)}, metrics={"acc": acc})
    status, text, _ = find(shardckpt.doctor(tmp_path), "retention")
    assert status == "ok"
    assert "keep_last: 2" in text
    assert text.endswith("the next save removes 3")
    assert shardckpt.load(f"{tmp_path}@best")["w"].tolist() == [1.0] * 4, "the stored metric and mode rank"
    before = ck.steps()
    ck.save(5, {"w": torch.ones(4)}, metrics={"acc": 0.3})
    assert {*before} - {*ck.steps()} == {3}
    with pytest.raises(UsageError, match="reserved"):
        ck.save(6, {"w": torch.ones(4)}, custom_metadata={"run.retention": "x"})


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "[" * 100_000, '{"keep_last":-1}', '{"other":1}', '{"keep_last":%s' % ("9" * 5000)]
)
def test_damaged_rules_are_no_rules(text: str) -> None:
    assert decode_retention(text) is None
    assert decode_retention(Retention(keep_last=3, metric="x").encode()) == Retention(keep_last=3, metric="x")


def test_the_versions_that_wrote_the_newest_step_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shardckpt.Checkpointer(tmp_path).save(1, {"w": torch.ones(4)})
    status, text, _ = find(shardckpt.doctor(tmp_path), "versions")
    assert (status, f"torch {torch.__version__} here, which wrote the newest step too" in text) == ("ok", True)
    monkeypatch.setattr(health_checks, "describe_versions", lambda: "shardckpt 9")
    status, text, _ = find(shardckpt.doctor(tmp_path), "versions")
    assert (status, text.startswith("shardckpt 9 here; shardckpt 0.")) == ("info", True)


def test_an_empty_folder_has_no_step(tmp_path: Path) -> None:
    report = shardckpt.doctor(tmp_path)
    assert (report.ok, report.newest) == (False, None)
    assert find(report, "newest step")[:2] == ("problem", "no step is here: the folder is empty")
    assert [check.name for check in report.problems] == ["newest step"]
    texts = [check.text for check in report.checks]
    assert not [text for text in texts if "0 B" in text or "newest step" in text or "all that is here" in text]
    assert find(report, "values")[1] == "not read: no step is complete"


def test_a_folder_that_no_save_wrote_is_named(tmp_path: Path) -> None:
    (tmp_path / "run" / step_name(1)).mkdir(parents=True)
    (tmp_path / "run" / step_name(1) / "notes").touch()
    status, text, following = find(shardckpt.doctor(tmp_path / "run"), "newest step")
    assert (status, "no shardckpt save wrote it; found notes" in text) == ("problem", True)
    subprocess.run(following, shell=True, check=True)
    shardckpt.Checkpointer(tmp_path / "run").save(1, {"w": torch.ones(4)})
    assert shardckpt.doctor(tmp_path / "run").ok


@pytest.mark.parametrize("fault", ["a flipped bit", "a damaged COMMIT", "a lost manifest", "a short file"])
def test_the_next_command_mends_a_step_or_sets_it_aside(root: Path, fault: str) -> None:
    FAULTS[fault][0](root)
    (problem,) = [check for check in shardckpt.doctor(root).problems if check.name != "durability"]
    if problem.next.startswith("shardckpt "):
        assert run_here(*problem.next.split()[1:]).code == 0
    else:
        subprocess.run(problem.next, shell=True, check=True)
    report = shardckpt.doctor(root)
    assert (report.ok, report.newest) == (True, 3 if problem.next.startswith("shardckpt ") else 2)


def test_a_step_that_others_refer_to_is_not_moved(tmp_path: Path) -> None:
    damaged = StepFolder(1, step_name(1), save=SAVES[0], own=frozenset({"a"}), fault="a is missing")
    run = RunDirectory((damaged, StepFolder(2, step_name(2), refers={step_name(1): {"b": 1}})), ())
    checked = health_checks.RunToCheck(str(tmp_path), LocalStore(str(tmp_path)), run)
    assert checked.find_mend(damaged).startswith("copy its files again from another copy")
    assert health_checks.RunToCheck("", checked.store, RunDirectory((damaged,), ())).find_mend(damaged)[:3] == "mv "


def test_what_is_no_run_is_refused(root: Path) -> None:
    with pytest.raises(SourceNotFoundError):
        shardckpt.doctor(root / "nope")
    with pytest.raises(UsageError, match="this is a step"):
        shardckpt.doctor(root / step_name(1))
    with pytest.raises(UsageError, match="this is a file"):
        shardckpt.doctor(payload(root))
    with pytest.raises(UnknownFormatError, match="Name the folder that holds the steps"):
        shardckpt.doctor(root.parent)
    (root.parent / "other" / "sub").mkdir(parents=True)
    with pytest.raises(UnknownFormatError, match=r"found sub\. Name the folder that contains the steps"):
        shardckpt.doctor(root.parent / "other")
    for path in (f"{root}@latest", f"{root}@1..2"):
        with pytest.raises(UsageError, match=f"must be given a run's folder.*found {path}.*shardckpt verify {path}"):
            shardckpt.doctor(path)


def test_a_folder_that_cannot_be_listed_raises(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: LocalStore, folder: str = "") -> Iterator[None]:
        raise StorageError("cannot list it", where=self.url, found="Permission denied")

    monkeypatch.setattr(LocalStore, "list", refuse)
    with pytest.raises(StorageError, match="Permission denied"):
        shardckpt.doctor(root)


def test_a_check_that_fails_is_a_problem_and_the_others_go_on(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise StorageError("the network is down", where=root)

    monkeypatch.setattr(health_checks, "verify", fail)
    report = shardckpt.doctor(root)
    assert [check.name for check in report.problems] == ["newest step"]
    assert "cannot be checked: " in report.problems[0].text


def test_a_step_that_is_removed_meanwhile_is_no_fault(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = health_checks.verify

    def verify(path: str) -> object:
        if path.endswith(step_name(3)):
            shutil.rmtree(path)
        return real(path)

    monkeypatch.setattr(health_checks, "verify", verify)
    report = shardckpt.doctor(root)
    assert (report.ok, report.newest) == (True, 2)


@pytest.fixture
def tiered(tmp_path: Path) -> Iterator[Path]:
    """A run with step 2 in the root, and step 3 in memory and in `local`."""
    tiers = [shardckpt.PeerMemory(), shardckpt.Local(tmp_path / "local")]
    ck = shardckpt.Checkpointer(tmp_path / "run", save_every=2, tiers=tiers)
    for step in (1, 2, 3):
        ck.save(step, {"w": torch.ones(400)})
    ck.wait()
    yield tmp_path / "run"
    forget_process()


def test_a_damaged_newest_step_is_not_durable(root: Path) -> None:
    flip(root)
    assert find(shardckpt.doctor(root), "durability")[:2] == (
        "ok",
        "root: step 3 is damaged, step 2 survives process",
    )
    for number in (1, 2):
        shutil.rmtree(root / step_name(number))
    status, text, _ = find(shardckpt.doctor(root), "durability")
    assert (status, text) == ("problem", "root: step 3 is damaged")


def test_captures_are_verified(tiered: Path) -> None:
    (local,) = tiered.parent.glob(f"local/{step_name(3)}/*-00.safetensors")
    text = "root: step 2 survives process; memory: step 3 survives process; local: step 3 "
    assert find(shardckpt.doctor(tiered), "durability") == ("ok", f"{text}survives process", "")
    flip_file(local)
    status, found, following = find(shardckpt.doctor(tiered), "durability")
    assert (status, found.startswith(f"{text}is damaged"), following[:13]) == ("problem", True, "start the job")


def test_a_capture_that_the_job_replaces_meanwhile_is_no_fault(tiered: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = health_checks.verify

    def verify(path: str) -> object:
        if "local" in path:
            shutil.rmtree(path, ignore_errors=True)
        return real(path)

    monkeypatch.setattr(health_checks, "verify", verify)
    assert "local" not in find(shardckpt.doctor(tiered), "durability")[1]


def test_a_lost_folder_of_local_is_a_problem(tiered: Path) -> None:
    local = tiered.parent / "local"
    shutil.rmtree(local)
    status, text, following = find(shardckpt.doctor(tiered), "durability")
    assert (status, text.endswith(f"; local: {local} is not on this machine")) == ("problem", True)
    assert following.startswith("mount its disk again")
    (local / step_name(3)).mkdir(parents=True)
    status, text, _ = find(shardckpt.doctor(tiered), "durability")
    assert (status, "belong to an unknown run" in text) == ("problem", True)


def test_a_run_in_a_bucket_has_no_disk(root: Path, bucket: str) -> None:
    shardckpt.copy(root, f"{bucket}/run")
    report = shardckpt.doctor(f"{bucket}/run")
    assert report.ok
    assert find(report, "disk space")[0] == "info"


def test_the_command_prints_a_line_for_each_check_and_exits_with_1(root: Path, tmp_path: Path) -> None:
    healthy = run_here("doctor", root)
    assert (healthy.code, healthy.err) == (0, "")
    assert healthy.out.splitlines()[-1] == f"{root}: no problem, step 3 is the newest"
    assert len(healthy.out.splitlines()) == 12
    make_nan(root)
    found = run_here("doctor", root, "--html", tmp_path / "page.html")
    assert found.code == 1
    lines = found.out.splitlines()
    at = next(at for at, line in enumerate(lines) if line.startswith("PROBLEM  values"))
    assert lines[at + 1] == f"{' ' * 24}next: shardckpt bisect {root} --when nan"
    assert lines[-1] == f"wrote {tmp_path / 'page.html'}"
    printed = run_here("doctor", root, "--json")
    assert (printed.code, json.loads(printed.out)["ok"]) == (1, False)
    assert run_here("doctor", root / "nope").code == 2


def test_the_page_needs_json_values_only(root: Path) -> None:
    make_nan(root)
    data = doctor_module.describe_report(shardckpt.doctor(root))
    assert json.loads(json.dumps(data, allow_nan=False)) == data
