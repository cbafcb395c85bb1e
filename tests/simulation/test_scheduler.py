"""Threads of a history run one at a time; a deadlock and a kill have the effects that real ones have."""

from __future__ import annotations

import pytest

from shardckpt.testing.simulation import HistoryError, run_history
from shardckpt.testing.simulation.scheduler import Scheduler, WaitingTasks
from shardckpt.testing.simulation.stores.disk import Disk
from shardckpt.testing.simulation.stores.node_disks import NodeDisks
from shardckpt.testing.simulation.stores.operating_system import OperatingSystem


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
