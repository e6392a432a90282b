"""Random tests have the verdict that the rules give them, however their ranks are started."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
from tests.fuzz.modules import Case, Module, modules, of_all_ranks, simpler
from tests.fuzz.questions import Asking, asking_modules
from tests.plugin.test_fingerprint import documented
from tests.pytest_runs import RECORDED, Run, reports

pytestmark = pytest.mark.spawn

#: How ranks come to be: the command line in front of pytest, and pytest's options.
MODES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "warm": ((), ()),
    "reused": ((), ("--distcompat-reuse=session",)),
    "xdist": ((), ("-n", "2")),
    "inside": (("torch.distributed.run", "--nproc-per-node", "2", "-m"), ()),
    "cold": ((), ("--distcompat-launcher=torchrun",)),
    "plain": (("torch.distributed.run", "--nproc-per-node", "2", "-m"), ("-p", "no:distcompat")),
}
#: Of how many modules of a batch the tests run by a torchrun each, seconds a test.
COLD = 2
CONFTEST_OF_PLAIN = Path(__file__).with_name("conftest_of_plain.py")
#: So many sessions a difference is made smaller in.
SHRINKING = 12

Table = Mapping[str, str]
#: Runs these modules in that mode.
Fuzz = Callable[[Sequence[Module | Asking], str], Table]


@pytest.fixture
def fuzz(environment: dict[str, str], tmp_path: Path) -> Fuzz:
    ran: list[Path] = []

    def run(written: Sequence[Module | Asking], mode: str) -> Table:
        directory = tmp_path / f"{len(ran)}_{mode}"
        ran.append(directory)
        directory.mkdir()
        (directory / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
        for module in written:
            (directory / f"{module.name}.py").write_text(module.source(), encoding="utf-8")
        launch, options = MODES[mode]
        if mode == "plain":
            shutil.copy(CONFTEST_OF_PLAIN, directory / "conftest.py")
        else:
            options = ("--distcompat-timeout=60", *options)
        # The command line of ranks has no option of ours, as a question may ask.
        (directory / "pytest.ini").write_text(f"[pytest]\naddopts = {' '.join(options)}\n", encoding="utf-8")
        # pytest-rerunfailures starts a thread in the process that runs pytest.
        line = [sys.executable, "-m", *launch, "pytest", *RECORDED, "-p", "no:rerunfailures", "-q"]
        done = subprocess.run(
            line,
            cwd=directory,
            env={**environment, "RECORDED_REPORTS": str(directory / "reports.jsonl")},
            capture_output=True,
            text=True,
            timeout=1500,
            check=False,
        )
        out = done.stdout + done.stderr
        if mode == "plain":
            return _of_plain_ranks(directory, out)
        ended = Run(done.returncode, out, directory, reports(directory))
        names = {report["nodeid"] for report in ended.reports if "when" in report}
        assert names, out
        by_name = {name.partition("::")[2]: name for name in names}
        return {by_name[name]: end for name, end in ended.outcomes.items()}

    return run


def _of_plain_ranks(directory: Path, out: str) -> dict[str, str]:
    """Return of each test what its ranks come to, each of which recorded the outcomes of its own pytest."""
    ranks = [Run(0, out, directory, reports(directory / f"rank-{rank}")).ends for rank in (0, 1)]
    assert ranks[0], out
    assert ranks[0].keys() == ranks[1].keys(), out
    return {name: of_all_ranks([*ends, *ranks[1][name]]) for name, ends in ranks[0].items()}


def differing(written: Sequence[Module], mode: str, fuzz: Fuzz) -> dict[str, str]:
    """Return the tests whose verdict in that mode differs from the rules', with both verdicts."""
    # There a rank that dies takes all tests after it along.
    if mode in {"inside", "plain"}:
        written = without(written, lambda case: case.dies)
    if mode == "inside":
        written = without(written, lambda case: case.differs_inside)
    if mode == "plain":
        written = without(written, lambda case: case.differs_plain)
    if not written:
        return {}
    expected: dict[str, str] = {}
    for module in written:
        expected |= module.verdicts()
    table = fuzz(written, mode)
    return {
        name: f"{table.get(name, 'nothing')} in mode {mode}; expected {end}"
        for name, end in expected.items()
        if table.get(name) != end
    }


def without(written: Sequence[Module], left_out: Callable[[Case], bool]) -> list[Module]:
    """Return the modules without such cases, and no module that has none left."""
    modules = []
    for module in written:
        kept = tuple(case for case in module.cases if not left_out(case))
        if kept:
            modules.append(dataclasses.replace(module, cases=kept))
    return modules


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
    "mode", ["warm", *(pytest.param(mode, marks=pytest.mark.nightly) for mode in ("reused", "inside", "plain"))]
)
def test_a_few(mode: str, fuzz: Fuzz) -> None:
    written = modules(0, 2)
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


def unlike_plain(written: Sequence[Asking], mode: str, plain: Table, fuzz: Fuzz) -> list[str]:
    """Return a line for each question with another answer in that mode, unless the docs say that what it asks for differs."""
    table = fuzz(written, mode)
    differ = documented()
    lines = []
    for module in written:
        for question in module.questions:
            name = f"{module.name}.py::test_{question.name}"
            tolerated = mode in differ.get(question.about, ())
            if table.get(name) != plain.get(name) and not tolerated:
                lines.append(
                    f"{question.about}: {question.source} (asked in: {question.when}): "
                    f"{table.get(name, 'nothing')} in mode {mode}, {plain.get(name, 'nothing')} in mode plain"
                )
    return lines


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(1, 11))
def test_questions_have_the_answers_of_plain_torchrun(seed: int, fuzz: Fuzz) -> None:
    """Ten times fifty modules; ``FUZZ_SEED`` gives others."""
    written = asking_modules(seed + 1000 * int(os.environ.get("FUZZ_SEED", "0")), 50)
    wrong = unlike_plain(written, "warm", fuzz(written, "plain"), fuzz)
    assert not wrong, "\n".join(wrong)
