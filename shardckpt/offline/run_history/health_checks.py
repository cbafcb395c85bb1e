"""Checks of a run's health, one function each: what is known, and what to type if something is wrong."""

from __future__ import annotations

import os
import re
import shlex
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from shardckpt.errors import ShardckptError, UsageError
from shardckpt.native.commit import COMMIT, MANIFEST_SUFFIX
from shardckpt.native.run_directory import (
    RECORD,
    WRITER,
    RunDirectory,
    StepFolder,
    is_run_file,
    other_content,
    read_about,
    read_metrics,
)
from shardckpt.native.run_record import read_run_record
from shardckpt.native.step_copies import LOCAL, ROOT, StepCopy
from shardckpt.offline.prune import prune
from shardckpt.offline.results.tensor_stats import Statistics
from shardckpt.offline.run_history.prove import prove
from shardckpt.offline.stats import stats
from shardckpt.offline.verify import verify
from shardckpt.plan.retention import Retention, SavedStep, steps_to_delete, with_trusted_times
from shardckpt.readers.run_start import describe_fault
from shardckpt.readers.step_paths import read_retention
from shardckpt.storage.resolve_url import local_path
from shardckpt.storage.store import Store
from shardckpt.tiers.durability.durability_list import find_local_fault, list_durability
from shardckpt.torchrun import describe_versions
from shardckpt.witness.records.resumes import Resume

CheckStatus = Literal["ok", "problem", "info"]
_SHOWN = 4
_TRIES = 3  # a running job may replace a capture while it is read
_RESUME_FILE = re.compile(r"/((?:step-[0-9]+|\.captures)\.(?:witness|resumes)\.json): ")
_UPDATE = "pip install --upgrade shardckpt"
_START = "start the job: restore passes over damaged copies, and the next save replaces them"


@dataclass(frozen=True, slots=True)
class HealthCheck:
    """One line of a run's health.

    Attributes:
        name: What was checked: `newest step`, `values`, `last resume`, `disk space`, `retention`, `unfinished`,
            `other content`, `durability`, `versions`, `record`, `damaged steps`.
        status: `ok`, `problem`, or `info` if nothing is wrong and nothing is proven.
        text: Finding, as one sentence without a full stop.
        next: For a problem, the command to type next or what to do.
    """

    name: str
    status: CheckStatus
    text: str
    next: str = ""


@dataclass(frozen=True, slots=True)
class RunToCheck:
    """A run that was read, and its newest complete step."""

    root: str
    store: Store
    run: RunDirectory
    is_newest_intact: bool = True  # what `check_newest_step` found

    @property
    def newest(self) -> StepFolder | None:
        """The newest complete step; None without one."""
        return next(reversed(self.run.complete), None)

    @property
    def quoted(self) -> str:
        """The root as a word for the shell."""
        return shlex.quote(self.root)

    def find_path(self, name: str) -> str:
        """Return the path or URL of a folder or file in the run."""
        return f"{self.store.url.rstrip('/')}/{name}"

    def find_mend(self, step: StepFolder, damaged: Iterable[str] = ()) -> str:
        """Return what to type if a step cannot be loaded: its files that are damaged, or else missing, decide."""
        path, local = shlex.quote(self.find_path(step.name)), local_path(self.store.url)
        if step.is_newer:
            return _UPDATE
        lost = {*damaged} or step.own - step.held.keys()
        has_payload = bool(lost) and all(name == COMMIT or name.endswith(MANIFEST_SUFFIX) for name in lost)
        if not step.is_foreign and (has_payload or not step.save):
            return f"shardckpt repair {path}"
        if local is None or step.name in self.run.referred():
            return f"copy its files again from another copy; without one, restore takes the step before {step.number}"
        return f"mv {path} {shlex.quote(os.path.join(local, f'unused-{step.name}'))}"


def check_newest_step(checked: RunToCheck) -> HealthCheck:
    """Compare all bytes of the newest step with its checksums."""
    name, newest = "newest step", checked.newest
    if newest is None:
        return _describe_no_step(name, checked)
    found = verify(checked.find_path(newest.name))
    if not found.ok:
        more = f", and {len(found.problems) - 1} more problems" if len(found.problems) > 1 else ""
        text = f"step {newest.number}: {found.problems[0]}{more}"
        return HealthCheck(name, "problem", text, checked.find_mend(newest, {each.file for each in found.problems}))
    unchecked = len(found.files_without_checksums)
    without = f", {unchecked} files have no checksums" if unchecked else ""
    saved = f", saved {_show_time(newest.saved_at)}" if newest.saved_at is not None else ""
    size = _show_size(found.checked_bytes)
    return HealthCheck(name, "ok", f"step {newest.number}: {size} match their checksums{without}{saved}")


def _describe_no_step(name: str, checked: RunToCheck) -> HealthCheck:
    """Return why a run has no complete step: nothing is here, no save wrote it, or all steps are damaged."""
    steps = [step for step in checked.run.steps if not (step.is_base or step.has_only_begun)]
    if not steps:
        text = "no step is here" if checked.store.list() else "no step is here: the folder is empty"
        return HealthCheck(name, "problem", text, "start the job: its first save makes a step")
    last = steps[-1]
    fault = describe_fault(checked.store, last)
    text = fault if last.is_foreign else f"no step is complete; step {last.number}: {fault}"
    return HealthCheck(name, "problem", text, checked.find_mend(last))


def check_values(checked: RunToCheck) -> HealthCheck:
    """Count NaN and Inf in the newest step."""
    name, newest = "values", checked.newest
    if newest is None or not checked.is_newest_intact:
        return HealthCheck(name, "info", f"not read: {'no step is complete' if newest is None else 'it is damaged'}")
    try:
        found = stats(checked.find_path(newest.name))
    except UsageError:  # it has nothing but counters
        return HealthCheck(name, "ok", "the newest step has no tensor that is trained")
    bad = [tensor.name for tensor in found.tensors if tensor.nans or tensor.infs]
    if not bad:
        return HealthCheck(name, "ok", f"no NaN or Inf in {_count(len(found.tensors), 'tensor')}")
    return HealthCheck(
        name, "problem", _describe_bad(found, bad), f"shardckpt bisect {checked.quoted} --when {_first_sign(found)}"
    )


def _describe_bad(found: Statistics, bad: Sequence[str]) -> str:
    nans, infs = (sum(getattr(tensor, stat) for tensor in found.tensors) for stat in ("nans", "infs"))
    return f"{nans} NaN and {infs} Inf in {_count(len(bad), 'tensor')}: {_show_first(bad)}"


def _first_sign(found: Statistics) -> str:
    return "nan" if any(tensor.nans for tensor in found.tensors) else "inf"


def check_damaged_steps(checked: RunToCheck) -> HealthCheck:
    """Find committed steps that cannot be loaded."""
    damaged = [step for step in checked.run.incomplete if step.is_committed and not step.is_double]
    if not damaged:
        count = len(checked.run.complete)
        return HealthCheck("damaged steps", "ok", f"none of {_count(count, 'complete step')}" if count else "none")
    numbers = _show_first([f"{step.number}" for step in damaged])
    text = f"{numbers}: {damaged[-1].fault}"
    return HealthCheck("damaged steps", "problem", text, checked.find_mend(damaged[-1]))


def check_last_resume(checked: RunToCheck) -> HealthCheck:
    """Return the verdict on the last resume that was compared with a record."""
    name, found = "last resume", prove(checked.root)
    command = f"shardckpt prove {checked.quoted}"
    if found.warnings:
        damaged = _RESUME_FILE.search(found.warnings[0])
        mend = f"rm {shlex.quote(checked.find_path(damaged[1]))}" if damaged else command
        return HealthCheck(name, "problem", f"a record cannot be read: {found.warnings[0]}", mend)
    resumes = [
        (resume.began_at, step.number, resume)
        for step in (*found.removed, *found.steps, *found.captures)
        for resume in step.resumes
    ]
    if not resumes:
        return HealthCheck(
            name, "info", "none was compared: only a run with Checkpointer(witness=...) compares resumes"
        )
    _, number, last = max(resumes, key=lambda each: each[:2])
    return _describe_resume(name, number, last, command)


def _describe_resume(name: str, number: int, resume: Resume, command: str) -> HealthCheck:
    text = f"{resume.verdict}, from step {number} at {_show_time(resume.began_at)}"
    if resume.divergence is not None:
        return HealthCheck(name, "problem", f"{text}: {resume.divergence}", command)
    equal = f", {resume.compared} of {_count(len(resume.steps), 'recorded step')} equal"
    return HealthCheck(name, "ok" if resume.verdict == "proven" else "info", text + equal)


def check_disk_space(checked: RunToCheck) -> HealthCheck:
    """Compare the free space on a local disk with the size of the largest step."""
    name, path = "disk space", local_path(checked.store.url)
    if path is None:
        return HealthCheck(name, "info", "not known: the root is not a local folder")
    disk = os.statvfs(path)
    free, needed = disk.f_bavail * disk.f_frsize, max((step.nbytes for step in checked.run.complete), default=0)
    if not disk.f_blocks:  # some network file systems do not report free space
        return HealthCheck(name, "info", "not known: the file system does not report it")
    size = f"the largest step has {_show_size(needed)}" if needed else "no step is complete"
    text = f"{_show_size(free)} free, {size}"
    if free > needed:
        return HealthCheck(name, "ok", text)
    kept = 2 if len(checked.run.complete) > 2 else 1
    return HealthCheck(name, "problem", text, f"shardckpt prune {checked.quoted} --keep-last {kept} --dry-run")


def check_unfinished(checked: RunToCheck) -> HealthCheck:
    """Find folders of saves and removals that were interrupted."""
    name, found = "unfinished", prune(checked.root, dry_run=True)
    command = f"shardckpt prune {checked.quoted}"
    if found.orphans:
        count = _count(len(found.orphans), "folder")
        text = f"{count} from saves or removals that ended over a day ago: {_show_first(found.orphans)}"
        return HealthCheck(name, "problem", text, command)
    if found.unfinished:
        size = _show_size(sum(folder.nbytes for folder in found.unfinished))
        names = _show_first([folder.name for folder in found.unfinished])
        count = _count(len(found.unfinished), "folder")
        return HealthCheck(name, "info", f"{count}, {size}, from saves that run or were interrupted: {names}")
    return HealthCheck(name, "ok", "no save or removal was interrupted")


def check_other_content(checked: RunToCheck) -> HealthCheck:
    """Find files and folders that no save wrote; they are never removed."""
    entries = checked.store.list()
    known = {step.name for step in checked.run.steps if not step.is_foreign} | {*checked.run.partial}
    names = [f"{each.name}/" if each.is_folder else each.name for each in entries if each.name not in known]
    others = [name for name in names if name.endswith("/") or not is_run_file(name)]
    others += other_content(step for step in checked.run.steps if not step.is_foreign)
    if not others:
        text = "saves wrote all that is here" if entries else "the folder is empty"
        return HealthCheck("other content", "ok", text)
    return HealthCheck("other content", "info", f"no save wrote {_show_first(others)}: it is never removed")


class _TierState(NamedTuple):
    text: str
    has_survivor: bool  # an undamaged copy survives the processes
    mend: str = ""  # what to do about a damaged copy
    is_gone: bool = False  # the job replaced a copy while it was read


def check_durability(checked: RunToCheck) -> HealthCheck:
    """Verify the newest copy in each tier; return the failures that undamaged ones survive now."""
    states = list[_TierState]()
    for _ in range(_TRIES):
        tiers: dict[str, list[tuple[int, StepCopy]]] = {}
        for each in list_durability(checked.root):
            for copy in each.copies:
                tiers.setdefault(copy.tier, []).append((each.step, copy))
        states = [_examine_tier(checked, tier, copies) for tier, copies in tiers.items()]
        if not any(state.is_gone for state in states):
            break
    lost = find_local_fault(checked.root)
    texts = [state.text for state in states] + ([f"{LOCAL}: {lost}"] if lost else [])
    mends = [state.mend for state in states if state.mend]
    if lost and checked.newest is not None:  # the first capture makes the folder
        mends.append("mount its disk again; without it, the next capture makes a new folder")
    if states and not any(state.has_survivor for state in states):
        mends.append(f"shardckpt copy {checked.quoted} DST" if checked.is_newest_intact else _START)
    if mends:
        return HealthCheck("durability", "problem", "; ".join(texts), mends[0])
    return HealthCheck("durability", "ok" if states else "info", "; ".join(texts) or "no step has a copy")


def _examine_tier(checked: RunToCheck, tier: str, copies: Sequence[tuple[int, StepCopy]]) -> _TierState:
    """Verify a tier's copies from the newest on, until one is not damaged."""
    damaged, mend = "", ""
    for step, copy in sorted(copies, key=lambda each: (each[1].saved_at or 0, each[0]), reverse=True):
        text = f"{tier}: {damaged}step {step} survives {', '.join(copy.survives) or 'nothing'}"
        if copy.is_part:
            return _TierState(f"{tier}: {damaged}a part of step {step} is here, not verified", False, mend)
        if not _is_damaged(checked, copy):
            return _TierState(text, bool(copy.survives), mend)
        listed = {(each.tier, each.save) for found in list_durability(checked.root) for each in found.copies}
        if (tier, copy.save) not in listed:
            return _TierState(f"{text}, not verified: the job replaced it", bool(copy.survives), mend, is_gone=True)
        damaged += f"step {step} is damaged, "
        mend = mend if tier == ROOT else _START
    return _TierState(f"{tier}: {damaged.removesuffix(', ')}", False, mend)


def _is_damaged(checked: RunToCheck, copy: StepCopy) -> bool:
    if copy.tier == ROOT:  # `check_newest_step` has verified the newest
        return not checked.is_newest_intact and checked.newest is not None and copy.save == checked.newest.save
    try:
        return not verify(copy.path).ok
    except ShardckptError:
        return True


def check_record(checked: RunToCheck) -> HealthCheck:
    """Read the run's record of starts and restores."""
    name, record = "record", read_run_record(checked.store)
    if record.is_damaged:
        place = shlex.quote(checked.find_path(RECORD))
        mend = f"rm {place}" if local_path(checked.store.url) else f"remove {place}"
        return HealthCheck(name, "problem", f"{RECORD} is damaged; the next start writes a new one", mend)
    if not checked.run.has_record:
        return HealthCheck(name, "info", "the run has none: only runs with tiers count restores that failed")
    newest = checked.newest
    failed = 0 if newest is None else record.count_failures().get(newest.order, 0)
    if newest is not None and failed:
        text = f"{_count(failed, 'start')} failed after restoring step {newest.number}, before the next step"
        mend = f"pass Checkpointer(..., max_failed_restores={failed}): restore takes the step before"
        return HealthCheck(name, "problem", text, mend)
    return HealthCheck(name, "ok", f"{_count(len(record.starts), 'start')}, none failed after the newest step")


def check_retention(checked: RunToCheck) -> HealthCheck:
    """Return the run's rules, as its newest step stores them, and which steps a save now would remove."""
    name, newest = "retention", checked.newest
    rules = None if newest is None else read_retention(checked.store, newest)
    if newest is None or rules is None or not rules.is_needed:
        command = f"shardckpt prune {checked.quoted} --keep-last 3 --dry-run"
        text = f"the newest step stores no rule; `{command}` tries one"
        return HealthCheck(name, "info", "no step is complete" if newest is None else text)
    now = time.time()
    steps = [_describe_saved(checked.store, step, rules) for step in checked.run.complete]
    next_step = SavedStep(newest.number + 1, saved_at=now, branch=newest.branch)
    removed = steps_to_delete(with_trusted_times([*steps, next_step], now), rules, now=now)
    shown = _show_first([f"{number}" for number in removed]) or "nothing"
    given = rules.encode().strip("{}").replace('"', "")
    return HealthCheck(name, "ok", f"{given}; the next save removes {shown}")


def _describe_saved(store: Store, step: StepFolder, rules: Retention) -> SavedStep:
    metrics = read_metrics(store, step) if rules.keep_best is not None else {}
    return SavedStep(step.number, saved_at=step.saved_at, metrics=metrics, branch=step.branch)


def check_versions(checked: RunToCheck) -> HealthCheck:
    """Compare the versions that wrote the newest step with the installed ones."""
    name, newest = "versions", checked.newest
    newer = next((step for step in checked.run.steps if step.is_newer), None)
    if newer is not None:
        return HealthCheck(name, "problem", f"step {newer.number}: {newer.fault}", _UPDATE)
    here = describe_versions()
    wrote = "" if newest is None else read_about(checked.store, newest).get(WRITER, "")
    if not wrote:
        text = "no step is complete" if newest is None else "the newest step does not store which wrote it"
        return HealthCheck(name, "info", f"{here} here; {text}")
    if wrote == here:
        return HealthCheck(name, "ok", f"{here} here, which wrote the newest step too")
    return HealthCheck(name, "info", f"{here} here; {wrote} wrote the newest step")


def _show_first(names: Iterable[str]) -> str:
    listed = [*names]
    more = f" and {len(listed) - _SHOWN} more" if len(listed) > _SHOWN else ""
    return ", ".join(listed[:_SHOWN]) + more


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def _show_time(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(seconds))


def _show_size(nbytes: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.1f} TB"
