"""A GGUF file has the names, types, values and metadata that llama.cpp's own reader and quantization expect."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

import shardckpt
from shardckpt.encodings.codecs import DecodedStream
from shardckpt.errors import (
    FormatError,
    IncompleteError,
    PrecisionError,
    ShardckptError,
    TargetExistsError,
    UnsupportedError,
    UsageError,
)
from tests.kit.models.gguf_models import CONFIG, MORE, Model, build_model, by_pairs, open_file, rename, write_model

TYPES = {"fp32": "F32", "f16": "F16", "bf16": "BF16", "q8_0": "Q8_0"}
FILE_TYPES = {"fp32": 0, "f16": 1, "bf16": 32, "q8_0": 7}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama."""
    return write_model(tmp_path_factory.mktemp("models") / "llama", build_model())


def change_model(folder: Path, changes: Model | None = None, without: str = "", **config: Any) -> Path:
    """Write a llama with other tensors and another config."""
    model = {**build_model(), **(changes or {})}
    model.pop(without, None)
    return write_model(folder, model, **config)


def encode_expected(name: str, value: Any, dtype: str) -> bytes:
    quants = pytest.importorskip("gguf.quants")
    kind = "F32" if value.ndim == 1 else TYPES[dtype]
    return quants.quantize(value, getattr(pytest.importorskip("gguf").GGMLQuantizationType, kind)).tobytes()


class TestFiles:
    @pytest.mark.parametrize("dtype", TYPES)
    @pytest.mark.parametrize("kind", MORE)
    def test_every_tensor_has_its_name_type_and_bits(self, kind: str, dtype: str, tmp_path: Path) -> None:
        model = build_model(MORE[kind])
        src = write_model(tmp_path / "src", model, model_type=kind)
        shardckpt.convert(src, tmp_path / "out.gguf", dtype=dtype)
        found = {tensor.name: tensor for tensor in open_file(tmp_path / "out.gguf", tmp_path).tensors}
        assert set(found) == set(map(rename, model))
        for name, value in model.items():
            tensor = found[rename(name)]
            ordered = by_pairs(name, value) if kind in ("llama", "mistral") else value
            assert tuple(reversed(tensor.shape.tolist())) == value.shape, name
            assert tensor.tensor_type.name == ("F32" if value.ndim == 1 else TYPES[dtype])
            assert tensor.data.tobytes() == encode_expected(name, ordered, dtype), name
            assert tensor.data_offset % 32 == 0

    def test_the_names_are_those_of_llama_cpps_table(self) -> None:
        gguf = pytest.importorskip("gguf")
        for kind, arch in (("llama", "LLAMA"), ("qwen2", "QWEN2"), ("qwen3", "QWEN3")):
            table = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, arch), 2)
            for name in build_model(MORE[kind]):
                assert table.get_name(name, try_suffixes=(".weight", ".bias")) == rename(name)

    @pytest.mark.parametrize("dtype", TYPES)
    def test_the_metadata_are_the_hyperparameters(self, dtype: str, source: Path, tmp_path: Path) -> None:
        shardckpt.convert(source, tmp_path / "out.gguf", dtype=dtype)
        found = {key: field.contents() for key, field in open_file(tmp_path / "out.gguf", tmp_path).fields.items()}
        assert {key: value for key, value in found.items() if not key.startswith("GGUF.")} == {
            "general.architecture": "llama",
            "general.type": "model",
            "general.file_type": FILE_TYPES[dtype],
            "general.quantization_version": 2,
            "llama.block_count": 2,
            "llama.context_length": 128,
            "llama.embedding_length": 64,
            "llama.feed_forward_length": 96,
            "llama.attention.head_count": 4,
            "llama.attention.head_count_kv": 2,
            "llama.attention.key_length": 32,
            "llama.attention.value_length": 32,
            "llama.attention.layer_norm_rms_epsilon": pytest.approx(1e-5),
            "llama.rope.freq_base": 5e5,
            "llama.rope.dimension_count": 32,
            "llama.vocab_size": 40,
            "tokenizer.ggml.model": "none",
        }

    def test_a_config_of_an_older_release_is_understood(self, tmp_path: Path) -> None:
        older = {"rope_theta": 1e6, "rope_scaling": {"type": "linear", "factor": 2}, "num_key_value_heads": None}
        config = {**CONFIG, **older, "rms_norm_eps": 1}
        del config["rope_parameters"], config["head_dim"]
        model = build_model()
        wide = {name: value[:64] if name.endswith("q_proj.weight") else value for name, value in model.items()}
        wide = {name: value[:, :64] if name.endswith("o_proj.weight") else value for name, value in wide.items()}
        src = write_model(tmp_path / "src", {name: value.copy() for name, value in wide.items()})
        (src / "config.json").write_text(json.dumps(config))
        shardckpt.convert(src, tmp_path / "out.gguf")
        fields = open_file(tmp_path / "out.gguf", tmp_path).fields
        expected = {"freq_base": 1e6, "scaling.type": "linear", "scaling.factor": 2.0, "dimension_count": 16}
        assert {key: fields[f"llama.rope.{key}"].contents() for key in expected} == expected
        assert fields["llama.attention.head_count_kv"].contents() == 4

    def test_long_contexts_of_llama_3_and_yarn_are_kept(self, tmp_path: Path) -> None:
        llama3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0}
        llama3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 64}
        src = change_model(tmp_path / "llama3", rope_parameters=llama3)
        shardckpt.convert(src, tmp_path / "a.gguf", dtype="f16")
        [factors] = [t.data for t in open_file(tmp_path / "a.gguf", tmp_path).tensors if t.name == "rope_freqs.weight"]
        waves = 2 * np.pi * 5e5 ** (np.arange(0, 32, 2) / 32)
        smooth = (64 / waves - 1) / 3
        ramp = 1 / ((1 - smooth) / 8 + smooth)
        np.testing.assert_allclose(factors, np.where(waves < 16, 1, np.where(waves > 64, 8, ramp)), rtol=1e-6)
        assert len({*factors.tolist()}) > 2, "there is a frequency on the ramp"
        yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "beta_fast": 30.0}
        shardckpt.convert(change_model(tmp_path / "yarn", rope_parameters=yarn), tmp_path / "b.gguf")
        fields = open_file(tmp_path / "b.gguf", tmp_path).fields
        expected = {"type": "yarn", "factor": 4.0, "original_context_length": 128, "yarn_beta_fast": 30.0}
        assert {key: fields[f"llama.rope.scaling.{key}"].contents() for key in expected} == expected

    @pytest.mark.parametrize("is_stored_twice", [True, False])
    def test_a_tied_output_is_not_written(self, is_stored_twice: bool, tmp_path: Path) -> None:
        embedding = build_model()["model.embed_tokens.weight"]
        src = change_model(
            tmp_path / "src",
            {"lm_head.weight": embedding} if is_stored_twice else {},
            "" if is_stored_twice else "lm_head.weight",
            tie_word_embeddings=True,
        )
        shardckpt.convert(src, tmp_path / "out.gguf")
        names = {tensor.name for tensor in open_file(tmp_path / "out.gguf", tmp_path).tensors}
        assert "token_embd.weight" in names
        assert "output.weight" not in names

    def test_tensors_that_are_kept_stay_in_their_type(self, source: Path, tmp_path: Path) -> None:
        report = shardckpt.convert(source, tmp_path / "out.gguf", dtype="q8_0", keep_fp32=["*embed*", "lm_head*"])
        types = {t.name: t.tensor_type.name for t in open_file(tmp_path / "out.gguf", tmp_path).tensors}
        assert {types["token_embd.weight"], types["output.weight"]} == {"F32"}
        assert types["blk.0.attn_q.weight"] == "Q8_0"
        assert report.cast == {"float32 -> q8_0": 14}

    def test_norms_in_half_types_are_written_in_float32(self, tmp_path: Path) -> None:
        halves = {name: value.astype(ml_dtypes.bfloat16) for name, value in build_model().items()}
        report = shardckpt.convert(write_model(tmp_path / "src", halves), tmp_path / "out.gguf")
        assert report.cast == {"bfloat16 -> float32": 5}
        assert report.nbytes == sum(v.size * (4 if v.ndim == 1 else 2) for v in halves.values())

    def test_buffers_that_llama_cpp_computes_are_left_out(self, tmp_path: Path) -> None:
        buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(16, np.float32)}
        report = shardckpt.convert(change_model(tmp_path / "src", buffer), tmp_path / "out.gguf")
        assert report.tensor_count == len(build_model())


class TestSources:
    @pytest.mark.parametrize("dtype", ["bf16", "q8_0"])
    def test_every_split_of_a_source_gives_the_same_file(self, dtype: str, source: Path, tmp_path: Path) -> None:
        shardckpt.convert(source, tmp_path / "expected.gguf", dtype=dtype)
        expected = (tmp_path / "expected.gguf").read_bytes()
        for to in ("native", "dcp", "torch"):
            shardckpt.reshard(source, tmp_path / to, world_size=3, to=to)
            shardckpt.convert(tmp_path / to, tmp_path / f"{to}.gguf", dtype=dtype, config_from=source)
            assert (tmp_path / f"{to}.gguf").read_bytes() == expected, to

    @pytest.mark.parametrize("options", [{"jobs": 1}, {"jobs": 4}, {"jobs": 4, "max_memory": "24MiB"}])
    def test_batches_and_threads_do_not_change_the_file(self, options: dict[str, Any], tmp_path: Path) -> None:
        """With the least memory a batch has 64 KiB: heads and rows are split, the rows at full blocks."""
        wide = {"hidden_size": 20_000, "num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 1}
        sizes = {"head_dim": 4, "intermediate_size": 32, "vocab_size": 4}
        rng = np.random.default_rng(1)
        shapes = {
            **dict.fromkeys(("model.embed_tokens", "lm_head"), (4, 20_000)),
            "model.norm": (20_000,),
            **dict.fromkeys(("model.layers.0.input_layernorm", "model.layers.0.post_attention_layernorm"), (20_000,)),
            "model.layers.0.self_attn.q_proj": (8, 20_000),
            **dict.fromkeys(("model.layers.0.self_attn.k_proj", "model.layers.0.self_attn.v_proj"), (4, 20_000)),
            "model.layers.0.self_attn.o_proj": (20_000, 8),
            **dict.fromkeys(("model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj"), (32, 20_000)),
            "model.layers.0.mlp.down_proj": (20_000, 32),
        }
        model = {f"{name}.weight": rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
        src = write_model(tmp_path / "src", model, **wide, **sizes)
        kept = {"dtype": "q8_0", "keep_fp32": "*o_proj*"}
        shardckpt.convert(src, tmp_path / "out.gguf", **kept, **options)
        found = {t.name: t.data.tobytes() for t in open_file(tmp_path / "out.gguf", tmp_path).tensors}
        q = model["model.layers.0.self_attn.q_proj.weight"].reshape(2, 2, 2, 20_000).swapaxes(1, 2).reshape(8, 20_000)
        assert found["blk.0.attn_q.weight"] == encode_expected("q", q, "q8_0")
        up = model["model.layers.0.mlp.up_proj.weight"]
        assert found["blk.0.ffn_up.weight"] == encode_expected("up", up, "q8_0")

    def test_rows_of_a_compressed_source_are_decoded_once_a_batch(
        self, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        torch.save({name: torch.from_numpy(value) for name, value in build_model().items()}, tmp_path / "plain.pt")
        with (
            zipfile.ZipFile(tmp_path / "plain.pt") as plain,
            zipfile.ZipFile(tmp_path / "model.pt", "w", zipfile.ZIP_DEFLATED) as packed,
        ):
            for name in plain.namelist():
                packed.writestr(name, plain.read(name))
        starts: list[int] = []
        restart = DecodedStream._restart
        monkeypatch.setattr(DecodedStream, "_restart", lambda self: (starts.append(1), restart(self))[1])
        shardckpt.convert(tmp_path / "model.pt", tmp_path / "out.gguf", config_from=source)
        assert len(starts) == len(build_model()), "each tensor of this size is one batch"
        shardckpt.convert(source, tmp_path / "expected.gguf")
        assert (tmp_path / "out.gguf").read_bytes() == (tmp_path / "expected.gguf").read_bytes()

    def test_an_optimizer_beside_the_model_is_left_out(self, source: Path, tmp_path: Path) -> None:
        model = {name: torch.from_numpy(value) for name, value in build_model().items()}
        slots = {name: {"exp_avg": value * 2} for name, value in model.items()}
        state = {"state": slots, "param_groups": [{"params": [*model]}]}
        torch.save({"model": model, "optimizer": state}, tmp_path / "last.pt")
        report = shardckpt.convert(tmp_path / "last.pt", tmp_path / "out.gguf", config_from=source)
        assert report.left_out == ("optimizer",)
        shardckpt.convert(source, tmp_path / "expected.gguf")
        assert (tmp_path / "out.gguf").read_bytes() == (tmp_path / "expected.gguf").read_bytes()

    def test_a_merged_adapter_is_quantized_in_the_same_pass(self, source: Path, tmp_path: Path) -> None:
        name, rng = "base_model.model.model.layers.1.self_attn.q_proj", np.random.default_rng(5)
        a, b = rng.standard_normal((2, 64)), rng.standard_normal((128, 2))
        factors = {f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}
        (tmp_path / "adapter").mkdir()
        save_file({k: v.astype(np.float32) for k, v in factors.items()}, tmp_path / "adapter/adapter_model.safetensors")
        (tmp_path / "adapter/adapter_config.json").write_text('{"peft_type": "LORA", "r": 2, "lora_alpha": 2}')
        merge = (source, tmp_path / "adapter")
        shardckpt.merge_adapter(*merge, tmp_path / "merged")
        shardckpt.convert(tmp_path / "merged", tmp_path / "expected.gguf", dtype="q8_0")
        shardckpt.merge_adapter(*merge, tmp_path / "out.gguf", dtype="q8_0")
        assert (tmp_path / "out.gguf").read_bytes() == (tmp_path / "expected.gguf").read_bytes()


REFUSED: dict[str, tuple[dict[str, Any], type[ShardckptError], str]] = {
    "an unknown architecture": (
        {"model_type": "gpt2"},
        UnsupportedError,
        "not written as GGUF; found gpt2; expected llama, mistral, qwen2, qwen3",
    ),
    "no architecture": ({"model_type": None}, UnsupportedError, "this model_type is not written as GGUF"),
    "a number that is missing": (
        {"rms_norm_eps": None},
        FormatError,
        "rms_norm_eps must be a positive number; found nothing",
    ),
    "a number that is text": (
        {"vocab_size": "40"},
        FormatError,
        "vocab_size must be a positive 32-bit integer; found 40",
    ),
    "another activation": (
        {"hidden_act": "gelu"},
        UnsupportedError,
        "this model's hidden_act.*found gelu; expected silu",
    ),
    "rotation of a part": (
        {"rope_parameters": {"partial_rotary_factor": 0.5}},
        UnsupportedError,
        "this model's partial_rotary_factor",
    ),
    "another rotation": (
        {"rope_parameters": {"rope_type": "longrope"}},
        UnsupportedError,
        "found longrope; expected de",
    ),
    "rotations by layer": (
        {"rope_parameters": {"full_attention": {"rope_theta": 1.0}}},
        UnsupportedError,
        "layers with different rotary embeddings",
    ),
    "a rotation that is text": ({"rope_parameters": "default"}, FormatError, "rope_parameters must be an object"),
    "heads of another size": (
        {"head_dim": 16},
        UnsupportedError,
        r"q_proj.weight does not fit config.json; found \(128, 64\); expected \(64, 64\)",
    ),
    "more layers": (
        {"num_hidden_layers": 3},
        IncompleteError,
        "found no model.layers.2.input_layernorm.weight, and 8 more",
    ),
    "fewer layers": (
        {"num_hidden_layers": 1},
        UnsupportedError,
        "no such tensor; found model.layers.1.input_layernorm",
    ),
    "a number beyond GGUF's": ({"max_position_embeddings": 1 << 40}, FormatError, "must be a positive 32-bit integer"),
    "a number beyond all": ({"rms_norm_eps": 10**400}, FormatError, "rms_norm_eps must be a positive number"),
    "a billion layers": ({"num_hidden_layers": 1 << 30}, IncompleteError, "found no model.layers.2.input_layernorm"),
    "a billion tokens": ({"vocab_size": 1 << 30}, UnsupportedError, r"embed_tokens.weight does not fit.*\(40, 64\)"),
    "a head of a billion": (
        {"head_dim": 1 << 30, "rope_parameters": {"rope_type": "llama3", "factor": 8}},
        UnsupportedError,
        "q_proj.weight does not fit",
    ),
    "a scale that is missing": (
        {"rope_parameters": {"rope_type": "llama3", "factor": 8}},
        FormatError,
        "low_freq_factor must be a positive number; found nothing",
    ),
}


class TestRefusals:
    @pytest.mark.parametrize("case", REFUSED)
    def test_a_config_that_does_not_fit_is_refused(self, case: str, tmp_path: Path) -> None:
        config, error, message = REFUSED[case]
        src = change_model(tmp_path / "src", **config)
        with pytest.raises(error, match=message):
            shardckpt.convert(src, tmp_path / "out.gguf")
        assert [path.name for path in tmp_path.iterdir()] == ["src"]

    @pytest.mark.parametrize(
        ("changes", "without", "error", "message"),
        [
            ({}, "lm_head.weight", IncompleteError, "a tensor of the llama architecture is missing.*lm_head.weight"),
            ({}, "model.norm.weight", IncompleteError, "a tensor of the llama architecture is missing.*model.norm"),
            ({"model.extra": np.ones(2, np.float32)}, "", UnsupportedError, "llama, the architecture.*model.extra"),
            ({"model.norm.weight": np.ones(64, np.int64)}, "", UsageError, "model.norm.weight, of type int64"),
            ({"model.norm.weight": np.ones(60, np.float32)}, "", UnsupportedError, r"found \(60,\); expected \(64,\)"),
        ],
    )
    def test_tensors_that_do_not_fit_are_named(
        self, changes: Model, without: str, error: type[ShardckptError], message: str, tmp_path: Path
    ) -> None:
        src = change_model(tmp_path / "src", changes, without)
        with pytest.raises(error, match=message):
            shardckpt.convert(src, tmp_path / "out.gguf", dtype="bf16")
        assert not (tmp_path / "out.gguf").exists()

    def test_a_source_without_config_says_what_to_give(self, source: Path, tmp_path: Path) -> None:
        shardckpt.convert(source, tmp_path / "a" / "step-1", to="dcp")
        (tmp_path / "a" / "step-1" / "config.json").unlink()
        with pytest.raises(UsageError, match=r"no config.json was found next to.*--config-from FOLDER"):
            shardckpt.convert(tmp_path / "a" / "step-1", tmp_path / "out.gguf")

    @pytest.mark.parametrize(
        ("name", "options", "message"),
        [
            ("out", {"to": "gguf"}, "a GGUF checkpoint is one file; found .*out.*End its name in .gguf"),
            ("out.gguf", {"part": "all"}, "GGUF holds no optimizer; found --part all"),
            ("out", {"dtype": "q8_0"}, "--dtype q8_0 is a GGUF type; found --to safetensors; expected --to gguf"),
            ("out", {"dtype": "q8_0", "to": "native"}, "--dtype q8_0 is a GGUF type; found --to native"),
            ("out.gguf", {"dtype": "q4_0"}, "--dtype 'q4_0' is not a float type to cast to"),
        ],
    )
    def test_options_that_do_not_fit_are_refused_before_the_source_is_read(
        self, name: str, options: dict[str, Any], message: str, source: Path, tmp_path: Path
    ) -> None:
        with pytest.raises(UsageError, match=message):
            shardckpt.convert(source, tmp_path / name, **options)

    def test_rows_that_are_not_full_blocks_are_refused(self, tmp_path: Path) -> None:
        narrow = {"model.layers.0.mlp.down_proj.weight": np.ones((64, 90), np.float32)}
        narrow |= {
            f"model.layers.{n}.mlp.{k}.weight": np.ones((90, 64), np.float32)
            for n in (0, 1)
            for k in ("up_proj", "gate_proj")
        }
        narrow["model.layers.1.mlp.down_proj.weight"] = np.ones((64, 90), np.float32)
        src = change_model(tmp_path / "src", narrow, intermediate_size=90)
        with pytest.raises(
            UsageError, match=r"layers.0.mlp.down_proj.weight has others; found rows of 90.*multiple of 32"
        ):
            shardckpt.convert(src, tmp_path / "out.gguf", dtype="q8_0")
        shardckpt.convert(src, tmp_path / "out.gguf", dtype="q8_0", keep_fp32="*down_proj*")

    def test_values_that_cannot_be_quantized_are_refused_and_nothing_is_left(self, tmp_path: Path) -> None:
        infinite = build_model()["lm_head.weight"]
        infinite[3, 5] = np.inf
        src = change_model(tmp_path / "src", {"lm_head.weight": infinite})
        with pytest.raises(PrecisionError, match=r"'lm_head.weight' is beyond the range of q8_0; found inf"):
            shardckpt.convert(src, tmp_path / "out.gguf", dtype="q8_0")
        assert [path.name for path in tmp_path.iterdir()] == ["src"]

    def test_an_adapter_alone_is_refused(self, source: Path, tmp_path: Path) -> None:
        save_file(
            {"base_model.model.a.lora_A.weight": np.ones((2, 2), np.float32)}, tmp_path / "adapter_model.safetensors"
        )
        (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 2, "lora_alpha": 2}')
        with pytest.raises(UsageError, match=r"an adapter alone.*merge-adapter"):
            shardckpt.convert(tmp_path, tmp_path.parent / "out.gguf", config_from=source)

    def test_only_a_gguf_file_is_replaced(self, source: Path, tmp_path: Path) -> None:
        out = tmp_path / "out.gguf"
        for _ in range(2):
            shardckpt.convert(source, out, overwrite=True)
        out.write_bytes(b"my notes")
        with pytest.raises(TargetExistsError, match="another file"):
            shardckpt.convert(source, out, overwrite=True)

    @pytest.mark.parametrize(
        ("config", "context"),
        [
            ({"model_type": "mistral", "sliding_window": 64}, 64),
            ({"model_type": "mistral", "sliding_window": 64, "layer_types": ["sliding_attention"] * 2}, 64),
            ({"model_type": "mistral", "sliding_window": 64, "layer_types": ["full_attention"] * 2}, 128),
            ({"model_type": "mistral", "sliding_window": 128}, 128),
            ({"model_type": "mistral", "sliding_window": None}, 128),
            ({"model_type": "llama", "sliding_window": 64}, 128),
            ({"model_type": "qwen2", "sliding_window": 64, "use_sliding_window": True}, 64),
            ({"model_type": "qwen2", "sliding_window": 64}, 128),
        ],
    )
    def test_the_context_ends_where_a_window_of_attention_would_begin_to_matter(
        self, config: dict[str, Any], context: int, tmp_path: Path
    ) -> None:
        src = write_model(tmp_path / "src", build_model(MORE[config["model_type"]]), **config)
        report = shardckpt.convert(src, tmp_path / "out.gguf")
        name = "llama" if config["model_type"] == "mistral" else config["model_type"]
        assert open_file(tmp_path / "out.gguf", tmp_path).fields[f"{name}.context_length"].contents() == context
        assert any("sliding_window, 64, not 128" in line for line in report.warnings) == (context == 64)
