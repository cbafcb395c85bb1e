"""Steps of a model with its adapter: merged as the folder that peft writes, into any base."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardckpt
from shardckpt.errors import AmbiguousError, UnsupportedError, UsageError
from tests.kit.runs.cases import assert_same, load_folder

peft = pytest.importorskip("peft")

SIZES = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4, "num_hidden_layers": 1}


def adapt(folder: Path, *, tokens: int = 32, **settings: Any) -> Any:
    """Write a base, and return it with an adapter with random values."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, attention_bias=True))
    model.save_pretrained(folder / "base")
    if tokens != model.config.vocab_size:
        model.resize_token_embeddings(tokens)
    told = {"r": 2, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False, **settings}
    wrapped = peft.get_peft_model(model, peft.LoraConfig(**told))
    for parameter in wrapped.parameters():
        if parameter.requires_grad:
            parameter.data += 0.1 * torch.randn_like(parameter)
    return wrapped


KINDS: dict[str, dict[str, Any]] = {
    "lora": {},
    "dora": {"use_dora": True},
    "saved modules": {"modules_to_save": ["norm", "lm_head"]},
    "biases": {"bias": "all", "lora_bias": True},
    "tokens": {"trainable_token_indices": [3, 1]},
    "embeddings": {"target_modules": ["embed_tokens", "q_proj"]},
    "parameters": {"target_modules": ["v_proj"], "target_parameters": ["q_proj.weight", "k_proj.weight"]},
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_is_merged_as_the_folder_that_peft_writes(kind: str, tmp_path: Path) -> None:
    wrapped = adapt(tmp_path, **KINDS[kind])
    base, step = tmp_path / "base", tmp_path / "step"
    wrapped.save_pretrained(tmp_path / "adapter")
    shardckpt.save({"model": wrapped}, step, model_files=wrapped, base=base, trainable_only=True)
    shardckpt.merge_adapter(base, tmp_path / "adapter", tmp_path / "out")
    shardckpt.merge_adapter(base, step, tmp_path / "from step")
    assert_same(load_folder(tmp_path / "from step"), load_folder(tmp_path / "out"))
    report = shardckpt.merge_adapter(step, step, tmp_path / "step alone")
    assert_same(load_folder(tmp_path / "step alone"), load_folder(tmp_path / "out"))
    assert {"config.json", "generation_config.json"} == {*report.carried}
    for name, expected in wrapped.merge_and_unload().state_dict().items():
        torch.testing.assert_close(load_folder(tmp_path / "out")[name], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["lora", "saved modules", "tokens", "embeddings"])
def test_a_vocabulary_that_grew_in_a_step_is_merged_too(kind: str, tmp_path: Path) -> None:
    settings = {"modules_to_save": ["embed_tokens", "lm_head"]} if kind == "saved modules" else KINDS[kind]
    wrapped = adapt(tmp_path, tokens=40, **settings)
    shardckpt.save({"model": wrapped}, tmp_path / "step", model_files=wrapped)
    shardckpt.merge_adapter(tmp_path / "base", tmp_path / "step", tmp_path / "out")
    truth = wrapped.merge_and_unload().state_dict()
    found = load_folder(tmp_path / "out")
    assert set(found) == set(truth)
    for name, expected in truth.items():
        torch.testing.assert_close(found[name], expected, rtol=1e-5, atol=1e-6)


class _Owner(nn.Module):
    def __init__(self, **models: nn.Module) -> None:
        super().__init__()
        for name, model in models.items():
            setattr(self, name, model)


def test_a_model_inside_another_module_is_found(tmp_path: Path) -> None:
    wrapped = adapt(tmp_path)
    shardckpt.save({"state_dict": _Owner(net=wrapped)}, tmp_path / "step", model_files=wrapped)
    for base in (tmp_path / "base", tmp_path / "step"):
        shardckpt.merge_adapter(base, tmp_path / "step", tmp_path / "out", overwrite=True)
        found = load_folder(tmp_path / "out")
        for name, expected in peft_merge(wrapped).items():
            torch.testing.assert_close(found[name], expected, rtol=1e-5, atol=1e-6)


def peft_merge(wrapped: Any) -> dict[str, torch.Tensor]:
    """Return what peft's merge gives, without changing the model."""
    wrapped.merge_adapter()
    layers = {name: value.clone() for name, value in wrapped.get_base_model().state_dict().items()}
    wrapped.unmerge_adapter()
    return {name.replace(".base_layer", ""): value for name, value in layers.items() if ".lora_" not in name}


def test_two_models_with_adapters_in_one_step_are_refused(tmp_path: Path) -> None:
    first, second = adapt(tmp_path / "1"), adapt(tmp_path / "2")
    shardckpt.save({"state_dict": _Owner(a=first, b=second)}, tmp_path / "step", model_files=first)
    with pytest.raises(AmbiguousError, match=r"several models have adapters; found 'a\.', 'b\.'"):
        shardckpt.merge_adapter(tmp_path / "1" / "base", tmp_path / "step", tmp_path / "out")


def test_a_step_without_the_adapters_config_is_refused_with_the_way_to_it(tmp_path: Path) -> None:
    wrapped = adapt(tmp_path)
    shardckpt.save({"model": wrapped}, tmp_path / "step")
    with pytest.raises(UsageError, match=r"adapter_config\.json is missing.*model_files="):
        shardckpt.merge_adapter(tmp_path / "base", tmp_path / "step", tmp_path / "out")


def test_a_consolidated_step_comes_with_the_way_to_merge_it(tmp_path: Path) -> None:
    wrapped = adapt(tmp_path)
    shardckpt.save({"model": wrapped}, tmp_path / "step", model_files=wrapped)
    [warning] = shardckpt.consolidate(tmp_path / "step", tmp_path / "out").warnings
    assert "Merge the adapter with `shardckpt merge-adapter`" in warning


def test_the_kind_of_an_adapter_in_a_step_is_refused_by_its_name(tmp_path: Path) -> None:
    told = peft.tuners.lora.config.KasaConfig()
    wrapped = adapt(tmp_path, kasa_config=told, init_lora_weights=True)
    shardckpt.save({"model": wrapped}, tmp_path / "step", model_files=wrapped)
    with pytest.raises(UnsupportedError, match="this adapter is KaSA"):
        shardckpt.merge_adapter(tmp_path / "base", tmp_path / "step", tmp_path / "out")
