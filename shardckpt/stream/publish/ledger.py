"""What rank 0 knows about the stream that it publishes: the last version, its digests, and the epoch."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from shardckpt.errors import CheckpointError, MismatchError, PublisherReplacedError, UsageError
from shardckpt.events.warn_user import warn_user
from shardckpt.stream.format.digest import ZERO, Digest, combine_digests
from shardckpt.stream.format.stream_folder import StreamFolder
from shardckpt.stream.format.stream_records import (
    COMMIT,
    STREAM,
    DeltaFile,
    EpochClaim,
    StreamRecord,
    StreamTensor,
    Version,
    VersionCommit,
    name_epoch,
)
from shardckpt.stream.retention.prune_stream import prune_stream
from shardckpt.stream.retention.removal_plan import require_anchors

__all__ = ["Anchors", "Attempt", "Ledger", "PublishedBase"]


@dataclass(frozen=True, slots=True)
class Anchors:
    """When a version gets an anchor: all its weights, so that a receiver needs no earlier version.

    Attributes:
        max_chain: Versions after an anchor until the next one.
        max_bytes: Bytes of changes after an anchor until the next one, as a share of all weights.
        keep: How many of the newest anchors stay, with all versions after them. Older versions are removed after each
            new anchor, except those that a reader needs. None keeps all.
    """

    max_chain: int = 32
    max_bytes: float = 1.0
    keep: int | None = None

    def __post_init__(self) -> None:
        """Require a usable policy."""
        is_number = isinstance(self.max_bytes, (int, float)) and self.max_bytes > 0
        if not (isinstance(self.max_chain, int) and self.max_chain >= 1 and is_number):
            raise UsageError("`Anchors` needs max_chain >= 1 and max_bytes > 0", found=repr(self))
        if self.keep is not None:
            require_anchors(self.keep)


@dataclass(frozen=True, slots=True)
class PublishedBase:
    """The version that the ranks' snapshots have."""

    version: Version
    token: str
    digests: Mapping[str, Digest]  # of all tensors

    @property
    def digest(self) -> Digest:
        """Digest of all tensors together."""
        return combine_digests(self.digests)


@dataclass(frozen=True, slots=True)
class Attempt:
    """A version that is being published."""

    version: Version
    token: str
    base: PublishedBase | None  # None if the version has no changes, but an anchor
    has_anchor: bool


class Ledger:
    """A stream's state on rank 0."""

    def __init__(self, url: str, anchors: Anchors, kept: Callable[[], Collection[int]]) -> None:
        self.folder = StreamFolder(url)
        self._anchors, self._kept = anchors, kept
        self._record: StreamRecord | None = None
        self._epoch = 0  # that this publisher has claimed; 0 before
        self._epoch_claim: EpochClaim | None = None
        self._last: Version | None = None  # of this epoch
        self._base: PublishedBase | None = None
        self._doubtful: PublishedBase | None = None  # its commit may have been stored
        self._chain, self._chain_bytes = 0, 0

    @property
    def base(self) -> PublishedBase | None:
        """The version that the next changes apply to."""
        return self._base

    @property
    def stream(self) -> str:
        """Id of the stream."""
        assert self._record is not None, "it is open"
        return self._record.id

    def open(self, tensors: Mapping[str, StreamTensor], ties: Mapping[str, str]) -> None:
        """Create the stream, or require that it has these tensors. Raises MismatchError."""
        if self._record is None:
            new = StreamRecord("shardckpt-stream", 1, uuid.uuid4().hex, tensors, ties)
            self._record = new if self.folder.create(STREAM, new) else self.folder.require_record()
        _require_equal(self._record.tensors, tensors, self.folder.url)

    def settle(self) -> None:
        """Find out whether the last attempt's commit was stored although its request failed."""
        doubtful = self._doubtful
        if doubtful is None:
            return
        commit = self._find_undamaged(doubtful.version)
        self._doubtful = None
        if commit is not None and commit.token == doubtful.token:
            self._advance(doubtful, commit)
        else:
            self._epoch = 0  # the request may still arrive: no version of that epoch may follow

    def start(self, number: int | None, bases: Sequence[Sequence[str]]) -> Attempt:
        """Start to publish a version.

        Args:
            number: Number of the version; None to find the version that was restored, in a new epoch.
            bases: For each rank, the tokens of the versions in its snapshots.

        Raises:
            PublisherReplacedError: A later publisher writes this stream.
            UsageError: The number is not greater than the last one.
        """
        if number is None:
            self._epoch, self._base = 0, None
        self._claim()
        version = Version(self._epoch, number or 0)
        if self._last is not None and version <= self._last:
            raise UsageError(
                "`version` must be greater than the last one",
                found=number,
                expected=f"more than {self._last.number}",
                where=self.folder.url,
            )
        if self._base is not None and any(self._base.token not in each for each in bases):
            self._base = None
        is_due = self._chain >= self._anchors.max_chain or self._chain_bytes > self._anchors.max_bytes * self.full_bytes
        return Attempt(version, uuid.uuid4().hex, self._base, self._base is None or is_due)

    def _claim(self) -> None:
        last = self.folder.find_last_epoch()
        if self._epoch:
            if not self._is_ours(self._epoch):
                raise PublisherReplacedError(
                    f"another publisher has opened epoch {last} in this stream",
                    where=self.folder.url,
                    found=f"epoch {self._epoch} of this publisher",
                    fix="Let one publisher write a stream; give the other one its own.",
                )
            return
        claim = self._epoch_claim = EpochClaim(uuid.uuid4().hex, os.uname().nodename, os.getpid())
        while not self.folder.create(name_epoch(last + 1), claim):
            last = max(last + 1, self.folder.find_last_epoch())
        self._epoch, self._last = last + 1, None

    @property
    def full_bytes(self) -> int:
        """Bytes of all tensors."""
        assert self._record is not None, "it is open"
        return sum(each.nbytes for each in self._record.tensors.values())

    def commit(
        self, attempt: Attempt, files: Sequence[DeltaFile], parts: Sequence[Mapping[str, Digest]], changed: int
    ) -> None:
        """Publish a version whose files are complete.

        Args:
            attempt: The version.
            files: Files with its changes.
            parts: For each rank, what it adds to the digests.
            changed: Number of changed elements.
        """
        base = attempt.base
        sums = {} if base is None else dict(base.digests)
        for part in parts:
            for name, digest in part.items():
                sums[name] = sums.get(name, ZERO) + digest
        made = PublishedBase(attempt.version, attempt.token, sums)
        commit = VersionCommit(
            self.stream,
            attempt.version,
            attempt.token,
            None if base is None else base.version,
            None if base is None else base.digest.hex(),
            made.digest.hex(),
            {name: digest.hex() for name, digest in sums.items()},
            tuple(files),
            changed,
            self.full_bytes,
        )
        self._require_ours(attempt)
        self._doubtful = made
        if not self.folder.create(f"{attempt.version.folder}/{COMMIT}", commit):
            found = self.folder.find_commit(attempt.version)
            if found is None or found.token != attempt.token:  # otherwise a repeated request created it
                self._doubtful = None
                raise self._replaced_error(attempt)
        self._doubtful = None
        self._advance(made, commit)

    def _require_ours(self, attempt: Attempt) -> None:
        if not self._is_ours(attempt.version.epoch):
            raise self._replaced_error(attempt)

    def _is_ours(self, epoch: int) -> bool:
        """Return True if this publisher has claimed an epoch, and no later one is claimed."""
        # The folder may have been removed and made again, so that another publisher has an epoch of this number.
        is_last = self.folder.find_last_epoch() == epoch
        return is_last and self.folder.find(EpochClaim, name_epoch(epoch)) == self._epoch_claim

    def _replaced_error(self, attempt: Attempt) -> PublisherReplacedError:
        return PublisherReplacedError(
            "another publisher writes this stream now",
            where=self.folder.url,
            found=f"version {attempt.version}",
            fix="Let one publisher write a stream; give the other one its own.",
        )

    def _advance(self, made: PublishedBase, commit: VersionCommit) -> None:
        self._base, self._last = made, made.version
        if commit.base is None:
            self.note_anchor()
        else:
            self._chain, self._chain_bytes = self._chain + 1, self._chain_bytes + commit.nbytes

    def note_anchor(self) -> None:
        """Start a new chain: the last version has an anchor."""
        self._chain, self._chain_bytes = 0, 0

    def prune(self) -> None:
        """Remove what the rules and readers do not need."""
        if self._anchors.keep is not None and self._is_ours(self._epoch):
            prune_stream(self.folder, keep_anchors=self._anchors.keep, kept=frozenset(self._kept()))

    def resume(self, parts: Sequence[Mapping[str, Digest]], token: str) -> Version | None:
        """Return the version that has the ranks' weights; None without one. The newest one becomes the base."""
        digests: dict[str, Digest] = {}
        for part in parts:
            for name, digest in part.items():
                digests[name] = digests.get(name, ZERO) + digest
        wanted = combine_digests(digests).hex()
        newest: Version | None = None
        for version in reversed(self.folder.list_folders()):
            commit = self._find_undamaged(version)
            if commit is None and not self.folder.has_commit(version):
                continue
            newest = newest or version
            if commit is not None and commit.result_digest == wanted:
                if version == newest:
                    self._base = PublishedBase(version, token, digests)
                    self._measure_chain(commit)
                return version
        return None

    def _find_undamaged(self, version: Version) -> VersionCommit | None:
        """Return a version's commit; None if it is not published, or damaged: then warn."""
        try:
            return self.folder.find_commit(version)
        except CheckpointError as error:
            warn_user(f"a version's commit is damaged: {error}")
            return None

    def _measure_chain(self, commit: VersionCommit) -> None:
        """Count the changes since the last anchor; a chain that is interrupted needs one now."""
        self.note_anchor()
        now: VersionCommit | None = commit
        while now is not None and now.base is not None and not self.folder.has_anchor(now.version):
            self._chain, self._chain_bytes = self._chain + 1, self._chain_bytes + now.nbytes
            now = self._find_undamaged(now.base)
        if now is None:
            self._chain = self._anchors.max_chain


def _require_equal(known: Mapping[str, StreamTensor], given: Mapping[str, StreamTensor], where: str) -> None:
    """Require that the model has the stream's tensors. Raises MismatchError."""
    missing = [name for name in known if name not in given]
    unexpected = [name for name in given if name not in known]
    differing = [name for name, tensor in given.items() if name in known and known[name] != tensor]
    if missing or unexpected or differing:
        shown = [f"missing {name}" for name in missing[:4]] + [f"unexpected {name}" for name in unexpected[:4]]
        shown += [f"{name} is {_show(given[name])}, the stream has {_show(known[name])}" for name in differing[:4]]
        raise MismatchError.on_other_rank(
            f"the model does not fit the stream at {where}: {'; '.join(shown)}. Publish it to a stream of its own."
        )


def _show(tensor: StreamTensor) -> str:
    return f"{tensor.dtype}{list(tensor.shape)}"
