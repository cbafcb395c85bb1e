"""Measure a weight stream: a version's publication, its bytes, its application, anchors and late joiners.

    python benchmarks/stream.py [--parts codec,versions] [--millions 1100] [--rounds 5] [--record]

**Codec.** 8 million bf16 weights, cast from float32 that Adam-like steps moved, at four learning rates. Bytes a changed
element, beside the field's codec (the XOR of all elements through zstd, level 1) and positions with values.

**Versions.** Tensors of a Llama in bf16, in memory-backed storage, in one process. Between versions 1 % of the elements
change. All ratios are medians over rounds, and both sides are measured in each round:

- publish: from the copy to the commit, relative to reading the old and the new weights once;
- stall: the call of the trainer, relative to a copy of the weights into memory that exists;
- apply: `commit` into the server's tensors, relative to writing the same values at the same places of the tensors and
  of the mirror, after reading the mirror there;
- anchor: all weights of a later version, relative to a save of the same tensors, both into memory that is new;
- first version: from the call to the commit, relative to that save; it also fills the snapshot and digests all weights;
- join: reading an anchor and three versions, relative to reading the anchor.
"""

from __future__ import annotations

import argparse
import datetime
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import TypeVar

import numpy as np
import torch
import zstandard
from numpy.typing import NDArray
from options import add_selection
from results import Lines, machine, record, section_title

import shardckpt
from shardckpt.events import OperationEvent
from shardckpt.stream.format.codec import encode_change, find_changes

PUBLISH_LIMIT, STALL_LIMIT, APPLY_LIMIT, ANCHOR_LIMIT, BYTES_LIMIT = 1.5, 1.1, 1.2, 1.1, 1.4
SHARE = 0.01
PARTS = ("codec", "versions")
Weights = dict[str, torch.Tensor]
T = TypeVar("T")


def timed(work: Callable[[], T]) -> tuple[float, T]:
    """Return the seconds of a call, and its result."""
    start = time.perf_counter()
    result = work()
    return time.perf_counter() - start, result


def encode(old: NDArray[np.uint16], new: NDArray[np.uint16]) -> bytes:
    """Encode what changed."""
    return encode_change(find_changes(old, new)[0])


def compress(old: NDArray[np.uint16], new: NDArray[np.uint16]) -> bytes:
    """Encode as the field does: the XOR of all elements through zstd."""
    return zstandard.ZstdCompressor(level=1).compress((old ^ new).tobytes())


def measure_codec(report: Lines) -> None:
    """Compare the bytes of codecs at four learning rates."""
    report.say()
    report.say("| learning rate | changed | shardckpt | XOR + zstd | positions + values | encode, x zstd |")
    report.say("|---|---|---|---|---|---|")
    generator = torch.Generator().manual_seed(0)
    worst = 0.0
    for rate in (3e-7, 6e-7, 1e-6, 3e-6):
        master = torch.randn(8_000_000, generator=generator) * 0.02
        old = bits(master.to(torch.bfloat16))
        master -= rate * torch.randn(len(master), generator=generator).clamp(-1, 1) * 3
        new = bits(master.to(torch.bfloat16))
        changed = int((old != new).sum())
        ours, encoded = timed(partial(encode, old, new))
        theirs, compressed = timed(partial(compress, old, new))
        sizes = [len(encoded) / changed, len(compressed) / changed]
        worst = max(worst, sizes[0])
        report.say(
            f"| {rate:g} | {changed / len(old):.1%} | {sizes[0]:.2f} | {sizes[1]:.2f} | 6.00 | {ours / theirs:.2f} |"
        )
    report.goal("weight streams", "bytes of a changed element of bf16", worst, BYTES_LIMIT, "bytes")


def bits(tensor: torch.Tensor) -> NDArray[np.uint16]:
    """Return a tensor's elements as unsigned integers."""
    return tensor.view(torch.uint8).numpy().view(np.uint16)


def build_weights(millions: float) -> Weights:
    """Return the tensors of a Llama with so many million elements."""
    layers = max(int(millions / 44), 1)
    shapes = {"q": (2048, 2048), "kv": (512, 2048), "o": (2048, 2048), "up": (11264, 2048), "down": (2048, 5632)}
    named = {f"layers.{n}.{name}": shape for n in range(layers) for name, shape in shapes.items()}
    named |= {f"layers.{n}.norm": (2048,) for n in range(layers)}
    return {name: torch.full(shape, 0.5, dtype=torch.bfloat16) for name, shape in named.items()}


def change(weights: Weights, seed: int) -> None:
    """Change the lowest bit of 1 % of the elements."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in weights.values():
        at = torch.randint(0, tensor.numel(), (max(int(tensor.numel() * SHARE), 1),), generator=generator)
        tensor.view(-1).view(torch.int16)[at] ^= 1


def copy(weights: Weights, into: Weights) -> None:
    """Copy tensors into others."""
    for name, tensor in weights.items():
        into[name].copy_(tensor)


def read_both(old: Weights, new: Weights) -> None:
    """Read two versions once, as fast as NumPy compares them."""
    for name, tensor in new.items():
        np.array_equal(bits(old[name].view(-1)).view(np.uint64), bits(tensor.view(-1)).view(np.uint64))


def measure_versions(report: Lines, millions: float, rounds: int, folder: Path) -> None:
    """Publish and apply versions."""
    weights = build_weights(millions)
    elements = sum(tensor.numel() for tensor in weights.values())
    report.say(f"{elements / 1e6:.0f} million elements in {len(weights)} tensors, {SHARE:.0%} changed a version.")
    old = {name: tensor.clone() for name, tensor in weights.items()}
    save, _ = timed(partial(shardckpt.save, {"model": weights}, folder / "save"))
    shutil.rmtree(folder / "save")
    url = folder / "stream"
    events: list[OperationEvent] = []
    anchors = shardckpt.Anchors(max_chain=rounds, max_bytes=rounds)
    publisher = shardckpt.Publisher(url, anchors=anchors, on_event=events.append)
    first, _ = timed(lambda: publisher.publish(1, weights).result())
    publishes, stalls, sizes = [], [], []
    for version in range(2, rounds + 2):
        change(weights, version)
        copied, _ = timed(partial(copy, weights, old))
        read, _ = timed(partial(read_both, old, weights))
        start = time.perf_counter()
        handle = publisher.publish(version, weights)
        stall = time.perf_counter() - start
        handle.result()
        publishes.append((time.perf_counter() - start - stall) / read)
        stalls.append(stall / copied)
        written = sum(path.stat().st_size for path in url.rglob("*") if path.match(f"*v{version:010d}/delta-*"))
        sizes.append(written / (elements * SHARE))
    del old
    change(weights, rounds + 2)
    again, _ = timed(partial(shardckpt.save, {"model": weights}, folder / "save"))
    shutil.rmtree(folder / "save")
    publisher.publish(rounds + 2, weights).result()
    publisher.close()
    anchor = events[-1].phases["anchor"]
    for path in url.glob(f"*v{rounds + 2:010d}/anchor"):
        shutil.rmtree(path)  # the memory is needed for servers
    applies, joins = receive(url, weights, rounds)
    report.say()
    report.say("| what | ratio | of |")
    report.say("|---|---|---|")
    rows = (
        ("publish a version", median(publishes), PUBLISH_LIMIT, "reading old and new once"),
        ("stall of the trainer", median(stalls[1:] or stalls), STALL_LIMIT, "the copy"),
        ("apply a version", median(applies), APPLY_LIMIT, "writing the same values"),
        ("anchor", anchor / again, ANCHOR_LIMIT, "a save"),
        ("join late, three versions after an anchor", median(joins), 2.0, "reading the anchor"),
    )
    for what, ratio, limit, unit in rows:
        report.say(f"| {what} | {ratio:.2f} | {unit} |")
        report.goal("weight streams", what, ratio, limit, f"x {unit}")
    report.say(f"| first version | {first / save:.2f} | a save |")
    report.say(f"{median(sizes):.2f} bytes a changed element, with headers.")


def receive(url: Path, weights: Weights, rounds: int) -> tuple[list[float], list[float]]:
    """Return the ratios of applying each version, and of joining late."""
    server = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    plain = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    mirror = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    subscriber = shardckpt.Subscriber(url)
    subscriber.stage(1).commit(server)
    copy(server, mirror)
    copy(server, plain)
    applies = []
    for version in range(2, rounds + 3):
        staged = subscriber.stage(version)
        places = [(each.name, each.indices) for each in staged.iter_changes()]

        def write(places: list[tuple[str, torch.Tensor]] = places) -> None:
            for name, at in places:
                kept = mirror[name].view(-1).view(torch.int16)
                new = kept[at] ^ 1
                plain[name].view(-1).view(torch.int16)[at] = new
                kept[at] = new

        bare, _ = timed(write)
        applied, _ = timed(partial(staged.commit, server))
        applies.append(applied / bare)
    if not all(torch.equal(server[name], tensor) for name, tensor in weights.items()):
        raise SystemExit("the server has other weights than the trainer")
    joins = []
    for _ in range(min(rounds, 3)):
        alone, late = shardckpt.Subscriber(url), shardckpt.Subscriber(url)
        anchor, _ = timed(partial(alone.stage, 1))
        alone.close()
        joined, _ = timed(partial(late.stage, min(4, rounds + 1)))
        joins.append(joined / anchor)
        late.close()
    return applies, joins


def main() -> None:
    """Run the parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_selection(parser, "--parts", PARTS)
    parser.add_argument("--millions", type=float, default=1100, help="million elements of the model")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"), help="memory-backed storage")
    parser.add_argument("--record", action="store_true", help="write the section of RESULTS.md")
    arguments = parser.parse_args()
    report = Lines()
    today = datetime.datetime.now(tz=datetime.timezone.utc).date()
    report.say(f"{today}, {machine()}, torch {torch.__version__}, load {os.getloadavg()[0]:.1f}.")
    folder = Path(tempfile.mkdtemp(dir=arguments.folder))
    try:
        if "codec" in arguments.parts:
            measure_codec(report)
        if "versions" in arguments.parts:
            measure_versions(report, arguments.millions, arguments.rounds, folder)
    finally:
        shutil.rmtree(folder)
    if arguments.record:
        record(section_title("Weight stream", arguments.parts, PARTS), report.lines, report.goals)
    for line in report.failed:
        print(f"FAILED: {line}", file=sys.stderr)
    sys.exit(bool(report.failed))


if __name__ == "__main__":
    main()
