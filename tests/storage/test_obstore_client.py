"""Which URLs use obstore, with which settings and credentials, and as what its errors are raised."""

from __future__ import annotations

import errno
import sys
from http.client import RemoteDisconnected
from pathlib import Path
from typing import Any

import pytest

from shardckpt.errors import StorageError, UsageError
from shardckpt.storage import obstore_client, retry
from shardckpt.storage.fsspec_store import FsspecStore
from shardckpt.storage.obstore_client import DRIVER, RequestError, convert_error, open_clients
from shardckpt.storage.resolve_url import kind, open_store
from shardckpt.storage.store import read_bytes
from shardckpt.testing.store_suite import put

obstore = pytest.importorskip("obstore")


@pytest.fixture(autouse=True)
def _has_new_clients() -> None:
    obstore_client._build_clients.cache_clear()


def test_only_the_setting_chooses_obstore_and_only_for_buckets(monkeypatch):
    monkeypatch.delenv(DRIVER, raising=False)
    assert not obstore_client.uses_obstore("s3")
    for value in ("fsspec", ""):
        monkeypatch.setenv(DRIVER, value)
        assert not obstore_client.uses_obstore("s3")
    monkeypatch.setenv(DRIVER, "obstore")
    buckets = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss")
    assert all(map(obstore_client.uses_obstore, buckets))
    assert not any(map(obstore_client.uses_obstore, ("memory", "sftp", "http", "file")))


def test_another_value_of_the_setting_is_refused(monkeypatch):
    monkeypatch.setenv(DRIVER, "rust")
    with pytest.raises(UsageError, match="SHARDCKPT_DRIVER must be fsspec or obstore, got 'rust'"):
        open_store("s3://b/x")


@pytest.mark.parametrize("package", ["obstore.store", "botocore.session"])
def test_a_missing_package_is_named_with_what_installs_it(monkeypatch, package):
    monkeypatch.setenv(DRIVER, "obstore")
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UsageError, match=r"pip install 'shardckpt\[obstore\]', or unset SHARDCKPT_DRIVER"):
        FsspecStore("s3://b/x")


@pytest.mark.parametrize("url", ["s3://", "abfs://", "gs:///x"])
def test_a_url_without_a_bucket_is_refused(monkeypatch, url):
    monkeypatch.setenv(DRIVER, "obstore")
    with pytest.raises(UsageError, match="names no bucket"):
        FsspecStore(url)


def test_settings_of_a_profile_are_used_as_boto3_would(monkeypatch, tmp_path: Path):
    (tmp_path / "config").write_text(
        "[profile lab]\nregion = eu-north-1\nendpoint_url = https://minio.example.org\n"
        "aws_access_key_id = A\naws_secret_access_key = B\n"
    )
    for name in ("AWS_ENDPOINT_URL", "AWS_DEFAULT_REGION", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_PROFILE", "lab")
    client = open_clients("s3://bucket").requests
    assert client.config["region"] == "eu-north-1"
    assert client.config["endpoint"] == "https://minio.example.org"
    assert client.credential_provider()["access_key_id"] == "A"


def test_settings_that_changed_make_new_clients(monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    first = open_clients("s3://bucket")
    assert open_clients("s3://bucket") is first
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:10")
    assert open_clients("s3://bucket").requests.config["endpoint"] == "http://127.0.0.1:10"


def test_no_credentials_are_an_error_at_once(monkeypatch, tmp_path: Path):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(StorageError, match="no credentials for S3 were found"):
        open_clients("s3://bucket")
    monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
    assert open_clients("s3://bucket").requests


@pytest.mark.parametrize(
    ("text", "url", "expected"),
    [
        (
            "AccountName=one;AccountKey=a2V5;BlobEndpoint=http://127.0.0.1:1/one;",
            "abfs://box",
            {"account_name": "one", "account_key": "a2V5", "endpoint": "http://127.0.0.1:1/one"},
        ),
        (
            "DefaultEndpointsProtocol=https;AccountName=one;AccountKey=a2V5PQ==;EndpointSuffix=core.windows.net",
            "az://box",
            {"account_key": "a2V5PQ==", "endpoint": "https://one.blob.core.windows.net"},
        ),
        ("", "abfs://box@two.dfs.core.windows.net", {"account_name": "two"}),
    ],
)
def test_a_connection_string_of_azure_is_read(monkeypatch, text, url, expected):
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", text)
    config = open_clients(url).requests.config
    assert config["container_name"] == "box"
    assert {name: config[name] for name in expected} == expected


def test_a_setting_that_cannot_be_used_is_a_typed_error(monkeypatch):
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", "AccountName=one;AccountKey=SECRET=;")
    with pytest.raises(StorageError, match=r"abfs://box: cannot set up access.*Invalid Access Key") as caught:
        open_clients("abfs://box")
    assert "SECRET" not in str(caught.value)


def fail(text: str, details: str, kind: type[Exception] = obstore.exceptions.GenericError) -> Exception:
    return kind(f"{text}\n\nDebug source:\nGeneric {{\n{details}\n}}")


DENIED = "<Error><Code>AccessDenied</Code><Message>not you</Message></Error>"
EXPIRED = "<Error><Code>ExpiredToken</Code><Message>too old</Message></Error>"


@pytest.mark.parametrize(
    ("error", "kind", "is_transient"),
    [
        (fail("slow", "   status: 503,"), RequestError, True),
        (fail("bad", "   status: 400,"), RequestError, False),
        (fail(DENIED, "   status: 403,"), PermissionError, False),
        (fail(EXPIRED, "   status: 400,"), PermissionError, False),
        (fail("gone", "   status: 404,"), FileNotFoundError, False),
        (FileNotFoundError("gone"), FileNotFoundError, False),
        (fail("there", "   status: 412,"), FileExistsError, False),
        (fail("there", "", obstore.exceptions.AlreadyExistsError), FileExistsError, False),
        (fail("what?", "   status: 501,"), OSError, False),
        (fail("no route", "   kind: Connect,"), ConnectionRefusedError, True),
        (fail("slow", "   kind: Timeout,"), TimeoutError, True),
        (fail("cut", "   kind: Request,"), RemoteDisconnected, True),
        (fail("cut", "   kind: Interrupted,"), ConnectionResetError, True),
        (ValueError("Could not parse path"), OSError, False),
        (RuntimeError("what"), RequestError, False),
    ],
    ids=lambda value: str(value).splitlines()[0][:20],
)
def test_errors_are_those_that_retries_know(error: Exception, kind: type[Exception], is_transient: bool) -> None:
    found = convert_error(error)
    assert isinstance(found, kind)
    assert retry.is_transient(found) == is_transient
    assert "Debug source" not in str(found)


def test_an_error_shows_the_servers_words_and_no_signed_url():
    assert str(convert_error(fail(DENIED, "   status: 403,"))) == "AccessDenied: not you"
    text = str(convert_error(fail("Error performing GET http://h/c/b?sig=SECRET&se=1 in 1ms", "   status: 500,")))
    assert text == "Error performing GET http://h/c/b in 1ms"


def test_a_status_in_a_key_or_a_body_is_not_the_status():
    details = '   path: "status: 500,",\n   status: 403,\n   body: Some(\n   "status: 503,",'
    assert isinstance(convert_error(fail("x", details)), PermissionError)
    assert convert_error(fail("x", "   status: 501,")).errno == errno.ENOSYS


def test_credentials_that_expire_are_read_again(obstore_s3: str, tmp_path: Path, monkeypatch: Any) -> None:
    credentials = tmp_path / "credentials"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(credentials))
    monkeypatch.setattr(retry, "FIRST_PAUSE_S", 0.001)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)

    def write_key(key: str) -> None:
        credentials.write_text(f"[default]\naws_access_key_id={key}\naws_secret_access_key=x\n")

    send = obstore.put

    def refuse_old(client: Any, *arguments: Any, **options: Any) -> Any:
        if is_expired and client.credential_provider()["access_key_id"] == "OLD":
            raise fail(EXPIRED, "   status: 400,")
        return send(client, *arguments, **options)

    monkeypatch.setattr(obstore, "put", refuse_old)
    is_expired = False
    write_key("OLD")
    store = open_store(f"{obstore_s3}/run")
    put(store, "a", b"1")
    is_expired = True
    with pytest.raises(StorageError, match=r"too old.*Check the credentials"):
        put(store, "b", b"2")
    write_key("NEW")
    put(store, "b", b"2")
    assert read_bytes(store, "b", 0, 1) == b"2"
    assert kind(f"{obstore_s3}/run/b") == "file"


def test_credentials_are_asked_for_before_each_request(obstore_s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    answer = obstore_client.S3Credentials.__call__
    monkeypatch.setattr(obstore_client.S3Credentials, "__call__", lambda self: asked.append(1) or answer(self))
    store = open_store(obstore_s3)
    counts = []
    for name in ("a", "b", "c"):
        put(store, name, b"1")
        counts.append(len(asked))
    assert counts[0] < counts[1] < counts[2]
