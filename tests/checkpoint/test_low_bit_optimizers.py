"""Moments of low-bit optimizers are resumed bit for bit, on any number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import state_dict as torch_dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import shardckpt
from shardckpt import core
from shardckpt.errors import ShardckptError
from tests.kit.models.states import refused
from tests.kit.ranks.harness import run

optim = pytest.importorskip("torchao.optim")

OPTIMIZERS = ["AdamW8bit", "AdamW4bit", "AdamWFp8"]
FSDP = {"torch": fully_shard, "engine": core.fully_shard}

Training = tuple[nn.Module, torch.optim.Optimizer]


@pytest.fixture(autouse=True)
def _without_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)  # torchao compiles its steps


def begin(seed: int, name: str, fsdp: Any = None, world: int = 1) -> Training:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(256, 192, bias=False), nn.ReLU(), nn.Linear(192, 6))
    if fsdp is not None:
        fsdp(model, mesh=init_device_mesh("cpu", (world,)))
    return model, getattr(optim, name)(model.parameters(), lr=1e-3)


def train(training: Training, steps: range) -> None:
    model, optimizer = training
    for step in steps:
        torch.manual_seed(100 + step)
        model(torch.randn(4, 256)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def as_movable(value: torch.Tensor) -> torch.Tensor:
    """Return a tensor that ranks can send to the parent: torch pickles no float8."""
    return value.view(torch.uint8) if value.dtype is torch.float8_e4m3fn else value


def list_bits(training: Training) -> dict[str, torch.Tensor]:
    model, optimizer = training
    found = {}
    for name, parameter in model.named_parameters():
        for key, value in {"": parameter, **optimizer.state[parameter]}.items():
            own = value.to_local() if isinstance(value, DTensor) else value
            if not isinstance(own, torch.Tensor):
                continue
            parts = own.__tensor_flatten__()[0] if hasattr(type(own), "tensor_attrs") else []
            found |= {f"{name}/{key}/{part}": as_movable(getattr(own, part)).clone() for part in parts}
            if not parts:
                found[f"{name}/{key}"] = own.detach().clone()
    return found


def assert_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


@pytest.mark.parametrize("has_stepped", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_resume_goes_on_bit_for_bit(name: str, has_stepped: bool, tmp_path: Path) -> None:
    first, second = begin(0, name), begin(1, name)
    train(first, range(2))
    if has_stepped:
        train(second, range(1))
    shardckpt.save(dict(zip(("model", "optim"), first, strict=True)), tmp_path / "step")
    shardckpt.load(dict(zip(("model", "optim"), second, strict=True)), tmp_path / "step", verify="live")
    assert_equal(list_bits(second), list_bits(first))
    train(first, range(2, 4))
    train(second, range(2, 4))
    assert_equal(list_bits(second), list_bits(first))


def save_both(training: Training, path: Path) -> None:
    shardckpt.save(dict(zip(("model", "optim"), training, strict=True)), path)


def load_both(training: Training, path: Path, **options: Any) -> None:
    shardckpt.load(dict(zip(("model", "optim"), training, strict=True)), path, **options)


def test_a_load_of_some_moments_adds_no_others(tmp_path: Path) -> None:
    first, second = begin(0, "AdamW8bit"), begin(1, "AdamW8bit")
    train(first, range(2))
    save_both(first, tmp_path / "step")
    load_both(second, tmp_path / "step", include=["optim.state.0.weight.exp_avg"])
    assert list(second[1].state[second[0][0].weight]) == ["exp_avg"]  # type: ignore[index]
    bits, saved = list_bits(second), list_bits(first)
    assert torch.equal(bits["0.weight/exp_avg/codes"], saved["0.weight/exp_avg/codes"])


@pytest.mark.parametrize("glob", ["*.scale", "*exp_avg*codes"])
def test_a_pattern_that_matches_a_part_of_a_moment_is_refused(glob: str, tmp_path: Path) -> None:
    first, second = begin(0, "AdamW8bit"), begin(1, "AdamW8bit")
    train(first, range(2))
    save_both(first, tmp_path / "step")
    with pytest.raises(ShardckptError, match=r"`include` must name optim\.state\.0\.weight\.exp_avg as one"):
        load_both(second, tmp_path / "step", include=[glob])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_its_own_state_dict_is_resumed_bit_for_bit(name: str, tmp_path: Path) -> None:
    first, second = begin(0, name), begin(1, name)
    train(first, range(2))
    shardckpt.save({"optim": first[1].state_dict()}, tmp_path / "step")
    second[1].load_state_dict(shardckpt.load(tmp_path / "step")["optim"])
    second[0].load_state_dict(first[0].state_dict())
    assert_equal(list_bits(second), list_bits(first))


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("fsdp", FSDP)
def test_shards_are_resumed_on_any_number_of_ranks(name: str, fsdp: str, tmp_path: Path) -> None:
    def save(rank: int, world: int) -> dict[str, torch.Tensor]:
        training = begin(0, name, FSDP[fsdp], world)
        train(training, range(2))
        shardckpt.save(dict(zip(("model", "optim"), training, strict=True)), tmp_path / "step")
        return list_bits(training)

    def load(rank: int, world: int) -> dict[str, torch.Tensor]:
        training = begin(1, name, FSDP[fsdp], world)
        shardckpt.load(dict(zip(("model", "optim"), training, strict=True)), tmp_path / "step")
        bits = list_bits(training)
        train(training, range(2, 3))
        return bits

    saved = run(2, save)
    names = ("0.weight/exp_avg/codes", "0.weight/exp_avg/scale", "0.weight/exp_avg_sq/codes", "2.weight/exp_avg")
    assert set(names) <= saved[0].keys()
    for world in (1, 2, 3):
        loaded = run(world, load)
        for part_name in names:
            whole, again = (torch.cat([part[part_name] for part in ranks]) for ranks in (saved, loaded))
            assert torch.equal(again, whole), (world, part_name)


def begin_as(name: str, seed: int, fsdp: Any = None, world: int = 1) -> Training:
    """As `begin`, with a class of torchao or torch."""
    model, optimizer = begin(seed, name if hasattr(optim, name) else "AdamW8bit", fsdp, world)
    return model, optimizer if hasattr(optim, name) else getattr(torch.optim, name)(model.parameters(), lr=1e-3)


CHANGES = [("AdamW8bit", "AdamW"), ("AdamWFp8", "SGD"), ("AdamW", "AdamW8bit"), ("AdamW", "AdamW4bit")]
FORMS = {
    "with its model": lambda model, optimizer: {"model": model, "optim": optimizer},
    "alone": lambda _, optimizer: {"optim": optimizer},
}


@pytest.mark.parametrize("has_stepped", [False, True])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("saved", "own"), CHANGES)
def test_moments_that_another_class_saved_are_refused(
    saved: str, own: str, form: str, has_stepped: bool, tmp_path: Path
) -> None:
    first, second = begin_as(saved, 0), begin_as(own, 1)
    train(first, range(2))
    if has_stepped:
        train(second, range(1))
    shardckpt.save(FORMS[form](*first), tmp_path / "step")
    before = list_bits(second)
    with pytest.raises(ShardckptError, match=rf"0.weight/exp_avg: .*{own}|state\.0\.exp_avg: .*{own}"):
        shardckpt.load(FORMS[form](*second), tmp_path / "step")
    assert_equal(list_bits(second), before)
    train(second, range(1, 2))


@pytest.mark.parametrize("fsdp", FSDP)
@pytest.mark.parametrize(("saved", "own"), CHANGES)
def test_moments_that_another_class_saved_are_refused_on_all_ranks(
    saved: str, own: str, fsdp: str, tmp_path: Path
) -> None:
    def save(rank: int, world: int) -> None:
        training = begin_as(saved, 0, FSDP[fsdp], world)
        train(training, range(1))
        save_both(training, tmp_path / "step")

    def load(rank: int, world: int) -> str:
        training = begin_as(own, 1, FSDP[fsdp], world)
        return refused(load_both, training, tmp_path / "step")

    run(2, save)
    for told in run(2, load):
        assert "0.weight/exp_avg" in told and f"{own}" in told and "optimizer's class that was saved" in told


class Named:
    """An optimizer's state by name, as torch's recipe for DCP has it."""

    def __init__(self, training: Training) -> None:
        self._training = training

    def state_dict(self) -> dict[str, Any]:
        return torch_dcp.get_optimizer_state_dict(*self._training)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        torch_dcp.set_optimizer_state_dict(*self._training, state)


@pytest.mark.parametrize("fsdp", [None, fully_shard])
@pytest.mark.parametrize(("saved", "own"), [pair for pair in CHANGES if "SGD" not in pair])
def test_an_object_refuses_moments_of_another_class_on_all_ranks(
    saved: str, own: str, fsdp: Any, tmp_path: Path
) -> None:
    def body(rank: int, world: int) -> str:
        first, second = begin_as(saved, 0, fsdp, world), begin_as(own, 1, fsdp, world)
        train(first, range(1))
        train(second, range(1))
        shardckpt.save({"o": Named(first)}, tmp_path / "step")
        return refused(shardckpt.load, {"o": Named(second)}, tmp_path / "step")

    for told in run(2 if fsdp else 1, body):
        assert "o.state.0.weight.exp_avg: it was saved as a" in told


@pytest.mark.parametrize("kind", ["FULL", "SHARDED", "LOCAL"])
@pytest.mark.parametrize("fsdp", [None, *FSDP.values()])
def test_a_state_dict_with_low_bit_moments_is_refused_on_all_ranks(fsdp: Any, kind: str) -> None:
    def body(rank: int, world: int) -> list[str]:
        training = begin(0, "AdamW8bit", fsdp, world)
        train(training, range(1))
        taken = refused(shardckpt.optim_state_dict, *training, kind)
        named = {"state": {"0.weight": training[1].state[training[0][0].weight]}, "param_groups": []}  # type: ignore[index]
        return [taken, refused(shardckpt.load_optim_state_dict, *training, named)]

    for told in run(2 if fsdp else 1, body):
        for text in told:
            assert "0.weight/exp_avg: a state dict cannot contain" in text and "OptimState8bit" in text


@pytest.mark.parametrize("kind", ["FULL", "SHARDED"])
@pytest.mark.parametrize("fsdp", [None, *FSDP.values()])
def test_a_state_dict_with_plain_moments_is_refused_on_all_ranks(fsdp: Any, kind: str) -> None:
    def body(rank: int, world: int) -> str:
        first, second = begin_as("AdamW", 0, fsdp, world), begin(1, "AdamW8bit", fsdp, world)
        train(first, range(1))
        train(second, range(1))
        state = shardckpt.optim_state_dict(*first, kind)
        return refused(shardckpt.load_optim_state_dict, *second, state)

    for told in run(2 if fsdp else 1, body):
        assert "0.weight/exp_avg: the state does not fit the optimizer" in told and "AdamW8bit" in told


@pytest.mark.parametrize("fsdp", [None, *FSDP.values()])
def test_ranks_with_other_kinds_of_moments_are_refused_by_name(fsdp: Any, tmp_path: Path) -> None:
    def body(rank: int, world: int) -> str:
        model, optimizer = begin(0, "AdamW8bit", fsdp, world)
        train((model, optimizer), range(1))
        weight = model[0].weight  # type: ignore[index]
        if rank:
            optimizer.state[weight]["exp_avg"] = torch.zeros_like(weight.detach())
        return refused(shardckpt.save, {"model": model, "optim": optimizer}, tmp_path / "step")

    for told in run(2, body):
        assert "optim.state.0.weight.exp_avg: ranks hold this moment in tensors of different classes" in told
        assert "plain on rank 1" in told and "on rank 0" in told and "block_size" in told
    assert not list(tmp_path.rglob("COMMIT"))


@pytest.mark.parametrize("fsdp", FSDP)
def test_shards_of_a_size_that_the_optimizer_keeps_plain_are_refused_by_name(fsdp: str, tmp_path: Path) -> None:
    def body(rank: int, world: int) -> str:
        torch.manual_seed(0)
        model = nn.Linear(256, 31, bias=False)  # rank 0 has 16 rows, and 15 are less than torchao quantizes
        FSDP[fsdp](model, mesh=init_device_mesh("cpu", (world,)))
        optimizer = optim.AdamW8bit(model.parameters())
        model(torch.randn(4, 256)).square().sum().backward()
        optimizer.step()
        return refused(shardckpt.save, {"model": model, "optim": optimizer}, tmp_path / "step")

    for told in run(2, body):
        assert "optim.state.weight.exp_avg: ranks hold this moment in tensors of different classes" in told


def test_a_class_that_cannot_be_built_is_refused_before_anything_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = begin(0, "AdamW8bit"), begin(1, "AdamW8bit")
    train(first, range(2))
    shardckpt.save(dict(zip(("model", "optim"), first, strict=True)), tmp_path / "step")
    before = second[0][0].weight.detach().clone()  # type: ignore[index]
    monkeypatch.setattr("shardckpt.state.local.tensor_subclasses._import_named", lambda *_: None)
    with pytest.raises(ShardckptError, match=r"exp_avg.*OptimState8bit, which cannot be built here \(install torchao"):
        shardckpt.load(dict(zip(("model", "optim"), second, strict=True)), tmp_path / "step")
    assert torch.equal(second[0][0].weight, before)  # type: ignore[index]
