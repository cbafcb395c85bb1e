"""What the documentation shows is what happens: every code block of README.md and docs/ runs, or says why it does not.

`python` blocks of a page share one namespace; one after `<!-- file: NAME -->` is written to that file instead. In
`console` blocks, lines after `$` are run as by bash, and the text below is compared with what they print: `...` stands
for anything within a line, alone on a line for any lines; seconds and rates are never compared. Any other block needs
`<!-- not run: the reason -->` on the line before it. A page can go on where another one ends (`CONTINUES`): both run in
one folder, which is empty at first.

`UPDATE_DOCS=1 pytest tests/test_docs.py` writes what is printed now into the pages, where it differs.
"""

from __future__ import annotations

import fcntl
import functools
import importlib
import importlib.util
import inspect
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, NoReturn

import pytest
import torch.distributed as dist
from shardckpt_cli import start

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
CONTINUES = {ROOT / "docs" / "which-command.md": ROOT / "docs" / "tutorial.md"}
"""Pages that use what another page leaves behind; that one runs only as the start of them."""
REASON = re.compile(r"<!-- not run: (.+?) -->\n\Z")
TARGET_FILE = re.compile(r"<!-- file: (\S+) -->\n\Z")
SECONDS = re.compile(r"\b\d+\.\d+ s\b")


class Block(NamedTuple):
    """One fenced block: language, text, first line; why it is not run, if it is not; the file it is, if it is one."""

    language: str
    text: str
    line: int
    reason: str
    file: str


class Step(NamedTuple):
    """One command of a console block and what it is said to print."""

    command: str
    output: str


def blocks(text: str) -> Iterator[Block]:
    """Yield the fenced blocks of a page, in order."""
    for found in FENCE.finditer(text):
        before = text[: found.start()]
        reason, file = REASON.search(before), TARGET_FILE.search(before)
        line = before.count("\n") + 1
        yield Block(found[1], found[2], line, reason[1] if reason else "", file[1] if file else "")


def steps(text: str) -> list[Step]:
    """Return the commands of a console block; a backslash continues one on the next line."""
    parts = re.split(r"^\$ ", text, flags=re.MULTILINE)
    assert not parts[0].strip(), "a console block starts with a command"
    found = []
    for part in parts[1:]:
        command, _, output = re.sub(r"\\\n\s*", "", part).partition("\n")
        found.append(Step(command, output))
    return found


def matches(shown: str, printed: str) -> bool:
    """Tell whether what a page shows is what was printed, up to seconds and `...`."""
    lines = SECONDS.sub("0 s", shown.strip()).split("\n")
    pattern = "".join(
        r"(?:.*\n)*" if line.strip() == "..." else re.escape(line).replace(r"\.\.\.", ".*") + r"\n" for line in lines
    )
    return re.fullmatch(pattern, SECONDS.sub("0 s", printed.strip()) + "\n") is not None


PLAIN = re.compile(r"shardckpt(?!.* --help)(?: (?:[\w./=:,@+-]+|'[^']*'))+")
"""Our command with words that mean the same to bash and to `shlex`; help has another width in a process with rich."""


TORCHRUN = re.compile(r"torchrun --nproc-per-node (\d+) (\S+\.py(?: \S+)*)")
"""A script that ranks on this machine run."""


def run(command: str, folder: Path) -> str:
    """Run a command as a reader would, and return all that it prints.

    Our own command, and scripts under torchrun, run in forks of this process, which has imported what they need: a
    process of its own takes ten times as long.
    """
    if PLAIN.fullmatch(command):
        return run_forked([Process(shlex.split(command), start.main, {})], folder)
    ranks = TORCHRUN.fullmatch(command)
    return run_ranks(int(ranks[1]), shlex.split(ranks[2]), folder) if ranks else run_by_bash(command, folder)


GLOO = re.compile(r"(?m)^.*(?:\[Gloo\] Rank|connected peer ranks is :).*\n+")
"""Lines that the gloo of torch 2.9 prints; those of several ranks mix."""


class Process(NamedTuple):
    """A fork to be: its command line, the function that it runs, and environment variables."""

    words: list[str]
    main: Callable[[], object]
    environment: Mapping[str, str]


def run_ranks(count: int, words: list[str], folder: Path) -> str:
    """Run a script as the ranks of a job, as torchrun does, and return all that they print."""
    import torch._dynamo  # noqa: F401  imported here once, and not by each rank
    import torch.distributed as dist
    from transformers import LlamaForCausalLM  # noqa: F401

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    ranks = [{"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count), **job} for rank in range(count)]
    script = functools.partial(runpy.run_path, words[0], run_name="__main__")
    return run_forked([Process(words, script, rank) for rank in ranks], folder)


def run_forked(processes: list[Process], folder: Path) -> str:
    """Run forks beside each other, and return all that they print."""
    with tempfile.TemporaryFile() as printed:
        children = [os.fork() or be_process(process, folder, printed.fileno()) for process in processes]
        for child in children:
            os.waitpid(child, 0)
        printed.seek(0)
        return GLOO.sub("", printed.read().decode())


def be_process(process: Process, folder: Path, printed: int) -> NoReturn:
    """Become a process with an output; it ends with its function."""
    code = 1
    try:
        os.dup2(printed, 1)
        os.dup2(printed, 2)
        os.chdir(folder)
        os.environ.update(process.environment)
        sys.argv = process.words
        sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
        process.main()
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def run_by_bash(command: str, folder: Path) -> str:
    """Run a command by bash, and return all that it prints."""
    scripts = Path(sys.executable).parent
    environment = {**os.environ, "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}", "LC_ALL": "C"}
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.stdout


def unexplained(text: str) -> list[str]:
    """Return the blocks of a page that neither run nor say why."""
    known = {"python", "console"}
    return [
        f"line {b.line}: a {b.language or 'plain'} block"
        for b in blocks(text)
        if b.language not in known and not b.reason
    ]


class Ran(NamedTuple):
    """A command of a page that was run: the line its block starts on, what is shown, what was printed."""

    line: int
    step: Step
    printed: str

    def __str__(self) -> str:
        return f"line {self.line}: $ {self.step.command}\nshows:\n{self.step.output}\nprints:\n{self.printed}"


def run_page(text: str, folder: Path) -> list[Ran]:
    """Run a page's blocks in a folder and return the commands that print something else than it shows."""
    ran = []
    names: dict[str, Any] = {"__name__": "__page__"}
    for block in blocks(text):
        if block.reason:
            continue
        if block.file:
            (folder / block.file).write_text(block.text, encoding="utf-8")
        elif block.language == "python":
            exec(compile("\n" * block.line + block.text, "page", "exec"), names)
        elif block.language == "console":
            ran += [Ran(block.line, step, run(step.command, folder)) for step in steps(block.text)]
    return [each for each in ran if not matches(each.step.output, each.printed)]


def updated(text: str, wrong: list[Ran]) -> str:
    """Return a page with what it shows replaced by what was printed."""
    for _, step, printed in wrong:
        shown = f"$ {step.command}\n{step.output}".rstrip("\n") + "\n"
        text = text.replace(shown, f"$ {step.command}\n{printed.rstrip()}\n", 1)
    return text


def make_samples(folder: Path) -> Path:
    """Write the checkpoints that the pages work on."""
    script = ROOT / "tests" / "docs_samples.py"
    subprocess.run([sys.executable, str(script), str(folder)], check=True, capture_output=True)
    return folder


@pytest.fixture(scope="session")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the samples, made once for all workers of a test run; pages work on copies."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "docs-samples"
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.is_dir():
            make_samples(folder.with_suffix(".new")).rename(folder)
    return folder


SHOWN_BY_NEWER_TORCH = {
    *("docs/which-command.md", "docs/consolidate.md", "docs/diff.md", "docs/from-fsdp.md", "docs/local-state-dict.md"),
    *("docs/optimizer-keys.md", "docs/safety.md", "docs/state-dicts.md", "docs/verify.md"),
}
"""Pages that count values and bytes of the samples; the AdamW of torch 2.6 has a setting less."""


def has_later_setting() -> bool:
    """Return True if the groups of this torch's AdamW have the setting of which the pages know."""
    return "decoupled_weight_decay" in inspect.signature(importlib.import_module("torch").optim.Adam).parameters


def each_page(pages: list[Path]) -> pytest.MarkDecorator:
    """Return a mark that gives a test one page after the other."""
    return pytest.mark.parametrize("page", pages, ids=lambda page: str(page.relative_to(ROOT)))


class TestPages:
    @each_page(PAGES)
    def test_every_block_runs_or_says_why_not(self, page: Path) -> None:
        assert unexplained(page.read_text(encoding="utf-8")) == []

    @pytest.mark.shown_by(
        "checkpoint/load/test_stateful_fill.py::test_the_tutorials_object_is_resumed_on_other_numbers_of_ranks",
        "README.md",
    )
    @pytest.mark.shown_by(
        "offline/test_consolidate.py::test_model_optimizer_and_groups_come_out_bit_for_bit",
        "docs/consolidate.md",
        "docs/from-deepspeed.md",
        "docs/from-fsdp.md",
    )
    @pytest.mark.shown_by(
        "tiers/test_several_nodes.py::test_with_a_copy_the_loss_of_any_node_is_survived_on_other_numbers_of_ranks",
        "docs/incidents.md",
    )
    @pytest.mark.shown_by("checkpoint/test_stores.py::test_two_ranks_save_overwrite_and_restore", "docs/s3.md")
    @pytest.mark.shown_by(
        "integrations/test_ray.py::TestReports::test_each_step_is_listed_and_a_later_run_restores_the_newest",
        "docs/from-ray-train.md",
    )
    @pytest.mark.long
    @each_page([page for page in PAGES if page not in CONTINUES.values()])
    def test_what_it_shows_is_what_happens(
        self, page: Path, samples: Path, tmp_path: Path, s3_bucket: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        if str(page.relative_to(ROOT)) in SHOWN_BY_NEWER_TORCH and not has_later_setting():
            pytest.skip("the page counts values and bytes that a newer torch saves")
        folder = tmp_path / "page"
        begun = CONTINUES.get(page)
        folder.mkdir() if begun else shutil.copytree(samples, folder)
        monkeypatch.chdir(folder)
        monkeypatch.setenv("BUCKET", s3_bucket)
        wrong = [each for part in ([begun] if begun else []) + [page] for each in self.run_part(part, folder)]
        assert not dist.is_initialized(), "end the page with `dist.destroy_process_group()`: later tests need their own"
        assert not wrong, "\n\n".join(map(str, wrong))

    def run_part(self, page: Path, folder: Path) -> list[Ran]:
        text = page.read_text(encoding="utf-8")
        wrong = run_page(text, folder)
        if wrong and os.environ.get("UPDATE_DOCS"):
            page.write_text(updated(text, wrong), encoding="utf-8")
        return wrong

    @each_page(PAGES)
    def test_its_links_lead_somewhere(self, page: Path) -> None:
        links = re.findall(r"\]\((?!https?://)([^)#]+)", page.read_text(encoding="utf-8"))
        assert [link for link in links if not (page.parent / link).exists()] == []


def test_the_training_of_the_readme_goes_on_when_it_runs_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (block,) = [each.text for each in blocks(text) if 'Checkpointer("checkpoints"' in each.text and not each.reason]
    names: dict[str, Any] = {}
    for last in (10, 20):
        exec(block, names)
        assert names["ck"].steps()[-1] == last


DECISIONS = sorted((ROOT / "docs" / "decisions").glob("[0-9]*.md"))


def test_decisions_are_numbered_by_their_titles() -> None:
    titles = [page.read_text(encoding="utf-8").partition(". ")[0] for page in DECISIONS]
    assert titles == [f"# {int(page.name[:4])}" for page in DECISIONS], "a page that was replaced leaves a gap"
    assert len({*titles}) == len(titles)


def index_row(page: Path) -> str:
    """Return the row of a decision in the table of all."""
    text = page.read_text(encoding="utf-8")
    number, title = re.findall(r"\A# (\d+)\. (.+)", text)[0]
    status, by = re.findall(r"Status: ([a-z ,]+?)(?: by (.+))?[.:;]?$", text, re.MULTILINE)[0]
    return f"| {number} | [{title}]({page.name}) | {status} | {by.removesuffix('.')} |"


def test_the_index_of_decisions_lists_each() -> None:
    index = ROOT / "docs" / "decisions" / "index.md"
    head, rule, _ = index.read_text(encoding="utf-8").partition("|---|---|---|---|\n")
    expected = head + rule + "".join(f"{index_row(page)}\n" for page in DECISIONS)
    if os.environ.get("UPDATE_DOCS"):
        index.write_text(expected, encoding="utf-8")
    assert index.read_text(encoding="utf-8") == expected, "run `UPDATE_DOCS=1 pytest tests/test_docs.py -k index`"


LINKS = [
    ("engine.md", "../examples/demo.py", "source/examples/demo.py"),
    ("engine.md", "../benchmarks/RESULTS.md#saves", "source/benchmarks/RESULTS.md#saves"),
    ("engine.md", "../README.md", "source/README.md"),
    ("decisions/0001-dtypes-leaf.md", "../../examples/demo.py", "../source/examples/demo.py"),
    ("decisions/0001-dtypes-leaf.md", "../engine.md", "../engine.md"),
    ("source/README.md", "docs/engine.md", "../engine.md"),
    ("source/README.md", "examples/demo.py", "examples/demo.py"),
    ("source/benchmarks/RESULTS.md", "../docs/engine.md", "../../engine.md"),
    ("engine.md", "https://example.org/README.md", "https://example.org/README.md"),
    ("engine.md", "../examples/none.py", "../examples/none.py"),
    ("engine.md", "../../outside.py", "../../outside.py"),
    ("engine.md", "format.md", "format.md"),
]
"""Pages with a link in them, and what becomes of it on the site."""


class TestTheSite:
    """`make check` builds it, strictly; links to files outside docs/ lead to copies of them there."""

    @pytest.fixture
    def hooks(self) -> ModuleType:
        pytest.importorskip("mkdocs")
        spec = importlib.util.spec_from_file_location("mkdocs_hooks", ROOT / "mkdocs_hooks.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    @pytest.mark.parametrize(("page", "link", "rewritten"), LINKS)
    def test_links_to_sources_lead_to_copies(self, hooks: ModuleType, page: str, link: str, rewritten: str) -> None:
        assert hooks.rewrite_links(f"see [it]({link}).", page) == f"see [it]({rewritten})."


class TestSignaturesOnTheSite:
    """The API pages name each keyword argument that a docstring describes."""

    SOURCE = (
        "from typing import TypedDict, Unpack\n"
        "class Params(TypedDict, total=False):\n    keep_last: int | None\n"
        "def spelled(path: str, **rules: Unpack[Params]) -> None:\n    'Args:\\n    keep_last: Number of steps.'\n"
        "def other(**options: Unpack[Params]) -> None:\n    'Args:\\n    **options: As for `spelled`.'\n"
    )

    @pytest.mark.parametrize(("name", "parameters"), [("spelled", ["path", "keep_last"]), ("other", ["options"])])
    def test_keywords_are_spelled_out_where_the_docstring_does(self, name: str, parameters: list[str]) -> None:
        griffe = pytest.importorskip("griffe")
        extensions = griffe.load_extensions(str(ROOT / "mkdocs_signatures.py"))
        with griffe.temporary_visited_package("p", {"__init__.py": self.SOURCE}, extensions=extensions) as package:
            assert [parameter.name for parameter in package[name].parameters] == parameters


class TestTheChecksCanFail:
    def test_a_block_without_a_reason_is_found(self) -> None:
        page = "a\n```bash\nmake\n```\n<!-- not run: CI does -->\n```bash\nmake\n```\n```\nplain\n```\n"
        assert unexplained(page) == ["line 2: a bash block", "line 9: a plain block"]

    def test_another_output_is_found(self, tmp_path: Path) -> None:
        page = "```console\n$ echo one\none\n$ echo two\nthree\n```\n"
        wrong = run_page(page, tmp_path)
        assert [(each.step.output, each.printed) for each in wrong] == [("three\n", "two\n")]
        assert updated(page, wrong) == page.replace("three", "two")

    def test_a_failing_python_block_is_found(self, tmp_path: Path) -> None:
        with pytest.raises(ZeroDivisionError):
            run_page("```python\na = 0\n```\n```python\n1 / a\n```\n", tmp_path)

    @pytest.mark.parametrize(
        ("shown", "printed"),
        [
            ("took 0.10 s", "took 12.34 s"),
            ("in /tmp/.../x", "in /tmp/abc/x"),
            ("one\n...\nfour", "one\ntwo\nthree\nfour"),
            ("one\n...", "one\ntwo\nthree"),
            ("one\n...\ntwo", "one\ntwo"),
        ],
    )
    def test_an_ellipsis_and_seconds_match(self, shown: str, printed: str) -> None:
        assert matches(shown, printed)

    @pytest.mark.parametrize(
        ("shown", "printed"),
        [
            ("one ... two", "one three"),
            ("one\n...\nfour", "one\ntwo"),
            ("12 MB", "13 MB"),
            ("one", "one\ntwo"),
            ("a.b", "acb"),
        ],
    )
    def test_nothing_else_does(self, shown: str, printed: str) -> None:
        assert not matches(shown, printed)
