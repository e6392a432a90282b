"""Suites whose nodes have checkpoints of their own, on two network namespaces that share no directory for them."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.machines.network import Network, needs_namespaces
from tests.pytest_runs import RECORDED, Run, reports

from pytest_distcompat import clock

pytestmark = [pytest.mark.spawn, needs_namespaces]

Session = Callable[..., Run]


@pytest.fixture
def session(network: Network, tmp_path: Path) -> Iterator[Session]:
    shutil.copy(Path(__file__).parents[1] / "nodes" / "suite_per_node.py", tmp_path / "test_per_node.py")
    # Of a short name: the sockets below another one would be elsewhere.
    temporary = Path(tempfile.mkdtemp(prefix="dc-", dir="/tmp"))
    network.environment["TMPDIR"] = str(temporary)
    (tmp_path / "temporary").mkdir()

    def run(*args: str) -> Run:
        network.join(tmp_path, f"mount -t tmpfs none {tmp_path}/temporary && mount -t tmpfs none {temporary}")
        options = ("--distcompat-nodes", "2", "--distcompat-timeout", "60", *args)
        process = network.pytest(tmp_path, *options, recorded=RECORDED)
        out = process.communicate(timeout=900)[0]
        assert clock.wait_until(lambda: not network.left(), 20), network.left()
        # Neither node leaves files: those of n2 are gone with its disk.
        assert not list(temporary.glob("distcompat-*/runs"))
        return Run(process.returncode, out, tmp_path, reports(tmp_path))

    yield run
    shutil.rmtree(temporary, ignore_errors=True)


def first_line(run: Run, name: str) -> str:
    return str(run.of(name)["text"]).partition("\n")[0]


def test_a_trainer_that_saves_on_each_node_and_one_that_does_not(session: Session) -> None:
    run = session("-k", "TestTorch and ddp and (resume or export) or TestOnFirstNode and resume")
    cell = "ddp-fp32-w2-n2-model_mlp-checkpoints_node"
    broken = f"TestOnFirstNode::test[{cell}:resume]"
    sound = (f"TestTorch::test[{cell}:{check}]" for check in ("resume", "export"))
    assert run.outcomes == {**dict.fromkeys(sound, "passed"), broken: "failed"}, run.out
    expected = r"rank 1 on n2 raised FileNotFoundError: .*'\S+/checkpoint\.pt'"
    assert re.match(expected, first_line(run, broken)), first_line(run, broken)
