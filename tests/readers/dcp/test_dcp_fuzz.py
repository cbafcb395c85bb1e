"""Damage of every kind to a DCP folder is a typed error, or leaves places that lie inside their files."""

import os
import random

import pytest
import torch

from shardckpt.errors import CheckpointError
from shardckpt.manifest import Encoded, Span, Strided
from shardckpt.readers.dcp import reader as dcp
from shardckpt.storage.local import LocalStore
from tests.kit.writers.dcp_writers import save, save_chunked
from tests.kit.writers.torch_writers import FORMS

ROUNDS = int(os.environ.get("SHARDCKPT_FUZZ_ROUNDS", "250"))
"""Mutations of each file; set it higher to search for longer."""


def flipped(data: bytes, dice: random.Random) -> bytes:
    out = bytearray(data)
    for _ in range(dice.randint(1, 4)):
        out[dice.randrange(len(out))] ^= 1 << dice.randrange(8)
    return bytes(out)


def replaced(data: bytes, dice: random.Random) -> bytes:
    """Numbers at their borders are where parsers break."""
    at = dice.randrange(len(data))
    value = dice.choice(
        [b"\0", b"\xff", b"\x7f\xff\xff\xff", b"\xff" * 8, b"\x8c\x01", b".", b"R", b"h\0", b"PK\x05\x06"]
    )
    return data[:at] + value + data[at + len(value) :]


def cut(data: bytes, dice: random.Random) -> bytes:
    return data[: dice.randrange(len(data))]


def shortened(data: bytes, dice: random.Random) -> bytes:
    at = dice.randrange(len(data))
    return data[:at] + data[at + dice.randint(1, 40) :]


def repeated(data: bytes, dice: random.Random) -> bytes:
    at, n = dice.randrange(len(data)), dice.randint(1, 60)
    return data[:at] + data[at : at + n] * 2 + data[at + n :]


MUTATIONS = (flipped, replaced, cut, shortened, repeated)


def read_all(folder) -> None:
    """Do everything that a reader can be asked for."""
    reader = dcp.open_folder(LocalStore(str(folder)))
    for entry in reader.manifest.tensors.values():
        for piece in reader.resolve(entry.pieces):
            assert piece.box.within(entry.shape)
            assert isinstance(piece.layout, Span | Strided | Encoded)
            assert 0 <= piece.layout.offset <= piece.layout.offset + piece.layout.nbytes
    for entry in reader.manifest.objects.values():
        reader.load_object(entry)
    for checksum in reader.checksums():
        assert checksum.offset + checksum.nbytes <= reader.manifest.files[checksum.file]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_a_damaged_file_is_a_typed_error_or_harmless(tmp_path, form, name):
    state = {"w": torch.arange(24.0).reshape(6, 4), "t": torch.ones(3, dtype=torch.bool), "lr": 0.1, "l": [1, "x"]}
    boxes = {"w": [((0, 0), (4, 4)), ((4, 0), (2, 4))]} if form != "safetensors" else {}
    save_chunked(state, boxes, tmp_path, **FORMS[form]()) if boxes else save(state, tmp_path, **FORMS[form]())
    whole = (tmp_path / name).read_bytes()
    dice = random.Random(f"{form} {name}")

    refused = 0
    for _ in range(ROUNDS):
        (tmp_path / name).write_bytes(dice.choice(MUTATIONS)(whole, dice))
        try:
            read_all(tmp_path)
        except CheckpointError as error:
            refused += 1
            assert str(error)
            assert "\n" not in str(error)

    assert refused > ROUNDS // 10, "the mutations reach the parsers"
