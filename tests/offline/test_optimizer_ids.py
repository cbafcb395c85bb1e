"""Ids of an optimizer get the right names, or none: shapes, kept orders and `--param-names` decide."""

from __future__ import annotations

import copy
import json
from functools import partial
from pathlib import Path
from typing import Any

import bitsandbytes
import pytest
import torch
from safetensors.torch import load_file, save_file

import shardckpt
from shardckpt.errors import AmbiguousError, FormatError, UsageError


def trained(count: int = 3, *, is_reversed: bool = False) -> tuple[torch.nn.Module, dict[str, Any]]:
    """Return layers of one shape, whose names sort in another order, and their optimizer's state."""
    names = ["z", "a", "m"][:count]
    net = torch.nn.ModuleDict({name: torch.nn.Linear(2, 2, bias=False) for name in names})
    for i, layer in enumerate(net.values()):
        layer.weight.grad = torch.full((2, 2), float(i + 1))
    parameters = list(net.parameters())
    optim = torch.optim.AdamW(parameters[::-1] if is_reversed else parameters)
    optim.step()
    return net, optim.state_dict()


def accelerate_folder(folder: Path, net: torch.nn.Module, state: dict[str, Any]) -> str:
    folder.mkdir()
    save_file(net.state_dict(), folder / "model.safetensors")
    torch.save(state, folder / "optimizer.bin")
    torch.save({"step": 1}, folder / "random_states_0.pkl")
    return str(folder)


def torch_file(path: Path, net: torch.nn.Module, state: dict[str, Any]) -> str:
    torch.save({"model": net.state_dict(), "optim": state}, path)
    return str(path)


def names_file(folder: Path) -> str:
    path = folder / "names.json"
    path.write_text(json.dumps(["z.weight", "a.weight", "m.weight"]))
    return str(path)


def moments(folder: Path) -> dict[str, float]:
    tensors = load_file(folder / "optimizer.safetensors")
    return {key: float(value[0, 0]) for key, value in tensors.items() if key.endswith("exp_avg")}


RIGHT = {"z.weight/exp_avg": 0.1, "a.weight/exp_avg": 0.2, "m.weight/exp_avg": 0.3}


def test_sorted_names_of_equal_shapes_need_a_list_of_names(tmp_path: Path) -> None:
    source = accelerate_folder(tmp_path / "acc", *trained())
    with pytest.raises(AmbiguousError, match=r"3 ids.*several ways.*--param-names"):
        shardckpt.consolidate(source, tmp_path / "out", part="all")
    assert not (tmp_path / "out").exists()
    report = shardckpt.consolidate(source, tmp_path / "out", part="all", param_names=names_file(tmp_path))
    assert moments(tmp_path / "out") == pytest.approx(RIGHT)
    assert not any("order" in line for line in report.warnings)


@pytest.mark.parametrize("verb", [shardckpt.rekey, shardckpt.convert])
def test_other_verbs_refuse_to_guess_too(verb: Any, tmp_path: Path) -> None:
    source = accelerate_folder(tmp_path / "acc", *trained())
    options = {"to": "names"} if verb is shardckpt.rekey else {"part": "all"}
    with pytest.raises(AmbiguousError, match="--param-names"):
        verb(source, tmp_path / "out", **options)


def test_different_shapes_decide_under_sorted_names(tmp_path: Path) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 4))
    optim = torch.optim.AdamW(list(net.parameters())[::-1])
    for parameter in net.parameters():
        parameter.grad = torch.full_like(parameter, float(parameter.numel()))
    optim.step()
    source = accelerate_folder(tmp_path / "acc", net, optim.state_dict())
    report = shardckpt.consolidate(source, tmp_path / "out", part="all")
    found = load_file(tmp_path / "out" / "optimizer.safetensors")
    for name, parameter in net.named_parameters():
        assert torch.equal(found[f"{name}/exp_avg"], optim.state[parameter]["exp_avg"])
    assert not any("order" in line for line in report.warnings)


def test_the_order_of_a_state_dict_is_taken_and_this_is_told(tmp_path: Path) -> None:
    report = shardckpt.consolidate(torch_file(tmp_path / "a.pt", *trained()), tmp_path / "out", part="all")
    assert moments(tmp_path / "out") == pytest.approx(RIGHT)
    assert any("in the order of the model's state dict" in line and "--param-names" in line for line in report.warnings)


def test_a_step_made_of_a_sorted_folder_does_not_claim_its_order(tmp_path: Path) -> None:
    source = accelerate_folder(tmp_path / "acc", *trained())
    shardckpt.reshard(source, tmp_path / "step", world_size=1, allow_loss=True)
    with pytest.raises(AmbiguousError, match="--param-names"):
        shardckpt.consolidate(tmp_path / "step", tmp_path / "out", part="all")


class TestAnOptimizerAlone:
    """Its file has no model, as `optimizer.pt` of a Trainer; `--shapes-from` the model beside it."""

    @staticmethod
    def folder(path: Path) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        """Write a model and an optimizer of two groups, weights first, as a Trainer groups them."""
        net = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 4))
        groups = [[p for p in net.parameters() if p.ndim == dims] for dims in (2, 1)]
        optim = torch.optim.AdamW([{"params": params} for params in groups])
        for parameter in net.parameters():
            parameter.grad = torch.full_like(parameter, float(parameter.numel()))
        optim.step()
        path.mkdir()
        save_file(net.state_dict(), path / "model.safetensors")
        torch.save(optim.state_dict(), path / "optimizer.pt")
        return net, optim

    def test_its_ids_are_named_by_the_shapes_of_the_model(self, tmp_path: Path) -> None:
        net, optim = self.folder(tmp_path / "ck")
        options: dict[str, Any] = {"part": "optim", "shapes_from": tmp_path / "ck"}
        shardckpt.consolidate(tmp_path / "ck" / "optimizer.pt", tmp_path / "out", **options)
        found = load_file(tmp_path / "out" / "optimizer.safetensors")
        for name, parameter in net.named_parameters():
            assert torch.equal(found[f"{name}/exp_avg"], optim.state[parameter]["exp_avg"])

    def test_a_list_of_names_in_another_order_is_refused(self, tmp_path: Path) -> None:
        net, _ = self.folder(tmp_path / "ck")
        (tmp_path / "names.json").write_text(json.dumps([name for name, _ in net.named_parameters()]))
        options: dict[str, Any] = {"part": "optim", "shapes_from": tmp_path / "ck"}
        with pytest.raises(UsageError, match=r"calls id 1 '0.bias', which has another shape"):
            shardckpt.consolidate(
                tmp_path / "ck" / "optimizer.pt", tmp_path / "out", param_names=tmp_path / "names.json", **options
            )

    def test_equal_shapes_under_sorted_names_are_not_guessed(self, tmp_path: Path) -> None:
        net, state = trained()
        save_file(net.state_dict(), tmp_path / "model.safetensors")
        torch.save(state, tmp_path / "optimizer.pt")
        options: dict[str, Any] = {"part": "optim", "shapes_from": tmp_path / "model.safetensors"}
        with pytest.raises(AmbiguousError, match=r"several ways, and the files keep no order.*--param-names"):
            shardckpt.consolidate(tmp_path / "optimizer.pt", tmp_path / "out", **options)


class TestDiff:
    def test_names_and_ids_without_certain_names_are_not_compared(self, tmp_path: Path) -> None:
        net, state = trained(is_reversed=True)
        source = torch_file(tmp_path / "a.pt", net, state)
        shardckpt.consolidate(source, tmp_path / "wrong", part="all")
        found = shardckpt.diff(source, tmp_path / "wrong", part="optim")
        assert not found.same
        assert (found.compared, found.differences, found.value_differences) == (0, (), ())
        [(name, why)] = found.not_compared
        assert name.startswith("optim")
        assert "--param-names" in why

    def test_ids_are_compared_with_ids(self, tmp_path: Path) -> None:
        net, state = trained()
        first = torch_file(tmp_path / "a.pt", net, state)
        second = accelerate_folder(tmp_path / "acc", net, state)
        found = shardckpt.diff(first, second, part="optim")
        assert found.same
        assert found.compared == 9
        state["state"][1]["exp_avg"][0, 0] += 1
        changed = torch_file(tmp_path / "b.pt", net, state)
        [difference] = shardckpt.diff(changed, second, part="optim").differences
        assert difference.name == "1/exp_avg"

    def test_an_optimizer_alone_is_compared_by_its_ids(self, tmp_path: Path) -> None:
        net, state = trained(1)
        torch.save(state, tmp_path / "optimizer.pt")
        found = shardckpt.diff(torch_file(tmp_path / "a.pt", net, state), tmp_path / "optimizer.pt", part="optim")
        assert found.same
        assert found.compared == 3


def test_a_model_alone_comes_without_a_word_about_the_optimizer(fixtures: Path, tmp_path: Path) -> None:
    case = fixtures / "fsdp1_local_gpt2_w2"
    with_both = shardckpt.consolidate(case / "ckpt", tmp_path / "both", part="all")
    assert any("optim: " in line for line in with_both.warnings)
    report = shardckpt.consolidate(case / "ckpt", tmp_path / "out", part="model")
    assert not any("optim" in line for line in report.warnings)


def train_step(net: torch.nn.Module, optim: torch.optim.Optimizer) -> None:
    net(torch.ones(4, 128)).square().mean().backward()
    optim.step()
    optim.zero_grad()


@pytest.mark.parametrize("via", ["", "safetensors", "torch", "dcp", "native"])
def test_nested_slots_of_an_eight_bit_optimizer_come_back_nested(via: str, tmp_path: Path) -> None:
    """bitsandbytes keeps its moments in a dict inside of a parameter's state, and its first step needs them there."""
    make = partial(bitsandbytes.optim.AdamW8bit, lr=0.01, min_8bit_size=64)
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(128, 128), torch.nn.Linear(128, 16))
    optim = make(net.parameters())
    train_step(net, optim)
    source = torch_file(tmp_path / "trained.pt", net, optim.state_dict())
    names = tmp_path / "names.json"
    names.write_text(json.dumps([name for name, _ in net.named_parameters()]))
    if via:
        shardckpt.consolidate(source, tmp_path / via, part="all", param_names=names, to=via)
        source = str(tmp_path / via)
    shardckpt.consolidate(source, tmp_path / "ids.pt", part="optim", param_names=names, optim_keys="ids")
    resumed = copy.deepcopy(net)
    fresh = make(resumed.parameters())
    fresh.load_state_dict(torch.load(tmp_path / "ids.pt"))
    train_step(net, optim)
    train_step(resumed, fresh)
    assert all(map(torch.equal, resumed.parameters(), net.parameters()))


def test_lists_and_values_inside_of_slots_come_back_as_they_were(tmp_path: Path) -> None:
    net, state = trained(1)
    slots = {"exp_avg": torch.ones(2, 2), "pair": [torch.ones(1), {"n": 3, "t": torch.zeros(2)}], "inner": {"k": None}}
    slots["inner"]["deep"] = torch.full((2,), 5.0)  # type: ignore[index]
    state["state"][0] = slots
    torch_file(tmp_path / "src.pt", net, state)
    shardckpt.consolidate(tmp_path / "src.pt", tmp_path / "folder", part="all")
    shardckpt.consolidate(tmp_path / "folder", tmp_path / "ids.pt", part="optim", optim_keys="ids")
    found = torch.load(tmp_path / "ids.pt")["state"][0]
    torch.testing.assert_close(found, slots, rtol=0, atol=0)


def test_two_slots_with_one_name_are_refused(tmp_path: Path) -> None:
    net, state = trained(1)
    state["state"][0] = {"a": {"b": torch.ones(2, 2)}, "a.b": torch.zeros(2, 2)}
    torch_file(tmp_path / "src.pt", net, state)
    with pytest.raises(FormatError, match=r"two values of an optimizer would get one name"):
        shardckpt.consolidate(tmp_path / "src.pt", tmp_path / "out", part="all")
