"""`StorageWriter`: with it, `torch.distributed.checkpoint` saves a step.

torch's planner decides what each rank writes. Rank 0 starts the publication, every rank writes payload files, and
rank 0 commits.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from typing import Any

import torch
from torch.distributed.checkpoint import storage
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor
from torch.futures import Future

from shardckpt.boxes import Box, full_box
from shardckpt.checkpoint.planning.rank_report import ABOUT, RankSubtree
from shardckpt.checkpoint.save.payload_writer import write_payloads
from shardckpt.checkpoint.save.save import read_notes
from shardckpt.checkpoint.stateful.flatten import encoded
from shardckpt.checkpoint.stateful.state_stream import take_tensors
from shardckpt.checkpoint.stateful.stateful import check_tensor, dtype_name, require_memory
from shardckpt.checkpoint.stateful.tensor_bytes import iter_bytes
from shardckpt.encodings import typed_json
from shardckpt.errors import UnsupportedError, UsageError
from shardckpt.manifest import Path, dotted, unflatten
from shardckpt.native.commit import COMMIT, STEP, encode_commit, manifest_name
from shardckpt.native.manifest_json import (
    ManifestContents,
    PartialManifest,
    Topology,
    build_partial,
    encode_manifest,
    merge_partials,
)
from shardckpt.native.payload import PayloadChunk, PayloadFile, arrange_files, build_payloads, new_save_id
from shardckpt.native.run_directory import read_referred_files
from shardckpt.readers.opened.state_tree import TensorRef, iter_refs
from shardckpt.storage.publication import Publication, keep_no_file
from shardckpt.storage.publish import JoinedPublication, require_files, start_publication
from shardckpt.storage.resolve_url import as_url
from shardckpt.torchrun import has_second_core

__all__ = ["StorageWriter"]


@dataclass(frozen=True)
class _Placement:
    """The save's location, which rank 0 sends a rank as its plan's `storage_data`."""

    save: str  # save id
    place: str  # location to write to
    writer: int  # rank index


@dataclass(frozen=True)
class _RankResult:
    """A rank's result, which it sends rank 0 as its first result's `storage_data`."""

    part: PartialManifest  # records of the files and arrays that the rank wrote
    values: Mapping[Path, RankSubtree]  # values that are not tensors, by path


class StorageWriter(storage.StorageWriter):
    """Writer for `torch.distributed.checkpoint.save`, whose result is a step.

    The step appears after all its files are stored durably. Values that are not tensors are stored as JSON. A value
    that `shardckpt.save` would refuse is refused here too, because nothing is pickled.

    Args:
        path: Step folder, or a URL that fsspec supports; None if each save has a `checkpoint_id`.
        overwrite: Replace one existing step after the new one is in place. Anything else is never replaced.
        custom_metadata: Free text by name, stored in the manifest.

    Attributes:
        checkpoint_id: Step path or URL.
        nbytes: Bytes that this rank wrote in the last save.

    Raises:
        UsageError: `custom_metadata` does not map text to text, or has a reserved name.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        overwrite: bool = True,
        custom_metadata: Mapping[str, str] | None = None,
    ) -> None:
        self._publication: Publication | None = None
        self.checkpoint_id = path
        self._overwrite, self._about = overwrite, read_notes(custom_metadata)
        self._save, self.nbytes = "", 0

    def __del__(self) -> None:
        self.rollback()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return True for a path or a URL."""
        return isinstance(checkpoint_id, (str, os.PathLike))

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Start another save, to another path if one is given."""
        self.rollback()
        self.checkpoint_id = self.checkpoint_id if checkpoint_id is None else checkpoint_id

    def rollback(self) -> None:
        """Remove an uncommitted save's files; never raises."""
        publication, self._publication = getattr(self, "_publication", None), None
        if publication is not None:
            publication.rollback()

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Check the save's arguments.

        Raises:
            UsageError: No path was given.
            UnsupportedError: The ranks would not coordinate, but a step has one manifest.
        """
        self.rollback()
        if not kwargs.get("use_collectives", True):
            raise UnsupportedError("a step cannot be saved with use_collectives=False", where=self.checkpoint_id)
        as_url(self.checkpoint_id)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Start the publication, and add to each plan where to write. On rank 0.

        Raises:
            TargetExistsError: The target is not a step, or `overwrite` is False.
            UnsupportedError: The planner uses cached plans, which do not contain where to write.
            StorageError: The storage failed.
        """
        if not all(getattr(plan, "usable", True) for plan in plans):  # torch 2.6 has no cached plans
            raise UnsupportedError(
                "planners that cache plans are not supported", fix="Pass DefaultSavePlanner(enable_plan_caching=False)."
            )
        url, self._save = as_url(self.checkpoint_id), new_save_id()
        self._publication = start_publication(
            url,
            STEP,
            overwrite=self._overwrite,
            needed_bytes=sum(_nbytes(item) for plan in plans for item in plan.items),
            last=COMMIT,
            prefix=self._save,
            find_kept=partial(read_referred_files, url) if self._overwrite else keep_no_file,
        )
        place = self._publication.staging_url
        return [replace(plan, storage_data=_Placement(self._save, place, rank)) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[storage.WriteResult]]:
        """Write this rank's files.

        Raises:
            UnsupportedError: A value cannot be saved; the message has its name.
            StorageError: The storage failed.
        """
        placement: _Placement = plan.storage_data
        publication = self._publication or JoinedPublication(placement.place)
        try:
            content = _resolve_items(plan, planner)

            def source(payload: PayloadFile) -> Iterator[memoryview]:
                return iter_bytes((content.resolve(chunk, planner) for chunk in payload.chunks), payload.nbytes)

            files = build_payloads(placement.save, placement.writer, arrange_files(tuple(content.tensors)))
            written_files = write_payloads(publication, files, source, checksums=True, has_idle_core=has_second_core())
            part = build_partial(written_files)
        except BaseException:
            publication.rollback()
            raise
        self.nbytes = sum(file.nbytes for file in part.files)
        results = [storage.WriteResult(item.index, _nbytes(item), None) for item in plan.items]
        results[:1] = [replace(first, storage_data=_RankResult(part, content.values)) for first in results[:1]]
        written: Future[list[storage.WriteResult]] = Future()
        written.set_result(results)
        return written

    def finish(self, metadata: Metadata, results: list[list[storage.WriteResult]]) -> None:
        """Write the manifest, and commit the step. On rank 0.

        Raises:
            FormatError: A value and a dict have the same name.
            UsageError: Another save with this writer has started since.
            StorageError: The storage failed, or a file of another rank is missing.
        """
        if self._publication is None:
            raise UsageError(
                "another save started with this writer before this one ended",
                where=self.checkpoint_id,
                fix="Wait for the previous save's `result()`, or create a writer for each save.",
            )
        try:
            self._commit(self._publication, metadata, [mine[0].storage_data if mine else None for mine in results])
        except BaseException:
            self.rollback()
            raise
        self._publication = None

    def _commit(self, publication: Publication, metadata: Metadata, ranks: Sequence[_RankResult | None]) -> None:
        url, written = as_url(self.checkpoint_id), [rank for rank in ranks if rank is not None]
        values: dict[Path, Any] = {
            record.path: TensorRef(record.path) for rank in written for record in rank.part.arrays
        }
        for rank in written:
            for path, value in rank.values.items():
                values[path] = value.decode()
        known = metadata.planner_data if isinstance(metadata.planner_data, Mapping) else {}  # in the order of the state
        paths = [_path(name, known) for name in (*known, *metadata.state_dict_metadata)]
        saved = {path: values[path] for path in paths if path in values}
        order = [ref.path for value in saved.values() for ref in iter_refs(value)]
        numbers = {path: number for number, path in enumerate(order)}
        files, arrays = merge_partials([rank.part for rank in written], order)
        contents = ManifestContents(
            self._save,
            files,
            arrays,
            tree=encoded(unflatten(saved, url, has_lists=True), lambda ref: numbers[ref.path]),
            topology={"world_size": len(ranks), **typed_json.encode(Topology(keeps_order=bool(known)))},
            about={**ABOUT, **self._about},
        )
        manifest = encode_manifest(contents)
        _write(publication, manifest_name(self._save), manifest)
        sizes = [{} if rank is None else {file.name: file.nbytes for file in rank.part.files} for rank in ranks]
        sizes[0][manifest_name(self._save)] = len(manifest)
        if not publication.is_hidden:
            require_files(url, publication.staging_url, sizes)
        _write(publication, COMMIT, encode_commit(self._save, manifest, files))
        if publication.is_hidden:  # as late as possible: another process may remove the run meanwhile
            require_files(url, publication.staging_url, sizes)
        publication.commit()


@dataclass
class _RankContent:
    """Content for a rank's files."""

    # Chunks with their tensor, or with the item for which the planner has it.
    tensors: dict[PayloadChunk, torch.Tensor | WriteItem] = field(default_factory=dict)
    values: dict[Path, RankSubtree] = field(default_factory=dict)  # values that are not tensors, by path

    def resolve(self, chunk: PayloadChunk, planner: SavePlanner) -> torch.Tensor:
        """Return a chunk's elements."""
        found = self.tensors[chunk]
        tensor: Any = planner.resolve_data(found).detach() if isinstance(found, WriteItem) else found
        check_tensor(tensor, chunk.path)
        require_memory(tensor, chunk.path)
        if (dtype_name(tensor.dtype), tuple(tensor.shape)) != (chunk.dtype, chunk.box.size):
            raise UnsupportedError(
                "the planner resolved a different tensor than it planned",
                where=dotted(chunk.path),
                found=f"{dtype_name(tensor.dtype)} {list(tensor.shape)}",
                expected=f"{chunk.dtype} {list(chunk.box.size)}",
            )
        return tensor  # type: ignore[no-any-return]


def _resolve_items(plan: SavePlan, planner: SavePlanner) -> _RankContent:
    """Return what this rank writes; tensors are resolved when they are written."""
    content = _RankContent()
    for item in plan.items:
        path = _path(item.index.fqn, plan.planner_data)
        if item.type == WriteItemType.BYTE_IO:
            tensors: dict[Path, torch.Tensor] = {}
            tree = take_tensors(_load_value(planner.resolve_data(item), path), path, tensors)
            content.values[path] = RankSubtree.encode(tree, path)
            for at, tensor in tensors.items():
                if isinstance(tensor, DTensor):
                    raise UnsupportedError(
                        "a DTensor inside a tuple or a plain value cannot be saved",
                        where=dotted(at),
                        fix="Put it into a dict or a list.",
                    )
                shape = tuple(tensor.shape)
                content.tensors[PayloadChunk(at, shape, dtype_name(tensor.dtype), full_box(shape))] = tensor
            continue
        assert item.tensor_data is not None, "items of tensors have it"
        shape, dtype = tuple(item.tensor_data.size), dtype_name(item.tensor_data.properties.dtype)
        box = Box(tuple(item.tensor_data.chunk.offsets), tuple(item.tensor_data.chunk.sizes))
        if box.volume or not prod(shape):
            content.tensors[PayloadChunk(path, shape, dtype, box)] = item
    return content


def _path(name: str, planner_data: Any) -> Path:
    """Return a value's path; torch's planners have the paths by name in `planner_data`."""
    return tuple(planner_data[name]) if isinstance(planner_data, Mapping) and name in planner_data else (name,)


def _load_value(data: Any, path: Path) -> Any:
    """Return the value that the planner of this process has just written with `torch.save`: no file is unpickled."""
    try:
        data.seek(0)
        return torch.load(data, weights_only=False)
    except Exception as error:
        raise UnsupportedError("the planner wrote no `torch.save` archive", where=dotted(path)) from error


def _nbytes(item: WriteItem) -> int:
    """Return an item's bytes; 0 for values, which are small."""
    if item.tensor_data is None:
        return 0
    return prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize


def _write(publication: Publication, name: str, data: bytes) -> None:
    with publication.create(name) as writer:
        writer.write(data)
