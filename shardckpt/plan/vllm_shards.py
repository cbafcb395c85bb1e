"""Plan the parameters for each tensor-parallel rank in vLLM.

Names, fused projections and the split follow the state dict that `ShardedStateLoader` in vLLM 0.33 fills
(`model_loader/sharded_state_loader.py`; `models/llama.py`, `mistral.py`, `qwen2.py`, `qwen3.py`; `layers/linear.py`,
`layers/vocab_parallel_embedding.py`; the scales in `layers/attention/attention.py`). It accepts no other names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from shardckpt.boxes import Shape
from shardckpt.errors import IncompleteError, UnsupportedError, UsageError
from shardckpt.plan.rules.rules import Concat, Narrow, Recipe, SourceTensor

Config = Mapping[str, object]

VOCAB_MULTIPLE = 64  # embeddings are padded with zero rows to a multiple of this

# Attention buffers, each 1.0, in float32: vLLM's state dict has them, a model's checkpoint does not.
SCALES = ("_q_scale", "_k_scale", "_v_scale", "_prob_scale")

EMBEDDING, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
_BUFFER = ".rotary_emb.inv_freq"  # buffer in old checkpoints, which vLLM computes itself


class Parameter(NamedTuple):
    """One rank's parameter."""

    recipe: Recipe  # from the model's tensors
    padding: int = 0  # zero rows that follow


@dataclass(frozen=True, slots=True)
class VllmArchitecture:
    """Layers in a vLLM model class."""

    has_qkv_bias: Callable[[Config], bool]  # on the query, key and value projections
    has_output_bias: Callable[[Config], bool]  # on the attention's output projection
    has_mlp_bias: Callable[[Config], bool]
    has_qk_norm: bool = False  # whether query and key are normalized by head
    # Whether `head_dim` may differ from the hidden size divided by the number of heads.
    has_head_dim: bool = True


def _always(_: Config) -> bool:
    return True


def _never(_: Config) -> bool:
    return False


def _has_attention_bias(config: Config) -> bool:
    return bool(config.get("attention_bias") or config.get("bias"))


def _has_llama_bias(config: Config) -> bool:
    return bool(config.get("qkv_bias", _has_attention_bias(config)))


def _has_qwen3_bias(config: Config) -> bool:
    return bool(config.get("attention_bias"))


def _has_mlp_bias(config: Config) -> bool:
    return bool(config.get("mlp_bias"))


_LLAMA = VllmArchitecture(_has_llama_bias, _has_attention_bias, _has_mlp_bias)
# By name in `config.json`.
ARCHITECTURES: Mapping[str, VllmArchitecture] = {
    "LlamaForCausalLM": _LLAMA,
    "MistralForCausalLM": _LLAMA,
    "Qwen2ForCausalLM": VllmArchitecture(_always, _never, _never, has_head_dim=False),
    "Qwen3ForCausalLM": VllmArchitecture(_has_qwen3_bias, _never, _never, has_qk_norm=True),
}


class _Sizes(NamedTuple):
    """A model's sizes in elements, from its config."""

    layers: int
    vocabulary: int  # tokens
    hidden: int
    intermediate: int  # between the MLP's projections
    heads: int  # attention heads
    kv_heads: int  # key and value heads
    head_dim: int


def _read_sizes(config: Config, architecture: VllmArchitecture) -> _Sizes:
    hidden, heads = _read_number(config, "hidden_size"), _read_number(config, "num_attention_heads")
    has_head_dim = architecture.has_head_dim and config.get("head_dim") is not None
    return _Sizes(
        _read_number(config, "num_hidden_layers"),
        _read_number(config, "vocab_size"),
        hidden,
        _read_number(config, "intermediate_size"),
        heads,
        heads if config.get("num_key_value_heads") is None else _read_number(config, "num_key_value_heads"),
        _read_number(config, "head_dim") if has_head_dim else hidden // heads,
    )


def _read_number(config: Config, key: str) -> int:
    value = config.get(key)
    if type(value) is not int or value < 1:
        raise UnsupportedError("config.json must have a positive number", where=key, found=repr(value))
    return value


class _Model:
    """A model's tensors, and the names that are placed."""

    def __init__(self, sizes: _Sizes, shapes: Mapping[str, Shape], tp: int) -> None:
        self.sizes, self.tp = sizes, tp
        self._shapes = shapes
        self.placed: set[str] = set()

    def full(self, name: str, *shape: int) -> SourceTensor:
        """Return a tensor, which must have the shape."""
        if name not in self._shapes:
            raise IncompleteError(
                "vLLM needs a tensor that the checkpoint does not hold",
                where=name,
                fix="Use the names from transformers; --rules and --rename change them.",
            )
        if self._shapes[name] != shape:
            raise UnsupportedError(
                "the tensor does not have the shape that vLLM takes from config.json",
                where=name,
                found=list(self._shapes[name]),
                expected=list(shape),
            )
        self.placed.add(name)
        return SourceTensor(name, shape)

    def part(self, name: str, shape: Shape, dim: int, start: int, size: int) -> Recipe:
        """Slice a tensor."""
        tensor = self.full(name, *shape)
        if size == shape[dim]:
            return tensor
        return Narrow(tensor, dim, start, tuple(size if d == dim else n for d, n in enumerate(shape)))

    def split(self, name: str, shape: Shape, dim: int, rank: int) -> Recipe:
        """Return a rank's equal part."""
        size = self.divide(shape[dim], f"dimension {dim} of {name}")
        return self.part(name, shape, dim, rank * size, size)

    def divide(self, number: int, name: str) -> int:
        """Return each rank's part."""
        if number % self.tp:
            raise UsageError(f"--tp {self.tp} must divide {name}", found=str(number))
        return number // self.tp


def find_architecture(config: Config) -> VllmArchitecture:
    """Return the architecture that a config names."""
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    known = ", ".join(ARCHITECTURES)
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise UnsupportedError(
            "vLLM's parameter names are not known for this architecture",
            where="config.json",
            found=f"architectures {names}",
            expected=known,
            fix="vLLM reads safetensors folders for all its architectures: leave out --to.",
        )
    if "quantization_config" in config:
        raise UnsupportedError(
            "vLLM's layout for quantized weights depends on the device",
            where="config.json",
            found="quantization_config",
            fix="Dequantize fp8 weights first: shardckpt convert SRC PLAIN --dtype bf16. Then convert PLAIN. Or serve"
            " the safetensors folder as it is: vLLM splits it itself.",
        )
    return ARCHITECTURES[name]


def plan_rank(
    config: Config, shapes: Mapping[str, Shape], rank: int, tp: int, *, ties: Mapping[str, str]
) -> dict[str, Parameter]:
    """Return a rank's parameters by name, in vLLM's order; `list_scales` has the attention scales."""
    architecture = find_architecture(config)
    model = _Model(_read_sizes(config, architecture), shapes, tp)
    is_tied = config.get("tie_word_embeddings") is True
    found = {} if is_tied else {EMBEDDING: _split_vocabulary(model, EMBEDDING, rank)}
    for layer in range(model.sizes.layers):
        prefix = f"model.layers.{layer}."
        for name, recipe in _plan_layer(model, architecture, config, prefix, rank):
            found[prefix + name] = Parameter(recipe)
    found[NORM] = Parameter(model.full(NORM, model.sizes.hidden))
    # vLLM keeps a tied tensor under its first name in alphabetical order
    found[HEAD] = _split_vocabulary(model, EMBEDDING if is_tied else HEAD, rank)
    _require_all_placed(model, shapes, ties)
    return found


def list_scales(config: Config) -> list[str]:
    """Return the names of all attention layers' scales."""
    layers = config["num_hidden_layers"]
    assert isinstance(layers, int), "plan_rank has checked it"
    return [f"model.layers.{layer}.self_attn.attn.{name}" for layer in range(layers) for name in SCALES]


def _plan_layer(
    model: _Model, architecture: VllmArchitecture, config: Config, prefix: str, rank: int
) -> Iterator[tuple[str, Recipe]]:
    """Yield a layer's parameters, with names relative to it."""
    sizes = model.sizes
    hidden, inner, heads = sizes.hidden, sizes.intermediate, sizes.heads * sizes.head_dim
    yield "self_attn.qkv_proj.weight", _fuse_qkv(model, prefix, "weight", (hidden,), rank)
    if architecture.has_qkv_bias(config):
        yield "self_attn.qkv_proj.bias", _fuse_qkv(model, prefix, "bias", (), rank)
    yield "self_attn.o_proj.weight", model.split(f"{prefix}self_attn.o_proj.weight", (hidden, heads), 1, rank)
    if architecture.has_output_bias(config):
        yield "self_attn.o_proj.bias", model.full(f"{prefix}self_attn.o_proj.bias", hidden)
    if architecture.has_qk_norm:
        for name in ("self_attn.q_norm.weight", "self_attn.k_norm.weight"):
            yield name, model.full(prefix + name, sizes.head_dim)
    yield "mlp.gate_up_proj.weight", _fuse_gate_up(model, prefix, "weight", (hidden,), rank)
    yield "mlp.down_proj.weight", model.split(f"{prefix}mlp.down_proj.weight", (hidden, inner), 1, rank)
    if architecture.has_mlp_bias(config):
        yield "mlp.gate_up_proj.bias", _fuse_gate_up(model, prefix, "bias", (), rank)
        yield "mlp.down_proj.bias", model.full(f"{prefix}mlp.down_proj.bias", hidden)
    for name in ("input_layernorm.weight", "post_attention_layernorm.weight"):
        yield name, model.full(prefix + name, hidden)


def _fuse_qkv(model: _Model, prefix: str, kind: str, rest: Shape, rank: int) -> Recipe:
    """Return a rank's heads; ranks share key and value heads if there are fewer."""
    _, _, _, _, heads, kv_heads, head_dim = model.sizes
    size = model.divide(heads, "the number of attention heads") * head_dim
    if kv_heads >= model.tp:
        kv_size, index = model.divide(kv_heads, "the number of key and value heads") * head_dim, rank
    elif model.tp % kv_heads:
        raise UsageError(
            f"--tp {model.tp} must be a multiple of the number of key and value heads", found=str(kv_heads)
        )
    else:
        kv_size, index = head_dim, rank // (model.tp // kv_heads)
    query = f"{prefix}self_attn.q_proj.{kind}"
    parts = [model.part(query, (heads * head_dim, *rest), 0, rank * size, size)]
    for name in ("k_proj", "v_proj"):
        shape = (kv_heads * head_dim, *rest)
        parts.append(model.part(f"{prefix}self_attn.{name}.{kind}", shape, 0, index * kv_size, kv_size))
    return _concat(parts)


def _fuse_gate_up(model: _Model, prefix: str, kind: str, rest: Shape, rank: int) -> Recipe:
    shape = (model.sizes.intermediate, *rest)
    return _concat([model.split(f"{prefix}mlp.{name}.{kind}", shape, 0, rank) for name in ("gate_proj", "up_proj")])


def _split_vocabulary(model: _Model, name: str, rank: int) -> Parameter:
    """Return a rank's rows; zeros pad the last ones."""
    rows, hidden = model.sizes.vocabulary, model.sizes.hidden
    size = model.divide(-(-rows // VOCAB_MULTIPLE) * VOCAB_MULTIPLE, "the padded vocabulary")
    start = min(rank * size, rows)
    stop = min(start + size, rows)
    return Parameter(model.part(name, (rows, hidden), 0, start, stop - start), size - (stop - start))


def _concat(parts: list[Recipe]) -> Recipe:
    shape = parts[0].shape
    return Concat(tuple(parts), 0, (sum(part.shape[0] for part in parts), *shape[1:]))


def _require_all_placed(model: _Model, shapes: Mapping[str, Shape], ties: Mapping[str, str]) -> None:
    placed = {ties.get(name, name) for name in model.placed}
    rest = [name for name in shapes if ties.get(name, name) not in placed and not name.endswith(_BUFFER)]
    if rest:
        raise UnsupportedError(
            "vLLM's architecture has no parameter for a tensor",
            where=rest[0],
            found=f"{len(rest)} such tensors",
            fix="--exclude leaves them out.",
        )
