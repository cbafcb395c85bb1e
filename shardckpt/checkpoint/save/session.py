"""A save session, from its plan to its commit: two messages of each rank; an error on one is raised on all."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import xxhash

from shardckpt.boxes import Box
from shardckpt.checkpoint.coordinator import Channels, Coordinator
from shardckpt.checkpoint.incremental.base_checkpoint import BaseRemovedError
from shardckpt.checkpoint.incremental.dedup import NO_BASE, BaseDedup, BaseHints, FrozenParamCache, open_base_dedup
from shardckpt.checkpoint.planning.manifest_builder import build_contents
from shardckpt.checkpoint.planning.plan_cache import PlanCache, RankPlanCache, collect_local_plans, is_cached
from shardckpt.checkpoint.planning.rank_report import (
    RankReport,
    build_mismatch_error,
    build_report,
    require_one_path,
    value_digests,
    values_digest,
)
from shardckpt.checkpoint.planning.save_plan import (
    GlobalSavePlan,
    LocalSavePlan,
    RankSavePlan,
    create_global_plan,
    create_local_plan,
    create_single_rank_plan,
)
from shardckpt.checkpoint.save.payload_writer import Source, contents, write_payloads
from shardckpt.checkpoint.stateful.flatten import FlattenedState, flatten_state
from shardckpt.checkpoint.stateful.tensor_bytes import tensor_bytes
from shardckpt.errors import CheckpointError, MissingFileError, SourceNotFoundError, UnknownFormatError
from shardckpt.format.native.commit import COMMIT, STEP, encode_commit, manifest_name, read_branch
from shardckpt.format.native.manifest_json import ManifestContents, encode_manifest
from shardckpt.format.native.partial_manifest import (
    PartialManifest,
    build_partial,
    decode_partial,
    encode_partial,
    merge_partials,
)
from shardckpt.format.native.payload import HF_INDEX, PayloadFile, hf_index, lay_out, new_save_id
from shardckpt.format.native.records import FileRecord, make_record
from shardckpt.format.native.run_directory import read_referred_files
from shardckpt.gc_pause import gc_paused
from shardckpt.manifest import Path, dotted
from shardckpt.state.local.local_shards import TensorShards
from shardckpt.storage.publication import Publication
from shardckpt.storage.publish import JoinedPublication, begin, require_files


@dataclass(frozen=True)
class SaveOptions:
    """Options of a save.

    Attributes:
        path: The target.
        overwrite: Replace one checkpoint of shardckpt that lies there.
        checksums: Hash blocks, compare what several ranks hold.
        custom_metadata: Free text by name, for the manifest.
        base: Returns which checkpoint to refer to, when the save begins; None or an empty text for none. Called on
            rank 0.
        store_digests: Hash chunks, so that a later save can refer to this one.
        trainable_only: Refer to the base for all frozen parameters.
        base_key_map: Regular expressions to what stands for them, from a model's names to those of the base.
    """

    path: str
    overwrite: bool
    checksums: bool
    custom_metadata: Mapping[str, str]
    base: Callable[[], str | None] = lambda: None
    store_digests: bool = False
    trainable_only: bool = False
    base_key_map: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class PlanResponse:
    """Rank 0's answer to one rank.

    Attributes:
        save: The save's id.
        place: Where to write.
        rank_plan: The chunks to write; None for the cached plan.
        hints: Which of them the base may have.
    """

    save: str
    place: str
    rank_plan: RankSavePlan | None
    hints: BaseHints = NO_BASE

    def encode(self) -> bytes:
        """Return it as bytes."""
        head = json.dumps([self.save, self.place, self.rank_plan is not None, self.hints.to_json()]).encode()
        return len(head).to_bytes(8, "little") + head + (self.rank_plan.encode() if self.rank_plan else b"")

    @classmethod
    def decode(cls, data: bytes) -> PlanResponse:
        """Return what `encode` wrote."""
        end = 8 + int.from_bytes(data[:8], "little")
        save_id, place, has_plan, hints = json.loads(data[8:end])
        return cls(save_id, place, RankSavePlan.decode(data[end:]) if has_plan else None, BaseHints.from_json(hints))


class Saver:
    """Saves of one group of ranks; it keeps the last committed plan, since most saves are like the one before.

    Args:
        channels: Through which the ranks send messages.

    Attributes:
        channels: As given.
        rank_plan_cache: This rank's part of the last committed plan.
        plan_cache: The last committed plan, on rank 0; None on the others.
        frozen_params: Digests of frozen parameters in the bases of committed saves.
    """

    def __init__(self, channels: Channels) -> None:
        self.channels = channels
        self.rank_plan_cache: RankPlanCache | None = None
        self.plan_cache: PlanCache | None = None
        self.frozen_params = FrozenParamCache()

    def save(self, state: Any, options: SaveOptions, refusal: Exception | None = None) -> None:
        """Save a state.

        Args:
            state: As the function of this name takes it.
            options: Where to, and in which way.
            refusal: Why this rank does not save; it is sent to all.
        """
        try:
            self._save(state, options, refusal)
        except BaseRemovedError:
            if options.trainable_only:
                raise
            self._save(state, replace(options, base=lambda: None), refusal)

    def _save(self, state: Any, options: SaveOptions, refusal: Exception | None) -> None:
        session = SaveSession(self, options, self.channels.main)
        with gc_paused(), self.channels.main.in_step(), session.rollback_on_error():
            session.plan(state, refusal)
            session.commit(capture_error(lambda: session.write(session.stage(), session.contents)))

    def forget(self) -> None:
        """Drop what is kept of the last plan."""
        self.rank_plan_cache = self.plan_cache = None


class Replica(NamedTuple):
    """A box of an array that several ranks hold.

    Attributes:
        path: Of the array.
        box: Of its elements; None for all.
        digest: Of their bytes.
    """

    path: Path
    box: Box | None
    digest: bytes

    @property
    def name(self) -> str:
        """As messages call it."""
        return dotted(self.path) + ("" if self.box is None else str(self.box))


@dataclass(frozen=True)
class StagedWrites:
    """The files that a rank writes, and digests of its replicated data.

    Attributes:
        payloads: Its files.
        replicas: The boxes of each replica group, by its number.
        unchanged: Positions of the chunks of its plan that the base has.
    """

    payloads: tuple[PayloadFile, ...] = ()
    replicas: Mapping[int, Sequence[Replica]] = field(default_factory=dict)
    unchanged: tuple[int, ...] = ()

    def replica_group_digests(self) -> dict[str, str]:
        """Return one digest for each replica group."""
        return {str(number): _digest(each.digest for each in held) for number, held in self.replicas.items()}

    def replica_digests(self) -> dict[str, str]:
        """Return one digest for each box that others hold too, by its name."""
        return {each.name: each.digest.hex() for held in self.replicas.values() for each in held}


def _digest(parts: Iterable[bytes]) -> str:
    return hashlib.blake2b(b"".join(parts), digest_size=16).hexdigest()


def capture_error(work: Callable[[], bytes]) -> bytes | Exception:
    """Return the result of some work, or its error, which is sent to all ranks."""
    try:
        return work()
    except Exception as error:  # noqa: BLE001  (sent to every rank, then raised)
        return error


class SaveSession:
    """One save on one rank: `plan`, `stage`, `write`, `commit`, the last two on whatever thread.

    Args:
        saver: Whose.
        options: Where to, and in which way.
        last: The coordinator of the commit; nothing else uses it until this save is over.
    """

    def __init__(self, saver: Saver, options: SaveOptions, last: Coordinator) -> None:
        self._saver, self._coordinator, self._options, self._last = saver, saver.channels.main, options, last
        self._frozen_params = saver.frozen_params.copy()
        self._publication: Publication | None = None
        self._contents: ManifestContents | None = None
        self._plan: PlanCache | None = None
        self._local_plan: LocalSavePlan | None = None
        self._new_rank_plan: RankSavePlan | None = None
        self._place = ""
        self._part = PartialManifest((), ())
        self._flattened = FlattenedState()
        self._model: Path | None = None
        self._save_id = ""
        self._rank_plan = RankSavePlan((), {})
        self._staged = StagedWrites()
        self._hints = NO_BASE
        self._base_dedup: BaseDedup | None = None

    @contextmanager
    def rollback_on_error(self) -> Iterator[None]:
        """Remove the files of this rank if the block fails."""
        try:
            yield
        except BaseException:
            self.rollback()
            raise

    def rollback(self) -> None:
        """Remove the files of this rank."""
        publication, self._publication = self._publication, None
        if publication is not None:
            publication.rollback()

    def leave(self) -> None:
        """Remove the files of this rank, and count the other ranks as lost, which go on without it."""
        self._coordinator.leave()
        self.rollback()

    @property
    def arrays(self) -> Mapping[Path, TensorShards]:
        """What lies here: views, valid until the state changes or `release_state` is called."""
        return self._flattened.arrays

    def release_state(self) -> None:
        """Forget the state: all that is saved of it has been copied."""
        self._flattened = FlattenedState()

    def plan(self, state: Any, refusal: Exception | None = None) -> None:
        """Flatten the state, plan with the other ranks, start the publication. Collective.

        Args:
            state: As `save` takes it.
            refusal: Why this rank does not save; it is sent to all.
        """
        answer = self._exchange_plan(state, refusal)
        self._save_id, self._model = answer.save, self._flattened.model if self._coordinator.size == 1 else None
        self._new_rank_plan, self._place = answer.rank_plan, answer.place
        self._hints = answer.hints
        if self._hints.url:
            self._model = None  # a folder that lacks tensors is none of Hugging Face

    def stage(self) -> StagedWrites:
        """Return the files that this rank writes, and digests of its replicated data, as it is now."""
        self._rank_plan = self._get_rank_plan()
        if self._publication is None:
            self._publication = JoinedPublication(self._place)
        carry = self._contents.carried() if self._contents is not None else None
        self._frozen_params.compare(self._rank_plan.frozen, self._hints, self._flattened, self._options.base_key_map)
        unchanged = self._hints.unchanged(self._rank_plan.chunks, self.arrays)
        kept = set(unchanged)
        chunks = [chunk for at, chunk in enumerate(self._rank_plan.chunks) if at not in kept]
        payloads = lay_out(self._save_id, self._coordinator.rank, chunks, model=self._model, carry=carry)
        return StagedWrites(payloads, self._replicas() if self._options.checksums else {}, unchanged)

    def contents(self, payload: PayloadFile) -> Iterator[memoryview]:
        """Yield the bytes of a file, as they lie in memory now."""
        return contents(payload, self.arrays)

    def write(self, staged: StagedWrites, source: Source) -> bytes:
        """Write this rank's files, and return the message for `commit`.

        Args:
            staged: The files.
            source: Returns their contents.
        """
        assert self._publication is not None
        options, digests = self._options, self._options.store_digests
        written = write_payloads(
            self._publication, staged.payloads, source, checksums=options.checksums, digests=digests
        )
        if (
            self._model is not None and not self._publication.unique_suffix
        ):  # an old index has to stay as long as its files
            self._write_index(staged.payloads, self._model)
        self._staged = staged
        blocks = self._hints.hashed_share(self._coordinator.rank, self._coordinator.size)
        head = json.dumps([staged.replica_group_digests(), staged.unchanged, blocks]).encode()
        if self._coordinator.rank == 0:
            self._part = build_partial(written)
        return len(head).to_bytes(8, "little") + head + (encode_partial(written) if self._coordinator.rank else b"")

    def commit(self, message: bytes | Exception) -> None:
        """Publish and commit the files of all ranks. Collective; an error on one rank is raised on all.

        Args:
            message: As `write` returned it, or its error.
        """
        what = f"saving to {self._options.path}"
        answer = self._last.coordinate(what, message, self._publish)
        if answer == _EXPLAIN:
            self._last.coordinate(what, json.dumps(self._staged.replica_digests()).encode(), _raise_replicas)
        if answer == _BASE_REMOVED:
            raise BaseRemovedError(
                "the base was removed or replaced by another process during the save, which was taken back",
                where=self._options.path,
                found=self._hints.url,
                fix="Save again.",
            )
        self._update_caches()

    def _exchange_plan(self, state: Any, refusal: Exception | None) -> PlanResponse:
        """Flatten the state, send the report of it, and receive the plan of this rank."""
        if self._coordinator.size == 1:
            _raise(refusal)
            self._flattened = flatten_state(state, 0, 1)
            plan = create_single_rank_plan(self._flattened, trainable_only=self._options.trainable_only)
            return self._begin(PlanCache("", (), plan), [build_report(self._flattened)])[0]
        what = f"preparing to save to {self._options.path}"

        def report() -> bytes:
            _raise(refusal)
            self._flattened = flatten_state(state, self._coordinator.rank, self._coordinator.size)
            self._local_plan = create_local_plan(self._flattened, trainable_only=self._options.trainable_only)
            return self._report().encode()

        answer = self._coordinator.coordinate(what, capture_error(report), self._decide)
        if answer == _LOCAL_PLANS_NEEDED:
            self._saver.forget()
            answer = self._coordinator.coordinate(what, capture_error(lambda: self._report().encode()), self._decide)
        if answer == _EXPLAIN:
            self._coordinator.coordinate(what, value_digests(self._flattened), _raise_values)
        return PlanResponse.decode(answer)

    def _report(self) -> RankReport:
        """Return the first message of this rank, with its local plan where that is not the cached one."""
        assert self._local_plan is not None
        report = replace(build_report(self._flattened), values=values_digest(self._flattened), path=self._options.path)
        cache = self._saver.rank_plan_cache
        if cache is not None and cache.local_plan == self._local_plan:
            return replace(report, cached=cache.save)
        return replace(report, local_plan=self._local_plan.encode())

    def _decide(self, messages: list[bytes]) -> list[bytes]:
        """Plan, and start the publication. On rank 0."""
        reports = [RankReport.decode(each) for each in messages]
        require_one_path(reports)
        if len({report.values for report in reports}) > 1:
            return [_EXPLAIN] * len(messages)
        known = self._saver.plan_cache
        if known is not None and is_cached(reports, known):
            return [replace(answer, rank_plan=None).encode() for answer in self._begin(known, reports)]
        local_plans = collect_local_plans(reports, known)
        if local_plans is None:
            return [_LOCAL_PLANS_NEEDED] * len(messages)
        return [
            answer.encode()
            for answer in self._begin(PlanCache("", local_plans, create_global_plan(local_plans)), reports)
        ]

    def _begin(self, planned: PlanCache, reports: Sequence[RankReport]) -> list[PlanResponse]:
        """Start the publication, and return the answer to each rank."""
        save_id = new_save_id()
        plan = planned.plan
        self._plan = planned if planned.save else replace(planned, save=save_id)
        self._base_dedup = self._open_base(plan)
        self._contents = build_contents(save_id, self._flattened, plan, reports, self._options.custom_metadata)
        kept = read_referred_files(self._options.path) if self._options.overwrite else ()
        self._publication = begin(
            self._options.path,
            STEP,
            overwrite=self._options.overwrite,
            needed_bytes=plan.nbytes,
            last=COMMIT,
            prefix=save_id,
            keep=kept,
        )
        place = self._publication.staging_url
        if self._base_dedup is None:
            return [PlanResponse(save_id, place, rank_plan) for rank_plan in plan.rank_plans]
        self._base_dedup.ask_for_hashes(self._frozen_params.hashes)
        return [
            PlanResponse(save_id, place, rank_plan, self._base_dedup.for_rank(rank_plan))
            for rank_plan in plan.rank_plans
        ]

    def _open_base(self, plan: GlobalSavePlan) -> BaseDedup | None:
        """Open the base; where it has gone since it was chosen, the one that is chosen now."""
        options, url = self._options, self._options.base()
        while True:
            try:
                return open_base_dedup(
                    url, options.path, options.base_key_map, plan, trainable_only=options.trainable_only
                )
            except (CheckpointError, MissingFileError, SourceNotFoundError, UnknownFormatError):
                now = options.base()
                if now == url:
                    raise
                url = now

    def _get_rank_plan(self) -> RankSavePlan:
        """Return the plan of this rank: the one it received, or the one it has cached."""
        if self._new_rank_plan is not None:
            return self._new_rank_plan
        assert self._saver.rank_plan_cache is not None, "a rank that has no plan cached receives one"
        return self._saver.rank_plan_cache.rank_plan

    def _update_caches(self) -> None:
        """Cache the plan of this save: all ranks have committed it."""
        self._saver.frozen_params = self._frozen_params
        if self._local_plan is None or self._new_rank_plan is None:
            return  # one rank alone, or a plan that is kept already
        self._saver.rank_plan_cache = RankPlanCache(self._save_id, self._local_plan, self._new_rank_plan)
        if self._coordinator.rank == 0:
            self._saver.plan_cache = self._plan

    def _write_index(self, payloads: Sequence[PayloadFile], model: Path) -> None:
        """Let one writer's save be a Hugging Face folder too."""
        assert self._publication is not None and self._contents is not None
        index = hf_index(payloads, model)
        self._write_file(HF_INDEX, index)
        record = make_record(HF_INDEX, index, checksums=self._options.checksums)
        self._contents = replace(self._contents, files=(record,))

    def _write_file(self, name: str, data: bytes) -> None:
        assert self._publication is not None
        with self._publication.create(name) as writer:
            writer.write(data)

    def _publish(self, messages: list[bytes]) -> list[bytes]:
        """Compare replicas, commit, publish. On rank 0."""
        assert self._contents is not None and self._plan is not None and self._publication is not None
        heads, parts = [], [self._part]
        for rank, each in enumerate(messages):
            end = 8 + int.from_bytes(each[:8], "little")
            heads.append(json.loads(each[8:end]))
            if rank:
                parts.append(decode_partial(each[end:], where=f"rank {rank}"))
        digests, unchanged, blocks = zip(*heads, strict=True)
        if _has_unequal_replicas(self._plan.plan, digests):
            return [_EXPLAIN] * len(messages)
        if self._base_dedup is not None:
            parts.append(self._base_dedup.part(unchanged, blocks, self._frozen_params.hashes))
        files, arrays = merge_partials(parts, self._plan.plan.order)
        bases = self._base_dedup.bases(files) if self._base_dedup is not None else ()
        whole = replace(self._contents, files=(*files, *self._contents.files), arrays=arrays, bases=bases)
        manifest = encode_manifest(whole)
        self._write_file(manifest_name(whole.save), manifest)
        own = {**_sizes(self._contents.files), manifest_name(whole.save): len(manifest)}
        first, *others = [_sizes(part.files) for part in parts[: len(messages)]]
        require_files(self._options.path, self._publication.staging_url, [{**first, **own}, *others])
        # From here on whoever removes the base sees the manifest, and leaves what it refers to.
        if self._base_dedup is not None and not self._base_dedup.is_kept(files):
            return [_BASE_REMOVED] * len(messages)
        self._write_file(COMMIT, encode_commit(whole.save, manifest, whole.files, read_branch(whole.about)))
        self._publication.commit()
        return [b""] * len(messages)

    def _replicas(self) -> dict[int, tuple[Replica, ...]]:
        """Return the boxes of each replica group that this rank is in, by its number."""
        items = list(self.arrays.items())
        return {
            number: tuple(_replica(*items[at], which) for at, which in positions)
            for number, positions in self._rank_plan.replica_groups.items()
        }


def _sizes(files: Iterable[FileRecord]) -> dict[str, int]:
    return {each.name: each.nbytes for each in files}


def _replica(path: Path, array: TensorShards, which: int) -> Replica:
    box, tensor = array.shards[which]
    digest = xxhash.xxh3_128()
    for part in tensor_bytes(tensor):
        digest.update(part)
    return Replica(path, None if box.size == array.shape else box, digest.digest())


def _raise(refusal: Exception | None) -> None:
    if refusal is not None:
        raise refusal


_EXPLAIN = b"explain"
_BASE_REMOVED = b"base removed"
_LOCAL_PLANS_NEEDED = b"local plans"


def _has_unequal_replicas(plan: GlobalSavePlan, digests: Sequence[Mapping[str, str]]) -> bool:
    """Return True if the ranks of a replica group hold different data."""
    return any(
        len({digests[rank].get(str(number)) for rank in ranks}) > 1 for number, ranks in enumerate(plan.replica_groups)
    )


def _raise_values(messages: list[bytes]) -> list[bytes]:
    values, containers = zip(*map(json.loads, messages), strict=True)
    raise build_mismatch_error(values, containers)


def _raise_replicas(messages: list[bytes]) -> list[bytes]:
    """Raise the error that names the arrays; a rank that does not hold one has no say."""
    found = [json.loads(each) for each in messages]
    first = {name: digest for each in reversed(found) for name, digest in each.items()}
    raise build_mismatch_error(
        [{name: (digest, "tensor", "") for name, digest in {**first, **each}.items()} for each in found]
    )
