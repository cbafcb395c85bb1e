"""A step's durability: where its copies are, and which failures each copy survives."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass
from typing import Any

from shardckpt.errors import StorageError, UsageError
from shardckpt.native.run_directory import StepFolder
from shardckpt.notebook import Result
from shardckpt.storage.resolve_url import local_path
from shardckpt.storage.store import Store

PROCESS, NODE, TWO_NODES = "process", "node", "2 nodes"
# Failures that a copy may survive: the end of all training processes, and the loss of one or two nodes.
FAILURES = (PROCESS, NODE, TWO_NODES)

_REMOTE = re.compile(r"(s3a?|gs|gcs|abfss?|az|adl|hf|oci|oss|obs|tos|r2|sftp|ssh|hdfs|webhdfs|dbfs)://")
# Types of file systems whose files are on other machines; not 9p, by which virtual machines see their host.
_NETWORK = {
    "afs", "beegfs", "ceph", "cifs", "fuse.ceph", "fuse.glusterfs", "fuse.juicefs", "fuse.s3fs", "fuse.sshfs",
    "gpfs", "lustre", "nfs", "nfs4", "pvfs2", "smb3", "wekafs",
}  # fmt: skip

_MOUNTS = "/proc/self/mountinfo"


MEMORY, LOCAL, ROOT = "memory", "local", "root"  # a step's places, the nearest first


@dataclass(frozen=True, slots=True)
class StepCopy:
    """A copy of a step.

    Attributes:
        tier: `memory`, `local` or `root`.
        path: Path or URL of the copy.
        survives: Failures that it survives, of `process`, `node` and `2 nodes`.
        saved_at: Start of the save that wrote it, in seconds since the epoch; None if unknown.
        verified_at: Time of its commit, in seconds since the epoch, before which the writers hashed all bytes and rank
            0 saw every file; None if unknown.
        save: Id of the save; copies of one save have equal bytes.
        is_part: Whether this machine has only some files of it, so that it survives nothing alone; other machines may
            have the rest.
    """

    tier: str
    path: str
    survives: tuple[str, ...]
    saved_at: float | None
    verified_at: float | None = None
    save: str = ""
    is_part: bool = False


@dataclass(frozen=True, slots=True, repr=False)
class Durability(Result):
    """Durability of a step now.

    Attributes:
        step: Number of the step.
        copies: Its copies, the nearest first: complete ones, and parts if a command lists those of one machine.
    """

    step: int
    copies: tuple[StepCopy, ...]

    @property
    def survives(self) -> frozenset[str]:
        """Failures that at least one copy survives; empty if the step is nowhere."""
        return frozenset(find_survived_by(self.copies))


def find_survived_by(copies: Iterable[StepCopy]) -> tuple[str, ...]:
    """Return the failures that at least one copy survives."""
    survived = {failure for copy in copies for failure in copy.survives}
    return tuple(failure for failure in FAILURES if failure in survived)


def describe_copy(store: Store, step: StepFolder, tier: str, survives: tuple[str, ...]) -> StepCopy:
    """Return a step as a copy."""
    path, changed_at = f"{store.url.rstrip('/')}/{step.name}", store.changed_at(step.name)
    return StepCopy(tier, path, survives, step.saved_at, changed_at, step.save, step.is_part)


def encode_copies(copies: Iterable[StepCopy]) -> list[list[Any]]:
    """Return copies as JSON has them, for `decode_durability`."""
    return [list(astuple(copy)) for copy in copies]


def decode_durability(step: int, copies: Sequence[Any]) -> Durability:
    """Return a durability from its step and its copies as JSON."""
    return Durability(step, tuple(StepCopy(tier, path, tuple(names), *rest) for tier, path, names, *rest in copies))


def require_durable(durability: Durability, survives: str) -> None:
    """Require that a step survives a failure."""
    if survives not in FAILURES:
        raise UsageError("`survives` must be 'process', 'node' or '2 nodes'", found=repr(survives))
    if survives not in durability.survives:
        lost = survives if survives == TWO_NODES else f"the {survives}"
        raise StorageError(
            f"step {durability.step} does not survive losing {lost}",
            found=", ".join(copy.path for copy in durability.copies) or "no complete copy",
            fix="Save it to the root, or to storage that survives this.",
        )


def find_survived(url: str, mounts: str) -> tuple[str, ...]:
    """Return the failures that files at a path or URL certainly survive."""
    # Files on a disk of this machine survive the process. Buckets, other known remote stores, and network file systems
    # survive the node too. With an unknown protocol only the process is certain; `memory://` of fsspec ends with it.
    path = local_path(url)
    if path is None:
        return FAILURES if _REMOTE.match(url) else () if url.startswith("memory:") else (PROCESS,)
    return FAILURES if find_file_system(os.path.realpath(path), mounts) in _NETWORK else (PROCESS,)


def find_file_system(path: str, mounts: str) -> str:
    """Return a path's file system type; empty if unknown."""
    best, kind = "", ""
    for line in mounts.splitlines():
        fields, _, rest = line.partition(" - ")
        columns = fields.split(" ")
        place = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), columns[4]) if len(columns) > 4 else ""
        is_above = place in {"/", path} or path.startswith(f"{place}/")
        if place and is_above and len(place) >= len(best):
            best, kind = place, rest.partition(" ")[0]
    return kind


def read_mounts() -> str:
    """Return this process's mounted file systems; empty if the system does not list them."""
    try:
        with open(_MOUNTS, encoding="utf-8", errors="surrogateescape") as file:
            return file.read()
    except OSError:
        return ""
