"""Checkpoints of real frameworks get other keys right: as the truth says, and as torch's own optimizers take them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import shardckpt
from tests.kit.runs.cases import NAMES, Case, assert_same, read_case

ADAMW = torch.optim.AdamW
OPTIMIZERS = {"sgd": torch.optim.SGD, "adamw": ADAMW, "adamw1": ADAMW, "amsgrad": ADAMW}
WITH_OPTIMIZER = [name for name in NAMES if not name.startswith(("hf_", "peft_"))]


@pytest.fixture(params=[*WITH_OPTIMIZER, "fsdp1_full_llama_w2 by id"])
def case(request: pytest.FixtureRequest, fixtures: Path, tmp_path: Path) -> Case:
    name, _, by_id = request.param.partition(" ")
    found = read_case(fixtures, name, tmp_path)
    if by_id:
        (tmp_path / "ids.json").write_text(json.dumps(found.facts["optimizer_id_to_fqn"]))
        own = {"optim_key": "optim_param_id.pt", "param_names": str(tmp_path / "ids.json")}
        found = Case(**{**vars(found), "options": {**found.options, **own}})
    return found


def rekeyed(src: Path, dst: Path, to: str, **options: Any) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    shardckpt.rekey(str(src), str(dst), to=to, **options)
    return load_file(dst / "optimizer.safetensors"), json.loads((dst / "param_groups.json").read_text())


def test_names_are_those_of_the_truth(case: Case, tmp_path: Path) -> None:
    assert case.groups is not None
    tensors, groups = rekeyed(case.source, tmp_path / "names", "names", **case.options)
    assert_same(tensors, case.optim)
    assert {key: groups[key] for key in ("param_groups", "non_tensor_state")} == case.groups


def test_flattened_names_go_back(case: Case, tmp_path: Path) -> None:
    assert case.groups is not None
    flat, said = rekeyed(case.source, tmp_path / "flat", "flatten", **case.options)
    assert set(flat) == {f"state.{key.replace('/', '.')}" for key in case.optim}
    settings = sum((len(group) - 1) * len(group["params"]) for group in case.groups["param_groups"])
    assert len(said["flattened"]) == settings
    tensors, groups = rekeyed(tmp_path / "flat", tmp_path / "back", "nest")
    assert_same(tensors, case.optim)
    assert groups["param_groups"] == case.groups["param_groups"]


def test_numbers_are_those_of_torchs_optimizers(case: Case, tmp_path: Path) -> None:
    """The state loads into an optimizer with these groups, and lies at the parameters that the truth names."""
    assert case.groups is not None
    tensors, said = rekeyed(case.source, tmp_path / "ids", "ids", **case.options)
    weights = load_file(tmp_path / "ids/model.safetensors")
    parameters = {
        name: torch.nn.Parameter(torch.zeros_like(weights.get(name, torch.zeros(1)), dtype=torch.float32))
        for group in case.groups["param_groups"]
        for name in group["params"]
    }
    groups = [{"params": [parameters[n] for n in group["params"]]} for group in case.groups["param_groups"]]
    optim = OPTIMIZERS[case.facts["optimizer"].split()[0].lower()](groups, lr=9.0)
    state: dict[int, dict[str, Any]] = {}
    for key, value in tensors.items():
        number, _, slot = key.partition("/")
        state.setdefault(int(number), {})[slot] = value
    optim.load_state_dict({"state": state, "param_groups": said["param_groups"]})
    live = {f"{name}/{slot}": value for name, p in parameters.items() for slot, value in optim.state[p].items()}
    assert sorted(live) == sorted(case.optim)
    assert all(torch.equal(live[key].float(), case.optim[key].float()) for key in live)
    assert [group["lr"] for group in optim.param_groups] == [g["lr"] for g in case.groups["param_groups"]]
    tensors, groups_back = rekeyed(tmp_path / "ids", tmp_path / "back", "names")
    assert_same(tensors, case.optim)
    assert groups_back["param_groups"] == case.groups["param_groups"]
