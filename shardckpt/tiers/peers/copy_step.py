"""Copy a step's files to other nodes or tiers; every block is compared with its hash before a copy exists."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import NamedTuple

from shardckpt.errors import RankError, ShardckptError, StorageError, describe
from shardckpt.native.commit import Commit, find_save, read_commit, read_contents
from shardckpt.native.reader import find_hashes
from shardckpt.native.verified_store import VerifiedStore
from shardckpt.ranks.linked_group import LinkedGroup
from shardckpt.storage.store import ExtendedWriter, Read, Store, SubfolderStore, Writer
from shardckpt.storage.thread_pool import ThreadPool
from shardckpt.tiers.peers.known_files import KnownFiles, SharedStep, find_files
from shardckpt.tiers.peers.node_files import Node, NodeCatalog, NodeReport, report_files
from shardckpt.tiers.peers.node_steps import decode_marks, list_other_files, read_marks, write_marks
from shardckpt.tiers.peers.partner_plan import CopyOrder, plan_copy_orders
from shardckpt.tiers.peers.peer_exchange import PeerExchange
from shardckpt.tiers.peers.peer_store import PeerStore

_STEP_BYTES = 16 << 20  # bytes that a rank receives and compares with their hashes at a time
_MAX_PENDING = 2  # ranges copied at a time: one is received while the other is written


class CopiedStep(NamedTuple):
    """Result of copying a step."""

    nbytes: int  # bytes that this rank copied to its node
    seconds: float
    machines: int  # machines of all nodes
    faults: tuple[str, ...]  # why copies failed, equal on all ranks; empty if all copies exist


def copy_step(
    coordinator: LinkedGroup, own: Store, node: Node, folder: str, copies: int, leaving: Collection[str] = ()
) -> CopiedStep:
    """Copy a step's files that are on too few machines; wait until each copy is acknowledged or fails. Collective."""
    # All nodes have the step's marks already.
    start = time.monotonic()
    report = report_files(own, node, [folder])
    order = share_copy_orders(coordinator, report, folder, copies, leaving)
    known = _know_files(order, own, report, folder)
    fault = f"no node has {order.lost} of its files" if order.lost and coordinator.rank == 0 else ""
    with PeerExchange(coordinator, own, known.forget) as exchange:
        store = PeerStore(own, known, exchange, coordinator.rank)
        try:
            with ThreadPool(1, thread_name_prefix="shardckpt-copy") as threads:
                _copy_files(SubfolderStore(store, folder), SubfolderStore(own, folder), order.names, threads)
        except RankError:
            raise
        except Exception as error:  # noqa: BLE001  (the other ranks wait for the result)
            fault = f"rank {coordinator.rank}: {describe(error)}"
    faults = _share_faults(coordinator, folder, fault)
    return CopiedStep(exchange.received_bytes, time.monotonic() - start, order.machines, faults)


def _know_files(order: CopyOrder, own: Store, report: NodeReport, folder: str) -> KnownFiles:
    """Return a step's files on this node and in the order: rank 0 is asked for no others."""
    steps = {name: SharedStep((name,), save, is_complete=True) for name, save in order.catalog.saves.items()}
    known = KnownFiles(0, report, own, steps)
    names = [f"{folder}/{name}" for name in order.catalog.files.get(folder, ())]
    known.learn(names, partial(find_files, order.catalog), all_copies=True)
    return known


def share_copy_orders(
    coordinator: LinkedGroup, report: NodeReport, folder: str, copies: int, leaving: Collection[str] = ()
) -> CopyOrder:
    """Return what this rank copies; rank 0 sends each rank only its part of the plan. Collective."""

    def decide(messages: list[bytes]) -> list[bytes]:
        catalog = NodeCatalog.from_reports([NodeReport.decode(message) for message in messages])
        return [order.encode() for order in plan_copy_orders(catalog, folder, copies, leaving)]

    return CopyOrder.decode(coordinator.ask_rank0("planning copies on other nodes", report.encode(), decide))


class CopiedPart(NamedTuple):
    """A step's files that were copied to a farther tier."""

    nbytes: int
    save: str = ""  # id
    older: tuple[str, ...] = ()  # names of older saves' files in the folder


def copy_part(
    own: Store, target: Store, folder: str, replacing: Callable[[], AbstractContextManager[object]] = nullcontext
) -> CopiedPart:
    """Copy the node's files of a step to a farther tier on the node."""
    source, inside = SubfolderStore(own, folder), SubfolderStore(target, folder)
    marks = read_marks(source)  # before the files: the step may be saved again meanwhile
    commit, sizes = decode_marks(marks, source.url), {entry.name: entry.size for entry in source.list()}
    held = [name for name, nbytes in commit.files.items() if sizes.get(name) == nbytes]
    before = {entry.name for entry in inside.list()}
    try:
        _copy_files(source, inside, held, commit=commit)
        with replacing():
            write_marks(inside, marks)
    except ShardckptError:
        with suppress(ShardckptError):  # the error of the copy says more; the disk may be full
            if find_save(target, folder) != commit.save:
                target.delete_files(folder, {*held, commit.manifest} - before)
        raise
    # Older saves stay until all nodes have the new marks. Files that are new here may be of a later capture.
    older = tuple(name for name in list_other_files(inside) if name in before)
    return CopiedPart(sum(commit.files[name] for name in held), commit.save, older)


def _copy_files(
    source: Store,
    target: Store,
    names: Sequence[str],
    threads: ThreadPool | None = None,  # one thread reads the next range while another is written
    commit: Commit | None = None,
) -> None:
    """Copy files; each appears in the target once all its blocks match the hashes in the manifest."""
    if not names:
        return
    sizes = {entry.name: entry.size for entry in source.list()}
    contents = read_contents(source, sizes, commit or read_commit(source, sizes))
    hashed = {file.name: hashes for file in contents.files if (hashes := find_hashes(file)) is not None}
    verified = VerifiedStore(source, hashed)
    unknown = [name for name in names if name not in hashed]
    if unknown:
        raise StorageError("a file without hashes is not copied", where=f"{target.url}/{unknown[0]}")
    nbytes = min(_STEP_BYTES, max(hashed[name].nbytes for name in names))
    buffers = [memoryview(bytearray(nbytes)) for _ in range(_MAX_PENDING)]
    for name in names:
        with target.create(name) as writer:
            _copy_file(verified, name, hashed[name].nbytes, writer, buffers, threads)


class _PendingRange(NamedTuple):
    """A file range that is being read."""

    reading: Future[None] | None  # None if it has been read
    unwritten: memoryview | None  # buffer to write after the read; None if the bytes stay where they are read


def _copy_file(
    source: Store,
    name: str,
    nbytes: int,
    writer: Writer,
    buffers: Sequence[memoryview],  # for a writer that has no memory for ranges
    threads: ThreadPool | None,
) -> None:
    pending: deque[_PendingRange] = deque()
    is_extended = True
    for number, offset in enumerate(range(0, nbytes, _STEP_BYTES)):
        if len(pending) == len(buffers):
            _write_next(pending, writer)
        buffer = buffers[number % len(buffers)][: nbytes - offset]
        memory = writer.extend(len(buffer)) if is_extended and isinstance(writer, ExtendedWriter) else None
        is_extended = memory is not None  # if not, this range has to be written before the file is longer
        read = [Read(name, offset, buffer if memory is None else memory)]
        reading = None if threads is None else threads.submit(source.read, read)
        if reading is None:
            source.read(read)
        pending.append(_PendingRange(reading, buffer if memory is None else None))
    while pending:
        _write_next(pending, writer)


def _write_next(pending: deque[_PendingRange], writer: Writer) -> None:
    """Wait for the oldest range, and write it unless it stays where it was read."""
    reading, unwritten = pending.popleft()
    if reading is not None:
        reading.result()
    if unwritten is not None:
        writer.write(unwritten)


def _share_faults(coordinator: LinkedGroup, folder: str, fault: str) -> tuple[str, ...]:
    """Return all ranks' faults. Collective."""

    def decide(messages: list[bytes]) -> list[bytes]:
        return [b"\n".join(message for message in messages if message)] * len(messages)

    text = coordinator.ask_rank0(f"acknowledging the copies of {folder}", _encode_line(fault), decide)
    return tuple(text.decode().splitlines())


def _encode_line(text: str) -> bytes:
    return " ".join(text.split())[:1000].encode("utf-8", "replace")
