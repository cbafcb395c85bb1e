"""The corridor of a save. Ranks speak twice on their way through it; whatever goes wrong on one is raised on all."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import xxhash

from shardckpt.boxes import Box
from shardckpt.checkpoint.channels import Channels
from shardckpt.checkpoint.incremental.base_checkpoint import BaseRemovedError
from shardckpt.checkpoint.incremental.dedup import NO_GROUNDS, Compared, Ground, Grounds, ground_of
from shardckpt.checkpoint.planning.manifest_builder import contents_of
from shardckpt.checkpoint.planning.plan_cache import PlanCache, TaskCache, collect_drafts, is_cached
from shardckpt.checkpoint.planning.rank_report import (
    Report,
    differing,
    own_report,
    require_one_path,
    value_digests,
    values_digest,
)
from shardckpt.checkpoint.planning.save_plan import Draft, Plan, Task, draft_of, plan_alone, plan_of
from shardckpt.checkpoint.save.payload_writer import Source, contents, write_payloads
from shardckpt.checkpoint.stateful.flatten import Captured, capture
from shardckpt.checkpoint.stateful.tensor_bytes import tensor_bytes
from shardckpt.errors import CheckpointError, MissingFileError, SourceNotFoundError, UnknownFormatError
from shardckpt.format.native.commit import COMMIT, STEP, branch_of, encode_commit, manifest_name
from shardckpt.format.native.manifest_json import ManifestContents, encode_manifest
from shardckpt.format.native.partial_manifest import (
    PartialManifest,
    build_partial,
    decode_partial,
    encode_partial,
    merge_partials,
)
from shardckpt.format.native.payload import HF_INDEX, PayloadFile, hf_index, lay_out, new_save_id
from shardckpt.format.native.records import FileRecord, record_of
from shardckpt.format.native.run_directory import files_of_others
from shardckpt.gc_pause import gc_paused
from shardckpt.groups import Coordinator
from shardckpt.manifest import Path, dotted
from shardckpt.state.local.local_shards import TensorShards
from shardckpt.storage.presence import require_files
from shardckpt.storage.publication import Publication
from shardckpt.storage.publish import JoinedPublication, begin


@dataclass(frozen=True)
class How:
    """In which way to save.

    Attributes:
        path: The target.
        overwrite: Replace one checkpoint of shardckpt that lies there.
        checksums: Hash blocks, compare what several ranks hold.
        about: Free text for the manifest.
        base: Returns which checkpoint to refer to, when the save begins; None or an empty text for none. Asked on the
            first rank.
        digests: Hash chunks, so that a later save can refer to this one.
        trainable_only: Refer to the base for all frozen parameters.
        base_rules: Regular expressions to what stands for them, from a model's names to those of the base.
    """

    path: str
    overwrite: bool
    checksums: bool
    about: Mapping[str, str]
    base: Callable[[], str | None] = lambda: None
    digests: bool = False
    trainable_only: bool = False
    base_rules: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class _Answer:
    """What the first rank decided for one rank.

    Attributes:
        save: The save's id.
        place: Where to write.
        task: What to write; None for the cached task.
        grounds: What of that may lie in the base.
    """

    save: str
    place: str
    task: Task | None
    grounds: Grounds = NO_GROUNDS

    def encode(self) -> bytes:
        """Return it as bytes."""
        head = json.dumps([self.save, self.place, self.task is not None, self.grounds.json()]).encode()
        return len(head).to_bytes(8, "little") + head + (self.task.encode() if self.task else b"")

    @classmethod
    def decode(cls, data: bytes) -> _Answer:
        """Return what `encode` wrote."""
        end = 8 + int.from_bytes(data[:8], "little")
        save_id, place, has_task, grounds = json.loads(data[8:end])
        return cls(save_id, place, Task.decode(data[end:]) if has_task else None, Grounds.of(grounds))


class Saver:
    """Saves of one group of ranks; it keeps the last committed plan, since most saves are like the one before.

    Args:
        channels: Through which the ranks send messages.

    Attributes:
        channels: As given.
        task_cache: What this rank keeps of the last committed plan.
        plan_cache: What the first rank keeps of it; None on the others.
        compared: What this rank found out about the bases of committed saves.
    """

    def __init__(self, channels: Channels) -> None:
        self.channels = channels
        self.task_cache: TaskCache | None = None
        self.plan_cache: PlanCache | None = None
        self.compared = Compared()

    def save(self, state: Any, how: How, refusal: Exception | None = None) -> None:
        """Save a state.

        Args:
            state: As the function of this name takes it.
            how: Where to, and in which way.
            refusal: Why this rank does not save; all are told.
        """
        try:
            self._save(state, how, refusal)
        except BaseRemovedError:
            if how.trainable_only:
                raise
            self._save(state, replace(how, base=lambda: None), refusal)

    def _save(self, state: Any, how: How, refusal: Exception | None) -> None:
        corridor = Corridor(self, how, self.channels.main)
        with gc_paused(), self.channels.main.in_step(), corridor.taken_back():
            corridor.agree(state, refusal)
            corridor.finish(attempted(lambda: corridor.transfer(corridor.cargo(), corridor.contents)))

    def forget(self) -> None:
        """Drop what is kept of the last plan."""
        self.task_cache = self.plan_cache = None


class Replica(NamedTuple):
    """What several ranks hold.

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
class Cargo:
    """What a rank is to write, and what it says of what others hold too.

    Attributes:
        payloads: Its files.
        replicas: By number of a class of ranks that hold the same: what they do.
        unchanged: Positions of the chunks of its task that lie in the base.
    """

    payloads: tuple[PayloadFile, ...] = ()
    replicas: Mapping[int, Sequence[Replica]] = field(default_factory=dict)
    unchanged: tuple[int, ...] = ()

    def class_digests(self) -> dict[str, str]:
        """Return one digest for each class of ranks."""
        return {str(number): _digest(each.digest for each in held) for number, held in self.replicas.items()}

    def replica_digests(self) -> dict[str, str]:
        """Return one digest for each thing that others hold too, by its name."""
        return {each.name: each.digest.hex() for held in self.replicas.values() for each in held}


def _digest(parts: Iterable[bytes]) -> str:
    return hashlib.blake2b(b"".join(parts), digest_size=16).hexdigest()


def attempted(work: Callable[[], bytes]) -> bytes | Exception:
    """Return what some work gives, or how it failed: whichever it is, the ranks are told."""
    try:
        return work()
    except Exception as error:  # noqa: BLE001  (told to every rank, then raised)
        return error


class Corridor:
    """One save on one rank: `agree`, `cargo`, `transfer`, `finish`, the last two on whatever thread.

    Args:
        saver: Whose.
        how: Where to, and in which way.
        last: The channels of the last round; nobody else speaks through them until this save is over.
    """

    def __init__(self, saver: Saver, how: How, last: Coordinator) -> None:
        self._saver, self._coordinator, self._how, self._last = saver, saver.channels.main, how, last
        self._compared = saver.compared.copy()
        self._publication: Publication | None = None
        self._contents: ManifestContents | None = None
        self._plan: PlanCache | None = None
        self._draft: Draft | None = None
        self._new_task: Task | None = None
        self._place = ""
        self._part = PartialManifest((), ())
        self._captured = Captured()
        self._model: Path | None = None
        self._save_id = ""
        self._task = Task((), {})
        self._cargo = Cargo()
        self._grounds = NO_GROUNDS
        self._ground: Ground | None = None

    @contextmanager
    def taken_back(self) -> Iterator[None]:
        """Remove what this rank wrote where the block fails."""
        try:
            yield
        except BaseException:
            self.take_back()
            raise

    def take_back(self) -> None:
        """Remove what this rank wrote."""
        publication, self._publication = self._publication, None
        if publication is not None:
            publication.rollback()

    def leave(self) -> None:
        """Remove what this rank wrote, and count the other ranks as lost, which go on without it."""
        self._coordinator.leave()
        self.take_back()

    @property
    def arrays(self) -> Mapping[Path, TensorShards]:
        """What lies here: views, valid until the state changes or `let_go` is called."""
        return self._captured.arrays

    def let_go(self) -> None:
        """Forget the state: all that is needed of it has been copied."""
        self._captured = Captured()

    def agree(self, state: Any, refusal: Exception | None = None) -> None:
        """Look at the state, plan with the others, begin. Collective.

        Args:
            state: As `save` takes it.
            refusal: Why this rank does not save; all are told.
        """
        answer = self._agree(state, refusal)
        self._save_id, self._model = answer.save, self._captured.model if self._coordinator.size == 1 else None
        self._new_task, self._place = answer.task, answer.place
        self._grounds = answer.grounds
        if self._grounds.url:
            self._model = None  # a folder that lacks tensors is none of Hugging Face

    def cargo(self) -> Cargo:
        """Return what this rank is to write, and digests of what it shares with others, as it is now."""
        self._task = self._given_task()
        if self._publication is None:
            self._publication = JoinedPublication(self._place)
        carry = self._contents.carried() if self._contents is not None else None
        self._compared.compare(self._task.frozen, self._grounds, self._captured, self._how.base_rules)
        unchanged = self._grounds.unchanged(self._task.chunks, self.arrays)
        kept = set(unchanged)
        chunks = [chunk for at, chunk in enumerate(self._task.chunks) if at not in kept]
        payloads = lay_out(self._save_id, self._coordinator.rank, chunks, model=self._model, carry=carry)
        return Cargo(payloads, self._replicas() if self._how.checksums else {}, unchanged)

    def contents(self, payload: PayloadFile) -> Iterator[memoryview]:
        """Yield the bytes of a file, as they lie in memory now."""
        return contents(payload, self.arrays)

    def transfer(self, cargo: Cargo, source: Source) -> bytes:
        """Write this rank's files, and return what to tell of them.

        Args:
            cargo: What to write.
            source: Gives the contents.
        """
        assert self._publication is not None
        how, digests = self._how, self._how.digests
        written = write_payloads(self._publication, cargo.payloads, source, checksums=how.checksums, digests=digests)
        if (
            self._model is not None and not self._publication.unique_suffix
        ):  # an old index has to stay as long as its files
            self._write_index(cargo.payloads, self._model)
        self._cargo = cargo
        blocks = self._grounds.hashed_share(self._coordinator.rank, self._coordinator.size)
        head = json.dumps([cargo.class_digests(), cargo.unchanged, blocks]).encode()
        if self._coordinator.rank == 0:
            self._part = build_partial(written)
        return len(head).to_bytes(8, "little") + head + (encode_partial(written) if self._coordinator.rank else b"")

    def finish(self, said: bytes | Exception) -> None:
        """Publish what all wrote. Collective; what goes wrong on one rank is raised on all.

        Args:
            said: What `transfer` returned, or how it failed.
        """
        what = f"saving to {self._how.path}"
        told = self._last.coordinate(what, said, self._publish)
        if told == _EXPLAIN:
            self._last.coordinate(what, json.dumps(self._cargo.replica_digests()).encode(), _raise_replicas)
        if told == _BASE_REMOVED:
            raise BaseRemovedError(
                "the base was removed or replaced by another process during the save, which was taken back",
                where=self._how.path,
                found=self._grounds.url,
                fix="Save again.",
            )
        self._remember()

    def _agree(self, state: Any, refusal: Exception | None) -> _Answer:
        """Look at the state, tell of it, and be told what to write."""
        if self._coordinator.size == 1:
            _raise(refusal)
            self._captured = capture(state, 0, 1)
            plan = plan_alone(self._captured, trainable_only=self._how.trainable_only)
            return self._begun(PlanCache("", (), plan), [own_report(self._captured)])[0]
        what = f"preparing to save to {self._how.path}"

        def report() -> bytes:
            _raise(refusal)
            self._captured = capture(state, self._coordinator.rank, self._coordinator.size)
            self._draft = draft_of(self._captured, trainable_only=self._how.trainable_only)
            return self._report().encode()

        told = self._coordinator.coordinate(what, attempted(report), self._decide)
        if told == _DRAFTS_NEEDED:
            self._saver.forget()
            told = self._coordinator.coordinate(what, attempted(lambda: self._report().encode()), self._decide)
        if told == _EXPLAIN:
            self._coordinator.coordinate(what, value_digests(self._captured), _raise_values)
        return _Answer.decode(told)

    def _report(self) -> Report:
        """Return what this rank tells first: its draft only where that is not the cached one."""
        assert self._draft is not None
        report = replace(own_report(self._captured), values=values_digest(self._captured), path=self._how.path)
        cache = self._saver.task_cache
        if cache is not None and cache.draft == self._draft:
            return replace(report, cached=cache.save)
        return replace(report, draft=self._draft.encode())

    def _decide(self, told: list[bytes]) -> list[bytes]:
        """Plan, and begin the publication. On the first rank."""
        reports = [Report.decode(each) for each in told]
        require_one_path(reports)
        if len({report.values for report in reports}) > 1:
            return [_EXPLAIN] * len(told)
        known = self._saver.plan_cache
        if known is not None and is_cached(reports, known):
            return [replace(answer, task=None).encode() for answer in self._begun(known, reports)]
        drafts = collect_drafts(reports, known)
        if drafts is None:
            return [_DRAFTS_NEEDED] * len(told)
        return [answer.encode() for answer in self._begun(PlanCache("", drafts, plan_of(drafts)), reports)]

    def _begun(self, planned: PlanCache, reports: Sequence[Report]) -> list[_Answer]:
        """Begin the publication, and return what each rank is to do."""
        save_id = new_save_id()
        plan = planned.plan
        self._plan = planned if planned.save else replace(planned, save=save_id)
        self._ground = self._open_ground(plan)
        self._contents = contents_of(save_id, self._captured, plan, reports, self._how.about)
        kept = files_of_others(self._how.path) if self._how.overwrite else ()
        self._publication = begin(
            self._how.path,
            STEP,
            overwrite=self._how.overwrite,
            needed_bytes=plan.nbytes,
            last=COMMIT,
            prefix=save_id,
            keep=kept,
        )
        place = self._publication.staging_url
        if self._ground is None:
            return [_Answer(save_id, place, task) for task in plan.tasks]
        self._ground.ask_for_hashes(self._compared.hashes)
        return [_Answer(save_id, place, task, self._ground.for_rank(task)) for task in plan.tasks]

    def _open_ground(self, plan: Plan) -> Ground | None:
        """Look at the base; where it has gone since it was chosen, at the one that is chosen now."""
        how, url = self._how, self._how.base()
        while True:
            try:
                return ground_of(url, how.path, how.base_rules, plan, trainable_only=how.trainable_only)
            except (CheckpointError, MissingFileError, SourceNotFoundError, UnknownFormatError):
                now = how.base()
                if now == url:
                    raise
                url = now

    def _given_task(self) -> Task:
        """Return what this rank is to write: what it was given, or what it has cached."""
        if self._new_task is not None:
            return self._new_task
        assert self._saver.task_cache is not None, "a rank that has no task cached is given one"
        return self._saver.task_cache.task

    def _remember(self) -> None:
        """Keep what this save found out: all ranks have committed it."""
        self._saver.compared = self._compared
        if self._draft is None or self._new_task is None:
            return  # one rank alone, or a plan that is kept already
        self._saver.task_cache = TaskCache(self._save_id, self._draft, self._new_task)
        if self._coordinator.rank == 0:
            self._saver.plan_cache = self._plan

    def _write_index(self, payloads: Sequence[PayloadFile], model: Path) -> None:
        """Let one writer's save be a Hugging Face folder too."""
        assert self._publication is not None and self._contents is not None
        index = hf_index(payloads, model)
        self._write(HF_INDEX, index)
        record = record_of(HF_INDEX, index, checksums=self._how.checksums)
        self._contents = replace(self._contents, files=(record,))

    def _write(self, name: str, data: bytes) -> None:
        assert self._publication is not None
        with self._publication.create(name) as writer:
            writer.write(data)

    def _publish(self, told: list[bytes]) -> list[bytes]:
        """Compare, commit, put in place. On the first rank."""
        assert self._contents is not None and self._plan is not None and self._publication is not None
        heads, parts = [], [self._part]
        for rank, each in enumerate(told):
            end = 8 + int.from_bytes(each[:8], "little")
            heads.append(json.loads(each[8:end]))
            if rank:
                parts.append(decode_partial(each[end:], where=f"rank {rank}"))
        digests, unchanged, blocks = zip(*heads, strict=True)
        if _unequal(self._plan.plan, digests):
            return [_EXPLAIN] * len(told)
        if self._ground is not None:
            parts.append(self._ground.part(unchanged, blocks, self._compared.hashes))
        files, arrays = merge_partials(parts, self._plan.plan.order)
        bases = self._ground.bases(files) if self._ground is not None else ()
        whole = replace(self._contents, files=(*files, *self._contents.files), arrays=arrays, bases=bases)
        manifest = encode_manifest(whole)
        self._write(manifest_name(whole.save), manifest)
        own = {**_sizes(self._contents.files), manifest_name(whole.save): len(manifest)}
        first, *others = [_sizes(part.files) for part in parts[: len(told)]]
        require_files(self._how.path, self._publication.staging_url, [{**first, **own}, *others])
        # From here on whoever removes the base sees the manifest, and leaves what it refers to.
        if self._ground is not None and not self._ground.is_kept(files):
            return [_BASE_REMOVED] * len(told)
        self._write(COMMIT, encode_commit(whole.save, manifest, whole.files, branch_of(whole.about)))
        self._publication.commit()
        return [b""] * len(told)

    def _replicas(self) -> dict[int, tuple[Replica, ...]]:
        """Return by number of a class of ranks that hold the same what they do."""
        items = list(self.arrays.items())
        return {
            number: tuple(_replica(*items[at], which) for at, which in positions)
            for number, positions in self._task.classes.items()
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
_DRAFTS_NEEDED = b"drafts"


def _unequal(plan: Plan, digests: Sequence[Mapping[str, str]]) -> bool:
    """Tell whether ranks that claim to hold the same do not."""
    return any(len({digests[rank].get(str(number)) for rank in ranks}) > 1 for number, ranks in enumerate(plan.classes))


def _raise_values(told: list[bytes]) -> list[bytes]:
    values, containers = zip(*map(json.loads, told), strict=True)
    raise differing(values, containers)


def _raise_replicas(told: list[bytes]) -> list[bytes]:
    """Raise the error that names the arrays; a rank that does not hold one has no say."""
    found = [json.loads(each) for each in told]
    first = {name: digest for each in reversed(found) for name, digest in each.items()}
    raise differing([{name: (digest, "tensor", "") for name, digest in {**first, **each}.items()} for each in found])
