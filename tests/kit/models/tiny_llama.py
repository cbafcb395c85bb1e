"""The config of a Llama that is small enough for any test."""

from __future__ import annotations

from typing import Any

import pytest


def llama_config(vocab: int, hidden: int, inner: int, **others: Any) -> Any:
    """Return a `LlamaConfig` of two layers, whose four heads share two keys; skip the test without transformers."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    sizes = {"vocab_size": vocab, "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": 2}
    return pytest.importorskip("transformers").LlamaConfig(**sizes, **heads, **others)
