"""What a user types is taken for the place it names."""

import os
from pathlib import Path

import pytest

from shardckpt.errors import UsageError
from shardckpt.storage.local import LocalStore
from shardckpt.storage.resolve_url import kind, local_path, mount_store, open_place, open_store, split
from tests.kit.stores.bucket import Bucket


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("ckpt", "ckpt"),
        ("/a/b", "/a/b"),
        ("file:///a/b", "/a/b"),
        ("C:odd", "C:odd"),
        ("a:b/c", "a:b/c"),
        ("s3://bucket/x", None),
        ("hf://org/model", None),
        ("simplecache::s3://bucket/x", None),
    ],
)
def test_paths_are_local_and_protocols_are_not(url, path):
    assert local_path(url) == path


@pytest.mark.parametrize(("url", "what"), [("", "must not be empty"), ("a\0b", "must not contain a NUL")])
def test_what_names_nothing_is_the_callers_mistake(url, what):
    for ask in (open_store, split, kind):
        with pytest.raises(UsageError, match=what):
            ask(url)


def test_a_tilde_is_a_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert local_path("~/run/step-1") == f"{tmp_path}/run/step-1"
    assert local_path("./~/run") == "./~/run"
    assert split("~/run") == (str(tmp_path), "run")
    assert kind("~") == "folder"
    assert open_store("~").url == str(tmp_path)


@pytest.mark.parametrize("url", ["~", "~/run"])
def test_a_home_folder_that_is_not_known_is_an_error_and_not_a_folder_of_that_name(url, monkeypatch):
    monkeypatch.setattr("os.path.expanduser", lambda path: path)  # neither HOME nor an entry of the user
    with pytest.raises(UsageError, match=r"the home folder of the user is not known.*Set HOME"):
        open_store(url)


def test_a_tilde_in_a_url_is_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert local_path("file://~/run") == "~/run"
    assert open_store("memory://~/run").url == "memory://~/run"


def test_a_path_opens_a_local_store_and_a_url_a_remote_one():
    Bucket.reset()
    assert isinstance(open_store("ckpt"), LocalStore)
    assert isinstance(open_store("file:///ckpt"), LocalStore)
    assert not open_store("bucket://b/x").capabilities.is_local


@pytest.mark.parametrize(
    ("url", "parts"),
    [
        ("/a/b", ("/a", "b")),
        ("/a/b/", ("/a", "b")),
        ("/a", ("/", "a")),
        ("a", (".", "a")),
        ("a/b.pt", ("a", "b.pt")),
        ("file:///a/b", ("/a", "b")),
        ("s3://bucket/x", ("s3://bucket", "x")),
        ("s3://bucket/x/y.pt/", ("s3://bucket/x", "y.pt")),
    ],
)
def test_a_place_is_a_folder_and_a_name(url, parts):
    assert split(url) == parts


@pytest.mark.parametrize("url", ["/", "..", "a/..", ".", "s3://bucket", "s3://"])
def test_a_place_in_no_folder_has_no_name(url):
    with pytest.raises(UsageError):
        split(url)


def test_a_place_is_a_file_a_folder_or_missing(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    os.symlink("gone", tmp_path / "dangling")
    assert kind(str(tmp_path)) == kind(f"{tmp_path}/") == kind(f"file://{tmp_path}") == "folder"
    assert kind(str(tmp_path / "file")) == "file"
    assert (
        kind(str(tmp_path / "no"))
        == kind(str(tmp_path / "dangling"))
        == kind(str(tmp_path / "file" / "x"))
        == "missing"
    )


def test_a_remote_place_is_a_file_a_folder_or_missing():
    Bucket.reset()
    Bucket.objects["b/x/file"] = b""
    assert kind("bucket://b/x/file") == "file"
    assert kind("bucket://b/x") == kind("bucket://b/x/") == "folder"
    assert kind("bucket://b/y") == "missing"


@pytest.mark.usefixtures("s3_driver")
def test_s3_places_too(s3_bucket):
    assert kind(s3_bucket) == "folder"
    assert kind(f"{s3_bucket}/x") == "missing"
    with open_store(s3_bucket).create("x/file") as writer:
        writer.write(b"1")
    assert kind(f"{s3_bucket}/x") == "folder"
    assert kind(f"{s3_bucket}/x/file") == "file"
    assert kind("s3://no-such-bucket-at-all/x") == "missing"


def test_a_mounted_store_is_opened_under_its_url_until_the_context_ends(tmp_path):
    (tmp_path / "step-1").mkdir()
    (tmp_path / "step-1" / "COMMIT").write_bytes(b"x")
    with mount_store("shardckpt-memory://0a", LocalStore(str(tmp_path))):
        assert open_store("shardckpt-memory://0a/step-1").size("COMMIT") == 1
        assert open_store("shardckpt-memory://0a/").size("step-1/COMMIT") == 1
        assert open_store("shardckpt-memory://0ab").list() == []
        names = ("", "/step-1", "/step-1/COMMIT", "/step-2")
        assert [kind(f"shardckpt-memory://0a{name}") for name in names] == ["folder", "folder", "file", "missing"]
        assert kind("shardckpt-memory://0ab") == "missing"
    assert open_store("shardckpt-memory://0a").list() == []


@pytest.mark.parametrize("url", ["s3:/bucket/x", "S3:/bucket/x", "gs:/bucket/x"])
def test_a_url_with_one_slash_is_no_folder(url, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=rf"two slashes.*Write {url[:2].lower()}://bucket/x, or \./{url}"):
        open_store(url)
    assert local_path(f"./{url}") == f"./{url}"
    os.makedirs(url[:3])
    assert local_path(url) == url, "a folder of this name is here"


def test_a_protocol_in_capitals_is_corrected():
    with pytest.raises(UsageError, match="Write it with small letters: s3://bucket/x"):
        open_store("S3://bucket/x")


def test_a_relative_path_may_have_the_name_of_a_scheme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert isinstance(open_place("shardckpt-memory"), LocalStore) and kind("shardckpt-memory") == "missing"
