"""Random small test modules: what each test does on each rank, its source, and the verdict that the documented rules give it."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

#: What a phase does on a rank, as source.
ACTS = {
    "pass": "pass",
    "value": "raise ValueError('of the fuzzer')",
    "key": "raise KeyError('of the fuzzer')",
    "assert": "assert len(kinds) == 3",
    "fail": "pytest.fail('of the fuzzer')",
    "exit": "sys.exit(3)",
    "exit 0": "sys.exit(0)",
    "skip": "pytest.skip('of the fuzzer')",
    "xfail": "pytest.xfail('of the fuzzer')",
    "die": "os._exit(5)",
    "die well": "os._exit(0)",
}
FAULTS = ("value", "key", "assert", "fail", "exit", "exit 0")
DEATHS = ("die", "die well")

#: Marks by name: source, whether an exception is expected, which, and whether it must come.
MARKS = {
    "": "",
    "skip": "@pytest.mark.skip(reason='of the fuzzer')",
    "skipif": "@pytest.mark.skipif(True, reason='of the fuzzer')",
    "no skipif": "@pytest.mark.skipif(False, reason='of the fuzzer')",
    "xfail": "@pytest.mark.xfail(reason='of the fuzzer')",
    "xfail strict": "@pytest.mark.xfail(strict=True)",
    "xfail value": "@pytest.mark.xfail(raises=ValueError, strict=False)",
    "xfail value strict": "@pytest.mark.xfail(raises=ValueError, strict=True)",
    "xfail not run": "@pytest.mark.xfail(run=False)",
    "no xfail": "@pytest.mark.xfail(False, reason='of the fuzzer', strict=True)",
}
EXPECTING = frozenset({"xfail", "xfail strict", "xfail value", "xfail value strict"})

#: What is done beside it, and changes no verdict.
EXTRAS = {
    "print": "print('rank', os.environ['RANK'])",
    "warn": "warnings.warn('of the fuzzer')",
    "property": "record_property('rank', os.environ['RANK'])",
    "environment": "os.environ['LEFT_BY_THE_FUZZER'] = '1'",
    "directory": "os.chdir('/')",
    "draw": "random.random()",
    "file": "(tmp_path / 'file').write_text('of the fuzzer')",
}

#: What a module does when it is imported: its source, and what each rank asks of it later. ``own`` is a value that each rank of a
#: plain launch has for itself.
EFFECTS = {
    "constant": ("VALUE = {'a', 'b'} | {'c'}", "assert sorted(VALUE) == ['a', 'b', 'c']"),
    "enum": ("import enum\nVALUE = enum.Enum('Colour', 'RED BLUE')", "assert VALUE['RED'] is VALUE(1)"),
    "dataclass": (
        "import dataclasses\n@dataclasses.dataclass\nclass Value:\n    x: int = 3",
        "assert dataclasses.asdict(Value()) == {'x': 3}",
    ),
    "cache": (
        "import functools\n@functools.cache\ndef value():\n    return []\nvalue()",
        "assert value() is value()\nassert not value()",
    ),
    "file": ("FILE = open(__file__)", 'assert FILE.readline().startswith(\'"""\')'),
    "rank": ("VALUE = os.environ.get('RANK')", "assert VALUE == os.environ['RANK']"),
    "random": ("VALUE = random.random()", "own(VALUE)"),
    "hash": ("VALUE = hash('of the fuzzer')", "own(VALUE)"),
    "uuid": ("import uuid\nVALUE = str(uuid.uuid4())", "own(VALUE)"),
    "time": ("VALUE = time.time_ns()", "own(VALUE)"),
    "directory": ("import tempfile\nVALUE = tempfile.mkdtemp()", "own(VALUE)"),
    "pid": ("VALUE = os.getpid()", "assert VALUE == os.getpid()"),
}

HEAD = '''"""Written by the fuzzer."""
import os
import random
import sys
import time
import warnings

import pytest

pytestmark = pytest.mark.distcompat(world_size=2)


def act(kinds):
    kind = kinds[int(os.environ["RANK"])]
{acts}


def own(value):
    """All ranks have another value."""
    from torch import distributed

    found = [None, None]
    distributed.all_gather_object(found, value)
    assert found[0] != found[1]


{effect}
'''


def of_all_ranks(ends: Sequence[str]) -> str:
    """Return the outcome of a test whose ranks ended so: the worst one; ranks that disagree about a skip have failed."""
    for end in ("failed", "xfailed"):
        if end in ends:
            return end
    if "skipped" in ends:
        return "skipped" if set(ends) == {"skipped"} else "failed"
    return ends[0]


Kinds = tuple[str, str]
PASS: Kinds = ("pass", "pass")


@dataclass(frozen=True)
class Case:
    """One test: what it does in each phase, on each rank."""

    name: str
    mark: str = ""
    setup: Kinds = PASS
    call: Kinds = PASS
    teardown: Kinds = PASS
    scope: str = "function"
    parameters: int = 0
    #: Whether a collective comes first: then all ranks get to it, or none.
    group: bool = False
    extras: tuple[str, ...] = ()
    subtests: tuple[Kinds, ...] = ()
    effect: str = ""

    def source(self) -> str:
        """Return the test and its fixture."""
        uses = [*(["process_group"] if self.group or self.effect else []), *(["subtests"] if self.subtests else [])]
        uses += [
            name for name, extra in (("record_property", "property"), ("tmp_path", "file")) if extra in self.extras
        ]
        lines = [
            f"@pytest.fixture(scope={self.scope!r})",
            f"def of_{self.name}():",
            f"    act({self.setup!r})",
            "    yield",
        ]
        lines += [f"    act({self.teardown!r})", "", ""]
        lines += [MARKS[self.mark]] if self.mark else []
        if self.parameters:
            lines.append(f"@pytest.mark.parametrize('x', range({self.parameters}))")
            uses.append("x")
        lines.append(f"def test_{self.name}({', '.join([f'of_{self.name}', *uses])}):")
        if self.group:
            lines += ["    import torch", "    one = torch.ones(3)", "    torch.distributed.all_reduce(one)"]
            lines.append("    assert one.tolist() == [2.0, 2.0, 2.0]")
        lines += [f"    {EXTRAS[extra]}" for extra in self.extras]
        for number, kinds in enumerate(self.subtests):
            lines += [f"    with subtests.test('{number}'):", f"        act({kinds!r})"]
        if self.effect:
            lines += [f"    {line}" for line in EFFECTS[self.effect][1].splitlines()]
        return "\n".join([*lines, f"    act({self.call!r})", "", ""])

    @property
    def ids(self) -> list[str]:
        """The names of its items."""
        return [f"test_{self.name}[{x}]" for x in range(self.parameters)] or [f"test_{self.name}"]

    @property
    def dies(self) -> bool:
        """Return whether one of its ranks ends without a report."""
        return any(kind in DEATHS for kinds in (self.setup, self.call, self.teardown) for kind in kinds)

    def verdict(self) -> str:
        """Return what the rules say: each rank as plain pytest would judge it, and all as the worst of them."""
        if self.mark in {"skip", "skipif"}:
            return "skipped"
        if self.mark == "xfail not run":
            return "xfailed"
        before = [self._phase(kinds[rank]) for kinds in (self.setup, self.call) for rank in (0, 1)]
        if self.mark in EXPECTING and "strict" in self.mark and set(before) == {"passed"}:
            return "failed"  # whatever becomes of the teardown
        ends = [end for rank in (0, 1) for end in self._alone(rank)]
        outcome = of_all_ranks(ends)
        return "xpassed" if self.mark in EXPECTING and outcome == "passed" else outcome

    @property
    def differs_inside(self) -> bool:
        """Return whether its verdict differs in a session that torchrun started, as is known.

        A rank that goes on beside one that skipped disagrees with it there, though it xfails: failed, else xfailed. An exception
        that was expected of one rank's teardown alone leaves the call's verdict: xpassed, else xfailed.
        """
        phases = (self.setup, self.call, self.teardown)
        ends = [[self._phase(kinds[rank]) for kinds in phases] for rank in (0, 1)]
        skips = any("skipped" in end[: other.index("xfailed")] for end in ends for other in ends if "xfailed" in other)
        return skips or (self.mark in EXPECTING and self.teardown != PASS)

    @property
    def differs_plain(self) -> bool:
        """Return whether its ranks would differ under plain torchrun, where each must raise what it is strictly expected to.

        One outcome from all ranks asks that of any rank.
        """
        phases = (self.setup, self.call)
        raised = [any(self._phase(kinds[rank]) == "xfailed" for kinds in phases) for rank in (0, 1)]
        return self.mark in EXPECTING and "strict" in self.mark and raised[0] != raised[1]

    def _phase(self, kind: str) -> str:
        if kind in DEATHS or (kind in FAULTS and not self._expected(kind)):
            return "failed"
        return "xfailed" if kind in {*FAULTS, "xfail"} else {"skip": "skipped"}.get(kind, "passed")

    def _expected(self, kind: str) -> bool:
        return self.mark in EXPECTING and ("value" not in self.mark or kind == "value")

    def _alone(self, rank: int) -> Iterator[str]:
        """Return the outcomes that ordinary pytest would report for that rank's phases."""
        set_up = self._phase(self.setup[rank])
        if set_up != "passed":
            yield set_up
            return
        call = self._phase(self.call[rank])
        inside = [self._phase(kinds[rank]) for kinds in self.subtests]
        yield "failed" if "failed" in inside else call
        if (torn := self._phase(self.teardown[rank])) != "passed" and self.call[rank] not in DEATHS:
            yield torn


@dataclass(frozen=True)
class Module:
    """Some tests in one file, and what it does when it is imported."""

    name: str
    cases: tuple[Case, ...]
    effect: str = ""

    def source(self) -> str:
        """Return the whole file."""
        acts = "\n".join(f"    if kind == {kind!r}:\n        {source}" for kind, source in ACTS.items())
        effect = EFFECTS[self.effect][0] if self.effect else ""
        return HEAD.format(acts=acts, effect=effect) + "\n\n" + "\n".join(case.source() for case in self.cases)

    def verdicts(self) -> dict[str, str]:
        """Return the verdict of each item."""
        return {f"{self.name}.py::{name}": case.verdict() for case in self.cases for name in case.ids}


def modules(seed: int, many: int) -> list[Module]:
    """Return so many modules, the same ones for the same seed."""
    draw = random.Random(seed)
    effects = ["", *EFFECTS]
    written = []
    for number in range(many):
        effect = draw.choice(effects)
        cases = [_case(draw, f"m{number}_{position}") for position in range(draw.randint(1, 3))]
        if effect:
            cases.append(Case(f"m{number}_effect", effect=effect))
        written.append(Module(f"test_m{number}", tuple(cases), effect))
    return written


def _case(draw: random.Random, name: str) -> Case:
    ends = [*FAULTS, "skip", "xfail", *(DEATHS if draw.random() < 0.2 else ())]
    setup = _kinds(draw, ends) if draw.random() < 0.25 else PASS
    scope = draw.choice(["function", "function", "module", "session"])
    # A fixture that lives longer ends in another test where ranks do too.
    teardown = _kinds(draw, FAULTS) if scope == "function" and draw.random() < 0.15 else PASS
    mark = draw.choice([*MARKS, "", "", "", ""])
    return Case(
        name,
        mark,
        setup,
        _kinds(draw, ends) if draw.random() < 0.7 else PASS,
        teardown,
        scope,
        draw.choice([0, 0, 0, 2]) if scope == "function" else 0,
        # One that does not come is a fault of its own.
        setup[0] == setup[1] and draw.random() < 0.4,
        tuple(draw.sample(sorted(EXTRAS), draw.choice([0, 0, 1, 2]))),
        (_kinds(draw, ["pass", "pass", "value"]),) if not mark and draw.random() < 0.1 else (),
    )


def _kinds(draw: random.Random, ends: Sequence[str]) -> Kinds:
    """Draw one act for both ranks, for one of them only, or a different one for each."""
    first, second = draw.choice(ends), draw.choice(ends)
    return draw.choice([(first, first), (first, "pass"), ("pass", first), (first, second)])


def simpler(case: Case) -> Iterator[Case]:
    """Yield what is left of a case without one thing that it does, each."""
    plain = Case(case.name)
    for field in dataclasses.fields(Case):
        if field.name != "effect" and getattr(case, field.name) != getattr(plain, field.name):
            yield dataclasses.replace(case, **{field.name: getattr(plain, field.name)})
