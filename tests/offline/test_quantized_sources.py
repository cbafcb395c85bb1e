"""Checkpoints of quantized models: a cast leaves what their weights are made of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import shardckpt
from tests.kit.runs.cases import assert_same, load_folder

FP8 = torch.float8_e4m3fn


def write(folder: Path, tensors: dict[str, torch.Tensor], **config: Any) -> Path:
    """Write tensors, and a config if there is one."""
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    if config:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def _dequantize(folder: Path) -> dict[str, torch.Tensor]:
    """Return the weights that bitsandbytes computes with, in a model that transformers loads."""
    from bitsandbytes.functional import dequantize_4bit
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, device_map="cpu")
    states = {
        name: (module.weight, getattr(module.weight, "quant_state", None)) for name, module in _with_weight(model)
    }
    return {name: dequantize_4bit(weight.data, state).float() for name, (weight, state) in states.items() if state}


def _with_weight(model: torch.nn.Module) -> list[tuple[str, Any]]:
    return [(name, module) for name, module in model.named_modules() if hasattr(module, "weight")]


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("is_double", [False, True], ids=["single", "double"])
def test_bitsandbytes_computes_the_same_weights_after_a_cast(is_double: bool, dtype: str, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, **sizes)).to(torch.bfloat16).save_pretrained(tmp_path / "base")
    settings = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=torch.bfloat16,
        bnb_4bit_use_double_quant=is_double,
    )
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base", quantization_config=settings, device_map="cpu")
    model.save_pretrained(tmp_path / "src")
    report = shardckpt.consolidate(tmp_path / "src", tmp_path / "out", dtype=dtype)
    assert_same(_dequantize(tmp_path / "out"), _dequantize(tmp_path / "src"))
    assert any("parts of quantized weights are not cast" in warning for warning in report.warnings)
    before, after = load_folder(tmp_path / "src"), load_folder(tmp_path / "out")
    kept = {name: value for name, value in before.items() if "_proj.weight" in name}
    assert_same({name: after[name] for name in kept}, kept)
    shardckpt.consolidate(tmp_path / "src" / "model.safetensors", tmp_path / "one.safetensors", dtype=dtype)
    assert_same(load_folder(tmp_path, "one.safetensors"), after)


@pytest.mark.parametrize("has_config", [True, False])
def test_scales_of_packed_and_of_fp8_rows_keep_their_bits(has_config: bool, tmp_path: Path) -> None:
    tensors = {
        "a.qweight": torch.ones(2, 8, dtype=torch.int32),
        "a.scales": torch.rand(1, 8).half(),
        "b.weight": torch.ones(8, 8).to(FP8),
        "b.weight_scale": torch.rand(8, 1),
        "b.input_scale": torch.tensor(1 / 3),
        "norm.weight": torch.rand(8),
    }
    config = {"torch_dtype": "float16", "quantization_config": {"quant_method": "x"}} if has_config else {}
    shardckpt.convert(write(tmp_path / "src", tensors, **config), tmp_path / "out", dtype="bf16")
    found = load_folder(tmp_path / "out")
    assert_same(found, {**tensors, "norm.weight": tensors["norm.weight"].bfloat16()})


def test_globs_say_what_stays_in_the_same_words_for_scales(tmp_path: Path) -> None:
    tensors = {"a.weight": torch.ones(8, 8).to(FP8), "a.weight_scale": torch.rand(8, 1)}
    report = shardckpt.convert(write(tmp_path / "src", tensors), tmp_path / "out", dtype="bf16", keep_fp32="a.*")
    assert report.warnings == ()


SIZES = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2}


def _read_settings(kind: str) -> Any:
    """Return a config that quantizes a model while transformers loads it."""
    from transformers import BitsAndBytesConfig, TorchAoConfig

    if kind == "8 bits":
        return BitsAndBytesConfig(load_in_8bit=True)
    if kind in ("nf4", "fp4"):
        return BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type=kind,
            bnb_4bit_compute_dtype=torch.float32,
            bnb_4bit_use_double_quant=kind == "nf4",
        )
    from torchao import quantization

    if kind == "int4":
        return TorchAoConfig(quantization.IntxWeightOnlyConfig(torch.int4, quantization.PerGroup(32)))
    config = getattr(quantization, f"{kind}WeightOnlyConfig")
    return TorchAoConfig(config(version=2) if kind == "Int8" else config())


KINDS = {"Int8": "torchao", "Float8": "torchao", "int4": "torchao", "nf4": "", "fp4": "", "8 bits": ""}


@pytest.mark.parametrize("kind", KINDS)
def test_a_quantized_model_that_shardckpt_saved_loads_in_transformers(kind: str, tmp_path: Path) -> None:
    pytest.importorskip(KINDS[kind] or "bitsandbytes")
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, **SIZES)).to(torch.bfloat16).save_pretrained(tmp_path / "base")
    settings = _read_settings(kind)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base", quantization_config=settings, device_map="cpu")
    model.config.save_pretrained(tmp_path / "files")
    shardckpt.save({"model": model}, tmp_path / "step", model_files=tmp_path / "files")
    tokens = torch.arange(12)[None]
    expected = model(tokens).logits
    report = shardckpt.consolidate(tmp_path / "step", tmp_path / "kept", max_shard_size="40kB")
    assert len(report.files) > 1 and (report.left_out, report.warnings) == ((), ())
    kept = AutoModelForCausalLM.from_pretrained(tmp_path / "kept", device_map="cpu")
    assert torch.equal(kept(tokens).logits, expected)
    report = shardckpt.consolidate(tmp_path / "step", tmp_path / "plain", dequantize=True)
    assert (report.left_out, report.warnings) == ((), ())
    assert "quantization_config" not in json.loads((tmp_path / "plain" / "config.json").read_text())
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", device_map="cpu")
    assert type(plain.model.layers[0].mlp.up_proj.weight.data) is torch.Tensor
    torch.testing.assert_close(plain(tokens).logits, expected, atol=0.01, rtol=0)


SCALAR = {"a.weight": torch.randn(64, 128).to(FP8), "a.activation_scale": torch.tensor(0.5), "n.weight": torch.ones(4)}


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)], ids=str)
def test_a_weight_with_one_scale_is_taken_back_as_transformers_does(shape: tuple[int, ...], tmp_path: Path) -> None:
    scale = torch.full(shape, 0.1)
    quantization = {"quant_method": "fp8", "weight_block_size": None, "activation_scheme": "static"}
    tensors = {**SCALAR, "a.weight_scale_inv": scale}
    src = write(tmp_path / "src", tensors, model_type="llama", quantization_config=quantization)
    report = shardckpt.convert(src, tmp_path / "out", dtype="bf16")
    expected = (SCALAR["a.weight"].float() * scale.reshape(())).bfloat16()
    assert_same(load_folder(tmp_path / "out"), {"a.weight": expected, "n.weight": torch.ones(4).bfloat16()})
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    assert report.left_out == ("a.activation_scale (for a dequantized weight)",)
    assert report.warnings == ()


def test_scales_that_fit_no_blocks_are_refused_unless_the_weight_stays(tmp_path: Path) -> None:
    tensors = {"e.up": torch.ones(2, 256, 128).to(FP8), "e.up_scale_inv": torch.rand(2, 2, 1), "n": torch.rand(3)}
    src = write(tmp_path / "src", tensors, quantization_config={"weight_block_size": [128, 128]})
    with pytest.raises(shardckpt.errors.UnsupportedError, match=r"the scales of e\.up .*--keep-fp32"):
        shardckpt.convert(src, tmp_path / "out", dtype="bf16")
    shardckpt.convert(src, tmp_path / "out", dtype="bf16", keep_fp32="e.*")
    assert_same(load_folder(tmp_path / "out"), {**tensors, "n": tensors["n"].bfloat16()})


@pytest.mark.parametrize("target", ["kept.safetensors", "kept.pt", "folder"])
def test_a_diff_matches_inner_tensors_of_a_step_and_of_what_it_became(target: str, tmp_path: Path) -> None:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    torch.manual_seed(0)
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(64, 64), "b": torch.nn.Linear(64, 4)}).requires_grad_(False)
    quantize_(model["a"], Int8WeightOnlyConfig(version=2))
    shardckpt.save({"model": model}, tmp_path / "step")
    shardckpt.consolidate(tmp_path / "step", tmp_path / target)
    for pair in ((tmp_path / "step", tmp_path / target), (tmp_path / target, tmp_path / "step")):
        found = shardckpt.diff(*pair)
        assert found.same and found.compared == 6, found
    model["a"].weight.qdata[3, 4] += 1
    shardckpt.save({"model": model}, tmp_path / "other")
    found = shardckpt.diff(tmp_path / "other", tmp_path / target)
    assert [(each.name, each.kind) for each in found.differences] == [("a.weight.qdata", "values")]
    assert not found.value_differences


def test_a_diff_of_two_steps_names_another_context(tmp_path: Path) -> None:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model = torch.nn.Sequential(torch.nn.Linear(64, 64))
    quantize_(model, Int8WeightOnlyConfig(version=2))
    shardckpt.save({"model": model}, tmp_path / "a")
    model[0].weight.reduce_range = True
    shardckpt.save({"model": model}, tmp_path / "b")
    (found,) = shardckpt.diff(tmp_path / "a", tmp_path / "b").value_differences
    assert (found.name, found.kind) == ("0.weight.__tensor_subclass__", "value")
