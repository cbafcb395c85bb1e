"""Results show themselves: a few lines as text, a page or tables in a notebook, whatever names they have."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import nbformat
import pytest
import torch
from nbclient import NotebookClient
from safetensors.torch import save_file

import shardckpt
from shardckpt import results
from shardckpt.boxes import full_box
from shardckpt.manifest import Manifest, Piece, Span, TensorEntry
from shardckpt.notebook import Result
from shardckpt.offline.inspect import describe_manifest
from shardckpt.results import (
    Comparison,
    History,
    Inspection,
    Problem,
    StepInfo,
    StepList,
    StepStats,
    TensorStats,
    Verification,
)
from tests.kit.runs.browser import Page

HOSTILE = "</pre></iframe><script>document.title='owned'</script>\n\x1b[31m\u202e\"&quot;"

VERBS = (shardckpt.diff, shardckpt.history, shardckpt.inspect)
"""A result has a page as soon as the function that returns it is loaded."""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    save_file({"layers.0.w": torch.ones(2, 3), "layers.1.w": torch.ones(4)}, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def build_inspection(count: int) -> Inspection:
    tensors = {
        ("layers", str(at), "weight"): TensorEntry(
            ("layers", str(at), "weight"), (4,), "float32", (Piece(full_box((4,)), "f", Span(16 * at, 16)),)
        )
        for at in range(count)
    }
    return describe_manifest("big", Manifest("test", {"f": 16 * count}, tensors))


def build_history(tensors: int, steps: int) -> History:
    def measure(at: int, step: int) -> TensorStats:
        numbers = (math.sin((at + 1) * (step + 1) * each) for each in range(1, 5))
        return TensorStats(f"layers.{at}.w", "float32", (4,), 0, 0, 0, *numbers)

    found = [tuple(measure(at, step) for at in range(tensors)) for step in range(steps)]
    return History("run", tuple(StepStats(at, f"run/{at}", each) for at, each in enumerate(found)))


def test_one_class_shows_every_result_that_has_lists() -> None:
    found = [getattr(results, name) for name in results.__all__]
    lists = [
        each
        for each in found
        if dataclasses.is_dataclass(each)
        and any(str(field.type).startswith(("tuple[", "Mapping[")) for field in dataclasses.fields(each))
    ]
    rows = {"Divergence", "Problem", "Resume", "StepCopy", "StepInfo", "TensorDifference", "TensorStats"}
    assert {each.__name__ for each in lists if not issubclass(each, Result)} <= rows
    assert {Comparison, Inspection, Verification, History} <= set(lists)
    assert {each.__repr__ for each in lists if issubclass(each, Result)} == {Result.__repr__}


def test_text_has_a_line_for_each_list_and_says_how_long_it_is() -> None:
    lines = repr(build_inspection(100_000)).splitlines()
    assert lines[0] == "Inspection(source='big', format='test')"
    at = next(at for at, line in enumerate(lines) if line.startswith("  tensors (100,000): "))
    assert "TensorInfo(name='layers.0.weight', dtype='float32', shape=(4,)," in lines[at]
    assert len(lines) == 12
    assert [line.endswith(", ...") for line in lines].count(True) == 2, "of tensors and parts"


def test_text_has_up_to_12_lines_of_steps() -> None:
    steps = tuple(StepInfo(at, f"run/step-{at}", 1, None) for at in range(20))
    assert [line.split(",")[0] for line in repr(StepList("run", steps[:3], steps[:1])).splitlines()] == [
        "StepList(root='run')",
        "  complete (3): StepInfo(number=0",
        "    StepInfo(number=1",
        "    StepInfo(number=2",
        "  incomplete (1): StepInfo(number=0",
    ]
    lines = repr(StepList("run", steps, steps)).splitlines()
    assert len(lines) == 12
    assert lines[10].endswith(", ...")
    assert lines[11].startswith("  incomplete (20): StepInfo(number=0")


def list_examples() -> Iterator[Result]:
    problem = Problem("gap", HOSTILE, (HOSTILE,) * 50)
    yield Verification(HOSTILE, HOSTILE, 1, 0, (problem,) * 1000, (HOSTILE,) * 1000)
    yield Comparison(HOSTILE, HOSTILE, 0, 0, (), (HOSTILE,), left_out=(HOSTILE,) * 1000)
    yield History(HOSTILE, (StepStats(1, HOSTILE, ()),) * 3, (HOSTILE,))
    yield Inspection(HOSTILE, HOSTILE, (), (), {HOSTILE: HOSTILE}, {}, {HOSTILE: HOSTILE}, {}, (HOSTILE,))


@pytest.mark.parametrize("found", tuple(list_examples()), ids=lambda found: type(found).__name__)
def test_hostile_names_make_neither_lines_nor_elements(found: Result) -> None:
    text = repr(found)
    assert len(text.splitlines()) <= 12
    assert max(map(len, text.splitlines())) <= 160
    assert text.replace("\n", "").isprintable()
    shown = found._repr_html_()
    assert len(shown) < 1_000_000
    tags = list_tags(shown)
    assert tags <= {"pre", "iframe", "details", "summary", "div", "table", "thead", "tbody", "tr", "th", "td", "p"}


def list_tags(text: str) -> set[str]:
    found: set[str] = set()
    parser = HTMLParser()
    parser.handle_starttag = lambda tag, attrs: found.add(tag)  # type: ignore[method-assign]
    parser.feed(text)
    return found


def test_a_table_has_the_first_rows_and_counts_the_others() -> None:
    found = Verification("src", "dcp", 1, 0, tuple(Problem("gap", f"gap {at}") for at in range(150)), ())
    shown = found._repr_html_()
    assert shown.count("<tr>") == 1 + 100
    assert "<p>50 more</p>" in shown
    assert re.findall(r"<th>([^<]*)</th>", shown) == ["kind", "message"], "columns without values are left out"


def test_a_page_of_a_hundred_thousand_tensors_is_below_a_megabyte() -> None:
    shown = build_inspection(100_000)._repr_html_()
    assert "<iframe" in shown
    assert len(shown) < 1_000_000


def test_a_page_above_a_megabyte_becomes_tables_with_a_note() -> None:
    shown = build_history(1000, 100)._repr_html_()
    assert "<iframe" not in shown
    assert "write it with <code>html=</code>" in shown
    assert len(shown) < 1_000_000


def test_a_notebook_stores_the_page_and_the_text(source: Path) -> None:
    inspect = f"import shardckpt\nshardckpt.inspect({str(source)!r})"
    compare = f"shardckpt.diff({str(source)!r}, {str(source)!r}, on_progress=show).same"
    progress = f"with shardckpt.events.show_progress() as show:\n    {compare}"
    notebook = nbformat.v4.new_notebook(cells=[*map(nbformat.v4.new_code_cell, (inspect, progress))])
    NotebookClient(notebook, timeout=60, kernel_name="python3").execute()
    [output] = notebook.cells[0].outputs
    assert notebook.cells[1].outputs, "progress is shown, or what it needs is named"
    assert output.data["text/plain"] == repr(shardckpt.inspect(source))
    assert output.data["text/html"] == shardckpt.inspect(source)._repr_html_()


def open_cell(page: Page, found: Result, folder: Path) -> None:
    """Open a page that has the result of a cell, as notebooks show it."""
    ready = "<script>document.documentElement.dataset.ready = 1; document.title = 'notebook'</script>"
    (folder / "cell.html").write_text(f"<!doctype html><html lang=en><body>{found._repr_html_()}{ready}")
    page.errors.clear()
    page.requests.clear()
    page.open((folder / "cell.html").as_uri())


def test_a_frame_draws_the_page_and_its_rows_can_be_chosen(page: Page, source: Path, tmp_path: Path) -> None:
    open_cell(page, shardckpt.inspect(source), tmp_path)
    with page.inside_frame():
        page.run("document.querySelector('.grid [role=rowgroup] .row').click()")
        assert page.run("document.querySelector('.detail h3').textContent") == "layers.0.w"
        assert page.run("document.getElementById('map')") is None, "a result does not know the bytes"
        reach = "(() => { try { return parent.document.title; } catch { return 'refused'; } })()"
        assert page.run(reach) == "refused"
        assert page.errors == []
    assert [url for url in page.requests if not url.startswith(("file:", "about:"))] == []


@pytest.mark.parametrize("found", tuple(list_examples()), ids=lambda found: type(found).__name__)
def test_hostile_names_stay_text_in_a_notebook(found: Result, page: Page, tmp_path: Path) -> None:
    open_cell(page, found, tmp_path)
    assert page.run("document.title") == "notebook"
    assert page.run("document.scripts.length") == 1
