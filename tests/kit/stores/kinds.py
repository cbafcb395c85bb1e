"""Kinds of checkpoints for tests of publishing, where any name will do."""

import re

from shardckpt.storage.replaceable import FileKind, FolderKind

FOLDER = FolderKind("one checkpoint of a test", payload=re.compile(r"(sub/)?[^/]*\.(bin|json)|COMMIT"))
FILE = FileKind("a file of a test", lambda head: not head.startswith(b"#"))
