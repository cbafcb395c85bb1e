"""The benchmark of drivers measures each operation with both, and counts the requests of the server."""

from __future__ import annotations

import pytest

from tests.benchmarks.benchmark_scripts import run_script, script_fixture

pytest.importorskip("obstore")
stores = script_fixture("stores")


@pytest.mark.slow
def test_a_small_run_prints_every_row() -> None:
    done = run_script("stores", "--parts", "plain", "--bytes", "1MiB", "--files", "3", "--rounds", "1")
    assert done.returncode in (0, 1), done.stderr
    assert "Traceback" not in done.stderr
    rows = [line.split("|")[1].strip() for line in done.stdout.splitlines() if line.startswith("|")]
    assert rows[2:] == ["save", "load", "consolidate", "inspect", "prune"]


def test_the_server_counts_requests_and_is_set_by_its_own_path(stores) -> None:
    server = stores.SlowServer(lambda environ, start_response: [b"answer"])

    def ask(path: str, query: str = "") -> bytes:
        environ = {"PATH_INFO": path, "QUERY_STRING": query, "CONTENT_LENGTH": "6"}
        return b"".join(server(environ, lambda *_: None))

    assert [ask("/bucket/a") for _ in range(3)] == [b"answer"] * 3
    assert ask(stores.CONTROL) == b"3"
    assert ask(stores.CONTROL, "0.001,1e9") == b"0"
    assert ask("/bucket/a") == b"answer"
    assert (server._delay, server._rate) == (0.001, 1e9)


def test_a_call_is_measured_by_its_own_requests(stores, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = iter([7, 3])
    monkeypatch.setattr(stores, "control", lambda endpoint: next(counts))
    assert stores.measure("http://127.0.0.1:9", lambda: None).requests == 3
