"""fp8 in blocks: the bytes are torch's, readers take them, and they are taken back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

import shardckpt
from shardckpt.boxes import Box
from shardckpt.errors import PrecisionError, ShardckptError, UsageError
from shardckpt.offline.select import block_scales
from tests.kit.runs.cases import load_folder, read_case
from tests.kit.runs.command import run_here

FP8 = torch.float8_e4m3fn


def write(folder: Path, **tensors: torch.Tensor) -> Path:
    folder.mkdir()
    save_file({f"{name}.weight": value for name, value in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 8, "pad_token_id": None}))
    return folder


def quantized(folder: Path, weight: torch.Tensor, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a weight and its scales as the toolkit writes them."""
    options = {"quantize": "fp8-block", "quantize_include": "a.*", **options}
    shardckpt.convert(write(folder / "src", a=weight), folder / "out", **options)
    found = load_folder(folder / "out")
    assert sorted(found) == ["a.weight", "a.weight_scale_inv"]
    return found["a.weight"], found["a.weight_scale_inv"]


def reference(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize as `weight_quant` of DeepSeek-V3's `inference/kernel.py` does."""
    values, scales = torch.empty(weight.shape, dtype=FP8), []
    for i in range(0, weight.shape[0], 128):
        for j in range(0, weight.shape[1], 128):
            block = weight[i : i + 128, j : j + 128].float()
            scales.append(block.abs().max() / 448)
            values[i : i + 128, j : j + 128] = (block / scales[-1]).to(FP8)
    return values, torch.stack(scales).reshape(-(-weight.shape[0] // 128), -1)


def dequantized(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    wide = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
    return values.float() * wide[: values.shape[0], : values.shape[1]]


@pytest.mark.parametrize("jobs", [1, 4])
@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        (torch.float32, (300, 260)),
        (torch.bfloat16, (256, 384)),
        (torch.float16, (1, 5)),
        (torch.float64, (129, 128)),
        (torch.float32, (1, 270_001)),
        (torch.bfloat16, (700, 1500)),
    ],
    ids=str,
)
def test_the_bytes_are_those_that_torch_casts(
    dtype: torch.dtype, shape: tuple[int, int], jobs: int, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    weight = (torch.randn(shape) * torch.logspace(-6, 3, shape[1])).to(dtype)
    values, scales = quantized(tmp_path, weight, jobs=jobs)
    expected, expected_scales = reference(weight)
    assert values.dtype == FP8 and scales.dtype == torch.float32
    assert torch.equal(scales, expected_scales)
    assert torch.equal(values.view(torch.uint8), expected.view(torch.uint8))
    error = (dequantized(values, scales) - weight.float()).abs()
    step = dequantized(torch.full(shape, 2.0**-9).to(FP8), scales)
    assert (error <= torch.maximum(weight.float().abs() * 2**-4, step / 2) * 1.0001).all()


@pytest.mark.parametrize(("start", "width"), [(0, 500), (100, 200), (128, 128), (499, 1)])
def test_a_part_of_a_row_gets_the_scales_of_its_columns(start: int, width: int) -> None:
    found = block_scales.spread(np.arange(4, dtype=np.float32), Box((7, start), (1, width)), 128)
    assert found.tolist() == [column // 128 for column in range(start, start + width)]


def test_blocks_of_zeros_and_of_tiny_values_have_scales_that_divide(tmp_path: Path) -> None:
    weight = torch.zeros(128, 384)
    weight[5, 130], weight[0, 300] = 1e-44, -1.0
    values, scales = quantized(tmp_path, weight)
    assert scales.tolist() == [[1.0, torch.finfo(torch.float32).tiny, pytest.approx(1 / 448)]]
    assert not values[:, :256].float().any() and values[0, 300] == -448


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e300])
def test_a_value_that_no_scale_can_hold_is_named_and_nothing_is_written(value: float, tmp_path: Path) -> None:
    weight = torch.ones(300, 300, dtype=torch.float64)
    weight[299, 130] = value
    with pytest.raises(PrecisionError, match=r"a\.weight: the block at \[256, 128\]"):
        quantized(tmp_path, weight)
    assert [path.name for path in tmp_path.iterdir()] == ["src"]


def test_each_strip_is_measured_once_and_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[block_scales.WeightScales] = []
    measured: list[int] = []
    create, compute = block_scales.WeightScales.__init__, block_scales.WeightScales._compute
    monkeypatch.setattr(block_scales.WeightScales, "__init__", lambda s, *a: (kept.append(s), create(s, *a))[1])
    monkeypatch.setattr(block_scales.WeightScales, "_compute", lambda s, i: (measured.append(i), compute(s, i))[1])
    quantized(tmp_path, torch.ones(700, 1500))
    assert sorted(measured) == [0, 1, 2, 3, 4, 5]
    assert [vars(each)["_kept"] for each in kept] == [{}]


def test_other_tensors_are_cast_and_the_config_says_what_is_quantized(tmp_path: Path) -> None:
    src = write(tmp_path / "src", a=torch.ones(2, 2), b=torch.ones(2, 2), lm_head=torch.ones(2, 2), norm=torch.ones(2))
    report = shardckpt.convert(
        src, tmp_path / "out", quantize="fp8-block", quantize_exclude="b.*", dtype="bf16", keep_fp32="norm*"
    )
    assert report.cast == {"float32 -> float8_e4m3fn": 1, "float32 -> bfloat16": 2}
    assert {name: str(t.dtype) for name, t in load_folder(tmp_path / "out").items()} == {
        "a.weight": "torch.float8_e4m3fn",
        "a.weight_scale_inv": "torch.float32",
        "b.weight": "torch.bfloat16",
        "lm_head.weight": "torch.bfloat16",
        "norm.weight": "torch.float32",
    }
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config == {
        **json.loads((src / "config.json").read_text()),
        "quantization_config": {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "modules_to_not_convert": ["b", "lm_head"],
            "quant_method": "fp8",
            "weight_block_size": [128, 128],
        },
    }


def test_the_command_quantizes(tmp_path: Path) -> None:
    src = write(tmp_path / "src", a=torch.ones(2, 2), b=torch.ones(2, 2))
    done = run_here("convert", src, tmp_path / "out", "--quantize", "fp8-block", "--quantize-exclude", "b.*")
    assert "cast: 1 tensor float32 -> float8_e4m3fn" in done.out.splitlines()


def test_scales_stay_in_the_file_of_their_weight(tmp_path: Path) -> None:
    src = write(tmp_path / "src", a=torch.ones(4, 4), b=torch.ones(4, 4))
    shardckpt.consolidate(src, tmp_path / "two", max_shard_size=64)
    shardckpt.convert(tmp_path / "two", tmp_path / "out", quantize="fp8-block")
    names = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())["weight_map"]
    assert names["a.weight"] == names["a.weight_scale_inv"] != names["b.weight"] == names["b.weight_scale_inv"]


@pytest.mark.parametrize("shape", [(300, 200), (128, 256)])
def test_ending_in_smaller_blocks_is_a_warning(shape: tuple[int, int], tmp_path: Path) -> None:
    src = write(tmp_path / "src", a=torch.ones(shape))
    report = shardckpt.convert(src, tmp_path / "out", quantize="fp8-block", quantize_include="a.*")
    assert [("smaller blocks" in warning) for warning in report.warnings] == [True] * (shape == (300, 200))


def test_weights_that_are_left_are_named_with_the_reason(tmp_path: Path) -> None:
    src = write(tmp_path / "src", a=torch.ones(2, 2), b=torch.ones(300, 2), c=torch.ones(300, 2))
    tensors = {**load_folder(src), "m.experts.up": torch.ones(2, 4, 4)}
    save_file(tensors, src / "model.safetensors")
    report = shardckpt.convert(src, tmp_path / "out", quantize="fp8-block", quantize_exclude="c.*")
    odd, stacked = report.warnings
    assert odd.startswith("not quantized, since 128 does not divide a width: b.weight of [300, 2] (--quantize-include")
    assert stacked.startswith("not quantized, since experts are stacked: m.experts.up of [2, 4, 4] (")
    kept = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["modules_to_not_convert"]
    assert sorted(kept) == ["b", "c", "m.experts"]
    with pytest.raises(UsageError, match="no weights to quantize; found 1 tensors, 1 with a width that 128"):
        shardckpt.convert(write(tmp_path / "odd", b=torch.ones(300, 2)), tmp_path / "no", quantize="fp8-block")


@pytest.mark.parametrize(
    ("options", "dst", "message"),
    [
        ({"quantize": "fp8"}, "out", "fp8-block"),
        ({"quantize_exclude": "a*"}, "out", "--quantize fp8-block"),
        ({"quantize_include": ["a*"]}, "out", "--quantize fp8-block"),
        ({"quantize": "fp8-block", "part": "optim"}, "out", "needs a model"),
        ({"quantize": "fp8-block", "to": "dcp"}, "out", "safetensors folder; found --to dcp"),
        ({"quantize": "fp8-block"}, "out.safetensors", "safetensors folder; found .*out.safetensors"),
        ({"quantize": "fp8-block"}, "out", "--config-from"),
    ],
)
def test_calls_that_could_not_be_read_are_refused(
    options: dict[str, Any], dst: str, message: str, tmp_path: Path
) -> None:
    src = write(tmp_path / "src", a=torch.ones(2, 2))
    (src / "config.json").unlink()
    with pytest.raises(UsageError, match=message):
        shardckpt.convert(src, tmp_path / dst, **options)
    assert not (tmp_path / dst).exists()


def test_an_adapter_is_merged_before_it_is_quantized(tmp_path: Path) -> None:
    torch.manual_seed(0)
    weight, a, b = torch.randn(200, 256), torch.randn(2, 256), torch.randn(200, 2)
    src = write(tmp_path / "src", m=weight)
    (tmp_path / "adapter").mkdir()
    factors = {"base_model.model.m.lora_A.weight": a, "base_model.model.m.lora_B.weight": b}
    save_file(factors, tmp_path / "adapter" / "adapter_model.safetensors")
    (tmp_path / "adapter" / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 2, "lora_alpha": 4}')
    shardckpt.merge_adapter(src, tmp_path / "adapter", tmp_path / "out", quantize="fp8-block", quantize_include="m.*")
    found = load_folder(tmp_path / "out")
    _, scales = reference(weight + 2 * b @ a)
    torch.testing.assert_close(found["m.weight_scale_inv"], scales)
    merged = dequantized(found["m.weight"], found["m.weight_scale_inv"])
    torch.testing.assert_close(merged, weight + 2 * b @ a, rtol=2**-4, atol=1e-2)


def test_transformers_reads_it_and_the_cast_back_gives_what_it_reads(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256, intermediate_size=384, num_hidden_layers=1, num_attention_heads=2, vocab_size=64, head_dim=64
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "src")
    report = shardckpt.convert(tmp_path / "src", tmp_path / "fp8", quantize="fp8-block")
    assert report.cast == {"bfloat16 -> float8_e4m3fn": 7} and not report.warnings
    shardckpt.convert(tmp_path / "fp8", tmp_path / "back", dtype="bf16")
    read, info = AutoModelForCausalLM.from_pretrained(tmp_path / "fp8", output_loading_info=True)
    assert not any(info.values())
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "back").state_dict()
    assert "quantization_config" not in json.loads((tmp_path / "back" / "config.json").read_text())
    assert {name for name, value in read.state_dict().items() if not torch.equal(value, again[name])} == set()
    source = load_folder(tmp_path / "src")
    for name in ("model.layers.0.mlp.down_proj.weight", "model.layers.0.self_attn.q_proj.weight"):
        expected = dequantized(*reference(source[name])).to(torch.bfloat16)
        assert torch.equal(again[name], expected)


@pytest.mark.parametrize("kind", ["dense", "experts", "stacked"])
def test_transformers_loads_a_model_of_widths_that_128_does_not_divide(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 64, "head_dim": 128}
    if kind == "dense":
        model: Any = LlamaForCausalLM(LlamaConfig(intermediate_size=192, **sizes))
    else:
        more = {"intermediate_size": 192, "moe_intermediate_size": 192, "num_experts": 2, "num_experts_per_tok": 1}
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(num_key_value_heads=1, **more, **sizes))
    model = model.to(torch.bfloat16)
    model.save_pretrained(tmp_path / "src")
    source: Path = tmp_path / "src"
    if kind == "stacked":  # as in memory
        torch.save(model.state_dict(), tmp_path / "state.pt")
        source = tmp_path / "state.pt"
    report = shardckpt.consolidate(source, tmp_path / "fp8", config_from=tmp_path / "src", quantize="fp8-block")
    assert report.cast == {"bfloat16 -> float8_e4m3fn": 4}
    shardckpt.convert(tmp_path / "fp8", tmp_path / "back", dtype="bf16")
    read, info = AutoModelForCausalLM.from_pretrained(tmp_path / "fp8", output_loading_info=True)
    assert not any(info.values())
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "back").state_dict()
    assert {name for name, value in read.state_dict().items() if not torch.equal(value, again[name])} == set()
    left = [name for name in again if "mlp" in name]
    assert left and all(torch.equal(again[name], model.state_dict()[name]) for name in left)


def test_blocks_of_another_shape_are_taken_back_and_excepted_weights_stay(tmp_path: Path) -> None:
    torch.manual_seed(0)
    values, scales = torch.randn(100, 90).to(FP8), torch.rand(2, 3)
    src = write(tmp_path / "src")
    tensors = {f"{name}.weight": values.clone() for name in ("a", "b", "plain")}
    save_file(
        {**tensors, "a.weight_scale_inv": scales, "b.weight_scale_inv": scales.clone()}, src / "model.safetensors"
    )
    (src / "config.json").write_text('{"quantization_config": {"weight_block_size": [64, 32]}}')
    report = shardckpt.convert(src, tmp_path / "out", dtype="fp32", keep_fp32="b.*")
    assert [line.partition(":")[0] for line in report.warnings] == [
        "1 part of quantized weights is not cast, such as plain.weight"
    ]
    found = load_folder(tmp_path / "out")
    assert sorted(found) == ["a.weight", "b.weight", "b.weight_scale_inv", "plain.weight"]
    wide = scales.repeat_interleave(64, 0).repeat_interleave(32, 1)[:100, :90]
    assert torch.equal(found["a.weight"], values.float() * wide)
    assert found["b.weight"].dtype == found["plain.weight"].dtype == FP8
    quantization = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert quantization == {"weight_block_size": [64, 32], "modules_to_not_convert": ["a"]}


def test_shards_of_a_training_run_are_quantized_with_the_config_of_the_base(fixtures: Path, tmp_path: Path) -> None:
    case = read_case(fixtures, "dcp_fsdp2_llama_w2", tmp_path)
    config = write(tmp_path / "base", unused=torch.ones(1, 1))
    shardckpt.consolidate(case.source, tmp_path / "out", config_from=config, quantize="fp8-block", jobs=3)
    found = load_folder(tmp_path / "out")
    name = "model.layers.0.mlp.down_proj.weight"
    expected, scales = reference(case.model[name])
    assert torch.equal(found[name].view(torch.uint8), expected.view(torch.uint8))
    assert torch.equal(found[f"{name}_scale_inv"], scales)


def test_a_model_of_transposed_layers_is_refused(fixtures: Path, tmp_path: Path) -> None:
    case = read_case(fixtures, "dcp_hsdp_fsdp2_gpt2_w4", tmp_path)
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(ShardckptError, match="Conv1D"):
        shardckpt.consolidate(case.source, tmp_path / "out", config_from=tmp_path / "base", quantize="fp8-block")
