"""Models for tests of the target gguf: their configs and tensors, and what GGUF is to hold of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import fsspec
import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save_file

Model = dict[str, NDArray[np.float32]]
CONFIG: Mapping[str, Any] = {
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "vocab_size": 40,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
}


def attention_shapes(hidden: int, queries: int, keys: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the weights of attention, with so many rows of queries and of keys."""
    return {
        "self_attn.q_proj.weight": (queries, hidden),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.o_proj.weight": (hidden, queries),
    }


def attention_biases(queries: int, keys: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the biases of queries, keys and values."""
    return {f"self_attn.{name}_proj.bias": (rows,) for name, rows in (("q", queries), ("k", keys), ("v", keys))}


SHAPES: Mapping[str, tuple[int, ...]] = {
    **attention_shapes(64, 128, 64),
    "mlp.gate_proj.weight": (96, 64),
    "mlp.up_proj.weight": (96, 64),
    "mlp.down_proj.weight": (64, 96),
    "input_layernorm.weight": (64,),
    "post_attention_layernorm.weight": (64,),
}
BIASES = attention_biases(128, 64)
MORE: Mapping[str, Mapping[str, tuple[int, ...]]] = {
    "llama": {},
    "mistral": {},
    "qwen2": BIASES,
    "qwen3": {"self_attn.q_norm.weight": (32,), "self_attn.k_norm.weight": (32,)},
}
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
"""Modules of transformers, and the names that `gguf.get_tensor_name_map` gives them."""


def list_shapes(more: Mapping[str, tuple[int, ...]], layers: int = 2) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a model by name."""
    blocks = {f"model.layers.{n}.{name}": shape for n in range(layers) for name, shape in {**SHAPES, **more}.items()}
    return {"lm_head.weight": (40, 64), "model.embed_tokens.weight": (40, 64), **blocks, "model.norm.weight": (64,)}


def build_model(more: Mapping[str, tuple[int, ...]] | None = None) -> Model:
    """Return random tensors by name."""
    rng = np.random.default_rng(3)
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in list_shapes(more or {}).items()}


def write_model(folder: Path, model: Mapping[str, NDArray[Any]], **config: Any) -> Path:
    """Write tensors and `config.json`, with other values than those of `CONFIG`."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(dict(model), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**CONFIG, **config}))
    return folder


def rename(name: str) -> str:
    """Return the name in GGUF."""
    module, _, kind = name.rpartition(".")
    if module.startswith("model.layers."):
        _, _, number, below = module.split(".", 3)
        return f"blk.{number}.{NAMES[below]}.{kind}"
    return f"{NAMES[module]}.{kind}"


def by_pairs(name: str, value: NDArray[Any]) -> NDArray[Any]:
    """Return a tensor of llama as llama.cpp expects it: rows of heads in pairs."""
    heads = {"attn_q": 4, "attn_k": 2}.get(rename(name).split(".")[-2])
    if heads is None:
        return value
    return value.reshape(heads, 2, len(value) // heads // 2, *value.shape[1:]).swapaxes(1, 2).reshape(value.shape)


def from_pairs(name: str, value: NDArray[Any]) -> NDArray[Any]:
    """Return a tensor of llama in the order of transformers; `by_pairs` undone."""
    heads = {"attn_q": 4, "attn_k": 2}.get(rename(name).split(".")[-2])
    if heads is None:
        return value
    return value.reshape(heads, len(value) // heads // 2, 2, *value.shape[1:]).swapaxes(1, 2).reshape(value.shape)


def open_file(place: str | Path, folder: Path) -> Any:
    """Return llama.cpp's reader of a file; that of another store is copied into a folder."""
    gguf = pytest.importorskip("gguf")
    if "://" in str(place):
        copy = folder / "copy.gguf"
        copy.write_bytes(fsspec.open(str(place), "rb").open().read())
        place = copy
    return gguf.GGUFReader(place)


def read_model(place: str | Path, folder: Path) -> dict[str, NDArray[Any]]:
    """Return the tensors of a llama by their names in transformers."""
    tensors = {tensor.name: tensor for tensor in open_file(place, folder).tensors}
    names = [name for name in list_shapes({}) if rename(name) in tensors]
    assert len(names) == len(tensors)
    found = {}
    for name in names:
        tensor = tensors[rename(name)]
        data = tensor.data.view(ml_dtypes.bfloat16) if tensor.tensor_type.name == "BF16" else tensor.data
        found[name] = from_pairs(name, np.array(data).reshape([int(n) for n in reversed(tensor.shape)]))
    return found
