"""The stores behind obstore: the suite on S3 and Azure; requests, retries, clean uploads, forks."""

from __future__ import annotations

import gc
import os
import pickle
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import boto3
import pytest

from shardckpt.errors import MissingFileError, StorageError, TruncatedError
from shardckpt.storage import fsspec_writer, obstore_client, obstore_files, retry
from shardckpt.storage.fsspec_store import FsspecStore
from shardckpt.storage.obstore_files import ObstoreFiles
from shardckpt.storage.range_cache import BLOCK
from shardckpt.storage.resolve_url import kind
from shardckpt.storage.store import read_bytes
from shardckpt.testing.store_suite import CONTENT, put
from tests.kit.ranks.forks import is_killed
from tests.kit.stores.faulty import DROP, LOST, SHORT, SLOW, Fault, Faulty, faulty_s3
from tests.storage.test_fsspec_store import FsspecSuite

pytest.importorskip("obstore")


class ObstoreSuite(FsspecSuite):
    def test_it_is_reached_by_obstore(self, store):
        assert isinstance(store._fs, ObstoreFiles)


class TestS3(ObstoreSuite):
    @pytest.fixture
    def store(self, obstore_s3):
        return FsspecStore(f"{obstore_s3}/some/root")


class TestS3AtTheRootOfABucket(ObstoreSuite):
    @pytest.fixture
    def store(self, obstore_s3):
        return FsspecStore(obstore_s3)


class TestAzure(ObstoreSuite):
    @pytest.fixture
    def store(self, obstore_azure):
        return FsspecStore(f"{obstore_azure}/some/root")


@pytest.fixture
def front(obstore_s3: str, s3_server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Faulty]:
    """A server that can be broken in front of the S3 server; nobody pauses between tries."""
    monkeypatch.setattr(retry, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(retry, "LOST", {})
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    with faulty_s3(s3_server) as server:
        yield server


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fsspec_writer, "PART_BYTES", 5 << 20)


def client(s3_server: str):
    return boto3.client("s3", endpoint_url=s3_server)


def unfinished(bucket: str, s3_server: str) -> list:
    return client(s3_server).list_multipart_uploads(Bucket=bucket[5:]).get("Uploads", [])


def verbs(front: Faulty) -> list[str]:
    return [method for method, _ in front.requests]


class TestRequests:
    def test_a_listing_gives_sizes_and_each_range_is_one_request(self, front, obstore_s3):
        data = os.urandom(3 << 20)
        put(FsspecStore(f"{obstore_s3}/run"), "a.bin", data)
        store = FsspecStore(f"{obstore_s3}/run")
        front.heal()
        store.list()
        assert read_bytes(store, "a.bin", 1000, 5000) == data[1000:6000]
        assert read_bytes(store, "a.bin", 0, BLOCK) == data[:BLOCK]
        assert verbs(front) == ["GET", "GET"]

    def test_a_small_file_is_written_by_one_request(self, front, obstore_s3):
        put(FsspecStore(obstore_s3), "a.bin")
        assert verbs(front) == ["PUT"]

    @pytest.mark.parametrize("name", ["file", "folder", "missing"])
    def test_at_most_two_requests_find_what_a_url_names(self, front, obstore_s3, name):
        put(FsspecStore(obstore_s3), "file")
        put(FsspecStore(obstore_s3), "folder/a.bin")
        front.heal()
        assert kind(f"{obstore_s3}/{name}") == name
        assert verbs(front) == ["HEAD", "GET"][: 1 + (name != "file")]

    def test_the_version_of_a_file_changes_with_its_content(self, obstore_s3):
        store = FsspecStore(obstore_s3)
        versions = set()
        for data in (b"1", b"2"):
            put(store, "a.bin", data)
            versions.add(store.version("a.bin"))
        assert len(versions) == 2
        assert abs(store.written_at("a.bin") - time.time()) < 60


class TestRetries:
    @pytest.mark.parametrize("fault", [500, 503, 429, DROP, SHORT], ids=str)
    def test_what_passes_is_tried_again(self, front, obstore_s3, fault: Fault):
        put(FsspecStore(obstore_s3), "a.bin")
        store = FsspecStore(obstore_s3)
        front.arm(lambda number, method, path: fault if number in {2, 3} else None)
        assert read_bytes(store, "a.bin", 0, 100) == CONTENT[:100]
        assert verbs(front) == ["HEAD", "GET", "GET", "GET"]

    @pytest.mark.parametrize(
        ("verb", "fault"),
        [(verb, fault) for verb in ("GET", "PUT", "POST") for fault in (500, 403, DROP)] + [("GET", SHORT)],
    )
    def test_tries_are_bounded_and_a_refusal_is_final(self, front, obstore_s3, verb: str, fault: Fault):
        put(FsspecStore(obstore_s3), "a.bin")
        store = FsspecStore(obstore_s3)
        store.list()
        front.arm(lambda number, method, path: fault)
        act = {
            "GET": lambda: read_bytes(store, "a.bin", 0, 100),
            "PUT": lambda: put(store, "b.bin"),
            "POST": lambda: store.delete("a.bin"),
        }[verb]
        with pytest.raises(StorageError, match=r"\.bin") as caught:
            act()
        assert not isinstance(caught.value, MissingFileError)
        assert verbs(front) == [verb] * (1 if fault == 403 else retry.ATTEMPTS)
        assert ("credentials" in str(caught.value)) == (fault in {500, 403, SHORT})

    def test_a_put_without_an_answer_is_never_taken_for_another_writers(self, front, obstore_s3):
        front.arm(lambda number, method, path: LOST if number == 1 else None)
        put(FsspecStore(obstore_s3), "a.bin")
        assert read_bytes(FsspecStore(obstore_s3), "a.bin", 0, 9) == CONTENT[:9]

    def test_a_server_that_never_answers_is_given_up(self, front, obstore_s3, monkeypatch):
        monkeypatch.setattr(retry, "UNANSWERED_S", -1.0)
        monkeypatch.setitem(obstore_client._CLIENT_OPTIONS, "read_timeout", "50ms")
        obstore_client._build_clients.cache_clear()
        front.arm(lambda number, method, path: SLOW)
        with pytest.raises(StorageError, match=r"tried for 0 s\): the server does not answer"):
            FsspecStore(obstore_s3).list()
        assert len(front.requests) == 1
        obstore_client._build_clients.cache_clear()

    def test_a_server_that_is_not_there_cannot_be_reached(self, obstore_s3, monkeypatch):
        monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
        monkeypatch.setattr(retry, "FIRST_PAUSE_S", 0.001)
        monkeypatch.setattr(retry, "LOST", {})
        with pytest.raises(StorageError, match=r"tried 4 times.*the server cannot be reached") as caught:
            kind(f"{obstore_s3}/x")
        assert not isinstance(caught.value, MissingFileError)

    def test_a_missing_bucket_is_named(self, obstore_s3):
        store = FsspecStore("s3://no-such-bucket-of-this-test/x")
        for act in (lambda: put(store, "a.bin"), lambda: store.size("a.bin"), lambda: read_bytes(store, "a.bin", 0, 1)):
            with pytest.raises(MissingFileError, match="the bucket does not exist"):
                act()
        assert kind("s3://no-such-bucket-of-this-test") == "missing"
        assert kind(obstore_s3) == "folder"


class TestUploads:
    pytestmark = pytest.mark.usefixtures("small_parts")

    def test_a_long_file_is_uploaded_in_parts(self, obstore_s3, s3_server):
        data = os.urandom(17 << 20)
        put(FsspecStore(obstore_s3), "a.bin", data)
        head = client(s3_server).head_object(Bucket=obstore_s3[5:], Key="a.bin")
        assert head["ETag"].endswith(('-3"', '-4"'))
        assert read_bytes(FsspecStore(obstore_s3), "a.bin", 0, len(data)) == data
        assert unfinished(obstore_s3, s3_server) == []

    @pytest.mark.parametrize("nbytes", [10, 12 << 20])
    def test_an_aborted_upload_leaves_neither_object_nor_parts(self, obstore_s3, s3_server, nbytes):
        writer = FsspecStore(obstore_s3).create("a.bin")
        writer.write(bytes(nbytes))
        writer.abort()
        del writer
        gc.collect()
        assert unfinished(obstore_s3, s3_server) == []
        assert FsspecStore(obstore_s3).list() == []

    @pytest.mark.parametrize("failing", ["partNumber=2", "POST"])
    def test_an_upload_that_fails_midway_leaves_no_parts(self, front, obstore_s3, s3_server, failing):
        def rule(number: int, method: str, path: str) -> Fault:
            is_last = failing == "POST" and method == "POST" and "uploadId" in path
            return 403 if is_last or failing in path else None

        front.arm(rule)
        with pytest.raises(StorageError, match=r"a\.bin.*broken for a test"):
            put(FsspecStore(obstore_s3), "a.bin", bytes(12 << 20))
        front.heal()
        assert unfinished(obstore_s3, s3_server) == []
        assert FsspecStore(obstore_s3).list() == []

    def test_a_part_that_fails_once_is_sent_again(self, front, obstore_s3, monkeypatch):
        monkeypatch.setenv("AWS_MAX_ATTEMPTS", "2")
        failed = []

        def rule(number: int, method: str, path: str) -> Fault:
            if "partNumber=2" in path and not failed:
                failed.append(path)
                return 503
            return None

        front.arm(rule)
        data = os.urandom(12 << 20)
        put(FsspecStore(obstore_s3), "a.bin", data)
        assert failed
        assert read_bytes(FsspecStore(obstore_s3), "a.bin", 0, len(data)) == data

    def test_more_parts_than_a_bucket_allows_are_refused_before_they_are_sent(self, obstore_s3, s3_server, monkeypatch):
        monkeypatch.setattr(obstore_files, "_MAX_PARTS", 2)
        with pytest.raises(StorageError, match=r"a\.bin.*more parts than a bucket allows"):
            put(FsspecStore(obstore_s3), "a.bin", bytes(11 << 20))
        assert unfinished(obstore_s3, s3_server) == []


class TestHostileKeys:
    @pytest.mark.parametrize("key", ["x//a", "x/./a", "x/../a"])
    def test_a_key_that_obstore_refuses_is_a_typed_error_of_its_listing(self, obstore_s3, s3_server, key):
        client(s3_server).put_object(Bucket=obstore_s3[5:], Key=key, Body=b"1")
        put(FsspecStore(obstore_s3), "y/a.bin", b"1")
        with pytest.raises(StorageError, match="invalid path"):
            FsspecStore(obstore_s3).list("x")
        assert [entry.name for entry in FsspecStore(obstore_s3).list("y")] == ["y/a.bin"]

    @pytest.mark.parametrize("name", ["a\nb", "a//b", "./a", "a\x7fb", "\udcff.bin"])
    def test_a_name_that_obstore_refuses_is_a_typed_error(self, obstore_s3, name):
        store = FsspecStore(obstore_s3)
        for act in (lambda: put(store, name), lambda: store.size(name), lambda: store.delete(name)):
            with pytest.raises(StorageError, match=r"(?i)path|encode"):
                act()
        assert store.list() == []

    def test_the_marker_of_a_folder_is_no_file_in_it(self, obstore_s3, s3_server):
        client(s3_server).put_object(Bucket=obstore_s3[5:], Key="run/", Body=b"")
        put(FsspecStore(f"{obstore_s3}/run"), "a.bin", b"1")
        assert [entry.name for entry in FsspecStore(f"{obstore_s3}/run").list()] == ["a.bin"]
        assert [entry.is_folder for entry in FsspecStore(obstore_s3).list()] == [True]


def test_a_file_that_became_shorter_is_truncated_or_an_error(obstore_s3):
    store = FsspecStore(obstore_s3)
    put(store, "a.bin")
    store.size("a.bin")
    put(FsspecStore(obstore_s3), "a.bin", CONTENT[:10])
    with pytest.raises(StorageError):
        read_bytes(store, "a.bin", 0, len(CONTENT))
    with pytest.raises(TruncatedError, match="found 10 bytes"):
        read_bytes(FsspecStore(obstore_s3), "a.bin", 0, len(CONTENT))


def test_a_fork_of_a_process_that_used_obstore_is_refused_at_once(obstore_s3):
    inherited = FsspecStore(obstore_s3)
    put(inherited, "a.bin")

    def work() -> None:
        for act in (
            inherited.list,
            lambda: put(inherited, "b.bin"),
            lambda: kind(obstore_s3),
            lambda: kind(f"{obstore_s3}/x"),
        ):
            with pytest.raises(StorageError, match=r"cannot be used in a fork.*spawn or forkserver"):
                act()

    assert not is_killed(work)
    assert read_bytes(inherited, "a.bin", 0, 9) == CONTENT[:9]


def test_a_fork_of_a_process_that_did_not_use_it_may(monkeypatch):
    state = SimpleNamespace(was_used=False, is_forked=False)
    obstore_files._Process.enter_fork.__func__(state)
    assert not state.is_forked


def test_neither_stores_nor_credentials_are_pickled_or_shown(obstore_s3, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "very-secret")
    store = FsspecStore(obstore_s3)
    for each in (store, store._fs, store._fs._clients.requests, obstore_client.S3Credentials()):
        with pytest.raises(TypeError):
            pickle.dumps(each)
        assert "very-secret" not in repr(each) + str(each)


def test_a_local_file_is_copied_to_a_bucket_and_back(obstore_s3, tmp_path: Path):
    (tmp_path / "a.bin").write_bytes(CONTENT)
    store = FsspecStore(obstore_s3)
    with store.create("a.bin") as writer:
        writer.copy_from(FsspecStore(f"file://{tmp_path}"), "a.bin", 0, len(CONTENT))
    assert read_bytes(store, "a.bin", 0, len(CONTENT)) == CONTENT
