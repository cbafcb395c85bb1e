"""A DeepSpeed checkpoint's file names, their kinds, and their folder."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeVar

from shardckpt.errors import AmbiguousError, FormatError, IncompleteError
from shardckpt.reader import Source
from shardckpt.storage.store import Store

LATEST = "latest"
_MAX_TAG_BYTES = 4096
_N = r"\d{1,7}"
_RANK = re.compile(
    rf"(?P<prefix>(bf16_|fp16_)?zero_pp_rank_)(?P<rank>{_N})_mp_rank_(?P<mp>{_N})_(?P<kind>optim|model)_states\.pt"
)
_MODEL = re.compile(rf"mp_rank_(?P<mp>{_N})_model_states\.pt")
_LAYER = re.compile(rf"layer_(?P<layer>{_N})(-model_(?P<mp>{_N}))?-model_states\.pt")
_EXPERT = re.compile(rf"(layer_(?P<layer>{_N})_)?expert_(?P<expert>{_N})_mp_rank_(?P<mp>{_N})_model_states\.pt")
_EXPERT_OPTIM = re.compile(rf"expp_rank_(?P<rank>{_N})_mp_rank_(?P<mp>{_N})_optim_states\.pt")
_ALL = (_RANK, _MODEL, _LAYER, _EXPERT, _EXPERT_OPTIM)

_K = TypeVar("_K")

Place = tuple[int, int]  # data-parallel rank and model-parallel rank


@dataclass(slots=True)
class StateFiles:
    """One checkpoint's files by content; names are relative to the store."""

    folder: str  # folder of the files in the store; empty for the root
    sizes: dict[str, int] = field(default_factory=dict)  # file name to size in bytes
    # Model-parallel rank to the file with the full model (stages 0 to 2).
    models: dict[int, str] = field(default_factory=dict)
    # Data-parallel and model-parallel rank to the file with the rank's part of the model (stage 3).
    parts: dict[Place, str] = field(default_factory=dict)
    # Data-parallel and model-parallel rank to the file with the rank's part of the optimizer.
    optims: dict[Place, str] = field(default_factory=dict)
    # Layer and model-parallel rank to the layer's file (pipelines).
    layers: dict[tuple[int, int], str] = field(default_factory=dict)
    # Layer, expert and model-parallel rank to the expert's file; layer -1 in old checkpoints.
    experts: dict[tuple[int, int, int], str] = field(default_factory=dict)
    # Expert-parallel and model-parallel rank to the optimizer file.
    expert_optims: dict[Place, str] = field(default_factory=dict)

    @property
    def model_ranks(self) -> list[int]:
        """Model-parallel ranks for which any file exists."""
        places = (*self.parts, *self.optims)
        return sorted({*self.models, *(mp for _, mp in places), *(key[-1] for key in (*self.layers, *self.experts))})


def is_state_file(name: str) -> bool:
    """Return True if DeepSpeed writes files with this name."""
    return any(pattern.fullmatch(name) for pattern in _ALL)


def is_part(name: str) -> bool:
    """Return True if a file contains a part of a model: a rank, layer or expert."""
    return is_state_file(name) and _MODEL.fullmatch(name) is None


def find_folder(source: Source) -> str | None:
    """Return the folder with a source's state files, empty for the root; None if no folder has any."""
    if source.file is not None:
        return None
    if any(map(is_state_file, source.files)):
        return ""
    tag = read_tag(source, LATEST)
    if tag in source.folders:
        return tag if holds_states(source.store, tag) else None
    found = [name for name in source.folders if name.startswith("global_step") and holds_states(source.store, name)]
    if tag and found:
        raise IncompleteError(
            f"{LATEST} names a folder that is not there",
            where=source.url,
            found=tag,
            expected=", ".join(found[:4]),
            fix="Point at one folder, or copy the missing one.",
        )
    if len(found) > 1:
        raise AmbiguousError(
            "several steps are here and no file `latest` names one",
            where=source.url,
            found=", ".join(found[:8]),
            fix="Point at one folder.",
        )
    return found[0] if found else None


def holds_states(store: Store, folder: str) -> bool:
    """Return True if a folder contains state files."""
    return any(is_state_file(entry.name.rpartition("/")[2]) for entry in store.list(folder) if not entry.is_folder)


def read_tag(source: Source, name: str) -> str:
    """Return the folder that a pointer file names; empty if it names no subfolder."""
    entry = source.listing.get(name)
    if entry is None or entry.is_folder or not 0 < entry.size <= _MAX_TAG_BYTES:
        return ""
    return source.head(name, entry.size).decode("utf-8", "replace").strip()


def sort_files(store: Store, folder: str) -> StateFiles:
    """Return a folder's state files, sorted by content."""
    entries = [entry for entry in store.list(folder) if not entry.is_folder]
    found = StateFiles(folder)
    for entry in sorted(entries, key=lambda e: e.name):
        name = entry.name.rpartition("/")[2]
        if _put(found, name, entry.name, store.url):
            found.sizes[entry.name] = entry.size
    return found


def _put(found: StateFiles, name: str, path: str, url: str) -> bool:
    """Add one file to its kind; return True if its name is known."""
    if match := _RANK.fullmatch(name):
        place = int(match["rank"]), int(match["mp"])
        _put_once(found.optims if match["kind"] == "optim" else found.parts, place, path, url)
    elif match := _MODEL.fullmatch(name):
        _put_once(found.models, int(match["mp"]), path, url)
    elif match := _LAYER.fullmatch(name):
        _put_once(found.layers, (int(match["layer"]), int(match["mp"] or 0)), path, url)
    elif match := _EXPERT.fullmatch(name):
        layer = -1 if match["layer"] is None else int(match["layer"])
        _put_once(found.experts, (layer, int(match["expert"]), int(match["mp"])), path, url)
    elif match := _EXPERT_OPTIM.fullmatch(name):
        _put_once(found.expert_optims, (int(match["rank"]), int(match["mp"])), path, url)
    else:
        return False
    return True


def _put_once(files: dict[_K, str], key: _K, path: str, url: str) -> None:
    if key in files:
        raise FormatError(
            "two files have the same rank",
            where=url,
            found=f"{files[key]} and {path}",
            fix="Keep each save alone in its own folder.",
        )
    files[key] = path


def optim_file_name(known: Iterable[str], rank: int, mp: int) -> str:
    """Return the name for a missing optimizer file, derived from an existing one."""
    beside = next(iter(known))
    folder, _, name = beside.rpartition("/")
    match = _RANK.fullmatch(name)
    prefix = match["prefix"] if match else "zero_pp_rank_"
    return f"{folder}/{prefix}{rank}_mp_rank_{mp:02d}_optim_states.pt".removeprefix("/")


def part_file_name(folder: str, rank: int, mp: int) -> str:
    """Return the name for a missing file with a rank's part of the model."""
    return f"{folder}/zero_pp_rank_{rank}_mp_rank_{mp:02d}_model_states.pt".removeprefix("/")
