"""A save session, from plan to commit: each rank sends two messages.

An error on one rank is raised on all ranks.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from functools import partial
from typing import Any, NamedTuple

import torch
import xxhash

from shardckpt.boxes import Box
from shardckpt.checkpoint.base_checkpoint import BaseRemovedError
from shardckpt.checkpoint.dedup import BaseHints
from shardckpt.checkpoint.planning.cached_save import CachedSave
from shardckpt.checkpoint.planning.rank_report import build_mismatch_error
from shardckpt.checkpoint.planning.save_plan import GlobalSavePlan, RankSavePlan
from shardckpt.checkpoint.save.payload_writer import Source, iter_contents, measure_chunk, write_payloads
from shardckpt.checkpoint.save.planner import (
    EXPLAIN,
    PlannedSave,
    PlannedState,
    PlanResponse,
    SaveCache,
    SaveOptions,
    SavePlanner,
    StartedSave,
    capture_error,
)
from shardckpt.checkpoint.stateful.tensor_bytes import is_flat, sum_rows, tensor_bytes, view_as_bytes
from shardckpt.devices import CurrentStreams, Event, copy_to_pinned, has_pinned_copies, has_pinned_memory
from shardckpt.encodings.budget import gc_paused
from shardckpt.encodings.value_stats import ValueStats
from shardckpt.events import FallbackEvent, Recorder, SaveEvent, record_operation
from shardckpt.manifest import Path, dotted
from shardckpt.native.commit import COMMIT, encode_commit, manifest_name, name_model_file
from shardckpt.native.manifest_json import (
    PartialManifest,
    WrittenPayload,
    build_partial,
    decode_partial,
    encode_manifest,
    encode_partial,
    merge_partials,
)
from shardckpt.native.payload import HF_INDEX, FileLayout, PayloadFile, build_payloads, hf_index
from shardckpt.native.records import FileRecord, make_record
from shardckpt.plan.layout.box_codec import pack_message, unpack_message
from shardckpt.ranks.linked_group import LinkedGroup
from shardckpt.ranks.ordered_link import keep_first, put_first, sort_by_number
from shardckpt.ranks.wait_notice import name_ranks
from shardckpt.state.local.tensor_shards import LocalShard
from shardckpt.storage.publication import Publication
from shardckpt.storage.publish import JoinedPublication, find_missing_files, require_files
from shardckpt.torchrun import has_second_core

PINNED_BYTES = 64 << 20  # maximum of pinned memory for copies of replicated data


class Saver(SaveCache):
    """Saves for one group of ranks."""

    def save(
        self, state: Any, options: SaveOptions, refusal: Exception | None = None, recorder: Recorder | None = None
    ) -> None:
        """Save a state. Collective."""
        recorder = recorder or Recorder(SaveEvent, options.path)
        rank = recorder.values["rank"] = self.ranks.rank
        try:
            self._save(state, options, recorder, refusal)
        except BaseRemovedError as error:
            if options.trainable_only or options.hooks.staying:  # those that leave cannot plan again
                raise
            with record_operation(FallbackEvent, options.path, options.on_event, rank=rank, warnings=(str(error),)):
                self._save(state, replace(options, base=lambda: None), recorder, refusal)

    def _save(self, state: Any, options: SaveOptions, recorder: Recorder, refusal: Exception | None) -> None:
        session = SaveSession(self, options, self.ranks)
        with gc_paused(), self.ranks.in_step(), session.rollback_on_error():
            with recorder.phase("capture"):
                planned, flattened = session.plan(state, refusal)
            recorder.values.update(warnings=session.warnings, has_left=session.has_left)
            if session.has_left:
                return

            def source(payload: PayloadFile) -> Iterator[memoryview]:
                return iter_contents(payload, flattened)

            with recorder.phase("write"):
                written = capture_error(lambda: session.write(planned, session.stage(planned, flattened), source))
            recorder.values["nbytes"] = 0 if isinstance(written, Exception) else written.nbytes
            with recorder.phase("publish"):
                session.commit(planned, written)


def _digest(parts: Iterable[bytes]) -> str:
    return hashlib.blake2b(b"".join(parts), digest_size=16).hexdigest()


class Replica(NamedTuple):
    """A box that several ranks have."""

    path: Path
    box: Box | None  # None for the entire array
    digest: bytes

    @property
    def name(self) -> str:
        """Name in messages."""
        return dotted(self.path) + ("" if self.box is None else str(self.box))


class ReplicatedBox(NamedTuple):
    """A box that several ranks have, before it is hashed."""

    path: Path
    shape: Sequence[int]
    shard: LocalShard

    def with_digest(self, parts: Iterable[memoryview]) -> Replica:
        """Return the box with its digest."""
        digest = xxhash.xxh3_128()
        for part in parts:
            digest.update(part)
        return Replica(self.path, None if self.shard.box.size == self.shape else self.shard.box, digest.digest())


class ReplicaDigests:
    """Digests for a rank's boxes, by replica group; boxes in the groups `summed` are reduced on their device."""

    def __init__(self, boxes: Mapping[int, Sequence[ReplicatedBox]], summed: Set[int] = frozenset()) -> None:
        reduced = {number: group for number, group in boxes.items() if number in summed}
        hashed = {number: group for number, group in boxes.items() if number not in summed}
        self._sums = [
            (number, at, _start_sum(box.shard.tensor)) for number in reduced for at, box in enumerate(reduced[number])
        ]
        self._copies = _PinnedCopies([box.shard.tensor for group in hashed.values() for box in group])
        # Boxes in CPU memory, or that exceed the 64 MiB of pinned memory, are hashed at once; the others by `finish`.
        self._boxes: dict[int, list[Replica | ReplicatedBox]] = {
            number: [box if number in summed or self._copies.has(box.shard.tensor) else _hash(box) for box in group]
            for number, group in boxes.items()
        }

    def finish(self) -> None:
        """Wait for sums and copies, and hash them."""
        for number, at, (total, event) in self._sums:
            if event is not None:
                event.synchronize()
            box = self._boxes[number][at]
            assert isinstance(box, ReplicatedBox)
            self._boxes[number][at] = box.with_digest(tensor_bytes(total))
        self._copies.wait()
        for group in self._boxes.values():
            for at, box in enumerate(group):
                if isinstance(box, ReplicatedBox):
                    group[at] = box.with_digest((self._copies.get(box.shard.tensor),))
        self._copies = _PinnedCopies(())

    def by_group(self) -> dict[int, list[Replica]]:
        """Return the digests by group number, after `finish`."""
        return {number: [box for box in group if isinstance(box, Replica)] for number, group in self._boxes.items()}


def _hash(box: ReplicatedBox) -> Replica | ReplicatedBox:
    return box.with_digest(tensor_bytes(box.shard.tensor))


def _start_sum(tensor: torch.Tensor) -> tuple[torch.Tensor, Event | None]:
    """Start to reduce a tensor where it is; return its sum on the host and the event to wait for."""
    return copy_to_pinned(sum_rows(tensor.reshape(1, -1)))


class _PinnedCopies:
    """Copies device tensors that fit, on the current streams."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._places: dict[int, tuple[int, int]] = {}
        self._events: tuple[Event, ...] = ()
        chosen, stop = [], 0
        for tensor in tensors:
            fits = has_pinned_copies(tensor.device) and stop + tensor.nbytes <= PINNED_BYTES
            if fits and id(tensor) not in self._places:
                self._places[id(tensor)] = stop, stop + tensor.nbytes
                chosen.append(tensor)
                stop += tensor.nbytes
        if chosen:
            self._copy(chosen, stop)

    def _copy(self, tensors: Sequence[torch.Tensor], nbytes: int) -> None:
        self._buffer = torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=has_pinned_memory())
        for tensor in tensors:
            start, stop = self._places[id(tensor)]
            flat = tensor if is_flat(tensor) else tensor.resolve_conj().resolve_neg().contiguous()
            self._buffer[start:stop].copy_(view_as_bytes(flat), non_blocking=True)
        self._events = CurrentStreams(tensor.device for tensor in tensors).record_events()

    def has(self, tensor: torch.Tensor) -> bool:
        """Return True if a tensor is copied."""
        return id(tensor) in self._places

    def wait(self) -> None:
        for event in self._events:
            event.synchronize()

    def get(self, tensor: torch.Tensor) -> memoryview:
        """Return a tensor's bytes, after `wait`."""
        start, stop = self._places[id(tensor)]
        return memoryview(self._buffer[start:stop].numpy())  # type: ignore[arg-type]


@dataclass(frozen=True)
class StagedSave:
    """Files that a rank will write, and digests for its replicated data."""

    files: tuple[FileLayout, ...]  # layouts of the files, without headers
    replicas: ReplicaDigests
    unchanged: tuple[int, ...]  # positions in the plan of chunks that are equal in the base
    # Statistics for unchanged chunks, by position, that the base lacks; empty if nobody needs them.
    stats: Mapping[int, ValueStats] = field(default_factory=dict)

    def replica_group_digests(self) -> dict[str, str]:
        """Return one digest per replica group, by group number."""
        groups = self.replicas.by_group()
        return {str(number): _digest(replica.digest for replica in boxes) for number, boxes in groups.items()}

    def replica_digests(self) -> dict[str, str]:
        """Return one digest per replicated box, by name."""
        return {replica.name: replica.digest.hex() for boxes in self.replicas.by_group().values() for replica in boxes}


@dataclass(frozen=True)
class WrittenSave:
    """Files that a rank has written."""

    staged: StagedSave
    payloads: Sequence[WrittenPayload]
    files: tuple[FileRecord, ...]
    block_hashes: Sequence[str]  # hashes of this rank's share of the base's blocks without stored hashes

    @property
    def nbytes(self) -> int:
        """Bytes in the payload files."""
        return sum(each.payload.nbytes for each in self.payloads)

    def outcome(self) -> tuple[dict[str, str], tuple[int, ...], Sequence[str], dict[str, str]]:
        """Return replica group digests, unchanged chunks, block hashes and statistics, for rank 0."""
        stats = {str(at): measured.pack().hex() for at, measured in self.staged.stats.items()}
        return self.staged.replica_group_digests(), self.staged.unchanged, self.block_hashes, stats


class SavePhase(Enum):
    """Where a save is on one rank."""

    STARTED = auto()
    PLANNED = auto()
    STAGED = auto()
    WRITTEN = auto()
    COMMITTED = auto()  # all ranks have succeeded; the step exists once rank 0 has written `COMMIT`
    ROLLED_BACK = auto()  # this rank's files are removed


_BEFORE_COMMIT = (SavePhase.STARTED, SavePhase.PLANNED, SavePhase.STAGED, SavePhase.WRITTEN)
# Phase before a call, the call, and the phase after it. A call that raises leaves the phase, and `rollback` follows.
TRANSITIONS: frozenset[tuple[SavePhase, str, SavePhase]] = frozenset(
    {
        (SavePhase.STARTED, "plan", SavePhase.PLANNED),
        (SavePhase.PLANNED, "stage", SavePhase.STAGED),
        (SavePhase.STAGED, "write", SavePhase.WRITTEN),
        (SavePhase.WRITTEN, "commit", SavePhase.COMMITTED),
        *((phase, "rollback", SavePhase.ROLLED_BACK) for phase in _BEFORE_COMMIT),
        # A step of a tier may fail on another node after `COMMIT`; then rank 0's files stay.
        (SavePhase.COMMITTED, "rollback", SavePhase.COMMITTED),
        # A rank that failed sends its error instead of its outcome, and raises it with all others.
        (SavePhase.STARTED, "plan", SavePhase.STARTED),
        (SavePhase.PLANNED, "stage", SavePhase.PLANNED),
        (SavePhase.STAGED, "write", SavePhase.STAGED),
        *((phase, "commit", phase) for phase in _BEFORE_COMMIT[1:]),
    }
)


class SaveSession:
    """One save on one rank: call `plan`, `stage`, `write` and `commit` in this order; see `TRANSITIONS`."""

    # `write` and `commit` may run on another thread.

    def __init__(self, saver: Saver, options: SaveOptions, last: LinkedGroup) -> None:
        # Nothing but the commit uses `last` until the save ends.
        self._saver: SaveCache = saver
        if options.hooks.staying:  # its plan fits no other save
            self._saver, last = (
                SaveCache(put_first(saver.ranks, options.hooks.staying)),
                put_first(last, options.hooks.staying),
            )
            self._saver.frozen_params = saver.frozen_params
        self._coordinator, self._options, self._last = self._saver.ranks, options, last
        self.has_left = False  # whether this rank leaves: it has planned, and has nothing more to do
        self.warnings: tuple[str, ...] = ()  # about ranks that leave
        self._publication: Publication | None = None
        self._started: StartedSave | None = None
        self._cached_save: CachedSave | None = None
        self.phase = SavePhase.STARTED

    @contextmanager
    def rollback_on_error(self) -> Iterator[None]:
        """Remove this rank's files if the context raises an exception."""
        try:
            yield
        except BaseException:
            self.rollback()
            raise

    def rollback(self) -> None:
        """Remove this rank's files."""
        publication, self._publication = self._publication, None
        if publication is not None:
            publication.rollback()
        if self.phase is not SavePhase.COMMITTED:
            self.phase = SavePhase.ROLLED_BACK

    def leave(self) -> None:
        """Remove this rank's files; the other ranks continue without it."""
        self._coordinator.leave()
        self.rollback()

    def plan(self, state: Any, refusal: Exception | None = None) -> tuple[PlannedSave, PlannedState]:
        """Flatten the state, plan with the other ranks, start the publication. Collective."""
        is_alone = self._coordinator.size == 1
        planner = SavePlanner(self._saver, self._options)
        try:
            flattened, response = planner.plan(state, refusal)
        finally:
            self._publication, self._started = planner.publication, planner.started
            self._cached_save = planner.cached_save
        rank_plan = response.rank_plan
        assert rank_plan is not None, "a planner completes the response"
        needs_base = response.hints is not None or bool(rank_plan.frozen)
        # A folder that refers to files in other folders is not a Hugging Face folder.
        model = flattened.model if is_alone and response.hints is None else None
        frozen_params = self._saver.frozen_params.copy() if needs_base else None
        self.phase = SavePhase.PLANNED
        if self._options.hooks.staying:
            self._note_leaving(response)
        return PlannedSave(response, rank_plan, model, frozen_params), flattened

    def _note_leaving(self, response: PlanResponse) -> None:
        """Let the ranks that stay commit without the others, unless the save needs all."""
        ranks, count = self._coordinator, response.committing
        if not count:
            self.warnings = (f"the save needs all ranks until its commit, also those that leave: {response.needed}",)
            return
        self.has_left = ranks.rank >= count
        staying, leaving = (name_ranks([*map(ranks.global_rank, r)]) for r in (range(count), range(count, ranks.size)))
        if self.has_left:
            self.warnings = (f"this rank leaves before the commit, which needs only {staying}",)
        else:
            self.warnings = (f"{leaving} may leave before the commit, which needs only {staying}",)
            self._last = keep_first(self._last, count)

    def stage(self, planned: PlannedSave, flattened: PlannedState) -> StagedSave:
        """Plan the files that this rank writes, and compare the state with the base."""
        if self._publication is None:
            self._publication = JoinedPublication(planned.response.place)
        rank_plan = planned.rank_plan
        unchanged: tuple[int, ...] = ()
        stats: dict[int, ValueStats] = {}
        if planned.frozen_params is not None:
            hints = planned.response.hints or BaseHints()
            arrays, key_map = flattened.arrays, self._options.base_key_map
            planned.frozen_params.compare(rank_plan.frozen, hints, arrays, flattened.ties, key_map)
            unchanged = hints.unchanged(rank_plan.chunks, arrays)
            missing = [at for at in hints.unmeasured if at in unchanged]
            stats = {at: measure_chunk(rank_plan.chunks[at], arrays) for at in missing}
        files = rank_plan.arrange_files(planned.model, unchanged)
        boxes = _find_replicas(rank_plan, flattened) if self._options.checksums else {}
        replicas = ReplicaDigests(boxes, rank_plan.summed)
        self.phase = SavePhase.STAGED
        return StagedSave(files, replicas, unchanged, stats)

    def write(
        self, planned: PlannedSave, staged: StagedSave, source: Source, *, is_background: bool = False
    ) -> WrittenSave:
        """Write this rank's files."""
        assert self._publication is not None
        options = self._options
        carry = self._started.contents.carried() if self._started is not None else None
        planned_files = build_payloads(planned.response.save, self._coordinator.rank, staged.files, carry)
        payloads = write_payloads(
            self._publication,
            planned_files,
            source,
            checksums=options.checksums,
            digests=options.store_digests,
            stats=options.stats,
            has_idle_core=not is_background and has_second_core(self._coordinator.size),
        )
        files: tuple[FileRecord, ...] = ()
        # An old index must stay as long as its files.
        if planned.model is not None and not self._publication.unique_suffix:
            index = hf_index(planned_files, planned.model)
            _write_file(self._publication, HF_INDEX, index)
            files = (make_record(HF_INDEX, index, checksums=options.checksums),)
        if self._started is not None:
            files += tuple(self._write_model_files(self._started, self._publication))
        staged.replicas.finish()
        hints = planned.response.hints
        hashes = [] if hints is None else hints.hash_blocks(self._last.rank, self._last.size)
        self.phase = SavePhase.WRITTEN
        return WrittenSave(staged, payloads, files, hashes)

    def _write_model_files(self, started: StartedSave, publication: Publication) -> Iterator[FileRecord]:
        """Write the model files that the base does not have; yield the records for all. On rank 0."""
        for name, content in started.model_files.items():
            stored = name_model_file(started.contents.save, name)
            record = make_record(stored, content, checksums=self._options.checksums)
            known = None if started.base is None else started.base.find_model_file(name, record)
            if known is None:
                _write_file(publication, stored, content)
            yield known or record

    def commit(self, planned: PlannedSave, written: WrittenSave | Exception) -> None:
        """Publish and commit all ranks' files. Collective."""
        if isinstance(written, Exception) and self._coordinator.size == 1:
            raise written
        what = f"saving to {self._options.path}"
        answer = self._exchange_outcome(what, planned, written)
        assert not isinstance(written, Exception), "this rank's error is raised by then"
        if answer == EXPLAIN:
            digests = json.dumps(written.staged.replica_digests()).encode()
            self._last.ask_rank0(what, digests, lambda each: _raise_replicas(sort_by_number(self._last, each)))
        if answer == _BASE_REMOVED:
            url = planned.response.hints.url if planned.response.hints is not None else ""
            raise _base_removed_error(self._options.path, url)
        assert self._cached_save is not None, "it was planned"
        self._saver.remember(planned, self._cached_save)
        self.phase = SavePhase.COMMITTED
        if self._options.hooks.after_commit is not None:
            self._options.hooks.after_commit(self._last)

    def _exchange_outcome(self, what: str, planned: PlannedSave, written: WrittenSave | Exception) -> bytes:
        """Return rank 0's answer after it published all ranks' files. Collective."""

        def decide(messages: list[bytes]) -> list[bytes]:
            assert not isinstance(written, Exception), "this rank's error is raised before"
            outcomes, blobs = zip(*map(unpack_message, messages), strict=True)
            parts = [decode_partial(blob, where=f"rank {rank}") for rank, blob in enumerate(blobs) if rank]
            return [self._publish(planned, written, outcomes, parts)] * len(messages)

        if isinstance(written, Exception):
            return self._last.ask_rank0(what, written, decide)
        if self._coordinator.size == 1:
            return self._publish(planned, written, [written.outcome()], [])
        part = encode_partial(written.payloads) if self._coordinator.rank else b""
        return self._last.ask_rank0(what, pack_message(written.outcome(), part), decide)

    def _publish(
        self,
        planned: PlannedSave,
        written: WrittenSave,
        outcomes: Sequence[tuple[Any, Any, Any, Any]],
        others: Sequence[PartialManifest],
    ) -> bytes:
        """Compare replicas, commit, publish. On rank 0."""
        assert self._started is not None and self._publication is not None
        plan, base = self._started.plan, self._started.base
        digests, unchanged, hashes, stats = zip(*outcomes, strict=True)
        if _has_unequal_replicas(plan, digests):
            return EXPLAIN
        parts = [build_partial(written.payloads), *others]
        referred = []
        if base is not None:
            assert planned.frozen_params is not None
            referred.append(base.part(unchanged, hashes, planned.frozen_params.hashes, stats))
        payload, arrays = merge_partials([*parts, *referred], plan.order)
        files = (*payload, *written.files)
        bases = base.bases(files) if base is not None else ()
        contents = replace(self._started.contents, files=files, arrays=arrays, bases=bases)
        manifest = encode_manifest(contents)
        _write_file(self._publication, manifest_name(contents.save), manifest)
        own = {**_sizes(file for file in written.files if not file.base), manifest_name(contents.save): len(manifest)}
        rank0_sizes, *other_sizes = [_sizes(part.files) for part in parts]
        if not self._options.hooks.is_shared:
            other_sizes = []
        sizes, place = [{**rank0_sizes, **own}, *other_sizes], self._publication.staging_url
        require = partial(require_files, self._options.path, place, sizes)
        if not self._publication.is_hidden:
            require()
        # From here on, a process that removes the base sees the manifest, and keeps the files that it refers to.
        if base is not None and not base.is_kept(files):
            return _BASE_REMOVED
        if self._options.hooks.before_commit is not None:
            self._options.hooks.before_commit()
        commit = encode_commit(contents.save, manifest, contents.files, contents.about)
        _write_file(self._publication, COMMIT, commit)
        if self._publication.is_hidden:  # as late as possible: another process may remove the run meanwhile
            require()
        self._publication.commit(partial(find_missing_files, place, sizes))
        return b""


def _write_file(publication: Publication, name: str, data: bytes) -> None:
    with publication.create(name) as writer:
        writer.write(data)


def _find_replicas(rank_plan: RankSavePlan, flattened: PlannedState) -> dict[int, list[ReplicatedBox]]:
    """Return this rank's boxes in each replica group, by group number."""
    items = list(flattened.arrays.items()) if rank_plan.replica_groups else []
    replicas: dict[int, list[ReplicatedBox]] = {}
    for number, positions in rank_plan.replica_groups.items():
        named = [(*items[at], which) for at, which in positions]
        replicas[number] = [ReplicatedBox(path, array.shape, array.shards[which]) for path, array, which in named]
    return replicas


def _base_removed_error(path: str, url: str) -> BaseRemovedError:
    return BaseRemovedError(
        "the base was removed or replaced by another process during the save, which was rolled back",
        where=path,
        found=url,
        fix="Save again.",
    )


def _sizes(files: Iterable[FileRecord]) -> dict[str, int]:
    return {file.name: file.nbytes for file in files}


_BASE_REMOVED = b"base removed"


def _has_unequal_replicas(plan: GlobalSavePlan, digests: Sequence[Mapping[str, str]]) -> bool:
    """Return True if ranks in a replica group have different data."""
    return any(
        len({digests[rank].get(str(number)) for rank in ranks}) > 1 for number, ranks in enumerate(plan.replica_groups)
    )


def _raise_replicas(messages: list[bytes]) -> list[bytes]:
    """Raise the error that names the arrays with unequal replicas."""
    digests = [json.loads(own) for own in messages]
    first = {name: digest for own in reversed(digests) for name, digest in own.items()}
    raise build_mismatch_error(
        [{name: (digest, "tensor", "") for name, digest in {**first, **own}.items()} for own in digests]
    )
