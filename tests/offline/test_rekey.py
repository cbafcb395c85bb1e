"""An optimizer's state under other keys holds the same bits, and goes back to what it was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import shardckpt
from shardckpt.errors import CheckpointError, UsageError

PARAMETERS = {"a.w": torch.arange(6.0).view(2, 3), "a.b": torch.ones(3), "frozen": torch.ones(2), "z": torch.zeros(4)}
GROUPS: list[dict[str, Any]] = [
    {"lr": 0.1, "eps": 1e-8, "params": ["z", "a.w"]},
    {"lr": 0.2, "eps": 1e-8, "params": []},
    {"lr": 0.1, "eps": 1e-8, "params": ["a.b"]},
]
NAMED = {
    f"{name}/{slot}": scale * PARAMETERS[name] if slot != "step" else torch.tensor(scale)
    for scale, name in enumerate(("z", "a.w", "a.b"), 3)
    for slot in ("step", "exp_avg", "exp_avg_sq")
}
FORMS = ("names", "ids", "flatten")


def nested(*, by_id: bool) -> dict[str, Any]:
    """The same state as torch.optim, or as we, would give it."""
    names = [name for group in GROUPS for name in group["params"]]
    key: dict[str, Any] = {name: number if by_id else name for number, name in enumerate(names)}
    state: dict[Any, dict[str, Any]] = {}
    for full, value in NAMED.items():
        name, _, slot = full.rpartition("/")
        state.setdefault(key[name], {"kept": 7})[slot] = value
    groups = [{**group, "params": [key[name] for name in group["params"]]} for group in GROUPS]
    return {"state": state, "param_groups": groups}


@pytest.fixture
def src(tmp_path: Path) -> Path:
    torch.save({"model": PARAMETERS, "optimizer": nested(by_id=False)}, tmp_path / "src.pt")
    return tmp_path / "src.pt"


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "optimizer.safetensors")


def groups(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "param_groups.json").read_text())
    return found


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) and a[n].dtype == b[n].dtype for n in a)


def test_numbers_are_those_of_the_groups_and_keep_the_names(src: Path, tmp_path: Path) -> None:
    shardckpt.rekey(str(src), str(tmp_path / "out"), to="ids")
    number = {"z": 0, "a.w": 1, "a.b": 2}
    expected = {f"{number[n.rpartition('/')[0]]}/{n.rpartition('/')[2]}": v for n, v in NAMED.items()}
    assert same(tensors(tmp_path / "out"), expected)
    found = groups(tmp_path / "out")
    assert [g["params"] for g in found["param_groups"]] == [[0, 1], [], [2]]
    assert [g["param_names"] for g in found["param_groups"]] == [g["params"] for g in GROUPS]
    assert found["non_tensor_state"] == {str(i): {"kept": 7} for i in range(3)}
    assert same(load_file(tmp_path / "out" / "model.safetensors"), PARAMETERS)


def test_flattened_keys_are_those_of_torch(src: Path, tmp_path: Path) -> None:
    shardckpt.rekey(str(src), str(tmp_path / "out"), to="flatten", part="optim")
    assert same(
        tensors(tmp_path / "out"),
        {f"state.{n.rpartition('/')[0]}.{n.rpartition('/')[2]}": v for n, v in NAMED.items()},
    )
    flat = groups(tmp_path / "out")["flattened"]
    assert flat["param_groups.a.b.lr"] == 0.1
    assert flat["state.a.w.kept"] == 7
    assert len(flat) == 9


def test_one_file_holds_the_tensors_by_names(src: Path, tmp_path: Path) -> None:
    shardckpt.rekey(str(src), str(tmp_path / "out.safetensors"), to="names", part="optim")
    assert same(load_file(tmp_path / "out.safetensors"), NAMED)


@pytest.mark.parametrize("first", FORMS)
@pytest.mark.parametrize("second", FORMS)
@pytest.mark.parametrize("part", ["all", "optim"])
def test_every_way_there_leads_back(src: Path, tmp_path: Path, first: str, second: str, part: Any) -> None:
    """Frozen parameters, empty groups, groups alike and in another order than the model survive."""
    shardckpt.rekey(str(src), str(tmp_path / "one"), to=first, part=part)
    shardckpt.rekey(str(tmp_path / "one"), str(tmp_path / "two"), to=second, part=part)
    shardckpt.rekey(str(tmp_path / "two"), str(tmp_path / "back"), to="nest", part=part)
    assert same(tensors(tmp_path / "back"), NAMED)
    assert groups(tmp_path / "back")["param_groups"] == GROUPS
    assert groups(tmp_path / "back")["non_tensor_state"] == {n: {"kept": 7} for n in ("z", "a.w", "a.b")}
    shardckpt.rekey(str(tmp_path / "back"), str(tmp_path / "again"), to=first, part=part)
    for file in ("optimizer.safetensors", "param_groups.json"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "again" / file).read_bytes()


def test_numbers_of_torch_become_names_by_a_list(tmp_path: Path) -> None:
    torch.save(nested(by_id=True), tmp_path / "optim.pt")
    (tmp_path / "names.json").write_text(json.dumps(["z", "a.w", "a.b"]))
    given = {"part": "optim", "param_names": str(tmp_path / "names.json")}
    shardckpt.rekey(str(tmp_path / "optim.pt"), str(tmp_path / "out"), to="names", **given)
    assert same(tensors(tmp_path / "out"), NAMED)
    with pytest.raises((UsageError, CheckpointError), match="--param-names"):
        shardckpt.rekey(str(tmp_path / "optim.pt"), str(tmp_path / "none"), to="names", part="optim")


def test_names_get_the_numbers_of_another_optimizer(src: Path, tmp_path: Path) -> None:
    (tmp_path / "names.json").write_text(json.dumps(["a.b", "frozen", "a.w", "z"]))
    shardckpt.rekey(str(src), str(tmp_path / "out"), to="ids", param_names=str(tmp_path / "names.json"))
    assert torch.equal(tensors(tmp_path / "out")["0/exp_avg"], NAMED["a.b/exp_avg"])
    assert [g["params"] for g in groups(tmp_path / "out")["param_groups"]] == [[3, 2], [], [0]]
    (tmp_path / "names.json").write_text(json.dumps(["a.b", "z"]))
    with pytest.raises(UsageError, match=r"1 optimizer parameters have no number; found a\.w"):
        shardckpt.rekey(str(src), str(tmp_path / "no"), to="ids", param_names=str(tmp_path / "names.json"))


def test_what_cannot_be_is_refused(src: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="must be a kind of keys"):
        shardckpt.rekey(str(src), str(tmp_path / "out"), to="numbers")
    with pytest.raises(UsageError, match="no keys to change"):
        shardckpt.rekey(str(src), str(tmp_path / "out"), to="ids", part="model")
    with pytest.raises(UsageError, match="one file cannot store the param groups"):
        shardckpt.rekey(str(src), str(tmp_path / "out.safetensors"), to="ids", part="optim")
    torch.save(PARAMETERS, tmp_path / "model.pt")
    with pytest.raises(UsageError, match="holds no optimizer"):
        shardckpt.rekey(str(tmp_path / "model.pt"), str(tmp_path / "out"), to="ids")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("change", [{"keys": "odd"}, {"keys": 3}, {"non_tensor_state": {"x": {}}}, {"keys": "names"}])
def test_a_groups_file_that_says_nonsense_is_an_error(src: Path, tmp_path: Path, change: dict[str, Any]) -> None:
    shardckpt.rekey(str(src), str(tmp_path / "out"), to="ids")
    (tmp_path / "out/param_groups.json").write_text(json.dumps({**groups(tmp_path / "out"), **change}))
    try:
        shardckpt.rekey(str(tmp_path / "out"), str(tmp_path / "back"), to="names")
    except (CheckpointError, UsageError) as error:
        assert "\n" not in str(error)
    else:
        assert change == {"keys": "names"}
