"""Runs scripts to the end of their interpreters, each in a fork of one process that has imported torch and shardckpt.

Such a fork ends as any interpreter does: it waits for threads, runs `atexit` and prints the traceback of its error. To
import torch takes two seconds of CPU. `python interpreters.py`: a line of JSON on stdin, `{"code", "arguments"}`, gives
one on stdout, `{"returncode", "stdout", "stderr"}`.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

RunScript = Callable[..., subprocess.CompletedProcess[str]]
"""Runs `code` with arguments, as `python -c` would."""


@contextlib.contextmanager
def start_interpreters() -> Iterator[RunScript]:
    """Yield what runs a script in a fork of the process that imports."""
    from tests.kit.runs.line_server import LineServer

    with LineServer([sys.executable, __file__]) as server:

        def run_script(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
            answer = server.ask({"code": code, "arguments": arguments})
            return subprocess.CompletedProcess(["-c", *arguments], **answer)

        yield run_script


def serve() -> dict[str, Any] | None:
    """Run what stdin asks for until it ends; return in each fork what the rest of that process is to run."""
    for line in sys.stdin:
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            child = os.fork()
            if child == 0:
                for file, number in ((out, 1), (err, 2)):
                    os.dup2(file.fileno(), number)
                return json.loads(line)
            _, status = os.waitpid(child, 0)
            texts = [file.read() for file in (out, err) if file.seek(0) == 0]
            told = {"returncode": os.waitstatus_to_exitcode(status), "stdout": texts[0], "stderr": texts[1]}
        print(json.dumps(told), flush=True)
    return None


if __name__ == "__main__":
    import torch  # noqa: F401

    import shardckpt.checkpointer
    import shardckpt.open_checkpoint  # noqa: F401

    gc.freeze()  # the last collection of a fork would copy each page that it looks at
    ASKED = serve()
    if ASKED is not None:
        sys.argv = ["-c", *ASKED["arguments"]]
        exec(compile(ASKED["code"], "<string>", "exec"), {"__name__": "__main__"})
