"""Which weights become fp8, and what the config says of the others."""

from __future__ import annotations

from typing import Any

import pytest

from shardckpt.errors import UnsupportedError, UsageError
from shardckpt.manifest import TensorEntry
from shardckpt.plan.quantized_weights import choose_weights, count_blocks, find_scaled, plan_config

LINEAR = [
    "model.layers.0.self_attn.q_proj.weight",
    "model.layers.0.mlp.gate_proj.weight",
    "model.layers.0.mlp.experts.0.w1.weight",
    "model.layers.0.mlp.shared_experts.up_proj.weight",
]
KEPT = [
    "model.embed_tokens.weight",
    "transformer.wte.weight",
    "lm_head.weight",
    "model.layers.0.mlp.gate.weight",
    "model.layers.0.mlp.router.weight",
    "model.layers.0.mlp.shared_expert_gate.weight",
    "model.layers.0.self_attn.sinks",
]


def entries(names: list[str], dtype: str = "bfloat16", shape: tuple[int, ...] = (4, 4)) -> dict[str, TensorEntry]:
    return {name: TensorEntry((name,), shape, dtype, ()) for name in names}


def test_weights_of_linear_layers_are_chosen_and_embeddings_heads_and_routers_stay() -> None:
    others = {**entries(["model.norm.weight"], shape=(4,)), **entries(["a.conv.weight"], shape=(4, 1, 4))}
    others |= entries(["a.ids.weight"], dtype="int64")
    assert choose_weights({**entries(LINEAR + KEPT), **others}, {}) == LINEAR


def test_globs_take_and_leave_weights() -> None:
    tensors = entries(LINEAR + KEPT)
    assert choose_weights(tensors, {}, include=["lm_head.*", "*proj*"], exclude=["*up_proj*"]) == [
        *LINEAR[:2],
        "lm_head.weight",
    ]


@pytest.mark.parametrize(
    ("globs", "message"),
    [
        ({"include": ["nothing"]}, "matches no tensor"),
        ({"exclude": ["nothing"]}, "matches no tensor"),
        ({"exclude": ["*"]}, "no weights to quantize"),
        ({"include": ["*.sinks"]}, "sinks, which cannot"),
    ],
)
def test_globs_that_cannot_be_followed_are_refused(globs: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        choose_weights(entries(LINEAR + KEPT), {}, **globs)


@pytest.mark.parametrize(
    ("config", "dtype", "message"),
    [
        ({"quantization_config": {"quant_method": "awq"}}, "bfloat16", "already quantized.*awq"),
        ({}, "float8_e4m3fn", "already quantized.*float8_e4m3fn"),
        ({"model_type": "gpt2"}, "bfloat16", "Conv1D.*gpt2"),
    ],
)
def test_models_that_no_reader_would_take_are_refused(config: dict[str, object], dtype: str, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        choose_weights(entries(LINEAR, dtype), config)


def test_the_config_names_the_modules_of_all_other_matrices() -> None:
    """But none that has a quantized module inside: transformers skips all below a name."""
    tensors = {**entries(LINEAR + KEPT), **entries(["model.norm.weight"], shape=(4,))}
    found = plan_config(tensors, LINEAR)["modules_to_not_convert"]
    assert found == [name.removesuffix(".weight") for name in KEPT[:-1]]


def test_a_block_at_the_end_may_be_smaller() -> None:
    assert count_blocks((576, 7168)) == (5, 56)
    assert count_blocks((1, 129)) == (1, 2)


def test_scales_that_do_not_fit_the_blocks_are_refused() -> None:
    tensors = {
        **entries(["a.weight"], "float8_e4m3fn", (256, 100)),
        **entries(["a.weight_scale_inv"], "float32", (2, 1)),
    }
    assert find_scaled(tensors, {}) == {"a.weight": (128, 128)}
    assert find_scaled(tensors, {}, ["a.*"]) == {}
    assert find_scaled(entries(["a.weight"], "float8_e4m3fn"), {}) == {}
    with pytest.raises(UnsupportedError, match=r"a\.weight .*\[2, 1\].*64 x 128"):
        find_scaled(tensors, {"quantization_config": {"weight_block_size": [64, 128]}})
