"""A resume with a fault is found at its first or second step, and the fault is named; one without is never reported."""

from __future__ import annotations

from pathlib import Path

import pytest
from faults import FAULTS, SAVED_AT, STEPS, STYLES, WORLDS, Job
from harness import run
from stepping import whole_dtensors

import shardckpt


def resume_with(fault: str, style: str, rank: int, world: int, root: Path) -> tuple[str, str, tuple[int, ...], int]:
    job = Job(style, rank, world, 2, root)
    FAULTS[fault].resume(job)
    try:
        job.train()
    except shardckpt.ResumeDivergence as error:
        return error.divergence.cause, error.divergence.name, error.divergence.ranks, error.divergence.step
    return "none", "", (), 0


def train_and_resume(rank: int, world: int, style: str, root: Path) -> dict[str, tuple[str, str, tuple[int, ...], int]]:
    with whole_dtensors():
        Job(style, rank, world, 1, root).train(saved_at=SAVED_AT)
        clean = Job(style, rank, world, 2, root)
        clean.restore()
        clean.train()
        return {fault: resume_with(fault, style, rank, world, root) for fault in FAULTS}


@pytest.mark.parametrize("style", STYLES)
def test_each_fault_is_named_on_every_rank_and_a_clean_resume_is_not(style: str, tmp_path: Path) -> None:
    world = WORLDS.get(style, 2)
    found = run(world, train_and_resume, style, tmp_path)
    assert all(each == found[0] for each in found), "one verdict for all ranks"
    for name, fault in FAULTS.items():
        cause, what, ranks, step = found[0][name]
        assert (cause, what) == (fault.cause, fault.name), name
        assert SAVED_AT < step <= min(SAVED_AT + 2, STEPS), name
        if fault.ranks is not None and world > 1:
            assert ranks == fault.ranks, name
