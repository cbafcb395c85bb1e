"""What every room's tests share: the checkpoints with ground truth, stores' servers, and word of which were there."""

import gc
import importlib.metadata
import json
import os
import sys
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: ranks and workers share the cores, threads would spin
os.environ.setdefault("RAY_TRAIN_ENABLE_PRINT_PATCH", "0")  # Ray would replace `print`, which others pickle
os.environ.setdefault("RAY_TQDM_PATCH_PRINT", "0")  # as above

import fsspec
import pytest
import s3fs
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import HealthCheck, settings

from shardckpt.storage import retry
from shardckpt.storage.obstore_client import DRIVER
from shardckpt.tiers.memory import memory_store, run_folders
from tests.covering import CHOICES, mark_full
from tests.kit.ranks.forks import make_forks_cheap
from tests.kit.ranks.interpreters import RunScript, start_interpreters
from tests.kit.ranks.seeding import seed_without_traces
from tests.kit.runs.browser import PROGRAM, Page, open_browser
from tests.kit.runs.tier_runs import end_janitor
from tests.kit.stores import servers
from tests.kit.stores.bucket import Bucket
from tests.kit.stores.faulty import Faulty, faulty_s3

settings.register_profile(
    "seeded",
    derandomize=True,
    deadline=None,
    database=None,
    max_examples=100,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("seeded")
make_forks_cheap()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Leave modules and tests out of garbage collections, of which each takes 0.3 s otherwise."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()
        seed_without_traces()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what only `make test-all` runs, and begin with the tests that take long.

    What a worker has left is given to others, a test that has begun is not.
    """
    config.stash[CHOICES] = mark_full(items, Path(__file__).parent)
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


@pytest.fixture(autouse=True)
def hasty(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """No disk is waited for but where `tests/storage` shows what of a save survives a power cut.

    A kill takes nothing that a file system has been told, and thousands of results are thrown away at once.
    """
    if request.path.parent.name != "storage":
        monkeypatch.setattr(os, "fsync", os.fstat)  # which refuses what is no open file, too


@pytest.fixture(scope="session", autouse=True)
def memory_of_their_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No test finds or removes captures of the user's own runs, or depends on what the machine's disk has free."""
    mount = tmp_path_factory.mktemp("shm")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_folders, "SHARED_MEMORY", str(mount))
        patch.setattr(memory_store, "FREE_PART", sys.maxsize)
        yield
        for base in mount.iterdir():
            end_janitor(base)


@pytest.fixture(scope="session")
def fixtures() -> Path:
    """Folder of checkpoints that real frameworks wrote."""
    return Path(__file__).with_name("fixtures")


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    """A page of a browser, without which the test is skipped."""
    if PROGRAM is None:
        pytest.skip("needs chromium")
    with open_browser() as opened:
        yield opened


@pytest.fixture(scope="session")
def run_script() -> Iterator[RunScript]:
    """Runs a script in an interpreter that has imported torch and shardckpt already, and ends as any other."""
    with start_interpreters() as run:
        yield run


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """Endpoint of an S3 server in this process, with the environment pointing at it."""
    server_module = pytest.importorskip("moto.server")
    server = server_module.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    environment = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "NO_PROXY": "127.0.0.1,localhost",
        "no_proxy": "127.0.0.1,localhost",
    }
    _VERSIONS["S3"] = f"moto {importlib.metadata.version('moto')}"
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        yield environment["AWS_ENDPOINT_URL"]
    server.stop()


@pytest.fixture
def s3_bucket(request: pytest.FixtureRequest) -> Iterator[str]:
    """URL of an empty bucket, removed afterwards with all it holds."""
    _runs_on("S3", request, "s3_server")
    yield from _new_root("s3")


def _new_root(protocol: str) -> Iterator[str]:
    """Yield the URL of a bucket or container of a random name, and remove it afterwards."""
    name = f"test-{uuid.uuid4().hex[:12]}"
    fs = fsspec.filesystem(protocol)
    fs.mkdir(name)
    yield f"{protocol}://{name}"
    fs.rm(name, recursive=True)


@pytest.fixture
def s3(s3_bucket: str, s3_server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Faulty]:
    """A server that can be broken in front of the S3 server; nothing is tried twice."""
    monkeypatch.setattr(retry, "ATTEMPTS", 1)
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    with faulty_s3(s3_server) as front:
        yield front


@pytest.fixture(params=["fsspec", "obstore"])
def s3_driver(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The driver by which stores reach S3."""
    if request.param == "obstore":
        pytest.importorskip("obstore")
    monkeypatch.setenv(DRIVER, request.param)
    return str(request.param)


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """URL of an empty bucket in this process; retries do not wait."""
    monkeypatch.setattr(retry, "FIRST_PAUSE_S", 0.0)
    Bucket.reset()
    yield "bucket://b"
    Bucket.reset()


@pytest.fixture(scope="session")
def azure_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Connection string of an Azurite of our own, with the environment pointing at it."""
    pytest.importorskip("adlfs")
    try:
        with (
            servers.azurite(tmp_path_factory.mktemp("azurite")) as (version, connection),
            pytest.MonkeyPatch.context() as patch,
        ):
            _VERSIONS["Azure"] = f"Azurite {version}"
            patch.setenv("AZURE_STORAGE_CONNECTION_STRING", connection)
            patch.setenv("NO_PROXY", "127.0.0.1,localhost")
            yield connection
    except servers.NoServerError as error:
        pytest.skip(str(error))


@pytest.fixture
def azure_container(request: pytest.FixtureRequest) -> Iterator[str]:
    """URL of an empty container, removed afterwards with all it holds."""
    _runs_on("Azure", request, "azure_server")
    yield from _new_root("abfs")


@pytest.fixture
def obstore_s3(request: pytest.FixtureRequest, s3_server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """URL of an empty bucket that stores reach by obstore."""
    yield from _by_obstore("S3 by obstore", "S3", "s3", request, monkeypatch)


@pytest.fixture
def obstore_azure(request: pytest.FixtureRequest, azure_server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """URL of an empty container that stores reach by obstore."""
    yield from _by_obstore("Azure by obstore", "Azure", "abfs", request, monkeypatch)


def _by_obstore(
    store: str, server: str, protocol: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    pytest.importorskip("obstore")
    _VERSIONS[store] = _VERSIONS[server]
    _runs_on(store, request)
    monkeypatch.setenv(DRIVER, "obstore")
    yield from _new_root(protocol)


@pytest.fixture(scope="session")
def sftp_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of the root of this machine's files behind an SSH server of our own, with fsspec's settings for it."""
    pytest.importorskip("paramiko")
    try:
        with (
            servers.sftp(tmp_path_factory.mktemp("sshd")) as (version, port, key),
            pytest.MonkeyPatch.context() as patch,
        ):
            _VERSIONS["SFTP"] = version
            options = {"key_filename": str(key), "look_for_keys": False, "allow_agent": False}
            patch.setitem(fsspec.config.conf, "sftp", options)
            patch.setenv("FSSPEC_SFTP", json.dumps(options))
            yield f"sftp://{servers.user()}@127.0.0.1:{port}"
    except servers.NoServerError as error:
        pytest.skip(str(error))


@pytest.fixture
def sftp_folder(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """URL of an empty folder behind the SSH server."""
    sftp_server = _runs_on("SFTP", request, "sftp_server")
    (tmp_path / "sftp").mkdir()
    return f"{sftp_server}{tmp_path}/sftp"


@pytest.fixture
def memory_folder(request: pytest.FixtureRequest) -> Iterator[str]:
    """URL of an empty folder in memory."""
    _runs_on("memory", request)
    fs = fsspec.filesystem("memory")
    _emptied(fs)
    yield "memory://some/root"
    _emptied(fs)


def _emptied(fs: MemoryFileSystem) -> None:
    fs.store.clear()
    fs.pseudo_dirs[:] = [""]


# Which stores the tests were run on, told at the end: a server that is missing is no green run of its store.

_STORES = ("local", "memory", "S3", "S3 by obstore", "Azure", "Azure by obstore", "SFTP")
_VERSIONS: dict[str, str] = {}


def _runs_on(store: str, request: pytest.FixtureRequest, server: str = "") -> str:
    """Note that a test runs on a store, then return what the fixture of its server gives, which may skip the test."""
    request.node.user_properties.append(("store", store))
    return request.getfixturevalue(server) if server else ""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Note in a test's report on which stores it ran; reports travel from the processes of xdist, too."""
    report = yield
    stores = {value for name, value in item.user_properties if name == "store"}
    if not stores and "tmp_path" in getattr(item, "fixturenames", ()):
        stores = {"local"}
    others = [each for each in item.user_properties if each[0] != "store"]
    report.user_properties = others + [("store", [store, _VERSIONS.get(store, "")]) for store in sorted(stores)]
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say which stores were exercised, and which were not and why."""
    passed, versions, reasons = Counter(), {}, {}
    for outcome in ("passed", "skipped"):
        for report in terminalreporter.stats.get(outcome, []):
            for store, version in (value for name, value in getattr(report, "user_properties", ()) if name == "store"):
                if outcome == "passed":
                    passed[store] += report.when == "call"
                    versions[store] = version or versions.get(store, "")
                elif isinstance(report.longrepr, tuple):
                    reasons.setdefault(store, report.longrepr[2].removeprefix("Skipped: "))
    if not set(passed) - {"local"} and not reasons:
        return
    terminalreporter.section("stores")
    for store in _STORES:
        name = f"{store} ({versions[store]})" if versions.get(store) else store
        why = reasons.get(store, "no test of it was chosen")
        told = f"exercised by {passed[store]} tests" if passed[store] else f"NOT exercised: {why}"
        terminalreporter.write_line(f"{name}: {told}")
