"""Workers of Ray Train without Ray's processes: report, storage and the list of checkpoints are Ray's own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from queue import Queue
from types import SimpleNamespace
from typing import Any

import ray.train
from ray.train.v2._internal.execution import context as ray_context
from ray.train.v2._internal.execution import train_fn_utils
from ray.train.v2._internal.execution.checkpoint.checkpoint_manager import CheckpointManager
from ray.train.v2._internal.execution.preemption import PreemptionContext
from ray.train.v2._internal.execution.storage import StorageContext

NAME = "experiment"


class RayWorker(ray_context.TrainContext):
    """A worker and its controller in one process; actors, which would need a cluster, are replaced."""

    def __init__(self, config: ray.train.RunConfig, rank: int = 0, world: int = 1) -> None:
        self.storage_context = StorageContext(config.storage_path, config.name, config.storage_filesystem)
        self.manager = CheckpointManager(config.checkpoint_config, self.storage_context)
        latest = self.manager.latest_checkpoint_result
        self.failures: Queue[Exception] = Queue()
        runner = SimpleNamespace(get_exception_queue=lambda: self.failures)
        super().__init__(
            train_run_context=SimpleNamespace(run_config=config),
            distributed_context=ray_context.DistributedContext(rank, world, rank, world, 0),
            execution_context=ray_context.ExecutionContext(None, Queue(), runner, []),
            storage_context=self.storage_context,
            preemption_context=PreemptionContext(),
            controller_actor=None,
            dataset_shard_provider=None,
            checkpoint=latest.checkpoint if latest else None,
            current_report_index=self.manager._current_report_index,
            report_order_condition=threading.Condition(),
            checkpoint_upload_threadpool=ThreadPoolExecutor(max_workers=1),
        )

    def _sync_checkpoint_dir_name_across_ranks(self, checkpoint_dir_name: str | None = None) -> str:
        return checkpoint_dir_name or "checkpoint"

    def get_all_reported_checkpoints(self, consistency_mode: Any, timeout_s: float | None = None) -> list[Any]:
        self.settle()
        asked = self.manager.get_all_reported_checkpoints(self.report_call_index, consistency_mode, timeout_s)
        return asyncio.run(asked)

    def settle(self) -> None:
        """Wait for Ray's thread, and register what it has reported, as the controller does."""
        self.checkpoint_upload_threadpool.submit(str).result(30)

        async def register() -> None:
            while not self.execution_context.result_queue.empty():
                report = self.execution_context.result_queue.get()
                self.manager.after_report(report, [report.metrics])

        asyncio.run(register())

    def take_away(self, deadline_ms: int | None, *ranks: int) -> None:
        """Say that the nodes with some ranks are taken away, as Ray's watcher does to all workers."""
        self.preemption_context.preemption_info = ray.train.PreemptionInfo(deadline_ms, {"node": list(ranks)})

    @property
    def listed(self) -> list[str]:
        """What Ray lists: paths from the experiment's folder on, the oldest first."""
        self.settle()
        return [
            result.checkpoint.path.removeprefix(f"{self.storage_context.experiment_fs_path}/")
            for result in self.manager._checkpoint_results
        ]

    @property
    def reports(self) -> int:
        """How many reports Ray has taken."""
        self.settle()
        return int(self.manager._current_report_index)


@contextmanager
def be_worker(storage: Path | str, *, rank: int = 0, world: int = 1, **options: Any) -> Iterator[RayWorker]:
    """Be a worker of a run in a storage; the next one is a later run, or an attempt after a failure."""
    kept = {name: options.pop(name) for name in ("num_to_keep",) if name in options}
    checkpoints = ray.train.CheckpointConfig(**kept)
    config = ray.train.RunConfig(name=NAME, storage_path=str(storage), checkpoint_config=checkpoints, **options)
    worker = RayWorker(config, rank, world)
    ray_context.set_train_context(worker)
    train_fn_utils.set_train_fn_utils(train_fn_utils.DistributedTrainFnUtils())
    try:
        yield worker
    finally:
        worker.checkpoint_upload_threadpool.shutdown()
        train_fn_utils.set_train_fn_utils(None)
        ray_context.set_train_context(None)
