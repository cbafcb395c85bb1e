"""Asks a process that has imported what many questions need; each question and each answer is a line of JSON."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self


class LineServer:
    """A process that answers one question after the other, started by the first one.

    A question without an answer ends the process and all that it has started, as if a test's time is up. Otherwise
    the answer would come later, and be taken for the answer to the next question.

    Args:
        command: Command line of the process.
        settings: Environment variables that it gets beside those of this process.
    """

    def __init__(self, command: Sequence[str], settings: Mapping[str, str] | None = None) -> None:
        self._command, self._environment = command, {**os.environ, **(settings or {})}
        self._server: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the process by the end of its questions."""
        if self._server is not None:
            with self._server as server:
                assert server.stdin is not None
                server.stdin.close()

    def ask(self, question: object) -> dict[str, Any]:
        """Return the answer to a question."""
        try:
            server = self._server = self._server or self._start()
            assert server.stdin is not None and server.stdout is not None
            server.stdin.write(json.dumps(question) + "\n")
            server.stdin.flush()
            answer: dict[str, Any] = json.loads(server.stdout.readline())
        except BaseException:
            self._kill()
            raise
        return answer

    def _start(self) -> subprocess.Popen[str]:
        """Start the process in a session of its own, so that one signal ends it and all that it starts."""
        pipe = subprocess.PIPE
        return subprocess.Popen(
            self._command, stdin=pipe, stdout=pipe, text=True, env=self._environment, start_new_session=True
        )

    def _kill(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            os.killpg(server.pid, signal.SIGKILL)  # nobody has waited for it, so the number is still its own
            with contextlib.suppress(BrokenPipeError), server:
                pass
