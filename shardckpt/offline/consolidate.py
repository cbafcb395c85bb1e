"""The verbs `consolidate` and `convert`: open, check, plan, stream, publish."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shardckpt.errors import UsageError
from shardckpt.format.dcp.writer import METADATA
from shardckpt.format.huggingface.index_files import (
    OPTIMIZER,
    OPTIMIZER_FILES_KEY,
    PARAM_GROUPS,
    PARAM_GROUPS_KEY,
    SUFFIX,
)
from shardckpt.format.native.commit import COMMIT
from shardckpt.format.native.payload import new_save_id
from shardckpt.format.native.run_directory import read_referred_files
from shardckpt.format.reader import Reader
from shardckpt.format.registry import detect, open_source
from shardckpt.offline.select.config_files import CONFIG, ConfigFiles, add_kept_files, find_config_files, with_dtype
from shardckpt.offline.select.group_settings import as_json
from shardckpt.offline.select.lossiness import drop_unsupported
from shardckpt.offline.select.native_tree import build_selected_tree
from shardckpt.offline.select.options import Options, parse_dtype
from shardckpt.offline.select.param_shapes import load_param_shapes
from shardckpt.offline.select.selection import Selection, read_param_names, select
from shardckpt.offline.targets.dcp import build_content, encode_content_metadata, plan_as_stored, plan_ranks
from shardckpt.offline.targets.deepspeed_universal import LATEST as LATEST_UNIVERSAL
from shardckpt.offline.targets.deepspeed_universal import TARGET as UNIVERSAL
from shardckpt.offline.targets.deepspeed_universal import check as check_universal
from shardckpt.offline.targets.deepspeed_universal import lay_out as lay_out_universal
from shardckpt.offline.targets.deepspeed_universal import master_weights
from shardckpt.offline.targets.native import plan_step
from shardckpt.offline.targets.overwrite_kinds import CONFIG as OF_CONFIG
from shardckpt.offline.targets.overwrite_kinds import kind_of_file, kind_of_folder
from shardckpt.offline.targets.torchsave import model_files, optimizer_file, single_file
from shardckpt.offline.write.report import Meter, OnProgress, Report, Stopwatch
from shardckpt.offline.write.stream import OutputFile, lay_out
from shardckpt.offline.write.target_writer import Hashes, Layout, TargetWriter
from shardckpt.plan.layout.output_files import (
    OutputTensor,
    PlannedFile,
    index,
    name_files,
    split_as_stored,
    split_by_size,
)
from shardckpt.plan.layout.sizes import parse_size
from shardckpt.plan.optim.output_keys import rekey_state
from shardckpt.storage.publication import Publication
from shardckpt.storage.publish import begin, overlaps, publish
from shardckpt.storage.replaceable import Kind
from shardckpt.storage.resolve_url import kind, local_path

_TORCH_FILES = (".pt", ".pth", ".bin")
_FOLDERS = {"native": "a step", "dcp": "a DCP checkpoint", UNIVERSAL: "a universal checkpoint"}
_MASTERS = "masters"
_WITH_CONFIG = frozenset({"safetensors", "torch"})
"""Formats of models that have their config beside them."""
_CONFIGS = frozenset({CONFIG, "adapter_config.json"})
_NO_CONFIG = (
    "no config.json was found to go with the model: give --config-from FOLDER (config_from=) where transformers is to"
    " load it"
)
_INDEX = "{}.safetensors.index.json"
_TORCH_INDEX = "{}.bin.index.json"
Split = Callable[[Sequence[OutputTensor]], list[tuple[OutputTensor, ...]]]
Change = Callable[[Selection], Selection]


def _keep_selection(selection: Selection) -> Selection:
    return selection


@dataclass(frozen=True, slots=True)
class ConversionPlan:
    """One planned conversion: the source is proven complete, the target untouched.

    Attributes:
        source: As the caller gave it.
        target: As the caller gave it.
        options: What was asked for.
        reader: The open checkpoint.
        carried: Config and tokenizer files.
        selection: What is written, under which names.
        groups: Tensors of each payload file, by stem: `model`, `pytorch_model` or `adapter_model`, `optimizer`.
        is_as_stored: Whether tensors stay split as the source has them.
    """

    source: str
    target: str
    options: Options
    reader: Reader
    carried: ConfigFiles
    selection: Selection
    groups: Mapping[str, list[tuple[OutputTensor, ...]]]
    is_as_stored: bool = False

    @property
    def is_single(self) -> bool:
        """Whether the target is one file."""
        return is_file(self.target)

    @property
    def last(self) -> str:
        """The file that makes the result loadable."""
        if self.options.to == "dcp":
            return METADATA
        if self.options.to == "native":
            return COMMIT
        if self.options.to == UNIVERSAL:
            return LATEST_UNIVERSAL
        return (_TORCH_INDEX if self.options.to == "torch" else _INDEX).format(next(iter(self.groups)))

    @property
    def kind(self) -> Kind:
        """What may be replaced at the target."""
        if self.is_single:
            return kind_of_file(self.options.to)
        is_adapter = self.reader.manifest.format == "adapter"
        return kind_of_folder(self.options.to, is_adapter=is_adapter, carried=self.carried.files)

    def kept(self) -> Collection[str]:
        """Return which files of the target other steps refer to. Raises StorageError."""
        return read_referred_files(self.target) if self.options.to == "native" and self.options.overwrite else ()

    @property
    def payload_bytes(self) -> int:
        """Bytes of tensor data."""
        return sum(t.nbytes for parts in self.groups.values() for part in parts for t in part)


def consolidate(
    src: str | os.PathLike[str], dst: str | os.PathLike[str], *, on_progress: OnProgress | None = None, **options: Any
) -> Report:
    """Merge a sharded checkpoint into full tensors, as safetensors that `transformers` loads as they are.

    Memory is constant: bytes go from file to file, or through a bounded buffer. Nothing appears under `dst` before all
    of it is there.

    Args:
        src: Checkpoint in any readable format: a folder or file, a path or URL.
        dst: Folder to write, or one file where it ends in `.safetensors`, `.pt`, `.pth` or `.bin`.
        on_progress: Called as bytes are written; what it raises stops the work and leaves nothing.
        **options: Fields of `Options`.

    Returns:
        What was written.

    Raises:
        UsageError: The call cannot be done: no such source, a target that exists, an option that does not fit.
        CheckpointError: The checkpoint is damaged, incomplete or unsafe; the message names tensor and box.
        StorageError: Reading or writing failed, or the target has no room.

    Example:
        >>> shardckpt.consolidate("run/step-100", "model", dtype="bf16")  # doctest: +SKIP
    """
    src, dst = os.fspath(src), os.fspath(dst)
    chosen = parse_options(options)
    return _with_config_warning(export(src, dst, chosen, by_size(chosen), on_progress), chosen)


def _with_config_warning(report: Report, options: Options) -> Report:
    """Return a report that says so where transformers lacks the config of a folder that was merged into another."""
    is_model = options.part == "model" and options.to in ("", "safetensors") and not options.include
    if not is_model or is_file(report.target) or _CONFIGS & {*report.carried} or kind(report.source) != "folder":
        return report
    return replace(report, warnings=(*report.warnings, _NO_CONFIG))


def convert(
    src: str | os.PathLike[str], dst: str | os.PathLike[str], *, on_progress: OnProgress | None = None, **options: Any
) -> Report:
    """Convert a checkpoint as `consolidate` does, but keep how its tensors are split over files.

    Tensors that lie whole in one source file stay together; those cut over several files are joined into one more.

    Args:
        src: As for `consolidate`.
        dst: As for `consolidate`.
        on_progress: As for `consolidate`.
        **options: Fields of `Options`; `max_shard_size` is not used.

    Returns:
        What was written.

    Raises:
        UsageError: As for `consolidate`.
        CheckpointError: As for `consolidate`.
        StorageError: As for `consolidate`.
    """
    src, dst = os.fspath(src), os.fspath(dst)
    return export(src, dst, parse_options(options), split_as_stored, on_progress)


def parse_options(given: Mapping[str, Any]) -> Options:
    """Return options given by name, checked.

    Raises:
        UsageError: A value that cannot be.
    """
    named = {key: given[key] for key in ("keep_fp32", "include", "exclude", "rename") if key in given}
    lists = {key: (value,) if isinstance(value, str) else tuple(value) for key, value in named.items()}
    paths = {key: os.fspath(value) for key, value in given.items() if isinstance(value, os.PathLike)}
    return Options(**{**given, **lists, **paths}).validated()


def by_size(options: Options) -> Split:
    """Return the split of `consolidate`: files are filled up to a size."""
    return lambda tensors: split_by_size(tensors, parse_size(options.max_shard_size))


def export(
    src: str, dst: str, options: Options, split: Split, on_progress: OnProgress | None, change: Change = _keep_selection
) -> Report:
    """Open, check, plan, stream, publish.

    Args:
        src: As for `consolidate`.
        dst: As for `consolidate`.
        options: Validated.
        split: Says which tensors share a file.
        on_progress: As for `consolidate`.
        change: Has the last word on what is written, and under which names.

    Raises:
        ShardckptError: As `consolidate` does.
    """
    watch = Stopwatch()
    options = replace(options, to=_target(src, dst, options.to))
    if options.to == UNIVERSAL:
        check_universal(options)
    source = open_source(src, options.base)
    ids = read_param_names(options.param_names) if options.param_names else None
    reader = load_param_shapes(detect(source).open(source), options.shapes_from, ids)
    carried = find_config_files(source, options.config_from)
    if options.overwrite and options.to in _WITH_CONFIG and not is_file(dst):
        carried = add_kept_files(carried, dst, OF_CONFIG)
    watch.end_phase("open")
    selection = drop_unsupported(select(reader, options, carried.config), options.to, allow_loss=options.allow_loss)
    selection = _rekey(change(selection), options)
    groups = _group_tensors(reader, selection, options, _group_as_one if is_file(dst) else split)
    if options.to == UNIVERSAL:
        groups[_MASTERS] = [tuple(master_weights(reader, options, carried.config, selection))]
    job = ConversionPlan(src, dst, options, reader, carried, selection, groups, split is split_as_stored)
    _check_single(job)
    watch.end_phase("plan")
    if options.dry_run:
        return _report(job, _lay_out(job, "", new_save_id()), watch)
    return (_run_together if options.parallel else _run)(job, watch, on_progress)


def is_file(target: str) -> bool:
    """Return True if a target is one file, by its name."""
    return target.endswith((SUFFIX, *_TORCH_FILES))


def _target(src: str, dst: str, to: str) -> str:
    """Return the format to write, once it fits the target."""
    if overlaps(src, dst):
        raise UsageError("source and target overlap", found=dst, where=src, fix="Write to another folder.")
    if not is_file(dst):
        return to or "safetensors"
    fits = "safetensors" if dst.endswith(SUFFIX) else "torch"
    if to in _FOLDERS:
        raise UsageError(f"{_FOLDERS[to]} is a folder", found=dst, fix="Name a folder.")
    if to not in ("", fits):
        raise UsageError(f"--to {to} does not write such a file", found=dst, expected=f"--to {fits}, or a folder")
    return fits


def _rekey(selection: Selection, options: Options) -> Selection:
    """Return a selection whose optimizer calls its parameters as it was asked to."""
    if selection.groups is None or options.optim_keys == "names":
        return selection
    by_number = options.optim_keys == "ids"
    numbers = read_param_names(options.param_names) if options.param_names and by_number else None
    optim, groups = rekey_state(selection.optim, selection.groups, "ids" if by_number else "flat", numbers)
    return replace(selection, optim=optim, groups=groups)


def _check_single(job: ConversionPlan) -> None:
    if job.options.parallel and job.is_single:
        raise UsageError(
            "ranks share files, and there is but one", found=job.target, fix="Name a folder; or run one process."
        )
    if job.is_single and len(job.groups) > 1 and job.options.to != "torch":
        raise UsageError(
            "one file cannot hold model and optimizer",
            found=job.target,
            fix="Name a folder, or choose --part model or --part optim.",
        )


def _group_as_one(tensors: Sequence[OutputTensor]) -> list[tuple[OutputTensor, ...]]:
    return [tuple(tensors)]


def _group_tensors(
    reader: Reader, selection: Selection, options: Options, split: Split
) -> dict[str, list[tuple[OutputTensor, ...]]]:
    """Return the tensors of each payload file, by stem. A part that is there and empty gets a file too."""
    stem = "adapter_model" if reader.manifest.format == "adapter" else "model"
    if options.to == "torch" and stem == "model":
        stem = "pytorch_model"
    groups = {}
    if options.part != "optim":
        groups[stem] = split(selection.model)
    if selection.groups is not None:
        groups[OPTIMIZER] = split(selection.optim)
    return {stem: parts or [()] for stem, parts in groups.items()}


def _run(job: ConversionPlan, watch: Stopwatch, on_progress: OnProgress | None) -> Report:
    carried = 0 if job.is_single else sum(job.carried.files.values())
    with publish(
        job.target,
        job.kind,
        overwrite=job.options.overwrite,
        needed_bytes=job.payload_bytes + carried,
        last=job.last,
        keep=job.kept(),
    ) as publication:
        layout = _lay_out(job, publication.unique_suffix, new_save_id())
        hashes = _make_writer(job, on_progress).write(layout.payload, publication)
        watch.end_phase("copy")
        _write_rest(job, layout, hashes, publication)
    watch.end_phase("publish")
    return _report(job, layout, watch)


def _run_together(job: ConversionPlan, watch: Stopwatch, on_progress: OnProgress | None) -> Report:
    """Write with all ranks of a job; the small files are the first one's."""
    from shardckpt.offline.write.parallel import publish_together, ranks  # noqa: PLC0415  (torch, which one process needs not)

    with ranks() as group:
        layout = publish_together(
            group,
            new_save_id(),
            begin=lambda: _begin(job),
            lay_out=lambda unique_suffix, save: _lay_out(job, unique_suffix, save),
            write=_make_writer(job, on_progress).write,
            finish=lambda laid, hashes, publication: _write_rest(job, laid, hashes, publication),
        )
    watch.end_phase("copy")
    return _report(job, layout, watch)


def _begin(job: ConversionPlan) -> Publication:
    return begin(
        job.target,
        job.kind,
        overwrite=job.options.overwrite,
        needed_bytes=job.payload_bytes,
        last=job.last,
        keep=job.kept(),
    )


def _make_writer(job: ConversionPlan, on_progress: OnProgress | None) -> TargetWriter:
    options, meter = job.options, Meter(job.payload_bytes, on_progress)
    return TargetWriter(job.reader, parse_size(options.max_memory), meter, options.jobs, options.allow_overflow)


def _lay_out(job: ConversionPlan, unique_suffix: str, save: str) -> Layout:
    """Name the files, make headers and indexes.

    The model's index is written where there are several files, where optimizer files lie beside them (readers that glob
    would take those for shards), and on stores without rename, where it is what makes the result loadable.

    Args:
        job: The conversion.
        unique_suffix: Put into names, where files under the usual ones may still be read by somebody.
        save: Id of a native step.
    """
    if job.options.to == "native":
        return _lay_out_step(job, save)
    if job.options.to == "torch":
        return _lay_out_torch(job, unique_suffix)
    if job.options.to == "dcp":
        return _lay_out_dcp(job, unique_suffix)
    if job.options.to == UNIVERSAL:
        [weights], loss = job.groups[_MASTERS], job.options.allow_loss
        made, small = lay_out_universal(job.reader, job.selection, weights, allow_loss=loss)
        return Layout(tuple(made), small)
    metadata = _metadata(job)
    if job.is_single:
        [[tensors]] = job.groups.values()
        return Layout((lay_out(PlannedFile(job.target.rpartition("/")[2], tensors), metadata),), {})
    files = {stem: name_files(parts, stem, unique_suffix) for stem, parts in job.groups.items()}
    payload = tuple(lay_out(file, metadata) for written in files.values() for file in written)
    small = _config(job)
    companions: dict[str, object] = {}
    if job.selection.groups is not None:
        groups = f"param_groups-{unique_suffix}.json" if unique_suffix else PARAM_GROUPS
        small[groups] = _json(as_json(job.selection.groups))
        companions = {OPTIMIZER_FILES_KEY: [f.name for f in files[OPTIMIZER]], PARAM_GROUPS_KEY: groups}
    is_last_word = job.options.part != "model" or local_path(job.target) is None
    stem = next(iter(files))
    if is_last_word or len(files[stem]) > 1:
        small[_INDEX.format(stem)] = _json(index(files[stem], companions))
    return Layout(payload, small)


def _lay_out_torch(job: ConversionPlan, unique_suffix: str) -> Layout:
    """Return `pytorch_model*.bin` with its index and `optimizer.bin`, or the one file that was named."""
    selection = job.selection
    if job.is_single:
        return Layout((single_file(selection, job.options.part, job.target.rpartition("/")[2]),), {})
    payload: list[OutputFile] = []
    small = _config(job)
    for stem, groups in job.groups.items():
        if stem == OPTIMIZER:
            payload.append(optimizer_file(selection))
            continue
        files, content = model_files(selection, groups, stem, unique_suffix)
        payload += files
        if len(files) > 1 or local_path(job.target) is None:
            small[_TORCH_INDEX.format(stem)] = _json(content)
    return Layout(tuple(payload), small)


def _lay_out_dcp(job: ConversionPlan, unique_suffix: str) -> Layout:
    """Return `.distcp` files and `.metadata`; `convert` cuts tensors as the source has them."""
    content = build_content(job.selection)
    most_bytes = parse_size(job.options.max_shard_size)
    if job.is_as_stored:
        files = plan_as_stored(content, most_bytes=most_bytes, unique_suffix=unique_suffix)
    else:
        files = plan_ranks(content, 1, most_bytes=most_bytes, unique_suffix=unique_suffix)
    return Layout(tuple(files), {**_config(job), METADATA: encode_content_metadata(files, content)})


def _lay_out_step(job: ConversionPlan, save: str) -> Layout:
    """Return a native step of one writer, which is a Hugging Face folder too where it holds a model."""
    model = ("model",) if job.options.part != "optim" else None
    most_bytes = parse_size(job.options.max_shard_size)
    step = plan_step(build_selected_tree(job.selection), 1, most_bytes=most_bytes, save=save, model=model)
    return step.layout(_config(job))


def _config(job: ConversionPlan) -> dict[str, bytes]:
    """Return config files that are kept, and the model's, if it changes with the type of the tensors."""
    kept = dict(job.carried.kept)
    if not (job.options.dtype and job.carried.config):
        return kept
    return {**kept, CONFIG: _json(with_dtype(job.carried.config, parse_dtype(job.options.dtype)))}


def _json(content: Mapping[str, object]) -> bytes:
    try:
        return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()
    except UnicodeEncodeError:  # half a surrogate pair, which JSON can only hold escaped
        return (json.dumps(content, indent=2) + "\n").encode()


def _metadata(job: ConversionPlan) -> dict[str, str]:
    """Return what headers carry: the source's text, ties as `dropped: kept` (as `save_model` writes them), casts."""
    metadata = {**job.reader.manifest.metadata, "format": "pt", **job.selection.ties}
    casts = {t.name: t.entry.stored for t in job.selection.model if t.is_cast}
    if casts:
        kinds = set(casts.values())
        metadata["source_dtype"] = kinds.pop() if len(kinds) == 1 else json.dumps(casts)
    return dict(sorted(metadata.items()))


def _write_rest(job: ConversionPlan, layout: Layout, hashes: Hashes, publication: Publication) -> None:
    if job.carried.store is not None and not job.is_single:
        for name, size in job.carried.files.items():
            if name in layout.small:
                continue
            with publication.create(name) as writer:
                writer.copy_from(job.carried.store, name, 0, size)
    layout.write_rest(hashes, publication)


def _describe_kept(job: ConversionPlan) -> list[str]:
    names = ", ".join(job.carried.kept)
    return [f"{names} of the checkpoint that is replaced: kept for the new one"] if names else []


def _report(job: ConversionPlan, layout: Layout, watch: Stopwatch) -> Report:
    tensors = [*job.selection.model, *job.selection.optim]
    return Report(
        source=job.source,
        target=job.target,
        format=job.reader.manifest.format,
        part=job.options.part,
        files=layout.files,
        carried=tuple(dict.fromkeys((*(() if job.is_single else job.carried.files), *layout.others))),
        tensors=len(tensors),
        nbytes=job.payload_bytes,
        ties=job.selection.ties,
        cast=dict(Counter(f"{t.entry.stored} -> {t.dtype}" for t in tensors if t.is_cast)),
        left_out=job.selection.left_out,
        warnings=(*job.selection.warnings, *_describe_kept(job)),
        seconds=watch.seconds,
        dry_run=job.options.dry_run,
    )
