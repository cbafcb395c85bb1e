"""A save that is refused or fails, in whatever phase, changes nothing that a later save does."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import shardckpt
from shardckpt.checkpoint.save import planner, session
from shardckpt.checkpoint.save.save import saver_for
from shardckpt.offline.verify import verify
from shardckpt.ranks.linked_group import LinkedGroup
from shardckpt.ranks.process_group import get_ranks
from shardckpt.storage.local_publication import LocalPublication
from tests.kit.ranks.harness import run

State = dict[str, Any]


def numbers(count: int, version: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.arange(count) + version).to(dtype)


# States that share paths and differ in everything that a plan depends on: dtype, shape, placement, order, ties.
KINDS: dict[str, Callable[[int], State]] = {
    "full": lambda v: {"model": {"w": numbers(64, v), "b": numbers(32, v)}, "moments": numbers(64, v)},
    "subset": lambda v: {"model": {"w": numbers(64, v)}},
    "superset": lambda v: {**KINDS["full"](v), "ema": numbers(64, v)},
    "shorter": lambda v: {"model": {"w": numbers(32, v), "b": numbers(32, v)}, "moments": numbers(64, v)},
    "half": lambda v: {
        "model": {"w": numbers(64, v, torch.float16), "b": numbers(32, v)},
        "moments": numbers(64, v),
    },
    "brain": lambda v: {
        "model": {"w": numbers(64, v, torch.bfloat16), "b": numbers(32, v)},
        "moments": numbers(64, v),
    },
    "reordered": lambda v: {"moments": numbers(64, v), "model": {"b": numbers(32, v), "w": numbers(64, v)}},
    "values": lambda v: {"model": {"w": numbers(64, v), "b": numbers(32, v)}, "step": v, "moments": numbers(64, v)},
}


def placed(state: State, mesh: Any, *, is_sharded: bool) -> State:
    """Return a state with its tensors as DTensors, or every other one a plain replica."""
    placement = Shard(0) if is_sharded else Replicate()
    return {
        name: placed(value, mesh, is_sharded=is_sharded)
        if isinstance(value, dict)
        else distribute_tensor(value, mesh, [placement])
        if torch.is_tensor(value) and name != "b"
        else value
        for name, value in state.items()
    }


class RefusedError(Exception):
    """What the test makes a phase raise."""


def broken(*_args: object, **_options: object) -> Any:
    raise RefusedError


@contextlib.contextmanager
def refused(phase: str, is_failing: bool) -> Iterator[None]:
    """Make a phase of a save fail, on the ranks that are to fail."""
    name = {
        "capture": "flatten_state",
        "plan": "create_global_plan",
        "transfer": "write_payloads",
        "commit": "encode_commit",
    }.get(phase)
    if not is_failing or phase in ("", "target", "values", "replicas"):
        yield
    elif name is not None:
        with patch.object(planner if phase in ("capture", "plan") else session, name, broken):
            yield
    else:
        with patch.object(LocalPublication, {"begin": "__init__", "publish": "commit"}[phase], broken):
            yield


PHASES = ("capture", "plan", "target", "begin", "values", "replicas", "transfer", "commit", "publish")


def changed(state: State, phase: str, rank: int) -> State:
    """Return the state as the phase is to refuse it."""
    if phase == "values":
        return {**state, "own": rank}
    return {**state, "own": torch.full((5,), float(rank))} if phase == "replicas" else state


def many_saves(rank: int, world: int, seed: int, folder: Path) -> tuple[list[tuple[int, str]], list[str]]:
    """Save one state after the other; half of the saves are refused. Return what was saved, and who refused."""
    rng = random.Random(seed)
    mesh = init_device_mesh("cpu", (world,))
    saved, refusals, last = [], [], ("full", True)
    for version in range(40):
        kind, is_sharded = chosen = rng.choice([last, (rng.choice(list(KINDS)), rng.random() < 0.7)])
        verb = rng.choice(["save", "save", "async_save", "Checkpointer"])
        phase, failing = rng.choice([*PHASES, *[""] * len(PHASES)]), rng.randrange(world)
        if phase in ("plan", "begin", "commit", "publish"):
            failing = 0  # the first rank alone does this
        options = rng.choice([{}, {"store_digests": True}, {"base": folder / "base", "store_digests": True}])
        state = changed(placed(KINDS[kind](version), mesh, is_sharded=is_sharded), phase, rank)
        path = folder / ("base" if phase == "target" else f"step-{version:08d}")
        try:
            with refused(phase, rank == failing):
                if verb == "Checkpointer" and phase != "target":
                    shardckpt.Checkpointer(folder).save(version, state, **options)
                elif verb == "async_save":
                    shardckpt.async_save(state, path, **options).result()
                else:
                    shardckpt.save(state, path, **options)
            saved.append((version, kind))
            last = chosen
        except (RefusedError, shardckpt.ShardckptError) as error:
            refusals.append(f"{phase}: {type(error).__name__}")
    return saved, refusals


def flat(state: State, prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in state.items():
        found.update(flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value})
    return found


def differs(path: Path, expected: State) -> list[str]:
    """Return the names of what lies there and is not what was saved."""
    found, wanted = flat(shardckpt.load(path)), flat(expected)
    if list(found) != list(wanted):
        return [*found]
    return [name for name, value in wanted.items() if repr(found[name]) != repr(value)]


@pytest.mark.parametrize(("world", "seed"), [(2, 0), (3, 2)])
def test_every_save_between_refused_ones_holds_its_own_values(tmp_path: Path, world: int, seed: int) -> None:
    run(world, lambda rank, world: shardckpt.save(KINDS["full"](0), tmp_path / "base", store_digests=True))
    told = run(world, many_saves, seed, tmp_path, timeout=60.0)
    saved, refusals = told[0]
    assert all(each[0] == saved and len(each[1]) == len(refusals) for each in told), "ranks agree on what was saved"
    assert len(saved) > 10 and len(refusals) > 8
    assert {text.partition(":")[0] for text in refusals} <= set(PHASES), "nothing is refused that was not made to"
    wrong = {version: differs(tmp_path / f"step-{version:08d}", KINDS[kind](version)) for version, kind in saved}
    assert {version: names for version, names in wrong.items() if names} == {}
    assert [version for version, _ in saved if not verify(str(tmp_path / f"step-{version:08d}")).ok] == []


def test_a_plan_outlives_a_save_of_another_state_that_was_refused(tmp_path: Path) -> None:
    def body(rank: int, world: int) -> int:
        with patch.object(planner, "create_global_plan", wraps=planner.create_global_plan) as planned:
            for version in range(4):
                shardckpt.save(KINDS["full"](version), tmp_path / f"{version}")
                with pytest.raises(shardckpt.errors.TargetExistsError):
                    shardckpt.save(KINDS["half"](version), tmp_path / f"{version}")
            return planned.call_count

    assert run(2, body) == [1 + 4, 0], "one for what was saved, one for each that was refused"
    assert [differs(tmp_path / f"{version}", KINDS["full"](version)) for version in range(4)] == [[]] * 4


def test_nothing_is_kept_of_a_save_before_all_ranks_have_committed_it(tmp_path: Path) -> None:
    def body(rank: int, world: int) -> list[str]:
        shardckpt.save(KINDS["full"](1), tmp_path / "base")
        saver = saver_for(None)
        kept = (saver.cached_saves, saver.frozen_params)
        changes = []
        for number, phase in enumerate(PHASES):
            path = tmp_path / ("base" if phase == "target" else f"{number}")
            failing = 1 if phase in ("capture", "transfer") else 0
            with pytest.raises((RefusedError, shardckpt.ShardckptError)), refused(phase, rank == failing):
                shardckpt.save(changed(KINDS["half"](2), phase, rank), path)
            now = (saver.cached_saves, saver.frozen_params)
            changes += [phase for before, after in zip(kept, now, strict=True) if before is not after]
        shardckpt.save(KINDS["half"](3), tmp_path / "last")
        assert saver.cached_saves is not kept[0]
        return changes

    assert run(2, body) == [[], []]


@pytest.mark.parametrize("missing", [0, 1])
def test_a_rank_that_missed_the_end_of_a_save_does_not_spoil_the_next(tmp_path: Path, missing: int) -> None:
    def body(rank: int, world: int) -> None:
        shardckpt.save(KINDS["full"](1), tmp_path / "1")
        with patch.object(session.Saver, "remember") if rank == missing else contextlib.nullcontext():
            shardckpt.save(KINDS["half"](2), tmp_path / "2")
        for version in (3, 4):
            shardckpt.save(KINDS["full"](version), tmp_path / f"{version}")

    run(2, body)
    assert [differs(tmp_path / f"{version}", KINDS["full"](version)) for version in (1, 3, 4)] == [[]] * 3


def test_a_rank_that_cannot_reach_the_folder_is_named_and_the_next_save_works(tmp_path: Path) -> None:
    def body(rank: int, world: int) -> str:
        with (
            pytest.raises((shardckpt.errors.RankError, RefusedError)) as caught,
            patch.object(session, "JoinedPublication", broken),
        ):
            shardckpt.save(KINDS["full"](1), tmp_path / "1")
        shardckpt.save(KINDS["full"](2), tmp_path / "2")
        return str(caught.value)

    assert "failed on rank 1: RefusedError" in run(2, body)[0]
    assert differs(tmp_path / "2", KINDS["full"](2)) == []


@pytest.mark.parametrize(
    ("module", "phase", "interrupted"), [(planner, "trace_state", 1), (session, "write_payloads", 0)]
)
def test_a_rank_that_was_interrupted_in_a_save_does_not_answer_for_the_next(
    tmp_path: Path, module: ModuleType, phase: str, interrupted: int
) -> None:
    def ctrl_c(*_args: object, **_options: object) -> None:
        raise KeyboardInterrupt

    def body(rank: int, world: int) -> None:
        shardckpt.save(KINDS["full"](1), tmp_path / "1")
        with (
            pytest.raises(KeyboardInterrupt if rank == interrupted else shardckpt.errors.RankError),
            patch.object(module, phase, ctrl_c) if rank == interrupted else contextlib.nullcontext(),
        ):
            shardckpt.save(KINDS["full"](2), tmp_path / "2")
        if rank == interrupted:
            time.sleep(2.5)  # until the others have waited in vain
        shardckpt.save(KINDS["half"](3), tmp_path / "3")

    run(2, body, group_timeout=1.5)
    assert differs(tmp_path / "3", KINDS["half"](3)) == []
    assert not (tmp_path / "2").exists()


def test_a_rank_of_which_a_round_was_interrupted_counts_as_lost(tmp_path: Path) -> None:
    def body(rank: int, world: int) -> tuple[bool, bool]:
        coordinator: LinkedGroup = get_ranks(None)
        before = coordinator.has_lost_rank
        with pytest.raises(KeyboardInterrupt), coordinator.in_step():
            raise KeyboardInterrupt
        return before, coordinator.has_lost_rank

    assert run(2, body) == [(False, True)] * 2
