"""DCP folders as torch 2.13's own writers leave them, and as nobody should: every reading is exact or a named error."""

import inspect
import io
import multiprocessing
import pickle
import shutil
import zlib
from collections import OrderedDict

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp_of_torch
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from shardckpt import consolidate, verify
from shardckpt.errors import (
    FormatError,
    IncompleteError,
    OverlapError,
    TruncatedError,
    UnsafeError,
    UnsupportedError,
    UsageError,
)
from shardckpt.manifest import UNREAD, Encoded, Lazy, Span, Strided
from shardckpt.reader import Evidence, Source
from shardckpt.readers.dcp import reader as dcp
from shardckpt.readers.dcp.storage_items import decode_head
from shardckpt.storage.local import LocalStore
from shardckpt.storage.store import read_bytes
from tests.kit.writers.dcp_writers import (
    Malicious,
    archive,
    edit_metadata,
    put_object,
    save,
    save_chunked,
    tensor_record,
)
from tests.kit.writers.materialise import assert_model, assert_same, materialise, truth
from tests.kit.writers.torch_writers import choose_form

CASES = (
    "dcp_fsdp2_llama_w2",
    "dcp_fsdp1_sharded_nasty_w2",
    "dcp_fsdp2_flat_optim_nasty_w3",
    "dcp_tp2_fsdp2_w4",
    "dcp_hsdp_fsdp2_gpt2_w4",
    "dcp_plain_nasty_w1",
)


@pytest.fixture
def options(request: pytest.FixtureRequest) -> dict:
    """Arguments of torch's writer for a form."""
    return choose_form(request.param)


def open_(folder):
    return dcp.open_folder(LocalStore(str(folder)))


def contiguous_state():
    generator = torch.Generator().manual_seed(0)
    return {
        "f32": torch.randn(5, 3, generator=generator),
        "bf16": torch.randn(4, 2, generator=generator).bfloat16(),
        "f64": torch.randn(3, generator=generator, dtype=torch.float64),
        "fp8": torch.randn(8, generator=generator).to(torch.float8_e4m3fn),
        "int64": torch.arange(7),
        "uint8": torch.arange(9, dtype=torch.uint8),
        "bool": torch.tensor([True, False, True]),
        "complex64": torch.randn(3, 2, dtype=torch.complex64, generator=generator),
        "zero-dim": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
        "nested": {"list": [torch.ones(2), {"deep.er": torch.arange(4.0)}]},
        "newline\nname": torch.arange(3.0),
    }


def assert_holds(reader, value, path=()):
    """Compare a nest of tensors with what a reader has at the same paths."""
    if isinstance(value, torch.Tensor):
        assert_same(reader, path, value)
        return
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        assert_holds(reader, inner, (*path, key))


class TestFixtures:
    @pytest.mark.parametrize("case", CASES)
    def test_the_model_is_bit_exact(self, fixtures, case):
        reader = open_(fixtures / case / "ckpt")

        assert_model(reader, fixtures / case / "truth_model.safetensors")

    @pytest.mark.parametrize("case", CASES)
    def test_the_optimizer_is_bit_exact_nested_or_flat(self, fixtures, case):
        reader = open_(fixtures / case / "ckpt")

        for name, tensor in truth(fixtures / case / "truth_optim.safetensors").items():
            fqn, _, slot = name.rpartition("/")
            path = ("optim", f"state.{fqn}.{slot}") if "flat_optim" in case else ("optim", "state", fqn, slot)
            assert_same(reader, path, tensor)

    @pytest.mark.parametrize("case", CASES)
    def test_objects_are_read_when_asked(self, fixtures, case):
        reader = open_(fixtures / case / "ckpt")

        assert all(entry.value is UNREAD for entry in reader.manifest.objects.values())
        values = {entry.path: reader.load_object(entry) for entry in reader.manifest.objects.values()}
        flat, nested = ("optim", "param_groups.kernel.lr"), ("optim", "param_groups", 0, "lr")
        assert isinstance(values[flat if "flat_optim" in case else nested], float)

    def test_nothing_is_odd_about_them(self, fixtures):
        for case in CASES:
            manifest = open_(fixtures / case / "ckpt").manifest
            assert manifest.warnings == ()
            assert min(manifest.files.values()) > 0


class TestSerialisations:
    def test_torch_archives(self, tmp_path):
        state = contiguous_state()

        assert_holds(open_(save(state, tmp_path)), state)

    def test_safetensors_behind_a_metadata_file(self, tmp_path):
        state = contiguous_state()

        assert_holds(open_(save({**state, "step": 7}, tmp_path, **choose_form("safetensors"))), state)

    def test_zstd_streams(self, tmp_path):
        state = {**contiguous_state(), "t": torch.arange(12.0).reshape(3, 4).t(), "large": torch.randn(300, 100)}

        reader = open_(save(state, tmp_path, **choose_form("zstd")))

        assert_holds(reader, state)
        (piece,) = reader.resolve(reader.manifest.tensors["large",].pieces)
        assert isinstance(piece.layout, Encoded)

    def test_a_transposed_tensor_is_a_strided_piece(self, tmp_path):
        state = {"t": torch.arange(12.0).reshape(3, 4).t(), "channels": torch.randn(2, 3, 4, 5).contiguous()}
        state["channels"] = state["channels"].to(memory_format=torch.channels_last)

        reader = open_(save(state, tmp_path))

        assert_holds(reader, state)
        (piece,) = reader.resolve(reader.manifest.tensors["t",].pieces)
        assert isinstance(piece.layout, Strided)

    def test_a_slice_of_a_larger_tensor_brings_no_more_than_itself(self, tmp_path):
        state = {"view": torch.arange(1000.0)[10:20]}

        assert_holds(open_(save(state, tmp_path)), state)

    def test_one_file_for_each_tensor_and_several_threads(self, tmp_path):
        state = contiguous_state()

        assert_holds(open_(save(state, tmp_path, single_file_per_rank=False, thread_count=3)), state)

    @pytest.mark.parametrize("options", ["torch", "zstd"], indirect=True)
    def test_two_chunks_of_a_tensor_on_one_rank(self, tmp_path, options):
        state = {"w": torch.arange(24.0).reshape(6, 4)}
        boxes = {"w": [((0, 0), (4, 4)), ((4, 0), (2, 4))]}

        assert_holds(open_(save_chunked(state, boxes, tmp_path, **options)), state)

    def test_a_chunk_that_torch_overwrote_is_an_error_and_no_wrong_tensor(self, tmp_path):
        """A16: in safetensors form torch's writer keeps one chunk of a tensor in a file, and lists them all."""
        boxes = {"w": [((0, 0), (3, 4)), ((3, 0), (3, 4))]}
        reader = open_(
            save_chunked({"w": torch.arange(24.0).reshape(6, 4)}, boxes, tmp_path, **choose_form("safetensors"))
        )

        with pytest.raises(IncompleteError, match=r"'w' \[0:3, 0:4\].*does not hold this chunk"):
            reader.resolve(reader.manifest.tensors["w",].pieces)

    def test_more_slices_than_one_batch_holds(self, tmp_path):
        state = {f"t{i}": torch.full((3,), float(i)) for i in range(1100)}
        reader = open_(save(state, tmp_path))

        pieces = reader.resolve([p for e in reader.manifest.tensors.values() for p in e.pieces])

        at = [(p.file, p.layout.offset, p.layout.nbytes) for p in pieces]
        for name, place in zip(state, at, strict=True):
            assert read_bytes(reader.store, *place) == state[name].numpy().tobytes()

    def test_opening_a_slice_reads_its_frame_and_not_its_elements(self, tmp_path):
        reader = open_(save({"w": torch.zeros(1_000_000)}, tmp_path))
        read = []

        class Counting(LocalStore):
            def read(self, reads):
                read.extend(len(r.buffer) for r in reads)
                super().read(reads)

        reader.store = Counting(str(tmp_path))
        reader.resolve(reader.manifest.tensors["w",].pieces)

        assert sum(read) < 4096

    def test_slices_are_opened_by_one_batch_of_reads_for_each_512(self, tmp_path):
        reader = open_(save({f"t{i}": torch.full((3000,), float(i)) for i in range(600)}, tmp_path))
        batches = []

        class Counting(LocalStore):
            def read(self, reads):
                batches.append(len(reads))
                super().read(reads)

        reader.store = Counting(str(tmp_path))
        reader.resolve([p for e in reader.manifest.tensors.values() for p in e.pieces])

        assert [count for count in batches if count] == [2 * 512, 2 * 88]

    def test_a_zstd_window_that_asks_for_too_much_memory_is_refused(self):
        window_of_2_gib = bytes.fromhex("28b52ffd00a8") + b"\x01\x00\x00"

        with pytest.raises(FormatError, match="zstd"):
            decode_head(window_of_2_gib, 100, "here")

    def test_a_bomb_is_decoded_no_further_than_needed(self, tmp_path):
        reader = open_(save({"w": torch.zeros(30_000_000)}, tmp_path, **choose_form("zstd")))
        (piece,) = reader.resolve(reader.manifest.tensors["w",].pieces)

        assert piece.layout.nbytes < 20_000
        assert len(decode_head(read_bytes(reader.store, piece.file, 0, piece.layout.nbytes), 100, "")) == 100


def save_rank_local(rank: int, folder: str, rendezvous: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    rows = torch.arange(20.0).reshape(5, 4)
    mine = rows[:3] if rank == 0 else rows[3:]
    state = {
        "sharded": DTensor.from_local(mine, mesh, [Shard(0)], shape=torch.Size((5, 4)), stride=(4, 1)),
        "same": torch.arange(3),
        "step": 7,
        "experts": torch.full((3,), float(rank)),
        "seed": rank,
    }
    dcp_of_torch.save(state, storage_writer=FileSystemWriter(folder), use_collectives=False)
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def rank_local(tmp_path_factory):
    """A folder in which each of two ranks left metadata of its own."""
    if "use_collectives" not in inspect.signature(dcp_of_torch.save).parameters:
        pytest.skip("this torch writes the metadata of all ranks alone")
    base = tmp_path_factory.mktemp("rank_local")
    context = multiprocessing.get_context("fork")
    ranks = [
        context.Process(target=save_rank_local, args=(rank, str(base / "ckpt"), str(base / "meet")))
        for rank in range(2)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
        assert rank.exitcode == 0
    return base / "ckpt"


class TestRankLocalMetadata:
    def test_the_checkpoint_is_the_union_of_the_ranks(self, rank_local):
        assert not (rank_local / ".metadata").exists()

        reader = open_(rank_local)

        assert_same(reader, ("sharded",), torch.arange(20.0).reshape(5, 4))
        assert_same(reader, ("same",), torch.arange(3))
        assert reader.load_object(reader.manifest.objects["step",]) == 7
        assert dcp.recognize(Source(LocalStore(str(rank_local)))) is Evidence.STRUCTURE

    def test_data_of_which_ranks_stored_other_values_is_not_that_of_rank_0(self, rank_local):
        reader = open_(rank_local)
        with pytest.raises(OverlapError, match=r"__1_0.distcp: 'experts' differs between ranks; .* in __0_0.distcp"):
            assert_same(reader, ("experts",), torch.zeros(3))
        assert repr(reader.load_object(reader.manifest.objects["seed",])) == (
            "<other values in __0_0.distcp than in __1_0.distcp>"
        )
        assert [problem.kind for problem in verify(rank_local).problems] == ["overlap"]

    def test_a_missing_rank_leaves_a_gap_and_a_warning(self, rank_local, tmp_path):
        shutil.copytree(rank_local, tmp_path, dirs_exist_ok=True)
        (tmp_path / "__0.metadata").unlink()

        manifest = open_(tmp_path).manifest

        assert [piece.box.offset for piece in manifest.tensors["sharded",].pieces] == [(3, 0)]
        assert any("first __0.metadata" in warning for warning in manifest.warnings)

    def test_ranks_that_disagree_are_an_error(self, rank_local, tmp_path):
        shutil.copytree(rank_local, tmp_path, dirs_exist_ok=True)

        def other_shape(metadata):
            metadata.state_dict_metadata["same"] = tensor_record((4,), [((0,), (4,))], torch.int64)

        edit_metadata(tmp_path, other_shape, "__1.metadata")
        with pytest.raises(FormatError, match="'same' differs between ranks"):
            open_(tmp_path)

    def test_global_metadata_wins_over_rank_local_ones(self, rank_local, tmp_path):
        save({"only": torch.ones(2)}, tmp_path)
        shutil.copy(rank_local / "__1.metadata", tmp_path)

        manifest = open_(tmp_path).manifest

        assert list(manifest.tensors) == [("only",)]
        assert any("rank-local" in warning for warning in manifest.warnings)


class TestIncomplete:
    def test_a_chunk_without_storage_is_left_out_for_coverage_to_name(self, tmp_path):
        """A3: a writer thread failed, and torch committed the metadata all the same."""
        boxes = {"w": [((0,), (4,)), ((4,), (2,))]}
        save_chunked({"w": torch.arange(6.0)}, boxes, tmp_path)
        edit_metadata(tmp_path, lambda m: m.storage_data.pop(MetadataIndex("w", (4,))) and None)

        manifest = open_(tmp_path).manifest

        assert [piece.box.offset for piece in manifest.tensors["w",].pieces] == [(0,)]
        assert any("never stored" in warning and "'w'" in warning for warning in manifest.warnings)

    def test_a_missing_file_is_known_before_anything_is_read(self, tmp_path):
        save({"w": torch.ones(3), "step": 1}, tmp_path)
        (tmp_path / "__0_0.distcp").unlink()

        reader = open_(tmp_path)

        assert reader.manifest.files == {"__0_0.distcp": -1}
        with pytest.raises(IncompleteError, match=r"'w' .* is missing"):
            reader.resolve(reader.manifest.tensors["w",].pieces)
        with pytest.raises(IncompleteError, match="'step'"):
            reader.load_object(reader.manifest.objects["step",])

    @pytest.mark.parametrize("options", ["torch", "safetensors", "zstd"], indirect=True)
    def test_every_truncation_is_a_named_error(self, tmp_path, options):
        save({"first": torch.ones(3), "last": torch.randn(40)}, tmp_path, **options)
        file = tmp_path / "__0_0.distcp"
        whole = file.read_bytes()

        for length in (0, 1, 8, 9, len(whole) // 2, len(whole) - 1):
            file.write_bytes(whole[:length])
            reader = open_(tmp_path)
            with pytest.raises((TruncatedError, FormatError), match="last"):
                pieces = reader.resolve(reader.manifest.tensors["last",].pieces)
                raise_past_end(pieces, length)

    def test_a_folder_without_metadata_says_that_the_save_never_finished(self, tmp_path):
        save({"w": torch.ones(3)}, tmp_path)
        (tmp_path / ".metadata").unlink()

        assert dcp.recognize(Source(LocalStore(str(tmp_path)))) is Evidence.NAME
        with pytest.raises(IncompleteError, match="never finished"):
            open_(tmp_path)

    def test_files_of_an_earlier_larger_world_are_ignored_aloud(self, tmp_path):
        save({"w": torch.ones(3)}, tmp_path)
        (tmp_path / "__7_0.distcp").write_bytes(b"stale")

        manifest = open_(tmp_path).manifest

        assert list(manifest.files) == ["__0_0.distcp"]
        assert any("__7_0.distcp" in warning for warning in manifest.warnings)


def raise_past_end(pieces, length):
    """What `plan.coverage` does with a span beyond the end of its file."""
    for piece in pieces:
        if piece.layout.offset + piece.layout.nbytes > length:
            raise TruncatedError("last")


class TestOtherWriters:
    def test_old_metadata_has_no_version_and_no_paths(self, tmp_path):
        save({"model": {"w": torch.ones(3)}, "step": 3}, tmp_path)

        def age(metadata):
            for name in ("version", "storage_meta", "planner_data"):
                vars(metadata).pop(name, None)  # torch 2.6 writes no version

        edit_metadata(tmp_path, age)
        reader = open_(tmp_path)

        assert_same(reader, ("model.w",), torch.ones(3))
        assert reader.load_object(reader.manifest.objects["step",]) == 3

    def test_before_torch_2_3_properties_were_another_class(self, tmp_path):
        save({"w": torch.ones(3)}, tmp_path)
        raw = pickle.dumps(pickle.loads((tmp_path / ".metadata").read_bytes()), protocol=2)
        module = b"ctorch.distributed._shard.sharded_tensor.metadata\n"
        for new, old in ((b"TensorProperties", b"TensorProperties"), (b"_MEM_FORMAT_ENCODING", b"MEM_FORMAT_ENCODING")):
            name = b"ctorch.distributed.checkpoint.metadata\n" + new + b"\n"
            assert raw.count(name) == 1
            raw = raw.replace(name, module + old + b"\n")
        (tmp_path / ".metadata").write_bytes(raw)

        assert_same(open_(tmp_path), ("w",), torch.ones(3))

    def test_a_planner_may_leave_something_else_than_paths(self, tmp_path):
        save({"w": torch.ones(3)}, tmp_path)
        edit_metadata(tmp_path, lambda m: setattr(m, "planner_data", {"w": 7}))

        assert_same(open_(tmp_path), ("w",), torch.ones(3))

    def test_megatron_subclasses_the_metadata(self, tmp_path):
        save({"w": torch.ones(3)}, tmp_path)
        file = tmp_path / ".metadata"
        raw = pickle.dumps(pickle.loads(file.read_bytes()), protocol=2)
        plain = b"ctorch.distributed.checkpoint.metadata\nMetadata\n"
        assert raw.count(plain) == 1
        file.write_bytes(raw.replace(plain, b"cmegatron.core.dist_checkpointing.strategies.torch\nMCoreMetadata\n"))

        assert_same(open_(tmp_path), ("w",), torch.ones(3))

    def test_a_newer_major_version_is_read_with_a_warning(self, tmp_path):
        save({"w": torch.ones(3)}, tmp_path)
        edit_metadata(tmp_path, lambda m: setattr(m, "version", "2.0.0"))

        assert any("2.0.0" in warning for warning in open_(tmp_path).manifest.warnings)

    def test_the_same_box_twice_is_one_piece(self, tmp_path):
        save({"w": torch.ones(3)}, tmp_path)
        edit_metadata(
            tmp_path, lambda m: m.state_dict_metadata["w"].chunks.append(m.state_dict_metadata["w"].chunks[0])
        )

        assert_same(open_(tmp_path), ("w",), torch.ones(3))

    def test_an_index_without_an_offset_means_the_only_chunk(self, tmp_path):
        save({"w": torch.ones(3)}, tmp_path)

        def forget(metadata):
            metadata.storage_data = {MetadataIndex("w"): next(iter(metadata.storage_data.values()))}

        edit_metadata(tmp_path, forget)

        assert_same(open_(tmp_path), ("w",), torch.ones(3))

    def test_a_folder_below_the_store(self, tmp_path):
        save({"w": torch.ones(3), "step": 1}, tmp_path / "optimizer_0")

        reader = dcp.open_folder(LocalStore(str(tmp_path)), "optimizer_0")

        assert reader.manifest.files == {
            "optimizer_0/__0_0.distcp": (tmp_path / "optimizer_0/__0_0.distcp").stat().st_size
        }
        assert_same(reader, ("w",), torch.ones(3))
        assert reader.load_object(reader.manifest.objects["step",]) == 1

    @pytest.mark.filterwarnings("ignore")  # of torchao and torch, about themselves
    def test_weights_next_to_8_bit_optimizer_state_of_torchao_are_read(self, tmp_path, monkeypatch):
        pytest.importorskip("torchao")
        monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")  # torchao compiles its steps
        from torchao.optim import AdamW8bit

        model = torch.nn.Linear(128, 64)
        optim = AdamW8bit(model.parameters())
        model(torch.ones(1, 128)).sum().backward()
        optim.step()
        dcp_of_torch.save({"model": model.state_dict(), "optim": optim.state_dict()}, checkpoint_id=tmp_path / "c")
        consolidate(tmp_path / "c", tmp_path / "out")
        found = load_file(tmp_path / "out" / "model.safetensors")
        assert all(torch.equal(found[name], value) for name, value in model.state_dict().items())
        with pytest.raises(UnsupportedError, match=r"optim\.state\.0\.exp_avg'.*OptimState8bit.*--part model"):
            consolidate(tmp_path / "c", tmp_path / "all", part="all")


class TestRecognition:
    def source(self, folder, file=None):
        return Source(LocalStore(str(folder)), file)

    def test_by_structure(self, tmp_path):
        save({"w": torch.ones(3)}, tmp_path)

        assert dcp.recognize(self.source(tmp_path)) is Evidence.STRUCTURE

    def test_a_metadata_file_of_anything_else_is_a_name_only(self, tmp_path):
        (tmp_path / ".metadata").write_text("{}")

        assert dcp.recognize(self.source(tmp_path)) is Evidence.NAME
        with pytest.raises(FormatError):
            open_(tmp_path)

    def test_other_folders_are_not_ours(self, tmp_path):
        (tmp_path / "model.bin").write_text("{}")

        assert dcp.recognize(self.source(tmp_path)) is Evidence.NONE

    def test_one_shard_is_not_the_checkpoint(self, tmp_path):
        save({"w": torch.ones(3)}, tmp_path)
        source = self.source(tmp_path, "__0_0.distcp")

        assert dcp.recognize(source) is Evidence.NAME
        with pytest.raises(UsageError, match="Point at the folder"):
            dcp.open_source(source)


class TestObjects:
    VALUES = {  # noqa: RUF012
        "int": 3,
        "float": 0.1,
        "text": "a\nb",
        "none": None,
        "list": [1, [2, "x"], (3.5,)],
        "ordered": OrderedDict(a=1, b=2),
        "betas": (torch.tensor(0.9, dtype=torch.float64), torch.tensor(5)),
        "bytes": b"\x00\xff",
        "stream": io.BytesIO(b"extra state"),
        "big": torch.tensor([1.0, 2.0]),
    }

    @pytest.mark.parametrize("options", ["torch", "safetensors", "zstd"], indirect=True)
    def test_values_come_back(self, tmp_path, options):
        reader = open_(save(self.VALUES, tmp_path, **options))

        read = {path[-1]: reader.load_object(entry) for path, entry in reader.manifest.objects.items()}

        assert read["int"] == 3 and read["float"] == 0.1 and read["text"] == "a\nb" and read["none"] is None
        assert read["list"] == [1, [2, "x"], (3.5,)]
        assert read["betas"] == (0.9, 5)
        assert read["bytes"] == b"\x00\xff"
        assert read["stream"] == b"extra state"

    def test_bare_and_legacy_pickles(self, tmp_path):
        save({"w": torch.ones(1)}, tmp_path)
        legacy = io.BytesIO()
        torch.save({"a": [1, 2]}, legacy, _use_new_zipfile_serialization=False)
        put_object(tmp_path, "bare", pickle.dumps({"lr": 0.1}))
        put_object(tmp_path, "legacy", legacy.getvalue())
        put_object(tmp_path, "noise", b"\x01\x02")
        reader = open_(tmp_path)

        objects = reader.manifest.objects
        assert reader.load_object(objects["bare",]) == {"lr": 0.1}
        assert reader.load_object(objects["legacy",]) == {"a": [1, 2]}
        with pytest.raises(FormatError, match="neither a torch archive nor a pickle"):
            reader.load_object(objects["noise",])

    def test_an_object_that_was_never_stored(self, tmp_path):
        save({"w": torch.ones(1)}, tmp_path)
        edit_metadata(tmp_path, lambda m: m.state_dict_metadata.update(lost=BytesStorageMetadata()))
        reader = open_(tmp_path)

        with pytest.raises(IncompleteError, match="lost"):
            reader.load_object(reader.manifest.objects["lost",])


class TestMalicious:
    def test_metadata_that_would_run_code_is_refused(self, tmp_path):
        save({"w": torch.ones(1)}, tmp_path)
        trace = tmp_path / "ran"
        edit_metadata(tmp_path, lambda m: setattr(m, "planner_data", Malicious(trace)))

        with pytest.raises(UnsafeError, match="system"):
            open_(tmp_path)
        assert not trace.exists()

    @pytest.mark.parametrize("options", ["torch", "zstd"], indirect=True)
    def test_an_object_that_would_run_code_does_no_harm_until_it_is_asked_for(self, tmp_path, options):
        """A14."""
        trace = tmp_path / "ran"
        reader = open_(save({"w": torch.ones(2), "evil": Malicious(trace)}, tmp_path, **options))

        assert_same(reader, ("w",), torch.ones(2))
        with pytest.raises(UnsafeError, match="system"):
            reader.load_object(reader.manifest.objects["evil",])
        assert not trace.exists()

    def test_a_slice_that_would_run_code_is_refused(self, tmp_path):
        save({"w": torch.ones(2)}, tmp_path)
        trace = tmp_path / "ran"
        evil = archive(Malicious(trace))
        (tmp_path / "__0_0.distcp").write_bytes(evil)
        edit_metadata(tmp_path, lambda m: setattr(m.storage_data[MetadataIndex("w", (0,))], "length", len(evil)))
        reader = open_(tmp_path)

        with pytest.raises(UnsafeError, match="system"):
            reader.resolve(reader.manifest.tensors["w",].pieces)
        assert not trace.exists()


def stored(metadata, **changes):
    for name, value in changes.items():
        setattr(metadata.storage_data[MetadataIndex("w", (0, 0))], name, value)


def recorded(metadata, size, chunks, dtype=torch.float32):
    metadata.state_dict_metadata["w"] = tensor_record((1,), [((0,), (1,))], dtype)
    record = metadata.state_dict_metadata["w"]
    record.size = size
    record.chunks = [type(record.chunks[0])(o, n) for o, n in chunks]


def share_chunks(metadata):
    metadata.state_dict_metadata["v"] = tensor_record((6, 4), [])
    metadata.state_dict_metadata["v"].chunks = metadata.state_dict_metadata["w"].chunks


HOSTILE = {
    "negative dim": (FormatError, lambda m: recorded(m, (-6, 4), [((0, 0), (6, 4))])),
    "huge dim": (FormatError, lambda m: recorded(m, (1 << 70, 4), [((0, 0), (6, 4))])),
    "huge product": (FormatError, lambda m: recorded(m, (1 << 61, 1 << 61), [((0, 0), (6, 4))])),
    "float dim": (FormatError, lambda m: recorded(m, (6.0, 4), [((0, 0), (6, 4))])),
    "too many dims": (FormatError, lambda m: recorded(m, (1,) * 65, [((0,) * 65, (1,) * 65)])),
    "chunk of another rank": (FormatError, lambda m: recorded(m, (6, 4), [((0,), (6,))])),
    "chunk outside": (FormatError, lambda m: recorded(m, (6, 4), [((1, 0), (6, 4))])),
    "negative offset": (FormatError, lambda m: recorded(m, (6, 4), [((-1, 0), (6, 4))])),
    "negative size": (FormatError, lambda m: recorded(m, (6, 4), [((0, 0), (-6, 4))])),
    "chunk that is no chunk": (FormatError, lambda m: setattr(m.state_dict_metadata["w"], "chunks", [7])),
    "chunks that are no list": (FormatError, lambda m: setattr(m.state_dict_metadata["w"], "chunks", 7)),
    "chunks of two tensors": (FormatError, share_chunks),
    "record that is no record": (FormatError, lambda m: m.state_dict_metadata.update(w=7)),
    "name that is no name": (FormatError, lambda m: m.state_dict_metadata.update({7: m.state_dict_metadata["w"]})),
    "quantised": (UnsupportedError, lambda m: recorded(m, (6, 4), [((0, 0), (6, 4))], torch.quint8)),
    "no dtype": (FormatError, lambda m: setattr(m.state_dict_metadata["w"], "properties", 7)),
    "no storage data": (FormatError, lambda m: setattr(m, "storage_data", None)),
    "storage of nothing": (FormatError, lambda m: m.storage_data.update({"w": 7})),
    "parent folder": (UnsafeError, lambda m: stored(m, relative_path="../__0_0.distcp")),
    "absolute path": (UnsafeError, lambda m: stored(m, relative_path="/etc/passwd")),
    "nul in the path": (UnsafeError, lambda m: stored(m, relative_path="a\0b")),
    "no path": (FormatError, lambda m: stored(m, relative_path=7)),
    "negative place": (FormatError, lambda m: stored(m, offset=-1)),
    "negative length": (FormatError, lambda m: stored(m, length=-1)),
    "fractional place": (FormatError, lambda m: stored(m, offset=0.5)),
    "unknown transform": (UnsupportedError, lambda m: stored(m, transform_descriptors=["stream.rot13/1"])),
    "newer zstd transform": (UnsupportedError, lambda m: stored(m, transform_descriptors=["stream.zstd/2"])),
    "two transforms": (UnsupportedError, lambda m: stored(m, transform_descriptors=["stream.zstd/1"] * 2)),
    "path of no keys": (FormatError, lambda m: m.planner_data.update(w=())),
    "path of odd keys": (FormatError, lambda m: m.planner_data.update(w=("a", 1.5))),
    "path of a negative index": (FormatError, lambda m: m.planner_data.update(w=("a", -1))),
    "path of another tensor": (FormatError, lambda m: m.planner_data.update(w=("other",))),
    "no metadata at all": (FormatError, lambda m: {"w": 1}),
}


class TestHostileMetadata:
    @pytest.mark.parametrize("name", HOSTILE)
    def test_it_is_a_typed_error_that_names_the_place(self, tmp_path, name):
        expected, change = HOSTILE[name]
        save({"w": torch.ones(6, 4), "other": torch.ones(1)}, tmp_path)
        edit_metadata(tmp_path, change)

        with pytest.raises(expected, match=r"\.metadata|'w'|other") as caught:
            open_(tmp_path)
        assert "\n" not in str(caught.value)

    def test_truncated_at_every_byte(self, tmp_path):
        save({"w": torch.ones(6, 4), "step": 1}, tmp_path)
        whole = (tmp_path / ".metadata").read_bytes()

        for length in range(len(whole)):
            (tmp_path / ".metadata").write_bytes(whole[:length])
            with pytest.raises(FormatError, match=r"\.metadata"):
                open_(tmp_path)

    @pytest.mark.parametrize("offset", [1 << 61, 100_000])
    def test_a_place_beyond_the_file_is_named_with_tensor_and_box(self, tmp_path, offset):
        save({"w": torch.ones(6, 4)}, tmp_path)
        edit_metadata(tmp_path, lambda m: stored(m, offset=offset))
        reader = open_(tmp_path)

        with pytest.raises(TruncatedError, match=r"'w' \[0:6, 0:4\]"):
            reader.resolve(reader.manifest.tensors["w",].pieces)

    def test_a_slice_that_holds_another_tensor_is_an_error(self, tmp_path):
        save({"w": torch.ones(6, 4)}, tmp_path)
        for dtype, size in ((torch.float64, (6, 4)), (torch.float32, (4, 6))):
            edit_metadata(tmp_path, lambda m, d=dtype, s=size: recorded(m, s, [((0, 0), s)], d))
            reader = open_(tmp_path)
            with pytest.raises(FormatError, match="another tensor"):
                reader.resolve(reader.manifest.tensors["w",].pieces)


class TestChecksums:
    def test_every_record_of_every_slice_is_covered(self, tmp_path):
        reader = open_(save({**contiguous_state(), "step": 1}, tmp_path))

        found = list(reader.checksums())

        assert all(c.algorithm == "crc32" for c in found)
        assert all(zlib.crc32(read_bytes(reader.store, c.file, c.offset, c.nbytes)) == c.value for c in found)
        covered = {(c.offset, c.nbytes) for c in found}
        pieces = reader.resolve([p for e in reader.manifest.tensors.values() for p in e.pieces])
        assert {(p.layout.offset, p.layout.nbytes) for p in pieces} <= covered

    def test_where_torch_left_them_out_there_are_none(self, tmp_path):
        before = torch.serialization.get_crc32_options()
        torch.serialization.set_crc32_options(False)
        try:
            save({"w": torch.ones(3)}, tmp_path)
        finally:
            torch.serialization.set_crc32_options(before)

        reader = open_(tmp_path)
        assert list(reader.checksums()) == []
        assert_same(reader, ("w",), torch.ones(3))

    @pytest.mark.parametrize("options", ["safetensors", "zstd"], indirect=True)
    def test_other_forms_store_none(self, tmp_path, options):
        assert list(open_(save({"w": torch.ones(3)}, tmp_path, **options)).checksums()) == []


def test_pieces_are_lazy_until_resolved(tmp_path):
    reader = open_(save({"w": torch.ones(3)}, tmp_path))
    (piece,) = reader.manifest.tensors["w",].pieces

    assert isinstance(piece.layout, Lazy)
    (resolved,) = reader.resolve([piece])
    assert isinstance(resolved.layout, Span)
    assert reader.resolve([resolved]) == [resolved]
    assert materialise(reader, ("w",)).tobytes() == torch.ones(3).numpy().tobytes()
