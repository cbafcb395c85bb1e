"""A native step reads back bit for bit, however it was cut; without its `COMMIT` it does not exist."""

from __future__ import annotations

import json
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from safetensors.torch import load_file

import shardckpt
from shardckpt.boxes import Box, flat_to_boxes
from shardckpt.encodings.tagged_json import ArrayRef, NamedValue
from shardckpt.errors import (
    ChecksumError,
    FormatError,
    IncompleteError,
    TruncatedError,
    UnknownFormatError,
    UnsafeError,
    UnsupportedError,
)
from shardckpt.native.commit import COMMIT, encode_commit, manifest_name
from shardckpt.native.payload import BLOCK_BYTES, KEY
from shardckpt.readers.registry import detect, open_checkpoint, open_source
from tests.kit.writers.materialise import assert_same
from tests.kit.writers.native_writer import SAVE, commit, opened, write_step

W = torch.arange(24.0).reshape(6, 4)


def state() -> dict[str, Any]:
    shared = torch.arange(5)
    return {
        "model": OrderedDict([("a.w", W), ("b", shared), ("tied", shared)]),
        "optim": {"state": {"a.w": {"exp_avg": W * 2, "step": torch.tensor(3.0)}}, "param_groups": [{"lr": 0.1}]},
        "step": 100,
        "seen": [torch.ones(2), (torch.zeros(0, 3), {"x": None})],
        "dtype": torch.bfloat16,
        "empty": {},
    }


CUT = {
    ("model", "a.w"): [(0, Box((0, 0), (6, 1))), (1, Box((0, 1), (4, 3))), (2, Box((4, 1), (2, 3)))],
    ("optim", "state", "a.w", "exp_avg"): [
        (rank, box) for rank, (a, b) in enumerate([(0, 9), (9, 24)]) for box in flat_to_boxes((6, 4), a, b)
    ],
}


@pytest.mark.parametrize("boxes", [None, CUT], ids=["one writer", "three writers"])
@pytest.mark.parametrize("most_bytes", [1, 1 << 30])
def test_what_was_saved_is_read(tmp_path: Path, boxes: Any, most_bytes: int) -> None:
    write_step(tmp_path, state(), boxes, most_bytes=most_bytes)
    reader = opened(tmp_path)
    manifest = reader.manifest
    assert manifest.format == "native"
    assert_same(reader, ("model", "a.w"), W)
    assert_same(reader, ("model", "tied"), torch.arange(5))
    assert_same(reader, ("optim", "state", "a.w", "exp_avg"), W * 2)
    assert_same(reader, ("seen", 0), torch.ones(2))
    assert_same(reader, ("seen", 1, 0), torch.zeros(0, 3))
    assert manifest.aliases == {("model", "tied"): ("model", "b")}
    assert {path: entry.value for path, entry in manifest.objects.items()} == {
        ("optim", "param_groups"): [{"lr": 0.1}],
        ("step",): 100,
        ("seen", 1, 1, "x"): None,
        ("dtype",): NamedValue("dtype", "bfloat16"),
        ("empty",): {},
    }
    assert manifest.warnings == ()


def test_the_nest_comes_back_in_its_own_containers(tmp_path: Path) -> None:
    write_step(tmp_path, state(), CUT)
    reader = opened(tmp_path)
    arrays = [record.path for record in reader.contents.arrays]
    nest = reader.decode_state(lambda ref: arrays[ref.number] if isinstance(ref, ArrayRef) else ref)
    shared = ("model", "b")
    assert nest == {
        "model": OrderedDict([("a.w", ("model", "a.w")), ("b", shared), ("tied", shared)]),
        "optim": {
            "state": {"a.w": {s: ("optim", "state", "a.w", s) for s in ("exp_avg", "step")}},
            "param_groups": [{"lr": 0.1}],
        },
        "step": 100,
        "seen": [("seen", 0), (("seen", 1, 0), {"x": None})],
        "dtype": NamedValue("dtype", "bfloat16"),
        "empty": {},
    }
    assert list(nest) == list(state())  # type: ignore[call-overload]


def test_paths_that_read_alike_stay_two(tmp_path: Path) -> None:
    write_step(tmp_path, {"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}, 0: torch.ones(2), "0": torch.zeros(2)})
    reader = opened(tmp_path)
    assert_same(reader, ("a.b",), torch.ones(1))
    assert_same(reader, ("a", "b"), torch.zeros(1))
    assert_same(reader, (0,), torch.ones(2))
    assert_same(reader, ("0",), torch.zeros(2))


def test_a_step_of_one_writer_is_a_hugging_face_folder_too(tmp_path: Path) -> None:
    write_step(tmp_path, state(), alone=("model",))
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    [name] = set(index["weight_map"].values())
    assert set(load_file(tmp_path / name)) == {"a.w", "b"}
    assert detect(open_source(str(tmp_path))).name == "native"


def test_every_block_of_every_file_has_a_hash(tmp_path: Path) -> None:
    step = write_step(tmp_path, {"w": torch.zeros(BLOCK_BYTES // 4 + 1)})
    reader = opened(tmp_path)
    [name] = reader.list_hashed_files()
    found = list(reader.checksums())
    assert [(c.file, c.offset, c.nbytes) for c in found] == [(name, 0, BLOCK_BYTES), (name, BLOCK_BYTES, 4096 + 4)]
    data = (step / name).read_bytes()
    assert [c.value for c in found] == [xxhash.xxh3_64_intdigest(data[c.offset : c.offset + c.nbytes]) for c in found]


def test_without_checksums_a_warning_says_so(tmp_path: Path) -> None:
    write_step(tmp_path, state(), checksums=False)
    reader = opened(tmp_path)
    assert list(reader.checksums()) == []
    [warning] = reader.manifest.warnings
    assert "without checksums" in warning


# What does not exist


def test_a_step_without_its_commit_does_not_exist_for_any_reader(tmp_path: Path) -> None:
    write_step(tmp_path, state(), alone=("model",))
    (tmp_path / COMMIT).unlink()
    assert detect(open_source(str(tmp_path))).name == "native"
    with pytest.raises(IncompleteError, match="never committed"):
        open_checkpoint(str(tmp_path))
    (tmp_path / manifest_name(SAVE)).unlink()
    with pytest.raises(IncompleteError, match="never committed"):
        open_checkpoint(str(tmp_path))


def test_the_commit_itself_may_be_named(tmp_path: Path) -> None:
    write_step(tmp_path, state())
    assert_same(open_checkpoint(str(tmp_path / COMMIT)), ("model", "a.w"), W)
    (tmp_path / COMMIT).write_text("the message of a commit")
    with pytest.raises(UnknownFormatError):
        open_checkpoint(str(tmp_path / COMMIT))


def test_a_commit_alone_is_damage(tmp_path: Path) -> None:
    write_step(tmp_path, state())
    for file in tmp_path.iterdir():
        if file.name != COMMIT:
            file.unlink()
    with pytest.raises(IncompleteError, match="manifest"):
        open_checkpoint(str(tmp_path))
    (tmp_path / COMMIT).write_text("the message of a commit")
    with pytest.raises(UnknownFormatError):
        open_checkpoint(str(tmp_path))


def test_replacing_the_commit_is_the_only_flip(tmp_path: Path) -> None:
    write_step(tmp_path, {"w": torch.zeros(3)}, save="old1")
    old = (tmp_path / COMMIT).read_bytes()
    write_step(tmp_path, {"w": torch.ones(3)}, save="new1")
    assert_same(opened(tmp_path), ("w",), torch.ones(3))
    (tmp_path / COMMIT).write_bytes(old)
    assert_same(opened(tmp_path), ("w",), torch.zeros(3))


def test_a_file_that_is_gone_or_cut_is_seen_in_the_manifest(tmp_path: Path) -> None:
    write_step(tmp_path, state(), CUT)
    file = tmp_path / f"{SAVE}-00001-00.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:-1])
    assert opened(tmp_path).manifest.files[file.name] == len(data) - 1
    file.write_bytes(data + b"\0")
    assert "longer" in opened(tmp_path).manifest.warnings[0]
    file.unlink()
    assert opened(tmp_path).manifest.files[file.name] == -1


# What is newer, or lies


def rewritten(folder: Path, **changes: object) -> None:
    """Change fields of the commit mark and make its digest right again."""
    line, _ = (folder / COMMIT).read_bytes().splitlines()
    rewrite(folder, json.loads(line) | changes)


def rewrite(folder: Path, content: object) -> None:
    import hashlib

    line = json.dumps(content).encode() + b"\n"
    (folder / COMMIT).write_bytes(line + hashlib.sha256(line).hexdigest().encode() + b"\n")


@pytest.mark.parametrize(
    ("changes", "error", "names"),
    [
        ({"version": 2}, UnsupportedError, "version 2 .*newer release"),
        ({"features": ["blobs"]}, UnsupportedError, "blobs"),
        ({"version": 0}, UnsupportedError, "version 0 "),
        ({"version": 2, "files": "of another kind"}, UnsupportedError, "version 2 "),
    ],
)
def test_a_newer_step_is_refused_by_name(tmp_path: Path, changes: Any, error: type[Exception], names: str) -> None:
    write_step(tmp_path, state())
    rewritten(tmp_path, **changes)
    with pytest.raises(error, match=names):
        open_checkpoint(str(tmp_path))


def test_unknown_fields_are_ignored(tmp_path: Path) -> None:
    write_step(tmp_path, state())
    lie(tmp_path, lambda raw: raw.update(colour="blue"))
    rewritten(tmp_path, colour="blue")
    assert_same(opened(tmp_path), ("model", "a.w"), W)


HUGE = 1 << 70


@pytest.mark.parametrize(
    "changes",
    [
        {"format": "other"},
        {"version": None},
        {"version": "1"},
        {"version": [1]},
        {"version": [1, 0]},
        {"version": 1.0},
        {"version": -1},
        {"version": True},
        {"version": HUGE},
        {"features": None},
        {"features": {"a": 1}},
        {"features": [None]},
        {"save": ""},
        {"save": "../x"},
        {"save": "x" * 100},
        {"save": 5},
        {"save": "other"},
        {"manifest": None},
        {"manifest": []},
        {"manifest": ["a", 1]},
        {"manifest": ["a", 1, "00"]},
        {"manifest": ["../m", 1, "0" * 64]},
        {"manifest": ["/etc/passwd", 1, "0" * 64]},
        {"manifest": ["", 1, "0" * 64]},
        {"manifest": [f"{SAVE}.manifest.json", HUGE, "0" * 64]},
        {"manifest": [f"{SAVE}.manifest.json", 1 << 40, "0" * 64]},
        {"manifest": [f"{SAVE}.manifest.json", -1, "0" * 64]},
        {"manifest": [f"{SAVE}.manifest.json", 5, "0" * 64]},
        {"manifest": ["none.manifest.json", 5, "0" * 64]},
        {"files": None},
        {"files": {}},
        {"files": []},
        {"files": [["a", 1], ["a", 1]]},
        {"files": [["a/b", 1]]},
        {"files": [["a", HUGE]]},
        {"files": [["a", "1"]]},
        {"files": [[None, 1]]},
        {"files": [["a"]]},
        {"files": ["ab"]},
    ],
    ids=lambda c: json.dumps(c)[:50],
)
def test_no_field_of_the_commit_is_believed(tmp_path: Path, changes: Any) -> None:
    write_step(tmp_path, state())
    rewritten(tmp_path, **changes)
    with pytest.raises((FormatError, UnsafeError, UnsupportedError, IncompleteError, ChecksumError)) as caught:
        open_checkpoint(str(tmp_path))
    assert len(str(caught.value)) < 2000


@pytest.mark.parametrize("field", ["format", "version", "features", "save", "manifest", "files"])
def test_no_field_of_the_commit_may_be_missing(tmp_path: Path, field: str) -> None:
    write_step(tmp_path, state())
    line, _ = (tmp_path / COMMIT).read_bytes().splitlines()
    content = json.loads(line)
    content.pop(field)
    rewrite(tmp_path, content)
    with pytest.raises(FormatError):
        open_checkpoint(str(tmp_path))


@pytest.mark.parametrize("keep", [0, 1, 30, -1, -30, -66])
def test_a_commit_that_is_cut_does_not_count(tmp_path: Path, keep: int) -> None:
    write_step(tmp_path, state())
    data = (tmp_path / COMMIT).read_bytes()
    (tmp_path / COMMIT).write_bytes(data[:keep])
    with pytest.raises((TruncatedError, ChecksumError)):
        open_checkpoint(str(tmp_path))


def lie(folder: Path, change: Any) -> None:
    """Change the manifest's JSON and make every digest right again."""
    path = folder / manifest_name(SAVE)
    raw = json.loads(path.read_bytes())
    change(raw)
    data = json.dumps(raw).encode()
    path.write_bytes(data)
    files = opened_files(folder)
    (folder / COMMIT).write_bytes(encode_commit(SAVE, data, files))


def opened_files(folder: Path) -> Any:
    from shardckpt.native.records import FileRecord

    line, _ = (folder / COMMIT).read_bytes().splitlines()
    return [FileRecord(name, size, None) for name, size in json.loads(line)["files"]]


def setting(*keys: Any) -> Any:
    """Return a change that puts the last key's value at the place the others lead to."""
    *path, last, value = keys

    def change(raw: Any) -> None:
        for key in path:
            raw = raw[key]
        raw[last] = value

    change.__name__ = "-".join(map(str, keys))[:60]
    return change


ROWS = ("arrays", 0, 3)
LIES = [
    setting("format", "other"),
    setting("version", 2),
    setting("version", [1, 0]),
    setting("version", True),
    setting("version", "1"),
    setting("save", "other"),
    setting("about", []),
    setting("about", {"a": 1}),
    setting("topology", None),
    setting("files", None),
    setting("files", []),
    setting("files", 0, ["a", 1]),
    setting("files", 0, 0, "../a"),
    setting("files", 0, 0, None),
    setting("files", 0, 1, -1),
    setting("files", 0, 1, 1 << 70),
    setting("files", 0, 1, 5.5),
    setting("files", 0, 1, 17),
    setting("files", 0, 2, "00"),
    setting("files", 0, 2, "x" * 16),
    setting("files", 0, 2, 5),
    setting("files", 0, 2, "0" * (1 << 16)),
    setting("arrays", None),
    setting("arrays", {}),
    setting("arrays", []),
    setting("arrays", 0, []),
    setting("arrays", 0, {"a": 1}),
    setting("arrays", 0, 0, "model"),
    setting("arrays", 0, 0, [1.5]),
    setting("arrays", 0, 0, [True]),
    setting("arrays", 0, 0, [[]]),
    setting("arrays", 0, 0, ["elsewhere"]),
    setting("arrays", 1, 0, ["model", "a.w"]),
    setting("arrays", 0, 1, "float3"),
    setting("arrays", 0, 1, "unknown"),
    setting("arrays", 0, 1, 5),
    setting("arrays", 0, 1, []),
    setting("arrays", 0, 2, [-1]),
    setting("arrays", 0, 2, [1.0]),
    setting("arrays", 0, 2, {}),
    setting("arrays", 0, 2, "ab"),
    setting("arrays", 0, 2, [1 << 70]),
    setting("arrays", 0, 2, [1] * 65),
    setting("arrays", 0, 2, [1, 2, 3]),
    setting(*ROWS, [0]),
    setting(*ROWS, "000000"),
    setting(*ROWS, {}),
    setting(*ROWS, [[0, 0, 0, 0, 0, 0]]),
    setting(*ROWS, 0, 99),
    setting(*ROWS, 0, -1),
    setting(*ROWS, 0, None),
    setting(*ROWS, 1, 1 << 64),
    setting(*ROWS, 1, 0.5),
    setting(*ROWS, 1, "0"),
    setting("ties", None),
    setting("ties", {}),
    setting("ties", [[["model", "tied"]]]),
    setting("ties", [[["model", "tied"], 99]]),
    setting("ties", [[["model", "tied"], -1]]),
    setting("ties", [[["model", "a.w"], 0]]),
    setting("ties", [["model", 0]]),
    setting("ties", []),
    setting("nest", {"$array": 99}),
    setting("nest", {"$array": -1}),
    setting("nest", {"model": {"a.w": {"$array": 1}}}),
    setting("nest", {"x": {"$array": 0}}),
    setting("nest", {"$nope": 0}),
    setting("nest", {"$tuple": 0}),
]


@pytest.mark.parametrize("change", LIES, ids=lambda c: c.__name__)
def test_no_field_of_the_manifest_is_believed(tmp_path: Path, change: Any) -> None:
    write_step(tmp_path, state())
    lie(tmp_path, change)
    with pytest.raises((FormatError, UnsafeError, UnsupportedError, IncompleteError)) as caught:
        open_checkpoint(str(tmp_path))
    assert len(str(caught.value)) < 2000


@pytest.mark.parametrize("field", ["format", "version", "save", "about", "topology", "files", "arrays", "ties", "nest"])
def test_no_field_of_the_manifest_may_be_missing(tmp_path: Path, field: str) -> None:
    write_step(tmp_path, state())
    lie(tmp_path, lambda raw: raw.pop(field))
    with pytest.raises(FormatError, match=field):
        open_checkpoint(str(tmp_path))


def test_a_manifest_that_was_changed_is_not_the_one_that_was_committed(tmp_path: Path) -> None:
    write_step(tmp_path, state())
    path = tmp_path / manifest_name(SAVE)
    data = path.read_bytes()
    path.write_bytes(data.replace(b'"step":100', b'"step":101'))
    with pytest.raises(ChecksumError, match="manifest"):
        open_checkpoint(str(tmp_path))
    path.write_bytes(data + b" ")
    with pytest.raises(TruncatedError, match="size"):
        open_checkpoint(str(tmp_path))


def test_json_that_nests_for_ever_is_refused(tmp_path: Path) -> None:
    write_step(tmp_path, state())
    reader = opened(tmp_path)
    commit(tmp_path, replace(reader.contents, tree=1))
    data = (tmp_path / manifest_name(SAVE)).read_bytes().replace(b'"nest":1', b'"nest":' + b"[" * 20000 + b"]" * 20000)
    (tmp_path / manifest_name(SAVE)).write_bytes(data)
    (tmp_path / COMMIT).write_bytes(encode_commit(SAVE, data, reader.contents.files))
    with pytest.raises(FormatError):
        open_checkpoint(str(tmp_path))


def test_one_payload_file_opens_like_any_other_and_its_conversion_is_no_step(tmp_path: Path) -> None:
    write_step(tmp_path / "src", state(), alone=("model",))
    index = json.loads((tmp_path / "src" / "model.safetensors.index.json").read_text())
    shardckpt.consolidate(str(tmp_path / "src" / index["weight_map"]["a.w"]), str(tmp_path / "out"))
    reader = open_checkpoint(str(tmp_path / "out"))
    assert reader.manifest.format == "safetensors"
    assert KEY not in reader.manifest.metadata
    assert_same(reader, ("a.w",), W)
