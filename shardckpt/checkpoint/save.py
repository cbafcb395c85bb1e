"""`save`: capture, plan, transfer, publish. Ranks speak twice; whatever goes wrong on one is raised on all."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
import xxhash

from shardckpt.checkpoint.assemble import contents_of
from shardckpt.checkpoint.capture import Captured, capture
from shardckpt.checkpoint.collecting import collector_at_rest
from shardckpt.checkpoint.draft import Draft, Plan, Task, draft_of, key_of, plan_alone, plan_of
from shardckpt.checkpoint.report import Alone, Report, differing, value_digests, values_digest
from shardckpt.checkpoint.transfer import tensor_bytes, write_payloads
from shardckpt.format.native_manifest import (
    COMMIT,
    Contents,
    Part,
    decode_part,
    encode_commit,
    encode_manifest,
    encode_part,
    join,
    manifest_name,
    part_of,
    record_of,
)
from shardckpt.format.native_payload import HF_INDEX, Payload, hf_index, lay_out, new_save_id
from shardckpt.groups import Star, new_star
from shardckpt.manifest import Path, dotted
from shardckpt.storage.joined_publication import JoinedPublication
from shardckpt.storage.open_store import local_path
from shardckpt.storage.publication import Publication
from shardckpt.storage.publish import begin


def save(
    state: Any,
    path: str,
    *,
    overwrite: bool = False,
    checksums: bool = True,
    group: dist.ProcessGroup | None = None,
    about: Mapping[str, str] | None = None,
) -> None:
    """Save what a training run holds. Collective: every rank of the group calls it with its own state.

    Nothing lies under `path` before all of it is there and safe; what lay there before stays until then.

    Args:
        state: Models, optimizers, anything with `state_dict` and `load_state_dict`, tensors, plain values, in dicts and
            lists of any depth. Tensors that are no DTensors, and plain values, are the same on every rank.
        path: The folder to become the checkpoint, or a URL that fsspec knows.
        overwrite: Replace a checkpoint that lies there.
        checksums: Store a hash of every 4 MiB block, and make sure that what several ranks hold is the same.
        group: The ranks that save; all where None.
        about: Free text by name, kept in the manifest.

    Raises:
        TargetExistsError: Something lies there and `overwrite` is false.
        UnsupportedError: Something in the state cannot be saved; the message names its dotted path.
        UsageError: A value differs between ranks.
        RankError: Another rank failed or is gone; the message names it.
        StorageError: The storage failed. Whatever was written is gone again.
    """
    how = How(str(path), overwrite, checksums, dict(about or {}))
    _saver_of(group).save(state, how)


@dataclass(frozen=True)
class How:
    """In which way to save.

    Attributes:
        path: The target.
        overwrite: Replace what lies there.
        checksums: Hash blocks, compare what several ranks hold.
        about: Free text for the manifest.
    """

    path: str
    overwrite: bool
    checksums: bool
    about: Mapping[str, str]


@dataclass(frozen=True)
class _Answer:
    """What the first rank decided for one rank.

    Attributes:
        save: The save's id; empty where the rank is to explain its values.
        place: Where to write.
        task: What to write; None for what it wrote last time.
    """

    save: str
    place: str
    task: Task | None

    def encode(self) -> bytes:
        """Return it as bytes."""
        head = json.dumps([self.save, self.place, self.task is not None]).encode()
        return len(head).to_bytes(8, "little") + head + (self.task.encode() if self.task else b"")

    @classmethod
    def decode(cls, data: bytes) -> _Answer:
        """Return what `encode` wrote."""
        end = 8 + int.from_bytes(data[:8], "little")
        save_id, place, has_task = json.loads(data[8:end])
        return cls(save_id, place, Task.decode(data[end:]) if has_task else None)


class Saver:
    """Saves of one group of ranks; it remembers the last plan, since most saves are like the one before.

    Args:
        star: The ranks.
    """

    def __init__(self, star: Star) -> None:
        self.star = star
        self._draft: Draft | None = None
        self._key = ""
        self._task: tuple[str, Task] | None = None
        self._drafts: dict[int, tuple[str, Draft]] = {}
        self._plan: tuple[tuple[str, ...], Plan] | None = None

    def save(self, state: Any, how: How) -> None:
        """Save a state.

        Args:
            state: As the function of this name takes it.
            how: Where to, and in which way.
        """
        corridor = _Corridor(self, how)
        try:
            with collector_at_rest():
                corridor.run(state)
        except BaseException:
            corridor.take_back()
            raise

    # What the corridor asks: plans, known or made.

    def report(self, captured: Captured) -> Report:
        """Return what this rank tells first: its draft only where the first rank does not know it."""
        draft = draft_of(captured)
        data = b""
        if draft != self._draft:
            data = draft.encode()
            self._draft, self._key = draft, key_of(data)
        if self._task is not None and self._task[0] == self._key:
            data = b""
        elif not data:
            data = draft.encode()
        return replace(self.told_of(captured), key=self._key, draft=data, values=values_digest(captured))

    def told_of(self, captured: Captured) -> Report:
        """Return what this rank alone can tell."""
        loose = {path: Alone.of(value, path) for path, value in captured.loose.items()}
        own = {path: Alone.of(value, path) for path, value in captured.own.items()}
        return Report("", b"", "", loose, own)

    def planned(self, reports: Sequence[Report]) -> tuple[Plan, bool]:
        """Return the plan for what ranks told, and whether it is the one they know. On the first rank."""
        for rank, report in enumerate(reports):
            if report.draft:
                self._drafts[rank] = (report.key, Draft.decode(report.draft))
        keys = tuple(report.key for report in reports)
        if self._plan is not None and self._plan[0] == keys and not any(report.draft for report in reports):
            return self._plan[1], True
        plan = plan_of([self._drafts[rank][1] for rank in range(len(reports))])
        self._plan = (keys, plan)
        return plan, False

    def task(self, given: Task | None) -> Task:
        """Return what this rank is to write, and remember it."""
        if given is not None:
            self._task = (self._key, given)
        assert self._task is not None, "a rank without a plan is given one"
        return self._task[1]


class _Corridor:
    """One save on one rank.

    Args:
        saver: Whose.
        how: Where to, and in which way.
    """

    def __init__(self, saver: Saver, how: How) -> None:
        self._saver, self._star, self._how = saver, saver.star, how
        self._publication: Publication | None = None
        self._contents: Contents | None = None
        self._plan: Plan | None = None
        self._part = Part((), ())
        self._captured = Captured()

    def take_back(self) -> None:
        """Remove what this rank wrote, unless it may be a part of what the first rank has put in place."""
        if self._publication is not None and not (
            self._star.is_lost and self._star.rank and _is_remote(self._how.path)
        ):
            self._publication.drop()

    def run(self, state: Any) -> None:
        """Go through the corridor."""
        answer = self._agree(state)
        task = self._saver.task(answer.task)
        if self._publication is None:
            self._publication = JoinedPublication(answer.place)
        try:
            said: bytes | Exception = self._transfer(answer.save, task)
        except Exception as error:  # noqa: BLE001  (told to every rank, then raised)
            said = error
        told = self._star.consult(f"saving to {self._how.path}", said, self._publish)
        if told == _EXPLAIN:
            self._star.consult(f"saving to {self._how.path}", self._replica_digests(task), _raise_replicas)

    def _agree(self, state: Any) -> _Answer:
        """Look at the state, tell of it, and be told what to write."""
        if self._star.size == 1:
            self._captured = capture(state, 0, 1)
            return self._begun(plan_alone(self._captured), [self._saver.told_of(self._captured)])[0]
        what = f"preparing to save to {self._how.path}"
        try:
            self._captured = capture(state, self._star.rank, self._star.size)
            said: bytes | Exception = self._saver.report(self._captured).encode()
        except Exception as error:  # noqa: BLE001  (as above)
            said = error
        answer = _Answer.decode(self._star.consult(what, said, self._decide))
        if not answer.save:
            self._star.consult(what, value_digests(self._captured), _raise_values)
        return answer

    def _decide(self, told: list[bytes]) -> list[bytes]:
        """Plan, and begin the publication. On the first rank."""
        reports = [Report.decode(each) for each in told]
        if len({report.values for report in reports}) > 1:
            return [_Answer("", "", None).encode()] * len(told)
        plan, is_known = self._saver.planned(reports)
        answers = self._begun(plan, reports)
        return [(replace(answer, task=None) if is_known else answer).encode() for answer in answers]

    def _begun(self, plan: Plan, reports: Sequence[Report]) -> list[_Answer]:
        """Begin the publication, and return what each rank is to do."""
        save_id = new_save_id()
        self._plan = plan
        self._contents = contents_of(save_id, self._captured, plan, reports, self._how.about)
        self._publication = begin(self._how.path, overwrite=self._how.overwrite, needed_bytes=plan.nbytes, last=COMMIT)
        place = self._publication.place
        return [_Answer(save_id, place, task) for task in plan.tasks]

    def _transfer(self, save_id: str, task: Task) -> bytes:
        """Write this rank's files, and return what to tell of them."""
        assert self._publication is not None
        alone = self._captured.model if self._star.size == 1 else None
        carry = self._contents.carried() if self._contents is not None else None
        payloads = lay_out(save_id, self._star.rank, task.chunks, model=alone, carry=carry)
        written = write_payloads(self._publication, payloads, self._captured.arrays, checksums=self._how.checksums)
        if alone is not None:
            self._write_index(payloads, alone)
        digests = self._class_digests(task) if self._how.checksums else {}
        head = json.dumps(digests).encode()
        if self._star.rank == 0:
            self._part = part_of(written)
        return len(head).to_bytes(8, "little") + head + (encode_part(written) if self._star.rank else b"")

    def _write_index(self, payloads: Sequence[Payload], model: Path) -> None:
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
        digests, parts = [], [self._part]
        for rank, each in enumerate(told):
            end = 8 + int.from_bytes(each[:8], "little")
            digests.append(json.loads(each[8:end]))
            if rank:
                parts.append(decode_part(each[end:], where=f"rank {rank}"))
        if _unequal(self._plan, digests):
            return [_EXPLAIN] * len(told)
        files, arrays = join(parts, self._plan.order)
        contents = replace(self._contents, files=(*files, *self._contents.files), arrays=arrays)
        manifest = encode_manifest(contents)
        self._write(manifest_name(contents.save), manifest)
        self._write(COMMIT, encode_commit(contents.save, manifest, contents.files))
        self._publication.finish()
        return [b""] * len(told)

    def _class_digests(self, task: Task) -> dict[str, str]:
        """Return for each class of ranks that hold the same a digest of what this one holds of it."""
        found = {}
        arrays = list(self._captured.arrays.values())
        for number, positions in task.classes.items():
            found[str(number)] = _digest_of(arrays[at].portions[which].tensor for at, which in positions)
        return found

    def _replica_digests(self, task: Task) -> bytes:
        """Return a digest of each box that other ranks hold too, by its array's name."""
        found: dict[str, str] = {}
        items = list(self._captured.arrays.items())
        for positions in task.classes.values():
            for at, which in positions:
                path, array = items[at]
                box, tensor = array.portions[which]
                name = dotted(path) + ("" if box.size == array.shape else str(box))
                found[name] = _digest_of([tensor])
        return json.dumps(found).encode()


def _digest_of(tensors: Iterable[torch.Tensor]) -> str:
    digest = xxhash.xxh3_128()
    for tensor in tensors:
        for part in tensor_bytes(tensor):
            digest.update(part)
    return digest.hexdigest()


_EXPLAIN = b"explain"


def _unequal(plan: Plan, digests: Sequence[Mapping[str, str]]) -> bool:
    """Tell whether ranks that claim to hold the same do not."""
    return any(len({digests[rank].get(str(number)) for rank in ranks}) > 1 for number, ranks in enumerate(plan.classes))


def _raise_values(told: list[bytes]) -> list[bytes]:
    raise differing([json.loads(each) for each in told])


def _raise_replicas(told: list[bytes]) -> list[bytes]:
    """Raise the error that names the arrays; a rank that does not hold one has no say."""
    found = [json.loads(each) for each in told]
    first = {name: digest for each in reversed(found) for name, digest in each.items()}
    raise differing([{**first, **each} for each in found])


def _is_remote(path: str) -> bool:
    return local_path(path) is None


_SAVERS: WeakKeyDictionary[dist.ProcessGroup, Saver] = WeakKeyDictionary()


def _saver_of(group: dist.ProcessGroup | None) -> Saver:
    """Return the saver of a group; its ranks get channels of their own at their first save. Collective then."""
    if not (dist.is_available() and dist.is_initialized()):
        return Saver(Star(None))
    given = dist.group.WORLD if group is None else group
    assert given is not None
    known = _SAVERS.get(given)
    if known is None or known.star.is_lost:
        known = _SAVERS[given] = Saver(new_star(group))
    return known


def star_of(group: dist.ProcessGroup | None) -> Star:
    """Return the channels that a group's saves and loads speak through. Collective at the first call."""
    return _saver_of(group).star
