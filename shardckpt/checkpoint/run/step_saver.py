"""Save a run's steps: agree on the step, write it, then apply retention."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple, SupportsFloat

import torch.distributed as dist

from shardckpt.checkpoint.load.load import load
from shardckpt.checkpoint.run.lineage import Lineage
from shardckpt.checkpoint.run.save_schedule import BackgroundSave, SaveSchedule, StepRetention
from shardckpt.checkpoint.run.step_finder import NO_STEP, SHOWN, StepFault, StepFinder, require_step_number
from shardckpt.checkpoint.save.async_save import async_save
from shardckpt.checkpoint.save.handle import SaveHandle, StepTask
from shardckpt.checkpoint.save.save import RunNotes, SaveParams, read_notes, save
from shardckpt.errors import UsageError
from shardckpt.events import OnEvent, OperationEvent, deliver, require_on_event
from shardckpt.native.commit import BRANCH, MARK, read_branch
from shardckpt.native.run_directory import METRIC, manifest_fault, read_run, step_name
from shardckpt.ranks.process_group import get_ranks, resolve_process_group


class SavedPlace(NamedTuple):
    """A place to which a step is saved."""

    finder: StepFinder
    is_over: Callable[[], bool]  # returns True when the save has ended there, on this rank
    # Whether this rank, which is not rank 0, writes the step's record there too: each node has its own place, and rank
    # 0's may be lost.
    has_own_record: bool = False


OnSaved = Callable[[int, Any, Sequence[SavedPlace]], None]


class StepSaver:
    """Saves a run's steps; every method is collective."""

    def __init__(
        self,
        finder: StepFinder,
        retention: StepRetention,
        schedule: SaveSchedule,
        lineage: Lineage,
        *,
        dedup: bool,
        on_event: OnEvent | None,
    ) -> None:
        self._finder, self._retention, self._schedule, self._lineage = finder, retention, schedule, lineage
        self._bases = BaseFinder(finder)
        self._dedup, self._on_event = dedup, on_event
        self.restored: int | None = None  # number of the step that was restored since the last save; None without one
        self.branch: int | None = None  # branch of the run that the next step belongs to; None if unknown
        self._running: StepTask | None = None
        # Called with the number and state of a saved step, and the places to which it is saved.
        self.on_saved: OnSaved = lambda *_: None

    @property
    def _group(self) -> dist.ProcessGroup | None:
        return self._finder.group

    def record_restore(self, number: int, branch: int, loaded: str) -> None:
        """Record that a step was restored."""
        self.restored, self.branch = number, branch
        self._bases.record_restore((branch, number), loaded)
        self._schedule.record_restore(number)

    def save(
        self, step: int, state: Any, metrics: Mapping[str, SupportsFloat] | None, options: Mapping[str, Any]
    ) -> None:
        """Save a step, then remove the steps that no rule keeps; as `Checkpointer.save`."""
        number, branch, unranked, given = self._start_save(save, step, metrics, options)
        save(state, self._path(number), **given)
        self.record_save(number, branch, None)
        self.on_saved(number, state, [SavedPlace(self._finder, lambda: True)])
        if unranked:
            raise UsageError(unranked)
        if get_ranks(self._group).rank == 0:
            self._retention.apply(number)

    def async_save(
        self, step: int, state: Any, metrics: Mapping[str, SupportsFloat] | None, options: Mapping[str, Any]
    ) -> SaveHandle:
        """Save a step in the background; as `Checkpointer.async_save`."""
        number, branch, unranked, given = self._start_save(async_save, step, metrics, options)
        user_on_event, is_first = given.pop("on_event"), get_ranks(self._group).rank == 0
        background = BackgroundSave()

        def on_event(event: OperationEvent) -> None:
            background.has_failed = event.error is not None
            deliver(event, user_on_event)
            if event.error is None and is_first and not unranked:
                self._retention.apply(number)

        handle = async_save(state, self._path(number), on_event=on_event, **given)
        self._running = StepTask(number, handle)
        self.record_save(number, branch, background)
        self.on_saved(number, state, [SavedPlace(self._finder, handle.done)])
        if unranked:
            handle.result()
            raise UsageError(unranked)
        return handle

    def settle(self) -> None:
        """Wait for the last background save. Raises its error."""
        try:
            if self._running is not None:
                self._running.handle.result()  # after Ctrl-C it is still running
        except Exception:
            self._running = None
            raise
        self._running = None

    def await_saves(self, *, is_for_newest: bool, captured: int = -1) -> list[StepFault]:
        """Wait for the last background save, unless a newer step was captured; return its fault if it failed."""
        if self._running is None or (is_for_newest and captured >= self._running.number):
            return []
        fault = self._running.await_fault()
        return [StepFault(self._running.number, fault)] if fault else []

    def find_branch(self, number: int) -> int:
        """Return the branch for a step that is about to be saved in a run without a record. On rank 0."""
        is_behind = self.restored is not None and number < self.restored
        return self._finder.newest_branch() if self.branch is None else self.branch + is_behind

    def _path(self, number: int) -> str:
        return self._finder.path(step_name(number))

    def record_save(self, number: int, branch: int, background: BackgroundSave | None) -> None:
        """Record that a step was saved, or that its background save was started."""
        self.restored, self.branch = None, branch
        self._schedule.record_save(number, background)

    def _start_save(
        self,
        verb: Callable[..., Any],
        step: int,
        metrics: Mapping[str, SupportsFloat] | None,
        options: Mapping[str, Any],
    ) -> _StepSave:
        """Check the arguments, and prepare the step's folder. Collective."""
        notes, names = RunNotes(), list[str]()
        message: bytes | Exception
        try:
            options = check_options(verb, options, self._group)
            notes = build_notes(metrics, options.get("custom_metadata"))
            names = [name.removeprefix(METRIC) for name in notes if name.startswith(METRIC)]
            message = json.dumps([require_step_number(step), self._schedule.has_signal]).encode()
        except Exception as error:  # noqa: BLE001  (sent to every rank, then raised)
            message = error
        what = f"preparing to save into {self._finder.root}"
        answer = get_ranks(self._group).ask_rank0(
            what,
            message,
            lambda messages: self._prepare_on_rank0(messages, names, notes, options.get("overwrite", False)),
        )
        replaces, is_asked, unranked, branch, mark = json.loads(answer)
        self._schedule.set_requested(is_asked)
        number = require_step_number(step)
        notes.update(build_place_notes(branch, mark))
        if replaces and not options.get("overwrite", False):
            notes.require_replaceable = lambda: self._finder.require_replaceable(number)
        if self._dedup:
            options = {"base": lambda: self._bases.find_base(number), "store_digests": True, **options}
        options = {**options, "overwrite": replaces, "custom_metadata": notes, "process_group": self._group}
        on_event = join_on_event(self._on_event, options.get("on_event"))
        return _StepSave(number, branch, unranked, {**options, "on_event": on_event})

    def _prepare_on_rank0(
        self, messages: list[bytes], names: list[str], notes: Mapping[str, str], overwrite: bool
    ) -> list[bytes]:
        """Check that the step's folder can be written; return the answers."""
        numbers, signals = zip(*map(json.loads, messages), strict=True)
        number = require_one_step(numbers, self._finder.root)
        is_replaceable = self._finder.is_replaceable(number)
        unranked = self._retention.find_ranking_fault(number, names)
        mark, branch = notes.get(MARK, ""), read_branch(notes)  # of the captures
        if not mark:
            branch, mark = self._lineage.open_epoch(self.find_branch(number)), self._lineage.make_mark()
        answer = [overwrite or is_replaceable, any(signals), unranked, branch, mark]
        return [json.dumps(answer).encode()] * len(messages)


class _StepSave(NamedTuple):
    """A save's arguments, on which the ranks have agreed."""

    number: int
    branch: int  # branch of the run that the step belongs to
    unranked: str  # reason why steps cannot be ranked by metric; empty if they can
    options: dict[str, Any]


def require_one_step(numbers: Sequence[int], root: str) -> int:
    """Return the step that all ranks save; UsageError if they save different ones."""
    if len(set(numbers)) > 1:
        named = ", ".join(f"rank {rank} step {step}" for rank, step in list(enumerate(numbers))[:SHOWN])
        raise UsageError("ranks save different steps", where=root, found=named)
    return numbers[0]


def build_notes(metrics: Any, custom_metadata: Any) -> RunNotes:
    """Return a step's custom metadata, with its metrics."""
    numbers = _read_metrics(metrics)
    return RunNotes(
        {**read_notes(custom_metadata), **{f"{METRIC}{name}": repr(value) for name, value in numbers.items()}}
    )


def build_place_notes(branch: int, mark: str) -> dict[str, str]:
    """Return the custom metadata that says where a step belongs in its run."""
    return {name: text for name, text in ((BRANCH, str(branch)), (MARK, mark)) if text not in ("", "0")}


def _read_metrics(metrics: Any) -> dict[str, float]:
    """Return metrics as floats; empty for None."""
    if metrics is None:
        return {}
    if not isinstance(metrics, Mapping):
        raise UsageError(
            "`metrics` must be numbers by name", found=repr(metrics), expected='a dict such as {"loss": 0.5}'
        )
    numbers = {}
    for name, value in metrics.items():
        if not isinstance(name, str):
            raise UsageError("a metric's name must be text", found=repr(name))
        try:
            numbers[name] = float(value)
        except Exception as error:  # any type may define __float__
            raise UsageError("a metric must be a number", where=name, found=error) from error
    return numbers


def check_options(
    verb: Callable[..., Any], options: Mapping[str, Any], group: dist.ProcessGroup | None
) -> dict[str, Any]:
    """Return a function's options, without the process group."""
    known = _list_options(verb)
    unknown = [name for name in options if name not in known]
    if unknown:
        raise UsageError(f"`{verb.__name__}` does not take this option", found=", ".join(unknown))
    require_on_event(options.get("on_event"))
    given = options.get("process_group")
    if given is not None and resolve_process_group(given) is not resolve_process_group(group):
        raise UsageError(
            "`process_group` must be the Checkpointer's",
            found=repr(given),
            fix="Pass it to Checkpointer(..., process_group=...).",
        )
    return {name: value for name, value in options.items() if name != "process_group"}


@cache
def _list_options(verb: Callable[..., Any]) -> frozenset[str]:
    """Return the names of a function's options."""
    known = inspect.signature(verb).parameters.keys() - {"state", "path", "options"}
    return frozenset(known if verb is load else known | SaveParams.__annotations__.keys())


def join_on_event(of_run: OnEvent | None, of_call: OnEvent | None) -> OnEvent | None:
    """Return a function that calls the Checkpointer's function and one call's function."""
    return of_run if of_call is None else lambda event: deliver(event, of_run, of_call)


class BaseFinder:
    """Finds the bases for a run's saves."""

    # After a restore, an older step that was not loaded cannot be a base: nothing has verified it, and a flipped bit
    # there would be in every save that refers to it.

    def __init__(self, finder: StepFinder) -> None:
        self._finder = finder
        self._restored, self._loaded = NO_STEP, ""

    def record_restore(self, position: tuple[int, int], loaded: str) -> None:
        """Record a restore."""
        self._restored, self._loaded = position, loaded

    def find_base(self, number: int) -> str | None:
        """Return the newest step that can be a save's base, while no other save runs. On rank 0."""
        finder = self._finder
        store = finder.open_store()
        for step in reversed(read_run(store).complete):
            is_known = step.save == self._loaded or step.order > self._restored
            if is_known and step.number != number and finder.is_good(step) and not manifest_fault(store, step):
                return finder.path(step.name)
        return None
