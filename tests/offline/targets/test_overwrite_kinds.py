"""`--overwrite` replaces one checkpoint of the format that is written, and nothing that a user put there."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import fsspec
import pytest
import torch
from safetensors.torch import save_file

import shardckpt
from shardckpt.errors import TargetExistsError
from shardckpt.storage.resolve_url import open_store

MODEL = {"a.w": torch.arange(12.0).reshape(4, 3), "b": torch.arange(3.0)}
CARRIED = ("config.json", "tokenizer.json", "tokenizer_config.json")
Write = Callable[..., object]


def optimizer() -> dict[str, object]:
    slots = {name: {"step": torch.tensor(4.0), "exp_avg": value * 2} for name, value in MODEL.items()}
    return {"state": slots, "param_groups": [{"lr": 0.1, "params": list(MODEL)}]}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A checkpoint with model and optimizer."""
    torch.save({"model": MODEL, "optimizer": optimizer()}, tmp_path / "source.pt")
    return tmp_path / "source.pt"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A folder with a model's config and tokenizer."""
    (tmp_path / "config").mkdir()
    for name in CARRIED:
        (tmp_path / "config" / name).write_text("{}")
    return tmp_path / "config"


FOLDERS: dict[str, Write] = {
    "safetensors": partial(shardckpt.consolidate, part="all"),
    "safetensors in shards": partial(shardckpt.consolidate, part="all", max_shard_size=48),
    "torch": partial(shardckpt.consolidate, part="all", to="torch", max_shard_size=48),
    "dcp": partial(shardckpt.consolidate, part="all", to="dcp"),
    "native": partial(shardckpt.convert, part="all", to="native"),
    "universal": partial(shardckpt.convert, part="all", to="deepspeed-universal"),
    "reshard": partial(shardckpt.reshard, world_size=2),
    "reshard to dcp": partial(shardckpt.reshard, world_size=2, to="dcp"),
    "reshard to torch": partial(shardckpt.reshard, world_size=2, to="torch"),
    "rekey": partial(shardckpt.rekey, to="ids"),
}


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(params=["local", "memory"])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "out") if request.param == "local" else f"{request.getfixturevalue('memory_folder')}/out"


@pytest.mark.parametrize("name", FOLDERS)
def test_what_a_command_wrote_is_replaced_by_it(name: str, source: Path, target: str) -> None:
    for _ in range(3):
        FOLDERS[name](source, target, overwrite=True)
    assert shardckpt.inspect(target).tensors


@pytest.mark.parametrize("name", FOLDERS)
def test_what_a_user_put_beside_it_is_not(name: str, source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    FOLDERS[name](source, out)
    (out / "README.md").write_text("mine")
    before = files(out)
    with pytest.raises(TargetExistsError, match=r"found README\.md"):
        FOLDERS[name](source, out, overwrite=True)
    assert files(out) == before


@pytest.mark.parametrize("name", FOLDERS)
def test_a_run_and_a_checkpoint_of_another_format_are_not(name: str, source: Path, tmp_path: Path) -> None:
    shardckpt.Checkpointer(tmp_path / "run").save(1, {"w": torch.zeros(2)})
    (tmp_path / "other").mkdir()
    save_file(MODEL, tmp_path / "other" / "diffusion.safetensors")
    for place in ("run", "other"):
        before = files(tmp_path / place)
        with pytest.raises(TargetExistsError, match="and nothing else"):
            FOLDERS[name](source, tmp_path / place, overwrite=True)
        assert files(tmp_path / place) == before


@pytest.mark.parametrize("name", ["native", "reshard"])
def test_files_that_other_steps_refer_to_stay(name: str, source: Path, tmp_path: Path) -> None:
    ck = shardckpt.Checkpointer(tmp_path / "run", dedup=True)
    for step in (1, 2):
        ck.save(step, {"w": torch.arange(50_000.0), "step": step})
    FOLDERS[name](source, ck.path(1), overwrite=True)
    assert shardckpt.load(ck.path(2))["w"].equal(torch.arange(50_000.0))
    assert "a.w" in str(list(shardckpt.open(ck.path(1))))


def test_config_files_that_are_written_again_are_replaced(source: Path, config: Path, tmp_path: Path) -> None:
    for to in ("safetensors", "torch", "dcp", "native", "deepspeed-universal"):
        write = partial(shardckpt.consolidate, source, tmp_path / to, to=to, part="all", config_from=config)
        write()
        (tmp_path / to / "config.json").write_text('{"old": 1}')
        write(overwrite=True)
        assert files(tmp_path / to)["config.json"] == b"{}"


@pytest.mark.parametrize("to", ["safetensors", "torch"])
def test_config_files_of_the_checkpoint_that_is_replaced_are_kept(to: str, source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shardckpt.consolidate(source, out, to=to)
    (out / "config.json").write_text('{"dtype": "float32", "mine": 1}')
    (out / "generation_config.json").write_text('{"top_k":  3}')
    report = shardckpt.consolidate(source, out, to=to, overwrite=True)
    assert files(out)["config.json"] == b'{"dtype": "float32", "mine": 1}'
    assert any("config.json, generation_config.json" in line and "kept" in line for line in report.warnings)
    assert not any("no config.json" in line for line in report.warnings)
    shardckpt.consolidate(source, out, to=to, overwrite=True, dtype="bf16")
    assert json.loads(files(out)["config.json"]) == {"dtype": "bfloat16", "mine": 1}
    assert files(out)["generation_config.json"] == b'{"top_k":  3}'


def test_a_given_config_comes_before_the_one_in_the_target(source: Path, config: Path, tmp_path: Path) -> None:
    for name in CARRIED[1:]:
        (config / name).unlink()
    shardckpt.consolidate(source, tmp_path / "out")
    (tmp_path / "out" / "config.json").write_text('{"old": 1}')
    (tmp_path / "out" / "generation_config.json").write_text("{}")
    shardckpt.consolidate(source, tmp_path / "out", overwrite=True, config_from=config)
    assert files(tmp_path / "out")["config.json"] == b"{}"
    assert files(tmp_path / "out")["generation_config.json"] == b"{}"


def test_a_tokenizer_that_a_user_added_is_not_removed(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shardckpt.consolidate(source, out)
    (out / "tokenizer.json").write_text("mine")
    with pytest.raises(TargetExistsError, match=r"found tokenizer\.json"):
        shardckpt.consolidate(source, out, overwrite=True)
    assert (out / "tokenizer.json").read_text() == "mine"


@pytest.mark.parametrize(("to", "name"), [("safetensors", "model.safetensors"), ("torch", "pytorch_model.bin")])
@pytest.mark.parametrize("place", ["disk", "memory"])
def test_text_under_the_name_of_a_payload_file_is_not_removed(
    to: str, name: str, place: str, source: Path, tmp_path: Path
) -> None:
    files = fsspec.filesystem("memory") if place == "memory" else fsspec.filesystem("file")
    folder = f"memory://text-{to}" if place == "memory" else str(tmp_path / "out")
    files.makedirs(folder, exist_ok=True)
    for content, is_replaced in ((b"my notes", False), (b"", True)):
        files.pipe(f"{folder}/{name}", content)
        if is_replaced:
            shardckpt.consolidate(source, folder, to=to, overwrite=True)
        else:
            with pytest.raises(TargetExistsError, match=f"found {name}"):
                shardckpt.consolidate(source, folder, to=to, overwrite=True)
            assert files.cat(f"{folder}/{name}") == content
    files.rm(folder, recursive=True)


def test_a_folder_of_config_files_alone_is_not_a_checkpoint(source: Path, config: Path) -> None:
    before = files(config)
    with pytest.raises(TargetExistsError, match=r"found config\.json, tokenizer"):
        shardckpt.consolidate(source, config, config_from=config, overwrite=True)
    assert files(config) == before


def test_a_model_is_not_replaced_by_an_adapter_beside_it(source: Path, tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    save_file({"base_model.model.a.lora_A.weight": torch.ones(2, 2)}, adapter / "adapter_model.safetensors")
    (adapter / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 2, "lora_alpha": 2}')
    shardckpt.consolidate(source, tmp_path / "out")
    with pytest.raises(TargetExistsError, match=r"found model\.safetensors"):
        shardckpt.consolidate(adapter, tmp_path / "out", overwrite=True)


@pytest.mark.parametrize("name", ["out.safetensors", "out.pt", "out.bin"])
def test_one_file_is_replaced_where_it_is_of_the_same_kind(name: str, source: Path, target: str) -> None:
    place = target.removesuffix("out") + name
    for _ in range(2):
        shardckpt.consolidate(source, place, overwrite=True)
    with open_store(target.removesuffix("out")).create(name) as writer:
        writer.write(b"# my notes")
    with pytest.raises(TargetExistsError, match="and this is another file"):
        shardckpt.consolidate(source, place, overwrite=True)
