"""Count the files and functions that a call enters, and the sizes of classes and folders.

    python benchmarks/structure.py [--record]

A profile hook traces each call, with a small model, its AdamW and a world size of one. It counts the distinct files and
functions of the package, and the moves from one file to another. torch's DCP and `fully_shard` are traced in the same
way. The other rows are counted in the sources.
"""

from __future__ import annotations

import argparse
import ast
import runpy
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist
from results import machine, record
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.fsdp import fully_shard as torch_fully_shard

import shardckpt
from shardckpt.core import fully_shard

ROOT = Path(__file__).resolve().parents[1]
OURS = str(Path(shardckpt.__file__).parent)
TORCH_DCP = str(Path(dcp.__file__).parent)
TORCH_FSDP = str(Path(torch.distributed.__file__).parent / "fsdp")
TITLE = "Structure"
LARGE_CLASS_LINES = 300
LARGE_CLASS_METHODS = 25


@dataclass(frozen=True)
class Trace:
    """The trace of a call in a package: distinct files and functions, and moves between files."""

    files: int
    functions: int
    moves: int


def trace(call: Callable[[], object], package: str) -> Trace:
    """Run a call and count the functions of a package that it enters, on all threads."""
    seen: set[tuple[str, str, int]] = set()
    moves, last = 0, ""

    def enter(frame: FrameType, event: str, _: object) -> None:
        nonlocal moves, last
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(package):
            seen.add(
                (file, frame.f_code.co_qualname if sys.version_info >= (3, 11) else "", frame.f_code.co_firstlineno)
            )
            moves, last = moves + (file != last), file

    threading.setprofile(enter)
    sys.setprofile(enter)
    try:
        call()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return Trace(len({file for file, _, _ in seen}), len(seen), moves)


def make_model() -> nn.Module:
    """Return a model of three layers; the middle one becomes an FSDP unit of its own."""
    return nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.ReLU()), nn.Linear(8, 4))


def trace_calls(folder: Path) -> list[tuple[str, Trace]]:
    """Trace saves, loads and one iteration of shardckpt and of torch, each after a warm-up."""
    rows = []
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    state = {"model": model, "optimizer": optimizer, "step": 3}
    shardckpt.save(state, folder / "warm")
    shardckpt.load(state, folder / "warm")
    shardckpt.consolidate(folder / "warm", folder / "warm_full")
    rows.append(("save(state, path)", trace(lambda: shardckpt.save(state, folder / "native"), OURS)))
    rows.append(("load(state, path)", trace(lambda: shardckpt.load(state, folder / "native"), OURS)))
    rows.append(("load(path)", trace(lambda: shardckpt.load(folder / "native"), OURS)))
    rows.append(("consolidate(native)", trace(lambda: shardckpt.consolidate(folder / "native", folder / "a"), OURS)))
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 3}
    dcp.save(state, checkpoint_id=folder / "warm_dcp")
    shardckpt.consolidate(folder / "warm_dcp", folder / "warm_dcp_full")
    rows.append(("DCP save", trace(lambda: dcp.save(state, checkpoint_id=folder / "dcp"), TORCH_DCP)))
    rows.append(("DCP load", trace(lambda: dcp.load(state, checkpoint_id=folder / "dcp"), TORCH_DCP)))
    rows.append(("consolidate(dcp)", trace(lambda: shardckpt.consolidate(folder / "dcp", folder / "b"), OURS)))
    for title, shard, package in [("", fully_shard, OURS), ("torch ", torch_fully_shard, TORCH_FSDP)]:
        forward, backward = trace_iteration(shard, package)
        rows += [(f"{title}fully_shard forward", forward), (f"{title}fully_shard backward", backward)]
    return rows


def trace_iteration(shard: Callable[[nn.Module], object], package: str) -> tuple[Trace, Trace]:
    """Trace a forward and a backward of two units, after a warm-up."""
    model = make_model()
    shard(model[1])
    shard(model)
    data = torch.ones(2, 8)
    model(data).sum().backward()
    losses: list[torch.Tensor] = []
    forward = trace(lambda: losses.append(model(data).sum()), package)
    return forward, trace(losses[0].backward, package)


def measure_classes(folder: Path = Path(OURS)) -> list[tuple[int, int, str]]:
    """Return lines, methods and name of each class below a folder, the longest first."""
    sizes = []
    for path in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                methods = sum(isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef) for item in node.body)
                sizes.append(((node.end_lineno or node.lineno) - node.lineno + 1, methods, node.name))
    return sorted(sizes, reverse=True)


def count_sources() -> list[str]:
    """Return table rows about names, folders, classes and lines."""
    vocabulary = runpy.run_path(str(ROOT / "tests" / "test_vocabulary.py"))
    texts = vocabulary["read_sources"]()
    folders = Counter(str(Path(path).parent) for path in texts if Path(path).stem != "__init__")
    limited = {name: number for name, number in folders.items() if "storage" not in name and "cli" not in name}
    folder, modules = max(limited.items(), key=lambda entry: entry[1])
    sizes = measure_classes()
    large = [size for size in sizes if size[0] > LARGE_CLASS_LINES or size[1] > LARGE_CLASS_METHODS]
    return [
        f"| names of classes that several modules define | {len(vocabulary['count_classes_twice'](texts))} |",
        f"| names of modules that several packages have | {len(vocabulary['count_modules_twice'](texts))} |",
        f"| modules in the fullest folder | {modules} ({folder}) |",
        f"| lines of source, the command included | {sum(text.count(chr(10)) for text in texts.values()):,} |",
        f"| modules | {len(texts)} |",
        f"| classes over {LARGE_CLASS_LINES} lines or {LARGE_CLASS_METHODS} methods | {len(large)} |",
        *(f"| ... {name} | {lines} lines, {methods} methods |" for lines, methods, name in large),
    ]


def main() -> None:
    """Trace, count and print; with `--record`, write the section of RESULTS.md."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--record", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        traces = trace_calls(Path(folder))
        dist.destroy_process_group()
    lines = ["| call | files | functions | moves between files |", "|---|---|---|---|"]
    lines += [f"| {name} | {counts.files} | {counts.functions} | {counts.moves} |" for name, counts in traces]
    lines += ["", "| of the sources | |", "|---|---|", *count_sources()]
    print("\n".join(lines))
    if options.record:
        record(TITLE, [machine(), "", *lines])


if __name__ == "__main__":
    main()
