"""`Subscriber`: receive versions of weights; each is applied entirely, or not at all."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from enum import Enum
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from shardckpt.boxes import full_box
from shardckpt.checkpoint.save.planner import capture_error
from shardckpt.encodings.typed_json import decode, encode
from shardckpt.errors import (
    PoisonedError,
    ShardckptError,
    SourceNotFoundError,
    UsageError,
    describe,
)
from shardckpt.events import OnEvent, ReceiveEvent, Recorder, record_operation, require_on_event
from shardckpt.events.recorder import enter_call
from shardckpt.events.warn_user import warn_user
from shardckpt.plan.layout.box_codec import pack_message, unpack_message
from shardckpt.ranks.linked_group import LinkedGroup
from shardckpt.ranks.process_group import get_ranks
from shardckpt.storage.resolve_url import as_url
from shardckpt.stream.format.held_boxes import place_boxes, write_elements
from shardckpt.stream.format.stream_folder import StreamFolder
from shardckpt.stream.format.stream_records import Version
from shardckpt.stream.receive.layouts import Layout, list_boxes, read_layout
from shardckpt.stream.receive.mirror import Mirror
from shardckpt.stream.receive.staged_weights import StagedWeights, stage_version, view_as_tensor
from shardckpt.stream.receive.targets import TensorChange, TensorTarget, WeightTarget, as_target, get_target_key
from shardckpt.stream.receive.version_chooser import VersionChooser, check_target, wait_for_stream
from shardckpt.stream.receive.worker_parts import build_digest_error, count_once, find_wrong_digests

__all__ = ["Staged", "Subscriber", "SubscriberState"]


_ROUND = 0.25  # of the group's timeout: how long rank 0 waits for a version before the workers ask again


class SubscriberState(Enum):
    """Whether a receiver's weights are those of one version."""

    READY = "ready"
    STAGED = "staged"  # a version is read and verified; the weights are still the old ones
    APPLYING = "applying"
    POISONED = "poisoned"  # a version was applied in part; only a full version replaces it


class _Target(NamedTuple):
    """Rank 0's choice of a version, for all workers."""

    version: Version
    is_full: bool  # whether a worker needs all weights
    doomed: tuple[Version, ...]  # versions that are being removed


class Subscriber:
    """Receives the versions of a stream, on one process or on all workers of a server.

    Every worker makes the same calls. A version is read, verified and combined while the server serves. Then all
    workers apply it, or none does.

    Args:
        url: Folder or URL of the stream.
        mirror: Folder that keeps the held version for a restart, such as one in `/dev/shm`; by default memory of this
            process. Workers share it: each has a folder in it.
        layout: Boxes that this worker holds: a function of a tensor's name and shape, which returns a `Box`, several,
            or None; or a module, whose shards count. By default every tensor in full.
        process_group: The server's workers; by default all ranks.
        on_event: Called with each `ReceiveEvent`.

    Attributes:
        url: The stream.

    Raises:
        UsageError: An argument has a wrong type.

    Examples:
        >>> subscriber = shardckpt.Subscriber("s3://bucket/stream")  # doctest: +SKIP
        >>> subscriber.stage().commit(model)  # doctest: +SKIP
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        *,
        mirror: str | os.PathLike[str] | None = None,
        layout: Layout = None,
        process_group: dist.ProcessGroup | None = None,
        on_event: OnEvent | None = None,
    ) -> None:
        if not (layout is None or callable(layout)):
            raise UsageError("`layout` must be a module or a function", found=type(layout).__name__)
        require_on_event(on_event)
        self.url = as_url(url)
        self._folder = StreamFolder(self.url)
        self._mirror_root = None if mirror is None else os.fspath(mirror)
        self._layout, self._group, self._on_event = layout, process_group, on_event
        self._state = SubscriberState.READY
        self._mirror: Mirror | None = None
        self._is_counted: Mapping[str, bool] | None = None  # whether this worker's part counts; None if unknown
        self._applied: Version | None = None  # in the server; None if unknown
        self._failed: Version | None = None  # that poisoned the weights
        self._staged: Staged | None = None
        self._chooser = VersionChooser(self._folder)  # used on rank 0 alone
        self._entry, self._process = threading.RLock(), os.getpid()
        self._is_closed = False
        self._target: object = None  # key of the target that has the applied version

    @property
    def state(self) -> SubscriberState:
        """Whether the weights are those of one version."""
        return self._state

    @property
    def held(self) -> Version | None:
        """The version that was applied; None before the first one."""
        return self._applied

    @property
    def label(self) -> str:
        """The held version's number as text; `poisoned:NUMBER` after a failed update, empty before the first one."""
        if self._state is SubscriberState.POISONED and self._failed is not None:
            return f"poisoned:{self._failed.number}"
        return "" if self._applied is None else str(self._applied.number)

    def stage(self, target: int | None = None, *, timeout_s: float = 0.0) -> Staged:
        """Read and verify a version. Nothing that the server uses changes. Collective.

        Args:
            target: Number of the version; by default the newest one.
            timeout_s: Seconds to wait for the version, or for a newer one than the held one.

        Returns:
            The version; `commit` it, or `abort` it. It has no changes if the server holds it already.

        Raises:
            SourceNotFoundError: No stream is here, or the version is not published within the limit.
            IncompleteError: A version between is gone, and no anchor replaces it.
            ChecksumError: Bytes differ from their hash, or weights from their digest.
            FormatError: A file cannot be read.
            RankError: Another worker failed or is lost; the message names it.
            StorageError: The store failed.
        """
        with (
            self._enter(),
            enter_call("stage", self.url, self._on_event),
            record_operation(ReceiveEvent, self.url, self._on_event) as recorder,
        ):
            self._drop_staged()
            ranks = get_ranks(self._group)
            recorder.values["rank"] = ranks.rank
            with recorder.phase("plan"):
                chosen = self._choose(ranks, target, timeout_s)
            recorder.values |= {"version": chosen.version.number, "epoch": chosen.version.epoch}
            weights = self._receive(ranks, chosen, recorder)
            self._staged = Staged(self, weights, self._applied, chosen.is_full)
            if self._state is SubscriberState.READY:
                self._state = SubscriberState.STAGED
            return self._staged

    def close(self) -> None:
        """Release the mirror and what keeps versions for this reader. No other call may follow."""
        self._is_closed = True
        self._drop_staged()
        self._chooser.release()
        if self._mirror is not None:
            self._mirror.close()

    @contextmanager
    def _enter(self) -> Iterator[None]:
        """Let one call after the other use the mirror. Raises UsageError after `close`, and in a forked process."""
        if os.getpid() != self._process:
            raise UsageError("this subscriber is another process's", where=self.url, fix="Create one after the fork.")
        with self._entry:
            if self._is_closed:
                raise UsageError("this subscriber is closed", where=self.url)
            yield

    def _drop_staged(self) -> None:
        staged, self._staged = self._staged, None
        if staged is not None and staged.weights.buffer is not None and self._mirror is not None:
            self._mirror.discard(staged.weights.buffer)
        if self._state is SubscriberState.STAGED:
            self._state = SubscriberState.READY

    # Stage: one message to choose the version, one to vote.

    def _choose(self, ranks: LinkedGroup, target: int | None, timeout_s: float) -> _Target:
        """Choose a version on rank 0. Collective."""
        start = time.monotonic()

        def describe_worker() -> bytes:
            check_target(target, timeout_s)
            mirror = self._open_mirror(ranks, timeout_s)
            known = self._is_counted is not None
            boxes = [] if known else [[each.name, each.box.offset, each.box.size] for each in mirror.boxes]
            return pack_message([target, self._applied, mirror.version, boxes])

        def decide(messages: list[bytes]) -> list[bytes]:
            heads = [unpack_message(each)[0] for each in messages]
            if len({repr(head[0]) for head in heads}) > 1:
                raise UsageError("all workers must stage the same version", found=[head[0] for head in heads])
            applied = [None if head[1] is None else Version(*head[1]) for head in heads]
            is_full = any(each is None or each != applied[0] for each in applied)
            held = None if is_full else applied[0]
            # The others wait for rank 0 as long as the group's timeout, which may be shorter.
            round_s = timeout_s if ranks.size == 1 else ranks.timeout_s * _ROUND
            commit = self._chooser.wait_for(target, held, start + timeout_s, round_s)
            if commit is None:
                return [pack_message([None, {}])] * len(messages)
            counted = count_once([head[3] for head in heads], self._folder.record.tensors)
            mirrored = {None if head[2] is None else Version(*head[2]) for head in heads}
            chosen = encode(_Target(commit.version, is_full, self._chooser.take_lease(commit, held, mirrored)))
            return [pack_message([chosen, each]) for each in counted]

        chosen = None
        while chosen is None:
            message = capture_error(describe_worker)
            answer = ranks.ask_rank0(f"staging a version of {self.url}", message, decide)
            (chosen, counted), _ = unpack_message(answer)
        if self._is_counted is None:
            self._is_counted = counted
        return decode(_Target, chosen, where="rank 0's answer")

    def _open_mirror(self, ranks: LinkedGroup, timeout_s: float) -> Mirror:
        if self._mirror is None:
            record, layout = wait_for_stream(self._folder, timeout_s), read_layout(self._layout)
            boxes = place_boxes(
                (name, tuple(tensor.shape), tensor.dtype, box)
                for name, tensor in record.tensors.items()
                for box in list_boxes(layout, name, tuple(tensor.shape))
            )
            root = self._mirror_root
            folder = None if root is None else os.path.join(root, f"worker-{ranks.rank:05d}-of-{ranks.size:05d}")
            self._mirror = Mirror(boxes, record.id, folder)
        return self._mirror

    def _receive(self, ranks: LinkedGroup, chosen: _Target, recorder: Recorder) -> StagedWeights:
        """Read and verify what leads to a version. Collective."""
        mirror = self._mirror
        assert mirror is not None, "it is open"
        weights: StagedWeights | None = None

        is_counted = self._is_counted or {}

        def read() -> bytes:
            nonlocal weights
            commit = self._folder.find_commit(chosen.version)
            if commit is None:
                raise SourceNotFoundError("the version was removed meanwhile", where=self.url, found=chosen.version)
            weights = stage_version(self._folder, commit, mirror, chosen.doomed, is_full=chosen.is_full)
            counted = {name: each.hex() for name, each in weights.digests.items() if is_counted.get(name)}
            return pack_message(counted)

        def decide(messages: list[bytes]) -> list[bytes]:
            heads = [unpack_message(each)[0] for each in messages]
            assert weights is not None, "rank 0's error is raised before"
            wrong = find_wrong_digests(weights.target, heads)
            return [pack_message(wrong)] * len(messages)

        try:
            with recorder.phase("read"):
                message = capture_error(read)
            with recorder.phase("verify"):
                answer = ranks.ask_rank0(f"reading version {chosen.version} of {self.url}", message, decide)
        except BaseException:
            if weights is not None and weights.buffer is not None:
                mirror.discard(weights.buffer)
            raise
        assert weights is not None, "this worker's error is raised by then"
        wrong, _ = unpack_message(answer)
        if wrong:
            if weights.buffer is not None:
                mirror.discard(weights.buffer)
            mirror.forget()  # what it held may be the damaged part: the next call takes an anchor
            raise build_digest_error(weights.target, wrong, self.url)
        recorder.values |= {
            "versions": weights.versions,
            "changed": weights.changed,
            "is_full": weights.buffer is not None,
        }
        return weights

    # Commit: one message before the first write, one after the last.

    def _commit(self, staged: Staged, into: Any) -> Version:
        with self._enter(), enter_call("commit", self.url, self._on_event):
            if staged is not self._staged:
                raise UsageError(
                    "this version was committed, aborted or replaced by a later one", found=str(staged.version)
                )
            mirror, weights = self._mirror, staged.weights
            assert mirror is not None, "it is open"
            version = weights.target.version
            ranks = get_ranks(self._group)
            target = self._prepare(ranks, into, version)
            is_other = get_target_key(target) != self._target
            self._state, self._failed, self._applied, self._target = SubscriberState.APPLYING, version, None, None
            try:
                failure = capture_error(lambda: staged.apply_to(target, replaces_all=is_other))
                message = failure if isinstance(failure, Exception) else b""
                ranks.ask_rank0(f"applying version {version} of {self.url}", message, lambda each: [b""] * len(each))
            except BaseException as error:
                self._state = SubscriberState.POISONED
                self._drop_staged()
                if not isinstance(error, Exception):
                    raise
                raise PoisonedError(
                    f"version {version} was applied in part: {describe(error)}",
                    where=self.url,
                    fix="Do not serve. The next stage() and commit() replace all weights.",
                ) from error
            self._staged, self._target = None, get_target_key(target)
            self._state, self._failed, self._applied = SubscriberState.READY, None, version
            self._keep(mirror, weights)
            return version

    def _prepare(self, ranks: LinkedGroup, into: Any, version: Version) -> WeightTarget:
        """Require that all workers can apply a version. Collective."""
        mirror = self._mirror
        assert mirror is not None, "it is open"
        target: WeightTarget | None = None

        def check() -> bytes:
            nonlocal target
            target = as_target(into)
            if isinstance(target, TensorTarget):
                places = [(box.name, box.shape, box.dtype, box.box) for box in mirror.boxes]
                target.check(places, self._folder.record.tensors)
            return b""

        what = f"preparing to apply version {version} of {self.url}"
        ranks.ask_rank0(what, capture_error(check), lambda each: [b""] * len(each))
        assert target is not None, "this worker's error is raised by then"
        return target

    def _keep(self, mirror: Mirror, weights: StagedWeights) -> None:
        """Hold the applied version; without, the next one starts at an anchor."""
        version = weights.target.version
        try:
            if weights.buffer is not None:
                mirror.replace(weights.buffer, version, weights.digests)
            else:
                mirror.apply(weights.changes, version, weights.digests)
        except BaseException as error:
            with suppress(ShardckptError):
                mirror.forget()  # a part may have changed
            if not isinstance(error, ShardckptError):
                raise
            warn_user(f"version {version} of {self.url} is applied, but the mirror failed: {error}")


class Staged:
    """A version that is read and verified.

    Attributes:
        weights: Its content on this worker.
    """

    def __init__(self, subscriber: Subscriber, weights: StagedWeights, applied: Version | None, is_full: bool) -> None:
        self._subscriber, self.weights = subscriber, weights
        self._applied, self._is_full = applied, is_full
        self._is_read = False  # whether an engine has taken all that it has to write

    @property
    def version(self) -> Version:
        """The version."""
        return self.weights.target.version

    @property
    def is_full(self) -> bool:
        """Whether it replaces all weights."""
        return self.weights.buffer is not None

    @property
    def is_held(self) -> bool:
        """Whether the server holds the version already."""
        return not self._is_full and self.version == self._applied

    def iter_changes(self) -> Iterator[TensorChange]:
        """Yield what to write, tensor by tensor; values stay valid until `commit` ends."""
        mirror = self._subscriber._mirror
        assert mirror is not None, "it is open"
        if self.weights.buffer is not None:
            for box in mirror.boxes:
                values = view_as_tensor(box.dtype, box.view(self.weights.buffer))
                yield TensorChange(box.name, box.shape, box.dtype, box.box, None, values)
            self._is_read = True
            return
        for box, change in self.weights.changes.items():
            at = None if change.positions is None else torch.from_numpy(change.positions)
            yield TensorChange(box.name, box.shape, box.dtype, box.box, at, view_as_tensor(box.dtype, change.values))
        self._is_read = True

    def iter_weights(self) -> Iterator[TensorChange]:
        """Yield all tensors, for an engine that loads each of them. Values stay valid until `commit` ends."""
        if self.weights.buffer is not None:
            yield from self.iter_changes()
            return
        mirror = self._subscriber._mirror
        assert mirror is not None, "it is open"
        for box in mirror.boxes:
            values = mirror.view(box)
            change = self.weights.changes.get(box)
            if change is not None:
                values = values.copy()
                write_elements(change, values)
            yield TensorChange(box.name, box.shape, box.dtype, box.box, None, view_as_tensor(box.dtype, values))
        self._is_read = True

    def apply_to(self, target: WeightTarget, *, replaces_all: bool) -> None:
        """Let a target write the changes; all weights if it has another version, or none."""
        self._is_full = self._is_full or replaces_all  # the version may be held, but not by this target
        target.apply(self.iter_weights() if replaces_all else self.iter_changes())
        if not (self._is_read or self.is_held):
            raise UsageError("`apply` must take all changes before it returns", found=type(target).__name__)

    def iter_tensors(self, *, changed_only: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield names and full tensors, each a copy of its own, for an engine that takes such pairs.

        Args:
            changed_only: Whether to skip tensors without changes. An engine that converts what it loads needs all.

        Raises:
            UsageError: The worker holds parts of tensors, or the version is no longer staged.
        """
        mirror = self._subscriber._mirror
        assert mirror is not None, "it is open"
        part = next((box.name for box in mirror.boxes if box.box != full_box(box.shape)), None)
        if part is not None:
            fix = "Use iter_weights, or a Subscriber without `layout`."
            raise UsageError("a worker with parts of tensors has no full ones", where=part, fix=fix)
        names = {box.name for box in (self.weights.changes if changed_only and not self.is_full else mirror.boxes)}
        return self._copy_tensors(names)

    def _copy_tensors(self, names: Collection[str]) -> Iterator[tuple[str, torch.Tensor]]:
        for each in self.iter_weights():
            if self._subscriber._staged is not self:  # by then the mirror has the changes, or later ones
                raise UsageError(
                    "this version was committed, aborted or replaced by a later one", found=str(self.version)
                )
            if each.name in names:
                yield each.name, each.values.view(each.shape).clone()

    def commit(self, into: Any) -> Version:
        """Apply the version on all workers, or on none. Collective.

        Args:
            into: Module; dict of tensors by the stream's names, whose DTensors are shards; or an engine's object with
                `apply(changes)`, which gets an iterable of `TensorChange`.

        Returns:
            The version that the server holds now.

        Raises:
            MismatchError: The target does not fit the stream. Nothing was changed.
            PoisonedError: A worker failed after the first write: the weights are of no version. Do not serve them. The
                next version that is staged replaces all weights.
            UsageError: `into` is no target, or the version is no longer staged. Nothing was changed.
        """
        return self._subscriber._commit(self, into)

    def abort(self) -> None:
        """Drop the version; the server keeps the one that it holds."""
        if self._subscriber._staged is self:
            self._subscriber._drop_staged()
