"""Ranks on several nodes read files of all of them, each from the nearest node that gives it."""

from __future__ import annotations

import resource
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from shardckpt.errors import ChecksumError, MissingFileError, StorageError, TruncatedError
from shardckpt.native.commit import COMMIT, SaveMark, decode_commit, encode_commit, read_commit
from shardckpt.native.verified_store import Hashed, VerifiedStore
from shardckpt.ranks.process_group import get_ranks
from shardckpt.storage.local import LocalStore
from shardckpt.storage.store import Read, SubfolderStore, read_bytes
from shardckpt.tiers.peers import exchange_round
from shardckpt.tiers.peers.known_files import KnownFiles, SharedStep, find_files
from shardckpt.tiers.peers.node_files import Node, NodeCatalog, NodeReport, NodeStep
from shardckpt.tiers.peers.open_peers import NodeTier, share_files
from shardckpt.tiers.peers.peer_exchange import PeerExchange
from shardckpt.tiers.peers.peer_store import PeerStore
from shardckpt.tiers.peers.tier_files import TierFiles
from tests.kit.ranks.harness import outcomes, run

FOLDER, BLOCK = "step-00000001", 4


def content(number: int) -> bytes:
    return bytes((number + at) % 251 for at in range(3000 + number))


def write_nodes(root: Path, held: dict[str, list[int]]) -> None:
    for node, numbers in held.items():
        (root / node / FOLDER).mkdir(parents=True)
        for number in numbers:
            (root / node / FOLDER / f"f{number}").write_bytes(content(number))


def join(rank: int, root: Path, nodes: str, held: dict[str, list[int]]) -> tuple[PeerStore, PeerExchange]:
    """The store of a rank, whose node is the letter at its place in `nodes`."""
    node = nodes[rank]
    files = {f"f{number}": len(content(number)) for number in held[node]}
    total = len({number for numbers in held.values() for number in numbers})
    report = NodeReport(Node(node, node), {f"memory/{FOLDER}": NodeStep("save", total, files)})
    ranks = get_ranks(None)
    own = TierFiles({"memory": LocalStore(str(root / node))})
    shared = share_files(ranks, own, report, [NodeTier("memory", "url", lambda: None)])
    known = shared.known["memory"]
    exchange = PeerExchange(ranks.background("peers"), own, known.forget, shared.find)
    return PeerStore(own, known, exchange, rank), exchange


def test_of_several_saves_of_a_step_that_nodes_have_rank_0_chooses_the_runs(tmp_path):
    saves, asked = {"a": "0002", "b": "0001"}, []

    def find_run() -> str:
        asked.append(1)
        return "b"

    def body(rank: int, world: int) -> tuple:
        node = "aab"[rank]
        mark = SaveMark(node, "0", 1)
        step = NodeStep(saves[node], 1, {f"{node}.safetensors": 5}, branch=1 if node == "a" else 0, mark=mark)
        report = NodeReport(Node(node, node), {f"memory/{FOLDER}": step})
        own, tiers = TierFiles({}), [NodeTier("memory", "url", lambda: None)]
        shared = share_files(get_ranks(None), own, report, tiers, find_run)
        known, name = shared.known["memory"], f"{FOLDER}/b.safetensors"
        known.learn([name], shared.find)
        return len(asked), known.sources, known.find(name) is not None

    found = run(3, body)
    assert [each[0] for each in found] == [1, 0, 0]
    assert [each[1] for each in found] == [{FOLDER: (f"memory/{FOLDER}",)}] * 3 and found[0][2] and found[2][2]


def test_ranks_read_files_of_all_nodes_and_only_those_of_others_cross_the_network(tmp_path, monkeypatch):
    monkeypatch.setattr(exchange_round, "ROUND_BYTES", 2500)
    held = {"a": [0, 1, 2], "b": [2, 3], "c": []}
    write_nodes(tmp_path, held)

    def body(rank: int, world: int) -> tuple[int, int, int]:
        store, exchange = join(rank, tmp_path, "aabc", held)
        with exchange, ThreadPoolExecutor(3) as pool:
            names = [entry.name for entry in store.list(FOLDER)]
            assert names == [f"{FOLDER}/f{number}" for number in range(4)]
            found = list(pool.map(lambda name: read_bytes(store, name, 10, store.size(name) - 10), names))
            assert found == [content(number)[10:] for number in range(4)]
            parts = [bytearray(5), bytearray(0), bytearray(7)]
            store.read([Read(names[1], 1, memoryview(parts[0])), Read(names[3], 9, memoryview(parts[1])),
                        Read(names[3], 9, memoryview(parts[2]))])  # fmt: skip
            assert parts == [content(1)[1:6], b"", content(3)[9:16]]
            with pytest.raises(TruncatedError):
                read_bytes(store, names[0], 0, 3001)
            with pytest.raises(MissingFileError):
                store.size(f"{FOLDER}/f9")
            with pytest.raises(StorageError):
                store.create("x")
        return store.own_bytes, store.pulled_bytes, exchange.received_bytes

    def nbytes(*numbers: int) -> int:
        return sum(len(content(number)) - 10 for number in numbers)

    on_a = nbytes(0, 1, 2) + 5, nbytes(3) + 7, nbytes(3) + 7
    on_b = nbytes(2, 3) + 7, nbytes(0, 1) + 5, nbytes(0, 1) + 5
    on_c = 0, nbytes(0, 1, 2, 3) + 12, nbytes(0, 1, 2, 3) + 12
    assert run(4, body) == [on_a, on_a, on_b, on_c]


def test_a_file_that_a_node_lost_is_read_from_the_next_one_or_is_an_error(tmp_path):
    held = {"a": [0, 1], "b": [0], "c": []}
    write_nodes(tmp_path, held)
    (tmp_path / "a" / FOLDER / "f0").unlink()
    (tmp_path / "a" / FOLDER / "f1").unlink()

    def body(rank: int, world: int) -> tuple[bytes, str]:
        store, exchange = join(rank, tmp_path, "abc", held)
        with exchange:
            found = read_bytes(store, f"{FOLDER}/f0", 0, 3000)
            with pytest.raises(MissingFileError, match="no node can read this range") as caught:
                read_bytes(store, f"{FOLDER}/f1", 0, 1)
        with pytest.raises(StorageError, match="during a restore only"):
            exchange.pull([(exchange_round.FilePiece(0, "x", 0, 1), memoryview(bytearray(1)))])
        return found, str(caught.value)

    assert [found for found, _ in run(3, body)] == [content(0)] * 3


def test_each_piece_of_a_request_comes_or_not_whatever_the_others_do(tmp_path):
    held = {"a": [0, 1, 2, 3], "b": []}
    write_nodes(tmp_path, held)
    for lost in (1, 3):
        (tmp_path / "a" / FOLDER / f"f{lost}").unlink()

    def body(rank: int, world: int) -> list:
        _, exchange = join(rank, tmp_path, "ab", held)
        with exchange:
            if rank == 0:
                return []
            buffers = [memoryview(bytearray(3000)) for _ in range(4)]
            pieces = [exchange_round.FilePiece(0, f"memory/{FOLDER}/f{number}", 0, 3000) for number in range(4)]
            came = exchange.pull([*zip(pieces, buffers, strict=True)])
        good = [bytes(buffer) == content(number)[:3000] for number, buffer in enumerate(buffers)]
        return [came, good, exchange.received_bytes]

    came = [True, False, True, False]
    assert run(2, body)[1] == [came, came, 6000]


def test_a_rank_sends_many_pieces_from_the_memory_of_two(tmp_path):
    sent, page = 12 * exchange_round.PIECE_BYTES, 4096

    def body(rank: int, world: int) -> int:
        ranks, own = get_ranks(None), MemoryStore(bytes(range(256)) * (exchange_round.PIECE_BYTES >> 8))
        row = memoryview(bytearray(exchange_round.PIECE_BYTES)) if rank else None
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        with PeerExchange(ranks.background("peers"), own, str) as exchange:
            if row is not None:
                assert exchange.pull([(exchange_round.FilePiece(0, "x", 0, len(row)), row)] * 12) == [True] * 12
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    faults, _ = run(2, body)
    assert faults < sent // page // 2, faults


def test_a_folder_that_rank_0_deletes_disappears_on_all_nodes(tmp_path):
    held = {"a": [0], "b": [1]}
    write_nodes(tmp_path, held)

    def body(rank: int, world: int) -> list:
        store, exchange = join(rank, tmp_path, "ab", held)
        with exchange:
            if rank == 0:
                store.delete_folder(FOLDER)
            deadline = time.monotonic() + 20
            while store.list() and time.monotonic() < deadline:
                time.sleep(0.005)
        return store.list()

    assert run(2, body) == [[], []]


def test_a_rank_that_takes_no_part_ends_the_reads_of_others_within_the_time_limit(tmp_path):
    held = {"a": [0], "b": [1], "c": [2]}
    write_nodes(tmp_path, held)

    def body(rank: int, world: int) -> None:
        store, exchange = join(rank, tmp_path, "abc", held)
        if rank < 2:
            with exchange:
                read_bytes(store, f"{FOLDER}/f{1 - rank}", 0, 100)

    first, second, absent = outcomes(3, body, group_timeout=2.0)
    assert absent.raised is None
    for each in (first, second):
        assert each.raised is not None and each.raised.name == "RankError" and "rank 2 of 3" in each.raised.message


@given(st.integers(1, 40), st.data())
def test_a_file_is_read_exactly_if_every_block_is_good_in_one_of_its_copies(nbytes, data):
    good = bytes(range(1, nbytes + 1))
    blocks = -(-nbytes // BLOCK)
    damaged = data.draw(st.lists(st.sets(st.integers(0, blocks - 1)), min_size=1, max_size=3))
    copies = [bytearray(good) for _ in damaged]
    for copy, numbers in zip(copies, damaged, strict=True):
        for number in numbers:
            copy[number * BLOCK] ^= 1
    report = {FOLDER: NodeStep("save", 1, {"f": nbytes})}
    store = open_copies(copies, report)
    hashes = b"".join(xxhash.xxh3_64_digest(good[at : at + BLOCK]) for at in range(0, nbytes, BLOCK))
    verified = VerifiedStore(SubfolderStore(store, FOLDER), {"f": Hashed(nbytes, BLOCK, hashes)})
    start = data.draw(st.integers(0, nbytes - 1))
    stop = data.draw(st.integers(start + 1, nbytes))
    touched = range(start // BLOCK, (stop - 1) // BLOCK + 1)
    if all(any(number not in numbers for numbers in damaged) for number in touched):
        assert read_bytes(verified, "f", start, stop - start) == good[start:stop]
    else:
        with pytest.raises(ChecksumError):
            read_bytes(verified, "f", start, stop - start)


@pytest.mark.parametrize("damaged", [{0}, {0, 1}, {1}, {0, 1, 2}], ids=str)
def test_a_commit_mark_is_read_from_a_copy_that_is_not_damaged(damaged):
    good = encode_commit("0123456789abcde", b"{}", [])
    copies = [bytearray(good) for _ in range(3)]
    for at in damaged:
        copies[at][20] ^= 1
    report = {FOLDER: NodeStep("save", 1, {COMMIT: len(good)})}
    store = open_copies(copies, report)
    inside, sizes = SubfolderStore(store, FOLDER), {COMMIT: len(good)}
    if len(damaged) == 3:
        with pytest.raises(ChecksumError):
            read_commit(inside, sizes)
    else:
        assert read_commit(inside, sizes) == decode_commit(good)


def open_copies(copies: list[bytearray], files: dict[str, NodeStep]) -> PeerStore:
    """Return the store of the first node, of several that have a copy of one file each."""
    reports = [NodeReport(Node(str(at), str(at)), files) for at in range(len(copies))]
    catalog, own = NodeCatalog.from_reports(reports), MemoryStore(copies[0])
    steps = {folder: SharedStep((folder,), step.save, is_complete=False) for folder, step in files.items()}
    return PeerStore(own, KnownFiles(0, reports[0], own, steps), DirectExchange(copies, catalog), 0)


class MemoryStore:
    """A store of one file in memory."""

    url = "memory"

    def __init__(self, data: bytearray) -> None:
        self.data = data

    def read(self, reads: list[Read]) -> None:
        for _, offset, buffer in reads:
            buffer[:] = self.data[offset : offset + len(buffer)]


class MappedFiles(MemoryStore):
    """Files that are in memory: of the file `x`; others have to be read."""

    def view(self, name: str, offset: int, nbytes: int) -> memoryview | None:
        if name == "lost":
            raise MissingFileError("no such file", where=name)
        return memoryview(bytearray(self.data[offset : offset + nbytes])) if name == "x" else None

    def read(self, reads) -> None:
        assert all(read.name != "x" for read in reads), "it is sent from where it is"
        if reads[0].name == "lost":
            raise MissingFileError("no such file", where="lost")
        super().read(reads)


def test_pieces_in_memory_are_sent_from_there_among_others_that_are_read():
    names = ["read", "x", "lost", "read", "read", "x", "read"]

    def body(rank: int, world: int) -> list:
        ranks, own = get_ranks(None), MappedFiles(bytes(range(256)) * 16)
        with PeerExchange(ranks.background("peers"), own, str) as exchange:
            if rank == 0:
                return []
            buffers = [memoryview(bytearray(4096)) for _ in names]
            pieces = [exchange_round.FilePiece(0, name, 0, 4096) for name in names]
            came = exchange.pull([*zip(pieces, buffers, strict=True)])
        return [came, [bytes(buffer) == bytes(range(256)) * 16 for buffer in buffers]]

    fine = [name != "lost" for name in names]
    assert run(2, body)[1] == [fine, fine]


class DirectExchange:
    """An exchange that reads the memory of others."""

    def __init__(self, copies: list[bytearray], catalog: NodeCatalog) -> None:
        self.copies, self.find = copies, partial(find_files, catalog)

    def pull(self, wanted: list) -> list[bool]:
        for piece, buffer in wanted:
            buffer[:] = self.copies[piece.peer][piece.offset : piece.offset + piece.nbytes]
        return [True] * len(wanted)
