"""A receiver applies a version entirely or not at all, and says which one it has."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor
from torch.distributed.tensor.placement_types import Shard

import shardckpt
from shardckpt.boxes import Box
from shardckpt.errors import (
    ChecksumError,
    MismatchError,
    PoisonedError,
    RankError,
    SourceNotFoundError,
    UsageError,
)
from shardckpt.events import ReceiveEvent
from shardckpt.stream.format.stream_folder import StreamFolder
from shardckpt.stream.format.stream_records import Version, VersionCommit
from shardckpt.stream.receive import mirror as mirroring
from shardckpt.stream.receive import version_chooser
from shardckpt.stream.receive.subscriber import SubscriberState
from shardckpt.stream.receive.targets import TensorChange
from tests.kit.ranks.harness import outcomes, run

SHAPES = {"a": (6, 4), "b": (5,), "c": ()}


def build(number: float = 0) -> dict[str, torch.Tensor]:
    return {name: torch.full(shape, number, dtype=torch.bfloat16) for name, shape in SHAPES.items()}


def publish(url: Path, *numbers: int) -> None:
    """Publish versions; in version N the elements that it changes are N."""
    weights = build()
    with shardckpt.Publisher(url, anchors=shardckpt.Anchors(max_bytes=1e6)) as publisher:
        for number in numbers:
            weights["a"][number % 6, number % 4] = number
            weights["b"].fill_(number)
            publisher.publish(number, weights).result()


def is_version(into: dict[str, torch.Tensor], number: int) -> bool:
    return bool((into["b"] == number).all()) and all(into["a"][n % 6, n % 4] == n for n in range(1, number + 1))


class Engine:
    """An engine whose apply fails on request, after it changed something."""

    def __init__(self) -> None:
        self.tensors, self.fails = build(), False

    def apply(self, changes: Iterable[TensorChange]) -> None:
        """Write the changes."""
        for change in changes:
            tensor = self.tensors[change.name].view(-1)
            if change.indices is None:
                tensor.copy_(change.values)
            else:
                tensor[change.indices] = change.values
            if self.fails:
                raise RuntimeError("the device is gone")


def test_several_versions_are_applied_at_once(tmp_path: Path) -> None:
    publish(tmp_path, 1, 2, 3, 4)
    events: list[Any] = []
    subscriber, into = shardckpt.Subscriber(tmp_path, on_event=events.append), build()
    assert (subscriber.label, subscriber.held) == ("", None)
    assert subscriber.stage(1).commit(into) == (1, 1)
    staged = subscriber.stage()
    assert (subscriber.state, subscriber.label, staged.is_full) == (SubscriberState.STAGED, "1", False)
    assert is_version(into, 1), "the server serves the old version"
    assert staged.commit(into) == (1, 4)
    assert (subscriber.state, subscriber.label, subscriber.held) == (SubscriberState.READY, "4", (1, 4))
    assert is_version(into, 4)
    assert all(isinstance(event, ReceiveEvent) for event in events)
    assert [(event.version, event.versions, event.is_full) for event in events] == [(1, 0, True), (4, 3, False)]
    assert events[1].changed == 3 + 5


def test_a_held_version_has_no_changes(tmp_path: Path) -> None:
    publish(tmp_path, 1)
    subscriber, into = shardckpt.Subscriber(tmp_path), build()
    subscriber.stage().commit(into)
    staged = subscriber.stage()
    assert staged.is_held
    assert not list(staged.iter_changes())
    assert staged.commit(into) == (1, 1)


def test_an_aborted_version_leaves_the_old_one(tmp_path: Path) -> None:
    publish(tmp_path, 1, 2)
    subscriber, into = shardckpt.Subscriber(tmp_path), build()
    subscriber.stage(1).commit(into)
    staged = subscriber.stage()
    staged.abort()
    assert (subscriber.state, subscriber.label) == (SubscriberState.READY, "1")
    with pytest.raises(UsageError, match="committed, aborted or replaced"):
        staged.commit(into)
    assert is_version(into, 1)
    subscriber.stage().commit(into)
    assert is_version(into, 2)


def test_a_failed_half_poisons_until_all_weights_are_replaced(tmp_path: Path) -> None:
    publish(tmp_path, 1, 2, 3)
    subscriber, engine = shardckpt.Subscriber(tmp_path), Engine()
    subscriber.stage(1).commit(engine)
    engine.fails = True
    with pytest.raises(PoisonedError, match=r"version 2 \(epoch 1\) was applied in part.*the device is gone"):
        subscriber.stage(2).commit(engine)
    assert (subscriber.state, subscriber.label, subscriber.held) == (SubscriberState.POISONED, "poisoned:2", None)
    engine.fails = False
    staged = subscriber.stage()
    assert (subscriber.state, staged.is_full) == (SubscriberState.POISONED, True)
    staged.commit(engine)
    assert (subscriber.state, subscriber.label) == (SubscriberState.READY, "3")
    assert is_version(engine.tensors, 3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda into: into.pop("a"), "a: only the stream has it"),
        (lambda into: into.update(d=torch.ones(1)), "d: the stream has no such tensor"),
        (lambda into: into.update(b=torch.ones(4)), r"b: shape \[4\], the stream has \[5\]"),
    ],
    ids=["fewer", "more", "shape"],
)
def test_a_target_that_does_not_fit_is_not_changed(change: Any, message: str, tmp_path: Path) -> None:
    publish(tmp_path, 1, 2)
    subscriber, into = shardckpt.Subscriber(tmp_path), build()
    subscriber.stage(1).commit(into)
    other = {**build()}
    change(other)
    before = {name: value.clone() for name, value in other.items()}
    staged = subscriber.stage()
    with pytest.raises(MismatchError, match=message):
        staged.commit(other)
    assert all(torch.equal(before[name], value) for name, value in other.items())
    assert subscriber.label == "1"
    staged.commit(into)
    assert is_version(into, 2)


@pytest.mark.parametrize("into", [None, 3, [], {"a": 1}], ids=repr)
def test_what_is_no_target_is_refused(into: object, tmp_path: Path) -> None:
    publish(tmp_path, 1)
    with pytest.raises(UsageError, match="`into` must be a module"):
        shardckpt.Subscriber(tmp_path).stage().commit(into)


def test_a_module_of_another_dtype_takes_the_values(tmp_path: Path) -> None:
    model = nn.Linear(4, 3)
    with shardckpt.Publisher(tmp_path) as publisher:
        publisher.publish(1, model)
    server = nn.Linear(4, 3)
    shardckpt.Subscriber(tmp_path).stage().commit(server)
    assert torch.equal(server.weight, model.weight.bfloat16().float())


def test_a_mirror_outlives_the_process(tmp_path: Path) -> None:
    publish(tmp_path / "s", 1, 2)
    first = shardckpt.Subscriber(tmp_path / "s", mirror=tmp_path / "m")
    first.stage(1).commit(build())
    with pytest.raises(UsageError, match="another process uses this mirror"):
        shardckpt.Subscriber(tmp_path / "s", mirror=tmp_path / "m").stage()
    first.close()
    anchor = next((tmp_path / "s").glob("*/anchor"))
    anchor.rename(tmp_path / "away")
    again, into = shardckpt.Subscriber(tmp_path / "s", mirror=tmp_path / "m"), build()
    staged = again.stage()
    assert staged.is_full, "the new process has none of the stream's versions"
    staged.commit(into)
    assert is_version(into, 2)


@pytest.mark.parametrize("damage", ["flipped", "truncated", "record", "other stream"])
def test_a_damaged_mirror_is_not_used(damage: str, tmp_path: Path) -> None:
    publish(tmp_path / "s", 1, 2)
    first = shardckpt.Subscriber(tmp_path / "s", mirror=tmp_path / "m")
    first.stage(1).commit(build())
    first.close()
    folder = tmp_path / "m" / "worker-00000-of-00001"
    (weights,) = folder.glob("weights-*")
    data = bytearray(weights.read_bytes())
    if damage == "flipped":
        data[3] ^= 1
        weights.write_bytes(data)
    elif damage == "truncated":
        weights.write_bytes(data[:-1])
    elif damage == "record":
        (folder / "HELD.json").write_text("{}")
    else:
        publish(tmp_path / "t", 1, 2)
    url = tmp_path / ("t" if damage == "other stream" else "s")
    again, into = shardckpt.Subscriber(url, mirror=tmp_path / "m"), build()
    again.stage().commit(into)
    assert is_version(into, 2)
    assert len(list(folder.glob("weights-*"))) == 1


@pytest.mark.parametrize("place", [2 * 4 + 2, 0])  # version 2 changes the first one
@pytest.mark.parametrize("bit", range(16))
def test_a_flipped_bit_in_a_tensor_of_the_mirror_that_changes_is_found(bit: int, place: int, tmp_path: Path) -> None:
    publish(tmp_path, 1, 2)
    subscriber, into = shardckpt.Subscriber(tmp_path), build()
    subscriber.stage(1).commit(into)
    assert subscriber._mirror is not None
    held = next(box for box in subscriber._mirror.boxes if box.name == "a")
    subscriber._mirror.view(held)[place] ^= 1 << bit
    with pytest.raises(ChecksumError, match=r"version 2 .* has other weights than its commit says"):
        subscriber.stage()
    assert (subscriber.label, is_version(into, 1)) == ("1", True)
    subscriber.stage().commit(into)
    assert is_version(into, 2)


def test_a_flipped_bit_of_the_mirror_under_a_change_of_every_element_has_no_effect(tmp_path: Path) -> None:
    publish(tmp_path, 1, 2, 3)
    subscriber, into = shardckpt.Subscriber(tmp_path), build()
    subscriber.stage(1).commit(into)
    assert subscriber._mirror is not None
    b = next(box for box in subscriber._mirror.boxes if box.name == "b")
    subscriber._mirror.view(b)[1] ^= 1  # "b" travels in full
    for version in (2, 3):
        subscriber.stage(version).commit(into)
        assert is_version(into, version)


def test_a_bit_of_the_mirror_that_flips_after_the_verification_changes_nothing(tmp_path: Path) -> None:
    publish(tmp_path, 1, 2, 3)
    subscriber, into = shardckpt.Subscriber(tmp_path), build()
    subscriber.stage(1).commit(into)
    staged = subscriber.stage(2)
    assert subscriber._mirror is not None
    a = next(box for box in subscriber._mirror.boxes if box.name == "a")
    subscriber._mirror.view(a)[2 * 4 + 2] ^= 1  # version 2 changes it
    staged.commit(into)
    assert is_version(into, 2)
    subscriber.stage().commit(into)
    assert is_version(into, 3)


def test_a_version_that_is_not_published_is_waited_for(tmp_path: Path) -> None:
    with pytest.raises(SourceNotFoundError, match="no stream of weights is here"):
        shardckpt.Subscriber(tmp_path).stage()
    publish(tmp_path, 1)
    with pytest.raises(SourceNotFoundError, match="version 2 is not published here"):
        shardckpt.Subscriber(tmp_path).stage(2, timeout_s=0.2)


def test_a_receiver_may_start_before_the_publisher(tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as pool:
        staged = pool.submit(shardckpt.Subscriber(tmp_path).stage, 2, timeout_s=30.0)
        time.sleep(0.1)
        publish(tmp_path, 1, 2)
        assert staged.result().version == (1, 2)


def test_a_wait_for_a_newer_version_polls_less_and_less_and_reads_no_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(tmp_path, 1)
    into, subscriber = build(), shardckpt.Subscriber(tmp_path)
    subscriber.stage().commit(into)
    now, sleeps, read = 0.0, [], []
    find_commit = StreamFolder.find_commit

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds
        sleeps.append(seconds)

    def note_read(folder: StreamFolder, version: Version) -> VersionCommit | None:
        read.append(version)
        return find_commit(folder, version)

    monkeypatch.setattr(version_chooser.time, "sleep", sleep)
    monkeypatch.setattr(version_chooser.time, "monotonic", lambda: now)
    monkeypatch.setattr(StreamFolder, "find_commit", note_read)
    assert subscriber.stage(timeout_s=100.0).version == (1, 1)
    assert 100 < len(sleeps) < 250
    assert sleeps == sorted(sleeps)
    assert (sleeps[0], sleeps[-1]) == (0.05, 1.0)
    assert len(read) < 5


@pytest.mark.parametrize("arguments", [{"target": "1"}, {"target": -1}, {"timeout_s": -1}, {"timeout_s": float("inf")}])
def test_wrong_arguments_are_refused(arguments: dict[str, Any], tmp_path: Path) -> None:
    publish(tmp_path, 1)
    with pytest.raises(UsageError, match="must be"):
        shardckpt.Subscriber(tmp_path).stage(**arguments)
    with pytest.raises(UsageError, match="`layout` must be"):
        shardckpt.Subscriber(tmp_path, layout=3)  # type: ignore[arg-type]


@pytest.mark.parametrize("box", [Box((0,), (9,)), Box((0, 0), (1, 1)), "all"], ids=repr)
def test_a_layout_outside_of_the_tensor_is_refused(box: Any, tmp_path: Path) -> None:
    publish(tmp_path, 1)
    subscriber = shardckpt.Subscriber(tmp_path, layout=lambda name, _: box if name == "b" else None)
    with pytest.raises(UsageError, match="`layout` must return boxes in the tensor"):
        subscriber.stage()


def apply_with_a_failure(rank: int, world: int, url: str) -> list[str]:
    """Worker 1 fails in the middle of version 2; all workers replace their weights by version 3."""
    subscriber, engine = shardckpt.Subscriber(url), Engine()
    subscriber.stage(1).commit(engine)
    engine.fails = rank == 1
    staged = subscriber.stage(2)
    try:
        staged.commit(engine)
    except PoisonedError as error:
        assert rank == 1 or "rank 1" in str(error)
    labels = [subscriber.label]
    engine.fails = False
    staged = subscriber.stage()
    assert staged.is_full
    staged.commit(engine)
    assert is_version(engine.tensors, 3)
    return [*labels, subscriber.label]


def test_one_worker_that_fails_poisons_all(tmp_path: Path) -> None:
    publish(tmp_path, 1, 2, 3)
    assert run(2, apply_with_a_failure, str(tmp_path)) == [["poisoned:2", "3"]] * 2


def read_with_a_failure(rank: int, world: int, url: str) -> None:
    """Worker 1 cannot read version 2: no worker stages it."""
    subscriber, engine = shardckpt.Subscriber(url), Engine()
    subscriber.stage(1).commit(engine)
    if rank == 1:
        subscriber._folder.url = subscriber._folder.store._root = os.devnull  # type: ignore[attr-defined]
    subscriber.stage(2)


def test_one_worker_that_cannot_read_keeps_all_on_the_old_version(tmp_path: Path) -> None:
    publish(tmp_path, 1, 2)
    found = outcomes(2, read_with_a_failure, str(tmp_path))
    assert all(each.raised is not None for each in found)
    assert found[0].raised is not None
    assert found[0].raised.is_a(RankError)


def test_the_newest_version_is_that_of_the_last_epoch(tmp_path: Path) -> None:
    publish(tmp_path, 1, 7)
    publish(tmp_path, 1, 2)
    into = build()
    assert shardckpt.Subscriber(tmp_path).stage().commit(into) == Version(2, 2)
    assert is_version(into, 2)


def test_another_target_gets_all_weights(tmp_path: Path) -> None:
    publish(tmp_path, 1, 2)
    subscriber, first, second = shardckpt.Subscriber(tmp_path), build(), build()
    subscriber.stage(1).commit(first)
    subscriber.stage(2).commit(second)
    assert is_version(second, 2)
    engines = Engine(), Engine()
    subscriber.stage(2).commit(engines[0])
    subscriber.stage(2).commit(engines[1])
    assert is_version(engines[1].tensors, 2)


def test_an_engine_that_does_not_take_all_changes_is_poisoned(tmp_path: Path) -> None:
    class Lazy:
        def apply(self, changes: Iterable[TensorChange]) -> None:
            self.changes = changes

    publish(tmp_path, 1)
    subscriber = shardckpt.Subscriber(tmp_path)
    with pytest.raises(PoisonedError, match="must take all changes"):
        subscriber.stage().commit(Lazy())
    assert subscriber.label == "poisoned:1"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda into: into.update(b=torch.zeros(5, dtype=torch.bfloat16, device="meta")), "b: it has no memory"),
        (lambda into: into.update(b=torch.zeros(1, dtype=torch.bfloat16).expand(5)), "b: it has no memory of its own"),
        (lambda into: into.update(b=into["a"].view(-1)[:5]), "b: it shares memory with a"),
        (lambda into: into.update(b=torch.zeros(5, dtype=torch.int8)), "b: dtype int8 would round"),
    ],
    ids=["meta", "expanded", "shared", "integers"],
)
def test_memory_that_cannot_be_written_is_refused(change: Any, message: str, tmp_path: Path) -> None:
    publish(tmp_path, 1)
    into = build()
    change(into)
    with pytest.raises(MismatchError, match=message):
        shardckpt.Subscriber(tmp_path).stage().commit(into)


def test_an_interrupt_after_the_vote_leaves_the_version_and_drops_the_mirror(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(tmp_path, 1, 2, 3)
    subscriber, into = shardckpt.Subscriber(tmp_path), build()
    subscriber.stage(1).commit(into)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    staged = subscriber.stage(2)
    monkeypatch.setattr(mirroring, "write_elements", interrupt)
    with pytest.raises(KeyboardInterrupt):
        staged.commit(into)
    monkeypatch.undo()
    assert (subscriber.state, subscriber.label, is_version(into, 2)) == (SubscriberState.READY, "2", True)
    subscriber.stage().commit(into)
    assert is_version(into, 3)


def test_damaged_memory_after_a_failed_half_is_replaced(tmp_path: Path) -> None:
    publish(tmp_path, 1, 2, 3)
    subscriber, engine = shardckpt.Subscriber(tmp_path), Engine()
    subscriber.stage(1).commit(engine)
    staged = subscriber.stage(2)
    assert subscriber._mirror is not None
    subscriber._mirror._buffer[0] ^= 1
    engine.fails = True
    with pytest.raises(PoisonedError):
        staged.commit(engine)
    engine.fails = False
    with pytest.raises(ChecksumError):
        subscriber.stage()
    subscriber.stage().commit(engine)
    assert is_version(engine.tensors, 3)


def test_a_closed_or_forked_subscriber_is_refused(tmp_path: Path) -> None:
    publish(tmp_path, 1)
    subscriber = shardckpt.Subscriber(tmp_path)
    staged = subscriber.stage()
    subscriber._process += 1
    with pytest.raises(UsageError, match="another process"):
        staged.commit(build())
    subscriber._process -= 1
    subscriber.close()
    with pytest.raises(UsageError, match="this subscriber is closed"):
        subscriber.stage()


def test_a_mirror_that_nobody_closes_is_released(tmp_path: Path) -> None:
    publish(tmp_path / "s", 1)
    shardckpt.Subscriber(tmp_path / "s", mirror=tmp_path / "m").stage().commit(build())
    gc.collect()
    shardckpt.Subscriber(tmp_path / "s", mirror=tmp_path / "m").stage()


@pytest.mark.parametrize("shape", [(0,), (0, 4)])
def test_an_empty_tensor_is_received(shape: tuple[int, ...], tmp_path: Path) -> None:
    weights = {"a": torch.ones(3), "empty": torch.ones(shape)}
    with shardckpt.Publisher(tmp_path) as publisher:
        publisher.publish(1, weights)
        publisher.publish(2, weights)
    into = {"a": torch.zeros(3), "empty": torch.zeros(shape)}
    shardckpt.Subscriber(tmp_path).stage().commit(into)
    assert torch.equal(into["a"], weights["a"])


@pytest.mark.parametrize(
    "dtype", [torch.uint16, torch.uint32, torch.uint64, torch.float8_e8m0fnu, torch.complex64, torch.bool], ids=str
)
def test_changes_of_any_dtype_are_written(dtype: torch.dtype, tmp_path: Path) -> None:
    width = dtype.itemsize
    weights = {"a": torch.zeros(4000 * width, dtype=torch.uint8).view(dtype)}
    into = {"a": torch.zeros(4000 * width, dtype=torch.uint8).view(dtype)}
    subscriber = shardckpt.Subscriber(tmp_path)
    with shardckpt.Publisher(tmp_path) as publisher:
        for version in (1, 2):
            publisher.publish(version, weights).result()
            subscriber.stage().commit(into)
            weights["a"].view(torch.uint8)[7 * width] = 1
        publisher.publish(3, weights).result()
        subscriber.stage().commit(into)
    assert torch.equal(into["a"].view(torch.uint8), weights["a"].view(torch.uint8))


def test_a_column_of_a_tensor_that_changes_entirely_is_received(tmp_path: Path) -> None:
    weights = {"a": torch.zeros(8, 3)}
    worker: dict[str, torch.Tensor] = {"a": torch.zeros(8, 1, dtype=torch.bfloat16)}

    class Columns:
        def apply(self, changes: Iterable[TensorChange]) -> None:
            for change in changes:
                worker["a"].copy_(change.values.view(change.box.size))

    subscriber = shardckpt.Subscriber(tmp_path, layout=lambda _, shape: Box((0, 1), (8, 1)))
    engine = Columns()
    with shardckpt.Publisher(tmp_path) as publisher:
        for version in (1, 2):
            weights["a"] += torch.arange(24).view(8, 3) + version
            publisher.publish(version, weights).result()
            subscriber.stage().commit(engine)
    assert torch.equal(worker["a"], weights["a"][:, 1:2].bfloat16())


def follow_uneven_shards(rank: int, world: int, url: str) -> None:
    """One row on two ranks: the second rank has nothing of it."""
    mesh = init_device_mesh("cpu", (world,))
    model = nn.Module()
    model.w = nn.Parameter(distribute_tensor(torch.zeros(1, 4), mesh, [Shard(0)]))
    model.v = nn.Parameter(distribute_tensor(torch.zeros(3, 4), mesh, [Shard(0)]))
    shardckpt.Subscriber(url, layout=model).stage().commit(model)
    assert torch.equal(model.w.full_tensor(), torch.ones(1, 4))
    assert torch.equal(model.v.full_tensor(), torch.ones(3, 4))


def test_a_worker_may_hold_nothing_of_a_tensor(tmp_path: Path) -> None:
    with shardckpt.Publisher(tmp_path) as publisher:
        publisher.publish(1, {"w": torch.ones(1, 4), "v": torch.ones(3, 4)})
    run(2, follow_uneven_shards, str(tmp_path))


def test_full_tensors_are_those_of_the_new_version_and_may_be_written_to(tmp_path: Path) -> None:
    publish(tmp_path, 1, 2, 3)
    subscriber, into = shardckpt.Subscriber(tmp_path), build()
    subscriber.stage(1).commit(into)
    for number, is_changed in ((1, False), (3, True)):
        staged = subscriber.stage(number)
        assert is_version(dict(staged.iter_tensors()), number)
        assert is_version(into, 1), "the server serves the old version"
        changed = dict(staged.iter_tensors(changed_only=True))
        assert sorted(changed) == (["a", "b"] if is_changed else [])
        for _, tensor in staged.iter_tensors():
            tensor.fill_(7)  # some engines convert in place
        staged.commit(into)
        assert is_version(into, number)
    assert sorted(dict(shardckpt.Subscriber(tmp_path).stage().iter_tensors(changed_only=True))) == ["a", "b", "c"]


def test_full_tensors_are_refused_for_parts_and_after_the_commit(tmp_path: Path) -> None:
    publish(tmp_path, 1)
    rows = shardckpt.Subscriber(
        tmp_path, layout=lambda _, shape: Box((0,) * len(shape), (2, *shape[1:]) if shape else ())
    )
    with pytest.raises(UsageError, match=r"^a: a worker with parts of tensors has no full ones"):
        rows.stage().iter_tensors()
    subscriber = shardckpt.Subscriber(tmp_path)
    staged = subscriber.stage()
    tensors = staged.iter_tensors()
    staged.commit(build())
    with pytest.raises(UsageError, match="committed, aborted or replaced"):
        next(tensors)


def publish_tied(url: Path) -> torch.Tensor:
    model = nn.ModuleDict({"embed": nn.Embedding(5, 4), "head": nn.Linear(4, 5, bias=False)})
    model["head"].weight = model["embed"].weight
    with shardckpt.Publisher(url) as publisher:
        publisher.publish(1, model)
    return model["embed"].weight.detach().bfloat16()


def test_two_names_of_one_tensor_are_both_written(tmp_path: Path) -> None:
    expected = publish_tied(tmp_path)
    shared = torch.zeros(5, 4, dtype=torch.bfloat16)
    shardckpt.Subscriber(tmp_path).stage().commit({"embed.weight": shared, "head.weight": shared.view(5, 4)})
    assert torch.equal(shared, expected)


@pytest.mark.parametrize("alias", [lambda shared: shared.clone(), lambda shared: shared[:3], lambda shared: shared.T])
def test_a_further_name_of_other_memory_is_refused(tmp_path: Path, alias: Any) -> None:
    publish_tied(tmp_path)
    shared = torch.zeros(5, 4, dtype=torch.bfloat16)
    with pytest.raises(MismatchError, match=r"head\.weight: the stream has no such tensor"):
        shardckpt.Subscriber(tmp_path).stage().commit({"embed.weight": shared, "head.weight": alias(shared)})
    assert not shared.any()


class LazyEngine:
    """An engine that loads nothing of a version that its server holds."""

    def __init__(self) -> None:
        self.staged: Any = None
        self.tensors: dict[str, torch.Tensor] = {}

    def apply(self, changes: Iterable[TensorChange]) -> None:
        if not self.staged.is_held:
            self.tensors = dict(self.staged.iter_tensors())


def test_a_held_version_is_not_held_by_another_engine(tmp_path: Path) -> None:
    """Otherwise the second engine would serve what it had before, under the version's label."""
    publish(tmp_path, 1)
    subscriber, engines = shardckpt.Subscriber(tmp_path), (LazyEngine(), LazyEngine())
    for engine in engines:
        engine.staged = subscriber.stage(1)
        engine.staged.commit(engine)
        assert is_version(engine.tensors, 1)
    loaded = engines[1].tensors["a"]
    engines[1].staged = subscriber.stage(1)
    engines[1].staged.commit(engines[1])
    assert engines[1].tensors["a"] is loaded, "it has that version"
