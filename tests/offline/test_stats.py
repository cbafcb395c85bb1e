from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import shardckpt
from shardckpt.errors import IncompleteError, UsageError
from tests.kit.runs.cases import NAMES, read_case


def measure(folder: Path, tensor: torch.Tensor) -> shardckpt.results.TensorStats:
    save_file({"w": tensor}, folder / "model.safetensors")
    [found] = shardckpt.stats(folder / "model.safetensors").tensors
    return found


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.uint8]
)
def test_statistics_are_those_of_the_values(dtype: torch.dtype, tmp_path: Path) -> None:
    tensor = (torch.arange(600_000) % 251).reshape(600, 1000).to(dtype)
    found, values = measure(tmp_path, tensor), tensor.double()
    assert (found.min, found.max, found.zeros) == (0.0, float(values.max()), int((values == 0).sum()))
    assert found.mean == pytest.approx(float(values.mean()), rel=1e-12)
    assert found.l2 == pytest.approx(float(values.norm()), rel=1e-12)
    assert (found.dtype, found.shape, found.nans, found.infs) == (str(dtype).removeprefix("torch."), (600, 1000), 0, 0)


def test_nans_and_infinities_are_counted_and_left_out_of_the_rest(tmp_path: Path) -> None:
    found = measure(tmp_path, torch.tensor([math.nan, math.inf, -math.inf, 3.0, -4.0, 0.0]))
    assert (found.nans, found.infs, found.zeros) == (1, 2, 1)
    assert (found.min, found.max, found.l2) == (-4.0, 3.0, 5.0)
    assert found.mean == pytest.approx(-1 / 3)


@pytest.mark.parametrize("tensor", [torch.full((3,), math.nan), torch.empty(0, 4)])
def test_a_tensor_without_finite_values_has_no_extremes(tensor: torch.Tensor, tmp_path: Path) -> None:
    found = measure(tmp_path, tensor)
    assert (found.min, found.max, found.mean, found.l2) == (None, None, None, 0.0)


def test_a_complex_number_counts_by_its_magnitude(tmp_path: Path) -> None:
    torch.save({"w": torch.tensor([3 + 4j, 0j])}, tmp_path / "w.pt")
    [found] = shardckpt.stats(tmp_path / "w.pt").tensors
    assert (found.min, found.max, found.zeros, found.l2) == (0.0, 5.0, 1, 5.0)


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("dcp_")])
def test_statistics_of_real_checkpoints_are_those_of_their_truth(name: str, fixtures: Path, tmp_path: Path) -> None:
    case = read_case(fixtures, name, tmp_path)
    found = {tensor.name: tensor for tensor in shardckpt.stats(case.source, part="model").tensors}
    assert found
    for tensor in found.values():
        values = case.model[tensor.name].double()
        assert tensor.l2 == pytest.approx(float(values.norm()), rel=1e-9), tensor.name


def test_layers_sum_up_their_tensors(tmp_path: Path) -> None:
    tensors = {f"layers.{at}.{name}": torch.full((4,), float(at)) for at in (2, 10) for name in "ab"}
    tensors["layers.2.a"][0] = math.nan
    save_file(tensors, tmp_path / "model.safetensors")
    first, second = shardckpt.stats(tmp_path / "model.safetensors").layers
    assert (first.name, first.tensor_count, first.nans, first.max, first.l2) == ("layers.2", 2, 1, 2.0, 28**0.5)
    assert (second.name, second.min, second.zeros) == ("layers.10", 10.0, 0)


def test_only_chosen_tensors_are_read(fixtures: Path) -> None:
    source = fixtures / "dcp_fsdp2_llama_w2" / "ckpt"
    found = shardckpt.stats(source, part="model", include=["*.q_proj.weight"], exclude=["*.0.*"])
    assert [tensor.name for tensor in found.tensors] == [f"model.layers.{at}.self_attn.q_proj.weight" for at in (1, 2)]
    with pytest.raises(UsageError, match="--part"):
        shardckpt.stats(source, part="optimizer")


def test_missing_bytes_are_an_error_and_not_a_statistic(fixtures: Path, tmp_path: Path) -> None:
    for file in (fixtures / "dcp_fsdp2_llama_w2" / "ckpt").iterdir():
        if file.name != "__1_0.distcp":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    with pytest.raises(IncompleteError):
        shardckpt.stats(tmp_path)


def test_large_values_overflow_to_an_infinite_norm_without_a_warning(tmp_path: Path) -> None:
    with np.errstate(all="raise"):
        assert measure(tmp_path, torch.tensor([1e300, 1e300], dtype=torch.float64)).l2 == math.inf


def test_numbers_of_four_bits_are_counted_as_numbers(tmp_path):
    header = json.dumps({"w": {"dtype": "F4", "shape": [2, 4], "data_offsets": [0, 4]}}).encode()
    data = bytes([0xF7, 0x00, 0x01, 0x02])  # 6, -6, 0, 0, 0.5, 0, 1, 0
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + data)
    [found] = shardckpt.stats(tmp_path).tensors
    assert (found.min, found.max, found.zeros, found.mean) == (-6.0, 6.0, 4, 1.5 / 8)


def test_a_parameter_with_the_name_of_a_slot_has_statistics_and_so_has_the_slot(tmp_path: Path) -> None:
    state = {"x": {"step": torch.tensor(3.0), "m": torch.full((4,), 2.0)}}
    optimizer = {"state": state, "param_groups": [{"params": ["x", "x/m"]}]}
    torch.save({"model": {"x": torch.zeros(4), "x/m": torch.ones(4)}, "optimizer": optimizer}, tmp_path / "a.pt")
    found = shardckpt.stats(tmp_path / "a.pt")
    assert {each.name: each.max for each in found.tensors} == {"x": 0.0, "x/m": 1.0, "x/m (of the optimizer)": 2.0}
    assert found.left_out == ("x/step",)
