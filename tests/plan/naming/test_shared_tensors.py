"""Tied tensors: known from the checkpoint or from the config, never from equal values; one name is kept."""

from __future__ import annotations

import pytest

from shardckpt.boxes import full_box
from shardckpt.manifest import Piece, Span, TensorEntry
from shardckpt.plan.naming.fqn import map_kept_names, read_config_ties


def entry(shape: tuple[int, ...] = (4, 2), stored: str = "float32") -> TensorEntry:
    return TensorEntry(("x",), shape, stored, (Piece(full_box(shape), "a", Span(0, 4)),))


@pytest.mark.parametrize(
    ("embedding", "head"),
    [
        ("model.embed_tokens.weight", "lm_head.weight"),
        ("transformer.wte.weight", "lm_head.weight"),
        ("shared.weight", "lm_head.weight"),
        ("gpt_neox.embed_in.weight", "embed_out.weight"),
        ("bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight"),
        ("model.language_model.embed_tokens.weight", "model.lm_head.weight"),
    ],
)
def test_a_config_ties_output_to_input(embedding: str, head: str) -> None:
    names = {head: entry(), "norm.weight": entry((2,)), embedding: entry()}
    assert read_config_ties({"tie_word_embeddings": True}, names) == {head: embedding}


@pytest.mark.parametrize(
    "config", [{}, {"tie_word_embeddings": False}, {"tie_word_embeddings": "yes"}, {"text_config": 5}]
)
def test_without_a_clear_word_nothing_is_tied(config: dict[str, object]) -> None:
    names = {"lm_head.weight": entry(), "model.embed_tokens.weight": entry()}
    assert read_config_ties(config, names) == {}


def test_the_text_part_of_a_config_counts_where_the_top_says_nothing() -> None:
    names = {"lm_head.weight": entry(), "model.embed_tokens.weight": entry()}
    assert read_config_ties({"text_config": {"tie_word_embeddings": True}}, names)
    assert not read_config_ties({"tie_word_embeddings": False, "text_config": {"tie_word_embeddings": True}}, names)


@pytest.mark.parametrize("other", [entry((5, 2)), entry((4, 2), "float16")])
def test_arrays_of_another_kind_are_not_tied(other: TensorEntry) -> None:
    names = {"lm_head.weight": other, "model.embed_tokens.weight": entry()}
    assert read_config_ties({"tie_word_embeddings": True}, names) == {}


def test_the_first_name_of_a_shared_array_is_kept() -> None:
    paths = {"a": ("a",), "b": ("b",), "c": ("c",)}
    assert map_kept_names(["a", "b", "c"], paths, {("b",): ("a",)}) == {"b": "a"}
    assert map_kept_names(["b", "a", "c"], paths, {("b",): ("a",)}) == {"a": "b"}


def test_the_input_embedding_is_kept_over_an_earlier_name() -> None:
    paths = {"head": ("head",), "embed": ("embed",), "third": ("third",)}
    aliases = {("embed",): ("head",), ("third",): ("head",)}
    assert map_kept_names(list(paths), paths, aliases, prefer=["embed"]) == {"head": "embed", "third": "embed"}


def test_a_tie_to_a_name_that_is_left_out_drops_nothing() -> None:
    """With the first name excluded, the second is the one that is written; with three, the second stands for both."""
    paths = {"b": ("b",), "c": ("c",)}
    aliases = {("b",): ("a",), ("c",): ("a",)}
    assert map_kept_names(["b"], paths, aliases) == {}
    assert map_kept_names(["b", "c"], paths, aliases) == {"c": "b"}
