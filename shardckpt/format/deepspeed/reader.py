"""Folders of DeepSpeed's `save_checkpoint`, ZeRO stages 0 to 3: the tag's folder, or the one with it and `latest`.

Paths are `model` (the module's own weights), `master` (the optimizer's copies, mostly float32) and `optimizer`, then
names; what else a model file holds keeps its key. In stage 3 nobody stores the module's own weights: they are the
master weights rounded to the type of the module, as every step of training makes them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from shardckpt.boxes import Shape
from shardckpt.dtypes import nbytes
from shardckpt.errors import (
    AmbiguousError,
    CheckpointError,
    FormatError,
    IncompleteError,
    UnsupportedError,
    UsageError,
)
from shardckpt.format.deepspeed.merge_partitions import (
    MASTER,
    MODEL,
    OPTIMIZER,
    DeepSpeedManifestBuilder,
    PartitionMerger,
)
from shardckpt.format.deepspeed.pipeline_layers import TIED, put_experts, put_layers
from shardckpt.format.deepspeed.state_files import (
    ModelState,
    PartitionOptimState,
    Slot,
    StateFileContents,
    read_loop_state,
    read_model_state,
    read_optim_state,
)
from shardckpt.format.deepspeed.zero_files import StateFiles, find_folder, is_part, sort_files
from shardckpt.format.encodings.codecs import DecodedStream
from shardckpt.format.reader import Evidence, Format, Reader, Source
from shardckpt.format.torchsave.reader import TorchReader, open_files
from shardckpt.manifest import Encoded, ObjectEntry, Path, Piece, Span, TensorEntry
from shardckpt.storage.store import Read, Store

_STEP, _GROUPS = "step", "param_groups"


def recognize(source: Source) -> Evidence:
    """Recognize a folder by the names of its files, which no other writer uses, and one of those by its own."""
    if source.file is not None:
        return Evidence.STRUCTURE if is_part(source.file) else Evidence.NONE
    try:
        return Evidence.NONE if find_folder(source) is None else Evidence.STRUCTURE
    except (CheckpointError, AmbiguousError):
        return Evidence.STRUCTURE


def open_source(source: Source) -> Reader:
    """Open a recognized source.

    Raises:
        AmbiguousError: Several steps lie there, and nothing says which one is meant.
        UnsupportedError: It is cut in a way that is not read: tensor parallelism, versions before 0.3.17.
        UsageError: The source is one file of a folder.
        CheckpointError: Files are of different saves, or one is damaged, refused or missing.
        StorageError: The store failed.
    """
    if source.file is not None:
        raise UsageError(
            "this file is one part of a DeepSpeed checkpoint",
            where=source.url,
            fix="Point at the folder that holds it.",
        )
    folder = find_folder(source)
    assert folder is not None, "only recognized sources are opened"
    return open_states(source.store, sort_files(source.store, folder), _ignored_weights(source))


def open_states(store: Store, files: StateFiles, warnings: tuple[str, ...] = ()) -> TorchReader:
    """Open the state files of one checkpoint."""
    reader = open_files(store, files.sizes, {file: (file,) for file in files.sizes}, FORMAT.name)
    contents = StateFileContents(reader.manifest, store.url)
    made = DeepSpeedManifestBuilder(store.url)
    joiners = [_joiner(reader, contents, files, made, mp) for mp in files.model_ranks]
    _settle(joiners, files, store.url)
    trained = {param.name: param.shape for joiner in joiners for param in joiner.trained.values()}
    for joiner in joiners:
        joiner.join_model()
    put_layers(made, contents, files, trained)
    put_experts(made, contents, files)
    _require_weights(made, trained)
    for joiner in joiners:
        joiner.join_optimizer()
    _put_groups(made, joiners)
    if files.expert_optims or (len(joiners) > 1 and not trained):
        made.unread.append("optimizers of experts and of pipeline stages that ZeRO did not cut")
        made.warnings.append(f"{made.unread[-1]} are not read")
    put_loop(made, contents, next(iter([*files.models.values(), *files.parts.values()])))
    manifest = replace(
        reader.manifest,
        files={**reader.manifest.files, **made.absent},
        tensors=made.tensors,
        objects=made.objects,
        aliases=made.aliases,
        warnings=(*reader.manifest.warnings, *warnings, *made.warnings),
        unread=(*reader.manifest.unread, *made.unread),
    )
    return reader.with_manifest(manifest)


def _joiner(
    reader: TorchReader, contents: StateFileContents, files: StateFiles, made: DeepSpeedManifestBuilder, mp: int
) -> PartitionMerger:
    """Return what the ranks of one model-parallel rank say, checked against one another."""
    models: dict[int, ModelState] = {
        rank: read_model_state(contents, file) for (rank, m), file in sorted(files.parts.items()) if m == mp
    }
    if mp in files.models:
        if models:
            raise FormatError(
                "files of different ZeRO stages lie here",
                where=reader.store.url,
                found=f"{files.models[mp]} and {next(iter(models.values())).file}",
                fix="Keep the files of one save.",
            )
        models = {0: read_model_state(contents, files.models[mp])}
    optims = {
        rank: read_optim_state(contents, file, rank) for (rank, m), file in sorted(files.optims.items()) if m == mp
    }
    if not models:
        raise IncompleteError(
            "the optimizer's files are here, and the model's is not",
            where=reader.store.url,
            found=f"{len(optims)} files *_optim_states.pt",
            expected="mp_rank_00_model_states.pt, or zero_pp_rank_*_model_states.pt: they hold the names and shapes",
            fix="Copy the missing file beside the others.",
        )
    _require_one_step(reader, optims)
    return PartitionMerger(contents, files, made, mp, models, optims)


def _require_one_step(reader: TorchReader, optims: Mapping[int, PartitionOptimState]) -> None:
    """Compare the steps that ranks' optimizers took: files of two saves may fit together in everything else."""
    counts: list[tuple[PartitionOptimState, int, TensorEntry]] = []
    for state in optims.values():
        for unit, slots in enumerate(state.slots):
            value = slots.get(_STEP)
            if isinstance(value, TensorEntry) and not value.shape:
                counts.append((state, unit, value))
    located = reader.resolve([value.pieces[0] for _, _, value in counts])
    first: dict[int, tuple[bytes, PartitionOptimState]] = {}
    for (state, unit, _), mine in zip(counts, _scalars(reader, located, counts), strict=True):
        raw, other = first.setdefault(unit, (mine, state))
        if raw != mine:
            raise FormatError(
                f"ranks {other.rank} and {state.rank} took different numbers of steps",
                where=f"{reader.store.url}/{state.file}",
                fix="Files of two saves lie in one folder: keep those of one.",
            )


def _scalars(
    reader: TorchReader, located: Sequence[Piece], counts: Sequence[tuple[PartitionOptimState, int, TensorEntry]]
) -> list[bytes]:
    """Return the bytes of arrays of one element, in one batch of reads; compressed ones are decoded one by one."""
    buffers = [bytearray(nbytes(value.stored, 1)) for _, _, value in counts]
    reads: list[Read] = []
    for piece, buffer in zip(located, buffers, strict=True):
        layout = piece.layout
        if isinstance(layout, Span):
            reads.append(Read(piece.file, layout.offset, memoryview(buffer)))
        elif isinstance(layout, Encoded) and isinstance(layout.inner, Span):
            DecodedStream(reader.store, piece.file, layout).read_into(layout.inner.offset, memoryview(buffer))
    reader.store.read(reads)
    return [bytes(buffer) for buffer in buffers]


def _settle(joiners: Sequence[PartitionMerger], files: StateFiles, url: str) -> None:
    """Leave what pipeline stages share to the first of them.

    Raises:
        UnsupportedError: Parameters are cut by tensor parallelism: only the training code knows how.
    """
    seen: set[str] = set()
    cut: list[str] = []
    for joiner in joiners:
        again = seen & joiner.trained.keys()
        cut += sorted(name for name in again if not name.startswith(TIED))
        joiner.leave(again)
        seen |= joiner.trained.keys()
    is_cut = max((joiner.tensor_ranks for joiner in joiners), default=1) > 1 or any(mp for _, mp in files.layers)
    if is_cut or cut:
        raise UnsupportedError(
            "parameters are cut by tensor parallelism, and only the training code knows how",
            where=url,
            found=f"{len(joiners)} model-parallel ranks" + (f", {cut[0]!r} on several" if cut else ""),
            fix="Convert it with DeepSpeed's ds_to_universal.py, and point at the result.",
        )


def _require_weights(made: DeepSpeedManifestBuilder, trained: Mapping[str, Shape]) -> None:
    """Refuse parameters whose own weights lie in no file, or have another shape than the optimizer's."""
    for name, shape in trained.items():
        entry = made.tensors.get((MODEL, name))
        if entry is None:
            raise IncompleteError(
                f"the weights of {name!r} lie in no file",
                where=made.url,
                expected="them in a model, layer or expert file",
                fix="Copy the missing *_model_states.pt beside the others.",
            )
        if entry.shape != shape:
            raise FormatError(
                f"{name!r} has another shape than param_shapes say",
                where=f"{made.url}/{entry.pieces[0].file}" if entry.pieces else made.url,
                found=entry.shape,
                expected=shape,
            )


def _put_groups(made: DeepSpeedManifestBuilder, joiners: Sequence[PartitionMerger]) -> None:
    """Add the optimizer's groups; those of pipeline stages hold one another's names."""
    united: list[tuple[Mapping[str, Slot], dict[str, None]]] = []
    for joiner in joiners:
        for i, (said, names) in enumerate(joiner.groups()):
            if i == len(united):
                united.append((said, {}))
            united[i][1].update(dict.fromkeys(names))
    groups: list[object] = []
    for i, (said, params) in enumerate(united):
        plain = {k: v.value for k, v in said.items() if isinstance(v, ObjectEntry) and k != "params"}
        groups.append({**plain, "params": list(params)})
        for key, value in said.items():
            if isinstance(value, TensorEntry):
                made.put((OPTIMIZER, _GROUPS, i, key), value)
    if groups and not any(path[:2] == (OPTIMIZER, _GROUPS) for path in made.tensors):
        made.objects[OPTIMIZER, _GROUPS] = ObjectEntry((OPTIMIZER, _GROUPS), groups)
        return
    for i, group in enumerate(groups):
        assert isinstance(group, dict)
        for key, value in group.items():
            path: Path = (OPTIMIZER, _GROUPS, i, key)
            made.objects[path] = ObjectEntry(path, value)


def put_loop(made: DeepSpeedManifestBuilder, contents: StateFileContents, file: str) -> None:
    """Add what a model file holds beside the model: schedules, counters, and the user's own."""
    for path, entry in read_loop_state(contents, file):
        if path[0] in (MODEL, MASTER) or (path[0] == OPTIMIZER and (OPTIMIZER, _GROUPS) in made.objects):
            path = (f"{path[0]} of the client", *path[1:])
        if isinstance(entry, TensorEntry):
            made.put(path, entry)
        else:
            made.objects[path] = replace(entry, path=path)


def _ignored_weights(source: Source) -> tuple[str, ...]:
    """Say which weights lie beside the states and are not read: a Trainer leaves its model there."""
    names = [name for name in source.files if name.endswith((".safetensors", ".safetensors.index.json"))]
    return (f"{names[0]} lies beside the states and is not read",) if names else ()


FORMAT = Format(
    name="deepspeed",
    title="folder of DeepSpeed's save_checkpoint",
    looks_for="*_model_states.pt and *_optim_states.pt, or a file `latest` that names their folder",
    recognize=recognize,
    open=open_source,
)
