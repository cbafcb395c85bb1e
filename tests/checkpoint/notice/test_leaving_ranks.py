"""Ranks with a notice that are killed at each moment after the plan: those that stay commit the step without them."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import shardckpt
from shardckpt import Checkpointer, PerRank, RNGState
from shardckpt.checkpoint.planning import leaving_ranks
from shardckpt.checkpoint.save.planner import SavePlanner
from shardckpt.checkpoint.save.session import SaveSession
from shardckpt.errors import RankError
from shardckpt.events import PreemptionEvent, SaveEvent
from tests.kit.ranks import harness
from tests.kit.ranks.harness import Outcome, outcomes, run
from tests.kit.runs.tier_runs import enter, is_alive, wait_for
from tests.kit.runs.tier_runs import sharded_state as shard_over_all

Build = Callable[[int, int], dict[str, Any]]

PHASES: dict[str, tuple[type, str]] = {
    "planning": (SavePlanner, "_decide"),  # rank 0 of the save has all messages, and has answered none
    "staging": (SaveSession, "stage"),
    "writing": (SaveSession, "write"),
    "committing": (SaveSession, "commit"),
}


@pytest.fixture(autouse=True)
def enough_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ranks that stay continue for long after others are killed: on a busy machine, a save takes seconds."""
    monkeypatch.setattr(harness, "GRACE", harness.TIMEOUT)


def build_hsdp(rank: int, world: int) -> dict[str, Any]:
    """Return two replicas of a sharded model after a step, and what each rank has alone."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    mesh = init_device_mesh(
        "cpu", (2, world // 2) if world % 2 == 0 else (1, world), mesh_dim_names=("copies", "shard")
    )
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    return train(model, rank)


def build_ddp(rank: int, world: int) -> dict[str, Any]:
    """Return a replicated model after a step, and what each rank has alone."""
    torch.manual_seed(0)
    return train(DistributedDataParallel(nn.Linear(6, 3)), rank)


def train(model: nn.Module, rank: int) -> dict[str, Any]:
    optim = torch.optim.AdamW(model.parameters())
    model(torch.full((2, 6), float(rank))).sum().backward()
    optim.step()
    torch.manual_seed(rank)
    loader = PerRank({"at": rank * 10, "buffer": torch.arange(5.0) * rank, "empty": torch.empty(0, 2)})
    return {"model": model, "optim": optim, "rng": RNGState(), "loader": loader, "step": 2}


def read_parameters(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return full parameters. Collective."""
    model = state["model"]
    named = (model.module if isinstance(model, DistributedDataParallel) else model).named_parameters()
    return {name: each.full_tensor() if hasattr(each, "full_tensor") else each.detach() for name, each in named}


@contextmanager
def killing(phase: str, pids: Collection[int]) -> Iterator[None]:
    """Kill processes as this rank enters a phase."""
    owner, name = PHASES[phase]
    original = getattr(owner, name)

    def kill(*args: object, **options: object) -> object:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        wait_for(lambda: not any(map(is_alive, pids)))
        return original(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, kill)
        yield


def lose(
    rank: int, world: int, root: Path, build: Build, leaving: Collection[int], phase: str, is_async: bool
) -> tuple[Any, ...]:
    """Save a step with a notice on some ranks, which the first rank that stays kills; return what is reported."""
    enter("abcd"[rank])
    state, seen = build(rank, world), []
    if rank == min({*range(world)} - {*leaving}):
        torch.save(read_parameters(state), root.parent / "expected")
    else:
        read_parameters(state)
    pids: list[int] = [0] * world
    dist.all_gather_object(pids, os.getpid())
    ck = Checkpointer(root, on_event=seen.append, deadline=60)
    ck.save(1, state)
    seen.clear()
    is_killer = rank == min({*range(world)} - {*leaving})
    with ck.save_on_signal():
        if rank in leaving:
            os.kill(os.getpid(), signal.SIGTERM)
        assert ck.should_save(2)
        with killing(phase, [pids[each] for each in leaving] if is_killer else []):
            if is_async:
                ck.async_save(2, state).result()
            else:
                ck.save(2, state)
        assert ck.stop_requested
        if rank in leaving:
            time.sleep(60)
        ck.wait()
    saved = [event.warnings for event in seen if isinstance(event, SaveEvent)]
    reported = [(event.step, event.committed) for event in seen if isinstance(event, PreemptionEvent)]
    return saved, reported, ck.steps()


def require_step(root: Path, build: Build, world: int, other_world: int) -> None:
    """Require that the step is complete: its bytes, what each rank has alone, and a load on another number of ranks."""
    path = root / "step-00000002"
    assert shardckpt.verify(path).ok
    expected = torch.load(root.parent / "expected")
    saved = shardckpt.load(path)
    for name, value in expected.items():
        assert torch.equal(saved["model"][name], value), name
    assert [each["at"] for each in saved["loader"]] == [rank * 10 for rank in range(world)]
    for rank in range(world):
        assert torch.equal(saved["loader"][rank]["buffer"], torch.arange(5.0) * rank)
        torch.manual_seed(rank)
        assert torch.equal(saved["rng"][rank]["torch"], torch.get_rng_state())

    def resume(rank: int, world: int) -> None:
        state = build(rank, world)
        del state["loader"]
        for parameter in state["model"].parameters():
            nn.init.zeros_(parameter)
        assert Checkpointer(root).restore(state, strict=False) == 2
        for name, value in read_parameters(state).items():
            assert torch.equal(value, expected[name]), name

    run(other_world, resume)


def require_only_stay(found: list[Outcome], leaving: Collection[int]) -> list[Any]:
    assert all(found[rank].value is None for rank in leaving)
    stay = [each for each in found if each.rank not in leaving]
    assert not any(each.raised or each.waits for each in stay), stay
    return [each.value for each in stay]


@pytest.mark.parametrize("is_async", [False, True], ids=["save", "async_save"])
@pytest.mark.parametrize("leaving", [(2, 3), (0, 1)], ids=str)
@pytest.mark.parametrize("phase", PHASES)
def test_a_replica_of_hsdp_commits_without_the_one_that_is_killed(phase, leaving, is_async, tmp_path):
    root = tmp_path / "run"
    found = require_only_stay(outcomes(4, lose, root, build_hsdp, leaving, phase, is_async), leaving)
    (first, *_), reports, steps = zip(*found, strict=True)
    assert reports == ([(2, ("root",))], []), "the first rank that stays reports"
    assert steps == ((1, 2),) * 2
    gone, here = ("rank 2, rank 3", "rank 0, rank 1")[:: -1 if 0 in leaving else 1]
    assert first == [(f"{gone} may leave before the commit, which needs only {here}",)]
    require_step(root, build_hsdp, 4, 3)


@pytest.mark.parametrize(("world", "leaving"), [(2, (0,)), (2, (1,)), (3, (0, 2))], ids=str)
@pytest.mark.parametrize("phase", ["planning", "writing"])
def test_one_rank_of_ddp_commits_alone(phase, world, leaving, tmp_path):
    root = tmp_path / "run"
    found = require_only_stay(outcomes(world, lose, root, build_ddp, leaving, phase, False), leaving)
    assert [each[1:] for each in found] == [([(2, ("root",))], (1, 2))]
    require_step(root, build_ddp, world, 2)


def stay_alive(
    rank: int, world: int, root: Path, leaving: Collection[int], build: Build, deadline: float | None
) -> tuple[Any, ...]:
    """Save a step with a notice on some ranks, which nobody kills."""
    enter("abcd"[rank])
    seen: list[Any] = []
    ck = Checkpointer(root, on_event=seen.append, deadline=deadline, keep_last=1)
    state = build(rank, world)
    ck.save(1, state)
    seen.clear()
    with ck.save_on_signal():
        if rank in leaving:
            os.kill(os.getpid(), signal.SIGTERM)
        assert ck.should_save(2)
        ck.save(2, state, metrics={"loss": 0.5}, custom_metadata={"note": "kept"})
    ck.wait()
    dist.barrier()
    (event,) = (each for each in seen if isinstance(each, SaveEvent))
    reported = [(each.step, each.committed) for each in seen if isinstance(each, PreemptionEvent)]
    ck.save(3, state)
    dist.barrier()  # rank 0 removes old steps after the commit
    return event.has_left, event.warnings, event.nbytes > 0, reported, ck.steps()


def test_a_rank_that_leaves_writes_nothing_and_its_event_says_so(tmp_path):
    first, second = run(2, stay_alive, tmp_path / "run", (0,), build_ddp, 60)
    text = "this rank leaves before the commit, which needs only rank 1"
    assert first == (True, (text,), False, [], (3,))
    text = "rank 0 may leave before the commit, which needs only rank 1"
    assert second == (False, (text,), True, [(2, ("root",))], (3,))


def build_stages(rank: int, world: int) -> dict[str, Any]:
    """Return one of two pipeline stages, of which each second rank has a replica."""
    torch.manual_seed(0)
    model = nn.ModuleDict({str(rank % 2): nn.Linear(6, 6)})
    optim = torch.optim.AdamW(model.parameters())
    model[str(rank % 2)](torch.ones(2, 6)).sum().backward()
    optim.step()
    return {"model": model, "optim": optim}


def save_stages(rank: int, world: int, root: Path) -> None:
    enter("abcd"[rank])
    ck, state = Checkpointer(root, deadline=60), build_stages(rank, world)
    ck.save(1, state)
    with ck.save_on_signal():
        if rank in (0, 3):
            os.kill(os.getpid(), signal.SIGTERM)
        ck.save(2, state)
    ck.wait()


def test_stages_keep_their_order_if_the_first_rank_leaves(tmp_path):
    run(4, save_stages, tmp_path)
    first, second = (shardckpt.load(tmp_path / f"step-0000000{step}") for step in (1, 2))
    assert [*second["model"]] == [*first["model"]]
    groups = second["optim"]["param_groups"]
    assert groups == first["optim"]["param_groups"] and groups[0]["params"][0] == "0.weight"


def read_notes(step: Path) -> dict[str, str]:
    (manifest,) = step.glob("*.manifest.json")
    about: dict[str, str] = json.loads(manifest.read_text())["about"]
    return about


def test_the_rank_that_commits_for_rank_0_stores_notes_and_removes_old_steps(tmp_path):
    root = tmp_path / "run"
    run(2, save_for_rank_0, root)
    (step,) = shardckpt.ls(root).complete
    assert step.number == 2
    about = read_notes(root / "step-00000002")
    assert about["note"] == "kept" and about["metric.loss"] == "1.5"


def save_for_rank_0(rank: int, world: int, root: Path) -> None:
    enter("ab"[rank])
    ck, state = Checkpointer(root, deadline=60, keep_last=1), build_ddp(rank, world)
    ck.save(1, state)
    with ck.save_on_signal():
        if rank == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        ck.save(2, state, metrics={"loss": rank + 0.5}, custom_metadata={"note": "kept"})
    ck.wait()


@pytest.mark.parametrize("leaving", [(1,), (0,)], ids=str)
def test_a_box_that_only_a_leaving_rank_has_needs_all_ranks(leaving, tmp_path):
    def build(rank: int, world: int) -> dict[str, Any]:
        return shard_over_all(world, 2)

    found = run(2, stay_alive, tmp_path / "run", leaving, build, 60)
    for has_left, (warning,), has_bytes, _, _ in found:
        assert not has_left and has_bytes
        assert warning.startswith("the save needs all ranks until its commit, also those that leave: w")
        assert "no rank holds these elements" in warning
    assert [each[3] for each in found] == ([[], [(2, ("root",))]] if 0 in leaving else [[(2, ("root",))], []])


def test_large_values_of_a_leaving_rank_alone_need_it(monkeypatch, tmp_path):
    monkeypatch.setattr(leaving_ranks, "MAX_SENT_BYTES", 100)
    found = run(2, stay_alive, tmp_path / "run", (1,), build_ddp, 60)
    assert not any(each[0] for each in found)
    assert "loader.1.buffer" in found[0][1][0] or "rng.1" in found[0][1][0]


@pytest.mark.parametrize(("leaving", "deadline"), [((0, 1), 60), ((1,), None)], ids=["all leave", "no deadline"])
def test_all_ranks_commit_as_ever(leaving, deadline, tmp_path):
    found = run(2, stay_alive, tmp_path / "run", leaving, build_ddp, deadline)
    assert [each[:3] for each in found] == [(False, (), True)] * 2


def test_notes_that_only_a_leaving_rank_0_gives_need_it(tmp_path):
    def body(rank: int, world: int) -> list[bool]:
        enter("ab"[rank])
        seen: list[Any] = []
        ck = Checkpointer(tmp_path / "run", deadline=60, on_event=seen.append)
        with ck.save_on_signal():
            if rank == 0:
                os.kill(os.getpid(), signal.SIGTERM)
            ck.save(2, build_ddp(rank, world), metrics={"loss": 0.5} if rank == 0 else None)
        return [each.has_left for each in seen if isinstance(each, SaveEvent)]

    assert run(2, body) == [[False], [False]]
    assert read_notes(tmp_path / "run" / "step-00000002")["metric.loss"] == "0.5"


@pytest.mark.parametrize(("victim", "phase"), [(1, "plan"), (0, "write")], ids=["leaves too early", "stays"])
def test_a_needed_rank_that_is_killed_leaves_the_step_before(victim, phase, tmp_path):
    def body(rank: int, world: int) -> tuple[int, ...]:
        enter("abc"[rank])
        ck, state = Checkpointer(tmp_path / "run", deadline=60), build_ddp(rank, world)
        ck.save(1, state)
        with ck.save_on_signal():
            if rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            assert ck.should_save(2)
            if rank == victim:
                setattr(SaveSession, phase, lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
            if rank == 1 != victim:  # it has left by then
                ck.save(2, state)
            else:
                with pytest.raises(RankError, match=f"rank {victim} of 3"):
                    ck.save(2, state)
        return ck.steps()

    assert outcomes(3, body, group_timeout=5.0)[2].value == (1,)
    assert not (tmp_path / "run" / "step-00000002" / "COMMIT").exists()
