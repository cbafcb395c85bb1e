"""A step stores the files that a model needs besides its weights: once, verified, and never of another save."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardckpt
from shardckpt.checkpoint.save.render_model_files import collect_model_files
from shardckpt.errors import ChecksumError, FormatError, RankError, UsageError
from shardckpt.tiers.local_folder import Local
from tests.kit.ranks.harness import run


class Config:
    """A config as in transformers."""

    def __init__(self) -> None:
        self.architectures, self.dtype, self.use_cache = None, None, True

    def to_json_string(self) -> str:
        return json.dumps(vars(self))

    def save_pretrained(self, folder: str) -> None:
        Path(folder, "config.json").write_text(self.to_json_string())


class Net(nn.Module):
    """A model as in transformers."""

    config_class = Config

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(4, 4)
        self.config = Config()

    @property
    def dtype(self) -> torch.dtype:
        return self.proj.weight.dtype

    def save_pretrained(self, folder: str) -> None:
        raise AssertionError("a save writes no weights of its own")


class Module(nn.Module):
    """A module around a model, as Lightning's are."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.score = Net(), nn.Linear(4, 1)


class Tokenizer:
    """A tokenizer as in transformers, which counts how often it is rendered."""

    def __init__(self, template: str = "a") -> None:
        self.chat_template, self.count = template, 0

    def __repr__(self) -> str:
        return "Tokenizer()"

    def save_pretrained(self, folder: str) -> None:
        self.count += 1
        Path(folder, "tokenizer.json").write_text(self.chat_template)


def list_model_files(step: Path) -> dict[str, str]:
    """Return the content of a step's own model files."""
    files = {path.name.partition(".")[2]: path for path in step.iterdir() if path.name.endswith(".json")}
    return {name: path.read_text() for name, path in files.items() if "manifest" not in name and "index" not in name}


def write_config(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "small"}')
    (folder / "notes.txt").write_text("not for the model")
    return folder


def test_a_step_has_the_known_files_of_a_folder(tmp_path: Path) -> None:
    state, step = {"model": nn.Linear(2, 2)}, tmp_path / "step-1"
    shardckpt.save(state, step, model_files=write_config(tmp_path / "base"))
    assert list_model_files(step) == {"config.json": '{"model_type": "small"}'}
    assert not shardckpt.verify(step).problems
    report = shardckpt.consolidate(step, tmp_path / "out")
    assert report.carried == ("config.json",)
    assert report.warnings == ()
    assert (tmp_path / "out" / "config.json").read_bytes() == (tmp_path / "base" / "config.json").read_bytes()


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ("missing", "`model_files` must be a folder; found .*missing"),
        ("empty", "`model_files` must be a folder with config or tokenizer files"),
        ("none.json", "none.json, which does not exist. For a name on a hub, pass the model and the tokenizer"),
        (__file__, "py, which is a file. Pass its folder"),
        (Net, "found the class Net. Pass an instance"),
        ([], "found an empty list. Leave it out to store none"),
        ({}, "found an empty dict"),
        (3, "`model_files` must be a folder, a model, a tokenizer.*found type int"),
        (nn.Linear(2, 2), "takes a module with one transformers model; found Linear with none"),
        (nn.ModuleList([Net(), Net()]), "one transformers model; found ModuleList with 0, 1"),
    ],
)
def test_nothing_is_written_without_model_files_to_store(given: Any, error: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match=error):
        shardckpt.save(
            {"w": torch.ones(2)},
            tmp_path / "step-1",
            model_files=tmp_path / given if isinstance(given, str) else given,
        )
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]


def test_a_model_gives_its_config_with_its_class_and_its_dtype(tmp_path: Path) -> None:
    model = Net().bfloat16()
    shardckpt.save(model, tmp_path / "step-1", model_files=[model, Tokenizer(), None])
    files = list_model_files(tmp_path / "step-1")
    assert json.loads(files["config.json"]) == {"architectures": ["Net"], "dtype": "bfloat16", "use_cache": True}
    assert files["tokenizer.json"] == "a"
    assert model.config.architectures is None, "the model's own config stays as it is"


def test_parts_with_different_files_of_one_name_are_refused_by_its_name(tmp_path: Path) -> None:
    model = Net()
    for given in ({"first": Tokenizer("a"), "second": Tokenizer("b")}, [model, write_config(tmp_path / "base")]):
        with pytest.raises(UsageError, match=r"different files with one name; found (tokenizer|config)\.json"):
            shardckpt.save(model, tmp_path / "step-1", model_files=given)
    shardckpt.save(model, tmp_path / "step-1", model_files=[Tokenizer("a"), Tokenizer("a")])
    given = collect_model_files([model], [Tokenizer("a")], {"model_files": tmp_path / "base"})
    shardckpt.save(model, tmp_path / "step-2", model_files=given)
    assert list_model_files(tmp_path / "step-2")["config.json"] == '{"model_type": "small"}', "what the user gives wins"


def test_a_model_inside_another_module_is_consolidated_under_its_own_names(tmp_path: Path) -> None:
    module = Module()
    shardckpt.save({"model": module}, tmp_path / "step-1", model_files=module)
    report = shardckpt.consolidate(tmp_path / "step-1", tmp_path / "out")
    assert set(shardckpt.load(tmp_path / "out")) == {"proj.weight", "proj.bias"}
    assert report.left_out == ("model.score.weight", "model.score.bias")
    shardckpt.consolidate(tmp_path / "step-1", tmp_path / "all.safetensors")
    shardckpt.consolidate(tmp_path / "step-1", tmp_path / "renamed", rename=["net.(.*)=other.\\1"])
    assert {"net.proj.weight", "score.bias"} < set(shardckpt.load(tmp_path / "all.safetensors"))
    assert {"other.proj.weight", "score.bias"} < set(shardckpt.load(tmp_path / "renamed"))


def test_one_of_two_models_is_written_with_its_own_config(tmp_path: Path) -> None:
    state, other = {"model": Net(), "model_1": Net()}, write_config(tmp_path / "other")
    shardckpt.save(state, tmp_path / "step-1", model_files=state["model_1"])
    report = shardckpt.consolidate(tmp_path / "step-1", tmp_path / "out")
    assert report.left_out == ("model",)
    assert torch.equal(shardckpt.load(tmp_path / "out")["proj.weight"], state["model_1"].proj.weight)
    with pytest.raises(UsageError, match="describes another model; found model; expected model_1"):
        shardckpt.consolidate(tmp_path / "step-1", tmp_path / "wrong", model_key="model")
    shardckpt.consolidate(tmp_path / "step-1", tmp_path / "first", model_key="model", config_from=other)
    assert torch.equal(shardckpt.load(tmp_path / "first")["proj.weight"], state["model"].proj.weight)


def test_names_of_a_step_are_those_of_the_state_without_a_model_in_it(tmp_path: Path) -> None:
    state = {"model": {"net.w": torch.ones(2)}}
    shardckpt.save(state, tmp_path / "step-1", model_files=Net())
    shardckpt.consolidate(tmp_path / "step-1", tmp_path / "out")
    assert set(shardckpt.load(tmp_path / "out")) == {"net.w"}


def test_a_config_without_its_model_is_not_stored_for_several_models(tmp_path: Path) -> None:
    base, pair = write_config(tmp_path / "base"), nn.ModuleDict({"a": Net(), "b": Net()})
    for number, given in enumerate(([base, Tokenizer()], [Config(), Tokenizer()], [Net(), Tokenizer()])):
        with pytest.warns(UserWarning, match=r"config\.json.* the state has model\.a, model\.b: pass the model itself"):
            shardckpt.save({"model": pair}, tmp_path / f"step-{number}", model_files=given)
        assert set(list_model_files(tmp_path / f"step-{number}")) == {"tokenizer.json"}
    shardckpt.save({"model": pair}, tmp_path / "step-9", model_files=pair["b"].config)
    shardckpt.consolidate(tmp_path / "step-9", tmp_path / "out")
    assert torch.equal(shardckpt.load(tmp_path / "out")["proj.weight"], pair["b"].proj.weight), "its config is known"


def test_a_copy_of_a_model_describes_the_only_model_like_it(tmp_path: Path) -> None:
    class OtherNet(Net):
        config_class = dict

    state = {"model": Module()}
    shardckpt.save(state, tmp_path / "step-1", model_files=Net())
    shardckpt.consolidate(tmp_path / "step-1", tmp_path / "out")
    assert set(shardckpt.load(tmp_path / "out")) == {"proj.weight", "proj.bias"}
    with pytest.warns(UserWarning, match=r"the state has model\.net: pass the model itself"):
        shardckpt.save(state, tmp_path / "step-2", model_files=OtherNet())
    assert list_model_files(tmp_path / "step-2") == {}


def test_files_that_are_not_stored_are_named(tmp_path: Path) -> None:
    base = write_config(tmp_path / "base")
    (base / "additional_chat_templates").mkdir()
    (base / "modeling.py").write_text("")
    with pytest.warns(UserWarning, match=r"does not have additional_chat_templates, modeling\.py$"):
        shardckpt.save({"w": torch.ones(2)}, tmp_path / "step-1", model_files=base)


def test_files_of_save_pretrained_that_are_not_stored_are_named(tmp_path: Path) -> None:
    class TokenizerWithCode(Tokenizer):
        def save_pretrained(self, folder: str) -> None:
            super().save_pretrained(folder)
            Path(folder, "tokenization.txt").touch()

    with pytest.warns(UserWarning, match=r"does not have tokenization\.txt$"):
        shardckpt.save({"w": torch.ones(2)}, tmp_path / "step-1", model_files=TokenizerWithCode())
    assert list_model_files(tmp_path / "step-1") == {"tokenizer.json": "a"}


@pytest.mark.parametrize("kind", ["link", "pipe", "empty"])
def test_a_known_name_without_content_is_refused(kind: str, tmp_path: Path) -> None:
    base = write_config(tmp_path / "base")
    path = base / "tokenizer.json"
    {"link": lambda: path.symlink_to("gone"), "pipe": lambda: os.mkfifo(path), "empty": path.touch}[kind]()
    with pytest.raises(UsageError, match=r"base/tokenizer\.json: a model file must have content"):
        shardckpt.save({"w": torch.ones(2)}, tmp_path / "step-1", model_files=base)
    assert not (tmp_path / "step-1").exists()


@pytest.mark.parametrize("content", ["[1]", "{", '"text"'])
def test_a_config_that_is_no_json_object_is_refused(content: str, tmp_path: Path) -> None:
    base = write_config(tmp_path / "base")
    (base / "config.json").write_text(content)
    with pytest.raises(UsageError, match=r"base/config\.json: a model's config must be a JSON object"):
        shardckpt.save({"w": torch.ones(2)}, tmp_path / "step-1", model_files=base)


def test_a_config_may_be_taken_from_another_step(tmp_path: Path) -> None:
    shardckpt.save({"w": torch.ones(2)}, tmp_path / "step-1", model_files=write_config(tmp_path / "base"))
    shardckpt.save({"w": torch.ones(2)}, tmp_path / "step-2")
    report = shardckpt.consolidate(tmp_path / "step-2", tmp_path / "out", config_from=tmp_path / "step-1")
    assert report.carried == ("config.json",)


def test_a_tokenizer_is_rendered_again_only_when_it_changed(tmp_path: Path) -> None:
    tokenizer, state = Tokenizer(), {"w": torch.ones(2)}
    run_ = shardckpt.Checkpointer(tmp_path)
    for step in (1, 2):
        run_.save(step, state, model_files=tokenizer)
    assert tokenizer.count == 1
    tokenizer.chat_template = "b"
    run_.save(3, state, model_files=tokenizer)
    found = [list_model_files(tmp_path / f"step-0000000{step}")["tokenizer.json"] for step in (1, 2, 3)]
    assert found == ["a", "a", "b"]


def test_a_background_save_stores_the_config_as_it_was_when_it_was_called(tmp_path: Path) -> None:
    model = Net()
    saving = shardckpt.async_save({"model": model}, tmp_path / "step-1", model_files=model)
    model.config.use_cache = False
    saving.result()
    assert json.loads(list_model_files(tmp_path / "step-1")["config.json"])["use_cache"]


def test_dedup_stores_a_file_once_and_keeps_it_while_steps_refer_to_it(tmp_path: Path) -> None:
    model, tokenizer = Net(), Tokenizer()
    run_ = shardckpt.Checkpointer(tmp_path / "run", dedup=True, keep_last=2)
    for step in (1, 2, 3):
        model.config.use_cache = step == 1
        run_.save(step, {"model": model}, model_files=[model, tokenizer])
    first, second, third = (tmp_path / "run" / f"step-0000000{step}" for step in (1, 2, 3))
    assert (set(list_model_files(first)), set(list_model_files(second))) == ({"tokenizer.json"}, {"config.json"})
    assert list_model_files(third) == {}
    shardckpt.copy(tmp_path / "run", tmp_path / "copied")
    report = shardckpt.consolidate(tmp_path / "copied" / third.name, tmp_path / "out")
    assert set(report.carried) == {"config.json", "tokenizer.json"}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["use_cache"] is False
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "a"
    with torch.no_grad():
        model.proj.weight.add_(1)
        model.proj.bias.add_(1)
    for step in (4, 5):
        run_.save(step, {"model": model}, model_files=Tokenizer("new"))
    assert not first.exists(), "nothing refers to it any more"


@pytest.mark.parametrize("place", ["folder", "memory"])
def test_a_step_that_is_replaced_keeps_no_file_of_the_earlier_save(place: str, tmp_path: Path) -> None:
    url = str(tmp_path / "step-1") if place == "folder" else "memory://model-files/step-1"
    for template in ("a", "b"):
        shardckpt.save({"w": torch.ones(2)}, url, overwrite=True, model_files=Tokenizer(template))
    shardckpt.copy(url, tmp_path / "copied")
    assert list_model_files(tmp_path / "copied") == {"tokenizer.json": "b"}
    assert not shardckpt.verify(url).problems


def save_with_failing_rank0(rank: int, world: int, folder: Path) -> tuple[str, str]:
    """Save with a folder that rank 0 does not have, then with one that the others do not have."""
    state, texts = {"w": torch.ones(4)}, []
    for given in (folder / ("missing" if rank == 0 else "base"), folder / ("base" if rank == 0 else "missing")):
        try:
            shardckpt.save(state, folder / "step-1", model_files=given)
            texts.append("saved")
        except (RankError, UsageError) as error:
            texts.append(f"{type(error).__name__}: {error}")
    return texts[0], texts[1]


def test_rank_0_reads_the_files_and_its_error_is_raised_on_all_ranks(tmp_path: Path) -> None:
    write_config(tmp_path / "base")
    found = run(2, save_with_failing_rank0, tmp_path)
    assert all("`model_files` must be a folder" in first and second == "saved" for first, second in found)
    assert "rank 0" in found[1][0]
    assert set(list_model_files(tmp_path / "step-1")) == {"config.json"}


def test_captures_have_the_files_too(tmp_path: Path) -> None:
    tiers = [Local(tmp_path / "local", every=1)]
    run_ = shardckpt.Checkpointer(tmp_path / "run", save_every=2, tiers=tiers)
    for step, place in ((1, tmp_path / "local"), (2, tmp_path / "run")):
        run_.save(step, {"w": torch.ones(2)}, model_files=Tokenizer())
        run_.wait()
        assert list_model_files(place / f"step-0000000{step}") == {"tokenizer.json": "a"}


def test_a_changed_byte_is_named_and_not_consolidated(tmp_path: Path) -> None:
    step = tmp_path / "step-1"
    shardckpt.save({"w": torch.ones(2)}, step, model_files=write_config(tmp_path / "base"))
    (damaged,) = step.glob("*.config.json")
    damaged.write_text('{"model_type": "Small"}')
    (problem,) = shardckpt.verify(step).problems
    assert problem.file == damaged.name
    with pytest.raises(ChecksumError, match=damaged.name):
        shardckpt.consolidate(step, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_repair_finds_the_files_and_gives_up_a_lost_one(tmp_path: Path) -> None:
    step = tmp_path / "step-1"
    shardckpt.save(Net(), step, model_files=[write_config(tmp_path / "base"), Tokenizer()])
    for name in ("COMMIT", next(step.glob("*.manifest.json")).name):
        (step / name).unlink()
    shardckpt.repair(step)
    assert set(shardckpt.consolidate(step, tmp_path / "out").carried) == {"config.json", "tokenizer.json"}
    (lost,) = step.glob("*.tokenizer.json")
    lost.unlink()
    assert f"{lost.name} is gone, and the step no longer lists it" in shardckpt.repair(step).warnings
    assert shardckpt.consolidate(step, tmp_path / "again").carried == ("config.json",)


def test_a_resharded_step_has_the_files_and_still_says_what_the_config_describes(tmp_path: Path) -> None:
    module = Module()
    shardckpt.save({"model": module}, tmp_path / "step-1", model_files=[module, Tokenizer()])
    shardckpt.reshard(tmp_path / "step-1", tmp_path / "step-2", world_size=2)
    assert not shardckpt.verify(tmp_path / "step-2").problems
    assert list_model_files(tmp_path / "step-2") == list_model_files(tmp_path / "step-1")
    shardckpt.consolidate(tmp_path / "step-2", tmp_path / "out")
    assert set(shardckpt.load(tmp_path / "out")) == {"proj.weight", "proj.bias"}


def test_a_killed_save_with_model_files_is_an_orphan_and_a_users_file_is_not(tmp_path: Path) -> None:
    for step in (1, 2):
        shardckpt.save({"w": torch.ones(2)}, tmp_path / f"step-{step}", model_files=Tokenizer())
    (tmp_path / "step-1" / "COMMIT").unlink()
    shutil.copy(next((tmp_path / "step-2").glob("*.tokenizer.json")), tmp_path / "step-2" / "tokenizer.json")
    shardckpt.save({"w": torch.ones(2)}, tmp_path / "step-3")
    removed = shardckpt.prune(tmp_path, keep_last=1, unfinished_for="0s")
    assert not (tmp_path / "step-1").exists()
    assert [path.name for path in (tmp_path / "step-2").iterdir()] == ["tokenizer.json"]
    assert removed.other_content == ("step-2/tokenizer.json",)


def test_a_model_file_of_an_impossible_size_is_not_resharded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shardckpt.save({"w": torch.ones(2)}, tmp_path / "step-1", model_files=write_config(tmp_path / "base"))
    monkeypatch.setattr("shardckpt.offline.targets.native.MAX_BYTES", 1)
    with pytest.raises(FormatError, match=r"config\.json: a model file is too large"):
        shardckpt.reshard(tmp_path / "step-1", tmp_path / "step-2", world_size=2)
