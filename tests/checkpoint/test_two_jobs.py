"""Two jobs that save to one path at once: one wins, the other is told, and nobody ever reads a mix."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import botocore.session
import pytest
import s3fs
import torch
import torch.distributed.checkpoint as torch_dcp

import shardckpt
from shardckpt.checkpoint import dcp_storage_writer
from shardckpt.checkpoint.save import session
from shardckpt.errors import ShardckptError, StorageError, TargetExistsError
from shardckpt.native.commit import COMMIT
from shardckpt.offline.verify import verify
from shardckpt.storage import remote_publication
from shardckpt.storage.local_publication import LocalPublication
from shardckpt.storage.remote_publication import BufferedWriter
from shardckpt.storage.resolve_url import open_store
from tests.kit.stores.bucket import Bucket, DatedBucket
from tests.kit.stores.faulty import faulty

MINE, THEIRS, OLD = 1, 2, 0


def state(value: int) -> dict:
    return {"w": torch.full((3000,), float(value)), "step": value}


def other_job(url: str, *, overwrite: bool) -> bool:
    """Save as another process, from its beginning to its end; tell whether that succeeded."""
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)
        status = 2
        try:
            shardckpt.save(state(THEIRS), url, overwrite=overwrite)
            status = 0
        except ShardckptError:
            status = 1
        finally:
            os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in {0, 1}
    return status == 0


@pytest.fixture(params=["local", "s3", "azure", "sftp"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "local":
        return str(tmp_path / "run" / "c")
    folder = {"s3": "s3_bucket", "azure": "azure_container", "sftp": "sftp_folder"}[request.param]
    return f"{request.getfixturevalue(folder)}/c"


@pytest.mark.parametrize("moment", ["before the last check", "at the very end"])
@pytest.mark.parametrize("overwrite", [False, True], ids=["new", "overwrite"])
def test_one_wins_and_the_other_is_told(url: str, moment: str, overwrite: bool, monkeypatch) -> None:
    if overwrite:
        shardckpt.save(state(OLD), url)
    last = (session, "require_files") if moment == "before the last check" else (BufferedWriter, "finish")
    theirs: list[bool] = []
    for kind, method in ((LocalPublication, "commit"), last):
        whole = getattr(kind, method)

        def meanwhile(self, *args, whole=whole, **options):
            if not theirs:
                theirs.append(False)
                theirs[0] = other_job(url, overwrite=overwrite)
            return whole(self, *args, **options)

        monkeypatch.setattr(kind, method, meanwhile)
    told = None
    try:
        shardckpt.save(state(MINE), url, overwrite=overwrite)
    except ShardckptError as error:
        told = error
    monkeypatch.undo()
    succeeded = {value for value, good in ((MINE, told is None), (THEIRS, theirs[0])) if good}
    assert succeeded, "both were refused"
    found = shardckpt.load(url)
    assert found["step"] in succeeded
    assert found["w"].unique().tolist() == [float(found["step"])]
    assert verify(url).ok
    if not overwrite:
        assert len(succeeded) == 1, "both believe that they saved"
        assert told is None or isinstance(told, FileExistsError)
    names = {entry.name for entry in open_store(url).list()}
    saves = {name[:15] for name in names} - {"COMMIT", "model.safetenso"}
    assert len(saves) == 1 or (overwrite and "://" in url), f"files of the job that lost are left: {sorted(names)}"
    shardckpt.save(state(7), url, overwrite=True)
    assert shardckpt.load(url)["step"] == 7


def test_of_two_first_saves_one_fails_though_the_other_ends_before_its_last_request(
    s3_bucket: str, s3_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one's files are copied into place when the request for `COMMIT` has left this process."""
    shardckpt.save(state(THEIRS), f"{s3_bucket}/other")
    theirs = [entry.name for entry in open_store(f"{s3_bucket}/other").list()]
    client = botocore.session.get_session().create_client("s3", endpoint_url=s3_server)
    bucket, copied = s3_bucket.partition("://")[2], []

    def meanwhile(number: int, method: str, path: str) -> None:
        if method == "PUT" and "/c/COMMIT" in path and not copied:
            for name in theirs:
                client.copy_object(Bucket=bucket, Key=f"c/{name}", CopySource=f"{bucket}/other/{name}")
                copied.append(name)

    s3fs.S3FileSystem.clear_instance_cache()
    with faulty(s3_server) as front, monkeypatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", front.url)
        front.arm(meanwhile)
        with pytest.raises(TargetExistsError, match="meanwhile"):
            shardckpt.save(state(MINE), f"{s3_bucket}/c")
        assert sorted(copied) == sorted(theirs)
        assert shardckpt.load(f"{s3_bucket}/c")["step"] == THEIRS
        assert {entry.name for entry in open_store(f"{s3_bucket}/c").list()} == set(theirs)
    s3fs.S3FileSystem.clear_instance_cache()


class PlainBucket(DatedBucket):
    """A bucket of a protocol without conditional requests."""

    protocol = ("plain", "hf")


class OldServer(DatedBucket):
    """A bucket whose server does not know conditional requests."""

    protocol = ("old", "s3a")

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        if mode == "create":
            raise NotImplementedError
        super().pipe_file(path, value, mode, **options)


@pytest.mark.parametrize("kind", [PlainBucket, OldServer])
def test_of_two_first_saves_without_conditional_requests_the_later_stays_complete(
    kind: type[Bucket],
) -> None:
    """The other one ends while the request for `COMMIT` is under way, and finds files of a save that has none."""
    kind.reset()
    ended: list[bool] = []

    def end_other(_count: int, verb: str, path: str) -> None:
        if verb == "put" and path.endswith(COMMIT) and not ended:
            ended.append(True)
            shardckpt.save(state(THEIRS), "bucket://b/c", overwrite=True)

    kind.fault = end_other
    shardckpt.save(state(MINE), "bucket://b/c")
    assert ended
    assert shardckpt.load("bucket://b/c")["step"] == MINE
    assert verify("bucket://b/c").ok


def test_files_that_somebody_removed_are_missed_before_the_commit(s3_bucket: str, monkeypatch) -> None:
    url = f"{s3_bucket}/c"
    shardckpt.save(state(OLD), url)
    whole = session.require_files

    def meanwhile(where, place, sizes):
        payload = next(name for each in sizes for name in each if name.endswith(".safetensors"))
        open_store(url).delete(payload)
        whole(where, place, sizes)

    monkeypatch.setattr(session, "require_files", meanwhile)
    with pytest.raises(ShardckptError, match=r"missing or truncated.*another job"):
        shardckpt.save(state(MINE), url, overwrite=True)
    assert shardckpt.load(url)["step"] == OLD
    assert verify(url).ok


@pytest.mark.parametrize("writer", [session, dcp_storage_writer], ids=["save", "torch"])
@pytest.mark.parametrize("how", ["run", "files", "manifest"])
def test_a_run_that_is_removed_while_its_step_is_committed_gets_no_step(
    tmp_path: Path, writer: Any, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`rm -rf` of the run has removed all, or is about to remove the folder in which the save writes `COMMIT`."""
    name = "_write_file" if writer is session else "_write"
    run, write = tmp_path / "run", getattr(writer, name)

    def remove(publication: Any, name: str, data: bytes) -> None:
        if name == COMMIT:
            pattern = "*.manifest.json" if how == "manifest" else "*.*"
            for path in [] if how == "run" else run.glob(f".step-1.partial-*/{pattern}"):
                path.unlink()
            if how == "run":
                shutil.rmtree(run)
        write(publication, name, data)

    def save_step() -> None:
        if writer is session:
            shardckpt.save(state(MINE), run / "step-1")
        else:
            torch_dcp.save(state(MINE), storage_writer=dcp_storage_writer.StorageWriter(run / "step-1"), no_dist=True)

    monkeypatch.setattr(writer, name, remove)
    with pytest.raises(
        (StorageError, torch_dcp.CheckpointException), match=r"missing or truncated|removed the new files"
    ):
        save_step()
    assert not run.exists() or not list(run.iterdir())
    monkeypatch.undo()
    save_step()
    assert verify(run / "step-1").ok


@pytest.mark.parametrize("is_dead", [False, True], ids=["young", "a day old"])
def test_what_another_save_has_written_stays_until_it_is_old(s3_bucket: str, monkeypatch, is_dead: bool) -> None:
    url = f"{s3_bucket}/c"
    shardckpt.save(state(OLD), url)
    with open_store(url).create("0mwqtjgtgd749fa-00000-00.safetensors") as writer:
        writer.write(b"of a save under way, or of one that was killed")
    if is_dead:
        monkeypatch.setattr(remote_publication, "DEAD_S", -60.0)
    shardckpt.save(state(MINE), url, overwrite=True)
    names = {entry.name for entry in open_store(url).list()}
    assert ("0mwqtjgtgd749fa-00000-00.safetensors" in names) != is_dead
    assert len(names) == 3 + (not is_dead)
    assert shardckpt.load(url)["step"] == MINE


@pytest.mark.parametrize("days", [0, 2])
def test_its_age_is_that_by_the_clock_of_the_store(days: float, monkeypatch: pytest.MonkeyPatch) -> None:
    DatedBucket.reset()
    url, left = "bucket://b/c", "0mwqtjgtgd749fa-00000-00.safetensors"
    shardckpt.save(state(OLD), url)
    with open_store(url).create(left) as writer:
        writer.write(b"of another save")
    DatedBucket.dates[f"b/c/{left}"] = days
    clock = SimpleNamespace(time=lambda: time.time() + 3 * 24 * 3600)  # of this machine: three days ahead
    monkeypatch.setattr(remote_publication, "time", clock)
    shardckpt.save(state(MINE), url, overwrite=True)
    assert (f"b/c/{left}" in DatedBucket.objects) == (days == 0)
    assert shardckpt.load(url)["step"] == MINE
