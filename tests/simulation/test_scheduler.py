"""Threads of a history run one at a time; a deadlock and a kill have the effects that real ones have."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from contextvars import ContextVar
from functools import partial

import pytest
import torch

from shardckpt.native import verified_store
from tests.simulation import HistoryError, run_history, turns
from tests.simulation.scheduler import Scheduler, WaitingTasks
from tests.simulation.seams import Machine, simulated
from tests.simulation.stores.disk import Disk
from tests.simulation.stores.node_disks import NodeDisks
from tests.simulation.stores.node_memory import Janitors
from tests.simulation.stores.operating_system import OperatingSystem


def order_of_turns(seed: int) -> list[str]:
    scheduler = Scheduler(seed, stay=0.5)
    for name in "abc":
        process = scheduler.new_process(name)
        scheduler.spawn(process, name, lambda: [scheduler.step("turn", str(number)) for number in range(5)])
    scheduler.run()
    return [event.who for event in scheduler.events]


def test_the_seed_gives_the_order_of_turns() -> None:
    assert order_of_turns(1) == order_of_turns(1)
    assert len({tuple(order_of_turns(seed)) for seed in range(10)}) == 10


def test_a_deadlock_is_reported_with_the_place_of_each_thread() -> None:
    scheduler = Scheduler(1)

    def wait_in_vain() -> None:
        scheduler.wait(lambda: False, "a message of rank 1")

    scheduler.spawn(scheduler.new_process("a"), "a", wait_in_vain)
    with pytest.raises(HistoryError, match=r"deadlock: \n    a waits for a message of rank 1 at wait_in_vain:[0-9]+"):
        scheduler.run()


def test_virtual_time_passes_without_waiting() -> None:
    scheduler = Scheduler(1)
    scheduler.spawn(scheduler.new_process("a"), "a", lambda: scheduler.sleep(1e6))
    scheduler.run()
    assert scheduler.now >= 1e6


def test_what_a_killed_process_does_in_finally_has_no_effect() -> None:
    scheduler, disk = Scheduler(1), Disk()
    system = OperatingSystem(scheduler, NodeDisks(disk))
    process = scheduler.new_process("a")

    def work() -> None:
        try:
            system.mkdir("/kept")
            process.die()
            system.mkdir("/lost")
        finally:
            system.rmdir("/kept")

    scheduler.spawn(process, "a", work)
    scheduler.run()
    assert [*disk.root.names] == ["kept"]


def test_the_tasks_that_can_run_are_those_that_a_look_at_all_of_them_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever changes what a condition depends on says so; otherwise a thread would wait for ever."""
    find_ready = WaitingTasks.find_ready
    counts: list[int] = []

    def find_and_compare(self, now: float) -> list[int]:
        found = [*find_ready(self, now)]
        assert found == [task.number for task in self.tasks if task.can_run(now)]
        counts.append(len(found))
        return found

    monkeypatch.setattr(WaitingTasks, "find_ready", find_and_compare)
    assert [seed for seed in range(12) if run_history(seed).failure is not None] == []
    assert max(counts) > 2


def test_a_choice_looks_only_at_tasks_that_something_has_changed_for() -> None:
    scheduler, asked = Scheduler(1), list[int]()
    for number in range(50):
        waiting = scheduler.new_process(f"waiting {number}")
        scheduler.spawn(
            waiting, waiting.name, lambda: scheduler.wait(lambda: bool(asked.append(1)), "nothing", 9.0, ("nothing",))
        )
    for name in "ab":
        scheduler.spawn(
            scheduler.new_process(name), name, lambda: [scheduler.step("turn", str(at)) for at in range(500)]
        )
    scheduler.run()
    assert len(asked) <= 4 * 50


def run_in_turns(act: Callable[[Scheduler], object]) -> None:
    """Run a function on two simulated threads that take turns."""
    scheduler = Scheduler(1, stay=0.0)
    for name in "ab":
        scheduler.spawn(scheduler.new_process(name), name, lambda: act(scheduler))
    scheduler.run()
    assert len({event.who for event in scheduler.events[:3]}) == 2


NOTE = ContextVar("note", default="")


def test_a_thread_has_its_own_context() -> None:
    def check(scheduler: Scheduler) -> None:
        for number in range(8):
            NOTE.set(f"{scheduler.current} {number}")
            scheduler.step("turn")
            assert NOTE.get() == f"{scheduler.current} {number}"

    run_in_turns(check)
    assert NOTE.get() == ""


def test_a_thread_records_gradients_by_its_own_setting() -> None:
    def check(scheduler: Scheduler) -> None:
        for _ in range(8):
            assert torch.is_grad_enabled()
            with torch.no_grad():
                scheduler.step("turn")
                assert not torch.is_grad_enabled()
            scheduler.step("turn")

    run_in_turns(check)
    assert torch.is_grad_enabled()
    with torch.no_grad():
        run_in_turns(check)
        assert not torch.is_grad_enabled()


def find_classes_of_threads() -> set[type]:
    """Return the classes of the product of whose objects each thread has its own attributes."""
    spaces = [vars(module) for name, module in [*sys.modules.items()] if name.partition(".")[0] == "shardckpt"]
    return {
        each
        for space in spaces
        for each in space.values()
        if isinstance(each, type) and issubclass(each, threading.local) and each is not threading.local
    }


def test_each_class_whose_objects_differ_by_thread_has_a_twin_in_histories() -> None:
    """Threads of a history are greenlets of one thread, which would share them."""
    run_history(0)
    not_in_histories = {"_EnteredHooks"}  # of the forward of models
    assert {each.__name__ for each in find_classes_of_threads()} - not_in_histories == {"BlockMemory"}


def test_a_thread_has_its_own_block_of_a_verified_store() -> None:
    scheduler, disks = Scheduler(1, stay=0.0), NodeDisks(Disk())
    system = OperatingSystem(scheduler, disks)
    janitors = Janitors(scheduler, lambda name, _: scheduler.new_process(name))
    with simulated(Machine(scheduler, system, janitors, {})):
        memory = verified_store.BlockMemory()

        def check(name: str) -> None:
            for number in range(4):
                assert memory.block == ((name, number - 1) if number else None)
                memory.cache((name, number), memory.take(8))
                scheduler.step("turn")

        process = scheduler.new_process("a")
        for name in "ab":
            scheduler.spawn(process, name, partial(check, name))
        scheduler.run()
    assert [event.who for event in scheduler.events[:3]] != ["a"] * 3


def test_threads_that_start_others_do_not_add_up_to_a_deep_stack() -> None:
    scheduler, ended = Scheduler(1), list[int]()
    process = scheduler.new_process("a")

    def start_next(number: int) -> None:
        if number < sys.getrecursionlimit() // 4:
            task = scheduler.spawn(process, "a", partial(start_next, number + 1))
            scheduler.wait(lambda: task.is_over, "the next one", None, (task,))
        ended.append(number)

    scheduler.spawn(process, "a", partial(start_next, 0))
    scheduler.run()
    assert ended == [*range(len(ended))][::-1]


def test_a_process_has_the_processor_seconds_of_its_threads() -> None:
    scheduler = Scheduler(1, stay=0.0, is_measured=True)
    busy, idle = (scheduler.new_process(name) for name in ("busy", "idle"))

    def work() -> None:
        until = time.thread_time() + 0.05
        while time.thread_time() < until:
            pass
        for _ in range(9):
            scheduler.step("turn")

    for process, act in ((busy, work), (busy, work), (idle, lambda: scheduler.step("turn"))):
        scheduler.spawn(process, process.name, act)
    scheduler.run()
    assert busy.work_s >= 0.1
    assert idle.work_s < 0.05


def test_processor_seconds_are_not_asked_for_in_a_history(monkeypatch: pytest.MonkeyPatch) -> None:
    """The call takes as long as a switch between two threads."""
    asked: list[None] = []
    monkeypatch.setattr(turns.time, "thread_time", lambda: asked.append(None) or 0.0)
    scheduler = Scheduler(1, stay=0.0)
    process = scheduler.new_process("a")
    for _ in range(2):
        scheduler.spawn(process, "a", lambda: [scheduler.step("turn") for _ in range(9)])
    scheduler.run()
    assert len(asked) <= 1, "at the start alone"
    assert process.work_s == 0.0


def test_an_interrupt_ends_all_threads() -> None:
    scheduler, ended = Scheduler(1), list[str]()

    def be_interrupted() -> None:
        scheduler.step("turn")
        scheduler.processes[0].die()
        raise KeyboardInterrupt

    def wait() -> None:
        try:
            scheduler.sleep(9.0)
        finally:
            ended.append("b")

    scheduler.spawn(scheduler.new_process("a"), "a", be_interrupted)
    scheduler.spawn(scheduler.new_process("b"), "b", wait)
    with pytest.raises(KeyboardInterrupt):
        scheduler.run()
    assert ended == ["b"]
