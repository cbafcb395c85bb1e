"""Which tensors belong to weights that are stored quantized, by names, dtypes and shapes."""

from __future__ import annotations

import pytest

from shardckpt.manifest import TensorEntry
from shardckpt.plan.quantized_weights import find_quantized, list_uncast

Stored = dict[str, tuple[str, tuple[int, ...]]]


def entries(stored: Stored) -> dict[str, TensorEntry]:
    return {name: TensorEntry((name,), shape, dtype, ()) for name, (dtype, shape) in stored.items()}


BITSANDBYTES: Stored = {
    "a.q.weight": ("uint8", (32, 1)),
    "a.q.weight.absmax": ("uint8", (1,)),
    "a.q.weight.nested_absmax": ("float32", (1,)),
    "a.q.weight.nested_quant_map": ("float32", (256,)),
    "a.q.weight.quant_map": ("float32", (16,)),
    "a.q.weight.quant_state.bitsandbytes__nf4": ("uint8", (80,)),
    "a.q.bias": ("float32", (8,)),
}
IN_FLOATS: Stored = {**BITSANDBYTES, "a.q.weight": ("bfloat16", (16, 1))}
EIGHT_BITS: Stored = {"a.q.weight": ("int8", (8, 8)), "a.q.SCB": ("float32", (8,)), "a.q.bias": ("float16", (8,))}
GPTQ: Stored = {
    "a.q.qweight": ("int32", (1, 8)),
    "a.q.qzeros": ("int32", (1, 1)),
    "a.q.scales": ("float16", (1, 8)),
    "a.q.g_idx": ("int32", (8,)),
    "a.q.bias": ("float16", (8,)),
}
FP8_ROWS: Stored = {
    "a.q.weight": ("float8_e4m3fn", (8, 8)),
    "a.q.weight_scale": ("float32", (8, 1)),
    "a.q.input_scale": ("float32", ()),
    "a.k_scale": ("float32", ()),
}
FP8_BLOCKS: Stored = {"a.q.weight": ("float8_e4m3fn", (8, 8)), "a.q.weight_scale_inv": ("float32", (1, 1))}
PACKED: Stored = {
    "a.q.weight_packed": ("int32", (8, 1)),
    "a.q.weight_scale": ("bfloat16", (8, 1)),
    "a.q.weight_shape": ("int64", (2,)),
    "a.q.weight_zero_point": ("float32", (8, 1)),
}
EXPERTS: Stored = {"a.up": ("float8_e4m3fn", (2, 8, 8)), "a.up_scale_inv": ("float32", (2, 1, 1))}


@pytest.mark.parametrize(
    ("stored", "cast"),
    [
        (BITSANDBYTES, {"a.q.bias"}),
        (IN_FLOATS, {"a.q.bias"}),
        (EIGHT_BITS, {"a.q.bias"}),
        (GPTQ, {"a.q.bias"}),
        (FP8_ROWS, set()),
        (FP8_BLOCKS, set()),
        (PACKED, set()),
        (EXPERTS, set()),
    ],
    ids=["nf4", "nf4-in-floats", "int8", "gptq", "fp8-rows", "fp8-blocks", "compressed-tensors", "experts"],
)
def test_all_floats_of_a_quantized_module_but_its_bias_stay(stored: Stored, cast: set[str]) -> None:
    others: Stored = {"norm.weight": ("float32", (8,)), "a.r.weight": ("float32", (8, 8))}
    floats = {name for name, (dtype, _) in {**stored, **others}.items() if dtype in ("float32", "float16", "bfloat16")}
    assert list_uncast(entries({**stored, **others}), {}) == floats - cast - others.keys()


def test_a_scale_is_one_of_a_quantized_model_alone() -> None:
    floats = entries({"norm.scale": ("float32", (8,)), "logit_scale": ("float32", ()), "a.weight": ("float32", (8, 8))})
    assert list_uncast(floats, {}) == set()
    assert list_uncast(floats, {"quantization_config": {"quant_method": "fp8"}}) == {"norm.scale", "logit_scale"}


def test_counters_indices_and_masks_do_not_make_a_module_quantized() -> None:
    buffers: Stored = {
        "bn.num_batches_tracked": ("int64", ()),
        "bn.running_mean": ("float32", (8,)),
        "swin.relative_position_index": ("int64", (4, 4)),
        "swin.relative_position_bias_table": ("float32", (4, 4)),
        "ema.num_updates": ("int32", ()),
        "ema.decay": ("float32", ()),
        "attn.mask": ("bool", (4, 4)),
        "attn.gamma": ("float32", (4,)),
    }
    assert find_quantized(entries(buffers)) == {}
    assert list_uncast(entries(buffers), {}) == set()
