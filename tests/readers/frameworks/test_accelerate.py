"""Folders of `Accelerator.save_state`: one vocabulary of paths, whatever the form on disk."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh

import shardckpt
from shardckpt.errors import AmbiguousError, IncompleteError, UnsafeError, UnsupportedError, UsageError
from shardckpt.manifest import UNREAD
from shardckpt.plan.naming.sections import find_sections
from shardckpt.reader import Evidence, Source
from shardckpt.readers.frameworks import accelerate
from shardckpt.readers.registry import detect
from shardckpt.storage.local import LocalStore
from tests.kit.writers.dcp_writers import Malicious, save
from tests.kit.writers.materialise import assert_model, assert_same, truth
from tests.kit.writers.share_writers import as_rank, dtensor, sharded

CASES = (
    "accelerate_fsdp1_full_gpt2_w2",
    "accelerate_fsdp1_sharded_llama_w2",
    "accelerate_fsdp2_full_llama_w2",
    "accelerate_fsdp2_sharded_gpt2_w2",
)
W = torch.arange(6.0).reshape(2, 3)


def open_(folder):
    return accelerate.open_source(Source(LocalStore(str(folder))))


def optimizer(slots=("exp_avg",)):
    return {"state": {"w": dict.fromkeys(slots, W + 1)}, "param_groups": [{"params": ["w"], "lr": 0.1}]}


def save_loop(folder):
    folder.mkdir(exist_ok=True)
    torch.save({"step": 3, "states": torch.arange(5)}, folder / "random_states_0.pkl")
    torch.save({"last_epoch": 2}, folder / "scheduler.bin")


class TestFixtures:
    @pytest.mark.parametrize("case", CASES)
    def test_model_and_optimizer_are_bit_exact_under_the_same_paths(self, fixtures, case):
        reader = open_(fixtures / case / "ckpt")

        assert_model(reader, fixtures / case / "truth_model.safetensors")
        for name, tensor in truth(fixtures / case / "truth_optim.safetensors").items():
            fqn, _, slot = name.rpartition("/")
            assert_same(reader, ("optimizer", "state", fqn, slot), tensor)

    @pytest.mark.parametrize("case", CASES)
    def test_they_are_recognized_before_any_other_format(self, fixtures, case):
        source = Source(LocalStore(str(fixtures / case / "ckpt")))

        assert accelerate.recognize(source) is Evidence.STRUCTURE
        assert detect(source) is accelerate.FORMAT

    @pytest.mark.parametrize("case", CASES)
    def test_the_parts_are_found_and_the_loop_is_listed_unread(self, fixtures, case):
        reader = open_(fixtures / case / "ckpt")

        parts = find_sections(reader.manifest)
        assert (parts.model, parts.optimizers) == (("model",), (("optimizer",),))
        assert parts.others == (("random_states_0.pkl",), ("random_states_1.pkl",), ("scheduler.bin",))
        assert reader.manifest.objects["scheduler.bin",].value is UNREAD
        assert reader.load_object(reader.manifest.objects["scheduler.bin",])["last_epoch"] >= 0

    @pytest.mark.parametrize("case", CASES)
    def test_hyper_parameters_and_checksums_come_through(self, fixtures, case):
        reader = open_(fixtures / case / "ckpt")

        entries = [e for p, e in reader.manifest.objects.items() if p[:2] == ("optimizer", "param_groups")]
        values = [reader.load_object(entry) for entry in entries]
        assert "lr" in str([entry.path for entry in entries]) + str(values)
        assert any(True for _ in reader.checksums())


class TestForms:
    def test_without_fsdp_as_safetensors(self, tmp_path):
        save_loop(tmp_path)
        save_file({"w": W}, tmp_path / "model.safetensors")
        save_file({"w": W + 2}, tmp_path / "model_1.safetensors")
        torch.save(optimizer(), tmp_path / "optimizer.bin")

        reader = open_(tmp_path)

        assert_same(reader, ("model", "w"), W)
        assert_same(reader, ("model_1", "w"), W + 2)
        assert_same(reader, ("optimizer", "state", "w", "exp_avg"), W + 1)

    def test_without_fsdp_as_torch_files(self, tmp_path):
        save_loop(tmp_path)
        torch.save({"w": W}, tmp_path / "pytorch_model.bin")
        torch.save({"w": W + 2}, tmp_path / "pytorch_model_1.bin")

        reader = open_(tmp_path)

        assert_same(reader, ("model", "w"), W)
        assert_same(reader, ("model_1", "w"), W + 2)

    @pytest.mark.parametrize("sharded", [False, True], ids=["full", "sharded"])
    def test_several_models_and_optimizers(self, tmp_path, sharded):
        for i in range(2):
            if sharded:
                save({"model": {"w": W + i}}, tmp_path / f"pytorch_model_fsdp_{i}")
                save({"optimizer": optimizer()}, tmp_path / f"optimizer_{i}")
            else:
                end = f"_{i}" if i else ""
                torch.save({"w": W + i}, tmp_path / f"pytorch_model_fsdp{end}.bin")
                torch.save(optimizer(), tmp_path / f"optimizer{end}.bin")

        reader = open_(tmp_path)

        for i, end in enumerate(["", "_1"]):
            assert_same(reader, (f"model{end}", "w"), W + i)
            assert_same(reader, (f"optimizer{end}", "state", "w", "exp_avg"), W + 1)
        pieces = [piece for entry in reader.manifest.tensors.values() for piece in entry.pieces]
        assert [p.box for p in reader.resolve(pieces)] == [p.box for p in pieces], "order is kept over several readers"

    def test_a_sharded_model_without_paths_in_its_metadata(self, tmp_path):
        from tests.kit.writers.dcp_writers import edit_metadata

        folder = save({"model": {"w.x": W}}, tmp_path / "pytorch_model_fsdp_0")
        edit_metadata(folder, lambda m: setattr(m, "planner_data", None))

        assert_same(open_(tmp_path), ("model", "w.x"), W)

    def test_a_merged_model_beside_the_sharded_one_is_ignored_aloud(self, tmp_path):
        save({"model": {"w": W}}, tmp_path / "pytorch_model_fsdp_0")
        save_file({"w": W + 1}, tmp_path / "model.safetensors")

        reader = open_(tmp_path)

        assert_same(reader, ("model", "w"), W)
        assert any("model.safetensors" in warning for warning in reader.manifest.warnings)

    def test_a_model_in_two_forms_is_nobody_s_guess(self, tmp_path):
        save({"model": {"w": W}}, tmp_path / "pytorch_model_fsdp_0")
        torch.save({"w": W}, tmp_path / "pytorch_model_fsdp.bin")

        with pytest.raises(AmbiguousError, match="model is here in two forms"):
            open_(tmp_path)

    @pytest.mark.parametrize("name", ["pytorch_model_fsdp_rank{}.bin", "pytorch_model_fsdp_0_rank{}.bin"])
    def test_rank_files_that_say_nothing_of_their_part_are_refused(self, tmp_path, name):
        for rank in range(2):
            torch.save({"w": W}, tmp_path / name.format(rank))

        assert accelerate.recognize(Source(LocalStore(str(tmp_path)))) is Evidence.STRUCTURE
        with pytest.raises(UnsupportedError, match=r"rank by rank.*_rank0\.bin and 1 more"):
            open_(tmp_path)

    def test_rank_files_are_put_together(self, tmp_path):
        """SHARDED with `use_dcp=False`, two models: each is one, and its optimizer by the same number."""
        source = tmp_path / "src"
        source.mkdir()
        for rank in range(2):
            with as_rank(rank, 2):
                mesh = init_device_mesh("cpu", (2,))
                for i in range(2):
                    slots = {"exp_avg": dtensor(W + 1 + i, mesh), "step": torch.tensor(3.0)}
                    groups = [{"params": ["w"], "lr": 0.1}]
                    torch.save({"w": dtensor(W + i, mesh)}, source / f"pytorch_model_fsdp_{i}_rank{rank}.bin")
                    state = {"state": {"w": slots}, "param_groups": groups}
                    torch.save(state, source / f"optimizer_{i}_rank{rank}.bin")
        save_loop(source)

        reader = open_(source)

        for i, end in enumerate(["", "_1"]):
            assert_same(reader, (f"model{end}", "w"), W + i)
            assert_same(reader, (f"optimizer{end}", "state", "w", "exp_avg"), W + 1 + i)
        shardckpt.consolidate(str(source), str(tmp_path / "out"), model_key="model_1")
        assert torch.equal(load_file(tmp_path / "out/model.safetensors")["w"], W + 1)
        others = shardckpt.inspect(str(source)).parts["other"]
        assert set(others) >= {"random_states_0.pkl", "scheduler.bin"}

    def test_the_files_of_a_trainers_loop_are_listed(self, tmp_path):
        """`transformers.Trainer` with FSDP writes Accelerate's files, and its own names beside them."""
        torch.save({"w": W}, tmp_path / "pytorch_model_fsdp.bin")
        for name in ("scheduler.pt", "rng_state_0.pth", "rng_state_1.pth", "training_args.bin"):
            torch.save({"a": 1}, tmp_path / name)
        others = shardckpt.inspect(str(tmp_path)).parts["other"]
        assert sorted(others) == ["rng_state_0.pth", "rng_state_1.pth", "scheduler.pt"]

    def test_local_states_are_put_together_with_shapes_from_elsewhere(self, tmp_path):
        """LOCAL: flat parameters alone."""
        source = tmp_path / "src"
        source.mkdir()
        for rank in range(2):
            with as_rank(rank, 2):
                flat = sharded(W.reshape(-1), rank, 2)
                torch.save({"_flat_param": flat}, source / f"pytorch_model_fsdp_rank{rank}.bin")
        save_loop(source)
        torch.save({"w": W}, tmp_path / "shapes.pth")

        with pytest.raises(UsageError, match="--shapes-from"):
            shardckpt.consolidate(str(source), str(tmp_path / "out"))
        shardckpt.consolidate(str(source), str(tmp_path / "out"), shapes_from=str(tmp_path / "shapes.pth"))
        assert torch.equal(load_file(tmp_path / "out/model.safetensors")["w"], W)

    def test_an_unfinished_sharded_model_is_named(self, tmp_path):
        save({"model": {"w": W}}, tmp_path / "pytorch_model_fsdp_0")
        (tmp_path / "pytorch_model_fsdp_0/.metadata").unlink()

        with pytest.raises(IncompleteError, match=r"pytorch_model_fsdp_0.*never finished"):
            open_(tmp_path)

    def test_a_malicious_loop_file_does_no_harm_until_it_is_asked_for(self, tmp_path):
        trace = tmp_path / "ran"
        torch.save({"w": W}, tmp_path / "pytorch_model_fsdp.bin")
        torch.save(Malicious(trace), tmp_path / "custom_checkpoint_0.pkl")

        reader = open_(tmp_path)

        assert_same(reader, ("model", "w"), W)
        with pytest.raises(UnsafeError):
            reader.load_object(reader.manifest.objects["custom_checkpoint_0.pkl",])
        assert not trace.exists()

    @pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt", "pytorch_model.bin", "notes.txt"])
    def test_folders_of_others_are_not_taken(self, tmp_path, name):
        (tmp_path / name).write_bytes(b"\0" * 100)
        (tmp_path / "scheduler.bin").write_bytes(b"\0" * 100)

        assert accelerate.recognize(Source(LocalStore(str(tmp_path)))) is Evidence.NONE
