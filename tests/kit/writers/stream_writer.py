"""A small stream with anchors and chains, and what damages it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

import shardckpt

Weights = dict[str, torch.Tensor]
NUMBERS = range(10, 16)
ANCHORS = (10, 13)


def make_versions() -> Iterator[tuple[int, Weights]]:
    """Yield weights in several dtypes, of which a few elements, a tensor or nothing change."""
    torch.manual_seed(0)
    weights = {
        "layers.0.weight": torch.randn(40, 30).bfloat16(),
        "norm": torch.ones(30).bfloat16(),
        "counts": torch.arange(5),
        "scalar": torch.tensor(1.0),
        "mask": torch.tensor([True, False]),
        "empty": torch.empty(0, 3),
    }
    for number in NUMBERS:
        weights = {name: value.clone() for name, value in weights.items()}
        weights["layers.0.weight"][number::7] += 1
        weights["norm"] += number % 2
        weights["scalar"] += 0.5
        weights["mask"] ^= True
        yield number, weights


def publish(url: Path) -> dict[int, Weights]:
    """Publish the versions, and return their weights."""
    versions = dict(make_versions())
    with shardckpt.Publisher(url, dtype=None, anchors=shardckpt.Anchors(max_chain=2)) as publisher:
        for number, weights in versions.items():
            publisher.publish(number, weights)
    return versions


def folder_of(stream: Path, number: int) -> Path:
    return stream / f"e00001-v{number:010d}"


def delta_of(stream: Path, number: int) -> Path:
    [file] = folder_of(stream, number).glob("delta-*")
    return file


def flip(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


def assert_same(found: Weights, expected: Weights) -> None:
    assert {*found} == {*expected}
    for name, value in expected.items():
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name], value), name
