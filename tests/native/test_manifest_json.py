"""A wrong value in a step's JSON is one typed error with the file and the field."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardckpt.errors import CheckpointError, FormatError, UnsafeError, UnsupportedError
from shardckpt.native.commit import COMMIT, decode_commit
from shardckpt.native.manifest_json import decode_manifest
from tests.kit.damage.json_edits import Change, put

GOLDEN = Path(__file__).parent / "golden" / "1"
Refused = tuple[Change, type[CheckpointError], str]


def drop(key: str) -> Change:
    return lambda content: content.pop(key)


IN_MANIFEST: list[Refused] = [
    (put("manifest", "format"), FormatError, "x, format: must be one of ('shardckpt manifest',); found manifest"),
    (put(2, "version"), UnsupportedError, "x, version: this step has version 2 of the format; found 2; expected 1"),
    (put(True, "version"), UnsupportedError, "x, version: this step has version True"),
    (drop("version"), FormatError, "x, version: is missing"),
    (drop("nest"), FormatError, "x, nest: is missing"),
    (drop("files"), FormatError, "x, files: is missing"),
    (put("A B", "save"), FormatError, "x, save: must be text like [0-9a-z]{1,64}; found A B"),
    (put({"a": 1}, "about"), FormatError, "x, about.a: must be text; found 1"),
    (put([], "topology"), FormatError, "x, topology: must be an object; found []"),
    (put("one", "bases", 0, 0), UnsafeError, "x, bases[0].url: this is not a reference to a base; found one"),
    (put("zz", "bases", 0, 2), FormatError, "x, bases[0].sha256: must be text like ([0-9a-f]{64})?; found zz"),
    (put("", "bases", 0, 2), FormatError, "x: a base is listed twice, or has only a save or a SHA-256; found"),
    (put("../a", "files", 1, 0), UnsafeError, "x, files[1].name: this name is not a file's in the step's folder"),
    (put(-1, "files", 0, 1), FormatError, "x, files[0].nbytes: must be 0 to"),
    (put(1 << 62, "files", 0, 1), FormatError, "x, files[0].nbytes: must be 0 to"),
    (put(1.0, "files", 0, 1), FormatError, "x, files[0].nbytes: must be an integer with at most 64 bits; found 1.0"),
    (put("zz", "files", 0, 2), FormatError, "x, files[0].hashes: must be text with hexadecimal digits; found zz"),
    (put(-1, "files", 1, 3), FormatError, "x, files[1].base: must be 0 to"),
    (put(None, "files", 1, 3), FormatError, "x, files[1].base: must be"),
    (put([1.5], "arrays", 0, 0), FormatError, "x, arrays[0].path: must be a list with texts and integers; found [1.5]"),
    (put("int7", "arrays", 0, 1), UnsupportedError, "x, arrays[0].dtype: an array has an unknown type; found int7"),
    (put([-1], "arrays", 0, 2), FormatError, "x, arrays[0].shape: must be a list of counts; found [-1]"),
    (put([1 << 64], "arrays", 0, 3), FormatError, "x, arrays[0].rows: must be a list of counts"),
    (put({}, "arrays", 0, 3), FormatError, "x, arrays[0].rows: must be a list of counts; found {}"),
    (put(None, "digests"), FormatError, "x, digests: must be"),
    (put([], "digests"), FormatError, "x, digests: must be 1 to"),
    (put([[["a"], -1]], "ties"), FormatError, "x, ties[0][1]: must be 0 to"),
    (put([[["a"], 99]], "ties"), FormatError, "x: a path in 'ties' must be new and refer to an array; found a: 99"),
    (put([[["a"]]], "variants"), FormatError, "x, variants[0]: must be a list with 2 values; found [['a']]"),
    (put([[["a"], 3]], "variants"), FormatError, "x, variants[0][1]: must be a list with texts and integers; found 3"),
    (put([[["a"], None]] * 2, "variants"), FormatError, "x, variants: a key stands twice"),
]

IN_COMMIT: list[Refused] = [
    (put("shard", "format"), FormatError, "x, format: must be one of ('shardckpt',); found shard"),
    (put(2, "version"), UnsupportedError, "x, version: this step has version 2 of the format; found 2; expected 1"),
    (put([7], "features"), FormatError, "x, features[0]: must be text; found 7"),
    (put(["fog"], "features"), UnsupportedError, "x, features[0]: this step needs the feature 'fog'"),
    (put("../m", "manifest", 0), UnsafeError, "x, manifest.name: this name is not a file's in the step's folder"),
    (put("0", "manifest", 2), FormatError, "x, manifest.sha256: must be text like [0-9a-f]{64}; found 0"),
    (put(1 << 61, "manifest", 1), UnsafeError, "x: the manifest is too large"),
    (put("a", "files", 0, 1), FormatError, "x, files[0][1]: must be 0 to"),
    (put("a/b", "files", 0, 0), UnsafeError, "x, files[0][0]: this name is not a file's in the step's folder"),
    (lambda c: c["files"].append(c["files"][0]), FormatError, "x, files: a key stands twice"),
    (put(-1, "bases", 0, 1, 0, 1), FormatError, "x, bases[0][1][0][1]: must be 0 to"),
    (put([], "features"), FormatError, "x: the commit mark's features do not fit its bases"),
    (put(-1, "branch"), FormatError, "x, branch: must be 0 to"),
]


def check(decode: Callable[[bytes], object], content: Any, refused: Refused) -> None:
    change, error, text = refused
    change(content)
    with pytest.raises(CheckpointError) as caught:
        decode(json.dumps(content).encode())
    assert type(caught.value) is error
    assert str(caught.value).startswith(text)


@pytest.mark.parametrize("refused", IN_MANIFEST, ids=[text for _, _, text in IN_MANIFEST])
def test_a_wrong_value_in_a_manifest_is_named(refused: Refused) -> None:
    [manifest] = (GOLDEN / "based").glob("*.manifest.json")
    check(lambda data: decode_manifest(data, where="x"), json.loads(manifest.read_bytes()), refused)


@pytest.mark.parametrize("refused", IN_COMMIT, ids=[text for _, _, text in IN_COMMIT])
def test_a_wrong_value_in_a_commit_mark_is_named(refused: Refused) -> None:
    def decode(line: bytes) -> object:
        line += b"\n"
        return decode_commit(line + hashlib.sha256(line).hexdigest().encode() + b"\n", where="x")

    check(decode, json.loads((GOLDEN / "based" / COMMIT).read_bytes().splitlines()[0]), refused)


def test_readers_ignore_fields_that_they_do_not_know() -> None:
    [manifest] = (GOLDEN / "based").glob("*.manifest.json")
    data = manifest.read_bytes()
    assert decode_manifest(json.dumps({**json.loads(data), "new": [1]}).encode()) == decode_manifest(data)
