"""Two names are swapped in one step, or nothing happens."""

import ctypes
from types import SimpleNamespace

import pytest

from shardckpt.storage.linux_syscalls import exchange


def test_two_names_are_swapped_whatever_they_are(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "inside").write_bytes(b"1")
    (tmp_path / "b").write_bytes(b"2")
    if not exchange(str(tmp_path / "a"), str(tmp_path / "b")):
        pytest.skip("this file system cannot exchange names")
    assert (tmp_path / "a").read_bytes() == b"2"
    assert (tmp_path / "b" / "inside").read_bytes() == b"1"


def test_a_name_that_is_missing_is_an_error(tmp_path):
    (tmp_path / "a").mkdir()
    with pytest.raises(FileNotFoundError):
        exchange(str(tmp_path / "a"), str(tmp_path / "b"))


def test_a_system_without_it_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: SimpleNamespace())
    assert not exchange("a", "b")
