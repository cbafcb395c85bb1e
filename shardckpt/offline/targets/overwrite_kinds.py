"""What `--overwrite` may replace: one checkpoint of the format that is written."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

from shardckpt.format.dcp.writer import METADATA
from shardckpt.format.encodings.safetensors import looks_like_safetensors
from shardckpt.format.native.commit import STEP
from shardckpt.format.torchsave.reader import looks_like_torch
from shardckpt.offline.targets.deepspeed_universal import LATEST
from shardckpt.offline.targets.deepspeed_universal import TARGET as UNIVERSAL
from shardckpt.storage.replaceable import FileKind, FolderKind, Kind

_FRESH = "(-[0-9a-f]{8})?"
CONFIG = re.compile(r"(generation_|adapter_)?config\.json")
"""A model's config belongs to its weights; a tokenizer and whatever else lies beside them is somebody's work."""

_SHARD = rf"{_FRESH}(-\d{{5}}-of-\d{{5}})?"


def _safetensors(stem: str) -> FolderKind:
    return FolderKind(
        "one checkpoint of safetensors files",
        payload=re.compile(rf"({stem}|optimizer){_SHARD}\.safetensors"),
        beside=re.compile(rf"({stem}|optimizer)\.safetensors\.index\.json|param_groups{_FRESH}\.json|{CONFIG.pattern}"),
        is_one=looks_like_safetensors,
    )


def _torch(stem: str) -> FolderKind:
    return FolderKind(
        "one checkpoint of torch files",
        payload=re.compile(rf"{stem}{_SHARD}\.bin|optimizer\.bin"),
        beside=re.compile(rf"{stem}\.bin\.index\.json|{CONFIG.pattern}"),
        is_one=looks_like_torch,
    )


_DCP = FolderKind(
    "one DCP checkpoint",
    payload=re.compile(rf"__\d+_\d+{_FRESH}\.distcp"),
    beside=re.compile(re.escape(METADATA)),
)
_UNIVERSAL = FolderKind(
    "one universal checkpoint of DeepSpeed",
    payload=re.compile(r"global_step\d+_universal/(zero/([^/]+/)?[^/]+|[^/]+_model_states)\.pt"),
    beside=re.compile(re.escape(LATEST)),
)
RANK_FILES = FolderKind("one checkpoint of a torch file for each rank", payload=re.compile(r"rank\d+\.pt"))
"""What `reshard --to torch` writes."""


def kind_of_folder(to: str, *, is_adapter: bool = False, carried: Iterable[str] = ()) -> FolderKind:
    """Return which files may be replaced.

    Args:
        to: The format that is written.
        is_adapter: Whether that is an adapter.
        carried: Names of other files that are written: the ones of these names that lie there belong to the result.
    """
    kinds = {
        "native": STEP,
        "dcp": _DCP,
        UNIVERSAL: _UNIVERSAL,
        "torch": _torch("adapter_model" if is_adapter else "pytorch_model"),
        "safetensors": _safetensors("adapter_model" if is_adapter else "model"),
    }
    return replace(kinds[to], renewed=frozenset(carried))


def kind_of_file(to: str) -> Kind:
    """Return which file may be replaced, where the result is one file.

    Args:
        to: The format that is written.
    """
    if to == "torch":
        return FileKind("a file of torch.save", looks_like_torch)
    return FileKind("a safetensors file", looks_like_safetensors)
