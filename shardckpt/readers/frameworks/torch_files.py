"""Readers for `torch.save` files: `pytorch_model*.bin`, folders, or one file."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from shardckpt.errors import IncompleteError, describe_missing
from shardckpt.manifest import Path, TensorEntry
from shardckpt.reader import Evidence, Format, Reader, Source
from shardckpt.readers.huggingface.index_files import old_index_warning, read_index, two_files_error, unindexed_error
from shardckpt.readers.ranks.fsdp1_flat_param import read_metadata
from shardckpt.readers.ranks.merge_local_states import merge_rank_files
from shardckpt.readers.torchsave.reader import CONFIGURATION, SUFFIXES, TorchReader, looks_like_torch, open_files
from shardckpt.storage.store import Store

INDEX_SUFFIX = ".bin.index.json"
# File with the optimizer of a model in `pytorch_model*.bin`, as `--to torch` and Accelerate write it.
_OPTIMIZER = "optimizer.bin"

_HEAD_BYTES = 512
_PICKLE_SUFFIXES = (*SUFFIXES, ".pkl")
_SLICES_SUFFIX = ".distcp"  # suffix of files with concatenated archives, which `torch.distributed.checkpoint` indexes

_ONE_FILE = re.compile(r"(pytorch_model|adapter_model)\.bin")
_SHARD = re.compile(r"(?P<stem>pytorch_model)-(?P<i>\d{5})-of-(?P<n>\d{5})\.bin")
# Folders in which Accelerate stores sharded state, next to small torch files.
_ACCELERATE = re.compile(r"(pytorch_model_fsdp|optimizer)_\d+")

_RANKED = re.compile(r".*(mp_rank_\d+|zero_pp_rank_\d+).*_states\.pt|.*\.distcp")  # files of formats with other readers


def recognize_hf(source: Source) -> Evidence:
    """Recognize a folder with `pytorch_model*.bin` or an index for such files."""
    if source.file is not None:
        return Evidence.NAME if source.file.endswith(INDEX_SUFFIX) else Evidence.NONE
    names = _hf_names(source.files)
    if any(name.endswith(INDEX_SUFFIX) for name in source.files):
        return Evidence.STRUCTURE if _any_torch(source, names) else Evidence.NAME
    return Evidence.STRUCTURE if names and _any_torch(source, names) else Evidence.NONE


def recognize_loose(source: Source) -> Evidence:
    """Recognize a folder of `torch.save` files without other formats' files."""
    if source.file is not None:
        return Evidence.NONE
    files = source.files
    if ".metadata" in files or any(_RANKED.fullmatch(n) or n.endswith(".safetensors") for n in files):
        return Evidence.NONE
    if any(_ACCELERATE.fullmatch(n) for n in source.folders):
        return Evidence.NONE
    names = _loose_names(files)
    if not names:
        return Evidence.NONE
    return Evidence.STRUCTURE if _any_torch(source, names) else Evidence.NAME


def recognize_file(source: Source) -> Evidence:
    """Recognize one file by its first bytes or by its name."""
    if source.file is None or source.file.endswith(_SLICES_SUFFIX):
        return Evidence.NONE
    if looks_like_torch(source.head(source.file, _HEAD_BYTES)):
        return Evidence.STRUCTURE
    return Evidence.NAME if source.file.endswith(_PICKLE_SUFFIXES) else Evidence.NONE


def _any_torch(source: Source, names: Sequence[str]) -> bool:
    return any(looks_like_torch(source.head(name, _HEAD_BYTES)) for name in names[:4])


def _hf_names(files: Iterable[str]) -> list[str]:
    return [n for n in files if _ONE_FILE.fullmatch(n) or _SHARD.fullmatch(n)]


def _loose_names(files: Iterable[str]) -> list[str]:
    return [n for n in files if n.endswith(SUFFIXES) and n not in CONFIGURATION]


def open_hf(source: Source) -> Reader:
    """Open a folder with `pytorch_model*.bin`; paths are the names in the files."""
    store = source.store
    sizes = {e.name: e.size for e in store.list() if not e.is_folder}
    indexes = [source.file] if source.file is not None else [n for n in sizes if n.endswith(INDEX_SUFFIX)]
    weight_map: dict[str, str] = {}
    warnings: list[str] = []
    for index in indexes:
        files = read_index(store, index, sizes.get(index, 0))[0]
        if f"{index.removesuffix(INDEX_SUFFIX)}.bin" in sizes and not any(file in sizes for file in files.values()):
            warnings.append(old_index_warning(index))
        else:
            weight_map |= files
    chosen = sorted(set(weight_map.values())) or _unindexed(store, sizes)
    missing = [name for name in chosen if name not in sizes]
    if missing:
        tensor = next(t for t, f in weight_map.items() if f == missing[0])
        raise IncompleteError(
            f"{missing[0]} is missing, and with it all of {tensor!r}",
            where=store.url,
            found=f"{len(chosen) - len(missing)} of {len(chosen)} files of the index",
            fix="Copy the missing files next to the others.",
        )
    optimizer = [_OPTIMIZER] if _OPTIMIZER in sizes and source.file is None else []
    reader = _open_shards(store, {name: sizes[name] for name in (*chosen, *optimizer)}, weight_map)
    ignored = [n for n in _loose_names(sizes) if n not in (*chosen, *optimizer)]
    if ignored:
        shown = ", ".join(sorted(ignored)[:4])
        warnings.append(f"other torch files here are ignored, name one to read it: {shown}")
    return reader.with_manifest(replace(reader.manifest, warnings=(*reader.manifest.warnings, *warnings)))


def _unindexed(store: Store, sizes: Mapping[str, int]) -> list[str]:
    """Return the model's files without an index: one file, or all shards."""
    names = _hf_names(sizes)
    for name in ("pytorch_model.bin", "adapter_model.bin"):
        if name in names:
            return [name]
    shards = [m for n in names if (m := _SHARD.fullmatch(n))]
    wanted = {f"{m['stem']}-{i:05d}-of-{m['n']}.bin" for m in shards[:1] for i in range(1, int(m["n"]) + 1)}
    missing = sorted(wanted - set(names))
    if missing:
        raise IncompleteError(
            describe_missing(missing),
            where=store.url,
            fix="Copy the missing files next to the others.",
        )
    return sorted(wanted)


def _open_shards(store: Store, sizes: Mapping[str, int], weight_map: Mapping[str, str]) -> TorchReader:
    """Open shards with a common set of names; the index selects a shard for a name that several have."""
    # If the optimizer's file is among them, its paths start with `optimizer`, and paths of the shards with `model`.
    root: Path = ("model",) if _OPTIMIZER in sizes else ()

    def moved(path: Path) -> Path:
        return ("optimizer", *path[1:]) if path[0] == _OPTIMIZER else (*root, *path[1:])

    reader = open_files(store, sizes, {name: (name,) for name in sizes}, HF_FORMAT.name)
    manifest = reader.manifest
    tensors: dict[Path, TensorEntry] = {}
    for path, entry in manifest.tensors.items():
        file, name = str(path[0]), moved(path)
        if len(path) == 2 and weight_map.get(str(path[1]), file) != file:
            continue
        if name in tensors:
            raise two_files_error(str(name[-1]), f"{store.url}/{file}", tensors[name].pieces[0].file)
        tensors[name] = entry._replace(path=name)
    for wanted, file in weight_map.items():
        if (*root, wanted) not in tensors:
            raise unindexed_error(wanted, f"{store.url}/{file}")
    objects = {moved(path): replace(entry, path=moved(path)) for path, entry in manifest.objects.items()}
    kept = {moved(a): moved(b) for a, b in manifest.aliases.items()}
    aliases = {a: b for a, b in kept.items() if a in tensors and b in tensors}
    return reader.with_manifest(replace(manifest, tensors=tensors, objects=objects, aliases=aliases))


def open_loose(source: Source) -> Reader:
    """Open a folder of `torch.save` files; if there are several, paths start with the file's name."""
    # Rank files with LOCAL states, DTensors or ShardedTensors are merged to one checkpoint of full tensors.
    names = _loose_names(source.files)
    sizes = {name: source.listing[name].size for name in names}
    prefixes: dict[str, Path] = {name: (name,) if len(names) > 1 else () for name in names}
    notes = read_metadata(source.store, {name: source.listing[name].size for name in source.files})
    files = open_files(source.store, sizes, prefixes, LOOSE_FORMAT.name, allow_shards=True)
    reader = merge_rank_files(files, notes)
    skipped = sorted(CONFIGURATION & set(source.files))
    if skipped:
        warnings = (*reader.manifest.warnings, f"{skipped[0]} holds a live configuration object and is not read")
        reader.manifest = replace(reader.manifest, warnings=warnings)
    return reader


def open_file(source: Source) -> Reader:
    """Open a recognized file."""
    assert source.file is not None, "only single files are recognized"
    sizes = {source.file: source.listing[source.file].size}
    return merge_rank_files(open_files(source.store, sizes, {source.file: ()}, FILE_FORMAT.name, allow_shards=True))


HF_FORMAT = Format(
    name="hf-torch",
    title="Hugging Face pytorch_model.bin",
    looks_for="pytorch_model.bin, or pytorch_model.bin.index.json with its shards",
    recognize=recognize_hf,
    open=open_hf,
)
LOOSE_FORMAT = Format(
    name="torch-folder",
    title="a folder with torch.save files",
    looks_for="torch.save files named *.pt, *.pth, *.bin, *.ckpt",
    recognize=recognize_loose,
    open=open_loose,
)
FILE_FORMAT = Format(
    name="torch",
    title="a torch.save file",
    looks_for="a zip archive with */data.pkl, or a file named *.pt, *.pth, *.bin, *.ckpt",
    recognize=recognize_file,
    open=open_file,
)
