"""Suites whose nodes have checkpoints of their own, on two network namespaces that share no directory for them."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.machines.network import Network, needs_namespaces
from tests.machines.test_node_faults import NEEDS, ended, started
from tests.pytest_runs import RECORDED, Run, reports

from pytest_distcompat import clock

pytestmark = [pytest.mark.spawn, needs_namespaces]

SUITE = Path(__file__).parents[1] / "nodes" / "suite_per_node.py"
Session = Callable[..., Run]


@pytest.fixture
def session(network: Network, tmp_path: Path) -> Iterator[Session]:
    shutil.copy(SUITE, tmp_path / "test_per_node.py")
    # Of a short name: the sockets below another one would be elsewhere.
    temporary = Path(tempfile.mkdtemp(prefix="dc-", dir="/tmp"))
    network.environment["TMPDIR"] = str(temporary)
    (tmp_path / "temporary").mkdir()

    def run(*args: str, name: str = "n2") -> Run:
        network.join(tmp_path, f"mount -t tmpfs none {tmp_path}/temporary && mount -t tmpfs none {temporary}", name)
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


CHOSEN = ("-k", "TestTorch and ddp and (resume or export) or TestOnFirstNode and resume")


def check_chosen(run: Run) -> None:
    cell = "ddp-fp32-w2-n2-model_mlp-checkpoints_node"
    broken = f"TestOnFirstNode::test[{cell}:resume]"
    sound = (f"TestTorch::test[{cell}:{check}]" for check in ("resume", "export"))
    assert run.outcomes == {**dict.fromkeys(sound, "passed"), broken: "failed"}, run.out
    expected = r"rank 1 on n2 raised FileNotFoundError: .*'\S+/checkpoint\.pt'"
    assert re.match(expected, first_line(run, broken)), first_line(run, broken)


@pytest.mark.nightly
def test_a_trainer_that_saves_on_each_node_and_one_that_does_not(session: Session) -> None:
    check_chosen(session(*CHOSEN))


@pytest.mark.nightly
@pytest.mark.parametrize("executor", [pytest.param(name, marks=marks) for name, marks in NEEDS.items()])
def test_by_a_scheduler(executor: str, network: Network, tmp_path: Path) -> None:
    with started(executor, network, tmp_path, shared=False) as nodes:
        shutil.copy(SUITE, nodes.directory / "test_per_node.py")
        check_chosen(ended(nodes, nodes.session("--distcompat-timeout", "60", *CHOSEN)))


@pytest.mark.nightly
def test_rank_0_is_not_where_pytest_is(session: Session) -> None:
    run = session("-k", "TestTorch and ddp and export or TestOnFirstNode and resume", name="a2")
    cell = "ddp-fp32-w2-n2-model_mlp-checkpoints_node"
    broken = f"TestOnFirstNode::test[{cell}:resume]"
    assert run.outcomes == {f"TestTorch::test[{cell}:export]": "passed", broken: "failed"}, run.out
    assert first_line(run, broken).startswith("rank 1 on n1 raised FileNotFoundError: "), first_line(run, broken)


@pytest.mark.nightly
def test_each_driver(session: Session) -> None:
    checks = "names or dtypes or resume or data or reshard or export or save_only_model"
    suites = "TestTorch or TestAccelerate or TestDeepSpeed or TestTrainer or TestUntagged"
    run = session("-k", f"({suites}) and ({checks}) or TestOtherKeys and names")
    # What each broken one says first, and what the drivers are known to fail in.
    failed = {
        r"TestTrainerOnFirstNode::.*:(resume|data)\]": r"rank 1 on n2 raised ValueError: Can't find a valid checkpoint at ",
        r"TestTrainerOnFirstNode::.*:reshard\]": r"rank [23] on n2 raised ValueError: Can't find a valid checkpoint at ",
        r"TestUntagged::.*:resume\]": r"rank 1 on n2: (parameter|optimizer state) '.*: other values after the load",
        r"TestOtherKeysElsewhere::.*:names\]": r"file 'of rank 1 on n2: checkpoint\.pt:model': 15 keys have the extra prefix `module\.`",
    }
    known = {
        r"TestTrainer::test\[ddp-fp32-w2-n2-checkpoints_node:(resume|data|reshard)\]",
        r"TestTrainer::test\[zero[23]-.*:(resume|data)\]",
    }
    for name, outcome in run.outcomes.items():
        first = next((line for pattern, line in failed.items() if re.match(pattern, name)), "")
        is_known = any(re.match(pattern, name) for pattern in known)
        assert outcome == ("failed" if first else "xfailed" if is_known else "passed"), f"{name}: {run.out}"
        assert not first or re.match(first, first_line(run, name)), first_line(run, name)
    ran = ("Torch", "Accelerate", "DeepSpeed", "Trainer", "TrainerOnFirstNode", "Untagged", "OtherKeysElsewhere")
    assert {name.partition("::")[0] for name in run.outcomes} == {f"Test{driver}" for driver in ran}
