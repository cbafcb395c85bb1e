"""A run's witness: which steps are recorded or compared, and what the ranks agree on."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch

from shardckpt.checkpoint.run.step_finder import StepFinder, require_step_number
from shardckpt.checkpoint.run.step_restore import RestoredStep
from shardckpt.checkpoint.run.step_saver import SavedPlace
from shardckpt.divergence import Divergence
from shardckpt.encodings.typed_json import dump, load
from shardckpt.errors import CheckpointError, ResumeDivergence, StorageError, UsageError
from shardckpt.events import OnEvent
from shardckpt.events.warn_user import warn_user
from shardckpt.native.commit import find_save
from shardckpt.native.run_directory import step_name
from shardckpt.ranks.linked_group import LinkedGroup
from shardckpt.ranks.process_group import get_ranks
from shardckpt.witness.digests import SampleDigests, digest_batch, digest_random_states
from shardckpt.witness.environment import describe_environment
from shardckpt.witness.files.record_file import decode_record, encode_record, read_record, write_record
from shardckpt.witness.rank_message import MergedStep, RankStep, encode_rank_step, merge_rank_steps, read_float
from shardckpt.witness.records.step_records import BatchDigests, Observation, StateDigests, WitnessRecord
from shardckpt.witness.records.verdict import find_divergence, relative_difference
from shardckpt.witness.resume_log import ResumeLog
from shardckpt.witness.state_digests import FirstUse, StateOnRank, StateReader
from shardckpt.witness.trained_objects import TrainedObjects, find_trained_objects
from shardckpt.witness.witness import Witness

_LOG = logging.getLogger("shardckpt")


@dataclass(frozen=True)
class _Start:
    """This rank's state at a save or a restore: where the next step starts."""

    number: int  # number of the step
    objects: TrainedObjects  # objects of the state that training changes
    reader: StateReader  # reader of their digests
    before: StateOnRank  # digests at the save or after the restore
    last_batch: SampleDigests | None = None  # digests of the batch of the step; None if unknown


class NoWitness:
    """Session for a run without a witness, which does nothing."""

    def add_step(self, step: int, loss: Any, grad_norm: Any, batch: Any) -> None:
        """Do nothing."""

    def start_record(self, number: int, state: Any, places: Sequence[SavedPlace]) -> None:
        """Do nothing."""

    def start_comparison(self, restored: RestoredStep, state: Any) -> None:
        """Do nothing."""

    def write_finished(self) -> None:
        """Do nothing."""


class WitnessSession(NoWitness):
    """Records and compares one run's steps, on one rank."""

    def __init__(self, options: Witness, finder: StepFinder, on_event: OnEvent | None) -> None:
        self._options, self._finder = options, finder
        self._records = _Records(finder, ResumeLog(finder, on_event))
        self._start: _Start | None = None
        self._fault: Exception | None = None
        self._due: dict[int, set[int]] = {}  # number of a step to the saved steps that it is behind
        self._random: dict[str, int] = {}
        self._is_new = True
        self._first_batch: SampleDigests | None = None
        self._last: tuple[int, Any] = (-1, None)
        self._first_use: FirstUse | None = None

    def add_step(self, step: int, loss: Any, grad_norm: Any, batch: Any) -> None:
        """Record or compare a step, if it is due; otherwise remember its batch. Collective if it is due."""
        number = require_step_number(step)
        if self._is_new:
            self._is_new = False
            self._first_batch = None if batch is None else digest_batch(batch)
        self._last = (number, batch)
        self.write_finished()
        if not self._due:
            return
        if number in self._due:
            self._exchange(number, loss, grad_norm, batch)
        elif number > max(self._due):
            self._due.clear()
        if not self._due:
            self._start = None  # releases the state

    def start_record(self, number: int, state: Any, places: Sequence[SavedPlace]) -> None:
        """Record the steps after a save."""
        last_step, batch = self._last
        last = digest_batch(batch) if last_step == number and batch is not None else None
        self._open_record(number, state, last)
        for step in range(number + 1, number + self._options.steps + 1):
            self._due.setdefault(step, set()).add(number)
        own = places if self._coordinator.rank == 0 else [place for place in places if place.has_own_record]
        if own:
            self._records.open(number, self._options.steps, own)

    def start_comparison(self, restored: RestoredStep, state: Any) -> None:
        """Compare the steps after a restored step with its record, if it has one. Collective."""
        self._is_new, self._first_batch = False, None
        self._due.clear()
        self._records.forget()
        ranks, found = self._coordinator.size, self._find_record(restored)
        steps = self._finder.ask_rank0("reading the witness", lambda: self._records.start(restored, found, ranks))
        if steps:
            self._open_record(restored.number, state, None)
            self._due.update({step: {restored.number} for step in steps})
            if self._start is not None and self._options.deep:
                self._first_use = FirstUse(self._start.objects, partial(self._start.reader.digest, is_deep=True))

    def _find_record(self, restored: RestoredStep) -> WitnessRecord | None:
        """Return a restored step's record on rank 0, from its own or another node. Collective."""
        rank, is_capture = self._coordinator.rank, restored.finder.root != self._finder.root
        record = self._records.read(restored) if rank == 0 or is_capture else None
        if not is_capture:
            return record

        def choose(messages: list[bytes]) -> list[bytes]:
            first = next((number for number, message in enumerate(messages) if message), 0)
            return [b"1" if number == first else b"" for number in range(len(messages))]

        is_sender = self._coordinator.ask_rank0("looking for the witness", b"1" if record else b"", choose)
        found = record

        def receive(messages: list[bytes]) -> list[bytes]:
            nonlocal found
            if found is None:
                data = next(filter(None, messages), b"")
                found = decode_record(data, where=restored.path) if data else None
            return [b""] * len(messages)

        own = encode_record(record) if record is not None and is_sender and rank > 0 else b""
        self._coordinator.ask_rank0("sending the witness", own, receive)
        return found

    def write_finished(self) -> None:
        """Write the records that waited until their saves ended."""
        if self._records.is_waiting:
            self._records.write_finished()

    @property
    def _coordinator(self) -> LinkedGroup:
        return get_ranks(self._finder.group)

    def _open_record(self, number: int, state: Any, last_batch: SampleDigests | None) -> None:
        try:
            self._end_first_use()
            objects = find_trained_objects(state)
            reader = StateReader(objects, self._coordinator.rank, self._coordinator.size)
            before = reader.digest(is_deep=self._options.deep > 0)
            self._start, self._fault = _Start(number, objects, reader, before, last_batch), None
        except Exception as error:  # noqa: BLE001  (sent to every rank with the next step)
            self._fault = error
        self._random = digest_random_states(self._generators)

    @property
    def _generators(self) -> Mapping[str, torch.Generator]:
        return {} if self._start is None else self._start.objects.generators

    def _end_first_use(self) -> StateDigests | None:
        """Stop waiting for a restored optimizer's first step; return its digests."""
        ended, self._first_use = self._first_use, None
        return None if ended is None else ended.end()

    def _exchange(self, number: int, loss: Any, grad_norm: Any, batch: Any) -> None:
        """Send this rank's step to rank 0, and act on its verdict."""
        message: bytes | Exception
        try:
            if self._fault is not None:
                raise self._fault
            is_deep = any(self._options.is_deep(number - saved) for saved in self._due[number])
            observed = encode_rank_step(self._observe(number, loss, grad_norm, batch, is_deep=is_deep))
            message = (_WANTS_RECORDS if self._has_own_records else b"") + observed
        except Exception as error:  # noqa: BLE001  (sent to every rank, then raised)
            message = error

        def decide(messages: list[bytes]) -> list[bytes]:
            found = self._records.add(merge_rank_steps([each.removeprefix(_WANTS_RECORDS) for each in messages]))
            answers = {False: dump(_StepAnswer(found)) if found else b""}
            if any(each.startswith(_WANTS_RECORDS) for each in messages):
                answers[True] = dump(_StepAnswer(found, self._records.encode_newest(number)))
            return [answers[each.startswith(_WANTS_RECORDS)] for each in messages]

        del self._due[number]
        answer = self._coordinator.ask_rank0(f"the witness of step {number}", message, decide)
        if answer:
            finding, records = load(_StepAnswer, answer, where="rank 0's answer")
            self._records.take(records)
            if finding is not None:
                self._act_on(finding)

    @property
    def _has_own_records(self) -> bool:
        """Whether this rank, which is not rank 0, keeps copies of records on its node."""
        return self._coordinator.rank > 0 and self._records.is_open

    def _act_on(self, finding: _Finding) -> None:
        error = ResumeDivergence(finding.divergence, finding.where)
        if self._options.on_divergence == "raise" and not finding.is_noise:
            self._due = {step: rest for step, saved in self._due.items() if (rest := saved - {finding.number})}
            self._start = self._start if self._due else None
            raise error
        if self._coordinator.rank == 0:
            warn_user(str(error))

    def _observe(self, number: int, loss: Any, grad_norm: Any, batch: Any, *, is_deep: bool) -> RankStep:
        start = self._start
        assert start is not None, "a step is due after a save or a restore"
        ranks, is_first = self._coordinator, number == start.number + 1
        after = start.reader.digest(is_deep=is_deep)
        random, self._random = self._random, digest_random_states(start.objects.generators)
        return RankStep(
            number,
            describe_environment(ranks.size, start.objects, start.before, deterministic=self._options.deterministic),
            read_float("loss", loss),
            read_float("grad_norm", grad_norm),
            None if batch is None else digest_batch(batch),
            self._first_batch if is_first else None,
            start.last_batch if is_first else None,
            random,
            self._random,
            start.before.digests if is_first else None,
            after.digests,
            self._end_first_use(),
        )


def open_session(options: Witness | None, finder: StepFinder, on_event: OnEvent | None) -> NoWitness:
    """Return a run's session."""
    if options is None:
        return NoWitness()
    if not isinstance(options, Witness):
        raise UsageError("`witness` must be a Witness", found=repr(options), expected="shardckpt.Witness(steps=2)")
    return WitnessSession(options, finder, on_event)


@dataclass
class _OpenRecord:
    """A record that is being written."""

    steps: int
    places: Sequence[SavedPlace]  # places of the saved step
    record: WitnessRecord | None = None  # steps so far; None before the first
    behind: list[SavedPlace] = field(default_factory=list)  # places that lack the newest of these steps


@dataclass(frozen=True)
class _Finding:
    """A divergence on its way to all ranks."""

    divergence: Divergence  # the first difference
    number: int  # number of the restored step
    where: str  # path or URL of the restored step
    is_noise: bool  # whether the run says that it is not deterministic, and only results differ


class _StepAnswer(NamedTuple):
    """Rank 0's answer to a step."""

    finding: _Finding | None
    records: Sequence[tuple[int, str]] = ()  # records to write, by the number of their saved step


_WANTS_RECORDS = b"+"  # prefix of the message of a rank that keeps copies of records on its node


_UNKNOWN = "0" * 15  # id of a save that each place has its own of


class _Records:
    """A run's records to write, and on rank 0 the one to compare."""

    # Rank 0 writes the records in all places that it sees. Where each node has its own place, one rank each on a few
    # other nodes writes there the records that rank 0 sends.

    def __init__(self, finder: StepFinder, log: ResumeLog) -> None:
        self._finder, self._log = finder, log
        self._open: dict[int, _OpenRecord] = {}
        self._compared: WitnessRecord | None = None
        self._restored: RestoredStep | None = None
        self._first_batch: BatchDigests | None = None
        self._noise: float | None = None

    @property
    def is_waiting(self) -> bool:
        """Whether a record waits until its save ends."""
        return any(each.behind for each in self._open.values())

    @property
    def is_open(self) -> bool:
        """Whether a record is being written."""
        return bool(self._open)

    def open(self, number: int, steps: int, places: Sequence[SavedPlace]) -> None:
        """Start a save's record."""
        self.write_finished()
        self._open = {at: each for at, each in self._open.items() if each.behind or at + each.steps > number}
        self._open[number] = _OpenRecord(steps, places)

    def forget(self) -> None:
        """Write no more into open records: the run continues from another step."""
        self._open.clear()

    def read(self, restored: RestoredStep) -> WitnessRecord | None:
        """Return a restored step's record in the place that it was in, as this rank sees it."""
        try:
            record = read_record(restored.finder.open_store(), restored.name)
        except (CheckpointError, StorageError) as error:
            warn_user(f"the resume is not compared, since its record cannot be read: {error}")
            return None
        return record if record is not None and record.save == restored.save else None

    def start(self, restored: RestoredStep, record: WitnessRecord | None, ranks: int) -> list[int]:
        """Start to compare a resume with a record; return its step numbers."""
        self._compared, self._restored = None, restored
        if record is None:
            _LOG.info("step %d has no witness record: the resume is not compared", restored.number)
            return []
        self._compared, self._first_batch, self._noise = record, record.first_batch, record.noise
        self._log.start(restored, record, ranks)
        return [step.step for step in record.steps]

    def add(self, merged: MergedStep) -> _Finding | None:
        """Compare a step with its record, add it to the open records, and return the divergence."""
        found = self._compare(merged)
        self._append(merged)
        self.write_finished()
        return found

    def _compare(self, merged: MergedStep) -> _Finding | None:
        record = self._compared
        recorded = None if record is None else record.find(merged.record.step)
        if record is None or recorded is None:
            return None
        divergence = find_divergence(record, Observation(merged.environment, merged.record))
        self._log.add_step(merged.environment, divergence)
        is_exact = record.environment.is_deterministic and merged.environment.is_deterministic
        if divergence is not None:
            assert self._restored is not None, "it was compared"
            is_noise = divergence.cause == "loss" and not is_exact
            where = self._restored.finder.path(self._restored.name)
            return _Finding(divergence, record.number, where, is_noise=is_noise)
        if not is_exact and record.environment.has_equal_layout(merged.environment):
            self._learn_noise(record, merged, recorded.loss)
        if merged.record.step == record.steps[-1].step:
            self._compared = None
        return None

    def _learn_noise(self, record: WitnessRecord, merged: MergedStep, loss: tuple[int, ...]) -> None:
        """Keep the difference between two runs of a step, and store it with the record."""
        seen = relative_difference(loss, merged.record.loss) if loss and merged.record.loss else 0.0
        if self._noise is None or seen > self._noise:
            self._noise = seen
            self._compared = replace(record, noise=seen)
            assert self._restored is not None, "it was compared"
            self._write(self._restored.finder, self._restored.name, self._compared)

    def _append(self, merged: MergedStep) -> None:
        step = merged.record
        for number, each in self._open.items():
            if not number < step.step <= number + each.steps:
                continue
            record = each.record
            if record is None:
                first, last = merged.first_batch or self._first_batch, merged.last_batch
                first, last = (None if batch is None else batch.join_ranks() for batch in (first, last))
                record = WitnessRecord("", number, merged.environment, (), first, last, self._noise)
            kept = replace(step, before=step.before if step.step == number + 1 else None, used=None)
            each.record, each.behind = replace(record, steps=(*record.steps, kept)), [*each.places]

    def encode_newest(self, step: int) -> list[tuple[int, str]]:
        """Return the records whose newest step is this one, by the number of their saved step."""
        newest = {at: each.record for at, each in self._open.items() if each.record and each.record.find(step)}
        return [(at, encode_record(replace(record, save=_UNKNOWN)).decode("ascii")) for at, record in newest.items()]

    def take(self, records: Sequence[tuple[int, str]]) -> None:
        """Take records that rank 0 sent, and write them."""
        for number, data in records:
            each = self._open.get(number)
            if each is not None:
                each.record = decode_record(data.encode("ascii"), where=f"the witness of step {number}")
                each.behind = [*each.places]
        self.write_finished()

    def write_finished(self) -> None:
        """Write the records whose saves have ended."""
        for number, each in self._open.items():
            for place in [place for place in each.behind if place.is_over()]:
                each.behind.remove(place)
                self._write_to(place.finder, number, each.record)

    def _write_to(self, finder: StepFinder, number: int, record: WitnessRecord | None) -> None:
        """Write a record next to its step in one place, unless the step is not there."""
        assert record is not None, "it has a step that a place lacks"
        try:
            save = find_save(finder.open_store(), step_name(number))
        except (CheckpointError, StorageError) as error:
            warn_user(f"the witness of step {number} could not be stored: {error}")
            return
        if save is not None:
            self._write(finder, step_name(number), replace(record, save=save))

    def _write(self, finder: StepFinder, name: str, record: WitnessRecord) -> None:
        try:
            write_record(finder.open_store(), name, record)
        except StorageError as error:
            warn_user(f"the witness of {name} could not be stored: {error}")
