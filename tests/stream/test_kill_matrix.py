"""A publisher or a server that is killed at any operation: new ones continue, bit for bit."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import shardckpt
from shardckpt.stream.format.held_boxes import NewElements, write_elements
from shardckpt.stream.receive import mirror
from tests.kit.ranks.forks import is_killed
from tests.kit.stores.disk import killing_at
from tests.simulation import StreamScenario, run_stream_history
from tests.simulation.faults import EVERYTHING, FaultKind, PlannedFault

SHAPES = {"a": (40, 30), "b": (7,)}
STRIDE = 9
"""Of the operations of simulated actors, `make test` kills at every ninth."""
SKIPPED = 6
"""Of a publisher's operations on a disk, it kills at every sixth."""


def build(number: int) -> dict[str, torch.Tensor]:
    """Return version `number`, as a stream has it."""
    a = torch.arange(1200.0).reshape(SHAPES["a"])
    a[number % 40] = number
    return {"a": a.bfloat16(), "b": torch.full(SHAPES["b"], float(number), dtype=torch.bfloat16)}


def is_version(into: dict[str, torch.Tensor], number: int) -> bool:
    return all(torch.equal(value, build(number)[name]) for name, value in into.items())


def publish(url: Path, *numbers: int, restored: int | None = None) -> int | None:
    """Publish versions, after a resume with an earlier one; return what the resume found."""
    torch.set_num_threads(1)
    with shardckpt.Publisher(url, anchors=shardckpt.Anchors(max_chain=2, max_bytes=1e9)) as publisher:
        found = None if restored is None else publisher.resume(build(restored))
        for number in numbers:
            publisher.publish(number, build(number)).result()
    return found


def receive(url: Path, folder: Path | None, *, least: int, most: int) -> int:
    """Receive the newest version: it is one of those published, bit for bit; return its number."""
    torch.set_num_threads(1)
    into = build(0)
    subscriber = shardckpt.Subscriber(url, mirror=folder)
    number = subscriber.stage().commit(into).number
    assert least <= number <= most
    assert is_version(into, number)
    subscriber.close()
    return number


def continue_after(url: Path, folder: Path, number: int) -> None:
    """A new publisher continues after a version, and new and old servers receive it and the next one."""
    assert publish(url, 8, restored=number) == number
    receive(url, folder, least=8, most=8)
    receive(url, None, least=8, most=8)
    publish(url, 9)
    receive(url, folder, least=9, most=9)
    receive(url, None, least=9, most=9)


def matrix(folder: Path, work: Callable[[Path, Path], object], *, least: int, most: int, part: int = 0) -> int:
    """Kill work at every change of the disk, or at some, on a stream with three versions; return how many there were.

    Args:
        folder: An empty folder.
        work: Gets the stream and the mirror of a server that holds version 2.
        least: The oldest version that a kill may leave.
        most: The version without a kill.
        part: Which of `SKIPPED` parts of the operations; 0 for all.
    """
    for k in itertools.count(part or 1, SKIPPED if part else 1):
        url, held = folder / str(k) / "stream", folder / str(k) / "mirror"
        publish(url, 1, 2)
        receive(url, held, least=2, most=2)
        publish(url, 3, restored=2)

        def act(k: int = k, url: Path = url, held: Path = held) -> None:
            with killing_at(k):
                work(url, held)

        was_killed = is_killed(act)
        number = receive(url, held, least=least if was_killed else most, most=most)
        continue_after(url, held, number)
        if not was_killed:
            return k - 1
    raise AssertionError("unreachable")


SOME = [pytest.param(each, marks=[pytest.mark.full] if each > 1 else []) for each in range(1, SKIPPED + 1)]


@pytest.mark.parametrize("part", SOME)
def test_a_publisher_killed_at_any_operation_leaves_the_old_or_new_version(part: int, tmp_path: Path) -> None:
    operations = matrix(tmp_path, lambda url, _: publish(url, 4, restored=3), least=3, most=4, part=part)
    print(f"killed at each of {operations} operations")
    assert operations >= 12


@pytest.mark.parametrize("part", SOME)
def test_so_does_one_that_writes_an_anchor(part: int, tmp_path: Path) -> None:
    operations = matrix(tmp_path, lambda url, _: publish(url, 4, 5, restored=3), least=3, most=5, part=part)
    print(f"killed at each of {operations} operations")
    assert operations >= 30


@pytest.mark.parametrize("is_new", [True, False], ids=["a new mirror", "a held version"])
def test_a_server_that_is_killed_at_any_operation_continues(is_new: bool, tmp_path: Path) -> None:
    def work(url: Path, held: Path) -> None:
        receive(url, held.with_name("other") if is_new else held, least=3, most=3)

    operations = matrix(tmp_path, work, least=3, most=3)
    print(f"killed at each of {operations} operations")
    assert operations >= 3


def test_a_server_that_is_killed_between_two_elements_of_its_mirror_continues(tmp_path: Path) -> None:
    """A mirror that has some new elements is of no version."""
    url, held = tmp_path / "stream", tmp_path / "mirror"
    publish(url, 1)
    receive(url, held, least=1, most=1)
    for number, half in ((2, True), (3, False)):
        publish(url, number, restored=number - 1)

        def die(new: NewElements, values: np.ndarray, half: bool = half) -> None:
            assert new.positions is not None
            count = len(new.positions) // (2 if half else 1)
            write_elements(NewElements(new.positions[:count], new.values[:count]), values)
            os.kill(os.getpid(), signal.SIGKILL)

        def work(number: int = number) -> None:
            torch.set_num_threads(1)
            into = build(number - 1)
            subscriber = shardckpt.Subscriber(url, mirror=held)
            subscriber.stage(number - 1).commit(into)
            mirror.write_elements = die
            subscriber.stage().commit(into)

        assert is_killed(work)
        receive(url, held, least=number, most=number)
    continue_after(url, held, 3)


# Simulated actors: messages between ranks, requests to a bucket, and writes of an engine are operations, too.

PARTS = [pytest.param(each, marks=[pytest.mark.full] if each else []) for each in range(STRIDE)]


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("store", ["disk", "bucket"])
def test_simulated_publishers_and_servers_continue_after_a_kill_at_any_event(store: str, part: int) -> None:
    scenario = StreamScenario(
        store, worlds=(2, 2), versions=2, max_chain=1, receivers=(2,), mirrors=(True,), starts=2, stages=2, stay=0.95
    )
    quiet = run_stream_history(3, scenario)
    assert quiet.failure is None, str(quiet.failure)
    last = next(event.number for event in quiet.events if event.verb == "calm")
    assert last > 200
    killed = 0
    for at in range(part, last, STRIDE):
        fault = PlannedFault(at, FaultKind("kill", EVERYTHING))
        history = run_stream_history(3, StreamScenario(**{**vars(scenario), "faults": (fault,)}))
        assert history.failure is None, f"a kill at event {at}: {history.failure}"
        killed += len(history.fired)
    assert killed > 0.9 * (last - part) / STRIDE, "a kill that does not happen shows nothing"
