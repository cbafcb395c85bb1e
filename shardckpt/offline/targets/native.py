"""Writing a native step without a job: cut for any number of ranks, hashed as it is written, `COMMIT` last."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from shardckpt.boxes import Box, Shape, full_box
from shardckpt.dtypes import bits
from shardckpt.format.native.commit import COMMIT, encode_commit, manifest_name
from shardckpt.format.native.manifest_json import ManifestContents, encode_manifest
from shardckpt.format.native.partial_manifest import WrittenPayload, build_partial, merge_partials
from shardckpt.format.native.payload import HF_INDEX, BlockHasher, PayloadChunk, PayloadFile, hf_index, lay_out
from shardckpt.format.native.records import ArrayRecord, make_record
from shardckpt.format.reader import Reader
from shardckpt.manifest import Path
from shardckpt.offline.select.native_tree import NativeTree
from shardckpt.offline.write.report import Meter
from shardckpt.offline.write.resolve import row_shard
from shardckpt.offline.write.stream import MemoryBudget, TensorPart, write_parts
from shardckpt.offline.write.target_writer import FinalFiles, Hashes, Layout
from shardckpt.plan.layout.output_files import OutputTensor
from shardckpt.plan.layout.write_plan import LocalTensor, plan_save
from shardckpt.storage.store import Writer


@dataclass(frozen=True, slots=True)
class StepFile:
    """A payload file of a step, decided.

    Attributes:
        payload: Its layout.
        arrays: Where the elements come from.
    """

    payload: PayloadFile
    arrays: Mapping[Path, OutputTensor]

    @property
    def name(self) -> str:
        """In the target."""
        return self.payload.name

    @property
    def nbytes(self) -> int:
        """Bytes of the whole file."""
        return self.payload.nbytes

    @property
    def count(self) -> int:
        """Parts of arrays in it."""
        return len(self.payload.chunks)

    def write(
        self, reader: Reader, writer: Writer, *, budget: MemoryBudget, allow_overflow: bool, meter: Meter
    ) -> tuple[int, ...]:
        """Write it from start to end; the caller closes the writer.

        Returns:
            Hashes of its blocks.

        Raises:
            CheckpointError: The source's bytes cannot be read, or a cast overflows.
            StorageError: Reading or writing failed.
        """
        sink = _Hashed(writer)
        sink.write(self.payload.header)
        parts = (TensorPart(self.arrays[chunk.path], chunk.box) for chunk in self.payload.chunks)
        write_parts(reader, parts, sink, budget=budget, allow_overflow=allow_overflow, meter=meter)
        return sink.hasher.digests()


class _Hashed:
    """Hashes what it passes on.

    Args:
        writer: Where it goes.
    """

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self.hasher = BlockHasher()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Take the next bytes. Raises StorageError."""
        self._writer.write(data)
        self.hasher.update(data)


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """A planned native step.

    Attributes:
        contents: Its manifest, without files and rows.
        arrays: Where the elements come from.
        payloads: The files of each writer, in order.
        model: Where the model is, for a step of one writer.
    """

    contents: ManifestContents
    arrays: Mapping[Path, OutputTensor]
    payloads: tuple[tuple[PayloadFile, ...], ...]
    model: Path | None

    def layout(self, small: Mapping[str, bytes]) -> Layout:
        """Return its files, and others that lie beside them; `COMMIT` is the last of all."""
        names = (*((HF_INDEX,) if self.model else ()), manifest_name(self.contents.save), COMMIT)
        files = tuple(StepFile(payload, self.arrays) for mine in self.payloads for payload in mine)
        return Layout(files, small, FinalFiles(names, self._ending))

    def _ending(self, hashes: Hashes) -> dict[str, bytes]:
        """Return the index of the model, the manifest and `COMMIT`."""
        parts = [
            build_partial([WrittenPayload(payload, hashes[payload.name]) for payload in mine]) for mine in self.payloads
        ]
        files, arrays = merge_partials(parts, [record.path for record in self.contents.arrays])
        made: dict[str, bytes] = {}
        if self.model is not None:
            made[HF_INDEX] = hf_index(self.payloads[0], self.model)
            files = (*files, make_record(HF_INDEX, made[HF_INDEX]))
        contents = replace(self.contents, files=files, arrays=arrays)
        manifest = encode_manifest(contents)
        return {
            **made,
            manifest_name(contents.save): manifest,
            COMMIT: encode_commit(contents.save, manifest, files),
        }


def plan_step(nest: NativeTree, writers: int, *, most_bytes: int, save: str, model: Path | None = None) -> PlannedStep:
    """Cut arrays as `torch.chunk` does, in their first dimension, and lay out a file for every writer at least.

    Args:
        nest: What is saved.
        writers: For how many ranks.
        most_bytes: Bytes of data in a file.
        save: Its id, as `new_save_id` makes one.
        model: Where the model is, where one writer's step shall be a Hugging Face folder too.

    Raises:
        UnsupportedError: A type that the format has no name for.
    """
    arrays = nest.arrays
    held = [
        [LocalTensor(path, t.shape, t.dtype, tuple(_rows(t, writers, w))) for path, t in arrays.items()]
        for w in range(writers)
    ]
    plan = plan_save(held)
    records = tuple(ArrayRecord(path, t.dtype, t.shape, array("Q")) for path, t in arrays.items())
    topology = {**nest.topology, "world_size": writers}
    about = {"writer": "shardckpt"}
    contents = ManifestContents(save, (), records, nest.json, nest.ties, topology, about, variants=nest.variants)
    payloads = []
    for writer, tasks in enumerate(plan.tasks):
        chunks = [PayloadChunk(*plan.arrays[task.array], task.box) for task in tasks]
        carry: dict[str, object] = contents.carried() if writer == 0 else {}
        payloads.append(lay_out(save, writer, chunks, most_bytes=most_bytes, model=model, carry=carry))
    return PlannedStep(contents, arrays, tuple(payloads), model)


def _rows(tensor: OutputTensor, writers: int, writer: int) -> Iterator[Box]:
    """Yield what a rank holds: its rows, or all of what cannot be cut."""
    shape: Shape = tensor.shape
    if not shape or 0 in shape or bits(tensor.dtype) % 8 or bits(tensor.entry.stored) % 8:
        yield full_box(shape)
        return
    rows = row_shard(shape, writers, writer)
    if rows.volume:
        yield rows
