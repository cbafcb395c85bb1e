"""The drill inside a training framework: prove a resume before the first step, then continue as without it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from shardckpt.checkpoint.coordinator import get_channels
from shardckpt.checkpoint.load.load import load
from shardckpt.checkpoint.save.save import save
from shardckpt.errors import ResumeDivergence
from shardckpt.events.warn_user import warn_user
from shardckpt.storage.resolve_url import open_store, split
from shardckpt.witness.prove_resume import ResumeReport, prove_resume, require_train_step


def run_drill(train_step: Callable[[], Any], state: Any, path: str, *, steps: int = 2) -> ResumeReport:
    """Save a state, train, restore, train again and compare, as `prove_resume`; then restore the state. Collective."""
    # A drill that fails leaves its checkpoints, which the next one replaces. One step is trained before: DDP orders its
    # buckets after its first backward pass, and libraries choose their kernels.
    require_train_step(train_step, steps)
    start = f"{path}/start"
    save(state, start, overwrite=True)
    train_step()
    load(state, start)
    report = prove_resume(train_step, state, f"{path}/resume", steps=steps, overwrite=True)
    load(state, start)
    _remove(path)
    return report


def drill_folder(run: str) -> str:
    """Return the folder for a run's drills; it is hidden, so that a run with nothing else in it counts as new."""
    return f"{run}/.drill"


def require_proven(report: ResumeReport) -> None:
    """Raise a drill's divergence; warn if the state lacks values, though no result depends on them."""
    missing = ", ".join(report.missing)
    if report.divergence is not None:
        found = report.divergence
        sentence = f"{found.sentence}; not restored: {missing}" if missing else found.sentence
        raise ResumeDivergence(replace(found, sentence=sentence), report.path)
    if missing and get_channels(None).main.rank == 0:
        warn_user(f"training changes values that a resume does not restore: {missing}")


def _remove(path: str) -> None:
    """Remove the drill's checkpoints, once all ranks have read them. Collective."""
    folder, name = split(path)

    def decide(messages: list[bytes]) -> list[bytes]:
        open_store(folder).delete_folder(name)
        return messages

    get_channels(None).main.coordinate(f"removing {path}", b"", decide)
