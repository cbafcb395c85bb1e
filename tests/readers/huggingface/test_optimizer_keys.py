"""`param_groups.json`: what plain JSON could not hold comes back exactly, or the file is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from shardckpt.errors import CheckpointError
from shardckpt.readers.registry import open_checkpoint

GROUPS: dict[str, Any] = {
    "param_groups": [{"params": ["w"], "betas": [0.9, 0.99], "eps": "inf"}],
    "non_tensor_state": {"w": {"mode": [1]}},
}


def opened(folder: Path, exact: object) -> dict[tuple[Any, ...], object]:
    save_file({"w": torch.ones(2)}, folder / "model.safetensors")
    save_file({"w/exp_avg": torch.ones(2)}, folder / "optimizer.safetensors")
    (folder / "param_groups.json").write_text(json.dumps({**GROUPS, "exact": exact}))
    manifest = open_checkpoint(str(folder)).manifest
    return {path: entry.value for path, entry in manifest.objects.items()}


def test_exact_values_take_the_place_of_plain_ones(tmp_path: Path) -> None:
    exact = [
        [["param_groups", 0, "betas"], {"$tuple": [0.9, 0.99]}],
        [["param_groups", 0, "eps"], {"$float": "7ff0000000000000"}],
        [["non_tensor_state", "w", "mode"], {"$bytes": "AA=="}],
    ]
    found = opened(tmp_path, exact)
    assert found["optimizer", "param_groups"] == [{"params": ["w"], "betas": (0.9, 0.99), "eps": float("inf")}]
    assert found["optimizer", "state", "w", "mode"] == b"\0"


@pytest.mark.parametrize(
    "pair",
    [
        [],
        3,
        [["param_groups"], 1],
        [["param_groups", 0, "none"], 1],
        [["param_groups", 7, "betas"], 1],
        [["param_groups", -1, "betas"], 1],
        [["param_groups", "0", "betas"], 1],
        [["param_groups", 0, ["betas"]], 1],
        [["param_groups", 0, {}], 1],
        [["gone", 0, "betas"], 1],
        [["exact", 0, 0], 1],
        [["param_groups", 0, "betas"], {"$tuple": 3}],
        [["param_groups", 0, "betas"], {"$unknown": 3}],
        [["param_groups", 0, "betas", "more"], 1],
    ],
    ids=lambda pair: str(pair)[:40],
)
def test_what_belongs_nowhere_or_is_no_value_is_refused(tmp_path: Path, pair: object) -> None:
    with pytest.raises(CheckpointError):
        opened(tmp_path, [pair])


def test_anything_but_a_list_counts_for_nothing(tmp_path: Path) -> None:
    assert opened(tmp_path, {"a": 1})["optimizer", "param_groups"] == GROUPS["param_groups"]
