"""Formats are told by structure first and by name second, and looking never fails, whatever lies there."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from shardckpt.errors import (
    CheckpointError,
    FormatError,
    SourceNotFoundError,
    StorageError,
    UnknownFormatError,
    UsageError,
)
from shardckpt.reader import Evidence, Source
from shardckpt.readers import registry as detect_module
from shardckpt.readers.registry import BUILT_IN, checkpoint_in, detect, open_checkpoint, open_source
from shardckpt.storage.local import LocalStore
from shardckpt.storage.store import Listed
from tests.kit.writers.native_writer import write_step
from tests.kit.writers.samples import MODEL, SAMPLES

NAMES = [
    ".metadata",
    "__0_0.distcp",
    "model.safetensors",
    "model.safetensors.index.json",
    "model-00001-of-00002.safetensors",
    "adapter_model.safetensors",
    "shard-00001-model-00001-of-00001.safetensors",
    "optimizer.safetensors",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "pytorch_model-00001-of-00002.bin",
    "pytorch_model_fsdp.bin",
    "random_states_0.pkl",
    "meta.pt",
    "a.pt",
    "a.ckpt",
    "config.json",
    "0.metadata",
    "__0.metadata",
]
HEADS = [
    b"",
    b"\0",
    b"{",
    b"PK\x03\x04",
    b"\x80\x02",
    b"\x80\x04\x95",
    b"\x10\0\0\0\0\0\0\0{",
    b"\xff" * 40,
    b"PK\x05\x06" + bytes(18),
]


@given(st.dictionaries(st.sampled_from(NAMES), st.tuples(st.sampled_from(HEADS), st.binary(max_size=40)), max_size=6))
def test_looking_at_anything_tells_how_sure_each_format_is(
    tmp_path_factory: pytest.TempPathFactory, files: dict[str, tuple[bytes, bytes]]
) -> None:
    folder = tmp_path_factory.mktemp("any")
    for name, (head, rest) in files.items():
        (folder / name).write_bytes(head + rest)
    for source in (Source(LocalStore(str(folder))), *(Source(LocalStore(str(folder)), name) for name in files)):
        for built_in in BUILT_IN:
            evidence = built_in.load().recognize(source)
            assert isinstance(evidence, Evidence)
            assert built_in.may_recognize(source) or evidence is Evidence.NONE, "names must not exclude a format"
        try:
            detect(source).open(source)
        except (CheckpointError, UsageError) as error:
            assert str(error).isprintable()
    shutil.rmtree(folder)


@pytest.mark.parametrize("name", SAMPLES)
def test_each_sample_is_its_own_format_and_no_others(name: str, tmp_path: Path) -> None:
    for variant, build in SAMPLES[name].items():
        source = open_source(str(build(tmp_path / variant)))
        assert detect(source).name == name


@pytest.mark.parametrize(
    ("write", "name", "expected"),
    [
        (lambda path: save_file(MODEL, path), "weights.bin", "safetensors"),
        (lambda path: save_file(MODEL, path), "weights.pt", "safetensors"),
        (lambda path: torch.save(MODEL, path), "weights.safetensors", "torch"),
        (lambda path: torch.save(MODEL, path), "no ending", "torch"),
        (lambda path: torch.save(MODEL, path, _use_new_zipfile_serialization=False), "weights.ckpt", "torch"),
    ],
)
def test_structure_counts_more_than_the_name(
    write: Callable[[Path], None], name: str, expected: str, tmp_path: Path
) -> None:
    write(tmp_path / name)
    assert detect(open_source(str(tmp_path / name))).name == expected


def test_of_two_formats_in_a_folder_the_one_that_holds_the_other_wins(tmp_path: Path) -> None:
    folder = SAMPLES["dcp"]["torch"](tmp_path / "src")
    torch.save({"epoch": 1}, folder / "extra.pt")
    assert detect(open_source(str(folder))).name == "dcp"
    save_file(MODEL, tmp_path / "model.safetensors")
    torch.save(MODEL, tmp_path / "pytorch_model.bin")
    assert detect(open_source(str(tmp_path))).name == "safetensors"


def test_what_is_recognized_by_name_and_cannot_be_read_is_the_checkpoints_fault(tmp_path: Path) -> None:
    for name in ("model.safetensors", "a.pt", ".metadata"):
        folder = tmp_path / name.strip(".")
        folder.mkdir()
        (folder / name).write_bytes(b"\xff" * 100)
        (folder / "__0_0.distcp").write_bytes(b"") if name == ".metadata" else None
        with pytest.raises(CheckpointError):
            open_checkpoint(str(folder))


def test_what_nobody_recognizes_says_what_was_found_and_what_was_looked_for(tmp_path: Path) -> None:
    (tmp_path / "notes\n.txt").write_text("x")
    with pytest.raises(UnknownFormatError) as caught:
        open_checkpoint(str(tmp_path))
    text = str(caught.value)
    assert text.isprintable()
    assert "notes\\n.txt" in text
    assert text.endswith(
        "formats, which `shardckpt formats` lists. Point at the folder or file that holds the checkpoint."
    )
    assert len(text) < 400


def test_a_level_too_high_names_the_checkpoints_below_and_nothing_else(tmp_path: Path) -> None:
    SAMPLES["dcp"]["torch"](tmp_path / "run" / "step-8")
    (tmp_path / "run" / "logs").mkdir()
    (tmp_path / "run" / ".cache").mkdir()
    save_file(MODEL, tmp_path / "run" / ".cache" / "model.safetensors")
    with pytest.raises(
        UnknownFormatError, match=r"holds some; found .*step-8 \(dcp\)\. Point at one of them"
    ) as caught:
        open_checkpoint(str(tmp_path / "run"))
    assert "logs" not in str(caught.value) and ".cache" not in str(caught.value)
    with pytest.raises(UnknownFormatError, match=r"holds some; found run/step-8 \(dcp\)\. Point at"):
        open_checkpoint(str(tmp_path))


def test_steps_below_a_folder_are_listed_by_number_and_the_newest_is_among_them(tmp_path: Path) -> None:
    for number in range(2, 24, 2):
        write_step(tmp_path / f"step-{number}", {"w": torch.ones(4)})
    with pytest.raises(UnknownFormatError) as caught:
        open_checkpoint(str(tmp_path))
    found = re.findall(r"step-(\d+) \(native\)", str(caught.value))
    assert found == ["8", "10", "12", "14", "16", "18", "20", "22"]
    assert caught.value.nearby == f"{tmp_path}/step-22"


def test_the_look_below_a_folder_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / "a" / "b" / "c" / "d" / "e"
    SAMPLES["dcp"]["torch"](deep)
    assert checkpoint_in(str(tmp_path)) == "", "five levels down"
    assert checkpoint_in(str(tmp_path / "a")) == "b/c/d/e (dcp)"
    monkeypatch.setattr(detect_module, "_NAMES", 10)
    for name in ("a0", "a1", "a2"):
        (tmp_path / name).mkdir()
        for i in range(20):
            (tmp_path / name / f"{i}.png").touch()
    looked_at: list[int] = []
    listed = LocalStore.list_first

    def counting(self: LocalStore, folder: str, most: int | None) -> Sequence[Listed]:
        found = listed(self, folder, most)
        looked_at.append(len(found) if folder else 0)
        return found

    monkeypatch.setattr(LocalStore, "list_first", counting)
    assert checkpoint_in(str(tmp_path)) == ""
    assert sum(looked_at) <= 10 * 8, "threads that list at once may each take what is left"


def test_a_name_alone_is_not_a_checkpoint_two_levels_down(tmp_path: Path) -> None:
    (tmp_path / "data" / "tokens").mkdir(parents=True)
    (tmp_path / "data" / "tokens" / "train.bin").write_bytes(b"\x01\x02" * 50)
    assert checkpoint_in(str(tmp_path)) == ""


def test_what_is_known_and_not_read_says_so_and_points_nowhere_else(tmp_path: Path) -> None:
    """Megatron's older folders hold files of torch.save, which are no checkpoints by themselves."""
    (tmp_path / "mp_rank_00").mkdir()
    torch.save(MODEL, tmp_path / "mp_rank_00" / "model_optim_rng.pt")
    with pytest.raises(UnknownFormatError, match=r"Megatron's older format.*Convert it with Megatron's") as caught:
        open_checkpoint(str(tmp_path))
    assert "expected" not in str(caught.value) and "Point at" not in str(caught.value)


def test_a_file_beside_a_checkpoint_names_the_folder(tmp_path: Path) -> None:
    save_file(MODEL, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UnknownFormatError, match=r"but its folder is one; found .* \(safetensors\)\. Point at"):
        open_checkpoint(str(tmp_path / "config.json"))


def test_the_step_of_accelerate_is_opened_unless_its_folder_is_a_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "epoch-1"
    write_step(folder / "shardckpt", {"w": torch.ones(2)})
    (folder / "notes.txt").write_text("of a hook")
    assert open_checkpoint(str(folder)).manifest.format == "native"
    save_file(MODEL, folder / "model.safetensors")
    assert open_checkpoint(str(folder)).manifest.format == "safetensors"
    save_file(MODEL, tmp_path / "shardckpt.safetensors")
    (tmp_path / "other" / "shardckpt").mkdir(parents=True)
    shutil.move(tmp_path / "shardckpt.safetensors", tmp_path / "other" / "shardckpt" / "model.safetensors")
    with pytest.raises(UnknownFormatError, match="holds some; found shardckpt"):
        open_checkpoint(str(tmp_path / "other"))


def test_a_folder_that_cannot_be_looked_into_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "step-8").mkdir()
    listed = LocalStore.list_first

    def refusing(self: LocalStore, folder: str, most: int | None) -> Sequence[Listed]:
        if folder:
            raise StorageError("permission denied", where=folder)
        return listed(self, folder, most)

    monkeypatch.setattr(LocalStore, "list_first", refusing)
    with pytest.raises(UnknownFormatError, match="no reader recognizes this; found step-8"):
        open_checkpoint(str(tmp_path))


def test_a_long_listing_is_cut(tmp_path: Path) -> None:
    for i in range(100):
        (tmp_path / f"{i:03d}.txt").write_text("x")
    with pytest.raises(UnknownFormatError, match="and 92 more"):
        open_checkpoint(str(tmp_path))


def test_nothing_there_is_told_apart(tmp_path: Path) -> None:
    with pytest.raises(SourceNotFoundError, match="there is nothing here"):
        open_checkpoint(str(tmp_path / "none"))


def test_formats_have_names_of_their_own() -> None:
    formats = [each.load() for each in BUILT_IN]
    assert [form.name for form in formats] == [built_in.name for built_in in BUILT_IN]
    assert len({form.name for form in formats}) == len({form.title for form in formats}) == len(formats)


def test_a_manifest_that_lies_alone_is_explained(tmp_path: Path) -> None:
    (tmp_path / "0mwqkzsavex3s13.manifest.json").write_text("{}")
    with pytest.raises(UnknownFormatError, match="the manifest of a shardckpt step without its files and COMMIT"):
        open_checkpoint(str(tmp_path))
    with pytest.raises(UnknownFormatError, match="the manifest of a shardckpt step"):
        open_checkpoint(str(tmp_path / "0mwqkzsavex3s13.manifest.json"))


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"a" * 64 + b"\nsize 4976698672\n"
PAGE = b"\n<!DOCTYPE html>\n<html><body>Access to this model is restricted</body></html>"


@pytest.mark.parametrize("is_file", [False, True])
@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "a.pt", "model.safetensors.index.json"])
@pytest.mark.parametrize(("data", "what"), [(POINTER, "a Git LFS pointer"), (PAGE, "an HTML page")])
def test_what_a_download_left_in_place_of_a_file_is_named(
    data: bytes, what: str, name: str, is_file: bool, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(FormatError, match=rf"{name}: {what} is here instead of the file\. (Fetch|Download)"):
        open_checkpoint(str(tmp_path / name if is_file else tmp_path))


def test_a_gguf_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "i.gguf").write_bytes(b"GGUF" + bytes(60))
    with pytest.raises(UnknownFormatError, match=r"like a GGUF file, which is written and never read.*GGUFReader"):
        open_checkpoint(str(tmp_path / "i.gguf"))
