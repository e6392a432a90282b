"""What an adopter declares of single cells: ``fails`` (a known bug) and ``refuses`` (not supported, and said so)."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from pytest_distcompat.cell import FACETS, OPTIONS, Cell, OptionValue
from pytest_distcompat.failures import UsageProblem

FacetValue = OptionValue | int | tuple[OptionValue | int, ...]


@dataclass(frozen=True)
class Expectation:
    """One declared exception to "everything holds". Made by ``fails`` and ``refuses``.

    ``strict``: whether it is an error if it does not show. ``also``: what else the check finds of the same bug.
    """

    kind: str
    check: str
    facets: tuple[tuple[str, FacetValue], ...]
    reason: str
    match: str
    strict: bool = True
    also: str = ""

    def covers(self, cell: Cell, check: str) -> bool:
        """Whether this speaks of that check in that cell."""
        if self.check not in ("*", check):
            return False
        values = cell.facets()
        return all(
            values[name] in wanted if isinstance(wanted, tuple) else values[name] == wanted
            for name, wanted in self.facets
        )

    def matches(self, message: str) -> bool:
        """Whether the message is the one that was declared."""
        return not self.match or re.search(self.match, message) is not None

    def explains(self, finding: str) -> bool:
        """Whether one finding of several is the declared bug, or a consequence of it."""
        return self.matches(finding) or (self.also != "" and re.search(self.also, finding) is not None)

    def __str__(self) -> str:
        facets = "".join(f", {name}={value!r}" for name, value in self.facets)
        also = f", also={self.also!r}" if self.also else ""
        return f"{self.kind}({self.check!r}{facets}, reason={self.reason!r}, match={self.match!r}{also})"


def fails(check: str, *, reason: str, match: str = "", also: str = "", **facets: FacetValue) -> Expectation:
    """A known bug: the check fails in these cells. Strict: when it passes, that is an error ("FIXED?").

    ``reason`` names the bug, best as a link. ``match`` is a regular expression that the failure's message must
    contain, ``also`` one for what the bug brings with it: a finding that fits neither is another bug, and a failure.
    A facet takes one value or a tuple of them. A crash or a hang is never covered.
    Raises UsageProblem for an unknown facet.
    """
    if not reason:
        raise UsageProblem(f"fails({check!r}): say why, best with a link: reason='org/repo#1234'")
    return replace(_expectation("fails", check, reason, match, facets), also=_regular(f"fails({check!r}): also", also))


def may_fail(check: str, *, reason: str, match: str = "", also: str = "", **facets: FacetValue) -> Expectation:
    """The same where rounding decides: a number that is sometimes within a tolerance, sometimes not. Known, or it passes."""
    return replace(fails(check, reason=reason, match=match, also=also, **facets), strict=False)


def refuses(check: str = "*", *, match: str, reason: str = "", **facets: FacetValue) -> Expectation:
    """Not supported, and said so: ``build`` raises an error whose message contains ``match`` (a regular expression).

    An error after ``build`` is a LateFailure, no error at all is a failure. Raises UsageProblem for an unknown facet.
    """
    if not match:
        raise UsageProblem(f"refuses({check!r}): give match=, the message that the user is to see")
    return _expectation("refuses", check, reason, match, facets)


def may_refuse(check: str = "*", *, match: str, reason: str = "", **facets: FacetValue) -> Expectation:
    """The same where the machine decides what is supported: refused with that message, or every claim holds."""
    return replace(refuses(check, match=match, reason=reason, **facets), strict=False)


def _expectation(kind: str, check: str, reason: str, match: str, facets: dict[str, FacetValue]) -> Expectation:
    for name, wanted in facets.items():
        if name not in FACETS:
            raise UsageProblem(f"{kind}({check!r}): no facet named {name!r}. Known: {', '.join(FACETS)}")
        values = wanted if isinstance(wanted, tuple) else (wanted,)
        if not all(isinstance(value, (str, int)) for value in values):
            raise UsageProblem(f"{kind}({check!r}): {name} takes one value or a tuple of them, got {wanted!r}")
        if name == "world_size" and not all(isinstance(value, int) for value in values):
            raise UsageProblem(f"{kind}({check!r}): {name} takes a number or a tuple of them, got {wanted!r}")
        wrong = [value for value in values if name in OPTIONS and value not in OPTIONS[name].values]
        if wrong:
            known = ", ".join(repr(value) for value in OPTIONS[name].values)
            raise UsageProblem(f"{kind}({check!r}): {name} has no value {wrong[0]!r}. Known: {known}")
    return Expectation(kind, check, tuple(sorted(facets.items())), reason, _regular(f"{kind}({check!r}): match", match))


def _regular(name: str, text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise UsageProblem(f"{name}={text!r} is no regular expression: {error}") from error
    return text
