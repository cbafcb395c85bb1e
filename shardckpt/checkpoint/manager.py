"""`Checkpointer`: save, restore and retain the steps of a run."""

from __future__ import annotations

import inspect
import json
import os
import signal
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, SupportsFloat

import torch.distributed as dist
from typing_extensions import Unpack

from shardckpt.checkpoint.coordinator import get_channels, resolve_process_group
from shardckpt.checkpoint.load.load import EARLIER_PARAMS, load
from shardckpt.checkpoint.resume.witness import Witness
from shardckpt.checkpoint.resume.witness_session import open_session
from shardckpt.checkpoint.run.save_schedule import BackgroundSave, SaveSchedule
from shardckpt.checkpoint.run.step_finder import SHOWN, StepFinder, require_step_number
from shardckpt.checkpoint.run.step_restore import restore_step
from shardckpt.checkpoint.run.step_retention import StepRetention
from shardckpt.checkpoint.save.async_save import async_save
from shardckpt.checkpoint.save.handle import SaveHandle
from shardckpt.checkpoint.save.save import EARLIER_NAMES, RunNotes, SaveParams, read_notes, save
from shardckpt.deprecation import renamed_params
from shardckpt.errors import UsageError, require_bools
from shardckpt.events import OnEvent, OperationEvent, deliver, require_on_event
from shardckpt.format.native.commit import BRANCH
from shardckpt.format.native.run_directory import METRIC, step_name
from shardckpt.plan.retention import Retention, RetentionParams


class Checkpointer:
    """Manager of a run's checkpoints, with one folder per step below `root`.

    Folders have names such as `step-00001000`.

    Every method except `path` is collective: all ranks of the group call it, rank 0 reads the storage, and all ranks
    get the same answer. A step exists once its `COMMIT` file exists, whatever the name of its folder.

    A step is kept if one of the `keep_` rules keeps it; without rules all steps are kept. Only complete steps count.
    The newest complete step and the step that was just saved are never removed. Files of saves that never committed are
    removed a day after their last change.

    Args:
        root: Folder of the run: a path, or a URL that fsspec supports.
        keep_last: Number of newest steps to keep.
        keep_every: Keep steps whose number is a multiple of this.
        keep_best: Number of best steps by `metric` to keep; steps without the metric are kept too, unless other rules
            are given.
        metric: Name of the metric that `keep_best` and `best` rank by.
        mode: Whether the best step has the smallest or the largest metric.
        keep_for: Age up to which steps are kept: a timedelta, seconds, or text such as `"7d"`.
        save_every: `should_save` returns True for multiples of this.
        dedup: Write only tensors that changed since the newest complete step, and refer to older steps for the others.
            Removing a step keeps the files that other steps refer to.
        process_group: Ranks that call the methods; None for all ranks.
        on_event: Called with an event at the end of each save, load, restore, removal of old steps and fallback.
        witness: Record the training steps behind each save, and compare them after a restore; see `witness`.

    Raises:
        UsageError: An argument has an invalid value, or the root is not a folder's path or URL.

    Attributes:
        root: Folder of the run, without a slash at the end.

    Examples:
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
        save_every: int | None = None,
        dedup: bool = False,
        process_group: dist.ProcessGroup | None = None,
        on_event: OnEvent | None = None,
        witness: Witness | None = None,
        **rules: Unpack[RetentionParams],
    ) -> None:
        require_bools(dedup=dedup)
        require_on_event(on_event)
        self._schedule = SaveSchedule(save_every)
        self._finder = StepFinder(root, process_group)
        self._retention = StepRetention(Retention.from_params("Checkpointer", **rules), self._finder, on_event)
        self._on_event = on_event
        self.root, self._dedup, self._group = self._finder.root, dedup, process_group
        self._restored: int | None = None
        self._branch: int | None = None
        self._witness = open_session(witness, self._finder)

    def path(self, step: int) -> str:
        """Return the path or URL of a step; UsageError unless it is an integer from 0."""
        return self._finder.path(step_name(require_step_number(step)))

    def steps(self) -> tuple[int, ...]:
        """Return the numbers of the complete steps, the oldest first. Collective.

        Steps that are saved after a `restore` are newer than all earlier steps, whatever their numbers.

        Raises:
            UnsupportedError: A newer version of shardckpt wrote the newest step.
            UnknownFormatError: The folder contains another checkpoint and no steps.
            StorageError: The storage failed; RankError on the other ranks.
        """
        return tuple(self._finder.list_complete())

    def latest(self) -> int | None:
        """Return the number of the newest complete step, or None. Collective.

        For the errors see `steps`.
        """
        return next(reversed(self.steps()), None)

    def best(self, metric: str | None = None, *, mode: Literal["min", "max"] | None = None) -> int | None:
        """Return the number of the complete step with the best metric, or None. Collective.

        Of equal steps the later is returned; a NaN is not ranked.

        Args:
            metric: Name of one of the `metrics` of `save`; None for the `metric` of the Checkpointer.
            mode: Whether the best step has the smallest or the largest metric; None for the `mode` of the Checkpointer,
                which goes with its `metric` alone.

        Raises:
            UsageError: No step has a number for the metric, or the mode of another metric is missing.
            ShardckptError: As for `steps`.
        """
        return _find_best(self._finder, self._retention, metric, mode)

    @renamed_params(**EARLIER_NAMES)
    def save(
        self,
        step: int,
        state: Any,
        *,
        metrics: Mapping[str, SupportsFloat] | None = None,
        **options: Unpack[SaveParams],
    ) -> None:
        """Save a step, then remove the steps that no rule keeps. Collective.

        An existing step of this number is replaced if it is incomplete or if `restore` found it damaged.

        Args:
            step: Number of the step, equal on every rank.
            state: As for `shardckpt.save`.
            metrics: Numbers by name that are stored with the step; those of rank 0 count.
            **options: As for `shardckpt.save`. With `overwrite`, a complete step is replaced; a `process_group` must be
                that of the Checkpointer.

        Raises:
            TargetExistsError: The step is complete and `overwrite` is False; or a newer version wrote the step.
            UsageError: Ranks save different steps; the step or a metric is not a number; or neither `metrics` nor any
                step has the metric that `keep_best` ranks by: then the step is saved, and no step is removed.
            ShardckptError: As for `shardckpt.save`.

        Warns:
            UserWarning: The step is saved, but old ones could not be removed.
        """
        number, branch, unranked, given = self._begin_save(save, step, metrics, options)
        save(state, self.path(number), **given)
        self._restored, self._branch = None, branch
        self._schedule.record_save(number, None)
        self._witness.begin_record(number, state, lambda: True)
        if unranked:
            raise UsageError(unranked)
        if get_channels(self._group).main.rank == 0:
            self._retention.apply(number)

    @renamed_params(**EARLIER_NAMES, budget="max_staging_bytes")
    def async_save(
        self,
        step: int,
        state: Any,
        *,
        metrics: Mapping[str, SupportsFloat] | None = None,
        **options: Any,
    ) -> SaveHandle:
        """Save a step in the background, then remove steps that no rule keeps. Collective.

        The arguments are those of `save` and `shardckpt.async_save`. The state may change after this returns.

        Returns:
            A handle whose `result()` waits for the save and for the removal of old steps.

        Raises:
            ShardckptError: As for `save` and `shardckpt.async_save`; for a missing metric, after the save is complete.
        """
        number, branch, unranked, given = self._begin_save(async_save, step, metrics, options)
        user_on_event, is_first = given.pop("on_event"), get_channels(self._group).main.rank == 0
        background = BackgroundSave()

        def on_event(event: OperationEvent) -> None:
            background.has_failed = event.error is not None
            deliver(event, user_on_event)
            if event.error is None and is_first and not unranked:
                self._retention.apply(number)

        handle = async_save(state, self.path(number), on_event=on_event, **given)
        self._restored, self._branch = None, branch
        self._schedule.record_save(number, background)
        self._witness.begin_record(number, state, handle.done)
        if unranked:
            handle.result()
            raise UsageError(unranked)
        return handle

    def _begin_save(self, verb: Callable[..., Any], step: int, metrics: Any, options: Mapping[str, Any]) -> _StepSave:
        """Check the arguments, and prepare the folder of the step. Collective."""
        message, options, notes, names = _read_call(
            verb, step, metrics, options, self._group, self._schedule.has_signal
        )

        def prepare(messages: list[bytes]) -> list[bytes]:
            """Check that the folder of the step can be written; return the answers. On rank 0."""
            number, is_asked = _read_messages(messages, self.root)
            can_replace = self._finder.is_replaceable(number) or options.get("overwrite", False)
            unranked = self._retention.find_ranking_fault(number, names)
            is_behind = self._restored is not None and number < self._restored
            branch = self._finder.newest_branch() if self._branch is None else self._branch + is_behind
            return [json.dumps([can_replace, is_asked, unranked, branch]).encode()] * len(messages)

        answer = get_channels(self._group).main.coordinate(f"preparing to save into {self.root}", message, prepare)
        replaces, is_asked, unranked, branch = json.loads(answer)
        self._schedule.set_requested(is_asked)
        number = require_step_number(step)
        if branch:
            notes[BRANCH] = str(branch)
        if self._dedup:
            options = {"base": lambda: self._finder.find_base(number), "store_digests": True, **options}
        options = {**options, "overwrite": replaces, "custom_metadata": notes, "process_group": self._group}
        on_event = _join_on_event(self._on_event, options.get("on_event"))
        return _StepSave(number, branch, unranked, {**options, "on_event": on_event})

    @renamed_params(**EARLIER_PARAMS)
    def restore(self, state: Any, *, step: int | Literal["best"] | None = None, **options: Any) -> int | None:
        """Load the newest complete step; if it is damaged, the previous one. Collective.

        Args:
            state: As for `shardckpt.load`; filled in place.
            step: Number of the only step to try; `"best"` for the one that `best()` returns; None for any step.
            **options: As for `shardckpt.load`; a `process_group` must be that of the Checkpointer.

        Returns:
            The number of the loaded step; None if the folder is missing or does not contain a checkpoint.

        Raises:
            UnknownFormatError: The folder contains a checkpoint of another tool, or is itself a step.
            NoCompleteCheckpoint: No step can be loaded, or the requested step cannot.
            UnsupportedError: A newer version of shardckpt wrote the step, or a newer step that would be skipped.
            UsageError: The checkpoint does not fit the state; or no step has the metric of the Checkpointer.
            ShardckptError: As for `shardckpt.load`.

        Warns:
            UserWarning: Newer steps are damaged; the message lists their faults.
        """
        is_best = isinstance(step, str) and step == "best"
        options, wanted, fault = _read_restore(None if is_best else step, options, self._group)
        if is_best:
            wanted = _find_best(self._finder, self._retention, None, None, fault)
        on_event = _join_on_event(self._on_event, options.pop("on_event", None))
        restored = restore_step(self._finder, state, wanted, options, on_event=on_event, fault=fault)
        if restored is None:
            return None
        self._restored, self._branch = restored.number, restored.branch
        self._schedule.record_restore(restored.number)
        self._witness.begin_comparison(restored, state)
        if restored.faults and get_channels(self._group).main.rank == 0:
            shown = "; ".join(restored.faults[:SHOWN])
            warnings.warn(f"newer steps cannot be loaded, restored step {restored.number}: {shown}", stacklevel=3)
        return restored.number

    def witness(self, step: int, *, loss: Any = None, grad_norm: Any = None, batch: Any = None) -> None:
        """Record or compare a training step that has ended. Collective for the steps behind a save or a restore.

        Call it after every step, before `save`; without `Checkpointer(witness=...)` it does nothing.

        Args:
            step: Number of the step.
            loss: Loss of this rank, a number or a tensor.
            grad_norm: Norm of the gradients.
            batch: Batch of this rank: tensors, arrays and lists by sample along dimension 0, in dicts and lists.

        Raises:
            ResumeDivergence: The resumed run differs from the one that was saved.
            UsageError: The loss or the norm is not a number.
            RankError: Another rank failed or is lost.
        """
        self._witness.add_step(step, loss, grad_norm, batch)

    @property
    def stop_requested(self) -> bool:
        """Whether any rank received a signal, as of the last `should_save` or `save`."""
        return self._schedule.stop_requested

    def should_save(self, step: int) -> bool:
        """Return True for multiples of `save_every` and the first step after a signal.

        Collective inside `save_on_signal`, where it costs a message to rank 0 and back. After a failed background save
        it returns True again for its step, or for the save that a signal requested; inside `save_on_signal` the ranks
        agree on that.

        Args:
            step: Number of the step; a step that was just restored or saved is not saved again.

        Raises:
            RankError: Another rank is lost.
        """
        return self._schedule.should_save(step, get_channels(self._group).main)

    @contextmanager
    def save_on_signal(self, *numbers: int) -> Iterator[None]:
        """Make a signal request a last save, instead of ending the process.

        The next call of `should_save` reports the signal to all ranks, whichever rank received it: the call returns
        True, and `stop_requested` is True from then on. The caller ends the loop.

        Args:
            numbers: Signal numbers; SIGTERM by default.

        Raises:
            UsageError: The call is not in the main thread, which alone receives signals.
        """
        with self._schedule.watch(numbers or (signal.SIGTERM,)):
            yield


class _StepSave(NamedTuple):
    """Arguments of a save on which the ranks have agreed.

    Attributes:
        number: Number of the step.
        branch: Branch of the run that the step belongs to.
        unranked: Reason why steps cannot be ranked by metric; empty if they can.
        options: Options for `save`.
    """

    number: int
    branch: int
    unranked: str
    options: dict[str, Any]


def _read_call(
    verb: Callable[..., Any],
    step: int,
    metrics: Mapping[str, SupportsFloat] | None,
    options: Mapping[str, Any],
    group: dist.ProcessGroup | None,
    has_signal: bool,
) -> tuple[bytes | Exception, Mapping[str, Any], RunNotes, list[str]]:
    """Return the message to rank 0 about a save, its options and notes, and the names of its metrics."""
    notes = RunNotes()
    try:
        options = _check_options(verb, options, group)
        numbers = _read_metrics(metrics)
        notes.update(read_notes(options.get("custom_metadata")))
        notes.update({f"{METRIC}{name}": repr(value) for name, value in numbers.items()})
        return json.dumps([require_step_number(step), has_signal]).encode(), options, notes, list(numbers)
    except Exception as error:  # noqa: BLE001  (sent to every rank, then raised)
        return error, options, notes, []


def _read_restore(
    step: Any, options: Mapping[str, Any], group: dist.ProcessGroup | None
) -> tuple[dict[str, Any], int | None, Exception | None]:
    """Return the options of a restore, the number of the only step to try, and the error in them."""
    try:
        return _check_options(load, options, group), None if step is None else require_step_number(step), None
    except Exception as error:  # noqa: BLE001  (sent to every rank, then raised)
        return {}, None, error


def _find_best(
    finder: StepFinder,
    retention: StepRetention,
    metric: str | None,
    mode: Literal["min", "max"] | None,
    fault: Exception | None = None,
) -> int | None:
    """Return the best step; if one rank passes a fault, all ranks raise it. Collective."""
    found: int | None = finder.ask_rank0("ranking steps", lambda: retention.find_best(metric, mode), fault)
    return found


def _join_on_event(of_run: OnEvent | None, of_call: OnEvent | None) -> OnEvent | None:
    """Return a function that calls that of the Checkpointer and that of one call."""
    return of_run if of_call is None else lambda event: deliver(event, of_run, of_call)


def _read_messages(messages: Sequence[bytes], root: str) -> tuple[int, bool]:
    """Return the step that all ranks save, and whether one got a signal; UsageError if they save different ones."""
    numbers, signals = zip(*map(json.loads, messages), strict=True)
    if len(set(numbers)) > 1:
        named = ", ".join(f"rank {rank} step {step}" for rank, step in list(enumerate(numbers))[:SHOWN])
        raise UsageError("ranks save different steps", where=root, found=named)
    return numbers[0], any(signals)


def _check_options(
    verb: Callable[..., Any], options: Mapping[str, Any], group: dist.ProcessGroup | None
) -> dict[str, Any]:
    """Return the options of a function, without the process group.

    Raises:
        UsageError: The function does not have an option, or the process group is not that of the Checkpointer.
    """
    known = inspect.signature(verb).parameters.keys() - {"state", "path", "options"}
    if verb is not load:
        known |= SaveParams.__annotations__.keys()
    unknown = [name for name in options if name not in known]
    if unknown:
        raise UsageError(f"`{verb.__name__}` does not take this option", found=", ".join(unknown))
    require_on_event(options.get("on_event"))
    given = options.get("process_group")
    if given is not None and resolve_process_group(given) is not resolve_process_group(group):
        raise UsageError(
            "`process_group` must be that of the Checkpointer",
            found=repr(given),
            fix="Pass it to Checkpointer(..., process_group=...).",
        )
    return {name: value for name, value in options.items() if name != "process_group"}


def _read_metrics(metrics: Any) -> dict[str, float]:
    """Return metrics as floats; empty for None.

    Raises:
        UsageError: The metrics are not a mapping of text to numbers.
    """
    if metrics is None:
        return {}
    if not isinstance(metrics, Mapping):
        raise UsageError(
            "`metrics` must be numbers by name", found=repr(metrics), expected='a dict such as {"loss": 0.5}'
        )
    numbers = {}
    for name, value in metrics.items():
        if not isinstance(name, str):
            raise UsageError("the name of a metric must be text", found=repr(name))
        try:
            numbers[name] = float(value)
        except Exception as error:  # any type may define __float__
            raise UsageError("a metric must be a number", where=name, found=error) from error
    return numbers
