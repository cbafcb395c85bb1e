"""`repair` makes a step readable again from its payload files, or says why it cannot; nothing is made up."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import shardckpt
from shardckpt.boxes import Box
from shardckpt.errors import (
    AmbiguousError,
    ChecksumError,
    IncompleteError,
    SourceNotFoundError,
    UnsupportedError,
    UsageError,
)
from shardckpt.native.commit import COMMIT, encode_commit, manifest_name
from shardckpt.native.reader import NativeReader
from shardckpt.native.run_directory import read_run
from shardckpt.readers.registry import open_checkpoint
from shardckpt.storage.local import LocalStore
from tests.kit.writers.native_writer import SAVE, write_step

MANIFEST = manifest_name(SAVE)
BOXES = {("model", "w"): [(0, Box((0, 0), (3, 4))), (1, Box((3, 0), (3, 4)))]}


def state() -> dict[str, Any]:
    tied = torch.ones(3)
    model = OrderedDict([("w", torch.arange(24.0).reshape(6, 4)), ("a", tied), ("b", tied)])
    return {"model": model, "seen": [(torch.zeros(2), 1.5)], "step": 100, "dtype": torch.float16, "e": torch.zeros(0)}


def files(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def cut(file: str) -> Callable[[Path], None]:
    return lambda folder: (folder / file).write_bytes((folder / file).read_bytes()[:-5]) and None


def flip(file: str, at: int) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        data = bytearray((folder / file).read_bytes())
        data[at] ^= 1
        (folder / file).write_bytes(data)

    return change


def gone(*names: str) -> Callable[[Path], None]:
    return lambda folder: [(folder / name).unlink() for name in names] and None


LOSSES = {
    "no commit": gone(COMMIT),
    "no manifest": gone(MANIFEST),
    "neither": gone(COMMIT, MANIFEST),
    "a commit that is cut": cut(COMMIT),
    "a manifest that is cut": cut(MANIFEST),
    "a flipped commit": flip(COMMIT, 40),
    "a flipped manifest": flip(MANIFEST, 3),
    "a value that changed": lambda folder: (
        (folder / MANIFEST).write_bytes((folder / MANIFEST).read_bytes().replace(b'"step":100', b'"step":101')) and None
    ),
    "an empty manifest": lambda folder: (folder / MANIFEST).write_bytes(b"") and None,
}


@pytest.mark.parametrize("alone", [None, ("model",)], ids=["two writers", "one writer"])
@pytest.mark.parametrize("loss", LOSSES)
def test_what_was_committed_is_there_again_byte_for_byte(tmp_path: Path, loss: str, alone: Any) -> None:
    folder = write_step(tmp_path / "s", state(), None if alone else BOXES, alone=alone)
    before = files(folder)
    LOSSES[loss](folder)
    report = shardckpt.verify(str(folder))
    assert not report.ok
    assert "shardckpt repair" in str(report.problems)
    found = shardckpt.repair(str(folder))
    assert found.written == (MANIFEST, COMMIT)
    assert (found.save, found.tensor_count, found.file_count) == (SAVE, 4, 2)
    assert files(folder) == before
    assert shardckpt.verify(str(folder)).ok


def test_an_intact_step_is_not_changed(tmp_path: Path) -> None:
    folder = write_step(tmp_path / "s", state(), BOXES)
    before = files(folder)
    assert shardckpt.repair(str(folder)).written == ()
    assert files(folder) == before


def test_a_dry_run_writes_nothing(tmp_path: Path) -> None:
    folder = write_step(tmp_path / "s", state(), BOXES)
    gone(COMMIT)(folder)
    before = files(folder)
    assert shardckpt.repair(str(folder), dry_run=True).written == (MANIFEST, COMMIT)
    assert files(folder) == before


def test_a_file_that_is_gone_cannot_be_made_up(tmp_path: Path) -> None:
    folder = write_step(tmp_path / "s", state(), BOXES)
    gone(COMMIT, f"{SAVE}-00001-00.safetensors")(folder)
    before = files(folder)
    with pytest.raises(IncompleteError, match=r"model\.w \[3:6, 0:4\]"):
        shardckpt.repair(str(folder))
    assert files(folder) == before


def test_a_committed_step_that_lost_a_file_is_not_repaired(tmp_path: Path) -> None:
    folder = write_step(tmp_path / "s", state(), BOXES)
    gone(f"{SAVE}-00001-00.safetensors")(folder)
    with pytest.raises(IncompleteError, match=r"model\.w"):
        shardckpt.repair(str(folder))


def test_arrays_of_a_lost_file_are_missed_though_nothing_else_names_them(tmp_path: Path) -> None:
    whole = Box((0, 0), (6, 4))
    folder = write_step(tmp_path / "s", state(), {("model", "w"): [(1, whole)]})
    gone(COMMIT, f"{SAVE}-00001-00.safetensors")(folder)
    with pytest.raises(IncompleteError, match=r"model\.w"):
        shardckpt.repair(str(folder))


def test_without_the_file_of_the_nest_tensors_return_and_a_warning_names_the_rest(
    tmp_path: Path,
) -> None:
    whole = {
        path: [(1, box)] for path, box in [(("model", "w"), Box((0, 0), (6, 4))), (("model", "a"), Box((0,), (3,)))]
    }
    folder = write_step(tmp_path / "s", {"model": state()["model"], "step": 100}, whole)
    gone(COMMIT, MANIFEST, f"{SAVE}-00000-00.safetensors")(folder)
    found = shardckpt.repair(str(folder))
    assert any("values that are not tensors" in warning for warning in found.warnings)
    reader = open_checkpoint(str(folder))
    assert list(reader.manifest.tensors) == [("model", "w"), ("model", "a")]
    assert reader.manifest.objects == {}
    assert isinstance(reader, NativeReader)
    assert list(reader.decode_state(lambda ref: ref)) == ["model"]  # type: ignore[call-overload]


def test_bytes_that_changed_are_not_blessed_unless_asked(tmp_path: Path) -> None:
    folder = write_step(tmp_path / "s", state(), BOXES)
    gone(COMMIT)(folder)
    flip(f"{SAVE}-00001-00.safetensors", -1)(folder)
    with pytest.raises(ChecksumError, match=r"00001-00.*--rehash"):
        shardckpt.repair(str(folder))
    found = shardckpt.repair(str(folder), rehash=True)
    assert [(p.kind, p.file, p.rank) for p in found.problems] == [("checksum", f"{SAVE}-00001-00.safetensors", 1)]
    assert shardckpt.verify(str(folder)).ok


@pytest.mark.parametrize("checksums", [True, False])
@pytest.mark.parametrize("damage", ["flipped", "longer"])
def test_a_committed_step_with_other_bytes_is_not_intact(tmp_path: Path, damage: str, checksums: bool) -> None:
    folder = tmp_path / "s"
    shardckpt.save({"w": torch.arange(9.0), "v": torch.ones(3)}, folder, checksums=checksums)
    [payload] = folder.glob("*-00.safetensors")
    if damage == "flipped":
        flip(payload.name, -5)(folder)
    else:
        payload.write_bytes(payload.read_bytes() + b"hi\n")
    before = files(folder)
    if damage == "flipped" and not checksums:
        assert shardckpt.repair(folder).written == ()
        return
    with pytest.raises(ChecksumError, match=rf"{payload.name}.*--rehash"):
        shardckpt.repair(folder)
    assert shardckpt.repair(folder, rehash=True, dry_run=True).written
    assert files(folder) == before
    found = shardckpt.repair(folder, rehash=True)
    assert [(p.kind, p.file) for p in found.problems] == [
        ("checksum" if damage == "flipped" else "wrong_size", payload.name)
    ]
    assert shardckpt.repair(folder).written == ()
    if damage == "flipped":
        assert shardckpt.verify(folder).ok
        assert len(shardckpt.load(folder)["w"]) == 9


def test_lost_checksums_are_reported(tmp_path: Path) -> None:
    folder = write_step(tmp_path / "s", state(), BOXES)
    gone(COMMIT, MANIFEST)(folder)
    [warning] = shardckpt.repair(str(folder)).warnings
    assert "computed again" in warning


def test_several_complete_saves_need_a_choice(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    write_step(folder, {"w": torch.zeros(2)}, save="save1")
    write_step(folder, {"w": torch.ones(2)}, save="save2")
    gone(COMMIT)(folder)
    with pytest.raises(AmbiguousError, match=r"save1, save2.*--save"):
        shardckpt.repair(str(folder))
    assert shardckpt.repair(str(folder), save="save1").save == "save1"
    [first] = open_checkpoint(str(folder)).manifest.files
    assert first.startswith("save1-")


def test_the_complete_one_of_two_saves_is_taken(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    write_step(folder, state(), BOXES, save="save1")
    write_step(folder, state(), BOXES, save="save2")
    gone(COMMIT, "save2-00001-00.safetensors")(folder)
    assert shardckpt.repair(str(folder)).save == "save1"


def test_what_is_newer_is_not_damage(tmp_path: Path) -> None:
    folder = write_step(tmp_path / "s", state(), BOXES)
    manifest = (folder / MANIFEST).read_bytes().replace(b'"version":1,', b'"version":3,')
    (folder / MANIFEST).write_bytes(manifest)
    (folder / COMMIT).write_bytes(encode_commit(SAVE, manifest, []))
    with pytest.raises(UnsupportedError, match="version 3 "):
        shardckpt.repair(str(folder))


def test_there_has_to_be_something(tmp_path: Path) -> None:
    with pytest.raises(SourceNotFoundError):
        shardckpt.repair(str(tmp_path / "none"))
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(UsageError, match="no payload files"):
        shardckpt.repair(str(tmp_path))
    with pytest.raises(UsageError, match="is a file"):
        shardckpt.repair(str(tmp_path / "a.txt"))
    folder = write_step(tmp_path / "s", state(), BOXES)
    gone(COMMIT)(folder)
    with pytest.raises(UsageError, match="'other'"):
        shardckpt.repair(str(folder), save="other")


def test_an_order_that_names_an_array_twice_in_place_of_another_is_refused(tmp_path: Path) -> None:
    folder = write_step(tmp_path / "s", {"v": torch.ones(3), "w": torch.zeros(3)})
    gone(COMMIT, MANIFEST)(folder)
    (file,) = (path for path in folder.iterdir() if path.suffix == ".safetensors")
    order = b'\\"arrays\\":[[\\"v\\"],[\\"w\\"]]'
    assert file.read_bytes().count(order) == 1
    file.write_bytes(file.read_bytes().replace(order, order.replace(b"v", b"w")))
    with pytest.raises(shardckpt.errors.CheckpointError, match="hold arrays that their save did not know"):
        shardckpt.repair(str(folder))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'\\"version\\":1,', b'\\"version\\":2,'),
        (b'\\"version\\":1,', b'\\"version\\":"1",'),
        (b'\\"chunks\\":[[[', b'\\"chunks\\":[[{'),
        (b"[3,0],[3,4]", b"[9,0],[3,4]"),
        (b"[3,0],[3,4]", b"[3,0],[3,1]"),
        (b"[3,0],[3,4]", b"[3,0],[3.4]"),
        (b'\\"float32\\"', b'\\"float31\\"'),
        (b'\\"float32\\"', b'\\"float16\\"'),
        (b'"shardckpt"', b'"shardckp_"'),
    ],
)
def test_headers_that_lie_are_refused(tmp_path: Path, old: bytes, new: bytes) -> None:
    folder = write_step(tmp_path / "s", state(), BOXES)
    gone(COMMIT, MANIFEST)(folder)
    file = folder / f"{SAVE}-00001-00.safetensors"
    data = file.read_bytes()
    assert old in data
    file.write_bytes(data.replace(old, new, 1))
    with pytest.raises(shardckpt.errors.CheckpointError):
        shardckpt.repair(str(folder))
    assert COMMIT not in files(folder)


@pytest.mark.parametrize("lost", ["COMMIT", "*.manifest.json"])
def test_a_step_keeps_its_place_in_its_run(tmp_path: Path, lost: str) -> None:
    root = tmp_path / "run"
    for number in (1, 2):
        ck = shardckpt.Checkpointer(root, save_every=1, tiers=[shardckpt.Local(tmp_path / "local")])
        ck.save(number, {"step": number})
        ck.wait()
    before = read_run(LocalStore(str(root))).steps[-1]
    assert before.branch == 2 and before.mark is not None
    next((root / before.name).glob(lost)).unlink()
    shardckpt.repair(root / before.name)
    assert read_run(LocalStore(str(root))).steps[-1] == before
