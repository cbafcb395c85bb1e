"""Plain English, measured: how often "of" stands, how long sentences are, and phrases that a plain word replaces.

`python tests/test_english.py` prints the figures by file, the worst first.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = (ROOT / "shardckpt", ROOT / "cli" / "shardckpt_cli")

MAX_OF_IN_DOCS = 25
"""Times that "of" may stand in 1,000 words of documents."""

MAX_OF_IN_SOURCES = 30
"""The same in docstrings, and in messages."""

MAX_MEDIAN = 15
MAX_WORDS = 35
"""Words of a sentence in documents, at the median and at most."""

TICS = {
    r"\b(?:those|that) of (?:the|its|their|a|an|all|each)\b": "name the thing again",
    r"(?<!there )\b(?:is|are) none\b": "say what is missing or invalid",
    r"\bbeside\b(?!:)": "next to, in addition to",
    r"\banew\b": "again",
    r"\b(?:go|goes|going|went) on\b": "continue",
    r"\bbegin(?:s|ning)?\b": "start",
}
"""Phrases, with what plain English has for them."""

WORD = re.compile(r"[A-Za-z][A-Za-z'-]*")


class Prose(NamedTuple):
    """Text in words and sentences; code and links are one word each."""

    words: list[str]
    sentences: list[str]

    @property
    def of_per_1000(self) -> float:
        """How often "of" stands in 1,000 words."""
        return 1000 * sum(word.lower() == "of" for word in self.words) / max(1, len(self.words))


def read_prose(text: str) -> Prose:
    """Return the prose of Markdown or of a docstring, without blocks of code, tables and headings."""
    text = re.sub(r"```.*?```|<!--.*?-->", "", text, flags=re.DOTALL)
    text = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith(("|", "#", "![", ">>>")))
    text = re.sub(r"\]\([^)]*\)", "]", re.sub(r"`[^`]*`", "X", text))
    parts = re.split(r"\n\s*\n|\n\s*(?:[*-]|\d+\.) ", text)
    sentences = [each for part in parts for each in re.split(r"(?<=[.!?:])\s+", " ".join(part.split()))]
    return Prose(WORD.findall(text), [each for each in sentences if WORD.search(each)])


def read_documents() -> dict[str, Prose]:
    """Return the prose of all documents by path. The page of the architecture is partly drawn from sources."""
    paths = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return {str(path.relative_to(ROOT)): read_prose(path.read_text(encoding="utf-8")) for path in paths}


def read_docstrings(tree: ast.Module) -> Iterator[ast.Constant]:
    """Yield the docstrings of a module."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and node.body:
            first = node.body[0]
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                yield first.value


def read_sources() -> tuple[dict[str, Prose], dict[str, Prose]]:
    """Return the docstrings, and the messages: texts with four words or more, by path."""
    docstrings, messages = {}, {}
    for path in (path for package in PACKAGES for path in sorted(package.rglob("*.py"))):
        tree, name = ast.parse(path.read_text(encoding="utf-8")), str(path.relative_to(ROOT))
        found = {id(node): str(node.value) for node in read_docstrings(tree)}
        docstrings[name] = read_prose("\n\n".join(found.values()))
        texts = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in found]
        prose = [read_prose(text) for text in texts if isinstance(text, str)]
        long = [each for each in prose if len(each.words) >= 4]
        messages[name] = join(long)
    return docstrings, messages


def join(texts: Iterable[Prose]) -> Prose:
    """Return texts as one."""
    texts = list(texts)
    return Prose([w for text in texts for w in text.words], [s for text in texts for s in text.sentences])


def find_tics(texts: Mapping[str, Prose]) -> list[str]:
    """Return file, phrase and sentence of each phrase that plain English replaces."""
    return [
        f"{name}: {match[0]!r} in {sentence!r}: {instead}"
        for name, text in texts.items()
        for sentence in text.sentences
        for pattern, instead in TICS.items()
        if (match := re.search(pattern, sentence))
    ]


def count_words(sentence: str) -> int:
    return len(WORD.findall(sentence))


class TestDocuments:
    @pytest.fixture(scope="class")
    def documents(self) -> dict[str, Prose]:
        return read_documents()

    def test_of_stands_seldom(self, documents: dict[str, Prose]) -> None:
        assert join(documents.values()).of_per_1000 <= MAX_OF_IN_DOCS

    def test_sentences_are_short(self, documents: dict[str, Prose]) -> None:
        long = [
            (name, each) for name, text in documents.items() for each in text.sentences if count_words(each) > MAX_WORDS
        ]
        assert long == []
        assert median(map(count_words, join(documents.values()).sentences)) <= MAX_MEDIAN

    def test_no_phrase_stands_for_a_plain_word(self, documents: dict[str, Prose]) -> None:
        assert find_tics(documents) == []


class TestSources:
    def test_of_stands_seldom_in_docstrings_and_messages(self) -> None:
        docstrings, messages = (join(texts.values()) for texts in read_sources())
        assert docstrings.of_per_1000 <= MAX_OF_IN_SOURCES
        assert messages.of_per_1000 <= MAX_OF_IN_SOURCES

    def test_no_phrase_stands_for_a_plain_word(self) -> None:
        docstrings, messages = read_sources()
        assert find_tics(docstrings) + find_tics(messages) == []

    def test_constants_say_max(self) -> None:
        pattern = re.compile(r"^_?MOST_[A-Z_]+\b", re.MULTILINE)
        paths = [path for package in PACKAGES for path in package.rglob("*.py")]
        assert [(path.name, found) for path in paths if (found := pattern.findall(path.read_text("utf-8")))] == []


class TestTheRulesCanFail:
    def test_code_tables_and_links_are_not_prose(self) -> None:
        text = "# Of of\n\n| of | of |\n\nOne of `of of` and [two](of/of.md).\n\n```\nof of\n```\n"
        assert read_prose(text).words == ["One", "of", "X", "and", "two"]

    def test_sentences_end_at_points_and_at_items(self) -> None:
        assert read_prose("One two. Three:\n\n- four\n- five six").sentences == [
            "One two.",
            "Three:",
            "- four",
            "five six",
        ]

    def test_phrases_are_found(self) -> None:
        found = find_tics({"a.md": read_prose("The save goes on beside those of the ranks. All is well.")})
        assert len(found) == 3


if __name__ == "__main__":
    docs, (docstrings, messages) = read_documents(), read_sources()
    for title, texts in (("documents", docs), ("docstrings", docstrings), ("messages", messages)):
        worst = sorted(texts, key=lambda name: -texts[name].of_per_1000 * len(texts[name].words) ** 0.5)[:12]
        print(title, f"{join(texts.values()).of_per_1000:.1f}", *(f"\n  {n} {texts[n].of_per_1000:.0f}" for n in worst))
        print(*find_tics(texts)[:20], sep="\n")
