"""The files of each rank are those that vLLM's own loader takes; other models are refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import shardckpt
from shardckpt.errors import IncompleteError, ShardckptError, UnsupportedError, UsageError
from tests.kit.models import gguf_models, vllm_models
from tests.kit.runs.command import run_here

BIASED = {
    **gguf_models.BIASES,
    "self_attn.o_proj.bias": (64,),
    "mlp.gate_proj.bias": (96,),
    "mlp.up_proj.bias": (96,),
    "mlp.down_proj.bias": (64,),
}
MODELS: dict[str, tuple[dict[str, tuple[int, ...]], dict[str, Any]]] = {
    "llama": ({}, {}),
    "llama with biases": (BIASED, {"attention_bias": True, "mlp_bias": True}),
    "mistral": ({}, {"architectures": ["MistralForCausalLM"]}),
    "qwen2": (vllm_models.QWEN2, {"architectures": ["Qwen2ForCausalLM"], "head_dim": 16}),
    "qwen3": (dict(gguf_models.MORE["qwen3"]), {"architectures": ["Qwen3ForCausalLM"]}),
}


def write(folder: Path, model: gguf_models.Model, **config: Any) -> Path:
    return gguf_models.write_model(folder, model, **{**vllm_models.CONFIG, **config})


def assert_ranks(out: Path, model: gguf_models.Model, tp: int, *, is_tied: bool = False) -> None:
    ranks = vllm_models.read_ranks(out)
    assert sorted(ranks) == list(range(tp))
    for rank, found in ranks.items():
        expected = vllm_models.build_rank(model, rank, tp, is_tied=is_tied)
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            np.testing.assert_array_equal(found[name], value, err_msg=f"{name} of rank {rank}", strict=True)


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_each_rank_gets_its_heads_rows_and_columns(name: str, tp: int, tmp_path: Path) -> None:
    """With 4 ranks two share a head of key and value, and the last has padding alone in its embedding."""
    more, config = MODELS[name]
    model = gguf_models.build_model(more)
    report = shardckpt.consolidate(write(tmp_path / "src", model, **config), tmp_path / "out", to="vllm-sharded", tp=tp)
    assert_ranks(tmp_path / "out", model, tp)
    assert [file.name for file in report.files] == [f"model-rank-{rank}-part-0.safetensors" for rank in range(tp)]
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {**vllm_models.CONFIG, **config}


def test_the_command_writes_the_files_of_ranks(tmp_path: Path) -> None:
    src = write(tmp_path / "src", gguf_models.build_model())
    done = run_here("convert", src, tmp_path / "out", "--to", "vllm-sharded", "--tp", 2)
    assert "  and config.json" in done.out.splitlines()
    assert sorted(vllm_models.read_ranks(tmp_path / "out")) == [0, 1]


def test_a_folder_for_vllm_is_named_and_replaced_but_not_read(tmp_path: Path) -> None:
    src = write(tmp_path / "src", gguf_models.build_model())
    for _ in range(2):
        shardckpt.consolidate(src, tmp_path / "out", to="vllm-sharded", tp=2, overwrite=True)
    with pytest.raises(UnsupportedError, match=r"for vLLM's sharded_state loader.*vllm serve"):
        shardckpt.inspect(tmp_path / "out")
    done = run_here("verify", tmp_path / "out")
    assert (done.code, "for vLLM's sharded_state loader" in done.out + done.err) == (1, True)


def test_what_has_to_be_done_before_is_in_the_message(tmp_path: Path) -> None:
    src = write(tmp_path / "src", gguf_models.build_model())
    shardckpt.convert(src, tmp_path / "fp8", quantize="fp8-block")
    for options, message in (
        ({}, r"quantization_config. Dequantize fp8 weights first: shardckpt convert SRC PLAIN --dtype bf16"),
        ({"dtype": "bf16"}, r"First write a safetensors folder.*convert THAT DST --to vllm-sharded --tp 2"),
    ):
        with pytest.raises(ShardckptError, match=message):
            shardckpt.convert(tmp_path / "fp8", tmp_path / "out", to="vllm-sharded", tp=2, **options)
    shardckpt.convert(tmp_path / "fp8", tmp_path / "plain", dtype="bf16")
    shardckpt.convert(tmp_path / "plain", tmp_path / "out", to="vllm-sharded", tp=2)
    assert sorted(vllm_models.read_ranks(tmp_path / "out")) == [0, 1]


def test_help_names_the_format_where_it_can_be_written() -> None:
    found = {verb: "".join(run_here(verb, "--help").out.split()) for verb in ("convert", "merge-adapter")}
    assert {verb: "vllm-sharded.Default" in text for verb, text in found.items()} == {
        "convert": True,
        "merge-adapter": False,
    }


def test_a_tied_weight_has_the_name_that_vllm_keeps(tmp_path: Path) -> None:
    model = gguf_models.build_model()
    del model["lm_head.weight"]
    src = write(tmp_path / "src", model, tie_word_embeddings=True)
    shardckpt.consolidate(src, tmp_path / "out", to="vllm-sharded", tp=2)
    assert_ranks(tmp_path / "out", model, 2, is_tied=True)


def test_parts_are_split_by_size_and_cast(tmp_path: Path) -> None:
    model = gguf_models.build_model()
    src = write(tmp_path / "src", model)
    shardckpt.consolidate(src, tmp_path / "out", to="vllm-sharded", tp=2, max_shard_size="20KB", dtype="fp16", jobs=3)
    assert len(list((tmp_path / "out").glob("model-rank-1-part-*.safetensors"))) > 2
    ranks = vllm_models.read_ranks(tmp_path / "out")
    for rank in (0, 1):
        for name, value in vllm_models.build_rank(model, rank, 2).items():
            is_scale = name.endswith("_scale")
            expected = value if is_scale else value.astype(np.float16)
            np.testing.assert_array_equal(ranks[rank][name], expected, strict=True)


def test_shards_of_a_training_run_are_written_with_the_config_of_the_base(tmp_path: Path) -> None:
    model = gguf_models.build_model()
    base = write(tmp_path / "base", model)
    shardckpt.reshard(base, tmp_path / "run", to="dcp", world_size=3)
    shardckpt.consolidate(tmp_path / "run", tmp_path / "out", to="vllm-sharded", tp=2, config_from=base)
    assert_ranks(tmp_path / "out", model, 2)


@pytest.mark.parametrize(
    ("config", "options", "error", "message"),
    [
        (
            {"architectures": ["MixtralForCausalLM"]},
            {},
            UnsupportedError,
            r"MixtralForCausalLM.*expected LlamaFor.*Qwen3",
        ),
        ({"architectures": None}, {}, UnsupportedError, "found architectures None; expected LlamaForCausalLM"),
        ({"quantization_config": {}}, {}, UnsupportedError, "quantized weights"),
        ({"num_hidden_layers": 3}, {}, IncompleteError, r"layers\.2\..*does not hold"),
        ({"num_hidden_layers": 1}, {}, UnsupportedError, r"layers\.1\..*no parameter.*--exclude"),
        (
            {"architectures": ["Qwen2ForCausalLM"]},
            {},
            UnsupportedError,
            r"q_proj\.weight.*\[128, 64\]; expected \[64, 64\]",
        ),
        ({"attention_bias": True}, {}, IncompleteError, r"q_proj\.bias"),
        ({"vocab_size": 41}, {}, UnsupportedError, r"shape that vLLM takes.*\[41, 64\]"),
        ({"num_attention_heads": "4"}, {}, UnsupportedError, "num_attention_heads.*positive number"),
        ({"intermediate_size": 98}, {}, UnsupportedError, r"gate_proj.*\[96, 64\]; expected \[98, 64\]"),
        ({"num_key_value_heads": None}, {}, UnsupportedError, r"k_proj.*\[64, 64\]; expected \[128, 64\]"),
        ({}, {"tp": 8}, UsageError, "--tp 8 must divide the number of attention heads; found 4"),
        ({}, {"tp": 3}, UsageError, "--tp 3 must divide the padded vocabulary; found 64"),
        ({}, {"tp": 0}, UsageError, "--tp N"),
        ({}, {"to": "dcp"}, UsageError, "--to vllm-sharded"),
        ({}, {"part": "all"}, UsageError, "--part model"),
        ({}, {"dtype": "bf16", "keep_fp32": "*q_proj*"}, UsageError, "qkv_proj.*several types.*bfloat16, float32"),
        ({}, {"quantize": "fp8-block"}, UsageError, "safetensors folder"),
    ],
)
def test_models_and_calls_that_vllm_would_not_take_are_refused(
    config: dict[str, Any], options: dict[str, Any], error: type[ShardckptError], message: str, tmp_path: Path
) -> None:
    src = write(tmp_path / "src", gguf_models.build_model(), **config)
    with pytest.raises(error, match=message):
        shardckpt.consolidate(src, tmp_path / "out", **{"to": "vllm-sharded", "tp": 2, **options})
    assert not (tmp_path / "out").exists()


def test_ranks_must_share_heads_of_key_and_value_evenly(tmp_path: Path) -> None:
    model = gguf_models.build_model()
    for name in [name for name in model if "k_proj" in name or "v_proj" in name]:
        model[name] = np.concatenate([model[name], model[name][:32]])
    src = write(tmp_path / "src", model, num_key_value_heads=3)
    with pytest.raises(UsageError, match="number of key and value heads; found 3"):
        shardckpt.consolidate(src, tmp_path / "out", to="vllm-sharded", tp=2)


def test_a_model_without_config_and_an_unfinished_sum_are_refused(tmp_path: Path) -> None:
    src = write(tmp_path / "src", gguf_models.build_model())
    shardckpt.convert(src, tmp_path / "fp8", quantize="fp8-block")
    with pytest.raises(UsageError, match="computed and split at once"):
        shardckpt.convert(tmp_path / "fp8", tmp_path / "out", to="vllm-sharded", tp=2, dtype="bf16")
    (src / "config.json").unlink()
    with pytest.raises(UsageError, match="--config-from"):
        shardckpt.convert(src, tmp_path / "out", to="vllm-sharded", tp=2)


def test_buffers_that_vllm_computes_are_passed_over(tmp_path: Path) -> None:
    model = gguf_models.build_model()
    src = write(tmp_path / "src", model)
    save_file(
        {**model, "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)}, src / "model.safetensors"
    )
    shardckpt.convert(src, tmp_path / "out", to="vllm-sharded", tp=2)
    assert_ranks(tmp_path / "out", model, 2)
