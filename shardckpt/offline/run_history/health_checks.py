"""Checks of a run's health, one function each: what is known, and what to type if something is wrong."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from shardckpt.errors import UsageError
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
from shardckpt.offline.prune import prune
from shardckpt.offline.results.tensor_stats import Statistics
from shardckpt.offline.run_history.prove import prove
from shardckpt.offline.stats import stats
from shardckpt.offline.verify import verify
from shardckpt.plan.retention import Retention, SavedStep, steps_to_delete, with_trusted_times
from shardckpt.readers.step_paths import read_retention
from shardckpt.storage.resolve_url import local_path
from shardckpt.storage.store import Store
from shardckpt.tiers.durability.durability_list import list_durability
from shardckpt.torchrun import describe_versions
from shardckpt.witness.records.resumes import Resume

CheckStatus = Literal["ok", "problem", "info"]
_SHOWN = 4


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

    @property
    def newest(self) -> StepFolder | None:
        """The newest complete step; None without one."""
        return next(reversed(self.run.complete), None)

    @property
    def quoted(self) -> str:
        """The root as a word for the shell."""
        return shlex.quote(self.root)

    def find_path(self, step: StepFolder) -> str:
        """Return a step's path or URL."""
        return f"{self.store.url.rstrip('/')}/{step.name}"


def check_newest_step(checked: RunToCheck) -> HealthCheck:
    """Compare all bytes of the newest step with its checksums."""
    name, newest = "newest step", checked.newest
    if newest is None:
        if any(not (step.is_base or step.has_only_begun) for step in checked.run.steps):
            return HealthCheck(name, "problem", "no step is complete", f"shardckpt ls {checked.quoted}")
        return HealthCheck(name, "problem", "no step is here", "Start the job: its first save makes a step")
    found = verify(checked.find_path(newest))
    if not found.ok:
        more = f", and {len(found.problems) - 1} more problems" if len(found.problems) > 1 else ""
        step = shlex.quote(checked.find_path(newest))
        return HealthCheck(
            name, "problem", f"step {newest.number}: {found.problems[0]}{more}", f"shardckpt verify {step}"
        )
    unchecked = len(found.files_without_checksums)
    without = f", {unchecked} files have no checksums" if unchecked else ""
    saved = f", saved {_show_time(newest.saved_at)}" if newest.saved_at is not None else ""
    size = _show_size(found.checked_bytes)
    return HealthCheck(name, "ok", f"step {newest.number}: {size} match their checksums{without}{saved}")


def check_values(checked: RunToCheck, newest_check: HealthCheck) -> HealthCheck:
    """Count NaN and Inf in the newest step."""
    name, newest = "values", checked.newest
    if newest is None or newest_check.status != "ok":
        return HealthCheck(name, "info", "not read: the newest step is missing or damaged")
    try:
        found = stats(checked.find_path(newest))
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
        return HealthCheck("damaged steps", "ok", f"none of {_count(len(checked.run.complete), 'complete step')}")
    numbers = _show_first([f"{step.number}" for step in damaged])
    path = shlex.quote(checked.find_path(damaged[-1]))
    return HealthCheck("damaged steps", "problem", f"{numbers}: {damaged[-1].fault}", f"shardckpt verify {path}")


def check_last_resume(checked: RunToCheck) -> HealthCheck:
    """Return the verdict on the last resume that was compared with a record."""
    name, found = "last resume", prove(checked.root)
    command = f"shardckpt prove {checked.quoted}"
    if found.warnings:
        return HealthCheck(name, "problem", f"a record cannot be read: {found.warnings[0]}", command)
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
    text = f"{_show_size(free)} free, the largest step has {_show_size(needed)}"
    if free > needed:
        return HealthCheck(name, "ok", text)
    return HealthCheck(name, "problem", text, f"shardckpt prune {checked.quoted} --keep-last 2 --dry-run")


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
        return HealthCheck("other content", "ok", "saves wrote all that is here")
    return HealthCheck("other content", "info", f"no save wrote {_show_first(others)}: it is never removed")


def check_durability(checked: RunToCheck) -> HealthCheck:
    """Return the newest step in each tier, and the failures that it survives now."""
    newest: dict[str, str] = {}
    has_root = False
    for each in list_durability(checked.root):
        for copy in each.copies:
            survives = "parts" if copy.is_part else ", ".join(copy.survives) or "nothing"
            newest[copy.tier] = f"{copy.tier}: step {each.step} survives {survives}"
            has_root = has_root or bool(copy.survives)
    if not newest:
        return HealthCheck("durability", "info", "no step has a copy")
    text = "; ".join(newest.values())
    if has_root:
        return HealthCheck("durability", "ok", text)
    return HealthCheck("durability", "problem", text, f"shardckpt copy {checked.quoted} DST")


def check_record(checked: RunToCheck) -> HealthCheck:
    """Read the run's record of starts and restores."""
    name, record = "record", read_run_record(checked.store)
    if record.is_damaged:
        place = shlex.quote(f"{checked.store.url.rstrip('/')}/{RECORD}")
        return HealthCheck(name, "problem", f"{RECORD} is damaged; the next start writes a new one", f"rm {place}")
    if not checked.run.has_record:
        return HealthCheck(name, "info", "the run has none: only runs with tiers count restores that failed")
    newest = checked.newest
    failed = 0 if newest is None else record.count_failures().get(newest.order, 0)
    if newest is not None and failed:
        text = f"{_count(failed, 'start')} failed after restoring step {newest.number}, before the next step"
        return HealthCheck(name, "problem", text, f"shardckpt stats {checked.quoted}@{newest.number}")
    return HealthCheck(name, "ok", f"{_count(len(record.starts), 'start')}, none failed after the newest step")


def check_retention(checked: RunToCheck) -> HealthCheck:
    """Return the run's rules, as its newest step stores them, and which steps a save now would remove."""
    name, newest = "retention", checked.newest
    rules = None if newest is None else read_retention(checked.store, newest)
    if newest is None or rules is None or not rules.is_needed:
        command = f"shardckpt prune {checked.quoted} --keep-last 3 --dry-run"
        return HealthCheck(name, "info", f"the newest step stores no rule; `{command}` tries one")
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
        return HealthCheck(name, "problem", f"step {newer.number}: {newer.fault}", "install a newer shardckpt")
    here = describe_versions()
    wrote = "" if newest is None else read_about(checked.store, newest).get(WRITER, "")
    if not wrote:
        return HealthCheck(name, "info", f"{here} here; the newest step does not store which wrote it")
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
