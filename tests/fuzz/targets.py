"""What is fuzzed: every parser alone, and every reader over a checkpoint of which one file is damaged."""

from __future__ import annotations

import hashlib
import io
import json
import pickle
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from unittest.mock import patch

import torch
import zstandard
from safetensors.torch import save

from shardckpt.encodings.codecs import DecodedStream
from shardckpt.encodings.pickle_reader import load
from shardckpt.encodings.safetensors import parse_header, parse_json, read_headers
from shardckpt.encodings.tagged_json import ArrayRef, NamedValue, decode, encode
from shardckpt.encodings.zip_archive import ArchivePlace, WantedEntry, open_archives, read_entries, walk_front
from shardckpt.errors import ShardckptError
from shardckpt.manifest import Encoded, Span
from shardckpt.manifest import Path as Key
from shardckpt.native import base_store
from shardckpt.native.commit import COMMIT, MANIFEST_SUFFIX, decode_commit, encode_commit
from shardckpt.native.manifest_json import decode_manifest
from shardckpt.native.payload import encode_canonical
from shardckpt.native.reader import build_manifest
from shardckpt.native.records import FileRecord
from shardckpt.offline.repair import read_described, rebuild_manifest
from shardckpt.offline.select.options import Options
from shardckpt.offline.select.selection import select
from shardckpt.plan.layout.output_files import parse_size
from shardckpt.reader import Reader, Source
from shardckpt.readers.chunk_reader import read_blocks
from shardckpt.readers.huggingface.index_files import choose
from shardckpt.readers.registry import detect
from shardckpt.storage.store import Store, SubfolderStore
from shardckpt.stream.format import stream_folder
from shardckpt.stream.format.stream_records import Version
from shardckpt.stream.versions import hf_delta_reader
from tests.kit.stores.memory_store import MemoryStore
from tests.kit.writers.samples import SAMPLES

_SMALL_BYTES = 1 << 20
_TAGGED = {0: [1.5, float("nan"), 1 << 70, b"x", 1j, (None, {"$a"})], "d": NamedValue("size", (2, 3)), "t": ArrayRef(3)}


@dataclass(frozen=True)
class Target:
    """Something that takes hostile bytes.

    Attributes:
        seeds: Good input, which is damaged.
        run: Takes the damaged input; which seed it was made of is its first argument.
    """

    seeds: Callable[[], list[bytes]]
    run: Callable[[int, bytes], object]


def _zip_bytes(method: int) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", method) as archive:
        archive.writestr("a/data.pkl", pickle.dumps({"w": 1}))
        archive.writestr("a/data/0", bytes(100))
        archive.writestr("a/byteorder", b"little")
    return out.getvalue()


def _torch_bytes(value: object, **options: bool) -> bytes:
    out = io.BytesIO()
    torch.save(value, out, **options)
    return out.getvalue()


def _headers() -> list[bytes]:
    raw = save({"a.b": torch.zeros(2, 3), "s": torch.tensor(1.0), "e": torch.zeros(0, 4)}, {"format": "pt"})
    sharded = save({"w": torch.zeros(2)}, {"DCP_SHARDING_INFO": json.dumps({"w": {"saved_offsets": [0]}})})
    return [raw, sharded]


def _bodies() -> list[bytes]:
    return [raw[8 : 8 + int.from_bytes(raw[:8], "little")] for raw in _headers()]


def _safetensors_file(_: int, data: bytes) -> None:
    read_headers(MemoryStore({"a": data}), {"a": len(data)})


def _index(_: int, data: bytes) -> None:
    store = MemoryStore({"model.safetensors.index.json": data, "a.safetensors": b""})
    choose(store, {"a.safetensors": 0}, ["model.safetensors.index.json"])


def _pickles() -> list[bytes]:
    nest = {"a": [1, 2.5, None, True, (3, "x"), b"y", {4}], 5: {"b": -(1 << 70)}}
    state = {"w": torch.ones(2, 2), "p": torch.nn.Parameter(torch.ones(1)), "d": torch.float16, "s": torch.Size([1])}
    with zipfile.ZipFile(io.BytesIO(_torch_bytes(state))) as archive:
        pickled = archive.read(next(n for n in archive.namelist() if n.endswith("data.pkl")))
    return [*(pickle.dumps(nest, protocol) for protocol in range(6)), pickled]


def _pickle(_: int, data: bytes) -> None:
    load(data, where="fuzz", persistent=lambda key: str(key)[:50])


def _zip(_: int, data: bytes) -> None:
    store = MemoryStore({"a": data})
    [archive] = open_archives(store, [ArchivePlace("a", 0, len(data))])
    for entry in archive.entries.values():
        read_entries(store, [WantedEntry("a", entry)], most=_SMALL_BYTES)


def _front(_: int, data: bytes) -> None:
    walk_front(data, lambda name: name.endswith("data.pkl"), where="fuzz")


def _stream(codec: str) -> Callable[[int, bytes], None]:
    def run(_: int, data: bytes) -> None:
        stream = DecodedStream(MemoryStore({"a": data}), "a", Encoded(codec, 0, len(data), Span(0, 0)))
        stream.head(100)
        stream.read_into(50, memoryview(bytearray(100)))

    return run


def _deflated() -> list[bytes]:
    packer = zlib.compressobj(wbits=-15)
    return [packer.compress(bytes(range(200)) * 9) + packer.flush()]


def use(reader: Reader) -> None:
    """Do everything that a verb can ask of a reader, as far as it stays small."""
    selection = select(reader, Options(part="all").validated(), {})
    for tensor in (*selection.model, *selection.optim):
        if tensor.entry.nbytes <= _SMALL_BYTES:
            for _ in read_blocks(reader, tensor.entry):
                pass
    for entry in reader.manifest.objects.values():
        reader.load_object(entry)
    for checksum in reader.checksums() if reader.manifest.format != "native" else ():  # there they find short files
        assert checksum.offset + checksum.nbytes <= reader.manifest.files[checksum.file]


@cache
def _sample(name: str, variant: str) -> tuple[Mapping[str, bytes], str | None]:
    """Return a good checkpoint's files, and the one that is named as the source, if one is."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "src"
        source = SAMPLES[name][variant](folder)
        files = {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
        return files, source.name if source.is_file() else None


def _reader(name: str, variant: str) -> Target:
    def run(which: int, data: bytes) -> None:
        files, named = _sample(name, variant)
        damaged = {**files, list(files)[which]: data}
        source = Source(MemoryStore(damaged), named)
        use(detect(source).open(source))

    return Target(lambda: list(_sample(name, variant)[0].values()), run)


def _stream_version(which: int, data: bytes) -> None:
    """Read a version of a stream of which one file is damaged."""
    files, _ = _sample("stream", "changes")
    store = MemoryStore({**files, list(files)[which]: data}, "memory://fuzz/stream")
    with patch.object(stream_folder, "open_place", lambda _: store):
        source = Source(SubfolderStore(store, Version(1, 2).folder))
        use(detect(source).open(source))


def _hf_delta_version(which: int, data: bytes) -> None:
    """Read a version of folders with changes, of which one file is damaged."""
    files, _ = _sample("hf-delta", "changes")
    store = MemoryStore({**files, list(files)[which]: data}, "memory://fuzz/folders")

    def open_inner(url: str) -> SubfolderStore:
        return SubfolderStore(store, url.rpartition("/")[2])

    with (
        patch.object(hf_delta_reader, "open_store", open_inner),
        patch.object(hf_delta_reader, "kind", lambda _: "folder"),
    ):
        source = Source(SubfolderStore(store, "weight_v000002"))
        use(detect(source).open(source))


def _native() -> tuple[dict[str, bytes], str]:
    """Return the files of a native step, and the name of its manifest."""
    files = dict(_sample("native", "ranks")[0])
    return files, next(name for name in files if name.endswith(MANIFEST_SUFFIX))


def _lying_manifest(_: int, data: bytes) -> None:
    """Read a step whose `COMMIT` vouches for a damaged manifest."""
    files, name = _native()
    listed = [FileRecord(name, size, None) for name, size in decode_commit(files[COMMIT]).files.items()]
    files |= {name: data, COMMIT: encode_commit(name.partition(".")[0], data, listed)}
    source = Source(MemoryStore(files))
    use(detect(source).open(source))


def _lying_commit(_: int, data: bytes) -> None:
    """Read a step whose `COMMIT` was damaged and given the right digest."""
    files, _ = _native()
    line = data.replace(b"\n", b"") + b"\n"
    files[COMMIT] = line + hashlib.sha256(line).hexdigest().encode() + b"\n"
    source = Source(MemoryStore(files))
    use(detect(source).open(source))


def _lying_header(which: int, data: bytes) -> None:
    """Make a manifest from payload headers of which one is damaged."""
    files, _ = _native()
    payload = {name: content for name, content in files.items() if name.endswith(".safetensors")}
    payload[list(payload)[which]] = data
    store = MemoryStore(payload)
    described = read_described(store, {name: len(content) for name, content in payload.items()})
    contents, _ = rebuild_manifest("0save", described, "fuzz")
    build_manifest(store, contents, {})


_RUN = "memory://fuzz/run"
_GOLDEN = Path(__file__).parents[1] / "native" / "golden" / "1"


@cache
def _golden(name: str) -> dict[str, bytes]:
    """Return the files of a step: `based`, which refers to the step `digests` beside it, or that one."""
    return {path.name: path.read_bytes() for path in sorted((_GOLDEN / name).iterdir())}


def _based_manifest() -> bytes:
    return next(data for name, data in _golden("based").items() if name.endswith(MANIFEST_SUFFIX))


def _references() -> list[bytes]:
    """Return references to the base as a folder beside the step, and as one in the same store."""
    return [b"../digests", f"{_RUN}/digests".encode()]


def _use_based(changed: Mapping[str, bytes], base: Mapping[str, bytes] | None = None) -> dict[Key, bytes]:
    """Return what a step holds of which some files are changed; no folder is opened outside of its store.

    Args:
        changed: Name to content.
        base: Files of its base, if some of those are.
    """

    def open_store(url: str) -> Store:
        assert f"{url}/".startswith("memory://fuzz/"), "a step from elsewhere chooses what is opened"
        there = {**_golden("digests"), **(base or {})} if url == f"{_RUN}/digests" else {}
        return MemoryStore(there, url)

    source = Source(MemoryStore({**_golden("based"), **changed}, f"{_RUN}/based"))
    with patch.object(base_store, "open_store", open_store):
        reader = detect(source).open(source)
        use(reader)
        small = {key: entry for key, entry in reader.manifest.tensors.items() if entry.nbytes <= _SMALL_BYTES}
        return {key: b"".join(read_blocks(reader, entry)) for key, entry in small.items()}


def _lying_based_manifest(_: int, data: bytes) -> None:
    """Read a step with a base whose damaged manifest `COMMIT` confirms in everything."""
    commit = decode_commit(_golden("based")[COMMIT])
    own = [FileRecord(name, size, None) for name, size in commit.files.items()]
    of_bases = [FileRecord(n, size, b"", url) for url, named in commit.bases.items() for n, size in named.items()]
    files = [*own, *of_bases]
    with suppress(ShardckptError):
        files = list(decode_manifest(data).files)
    _use_based({commit.manifest: data, COMMIT: encode_commit(commit.save, data, files)})


def _lying_reference(_: int, data: bytes) -> None:
    """Read a step that calls its base something else."""
    _lying_based_manifest(0, _based_manifest().replace(b'"../digests"', encode_canonical(data.decode("latin-1"))))


def _bases_and_files() -> list[bytes]:
    manifest = json.loads(_based_manifest())
    return [encode_canonical({name: manifest[name] for name in ("bases", "files")})]


def _lying_files(_: int, data: bytes) -> None:
    """Read a step that says something else of its files and where they lie."""
    told = parse_json(data, where="fuzz")
    manifest = json.loads(_based_manifest()) | (told if isinstance(told, dict) else {})
    _lying_based_manifest(0, json.dumps(manifest).encode())


def _lying_based_commit(_: int, data: bytes) -> None:
    line = data.replace(b"\n", b"") + b"\n"
    _use_based({COMMIT: line + hashlib.sha256(line).hexdigest().encode() + b"\n"})


def _damaged_base(which: int, data: bytes) -> None:
    assert _use_based({}, {list(_golden("digests"))[which]: data}) == _use_based({}), "damage was handed out"


def _tagged(_: int, data: bytes) -> None:
    repr(decode(parse_json(data, where="fuzz")))


TARGETS: dict[str, Target] = {
    "json": Target(
        lambda: [b'{"a": [1, 2.5, "x\\n", null, true], "b": {"c": -1}}'], lambda _, d: parse_json(d, where="f")
    ),
    "size": Target(lambda: [b"1.5 GiB", b"12kB"], lambda _, d: parse_size(d.decode("latin-1"))),
    "header": Target(_bodies, lambda _, d: parse_header(d, where="fuzz")),
    "safetensors": Target(_headers, _safetensors_file),
    "index": Target(
        lambda: [b'{"metadata": {"optimizer_files": ["b"]}, "weight_map": {"w": "a.safetensors"}}'], _index
    ),
    "pickle": Target(_pickles, _pickle),
    "zip": Target(lambda: [_zip_bytes(0), _zip_bytes(8), _torch_bytes({"w": torch.ones(9)})], _zip),
    "zip front": Target(lambda: [_zip_bytes(0), _torch_bytes({"w": torch.ones(9)})], _front),
    "zstd": Target(lambda: [zstandard.ZstdCompressor().compress(bytes(range(200)) * 9)], _stream("zstd")),
    "deflate": Target(_deflated, _stream("deflate")),
    "tagged": Target(lambda: [encode_canonical(encode(_TAGGED))], _tagged),
    "manifest that lies": Target(lambda: [_native()[0][_native()[1]]], _lying_manifest),
    "commit that lies": Target(lambda: [_native()[0][COMMIT].partition(b"\n")[0]], _lying_commit),
    "based manifest that lies": Target(lambda: [_based_manifest()], _lying_based_manifest),
    "base by another name": Target(_references, _lying_reference),
    "bases that lie": Target(_bases_and_files, _lying_files),
    "based commit that lies": Target(lambda: [_golden("based")[COMMIT].partition(b"\n")[0]], _lying_based_commit),
    "base that is damaged": Target(lambda: list(_golden("digests").values()), _damaged_base),
    "payload that lies": Target(
        lambda: [content for name, content in _native()[0].items() if name.endswith(".safetensors")], _lying_header
    ),
    "hf-delta changes": Target(lambda: list(_sample("hf-delta", "changes")[0].values()), _hf_delta_version),
    "stream changes": Target(lambda: list(_sample("stream", "changes")[0].values()), _stream_version),
} | {
    f"{name} {variant}": _reader(name, variant)
    for name, variants in SAMPLES.items()
    for variant in variants
    if name not in ("stream", "hf-delta")  # a version's folder is read from its parent
}
