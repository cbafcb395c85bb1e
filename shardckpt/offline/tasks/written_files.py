"""Tasks that write a checkpoint: each writes some payload files into the staging folder.

Every task makes the verb's own call again, with the plan's names: options, formats and rules have one meaning.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from shardckpt.errors import MissingFileError, UsageError
from shardckpt.events.progress import OnProgress
from shardckpt.offline.results.contents import Report
from shardckpt.offline.tasks.part_results import PartResults, changed_source_error
from shardckpt.offline.tasks.source_versions import digest_sources, read_version
from shardckpt.offline.tasks.task_plan import TaskPlan, WorkPart, list_paths, share_parts
from shardckpt.offline.tasks.work import Results, bind_arguments
from shardckpt.offline.write.conversion import ConversionPlan, Hashes, Layout, Stopwatch, write_by
from shardckpt.storage.publish import JoinedPublication, require_files, start_publication
from shardckpt.storage.replaceable import FileKind
from shardckpt.storage.resolve_url import local_path, open_place, split

__all__ = ["FileWork"]


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

    def plan(self, new: TaskPlan, count: int, url: str) -> TaskPlan:  # noqa: ARG002  (results are next to the target)
        """Return the plan with the output files, shared among at most `count` tasks; 0 for a task a file."""
        planned: list[TaskPlan] = []

        def plan_only(conversion: ConversionPlan, _watch: Stopwatch, _on_progress: OnProgress | None) -> Layout:
            planned.append(_plan_conversion(conversion, new, count))
            return conversion.plan_layout(planned[0].unique_suffix, planned[0].save_id)

        with write_by(plan_only):
            self._call(**new.arguments)
        return planned[0]

    def run(self, plan: TaskPlan, parts: Sequence[WorkPart], on_progress: OnProgress | None) -> None:
        """Write some files, unless results say that they are there."""

        def write_parts(conversion: ConversionPlan, watch: Stopwatch, on_progress: OnProgress | None) -> Layout:
            layout, results = _plan_again(plan, conversion), PartResults(plan)
            files = {file.name: file for file in layout.payload}
            publication = JoinedPublication(plan.staging)
            try:
                for part in parts:
                    results.require_started()  # another process may have ended the plan
                    hashes = conversion.write_payload([files[part.name]], publication, on_progress)
                    version = read_version(plan.staging, part.name)
                    results.write(part, {"version": version, "hashes": hashes[part.name].hex()})
            except BaseException:
                publication.rollback()
                raise
            watch.end_phase("copy")
            return layout

        with write_by(write_parts):
            self._call(**plan.arguments, on_progress=on_progress)

    def is_done(self, plan: TaskPlan, part: WorkPart, result: Mapping[str, Any]) -> bool:
        """Return True if a part's file is the one that its result describes."""
        with suppress(MissingFileError):
            version = read_version(plan.staging, part.name)
            is_same = version == result.get("version") and version.startswith(f"{part.nbytes} ")
            return is_same and _is_hex(result.get("hashes"))
        return False

    def commit(self, plan: TaskPlan, results: Results, on_progress: OnProgress | None) -> Report:
        """Write the small files, and publish everything."""

        def publish_parts(conversion: ConversionPlan, watch: Stopwatch, _on_progress: OnProgress | None) -> Layout:
            layout = _plan_again(plan, conversion)
            hashes: Hashes = {name: bytes.fromhex(result["hashes"]) for name, result in results.items()}
            require_files(plan.staging, plan.staging, [plan.parts])
            names = frozenset(plan.parts)
            publication = conversion.publish_with(partial(start_publication, staged=names))
            try:
                publication.adopt(plan.staging, names)
                conversion.finish(layout, hashes, publication)
                PartResults(plan).mark_commit()
                publication.commit()
            except BaseException:
                publication.rollback()
                raise
            watch.end_phase("publish")
            return layout

        with write_by(publish_parts):
            return self._call(**plan.arguments, on_progress=on_progress)

    def discard(self, plan: TaskPlan) -> None:
        """Remove files from a store without rename; on a disk they are in the plan's folder."""
        if local_path(plan.staging) is None and not PartResults(plan).is_commit_marked():
            store = open_place(plan.staging)
            for name in plan.parts:
                store.delete(name)


def _is_hex(value: object) -> bool:
    return isinstance(value, str) and re.fullmatch(r"(?:[0-9a-f]{2})*", value) is not None


def _plan_conversion(conversion: ConversionPlan, new: TaskPlan, count: int) -> TaskPlan:
    publication = conversion.publish_with(start_publication)  # requires a target that may be written
    suffix = publication.unique_suffix
    publication.rollback()
    target, save_id = conversion.report.target, conversion.files.save_id
    is_local = local_path(target) is not None
    if isinstance(conversion.files.kind, FileKind) and not is_local:
        raise UsageError(
            "a plan needs a folder as its target on a store", found=target, fix="One file has one task: use no plan."
        )
    files = conversion.plan_layout(suffix, save_id).payload
    parent, name = split(target)
    folder = f"{parent.rstrip('/')}/.{name}.tasks-{new.id}"
    return replace(
        new,
        folder=folder,
        staging=f"{folder}/files" if is_local else target,
        unique_suffix=suffix,
        save_id=save_id,
        sources=_digest_sources(conversion, new.arguments),
        tasks=share_parts([WorkPart(file.name, file.nbytes) for file in files], count),
    )


def _plan_again(plan: TaskPlan, conversion: ConversionPlan) -> Layout:
    """Return the planned files. Raises UsageError if the source is not the one that was planned."""
    layout = conversion.plan_layout(plan.unique_suffix, plan.save_id)
    is_same = {file.name: file.nbytes for file in layout.payload} == plan.parts
    if not is_same or _digest_sources(conversion, plan.arguments) != plan.sources:
        raise changed_source_error(conversion.report.source)
    return layout


def _digest_sources(conversion: ConversionPlan, arguments: Mapping[str, Any]) -> str:
    others = {name: value for name, value in arguments.items() if name != "src"}  # its files are in the manifest
    paths = list_paths(others)
    if conversion.copied_from is not None:
        paths.append(conversion.copied_from.url)
    reader = conversion.reader
    return digest_sources(reader.store.url, reader.manifest, sorted({*paths}))
