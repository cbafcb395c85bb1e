"""Reader of folders by `Accelerator.save_state` (Accelerate 1.x).

With FSDP, FULL states are `pytorch_model_fsdp.bin` and `optimizer.bin`. SHARDED states are DCP folders
`pytorch_model_fsdp_0/` and `optimizer_0/`. With `use_dcp=False`, and for LOCAL states, each rank has a file
`pytorch_model_fsdp_0_rank0.bin`. Without FSDP there is `model.safetensors` or `pytorch_model.bin`.

Further models and optimizers have a number. The training loop's small files are in the same folder, as for
`transformers.Trainer`. Paths are `model`, `model_1`, ..., `optimizer`, `optimizer_1`, ..., followed by names.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import partial

from shardckpt.errors import AmbiguousError, UnsupportedError
from shardckpt.manifest import Path
from shardckpt.reader import Evidence, Format, Reader, Source
from shardckpt.readers.dcp import reader as dcp
from shardckpt.readers.frameworks.composite import SubReader, join
from shardckpt.readers.huggingface import reader as hf
from shardckpt.readers.ranks.fsdp1_flat_param import read_metadata
from shardckpt.readers.ranks.merge_local_states import MergedTorchReader, merge_rank_files
from shardckpt.readers.ranks.rank_files import RankFile
from shardckpt.readers.torchsave.reader import open_files

_FULL = re.compile(r"(?P<kind>pytorch_model_fsdp|optimizer)(_(?P<i>[1-9]\d{0,3}))?\.bin")
_SHARDED = re.compile(r"(?P<kind>pytorch_model_fsdp|optimizer)_(?P<i>\d{1,4})")
_PLAIN = re.compile(r"(?P<kind>model|pytorch_model)(_(?P<i>[1-9]\d{0,3}))?(?P<suffix>\.safetensors|\.bin)")
_RANK_FILE = re.compile(r"(?P<kind>pytorch_model_fsdp|optimizer)(_(?P<i>\d{1,4}))?_rank(?P<rank>\d{1,9})\.bin")
_BESIDE = re.compile(
    r"(scheduler|sampler|dl_state_dict)(_\d+)?\.bin|(scaler|scheduler)\.pt|rng_state(_\d+)?\.pth"
    r"|(random_states|custom_checkpoint)_\d+\.pkl"
)
_RANDOM_STATES = re.compile(r"random_states_\d+\.pkl")
_MODEL = "model"
_KEYS = {"pytorch_model_fsdp": "model", "optimizer": "optimizer", "model": "model", "pytorch_model": "model"}


def recognize(source: Source) -> Evidence:
    """Recognize a folder by its model files, or by its random states."""
    if source.file is not None:
        return Evidence.NONE
    names = [*source.files, *source.folders]
    if any(name.startswith("pytorch_model_fsdp") and _slot(name) for name in names):
        return Evidence.STRUCTURE
    has_loop = any(_RANDOM_STATES.fullmatch(name) for name in source.files)
    return Evidence.STRUCTURE if has_loop and any(_slot(name) for name in names) else Evidence.NONE


def _slot(name: str) -> str:
    """Return a file's or folder's path key: a model, an optimizer, or empty."""
    match = _FULL.fullmatch(name) or _SHARDED.fullmatch(name) or _RANK_FILE.fullmatch(name) or _PLAIN.fullmatch(name)
    if match is None:
        return ""
    i = int(match["i"] or 0)
    return f"{_KEYS[match['kind']]}_{i}" if i else _KEYS[match["kind"]]


def open_source(source: Source) -> Reader:
    """Open a recognized source."""
    slots, ignored = _choose_files(source)
    ranked = {name: source.listing[name].size for name in slots if _RANK_FILE.fullmatch(name)}
    full = {name: source.listing[name].size for name in slots if name.endswith(".bin") and name not in ranked}
    parts = list(_parts(source, slots, {**full, **ranked}, full))
    if ranked:
        parts.append(SubReader(_open_rank_files(source, slots, ranked), partial(_below, "", "")))
    other_files = {name: source.listing[name].size for name in source.files if _BESIDE.fullmatch(name)}
    warnings = [f"{', '.join(ignored[:4])} are next to the FSDP model and are ignored"] if ignored else []
    return join(FORMAT.name, source.store, parts, other_files, warnings, ignored)


def _open_rank_files(source: Source, slots: Mapping[str, str], sizes: Mapping[str, int]) -> Reader:
    """Open the rank files; one model's or optimizer's files are merged."""
    files = [
        RankFile(name, (name,), (slots[name],), int(match["rank"]))
        for name in sizes
        if (match := _RANK_FILE.fullmatch(name))
    ]
    notes = read_metadata(source.store, {name: source.listing[name].size for name in source.files})
    prefixes: dict[str, Path] = {name: (name,) for name in sizes}
    reader = open_files(source.store, sizes, prefixes, FORMAT.name, allow_shards=True)
    if reader.notes:
        return merge_rank_files(reader)
    shared = {path[0] for path in reader.shards}
    for slot in dict.fromkeys(slots[name] for name in sizes):
        names = [name for name in sizes if slots[name] == slot]
        if slot.startswith(_MODEL) and not shared & set(names):
            raise UnsupportedError(
                "this was saved rank by rank, and nothing in the files says which part each holds",
                where=source.url,
                found=f"{names[0]} and {len(names) - 1} more" if len(names) > 1 else names[0],
                expected="DTensors, ShardedTensors or flat parameters",
                fix="Load it in training and save with another state_dict_type.",
            )
    return MergedTorchReader(reader, files, notes)


def _parts(
    source: Source, slots: Mapping[str, str], torch_files: Mapping[str, int], full: Mapping[str, int]
) -> Iterator[SubReader]:
    store = source.store
    for name, slot in slots.items():
        if name in source.folders:
            root = _KEYS[_SHARDED.fullmatch(name)["kind"]]  # type: ignore[index]  # a folder has no other form
            yield SubReader(dcp.open_folder(store, name), partial(_below, slot, root))
        elif name not in torch_files:
            yield SubReader(hf.open_source(Source(store, name)), partial(_below, slot, ""))
    if full:
        prefixes: dict[str, Path] = {name: (slots[name],) for name in full}
        yield SubReader(open_files(store, full, prefixes, FORMAT.name), partial(_below, "", ""))


def _below(slot: str, root: str, path: Path) -> Path:
    """Return a path below its model's or optimizer's key, which replaces a DCP folder's one key."""
    if not slot:
        return path
    if root and path[0] == root:
        return (slot, *path[1:])
    first = str(path[0])
    if root and len(path) == 1 and first.startswith(f"{root}."):
        return slot, first[len(root) + 1 :]
    return (slot, *path)


def _choose_files(source: Source) -> tuple[dict[str, str], list[str]]:
    """Return the files to read with their path keys, models first, and the others."""
    found: dict[str, list[str]] = {}
    for name in sorted([*source.files, *source.folders]):
        slot = _slot(name)
        is_folder = name in source.folders
        if slot and is_folder == bool(_SHARDED.fullmatch(name)):
            found.setdefault(slot, []).append(name)
    chosen: dict[str, str] = {}
    ignored: list[str] = []
    for slot in sorted(found, key=_slot_order):
        names = found[slot]
        ranked = [n for n in names if _RANK_FILE.fullmatch(n)]
        forms = [n for n in names if n not in ranked]
        fsdp = [n for n in forms if not _PLAIN.fullmatch(n)]
        if len(fsdp or forms) > 1 or (fsdp and ranked):
            raise _two_forms(source, slot, [*(fsdp or forms), *ranked[:1]])
        taken = fsdp or ranked or forms
        chosen |= dict.fromkeys(taken, slot)
        ignored += [n for n in names if n not in taken]
    return chosen, ignored


def _slot_order(slot: str) -> tuple[str, int]:
    key, _, i = slot.partition("_")
    return key, int(i or 0)


def _two_forms(source: Source, slot: str, names: list[str]) -> AmbiguousError:
    return AmbiguousError(
        f"{slot} is here in two forms",
        where=source.url,
        found=", ".join(names),
        fix="Point at the file or folder that is meant.",
    )


FORMAT = Format(
    name="accelerate",
    title="folder by Accelerator.save_state",
    looks_for="pytorch_model_fsdp* files or folders, or a model next to random_states_*.pkl",
    recognize=recognize,
    open=open_source,
)
