"""Optimizer slots come back as they were: once, in the order of their memory, on their parameter's device."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import shardckpt
from shardckpt.errors import FormatError
from shardckpt.native.manifest_json import decode_manifest
from shardckpt.native.reader import build_manifest
from shardckpt.storage.local import LocalStore
from tests.kit.ranks.harness import run


class Rotating(torch.optim.Optimizer):
    """Rotates the gradient by eigenvectors in a list, as SOAP does, and has a table of its own in a dict."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            if not state:
                state.update(seen=0, sums=[torch.zeros(len(p), len(p)), None], table={"norm": torch.zeros(2), "n": 1})
                state["columns"] = torch.empty_strided((3, 4), (1, 3)).zero_()
                state["rotated"] = torch.empty_strided(p.shape, (1, len(p))).zero_()
            state["sums"][0] += p.grad @ p.grad.T
            state["basis"] = (torch.linalg.qr(state["sums"][0] + torch.eye(len(p)))[0],)
            state["columns"] += p.grad[:3, :4]
            state["rotated"] += p.grad
            state["table"]["norm"] += p.grad.norm()
            state["seen"] += 1
            (basis,) = state["basis"]
            p.sub_(0.05 * basis @ torch.tanh(basis.T @ p.grad) + 0.01 * state["rotated"] @ state["rotated"].T @ p.grad)


def rotating(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Linear(48, 48, bias=False)
    return model, Rotating(model.parameters())


def soap(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    import pytorch_optimizer

    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    return model, pytorch_optimizer.SOAP(model.parameters(), lr=0.01, precondition_frequency=2)


def train(model: nn.Module, optim: torch.optim.Optimizer, steps: range) -> None:
    width = next(model.parameters()).shape[1]
    for seed in steps:
        batch = torch.randn(16, width, generator=torch.Generator().manual_seed(seed))
        model(batch).square().mean().backward()
        optim.step()
        optim.zero_grad()


def described(value: Any) -> Any:
    """Return what a value of an optimizer is, with the strides of its tensors."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.stride(), value.dtype, value.device, value.tolist()
    if isinstance(value, dict):
        return {key: described(item) for key, item in value.items()}
    return type(value)(map(described, value)) if isinstance(value, (list, tuple)) else value


def slots(optim: torch.optim.Optimizer) -> Iterator[Any]:
    return (described(optim.state[p]) for group in optim.param_groups for p in group["params"])


@pytest.mark.parametrize("build", [rotating, soap])
@pytest.mark.parametrize("is_new", [True, False], ids=["new", "trained"])
def test_a_resume_has_the_saved_slots_and_goes_on_bit_for_bit(
    build: Callable[[int], tuple[nn.Module, torch.optim.Optimizer]], is_new: bool, tmp_path: Path
) -> None:
    torch.set_num_threads(1)
    model, optim = build(1)
    train(model, optim, range(5))
    shardckpt.save({"model": model, "optim": optim}, tmp_path / "step")
    saved = list(slots(optim))
    other, again = build(2)
    train(other, again, range(0 if is_new else 2))
    shardckpt.load({"model": other, "optim": again}, tmp_path / "step", verify="live")
    assert list(slots(again)) == saved
    for each, with_it in ((model, optim), (other, again)):
        train(each, with_it, range(5, 9))
    for mine, expected in zip(other.parameters(), model.parameters(), strict=True):
        assert torch.equal(mine, expected)


def test_a_save_whose_plan_is_reused_has_the_strides_that_are_there_now(tmp_path: Path) -> None:
    state = {"rows": torch.arange(6.0).view(2, 3)}
    columns = {"rows": torch.arange(6.0).view(2, 3).T.contiguous().T}
    for number, each in enumerate((state, columns, state)):
        shardckpt.save(each, tmp_path / str(number))
    strides = [shardckpt.load(tmp_path / str(number))["rows"].stride() for number in range(3)]
    assert strides == [(3, 1), (1, 2), (3, 1)]


def test_shards_and_ranks_keep_the_order_of_their_memory(tmp_path: Path) -> None:
    def body(rank: int, world: int) -> list[Any]:
        torch.manual_seed(0)
        model = nn.Linear(8, 6, bias=False)
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
        optim = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model(torch.ones(2, 8)).sum().backward()
        optim.step()
        held = optim.state[model.weight]["momentum_buffer"]
        assert isinstance(held, DTensor)
        held._local_tensor = held._local_tensor.T.contiguous().T
        own = torch.full((2, 3), float(rank)).T
        shardckpt.save({"m": model, "o": optim, "r": shardckpt.PerRank({"t": own})}, tmp_path / "step")
        again, mine = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), shardckpt.PerRank({})
        shardckpt.load({"m": model, "o": again, "r": mine}, tmp_path / "step")
        return [again.state[model.weight]["momentum_buffer"].to_local().stride(), mine.held["t"].stride()]

    assert run(2, body) == [[(1, 3), (1, 3)]] * 2


@pytest.mark.parametrize("rows", [[[0, [0, 0]]], [[5, [1, 0]]], [[0, [0]]], "text", [[0, ["a", "b"]]]])
def test_a_wrong_order_in_a_manifest_is_refused(rows: Any, tmp_path: Path) -> None:
    shardckpt.save({"a": torch.ones(2, 3).T}, tmp_path)
    (file,) = tmp_path.glob("*.manifest.json")
    raw = json.loads(file.read_bytes())
    assert raw["topology"]["memory_orders"] == [[0, [1, 0]]]
    raw["topology"]["memory_orders"] = rows
    contents = decode_manifest(json.dumps(raw, separators=(",", ":")).encode())
    with pytest.raises(FormatError, match="memory_orders"):
        build_manifest(LocalStore(str(tmp_path)), contents, {})
