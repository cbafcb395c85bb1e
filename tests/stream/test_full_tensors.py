"""One process publishes the tensors that it gathers with other ranks, and goes on after a restart."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import shardckpt
from shardckpt.errors import NameCollisionError, PrecisionError
from shardckpt.stream.publish.full_tensors import FullTensorPublisher
from tests.kit.ranks.harness import run


def build(number: float) -> dict[str, torch.Tensor]:
    return {
        "a": torch.full((3, 5), number),
        "b": torch.arange(4) + int(number),
        "fp8": torch.ones(2).to(torch.float8_e4m3fn),
    }


def make(url: Path, dtype: str | None = "bfloat16") -> FullTensorPublisher:
    return FullTensorPublisher(url, dtype, None, shardckpt.Anchors())


def receive(url: Path, number: int | None = None) -> dict[str, torch.Tensor]:
    return dict(shardckpt.Subscriber(url).stage(number).iter_tensors())


def gather(number: float, reused: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield full tensors as trainers do: collectively, in memory that the next one replaces."""
    for name, value in (("x", number), ("y", number + 0.5)):
        reused.fill_(value)
        if dist.is_initialized():
            dist.all_reduce(reused, op=dist.ReduceOp.MAX)
        yield name, reused


def test_each_version_has_the_cast_tensors(tmp_path: Path) -> None:
    publisher = make(tmp_path)
    for number in (1, 2):
        assert publisher.publish(build(number / 3).items()) == number
        found, expected = receive(tmp_path, number), build(number / 3)
        assert torch.equal(found["a"], expected["a"].bfloat16())
        assert torch.equal(found["b"], expected["b"]) and found["fp8"].dtype == torch.float8_e4m3fn


def test_without_a_wire_dtype_tensors_keep_theirs(tmp_path: Path) -> None:
    make(tmp_path, None).publish(build(0.1).items())
    assert torch.equal(receive(tmp_path)["a"], build(0.1)["a"])


def test_after_a_restart_equal_weights_are_not_published_again(tmp_path: Path) -> None:
    assert make(tmp_path).find_newest() is None
    first = make(tmp_path)
    assert [first.publish(build(number).items()) for number in (1, 2)] == [1, 2]
    again = make(tmp_path)
    assert again.publish(build(2).items()) == 2
    assert again.find_newest() == 2
    assert again.publish(build(3).items()) == 3
    assert make(tmp_path).publish(build(1).items()) == 4, "weights of an older version are a new one"
    assert torch.equal(receive(tmp_path)["a"], build(1)["a"].bfloat16())
    assert make(tmp_path).publish(build(1).items(), 9) == 9, "a caller's number is used"


def test_two_tensors_of_one_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(NameCollisionError, match=r"^x: two tensors have one name"):
        make(tmp_path).publish([("x", torch.ones(1)), ("x", torch.ones(1))])


def test_paths_do_not_depend_on_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert make(Path("stream")).url == str(tmp_path / "stream")


def publish_on_the_first_rank(rank: int, world: int, url: Path) -> int | None:
    """Publish twice on rank 0, then fail there between two gathers; afterwards all ranks still meet."""
    publisher, reused = make(url), torch.empty(2)
    for number in (1, 2, 3):
        tensors = gather(number, reused)
        if rank:
            for _ in tensors:
                pass
        elif number < 3:
            assert publisher.publish(tensors) == number
        else:
            publisher._copy = lambda *_: 1 / 0  # type: ignore[method-assign]
            with pytest.raises(ZeroDivisionError):
                publisher.publish(tensors)
    dist.barrier()
    publisher.close()
    return publisher.find_newest()


def test_other_ranks_gather_alone_and_wait_for_nothing_if_the_first_one_fails(tmp_path: Path) -> None:
    assert run(2, publish_on_the_first_rank, tmp_path) == [2, 2]
    found = receive(tmp_path)
    assert (found["x"].tolist(), found["y"].tolist()) == ([2, 2], [2.5, 2.5])


def test_a_number_that_is_too_large_for_the_dtype_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PrecisionError, match="a: a number is too large for float16"):
        make(tmp_path, "float16").publish(build(1e6).items())
