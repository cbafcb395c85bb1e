"""Writing a native step without a job: cut for any number of ranks, hashed as it is written, `COMMIT` last."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from shardckpt.boxes import Box, Shape, whole
from shardckpt.convert.native_nest import Nest
from shardckpt.convert.report import Meter, WrittenFile
from shardckpt.convert.stream import Budget, Part, assemble, batches
from shardckpt.dtypes import bits
from shardckpt.format.native_manifest import (
    COMMIT,
    ArrayRecord,
    Contents,
    Written,
    encode_commit,
    encode_manifest,
    join,
    manifest_name,
    part_of,
    record_of,
)
from shardckpt.format.native_payload import HF_INDEX, BlockHasher, Chunk, Payload, hf_index, lay_out, new_save_id
from shardckpt.format.pieces import PieceReader
from shardckpt.format.reader import Reader
from shardckpt.manifest import Path
from shardckpt.plan.outputs import OutTensor
from shardckpt.plan.saving import Held, plan_save
from shardckpt.storage.publication import Publication
from shardckpt.storage.store import Writer


@dataclass(frozen=True, slots=True)
class Step:
    """A native step, decided.

    Attributes:
        contents: Its manifest, without files and rows.
        arrays: Where the elements come from.
        payloads: The files of each writer, in order.
        model: Where the model is, for a step of one writer.
    """

    contents: Contents
    arrays: Mapping[Path, OutTensor]
    payloads: tuple[tuple[Payload, ...], ...]
    model: Path | None

    @property
    def nbytes(self) -> int:
        """Bytes of all payload files."""
        return sum(payload.nbytes for mine in self.payloads for payload in mine)

    @property
    def files(self) -> tuple[WrittenFile, ...]:
        """The payload files, for a report."""
        return tuple(WrittenFile(p.name, p.nbytes, len(p.chunks)) for mine in self.payloads for p in mine)


def plan_step(nest: Nest, writers: int, *, most_bytes: int, model: Path | None = None) -> Step:
    """Cut arrays as `torch.chunk` does, in their first dimension, and lay out a file for every writer at least.

    Args:
        nest: What is saved.
        writers: For how many ranks.
        most_bytes: Bytes of data in a file.
        model: Where the model is, where one writer's step shall be a Hugging Face folder too.

    Raises:
        UnsupportedError: A type that the format has no name for.
    """
    arrays = nest.arrays
    held = [
        [Held(path, t.shape, t.dtype, tuple(_rows(t, writers, w))) for path, t in arrays.items()]
        for w in range(writers)
    ]
    plan = plan_save(held)
    save = new_save_id()
    records = tuple(ArrayRecord(path, t.dtype, t.shape, array("Q")) for path, t in arrays.items())
    topology = {**nest.topology, "world_size": writers}
    about = {"writer": "shardckpt"}
    contents = Contents(save, (), records, nest.json, nest.ties, topology, about, variants=nest.variants)
    payloads = []
    for writer, tasks in enumerate(plan.tasks):
        chunks = [Chunk(*plan.arrays[task.array], task.box) for task in tasks]
        carry: dict[str, object] = contents.carried() if writer == 0 else {}
        payloads.append(lay_out(save, writer, chunks, most_bytes=most_bytes, model=model, carry=carry))
    return Step(contents, arrays, tuple(payloads), model)


def _rows(tensor: OutTensor, writers: int, writer: int) -> Iterator[Box]:
    """Yield what a rank holds: its rows, or all of what cannot be cut."""
    shape: Shape = tensor.shape
    if not shape or 0 in shape or bits(tensor.dtype) % 8 or bits(tensor.entry.stored) % 8:
        yield whole(shape)
        return
    step = -(-shape[0] // writers)
    low, high = min(writer * step, shape[0]), min((writer + 1) * step, shape[0])
    if high > low:
        yield Box((low, *(0 for _ in shape[1:])), (high - low, *shape[1:]))


def write_step(
    publication: Publication, reader: Reader, step: Step, *, budget: Budget, allow_overflow: bool, meter: Meter
) -> None:
    """Write all files of a step into a publication, whose last is `COMMIT`.

    Raises:
        CheckpointError: The source's bytes cannot be read, or a cast overflows.
        StorageError: Reading or writing failed.
    """
    parts = []
    for mine in step.payloads:
        written = []
        for payload in mine:
            with publication.create(payload.name) as writer:
                hashes = _write_payload(reader, payload, step.arrays, writer, budget, allow_overflow, meter)
            written.append(Written(payload, hashes))
        parts.append(part_of(written))
    files, arrays = join(parts, [record.path for record in step.contents.arrays])
    if step.model is not None:
        index = hf_index(step.payloads[0], step.model)
        files = (*files, record_of(HF_INDEX, index))
        _write(publication, HF_INDEX, index)
    contents = replace(step.contents, files=files, arrays=arrays)
    manifest = encode_manifest(contents)
    _write(publication, manifest_name(contents.save), manifest)
    _write(publication, COMMIT, encode_commit(contents.save, manifest, files))


def _write(publication: Publication, name: str, content: bytes) -> None:
    with publication.create(name) as writer:
        writer.write(content)


def _write_payload(
    reader: Reader,
    payload: Payload,
    arrays: Mapping[Path, OutTensor],
    writer: Writer,
    budget: Budget,
    allow_overflow: bool,
    meter: Meter,
) -> tuple[int, ...]:
    hasher = BlockHasher()
    writer.write(payload.header)
    hasher.update(payload.header)
    pieces = PieceReader(reader.store)
    buffer = bytearray(budget.batch_bytes)
    current: OutTensor | None = None
    parts = (Part(arrays[chunk.path], chunk.box) for chunk in payload.chunks)
    for batch in batches(parts, budget.batch_bytes):
        if batch.takes[-1].tensor is not current:
            pieces.forget()
            current = batch.takes[-1].tensor
        if len(buffer) < batch.nbytes:
            buffer = bytearray(batch.nbytes)
        data = memoryview(buffer)[: batch.nbytes]
        assemble(pieces, batch, data, allow_overflow)
        writer.write(data)
        hasher.update(data)
        meter.add(batch.nbytes)
    return hasher.digests()
