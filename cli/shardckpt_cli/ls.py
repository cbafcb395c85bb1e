"""`shardckpt ls`, `prove` and `tiers`."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from shardckpt_cli import options, output

if TYPE_CHECKING:
    from shardckpt.results import Proof, Resume, StepCopy, StepInfo, StepList, StepProof


def ls(
    root: options.Steps,
    long: Annotated[
        bool, typer.Option("--long", "-l", help="Show sizes, times, metrics and the best step in a table.")
    ] = False,
    metric: Annotated[
        str,
        typer.Option(
            "--metric",
            help="Metric for the best step; implies -l. Default: loss, or the first whose name ends with loss.",
        ),
    ] = "",
    mode: Annotated[
        str,
        options.choose("--mode", "With -l: which metric is the best, min (the default) or max.", "min", "max"),
    ] = "",
    proof: Annotated[
        bool,
        typer.Option("--proof", help="Show if a resume was proven, and for how many recorded training steps."),
    ] = False,
    durability: Annotated[
        bool,
        typer.Option(
            "--durability",
            help="Show each step's copies that this machine sees, and what they survive.",
        ),
    ] = False,
    as_json: options.AllAsJson = False,
) -> None:
    """List a run's complete steps, one number per line.

    Others are reported on stderr.
    """
    import shardckpt
    from shardckpt.errors import escape

    long = long or bool(metric)
    options.refuse_idle(as_json, "with --json", {"--metric": metric, "--mode": mode})
    options.refuse_idle(not long, "without -l or --metric", {"--mode": mode})
    if not as_json:
        options.refuse_idle(durability, "with --durability", {"--metric": metric, "-l": long, "--proof": proof})
    found = shardckpt.ls(root, metrics=long or as_json, proof=proof or as_json, durability=durability)
    if as_json:
        output.print_json(found)
        return
    if found.durability is not None:
        copies = [_copy_row(step.step, copy) for step in found.durability for copy in step.copies]
        output.show_table(copies, header=("step", "tier", "survives", "verified", "path"), right=frozenset({0}))
    elif long or proof:
        best = _find_best(found, metric, mode or "min") if long else {}
        rows = [_row(step, best.get(at, ""), is_long=long) for at, step in enumerate(found.complete)]
        rows += [
            {"step": _step_text(step), "proof": _verdict_text(step.verdict, step.equal_steps)}
            for step in found.captures or ()
        ]
        shown = [name for name in _COLUMNS if any(name in row for row in rows)] or ["step"]
        table = [[row.get(name, "") for name in shown] for row in rows]
        output.show_table(table, header=shown, right=frozenset(i for i, name in enumerate(shown) if name in _NUMBERS))
    else:
        for step in found.complete:
            print(step.number)
    output.show_incomplete(found.incomplete)
    if not (found.complete or found.incomplete or found.durability or found.captures):
        print(f"{escape(found.root)}: no step is here; the folder is empty", file=sys.stderr)


_COLUMNS = ("step", "size", "saved", "metrics", "best", "statistics", "proof")
_NUMBERS = frozenset({"step", "size"})  # columns with numbers


# Name endings of metrics that say how long an evaluation took; `--json` has them.
_TIMINGS = ("runtime", "_per_second", "_time")


def _find_best(found: StepList, metric: str, mode: str) -> dict[int, str]:
    """Return the best step's position and the metric; nothing if no step has the metric."""
    names = sorted({name for step in found.complete for name in step.metrics or ()})
    of_loss = [name for name in names if name.endswith("loss")]
    chosen = metric or ("loss" if "loss" in names else "".join(of_loss[:1]))
    best = found.find_best(chosen, mode) if chosen else None  # type: ignore[arg-type]  # the mode is checked there
    word = "lowest" if mode == "min" else "highest"
    return {} if best is None else {found.complete.index(best): f"{word} {chosen}"}


def _row(step: StepInfo, best: str, *, is_long: bool) -> dict[str, str]:
    """Return a step's text by column; a column that no step has is not shown."""
    from shardckpt.errors import escape

    row = {"step": f"{step.number}"}
    if is_long:
        shown = {name: value for name, value in (step.metrics or {}).items() if not name.endswith(_TIMINGS)}
        metrics = " ".join(f"{escape(name)}={value:.6g}" for name, value in shown.items())
        row |= {"size": output.size(step.nbytes), "saved": output.show_time(step.saved_at), "metrics": metrics}
        row |= {"best": escape(best)} if best else {}
        row |= {"statistics": "stored"} if step.has_stats else {}
    return row if step.proof is None else {**row, "proof": _verdict_text(step.proof, step.equal_steps)}


def _verdict_text(verdict: str, equal_steps: tuple[int, int] | None) -> str:
    """Return a verdict with the number of steps: `proven, 2 of 2 steps`."""
    equal, recorded = equal_steps or (0, 0)
    return f"{verdict}, {equal} of {output.count(recorded, 'step')}" if recorded else verdict


def prove(root: options.Steps, html: options.Html = "", as_json: options.AllAsJson = False) -> None:
    """Show which resumes repeated the recorded steps.

    Exits with 1 if a step diverged, and shows what differed.
    A step is proven if its last compared resume repeated all recorded training steps, and diverged if one was
    different. It is unproven if it was never resumed, or no resume got as far as the last recorded step. It has no
    record if the run ended there, or had no witness (Checkpointer(witness=shardckpt.Witness())).
    """
    import shardckpt
    from shardckpt.errors import escape

    found = shardckpt.prove(root, html=html)
    if as_json:
        output.print_json(found)
        raise typer.Exit(0 if found.ok else 1)
    output.warn(found.warnings)
    if html:
        print(f"wrote {escape(html)}")
    else:
        steps = (*found.removed, *found.steps, *found.captures)
        rows = [row for step in steps for row in _proof_rows(step)]
        output.show_table(rows, header=("step", "verdict", "resumed", "ranks", "equal steps"), right=_PROOF_NUMBERS)
        for name, resume in [(_step_text(step), resume) for step in steps for resume in step.resumes]:
            if resume.divergence is not None:
                print(f"step {name}, resumed {_resume_time(resume)}: {escape(resume.divergence)}")
    print(_proof_summary(found))
    if (
        found.steps
        and {step.verdict for step in found.steps} == {"no record"}
        and not (found.captures or found.removed)
    ):
        print(_NO_RECORD, file=sys.stderr)
    raise typer.Exit(0 if found.ok else 1)


_NO_RECORD = (
    "no resume can be proven: pass witness=shardckpt.Witness() to Checkpointer, and call ck.witness(step, loss=loss)"
    " after each training step; Trainer and Lightning take drill=True instead"
)
_PROOF_NUMBERS = frozenset({0})  # columns with numbers


def _proof_rows(step: StepProof) -> list[tuple[str, ...]]:
    """Return a row for each resume from a step, the newest first; one row without resumes."""
    if not step.resumes:
        steps = f"0 of {len(step.recorded)}" if step.recorded else ""
        resumed = "never" if step.recorded else ""
        return [(_step_text(step), step.verdict, resumed, f"{step.rank_count or ''}", steps)]
    number, newest_first = _step_text(step), reversed(step.resumes)
    return [(number, resume.verdict, _resume_time(resume), *_topology(resume)) for resume in newest_first]


def _step_text(step: StepProof) -> str:
    """Return a step's number, and a capture's tier or that the step was removed."""
    note = "removed" if step.is_removed else step.tier
    return f"{step.number} ({note})" if note else f"{step.number}"


def _topology(resume: Resume) -> tuple[str, str]:
    """Return the rank counts, and how many steps were equal."""
    before, after = resume.rank_count_before, resume.rank_count
    changed = f"{before} to {after}" if before != after else f"{after}"
    return changed, f"{resume.compared} of {len(resume.steps)}"


def _resume_time(resume: Resume) -> str:
    return output.show_time(resume.began_at)


def _proof_summary(found: Proof) -> str:
    from shardckpt.errors import escape

    verdicts = [step.verdict for step in (*found.removed, *found.steps, *found.captures)]
    shown = ", ".join(f"{verdicts.count(verdict)} {verdict}" for verdict in _VERDICTS if verdict in verdicts)
    removed = f", {output.count(len(found.removed), 'removed step')}" if found.removed else ""
    captures = f" and {output.count(len(found.captures), 'capture')}" if found.captures else ""
    counts = f"{output.count(len(found.steps), 'step')}{removed}{captures}"
    return f"{escape(found.root)}: {counts}{': ' if shown else ''}{shown}"


_VERDICTS = ("diverged", "proven", "unproven", "no record")


def _copy_row(number: int, copy: StepCopy) -> tuple[str, ...]:
    from shardckpt.errors import escape

    survives = "unknown (part)" if copy.is_part else ", ".join(copy.survives) or "nothing"
    return f"{number}", copy.tier, survives, output.show_time(copy.verified_at), escape(copy.path)


_Action = Annotated[str, typer.Argument(metavar="[stop]", help="`stop` removes captures.")]
_Run = Annotated[str, typer.Argument(metavar="[RUN]", help="Run whose captures to remove; without it, all.")]


def tiers(action: _Action = "", run: _Run = "", as_json: options.AllAsJson = False) -> None:
    """List or remove the captures in memory.

    Only this user's captures on this machine.
    """
    import shardckpt

    if action not in {"", "stop"}:
        raise shardckpt.errors.UsageError("`tiers` has one action", found=action, expected="stop")
    stopped = shardckpt.stop_tiers(run or None) if action == "stop" else ()
    if as_json:
        output.print_json(replace(shardckpt.list_tiers(), stopped=stopped))
        return
    if action == "stop":
        print("".join(f"stopped {each}\n" for each in stopped), end="")
        return
    found = shardckpt.list_tiers()
    rows = [
        (
            each.run,
            " ".join([*map(str, each.steps), *(f"{number} (part)" for number in each.parts)]),
            output.size(each.nbytes),
            output.size(each.max_bytes),
            "now" if each.is_used else f"{each.unused_s:.0f} s ago",
            shardckpt.errors.escape(each.path),
        )
        for each in found.runs
    ]
    if rows:
        output.show_table(rows, header=("run", "steps", "size", "limit", "used", "folder"), right=_TIER_NUMBERS)
    else:
        print("this user has no captures in memory", file=sys.stderr)


_TIER_NUMBERS = frozenset({2, 3, 4})  # columns with numbers
