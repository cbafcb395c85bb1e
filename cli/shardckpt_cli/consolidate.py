"""`shardckpt consolidate` and `shardckpt convert`, which share a function, and the ranks that run a command."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ParamSpec

import typer

from shardckpt_cli import options, output, plans

if TYPE_CHECKING:
    from shardckpt.results import Report

_Arguments = ParamSpec("_Arguments")

_MAX_FILES = 40  # maximum lines of the report; a universal checkpoint has several files for each parameter


# Variables that torchrun sets for each rank, and that a rank's child processes inherit.
_OF_A_RANK = ("TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

CONVERT_HELP = "Convert to another format; tensors stay split as they are."


def consolidate(
    context: typer.Context,
    src: options.Src,
    dst: options.Dst,
    to: options.To = "",
    tp: options.Tp = 0,
    part: options.Part = None,
    weights: options.Weights = "live",
    model_key: options.ModelKey = "",
    optim_key: options.OptimKey = "",
    optim_keys: options.OptimKeys = "names",
    param_names: options.ParamNames = "",
    shapes_from: options.ShapesFrom = "",
    base: options.Base = None,
    dtype: options.Dtype = "",
    keep_fp32: options.KeepFp32 = None,
    dequantize: options.Dequantize = False,
    quantize: options.Quantize = "",
    quantize_include: options.QuantizeInclude = None,
    quantize_exclude: options.QuantizeExclude = None,
    allow_overflow: options.AllowOverflow = False,
    allow_loss: options.AllowLoss = False,
    max_shard_size: options.MaxShardSize = "5GB",
    max_memory: options.MaxMemory = "256MiB",
    include: options.Include = None,
    exclude: options.Exclude = None,
    rename: options.Rename = None,
    rules: options.Rules = "",
    config_from: options.ConfigFrom = "",
    dry_run: options.DryRun = False,
    overwrite: options.Overwrite = False,
    jobs: options.Jobs = None,
    parallel: options.Parallel = None,
    plan: options.PlanFile = "",
    tasks: options.TaskCount = 0,
    quiet: options.Quiet = False,
    as_json: options.AsJson = False,
) -> None:
    """Merge shards into full tensors that transformers can load."""
    given = locals()
    run(str(given.pop("context").command.name), given)


def run(verb: str, given: dict[str, Any]) -> None:
    """Call a function that writes a checkpoint, and print its report."""
    import shardckpt

    quiet, as_json = given.pop("quiet"), given.pop("as_json")
    plan, tasks = given.pop("plan", ""), given.pop("tasks", 0)
    if plans.has_planned(verb, [], given, plan, tasks, quiet=quiet, as_json=as_json):
        return
    if "parallel" in given and _choose_parallel(given["parallel"], quiet=quiet):
        given["parallel"] = True
        quiet = quiet or not is_first_rank()
        as_json = as_json and is_first_rank()
    chosen = {key: value for key, value in given.items() if value is not None}
    with output.show_progress(quiet=quiet or as_json) as on_progress:
        report: Report = getattr(shardckpt, verb)(on_progress=on_progress, **chosen)
    show_report(report, quiet=quiet, as_json=as_json)


def show_report(report: Report, *, quiet: bool = False, as_json: bool) -> None:
    """Print what was written."""
    if as_json:
        output.print_json(report)
        return
    if not quiet:
        output.warn(report.warnings)
        print(_words(report), flush=True)
        output.left_out(report.left_out)


def _choose_parallel(given: bool | None, *, quiet: bool) -> bool:
    """Return whether to share the work with the other ranks; print a note if several ranks may do the same work."""
    world = _count_ranks()
    if given is not None or world < 2:
        return bool(given)
    if is_started_by_torchrun():
        return True
    if not quiet:
        print(
            f"note: WORLD_SIZE is {world}, but torchrun did not start this command itself, so it does all the work:"
            " --parallel shares it with the other ranks, --no-parallel leaves out this line",
            file=sys.stderr,
        )
    return False


def is_first_rank() -> bool:
    """Return True unless the environment has another rank than 0."""
    return os.environ.get("RANK", "0") == "0"


def is_started_by_torchrun() -> bool:
    """Return True if torchrun itself started this process; False if a rank did, or if that cannot be known."""
    # torchrun starts each rank as a session leader. A process that a rank starts usually is not one; if it is, its
    # parent's environment has the same rank. Only Linux shows a parent's environment.
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return False
    try:
        with open(f"/proc/{os.getppid()}/environ", "rb") as file:
            of_parent = set(file.read().split(b"\0"))
    except OSError:
        return False
    own = {os.fsencode(f"{name}={os.environ.get(name, '')}") for name in _OF_A_RANK}
    return os.getsid(0) == os.getpid() and not own <= of_parent


def run_on_first_rank(command: Callable[_Arguments, None]) -> Callable[_Arguments, None]:
    """Run a command on rank 0 only if torchrun starts it on all: they would write the same result to the same place."""

    @functools.wraps(command)
    def run(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> None:
        if is_first_rank() or not is_started_by_torchrun():
            command(*args, **kwargs)
        elif not kwargs.get("quiet"):
            print(f"note: rank 0 does all the work; rank {os.environ['RANK']} has nothing to do", file=sys.stderr)

    return run


def _count_ranks() -> int:
    setting = os.environ.get("WORLD_SIZE", "")
    return int(setting) if setting.isdecimal() else 1


def _words(report: Report) -> str:
    """Return the report in a few lines."""
    from shardckpt.errors import escape

    did = "would write" if report.dry_run else "wrote"
    files = len(report.files)
    lines = [
        f"{report.source}: {report.format}",
        f"{did} {output.count(report.tensor_count, 'tensor')}, {output.size(report.nbytes)},"
        f" in {output.count(files, 'file')} to {report.target}",
    ]
    for file in report.files[:_MAX_FILES]:
        lines.append(f"  {file.name}  {output.count(file.tensor_count, 'tensor')}  {output.size(file.nbytes)}")
    if files > _MAX_FILES:
        lines.append(f"  and {output.count(files - _MAX_FILES, 'more file')}: --json lists all")
    if report.carried:
        lines.append(f"  and {', '.join(report.carried)}")
    lines += [f"tied: {name} is {kept}" for name, kept in report.ties.items()]
    lines += [f"cast: {output.count(number, 'tensor')} {kinds}" for kinds, number in report.cast.items()]
    if not report.dry_run:
        lines.append("  ".join(f"{phase} {seconds:.2f} s" for phase, seconds in report.seconds.items()))
    return "\n".join(map(escape, lines))
