"""What the ranks of vLLM hold of a model, built anew after the sources of vLLM 0.33, and the model again.

The sources: `QKVParallelLinear`, `MergedColumnParallelLinear` and `RowParallelLinear` of `layers/linear.py`;
`VocabParallelEmbedding` of `layers/vocab_parallel_embedding.py`; the scales of `layers/attention/attention.py`; and
`_filter_subtensors` of `model_loader/sharded_state_loader.py`, which keeps the first name of a tied weight.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
from numpy.typing import NDArray

from shardckpt.dtypes import TORCH_NAMES
from shardckpt.encodings.element_values import numpy_dtype
from tests.kit.models import gguf_models

Tensors = dict[str, NDArray[Any]]
CONFIG = {**gguf_models.CONFIG, "architectures": ["LlamaForCausalLM"], "tie_word_embeddings": False}
KV_HEADS, PADDED = 2, 64
QWEN2 = gguf_models.attention_shapes(64, 64, 32) | gguf_models.attention_biases(64, 32)
"""Shapes of a qwen2, whose heads are as large as its hidden states divided by their number."""


def build_rank(model: Mapping[str, NDArray[Any]], rank: int, tp: int, *, is_tied: bool = False) -> Tensors:
    """Return the state dict of a rank as `ShardedStateLoader.save_model` would write it."""

    def rows(name: str, parts: int = tp, index: int = rank) -> NDArray[Any]:
        return np.split(model[name], parts)[index]

    found: Tensors = {}
    for name, value in model.items():
        prefix, _, kind = name.rpartition(".")
        if prefix.endswith("q_proj"):
            replicas = max(tp // KV_HEADS, 1)
            shared = [
                rows(name.replace("q_proj", k), min(tp, KV_HEADS), rank // replicas) for k in ("k_proj", "v_proj")
            ]
            found[name.replace("q_proj", "qkv_proj")] = np.concatenate([rows(name), *shared])
            attention = prefix.removesuffix("q_proj") + "attn."
            found |= {f"{attention}_{each}_scale": np.float32(1) for each in ("q", "k", "v", "prob")}
        elif prefix.endswith("gate_proj"):
            parts = [rows(name), rows(name.replace("gate_proj", "up_proj"))]
            found[name.replace("gate_proj", "gate_up_proj")] = np.concatenate(parts)
        elif prefix.endswith(("o_proj", "down_proj")) and kind == "weight":
            found[name] = np.split(value, tp, axis=1)[rank]
        elif prefix in ("model.embed_tokens", "lm_head"):
            padded = np.concatenate([value, np.zeros((PADDED - len(value), value.shape[1]), value.dtype)])
            found["lm_head.weight" if is_tied else name] = np.split(padded, tp)[rank]
        elif not prefix.endswith(("k_proj", "v_proj", "up_proj")):
            found[name] = value
    return found


def read_ranks(place: str | Path) -> dict[int, Tensors]:
    """Return the tensors in the files of each rank."""
    fs, folder = fsspec.core.url_to_fs(str(place))
    ranks: dict[int, Tensors] = defaultdict(dict)
    for path in sorted(fs.glob(f"{folder}/model-rank-*-part-*.safetensors")):
        found = parse(fs.cat_file(path))
        rank = ranks[int(path.rpartition("/")[2].split("-")[2])]
        assert not rank.keys() & found.keys(), "no tensor is in two parts"
        rank |= found
    return dict(ranks)


def parse(content: bytes) -> Tensors:
    """Return the tensors of a safetensors file; its library reads fewer types as NumPy arrays."""
    start = 8 + int.from_bytes(content[:8], "little")
    found: Tensors = {}
    for name, facts in json.loads(content[8:start]).items():
        if name != "__metadata__":
            first, stop = facts["data_offsets"]
            values = np.frombuffer(content[start + first : start + stop], numpy_dtype(TORCH_NAMES[facts["dtype"]]))
            found[name] = values.reshape(facts["shape"])
    return found


def read_model(place: str | Path) -> Tensors:
    """Return the tensors of a llama by their names in transformers, from the files of two ranks."""
    ranks = read_ranks(place)
    found: Tensors = {}
    for name, first in ranks[0].items():
        prefix, _, kind = name.rpartition(".")
        both = [ranks[rank][name] for rank in (0, 1)]
        if prefix.endswith("qkv_proj"):
            for each, values in zip("qkv", zip(*(np.split(t, [64, 96]) for t in both), strict=True), strict=True):
                found[name.replace("qkv_proj", f"{each}_proj")] = np.concatenate(values)
        elif prefix.endswith("gate_up_proj"):
            for each, values in zip(("gate", "up"), zip(*(np.split(t, 2) for t in both), strict=True), strict=True):
                found[name.replace("gate_up_proj", f"{each}_proj")] = np.concatenate(values)
        elif prefix.endswith(("o_proj", "down_proj")):
            found[name] = np.concatenate(both, axis=1)
        elif prefix in ("model.embed_tokens", "lm_head"):
            found[name] = np.concatenate(both)[:40]
        elif not kind.endswith("_scale"):
            found[name] = first
    return found
