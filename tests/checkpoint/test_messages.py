"""What is said of values that differ between ranks, and of a checkpoint that holds more than what is loaded."""

from __future__ import annotations

import random
import uuid
import warnings
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import shardckpt
from shardckpt.checkpoint.planning.rank_report import build_mismatch_error
from tests.kit.models.states import refused
from tests.kit.ranks.harness import run


def test_what_differs_is_named_with_its_place_and_both_ways_out(tmp_path: Path) -> None:
    long = "x" * 811
    cases = {
        "`trainer` (str) differs between rank 0 and rank 1 at character 812. To keep rank 0's, broadcast it; to keep"
        " each rank's own, use shardckpt.PerRank.": ({"trainer": long + "a"}, {"trainer": long + "b"}),
        "`trainer` (str) differs between rank 0 and rank 1 at character 812": (
            {"trainer": long},
            {"trainer": long + "b"},
        ),
        "`deep.0.step` (int) differs between rank 0 (3) and rank 1 (4)": (
            {"deep": [{"step": 3}]},
            {"deep": [{"step": 4}]},
        ),
        "`step` is int on rank 0 and str on rank 1": ({"step": 3}, {"step": "3"}),
        "`seed` is in the state of rank 1, but not of rank 0": ({"a": 1}, {"a": 1, "seed": 2}),
        "`size` (Size) differs between rank 0 and rank 1": ({"size": torch.Size([1])}, {"size": torch.Size([2])}),
        "`w` (tensor) differs between rank 0 and rank 1. To keep": ({"w": torch.ones(2)}, {"w": torch.zeros(2)}),
        "`d` is dict on rank 0 and OrderedDict on rank 1": ({"d": {"a": 1}}, {"d": OrderedDict(a=1)}),
        "`t` is tuple on rank 0 and list on rank 1": ({"t": (1, 2)}, {"t": [1, 2]}),
        "`k` (dict) differs between rank 0 (1) and rank 1 ('1')": ({"k": {1: 5}}, {"k": {"1": 5}}),
        "`the state` (dict) differs between rank 0 ('a') and rank 1 ('a.b')": ({"a": {"b": 5}}, {"a.b": 5}),
        "`m.1` is in the state of rank 1, but not of rank 0. If each rank has another part of a model (a"
        " pipeline stage), save the modules and optimizers themselves, or the state dicts with": (
            {"m": {"0": torch.ones(2)}},
            {"m": {"1": torch.ones(2)}},
        ),
        "To keep each rank's own, wrap it in shardckpt.PerRank. If it is part of a sharded module, pass": (
            {"w": torch.ones(2)},
            {"w": torch.ones(3)},
        ),
    }

    def body(rank: int, world: int) -> list[str]:
        found = [refused(shardckpt.save, states[rank], tmp_path / "c") for states in cases.values()]
        return [told for wanted, told in zip(cases, found, strict=True) if wanted not in told]

    assert run(2, body) == [[], []]


def test_equal_values_in_another_order_are_saved_in_the_order_of_the_first_rank(tmp_path: Path) -> None:
    def body(rank: int, world: int) -> None:
        order = (lambda pairs: pairs) if rank == 0 else (lambda pairs: pairs[::-1])
        rows = order([("loss", 0.5), ("x", torch.ones(2)), (3, "three"), ("acc", torch.zeros(1))])
        names = {f"{n}" for n in order(list(range(0, 800, 8)))}
        state = {
            "plain": {str(key): value for key, value in rows},
            "keyed": dict(rows),
            "ordered": OrderedDict(rows),
            "names": names,
        }
        shardckpt.save(dict(order(list(state.items()))), tmp_path / "c")

    run(2, body)
    found = shardckpt.load(tmp_path / "c")
    assert list(found["keyed"]) == list(found["ordered"]) == ["loss", "x", 3, "acc"]
    assert torch.equal(found["plain"]["x"], torch.ones(2)) and len(found["names"]) == 100


def test_no_way_to_differ_has_an_empty_message() -> None:
    alike = {"v": ("0", "int", "1")}
    assert str(build_mismatch_error([alike, alike])).startswith("the states of the ranks have different structures")


def test_many_differences_are_counted() -> None:
    rows = [{f"v{at}": (str(rank * at), "int", str(rank * at)) for at in range(9)} for rank in range(3)]
    told = str(build_mismatch_error(rows))
    assert "`v1` (int) differs between rank 0 (0) and rank 1 (1)" in told and "; and 3 more" in told


def trainers_folder(folder: Path) -> Path:
    """What transformers' Trainer leaves of a sharded run."""
    model = nn.Linear(4, 4)
    optim = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optim.step()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": model.state_dict()}, checkpoint_id=folder / "pytorch_model_fsdp_0")
        state = {"optimizer": get_optimizer_state_dict(model, optim)}
        dcp.save(state, checkpoint_id=folder / "optimizer_0")
    torch.save({"last_epoch": 1}, folder / "scheduler.pt")
    generators = {"python": random.getstate(), "loader": uuid.uuid4(), "numpy": np.random.get_state()}
    torch.save(generators, folder / "rng_state_0.pth")
    return folder


def test_a_trainers_folder_is_loaded_in_part_or_without_what_is_not_safe(tmp_path: Path) -> None:
    folder = trainers_folder(tmp_path)
    model = nn.Linear(4, 4)
    with pytest.raises(shardckpt.errors.MismatchError) as caught:
        shardckpt.load({"model": model}, folder)
    holds = "The checkpoint also holds optimizer, rng_state_0.pth, scheduler.pt"
    ends = f"{holds}: to load only what you passed, ignore_extra=True."
    assert str(caught.value).endswith(ends)
    shardckpt.load({"model": model}, folder, ignore_extra=True)
    with pytest.warns(
        UserWarning, match=r"only the library that wrote them can read them: rng_state_0\.pth\.loader"
    ) as told:
        nest = shardckpt.load(folder)
    assert told[0].filename == __file__
    assert list(nest["rng_state_0.pth"]) == ["python", "numpy"] and nest["scheduler.pt"] == {"last_epoch": 1}
    assert torch.equal(nest["model"]["weight"], model.weight)
