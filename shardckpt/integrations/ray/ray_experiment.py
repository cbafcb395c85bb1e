"""The experiment of Ray Train to which a worker belongs: its storage, and who removes checkpoints there."""

from __future__ import annotations

import math
import posixpath
from dataclasses import dataclass
from typing import Any

import ray.train
from ray.train.v2._internal.execution.context import get_train_context

from shardckpt.errors import StorageError, UnsupportedError, UsageError
from shardckpt.ranks.process_group import get_ranks

__all__ = ["RayExperiment", "find_experiment", "find_preemption_time"]

_MARKER = ".validate_storage_marker"  # Ray's driver writes it into the experiment's folder
_SCHEMES = {"s3": "s3", "gcs": "gs", "abfs": "abfs"}  # pyarrow's type of a file system, fsspec's scheme


@dataclass(frozen=True)
class RayExperiment:
    """The folder of Ray's experiment, as this worker knows it."""

    filesystem: Any  # pyarrow's
    path: str  # on the file system
    prefix: str  # what fsspec needs before a path
    num_to_keep: int | None  # Ray's

    def join(self, root: str) -> str:
        """Return the path of a folder below the experiment's. Raises UsageError for another one."""
        plain = root.removeprefix(self.prefix)
        path = posixpath.normpath(posixpath.join(self.path, plain))
        if "://" in plain or not path.startswith(f"{self.path}/"):
            raise UsageError(
                "`root` must be below the folder of Ray's experiment",
                found=root,
                expected=f"a name, or a folder in {self.build_url(self.path)}",
                fix="Set storage_path in ray.train.RunConfig to move the experiment.",
            )
        return path

    def build_url(self, path: str) -> str:
        """Return a path as shardckpt takes it."""
        return self.prefix + path

    def build_checkpoint(self, path: str) -> Any:
        """Return Ray's object for a folder."""
        return ray.train.Checkpoint(path, self.filesystem)

    def has_file(self, path: str) -> bool:
        """Return whether Ray's file system has a file."""
        return bool(self.filesystem.get_file_info(path).is_file)

    def find_fault(self) -> Exception | None:
        """Return the fault of this worker: it does not see the experiment, or torch does not see all workers."""
        context, size = ray.train.get_context(), get_ranks(None).size
        if size != context.get_world_size():
            found = f"a process group of {size} for {context.get_world_size()} workers"
            fix = "Use ray.train.torch.TorchTrainer."
            return UsageError("all workers must be ranks of torch's process group", found=found, fix=fix)
        found = ""
        try:
            if self.has_file(f"{self.path}/{_MARKER}"):
                return None
        except OSError as error:
            found = str(error)
        return StorageError(
            f"worker {context.get_world_rank()} does not see the folder of Ray's experiment",
            where=self.build_url(self.path),
            found=found,
            fix="Set storage_path in ray.train.RunConfig to a bucket, or a file system that all nodes share.",
        )


def find_experiment() -> RayExperiment:
    """Return the experiment of this worker."""
    if not hasattr(ray.train, "get_all_reported_checkpoints"):
        fix = "Install ray 2.60 or newer, and leave RAY_TRAIN_V2_ENABLED out."
        raise UnsupportedError("this version of Ray Train is not supported", found=f"ray {ray.__version__}", fix=fix)
    try:
        storage = ray.train.get_context().get_storage()
    except NotImplementedError as error:
        fix = "Use ScalingConfig(num_workers=1)."
        raise UsageError("Ray Train's local mode has no storage", fix=fix) from error
    except (RuntimeError, DeprecationWarning) as error:
        raise UsageError(
            "RayCheckpointer must be built in the training function of a worker of Ray Train",
            fix="Build it in train_loop_per_worker of ray.train.torch.TorchTrainer. Elsewhere use Checkpointer.",
        ) from error
    filesystem, path = storage.storage_filesystem, storage.experiment_fs_path
    return RayExperiment(filesystem, path, _find_prefix(filesystem, path), _find_num_to_keep())


def find_preemption_time() -> float | None:
    """Return when Ray loses this worker's node, in seconds since the epoch; infinite if unknown, None if it stays."""
    # `ray.train.get_preemption_info` is a barrier for all workers, which no thread may call by itself.
    info = get_train_context().preemption_context.preemption_info
    if info is None or ray.train.get_context().get_world_rank() not in info.preempted_ranks:
        return None
    return math.inf if info.deadline_ms is None else info.deadline_ms / 1000


def _find_num_to_keep() -> int | None:
    """Return how many checkpoints Ray keeps; its public context does not say."""
    kept: int | None = get_train_context().train_run_context.run_config.checkpoint_config.num_to_keep
    return kept


def _find_prefix(filesystem: Any, path: str) -> str:
    """Return what fsspec needs before the paths on one of pyarrow's file systems."""
    kind = filesystem.type_name
    if kind == "local":
        return ""
    if kind in _SCHEMES:
        return f"{_SCHEMES[kind]}://"
    wrapped = getattr(getattr(filesystem, "handler", None), "fs", None)  # one of fsspec
    if wrapped is not None:
        return str(wrapped.unstrip_protocol(path)).removesuffix(path)
    raise UnsupportedError(
        "this file system of Ray Train is not supported",
        found=kind,
        fix="Set storage_path to a shared folder, to s3://, gs:// or abfs://, or pass a file system of fsspec.",
    )
