"""A `Checkpointer` for workers of Ray Train.

A step is reported once it is committed, so Ray never lists a part of one. Ray's barrier in `report` and the ranks'
agreement in a save are called on all workers alike.
"""

from __future__ import annotations

import json
import os
import posixpath
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, SupportsFloat

import ray.train
from typing_extensions import Unpack

from shardckpt import Checkpointer, Local, PeerMemory, inspect, ls
from shardckpt.checkpoint.load.load import LoadParams
from shardckpt.checkpoint.run.step_finder import find_root
from shardckpt.checkpoint.save.async_save import AsyncSaveParams
from shardckpt.checkpoint.save.save import SaveParams
from shardckpt.errors import NoCompleteCheckpoint, StorageError, UsageError
from shardckpt.events import OnEvent
from shardckpt.integrations.ray.ray_experiment import RayExperiment, find_experiment, find_preemption_time
from shardckpt.ranks.process_group import get_ranks
from shardckpt.results import SaveHandle
from shardckpt.witness.witness import Witness

__all__ = ["RayCheckpointer"]

_LIST_SECONDS = 60.0  # maximum time to wait for Ray's list of checkpoints
_REMOVER_FIX = "Leave num_to_keep out of ray.train.CheckpointConfig, and pass keep_last to RayCheckpointer."


class RayCheckpointer(Checkpointer):
    """Manages a run's checkpoints inside the training function of Ray's `TorchTrainer`.

    It is a `Checkpointer` whose root is below the experiment's folder. Each step that is complete there is reported by
    `ray.train.report`, with its metrics and `step`. `restore` loads the newest complete step, on any number of workers.
    All workers call the methods, and each save calls `report` once.

    Either Ray removes old steps or these rules do. With `keep_` rules Ray lists the root itself, because a later run
    fails if a folder in Ray's list is missing. Otherwise Ray lists each step's folder.

    Args:
        root: Folder below the experiment's: a name, or a path or URL.
        save_every: As for `Checkpointer`, also the arguments below.
        dedup: Refer to older steps for unchanged tensors.
        tiers: Tiers in front of the root. A step that only they take is not reported.
        max_failed_restores: How many starts may fail after restoring a step.
        on_event: Called with events.
        witness: Record the training steps after each save.
        deadline: Inside `save_on_signal()`, a function that returns when this worker's node is lost, in seconds since
            the epoch, or None. By default Ray's own notice.
        **rules: Rules that keep steps, such as `keep_last`.

    Raises:
        UsageError: This is not a worker of Ray Train; or torch's process group is missing; or the root is not below the
            experiment's folder; or both Ray's `num_to_keep` and rules or `dedup` are set.
        StorageError: A worker does not see the experiment's folder.
        UnsupportedError: Ray's version or file system is not supported.
        ShardckptError: As for `Checkpointer`.

    Examples:
        >>> ck = RayCheckpointer(save_every=1000, keep_last=3)  # doctest: +SKIP
    """

    def __init__(
        self,
        root: str | os.PathLike[str] = "steps",
        *,
        save_every: int | None = None,
        dedup: bool = False,
        tiers: Sequence[PeerMemory | Local] = (),
        max_failed_restores: int | None = None,
        on_event: OnEvent | None = None,
        witness: Witness | None = None,
        deadline: Callable[[], float | None] = find_preemption_time,
        **rules: Any,
    ) -> None:
        experiment = find_experiment()
        has_rules = any(value is not None for name, value in rules.items() if name.startswith("keep_"))
        _require_one_remover(experiment.num_to_keep, has_rules, dedup)
        self._run = experiment.join(os.fspath(root))
        self._experiment, self._lists_root = experiment, has_rules
        # A group is no argument: a save reports, and Ray's barrier needs all workers.
        self._given: dict[str, Any] = {"save_every": save_every, "dedup": dedup, "tiers": tiers, "witness": witness}
        self._given |= {"max_failed_restores": max_failed_restores, "on_event": on_event, "deadline": deadline, **rules}
        super().__init__(experiment.build_url(self._run), **self._given)
        self._schedule.needs_all_ranks = True  # each one reports the step to Ray, which waits for all
        self._listed = set(self._ask_rank0(self._list_checked, experiment.find_fault()))

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return partial(type(self), self.root, **self._given), ()

    def save(
        self,
        step: int,
        state: Any,
        *,
        metrics: Mapping[str, SupportsFloat] | None = None,
        **options: Unpack[SaveParams],
    ) -> None:
        """Save a step, and report it. Collective; arguments and errors are as for `Checkpointer.save`.

        With tiers it returns when the state is copied, and the step is reported once the root has it.
        """
        if self._given["tiers"]:
            self.async_save(step, state, metrics=metrics, **options)
            return
        self._require_kept_base(options.get("base"))
        super().save(step, state, metrics=metrics, **options)
        self._report(step, metrics, None)

    def async_save(
        self,
        step: int,
        state: Any,
        *,
        metrics: Mapping[str, SupportsFloat] | None = None,
        **options: Unpack[AsyncSaveParams],
    ) -> SaveHandle:
        """Save a step in the background, and report it once it is committed. Collective.

        The arguments are as for `Checkpointer.async_save`. If the save fails, Ray raises its error for the run, as for
        a failed upload of its own.
        """
        self._require_kept_base(options.get("base"))
        handle = super().async_save(step, state, metrics=metrics, **options)
        if handle.path == self.path(step):  # reports are slow: Ray takes one in two seconds, so none for captures
            self._report(step, metrics, handle)
        return handle

    def restore(
        self, state: Any, *, step: int | Literal["best"] | None = None, **options: Unpack[LoadParams]
    ) -> int | None:
        """Load the newest complete step; arguments and errors are as for `Checkpointer.restore`. Collective.

        It may be newer than `ray.train.get_checkpoint()`: a capture in memory, or a step whose report a lost worker did
        not send. Such a step in the root is reported now.

        Raises:
            NoCompleteCheckpoint: Ray has a checkpoint, and the root has none.
            ShardckptError: As for `Checkpointer.restore`.
        """
        named = ray.train.get_checkpoint()
        number = super().restore(state, step=step, **options)
        if number is None and named is not None:
            raise NoCompleteCheckpoint(
                "the run has no step, but Ray Train has a checkpoint",
                where=self.root,
                found=named.path,
                fix="Pass the `root` that has it, load it by shardckpt.load, or start an experiment with a new name.",
            )
        listed, metrics = self._ask_rank0(lambda: (_list_reported(), self._read_metrics(number)))
        self._listed = set(listed)
        if number is not None and metrics is not None and self._find_listed(number) not in self._listed:
            self._report(number, metrics, None)
        return number

    def _report(self, step: int, metrics: Mapping[str, SupportsFloat] | None, handle: SaveHandle | None) -> None:
        """Report a step to Ray: now, or without a wait once it is committed."""
        numbers = {"step": step, **{name: float(value) for name, value in (metrics or {}).items()}}
        path = self._find_listed(step)
        # Ray removes folders by their place in its list. A folder that is listed twice would be removed at its first
        # place, while it is the newest step: so a step that is saved again keeps its place.
        is_new = self._lists_root or path not in self._listed
        self._listed.add(path)
        found = self._experiment.build_checkpoint(path) if is_new else None
        commit = f"{posixpath.join(self._run, self._name(step))}/COMMIT"
        ray.train.report(
            numbers,
            found,
            checkpoint_dir_name=posixpath.relpath(path, self._experiment.path),
            checkpoint_upload_mode=getattr(ray.train.CheckpointUploadMode, "SYNC" if handle is None else "ASYNC"),
            delete_local_checkpoint_after_upload=False,  # after ASYNC Ray would remove the step itself
            checkpoint_upload_fn=partial(_await_commit, self._experiment, handle, commit),
        )

    def _name(self, step: int) -> str:
        return posixpath.basename(self.path(step))

    def _find_listed(self, step: int) -> str:
        """Return the folder that Ray lists for a step, on Ray's file system."""
        return self._run if self._lists_root else posixpath.join(self._run, self._name(step))

    def _ask_rank0(self, answer: Callable[[], Any], fault: Exception | None = None) -> Any:
        """Return rank 0's answer; raise a rank's fault, or the answer's, on all ranks. Collective."""

        def decide(messages: list[bytes]) -> list[bytes]:
            return [json.dumps(answer()).encode()] * len(messages)

        return json.loads(get_ranks(None).ask_rank0(f"asking Ray for steps of {self.root}", fault or b"", decide))

    def _read_metrics(self, step: int | None) -> Mapping[str, float] | None:
        """Return the metrics of a step in the root; None if it is not there."""
        if step is None or step not in self.steps():
            return None
        found = [each.metrics for each in ls(self.root, metrics=True).complete if each.number == step]
        return found[0] or {} if found else {}

    def _list_checked(self) -> list[str]:
        """Return what Ray lists. Raises UsageError if an earlier run of the experiment left steps to the other side."""
        listed = _list_reported()
        if self._lists_root and any(path.startswith(f"{self._run}/") for path in listed):
            raise UsageError(
                "Ray Train lists steps that the keep rules would remove, and does not start without them",
                where=self.root,
                found="an earlier run of this experiment without keep rules",
                fix="Leave the keep rules out, or start an experiment with a new name.",
            )
        if self._experiment.num_to_keep is not None and (self._run in listed or self._has_references()):
            raise UsageError(
                "Ray Train would remove steps that are needed",
                where=self.root,
                found=f"num_to_keep={self._experiment.num_to_keep}, after a run with keep rules, dedup or a base",
                fix=_REMOVER_FIX,
            )
        return listed

    def _has_references(self) -> bool:
        """Return whether a step refers to files of another."""
        names = (file.name for step in self.steps() for file in inspect(self.path(step)).files)
        return any(name.startswith("../") and not name.startswith("../../") for name in names)

    def _require_kept_base(self, base: object) -> None:
        """Raise UsageError for a base that Ray may remove."""
        if base is None or self._experiment.num_to_keep is None:
            return
        if callable(base) or find_root(base).startswith(f"{self.root}/"):
            raise UsageError("`base` must be kept, and Ray removes steps", found=base, fix=_REMOVER_FIX)


def _list_reported() -> list[str]:
    """Return the folders that Ray lists."""
    mode = ray.train.CheckpointConsistencyMode.COMMITTED
    return [each.checkpoint.path for each in ray.train.get_all_reported_checkpoints(mode, timeout_s=_LIST_SECONDS)]


def _require_one_remover(num_to_keep: int | None, has_rules: bool, dedup: bool) -> None:
    """Raise UsageError if both Ray and the rules would remove steps."""
    if num_to_keep is None or not (has_rules or dedup):
        return
    what = "keep rules" if has_rules else "dedup, whose steps refer to older ones"
    raise UsageError(
        "either Ray Train or RayCheckpointer must remove old steps, not both",
        found=f"num_to_keep={num_to_keep} and {what}",
        fix=f"{_REMOVER_FIX} Or keep num_to_keep, and leave the others out.",
    )


def _await_commit(experiment: RayExperiment, handle: SaveHandle | None, commit: str, reported: Any, _name: str) -> Any:
    """Wait until a step is committed; return what Ray lists. On Ray's thread, or in `report`."""
    if handle is not None:
        handle.result()
    if not experiment.has_file(commit):
        raise StorageError(
            "Ray Train does not see a step that was just saved",
            where=experiment.build_url(commit),
            fix="Give shardckpt and Ray the same storage: endpoint, account and region.",
        )
    return reported
