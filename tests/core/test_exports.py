"""A user changes the import line: the names, signatures and defaults are torch's, but for what is listed here."""

from __future__ import annotations

import builtins
import dataclasses
import enum
import functools
import importlib
import inspect
import pathlib
import pickle
import pkgutil
import subprocess
import sys
from typing import Any

import pytest
import torch.distributed.fsdp as theirs
from torch import nn
from torch.distributed.fsdp._common_utils import clean_tensor_name

from tests.kit.models.torch_limits import compares_with_newer_torch
from tests.kit.models.under_test import TORCH

pytestmark = pytest.mark.skipif(TORCH, reason="compares ours with torch's")

if not TORCH:
    import shardckpt.core as core
    from shardckpt.core import wrap
    from shardckpt.errors import ShardckptError

MODULES = ["", ".api", ".wrap", ".sharded_grad_scaler", ".fully_sharded_data_parallel"]

OURS_ALONE = {
    "AllGather": "the interface of set_custom_all_gather, which torch keeps private",
    "FSDPMeshInfo": "what shard_placement_fn may return part of, which torch keeps private",
    "FlatParameter": "importable from torch as well, but not listed",
    "GradientReductionHandle": "only newer ones of torch have it",
    "HSDPMeshInfo": "what shard_placement_fn may return part of, which torch keeps private",
    "ReduceScatter": "the interface of set_custom_reduce_scatter, which torch keeps private",
    "ShardPlacementResult": "what shard_placement_fn may return, which torch keeps private",
    "ShardedGradScaler": "torch has it in sharded_grad_scaler alone; here both",
    "StateProviderMissing": "an error to catch",
    "clean_tensor_name": "torch keeps it private, and frameworks use it",
    "clip_grad_norm_": "one norm for both front ends, beside parameters that are not sharded (G3)",
    "iter_full_params": "full parameters, one unit gathered at a time (G16)",
    "mark_incompatible": "torch has a private contract for it",
    "replace_torch_fsdp": "our classes in frameworks that import torch's",
    "sync_module_states": "torch has no such thing for fully_shard (G6)",
}
"""Names that torch's `__all__` does not have."""

MORE_ARGUMENTS = {
    ("FullyShardedDataParallel.clip_grad_norm_", "error_if_nonfinite"): "torch's method lacks it (G3)",
    ("MixedPrecisionPolicy.__init__", "buffer_dtype"): "torch's wrapper has it alone (G27)",
    ("MixedPrecisionPolicy.__init__", "param_dtype_override_fn"): "only newer ones of torch have it",
}
"""Arguments that torch does not have; all are for keywords only and have a default."""

OTHER_DEFAULTS: dict[tuple[str, str], str] = {}
"""Arguments whose default is not torch's."""

WITHOUT_OUR_MEMBERS = {
    "FSDPModule._get_fsdp_state": "gives out an object of torch's engine",
    "FSDPModule._orig_cls_mro_index": "a counter of torch's own",
}
"""Members of torch's classes that are not for users and that we do not have."""

PRIVATE_BUT_USED = {
    "FullyShardedDataParallel": [
        "_has_params",
        "_flat_param",
        "_is_root",
        "_reset_lazy_init",
        "_unshard",
        "_wait_unshard_streams_on_current_stream",
        "_deregister_orig_params_ctx",
        "_low_precision_hook_enabled",
        "_mixed_precision_enabled_for_buffers",
        "_apply",
    ],
    "FSDPModule": ["_set_unshard_async_op", "_apply"],
}
"""Members with an underscore that public code calls nevertheless."""


# ----------------------------------------------------------------------------------------------------- names


def test_every_public_name_of_torch_is_one_of_ours():
    assert set(theirs.__all__) - set(core.__all__) == set()


def test_every_listed_name_exists_once_and_is_listed_in_order():
    assert all(hasattr(core, name) for name in core.__all__)
    assert len(set(core.__all__)) == len(core.__all__)
    upper = [name for name in core.__all__ if name[0].isupper()]
    lower = [name for name in core.__all__ if not name[0].isupper()]
    assert core.__all__ == sorted(upper) + sorted(lower)


@compares_with_newer_torch
def test_each_name_of_ours_alone_has_a_reason():
    assert set(core.__all__) - set(theirs.__all__) <= set(OURS_ALONE)


@pytest.mark.parametrize("module", MODULES)
def test_users_find_names_in_the_modules_where_torch_has_them(module):
    ours, other = (importlib.import_module(f"{package}{module}") for package in ("shardckpt.core", theirs.__name__))
    listed = getattr(other, "__all__", [name for name in vars(other) if name == "ShardedGradScaler"])
    assert [name for name in listed if not hasattr(ours, name)] == []
    assert all(hasattr(ours, name) for name in getattr(ours, "__all__", []))
    assert all(getattr(ours, name) is getattr(core, name) for name in listed if name in core.__all__)


def test_what_users_import_beside_what_is_listed():
    names = (
        "BackwardPrefetch CPUOffload FlatParameter FullStateDictConfig MixedPrecision ShardingStrategy StateDictType"
    )
    other = importlib.import_module("torch.distributed.fsdp.fully_sharded_data_parallel")
    ours = importlib.import_module("shardckpt.core.fully_sharded_data_parallel")
    for name in [*names.split(), "FullOptimStateDictConfig", "CustomPolicy", "ModuleWrapPolicy", "FLAT_PARAM"]:
        assert hasattr(other, name)
        assert hasattr(ours, name)
    assert ours.FLAT_PARAM == other.FLAT_PARAM


def test_names_of_api_are_found_in_config_as_before():
    """Where they were defined first: imports, and objects that were pickled then."""
    config = importlib.import_module("shardckpt.core.config")
    api = importlib.import_module("shardckpt.core.api")
    assert all(getattr(config, name, None) is getattr(api, name) for name in api.__all__)
    assert pickle.loads(b"cshardckpt.core.config\nMixedPrecision\n.") is core.MixedPrecision


def test_policies_may_be_joined_as_peft_does():
    joined = functools.partial(
        wrap._or_policy,
        policies=[
            functools.partial(wrap.lambda_auto_wrap_policy, lambda_fn=lambda module: isinstance(module, nn.Tanh)),
            functools.partial(wrap.transformer_auto_wrap_policy, transformer_layer_cls={nn.Linear}),
        ],
    )
    asked = [joined(each, recurse=False, nonwrapped_numel=0) for each in (nn.Tanh(), nn.Linear(1, 1), nn.ReLU())]
    assert asked == [True, True, False]
    assert joined(nn.ReLU(), recurse=True, nonwrapped_numel=0)


def test_every_module_of_the_engine_can_be_imported_first():
    """Each in a fresh interpreter's order would be slow; it is enough that none is left out of what is imported."""
    names = [each.name for each in pkgutil.iter_modules(core.__path__, "shardckpt.core.")]
    assert all(inspect.ismodule(importlib.import_module(name)) for name in names)


def test_importing_the_engine_imports_nothing_of_torchs():
    script = (
        "import sys, shardckpt.core, shardckpt.core.fully_sharded_data_parallel, shardckpt.core.sharded_grad_scaler\n"
        "print(*[m for m in sys.modules if m.startswith(('torch.distributed.fsdp', 'torch.distributed._composable',"
        " 'torch.distributed._shard'))])"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert found.stdout.split() == []


def test_no_source_file_of_the_engine_names_a_private_module_of_torchs_engines():
    banned = ("distributed.fsdp", "_composable", "distributed._shard")
    found = []
    for path in sorted(pathlib.Path(core.__file__).parent.rglob("*.py")):
        lines = path.read_text().splitlines()
        imports = [line for line in lines if line.lstrip().startswith(("import ", "from "))]
        found += [f"{path.name}: {line}" for line in imports if any(each in line for each in banned)]
    assert found == []


# ------------------------------------------------------------------------------------------------ signatures


def describe_default(default: Any) -> Any:
    """A default in a form in which ours and torch's can be equal."""
    if isinstance(default, enum.Enum):
        return type(default).__name__, default.name
    if dataclasses.is_dataclass(default) and not isinstance(default, type):
        name = type(default).__name__
        fields = [f.name for f in dataclasses.fields(default) if (f"{name}.__init__", f.name) not in MORE_ARGUMENTS]
        return name, {each: describe_default(getattr(default, each)) for each in fields}
    if callable(default) and not isinstance(default, type):
        return getattr(default, "__name__", default)
    return default


def callables(module: Any, names: list[str]) -> dict[str, Any]:
    """Functions, constructors and methods behind public names, by dotted name."""
    found = {}
    for name in names:
        thing = getattr(module, name)
        if not inspect.isclass(thing):
            found[name] = thing
            continue
        if issubclass(thing, enum.Enum):
            continue
        if thing.__init__ is not object.__init__:
            found[f"{name}.__init__"] = thing.__init__
        wanted = PRIVATE_BUT_USED.get(name, [])
        for member in vars(thing):
            if (not member.startswith("_") or member in wanted) and callable(getattr(thing, member)):
                found[f"{name}.{member}"] = getattr(thing, member)
    return found


def other_callables(module: str) -> dict[str, Any]:
    other = importlib.import_module(f"{theirs.__name__}{module}")
    return callables(other, getattr(other, "__all__", ["ShardedGradScaler"]))


SIGNATURES = [] if TORCH else [(module, name) for module in MODULES for name in other_callables(module)]


def found_here(module: str, name: str) -> Any:
    thing = importlib.import_module(f"shardckpt.core{module}")
    for part in name.split("."):
        thing = getattr(thing, part)
    return thing


@compares_with_newer_torch
@pytest.mark.parametrize(("module", "name"), SIGNATURES)
def test_signatures_are_torchs(module, name):
    if name in WITHOUT_OUR_MEMBERS:
        pytest.skip(WITHOUT_OUR_MEMBERS[name])
    ours = inspect.signature(found_here(module, name)).parameters
    other = inspect.signature(other_callables(module)[name]).parameters
    if any(p.kind is p.VAR_POSITIONAL for p in other.values()):  # torch hands on to the class above
        if any(p.kind is p.VAR_POSITIONAL for p in ours.values()):
            return
        other = inspect.signature(getattr(nn.Module, name.partition(".")[2])).parameters
    for argument in [each for each in ours if each not in other]:
        assert (name, argument) in MORE_ARGUMENTS, f"{name} has an argument {argument} that torch has not"
        assert ours[argument].kind is inspect.Parameter.KEYWORD_ONLY
        assert ours[argument].default is not inspect.Parameter.empty
    assert [each for each in ours if each in other] == list(other)
    for argument, wanted in other.items():
        assert ours[argument].kind is wanted.kind, f"{name}({argument})"
        if (name, argument) not in OTHER_DEFAULTS:
            assert describe_default(ours[argument].default) == describe_default(wanted.default), f"{name}({argument})"


@pytest.mark.parametrize("name", [] if TORCH else sorted(PRIVATE_BUT_USED))
def test_members_have_torchs_kind(name):
    """What is a property there is one here, what is static is static."""
    ours, other = getattr(core, name), getattr(theirs, name)
    public = [member for member in vars(other) if not member.startswith("_")]
    for member in [*public, *PRIVATE_BUT_USED[name]]:
        kinds = [kind(inspect.getattr_static(each, member)) for each in (ours, other) if hasattr(each, member)]
        assert len(kinds) == 1 or kinds[0] == kinds[1], member
        assert hasattr(ours, member), member


def kind(member: Any) -> str:
    return "property" if isinstance(member, property) else "static" if isinstance(member, staticmethod) else "method"


@pytest.mark.parametrize("name", [name for name in theirs.__all__ if inspect.isclass(getattr(theirs, name))])
def test_classes_are_of_torchs_kind(name):
    ours, other = getattr(core, name), getattr(theirs, name)
    assert inspect.isclass(ours)
    assert issubclass(ours, enum.Enum) == issubclass(other, enum.Enum)
    assert dataclasses.is_dataclass(ours) == dataclasses.is_dataclass(other)
    if dataclasses.is_dataclass(ours):
        frozen = [getattr(each, "__dataclass_params__").frozen for each in (ours, other)]  # noqa: B009
        assert frozen[0] == frozen[1]
        known = [f.name for f in dataclasses.fields(other)]
        fields = [f.name for f in dataclasses.fields(ours)]
        more = [each for each in fields if each not in known]
        assert [each for each in fields if each in known] == known
        assert all((f"{name}.__init__", each) in MORE_ARGUMENTS for each in more)
    bases = [[base.__name__ for base in each.__mro__ if base.__name__ in theirs.__all__] for each in (ours, other)]
    assert bases[0] == bases[1]


def test_errors_are_the_builtin_that_torch_raises_and_one_of_ours():
    found = []
    for each in pkgutil.iter_modules(core.__path__, "shardckpt.core."):
        module = importlib.import_module(each.name)
        for name, thing in vars(module).items():
            ours = inspect.isclass(thing) and issubclass(thing, ShardckptError) and thing.__module__ == each.name
            plain = ours and any(getattr(builtins, b.__name__, None) is b for b in thing.__mro__[1:-3])
            if ours and not plain:
                found.append(f"{each.name}.{name}")
    assert found == []


@pytest.mark.parametrize(
    "name", ["_fsdp_wrapped_module.a._fsdp_wrapped_module.w", "a._checkpoint_wrapped_module.b", "a.w", "w"]
)
def test_names_are_cleaned_as_torch_cleans_them(name) -> None:
    assert core.clean_tensor_name(name) == clean_tensor_name(name)


def test_names_are_cleaned_of_compiled_modules_too() -> None:
    assert core.clean_tensor_name("_orig_mod.a._orig_mod.w") == "a.w"
