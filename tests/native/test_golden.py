"""Steps of the published format are read for ever, bit for bit; their files never change."""

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
from safetensors import safe_open

import shardckpt
from shardckpt.encodings.tagged_json import ArrayRef, NamedValue
from shardckpt.encodings.value_stats import ValueStats
from shardckpt.native.commit import COMMIT, encode_commit, manifest_name
from shardckpt.native.manifest_json import decode_manifest, encode_manifest
from shardckpt.native.payload import KEY, plan_payloads
from shardckpt.offline.repair import read_described
from tests.kit.writers.golden_state import based, before_based, full, large, large_based, small
from tests.kit.writers.materialise import assert_same
from tests.kit.writers.native_writer import opened, scalar

GOLDEN = Path(__file__).parent / "golden" / "1"
SCHEMA = json.loads((Path(__file__).parents[2] / "docs" / "format.schema.json").read_text(encoding="utf-8"))

STEPS = {
    "small": "72cd0ca5bad62e39dd13d3f8b186dec049d1eedbc69d5bfe0da3c9bb6880f597",
    "ranks": "c26aa59657f46e87777a5fab60bc06d2f94f851d70df2062643a4843ad5ce0d1",
    "unhashed": "cb4571032dd7095c66bcd138ee89b181ad1f74f9c2425431b36e95d03c2a63bc",
    "digests": "f96f2d196a374295601e0d19f8adaed34693242f66915577844ea9d495b8c55b",
    "based": "999b2dffe3b1085df2689cccaf3887001d85bbe9ec16eb699ce20e36ce7ee75b",
    "large": "9c379284e55b9c4294a690b4dd685256868a17416ea8e985ebf103c1bd091462",
    "large-based": "aead03ef99e18b0fdb1c38cbbd035902b3c6f482632a724e1c92828a8b70d92b",
    "grouped": "67732d8d0c367b69cb680ffd7c42822526d5e20b9ed59592f4043f3d95ad0c28",
    "stats": "2d3966d0a3f38572875403c9ca54cec126ddde0b0d06301ace2314ac216fb8bc",
}
"""Folder to the SHA-256 of its `COMMIT`, which vouches for every other byte."""


@pytest.fixture(params=STEPS)
def step(request: pytest.FixtureRequest) -> Path:
    return GOLDEN / request.param


def truth(step: Path) -> dict[Any, Any]:
    truths = {"ranks": full, "digests": before_based, "based": based, "large": large, "large-based": large_based}
    truths["grouped"] = large
    return truths.get(step.name, small)()


def test_no_golden_file_ever_changes(step: Path) -> None:
    assert hashlib.sha256((step / COMMIT).read_bytes()).hexdigest() == STEPS[step.name]
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
    manifest = opened(GOLDEN / "ranks").manifest
    assert manifest.aliases == {("model", "tied"): ("model", "a.b")}
    assert_same(opened(GOLDEN / "ranks"), ("model", "tied"), torch.tensor([1.5, -2.0, 3.0]).bfloat16())
    assert_same(opened(GOLDEN / "ranks"), ("a", "b"), torch.tensor([True, False]))


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
    if step.name not in ("unhashed", "grouped"):  # the former gets hashes, the latter those of blocks
        assert (copy / COMMIT).read_bytes() == (step / COMMIT).read_bytes()


@pytest.mark.parametrize(
    ("name", "lengths"), [("small", [8, 8]), ("large", [8 * 3]), ("grouped", [8]), ("large-based", [8, 8 * 3])]
)
def test_each_block_has_a_hash_also_in_a_base_or_each_group_if_there_are_too_many(
    name: str, lengths: list[int]
) -> None:
    files = opened(GOLDEN / name).contents.files
    assert [len(file.hashes or b"") for file in files] == lengths
    assert [file.is_grouped for file in files] == [name == "grouped"] * len(files)


def test_statistics_are_read_and_left_away_all_the_rest_is_the_same() -> None:
    step = GOLDEN / "stats"
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
        ("commit", {"version": "1"}),
        ("commit", {"version": 2}),
        ("manifest", {"version": [1, 0]}),
        ("payload", {"version": 0}),
        ("commit", {"files": [["../a", 1]]}),
        ("commit", {"manifest": ["a", 1]}),
        ("commit", {"bases": [["run/one", []]]}),
        ("commit", {"bases": [["../one/..", [["a", 1]]]]}),
        ("manifest", {"bases": [["../one", "0mwqkzsavex3s13"]]}),
        ("manifest", {"files": [["a", 1, None, 0]]}),
        ("manifest", {"digests": ["0"]}),
        ("manifest", {"files": [["a", 1, "0" * 15]]}),
        ("manifest", {"stats": ["0" * 64]}),
        ("manifest", {"stats": [None]}),
        ("manifest", {"variants": [["ema", ["model"]]]}),
        ("manifest", {"arrays": [[["a"], "float32", [2]]]}),
        ("manifest", {"arrays": [[["a"], "float32", [-2], []]]}),
        ("manifest", {"nest": {"$nope": 1}}),
        ("manifest", {"nest": {"$array": -1}}),
        ("payload", {"chunks": [[["a"], "float32", [2], [0]]]}),
    ],
)
def test_the_schema_refuses_what_the_reader_refuses(name: str, change: dict[str, Any]) -> None:
    step = GOLDEN / "small"
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
