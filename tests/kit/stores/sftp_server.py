"""An SFTP server of paramiko, for machines without OpenSSH's: `python sftp_server.py HOST_KEY AUTHORIZED_KEY`.

It serves the files of the machine to whoever has the key, on a loopback port that it announces as sshd does.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import paramiko
from paramiko.sftp import SFTP_OK


def told(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that gives the error of the system as SFTP's code."""

    def answered(self: Any, *args: Any) -> Any:
        try:
            return call(self, *args)
        except OSError as error:
            return paramiko.SFTPServer.convert_errno(error.errno)

    return answered


class OpenFile(paramiko.SFTPHandle):
    """One open file; what is written is with the system before it is answered."""

    def __init__(self, descriptor: int, flags: int) -> None:
        super().__init__(flags)
        self.readfile = self.writefile = os.fdopen(descriptor, "r+b" if flags & os.O_RDWR else _mode(flags), 0)

    @told
    def stat(self) -> Any:
        """Return the attributes of the open file."""
        return paramiko.SFTPAttributes.from_stat(os.fstat(self.readfile.fileno()))


def _mode(flags: int) -> str:
    return "wb" if flags & os.O_WRONLY else "rb"


class Files(paramiko.SFTPServerInterface):
    """The files of this machine."""

    @told
    def list_folder(self, path: str) -> Any:
        """List a folder with the attributes of what is in it."""
        entries = sorted(os.scandir(path), key=lambda entry: entry.name)
        return [paramiko.SFTPAttributes.from_stat(e.stat(follow_symlinks=False), e.name) for e in entries]

    @told
    def stat(self, path: str) -> Any:
        """Return the attributes of what a path leads to."""
        return paramiko.SFTPAttributes.from_stat(os.stat(path))

    @told
    def lstat(self, path: str) -> Any:
        """Return the attributes of a path itself."""
        return paramiko.SFTPAttributes.from_stat(os.lstat(path))

    @told
    def open(self, path: str, flags: int, attr: paramiko.SFTPAttributes) -> Any:
        """Open a file."""
        return OpenFile(os.open(path, flags, 0o666 if attr.st_mode is None else attr.st_mode), flags)

    @told
    def remove(self, path: str) -> int:
        """Remove a file."""
        os.unlink(path)
        return SFTP_OK

    @told
    def rename(self, oldpath: str, newpath: str) -> int:
        """Rename, unless something has the new name."""
        if os.path.lexists(newpath):
            return paramiko.sftp.SFTP_FAILURE
        os.rename(oldpath, newpath)
        return SFTP_OK

    @told
    def posix_rename(self, oldpath: str, newpath: str) -> int:
        """Rename, and replace what has the new name."""
        os.rename(oldpath, newpath)
        return SFTP_OK

    @told
    def mkdir(self, path: str, attr: paramiko.SFTPAttributes) -> int:
        """Make a folder."""
        os.mkdir(path, 0o777 if attr.st_mode is None else attr.st_mode)
        return SFTP_OK

    @told
    def rmdir(self, path: str) -> int:
        """Remove an empty folder."""
        os.rmdir(path)
        return SFTP_OK

    @told
    def chattr(self, path: str, attr: paramiko.SFTPAttributes) -> int:
        """Set attributes."""
        paramiko.SFTPServer.set_file_attr(path, attr)
        return SFTP_OK


class Session(paramiko.ServerInterface):
    """Lets in whoever has the one key."""

    def __init__(self, authorized: str) -> None:
        self.authorized = authorized

    def get_allowed_auths(self, username: str) -> str:
        """Name the ways to authenticate."""
        return "publickey"

    def check_auth_publickey(self, username: str, key: paramiko.PKey) -> int:
        """Compare the key with the authorized one."""
        return paramiko.AUTH_SUCCESSFUL if key.get_base64() == self.authorized else paramiko.AUTH_FAILED

    def check_channel_request(self, kind: str, chanid: int) -> int:
        """Open any session."""
        return paramiko.OPEN_SUCCEEDED


def serve(host_key: str, authorized_key: str) -> None:
    """Serve until the process is ended."""
    key = paramiko.Ed25519Key(filename=host_key)
    authorized = Path(authorized_key).read_text().split()[1]
    listener = socket.create_server(("127.0.0.1", 0), backlog=100)
    print(f"Server listening on 127.0.0.1 port {listener.getsockname()[1]}", flush=True)
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=_serve_connection, args=(connection, key, authorized), daemon=True).start()


def _serve_connection(connection: socket.socket, key: paramiko.PKey, authorized: str) -> None:
    transport = paramiko.Transport(connection)
    transport.add_server_key(key)
    transport.set_subsystem_handler("sftp", paramiko.SFTPServer, Files)
    try:
        transport.start_server(server=Session(authorized))
        transport.join()
    except (paramiko.SSHException, EOFError, OSError):  # the client has left
        transport.close()


if __name__ == "__main__":
    serve(*sys.argv[1:])
