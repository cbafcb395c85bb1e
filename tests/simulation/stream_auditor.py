"""Auditor of a stream's history: models what is published, and checks it after every event."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from shardckpt.encodings.typed_json import load
from shardckpt.errors import ShardckptError
from shardckpt.stream.format.stream_records import ANCHOR, COMMIT, STREAM, Version, VersionCommit
from tests.simulation.scheduler import HistoryError, Scheduler
from tests.simulation.stores.run_storage import RunStorage
from tests.simulation.streamed_weights import Engine, digest_alone

_ATTEMPTS = 1000  # of a publisher; the number of an attempt has the publisher's number before its own
_MARK = f"/{COMMIT}"


def find_content(start: int, attempt: int) -> int:
    """Return the number that identifies an attempt to publish."""
    return start * _ATTEMPTS + attempt


@dataclass
class PublishedVersion:
    """A version whose `COMMIT.json` is there."""

    content: int  # its attempt
    mark: object  # identity of its `COMMIT.json`
    base: Version | None
    is_damaged: bool = False  # a bit was flipped in its folder


@dataclass
class StreamAuditor:
    """Compares the storage, and what receivers have, with what was published.

    Attributes:
        versions: Published versions.
        attempts: Number of the version of each attempt, by content.
        removed: Published versions that are not there any more.
    """

    scheduler: Scheduler
    storage: RunStorage
    versions: dict[Version, PublishedVersion] = field(default_factory=dict)
    attempts: dict[int, int] = field(default_factory=dict)
    removed: set[Version] = field(default_factory=set)
    is_quiet: Callable[[], bool] = lambda: False  # without a fault so far
    _seen: int = -1
    _marks: Mapping[str, object] | None = None  # each `COMMIT.json` at the last look
    _epochs: dict[int, int] = field(default_factory=dict)  # publisher by epoch
    _acknowledged: set[int] = field(default_factory=set)
    _activated: dict[str, Version] = field(default_factory=dict)  # last version by receiver
    _calls: dict[object, object] = field(default_factory=dict)

    # The storage

    def check(self) -> None:
        """Look at the storage, if it has changed. Raises HistoryError."""
        if self.storage.version != self._seen:
            self._seen = self.storage.version
            self.scheduler.observe(self._look)

    def _look(self) -> None:
        files = self.storage.list_files()
        marks = {name: mark for name, mark in files.items() if name.endswith(_MARK)}
        if marks == self._marks:
            return
        self._marks = marks
        for name, mark in marks.items():
            version = Version.from_folder(name[: -len(_MARK)])
            if version is None:
                continue
            known = self.versions.get(version)
            if known is None:
                self.versions[version] = self._read(version, name, mark)
            elif known.mark != mark and not known.is_damaged:
                self.versions[version] = self._read_again(version, known, name, mark)
        gone = {version for version in self.versions if f"{version.folder}{_MARK}" not in marks}
        if gone - self.removed:
            self._require_reachable(gone, files)
        self.removed = gone

    def _read_again(self, version: Version, known: PublishedVersion, name: str, mark: object) -> PublishedVersion:
        """Return a version that is there again. Raises HistoryError unless it was removed and is out of date."""
        again = self._read(version, name, mark)
        # A request whose answer was lost may be repeated after another publisher has removed the version.
        is_repeated = version in self.removed and again.content == known.content
        if not (is_repeated and version.epoch < self.last_epoch):
            raise HistoryError(f"version {version} was published twice")
        return again

    def _require_reachable(self, gone: Collection[Version], files: Collection[str]) -> None:
        """Require that the newest version and what leads to it from an anchor was not removed. Raises HistoryError."""
        now = self.newest
        while now is not None and now not in gone:
            if f"{now.folder}/{ANCHOR}/COMMIT" in files:
                return
            now = self.versions[now].base
        raise HistoryError(f"version {now} was removed, which leads to the newest one")

    def _read(self, version: Version, name: str, mark: object) -> PublishedVersion:
        try:
            commit = load(VersionCommit, self.storage.read(name))
        except ShardckptError as error:
            raise HistoryError(f"the commit of version {version} cannot be read: {error}") from error
        made = [content for content, number in self.attempts.items() if number == version.number]
        found = [content for content in made if digest_alone(content) == commit.result_digest]
        if len(found) != 1:
            raise HistoryError(f"version {version} has the weights of {found}, not of one of the attempts {made}")
        publisher = found[0] // _ATTEMPTS
        if self._epochs.setdefault(version.epoch, publisher) != publisher:
            raise HistoryError(f"epoch {version.epoch} has versions of two publishers")
        return PublishedVersion(found[0], mark, commit.base)

    @property
    def newest(self) -> Version | None:
        """The newest published version."""
        return max(self.versions, default=None)

    @property
    def last_epoch(self) -> int:
        """The last epoch that a publisher has claimed."""
        names = (name for name in self.storage.list_files() if name.startswith("epochs/"))
        return max((int(name[7:12]) for name in names if name.endswith(".json")), default=0)

    # Publishers

    def start_publish(self, content: int, number: int) -> None:
        """Record that an attempt starts."""
        self.check()
        self.attempts[content] = number

    def acknowledge(self, content: int, epoch_before: int) -> None:
        """Require that a successful attempt is published, by the last publisher then. Raises HistoryError."""
        self.check()
        published = [version for version, each in self.versions.items() if each.content == content]
        if not published:
            raise HistoryError(f"attempt {content} succeeded, but is not published")
        if published[0].epoch < epoch_before:
            raise HistoryError(f"attempt {content} succeeded in an epoch that had ended before")
        self._acknowledged.add(content)

    def check_resume(self, content: int, found: int | None) -> None:
        """Require that a publisher found the version that has its weights. Raises HistoryError."""
        self.check()
        all_made = [version for version, each in self.versions.items() if each.content == content]
        made = [version.number for version in all_made if version not in self.removed]
        if found is not None and found not in [version.number for version in all_made]:
            raise HistoryError(f"a publisher with the weights of attempt {content} found version {found}")
        if found is None and made and self.is_quiet():
            raise HistoryError(f"a publisher did not find version {made[0]}, which has its weights")

    # Receivers

    def activate(self, receiver: str, call: object, version: Version, engine: Engine, rank: int, size: int) -> None:
        """Require that a worker has one published version bit for bit, not an older one. Raises HistoryError."""
        self.check()
        published = self.versions.get(version)
        if published is None:
            raise HistoryError(f"{receiver} activated version {version}, which is not published")
        wrong = engine.find_difference(published.content, rank, size)
        if wrong:
            raise HistoryError(f"{receiver} activated version {version} with other elements in {wrong}")
        if self._calls.setdefault((receiver, call), version) != version:
            raise HistoryError(f"the workers of {receiver} activated different versions")
        last = self._activated.get(receiver)
        if last is not None and version < last and not self.versions[last].is_damaged:
            raise HistoryError(f"{receiver} activated version {version} after {last}")
        self._activated[receiver] = version

    # Faults

    def flip(self) -> str:
        """Flip a bit of a version's file, and return its name."""
        files = (name for name in self.storage.list_files() if "/." not in name)  # not those that have no name yet
        names = sorted(name for name in files if Version.from_folder(name.partition("/")[0]))
        if not names:
            return ""
        random = self.scheduler.random
        name = random.choice(names)
        self.storage.flip_bit(name, random)
        version = Version.from_folder(name.partition("/")[0])
        if version in self.versions:
            self.versions[version].is_damaged = True
        return name

    def lose_power(self) -> None:
        """Look again after a power failure: what a publisher was told is still there. Raises HistoryError."""
        files = self.storage.list_files()
        self.versions = {
            version: each
            for version, each in self.versions.items()
            if f"{version.folder}{_MARK}" in files or version in self.removed
        }
        lost = self._acknowledged - {each.content for each in self.versions.values()}
        if lost:
            raise HistoryError(f"a power failure took the published attempts {sorted(lost)}")
        if self.versions and STREAM not in files:
            raise HistoryError(f"a power failure took {STREAM}")
        self._activated.clear()
        self._seen, self._marks = -1, None


def require_typed(error: BaseException) -> None:
    """Require an error that a caller can catch. Raises HistoryError."""
    if not isinstance(error, ShardckptError):
        raise HistoryError(f"an operation raised {type(error).__name__}: {error}") from error
