"""The functions of `shardckpt.integrations.dcp` do what those of torch do; torch's own are the oracle."""

from __future__ import annotations

import copy
import importlib
import inspect
import io
import os
import signal
import threading
import time
from collections import OrderedDict
from concurrent.futures import Future
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint import CheckpointException, DefaultLoadPlanner, state_dict_saver
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import shardckpt
import shardckpt.integrations.dcp as dcp
from shardckpt.checkpoint.dcp_storage_writer import StorageWriter
from shardckpt.events import OperationEvent, subscribe
from tests.kit.ranks.harness import outcomes, raised_everywhere, run

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:.*overwriting since")


class Counter:
    """A `Stateful`, which counts its calls."""

    def __init__(self, value: int) -> None:
        self.value, self.calls = value, []

    def state_dict(self) -> dict[str, Any]:
        self.calls.append("state_dict")
        return {"value": self.value, "tensor": torch.full((3,), float(self.value))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.calls.append("load_state_dict")
        self.value = state["value"]
        assert state["tensor"].tolist() == [self.value] * 3


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(equal, one, other))
    return type(one) is type(other) and one == other


@pytest.mark.parametrize("name", ["save", "async_save", "load"])
def test_the_arguments_are_those_of_torch(name: str) -> None:
    ours, theirs = (inspect.signature(getattr(module, name)).parameters for module in (dcp, torch_dcp))
    assert list(ours)[: len(theirs)] == list(theirs)
    assert [each.kind for each in ours.values()][: len(theirs)] == [each.kind for each in theirs.values()]


def test_a_writer_or_reader_by_position_is_taken_with_a_warning_as_by_torch(tmp_path: Path) -> None:
    for module in (torch_dcp, dcp):
        path, state = str(tmp_path / module.__name__), {"a": torch.zeros(2)}
        with pytest.warns(UserWarning, match="argument order of save has been changed|save takes its store by name"):
            module.save({"a": torch.ones(2)}, dcp.StorageWriter(path))
        with pytest.warns(UserWarning, match="argument order of load has been changed|load takes its store by name"):
            module.load(state, dcp.StorageReader(path))
        assert state["a"].all()
        with pytest.raises((TypeError, AssertionError)):
            module.save({}, dcp.StorageWriter(path), storage_writer=dcp.StorageWriter(path))
        with pytest.raises(TypeError):
            module.save({}, dcp.StorageWriter(path), None)


class Scaling(torch.nn.Linear):
    """A module whose extra state is a stream, as that of Transformer Engine."""

    scale = 1.0

    def get_extra_state(self) -> io.BytesIO:
        stream = io.BytesIO()
        torch.save({"scale": self.scale}, stream)
        return stream

    def set_extra_state(self, state: io.BytesIO) -> None:
        assert type(state) is io.BytesIO
        state.seek(0)
        self.scale = torch.load(state)["scale"]


def test_streams_of_bytes_in_a_state_are_saved_and_come_back(tmp_path: Path) -> None:
    model, stream = Scaling(2, 2), io.BytesIO(b"content")
    model.scale = 3.0
    stream.seek(4)
    shardckpt.save({"m": model, "s": stream, "p": shardckpt.PerRank([stream])}, tmp_path / "step")
    other, mine = Scaling(2, 2), shardckpt.PerRank([io.BytesIO()])
    state = {"m": other, "s": io.BytesIO(), "p": mine}
    shardckpt.load(state, tmp_path / "step")
    assert [other.scale, state["s"].getvalue(), mine.held[0].read()] == [3.0, b"content", b"ent"]
    for module in (torch_dcp, dcp):
        path, state = str(tmp_path / module.__name__), {"s": io.BytesIO(), "m": Scaling(2, 2).state_dict()}
        module.save({"s": stream, "m": model.state_dict()}, checkpoint_id=path)
        module.load(state, checkpoint_id=path)
        assert state["s"].getvalue() == b"content"
        other.set_extra_state(state["m"]["_extra_state"])
        assert other.scale == 3.0


def test_all_other_names_are_those_of_torch() -> None:
    assert dcp.DefaultLoadPlanner is DefaultLoadPlanner
    assert dcp.FileSystemReader is torch_dcp.FileSystemReader
    with pytest.raises(AttributeError):
        dcp.nothing_of_this_name  # noqa: B018
    with pytest.raises(ImportError):  # and not a second module, with other classes than torch's
        importlib.import_module("shardckpt.integrations.dcp.metadata")


DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.float64, torch.complex64]
TENSORS = st.builds(
    lambda shape, dtype, seed: (
        (torch.arange(int(torch.tensor(shape).prod()) if shape else 1) + seed).reshape(shape).to(dtype)
    ),
    st.lists(st.integers(0, 3), max_size=3),
    st.sampled_from(DTYPES),
    st.integers(0, 9),
)
VALUES = st.one_of(
    TENSORS,
    *(st.integers(), st.floats(allow_nan=False), st.text(max_size=3), st.binary(max_size=3), st.none(), st.booleans()),
    *(st.tuples(st.integers(), st.text(max_size=2)), st.sampled_from(DTYPES)),
)
KEYS = st.one_of(st.text("ab.1", min_size=1, max_size=2), st.integers(0, 3))
NESTED = st.recursive(
    VALUES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3), max_leaves=8
)
STATES = st.dictionaries(st.text("ab.1", min_size=1, max_size=2), NESTED, max_size=4)


def blank(state: Any) -> Any:
    """Return a state of the same shape with other values."""
    if isinstance(state, torch.Tensor):
        return torch.zeros_like(state)
    if isinstance(state, dict):
        return {key: blank(value) for key, value in state.items()}
    if isinstance(state, list):
        return [blank(value) for value in state]
    return "other"


@settings(max_examples=40)
@given(STATES)
def test_any_state_comes_back_as_torch_brings_it_back(state: dict[str, Any]) -> None:
    with TemporaryDirectory() as folder:
        try:
            torch_dcp.save(state, checkpoint_id=f"{folder}/torch")
        except CheckpointException:  # two values of one name
            with pytest.raises(CheckpointException):
                dcp.save(state, checkpoint_id=f"{folder}/ours")
            return
        try:
            dcp.save(state, checkpoint_id=f"{folder}/ours")
        except (
            shardckpt.errors.FormatError
        ) as error:  # `a.b` beside `a: {b}` are two names for torch only if one is a dict
            assert "inside another" in str(error)
            return
        expected, ours, foreign = blank(state), blank(state), blank(state)
        try:
            torch_dcp.load(expected, checkpoint_id=f"{folder}/torch")
        except CheckpointException:  # it looks for names of an earlier version of its format
            return
        dcp.load(ours, checkpoint_id=f"{folder}/ours")
        assert equal(ours, expected)
        dcp.load(foreign, checkpoint_id=f"{folder}/torch")
        assert equal(foreign, expected), "from torch's own folder"


def test_stateful_objects_are_saved_and_loaded_by_their_methods(tmp_path: Path) -> None:
    saved, loaded = Counter(5), Counter(0)
    dcp.save(state_dict={"counter": saved, "ordered": OrderedDict(a=1)}, checkpoint_id=tmp_path / "step")
    state = {"counter": loaded, "ordered": OrderedDict(a=0)}
    dcp.load(state_dict=state, checkpoint_id=tmp_path / "step")
    assert (saved.calls, loaded.calls) == (["state_dict"], ["state_dict", "load_state_dict"])
    assert (loaded.value, state["ordered"], state["counter"]) == (5, OrderedDict(a=1), loaded)


def test_missing_values_are_errors_unless_partial_and_extra_ones_are_not(tmp_path: Path) -> None:
    dcp.save({"a": torch.ones(2), "b": 1}, checkpoint_id=tmp_path / "step")
    state = {"a": torch.zeros(2), "c": {"d": 3}}
    with pytest.raises(CheckpointException, match=r"Missing key in checkpoint state_dict: c\.d"):
        dcp.load(state, checkpoint_id=tmp_path / "step")
    dcp.load(state, checkpoint_id=tmp_path / "step", planner=DefaultLoadPlanner(allow_partial_load=True))
    assert equal(state, {"a": torch.ones(2), "c": {"d": 3}})
    with pytest.raises(CheckpointException, match="Size mismatch"):
        dcp.load({"a": torch.zeros(3)}, checkpoint_id=tmp_path / "step")


def test_metadata_says_where_the_checkpoint_is_and_which_save_wrote_it(tmp_path: Path) -> None:
    found = []
    for value in (1, 2):
        dcp.save({"a": torch.full((2,), value)}, checkpoint_id=tmp_path / "step")
        found.append(dcp.StorageReader(tmp_path / "step").read_metadata().storage_meta)
    assert [meta.checkpoint_id for meta in found] == [str(tmp_path / "step")] * 2
    assert found[0].save_id != found[1].save_id


def test_errors_of_shardckpt_are_raised_as_themselves(tmp_path: Path) -> None:
    with pytest.raises(shardckpt.errors.UnsupportedError) as error:
        dcp.save({"odd": print}, checkpoint_id=tmp_path / "step")
    assert isinstance(error.value.__cause__, CheckpointException)
    with pytest.raises(shardckpt.errors.SourceNotFoundError):
        dcp.load({"a": torch.ones(1)}, checkpoint_id=tmp_path / "step")
    with pytest.raises(shardckpt.errors.UsageError):
        dcp.save({"a": torch.ones(1)})
    assert list(tmp_path.iterdir()) == []


def test_a_background_save_has_the_values_of_its_call(tmp_path: Path) -> None:
    if not hasattr(state_dict_saver, "AsyncCheckpointerType"):
        pytest.skip("this torch does not copy tensors on the CPU, which is its own behavior")
    state = {"a": torch.ones(1000), "n": {"b": 1}}
    saving = dcp.async_save(state, checkpoint_id=tmp_path / "step")
    state["a"].zero_()
    assert isinstance(saving, Future)
    assert not saving.cancel()
    assert list(saving.result(30).state_dict_metadata) == ["a", "n.b"]
    assert shardckpt.load(tmp_path / "step")["a"].sum() == 1000
    refused = dcp.async_save({"odd": print}, checkpoint_id=tmp_path / "odd")
    assert isinstance(refused.exception(30), shardckpt.errors.UnsupportedError)
    assert [path.name for path in tmp_path.iterdir()] == ["step"]


def test_writers_and_readers_of_torch_keep_torchs_format(tmp_path: Path) -> None:
    dcp.save({"a": torch.ones(2)}, storage_writer=dcp.FileSystemWriter(tmp_path / "dcp"))
    assert (tmp_path / "dcp" / ".metadata").exists()
    state = {"a": torch.zeros(2)}
    dcp.load(state, storage_reader=dcp.FileSystemReader(tmp_path / "dcp"))
    assert state["a"].sum() == 2


def test_every_operation_has_one_event(tmp_path: Path) -> None:
    seen: list[OperationEvent] = []
    unsubscribe = subscribe(seen.append)
    try:
        dcp.save({"a": torch.ones(2)}, checkpoint_id=tmp_path / "step-3")
        dcp.async_save({"a": torch.ones(2)}, checkpoint_id=tmp_path / "step-4").result(30)
        dcp.load({"a": torch.ones(2)}, checkpoint_id=tmp_path / "step-3")
        with pytest.raises(shardckpt.errors.SourceNotFoundError):
            dcp.load({"a": torch.ones(2)}, checkpoint_id=tmp_path / "none")
    finally:
        unsubscribe()
    assert [(event.operation, event.step, event.error is None) for event in seen] == [
        *(("save", 3, True), ("save", 4, True), ("load", 3, True)),
        ("load", None, False),
    ]
    assert seen[0].nbytes > 8
    assert seen[2].nbytes == 8
    assert [getattr(event, "is_background", None) for event in seen[:2]] == [False, True]


# ------------------------------------------------------------------------------------------------ several ranks


def sharded_state(rank: int, world: int, scale: float) -> dict[str, Any]:
    """Return DTensors, replicated data, and keys that only some ranks have, as pipeline stages and loaders have."""
    flat = init_device_mesh("cpu", (world,))
    full = torch.arange(35.0).reshape(7, 5)
    tensors = {
        "rows": distribute_tensor(full * scale, flat, [Shard(0)]),
        "columns": distribute_tensor(full * scale, flat, [Shard(1)]),
        "replicated": distribute_tensor(full * scale, flat, [Replicate()]),
        "few": distribute_tensor(torch.ones(1, 2) * scale, flat, [Shard(0)]),
        "none": distribute_tensor(torch.ones(0, 2), flat, [Shard(1)]),
        "plain": torch.ones(4) * scale,
        "count": int(9 * scale),
    }
    return {"model": tensors, "loader": {f"rank_{rank}": {"seen": int((rank + 1) * scale), "at": b"x"}}}


def full_state(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: full_state(value) for key, value in state.items()}
    return state.full_tensor() if isinstance(state, DTensor) else state


def save_both(rank: int, world: int, folder: Path) -> None:
    state = sharded_state(rank, world, 1.0)
    dcp.save(state, checkpoint_id=folder / "ours")
    torch_dcp.save(state, checkpoint_id=folder / "torch")
    dcp.async_save(state, checkpoint_id=folder / "background").result(60)


def load_all(rank: int, world: int, folder: Path, names: list[str]) -> list[Any]:
    loaded = []
    for name in names:
        state = sharded_state(rank, world, 0.0)
        if world != 2:
            del state["loader"]
        (torch_dcp if name == "torch" else dcp).load(state, checkpoint_id=folder / name)
        foreign = copy.deepcopy(sharded_state(rank, world, 0.0)["model"])
        dcp.load({"model": foreign}, checkpoint_id=folder / "torch")
        assert equal(full_state(foreign), full_state(state["model"])), "torch's folder through our reader"
        loaded.append(full_state(state))
    return loaded


def test_ranks_save_and_load_as_torch_does_on_any_number_of_them(tmp_path: Path) -> None:
    run(2, save_both, tmp_path)
    for world in (2, 1, 3):
        for rank, (expected, *others) in enumerate(run(world, load_all, tmp_path, ["torch", "ours", "background"])):
            assert all(equal(other, expected) for other in others)
            assert expected["model"]["count"] == 9
            assert world != 2 or expected["loader"] == {f"rank_{rank}": {"seen": rank + 1, "at": b"x"}}
    tree = shardckpt.load(tmp_path / "ours")
    assert torch.equal(tree["model"]["rows"], torch.arange(35.0).reshape(7, 5))
    assert set(tree["loader"]) == {"rank_0", "rank_1"}
    assert shardckpt.verify(str(tmp_path / "ours")).ok
    pieces = {each.name: each.pieces for each in shardckpt.inspect(str(tmp_path / "ours")).tensors}
    assert (pieces["model.rows"], pieces["model.few"], pieces["model.plain"]) == (2, 1, 1)


def reduce_during_a_save(rank: int, world: int, folder: Path) -> None:
    is_planned, is_reduced = threading.Event(), threading.Event()

    class Writer(StorageWriter):
        """Rank 0 takes part in the save before the loop goes on, rank 1 after it."""

        def prepare_local_plan(self, plan: Any) -> Any:
            if rank:
                is_reduced.wait(30)
            is_planned.set()
            return super().prepare_local_plan(plan)

    for step in ("step-1", "step-2"):
        saving = dcp.async_save({"a": torch.ones(2)}, storage_writer=Writer(folder / step))
        if not rank:
            is_planned.wait(30)
            time.sleep(0.2)  # until the thread waits for the other rank
        total = torch.ones(())
        dist.all_reduce(total)
        assert total == world
        is_reduced.set()
        saving.result(30)


def test_a_background_save_leaves_the_collectives_of_the_loop_alone(tmp_path: Path) -> None:
    run(2, reduce_during_a_save, tmp_path)
    assert shardckpt.verify(str(tmp_path / "step-1")).ok


def refuse_on_one_rank(rank: int, world: int, folder: Path) -> None:
    state = sharded_state(rank, world, 1.0)
    if rank:
        state["loader"]["odd"] = print
    try:
        dcp.save(state, checkpoint_id=folder / "step")
    finally:
        dist.barrier()
        assert list(folder.iterdir()) == [], "the files of all ranks are removed"
        del state["loader"]
        dcp.save(state, checkpoint_id=folder / "step", process_group=dist.group.WORLD)
        assert shardckpt.load(folder / "step")["model"]["count"] == 9
        if rank and "no_dist" in inspect.signature(torch_dcp.load).parameters:
            dcp.load({"model": {"count": 0}}, checkpoint_id=folder / "step", no_dist=True)


def test_an_error_of_one_rank_is_raised_on_all_and_leaves_nothing(tmp_path: Path) -> None:
    for raised in raised_everywhere(2, refuse_on_one_rank, tmp_path):
        assert raised.is_a(shardckpt.errors.UnsupportedError)
        assert "loader.odd" in raised.message


def be_killed_in_a_save(rank: int, world: int, folder: Path) -> None:
    dcp.save(sharded_state(rank, world, 1.0), checkpoint_id=folder / "step")
    if rank:
        StorageWriter.write_data = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    dcp.save(sharded_state(rank, world, 2.0), checkpoint_id=folder / "step")


def test_a_killed_rank_leaves_the_former_step(tmp_path: Path) -> None:
    first, killed = outcomes(2, be_killed_in_a_save, tmp_path)
    assert "died" in (killed.waits or "")
    assert first.raised is not None
    assert shardckpt.load(tmp_path / "step")["model"]["count"] == 9
