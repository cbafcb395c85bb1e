"""A rank's shard of a flat parameter is never taken for a whole tensor, with or without checksums."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed import fsdp as theirs
from torch.nn.parallel import DistributedDataParallel

import shardckpt
from shardckpt import core as ours
from shardckpt.errors import ShardckptError
from shardckpt.state import load_model_state_dict, model_state_dict
from tests.kit.models.states import FRONT_ENDS, Net, plain_of, quiet, step, wrapper
from tests.kit.ranks.harness import run

WRAPPERS = {
    "ours, flat": wrapper(ours),
    "ours, originals": wrapper(ours, use_orig_params=True),
    "torch, flat": wrapper(theirs),
    "torch, originals": wrapper(theirs, use_orig_params=True),
}


def message_of(action, *args, **kwargs) -> str:
    try:
        action(*args, **kwargs)
    except ShardckptError as error:
        return str(error)
    return "nothing was raised"


def lone(face: str) -> nn.Module:
    """A module of one parameter, so that its shard is all of a flat parameter's memory."""
    engine = theirs if face.startswith("torch") else ours
    options = {"device_id": torch.device("cpu")} if engine is theirs else {}
    made = nn.Linear(8, 8, bias=False)
    return quiet(engine.FullyShardedDataParallel, made, use_orig_params=face.endswith("originals"), **options)


@pytest.mark.parametrize("face", WRAPPERS)
def test_a_shard_without_its_wrapper_is_refused_by_its_path(tmp_path: Path, face: str) -> None:
    def body(rank: int, world: int) -> list[str]:
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        model, single = WRAPPERS[face](Net((1,))), lone(face)
        inner = model.module
        optim = torch.optim.AdamW(model.parameters())
        step(model, optim)
        first = next(name for name, p in inner.named_parameters() if "_fsdp_wrapped_module" not in name)
        cases = {
            "inner module": {"run": {"model": inner}},
            "inner module of one parameter": {"model": single.module},
            "parameters": {"model": {first: dict(inner.named_parameters())[first]}},
            "state dict": {"model": {first: inner.state_dict()[first]}},
            "state dict of one parameter": {"model": single.module.state_dict()},
            "optimizer without its model": {"optim": optim},
        }
        wrong = []
        for name, state in cases.items():
            for checksums in (True, False):
                told = message_of(shardckpt.save, state, tmp_path / f"{face} {name}", checksums=checksums)
                path = "optim" if "optim" in state else "run.model" if "run" in state else "model"
                if f"{path}" not in told or "FullyShardedDataParallel" not in told:
                    wrong.append(f"{name}: {told}")
        shardckpt.save({"run": {"model": model}, "model": model, "optim": optim}, tmp_path / f"{face} right")
        for name, state in list(cases.items())[:3]:
            told = message_of(shardckpt.load, state, tmp_path / f"{face} right", strict=False)
            if "trainer.strategy.model" not in told:
                wrong.append(f"load of {name}: {told}")
        for action in (model_state_dict, lambda each: load_model_state_dict(each, {})):
            told = message_of(action, inner)
            if "FullyShardedDataParallel" not in told:
                wrong.append(f"state: {told}")
        return wrong

    assert run(2, body) == [[], []]
    assert [each.name for each in tmp_path.iterdir()] == [f"{face} right"]


def test_one_rank_alone_is_refused_as_several_are(tmp_path: Path) -> None:
    def body(rank: int, world: int) -> dict[str, list[str]]:
        messages = {}
        shardckpt.save({"optim": torch.optim.AdamW(Net((1,)).parameters())}, tmp_path / "plain")
        for face in ("ours, flat", "ours, originals", "torch, flat"):
            model = WRAPPERS[face](Net((1,)))
            optim = torch.optim.AdamW(model.parameters())
            messages[face] = [
                message_of(shardckpt.save, {"optim": optim}, tmp_path / "refused"),
                message_of(shardckpt.load, {"optim": optim}, tmp_path / "plain"),
                message_of(shardckpt.save, {"model": model.module}, tmp_path / "refused"),
            ]
        return messages

    (messages,) = run(1, body)
    for face, (saved, loaded, inner) in messages.items():
        assert "their model is not in the state" in saved, face
        assert "their model is not in the state" in loaded, face
        assert "Pass the module that FullyShardedDataParallel returned" in inner, face
    assert [each.name for each in tmp_path.iterdir()] == ["plain"]


UNSHARDED = {
    "torch, nothing sharded": lambda net: quiet(
        theirs.FullyShardedDataParallel,
        net,
        use_orig_params=True,
        sharding_strategy=theirs.ShardingStrategy.NO_SHARD,
        device_id=torch.device("cpu"),
    ),
    "ours, nothing sharded": wrapper(ours, use_orig_params=True, sharding_strategy=ours.ShardingStrategy.NO_SHARD),
    "torch in place": FRONT_ENDS["torch in place"],
    "ours in place": FRONT_ENDS["in place"],
    "ddp": DistributedDataParallel,
    "plain": plain_of,
}


def test_whole_tensors_and_dtensors_are_saved_without_their_wrapper(tmp_path: Path) -> None:
    def body(rank: int, world: int) -> list[str]:
        warnings.simplefilter("ignore")
        wrong = []
        for face, shard in UNSHARDED.items():
            torch.manual_seed(0)
            model = shard(Net((1,)))
            inner = getattr(model, "module", model)
            state = {"model": inner, "dict": dict(inner.state_dict()), "gain": dict(inner.named_parameters())["gain"]}
            told = message_of(shardckpt.save, state, tmp_path / face)
            if told != "nothing was raised":
                wrong.append(f"{face}: {told}")
        return wrong

    assert run(2, body) == [[], []]


def test_each_rank_may_keep_its_own_shard(tmp_path: Path) -> None:
    class Shards:
        def __init__(self, model: nn.Module) -> None:
            self.model, self.loaded = model, None

        def state_dict(self):
            return dict(self.model.module.state_dict())

        def load_state_dict(self, state) -> None:
            self.loaded = state

    def body(rank: int, world: int) -> bool:
        shards = Shards(lone("torch, originals"))
        shardckpt.save({"own": shardckpt.PerRank(shards)}, tmp_path / "own")
        shardckpt.load({"own": shardckpt.PerRank(shards)}, tmp_path / "own")
        return torch.equal(shards.loaded["weight"], shards.model.module.state_dict()["weight"])

    assert run(2, body) == [True, True]
