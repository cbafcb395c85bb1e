"""Auditor of a history: models the run, and checks invariants after every event."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any

from shardckpt.checkpoint.load.load import load
from shardckpt.errors import ShardckptError
from shardckpt.native.commit import COMMIT, Commit, decode_commit
from shardckpt.native.records import resolve_base
from shardckpt.native.run_record import read_run_record
from shardckpt.native.step_copies import ROOT, Durability
from shardckpt.storage.resolve_url import open_store
from tests.simulation.scheduler import HistoryError, Scheduler
from tests.simulation.stores.disk import ChangeCount
from tests.simulation.stores.run_storage import RunStorage
from tests.simulation.tier_claims import Claims, TierClaim
from tests.simulation.trained_state import find_start, read_content

_STEP = re.compile(r"step-(\d+)")
_MARK = f"/{COMMIT}"
_UNREADABLE = 0  # attempt of a step that a flipped bit makes unreadable


@dataclass
class CommittedStep:
    """A committed step."""

    number: int
    content: int  # its attempt
    branch: int
    mark: object  # identity of its `COMMIT`
    files: dict[str, object]  # identities of the files that it needs, in bases too
    is_acknowledged: bool = False  # a rank knows that it is committed
    is_damaged: bool = False  # a bit was flipped in a file that it needs

    @property
    def folder(self) -> str:
        """Name of its folder."""
        return f"step-{self.number:08d}"

    @property
    def order(self) -> tuple[int, int]:
        """Position among the run's steps."""
        return self.branch, self.number


@dataclass
class RestoreCounts:
    """Restores since the last completed step, by jobs that count them in the root."""

    most_failed: int = 0  # failures after a restore before the step is skipped; 0 counts nothing
    _started: int = 0
    _ended: dict[int, int] = field(default_factory=dict)

    def start(self) -> None:
        """Record that a restore starts, from any step."""
        self._started += 1

    def end(self, content: int) -> bool:
        """Record that an attempt was restored; return True if it had to be skipped."""
        self._ended[content] = self._ended.get(content, 0) + 1
        return self._ended[content] > self.most_failed

    def may_pass_over(self) -> bool:
        """Return True if the run may have failed often enough after a step."""
        return self._started > self.most_failed > 0

    def complete(self, recorded: Iterable[int]) -> None:
        """Record that a step was completed."""
        self._ended.clear()
        self._started = max(recorded, default=0)


@dataclass
class ReplacedFiles:
    """Files that were removed while their folder's step was another save."""

    _before: Set[str] = frozenset()
    _removed: set[str] = field(default_factory=set)
    # A request for the `COMMIT` that names removed files may still succeed after their step was removed.
    _late: set[str] = field(default_factory=set)

    def follow(self, files: Mapping[str, object], steps: Mapping[str, CommittedStep]) -> None:
        """Record removed files. `steps` are the steps before the removal."""
        for name in self._before - files.keys():
            step = steps.get(name.rpartition("/")[0])
            if step is not None and name not in step.files:
                self._removed.add(name)
        self._before = files.keys()

    def note_late_commit(self, folder: str, needed: Iterable[str], files: Mapping[str, object]) -> bool:
        """Record the folder of a `COMMIT` that lacks only such files; return True if it does."""
        missing = {name for name in needed if name not in files}
        is_late = bool(missing) and missing <= self._removed
        self._late |= {folder} if is_late else set()
        return is_late

    @property
    def folders(self) -> Set[str]:
        """Folders in which a killed job may have left such a `COMMIT`."""
        return self._late


@dataclass
class Auditor:
    """Auditor of one run."""

    scheduler: Scheduler
    storage: RunStorage
    keep: int  # newest steps that no actor removes
    claims: Claims
    changes: ChangeCount  # changes in the storage and in what the claims rest on
    attempts: dict[int, int] = field(default_factory=dict)  # attempt to step number
    steps: dict[str, CommittedStep] = field(default_factory=dict)  # committed steps by folder name
    ever: set[int] = field(default_factory=set)  # attempts ever committed
    has_captures: bool = False  # attempts may be in memory and not in the root
    is_quiet: Callable[[], bool] = bool  # no fault has shown, and jobs do not overlap
    is_alone: bool = True  # jobs run one after another
    # Several jobs run at once on a store that keeps the later of two saves.
    is_replaced_by_rivals: bool = False
    restores: RestoreCounts = field(default_factory=RestoreCounts)
    _acknowledged: dict[int, None] = field(default_factory=dict)
    _overwrites: set[int] = field(default_factory=set)
    _verdicts: dict[tuple[str, int], tuple[str, object]] = field(default_factory=dict)
    _checked: int = -1
    _version: int = -1
    _flipped: list[object] = field(default_factory=list)
    _emptied: set[str] = field(default_factory=set)
    _replaced: ReplacedFiles = field(default_factory=ReplacedFiles)
    _unreadable: set[int] = field(default_factory=set)
    _in_root: dict[tuple[str, int], set[int]] = field(default_factory=dict)
    _flips_before: dict[int, int] = field(default_factory=dict)

    # Reports of actors

    def start_job(self, start: int) -> None:
        """Record that the job starts: it must find earlier damage."""
        self._flips_before[start] = len(self._flipped)

    def end_restore(self, content: int) -> None:
        """Record a counted restore. Raises HistoryError if the attempt had to be skipped."""
        is_too_often = self.restores.end(content)
        others = [step for step in self.steps.values() if step.content != content and step.is_acknowledged]
        if self.is_quiet() and others and is_too_often:
            raise HistoryError(f"attempt {content} is restored again, although the run failed after it")

    def complete_step(self) -> None:
        """Record that a job that counts restores has completed a step."""
        newest = self.newest()
        recorded = read_failures(self.scheduler, self.storage)
        self.restores.complete(n for order, n in recorded.items() if newest is None or order >= newest.order)

    def start_save(self, content: int, number: int, *, is_overwrite: bool = False) -> None:
        """Record an attempt to save."""
        self.attempts[content] = number
        self._overwrites |= {content} if is_overwrite else set()

    def acknowledge(self, content: int) -> None:
        """Record that a rank knows that an attempt is committed."""
        self._acknowledged[content] = None
        self.check()
        if not self._was_committed(content):
            raise HistoryError(f"a save reports success, but attempt {content} was never committed")
        for step in self.steps.values():
            step.is_acknowledged |= step.content == content

    def _was_committed(self, content: int) -> bool:
        """Return True if an attempt was committed, or a flipped bit may hide it."""
        damaged = {step.number for step in self.steps.values() if step.is_damaged} | self._unreadable
        return content in self.ever or self.attempts[content] in damaged

    def start_claim(self, call: tuple[str, int], number: int, nodes: Collection[str], node: str | None) -> None:
        """Record that a rank asks what a step survives: see `Claims.start`."""
        _note_root(self, call, number)
        self.claims.start(call, number, nodes, node)

    def claim(self, call: tuple[str, int], content: int, durability: Durability, nodes: Collection[str]) -> None:
        """Record what a step survives, as a Checkpointer answered."""
        number = self.attempts[content]
        _note_root(self, call, number)
        for copy in durability.copies:
            if copy.tier != ROOT:
                self.claims.check(call, content, copy, nodes)
            elif not self._in_root[call] & {content, _UNREADABLE}:
                raise HistoryError(f"attempt {content} of step {number} is claimed in the root, which does not have it")

    def newest(self) -> CommittedStep | None:
        """Return the newest step that a restore has to find."""
        known = [step for step in self.steps.values() if step.is_acknowledged and not step.is_damaged]
        return max(known, key=lambda step: step.order, default=None)

    def accept(
        self,
        call: tuple[str, int],
        number: int | None,
        state: Mapping[str, Any],
        least: CommittedStep | None,
        claim: TierClaim | None = None,
        nodes: Collection[str] = (),
    ) -> int:
        """Check a restore's result; return the attempt, 0 for a new run."""
        content = 0 if number is None else read_content(state)
        self.agree(call, (number, content))
        if self.restores.may_pass_over():
            least = claim = None
        still = least is not None and any(step is least for step in self.steps.values()) and not least.is_damaged
        if number is None:
            if least is not None and still:
                raise HistoryError(f"a restore found nothing, but step {least.number} is complete")
            self._require_claimed(claim, nodes, 0)
            return 0
        is_known = content in self.ever or self.has_captures
        if not is_known or self.attempts.get(content) != number:
            raise HistoryError(f"a restore of step {number} got attempt {content}, which was never that step")
        self._require_claimed(claim, nodes, content)
        is_known_order = content in self.ever and number != (least and least.number)
        if still and least is not None and not is_known_order and not self.claims.has_rivals:
            self._require_later(content, least.content, f"step {least.number} of the root")
        got = next((step.order for step in self.steps.values() if step.content == content), None)
        if least is not None and still and got is not None and got < least.order:
            raise HistoryError(f"a restore got step {number}, but step {least.number} is newer and complete")
        return content

    def _require_claimed(self, claim: TierClaim | None, nodes: Collection[str], content: int) -> None:
        if claim is not None and self.claims.holds(claim, nodes):
            self._require_later(content, claim.content, "a capture that was claimed to survive")

    def _require_later(self, content: int, than: int, what: str) -> None:
        """Require an attempt that is the other one or started later. Raises HistoryError."""
        order = {each: at for at, each in enumerate(self.attempts)}
        if order.get(content, -1) < order[than]:
            raise HistoryError(f"a restore got attempt {content}, but {than} is newer: {what}")

    def agree(self, call: tuple[str, int], verdict: object) -> None:
        """Check that ranks that succeed in a collective call agree. Raises HistoryError."""
        who = self.scheduler.current.name if self.scheduler.current is not None else ""
        first, known = self._verdicts.setdefault(call, (who, verdict))
        if known != verdict:
            raise HistoryError(f"{first} got {known}, but {who} got {verdict}")

    # Invariants

    def check(self) -> None:
        """Compare the storage and the nodes' disks with the model if they changed. Raises HistoryError."""
        if self.changes.number == self._checked:
            return
        self._checked = self.changes.number
        self.claims.follow(self.attempts)
        if self.storage.version == self._version:
            return
        self._version = self.storage.version
        files = self.storage.list_files()
        self._replaced.follow(files, self.steps)
        for folder, step in list(self.steps.items()):
            self._check_step(folder, step, files)
        marks = {name.rpartition("/")[0]: each for name, each in files.items() if name.endswith(_MARK)}
        for folder, mark in marks.items():
            if _STEP.fullmatch(folder) and (folder not in self.steps or self.steps[folder].mark != mark):
                self._add_step(folder, mark, files)

    def _check_step(self, folder: str, step: CommittedStep, files: Mapping[str, object]) -> None:
        mark = files.get(f"{folder}/{COMMIT}")
        if mark is None:
            del self.steps[folder]
            self._require_removable(step)
            return
        if step.is_damaged or mark != step.mark:
            return
        gone = [name for name, each in step.files.items() if files.get(name) != each]
        if gone:
            raise HistoryError(f"step {step.number} needs {gone[0]}, which is removed or changed")

    def _require_removable(self, step: CommittedStep) -> None:
        newer = [each for each in self.steps.values() if each.order > step.order]
        if step.is_acknowledged and not step.is_damaged and len(newer) < self.keep:
            raise HistoryError(f"step {step.number} is removed, but is among the newest {self.keep}")

    def _add_step(self, folder: str, mark: object, files: Mapping[str, object]) -> None:
        url = f"{self.storage.root}/{folder}"
        old = self.steps.get(folder)
        number, commit = int(folder.removeprefix("step-")), None
        try:
            commit = decode_commit(self.storage.read(f"{folder}/{COMMIT}"))
            content = read_content(self.scheduler.observe(lambda: load(url)))
        except ShardckptError as error:
            needed = [] if commit is None else _list_needed(url, commit)
            if old is None and self._replaced.note_late_commit(folder, needed, files):
                return  # the save has to notice it: no rank may report success
            is_emptied = any(name in self._emptied and name not in files for name in needed)
            is_flipped = any(each in self._flipped for each in files.values()) and not _has_read_damage(self, number)
            if not (is_emptied or is_flipped):
                raise HistoryError(f"{folder} is committed, but cannot be loaded: {error}") from error
            branch = 0 if commit is None else commit.branch  # retention cannot know of the bit
            self.steps[folder] = CommittedStep(number, _UNREADABLE, branch, mark, {}, is_damaged=True)
            self._unreadable.add(number)  # it may be overwritten before a rank reports its save
            return
        if self.attempts.get(content) != number:
            raise HistoryError(f"{folder} has attempt {content}, which was not a save of this step")
        is_good = old is not None and old.is_acknowledged and not old.is_damaged
        if old is not None and is_good and old.content != content and not _may_replace(self, old, content):
            raise HistoryError(f"attempt {content} replaced step {number} of attempt {old.content}")
        found = {name: files[name] for name in _list_needed(url, commit)}
        self.ever.add(content)
        self.steps[folder] = CommittedStep(
            number, content, commit.branch, mark, found, is_acknowledged=is_good or content in self._acknowledged
        )

    # Faults

    def flip(self) -> str:
        """Damage a file of a committed step, often the newest; return its name, empty without a step."""
        newest = max(self.steps.values(), key=lambda step: step.order, default=None)
        if newest is None or not newest.files:
            return ""
        some = self.scheduler.random.choice(([newest], [*self.steps.values()]))
        name = self.scheduler.random.choice(sorted({name for step in some for name in step.files}))
        self.storage.flip_bit(name, self.scheduler.random)
        self._version = self.storage.version
        flipped = self.storage.list_files()[name]
        self._flipped.append(flipped)
        for step in self.steps.values():
            step.is_damaged |= name in step.files
            step.mark = flipped if name == f"{step.folder}/{COMMIT}" else step.mark
        return name

    def empty_root(self, *, has_hidden: bool) -> None:
        """Remove all steps of the root."""
        self.check()
        files = self.storage.list_files()
        gone = {name for name in files if not (has_hidden and name.startswith("."))}
        self.storage.remove({name.partition("/")[0] for name in gone})
        self._version = self.storage.version
        self._emptied |= gone
        self.steps.clear()
        self.claims.empty_root()

    def lose_power(self) -> None:
        """Compare the model with what a power failure left."""
        self._version = self.storage.version
        files = self.storage.list_files()
        before, self.steps = self.steps, {}
        for name, mark in files.items():
            folder = name.rpartition("/")[0]
            if not (name.endswith(f"/{COMMIT}") and _STEP.fullmatch(folder)):
                continue
            old = before.get(folder)
            if old is not None and old.is_damaged:
                self.steps[folder] = old
                continue
            self._add_step(folder, mark, files)
        for folder, old in before.items():
            if old.is_acknowledged and not old.is_damaged:
                _require_survived(self, old, self.steps.get(folder))


def _note_root(auditor: Auditor, call: tuple[str, int], number: int) -> None:
    """Record which attempt is in the root while a call asks: another job may replace it meanwhile."""
    auditor.check()
    found = [step.content for step in auditor.steps.values() if step.number == number]
    auditor._in_root.setdefault(call, set()).update(found)


def read_failures(scheduler: Scheduler, storage: RunStorage) -> dict[tuple[int, int], int]:
    """Return the failures after restores that the root records, by step order."""
    try:
        record = scheduler.observe(lambda: read_run_record(open_store(storage.root)))
    except ShardckptError:  # it counts as nothing
        return {}
    return dict(record.count_failures())


def _list_needed(url: str, commit: Commit) -> list[str]:
    """Return the files that a step needs, in its own folder and in its bases."""
    folders = {url: (*commit.files, commit.manifest)}
    folders |= {resolve_base(url, base): tuple(held) for base, held in commit.bases.items()}
    return [f"{folder.rpartition('/')[2]}/{name}" for folder, names in folders.items() for name in names]


def require_tidy(auditor: Auditor) -> None:
    """Require that every file in the run's folders is needed by a step. Raises HistoryError."""
    auditor.check()
    needed = {name for step in auditor.steps.values() for name in (*step.files, f"{step.folder}/{COMMIT}")}
    files = auditor.storage.list_files()
    damaged = {step.folder for step in auditor.steps.values() if step.is_damaged}
    damaged |= {name.partition("/")[0] for name, each in files.items() if each in auditor._flipped}
    damaged |= auditor._replaced.folders
    unneeded = [name for name in files if name not in needed]
    left = [name for name in unneeded if "/" in name and name.partition("/")[0] not in damaged]
    if left:
        raise HistoryError(f"no step needs {left[0]}, which stays ({len(left)} in all)")


def _require_survived(auditor: Auditor, old: CommittedStep, new: CommittedStep | None) -> None:
    """Require that an acknowledged step, or a later save, survived a power failure. Raises HistoryError."""
    if new is None:
        raise HistoryError(f"step {old.number} was saved, but a power failure lost it")
    if old.content in auditor._acknowledged and not new.is_damaged:
        auditor._require_later(new.content, old.content, "a step that a power failure had to leave")


def _has_read_damage(auditor: Auditor, number: int) -> bool:
    """Return True if the newest attempt comes from a job that started after the last flipped bit."""
    content = next(each for each in reversed(auditor.attempts) if auditor.attempts[each] == number)
    return auditor.is_alone and auditor._flips_before[find_start(content)] == len(auditor._flipped)


def _may_replace(auditor: Auditor, old: CommittedStep, content: int) -> bool:
    """Return True if an attempt may replace a good step: an overwrite, or the run failed after its restore."""
    if content in auditor._overwrites or auditor.is_replaced_by_rivals:
        return True
    return read_failures(auditor.scheduler, auditor.storage).get(old.order, 0) >= auditor.restores.most_failed > 0
