"""Steps of a PEFT model through each framework: the adapter alone, with the frozen base by reference."""

from __future__ import annotations

import json
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

import shardckpt
from shardckpt.errors import UsageError
from tests.kit.ranks.harness import raised_everywhere, run

pytest.importorskip("peft")
pytest.importorskip("transformers")

STEPS = ("step-00000002", "step-00000004")


@pytest.fixture(scope="module", autouse=True)
def _imports() -> None:
    """Import what the ranks use in the process that they are forked from."""
    from tests.kit.runs import adapters, trainers

    assert adapters.build_adapted
    assert trainers.be_rank


class _Train:
    """Trains with the callback until a step, in each rank."""

    def __init__(self, folder: Path, base: Path, root: str = "", **options: Any) -> None:
        self.folder, self.base, self.options = folder, base, options
        self.root = root or str(folder / "run")

    def __call__(
        self, rank: int, world: int, kind: str, last: int, resume: str | bool | None = None, **build: Any
    ) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Return parameters and moments as training begins, and as it ends."""
        from tests.kit.runs import adapters, trainers

        trainers.be_rank(rank, world)
        begun: list[dict[str, torch.Tensor]] = []

        class Beginning(trainers.TrainerCallback):
            def on_train_begin(self, *_: Any, model: Any, optimizer: Any, **kw: Any) -> None:
                begun.append(adapters.copy_whole(model, getattr(optimizer, "optimizer", optimizer)))

        callback = trainers.ShardckptCallback(self.root, **self.options)
        model = adapters.build_adapted(self.base, seed=1 if resume is None else 2, **build)
        arguments = {"max_steps": last, "save_steps": 2, "model": model}
        trainer, _ = trainers.build(kind, self.folder / "out", callback, Beginning(), **arguments)
        trainer.train(resume_from_checkpoint=resume)
        return begun[0], adapters.copy_whole(trainer.model, trainer.optimizer.optimizer)


def count_trained(state: dict[str, torch.Tensor]) -> int:
    """Return the bytes of what is trained, and of its moments."""
    trained = {name.rpartition(".")[0] for name in state if name.endswith(".exp_avg")}
    return sum(value.nbytes for name, value in state.items() if name in trained or ".exp_avg" in name)


def require_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    # Packed weights of 4 bits may be NaN as the type that stores them.
    assert [name for name, value in expected.items() if not torch.equal(as_bytes(found[name]), as_bytes(value))] == []


def as_bytes(value: torch.Tensor) -> torch.Tensor:
    return value.contiguous().view(-1).view(torch.uint8)


@pytest.mark.parametrize(
    ("kind", "worlds", "dtype"),
    [
        ("fsdp2", (2, 1), torch.bfloat16),
        ("fsdp2", (2, 2), torch.float32),
        ("fsdp1", (2, 2), torch.bfloat16),
        ("ddp", (1, 2), torch.float32),
    ],
)
def test_the_trainer_resumes_all_of_an_adapter(
    kind: str, worlds: tuple[int, int], dtype: torch.dtype, tmp_path: Path
) -> None:
    from tests.kit.runs import adapters

    train = _Train(tmp_path, adapters.save_base(tmp_path / "base", dtype=dtype))
    before, after = worlds
    ended = [state for _, state in run(before, train, kind, 4)]
    begun = [state for state, _ in run(after, train, kind if after > 1 else "ddp", 4, True)]
    for state in (*ended, *begun):
        require_equal(state, ended[0])
    assert sum("lora_" in name and name.endswith(".exp_avg") for name in ended[0]) == 8
    assert sum("modules_to_save." in name and name.endswith(".exp_avg") for name in ended[0]) == 5
    for name in STEPS:
        assert adapters.count_bytes(tmp_path / "run" / name) <= 2 * count_trained(ended[0])
        assert shardckpt.verify(tmp_path / "run" / name).ok


def test_a_resume_on_another_base_is_refused_by_name_and_replaces_it_by_request(tmp_path: Path) -> None:
    from tests.kit.runs import adapters

    base, other = adapters.save_base(tmp_path / "base"), adapters.save_base(tmp_path / "other", seed=3)
    ((_, ended),) = run(1, _Train(tmp_path, base), "ddp", 2)
    refused = raised_everywhere(2, lambda rank, world: _Train(tmp_path, other)(rank, world, "fsdp2", 4, True))
    for each in refused:
        assert each.is_a(UsageError)
        assert f"the step's adapter was trained on another base; found {str(other)!r}" in each.message
        assert f"expected {str(base)!r}" in each.message
    ((begun, _),) = run(1, _Train(tmp_path, other, adapter_only=False), "ddp", 4, True)
    require_equal(begun, ended)


def test_a_base_that_was_replaced_in_its_folder_is_refused(tmp_path: Path) -> None:
    from tests.kit.runs import adapters

    train = _Train(tmp_path, adapters.save_base(tmp_path / "base"))
    run(1, train, "ddp", 2)
    adapters.save_base(tmp_path / "base", seed=3)
    (refused,) = raised_everywhere(1, lambda rank, world: train(rank, world, "ddp", 4, True))
    assert refused.is_a(shardckpt.ShardckptError)
    assert f"{tmp_path}/base" in refused.message


def test_each_step_has_the_base_without_adapter_only(tmp_path: Path) -> None:
    from tests.kit.runs import adapters

    base = adapters.save_base(tmp_path / "base")
    run(1, _Train(tmp_path, base, adapter_only=False), "ddp", 4)
    for name in STEPS:
        assert adapters.count_bytes(tmp_path / "run" / name) > adapters.count_bytes(base)


def train_and_note(rank: int, world: int, train: _Train, **build: Any) -> tuple[Any, list[str]]:
    """Train four steps on one rank; the state, and the warnings about the base."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _, ended = train(rank, world, "ddp", 4, **build)
    return ended, [str(each.message) for each in caught if "adapter" in str(each.message)]


class _OnChangedBase:
    """Calls a function in each rank, where a frozen weight of each loaded base is changed."""

    def __init__(self, call: Any) -> None:
        self._call = call

    def __call__(self, *args: Any, **options: Any) -> Any:
        from tests.kit.runs import adapters

        whole_build = adapters.build_adapted

        def build_changed(*given: Any, **build: Any) -> Any:
            model = whole_build(*given, **build)
            model.base_model.model.lm_head.weight.data += 1
            return model

        adapters.build_adapted = build_changed
        return self._call(*args, **options)


def test_a_model_that_differs_from_its_base_is_copied_once(tmp_path: Path) -> None:
    from tests.kit.runs import adapters

    base = adapters.save_base(tmp_path / "base")
    train = _OnChangedBase(_Train(tmp_path, base))
    ((ended, told),) = run(1, train_and_note, train)
    assert told == []
    for name in STEPS:
        assert adapters.count_bytes(tmp_path / "run" / name) <= 2 * count_trained(ended)
    assert adapters.count_bytes(tmp_path / "run" / "adapter-base") > adapters.count_bytes(base)
    for begun, _ in run(2, train, "fsdp2", 4, True):
        require_equal(begun, ended)


def train_at_url(rank: int, world: int, train: _Train) -> tuple[Any, Any, set[str]]:
    """Train, and resume in the same process: what ended, what began, and the names next to the steps."""
    _, ended = train(rank, world, "ddp", 4)
    begun, _ = train(rank, world, "ddp", 4, True)
    filesystem, root = fsspec.url_to_fs(train.root)
    return ended, begun, {name.rpartition("/")[2] for name in filesystem.ls(root, detail=False)}


@pytest.mark.parametrize("scheme", ["file", "memory"])
def test_a_run_at_a_url_refers_to_its_copy_of_the_base(scheme: str, tmp_path: Path) -> None:
    from tests.kit.runs import adapters

    train = _Train(tmp_path, adapters.save_base(tmp_path / "base"), f"{scheme}://{tmp_path}/run")
    ((ended, begun, names),) = run(1, train_at_url, train)
    require_equal(begun, ended)
    assert {*STEPS, "adapter-base"} <= names
    if scheme == "file":
        for name in STEPS:
            assert adapters.count_bytes(tmp_path / "run" / name) <= 2 * count_trained(ended)


@pytest.mark.parametrize(("kind", "world"), [("ddp", 1), ("fsdp2", 2)])
def test_the_base_of_a_qlora_model_is_copied_once(kind: str, world: int, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    from transformers import BitsAndBytesConfig

    from tests.kit.runs import adapters

    train = _Train(tmp_path, adapters.save_base(tmp_path / "base"))
    settings = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_quant_storage=torch.float32,  # so that FSDP2 can shard it with the others
    )
    train = partial(train, quantization_config=settings)
    ended = [state for _, state in run(world, train, kind, 4)]
    for name in STEPS:
        assert adapters.count_bytes(tmp_path / "run" / name) <= 2 * count_trained(ended[0])
    for begun, _ in run(world, train, kind, 4, True):
        require_equal(begun, ended[0])


def test_the_cache_of_hugging_face_is_asked_for_a_base_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    from tests.kit.runs import adapters

    commit = "0123456789abcdef0123456789abcdef01234567"
    cached = tmp_path / "cache" / "models--org--small"
    adapters.save_base(cached / "snapshots" / commit)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text(commit)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)

    train = _Train(tmp_path, "org/small")
    ((ended, told),) = run(1, partial(train_and_note, cache_dir=str(tmp_path / "cache")), train)
    assert told == []
    for name in STEPS:
        assert adapters.count_bytes(tmp_path / "run" / name) <= 2 * count_trained(ended)
    (manifest,) = (tmp_path / "run" / STEPS[0]).glob("*.manifest.json")
    about = json.loads(manifest.read_bytes())["about"]
    assert (about["peft.base"], about["peft.revision"]) == ("org/small", commit)


def train_accelerated(
    rank: int, world: int, kind: str, folder: Path, base: Path, resume: str, **options: Any
) -> list[dict[str, torch.Tensor]]:
    """Load with Accelerate if `resume` names a checkpoint, train and save two; the states before each step."""
    from shardckpt.integrations.accelerate import register
    from tests.kit.runs import accelerators, adapters

    accelerators.be_rank(rank, world)
    accelerator, model, optimizer = adapters.prepare_adapted(kind, base, seed=2 if resume else 1)
    register(accelerator, **options)
    if resume:
        accelerator.load_state(folder / resume)
    states = [adapters.copy_whole(model, optimizer.optimizer)] if resume else []
    for name in ("one", "two"):
        adapters.take_step(accelerator, model, optimizer)
        accelerator.save_state(folder / (name + resume))
        states.append(adapters.copy_whole(model, optimizer.optimizer))
    accelerator.end_training()
    return states


@pytest.mark.parametrize(
    ("kind", "worlds", "background"), [("fsdp2", (2, 1), False), ("fsdp2", (2, 2), True), ("ddp", (1, 2), True)]
)
def test_accelerate_resumes_all_of_an_adapter(
    kind: str, worlds: tuple[int, int], background: bool, tmp_path: Path
) -> None:
    from tests.kit.runs import adapters

    base = adapters.save_base(tmp_path / "base")
    train = partial(train_accelerated, background=background)
    ended = run(worlds[0], train, kind, tmp_path, base, "")
    for begun, *_ in run(worlds[1], train, kind if worlds[1] > 1 else "ddp", tmp_path, base, "two"):
        require_equal(begun, ended[0][-1])
    for name in ("one", "two", "onetwo", "twotwo"):
        assert adapters.count_bytes(tmp_path / name / "shardckpt") <= 2 * count_trained(ended[0][-1])


def test_accelerate_refuses_another_base_and_saves_the_base_without_adapter_only(tmp_path: Path) -> None:
    from tests.kit.runs import adapters

    base, other = adapters.save_base(tmp_path / "base"), adapters.save_base(tmp_path / "other", seed=3)
    ((*_, ended),) = run(1, train_accelerated, "ddp", tmp_path, base, "")
    refused = raised_everywhere(2, lambda *at: train_accelerated(*at, "fsdp2", tmp_path, other, "two"))
    assert all("the step's adapter was trained on another base" in each.message for each in refused)
    ((begun, *_),) = run(1, partial(train_accelerated, adapter_only=False), "ddp", tmp_path, other, "two")
    require_equal(begun, ended)
    assert adapters.count_bytes(tmp_path / "onetwo" / "shardckpt") > adapters.count_bytes(base)


@pytest.mark.parametrize(("kind", "world"), [("ddp", 1), ("fsdp2", 2)])
def test_accelerate_copies_a_model_that_differs_from_its_base_once(kind: str, world: int, tmp_path: Path) -> None:
    from tests.kit.runs import adapters

    base = adapters.save_base(tmp_path / "base")
    train = _OnChangedBase(train_accelerated)
    ended = run(world, train, kind, tmp_path, base, "")
    for begun, *_ in run(world, train, kind, tmp_path, base, "two"):
        require_equal(begun, ended[0][-1])
    for name in ("one", "two", "onetwo", "twotwo"):
        assert adapters.count_bytes(tmp_path / name / "shardckpt") <= 2 * count_trained(ended[0][-1])
    (copy,) = tmp_path.rglob("adapter-base")
    assert adapters.count_bytes(copy) > adapters.count_bytes(base)


def register_twice(rank: int, world: int, base: Path) -> tuple[bool, str]:
    """Register with and without `adapter_only`: whether equal options give one object, and the error otherwise."""
    from shardckpt.integrations.accelerate import register
    from tests.kit.runs import accelerators, adapters

    accelerators.be_rank(rank, world)
    accelerator, *_ = adapters.prepare_adapted("ddp", base, seed=1)
    first = register(accelerator, adapter_only=False)
    answers = [first.has_options(False, {}, adapter_only=each) for each in (False, True)]
    with pytest.raises(UsageError) as raised:
        register(accelerator)
    return register(accelerator, adapter_only=False) is first and answers == [True, False], str(raised.value)


def test_accelerate_refuses_a_second_registration_with_another_adapter_only(tmp_path: Path) -> None:
    from tests.kit.runs import adapters

    ((is_same, told),) = run(1, register_twice, adapters.save_base(tmp_path / "base"))
    assert is_same
    assert "registered with other options" in told


def train_with_lightning(
    rank: int, world: int, kind: str, folder: Path, base: Path, resume: str | None, last: int, **options: Any
) -> tuple[list[dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
    """Train with Lightning; the states as training begins and ends."""
    from tests.kit.runs import adapters, lightning_trainers

    class Beginning(lightning_trainers.Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            begun.append(adapters.copy_whole(trainer.strategy.model, trainer.optimizers[0]))

    begun: list[dict[str, torch.Tensor]] = []
    checkpoint = lightning_trainers.ShardckptModelCheckpoint(
        folder / "run", every_n_train_steps=2, save_top_k=-1, **options
    )
    net = adapters.AdaptedModule(kind, base, seed=2 if resume else 1)
    trainer, _ = lightning_trainers.build(
        kind, rank, world, folder, checkpoint, Beginning(), net=net, max_steps=last, max_epochs=-1
    )
    trainer.fit(net, ckpt_path=resume)
    return begun, adapters.copy_whole(trainer.strategy.model, trainer.optimizers[0])


@pytest.mark.parametrize(
    ("kind", "worlds", "background"), [("fsdp2", (2, 1), False), ("fsdp2", (2, 2), True), ("ddp", (1, 2), True)]
)
def test_lightning_resumes_all_of_an_adapter(
    kind: str, worlds: tuple[int, int], background: bool, tmp_path: Path
) -> None:
    from tests.kit.runs import adapters

    base = adapters.save_base(tmp_path / "base")
    train = partial(train_with_lightning, background=background)
    ended = [state for _, state in run(worlds[0], train, kind, tmp_path, base, None, 4)]
    for (begun,), _ in run(worlds[1], train, kind if worlds[1] > 1 else "ddp", tmp_path, base, "last", 6):
        require_equal(begun, ended[0])
    for name in (*STEPS, "step-00000006"):
        assert adapters.count_bytes(tmp_path / "run" / name) <= 2 * count_trained(ended[0])
    assert not (tmp_path / "run" / "adapter-base").exists()


def test_lightning_refuses_another_base_and_saves_the_base_without_adapter_only(tmp_path: Path) -> None:
    from tests.kit.runs import adapters

    base, other = adapters.save_base(tmp_path / "base"), adapters.save_base(tmp_path / "other", seed=3)
    ((_, ended),) = run(1, train_with_lightning, "ddp", tmp_path, base, None, 2)
    refused = raised_everywhere(2, lambda *at: train_with_lightning(*at, "fsdp2", tmp_path, other, "last", 4))
    assert all("the step's adapter was trained on another base" in each.message for each in refused)
    (((begun,), _),) = run(1, partial(train_with_lightning, adapter_only=False), "ddp", tmp_path, other, "last", 4)
    require_equal(begun, ended)
    assert adapters.count_bytes(tmp_path / "run" / STEPS[1]) > adapters.count_bytes(base)


@pytest.mark.parametrize(("kind", "world"), [("ddp", 1), ("fsdp2", 2)])
def test_lightning_copies_a_model_that_differs_from_its_base_once(kind: str, world: int, tmp_path: Path) -> None:
    from tests.kit.runs import adapters

    base = adapters.save_base(tmp_path / "base")
    train = _OnChangedBase(train_with_lightning)
    ended = [state for _, state in run(world, train, kind, tmp_path, base, None, 4)]
    for (begun,), _ in run(world, train, kind, tmp_path, base, "last", 6):
        require_equal(begun, ended[0])
    for name in (*STEPS, "step-00000006"):
        assert adapters.count_bytes(tmp_path / "run" / name) <= 2 * count_trained(ended[0])
    (copy,) = tmp_path.rglob("adapter-base")
    assert adapters.count_bytes(copy) > adapters.count_bytes(base)


def train_somewhere(rank: int, world: int, door: str, kind: str, folder: Path, base: Path) -> dict[str, torch.Tensor]:
    """Train two steps through a framework; the state at the end."""
    if door == "trainer":
        return _Train(folder, base)(rank, world, kind, 2)[1]
    if door == "lightning":
        return train_with_lightning(rank, world, kind, folder, base, None, 2)[1]
    return train_accelerated(rank, world, kind, folder, base, "")[-1]


@pytest.mark.parametrize(
    ("door", "step", "kind", "world"),
    [
        ("trainer", "run/step-00000002", "fsdp2", 2),
        ("lightning", "run/step-00000002", "fsdp2", 2),
        ("accelerate", "two/shardckpt", "ddp", 1),
    ],
)
def test_a_step_is_merged_into_its_base(door: str, step: str, kind: str, world: int, tmp_path: Path) -> None:
    from tests.kit.runs import adapters, cases

    base = adapters.save_base(tmp_path / "base")
    ended, *_ = run(world, train_somewhere, door, kind, tmp_path, base)
    shardckpt.merge_adapter(base, tmp_path / step, tmp_path / "out")
    shardckpt.merge_adapter(tmp_path / step, tmp_path / step, tmp_path / "alone")
    found, before = cases.load_folder(tmp_path / "out"), cases.load_folder(base)
    cases.assert_same(cases.load_folder(tmp_path / "alone"), found)
    assert found.keys() == before.keys()
    trained = {name.partition("base_model.model.")[2]: value for name, value in ended.items() if ".exp_avg" not in name}
    for name, value in before.items():
        module = name.removesuffix(".weight")
        expected = trained.get(f"{module}.modules_to_save.default.weight", value)
        if f"{module}.lora_A.default.weight" in trained:
            a, b = (trained[f"{module}.lora_{side}.default.weight"] for side in "AB")
            expected = value + b @ a / 2
            assert not torch.equal(found[name], value)
        torch.testing.assert_close(found[name], expected, rtol=1e-5, atol=1e-6)


def train_quantized(rank: int, world: int, folder: Path, base: Path) -> None:
    """Train two steps of QLoRA."""
    from transformers import BitsAndBytesConfig

    settings = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_quant_storage=torch.float32,
    )
    _Train(folder, base)(rank, world, "fsdp2", 2, quantization_config=settings)


def test_a_qlora_step_is_merged_into_its_quantized_base_or_the_original(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    from tests.kit.runs import adapters, cases

    base, step, copy = adapters.save_base(tmp_path / "base"), tmp_path / "run" / STEPS[0], tmp_path / "run/adapter-base"
    run(2, train_quantized, tmp_path, base)
    with pytest.raises(shardckpt.errors.UnsupportedError, match="--dequantize"):
        shardckpt.merge_adapter(step, step, tmp_path / "refused")
    found = {}
    for name, source in {"plain": base, "step": step, "copy": copy}.items():
        shardckpt.merge_adapter(source, step, tmp_path / name, dequantize=name != "plain")
        found[name] = cases.load_folder(tmp_path / name)
    cases.assert_same(found["copy"], found["step"])
    changed = cases.load_folder(base).keys() & found["step"].keys()
    assert changed == found["plain"].keys() == found["step"].keys()
    for name, value in found["plain"].items():
        torch.testing.assert_close(found["step"][name], value, rtol=0, atol=0.02)
