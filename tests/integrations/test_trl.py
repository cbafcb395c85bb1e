"""TRL's trainer publishes its weights, and a server loads each version or stays paused."""

from __future__ import annotations

import inspect
import json
import queue
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch

import shardckpt
from shardckpt.errors import PoisonedError, ServerError, UsageError
from shardckpt.integrations.trl import StreamTransfer
from tests.kit.runs.vllm_servers import write_model


class FakeServer(ThreadingHTTPServer):
    """The routes of vLLM 0.32, `vllm/entrypoints/rl/online/api_router.py`; `test_vllm.py` has the real server."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.calls: list[Any] = []
        self.failing = ""
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: FakeServer

    def do_GET(self) -> None:
        self._answer(200 if self.path == "/health" else 404)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        route = self.path.strip("/")
        self.server.calls.append((route, body) if body else route)
        self._answer(500 if self.server.failing == route else 200)

    def _answer(self, status: int) -> None:
        data = json.dumps({"error": "the test breaks it"} if status == 500 else {}).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer() as running:
        thread = Thread(target=running.serve_forever)
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def make_weights(number: float) -> Iterator[tuple[str, torch.Tensor]]:
    yield "w", torch.full((2, 3), number)
    yield "b", torch.full((3,), -number)


def receive(url: Path) -> tuple[int, dict[str, torch.Tensor]]:
    staged = shardckpt.Subscriber(url).stage()
    return staged.version.number, dict(staged.iter_tensors())


def update(version: int) -> list[Any]:
    return [
        "start_weight_update",
        ("update_weights", {"update_info": {"version": version}}),
        ("finish_weight_update", {"weight_version": str(version)}),
    ]


def test_a_server_loads_each_version_while_it_is_paused(server: FakeServer, tmp_path: Path) -> None:
    transfer = StreamTransfer(tmp_path, f"{server.url}/", init_info={"mirror": "/m"})
    transfer.init_weight_transfer()
    assert server.calls == [("init_weight_transfer_engine", {"init_info": {"url": str(tmp_path), "mirror": "/m"}})]
    for version in (1, 2):
        server.calls.clear()
        transfer.pause()
        transfer.send_weights(make_weights(version))
        transfer.resume()
        assert server.calls == ["pause?mode=keep", *update(version), "resume"]
        assert transfer.version == version
    transfer.destroy()
    number, weights = receive(tmp_path)
    assert (number, weights["w"].tolist(), weights["b"].tolist()) == (2, [[2] * 3] * 2, [-2] * 3)


@pytest.mark.parametrize("route", ["start_weight_update", "update_weights", "finish_weight_update"])
def test_a_server_that_fails_stays_paused_until_it_has_a_version(
    server: FakeServer, tmp_path: Path, route: str
) -> None:
    transfer = StreamTransfer(tmp_path, server.url)
    server.failing = route
    transfer.pause()
    with pytest.raises(ServerError, match=f"{route}: the server refused; found 500 .*the test breaks it"):
        transfer.send_weights(make_weights(1))
    with pytest.raises(PoisonedError, match="the server may have the weights of no version"):
        transfer.resume()
    transfer.destroy()
    assert "resume" not in server.calls
    server.failing = ""
    transfer.send_weights(make_weights(2))
    transfer.resume()
    assert server.calls[-4:] == [*update(2), "resume"]


def test_after_a_restart_the_server_gets_the_newest_version_again(server: FakeServer, tmp_path: Path) -> None:
    StreamTransfer(tmp_path).send_weights(make_weights(1))
    StreamTransfer(tmp_path, server.url).send_weights(make_weights(1))
    assert server.calls == update(1), "nothing is published, and the server may have restarted too"
    assert receive(tmp_path)[0] == 1


def test_weights_that_cannot_be_published_reach_no_server(server: FakeServer, tmp_path: Path) -> None:
    transfer = StreamTransfer(tmp_path, server.url)
    transfer.send_weights(make_weights(1))
    server.calls.clear()
    with pytest.raises(shardckpt.ShardckptError, match="unexpected other"):
        transfer.send_weights([*make_weights(2), ("other", torch.ones(1))])  # type: ignore[arg-type]
    with pytest.raises(PoisonedError):
        transfer.resume()
    assert server.calls == []


def test_a_missing_server_is_named(tmp_path: Path) -> None:
    with FakeServer() as closed:
        url = closed.url
    transfer = StreamTransfer(tmp_path, url, timeout_s=0.1)
    with pytest.raises(ServerError, match=f"{url}: the server did not get ready; found 0.1 s"):
        transfer.init_weight_transfer()
    with pytest.raises(ServerError, match="resume: the server did not answer"):
        transfer.resume()


def test_without_a_server_the_weights_are_published_alone(tmp_path: Path) -> None:
    transfer = StreamTransfer(tmp_path)
    for call in (transfer.init_weight_transfer, transfer.pause):
        call()
    transfer.send_weights(make_weights(1))
    transfer.resume()
    assert receive(tmp_path)[0] == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"server_url": "server:8000"}, "`server_url` must start with http"),
        ({"server_url": "http://x", "timeout_s": 0}, "`timeout_s` must be a finite number"),
        ({"dtype": "int8"}, "`dtype` must be None or"),
    ],
)
def test_unknown_values_are_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        StreamTransfer(tmp_path, **options)


class Rollouts:
    """A rollout worker of the real trainer's protocol, without samples."""

    def __init__(self) -> None:
        self.rollout_buffer: queue.Queue[Any] = queue.Queue()
        self.metrics_queue: queue.Queue[Any] = queue.Queue()
        self.versions: list[int] = []

    def update_model_version(self, version: int) -> None:
        self.versions.append(version)


def test_it_has_the_methods_of_trls_protocol(tmp_path: Path) -> None:
    module = pytest.importorskip("trl.experimental.async_grpo.async_grpo_trainer", exc_type=ImportError)
    protocol = module.WeightTransferProtocol
    names = [name for name in vars(protocol) if not name.startswith("_")]
    assert names == ["init_weight_transfer", "pause", "send_weights", "resume", "destroy"]
    for name in names:
        theirs = inspect.signature(getattr(protocol, name)).parameters
        assert list(inspect.signature(getattr(StreamTransfer, name)).parameters) == list(theirs)


def test_trls_trainer_publishes_what_it_trains(
    server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real trainer is built on the CPU, and calls us as it does while it trains."""
    trl = pytest.importorskip("trl.experimental.async_grpo", exc_type=ImportError)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a CPU")  # for a metric
    expected = write_model(tmp_path / "model")
    config = trl.AsyncGRPOConfig(
        str(tmp_path / "out"), use_cpu=True, bf16=False, max_steps=1, token_budget=64, report_to=[], dtype="float32"
    )
    rollouts = Rollouts()
    trainer = trl.AsyncGRPOTrainer(
        str(tmp_path / "model"),
        lambda completions, **_: [0.0] * len(completions),
        config,
        train_dataset=[{"prompt": "w5"}, {"prompt": "w6"}],
        rollout_worker=rollouts,
        weight_transfer=StreamTransfer(tmp_path / "stream", server.url),
    )
    for version in (1, 2):
        trainer._sync_weight()
        number, weights = receive(tmp_path / "stream")
        assert number == version
        assert weights.keys() == expected.keys()
        assert all(torch.equal(weights[name], value) for name, value in expected.items())
        assert server.calls[-5:] == ["pause?mode=keep", *update(version), "resume"]
        with torch.no_grad():
            for name, value in trainer.model.named_parameters():
                value.mul_(1.5)
                expected[name] = value.bfloat16()
    assert rollouts.versions == [1, 2]
