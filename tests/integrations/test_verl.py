"""verl's actor ranks publish a version, and all workers of a rollout load it, or none counts it as loaded.

verl 0.9.1's registry, manager and worker are real, without Ray's processes: see `Group`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardckpt
from shardckpt.errors import PoisonedError, SourceNotFoundError, UsageError
from shardckpt.stream.receive.subscriber import SubscriberState
from tests.kit.ranks.harness import run

base = pytest.importorskip("verl.checkpoint_engine.base", exc_type=ImportError)

from shardckpt.integrations.verl import StreamCheckpointEngine  # noqa: E402

Weights = dict[str, torch.Tensor]


class Group:
    """A worker group whose workers are engines in this process; verl calls them by `execute_checkpoint_engine`."""

    def __init__(self, *engines: Any) -> None:
        self.engines, self.world_size = engines, len(engines)

    def execute_checkpoint_engine(self, method: list[str], **values: list[Any]) -> list[Any]:
        """Call a method on each worker, with its own values."""
        return [
            getattr(engine, method[at])(**{name: each[at] for name, each in values.items()})
            for at, engine in enumerate(self.engines)
        ]


@pytest.fixture
def connect(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return verl's own exchange before each update."""
    monkeypatch.setattr(base.ray, "get", lambda answers: answers)
    config = SimpleNamespace(backend="shardckpt", custom_backend_module="shardckpt.integrations.verl")

    def build(actor: Group, rollout: Group) -> None:
        base.CheckpointEngineManager(config, actor, []).build_process_group(rollout)

    return build


class Rollout:
    """A server adapter, which notes what it gets."""

    def __init__(self, stops_after: int | None = None) -> None:
        self.weights: Weights = {}
        self.stops_after = stops_after

    async def update_weights(self, weights: AsyncIterator[tuple[str, torch.Tensor]], **_: Any) -> None:
        """Take the tensors."""
        async for name, tensor in weights:
            self.weights[name] = tensor
            if self.stops_after == len(self.weights):
                raise RuntimeError("the rollout is gone")


def make(url: Path, **options: Any) -> Any:
    """Make an engine as verl does."""
    return base.CheckpointEngineRegistry.new("shardckpt", bucket_size=1 << 20, url=str(url), **options)


def make_weights(number: int) -> Weights:
    return {"a": torch.full((2, 3), float(number)), "b": torch.arange(4.0), "c": torch.full((2,), -float(number))}


def send(engine: Any, number: int, step: int | None) -> dict[str, Any]:
    metrics: dict[str, Any] = asyncio.run(engine.send_weights(iter(make_weights(number).items()), global_steps=step))
    return metrics


def load(engine: Any, rollout: Rollout, step: int | None) -> None:
    """Load a version as verl's worker of a rollout does."""
    worker = base.CheckpointEngineWorker.__new__(base.CheckpointEngineWorker)
    worker.checkpoint_engine, worker.server_adapter = engine, rollout
    asyncio.run(base.CheckpointEngineWorker.update_weights.__wrapped__(worker, global_steps=step))


def are_equal(found: Weights, number: int) -> bool:
    expected = make_weights(number)
    return found.keys() == expected.keys() and all(
        torch.equal(found[name], expected[name].bfloat16()) for name in found
    )


def test_importing_the_module_registers_an_engine() -> None:
    assert base.CheckpointEngineRegistry.get("shardckpt") is StreamCheckpointEngine
    assert StreamCheckpointEngine.wire_format == "named_tensors"
    assert not StreamCheckpointEngine.__abstractmethods__


def test_rollouts_load_the_step_that_the_first_rank_publishes(connect: Any, tmp_path: Path) -> None:
    actor, rollout = Group(make(tmp_path, is_master=True), make(tmp_path, is_master=False)), Group(make(tmp_path))
    for step in (3, 4):
        connect(actor, rollout)
        assert send(actor.engines[1], step, step) == {}
        assert send(actor.engines[0], step, step) == {"shardckpt/version": step}
        loaded = Rollout()
        load(rollout.engines[0], loaded, step)
        assert are_equal(loaded.weights, step), "every tensor, changed or not"
        for engine in (*actor.engines, *rollout.engines):
            engine.finalize()


def test_a_rollout_waits_until_the_version_is_published(connect: Any, tmp_path: Path) -> None:
    actor, rollout = Group(make(tmp_path)), Group(make(tmp_path))
    connect(actor, rollout)

    async def update() -> Weights:
        loaded = Rollout()
        receiving = asyncio.create_task(loaded.update_weights(rollout.engines[0].receive_weights(1)))
        await asyncio.sleep(0.2)
        assert not receiving.done() and not loaded.weights
        await actor.engines[0].send_weights(iter(make_weights(1).items()), 1)
        await receiving
        return loaded.weights

    assert are_equal(asyncio.run(update()), 1)


def test_a_step_that_is_trained_again_is_not_taken_from_the_first_time(connect: Any, tmp_path: Path) -> None:
    first = Group(make(tmp_path))
    for step in (1, 2, 3):
        connect(first, Group())
        send(first.engines[0], step, step)
    restarted, rollout = Group(make(tmp_path)), Group(make(tmp_path))
    for step, expected in ((2, 4), (3, 5), (9, 9)):
        connect(restarted, rollout)
        loaded = Rollout()
        with pytest.raises(SourceNotFoundError, match=f"version {expected} is not published"):
            rollout.engines[0]._timeout_s = 0.0
            load(rollout.engines[0], loaded, step)
        assert send(restarted.engines[0], 10 + step, step) == {"shardckpt/version": expected}
        load(rollout.engines[0], loaded, step)
        assert are_equal(loaded.weights, 10 + step)


def test_updates_without_a_step_are_numbered(connect: Any, tmp_path: Path) -> None:
    actor, rollout = Group(make(tmp_path)), Group(make(tmp_path))
    for number in (1, 2):
        connect(actor, rollout)
        send(actor.engines[0], number, None)
        loaded = Rollout()
        load(rollout.engines[0], loaded, None)
        assert are_equal(loaded.weights, number)


def test_a_rollout_that_stops_early_has_no_version_until_the_next_update(connect: Any, tmp_path: Path) -> None:
    actor, rollout = Group(make(tmp_path)), Group(make(tmp_path))
    engine = rollout.engines[0]
    for step in (1, 2):
        connect(actor, rollout)
        send(actor.engines[0], step, step)
        if step == 1:
            load(engine, Rollout(), step)
    with pytest.raises(RuntimeError, match="the rollout is gone"):
        load(engine, Rollout(stops_after=1), 2)
    assert engine._subscriber.label == "poisoned:2"
    loaded = Rollout()
    load(engine, loaded, 2)
    assert are_equal(loaded.weights, 2)
    assert (engine._subscriber.state, engine._subscriber.label) == (SubscriberState.READY, "2")


def test_an_update_that_was_dropped_is_ended_by_the_next_one(connect: Any, tmp_path: Path) -> None:
    actor, rollout = Group(make(tmp_path)), Group(make(tmp_path))
    connect(actor, rollout)
    send(actor.engines[0], 1, 1)

    async def drop_and_load() -> Weights:
        dropped = rollout.engines[0].receive_weights(1)
        await anext(dropped)
        loaded = Rollout()
        await loaded.update_weights(rollout.engines[0].receive_weights(1))
        await dropped.aclose()  # too late to matter
        return loaded.weights

    assert are_equal(asyncio.run(drop_and_load()), 1)
    assert rollout.engines[0]._subscriber.label == "1"


def gather(number: int) -> Iterator[tuple[str, torch.Tensor]]:
    for name, value in make_weights(number).items():
        dist.all_reduce(value, op=dist.ReduceOp.MAX)
        yield name, value


def be_an_actor(rank: int, world: int, url: Path) -> list[dict[str, Any]]:
    engine = make(url, is_master=rank == 0)
    made = []
    for step in (1, 2):
        metadata = engine.prepare()
        dist.barrier()
        actor, _ = engine.build_topology(world, 1, [metadata] * (world + 1))
        engine.init_process_group(**{name: values[rank] for name, values in actor.items()})
        made.append(asyncio.run(engine.send_weights(gather(step), step)))
    return made


def test_all_actor_ranks_gather_and_the_first_one_publishes(tmp_path: Path) -> None:
    assert run(2, be_an_actor, tmp_path) == [[{"shardckpt/version": step} for step in (1, 2)], [{}, {}]]
    assert are_equal(dict(shardckpt.Subscriber(tmp_path).stage().iter_tensors()), 2)


def be_a_rollout(rank: int, world: int, url: Path) -> tuple[str, bool]:
    """Let one worker fail, then load again."""
    engine, loaded = make(url), Rollout()
    engine.init_process_group(rank, 1)
    with pytest.raises((PoisonedError, RuntimeError)):
        load(engine, Rollout(stops_after=1 if rank else None), 1)
    label = engine._subscriber.label
    load(engine, loaded, 1)
    return label, are_equal(loaded.weights, 1)


def test_if_a_worker_fails_no_worker_of_its_rollout_has_the_version(tmp_path: Path) -> None:
    with shardckpt.Publisher(tmp_path) as publisher:
        publisher.publish(1, make_weights(1)).result()
    assert run(2, be_a_rollout, tmp_path) == [("poisoned:1", True)] * 2


def test_values_from_the_config_are_checked(tmp_path: Path) -> None:
    make(tmp_path, anchors={"max_chain": 4, "keep": 2}, key_map={"^a": "x"}, dtype=None)
    with pytest.raises(UsageError, match="the engine needs a stream"):
        base.CheckpointEngineRegistry.new("shardckpt", bucket_size=1)
    with pytest.raises(TypeError, match="unexpected keyword argument 'urll'"):
        make(tmp_path, urll="x")
