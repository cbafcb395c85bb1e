"""Rank files tell how flat parameters lie: an optimizer's state is written as they have it, and comes back by names."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import shardckpt
from shardckpt.core import FullyShardedDataParallel
from shardckpt.errors import CheckpointError, UsageError
from shardckpt.state import flat_units, to_flat_parameters
from tests.kit.ranks.harness import run
from tests.kit.runs.cases import assert_same


class Net(nn.Module):
    """Parameters of which one lies in another order than row-major, one is frozen, one never used."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)
        self.inner = nn.Linear(3, 5)
        self.last = nn.Linear(5, 2)
        self.frozen = nn.Linear(2, 2).requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.frozen(self.last(self.inner(self.first(x).flatten(1))))


def save_ranks(folder: Path) -> None:
    """Two ranks save what they have; the groups are in another order than the model, and one is empty."""

    def body(rank: int, world: int) -> None:
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        net = Net()
        net.inner = FullyShardedDataParallel(net.inner)
        net.frozen = FullyShardedDataParallel(net.frozen)
        model = FullyShardedDataParallel(net)
        inner = list(model.module.inner.parameters())
        rest = [p for p in model.parameters() if p.requires_grad and p is not inner[0]]
        optim = torch.optim.AdamW([{"params": inner, "lr": 0.5}, {"params": []}, {"params": rest}], lr=0.1)
        torch.manual_seed(rank)
        model(torch.randn(4, 2, 2, 2)).square().mean().backward()
        optim.step()
        whole, local = (shardckpt.model_state_dict(model, kind) for kind in ("FULL", "LOCAL"))
        moments, own = (shardckpt.optim_state_dict(model, optim, kind) for kind in ("FULL", "LOCAL"))
        torch.save({"model": local, "optim": own}, folder / f"ranks/{rank}.pt")
        if rank == 0:
            flat = to_flat_parameters(moments, flat_units(local))
            torch.save({"whole": whole, "moments": moments, "flat": flat}, folder / "truth.pt")

    (folder / "ranks").mkdir(parents=True)
    run(2, body)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    save_ranks(folder)
    return folder


def by_key(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {f"{name}/{slot}": value for name, row in state["state"].items() for slot, value in row.items()}


def rekeyed(src: Path, dst: Path, to: str, **options: Any) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    shardckpt.rekey(str(src), str(dst), to=to, **options)
    return load_file(dst / "optimizer.safetensors"), json.loads((dst / "param_groups.json").read_text())


def test_flat_parameters_are_those_of_the_pure_function(saved: Path, tmp_path: Path) -> None:
    truth = torch.load(saved / "truth.pt")
    tensors, said = rekeyed(saved / "ranks", tmp_path / "flat", "flat-parameters")
    assert_same(tensors, by_key(truth["flat"]))
    assert [group["params"] for group in said["param_groups"]] == [["inner._flat_param"], [], ["_flat_param"]]
    assert said["originals"] == truth["flat"]["originals"]["groups"]
    assert_same(load_file(tmp_path / "flat/model.safetensors"), truth["whole"])


@pytest.mark.parametrize("part", ["all", "optim"])
@pytest.mark.parametrize("through", ["names", "ids", "flatten", "flat-parameters"])
def test_every_way_from_there_leads_back(saved: Path, tmp_path: Path, through: str, part: str) -> None:
    truth = torch.load(saved / "truth.pt")
    rekeyed(saved / "ranks", tmp_path / "flat", "flat-parameters", part=part)
    rekeyed(tmp_path / "flat", tmp_path / "through", through, part=part)
    tensors, said = rekeyed(tmp_path / "through", tmp_path / "back", "names", part=part)
    assert_same(tensors, by_key(truth["moments"]))
    assert [g["params"] for g in said["param_groups"]] == [g["params"] for g in truth["moments"]["param_groups"]]
    assert [g["lr"] for g in said["param_groups"]] == [0.5, 0.1, 0.1]
    assert "keys" not in said
    assert "originals" not in said
    if through == "flat-parameters":
        for file in ("optimizer.safetensors", "param_groups.json"):
            assert (tmp_path / "flat" / file).read_bytes() == (tmp_path / "through" / file).read_bytes()


def test_consolidate_reads_them_by_names(saved: Path, tmp_path: Path) -> None:
    rekeyed(saved / "ranks", tmp_path / "flat", "flat-parameters")
    shardckpt.consolidate(str(tmp_path / "flat"), str(tmp_path / "whole"), part="all")
    assert_same(load_file(tmp_path / "whole/optimizer.safetensors"), by_key(torch.load(saved / "truth.pt")["moments"]))
    assert shardckpt.verify(str(tmp_path / "flat")).problems == ()
    assert shardckpt.diff(str(tmp_path / "flat"), str(saved / "ranks")).equal


def test_without_layouts_it_is_refused(saved: Path, tmp_path: Path) -> None:
    rekeyed(saved / "ranks", tmp_path / "names", "names")
    with pytest.raises(UsageError, match="the flat parameters' layouts are not known"):
        rekeyed(tmp_path / "names", tmp_path / "flat", "flat-parameters")
    assert not (tmp_path / "flat").exists()


@pytest.mark.parametrize(
    "change",
    [
        {"units": [{"flat": 3}]},
        {"units": [3]},
        {"originals": [["x"]]},
        {"originals": 7},
        {"param_groups": [3, 3, 3]},
    ],
)
def test_a_groups_file_that_says_nonsense_is_refused_in_one_line(
    saved: Path, tmp_path: Path, change: dict[str, Any]
) -> None:
    _, said = rekeyed(saved / "ranks", tmp_path / "flat", "flat-parameters")
    refused(tmp_path, {**said, **change})


def test_layouts_that_do_not_fit_are_refused_in_one_line(saved: Path, tmp_path: Path) -> None:
    _, said = rekeyed(saved / "ranks", tmp_path / "flat", "flat-parameters")
    refused(tmp_path, {**said, "units": [*said["units"], {**said["units"][0], "flat": "other"}]})
    longer = json.dumps(said["units"]).replace('"shape": [5]', '"shape": [50]')
    refused(tmp_path, {**said, "units": json.loads(longer)})


def refused(folder: Path, said: dict[str, Any]) -> None:
    (folder / "flat/param_groups.json").write_text(json.dumps(said))
    with pytest.raises(CheckpointError) as caught:
        rekeyed(folder / "flat", folder / "back", "names")
    assert "\n" not in str(caught.value)
    assert not (folder / "back").exists()
