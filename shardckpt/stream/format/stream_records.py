"""Records of a stream: what it holds, who publishes, and one commit for each version."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

from shardckpt.dtypes import array_nbytes
from shardckpt.native.records import Count, Counts, Dtype

__all__ = [
    "ANCHOR",
    "COMMIT",
    "KEY",
    "MAX_NUMBERS",
    "STREAM",
    "DeltaFile",
    "DeltaIndex",
    "EpochClaim",
    "StoredChange",
    "StreamRecord",
    "StreamTensor",
    "Version",
    "VersionCommit",
    "name_epoch",
    "read_epoch",
]

STREAM = "STREAM.json"
COMMIT = "COMMIT.json"  # in a version's folder; the version exists once it is there
ANCHOR = "anchor"  # folder in a version's folder: a step with all its weights
KEY = "shardckpt.stream"  # key in a file's `__metadata__`

_FOLDER = re.compile(r"e(\d{5})-v(\d{10})")
_EPOCH = re.compile(r"epochs/(\d{5})\.json")
_MAX_EPOCHS, MAX_NUMBERS = 10**5, 10**10

Hex32 = Annotated[str, re.compile("[0-9a-f]{32}")]
Hex64 = Annotated[str, re.compile("[0-9a-f]{64}")]


class Version(NamedTuple):
    """A version of the weights; later ones are greater."""

    epoch: Annotated[int, range(1, _MAX_EPOCHS)]  # start of a publisher in this stream, from 1
    number: Annotated[int, range(MAX_NUMBERS)]  # given by the caller; unique in the epoch

    def __str__(self) -> str:
        """Return the version as text."""
        return f"{self.number} (epoch {self.epoch})"

    @property
    def folder(self) -> str:
        """Name of its folder."""
        return f"e{self.epoch:05d}-v{self.number:010d}"

    @classmethod
    def from_folder(cls, name: str) -> Version | None:
        """Return the version that has a folder; None for another folder."""
        match = _FOLDER.fullmatch(name)
        return cls(int(match[1]), int(match[2])) if match else None


def name_epoch(epoch: int) -> str:
    """Return the name of the file that claims an epoch."""
    return f"epochs/{epoch:05d}.json"


def read_epoch(name: str) -> int:
    """Return the epoch that a file claims; 0 for another file."""
    match = _EPOCH.fullmatch(name)
    return int(match[1]) if match else 0


class StreamTensor(NamedTuple):
    """A tensor in every version."""

    dtype: Dtype  # in torch's spelling
    shape: Counts

    @property
    def nbytes(self) -> int:
        """Bytes of the full tensor."""
        return array_nbytes(self.dtype, tuple(self.shape))


@dataclass(frozen=True, slots=True)
class StreamRecord:
    """What all versions of a stream have in common."""

    format: Literal["shardckpt-stream"]
    revision: Annotated[int, range(1, 2)]  # of the format
    id: Hex32
    tensors: Mapping[str, StreamTensor]
    ties: Mapping[str, str]  # further names of tensors, each with the name in `tensors`


@dataclass(frozen=True, slots=True)
class EpochClaim:
    """The publisher that may write an epoch's versions."""

    token: Hex32
    host: str
    process: Count


class StoredChange(NamedTuple):
    """Where a file has the change of one box."""

    name: str
    offset: Counts  # of the box in the full tensor
    size: Counts
    sha256: Hex64  # of the change's bytes


@dataclass(frozen=True, slots=True)
class DeltaIndex:
    """What a file of changes holds, in its header."""

    stream: Hex32
    version: Version
    changes: tuple[StoredChange, ...]  # in file order; the tensor `str(position)` has the bytes


class DeltaFile(NamedTuple):
    """A file of changes in a version's folder."""

    name: Annotated[str, re.compile(r"delta-\d{5}-[0-9a-f]{8}\.safetensors")]  # rank, attempt
    nbytes: Count
    header_bytes: Count
    header_sha256: Hex64  # the header has the hash of each change, so this covers the entire file


@dataclass(frozen=True, slots=True)
class VersionCommit:
    """A published version."""

    stream: Hex32
    version: Version
    token: Hex32  # of this attempt to publish
    base: Version | None  # version that the changes apply to; None if the version is an anchor alone
    base_digest: Hex32 | None
    result_digest: Hex32  # of all tensors
    digests: Mapping[str, Hex32]  # of each tensor
    files: tuple[DeltaFile, ...]
    changed: Count  # number of changed elements
    full_bytes: Count  # bytes of all tensors

    @property
    def nbytes(self) -> int:
        """Bytes of the changes."""
        return sum(file.nbytes for file in self.files)
