"""A store that fails now and then is asked again; one that goes on failing is an error that every rank is told of."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import s3fs
import torch
from botocore.retries.standard import ExponentialBackoff

import shardckpt
from shardckpt.errors import ShardckptError, StorageError
from shardckpt.offline.verify import verify
from shardckpt.storage import retry
from tests.kit.ranks.harness import raised_everywhere
from tests.kit.stores.faulty import DROP, LOST, SHORT, SLOW, Fault, Faulty, faulty_s3


@pytest.fixture
def s3(s3_bucket: str, s3_server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Faulty]:
    """A server that can be broken in front of the S3 server; nobody pauses between tries."""
    monkeypatch.setattr(retry, "FIRST_PAUSE_S", 0.0)
    monkeypatch.setattr(ExponentialBackoff, "delay_amount", lambda self, context: 0.0)
    with faulty_s3(s3_server) as front:
        yield front


def state(value: int) -> dict:
    return {"w": torch.full((5000,), float(value)), "step": value}


def holds(url: str, value: int) -> bool:
    found = shardckpt.load(url)
    return found["step"] == value and torch.equal(found["w"], state(value)["w"]) and verify(url).ok


KINDS = [500, 503, DROP, SHORT, LOST]


@pytest.mark.usefixtures("s3_driver")
def test_any_request_may_fail_once(s3: Faulty, s3_bucket: str) -> None:
    url = f"{s3_bucket}/c"

    def use(value: int) -> None:
        shardckpt.save(state(value), url, overwrite=True)
        assert shardckpt.load(url)["step"] == value

    use(0)
    use(1)
    s3.heal()
    use(2)
    requests = len(s3.requests)
    for k in range(1, requests + 1):
        fault = KINDS[k % len(KINDS)]
        s3.arm(lambda number, method, path, k=k, fault=fault: fault if number == k else None)
        use(10 + k)
        assert len(s3.requests) > requests or fault == SHORT, f"request {k} was not made again after {fault}"
    s3.heal()
    assert holds(url, 10 + requests)
    print(f"each of {requests} requests failed once, in turn by {KINDS}")
    assert requests > 10


@pytest.mark.usefixtures("s3_driver")
@pytest.mark.parametrize("fault", [500, 503, 429, DROP, LOST, SLOW], ids=str)
def test_what_is_most_precious_may_fail_once_in_any_way(s3: Faulty, s3_bucket: str, fault: Fault) -> None:
    url = f"{s3_bucket}/c"
    wanted = [("PUT", "COMMIT"), ("PUT", ".safetensors"), ("GET", ".safetensors"), ("GET", "COMMIT")]

    def rule(number: int, verb: str, path: str) -> Fault:
        for each in wanted:
            if each[0] == verb and path.partition("?")[0].endswith(each[1]):
                wanted.remove(each)
                return fault
        return None

    s3.arm(rule)
    shardckpt.save(state(2), url)
    assert holds(url, 2)
    assert wanted == [], "nothing was broken"


@pytest.mark.usefixtures("s3_driver")
def test_a_store_that_cannot_put_only_what_is_new_is_looked_at_first(s3: Faulty, s3_bucket: str) -> None:
    url = f"{s3_bucket}/c"
    puts = []

    def rule(number: int, verb: str, path: str) -> Fault:
        if verb == "PUT" and path.endswith("COMMIT"):
            puts.append(path)
        return 501 if len(puts) == 1 and path is puts[-1] else None

    s3.arm(rule)
    shardckpt.save(state(1), url)
    assert len(puts) == 2
    assert holds(url, 1)


class TestForGood:
    """From some request on nothing succeeds: an error on every rank, and the checkpoint of before."""

    @pytest.fixture(autouse=True)
    def few_tries(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)
        monkeypatch.setenv("AWS_MAX_ATTEMPTS", "2")

    @pytest.mark.parametrize(
        ("fault", "words"),
        [
            (503, "SlowDown|reduce your request rate|broken for a test"),
            (403, "broken for a test|credentials"),
            (DROP, "(?i)disconnected|connection|closed"),
        ],
        ids=lambda value: str(value)[:4],
    )
    def test_the_payload_of_one_rank(self, s3: Faulty, s3_bucket: str, fault: Fault, words: str) -> None:
        url = f"{s3_bucket}/c"
        shardckpt.save(state(1), url)
        before = set(s3fs.S3FileSystem().find(url))
        s3.arm(lambda number, method, path: fault if method == "PUT" and "-00001-" in path else None)

        def body(rank: int, world: int) -> None:
            shardckpt.save({f"t{n}": torch.full((9000,), float(n)) for n in range(4)}, url, overwrite=True)

        raised = raised_everywhere(2, body, timeout=60.0, group_timeout=50.0)
        assert raised[1].is_a(StorageError)
        assert "cannot finish" in raised[1].message or "cannot write" in raised[1].message
        assert "-00001-" in raised[1].message, "what could not be written is named"
        assert "rank 1" in raised[0].message
        assert f"saving to {url}" in raised[0].message
        for each in raised:
            assert re.search(words, each.message), each.message
        s3.heal()
        assert holds(url, 1)
        assert set(s3fs.S3FileSystem().find(url)) == before, "what the failed save wrote is still there"

    def test_the_commit_whose_fate_nobody_knows(self, s3: Faulty, s3_bucket: str) -> None:
        url = f"{s3_bucket}/c"
        shardckpt.save(state(1), url)
        s3.arm(lambda number, method, path: 500 if method == "PUT" and "COMMIT" in path else None)

        def body(rank: int, world: int) -> None:
            shardckpt.save(state(2), url, overwrite=True)

        raised = raised_everywhere(2, body, timeout=60.0, group_timeout=50.0)
        assert all("COMMIT" in each.message and "broken for a test" in each.message for each in raised)
        assert "rank 0" in raised[1].message
        s3.heal()
        assert holds(url, 1)
        shardckpt.save(state(3), url, overwrite=True)
        assert holds(url, 3)

    @pytest.mark.usefixtures("s3_driver")
    def test_reading(self, s3: Faulty, s3_bucket: str) -> None:
        url = f"{s3_bucket}/c"
        shardckpt.save(state(1), url)
        for fault, words in ((500, "tried 4 times"), (SHORT, "tried 4 times"), (403, "credentials")):
            s3.arm(
                lambda number, method, path, fault=fault: (
                    fault if method == "GET" and path.partition("?")[0].endswith(".safetensors") else None
                )
            )
            into = state(7)
            with pytest.raises(StorageError, match=words) as caught:
                shardckpt.load(into, url)
            assert ".safetensors" in str(caught.value)
            assert into["step"] == 7
        s3.heal()
        assert holds(url, 1)

    def test_a_store_that_never_answers(self, s3: Faulty, s3_bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
        url = f"{s3_bucket}/c"
        shardckpt.save(state(1), url)
        monkeypatch.setattr(s3fs.S3FileSystem, "read_timeout", 0.05)
        s3fs.S3FileSystem.clear_instance_cache()
        s3.arm(lambda number, method, path: SLOW if method == "GET" else None)
        with pytest.raises(StorageError, match=r"(?i)time"):
            shardckpt.load(url)


def test_a_step_with_a_lost_or_cut_file_is_refused_and_the_one_before_restored(tmp_path: Path) -> None:
    ck = shardckpt.Checkpointer(tmp_path)
    ck.save(1, state(1))
    ck.save(2, state(2))
    folder = Path(ck.path(2))
    for name in sorted(os.listdir(folder)):
        whole = (folder / name).read_bytes()
        for left in (None, b"", whole[: len(whole) // 2], whole[:-1]):
            (folder / name).unlink()
            if left is not None:
                (folder / name).write_bytes(left)
            if name != "model.safetensors.index.json":  # which is for others; verify looks at it
                with pytest.raises(ShardckptError):
                    shardckpt.load(folder)
            assert not (folder / "COMMIT").exists() or not verify(str(folder)).ok
            with pytest.warns(UserWarning, match="restored step 1"):
                into = state(0)
                assert shardckpt.Checkpointer(tmp_path).restore(into) == 1
            assert into["step"] == 1
            (folder / name).write_bytes(whole)
    assert holds(str(folder), 2)
