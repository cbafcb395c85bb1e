"""A resume from any tier is compared with a record, which is beside each copy of its step."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

import shardckpt
from shardckpt import Checkpointer, Local, PeerMemory, Witness
from shardckpt.events import ResumeEvent
from shardckpt.native.commit import find_save
from shardckpt.native.run_directory import step_name
from shardckpt.tiers.captures import choose_record_keepers
from shardckpt.tiers.memory.lease import LEASE
from shardckpt.witness.witness_session import read_record
from tests.kit.ranks.forks import is_killed
from tests.kit.ranks.harness import outcomes, run
from tests.kit.runs.faults import SAVED_AT, STEPS, Job
from tests.kit.runs.tier_runs import empty_memory, forget_process

NAME = step_name(SAVED_AT)


def tiers(folder: Path, kinds: str) -> list[PeerMemory | Local]:
    built = {
        "m": PeerMemory(max_bytes="1GB"),
        "c": PeerMemory(max_bytes="1GB", copies=1),
        "l": Local(folder / "local", every=1),
    }
    return [built[kind] for kind in kinds]


def job(folder: Path, kinds: str, seed: int = 1, *, save_every: int = 100, rank: int = 0, world: int = 1) -> Job:
    """Return a job whose steps are captured in tiers; `save_every` is that of the root."""
    forget_process()
    made = Job("ddp" if world > 1 else "plain", rank, world, seed, folder / "run")
    made.events = []
    made.checkpointer = Checkpointer(
        folder / "run",
        save_every=save_every,
        tiers=tiers(folder, kinds),
        witness=Witness(steps=2),
        on_event=lambda event: made.events.append(event) if isinstance(event, ResumeEvent) else None,
    )
    return made


def train_and_die(folder: Path, kinds: str, **options: int) -> None:
    made = job(folder, kinds, **options)
    made.train(SAVED_AT, SAVED_AT)
    made.checkpointer.wait()
    made.train(STEPS)
    os.kill(os.getpid(), signal.SIGKILL)


def verdicts(made: Job) -> list[tuple[str, int]]:
    return [(event.verdict, event.compared) for event in made.events]


@pytest.mark.parametrize("kinds", ["m", "l", "ml"])
def test_a_resume_from_a_tier_of_a_killed_job_is_proven(kinds: str, tmp_path: Path) -> None:
    assert is_killed(lambda: train_and_die(tmp_path, kinds))
    assert not (tmp_path / "run" / NAME).exists(), "the root has no copy"
    other = job(tmp_path, kinds, 2)
    other.restore()
    other.train()
    assert verdicts(other) == [("proven", 2)]
    (capture,) = shardckpt.prove(tmp_path / "run").captures
    assert (capture.number, capture.tier, capture.verdict) == (
        SAVED_AT,
        {"m": "memory", "l": "local"}[kinds[0]],
        "proven",
    )
    assert [(each.verdict, each.compared) for each in capture.resumes] == [("proven", 2)]
    assert other.events[0].path.startswith({"m": "shardckpt-memory", "l": str(tmp_path / "local")}[kinds[0]][:4])


@pytest.mark.parametrize("kinds", ["m", "l"])
def test_a_fault_of_a_resume_from_a_tier_is_named_with_the_copy(kinds: str, tmp_path: Path) -> None:
    assert is_killed(lambda: train_and_die(tmp_path, kinds))
    other = job(tmp_path, kinds, 2)
    other.restore()
    other.change(lambda shard: shard.tensor.mul_(0.5), "model", "head.weight")
    with pytest.raises(shardckpt.errors.ResumeDivergence, match=r"model\.head\.weight") as caught:
        other.train()
    assert NAME in str(caught.value)
    assert verdicts(other) == [("diverged", 0)]
    assert [each.verdict for each in shardckpt.prove(tmp_path / "run").captures] == ["diverged"]


def test_a_step_in_all_places_has_its_record_by_each_copy_under_the_id_of_its_save(tmp_path: Path) -> None:
    made = job(tmp_path, "ml", save_every=SAVED_AT)
    made.train(STEPS, SAVED_AT, in_background=True)
    made.checkpointer.wait()
    finder = made.checkpointer._finder
    places = [*(place.finder for place in finder._places), finder]
    records = [read_record(place.open_store(), NAME) for place in places]
    assert [len(record.steps) for record in records] == [2, 2, 2]
    assert [record.save for record in records] == [find_save(place.open_store(), NAME) for place in places]
    assert records[0].save == records[1].save != records[2].save, "a copied capture keeps its id"


def test_the_record_goes_with_its_capture(tmp_path: Path) -> None:
    made = job(tmp_path, "m")
    for step in (1, 2, 3, 4):
        made.train(step, step)
        made.checkpointer.wait()
    made.train(STEPS)
    (place,) = made.checkpointer._finder._places
    names = [entry.name for entry in place.finder.open_store().list() if entry.name != LEASE]
    assert sorted({name.partition(".")[0] for name in names}) == [step_name(number) for number in steps_in(names)]


def steps_in(names: Sequence[str]) -> list[int]:
    return sorted(int(name.partition("-")[2]) for name in names if "." not in name)


def train_on_nodes(rank: int, world: int, folder: Path) -> list[str]:
    os.environ["SHARDCKPT_NODE"] = "ab"[rank]
    made = job(folder, "m", rank=rank, world=world)
    for step in (1, 2, 3, 4):
        made.train(step, step)
        made.checkpointer.wait()
    made.train(STEPS + 1)
    (place,) = made.checkpointer._finder._places
    return [entry.name for entry in place.finder.open_store().list()]


def resume_on_nodes(rank: int, world: int, folder: Path) -> tuple[int, list[tuple[str, int]]]:
    os.environ["SHARDCKPT_NODE"] = "ab"[rank]
    other = job(folder, "m", 2, rank=rank, world=world)
    other.restore()
    start = other.step
    other.train(STEPS + 1)
    return start, verdicts(other)


def test_on_several_nodes_each_has_the_record_and_drops_it_with_its_capture(tmp_path: Path) -> None:
    first, second = run(2, train_on_nodes, tmp_path)
    kept = steps_in(first)
    assert [name for name in first if "." in name and name != LEASE] == [
        f"{step_name(number)}.witness.json" for number in kept
    ]
    assert sorted(second) == sorted(first)
    (start, found), _ = run(2, resume_on_nodes, tmp_path)
    assert (start, found) == (4, [("proven", 2)])


def train_with_copies(rank: int, world: int, folder: Path, nodes: str) -> None:
    os.environ["SHARDCKPT_NODE"] = nodes[rank]
    made = job(folder, "c", rank=rank, world=world)
    made.train(SAVED_AT, SAVED_AT)
    made.checkpointer.wait()
    made.train(STEPS)
    os.kill(os.getpid(), signal.SIGKILL)


def resume_with_copies(
    rank: int, world: int, folder: Path, nodes: str, fault: str = ""
) -> tuple[int, list[tuple[str, int]]]:
    os.environ["SHARDCKPT_NODE"] = nodes[rank]
    other = job(folder, "c", 2, rank=rank, world=world)
    other.restore()
    start = other.step
    if fault:
        other.change(lambda shard: shard.tensor.mul_(0.5), "model", "head.weight")
        with pytest.raises(shardckpt.errors.ResumeDivergence, match=r"model\.head\.weight"):
            other.train(STEPS)
    else:
        other.train(STEPS)
    return start, verdicts(other)


@pytest.mark.parametrize("nodes", ["bc", "cb"])
def test_a_resume_without_rank_0s_node_is_compared_with_the_record_of_another_node(nodes: str, tmp_path: Path) -> None:
    assert all("died" in (each.waits or "") for each in outcomes(2, train_with_copies, tmp_path, "ab"))
    empty_memory("a")
    (start, found), (other_start, none) = run(2, resume_with_copies, tmp_path, nodes, "fault")
    assert (start, other_start, found, none) == (SAVED_AT, SAVED_AT, [("diverged", 0)], [])
    (start, found), _ = run(2, resume_with_copies, tmp_path, nodes)
    assert (start, found) == (SAVED_AT, [("proven", 2)])
    (capture,) = shardckpt.prove(tmp_path / "run").captures
    assert [each.verdict for each in capture.resumes] == ["diverged", "proven"]


def test_copies_of_a_record_are_on_few_nodes_that_are_far_apart() -> None:
    assert choose_record_keepers([0]) == set()
    assert choose_record_keepers([0, 8]) == {8}
    assert choose_record_keepers(range(0, 8000, 8)) == {2000, 4000, 6000}
    assert all(len(choose_record_keepers(range(count))) == min(count, 4) - 1 for count in range(1, 70))
