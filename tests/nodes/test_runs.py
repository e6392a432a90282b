"""Marked tests on two node agents of this machine: verdicts that name the node, in torchrun's environment."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
from tests.plugin.conftest import RunPytest

from pytest_distcompat import clock
from pytest_distcompat.launch.process import on_device
from pytest_distcompat.report.document import Report

if TYPE_CHECKING:
    from tests.plugin.conftest import Run

pytestmark = pytest.mark.spawn

HERE = Path(__file__).parent
TOKEN = "0123456789abcdef0123456789abcdef"


@pytest.fixture(scope="module")
def session(run_pytest: RunPytest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    directory = tmp_path_factory.mktemp("nodes")
    shutil.copy(HERE / "two_nodes.py", directory / "test_two_nodes.py")
    shutil.copy(HERE / "suite_on_nodes.py", directory / "test_suite_on_nodes.py")
    return run_pytest(directory, "-p", "no:cacheprovider", "-k", "test_two_nodes or Spread and active")


@pytest.fixture(scope="module", autouse=True)
def _seen(environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> None:
    environment["SEEN"] = str(tmp_path_factory.mktemp("seen"))


def test_a_cell_that_nodes_do_not_divide_is_not_run(session: Run) -> None:
    reason = "3 ranks cannot be spread evenly over 2 nodes"
    assert reason in session.text("TestSpread::test[ddp-fp32-w3-n2:active]")
    assert f"not run: {reason} [ddp-fp32-w3-n2]" in session.out


def first_line(run: Run, name: str) -> str:
    return run.text(name).partition("\n")[0]


def test_outcomes(session: Run) -> None:
    assert session.outcomes == {
        "test_sum": "passed",
        "test_shared": "passed",
        "test_environment": "passed",
        "test_assertion": "failed",
        "test_killed": "failed",
        "test_hang": "failed",
        "test_skip_on_both": "skipped",
        "test_skip_on_one": "failed",
        "test_one_node": "passed",
        "TestSpread::test[ddp-fp32-w2-n2:active]": "passed",
        "TestSpread::test[ddp-fp32-w3-n2:active]": "skipped",
    }, session.out


def test_failures_name_the_node(session: Run) -> None:
    assert first_line(session, "test_assertion").startswith("rank 1 on n2 failed: AssertionError: one is wrong")
    assert first_line(session, "test_killed").startswith("rank 1 on n2 was killed by SIGKILL")
    assert "time limit of 4 s" in first_line(session, "test_hang")
    assert "rank 1 on n2" in session.text("test_hang")
    assert "rank 1 on n2" in session.text("test_skip_on_one")


SCRIPT = """
import json, os, pathlib
pathlib.Path(os.environ["SEEN"], "torchrun-" + os.environ["RANK"]).write_text(json.dumps(dict(os.environ)))
"""


def test_the_environment_is_that_of_torchrun(session: Run, environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    line = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d"]
    line += [f"--rdzv-endpoint=127.0.0.1:{port}", "--local-addr=127.0.0.1", str(tmp_path / "script.py")]
    # Where there is an accelerator, ranks on the CPU are kept from it; elsewhere they get nothing that torchrun does not set.
    cold = [subprocess.Popen(line, env=on_device(environment, "cpu")) for _ in range(2)]
    assert [process.wait(120) for process in cold] == [0, 0]
    seen = Path(environment["SEEN"])
    of_the_run = {"MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE"}
    of_pytest = {"PYTEST_VERSION", "RECORDED_REPORTS", "PYTEST_DEBUG_TEMPROOT", "PYTEST_CURRENT_TEST", "PWD", "_"}
    of_pytest |= {"JE_ARROW_MALLOC_CONF", "PYTORCH_NVML_BASED_CUDA_CHECK", "OLDPWD", "SHLVL", "DISTCOMPAT_INSIDE"}
    # The fork server has imported torch._dynamo, which sets it.
    of_pytest |= {"TORCHINDUCTOR_CACHE_DIR"}
    for rank in range(2):
        ours = json.loads((seen / f"rank-{rank}").read_text())
        theirs = json.loads((seen / f"torchrun-{rank}").read_text())
        for name in sorted({*ours, *theirs} - of_pytest):
            assert name in ours, f"{name}={theirs[name]} is torchrun's only"
            assert name in theirs, f"{name}={ours[name]} is ours only"
            assert name in of_the_run or ours[name] == theirs[name], name


WAITS = """
import time, pytest, pathlib, os
@pytest.mark.distcompat(world_size=2, nodes=2)
def test_long(process_group, rank):
    from torch import distributed
    pathlib.Path(os.environ["SEEN"], f"long-{rank}").touch()
    if rank == 1:
        time.sleep(100)
    distributed.barrier()

@pytest.mark.distcompat(world_size=2, nodes=2)
def test_after():
    pass

@pytest.mark.distcompat(world_size=2)
def test_one_node():
    pass
"""


def joined(directory: Path, environment: dict[str, str], *names: str) -> tuple[list[subprocess.Popen[str]], list[str]]:
    """Start node agents that join a session, and return the arguments of that session."""
    (directory / "token").write_text(TOKEN)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    line = [sys.executable, "-m", "pytest_distcompat.cli", "join", f"127.0.0.1:{port}"]
    line += ["--token-file", str(directory / "token")]
    environment = {name: value for name, value in environment.items() if name != "PYTHONDONTWRITEBYTECODE"}
    agents = [
        subprocess.Popen([*line, "--name", name], env=environment, stderr=subprocess.PIPE, text=True, cwd=directory)
        for name in names
    ]
    options = ["--distcompat-executor", "join", "--distcompat-listen", f"127.0.0.1:{port}"]
    return agents, [*options, "--distcompat-token-file", str(directory / "token")]


@pytest.mark.nightly
def test_an_agent_that_is_killed(run_pytest: RunPytest, environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "test_waits.py").write_text(WAITS)
    (agent,), options = joined(tmp_path, environment, "zz")
    started = Path(environment["SEEN"], "long-1")

    def kill() -> None:
        clock.wait_until(started.exists, 120, every=0.1)
        time.sleep(0.5)
        below.extend(psutil.Process(agent.pid).children(recursive=True))
        os.kill(agent.pid, signal.SIGKILL)

    below: list[psutil.Process] = []
    thread = threading.Thread(target=kill)
    thread.start()
    run = run_pytest(tmp_path, "-p", "no:cacheprovider", *options)
    thread.join()
    assert run.outcomes == {"test_long": "failed", "test_after": "failed", "test_one_node": "passed"}, run.out
    assert "rank 1 on zz was lost with its node: its agent is gone" in first_line(run, "test_long")
    assert "1 of 2 nodes are there" in first_line(run, "test_after")
    assert "zz: its agent is gone" in run.text("test_after")
    assert clock.wait_until(lambda: not any(map(psutil.Process.is_running, below)), 10)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("number", "expected"), [(signal.SIGKILL, "its agent is gone ("), (signal.SIGTERM, "its agent got SIGTERM")]
)
def test_an_agent_that_is_killed_is_started_again(
    number: int, expected: str, run_pytest: RunPytest, environment: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "test_waits.py").write_text(WAITS)
    started = Path(environment["SEEN"], "long-1")
    started.unlink(missing_ok=True)

    def kill() -> None:
        clock.wait_until(started.exists, 120, every=0.1)
        sessions = [
            child for child in psutil.Process().children() if f"--basetemp={tmp_path / 'basetemp'}" in child.cmdline()
        ]
        (agent,) = (child for session in sessions for child in session.children() if child.cmdline()[-1] == "n2")
        below.extend([agent, *agent.children(recursive=True)])
        agent.send_signal(number)

    below: list[psutil.Process] = []
    thread = threading.Thread(target=kill)
    thread.start()
    run = run_pytest(tmp_path, "-p", "no:cacheprovider")
    thread.join()
    assert run.outcomes == {"test_long": "failed", "test_after": "passed", "test_one_node": "passed"}, run.out
    assert f"rank 1 on n2 was lost with its node: {expected}" in first_line(run, "test_long")
    assert clock.wait_until(lambda: not any(map(psutil.Process.is_running, below)), 10)


def session_of(directory: Path) -> psutil.Process:
    """Return the process of the session that runs in that directory."""
    basetemp = f"--basetemp={directory / 'basetemp'}"
    (session,) = (child for child in psutil.Process().children() if basetemp in child.cmdline())
    return session


STOPS = """
import pathlib, time
import pytest
from torch import distributed

@pytest.mark.distcompat(world_size=2, nodes=2, timeout=9)
def test_stops(process_group, rank):
    pathlib.Path(__file__).with_name(f"stops-{rank}").touch()
    for _ in range(4):
        time.sleep(1)
        distributed.barrier()
"""


@pytest.mark.nightly
def test_nodes_that_are_stopped_for_some_time_are_not_lost(run_pytest: RunPytest, tmp_path: Path) -> None:
    (tmp_path / "test_stops.py").write_text(STOPS)

    def stop() -> None:
        clock.wait_until((tmp_path / "stops-1").exists, 120, every=0.1)
        session = session_of(tmp_path)
        below = session.children(recursive=True)
        for process in below:
            process.suspend()
        # Longer than a cut link, and than the time limit.
        time.sleep(12)
        for process in below:
            process.resume()

    thread = threading.Thread(target=stop)
    thread.start()
    run = run_pytest(tmp_path, "-p", "no:cacheprovider")
    thread.join()
    assert run.outcomes == {"test_stops": "passed"}, run.out
    assert re.search("n[12]: stopped, as in a suspended job, or very busy; time limits wait", run.out)


HELD = """
from pytest_distcompat.ext.cluster import time_limit

time_limit.SUSPENDED_S = 3.0
"""


@pytest.mark.nightly
def test_a_node_agent_that_is_held_for_ever_is_lost(run_pytest: RunPytest, tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(HELD)
    (tmp_path / "test_stops.py").write_text(STOPS)
    processes: list[psutil.Process] = []

    def stop() -> None:
        clock.wait_until((tmp_path / "stops-1").exists, 120, every=0.1)
        session = session_of(tmp_path)
        processes.extend(child for child in session.children() if "n2" in child.cmdline())
        for process in processes:
            process.suspend()

    thread = threading.Thread(target=stop)
    thread.start()
    run = run_pytest(tmp_path, "-p", "no:cacheprovider")
    thread.join()
    assert len(processes) == 1
    assert run.outcomes == {"test_stops": "failed"}, run.out
    said = "rank 1 on n2 was lost with its node: its agent has not run for 0.05 minutes, though the node answers"
    assert run.text("test_stops").startswith(said), run.text("test_stops")
    assert not [process for process in processes if process.is_running()]


BEFORE = """
import pytest
@pytest.mark.distcompat(world_size=2, nodes=2)
def test_before():
    pass
"""


@pytest.mark.nightly
def test_sigterm_ends_the_session_as_ctrl_c_does(
    run_pytest: RunPytest, environment: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "test_a.py").write_text(BEFORE)
    (tmp_path / "test_waits.py").write_text(WAITS)
    (agent,), options = joined(tmp_path, environment, "zz")
    started = Path(environment["SEEN"], "long-1")
    started.unlink(missing_ok=True)

    def terminate() -> None:
        clock.wait_until(started.exists, 120, every=0.1)
        session = session_of(tmp_path)
        below.extend([*session.children(recursive=True), *psutil.Process(agent.pid).children(recursive=True)])
        session.terminate()

    below: list[psutil.Process] = []
    thread = threading.Thread(target=terminate)
    thread.start()
    run = run_pytest(tmp_path, "-p", "no:cacheprovider", "--distcompat-report", "report.json", *options)
    thread.join()
    assert run.code == pytest.ExitCode.INTERRUPTED, run.out
    assert "KeyboardInterrupt: SIGTERM" in run.out
    assert run.outcomes == {"test_before": "passed"}
    assert Report.read(tmp_path / "report.json").session["ending"] == "interrupted"
    # The agent is in the middle of a run.
    assert agent.wait(30) == 0
    assert clock.wait_until(lambda: not any(map(psutil.Process.is_running, below)), 20)


@pytest.mark.nightly
def test_a_node_that_never_comes(run_pytest: RunPytest, environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "test_waits.py").write_text(WAITS)
    _, options = joined(tmp_path, environment)
    run = run_pytest(tmp_path, "-p", "no:cacheprovider", "--distcompat-warm-timeout", "3", *options)
    assert run.code == pytest.ExitCode.USAGE_ERROR
    assert f"1 of 2 nodes are there ({socket.gethostname()}); run `distcompat join 127.0.0.1:" in run.out


@pytest.mark.nightly
def test_a_node_that_comes_twice(run_pytest: RunPytest, environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "test_waits.py").write_text(WAITS)
    agents, options = joined(tmp_path, environment, socket.gethostname())
    run = run_pytest(tmp_path, "-p", "no:cacheprovider", "--distcompat-warm-timeout", "5", *options)
    assert run.code == pytest.ExitCode.USAGE_ERROR
    # The agent that pytest starts has the same name: whichever came second is refused.
    texts = run.out + agents[0].communicate(timeout=30)[1]
    assert "a node of that name has joined from 127.0.0.1 already; expected another --name" in texts


def test_join_without_a_token(run_pytest: RunPytest, tmp_path: Path) -> None:
    (tmp_path / "test_waits.py").write_text(WAITS)
    run = run_pytest(tmp_path, "-p", "no:cacheprovider", "--distcompat-executor", "join")
    assert run.code != 0
    assert (
        "--distcompat-executor join: expected --distcompat-token-file FILE, with the token that nodes join with"
        in run.out
    )


def test_a_world_size_that_nodes_do_not_divide(run_pytest: RunPytest, tmp_path: Path) -> None:
    source = "import pytest\n@pytest.mark.distcompat(world_size=3, nodes=2)\ndef test(): pass\n"
    (tmp_path / "test_three.py").write_text(source)
    run = run_pytest(tmp_path, "-p", "no:cacheprovider")
    assert "distcompat(world_size=3, nodes=2): expected a world size that nodes divides" in run.out
