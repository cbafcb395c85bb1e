"""Architectures that GGUF can hold: names and shapes of their tensors.

The names are those of llama.cpp's loader (`src/models/` of ggml-org/llama.cpp), for the tensors of transformers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from shardckpt.errors import UnsupportedError


@dataclass(frozen=True, slots=True)
class NamedTensor:
    """A tensor of an architecture.

    Attributes:
        source: Name in transformers; of a layer, the name below it.
        name: Name in GGUF; of a layer, the name below it.
        shape: Keys of `Hyperparameters.sizes`, the slowest dimension first.
        heads: Key of the number of heads, if the rows of each head are stored in another order; else empty.
        is_required: Whether every model of the architecture has it.
    """

    source: str
    name: str
    shape: tuple[str, ...]
    heads: str = ""
    is_required: bool = True


@dataclass(frozen=True, slots=True)
class Architecture:
    """A kind of model that llama.cpp runs.

    Attributes:
        name: Name in GGUF; the prefix of the keys of hyperparameters.
        layer: Tensors of each layer.
        has_rope_dimensions: Whether the number of rotated dimensions is stored.
    """

    name: str
    layer: tuple[NamedTensor, ...]
    has_rope_dimensions: bool = False

    def list_tensors(self, layers: int) -> Iterator[NamedTensor]:
        """Yield all tensors of a model with full names, in the order of the computation.

        Args:
            layers: Number of layers.
        """
        yield EMBEDDING
        for number in range(layers):
            for tensor in self.layer:
                source, name = f"model.layers.{number}.{tensor.source}", f"blk.{number}.{tensor.name}"
                yield replace(tensor, source=source, name=name)
        yield NamedTensor("model.norm.weight", "output_norm.weight", ("embedding",))
        yield OUTPUT


EMBEDDING = NamedTensor("model.embed_tokens.weight", "token_embd.weight", ("vocabulary", "embedding"))
OUTPUT = NamedTensor("lm_head.weight", "output.weight", ("vocabulary", "embedding"))
"""The output layer; llama.cpp uses the embedding in its place if a file has none."""

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
ARCHITECTURES = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": Architecture("qwen2", _LAYER + _INPUT_BIASES),
    "qwen3": Architecture("qwen3", _LAYER + _HEAD_NORMS),
}
"""`model_type` of a `config.json` to the architecture."""


def find_architecture(model_type: object, where: str) -> Architecture:
    """Return the architecture of a model.

    Args:
        model_type: Value in `config.json`.
        where: Path or URL of that file.

    Raises:
        UnsupportedError: GGUF files of this architecture are not written.
    """
    found = ARCHITECTURES.get(model_type) if isinstance(model_type, str) else None
    if found is None:
        raise UnsupportedError(
            "this model_type is not written as GGUF", where=where, found=model_type, expected=", ".join(ARCHITECTURES)
        )
    return found
