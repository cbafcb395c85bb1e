"""Statistics that a save stores are those of the values, whoever wrote which part, and however its plan was made."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardckpt
from shardckpt.boxes import full_box
from shardckpt.checkpoint.save import payload_writer
from shardckpt.checkpoint.save.payload_writer import ChunkMeter
from shardckpt.core import fully_shard
from shardckpt.native.payload import PayloadChunk
from shardckpt.offline import stats as offline_stats
from shardckpt.readers.registry import open_checkpoint
from tests.kit.ranks.harness import run
from tests.kit.runs.command import run_here
from tests.kit.writers.native_writer import commit

DTYPES = [
    *(torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.uint8, torch.bool, torch.complex64),
]


def saved(state: Any, path: Path, **options: Any) -> dict[str, shardckpt.results.TensorStats]:
    """Save with statistics, and return what `stats` finds; it must be what it computes."""
    shardckpt.save(state, path, stats=True, **options)
    return read(path)


def read(path: Path) -> dict[str, shardckpt.results.TensorStats]:
    stored, computed = (shardckpt.stats(path, part="all", recompute=again) for again in (False, True))
    assert [fields(tensor) for tensor in stored.tensors] == [fields(tensor) for tensor in computed.tensors]
    assert computed.stored == 0
    return {tensor.name: tensor for tensor in stored.tensors}


def fields(tensor: shardckpt.results.TensorStats) -> tuple[Any, ...]:
    sums = [None if value is None else pytest.approx(value, rel=1e-12, abs=1e-12) for value in (tensor.mean, tensor.l2)]
    counts = tensor.nans, tensor.infs, tensor.zeros, tensor.min, tensor.max
    return tensor.name, tensor.dtype, tensor.shape, *counts, *sums


def test_they_are_those_of_the_values_in_every_dtype(tmp_path: Path) -> None:
    values = torch.arange(-3000, 3000).reshape(60, 100) % 97
    state = {f"t{number}": values.to(dtype) for number, dtype in enumerate(DTYPES)}
    state |= {"strided": values.float().t()[::2], "scalar": torch.tensor(7.0), "none": torch.empty(0, 3)}
    state |= {"bad": torch.tensor([float("nan"), float("inf"), -2.0, 0.0])}
    found = saved(state, tmp_path / "a")
    assert all(tensor.is_stored for tensor in found.values())
    assert (found["bad"].nans, found["bad"].infs, found["bad"].min) == (1, 1, -2.0)


def test_none_are_stored_unasked(tmp_path: Path) -> None:
    shardckpt.save({"a": torch.ones(3)}, tmp_path / "a")
    assert not read(tmp_path / "a")["a"].is_stored
    [manifest] = (tmp_path / "a").glob("*.manifest.json")
    content = json.loads(manifest.read_bytes())
    assert "stats" not in content


def test_statistics_that_are_stored_are_not_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shardckpt.save({"a": torch.ones(3)}, tmp_path / "a", stats=True)
    monkeypatch.delattr(offline_stats, "read_values")
    assert shardckpt.stats(tmp_path / "a").tensors[0].l2 == 3**0.5


def test_inspect_shows_them_without_reading_tensors(tmp_path: Path) -> None:
    shardckpt.save({"a": torch.tensor([float("nan"), 1.0]), "b": torch.ones(2)}, tmp_path / "a", stats=True)
    found = shardckpt.inspect(tmp_path / "a")
    assert [(each.name, each.nans, each.l2) for each in found.stats] == [("a", 1, 1.0), ("b", 0, 2**0.5)]
    assert "statistics stored at save: 2 tensors, 1 NaN, 0 Infs" in run_here("inspect", tmp_path / "a").out
    shardckpt.save({"a": torch.ones(2)}, tmp_path / "b")
    assert shardckpt.inspect(tmp_path / "b").stats == ()


def test_a_tied_tensor_has_those_of_the_stored_one(tmp_path: Path) -> None:
    shared = torch.ones(3)
    assert all(tensor.is_stored for tensor in saved({"a": shared, "b": shared}, tmp_path / "a").values())


@pytest.mark.parametrize("verb", ["save", "async_save", "Checkpointer"])
def test_every_way_to_save_stores_them(verb: str, tmp_path: Path) -> None:
    state = {"a": torch.arange(5.0)}
    if verb == "save":
        shardckpt.save(state, tmp_path / "a", stats=True)
    elif verb == "async_save":
        handle = shardckpt.async_save(state, tmp_path / "a", stats=True)
        state["a"].fill_(99)
        handle.result()
    else:
        checkpointer = shardckpt.Checkpointer(tmp_path)
        checkpointer.save(1, state, stats=True)
        (tmp_path / "a").symlink_to(checkpointer.path(1))
    assert shardckpt.stats(tmp_path / "a").tensors[0] == read(tmp_path / "a")["a"]
    assert (read(tmp_path / "a")["a"].max, read(tmp_path / "a")["a"].is_stored) == (4.0, True)


def test_a_save_with_a_cached_plan_measures_its_own_values(tmp_path: Path) -> None:
    state = {"a": torch.zeros(1000), "b": torch.ones(8)}
    for number in range(3):
        state["a"].fill_(number)
        assert saved(state, tmp_path / f"{number}")["a"].max == number
    shardckpt.save(state, tmp_path / "without")
    assert not read(tmp_path / "without")["a"].is_stored


class TestIncrementalSaves:
    def test_unchanged_tensors_keep_the_statistics_of_their_base(self, tmp_path: Path) -> None:
        state = {"a": torch.arange(100.0), "b": torch.ones(50)}
        saved(state, tmp_path / "one", store_digests=True)
        state["b"].fill_(5)
        found = saved(state, tmp_path / "two", base=tmp_path / "one")
        assert all(tensor.is_stored for tensor in found.values())
        shardckpt.save(state, tmp_path / "three", base=tmp_path / "two")
        assert all(tensor.is_stored for tensor in read(tmp_path / "three").values())

    def test_those_that_the_base_lacks_are_computed_from_memory(self, tmp_path: Path) -> None:
        state = {"a": torch.arange(100.0), "b": torch.ones(50)}
        shardckpt.save(state, tmp_path / "one", store_digests=True)
        found = saved(state, tmp_path / "two", base=tmp_path / "one")
        assert all(tensor.is_stored for tensor in found.values())

    def test_a_tensor_of_which_a_part_is_unknown_has_none(self, tmp_path: Path) -> None:
        def body(rank: int, world: int) -> None:
            model = fully_shard(nn.Linear(16, 16, bias=False))
            shardckpt.save(model.state_dict(), tmp_path / "one", store_digests=True, stats=True)
            with torch.no_grad():
                model.weight.to_local().add_(rank)
            shardckpt.save(model.state_dict(), tmp_path / "two", base=tmp_path / "one")
            shardckpt.save(model.state_dict(), tmp_path / "three", base=tmp_path / "two", stats=True)

        run(2, body)
        assert not read(tmp_path / "two")["weight"].is_stored
        assert read(tmp_path / "three")["weight"].is_stored

    def test_frozen_parameters_keep_those_of_their_base(self, tmp_path: Path) -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        model[0].requires_grad_(False)
        saved({"model": model}, tmp_path / "one")
        found = saved({"model": model}, tmp_path / "two", base=tmp_path / "one", trainable_only=True)
        assert found["0.weight"].is_stored
        assert found["1.weight"].is_stored


def test_parts_of_ranks_are_merged_and_replicas_count_once(tmp_path: Path) -> None:
    def body(rank: int, world: int) -> None:
        torch.manual_seed(0)
        model = fully_shard(nn.Linear(7, 13))
        state = {"model": model, "same": torch.arange(1000)}
        for name in ("one", "two"):
            shardckpt.save(state, tmp_path / name, stats=True)
            with torch.no_grad():
                model.weight.to_local().mul_(2)

    run(2, body)
    for name in ("one", "two"):
        found = read(tmp_path / name)
        assert all(tensor.is_stored for tensor in found.values())
        assert (found["same"].shape, found["same"].zeros, found["same"].max) == ((1000,), 1, 999)


class TestOtherNumbersOfWriters:
    """Statistics are kept where the new pieces are those of the source, or consist of them."""

    @pytest.fixture
    def two(self, tmp_path: Path) -> Path:
        def body(rank: int, world: int) -> None:
            torch.manual_seed(0)
            state = {"model": fully_shard(nn.Linear(7, 12)), "same": torch.arange(1000)}
            shardckpt.save(state, tmp_path / "two", stats=True)

        run(2, body)
        return tmp_path / "two"

    @pytest.mark.parametrize(("world_size", "stored"), [(1, 3), (2, 2), (4, 0)])
    def test_reshard_keeps_those_of_pieces_that_it_does_not_split(
        self, two: Path, world_size: int, stored: int
    ) -> None:
        shardckpt.reshard(two, two.parent / "out", world_size=world_size)
        found = read(two.parent / "out")
        assert sum(tensor.is_stored for tensor in found.values()) == stored
        assert shardckpt.verify(two.parent / "out").ok

    def test_a_step_for_hugging_face_keeps_those_of_tensors_that_are_not_cast(self, two: Path) -> None:
        shardckpt.consolidate(two, two.parent / "same", to="native")
        shardckpt.consolidate(two, two.parent / "cast", to="native", dtype="bf16", keep_fp32=["bias"])
        assert [tensor.is_stored for tensor in read(two.parent / "same").values()] == [True, True]
        assert {name: tensor.is_stored for name, tensor in read(two.parent / "cast").items()} == {
            "weight": False,
            "bias": True,
        }

    def test_a_copy_keeps_them(self, two: Path) -> None:
        shardckpt.copy(two, two.parent / "copy")
        assert all(tensor.is_stored for tensor in read(two.parent / "copy").values())


@pytest.mark.parametrize("nbytes", [1, 3, 7, 64])
def test_elements_that_are_split_between_two_writes_count_once(nbytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(payload_writer, "_PART_BYTES", 16)
    tensors = [torch.arange(9, dtype=torch.int8), torch.arange(5.0), torch.empty(0), torch.tensor([1 + 1j])]
    chunks = [
        PayloadChunk((str(at),), tuple(t.shape), str(t.dtype).removeprefix("torch."), full_box(tuple(t.shape)))
        for at, t in enumerate(tensors)
    ]
    data = b"header" + b"".join(t.view(torch.uint8).numpy().tobytes() for t in tensors)
    meter = ChunkMeter(chunks, len("header"))
    for at in range(0, len(data), nbytes):
        for task in reversed(meter.split(memoryview(data)[at : at + nbytes])):
            task()
    assert [found.size for found in meter.stats()] == [9, 5, 0, 1]
    assert [found.total for found in meter.stats()] == [36.0, 10.0, 0.0, abs(1 + 1j)]


def test_statistics_of_another_number_of_values_are_not_believed(tmp_path: Path) -> None:
    """A manifest that a program other than this one wrote may be wrong."""
    shardckpt.save({"a": torch.arange(4.0)}, tmp_path / "a", stats=True)
    assert read(tmp_path / "a")["a"].is_stored
    contents = open_checkpoint(str(tmp_path / "a")).contents
    [record] = contents.arrays
    wrong = record._replace(stats=(5).to_bytes(8, "big") + record.stats[8:])
    commit(tmp_path / "a", replace(contents, arrays=(wrong,)))
    assert not read(tmp_path / "a")["a"].is_stored
