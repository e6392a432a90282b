"""``distcompat releases --changed``: the cells that execute what a release changes, with that release."""

from __future__ import annotations

import difflib
import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest

from pytest_distcompat.cli import main
from pytest_distcompat.ext.reach.analysis import AnalysedFile
from pytest_distcompat.ext.reach.branches import Executed, numbers_of
from pytest_distcompat.ext.reach.libraries import FileId
from pytest_distcompat.ext.reach.map import Context, ReachMap
from pytest_distcompat.ext.reach.store import write_map
from pytest_distcompat.ext.upstream import changed
from pytest_distcompat.ext.upstream.changed import read_change
from pytest_distcompat.ext.upstream.selected import Chosen, read_selection
from pytest_distcompat.failures import UsageProblem
from pytest_distcompat.report.document import Report

Wheel = Callable[..., None]

SUITE = """
from pytest_distcompat import CompatSuite, Matrix

class TestX(CompatSuite):
    driver = "accelerate"
    matrix = Matrix(strategies=("ddp", "fsdp2"), precisions=("fp32",))

def test_plain():
    pass
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed package of one file, with its metadata."""
    site = tmp_path / "site"
    (site / "madeup").mkdir(parents=True)
    (site / "madeup" / "__init__.py").write_text("A = 1\nB = 2\n", encoding="utf-8")
    (site / "madeup-1.0.dist-info").mkdir()
    (site / "madeup-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: madeup\nVersion: 1.0\n")
    monkeypatch.syspath_prepend(str(site))
    return site


def test_two_directories(tmp_path: Path, package: Path) -> None:
    """That of the package itself will do, and a path that begins with dots."""
    new = tmp_path / "new"
    (new / "madeup").mkdir(parents=True)
    (new / "madeup" / "__init__.py").touch()
    for text in (
        f"madeup@{package}..{new}",
        f"madeup@{package / 'madeup'}..{new / 'madeup'}",
        f"madeup@installed..{new}",
    ):
        change = read_change(text, tmp_path)
        assert change.text == f"madeup@{package}..{new}"
        assert change.target == new


def test_a_relative_directory(tmp_path: Path, package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    assert read_change("madeup@installed..../site", tmp_path).target == package
    assert read_change("madeup@../site..../site", tmp_path).text == f"madeup@{package}..{package}"


@pytest.mark.nightly
def test_releases_and_wheels(tmp_path: Path, wheel: Wheel, package: Path) -> None:
    """The release that is installed need not be installed again."""
    wheel("madeup", "1.0")
    wheel("madeup", "1.1")
    kept = tmp_path / "kept"
    change = read_change("madeup@1.0..1.1", kept)
    assert change.name == "madeup@1.1"
    assert change.text == f"madeup@{package}..{kept / 'madeup==1.1'}"
    wheels = [tmp_path / "wheels" / f"madeup-{version}-py3-none-any.whl" for version in ("1.0", "1.1")]
    change = read_change(f"madeup@{wheels[0]}..{wheels[1]}", kept)
    assert change.name == f"madeup@{wheels[1].name}"
    assert "1.1" in (change.target / "madeup.py").read_text(encoding="utf-8")


DIFF = """diff --git a/tests/x.py b/tests/x.py
--- a/tests/x.py
+++ b/tests/x.py
@@ -1 +1 @@
-x = 1
+x = 2
diff --git a/src/madeup/__init__.py b/src/madeup/__init__.py
index 1..2 100644
--- a/src/madeup/__init__.py
+++ b/src/madeup/__init__.py
@@ -1,2 +1,2 @@
 A = 1
-B = 2
+B = 3
diff --git a/src/madeup/fresh.py b/src/madeup/fresh.py
new file mode 100644
--- /dev/null
+++ b/src/madeup/fresh.py
@@ -0,0 +1 @@
+C = 4
"""


def test_a_diff_is_applied_to_a_copy(tmp_path: Path, package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    diff = tmp_path / "change.diff"
    diff.write_text(DIFF, encoding="utf-8")
    # Beside a repository of its own, as a cache in a checkout is.
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".git").mkdir()
    change = read_change(f"madeup@{diff}", tmp_path / "kept")
    assert (change.target / "madeup" / "__init__.py").read_text(encoding="utf-8") == "A = 1\nB = 3\n"
    assert (change.target / "madeup" / "fresh.py").read_text(encoding="utf-8") == "C = 4\n"
    assert (change.target / "madeup-1.0.dist-info").is_dir()
    assert "B = 2" in (package / "madeup" / "__init__.py").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("madeup", "'madeup' is no change of a package; expected: PACKAGE@FROM..TO"),
        ("madeup@1.0", "'madeup@1.0' is no change of a package"),
        ("madeup@1.0..", "is no change of a package"),
        ("madeup@no/where..installed", "no/where: there is no such directory"),
        ("madeup@no.whl..installed", "no.whl: there is no such wheel"),
        ("nowhere@installed..installed", "nowhere is not installed"),
        ("madeup@no.diff", "no.diff: No such file or directory"),
        ("madeup@other.diff", "other.diff: it changes no file of madeup"),
        ("madeup@wrong.diff", "wrong.diff: it does not fit the installed madeup: error: patch failed"),
    ],
)
@pytest.mark.usefixtures("package")
def test_a_change_that_cannot_be_read(text: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other.diff").write_text(DIFF.replace("madeup", "others"), encoding="utf-8")
    (tmp_path / "wrong.diff").write_text(DIFF.replace("B = 2", "B = 5"), encoding="utf-8")
    with pytest.raises(UsageProblem) as raised:
        read_change(text, tmp_path / "kept")
    assert message in str(raised.value)


def test_changed_needs_a_map(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["releases", "--into", str(tmp_path), "--changed", "accelerate@1..2", "--", "tests"]) == 2
    assert "--changed needs a map: --reach FILE" in capsys.readouterr().err


def test_a_selection_is_read_in_its_order(tmp_path: Path) -> None:
    path = tmp_path / "cells"
    lines = ["# from a map", "", "d/b-model_hf:gpt2: call step, save", "* d/*", "module:Driver/a", "- d/c", "* fsdp*"]
    path.write_text("\n".join(lines), encoding="utf-8")
    selection = read_selection(path)
    expected = {
        "d/b-model_hf:gpt2": Chosen(2, frozenset({"call step", "save"})),
        "d/x": Chosen(3, frozenset()),
        "module:Driver/a": Chosen(4, frozenset()),
        "e/fsdp2": Chosen(6, frozenset()),
        "d/c": None,
        "e/ddp": None,
    }
    assert {cell: selection.chosen(cell) for cell in expected} == expected
    with pytest.raises(pytest.UsageError, match=r"--distcompat-selection: .*none: No such file"):
        read_selection(tmp_path / "none")


def collected(pytester: pytest.Pytester, cells: str, *arguments: str) -> list[str]:
    """The ids of the tests that run with that file of cells."""
    pytester.makepyfile(SUITE)
    pytester.path.joinpath("cells").write_text(cells, encoding="utf-8")
    plugin = ["-p", changed.SELECTING_PLUGIN, "--distcompat-selection=cells", "--distcompat-gpus=0"]
    result = pytester.runpytest_subprocess("--collect-only", "-q", *plugin, *arguments)
    return [line.partition("[")[2].removesuffix("]") for line in result.outlines if "::" in line]


def test_only_the_cells_of_the_file_run_in_its_order(pytester: pytest.Pytester) -> None:
    """Also under a budget, which has an order of its own; other tests do not run."""
    for budget in ((), ("--distcompat-budget=1h@1",), ("--distcompat-budget=1h@2",)):
        nodeids = collected(pytester, "accelerate/fsdp2-fp32-w2\naccelerate/ddp-fp32-w2: start\n", *budget)
        cells = list(dict.fromkeys(name.partition(":")[0] for name in nodeids))
        assert cells == ["fsdp2-fp32-w2", "ddp-fp32-w2"]
        assert {"fsdp2-fp32-w2:active", "ddp-fp32-w2:active", "ddp-fp32-w2:resume"} <= set(nodeids)


@pytest.mark.nightly
def test_cells_that_only_the_new_release_can_run_do(pytester: pytest.Pytester) -> None:
    """The map of the old one knows nothing of them."""
    nodeids = collected(pytester, "accelerate/ddp-fp32-w2: load\n* accelerate/*\n")
    cells = list(dict.fromkeys(name.partition(":")[0] for name in nodeids))
    assert cells == ["ddp-fp32-w2", "fsdp2-fp32-w2"]
    assert "fsdp2-fp32-w2:active" in nodeids
    nodeids = collected(pytester, "accelerate/ddp-fp32-w2: load\n* accelerate/*\n- accelerate/fsdp2-fp32-w2\n")
    assert {name.partition(":")[0] for name in nodeids} == {"ddp-fp32-w2"}


def test_only_checks_whose_runs_do_such_an_action(pytester: pytest.Pytester) -> None:
    nodeids = collected(pytester, "accelerate/ddp-fp32-w2: load\n")
    assert "ddp-fp32-w2:resume" in nodeids
    assert "ddp-fp32-w2:active" not in nodeids


@pytest.mark.nightly
@pytest.mark.spawn
def test_a_broken_release_is_seen_by_the_cell_that_executes_the_change(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = importlib.util.find_spec("accelerate")
    assert spec is not None
    assert spec.origin is not None
    path, file_id = Path(spec.origin).parent / "accelerator.py", FileId("accelerate", "accelerator.py")
    file = AnalysedFile(path, file_id).file
    backward = next(function for function in file.functions if function.name == "Accelerator.backward")
    # The body may begin with a docstring.
    first = next(line for line in numbers_of(backward.body) if file.statements >> line & 1)
    old = path.read_text(encoding="utf-8").splitlines(keepends=True)
    new = [*old[: first - 1], "        raise ValueError('this release has no backward pass')\n", *old[first - 1 :]]
    names = ("a/src/accelerate/accelerator.py", "b/src/accelerate/accelerator.py")
    (tmp_path / "broken.diff").write_text("".join(difflib.unified_diff(old, new, *names)), encoding="utf-8")
    reach_map = ReachMap({}, {file_id: file})
    reach_map.add(file_id, Context("accelerate", "ddp-fp32-w2", "step"), Executed(backward.body))
    # The map knows this cell, and that it executes nothing of the change.
    reach_map.add(file_id, Context("accelerate", "fsdp2-fp32-w2", "step"), Executed())
    write_map(tmp_path / "r.sqlite", reach_map)
    (tmp_path / "test_x.py").write_text(SUITE, encoding="utf-8")
    options = ["--reach", str(tmp_path / "r.sqlite"), "--into", str(tmp_path / "kept"), "--limit", "5m"]
    change = ["--changed", f"accelerate@{tmp_path / 'broken.diff'}"]
    arguments = [str(tmp_path / "test_x.py"), "-k", "active", "--distcompat-gpus=0", "-p", "no:cacheprovider"]
    assert main(["releases", *change, *options, "--", *arguments]) == 1
    out = capsys.readouterr().out
    assert "selected cells: 1" in out
    assert "accelerate@broken.diff: 1 selected, 1 ran, 0 skipped: 1 failed" in out
    (result,) = Report.read(tmp_path / "kept" / "accelerate-broken.diff.json").results
    assert (result.cell, result.check) == ("ddp-fp32-w2", "active")
    assert "this release has no backward pass" in result.message
