"""A stream may be in any store: a bucket takes conditional requests, memory of a process has none of its files."""

from __future__ import annotations

import pytest
import torch

import shardckpt
from shardckpt.errors import PublisherReplacedError
from shardckpt.stream.format.stream_folder import StreamFolder
from shardckpt.stream.format.stream_records import EpochClaim, name_epoch


@pytest.fixture(params=["memory", "s3"])
def url(request: pytest.FixtureRequest) -> str:
    if request.param == "s3":
        return f"{request.getfixturevalue('s3_bucket')}/stream"
    return f"memory://{request.node.name}"


def test_versions_are_published_received_and_removed(url: str) -> None:
    weights = {"a": torch.zeros(1000), "b": torch.ones(50)}
    into = {name: torch.empty_like(value) for name, value in weights.items()}
    reader = shardckpt.Subscriber(url)
    anchors = shardckpt.Anchors(max_chain=2, max_bytes=1e6, keep=1)
    with shardckpt.Publisher(url, anchors=anchors) as publisher:
        for version in range(1, 8):
            weights["a"][version] = version
            publisher.publish(version, weights).result()
            if version in (1, 3, 4):
                assert reader.stage().commit(into).number == version
    folder = StreamFolder(url)
    assert [each.version.number for each in folder.iter_commits()] == [7, 6, 5, 4, 3]
    assert reader.stage().commit(into).number == 7
    reader.close()
    assert torch.equal(into["a"], weights["a"])


def test_an_epoch_is_claimed_once(url: str) -> None:
    folder = StreamFolder(url)
    claims = [EpochClaim(token * 32, "here", 1) for token in "ab"]
    assert [folder.create(name_epoch(1), claim) for claim in claims] == [True, False]
    assert folder.find(EpochClaim, name_epoch(1)) == claims[0]


def test_of_two_publishers_one_is_told(url: str) -> None:
    first, second = shardckpt.Publisher(url), shardckpt.Publisher(url)
    first.publish(1, {"a": torch.zeros(4)}).result()
    second.publish(2, {"a": torch.ones(4)}).result()
    with pytest.raises(PublisherReplacedError):
        first.publish(3, {"a": torch.zeros(4)})
