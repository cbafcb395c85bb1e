"""A stream's folder is read over HTTP, by ranges, and nothing else is."""

from __future__ import annotations

import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import shardckpt
from shardckpt.errors import SourceNotFoundError, StorageError
from shardckpt.stream.http_server import build_stream_server


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    folder = tmp_path / "stream"
    folder.mkdir()
    (tmp_path / "secret").write_bytes(b"secret")
    server = build_stream_server(str(folder), "127.0.0.1", 0)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield folder, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def get(url: str, ranged: str = "") -> tuple[int, bytes]:
    request = urllib.request.Request(url, headers={"Range": ranged} if ranged else {})
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


@pytest.mark.filterwarnings("ignore:a removal of old versions may interrupt this reader")
def test_a_receiver_follows_a_folder_of_another_host(served: tuple[Path, str]) -> None:
    folder, url = served
    weights = {"a": torch.zeros(1000), "b": torch.ones(50)}
    into = {name: torch.empty_like(value) for name, value in weights.items()}
    subscriber = shardckpt.Subscriber(url)
    with shardckpt.Publisher(folder, anchors=shardckpt.Anchors(max_bytes=1e6)) as publisher:
        for version in range(1, 5):
            weights["a"][version] = version
            publisher.publish(version, weights).result()
            if version in (1, 4):
                assert subscriber.stage().commit(into).number == version
                assert torch.equal(into["a"], weights["a"])


@pytest.mark.parametrize(
    ("ranged", "expected"),
    [
        ("", (200, b"0123456789")),
        ("bytes=0-3", (206, b"0123")),
        ("bytes=7-", (206, b"789")),
        ("bytes=8-99", (206, b"89")),
        ("bytes=10-11", (416, b"")),
        ("bytes=5-2", (416, b"")),
        ("bytes=x", (200, b"0123456789")),
    ],
)
def test_ranges_of_a_file(served: tuple[Path, str], ranged: str, expected: tuple[int, bytes]) -> None:
    folder, url = served
    (folder / "file").write_bytes(b"0123456789")
    assert get(f"{url}/file", ranged) == expected


@pytest.mark.parametrize("path", ["../secret", "%2e%2e/secret", "..%2fsecret", "/../secret", "missing"])
@pytest.mark.parametrize("ranged", ["", "bytes=0-1"])
def test_nothing_outside_of_the_folder_is_read(served: tuple[Path, str], path: str, ranged: str) -> None:
    assert get(f"{served[1]}/{path}", ranged)[0] == 404


def test_nothing_can_be_written(served: tuple[Path, str]) -> None:
    request = urllib.request.Request(f"{served[1]}/file", data=b"x", method="PUT")
    with pytest.raises(urllib.error.HTTPError):
        urllib.request.urlopen(request, timeout=10)
    assert not list(served[0].iterdir())


def test_what_cannot_be_served_is_refused(tmp_path: Path, served: tuple[Path, str]) -> None:
    with pytest.raises(SourceNotFoundError, match="no such folder"):
        build_stream_server(str(tmp_path / "none"), "127.0.0.1", 0)
    with pytest.raises(StorageError, match="cannot serve"):
        build_stream_server(str(served[0]), "127.0.0.1", int(served[1].rpartition(":")[2]))


@pytest.mark.parametrize("slash", ["", "/"])
def test_offline_verbs_read_a_stream_of_another_host(served: tuple[Path, str], slash: str) -> None:
    folder, url = served
    with shardckpt.Publisher(folder) as publisher:
        for version in (1, 2):
            publisher.publish(version, {"a": torch.full((9,), float(version))})
    found = shardckpt.verify_versions(f"{url}{slash}")
    assert found.ok and found.is_verified and [each.number for each in found.versions] == [1, 2]
    for name in ("/@2", "/@latest", f"/e00001-v{2:010d}{slash}"):
        assert shardckpt.load(f"{url}{name}")["a"].tolist() == [2.0] * 9
        assert shardckpt.verify(f"{url}{name}").ok
    next(folder.glob("e*2/delta-*")).write_bytes(b"")
    assert [bool(each.problem) for each in shardckpt.verify_versions(f"{url}{slash}").versions] == [False, True]
