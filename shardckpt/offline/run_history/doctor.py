"""Implement `doctor`: all checks of a run, as lines with what to type next."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from shardckpt.errors import ShardckptError, UsageError, describe, escape
from shardckpt.notebook import Result, draw_in_notebooks
from shardckpt.offline.prune import open_run
from shardckpt.offline.report_html import render_page, require_report_target, write_page
from shardckpt.offline.run_history import health_checks
from shardckpt.offline.run_history.health_checks import HealthCheck, RunToCheck
from shardckpt.readers.step_paths import resolve_run
from shardckpt.storage.resolve_url import as_url

_TRIES = 3  # a running job may remove the newest step while it is read

_CHECKS: dict[str, Callable[[RunToCheck], HealthCheck]] = {
    "values": health_checks.check_values,
    "damaged steps": health_checks.check_damaged_steps,
    "last resume": health_checks.check_last_resume,
    "disk space": health_checks.check_disk_space,
    "retention": health_checks.check_retention,
    "unfinished": health_checks.check_unfinished,
    "other content": health_checks.check_other_content,
    "durability": health_checks.check_durability,
    "record": health_checks.check_record,
    "versions": health_checks.check_versions,
}


@dataclass(frozen=True, slots=True, repr=False)
class HealthReport(Result):
    """Result of `doctor`.

    Attributes:
        root: Path or URL of the run.
        newest: Number of the newest complete step; None without one.
        checks: All checks, in the order of the report.
    """

    root: str
    newest: int | None
    checks: tuple[HealthCheck, ...]

    @property
    def ok(self) -> bool:
        """Whether no check found a problem."""
        return not self.problems

    @property
    def problems(self) -> tuple[HealthCheck, ...]:
        """The checks that found a problem."""
        return tuple(check for check in self.checks if check.status == "problem")


def doctor(root: str | os.PathLike[str], *, html: str | os.PathLike[str] = "") -> HealthReport:
    """Check a run's health: what is wrong with it, and what to type next.

    The newest step's bytes are read once for their checksums and once for NaN and Inf, and the newest captures in tiers
    on this machine once, in bounded memory. Nothing is written or removed, torch is not needed, and the job may
    continue.

    Args:
        root: Path or URL of the run's folder.
        html: Path or URL for one page with the checks.

    Returns:
        A line for each check. A check that fails itself is a problem, with its error.

    Raises:
        UsageError: The folder does not exist or is not a run, or the path names steps of one; `html` names another file
            than an earlier report.
        StorageError: The folder cannot be listed.

    Examples:
        >>> shardckpt.doctor("runs/a").problems  # doctest: +SKIP
        ()
    """
    chosen, html = resolve_run(root), as_url(html)
    if not chosen.is_all:
        raise UsageError(
            "`doctor` must be given a run's folder, not its steps",
            found=as_url(root),
            expected=chosen.path,
            fix=f"`shardckpt verify {as_url(root)}` and `shardckpt stats {as_url(root)}` check steps.",
        )
    if html:
        require_report_target(html)
    found = _examine(chosen.path)
    if html:
        write_page(_render(found), html)
    return found


def _render(found: HealthReport) -> str:
    return render_page(escape(found.root), describe_report(found))


draw_in_notebooks(HealthReport, _render)


def _examine(root: str) -> HealthReport:
    for _ in range(_TRIES):
        store, run = open_run(root)
        checked = RunToCheck(root, store, run)
        newest, checks = checked.newest, _check(checked)
        saves = {step.save for step in open_run(root)[1].complete}
        if newest is None or newest.save in saves:
            break
    return HealthReport(root, None if newest is None else newest.number, checks)


def _check(checked: RunToCheck) -> tuple[HealthCheck, ...]:
    newest = _guard("newest step", health_checks.check_newest_step, checked)
    checked = replace(checked, is_newest_intact=newest.status == "ok")
    return (newest, *(_guard(name, check, checked) for name, check in _CHECKS.items()))


def _guard(name: str, check: Callable[[RunToCheck], HealthCheck], checked: RunToCheck) -> HealthCheck:
    """Return a check's line; if it cannot be made, a line with the error."""
    try:
        return check(checked)
    except ShardckptError as error:
        fault = str(error).rstrip(".")
    except OSError as error:
        fault = describe(error)
    return HealthCheck(name, "problem", f"cannot be checked: {fault}", f"shardckpt doctor {checked.quoted}")


def describe_report(found: HealthReport) -> dict[str, Any]:
    """Return the data for the page about a run's health: JSON values only."""
    return {
        "schema_version": 1,
        "kind": "doctor",
        "root": escape(found.root),
        "newest": found.newest,
        "checks": [{name: escape(value) for name, value in asdict(check).items()} for check in found.checks],
    }
