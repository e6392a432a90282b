"""``distcompat releases``: other releases beside the installed ones, by hand-made wheels; nothing is fetched from anywhere."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pytest_distcompat.cli import main
from pytest_distcompat.ext.upstream import side_by_side
from pytest_distcompat.ext.upstream._release_runs import Run, table
from pytest_distcompat.failures import UsageProblem
from pytest_distcompat.report.document import Report
from pytest_distcompat.status import Status, Verdict

Wheel = Callable[..., None]


def version_of(module: str, target: Path) -> str:
    """Return the version that Python imports with the directory first on its path."""
    command = [sys.executable, "-c", f"import {module}; print({module}.__version__)"]
    out = subprocess.run(command, env=side_by_side.environment(target), capture_output=True, text=True, check=True)
    return out.stdout.strip()


@pytest.mark.nightly
def test_a_release_comes_with_what_it_needs_and_is_not_there(wheel: Wheel, tmp_path: Path) -> None:
    wheel("madeup", "1.0", "madeup_words<2", "packaging>=20", 'nowhere; extra == "all"', "torch>=99")
    wheel("madeup_words", "1.5", "madeup_letters")
    wheel("madeup_words", "2.0")
    wheel("madeup_letters", "3.0")
    target = side_by_side.install("madeup==1.0", tmp_path / "kept")
    names = sorted(path.name for path in target.glob("*.py"))
    # packaging is there; torch is never fetched; nobody asked for the extra.
    assert names == ["madeup.py", "madeup_letters.py", "madeup_words.py"]
    assert version_of("madeup_words", target) == "1.5"


@pytest.mark.nightly
def test_installed_packages_are_those_that_python_imports(
    wheel: Wheel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two on the path the first counts."""
    wheel("madeup", "1.0", "madeup_words<2")
    for version in ("2.0", "1.0"):
        wheel("madeup_words", version)
        monkeypatch.syspath_prepend(str(side_by_side.install(f"madeup_words=={version}", tmp_path / "there")))
    target = side_by_side.install("madeup==1.0", tmp_path / "kept")
    assert sorted(path.name for path in target.glob("*.py")) == ["madeup.py"]


@pytest.mark.nightly
def test_requirements_that_contradict_one_another(wheel: Wheel, tmp_path: Path) -> None:
    wheel("madeup", "1.0", "madeup_words<2", "madeup_letters")
    wheel("madeup_letters", "1.0", "madeup_words>=2")
    for version in ("1.0", "2.0"):
        wheel("madeup_words", version)
    kept = tmp_path / "kept"
    with pytest.raises(UsageProblem, match=r"madeup==1.0: its requirements contradict one another: madeup_words"):
        side_by_side.install("madeup==1.0", kept)
    assert list(kept.iterdir()) == []


def test_several_packages_at_once(wheel: Wheel, tmp_path: Path) -> None:
    wheel("madeup", "1.0")
    wheel("other", "2.0")
    target = side_by_side.install("madeup==1.0,other==2.0", tmp_path)
    assert version_of("madeup", target) == "1.0"
    assert version_of("other", target) == "2.0"


def test_a_release_is_installed_once(wheel: Wheel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel("madeup", "1.0")
    first = side_by_side.install("madeup==1.0", tmp_path)
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "gone"))
    assert side_by_side.install("madeup==1.0", tmp_path) == first


@pytest.mark.nightly
def test_another_environment_needs_other_packages_with_it(
    wheel: Wheel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Releases are kept for all environments; the first one had what the second has not."""
    wheel("madeup", "1.0", "madeup_words<2")
    wheel("madeup_words", "1.0")
    with monkeypatch.context() as first:
        first.syspath_prepend(str(side_by_side.install("madeup_words==1.0", tmp_path / "there")))
        target = side_by_side.install("madeup==1.0", tmp_path / "kept")
        assert sorted(path.name for path in target.glob("*.py")) == ["madeup.py"]
    assert version_of("madeup_words", side_by_side.install("madeup==1.0", tmp_path / "kept")) == "1.0"


@pytest.mark.nightly
def test_a_url_is_fetched_every_time(wheel: Wheel, tmp_path: Path) -> None:
    """The main branch of yesterday is not that of today."""
    wheel("madeup", "1.0", "madeup_words")
    wheel("madeup_words", "1.0")
    release = f"madeup @ {(tmp_path / 'wheels' / 'madeup-1.0-py3-none-any.whl').as_uri()}"
    assert version_of("madeup", side_by_side.install(release, tmp_path / "kept")) == "1.0"
    wheel("madeup_words", "1.1")
    target = side_by_side.install(release, tmp_path / "kept")
    assert version_of("madeup_words", target) == "1.1"
    assert target.parent == tmp_path / "kept"


@pytest.mark.nightly
def test_an_incomplete_installation_is_repeated(wheel: Wheel, tmp_path: Path) -> None:
    wheel("madeup", "1.0", "madeup_words")
    kept = tmp_path / "kept"
    with pytest.raises(UsageProblem, match=r"pip cannot install madeup_words: .*madeup_words"):
        side_by_side.install("madeup==1.0", kept)
    wheel("madeup_words", "1.0")
    assert version_of("madeup_words", side_by_side.install("madeup==1.0", kept)) == "1.0"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("madeup", "madeup: which release? Expected: madeup==1.2.3 or madeup @ git+https://..."),
        ("madeup>=1", "madeup>=1: which release?"),
        ("madeup==1.*", "which release?"),
        ("==1.0", "'==1.0' is no release of a package; expected: transformers==4.57.6"),
        ("madeup==1.0,other", "other: which release?"),
    ],
)
def test_an_invalid_release_is_a_usage_error(text: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["releases", "--release", text, "--", "tests"]) == 2
    assert message in capsys.readouterr().err


def test_a_release_that_does_not_exist(wheel: Wheel, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wheel("madeup", "1.0")
    assert main(["releases", "--into", str(tmp_path), "--release", "madeup==7.0", "--", "tests"]) == 2
    error = capsys.readouterr().err
    assert "pip cannot install madeup==7.0: " in error
    assert "No matching distribution found" in error


@pytest.mark.nightly
def test_all_releases_are_installed_before_any_run(
    wheel: Wheel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run takes minutes, and what it found was lost."""
    wheel("madeup", "1.0")
    command = ["--into", str(tmp_path), "--release", "madeup==1.0", "--release", "madeup==7.0"]
    assert main(["releases", *command, "--", str(tmp_path)]) == 2
    printed = capsys.readouterr()
    assert "pip cannot install madeup==7.0: " in printed.err
    assert "pytest writes to" not in printed.err
    assert printed.out == ""


@pytest.mark.parametrize(
    ("option", "name", "message"),
    [
        ("-o", "", "Is a directory"),
        ("-o", "nowhere/page.md", "No such file or directory"),
        ("--into", "file", "File exists"),
    ],
)
def test_an_unwritable_output_is_reported_before_any_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str, name: str, message: str
) -> None:
    (tmp_path / "file").touch()
    into = [] if option == "--into" else ["--into", str(tmp_path)]
    code = main(["releases", *into, option, str(tmp_path / name), "--release", "madeup==1.0", "--", str(tmp_path)])
    assert code == 2
    assert capsys.readouterr().err == f"distcompat: {tmp_path / name}: {message}\n"


DRIVER = """
import madeup
from pytest_distcompat import Cell, CompatSuite, Matrix
from pytest_distcompat.drivers.torch import TorchDriver
from pytest_distcompat.status import Status, Verdict

class Mine(TorchDriver):
    name = "mine"

    def step(self, number):
        if madeup.__version__ == "1.0":
            raise ValueError("madeup 1.0 loses a gradient")
        return super().step(number)

class TestMine(CompatSuite):
    driver = "test_mine:Mine"
    matrix = Matrix(strategies=("ddp",), precisions=("fp32",), world_sizes=(2,))
"""


@pytest.mark.nightly
@pytest.mark.spawn
def test_the_table_has_red_releases_and_causes(
    wheel: Wheel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for version in ("1.0", "1.1", "2.0"):
        wheel("madeup", version)
    suite, page, kept = tmp_path / "test_mine.py", tmp_path / "page.md", tmp_path / "kept"
    suite.write_text(DRIVER)
    # What is installed: one that is on the path already.
    monkeypatch.setenv("PYTHONPATH", str(side_by_side.install("madeup==2.0", tmp_path / "there")))
    command = ["--release", "madeup==1.0", "--release", "madeup==1.1", "--into", str(kept), "-o", str(page)]
    code = main(
        [
            "releases",
            *command,
            "--",
            str(suite),
            "-k",
            "active or parity",
            "--distcompat-gpus=0",
            "-p",
            "no:cacheprovider",
        ]
    )
    out = capsys.readouterr().out
    assert code == 1
    assert out.splitlines()[:3] == [
        "madeup==1.0: 2 selected, 2 ran, 0 skipped: 2 failed",
        "madeup==1.1: 2 selected, 2 ran, 0 skipped: 2 passed",
        "installed: 2 selected, 2 ran, 0 skipped: 2 passed",
    ]
    written = page.read_text(encoding="utf-8")
    assert written in out
    lines = written.splitlines()
    assert lines[0] == "| | madeup==1.0 | madeup==1.1 | installed |"
    assert "| red | 2 | 0 | 0 |" in lines
    assert "madeup 1.0 loses a gradient [ddp-fp32-w2 (" in lines[-1]
    assert lines[-1].endswith(": active] | 2 |  |  |")
    assert Report.read(kept / "madeup==1.0.json").results[0].status == "failed"
    assert "madeup 1.0 loses a gradient" in (kept / "madeup==1.0.log").read_text(encoding="utf-8")


@pytest.mark.nightly
def test_a_run_without_a_report_is_no_pass(wheel: Wheel, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wheel("madeup", "1.0")
    command = ["releases", "--into", str(tmp_path), "--release", "madeup==1.0", "--"]
    assert main([*command, str(tmp_path / "no_such_test.py"), "-p", "no:cacheprovider"]) == 1
    out = capsys.readouterr().out
    assert f"madeup==1.0: no report, pytest ended with 4: {tmp_path / 'madeup==1.0.log'}" in out
    assert "| red | - | - |" in out


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("text", "code"),
    [
        pytest.param("import no_such_module", 2, id="import"),
        pytest.param("def test_a_session_without_a_suite(): assert 0", 1, id="test", marks=pytest.mark.nightly),
        pytest.param("", 5, id="none", marks=pytest.mark.nightly),
    ],
)
def test_a_session_with_an_incomplete_report_is_no_pass(
    wheel: Wheel, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, code: int
) -> None:
    """The report of a module that cannot be imported is empty, and nothing in it is red."""
    wheel("madeup", "1.0")
    module = tmp_path / "test_something.py"
    module.write_text(text)
    command = [
        "releases",
        "--into",
        str(tmp_path),
        "--release",
        "madeup==1.0",
        "--",
        str(module),
        "-p",
        "no:cacheprovider",
    ]
    assert main(command) == 1
    assert f"pytest ended with {code}: {tmp_path / 'madeup==1.0.log'}" in capsys.readouterr().out.splitlines()[0]


@pytest.mark.nightly
@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_lets_pytest_end_what_it_began(wheel: Wheel, tmp_path: Path) -> None:
    wheel("madeup", "1.0")
    module, log = tmp_path / "test_long.py", tmp_path / "madeup==1.0.log"
    module.write_text("""
import time, pytest

@pytest.fixture
def ranks():
    yield
    time.sleep(1)
    print("ranks are ended")

def test_long(ranks):
    print("began", flush=True)
    time.sleep(60)
""")
    options = ["releases", "--into", str(tmp_path), "--release", "madeup==1.0", "--", str(module), "-s"]
    command = [sys.executable, "-m", "pytest_distcompat.cli", *options, "-p", "no:cacheprovider"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as message:
        deadline = time.monotonic() + 60
        while not (log.exists() and "began" in log.read_text()) and time.monotonic() < deadline:
            time.sleep(0.05)
        os.killpg(message.pid, signal.SIGINT)
        out, _ = message.communicate(timeout=60)
    assert message.returncode == 130
    assert out.splitlines() == [f"madeup==1.0: pytest writes to {log}"]
    assert "ranks are ended" in log.read_text()


def test_a_cause_is_one_line_whatever_its_numbers() -> None:
    """One release's loss is 4.656, another's 4.65601: the same defect."""

    def made(loss: str) -> Report:
        message = f"step 1: the loss is {loss}; 4.84225 in the reference | allowed: 2e-05"
        result = Verdict(
            "parity", "ddp-fp32-w2", Status.FAILED, message, driver="d", nodeid="t.py::S::test[ddp-fp32-w2:parity]"
        )
        return Report({"runs": 1, "seconds": 1.0}, [result], [])

    lines = list(
        table([Run("a==1", made("4.656")), Run("a==2", made("4.65601")), Run("installed", None, "no report: x")])
    )
    assert lines[-2] == (
        "| step 1: the loss is 4.65601; 4.84225 in the reference \\| allowed: 2e-05 [ddp-fp32-w2 (d): parity] | 1 | 1 |  |"
    )
    assert lines[-1] == "\ninstalled: no report: x"
