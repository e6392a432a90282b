"""Expectations: what a user declares not to work, as exceptions to "every check passes".

``fails`` declares a known bug. ``refuses`` declares that a cell is not supported, and that the
trainer must say so with a clear error at build. Both return an ``Expectation``:

    class TestMyTrainer(CompatSuite):
        expect = (
            fails("resume", strategy="zero3", reason="https://github.com/my/trainer/issues/1"),
            refuses("resume", strategy="ddp", match="needs a sharded checkpoint"),
        )

Known issues (package ``known``) make them of entries in a file. ``judge.judge`` reads all of them,
and decides whether a failure is news.

A *cell* is one point of the test matrix, such as ``fsdp2-bf16_upcast-w2-compile``. Its *facets* are
strategy, precision, ``world_size``, options (``compile=True``), and over how many machines its
ranks are spread.
"""

from __future__ import annotations

import datetime as dt
import re
import time
from dataclasses import dataclass, replace

from pytest_distcompat import clock
from pytest_distcompat.cell import FACETS, OPTIONS, Cell, OptionValue
from pytest_distcompat.failures import UsageProblem
from pytest_distcompat.spread import COUNTS

#: What a declaration may give for a facet: a value, or a tuple of values of which any will do.
FacetValue = OptionValue | int | tuple[OptionValue | int, ...]

#: A lower bound such as ``>=2``, which the facets that count ranks or machines (``COUNTS``) take in
#: place of a number.
_LOWER_BOUND = re.compile(r">=([1-9][0-9]*)")


@dataclass(frozen=True)
class Expectation:
    """One declared exception to "every check passes", made by ``fails`` or ``refuses``."""

    #: ``fails`` or ``refuses``.
    kind: str
    #: The name of the check, ``*`` for all.
    check: str
    #: The facets of the cells, sorted by name: ``(("precision", "fp32"), ("world_size", ">=2"))``.
    facets: tuple[tuple[str, FacetValue], ...]
    #: Why, best a link; may be empty for ``refuses``.
    reason: str
    #: A regular expression that the message must contain; empty for any message.
    match: str
    #: Whether it is an error if the exception does not occur.
    strict: bool = True
    #: A regular expression for further findings of the same bug; empty for none.
    also: str = ""
    #: The last day (UTC) on which it holds, ``2026-12-01``; empty for no end.
    until: str = ""
    #: Whether it is of a known issue, so that the suite's author may never have read it.
    of_known_issue: bool = False

    @property
    def ended(self) -> bool:
        """Tell whether its last day is over."""
        if not self.until:
            return False
        today = time.strftime("%Y-%m-%d", time.gmtime(clock.wall()))
        return today > self.until

    def covers(self, cell: Cell, check: str) -> bool:
        """Tell whether the expectation is about that check in that cell.

        It is if each facet that it names has one of the declared values in the cell.
        """
        if self.check not in ("*", check):
            return False
        values = cell.facets()
        for name, expected in self.facets:
            wanted = expected if isinstance(expected, tuple) else (expected,)
            if name in COUNTS:
                number = int(values[name])
                if not any(_allows(count, number) for count in wanted):
                    return False
                continue
            actual = [values[name]]
            if name == "set":
                # The option ``set`` of a cell may have several settings of libraries, joined by
                # ``+``, and a bug is about one of them.
                actual += cell.set
            if not any(value in wanted for value in actual):
                return False
        return True

    def matches(self, message: str) -> bool:
        """Tell whether a message, or one finding of it, contains ``match``."""
        return not self.match or re.search(self.match, message) is not None

    def explains(self, finding: str) -> bool:
        """Tell whether a finding is the declared bug (``match``) or a consequence (``also``)."""
        if self.matches(finding):
            return True
        if not self.also:
            return False
        return re.search(self.also, finding) is not None

    def __str__(self) -> str:
        """Return it as a user writes it: ``fails('resume', strategy='zero3', reason=...)``."""
        arguments = [repr(self.check)]
        for name, value in self.facets:
            arguments.append(f"{name}={value!r}")
        arguments.append(f"reason={self.reason!r}")
        arguments.append(f"match={self.match!r}")
        if self.also:
            arguments.append(f"also={self.also!r}")
        if self.until:
            arguments.append(f"until={self.until!r}")
        listed = ", ".join(arguments)
        return f"{self.kind}({listed})"


def fails(
    check: str,
    *,
    reason: str,
    match: str = "",
    also: str = "",
    until: str = "",
    **facets: FacetValue,
) -> Expectation:
    """Declare a known bug: the check fails in these cells.

    When it passes, that is an error ("FIXED?"). A crash or a hang is never covered.

    Args:
        check: The name of the check, ``*`` for all.
        reason: The bug, best as a link.
        match: A regular expression that the failure's message must contain.
        also: A regular expression for further findings of the same bug. A finding that neither
            matches is another bug, and a failure.
        until: The last day on which the failure is excused, as ``2026-12-01`` (UTC).
        facets: The cells: each facet takes one value or a tuple of them. ``world_size`` and
            ``nodes`` also take a lower bound, as ``">=2"`` for a bug that needs two ranks.

    Raises:
        UsageProblem: A facet, or a value of it, is unknown, or ``until`` is no day.
    """
    if not reason:
        raise UsageProblem(f"fails({check!r}): say why, best with a link: reason='org/repo#1234'")
    expectation = _expectation("fails", check, facets, reason=reason, match=match, until=until)
    return replace(expectation, also=_regular(f"fails({check!r}): also", also))


def may_fail(
    check: str,
    *,
    reason: str,
    match: str = "",
    also: str = "",
    until: str = "",
    **facets: FacetValue,
) -> Expectation:
    """Declare a known bug that occurs only sometimes.

    The check may pass. An example is a number close to a tolerance.
    """
    always = fails(check, reason=reason, match=match, also=also, until=until, **facets)
    return replace(always, strict=False)


def refuses(
    check: str = "*", *, match: str, reason: str = "", until: str = "", **facets: FacetValue
) -> Expectation:
    """Declare cells that are not supported: ``build`` raises an error.

    Its message contains ``match``. An error after ``build`` is a LateFailure, no error at all is a
    failure.

    Args:
        check: The name of the check, ``*`` for all.
        match: A regular expression.
        reason: Why the cells are not supported; by default the error's message.
        until: The last day on which the refusal is expected, as ``2026-12-01`` (UTC).
        facets: The cells: each facet takes one value or a tuple of them.

    Raises:
        UsageProblem: A facet, or a value of it, is unknown, or ``until`` is no day.
    """
    if not match:
        raise UsageProblem(f"refuses({check!r}): give match=, the message that the user is to see")
    return _expectation("refuses", check, facets, reason=reason, match=match, until=until)


def may_refuse(
    check: str = "*", *, match: str, reason: str = "", until: str = "", **facets: FacetValue
) -> Expectation:
    """Declare cells that some machines do not support.

    They are refused with that message, or every check passes.
    """
    always = refuses(check, match=match, reason=reason, until=until, **facets)
    return replace(always, strict=False)


def _expectation(
    kind: str, check: str, facets: dict[str, FacetValue], *, reason: str, match: str, until: str
) -> Expectation:
    """Return the expectation. Raises UsageProblem if a facet, ``match`` or ``until`` is invalid."""
    declaration = f"{kind}({check!r})"
    if until and not _is_day(until):
        raise UsageProblem(f"{declaration}: until={until!r}; expected a day, as '2026-12-01'")
    for name, facet in facets.items():
        problem = _problem_of_facet(name, facet)
        if problem is not None:
            raise UsageProblem(f"{declaration}: {problem}")
    expression = _regular(f"{declaration}: match", match)
    in_order = tuple(sorted(facets.items()))
    return Expectation(kind, check, in_order, reason, expression, until=until)


def _problem_of_facet(name: str, facet: FacetValue) -> str | None:
    """Return the message about an invalid facet or value; None if both are valid."""
    if name not in FACETS:
        known = ", ".join(FACETS)
        return f"no facet named {name!r}. Known: {known}"
    values = facet if isinstance(facet, tuple) else (facet,)
    if not all(isinstance(value, (str, int)) for value in values):
        return f"{name} takes one value or a tuple of them, got {facet!r}"
    if name in COUNTS and not all(_is_count(value) for value in values):
        expected = "a number, a lower bound as '>=2', or a tuple of them"
        return f"{name} takes {expected}, got {facet!r}"
    # Which strategies and precisions there are is known only to modules that import this one.
    if name not in OPTIONS:
        return None
    option = OPTIONS[name]
    for value in values:
        if not option.accepts(value):
            known = ", ".join(map(repr, option.values))
            return f"{name} has no value {value!r}. Known: {known}"
    return None


def _is_count(value: object) -> bool:
    """Tell whether a value is a number or a lower bound."""
    if isinstance(value, str):
        return _LOWER_BOUND.fullmatch(value) is not None
    return isinstance(value, int)


def _allows(wanted: OptionValue | int, number: int) -> bool:
    """Tell whether a number of ranks or machines is the wanted one.

    ``wanted`` is a number, or a lower bound (``">=2"``).
    """
    if isinstance(wanted, str):
        return number >= int(wanted.removeprefix(">="))
    return number == wanted


def _is_day(text: str) -> bool:
    """Tell whether a text is a day such as ``2026-12-01``."""
    try:
        # Later Pythons read other spellings too, such as ``20261201``. ``ended`` compares texts, so
        # that only ``2026-12-01`` will do.
        return dt.date.fromisoformat(text).isoformat() == text
    except ValueError:
        return False


def _regular(name: str, text: str) -> str:
    """Return the text. Raises UsageProblem, which names it, if it is no regular expression."""
    try:
        re.compile(text)
    except re.error as error:
        raise UsageProblem(f"{name}={text!r} is no regular expression: {error}") from error
    return text
