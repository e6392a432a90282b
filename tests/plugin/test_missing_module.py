"""An import that fails though the module is in the repository says how pytest would find it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from pytest_distcompat.drivers import find_driver
from pytest_distcompat.failures import UsageProblem
from pytest_distcompat.missing_module import hint_of

AT_THE_TOP = "import pytest, my_loop\n@pytest.mark.distcompat\ndef test(): pass\n"
IN_THE_TEST = "import pytest\n@pytest.mark.distcompat\ndef test():\n    import my_loop\n"


def failing_import(name: str) -> ModuleNotFoundError:
    with pytest.raises(ModuleNotFoundError) as caught:
        __import__(name)
    return caught.value


@pytest.mark.parametrize(
    ("file", "layout"), [("my_loop.py", "."), ("src/my_loop.py", "src"), ("src/my_loop/__init__.py", "src")]
)
def test_the_directory_is_named(file: str, layout: str, tmp_path: Path) -> None:
    path = tmp_path / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    error = failing_import("my_loop")
    module = path.parent if path.name == "__init__.py" else path
    expected = (
        f"{module} is there, and pytest does not look in its directory: add pythonpath = {layout} to pytest's settings"
    )
    assert hint_of(error, tmp_path) == expected
    wrapped = ImportError("cannot import the test")
    wrapped.__cause__ = error
    assert hint_of(wrapped, tmp_path) == expected


def test_without_such_a_file_there_is_no_hint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    error = failing_import("my_loop")
    assert hint_of(error, tmp_path) == ""
    assert hint_of(ValueError("no"), tmp_path) == ""
    assert hint_of(None, tmp_path) == ""
    (tmp_path / "my_loop").mkdir()
    assert hint_of(error, tmp_path) == "", "a directory without modules"
    (tmp_path / "my_loop.py").touch()
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    assert hint_of(error, tmp_path) == "", "Python looked there"


def test_a_driver_in_the_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_loop.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry and Path(entry) != tmp_path])
    with pytest.raises(
        UsageProblem, match=r"No module named 'my_loop'; .*my_loop.py is there, .* add pythonpath = \. to "
    ):
        find_driver("my_loop:Driver")


def run(pytester: pytest.Pytester, source: str) -> str:
    """Run such a test beside a module of the repository; return the output."""
    # pytester puts the working directory itself on PYTHONPATH.
    (pytester.mkdir("src") / "my_loop.py").touch()
    (pytester.mkdir("tests") / "test_it.py").write_text(source, encoding="utf-8")
    return str(pytester.runpytest_subprocess("-p", "no:randomly").stdout)


def test_a_module_of_marked_tests_that_imports_it(pytester: pytest.Pytester) -> None:
    text = run(pytester, AT_THE_TOP)
    assert "No module named 'my_loop'" in text
    assert (
        "my_loop.py is there, and pytest does not look in its directory: add pythonpath = src to pytest's settings"
        in text
    )


def test_other_modules_are_left_to_pytest(pytester: pytest.Pytester) -> None:
    text = run(pytester, "import my_loop\n")
    assert "No module named 'my_loop'" in text
    assert "pythonpath" not in text


@pytest.mark.spawn
def test_a_test_that_imports_it_on_its_ranks(pytester: pytest.Pytester) -> None:
    text = run(pytester, IN_THE_TEST)
    assert text.count("add pythonpath = src to pytest's settings") == 1, text
    assert "ranks 0 and 1" in text
