"""The words of the code and of the documents are the field's (docs/glossary.md)."""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Set
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = (ROOT / "shardckpt", ROOT / "cli" / "shardckpt_cli")

_REPLACED = """
    beneath cut cuts deal dealing deals dealt handed heard laid lay leftover leftovers lie lies lying nest said
    tell telling tells told whole
"""
BANNED = frozenset(
    f"""{_REPLACED}
    absent cargo corridor draft drafts exposure exposures face faces ground grounds inert lap laps losses nests
    ruled star template
    """.split()
)
"""Words that the glossary replaces in names, texts and comments of sources."""

DOCS_PHRASES = r"\bthe first rank\b"
PHRASES = rf"{DOCS_PHRASES}|\bdef \w+_of\("
"""Patterns that the glossary replaces in documents and in sources; tests/test_english.py measures the rest."""

ALLOWED: dict[str, str] = {
    "Hugging Face": "the company",
    "HuggingFaceStorageWriter": "a class of torch",
    "chat_template": "a file of Hugging Face's tokenizers",
    "TemplateProcessing": "a class of Hugging Face's tokenizers",
    '"nest"': "a key of stored manifests, and a value of `shardckpt.rekey(to=)`",
    "`nest`": "the same key and value",
    "--nest": "an option of the command",
    "nest: _Unflatten": "the argument that typer makes that option of",
    "nest(": "the public function `shardckpt.state.nest`",
    "shardckpt.state.nest": "the same function on its page",
    ", nest,": "imports of that function",
    "supports_draft_weight_update": "an attribute of vLLM's engines",
    "keep_whole": "a public argument of `shardckpt.reshard`",
    "--keep-whole": "an option of the command",
}
"""Texts with replaced words that stay as they are, with the reason; they are not counted."""

DOCS_BANNED = frozenset(f"{_REPLACED} nobody room rooms whoever".split())
"""Words that the glossary replaces in documents, examples and benchmarks."""

MODULES_TWICE: dict[str, int] = {
    "dcp": 2,  # a target, and the integration that users import instead of torch's
    "errors": 2,
}
"""Names of modules that several packages have, with how many do."""

MODULES_IN_A_FOLDER: dict[str, int] = {}
"""Folders of more than `MOST_MODULES` modules, with how many they hold."""

MOST_MODULES = 12
MOST_IN_STORAGE = 20
MOST_AT_TOP = 15
MAY_REPEAT = {"__init__", "base", "reader", "writer"}
WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
ALLOWED_TEXT = re.compile(
    "|".join(rf"(?<!\w){re.escape(text)}" if text[0].isalpha() else re.escape(text) for text in ALLOWED)
)


def read_sources() -> dict[str, str]:
    """Return the text of every module by its path below the root."""
    return {
        str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
        for package in PACKAGES
        for path in sorted(package.rglob("*.py"))
    }


def read_prose() -> dict[str, str]:
    """Return the text of documents, examples and benchmarks by path, without the words that the glossary replaces."""
    patterns = ("docs/**/*.md", "README.md", "CONTRIBUTING.md", "examples/*.py", "benchmarks/*.py", "benchmarks/*.md")
    texts = {
        str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
        for pattern in patterns
        for path in sorted(ROOT.glob(pattern))
    }
    texts["docs/glossary.md"] = without_last_column(texts["docs/glossary.md"])
    return texts


def without_last_column(table: str) -> str:
    """Remove the last column of Markdown tables."""
    return "\n".join(line.rsplit("|", 2)[0] if line.startswith("| ") else line for line in table.splitlines())


def count_words(texts: Mapping[str, str], words: Set[str]) -> dict[str, int]:
    """Count whole words outside of allowed texts; identifiers are split at underscores and capitals."""
    found = Counter(word.lower() for text in texts.values() for word in WORD.findall(ALLOWED_TEXT.sub(" ", text)))
    return {word: found[word] for word in words & found.keys()}


def find_phrases(texts: Mapping[str, str], pattern: str) -> list[str]:
    """Return the texts that match a pattern, with their paths."""
    return [f"{path}: {match[0]}" for path, text in texts.items() for match in re.finditer(pattern, text)]


def count_classes_twice(texts: Mapping[str, str]) -> dict[str, int]:
    """Count the modules that define a class, for classes that several define."""
    where: dict[str, set[str]] = defaultdict(set)
    for path, text in texts.items():
        for node in ast.parse(text).body:
            if isinstance(node, ast.ClassDef):
                where[node.name].add(path)
    return {name: len(paths) for name, paths in sorted(where.items()) if len(paths) > 1}


def count_modules_twice(paths: Iterator[str] | Mapping[str, str]) -> dict[str, int]:
    """Count the modules of one name, for names that occur more than once; the command's are named after its verbs."""
    found = Counter(Path(path).stem for path in paths if not path.startswith("cli/"))
    return {name: number for name, number in sorted(found.items()) if number > 1 and name not in MAY_REPEAT}


def count_crowded_folders(paths: Iterator[str] | Mapping[str, str]) -> dict[str, int]:
    """Count the modules of each folder that holds too many; the command has one module a verb."""
    found = Counter(str(Path(path).parent) for path in paths if Path(path).stem != "__init__")
    most = {"shardckpt": MOST_AT_TOP, "shardckpt/storage": MOST_IN_STORAGE, "cli/shardckpt_cli": MOST_IN_STORAGE}
    return {folder: number for folder, number in sorted(found.items()) if number > most.get(folder, MOST_MODULES)}


@pytest.fixture(scope="module")
def sources() -> dict[str, str]:
    return read_sources()


@pytest.fixture(scope="module")
def prose() -> dict[str, str]:
    return read_prose()


def test_sources_use_the_words_of_the_field(sources: dict[str, str]) -> None:
    assert count_words(sources, BANNED) == {}
    assert find_phrases(sources, PHRASES) == []


def test_documents_use_the_words_of_the_field(prose: dict[str, str]) -> None:
    assert count_words(prose, DOCS_BANNED) == {}
    assert find_phrases(prose, DOCS_PHRASES) == []


def test_names_of_classes_and_modules_are_unique(sources: dict[str, str]) -> None:
    assert count_classes_twice(sources) == {}
    assert count_modules_twice(sources) == MODULES_TWICE


def test_folders_hold_few_modules(sources: dict[str, str]) -> None:
    assert count_crowded_folders(sources) == MODULES_IN_A_FOLDER


MOST_OF_A_NAME = 80
"""The most characters in the name of a test: its class has the scenario, its name the claim."""


def test_names_of_tests_are_short() -> None:
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.py")]
    names = [name for text in texts for name in re.findall(r"def (test_\w+)", text)]
    assert [name for name in names if len(name) > MOST_OF_A_NAME] == []


PLAIN = ("handed", "heard", "laid", "lay", "lie", "lying", "nobody", "room", "said", "tell", "told", "whoever")
"""Banned words that stand for nothing of the field: plain English uses the noun or the verb that is meant."""


def test_every_banned_word_is_in_the_glossary_with_what_replaces_it() -> None:
    rows = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8").splitlines()
    replaced = {word.lower() for row in rows if row.startswith("| ") for word in WORD.findall(row.split("|")[-2])}
    assert [word for word in BANNED | DOCS_BANNED if not word.startswith((*PLAIN, *replaced))] == []


class TestTheCountsCanFail:
    def test_words_are_found_in_names_texts_and_comments(self) -> None:
        text = {"a.py": '_told_of = "was told"  # Told\nToldThing = untold'}
        assert count_words(text, {"told"}) == {"told": 4}

    def test_allowed_texts_are_not_counted_and_their_words_elsewhere_are(self) -> None:
        text = "Hugging Face and its face\nnest(flat)\n_nest(flat)\nunnest(flat), nest of nests, keep_whole, whole"
        assert count_words({"a.py": text}, {"face", "nest", "whole", "lap"}) == {"face": 1, "nest": 2, "whole": 1}

    def test_every_allowed_text_is_in_use(self, sources: dict[str, str], prose: dict[str, str]) -> None:
        texts = "\n".join([*sources.values(), *prose.values()])
        assert [text for text in ALLOWED if text not in texts] == []

    def test_words_that_the_glossary_replaces_are_not_counted_in_it(self) -> None:
        assert without_last_column("| shard | A part. | `Shard` | cut |\ntext") == "| shard | A part. | `Shard` \ntext"

    def test_classes_of_one_name_are_found(self) -> None:
        texts = {"a.py": "class Part: ...", "b.py": "class Part: ...", "c.py": "class Other: ..."}
        assert count_classes_twice(texts) == {"Part": 2}

    def test_modules_of_one_name_are_found(self) -> None:
        assert count_modules_twice(dict.fromkeys(["a/x.py", "b/x.py", "a/base.py", "b/base.py"], "")) == {"x": 2}

    def test_crowded_folders_are_found(self) -> None:
        assert count_crowded_folders({f"shardckpt/core/m{n}.py": "" for n in range(13)}) == {"shardckpt/core": 13}
