"""A model's hyperparameters, from its `config.json`, as GGUF metadata; the architectures that GGUF can hold.

GGUF names are from llama.cpp's loader (`src/models/` in ggml-org/llama.cpp), for the tensors in transformers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import pi
from typing import Any

from shardckpt.errors import FormatError, UnsupportedError
from shardckpt.offline.targets.gguf.gguf_header import MetadataValue

_USUAL_THETA = 10000.0  # rotary base for configs that name none
_INTEGER_END, _NUMBER_END = 1 << 32, 3e38  # exclusive limits: GGUF stores 32 bits


@dataclass(frozen=True, slots=True)
class Hyperparameters:
    """A model's hyperparameters."""

    layers: int
    sizes: Mapping[str, int]  # rows, columns and heads by the names in `NamedTensor.shape`
    metadata: Mapping[str, MetadataValue]  # for GGUF, without the file type
    is_tied: bool  # the output layer is the embedding
    rope: Rope
    warnings: tuple[str, ...] = ()  # differences in llama.cpp's computation, one sentence each

    def list_rope_factors(self) -> list[float]:
        """Return Llama 3's frequency divisors: 1 for high frequencies, `factor` for low ones, a ramp between."""
        rope, head = self.rope, self.sizes["head"]
        if rope.kind != "llama3":
            return []
        base, factor = rope.number("rope_theta", _USUAL_THETA), rope.number("factor")
        low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
        context = rope.integer("original_max_position_embeddings")
        waves = (2 * pi * base ** (dim / head) for dim in range(0, head, 2))
        return [_rope_factor(wave, factor, low, high, context) for wave in waves]


def read_hyperparameters(config: Mapping[str, Any], architecture: Architecture, where: str) -> Hyperparameters:
    """Return a model's hyperparameters."""
    values = _ConfigValues(config, where)
    values.require("hidden_act", "silu")
    heads = values.integer("num_attention_heads")
    key_heads = values.integer("num_key_value_heads", heads)
    embedding = values.integer("hidden_size")
    head = values.integer("head_dim", embedding // heads)
    layers, context = values.integer("num_hidden_layers"), values.integer("max_position_embeddings")
    window = _find_window(config, context)
    if head % 2:
        raise UnsupportedError("a head must have an even number of dimensions", where=where, found=head)
    sizes = {
        "vocabulary": values.integer("vocab_size"),
        "embedding": embedding,
        "feed_forward": values.integer("intermediate_size"),
        "query": heads * head,
        "key": key_heads * head,
        "head": head,
        "query_heads": heads,
        "key_heads": key_heads,
    }
    rope = _read_rope(config, where)
    metadata: dict[str, MetadataValue] = {
        "block_count": layers,
        "context_length": window or context,
        "embedding_length": embedding,
        "feed_forward_length": sizes["feed_forward"],
        "attention.head_count": heads,
        "attention.head_count_kv": key_heads,
        "attention.layer_norm_rms_epsilon": values.number("rms_norm_eps"),
        "attention.key_length": head,
        "attention.value_length": head,
        "rope.freq_base": rope.number("rope_theta", _USUAL_THETA),
        **({"rope.dimension_count": head} if architecture.has_rope_dimensions else {}),
        **_scaling_metadata(rope, context),
        "vocab_size": sizes["vocabulary"],
    }
    return Hyperparameters(
        layers,
        sizes,
        {f"{architecture.name}.{key}": value for key, value in metadata.items()},
        config.get("tie_word_embeddings") is True,
        rope,
        _warn_of_window(window, context),
    )


class _ConfigValues:
    """Checked values from a JSON object."""

    def __init__(self, content: Mapping[str, Any], where: str) -> None:
        self._content, self._where = content, where

    def integer(self, key: str, default: int | None = None) -> int:
        """Return a positive integer; a missing or null value has the default."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < _INTEGER_END:
            raise self._fault(key, value, "a positive 32-bit integer")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Return a positive number; a missing or null value has the default."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < _NUMBER_END:
            raise self._fault(key, value, "a positive number")
        return float(value)

    def has(self, key: str) -> bool:
        """Return True if a value is there and not null."""
        return self._content.get(key) is not None

    def require(self, key: str, only: object) -> None:
        """Require a value to be missing or the only one that llama.cpp supports."""
        value = self._get(key, only)
        if value != only:
            raise UnsupportedError(
                f"GGUF cannot store this model's {key}", where=self._where, found=value, expected=only
            )

    def _get(self, key: str, default: object) -> object:
        value = self._content.get(key)
        return default if value is None else value

    def _fault(self, key: str, value: object, expected: str) -> FormatError:
        found = "nothing" if value is None else value
        return FormatError(f"{key} must be {expected}", where=self._where, found=found)


class Rope(_ConfigValues):
    """Checked values for the rotary embedding."""

    def __init__(self, content: Mapping[str, Any], where: str) -> None:
        super().__init__(content, where)
        self.kind = content.get("rope_type") or content.get("type") or "default"
        if self.kind not in _ROPES:
            raise UnsupportedError(
                "this kind of rotary embedding is not written as GGUF",
                where=where,
                found=self.kind,
                expected=", ".join(_ROPES),
            )
        self.require("partial_rotary_factor", 1)


_ROPES = ("default", "linear", "yarn", "llama3")
_YARN_KEYS = {
    "extrapolation_factor": "yarn_ext_factor",
    "attention_factor": "yarn_attn_factor",
    "beta_fast": "yarn_beta_fast",
    "beta_slow": "yarn_beta_slow",
}


def _read_rope(config: Mapping[str, Any], where: str) -> Rope:
    """Return the rotary embedding's values, also from configs before transformers 5."""
    found = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(found, dict):
        raise FormatError("rope_parameters must be an object", where=where, found=type(found).__name__)
    if any(isinstance(value, dict) for value in found.values()):
        raise UnsupportedError("layers with different rotary embeddings are not written as GGUF", where=where)
    older = {key: config.get(key) for key in ("rope_theta", "partial_rotary_factor")}
    return Rope({**older, **found}, where)


def _scaling_metadata(rope: Rope, context: int) -> dict[str, MetadataValue]:
    """Return the keys for a scaled rotary embedding."""
    if rope.kind not in ("linear", "yarn"):
        return {}
    found: dict[str, MetadataValue] = {"type": str(rope.kind), "factor": rope.number("factor")}
    if rope.kind == "yarn":
        found["original_context_length"] = rope.integer("original_max_position_embeddings", context)
        found |= {key: rope.number(name) for name, key in _YARN_KEYS.items() if rope.has(name)}
    return {f"rope.scaling.{key}": value for key, value in found.items()}


def _rope_factor(wavelength: float, factor: float, low: float, high: float, context: int) -> float:
    if wavelength <= context / high:
        return 1.0
    if wavelength >= context / low:
        return factor
    share = (context / wavelength - low) / (high - low)
    return 1 / ((1 - share) / factor + share)


def _warn_of_window(window: int, context: int) -> tuple[str, ...]:
    if not window:
        return ()
    return (
        f"context_length is the sliding_window, {window}, not {context}: llama.cpp would attend to all tokens beyond",
    )


def _find_window(config: Mapping[str, Any], context: int) -> int:
    """Return how many tokens attention is limited to; 0 without a limit."""
    # llama.cpp has no limit for these architectures: results are equal up to this number of tokens.
    window, kind = config.get("sliding_window"), config.get("model_type")
    is_used = kind == "mistral" or (kind in ("qwen2", "qwen3") and config.get("use_sliding_window") is True)
    types = config.get("layer_types")
    if isinstance(types, list) and "sliding_attention" not in types:
        is_used = False
    if not is_used or isinstance(window, bool) or not isinstance(window, int) or not 0 < window < context:
        return 0
    return window


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
_ARCHITECTURES = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": Architecture("qwen2", _LAYER + _INPUT_BIASES),
    "qwen3": Architecture("qwen3", _LAYER + _HEAD_NORMS),
}


def find_architecture(model_type: object, where: str) -> Architecture:
    """Return a model's architecture."""
    found = _ARCHITECTURES.get(model_type) if isinstance(model_type, str) else None
    if found is None:
        raise UnsupportedError(
            "this model_type is not written as GGUF", where=where, found=model_type, expected=", ".join(_ARCHITECTURES)
        )
    return found
