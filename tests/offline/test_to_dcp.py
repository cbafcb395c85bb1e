"""`--to dcp`: torch's own loader takes what is written into plain and sharded models, optimizer and groups included."""

from __future__ import annotations

import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import shardckpt
import shardckpt.integrations.dcp as integrations_dcp
from shardckpt.errors import UsageError
from tests.kit.ranks.harness import run
from tests.kit.runs.cases import same_bits
from tests.kit.writers.samples import MODEL, OPTIM, SAMPLES
from tests.kit.writers.torch_writers import ALONE


def merged(folder: Path) -> Any:
    """Return what torch's own tool makes of a folder."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp_to_torch_save(folder, folder.parent / "merged.pt")
    return torch.load(folder.parent / "merged.pt", weights_only=True)


def same(a: Any, b: Any) -> bool:
    """Compare nests, tensors bit by bit."""
    if isinstance(a, torch.Tensor):
        return same_bits(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


def test_torchs_own_tool_merges_what_was_written(tmp_path: Path) -> None:
    source = SAMPLES["torch"]["zip"](tmp_path / "src")
    report = shardckpt.consolidate(str(source), str(tmp_path / "out"), to="dcp", part="all", max_shard_size=3000)
    assert len(report.files) > 1
    assert {f.name: f.nbytes for f in report.files} == {
        file.name: file.stat().st_size for file in (tmp_path / "out").glob("*.distcp")
    }
    found = merged(tmp_path / "out")
    assert same(found["model"], MODEL)
    assert same(found["optim"]["state"], OPTIM["state"])
    assert found["optim"]["param_groups"] == [{"lr": 0.1, "params": ["a.w"]}]
    assert shardckpt.verify(str(tmp_path / "out")).ok


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_resharding_writes_the_shards_of_every_rank_and_all_that_there_is(tmp_path: Path, world_size: int) -> None:
    source = SAMPLES["torch"]["zip"](tmp_path / "src")
    report = shardckpt.reshard(str(source), str(tmp_path / "out"), world_size=world_size, to="dcp")
    assert [f.name for f in report.files] == [f"__{rank}_0.distcp" for rank in range(world_size)]
    found = merged(tmp_path / "out")
    assert same(found["model"], MODEL)
    assert same(found["optimizer"]["state"], OPTIM["state"])
    assert found["epoch"] == {"n": 7}
    with (tmp_path / "out" / ".metadata").open("rb") as file:
        metadata = pickle.load(file)
    chunks = metadata.state_dict_metadata["model.a.w"].chunks
    assert [chunk.sizes[0] for chunk in chunks] == [len(part) for part in torch.arange(6).chunk(world_size)]
    assert shardckpt.diff(str(source), str(tmp_path / "out")).same


def test_converting_keeps_the_pieces(tmp_path: Path) -> None:
    source = SAMPLES["dcp"]["chunks"](tmp_path / "src")
    shardckpt.convert(str(source), str(tmp_path / "out"), to="dcp", part="all")
    with (tmp_path / "out" / ".metadata").open("rb") as file:
        record = pickle.load(file).state_dict_metadata["model.a.w"]
    assert [tuple(chunk.sizes) for chunk in record.chunks] == [(6, 1), (6, 3)]
    assert same(merged(tmp_path / "out")["model"], MODEL)


def test_converting_without_a_part_keeps_all_values_under_their_names(tmp_path: Path) -> None:
    state = {"net": {"a.w": torch.ones(2)}, "lr": 0.5, "app": {"optim": {"steps": [1, {"n": 2}]}}}
    integrations_dcp.save(state, checkpoint_id=tmp_path / "step")
    report = shardckpt.convert(tmp_path / "step", tmp_path / "out", to="dcp", max_memory="64MiB", jobs=1)
    assert (report.part, report.left_out) == ("all", ())
    found = {"net": {"a.w": torch.zeros(2)}, "lr": 0.0, "app": {"optim": {"steps": [0, {"n": 0}]}}}
    dcp.load(found, checkpoint_id=tmp_path / "out")
    assert same(found, state)


@pytest.mark.parametrize("options", [{"part": "model"}, {"rename": ["a.w=b.w"]}, {"dtype": "bf16"}])
def test_converting_with_a_choice_writes_the_model_below_model(tmp_path: Path, options: dict[str, Any]) -> None:
    shardckpt.save({"net": {"a.w": torch.ones(2)}, "lr": 0.5}, tmp_path / "step")
    report = shardckpt.convert(tmp_path / "step", tmp_path / "out", to="dcp", **options)
    assert report.left_out == ("lr",)
    assert merged(tmp_path / "out").keys() == {"model"}


def test_both_names_of_a_tied_tensor_are_there_and_its_bytes_once(tmp_path: Path) -> None:
    weight = torch.arange(3000.0).reshape(30, 100)
    torch.save({"model": {"a": weight, "z": torch.ones(1), "b": weight}}, tmp_path / "src.pt")
    report = shardckpt.consolidate(str(tmp_path / "src.pt"), str(tmp_path / "out"), to="dcp")
    assert sum(f.nbytes for f in report.files) < 1.5 * weight.nbytes
    found = merged(tmp_path / "out")["model"]
    assert torch.equal(found["a"], weight)
    assert torch.equal(found["b"], weight)
    report = shardckpt.consolidate(str(tmp_path / "out"), str(tmp_path / "back.pt"))
    assert report.ties == {"b": "a"}
    back = torch.load(tmp_path / "back.pt", weights_only=True)
    assert back["a"].data_ptr() == back["b"].data_ptr()


def net() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(5, 6), torch.nn.Tanh(), torch.nn.Linear(6, 3))


def stepped(model: torch.nn.Module, lr: float = 0.01) -> torch.optim.Optimizer:
    torch.manual_seed(1)
    one, two = list(model.parameters())[:1], list(model.parameters())[1:]
    optim = torch.optim.AdamW([{"params": one, "weight_decay": 0.5}, {"params": two}], lr=lr, betas=(0.8, 0.98))
    for _ in range(2):
        model(torch.randn(4, 5)).square().sum().backward()
        optim.step()
        optim.zero_grad()
    return optim


def full(model: torch.nn.Module, optim: torch.optim.Optimizer) -> tuple[Any, Any]:
    whole = StateDictOptions(full_state_dict=True)
    return get_model_state_dict(model, options=whole), get_optimizer_state_dict(model, optim, options=whole)


def write_source(folder: Path, keys: str) -> tuple[Any, Any]:
    """Write a trained plain model as torch's file, convert it, and return its full states."""
    model = net()
    states = full(model, stepped(model))
    torch.save({"model": states[0], "optimizer": states[1]}, folder / "src.pt")
    shardckpt.consolidate(str(folder / "src.pt"), str(folder / "ckpt"), to="dcp", part="all", optim_keys=keys)
    return states


def load_with_torch(model: torch.nn.Module, optim: torch.optim.Optimizer, folder: Path, keys: str) -> None:
    flat = StateDictOptions(flatten_optimizer_state_dict=keys == "flat")
    state = {
        "model": get_model_state_dict(model),
        "optim": get_optimizer_state_dict(model, optim, options=flat),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, checkpoint_id=folder, **({} if dist.is_initialized() else ALONE))
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optim, state["optim"], options=flat)


def check_loaded(model: torch.nn.Module, optim: torch.optim.Optimizer, states: tuple[Any, Any]) -> None:
    found = full(model, optim)
    if found[0]:  # ranks other than the first get nothing
        assert same(found[0], states[0])
        assert same(found[1]["state"], states[1]["state"])
        for mine, theirs in zip(found[1]["param_groups"], states[1]["param_groups"], strict=True):
            assert mine == theirs


@pytest.mark.parametrize("keys", ["names", "flat"])
def test_torch_loads_it_into_a_plain_model(tmp_path: Path, keys: str) -> None:
    states = write_source(tmp_path, keys)
    model = net()
    for parameter in model.parameters():
        parameter.data.zero_()
    optim = stepped(model, lr=0.5)
    load_with_torch(model, optim, tmp_path / "ckpt", keys)
    check_loaded(model, optim, states)


def _load_sharded(rank: int, _world: int, folder: Path, states: tuple[Any, Any]) -> int:
    for keys in ("names", "flat"):
        model = net()
        for parameter in model.parameters():
            parameter.data.zero_()
        fully_shard(model[2])
        fully_shard(model)
        optim = stepped(model, lr=0.5)
        load_with_torch(model, optim, folder / keys / "ckpt", keys)
        assert isinstance(next(model.parameters()), DTensor)
        check_loaded(model, optim, states)
    model = net()
    fully_shard(model)
    state = {"model": get_model_state_dict(model)}
    dcp.load(state, checkpoint_id=folder / "names" / "resharded")
    local = state["model"]["0.weight"].to_local()
    assert same_bits(local, states[0]["0.weight"][3 * rank : 3 * rank + 3])
    return len(local)


def test_torch_loads_it_into_sharded_models_on_two_ranks(tmp_path: Path) -> None:
    for keys in ("names", "flat"):
        (tmp_path / keys).mkdir()
        states = write_source(tmp_path / keys, keys)
    folder = tmp_path / "names"
    shardckpt.reshard(str(folder / "ckpt"), str(folder / "resharded"), world_size=2, to="dcp")
    assert run(2, _load_sharded, tmp_path, states) == [3, 3]


def test_one_file_by_name_cannot_hold_it(tmp_path: Path) -> None:
    source = str(SAMPLES["torch"]["zip"](tmp_path / "src"))
    with pytest.raises(UsageError, match="folder"):
        shardckpt.consolidate(source, str(tmp_path / "out.pt"), to="dcp")


def test_a_failure_leaves_no_metadata(tmp_path: Path) -> None:
    torch.save({"model": {"w": torch.tensor([1e30])}}, tmp_path / "src.pt")
    with pytest.raises(shardckpt.errors.PrecisionError):
        shardckpt.consolidate(str(tmp_path / "src.pt"), str(tmp_path / "out"), to="dcp", dtype="fp16")
    assert not (tmp_path / "out").exists()


def test_names_that_read_alike_are_refused(tmp_path: Path) -> None:
    shardckpt.save({"a.b": torch.ones(1), "a": {"b": torch.ones(2)}}, str(tmp_path / "src"))
    with pytest.raises(shardckpt.errors.NameCollisionError, match=r"a\.b"):
        shardckpt.reshard(str(tmp_path / "src"), str(tmp_path / "out"), world_size=2, to="dcp")
    assert not (tmp_path / "out").exists()
