"""`RUN@latest`, `RUN@best`, `RUN@1000`, `RUN@1000..2000`: which step a path names, in every verb that takes one."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import shardckpt
from shardckpt.checkpoint.load import load as load_module
from shardckpt.errors import (
    AmbiguousError,
    NoCompleteCheckpoint,
    ShardckptError,
    SourceNotFoundError,
    UnsupportedError,
    UsageError,
)
from shardckpt.native.manifest_json import ManifestContents
from shardckpt.native.payload import new_save_id
from shardckpt.native.run_directory import METRIC, step_name
from shardckpt.reader import NESTED_STEP
from shardckpt.readers.registry import resolve_step
from shardckpt.readers.step_paths import resolve_range, resolve_run
from shardckpt.storage.resolve_url import split_step_suffix
from tests.kit.ranks.harness import raised_everywhere
from tests.kit.ranks.harness import run as run_ranks
from tests.kit.runs.command import run_here
from tests.kit.writers.native_writer import write_step

STATE = {"w": torch.ones(4)}


def write(folder: Path, about: Mapping[str, str] | None = None, value: float = 1.0) -> None:
    def change(contents: ManifestContents) -> ManifestContents:
        return replace(contents, about={**contents.about, **(about or {})})

    write_step(folder, {"w": torch.full((4,), value)}, save=new_save_id(), change=change)


def write_run(root: Path, *metrics: Mapping[str, float]) -> Path:
    """Write steps 100, 200, ... with metrics."""
    for at, numbers in enumerate(metrics, 1):
        about = {f"{METRIC}{name}": repr(value) for name, value in numbers.items()}
        write(root / step_name(100 * at), about, value=float(at))
    return root


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Steps 100, 200 and 300; by their loss the second is the best."""
    losses = ({"eval_loss": loss, "eval_runtime": 0.1} for loss in (3.0, 1.0, 2.0))
    return write_run(tmp_path / "run", *losses)


def find(path: object) -> str:
    return os.path.basename(resolve_step(str(path)))


@pytest.mark.parametrize(
    ("suffix", "step"), [("latest", 300), ("best", 200), ("100", 100), ("0100", 100), ("best:max:eval_loss", 100)]
)
def test_a_suffix_names_one_step(run: Path, suffix: str, step: int) -> None:
    assert find(f"{run}@{suffix}") == step_name(step)
    assert find(f"{run}/@{suffix}") == step_name(step), "shells complete a folder with a slash"


def test_the_latest_step_is_complete_and_in_the_newest_branch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ck = shardckpt.Checkpointer(tmp_path)
    for step in (1, 2, 3):
        ck.save(step, STATE)
    ck.restore(STATE, step=1)
    ck.save(2, STATE, overwrite=True)
    assert ck.latest() == 2
    assert find(f"{tmp_path}@latest") == step_name(2)
    (tmp_path / step_name(2) / "COMMIT").unlink()
    assert find(f"{tmp_path}@latest") == step_name(3)


def test_a_step_by_number_need_not_be_complete(run: Path) -> None:
    """`verify` and `repair` report what is wrong with it."""
    (run / step_name(200) / "COMMIT").unlink()
    assert find(f"{run}@200") == step_name(200)
    assert not shardckpt.verify(f"{run}@200").ok
    assert shardckpt.repair(f"{run}@200").written
    assert shardckpt.verify(f"{run}@200").ok


def test_the_best_step_needs_a_metric_that_is_sure(tmp_path: Path) -> None:
    two = write_run(tmp_path / "two", {"val/loss": 2.0, "acc": 0.1}, {"val/loss": 1.0, "acc": 0.9}, {})
    with pytest.raises(AmbiguousError, match=r"several metrics.*found acc, val/loss. Name one: @best:max:acc"):
        find(f"{two}@best")
    assert find(f"{two}@best:val/loss") == step_name(200), "the name of a metric may have a slash"
    with pytest.raises(AmbiguousError, match="found acc; expected @best:max:acc or @best:min:acc"):
        find(f"{two}@best:acc")
    assert find(f"{two}@best:min:acc") == step_name(100)
    with pytest.raises(UsageError, match="no step has a number for the metric 'foo'; found acc, val/loss"):
        find(f"{two}@best:foo")
    with pytest.raises(AmbiguousError, match="no step has a metric"):
        find(f"{write_run(tmp_path / 'none', {}, {})}@best")


def test_the_best_step_is_by_default_the_one_of_a_checkpointer(tmp_path: Path) -> None:
    root = write_run(tmp_path / "run", {"loss": 2.0, "acc": 0.1}, {"loss": 1.0, "acc": 0.9}, {"loss": 3.0, "acc": 1.0})
    assert shardckpt.Checkpointer(root).best() == 200
    assert find(f"{root}@best") == step_name(200)


def test_the_latest_step_is_refused_if_a_newer_version_wrote_it(run: Path) -> None:
    commit = run / step_name(300) / "COMMIT"
    line = json.dumps({**json.loads(commit.read_bytes().partition(b"\n")[0]), "features": ["new"]}).encode() + b"\n"
    commit.write_bytes(line + hashlib.sha256(line).hexdigest().encode() + b"\n")
    with pytest.raises(UnsupportedError, match="a version of shardckpt that this one cannot read"):
        shardckpt.Checkpointer(run).latest()
    with pytest.raises(UnsupportedError, match="a version of shardckpt that this one cannot read"):
        find(f"{run}@latest")
    assert find(f"{run}@200") == step_name(200)


@pytest.mark.parametrize("command", [["inspect"], ["ls"], ["verify"]])
def test_a_newer_damaged_step_is_named_as_restore_does(run: Path, command: list[str]) -> None:
    (run / step_name(300) / "COMMIT").write_text("junk")
    with pytest.warns(UserWarning, match="Newer step 300 is not used: .*COMMIT") as restored:
        assert shardckpt.Checkpointer(run).restore(STATE) == 200
    with pytest.warns(UserWarning, match=r"run@latest is step 200\. Newer step 300 is not used: ") as found:
        shardckpt.load(f"{run}@latest")
    assert str(restored[0].message).partition("Newer")[2] == str(found[0].message).partition("Newer")[2]
    assert "Newer step 300 is not used: " in run_here(*command, f"{run}@latest").err
    (run / step_name(300) / "COMMIT").unlink()
    assert find(f"{run}@latest") == step_name(200), "a step that is being saved is no fault"


def test_a_path_that_exists_wins(run: Path) -> None:
    write(run.parent / "run@latest", value=7.0)
    assert resolve_step(run.parent / "run@latest") == str(run.parent / "run@latest")
    shutil.copytree(run, run.parent / "a@b")
    assert find(f"{run.parent}/a@b@latest") == step_name(300)
    assert resolve_step(f"{run.parent}/a@b/{step_name(100)}").endswith(step_name(100))


@pytest.mark.parametrize(
    "url",
    [
        "sftp://me@host/run",
        "sftp://me@best:22/run",
        "sftp://me@host",
        "s3://a@b",
        "abfs://box@account.dfs/run",
        "a@b/c",
    ],
)
def test_an_at_before_the_last_part_is_no_suffix(url: str) -> None:
    assert split_step_suffix(url) is None
    assert resolve_step(url) == url


def test_a_suffix_of_a_url_is_found_behind_its_host() -> None:
    assert split_step_suffix("sftp://me@host/run@latest") is not None
    assert split_step_suffix("s3://bucket/run@best:val/loss") is not None


def test_steps_in_a_bucket_are_found(run: Path, bucket: str) -> None:
    shardckpt.copy(run, f"{bucket}/run")
    assert resolve_step(f"{bucket}/run@latest") == f"{bucket}/run/{step_name(300)}"
    assert resolve_step(f"{bucket}/run@best") == f"{bucket}/run/{step_name(200)}"


@pytest.mark.parametrize(
    "suffix", ["-1", "", "1..", "..1", "1..2..3", "9" * 19, "9" * 5000, "٣", "newest", "best:", "1 ", "+1", "1e3"]
)
def test_other_suffixes_of_a_run_are_refused(run: Path, suffix: str) -> None:
    with pytest.raises(UsageError, match=r"names no step of the run.*expected @latest, @best"):
        resolve_step(f"{run}@{suffix}")


def test_missing_steps_are_refused_with_those_that_exist(run: Path) -> None:
    with pytest.raises(SourceNotFoundError, match="step 7 is not in this run; found steps 100, 200, 300"):
        resolve_step(f"{run}@7")
    with pytest.raises(SourceNotFoundError, match="no step from 1 to 99 is in this run; found steps 100, 200, 300"):
        resolve_run(f"{run}@1..99")
    with pytest.raises(UsageError, match=r"first step of a range must not be after the last.*expected @100..200"):
        resolve_run(f"{run}@200..100")
    for number in (100, 200, 300):
        (run / step_name(number) / "COMMIT").unlink()
    with pytest.raises(NoCompleteCheckpoint, match="no step in this run is complete; found steps 100, 200, 300"):
        resolve_step(f"{run}@latest")


def test_what_is_no_run_is_refused(run: Path) -> None:
    with pytest.raises(SourceNotFoundError, match=r"nope: nothing is stored here"):
        resolve_step(f"{run.parent}/nope@latest")
    (run.parent / "file").touch()
    with pytest.raises(UsageError, match="this is a file"):
        resolve_step(f"{run.parent}/file@latest")
    (run.parent / "empty").mkdir()
    with pytest.raises(SourceNotFoundError, match="no step of a run is here"):
        resolve_step(f"{run.parent}/empty@latest")
    with pytest.raises(SourceNotFoundError, match=r"no step of a run is here; found .*COMMIT"):
        resolve_step(f"{run}/{step_name(100)}@latest")


def test_folders_of_accelerate_are_steps_of_a_run(tmp_path: Path) -> None:
    state_folders = pytest.importorskip("shardckpt.integrations.accelerate.state_folders")
    assert state_folders.STEP == NESTED_STEP
    for number in (0, 9, 10):
        write(tmp_path / "project" / "checkpoints" / f"checkpoint_{number}" / NESTED_STEP)
    for root in ("project", "project/checkpoints"):
        assert resolve_step(f"{tmp_path}/{root}@latest").endswith(f"checkpoint_10/{NESTED_STEP}")
        assert resolve_step(f"{tmp_path}/{root}@9").endswith(f"checkpoint_9/{NESTED_STEP}")
    write(tmp_path / "project" / "checkpoints" / "epoch_1" / NESTED_STEP)
    with pytest.raises(AmbiguousError, match="found checkpoint_N, epoch_N"):
        resolve_step(f"{tmp_path}/project@latest")


def test_steps_of_lightning_are_found_below_its_version(run: Path) -> None:
    shutil.copytree(run, run.parent / "version_0" / "checkpoints")
    assert find(f"{run.parent}/version_0@latest") == step_name(300)


VERBS: dict[str, Callable[[str, Path], Any]] = {
    "load": lambda src, _: shardckpt.load(src),
    "open": lambda src, _: shardckpt.open(src)["w"][...],
    "open arrays": lambda src, _: shardckpt.open(src, framework="numpy")["w"][...],
    "consolidate": lambda src, out: shardckpt.consolidate(src, out, part="all"),
    "convert": lambda src, out: shardckpt.convert(src, out, part="all"),
    "reshard": lambda src, out: shardckpt.reshard(src, out, world_size=2),
    "inspect": lambda src, _: shardckpt.inspect(src),
    "diff": lambda src, _: shardckpt.diff(src, src),
    "stats": lambda src, _: shardckpt.stats(src),
    "repair": lambda src, _: shardckpt.repair(src),
    "verify": lambda src, _: shardckpt.verify(src),
    "copy": shardckpt.copy,
}


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_takes_a_step_of_a_run(run: Path, verb: str) -> None:
    found = VERBS[verb](f"{run}@best", run.parent / "out")
    source = getattr(found, "source", getattr(found, "a", None))
    assert source in (None, f"{run}/{step_name(200)}"), "the result names the step"
    if verb in ("load", "open", "open arrays"):
        value = found["w"] if verb == "load" else found
        assert value.tolist() == [2.0] * 4


@pytest.mark.parametrize("verb", sorted(VERBS.keys() - {"verify", "copy"}))
def test_a_range_is_refused_where_one_step_is_needed(run: Path, verb: str) -> None:
    with pytest.raises(UsageError, match=r"takes one step; found @100..200"):
        VERBS[verb](f"{run}@100..200", run.parent / "out")


def list_numbers(found: Any) -> list[int]:
    return [getattr(step, "number", step) for step in found]


def test_verbs_for_runs_take_some_of_its_steps(run: Path) -> None:
    some = f"{run}@100..200"
    assert list_numbers(shardckpt.ls(some).complete) == [100, 200]
    assert list_numbers(shardckpt.ls(f"{run}@latest").complete) == [300]
    durable = shardckpt.ls(some, durability=True).durability
    assert durable is not None
    assert [each.step for each in durable] == [100, 200]
    assert list_numbers(shardckpt.history(some).steps) == [100, 200]
    assert list_numbers(shardckpt.prove(some).steps) == [100, 200]
    first = shardckpt.bisect(some, when="max>1.5").first
    assert first is not None
    assert first.number == 200
    assert shardckpt.bisect(f"{run}@100", when="max>1.5").first is None


def test_copy_takes_a_step_or_a_range(run: Path) -> None:
    assert shardckpt.copy(f"{run}@100..200", run.parent / "some").copied == (step_name(100), step_name(200))
    shardckpt.copy(f"{run}@200", run.parent / "one")
    assert shardckpt.diff(run.parent / "one", f"{run}@200").same
    assert not os.path.exists(run.parent / "one" / step_name(200))


def test_verify_reports_each_step_of_a_range(run: Path) -> None:
    one = shardckpt.verify(f"{run}@100")
    both = shardckpt.verify(f"{run}@100..200")
    assert (both.ok, both.checked_bytes, both.tensor_count) == (True, 2 * one.checked_bytes, 2)
    (payload,) = (run / step_name(200)).glob("*-00.safetensors")
    data = bytearray(payload.read_bytes())
    data[-1] ^= 1
    payload.write_bytes(data)
    wrong = shardckpt.verify(f"{run}@100..300")
    assert [problem.file for problem in wrong.problems] == [f"{step_name(200)}/{payload.name}"]


def test_prune_removes_the_steps_that_a_path_names(run: Path) -> None:
    with pytest.raises(UsageError, match="a path with an @ and rules exclude each other; found `keep_last`"):
        shardckpt.prune(f"{run}@100..200", keep_last=1)
    typed = run_here("prune", f"{run}@best", "--keep-last", 1, "--keep-every", 2)
    text = "a path with an @ and rules exclude each other; found --keep-last, --keep-every. Pass one of them."
    assert (typed.code, typed.err) == (2, f"shardckpt: {text}\n")
    with pytest.raises(UsageError, match="exclude each other"):
        shardckpt.prune(f"{run}@100", steps=[200])
    assert list_numbers(shardckpt.prune(f"{run}@100..200", dry_run=True).removed) == [100, 200]
    assert list_numbers(shardckpt.prune(f"{run}@100").removed) == [100]
    assert list_numbers(shardckpt.prune(f"{run}@latest").removed) == [], "the newest step always stays"
    assert list_numbers(shardckpt.ls(run).complete) == [200, 300]


def test_a_range_of_a_checkpoint_is_the_checkpoint(run: Path) -> None:
    assert resolve_range(run).is_all
    assert resolve_range(f"{run}@latest").path == f"{run}/{step_name(300)}"
    assert resolve_run(f"{run}@latest").has_step(300)
    assert not resolve_run(f"{run}@latest").has_step(200)


def test_events_name_the_loaded_step(run: Path) -> None:
    events: list[Any] = []
    shardckpt.load(f"{run}@best", on_event=events.append)
    shardckpt.load({"w": torch.zeros(4)}, f"{run}@best", on_event=events.append)
    assert [event.path for event in events] == [f"{run}/{step_name(200)}"] * 2


def test_rank_0_finds_the_step_for_all_ranks(run: Path) -> None:
    def body(rank: int, world: int) -> list[float]:
        if rank:
            monkeypatch = pytest.MonkeyPatch()
            monkeypatch.setattr(load_module, "resolve_step", lambda path: pytest.fail("only rank 0 looks"))
        shardckpt.load(state := {"w": torch.zeros(4)}, f"{run}@best")
        return [float(value) for value in state["w"]]

    assert run_ranks(2, body) == [[2.0] * 4] * 2


def test_ranks_with_different_paths_all_raise(run: Path) -> None:
    paths = [f"{run}@best", f"{run}@latest"], [f"{run}@best", str(run / step_name(200))]
    for first, second in (*paths, paths[1][::-1]):

        def body(rank: int, world: int, first: str = first, second: str = second) -> None:
            shardckpt.load({"w": torch.zeros(4)}, second if rank else first)

        assert len(raised_everywhere(2, body)) == 2


def test_paths_of_other_types_are_refused() -> None:
    for path in (None, 3, b"run@latest"):
        with pytest.raises(ShardckptError, match="must be a path or a URL"):
            resolve_step(path)  # type: ignore[arg-type]
