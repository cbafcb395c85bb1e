"""Save a run's steps: agree on the step, write it, then apply retention."""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple, SupportsFloat

import torch.distributed as dist

from shardckpt.checkpoint.load.load import load
from shardckpt.checkpoint.run.lineage import Lineage
from shardckpt.checkpoint.run.save_schedule import BackgroundSave, SaveSchedule, StepRetention
from shardckpt.checkpoint.run.step_finder import NO_STEP, SHOWN, StepFault, StepFinder, require_step_number
from shardckpt.checkpoint.save.async_save import SAVES, async_save, start_async_save
from shardckpt.checkpoint.save.handle import AsyncSaveTask, SaveHandle, StepTask
from shardckpt.checkpoint.save.planner import SaveHooks
from shardckpt.checkpoint.save.save import SaveParams, read_notes, save, save_with
from shardckpt.errors import ShardckptError, UsageError
from shardckpt.events import OnEvent, OperationEvent, deliver, require_on_event
from shardckpt.native.commit import BRANCH, MARK
from shardckpt.native.run_directory import METRIC, WRITER, manifest_fault, read_run, step_name
from shardckpt.native.step_copies import ROOT
from shardckpt.ranks.process_group import get_ranks, resolve_process_group
from shardckpt.torchrun import describe_versions

_LOG = logging.getLogger("shardckpt")


class SavedPlace(NamedTuple):
    """A place to which a step is saved."""

    finder: StepFinder
    is_over: Callable[[], bool]  # returns True when the save has ended there, on this rank
    # Whether this rank, which is not rank 0, writes the step's record there too: each node has its own place, and rank
    # 0's may be lost.
    has_own_record: bool = False


OnSaved = Callable[[int, Any, Sequence[SavedPlace]], None]


class CapturedStep(NamedTuple):
    """What a run's tiers did with a step."""

    number: int
    is_for_root: bool
    branch: int
    mark: str  # `SaveMark` as text, the same in all places
    root: str  # path or URL of the nearest tier
    places: Sequence[SavedPlace]  # tiers to which the step is captured or copied


class NoCaptures:
    """The captures of a run without tiers."""

    has_tiers = False

    def capture(
        self, step: int, state: Any, metrics: Mapping[str, SupportsFloat] | None, options: Mapping[str, Any]
    ) -> CapturedStep | None:
        """Capture a step in the background; return None. Collective."""

    def record_restore(self, number: int) -> None:
        """Record that a step was restored."""

    def settle(self) -> None:
        """Wait for the captures, including promotions. Collective."""

    def await_faults(self) -> tuple[list[StepFault], int]:
        """Wait for the captures; return their faults, and the last step if it was captured, otherwise -1."""
        return [], -1


class StepSaver:
    """Saves a run's steps, in tiers and in the root; every method is collective."""

    def __init__(
        self,
        finder: StepFinder,
        retention: StepRetention,
        schedule: SaveSchedule,
        lineage: Lineage,
        captures: NoCaptures,
        on_saved: OnSaved,  # called with a saved step's number and state, and the places to which it is saved
        *,
        dedup: bool,
        on_event: OnEvent | None,
    ) -> None:
        self._finder, self._retention, self._schedule, self._lineage = finder, retention, schedule, lineage
        self._captures, self._on_saved = captures, on_saved
        self._bases = BaseFinder(finder)
        self._dedup, self._on_event = dedup, on_event
        self._running: StepTask | None = None

    @property
    def _group(self) -> dist.ProcessGroup | None:
        return self._finder.group

    def record_restore(self, number: int, order: tuple[int, int], branch: int, loaded: str) -> None:
        """Record that a step was restored; `loaded` is its save's id if it was in the root."""
        self._bases.record_restore((branch, number), loaded)
        self._schedule.record_restore(number)
        self._captures.record_restore(number)
        self._lineage.record_restore(order, branch)

    def save(
        self, step: int, state: Any, metrics: Mapping[str, SupportsFloat] | None, options: Mapping[str, Any]
    ) -> None:
        """Save a step, then remove the steps that no rule keeps; as `Checkpointer.save`."""
        if self._captures.has_tiers:  # with tiers, a save returns when the state is copied
            self.async_save(step, state, metrics, options)
            return
        root = self._prepare_root(save, step, metrics, options, None)
        self._schedule.notice_saves.note_root_start()
        save_with(root.hooks, state, self._path(root.number), root.options)
        is_first = get_ranks(self._group).rank == root.first
        if is_first:
            self._lineage.note_root_step(root.number)
        self._record_save(root.number, root.branch, None)
        self._on_saved(root.number, state, [SavedPlace(self._finder, lambda: True)])
        if root.unranked:
            raise UsageError(root.unranked)
        if is_first:
            self._retention.apply(root.number)

    def async_save(
        self, step: int, state: Any, metrics: Mapping[str, SupportsFloat] | None, options: Mapping[str, Any]
    ) -> SaveHandle:
        """Save a step in the background; as `Checkpointer.async_save`. A capture's handle is done at once."""
        captured = self._captures.capture(step, state, metrics, options)
        if captured is None or captured.is_for_root:
            return self._save_in_root(step, state, metrics, options, captured)
        self._record_save(captured.number, captured.branch, None)
        if captured.places:
            self._on_saved(captured.number, state, captured.places)
        return SaveHandle(AsyncSaveTask(captured.root, None))

    def _save_in_root(
        self,
        step: int,
        state: Any,
        metrics: Mapping[str, SupportsFloat] | None,
        options: Mapping[str, Any],
        captured: CapturedStep | None,
    ) -> SaveHandle:
        root = self._prepare_root(async_save, step, metrics, options, captured)
        user_on_event, is_first = root.options["on_event"], get_ranks(self._group).rank == root.first
        background = BackgroundSave()

        def on_event(event: OperationEvent) -> None:
            background.has_failed = event.error is not None
            if event.error is None and is_first:
                self._lineage.note_root_step(root.number)
            deliver(event, user_on_event)
            if event.error is None and is_first and not root.unranked:
                self._retention.apply(root.number)

        given: Any = {**root.options, "on_event": on_event}
        own = {name: given.pop(name) for name in ("max_staging_bytes", "on_busy", "overlap_staging") if name in given}
        self._schedule.notice_saves.note_root_start()
        handle = start_async_save(SAVES, root.hooks, state, self._path(root.number), given, **own)
        self._running = StepTask(root.number, handle)
        self._record_save(root.number, root.branch, background)
        places = () if captured is None else captured.places
        self._on_saved(root.number, state, [*places, SavedPlace(self._finder, handle.done)])
        if root.unranked:
            handle.result()
            raise UsageError(root.unranked)
        return handle

    def settle(self) -> None:
        """Wait for the background saves, including promotions. Raises the error of the last one in the root."""
        try:
            self._captures.settle()
        finally:
            self._settle_root()

    def _settle_root(self) -> None:
        try:
            if self._running is not None:
                self._running.handle.result()  # after Ctrl-C it is still running
        except Exception:
            self._running = None
            raise
        self._running = None

    def await_saves(self, *, is_for_newest: bool) -> list[StepFault]:
        """Wait for the captures, and for the root's save unless the last step was captured; return their faults."""
        faults, captured = self._captures.await_faults()
        if self._running is None or (is_for_newest and captured >= self._running.number):
            return faults
        fault = self._running.await_fault()
        return [*faults, StepFault(self._running.number, fault)] if fault else faults

    def _path(self, number: int) -> str:
        return self._finder.path(step_name(number))

    def _record_save(self, number: int, branch: int, background: BackgroundSave | None) -> None:
        """Record that a step was saved, or that its background save was started."""
        self._lineage.record_save(number, branch)
        self._schedule.record_save(number, background)

    def _prepare_root(
        self,
        verb: Callable[..., Any],
        step: int,
        metrics: Mapping[str, SupportsFloat] | None,
        options: Mapping[str, Any],
        captured: CapturedStep | None,
    ) -> _RootSave:
        """Check the arguments, and prepare the step's folder in the root. Collective."""
        numbers = dict[str, str]()
        message: bytes | Exception
        try:
            options = check_options(verb, options, self._group)
            numbers = encode_metrics(metrics)
            given = list_given(options, numbers)
            notice = self._schedule.notice_saves.notices.describe()
            message = json.dumps([require_step_number(step), notice, given]).encode()
        except Exception as error:  # noqa: BLE001  (sent to every rank, then raised)
            message = error
        names, may_overwrite = [name.removeprefix(METRIC) for name in numbers], options.get("overwrite", False)
        answer = get_ranks(self._group).ask_rank0(
            f"preparing to save into {self._finder.root}",
            message,
            lambda messages: self._prepare_on_rank0(messages, names, captured, may_overwrite),
        )
        replaces, is_asked, unranked, branch, mark, staying, planned_notice = json.loads(answer)
        self._schedule.set_requested(is_asked)
        if planned_notice and get_ranks(self._group).rank == staying[0]:
            self._schedule.notice_saves.take_over(planned_notice)
        number = require_step_number(step)
        about = {**numbers, **self._retention.notes, **build_run_notes(branch, mark)}
        hooks = SaveHooks(about, staying=tuple(staying))
        if replaces and not may_overwrite:
            hooks = hooks._replace(before_commit=lambda: self._finder.require_replaceable(number))
        if self._dedup:
            options = {"base": lambda: self._bases.find_base(number), "store_digests": True, **options}
        on_event = join_on_event(self._on_event, options.get("on_event"))
        options = {**options, "overwrite": replaces, "process_group": self._group, "on_event": on_event}
        return _RootSave(number, branch, unranked, options, hooks)

    def _prepare_on_rank0(
        self, messages: list[bytes], names: list[str], captured: CapturedStep | None, may_overwrite: bool
    ) -> list[bytes]:
        """Check that the step's folder can be written; return the answers."""
        numbers, notices, given = zip(*map(json.loads, messages), strict=True)
        number = require_one_step(numbers, self._finder.root)
        is_replaceable = self._finder.is_replaceable(number)
        unranked = self._retention.find_ranking_fault(number, names)
        if captured is None:
            branch = self._lineage.find_branch(number, self._finder.newest_branch)
            try:
                branch = self._lineage.open_epoch(branch, is_for_root=True)
            except ShardckptError as error:
                _LOG.warning("a save in %s cannot be recorded there: %s", self._finder.root, error)
                branch += 1  # newer than all that is known
            mark = self._lineage.make_mark()
        else:
            branch, mark = captured.branch, captured.mark
        captures = () if captured is None else captured.places  # a notice may come after the step was captured
        names = [*(place.finder.tier for place in captures), ROOT]
        self._schedule.choose_places(number, notices, names, has_started=captured is not None)
        is_asked = any(has_notice for has_notice, *_ in notices)
        staying = self._schedule.find_staying(notices, given)
        planned_notice = self._schedule.hand_over(staying)
        answer = [may_overwrite or is_replaceable, is_asked, unranked, branch, mark, staying, planned_notice]
        return [json.dumps(answer).encode()] * len(messages)


class _RootSave(NamedTuple):
    """The arguments of a save in the root, on which the ranks have agreed."""

    number: int
    branch: int  # branch of the run that the step belongs to
    unranked: str  # reason why steps cannot be ranked by metric; empty if they can
    options: Any  # `AsyncSaveParams`
    hooks: SaveHooks

    @property
    def first(self) -> int:
        """The rank that commits the save."""
        return self.hooks.staying[0] if self.hooks.staying else 0


def require_one_step(numbers: Sequence[int], root: str) -> int:
    """Return the step that all ranks save; UsageError if they save different ones."""
    if len(set(numbers)) > 1:
        named = ", ".join(f"rank {rank} step {step}" for rank, step in list(enumerate(numbers))[:SHOWN])
        raise UsageError("ranks save different steps", where=root, found=named)
    return numbers[0]


def build_run_notes(branch: int, mark: str) -> dict[str, str]:
    """Return the custom metadata that says where a step belongs in its run, and which versions wrote it."""
    notes = ((BRANCH, str(branch)), (MARK, mark), (WRITER, describe_versions()))
    return {name: text for name, text in notes if text not in ("", "0")}


def list_given(options: Mapping[str, Any], metrics: Mapping[str, str]) -> list[str]:
    """Return the names of what a rank gives with a step, and of which rank 0's count."""
    has_files = options.get("model_files") is not None
    return sorted([*read_notes(options.get("custom_metadata")), *metrics, *(["model_files"] if has_files else [])])


def encode_metrics(metrics: Any) -> dict[str, str]:
    """Return the custom metadata for a step's metrics."""
    return {f"{METRIC}{name}": repr(value) for name, value in _read_metrics(metrics).items()}


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
