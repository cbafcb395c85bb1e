"""The store behind fsspec: the suite in memory, on a bucket and on S3; few requests, retries, clean uploads."""

import errno
import gc
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import boto3
import pytest
import s3fs

from shardckpt.errors import MissingFileError, StorageError, TargetExistsError, TruncatedError, UsageError
from shardckpt.storage import fsspec_store, fsspec_writer, retry
from shardckpt.storage.fsspec_store import FsspecStore
from shardckpt.storage.range_cache import BLOCK, FULL_FILE, GAP, MAX_REQUEST
from shardckpt.storage.resolve_url import kind
from shardckpt.storage.store import Read, read_bytes
from shardckpt.testing.store_suite import CONTENT, put
from tests.kit.stores.bucket import Bucket, Upload
from tests.kit.stores.remote_suite import RemoteSuite


@pytest.fixture
def bucket(monkeypatch):
    """An empty bucket; pauses between tries take no time."""
    monkeypatch.setattr(retry, "FIRST_PAUSE_S", 0.001)
    Bucket.reset()
    return Bucket


class FsspecSuite(RemoteSuite):
    def test_what_is_longer_than_a_part_is_written_and_read(self, store, monkeypatch):
        monkeypatch.setattr(fsspec_writer, "PART_BYTES", 5 << 20)
        data = os.urandom(11 << 20)
        put(store, "a.bin", data)
        assert read_bytes(FsspecStore(store.url), "a.bin", 0, len(data)) == data
        with pytest.raises(TargetExistsError), store.create("a.bin", is_new=True) as writer:
            writer.write(data[::-1])
        assert read_bytes(FsspecStore(store.url), "a.bin", 6 << 20, 100) == data[6 << 20 : (6 << 20) + 100]


class TestMemory(FsspecSuite):
    @pytest.fixture
    def store(self, memory_folder):
        return FsspecStore(memory_folder)


class TestBucket(FsspecSuite):
    knows_times = False

    @pytest.fixture
    def store(self, bucket):
        return FsspecStore("bucket://b/root")


class TestS3(FsspecSuite):
    @pytest.fixture
    def store(self, s3_bucket):
        return FsspecStore(f"{s3_bucket}/some/root")


class TestAzure(FsspecSuite):
    @pytest.fixture
    def store(self, azure_container):
        return FsspecStore(f"{azure_container}/some/root")


class TestSftp(FsspecSuite):
    @pytest.fixture
    def store(self, sftp_folder):
        return FsspecStore(f"{sftp_folder}/some/root")


def filled(bucket, size: int, name: str = "a.bin") -> bytes:
    data = os.urandom(size)
    bucket.objects[f"b/{name}"] = data
    return data


def fill(store, *ranges: tuple[int, int], name: str = "a.bin") -> list[bytes]:
    buffers = [bytearray(nbytes) for _, nbytes in ranges]
    store.read([Read(name, start, memoryview(b)) for (start, _), b in zip(ranges, buffers, strict=True)])
    return [bytes(buffer) for buffer in buffers]


def fetched_ranges(bucket) -> list[tuple[int, int]]:
    return sorted(tuple(map(int, what.split(" ")[1].split("-"))) for verb, what in bucket.requests if verb == "get")


class TestRequests:
    def test_a_small_file_is_one_request_however_it_is_read(self, bucket):
        data = filled(bucket, FULL_FILE)
        store = FsspecStore("bucket://b")
        for start in range(0, FULL_FILE, 50_000):
            assert fill(store, (start, 100)) == [data[start : start + 100]]
        assert fill(store, (0, FULL_FILE)) == [data]
        assert bucket.count("get") == 1

    def test_a_small_checkpoint_is_one_request_a_file_and_one_list(self, bucket):
        names = [f"__{rank}_0.distcp" for rank in range(8)]
        for name in names:
            filled(bucket, 300_000, name)
        store = FsspecStore("bucket://b")
        store.list()
        for name in names:
            store.size(name)
            fill(store, (0, 8), (299_000, 1000), name=name)
        for start in range(0, 300_000, 100_000):
            store.read([Read(name, start, memoryview(bytearray(100_000))) for name in names])
        assert (bucket.count("get"), bucket.count("list"), bucket.count("head")) == (8, 1, 0)

    def test_near_ranges_share_a_request_and_far_ones_do_not(self, bucket):
        data = filled(bucket, 100 * BLOCK)
        store = FsspecStore("bucket://b")
        near = [(start, 64) for start in range(0, 10 * BLOCK, BLOCK // 2)]
        far = [(50 * BLOCK, 64), (50 * BLOCK + BLOCK + GAP + BLOCK, 64)]
        assert fill(store, *near, *far) == [data[start : start + nbytes] for start, nbytes in near + far]
        assert fetched_ranges(bucket) == [
            (0, 10 * BLOCK),
            (50 * BLOCK, 51 * BLOCK),
            (53 * BLOCK, 54 * BLOCK),
        ]

    def test_one_row_costs_its_block_and_no_more(self, bucket):
        filled(bucket, 100 * BLOCK)
        fill(FsspecStore("bucket://b"), (60 * BLOCK + 1000, 4096))
        assert fetched_ranges(bucket) == [(60 * BLOCK, 61 * BLOCK)]

    def test_a_long_range_is_cut_into_requests_that_run_at_once(self, bucket):
        data = filled(bucket, 4 * MAX_REQUEST)
        together = threading.Barrier(4, timeout=60)
        bucket.fault = lambda count, verb, path: together.wait() and None if verb == "get" else None
        assert fill(FsspecStore("bucket://b"), (0, 4 * MAX_REQUEST)) == [data]
        assert bucket.count("get") == 4

    def test_no_byte_is_fetched_twice_whatever_the_order(self, bucket):
        size = 40 * BLOCK + 17
        data = filled(bucket, size)
        store = FsspecStore("bucket://b")
        for start, nbytes in [(0, 8), (size - 22, 22), (8, 2000), (5 * BLOCK - 3, 6), (0, size), (7, size - 7)]:
            assert fill(store, (start, nbytes)) == [data[start : start + nbytes]]
        ranges = fetched_ranges(bucket)
        assert sum(stop - start for start, stop in ranges) == size
        assert all(one[1] <= other[0] for one, other in pairwise(ranges))
        assert len(ranges) <= 5

    def test_reading_on_and_on_reads_ahead(self, bucket):
        size = 64 * BLOCK
        data = filled(bucket, size)
        store = FsspecStore("bucket://b")
        assert b"".join(fill(store, (start, 4096))[0] for start in range(0, size, 4096)) == data
        assert bucket.count("get") <= 8
        assert sum(stop - start for start, stop in fetched_ranges(bucket)) == size

    def test_the_cache_keeps_to_its_budget(self, bucket):
        data = filled(bucket, 64 * BLOCK)
        store = FsspecStore("bucket://b", cache_bytes=4 * BLOCK)
        for _ in range(2):
            for start in range(0, 64 * BLOCK, 3 * BLOCK):
                assert fill(store, (start, 10)) == [data[start : start + 10]]
        assert store._cache._held <= 4 * BLOCK

    def test_threads_may_read_at_once(self, bucket):
        data = filled(bucket, 64 * BLOCK)
        store = FsspecStore("bucket://b", cache_bytes=8 * BLOCK)
        wrong = []

        def read(seed: int) -> None:
            for step in range(100):
                start = (seed * 7919 + step * 104729) % (60 * BLOCK)
                if fill(store, (start, 3 * BLOCK)) != [data[start : start + 3 * BLOCK]]:
                    wrong.append(start)

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(read, range(4)))
        assert wrong == []

    def test_what_another_process_wrote_since_is_listed_by_a_new_store(self, s3_bucket, s3_server):
        put(FsspecStore(s3_bucket), "a.bin", b"1")
        assert len(FsspecStore(s3_bucket).list()) == 1
        boto3.client("s3", endpoint_url=s3_server).put_object(Bucket=s3_bucket[5:], Key="b.bin", Body=b"2")
        assert len(FsspecStore(s3_bucket).list()) == 2

    def test_s3_gets_are_counted_too(self, s3_bucket, monkeypatch):
        data = os.urandom(3 << 20)
        put(FsspecStore(s3_bucket), "a.bin", data)
        gets = []
        call = s3fs.S3FileSystem._call_s3

        async def counted(self, method, *args, **kwargs):
            if method == "get_object":
                gets.append(kwargs["Range"])
            return await call(self, method, *args, **kwargs)

        monkeypatch.setattr(s3fs.S3FileSystem, "_call_s3", counted)
        store = FsspecStore(s3_bucket)
        assert fill(store, (0, 8), (1000, 5000)) == [data[:8], data[1000:6000]]
        assert fill(store, (0, len(data))) == [data]
        assert gets == [f"bytes=0-{BLOCK - 1}", f"bytes={BLOCK}-{len(data) - 1}"]


def server_error(status: int) -> Exception:
    error = RuntimeError(f"status {status}")
    error.status = status
    return error


PASSING = [
    TimeoutError("too slow"),
    ConnectionResetError(errno.ECONNRESET, "reset by peer"),
    OSError(errno.EIO, "internal error"),
    OSError(errno.EBUSY, "slow down"),
    server_error(503),
    server_error(429),
    type("ClientPayloadError", (Exception,), {})("not all of it came"),
    type("EndpointConnectionError", (Exception,), {})("no route"),
]
LASTING = [
    PermissionError("access denied"),
    FileNotFoundError("no such key"),
    OSError(errno.EINVAL, "bad request"),
    server_error(403),
    TypeError("a mistake"),
]


class TestRetries:
    @pytest.mark.parametrize("error", PASSING, ids=repr)
    def test_what_passes_is_tried_again(self, bucket, error):
        data = filled(bucket, 1000)
        store = FsspecStore("bucket://b")
        store.size("a.bin")

        def fault(count, verb, path):
            if count in {2, 3}:
                raise error

        bucket.fault = fault
        assert fill(store, (0, 1000)) == [data]
        assert bucket.count("get") == 3

    @pytest.mark.parametrize("error", LASTING, ids=repr)
    def test_what_lasts_is_told_at_once(self, bucket, error):
        filled(bucket, 1000)

        def fault(count, verb, path):
            if verb == "get":
                raise error

        bucket.fault = fault
        with pytest.raises(StorageError, match=r"bucket://b/a\.bin bytes 0-1000") as caught:
            fill(FsspecStore("bucket://b"), (0, 1000))
        assert bucket.count("get") == 1
        assert caught.value.__cause__ is error
        assert isinstance(caught.value, MissingFileError) == isinstance(error, FileNotFoundError)

    def test_tries_are_bounded_and_the_error_names_file_and_range(self, bucket):
        filled(bucket, 1000)

        def fault(count, verb, path):
            if verb == "get":
                raise TimeoutError

        bucket.fault = fault
        with pytest.raises(StorageError, match=r"a\.bin bytes 0-1000.*tried 4 times"):
            fill(FsspecStore("bucket://b"), (0, 1000))
        assert bucket.count("get") == retry.ATTEMPTS

    def test_a_short_body_is_asked_for_again(self, bucket):
        data = filled(bucket, 1000)
        bucket.fault = lambda count, verb, path: (lambda body: body[:500]) if count == 2 else None
        assert fill(FsspecStore("bucket://b"), (0, 1000)) == [data]
        assert bucket.count("get") == 2

    def test_a_body_that_stays_short_is_an_error(self, bucket):
        filled(bucket, 1000)
        bucket.fault = lambda count, verb, path: (lambda body: body[:500]) if verb == "get" else None
        with pytest.raises(StorageError, match="500 of 1000 bytes"):
            fill(FsspecStore("bucket://b"), (0, 1000))

    @pytest.mark.parametrize("verb", ["list", "head", "delete"])
    def test_other_requests_are_tried_again_too(self, bucket, verb):
        filled(bucket, 1000)
        store = FsspecStore("bucket://b")

        def fault(count, _, path):
            if count == 1:
                raise TimeoutError

        bucket.fault = fault
        {"list": store.list, "head": lambda: store.size("a.bin"), "delete": lambda: store.delete("a.bin")}[verb]()
        assert bucket.count(verb) == 2

    def test_pauses_grow_and_differ(self, monkeypatch):
        monkeypatch.setattr(retry, "FIRST_PAUSE_S", 1.0)
        runs = []
        for number in range(5):
            pauses: list[float] = []

            def fail() -> None:
                raise TimeoutError

            with pytest.raises(StorageError):
                retry.retry(fail, "cannot read", f"s3://{number}/x", pause=pauses.append)
            runs.append(pauses)
        for pauses in runs:
            assert len(pauses) == retry.ATTEMPTS - 1
            assert all(2**n / 2 <= pause <= 2**n * 2 for n, pause in enumerate(pauses))
        assert len({tuple(pauses) for pauses in runs}) == 5

    def test_one_failing_request_stops_the_others_soon(self, bucket, monkeypatch):
        monkeypatch.setattr(retry, "FIRST_PAUSE_S", 60.0)
        filled(bucket, 20 * MAX_REQUEST)

        def fault(count, verb, path):
            if verb == "get":
                raise PermissionError("denied") if path.endswith(f" 0-{MAX_REQUEST}") else TimeoutError

        bucket.fault = fault
        started = time.monotonic()
        with pytest.raises(StorageError, match="denied"):
            fill(FsspecStore("bucket://b"), (0, 20 * MAX_REQUEST))
        assert time.monotonic() - started < 30, "it waits out the pause of a request"
        assert bucket.count("get") <= 20


class TestUploads:
    @pytest.fixture
    def small_parts(self, monkeypatch):
        monkeypatch.setattr(fsspec_writer, "PART_BYTES", 5 << 20)

    @staticmethod
    def unfinished(s3_bucket, s3_server):
        client = boto3.client("s3", endpoint_url=s3_server)
        return client.list_multipart_uploads(Bucket=s3_bucket[5:]).get("Uploads", [])

    def test_a_long_file_goes_up_in_parts(self, s3_bucket, s3_server, small_parts):
        data = os.urandom(17 << 20)
        put(FsspecStore(s3_bucket), "a.bin", data)
        head = boto3.client("s3", endpoint_url=s3_server).head_object(Bucket=s3_bucket[5:], Key="a.bin")
        assert head["ETag"].endswith('-3"') or head["ETag"].endswith('-4"')
        assert fill(FsspecStore(s3_bucket), (0, len(data))) == [data]
        assert self.unfinished(s3_bucket, s3_server) == []

    @pytest.mark.parametrize("nbytes", [10, 12 << 20])
    def test_an_aborted_upload_leaves_neither_object_nor_parts(self, s3_bucket, s3_server, small_parts, nbytes):
        writer = FsspecStore(s3_bucket).create("a.bin")
        writer.write(bytes(nbytes))
        assert len(self.unfinished(s3_bucket, s3_server)) == (nbytes > 5 << 20)
        writer.abort()
        del writer
        gc.collect()
        assert self.unfinished(s3_bucket, s3_server) == []
        assert FsspecStore(s3_bucket).list() == []

    @pytest.mark.parametrize("failing", ["upload_part", "complete_multipart_upload"])
    def test_an_upload_that_fails_midway_leaves_no_parts(self, s3_bucket, s3_server, small_parts, monkeypatch, failing):
        call = s3fs.core.S3File._call_s3
        seen = []

        def broken(self, method, *args, **kwargs):
            seen.append(method)
            if method == failing and seen.count(method) == (2 if method == "upload_part" else 1):
                raise OSError(errno.EIO, "broken")
            return call(self, method, *args, **kwargs)

        monkeypatch.setattr(s3fs.core.S3File, "_call_s3", broken)
        with pytest.raises(StorageError, match=r"a\.bin.*broken"):
            put(FsspecStore(s3_bucket), "a.bin", bytes(12 << 20))
        gc.collect()
        assert self.unfinished(s3_bucket, s3_server) == []
        assert FsspecStore(s3_bucket).list() == []

    def test_one_part_is_buffered(self, bucket, small_parts):
        writer = FsspecStore("bucket://b").create("a.bin")
        for _ in range(20):
            writer.write(bytes(1 << 20))
            assert (writer._file.buffer.tell() if writer._file else len(writer._kept)) <= 5 << 20
        writer.close()
        assert bucket.count("part") == 4
        assert len(bucket.objects["b/a.bin"]) == 20 << 20

    def test_parts_grow_so_that_five_terabytes_fit_ten_thousand(self, bucket, monkeypatch):
        monkeypatch.setattr(Upload, "write", lambda self, data: len(data))
        writer = FsspecStore("bucket://b").create("a.bin")
        writer.write(bytes(fsspec_writer.PART_BYTES + 1))
        written, parts = 0, 0
        while written < 5 * 10**12:
            written, parts = written + max(fsspec_writer.PART_BYTES, writer._file.blocksize), parts + 1
            writer._written = written
            writer.write(b"1")
        assert parts < 10_000
        assert writer._file.blocksize < 5 << 30
        writer.abort()


class TestSetup:
    def test_an_unknown_protocol_is_the_callers_mistake(self):
        with pytest.raises(UsageError, match="nosuch"):
            FsspecStore("nosuch://x")

    @pytest.mark.parametrize("act", [FsspecStore, kind])
    def test_a_line_break_in_a_url_of_s3_is_refused_at_once(self, act):
        with pytest.raises(UsageError, match=r"'s3://b/a\\nb': a URL of S3 must not contain a line break"):
            act("s3://b/a\nb")

    def test_a_missing_package_is_named_with_what_installs_it(self, monkeypatch):
        def missing(url, **_):
            raise ImportError("Install s3fs to access S3")

        monkeypatch.setattr(fsspec_store, "url_to_fs", missing)
        with pytest.raises(UsageError, match=r"pip install 'shardckpt\[s3\]'"):
            FsspecStore("s3://b")
        with pytest.raises(UsageError, match="pip install gcsfs"):
            FsspecStore("gs://b")

    def test_wrong_keys_are_told_at_once(self, bucket):
        def fault(count, verb, path):
            raise PermissionError("The AWS Access Key Id does not exist")

        bucket.fault = fault
        with pytest.raises(StorageError, match="Check the credentials"):
            kind("bucket://b/x")
        assert len(bucket.requests) == 1

    def test_a_dead_endpoint_is_a_storage_error_within_seconds(self, monkeypatch, s3_server):
        monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
        monkeypatch.setattr(retry, "FIRST_PAUSE_S", 0.1)
        s3fs.S3FileSystem.clear_instance_cache()
        started = time.monotonic()
        with pytest.raises(StorageError, match=r"127\.0\.0\.1:9"):
            kind("s3://b/x")
        s3fs.S3FileSystem.clear_instance_cache()
        assert time.monotonic() - started < 30

    def test_sizes_that_a_store_does_not_tell_are_an_error(self, bucket, monkeypatch):
        monkeypatch.setattr(Bucket, "info", lambda *_, **__: {"name": "b/a.bin", "size": None, "type": "file"})
        with pytest.raises(StorageError, match="size"):
            FsspecStore("bucket://b").size("a.bin")

    def test_renaming_is_not_offered(self, bucket):
        store = FsspecStore("bucket://b")
        assert not store.capabilities.renames
        with pytest.raises(StorageError):
            store.rename("a", "b")

    def test_a_truncated_object_is_named(self, bucket):
        filled(bucket, 10)
        with pytest.raises(TruncatedError, match=r"bucket://b/a\.bin.*found 10 bytes; expected at least 12"):
            read_bytes(FsspecStore("bucket://b"), "a.bin", 4, 8)


def test_a_bucket_is_copied_to_another_without_a_local_file(s3_bucket, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source, target = FsspecStore(f"{s3_bucket}/one"), FsspecStore(f"{s3_bucket}/two")
    put(source, "a.bin", CONTENT)
    with target.create("b.bin") as writer:
        writer.copy_from(source, "a.bin", 5, 5000)
    assert fill(target, (0, 5000), name="b.bin") == [CONTENT[5:5005]]
    assert os.listdir(tmp_path) == []
