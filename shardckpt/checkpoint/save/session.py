"""A save session, from plan to commit: each rank sends two messages.

An error on one rank is raised on all ranks.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any, NamedTuple, TypeVar

from shardckpt.checkpoint.base_checkpoint import BaseRemovedError
from shardckpt.checkpoint.dedup import BaseDedup, BaseHints, FrozenParamCache, open_base_dedup
from shardckpt.checkpoint.planning.cached_save import (
    CachedSave,
    TracedState,
    add_trace,
    collect_local_plans,
    digest_traced_values,
    find_cached,
)
from shardckpt.checkpoint.planning.rank_report import (
    RankReport,
    build_contents,
    build_mismatch_error,
    build_report,
    digest_values,
    require_one_path,
    value_digests,
)
from shardckpt.checkpoint.planning.save_plan import (
    GlobalSavePlan,
    LocalSavePlan,
    RankSavePlan,
    create_global_plan,
    create_local_plan,
    create_single_rank_plan,
)
from shardckpt.checkpoint.save.payload_writer import Source, iter_contents, measure_chunk, write_payloads
from shardckpt.checkpoint.save.replica_digests import ReplicaDigests, ReplicatedBox
from shardckpt.checkpoint.stateful.flatten import FlattenedState, flatten_state
from shardckpt.checkpoint.stateful.state_trace import StateTrace, trace_state
from shardckpt.checkpoint.stateful.stateful import as_root, require_state
from shardckpt.encodings.budget import gc_paused
from shardckpt.encodings.typed_json import UNSTORED, decode, encode
from shardckpt.encodings.value_stats import ValueStats
from shardckpt.errors import CheckpointError, MissingFileError, SourceNotFoundError, UnknownFormatError
from shardckpt.events import FallbackEvent, OnEvent, Recorder, SaveEvent, record_operation
from shardckpt.manifest import Path
from shardckpt.native.commit import COMMIT, STEP, encode_commit, manifest_name
from shardckpt.native.manifest_json import (
    ManifestContents,
    PartialManifest,
    WrittenPayload,
    build_partial,
    decode_partial,
    encode_manifest,
    encode_partial,
    merge_partials,
)
from shardckpt.native.payload import (
    HF_INDEX,
    FileLayout,
    PayloadFile,
    build_payloads,
    hf_index,
    new_save_id,
)
from shardckpt.native.records import FileRecord, make_record
from shardckpt.native.run_directory import read_referred_files
from shardckpt.plan.layout.box_codec import pack_message, unpack_message
from shardckpt.ranks.linked_group import LinkedGroup
from shardckpt.storage.publication import FindKept, Publication
from shardckpt.storage.publish import JoinedPublication, find_missing_files, require_files, start_publication
from shardckpt.storage.resolve_url import open_store
from shardckpt.torchrun import has_second_core

T = TypeVar("T")

_MAX_CACHED_SAVES = 4  # a run saves one state again and again, or a few in turn
PlannedState = FlattenedState | TracedState  # a state whose save is planned


class SaveHooks(NamedTuple):
    """What only a `Checkpointer` asks of a save."""

    about: Mapping[str, str] = {}  # custom metadata with reserved names
    # Called on rank 0 before the commit; raises if the save must not replace what is there now.
    before_commit: Callable[[], object] | None = None
    # Called on every rank after rank 0 has committed, with the coordinator of the commit. Collective.
    after_commit: Callable[[LinkedGroup], object] | None = None
    is_shared: bool = True  # all ranks write to one place; otherwise each writes on its own node


NO_HOOKS = SaveHooks()


@dataclass(frozen=True)
class SaveOptions:
    """Options for one save."""

    path: str  # or URL
    overwrite: bool  # whether to replace an existing checkpoint of shardckpt
    checksums: bool  # whether to hash blocks and compare replicated data
    custom_metadata: Mapping[str, str]  # free text by name, for the manifest
    # Returns the base; None or empty text to save without one. Called on rank 0 when the save starts.
    base: Callable[[], str | None] = lambda: None
    store_digests: bool = False  # whether to hash chunks, so that a later save can refer to this checkpoint
    trainable_only: bool = False  # whether to refer to the base for all frozen parameters
    # Regular expressions with replacements, which change the model's names to names in the base.
    base_key_map: Mapping[str, str] = field(default_factory=dict)
    on_event: OnEvent | None = None  # called with the event of the save; None without a callback
    stats: bool = False  # whether to store statistics of the values
    hooks: SaveHooks = NO_HOOKS


@dataclass(frozen=True)
class PlanResponse:
    """Rank 0's answer to one rank's report."""

    save: str  # id
    place: str  # location to write to
    # Plan of the chunks to write, after the JSON; None in a message for the cached plan.
    rank_plan: Annotated[RankSavePlan | None, UNSTORED] = None
    hints: BaseHints | None = None  # facts about the base; None without a base

    def encode(self) -> bytes:
        """Return the response as bytes."""
        return pack_message(encode(self), b"" if self.rank_plan is None else self.rank_plan.encode())

    @classmethod
    def decode(cls, data: bytes) -> PlanResponse:
        """Return the response from the bytes of `encode`."""
        fields, rank_plan = unpack_message(data)
        response = decode(cls, fields, where="rank 0's answer")
        return replace(response, rank_plan=RankSavePlan.decode(rank_plan) if rank_plan else None)


class Saver:
    """Saves for one group of ranks, and caches the last committed saves."""

    def __init__(self, ranks: LinkedGroup) -> None:
        self.ranks = ranks
        self.cached_saves: tuple[CachedSave, ...] = ()  # without tensors, latest first
        self.frozen_params = FrozenParamCache()

    def save(
        self, state: Any, options: SaveOptions, refusal: Exception | None = None, recorder: Recorder | None = None
    ) -> None:
        """Save a state. Collective."""
        recorder = recorder or Recorder(SaveEvent, options.path)
        rank = recorder.values["rank"] = self.ranks.rank
        try:
            self._save(state, options, recorder, refusal)
        except BaseRemovedError as error:
            if options.trainable_only:
                raise
            with record_operation(FallbackEvent, options.path, options.on_event, rank=rank, warnings=(str(error),)):
                self._save(state, replace(options, base=lambda: None), recorder, refusal)

    def _save(self, state: Any, options: SaveOptions, recorder: Recorder, refusal: Exception | None) -> None:
        session = SaveSession(self, options, self.ranks)
        with gc_paused(), self.ranks.in_step(), session.rollback_on_error():
            with recorder.phase("capture"):
                planned, flattened = session.plan(state, refusal)

            def source(payload: PayloadFile) -> Iterator[memoryview]:
                return iter_contents(payload, flattened)

            with recorder.phase("write"):
                written = capture_error(lambda: session.write(planned, session.stage(planned, flattened), source))
            recorder.values["nbytes"] = 0 if isinstance(written, Exception) else written.nbytes
            with recorder.phase("publish"):
                session.commit(planned, written)

    def find_plan(self, local_plan: LocalSavePlan) -> CachedSave | None:
        """Return the latest save with a local plan."""
        return next((each for each in self.cached_saves if each.local_plan.equals(local_plan)), None)

    def remember(self, planned: PlannedSave, cached_save: CachedSave) -> None:
        """Cache a save that all ranks have committed."""
        if planned.frozen_params is not None:
            self.frozen_params = planned.frozen_params
        others = [each for each in self.cached_saves if each.key != cached_save.key]
        self.cached_saves = (cached_save, *others[: _MAX_CACHED_SAVES - 1])

    def forget(self) -> None:
        """Drop the cached saves."""
        self.cached_saves = ()


def _digest(parts: Iterable[bytes]) -> str:
    return hashlib.blake2b(b"".join(parts), digest_size=16).hexdigest()


def capture_error(work: Callable[[], T]) -> T | Exception:
    """Return a function's result, or its error, to send to all ranks."""
    try:
        return work()
    except Exception as error:  # noqa: BLE001  (sent to every rank, then raised)
        return error


@dataclass(frozen=True)
class PlannedSave:
    """Plan on which the ranks have agreed, without the state."""

    response: PlanResponse
    rank_plan: RankSavePlan  # chunks that this rank writes
    model: Path | None  # path of the model, if the checkpoint is a Hugging Face folder too; otherwise None
    frozen_params: FrozenParamCache | None  # None without a base


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


@dataclass(frozen=True)
class _OpenedState:
    """State before it is flattened."""

    root: Any  # as `as_root` returns it
    objects: Mapping[int, Any]  # what `state_dict` returned, by object id
    trace: StateTrace | None  # None if the plan depends on more than the trace
    traced: TracedState | None  # None if no cached save fits the state


@dataclass(frozen=True)
class _StartedSave:
    """Rank 0's knowledge about a running save."""

    plan: GlobalSavePlan
    contents: ManifestContents  # without pieces
    base: BaseDedup | None


class SaveSession:
    """One save on one rank: call `plan`, `stage`, `write` and `commit` in this order."""

    # `write` and `commit` may run on another thread.

    def __init__(self, saver: Saver, options: SaveOptions, last: LinkedGroup) -> None:
        # Nothing but the commit uses `last` until the save ends.
        self._saver, self._coordinator, self._options, self._last = saver, saver.ranks, options, last
        self._publication: Publication | None = None
        self._started: _StartedSave | None = None
        self._cached_save: CachedSave | None = None

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
        return PlannedSave(response, rank_plan, model, frozen_params), flattened

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
        replicas = ReplicaDigests(_find_replicas(rank_plan, flattened) if self._options.checksums else {})
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
        staged.replicas.finish()
        hints = planned.response.hints
        hashes = [] if hints is None else hints.hash_blocks(self._coordinator.rank, self._coordinator.size)
        return WrittenSave(staged, payloads, files, hashes)

    def commit(self, planned: PlannedSave, written: WrittenSave | Exception) -> None:
        """Publish and commit all ranks' files. Collective."""
        if isinstance(written, Exception) and self._coordinator.size == 1:
            raise written
        what = f"saving to {self._options.path}"
        answer = self._exchange_outcome(what, planned, written)
        assert not isinstance(written, Exception), "this rank's error is raised by then"
        if answer == _EXPLAIN:
            digests = json.dumps(written.staged.replica_digests()).encode()
            self._last.ask_rank0(what, digests, _raise_replicas)
        if answer == _BASE_REMOVED:
            url = planned.response.hints.url if planned.response.hints is not None else ""
            raise _base_removed_error(self._options.path, url)
        assert self._cached_save is not None, "it was planned"
        self._saver.remember(planned, self._cached_save)
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
            return _EXPLAIN
        parts = [build_partial(written.payloads), *others]
        referred = []
        if base is not None:
            assert planned.frozen_params is not None
            referred.append(base.part(unchanged, hashes, planned.frozen_params.hashes, stats))
        files, arrays = merge_partials([*parts, *referred], plan.order)
        bases = base.bases(files) if base is not None else ()
        contents = replace(self._started.contents, files=(*files, *written.files), arrays=arrays, bases=bases)
        manifest = encode_manifest(contents)
        _write_file(self._publication, manifest_name(contents.save), manifest)
        own = {**_sizes(written.files), manifest_name(contents.save): len(manifest)}
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


class SavePlanner:
    """Plans one save together with the other ranks."""

    def __init__(self, saver: Saver, options: SaveOptions) -> None:
        self._saver, self._coordinator, self._options = saver, saver.ranks, options
        self.publication: Publication | None = None  # on rank 0
        self.started: _StartedSave | None = None  # on rank 0
        self.cached_save: CachedSave | None = None  # to cache once the save is committed
        self._known: CachedSave | None = None  # has the local plan of the flattened state

    def plan(self, state: Any, refusal: Exception | None) -> tuple[PlannedState, PlanResponse]:
        """Flatten the state, plan with the other ranks, start the publication. Collective."""
        plan = self._plan_alone if self._coordinator.size == 1 else self._exchange_plan
        return plan(state, refusal)

    def _plan_alone(self, state: Any, refusal: Exception | None) -> tuple[PlannedState, PlanResponse]:
        opened = self._open(state, refusal)
        if opened.traced is not None:
            (response,) = self._start_again(opened.traced)
            return self._repeat(opened.traced, response)
        flattened, local_plan = self._flatten(opened)
        known = None if self._known is None else self._known.plan
        plan = create_single_rank_plan(local_plan) if known is None else known
        reports, about = [build_report(flattened)], self._options.custom_metadata
        (response,) = self._start(plan, lambda save: build_contents(save, flattened, plan, reports, about))
        return flattened, self._cache(opened.trace, flattened, local_plan, response)

    def _open(self, state: Any, refusal: Exception | None) -> _OpenedState:
        """Trace the state, and find a cached save that it fits."""
        if refusal is not None:
            raise refusal
        require_state(state)
        root, objects = as_root(state), dict[int, Any]()
        trace = None if self._options.trainable_only else trace_state(root, objects)
        if trace is None:
            return _OpenedState(root, objects, None, None)
        fitting = next((each for each in self._saver.cached_saves if each.key == trace.key), None)
        return _OpenedState(root, objects, trace, None if fitting is None else TracedState(fitting, trace))

    def _repeat(self, traced: TracedState, response: PlanResponse) -> tuple[PlannedState, PlanResponse]:
        self.cached_save = traced.cached_save
        return traced, replace(response, rank_plan=traced.cached_save.rank_plan)

    def _flatten(self, opened: _OpenedState) -> tuple[FlattenedState, LocalSavePlan]:
        flattened = flatten_state(opened.root, self._coordinator.rank, self._coordinator.size, opened.objects)
        local_plan = create_local_plan(flattened, trainable_only=self._options.trainable_only)
        self._known = self._saver.find_plan(local_plan)
        return flattened, local_plan

    def _cache(
        self, trace: StateTrace | None, flattened: FlattenedState, local_plan: LocalSavePlan, response: PlanResponse
    ) -> PlanResponse:
        """Prepare to cache the save; return the response with this rank's plan."""
        rank_plan = response.rank_plan
        if rank_plan is None and self._known is not None:
            rank_plan = self._known.rank_plan
        assert rank_plan is not None, "a rank that has no plan cached receives one"
        plan, contents = (None, None) if self.started is None else (self.started.plan, self.started.contents)
        save = CachedSave(response.save, local_plan, local_plan, rank_plan, plan)
        self.cached_save = add_trace(save, trace, flattened, contents)
        return replace(response, rank_plan=rank_plan)

    def _start_again(self, traced: TracedState) -> list[PlanResponse]:
        """Publish a state that fits a cached save. On rank 0."""
        plan, manifest, about = traced.cached_save.plan, traced.cached_save.manifest, self._options.custom_metadata
        assert plan is not None and manifest is not None, "rank 0 caches them too"
        return self._start(plan, lambda save: manifest.build_contents(save, traced.trace, about))

    def _exchange_plan(self, state: Any, refusal: Exception | None) -> tuple[PlannedState, PlanResponse]:
        """Send a report about the state, and receive this rank's plan. Collective."""
        what = f"preparing to save to {self._options.path}"
        opened = capture_error(lambda: self._open(state, refusal))
        if not isinstance(opened, Exception) and opened.traced is not None:
            # If all states fit one cached save, no rank flattens its own. Otherwise all do.
            answer = self._ask_traced(what, opened.traced)
            if answer != _FLATTENED_NEEDED:
                return self._repeat(opened.traced, PlanResponse.decode(answer))
        local = opened if isinstance(opened, Exception) else capture_error(partial(self._flatten, opened))

        def ask() -> bytes:
            if isinstance(local, Exception):
                return self._coordinator.ask_rank0(what, local, decide)
            return self._coordinator.ask_rank0(what, capture_error(lambda: self._report(*local).encode()), decide)

        def decide(messages: list[bytes]) -> list[bytes]:
            assert not isinstance(local, Exception), "this rank's error is raised before"
            return self._decide(messages, local[0])

        answer = ask()
        assert not isinstance(local, Exception), "this rank's error is raised by then"
        if answer == _FLATTENED_NEEDED:
            answer = ask()
        if answer == _LOCAL_PLANS_NEEDED:
            self._saver.forget()
            self._known = None
            answer = ask()
        if answer == _EXPLAIN:
            self._coordinator.ask_rank0(what, value_digests(local[0]), _raise_values)
        assert not isinstance(opened, Exception), "its error is raised by then"
        return local[0], self._cache(opened.trace, *local, PlanResponse.decode(answer))

    def _report(self, flattened: FlattenedState, local_plan: LocalSavePlan) -> RankReport:
        """Return this rank's report, with its local plan unless a cached one fits."""
        report = replace(build_report(flattened), values=digest_values(flattened), path=self._options.path)
        if self._known is None:
            return replace(report, local_plan=local_plan.encode())
        return replace(report, cached=self._known.save)

    def _ask_traced(self, what: str, traced: TracedState) -> bytes:
        """Return rank 0's answer to a report that the state fits a cached save. Collective."""

        def report() -> bytes:
            values, path = digest_traced_values(traced.trace), self._options.path
            return RankReport(traced.cached_save.save, b"", values, {}, {}, path, is_traced=True).encode()

        def decide(messages: list[bytes]) -> list[bytes]:
            reports = [RankReport.decode(message) for message in messages]
            require_one_path(reports)
            if len({(report.is_traced, report.cached, report.values) for report in reports}) > 1:
                return [_FLATTENED_NEEDED] * len(messages)
            return [replace(response, rank_plan=None).encode() for response in self._start_again(traced)]

        return self._coordinator.ask_rank0(what, capture_error(report), decide)

    def _decide(self, messages: list[bytes], flattened: FlattenedState) -> list[bytes]:
        """Plan, and start the publication. On rank 0."""
        reports = [RankReport.decode(message) for message in messages]
        require_one_path(reports)
        if any(report.is_traced for report in reports):
            return [_FLATTENED_NEEDED] * len(messages)
        if len({report.values for report in reports}) > 1:
            return [_EXPLAIN] * len(messages)

        def start(plan: GlobalSavePlan) -> list[PlanResponse]:
            about = self._options.custom_metadata
            return self._start(plan, lambda save: build_contents(save, flattened, plan, reports, about))

        cached = find_cached(reports, self._saver.cached_saves)
        if cached is not None and cached.plan is not None:
            return [replace(response, rank_plan=None).encode() for response in start(cached.plan)]
        local_plans = collect_local_plans(reports, self._saver.cached_saves)
        if local_plans is None:
            return [_LOCAL_PLANS_NEEDED] * len(messages)
        return [response.encode() for response in start(create_global_plan(local_plans))]

    def _start(self, plan: GlobalSavePlan, build: Callable[[str], ManifestContents]) -> list[PlanResponse]:
        """Start the publication, and return the answer to each rank. On rank 0."""
        save_id, options = new_save_id(), self._options
        base = _open_base(options, plan)
        self.started = _StartedSave(plan, build(save_id), base)
        self.publication = start_publication(
            options.path,
            STEP,
            overwrite=options.overwrite,
            needed_bytes=plan.nbytes,
            last=COMMIT,
            prefix=save_id,
            find_kept=_choose_kept(options),
        )
        if base is not None:
            base.ask_for_hashes(self._saver.frozen_params.hashes)
        hints = [None if base is None else base.hints_for(each, stats=options.stats) for each in plan.rank_plans]
        return [
            PlanResponse(save_id, self.publication.staging_url, rank_plan, rank_hints)
            for rank_plan, rank_hints in zip(plan.rank_plans, hints, strict=True)
        ]


def _choose_kept(options: SaveOptions) -> FindKept:
    """Return the function that finds files to keep after the commit, or after a failed one."""
    # While other nodes have the old marks alone, the old files of this one are needed.
    is_replaced_by_node = options.overwrite and not options.hooks.is_shared
    return partial(_list_files if is_replaced_by_node else read_referred_files, options.path)


def _list_files(url: str) -> frozenset[str]:
    return frozenset(entry.name for entry in open_store(url).list())


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


def _open_base(options: SaveOptions, plan: GlobalSavePlan) -> BaseDedup | None:
    """Open the base; if it was removed after it was chosen, choose again."""
    url = options.base()
    while url or options.trainable_only:
        try:
            return open_base_dedup(url, options.path, options.base_key_map, plan, trainable_only=options.trainable_only)
        except (CheckpointError, MissingFileError, SourceNotFoundError, UnknownFormatError):
            now = options.base()
            if now == url:
                raise
            url = now
    return None


def _base_removed_error(path: str, url: str) -> BaseRemovedError:
    return BaseRemovedError(
        "the base was removed or replaced by another process during the save, which was rolled back",
        where=path,
        found=url,
        fix="Save again.",
    )


def _sizes(files: Iterable[FileRecord]) -> dict[str, int]:
    return {file.name: file.nbytes for file in files}


_EXPLAIN = b"explain"
_BASE_REMOVED = b"base removed"
_LOCAL_PLANS_NEEDED = b"local plans"
_FLATTENED_NEEDED = b"flattened"


def _has_unequal_replicas(plan: GlobalSavePlan, digests: Sequence[Mapping[str, str]]) -> bool:
    """Return True if ranks in a replica group have different data."""
    return any(
        len({digests[rank].get(str(number)) for rank in ranks}) > 1 for number, ranks in enumerate(plan.replica_groups)
    )


def _raise_values(messages: list[bytes]) -> list[bytes]:
    values, containers = zip(*map(json.loads, messages), strict=True)
    raise build_mismatch_error(values, containers)


def _raise_replicas(messages: list[bytes]) -> list[bytes]:
    """Raise the error that names the arrays with unequal replicas."""
    digests = [json.loads(own) for own in messages]
    first = {name: digest for own in reversed(digests) for name, digest in own.items()}
    raise build_mismatch_error(
        [{name: (digest, "tensor", "") for name, digest in {**first, **own}.items()} for own in digests]
    )
