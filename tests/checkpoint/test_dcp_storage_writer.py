"""With our writer and reader, torch's own DCP functions save and load steps: their content, their faults."""

from __future__ import annotations

import inspect
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from torch.distributed.checkpoint import CheckpointException, DefaultLoadPlanner, DefaultSavePlanner, Metadata, SavePlan

import shardckpt
from shardckpt.checkpoint.dcp_storage_reader import StorageReader
from shardckpt.checkpoint.dcp_storage_writer import StorageWriter

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def small_state(scale: float = 1.0) -> dict[str, Any]:
    return {
        "model": {"weight": torch.arange(12.0).reshape(3, 4) * scale, "bias": torch.ones(3) * scale},
        "step": int(7 * scale),
        "groups": [{"lr": 0.5 * scale, "betas": (0.9, 0.95)}],
    }


def save(state: dict[str, Any], path: Path, **options: Any) -> None:
    torch_dcp.save(state, storage_writer=StorageWriter(path, **options))


def load(state: dict[str, Any], path: Path | str, **options: Any) -> dict[str, Any]:
    torch_dcp.load(state, storage_reader=StorageReader(path), **options)
    return state


def failure(error: pytest.ExceptionInfo[CheckpointException]) -> BaseException:
    return error.value.failures[0][0]


def test_torchs_functions_save_a_step_that_every_verb_reads(tmp_path: Path) -> None:
    save(small_state(), tmp_path / "step", custom_metadata={"run": "a"})
    assert shardckpt.verify(str(tmp_path / "step")).ok
    tree = shardckpt.load(tmp_path / "step")
    assert torch.equal(tree["model"]["weight"], small_state()["model"]["weight"])
    assert (tree["step"], tree["groups"]) == (7, small_state()["groups"])
    shardckpt.consolidate(str(tmp_path / "step"), str(tmp_path / "model.safetensors"))
    assert torch.equal(shardckpt.load(tmp_path / "model.safetensors")["bias"], torch.ones(3))
    assert load(small_state(0), tmp_path / "step")["step"] == 7


def test_values_with_tensors_and_arrays_in_them_come_back(tmp_path: Path) -> None:
    import numpy as np

    saved = {"pair": (torch.ones(2), {"at": [np.arange(3), "text"]}), "random": np.random.get_state()}
    save(saved, tmp_path / "step")
    loaded = load({"pair": None, "random": None}, tmp_path / "step")
    assert torch.equal(loaded["pair"][0], torch.ones(2))
    assert loaded["pair"][1]["at"][0].tolist() == [0, 1, 2]
    assert loaded["pair"][1]["at"][1] == "text"
    assert loaded["random"][1].tolist() == saved["random"][1].tolist()


def test_a_step_is_replaced_and_anything_else_refused(tmp_path: Path) -> None:
    step, other = tmp_path / "step", tmp_path / "other"
    save(small_state(), step)
    save(small_state(2), step)
    assert shardckpt.load(step)["step"] == 14
    with pytest.raises(CheckpointException) as error:
        save(small_state(), step, overwrite=False)
    assert isinstance(failure(error), shardckpt.errors.TargetExistsError)
    other.mkdir()
    (other / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointException) as error:
        save(small_state(), other)
    assert isinstance(failure(error), shardckpt.errors.TargetExistsError)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "step"]


@pytest.mark.parametrize("value", [print, torch.nn.Linear(1, 1), torch.eye(2).to_sparse()], ids=type)
def test_a_value_that_json_cannot_hold_is_refused_by_name(tmp_path: Path, value: Any) -> None:
    with pytest.raises(CheckpointException) as error:
        save({"good": torch.ones(2), "extra": {"odd": [value]}}, tmp_path / "step")
    assert isinstance(failure(error), shardckpt.errors.UnsupportedError)
    assert "extra.odd" in str(failure(error))
    assert list(tmp_path.iterdir()) == []


def test_tensors_without_dense_memory_are_neither_saved_nor_filled(tmp_path: Path) -> None:
    freed = torch.ones(3)
    save({"model": {"weight": freed}}, tmp_path / "step")
    freed.untyped_storage().resize_(0)
    for function, name in ((save, "other"), (load, "step")):
        with pytest.raises(CheckpointException) as error:
            function({"model": {"weight": freed}}, tmp_path / name)
        assert isinstance(failure(error), shardckpt.errors.UnsupportedError)
        assert "model.weight" in str(failure(error))
    with pytest.raises(CheckpointException) as error:
        load({"model": {"weight": torch.zeros(3).to_sparse()}}, tmp_path / "step")
    assert isinstance(failure(error), shardckpt.errors.UnsupportedError)
    assert [path.name for path in tmp_path.iterdir()] == ["step"]


def test_a_writer_that_began_another_save_does_not_finish_the_first(tmp_path: Path) -> None:
    writer = StorageWriter(tmp_path / "step")
    writer.prepare_global_plan([SavePlan([])])
    writer.reset(tmp_path / "other")
    with pytest.raises(shardckpt.errors.UsageError, match="a writer for each save"):
        writer.finish(Metadata({}), [[]])
    assert list(tmp_path.iterdir()) == []


class _Halving(DefaultSavePlanner):
    def resolve_data(self, write_item: Any) -> Any:
        data = super().resolve_data(write_item)
        return data.half() if isinstance(data, torch.Tensor) else data


def test_a_planner_that_resolves_another_tensor_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointException) as error:
        torch_dcp.save(small_state(), storage_writer=StorageWriter(tmp_path / "step"), planner=_Halving())
    assert isinstance(failure(error), shardckpt.errors.UnsupportedError)


class _Forgetting(DefaultSavePlanner):
    def create_global_plan(self, all_plans: list[Any]) -> Any:
        plans, metadata = super().create_global_plan(all_plans)
        del metadata.planner_data["step"]
        return plans, metadata


def test_values_without_a_path_are_saved_under_their_names(tmp_path: Path) -> None:
    torch_dcp.save(small_state(), storage_writer=StorageWriter(tmp_path / "step"), planner=_Forgetting())
    assert shardckpt.load(tmp_path / "step")["step"] == 7
    assert load(small_state(0), tmp_path / "step")["step"] == 7


def require_parameter(function: Any, name: str) -> None:
    if name not in inspect.signature(function).parameters:
        pytest.skip(f"this torch has no {name}")


def test_a_planner_with_cached_plans_is_refused(tmp_path: Path) -> None:
    require_parameter(DefaultSavePlanner, "enable_plan_caching")
    for name in ("one", "two"):
        planner = DefaultSavePlanner(enable_plan_caching=True)
        if name == "one":
            torch_dcp.save(small_state(), storage_writer=StorageWriter(tmp_path / name), planner=planner)
            continue
        with pytest.raises(CheckpointException) as error:
            torch_dcp.save(small_state(), storage_writer=StorageWriter(tmp_path / name), planner=planner)
        assert "enable_plan_caching=False" in str(failure(error))


def test_ranks_that_do_not_coordinate_are_refused(tmp_path: Path) -> None:
    require_parameter(torch_dcp.save, "use_collectives")
    with pytest.raises(shardckpt.errors.UnsupportedError, match="use_collectives"):
        torch_dcp.save(small_state(), storage_writer=StorageWriter(tmp_path / "step"), use_collectives=False)


def test_state_dicts_that_are_not_flattened_are_saved_under_their_keys(tmp_path: Path) -> None:
    state = {"a.b": torch.ones(2), "c": {"d": [1, (2, torch.zeros(1))]}}
    planner = DefaultSavePlanner(flatten_state_dict=False)
    torch_dcp.save(state, storage_writer=StorageWriter(tmp_path / "step"), planner=planner)
    assert shardckpt.load(tmp_path / "step")["c"]["d"][1][0] == 2
    loaded = {"a.b": torch.zeros(2), "c": None}
    with pytest.raises(CheckpointException):  # the reader gives names as a planner that flattens expects them
        load(loaded, tmp_path / "step", planner=DefaultLoadPlanner(flatten_state_dict=False))
    assert torch.equal(load({"a.b": torch.zeros(2)}, tmp_path / "step")["a.b"], torch.ones(2))


def test_a_damaged_block_is_found_before_it_is_used(tmp_path: Path) -> None:
    save(small_state(), tmp_path / "step")
    (payload,) = (tmp_path / "step").glob("*.safetensors")
    data = bytearray(payload.read_bytes())
    data[-1] ^= 1
    payload.write_bytes(data)
    with pytest.raises(CheckpointException) as error:
        load(small_state(0), tmp_path / "step")
    assert isinstance(failure(error), shardckpt.errors.ChecksumError)
    with pytest.raises(CheckpointException) as error:
        torch_dcp.load(small_state(0), storage_reader=StorageReader(tmp_path / "step", verify="full"))
    assert isinstance(failure(error), shardckpt.errors.ChecksumError)


class _Hostile:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("executed",)


def test_loading_a_folder_of_dcp_executes_no_pickle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch_dcp.save({"weight": torch.ones(2), "value": _Hostile()}, checkpoint_id=tmp_path / "dcp")
    state = {"weight": torch.zeros(2), "value": 0}
    with pytest.raises(CheckpointException) as error:
        load(state, tmp_path / "dcp")
    assert isinstance(failure(error), shardckpt.errors.UnsafeError)
    assert not (tmp_path / "executed").exists()
    assert torch.equal(state["weight"], torch.zeros(2)), "nothing is filled before all values are known"


def test_a_lossy_cast_is_an_error_and_another_is_made(tmp_path: Path) -> None:
    save({"a": torch.tensor([1.0, 1e30])}, tmp_path / "step")
    assert load({"a": torch.zeros(2, dtype=torch.bfloat16)}, tmp_path / "step")["a"][0] == 1
    with pytest.raises(CheckpointException) as error:
        load({"a": torch.zeros(2, dtype=torch.float16)}, tmp_path / "step")
    assert isinstance(failure(error), shardckpt.errors.PrecisionError)


def test_writer_and_reader_can_be_sent_to_another_process(tmp_path: Path) -> None:
    writer = pickle.loads(pickle.dumps(StorageWriter(tmp_path / "step")))
    torch_dcp.save(small_state(), storage_writer=writer)
    reader = pickle.loads(pickle.dumps(StorageReader()))
    state = small_state(0)
    torch_dcp.load(state, checkpoint_id=tmp_path / "step", storage_reader=reader)
    assert state["step"] == 7


def test_ranks_that_see_different_checkpoints_are_told(tmp_path: Path) -> None:
    plans = []
    for name in ("one", "other"):
        save(small_state(), tmp_path / name)
        reader = StorageReader(tmp_path / name)
        reader.read_metadata()
        plans.append(reader.prepare_local_plan(torch_dcp.LoadPlan([])))
    assert reader.prepare_global_plan([plans[0]] * 2) == [plans[0]] * 2
    with pytest.raises(shardckpt.errors.FormatError, match="different checkpoints"):
        reader.prepare_global_plan(plans)


def test_steps_are_saved_to_urls_and_replaced_there() -> None:
    url = "memory://dcp-storage/step"
    for scale in (1, 2):
        torch_dcp.save(small_state(scale), checkpoint_id=url, storage_writer=StorageWriter())
    with pytest.raises(CheckpointException):
        torch_dcp.save({"a": print}, checkpoint_id=url, storage_writer=StorageWriter())
    assert load(small_state(0), url)["step"] == 14
    assert shardckpt.verify(url).ok
