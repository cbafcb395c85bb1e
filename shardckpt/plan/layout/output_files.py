"""Plan output files: sizes, and names for Hugging Face readers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace
from math import prod
from typing import TYPE_CHECKING, Protocol, TypeVar

from shardckpt.boxes import Box, Shape
from shardckpt.dtypes import array_nbytes
from shardckpt.errors import UsageError
from shardckpt.manifest import TensorEntry

if TYPE_CHECKING:
    from fractions import Fraction

_SIZE = re.compile(r"(?P<number>[0-9]{1,30}(\.[0-9]{1,30})?)\s*(?P<unit>[KMGTP]?)(?P<binary>i?)B?", re.IGNORECASE)


class Change(Protocol):
    """Changes values while they are copied. Several threads may call it at the same time."""

    def __call__(self, box: Box, data: memoryview, stored: str) -> tuple[memoryview, str]:
        """Return a block's changed elements, and their dtype."""


@dataclass(frozen=True, slots=True)
class OutputTensor:
    """A tensor to write."""

    name: str
    entry: TensorEntry
    dtype: str  # to write, in torch's spelling
    # Tensors that are written contiguously in its place; its own entry then has no pieces.
    members: tuple[OutputTensor, ...] = ()
    change: Change | None = None

    @property
    def shape(self) -> Shape:
        """Shape in elements."""
        return self.entry.shape

    @property
    def nbytes(self) -> int:
        """Bytes as written."""
        return array_nbytes(self.dtype, self.entry.shape)

    @property
    def output_parts(self) -> tuple[OutputTensor, ...]:
        """Tensors that are written in its place, in order."""
        return self.members or (self,)

    @property
    def is_cast(self) -> bool:
        """Whether its dtype changes."""
        return self.dtype != self.entry.stored

    @property
    def is_computed(self) -> bool:
        """Whether the written bytes differ from the stored ones."""
        return self.is_cast or self.change is not None


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """A payload file to write."""

    name: str
    tensors: tuple[OutputTensor, ...]  # in state-dict order; the format's writer orders them in the file

    @property
    def nbytes(self) -> int:
        """Tensor data in bytes."""
        return sum(t.nbytes for t in self.tensors)


def parse_size(text: int | str) -> int:
    """Parse a size in bytes: `5GB` is decimal, `5GiB` binary, a plain number bytes."""
    match = _SIZE.fullmatch(str(text).strip())
    value = 0
    if match and (match["unit"] or not match["binary"]):
        step = 1024 if match["binary"] else 1000
        number: Fraction | int
        if match["number"].isdecimal():
            number = int(match["number"])
        else:
            from fractions import Fraction  # noqa: PLC0415  (2 ms, with `decimal`)

            number = Fraction(match["number"])
        value = int(number * step ** " KMGTP".index(match["unit"].upper() or " "))
    if value <= 0:
        raise UsageError(
            "a size must be a number of bytes", found=repr(text), expected="a number such as 5GB, 512MiB or 1000000"
        )
    return value


def split_by_size(tensors: Sequence[OutputTensor], max_bytes: int) -> list[tuple[OutputTensor, ...]]:
    """Assign tensors to files greedily in order."""
    # A tensor above `max_bytes` gets its own file. The rule is the same as in huggingface_hub
    # (`split_state_dict_into_shards_factory`), so both tools split at the same tensors.
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
    """Group tensors by source file."""
    # Tensors from several files share one more file. A tensor without pieces is computed from the one before it, and
    # follows it.
    files: dict[str, list[OutputTensor]] = {}
    name = ""
    for tensor in tensors:
        sources = {piece.file for piece in tensor.entry.pieces}
        if sources or tensor.change is None:
            name = sources.pop() if len(sources) == 1 else ""
        files.setdefault(name, []).append(tensor)
    return [tuple(group) for group in files.values()]


def name_files(
    groups: Sequence[tuple[OutputTensor, ...]], stem: str, unique_suffix: str = "", suffix: str = ".safetensors"
) -> list[PlannedFile]:
    """Name files `stem.safetensors`, or `stem-00001-of-00002.safetensors` etc."""
    mark = f"-{unique_suffix}" if unique_suffix else ""
    if len(groups) == 1:
        return [PlannedFile(f"{stem}{mark}{suffix}", groups[0])]
    return [
        PlannedFile(f"{stem}{mark}-{i:05d}-of-{len(groups):05d}{suffix}", group) for i, group in enumerate(groups, 1)
    ]


def index(files: Sequence[PlannedFile], more: Mapping[str, object] | None = None) -> dict[str, object]:
    """Return `*.safetensors.index.json` as transformers writes it."""
    return {
        "metadata": {
            "total_parameters": sum(prod(t.shape) for file in files for t in file.tensors),
            "total_size": sum(file.nbytes for file in files),
            **(more or {}),
        },
        "weight_map": dict(sorted((t.name, file.name) for file in files for t in file.tensors)),
    }


class Sized(Protocol):
    """A file or another piece of work."""

    @property
    def name(self) -> str:
        """Name, which decides between equal sizes."""

    @property
    def nbytes(self) -> int:
        """Size in bytes."""


_Sized = TypeVar("_Sized", bound=Sized)


def share_out(items: Sequence[_Sized], count: int) -> list[list[_Sized]]:
    """Assign items to ranks or tasks, the largest first, to the least loaded one; equal in every process."""
    loads = [(0, at) for at in range(count)]
    heapify(loads)
    shares: list[list[_Sized]] = [[] for _ in range(count)]
    for item in sorted(items, key=lambda each: (-each.nbytes, each.name)):
        load, at = loads[0]
        shares[at].append(item)
        heapreplace(loads, (load + max(item.nbytes, 1), at))
    return shares
