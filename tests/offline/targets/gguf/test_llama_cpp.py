"""llama.cpp computes from a GGUF file the logits of transformers: names, order of rows, rotation and norms are right.

Needs llama-cpp-python, which is built for minutes; without it these tests are skipped.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import shardckpt

llama_cpp = pytest.importorskip("llama_cpp")
TOKENS = [1, 5, 17, 3, 39, 22, 22, 7, 30, 11, 34, 2]
SIZES: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama with biases": ("Llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 32}),
    "llama 3": (
        "Llama",
        {
            "tie_word_embeddings": True,
            "rope_parameters": {**LLAMA3, "rope_theta": 5e5, "original_max_position_embeddings": 16},
        },
    ),
    "llama with yarn": ("Llama", {"rope_parameters": {**YARN, "rope_theta": 1e4}}),
    "mistral": ("Mistral", {"head_dim": 32, "sliding_window": None}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
}
MOST = {"f32": 0.01, "f16": 0.02, "bf16": 0.12, "q8_0": 0.4}
"""Largest difference of logits of about 3; queries and keys in another order give differences above 1."""


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    family, changes = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **changes})
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += torch.randn_like(parameter) * (0.1 if parameter.ndim > 1 else 0.3)
        expected = model(torch.tensor([TOKENS])).logits[0].numpy()
    model.save_pretrained(tmp_path / "model")
    for dtype, most in MOST.items():
        shardckpt.convert(tmp_path / "model", tmp_path / f"{dtype}.gguf", dtype=dtype)
        runner = llama_cpp.Llama(str(tmp_path / f"{dtype}.gguf"), n_ctx=32, logits_all=True, verbose=False, n_threads=1)
        runner.eval(TOKENS)
        found = np.array(runner.scores[: len(TOKENS)])
        runner.close()
        assert np.abs(found - expected).max() < most, dtype
