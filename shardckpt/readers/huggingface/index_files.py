"""Select the safetensors files of a checkpoint: indexes, shards, optimizer."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from shardckpt.encodings.budget import require_small
from shardckpt.encodings.safetensors import parse_json
from shardckpt.errors import FormatError, IncompleteError, UnsafeError, UnsupportedError
from shardckpt.storage.store import Store, read_bytes

SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
OPTIMIZER = "optimizer"
PARAM_GROUPS = "param_groups.json"
OPTIMIZER_FILES_KEY = "optimizer_files"
# Key in the `metadata` of a model's index, for this model's optimizer files. On a store without rename, an overwritten
# target temporarily contains files of two saves; the index, which is written last, names only one save's files.
PARAM_GROUPS_KEY = "param_groups"

_MAX_JSON_BYTES = 200_000_000
_MAX_SHARDS = 100_000
_MAX_HOLES = 100_000
_NUMBERED = re.compile(r"(?P<stem>.+)-(?P<i>\d{5})-of-(?P<n>\d{5})\.safetensors")
_VLLM_RANK = re.compile(r"model-rank-(?P<rank>\d+)-part-\d+.*\.safetensors")
_RANKED = re.compile(r"shard-(?P<rank>\d{5})-(?P<rest>.+)\.safetensors")


@dataclass(frozen=True, slots=True)
class Files:
    """One checkpoint's files."""

    sizes: Mapping[str, int]  # payload file to size in bytes, -1 for a missing file of an index
    # Tensor name to file, from the indexes; empty without an index.
    weight_map: Mapping[str, str] = field(default_factory=dict)
    param_groups: str = ""  # file with the optimizer's groups; empty without one
    warnings: tuple[str, ...] = ()  # oddities, one sentence each
    missing: tuple[str, ...] = ()  # missing files according to the numbers in other file names
    unread: tuple[str, ...] = ()  # files of `torch.save` in the folder that the reader skips


@dataclass(frozen=True, slots=True)
class _Index:
    weight_map: Mapping[str, str]
    optimizer_files: tuple[str, ...] | None
    param_groups: str


def payload_sizes(store: Store, folder: str = "") -> dict[str, int]:
    """Return the safetensors files directly in a folder: name to size in bytes."""
    return {e.name: e.size for e in store.list(folder) if e.name.endswith(SUFFIX) and not e.is_folder}


def choose(store: Store, sizes: Mapping[str, int], indexes: Sequence[str]) -> Files:
    """Select the indexed files, and others whose content no index names."""
    read = {name: _read_index(store, name) for name in indexes}
    old = [name for name, index in read.items() if _is_replaced(name, index, sizes)]
    read = {name: index for name, index in read.items() if name not in old}
    model = [index for name, index in read.items() if not name.startswith(OPTIMIZER)]
    if not read and len({found["rank"] for found in map(_VLLM_RANK.fullmatch, sizes) if found}) > 1:
        raise UnsupportedError(
            "this folder is for vLLM's sharded_state loader: each file has a rank's part of every tensor",
            where=store.url,
            fix="Read the checkpoint that it was made from. `vllm serve FOLDER --load-format sharded_state` serves it.",
        )
    # An index that lists the optimizer's files selects all of them; otherwise their names decide.
    lists_all = next((index for index in (*model, *read.values()) if index.optimizer_files is not None), None)
    weight_map: dict[str, str] = {}
    for name, index in read.items():
        if lists_all is None or index is lists_all or not name.startswith(OPTIMIZER):
            weight_map |= index.weight_map
    indexed = {*weight_map.values(), *((lists_all.optimizer_files or ()) if lists_all else ())}
    loose: list[str] = []
    if lists_all is None:
        loose = [name for name in sizes if name not in indexed and (not model or name.startswith(OPTIMIZER))]
    chosen = {name: sizes.get(name, -1) for name in sorted({*indexed, *_choose_preferred(loose)})}
    if lists_all is not None:
        groups = lists_all.param_groups
    else:
        groups = PARAM_GROUPS if any(name.startswith(OPTIMIZER) for name in chosen) else ""
    ignored = sorted(name for name in sizes if name not in chosen)
    warnings = [old_index_warning(name) for name in old]
    if ignored:
        shown = ", ".join(ignored[:4])
        one = next((name for name in chosen if not name.startswith(OPTIMIZER)), "the optimizer")
        why = "not in the index" if read else f"no part of {one}"
        files = "1 safetensors file is" if len(ignored) == 1 else f"{len(ignored)} safetensors files are"
        warnings.append(f"{files} {why} and {'is' if len(ignored) == 1 else 'are'} ignored: {shown}")
    return Files(chosen, weight_map, groups, tuple(warnings), tuple(islice(_holes(chosen), _MAX_HOLES)))


def _is_replaced(name: str, index: _Index, sizes: Mapping[str, int]) -> bool:
    """Return True if a save in one file replaced an index's files."""
    # transformers removes these files, leaves their index, and loads the one file.
    has_one = name.removesuffix(INDEX_SUFFIX) + SUFFIX in sizes and index.optimizer_files is None
    return has_one and not any(file in sizes for file in index.weight_map.values())


def _choose_preferred(loose: Sequence[str]) -> list[str]:
    """Return the file that readers load by default, else all files."""
    optimizer = [n for n in loose if n.startswith(OPTIMIZER)]
    others = [n for n in loose if not n.startswith(OPTIMIZER)]
    for name in ("model.safetensors", "adapter_model.safetensors"):
        if name in others:
            return [name, *optimizer]
    return [*others, *optimizer]


def read_json(store: Store, name: str, size: int | None = None) -> dict[str, object]:
    """Read a JSON object from a file."""
    where = f"{store.url}/{name}"
    size = store.size(name) if size is None else size
    require_small("the file", size, _MAX_JSON_BYTES, where)
    raw = parse_json(read_bytes(store, name, 0, size), where=where)
    if not isinstance(raw, dict):
        raise FormatError("not a JSON object", where=where)
    return raw


def read_index(store: Store, name: str, size: int | None = None) -> tuple[dict[str, str], dict[str, object]]:
    """Read an index: tensor names to file names, and its metadata. Raises errors like `read_json`."""
    where = f"{store.url}/{name}"
    raw = read_json(store, name, size)
    weight_map, metadata = raw.get("weight_map"), raw.get("metadata")
    if not isinstance(weight_map, dict) or not all(isinstance(f, str) for f in weight_map.values()):
        raise FormatError("the index has no `weight_map` from names to files", where=where)
    _require_plain(weight_map.values(), where)
    return weight_map, metadata if isinstance(metadata, dict) else {}


def _read_index(store: Store, name: str) -> _Index:
    weight_map, fields = read_index(store, name)
    listed, groups = fields.get(OPTIMIZER_FILES_KEY), fields.get(PARAM_GROUPS_KEY, "")
    files = tuple(map(str, listed)) if isinstance(listed, list) else None
    _require_plain((*(files or ()), str(groups) or PARAM_GROUPS), f"{store.url}/{name}")
    folder = name.rpartition("/")[0]
    return _Index({key: f"{folder}/{file}" if folder else file for key, file in weight_map.items()}, files, str(groups))


def old_index_warning(name: str) -> str:
    """Return the warning about an index whose files a save in one file replaced."""
    return f"{name} is from an earlier save, all its files are missing, and it is ignored"


def two_files_error(name: str, where: str, other: str) -> FormatError:
    """Return the error for a tensor that two of a model's files contain."""
    return FormatError(f"tensor {name!r} is in two files", where=where, found=other)


def unindexed_error(name: str, where: str) -> IncompleteError:
    """Return the error for a tensor that the file named in the index lacks."""
    return IncompleteError(f"tensor {name!r} is not in the file the index names", where=where, found="no such key")


def _require_plain(files: Iterable[str], where: str) -> None:
    for file in set(files):
        if not file or set(file) & set("/\\\0") or file in {".", ".."}:
            raise UnsafeError("the index names a file outside its folder", where=where, found=file)


def _holes(names: Iterable[str]) -> Iterator[str]:
    """Yield missing files according to numbers in existing names: `-i-of-n`, or DCP's rank numbers."""
    groups: dict[tuple[str, int], set[int]] = {}
    ranks: dict[int, set[str]] = {}
    for name in names:
        base = name.rpartition("/")[2]
        if match := _RANKED.fullmatch(base):
            ranks.setdefault(int(match["rank"]), set()).add(match["rest"])
        elif match := _NUMBERED.fullmatch(base):
            groups.setdefault((match["stem"], int(match["n"])), set()).add(int(match["i"]))
    for (stem, n), seen in groups.items():
        yield from (f"{stem}-{i:05d}-of-{n:05d}{SUFFIX}" for i in range(1, min(n, _MAX_SHARDS) + 1) if i not in seen)
    rests = sorted(set().union(*ranks.values()))
    for rank in range(1, max(ranks, default=0) + 1):
        there = ranks.get(rank, set())
        yield from (f"shard-{rank:05d}-{rest}{SUFFIX}" for rest in rests if rest not in there)
