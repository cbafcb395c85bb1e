"""vLLM's real engine on a CPU follows a stream; `make test-stream` installs it and runs these tests."""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

pytest.importorskip("vllm", reason="make test-stream installs it")

import shardckpt
from shardckpt.errors import PoisonedError, ServerError, UnsupportedError, UsageError
from shardckpt.integrations.trl import StreamTransfer
from shardckpt.integrations.vllm_model import ServedModel
from shardckpt.integrations.vllm_plugin import register
from shardckpt.integrations.vllm_trainer import StreamTrainerInit, Trainer
from tests.kit.runs.vllm_servers import (
    ENVIRONMENT,
    SIZES,
    UNPACKED,
    Faults,
    Server,
    change_weights,
    write_model,
    write_weights,
)

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
PART = "model.layers.0.self_attn.k_proj.weight"  # in the middle of a layer that vLLM fuses
BACKEND = {"weight_transfer_config": {"backend": "shardckpt"}}

Weights = dict[str, torch.Tensor]
Measured = tuple[list[str], list[dict[str, str]]]


@pytest.fixture(scope="module", autouse=True)
def environment() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        yield


class Published(NamedTuple):
    """A stream of seven versions."""

    model: Path  # with other weights than any version
    url: Path
    versions: dict[int, Weights]
    publisher: Any

    def publish(self, version: int) -> None:
        self.publisher.publish(version, self.versions[version]).result()


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, Weights]]:
    folder = tmp_path_factory.mktemp("model")
    weights = write_model(folder)
    changes = itertools.accumulate(range(1, 8), change_weights, initial=weights)
    return folder, dict(enumerate(changes))


@pytest.fixture
def published(versions: tuple[Path, dict[int, Weights]], tmp_path: Path) -> Iterator[Published]:
    url = tmp_path / "stream"
    with shardckpt.Publisher(str(url), anchors=shardckpt.Anchors(max_chain=4)) as publisher:
        yield Published(versions[0], url, versions[1], publisher)


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Server]]:
    servers: list[Server] = []

    def start(folder: Path, *, unpacked: bool, **options: Any) -> Server:
        monkeypatch.setenv(UNPACKED, "1" if unpacked else "")
        servers.append(Server(folder, **options))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


@pytest.fixture(scope="module")
def fresh(
    versions: tuple[Path, dict[int, Weights]], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Measured]:
    """What a server computes that starts from a version."""
    known: dict[Any, Measured] = {}

    def measure(version: int, *, unpacked: bool, **options: Any) -> Measured:
        key = (version, unpacked, *options.items())
        if key not in known:
            folder = write_weights(tmp_path_factory.mktemp("fresh") / "model", versions[0], versions[1][version])
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv(UNPACKED, "1" if unpacked else "")
                server = Server(folder, **options)
            known[key] = server.measure()
            server.close()
        return known[key]

    return measure


LOADS = [pytest.param(True, "patch"), pytest.param(True, "reload"), pytest.param(False, "auto")]


@pytest.mark.parametrize(("unpacked", "load"), LOADS)
def test_a_server_that_follows_a_stream_equals_one_that_starts_from_the_version(
    published: Published, serve: Callable[..., Server], fresh: Callable[..., Measured], unpacked: bool, load: str
) -> None:
    server = serve(published.model, unpacked=unpacked, **BACKEND)
    server.follow(published.url, load=load)
    assert server.ask_workers("writes_in_place") == [load == "patch"]
    published.publish(1)
    server.update(1, is_named=False)
    published.publish(2)
    server.update(2)
    published.publish(3)
    published.publish(4)
    server.update(4)  # two versions at once
    assert server.llm.get_weight_version() == "4"
    assert server.measure() == fresh(4, unpacked=unpacked)

    published.publish(5)
    server.ask_workers("break_load", PART, 0)
    with pytest.raises(Exception, match=f"version 5 .* was applied in part: the test breaks {PART}"):
        server.update(5)
    assert server.llm.get_weight_version() == "4"
    assert server.ask_workers("computes_logits") == [False]
    with pytest.raises(Exception, match="finish_weight_update called without a matching"):
        server.llm.finish_weight_update("5")
    published.publish(6)
    server.update(6)
    assert server.llm.get_weight_version() == "6"
    assert server.measure() == fresh(6, unpacked=unpacked)

    published.publish(7)
    server.ask_workers("break_load", PART, 0)
    with pytest.raises(Exception, match="was applied in part"):
        server.update(7)
    with pytest.raises(Exception, match="EngineCore encountered an issue"):
        server.measure()


def test_the_last_of_two_workers_reports_a_failure_and_both_recover(
    published: Published,
    serve: Callable[..., Server],
    fresh: Callable[..., Measured],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "|".join(map(str, sorted(os.sched_getaffinity(0))[:2])))
    server = serve(published.model, unpacked=True, tensor_parallel_size=2, **BACKEND)
    server.follow(published.url, load="patch", mirror=str(published.url.parent / "mirror"))
    for version in (1, 2):
        published.publish(version)
        server.update(version)
    published.publish(3)
    server.ask_workers("break_load", PART, 0)
    with pytest.raises(Exception, match="was applied in part"):
        server.update(3)
    assert server.ask_workers("computes_logits") == [False, False]
    with pytest.raises(Exception, match="finish_weight_update called without a matching"):
        server.llm.finish_weight_update("3")
    published.publish(4)
    server.update(4)
    assert server.measure() == fresh(4, unpacked=True, tensor_parallel_size=2)


def test_an_update_without_a_version_is_not_labelled(published: Published, serve: Callable[..., Server]) -> None:
    server = serve(published.model, unpacked=True, **BACKEND)
    before = server.measure()
    with pytest.raises(Exception, match="no stream is open"):
        server.update(1)
    server.follow(published.url, timeout_s=0.0)
    with pytest.raises(Exception, match=r"no stream|not published"):
        server.update(1)
    published.publish(1)
    server.llm.start_weight_update()
    with pytest.raises(Exception, match="this update has loaded no version"):
        server.llm.finish_weight_update("1")
    assert server.llm.get_weight_version() == "default"
    assert server.measure() == before


class _Client:
    """The four calls of vLLM's trainers, to an `LLM` in this process."""

    def __init__(self, server: Server) -> None:
        self._llm = server.llm
        self.start_weight_update = self._llm.start_weight_update
        self.finish_weight_update = self._llm.finish_weight_update

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._llm.init_weight_transfer_engine({"init_info": init_info})

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._llm.update_weights({"update_info": update_info})


def test_vllms_trainer_interface_publishes_its_source(
    published: Published, serve: Callable[..., Server], fresh: Callable[..., Measured], tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM
    from vllm.distributed.weight_transfer import ModuleSource, WeightTransferTrainerFactory

    register()
    server = serve(published.model, unpacked=True, **BACKEND)
    model = AutoModelForCausalLM.from_pretrained(published.model, dtype=torch.bfloat16)
    init = StreamTrainerInit(rank=0, url=str(tmp_path / "own"))
    engine = WeightTransferTrainerFactory.trainer_init(init, client=_Client(server), source=ModuleSource(model))
    engine.send_weights()
    model.load_state_dict(published.versions[4])
    engine.send_weights(4)
    engine.shutdown()
    assert server.llm.get_weight_version() == "4"
    assert server.measure() == fresh(4, unpacked=True)


class _Shard(NamedTuple):
    dim: int


class _Layout(NamedTuple):
    """A `ParamMeta` of vLLM 0.33: which ranks hold a parameter, and how."""

    name: str
    shape: tuple[int, ...]
    owners: tuple[int, ...] | None
    mesh_shape: tuple[int, ...] | None
    placements: tuple[Any, ...] | None


class _LocalSource:
    """A `WeightSource` of vLLM 0.33 that yields shards; the CPU wheel of that version does not exist yet."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model

    @property
    def metadata(self) -> list[_Layout]:
        return [self._describe(name, value) for name, value in self._model.named_parameters()]

    def _describe(self, name: str, value: Any) -> _Layout:
        owners = tuple(value.device_mesh.mesh.flatten().tolist())
        shards = tuple(_as_theirs(each) for each in value.placements)
        return _Layout(name, tuple(value.shape), owners, tuple(value.device_mesh.mesh.shape), shards)

    def implements_iter_local(self) -> bool:
        return True

    def iter_local(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, value in self._model.named_parameters():
            yield name, value.to_local()


def _as_theirs(placement: Any) -> Any:
    kind = type("Shard", (_Shard,), {})
    return kind(placement.dim)


class _Calls:
    """A client that notes the calls."""

    def __init__(self) -> None:
        self.made: list[Any] = []

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args: self.made.append((name, *args))


def _send_shards(rank: int, world: int, url: str) -> tuple[list[Any], dict[str, torch.Tensor]]:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 3))
    full = {name: value.detach().to(torch.bfloat16) for name, value in model.state_dict().items()}
    fully_shard(model)
    client = _Calls()
    engine = Trainer.trainer_init(StreamTrainerInit(rank=rank, url=url), client=client, source=_LocalSource(model))
    engine.send_weights(3)
    engine.shutdown()
    return client.made, full


def test_each_trainer_rank_publishes_its_shards_and_rank_0_calls_the_servers(tmp_path: Path) -> None:
    from tests.kit.ranks.harness import run

    url = str(tmp_path / "stream")
    (made, full), (others, _) = run(2, _send_shards, url)
    follow = {"url": url, "mirror": None, "load": "auto"}
    update = [("start_weight_update",), ("update_weights", {"version": 3}), ("finish_weight_update", "3")]
    assert (made, others) == ([("init_weight_transfer_engine", follow), *update], [])
    received = {name: torch.zeros_like(value) for name, value in full.items()}
    shardckpt.Subscriber(url).stage().commit(received)
    assert all(torch.equal(received[name], value) for name, value in full.items())


def test_registering_twice_keeps_the_engines() -> None:
    register()
    register()


class _Staged(NamedTuple):
    changes: list[Any]

    def iter_changes(self) -> Iterator[Any]:
        return iter(self.changes)


class _Change(NamedTuple):
    name: str
    shape: tuple[int, ...]
    dtype: str
    indices: torch.Tensor | None
    values: torch.Tensor


@pytest.mark.parametrize(
    ("values", "reason"),
    [(torch.tensor([1.0, float("nan")]), "with NaN"), (torch.tensor([1, 2]), "floating-point tensors alone")],
)
def test_what_vllm_cannot_write_in_place_is_refused_by_name(values: torch.Tensor, reason: str) -> None:
    model = ServedModel(torch.nn.Linear(2, 2), None)
    change = _Change("layer.weight", (4,), "float32", torch.tensor([0, 3]), values)
    model.prepare(_Staged([change]))  # type: ignore[arg-type]
    model.in_place = True
    model.prepare(_Staged([change._replace(indices=None)]))  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match=f"layer.weight cannot be updated: .*{reason}"):
        model.prepare(_Staged([change]))  # type: ignore[arg-type]


def test_a_way_to_load_must_be_known() -> None:
    from shardckpt.integrations.vllm import StreamInit

    with pytest.raises(UsageError, match="`load` must be auto, patch or reload"):
        StreamInit(url="stream", load="other")  # type: ignore[arg-type]


class _Http:
    """`vllm serve` on this host."""

    def __init__(self, folder: Path, log: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        options = [f"--{name.replace('_', '-')}={value}" for name, value in SIZES.items() if name != "enforce_eager"]
        options += ["--enforce-eager", "--host=127.0.0.1", f"--port={port}", "--served-model-name=tiny"]
        options += ["--weight-transfer-config", json.dumps({"backend": "shardckpt"})]
        options += ["--worker-extension-cls", f"{Faults.__module__}.{Faults.__qualname__}"]
        # The command `vllm` asks for the version of a package of this name, which `vllm-cpu` is not.
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", f"--model={folder}", *options]
        environment = {**os.environ, "VLLM_SERVER_DEV_MODE": "1", "PYTHONPATH": str(ROOT), UNPACKED: ""}
        self._log = log.open("wb")
        self.process = subprocess.Popen(
            command, stdout=self._log, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        deadline = time.monotonic() + 240
        while True:
            with suppress(OSError):
                self.get("health")
                return
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.close()
                pytest.fail(log.read_text()[-2000:])
            time.sleep(0.3)

    def get(self, path: str) -> Any:
        return self._send(urllib.request.Request(f"{self.url}/{path}"))

    def post(self, path: str, body: Any = None) -> Any:
        url, data = f"{self.url}/{path}", json.dumps(body or {}).encode()
        return self._send(urllib.request.Request(url, data, {"Content-Type": "application/json"}))

    def _send(self, request: urllib.request.Request) -> Any:
        with urllib.request.urlopen(request, timeout=120) as answer:
            text = answer.read()
        return json.loads(text) if text else None

    def generate(self) -> str:
        asked = {"model": "tiny", "prompt": "w5 w8", "temperature": 0, "max_tokens": 24, "ignore_eos": True}
        return str(self.post("v1/completions", asked)["choices"][0]["text"])

    def close(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._log.close()


def test_trls_trainer_lets_an_http_server_load_its_weights_or_leaves_it_paused(
    published: Published, fresh: Callable[..., Measured], tmp_path: Path
) -> None:
    server = _Http(published.model, tmp_path / "log")
    try:
        transfer = StreamTransfer(tmp_path / "own", server.url)
        transfer.init_weight_transfer()
        for version in (1, 2, 3, 4):
            transfer.pause()
            transfer.send_weights(iter(published.versions[version].items()))
            assert server.get("is_paused") == {"is_paused": True}
            transfer.resume()
            assert server.get("weight_info") == {"weight_version": str(version)}
        texts, checksums = fresh(4, unpacked=False)
        assert server.generate() == texts[0]
        assert server.post("weight_checker", {"action": "checksum"})["checksums"] == checksums[0]

        server.post("collective_rpc", {"method": "break_load", "args": [PART, 0]})
        transfer.pause()
        with pytest.raises(ServerError, match="update_weights: the server refused; found 500"):
            transfer.send_weights(iter(published.versions[5].items()))
        with pytest.raises(PoisonedError):
            transfer.resume()
        transfer.destroy()
        assert server.get("is_paused") == {"is_paused": True}
        assert server.get("weight_info") == {"weight_version": "4"}

        restarted = StreamTransfer(tmp_path / "own", server.url)
        restarted.send_weights(iter(published.versions[5].items()))
        restarted.resume()
        assert restarted.version == 5, "it was published before, so it is only loaded"
        assert server.generate() == fresh(5, unpacked=False)[0][0]
    finally:
        server.close()


def test_an_http_server_serves_a_version_or_stops(
    published: Published, fresh: Callable[..., Measured], tmp_path: Path
) -> None:
    server = _Http(published.model, tmp_path / "log")
    try:
        published.publish(1)
        published.publish(2)
        server.post("init_weight_transfer_engine", {"init_info": {"url": str(published.url)}})
        published.publish(4)
        server.post("start_weight_update")
        assert server.generate()  # it reads in the background
        server.post("pause?mode=keep")
        server.post("update_weights", {"update_info": {"version": 4}})
        server.post("finish_weight_update", {"weight_version": "4"})
        server.post("resume")
        texts, checksums = fresh(4, unpacked=False)
        assert server.get("weight_info") == {"weight_version": "4"}
        assert server.generate() == texts[0]
        assert server.post("weight_checker", {"action": "checksum"})["checksums"] == checksums[0]

        published.publish(5)
        server.post("collective_rpc", {"method": "break_load", "args": [PART, 0]})
        server.post("start_weight_update")
        server.post("pause?mode=keep")
        with pytest.raises(urllib.error.HTTPError, match="500"):
            server.post("update_weights", {"update_info": {"version": 5}})
        assert server.get("weight_info") == {"weight_version": "4"}
        assert server.get("is_paused") == {"is_paused": True}
        server.post("resume")
        with pytest.raises(OSError):
            server.generate()
        server.process.wait(timeout=60)
    finally:
        server.close()
