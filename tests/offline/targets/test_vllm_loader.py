"""vLLM's own loader fills its own models with the files of each rank; runs where vLLM 0.33 is installed, without a GPU.

The parts of a model that have no weights (rotary embeddings, kernels of attention) are replaced; its layers are vLLM's.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import shardckpt
from tests.kit.models import gguf_models, vllm_models

pytest.importorskip("vllm")

from transformers import AutoConfig
from vllm import platforms
from vllm.config import LoadConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.model_executor.layers.attention import attention
from vllm.model_executor.model_loader.sharded_state_loader import ShardedStateLoader
from vllm.model_executor.models import llama, mistral, qwen2, qwen3
from vllm.platforms.cpu import CpuPlatform

MODELS = {
    "llama": llama.LlamaForCausalLM,
    "mistral": mistral.MistralForCausalLM,
    "qwen2": qwen2.Qwen2ForCausalLM,
    "qwen3": qwen3.Qwen3ForCausalLM,
}


class ScalesOnly(torch.nn.Module):
    """The state of an attention layer."""

    def __init__(self, *_: Any, prefix: str = "", **__: Any) -> None:
        super().__init__()
        attention._init_kv_cache_quant(self, None, prefix)


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platforms, "_current_platform", CpuPlatform())
    for module in (llama, mistral, qwen2, qwen3):
        for name in ("Attention", "EncoderOnlyAttention"):
            monkeypatch.setattr(module, name, ScalesOnly, raising=False)
        monkeypatch.setattr(module, "get_rope", lambda *_, **__: torch.nn.Identity(), raising=False)


def build(kind: str, folder: Path, rank: int, tp: int, monkeypatch: pytest.MonkeyPatch) -> torch.nn.Module:
    """Return vLLM's model of a rank, with NaN as all weights but its scales."""
    for name, size, index in (("_TP", tp, rank), ("_PP", 1, 0)):
        group = SimpleNamespace(world_size=size, rank_in_group=index, is_first_rank=True, is_last_rank=True)
        monkeypatch.setattr(parallel_state, name, group)
    config, hf = VllmConfig(), AutoConfig.from_pretrained(folder)
    config.model_config = SimpleNamespace(
        hf_config=hf, hf_text_config=hf, dtype=torch.float32, head_dtype=torch.float32, is_multimodal_model=False
    )
    with set_current_vllm_config(config):
        model = MODELS[kind](vllm_config=config)
    for name, value in model.state_dict().items():
        if not name.endswith("_scale"):
            value.fill_(float("nan"))
    return model


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("kind", MODELS)
def test_a_rank_is_as_after_vllms_load_of_the_folder(
    kind: str, tp: int, is_tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = gguf_models.build_model(vllm_models.QWEN2 if kind == "qwen2" else gguf_models.MORE[kind])
    if is_tied:
        del tensors["lm_head.weight"]
    config: dict[str, Any] = {**vllm_models.CONFIG, "model_type": kind, "tie_word_embeddings": is_tied}
    config["architectures"] = [MODELS[kind].__name__]
    src, out = gguf_models.write_model(tmp_path / "src", tensors, **config), tmp_path / "out"
    shardckpt.consolidate(src, out, to="vllm-sharded", tp=tp, max_shard_size="50KB")
    for rank in range(tp):
        expected, found = (build(kind, src, rank, tp, monkeypatch) for _ in range(2))
        with set_current_vllm_config(VllmConfig()):
            expected.load_weights(load_file(src / "model.safetensors").items())
        loader = ShardedStateLoader(LoadConfig(load_format="sharded_state"))
        loader.load_weights(found, SimpleNamespace(model=str(out), model_weights=None))
        assert found.state_dict().keys() == expected.state_dict().keys()
        for name, value in expected.state_dict().items():
            assert torch.equal(found.state_dict()[name], value), f"{name} of rank {rank}"
