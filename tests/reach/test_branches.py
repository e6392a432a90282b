"""Functions and branches of a source file, and what a rank's arcs say of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_distcompat.ext.reach.analysis import AnalysedFile
from pytest_distcompat.ext.reach.branches import Branch, Rank, bits_of, numbers_of
from pytest_distcompat.ext.reach.libraries import LIBRARIES, FileId, Library, installed_files

LIBRARY = Path(__file__).with_name("library.py")


def analysed(path: Path = LIBRARY, name: str = "trainer.py") -> AnalysedFile:
    return AnalysedFile(path, FileId("lib", name))


def of(file: AnalysedFile, function: str) -> list[Branch]:
    return [branch for branch in file.file.branches if branch.function == function]


def arrow(branch: Branch) -> tuple[int, int]:
    return branch.line, branch.target


def line_of(text: str) -> int:
    lines = LIBRARY.read_text(encoding="utf-8").splitlines()
    stripped = [line.strip() for line in lines]
    assert stripped.count(text) == 1
    return stripped.index(text) + 1


def test_all_functions_and_branches_are_found() -> None:
    file = analysed()
    names = ["Trainer.prepare", "Trainer._sharded", "Trainer._ready", "save", "helper"]
    assert [function.name for function in file.file.functions] == names
    shard = line_of("if shard:")
    branches = of(file, "Trainer.prepare")
    first, second = branches[:2]
    assert first.text == second.text == "if shard:"
    assert arrow(first) == (shard, shard + 1)
    assert arrow(second) == (shard, shard + 2)
    assert len(branches) == 6
    assert of(file, "save") == []


def test_public_functions_come_first_and_conditions_that_read_an_argument() -> None:
    file = analysed()
    public = {function.name: function.public for function in file.file.functions}
    # ``helper`` is not in ``__all__``.
    assert public == {
        "Trainer.prepare": True,
        "Trainer._sharded": False,
        "Trainer._ready": False,
        "save": True,
        "helper": False,
    }
    ranks = {branch.text: branch.rank for branch in file.file.branches}
    assert ranks["if shard:"] is Rank.PUBLIC_SETTING
    assert ranks["for _ in range(2):"] is Rank.PUBLIC
    assert ranks["if count:"] is Rank.SETTING
    assert ranks["if local > 2:"] is Rank.INTERNAL
    assert Rank.PUBLIC_SETTING < Rank.PUBLIC < Rank.SETTING < Rank.INTERNAL


SEVERAL_LINES = """
def f(a, b):
    if (
        a
        and b
    ):
        return 1
    return 2
"""


def test_a_condition_of_several_lines_is_one(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(SEVERAL_LINES, encoding="utf-8")
    file = analysed(path)
    assert {branch.text for branch in file.file.branches} == {"if ( a and b"}
    entered = file.executed([(3, 4)])
    assert set(numbers_of(entered.lines)) == {3}
    left = file.executed([(5, 7)])
    (taken,) = numbers_of(left.branches)
    assert arrow(file.file.branches[taken]) == (3, 7)


def test_without_a_list_of_exports_the_module_counts(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text("def f(a):\n    if a:\n        return 1\n    return 2\n", encoding="utf-8")
    public = analysed(path, "state.py").file
    assert [branch.rank for branch in public.branches] == [Rank.PUBLIC_SETTING] * 2
    internal = analysed(path, "_impl/state.py").file
    assert [branch.rank for branch in internal.branches] == [Rank.SETTING] * 2


def test_what_a_module_does_on_import_is_no_branch(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text("import sys\nif sys.path:\n    A = 1\nelse:\n    A = 2\n", encoding="utf-8")
    assert analysed(path).file.branches == ()


def test_arcs_become_lines_and_branches() -> None:
    file = analysed()
    shard = line_of("if shard:")
    target = shard + 2
    executed = file.executed([(-shard, shard), (shard, target), (target, -9)])
    (taken,) = numbers_of(executed.branches)
    assert arrow(file.file.branches[taken]) == (shard, target)
    assert set(numbers_of(executed.lines)) == {shard, target}
    by_name = {function.name: function for function in file.file.functions}
    assert by_name["Trainer.prepare"].body & executed.lines
    assert not by_name["save"].body & executed.lines


@pytest.mark.parametrize("numbers", [[], [0], [3, 1, 200]])
def test_bits(numbers: list[int]) -> None:
    assert list(numbers_of(bits_of(numbers))) == sorted(numbers)


def test_files_are_found_by_patterns(tmp_path: Path) -> None:
    """A new release's new file counts without a change."""
    names = ["trainer_new.py", "other.py", "integrations/new/deep.py", "test_utils/trainer.py"]
    for name in names:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    patterns = ("trainer*.py", "integrations/**/*.py", "test_utils/*.py")
    library = Library("lib", patterns, without=("test_utils",))
    files = library.files(tmp_path)
    paths = [path.relative_to(tmp_path).as_posix() for path in files]
    assert paths == ["integrations/new/deep.py", "trainer_new.py"]


def test_each_installed_library_has_files() -> None:
    """A pattern that finds nothing any more would leave its part of a library out in silence."""
    pytest.importorskip("torch")
    files = {str(file_id) for file_id in installed_files().values()}
    wanted = [
        "accelerate/accelerator.py",
        "transformers/trainer.py",
        "deepspeed/runtime/engine.py",
        "torch/distributed/fsdp/__init__.py",
    ]
    installed = {file.partition("/")[0] for file in files}
    for name in wanted:
        if name.partition("/")[0] in installed:
            assert name in files
    assert installed <= {library.name for library in LIBRARIES}
    assert "accelerate/commands/launch.py" not in files
