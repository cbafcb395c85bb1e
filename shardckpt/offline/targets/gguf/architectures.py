"""Architectures that GGUF can hold: tensor names and shapes.

GGUF names are from llama.cpp's loader (`src/models/` in ggml-org/llama.cpp), for the tensors in transformers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from shardckpt.errors import UnsupportedError


@dataclass(frozen=True, slots=True)
class NamedTensor:
    """A tensor in an architecture."""

    source: str  # name in transformers; without the layer's prefix
    name: str  # name in GGUF; without the layer's prefix
    shape: tuple[str, ...]  # keys of `Hyperparameters.sizes`, the slowest dimension first
    heads: str = ""  # key for the number of heads if each head's rows are reordered, else empty
    is_required: bool = True  # every model has it


@dataclass(frozen=True, slots=True)
class Architecture:
    """A model architecture that llama.cpp runs."""

    name: str  # name in GGUF; prefix of hyperparameter keys
    layer: tuple[NamedTensor, ...]
    has_rope_dimensions: bool = False  # the number of rotated dimensions is stored

    def list_tensors(self, layers: int) -> Iterator[NamedTensor]:
        """Yield a model's tensors with full names, in computation order."""
        yield EMBEDDING
        for number in range(layers):
            for tensor in self.layer:
                source, name = f"model.layers.{number}.{tensor.source}", f"blk.{number}.{tensor.name}"
                yield replace(tensor, source=source, name=name)
        yield NamedTensor("model.norm.weight", "output_norm.weight", ("embedding",))
        yield OUTPUT


EMBEDDING = NamedTensor("model.embed_tokens.weight", "token_embd.weight", ("vocabulary", "embedding"))
# Without an output layer, llama.cpp uses the embedding.
OUTPUT = NamedTensor("lm_head.weight", "output.weight", ("vocabulary", "embedding"))

_LAYER = (
    NamedTensor("input_layernorm.weight", "attn_norm.weight", ("embedding",)),
    NamedTensor("self_attn.q_proj.weight", "attn_q.weight", ("query", "embedding")),
    NamedTensor("self_attn.k_proj.weight", "attn_k.weight", ("key", "embedding")),
    NamedTensor("self_attn.v_proj.weight", "attn_v.weight", ("key", "embedding")),
    NamedTensor("self_attn.o_proj.weight", "attn_output.weight", ("embedding", "query")),
    NamedTensor("post_attention_layernorm.weight", "ffn_norm.weight", ("embedding",)),
    NamedTensor("mlp.gate_proj.weight", "ffn_gate.weight", ("feed_forward", "embedding")),
    NamedTensor("mlp.up_proj.weight", "ffn_up.weight", ("feed_forward", "embedding")),
    NamedTensor("mlp.down_proj.weight", "ffn_down.weight", ("embedding", "feed_forward")),
)
_INPUT_BIASES = (
    NamedTensor("self_attn.q_proj.bias", "attn_q.bias", ("query",)),
    NamedTensor("self_attn.k_proj.bias", "attn_k.bias", ("key",)),
    NamedTensor("self_attn.v_proj.bias", "attn_v.bias", ("key",)),
)
_OTHER_BIASES = (
    NamedTensor("self_attn.o_proj.bias", "attn_output.bias", ("embedding",)),
    NamedTensor("mlp.gate_proj.bias", "ffn_gate.bias", ("feed_forward",)),
    NamedTensor("mlp.up_proj.bias", "ffn_up.bias", ("feed_forward",)),
    NamedTensor("mlp.down_proj.bias", "ffn_down.bias", ("embedding",)),
)
_HEAD_NORMS = (
    NamedTensor("self_attn.q_norm.weight", "attn_q_norm.weight", ("head",)),
    NamedTensor("self_attn.k_norm.weight", "attn_k_norm.weight", ("head",)),
)
_HEADS = {"attn_q": "query_heads", "attn_k": "key_heads"}


def _optional(tensors: tuple[NamedTensor, ...]) -> tuple[NamedTensor, ...]:
    return tuple(replace(tensor, is_required=False) for tensor in tensors)


def _by_pairs(tensors: tuple[NamedTensor, ...]) -> tuple[NamedTensor, ...]:
    """Return tensors whose heads store the two elements that are rotated together in neighboring rows."""
    return tuple(replace(tensor, heads=_HEADS.get(tensor.name.partition(".")[0], "")) for tensor in tensors)


_LLAMA = Architecture("llama", _by_pairs(_LAYER + _optional(_INPUT_BIASES + _OTHER_BIASES)), has_rope_dimensions=True)
# By `model_type` of `config.json`.
ARCHITECTURES = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": Architecture("qwen2", _LAYER + _INPUT_BIASES),
    "qwen3": Architecture("qwen3", _LAYER + _HEAD_NORMS),
}


def find_architecture(model_type: object, where: str) -> Architecture:
    """Return a model's architecture."""
    found = ARCHITECTURES.get(model_type) if isinstance(model_type, str) else None
    if found is None:
        raise UnsupportedError(
            "this model_type is not written as GGUF", where=where, found=model_type, expected=", ".join(ARCHITECTURES)
        )
    return found
