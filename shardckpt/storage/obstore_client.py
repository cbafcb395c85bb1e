"""Buckets over obstore: which URLs use it, and its clients, credentials and errors."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime, timezone
from functools import lru_cache
from http.client import RemoteDisconnected
from importlib import import_module
from typing import Any, NamedTuple

from shardckpt.errors import StorageError, UsageError
from shardckpt.storage.retry import CREDENTIALS, EXPIRED_CODES, remote_error

DRIVER = "SHARDCKPT_DRIVER"  # environment variable that chooses between the drivers of buckets

# Limits in seconds. obstore's own limit is half a minute for a complete request, which a slow upload exceeds.
_CLIENT_OPTIONS = {"connect_timeout": "15s", "read_timeout": "60s", "timeout": "15min"}

_PART_ATTEMPTS = 3  # for a part of an upload; other requests are repeated by `retry`


class RequestError(Exception):
    """A failed request without a more specific class."""

    def __init__(self, reason: str, status: int | None = None) -> None:
        super().__init__(reason)
        self.status = status


class RefusedRequestError(PermissionError):
    """A request that the credentials do not allow, with the server's code as in botocore's errors."""

    def __init__(self, reason: str, code: str) -> None:
        super().__init__(reason)
        self.response = {"Error": {"Code": code}}


class Clients(NamedTuple):
    """Clients for one bucket."""

    requests: Any  # each request is sent once
    uploads: Any  # each request may be repeated, since the parts of an upload cannot be written again


def uses_obstore(protocol: str) -> bool:
    """Return True if the user chose obstore for the URLs of a protocol. Raises UsageError."""
    driver = os.environ.get(DRIVER) or "fsspec"
    if driver not in {"fsspec", "obstore"}:
        raise UsageError(f"{DRIVER} must be fsspec or obstore, got {driver!r}", fix="Correct or unset it.")
    return driver == "obstore" and protocol in _BUILDERS


def open_clients(url: str) -> Clients:
    """Return clients for a bucket's URL, with settings and credentials from the environment.

    Raises:
        UsageError: The URL names no bucket, or a package is missing.
        StorageError: There are no credentials, or a setting is wrong.
    """
    protocol, _, place = url.partition("://")
    if not place:
        raise UsageError("this URL names no bucket", where=url, fix=f"Write {protocol}://bucket/folder.")
    settings = sorted(pair for pair in os.environ.items() if pair[0].startswith(("AWS_", "AZURE_", "GOOGLE_")))
    return _build_clients(protocol, place, tuple(settings))


@lru_cache(maxsize=16)
def _build_clients(protocol: str, place: str, settings: tuple[tuple[str, str], ...]) -> Clients:
    # Clients own connections, so stores share them. Settings that changed need new ones.
    try:
        kind, arguments = _BUILDERS[protocol](place, dict(settings))
    except ImportError as error:
        fix = f"Run pip install 'shardckpt[obstore]', or unset {DRIVER}."
        raise UsageError(f"{DRIVER}=obstore needs a package that is missing", found=error, fix=fix) from error
    is_plain = str(arguments.get("endpoint", "")).startswith("http://")
    options = {**_CLIENT_OPTIONS, "allow_http": is_plain}
    attempts = dict(settings).get("AWS_MAX_ATTEMPTS", "")
    retries = max(int(attempts) if attempts.isdecimal() else _PART_ATTEMPTS, 1) - 1
    try:
        return Clients(
            *(kind(**arguments, client_options=options, retry_config={"max_retries": each}) for each in (0, retries))
        )
    except Exception as error:  # noqa: BLE001 (as in `convert_errors`)
        # Its text may contain a setting, such as a key that cannot be read.
        raise remote_error(convert_error(error), "cannot set up access", f"{protocol}://{place}") from None


def _configure_s3(bucket: str, settings: Mapping[str, str]) -> tuple[Any, dict[str, Any]]:
    """Return the client's class and arguments for S3, from wherever boto3 finds them."""
    store, session = import_module("obstore.store").S3Store, import_module("botocore.session").Session()
    find_endpoint = import_module("botocore.configprovider").ConfiguredEndpointProvider
    endpoint = find_endpoint(session.full_config, session.get_scoped_config(), "s3").provide()
    found = {"endpoint": endpoint, "region": session.get_config_variable("region")}
    if "AWS_SKIP_SIGNATURE" not in settings:
        found["credential_provider"] = S3Credentials()
    return store, {"bucket": bucket, **_without_none(found)}


def _configure_gcs(bucket: str, settings: Mapping[str, str]) -> tuple[Any, dict[str, Any]]:  # noqa: ARG001
    """Return the client's class and arguments for GCS: obstore reads its variables and files."""
    return import_module("obstore.store").GCSStore, {"bucket": bucket}


def _configure_azure(place: str, settings: Mapping[str, str]) -> tuple[Any, dict[str, Any]]:
    """Return the client's class and arguments for Azure: obstore reads all variables but the connection string."""
    container, _, host = place.partition("@")
    pairs = (part.partition("=") for part in settings.get("AZURE_STORAGE_CONNECTION_STRING", "").split(";"))
    text = {name: value for name, _, value in pairs}
    account = host.partition(".")[0] or text.get("AccountName")
    endpoint = text.get("BlobEndpoint")
    if endpoint is None and "EndpointSuffix" in text:
        endpoint = f"{text.get('DefaultEndpointsProtocol', 'https')}://{account}.blob.{text['EndpointSuffix']}"
    found = {
        "account_name": account,
        "account_key": text.get("AccountKey"),
        "sas_key": text.get("SharedAccessSignature"),
        "endpoint": endpoint,
    }
    return import_module("obstore.store").AzureStore, {"container_name": container, **_without_none(found)}


_BUILDERS = {
    **dict.fromkeys(("s3", "s3a"), _configure_s3),
    **dict.fromkeys(("gs", "gcs"), _configure_gcs),
    **dict.fromkeys(("az", "abfs", "abfss"), _configure_azure),
}


def _without_none(found: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in found.items() if value is not None}


class S3Credentials:
    """The credentials that boto3 would use; obstore asks for them before each request."""

    def __init__(self) -> None:
        self.renew()
        CREDENTIALS.add(self)

    def renew(self) -> None:
        """Read the credentials again. Raises StorageError."""
        self._found = import_module("botocore.session").Session().get_credentials()
        if self._found is None:
            fix = "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a profile."
            raise StorageError("no credentials for S3 were found", fix=fix)

    def __call__(self) -> dict[str, Any]:
        """Return the current credentials; those with an end are renewed in time."""
        keys = self._found.get_frozen_credentials()
        return {
            "access_key_id": keys.access_key,
            "secret_access_key": keys.secret_key,
            "token": keys.token,
            "expires_at": datetime.now(timezone.utc),
        }

    def __reduce__(self) -> str:
        raise TypeError("credentials are not pickled")


@contextmanager
def convert_errors() -> Iterator[None]:
    """Raise obstore's exceptions in the block as those that `retry` knows, without their text for debugging."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 (its classes have one base, but some are built-in)
        raise convert_error(error) from None  # its text may contain a signed URL


# obstore's exceptions describe a failure only in this text.
_STATUS = re.compile(r"(?m)^\s*status: (\d{3}),$")
_KIND = re.compile(r"(?m)^\s*kind: (Connect|Timeout|Request|Interrupted),$")
_CODE = re.compile(r"<Code>([^<]{1,200})</Code>")
_MESSAGE = re.compile(r"<Message>([^<]{1,500})</Message>")

_KINDS: dict[str, type[Exception]] = {
    "Connect": ConnectionRefusedError,
    "Timeout": TimeoutError,
    "Request": RemoteDisconnected,
    "Interrupted": ConnectionResetError,
}


def convert_error(error: Exception) -> Exception:
    """Return an exception of obstore as one that `retry` knows."""
    first, _, details = str(error).partition("\n\nDebug source:")
    kinds = {kind.__name__ for kind in type(error).__mro__}
    status, kind = _STATUS.search(details), _KIND.search(details)
    code, message = _CODE.search(first), _MESSAGE.search(first)
    reason = f"{code[1]}: {message[1]}" if code and message else re.sub(r"\?\S+", "", first.partition("\n")[0])[:500]
    if status is None and kind is not None:
        return _KINDS[kind[1]](reason)
    if isinstance(error, FileNotFoundError) or (status and status[1] == "404"):
        return FileNotFoundError(reason)
    if "AlreadyExistsError" in kinds or (status and status[1] in {"409", "412"}):
        return FileExistsError(reason)
    if status and status[1] == "501":
        return OSError(errno.ENOSYS, reason)
    is_refused = {"PermissionDeniedError", "UnauthenticatedError"} & kinds or (status and status[1] in {"401", "403"})
    if is_refused or (code and code[1] in EXPIRED_CODES):
        return RefusedRequestError(reason, code[1] if code else "")
    if {"InvalidPathError", "ValueError"} & kinds:
        return OSError(errno.EINVAL, reason)
    return RequestError(reason, int(status[1]) if status else None)
