"""Tasks that write a checkpoint: each writes some payload files into the staging folder.

Plan and commit make the verb's own call, with the plan's names: options, formats and rules have one meaning. A task
makes it too, unless its input says which bytes go where.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from shardckpt.errors import FormatError, MissingFileError, TargetExistsError, UsageError
from shardckpt.events.progress import OnProgress
from shardckpt.native.payload import BLOCK_BYTES, HASH_BYTES
from shardckpt.offline.results.contents import Report
from shardckpt.offline.tasks.part_results import PartResults, changed_source_error
from shardckpt.offline.tasks.source_versions import (
    digest_paths,
    digest_sources,
    read_source_versions,
    read_versions,
)
from shardckpt.offline.tasks.task_inputs import TaskInput, describe_blocks, encode_inputs, open_input, read_inputs
from shardckpt.offline.tasks.task_plan import TaskPlan, WorkPart, list_paths, share_parts
from shardckpt.offline.tasks.work import Results, bind_arguments
from shardckpt.offline.write.conversion import ConversionPlan, Hashes, Layout, Stopwatch, write_by, write_payload
from shardckpt.offline.write.stream import OutputFile
from shardckpt.storage.publication import Publication
from shardckpt.storage.publish import JoinedPublication, require_files, start_publication
from shardckpt.storage.replaceable import FileKind
from shardckpt.storage.resolve_url import local_path, open_place, read_version, split

__all__ = ["FileWork"]

_DISCARD_ONE = (
    "If another plan writes there, discard one of them (commit --discard). If it should stay, or is this plan's own"
    " result, discard this plan. Else remove it, then commit again."
)


class FileWork:
    """The work of a verb that writes a checkpoint.

    Args:
        call: The verb; takes its JSON arguments by name, and returns a report.
    """

    def __init__(self, call: Callable[..., Report]) -> None:
        self._call = call

    def bind(self, positional: Sequence[Any], given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the verb's arguments by name. Raises UsageError."""
        return bind_arguments(self._call, positional, given)

    def plan(self, new: TaskPlan, count: int, url: str) -> tuple[TaskPlan, Sequence[bytes]]:  # noqa: ARG002
        """Return the plan with the output files, shared among at most `count` tasks; 0 for a task a file."""
        planned: list[tuple[TaskPlan, Sequence[bytes]]] = []

        def plan_only(conversion: ConversionPlan, _watch: Stopwatch, _on_progress: OnProgress | None) -> Layout:
            made, layout = _plan_conversion(conversion, new, count)
            planned.append(_with_inputs(made, conversion, layout))
            return layout

        with write_by(plan_only):
            self._call(**new.arguments)
        return planned[0]

    def run(self, plan: TaskPlan, parts: Sequence[WorkPart], on_progress: OnProgress | None) -> None:
        """Write some files, unless results say that they are there."""
        if plan.inputs:
            for found in read_inputs(plan, {part.name for part in parts}):
                _require_same_files(plan, found)
                reader, files = open_input(found, plan.parts)
                write = partial(write_payload, reader, found.settings)
                _write_parts(plan, parts, files, write, on_progress)
            return

        def write_parts(conversion: ConversionPlan, watch: Stopwatch, on_progress: OnProgress | None) -> Layout:
            layout, _ = _plan_again(plan, conversion)
            names = {part.name for part in parts}
            files = [file for file in layout.payload if file.name in names]
            _write_parts(plan, parts, files, conversion.write_payload, on_progress)
            watch.end_phase("copy")
            return layout

        with write_by(write_parts):
            self._call(**plan.arguments, on_progress=on_progress)

    def is_done(self, plan: TaskPlan, part: WorkPart, result: Mapping[str, Any]) -> bool:
        """Return True if a part's file is the one that its result describes."""
        with suppress(MissingFileError):
            version = read_version(plan.staging, part.name)
            is_same = version == result.get("version") and version.startswith(f"{part.nbytes} ")
            return is_same and _may_be_hashes(result.get("hashes"), part.nbytes)
        return False

    def commit(self, plan: TaskPlan, results: Results, on_progress: OnProgress | None) -> Report:
        """Write the small files, and publish everything."""

        def publish_parts(conversion: ConversionPlan, watch: Stopwatch, _on_progress: OnProgress | None) -> Layout:
            layout, versions = _plan_again(plan, conversion)
            _require_same_inputs(plan, conversion, layout, versions)
            hashes: Hashes = {name: bytes.fromhex(result["hashes"]) for name, result in results.items()}
            require_files(plan.staging, plan.staging, [plan.parts])
            names = frozenset(plan.parts)
            publication = conversion.publish_with(partial(start_publication, staged=names))
            try:
                publication.adopt(plan.staging, names)
                conversion.finish(layout, hashes, publication)
                if local_path(plan.staging) is None:
                    PartResults(plan).mark_commit()
                else:  # a discard takes nothing from the target
                    PartResults(plan).require_started()
                publication.commit()
            except BaseException:
                publication.rollback()
                raise
            watch.end_phase("publish")
            return layout

        try:
            with write_by(publish_parts):
                return self._call(**plan.arguments, on_progress=on_progress)
        except TargetExistsError as error:
            if plan.arguments.get("overwrite"):
                raise
            raise TargetExistsError(error.what, where=error.where, found=error.found, fix=_DISCARD_ONE) from error

    def discard(self, plan: TaskPlan, *, has_commit: bool) -> None:
        """Remove files from a store without rename; on a disk they are in the plan's folder."""
        if local_path(plan.staging) is None and not has_commit:
            store = open_place(plan.staging)
            for name in plan.parts:
                store.delete(name)


def _may_be_hashes(value: object, nbytes: int) -> bool:
    """Return True for hexadecimal digits of the hashes of all blocks, or of none."""
    is_text = isinstance(value, str) and re.fullmatch(r"(?:[0-9a-f]{2})*", value) is not None
    return is_text and len(str(value)) in (0, 2 * HASH_BYTES * -(-nbytes // BLOCK_BYTES))


_Write = Callable[[Sequence[OutputFile], Publication, "OnProgress | None"], Hashes]


def _write_parts(
    plan: TaskPlan,
    parts: Sequence[WorkPart],
    files: Sequence[OutputFile],
    write: _Write,
    on_progress: OnProgress | None,
) -> None:
    """Write files one after the other, and store the result of each."""
    results, sizes = PartResults(plan), {part.name: part for part in parts}
    publication = JoinedPublication(plan.staging)
    try:
        results.require_started()  # another process may have ended the plan
        for file in files:
            hashes = write([file], publication, on_progress)
            version = read_version(plan.staging, file.name)
            results.write(sizes[file.name], {"version": version, "hashes": hashes[file.name].hex()})
            if not results.is_started():
                _remove_late_file(plan, results, sizes[file.name])
                results.require_started()
    except BaseException:
        publication.rollback()
        raise


def _remove_late_file(plan: TaskPlan, results: PartResults, part: WorkPart) -> None:
    """Remove what a task wrote after its plan ended, unless a commit may have published it."""
    # A discard marks the plan before it deletes files. So either it finds the file, or the task sees the mark or no
    # plan. Without a plan, a commit may have ended it, which leaves files that are not parts.
    if local_path(plan.staging) is None:
        store = open_place(plan.staging)
        if results.is_discarded() or all(entry.name in plan.parts for entry in store.list()):
            store.delete(part.name)
    results.remove_late(part)


def _plan_conversion(conversion: ConversionPlan, new: TaskPlan, count: int) -> tuple[TaskPlan, Layout]:
    publication = conversion.publish_with(start_publication)  # requires a target that may be written
    target, save_id = conversion.report.target, conversion.files.save_id
    is_local = local_path(target) is not None
    # On a store, a late task may end an upload at any time: its file must not have the name of another result's.
    suffix = publication.unique_suffix or ("" if is_local else new.id)
    publication.rollback()
    if isinstance(conversion.files.kind, FileKind) and not is_local:
        raise UsageError(
            "a plan needs a folder as its target on a store", found=target, fix="One file has one task: use no plan."
        )
    layout = conversion.plan_layout(suffix, save_id)
    parent, name = split(target)
    folder = f"{parent.rstrip('/')}/.{name}.tasks-{new.id}"
    made = replace(
        new,
        folder=folder,
        staging=f"{folder}/files" if is_local else target,
        unique_suffix=suffix,
        save_id=save_id,
        tasks=share_parts([WorkPart(file.name, file.nbytes) for file in layout.payload], count),
    )
    return made, layout


def _with_inputs(made: TaskPlan, conversion: ConversionPlan, layout: Layout) -> tuple[TaskPlan, Sequence[bytes]]:
    versions = _read_versions(conversion)
    blocks = encode_inputs(made, conversion, layout, versions, _digest_others(made))
    sources = _digest_sources(made, conversion, versions)
    return replace(made, sources=sources, inputs=describe_blocks(blocks)), blocks


def _plan_again(plan: TaskPlan, conversion: ConversionPlan) -> tuple[Layout, Mapping[str, str]]:
    """Return the planned files, and the source's versions. Raises UsageError if the source has changed."""
    layout, versions = conversion.plan_layout(plan.unique_suffix, plan.save_id), _read_versions(conversion)
    is_same = {file.name: file.nbytes for file in layout.payload} == plan.parts
    if not is_same or _digest_sources(plan, conversion, versions) != plan.sources:
        raise changed_source_error(conversion.report.source)
    return layout, versions


def _require_same_inputs(
    plan: TaskPlan, conversion: ConversionPlan, layout: Layout, versions: Mapping[str, str]
) -> None:
    """Require that tasks wrote what the verb's own call writes."""
    if not plan.inputs:
        return
    blocks = encode_inputs(plan, conversion, layout, versions, _digest_others(plan))
    if describe_blocks(blocks) != plan.inputs:
        raise FormatError(
            "the plan's tasks did not write what this program plans",
            where=plan.folder,
            fix="Commit with the version of shardckpt that planned, or discard the plan and make a new one.",
        )


def _require_same_files(plan: TaskPlan, found: TaskInput) -> None:
    """Require the source that was planned, as far as a task reads it."""
    is_same = found.versions == read_versions(found.source, list(found.versions), lists=False)
    if not is_same or _digest_others(plan) != found.others:
        raise changed_source_error(found.source)


def _read_versions(conversion: ConversionPlan) -> dict[str, str]:
    return read_source_versions(conversion.reader.store.url, conversion.reader.manifest)


def _list_others(plan: TaskPlan) -> list[str]:
    """Return the paths that a plan reads, except the source's, whose files are in its manifest."""
    return list_paths({name: value for name, value in plan.arguments.items() if name != "src"})


def _digest_others(plan: TaskPlan) -> str:
    return digest_paths(_list_others(plan))


def _digest_sources(plan: TaskPlan, conversion: ConversionPlan, versions: Mapping[str, str]) -> str:
    copied = [] if conversion.copied_from is None else [conversion.copied_from.url]
    return digest_sources(versions, sorted({*_list_others(plan), *copied}))
