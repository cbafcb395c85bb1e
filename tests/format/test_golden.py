"""Steps of every published version of the format are read for ever, bit for bit; their files never change."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from golden_state import based, before_based, full, large, large_based, small
from materialise import assert_same
from native_writer import scalar
from safetensors import safe_open

import shardckpt
from shardckpt.format.encodings.tagged_json import ArrayRef, NamedValue
from shardckpt.format.native.commit import COMMIT, encode_commit, manifest_name
from shardckpt.format.native.manifest_json import decode_manifest, encode_manifest
from shardckpt.format.native.payload import KEY, plan_payloads
from shardckpt.format.native.reader import NativeReader
from shardckpt.format.native.recovery import read_described
from shardckpt.format.registry import open_checkpoint
from shardckpt.format.value_stats import ValueStats

GOLDEN = Path(__file__).parent / "golden"
SCHEMA = json.loads((Path(__file__).parents[2] / "docs" / "format.schema.json").read_text(encoding="utf-8"))

STEPS = {
    "1.0/small": "acfabaa18a3fdf28f5d30c41cced3151b6ff5383a898011449c57d8c4251ae87",
    "1.0/ranks": "70fc777aca670f1ebaa2e99325050e72be1119f2e06b612bafb480c5381e980e",
    "1.0/unhashed": "84a6ffe464e160baf1913009fe4ff0ee3ef4bd2aeb82e8bca5272b0fb05cda63",
    "1.0/digests": "ffaeadb352e738200d8397f96e6d9a25f109d12d377f0dded25528d13bb346ef",
    "1.0/based": "1b903d0dfbf8187447d2fcd354992cb9233a3511c67358e488e4247fc85400bb",
    "1.1/large": "2c31340f5731d1c196ae335fc1b13abe704becf50289bf58ad7a503073fa0b36",
    "1.1/large-based": "c1a63aa6c7f363c36bf97f343e47456753e54e4424eca1370e94eb0b61ddf771",
    "1.2/stats": "d4ef5fd3e58884df5ac9285ca19543edc26f9e007641f55dbc5edac0fc42c1e7",
}
"""Folder to the SHA-256 of its `COMMIT`, which vouches for every other byte."""


@pytest.fixture(params=STEPS)
def step(request: pytest.FixtureRequest) -> Path:
    return GOLDEN / request.param


def opened(step: Path) -> NativeReader:
    reader = open_checkpoint(str(step))
    assert isinstance(reader, NativeReader)
    return reader


def truth(step: Path) -> dict[Any, Any]:
    truths = {"ranks": full, "digests": before_based, "based": based, "large": large, "large-based": large_based}
    return truths.get(step.name, small)()


def test_no_golden_file_ever_changes(step: Path) -> None:
    key = str(step.relative_to(GOLDEN))
    assert hashlib.sha256((step / COMMIT).read_bytes()).hexdigest() == STEPS[key]
    assert shardckpt.verify(str(step)).ok
    listed = {file.name for file in step.iterdir()} - {COMMIT}
    reader = opened(step)
    assert listed == {*reader.commit.files, reader.commit.manifest}


def test_the_nest_comes_back(step: Path) -> None:
    reader = opened(step)
    records = reader.contents.arrays
    used: list[int] = []

    def compare(found: Any, expected: Any, path: str) -> None:
        if isinstance(expected, torch.Tensor):
            assert isinstance(found, ArrayRef), path
            used.append(found.number)
            assert_same(reader, records[found.number].path, expected)
            return
        if isinstance(expected, torch.dtype):
            assert found == NamedValue("dtype", str(expected).removeprefix("torch.")), path
            return
        if isinstance(expected, np.generic):
            assert found == scalar(expected), path
            return
        assert type(found) is type(expected), path
        if isinstance(expected, dict):
            assert [*found] == [*expected], path
            for key, value in expected.items():
                compare(found[key], value, f"{path}.{key}")
        elif isinstance(expected, (list, tuple)):
            assert len(found) == len(expected), path
            for i, value in enumerate(expected):
                compare(found[i], value, f"{path}.{i}")
        else:
            assert repr(found) == repr(expected), path

    compare(reader.decode_state(lambda ref: ref), truth(step), "")
    assert set(used) == set(range(len(records)))


def test_tied_names_share_one_array() -> None:
    manifest = opened(GOLDEN / "1.0" / "ranks").manifest
    assert manifest.aliases == {("model", "tied"): ("model", "a.b")}
    assert_same(opened(GOLDEN / "1.0" / "ranks"), ("model", "tied"), torch.tensor([1.5, -2.0, 3.0]).bfloat16())
    assert_same(opened(GOLDEN / "1.0" / "ranks"), ("a", "b"), torch.tensor([True, False]))


def test_what_this_release_writes_is_still_the_same_byte_for_byte(step: Path) -> None:
    """Canonical: a manifest has one form, so that digests can be compared."""
    reader = opened(step)
    manifest = (step / reader.commit.manifest).read_bytes()
    contents = decode_manifest(manifest)
    assert encode_manifest(contents) == manifest
    assert manifest_name(contents.save) == reader.commit.manifest
    assert encode_commit(contents.save, manifest, contents.files) == (step / COMMIT).read_bytes()
    payload = {f.name: f.nbytes for f in contents.files if f.name.endswith(".safetensors") and not f.base}
    for described in read_described(reader.raw_store, payload):
        writer = int(described.name.split("-")[1])
        model = ("model",) if (step / "model.safetensors.index.json").exists() else None
        carry = described.carry or None
        laid = plan_payloads(described.save, writer, described.chunks, model=model, carry=carry)
        head = (step / described.name).read_bytes()
        assert any(head.startswith(each.header) for each in laid)


def test_repair_gives_the_same_files(step: Path, tmp_path: Path) -> None:
    shutil.copytree(step.parent, tmp_path / "run")
    copy = tmp_path / "run" / step.name
    (copy / COMMIT).unlink()
    shardckpt.repair(str(copy))
    assert shardckpt.verify(str(copy)).ok
    if step.name != "unhashed":
        assert (copy / COMMIT).read_bytes() == (step / COMMIT).read_bytes()


def test_hashes_of_sub_blocks_are_kept_where_a_file_has_several_also_of_a_base() -> None:
    for name, lengths in (("large", [8 * 3]), ("large-based", [0, 8 * 3])):
        reader = opened(GOLDEN / "1.1" / name)
        assert [len(file.sub_hashes) for file in reader.contents.files] == lengths
        assert reader.commit.version == (1, 1)


def test_a_reader_of_version_1_0_finds_all_that_it_knows() -> None:
    """It ignores `sub_hashes`; everything else has the form of version 1.0."""
    step = GOLDEN / "1.1" / "large"
    reader = opened(step)
    raw = json.loads((step / reader.commit.manifest).read_bytes())
    del raw["sub_hashes"]
    old = decode_manifest(json.dumps(raw).encode())
    assert [file.hashes for file in old.files] == [file.hashes for file in reader.contents.files]
    assert not any(file.sub_hashes for file in old.files)


def test_statistics_are_read_and_those_who_do_not_know_them_find_the_rest() -> None:
    step = GOLDEN / "1.2" / "stats"
    reader = opened(step)
    assert reader.value_stats(("model", "w")) == ValueStats(0, 0, 0, 4, 1.0, 4.0, 10.0, 30.0)
    raw = json.loads((step / reader.commit.manifest).read_bytes())
    assert raw.pop("stats")
    old = decode_manifest(json.dumps(raw).encode())
    assert old.arrays == tuple(record._replace(stats=b"") for record in reader.contents.arrays)


# The schema


def described(name: str) -> dict[str, Any]:
    return {"$ref": f"#/$defs/{name}", "$defs": SCHEMA["$defs"]}


def test_the_schema_describes_what_is_written(step: Path) -> None:
    line = (step / COMMIT).read_bytes().splitlines()[0]
    jsonschema.validate(json.loads(line), described("commit"))
    [manifest] = step.glob("*.manifest.json")
    jsonschema.validate(json.loads(manifest.read_bytes()), described("manifest"))
    for file in step.glob("*.safetensors"):
        with safe_open(file, "np") as payload:
            jsonschema.validate(json.loads(payload.metadata()[KEY]), described("payload"))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("commit", {"version": ["1", 0]}),
        ("commit", {"files": [["../a", 1]]}),
        ("commit", {"manifest": ["a", 1]}),
        ("commit", {"bases": [["run/one", []]]}),
        ("commit", {"bases": [["../one/..", [["a", 1]]]]}),
        ("manifest", {"bases": [["../one", "0mwqkzsavex3s13"]]}),
        ("manifest", {"files": [["a", 1, None, 0]]}),
        ("manifest", {"digests": ["0"]}),
        ("manifest", {"sub_hashes": ["0"]}),
        ("manifest", {"stats": ["0" * 64]}),
        ("manifest", {"stats": [None]}),
        ("manifest", {"sub_hashes": [None]}),
        ("manifest", {"variants": [["ema", ["model"]]]}),
        ("manifest", {"arrays": [[["a"], "float32", [2]]]}),
        ("manifest", {"arrays": [[["a"], "float32", [-2], []]]}),
        ("manifest", {"nest": {"$nope": 1}}),
        ("manifest", {"nest": {"$array": -1}}),
        ("payload", {"chunks": [[["a"], "float32", [2], [0]]]}),
    ],
)
def test_the_schema_refuses_what_the_reader_refuses(name: str, change: dict[str, Any]) -> None:
    step = GOLDEN / "1.0" / "small"
    texts = {
        "commit": (step / COMMIT).read_bytes().splitlines()[0],
        "manifest": next(step.glob("*.manifest.json")).read_bytes(),
    }
    with safe_open(next(step.glob("*.safetensors")), "np") as payload:
        texts["payload"] = payload.metadata()[KEY].encode()
    content = json.loads(texts[name])
    jsonschema.validate(content, described(name))
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(content | change, described(name))
