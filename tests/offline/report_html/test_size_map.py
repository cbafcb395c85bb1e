"""The sizes by name: names that fit at every depth, groups of neighbors, the filter, and the panel beside them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

from shardckpt.boxes import full_box
from shardckpt.manifest import Manifest, Piece, Span, TensorEntry
from shardckpt.offline.inspect import describe_checkpoint, describe_manifest
from shardckpt.offline.report_html import render_page, write_page
from tests.kit.runs.browser import Page

HOSTILE = "</script><script>document.title='owned'</script>"
SLOTS = ("exp_avg", "exp_avg_sq")
LAYERS = [
    ("model", "layers", str(at), name, "weight")
    for at in range(4)
    for name in ("self_attn.q_proj", "mlp.up_proj", "input_layernorm", "post_attention_layernorm")
]


def show(page: Page, paths: Iterable[Sequence[str]], folder: Path, size: int = 4) -> int:
    """Open the page of a checkpoint with tensors of `size` rows, and return its length."""
    tensors = {
        tuple(path): TensorEntry(
            tuple(path), (size, 4), "float32", (Piece(full_box((size, 4)), f"{at % 8}.bin", Span(at * 64, size * 16)),)
        )
        for at, path in enumerate(paths)
    }
    manifest = Manifest("test", {f"{at}.bin": 6_400_000 for at in range(8)}, tensors)
    text = render_page("big", describe_checkpoint(manifest, describe_manifest("big", manifest)))
    write_page(text, str(folder / "big.html"))
    page.errors.clear()
    page.open((folder / "big.html").as_uri())
    wait_for_frame(page)
    return len(text)


def wait_for_frame(page: Page) -> None:
    page.run("new Promise((done) => requestAnimationFrame(() => setTimeout(done)))")


def list_names(page: Page, boxes: str = ".tree > .box") -> list[str]:
    return page.run(f"[...document.querySelectorAll({boxes!r})].map((box) => box.querySelector('.name')?.textContent)")


def find_clipped(page: Page) -> list[str]:
    """Return the names that end outside their box, or lose letters without a sign of it."""
    ends = "name.lastChild.getBoundingClientRect().right > name.closest('.box').getBoundingClientRect().right"
    hides = "name.firstChild.scrollWidth > name.firstChild.clientWidth && name.firstChild.clientWidth < 10"
    clipped = f"(name) => {ends} || ({hides})"
    return page.run(f"[...document.querySelectorAll('.tree .name')].filter({clipped}).map((name) => name.textContent)")


@pytest.mark.parametrize("width", [1280, 390])
def test_boxes_have_names_that_fit_at_every_depth(width: int, page: Page, tmp_path: Path) -> None:
    page.show_as(width=width)
    show(page, LAYERS, tmp_path)
    assert {"0", "1", "2", "3"} <= {*list_names(page)}
    if width == 1280:
        assert "self_attn.q_proj.weight" in list_names(page, ".tree .box .box")
    assert find_clipped(page) == []
    page.show_as()


def test_a_short_box_keeps_the_end_of_a_name(page: Page, tmp_path: Path) -> None:
    show(page, [("optim", f"layers.{at}", slot) for at in range(24) for slot in SLOTS], tmp_path)
    ends = page.run("[...document.querySelectorAll('.tree .box .box .name')].map((name) => name.lastChild.textContent)")
    assert {*ends} == {"_avg", "vg_sq"}, "the middle is left out, not the end"


def test_a_hundred_thousand_tensors_open_and_scroll(page: Page, tmp_path: Path) -> None:
    paths = [("model", f"layers.{at // 50}.block.{at % 50}.weight") for at in range(100_000)]
    assert show(page, paths, tmp_path) < 3_000_000
    assert "0 \u2013 49" in list_names(page), "2,000 layers have no room, so neighbors share a box"
    page.run("document.querySelector('.grid').focus()")
    page.press("End", "Enter")
    assert page.run("document.querySelector('.detail h3').textContent") == "model.layers.1999.block.49.weight"
    assert page.run("document.querySelectorAll('.row').length") < 60
    assert page.run("document.querySelectorAll('*').length") < 12_000


def test_a_hundred_thousand_children_open_by_keys_down_to_one(page: Page, tmp_path: Path) -> None:
    began = time.monotonic()
    show(page, [("model", f"t{at}") for at in range(100_000)], tmp_path)
    page.run("document.querySelector('.tree > .box').focus()")
    shown = []
    for _ in range(3):
        shown.append(list_names(page)[0])
        page.press("Enter")
    assert shown == ["t0 \u2013 t2499", "t0 \u2013 t62", "t0"]
    assert page.run("document.querySelector('.detail h3').textContent") == "model.t0"
    page.press("Escape")
    assert list_names(page)[0] == "t0 \u2013 t62"
    assert time.monotonic() - began < 30
    assert find_clipped(page) == []


def test_a_small_box_beside_a_large_one_keeps_its_own_box(page: Page, tmp_path: Path) -> None:
    show(page, [*LAYERS, ("trainer", "step")], tmp_path)
    labels = page.run("[...document.querySelectorAll('.tree > .box')].map((box) => box.getAttribute('aria-label'))")
    assert [label.split(":")[0] for label in labels] == ["model.layers", "trainer.step"]


@pytest.mark.parametrize(("pattern", "expected"), [("Q_PROJ", 4), ("*.up_proj.*", 4), ("q_proj", 4), ("q_proj*", 0)])
def test_the_filter_takes_a_part_of_a_name_or_a_glob(pattern: str, expected: int, page: Page, tmp_path: Path) -> None:
    show(page, LAYERS, tmp_path)
    page.run("document.querySelector('input[type=search]').focus()")
    page.press(*pattern)
    assert page.run("document.querySelectorAll('.grid [role=rowgroup] .row').length") == expected
    assert page.run("document.querySelector('.crumbs .soft').textContent").endswith(f"{expected} tensors")


def test_the_panel_shows_what_was_opened_or_chosen_last(page: Page, tmp_path: Path) -> None:
    show(page, LAYERS, tmp_path)
    title = "document.querySelector('.detail h3').textContent"
    assert page.run(title) == "model.layers"
    page.run("document.querySelector('.tree > .box').click()")
    assert page.run(title) == "model.layers.0"
    page.run("document.querySelector('.tree > .box').click()")
    assert page.run(title) == "model.layers.0.self_attn.q_proj.weight"
    assert page.run("document.querySelectorAll('.box.chosen').length") == 1


def test_a_tensor_whose_name_begins_others_has_a_box(page: Page, tmp_path: Path) -> None:
    show(page, [("model", "w"), ("model", "w", "scale"), ("model", "b")], tmp_path)
    page.run("[...document.querySelectorAll('.tree > .box')].find((box) => box.textContent.startsWith('w')).click()")
    assert {*list_names(page)} == {"w", "scale"}


def test_hostile_names_are_text_in_boxes_and_in_the_panel(page: Page, tmp_path: Path) -> None:
    deep = [("model", "deep", *(f"d{at}" for at in range(400)), leaf) for leaf in "ab"]
    show(page, [("model", HOSTILE), ("model", "\u0645\u202e" * 400), ("model", ""), *deep], tmp_path, size=4000)
    assert HOSTILE in list_names(page)
    assert '""' in list_names(page)
    assert page.run("document.title") == "big"
    assert page.run("document.images.length") == 0
    assert find_clipped(page) == []
    assert page.errors == []
