"""Imports go only where the tables allow: read from the sources, and from what an import leaves in memory."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = {"shardckpt": ROOT / "shardckpt", "shardckpt_cli": ROOT / "cli" / "shardckpt_cli"}

LEAVES = {"errors", "boxes", "dtypes", "manifest", "layout"}

# A package, or one file of a package where a file may do more, and the packages that it may import besides its own.
ARROWS: dict[str, set[str]] = {
    "errors": {"divergence"},
    "boxes": {"errors"},
    "dtypes": {"errors"},
    "manifest": {"boxes", "dtypes", "errors"},
    "layout": {"boxes", "dtypes", "errors"},
    "torch_features": {"errors"},
    "torchrun": set(),
    "plugins": {"errors"},
    "events": {"errors"},
    "groups": {"devices", "errors"},
    "shared_store": {"groups", "events", "errors"},
    "devices": {"torch_features"},
    "core": {"boxes", "dtypes", "layout", "groups", "devices", "errors", "torch_features", "torchrun"},
    "state": {"core", "plan", "groups", "torch_features"} | LEAVES,
    "plan": set(LEAVES),
    "storage": {"errors", "events"},
    "divergence": set(),
    "encodings": {"storage"} | LEAVES,
    "reader": {"encodings", "storage"} | LEAVES,
    "native": {"plan", "storage", "encodings", "reader"} | LEAVES,
    "readers": {"plan", "storage", "plugins", "encodings", "reader", "native"} | LEAVES,
    "checkpoint": {
        "state",
        "plan",
        "readers",
        "native",
        "encodings",
        "reader",
        "storage",
        "devices",
        "divergence",
        "torch_features",
        "torchrun",
        "shared_store",
        "events",
    }
    | LEAVES,
    "witness": {
        "checkpoint",
        "state",
        "plan",
        "readers",
        "native",
        "encodings",
        "storage",
        "devices",
        "divergence",
        "torch_features",
        "events",
    }
    | LEAVES,
    "tiers": {"checkpoint", "plan", "native", "encodings", "storage", "events"} | LEAVES,
    "checkpointer": {"checkpoint", "tiers", "witness", "plan", "native", "events", "errors"},
    "offline": {
        "tiers",
        "witness",
        "plan",
        "readers",
        "native",
        "encodings",
        "reader",
        "storage",
        "plugins",
        "events",
        "torchrun",
    }
    | LEAVES,
    "offline.write.parallel": {"events", "plan", "native", "reader", "storage", "groups", "shared_store"} | LEAVES,
    "testing": {
        "shardckpt",
        "witness",
        "divergence",
        "offline",
        "plan",
        "readers",
        "encodings",
        "reader",
        "storage",
    }
    | LEAVES,
    "data": {"checkpoint", "plan", "events", "errors"},
    "integrations": {"shardckpt", "results", "checkpoint", "witness", "events", "errors"},
    "results": {
        "errors",
        "checkpoint",
        "divergence",
        "events",
        "native",
        "offline",
        "readers",
        "tiers",
        "witness",
    },
    "open_checkpoint": {"checkpoint", "offline", "reader", "errors"},
    # The package itself names everything for type checkers and resolves each name on first use.
    "shardckpt": {
        "results",
        "checkpointer",
        "tiers",
        "witness",
        "events",
        "state",
        "checkpoint",
        "offline",
        "readers",
        "open_checkpoint",
    }
    | LEAVES,
    "cli": {"shardckpt", "results", "errors"},
}

# The layers of a package, the lowest first: a module imports from its own sub-package and from lower layers.
# Modules that are in no sub-package and not listed are above all.
LAYERS: dict[str, tuple[set[str], ...]] = {
    "core": (
        {"api", "errors", "lazy_names"},
        {"config"},
        {"policies"},
        {"modules"},
        {"comm"},
        {"params"},
        {"registration"},
        {"runtime"},
        {"materialize", "tools", "wrap", "comm_hooks"},
        {"fsdp1"},
        {"fsdp2"},
    ),
    "state": ({"redistribute"}, {"keys"}, {"adapters"}, {"model"}, {"optim"}, {"local", "interop"}),
    "plan": ({"naming", "layout", "data_positions"}, {"optim"}, {"rules"}),
    "storage": ({"linux_syscalls", "orphans", "store"}, {"local"}),
    "encodings": ({"value_stats"}, {"budget"}),
    "readers": (
        {"chunk_reader"},
        {"torchsave"},
        {"merge_shards"},
        {"ranks", "dcp", "deepspeed", "huggingface", "opened"},
        {"frameworks"},
    ),
    "witness": ({"digests", "records"}, {"files"}),
    "tiers": (
        {"holder", "local_folder", "peers"},
        {"durability", "node_opening", "part_finder", "peer_memory", "tier_list"},
        {"lineage"},
    ),
    "checkpoint": (
        {"stateful"},
        {"planning"},
        {"rank_link", "background_thread"},
        {"coordinator"},
        {"load"},
        {"base_checkpoint"},
        {"dedup"},
        {"save"},
        {"run", "dcp_storage_reader", "dcp_storage_writer"},
    ),
    "offline": (
        {"results"},
        {"write"},
        {"select"},
        {"targets", "compare", "report_html"},
        {"verify", "stats"},
        {"prune"},
        {"run_history"},
    ),
    "integrations": ({"local_folders"}, {"accelerate", "lightning", "transformers"}),
}

# Third-party libraries and the packages that may know of them.
LIBRARIES: dict[str, set[str]] = {
    "torch": {
        "torch_features",
        "groups",
        "shared_store",
        "devices",
        "core",
        "state",
        "checkpoint",
        "witness",
        "tiers",
        "checkpointer",
        "data",
        "integrations",
        "testing",
    },
    "fsspec": {"storage", "testing"},
    "typer": {"cli"},
    "pytest": {"testing"},
    "click": {"cli"},
    "rich": {"cli"},
    "safetensors": {"encodings"},
    "transformers": {"integrations"},
    "accelerate": {"integrations"},
    "torchtitan": {"integrations"},
    "lightning": {"integrations"},
    "lightning_utilities": {"integrations"},
    "torchft": {"integrations"},
    "prometheus_client": {"integrations"},
    "wandb": {"integrations"},
}

TENSORS_ALONE = "0.04 s in all; a state of tensors alone needs neither the engine nor the states of models"

# Function-level imports; besides these the command imports the package and rich inside its functions: `is_late_in_cli`.
LATE_IMPORTS: dict[tuple[str, str], str] = {
    ("shardckpt.encodings.element_values", "ml_dtypes"): "numpy knows most types",
    ("shardckpt.encodings.element_values", "numpy"): "0.07 s; what casts nothing needs none",
    ("shardckpt.checkpoint.load.source", "shardckpt.readers.remap"): "0.02 s; most loads have no rules",
    ("shardckpt.checkpoint.load.load", "shardckpt.checkpoint.load.live_check"): "few loads ask for it",
    ("shardckpt.checkpoint.load.load_planner", "shardckpt.checkpoint.load.optim_load_plan"): TENSORS_ALONE,
    ("shardckpt.checkpoint.stateful.flatten", "shardckpt.state.adapters.model_index"): TENSORS_ALONE,
    ("shardckpt.checkpoint.stateful.flatten", "shardckpt.state.adapters.sharded_tensor"): TENSORS_ALONE,
    ("shardckpt.checkpoint.stateful.flatten", "shardckpt.state.adapters.torch_fsdp1"): TENSORS_ALONE,
    ("shardckpt.checkpoint.stateful.flatten", "shardckpt.state.local.local_shards"): TENSORS_ALONE,
    ("shardckpt.checkpoint.stateful.flatten", "shardckpt.state.local.optim_shards"): TENSORS_ALONE,
    ("shardckpt.checkpoint.stateful.flatten", "shardckpt.state.model.module_hooks"): TENSORS_ALONE,
    ("shardckpt.checkpoint.load.load_planner", "shardckpt.state.model.module_hooks"): TENSORS_ALONE,
    ("shardckpt.state.adapters.flat_shard_check", "shardckpt.core.params.param_bucket"): TENSORS_ALONE,
    ("shardckpt.state.adapters.flat_shard_check", "shardckpt.core.registration.base"): TENSORS_ALONE,
    ("shardckpt.state.adapters.flat_shard_check", "shardckpt.layout"): TENSORS_ALONE,
    ("shardckpt.readers.opened.state_tree", "numpy"): "0.07 s; most files have no arrays",
    ("shardckpt.readers.chunk_reader", "numpy"): "0.07 s; pieces that are read as they are need none",
    ("shardckpt.tiers.holder.holder_store", "numpy"): "0.07 s; processes that only read need none",
    ("shardckpt.readers.registry", "shardckpt.native.commit"): "only the format of a checkpoint is imported",
    (
        "shardckpt.readers.registry",
        "shardckpt.native.run_directory",
    ): "only the format of a checkpoint is imported",
    ("shardckpt.integrations.sinks", "prometheus_client"): "each sink needs its own library only",
    ("shardckpt.integrations.sinks", "torch.utils.tensorboard"): "each sink needs its own library only",
    ("shardckpt.integrations.sinks", "wandb"): "each sink needs its own library only",
    (
        "shardckpt.offline.consolidate",
        "shardckpt.offline.write.parallel",
    ): "ranks speak through torch; one process needs none",
    ("shardckpt.offline.consolidate", "shardckpt.offline.select.block_scales"): "NumPy; most checkpoints hold no fp8",
    ("shardckpt.offline.select.selection", "numpy"): "0.07 s; most optimizers have no such values",
    ("shardckpt.offline.select.selection", "shardckpt.readers.remap"): "most conversions have no rules",
    ("shardckpt.offline.write.numpy_casts", "numpy"): "0.07 s; what casts nothing needs none",
    ("shardckpt.open_checkpoint", "shardckpt.checkpoint.load.lazy"): "arrays need no torch",
    ("shardckpt.open_checkpoint", "shardckpt.offline.open_arrays"): "tensors need no arrays",
    ("shardckpt.plugins", "importlib.metadata"): "0.03 s, which most commands can do without",
    ("shardckpt.readers.dcp.storage_items", "zstandard"): "most checkpoints are not compressed",
    ("shardckpt.encodings.codecs", "zstandard"): "most checkpoints are not compressed",
    ("shardckpt.offline.consolidate", "shardckpt.plan.optim.output_keys"): "most conversions write no optimizer",
    (
        "shardckpt.offline.select.selection",
        "shardckpt.offline.select.group_settings",
    ): "most conversions write no optimizer",
    (
        "shardckpt.offline.select.selection",
        "shardckpt.plan.optim.optimizer_state",
    ): "most conversions write no optimizer",
    ("shardckpt.offline.targets.base", "shardckpt.encodings.tagged_json"): "most conversions write no optimizer",
    (
        "shardckpt.offline.targets.base",
        "shardckpt.offline.select.group_settings",
    ): "most conversions write no optimizer",
    (
        "shardckpt.offline.targets.safetensors_files",
        "shardckpt.offline.select.group_settings",
    ): "most conversions write no optimizer",
    ("shardckpt.plan.layout.output_files", "fractions"): "2 ms; most sizes are whole numbers",
    ("shardckpt.torchrun", "hashlib"): "loads OpenSSL; commands hash nothing",
    ("shardckpt.storage.resolve_url", "shardckpt.storage.fsspec_store"): "local paths do without fsspec's 0.1 s",
}

# Modules with a table of modules of which they import the one that is asked for.
TABLES = frozenset({"shardckpt.readers.registry", "shardckpt.offline.targets.target_registry"})

# The most lines of a module, for packages that people read before they depend on them.
MOST_LINES = {"integrations": 300}

TORCH_FREE = ("encodings", "native", "readers", "plan", "storage", "offline")
WITH_RANKS = "shardckpt.offline.write.parallel"
WINGS = {"tiers", "witness"}  # packages of a feature: the modules that offline verbs reach need no torch


@dataclass(frozen=True)
class Import:
    """One imported name: by which module, what, where, and whether inside a function or for type checkers only."""

    by: str
    target: str
    line: int
    late: bool
    for_types: bool

    def __str__(self) -> str:
        return f"{self.by}:{self.line} imports {self.target}"


def read_sources() -> dict[str, str]:
    """Return the source of every module of the project by its dotted name; a package is named as itself."""
    found = {}
    for package, folder in PACKAGES.items():
        for path in sorted(folder.rglob("*.py")):
            parts = (package, *path.relative_to(folder).with_suffix("").parts)
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path.read_text(encoding="utf-8")
    return found


def imports(sources: Mapping[str, str]) -> list[Import]:
    """Return every import of every module, each name of a `from` import resolved to the module it is or lies in."""
    packages = {name for name in sources if any(other.startswith(f"{name}.") for other in sources)} | set(PACKAGES)
    found = []
    for name, text in sources.items():
        for node, late, for_types in _import_nodes_of(text):
            for target in _targets(node, name, name in packages, sources):
                found.append(Import(name, target, node.lineno, late, for_types))
        found += [Import(name, *named, late=False, for_types=False) for named in _named_in_table(name, text, sources)]
    return found


def _named_in_table(by: str, text: str, sources: Mapping[str, str]) -> list[tuple[str, int]]:
    """Return the modules that a table names, with their lines; no other import says that they are used."""
    constants = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant)) if by in TABLES else ()
    return [(node.value, node.lineno) for node in constants if isinstance(node.value, str) and node.value in sources]


@cache
def _import_nodes_of(text: str) -> list[tuple[ast.Import | ast.ImportFrom, bool, bool]]:
    """Return the import statements of a source, whether each is in a function, and whether for type checkers only."""
    return list(_import_nodes(ast.parse(text), late=False, for_types=False))


def _import_nodes(
    node: ast.AST, *, late: bool, for_types: bool
) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool, bool]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child, late, for_types
        inside = late or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        typed = for_types or (isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test))
        yield from _import_nodes(child, late=inside, for_types=typed)


def _targets(node: ast.Import | ast.ImportFrom, by: str, is_package: bool, sources: Mapping[str, str]) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    base = node.module or ""
    if node.level:
        parents = by.split(".") if is_package else by.split(".")[:-1]
        parents = parents[: len(parents) - node.level + 1]
        base = ".".join([*parents, base] if base else parents)
    return [f"{base}.{alias.name}" if f"{base}.{alias.name}" in sources else base for alias in node.names]


def get_package(module: str) -> str:
    """Return the package that a module of the project belongs to."""
    parts = module.split(".")
    if parts[0] == "shardckpt_cli":
        return "cli"
    return parts[1] if len(parts) > 1 else "shardckpt"


def upward_imports(found: list[Import]) -> list[str]:
    """Return the imports inside a package that do not go down its layers."""
    return [str(each) for each in found if _goes_up(each.by.split("."), each.target.split("."))]


def _goes_up(by: list[str], target: list[str]) -> bool:
    if by[:2] != target[:2] or min(len(by), len(target)) < 3 or by[2] == target[2]:
        return False
    heights = {name: height for height, layer in enumerate(LAYERS.get(by[1], ())) for name in layer}
    return by[2] in heights and heights[by[2]] <= heights.get(target[2], len(heights))


def is_ours(module: str) -> bool:
    return module.partition(".")[0] in PACKAGES


def forbidden_arrows(found: list[Import]) -> list[str]:
    """Return the imports between packages that the table does not list."""
    faults = []
    for each in found:
        if not is_ours(each.target):
            continue
        here, there = get_package(each.by), get_package(each.target)
        file = each.by.removeprefix("shardckpt.")
        if here != there and there not in ARROWS.get(file, ARROWS.get(here, set())):
            faults.append(f"{each}: {here} may not import {there}")
    return faults


def forbidden_libraries(found: list[Import]) -> list[str]:
    """Return the imports of third-party libraries by packages that should not know of them."""
    known = [(each, each.target.split(".")[0]) for each in found]
    return [str(each) for each, top in known if top in LIBRARIES and get_package(each.by) not in LIBRARIES[top]]


def private_names(sources: Mapping[str, str]) -> list[str]:
    """Return the private names that a module imports from another module of the project."""
    faults = []
    for name, text in sources.items():
        for node, _, _ in _import_nodes_of(text):
            if isinstance(node, ast.ImportFrom) and (node.level or is_ours(node.module or "")):
                words = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
                faults += [f"{name}:{node.lineno} imports {w}" for w in words if w.startswith("_") and w[:2] != "__"]
    return faults


def cycles(found: list[Import]) -> list[list[str]]:
    """Return the sets of modules that import each other, late and type-checking imports included."""
    graph: dict[str, set[str]] = {}
    for each in found:
        above = each.by.startswith(f"{each.target}.")
        if is_ours(each.target) and each.target != each.by and not above:
            graph.setdefault(each.by, set()).add(each.target)
    reach = {name: _reachable(graph, name) for name in graph}
    rings = {tuple(sorted(b for b in reach[a] if a in reach.get(b, ()))) for a in graph if a in reach[a]}
    return [list(ring) for ring in sorted(rings)]


def _reachable(graph: Mapping[str, set[str]], start: str) -> set[str]:
    seen: set[str] = set()
    stack = [start]
    while stack:
        new = graph.get(stack.pop(), set()) - seen
        seen |= new
        stack.extend(new)
    return seen


def unlisted_late_imports(found: list[Import]) -> list[str]:
    """Return the function-level imports that nobody gave a reason for."""
    late = [each for each in found if each.late and not (get_package(each.by) == "cli" and is_late_in_cli(each.target))]
    return [str(each) for each in late if (each.by, each.target) not in LATE_IMPORTS]


def is_late_in_cli(target: str) -> bool:
    """Return True for what functions of the command import, so that --help is quick and pipes do without rich."""
    return is_ours(target) or target.partition(".")[0] == "rich"


def long_modules(sources: Mapping[str, str]) -> list[str]:
    """Return the modules that have more lines than those of their package may have."""
    lines = {name: len(text.splitlines()) for name, text in sources.items()}
    return [f"{name}: {n} lines" for name, n in lines.items() if n > MOST_LINES.get(get_package(name), n)]


def torch_free_modules(found: list[Import]) -> set[str]:
    """Return the modules that the command and the offline verbs reach, late imports included."""
    graph: dict[str, set[str]] = {}
    for each in found:
        if is_ours(each.target) and not each.for_types and WITH_RANKS not in (each.by, each.target):
            graph.setdefault(each.by, set()).add(each.target)
    roots = {name for name in graph if get_package(name) in {"offline", "cli"}}
    return roots.union(*(_reachable(graph, name) for name in roots))


def third_party(found: list[Import], modules: set[str]) -> set[str]:
    """Return the distributions that modules import; each is called like its module."""
    tops = {each.target.partition(".")[0] for each in found if each.by in modules}
    return {
        top.replace("_", "-") for top in tops - set(PACKAGES) - sys.stdlib_module_names - {"tomllib"}
    }  # of Python 3.11


def base_dependencies() -> set[str]:
    """Return the names of what `pip install shardckpt` always brings."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return {re.match(r"[\w-]+", line)[0].replace("_", "-") for line in project["dependencies"]}  # type: ignore[index]


def loaded_by(statement: str) -> set[str]:
    """Return the top-level modules that a statement leaves in `sys.modules` of a fresh interpreter."""
    code = f"import sys\n{statement}\nprint('\\n'.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return {line.partition(".")[0] for line in done.stdout.split()}


SOURCES = read_sources()


@cache
def all_imports() -> list[Import]:
    """Return every import of the tree."""
    return imports(SOURCES)


class TestPackages:
    def test_every_module_has_a_package_of_the_table(self) -> None:
        assert {get_package(name) for name in SOURCES} <= set(ARROWS)

    def test_arrows_go_only_where_the_table_says(self) -> None:
        assert forbidden_arrows(all_imports()) == []

    def test_imports_inside_a_package_go_down_its_layers(self) -> None:
        assert upward_imports(all_imports()) == []

    def test_every_sub_package_has_a_layer_and_every_layer_exists(self) -> None:
        modules = {tuple(name.split(".")[1:3]) for name in SOURCES if name.count(".") >= 2}
        inner = {
            tuple(name.split(".")[1:3]) for name in SOURCES if name.count(".") >= 3 and name.startswith("shardckpt.")
        }
        listed = {(package, name) for package, layers in LAYERS.items() for layer in layers for name in layer}
        assert inner - listed == set()
        assert listed - modules == set()

    def test_third_party_libraries_are_known_to_their_packages_only(self) -> None:
        assert forbidden_libraries(all_imports()) == []

    def test_no_private_name_crosses_a_module(self) -> None:
        assert private_names(SOURCES) == []

    def test_modules_of_integrations_are_short(self) -> None:
        assert long_modules(SOURCES) == []

    def test_no_modules_import_each_other_in_a_ring(self) -> None:
        assert cycles(all_imports()) == []

    def test_function_level_imports_are_on_the_list(self) -> None:
        assert unlisted_late_imports(all_imports()) == []

    def test_the_list_of_function_level_imports_names_only_those_that_exist(self) -> None:
        assert set(LATE_IMPORTS) <= {(each.by, each.target) for each in all_imports() if each.late}

    def test_the_folder_of_the_command_is_no_package_itself(self) -> None:
        assert not (ROOT / "cli" / "__init__.py").exists()


class TestTheChecksCanFail:
    @pytest.mark.parametrize(
        ("by", "text"),
        [
            ("shardckpt.storage.local", "from shardckpt.readers import hf"),
            ("shardckpt.storage.local", "from shardckpt.boxes import Box"),
            ("shardckpt.plan.layout.copy_plan", "import shardckpt.storage.store"),
            ("shardckpt.readers.huggingface.reader", "def f():\n    from shardckpt.offline import consolidate"),
            (
                "shardckpt.readers.huggingface.reader",
                "if TYPE_CHECKING:\n    from shardckpt.offline.results.contents import Report",
            ),
            ("shardckpt.storage.local", "from ..plan import naming"),
            ("shardckpt.readers.huggingface.reader", "import shardckpt"),
            ("shardckpt.offline.reshard", "from shardckpt.groups import LocalGroup"),
            ("shardckpt.errors", "from shardckpt.dtypes import bits"),
            ("shardckpt_cli.inspect", "from shardckpt.offline.inspect import inspect"),
        ],
    )
    def test_an_arrow_upwards_is_found(self, by: str, text: str) -> None:
        assert len(forbidden_arrows(imports({**SOURCES, by: text}))) == 1

    @pytest.mark.parametrize(
        ("by", "text"),
        [
            ("shardckpt.core.params.packing", "from shardckpt.core.runtime.fsdp_unit import Unit"),
            ("shardckpt.core.fsdp1.wrapper", "import shardckpt.core.fsdp2.fully_shard"),
            ("shardckpt.readers.dcp.reader", "from shardckpt.readers.deepspeed import reader"),
            ("shardckpt.checkpoint.load.load", "def f():\n    from shardckpt.checkpoint.save.save import save"),
        ],
    )
    def test_an_import_up_the_layers_of_a_package_is_found(self, by: str, text: str) -> None:
        assert len(upward_imports(imports({**SOURCES, by: text}))) == 1

    def test_an_import_by_a_table_is_found(self) -> None:
        for by in TABLES:
            found = imports({**SOURCES, by: "BUILT_IN = {'one': 'shardckpt.checkpointer'}"})
            assert len(forbidden_arrows(found)) == 1

    def test_groups_are_for_parallel_conversion_alone(self) -> None:
        assert (
            forbidden_arrows(imports({"shardckpt.offline.write.parallel": "from shardckpt.groups import TorchGroup"}))
            == []
        )

    @pytest.mark.parametrize("text", ["import torch", "from torch.distributed import checkpoint", "import rich.table"])
    def test_a_library_in_the_wrong_package_is_found(self, text: str) -> None:
        assert len(forbidden_libraries(imports({"shardckpt.readers.dcp.reader": text}))) == 1

    @pytest.mark.parametrize(
        "text", ["from shardckpt.boxes import _cut", "from ._hidden import Thing", "from shardckpt.plan._x import y"]
    )
    def test_a_private_name_is_found(self, text: str) -> None:
        assert len(private_names({"shardckpt.readers.huggingface.reader": text})) == 1

    def test_a_ring_is_found_even_when_half_of_it_is_late(self) -> None:
        ring = {
            "shardckpt.readers.a": "from shardckpt.readers import b",
            "shardckpt.readers.b": "from shardckpt.readers.c import x",
            "shardckpt.readers.c": "def f():\n    import shardckpt.readers.a",
        }
        assert cycles(imports(ring)) == [sorted(ring)]

    def test_a_long_module_is_found(self) -> None:
        names, text = ("shardckpt.integrations.dcp", "shardckpt.boxes"), "\n".join("x" * 301)
        assert long_modules(dict.fromkeys(names, text)) == [f"{names[0]}: 301 lines"]
        assert long_modules({names[0]: text[2:]}) == []

    def test_a_late_import_without_a_reason_is_found(self) -> None:
        text = "class A:\n    def f(self):\n        if self:\n            import json"
        assert unlisted_late_imports(imports({"shardckpt.readers.huggingface.reader": text})) == [
            "shardckpt.readers.huggingface.reader:4 imports json"
        ]

    def test_what_an_import_leaves_in_memory_is_seen(self) -> None:
        assert "fsspec" in loaded_by("import fsspec")


class TestDependencies:
    def test_the_base_install_is_exactly_what_torch_free_modules_import(self) -> None:
        modules = torch_free_modules(all_imports())
        assert {get_package(name) for name in modules}.isdisjoint(LIBRARIES["torch"] - WINGS)
        assert third_party(all_imports(), modules) == base_dependencies()

    def test_training_imports_torch_and_else_only_the_base(self) -> None:
        modules = {name for name in SOURCES if get_package(name) in LIBRARIES["torch"] - {"integrations", "testing"}}
        assert third_party(all_imports(), modules) - base_dependencies() == {"torch"}

    @pytest.mark.parametrize(
        ("text", "wanted"), [("import click.types", {"click"}), ("def f():\n    import torch", {"torch"})]
    )
    def test_an_import_that_the_base_install_lacks_is_found(self, text: str, wanted: set[str]) -> None:
        found = imports({**SOURCES, "shardckpt.readers.dcp.reader": text})
        assert third_party(found, torch_free_modules(found)) - base_dependencies() == wanted

    def test_an_offline_verb_that_reaches_training_is_found(self) -> None:
        found = imports({**SOURCES, "shardckpt.offline.diff": "def f():\n    from shardckpt.groups import LocalGroup"})
        assert "shardckpt.groups" in torch_free_modules(found)


class TestImportsStayLight:
    def test_no_format_plan_storage_convert_or_command_module_imports_torch(self) -> None:
        packages = {*TORCH_FREE, "cli"}
        wings = {n for n in torch_free_modules(all_imports()) if get_package(n) in WINGS}
        modules = {n for n in SOURCES if get_package(n) in packages} | wings
        names = sorted(n for n in modules if not n.endswith("__main__") and n != WITH_RANKS)
        assert "torch" not in loaded_by("\n".join(f"import {name}" for name in names))

    def test_loading_tensors_imports_neither_the_engine_nor_the_states_of_models(self, tmp_path: Path) -> None:
        state = 'state = {"weight": torch.zeros(4, 4), "step": 1}'
        save = f"import torch, shardckpt\n{state}\nshardckpt.save(state, {str(tmp_path / 'step')!r})"
        subprocess.run([sys.executable, "-c", save], check=True)
        load = save.replace("shardckpt.save", "shardckpt.load")
        shown = "\nimport sys\nprint(*[name for name in sys.modules if name.startswith('shardckpt.')])"
        done = subprocess.run([sys.executable, "-c", load + shown], capture_output=True, text=True, check=True)
        folders = {".".join(name.split(".")[:3]) for name in done.stdout.split() if name in SOURCES}
        assert {name for name in folders if name.startswith(("shardckpt.core.", "shardckpt.state."))} == {
            "shardckpt.core.lazy_names",
            "shardckpt.core.modules",
            "shardckpt.state.adapters",
            "shardckpt.state.keys",
            "shardckpt.state.local",
        }
        assert "shardckpt.events.run_events" not in done.stdout.split()
        assert len(done.stdout.split()) <= 111

    def test_the_package_and_the_command_import_nothing_heavy(self) -> None:
        loaded = loaded_by("import shardckpt\nimport shardckpt_cli.app")
        assert not loaded & {"torch", "numpy", "fsspec", "zstandard", "ml_dtypes", "rich"}

    def test_help_does_without_the_library(self) -> None:
        assert "shardckpt" not in loaded_by("import shardckpt_cli.app")


STREAM_CALLS = re.compile(
    r"\btorch\.(cuda|accelerator\.current_stream|Stream|Event)\b\(?|\.record_stream\(|\.(Stream|Event)\(device"
    r"|\"cpu\", \"meta\""
)
"""What only `devices` asks torch for, and the predicate for devices with streams."""
OTHER_CALLS = {
    ("shardckpt.core.fsdp2.fully_shard", "torch.Event"): "the type of an argument",
}


def test_one_module_asks_torch_for_streams():
    found = {
        (name, match.group().rstrip("("))
        for name, text in SOURCES.items()
        for match in STREAM_CALLS.finditer(text)
        if name != "shardckpt.devices" and not name.startswith(("shardckpt.encodings", "shardckpt.readers"))
    }
    assert found == set(OTHER_CALLS)


def test_one_module_has_a_pool_of_threads_which_works_until_the_process_is_gone():
    found = {name for name, text in SOURCES.items() if "ThreadPoolExecutor" in text}
    assert found == {"shardckpt.storage.thread_pool"}
