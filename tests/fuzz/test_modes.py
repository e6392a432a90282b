"""Random tests have the verdict that the rules give them, however their ranks are started."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
from tests.fuzz.modules import Case, Module, modules, simpler
from tests.pytest_runs import RECORDED, Run, reports

pytestmark = pytest.mark.spawn

#: How ranks come to be: the command line in front of pytest, and pytest's options.
MODES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "warm": ((), ()),
    "reused": ((), ("--distcompat-reuse=session",)),
    "xdist": ((), ("-n", "2")),
    "inside": (("torch.distributed.run", "--nproc-per-node", "2", "-m"), ()),
    "cold": ((), ("--distcompat-launcher=torchrun",)),
}
#: Of how many modules of a batch the tests run by a torchrun each, seconds a test.
COLD = 2
#: So many sessions a difference is made smaller in.
SHRINKING = 12

Table = Mapping[str, str]
#: Runs these modules in that mode.
Fuzz = Callable[[Sequence[Module], str], Table]


@pytest.fixture
def fuzz(environment: dict[str, str], tmp_path: Path) -> Fuzz:
    ran: list[Path] = []

    def run(written: Sequence[Module], mode: str) -> Table:
        directory = tmp_path / f"{len(ran)}_{mode}"
        ran.append(directory)
        directory.mkdir()
        (directory / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
        for module in written:
            (directory / f"{module.name}.py").write_text(module.source(), encoding="utf-8")
        launch, options = MODES[mode]
        line = [sys.executable, "-m", *launch, "pytest", *RECORDED, "-q", "--distcompat-timeout=60", *options]
        done = subprocess.run(
            line,
            cwd=directory,
            env={**environment, "RECORDED_REPORTS": str(directory / "reports.jsonl")},
            capture_output=True,
            text=True,
            timeout=1500,
            check=False,
        )
        found = reports(directory)
        ended = Run(done.returncode, done.stdout + done.stderr, directory, found)
        names = {report["nodeid"] for report in found if "when" in report}
        assert names, ended.out
        by_name = {name.partition("::")[2]: name for name in names}
        return {by_name[name]: end for name, end in ended.outcomes.items()}

    return run


def differing(written: Sequence[Module], mode: str, fuzz: Fuzz) -> dict[str, str]:
    """Return the tests whose verdict in that mode differs from the rules', with both verdicts."""
    if mode == "inside":
        # There a rank that dies takes all tests after it along.
        written = [
            dataclasses.replace(
                module, cases=tuple(case for case in module.cases if not (case.dies or case.differs_inside))
            )
            for module in written
        ]
        written = [module for module in written if module.cases]
    if not written:
        return {}
    expected: dict[str, str] = {}
    for module in written:
        expected |= module.verdicts()
    found = fuzz(written, mode)
    return {
        name: f"{found.get(name, 'nothing')} in mode {mode}; expected {end}"
        for name, end in expected.items()
        if found.get(name) != end
    }


def smallest(module: Module, case: Case, mode: str, fuzz: Fuzz) -> tuple[Module, bool]:
    """A module with that case alone, as simple as it can be and still differ; and whether it does so alone at all."""
    alone = dataclasses.replace(module, cases=(case,))
    left = SHRINKING - 1
    if not differing([alone], mode, fuzz):
        return module, False
    again = True
    while again:
        again = False
        for candidate in simpler(alone.cases[0]):
            if not left:
                break
            left -= 1
            smaller = dataclasses.replace(alone, cases=(candidate,))
            if differing([smaller], mode, fuzz):
                alone, again = smaller, True
                break
    return alone, True


def describe(written: Sequence[Module], mode: str, wrong: Mapping[str, str], fuzz: Fuzz) -> str:
    """Describe the differences, with the reduced source of the first one."""
    lines = [f"{len(wrong)} tests differ:", *(f"  {name}: {end}" for name, end in wrong.items())]
    first = next(iter(wrong))
    module, case = next(
        (module, case)
        for module in written
        for case in module.cases
        if first in {f"{module.name}.py::{name}" for name in case.ids}
    )
    small, alone = smallest(module, case, mode, fuzz)
    about = "" if alone else ", which does so only beside the others"
    return "\n".join([*lines, "", f"The first of them, made smaller{about}:", "", small.source()])


@pytest.mark.parametrize(
    "mode", ["warm", *(pytest.param(mode, marks=pytest.mark.nightly) for mode in ("reused", "inside"))]
)
def test_a_few(mode: str, fuzz: Fuzz) -> None:
    written = modules(0, 4)
    wrong = differing(written, mode, fuzz)
    assert not wrong, describe(written, mode, wrong, fuzz)


@pytest.mark.nightly
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", range(1, 11))
def test_many(seed: int, mode: str, fuzz: Fuzz) -> None:
    """Ten times fifty modules; ``FUZZ_SEED`` gives others."""
    written = modules(seed + 1000 * int(os.environ.get("FUZZ_SEED", "0")), 50)
    if mode == "cold":
        written = written[:COLD]
    wrong = differing(written, mode, fuzz)
    assert not wrong, describe(written, mode, wrong, fuzz)
