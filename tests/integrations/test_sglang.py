"""Workers of SGLang load the version that an update names, all of them or none.

SGLang needs a GPU, so its caller is imitated here, as SGLang 0.5.23 has it: `update_weights_from_tensor` in
`srt/managers/scheduler_components/weight_updater.py` (a session, one payload for each worker, a label after success)
and in `srt/model_executor/model_runner_components/weight_updater.py` (`_unwrap_tensor`, `dynamic_import`; errors are
not caught).
"""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing  # how tensors are pickled
from transformers import LlamaForCausalLM

import shardckpt
from shardckpt.errors import PoisonedError, ShardckptError, SourceNotFoundError, UsageError
from shardckpt.integrations import sglang
from tests.kit.models.tiny_llama import llama_config
from tests.kit.ranks.harness import run

Weights = dict[str, torch.Tensor]


class ServedLlama(LlamaForCausalLM):
    """A model with SGLang's method, which copies by name; it fails on request."""

    fails_at = ""
    loaded = 0

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy each tensor."""
        params = dict(self.named_parameters())
        for name, tensor in weights:
            if name == self.fails_at:
                raise RuntimeError("the device is gone")
            with torch.no_grad():
                params[name].copy_(tensor)
            self.loaded += 1


class FakeScheduler:
    """What SGLang 0.5.23 does around the loader."""

    def __init__(self, model: torch.nn.Module, custom_weight_loaders: Iterable[str] = (sglang.LOADER,)) -> None:
        self.model, self.loaders = model, tuple(custom_weight_loaders)
        self.weight_version = "default"
        self.is_open = False

    def update(self, payload: bytes, load_format: str, weight_version: str) -> None:
        """Call the loader as `update_weights_from_tensor` does, between `begin_` and `end_weight_update`."""
        self.is_open = True
        named_tensors = [(name, tensor.to("cpu")) for name, tensor in deserialize(payload)]
        assert load_format in self.loaders
        module, _, function = load_format.rpartition(".")
        getattr(importlib.import_module(module), function)(self.model, named_tensors)
        self.weight_version = weight_version
        self.is_open = False


def serialize(named_tensors: Any) -> bytes:
    """`MultiprocessingSerializer.serialize`."""
    from multiprocessing.reduction import ForkingPickler

    return bytes(ForkingPickler.dumps(named_tensors))


def deserialize(payload: bytes) -> Any:
    import pickle

    return pickle.loads(payload)  # their `SafeUnpickler` allows these names: see the test below


def build() -> ServedLlama:
    torch.manual_seed(0)
    return ServedLlama(llama_config(64, 16, 32, tie_word_embeddings=False)).to(torch.bfloat16)


def make_version(number: int) -> Weights:
    """Return weights of which one tensor is unchanged."""
    weights = {name: value.detach().clone() for name, value in build().named_parameters()}
    return {name: value if "norm" in name else value * number for name, value in weights.items()}


def publish(url: Path, *numbers: int) -> None:
    with shardckpt.Publisher(url, anchors=shardckpt.Anchors(max_bytes=100)) as publisher:
        for number in numbers:
            publisher.publish(number, make_version(number)).result()


def is_version(model: torch.nn.Module, number: int) -> bool:
    return all(torch.equal(value, make_version(number)[name]) for name, value in model.named_parameters())


def test_each_update_loads_its_version(tmp_path: Path) -> None:
    publish(tmp_path / "stream", 1, 2, 3)
    scheduler = FakeScheduler(build())
    for number in (1, 3):
        payload = serialize(sglang.make_update(tmp_path / "stream", number, mirror=str(tmp_path / "mirror")))
        scheduler.update(payload, sglang.LOADER, str(number))
        assert is_version(scheduler.model, number)
        assert scheduler.weight_version == str(number)
    assert (tmp_path / "mirror").is_dir()
    loaded = scheduler.model.loaded
    scheduler.update(payload, sglang.LOADER, "3")
    assert scheduler.model.loaded == loaded, "a held version is not loaded again"


def test_a_model_that_leaves_tensors_out_is_poisoned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the second update, and after one that had nothing to load."""
    publish(tmp_path, 1, 2, 3)
    model = build()
    for number in (1, 1, 2):
        sglang.apply(model, sglang.make_update(tmp_path, number))
    monkeypatch.setattr(ServedLlama, "load_weights", lambda self, weights: next(iter(weights)))
    with pytest.raises(PoisonedError, match="must take all changes"):
        sglang.apply(model, sglang.make_update(tmp_path, 3))


def test_two_models_in_a_worker_each_get_the_version(tmp_path: Path) -> None:
    publish(tmp_path, 1, 2)
    target, draft = build(), build()
    for number in (1, 2):
        for model in (target, draft):
            sglang.apply(model, sglang.make_update(tmp_path, number))
        assert is_version(target, number) and is_version(draft, number)


def test_another_stream_replaces_all_weights(tmp_path: Path) -> None:
    publish(tmp_path / "one", 1, 2)
    publish(tmp_path / "two", 1, 4)
    model = build()
    sglang.apply(model, sglang.make_update(tmp_path / "one", 2))
    sglang.apply(model, sglang.make_update(tmp_path / "two", 4))
    assert is_version(model, 4)


def test_a_failed_update_raises_and_the_next_one_replaces_all(tmp_path: Path) -> None:
    publish(tmp_path, 1, 2, 3)
    scheduler = FakeScheduler(build())
    scheduler.update(serialize(sglang.make_update(tmp_path, 1)), sglang.LOADER, "1")
    scheduler.model.fails_at = "lm_head.weight"
    with pytest.raises(PoisonedError, match=r"version 2 .*was applied in part: the device is gone"):
        scheduler.update(serialize(sglang.make_update(tmp_path, 2)), sglang.LOADER, "2")
    assert scheduler.weight_version == "1" and scheduler.is_open, "no further update before someone looks at it"
    scheduler.model.fails_at = ""
    scheduler.update(serialize(sglang.make_update(tmp_path, 3)), sglang.LOADER, "3")
    assert is_version(scheduler.model, 3)


def test_a_missing_version_changes_nothing(tmp_path: Path) -> None:
    publish(tmp_path, 1)
    model = build()
    sglang.apply(model, sglang.make_update(tmp_path, 1))
    with pytest.raises(SourceNotFoundError, match="version 2 is not published here"):
        sglang.apply(model, sglang.make_update(tmp_path, 2, timeout_s=0.0))
    assert is_version(model, 1)


def fail_on_one_worker(rank: int, world: int, url: Path) -> str:
    model = build()
    sglang.apply(model, sglang.make_update(url, 1))
    model.fails_at = "lm_head.weight" if rank else ""
    with pytest.raises(ShardckptError) as caught:
        sglang.apply(model, sglang.make_update(url, 2))
    model.fails_at = ""
    sglang.apply(model, sglang.make_update(url, 3))
    assert is_version(model, 3)
    return type(caught.value).__name__


def test_a_failure_on_one_worker_is_raised_on_all(tmp_path: Path) -> None:
    publish(tmp_path, 1, 2, 3)
    assert run(2, fail_on_one_worker, tmp_path) == ["PoisonedError"] * 2


READ_ELSEWHERE = """
import pickle, sys, torch.multiprocessing
print(pickle.loads(sys.stdin.buffer.read())[0][0])
"""


def test_an_update_is_read_after_its_sender_is_gone(tmp_path: Path) -> None:
    payload = serialize(sglang.make_update("s3://bucket/stream", 7))
    done = subprocess.run([sys.executable, "-c", READ_ELSEWHERE], input=payload, capture_output=True, check=True)
    assert b'"version": 7' in done.stdout
    assert b"rebuild_storage_empty" in payload, "which SGLang's unpickler allows, and which opens no shared memory"


def test_the_url_does_not_depend_on_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ((text, _),) = sglang.make_update("stream", 1)
    assert f'"url": "{tmp_path}/stream"' in text


@pytest.mark.parametrize(
    "tensors",
    [
        [],
        [("weight", torch.ones(1))],
        [("[]", torch.ones(1))],
        [('{"url": "x", "version": 1}', torch.ones(1))],
        [('{"url": 3, "version": 1, "mirror": null, "timeout_s": 0}', torch.ones(1))],
    ],
)
def test_other_tensors_are_refused(tensors: list[tuple[str, torch.Tensor]]) -> None:
    with pytest.raises(UsageError, match="an update must"):
        sglang.apply(torch.nn.Linear(1, 1), tensors)


def test_an_update_needs_a_number(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="an update must have a URL, a version's number"):
        sglang.make_update(tmp_path, "latest")  # type: ignore[arg-type]
