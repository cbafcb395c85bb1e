"""The transport for torchft: its own recovery test, two processes, peers that are hostile, slow or lost."""

from __future__ import annotations

import gc
import multiprocessing
import pickle
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Any
from unittest import TestCase

import pytest
import torch

import shardckpt
from shardckpt.checkpoint.stateful import state_stream

pytest.importorskip("torchft.checkpointing.transport")

from shardckpt.integrations.torchft import ShardckptTransport

SECOND, MINUTE = timedelta(seconds=1), timedelta(seconds=60)
STATE = {"user": {"default": {"weight": torch.arange(2_000_000.0), "lr": 0.1}}, "torchft": {"step": 3}}


@pytest.fixture
def make() -> Iterator[Callable[..., ShardckptTransport[Any]]]:
    """Return a function that makes transports, which the end of the test shuts down."""
    made: list[ShardckptTransport[Any]] = []

    def make(timeout: timedelta = MINUTE, **options: Any) -> ShardckptTransport[Any]:
        made.append(ShardckptTransport(timeout, host="127.0.0.1", **options))
        return made[-1]

    yield make
    for transport in made:
        transport.shutdown()
    assert not any(thread.name == "shardckpt-transport" for thread in threading.enumerate())


def test_torchfts_own_test_of_transports_passes() -> None:
    from torchft.checkpointing import transport_test

    cpu = torch.device("cpu")

    def init(rank: int, world: int) -> ShardckptTransport[Any]:
        return ShardckptTransport(timedelta(seconds=10), state_dict=lambda: transport_test.make_state_dict(cpu))

    transport_test.run_multi_recovery_test(TestCase(), init, cpu)


def receive_in_another_process(metadata: str, pipe: Any) -> None:
    weight = torch.zeros(2_000_000)
    transport = ShardckptTransport(MINUTE, state_dict=lambda: {"user": {"default": {"weight": weight}}})
    got = transport.recv_checkpoint(0, metadata, 3, MINUTE)
    is_filled = torch.equal(weight, torch.arange(2_000_000.0))
    pipe.send((is_filled, got["user"]["default"]["lr"], got["torchft"]))
    transport.shutdown()


def test_another_process_receives_a_state_also_if_it_asks_early(make: Any) -> None:
    sender, (ours, theirs) = make(), multiprocessing.get_context("fork").Pipe()
    arguments = (sender.metadata(), theirs)
    receiver = multiprocessing.get_context("fork").Process(target=receive_in_another_process, args=arguments)
    receiver.start()
    sender.send_checkpoint([1], 3, STATE, MINUTE)
    assert ours.poll(30)
    assert ours.recv() == (True, 0.1, {"step": 3})
    receiver.join(10)
    sender.disallow_checkpoint()


def test_an_offer_ends_and_another_step_is_refused(make: Any) -> None:
    sender, receiver = make(timedelta(seconds=2)), make()
    sender.send_checkpoint([1], 3, STATE, MINUTE)
    with pytest.raises(shardckpt.errors.RankError, match="it offers step 3"):
        receiver.recv_checkpoint(7, sender.metadata(), 4, MINUTE)
    sender.disallow_checkpoint()
    with pytest.raises(shardckpt.errors.RankError, match="rank 7 timed out") as error:
        receiver.recv_checkpoint(7, sender.metadata(), 3, timedelta(milliseconds=50))
    assert error.value.rank == 7


def test_a_value_that_is_no_plain_value_is_refused_by_name(make: Any) -> None:
    with pytest.raises(shardckpt.errors.UnsupportedError, match=r"user\.callback"):
        make().send_checkpoint([1], 3, {"user": {"callback": print}}, MINUTE)


def connect(transport: ShardckptTransport[Any]) -> socket.socket:
    port = int(transport.metadata().rpartition(":")[2].partition("/")[0])
    return socket.create_connection(("127.0.0.1", port), 10)


def test_only_peers_with_the_token_get_a_state(make: Any) -> None:
    sender, receiver = make(), make()
    sender.send_checkpoint([1], 3, STATE, MINUTE)
    for request in (b"shardckpt-state/1 " + b"0" * 32 + b" 3\n", b"GET / HTTP/1.1\r\n", b"x" * 4096, b"\n"):
        with connect(sender) as peer:
            peer.sendall(request)
            with suppress(ConnectionResetError):  # for bytes that it has not read
                assert peer.recv(100) == b""
    wrong = sender.metadata()[:-32] + "0" * 32
    with pytest.raises(shardckpt.errors.RankError):
        receiver.recv_checkpoint(0, wrong, 3, MINUTE)
    for address in ("http://127.0.0.1:80/", "shardckpt://a:99999/" + "0" * 32, "", "shardckpt://a b:1/" + "0" * 32):
        with pytest.raises(shardckpt.errors.FormatError):
            receiver.recv_checkpoint(0, address, 3, MINUTE)
    assert receiver.recv_checkpoint(0, sender.metadata(), 3, MINUTE)["torchft"] == {"step": 3}


class Hostile:
    """A sender that answers every request as it likes."""

    def __init__(self, answer: Callable[[socket.socket], object]) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.metadata = f"shardckpt://127.0.0.1:{self._listener.getsockname()[1]}/{'0' * 32}"

        def serve() -> None:
            connection, _ = self._listener.accept()
            with connection, self._listener, suppress(OSError):
                connection.recv(1000)
                answer(connection)

        threading.Thread(target=serve, daemon=True).start()


class Executed:
    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("executed",)


def drip(connection: socket.socket) -> None:
    connection.sendall(b"ok\n")
    for byte in b"shardckS" * 1000:
        connection.sendall(bytes([byte]))
        time.sleep(0.05)


ANSWERS: dict[str, tuple[Callable[[socket.socket], object], type[Exception]]] = {
    "nothing": (lambda peer: None, shardckpt.errors.RankError),
    "silence": (lambda peer: time.sleep(5), shardckpt.errors.RankError),
    "a drip": (drip, shardckpt.errors.RankError),
    "a line without end": (lambda peer: peer.sendall(b"x" * 100_000), shardckpt.errors.RankError),
    "a pickle": (lambda peer: peer.sendall(b"ok\n" + pickle.dumps(Executed())), shardckpt.errors.FormatError),
    "an early end": (lambda peer: peer.sendall(b"ok\nshardckS\x05"), shardckpt.errors.RankError),
    "a huge header": (lambda peer: peer.sendall(b"ok\nshardckS" + b"\xff" * 8), shardckpt.errors.UnsafeError),
    "a wrong hash": (lambda peer: peer.sendall(b"ok\nshardckS" + b"\x02" + b"\0" * 20), shardckpt.errors.ChecksumError),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_a_hostile_sender_is_a_typed_error_within_the_timeout(name: str, make: Any, capsys: Any) -> None:
    answer, expected = ANSWERS[name]
    with pytest.raises(expected):
        make().recv_checkpoint(1, Hostile(answer).metadata, 3, timedelta(seconds=0.4))
    assert "executed" not in capsys.readouterr().out


def test_a_peer_that_does_not_read_does_not_hold_the_state(make: Any) -> None:
    sender = make(timedelta(seconds=0.3))
    sender.send_checkpoint([1], 3, {"weight": torch.zeros(20_000_000)}, MINUTE)
    token = sender.metadata().rpartition("/")[2]
    with connect(sender) as peer:
        peer.sendall(f"shardckpt-state/1 {token} 3\n".encode())
        assert peer.recv(3) == b"ok\n"
        sender.disallow_checkpoint()
        peer.settimeout(10)
        with pytest.raises((ConnectionError, AssertionError)):
            received = 0
            while part := peer.recv(1 << 20):
                received += len(part)
            assert received > 80_000_000, "the state was not sent to its end"


def test_peers_beyond_the_limit_are_turned_away_and_do_not_stop_others(make: Any) -> None:
    sender = make()
    sender.send_checkpoint([1], 3, STATE, MINUTE)
    peers = [connect(sender) for _ in range(70)]
    last = peers[-1]
    last.settimeout(10)
    with suppress(ConnectionError):
        assert last.recv(1) == b""
    for peer in peers:
        peer.close()
    end = time.monotonic() + 10
    while True:
        try:
            assert make().recv_checkpoint(0, sender.metadata(), 3, MINUTE)["torchft"] == {"step": 3}
            break
        except shardckpt.errors.RankError:  # threads of the closed connections have not ended
            assert time.monotonic() < end


def test_a_name_that_is_never_resolved_ends_in_time(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    end = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: end.wait(50) and [])
    with pytest.raises(shardckpt.errors.RankError, match="timed out"):
        make().recv_checkpoint(1, "shardckpt://peer:1/" + "0" * 32, 3, timedelta(seconds=0.2))
    assert not end.is_set(), "the call did not wait for the resolver"
    end.set()


def test_a_name_without_an_address_is_a_lost_peer(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [])
    with pytest.raises(shardckpt.errors.RankError, match="peer has no address"):
        make().recv_checkpoint(1, "shardckpt://peer:1/" + "0" * 32, 3, SECOND)


def test_the_thread_of_a_transport_that_was_dropped_ends() -> None:
    transport = ShardckptTransport[Any](MINUTE, host="127.0.0.1")
    transport.send_checkpoint([1], 3, STATE, MINUTE)
    [thread] = [each for each in threading.enumerate() if each.name == "shardckpt-transport"]
    del transport
    gc.collect()
    thread.join(20)
    assert not thread.is_alive()


def test_reading_a_header_of_many_tensors_is_under_the_deadline(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sender, receiver = make(), make()
    sender.send_checkpoint([1], 3, {str(at): torch.empty(0) for at in range(1000)}, MINUTE)
    read_row, read = state_stream._read_row, []

    def read_slowly(*row: Any) -> Any:
        read.append(row)
        time.sleep(0.05)
        return read_row(*row)

    monkeypatch.setattr(state_stream, "_read_row", read_slowly)
    with pytest.raises(shardckpt.errors.RankError, match="timed out"):
        receiver.recv_checkpoint(0, sender.metadata(), 3, timedelta(seconds=0.5))
    assert len(read) < 100
