"""Experts and pipelines of DeepSpeed: files of ranks that hold different parameters are one model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from shardckpt.errors import AmbiguousError, FormatError, IncompleteError, UnsupportedError
from shardckpt.readers.registry import open_checkpoint
from tests.kit.writers.materialise import assert_same
from tests.readers.deepspeed.test_deepspeed_reader import numbered, opened

START = "moe.deepspeed_moe.experts.deepspeed_experts."
DENSE = {"a.weight": numbered(3, 5), "a.bias": numbered(3)}


def padded_parts(tensors: list[torch.Tensor], count: int) -> list[torch.Tensor]:
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    return list(torch.nn.functional.pad(flat, (0, -flat.numel() % (2 * count))).chunk(count))


def optim(masters: list[torch.Tensor], counts: list[int], config: dict[str, Any]) -> dict[str, Any]:
    state = {i: {"step": torch.tensor(2.0), "exp_avg": part * 3} for i, part in enumerate(masters)}
    groups = [{"lr": 0.1 + i, "params": [i]} for i in range(len(masters))]
    said = {
        "partition_count": counts,
        "base_optimizer_state": {"state": state, "param_groups": groups},
        "single_partition_of_fp32_groups": [part.clone() for part in masters],
    }
    return {"optimizer_state_dict": said, "ds_config": config}


def model(module: Any, shapes: list[dict[str, torch.Size]], world: int) -> dict[str, Any]:
    return {"module": module, "param_shapes": shapes, "shared_params": {}, "global_steps": 2, "dp_world_size": world}


def write_experts(folder: Path, world: int, ep: int, *, is_data_first: bool = False) -> dict[str, torch.Tensor]:
    """Write four experts, spread over sets of `ep` ranks; return their master weights by name in the whole model."""
    folder.mkdir()
    held, count = 4 // ep, world // ep
    experts = {f"{START}{e}.w": numbered(3, 2) + e for e in range(4)}
    local = {f"{START}{e}.w": torch.Size([3, 2]) for e in range(held)}
    shapes = [{name: value.shape for name, value in DENSE.items()}, local]
    dense = padded_parts(list(DENSE.values()), world)
    config = {"use_data_before_expert_parallelism": is_data_first}
    for rank in range(world):
        set_, place = (rank // count, rank % count) if is_data_first else (rank % ep, rank // ep)
        mine = padded_parts([experts[f"{START}{set_ * held + e}.w"] for e in range(held)], count)[place]
        state = optim([dense[rank], mine], [world, count], config)
        torch.save(state, folder / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    for e, (name, value) in enumerate(experts.items()):
        torch.save({name: value.bfloat16()}, folder / f"layer_0_expert_{e}_mp_rank_00_model_states.pt")
    module = {name: value.bfloat16() for name, value in DENSE.items()}
    torch.save(model(module, shapes, world), folder / "mp_rank_00_model_states.pt")
    return {**DENSE, **experts}


@pytest.mark.parametrize(("world", "ep"), [(2, 2), (4, 2), (4, 4), (2, 1), (6, 2)])
@pytest.mark.parametrize("is_data_first", [False, True])
def test_every_expert_has_its_own_number(world: int, ep: int, is_data_first: bool, tmp_path: Path) -> None:
    expected = write_experts(tmp_path / "step", world, ep, is_data_first=is_data_first)
    reader = opened(tmp_path / "step")
    assert {path[1] for path in reader.manifest.tensors if path[0] == "model"} == set(expected)
    for name, value in expected.items():
        assert_same(reader, ("model", name), value.bfloat16())
        assert_same(reader, ("master", name), value)
        assert_same(reader, ("optimizer", "state", name, "exp_avg"), value * 3)
    groups: Any = reader.manifest.objects["optimizer", "param_groups"].value
    assert [sorted(group["params"]) for group in groups] == [sorted(DENSE), sorted(set(expected) - set(DENSE))]


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    write_experts(tmp_path / "step", 2, 2)
    (tmp_path / "step/layer_0_expert_3_mp_rank_00_model_states.pt").unlink()
    with pytest.raises(IncompleteError, match=r"deepspeed_experts\.3\.w' are in no file"):
        open_checkpoint(str(tmp_path / "step"))


def test_groups_of_fewer_ranks_that_are_no_experts_are_refused(tmp_path: Path) -> None:
    write_experts(tmp_path / "step", 2, 2)
    file = tmp_path / "step/mp_rank_00_model_states.pt"
    state = torch.load(file)
    state["param_shapes"][1] = {"other.w": torch.Size([6, 2])}
    torch.save(state, file)
    with pytest.raises(UnsupportedError, match="group 1 is shared by 1 of 2 ranks"):
        open_checkpoint(str(tmp_path / "step"))


BLOCK = {"weight": numbered(2, 2), "bias": numbered(2)}
EMBED = {"weight": numbered(7, 2), "scale": numbered(3)}


def write_pipeline(folder: Path, world: int, ties: tuple[str, ...] = ("embed",)) -> dict[str, torch.Tensor]:
    """Write two stages of two blocks each, and modules that both share; return master weights by name."""
    folder.mkdir()
    shared = {f"tied_modules.{tie}.{key}": value + i for i, tie in enumerate(ties) for key, value in EMBED.items()}
    every = dict(shared)
    for stage in range(2):
        blocks = {f"{2 * stage + b + 1}.{key}": value + stage for b in range(2) for key, value in BLOCK.items()}
        mine = {**shared, **blocks}
        every |= blocks
        for rank, part in enumerate(padded_parts(list(mine.values()), world)):
            file = f"bf16_zero_pp_rank_{rank}_mp_rank_{stage:02d}_optim_states.pt"
            torch.save(optim([part], [world], {}), folder / file)
        shapes = [{name: value.shape for name, value in mine.items()}]
        torch.save(model(None, shapes, world), folder / f"mp_rank_{stage:02d}_model_states.pt")
        for b in range(2):
            block = {key: value.bfloat16() + stage for key, value in BLOCK.items()}
            torch.save({**block, "steps": torch.tensor(3)}, folder / f"layer_{2 * stage + b + 1:02d}-model_states.pt")
    for i, _ in enumerate(ties):
        content = {key: (value + i).bfloat16() for key, value in EMBED.items()}
        torch.save(content, folder / f"layer_{i and 9:02d}-model_00-model_states.pt")
    return every


@pytest.mark.parametrize("world", [1, 3])
def test_stages_are_one_model_and_what_they_share_is_there_once(world: int, tmp_path: Path) -> None:
    expected = write_pipeline(tmp_path / "step", world)
    reader = opened(tmp_path / "step")
    names = {path[1] for path in reader.manifest.tensors if path[0] == "model"}
    assert names == {*expected, *(f"{layer}.steps" for layer in range(1, 5))}
    for name, value in expected.items():
        assert reader.manifest.tensors["model", name].stored == "bfloat16"
        assert_same(reader, ("master", name), value)
        assert_same(reader, ("optimizer", "state", name, "exp_avg"), value * 3)
    groups: Any = reader.manifest.objects["optimizer", "param_groups"].value
    assert [sorted(group["params"]) for group in groups] == [sorted(expected)]


def test_stages_with_other_settings_keep_groups_of_their_own(tmp_path: Path) -> None:
    expected = write_pipeline(tmp_path / "step", 1)
    file = tmp_path / "step/bf16_zero_pp_rank_0_mp_rank_01_optim_states.pt"
    state = torch.load(file)
    state["optimizer_state_dict"]["base_optimizer_state"]["param_groups"][0]["lr"] = 0.25
    torch.save(state, file)
    groups: Any = opened(tmp_path / "step").manifest.objects["optimizer", "param_groups"].value
    second = sorted(name for name in expected if name[0] in "34")
    assert [group["lr"] == 0.25 for group in groups] == [False, True]
    assert [sorted(group["params"]) for group in groups] == [sorted({*expected} - {*second}), second]


def test_shared_modules_that_are_alike_are_not_guessed(tmp_path: Path) -> None:
    write_pipeline(tmp_path / "step", 1, ("embed", "other"))
    with pytest.raises(AmbiguousError, match="layer 0 could be in several shared modules"):
        open_checkpoint(str(tmp_path / "step"))


def test_a_missing_layer_and_one_of_another_shape_are_named(tmp_path: Path) -> None:
    write_pipeline(tmp_path / "step", 1)
    layer = tmp_path / "step/layer_02-model_states.pt"
    torch.save({key: torch.zeros(5) for key in BLOCK}, layer)
    with pytest.raises(FormatError, match=r"layer_02.*'2.weight' has another shape.*found \(5,\)"):
        open_checkpoint(str(tmp_path / "step"))
    layer.unlink()
    with pytest.raises(IncompleteError, match=r"'2\.weight' are in no file"):
        open_checkpoint(str(tmp_path / "step"))


def test_layers_of_tensor_parallel_ranks_are_explained(tmp_path: Path) -> None:
    write_pipeline(tmp_path / "step", 1)
    torch.save(BLOCK, tmp_path / "step/layer_01-model_01-model_states.pt")
    with pytest.raises(UnsupportedError, match=r"tensor parallelism.*ds_to_universal"):
        open_checkpoint(str(tmp_path / "step"))
