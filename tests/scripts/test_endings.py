"""Every way in which a rank, or its launcher, can end: the verdict is never better than the worst of them."""

from __future__ import annotations

import os
import subprocess
import sys
import unittest
from pathlib import Path

import psutil
import pytest

from pytest_distcompat.ext.scripts import ScriptRun, launch
from pytest_distcompat.ext.scripts.launching import Host
from pytest_distcompat.failures import Incompatible, RunFailedError, UsageProblem
from pytest_distcompat.launch.forensics.ending import Ending
from pytest_distcompat.launch.process import alive

from .conftest import PROGRAMS, Launch, pids

pytestmark = pytest.mark.spawn

TWO_RANKS = (str(PROGRAMS / "start_ranks.py"), "2", str(PROGRAMS / "ends.py"))


@pytest.fixture(scope="module")
def ends(run: Launch) -> Launch:
    """Return a function that runs two ranks of a custom launcher, which end in a given way; each way runs once."""

    def ends(how: str, *more: str, ranks: int = 2, timeout: float = 30.0) -> ScriptRun:
        line = [PROGRAMS / "start_ranks.py", ranks, PROGRAMS / "ends.py", how, *more]
        return run(sys.executable, *line, launcher="cli", timeout=timeout)

    return ends


def test_a_run_of_good_ranks_succeeds(ends: Launch) -> None:
    run = ends("well")
    assert not run.failed, run.text()
    assert [end.status for end in run.ending.ranks] == ["done", "done"]


@pytest.mark.parametrize(
    "ignored",
    [
        pytest.param((), id="launcher fails too", marks=pytest.mark.nightly),
        pytest.param(("--ignore",), id="launcher says all is well"),
    ],
)
@pytest.mark.parametrize(
    ("how", "kind", "expected"),
    [
        ("raise", "raised", "rank 1 raised ValueError: rank 1 does not want to"),
        pytest.param("hook", "raised", "rank 1 raised ValueError: rank 1 does not want to", marks=pytest.mark.nightly),
        pytest.param(
            "exit in except", "raised", "rank 1 raised ValueError: rank 1 does not want to", marks=pytest.mark.nightly
        ),
        pytest.param(
            "begin again and raise",
            "raised",
            "rank 1 raised ValueError: rank 1 does not want to",
            marks=pytest.mark.nightly,
        ),
        ("exit", "crashed", "rank 1 exited with code 3 without a report"),
        pytest.param(
            "exit in finally", "crashed", "rank 1 exited with code 3 without a report", marks=pytest.mark.nightly
        ),
        pytest.param("crash", "crashed", "rank 1 was killed by SIGSEGV", marks=pytest.mark.nightly),
        ("kill", "crashed", "rank 1 ended without a report"),
        ("vanish", "crashed", "rank 1 ended without a report"),
    ],
)
def test_one_failed_rank_fails_the_run(
    ends: Launch, how: str, kind: str, expected: str, ignored: tuple[str, ...]
) -> None:
    run = ends(how, *ignored)
    assert run.ending.kind == kind, run.text()
    assert run.ending.headline() == expected


def test_a_launcher_that_leaves_its_ranks_alone_is_a_failure(ends: Launch) -> None:
    run = ends("hang", "--leave")
    assert run.ending.headline() == f"{sys.executable} ended (exit code 0) while rank 1 still ran"
    assert not any(map(alive, pids(run)))


def test_an_exception_is_shown_with_its_traceback(ends: Launch) -> None:
    assert "in inner" in ends("exit in except").text()


@pytest.mark.parametrize("how", ["caught", "child", "begin again"])
def test_an_event_that_ends_no_rank_is_no_failure(ends: Launch, how: str) -> None:
    run = ends(how)
    assert not run.failed, run.text()


def test_a_hang_shows_stacks_and_all_processes_are_killed(ends: Launch) -> None:
    run = ends("hang", "--session", timeout=3.0)
    assert run.ending.kind == "hung", run.text()
    assert "time limit of 3 s" in run.ending.headline()
    assert "ends.py" in run.text()
    assert not any(map(alive, pids(run)))


def test_a_launcher_that_is_killed_is_a_failure_and_its_ranks_are_found(ends: Launch) -> None:
    """They live in sessions of their own: nothing but their birth ties them to it."""
    run = ends("kill the launcher", "--session")
    assert run.ending.kind == "crashed"
    assert run.ending.headline() == f"{sys.executable} was killed by SIGKILL"
    assert not any(map(alive, pids(run)))


def test_processes_left_by_a_rank_are_killed_and_named(ends: Launch) -> None:
    run = ends("leave one behind")
    assert not run.failed, run.text()
    assert "left running by a rank, now killed: sleep" in run.text()


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [(1, "rank 1 never started"), (3, "rank 2 announced itself too; expected 2 ranks")],
)
def test_a_wrong_number_of_ranks_is_a_failure(ends: Launch, ranks: int, expected: str) -> None:
    run = ends("well", ranks=ranks)
    assert run.failed
    assert run.ending.headline() == expected


def test_a_command_without_ranks_is_a_failure(host: Host) -> None:
    run = launch(sys.executable, "-c", "print('all is well')", launcher="cli", host=host, allow_failure=True)
    assert run.failed
    assert "no process announced itself as a rank" in run.ending.headline()
    assert "all is well" in run.text()


def test_python_without_its_environment_is_no_rank(ends: Launch, host: Host) -> None:
    line = [str(PROGRAMS / "start_ranks.py"), "2", "-I", str(PROGRAMS / "ends.py"), "well"]
    run = launch(sys.executable, *line, launcher="cli", host=host, allow_failure=True)
    assert "started with -E, -I or -S" in run.ending.headline()


def test_a_launcher_that_fails_after_its_ranks_is_a_failure(host: Host) -> None:
    script = f"import subprocess, sys; subprocess.run([sys.executable, r'{PROGRAMS / 'start_ranks.py'}', '2', r'{PROGRAMS / 'ends.py'}', 'well']); sys.exit(7)"
    run = launch(sys.executable, "-c", script, launcher="cli", host=host, allow_failure=True)
    assert run.ending.headline() == f"all ranks ended well, but {sys.executable} exited with code 7"


def test_launch_raises_with_the_report_of_the_run(host: Host) -> None:
    line = [str(PROGRAMS / "start_ranks.py"), "2", str(PROGRAMS / "ends.py"), "raise"]
    with pytest.raises(RunFailedError, match="rank 1 raised ValueError: rank 1 does not want to") as failure:
        launch(sys.executable, *line, launcher="cli", host=host, timeout=30)
    assert "this run alone: env " in str(failure.value)


def test_ranks_die_with_the_process_that_launched_them(tmp_path: Path) -> None:
    """Pytest itself may be killed: a pipe to it is all that the supervisor has to go by."""
    line = ["2", str(PROGRAMS / "ends.py"), "hang", "--session", f"--{tmp_path.name}"]
    script = (
        "from pytest_distcompat.ext.scripts import launch, launching; import sys\n"
        f"launch(sys.executable, {str(PROGRAMS / 'start_ranks.py')!r}, *{line!r}, launcher='cli', timeout=100)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], env={**os.environ, "TMPDIR": str(tmp_path)})
    try:
        _until(lambda: len(_running(f"--{tmp_path.name}")) >= 3)
    finally:
        parent.kill()
        parent.wait()
    _until(lambda: not _running(f"--{tmp_path.name}"))


@pytest.mark.parametrize(("how", "kept"), [pytest.param("well", 0, marks=pytest.mark.nightly), ("raise", 1)])
def test_the_temporary_directory_of_a_failed_run_is_kept(how: str, kept: int, tmp_path: Path) -> None:
    line = ["2", str(PROGRAMS / "ends.py"), how]
    script = (
        "from pytest_distcompat.ext.scripts import launch; import sys\n"
        f"run = launch(sys.executable, {str(PROGRAMS / 'start_ranks.py')!r}, *{line!r}, launcher='cli', allow_failure=True)\n"
        "assert (run.directory / 'launcher.log').exists()\n"
    )
    subprocess.run([sys.executable, "-c", script], env={**os.environ, "TMPDIR": str(tmp_path)}, check=True)
    assert len(list(tmp_path.glob("distcompat-python*"))) == kept


def test_the_temporary_directory_of_a_killed_process_is_removed_by_the_next(tmp_path: Path) -> None:
    line = ["2", str(PROGRAMS / "ends.py"), "hang", f"--{tmp_path.name}"]
    script = (
        "from pytest_distcompat.ext.scripts import launch; import sys\n"
        f"launch(sys.executable, {str(PROGRAMS / 'start_ranks.py')!r}, *{line!r}, launcher='cli', timeout=100)\n"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    parent = subprocess.Popen([sys.executable, "-c", script], env=environment)
    try:
        _until(lambda: len(_running(f"--{tmp_path.name}")) >= 3)
        (directory,) = tmp_path.glob("distcompat-python*")
    finally:
        parent.kill()
        parent.wait()
    _until(lambda: not _running(f"--{tmp_path.name}"))
    owner = "from pytest_distcompat.launch.temporary import OwnedDirectory; OwnedDirectory()"
    subprocess.run([sys.executable, "-c", owner], env=environment, check=True)
    assert not directory.exists()


def test_the_users_own_sitecustomize_still_comes(host: Host, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import os; os.environ['THEIRS'] = __file__\n", encoding="utf-8")
    script = tmp_path / "show.py"
    script.write_text(
        "import os, sys, sitecustomize\n"
        "shown = os.environ['THEIRS'], sitecustomize.__file__, [p for p in sys.path if 'distcompat/scripts' in p]\n"
        # One write a line: ranks share the launcher's output, and print writes each of its words by itself.
        "os.write(1, (' '.join(map(str, shown)) + '\\n').encode())\n",
        encoding="utf-8",
    )
    line = [str(PROGRAMS / "start_ranks.py"), "2", str(script)]
    path = os.pathsep.join((str(tmp_path), os.environ.get("PYTHONPATH", "")))
    run = launch(sys.executable, *line, launcher="cli", host=host, environment={"PYTHONPATH": path})
    theirs = str(tmp_path / "sitecustomize.py")
    shown = (run.directory / "launcher.log").read_text(encoding="utf-8")
    assert f"{theirs} {theirs} []" in shown


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"launcher": "mpirun"}, "no launcher named 'mpirun'. Known: torchrun, accelerate, cli"),
        ({"strategy": "zero9"}, "zero9"),
        ({"precision": "fp64"}, "fp64"),
        ({"strategy": "ddp", "options": {"cpu_offload": True}}, "DDP has nothing to offload"),
        ({"strategy": "ddp", "options": {"colour": 1}}, "no option named 'colour'. Known: model"),
        ({"options": "compile"}, "options='compile': expected a mapping of names to values"),
        ({"timeout": 0}, "timeout=0: expected a number of seconds above 0"),
        ({"timeout": "5"}, "timeout='5': expected a number of seconds above 0"),
        ({"world_size": 0}, "world_size=0: expected a number of ranks, 1 or more"),
        ({"world_size": 2.0}, "world_size=2.0: expected a number of ranks"),
        ({"blocks": 3}, "blocks=3: expected class names"),
        ({"watch_steps": -1}, "watch_steps=-1: expected a number of steps, 0 for no probe"),
        ({"cwd": "no/such"}, "cwd='no/such': there is no such directory"),
        ({"environment": {"A": 1}}, "environment={'A': 1}: expected texts"),
        ({"environment": "A=1"}, "environment='A=1': expected a mapping of names to texts"),
        ({"configuration": "fsdp2.yaml"}, "configuration='fsdp2.yaml' is not used: launcher 'torchrun' takes none"),
        ({"timeout": -1}, "a number of seconds above 0"),
    ],
)
def test_wrong_words(host: Host, settings: dict[str, object], expected: str) -> None:
    with pytest.raises(UsageProblem, match=expected):
        launch(PROGRAMS / "ends.py", "well", host=host, **settings)  # type: ignore[arg-type]


def test_suspicious_arguments_are_refused(host: Host) -> None:
    with pytest.raises(UsageProblem, match=r"\['--steps', '5'\] is given as one argument"):
        launch(PROGRAMS / "ends.py", ["--steps", "5"], host=host)  # type: ignore[arg-type]
    with pytest.raises(UsageProblem, match=r"script=\['train.py'\]: expected a path"):
        launch(["train.py"], host=host)  # type: ignore[arg-type]
    with pytest.raises(UsageProblem, match=r"{configuration} stands for no file: give configuration=, or strategy="):
        launch(PROGRAMS / "ends.py", "--config={configuration}", host=host)


def test_an_inexpressible_cell_is_fine_without_a_file(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script by torchrun that shards in fp8 under DeepSpeed was refused, for accelerate's file has no word for that."""
    monkeypatch.setattr("pytest_distcompat.launch.hosting.Hosted.run", lambda self: Ending((), {}, command=self.name))
    script_run = launch(PROGRAMS / "ends.py", "well", strategy="zero2", precision="fp8", host=host, allow_failure=True)
    assert script_run.ending.command == "torchrun"
    with pytest.raises(UsageProblem, match="accelerate takes fp8 under DeepSpeed"):
        launch(PROGRAMS / "ends.py", "well", launcher="accelerate", strategy="zero2", precision="fp8", host=host)


def test_a_script_that_is_not_there(host: Host) -> None:
    with pytest.raises(UsageProblem, match=r"there is no script 'nothing.py'"):
        launch("nothing.py", host=host)


class TestOutsideOfPytest(unittest.TestCase):
    """The plain function needs no fixture."""

    def test_launch(self) -> None:
        line = [str(PROGRAMS / "start_ranks.py"), "2", str(PROGRAMS / "ends.py"), "well"]
        self.assertFalse(launch(sys.executable, *line, launcher="cli", world_size=2, host=None).failed)  # noqa: PT009


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("how", "fails"), [("raise", "rank 1 raised ValueError: rank 1 does not"), ("exit", "rank 1 exited with code 3")]
)
def test_a_failure_that_is_declared(host: Host, how: str, fails: str) -> None:
    assert launch(sys.executable, *TWO_RANKS, how, launcher="cli", host=host, fails=fails).failed
    with pytest.raises(RunFailedError, match=r"the run failed otherwise than with 'rank 0'\n\nrank 1"):
        launch(sys.executable, *TWO_RANKS, how, launcher="cli", host=host, fails="rank 0")


@pytest.mark.nightly
def test_a_declared_failure_that_does_not_come(host: Host) -> None:
    with pytest.raises(Incompatible, match="all ranks ended well; expected the run to fail with 'rank 1 raised'"):
        launch(sys.executable, *TWO_RANKS, "well", launcher="cli", host=host, fails="rank 1 raised")
    with pytest.raises(RunFailedError, match="otherwise than with 'time limit'"):
        launch(sys.executable, *TWO_RANKS, "hang", launcher="cli", host=host, timeout=5, fails="time limit")
    with pytest.raises(UsageProblem, match=r"fails='\(': expected a regular expression"):
        launch(sys.executable, *TWO_RANKS, "well", launcher="cli", host=host, fails="(")


def _running(word: str) -> list[int]:
    pids = []
    for process in psutil.process_iter():
        try:
            if any(word in part for part in process.cmdline()) and process.status() != psutil.STATUS_ZOMBIE:
                pids.append(process.pid)
        except psutil.Error:
            continue
    return pids


def _until(holds: object) -> None:
    import time

    deadline = time.monotonic() + 20
    while not holds() and time.monotonic() < deadline:  # type: ignore[operator]
        time.sleep(0.05)
    assert holds()  # type: ignore[operator]
