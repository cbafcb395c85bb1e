"""A request that fails names what failed, also behind the missing file that fsspec makes of it."""

from __future__ import annotations

import random
import socket
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import s3fs
from aiobotocore.client import AioBaseClient
from botocore.exceptions import ClientError

from shardckpt.errors import MissingFileError, SourceNotFoundError, StorageError
from shardckpt.offline.inspect import inspect
from shardckpt.storage import fsspec_store, retry
from shardckpt.storage.fsspec_writer import PART_BYTES
from shardckpt.storage.resolve_url import kind, open_store
from shardckpt.storage.store import Store, read_bytes


@pytest.fixture(autouse=True)
def _is_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(retry, "LOST", {})


@pytest.fixture
def closed_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port: int = held.getsockname()[1]
        return port


@pytest.fixture
def _has_new_connections() -> Iterator[None]:
    """fsspec keeps its clients, each with the endpoint that it was made for."""
    s3fs.S3FileSystem.clear_instance_cache()
    yield
    s3fs.S3FileSystem.clear_instance_cache()


@pytest.mark.usefixtures("_has_new_connections")
@pytest.mark.parametrize("protocol", ["http", "s3", "sftp"])
def test_a_refused_connection_is_a_server_that_cannot_be_reached(protocol, closed_port, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{closed_port}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    url = "s3://bucket/run" if protocol == "s3" else f"{protocol}://127.0.0.1:{closed_port}/run"
    for ask in (kind, inspect):
        with pytest.raises(StorageError, match="the server cannot be reached") as caught:
            ask(url)
        assert not isinstance(caught.value, (MissingFileError, SourceNotFoundError))


@pytest.mark.parametrize(("error", "tries"), [(TimeoutError, 1), (ConnectionResetError, retry.ATTEMPTS)])
def test_what_is_not_answered_for_long_is_not_asked_for_again(error, tries, monkeypatch):
    monkeypatch.setattr(retry, "UNANSWERED_S", -1.0)
    calls = []

    def request() -> None:
        calls.append(1)
        raise error

    with pytest.raises(StorageError) as caught:
        retry.retry(request, "cannot read", "x")
    assert len(calls) == tries
    assert ("the server does not answer" in str(caught.value)) == (error is TimeoutError)


def test_an_http_server_that_never_answers_is_given_up(monkeypatch):
    monkeypatch.setattr(retry, "UNANSWERED_S", -1.0)
    monkeypatch.setattr(fsspec_store, "_HTTP_READ_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # the system accepts, nobody answers
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/run"
        with pytest.raises(StorageError, match=r"cannot look at it \(tried for 0 s\): the server does not answer"):
            kind(url)


def test_settings_of_fsspec_for_http_are_kept(monkeypatch):
    monkeypatch.setitem(fsspec.config.conf, "http", {"client_kwargs": {"headers": {"A": "b"}}})
    assert fsspec_store.connect("http://127.0.0.1:9/run")[0].client_kwargs == {"headers": {"A": "b"}}
    monkeypatch.delitem(fsspec.config.conf, "http")
    assert fsspec_store.connect("http://127.0.0.1:9/run")[0].client_kwargs["timeout"].sock_read == 30.0


@pytest.mark.parametrize(
    ("status", "is_repeated"),
    [(400, False), (403, False), (404, False), (412, False), (501, True)]
    + [(status, True) for status in (408, 425, 429, 500, 503)],
)
def test_statuses_that_may_pass_are_asked_for_again_and_refusals_are_not(status: int, is_repeated: bool) -> None:
    error = Exception()
    error.status = status
    assert retry.is_transient(error) == is_repeated


def test_a_missing_file_with_a_failure_behind_it_is_asked_for_again():
    calls = []

    def request() -> str:
        calls.append(1)
        if len(calls) < 3:
            raise FileNotFoundError("x") from ConnectionResetError()
        return "done"

    assert retry.retry(request, "cannot read", "x") == "done"
    assert len(calls) == 3


def test_a_missing_file_is_missing_at_once():
    calls = []

    def request() -> None:
        calls.append(1)
        raise FileNotFoundError("x") from KeyError("x")

    with pytest.raises(MissingFileError):
        retry.retry(request, "cannot read", "x")
    assert len(calls) == 1


class ConnectionClosedError(Exception):
    """As botocore's: the connection ended before an answer."""


def count_tries(error: Exception, where: str) -> int:
    calls = []

    def request() -> None:
        calls.append(1)
        raise error

    with pytest.raises(StorageError, match="the server"):
        retry.retry(request, "cannot read", where)
    return len(calls)


@pytest.mark.parametrize("error", [ConnectionRefusedError(), TimeoutError(), ConnectionClosedError()])
def test_a_server_that_answers_nothing_is_asked_once_by_each_further_request(error, monkeypatch):
    assert count_tries(error, "s3://one/a bytes 0-4") == retry.ATTEMPTS
    assert [count_tries(error, "s3://one/b") for _ in range(3)] == [1, 1, 1]
    assert count_tries(error, "s3://two/a") == retry.ATTEMPTS
    assert retry.retry(lambda: 3, "cannot read", "s3://one/a") == 3
    assert count_tries(error, "s3://one/b") == retry.ATTEMPTS
    monkeypatch.setattr(retry, "LOST_S", -1.0)
    assert count_tries(error, "s3://one/b") == retry.ATTEMPTS


@pytest.mark.parametrize("error", [ConnectionRefusedError(), ConnectionClosedError()])
def test_the_error_says_after_how_long_a_request_was_given_up(error, monkeypatch):
    monkeypatch.setattr(retry, "UNANSWERED_S", -1.0)
    with pytest.raises(StorageError, match=r"cannot list \(tried for 0 s\): the server"):
        retry.retry(lambda: (_ for _ in ()).throw(error), "cannot list", "s3://one/run")


def new_bucket() -> str:
    name = f"test-{uuid.uuid4().hex[:12]}"
    s3fs.S3FileSystem().mkdir(name)
    return name


def write_file(store: Store, name: str, data: bytes) -> None:
    with store.create(name) as file:
        file.write(data)


@pytest.mark.usefixtures("_has_new_connections", "s3_server")
def test_credentials_of_s3_that_expire_are_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    credentials = tmp_path / "credentials"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(credentials))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    call = AioBaseClient._make_api_call

    async def refuse_old(self: Any, operation: str, arguments: Any) -> Any:
        keys = await self._request_signer._credentials.get_frozen_credentials()
        if is_expired and keys.access_key == "OLD":
            error = {"Error": {"Code": "ExpiredToken", "Message": "The provided token has expired."}}
            raise ClientError(error, operation)
        return await call(self, operation, arguments)

    def write_key(key: str) -> None:
        credentials.write_text(f"[default]\naws_access_key_id={key}\naws_secret_access_key=x\n")

    monkeypatch.setattr(AioBaseClient, "_make_api_call", refuse_old)
    is_expired = False
    write_key("OLD")
    store = open_store(f"s3://{new_bucket()}/run")
    write_file(store, "a", b"1")
    is_expired = True
    with pytest.raises(StorageError, match=r"token has expired.*Check the credentials"):
        write_file(store, "b", b"2")
    write_key("NEW")
    write_file(store, "b", b"2")
    assert read_bytes(store, "b", 0, 1) == b"2"


@pytest.mark.usefixtures("_has_new_connections", "s3_server")
@pytest.mark.parametrize("refused", ["CreateMultipartUpload", "UploadPart", "CompleteMultipartUpload"])
def test_credentials_that_expire_during_a_multipart_upload_are_read_again(
    refused: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    credentials = tmp_path / "credentials"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(credentials))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    call, sent = AioBaseClient._make_api_call, list[str]()

    async def refuse_old(self: Any, operation: str, arguments: Any) -> Any:
        keys = await self._request_signer._credentials.get_frozen_credentials()
        sent.append(operation)
        if operation == refused and sent.count(operation) == 1 + (refused == "UploadPart"):
            credentials.write_text("[default]\naws_access_key_id=NEW\naws_secret_access_key=x\n")
        if credentials.read_text().count("NEW") and keys.access_key == "OLD":
            error = {"Error": {"Code": "ExpiredToken", "Message": "The provided token has expired."}}
            raise ClientError(error, operation)
        return await call(self, operation, arguments)

    credentials.write_text("[default]\naws_access_key_id=OLD\naws_secret_access_key=x\n")
    store = open_store(f"s3://{new_bucket()}/run")
    monkeypatch.setattr(AioBaseClient, "_make_api_call", refuse_old)
    data = random.Random(0).randbytes(2 * PART_BYTES + 5)
    write_file(store, "large", data)
    assert sent.count("UploadPart") >= 2 and "CompleteMultipartUpload" in sent
    assert read_bytes(store, "large", 0, len(data)) == data
