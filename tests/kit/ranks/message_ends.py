"""For tests: a rank that ends in the middle of a tensor that it sends or receives, and what the others do then."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from shardckpt.errors import RankError
from shardckpt.ranks.torch_link import TorchLink
from tests.kit.ranks import harness

WORLD = 3
LIMIT_S = 4.0
"""Seconds that ranks wait for each other; two are too few on a busy machine."""
TIMEOUT = 40.0
"""Seconds after which a rank waits for ever: for several limits in a row, and a process that ends."""

ENDS = pytest.mark.parametrize(
    "how",
    [pytest.param(signal.SIGKILL, id="killed"), pytest.param(signal.SIGSTOP, id="stopped", marks=pytest.mark.full)],
)
SIDES = pytest.mark.parametrize("side", ["start_send", "start_recv"])
VICTIMS = pytest.mark.parametrize("victim", [0, 1])


def end_in_message(folder: Path, side: str, how: signal.Signals, least: int) -> None:
    """End this process when it has begun to send or receive a tensor.

    Args:
        folder: Where the others find its pid.
        side: Method of the link.
        how: Signal that ends or stops it.
        least: Bytes of the tensor, which the system does not take at once.
    """
    start = getattr(TorchLink, side)

    def start_and_end(link: TorchLink, tensor: torch.Tensor, peer: int) -> object:
        work = start(link, tensor, peer)
        if tensor.numel() >= least:
            with contextlib.suppress(FileExistsError), (folder / "ended").open("x") as file:  # another thread may, too
                file.write(str(os.getpid()))
                file.close()
                os.kill(os.getpid(), how)
        return work

    setattr(TorchLink, side, start_and_end)


def find_named_ranks(call: Callable[[], object], following: Callable[[], object]) -> set[int]:
    """Return the ranks that the RankError of a call names; the call after it must raise one, too.

    An error names one, or all that have not come to a call in time: some of them may have heard of the lost one later.
    """
    with pytest.raises(RankError) as caught:
        call()
    with pytest.raises(RankError):
        following()
    lost = re.match(r"rank \d+(, rank \d+)* of ", caught.value.what)
    return set(map(int, re.findall(r"rank (\d+)", lost[0] if lost else "")))


def end_process() -> None:
    """Do what Python does when the process ends: wait for threads. The group of the ranks goes before."""
    dist.destroy_process_group()
    threading._shutdown()


def survive(body: Callable[[int, int], object], folder: Path, victim: int, monkeypatch: pytest.MonkeyPatch) -> list:
    """Run ranks of which one ends; return what the others returned. Each of them ends its process, too."""
    monkeypatch.setattr(harness, "GRACE", TIMEOUT)

    def live(rank: int, world: int) -> object:
        found = body(rank, world)
        end_process()
        (folder / f"over.{rank}").touch()
        if all((folder / f"over.{each}").exists() for each in range(world) if each != victim):
            with contextlib.suppress(ProcessLookupError):
                os.kill(int((folder / "ended").read_text()), signal.SIGKILL)  # if it is only stopped
        return found

    found = harness.outcomes(WORLD, live, group_timeout=LIMIT_S, timeout=TIMEOUT)
    left = [each for each in found if each.rank != victim]
    told = [each.raised.trace if each.raised else each.waits for each in left]
    assert told == [None, None], "\n".join(map(str, told))
    assert (folder / "ended").exists(), "the rank has not ended in a message"
    return [each.value for each in left]
