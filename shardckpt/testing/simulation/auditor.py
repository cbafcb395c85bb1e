"""Auditor of a history: a model of the run, and the invariants that it checks after every event."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from shardckpt.checkpoint.load.load import load
from shardckpt.errors import ShardckptError
from shardckpt.format.native.base_refs import resolve_base
from shardckpt.format.native.commit import COMMIT, decode_commit
from shardckpt.testing.simulation.scheduler import HistoryError, Scheduler
from shardckpt.testing.simulation.storage import RunStorage

_STEP = re.compile(r"step-(\d+)")


def build_state(content: int) -> dict[str, Any]:
    """Return the state that a trainer saves.

    Args:
        content: Number that identifies one attempt to save; 0 for a state to load into.
    """
    return {
        "w": torch.full((6,), float(content)),
        "slow": torch.full((3,), float(content // 4)),
        "frozen": torch.arange(5.0) if content else torch.zeros(5),
        "content": content,
    }


def read_content(state: Mapping[str, Any]) -> int:
    """Return the number of the attempt that a state comes from.

    Raises:
        HistoryError: The values are not those of one attempt.
    """
    content = int(state["content"])
    expected = build_state(content)
    if state.keys() != expected.keys():
        raise HistoryError(f"a reader got the names {sorted(state)}")
    for name, value in expected.items():
        same = torch.equal(value, state[name]) if isinstance(value, torch.Tensor) else value == state[name]
        if not same:
            raise HistoryError(f"a reader got a mix: {name} is {state[name]}, but the attempt is {content}")
    return content


@dataclass
class CommittedStep:
    """A committed step.

    Attributes:
        number: Number of the step.
        content: Attempt that it comes from.
        branch: Branch of the run.
        mark: Identity of its `COMMIT`.
        files: Identity of each file that it needs, those of bases included.
        is_acknowledged: Whether a rank knows that it is committed.
        is_damaged: Whether a bit was flipped in a file that it needs.
    """

    number: int
    content: int
    branch: int
    mark: object
    files: dict[str, object]
    is_acknowledged: bool = False
    is_damaged: bool = False

    @property
    def folder(self) -> str:
        """Name of its folder."""
        return f"step-{self.number:08d}"

    @property
    def order(self) -> tuple[int, int]:
        """Position among the steps of the run."""
        return self.branch, self.number


@dataclass
class Auditor:
    """Auditor of one run.

    Attributes:
        scheduler: Scheduler of the history.
        storage: Storage of the run.
        keep: Number of newest steps that no actor removes.
        attempts: Attempts to save so far, with the numbers of their steps.
        steps: Committed steps by the name of their folder.
        ever: Attempts that were ever committed.
    """

    scheduler: Scheduler
    storage: RunStorage
    keep: int
    attempts: dict[int, int] = field(default_factory=dict)
    steps: dict[str, CommittedStep] = field(default_factory=dict)
    ever: set[int] = field(default_factory=set)
    _acknowledged: dict[int, None] = field(default_factory=dict)
    _verdicts: dict[tuple[str, int], tuple[str, object]] = field(default_factory=dict)
    _version: int = -1
    _flipped: list[object] = field(default_factory=list)

    # Reports of actors

    def begin(self, content: int, number: int) -> None:
        """Record an attempt to save."""
        self.attempts[content] = number

    def acknowledge(self, content: int) -> None:
        """Record that a rank knows that an attempt is committed.

        Raises:
            HistoryError: It is not.
        """
        self._acknowledged[content] = None
        self.check()
        if content not in self.ever:
            raise HistoryError(f"a save reports success, but attempt {content} was never committed")
        for step in self.steps.values():
            step.is_acknowledged |= step.content == content

    def newest(self) -> CommittedStep | None:
        """Return the newest step that a restore has to find."""
        known = [step for step in self.steps.values() if step.is_acknowledged and not step.is_damaged]
        return max(known, key=lambda step: step.order, default=None)

    def accept(
        self, call: tuple[str, int], number: int | None, state: Mapping[str, Any], least: CommittedStep | None
    ) -> None:
        """Check what a restore returned.

        Args:
            call: Job and number of the collective call.
            number: Step that it returned; None for a new run.
            state: State that it filled.
            least: Result of `newest` when it began.

        Raises:
            HistoryError: It violates an invariant.
        """
        content = 0 if number is None else read_content(state)
        self.agree(call, (number, content))
        still = least is not None and any(step is least for step in self.steps.values()) and not least.is_damaged
        if number is None:
            if least is not None and still:
                raise HistoryError(f"a restore found nothing, but step {least.number} is complete")
            return
        if content not in self.ever or self.attempts[content] != number:
            raise HistoryError(f"a restore of step {number} got attempt {content}, which was never that step")
        got = [step.order for step in self.steps.values() if step.content == content]
        if least is not None and still and got and got[0] < least.order:
            raise HistoryError(f"a restore got step {number}, but step {least.number} is newer and complete")

    def agree(self, call: tuple[str, int], verdict: object) -> None:
        """Check that all ranks that succeed in a collective call get the same verdict. Raises HistoryError."""
        who = self.scheduler.current.name if self.scheduler.current is not None else ""
        first, known = self._verdicts.setdefault(call, (who, verdict))
        if known != verdict:
            raise HistoryError(f"{first} got {known}, but {who} got {verdict}")

    # Invariants

    def check(self) -> None:
        """Compare the storage with the model, if it has changed. Raises HistoryError."""
        if self.storage.version == self._version:
            return
        self._version = self.storage.version
        files = self.storage.list_files()
        for folder, step in list(self.steps.items()):
            self._check_step(folder, step, files)
        marks = {name.rpartition("/")[0]: each for name, each in files.items() if name.endswith(f"/{COMMIT}")}
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
        number = int(folder.removeprefix("step-"))
        try:
            commit = decode_commit(self.storage.read(f"{folder}/{COMMIT}"))
            content = read_content(self.scheduler.observe(lambda: load(url)))
        except ShardckptError as error:
            if not any(each in self._flipped for each in files.values()):
                raise HistoryError(f"{folder} is committed, but cannot be loaded: {error}") from error
            self.steps[folder] = CommittedStep(number, 0, 0, mark, {}, is_damaged=True)
            return
        if self.attempts.get(content) != number:
            raise HistoryError(f"{folder} has attempt {content}, which was not a save of this step")
        if old is not None and old.is_acknowledged and not old.is_damaged and old.content != content:
            raise HistoryError(f"attempt {content} replaced step {number} of attempt {old.content}")
        needed = [f"{folder}/{name}" for name in (*commit.files, commit.manifest)]
        for base, held in commit.bases.items():
            needed += [f"{resolve_base(url, base).rpartition('/')[2]}/{name}" for name in held]
        found = {name: files[name] for name in needed}
        self.ever.add(content)
        self.steps[folder] = CommittedStep(
            number, content, commit.branch, mark, found, is_acknowledged=content in self._acknowledged
        )

    # Faults

    def flip(self) -> str:
        """Damage a file of a committed step, often of the newest; return its name, empty if no step is committed."""
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

    def lose_power(self) -> None:
        """Compare what a power failure left with the model.

        Raises:
            HistoryError: An acknowledged step is lost.
        """
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
            if old.is_acknowledged and not old.is_damaged and folder not in self.steps:
                raise HistoryError(f"step {old.number} was saved, but a power failure lost it")
