"""`Publisher`: publish versions of sharded weights as changes; each rank writes its own."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch.distributed as dist

from shardckpt.checkpoint.load.source import compile_key_map
from shardckpt.checkpoint.planning.save_plan import LocalSavePlan, RankSavePlan, create_global_plan, create_local_plan
from shardckpt.checkpoint.save.handle import AsyncSaveTask, PendingSave, SaveHandle
from shardckpt.checkpoint.save.planner import capture_error
from shardckpt.checkpoint.stateful.flatten import FlattenedState
from shardckpt.checkpoint.stateful.tensor_bytes import view_box
from shardckpt.encodings.budget import gc_paused
from shardckpt.encodings.typed_json import decode, encode
from shardckpt.errors import UsageError
from shardckpt.events import OnEvent, PublishEvent, Recorder, require_on_event
from shardckpt.events.recorder import enter_call
from shardckpt.events.warn_user import warn_user
from shardckpt.plan.layout.box_codec import pack_message, unpack_message
from shardckpt.ranks.linked_group import LinkedGroup
from shardckpt.ranks.process_group import get_ranks
from shardckpt.storage.resolve_url import as_url
from shardckpt.stream.format.stream_records import MAX_NUMBERS, StreamTensor
from shardckpt.stream.publish.ledger import Anchors, Attempt, Ledger
from shardckpt.stream.publish.named_tensors import TensorNames, find_others, flatten_weights
from shardckpt.stream.publish.snapshot import Snapshot, plan_wire
from shardckpt.stream.publish.version_writer import PublishPlan, VersionWriter, decode_digests, encode_digests

__all__ = ["Publisher"]

_WIRE_DTYPES = ("bfloat16", "float16", "float32")


class Publisher:
    """Publishes versions of a model's weights to a stream, from any sharding, without gathering them.

    Each rank keeps its part of the last published version, casts and compares the new one, and writes what changed. A
    version exists once all ranks have written theirs. Rank 0 then writes its `COMMIT.json`.

    Args:
        url: Folder or URL of the stream, which all ranks reach; created by the first version.
        dtype: Dtype of floating-point tensors in the stream: `"bfloat16"`, `"float16"`, `"float32"`, or None to keep
            each tensor's own. Other tensors keep theirs.
        key_map: Regular expressions with replacements, which change the model's names to the server's.
        anchors: When all weights are written in addition to the changes, and which versions stay.
        keep: Returns the numbers of versions that stay readable whatever `anchors.keep` says, such as
            the numbers of kept training steps; called on rank 0 after an anchor.
        process_group: Ranks that publish; by default all ranks.
        on_event: Called with each `PublishEvent`.

    Raises:
        UsageError: An argument has an unknown value.

    Examples:
        >>> publisher = shardckpt.Publisher("s3://bucket/stream")  # doctest: +SKIP
        >>> publisher.publish(step, model)  # doctest: +SKIP
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        *,
        dtype: str | None = "bfloat16",
        key_map: Mapping[str, str] | None = None,
        anchors: Anchors = Anchors(),  # noqa: B008  (frozen)
        keep: Callable[[], Collection[int]] | None = None,
        process_group: dist.ProcessGroup | None = None,
        on_event: OnEvent | None = None,
    ) -> None:
        if dtype is not None and dtype not in _WIRE_DTYPES:
            raise UsageError("`dtype` must be None or a dtype's name", found=repr(dtype), expected=_WIRE_DTYPES)
        if not isinstance(anchors, Anchors):
            raise UsageError("`anchors` must be Anchors(...)", found=repr(anchors))
        if not (keep is None or callable(keep)):
            raise UsageError("`keep` must be a function that returns versions", found=repr(keep))
        require_on_event(on_event)
        self.url = as_url(url)
        self._names = TensorNames(dtype, compile_key_map(key_map))
        self._group, self._on_event = process_group, on_event
        self._ledger = Ledger(self.url, anchors, keep or (lambda: ()))  # used on rank 0 alone
        self._pending = PendingSave()
        self._plans: list[bytes] = []  # encoded local plans of all ranks, on rank 0
        self._plan = b""  # of this rank
        self._snapshot: Snapshot | None = None
        self._base_token = self._attempt_token = ""  # versions in the snapshot's two buffers
        self._warned: frozenset[str] = frozenset()
        self._tensors: dict[str, StreamTensor] = {}
        self._attempt: Attempt | None = None

    def publish(self, version: int, model: Any) -> SaveHandle:
        """Publish a version in the background. Collective.

        Returns when the weights are copied, so they may change at once. It first waits for the previous version. If
        that failed and its error was not retrieved, this call raises the error and does not publish.

        Args:
            version: Number of the version, greater than the last one; the same on all ranks.
            model: Module, or a dict of tensors by name, whose DTensors are shards.

        Returns:
            A handle; `result()` waits until the version is published, and raises why not: a PrecisionError names a
            tensor with a number that float16 does not have.

        Raises:
            MismatchError: Names, dtypes or shapes differ from those in the stream.
            PublisherReplacedError: A later publisher writes this stream.
            RankError: Another rank failed or is lost; the message names it.
            UsageError: The version is not greater than the last one.
            UnsupportedError: A tensor cannot be published; the message has its name.
            StorageError: The store failed.
        """
        title, recorder = f"the publish of version {version!r} to {self.url}", Recorder(PublishEvent, self.url)
        task = AsyncSaveTask(self.url, self._on_event, recorder=recorder, title=title)
        try:
            with enter_call("publish", self.url, self._on_event), self._pending.entry, gc_paused():
                with task.phase("waiting"):
                    self._pending.wait()
                    refusal = self._pending.unretrieved_error() or _check_version(version)
                with task.phase("capture"):
                    ranks = get_ranks(self._group, refusal)
                    task.recorder.values |= {"rank": ranks.rank, "version": version if refusal is None else 0}
                    background = ranks.background("stream")
                    flattened, plan = self._exchange_plan(ranks, version, model, refusal)
                    task.recorder.values |= {"epoch": plan.version.epoch, "has_anchor": plan.has_anchor}
                with task.phase("staging"):
                    copied = capture_error(partial(self._copy, flattened, plan))
                del flattened
                self._pending.start(task, lambda: None)
                work = partial(self._write, task, plan, background, copied)
                if not task.start(work):
                    task.run(work)
        except BaseException as error:
            task.emit(error)
            raise
        return SaveHandle(task)

    def resume(self, model: Any) -> int | None:
        """Find the published version that has the model's weights, after a restore. Collective.

        If it is the newest one, the next version has changes alone. Otherwise the next one gets an anchor.

        Args:
            model: As for `publish`.

        Returns:
            Number of the version; None if no version has these weights.
        """
        with enter_call("resume", self.url, self._on_event), self._pending.entry, gc_paused():
            self._pending.wait()
            refusal = self._pending.unretrieved_error()
            ranks = get_ranks(self._group, refusal)
            flattened, plan = self._exchange_plan(ranks, None, model, refusal)

            def digest() -> bytes:
                return pack_message(encode_digests(self._copy(flattened, plan).digest_all()))

            def decide(messages: list[bytes]) -> list[bytes]:
                parts = [decode_digests(unpack_message(each)[0]) for each in messages]
                found = self._ledger.resume(parts, plan.token)
                base = self._ledger.base
                is_base = base is not None and base.token == plan.token
                return [pack_message([None if found is None else found.number, is_base])] * len(messages)

            what = f"resuming the stream {self.url}"
            (number, is_base), _ = unpack_message(ranks.ask_rank0(what, capture_error(digest), decide))
            if is_base:
                self._promote(plan.token)
            return None if number is None else int(number)

    def close(self) -> None:
        """Wait until the last version is published. Raises its error unless it was retrieved."""
        with self._pending.entry:
            self._pending.wait()
            error = self._pending.unretrieved_error()
        if error is not None:
            raise error

    def __enter__(self) -> Publisher:
        """Return the publisher; leaving the block calls `close`."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if kind is None:
            self.close()
        else:
            with self._pending.entry:
                self._pending.wait()

    # Plan: one message from each rank.

    def _exchange_plan(
        self, ranks: LinkedGroup, number: int | None, model: Any, refusal: Exception | None
    ) -> tuple[FlattenedState, PublishPlan]:
        """Flatten the weights, and agree with the other ranks on the attempt. Collective."""

        def flatten() -> tuple[FlattenedState, bytes]:
            if refusal is not None:
                raise refusal
            flattened = flatten_weights(model, ranks.rank, ranks.size)
            self._warn_of_others(find_others(flattened))
            return flattened, create_local_plan(flattened).encode()

        taken = capture_error(flatten)
        message: bytes | Exception
        if isinstance(taken, Exception):
            message = taken
        else:
            has_plan = self._snapshot is not None and taken[1] == self._plan
            message = pack_message([number, has_plan, self._base_token, self._attempt_token], taken[1])

        def decide(messages: list[bytes]) -> list[bytes]:
            heads, plans = zip(*map(unpack_message, messages), strict=True)
            return self._decide(heads, list(plans))

        (tensors, fields), rank_plan = unpack_message(ranks.ask_rank0(f"publishing to {self.url}", message, decide))
        assert not isinstance(taken, Exception), "this rank's error is raised by then"
        if rank_plan:
            self._snapshot, self._base_token, self._attempt_token = None, "", ""
            chunks = RankSavePlan.decode(rank_plan).chunks
            names = {each.path: self._names.rename(each.path) for each in chunks}
            self._tensors = {name: StreamTensor(dtype, tuple(shape)) for name, (dtype, shape) in tensors.items()}
            self._snapshot, self._plan = Snapshot(plan_wire(chunks, names, self._tensors), self._tensors), taken[1]
        plan = decode(PublishPlan, fields, where="rank 0's answer")
        if plan.base_token and plan.base_token == self._attempt_token:
            self._promote(plan.base_token)
        return taken[0], plan

    def _decide(self, heads: Sequence[Any], plans: list[bytes]) -> list[bytes]:
        """Start an attempt. On rank 0."""
        numbers = [head[0] for head in heads]
        if len(set(numbers)) > 1:
            raise UsageError("all ranks must publish the same version", found=sorted(set(numbers)))
        self._ledger.settle()
        is_new = plans != self._plans or not all(head[1] for head in heads)
        rank_plans = [b""] * len(heads)
        if is_new:
            local_plans = [LocalSavePlan.decode(plan) for plan in plans]
            save_plan = create_global_plan(local_plans)
            self._tensors = self._names.describe(local_plans, save_plan)
            self._ledger.open(self._tensors, self._names.describe_ties(save_plan))
            self._plans, rank_plans = plans, [each.encode() for each in save_plan.rank_plans]
        bases = [["", ""] if is_new else head[2:] for head in heads]
        attempt = self._ledger.start(numbers[0], bases)
        base = attempt.base
        plan = PublishPlan(
            self._ledger.stream,
            attempt.version,
            attempt.token,
            None if base is None else base.version,
            "" if base is None else base.token,
            attempt.has_anchor,
        )
        self._attempt = attempt
        head = [self._tensors if is_new else {}, encode(plan)]
        return [pack_message(head, each) for each in rank_plans]

    def _warn_of_others(self, names: Sequence[str]) -> None:
        new = [name for name in names if name not in self._warned]
        if new:
            self._warned |= frozenset(new)
            warn_user(f"the stream {self.url} has tensors alone; these values are not published: {', '.join(new[:4])}")

    # Copy and write.

    def _copy(self, flattened: FlattenedState, plan: PublishPlan) -> Snapshot:
        assert self._snapshot is not None, "it is planned"
        self._attempt_token = ""
        snapshot = self._snapshot
        snapshot.capture(view_box(flattened.arrays[chunk.path], chunk.box) for chunk in snapshot.plan.chunks)
        self._attempt_token = plan.token
        return snapshot

    def _write(self, task: AsyncSaveTask, plan: PublishPlan, ranks: LinkedGroup, copied: Snapshot | Exception) -> None:
        """Write the version; it is the base for the next one once it is published."""
        writer = VersionWriter(self.url, plan, ranks, self._ledger, self._attempt)
        writer.write(task, copied)
        self._promote(plan.token)
        assert self._snapshot is not None, "it is promoted"
        writer.finish(task, self._snapshot)

    def _promote(self, token: str) -> None:
        assert self._snapshot is not None, "it is copied"
        self._snapshot.promote()
        self._base_token, self._attempt_token = token, ""


def _check_version(version: object) -> Exception | None:
    """Return the error in a version's number."""
    if isinstance(version, int) and not isinstance(version, bool) and 0 <= version < MAX_NUMBERS:
        return None
    return UsageError("`version` must be a number from 0 to 9,999,999,999", found=repr(version))
