"""A tensor whose elements are not in its own memory is refused by name wherever it enters; nothing else is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import shardckpt
from shardckpt import core
from shardckpt.errors import UnsupportedError
from shardckpt.integrations import dcp
from tests.kit.models.states import refused
from tests.kit.ranks.harness import run


def int8(model: nn.Sequential) -> None:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    quantize_(model[0], Int8WeightOnlyConfig(version=2))


def float8(model: nn.Sequential) -> None:
    from torchao.quantization import Float8WeightOnlyConfig, quantize_

    quantize_(model[0], Float8WeightOnlyConfig())


def nf4(model: nn.Sequential) -> None:
    from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4

    model[0].weight = nn.Parameter(to_nf4(model[0].weight.detach(), 64, 16), requires_grad=False)


KINDS: dict[str, tuple[Callable[[nn.Sequential], None], str]] = {
    "int8": (int8, "Int8Tensor"),
    "float8": (float8, "Float8Tensor"),
    "nf4": (nf4, "NF4Tensor"),
}


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 6)).requires_grad_(False)


SAVES: dict[str, Callable[[nn.Module, Path], Any]] = {
    "save": lambda model, path: shardckpt.save({"m": model}, path),
    "async_save": lambda model, path: shardckpt.async_save({"m": model}, path).result(),
    "Checkpointer": lambda model, path: shardckpt.Checkpointer(path).save(1, {"m": model}),
    "state dict": lambda model, path: shardckpt.save({"m": model.state_dict()}, path),
    "model_state_dict": lambda model, path: shardckpt.save({"m": shardckpt.model_state_dict(model, "SHARDED")}, path),
    "PerRank": lambda model, path: shardckpt.save({"m": shardckpt.PerRank(model.state_dict())}, path),
    "EMA": lambda model, path: shardckpt.save({"n": shardckpt.Variant(model, of=net()), "m": model}, path),
    "dcp": lambda model, path: dcp.save({"m": model.state_dict()}, checkpoint_id=path),
    "writer": lambda model, path: torch_dcp.save({"m": model.state_dict()}, storage_writer=dcp.StorageWriter(path)),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", SAVES)
def test_every_save_refuses_a_parameter_of_a_subclass_by_name(way: str, kind: str, tmp_path: Path) -> None:
    model = net()
    put, name = KINDS[kind]
    put(model)
    with pytest.raises((UnsupportedError, torch_dcp.CheckpointException), match=rf"0\.weight.*{name}"):
        SAVES[way](model, tmp_path / "step")
    assert not list(tmp_path.rglob("COMMIT"))


def test_a_buffer_of_a_subclass_is_refused_by_name(tmp_path: Path) -> None:
    model, other = nn.Module(), net()
    nf4(other)
    model.register_buffer("scale", other[0].weight.detach())
    with pytest.raises(UnsupportedError, match=r"m\.scale.*NF4Tensor"):
        shardckpt.save({"m": model}, tmp_path / "step")


def test_a_load_refuses_a_parameter_of_a_subclass_and_changes_nothing(tmp_path: Path) -> None:
    model = net()
    shardckpt.save({"m": model}, tmp_path / "step")
    nf4(model)
    bias, before = model[1].bias.zero_(), model[0].weight.get_original_weight()
    with pytest.raises(shardckpt.ShardckptError, match=r"NF4Tensor cannot be filled: m\.0\.weight"):
        shardckpt.load({"m": model}, tmp_path / "step")
    assert not bias.any()
    assert torch.equal(model[0].weight.get_original_weight(), before)


def test_a_load_of_other_tensors_may_have_a_subclass_in_its_state(tmp_path: Path) -> None:
    model = net()
    shardckpt.save({"m": model}, tmp_path / "step")
    saved = model[1].bias.clone()
    nf4(model)
    model[1].bias.zero_()
    shardckpt.load({"m": model}, tmp_path / "step", include=["m.1.*"])
    assert torch.equal(model[1].bias, saved)


def test_local_tensors_of_a_subclass_are_refused_on_all_ranks(tmp_path: Path) -> None:
    def body(rank: int, world: int) -> dict[str, str]:
        model = net()
        nf4(model)
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
        assert isinstance(model[0].weight, DTensor)
        ways = [way for way in SAVES if way not in ("EMA", "writer")]
        told = {way: refused(SAVES[way], model, tmp_path / way) for way in ways}
        with pytest.raises(torch_dcp.CheckpointException) as caught:
            SAVES["writer"](model, tmp_path / "writer")
        return {**told, "writer": str(caught.value)}

    for told in run(2, body):
        for way, text in told.items():
            assert "0.weight" in text and "NF4Tensor" in text, (way, text)
    assert not list(tmp_path.rglob("COMMIT"))


@pytest.mark.parametrize("world", [1, 2])
def test_the_full_state_of_a_sharded_subclass_is_refused_by_name_on_all_ranks(world: int) -> None:
    def body(rank: int, world: int) -> None:
        model = net()
        nf4(model)
        core.fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
        with pytest.raises(UnsupportedError, match=r"0\.weight.*FULL.*NF4Tensor.*SHARDED"):
            shardckpt.model_state_dict(model)
        assert isinstance(shardckpt.model_state_dict(model, "SHARDED")["0.weight"], DTensor)

    run(world, body)


def test_a_local_tensor_that_is_still_on_its_way_is_saved_once_it_is_there(tmp_path: Path) -> None:
    def body(rank: int, world: int) -> str:
        mesh = init_device_mesh("cpu", (world,))
        rows = distribute_tensor(torch.arange(8.0).view(4, 2), mesh, [Shard(0)])
        gathered = rows.redistribute(placements=[Replicate()], async_op=True)
        name = type(gathered._local_tensor).__name__
        shardckpt.save({"rows": gathered}, tmp_path / "step")
        return name

    assert run(2, body) == ["AsyncCollectiveTensor"] * 2
    assert torch.equal(shardckpt.load(tmp_path / "step")["rows"], torch.arange(8.0).view(4, 2))


class Named(torch.Tensor):
    """A subclass with its elements in its own memory."""


def test_a_subclass_with_its_elements_in_its_own_memory_is_saved_and_filled(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    model.named = nn.Buffer(torch.ones(3).as_subclass(Named))
    state = {"m": model, "t": torch.ones(2).as_subclass(Named)}
    shardckpt.save(state, tmp_path / "step")
    with torch.no_grad():
        model.named.zero_()
        state["t"].zero_()
    shardckpt.load(state, tmp_path / "step")
    assert model.named.all()
    assert state["t"].all()
