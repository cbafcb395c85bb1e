"""Saves before a deadline with real files and ranks: signals at each moment, graces, slow stores, nodes that leave."""

from __future__ import annotations

import math
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import shardckpt
from shardckpt import Checkpointer, Local, PeerMemory
from shardckpt.checkpoint.load import tensor_loader
from shardckpt.checkpoint.notice.place_prediction import LEAVING
from shardckpt.checkpoint.run import step_restore
from shardckpt.checkpoint.run.save_schedule import SaveSchedule
from shardckpt.checkpoint.save.session import SaveSession
from shardckpt.errors import RankError, StorageError
from shardckpt.events import PreemptionEvent
from shardckpt.storage.local import LocalWriter
from shardckpt.tiers.capture_tier import CaptureTier
from shardckpt.tiers.memory.memory_store import MemoryWriter
from shardckpt.tiers.promoter import Promoter
from tests.kit.ranks.harness import outcomes, run
from tests.kit.runs.tier_runs import captures, empty_memory, enter, is_alive, is_step, make_state, wait_for
from tests.kit.runs.tier_runs import restore as restore_tiers
from tests.kit.runs.tier_runs import sharded_state as state

SIGNAL = signal.SIGTERM


def only_preemptions(events: list) -> list[PreemptionEvent]:
    return [event for event in events if isinstance(event, PreemptionEvent)]


def make(root: Path, seen: list | None = None, *, copies: int = 0, every: int = 2, **options) -> Checkpointer:
    tiers = [PeerMemory(every=every, copies=copies)]
    on_event = None if seen is None else seen.append
    return Checkpointer(root, save_every=100, tiers=tiers, on_event=on_event, **{"deadline": 60, **options})


@contextmanager
def slow_disk(seconds: float) -> Iterator[None]:
    """Make each file on a disk, but not in memory, take some time."""
    write = LocalWriter.write

    def write_late(writer: LocalWriter, data: memoryview) -> None:
        if not isinstance(writer, MemoryWriter):
            time.sleep(seconds)
        write(writer, data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalWriter, "write", write_late)
        yield


# ------------------------------------------------------------------------------------------------ one process


@pytest.mark.parametrize("grace", [0.1, 0.4, 1.0, 3.0, 60.0])
def test_a_slow_root_takes_the_step_only_if_the_grace_is_long(grace, tmp_path):
    seen: list = []
    ck = make(tmp_path / "run", seen, deadline=grace)
    with slow_disk(0.1), ck.save_on_signal():
        ck.save(100, make_state(100))
        ck.save(102, make_state(102))
        ck.wait()
        os.kill(os.getpid(), SIGNAL)
        assert ck.should_save(103)
        ck.save(103, make_state(103))
        assert ck.stop_requested
    ck.wait()
    wait_for(lambda: any(event.saves_begun for event in only_preemptions(seen)))
    (event,) = (each for each in only_preemptions(seen) if each.saves_begun)
    fits_root = event.expected_s["root"] <= event.grace_s
    assert event.chosen == ("root" if fits_root else "memory")
    assert (103 in ck.steps()) == fits_root
    if grace == 60.0:  # with a short one a busy machine may be late
        assert event.committed == ("memory", "root")
    assert restore_tiers(make(tmp_path / "run")) == 103


def test_a_root_that_no_save_has_measured_is_tried_too(tmp_path):
    seen: list = []
    ck = make(tmp_path / "run", seen)
    with ck.save_on_signal():
        ck.save(2, make_state(2))
        os.kill(os.getpid(), SIGNAL)
        assert ck.should_save(3)
        ck.save(3, make_state(3))
        ck.wait()
    (event,) = only_preemptions(seen)
    assert (event.chosen, event.committed) == ("memory", ("memory", "root"))
    assert ck.steps() == (3,)


def test_a_save_in_the_root_that_cannot_end_in_time_is_left_for_memory(tmp_path):
    seen: list = []
    ck = make(tmp_path / "run", seen, deadline=20)
    ck.save(100, make_state(100))
    ck.wait()
    go_on, write = threading.Event(), LocalWriter.write

    def write_late(writer: LocalWriter, data: memoryview) -> None:
        if not isinstance(writer, MemoryWriter) and threading.current_thread() is not threading.main_thread():
            go_on.wait(30)
        write(writer, data)

    with pytest.MonkeyPatch.context() as patch, ck.save_on_signal():
        patch.setattr(LocalWriter, "write", write_late)
        ck.save(200, make_state(200))
        past = ck._schedule.notice_saves._past["root"]
        past.append(past[-1]._replace(seconds=100.0))  # the store has become slow
        os.kill(os.getpid(), SIGNAL)
        assert ck.should_save(201)
        ck.save(201, make_state(201))
        wait_for(lambda: only_preemptions(seen))
        assert not (tmp_path / "run" / "step-00000200" / "COMMIT").exists(), "the root still saves"
        go_on.set()
    ck.wait()
    (event,) = only_preemptions(seen)
    assert (event.step, event.chosen, event.committed) == (201, "memory", ("memory",))
    assert ck.steps() == (100, 200)
    assert restore_tiers(make(tmp_path / "run")) == 201


def test_a_folder_of_the_node_is_taken_if_the_root_does_not_fit(tmp_path):
    seen: list = []
    tiers = [PeerMemory(every=2), Local(tmp_path / "nvme", every=4)]
    ck = Checkpointer(tmp_path / "run", save_every=100, tiers=tiers, on_event=seen.append, deadline=30)
    with ck.save_on_signal():
        ck.save(100, make_state(100))
        ck.wait()
        past = ck._schedule.notice_saves._past["root"]
        past.append(past[-1]._replace(seconds=100.0))
        os.kill(os.getpid(), SIGNAL)
        assert ck.should_save(101)
        ck.save(101, make_state(101))
        ck.wait()
    (event,) = only_preemptions(seen)
    assert (event.chosen, event.committed, event.survives) == ("local", ("memory", "local"), ("process",))
    assert [step.number for step in shardckpt.ls(tmp_path / "nvme").complete] == [101]
    empty_memory()
    assert restore_tiers(Checkpointer(tmp_path / "run", save_every=100, tiers=tiers)) == 101


def test_without_tiers_the_root_takes_the_step_even_if_it_should_not_fit(tmp_path):
    seen: list = []
    ck = Checkpointer(tmp_path / "run", on_event=seen.append, deadline=0.001)
    with slow_disk(0.05), ck.save_on_signal():
        ck.save(1, make_state(1))
        os.kill(os.getpid(), SIGNAL)
        assert ck.should_save(2)
        ck.save(2, make_state(2))
    assert ck.steps() == (1, 2)
    wait_for(lambda: any(event.committed or event.saves_begun for event in only_preemptions(seen)))
    event = only_preemptions(seen)[-1]
    assert event.chosen == "root" and event.saves_begun == 1


def test_memory_that_fails_leaves_the_step_to_the_root(tmp_path):
    seen: list = []
    ck = make(tmp_path / "run", seen, deadline=60)

    def refuse(_tier: object) -> None:
        raise StorageError("no memory")

    with pytest.MonkeyPatch.context() as patch, ck.save_on_signal():
        patch.setattr("shardckpt.tiers.memory_tier.MemoryTier.open_node", refuse)
        os.kill(os.getpid(), SIGNAL)
        assert ck.should_save(3)
        with pytest.warns(UserWarning, match="not captured in memory"):
            ck.save(3, make_state(3))
        ck.wait()
    (event,) = only_preemptions(seen)
    assert event.committed == ("root",) and ck.steps() == (3,)


def test_two_notices_are_one_save(tmp_path):
    seen: list = []
    ck = make(tmp_path / "run", seen)
    with ck.save_on_signal(signal.SIGTERM, signal.SIGUSR1):
        for number in (signal.SIGTERM, signal.SIGUSR1):
            os.kill(os.getpid(), number)
        assert ck.should_save(3)
        ck.save(3, make_state(3))
        os.kill(os.getpid(), signal.SIGTERM)
        assert not ck.should_save(5)
        ck.save(4, make_state(4))
        ck.wait()
    (event,) = only_preemptions(seen)
    assert event.step == 3 and event.notices >= 2 and event.saves_begun == 1
    assert ck.steps() == (3,), "the one after it is a capture as any other"


def test_a_second_notice_may_bring_the_deadline_nearer(tmp_path):
    now, seen, answers = time.time(), [], [None]
    ck = make(tmp_path / "run", seen, deadline=lambda: answers[-1])
    with ck.save_on_signal():
        answers += [now + 500, now + 50]
        wait_for(lambda: ck._schedule.has_signal)
        assert ck.should_save(3)
        ck.save(3, make_state(3))
        ck.wait()
    (event,) = only_preemptions(seen)
    assert event.grace_s < 50 and event.notices == 1


@pytest.mark.parametrize(
    ("deadline", "text"),
    [
        (lambda: time.time() - 5, "passed 5 s ago"),
        (lambda: -1.0, "a time that passed"),
        (lambda: math.nan, "found nan"),
        (lambda: 1 / 0, "division by zero"),
    ],
    ids=["past", "negative", "nan", "raises"],
)
def test_a_bad_deadline_is_one_warning_and_the_step_is_saved(deadline, text, tmp_path, recwarn):
    seen: list = []
    answers = [lambda: None]

    def ask() -> float | None:
        return answers[-1]()

    ck = make(tmp_path / "run", seen, deadline=ask)
    with ck.save_on_signal():
        ck.save(2, make_state(2))
        answers.append(deadline)
        os.kill(os.getpid(), SIGNAL)
        assert ck.should_save(3)
        ck.save(3, make_state(3))
    ck.wait()
    wait_for(lambda: only_preemptions(seen))
    messages = [str(each.message) for each in recwarn if "`deadline`" in str(each.message)]
    assert len(messages) == 1 and text in messages[0]
    assert "memory" in only_preemptions(seen)[0].committed
    assert restore_tiers(make(tmp_path / "run")) == 3


def test_a_failed_save_is_due_again_and_reported_again(tmp_path):
    seen: list = []
    ck = Checkpointer(tmp_path / "run", on_event=seen.append, deadline=60)

    def full(*_: object) -> None:
        raise StorageError("full")

    with ck.save_on_signal():
        os.kill(os.getpid(), SIGNAL)
        assert ck.should_save(3)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(LocalWriter, "write", full)
            handle = ck.async_save(3, make_state(3))
            with pytest.raises(StorageError, match="full"):
                handle.result()
        assert ck.should_save(4)
        ck.save(4, make_state(4))
    found = only_preemptions(seen)
    assert [(event.step, event.committed) for event in found] == [(3, ()), (4, ("root",))]
    assert (found[-1].saves_begun, found[-1].saves_committed) == (2, 1)


def test_a_step_that_never_ends_is_reported_before_the_deadline(tmp_path):
    seen: list = []
    ck = make(tmp_path / "run", seen, deadline=0.2)
    with ck.save_on_signal():
        ck.save(2, make_state(2))
        ck.wait()
        os.kill(os.getpid(), SIGNAL)
        wait_for(lambda: only_preemptions(seen))  # the step does not end
        (event,) = only_preemptions(seen)
        assert event.saves_begun == 0 and "step 2 in memory" in str(event.error)


def test_a_copy_of_a_checkpointer_keeps_its_deadline(tmp_path):
    ck = pickle.loads(pickle.dumps(make(tmp_path / "run", deadline=7.5)))
    assert ck._arguments["deadline"] == 7.5


# ------------------------------------------------------------------------------------------------ several ranks

PHASES: dict[str, tuple[object, str]] = {
    "the step's collective": (dist, "all_reduce"),
    "agreeing": (SaveSchedule, "should_save"),
    "planning": (SaveSession, "plan"),
    "staging": (SaveSession, "stage"),
    "writing": (SaveSession, "write"),
    "committing": (SaveSession, "commit"),
    "copying to nodes": (CaptureTier, "replicate"),
    "copying to a folder": (Promoter, "_promote"),
    "restoring": (step_restore, "_load_step"),
    "reading": (tensor_loader.ElementReader, "read"),
}


def signal_at(owner: object, name: str, call: int) -> None:
    """Send this process the signal as the n-th call of a function starts."""
    whole, calls = getattr(owner, name), [0]

    def send(*args: object, **options: object) -> object:
        calls[0] += 1
        if calls[0] == call:
            os.kill(os.getpid(), SIGNAL)
        return whole(*args, **options)

    setattr(owner, name, send)


def train(
    rank: int, world: int, root: Path, phase: str, call: int, sender: int, has_tiers: bool, deadline: float
) -> tuple:
    """Train until a notice; return the last step, and what was reported."""
    enter("ab"[rank])
    seen: list = []
    tiers = [PeerMemory(every=2, copies=1), Local(root.parent / f"nvme-{rank}", every=4)] if has_tiers else []
    ck = Checkpointer(root, save_every=6, tiers=tiers, on_event=seen.append, deadline=deadline)
    if rank == sender:
        signal_at(*PHASES[phase], call)
    with ck.save_on_signal():
        values = state(world, 0)
        start = ck.restore(values) or 0
        for step in range(start + 1, start + 40):
            dist.all_reduce(torch.ones(()))
            values = state(world, step)
            if ck.should_save(step):
                ck.save(step, values)
            if ck.stop_requested:
                break
        ck.wait()
    return step, [(event.step, event.committed, event.saves_committed) for event in only_preemptions(seen)]


def resume(rank: int, world: int, root: Path, has_tiers: bool) -> tuple:
    enter("ab"[rank])
    tiers = [PeerMemory(every=2, copies=1), Local(root.parent / f"nvme-{rank}", every=4)] if has_tiers else []
    into = state(world)
    step = Checkpointer(root, save_every=6, tiers=tiers).restore(into)
    return step, is_step(into, step or 0)


@pytest.mark.parametrize("has_tiers", [True, False], ids=["tiers", "root"])
@pytest.mark.parametrize("phase", PHASES)
def test_a_signal_on_one_rank_at_any_moment_saves_one_step_on_all(phase, has_tiers, tmp_path):
    root = tmp_path / "run"
    if phase in ("restoring", "reading"):  # something to restore
        run(2, train, root, "agreeing", 9, 0, has_tiers, 60)
    sender = 0 if phase == "copying to a folder" else 1
    found = run(2, train, root, phase, 1, sender, has_tiers, 60)
    steps, reports = zip(*found, strict=True)
    is_never = phase.startswith("copying") and not has_tiers
    assert len({*steps}) == 1
    assert reports[sender] == [], "the rank that stays reports"
    report = reports[1 - sender]
    assert [each[0] for each in report] == ([] if is_never else [steps[0]])
    if not is_never:
        assert report[0][1] and report[0][2] == 1
        assert run(2, resume, root, has_tiers) == [(steps[0], True)] * 2


SCRIPT = """
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import shardckpt

dist.init_process_group("gloo")
rank, folder = dist.get_rank(), Path(sys.argv[1])
ck = shardckpt.Checkpointer(folder / "run", deadline=20)
if rank == 0:
    shardckpt.events.subscribe(lambda event: event.operation == "preemption" and print(event.describe_result()))
state = {"weight": torch.zeros(4)}
with ck.save_on_signal():
    for step in range(1, 10_000):
        state["weight"] += 1
        dist.barrier()
        if ck.should_save(step):
            ck.save(step, state)
        if ck.stop_requested:
            break
        (folder / f"trained-{rank}").touch()
        time.sleep(0.01)
dist.destroy_process_group()
"""


@pytest.mark.long
def test_torchrun_passes_its_signal_on_and_waits_for_the_save(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", str(script)]
    job = subprocess.Popen([*command, str(tmp_path)], stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        wait_for(lambda: all((tmp_path / f"trained-{rank}").exists() for rank in (0, 1)), 120.0)
        job.terminate()
        printed, _ = job.communicate(timeout=120)
    finally:
        job.kill()
    (step,) = shardckpt.Checkpointer(tmp_path / "run").steps()
    assert f"step {step} is in root" in printed and "saves begun: 1, committed: 1" in printed
    into = {"weight": torch.zeros(4)}
    assert shardckpt.Checkpointer(tmp_path / "run").restore(into) == step
    assert torch.equal(into["weight"], torch.full((4,), float(step)))


def leave(rank: int, world: int, root: Path, nodes: str, leaving: str, copies: int) -> tuple:
    """Train on nodes, of which some get a notice; return the report and the failures that the step survives."""
    enter(nodes[rank])
    seen: list = []
    ck = make(root, seen, copies=copies, deadline=60)
    ck.save(100, state(world, 100))
    ck.wait()
    past = ck._schedule.notice_saves._past["root"]
    if past:
        past.append(past[-1]._replace(seconds=1000.0))  # the root does not fit
    with ck.save_on_signal():
        if nodes[rank] in leaving:
            os.kill(os.getpid(), SIGNAL)
        assert ck.should_save(101)
        ck.save(101, state(world, 101))
        ck.wait()
    return [(event.committed, event.survives) for event in only_preemptions(seen)], sorted(ck.durability(101).survives)


@pytest.mark.parametrize("copies", [0, 1])
def test_memory_of_a_node_that_leaves_is_copied_to_one_that_stays(copies, tmp_path):
    root = tmp_path / "run"
    found = run(3, leave, root, "abc", "b", copies)
    survives = ("process", LEAVING) if copies == 0 else ("process", "node", LEAVING)
    assert found[0][0] == [(("memory",), survives)]
    empty_memory("b")
    assert run(2, resume_without, root) == [(101, True)] * 2


def lose_nodes(rank: int, world: int, root: Path, leaving: str, owner: type, name: str) -> tuple | None:
    """Save with a notice on nodes that are killed as the first rank that stays calls a function."""
    node = "abc"[rank]
    enter(node)
    pids: list[int] = [0] * world
    dist.all_gather_object(pids, os.getpid())
    seen: list = []
    ck = make(root, seen, deadline=60)
    ck.save(100, make_state(100))
    ck.wait()
    past = ck._schedule.notice_saves._past["root"]
    if past:
        past.append(past[-1]._replace(seconds=1000.0))  # the root does not fit
    original = getattr(owner, name)

    def kill(*args: object, **options: object) -> object:
        for each, pid in zip("abc", pids, strict=True):
            if each in leaving:
                os.kill(pid, signal.SIGKILL)
        return original(*args, **options)

    with ck.save_on_signal():
        if node in leaving:
            os.kill(os.getpid(), SIGNAL)
        assert ck.should_save(101)
        if node == min({*"abc"} - {*leaving}):
            setattr(owner, name, kill)
        ck.save(101, make_state(101))
        if node in leaving:
            time.sleep(60)
        ck.wait()
    return [(event.committed, event.survives) for event in only_preemptions(seen)], captures(node)[0].steps


@pytest.mark.parametrize("leaving", ["bc", "ab", "a"])
@pytest.mark.parametrize(
    ("owner", "name"),
    [(SaveSession, "stage"), (SaveSession, "commit"), (CaptureTier, "replicate")],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_memory_of_nodes_that_stay_has_replicated_values_without_the_others(owner, name, leaving, tmp_path):
    root = tmp_path / "run"
    found = outcomes(3, lose_nodes, root, leaving, owner, name)
    stay = [each for each in found if "abc"[each.rank] not in leaving]
    assert not any(each.raised or each.waits for each in stay), stay
    assert next(each.value[0] for each in stay) == [(("memory",), ("process", LEAVING))]
    assert not any(each.value[0] for each in stay[1:]), "the first rank that stays reports"
    for node in leaving:
        empty_memory(node)

    def resume(rank: int, world: int) -> int | None:
        enter([each for each in "abc" if each not in leaving][rank])
        return restore_tiers(make(root))

    assert run(len(stay), resume) == [101] * len(stay)


def leave_at_once(rank: int, world: int, root: Path) -> list:
    """Save with a notice on the node of rank 0, which is killed as its `save` returns; return what is reported."""
    enter("ab"[rank])
    pids: list[int] = [0] * world
    dist.all_gather_object(pids, os.getpid())
    seen: list = []
    ck = make(root, seen, deadline=60)
    commit = SaveSession.commit

    def commit_late(*args: object, **options: object) -> object:
        wait_for(lambda: not is_alive(pids[0]))
        return commit(*args, **options)

    with ck.save_on_signal():
        if rank == 0:
            os.kill(os.getpid(), SIGNAL)
        assert ck.should_save(101)
        if rank == 1:
            SaveSession.commit = commit_late
        ck.save(101, make_state(101))
        if rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        ck.wait()
    return [(event.step, event.committed, event.saves_begun, event.saves_committed) for event in only_preemptions(seen)]


def test_memory_and_the_root_have_the_step_of_a_node_that_is_gone_at_once(tmp_path):
    found = outcomes(2, leave_at_once, tmp_path / "run")
    assert found[1].value == [(101, ("memory", "root"), 1, 1)]
    empty_memory("a")
    empty_memory("b")
    assert restore_tiers(make(tmp_path / "run")) == 101


def resume_without(rank: int, world: int, root: Path) -> tuple:
    enter("ac"[rank])
    into = state(world)
    step = make(root).restore(into)
    return step, is_step(into, step or 0)


def test_copies_go_to_no_node_that_leaves_too(tmp_path):
    root = tmp_path / "run"
    run(4, leave, root, "abcd", "bcd", 1)
    for node in "bcd":
        empty_memory(node)
    assert [len(captures(node)) for node in "abcd"] == [1, 0, 0, 0]

    def resume_alone(rank: int, world: int) -> tuple:
        enter("a")
        into = state(world)
        step = make(root).restore(into)
        return step, is_step(into, step or 0)

    assert run(1, resume_alone) == [(101, True)]


def test_if_all_nodes_leave_copies_are_as_ever(tmp_path):
    found = run(2, leave, tmp_path / "run", "ab", "ab", 1)
    assert found[0][0] == [(("memory",), ("process", "node"))]


def lose_rank(rank: int, world: int, root: Path) -> tuple:
    """Lose the rank with the notice while its save writes; return what rank 0 reports."""
    seen: list = []
    ck = Checkpointer(root, on_event=seen.append, deadline=60)
    ck.save(1, state(world, 1))
    write = SaveSession.write

    def die(*args: object, **options: object) -> object:
        return os.kill(os.getpid(), signal.SIGKILL) if rank == 1 else write(*args, **options)

    SaveSession.write = die
    with ck.save_on_signal():
        if rank == 1:
            os.kill(os.getpid(), SIGNAL)
        assert ck.should_save(2)
        with pytest.raises(RankError):
            ck.save(2, state(world, 2))
    return [(event.committed, str(event.error)) for event in only_preemptions(seen)], ck.steps()


def test_a_rank_that_is_gone_before_the_commit_leaves_the_step_before_and_a_report(tmp_path):
    found, _ = outcomes(2, lose_rank, tmp_path / "run", group_timeout=5.0)
    ((committed, error),), steps = found.value
    assert committed == () and steps == (1,)
    assert "no save was committed after the notice" in error and "rank 1 of 2" in error


def test_warnings_as_errors_do_not_end_the_training(tmp_path):
    def fail() -> float:
        raise OSError("no metadata")

    seen: list = []
    ck = make(tmp_path / "run", seen, deadline=fail)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with ck.save_on_signal():
            os.kill(os.getpid(), SIGNAL)
            assert ck.should_save(3)
            ck.save(3, make_state(3))
            ck.wait()
    assert only_preemptions(seen)[0].committed == ("memory", "root")
