"""A publisher writes what changed, resumes from any weights, and never overwrites a version."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardckpt
from shardckpt.errors import (
    MismatchError,
    NameCollisionError,
    PrecisionError,
    PublisherReplacedError,
    StorageError,
    UnsupportedError,
    UsageError,
)
from shardckpt.events import PublishEvent
from shardckpt.storage.local import LocalStore
from shardckpt.stream.format.stream_folder import StreamFolder
from shardckpt.stream.format.stream_records import COMMIT, Version


def build(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4))


def step(model: nn.Module) -> None:
    with torch.no_grad():
        model[0].weight[0, 0] += 1


def receive(url: str, number: int | None = None) -> dict[str, torch.Tensor]:
    record = StreamFolder(url).record
    into = {name: torch.empty(tuple(t.shape), dtype=getattr(torch, t.dtype)) for name, t in record.tensors.items()}
    shardckpt.Subscriber(url).stage(number).commit(into)
    return into


def is_equal(model: nn.Module, into: dict[str, torch.Tensor]) -> bool:
    state = model.state_dict()
    return state.keys() == into.keys() and all(torch.equal(state[name].to(v.dtype), v) for name, v in into.items())


def test_only_what_changed_is_written(tmp_path: Path) -> None:
    model, events = build(), list[Any]()
    anchors = shardckpt.Anchors(max_bytes=1e6)  # the weights are smaller than a file's header
    with shardckpt.Publisher(tmp_path, anchors=anchors, on_event=events.append) as publisher:
        publisher.publish(1, model)
        step(model)
        publisher.publish(2, model)
        publisher.publish(3, model)
    assert all(isinstance(event, PublishEvent) for event in events)
    assert [(event.version, event.changed, event.has_anchor) for event in events] == [
        (1, 0, True),
        (2, 1, False),
        (3, 0, False),
    ]
    assert events[1].elements == 8 * 4 + 4 + 4 * 4 + 1
    commits = list(StreamFolder(str(tmp_path)).iter_commits())
    assert [(each.version.number, each.base, len(each.files), each.changed) for each in commits] == [
        (3, Version(1, 2), 0, 0),
        (2, Version(1, 1), 1, 1),
        (1, None, 0, 0),
    ]
    assert is_equal(model, receive(str(tmp_path)))


def test_weights_may_change_as_soon_as_the_call_returns(tmp_path: Path) -> None:
    model = build()
    with shardckpt.Publisher(tmp_path, dtype=None) as publisher:
        publisher.publish(1, model)
        kept = {name: value.clone() for name, value in model.state_dict().items()}
        step(model)
    received = receive(str(tmp_path))
    assert all(torch.equal(kept[name], value) for name, value in received.items())
    assert received["0.weight"].dtype == torch.float32


def test_names_are_the_servers(tmp_path: Path) -> None:
    with shardckpt.Publisher(tmp_path, key_map={r"^0\.": "proj.", r"^1\.": "norm."}) as publisher:
        publisher.publish(1, build())
    assert {"proj.weight", "norm.running_mean"} <= receive(str(tmp_path)).keys()


def test_a_restored_publisher_continues_with_changes(tmp_path: Path) -> None:
    model = build()
    with shardckpt.Publisher(tmp_path) as publisher:
        publisher.publish(1, model)
    with shardckpt.Publisher(tmp_path) as again:
        assert again.resume(model) == 1
        step(model)
        again.publish(2, model)
    newest = StreamFolder(str(tmp_path)).find_number(None)
    assert newest is not None
    assert (newest.version, newest.base, newest.changed) == (Version(2, 2), Version(1, 1), 1)
    assert is_equal(model, receive(str(tmp_path)))


def test_older_weights_open_an_epoch_with_an_anchor(tmp_path: Path) -> None:
    model = build()
    with shardckpt.Publisher(tmp_path) as publisher:
        publisher.publish(1, model)
        older = {name: value.clone() for name, value in model.state_dict().items()}
        step(model)
        publisher.publish(2, model)
    model.load_state_dict(older)
    with shardckpt.Publisher(tmp_path) as again:
        assert again.resume(model) == 1
        again.publish(2, model)
    folder = StreamFolder(str(tmp_path))
    newest = folder.find_number(None)
    assert newest is not None
    assert (newest.version, newest.base) == (Version(2, 2), None)
    assert folder.has_anchor(newest.version)
    assert is_equal(model, receive(str(tmp_path)))


def test_unknown_weights_are_told_and_get_an_anchor(tmp_path: Path) -> None:
    with shardckpt.Publisher(tmp_path) as publisher:
        publisher.publish(1, build())
    with shardckpt.Publisher(tmp_path) as again:
        assert again.resume(build(1)) is None
        again.publish(2, build(1))
    assert is_equal(build(1), receive(str(tmp_path)))


def test_a_restore_in_the_same_process_opens_an_epoch(tmp_path: Path) -> None:
    model = build()
    with shardckpt.Publisher(tmp_path) as publisher:
        publisher.publish(5, model)
        assert publisher.resume(model) == 5
        step(model)
        publisher.publish(5, model)
    versions = [each.version for each in StreamFolder(str(tmp_path)).iter_commits()]
    assert versions == [Version(2, 5), Version(1, 5)]


def test_of_two_publishers_the_later_one_wins_and_the_other_is_told(tmp_path: Path) -> None:
    model = build()
    first, second = shardckpt.Publisher(tmp_path), shardckpt.Publisher(tmp_path)
    first.publish(1, model).result()
    second.publish(1, model).result()
    with pytest.raises(PublisherReplacedError, match="epoch 2"):
        first.publish(2, model)
    step(model)
    second.publish(2, model).result()
    assert is_equal(model, receive(str(tmp_path)))


@pytest.mark.parametrize("version", [-1, True, 1.0, "1", None, 10**10])
def test_a_version_is_a_number(version: object, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="`version` must be a number"):
        shardckpt.Publisher(tmp_path).publish(version, build())  # type: ignore[arg-type]


def test_a_version_is_greater_than_the_last_one(tmp_path: Path) -> None:
    with shardckpt.Publisher(tmp_path) as publisher:
        publisher.publish(3, build())
        with pytest.raises(UsageError, match=r"greater than the last one.*more than 3"):
            publisher.publish(3, build(1))
    assert is_equal(build(), receive(str(tmp_path)))


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (nn.Sequential(nn.Linear(8, 4)), "missing 1.weight"),
        (
            nn.Sequential(nn.Linear(8, 5), nn.BatchNorm1d(5)),
            r"0.weight is bfloat16\[5, 8\], the stream has bfloat16\[4",
        ),
        (nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)), "unexpected 2.weight"),
    ],
    ids=["fewer", "shapes", "more"],
)
def test_another_model_is_refused_by_name(other: nn.Module, message: str, tmp_path: Path) -> None:
    with shardckpt.Publisher(tmp_path) as publisher:
        publisher.publish(1, build())
    with pytest.raises(MismatchError, match=message):
        shardckpt.Publisher(tmp_path).publish(2, other)
    assert is_equal(build(), receive(str(tmp_path)))


def test_another_dtype_is_refused(tmp_path: Path) -> None:
    with shardckpt.Publisher(tmp_path) as publisher:
        publisher.publish(1, build())
    with pytest.raises(MismatchError, match=r"0.weight is float32\[4, 8\], the stream has bfloat16"):
        shardckpt.Publisher(tmp_path, dtype="float32").publish(2, build())


def test_two_tensors_with_one_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(NameCollisionError, match="two tensors get one name"):
        shardckpt.Publisher(tmp_path, key_map={"weight|bias": "x"}).publish(1, build())


@pytest.mark.parametrize("model", [None, 3, [torch.ones(1)], {}], ids=repr)
def test_what_is_no_model_is_refused(model: object, tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        shardckpt.Publisher(tmp_path).publish(1, model)
    assert not list(tmp_path.rglob(COMMIT))


@pytest.mark.parametrize(
    "options", [{"dtype": "int8"}, {"anchors": 3}, {"keep": 3}, {"on_event": 3}, {"key_map": {"(": ""}}], ids=repr
)
def test_wrong_options_are_refused(options: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        shardckpt.Publisher(tmp_path, **options)


def test_a_tensor_subclass_is_refused_by_name(tmp_path: Path) -> None:
    torchao = pytest.importorskip("torchao.quantization")
    model = nn.Sequential(nn.Linear(64, 64, bias=False, dtype=torch.bfloat16))
    torchao.quantize_(model, torchao.Int8WeightOnlyConfig())
    with pytest.raises(UnsupportedError, match=r"0\.weight"):
        shardckpt.Publisher(tmp_path).publish(1, model)


class Full(LocalStore):
    """A store in which commits fail, stored or not."""

    stores_first = False

    def create(self, name: str, *, is_new: bool = False) -> Any:
        if name.endswith(COMMIT):
            if self.stores_first:
                with super().create(name, is_new=is_new) as writer:
                    writer.write(b"")
            raise StorageError("the request was lost", where=name)
        return super().create(name, is_new=is_new)


def test_a_failed_version_is_raised_and_the_next_one_has_its_changes(tmp_path: Path) -> None:
    model = build()
    publisher = shardckpt.Publisher(tmp_path)
    publisher.publish(1, model).result()
    folder = publisher._ledger.folder
    good, folder.store = folder.store, Full(str(tmp_path))
    step(model)
    handle = publisher.publish(2, model)
    with pytest.raises(StorageError, match="the request was lost"):
        handle.result()
    folder.store = good
    publisher.publish(3, model).result()
    newest = StreamFolder(str(tmp_path)).find_number(None)
    assert newest is not None
    assert (newest.base, newest.changed) == (Version(1, 1), 1)
    assert newest.version.epoch == 2, "the lost request may still arrive"
    assert is_equal(model, receive(str(tmp_path)))


def test_an_error_that_nobody_asked_for_is_raised_by_the_next_call(tmp_path: Path) -> None:
    publisher = shardckpt.Publisher(tmp_path)
    publisher.publish(1, build()).result()
    publisher._ledger.folder.store = Full(str(tmp_path))
    publisher.publish(2, build(1))
    with pytest.raises(StorageError, match=f"^the publish of version 2 to {tmp_path} failed: "):
        publisher.publish(3, build(1))
    assert is_equal(build(), receive(str(tmp_path)))


def test_a_commit_whose_answer_was_lost_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build()
    publisher = shardckpt.Publisher(tmp_path)
    publisher.publish(1, model).result()
    folder = publisher._ledger.folder
    create = folder.create

    def lose_answer(name: str, record: object) -> bool:
        create(name, record)
        raise StorageError("the answer was lost", where=name)

    monkeypatch.setattr(folder, "create", lose_answer)
    step(model)
    with pytest.raises(StorageError, match="answer was lost"):
        publisher.publish(2, model).result()
    monkeypatch.setattr(folder, "create", create)
    step(model)
    publisher.publish(3, model).result()
    newest = StreamFolder(str(tmp_path)).find_number(None)
    assert newest is not None
    assert (newest.version, newest.base, newest.changed) == (Version(1, 3), Version(1, 2), 1)
    assert is_equal(model, receive(str(tmp_path)))


def test_a_further_name_that_another_tensor_has_is_refused(tmp_path: Path) -> None:
    tied = torch.ones(3)
    with pytest.raises(NameCollisionError, match="further name of a tensor is another tensor's"):
        shardckpt.Publisher(tmp_path, key_map={"^h$": "x"}).publish(1, {"e": tied, "h": tied, "x": torch.zeros(3)})


def test_what_a_stream_cannot_hold_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"w: a stream has no complex128"):
        shardckpt.Publisher(tmp_path).publish(1, {"w": torch.ones(2, dtype=torch.complex128)})
    with pytest.raises(UsageError, match="`Anchors` needs"):
        shardckpt.Anchors(max_bytes="1")  # type: ignore[arg-type]


def test_a_publisher_of_a_folder_that_was_made_again_is_told(tmp_path: Path) -> None:
    first = shardckpt.Publisher(tmp_path / "s")
    first.publish(1, build()).result()
    shutil.rmtree(tmp_path / "s")
    with shardckpt.Publisher(tmp_path / "s") as second:
        second.publish(1, build(1)).result()
        with pytest.raises(PublisherReplacedError):
            first.publish(2, build())
        step(model := build(1))
        second.publish(2, model)
    assert is_equal(model, receive(str(tmp_path / "s")))


def test_a_number_that_is_too_large_for_the_dtype_is_refused(tmp_path: Path) -> None:
    weights = {"w": torch.tensor([1.0, float("inf"), 60000.0])}
    publisher = shardckpt.Publisher(tmp_path, dtype="float16")
    publisher.publish(1, weights).result()
    weights["w"][0] = 1e6
    with pytest.raises(PrecisionError, match=r"w: a number is too large for float16"):
        publisher.publish(2, weights).result()
    assert receive(str(tmp_path))["w"].tolist() == [1.0, float("inf"), 60000.0]
