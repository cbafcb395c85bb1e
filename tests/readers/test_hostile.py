"""Hostile input, for every registered reader: refused in one line or read right, and never anything else.

Whatever is done to a good checkpoint, each command ends with exit code 0 and a right result, or with 1 or 2 and exactly
one line on stderr; nothing lies under DST then, the source is untouched, and nothing it names was executed.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import pickle
import re
import resource
import shutil
import struct
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
import zstandard
from safetensors.torch import load_file
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

from shardckpt.native.payload import HF_INDEX
from shardckpt.readers.registry import BUILT_IN
from tests.kit.runs.command import ENVIRONMENT, Outcome, run_here
from tests.kit.writers.dcp_writers import archive, edit_metadata, put_object
from tests.kit.writers.samples import MODEL, SAMPLES

ALL = [(name, variant) for name, variants in SAMPLES.items() for variant in variants]
IDS = ["-".join(key) for key in ALL]
NO_SHAPES = "--shapes-from"
"""In the warning where a format stores no shapes: that the last rank is gone is then nothing anybody can see."""

VERBS = ("inspect", "verify", "consolidate")


@dataclass(frozen=True)
class Sample:
    """One checkpoint that may be damaged.

    Attributes:
        root: Folder that holds everything of the test.
        source: What the commands are given.
        folder: Folder of the checkpoint's files.
    """

    root: Path
    source: Path
    folder: Path

    @property
    def files(self) -> list[Path]:
        return sorted(p for p in self.folder.rglob("*") if p.is_file() and not p.is_symlink())

    @property
    def kinds(self) -> list[Path]:
        """One file of each kind: of those whose names differ by numbers alone, such as the ranks', the last."""
        return sorted({re.sub(r"\d+", "#", str(file.relative_to(self.folder))): file for file in self.files}.values())

    @property
    def canary(self) -> Path:
        return self.root / "canary"


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Sample]:
    """Build each sample once; tests change files and put them back."""
    built: dict[tuple[str, str], Sample] = {}

    def get(name: str, variant: str) -> Sample:
        if (name, variant) not in built:
            root = tmp_path_factory.mktemp(f"{name}-{variant}")
            built[name, variant] = Sample(root, SAMPLES[name][variant](root / "src"), root / "src")
        return built[name, variant]

    return get


@pytest.fixture(params=ALL, ids=IDS)
def sample(request: pytest.FixtureRequest, good: Callable[[str, str], Sample]) -> Iterator[Sample]:
    found = good(*request.param)
    before = contents(found.folder)
    yield found
    put_back(found.folder, before)


WHOLE = {("torch", "zip"), ("torch", "legacy"), ("dcp", "torch"), ("safetensors", "file"), ("native", "alone")}
"""Samples that meet every damage: of each encoding that formats share, the simplest."""
Damage = TypeVar("Damage")


def dealt(key: tuple[str, str], damages: Iterable[Damage]) -> list[Damage]:
    """Return the damages that a sample meets: those of `WHOLE` meet all, of the others three neighbours together.

    One reader of pickles, one of archives and one of safetensors serve every format. `pytest -m slow` does each damage
    to each sample.
    """
    turn = ALL.index(key)
    return [each for i, each in enumerate(damages) if key in WHOLE or (turn + i) % 3 == 0]


@pytest.fixture
def key(request: pytest.FixtureRequest) -> tuple[str, str]:
    """Format and variant of `sample`."""
    found: tuple[str, str] = request.node.callspec.params["sample"]
    return found


def fresh(tmp_path: Path, name: str, variant: str) -> Sample:
    if variant not in SAMPLES[name]:
        pytest.skip(f"this torch does not write {variant}")
    return Sample(tmp_path, SAMPLES[name][variant](tmp_path / "src"), tmp_path / "src")


def contents(folder: Path) -> dict[Path, bytes | str]:
    """Return every file's bytes, and every link's target."""
    return {
        p: str(p.readlink()) if p.is_symlink() else p.read_bytes()
        for p in sorted(folder.rglob("*"))
        if p.is_symlink() or p.is_file()
    }


def put_back(folder: Path, before: Mapping[Path, bytes | str]) -> None:
    shutil.rmtree(folder)
    for path, data in before.items():
        assert isinstance(data, bytes)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


@contextlib.contextmanager
def damaged(file: Path, data: bytes) -> Iterator[None]:
    original = file.read_bytes()
    file.write_bytes(data)
    try:
        yield
    finally:
        file.write_bytes(original)


def check(
    sample: Sample, what: str, *, expect: str = "same or refused", verbs: Sequence[str] = VERBS
) -> dict[str, Outcome]:
    """Run every command and hold it to the promise.

    Args:
        sample: Damaged.
        what: How, for messages.
        expect: `same`, `refused`, or `same or refused`: what `consolidate` may do.
        verbs: The commands.
    """
    before = contents(sample.folder)
    out = sample.root / "out"
    beside = sorted(p.name for p in sample.root.iterdir() if p != out)
    shutil.rmtree(out, ignore_errors=True)
    outcomes = {}
    for verb in verbs:
        found = run_here(verb, sample.source, *([out, "--part", "all"] if verb == "consolidate" else []))
        outcomes[verb] = found
        note = f"{what}: {verb}: {found}"
        assert found.code in {0, 1, 2}, note
        assert all(line.isprintable() for line in (found.out + found.err).splitlines()), note
        assert_lines(verb, found, note)
        if verb == "consolidate":
            assert (found.code == 0) == out.exists(), note
            assert not (expect == "refused" and found.code == 0), note
            assert not (expect == "same" and found.code != 0), note
            if found.code == 0 and NO_SHAPES not in found.err:
                assert_right(out, note)
            shutil.rmtree(out, ignore_errors=True)
    assert sorted(p.name for p in sample.root.iterdir()) == beside, what
    assert contents(sample.folder) == before, f"{what}: the source was changed"
    assert not sample.canary.exists(), f"{what}: code ran"
    return outcomes


def assert_lines(verb: str, found: Outcome, note: str) -> None:
    """Hold stderr to warnings and, where the command failed, one line; `verify` lists problems on stdout instead."""
    lines = [line for line in found.err.splitlines() if not line.startswith(("warning: ", "left out: "))]
    listed = verb == "verify" and found.code == 1 and found.out
    assert len(lines) == (0 if found.code == 0 or listed else 1), note
    assert all(line.startswith("shardckpt: ") for line in lines), note
    assert "fault of shardckpt" not in found.err, note


def assert_right(out: Path, note: str) -> None:
    """Compare a result with what every sample holds."""
    found: dict[str, torch.Tensor] = {}
    for file in sorted(out.glob("*.safetensors")):
        found |= load_file(file)
    for name, expected in MODEL.items():
        assert name in found, note
        assert (found[name].dtype, found[name].shape) == (expected.dtype, expected.shape), note
        assert found[name].reshape(-1).view(torch.uint8).tolist() == expected.reshape(-1).view(torch.uint8).tolist(), (
            note
        )


def test_every_registered_reader_is_in_this_suite() -> None:
    assert set(SAMPLES) == {form.load().name for form in BUILT_IN}, "give the new format a builder in samples.py"


def test_good_samples_are_read_right(sample: Sample, request: pytest.FixtureRequest) -> None:
    """The control: without damage every sample is recognized as its own format and consolidates."""
    found = check(sample, "nothing", expect="same")
    assert found["verify"].code == 0
    name = request.node.callspec.params["sample"][0]
    shown = json.loads(run_here("inspect", sample.source, "--json").out)["format"]
    assert shown in {name, "adapter", "local", "ranks"}


# Files that are cut, gone, or something else


def borders(data: bytes) -> list[int]:
    """Return the lengths at which a file of any of the formats is cut: headers, records, ends, and beside them."""
    found = {0, 1, 2, 7, 8, 9, 16, len(data) // 3, len(data) // 2, len(data) - 1}
    if data[8:9] == b"{":
        end = 8 + struct.unpack_from("<Q", data)[0]
        found |= {end - 1, end, end + 1}
    for mark in (
        b"PK\x03\x04",
        b"PK\x01\x02",
        b"PK\x05\x06",
        b"PK\x06\x06",
        b"PK\x07\x08",
        b"\x28\xb5\x2f\xfd",
        b"\x80\x02",
        b"\x80\x04",
    ):
        places = [m.start() for m in re.finditer(re.escape(mark), data)]
        for at in {*places[:1], *places[-1:]}:
            found |= {at, at + 2, at + 30}
    return sorted(n for n in found if 0 <= n < len(data))


def is_shared(data: bytes) -> bool:
    """Return True if a file is in an encoding that formats share: an archive, a pickle or safetensors."""
    return data[:2] == b"PK" or data[:1] == b"\x80" or data[8:9] == b"{"


def test_truncation_at_every_border(sample: Sample, key: tuple[str, str]) -> None:
    """A format's own files are cut at all borders, those in shared encodings as they are dealt."""
    for file in sample.kinds:
        data = file.read_bytes()
        cuts = list(enumerate(borders(data)))
        assert_cuts_are_noticed(sample, file, dealt(key, cuts) if is_shared(data) else cuts)


@pytest.mark.slow
def test_truncation_of_any_file_at_every_border(sample: Sample) -> None:
    for file in sample.kinds:
        assert_cuts_are_noticed(sample, file, list(enumerate(borders(file.read_bytes()))))


def assert_cuts_are_noticed(sample: Sample, file: Path, cuts: Iterable[tuple[int, int]]) -> None:
    data = file.read_bytes()
    for n, size in cuts:
        with damaged(file, data[:size]):
            verbs = (VERBS[n % 2], "consolidate")  # of the two that look, each at every other border
            check(sample, f"{file.name} cut to {size} of {len(data)}", verbs=verbs)


def test_a_file_that_is_gone(sample: Sample) -> None:
    for file in sample.files:
        data = file.read_bytes()
        file.unlink()
        check(sample, f"{file.name} deleted")
        file.write_bytes(data)


def test_a_file_of_something_else(sample: Sample) -> None:
    for file, junk in itertools.product(
        sample.kinds, [b"\0", b"\xff", b"{", b"PK\x03\x04", b"\x80\x04", b"<html>\r\n"]
    ):
        size = file.stat().st_size
        with damaged(file, (junk * size)[:size]):
            check(sample, f"{file.name} full of {junk!r}")


def frames(data: bytes) -> list[int]:
    """Return places in the frames of a file; what changes in payload alone nobody can know."""
    places = {0, 3, 7, 8, 12, 20, 26, 28, 30, len(data) - 2, len(data) - 6, len(data) - 10, len(data) - 22}
    return [place for place in sorted(places) if 0 <= place < len(data)]


def test_bytes_that_change(sample: Sample, key: tuple[str, str]) -> None:
    """Flips in the frames: all in a format's own files, those in shared encodings as they are dealt."""
    for file in sample.kinds:
        data = file.read_bytes()
        assert_flips_keep_the_promise(sample, file, dealt(key, frames(data)) if is_shared(data) else frames(data))


@pytest.mark.slow
def test_bytes_that_change_in_any_file(sample: Sample) -> None:
    for file in sample.kinds:
        assert_flips_keep_the_promise(sample, file, frames(file.read_bytes()))


def assert_flips_keep_the_promise(sample: Sample, file: Path, places: Iterable[int]) -> None:
    data = file.read_bytes()
    for at in places:
        changed = bytearray(data)
        changed[at] ^= 0xFF
        with damaged(file, bytes(changed)):
            promise_only(sample, f"{file.name} byte {at}")


def promise_only(sample: Sample, what: str) -> None:
    """Like `check`, where a changed payload makes another result right."""
    out = sample.root / "out"
    shutil.rmtree(out, ignore_errors=True)
    for verb in VERBS:
        found = run_here(verb, sample.source, *([out, "--part", "all"] if verb == "consolidate" else []))
        note = f"{what}: {verb}: {found}"
        assert found.code in {0, 1, 2}, note
        assert_lines(verb, found, note)
        assert (verb == "consolidate" and found.code == 0) == out.exists(), note
        shutil.rmtree(out, ignore_errors=True)
    assert not sample.canary.exists(), what


def test_a_link_out_of_the_folder(sample: Sample) -> None:
    for file in sample.files:
        data, outside = file.read_bytes(), sample.root / "outside"
        outside.write_bytes(data)
        file.unlink()
        file.symlink_to(outside)
        if file == sample.source:
            promise_only(sample, "the named file is a link")
        else:
            found = check(sample, f"{file.name} links out of the folder")
            assert needless(file) or found["consolidate"].code == 1, file
        file.unlink()
        file.symlink_to(file.name)
        check(sample, f"{file.name} links to itself")
        file.unlink()
        file.symlink_to("nowhere")
        check(sample, f"{file.name} links to nowhere")
        file.unlink()
        file.symlink_to("/dev/zero")
        check(sample, f"{file.name} links to a device")
        file.unlink()
        outside.unlink()
        file.write_bytes(data)


def needless(file: Path) -> bool:
    """Tell whether a file of a sample holds nothing that a model or an optimizer needs."""
    is_hint = file.name == HF_INDEX and (file.parent / "COMMIT").exists()
    is_told_twice = file.name == "metadata.pkl"  # DTensors say by themselves how they fit
    names = ("random_states", "meta.pt", "resumption", "composer_", "common.pt")
    is_for_publishers = file.parent.name == "epochs"
    return is_hint or is_told_twice or is_for_publishers or file.name.startswith(names)


def test_a_pipe_or_a_folder_in_place_of_a_file(sample: Sample) -> None:
    for file in sample.files:
        data = file.read_bytes()
        file.unlink()
        os.mkfifo(file)
        check(sample, f"{file.name} is a pipe")
        file.unlink()
        file.mkdir()
        check(sample, f"{file.name} is a folder")
        file.rmdir()
        file.write_bytes(data)


# Pickles that would run code, or eat memory


class Calls:
    """Pickles as a call of `function`."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call


class Writes:
    """Pickles as an object whose state is set by a function."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path, (self.path,), None, None, iter([(1, Calls(os.system, f"touch {self.path}"))])


def evil(canary: Path) -> dict[str, bytes]:
    """Return pickles that a reader must neither run nor choke on."""
    touch = f"__import__('pathlib').Path({str(canary)!r}).touch()"
    shell = f"touch {canary}"
    getattr_eval = (
        b"cbuiltins\ngetattr\n(c__builtin__\n__import__\n(Vbuiltins\ntRVeval\ntR(V" + touch.encode() + b"\ntR."
    )
    values: dict[str, Any] = {
        "os.system": Calls(os.system, shell),
        "eval": Calls(eval, touch),
        "exec": Calls(exec, touch),
        "subprocess": Calls(subprocess.check_call, ["touch", str(canary)]),
        "nested": {"model": {"a.w": [(Calls(os.system, shell),)]}},
        "in a key": {Calls(os.system, shell): 1},
        "iterated": Writes(str(canary)),
        "pickle in a pickle": Calls(pickle.loads, pickle.dumps(Calls(os.system, shell))),
        "torch.load": Calls(torch.load, str(canary)),
    }
    pickles = {name: pickle.dumps(value, 2 + 2 * (i % 2)) for i, (name, value) in enumerate(values.items())}
    pickles |= {
        "getattr to eval": getattr_eval,
        "instance": b"(S'" + shell.encode() + b"'\nios\nsystem\n.",
        "object": b"(cos\nsystem\nS'" + shell.encode() + b"'\no.",
        "build": b"ccollections\nOrderedDict\n)R}V__setstate__\ncos\nsystem\nsbV" + shell.encode() + b"\nb.",
        "stack global": b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c" + bytes([len(shell)]) + shell.encode() + b"\x85R.",
        "extension": b"\x80\x02\x82\x01.",
        "newline in a global": b"cos\\nx\nsys\\ntem\n(tR.",
        "deep lists": b"(l" * 3000 + b"a" * 2999 + b".",
        "deep tuples": b"\x80\x02N" + b"\x85" * 4000 + b".",
        "doubling": b"\x80\x02]q\0" + b"".join(b"(h%ch%ce" % (0, 0) for _ in range(60)) + b".",
        "long": b"\x80\x02\x8b" + struct.pack("<i", 1 << 30) + b"\1.",
        "negative long": b"\x80\x02\x8b" + struct.pack("<i", -1) + b".",
        "text of 4 EiB": b"\x80\x04\x8d" + struct.pack("<Q", 1 << 62) + b"x.",
        "bytes of 2 GiB": b"\x80\x03B" + struct.pack("<I", 1 << 31) + b"x.",
        "frame that lies": b"\x80\x04\x95" + struct.pack("<Q", 1 << 60) + b"N.",
        "far memo": b"\x80\x02Nr" + struct.pack("<I", 0xFFFF_FFFF) + b".",
        "digits": b"I" + b"9" * 100_000 + b"\n.",
        "nothing": b".",
        "no end": b"\x80\x02}",
        "empty": b"",
        "marks": b"(" * 5000 + b".",
    }
    return pickles


def swapped_in_zip(data: bytes, content: bytes) -> bytes:
    """Return a torch archive with another `data.pkl`, everything else as it was."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as new:
        for info in old.infolist():
            new.writestr(info.filename, content if info.filename.endswith("/data.pkl") else old.read(info))
    return out.getvalue()


def carriers(sample: Sample) -> Iterator[tuple[Path, Callable[[bytes], bytes]]]:
    """Yield where pickles stand: files that are one, and archives that hold one."""
    for file in sample.kinds:
        data = file.read_bytes()
        if data[:2] == b"PK" and file.suffix != ".distcp":
            yield file, lambda content, data=data: swapped_in_zip(data, content)  # type: ignore[misc]
        elif data[:1] == b"\x80":
            yield file, lambda content: content
            for n in range(1, 5 if file.suffix == ".pt" else 1):  # a legacy file is five pickles in a row
                yield file, lambda content, data=data, n=n: after_pickles(data, n) + content  # type: ignore[misc]


def after_pickles(data: bytes, count: int) -> bytes:
    import pickletools

    stream = io.BytesIO(data)
    with contextlib.suppress(ValueError):
        for _ in range(count):
            for _ in pickletools.genops(stream):
                pass
    return data[: stream.tell()]


def test_pickles_never_run(sample: Sample, key: tuple[str, str]) -> None:
    assert_pickles_never_run(sample, dealt(key, evil(sample.canary)))


@pytest.mark.slow
def test_no_pickle_runs_in_any_format(sample: Sample) -> None:
    assert_pickles_never_run(sample, evil(sample.canary))


def test_every_three_neighbours_meet_every_damage() -> None:
    for damages in (list(evil(Path("x"))), list(ZIPS), frames(bytes(100))):
        for keys in zip(ALL, ALL[1:], ALL[2:], strict=False):
            assert {each for key in keys for each in dealt(key, damages)} == set(damages)
        assert all(dealt(key, damages) == damages for key in WHOLE)


def assert_pickles_never_run(sample: Sample, names: Iterable[str]) -> None:
    pickles = evil(sample.canary)
    for (file, swap), name in itertools.product(carriers(sample), names):
        with damaged(file, swap(pickles[name])):
            found = check(sample, f"{name} in {file.name}", verbs=("inspect", "consolidate"))
            runs = name not in {"nothing", "empty", "no end", "marks"}
            assert not runs or needless(file) or found["consolidate"].code == 1, f"{name} in {file.name}: {found}"


RUNS = ["os.system", "eval", "exec", "subprocess", "nested", "in a key", "pickle in a pickle", "getattr to eval"]
RUNS += ["instance", "object", "stack global"]


@pytest.mark.parametrize("name", RUNS)
def test_those_pickles_would_run(name: str, tmp_path: Path) -> None:
    """The control: Python's own machine leaves the canary that ours must not leave."""
    pickle.loads(evil(tmp_path / "canary")[name])
    assert (tmp_path / "canary").exists()


@pytest.mark.parametrize("name", ["os.system", "getattr to eval", "nested", "deep lists", "text of 4 EiB"])
@pytest.mark.parametrize("form", ["dcp-torch", "dcp-zstd", "fabric-sharded"])
def test_pickles_in_slices_never_run(name: str, form: str, tmp_path: Path) -> None:
    """In the archive of a tensor's slice."""
    sample = fresh(tmp_path, *form.split("-"))
    content = evil(sample.canary)[name]
    slices = swapped_in_zip(archive(torch.ones(6, 4)), content)

    def redirect(metadata: Any) -> None:
        index = MetadataIndex("model.a.w", torch.Size([0, 0]))
        info = metadata.storage_data[index]
        plain = {"transform_descriptors": None} if hasattr(info, "transform_descriptors") else {}
        place = {"relative_path": "evil.distcp", "offset": 0, "length": len(slices)}
        metadata.storage_data[index] = replace(info, **place, **plain)

    (sample.folder / "evil.distcp").write_bytes(slices)
    edit_metadata(sample.folder, redirect)
    assert check(sample, f"{name} in a slice", expect="refused")["inspect"].code == 0


@pytest.mark.parametrize("name", ["os.system", "getattr to eval", "nested", "deep lists", "text of 4 EiB"])
@pytest.mark.parametrize("form", ["dcp-torch", "dcp-zstd", "fabric-sharded"])
def test_pickles_in_objects_that_are_needed_never_run(name: str, form: str, tmp_path: Path) -> None:
    sample = fresh(tmp_path, *form.split("-"))
    put_object(sample.folder, "odd", zip_with(evil(sample.canary)[name]))

    def into_groups(metadata: Any) -> None:
        metadata.planner_data["odd"] = ("optimizer", "param_groups", 0, "odd")

    edit_metadata(sample.folder, into_groups)
    assert check(sample, f"{name} in an object", expect="refused")["inspect"].code == 0


@pytest.mark.parametrize("form", ["dcp-torch", "dcp-zstd", "fabric-sharded"])
def test_objects_that_nobody_needs_are_not_even_opened(form: str, tmp_path: Path) -> None:
    sample = fresh(tmp_path, *form.split("-"))
    put_object(sample.folder, "trainer", zip_with(evil(sample.canary)["os.system"]))
    found = check(sample, "an object beside model and optimizer", expect="same")
    assert found["inspect"].code == 0


def zip_with(content: bytes) -> bytes:
    return swapped_in_zip(archive(1), content)


# Headers of safetensors files


def rewritten(data: bytes, change: Callable[[dict[str, Any]], Any]) -> bytes:
    length = struct.unpack_from("<Q", data)[0]
    header = json.loads(data[8 : 8 + length])
    changed = change(header)
    body = changed if isinstance(changed, bytes) else json.dumps(header if changed is None else changed).encode()
    return struct.pack("<Q", len(body)) + body + data[8 + length :]


def set_first(**fields: Any) -> Callable[[dict[str, Any]], None]:
    def change(header: dict[str, Any]) -> None:
        header[next(n for n in header if n != "__metadata__")] |= fields

    return change


def shifted(by: int) -> Callable[[dict[str, Any]], None]:
    def change(header: dict[str, Any]) -> None:
        for name, entry in header.items():
            if name != "__metadata__":
                entry["data_offsets"] = [n + by for n in entry["data_offsets"]]

    return change


def overlapping(header: dict[str, Any]) -> None:
    entries = [e for n, e in header.items() if n != "__metadata__"]
    first = entries[0]
    header["copy"] = dict(first)


def twice(header: dict[str, Any]) -> bytes:
    name = next(n for n in header if n != "__metadata__")
    body = json.dumps(header)
    return (body[:-1] + f', "{name}": {json.dumps(header[name])}}}').encode()


def widened(header: dict[str, Any]) -> None:
    entry = next(e for n, e in header.items() if n != "__metadata__")
    entry["dtype"] = "F32" if entry["dtype"] == "I64" else "I64"


HEADERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "offsets outside": set_first(data_offsets=[1 << 40, (1 << 40) + 96]),
    "offsets beyond 64 bits": set_first(data_offsets=[1 << 70, (1 << 70) + 96]),
    "negative offsets": set_first(data_offsets=[-96, 0]),
    "offsets backwards": set_first(data_offsets=[96, 0]),
    "offsets of text": set_first(data_offsets=["0", "96"]),
    "offsets moved": shifted(8),
    "overlap": overlapping,
    "negative dim": set_first(shape=[-6, -4]),
    "huge dim": set_first(shape=[1 << 62, 1 << 62]),
    "beyond 64 bits": set_first(shape=[1 << 200]),
    "zero times huge": set_first(shape=[0, 1 << 200]),
    "many dims": set_first(shape=[1] * 100_000),
    "dims of floats": set_first(shape=[6.0, 4.0]),
    "dims of truth": set_first(shape=[True, 24]),
    "unknown dtype": set_first(dtype="F1"),
    "dtype of a list": set_first(dtype=[]),
    "wider dtype": widened,
    "no entry": dict.fromkeys,
    "a list": lambda h: [h],
    "key twice": twice,
    "NaN": lambda h: json.dumps(h).replace("0", "NaN", 1).encode(),
    "Infinity": lambda h: b'{"a": -Infinity}',
    "deep": lambda h: b"[" * 100_000,
    "deep dicts": lambda h: b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
    "not UTF-8": lambda h: b'{"\xff": 1}',
    "half a surrogate": lambda h: json.dumps({"\ud800": next(e for n, e in h.items() if n[0] != "_")}).encode(),
    "metadata of numbers": lambda h: h | {"__metadata__": {"a": 1}},
    "metadata of nests": lambda h: h | {"__metadata__": {"a": {"b": "c"}}},
    "offsets of chunks": lambda h: h | {"__metadata__": {"DCP_SHARDING_INFO": '{"a.w": {"saved_offsets": [-1, 0]}}'}},
    "chunks far away": lambda h: (
        h | {"__metadata__": {"DCP_SHARDING_INFO": '{"a.w": {"saved_offsets": [4611686018427387000, 0]}}'}}
    ),
    "nothing": lambda h: b"",
    "digits": lambda h: b'{"a": ' + b"1" * 100_000 + b"}",
}
HEADER_FORMS = [k for k in ALL if k[0] == "safetensors" or k == ("dcp", "safetensors")]


def files_with_headers(sample: Sample) -> Iterator[tuple[Path, bytes]]:
    """Yield the files that begin with the length of a header and its JSON, with their bytes."""
    for file in sample.files:
        data = file.read_bytes()
        if data[8:9] == b"{":
            yield file, data


@pytest.mark.parametrize("lie", HEADERS)
@pytest.mark.parametrize("key", HEADER_FORMS, ids="-".join)
def test_headers_that_lie(key: tuple[str, str], lie: str, tmp_path: Path) -> None:
    sample = fresh(tmp_path, *key)
    for file, data in files_with_headers(sample):
        with damaged(file, rewritten(data, HEADERS[lie])):
            check(sample, f"{lie} in {file.name}")


@pytest.mark.parametrize(
    "length", [0, 1, 2, (1 << 30), (1 << 31), (1 << 63) - 9, (1 << 64) - 1, 100_000_000, 100_000_001]
)
@pytest.mark.parametrize("key", HEADER_FORMS, ids="-".join)
def test_a_header_length_that_lies(key: tuple[str, str], length: int, tmp_path: Path) -> None:
    sample = fresh(tmp_path, *key)
    for file, data in files_with_headers(sample):
        with damaged(file, struct.pack("<Q", length) + data[8:]):
            check(sample, f"length {length} in {file.name}", expect="refused")


# Indexes


INDEXES = [
    "../outside.safetensors",
    "../../etc/passwd",
    "/etc/passwd",
    "a/../../b",
    "..",
    ".",
    "",
    "a\\..\\b",
    "c:\\x",
    "a\0b",
    "a\nb.safetensors",
    "\ud800",
    "x" * 5000,
    "file:///etc/passwd",
    "missing.safetensors",
]


@pytest.mark.parametrize("target", INDEXES, ids=ascii)
@pytest.mark.parametrize("key", [("safetensors", "shards"), ("hf-torch", "shards")], ids="-".join)
def test_an_index_that_leads_elsewhere(key: tuple[str, str], target: str, tmp_path: Path) -> None:
    sample = fresh(tmp_path, *key)
    [index] = sample.folder.glob("*.index.json")
    raw = json.loads(index.read_text())
    for names in (list(raw["weight_map"]), list(raw["weight_map"])[:1]):
        with damaged(index, json.dumps({"weight_map": raw["weight_map"] | dict.fromkeys(names, target)}).encode()):
            check(sample, f"{target!r} for {names}", expect="refused")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "null",
        "{",
        '{"weight_map": []}',
        '{"weight_map": {"a.w": 1}}',
        '{"weight_map": {"a.w": ["x"]}}',
        '{"weight_map": NaN}',
        '{"weight_map": {"a.w": "x", "a.w": "y"}}',
        '{"a":' * 50_000,
        "\x00",
        '{"weight_map": {}, "metadata": {"optimizer_files": ["../x"]}}',
    ],
    ids=lambda t: t[:30] or "empty",
)
@pytest.mark.parametrize("key", [("safetensors", "shards"), ("hf-torch", "shards")], ids="-".join)
def test_an_index_that_is_none(key: tuple[str, str], text: str, tmp_path: Path) -> None:
    sample = fresh(tmp_path, *key)
    [index] = sample.folder.glob("*.index.json")
    with damaged(index, text.encode()):
        check(sample, text[:40])


# Metadata of DCP


def chunks(*boxes: tuple[tuple[int, ...], tuple[int, ...]]) -> Callable[[Any], None]:
    def change(metadata: Any) -> None:
        record = metadata.state_dict_metadata["model.a.w"]
        record.chunks = [ChunkStorageMetadata(size(o), size(n)) for o, n in boxes]
        info = metadata.storage_data[MetadataIndex("model.a.w", torch.Size([0, 0]))]
        for offset, _ in boxes:
            metadata.storage_data[MetadataIndex("model.a.w", size(offset))] = info

    return change


def size(numbers: tuple[int, ...]) -> Any:
    try:
        return torch.Size(numbers)
    except (OverflowError, RuntimeError, TypeError, ValueError):
        return tuple(numbers)


def place(**fields: Any) -> Callable[[Any], None]:
    def change(metadata: Any) -> None:
        index = MetadataIndex("model.a.w", torch.Size([0, 0]))
        info = metadata.storage_data[index]
        if any(not hasattr(info, name) for name in fields):
            pytest.skip("this torch's metadata has no such field")
        metadata.storage_data[index] = replace(info, **fields)

    return change


def shape(*dims: int) -> Callable[[Any], None]:
    def change(metadata: Any) -> None:
        metadata.state_dict_metadata["model.a.w"].size = size(dims)

    return change


def without_storage(metadata: Any) -> None:
    del metadata.storage_data[MetadataIndex("model.a.w", torch.Size([0, 0]))]


def without_paths(metadata: Any) -> None:
    metadata.planner_data = {"model.a.w": ("model", Calls)}


DCP: dict[str, Callable[[Any], Any]] = {
    "overlap": chunks(((0, 0), (6, 4)), ((5, 0), (1, 4))),
    "gap": chunks(((0, 0), (5, 4))),
    "no chunk": chunks(),
    "chunk outside": chunks(((1, 0), (6, 4))),
    "negative offset": chunks(((-1, 0), (7, 4))),
    "negative size": chunks(((0, 0), (-6, -4))),
    "huge chunk": chunks(((0, 0), (1 << 62, 1 << 62))),
    "other rank": chunks(((0,), (24,))),
    "huge shape": shape(1 << 62, 1 << 62),
    "negative shape": shape(-6, 4),
    "larger shape": shape(7, 4),
    "shape of many dims": shape(*[1] * 5000),
    "path up": place(relative_path="../outside.distcp"),
    "path to the root": place(relative_path="/etc/passwd"),
    "path to a device": place(relative_path="/dev/zero"),
    "path with zero": place(relative_path="a\0b"),
    "path with a newline": place(relative_path="a\nb.distcp"),
    "no path": place(relative_path=""),
    "path to the folder": place(relative_path="."),
    "path that is a number": place(relative_path=5),
    "offset outside": place(offset=1 << 40),
    "offset beyond 64 bits": place(offset=1 << 80),
    "negative place": place(offset=-1),
    "length outside": place(length=1 << 40),
    "negative length": place(length=-5),
    "length of nothing": place(length=0),
    "length of text": place(length="many"),
    "somewhere else": place(offset=1),
    "unknown transform": place(transform_descriptors=["lzma"]),
    "transform that is none": place(transform_descriptors=5),
    "no storage": without_storage,
    "paths of classes": without_paths,
    "a dict": lambda m: {"state_dict_metadata": {}},
    "a list": lambda m: [m],
    "nothing": lambda m: [],
}
DCP_FORMS = [("dcp", v) for v in SAMPLES["dcp"] if v != "chunks"] + [("fabric", "sharded")]


@pytest.mark.parametrize("lie", DCP)
@pytest.mark.parametrize("key", DCP_FORMS, ids="-".join)
def test_metadata_that_lies(key: tuple[str, str], lie: str, tmp_path: Path) -> None:
    sample = fresh(tmp_path, *key)
    (tmp_path / "outside.distcp").write_bytes((sample.folder / "__0_0.distcp").read_bytes())
    edit_metadata(sample.folder, DCP[lie])
    check(sample, lie, expect="refused")


# Archives


def repacked(data: bytes, change: Callable[[zipfile.ZipInfo, bytes], tuple[str, bytes, int] | None]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(out, "w") as new:
        for info in old.infolist():
            made = change(info, old.read(info))
            if made is not None:
                new.writestr(zipfile.ZipInfo(made[0]), made[1], made[2], compresslevel=1)
    return out.getvalue()


def field(mark: bytes, at: int, width: str, value: int) -> Callable[[bytes], bytes]:
    """Overwrite a field of every record that starts with `mark`."""

    def change(data: bytes) -> bytes:
        out = bytearray(data)
        for match in re.finditer(re.escape(mark), data):
            with contextlib.suppress(struct.error):
                struct.pack_into(width, out, match.start() + at, value)
        return bytes(out)

    return change


def renamed(to: str) -> Callable[[bytes], bytes]:
    def change(info: zipfile.ZipInfo, data: bytes) -> tuple[str, bytes, int]:
        return (to if info.filename.endswith("/data/0") else info.filename), data, zipfile.ZIP_STORED

    return lambda data: repacked(data, change)


LOCAL, CENTRAL, END = b"PK\x03\x04", b"PK\x01\x02", b"PK\x05\x06"
ZIPS: dict[str, Callable[[bytes], bytes]] = {
    "sizes of 4 GiB": field(CENTRAL, 20, "<II", 0) and field(CENTRAL, 24, "<I", 0xFFFF_FFFE),
    "packed sizes of 4 GiB": field(CENTRAL, 20, "<I", 0xFFFF_FFFE),
    "sizes of nothing": field(CENTRAL, 24, "<I", 0),
    "sizes for 64 bits": field(CENTRAL, 24, "<I", 0xFFFF_FFFF),
    "offsets outside": field(CENTRAL, 42, "<I", 0xFFFF_FFF0),
    "offsets all 0": field(CENTRAL, 42, "<I", 0),
    "names that are long": field(CENTRAL, 28, "<H", 0xFFFF),
    "local names that are long": field(LOCAL, 26, "<H", 0xFFFF),
    "local extras that are long": field(LOCAL, 28, "<H", 0xFFFF),
    "encrypted": field(CENTRAL, 8, "<H", 1),
    "a strange method": field(CENTRAL, 10, "<H", 99),
    "deflate that is none": field(CENTRAL, 10, "<H", 8),
    "many entries": field(END, 10, "<H", 0xFFF0),
    "no entries": field(END, 10, "<H", 0),
    "directory outside": field(END, 16, "<I", 0xFFFF_FFF0),
    "directory at 0": field(END, 16, "<I", 0),
    "directory of 4 GiB": field(END, 12, "<I", 0xFFFF_FFF0),
    "a comment that is long": field(END, 20, "<H", 0xFFFF),
    "names up": renamed("../../data/0"),
    "names from the root": renamed("/data/0"),
    "names with newlines": renamed("archive/da\nta/0"),
    "entry gone": lambda data: repacked(
        data, lambda i, d: None if i.filename.endswith("/data/0") else (i.filename, d, 0)
    ),
    "entry short": lambda data: repacked(
        data, lambda i, d: (i.filename, d[:-1] if i.filename.endswith("/data/0") else d, 0)
    ),
    "pickle gone": lambda data: repacked(
        data, lambda i, d: None if i.filename.endswith("data.pkl") else (i.filename, d, 0)
    ),
    "other byte order": lambda data: repacked(
        data, lambda i, d: (i.filename, b"big" if i.filename.endswith("byteorder") else d, 0)
    ),
    "nothing in it": lambda data: b"PK\x05\x06" + bytes(18),
    "something before": lambda data: b"MZ" * 500 + data,
    "something behind": lambda data: data + b"\0" * 1000,
    "twice": lambda data: data + data,
}


def test_archives_that_lie(sample: Sample, key: tuple[str, str]) -> None:
    assert_archives_are_checked(sample, dealt(key, ZIPS))


@pytest.mark.slow
def test_archives_of_any_format_that_lie(sample: Sample) -> None:
    assert_archives_are_checked(sample, ZIPS)


def assert_archives_are_checked(sample: Sample, lies: Iterable[str]) -> None:
    for file, lie in itertools.product(sample.kinds, lies):
        data = file.read_bytes()
        if data[:2] == b"PK" and file.suffix != ".distcp":
            with damaged(file, ZIPS[lie](data)):
                promise_only(sample, f"{lie} in {file.name}")
        elif data[:2] == b"PK" and not lie.startswith(
            ("entry", "pickle", "names up", "names from", "names with", "other", "something", "twice", "nothing")
        ):
            with damaged(file, ZIPS[lie](data)):
                promise_only(sample, f"{lie} in the slices of {file.name}")


# Bombs


def test_compressed_entries_that_swell(tmp_path: Path) -> None:
    """Few bytes that would be half a GiB: of the pickle nothing is unpacked, of data only what is asked for."""
    sample = fresh(tmp_path, "torch", "zip")
    data = sample.source.read_bytes()
    block = bytes(1 << 29)
    for entry in ("data.pkl", "data/0"):
        swollen = repacked(
            data,
            lambda i, d, entry=entry: (
                (i.filename, block, zipfile.ZIP_DEFLATED)  # type: ignore[misc]
                if i.filename.endswith(f"/{entry}")
                else (i.filename, d, zipfile.ZIP_STORED)
            ),
        )
        with damaged(sample.source, swollen):
            grown = bounded(sample)
            assert grown.code in {0, 1}, (entry, grown)


def test_zstd_slices_that_swell(tmp_path: Path) -> None:
    sample = fresh(tmp_path, "dcp", "zstd")
    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 28))
    (sample.folder / "bomb.distcp").write_bytes(bomb)
    edit_metadata(sample.folder, place(relative_path="bomb.distcp", offset=0, length=len(bomb)))
    check(sample, "a bomb", expect="refused")
    assert bounded(sample).code == 1


def test_a_sparse_file_is_not_read_to_learn_that_it_is_none(sample: Sample) -> None:
    """Files that seem to be 1 TiB: every header claims what it likes, and nothing of that size is allocated."""
    for file in sample.files:
        data = file.read_bytes()
        with damaged(file, data):
            os.truncate(file, 1 << 40)
            for verb in ("inspect", "verify"):
                found = run_here(verb, sample.source)
                assert found.code in {0, 1, 2}, f"{file.name}: {found}"
                assert "fault of shardckpt" not in found.err


def bounded(sample: Sample) -> Outcome:
    """Consolidate in a process that may have no more than one GiB of address space."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))

    out = sample.root / "bounded"
    done = subprocess.run(
        [sys.executable, "-m", "shardckpt_cli", "consolidate", str(sample.source), str(out)],
        capture_output=True,
        text=True,
        preexec_fn=limit,
        env={**ENVIRONMENT, "OPENBLAS_NUM_THREADS": "1"},
        timeout=60,
        check=False,
    )
    assert "memory" not in done.stderr, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    shutil.rmtree(out, ignore_errors=True)
    return Outcome(done.returncode, done.stdout, done.stderr)


@pytest.mark.parametrize("name", ["deep lists", "text of 4 EiB", "bytes of 2 GiB", "long", "far memo", "doubling"])
@pytest.mark.parametrize("key", [("torch", "zip"), ("torch", "legacy"), ("dcp", "torch")], ids="-".join)
def test_pickles_that_ask_for_memory_get_none(key: tuple[str, str], name: str, tmp_path: Path) -> None:
    sample = fresh(tmp_path, *key)
    file, swap = next(iter(carriers(sample)))
    with damaged(file, swap(evil(sample.canary)[name])):
        assert bounded(sample).code == 1


def test_a_header_of_a_gib_is_not_read(tmp_path: Path) -> None:
    sample = fresh(tmp_path, "safetensors", "file")
    with sample.source.open("wb") as file:
        file.write(struct.pack("<Q", 1 << 30) + b"{")
        file.truncate((1 << 30) + (1 << 20))
    found = bounded(sample)
    assert found.code == 1
    assert "header" in found.err


def test_a_checkpoint_of_many_claims_is_bounded(tmp_path: Path) -> None:
    """Views of 2^40 elements over four bytes: more than any disk, so nothing is begun."""
    folder = tmp_path / "src"
    folder.mkdir()
    torch.save({"w": torch.ones(1).expand(1 << 44)}, folder / "a.pt")
    found = run_here("consolidate", folder / "a.pt", tmp_path / "out")
    assert found.code in {1, 3}
    assert len(found.err.splitlines()) == 1
    assert not (tmp_path / "out").exists()


# Names


ODD = [
    "new\nline",
    "\x1b[31mred",
    "\u202egnp",
    "tab\t",
    "carriage\r",
    "nul\0",
    " ",
    "'\"`$(touch x)",
    "../../up",
    "\U0001f600",
    "a" * 3000,
]


@pytest.mark.parametrize("form", ["safetensors", "torch", "dcp"])
def test_names_of_any_kind_are_read_and_shown_on_one_line(form: str, tmp_path: Path) -> None:
    tensors = {name: torch.tensor([float(i)]) for i, name in enumerate(ODD)}
    folder = tmp_path / "src"
    if form == "dcp":
        from tests.kit.writers.dcp_writers import save

        source = save({"model": tensors}, folder)
    else:
        folder.mkdir()
        source = folder / ("a.pt" if form == "torch" else "a.safetensors")
        if form == "torch":
            torch.save({"model": tensors}, source)
        else:
            from safetensors.torch import save_file

            save_file(tensors, source)
    for verb, more in itertools.chain(
        (("inspect", ()), ("inspect", ("--tree",)), ("verify", ())), [("consolidate", (tmp_path / "out",))]
    ):
        found = run_here(verb, source, *more)
        assert found.code == 0, found
        assert all(line.isprintable() for line in (found.out + found.err).splitlines())
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert {n: t.tolist() for n, t in written.items()} == {n: t.tolist() for n, t in tensors.items()}


@pytest.mark.parametrize("name", ["a\nb.safetensors", "\x1b[31m.safetensors", " .safetensors", "-rf.safetensors"])
def test_names_of_files_of_any_kind(name: str, tmp_path: Path) -> None:
    sample = fresh(tmp_path, "safetensors", "file")
    moved = replace(sample, source=sample.source.rename(sample.folder / name))
    check(moved, name, expect="same")
    with damaged(moved.source, b"\xff" * 100):
        check(moved, name, expect="refused")


def test_checksums_of_the_bombs_are_real() -> None:
    """The control of the bombs: they do swell."""
    assert len(zstandard.ZstdDecompressor().decompress(zstandard.ZstdCompressor().compress(bytes(1 << 20)))) == 1 << 20
    assert len(zlib.decompress(zlib.compress(bytes(1 << 20)))) == 1 << 20
