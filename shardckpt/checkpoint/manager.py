"""`Checkpointer`: the steps of a run. Which one to load, which ones to keep, a last save before the job has to go."""

from __future__ import annotations

import inspect
import json
import operator
import os
import signal
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import reduce
from types import FrameType
from typing import Any, Literal, NamedTuple, SupportsFloat

import torch.distributed as dist

from shardckpt.checkpoint.coordinator import Coordinator, get_channels
from shardckpt.checkpoint.load.load import MIXED, load
from shardckpt.checkpoint.save.async_save import async_save
from shardckpt.checkpoint.save.handle import SaveEvent, SaveHandle
from shardckpt.checkpoint.save.save import EARLIER_NAMES, RunNotes, read_notes, save
from shardckpt.deprecation import renamed_params
from shardckpt.errors import (
    CheckpointError,
    MissingFileError,
    NoCompleteCheckpoint,
    PrecisionError,
    RankError,
    SourceNotFoundError,
    StorageError,
    TargetExistsError,
    UnknownFormatError,
    UnsupportedError,
    UsageError,
    escape,
)
from shardckpt.format.native.commit import BRANCH
from shardckpt.format.native.run_directory import (
    METRIC,
    RunDirectory,
    StepFolder,
    delete_orphan,
    delete_steps,
    find_orphans,
    manifest_fault,
    read_metrics,
    read_run,
    read_step,
    step_name,
)
from shardckpt.format.run_start import require_start_of_run
from shardckpt.plan.retention import (
    Retention,
    SavedStep,
    is_expired,
    parse_seconds,
    require_metric,
    steps_to_delete,
    with_trusted_times,
)
from shardckpt.storage.resolve_url import as_url, local_path, open_store
from shardckpt.storage.store import Store

_DAMAGE = (CheckpointError, MissingFileError, SourceNotFoundError, UnknownFormatError)
"""What a step raises that is damaged, or is being removed by somebody else."""

_MOST = 10**18
_SHOWN = 5
_LOOKS = 50
"""How many steps `restore` tries in a row that another process removes before they are loaded."""


class Checkpointer:
    """The checkpoints of a run, a folder for each step: `step-00001000` below `root`.

    Every method but `path` is collective: the ranks of the group call it together, the first one looks at the storage,
    and all come to the same answer. A step exists once its `COMMIT` does, whatever its folder's name says.

    A step is kept if one of the `keep_` rules keeps it; without any rule all are. Only complete steps count, and
    neither the newest complete one nor the one just saved is ever removed. What dead saves have left is removed a day
    after it last changed.

    Args:
        root: Folder of the run: a path, or a URL that fsspec knows.
        keep_last: Keep so many of the newest steps.
        keep_every: Keep steps whose number this divides.
        keep_best: Keep so many of the best steps by `metric`; steps without it too, unless there are other rules.
        metric: What `keep_best` goes by, of the metrics given to `save`.
        mode: Whether the best step has the smallest metric, or the largest.
        keep_for: Keep steps for so long: a timedelta, seconds, or text such as `"7d"`.
        save_every: `should_save` is true for steps that this divides.
        dedup: Write only tensors that have changed since the newest complete step, and refer to that, or to what it
            refers to, for the others. Removing a step leaves there what others refer to.
        process_group: The ranks; all where None.

    Raises:
        UsageError: A rule that would mean nothing; a root that is no place.

    Attributes:
        root: As given, without a slash at its end.

    Example:
        >>> ck = shardckpt.Checkpointer("s3://bucket/run", keep_last=3, save_every=1000)  # doctest: +SKIP
        >>> start = ck.restore(state) or 0
        >>> for step in range(start + 1, steps + 1):
        ...     train(state)
        ...     if ck.should_save(step):
        ...         ck.save(step, state)
    """

    @renamed_params(group="process_group")
    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        keep_last: int | None = None,
        keep_every: int | None = None,
        keep_best: int | None = None,
        metric: str = "loss",
        mode: Literal["min", "max"] = "min",
        keep_for: timedelta | float | str | None = None,
        save_every: int | None = None,
        dedup: bool = False,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        self._rules = Retention(keep_last, keep_every, keep_best, mode, parse_seconds(keep_for), metric)
        if save_every is not None and (type(save_every) is not int or save_every < 1):
            raise UsageError("`save_every` is no number of steps", found=repr(save_every), expected="an integer from 1")
        self.root = as_url(root).rstrip("/") or "/"
        if self.root.endswith(":") and as_url(root).startswith(f"{self.root}//"):
            raise UsageError("this URL names no place", where=as_url(root), fix="Name a bucket, or a folder in it.")
        self._save_every, self._dedup, self._group = save_every, dedup, process_group
        self._metrics: dict[str, Mapping[str, float]] = {}
        self._damaged: set[str] = set()
        self._last_step: int | None = None
        self._restored: int | None = None
        self._branch: int | None = None
        self._is_tidy = False
        self._signals = _Signals()
        self._background: _BackgroundSave | None = None

    def path(self, step: int) -> str:
        """Return where a step is saved.

        Args:
            step: Its number.

        Raises:
            UsageError: It is no number of a step.
        """
        return self._place(step_name(_number(step)))

    def _place(self, name: str) -> str:
        return f"{self.root.rstrip('/')}/{name}"

    # Which steps there are

    def steps(self) -> tuple[int, ...]:
        """Return the numbers of the complete steps, the oldest first. Collective.

        What was saved after `restore` of a step is newer than all that lay there then, whatever the numbers.

        Raises:
            UnsupportedError: The newest step was written by a newer version of shardckpt, which the message names.
            UnknownFormatError: No step lies here, but another checkpoint; the message says which.
            StorageError: The storage failed; RankError on the other ranks.
        """
        found, unreadable = self._ask_rank0("listing steps", self._list_steps)
        if unreadable:
            raise self._unreadable(unreadable)
        return tuple(found)

    def _list_steps(self) -> tuple[list[int], str]:
        """Return the complete steps, and the fault of a newer one that another version wrote."""
        run = self._run()
        newest = run.complete[-1].number if run.complete else -1
        unreadable = [step.fault for step in run.steps if step.is_newer and step.number > newest]
        return [step.number for step in run.complete], unreadable[-1] if unreadable else ""

    def _unreadable(self, fault: str) -> UnsupportedError:
        return UnsupportedError(
            "the newest step was written by a version of shardckpt that this one cannot read",
            where=self.root,
            found=fault,
            fix="Update shardckpt, or choose another folder.",
        )

    def latest(self) -> int | None:
        """Return the number of the newest complete step, None where there is none. Collective.

        Raises:
            UnsupportedError: The newest step was written by a newer version of shardckpt, which the message names.
            UnknownFormatError: No step lies here, but another checkpoint; the message says which.
            StorageError: The storage failed; RankError on the other ranks.
        """
        return next(reversed(self.steps()), None)

    def _run(self) -> RunDirectory:
        """Return the run; where it has no step, only after a look at what else lies there. On the first rank."""
        run = read_run(self._store())
        if not run.steps:
            require_start_of_run(self.root)
        return run

    def _store(self) -> Store:
        path = local_path(self.root)
        if path is not None and os.path.isfile(path):
            raise UsageError("a file lies where the folder of a run would be", where=self.root, fix="Choose another.")
        return open_store(self.root)

    def _ask_rank0(self, what: str, answer: Callable[[], Any], fault: Exception | None = None) -> Any:
        """Return rank 0's answer on every rank; or raise on every rank the fault of this one's call."""
        coordinator = get_channels(self._group).main
        return json.loads(
            coordinator.coordinate(
                f"{what} of {self.root}", fault or b"", lambda messages: [json.dumps(answer()).encode()] * len(messages)
            )
        )

    # Saving

    @renamed_params(**EARLIER_NAMES)
    def save(
        self,
        step: int,
        state: Any,
        *,
        metrics: Mapping[str, SupportsFloat] | None = None,
        overwrite: bool = False,
        **options: Any,
    ) -> None:
        """Save a step, then remove those that no rule keeps. Collective.

        What a dead save left of this step, or what `restore` found to be damaged, is replaced.

        Args:
            step: Its number, the same on every rank.
            state: As for `shardckpt.save`.
            metrics: Numbers by name, kept with the step; the first rank's count.
            overwrite: Replace the step where it is complete already.
            **options: As for `shardckpt.save`.

        Raises:
            TargetExistsError: The step is complete already, and `overwrite` is false; or a newer version wrote it.
            UsageError: Ranks save different steps; something that is no number of a step or no metric. Or metrics are
                given, and neither they nor any step have the one that `keep_best` goes by: then the step is saved, and
                none is removed.
            ShardckptError: As for `shardckpt.save`.

        Warns:
            UserWarning: The step is saved, but old ones could not be removed.
        """
        number, branch, unranked, given = self._begin_save(save, step, metrics, overwrite, options)
        save(state, self.path(number), **given)
        self._record_save(number, branch)
        if unranked:
            raise UsageError(unranked)
        if get_channels(self._group).main.rank == 0:
            self._apply_retention(number)

    @renamed_params(**EARLIER_NAMES, budget="max_staging_bytes")
    def async_save(
        self,
        step: int,
        state: Any,
        *,
        metrics: Mapping[str, SupportsFloat] | None = None,
        overwrite: bool = False,
        **options: Any,
    ) -> SaveHandle:
        """Save a step in the background; once it is complete, remove those that no rule keeps. Collective.

        Until then it takes no place among the steps that are kept, and none is removed for it.

        Args:
            step: As for `save`.
            state: As for `save`; it may change when this returns.
            metrics: As for `save`.
            overwrite: As for `save`.
            **options: As for `shardckpt.async_save`.

        Returns:
            Where to ask for the result: when it is there, the first rank has removed what was to go.

        Raises:
            TargetExistsError: The step is complete already, and `overwrite` is false; or a newer version wrote it.
            UsageError: As for `save`; where no step has the metric, the save is waited for.
            ShardckptError: As for `shardckpt.async_save`.
        """
        number, branch, unranked, given = self._begin_save(async_save, step, metrics, overwrite, options)
        user_on_event, is_first = given.pop("on_event", None), get_channels(self._group).main.rank == 0
        background = _BackgroundSave()

        def on_event(event: SaveEvent) -> None:
            background.has_failed = event.phase == "failed"
            if event.phase == "done" and is_first and not unranked:
                self._apply_retention(number)
            if user_on_event is not None:
                user_on_event(event)

        handle = async_save(state, self.path(number), on_event=on_event, **given)
        self._record_save(number, branch, background)
        if unranked:
            handle.result()
            raise UsageError(unranked)
        return handle

    def _begin_save(
        self,
        verb: Callable[..., Any],
        step: int,
        metrics: Mapping[str, SupportsFloat] | None,
        overwrite: bool,
        options: Mapping[str, Any],
    ) -> _StepSave:
        """Agree on what is saved."""
        notes, names = RunNotes(), list[str]()
        message: bytes | Exception
        try:
            _require_options(verb, options)
            numbers = _read_metrics(metrics)
            notes.update(read_notes(options.get("custom_metadata")))
            notes.update({f"{METRIC}{name}": repr(value) for name, value in numbers.items()})
            names.extend(numbers)
            message = json.dumps([_number(step), self._signals.has_come]).encode()
        except Exception as error:  # noqa: BLE001  (sent to every rank, then raised)
            message = error
        what = f"preparing to save into {self.root}"
        answer = get_channels(self._group).main.coordinate(
            what, message, lambda messages: self._prepare_step(messages, names, overwrite)
        )
        replaces, is_asked, unranked, branch = json.loads(answer)
        self._signals.set_requested(is_asked)
        if branch:
            notes[BRANCH] = str(branch)
        if self._dedup:
            options = {"base": lambda: self._newest_but(_number(step)), "store_digests": True, **options}
        return _StepSave(
            _number(step),
            branch,
            unranked,
            {**options, "overwrite": replaces, "custom_metadata": notes, "process_group": self._group},
        )

    def _newest_but(self, number: int) -> str | None:
        """Return where the newest step lies that can be referred to. On the first rank, once no other save goes on."""
        store = self._store()
        for step in reversed(read_run(store).complete):
            if step.number != number and self._is_good(step) and not manifest_fault(store, step):
                return self._place(step.name)
        return None

    def _record_save(self, number: int, branch: int, background: _BackgroundSave | None = None) -> None:
        self._last_step, self._restored, self._branch = number, None, branch
        self._background = background
        self._signals.is_due = False

    def _forget_failed_save(self) -> None:
        """Take back that a step was saved, on every rank: its save in the background failed."""
        self._last_step = self._background = None
        self._signals.is_due = self._signals.is_agreed

    def _prepare_step(self, messages: list[bytes], names: list[str], overwrite: bool) -> list[bytes]:
        """Check the folder of the step. On rank 0."""
        numbers, signals = zip(*map(json.loads, messages), strict=True)
        if len(set(numbers)) > 1:
            named = ", ".join(f"rank {rank} step {number}" for rank, number in list(enumerate(numbers))[:_SHOWN])
            raise UsageError("ranks save different steps", where=self.root, found=named)
        there = read_step(self._store(), numbers[0])
        if there.is_newer:
            raise TargetExistsError(
                "a version of shardckpt that this one cannot read wrote this step, so it is not replaced",
                where=self.path(numbers[0]),
                found=there.fault,
                fix="Update shardckpt, or choose another folder.",
            )
        is_replaceable = bool(there.held) and there.is_ours and not self._is_good(there)
        unranked = self._ranking_fault(numbers[0], names)
        branch = self._branch_of(numbers[0])
        return [json.dumps([overwrite or is_replaceable, any(signals), unranked, branch]).encode()] * len(messages)

    def _branch_of(self, number: int) -> int:
        """Return the branch of the run that a step belongs to: a new one behind the step that was restored."""
        if self._branch is None:
            complete = read_run(self._store()).complete
            return complete[-1].branch if complete else 0
        return self._branch + (self._restored is not None and number < self._restored)

    def _ranking_fault(self, number: int, names: list[str]) -> str:
        """Say that no step will have the metric that `keep_best` goes by, where a save gives other metrics."""
        if self._rules.keep_best is None or not names or self._rules.metric in names:
            return ""
        store = self._store()
        saved = [SavedStep(number, metrics=dict.fromkeys(names, 0.0))]
        saved += [
            SavedStep(step.number, metrics=self._metrics_of(store, step))
            for step in read_run(store).complete
            if step.number != number
        ]
        try:
            require_metric(saved, self._rules.metric)
        except UsageError as error:
            return f"step {number} is saved, but no step can be removed: {error}"
        return ""

    def _is_good(self, step: StepFolder) -> bool:
        return step.is_complete and step.save not in self._damaged

    # Removing

    def _apply_retention(self, saved: int) -> None:
        """Delete the steps that no rule keeps. On rank 0; an error does not fail the save."""
        if self._is_tidy and not self._rules.is_needed:
            return
        try:
            self._remove(saved)
            self._is_tidy = True
        except (StorageError, CheckpointError, UsageError) as error:
            warnings.warn(f"step {saved} is saved, but old ones could not be removed: {error}", stacklevel=4)

    def _remove(self, saved: int) -> None:
        store, now = self._store(), time.time()
        run = read_run(store)
        if any(step.is_newer for step in run.steps) and not self._rules.is_needed:
            return
        run.require_readable()
        facts = [
            SavedStep(step.number, self._is_good(step), step.saved_at, self._metrics_of(store, step), step.branch)
            for step in run.steps
        ]
        gone = set(steps_to_delete(with_trusted_times(facts, now), self._rules, now=now, protected={saved}))
        removed = {step.name for step in run.steps if step.number in gone and (self._is_good(step) or step.is_double)}
        stay = delete_steps(store, run, removed)
        if stay:
            shown = ", ".join(map(escape, stay[:_SHOWN])) + (", ..." if len(stay) > _SHOWN else "")
            warnings.warn(f"removed steps hold content that no save wrote, which was left there: {shown}", stacklevel=5)
        kept = replace(run, steps=tuple(step for step in run.steps if step.name not in removed))
        for left in find_orphans(store, kept):
            if is_expired(left.changed_at, now):
                delete_orphan(store, left.name)

    def _metrics_of(self, store: Store, step: StepFolder) -> Mapping[str, float]:
        """Return what a step is ranked by; a save's never changes, so each manifest is read once."""
        if self._rules.keep_best is None or not self._is_good(step):
            return {}
        if step.save not in self._metrics:
            self._metrics[step.save] = read_metrics(store, step)
        return self._metrics[step.save]

    # Restoring

    @renamed_params(fan_out="broadcast_reads")
    def restore(self, state: Any, *, step: int | None = None, **options: Any) -> int | None:
        """Load the newest complete step; where that turns out to be damaged, the one before, and so on. Collective.

        Args:
            state: As for `shardckpt.load`; filled in place.
            step: Load this one and no other.
            **options: As for `shardckpt.load`.

        Returns:
            The number of the step that was loaded; None where the folder is empty or absent, or holds no checkpoint.

        Raises:
            UnknownFormatError: A checkpoint that is not a step lies here: one of another tool, or a step itself.
            NoCompleteCheckpoint: Steps lie here, but none that can be loaded, or not the one that was asked for.
            UnsupportedError: A newer version of shardckpt wrote the step, or one that would be passed over.
            UsageError: The checkpoint does not fit the state.
            ShardckptError: As for `shardckpt.load`.

        Warns:
            UserWarning: Newer steps are damaged, with what is wrong with them.
        """
        wanted, fault = None, None
        try:
            _require_options(load, options)
            wanted = None if step is None else _number(step)
        except Exception as error:  # noqa: BLE001  (sent to every rank, then raised)
            fault = error
        damages: dict[str, str] = {}
        removed_meanwhile = 0
        while removed_meanwhile < _LOOKS:
            found = self._find(wanted, damages, fault)
            if found.unreadable:
                raise self._unreadable(found.unreadable)
            if found.save is None:
                break
            damage = self._load(state, found.name, options, is_last=wanted is not None)
            if not damage:
                self._warn_of_faults(found.number, [*found.faults, *damages.values()])
                self._last_step = self._restored = found.number
                self._branch = found.branch
                return found.number
            if found.save in self._ask_rank0("looking again for a step", self._complete_saves):
                damages[found.save] = damage
                self._damaged.add(found.save)
            else:
                removed_meanwhile += 1
        if found.save is None and wanted is None and not found.faults and not damages:
            return None
        raise self._no_checkpoint_error(wanted, [*damages.values(), *found.faults], is_mixed=bool(damages))

    def _find(self, wanted: int | None, passed: Collection[str], fault: Exception | None) -> _FoundStep:
        """Return the step to load next, the same on every rank. Collective."""
        return _FoundStep(*self._ask_rank0("looking for a step", lambda: self._find_on_rank0(wanted, passed), fault))

    def _find_on_rank0(self, wanted: int | None, passed: Collection[str]) -> _FoundStep:
        """Return the newest step that may be loaded. On rank 0."""
        run = self._run()
        matching = [s for s in run.steps if wanted in (None, s.number) and s.save not in passed and not s.is_base]
        found = next((step for step in reversed(run.complete) if step in matching), None)
        faulty = [step for step in reversed(matching) if not step.is_complete]
        newer = [step for step in faulty if found is None or step.number > found.number]
        faults = [step.fault for step in newer if found is None or not step.is_foreign]
        unreadable = next((step.fault for step in newer if step.is_newer), "")
        if found is None or unreadable:
            return _FoundStep(faults, unreadable=unreadable)
        branch = found.branch if found == run.complete[-1] else run.complete[-1].branch + 1
        return _FoundStep(faults, found.number, found.name, found.save, branch)

    def _complete_saves(self) -> list[str]:
        return [step.save for step in self._run().complete]

    def _load(self, state: Any, name: str, options: Mapping[str, Any], *, is_last: bool) -> str:
        """Load a step; return what is wrong with it where some rank found it damaged, on all ranks."""
        try:
            load(state, self._place(name), process_group=self._group, **options)
        except Exception as error:
            coordinator = get_channels(self._group).main
            if is_last or coordinator.has_lost_rank:
                raise
            return _agree_on_damage(coordinator, name, error)
        return ""

    def _warn_of_faults(self, restored: int, faults: list[str]) -> None:
        if faults and get_channels(self._group).main.rank == 0:
            shown = "; ".join(faults[:_SHOWN])
            warnings.warn(f"newer steps cannot be loaded, restored step {restored}: {shown}", stacklevel=4)

    def _no_checkpoint_error(self, wanted: int | None, faults: list[str], *, is_mixed: bool) -> NoCompleteCheckpoint:
        what = "no step here is complete" if wanted is None else f"there is no complete step {wanted} here"
        more = f"; and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
        fix = "To begin anew, choose another folder or remove these steps." if faults else "Choose one that `ls` lists."
        shown = "; ".join(fault.rstrip(".") for fault in faults[:_SHOWN])
        return NoCompleteCheckpoint(
            what, where=self.root, found=shown + more, fix=f"{fix} {MIXED}" if is_mixed else fix
        )

    # When to save

    @property
    def stop_requested(self) -> bool:
        """Whether some rank was asked to end, as of the last `should_save` or `save`; the same on every rank."""
        return self._signals.is_agreed

    def should_save(self, step: int) -> bool:
        """Tell whether this is a step to save: one that `save_every` divides, or the first after a signal.

        Collective within `save_on_signal`: there it costs a message to the first rank and back. A background save
        that has failed counts for nothing: its step, or the last one after a signal, is to be saved again. Several
        ranks learn of the failure within `save_on_signal`.

        Args:
            step: Its number; a step that was just restored or saved is not saved again.

        Raises:
            RankError: Another rank is gone.
        """
        number, fault = 0, None
        try:
            number = _number(step)
        except UsageError as error:
            fault = error
        coordinator = get_channels(self._group).main
        if self._signals.is_watching or coordinator.size == 1:
            has_failed = self._background is not None and self._background.has_failed
            message = bytes([(_SIGNAL if self._signals.has_come else 0) | (_FAILURE if has_failed else 0)])
            (answer,) = coordinator.coordinate("agreeing whether to save", fault or message, _any)
            self._signals.set_requested(bool(answer & _SIGNAL))
            if answer & _FAILURE:
                self._forget_failed_save()
        elif fault is not None:
            raise fault
        is_turn = self._save_every is not None and number > 0 and number % self._save_every == 0
        return number != self._last_step and (is_turn or self._signals.is_due)

    @contextmanager
    def save_on_signal(self, *numbers: int) -> Iterator[None]:
        """Let a signal ask for a last save instead of ending the process, while the block runs.

        The signal is only noted. On the next call of `should_save` all ranks learn of it, whichever rank got it: that
        call is true, and `stop_requested` is from then on. Ending the loop is up to its owner.

        Args:
            numbers: Of signals; SIGTERM where none is given.

        Raises:
            UsageError: Not in the main thread, where python takes signals.
        """
        with self._signals.watch(numbers or (signal.SIGTERM,)):
            yield


class _StepSave(NamedTuple):
    """A save that the ranks have agreed on.

    Attributes:
        number: Of the step.
        branch: Of the run, that it belongs to.
        unranked: Why no step can be ranked; empty where they can be.
        options: For `save`.
    """

    number: int
    branch: int
    unranked: str
    options: dict[str, Any]


@dataclass
class _BackgroundSave:
    """The last save in the background.

    Attributes:
        has_failed: It is over, and nothing was saved.
    """

    has_failed: bool = False


class _FoundStep(NamedTuple):
    """The step that rank 0 found.

    Attributes:
        faults: What is wrong with newer steps, or with all where none is complete.
        number: Of the newest complete step.
        name: Of its folder.
        save: Id of the save that wrote it; None where no step is complete.
        branch: Of the run, to which steps belong that are saved once it is restored.
        unreadable: What keeps this version from reading a step that is newer than all complete ones.
    """

    faults: list[str]
    number: int = 0
    name: str = ""
    save: str | None = None
    branch: int = 0
    unreadable: str = ""


class _Signals:
    """Signals as they come, and what ranks have agreed on.

    Attributes:
        has_come: One came to this process.
        is_agreed: One came to some rank, and all know.
        is_due: Nothing was saved since.
        is_watching: Signals are noted now.
    """

    def __init__(self) -> None:
        self.has_come = self.is_agreed = self.is_due = self.is_watching = False

    def set_requested(self, has_come: bool) -> None:
        """Set whether the ranks have agreed that a stop was requested."""
        if has_come and not self.is_agreed:
            self.is_agreed = self.is_due = True

    @contextmanager
    def watch(self, numbers: tuple[int, ...]) -> Iterator[None]:
        """Note signals, and restore their handlers at the end."""
        before: dict[int, Any] = {}
        try:
            for number in numbers:
                before[number] = _set_handler(number, self._note)
            self.is_watching = True
            yield
        finally:
            self.is_watching = False
            for number, handler in before.items():
                signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _note(self, _number: int, _frame: FrameType | None) -> None:
        self.has_come = True


def _set_handler(number: int, handler: Callable[[int, FrameType | None], None]) -> Any:
    try:
        return signal.signal(number, handler)
    except (ValueError, OSError) as error:
        raise UsageError("this signal cannot be heeded here", found=error, expected="the main thread") from error


def _require_options(verb: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """Refuse options that a function does not take. Raises UsageError."""
    known = inspect.signature(verb).parameters
    unknown = [name for name in options if name not in known]
    if unknown:
        raise UsageError(f"`{verb.__name__}` does not take this option", found=", ".join(unknown))


def _read_metrics(metrics: Any) -> dict[str, float]:
    """Return metrics as numbers; none for None.

    Raises:
        UsageError: They are not a mapping of text to numbers.
    """
    if metrics is None:
        return {}
    if not isinstance(metrics, Mapping):
        raise UsageError(
            "`metrics` must be numbers by name", found=repr(metrics), expected='a dict such as {"loss": 0.5}'
        )
    found = {}
    for name, value in metrics.items():
        if not isinstance(name, str):
            raise UsageError("the name of a metric must be text", found=repr(name))
        try:
            found[name] = float(value)
        except Exception as error:  # a value of any type, with a __float__ of its own
            raise UsageError("a metric must be a number", where=name, found=error) from error
    return found


_SIGNAL, _FAILURE = 1, 2


def _any(messages: list[bytes]) -> list[bytes]:
    """Return the flags of all ranks: that a signal came, that a save in the background failed."""
    return [bytes([reduce(operator.or_, (each[0] for each in messages))])] * len(messages)


def _number(step: int) -> int:
    """Return the number of a step, whatever kind of integer it is.

    Raises:
        UsageError: It is none.
    """
    try:
        number = operator.index(step)
    except Exception:  # noqa: BLE001  (a value of any type, with an __index__ of its own)
        number = -1
    if isinstance(step, bool) or not 0 <= number < _MOST:
        raise UsageError("this is no number of a step", found=repr(step), expected="an integer from 0")
    return number


def _agree_on_damage(coordinator: Coordinator, name: str, error: Exception) -> str:
    """Return the fault that some rank found in a step; where none did, raise this rank's error."""
    message: bytes | Exception = error
    if isinstance(error, _DAMAGE) and not isinstance(error, PrecisionError):
        message = str(error).removesuffix(MIXED).rstrip().encode()
    elif isinstance(error, RankError):
        message = b""

    def decide(messages: list[bytes]) -> list[bytes]:
        damage = next((text for text in messages if text), None)
        if damage is None:
            raise error
        return [damage] * len(messages)

    return coordinator.coordinate(f"loading {name}", message, decide).decode()
