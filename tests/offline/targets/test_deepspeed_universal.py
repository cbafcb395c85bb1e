"""`--to deepspeed-universal`: files that plain `torch.load` reads, which hold all that the source held."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import shardckpt
from shardckpt.errors import UsageError
from tests.kit.writers.deepspeed_writer import STEPS, Run, write

WEIGHTS = {"a.w": torch.arange(35.0).view(5, 7) / 3, "b": torch.arange(4.0)}
RUN = Run(
    [{"a.w": WEIGHTS["a.w"]}, {"b": WEIGHTS["b"]}],
    held={"steps": torch.tensor(5), "mask": torch.tensor([True, False])},
    shared={"head": "a.w"},
)


def optimizer(**slots: torch.Tensor) -> dict[str, Any]:
    state = {n: {"exp_avg": w + 1, "step": torch.tensor(4.0), **slots} for n, w in WEIGHTS.items()}
    return {"state": state, "param_groups": [{"lr": 0.1, "params": list(WEIGHTS)}]}


def loaded(file: Path) -> Any:
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("stage", [2, 3])
def test_what_came_from_deepspeed_comes_back_the_same(stage: int, tmp_path: Path) -> None:
    source = write(tmp_path / "zero", RUN, stage, 3)
    shardckpt.consolidate(source, tmp_path / "out", to="deepspeed-universal", part="all")
    assert all(shardckpt.diff(source, tmp_path / "out", part=part).same for part in ("model", "optim"))
    for name, value in RUN.trained.items():
        folder = tmp_path / "out/global_step3_universal/zero" / name
        assert torch.equal(loaded(folder / "fp32.pt")["param"], value)
        assert loaded(folder / "fp32.pt")["cat_dim"] == 0
        assert torch.equal(loaded(folder / "exp_avg_sq.pt")["param"], RUN.moments()[f"{name}/exp_avg_sq"])
        assert loaded(folder / "step.pt") == STEPS
    assert (tmp_path / "out/latest_universal").read_text() == "global_step3_universal"


def test_the_model_file_holds_weights_ties_and_shapes(tmp_path: Path) -> None:
    source = write(tmp_path / "zero", RUN, 2, 2)
    shardckpt.consolidate(source, tmp_path / "out", to="deepspeed-universal", part="all")
    step = tmp_path / "out/global_step3_universal"
    model = loaded(step / "mp_rank_00_model_states.pt")
    assert list(model["module"]) == RUN.names
    assert all(torch.equal(model["module"][name], value) for name, value in RUN.module().items())
    assert model["module"]["head"].data_ptr() == model["module"]["a.w"].data_ptr()
    assert model["shared_params"] == {"head": "a.w"}
    assert [list(group.items()) for group in model["param_shapes"]] == [[("a.w", (5, 7))], [("b", (4,))]]
    assert (model["global_steps"], model["mp_world_size"]) == (3, 1)
    part = loaded(step / "zero_pp_rank_0_mp_rank_00_model_states.pt")
    assert part["module"] == {}
    assert {**part, "module": 0} == {**model, "module": 0}
    state = loaded(step / "zero/optimizer_state.pt")
    assert [group["params"] for group in state["param_groups"]] == [[0], [1]]
    assert state["optimizer_state_dict"]["state"][0]["step"] == STEPS


def test_other_frameworks_give_their_weights_as_masters(tmp_path: Path) -> None:
    model = {"a.w": WEIGHTS["a.w"].bfloat16(), "b": WEIGHTS["b"]}
    torch.save({"model": model, "optimizer": optimizer()}, tmp_path / "a.pt")
    shardckpt.consolidate(tmp_path / "a.pt", tmp_path / "out", to="deepspeed-universal", part="all")
    folder = tmp_path / "out/global_step4_universal/zero/a.w"
    assert sorted(file.name for file in folder.iterdir()) == ["exp_avg.pt", "fp32.pt", "step.pt"]
    found = loaded(folder / "fp32.pt")["param"]
    assert found.dtype == torch.float32
    assert torch.equal(found, model["a.w"].float())


@pytest.mark.parametrize(
    ("state", "options", "message"),
    [
        (optimizer(), {"part": "model"}, "--part all"),
        (optimizer(), {"part": "all", "optim_keys": "ids"}, "by name"),
        (optimizer(), {"part": "all", "rename": ["a.w=a/w"]}, "the name of a folder"),
        (optimizer(factor=torch.zeros(3)), {"part": "all"}, "a.w/factor, which is not shaped like its parameter"),
        ({"state": {}, "param_groups": [{"params": ["gone"]}]}, {"part": "all"}, "'gone', which the model lacks"),
    ],
    ids=["model", "ids", "slash", "factor", "gone"],
)
def test_what_deepspeed_would_not_load_is_said_and_nothing_is_written(
    state: dict[str, Any], options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    torch.save({"model": WEIGHTS, "optimizer": state}, tmp_path / "a.pt")
    with pytest.raises(UsageError, match=re.escape(message)):
        shardckpt.consolidate(tmp_path / "a.pt", tmp_path / "out", to="deepspeed-universal", **options)
    assert [path.name for path in tmp_path.iterdir()] == ["a.pt"]


def test_a_parameter_without_state_beside_others_is_named(tmp_path: Path) -> None:
    state = optimizer()
    del state["state"]["b"]["exp_avg"]
    torch.save({"model": WEIGHTS, "optimizer": state}, tmp_path / "a.pt")
    with pytest.raises(UsageError, match="'b' has no exp_avg"):
        shardckpt.consolidate(tmp_path / "a.pt", tmp_path / "out", to="deepspeed-universal", part="all")


def test_weights_without_an_optimizer_are_nothing_to_resume_from(tmp_path: Path) -> None:
    torch.save({"model": WEIGHTS}, tmp_path / "a.pt")
    with pytest.raises(UsageError, match=r"the source has no optimizer.*--optim-key"):
        shardckpt.consolidate(tmp_path / "a.pt", tmp_path / "out", to="deepspeed-universal", part="all")
    assert [path.name for path in tmp_path.iterdir()] == ["a.pt"]


def test_one_file_cannot_be_one(tmp_path: Path) -> None:
    torch.save({"model": WEIGHTS, "optimizer": optimizer()}, tmp_path / "a.pt")
    with pytest.raises(UsageError, match="is a folder"):
        shardckpt.consolidate(tmp_path / "a.pt", tmp_path / "out.pt", to="deepspeed-universal", part="all")


def test_a_dry_run_names_the_files(tmp_path: Path) -> None:
    torch.save({"model": WEIGHTS, "optimizer": optimizer()}, tmp_path / "a.pt")
    report = shardckpt.consolidate(
        tmp_path / "a.pt", tmp_path / "out", to="deepspeed-universal", part="all", dry_run=True
    )
    assert "global_step4_universal/zero/a.w/fp32.pt" in {file.name for file in report.files}
    assert not (tmp_path / "out").exists()
