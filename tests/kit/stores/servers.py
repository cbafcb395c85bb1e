"""Servers of stores on this machine, started for tests: Azurite for Azure, OpenSSH or paramiko for SFTP."""

from __future__ import annotations

import getpass
import os
import re
import select
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ed25519

START_S = 60.0
"""Seconds a server may take to begin: node reads some hundred files, on a busy machine."""

AZURE_ACCOUNT = "devstoreaccount1"
AZURE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""Those that every Azurite has; they are no secret."""


class NoServerError(Exception):
    """There is no such server here, or it does not start; says which was looked for, and where."""


def find_azurite() -> str:
    """Return the program `azurite-blob`: the one that SHARDCKPT_AZURITE names, of node_modules, or on PATH."""
    named = os.environ.get("SHARDCKPT_AZURITE")
    beside = Path(__file__).resolve().parents[3] / "node_modules" / ".bin" / "azurite-blob"
    for found in (named, beside if beside.exists() else None, shutil.which("azurite-blob")):
        if found:
            return str(found)
    raise NoServerError("no azurite-blob on PATH or in node_modules; SHARDCKPT_AZURITE may name it")


def find_sshd() -> str | None:
    """Return OpenSSH's server: the one that SHARDCKPT_SSHD names, or where systems keep it; None if there is none."""
    places = f"{os.environ.get('PATH', '')}{os.pathsep}/usr/sbin{os.pathsep}/usr/local/sbin"
    return os.environ.get("SHARDCKPT_SSHD") or shutil.which("sshd", path=places)


def make_key(file: Path) -> None:
    """Write an Ed25519 key and, beside it, its public part, in the form of OpenSSH."""
    key = ed25519.Ed25519PrivateKey.generate()
    file.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption())
    )
    file.chmod(0o600)
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    file.with_name(f"{file.name}.pub").write_bytes(public + b"\n")


@contextmanager
def azurite(folder: Path) -> Iterator[tuple[str, str]]:
    """Run Azurite in memory; yield its version and a connection string."""
    program = find_azurite()
    version = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout.strip()
    command = [program, "--inMemoryPersistence", "--skipApiVersionCheck", "--disableTelemetry", "--silent"]
    with _running([*command, "--blobPort", "0"], folder) as process:
        port = _announced(process, re.compile(rb"listen\w* (?:at|on) http://127\.0\.0\.1:(\d+)"))
        endpoint = f"http://127.0.0.1:{port}/{AZURE_ACCOUNT}"
        account = f"DefaultEndpointsProtocol=http;AccountName={AZURE_ACCOUNT};AccountKey={AZURE_KEY}"
        yield version, f"{account};BlobEndpoint={endpoint};"


@contextmanager
def sftp(folder: Path) -> Iterator[tuple[str, int, Path]]:
    """Serve SFTP to this user on a loopback port; yield the server's version, the port, and a key that it takes.

    The server is OpenSSH's where the machine has it, else one of paramiko.
    """
    for name in ("host", "user"):
        make_key(folder / name)
    program = find_sshd()
    listening = re.compile(rb"Server listening on 127\.0\.0\.1 port (\d+)")
    if program is None:
        script = Path(__file__).with_name("sftp_server.py")
        with _running([sys.executable, str(script), str(folder / "host"), str(folder / "user.pub")], folder) as process:
            port = _announced(process, listening)
            yield _banner(port), port, folder / "user"
        return
    if os.getuid() == 0:  # it insists on this folder then, which lies in memory and goes with the machine
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    for last in (False, False, True):
        port = free_port()
        (folder / "sshd_config").write_text(_settings(folder, port))
        with _running([program, "-D", "-e", "-f", str(folder / "sshd_config")], folder) as process:
            try:
                _announced(process, listening)
            except NoServerError:  # another process may have taken the port since it was found free
                if last:
                    raise
                continue
            yield _banner(port), port, folder / "user"
            return


def _settings(folder: Path, port: int) -> str:
    lines = [
        f"Port {port}",
        "ListenAddress 127.0.0.1",
        f"HostKey {folder / 'host'}",
        f"AuthorizedKeysFile {folder / 'user.pub'}",
        "StrictModes no",
        "UsePAM no",
        "PasswordAuthentication no",
        "PermitRootLogin prohibit-password",
        "PidFile none",
        "MaxStartups 100",
        "Subsystem sftp internal-sftp",
    ]
    return "\n".join(lines) + "\n"


def user() -> str:
    """Return whom the SSH server lets in: whoever runs it."""
    return getpass.getuser()


def _banner(port: int) -> str:
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        return connection.recv(100).decode().strip().removeprefix("SSH-2.0-").replace("_", " ").split(" Debian")[0]


def free_port() -> int:
    """Return a port that no process listens on."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


@contextmanager
def _running(command: list[str], folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    try:
        process = subprocess.Popen(
            command, cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
    except OSError as error:
        raise NoServerError(f"{command[0]} does not run: {error}") from error
    try:
        yield process
    finally:
        process.terminate()
        process.wait(timeout=20)
        assert process.stdout is not None
        process.stdout.close()


def _announced(process: subprocess.Popen[bytes], words: re.Pattern[bytes]) -> int:
    """Return the port that a server says it listens at."""
    assert process.stdout is not None
    said, until = b"", time.monotonic() + START_S
    while time.monotonic() < until:
        ready, _, _ = select.select([process.stdout], [], [], 0.5)
        if not ready:
            continue
        more = os.read(process.stdout.fileno(), 4096)
        said += more
        found = words.search(said)
        if found:
            return int(found[1])
        if not more:
            break
    raise NoServerError(f"{process.args[0]} does not start: {said[-300:].decode(errors='replace')}")  # type: ignore[index]
