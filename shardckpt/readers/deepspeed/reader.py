"""Reader of folders by DeepSpeed's `save_checkpoint`, ZeRO stages 0 to 3.

Opens a tag's folder, or its parent with `latest`. Paths are `model` (the module's own weights), `master` (the
optimizer's copies, mostly float32) and `optimizer`, followed by names. Other values in a model file keep their keys.
Stage 3 does not store the module's own weights: these are the master weights rounded to the module's dtype, as in every
training step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shardckpt.boxes import Shape
from shardckpt.dtypes import nbytes
from shardckpt.encodings.codecs import DecodedStream
from shardckpt.errors import AmbiguousError, CheckpointError, FormatError, IncompleteError, UnsupportedError, UsageError
from shardckpt.manifest import Encoded, ObjectEntry, Path, Piece, Span, TensorEntry
from shardckpt.plan.optim.param_groups import merge_groups
from shardckpt.reader import Evidence, Format, Reader, Source
from shardckpt.readers.deepspeed.locate_params import (
    CONVERT,
    KEEP_ONE_SAVE,
    DataParallelRanks,
    TrainedParam,
    build_ranks,
)
from shardckpt.readers.deepspeed.merge_partitions import MASTER, MODEL, OPTIMIZER, list_groups, put_model, put_optimizer
from shardckpt.readers.deepspeed.state_files import (
    ModelState,
    PartitionOptimState,
    Slot,
    StateFileContents,
    read_loop_state,
    read_model_state,
    read_optim_state,
)
from shardckpt.readers.deepspeed.zero_files import StateFiles, find_folder, is_part, sort_files
from shardckpt.readers.merge_shards import ManifestBuilder, join_entries, merge_equal, move_rank_values
from shardckpt.readers.torchsave.reader import TorchReader, open_files
from shardckpt.storage.store import Read, Store

_STEP, _GROUPS = "step", "param_groups"


def recognize(source: Source) -> Evidence:
    """Recognize a folder, or one of its files, by file names that no other writer uses."""
    if source.file is not None:
        return Evidence.STRUCTURE if is_part(source.file) else Evidence.NONE
    try:
        return Evidence.NONE if find_folder(source) is None else Evidence.STRUCTURE
    except (CheckpointError, AmbiguousError):
        return Evidence.STRUCTURE


def open_source(source: Source) -> Reader:
    """Open a recognized source."""
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
    """Open a checkpoint's state files."""
    reader = open_files(store, files.sizes, {file: (file,) for file in files.sizes}, FORMAT.name)
    contents = StateFileContents(reader.manifest, store.url)
    builder = ManifestBuilder(store.url, warnings=list(warnings))
    all_ranks = [_read_ranks(reader, contents, files, mp) for mp in files.model_ranks]
    parts = list(zip(all_ranks, _assign_params(all_ranks, files, store.url), strict=True))
    trained = {param.name: param.shape for _, params in parts for param in params.values()}
    for ranks, params in parts:
        put_model(builder, ranks, params)
    put_layers(builder, contents, files, trained)
    put_experts(builder, contents, files)
    _require_weights(builder, trained)
    for ranks, params in parts:
        put_optimizer(builder, ranks, params)
    _put_groups(builder, [groups for ranks, params in parts if (groups := list_groups(ranks, params))])
    if files.expert_optims or (len(parts) > 1 and not trained):
        builder.unread.append("optimizers for experts and pipeline stages that ZeRO did not shard")
        builder.warnings.append(f"{builder.unread[-1]} are not read")
    put_loop_state(builder, contents, [*files.models.values(), *files.parts.values()])
    merged = builder.build_manifest(reader.manifest, FORMAT.name)
    return reader.with_manifest(move_rank_values(reader, merged))


def _read_ranks(reader: TorchReader, contents: StateFileContents, files: StateFiles, mp: int) -> DataParallelRanks:
    """Read one model-parallel rank's files and check that they are from one save."""
    models: dict[int, ModelState] = {
        rank: read_model_state(contents, file) for (rank, m), file in sorted(files.parts.items()) if m == mp
    }
    if mp in files.models:
        if models:
            raise FormatError(
                "files from different ZeRO stages are here",
                where=reader.store.url,
                found=f"{files.models[mp]} and {next(iter(models.values())).file}",
                fix=KEEP_ONE_SAVE,
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
            fix="Copy the missing file next to the others.",
        )
    _require_one_step(reader, optims)
    return build_ranks(contents, files, mp, models, optims)


def _require_one_step(reader: TorchReader, optims: Mapping[int, PartitionOptimState]) -> None:
    """Require equal steps in the ranks' optimizers."""
    # Files of two saves may agree in all other fields.
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
                fix=KEEP_ONE_SAVE,
            )


def _scalars(
    reader: TorchReader, located: Sequence[Piece], counts: Sequence[tuple[PartitionOptimState, int, TensorEntry]]
) -> list[bytes]:
    """Return the bytes of one-element tensors, read in one batch; compressed ones are decoded one at a time."""
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


def _assign_params(
    all_ranks: Sequence[DataParallelRanks], files: StateFiles, url: str
) -> list[Mapping[str, TrainedParam]]:
    """Return each model-parallel rank's trained parameters; the first pipeline stage gets the shared ones."""
    assigned: list[Mapping[str, TrainedParam]] = []
    seen: set[str] = set()
    sharded: list[str] = []
    for ranks in all_ranks:
        sharded += sorted(name for name in ranks.params if name in seen and not name.startswith(TIED))
        assigned.append({name: param for name, param in ranks.params.items() if name not in seen})
        seen |= ranks.params.keys()
    is_sharded = max((ranks.tensor_ranks for ranks in all_ranks), default=1) > 1 or any(mp for _, mp in files.layers)
    if is_sharded or sharded:
        raise UnsupportedError(
            "parameters are sharded by tensor parallelism, and only the training code knows how",
            where=url,
            found=f"{len(all_ranks)} model-parallel ranks" + (f", {sharded[0]!r} on several" if sharded else ""),
            fix=CONVERT,
        )
    return assigned


def _require_weights(builder: ManifestBuilder, trained: Mapping[str, Shape]) -> None:
    """Require each parameter's own weights in a file, in the optimizer's shape."""
    for name, shape in trained.items():
        entry = builder.tensors.get((MODEL, name))
        if entry is None:
            raise IncompleteError(
                f"the weights of {name!r} are in no file",
                where=builder.url,
                expected="them in a model, layer or expert file",
                fix="Copy the missing *_model_states.pt next to the others.",
            )
        if entry.shape != shape:
            raise FormatError(
                f"{name!r} has another shape than param_shapes say",
                where=f"{builder.url}/{entry.pieces[0].file}" if entry.pieces else builder.url,
                found=entry.shape,
                expected=shape,
            )


def _put_groups(builder: ManifestBuilder, stages: Sequence[Sequence[tuple[Mapping[str, Slot], Sequence[str]]]]) -> None:
    """Add the optimizer's groups; pipeline stages' groups are merged."""
    plain = [
        [
            {**{k: v.value for k, v in options.items() if isinstance(v, ObjectEntry)}, "params": names}
            for options, names in groups
        ]
        for groups in stages
    ]
    values = merge_groups(plain)
    found: dict[Path, list[TensorEntry]] = {}
    for groups in stages:
        for i, (options, _) in enumerate(groups):
            for key, value in options.items():
                if isinstance(value, TensorEntry):
                    found.setdefault((OPTIMIZER, _GROUPS, i, key), []).append(value)
    tensors = {path: join_entries(path, entries) for path, entries in found.items()}
    if values is None or (tensors and len(values) > max(map(len, plain))):
        raise FormatError("pipeline stages have groups that contradict each other", where=builder.url, fix=CONVERT)
    for path, entry in tensors.items():
        builder.put(path, entry)
    if values and not tensors:
        builder.put_value((OPTIMIZER, _GROUPS), values)
        return
    for i, group in enumerate(values):
        for key, plain_value in group.items():
            builder.put_value((OPTIMIZER, _GROUPS, i, key), plain_value)


def put_loop_state(builder: ManifestBuilder, contents: StateFileContents, files: Sequence[str]) -> None:
    """Add the training loop's state, which model files have in common."""
    found: dict[Path, list[tuple[str, Slot]]] = {}
    for file in files:
        for path, entry in read_loop_state(contents, file):
            found.setdefault(path, []).append((file, entry))
    for path, pairs in found.items():
        merged = merge_equal(path, [file for file, _ in pairs], [entry for _, entry in pairs])
        if path[0] in (MODEL, MASTER) or (path[0] == OPTIMIZER and (OPTIMIZER, _GROUPS) in builder.objects):
            builder.put((f"{path[0]} of the client", *path[1:]), merged)
        else:
            builder.put(path, merged)


def _ignored_weights(source: Source) -> tuple[str, ...]:
    """Return a warning about other weights in the folder, such as a Trainer's model, which are not read."""
    names = [name for name in source.files if name.endswith((".safetensors", ".safetensors.index.json"))]
    return (f"{names[0]} is next to the states and is not read",) if names else ()


FORMAT = Format(
    name="deepspeed",
    title="folder by DeepSpeed's save_checkpoint",
    looks_for="*_model_states.pt and *_optim_states.pt, or a file `latest` that names their folder",
    recognize=recognize,
    open=open_source,
)


TIED = "tied_modules."  # prefix for modules that several pipeline stages share; the module's name follows


def put_experts(builder: ManifestBuilder, contents: StateFileContents, files: StateFiles) -> None:
    """Add the experts' weights, which have their names in the full model."""
    for _, file in sorted(files.experts.items()):
        for path, entry in contents.tensors(file).items():
            builder.put((MODEL, str(path[-1])), entry)


def put_layers(
    builder: ManifestBuilder, contents: StateFileContents, files: StateFiles, trained: Mapping[str, Shape]
) -> None:
    """Add pipeline layers' weights under the layer's number, or the shared module's name."""
    shared = _shared_modules(trained)
    for (layer, _), file in sorted(files.layers.items()):
        tensors = {str(path[0]): entry for path, entry in contents.tensors(file).items() if len(path) == 1}
        start = _start(layer, tensors, trained, shared, contents.where(file))
        for key, entry in tensors.items():
            if (MODEL, start + key) not in builder.tensors or not start.startswith(TIED):
                builder.put((MODEL, start + key), entry)


def _shared_modules(trained: Mapping[str, Shape]) -> dict[str, dict[str, Shape]]:
    """Return shared modules' shapes: prefix to the rest of the name and shape."""
    found: dict[str, dict[str, Shape]] = {}
    for name, shape in trained.items():
        key, _, rest = name.removeprefix(TIED).partition(".")
        if name.startswith(TIED) and rest:
            found.setdefault(f"{TIED}{key}.", {})[rest] = shape
    return found


def _start(
    layer: int,
    tensors: Mapping[str, TensorEntry],
    trained: Mapping[str, Shape],
    shared: Mapping[str, Mapping[str, Shape]],
    where: str,
) -> str:
    """Return the prefix that a layer's parameters have in the module."""
    own = f"{layer}."
    if not shared or any(own + key in trained for key in tensors):
        return own
    shapes = {key: entry.shape for key, entry in tensors.items()}
    matches = [start for start, params in shared.items() if params.items() <= shapes.items()]
    if len(matches) > 1:
        raise AmbiguousError(
            f"layer {layer} could be in several shared modules",
            where=where,
            found=", ".join(matches[:4]),
            fix="Point at a universal checkpoint (ds_to_universal.py), or leave them out with --exclude.",
        )
    return matches[0] if matches else own
