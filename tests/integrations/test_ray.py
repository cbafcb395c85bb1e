"""RayCheckpointer in workers whose report, storage and list of checkpoints are Ray's own, without Ray's processes."""

from __future__ import annotations

import copy
import math
import os
import shutil
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

import shardckpt
from shardckpt.errors import (
    NoCompleteCheckpoint,
    RankError,
    ShardckptError,
    StorageError,
    TargetExistsError,
    UnsupportedError,
    UsageError,
)
from tests.kit.ranks.harness import outcomes, run
from tests.kit.runs.tier_runs import wait_for

pytest.importorskip("ray.train", exc_type=ImportError)
import pyarrow.fs
import ray.train

from shardckpt.integrations.ray import RayCheckpointer
from shardckpt.integrations.ray.ray_experiment import find_preemption_time
from tests.kit.runs.ray_workers import NAME, RayWorker, be_worker

pytestmark = pytest.mark.filterwarnings("ignore:The `(json|parse_obj)` method is deprecated")  # in Ray


def make_state(value: float = 0.0) -> dict[str, Any]:
    return {"w": torch.full((50,), float(value)), "step": int(value)}


def save(ck: RayCheckpointer, *steps: int) -> None:
    for step in steps:
        ck.async_save(step, make_state(step), metrics={"loss": 1 / step})
    ck.wait()


def restore(ck: RayCheckpointer, **options: Any) -> int | None:
    state = make_state(-1.0)
    step = ck.restore(state, **options)
    assert step is None or (state["step"] == step and torch.equal(state["w"], make_state(step)["w"]))
    return step


class TestReports:
    def test_each_step_is_listed_and_a_later_run_restores_the_newest(self, tmp_path: Path) -> None:
        with be_worker(tmp_path) as worker:
            ck = RayCheckpointer()
            assert ck.root == str(tmp_path / NAME / "steps")
            assert restore(ck) is None
            save(ck, 1)
            ck.save(2, make_state(2.0), metrics={"loss": torch.tensor(0.5)})
            assert worker.listed == ["steps/step-00000001", "steps/step-00000002"]
            newest = worker.manager.latest_checkpoint_result
            assert newest.metrics == {"step": 2, "loss": 0.5}
            assert shardckpt.verify(newest.checkpoint.path).ok, "Ray removes nothing after its upload"
        with be_worker(tmp_path) as worker:
            assert restore(RayCheckpointer()) == 2
            assert worker.reports == 2, "Ray knows it already"

    def test_a_step_is_reported_once_it_is_committed(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        from shardckpt.checkpoint.save.session import SaveSession

        seen, commit = [], SaveSession.commit
        with be_worker(tmp_path) as worker:
            queue = worker.execution_context.result_queue
            monkeypatch.setattr(SaveSession, "commit", lambda *given: (seen.append(queue.qsize()), commit(*given))[1])
            ck = RayCheckpointer()
            save(ck, 1)
            worker.checkpoint_upload_threadpool.submit(str).result(30)
            assert (seen, queue.qsize()) == ([0], 1)

    def test_a_failed_save_is_an_error_of_the_run_and_not_reported(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from shardckpt.checkpoint.save.session import SaveSession

        def fail(*given: object) -> None:
            raise StorageError("the disk is gone")

        with be_worker(tmp_path) as worker:
            ck = RayCheckpointer()
            with monkeypatch.context() as patch:
                patch.setattr(SaveSession, "commit", fail)
                ck.async_save(1, make_state(1.0))
                assert "the disk is gone" in str(worker.failures.get(timeout=30))
            assert worker.listed == []

    def test_a_step_that_a_lost_worker_did_not_report_is_restored_and_reported(self, tmp_path: Path) -> None:
        with be_worker(tmp_path):
            save(RayCheckpointer(), 1)
        with be_worker(tmp_path) as worker:
            save(RayCheckpointer(), 2)
            worker.checkpoint_upload_threadpool.submit(str).result(30)  # it is lost before the controller asks for it
        with be_worker(tmp_path) as worker:
            assert worker.listed == []
            assert restore(RayCheckpointer()) == 2
            assert worker.listed == ["steps/step-00000002"]
            assert worker.manager.latest_checkpoint_result.metrics == {"step": 2, "loss": 0.5}

    def test_steps_that_only_memory_takes_are_restored_and_not_reported(self, tmp_path: Path) -> None:
        (tmp_path / "memory").mkdir()
        tiers = [shardckpt.PeerMemory(every=1, max_bytes="10MB", path=tmp_path / "memory")]
        with be_worker(tmp_path) as worker:
            ck = RayCheckpointer(save_every=2, tiers=tiers)
            for step in (1, 2, 3):
                ck.save(step, make_state(step))
            ck.wait()
            assert worker.listed == ["steps/step-00000002"]
        with be_worker(tmp_path) as worker:
            assert restore(RayCheckpointer(save_every=2, tiers=tiers)) == 3
            assert worker.listed == ["steps/step-00000002"]

    def test_a_copy_has_the_same_arguments(self, tmp_path: Path) -> None:
        with be_worker(tmp_path):
            ck = copy.copy(RayCheckpointer("a/b", keep_last=2, save_every=3))
            assert (ck.root, ck.should_save(3)) == (str(tmp_path / NAME / "a" / "b"), True)
            save(ck, 1, 2, 3)
            assert ck.steps() == (2, 3)


class TestRemoval:
    def test_a_later_run_starts_after_the_keep_rules_removed_steps(self, tmp_path: Path) -> None:
        with be_worker(tmp_path) as worker:
            save(RayCheckpointer(keep_last=1), 1, 2, 3)
            assert worker.listed == ["steps"] * 3, "Ray does not start if a folder that it lists is gone"
            assert worker.manager.latest_checkpoint_result.metrics["step"] == 3
        with be_worker(tmp_path) as worker:
            ck = RayCheckpointer(keep_last=1)
            assert (restore(ck), ck.steps()) == (3, (3,))

    def test_num_to_keep_removes_old_steps(self, tmp_path: Path) -> None:
        with be_worker(tmp_path, num_to_keep=2) as worker:
            ck = RayCheckpointer()
            for step in (1, 2, 3):
                save(ck, step)
                worker.settle()
            assert ck.steps() == (2, 3)

    def test_num_to_keep_does_not_remove_a_step_that_was_saved_again(self, tmp_path: Path) -> None:
        with be_worker(tmp_path, num_to_keep=3) as worker:
            save(RayCheckpointer(), 1, 2, 3)
            worker.settle()
        damaged = tmp_path / NAME / "steps" / "step-00000003" / "COMMIT"
        damaged.write_bytes(b"damaged")
        with be_worker(tmp_path, num_to_keep=3) as worker:
            ck = RayCheckpointer()
            with pytest.warns(UserWarning, match="step 3"):
                assert restore(ck) == 2
            save(ck, 3)
            assert worker.listed == [f"steps/step-0000000{number}" for number in (1, 2, 3)], "it keeps its place"
            for step in (4, 5):
                save(ck, step)
                worker.settle()
                assert ck.latest() == step
            assert ck.steps() == (3, 4, 5)

    @pytest.mark.parametrize(("given", "named"), [({"keep_last": 2}, "keep rules"), ({"dedup": True}, "dedup")])
    def test_num_to_keep_with_rules_or_dedup_is_refused(
        self, tmp_path: Path, given: dict[str, Any], named: str
    ) -> None:
        with be_worker(tmp_path, num_to_keep=2), pytest.raises(UsageError, match=named) as caught:
            RayCheckpointer(**given)
        assert "Leave num_to_keep out of ray.train.CheckpointConfig" in str(caught.value)

    def test_num_to_keep_with_a_base_that_ray_would_remove_is_refused(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        shardckpt.save(make_state(), tmp_path / "base", store_digests=True)
        with be_worker(tmp_path, num_to_keep=2):
            ck = RayCheckpointer()
            ck.save(1, make_state(1.0), base=tmp_path / "base")
            monkeypatch.chdir(ck.root)
            for call, base in ((ck.save, ck.path(1)), (ck.async_save, "step-00000001"), (ck.save, lambda: ck.path(1))):
                with pytest.raises(UsageError, match="`base` must be kept"):
                    call(2, make_state(2.0), base=base)
            assert ck.steps() == (1,)

    def test_rules_are_refused_where_ray_lists_the_steps_of_an_earlier_run(self, tmp_path: Path) -> None:
        with be_worker(tmp_path) as worker:
            save(RayCheckpointer(), 1)
            worker.settle()
            with pytest.raises(UsageError, match="an earlier run of this experiment without keep rules"):
                RayCheckpointer(keep_last=1)

    @pytest.mark.parametrize("earlier", [{"keep_last": 1}, {"dedup": True}])
    def test_num_to_keep_is_refused_where_ray_would_remove_what_an_earlier_run_needs(
        self, tmp_path: Path, earlier: dict[str, Any]
    ) -> None:
        with be_worker(tmp_path) as worker:
            save(RayCheckpointer(**earlier), 1, 2)
            ck = RayCheckpointer(**earlier)
            ck.save(3, {**make_state(2.0), "step": 3})  # with dedup it refers to step 2
            worker.settle()
        with be_worker(tmp_path, num_to_keep=1), pytest.raises(UsageError, match="would remove steps that are needed"):
            RayCheckpointer()
        with be_worker(tmp_path):
            assert RayCheckpointer(**earlier).latest() == 3


class TestStorage:
    @pytest.mark.parametrize("root", ["", ".", "../other", "/elsewhere", "s3://bucket/run", "a/../.."])
    def test_a_root_that_is_not_below_the_experiment_is_refused(self, tmp_path: Path, root: str) -> None:
        with be_worker(tmp_path), pytest.raises(UsageError, match="must be below the folder of Ray's experiment"):
            RayCheckpointer(root)
        assert not (tmp_path / "other").exists()

    def test_a_root_may_be_named_in_full(self, tmp_path: Path) -> None:
        with be_worker(tmp_path):
            assert RayCheckpointer(tmp_path / NAME / "runs" / "a").root == str(tmp_path / NAME / "runs" / "a")

    def test_a_checkpoint_that_the_root_does_not_have_is_an_error(self, tmp_path: Path) -> None:
        with be_worker(tmp_path) as worker:
            save(RayCheckpointer(), 1)
            worker.settle()
        with be_worker(tmp_path), pytest.raises(NoCompleteCheckpoint, match="step-00000001"):
            restore(RayCheckpointer("another"))

    def test_a_bucket_is_shared_with_pyarrow(self, tmp_path: Path, s3_bucket: str, s3_server: str) -> None:
        host = s3_server.removeprefix("http://")
        filesystem = pyarrow.fs.S3FileSystem(endpoint_override=host, scheme="http", region="us-east-1")
        storage = f"{s3_bucket.removeprefix('s3://')}/runs"
        with be_worker(storage, storage_filesystem=filesystem) as worker:
            ck = RayCheckpointer()
            assert ck.root == f"{s3_bucket}/runs/{NAME}/steps"
            save(ck, 1)
            assert worker.listed == ["steps/step-00000001"]
        with be_worker(storage, storage_filesystem=filesystem):
            assert restore(RayCheckpointer()) == 1

    def test_a_file_system_of_fsspec_is_taken(self, bucket: str) -> None:
        own = fsspec.filesystem("bucket")
        own.mkdir("b")
        filesystem = pyarrow.fs.PyFileSystem(pyarrow.fs.FSSpecHandler(own))
        with be_worker("b/runs", storage_filesystem=filesystem) as worker:
            ck = RayCheckpointer()
            assert ck.root == f"{bucket}/runs/{NAME}/steps"
            save(ck, 1)
            assert worker.listed == ["steps/step-00000001"]

    def test_a_store_in_which_ray_does_not_see_the_step_is_an_error(self, tmp_path: Path, s3_bucket: str) -> None:
        elsewhere = pyarrow.fs.SubTreeFileSystem(str(tmp_path), pyarrow.fs.LocalFileSystem())
        with be_worker("runs", storage_filesystem=elsewhere), pytest.raises(UnsupportedError, match="subtree"):
            RayCheckpointer()

    def test_saved_bytes_that_ray_does_not_see_are_an_error(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with be_worker(tmp_path / "a") as worker:
            ck = RayCheckpointer()
            monkeypatch.setattr(ck, "_run", str(tmp_path / "b"))  # as with another endpoint
            with pytest.raises(StorageError, match="does not see a step that was just saved"):
                ck.save(1, make_state(1.0))
            assert worker.listed == []


class TestWorkers:
    def test_outside_of_a_worker_it_says_what_to_use(self) -> None:
        with pytest.raises(UsageError, match="must be built in the training function of a worker"):
            RayCheckpointer()

    def test_local_mode_is_refused(self) -> None:
        from ray.train.v2._internal.execution import train_fn_utils

        train_fn_utils.set_train_fn_utils(train_fn_utils.LocalTrainFnUtils("experiment"))
        try:
            with pytest.raises(UsageError, match="local mode"):
                RayCheckpointer()
        finally:
            train_fn_utils.set_train_fn_utils(None)

    def test_an_old_ray_train_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delattr(ray.train, "get_all_reported_checkpoints")
        with pytest.raises(UnsupportedError, match="RAY_TRAIN_V2_ENABLED"):
            RayCheckpointer()

    def test_workers_that_are_no_ranks_of_torch_are_refused(self, tmp_path: Path) -> None:
        with be_worker(tmp_path, world=2), pytest.raises(UsageError, match="a process group of 1 for 2 workers"):
            RayCheckpointer()

    def test_a_storage_that_one_worker_does_not_see_is_an_error_on_all(self, tmp_path: Path) -> None:
        for each in outcomes(2, build_on_unshared_storage, tmp_path):
            assert "does not see the folder of Ray's experiment" in str(each.raised)

    def test_what_a_dead_worker_left_of_a_step_is_not_mixed_with_the_next_save(self, tmp_path: Path) -> None:
        assert all("died" in (each.waits or "") for each in outcomes(2, die_before_the_commit, tmp_path))
        steps = tmp_path / NAME / "steps"
        assert {name for _, _, names in os.walk(steps) for name in names}, "the dead workers left files"
        with be_worker(tmp_path) as worker:
            ck = RayCheckpointer()
            assert restore(ck) == 1
            save(ck, 2)
            assert worker.listed == ["steps/step-00000001", "steps/step-00000002"]
        names = set(os.listdir(steps / "step-00000002")) - {"COMMIT"}
        assert len({name.partition(".")[0].partition("-")[0] for name in names}) == 1, "all files are of one save"
        assert shardckpt.verify(str(steps / "step-00000002")).ok

    def test_a_save_that_fails_on_one_worker_is_raised_and_reported_by_none(self, tmp_path: Path) -> None:
        assert run(2, fail_on_one_worker, tmp_path) == [(1, (1,))] * 2


def build_on_unshared_storage(rank: int, world: int, folder: Path) -> None:
    with be_worker(folder / str(rank), rank=rank, world=world):
        if rank == 1:
            shutil.rmtree(folder / "1" / NAME)
        RayCheckpointer()


def die_before_the_commit(rank: int, world: int, folder: Path) -> None:
    from shardckpt.checkpoint.save.session import SaveSession

    with be_worker(folder, rank=rank, world=world):
        ck = RayCheckpointer()
        ck.save(1, make_state(1.0))
        SaveSession.commit = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        ck.save(2, make_state(-2.0))


def fail_on_one_worker(rank: int, world: int, folder: Path) -> tuple[int, tuple[int, ...]]:
    with be_worker(folder, rank=rank, world=world) as worker:
        ck = RayCheckpointer()
        ck.save(1, make_state(1.0))
        with pytest.raises((ShardckptError, TargetExistsError, RankError)):
            ck.save(2, {"w": object()} if rank else make_state(2.0))
        return worker.reports, ck.steps()


class TestPreemption:
    """Ray calls training functions outside the main thread, where no signal can be handled."""

    def test_a_worker_whose_node_is_taken_away_saves_and_trains_on(self, tmp_path: Path) -> None:
        seen: list[Any] = []

        def train(worker: RayWorker) -> list[int]:
            ck, saved = RayCheckpointer(save_every=1000, on_event=seen.append), []
            with ck.save_on_signal():
                for step in range(1, 6):
                    if step == 3:
                        worker.take_away(int(time.time() * 1000) + 30_000, 0)
                        wait_for(lambda: ck._schedule.has_signal)
                    if ck.should_save(step):
                        ck.save(step, make_state(step))
                        saved.append(step)
            return saved

        with be_worker(tmp_path) as worker, ThreadPoolExecutor(1) as pool:
            assert pool.submit(train, worker).result(60) == [3]
            assert worker.listed == ["steps/step-00000003"]
        (event,) = [each for each in seen if each.operation == "preemption"]
        assert (event.step, event.committed, event.notices) == (3, ("root",), 1) and 0 < event.grace_s <= 30

    def test_a_worker_whose_node_stays_has_no_notice_of_its_own(self, tmp_path: Path) -> None:
        with be_worker(tmp_path) as worker:
            worker.take_away(int(time.time() * 1000) + 30_000, 1)
            assert find_preemption_time() is None
            worker.take_away(2_000_000_000_000, 0, 1)
            assert find_preemption_time() == 2e9
            worker.take_away(None, 0)
            assert find_preemption_time() == math.inf

    def test_another_function_replaces_that_of_ray(self, tmp_path: Path) -> None:
        with be_worker(tmp_path):
            ck = copy.copy(RayCheckpointer(deadline=lambda: time.time() + 30))
            with ck.save_on_signal():
                wait_for(lambda: ck._schedule.has_signal)
                assert ck.should_save(1)
