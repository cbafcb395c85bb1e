"""What people type: types, and options that cannot be."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import shardckpt
from shardckpt.errors import UsageError
from shardckpt.offline.select.options import ConversionParams, Options, parse_dtype


@pytest.mark.parametrize(
    ("text", "expected"),
    [("bf16", "bfloat16"), ("bfloat16", "bfloat16"), ("fp32", "float32"), ("half", "float16"), ("", "")],
)
def test_types_have_short_names(text: str, expected: str) -> None:
    assert parse_dtype(text) == expected


@pytest.mark.parametrize("text", ["int8", "float8_e4m3fn", "complex64", "BF16", "torch.float16"])
def test_only_float_types_can_be_cast_to(text: str) -> None:
    with pytest.raises(UsageError, match="--dtype"):
        parse_dtype(text)


@pytest.mark.parametrize(
    ("given_options", "message"),
    [
        ({"part": "weights"}, "--part"),
        ({"dtype": "int8"}, "--dtype"),
        ({"max_shard_size": "much"}, "must be a number of bytes"),
        ({"max_memory": "1MiB"}, "--max-memory"),
        ({"jobs": 0}, "--jobs"),
    ],
)
def test_options_are_checked_before_any_file_is(given_options: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Options(**given_options).validated()  # type: ignore[arg-type]


def test_paths_are_taken_as_people_have_them(tmp_path: Path) -> None:
    src = tmp_path / "model.safetensors"
    save_file({"a.weight": np.ones((2, 3), np.float32)}, src)
    (tmp_path / "config.json").write_text("{}")
    shardckpt.consolidate(src, tmp_path / "whole", config_from=tmp_path)
    shardckpt.convert(src, tmp_path / "same")
    shardckpt.reshard(src, tmp_path / "runs" / "step-00000001", world_size=2)
    assert shardckpt.diff(tmp_path / "whole", tmp_path / "same").same
    assert shardckpt.verify(tmp_path / "whole").ok
    assert len(shardckpt.inspect(tmp_path / "whole").tensors) == 1
    assert shardckpt.repair(tmp_path / "runs" / "step-00000001", dry_run=True).written == ()
    assert shardckpt.ls(tmp_path / "runs").complete[0].number == 1
    assert shardckpt.prune(tmp_path / "runs", keep_last=1).removed == ()


@pytest.mark.parametrize(("verb", "more"), [("consolidate", {}), ("convert", {}), ("rekey", {"to": "ids"})])
def test_a_misspelled_option_is_an_error_of_the_function_that_was_called(verb: str, more: dict[str, str]) -> None:
    with pytest.raises(TypeError, match=rf"^{verb}\(\) got an unexpected keyword argument 'dtyp'$"):
        getattr(shardckpt, verb)("src", "dst", dtyp="bf16", **more)


def test_type_checkers_know_every_option() -> None:
    assert ConversionParams.__annotations__.keys() == set(Options.__dataclass_fields__)
