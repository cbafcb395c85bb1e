"""Reader of DeepSpeed's universal checkpoints: `zero/<name>/fp32.pt, ...`.

Each parameter has a folder with full tensors. `ds_to_universal.py` converts a `save_checkpoint` from any stage and
topology to this format. Next to `zero/` are copies of the model files, which contain the names' order, the module's own
dtypes and weights, and buffers.

Paths are as in `shardckpt.readers.deepspeed.reader`: `model`, `master`, `optimizer`, followed by names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod

from shardckpt.boxes import full_box
from shardckpt.errors import FormatError, IncompleteError
from shardckpt.manifest import ObjectEntry, Path, TensorEntry
from shardckpt.reader import Evidence, Format, Reader, Source
from shardckpt.readers.deepspeed import reader as deepspeed
from shardckpt.readers.deepspeed.locate_params import DataParallelRanks, build_ranks
from shardckpt.readers.deepspeed.merge_partitions import MASTER, MODEL, OPTIMIZER, merge_frozen, tie_shared
from shardckpt.readers.deepspeed.state_files import ModelState, StateFileContents, read_groups, read_model_state
from shardckpt.readers.deepspeed.zero_files import find_folder, read_tag, sort_files
from shardckpt.readers.merge_shards import ManifestBuilder, move_rank_values, slice_shard
from shardckpt.readers.torchsave.reader import open_files
from shardckpt.storage.store import Store

LATEST = "latest_universal"
ZERO, WEIGHTS, STEP = "zero", "fp32", "step"
OPTIMIZER_FILE = "optimizer_state.pt"
_SUFFIX = ".pt"
_STATE, _GROUPS = "state", "param_groups"


def recognize(source: Source) -> Evidence:
    """Recognize a folder with `zero/` and a parameter, or with `latest_universal`."""
    return Evidence.NONE if _folder(source) is None else Evidence.STRUCTURE


def open_source(source: Source) -> Reader:
    """Open a recognized source."""
    folder = _folder(source)
    assert folder is not None, "only recognized sources are opened"
    store = source.store
    states = sort_files(store, folder)
    params = dict(_params(store, f"{folder}/{ZERO}".removeprefix("/")))
    sizes = {**states.sizes, **{file: size for slots in params.values() for file, size in slots.values()}}
    shared = f"{folder}/{ZERO}/{OPTIMIZER_FILE}".removeprefix("/")
    listed = {entry.name: entry.size for entry in store.list(f"{folder}/{ZERO}".removeprefix("/"))}
    if shared in listed:
        sizes[shared] = listed[shared]
    reader = open_files(store, sizes, {file: (file,) for file in sizes}, FORMAT.name)
    contents = StateFileContents(reader.manifest, store.url)
    wanted = states.models or {mp: file for (rank, mp), file in sorted(states.parts.items()) if rank == 0}
    files = list(wanted.values())
    if not files:
        raise IncompleteError(
            "no model file is next to zero/",
            where=f"{store.url}/{folder}".rstrip("/"),
            expected="mp_rank_00_model_states.pt, or zero_pp_rank_*_model_states.pt: buffers, ties and order are in it",
            fix="Copy the missing file next to zero/; DeepSpeed needs it too.",
        )
    builder = ManifestBuilder(store.url)
    places = () if states.models else sorted(states.parts.items())
    parts = {rank: read_model_state(contents, file) for (rank, mp), file in places if mp == 0}
    ranks = build_ranks(contents, states, 0, parts, {}) if parts else None
    models = [read_model_state(contents, file) for file in files]
    merger = _UniversalMerger(contents, builder, params, models, ranks)
    merger.put_model()
    merger.put_optimizer(shared if shared in sizes else None)
    deepspeed.put_loop_state(builder, contents, files)
    merged = builder.build_manifest(reader.manifest, FORMAT.name)
    return reader.with_manifest(move_rank_values(reader, merged))


def _folder(source: Source) -> str | None:
    """Return the folder that contains `zero/`, empty for the root; None if no folder does."""
    if source.file is not None:
        return None
    if ZERO in source.folders and _holds_params(source.store, ZERO):
        return ""
    tag = read_tag(source, LATEST)
    if tag not in source.folders or not _holds_params(source.store, f"{tag}/{ZERO}"):
        return None
    return None if read_tag(source, "latest") in source.folders and find_folder(source) is not None else tag


def _holds_params(store: Store, zero: str) -> bool:
    """Return True if the first folder in `zero/` is a parameter's folder."""
    first = next((entry.name for entry in store.list(zero) if entry.is_folder), None)
    return first is not None and any(e.name == f"{first}/{WEIGHTS}{_SUFFIX}" for e in store.list(first))


def _params(store: Store, zero: str) -> Iterator[tuple[str, dict[str, tuple[str, int]]]]:
    """Yield each parameter with its slots: slot to file name and size in bytes."""
    for folder in sorted(entry.name for entry in store.list(zero) if entry.is_folder):
        name = folder.rpartition("/")[2]
        slots = {
            entry.name[len(folder) + 1 :].removesuffix(_SUFFIX): (entry.name, entry.size)
            for entry in sorted(store.list(folder), key=lambda e: e.name)
            if not entry.is_folder and entry.name.endswith(_SUFFIX)
        }
        if WEIGHTS not in slots:
            raise IncompleteError(
                f"parameter {name!r} has no weights",
                where=f"{store.url}/{folder}",
                found=", ".join(slots) or "an empty folder",
                expected=f"{WEIGHTS}{_SUFFIX}",
                fix="Convert the checkpoint again, or copy the missing file.",
            )
        yield name, slots


@dataclass(frozen=True, slots=True)
class _UniversalMerger:
    """Collects the parameter files by name."""

    contents: StateFileContents
    builder: ManifestBuilder  # builder that receives the tensors and values
    params: Mapping[str, Mapping[str, tuple[str, int]]]  # parameter to slot to file name and size in bytes
    models: list[ModelState]  # model files of data-parallel rank 0, one for each model-parallel rank
    ranks: DataParallelRanks | None  # in stage 3, model files of all ranks, which contain frozen parameters

    def put_model(self) -> None:
        """Add the module's own weights if a file contains them in full, else the rounded fp32 weights."""
        trained = self._trained()
        shared = {alias: name for state in self.models for alias, name in state.shared.items()}
        for state in self.models:
            for name, live in state.module.items():
                if (MODEL, name) in self.builder.tensors or (name in shared and name not in trained):
                    continue
                self.builder.put((MODEL, name), self._live(state, name, live))
        for name in self.params:
            if (MODEL, name) not in self.builder.tensors and name not in shared:
                self.builder.put((MODEL, name), self._weights(name))
        for name in trained:
            self.builder.put((MASTER, name), self._weights(name))
        tie_shared(self.builder, self.models, trained)

    def _trained(self) -> dict[str, None]:
        """Return the parameters with optimizer state."""
        names: dict[str, None] = {}
        for unit in (unit for state in self.models for unit in state.shapes or ()):
            slots = {slot for name in unit for slot in self.params.get(name, ())}
            for name in unit:
                lacking = sorted(slots - self.params[name].keys()) if name in self.params else [WEIGHTS]
                if lacking:
                    raise IncompleteError(
                        f"parameter {name!r} has no {lacking[0]}{_SUFFIX}, which others in its group have",
                        where=self.contents.url,
                        fix="Convert the checkpoint again, or copy the missing file.",
                    )
                names[name] = None
        return names

    def _live(self, state: ModelState, name: str, live: TensorEntry) -> TensorEntry:
        if name not in self.params:
            shape = state.frozen.get(name)
            if shape is None or live.shape == shape or not self.ranks:
                return live
            return merge_frozen(self.builder, self.ranks, name, shape)
        weights = self._weights(name)
        is_full = live.shape == weights.shape or (not self.ranks and prod(live.shape) >= prod(weights.shape))
        if is_full and len(self.models) == 1:  # a vocabulary may be longer here: the conversion removed its padding
            return live
        return weights._replace(delivered="" if live.stored == weights.stored else live.stored)

    def _weights(self, name: str) -> TensorEntry:
        return self._reshape(name, self._read_tensor(self.params[name][WEIGHTS][0]))

    def _reshape(self, name: str, entry: TensorEntry) -> TensorEntry:
        """Return a tensor in its parameter's shape; stage 3 stores it flat, possibly with padding at the end."""
        shapes = (unit[name] for state in self.models for unit in state.shapes or () if name in unit)
        shape = next(shapes, entry.shape)
        if len(entry.shape) != 1 or entry.shape == shape:
            return entry
        padding = entry.shape[0] - prod(shape)
        if not 0 <= padding < max(*(state.world for state in self.models), 1):
            raise FormatError(
                f"{name!r} is not as long as param_shapes say",
                where=f"{self.contents.url}/{entry.pieces[0].file}",
                found=f"{entry.shape[0]} elements",
                expected=f"{prod(shape)} for the shape {shape}",
            )
        return entry._replace(shape=shape, pieces=tuple(slice_shard(entry, [(full_box(shape), 0)])))

    def _read_tensor(self, file: str) -> TensorEntry:
        """Return the only tensor in a file: bare, or under the key `param`."""
        tensors = self.contents.tensors(file)
        for path in (("param",), ("tensor",)):
            if path in tensors:
                return tensors[path]
        raise FormatError(
            "a parameter's file holds no tensor",
            where=self.contents.where(file),
            found=", ".join(".".join(map(str, path)) for path in list(tensors)[:4]) or "none",
            expected="a tensor, or a dict with one under `param`",
        )

    def put_optimizer(self, shared: str | None) -> None:
        """Add the optimizer's slots and groups."""
        for name, slots in self.params.items():
            for slot, (file, _) in slots.items():
                if slot != WEIGHTS:
                    self._put_slot(name, slot, file)
        if shared is None:
            return
        units: list[dict[str, None]] = []
        for state in self.models:
            for i, unit in enumerate(state.shapes or ()):
                units += [{}] * (i == len(units))
                units[i].update(dict.fromkeys(name for name in unit if name in self.params))
        groups: list[object] = []
        for group in read_groups(self.contents, shared, ()):
            plain = {k: v.value for k, v in group.items() if isinstance(v, ObjectEntry)}
            ids = plain.pop("params", None)
            known = [i for i in ids if type(i) is int and 0 <= i < len(units)] if isinstance(ids, list) else []
            groups.append({**plain, "params": [name for i in known for name in units[i]]})
            for i in known:
                self._put_steps(shared, i, units[i])
        self.builder.put_value((OPTIMIZER, _GROUPS), groups)

    def _put_slot(self, name: str, slot: str, file: str) -> None:
        path: Path = (OPTIMIZER, _STATE, name, slot)
        value = self.contents.value(file, "object")
        if value is not None:
            self.builder.put_value(path, value)
        else:
            self.builder.put(path, self._reshape(name, self._read_tensor(file)))

    def _put_steps(self, shared: str, unit: int, names: Mapping[str, None]) -> None:
        """Add the parameters' steps in stage 3, which stores one for each flat tensor."""
        source: Path = ("optimizer_state_dict", _STATE, unit, STEP)
        tensor, value = self.contents.tensors(shared).get(source), self.contents.value(shared, *source)
        for name in names:
            path: Path = (OPTIMIZER, _STATE, name, STEP)
            if path in self.builder.tensors or path in self.builder.objects:
                continue
            if tensor is not None and not tensor.shape:
                self.builder.put(path, tensor)
            elif value is not None:
                self.builder.put_value(path, value)


FORMAT = Format(
    name="deepspeed-universal",
    title="DeepSpeed's universal checkpoint",
    looks_for="zero/<parameter>/fp32.pt, or a file `latest_universal` that names its folder",
    recognize=recognize,
    open=open_source,
)
