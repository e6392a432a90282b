"""Random small test modules: what each test does on each rank, its source, and the verdict that the documented rules give it."""

from __future__ import annotations

import dataclasses
import itertools
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
    "directory": ("import tempfile\nVALUE = tempfile.mkdtemp(dir='.')", "own(VALUE)"),
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
        lines = [
            f"@pytest.fixture(scope={self.scope!r})",
            f"def of_{self.name}():",
            f"    act({self.setup!r})",
            "    yield",
            f"    act({self.teardown!r})",
            "",
            "",
        ]
        if self.mark:
            lines.append(MARKS[self.mark])
        if self.parameters:
            lines.append(f"@pytest.mark.parametrize('x', range({self.parameters}))")
        fixtures = ", ".join(self._fixtures())
        lines.append(f"def test_{self.name}({fixtures}):")
        for line in self._body():
            lines.append(f"    {line}")
        lines += ["", ""]
        return "\n".join(lines)

    def _fixtures(self) -> Iterator[str]:
        """Yield the arguments of the test."""
        yield f"of_{self.name}"
        if self.group or self.effect:
            yield "process_group"
        if self.subtests:
            yield "subtests"
        if "property" in self.extras:
            yield "record_property"
        if "file" in self.extras:
            yield "tmp_path"
        if self.parameters:
            yield "x"

    def _body(self) -> Iterator[str]:
        """Yield the lines of the test, without their indentation."""
        if self.group:
            yield "import torch"
            yield "one = torch.ones(3)"
            yield "torch.distributed.all_reduce(one)"
            yield "assert one.tolist() == [2.0, 2.0, 2.0]"
        for extra in self.extras:
            yield EXTRAS[extra]
        for number, kinds in enumerate(self.subtests):
            yield f"with subtests.test('{number}'):"
            yield f"    act({kinds!r})"
        if self.effect:
            _, question = EFFECTS[self.effect]
            yield from question.splitlines()
        yield f"act({self.call!r})"

    @property
    def ids(self) -> list[str]:
        """The names of its items."""
        if not self.parameters:
            return [f"test_{self.name}"]
        return [f"test_{self.name}[{x}]" for x in range(self.parameters)]

    @property
    def phases(self) -> tuple[Kinds, Kinds, Kinds]:
        return self.setup, self.call, self.teardown

    @property
    def expects(self) -> bool:
        """Return whether an exception is expected."""
        return self.mark in EXPECTING

    @property
    def expects_strictly(self) -> bool:
        """Return whether the expected exception must come."""
        return self.expects and "strict" in self.mark

    @property
    def dies(self) -> bool:
        """Return whether one of its ranks ends without a report."""
        kinds = itertools.chain.from_iterable(self.phases)
        return not set(kinds).isdisjoint(DEATHS)

    def verdict(self) -> str:
        """Return what the rules say: each rank as plain pytest would judge it, and all as the worst of them."""
        if self.mark in {"skip", "skipif"}:
            return "skipped"
        if self.mark == "xfail not run":
            return "xfailed"
        before_teardown = {self._phase(kind) for kind in (*self.setup, *self.call)}
        if self.expects_strictly and before_teardown == {"passed"}:
            return "failed"  # whatever becomes of the teardown
        outcome = of_all_ranks([*self._alone(0), *self._alone(1)])
        if self.expects and outcome == "passed":
            return "xpassed"
        return outcome

    @property
    def differs_inside(self) -> bool:
        """Return whether its verdict differs in a session that torchrun started, as is known.

        A rank that goes on beside one that skipped disagrees with it there, though it xfails: failed, else xfailed. An exception
        that was expected of one rank's teardown alone leaves the call's verdict: xpassed, else xfailed.
        """
        for ends, ends_of_peer in itertools.product((self._ends(0), self._ends(1)), repeat=2):
            if skips_before_xfail(ends, ends_of_peer):
                return True
        return self.expects and self.teardown != PASS

    @property
    def differs_plain(self) -> bool:
        """Return whether its ranks would differ under plain torchrun, where each must raise what it is strictly expected to.

        One outcome from all ranks asks that of any rank.
        """
        xfails_by_rank = []
        for rank in (0, 1):
            set_up, call, _ = self._ends(rank)
            xfails_by_rank.append("xfailed" in {set_up, call})
        return self.expects_strictly and xfails_by_rank[0] != xfails_by_rank[1]

    def _ends(self, rank: int) -> list[str]:
        """Return the outcome of each phase on a rank, as if the phases before it had passed."""
        return [self._phase(kinds[rank]) for kinds in self.phases]

    def _phase(self, kind: str) -> str:
        """Return the outcome of a phase that does this."""
        if kind in DEATHS:
            return "failed"
        if kind in FAULTS:
            return "xfailed" if self._expected(kind) else "failed"
        return {"skip": "skipped", "xfail": "xfailed"}.get(kind, "passed")

    def _expected(self, kind: str) -> bool:
        if not self.expects:
            return False
        return "value" not in self.mark or kind == "value"

    def _alone(self, rank: int) -> Iterator[str]:
        """Return the outcomes that ordinary pytest would report for that rank's phases."""
        set_up, call, torn_down = self._ends(rank)
        if set_up != "passed":
            yield set_up
            return
        subtests = [self._phase(kinds[rank]) for kinds in self.subtests]
        if "failed" in subtests:
            yield "failed"
        else:
            yield call
        if torn_down != "passed" and self.call[rank] not in DEATHS:
            yield torn_down


def skips_before_xfail(ends: Sequence[str], ends_of_peer: Sequence[str]) -> bool:
    """Return whether a rank skips in an earlier phase than a peer, or itself, xfails."""
    if "xfailed" not in ends_of_peer:
        return False
    xfailed = ends_of_peer.index("xfailed")
    return "skipped" in ends[:xfailed]


@dataclass(frozen=True)
class Module:
    """Some tests in one file, and what it does when it is imported."""

    name: str
    cases: tuple[Case, ...]
    effect: str = ""

    def source(self) -> str:
        """Return the whole file."""
        acts = []
        for kind, source in ACTS.items():
            acts += [f"    if kind == {kind!r}:", f"        {source}"]
        effect = ""
        if self.effect:
            effect, _ = EFFECTS[self.effect]
        head = HEAD.format(acts="\n".join(acts), effect=effect)
        tests = "\n".join(case.source() for case in self.cases)
        return f"{head}\n\n{tests}"

    def verdicts(self) -> dict[str, str]:
        """Return the verdict of each item."""
        verdicts = {}
        for case in self.cases:
            for name in case.ids:
                verdicts[f"{self.name}.py::{name}"] = case.verdict()
        return verdicts


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
    ends = [*FAULTS, "skip", "xfail"]
    if draw.random() < 0.2:
        ends += DEATHS
    setup = call = teardown = PASS
    parameters = 0
    subtests: tuple[Kinds, ...] = ()
    if draw.random() < 0.25:
        setup = _kinds(draw, ends)
    scope = draw.choice(["function", "function", "module", "session"])
    # A fixture that lives longer ends in another test where ranks do too.
    if scope == "function" and draw.random() < 0.15:
        teardown = _kinds(draw, FAULTS)
    mark = draw.choice([*MARKS, "", "", "", ""])
    if draw.random() < 0.7:
        call = _kinds(draw, ends)
    if scope == "function":
        parameters = draw.choice([0, 0, 0, 2])
    # A rank that does not come to the collective is a fault of its own.
    group = setup[0] == setup[1] and draw.random() < 0.4
    extras = draw.sample(sorted(EXTRAS), draw.choice([0, 0, 1, 2]))
    if not mark and draw.random() < 0.1:
        subtests = (_kinds(draw, ["pass", "pass", "value"]),)
    return Case(name, mark, setup, call, teardown, scope, parameters, group, tuple(extras), subtests)


def _kinds(draw: random.Random, ends: Sequence[str]) -> Kinds:
    """Draw one act for both ranks, for one of them only, or a different one for each."""
    first = draw.choice(ends)
    second = draw.choice(ends)
    return draw.choice([(first, first), (first, "pass"), ("pass", first), (first, second)])


def simpler(case: Case) -> Iterator[Case]:
    """Yield what is left of a case without one thing that it does, each."""
    plain = Case(case.name)
    for field in dataclasses.fields(Case):
        default = getattr(plain, field.name)
        if field.name != "effect" and getattr(case, field.name) != default:
            yield dataclasses.replace(case, **{field.name: default})
