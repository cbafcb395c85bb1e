"""A question that is given up takes no later answer with it, and leaves no process."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.kit.runs.line_server import LineServer
from tests.kit.runs.tier_runs import is_alive, wait_for

SERVER = """
import json, subprocess, sys
from pathlib import Path
for line in sys.stdin:
    seconds, folder = json.loads(line)
    child = subprocess.Popen(["sleep", str(seconds)])
    Path(folder, f"pid-{child.pid}").touch()
    child.wait()
    print(json.dumps({"slept": seconds}), flush=True)
"""


@pytest.fixture
def server() -> Iterator[LineServer]:
    with LineServer([sys.executable, "-c", SERVER]) as server:
        yield server


@contextmanager
def interrupted_when(condition: Callable[[], bool]) -> Iterator[None]:
    """Raise a TimeoutError from a signal handler of this thread once a condition holds, as pytest-timeout does."""

    def interrupt(*_: object) -> None:
        raise TimeoutError

    def wait() -> None:
        wait_for(condition)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)

    former = signal.signal(signal.SIGUSR1, interrupt)
    thread = threading.Thread(target=wait)
    thread.start()
    try:
        yield
    finally:
        thread.join()
        signal.signal(signal.SIGUSR1, former)


def test_one_process_answers_all_questions(server: LineServer, tmp_path: Path) -> None:
    assert [server.ask([seconds, str(tmp_path)]) for seconds in (0, 0.1)] == [{"slept": 0}, {"slept": 0.1}]
    assert len(list(tmp_path.iterdir())) == 2


def test_a_question_that_is_given_up_ends_its_processes_and_the_next_is_answered(
    server: LineServer, tmp_path: Path
) -> None:
    with pytest.raises(TimeoutError), interrupted_when(lambda: any(tmp_path.iterdir())):
        server.ask([60, str(tmp_path)])
    (given_up,) = tmp_path.iterdir()
    wait_for(lambda: not is_alive(int(given_up.name.removeprefix("pid-"))))
    assert server.ask([0, str(tmp_path)]) == {"slept": 0}


def test_a_process_that_ends_by_itself_is_started_again(tmp_path: Path) -> None:
    code = SERVER.replace("child.wait()", "child.wait(); seconds or sys.exit(3)")
    with LineServer([sys.executable, "-c", code]) as server:
        with pytest.raises(ValueError, match="Expecting value"):
            server.ask([0, str(tmp_path)])
        assert server.ask([0.1, str(tmp_path)]) == {"slept": 0.1}
