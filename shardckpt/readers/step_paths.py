"""Resolve what a path names in a run: `RUN@latest`, `RUN@best`, `RUN@1000`, `RUN@1000..2000`; or in a stream.

A path that exists is taken as it is, also with an `@` in its name.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Literal, NamedTuple

from shardckpt.errors import (
    AmbiguousError,
    CheckpointError,
    MissingFileError,
    NoCompleteCheckpoint,
    SourceNotFoundError,
    UnsupportedError,
    UsageError,
    escape,
)
from shardckpt.events.warn_user import warn_user
from shardckpt.native.run_directory import (
    RETENTION,
    RunDirectory,
    StepFolder,
    read_about,
    read_metrics,
    read_run,
    read_step,
)
from shardckpt.plan.retention import Retention, SavedStep, choose_ranking, decode_retention, find_best
from shardckpt.reader import NESTED_STEP
from shardckpt.storage.resolve_url import as_url, kind, not_found_error, open_store, split_step_suffix
from shardckpt.storage.store import Store, SubfolderStore

_NUMBER = "[0-9]{1,18}"
_SUFFIX = re.compile(
    rf"(?P<latest>latest)|best(:(?P<mode>min|max))?(:(?P<metric>.+))?|(?P<first>{_NUMBER})(\.\.(?P<last>{_NUMBER}))?",
    re.DOTALL,
)
_EXPECTED = "@latest, @best, @best:max:NAME, a number such as @1000, or @1000..2000"
_MAX_SHOWN = 12

# Accelerate's folders have a number, such as `checkpoint_3`, and the step is in the folder `NESTED_STEP` inside.
# Accelerate and Lightning put the numbered folders or steps below `checkpoints`.
_NUMBERED = re.compile(rf"(.*?)({_NUMBER})", re.DOTALL)
_CHECKPOINTS = "checkpoints"

# A stream's record, and the module that finds versions: as formats, streams are above this package.
_STREAM, _VERSIONS = "STREAM.json", "shardckpt.stream.versions.version_reader"


@dataclass(frozen=True, slots=True)
class StepRange:
    """A run or a checkpoint, and which of the run's steps are meant."""

    path: str
    first: int | None = None  # None for all steps
    last: int | None = None

    @property
    def is_all(self) -> bool:
        """Whether no step is left out."""
        return self.first is None

    def has_step(self, number: int) -> bool:
        """Return whether a step is meant."""
        return self.first is None or self.last is None or self.first <= number <= self.last


class _Suffix(NamedTuple):
    run: str
    text: str  # text after the `@`
    match: re.Match[str]  # match of `_SUFFIX`

    @property
    def is_range(self) -> bool:
        return self.match["last"] is not None


class _FoundStep(NamedTuple):
    store: Store  # folder that contains the step
    step: StepFolder

    @property
    def path(self) -> str:
        return f"{self.store.url.rstrip('/')}/{self.step.name}"


def find_step(url: str) -> str:
    """Return the path or URL of the step that `RUN@latest` names; any other path as it is."""
    suffix = _find_suffix(url)
    if suffix is None:
        return url
    if suffix.is_range:
        raise UsageError("this takes one step", found=f"@{suffix.text}", expected="@latest, @best or @1000", where=url)
    if _is_stream(suffix.run):
        return _find_version(suffix)
    return _choose_step(suffix, _list_steps(suffix.run)).path


def _is_stream(run: str) -> bool:
    """Return True if a folder is a stream of weights, whose versions are named like steps."""
    return any(entry.name == _STREAM for entry in open_store(run).list())


def _find_version(suffix: _Suffix) -> str:
    if suffix.match["latest"] is None and suffix.match["first"] is None:
        raise UsageError("a stream has no best version", where=suffix.run, expected="@latest, or a number such as @12")
    number = suffix.match["first"]
    found: str = import_module(_VERSIONS).find_version(suffix.run, None if number is None else int(number))
    return found


def resolve_range(path: str | os.PathLike[str]) -> StepRange:
    """Return a checkpoint, or a run and a range of its steps if a caller names several."""
    url = as_url(path)
    suffix = _find_suffix(url)
    return resolve_run(url) if suffix is not None and suffix.is_range else StepRange(find_step(url))


def resolve_run(path: str | os.PathLike[str]) -> StepRange:
    """Return a run, and which of its steps a caller names."""
    url = as_url(path)
    suffix = _find_suffix(url)
    if suffix is None:
        return StepRange(url)
    if _is_stream(suffix.run):
        raise UsageError(
            "this takes a run's steps, and a stream has versions", where=url, fix="See `shardckpt stream --help`."
        )
    found = _list_steps(suffix.run)
    if not suffix.is_range:
        chosen = _choose_step(suffix, found)
        return StepRange(chosen.store.url, chosen.step.number, chosen.step.number)
    first, last = int(suffix.match["first"]), int(suffix.match["last"])
    if first > last:
        raise UsageError(
            "the first step of a range must not be after the last",
            where=url,
            found=f"@{suffix.text}",
            expected=f"@{last}..{first}",
        )
    held = [each for each in found if first <= each.step.number <= last]
    if not held:
        raise _missing_error(f"no step from {first} to {last} is in this run", suffix.run, found)
    return StepRange(held[0].store.url, first, last)


def _find_suffix(url: str) -> _Suffix | None:
    """Return the parts of `RUN@latest`; None if a path exists under that name, or means something else."""
    parts = split_step_suffix(url)
    if parts is None or kind(url) != "missing":
        return None
    run, text = parts
    match = _SUFFIX.fullmatch(text)
    found = kind(run)
    if found != "folder" and match is None:
        return None
    if found == "missing":
        raise not_found_error(run)
    if found == "file":
        raise UsageError("this is a file", where=run, expected="a folder of steps before the @")
    if match is None:
        raise UsageError("this names no step of the run", where=run, found=f"@{text}", expected=_EXPECTED)
    return _Suffix(run, text, match)


def _list_steps(run: str) -> Sequence[_FoundStep]:
    """Return a run's steps in all states, at least one."""
    store = open_store(run)
    found = _list_own(store, read_run(store)) or _list_numbered(store)
    if not found and any(entry.is_folder and entry.name == _CHECKPOINTS for entry in store.list()):
        store = SubfolderStore(store, _CHECKPOINTS)
        found = _list_own(store, read_run(store)) or _list_numbered(store)
    if not found:
        names = sorted(entry.name for entry in store.list())[:_MAX_SHOWN]
        fix = "Name the folder that contains the steps of a run."
        raise SourceNotFoundError("no step of a run is here", where=run, found=", ".join(map(escape, names)), fix=fix)
    return found


def _list_own(store: Store, run: RunDirectory) -> list[_FoundStep]:
    return [_FoundStep(store, step) for step in run.steps if not (step.is_base or step.is_double)]


def _list_numbered(store: Store) -> list[_FoundStep]:
    """Return the steps in Accelerate's folders, if all folders have one name before their number."""
    names = [entry.name for entry in store.list() if entry.is_folder]
    numbered = [(match[1], int(match[2]), name) for name in names if (match := _NUMBERED.fullmatch(name))]
    found = [
        (prefix, _FoundStep(inside, step))
        for prefix, number, name in numbered
        if (step := read_step(inside := SubfolderStore(store, name), number, NESTED_STEP)).held
    ]
    prefixes = sorted({prefix for prefix, _ in found})
    if len(prefixes) > 1:
        raise AmbiguousError(
            "the folders here have different names before their numbers, so that none is the newest",
            where=store.url,
            found=", ".join(f"{prefix}N" for prefix in prefixes[:_MAX_SHOWN]),
            fix=f"Name one of them, and {NESTED_STEP} in it.",
        )
    return [each for _, each in found]


def _choose_step(suffix: _Suffix, steps: Sequence[_FoundStep]) -> _FoundStep:
    if suffix.match["first"] is not None:
        return _find_number(int(suffix.match["first"]), suffix.run, steps)
    complete = sorted((each for each in steps if each.step.is_complete), key=lambda each: each.step.order)
    if suffix.match["latest"] is not None:
        _require_readable(suffix.run, steps, complete[-1].step.number if complete else -1)
    if not complete:
        raise NoCompleteCheckpoint(
            "no step in this run is complete",
            where=suffix.run,
            found=_show_numbers(steps),
            fix=f"`shardckpt ls {suffix.run}` shows the reasons.",
        )
    if suffix.match["latest"] is None:
        return _find_best(suffix, complete)
    newest = complete[-1].step
    damaged = [each for each in steps if each.step.is_committed and not each.step.is_complete]
    newer = [each.step for each in damaged if each.step.number > newest.number and not each.step.is_foreign]
    if newer:  # as `restore` warns, but for a step that is being saved
        faults = " ".join(f"Newer step {step.number} is not used: {step.fault.rstrip('.')}." for step in newer[::-1])
        warn_user(f"{suffix.run}@latest is step {newest.number}. {faults}")
    return complete[-1]


def _require_readable(run: str, steps: Sequence[_FoundStep], newest: int) -> None:
    """Raise UnsupportedError if this version cannot read a step after the newest complete one, as `restore` does."""
    newer = [each.step for each in steps if each.step.is_newer and each.step.number > newest]
    if newer:
        raise UnsupportedError(
            "the newest step was written by a version of shardckpt that this one cannot read",
            where=run,
            found=newer[-1].fault,
            fix="Update shardckpt, or name a step by its number.",
        )


def _find_number(number: int, run: str, steps: Sequence[_FoundStep]) -> _FoundStep:
    """Return a step by its number; it need not be complete, since the caller reports faults."""
    found = sorted((each for each in steps if each.step.number == number), key=lambda each: each.step.is_complete)
    if not found:
        raise _missing_error(f"step {number} is not in this run", run, steps)
    return found[-1]


def _find_best(suffix: _Suffix, complete: Sequence[_FoundStep]) -> _FoundStep:
    """Return the complete step with the best metric."""
    saved = [SavedStep(at, metrics=read_metrics(each.store, each.step)) for at, each in enumerate(complete)]
    mode: Literal["min", "max"] | None = None if suffix.match["mode"] is None else _MODES[suffix.match["mode"]]
    metric = suffix.match["metric"]
    rules = read_retention(complete[-1].store, complete[-1].step)
    if rules is not None and rules.has_ranking and metric in (None, rules.metric):
        metric, mode = rules.metric, mode or rules.mode
    metric, mode = choose_ranking(saved, metric, mode, suffix.run)
    best = find_best(saved, metric, mode)
    assert best is not None, "there are complete steps"
    return complete[best]


def read_retention(store: Store, step: StepFolder) -> Retention | None:
    """Return the rules of the run that saved a complete step; None if it stored none."""
    try:
        return decode_retention(read_about(store, step).get(RETENTION, ""))
    except (CheckpointError, MissingFileError):
        return None


_MODES: dict[str, Literal["min", "max"]] = {"min": "min", "max": "max"}


def _missing_error(what: str, run: str, steps: Sequence[_FoundStep]) -> SourceNotFoundError:
    return SourceNotFoundError(what, where=run, found=_show_numbers(steps), fix="Name one of these steps.")


def _show_numbers(steps: Sequence[_FoundStep]) -> str:
    """Return the numbers of steps; if there are many, the last ones."""
    numbers = sorted(each.step.number for each in steps)
    more = f"{len(numbers) - _MAX_SHOWN} before " if len(numbers) > _MAX_SHOWN else ""
    word = "step" if len(numbers) == 1 else "steps"
    return f"{word} {more}{', '.join(map(str, numbers[-_MAX_SHOWN:]))}"
