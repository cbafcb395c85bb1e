"""Plan the output files of tensors: sizes as people write them, and the names that Hugging Face readers look for."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import prod
from typing import Protocol

from shardckpt.boxes import Box, Shape
from shardckpt.dtypes import array_nbytes
from shardckpt.errors import UsageError
from shardckpt.manifest import TensorEntry

_SIZE = re.compile(r"(?P<number>[0-9]{1,30}(\.[0-9]{1,30})?)\s*(?P<unit>[KMGTP]?)(?P<binary>i?)B?", re.IGNORECASE)


class Change(Protocol):
    """Changes values on their way."""

    def __call__(self, box: Box, data: memoryview, stored: str) -> tuple[memoryview, str]:
        """Return other elements of a block, and their type.

        Args:
            box: The block, one contiguous range of the tensor.
            data: Its elements as stored.
            stored: Their type.

        Raises:
            CheckpointError: What they are changed by cannot be read.
            StorageError: Reading failed.
        """


@dataclass(frozen=True, slots=True)
class OutputTensor:
    """One tensor to write.

    Attributes:
        name: Final name.
        entry: Where its elements come from.
        dtype: Torch's name of the type it is written in.
        members: Tensors that are written back to back as this one, whose entry has no pieces then.
        change: What is done to its values, if anything.
    """

    name: str
    entry: TensorEntry
    dtype: str
    members: tuple[OutputTensor, ...] = ()
    change: Change | None = None

    @property
    def shape(self) -> Shape:
        """In elements."""
        return self.entry.shape

    @property
    def nbytes(self) -> int:
        """Bytes as written."""
        return array_nbytes(self.dtype, self.entry.shape)

    @property
    def output_parts(self) -> tuple[OutputTensor, ...]:
        """Tensors that are written for it, in order."""
        return self.members or (self,)

    @property
    def is_cast(self) -> bool:
        """Whether its elements change type on the way."""
        return self.dtype != self.entry.stored

    @property
    def is_computed(self) -> bool:
        """Whether its bytes are not those that are stored."""
        return self.is_cast or self.change is not None


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """One payload file to write.

    Attributes:
        name: Its name in the target.
        tensors: What it holds, in state-dict order; the writer of the format lays them out.
    """

    name: str
    tensors: tuple[OutputTensor, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of tensor data."""
        return sum(t.nbytes for t in self.tensors)


def parse_size(text: int | str) -> int:
    """Return bytes: `5GB` is decimal, `5GiB` binary, a plain number bytes.

    Raises:
        UsageError: It is not a size, or not positive.
    """
    match = _SIZE.fullmatch(str(text).strip())
    value = 0
    if match and (match["unit"] or not match["binary"]):
        step = 1024 if match["binary"] else 1000
        value = int(Fraction(match["number"]) * step ** " KMGTP".index(match["unit"].upper() or " "))
    if value <= 0:
        raise UsageError(
            "a size must be a number of bytes", found=repr(text), expected="a number such as 5GB, 512MiB or 1000000"
        )
    return value


def split_by_size(tensors: Sequence[OutputTensor], max_bytes: int) -> list[tuple[OutputTensor, ...]]:
    """Fill files greedily in order; a tensor larger than a file gets one of its own.

    The rule of `split_state_dict_into_shards_factory` in huggingface_hub, so that both tools split at the same places.

    Args:
        tensors: In state-dict order.
        max_bytes: Bytes of tensor data in a file.
    """
    shards: list[tuple[OutputTensor, ...]] = []
    current: list[OutputTensor] = []
    size = 0
    for tensor in tensors:
        if tensor.nbytes > max_bytes:
            shards.append((tensor,))
            continue
        if current and size + tensor.nbytes > max_bytes:
            shards.append(tuple(current))
            current, size = [], 0
        current.append(tensor)
        size += tensor.nbytes
    return [*shards, tuple(current)] if current or not shards else shards


def split_as_stored(tensors: Sequence[OutputTensor]) -> list[tuple[OutputTensor, ...]]:
    """Keep tensors of one source file together; tensors that are split over files share one more."""
    files: dict[str, list[OutputTensor]] = {}
    for tensor in tensors:
        sources = {piece.file for piece in tensor.entry.pieces}
        files.setdefault(sources.pop() if len(sources) == 1 else "", []).append(tensor)
    return [tuple(group) for group in files.values()]


def name_files(
    groups: Sequence[tuple[OutputTensor, ...]], stem: str, unique_suffix: str = "", suffix: str = ".safetensors"
) -> list[PlannedFile]:
    """Name the files `stem.safetensors`, or `stem-00001-of-00002.safetensors` and so on.

    Args:
        groups: The tensors of each file.
        stem: `model`, `adapter_model` or `optimizer`.
        unique_suffix: Put into every name, where the usual names may still be read by somebody.
        suffix: What every name ends with.
    """
    mark = f"-{unique_suffix}" if unique_suffix else ""
    if len(groups) == 1:
        return [PlannedFile(f"{stem}{mark}{suffix}", groups[0])]
    return [
        PlannedFile(f"{stem}{mark}-{i:05d}-of-{len(groups):05d}{suffix}", group) for i, group in enumerate(groups, 1)
    ]


def index(files: Sequence[PlannedFile], more: Mapping[str, object] | None = None) -> dict[str, object]:
    """Return the content of `*.safetensors.index.json` as transformers writes it."""
    return {
        "metadata": {
            "total_parameters": sum(prod(t.shape) for file in files for t in file.tensors),
            "total_size": sum(file.nbytes for file in files),
            **(more or {}),
        },
        "weight_map": dict(sorted((t.name, file.name) for file in files for t in file.tensors)),
    }
