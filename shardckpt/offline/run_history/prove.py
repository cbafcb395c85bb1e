"""Implement `prove`: which of a run's resumes were compared with its records, and what differed."""

from __future__ import annotations

import os
from typing import Any

from shardckpt.errors import escape
from shardckpt.native.run_directory import StepFolder, step_number
from shardckpt.notebook import draw_in_notebooks
from shardckpt.offline.prune import describe_captures, describe_steps, open_run
from shardckpt.offline.report_html import render_page, require_report_target, write_page
from shardckpt.readers.step_paths import resolve_run
from shardckpt.storage.resolve_url import as_url
from shardckpt.storage.store import Store
from shardckpt.storage.thread_pool import ThreadPool
from shardckpt.witness.files.step_witness import (
    StepWitness,
    read_capture_witnesses,
    read_removed_witnesses,
    read_step_witness,
)
from shardckpt.witness.records.resumes import Proof, Resume, StepProof

_AT_ONCE = 8


def prove(root: str | os.PathLike[str], *, html: str | os.PathLike[str] = "") -> Proof:
    """Show which steps have a record, which resumes were compared with it, and what differed first.

    Nothing is trained: resumed runs wrote the verdicts (`Checkpointer(witness=...)`).

    Args:
        root: Path or URL of the run's folder; `RUN@1000..2000` takes some of its steps.
        html: Path or URL for one page with the steps on a line, and their resumes.

    Returns:
        The complete steps with their resumes, and the removed steps and captures that the run was resumed from.
        Unreadable records and verdicts are warnings.

    Raises:
        UsageError: The folder does not exist or has no steps; `html` names another file than an earlier report.
        StorageError: Reading failed.

    Examples:
        >>> [step.verdict for step in shardckpt.prove("runs/a").steps]  # doctest: +SKIP
    """
    chosen, html = resolve_run(root), as_url(html)
    root = chosen.path
    if html:
        require_report_target(html)
    store, run = open_run(root)
    wanted = [step for step in run.complete if chosen.has_step(step.number)]
    with ThreadPool(_AT_ONCE, thread_name_prefix="shardckpt-prove") as pool:
        steps = tuple(pool.map(lambda step: _read_step(store, step), wanted))
    captures, faults = read_capture_witnesses(store)
    removed = read_removed_witnesses(store, run.complete)
    gone = (_describe_removed(root, name, witness) for name, witness in removed.items())
    found = Proof(
        root,
        steps,
        tuple(each for each in describe_captures(captures) if chosen.has_step(each.number)),
        faults,
        tuple(each for each in gone if chosen.has_step(each.number)),
    )
    if html:
        write_page(_render(found), html)
    return found


def _read_step(store: Store, step: StepFolder) -> StepProof:
    (info,) = describe_steps(store, [step])
    witness = read_step_witness(store, step)
    number, path, record = info.number, info.path, witness.record
    if record is None:
        return StepProof(number, path, witness.verdict, resumes=witness.resumes, faults=witness.faults)
    recorded, environment = tuple(each.step for each in record.steps), record.environment
    return StepProof(
        number,
        path,
        witness.verdict,
        recorded,
        environment.world,
        environment.style,
        witness.resumes,
        witness.faults,
    )


def _describe_removed(root: str, name: str, witness: StepWitness) -> StepProof:
    number, path, resumes, faults = step_number(name), f"{root}/{name}", witness.resumes, witness.faults
    if not resumes:
        return StepProof(number, path, witness.verdict, faults=faults, is_removed=True)
    last = resumes[-1]
    ranks, style = last.rank_count_before, last.style_before
    return StepProof(number, path, witness.verdict, last.steps, ranks, style, resumes, faults, is_removed=True)


def _render(found: Proof) -> str:
    return render_page(escape(found.root), describe_proof(found))


draw_in_notebooks(Proof, _render)


def describe_proof(found: Proof) -> dict[str, Any]:
    """Return the data for the page about a run's resumes: JSON values only."""
    return {
        "schema_version": 1,
        "kind": "proof",
        "root": escape(found.root),
        "steps": [_describe_step(step) for step in (*found.removed, *found.steps, *found.captures)],
        "warnings": [*map(escape, found.warnings)],
    }


def _describe_step(step: StepProof) -> dict[str, Any]:
    return {
        "number": step.number,
        "tier": "removed" if step.is_removed else escape(step.tier),
        "verdict": step.verdict,
        "recorded": [*step.recorded],
        "rank_count": step.rank_count,
        "style": escape(step.style),
        "resumes": [*map(_describe_resume, step.resumes)],
    }


def _describe_resume(resume: Resume) -> dict[str, Any]:
    found = resume.divergence
    texts = {
        name: "" if found is None else escape(getattr(found, name)) for name in ("cause", "name", "sentence", "fix")
    }
    return {
        "began_at": resume.began_at,
        "verdict": resume.verdict,
        "steps": len(resume.steps),
        "compared": resume.compared,
        "rank_count_before": resume.rank_count_before,
        "rank_count": resume.rank_count,
        "style_before": escape(resume.style_before),
        "style": escape(resume.style),
        "is_exact": bool(resume.has_equal_layout and resume.is_deterministic),
        **texts,
    }
