"""What every room's tests share: the checkpoints with ground truth, and an S3 server of our own."""

import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "seeded",
    derandomize=True,
    deadline=None,
    database=None,
    max_examples=100,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("seeded")


@pytest.fixture(scope="session")
def fixtures() -> Path:
    """Folder of checkpoints that real frameworks wrote."""
    beside = Path(__file__).resolve().parents[1] / ".." / "shared" / "fixtures"
    folder = Path(os.environ.get("SHARDCKPT_FIXTURES", beside))
    if not folder.is_dir():
        pytest.skip(f"no fixtures at {folder}; SHARDCKPT_FIXTURES names another place")
    return folder


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
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        yield environment["AWS_ENDPOINT_URL"]
    server.stop()


@pytest.fixture
def s3_bucket(s3_server: str) -> Iterator[str]:
    """URL of an empty bucket, removed afterwards with all it holds."""
    name = f"test-{uuid.uuid4().hex[:12]}"
    fs = fsspec.filesystem("s3")
    fs.mkdir(name)
    yield f"s3://{name}"
    fs.rm(name, recursive=True)
