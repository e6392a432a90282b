"""Modules that must not import torch, and promised names and options; `lint-imports` holds the floors."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from tests.all_options import ALL_OPTIONS

import pytest_distcompat
from pytest_distcompat.plugin.options import OPTIONS

SOURCE = Path(pytest_distcompat.__file__).parent
MODULES = sorted(SOURCE.rglob("*.py"))

#: Started by name in another process; an import would run it in the wrong one.
BY_NAME = {
    "worker",
    "launch.server",
    "launch.supervisor",
    "cli.torch_facts",
    "ext.scripts.site.sitecustomize",
}
#: The only modules that need torch to be defined at all.
NEED_TORCH = {
    "ext.cluster.rendezvous",
    "ext.simulation.fake_ranks",
    "ext.upstream.models._calibrated",
    "ext.upstream.models.modules",
    "parallel.placeholder",
    "launch.agent",
    "ext.upstream.drivers._joined",
    "ext.upstream.drivers._iterables",
    "ext.upstream.drivers._samplers",
} | {
    f"probe.{m}"
    for m in (
        "tensors",
        "layouts",
        "meshes",
        "deepspeed_shards",
        "live",
        "optimizer",
        "wrapped_optimizers",
        "flat_masters",
        "states",
        "gradients",
        "dropouts",
        "inputs",
        "operators",
        "checkpoint_parts",
        "dcp",
        "pickles",
        "observe",
        "files",
        "snapshot",
        "extra",
        "weights",
    )
}


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(SOURCE).with_suffix("").parts)


def imports_of(path: Path, *, top_level_only: bool = False, types: bool = False) -> set[str]:
    """Return every module that the file imports; imports for the type checker only with ``types``."""
    modules: set[str] = set()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.If):
            is_for_types = ast.unparse(node.test) == "TYPE_CHECKING"
            if is_for_types and not types:
                node.body = [ast.Pass()]
    nodes = tree.body if top_level_only else list(ast.walk(tree))
    for node in nodes:
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            # A name that is imported from a package may be a module.
            modules.add(node.module)
            modules |= {f"{node.module}.{alias.name}" for alias in node.names}
    return modules


def ours(imports: set[str]) -> set[str]:
    """Return the imported modules of this package, without its name."""
    prefix = "pytest_distcompat."
    return {name.removeprefix(prefix) for name in imports if name.startswith(prefix)}


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Not for types either: two modules that must know each other are one, or miss a third."""
    path_by_name = {name_of(path): path for path in MODULES if path.name != "__init__.py"}
    graph: dict[str, set[str]] = {}
    for name, path in path_by_name.items():
        graph[name] = ours(imports_of(path, types=True)) & set(path_by_name)
    done: set[str] = set()

    def walk(name: str, trail: tuple[str, ...]) -> None:
        if name in trail:
            circle = (*trail[trail.index(name) :], name)
            pytest.fail(f"circle: {' -> '.join(circle)}")
        if name in done:
            return
        for other in sorted(graph[name]):
            walk(other, (*trail, name))
        done.add(name)

    for name in sorted(graph):
        walk(name, ())


def test_torch_is_imported_inside_functions_only() -> None:
    heavy = {"torch", "accelerate", "transformers", "deepspeed", "numpy"}
    importers = set()
    for path in MODULES:
        packages = {name.split(".")[0] for name in imports_of(path, top_level_only=True)}
        if packages & heavy:
            importers.add(name_of(path))
    assert importers <= NEED_TORCH


def test_one_module_alone_reads_pythons_clocks() -> None:
    """A test may freeze all others; see ``clock``."""
    names = {"time.sleep"}
    for clock in ("monotonic", "perf_counter", "time"):
        names |= {f"time.{clock}", f"time.{clock}_ns"}
    for path in MODULES:
        if name_of(path) == "clock":
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        attributes = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        used = (attributes | imports_of(path)) & names
        assert not used, f"{path} reads {sorted(used)}"


def test_nothing_imports_what_is_started_by_name() -> None:
    for path in MODULES:
        # A simulation is a process of its own, in place of ranks: it may import what ranks do.
        if name_of(path) != "ext.simulation.fake_ranks":
            assert not ours(imports_of(path)) & BY_NAME, path


def test_modules_and_public_names_have_docstrings() -> None:
    for path in MODULES:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        assert ast.get_docstring(tree), f"{path} has no docstring"
        for node in public_definitions(tree):
            # pytest documents its hooks.
            is_hook = node.name.startswith("pytest_")
            assert is_hook or ast.get_docstring(node), f"{path}: {node.name}"


def public_definitions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.ClassDef]:
    """Yield the public functions and classes of a module, and those in its public classes."""
    parents: list[ast.Module | ast.ClassDef] = [tree]
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            parents.append(node)
    for parent in parents:
        for node in parent.body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                yield node


def test_no_room_for_odds_and_ends() -> None:
    assert not {name_of(path).split(".")[-1] for path in MODULES} & {
        "utils",
        "util",
        "helpers",
        "common",
        "misc",
        "tools",
    }


def test_importing_everything_the_parent_needs_imports_no_torch() -> None:
    script = (
        "import sys, pytest_distcompat, pytest_distcompat.plugin, pytest_distcompat.plugin.session\n"
        "import pytest_distcompat.plugin.suite.run, pytest_distcompat.plugin.marked.run, pytest_distcompat.runner\n"
        "from pytest_distcompat import CHECKS\n"
        "from pytest_distcompat.drivers import DRIVERS\n"
        "from pytest_distcompat.models import MODELS\n"
        "from pytest_distcompat.strategies import STRATEGIES\n"
        "assert CHECKS.names() and DRIVERS.names() and MODELS.names() and STRATEGIES.names()\n"
        "heavy = {'torch', 'numpy', 'accelerate', 'transformers', 'deepspeed'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_importing_the_package_imports_no_pytest() -> None:
    script = "import sys, pytest_distcompat\nassert not {'pytest', '_pytest', 'torch'} & set(sys.modules)\n"
    subprocess.run([sys.executable, "-c", script], check=True)


def test_the_list_of_options_is_frozen() -> None:
    """A new option is a promise: think before you add one, then change CHANGELOG.md, docs/options.md and this list."""
    assert [option.flag for option in OPTIONS.values()] == [
        "--distcompat-gpus",
        "--distcompat-world-size",
        "--distcompat-ranks-per-gpu",
        "--distcompat-strategies",
        "--distcompat-precisions",
        "--distcompat-drivers",
        "--distcompat-profile",
        "--distcompat-budget",
        "--distcompat-shard",
        "--distcompat-known",
        "--distcompat-throughput",
        "--distcompat-timeout",
        "--distcompat-warm-timeout",
        "--distcompat-report",
        "--distcompat-baseline",
        "--distcompat-launcher",
        "--distcompat-verify",
        "--distcompat-nothing-ran",
    ]
    of_extensions = [option.flag for name, option in ALL_OPTIONS.items() if name not in OPTIONS]
    # Extensions are registered in the order of the installed metadata.
    assert sorted(of_extensions) == [
        "--distcompat-executor",
        "--distcompat-listen",
        "--distcompat-nodes",
        "--distcompat-reach",
        "--distcompat-reuse",
        "--distcompat-reuse-limit",
        "--distcompat-simulate",
        "--distcompat-token-file",
        "--distcompat-worker-nodes",
    ]


def test_the_list_of_public_names_is_frozen() -> None:
    assert sorted(pytest_distcompat.__all__) == [
        "CHECKS",
        "Cell",
        "Check",
        "CompatSuite",
        "DistcompatError",
        "Driver",
        "Incompatible",
        "LateFailure",
        "Matrix",
        "RunFailedError",
        "Trace",
        "UsageProblem",
        "Verdict",
        "World",
        "check",
        "check_driver",
        "fails",
        "refuses",
    ]
    assert all(hasattr(pytest_distcompat, name) for name in pytest_distcompat.__all__)


def test_the_fixtures_and_the_mark_are_frozen() -> None:
    from pytest_distcompat.ext.scripts import plugin
    from pytest_distcompat.plugin import fixtures
    from pytest_distcompat.plugin.marked import declare

    names = [*fixtures_of(fixtures), *fixtures_of(plugin)]
    of_ranks = ["cell", "world", "rank", "world_size", "device", "shared_dir", "process_group", "distcompat_case"]
    assert names == [*of_ranks, "distcompat"]
    assert declare.ARGUMENTS == ("world_size", "nodes", "strategies", "precisions", "options", "timeout")


def fixtures_of(module: ModuleType) -> list[str]:
    """Return the names of the fixtures that a module defines, in order."""
    tree = ast.parse(Path(str(module.__file__)).read_text(encoding="utf-8"))
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    names = []
    for function in functions:
        decorators = [ast.unparse(decorator) for decorator in function.decorator_list]
        if any("fixture" in decorator for decorator in decorators):
            names.append(function.name)
    return names


def test_actions_are_pinned_by_commit() -> None:
    """A tag can be moved to other code, which would run with the permissions of the workflow."""
    pinned = re.compile(r"uses: [\w./-]+@[0-9a-f]{40}  # v\d+\.\d+\.\d+$")
    uses = 0
    for file in sorted((Path(__file__).parents[2] / ".github").rglob("*.y*ml")):
        for line in file.read_text(encoding="utf-8").splitlines():
            if "uses:" not in line or "uses: ./" in line:
                continue
            uses += 1
            assert pinned.search(line.rstrip()), f"{file.name}: {line}"
    assert uses


def test_references_to_functions_lead_to_one() -> None:
    """A message of a test names the function to mend, as ``probe/live.py:compiled_modules``."""
    reference = re.compile(r"((?:\w+/)+\w+\.py):([a-zA-Z_]\w+)")
    for path in Path(__file__).parents[1].rglob("*.py"):
        for file, name in reference.findall(path.read_text(encoding="utf-8")):
            if not (SOURCE / file).exists():
                continue
            text = (SOURCE / file).read_text(encoding="utf-8")
            definition = re.compile(rf"^ *(?:def |class )?{name}\b", re.MULTILINE)
            assert definition.search(text), f"{path}: {file}:{name}"


def test_a_private_module_is_imported_in_its_own_package_only() -> None:
    names = {name_of(path) for path in MODULES}
    private_imports: dict[str, set[str]] = {}
    for path in MODULES:
        importer = name_of(path)
        for module in ours(imports_of(path, types=True)) & names:
            package, _, last = module.rpartition(".")
            is_private = last.startswith("_") and last != "__init__"
            if is_private and not importer.startswith(f"{package}."):
                private_imports.setdefault(importer, set()).add(module)
    assert not private_imports
