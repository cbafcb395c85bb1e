"""The table of formats and verbs in docs/formats.md is what happens: every verb is tried on every format.

`UPDATE_DOCS=1 pytest tests/readers/test_format_table.py` writes the tables into the page, where they differ.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardckpt
from shardckpt.errors import ShardckptError
from shardckpt.offline.targets import target_registry
from shardckpt.reader import Format
from shardckpt.readers.registry import BUILT_IN, detect, open_checkpoint, open_source
from tests.kit.writers.samples import MODEL, OPTIM, SAMPLES
from tests.kit.writers.torch_writers import FORMS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "formats.md"
FORMATS = tuple(each.load() for each in BUILT_IN)
TARGETS = [name for name in target_registry.BUILT_IN if name not in ("gguf", "vllm-sharded")]
"""Targets of any model; the others know architectures by their config."""

RESHARD_TARGETS = [target.name for target in target_registry.load_targets() if target.plan_ranks]
START, END = "<!-- tables: tests/readers/test_format_table.py -->\n", "<!-- end of tables -->\n"
CHECKSUMS = {"crc32": "CRC-32", "xxh3-64": "XXH3-64", "xxh3-128": "XXH3-128 or Adler-32"} | {
    "digest of a tensor": "SHA-256, digests of tensors"
}
NO = "no"
VERBS = ("inspect", "diff", "verify", "consolidate, convert", "rekey", "reshard", "load(state, path)", "written by")


@dataclass(frozen=True)
class Example:
    """A checkpoint of a format.

    Attributes:
        variant: Which of the format's forms it has.
        path: Where it lies.
        made_by: What wrote it, where that is one of our verbs.
    """

    variant: str
    path: Path
    made_by: str = ""

    @property
    def has_optimizer(self) -> bool:
        return bool(shardckpt.inspect(self.path).parts.get("optimizer"))


class Trial:
    """Tries verbs on examples of every format, in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.count = folder, 0
        self.examples: dict[str, list[Example]] = {form.name: [] for form in FORMATS}
        for name, variants in SAMPLES.items():
            for variant, build in variants.items():
                self.examples[name].append(Example(variant, build(self.fresh()), "`Publisher`" * (name == "stream")))
        for each in self.written():
            self.examples[detect(open_source(str(each.path))).name].append(each)

    def fresh(self) -> Path:
        self.count += 1
        return self.folder / str(self.count)

    def written(self) -> Iterator[Example]:
        """Yield what our own verbs and `save` write, each of the same source."""
        source = self.examples["dcp"][0].path
        for to in TARGETS:
            shardckpt.consolidate(source, path := self.fresh(), to=to, part="all", allow_loss=True)
            yield Example("written", path, f"`--to {to}`")
        self.fresh().mkdir()
        for suffix in ("pt", "safetensors"):
            shardckpt.consolidate(source, path := self.folder / str(self.count) / f"one.{suffix}", allow_loss=True)
            yield Example("written", path, f"`consolidate SRC x.{suffix}`")
        for to in RESHARD_TARGETS:
            shardckpt.reshard(source, path := self.fresh(), world_size=2, to=to, allow_loss=True)
            yield Example("written", path, f"`reshard --to {to}`")
        shardckpt.save({"model": MODEL, "optimizer": OPTIM}, path := self.fresh())
        yield Example("written", path, "`save`")

    def row(self, form: Format) -> list[str]:
        """Return what each verb does with a format, as the table says it."""
        examples = self.examples[form.name]
        with_state = [each for each in examples if each.has_optimizer]
        return [
            self.all_do(examples, lambda src: len(shardckpt.inspect(src).tensors) >= len(MODEL)),
            self.all_do(examples, lambda src: shardckpt.diff(src, self.as_step(src)).same),
            self.verified(examples),
            self.targets(TARGETS, examples, with_state),
            self.all_do(with_state, self.rekeys),
            self.targets_of_reshard(examples),
            self.all_do(examples, holds_model),
            ", ".join(dict.fromkeys(each.made_by for each in examples if each.made_by)) or "",
        ]

    def all_do(self, examples: Sequence[Example], verb: Callable[[Path], bool]) -> str:
        """Tell whether there are examples and a verb does all of them."""
        return "yes" if examples and all(succeeds(verb, each.path) for each in examples) else NO

    def as_step(self, src: Path) -> Path:
        shardckpt.reshard(src, made := self.fresh(), world_size=1, allow_loss=True)
        return made

    def targets(self, names: Sequence[str], examples: Sequence[Example], with_state: Sequence[Example]) -> str:
        """Return the formats of `consolidate` that hold afterwards what the source held."""

        def writes(src: Path, to: str) -> bool:
            shardckpt.consolidate(src, made := self.fresh(), to=to, part="all", allow_loss=True)
            return holds_model(made)

        able = []
        for to in names:
            sources = with_state if to == "deepspeed-universal" else examples
            if self.all_do(sources, lambda src, to=to: writes(src, to)) == "yes":
                able.append(to)
        return "all" if able == list(names) else ", ".join(able) or NO

    def targets_of_reshard(self, examples: Sequence[Example]) -> str:
        def writes(src: Path, to: str) -> bool:
            shardckpt.reshard(src, made := self.fresh(), world_size=2, to=to, allow_loss=True)
            return shardckpt.diff(src, made).same

        able = [to for to in RESHARD_TARGETS if self.all_do(examples, lambda src, to=to: writes(src, to)) == "yes"]
        return "all" if able == list(RESHARD_TARGETS) else ", ".join(able) or NO

    def rekeys(self, src: Path) -> bool:
        shardckpt.rekey(src, made := self.fresh(), to="ids", allow_loss=True)
        return any(name.startswith("optimizer.state.0.") for name in names_of(made))

    def verified(self, examples: Sequence[Example]) -> str:
        """Return the checksums that `verify` compares, each seen to catch a flipped bit; and forms that store none."""
        found: dict[str, list[str]] = {}
        for each in examples:
            if not shardckpt.verify(each.path).ok:
                return NO
            first = next(open_checkpoint(str(each.path)).checksums(), None)
            if first is not None:
                file, offset = (each.path if each.path.is_dir() else each.path.parent) / first.file, first.offset
                if not file.exists():  # a version of a stream is made from files of changes
                    [file] = each.path.glob("*.safetensors")
                    offset = file.stat().st_size - 1
                assert flipped_bit_is_seen(file, offset, each.path), f"{each.path}: {first}"
            found.setdefault(CHECKSUMS[first.algorithm] if first else "", []).append(each.variant)
        bare = [variant for variant in dict.fromkeys(found.pop("", [])) if variant != "written" or not found]
        if not found:
            return "sizes, coverage"
        return ", ".join(found) + (f"; {', '.join(bare)}: sizes, coverage" if bare else "")


def succeeds(verb: Callable[[Path], bool], src: Path) -> bool:
    try:
        return verb(src)
    except ShardckptError:
        return False


def names_of(path: Path) -> list[str]:
    return [tensor.name for tensor in shardckpt.inspect(path).tensors]


class Net(nn.Module):
    """A model with the names of the samples; one of them is a method of every module, and left out."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Module()
        self.a.w = nn.Parameter(torch.zeros_like(MODEL["a.w"]))
        for name, value in MODEL.items():
            if name != "a.w" and not hasattr(self, name):
                self.register_buffer(name, torch.zeros_like(value))


def holds_model(path: Path) -> bool:
    """Tell whether a model can be loaded, with the values of the samples."""
    net = Net()
    is_bare = "a.w" in names_of(path)  # a step is loaded as it was saved; elsewhere a model is found wherever it lies
    shardckpt.load(net if is_bare else {"model": net}, path, strict=False)
    return all(torch.equal(value, MODEL[name]) for name, value in net.state_dict().items())


def flipped_bit_is_seen(file: Path, offset: int, src: Path) -> bool:
    good = file.read_bytes()
    file.write_bytes(good[:offset] + bytes([good[offset] ^ 1]) + good[offset + 1 :])
    try:
        return not shardckpt.verify(src).ok
    finally:
        file.write_bytes(good)


def names_shown(form: Format, examples: Sequence[Example]) -> str:
    """Return what `inspect` calls checkpoints of a format."""
    found = dict.fromkeys(open_checkpoint(str(each.path)).manifest.format for each in examples)
    return ", ".join(f"`{name}`" for name in sorted(found, key=lambda name: (name != form.name, name)))


def plain(text: str) -> str:
    """Return text with nothing in it that Markdown takes for markup, but for code."""
    return text.replace("<", "&lt;").replace("*", "\\*")


def tables(trial: Trial, rows: Mapping[str, Sequence[str]]) -> str:
    """Return both tables in Markdown."""
    lines = ["| name | what | recognized by |", "|---|---|---|"]
    lines += [f"| {names_shown(f, trial.examples[f.name])} | {f.title} | {plain(f.looks_for)} |" for f in FORMATS]
    lines += ["", f"| format | {' | '.join(f'`{verb}`' if verb != VERBS[-1] else verb for verb in VERBS)} |"]
    lines += ["|---" * (len(VERBS) + 1) + "|"]
    lines += [f"| `{name}` | {' | '.join(row)} |" for name, row in rows.items()]
    return "\n".join(lines) + "\n"


@pytest.fixture(scope="module")
def tried(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Trial, dict[str, list[str]]]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda fd: None)
        trial = Trial(tmp_path_factory.mktemp("table"))
        yield trial, {form.name: trial.row(form) for form in FORMATS}


def test_every_verb_does_every_format(tried: tuple[Any, dict[str, list[str]]]) -> None:
    lacking = [f"{name}: {VERBS[n]}" for name, row in tried[1].items() for n, cell in enumerate(row) if cell == NO]
    assert lacking == ["stream: rekey", "hf-delta: rekey"], "a stream has no optimizer"


@pytest.mark.skipif("zstd" not in FORMS, reason="this torch does not write the page's zstd")
def test_the_page_says_what_was_tried(tried: tuple[Trial, dict[str, list[str]]]) -> None:
    made, text = tables(*tried), PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(START)
    shown, _, after = rest.partition(END)
    if shown != made and os.environ.get("UPDATE_DOCS"):
        PAGE.write_text(before + START + made + END + after, encoding="utf-8")
    assert shown == made


def test_a_verb_that_fails_is_no_yes(tried: tuple[Trial, Any]) -> None:
    """The trial can fail: a source that is damaged, or values that differ."""
    trial, _ = tried
    other = trial.fresh()
    other.mkdir()
    torch.save({"model": {**MODEL, "a.w": MODEL["a.w"] + 1}}, other / "a.pt")
    assert trial.all_do([Example("other", other / "a.pt")], holds_model) == NO
    assert trial.all_do([Example("gone", other / "b.pt")], holds_model) == NO
    assert trial.targets_of_reshard([Example("gone", other / "b.pt")]) == NO
    assert trial.all_do([], holds_model) == NO
