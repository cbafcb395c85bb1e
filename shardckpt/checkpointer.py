"""`Checkpointer`: save, restore and retain a run's steps."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial, wraps
from typing import Any, Concatenate, Literal, NamedTuple, ParamSpec, SupportsFloat, TypeAlias, TypeVar

import torch.distributed as dist
from typing_extensions import Unpack

from shardckpt.checkpoint.load.load import LoadParams, load
from shardckpt.checkpoint.notice.notice_saves import NoticeSaves
from shardckpt.checkpoint.notice.notices import Deadline, Notices
from shardckpt.checkpoint.notice.watch_signals import require_signals
from shardckpt.checkpoint.run.lineage import Lineage
from shardckpt.checkpoint.run.save_schedule import SaveSchedule, StepRetention
from shardckpt.checkpoint.run.step_finder import StepFinder, find_root, require_step_number
from shardckpt.checkpoint.run.step_restore import RestoredStep, restore_step, warn_of_faults
from shardckpt.checkpoint.run.step_saver import NoCaptures, StepSaver, check_options, join_on_event
from shardckpt.checkpoint.save.async_save import AsyncSaveParams
from shardckpt.checkpoint.save.handle import SaveHandle
from shardckpt.checkpoint.save.save import SaveParams
from shardckpt.errors import UsageError, require_bools
from shardckpt.events import OnEvent, require_on_event
from shardckpt.events.recorder import enter_call
from shardckpt.native.run_directory import step_name
from shardckpt.native.step_copies import LOCAL, MEMORY, ROOT, Durability, require_durable
from shardckpt.plan.retention import Retention, RetentionParams
from shardckpt.ranks.process_group import get_ranks
from shardckpt.tiers.capture_tier import CaptureTier
from shardckpt.tiers.captures import Captures
from shardckpt.tiers.durability.claims import DurabilityClaims
from shardckpt.tiers.local_folder import Local
from shardckpt.tiers.local_tier import LocalTier
from shardckpt.tiers.memory_tier import MemoryTier
from shardckpt.tiers.peer_memory import PeerMemory
from shardckpt.tiers.promoter import Promoter
from shardckpt.tiers.tiered_finder import TieredFinder
from shardckpt.witness.witness import Witness
from shardckpt.witness.witness_session import NoWitness, open_session

_P = ParamSpec("_P")
_R = TypeVar("_R")


# What calls ask for, which must be equal on all ranks: rank 0 answers for all.
_ASKED: Mapping[str, Callable[..., str]] = {
    "durability": lambda step: f"step {step}",
    "should_save": lambda step: f"step {step}",
    "wait": lambda step=None, *, survives="process": f"step {step}, {survives}",
    "restore": lambda _state, *, step=None, **_: "the newest step" if step is None else f"step {step}",
}


def _collective(method: Callable[Concatenate[Checkpointer, _P], _R]) -> Callable[Concatenate[Checkpointer, _P], _R]:
    """Name a method that all ranks call, for the ranks that wait in it."""
    name, describe = method.__name__, _ASKED.get(method.__name__)

    @wraps(method)
    def call(self: Checkpointer, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        asked = "a Checkpointer"  # the save itself compares steps and paths
        if describe is not None:
            with suppress(TypeError):  # of a wrong call, which the method raises
                asked = f"{describe(*args, **kwargs)} of {self.root}"
        tiers = "".join(f", with {type(each).__name__}" for each in self._arguments["tiers"])
        with enter_call(name, self.root, self._on_event, asked + tiers):
            return method(self, *args, **kwargs)

    return call


class Checkpointer:
    """Manages a run's checkpoints, with one folder per step below `root`.

    Folders have names such as `step-00001000`; a step exists once its `COMMIT` file exists. Any rank may call
    `path`, `steps`, `latest` and `best` alone; ranks may get different answers while steps are saved or removed. All
    other methods are collective: all ranks in the group call them, and get the answer of rank 0.

    A step is kept if one of the `keep_` rules keeps it; without rules all steps are kept. Only complete steps count.
    The newest complete step and the step just saved are never removed. Uncommitted saves' files are removed a day after
    their last change. A copy, also one by pickle, has the same arguments and a fresh state.

    Args:
        root: Run folder: a path, or a URL that fsspec supports.
        keep_last: How many newest steps to keep.
        keep_every: Keep steps whose number is a multiple of this.
        keep_best: How many best steps by `metric` to keep; without other rules also all steps without the metric.
        metric: Metric name that `keep_best` and `best` rank by.
        mode: Whether the best step has the smallest or the largest metric.
        keep_for: Age up to which steps are kept: a timedelta, or text with a unit such as `"36h"`, `"7d"`, `"2w"`.
        save_every: `should_save` returns True for multiples of this.
        dedup: Write only tensors that changed since the newest complete step (after a restore from the root: since the
            loaded step), and refer to older steps for the others. Removing a step keeps the files that others refer to.
        tiers: Tiers in front of the root, the nearest first, such as `[PeerMemory(every=10), Local("/nvme/run",
            every=100)]`; they need `save_every`. Then saves return when the state is copied. Each tier takes
            the multiples of its `every`; the root takes all other steps and the multiples of `save_every`. `restore`
            loads the newest step from the nearest copy. Other methods and the rules are about the root.
        max_failed_restores: How many starts may fail after restoring a step, before the next step; then `restore`
            passes over it. 0 to count nothing in the root; None for 2 with tiers, 0 without.
        process_group: Ranks that call the methods; None for all ranks.
        on_event: Called with an event after each save, load, restore, removal of old steps and fallback.
        witness: Record the training steps after each save, and compare them after a restore; see `witness`.
        deadline: Seconds from a signal to the end; or a function that returns the time of the end (`math.inf` if
            unknown, None without a notice). `save_on_signal` saves to the farthest place that fits.

    Raises:
        UsageError: An argument has an invalid value, or the root is not a folder's path or URL.

    Attributes:
        root: Run folder as an absolute path or URL, without a slash at the end.

    Examples:
        >>> ck = shardckpt.Checkpointer("s3://bucket/run", keep_last=3, save_every=1000)  # doctest: +SKIP
        >>> start = ck.restore(state) or 0
        >>> for step in range(start + 1, steps + 1):
        ...     train(state)
        ...     if ck.should_save(step):
        ...         ck.save(step, state)
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        save_every: int | None = None,
        dedup: bool = False,
        tiers: Sequence[TierSettings] = (),
        max_failed_restores: int | None = None,
        process_group: dist.ProcessGroup | None = None,
        on_event: OnEvent | None = None,
        witness: Witness | None = None,
        deadline: Deadline | None = None,
        **rules: Unpack[RetentionParams],
    ) -> None:
        require_bools(dedup=dedup)
        require_on_event(on_event)
        settings, kept = require_tiers(tiers, save_every), Retention.from_params("Checkpointer", **rules)
        limits = (save_every, dedup, max_failed_restores, Notices(deadline))
        parts = build_run(root, process_group, kept, settings, witness, limits, on_event)
        self._finder, self._schedule, self._saver, self._retention, self._witness = parts
        self._on_event, self._claims = on_event, DurabilityClaims(self._finder, on_event)
        self.root, self._group = self._finder.root, process_group
        self._arguments: dict[str, Any] = {"save_every": save_every, "dedup": dedup, "tiers": tiers, **rules}
        self._arguments |= {"max_failed_restores": max_failed_restores, "process_group": process_group}
        self._arguments |= {"on_event": on_event, "witness": witness, "deadline": deadline}

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return _make_again, (type(self), self.root, self._arguments)

    def path(self, step: int) -> str:
        """Return a step's path or URL; UsageError unless it is an integer from 0."""
        return self._finder.path(step_name(require_step_number(step)))

    def steps(self) -> tuple[int, ...]:
        """Return the complete steps' numbers, the oldest first; a running save does not count.

        Steps saved after a `restore` are newer than all earlier steps, whatever their numbers.

        Raises:
            UnsupportedError: A newer version of shardckpt wrote the newest step.
            UnknownFormatError: The folder contains another checkpoint and no steps.
            StorageError: The storage failed.
        """
        return tuple(self._finder.list_complete())

    def latest(self) -> int | None:
        """Return the newest step's number, or None; errors as `steps`, and any rank may call it alone."""
        return next(reversed(self.steps()), None)

    def best(self, metric: str | None = None, *, mode: Literal["min", "max"] | None = None) -> int | None:
        """Return the number of the complete step with the best metric, or None; any rank may call it alone.

        If steps are equal, the later wins; a NaN is not ranked.

        Args:
            metric: Name from `save`'s `metrics`; None for the Checkpointer's `metric`.
            mode: Whether the best step has the smallest or the largest metric; None for the Checkpointer's `mode`,
                which applies only to its own `metric`.

        Raises:
            UsageError: No step has a number for the metric, or another metric is given without its mode.
            ShardckptError: As for `steps`.
        """
        return self._retention.find_best(metric, mode)

    @_collective
    def save(
        self,
        step: int,
        state: Any,
        *,
        metrics: Mapping[str, SupportsFloat] | None = None,
        **options: Unpack[SaveParams],
    ) -> None:
        """Save a step, then remove the steps that no rule keeps. Collective.

        An existing step is replaced if it is incomplete, or if `restore` found it damaged or passes over it.

        Args:
            step: Step number, equal on every rank.
            state: As for `shardckpt.save`.
            metrics: Numbers by name to store with the step; rank 0's count.
            **options: As for `shardckpt.save`. With `overwrite`, a complete step is replaced; a `process_group` must be
                the Checkpointer's.

        Raises:
            TargetExistsError: The root has the complete step, and `overwrite` is False (tiers replace it in any case);
                or a newer version wrote the step.
            UsageError: Ranks save different steps, or the step or a metric is not a number. Also if neither `metrics`
                nor any step has the metric that `keep_best` ranks by; then the step is saved, and no step is removed.
            ShardckptError: As for `shardckpt.save`.

        Warns:
            UserWarning: The step is saved, but old ones could not be removed.
        """
        self._saver.save(step, state, metrics, options)
        self._claims.forget(step)

    @_collective
    def async_save(
        self,
        step: int,
        state: Any,
        *,
        metrics: Mapping[str, SupportsFloat] | None = None,
        **options: Unpack[AsyncSaveParams],
    ) -> SaveHandle:
        """Save a step in the background, then remove steps that no rule keeps. Collective.

        The arguments are as for `save` and `shardckpt.async_save`. The state may change after this returns.

        Returns:
            A handle whose `result()` waits for the save and until old steps are removed.

        Raises:
            ShardckptError: As for `save` and `shardckpt.async_save`; for a missing metric, after the save is complete.
        """
        handle = self._saver.async_save(step, state, metrics, options)
        self._claims.forget(step)
        return handle

    @_collective
    def restore(
        self, state: Any, *, step: int | Literal["best"] | None = None, **options: Unpack[LoadParams]
    ) -> int | None:
        """Load the newest complete step; if it is damaged, the previous one. Collective.

        This first waits for running saves. If one fails, it warns, and the next `save` raises.

        Args:
            state: As for `shardckpt.load`; filled in place.
            step: The only step to try; `"best"` for the one that `best()` returns; None for any step.
            **options: As for `shardckpt.load`; a `process_group` must be the Checkpointer's.

        Returns:
            The number of the loaded step; None if the folder is missing or does not contain a checkpoint.

        Raises:
            UnknownFormatError: The folder contains another tool's checkpoint, or is itself a step.
            NoCompleteCheckpoint: No step can be loaded, or the requested step cannot.
            UnsupportedError: A newer version of shardckpt wrote the step, or a newer step that would be skipped.
            UsageError: The checkpoint does not fit the state; or no step has the Checkpointer's metric.
            ShardckptError: As for `shardckpt.load`.

        Warns:
            UserWarning: Newer steps, or this step's copies in tiers, are not used; the message has the reasons.
        """
        asked = _AskedStep.check(step, options, self._group)
        failed = self._saver.await_saves(is_for_newest=step is None)
        self._witness.write_finished()
        wanted = _find_best(self._finder, self._retention, asked.fault) if asked.is_best else asked.number
        on_event = join_on_event(self._on_event, asked.options.pop("on_event", None))
        restored, faults = restore_step(
            self._finder, state, wanted, asked.options, failed=failed, on_event=on_event, fault=asked.fault
        )
        number = None if restored is None else self._note_restored(restored, state)
        warn_of_faults(restored, faults, self._group)  # raises where warnings are errors, so last
        return number

    def _note_restored(self, restored: RestoredStep, state: Any) -> int:
        """Record that a step was restored; return its number. Collective."""
        save = restored.save if restored.finder is self._finder else ""
        self._saver.record_restore(restored.number, restored.order, restored.branch, save)
        self._witness.start_comparison(restored, state)
        return restored.number

    @_collective
    def witness(self, step: int, *, loss: Any = None, grad_norm: Any = None, batch: Any = None) -> None:
        """Record or compare a training step that has ended. Collective for the steps after a save or a restore.

        Call it after every step, before `save`; without `Checkpointer(witness=...)` it does nothing.

        Args:
            step: Step number.
            loss: This rank's loss, a number or a tensor.
            grad_norm: Gradient norm.
            batch: This rank's batch: tensors, arrays and lists by sample (dimension 0), in dicts, lists, dataclasses.

        Raises:
            ResumeDivergence: The resumed run differs from the saved one.
            UsageError: The loss or the norm is not a number.
            RankError: Another rank failed or is lost.
        """
        self._witness.add_step(step, loss, grad_norm, batch)

    @_collective
    def durability(self, step: int) -> Durability:
        """Return what a step survives now: where its complete copies are. Collective.

        A copy on this machine survives the training processes. A copy in a bucket or on a network file system also
        survives lost nodes. If each file is in memory on n machines, n - 1 of them may be lost.
        A copy that was claimed before and is lost, other than by retention, emits a `WithdrawalEvent`.

        Args:
            step: Step number, equal on every rank.

        Raises:
            ShardckptError: As for `steps`.
        """
        return self._claims.claim(require_step_number(step))

    @_collective
    def wait(self, step: int | None = None, *, survives: Literal["process", "node", "2 nodes"] = "process") -> None:
        """Wait for the saves in the background that this object started. Collective.

        Args:
            step: A step that has to survive the failure `survives` then; None for any result.
            survives: The failure.

        Raises:
            StorageError: The step does not survive the failure.
            ShardckptError: A save in the background failed.
        """
        self._saver.settle()
        self._witness.write_finished()
        if step is not None:
            require_durable(self.durability(step), survives)

    @property
    def stop_requested(self) -> bool:
        """Whether any rank had a notice (a signal or a deadline) at the last `should_save` or `save`."""
        return self._schedule.stop_requested

    @_collective
    def should_save(self, step: int) -> bool:
        """Return True for multiples of `save_every` and the first step after a signal.

        Collective inside `save_on_signal`, where it costs a message to rank 0 and back. After a failed background save
        it returns True again for its step, or for the save that a signal requested.

        Args:
            step: Step number; a step that was just restored or saved is not saved again.

        Raises:
            RankError: Another rank is lost.
        """
        return self._schedule.should_save(step, get_ranks(self._group))

    def save_on_signal(self, *numbers: int) -> AbstractContextManager[None]:
        """Make signals, and the `deadline` function, request a last save instead of ending the process.

        The next `should_save` reports the signal to all ranks, whichever received it: it returns True, and
        `stop_requested` is True from then on. The caller ends the loop. Outside the main thread only a function counts.

        Args:
            numbers: Signal numbers; SIGTERM by default.

        Raises:
            UsageError: An argument is not a signal number; or this is not the main thread, and there is no function.
        """
        return self._schedule.watch(require_signals(numbers) or (signal.SIGTERM,))


def _make_again(kind: type[Checkpointer], root: str, arguments: dict[str, Any]) -> Checkpointer:
    return kind(root, **arguments)


class _AskedStep(NamedTuple):
    """A restore's arguments."""

    number: int | None  # number of the only step to try; None for any, and for the best
    is_best: bool  # whether the best step is the only one to try
    options: dict[str, Any]  # options for `shardckpt.load`
    fault: Exception | None = None  # error of the arguments, which every rank gets and raises

    @classmethod
    def check(cls, step: Any, options: Mapping[str, Any], group: dist.ProcessGroup | None) -> _AskedStep:
        """Return a restore's arguments, with their fault if they have one."""
        is_best = isinstance(step, str) and step == "best"
        try:
            given = check_options(load, options, group)
            return cls(None if step is None or is_best else require_step_number(step), is_best, given)
        except Exception as error:  # noqa: BLE001  (sent to every rank, then raised)
            return cls(None, is_best, {}, error)


def _find_best(finder: StepFinder, retention: StepRetention, fault: Exception | None) -> int | None:
    """Return rank 0's best step; if one rank passes a fault, all ranks raise it. Collective."""
    found: int | None = finder.ask_rank0("ranking steps", partial(retention.find_best, None, None), fault)
    return found


class RunParts(NamedTuple):
    """The parts that make up a `Checkpointer`."""

    finder: StepFinder
    schedule: SaveSchedule
    saver: StepSaver
    retention: StepRetention  # of the root
    witness: NoWitness


def build_run(
    root: str | os.PathLike[str],
    group: dist.ProcessGroup | None,
    rules: Retention,
    settings: Sequence[TierSettings],
    witness: Witness | None,
    limits: tuple[int | None, bool, int | None, Notices],  # `save_every`, `dedup`, `max_failed_restores`, `deadline`
    on_event: OnEvent | None,
) -> RunParts:
    """Build a run's parts, with or without tiers."""
    save_every, dedup, max_failed, notices = limits
    folder = find_root(root)
    names = [MEMORY if isinstance(each, PeerMemory) else LOCAL for each in settings]
    notice_saves = NoticeSaves(folder, [*names, ROOT], notices, on_event)
    promoter = Promoter(notice_saves.listen(LOCAL, on_event))
    tiers = [
        build_tier(each, folder, group, notice_saves.listen(name, on_event), promoter)
        for name, each in zip(names, settings, strict=True)
    ]
    local = next((tier.place.finder.root for tier in tiers if isinstance(tier, LocalTier)), "")
    lineage = Lineage(folder, group, on_event, max_failed, has_tiers=bool(tiers), local=local)
    schedule = SaveSchedule(save_every, [tier.every for tier in tiers], lineage.record_completed, notice_saves)
    finder, captures = StepFinder(folder, group, lineage), NoCaptures()
    if tiers:
        finder = tiered = TieredFinder(folder, group, [tier.place for tier in tiers], lineage)
        captures = Captures(tiers, schedule, tiered, lineage, promoter)
    retention, session = StepRetention(rules, finder, on_event), open_session(witness, finder, on_event)
    saver = StepSaver(
        finder,
        retention,
        schedule,
        lineage,
        captures,
        session.start_record,
        dedup=dedup,
        on_event=notice_saves.listen(ROOT, on_event),
    )
    return RunParts(finder, schedule, saver, retention, session)


def build_tier(
    settings: TierSettings, root: str, group: dist.ProcessGroup | None, on_event: OnEvent | None, promoter: Promoter
) -> CaptureTier:
    """Build the tier for some settings."""
    if isinstance(settings, Local):
        return LocalTier(settings, root, group, on_event, promoter.list_promoted)
    return MemoryTier(settings, root, group, on_event, promoter.list_promoted)


TierSettings: TypeAlias = PeerMemory | Local

_KINDS = (PeerMemory, Local)  # kinds of tiers, the nearest first


def require_tiers(tiers: object, save_every: int | None) -> tuple[TierSettings, ...]:
    """Return a run's tiers, the nearest first."""
    kinds = [type(tier) for tier in tiers] if isinstance(tiers, Sequence) else [str]
    if kinds != [kind for kind in _KINDS if kind in kinds]:
        raise UsageError(
            "`tiers` must be a list of at most one PeerMemory and one Local, in this order", found=repr(tiers)[:200]
        )
    if kinds and save_every is None:
        raise UsageError("`tiers` need `save_every`, which names the steps for the root", fix="Pass save_every=1000.")
    settings: tuple[TierSettings, ...] = tuple(tiers)  # type: ignore[arg-type]
    if len(settings) > 1 and settings[1].copies > settings[0].copies:
        raise UsageError(
            "`copies` of Local must not exceed those of PeerMemory, whose captures it gets",
            found=settings[1].copies,
            expected=f"at most {settings[0].copies}",
            fix="Raise `copies` of PeerMemory.",
        )
    return settings
