"""Ranks that do not keep a core busy while bytes of a peer wait for them: `patient_epoll.c`, loaded before all else.

gloo spins there, which was a fifth of what tests of ranks took on two cores.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_suffix(".c")


def build() -> Path | None:
    """Return the compiled library, in a folder of this user; None where it cannot be had: tests only take longer."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if sys.platform != "linux" or compiler is None:
        return None
    key = hashlib.sha256(SOURCE.read_bytes() + platform.machine().encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"shardckpt-epoll-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    library, made = folder / f"{key}.so", folder / f"{key}.{os.getpid()}.new"
    if folder.stat().st_uid != os.getuid():
        return None
    if not library.exists():
        command = [compiler, "-O2", "-shared", "-fPIC", str(SOURCE), "-o", str(made), "-ldl"]
        if subprocess.run(command, capture_output=True, check=False).returncode != 0:
            return None
        made.replace(library)
    return library


def preload(environment: dict[str, str]) -> dict[str, str]:
    """Return what to add to an environment so that processes start with the library."""
    library = build()
    if library is None:
        return {}
    others = environment.get("LD_PRELOAD", "").split()
    return {"LD_PRELOAD": " ".join([str(library), *(each for each in others if each != str(library))])}
