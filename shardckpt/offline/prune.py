"""Implement `ls` and `prune`: list and remove a run's steps."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from numbers import Integral
from typing import Literal

from typing_extensions import Unpack

from shardckpt.errors import UnknownFormatError, UsageError, require_bools
from shardckpt.events import PruneEvent, Recorder, emit
from shardckpt.native.apply_retention import apply_retention
from shardckpt.native.commit import COMMIT
from shardckpt.native.run_directory import (
    Orphan,
    RunDirectory,
    StepFolder,
    manifest_fault,
    read_measures,
    read_metrics,
    read_run,
    read_run_to_remove,
    with_sound_newest,
)
from shardckpt.native.step_copies import Durability
from shardckpt.notebook import Result
from shardckpt.offline.verify import verify as verification
from shardckpt.plan.retention import ORPHAN_TTL_S, Retention, RetentionParams, SavedStep, find_best, parse_age
from shardckpt.readers.run_start import describe_fault, require_start_of_run
from shardckpt.readers.step_paths import resolve_run
from shardckpt.storage.resolve_url import kind, not_found_error, open_store
from shardckpt.storage.store import Store, SubfolderStore
from shardckpt.storage.thread_pool import ThreadPool
from shardckpt.tiers.durability.durability_list import list_durability
from shardckpt.witness.files.step_witness import CaptureWitness, read_capture_witnesses, read_step_witness
from shardckpt.witness.records.resumes import StepProof, StepVerdict

_SHOWN = 8
_AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class StepInfo:
    """One step in a run.

    Attributes:
        number: Step number.
        path: Path or URL, which all functions and commands accept.
        nbytes: Committed bytes in its files.
        saved_at: Time when its save started, in seconds since the epoch; None if unknown.
        fault: Why the step is incomplete; empty for a complete step.
        metrics: Saved metrics, by name; None if they were not read.
        has_stats: Whether the save stored statistics; None if this was not read.
        proof: Verdict on its resumes: `proven`, `diverged`, `unproven` or `no record`; None if this was not read.
        equal_steps: Two counts of training steps: equal ones in the resume that decides the verdict, and recorded ones
            after the step. None if this was not read.
        is_unfinished: Whether its save or removal was interrupted, or is in progress.
    """

    number: int
    path: str
    nbytes: int
    saved_at: float | None
    fault: str = ""
    metrics: Mapping[str, float] | None = field(default=None, hash=False)
    has_stats: bool | None = None
    proof: StepVerdict | None = None
    equal_steps: tuple[int, int] | None = None
    is_unfinished: bool = False


@dataclass(frozen=True, slots=True, repr=False)
class StepList(Result):
    """A run's steps.

    Attributes:
        root: Path or URL of the run.
        complete: Committed steps that have all their files, oldest first.
        incomplete: Folders that are named like steps and cannot be loaded.
        durability: Copies of each step in the root and its tiers, by step number; None if they were not read.
        captures: Captures in tiers that the run was resumed from, which may be gone; None if their verdicts were not
            read.
    """

    root: str
    complete: tuple[StepInfo, ...]
    incomplete: tuple[StepInfo, ...]
    durability: tuple[Durability, ...] | None = None
    captures: tuple[StepProof, ...] | None = None

    def find_best(self, metric: str = "loss", mode: Literal["min", "max"] = "min") -> StepInfo | None:
        """Return the complete step with the best metric, the later if equal; None if no step is complete.

        Args:
            metric: Metric name. The steps have metrics after `ls(root, metrics=True)`.
            mode: Whether the smallest or the largest metric is best.

        Raises:
            UsageError: No step has a number for the metric, or the mode is unknown.
        """
        ordered = [SavedStep(at, metrics=step.metrics or {}) for at, step in enumerate(self.complete)]
        best = find_best(ordered, metric, mode)
        return None if best is None else self.complete[best]


@dataclass(frozen=True, slots=True)
class UnfinishedFolder:
    """A folder from an interrupted save or removal, or for one in progress.

    Attributes:
        name: Folder name in the run.
        nbytes: Bytes in its files.
        removable_at: Time in seconds since the epoch after which `prune` with the same `unfinished_for` removes it,
            unless it changes; None if its age is unknown.
    """

    name: str
    nbytes: int
    removable_at: float | None


@dataclass(frozen=True, slots=True, repr=False)
class Pruned(Result):
    """The removed steps and orphans; with `dry_run`, the ones to remove.

    Attributes:
        root: Path or URL of the run.
        removed: Removed steps, oldest first.
        kept: Complete steps that stay.
        incomplete: Incomplete steps, which stay.
        orphans: Names of folders that killed saves and removals left.
        other_content: Paths relative to the root: content in the removed steps that no save wrote, which stays.
        dry_run: Whether nothing was removed.
        unfinished: Folders of unfinished saves and removals that stay because they changed recently.
    """

    root: str
    removed: tuple[StepInfo, ...]
    kept: tuple[StepInfo, ...]
    incomplete: tuple[StepInfo, ...]
    orphans: tuple[str, ...]
    other_content: tuple[str, ...] = ()
    dry_run: bool = False
    unfinished: tuple[UnfinishedFolder, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes in the removed steps."""
        return sum(step.nbytes for step in self.removed)


def ls(
    root: str | os.PathLike[str], *, metrics: bool = False, proof: bool = False, durability: bool = False
) -> StepList:
    """List a run's steps.

    A step is complete if its `COMMIT` is valid and all its files have their sizes.

    Args:
        root: Path or URL of the run's folder; `RUN@1000..2000` lists some of its steps.
        metrics: Read metrics from the manifests of complete steps, and whether they have statistics.
        proof: Read the verdicts on resumes from complete steps and captures; `prove` returns more about them.
        durability: List each step's copies that this machine can read, also in tiers, and what they survive. If a tier
            has a copy, the folder need not exist yet.

    Raises:
        UsageError: The folder does not exist or has no steps; the message describes its content.
        StorageError: Reading failed.

    Examples:
        >>> shardckpt.ls("s3://bucket/run").complete[-1].path  # doctest: +SKIP
    """
    require_bools(metrics=metrics, proof=proof, durability=durability)
    chosen = resolve_run(root)
    root = chosen.path
    if durability and kind(root) == "missing" and (in_tiers := list_durability(root)):
        return StepList(root, (), (), in_tiers)
    store, run = open_run(root)
    run = replace(run, steps=tuple(step for step in run.steps if chosen.has_step(step.number)))
    complete = describe_steps(store, run.complete)
    with ThreadPool(_AT_ONCE, thread_name_prefix="shardckpt-ls") as pool:
        if metrics:
            read = pool.map(partial(read_measures, store), run.complete)
            complete = tuple(replace(step, **found._asdict()) for step, found in zip(complete, read, strict=True))
        if proof:
            witnesses = pool.map(partial(read_step_witness, store), run.complete)
            complete = tuple(
                replace(step, proof=found.verdict, equal_steps=found.equal_steps)
                for step, found in zip(complete, witnesses, strict=True)
            )
    captures: tuple[StepProof, ...] | None = None
    copies: tuple[Durability, ...] | None = None
    if proof:
        witnessed = describe_captures(read_capture_witnesses(store)[0])
        captures = tuple(each for each in witnessed if chosen.has_step(each.number))
    if durability:
        copies = tuple(each for each in list_durability(root) if chosen.has_step(each.step))
    return StepList(root, complete, describe_steps(store, run.incomplete), copies, captures)


def open_run(root: str) -> tuple[Store, RunDirectory]:
    """Return a run's store and steps."""
    store = _open(root)
    run = read_run(store)
    if not run.steps:
        _require_empty(root, store)
    return store, run


def prune(
    root: str | os.PathLike[str],
    *,
    steps: Collection[int] | None = None,
    verify: bool = False,
    unfinished_for: timedelta | str | int = "1d",
    dry_run: bool = False,
    **rules: Unpack[RetentionParams],
) -> Pruned:
    """Remove a run's steps that no rule keeps, and old orphans.

    The newest complete step always stays, and only complete steps count. A step's `COMMIT` is removed first: after an
    interrupted call, every step is either complete or nonexistent.

    Args:
        root: Path or URL of the run's folder; `RUN@1000..2000` and `RUN@1000` name steps to remove, as `steps` does.
        steps: Step numbers to remove, instead of rules; the newest complete step stays.
        keep_last: How many of the newest steps to keep.
        keep_every: Steps whose number is a multiple of this are kept.
        keep_best: How many of the best steps by `metric` to keep; steps without the metric are kept too, unless there
            are other rules. Without any rule all steps are kept.
        metric: Saved metric for `keep_best`.
        mode: Whether the smallest or the largest metric is best.
        keep_for: Minimum age of removed steps: a timedelta, or text with a unit such as `"36h"`, `"7d"`, `"2w"`.
        verify: Check every block in the newest step before removing any; after a damaged step, check the step before.
            Otherwise only its manifest is read.
        unfinished_for: Remove folders of unfinished saves and removals that have not changed for this time: as for
            `keep_for`, or 0. If a save takes longer than this time, no job may save into the run.
        dry_run: Remove nothing.

    Returns:
        The removed steps and orphans, and the unfinished folders that stay.

    Raises:
        UsageError: The folder does not exist or has no steps; a rule has an invalid value; no step has the metric.
            Nothing was removed.
        UnsupportedError: A newer version of shardckpt wrote a step; nothing was removed.
        StorageError: Reading or removing failed.
    """
    require_bools(verify=verify, dry_run=dry_run)
    retention = Retention.from_params("prune", **rules)
    orphan_age_s = parse_age("unfinished_for", unfinished_for)
    if steps is not None:
        _require_numbers(steps)
    named = resolve_run(root)
    root = named.path
    if not named.is_all:
        if steps is not None:
            raise UsageError("`steps` and a path with an @ exclude each other", where=root, fix="Pass one of them.")
        steps = [step.number for step in read_run(_open(root)).complete if named.has_step(step.number)]
    if steps is not None and retention.is_needed:
        given = ", ".join(f"`{name}`" for name, value in rules.items() if value is not None and name.startswith("keep"))
        what = "`steps`" if named.is_all else "a path with an @"
        raise UsageError(f"{what} and rules exclude each other", found=given, fix="Pass one of them.")
    recorder = Recorder(PruneEvent, root)
    store = _open(root)
    now = time.time()
    run = _sound_run(store, verify=verify) if retention.is_needed or steps else read_run_to_remove(store)
    if not run.steps:
        require_start_of_run(root)
    run.require_readable()
    deleted = apply_retention(
        store,
        run,
        retention,
        now=now,
        is_complete=_is_complete,
        get_metrics=lambda step: read_metrics(store, step),
        chosen=steps,
        may_be_over=True,
        orphan_age_s=orphan_age_s,
        dry_run=dry_run,
    )
    if deleted.steps and not dry_run:
        numbers, nbytes = tuple(step.number for step in deleted.steps), sum(step.nbytes for step in deleted.steps)
        recorder.values.update(removed=numbers, nbytes=nbytes)
        emit(recorder.build(None))
    names = {step.name for step in deleted.steps} | {*deleted.orphans}
    return Pruned(
        root,
        removed=describe_steps(store, [step for step in run.complete if step.name in names]),
        kept=describe_steps(store, [step for step in run.complete if step.name not in names]),
        incomplete=describe_steps(store, [step for step in run.incomplete if step.name not in names]),
        orphans=deleted.orphans,
        other_content=deleted.other_content,
        dry_run=dry_run,
        unfinished=tuple(_describe_unfinished(store, run, left, orphan_age_s) for left in deleted.waiting),
    )


def _describe_unfinished(store: Store, run: RunDirectory, orphan: Orphan, age_s: float | None) -> UnfinishedFolder:
    held = next((step.held for step in run.steps if step.name == orphan.name), None)
    sizes = (
        held.values()
        if held is not None
        else (each.size for each in SubfolderStore(store, orphan.name).list() if not each.is_folder)
    )
    removable_at = None if orphan.changed_at is None else orphan.changed_at + (ORPHAN_TTL_S if age_s is None else age_s)
    return UnfinishedFolder(orphan.name, sum(sizes), removable_at)


def _require_numbers(steps: object) -> None:
    """Reject values that are not step numbers, which would remove nothing. Raises UsageError."""
    listed = steps if isinstance(steps, Collection) else [None]
    if not all(isinstance(number, Integral) and not isinstance(number, bool) for number in listed):
        raise UsageError("`steps` must be a list of step numbers", found=repr(steps), expected="such as [100, 200]")


def _is_complete(step: StepFolder) -> bool:
    return step.is_complete


def _sound_run(store: Store, *, verify: bool) -> RunDirectory:
    """Return a run after checking its newest complete step."""

    def find_fault(step: StepFolder) -> str:
        return manifest_fault(store, step) or (_damage(store, step) if verify else "")

    while True:
        run = read_run_to_remove(open_store(store.url))
        sound = with_sound_newest(run, find_fault)
        faulty = {step.save for step in run.complete} - {step.save for step in sound.complete}
        # A step that was removed meanwhile is not faulty.
        if not faulty or faulty <= {step.save for step in read_run(open_store(store.url)).complete}:
            return sound


def _damage(store: Store, step: StepFolder) -> str:
    return next((problem.message for problem in verification(_path(store, step)).problems), "")


def _path(store: Store, step: StepFolder) -> str:
    return f"{store.url.rstrip('/')}/{step.name}"


def _open(root: str) -> Store:
    found = kind(root)
    if found == "missing":
        raise not_found_error(root)
    if found == "file":
        raise UsageError("this is a file", where=root, expected="a folder of steps")
    store = open_store(root)
    if any(entry.name == COMMIT for entry in store.list()):
        raise UsageError("this is a step", where=root, expected="the folder that contains it")
    return store


def _require_empty(root: str, store: Store) -> None:
    """Reject a folder without steps but with other content. Raises UnknownFormatError."""
    require_start_of_run(root)
    names = [entry.name for entry in store.list() if not entry.name.startswith(".")]
    if names:
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        raise UnknownFormatError(
            "this folder contains no step of a run",
            where=root,
            found=", ".join(names[:_SHOWN]) + more,
            fix="Name the folder that contains the steps.",
        )


def describe_steps(store: Store, steps: Iterable[StepFolder]) -> tuple[StepInfo, ...]:
    """Return steps as results have them."""
    return tuple(
        StepInfo(
            each.number,
            _path(store, each),
            each.nbytes,
            each.saved_at,
            describe_fault(store, each),
            is_unfinished=each.is_unfinished and not each.is_base,
        )
        for each in steps
    )


def describe_captures(captures: Iterable[CaptureWitness]) -> tuple[StepProof, ...]:
    """Return captures as results have them."""
    described = []
    for each in captures:
        capture, last = each.last, each.last.resume
        ranks, style = last.rank_count_before, last.style_before
        described.append(
            StepProof(
                capture.number, capture.path, each.verdict, last.steps, ranks, style, each.resumes, tier=capture.tier
            )
        )
    return tuple(described)
