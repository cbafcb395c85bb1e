"""Compare obstore with s3fs as the driver of S3: requests, and paired ratios of seconds.

    python benchmarks/stores.py [--parts plain,slow] [--bytes 128MiB] [--files 200] [--rounds 5] [--record]

moto's server runs in another process, with connections that stay open. The slow part delays each answer by 20 ms, and
each request by its bytes at 64 MiB/s, as one connection to a distant bucket. Each round measures both drivers, one
after the other in turn; a ratio is the median over rounds. A first round, which opens connections, is not counted.

- save: one rank, one file in parts of 16 MiB;
- load: all of it, verified;
- consolidate: from the bucket to the bucket;
- inspect: a Hugging Face folder with many small files;
- prune: the removal of a step with many small files.
"""

from __future__ import annotations

import argparse
import datetime
import json
import multiprocessing
import os
import sys
import threading
import time
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from statistics import median
from typing import Any, NamedTuple

import fsspec
import torch
from options import add_selection
from results import Lines, machine, record, section_title
from safetensors.torch import save

import shardckpt
from shardckpt.plan.layout.output_files import parse_size
from shardckpt.storage.obstore_client import DRIVER
from shardckpt.storage.resolve_url import open_store

DRIVERS = ("fsspec", "obstore")
DELAYS = {"plain": (0.0, 0.0), "slow": (0.02, 64 * 2**20)}
"""Of each part: seconds before an answer, and bytes a second of a request; 0 for no limit."""

LIMIT = 1.0
CONTROL = "/-control"


class Measured(NamedTuple):
    """One call.

    Attributes:
        seconds: Wall time.
        cpu: CPU seconds of this process.
        requests: Requests that the server received.
    """

    seconds: float
    cpu: float
    requests: int


class SlowServer:
    """moto's application, counted and delayed."""

    def __init__(self, application: Callable[..., Iterable[bytes]]) -> None:
        self._application, self._lock = application, threading.Lock()
        self._count, self._delay, self._rate = 0, 0.0, 0.0

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        """Answer a request."""
        if environ["PATH_INFO"] == CONTROL:
            return self._control(environ["QUERY_STRING"], start_response)
        with self._lock:
            self._count += 1
        sent: list[bytes] = list(self._application(environ, start_response))
        nbytes = int(environ.get("CONTENT_LENGTH") or 0) + sum(map(len, sent))
        time.sleep(self._delay + (nbytes / self._rate if self._rate else 0))
        return sent

    def _control(self, query: str, start_response: Callable[..., Any]) -> list[bytes]:
        """Set the delays if there are some, and return the number of requests since the last time."""
        if query:
            self._delay, self._rate = map(float, query.split(","))
        with self._lock:
            body, self._count = json.dumps(self._count).encode(), 0
        start_response("200 OK", [("Content-Type", "application/json"), ("Content-Length", str(len(body)))])
        return [body]


def serve(connection: Connection) -> None:
    """Run the server, and send its port."""
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app  # noqa: PLC0415
    from werkzeug.serving import WSGIRequestHandler, make_server  # noqa: PLC0415

    class Handler(WSGIRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def log_request(self, *_: object) -> None:
            """Log nothing."""

    application = SlowServer(DomainDispatcherApplication(create_backend_app))
    server = make_server("127.0.0.1", 0, application, threaded=True, request_handler=Handler)
    connection.send(server.server_port)
    server.serve_forever()


@contextmanager
def running_server() -> Iterator[str]:
    """Run the server in another process, with the environment pointing at it; yield its endpoint."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs,), daemon=True)
    process.start()
    try:
        if not ours.poll(300):
            raise SystemExit("moto's server does not start")
        endpoint = f"http://127.0.0.1:{ours.recv()}"
        os.environ |= {
            "AWS_ENDPOINT_URL": endpoint,
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
            "NO_PROXY": "127.0.0.1",
        }
        yield endpoint
    finally:
        process.terminate()
        process.join()


def control(endpoint: str, delays: str = "") -> int:
    """Set the server's delays, and return the number of its requests since the last time."""
    with urllib.request.urlopen(f"{endpoint}{CONTROL}?{delays}") as answer:
        return int(json.load(answer))


def measure(endpoint: str, work: Callable[[], object]) -> Measured:
    """Measure a call."""
    control(endpoint)
    start, cpu = time.perf_counter(), time.process_time()
    work()
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    return Measured(seconds, cpu, control(endpoint))


def put_files(url: str, files: int) -> None:
    """Write a Hugging Face folder with so many files."""
    store = open_store(url)
    names = {f"w{n}": f"model-{n + 1:05}-of-{files:05}.safetensors" for n in range(files)}
    for tensor, name in names.items():
        with store.create(name) as writer:
            writer.write(save({tensor: torch.zeros(64, 32)}))
    with store.create("model.safetensors.index.json") as writer:
        writer.write(json.dumps({"metadata": {}, "weight_map": names}).encode())


def measure_round(endpoint: str, url: str, state: dict[str, torch.Tensor], files: int) -> dict[str, Measured]:
    """Measure each operation once with the driver that the environment names."""
    many = f"{url}/many"
    put_files(many, files)
    loaded: list[dict[str, Any]] = []
    measured = {
        "save": measure(endpoint, lambda: shardckpt.save(state, f"{url}/step")),
        "load": measure(endpoint, lambda: loaded.append(shardckpt.load(f"{url}/step"))),
        "consolidate": measure(endpoint, lambda: shardckpt.consolidate(f"{url}/step", f"{url}/merged")),
        "inspect": measure(endpoint, lambda: shardckpt.inspect(many)),
        "prune": measure(endpoint, lambda: open_store(url).delete_folder("many")),
    }
    if not all(torch.equal(loaded[0][name], tensor) for name, tensor in state.items()):
        raise SystemExit(f"{url} holds other values than were saved")
    return measured


def measure_part(report: Lines, endpoint: str, part: str, nbytes: int, files: int, rounds: int) -> None:
    """Compare the drivers at one speed of the server."""
    control(endpoint, ",".join(map(str, DELAYS[part])))
    state = {f"w{n}": torch.rand(nbytes // 32) for n in range(8)}
    found: dict[str, dict[str, list[Measured]]] = {driver: defaultdict(list) for driver in DRIVERS}
    for number in range(rounds + 1):
        for driver in DRIVERS if number % 2 else DRIVERS[::-1]:
            os.environ[DRIVER] = driver
            measured = measure_round(endpoint, f"s3://bench/{part}-{driver}-{number}", state, files)
            for what, each in measured.items() if number else ():
                found[driver][what].append(each)
    report.say()
    report.say(f"### {part.capitalize()}")
    report.say()
    report.say("| operation | s3fs, requests | obstore, requests | s3fs, s | obstore, s | x s3fs | CPU, x s3fs |")
    report.say("|---|---|---|---|---|---|---|")
    for what, theirs in found["fsspec"].items():
        ours = found["obstore"][what]
        ratio, cpu = (
            median(getattr(one, name) / getattr(other, name) for one, other in zip(ours, theirs, strict=True))
            for name in ("seconds", "cpu")
        )
        requests = [max(each.requests for each in series) for series in (theirs, ours)]
        seconds = [median(each.seconds for each in series) for series in (theirs, ours)]
        cells = (what, *requests, *(f"{each:.3f}" for each in seconds), f"{ratio:.2f}", f"{cpu:.2f}")
        report.say(f"| {' | '.join(map(str, cells))} |")
        report.goal("buckets", f"{what}, {part} server, obstore", ratio, LIMIT, "x s3fs")


def main() -> None:
    """Run the parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_selection(parser, "--parts", DELAYS)
    parser.add_argument("--bytes", type=parse_size, default=parse_size("128MiB"), help="bytes of the saved state")
    parser.add_argument("--files", type=int, default=200, help="files of the folder with small files")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--record", action="store_true", help="write the section of RESULTS.md")
    arguments = parser.parse_args()
    report = Lines()
    today = datetime.datetime.now(tz=datetime.timezone.utc).date()
    report.say(f"{today}, {machine()}, torch {torch.__version__}, load {os.getloadavg()[0]:.1f}.")
    report.say(f"{arguments.bytes / 2**20:.0f} MiB, {arguments.files} small files, {arguments.rounds} rounds.")
    with running_server() as endpoint:
        fsspec.filesystem("s3").mkdir("bench")
        for part in arguments.parts:
            measure_part(report, endpoint, part, arguments.bytes, arguments.files, arguments.rounds)
    if arguments.record:
        record(section_title("Drivers of S3", arguments.parts, DELAYS), report.lines, report.goals)
    for line in report.failed:
        print(f"FAILED: {line}", file=sys.stderr)
    sys.exit(bool(report.failed))


if __name__ == "__main__":
    main()
