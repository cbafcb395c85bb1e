"""Plan a save: flatten the state, agree on the plan with the other ranks, and start the publication.

If the state has the structure of a cached save, ranks send only its values, and rank 0 repeats its plan.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any, NamedTuple, TypeVar

from shardckpt.checkpoint.dedup import BaseDedup, BaseHints, FrozenParamCache, open_base_dedup
from shardckpt.checkpoint.planning.cached_save import (
    CachedSave,
    TracedState,
    add_trace,
    collect_local_plans,
    digest_traced_values,
    find_cached,
)
from shardckpt.checkpoint.planning.leaving_ranks import collect_own_tensors, plan_for_staying, take_tensors
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
from shardckpt.checkpoint.planning.stage_parts import add_parts, merge_parts, remove_parts, require_comparable
from shardckpt.checkpoint.save.render_model_files import ModelFiles, read_model_files
from shardckpt.checkpoint.stateful.flatten import FlattenedState, flatten_state
from shardckpt.checkpoint.stateful.state_trace import StateTrace, trace_state
from shardckpt.checkpoint.stateful.stateful import as_root, require_state
from shardckpt.encodings.typed_json import UNSTORED, decode, encode
from shardckpt.errors import CheckpointError, MissingFileError, SourceNotFoundError, UnknownFormatError
from shardckpt.events import OnEvent
from shardckpt.manifest import Path
from shardckpt.native.commit import COMMIT, STEP
from shardckpt.native.manifest_json import PRETRAINED, ManifestContents
from shardckpt.native.payload import new_save_id
from shardckpt.native.run_directory import read_referred_files
from shardckpt.plan.layout.box_codec import pack_message, unpack_message
from shardckpt.ranks.linked_group import LinkedGroup
from shardckpt.ranks.ordered_link import sort_by_number
from shardckpt.storage.publication import FindKept, Publication
from shardckpt.storage.publish import start_publication
from shardckpt.storage.resolve_url import open_store

T = TypeVar("T")

_MAX_CACHED_SAVES = 4  # a run saves one state again and again, or a few in turn
PlannedState = FlattenedState | TracedState  # a state whose save is planned

EXPLAIN = b"explain"  # rank 0's answer that values or replicas differ, so that it needs to know which
_LOCAL_PLANS_NEEDED = b"local plans"
_PARTS_NEEDED = b"parts"
_FLATTENED_NEEDED = b"flattened"


class SaveHooks(NamedTuple):
    """What only a `Checkpointer` asks of a save."""

    about: Mapping[str, str] = {}  # custom metadata with reserved names
    # Called on rank 0 before the commit; raises if the save must not replace what is there now.
    before_commit: Callable[[], object] | None = None
    # Called on every rank after rank 0 has committed, with the coordinator of the commit. Collective.
    after_commit: Callable[[LinkedGroup], object] | None = None
    is_shared: bool = True  # all ranks write to one place; otherwise each writes on its own node
    # Ranks that stay, while the others may leave after the plan; empty if all ranks stay until the commit.
    staying: tuple[int, ...] = ()


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
    model_files: Any = None  # folder or objects that stand for config and tokenizer files; read on rank 0
    hooks: SaveHooks = NO_HOOKS
    overlap_staging: bool = False  # whether only writers of parameters and optimizer states wait for their copies


@dataclass(frozen=True)
class PlanResponse:
    """Rank 0's answer to one rank's report."""

    save: str  # id
    place: str  # location to write to
    # Plan of the chunks to write, after the JSON; None in a message for the cached plan.
    rank_plan: Annotated[RankSavePlan | None, UNSTORED] = None
    hints: BaseHints | None = None  # facts about the base; None without a base
    committing: int = 0  # how many ranks write and commit, the first ones; 0 for all
    needed: str = ""  # elements for which the save needs ranks that leave, as text; empty if it needs none

    def encode(self) -> bytes:
        """Return the response as bytes."""
        return pack_message(encode(self), b"" if self.rank_plan is None else self.rank_plan.encode())

    @classmethod
    def decode(cls, data: bytes) -> PlanResponse:
        """Return the response from the bytes of `encode`."""
        fields, rank_plan = unpack_message(data)
        response = decode(cls, fields, where="rank 0's answer")
        return replace(response, rank_plan=RankSavePlan.decode(rank_plan) if rank_plan else None)


class SaveCache:
    """The last committed saves of one group of ranks."""

    def __init__(self, ranks: LinkedGroup) -> None:
        self.ranks = ranks
        self.cached_saves: tuple[CachedSave, ...] = ()  # without tensors, latest first
        self.frozen_params = FrozenParamCache()

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
class _OpenedState:
    """State before it is flattened."""

    root: Any  # as `as_root` returns it
    objects: Mapping[int, Any]  # what `state_dict` returned, by object id
    trace: StateTrace | None  # None if the plan depends on more than the trace
    traced: TracedState | None  # None if no cached save fits the state


@dataclass(frozen=True)
class StartedSave:
    """Rank 0's knowledge about a running save."""

    plan: GlobalSavePlan
    contents: ManifestContents  # without pieces
    base: BaseDedup | None
    model_files: Mapping[str, bytes]  # contents by file name


class SavePlanner:
    """Plans one save together with the other ranks."""

    def __init__(self, cache: SaveCache, options: SaveOptions) -> None:
        self._cache, self._coordinator, self._options = cache, cache.ranks, options
        self.publication: Publication | None = None  # on rank 0
        self.started: StartedSave | None = None  # on rank 0
        self.cached_save: CachedSave | None = None  # to cache once the save is committed
        self._known: CachedSave | None = None  # has the local plan of the flattened state
        self._model_files = ModelFiles()  # on rank 0
        self._has_parts = False  # whether ranks have different parts of models, as pipeline stages have
        self._can_trace = True  # whether rank 0 may repeat the save without these

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
        return flattened, self._prepare_cached(opened.trace, flattened, local_plan, response)

    def _open(self, state: Any, refusal: Exception | None) -> _OpenedState:
        """Trace the state, and find a cached save that it fits."""
        if refusal is not None:
            raise refusal
        require_state(state)
        root, objects = as_root(state), dict[int, Any]()
        if self._coordinator.rank == 0 and self._options.model_files is not None:
            self._model_files = read_model_files(self._options.model_files, root)
        needs_flattened = self._options.trainable_only or self._options.overlap_staging
        trace = None if needs_flattened else trace_state(root, objects)
        if trace is None:
            return _OpenedState(root, objects, None, None)
        fitting = next((each for each in self._cache.cached_saves if each.key == trace.key), None)
        return _OpenedState(root, objects, trace, None if fitting is None else TracedState(fitting, trace))

    def _repeat(self, traced: TracedState, response: PlanResponse) -> tuple[PlannedState, PlanResponse]:
        self.cached_save = traced.cached_save
        return traced, replace(response, rank_plan=traced.cached_save.rank_plan)

    def _flatten(self, opened: _OpenedState) -> tuple[FlattenedState, LocalSavePlan]:
        ranks = self._coordinator
        flattened = flatten_state(opened.root, ranks.global_rank(ranks.rank), ranks.size, opened.objects)
        local_plan = create_local_plan(flattened, trainable_only=self._options.trainable_only)
        self._known = self._cache.find_plan(local_plan)
        return flattened, local_plan

    def _prepare_cached(
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
        if answer == _PARTS_NEEDED:
            self._has_parts = True
            answer = ask()
        if answer == _LOCAL_PLANS_NEEDED:
            self._cache.forget()
            self._known = None
            answer = ask()
        if answer == EXPLAIN:
            digests = value_digests(remove_parts(local[0]))
            ranks = self._coordinator
            ranks.ask_rank0(what, digests, lambda each: _raise_values(sort_by_number(ranks, each)))
        assert not isinstance(opened, Exception), "its error is raised by then"
        trace = opened.trace if self._can_trace else None
        return local[0], self._prepare_cached(trace, *local, PlanResponse.decode(answer))

    def _report(self, flattened: FlattenedState, local_plan: LocalSavePlan) -> RankReport:
        """Return this rank's report, with its local plan unless a cached one fits."""
        report = replace(build_report(flattened), path=self._options.path)
        report = add_parts(report, flattened) if self._has_parts else replace(report, values=digest_values(flattened))
        if self._coordinator.rank >= (staying := len(self._options.hooks.staying)) > 0:
            report = replace(report, sent=collect_own_tensors(flattened, self._coordinator.size - staying))
        if self._known is None:
            return replace(report, local_plan=local_plan.encode())
        return replace(report, cached=self._known.save)

    def _ask_traced(self, what: str, traced: TracedState) -> bytes:
        """Return rank 0's answer to a report that the state fits a cached save. Collective."""

        def report() -> bytes:
            values, path = digest_traced_values(traced.trace), self._options.path
            return RankReport(traced.cached_save.save, values=values, path=path, is_traced=True).encode()

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
        given = sort_by_number(self._coordinator, reports)
        require_one_path(given)
        if any(report.is_traced for report in reports):
            return [_FLATTENED_NEEDED] * len(messages)
        if len({report.values for report in reports}) > 1:
            return [EXPLAIN if self._has_parts else _PARTS_NEEDED] * len(messages)
        local_plans = collect_local_plans(reports, self._cache.cached_saves)
        if local_plans is None:
            return [_LOCAL_PLANS_NEEDED] * len(messages)
        stages: Sequence[int] = ()
        if self._has_parts:
            merged = merge_parts(flattened, reports, given)
            is_shared = require_comparable(local_plans, merged, checksums=self._options.checksums)
            flattened, stages = merged.flattened, merged.stages
            self._can_trace = merged.is_like_own and not is_shared

        def start(plan: GlobalSavePlan) -> list[PlanResponse]:
            about = self._options.custom_metadata
            return self._start(plan, lambda save: build_contents(save, flattened, plan, given, about))

        needed = ""
        if count := len(self._options.hooks.staying):
            plans = take_tensors(flattened, local_plans, [report.sent for report in reports])
            alone = plan_for_staying(plans, count, stages)
            if isinstance(alone, GlobalSavePlan):
                return _answer_all(start(alone), len(messages))
            needed = alone
        cached = find_cached(reports, self._cache.cached_saves)
        if cached is not None and cached.plan is not None:
            return [replace(response, rank_plan=None).encode() for response in start(cached.plan)]
        responses = start(create_global_plan(local_plans, stages))
        return [replace(response, needed=needed).encode() for response in responses]

    def _start(self, plan: GlobalSavePlan, build: Callable[[str], ManifestContents]) -> list[PlanResponse]:
        """Start the publication, and return the answer to each rank. On rank 0."""
        save_id, options = new_save_id(), self._options
        base = _open_base(options, plan)
        contents, files = build(save_id), self._model_files
        topology = {name: value for name, value in contents.topology.items() if name != PRETRAINED}
        topology |= {PRETRAINED: list(files.model)} if files.model else {}  # a cached manifest may have another one
        self.started = StartedSave(plan, replace(contents, topology=topology), base, files.contents)
        self.publication = start_publication(
            options.path,
            STEP,
            overwrite=options.overwrite,
            needed_bytes=plan.nbytes + sum(map(len, files.contents.values())),
            last=COMMIT,
            prefix=save_id,
            find_kept=_choose_kept(options),
        )
        if base is not None:
            base.ask_for_hashes(self._cache.frozen_params.hashes)
        hints = [None if base is None else base.hints_for(each, stats=options.stats) for each in plan.rank_plans]
        return [
            PlanResponse(save_id, self.publication.staging_url, rank_plan, rank_hints)
            for rank_plan, rank_hints in zip(plan.rank_plans, hints, strict=True)
        ]


def _answer_all(responses: Sequence[PlanResponse], count: int) -> list[bytes]:
    """Return the answers to the ranks that stay, and to those that leave; these are short."""
    staying, first = len(responses), responses[0]
    leaving = PlanResponse(first.save, first.place, RankSavePlan((), {}))
    answered = [*responses, *[leaving] * (count - staying)]
    return [replace(response, committing=staying).encode() for response in answered]


def _choose_kept(options: SaveOptions) -> FindKept:
    """Return the function that finds files to keep after the commit, or after a failed one."""
    # While other nodes have the old marks alone, the old files of this one are needed.
    is_replaced_by_node = options.overwrite and not options.hooks.is_shared
    return partial(_list_files if is_replaced_by_node else read_referred_files, options.path)


def _list_files(url: str) -> frozenset[str]:
    return frozenset(entry.name for entry in open_store(url).list())


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


def _raise_values(messages: list[bytes]) -> list[bytes]:
    values, containers = zip(*map(json.loads, messages), strict=True)
    raise build_mismatch_error(values, containers)
