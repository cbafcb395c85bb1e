"""Sharded checkpoints of Lightning: DCP, and `meta.pt` read when asked."""

import pytest
import torch
from safetensors.torch import load_file

import shardckpt
from shardckpt.errors import FormatError, UnsafeError
from shardckpt.plan.naming.sections import find_sections
from shardckpt.reader import Evidence, Source
from shardckpt.readers.dcp import reader as dcp
from shardckpt.readers.frameworks import lightning
from shardckpt.readers.registry import detect
from shardckpt.storage.local import LocalStore
from tests.kit.writers.dcp_writers import Malicious, save
from tests.kit.writers.materialise import assert_same, truth

CASE = "fabric_fsdp_sharded_gpt2_w2"
W = torch.arange(6.0).reshape(2, 3)


def open_(folder):
    return lightning.open_source(Source(LocalStore(str(folder))))


def test_the_fixture_is_bit_exact(fixtures):
    reader = open_(fixtures / CASE / "ckpt")

    for name, tensor in truth(fixtures / CASE / "truth_model.safetensors").items():
        assert_same(reader, ("model", name), tensor)
    for name, tensor in truth(fixtures / CASE / "truth_optim.safetensors").items():
        fqn, _, slot = name.rpartition("/")
        assert_same(reader, ("optimizer", "state", fqn, slot), tensor)


def test_it_is_recognized_before_dcp(fixtures):
    source = Source(LocalStore(str(fixtures / CASE / "ckpt")))

    assert dcp.recognize(source) is Evidence.STRUCTURE
    assert detect(source) is lightning.FORMAT


def test_the_rest_of_the_state_is_one_object(fixtures):
    reader = open_(fixtures / CASE / "ckpt")

    meta = reader.load_object(reader.manifest.objects["meta.pt",])

    assert {"epoch", "step", "hparams", "counter"} <= set(meta)
    assert find_sections(reader.manifest).others == (("meta.pt",),)


def test_a_trainer_names_its_optimizers_by_number(tmp_path):
    groups = [{"params": ["w"], "lr": 0.1}]
    state = {"model": {"w": W}}
    state |= {f"optimizer_{i}": {"state": {"w": {"exp_avg": W + i}}, "param_groups": groups} for i in range(2)}
    save(state, tmp_path)
    torch.save({"pytorch-lightning_version": "2.6", "epoch": 3}, tmp_path / "meta.pt")

    reader = open_(tmp_path)

    parts = find_sections(reader.manifest)
    assert (parts.model, parts.optimizers) == (("model",), (("optimizer_0",), ("optimizer_1",)))
    assert_same(reader, ("optimizer_1", "state", "w", "exp_avg"), W + 1)


def test_a_malicious_meta_does_no_harm_until_it_is_asked_for(tmp_path):
    save({"model": {"w": W}}, tmp_path)
    torch.save(Malicious(tmp_path / "ran"), tmp_path / "meta.pt")

    reader = open_(tmp_path)

    assert_same(reader, ("model", "w"), W)
    with pytest.raises(UnsafeError):
        reader.load_object(reader.manifest.objects["meta.pt",])
    assert not (tmp_path / "ran").exists()


def test_a_truncated_meta_is_an_error_only_when_asked_for(tmp_path):
    save({"model": {"w": W}}, tmp_path)
    torch.save({"epoch": 1}, tmp_path / "meta.pt")
    whole = (tmp_path / "meta.pt").read_bytes()
    (tmp_path / "meta.pt").write_bytes(whole[:200])

    reader = open_(tmp_path)

    with pytest.raises(FormatError, match=r"meta\.pt"):
        reader.load_object(reader.manifest.objects["meta.pt",])


def test_meta_alone_is_nothing(tmp_path):
    torch.save({"epoch": 1}, tmp_path / "meta.pt")

    assert lightning.recognize(Source(LocalStore(str(tmp_path)))) is Evidence.NONE


@pytest.mark.parametrize("name", ["last.ckpt", "step-8.consolidated"])
def test_a_trainers_file_has_its_model_and_its_optimizer_found(tmp_path, name):
    """Whole files of Trainer, and what Lightning's own tool made of a sharded one: its name ends like no file's."""
    w = torch.arange(6.0).reshape(2, 3)
    slots = {"exp_avg": w + 1, "exp_avg_sq": w + 2, "step": torch.tensor(3.0)}
    torch.save(
        {
            "pytorch-lightning_version": "2.6.0",
            "state_dict": {"net.w": w},
            "optimizer_states": [{"state": {0: slots}, "param_groups": [{"params": [0], "lr": 0.1}]}],
            "lr_schedulers": [{"last_epoch": 2}],
            "loops": {"fit_loop": {"state_dict": {}}},
            "callbacks": {},
            "epoch": 1,
            "global_step": 3,
        },
        tmp_path / name,
    )

    report = shardckpt.consolidate(tmp_path / name, tmp_path / "out", part="all")

    assert torch.equal(load_file(tmp_path / "out/model.safetensors")["net.w"], w)
    assert torch.equal(load_file(tmp_path / "out/optimizer.safetensors")["net.w/exp_avg"], w + 1)
    assert {"lr_schedulers", "global_step", "epoch"} <= set(report.left_out)
