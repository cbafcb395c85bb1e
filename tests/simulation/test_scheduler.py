"""Threads of a history run one at a time; a deadlock and a kill have the effects that real ones have."""

from __future__ import annotations

import pytest

from shardckpt.testing.simulation import HistoryError
from shardckpt.testing.simulation.scheduler import Scheduler
from shardckpt.testing.simulation.stores.disk import Disk
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
    system = OperatingSystem(scheduler, disk)
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
