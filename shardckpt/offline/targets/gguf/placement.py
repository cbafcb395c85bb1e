"""Place a model's tensors in a GGUF file: names, types, and row order."""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from shardckpt.boxes import Box
from shardckpt.dtypes import block_elements
from shardckpt.encodings.gguf import GgufTensor, padding
from shardckpt.errors import IncompleteError, UnsupportedError, UsageError
from shardckpt.offline.select.selection import Selection
from shardckpt.offline.targets.gguf.architectures import EMBEDDING, OUTPUT, Architecture, NamedTensor
from shardckpt.offline.targets.gguf.hyperparameters import Hyperparameters
from shardckpt.offline.write.stream import FileSink, TensorPart, TensorStream
from shardckpt.plan.layout.output_files import OutputTensor

_BUFFERS = (".rotary_emb.inv_freq",)  # buffers in older checkpoints, which llama.cpp computes

_SHOWN = 5


@dataclass(frozen=True, slots=True)
class PlacedTensor:
    """A tensor in a file."""

    header: GgufTensor
    source: OutputTensor | None  # with the type to write; None if the data is known
    heads: int = 0  # whose rows are stored by pairs; 0 keeps the order
    data: bytes = b""

    @property
    def padded_nbytes(self) -> int:
        """Bytes of the data with its padding."""
        return self.header.nbytes + len(padding(self.header.nbytes))

    def iter_rows(self) -> Iterator[TensorPart]:
        """Yield each head's rows by pairs: row i in the first half, then row i in the second half."""
        # transformers rotates a head's element i with element i + half, llama.cpp (for llama) rotates neighbors.
        assert self.source is not None, "data that is known has no rows"
        rows, *rest = self.source.shape
        half = rows // self.heads // 2
        for first in range(0, rows, 2 * half):
            for row in range(first, first + half):
                for each in (row, row + half):
                    yield TensorPart(self.source, Box((each, *(0 for _ in rest)), (1, *rest)))


def place_tensors(
    selection: Selection, architecture: Architecture, model: Hyperparameters, url: str
) -> tuple[PlacedTensor, ...]:
    """Return a file's tensors in order."""
    stored = {tensor.name: tensor for tensor in selection.model}
    stored |= {name: stored[kept] for name, kept in selection.ties.items() if kept in stored}
    layers = min(model.layers, len(stored))  # more cannot be complete, and a config may name billions
    wanted = list(architecture.list_tensors(layers))
    _require_known(stored, wanted, architecture.name, url)
    embedding = stored.get(EMBEDDING.source)
    if stored.get(OUTPUT.source, embedding if model.is_tied else None) is embedding:
        wanted.remove(OUTPUT)
    missing = [each.source for each in wanted if each.is_required and each.source not in stored]
    if missing:
        raise IncompleteError(
            f"a tensor of the {architecture.name} architecture is missing",
            where=url,
            found=f"no {missing[0]}" + (f", and {len(missing) - 1} more" if len(missing) > 1 else ""),
            fix="Give this model's config.json, or the names in transformers with --rules or --rename.",
        )
    placed = [_place(each, stored[each.source], model) for each in wanted if each.source in stored]
    factors = model.list_rope_factors()
    if factors:
        data = struct.pack(f"<{len(factors)}f", *factors)
        header = GgufTensor("rope_freqs.weight", "float32", (len(factors),))
        placed.insert(0, PlacedTensor(header, None, data=data))
    return tuple(placed)


def _require_known(stored: Mapping[str, OutputTensor], wanted: list[NamedTensor], architecture: str, url: str) -> None:
    known = {each.source for each in wanted}
    unknown = [name for name in stored if name not in known and not name.endswith(_BUFFERS)]
    if unknown:
        more = f" and {len(unknown) - _SHOWN} more" if len(unknown) > _SHOWN else ""
        raise UnsupportedError(
            f"{architecture}, the architecture in config.json, has no such tensor",
            where=url,
            found=", ".join(unknown[:_SHOWN]) + more,
            fix="Give this model's config.json, leave the tensor out with --exclude, or give the names in transformers"
            " with --rules or --rename.",
        )


def _place(named: NamedTensor, source: OutputTensor, model: Hyperparameters) -> PlacedTensor:
    """Return a tensor with its type: llama.cpp requires vectors in float32."""
    shape = tuple(model.sizes[size] for size in named.shape)
    if source.shape != shape:
        raise UnsupportedError(
            f"the shape of {named.source} does not fit config.json", found=source.shape, expected=shape
        )
    written = replace(source, dtype="float32") if len(shape) == 1 else source
    block = block_elements(written.dtype)
    if shape[-1] % block:
        raise UsageError(
            f"{written.dtype} needs rows of full blocks, and {named.source} has others",
            found=f"rows of {shape[-1]}",
            expected=f"a multiple of {block}",
            fix="Choose --dtype f16, or keep such tensors with --keep-fp32 NAME.",
        )
    header = GgufTensor(named.name, written.dtype, shape)
    return PlacedTensor(header, written, model.sizes[named.heads] if named.heads else 0)


def most_common_type(tensors: tuple[PlacedTensor, ...]) -> str:
    """Return the dtype that most matrices have."""
    return Counter(each.header.dtype for each in tensors if len(each.header.shape) > 1).most_common(1)[0][0]


def write_data(tensors: tuple[PlacedTensor, ...], stream: TensorStream, writer: FileSink) -> None:
    """Write all tensors' data, each with its padding; tensors that need none are written together."""
    together: list[OutputTensor] = []
    for tensor in tensors:
        zeros = padding(tensor.header.nbytes)
        if tensor.source is not None and not tensor.heads:
            together.append(tensor.source)
            if not zeros:
                continue
        stream.write_tensors(together, writer)
        together = []
        if tensor.source is None:
            writer.write(tensor.data)
        elif tensor.heads:
            stream.write_parts(tensor.iter_rows(), writer)
        writer.write(zeros)
    stream.write_tensors(together, writer)
