"""Small files that would take gigabytes or hours: each is refused within the budget of its size, or read within it."""

from __future__ import annotations

import hashlib
import io
import json
import pickle
import struct
import tracemalloc
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

import shardckpt
from shardckpt.encodings import budget as budget_module
from shardckpt.encodings.budget import FILE_FACTOR, FREE_BYTES, ReadBudget, check_hashes, check_paths
from shardckpt.encodings.pickle_reader import InstanceStub, load
from shardckpt.encodings.safetensors import parse_header, parse_json
from shardckpt.encodings.zip_archive import walk_front
from shardckpt.errors import CheckpointError, FormatError, TruncatedError, UnsafeError, UnsupportedError, show
from shardckpt.native.commit import COMMIT
from shardckpt.native.manifest_json import ManifestContents, decode_manifest, encode_manifest
from shardckpt.offline.repair import read_described
from shardckpt.reader import Source
from shardckpt.readers.registry import detect
from tests.encodings.test_pickle_reader import pairs_of_one_hash
from tests.kit.stores.memory_store import MemoryStore

MANY = 1 << 16
SMALL = 4 << 20
MARGIN = 2 << 20
"""Of the budget in these tests, a sixteenth of the real one: bombs of a sixteenth are as good."""
LIST = b"cbuiltins\nlist\n\x94"
BIG_TUPLE = b"(" + b"K\x00" * MANY + b"t\x94"


@pytest.fixture
def small_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget_module, "FREE_BYTES", SMALL)


def peak_of(act: Callable[[], object]) -> int:
    """Return the most bytes that were in use at once while something was refused."""
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError):
            act()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def zipped(pickled: bytes, method: int = zipfile.ZIP_DEFLATED) -> bytes:
    """Return a file of torch.save with such a pickle in it."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", method) as archive:
        archive.writestr("a/data.pkl", pickled)
        archive.writestr("a/version", b"3")
    return out.getvalue()


def opened(files: Mapping[str, bytes], named: str | None = None) -> object:
    source = Source(MemoryStore(files), named)
    return detect(source).open(source)


def nested(depth: int) -> bytes:
    """Return a tuple of two that are one tuple of two, and so on: 2**depth leaves in two bytes each."""
    return b"\x8c\x04aaaa" + b"2\x86" * depth


def colliding_pairs(number: int) -> bytes:
    def long(value: int) -> bytes:
        raw = value.to_bytes(9, "little", signed=True)
        return b"\x8a\x09" + raw

    return b"".join(long(a) + long(b) + b"\x86N" for a, b in pairs_of_one_hash(number))


PICKLES = {
    "copies that are kept": lambda: BIG_TUPLE + LIST + b"h\x01h\x00\x85R" * 1500 + b"N.",
    "copies that are dropped": lambda: BIG_TUPLE + LIST + b"h\x01h\x00\x85R0" * 2000 + b"N.",
    "sets of a tuple": lambda: BIG_TUPLE + b"cbuiltins\nset\n\x94" + b"h\x01h\x00\x85R0" * 2000 + b"N.",
    "sizes of a tuple": lambda: BIG_TUPLE + b"ctorch\nSize\n\x94" + b"h\x01h\x00\x85R0" * 2000 + b"N.",
    "bytes of a text": lambda: (
        b"X" + struct.pack("<I", MANY) + b"a" * MANY + b"\x94\x8c\x06latin1\x94c_codecs\nencode\n\x94"
        + b"h\x02h\x00h\x01\x86R" * 2000 + b"N."
    ),
    "empty sets": lambda: b"\x8f" * (4 * MANY) + b"N.",
    "empty dicts": lambda: b"}" * (4 * MANY) + b"N.",
    "empty lists": lambda: b"]" * (4 * MANY) + b"N.",
    "tuples of tuples": lambda: b"N" + b"\x85" * (4 * MANY) + b".",
    "marks": lambda: b"(" * (4 * MANY) + b".",
    "one tensor under many names": lambda: (
        b"ctorch._utils\n_rebuild_tensor_v2\n(((\x8c\x07storagectorch\nFloatStorage\n\x8c\x010\x8c\x03cpuK\x01tQ"
        b"K\x00K\x01\x85K\x01\x85\x89}tR\x94](" + b"h\x00" * MANY + b"e."
    ),
    "one long text under many names": lambda: (
        b"X" + struct.pack("<I", MANY) + b"a" * MANY + b"\x94](" + b"h\x00" * 5000 + b"e."
    ),
    "one long key above many": lambda: (
        b"}X" + struct.pack("<I", MANY) + b"a" * MANY + b"}("
        + b"".join(b"\x8c\x05%05dN" % n for n in range(5000)) + b"us."
    ),
    "getattr of nested tuples": lambda: b"cbuiltins\ngetattr\nctorch\nTensor\n" + nested(60) + b"\x86R.",
    "nested tuples as a persistent id": lambda: nested(60) + b"Q.",
    "keys of one hash": lambda: b"}(" + colliding_pairs(2000) + b"u.",
}  # fmt: skip


@pytest.mark.usefixtures("small_budget")
@pytest.mark.parametrize("name", PICKLES)
def test_a_pickle_costs_no_more_than_its_file_may(name: str) -> None:
    file = zipped(b"\x80\x04" + PICKLES[name]())
    assert peak_of(lambda: opened({"a.pt": file}, "a.pt")) < SMALL + FILE_FACTOR * len(file) + MARGIN


@pytest.mark.usefixtures("small_budget")
@pytest.mark.parametrize("name", PICKLES)
def test_metadata_of_dcp_costs_no_more_than_its_file_may(name: str) -> None:
    pickled = b"\x80\x04" + PICKLES[name]()
    files = {".metadata": pickled, "__0_0.distcp": b"x"}
    assert peak_of(lambda: opened(files)) < SMALL + FILE_FACTOR * len(pickled) + MARGIN


def test_what_is_made_and_dropped_again_and_again_is_counted() -> None:
    raw = b"\x80\x04" + BIG_TUPLE + LIST + b"h\x01h\x00\x85R0" * 3 + b"N."
    budget = ReadBudget(len(raw))
    full = budget.left
    load(raw, where="x", budget=budget)
    assert full - budget.left > 3 * 8 * MANY


def test_one_budget_serves_all_pickles_of_a_file() -> None:
    budget = ReadBudget(0)
    raw = b"\x80\x04" + b"]" * (8 * MANY) + b"."
    load(raw, where="x", budget=budget)
    with pytest.raises(UnsafeError, match="would cost more"):
        load(raw, where="x", budget=budget)


def test_a_sparse_file_earns_its_pickle_nothing() -> None:
    assert ReadBudget(1 << 50, 1000).left < FREE_BYTES + (1 << 16)


def test_an_honest_checkpoint_leaves_most_of_its_budget() -> None:
    state = {"state": {i: {"step": torch.tensor(1.0), "exp_avg": torch.zeros(4)} for i in range(2000)}}
    out = io.BytesIO()
    torch.save(state, out)
    reader = opened({"a.pt": out.getvalue()}, "a.pt")
    assert len(reader.manifest.tensors) == 4000  # type: ignore[attr-defined]
    with zipfile.ZipFile(out) as archive:
        pickled = archive.read("archive/data.pkl")
    budget = ReadBudget(len(pickled))
    full = budget.left
    load(pickled, where="x", persistent=lambda key: key, budget=budget)
    assert full - budget.left < 12 * len(pickled)


# JSON


K = 2**61 - 1


def step(nest: object, arrays: list[object]) -> dict[str, bytes]:
    """Return the files of a native step whose nest and arrays are a stranger's."""
    save = "0mwqkzsavex3s13"
    payload = f"{save}-00000-00.safetensors"
    manifest = {
        "format": "shardckpt manifest",
        "version": 1,
        "save": save,
        "about": {},
        "topology": {},
        "files": [[payload, 8, "0" * 16]],
        "arrays": arrays,
        "ties": [],
        "nest": nest,
    }
    data = json.dumps(manifest, separators=(",", ":")).encode()
    name = f"{save}.manifest.json"
    commit = {
        "format": "shardckpt",
        "version": 1,
        "features": [],
        "save": save,
        "manifest": [name, len(data), hashlib.sha256(data).hexdigest()],
        "files": [[payload, 8]],
    }
    line = json.dumps(commit, separators=(",", ":")).encode() + b"\n"
    return {name: data, payload: bytes(8), COMMIT: line + hashlib.sha256(line).hexdigest().encode() + b"\n"}


@pytest.mark.parametrize(
    "files",
    [
        step({"x": {"$dict": [[K * i, 0] for i in range(1, 2000)]}}, []),
        step({"x": {"$set": [K * i for i in range(1, 2000)]}}, []),
        step({"x": {"$dict": [[{"$tuple": list(pair)}, 0] for pair in pairs_of_one_hash(2000)]}}, []),
        step(None, [[["a", K * i], "float32", [0], []] for i in range(1, 2000)]),
        step(None, [[[K * i, str(i)], "float32", [0], []] for i in range(1, 2000)]),
    ],
    ids=["dict", "set", "pairs", "paths", "first keys"],
)
def test_keys_of_a_step_that_hash_alike_are_refused(files: dict[str, bytes]) -> None:
    with pytest.raises(UnsafeError, match="one hash"):
        opened(files)


def orbit_keys() -> list[int]:
    """Return numbers of different hashes, of which the last ones meet thousands of the others in a dict."""
    size = 1 << 13
    orbit = [0]
    while len(orbit) < size:
        orbit.append((5 * orbit[-1] + 1) % size)
    run = orbit[:3500]
    place = {slot: i for i, slot in enumerate(orbit)}
    chosen = []
    for key in range(size, 1 << 18):
        slot, left = key % size, key
        while left and place[slot] < len(run):
            left >>= 5
            slot = (5 * slot + left + 1) % size
        if place[slot] < len(run) // 4 and not left:
            chosen.append(key)
    return run + chosen[:1500]


ORBIT = orbit_keys()


@pytest.mark.parametrize("made", [dict.fromkeys(ORBIT), {key: {key: 0} for key in ORBIT}, {-1: dict.fromkeys(ORBIT)}])
def test_numbers_that_fill_the_places_where_others_are_looked_for_are_refused(made: object) -> None:
    assert len(set(map(hash, ORBIT))) == len(ORBIT)
    with pytest.raises(UnsafeError, match="meet in one place"):
        load(pickle.dumps(made), where="x")


@pytest.mark.parametrize(
    "files",
    [
        step({"x": {"$dict": [[key, 0] for key in ORBIT]}}, []),
        step(None, [[["a", key], "float32", [0], []] for key in ORBIT]),
        step(None, [[[key, "a"], "float32", [0], []] for key in ORBIT]),
    ],
    ids=["dict", "paths", "first keys"],
)
def test_numbers_of_a_step_that_fill_the_places_of_others_are_refused(files: dict[str, bytes]) -> None:
    with pytest.raises(UnsafeError, match="meet in one place"):
        opened(files)


@pytest.mark.parametrize("shift", range(0, 60, 4))
def test_multiples_of_powers_of_two_are_read(shift: int) -> None:
    keys = [n << shift for n in range(3000)]
    check_hashes(keys)
    load(pickle.dumps((dict.fromkeys(keys), set(keys))), where="x")


def test_paths_with_large_numbers_are_read() -> None:
    check_paths([("a", 2**62 + n * n) for n in range(5000)])
    check_paths([(2**62, str(n)) for n in range(5000)])


def test_the_hash_tables_of_paths_of_text_are_not_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    monkeypatch.setattr(budget_module, "_build_table", lambda keys, is_set: made.append(len(keys)))
    check_paths([("model", f"layers.{n}.weight") for n in range(500)])
    assert made == []
    check_paths([("model", f"layers.{n}.weight") for n in range(500)] + [("model", 1)])
    assert made


def test_lists_of_lists_are_refused_before_they_are_made() -> None:
    body = b'{"a":[' + b"[]," * 3_000_000 + b"[]]}"
    assert peak_of(lambda: parse_json(body, where="x")) < 1 << 20


def test_brackets_are_counted_only_in_a_text_long_enough_to_exceed_the_budget() -> None:
    class Text(bytes):
        counted = 0

        def count(self, *args: bytes) -> int:  # type: ignore[override]
            Text.counted += 1
            return super().count(*args)

    most = FREE_BYTES // (64 - FILE_FACTOR)
    parse_json(Text(b'{"a":[]}'.ljust(most)), where="x")
    assert Text.counted == 0
    parse_json(Text(b'{"a":[]}'.ljust(most + 2)), where="x")
    assert Text.counted == 3


@pytest.mark.usefixtures("small_budget")
def test_what_could_not_be_read_back_is_not_written() -> None:
    fine = ManifestContents("0save", (), (), tree=[{"step": n, "loss": 0.5} for n in range(50_000)])
    assert decode_manifest(encode_manifest(fine)).tree == fine.tree
    with pytest.raises(UnsupportedError, match=r"small lists.*Save them as tensors"):
        encode_manifest(ManifestContents("0save", (), (), tree=[[] for _ in range(200_000)]))


@pytest.mark.parametrize(
    "body",
    [
        b'{"a":{"dtype":"F32","shape":[%s,%s],"data_offsets":[0,4]}}' % (b"9" * 4200, b"9" * 4200),
        b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[%s,-%s]}}' % (b"1" * 4300, b"9" * 4300),
        b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,%s]}}' % (b"1" * 5000),
        b'{"a":' + b"[" * 1_000_000 + b"]" * 1_000_000 + b"}",
        b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
        b'{"a":{"dtype":"F32","shape":[1e999],"data_offsets":[0,4]}}',
        b'{"a":{"dtype":["F32"],"shape":[],"data_offsets":[0,4]}}',
        b'{"a":{"dtype":"F32","shape":{"1":1},"data_offsets":[0,4]}}',
        b'{"a":{"dtype":"F32","shape":"11","data_offsets":"04"}}',
        b'{"a":[1,2,3]}',
        b'{"a":7}',
        b'{"__metadata__":{"a":1}}',
        b'{"\\ud800":{"dtype":"F32","shape":[1],"data_offsets":[0,5]}}',
    ],
    ids=range(13),
)
def test_a_header_of_anything_is_a_typed_error(body: bytes) -> None:
    with pytest.raises(CheckpointError) as caught:
        parse_header(body, where="x")
    assert len(str(caught.value)) < 5000


def test_a_header_of_empty_tensors_takes_at_most_17_times_its_bytes(tmp_path: Path) -> None:
    """docs/safety.md has the number."""
    entries = (b'"t%d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}' % at for at in range(20_000))
    body = b"{%s}" % b",".join(entries)
    file = tmp_path / "model.safetensors"
    file.write_bytes(struct.pack("<Q", 2) + b"{}")
    shardckpt.inspect(file)  # imports
    file.write_bytes(struct.pack("<Q", len(body)) + body)
    tracemalloc.start()
    shardckpt.inspect(file)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak <= 17 * len(body)


def test_a_chunk_of_other_dimensions_than_its_array_is_a_typed_error() -> None:
    for chunk in (
        (["a"], "float32", [2], [0, 0], [2]),
        (["a"], "float32", [2], [0], []),
        (["a"], "float32", [], [0], [2]),
    ):
        told = json.dumps({"version": 1, "save": "s", "chunks": [chunk]})
        body = json.dumps({"__metadata__": {"shardckpt": told}}).encode()
        data = struct.pack("<Q", len(body)) + body
        with pytest.raises(FormatError, match="dimensions"):
            read_described(MemoryStore({"f": data}), {"f": len(data)})


# Archives that are walked


def front(descriptors: int) -> bytes:
    """Return the front of an archive whose one entry seems to end again and again, each time with a wrong checksum."""
    head = struct.pack("<4sHHHHHIIIHH", b"PK\x03\x04", 20, 8, 0, 0, 0, 0, 0, 0, 10, 0) + b"a/data.pkl"
    out = bytearray(head)
    for _ in range(descriptors):
        size = len(out) - len(head)
        out += struct.pack("<4sIII", b"PK\x07\x08", 1, size, size) + b"PK\x03\x04"
    return bytes(out)


def test_the_front_of_an_archive_is_summed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    import zlib

    summed = 0
    crc32 = zlib.crc32

    def counted(data: bytes, start: int = 0) -> int:
        nonlocal summed
        summed += len(data)
        return crc32(data, start)

    monkeypatch.setattr(zlib, "crc32", counted)
    data = front(5000)
    with pytest.raises(TruncatedError):
        walk_front(data, lambda name: "/data/" in name, where="x")
    assert summed <= len(data)


def test_an_entry_that_seems_to_end_without_end_is_refused() -> None:
    with pytest.raises(FormatError, match="again and again"):
        walk_front(front(0) + b"PK\x07\x08" * 200_000, lambda name: "/data/" in name, where="x")


# Messages


def test_a_message_shows_no_more_than_is_read() -> None:
    twice: object = "a"
    for _ in range(100):
        twice = (twice, twice)
    assert show(twice) == "a tuple of 2 values"
    assert show([twice]) == "a list of 1 values"
    assert show({1: twice}) == "a dict of 1 values"
    assert show((1, "a", [2.5])) == "(1, 'a', [2.5])"
    assert show(10**5000) == "a number of 16610 bits"
    assert show(["a" * 100_000] * 60) == "a list of 60 values"
    assert str(FormatError("x", found=10**5000, expected=[10**5000])).startswith("x; found a number of")


def test_classes_of_a_pickle_are_still_compared_by_identity() -> None:
    raw = pickle.dumps({complex(1, 2): 0}, protocol=2)
    with pytest.raises(FormatError, match="as a key"):
        load(raw, where="x")
    assert isinstance(load(b"cargparse\nNamespace\n)\x81.", where="x"), InstanceStub)
