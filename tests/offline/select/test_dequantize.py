"""`--dequantize`: which weights become plain, under which names, in which type, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

import shardckpt
from shardckpt.errors import UnsupportedError, UsageError
from shardckpt.plan.subclass_record import SUBCLASS, SubclassRecord
from tests.kit.runs.cases import load_folder
from tests.kit.runs.command import run_here


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, nn.Sequential]:
    """Return a step of two Int8 weights and a plain one, and its model."""
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    folder = tmp_path_factory.mktemp("quantized")
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(3))).requires_grad_(False).bfloat16()
    quantize_(model[0], Int8WeightOnlyConfig(version=2))
    quantize_(model[1], Int8WeightOnlyConfig(version=2))
    (folder / "files").mkdir()
    config = {"model_type": "x", "quantization_config": {"quant_method": "torchao"}}
    (folder / "files" / "config.json").write_text(json.dumps(config))
    shardckpt.save({"model": model}, folder / "step", model_files=folder / "files")
    return folder / "step", model


def test_names_types_and_the_config_are_those_of_a_plain_model(
    quantized: tuple[Path, nn.Sequential], tmp_path: Path
) -> None:
    source, model = quantized
    report = shardckpt.consolidate(source, tmp_path / "out", dequantize=True)
    found = load_folder(tmp_path / "out")
    assert {name: value.dtype for name, value in found.items()} == dict.fromkeys(
        ("0.weight", "1.weight", "2.weight"), torch.bfloat16
    )
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {"model_type": "x"}
    assert (report.cast, report.left_out, report.warnings) == ({"int8 -> bfloat16": 2}, (), ())
    shardckpt.consolidate(source, tmp_path / "wide", dequantize=True, dtype="fp32")
    wide = load_folder(tmp_path / "wide")["0.weight"]
    assert torch.equal(wide, model[0].weight.dequantize(torch.float32))


def test_globs_match_the_weights_and_not_their_parts(quantized: tuple[Path, nn.Sequential], tmp_path: Path) -> None:
    source, _ = quantized
    shardckpt.consolidate(source, tmp_path / "a", dequantize=True, include=["0.weight", "2.*"])
    assert sorted(load_folder(tmp_path / "a")) == ["0.weight", "2.weight"]
    shardckpt.consolidate(source, tmp_path / "b", exclude="0.weight")
    parts = ["1._weight_qdata", "1._weight_scale", "1._weight_zero_point"]
    assert sorted(load_folder(tmp_path / "b")) == [*parts, "2.weight"]
    shardckpt.consolidate(source, tmp_path / "c", dequantize=True, keep_fp32="0.weight", dtype="fp16")
    found = load_folder(tmp_path / "c")
    assert sorted(found) == ["0._weight_qdata", "0._weight_scale", "0._weight_zero_point", "1.weight", "2.weight"]
    assert found["1.weight"].dtype == torch.float16
    kept = json.loads((tmp_path / "c" / "config.json").read_text())["quantization_config"]
    assert kept == {"quant_method": "torchao", "modules_to_not_convert": ["1"]}


def test_files_for_torchao_are_dequantized_too(quantized: tuple[Path, nn.Sequential], tmp_path: Path) -> None:
    source, model = quantized
    shardckpt.consolidate(source, tmp_path / "kept")
    shardckpt.convert(tmp_path / "kept", tmp_path / "out", dequantize=True)
    found = load_folder(tmp_path / "out")
    assert sorted(found) == ["0.weight", "1.weight", "2.weight"]
    assert torch.equal(found["1.weight"], model[1].weight.dequantize())
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert json.loads(file.metadata()["1.weight"]) == {"_type": "Tensor"}


def test_tied_weights_are_written_once(tmp_path: Path) -> None:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model = nn.Sequential(nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False)).requires_grad_(False)
    quantize_(model[0], Int8WeightOnlyConfig(version=2))
    model[1].weight = model[0].weight
    shardckpt.save({"model": model}, tmp_path / "step")
    report = shardckpt.consolidate(tmp_path / "step", tmp_path / "out", dequantize=True)
    assert report.ties == {"1.weight": "0.weight"}
    assert list(load_folder(tmp_path / "out")) == ["0.weight"]


def test_a_state_dict_at_the_top_level_keeps_its_quantized_weights(
    quantized: tuple[Path, nn.Sequential], tmp_path: Path
) -> None:
    _, model = quantized
    shardckpt.save(model.state_dict(), tmp_path / "step")
    report = shardckpt.consolidate(tmp_path / "step", tmp_path / "out", dequantize=True)
    assert sorted(load_folder(tmp_path / "out")) == ["0.weight", "1.weight", "2.weight"]
    assert report.left_out == ()


def test_the_type_of_8_bits_is_the_configs(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    tensors = {"a.weight": torch.ones(4, 8, dtype=torch.int8), "a.SCB": torch.full((4,), 127.0)}
    save_file(tensors, tmp_path / "src" / "model.safetensors")
    config = {"torch_dtype": "float16", "quantization_config": {"quant_method": "bitsandbytes"}}
    (tmp_path / "src" / "config.json").write_text(json.dumps(config))
    shardckpt.convert(tmp_path / "src", tmp_path / "out", dequantize=True)
    assert load_folder(tmp_path / "out")["a.weight"].dtype == torch.float16
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {"torch_dtype": "float16"}


def test_fp8_in_blocks_needs_no_dtype(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    tensors = {"a.weight": torch.ones(4, 8).to(torch.float8_e4m3fn), "a.weight_scale_inv": torch.full((1, 1), 3.0)}
    save_file(tensors, tmp_path / "src" / "model.safetensors")
    (tmp_path / "src" / "config.json").write_text(json.dumps({"dtype": "bfloat16"}))
    shardckpt.convert(tmp_path / "src", tmp_path / "out", dequantize=True)
    found = load_folder(tmp_path / "out")
    assert list(found) == ["a.weight"]
    assert torch.equal(found["a.weight"], torch.full((4, 8), 3.0).bfloat16())


def _save_record(folder: Path, kind: str, **inner: torch.Tensor) -> Path:
    record = SubclassRecord(kind, "x 1", "float32", (4, 8), {"block_size": [1, 8]})
    shardckpt.save({"model": {"a.weight": {**inner, SUBCLASS: record.encode()}, "b": torch.ones(2)}}, folder)
    return folder


QDATA, SCALE = torch.ones(4, 8, dtype=torch.int8), torch.ones(4, 1)


def test_a_class_that_nobody_knows_is_named(tmp_path: Path) -> None:
    source = _save_record(tmp_path / "step", "mine.quant.OwnTensor", qdata=QDATA, scale=SCALE)
    with pytest.raises(UnsupportedError, match=r"a\.weight: OwnTensor cannot .*; found mine\.quant\.OwnTensor"):
        shardckpt.consolidate(source, tmp_path / "out", dequantize=True)
    shardckpt.consolidate(source, tmp_path / "out", dequantize=True, keep_fp32="a.*")
    assert sorted(load_folder(tmp_path / "out")) == ["a.weight.qdata", "a.weight.scale", "b"]


def test_a_weight_whose_layer_scales_its_inputs_is_refused(tmp_path: Path) -> None:
    inner = {"qdata": QDATA, "scale": SCALE, "act_pre_scale": torch.ones(8)}
    source = _save_record(tmp_path / "step", "torchao.Int8Tensor", **inner)
    with pytest.raises(UnsupportedError, match=r"a\.weight: .*act_pre_scale.*--keep-fp32"):
        shardckpt.consolidate(source, tmp_path / "out", dequantize=True)


def test_scales_of_inputs_are_reported_as_left_out(tmp_path: Path) -> None:
    inner = {"qdata": QDATA, "scale": SCALE, "act_quant_scale": torch.ones(1)}
    report = shardckpt.consolidate(
        _save_record(tmp_path / "step", "torchao.Int8Tensor", **inner), tmp_path / "out", dequantize=True
    )
    assert report.left_out == ("a.weight.act_quant_scale (for a dequantized weight)",)


def test_a_packed_weight_of_another_package_is_refused_by_name(tmp_path: Path) -> None:
    tensors = {"a.qweight": torch.ones(2, 8, dtype=torch.int32), "a.scales": torch.rand(1, 8).half()}
    save_file(tensors, tmp_path / "src.safetensors")
    with pytest.raises(UnsupportedError, match=r"a\.qweight: .*cannot be dequantized; found int32.*--keep-fp32"):
        shardckpt.convert(tmp_path / "src.safetensors", tmp_path / "out.safetensors", dequantize=True)


def test_the_command_says_the_same_and_refuses_what_does_not_go_together(
    quantized: tuple[Path, nn.Sequential], tmp_path: Path
) -> None:
    source, _ = quantized
    done = run_here("consolidate", source, tmp_path / "out", "--dequantize")
    assert done.code == 0 and "2 tensors int8 -> bfloat16" in done.out
    wrong: list[dict[str, Any]] = [{"part": "optim"}, {"quantize": "fp8-block"}]
    for options in wrong:
        with pytest.raises(UsageError, match="--dequantize"):
            shardckpt.convert(source, tmp_path / "other", dequantize=True, **options)
    with pytest.raises(UsageError, match="dequantize"):
        shardckpt.convert(source, tmp_path / "other", dequantize="yes")  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match=r"0\.weight: rules and --rename .*--dequantize"):
        shardckpt.convert(source, tmp_path / "other", rename="2=3")


def test_an_adapter_is_merged_into_a_dequantized_base(tmp_path: Path) -> None:
    folder = tmp_path / "base"
    folder.mkdir()
    tensors = {"m.weight": QDATA, "m.SCB": torch.full((4,), 127.0)}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"dtype": "float32"}))
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    factors = {"lora_A": torch.ones(2, 8), "lora_B": torch.ones(4, 2)}
    save_file(
        {f"base_model.model.m.{name}.weight": value for name, value in factors.items()},
        adapter / "adapter_model.safetensors",
    )
    (adapter / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 2}))
    shardckpt.merge_adapter(folder, adapter, tmp_path / "out", dequantize=True)
    assert torch.allclose(load_folder(tmp_path / "out")["m.weight"], torch.full((4, 8), 3.0))
