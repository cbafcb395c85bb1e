"""A resume with a fault is found at its first or second step, and the fault is named; one without is never reported."""

from __future__ import annotations

import fnmatch
import multiprocessing
import random
from pathlib import Path

import pytest

import shardckpt
from tests.kit.ranks.harness import run
from tests.kit.ranks.stepping import whole_dtensors
from tests.kit.runs.faults import FAULTS, SAVED_AT, STEPS, STYLES, WORLDS, Fault, Job

Verdict = tuple[str, str, tuple[int, ...], int]


def list_faults(style: str) -> list[str]:
    return [name for name, fault in FAULTS.items() if style not in fault.holes]


def resume_with(fault: Fault, style: str, rank: int, world: int, root: Path) -> Verdict:
    job = Job(style, rank, world, 2, root, fault.resumed_net or fault.net)
    fault.resume(job)
    try:
        job.train()
    except shardckpt.errors.ResumeDivergence as error:
        return error.divergence.cause, error.divergence.name, error.divergence.ranks, error.divergence.step
    return "none", "", (), 0


def resume_cleanly(rank: int, world: int, style: str, root: Path, resumes: int) -> list[str]:
    """Train, save and resume with settings and models by chance; return what was reported."""
    reported = []
    with whole_dtensors():
        for number in range(resumes):
            dice = random.Random(number)
            options = {"steps": dice.randint(1, 4), "deep": dice.randint(0, 2)}
            saved_at, folder = dice.randint(1, 4), root / str(number)
            net = dice.choice(["plain", "tied", "buffers", "masters"])
            job = Job(style, rank, world, number, folder, net, **options)
            job.train(saved_at + 5, saved_at, in_background=dice.random() < 0.5)
            again = Job(style, rank, world, number + 1000, folder, net, **options)
            again.restore()
            again.rebuild_buffers()
            try:
                again.train(saved_at + 5, saved_at + dice.randint(1, 4))
            except shardckpt.errors.ResumeDivergence as error:
                reported.append(str(error))
    return reported


def train_and_resume(rank: int, world: int, style: str, root: Path) -> dict[str, Verdict]:
    faults = {name: FAULTS[name] for name in list_faults(style)}
    multiprocessing.current_process().daemon = False  # a daemon may not start the worker of a loader
    with whole_dtensors():
        for net in {fault.net: None for fault in faults.values()}:
            Job(style, rank, world, 1, root / net, net).train(saved_at=SAVED_AT)
            clean = Job(style, rank, world, 2, root / net, net)
            clean.restore()
            clean.rebuild_buffers()
            if net != "loader":  # its fault is in the save
                clean.train()
        return {name: resume_with(fault, style, rank, world, root / fault.net) for name, fault in faults.items()}


@pytest.mark.shown_by("[plain]", "ddp")
@pytest.mark.shown_by(
    "[fully_shard]",
    "originals",
    "torch fsdp2",
    "wrapper",
)
@pytest.mark.parametrize("style", STYLES)
def test_each_fault_is_named_on_every_rank_and_a_clean_resume_is_not(style: str, tmp_path: Path) -> None:
    world = WORLDS.get(style, 2)
    found = run(world, train_and_resume, style, tmp_path)
    assert all(each == found[0] for each in found), "one verdict for all ranks"
    for name in list_faults(style):
        fault, (cause, what, ranks, step) = FAULTS[name], found[0][name]
        assert cause == fault.cause, name
        assert fnmatch.fnmatchcase(what, fault.name), name
        assert SAVED_AT < step <= min(SAVED_AT + 2, STEPS), name
        if fault.ranks is not None and world > 1:
            assert ranks == fault.ranks, name


@pytest.mark.slow
@pytest.mark.parametrize("style", STYLES)
def test_of_two_hundred_clean_resumes_none_is_reported(style: str, tmp_path: Path) -> None:
    assert run(WORLDS.get(style, 2), resume_cleanly, style, tmp_path, 34) == [[]] * WORLDS.get(style, 2)


def resume_wrapped(rank: int, world: int, style: str, root: Path) -> str:
    with pytest.raises(shardckpt.ShardckptError) as caught:
        Job(style, rank, world, 1, root, "wrapped").train(saved_at=SAVED_AT)
        Job(style, rank, world, 2, root, "wrapped").restore()
    return str(caught.value)


def test_every_fault_occurs_in_every_style_or_has_a_reason_why_not() -> None:
    holes = {(name, style): reason for name, fault in FAULTS.items() for style, reason in fault.holes.items()}
    assert all(style in STYLES and reason for (_, style), reason in holes.items())
    assert len(holes) == 7, "each is a reason that somebody has looked at"


@pytest.mark.parametrize("style", FAULTS["cached state dict"].holes)
def test_a_state_that_a_fault_needs_is_refused_where_it_has_a_hole(style: str, tmp_path: Path) -> None:
    assert all("optim" in message for message in run(2, resume_wrapped, style, tmp_path))
