"""`verify` lists every fault it can find without a truth to compare with."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh

import shardckpt
from shardckpt.boxes import Box
from shardckpt.errors import IncompleteError, SourceNotFoundError, UnknownFormatError
from shardckpt.native.payload import BLOCK_BYTES, GROUP_BYTES
from shardckpt.storage.local import LocalStore
from shardckpt.storage.store import Read
from tests.kit.runs.cases import NAMES, read_case
from tests.kit.writers.native_writer import SAVE, with_grouped_hashes, write_step
from tests.kit.writers.share_writers import as_rank, dtensor


@pytest.mark.parametrize("name", NAMES)
def test_checkpoints_of_frameworks_are_intact(name: str, fixtures: Path, tmp_path: Path) -> None:
    case = read_case(fixtures, name, tmp_path)
    found = shardckpt.verify(str(case.source))
    assert found.ok, found.problems
    assert found.tensor_count == len(shardckpt.inspect(str(case.source)).tensors)


def test_the_checksums_of_torch_archives_are_compared(tmp_path: Path) -> None:
    """torch.load ignores them; a flipped bit in the payload is named with its file."""
    file = tmp_path / "a.pt"
    torch.save({"w": torch.arange(1000.0)}, file)
    found = shardckpt.verify(str(file))
    assert found.ok
    assert found.checked_bytes >= 4000
    raw = bytearray(file.read_bytes())
    at = raw.index(torch.arange(1000.0).numpy().tobytes()) + 1234
    raw[at] ^= 1
    file.write_bytes(raw)
    [problem] = shardckpt.verify(str(file)).problems
    assert "checksum" in problem.message
    assert problem.file == "a.pt"


@pytest.mark.parametrize("legacy", [False, True])
def test_each_tensor_that_differs_between_ranks_is_listed(legacy: bool, tmp_path: Path) -> None:
    for rank in range(2):
        with as_rank(rank, 2):
            weight = dtensor(torch.arange(4.0), init_device_mesh("cpu", (2,)))
        plain = {"a": torch.full((3,), float(rank)), "b": torch.ones(3), "c": torch.full((5,), float(rank))}
        state = {"model": {"w": weight, **plain}}
        torch.save(state, tmp_path / f"rank{rank}.pt", _use_new_zipfile_serialization=not legacy)
    problems = shardckpt.verify(tmp_path).problems
    assert [(problem.kind, problem.tensors) for problem in problems] == [
        ("overlap", ("model.a",)),
        ("overlap", ("model.c",)),
    ]
    assert all(problem.file == "rank1.pt" and "rank0.pt" in problem.found for problem in problems)


def test_every_missing_piece_is_listed(fixtures: Path, tmp_path: Path) -> None:
    source = tmp_path / "src"
    shutil.copytree(fixtures / "dcp_fsdp2_llama_w2" / "ckpt", source)
    (source / "__1_0.distcp").unlink()
    found = shardckpt.verify(str(source))
    assert not found.ok
    assert len(found.problems) > 10
    assert all(p.message.isprintable() for p in found.problems)
    assert any(
        "model.layers.0.mlp.up_proj.weight [" in p.message and "__1_0.distcp" in p.message for p in found.problems
    )


@pytest.mark.parametrize("kind", ["native", "dcp", "safetensors"])
def test_a_link_to_nowhere_is_called_that(kind: str, tmp_path: Path) -> None:
    save_file({"w": torch.ones(4)}, tmp_path / "src.safetensors")
    shardckpt.convert(tmp_path / "src.safetensors", tmp_path / "out", to=kind)
    [file] = [path for path in (tmp_path / "out").iterdir() if path.suffix in (".safetensors", ".distcp")]
    file.unlink()
    file.symlink_to("gone")
    [problem] = shardckpt.verify(tmp_path / "out").problems
    assert problem.message.startswith(f"{file}: this link leads nowhere; found gone")


def test_an_unreadable_header_is_a_problem_and_not_an_exception(tmp_path: Path) -> None:
    save_file({"w": torch.ones(4)}, tmp_path / "model.safetensors")
    raw = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(raw.replace(b'"F32"', b'"F99"'))
    found = shardckpt.verify(str(tmp_path))
    assert not found.ok
    [problem] = found.problems
    assert "F99" in problem.message
    assert (problem.kind, problem.file) == ("unsupported", "model.safetensors")


def test_nothing_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SourceNotFoundError):
        shardckpt.verify(str(tmp_path / "none"))
    with pytest.raises(UnknownFormatError):
        shardckpt.verify(str(tmp_path))


class TestNativeSteps:
    """Every byte of every file of a step counts."""

    @pytest.fixture
    def step(self, tmp_path: Path) -> Path:
        state = {"model": {"w": torch.arange(6.0), "b": torch.ones(3)}, "n": 5}
        return write_step(tmp_path / "step", state, {("model", "w"): [(0, Box((0,), (2,))), (1, Box((2,), (4,)))]})

    def test_a_step_as_saved_is_intact(self, step: Path) -> None:
        found = shardckpt.verify(str(step))
        assert found.ok, found.problems
        payload = sum(file.stat().st_size for file in step.glob("*.safetensors"))
        assert (found.format, found.tensor_count, found.checked_bytes) == ("native", 2, payload)

    @pytest.mark.parametrize("suffix", ["-00000-00.safetensors", "-00001-00.safetensors", ".manifest.json", "COMMIT"])
    def test_any_flipped_bit_is_found_and_its_file_named(self, step: Path, suffix: str) -> None:
        [file] = [each for each in step.iterdir() if each.name.endswith(suffix)]
        data = file.read_bytes()
        header = int.from_bytes(data[:8], "little") + 8 if "safetensors" in suffix else len(data)
        for at in range(len(data)):
            if 700 < at < header - 50 and at % 50:
                continue  # the spaces that fill a header
            changed = bytearray(data)
            changed[at] ^= 1 << at % 8
            file.write_bytes(changed)
            found = shardckpt.verify(str(step))
            assert not found.ok, f"byte {at} of {file.name}"
            assert file.name in found.problems[0].message, (at, found.problems)

    def test_file_block_and_tensors_are_named(self, tmp_path: Path) -> None:
        state = {"first": torch.zeros(GROUP_BYTES // 4), "second": torch.zeros(GROUP_BYTES // 2)}
        step = write_step(tmp_path / "step", state)
        [file] = step.glob("*.safetensors")
        with file.open("r+b") as opened:
            opened.seek(GROUP_BYTES + 100)
            opened.write(b"\x01")
            opened.seek(2 * GROUP_BYTES + 100)
            opened.write(b"\x01")
        one, two = shardckpt.verify(str(step)).problems
        assert f"{file.name}: block 32, bytes {GROUP_BYTES} to {GROUP_BYTES + BLOCK_BYTES} " in one.message
        assert ": first, second;" in one.message
        assert ": block 64," in two.message
        assert ": second;" in two.message
        assert (one.kind, one.file, one.rank, one.tensors) == ("checksum", file.name, 0, ("first", "second"))
        assert one.byte_range == (GROUP_BYTES, BLOCK_BYTES)
        assert f"found {one.found}; expected {one.expected}." in str(one)
        assert len(one.expected) == len(one.found) == 16

    def test_a_very_large_step_is_checked_by_groups_of_blocks(self, tmp_path: Path) -> None:
        state = {"first": torch.zeros(GROUP_BYTES // 4), "second": torch.zeros(GROUP_BYTES // 2)}
        step = write_step(tmp_path / "step", state, change=with_grouped_hashes)
        [file] = step.glob("*.safetensors")
        with file.open("r+b") as opened:
            opened.seek(2 * GROUP_BYTES - 100)
            opened.write(b"\x01")
        [one] = shardckpt.verify(str(step)).problems
        assert f"{file.name}: blocks 32 to 63, bytes {GROUP_BYTES} to {2 * GROUP_BYTES} " in one.message

    def test_small_blocks_are_read_together(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        step = write_step(tmp_path / "step", {"w": torch.zeros(GROUP_BYTES // 2)})
        [size] = [file.stat().st_size for file in step.glob("*.safetensors")]
        sizes: list[int] = []
        read = LocalStore.read

        def note(store: LocalStore, reads: Sequence[Read]) -> None:
            sizes.extend(len(each.buffer) for each in reads if each.name.endswith(".safetensors"))
            read(store, reads)

        monkeypatch.setattr(LocalStore, "read", note)
        assert shardckpt.verify(step).ok
        assert sizes == [GROUP_BYTES, GROUP_BYTES, size - 2 * GROUP_BYTES]

    def test_a_file_that_is_gone_cut_or_longer_is_found(self, step: Path) -> None:
        file = step / f"{SAVE}-00001-00.safetensors"
        data = file.read_bytes()
        file.write_bytes(data + b"\0")
        [problem] = shardckpt.verify(str(step)).problems
        assert problem.message == f"{file.name} has 1 more bytes than were saved"
        assert (problem.kind, problem.file, problem.found) == ("wrong_size", file.name, f"{len(data) + 1} bytes")
        file.write_bytes(data[:-1])
        short = shardckpt.verify(str(step)).problems[0]
        assert (short.kind, short.tensors, short.box) == ("truncated", ("model.w",), ((2,), (4,)))
        assert short.byte_range == (len(data) - 16, 16)
        assert (short.found, short.expected) == (f"{len(data) - 1} bytes", f"at least {len(data)}")
        file.unlink()
        gone = shardckpt.verify(str(step)).problems[0]
        assert (gone.kind, gone.tensors, gone.file, gone.rank) == ("missing_file", ("model.w",), file.name, 1)
        assert shardckpt.inspect(step).problems[0] == gone

    def test_the_index_for_hugging_face_counts_too(self, tmp_path: Path) -> None:
        step = write_step(tmp_path / "step", {"model": {"w": torch.ones(3)}}, alone=("model",))
        index = step / "model.safetensors.index.json"
        index.write_bytes(index.read_bytes().replace(b"total_size", b"total_sizf"))
        [problem] = shardckpt.verify(str(step)).problems
        assert f"{index.name}: block 0" in problem.message
        index.unlink()
        [problem] = shardckpt.verify(str(step)).problems
        assert problem.message == f"{index.name} is missing"

    def test_a_step_without_checksums_says_so(self, tmp_path: Path) -> None:
        step = write_step(tmp_path / "step", {"model": {"w": torch.ones(3)}}, checksums=False)
        found = shardckpt.verify(str(step))
        assert (found.ok, found.checked_bytes) == (True, 0)
        assert any("without checksums" in warning for warning in found.warnings)

    @pytest.mark.parametrize("change", [-1, 1])
    def test_the_size_of_every_file_counts_without_checksums_too(self, change: int, tmp_path: Path) -> None:
        step = tmp_path / "step"
        (tmp_path / "base").mkdir()
        (tmp_path / "base" / "config.json").write_text('{"model_type": "small"}')
        shardckpt.save({"w": torch.ones(3)}, step, model_files=tmp_path / "base", checksums=False)
        for pattern in ("*.config.json", "*.safetensors"):
            (file,) = step.glob(pattern)
            data = file.read_bytes()
            file.write_bytes(data[:change] if change < 0 else data + b" ")
            found = shardckpt.verify(step)
            assert [problem.file for problem in found.problems] == [file.name], found.problems
            assert str(len(data)) in found.problems[0].expected
            file.write_bytes(data)
        assert shardckpt.verify(step).ok


def test_progress_counts_the_bytes_of_all_checksums(tmp_path: Path) -> None:
    write_step(tmp_path / "step", {"w": torch.zeros(3 * GROUP_BYTES // 4)})
    seen: list[shardckpt.results.Progress] = []
    found = shardckpt.verify(tmp_path / "step", on_progress=seen.append)
    assert seen[-1].done_bytes == seen[-1].total_bytes == found.checked_bytes
    assert len(seen) == 4, "a group of blocks at a time"


def test_every_file_that_cannot_be_read_is_listed(tmp_path: Path) -> None:
    for number in (1, 2, 3, 4):
        save_file({f"w{number}": torch.ones(4)}, tmp_path / f"model-0000{number}-of-00004.safetensors")
    (tmp_path / "model-00002-of-00004.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    (tmp_path / "model-00003-of-00004.safetensors").write_bytes(b"")
    with (tmp_path / "model-00004-of-00004.safetensors").open("ab") as file:
        file.write(b"tail")
    (tmp_path / "README.html").write_text("<html></html>")
    found = [problem.message for problem in shardckpt.verify(tmp_path).problems]
    assert len(found) == 3
    for number, what in ((2, "a Git LFS pointer"), (3, "no room"), (4, "bytes follow the tensors' data")):
        assert any(f"model-0000{number}-of" in message and what in message for message in found), found


@pytest.mark.parametrize(
    ("to", "has_checksums", "without"),
    [
        ("native", True, ()),
        ("torch", True, ()),
        ("dcp", True, (".metadata",)),
        ("safetensors", False, ("model.safetensors",)),
    ],
)
def test_the_checks_and_the_files_without_checksums_are_listed(
    to: str, has_checksums: bool, without: tuple[str, ...], tmp_path: Path
) -> None:
    save_file({"a": torch.ones(3)}, tmp_path / "src.safetensors")
    shardckpt.consolidate(tmp_path / "src.safetensors", tmp_path / "out", to=to)
    found = shardckpt.verify(tmp_path / "out")
    assert found.checks == ("structure", "coverage", "sizes", *(["checksums"] if has_checksums else []))
    assert found.files_without_checksums == without


@pytest.mark.parametrize("name", ["model.safetensors", "adapter_model.safetensors", "pytorch_model.bin"])
def test_placeholders_of_weights_that_were_not_gathered_are_named(name: str, tmp_path: Path) -> None:
    """As the Trainer writes them for a model under DeepSpeed's ZeRO-3: buffers and small parameters are there."""
    state = {"a.weight": torch.empty(0), "b.weight": torch.empty(0), "norm.bias": torch.ones(3), "none": torch.empty(0)}
    write = save_file if name.endswith(".safetensors") else torch.save
    source = tmp_path / "src"
    source.mkdir()
    write(state, source / name)  # type: ignore[operator]
    assert [problem.tensors for problem in shardckpt.verify(source).problems] == [("a.weight",), ("b.weight",)]
    with pytest.raises(IncompleteError, match=r"a.weight: it has no elements: a placeholder.* ZeRO-3 .*gather_16bit"):
        shardckpt.consolidate(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_one_file_of_several_without_checksums_is_named(tmp_path: Path) -> None:
    for rank in range(2):
        with as_rank(rank, 2):
            state = {"w": dtensor(torch.ones(4, 2), init_device_mesh("cpu", (2,)))}
            torch.save(state, tmp_path / f"rank{rank}.pt", _use_new_zipfile_serialization=rank == 0)
    found = shardckpt.verify(tmp_path)
    assert found.ok and found.checked_bytes >= 16 and found.files_without_checksums == ("rank1.pt",)
