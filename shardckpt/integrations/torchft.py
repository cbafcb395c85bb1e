"""Recover torchft's replicas: a transport that sends states over TCP with hashes, without pickle.

A request is one line: `MAGIC`, the sender's token and the step. The answer is a line, `ok` or an error, and the stream
with the state (`shardckpt.checkpoint.stateful.state_stream`).
"""

from __future__ import annotations

from shardckpt.errors import require_packages

require_packages("shardckpt.integrations.torchft", "torch", "torchft", install="'shardckpt[torchft]'")

import hmac
import logging
import re
import secrets
import socket
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import TypeVar

from torchft.checkpointing.transport import CheckpointTransport

from shardckpt.checkpoint.stateful.state_stream import StateStream, build_stream, read_stream
from shardckpt.errors import FormatError, RankError
from shardckpt.integrations.torchft_peer import Peer, connect

__all__ = ["ShardckptTransport"]

T = TypeVar("T")

_LOG = logging.getLogger("shardckpt")
_ADDRESS = re.compile(r"shardckpt://(?P<host>[0-9A-Za-z._-]{1,253}):(?P<port>[0-9]{1,5})/(?P<token>[0-9a-f]{32})")
_REQUEST = re.compile(rb"shardckpt-state/1 (?P<token>[0-9a-f]{32}) (?P<step>-?[0-9]{1,18})\n")
_MAX_PEERS = 64
_REQUEST_SECONDS = 10.0  # that a peer has to send its request
_POLL_SECONDS = 0.5
_END_SECONDS = 5.0  # for threads to end after their connections


class ShardckptTransport(CheckpointTransport[T]):  # type: ignore[misc]  # torchft is not typed here
    """Transport for states between torchft replicas.

    A peer that sends wrong bytes cannot execute code here: a state is JSON and tensor elements, and each block is
    checked before it is used. Its costs are linear in the bytes that it sends, and nothing waits longer than `timeout`.
    Only peers that know the result of `metadata` get a state; it is sent unencrypted.

    Args:
        timeout: Maximum time for the sender's transfer.
        state_dict: Function that returns this replica's state as its `Manager` sends it. Its tensors are filled in
            place, including DTensors and tensors on devices. None to receive new tensors on the CPU, without DTensors.
        host: Name or address under which peers reach this process; None for this machine's name.

    Examples:
        >>> transport = ShardckptTransport(timedelta(seconds=60))  # doctest: +SKIP
        >>> manager = torchft.Manager(..., checkpoint_transport=transport)  # doctest: +SKIP
    """

    def __init__(
        self, timeout: timedelta, *, state_dict: Callable[[], T] | None = None, host: str | None = None
    ) -> None:
        self._state_dict = state_dict
        self._server = _StateServer(timeout.total_seconds())
        self._host = host or socket.gethostname()
        weakref.finalize(self, self._server.abandon).atexit = False

    def metadata(self) -> str:
        """Return this process's address, with the token that peers need."""
        return f"shardckpt://{self._host}:{self._server.port}/{self._server.token}"

    def send_checkpoint(self, dst_ranks: list[int], step: int, state_dict: T, timeout: timedelta) -> None:
        """Offer a state to peers until `disallow_checkpoint`; it must not change before.

        Args:
            dst_ranks: Ranks that will ask for it.
            step: The state's step.
            state_dict: The state: tensors, arrays and plain values, in dicts, lists and tuples.
            timeout: Not used: peers ask for the state, and have their own time limit.

        Raises:
            UnsupportedError: A value cannot be sent; the message has its dotted path.
        """
        del dst_ranks, timeout
        self._server.offer(step, build_stream(state_dict))

    def disallow_checkpoint(self) -> None:
        """End the offer: wait for running transfers, and end them when they exceed the timeout."""
        self._server.withdraw()

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> T:
        """Return the state that a peer offers.

        Args:
            src_rank: The peer's rank.
            metadata: Result of the peer's `metadata`.
            step: The state's step.
            timeout: Maximum time, including the wait until the peer offers the state.

        Raises:
            RankError: The peer is lost, offers another step, or the time is over.
            ChecksumError: Bytes arrived damaged.
            CheckpointError: The bytes are not a state.
            UsageError: The state does not fit this replica's state.
        """
        match = _ADDRESS.fullmatch(metadata)
        if match is None or not 0 < int(match["port"]) < 1 << 16:
            raise FormatError(
                "this is not the address of a ShardckptTransport", where=f"rank {src_rank}", found=metadata
            )
        deadline = time.monotonic() + timeout.total_seconds()
        try:
            with connect(match["host"], int(match["port"]), deadline) as connection:
                peer = Peer(connection, deadline)
                peer.send(f"shardckpt-state/1 {match['token']} {step}\n".encode())
                answer = peer.read_line()
                if answer != b"ok\n":
                    reason = answer.decode("ascii", "replace").strip() or "the connection ended"
                    raise RankError(f"rank {src_rank} does not send step {step}: {reason}", rank=src_rank)
                target = None if self._state_dict is None else self._state_dict()
                return read_stream(peer.read, target, f"rank {src_rank}", peer.check)  # type: ignore[no-any-return]
        except TimeoutError as error:
            raise RankError(f"receiving step {step} from rank {src_rank} timed out", rank=src_rank) from error
        except OSError as error:
            raise RankError(f"rank {src_rank} is lost: {str(error) or type(error).__name__}", rank=src_rank) from error

    def shutdown(self, wait: bool = True) -> None:
        """End the server, and running transfers.

        Args:
            wait: Wait until its thread has ended.
        """
        self._server.close(wait)


class _StateServer:
    """Server for the state that this process offers."""

    def __init__(self, timeout: float) -> None:
        self.token = secrets.token_hex(16)  # a request must contain it
        self._timeout = timeout
        self._changed = threading.Condition()
        self._offered: tuple[int, StateStream] | None = None
        self._sending: set[socket.socket] = set()
        self._peers: set[socket.socket] = set()
        self._is_closed = False
        is_dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if is_dual else socket.AF_INET
        self._listener = socket.create_server(("", 0), family=family, dualstack_ipv6=is_dual)
        self._listener.settimeout(_POLL_SECONDS)
        self.port: int = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._accept, name="shardckpt-transport", daemon=True)
        self._thread.start()

    def offer(self, step: int, stream: StateStream) -> None:
        """Send a state to peers that ask for its step; it replaces an earlier state."""
        self.withdraw()
        with self._changed:
            self._offered = step, stream
            self._changed.notify_all()

    def withdraw(self) -> None:
        """Stop sending the state; when it returns, the state may change."""
        with self._changed:
            self._offered = None
            # Running transfers end within the timeout; the rest is time for their threads to notice it.
            self._changed.wait_for(lambda: not self._sending, self._timeout + _END_SECONDS)

    def close(self, wait: bool) -> None:
        """Stop the server and all transfers."""
        with self._changed:
            self._is_closed, self._offered = True, None
            self._changed.notify_all()
            for connection in self._peers:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
            self._changed.wait_for(lambda: not self._peers, _END_SECONDS)
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # ends `accept` at once where the system supports that
        if wait:
            self._thread.join(_END_SECONDS)

    def abandon(self) -> None:
        """End the server soon, without locks, for a transport without references."""
        self._is_closed, self._offered = True, None

    def _accept(self) -> None:
        with self._listener:
            while not self._is_closed:
                with suppress(OSError):
                    connection, _ = self._listener.accept()
                    with self._changed:
                        is_refused = self._is_closed or len(self._peers) == _MAX_PEERS
                        if not is_refused:
                            self._peers.add(connection)
                    if is_refused:
                        connection.close()
                    else:
                        threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        """Answer one peer."""
        try:
            with connection:
                self._answer(connection)
        except OSError as error:
            _LOG.warning("a peer did not get a state: %s", error)
        finally:
            with self._changed:
                self._peers.discard(connection)
                self._changed.notify_all()

    def _answer(self, connection: socket.socket) -> None:
        now = time.monotonic()
        match = _REQUEST.fullmatch(Peer(connection, now + min(_REQUEST_SECONDS, self._timeout)).read_line())
        if match is None or not hmac.compare_digest(match["token"], self.token.encode()):
            return
        peer, step = Peer(connection, now + self._timeout), int(match["step"])
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or self._offered is not None, self._timeout)
            offered = self._offered
            if offered is not None and offered[0] == step:
                self._sending.add(connection)
        if offered is None or offered[0] != step:
            peer.send(b"no state was offered: timed out\n" if offered is None else b"it offers step %d\n" % offered[0])
            return
        try:
            peer.send(b"ok\n")
            for part in offered[1]:
                peer.send(part)
        finally:
            with self._changed:
                self._sending.discard(connection)
                self._changed.notify_all()
