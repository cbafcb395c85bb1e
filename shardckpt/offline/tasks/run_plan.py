"""Make a plan, and run its tasks anywhere."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shardckpt.errors import FormatError, TargetExistsError, UsageError
from shardckpt.events.progress import OnProgress
from shardckpt.native.run_directory import read_run
from shardckpt.notebook import Result
from shardckpt.offline.tasks.part_results import PartResults, find_missing_tasks, format_numbers
from shardckpt.offline.tasks.task_plan import TaskPlan, encode_arguments, list_paths, parse_share, read_plan
from shardckpt.offline.tasks.verbs import find_work
from shardckpt.offline.tasks.work import Work
from shardckpt.readers.step_paths import resolve_range
from shardckpt.storage.resolve_url import as_url, kind, open_place, open_store, split, split_step_suffix

__all__ = ["PathText", "PlanStatus", "open_plan", "plan_tasks", "read_plan_status", "run_task"]

PathText = str | os.PathLike[str]
_STEPS = ("src", "a", "b", "base", "adapter")  # arguments that may name a step such as `RUN@latest`
_RUNS = {"copy": ("src",), "history": ("root",)}  # arguments that may be a run
_NOT_STORED = ("on_progress", "dry_run", "parallel")


@dataclass(frozen=True, slots=True, repr=False)
class PlanStatus(Result):
    """A plan, and how far its tasks are.

    Attributes:
        verb: The function whose work is shared.
        folder: Path or URL of the folder with the tasks' results, which the commit removes.
        task_count: Number of tasks.
        missing: Numbers of the tasks that have not ended.
        nbytes: Bytes to write, or to read if the verb only reads.
        done_bytes: Bytes of the parts that are done.
        done: Names of the parts that this call of `run_task` did.
        skipped: Names of the parts of its tasks that had been done before.
    """

    verb: str
    folder: str
    task_count: int
    missing: tuple[int, ...]
    nbytes: int
    done_bytes: int
    done: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()

    @property
    def missing_ranges(self) -> str:
        """The numbers in `missing` as text, as SLURM takes them: `3,7-9`."""
        return format_numbers(self.missing)


def plan_tasks(
    plan: PathText, verb: str, /, *sources: PathText | Sequence[PathText], tasks: int = 0, **arguments: Any
) -> PlanStatus:
    """Plan the work of a verb as tasks that share only the storage, and write the plan as JSON.

    Only headers are read. The plan holds no code, and no tensor data.

    Args:
        plan: Path or URL of the file to write.
        verb: Name of a function: `consolidate`, `convert`, `reshard`, `rekey`, `merge_adapter`; `copy`, `verify`,
            `stats`, `diff`, `history`.
        sources: Positional arguments of the function, such as its source and target.
        tasks: Maximum number of tasks; 0 for one per part, such as an output file.
        arguments: Keyword arguments of the function.

    Returns:
        Status of the new plan.

    Raises:
        UsageError: The function would refuse the call.
        TargetExistsError: The file of the plan exists.
        CheckpointError: As the function raises it.
        StorageError: Reading the source or writing the plan failed.

    Examples:
        >>> shardckpt.plan_tasks("plan.json", "consolidate", "run/step-100", "model")  # doctest: +SKIP
    """
    if type(tasks) is not int or tasks < 0:
        raise UsageError("`tasks` must be a number of tasks", found=repr(tasks), expected="0 or more")
    work = find_work(verb)
    url = as_url(plan)
    if kind(url) != "missing":
        raise TargetExistsError("the file of the plan exists", where=url, fix="Choose another name, or remove it.")
    given = encode_arguments(work.bind(sources, _require_plannable(arguments)))
    for name in _STEPS:
        if name in given:
            given[name] = _resolve(given[name])
    for name in _RUNS.get(verb, ()):
        if name in given:
            given[name] = _fix_steps(given[name])
    new = TaskPlan(secrets.token_hex(4), verb, given, "", "", "", "", "", ())
    parent, name = split(url)
    made, inputs = work.plan(new, tasks, url)
    with open_place(parent).create(name) as writer:
        writer.write(made.encode())
    PartResults(made).start(inputs)
    return _describe(made, ())


def _require_plannable(arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    for name in _NOT_STORED:
        if arguments.get(name):
            raise UsageError(f"a plan and `{name}` exclude each other", fix=f"Leave out `{name}`.")
    return {name: value for name, value in arguments.items() if name not in _NOT_STORED}


def _resolve(value: Any) -> Any:
    """Return the path of a step in place of `RUN@latest`, which may be another step when a task starts."""
    if isinstance(value, list):
        return [_resolve(each) for each in value]
    if not isinstance(value, str) or not value:
        return value
    chosen = resolve_range(value)
    return chosen.path if chosen.is_all else value


def _fix_steps(root: str) -> str:
    """Return a run's path with the range of its steps: a running training adds others."""
    if split_step_suffix(root) is not None or kind(root) != "folder":
        return root
    numbers = [step.number for step in read_run(open_store(root)).steps if step.is_committed]
    return f"{root}@{min(numbers)}..{max(numbers)}" if numbers else root


def run_task(
    plan: PathText, number: int | None = None, *, share: str = "", on_progress: OnProgress | None = None
) -> PlanStatus:
    """Run one task of a plan, or a share of its tasks, and store what it did.

    Tasks may run in any order, at the same time, several times, and on any machines that see the storage. What has
    been done is skipped, so a second run is the resume. Needs no torch.

    Args:
        plan: Path or URL of the plan.
        number: Number of a task, from 0; None with `share`.
        share: `K/N`: the K-th of N shares, from 1: each N-th task.
        on_progress: As for the planned function.

    Returns:
        Status of the plan, with the names of the parts that were done.

    Raises:
        UsageError: The number or the share is not in the plan, or the source has changed since.
        FormatError: The plan is damaged.
        StorageError: The storage failed, or the plan was committed.
    """
    if (number is None) == (not share):
        raise UsageError("a task is chosen by its number or by a share", found="both" if share else "none")
    stored, work, results = open_plan(plan)
    numbers = parse_share(share, len(stored.tasks)) if number is None else [number]
    parts = [part for each in numbers for part in stored.get_task(each)]
    with results.explain_end():
        skipped = {part.name for part in results.choose_done(parts) if work.is_done(stored, part, results.read(part))}
        rest = [part for part in parts if part.name not in skipped]
        if rest:
            work.run(stored, rest, on_progress)
    status = _describe(stored, [part.name for part in results.list_done()])
    return replace(status, done=tuple(part.name for part in rest), skipped=tuple(skipped))


def open_plan(plan: PathText, *, to_end: bool = False) -> tuple[TaskPlan, Work, PartResults]:
    """Return a plan, how its work is done, and what its tasks have done; the plan may have ended if you end it."""
    stored = read_plan(plan)
    work, results = _find_work(stored, as_url(plan)), PartResults(stored, as_url(plan))
    if not to_end:
        results.require_started()
    return stored, work, results


def _find_work(stored: TaskPlan, url: str) -> Work:
    """Return how a stored plan's work is done. Raises UsageError, or FormatError for a call nobody can plan."""
    work = find_work(stored.verb)
    names = {*work.bind((), stored.arguments)}.intersection(_NOT_STORED)
    if names:
        raise FormatError("a plan has an argument that no plan stores", where=url, found=", ".join(sorted(names)))
    list_paths(stored.arguments)
    return work


def read_plan_status(plan: PathText) -> PlanStatus:
    """Return how far the tasks of a plan are, from its storage alone.

    Args:
        plan: Path or URL of the plan.

    Returns:
        Status with the numbers of tasks that have not ended.

    Raises:
        FormatError: The plan is damaged.
        StorageError: The storage failed, or the plan was committed.
    """
    stored, _, results = open_plan(plan)
    return _describe(stored, [part.name for part in results.list_done()])


def _describe(plan: TaskPlan, done: Sequence[str]) -> PlanStatus:
    parts = plan.parts
    return PlanStatus(
        plan.verb,
        plan.folder,
        len(plan.tasks),
        tuple(find_missing_tasks(plan, {*done})),
        plan.nbytes,
        sum(parts[name] for name in done),
    )
