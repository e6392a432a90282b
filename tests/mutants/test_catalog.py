"""Each listed bug has its mutant, and each mutant still fits the packages that are installed. Nothing is run here."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from .mutation import Mutant

TESTS = str(Path(__file__).parents[1])
if TESTS not in sys.path:
    sys.path.append(TESTS)
# By this name everywhere: a relative import here would make second copies of the classes.
catalog = importlib.import_module("mutants.catalog")
mutation = importlib.import_module("mutants.mutation")
MUTANTS: tuple[Mutant, ...] = catalog.MUTANTS

#: The bugs that were brought back by hand once. A mutant may be added, none of these may be lost.
LISTED = [
    "acc-999-sched-gas",
    "acc-1755-fsdp1-optim-args",
    "acc-2674-fsdp1-upcast",
    "acc-3146-zero3-save-model",
    "acc-3361-fp8-ds",
    "acc-3465-clip-norm",
    "acc-3528-no-dtype-attr",
    "acc-3528-size-wrap",
    "acc-3554-compile-names",
    "acc-3630-ds-boundary",
    "acc-3638-ds-gas-auto",
    "acc-3656-ds-no-sync",
    "acc-3731-ignored-modules",
    "acc-3904-dcp-optim",
    "acc-3905-upcast-noop",
    "acc-3971-planner",
    "acc-3982-zip-load",
    "acc-4119-path-marker",
    "acc-4172-ac-children",
    "ds-5150-clip",
    "ds-5170-bf16-allreduce",
    "ds-7580-overflow-z1",
    "ds-7586-z0-load-path",
    "ds-7786-z0-bf16-ckpt",
    "ds-7839-z0-zero-grad",
    "ds-8029-frozen-masters",
    "pt-125708-init-optim-lr",
    "tr-25852-fsdp-optim-name",
    "tr-34191-ga-token-mean",
    "tr-34242-ddp-token-mean",
    "tr-36627-save-only",
    "tr-37147-fsdp2-delay",
    "tr-fsdp-version-ignored",
    "tr-shift-count",
]

each_mutant = pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.id)


def need(mutant: Mutant) -> None:
    for package in {edit.package for edit in mutant.edits}:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")


def test_every_listed_bug_has_a_mutant() -> None:
    assert len(LISTED) == 34
    assert not set(LISTED) - set(catalog.BY_ID)


def test_no_two_mutants_have_one_id() -> None:
    assert len(catalog.BY_ID) == len(MUTANTS)


@each_mutant
def test_a_mutant_has_a_description(mutant: Mutant) -> None:
    assert mutant.symptom
    assert "\n" not in mutant.symptom
    assert mutant.upstream
    assert all(link.startswith("https://github.com/") for link in mutant.upstream)


@each_mutant
def test_the_edits_fit_the_installed_source(mutant: Mutant) -> None:
    need(mutant)
    for file, text in mutation.edited(mutant).items():
        compile(text, file, "exec")  # a wrong indent would be an error in every run, and look like a caught bug


def test_an_edit_that_no_longer_fits_says_where() -> None:
    edit = mutation.Edit("pytest/__init__.py", "no such text", "")
    mutant = mutation.Mutant("x-1-y", ("https://github.com/",), "none", (edit,))
    with pytest.raises(mutation.UpstreamChangedError, match=r"x-1-y: pytest/__init__\.py of pytest .* 0 times"):
        mutation.edited(mutant)


def test_a_copy_is_what_gets_imported_and_keeps_its_bytecode_to_itself(tmp_path: Path) -> None:
    line = "from __future__ import annotations\n"
    edit = mutation.Edit("pytest/__init__.py", line, f"{line}MUTATED = True\n")
    mutant = mutation.Mutant("x-2-y", ("https://github.com/",), "none", (edit,))
    before = bytecode(mutation.installed("pytest"))
    copy = mutation.mutated_copy(mutant, tmp_path / "copy")
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    run = subprocess.run(
        [sys.executable, "-c", "import pytest; print(pytest.MUTATED, pytest.__file__)"],
        env=environment | {"PYTHONPATH": str(copy)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.stdout.split() == ["True", str(copy / "pytest" / "__init__.py")], run.stderr
    assert bytecode(mutation.installed("pytest")) == before
    written = [path for path in copy.rglob("*.pyc") if not path.is_symlink()]
    assert any(path.name.startswith("__init__.") for path in written)


def bytecode(package: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in (package / "__pycache__").glob("*.pyc")}
