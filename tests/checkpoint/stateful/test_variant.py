"""Averages of a model in the checkpoint of the model: as they are sharded, loaded on any ranks, exported alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import shardckpt
from shardckpt import Variant
from shardckpt.core import FullyShardedDataParallel, fully_shard
from shardckpt.errors import UnsupportedError, UsageError
from tests.kit.models.states import differing
from tests.kit.ranks.harness import run

FACES = {
    "plain": lambda net: net,
    "flat": FullyShardedDataParallel,
    "orig": lambda net: FullyShardedDataParallel(net, use_orig_params=True),
    "in place": fully_shard,
    "torch in place": torch_fully_shard,
}


def built(face: str = "plain", seed: int = 0) -> nn.Module:
    """Return a model none of whose sizes two ranks can share evenly."""
    torch.manual_seed(seed)
    return FACES[face](nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3, bias=False)))


def local(value: torch.Tensor) -> torch.Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


def averages(model: nn.Module, kind: str):
    """Return averages of a model: a module, tensors as its parameters are, or the plain tensors of this rank."""
    if kind == "module":
        return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    if kind == "local":
        return {name: local(value.detach()).double().clone() for name, value in model.named_parameters()}
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def values(ema) -> list[torch.Tensor]:
    found = ema.module.parameters() if isinstance(ema, AveragedModel) else ema.values()
    return [local(value.detach()) for value in found]


def doubled(ema):
    with torch.no_grad():
        for value in values(ema):
            value.mul_(2)
    if isinstance(ema, AveragedModel):
        ema.n_averaged += 3
    return ema


KINDS = ("module", "dict", "local")


def saved_and_loaded(face: str, folder: Path) -> None:
    """Save averages of each kind on two ranks, and load them into others."""

    def body(rank: int, world: int) -> None:
        for kind in KINDS:
            if (face, kind) == ("torch in place", "module"):
                continue  # torch's own refuses to be copied
            model = built(face)
            ema = doubled(averages(model, kind))
            shardckpt.save({"model": model, "ema": Variant(ema, of=model), "step": 1}, folder / kind)
            other = built(face, seed=9)
            into = averages(other, kind)
            shardckpt.load({"model": other, "ema": Variant(into, of=other), "step": 0}, folder / kind)
            assert all(torch.equal(a, b) for a, b in zip(values(ema), values(into), strict=True)), kind
            assert kind != "module" or int(into.n_averaged) == 3

    run(2, body)


@pytest.mark.parametrize("face", ["flat", "orig", "in place", "torch in place"])
def test_averages_are_saved_as_they_are_sharded_and_come_back(tmp_path: Path, face: str) -> None:
    saved_and_loaded(face, tmp_path)
    for path in list(tmp_path.iterdir()):
        nest = shardckpt.load(path)
        model = {name: value for name, value in nest["model"].items() if not name.startswith("1.running")}
        model.pop("1.num_batches_tracked")
        for name, value in model.items():
            assert torch.equal(nest["ema"][name], 2 * value.to(nest["ema"][name].dtype)), name
        shardckpt.consolidate(str(path), str(tmp_path / f"{path.name} ema"), weights="ema")
        found = load_file(tmp_path / f"{path.name} ema" / "model.safetensors")
        assert found.keys() == nest["model"].keys(), "what has no average is the model's own"
        assert all(torch.equal(found[name], nest["ema"][name]) for name in model)
        assert torch.equal(found["1.running_mean"], nest["model"]["1.running_mean"])


def build_average(face: str, kind: str, seed: int, steps: int):
    """Return a sharded model, and an average of its training that is sharded as it is."""
    model = built(seed=seed)
    if kind == "module":  # torch's `fully_shard` refuses to be copied: the average is made first, and sharded by itself
        ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        FACES[face](ema.module)
    model = FACES[face](model)
    if kind == "dict":
        ema = {name: value.detach().clone() for name, value in model.named_parameters()}
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(steps):
        torch.manual_seed(number)
        model(torch.randn(4, 5)).square().mean().backward()
        optim.step()
        optim.zero_grad()
        if kind == "module":
            ema.update_parameters(model)
        else:
            for name, value in model.named_parameters():
                ema[name].lerp_(value.detach(), 0.5)
    return model, ema


def gather(tensors) -> dict[str, torch.Tensor]:
    return {name: value.full_tensor().clone() for name, value in tensors}


def average_of(ema) -> dict[str, torch.Tensor]:
    return gather(ema.module.named_parameters() if isinstance(ema, AveragedModel) else ema.items())


@pytest.mark.parametrize("kind", ["module", "dict"])
@pytest.mark.parametrize("face", ["in place", "torch in place"])
def test_an_average_in_uneven_shards_is_loaded_on_fewer_ranks_and_exported(face: str, kind: str, tmp_path: Path):
    def save(rank: int, world: int):
        model, ema = build_average(face, kind, 0, 3)
        shardckpt.save({"model": model, "ema": Variant(ema, of=model)}, tmp_path / "c")
        return average_of(ema), gather(model.named_parameters())

    def load(rank: int, world: int):
        model, ema = build_average(face, kind, 1, 0)
        shardckpt.load({"model": model, "ema": Variant(ema, of=model)}, tmp_path / "c")
        return average_of(ema), gather(model.named_parameters())

    expected = run(3, save)[0]
    assert not torch.equal(expected[0]["0.weight"], expected[1]["0.weight"])
    for found in run(2, load):
        assert differing(found[0], expected[0]) == differing(found[1], expected[1]) == []
    shardckpt.consolidate(str(tmp_path / "c"), str(tmp_path / "weights"), weights="ema")
    exported = load_file(tmp_path / "weights" / "model.safetensors")
    assert {"1.running_mean", "1.running_var", "1.num_batches_tracked"} == exported.keys() - expected[0].keys()
    assert differing({name: exported[name] for name in expected[0]}, expected[0]) == []


@pytest.fixture
def path(tmp_path: Path) -> Path:
    model = built()
    fast, slow = doubled(averages(model, "dict")), doubled(doubled(averages(model, "module")))
    state = {"net": model, "averages": {"fast": Variant(fast, of=model)}, "slow": Variant(slow, of=model)}
    shardckpt.save(state, tmp_path / "c")
    return tmp_path / "c"


def test_any_number_of_them_under_any_names(path: Path, tmp_path: Path) -> None:
    parts = shardckpt.inspect(str(path)).parts
    assert (parts["model"], parts["variants"]) == (("net",), ("averages.fast", "slow"))
    for name, factor in (("live", 1), ("averages.fast", 2), ("slow", 4)):
        shardckpt.consolidate(str(path), str(tmp_path / name), weights=name)
        found = load_file(tmp_path / name / "model.safetensors")
        assert torch.equal(found["0.weight"], factor * built()[0].weight)
        assert "n_averaged" not in found


def test_one_that_is_not_there_is_an_error_that_lists_those_that_are(path: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--weights emma.*found live, averages\.fast, slow"):
        shardckpt.consolidate(str(path), str(tmp_path / "x"), weights="emma")


def test_they_stay_variants_when_the_step_is_written_anew(path: Path, tmp_path: Path) -> None:
    shardckpt.reshard(str(path), str(tmp_path / "r"), world_size=2)
    (path / "COMMIT").unlink()
    shardckpt.repair(str(path))
    for each in (path, tmp_path / "r"):
        assert shardckpt.inspect(str(each)).parts["variants"] == ("averages.fast", "slow")


def test_a_model_can_be_loaded_with_them(path: Path) -> None:
    model = built(seed=4)
    shardckpt.load({"slow": model}, path, include=["slow.*weight"])
    assert torch.equal(model[0].weight, 4 * built()[0].weight)


def test_without_a_marker_a_subtree_named_ema_is_known_too(tmp_path: Path) -> None:
    model = built()
    shardckpt.save({"model": model, "ema": doubled(averages(model, "module"))}, tmp_path / "c")
    shardckpt.consolidate(str(tmp_path / "c"), str(tmp_path / "x"), weights="ema")
    found = load_file(tmp_path / "x" / "model.safetensors")
    assert torch.equal(found["0.weight"], 2 * model[0].weight)


def test_what_fits_no_parameter_is_refused_by_name(tmp_path: Path) -> None:
    model = built()
    with pytest.raises(
        UnsupportedError, match=r"0\.weight: a tensor must have its parameter's shape.*found \[4\]; expected \[7, 5\]"
    ):
        shardckpt.save({"model": model, "ema": Variant({"0.weight": torch.ones(4)}, of=model)}, tmp_path / "c")
    with pytest.raises(UsageError, match="`weights` must be a module or a dict of tensors"):
        Variant([torch.ones(3)], of=model)
    with pytest.raises(UsageError, match="`of` must be the variant's model"):
        Variant({}, of="model")
