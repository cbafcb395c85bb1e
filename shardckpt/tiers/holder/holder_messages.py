"""Messages between a holder and its clients: short JSON in packets, with at most one file descriptor.

Every request has a field `op`; its answer has the results, or the fields `error` and `text`.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from typing import Any

from shardckpt.errors import MissingFileError, NoSpaceError, StorageError, TargetExistsError, UnsafeError

VERSION = 1  # `hello` and `stop` are the same in every version

MAX_MESSAGE_BYTES = 1 << 16

MAX_LISTED = 200  # maximum entries in one answer to `list`, whose names have at most 1,024 bytes each as JSON

_ENCODER = json.JSONEncoder(separators=(",", ":"))

_KINDS = {
    "missing": MissingFileError,
    "no space": NoSpaceError,
    "exists": TargetExistsError,
    "unsafe": UnsafeError,
    "storage": StorageError,
}


def encode_message(message: Mapping[str, Any]) -> bytes:
    """Return a message as bytes."""
    data = _ENCODER.encode(message).encode()
    if len(data) > MAX_MESSAGE_BYTES:
        raise StorageError(
            "a message to or from a holder is too long",
            found=f"{len(data)} bytes",
            expected=f"at most {MAX_MESSAGE_BYTES} bytes",
        )
    return data


def decode_message(data: bytes) -> dict[str, Any]:
    """Parse a message, in time linear in its bytes."""
    try:
        message = json.loads(data) if len(data) <= MAX_MESSAGE_BYTES else None
    except (ValueError, RecursionError):
        message = None
    if not isinstance(message, dict):
        raise StorageError("a message of a holder must be a JSON object", found=f"{len(data)} bytes")
    return message


def get_field(message: Mapping[str, Any], name: str, kind: type) -> Any:
    """Return a field of a message. Raises StorageError unless it has the type."""
    value: Any = message.get(name)
    is_valid = type(value) is kind
    if is_valid and kind is int:
        is_valid = 0 <= value < 1 << 62
    if not is_valid:
        raise StorageError(f"the field `{name}` of a message must be of type {kind.__name__}", found=repr(value)[:80])
    return value


def encode_error(error: Exception) -> dict[str, str]:
    """Return the answer to a failed request."""
    kind = next((kind for kind, known in _KINDS.items() if isinstance(error, known)), "storage")
    return {"error": kind, "text": str(error)[:2000]}


def decode_error(answer: Mapping[str, Any], where: str) -> Exception | None:
    """Return the error in an answer; None without one."""
    if "error" not in answer:
        return None
    known = _KINDS.get(str(answer["error"]), StorageError)
    fix = "Raise `max_bytes`, or keep fewer captures." if known is NoSpaceError else ""
    return known(str(answer.get("text", "")), where=where, fix=fix)


def send(connection: socket.socket, message: Mapping[str, Any], fd: int | None = None) -> None:
    """Send a message, and a file descriptor if given."""
    data = encode_message(message)
    if fd is None:
        connection.send(data)
    else:
        socket.send_fds(connection, [data], [fd])


def receive(connection: socket.socket) -> tuple[dict[str, Any], int | None]:
    """Return the next message and its file descriptor; others are closed."""
    data, fds, *_ = socket.recv_fds(connection, MAX_MESSAGE_BYTES + 1, 4)
    for fd in fds[1:]:
        os.close(fd)
    try:
        if not data:
            raise ConnectionResetError("the other process has closed the connection")
        message = decode_message(data)
    except BaseException:
        if fds:
            os.close(fds[0])
        raise
    if fds:
        os.set_inheritable(fds[0], False)
    return message, fds[0] if fds else None
