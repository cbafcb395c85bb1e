"""Config and tokenizer files travel with the model, and a cast changes what the config says of types."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import shardckpt
from shardckpt.errors import FormatError, UsageError
from shardckpt.offline.select.config_files import with_dtype

CONFIG = {"model_type": "llama", "dtype": "float32", "tie_word_embeddings": False}
FILES = {
    "config.json": json.dumps(CONFIG),
    "generation_config.json": "{}",
    "tokenizer.json": "{}",
    "tokenizer_config.json": "{}",
    "special_tokens_map.json": "{}",
    "merges.txt": "a b",
    "vocab.json": "{}",
    "chat_template.jinja": "x",
}


def source(folder: Path, files: dict[str, str] | None = None) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    save_file({"w": torch.ones(3)}, folder / "model.safetensors")
    beside(folder, files or {})
    return str(folder)


def beside(folder: Path, files: dict[str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)


def carried(src: str, out: Path, **options: object) -> dict[str, str]:
    shardckpt.consolidate(src, str(out), **options)
    return {p.name: p.read_text() for p in out.iterdir() if p.suffix != ".safetensors"}


def test_config_files_beside_the_source_are_copied_unchanged(tmp_path: Path) -> None:
    src = source(tmp_path / "src", {**FILES, "training_args.bin": "no", "README.md": "no", "optimizer.json": "no"})
    assert carried(src, tmp_path / "out") == FILES


@pytest.mark.parametrize(
    "name",
    [
        "spm.model",  # DeBERTa
        "source.spm",  # Marian
        "tekken.json",  # Mistral
        "qwen.tiktoken",
        "bpe.codes",
        "vocab-src.json",
        "entity_vocab.json",
        "normalizer.json",
        "video_preprocessor_config.json",
        "audio_tokenizer_config.json",
    ],
)
def test_files_that_only_some_tokenizers_and_processors_have_are_copied(name: str, tmp_path: Path) -> None:
    assert carried(source(tmp_path / "src", {name: "x"}), tmp_path / "out") == {name: "x"}


def test_another_folder_may_be_named(tmp_path: Path) -> None:
    beside(tmp_path / "config", FILES)
    src = source(tmp_path / "src", {"config.json": '{"model_type": "other"}'})
    assert carried(src, tmp_path / "out", config_from=str(tmp_path / "config")) == FILES


def test_the_folder_above_counts_where_it_holds_a_models_config(tmp_path: Path) -> None:
    """A trainer writes `checkpoint-10/pytorch_model_fsdp_0` below the config."""
    beside(tmp_path / "run", FILES)
    assert carried(source(tmp_path / "run" / "step"), tmp_path / "out") == FILES
    beside(tmp_path / "other", {"config.json": '{"project": "mine"}'})
    assert carried(source(tmp_path / "other" / "step"), tmp_path / "out2") == {}


def test_a_single_file_carries_nothing(tmp_path: Path) -> None:
    src = source(tmp_path / "src", FILES)
    shardckpt.consolidate(src, str(tmp_path / "one.safetensors"))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["one.safetensors", "src"]


@pytest.mark.parametrize("kind", ["missing", "file", "empty"])
def test_a_config_folder_that_is_none_is_refused(kind: str, tmp_path: Path) -> None:
    if kind == "file":
        (tmp_path / "config").write_text("x")
    elif kind == "empty":
        (tmp_path / "config").mkdir()
    with pytest.raises(UsageError, match="--config-from"):
        shardckpt.consolidate(source(tmp_path / "src"), str(tmp_path / "out"), config_from=str(tmp_path / "config"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("text", ["[]", "{", '{"a": NaN}', "\udc80"])
def test_a_config_that_is_not_a_json_object_is_refused(text: str, tmp_path: Path) -> None:
    src = source(tmp_path / "src")
    (tmp_path / "src" / "config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(FormatError, match=r"config\.json"):
        shardckpt.consolidate(src, str(tmp_path / "out"))


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_after_a_cast_the_config_names_the_new_type(key: str, tmp_path: Path) -> None:
    """Else from_pretrained would cast the weights back."""
    config = {
        key: "float32",
        "text_config": {key: "float16"},
        "vision": {key: "float32"},
        "quantized": {"dtype": "int8"},
    }
    src = source(tmp_path / "src", {"config.json": json.dumps(config)})
    found = json.loads(carried(src, tmp_path / "out", dtype="bf16")["config.json"])
    assert found == {**config, key: "bfloat16", "text_config": {key: "bfloat16"}}
    assert json.loads(carried(src, tmp_path / "plain")["config.json"]) == config


def test_types_that_are_not_floats_stay() -> None:
    assert with_dtype({"dtype": "auto", "torch_dtype": None, "x_config": 3}, "bfloat16") == {
        "dtype": "auto",
        "torch_dtype": None,
        "x_config": 3,
    }


@pytest.mark.parametrize("dtype", [["float32"], {"a": 1}, 3])
def test_a_type_that_is_not_text_stays(dtype: object) -> None:
    assert with_dtype({"dtype": dtype}, "bfloat16") == {"dtype": dtype}


def test_a_config_that_links_elsewhere_is_not_carried(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text('{"key": "s3cret"}')
    src = source(tmp_path / "src")
    (tmp_path / "src" / "config.json").symlink_to(tmp_path / "secret")
    with pytest.raises(shardckpt.errors.UnsafeError):
        shardckpt.consolidate(src, str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_a_merged_folder_without_a_config_says_how_to_get_one(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    save_file({"w": torch.ones(1)}, tmp_path / "src" / "model.safetensors")

    def warnings(target: str, **options: object) -> str:
        return " ".join(shardckpt.consolidate(tmp_path / "src", tmp_path / target, **options).warnings)

    assert "--config-from FOLDER" in warnings("a")
    assert "--config-from" not in warnings("a.safetensors")
    assert "--config-from" not in warnings("b", to="torch")
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "config.json").write_text("{}")
    assert "--config-from" not in warnings("c", config_from=str(tmp_path / "config"))
