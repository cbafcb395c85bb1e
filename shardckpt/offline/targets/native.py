"""Target `native`: a step for any number of ranks, with `COMMIT` last.

Files are hashed while they are written.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from shardckpt.boxes import Box, Shape, chunk_box, full_box
from shardckpt.dtypes import bits, is_known
from shardckpt.encodings import typed_json
from shardckpt.encodings.pickle_stubs import PerRankValue
from shardckpt.encodings.tagged_json import ArrayRef, encode
from shardckpt.encodings.value_stats import ValueStats
from shardckpt.errors import FormatError, UnsupportedError
from shardckpt.manifest import UNREAD, Path, dotted, unflatten
from shardckpt.native.commit import COMMIT, STEP, encode_commit, manifest_name, name_model_file
from shardckpt.native.manifest_json import (
    ManifestContents,
    Topology,
    WrittenPayload,
    build_partial,
    encode_manifest,
    merge_partials,
)
from shardckpt.native.payload import (
    HF_INDEX,
    PayloadChunk,
    PayloadFile,
    hf_index,
    new_save_id,
    plan_payloads,
)
from shardckpt.native.reader import NativeReader
from shardckpt.native.records import ArrayRecord, make_record, require_hashes
from shardckpt.native.run_directory import read_referred_files
from shardckpt.offline.results.tensor_stats import find_piece_stats, merge_piece_stats
from shardckpt.offline.select.group_settings import plain_value
from shardckpt.offline.select.selection import Selection
from shardckpt.offline.targets.base import Conversion, PlannedRanks, RankOptions, Target, describe_lost, require_allowed
from shardckpt.offline.write.conversion import FinalFiles, Hashes, Layout, PlannedFiles
from shardckpt.offline.write.stream import OutputFile, PlainContent
from shardckpt.plan.layout.coverage import locate
from shardckpt.plan.layout.output_files import OutputTensor
from shardckpt.plan.layout.write_plan import LocalTensor, plan_save
from shardckpt.plan.naming.model_files import MAX_BYTES
from shardckpt.plan.optim.output_keys import to_state_paths
from shardckpt.reader import Reader
from shardckpt.storage.store import read_bytes


def plan(conversion: Conversion) -> PlannedFiles:
    """Plan a native step by one writer; if it contains a model, it is a Hugging Face folder too."""
    model = ("model",) if conversion.options.part != "optim" else None
    tree = build_selected_tree(conversion.selection)
    config, small = conversion.config, conversion.encode_config()
    # The files beside the step make it a Hugging Face folder; commands that copy or reshard a step take its own.
    copied = {} if config.store is None else {n: read_bytes(config.store, n, 0, config.files[n]) for n in config.files}
    tree = replace(tree, piece_stats=_find_stats(conversion.reader, tree.arrays), model_files={**copied, **small})

    def plan_layout(_: str, save: str) -> Layout:
        step = plan_step(tree, 1, most_bytes=conversion.max_file_bytes, save=save, model=model)
        return step.layout(small)

    return PlannedFiles(STEP, COMMIT, plan_layout, conversion.nbytes, read_referred_files, new_save_id())


def plan_ranks(reader: Reader, options: RankOptions) -> PlannedRanks:
    """Plan a native step by several writers with all of a checkpoint's content."""
    tree = build_full_tree(reader, allow_loss=options.allow_loss)
    tree = replace(tree, piece_stats=_find_stats(reader, tree.arrays), model_files=_read_model_files(reader))

    def plan_layout(_: str, save: str) -> Layout:
        return plan_step(tree, options.world_size, most_bytes=options.max_file_bytes, save=save).layout({})

    nbytes, paths = sum(tensor.nbytes for tensor in tree.arrays.values()), list(tree.arrays)
    planned = PlannedFiles(STEP, COMMIT, plan_layout, nbytes, read_referred_files, new_save_id())
    return PlannedRanks(
        planned, tree.arrays, {path: paths[at] for path, at in tree.contents.ties.items()}, tree.warnings
    )


@dataclass(frozen=True, slots=True)
class NativeTree:
    """A state to save: arrays, and the manifest's other content."""

    # Arrays by path, each once, in the order of their indexes in the manifest; their pieces are located.
    arrays: Mapping[Path, OutputTensor]
    contents: ManifestContents  # manifest without a save, files and arrays
    warnings: tuple[str, ...] = ()  # oddities and omitted values, one sentence each
    # Stored statistics for the pieces of arrays whose values are written as they are.
    piece_stats: Mapping[Path, Mapping[Box, ValueStats]] = field(default_factory=dict)
    model_files: Mapping[str, bytes] = field(default_factory=dict)  # contents by name


def _read_model_files(reader: Reader) -> dict[str, bytes]:
    """Return the contents of a step's model files by name. Raises FormatError for one that no save writes."""
    for name, size in reader.model_files.items():
        if size > MAX_BYTES:
            where, found = f"{reader.store.url}/{name}", f"{size} bytes"
            raise FormatError("a model file is too large", where=where, found=found, expected=f"{MAX_BYTES} at most")
    return {name: read_bytes(reader.model_store, name, 0, size) for name, size in reader.model_files.items()}


def _find_stats(reader: Reader, arrays: Mapping[Path, OutputTensor]) -> dict[Path, Mapping[Box, ValueStats]]:
    return {path: found for path, tensor in arrays.items() if (found := find_piece_stats(reader, tensor))}


def build_full_tree(reader: Reader, *, allow_loss: bool) -> NativeTree:
    """Build a full checkpoint's state after checking that it is complete."""
    manifest = reader.manifest
    paths = [path for path in manifest.tensors if path not in manifest.aliases]
    entries = locate(reader, manifest, [manifest.tensors[path] for path in paths])
    arrays = {path: OutputTensor(dotted(path), e, e.dtype) for path, e in zip(paths, entries, strict=True)}
    if isinstance(reader, NativeReader):
        return NativeTree(arrays, replace(reader.contents, bases=()), manifest.warnings)
    numbers = {path: number for number, path in enumerate(paths)}
    ties = {path: numbers[kept] for path, kept in manifest.aliases.items()}
    refs = {path: ArrayRef(numbers[manifest.aliases.get(path, path)]) for path in manifest.tensors}
    values, lost = _values(reader)
    require_allowed(lost, TARGET.title, allow_loss=allow_loss)
    notes = [f"left out: {what}" for what in lost]
    tree = encode(unflatten({**refs, **values}, reader.store.url))
    topology = {"source": manifest.format, **typed_json.encode(Topology(keeps_order=manifest.keeps_order))}
    contents = ManifestContents("", topology=topology, ties=ties, tree=tree)
    return NativeTree(arrays, contents, (*manifest.warnings, *notes))


def build_selected_tree(selection: Selection) -> NativeTree:
    """Build a selection's state: `{"model": ..., "optim": {"state": ...}}`."""
    arrays: dict[Path, OutputTensor] = {("model", tensor.name): tensor for tensor in selection.model}
    values: dict[Path, object] = {}
    if selection.groups is not None:
        state, rest = to_state_paths(selection.optim, selection.groups)
        arrays |= {("optim", *path): tensor for path, tensor in state.items()}
        values = {("optim", *path): plain_value(value) for path, value in rest.items()}
    numbers = {path: number for number, path in enumerate(arrays)}
    ties: dict[Path, int] = {
        ("model", name): numbers["model", kept] for name, kept in selection.ties.items() if ("model", kept) in arrays
    }
    refs = {path: ArrayRef(number) for path, number in (*numbers.items(), *ties.items())}
    tree = encode(unflatten({**refs, **values}, "the selection", has_lists=True))
    topology = typed_json.encode(Topology(keeps_order=selection.keeps_order))
    return NativeTree(arrays, ManifestContents("", topology=topology, ties=ties, tree=tree))


def _values(reader: Reader) -> tuple[dict[Path, object], list[str]]:
    """Return the values that are not arrays, and the values that the format cannot store."""
    found: dict[Path, object] = {}
    lost = []
    for path, entry in reader.manifest.objects.items():
        value = plain_value(reader.load_object(entry) if entry.value is UNREAD else entry.value)
        if isinstance(value, PerRankValue):
            lost.append(describe_lost(path, value))
            continue
        try:
            encode(value, path)
        except UnsupportedError as error:
            lost.append(str(error))
            continue
        found[path] = value
    return found, lost


def _step_file(payload: PayloadFile, arrays: Mapping[Path, OutputTensor]) -> OutputFile:
    tensors = tuple(arrays[chunk.path] for chunk in payload.chunks)
    return PlainContent(payload.header, tensors, tuple(chunk.box for chunk in payload.chunks)).plan_file(payload.name)


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """A planned native step."""

    contents: ManifestContents  # manifest without files and rows
    arrays: Mapping[Path, OutputTensor]  # sources of the elements
    payloads: tuple[tuple[PayloadFile, ...], ...]  # files of each writer, in order
    model: Path | None  # path of the model, for a step of one writer
    piece_stats: Mapping[Path, Mapping[Box, ValueStats]]  # statistics that the source stored, by array and piece
    model_files: Mapping[str, bytes]  # by their names in the step

    def layout(self, small: Mapping[str, bytes]) -> Layout:
        """Return its files, with other files; `COMMIT` is last."""
        first = (*((HF_INDEX,) if self.model else ()), *self.model_files)
        names = (*first, manifest_name(self.contents.save), COMMIT)
        files = tuple(_step_file(payload, self.arrays) for mine in self.payloads for payload in mine)
        return Layout(files, small, FinalFiles(names, self._ending))

    def _ending(self, hashes: Hashes) -> dict[str, bytes]:
        """Return the model's index, the manifest and `COMMIT`."""
        parts = [build_partial([WrittenPayload(file, hashes[file.name]) for file in mine]) for mine in self.payloads]
        files, arrays = merge_partials(parts, [record.path for record in self.contents.arrays])
        files = tuple(require_hashes(file, file.name) for file in files)  # of tasks, which stored them
        arrays = tuple(map(self._with_stats, arrays))
        made = dict(self.model_files)
        if self.model is not None:
            made[HF_INDEX] = hf_index(self.payloads[0], self.model)
        files = (*files, *(make_record(name, content) for name, content in made.items()))
        contents = replace(self.contents, files=files, arrays=arrays)
        manifest = encode_manifest(contents)
        return {
            **made,
            manifest_name(contents.save): manifest,
            COMMIT: encode_commit(contents.save, manifest, files),
        }

    def _with_stats(self, record: ArrayRecord) -> ArrayRecord:
        """Add the source's statistics to an array, if its pieces are the source's or consist of them."""
        stored = self.piece_stats.get(record.path)
        if not stored:
            return record
        found = merge_piece_stats(record.boxes(), stored)
        return record._replace(stats=b"".join(stats.pack() for stats in found))


def plan_step(tree: NativeTree, writers: int, *, most_bytes: int, save: str, model: Path | None = None) -> PlannedStep:
    """Split arrays along their first dimension, like `torch.chunk`, and plan at least one file for each writer."""
    arrays = tree.arrays
    held = [
        [LocalTensor(path, t.shape, t.dtype, tuple(_rows(t, writers, w))) for path, t in arrays.items()]
        for w in range(writers)
    ]
    plan = plan_save(held)
    records = tuple(ArrayRecord(path, t.dtype, t.shape, array("Q")) for path, t in arrays.items())
    orders = {at: t.entry.order for at, t in enumerate(arrays.values()) if t.entry.order}
    topology = {**tree.contents.topology, "world_size": writers, **typed_json.encode(Topology(memory_orders=orders))}
    about = {"writer": "shardckpt"}
    contents = replace(tree.contents, save=save, files=(), arrays=records, about=about, topology=topology)
    payloads = []
    for writer, tasks in enumerate(plan.tasks):
        chunks = [PayloadChunk(*plan.arrays[task.array], task.box) for task in tasks]
        carry: dict[str, object] = contents.carried() if writer == 0 else {}
        payloads.append(plan_payloads(save, writer, chunks, most_bytes=most_bytes, model=model, carry=carry))
    model_files = {name_model_file(save, name): content for name, content in tree.model_files.items()}
    return PlannedStep(contents, arrays, tuple(payloads), model, tree.piece_stats, model_files)


def _rows(tensor: OutputTensor, writers: int, writer: int) -> Iterator[Box]:
    """Yield a rank's box: its rows, or the full tensor if it cannot be split."""
    shape: Shape = tensor.shape
    if not shape or 0 in shape or bits(tensor.dtype) % 8 or bits(tensor.entry.stored) % 8:
        yield full_box(shape)
        return
    rows = chunk_box(shape, 0, writers, writer)
    if rows.volume:
        yield rows


TARGET = Target(
    name="native",
    title="a step",
    files="a [step](format.md) with checksums",
    read_by="`shardckpt.load`",
    plan=plan,
    holds_dtype=is_known,
    plan_ranks=plan_ranks,
)
