"""A copy of a step or a run has the same bytes, exists completely or not at all, and can be repeated."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import fsspec
import pytest
import torch

import shardckpt
from shardckpt import Checkpointer
from shardckpt.errors import (
    ChecksumError,
    MissingFileError,
    NoSpaceError,
    TargetExistsError,
    UnknownFormatError,
    UnsupportedError,
    UsageError,
)
from shardckpt.native.run_directory import RunDirectory, step_name
from shardckpt.native.stored_folders import StoredFolder
from shardckpt.storage import local_publication
from shardckpt.storage.store import Store
from tests.kit.ranks.forks import is_killed
from tests.kit.runs.command import run_here
from tests.kit.stores.bucket import Bucket, Dead, broken_at
from tests.kit.stores.disk import watched

copying = import_module("shardckpt.offline.copy")

BIG = 3_000_000
"""Elements of the tensor that no step changes: 12 MB, so that its file has several blocks."""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps 2 and 4 that refer to the file of a removed step 1, and a step 5 that was never committed."""
    root = tmp_path_factory.mktemp("source") / "run"
    ck = Checkpointer(root, dedup=True, keep_every=2)
    for number in (1, 2, 3, 4, 5):
        state = {"big": torch.arange(BIG), "small": torch.full((100,), float(number))}
        ck.save(number, state, metrics={"loss": 1 / number})
    (root / step_name(5) / "COMMIT").unlink()
    (root / step_name(4) / "notes.txt").write_text("mine")
    return root


@pytest.fixture
def run(source: Path, tmp_path: Path) -> Path:
    """A run of its own for a test that changes it."""
    shutil.copytree(source, tmp_path / "run", copy_function=os.link)
    return tmp_path / "run"


@pytest.fixture
def memory() -> Iterator[str]:
    fs = fsspec.filesystem("memory")
    fs.store.clear()
    yield "memory://copies/run"
    fs.store.clear()


@pytest.fixture
def run_url(bucket: str) -> str:
    return f"{bucket}/run"


def files(root: Path) -> dict[str, bytes]:
    """Return the bytes of all files below a folder but those that a copy leaves out."""
    found = {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}
    return {name: data for name, data in found.items() if "notes.txt" not in name and step_name(5) not in name}


def restored(root: str | Path) -> tuple[int | None, float]:
    into = {"big": torch.zeros(BIG, dtype=torch.int64), "small": torch.zeros(100)}
    step = Checkpointer(root).restore(into)
    assert torch.equal(into["big"], torch.arange(BIG))
    return step, into["small"][0].item()


def replace(path: Path, data: bytes) -> None:
    """Write a file anew: it may be linked to that of another run."""
    path.unlink()
    path.write_bytes(data)


class TestRun:
    def test_complete_steps_and_their_bases_are_copied_to_a_store_and_back(
        self, source: Path, memory: str, tmp_path: Path
    ) -> None:
        there = shardckpt.copy(source, memory)
        assert there.copied == (step_name(1), step_name(2), step_name(4))
        assert there.other_content == (f"{step_name(4)}/notes.txt",)
        assert [step_name(5) in step.fault for step in there.incomplete] == [True]
        assert there.nbytes == sum(map(len, files(source).values()))
        assert there.nbytes > there.checked_bytes > BIG * 4
        assert restored(memory) == (4, 4.0)
        back = shardckpt.copy(memory, tmp_path / "back")
        assert (back.copied, back.nbytes, back.incomplete) == (there.copied, there.nbytes, ())
        assert files(tmp_path / "back") == files(source)
        assert restored(tmp_path / "back") == (4, 4.0)
        assert sorted(os.listdir(tmp_path / "back")) == sorted(back.copied), "no other file"

    def test_a_second_copy_adds_only_new_steps(self, run: Path, tmp_path: Path) -> None:
        shardckpt.copy(run, tmp_path / "there")
        Checkpointer(run).save(8, {"big": torch.arange(BIG), "small": torch.full((100,), 8.0)})
        again = shardckpt.copy(run, tmp_path / "there")
        assert (again.copied, again.present) == ((step_name(8),), (step_name(1), step_name(2), step_name(4)))
        assert restored(tmp_path / "there") == (8, 8.0)

    def test_another_step_at_the_target_is_replaced_only_when_asked(self, run: Path, tmp_path: Path) -> None:
        shardckpt.copy(run, tmp_path / "there")
        (run / step_name(4) / "notes.txt").unlink()
        Checkpointer(run).save(4, {"small": torch.full((100,), 9.0)}, overwrite=True)
        Checkpointer(run).save(8, {"small": torch.full((100,), 9.0)})
        before = files(tmp_path / "there")
        with pytest.raises(TargetExistsError, match=step_name(4)):
            shardckpt.copy(run, tmp_path / "there")
        assert files(tmp_path / "there") == before, "step 8 is not copied either"
        assert shardckpt.copy(run, tmp_path / "there", overwrite=True).copied == (step_name(4), step_name(8))
        assert files(tmp_path / "there") == files(run)

    def test_a_dry_run_refuses_what_the_copy_refuses(self, source: Path, tmp_path: Path) -> None:
        there = tmp_path / "there" / step_name(2)
        there.mkdir(parents=True)
        (there / "notes.txt").write_text("mine")
        for dry_run in (True, False):
            with pytest.raises(TargetExistsError, match=r"notes\.txt"):
                shardckpt.copy(source, tmp_path / "there", overwrite=True, dry_run=dry_run)
        assert [path.name for path in there.parent.iterdir()] == [step_name(2)]

    @pytest.mark.parametrize("dry_run", [True, False])
    def test_a_disk_without_space_for_all_steps_gets_none(
        self, source: Path, tmp_path: Path, dry_run: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        shardckpt.copy(source, tmp_path / "same")
        needed = shardckpt.copy(source, tmp_path / "there", dry_run=True).nbytes
        disk = SimpleNamespace(f_bavail=needed - 1, f_frsize=1, f_blocks=1)
        monkeypatch.setattr(os, "statvfs", lambda _: disk)
        with pytest.raises(NoSpaceError, match=f"expected at least {needed}"):
            shardckpt.copy(source, tmp_path / "there", dry_run=dry_run)
        assert not (tmp_path / "there").exists()
        assert shardckpt.copy(source, tmp_path / "same").copied == (), "what is there needs no space"
        disk.f_bavail = needed
        assert len(shardckpt.copy(source, tmp_path / "there", dry_run=dry_run).copied) == 3

    def test_a_dry_run_checks_and_writes_nothing(self, source: Path, tmp_path: Path) -> None:
        dry = shardckpt.copy(source, tmp_path / "there", dry_run=True)
        assert (dry.copied, dry.dry_run) == ((step_name(1), step_name(2), step_name(4)), True)
        assert not (tmp_path / "there").exists()

    def test_progress_counts_every_byte_and_may_stop_the_copy(self, source: Path, tmp_path: Path) -> None:
        seen: list[shardckpt.results.Progress] = []
        done = shardckpt.copy(source, tmp_path / "there", on_progress=seen.append)
        assert (seen[-1].done_bytes, seen[-1].total_bytes) == (pytest.approx(done.nbytes, abs=3000), done.nbytes)

        def stop(progress: shardckpt.results.Progress) -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            shardckpt.copy(source, tmp_path / "stopped", on_progress=stop)
        assert not (tmp_path / "stopped").exists()

    def test_other_content_is_refused(self, source: Path, fixtures: Path, tmp_path: Path) -> None:
        other = fixtures / "dcp_fsdp2_llama_w2" / "ckpt"
        with pytest.raises(UnknownFormatError, match=r"only shardckpt steps.*DCP.*shardckpt convert"):
            shardckpt.copy(other, tmp_path / "there")
        shutil.copytree(other, tmp_path / "dcp")
        with pytest.raises(UnknownFormatError, match="no step of a run is here"):
            shardckpt.copy(source, tmp_path / "dcp")
        with pytest.raises(UsageError, match="overlap"):
            shardckpt.copy(source, source / "inside")
        (tmp_path / "notes" / step_name(2)).mkdir(parents=True)
        (tmp_path / "notes" / step_name(2) / "thesis.txt").write_text("mine")
        with pytest.raises(TargetExistsError, match=step_name(2)):
            shardckpt.copy(source, tmp_path / "notes")
        assert os.listdir(tmp_path / "notes") == [step_name(2)]
        (tmp_path / "file").mkdir()
        (tmp_path / "file" / step_name(4)).write_text("mine")
        with pytest.raises(TargetExistsError, match=rf"{step_name(4)}: the target is a file"):
            shardckpt.copy(source, tmp_path / "file")
        assert os.listdir(tmp_path / "file") == [step_name(4)], "no step is copied"

    def test_a_run_with_a_step_of_a_newer_version_is_not_copied_in_part(self, run: Path, tmp_path: Path) -> None:
        commit = run / step_name(4) / "COMMIT"
        line = commit.read_bytes().split(b"\n")[0].replace(b'["bases"]', b'["bases","new"]') + b"\n"
        replace(commit, line + hashlib.sha256(line).hexdigest().encode() + b"\n")
        with pytest.raises(UnsupportedError, match="a step that this version cannot read"):
            shardckpt.copy(run, tmp_path / "there")

    def test_a_step_that_is_removed_while_the_run_is_read_is_not_copied(
        self, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        read = copying.read_stored_run

        def remove_first(store: Store, found: RunDirectory) -> list[StoredFolder]:
            shutil.rmtree(run / step_name(2), ignore_errors=True)
            return read(store, found)

        monkeypatch.setattr(copying, "read_stored_run", remove_first)
        assert shardckpt.copy(run, tmp_path / "there").copied == (step_name(1), step_name(4))

    def test_a_step_that_is_removed_while_it_is_copied_is_not_called_damaged(self, run: Path, tmp_path: Path) -> None:
        def remove(_: shardckpt.results.Progress) -> None:
            shutil.rmtree(run / step_name(4), ignore_errors=True)

        with pytest.raises(MissingFileError, match=rf"{step_name(4)}: the step was removed .* Copy the run again"):
            shardckpt.copy(run, tmp_path / "there", on_progress=remove)
        assert restored(tmp_path / "there") == (2, 2.0)


class TestStep:
    def test_a_damaged_byte_is_found_and_nothing_appears(self, run: Path, tmp_path: Path) -> None:
        payload = next((run / step_name(4)).glob("*.safetensors"))
        data = bytearray(payload.read_bytes())
        data[-1] ^= 1
        replace(payload, bytes(data))
        with pytest.raises(ChecksumError, match="block 0"):
            shardckpt.copy(run, tmp_path / "there")
        assert sorted(os.listdir(tmp_path / "there")) == [step_name(1), step_name(2)]
        assert restored(tmp_path / "there") == (2, 2.0)

    def test_one_that_refers_to_others_needs_them_beside_the_target(self, source: Path, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match=rf"files that are not next to the target.*{step_name(1)}"):
            shardckpt.copy(source / step_name(4), tmp_path / step_name(4))
        assert os.listdir(tmp_path) == []
        shardckpt.copy(source, tmp_path / "there")
        done = shardckpt.copy(source / step_name(4), tmp_path / "there" / "best")
        assert (done.copied, done.other_content) == (("best",), ("notes.txt",))
        assert shardckpt.verify(tmp_path / "there" / "best").ok

    def test_one_without_hashes_is_copied_and_counted_as_unchecked(self, tmp_path: Path) -> None:
        shardckpt.save({"w": torch.ones(3)}, tmp_path / "step", checksums=False)
        done = shardckpt.copy(tmp_path / "step", tmp_path / "copy")
        assert files(tmp_path / "copy") == files(tmp_path / "step")
        assert done.checked_bytes < done.nbytes
        assert shardckpt.copy(tmp_path / "step", tmp_path / "copy").present == ("copy",)


def test_a_copy_killed_at_any_request_leaves_complete_steps_and_can_be_repeated(
    source: Path, run_url: str, tmp_path: Path
) -> None:
    requests = 0
    for k in range(1, 200):
        Bucket.reset()
        with broken_at(k, "killed"), suppress(Dead):
            shardckpt.copy(source, run_url)
        requests = len(Bucket.requests)
        marks = [name for name in Bucket.objects if name.endswith("COMMIT")]
        assert all(shardckpt.verify(f"bucket://{name[:-7]}").ok for name in marks), f"request {k}"
        shardckpt.copy(source, run_url)
        stored = {name.removeprefix("b/run/"): data for name, data in Bucket.objects.items()}
        assert stored == files(source), f"request {k}"
        if requests < k:
            break
    print(f"killed at each of {requests} requests")
    assert requests > 15


def test_a_killed_copy_leaves_a_step_where_folders_cannot_be_exchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed before each rename: the run lists its old step or the new one, and a second copy completes it."""
    for name, value in (("new", 1.0), ("old", 2.0)):
        Checkpointer(tmp_path / name).save(1, {"w": torch.full((9,), value)})
    target, found = tmp_path / "there", []
    for k in range(1, 99):
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(tmp_path / "old", target)

        def copy_and_die(k: int = k) -> None:
            left = [k]

            def before(name: str, _: object) -> None:
                left[0] -= name in ("rename", "replace")
                if not left[0]:
                    os.kill(os.getpid(), signal.SIGKILL)

            with watched(before, lambda *_: None), pytest.MonkeyPatch.context() as patch:
                patch.setattr(local_publication, "exchange", lambda *_: False)
                shardckpt.copy(tmp_path / "new", target, overwrite=True)

        was_killed = is_killed(copy_and_die)
        assert step_name(1) in os.listdir(target), f"rename {k}"
        state = {"w": torch.zeros(9)}
        assert Checkpointer(target).restore(state) == 1, f"rename {k}"
        found.append(state["w"][0].item())
        monkeypatch.setattr(local_publication, "exchange", lambda *_: False)
        shardckpt.copy(tmp_path / "new", target, overwrite=True)
        assert files(target).items() >= files(tmp_path / "new").items(), f"rename {k}"
        if not was_killed:
            break
    assert set(found) == {1.0, 2.0} and len(found) > 2


def test_a_repeated_copy_keeps_the_good_files_of_an_interrupted_one(source: Path, run_url: str) -> None:
    shardckpt.copy(source, run_url)
    names = [name for name in Bucket.objects if step_name(4) in name]
    payload = next(name for name in names if name.endswith(".safetensors"))
    del Bucket.objects[f"b/run/{step_name(4)}/COMMIT"]
    Bucket.requests.clear()
    assert shardckpt.copy(source, run_url).copied == (step_name(4),)
    assert payload not in [path for verb, path in Bucket.requests if verb in ("put", "begin")]
    del Bucket.objects[f"b/run/{step_name(4)}/COMMIT"]
    Bucket.objects[payload] = bytes(len(Bucket.objects[payload]))
    shardckpt.copy(source, run_url)
    assert restored(run_url) == (4, 4.0)


def test_the_command_prints_what_it_did(source: Path, tmp_path: Path) -> None:
    dry = run_here("copy", source, tmp_path / "there", "--dry-run")
    assert dry.out.splitlines()[0] == f"would copy {step_name(1)}"
    done = run_here("copy", source, tmp_path / "there")
    assert done.code == 0
    assert done.out.splitlines()[:3] == [f"copied {step_name(number)}" for number in (1, 2, 4)]
    assert f"left out: {step_name(4)}/notes.txt" in done.err
    assert done.err.count("not complete: ") == 1
    assert "0 folders, 0 B" in run_here("copy", source, tmp_path / "there").out
    assert run_here("copy", source, tmp_path / "there", "--quiet").out == ""
    assert run_here("copy", source, source / "x").code == 2
