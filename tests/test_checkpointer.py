"""The steps of a run: the newest complete one is restored, the only good one is never removed, ranks agree."""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import pickle
import shutil
import signal
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import get_args, get_type_hints
from uuid import uuid4

import boto3
import fsspec
import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file

import shardckpt
from shardckpt import Checkpointer
from shardckpt.checkpoint.run import step_finder, step_restore, step_saver
from shardckpt.checkpoint.save.async_save import AsyncSaveParams
from shardckpt.checkpoint.save.save import SaveParams
from shardckpt.errors import (
    NoCompleteCheckpoint,
    RankError,
    SourceNotFoundError,
    StorageError,
    TargetExistsError,
    UnknownFormatError,
    UnsupportedError,
    UsageError,
)
from shardckpt.native import apply_retention
from shardckpt.native import run_directory as steps
from shardckpt.native.run_directory import RECORD, delete_steps, read_about, read_measures, read_run, step_name
from shardckpt.native.run_record import read_run_record
from shardckpt.plan import retention
from shardckpt.storage import retry
from shardckpt.storage.fsspec_store import FsspecStore
from shardckpt.storage.local import LocalStore, LocalWriter
from shardckpt.storage.resolve_url import open_store
from tests.kit.ranks.forks import is_killed
from tests.kit.ranks.harness import outcomes, raised_everywhere, run
from tests.kit.runs.command import run_here
from tests.kit.stores.bucket import Bucket, Dead, broken_at
from tests.kit.stores.clocks import days_pass
from tests.kit.stores.disk import killing_at
from tests.kit.writers.native_writer import write_step

DAY = 24 * 3600.0


def state(value: float = 0.0) -> dict:
    return {"w": torch.full((300,), value), "step": int(value)}


def saved(ck: Checkpointer, *steps: int, **options) -> Checkpointer:
    for number in steps:
        ck.save(number, state(float(number)), **options)
    return ck


def restored(ck: Checkpointer, **options) -> tuple[int | None, float]:
    """Restore without a warning; return the step and what the tensor holds."""
    into = state()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step = ck.restore(into, **options)
    assert into["w"].unique().tolist() == [float(into["step"])]
    return step, into["step"]


def folder(root: object, step: int) -> Path:
    return Path(str(root)) / step_name(step)


def payload(root: object, step: int) -> Path:
    return next(path for path in folder(root, step).iterdir() if path.suffix == ".safetensors")


def flip(path: Path) -> None:
    """Flip a bit in the data, which stands at the end of a payload file."""
    data = bytearray(path.read_bytes())
    data[-10] ^= 1
    path.write_bytes(data)


class TestSaveAndRestore:
    def test_what_was_saved_last_comes_back(self, tmp_path):
        ck = saved(Checkpointer(tmp_path / "run"), 1000, 2000)
        assert sorted(os.listdir(ck.root)) == ["step-00001000", "step-00002000"]
        assert ck.path(2000) == f"{ck.root}/step-00002000"
        assert shardckpt.verify(ck.path(2000)).ok
        assert (ck.steps(), ck.latest()) == ((1000, 2000), 2000)
        assert restored(ck) == (2000, 2000)
        assert restored(Checkpointer(f"{ck.root}/")) == (2000, 2000)

    def test_where_nothing_was_ever_saved_there_is_none(self, tmp_path):
        for root in (tmp_path / "nowhere", tmp_path):
            ck = Checkpointer(root)
            assert restored(ck) == (None, 0)
            assert (ck.steps(), ck.latest()) == ((), None)
        assert not (tmp_path / "nowhere").exists()

    def test_a_step_is_chosen_by_number(self, tmp_path):
        ck = saved(Checkpointer(tmp_path), 1, 2, 3)
        assert restored(ck, step=2) == (2, 2)
        with pytest.raises(NoCompleteCheckpoint, match="step 7 is not complete"):
            ck.restore(state(), step=7)

    def test_options_reach_save_and_load(self, tmp_path):
        ck = saved(Checkpointer(tmp_path), 1, checksums=False, custom_metadata={"by": "me"})
        store = LocalStore(ck.root)
        assert read_about(store, read_run(store).steps[0])["by"] == "me"
        flip(payload(ck.root, 1))
        assert ck.restore(state()) == 1, "no checksums, nothing to notice"
        assert ck.restore({"w": torch.zeros(300)}, strict=False) == 1

    def test_numbers_of_steps_are_integers_of_any_kind(self, tmp_path):
        ck = Checkpointer(tmp_path)
        ck.save(np.int64(7), state(7.0))
        assert restored(ck) == (7, 7)

    @pytest.mark.parametrize("step", [-1, 1.0, "1", True, None, 10**18])
    def test_nothing_else_is_a_step(self, step, tmp_path):
        ck = Checkpointer(tmp_path)
        with pytest.raises(UsageError, match="step number must be an integer"):
            ck.save(step, state())
        with pytest.raises(UsageError, match="step number must be an integer"):
            ck.path(step)

    @pytest.mark.parametrize("metrics", [[1], {"loss": "high"}, {"loss": None}], ids=repr)
    def test_a_metric_that_is_no_number_is_refused(self, metrics, tmp_path):
        with pytest.raises(UsageError, match=r"a metric must be a number|must be numbers by name"):
            Checkpointer(tmp_path).save(1, state(), metrics=metrics)

    def test_a_file_is_no_run(self, tmp_path):
        (tmp_path / "run").write_text("mine")
        ck = Checkpointer(tmp_path / "run")
        for call in (lambda: ck.restore(state()), ck.steps, lambda: ck.save(1, state())):
            with pytest.raises(UsageError, match="a run's folder must not be a file"):
                call()

    def test_a_run_is_never_replaced_by_a_step(self, tmp_path):
        ck = saved(Checkpointer(tmp_path / "run"), 1, 2)
        with pytest.raises(TargetExistsError, match="step-00000001/, step-00000002/"):
            shardckpt.save(state(), ck.root, overwrite=True)
        assert ck.steps() == (1, 2)

    def test_a_state_in_place_of_a_path_is_named_but_not_in_place_of_none(self):
        with pytest.raises(UsageError, match=r"found an object of type dict\. .*a state goes before it"):
            shardckpt.save("step", state())
        with pytest.raises(UsageError, match=r"NoneType\. Name a file, a folder or a URL as text\."):
            Checkpointer(None)

    @pytest.mark.parametrize("root", ["memory://", "s3://", "s3:///", 5, None, "", "a\0b"], ids=repr)
    def test_a_root_that_is_no_place_is_refused(self, root):
        with pytest.raises(UsageError, match=r"names no place|must be a path|must not be empty|a NUL character"):
            Checkpointer(root)

    @pytest.mark.parametrize(
        "wrong",
        [
            {"keep_last": 0},
            {"save_every": 0},
            {"keep_for": -1},
            {"keep_for": "0d"},
            {"keep_for": timedelta(days=-1)},
            {"keep_for": True},
            {"keep_for": [1]},
            {"mode": "most"},
            {"metric": 5},
        ],
        ids=repr,
    )
    def test_a_rule_that_means_nothing_is_refused(self, wrong, tmp_path):
        with pytest.raises(UsageError, match=next(iter(wrong))):
            Checkpointer(tmp_path, **wrong)

    def test_a_step_that_is_there_is_replaced_only_when_asked(self, tmp_path):
        ck = saved(Checkpointer(tmp_path), 1)
        with pytest.raises(TargetExistsError):
            ck.save(1, state(5.0))
        assert restored(ck) == (1, 1)
        ck.save(1, state(5.0), overwrite=True)
        assert restored(ck) == (1, 5)

    def test_a_failed_save_leaves_the_steps_as_they_were(self, tmp_path):
        ck = saved(Checkpointer(tmp_path, keep_last=1), 1)
        with pytest.raises(TypeError, match="thing"):
            ck.save(2, {"thing": object()})
        with pytest.raises(UsageError, match=r"loss: a metric must be a number; found .*'low'"):
            ck.save(2, state(), metrics={"loss": "low"})
        with pytest.raises(UsageError, match=r"`metrics` must be numbers by name; found \[0\.5\]"):
            ck.save(2, state(), metrics=[0.5])
        assert os.listdir(ck.root) == [step_name(1)]


def trainer_folder(root: Path) -> None:
    """Lay out the `output_dir` of a transformers Trainer."""
    for number in (50, 100):
        place = root / f"checkpoint-{number}"
        place.mkdir(parents=True)
        save_file({"w": torch.ones(3)}, place / "model.safetensors", metadata={"format": "pt"})
        (place / "config.json").write_text("{}")
        (place / "trainer_state.json").write_text("{}")


def lightning_folder(root: Path) -> None:
    root.mkdir(exist_ok=True)
    torch.save({"state_dict": {"w": torch.ones(3)}, "pytorch-lightning_version": "2.5"}, root / "epoch=0-step=9.ckpt")


def one_step(root: Path) -> None:
    saved(Checkpointer(root.parent / "of"), 1)
    folder(root.parent / "of", 1).rename(root)


def several_runs(root: Path) -> None:
    saved(Checkpointer(root / "a"), 1)
    saved(Checkpointer(root / "b"), 7)


def lightning_root(root: Path) -> None:
    lightning_folder(make_folder(root / "lightning_logs" / "version_0" / "checkpoints"))


def make_folder(path: Path) -> Path:
    path.mkdir(parents=True)
    return path


class TestTheWorkingDirectoryChanges:
    """A relative root is the folder that it named when the Checkpointer was made."""

    @pytest.mark.parametrize("root", ["run", "file://run", Path("./run")])
    @pytest.mark.parametrize("has_tier", [False, True])
    def test_all_steps_are_in_one_folder(self, tmp_path, monkeypatch, root, has_tier):
        monkeypatch.chdir(tmp_path)
        (tmp_path / "elsewhere").mkdir()
        tiers = [shardckpt.Local("tier")] if has_tier else []
        ck = Checkpointer(root, save_every=2, keep_last=2, tiers=tiers)
        for step in range(1, 8):
            ck.save(step, state(float(step)))
            monkeypatch.chdir(tmp_path / ("elsewhere" if step % 2 else ""))
        ck.wait()
        assert os.listdir(tmp_path / "elsewhere") == []
        newest = (4, 6) if has_tier else (6, 7)
        assert ck.steps() == Checkpointer(tmp_path / "run").steps() == newest
        assert restored(ck) == (7, 7.0)


class TestOtherFolders:
    """`latest() or 0` must not start over because somebody named the wrong folder."""

    @pytest.mark.parametrize(
        ("lay_out", "says"),
        [
            (trainer_folder, "checkpoint-100"),
            (lightning_folder, "ckpt|Lightning|torch"),
            (one_step, "shardckpt"),
            (several_runs, r"found a \(a run\), b \(a run\)"),
            (lightning_root, "lightning_logs/version_0/checkpoints"),
        ],
    )
    def test_a_checkpoint_that_is_no_step_is_told(self, lay_out, says, tmp_path):
        root = tmp_path / "run"
        lay_out(root)
        ck = Checkpointer(root)
        for call in (ck.latest, ck.steps, lambda: ck.restore(state()), lambda: shardckpt.prune(root)):
            with pytest.raises(UsageError, match=f"({says})|this is a step"):
                call()
        assert run_here("ls", root).code == 2

    def test_a_first_step_that_is_completed_between_two_looks_is_no_other_checkpoint(self, tmp_path, monkeypatch):
        root = tmp_path / "run"
        root.mkdir()
        ck = Checkpointer(root)
        look = step_finder.read_run

        def save_after_look(store):
            run = look(store)
            monkeypatch.setattr(step_finder, "read_run", look)
            saved(Checkpointer(root), 1)
            return run

        monkeypatch.setattr(step_finder, "read_run", save_after_look)
        assert ck.steps() == ()
        assert ck.steps() == (1,)

    def test_runs_below_a_url_are_told(self):
        root = f"memory://{uuid4().hex}"
        saved(Checkpointer(f"{root}/team/a"), 1)
        with pytest.raises(UnknownFormatError, match=r"no step of a run is here; found team/a \(a run\)") as err:
            Checkpointer(root).restore(state())
        assert "Other checkpoints are read by shardckpt.load and `shardckpt inspect`" in str(err.value)
        assert Checkpointer(f"{root}/team/c").restore(state()) is None

    def test_logs_and_settings_may_lie_there_before_the_first_step(self, tmp_path):
        (tmp_path / "logs").mkdir()
        (tmp_path / "config.yaml").write_text("lr: 1")
        ck = Checkpointer(tmp_path)
        assert (restored(ck), ck.latest()) == ((None, 0), None)
        found = run_here("ls", tmp_path)
        assert (found.code, found.out) == (2, "")
        assert "this folder contains no step of a run; found config.yaml, logs" in found.err

    def test_a_parent_that_is_a_file_is_told(self, tmp_path):
        (tmp_path / "file").write_text("mine")
        with pytest.raises(UsageError, match="a folder above the run is a file"):
            Checkpointer(tmp_path / "file" / "sub" / "run").restore(state())
        assert restored(Checkpointer(tmp_path / "no" / "such" / "run")) == (None, 0)


def test_type_checkers_see_the_options_that_are_passed_on() -> None:
    named = inspect.signature(shardckpt.load).parameters.keys() - {"state", "path"}
    for verb, names in (
        (Checkpointer.restore, named),
        (Checkpointer.save, SaveParams.__annotations__.keys()),
        (Checkpointer.async_save, AsyncSaveParams.__annotations__.keys()),
    ):
        assert get_args(get_type_hints(verb, include_extras=True)["options"])[0].__annotations__.keys() == names


def test_a_bucket_that_does_not_exist_is_told(s3_bucket):
    assert restored(Checkpointer(f"{s3_bucket}/runs/a")) == (None, 0)
    missing = Checkpointer("s3://there-is-no-such-bucket/runs/a")
    for call in (missing.latest, lambda: missing.restore(state())):
        with pytest.raises(SourceNotFoundError, match="bucket does not exist"):
            call()


@pytest.mark.parametrize("verb", ["load", "open", "ls", "inspect", "verify", "copy", "save"])
def test_every_verb_names_a_bucket_that_does_not_exist(verb, s3_bucket, tmp_path):
    url = "s3://there-is-no-such-bucket/runs/a"
    arguments = {"copy": (url, tmp_path / "to"), "save": (state(), url)}.get(verb, (url,))
    with pytest.raises(FileNotFoundError, match=r"s3://there-is-no-such-bucket.*bucket does not exist"):
        getattr(shardckpt, verb)(*arguments)


class TestIncompleteSteps:
    def test_one_that_was_never_committed_does_not_exist(self, tmp_path):
        ck = saved(Checkpointer(tmp_path), 1, 2)
        (folder(ck.root, 2) / "COMMIT").unlink()
        assert ck.latest() == 1
        with pytest.warns(
            UserWarning,
            match=r"restored step 1 from the root\. Newer step 2 is not used: .*step-00000002.*never committed",
        ):
            assert ck.restore(state()) == 1

    def test_a_name_alone_is_no_step(self, tmp_path):
        ck = saved(Checkpointer(tmp_path), 1)
        folder(ck.root, 9).mkdir()
        assert ck.latest() == 1

    @pytest.mark.parametrize("what", ["no commit", "torn commit", "file gone", "empty"])
    def test_where_none_is_complete_that_is_told(self, what, tmp_path):
        ck = saved(Checkpointer(tmp_path), 1, 2)
        for number in (1, 2):
            commit = folder(ck.root, number) / "COMMIT"
            if what == "torn commit":
                commit.write_bytes(commit.read_bytes()[:-5])
            elif what == "file gone":
                payload(ck.root, number).unlink()
            else:
                for path in folder(ck.root, number).iterdir() if what == "empty" else [commit]:
                    path.unlink()
        assert ck.steps() == ()
        into = state(7.0)
        with pytest.raises(
            NoCompleteCheckpoint, match=r"no step here is complete.*step-00000002.*step-00000001"
        ) as caught:
            ck.restore(into)
        assert isinstance(caught.value, FileNotFoundError)
        assert into["step"] == 7

    @pytest.mark.parametrize("what", ["no commit", "torn commit", "file gone"])
    def test_such_a_step_is_saved_anew(self, what, tmp_path):
        ck = saved(Checkpointer(tmp_path), 1)
        commit = folder(ck.root, 1) / "COMMIT"
        if what == "torn commit":
            commit.write_bytes(commit.read_bytes()[:-5])
        else:
            (commit if what == "no commit" else payload(ck.root, 1)).unlink()
        ck.save(1, state(9.0))
        assert restored(ck) == (1, 9)

    def test_what_somebody_else_keeps_under_its_name_is_not_touched(self, tmp_path):
        ck = Checkpointer(tmp_path)
        folder(ck.root, 1).mkdir()
        (folder(ck.root, 1) / "thesis.txt").write_text("mine")
        with pytest.raises(TargetExistsError):
            ck.save(1, state())
        assert (folder(ck.root, 1) / "thesis.txt").read_text() == "mine"


def make_newer(folder: Path, kind: str) -> None:
    """Turn a step into one of a later version, or with a feature that nobody here knows."""
    line = json.loads((folder / "COMMIT").read_text().splitlines()[0])
    line |= {"version": {"version": 2}, "pair": {"version": [1, 0]}}.get(kind, {"features": ["compression"]})
    raw = (json.dumps(line, separators=(",", ":")) + "\n").encode()
    (folder / "COMMIT").write_bytes(raw + hashlib.sha256(raw).hexdigest().encode() + b"\n")


SAYS = {
    "version": "version 2 of the format",
    "pair": r"version \[1, 0\] of the format",
    "feature": "feature 'compression'",
}


@pytest.mark.parametrize("kind", ["version", "pair", "feature"])
class TestStepsOfANewerVersion:
    """A step that this version cannot read is a step: nothing replaces, removes or silently passes over it."""

    @pytest.fixture
    def root(self, kind: str, tmp_path: Path) -> Path:
        """Steps 1 and 2, of which a newer version wrote the second."""
        saved(Checkpointer(tmp_path), 1, 2)
        make_newer(folder(tmp_path, 2), kind)
        return tmp_path

    @pytest.fixture(autouse=True)
    def untouched(self, root: Path) -> Iterator[None]:
        before = {path.name: path.read_bytes() for path in folder(root, 2).iterdir()}
        yield
        assert {path.name: path.read_bytes() for path in folder(root, 2).iterdir()} == before

    @pytest.mark.parametrize("call", ["latest", "steps", "best", "restore", "restore it"])
    def test_it_is_not_passed_over(self, call: str, kind: str, root: Path) -> None:
        ck = Checkpointer(root)
        calls = {
            "latest": ck.latest,
            "steps": ck.steps,
            "best": ck.best,
            "restore": lambda: ck.restore(state()),
            "restore it": lambda: ck.restore(state(), step=2),
        }
        with pytest.raises(UnsupportedError, match=SAYS[kind]):
            calls[call]()

    def test_others_can_be_restored_and_newer_ones_found(self, root: Path) -> None:
        ck = Checkpointer(root)
        assert restored(ck, step=1) == (1, 1)
        saved(ck, 3)
        assert (ck.steps(), ck.latest(), restored(ck)) == ((1, 3), 3, (3, 3))

    def test_nor_is_it_passed_over_where_the_newer_ones_are_damaged(self, kind: str, root: Path) -> None:
        saved(Checkpointer(root), 3)
        flip(payload(root, 3))
        with pytest.raises(UnsupportedError, match=SAYS[kind]):
            Checkpointer(root).restore(state())

    @pytest.mark.parametrize("overwrite", [False, True])
    def test_no_save_replaces_it(self, overwrite: bool, kind: str, root: Path) -> None:
        with pytest.raises(TargetExistsError, match=SAYS[kind]):
            Checkpointer(root).save(2, state(7.0), overwrite=overwrite)

    def test_nothing_is_removed_beside_it_since_it_may_refer_to_any_other(self, kind: str, root: Path) -> None:
        with pytest.warns(UserWarning, match=rf"step 3 is saved, but old ones could not be removed.*{SAYS[kind]}"):
            saved(Checkpointer(root, keep_last=1), 3)
        with pytest.raises(UnsupportedError, match=SAYS[kind]):
            shardckpt.prune(root, keep_last=1)
        assert sorted(os.listdir(root)) == [step_name(n) for n in (1, 2, 3)]

    def test_nor_are_the_leftovers_of_dead_saves(self, kind: str, root: Path, monkeypatch) -> None:
        (folder(root, 1) / "COMMIT").unlink()
        now = time.time
        monkeypatch.setattr(time, "time", lambda: now() + 2 * DAY)
        with pytest.raises(UnsupportedError, match=SAYS[kind]):
            shardckpt.prune(root)
        saved(Checkpointer(root), 3)
        assert folder(root, 1).exists()

    def test_a_step_that_is_replaced_beside_it_keeps_its_files(self, root: Path) -> None:
        file = payload(root, 1).name
        Checkpointer(root).save(1, state(5.0), overwrite=True)
        assert file in os.listdir(folder(root, 1))
        assert restored(Checkpointer(root), step=1) == (1, 5)


class TestDamagedSteps:
    def test_the_step_before_is_restored_and_a_warning_says_so(self, tmp_path):
        ck = saved(Checkpointer(tmp_path), 1, 2, 3)
        flip(payload(ck.root, 3))
        into = state()
        with pytest.warns(
            UserWarning,
            match=r"restored step 2 from the root\. Newer step 3 is not used: .*step-00000003/.*safetensors.*block 0",
        ) as told:
            assert ck.restore(into) == 2
        assert into["w"].unique().tolist() == [2.0]
        assert "filled in part" not in str(told[0].message), "the step before has filled it"

    def test_a_root_that_takes_no_record_takes_steps(self, tmp_path, caplog):
        (tmp_path / RECORD).mkdir()
        assert saved(Checkpointer(tmp_path), 1, 2).steps() == (1, 2)
        assert "cannot be recorded" in caplog.text

    def test_a_restore_is_recorded_although_its_warning_is_an_error(self, tmp_path):
        ck = saved(Checkpointer(tmp_path, max_failed_restores=2), 1, 2, 3)
        flip(payload(ck.root, 3))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(UserWarning, match="restored step 2"):
                ck.restore(state())
        assert [start.restored for start in read_run_record(LocalStore(tmp_path)).starts] == [(0, 2)]

    def test_so_is_the_one_before_that(self, tmp_path):
        ck = saved(Checkpointer(tmp_path), 1, 2, 3)
        flip(payload(ck.root, 3))
        next(path for path in folder(ck.root, 2).iterdir() if path.name.endswith(".manifest.json")).write_text("{}")
        with pytest.warns(UserWarning, match="restored step 1"):
            assert ck.restore(state()) == 1

    def test_where_all_are_damaged_there_is_none(self, tmp_path):
        ck = saved(Checkpointer(tmp_path), 1, 2)
        for number in (1, 2):
            flip(payload(ck.root, number))
        with pytest.raises(NoCompleteCheckpoint, match=r"block 0.*filled in part"):
            ck.restore(state())

    def test_a_step_that_was_asked_for_is_not_replaced_by_another(self, tmp_path):
        ck = saved(Checkpointer(tmp_path), 1, 2)
        flip(payload(ck.root, 2))
        with pytest.raises(shardckpt.errors.ChecksumError):
            ck.restore(state(), step=2)

    def test_a_state_that_does_not_fit_is_no_damage(self, tmp_path):
        ck = saved(Checkpointer(tmp_path), 1)
        ck.save(2, {"other": torch.ones(3)})
        with pytest.raises(UsageError, match="does not fit"):
            ck.restore(state())

    @pytest.mark.parametrize("error", [RankError("rank 3 is gone"), StorageError("no network"), ZeroDivisionError()])
    def test_nor_is_a_rank_that_is_gone_or_storage_that_does_not_answer(self, error, tmp_path, monkeypatch):
        def failing(*_: object, **__: object) -> None:
            raise error

        ck = saved(Checkpointer(tmp_path), 1, 2)
        monkeypatch.setattr(step_restore, "load", failing)
        with pytest.raises(type(error)) as caught:
            ck.restore(state())
        assert caught.value is error

    def test_an_older_one_is_nobodys_business(self, tmp_path):
        ck = saved(Checkpointer(tmp_path), 1, 2)
        (folder(ck.root, 1) / "COMMIT").unlink()
        assert restored(ck) == (2, 2)

    def test_it_is_saved_anew_when_training_gets_there_again(self, tmp_path):
        ck = saved(Checkpointer(tmp_path), 1, 2)
        flip(payload(ck.root, 2))
        with pytest.warns(UserWarning, match="restored step 1"):
            ck.restore(state())
        ck.save(2, state(9.0))
        assert restored(ck) == (2, 9)

    def test_it_takes_no_place_of_a_good_one(self, tmp_path):
        ck = saved(Checkpointer(tmp_path, keep_last=2), 1, 2, 3)
        flip(payload(ck.root, 3))
        with pytest.warns(UserWarning, match="restored step 2"):
            ck.restore(state())
        ck.save(4, state(4.0))
        assert {2, 4} <= set(ck.steps())


def test_a_step_that_retention_is_removing_is_no_withdrawn_claim(tmp_path, monkeypatch):
    events: list[shardckpt.events.OperationEvent] = []
    ck = saved(Checkpointer(tmp_path, keep_last=1, on_event=events.append), 1)
    assert ck.durability(1).copies
    delete = apply_retention.delete_steps

    def delete_and_ask(*given):
        deleted = delete(*given)
        assert not ck.durability(1).copies
        return deleted

    monkeypatch.setattr(apply_retention, "delete_steps", delete_and_ask)
    saved(ck, 2)
    assert [*ck.steps()] == [2]
    assert "withdrawal" not in [event.operation for event in events]


class TestBesideATrainer:
    """Another process saves the next step and removes the last one, before what was found is loaded."""

    def moving(self, root: Path, monkeypatch: pytest.MonkeyPatch, turns: int) -> list[str]:
        trainer, load = saved(Checkpointer(root, keep_last=1), 1), step_restore.load
        loads: list[str] = []

        def late(into: object, path: str, **options: object) -> None:
            loads.append(path)
            if len(loads) <= turns:
                saved(trainer, 1 + len(loads))
            load(into, path, **options)

        monkeypatch.setattr(step_restore, "load", late)
        return loads

    @pytest.mark.parametrize("turns", [1, 3])
    def test_a_newer_step_is_restored_where_the_one_that_was_found_has_gone(self, turns, tmp_path, monkeypatch):
        loads = self.moving(tmp_path, monkeypatch, turns)
        ck = Checkpointer(tmp_path)
        assert restored(ck) == (turns + 1, turns + 1)
        assert len(loads) == turns + 1
        assert not ck._finder.damaged, "what was removed is not damaged"

    def test_that_has_an_end(self, tmp_path, monkeypatch):
        monkeypatch.setattr(step_restore, "_LOOKS", 4)
        loads = self.moving(tmp_path, monkeypatch, 100)
        with pytest.raises(NoCompleteCheckpoint):
            Checkpointer(tmp_path).restore(state())
        assert len(loads) == 4

    def test_a_damaged_step_is_loaded_once(self, tmp_path, monkeypatch):
        loads = self.moving(tmp_path, monkeypatch, 0)
        saved(Checkpointer(tmp_path), 2, 3)
        flip(payload(tmp_path, 3))
        with pytest.warns(UserWarning, match="restored step 2"):
            Checkpointer(tmp_path).restore(state())
        assert [os.path.basename(path) for path in loads] == [step_name(3), step_name(2)]


class TestRetention:
    def test_the_last_ones_and_every_so_often_stay(self, tmp_path):
        ck = saved(Checkpointer(tmp_path, keep_last=2, keep_every=3), *range(1, 9))
        assert ck.steps() == (3, 6, 7, 8)
        assert sorted(os.listdir(ck.root)) == [step_name(n) for n in ck.steps()]

    def test_without_a_rule_all_stay(self, tmp_path):
        assert saved(Checkpointer(tmp_path), 1, 2, 3).steps() == (1, 2, 3)

    def test_the_best_stay_after_a_restart_too(self, tmp_path):
        losses = {1: 3.0, 2: 1.0, 3: float("nan"), 4: 2.0, 5: 5.0}
        for number, loss in losses.items():
            ck = Checkpointer(tmp_path, keep_best=2)
            ck.save(number, state(float(number)), metrics={"loss": torch.tensor(loss), "accuracy": 0.5})
        assert ck.steps() == (2, 4, 5)
        ck = Checkpointer(tmp_path, keep_best=1, metric="accuracy", mode="max")
        ck.save(6, state(6.0), metrics={"accuracy": 0.1})
        assert ck.steps() == (5, 6), "of equals the later; the newest always stays"

    def test_manifests_are_read_once_for_it(self, tmp_path, monkeypatch):
        read = []
        monkeypatch.setattr(steps, "read_measures", lambda *a: (read.append(a[1].number), read_measures(*a))[1])
        ck = Checkpointer(tmp_path, keep_best=9)
        for number in range(1, 5):
            ck.save(number, state(), metrics={"loss": 1.0})
        assert read == [1, 2, 3, 4]

    def test_a_metric_that_no_step_has_is_an_error_and_loses_nothing(self, tmp_path):
        for number, accuracy in ((1, 0.9), (2, 0.8)):
            Checkpointer(tmp_path).save(number, state(float(number)), metrics={"accuracy": accuracy})
        ck = Checkpointer(tmp_path, keep_best=1, keep_last=1, metric="acc", mode="max")
        with pytest.raises(UsageError, match=r"step 3 is saved.*metric 'acc', which no step has; found accuracy"):
            ck.save(3, state(3.0), metrics={"accuracy": 0.7})
        assert restored(ck) == (3, 3)
        with pytest.raises(UsageError, match="step 4 is saved"):
            ck.async_save(4, state(4.0), metrics={"accuracy": 0.7})
        assert (ck.steps(), restored(ck)) == ((1, 2, 3, 4), (4, 4))
        with pytest.warns(UserWarning, match=r"step 5 is saved, but old ones could not be removed.*found accuracy"):
            ck.save(5, state(5.0))
        assert ck.steps() == (1, 2, 3, 4, 5)

    def test_metrics_that_come_with_some_steps_alone_rank_those(self, tmp_path):
        ck = Checkpointer(tmp_path, keep_best=1)
        ck.save(1, state(), metrics={"loss": 1.0, "other": 2.0})
        ck.save(2, state(), metrics={"other": 2.0})
        ck.save(3, state())
        ck.save(4, state(), metrics={"loss": 0.5})
        assert ck.steps() == (2, 3, 4)
        assert saved(Checkpointer(tmp_path, keep_best=1, keep_last=1), 5).steps() == (4, 5)

    @pytest.mark.parametrize("told", [timedelta(hours=1), "3600s", "1h", "60 m"], ids=str)
    def test_those_of_the_last_hour_stay(self, told, tmp_path, monkeypatch):
        ck = saved(Checkpointer(tmp_path, keep_for=told), 1, 2)
        assert ck.steps() == (1, 2)
        now, steady = time.time, time.monotonic
        monkeypatch.setattr(time, "time", lambda: now() + 3601)
        monkeypatch.setattr(time, "monotonic", lambda: steady() + 3601)
        ck.save(3, state(3.0))
        assert ck.steps() == (3,)

    @pytest.mark.parametrize("fault", ["no commit", "torn commit", "file gone"])
    def test_steps_that_are_not_complete_take_no_place(self, fault, tmp_path):
        ck = saved(Checkpointer(tmp_path), 1, 2, 8, 9)
        for number in (8, 9):
            commit = folder(ck.root, number) / "COMMIT"
            if fault == "torn commit":
                commit.write_bytes(commit.read_bytes()[:-5])
            else:
                (commit if fault == "no commit" else payload(ck.root, number)).unlink()
        ck = saved(Checkpointer(tmp_path, keep_last=2), 3)
        assert ck.steps() == (2, 3)
        assert folder(ck.root, 9).exists(), "not a day old, or not ours to remove"

    def test_a_folder_of_somebody_else_that_is_called_alike_stays(self, tmp_path):
        (tmp_path / "step-1").mkdir()
        (tmp_path / "step-1" / "pytorch_model.bin").write_bytes(b"precious")
        ck = saved(Checkpointer(tmp_path, keep_last=1), 1, 2)
        assert ck.steps() == (2,)
        assert sorted(os.listdir(tmp_path)) == [step_name(2), "step-1"]

    @pytest.mark.parametrize("files", ["dcp", "notes"])
    def test_a_restore_calls_what_no_save_wrote_no_interrupted_save(self, files, fixtures, tmp_path):
        if files == "dcp":
            shutil.copytree(fixtures / "dcp_plain_nasty_w1" / "ckpt", tmp_path / "step-100")
        else:
            (tmp_path / "step-100").mkdir()
            (tmp_path / "step-100" / "notes.txt").write_bytes(b"precious")
        with pytest.raises(NoCompleteCheckpoint, match="no shardckpt save wrote it") as raised:
            Checkpointer(tmp_path).restore(state())
        assert ("shardckpt.load(" in str(raised.value)) == (files == "dcp")
        assert not any(word in str(raised.value) for word in ("interrupted", "repair", "remove"))

    @pytest.mark.parametrize("store", ["disk", "memory", "bucket"])
    def test_what_no_save_wrote_stays_in_a_removed_step_and_is_named_once(self, store, tmp_path, monkeypatch):
        Bucket.reset()
        root = {"disk": str(tmp_path), "memory": f"memory://{tmp_path.name}", "bucket": "bucket://b/run"}[store]
        ck = saved(Checkpointer(root, keep_last=1), 1)
        saved(Checkpointer(f"{ck.path(1)}/finetune"), 7)
        with open_store(ck.path(1)).create("thesis.txt") as writer:
            writer.write(b"mine")
        with pytest.warns(UserWarning, match=r"left there: step-00000001/finetune/, step-00000001/thesis.txt"):
            saved(ck, 2)
        assert [entry.name for entry in open_store(ck.path(1)).list()] == ["finetune", "thesis.txt"]
        monkeypatch.setattr(retention, "ORPHAN_TTL_S", -1.0)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            saved(ck, 3)
            assert restored(Checkpointer(root)) == (3, 3)
        assert shardckpt.prune(root, keep_last=1).other_content == ()
        found = shardckpt.ls(root)
        assert ([step.number for step in found.complete], found.incomplete) == ([3], ())
        assert restored(Checkpointer(f"{ck.path(1)}/finetune")) == (7, 7)
        with pytest.raises(TargetExistsError, match="other content"):
            ck.save(1, state(), overwrite=True)

    def test_an_older_branch_with_other_content_is_no_newer_step_that_cannot_be_loaded(self, tmp_path):
        ck = saved(Checkpointer(tmp_path, keep_last=1), 9)
        (folder(tmp_path, 9) / "thesis.txt").write_text("mine")
        saved(Checkpointer(tmp_path), 3)
        ck.restore(state(), step=3)
        with pytest.warns(UserWarning, match="no save wrote"):
            saved(ck, 4)
        assert os.listdir(folder(tmp_path, 9)) == ["thesis.txt"]
        assert restored(Checkpointer(tmp_path)) == (4, 4)

    def test_files_of_the_operating_system_do_not_keep_a_removed_step(self, tmp_path):
        ck = saved(Checkpointer(tmp_path, keep_last=1), 1)
        (folder(tmp_path, 1) / ".DS_Store").write_bytes(b"folder view")
        saved(ck, 2)
        assert os.listdir(tmp_path) == [step_name(2)]

    def test_a_failure_to_remove_is_a_warning_for_the_step_is_saved(self, tmp_path, monkeypatch):
        ck = saved(Checkpointer(tmp_path, keep_last=1), 1)

        def broken(*_: object) -> None:
            raise StorageError("no permission")

        monkeypatch.setattr(apply_retention, "delete_steps", broken)
        with pytest.warns(UserWarning, match="step 2 is saved, but old ones could not be removed: no permission"):
            ck.save(2, state(2.0))
        monkeypatch.undo()
        assert ck.steps() == (1, 2)
        ck.save(3, state(3.0))
        assert ck.steps() == (3,)

    def test_what_dead_saves_left_goes_after_a_day(self, tmp_path, monkeypatch):
        saved(Checkpointer(tmp_path), 1, 2)
        (folder(tmp_path, 1) / "COMMIT").unlink()
        partial = tmp_path / f".{step_name(7)}.partial-0123456789ab"
        partial.mkdir()
        saved(Checkpointer(tmp_path), 3)
        assert folder(tmp_path, 1).exists()
        assert partial.exists()
        days_pass(monkeypatch, 1.1)
        saved(Checkpointer(tmp_path), 4)
        assert sorted(os.listdir(tmp_path)) == [step_name(n) for n in (2, 3, 4)]


class Unreadable:
    """A number that cannot be had, as of a tensor on the meta device."""

    def __float__(self) -> float:
        raise RuntimeError("no data")

    def __index__(self) -> int:
        raise RuntimeError("no data")


class TestArgumentsThatAreWrong:
    @pytest.mark.parametrize("name", ["run.branch", "metric.loss"])
    @pytest.mark.parametrize("verb", ["Checkpointer", "save", "async_save"])
    def test_names_that_a_run_is_ordered_by_are_refused_in_about(self, verb, name, tmp_path):
        ck = saved(Checkpointer(tmp_path, keep_last=2), 1)
        with pytest.raises(UsageError, match=f"reserved for `Checkpointer`; found {name}"):
            if verb == "Checkpointer":
                saved(ck, 2, custom_metadata={name: "3"})
            else:
                getattr(shardckpt, verb)(state(), ck.path(2), custom_metadata={name: "3"})
        assert saved(ck, 2, 3, custom_metadata={"runs": "a"}, metrics={"loss": 1.0}).steps() == (2, 3)

    @pytest.mark.parametrize("about", [5, {"a": 3}, {4: "b"}, "ab"])
    def test_about_is_text_by_name(self, about, tmp_path):
        ck = Checkpointer(tmp_path)
        for save in (
            lambda: saved(ck, 1, custom_metadata=about),
            lambda: shardckpt.save(state(), ck.path(1), custom_metadata=about),
        ):
            with pytest.raises(UsageError, match="`custom_metadata` must be a mapping of text to text"):
                save()
        assert ck.steps() == ()

    @pytest.mark.parametrize(
        "metrics",
        [{"loss": 10**400}, {"loss": Unreadable()}, {"loss": 1j}, {1: 0.5}, 5, torch.ones(3)],
        ids=["too large", "unreadable", "complex", "name", "number", "tensor"],
    )
    def test_metrics_are_numbers_by_name(self, metrics, tmp_path):
        ck = Checkpointer(tmp_path, keep_best=1)
        with pytest.raises(UsageError, match="metric"):
            saved(ck, 1, metrics=metrics)
        assert saved(ck, 1, metrics={"loss": 1}).steps() == (1,)

    def test_the_process_group_is_that_of_the_checkpointer(self, tmp_path):
        ck = Checkpointer(tmp_path)

        def body(rank: int, world: int) -> list[str]:
            alone, every = [dist.new_group([each]) for each in range(world)][rank], dist.group.WORLD
            ck.save(1, state(1.0), process_group=every)
            ck.async_save(2, state(2.0), process_group=every).result()
            told = [str(restored(ck, process_group=every))]
            for call in (ck.save, ck.async_save, lambda _, into, **given: ck.restore(into, **given)):
                with pytest.raises(UsageError, match="`process_group` must be the Checkpointer's"):
                    call(3, state(), process_group=alone)
            return [*told, str(ck.steps())]

        assert run(2, body, group_timeout=20) == [["(2, 2)", "(1, 2)"]] * 2

    def test_dedup_is_true_or_false(self, tmp_path):
        with pytest.raises(UsageError, match="`dedup` is neither True nor False; found 'no'"):
            Checkpointer(tmp_path, dedup="no")

    def test_one_rank_alone_has_them_and_all_raise_before_the_timeout(self, tmp_path):
        """Rank 1 gives a wrong argument; every rank hears of it in the first message, and the next call works."""
        ck = Checkpointer(tmp_path / "run", save_every=1)
        one, other = tmp_path / "run" / step_name(1), tmp_path / "other"
        savings = [{"base": 5}, {"base_key_map": 3}, {"trainable_only": True}, {"custom_metadata": 5}]
        backgrounds = [{"custom_metadata": 5}, {"max_staging_bytes": "much"}, {"on_busy": "never"}, {"on_event": 5}]
        loads = [{"include": 5}, {"include": []}, {"base": 5}, {"verify": "x"}, {"rules": 3}, {"strict": "x"}]
        loads.append({"unequal_steps": 3})
        others = [{"process_group": 5}, {"path": "x"}, {"bogus": 1}]
        metered = [{"metrics": {"a": 10**400}}, {"metrics": {"a": Unreadable()}}, *others]
        calls = {
            shardckpt.save: [((state(), other), each) for each in savings],
            shardckpt.async_save: [((state(), other), each) for each in backgrounds],
            shardckpt.load: [((state(), one), each) for each in loads],
            ck.save: [((2, state()), each) for each in [*metered, {"base": 5}, {"custom_metadata": 5}]],
            ck.async_save: [((2, state()), each) for each in [*backgrounds, *metered]],
            ck.restore: [((state(),), each) for each in [*loads[:4], *others, {"step": Unreadable()}]],
        }

        def body(rank: int, world: int) -> list[str]:
            saved(ck, 1)
            told = []
            for call, arguments in calls.items():
                for given, wrong in arguments:
                    try:
                        call(*given, **(wrong if rank == 1 else {}))
                    except UsageError as error:
                        told += [] if rank == 1 or "failed on rank 1" in str(error) else [str(error)]
                    else:
                        told.append(f"{call} raised nothing for {wrong}")
            with ck.save_on_signal():
                with pytest.raises(UsageError):
                    ck.should_save("x" if rank == 1 else 2)
                told.append(str(ck.should_save(2)))
            with pytest.raises(UsageError):
                ck.save("x" if rank == 1 else 2, state())
            saved(ck, 2)
            return [*told, str(ck.steps()), str(other.exists())]

        assert run(2, body, group_timeout=20) == [["True", "(1, 2)", "False"]] * 2


@pytest.mark.parametrize("days", [0.5, 29, 3650, -0.5, -29])
def test_a_clock_that_jumps_during_a_training_removes_nothing(days, tmp_path, monkeypatch):
    ck = saved(Checkpointer(tmp_path, keep_for="1h"), 1, 2)
    now, now_ns = time.time, time.time_ns
    monkeypatch.setattr(time, "time", lambda: now() + days * DAY)
    monkeypatch.setattr(time, "time_ns", lambda: now_ns() + int(days * DAY * 1e9))
    saved(ck, 3, 4)
    assert ck.steps() == (1, 2, 3, 4)
    monkeypatch.undo()
    assert saved(ck, 5).steps() == (1, 2, 3, 4, 5)
    assert saved(Checkpointer(tmp_path, keep_for="1h"), 6).steps() == (1, 2, 3, 4, 5, 6)


def test_steps_saved_while_the_clock_is_ahead_grow_old_as_any_other(tmp_path, monkeypatch):
    ck = saved(Checkpointer(tmp_path, keep_for="1h"), 1)
    now, now_ns, steady = time.time, time.time_ns, time.monotonic
    for passed, ahead, kept in ((1800, 3 * DAY, (1, 2)), (3700, 3 * DAY, (2, 3)), (5500, 0, (3, 4))):
        monkeypatch.setattr(time, "time", lambda by=passed + ahead: now() + by)
        monkeypatch.setattr(time, "time_ns", lambda by=passed + ahead: now_ns() + int(by * 1e9))
        monkeypatch.setattr(time, "monotonic", lambda by=passed: steady() + by)
        assert saved(ck, kept[-1]).steps() == kept


class TestStatesThatAreNone:
    """A step of nothing would be the newest complete one, and push a good one out."""

    @pytest.mark.parametrize("wrong", [None, 3, True, "model", b"model"], ids=repr)
    @pytest.mark.parametrize("is_async", [False, True], ids=["save", "async_save"])
    def test_a_plain_value_is_refused_and_the_good_step_stays(self, wrong, is_async, tmp_path):
        ck = saved(Checkpointer(tmp_path, keep_last=1), 1)
        with pytest.raises(UsageError, match="the state must hold objects to save"):
            (ck.async_save if is_async else ck.save)(2, wrong)
        assert restored(ck) == (1, 1)

    def test_one_rank_without_a_state_fails_the_save_on_all(self, tmp_path):
        def body(rank: int, world: int) -> str:
            try:
                shardckpt.save(None if rank else state(), tmp_path / "step")
            except shardckpt.ShardckptError as error:
                return str(error)
            return ""

        found = run(2, body)
        assert all("the state must hold objects to save" in text for text in found)
        assert not (tmp_path / "step" / "COMMIT").exists()


class TestGoingBack:
    """What a restored run saves is newer than what lay there when it was restored, whatever the numbers."""

    def test_what_is_saved_then_is_the_latest(self, tmp_path):
        saved(Checkpointer(tmp_path), *range(1, 11))
        ck = Checkpointer(tmp_path, keep_last=2)
        ck.restore(state(), step=9)
        for number in (4, 5, 6):
            ck.save(number, state(100.0 + number), overwrite=True)
            assert (ck.latest(), Checkpointer(tmp_path).latest()) == (number, number)
        assert ck.steps() == (5, 6)
        assert restored(Checkpointer(tmp_path)) == (6, 106)

    def test_nothing_is_abandoned_before_that(self, tmp_path):
        ck = saved(Checkpointer(tmp_path), 1, 2, 3)
        ck.restore(state(), step=1)
        with pytest.raises(TypeError):
            ck.save(2, {"thing": object()}, overwrite=True)
        assert (ck.latest(), restored(Checkpointer(tmp_path))) == (3, (3, 3))

    def test_the_abandoned_steps_are_the_older_ones_for_each_later_process(self, tmp_path):
        saved(Checkpointer(tmp_path), 1, 2, 3, 4)
        ck = Checkpointer(tmp_path)
        ck.restore(state(), step=1)
        ck.save(2, state(20.0), overwrite=True)
        assert ck.steps() == (1, 3, 4, 2)
        later = Checkpointer(tmp_path, keep_last=2)
        assert restored(later) == (2, 20)
        saved(later, 5)
        assert later.steps() == (2, 5)
        saved(Checkpointer(tmp_path), 6)
        assert [step.number for step in shardckpt.ls(tmp_path).complete] == [2, 5, 6]
        assert [step.number for step in shardckpt.prune(tmp_path, keep_last=1).kept] == [6]

    def test_so_is_a_newer_step_that_was_found_to_be_damaged(self, tmp_path):
        ck = saved(Checkpointer(tmp_path), 10, 20)
        flip(payload(tmp_path, 20))
        with pytest.warns(UserWarning, match="restored step 10"):
            ck.restore(state())
        saved(ck, 15)
        assert (ck.latest(), restored(Checkpointer(tmp_path))) == (15, (15, 15))

    def test_where_the_newest_was_restored_numbers_decide_as_long_as_they_grow(self, tmp_path):
        ck = saved(Checkpointer(tmp_path), 1, 2)
        ck.restore(state())
        saved(ck, 3)
        commit = json.loads((folder(tmp_path, 3) / "COMMIT").read_text().splitlines()[0])
        assert "branch" not in commit
        ck.restore(state())
        ck.save(1, state(7.0), overwrite=True)
        assert ck.latest() == 1

    def test_without_a_restore_numbers_decide(self, tmp_path):
        saved(Checkpointer(tmp_path), 5)
        assert saved(Checkpointer(tmp_path), 3).latest() == 5

    def test_repair_writes_the_same_mark(self, tmp_path):
        ck = saved(Checkpointer(tmp_path), 1, 2)
        ck.restore(state(), step=1)
        ck.async_save(2, state(7.0), overwrite=True).result()
        before = (folder(tmp_path, 2) / "COMMIT").read_bytes()
        assert b'"branch":1' in before
        (folder(tmp_path, 2) / "COMMIT").unlink()
        shardckpt.repair(folder(tmp_path, 2))
        assert (folder(tmp_path, 2) / "COMMIT").read_bytes() == before


class TestWhenToSave:
    def test_every_so_many_steps(self, tmp_path):
        ck = Checkpointer(tmp_path, save_every=10)
        assert [n for n in range(31) if ck.should_save(n)] == [10, 20, 30]
        assert not Checkpointer(tmp_path).should_save(10)

    def test_a_step_that_was_saved_or_restored_just_now_is_not_saved_again(self, tmp_path):
        ck = Checkpointer(tmp_path, save_every=10)
        saved(ck, 10)
        assert not ck.should_save(10)
        other = Checkpointer(tmp_path, save_every=10)
        other.restore(state())
        assert not other.should_save(10)
        assert other.should_save(20)

    def test_a_signal_asks_for_one_save_and_for_the_end(self, tmp_path):
        before = signal.getsignal(signal.SIGTERM)
        ck = Checkpointer(tmp_path, save_every=100)
        with ck.save_on_signal():
            assert not ck.should_save(3)
            os.kill(os.getpid(), signal.SIGTERM)
            assert not ck.stop_requested, "only noted until all ranks agree"
            assert ck.should_save(4)
            assert ck.stop_requested
            saved(ck, 4)
            os.kill(os.getpid(), signal.SIGTERM)
            assert not ck.should_save(5), "it was saved since"
        assert signal.getsignal(signal.SIGTERM) == before
        assert ck.stop_requested
        assert restored(ck) == (4, 4)

    def test_a_save_alone_learns_of_it_too(self, tmp_path):
        ck = Checkpointer(tmp_path)
        with ck.save_on_signal(signal.SIGUSR1):
            signal.raise_signal(signal.SIGUSR1)
            saved(ck, 1)
            assert ck.stop_requested
            assert not ck.should_save(2)

    @pytest.mark.parametrize("number", ["TERM", None, 0, True, 15.0], ids=repr)
    def test_a_signal_is_a_number_when_the_block_is_made(self, number, tmp_path):
        with pytest.raises(UsageError, match=rf"must be a signal's number.*found {number!r}.*signal\.SIGTERM"):
            Checkpointer(tmp_path).save_on_signal(number)

    def test_signals_are_for_the_main_thread(self, tmp_path):
        raised: list[Exception] = []

        def body() -> None:
            try:
                with Checkpointer(tmp_path).save_on_signal():
                    pass
            except UsageError as error:
                raised.append(error)

        thread = threading.Thread(target=body)
        thread.start()
        thread.join()
        assert "main thread" in str(raised[0])

    def test_without_the_block_a_signal_is_what_it_was(self, tmp_path):
        heard = []
        before = signal.signal(signal.SIGTERM, lambda *_: heard.append(1))
        try:
            ck = Checkpointer(tmp_path)
            signal.raise_signal(signal.SIGTERM)
            assert heard == [1]
            assert not ck.should_save(1)
        finally:
            signal.signal(signal.SIGTERM, before)


def test_a_pickled_one_has_the_same_arguments_wherever_it_arrives(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ck = saved(Checkpointer("run", keep_last=1, save_every=10), 1)
    data = pickle.dumps(ck)
    monkeypatch.chdir("/")
    other = pickle.loads(data)
    assert other.root == ck.root == str(tmp_path / "run")
    assert other.should_save(10)
    assert saved(other, 2).steps() == (2,)


class TestInTheBackground:
    def test_a_step_is_saved_and_what_no_rule_keeps_is_gone_once_the_result_is_there(self, tmp_path):
        ck = saved(Checkpointer(tmp_path, keep_last=2), 1, 2)
        handle = ck.async_save(3, state(3.0), metrics={"loss": 1.0})
        handle.result()
        assert (ck.steps(), restored(ck)) == ((2, 3), (3, 3))
        assert not ck.should_save(3)

    def test_one_under_way_takes_no_place_and_removes_nothing(self, tmp_path, monkeypatch):
        ck = saved(Checkpointer(tmp_path, keep_last=1), 1)
        go_on, seen, write = threading.Event(), [], LocalWriter.write

        def write_late(writer: LocalWriter, data: memoryview) -> None:
            go_on.wait(30)
            write(writer, data)

        monkeypatch.setattr(LocalWriter, "write", write_late)
        handle = ck.async_save(2, state(2.0), on_event=seen.append)
        assert ck.steps() == (1,)
        shardckpt.prune(ck.root, keep_last=1)
        assert restored(Checkpointer(tmp_path)) == (1, 1)
        go_on.set()
        handle.result()
        assert ck.steps() == (2,)
        assert [(type(event), event.error) for event in seen] == [(shardckpt.events.SaveEvent, None)]

    def test_one_that_fails_removes_nothing(self, tmp_path, monkeypatch):
        def full(*_: object) -> None:
            raise StorageError("full")

        ck = saved(Checkpointer(tmp_path, keep_last=1), 1)
        monkeypatch.setattr(LocalWriter, "write", full)
        handle = ck.async_save(2, state(2.0))
        with pytest.raises(StorageError, match="full"):
            handle.result()
        monkeypatch.undo()
        assert os.listdir(ck.root) == [step_name(1)]
        saved(ck, 2)
        assert ck.steps() == (2,)

    @pytest.mark.parametrize("is_signalled", [True, False])
    def test_one_that_fails_is_due_again(self, is_signalled, tmp_path, monkeypatch):
        def full(*_: object) -> None:
            raise StorageError("full")

        ck = Checkpointer(tmp_path, save_every=4)
        with ck.save_on_signal():
            if is_signalled:
                os.kill(os.getpid(), signal.SIGTERM)
            assert ck.should_save(4)
            monkeypatch.setattr(LocalWriter, "write", full)
            handle = ck.async_save(4, state(4.0))
            with pytest.raises(StorageError, match="full"):
                handle.result()
            monkeypatch.undo()
            assert ck.should_save(5) == is_signalled, "the last save is still to come"
            assert ck.should_save(4), "the step was not saved"
            ck.async_save(4, state(4.0)).result()
            assert not ck.should_save(4) and not ck.should_save(5)
        assert ck.steps() == (4,)


class TestBest:
    @pytest.fixture
    def ck(self, tmp_path: Path) -> Checkpointer:
        """Steps of two metrics; the loss of the last is not known, and step 4 was never committed."""
        ck = Checkpointer(tmp_path, metric="loss")
        for number, (loss, accuracy) in enumerate([(3.0, 0.1), (1.0, 0.9), (1.0, 0.9), (0.5, 1.0)], 1):
            ck.save(number, state(float(number)), metrics={"loss": loss, "accuracy": accuracy})
        ck.save(5, state(5.0), metrics={"loss": float("nan")})
        (folder(tmp_path, 4) / "COMMIT").unlink()
        return ck

    def test_it_is_the_later_of_equal_complete_steps_by_the_metric_of_the_checkpointer(self, ck: Checkpointer) -> None:
        assert ck.best() == 3
        assert Checkpointer(ck.root, metric="accuracy").best() == 1
        assert Checkpointer(ck.root, metric="accuracy", mode="max").best() == 3

    def test_another_metric_is_named_with_its_mode(self, ck: Checkpointer) -> None:
        assert (ck.best("accuracy", mode="max"), ck.best("loss", mode="max")) == (3, 1)
        with pytest.raises(UsageError, match=r"`mode` must be given for the metric 'accuracy'.*mode='max'"):
            ck.best("accuracy")
        with pytest.raises(UsageError, match="the mode is unknown; found best"):
            ck.best(mode="best")  # type: ignore[arg-type]

    def test_it_is_restored_and_training_goes_on_from_it(self, ck: Checkpointer) -> None:
        assert restored(ck, step="best") == (3, 3)
        ck.save(4, state(4.0), metrics={"loss": 2.0})
        assert (ck.latest(), ck.best()) == (4, 3)

    def test_a_metric_without_numbers_is_an_error_that_names_the_others(self, ck: Checkpointer) -> None:
        other = Checkpointer(ck.root, metric="score")
        for call in (other.best, lambda: other.restore(state(), step="best")):
            with pytest.raises(UsageError, match=r"no step has a number for the metric 'score'; found accuracy, loss"):
                call()
        with pytest.raises(UsageError, match=r"Name a metric that was saved: best\(\"accuracy\", mode=\"max\"\)"):
            other.best()

    def test_a_metric_that_is_not_known_yet_makes_no_step_the_best(self, tmp_path: Path) -> None:
        ck = Checkpointer(tmp_path)
        ck.save(1, state(), metrics={"loss": float("nan")})
        with pytest.raises(UsageError, match="no step has a number for the metric 'loss'; found loss"):
            ck.best()

    def test_one_that_a_load_found_damaged_is_not_the_best(self, ck: Checkpointer) -> None:
        flip(payload(ck.root, 5))
        flip(payload(ck.root, 3))
        with pytest.raises(shardckpt.errors.ChecksumError), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ck.restore(state(), step="best")
        with pytest.warns(UserWarning, match="restored step 2"):
            ck.restore(state())
        assert ck.best() == 2

    def test_without_a_step_it_is_none(self, tmp_path: Path) -> None:
        ck = Checkpointer(tmp_path / "new")
        assert (ck.best(), ck.restore(state(), step="best")) == (None, None)

    def test_a_name_that_is_not_best_is_no_step(self, ck: Checkpointer) -> None:
        with pytest.raises(UsageError, match="step number must be an integer"):
            ck.restore(state(), step="bset")  # type: ignore[arg-type]

    def test_all_ranks_get_the_same(self, ck: Checkpointer) -> None:
        def body(rank: int, world: int) -> object:
            ranks = Checkpointer(ck.root)
            into = state()
            return ranks.best(), ranks.restore(into, step="best"), into["step"]

        assert run(2, body) == [(3, 3, 3)] * 2


class TestInMemory:
    def test_a_run_lives_there_too(self, memory_folder):
        ck = saved(Checkpointer(memory_folder, keep_last=2), 1, 2, 3)
        assert (ck.steps(), restored(ck)) == ((2, 3), (3, 3))
        assert ck.path(3) == "memory://some/root/step-00000003"

    def test_what_a_killed_save_left_there_is_no_step_and_is_replaced(self, memory_folder):
        fs = fsspec.filesystem("memory")
        ck = saved(Checkpointer(memory_folder), 1, 2)
        fs.rm_file(f"/some/root/{step_name(2)}/COMMIT")
        with pytest.warns(UserWarning, match="restored step 1"):
            assert ck.restore(state()) == 1
        ck.save(2, state(9.0))
        assert restored(ck) == (2, 9)
        fs.rm_file(f"/some/root/{step_name(1)}/COMMIT")
        fs.rm_file(f"/some/root/{step_name(2)}/COMMIT")
        with pytest.raises(NoCompleteCheckpoint):
            Checkpointer(memory_folder).restore(state())

    def test_a_step_that_another_job_completes_meanwhile_is_not_replaced(self, memory_folder, monkeypatch):
        """Its files were there without a `COMMIT` when this job looked whether it may replace them."""
        saved(Checkpointer(memory_folder), 1)
        fs, commit = fsspec.filesystem("memory"), f"/some/root/{step_name(1)}/COMMIT"
        data = fs.cat_file(commit)
        fs.rm_file(commit)
        look = step_finder.StepFinder.is_replaceable

        def meanwhile(self, number: int) -> bool:
            found = look(self, number)
            fs.pipe_file(commit, data)
            return found

        monkeypatch.setattr(step_finder.StepFinder, "is_replaceable", meanwhile)
        with pytest.raises(TargetExistsError):
            Checkpointer(memory_folder).save(1, state(9.0))
        assert restored(Checkpointer(memory_folder)) == (1, 1)

    def test_a_run_whose_first_save_was_killed_begins_anew(self, memory_folder):
        ck = saved(Checkpointer(memory_folder), 1)
        for name in [entry.name for entry in open_store(ck.path(1)).list() if not entry.name.endswith(".safetensors")]:
            fsspec.filesystem("memory").rm_file(f"/some/root/{step_name(1)}/{name}")
        assert restored(Checkpointer(memory_folder)) == (None, 0)
        assert restored(saved(Checkpointer(memory_folder), 1)) == (1, 1)

    def test_nothing_was_ever_saved_there(self, memory_folder):
        assert restored(Checkpointer(memory_folder)) == (None, 0)


def test_in_s3_what_others_do_is_seen(s3_bucket):
    ck = saved(Checkpointer(f"{s3_bucket}/runs/a", keep_last=2), 1, 2, 3)
    assert (ck.steps(), restored(ck)) == ((2, 3), (3, 3))
    bucket, client = s3_bucket.removeprefix("s3://"), boto3.client("s3")
    names = [each["Key"] for each in client.list_objects_v2(Bucket=bucket)["Contents"]]
    assert {name.split("/")[2] for name in names} == {step_name(2), step_name(3)}
    client.delete_object(Bucket=bucket, Key=f"runs/a/{step_name(3)}/COMMIT")
    assert ck.latest() == 2
    ck.save(3, state(9.0))
    assert restored(ck) == (3, 9)


# Ranks


def on_ranks(rank: int, world: int, root: Path) -> list:
    ck = Checkpointer(root, keep_last=2)
    found = [restored(ck)]
    saved(ck, 1, 2)
    ck.async_save(3, state(3.0)).result()
    dist.barrier()  # rank 0 has removed step 1 now
    return [*found, ck.steps(), ck.latest(), restored(ck), restored(ck, step=2)]


def damaged_for_one(rank: int, world: int, root: Path) -> tuple:
    """Rank 1 alone reads the half of the tensor that is damaged."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (world,))
    ck = Checkpointer(root)
    for number in (1, 2):
        ck.save(number, {"w": distribute_tensor(torch.full((4 << 20,), float(number)), mesh, [Shard(0)])})
    if rank == 0:
        files = sorted(path for path in folder(root, 2).iterdir() if path.suffix == ".safetensors")
        flip(files[1])
    into = {"w": distribute_tensor(torch.zeros(4 << 20), mesh, [Shard(0)])}
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        step = ck.restore(into)
    return step, into["w"].to_local().unique().tolist(), [str(each.message) for each in told]


def one_is_asked_to_end(rank: int, world: int, root: Path) -> tuple:
    ck = Checkpointer(root)
    seen = []
    with ck.save_on_signal():
        for number in range(1, 6):
            if rank == 1 and number == 3:
                os.kill(os.getpid(), signal.SIGTERM)
            if ck.should_save(number):
                ck.save(number, state(float(number)))
            seen.append(ck.stop_requested)
            if ck.stop_requested:
                break
    return number, seen, ck.steps()


def background_fails(rank: int, world: int, root: Path) -> list[bool]:
    ck = Checkpointer(root, save_every=4)
    write = LocalWriter.write

    def full(self: LocalWriter, data: bytes) -> None:
        raise StorageError("full")

    with ck.save_on_signal():
        if rank == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        seen = [ck.should_save(3)]
        LocalWriter.write = full if rank == 1 else write
        handle = ck.async_save(3, {"w": torch.full((2, 300), 1.0), "own": shardckpt.PerRank(torch.ones(rank + 1))})
        with suppress(StorageError, RankError):
            handle.result()
        LocalWriter.write = write
        seen += [ck.should_save(3), ck.should_save(5)]
        ck.save(5, state(5.0))
        seen.append(ck.should_save(6))
    return seen


class TestRanks:
    def test_a_save_in_the_background_that_fails_on_one_rank_is_due_again_on_all(self, tmp_path):
        assert run(2, background_fails, tmp_path) == [[True, True, True, False]] * 2

    def test_a_metric_that_no_step_has_is_told_to_all_once_the_step_is_saved(self, tmp_path):
        def body(rank: int, world: int) -> object:
            ck = Checkpointer(tmp_path, keep_best=1, metric="acc")
            return ck.save(1, state(1.0), metrics={"accuracy": 0.5})

        found = raised_everywhere(2, body)
        assert all(each.is_a(UsageError) and "step 1 is saved" in each.message for each in found)
        assert Checkpointer(tmp_path).steps() == (1,)

    def test_all_come_to_the_same_answers(self, tmp_path):
        found = run(2, on_ranks, tmp_path / "run")
        assert found == [[(None, 0), (2, 3), 3, (3, 3), (2, 2)]] * 2

    def test_what_one_rank_finds_damaged_is_passed_over_by_all(self, tmp_path):
        found = run(2, damaged_for_one, tmp_path)
        assert [each[:2] for each in found] == [(1, [1.0])] * 2
        assert len(found[0][2]) == 1
        assert "restored step 1" in found[0][2][0]
        assert found[1][2] == [], "one rank says it for all"

    def test_one_that_is_asked_to_end_stops_all_at_the_same_step(self, tmp_path):
        assert run(2, one_is_asked_to_end, tmp_path) == [(3, [False, False, True], (3,))] * 2

    def test_none_complete_is_none_for_all(self, tmp_path):
        write_step(folder(tmp_path, 1), {"w": torch.ones(2)})
        (folder(tmp_path, 1) / "COMMIT").unlink()
        found = raised_everywhere(2, lambda rank, world: Checkpointer(tmp_path).restore(state()))
        assert [each.name for each in found] == ["NoCompleteCheckpoint"] * 2

    def test_different_steps_are_refused_by_all(self, tmp_path):
        found = raised_everywhere(2, lambda rank, world: Checkpointer(tmp_path).save(rank, state()))
        assert all(each.is_a(UsageError) and "rank 1 step 1" in each.message for each in found)

    def test_storage_that_fails_for_the_first_is_told_to_all(self, tmp_path):
        def body(rank: int, world: int) -> object:
            if rank == 0:
                step_finder.read_run = lambda _: (_ for _ in ()).throw(StorageError("broken"))
            return Checkpointer(tmp_path).restore(state())

        found = raised_everywhere(2, body)
        assert [each.name for each in found] == ["StorageError", "RankError"]
        assert "broken" in found[1].message

    def test_a_rank_that_is_gone_is_named(self, tmp_path):
        def body(rank: int, world: int) -> object:
            ck = saved(Checkpointer(tmp_path), 1)
            if rank == 1:
                return None
            return ck.durability(1)

        found = outcomes(2, body, group_timeout=2.0)
        assert found[0].raised is not None
        assert found[0].raised.is_a(RankError)
        assert "rank 1" in found[0].raised.message


# Killed at every operation of a save that removes


def check_after_a_kill(root: str, k: str) -> None:
    """A reader finds the newest complete step whole, and the run goes on."""
    found = [step.number for step in shardckpt.ls(root).complete]
    assert found, f"{k}: nothing is left"
    assert found[-1] in (2, 3), k
    for number in found:
        into = state()
        assert Checkpointer(root).restore(into, step=number) == number
        assert into["w"].unique().tolist() == [float(number)], f"{k}: step {number} is a mix"
    ck = Checkpointer(root, keep_last=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert ck.restore(state()) == found[-1]
    saved(ck, 4)
    assert ck.steps() == (4,), k


def test_a_save_that_is_killed_at_any_operation_leaves_the_newest_step_whole(tmp_path):
    k, was_killed = 0, True
    while was_killed:
        k += 1
        root = tmp_path / str(k)
        saved(Checkpointer(root), 1, 2)
        was_killed = save_and_die_at(root, k)
        check_after_a_kill(str(root), f"a kill at operation {k}")
    print(f"killed at each of {k - 1} operations")
    assert k > 20


def save_and_die_at(root: Path, k: int) -> bool:
    def work() -> None:
        with killing_at(k):
            saved(Checkpointer(root, keep_last=1), 3)

    return is_killed(work)


def bucket_matrix(how: str) -> int:
    """Break every request of a save that removes two steps; return how many there were."""
    Bucket.reset()
    saved(Checkpointer("bucket://b/run"), 1, 2)
    before = dict(Bucket.objects)
    requests = 0
    for k in range(1, 200):
        Bucket.reset()
        Bucket.objects = dict(before)
        with broken_at(k, how), suppress(Dead):
            saved(Checkpointer("bucket://b/run", keep_last=1), 3)
        requests = len(Bucket.requests)
        Bucket.requests.clear()
        check_after_a_kill("bucket://b/run", f"request {k} {how}")
        if requests < k:
            break
    return requests


@pytest.mark.parametrize("how", ["killed", "unheard"])
def test_so_does_one_on_a_store_without_rename(how, monkeypatch):
    monkeypatch.setattr(retry, "FIRST_PAUSE_S", 0.0)
    requests = bucket_matrix(how)
    print(f"{how} at each of {requests} requests")
    assert requests > 20


def test_the_matrix_is_red_where_steps_are_removed_before_the_new_one_is_there(monkeypatch):
    save = step_saver.save_with

    def early(hooks: object, state: object, path: str, options: object) -> None:
        if path.endswith(step_name(3)):
            store = FsspecStore("bucket://b/run")
            delete_steps(store, read_run(store), [step_name(1), step_name(2)])
        save(hooks, state, path, options)

    monkeypatch.setattr(retry, "FIRST_PAUSE_S", 0.0)
    monkeypatch.setattr(step_saver, "save_with", early)
    with pytest.raises(AssertionError, match="nothing is left"):
        bucket_matrix("killed")
