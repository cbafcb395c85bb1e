from __future__ import annotations

import base64
import json
import re
import shutil
import zlib

import pytest
import torch
from safetensors.torch import save_file

import shardckpt
from shardckpt.errors import TargetExistsError, UsageError
from shardckpt.offline.report_html import render_page
from tests.kit.runs.browser import Page

HOSTILE = "</script><script>document.title='owned'</script><img src=x onerror=document.title='owned'>"


def read_data(page: str):
    [packed] = re.findall(r'<script id="data" type="application/octet-stream">([^<]*)</script>', page)
    return json.loads(zlib.decompress(base64.b64decode(packed)))


def test_names_of_a_checkpoint_are_not_in_the_page_as_text():
    data = {"kind": "checkpoint", "names": [HOSTILE]}
    page = render_page(f"{HOSTILE} {{{{data}}}}", data)
    assert HOSTILE not in page and "owned" not in page.replace("&#x27;owned&#x27;", "")
    assert read_data(page) == data
    assert page.count("<script") == 2


def test_a_page_refers_to_nothing_outside_itself():
    page = render_page("run", {"kind": "checkpoint"})
    assert not re.search(r"(src|href)=[\"'](?!#)", page)
    assert set(re.findall(r"https?://[\w./]+", page)) == {"http://www.w3.org/2000/svg"}  # the name of SVG's elements


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "src"
    folder.mkdir()
    save_file({"w": torch.ones(4, 4)}, folder / "model.safetensors")
    return folder


def test_a_link_to_another_folder_is_refused_as_any_other_path(source, tmp_path):
    (tmp_path / "far").mkdir()
    (tmp_path / "far" / "notes.html").write_text("mine")
    (tmp_path / "near").mkdir()
    link = tmp_path / "near" / "report.html"
    link.symlink_to(tmp_path / "far" / "notes.html")
    with pytest.raises(TargetExistsError, match="only an earlier report") as caught:
        shardckpt.inspect(source, html=link)
    assert caught.value.exit_code == 2
    assert (tmp_path / "far" / "notes.html").read_text() == "mine"


def test_a_report_replaces_an_earlier_report_and_nothing_else(source, tmp_path):
    report = tmp_path / "map.html"
    shardckpt.inspect(source, html=report)
    first = report.read_text()
    shardckpt.inspect(source, html=report)
    assert report.read_text() == first
    for other in (tmp_path / "notes.html", source / "model.safetensors"):
        if not other.exists():
            other.write_text("mine")
        before = other.read_bytes()
        with pytest.raises(TargetExistsError, match="only an earlier report"):
            shardckpt.inspect(source, html=other)
        assert other.read_bytes() == before
    with pytest.raises(TargetExistsError, match="a folder"):
        shardckpt.inspect(source, html=tmp_path)
    with pytest.raises(UsageError):
        shardckpt.inspect(source, html="/")


def test_a_refused_checkpoint_leaves_no_report(tmp_path):
    (tmp_path / "src").mkdir()
    with pytest.raises(UsageError):
        shardckpt.inspect(tmp_path / "src", html=tmp_path / "map.html")
    assert not (tmp_path / "map.html").exists()


def open_report(page: Page, source, report):
    shardckpt.inspect(source, html=report)
    page.errors.clear()
    page.requests.clear()
    page.open(report.as_uri())
    return page


def read_rows(page: Page) -> list[list[str]]:
    rows = "[...document.querySelectorAll('.grid [role=rowgroup] .row')]"
    return page.run(f"{rows}.map((row) => [...row.children].map((cell) => cell.textContent))")


def focus(page: Page, selector: str) -> None:
    page.run(f"document.querySelector({selector!r}).focus()")


def test_a_browser_shows_the_numbers_of_inspect(page, fixtures, tmp_path):
    source = fixtures / "dcp_hsdp_fsdp2_gpt2_w4" / "ckpt"
    found = shardckpt.inspect(source)
    open_report(page, source, tmp_path / "map.html")
    facts = page.run("[...document.querySelectorAll('.facts li')].map((fact) => fact.textContent)")
    assert facts[:3] == [f"{len(found.tensors)}tensors", f"322.8 kB{found.nbytes:,} bytes", "4files"]
    assert read_rows(page)[0][:3] == [found.tensors[0].name, "float32", "x".join(map(str, found.tensors[0].shape))]
    assert page.errors == []
    assert [url for url in page.requests if not url.startswith("file:")] == []


def test_the_table_is_filtered_sorted_and_walked_by_keys(page, fixtures, tmp_path):
    open_report(page, fixtures / "dcp_fsdp2_llama_w2" / "ckpt", tmp_path / "map.html")
    focus(page, "input[type=search]")
    page.press(*"*.q_proj.weight")
    assert [row[0] for row in read_rows(page)] == [
        f"model.model.layers.{at}.self_attn.q_proj.weight" for at in range(3)
    ]
    page.run("document.querySelector('input[type=search]').value = ''")
    page.press("a", "Backspace")
    page.run("document.querySelectorAll('[role=columnheader] button')[3].click()")
    sizes = [row[3] for row in read_rows(page)]
    assert sizes[0] == "14.5 kB" and page.run("document.querySelectorAll('[aria-sort=descending]').length") == 1
    focus(page, ".grid")
    page.press("ArrowDown", "ArrowDown", "Enter")
    selected = page.run("document.querySelector('.row[aria-selected=true]').textContent")
    assert page.run("document.querySelector('.detail h3').textContent") in selected
    assert page.run("document.querySelector('.detail svg').getAttribute('aria-label')").count(".distcp") == 2


def test_keys_walk_through_the_map_and_the_sizes(page, fixtures, tmp_path):
    open_report(page, fixtures / "dcp_fsdp2_llama_w2" / "ckpt", tmp_path / "map.html")
    focus(page, "canvas")
    page.press("ArrowRight")
    first = page.run("document.getElementById('live').textContent")
    page.press("ArrowRight", "ArrowDown")
    assert "__0_0.distcp" in first and "__1_0.distcp" in page.run("document.getElementById('live').textContent")
    page.press("+", "+", "Enter")
    assert page.run("document.querySelector('.detail h3').textContent") in page.run("location.hash")
    focus(page, ".tree button")
    page.press("Enter")
    assert page.run("document.querySelectorAll('.crumbs button').length") > 1
    page.press("Escape")
    assert page.run("document.querySelectorAll('.crumbs button').length") >= 1
    assert page.errors == []


def wait_for_frame(page: Page) -> None:
    page.run("new Promise((done) => requestAnimationFrame(() => setTimeout(done)))")


def to_rgb(color: str) -> str:
    """Return `#rrggbb` as a browser shows it."""
    return f"rgb({', '.join(str(int(color[at : at + 2], 16)) for at in (1, 3, 5))})"


def test_a_part_has_one_color_in_the_sizes_and_the_files(page, tmp_path):
    model = torch.nn.Linear(40, 30)
    optim = torch.optim.AdamW(model.parameters())
    model(torch.ones(40)).sum().backward()
    optim.step()
    shardckpt.save({"model": model, "optim": optim}, tmp_path / "step")
    open_report(page, tmp_path / "step", tmp_path / "map.html")
    wait_for_frame(page)
    swatches = "[...document.querySelectorAll('.legend span')]"
    legend = dict(page.run(f"{swatches}.map((part) => [part.textContent, part.firstChild.style.background])"))
    style = "getComputedStyle(box).getPropertyValue('--part')"
    boxes = f"[...document.querySelectorAll('.tree > .box')].map((box) => [box.getAttribute('aria-label'), {style}])"
    [optim, model] = page.run(boxes)
    assert (optim[0].split(":")[0], to_rgb(optim[1])) == ("optim.state", legend["optimizer"])
    assert (model[0].split(":")[0], to_rgb(model[1])) == ("model", legend["model"])
    page.run("document.querySelector('.tree > .box').click()")
    assert {to_rgb(color) for _, color in page.run(boxes)} == {legend["optimizer"]}
    assert len({*legend.values()}) == 2 and page.errors == []


def test_sizes_of_several_parts_have_the_color_of_none(page, tmp_path):
    state = {"model": {"w": torch.ones(4)}, "optim": {"state": {0: {"exp_avg": torch.ones(4)}}, "param_groups": []}}
    shardckpt.save({"net": state, "mask": torch.ones(2)}, tmp_path / "step")
    open_report(page, tmp_path / "step", tmp_path / "map.html")
    wait_for_frame(page)
    legend = page.run("[...document.querySelectorAll('.legend i')].map((part) => part.style.background)")
    color = page.run("document.querySelector('.tree > .box').style.getPropertyValue('--part')")
    assert to_rgb(color) not in legend and len(legend) == 3


def test_each_control_has_a_name_for_screen_readers(page, fixtures, tmp_path):
    open_report(page, fixtures / "dcp_fsdp2_llama_w2" / "ckpt", tmp_path / "map.html")
    nodes = page.call("Accessibility.getFullAXTree")["nodes"]
    controls = [
        node
        for node in nodes
        if node.get("role", {}).get("value") in {"button", "searchbox", "combobox", "grid", "img"}
    ]
    assert len(controls) > 12
    assert [node for node in controls if not node.get("name", {}).get("value")] == []


def test_damage_is_listed_first_and_marked(page, fixtures, tmp_path):
    source = tmp_path / "damaged"
    shutil.copytree(fixtures / "dcp_fsdp2_llama_w2" / "ckpt", source)
    (source / "__1_0.distcp").unlink()
    open_report(page, source, tmp_path / "map.html")
    found = shardckpt.inspect(source)
    shown = page.run("[...document.querySelectorAll('.problems li')].map((line) => line.textContent)")
    assert {*found.warnings, *(problem.message for problem in found.problems)} <= set(shown)
    page.run("document.querySelector('input[type=checkbox]').click()")
    assert all(row[0].startswith("✕") for row in read_rows(page))


def test_hostile_names_stay_text(page, tmp_path):
    source = tmp_path / "src"
    source.mkdir()
    save_file(
        {HOSTILE: torch.ones(2), "a\n\x1b[31m\u202eb": torch.ones(2)}, source / "model.safetensors", {HOSTILE: HOSTILE}
    )
    open_report(page, source, tmp_path / "map.html")
    focus(page, ".grid")
    page.press("Enter")
    assert page.run("document.title") != "owned" and page.run("document.images.length") == 0
    assert HOSTILE in [row[0] for row in read_rows(page)]
    assert page.errors == []


def test_a_comparison_names_the_first_difference_and_sorts_by_distance(page, tmp_path):
    tensors = {f"layers.{at}.w": torch.full((4,), 2.0) for at in range(12)}
    save_file(tensors, tmp_path / "a.safetensors")
    changed = {name: tensor + 2.0 ** (at - 12) for at, (name, tensor) in enumerate(tensors.items()) if at > 1}
    save_file(tensors | changed | {"layers.5.w": torch.tensor(float("nan")).repeat(4)}, tmp_path / "b.safetensors")
    found = shardckpt.diff(tmp_path / "a.safetensors", tmp_path / "b.safetensors", html=tmp_path / "diff.html")
    page.errors.clear()
    page.open((tmp_path / "diff.html").as_uri())
    assert "layers.2.w" in page.run("document.getElementById('first').textContent")
    grids = page.run("[...document.querySelectorAll('.grid')].map((grid) => grid.getAttribute('aria-rowcount'))")
    assert grids == [str(1 + len(found.layers)), str(1 + len(found.differences))]
    rows = "[...document.querySelectorAll('.grid')[1].querySelectorAll('[role=rowgroup] .row')]"
    names = page.run(f"{rows}.map((row) => row.firstChild.textContent)")
    assert names[:3] == ["layers.5.w", "layers.11.w", "layers.10.w"]
    assert page.errors == []


def test_all_columns_of_a_comparison_fit_a_phone(page, tmp_path):
    names = [f"model.layers.{at}.self_attn.q_proj.weight" for at in range(3)]
    for at, file in enumerate(("a", "b"), 1):
        state = {"model": {name: torch.full((4,), 1e-9 * at) for name in names}, "lr": at, "text": "x" * 90 * at}
        torch.save(state, tmp_path / f"{file}.pt")
    shardckpt.diff(tmp_path / "a.pt", tmp_path / "b.pt", html=tmp_path / "diff.html")
    page.show_as(width=390)
    page.open((tmp_path / "diff.html").as_uri())
    cut = "[...document.querySelectorAll('.grid, .number')].filter((each) => each.scrollWidth > each.clientWidth)"
    assert page.run(f"{cut}.map((each) => each.textContent)") == []
    ends = "[...document.querySelectorAll('.grid .name > :last-child')].map((each) => each.textContent)"
    assert "oj.weight" in page.run(ends), "there is room for the start of a name too"
    count = "(range.selectNodeContents(each), range.getClientRects().length)"
    kinds = f"((range) => [...document.querySelectorAll('td:nth-child(2)')].map((each) => {count}))"
    kinds += "(document.createRange())"
    assert set(page.run(kinds)) == {1}, "a kind is one word on one line"
    page.show_as()


def test_the_page_of_equal_checkpoints_says_so(page, source, tmp_path):
    shardckpt.diff(source, source, html=tmp_path / "diff.html")
    page.open((tmp_path / "diff.html").as_uri())
    assert "is equal" in page.run("document.body.textContent") and page.errors == []
