"""One known issue: a bug of another project, the versions that have it, and the cells that show it.

``known.read`` makes a ``KnownIssue`` of each entry of a TOML file. Its ``expectations`` go to the
judge beside those that a user declares in the suite: a failure that matches is then ``known``, and
no news. An issue that accelerate 1.7 has in checkpoints of FSDP1 becomes ``fails("resume",
strategy="fsdp1", match="state is empty", reason="...")``.

A cell is one point of the test matrix, such as ``fsdp1-bf16_upcast-w2``; its facets are strategy,
precision, world size and options. A driver is the class by which a suite tests a trainer. A marked
test is a user's own test that runs on ranks (``@pytest.mark.distcompat``).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from packaging.requirements import Requirement

from pytest_distcompat.cell import Cell
from pytest_distcompat.expect import Expectation, FacetValue, fails, may_fail, may_refuse, refuses
from pytest_distcompat.failures import UsageProblem
from pytest_distcompat.installed import fits, version_of

#: Value of the key ``kind`` -> the function that makes such an expectation. ``may_refuse`` is for
#: what only some machines support, ``may_fail`` for what fails only sometimes.
KINDS: dict[str, Callable[..., Expectation]] = {
    "fails": fails,
    "may_fail": may_fail,
    "refuses": refuses,
    "may_refuse": may_refuse,
}
#: The name of a check that stands for all checks.
EVERY = "*"


@dataclass(frozen=True)
class KnownIssue:
    """A bug in another project, and where it shows.

    Attributes:
        id: A name for the issue.
        link: The bug report.
        reason: What is wrong, in a sentence.
        check: The names of the checks that fail; ``*`` for all.
        match: A regular expression that a finding must contain. A finding is one sentence of a
            failed check.
        also: A second one, for further findings of the same bug.
        kind: What is expected, a key of ``KINDS``.
        packages: Requirements such as ``accelerate>=1.7``. The bug is present if all of them are
            met.
        drivers: The libraries with the bug. The issue applies to suites whose driver uses one of
            them; empty for all suites.
        cells: The cells in which the bug shows. Each mapping gives facets their values:
            ``{"strategy": "fsdp1"}``; an empty mapping is for all cells.
        device: ``cpu`` or ``cuda``; empty for both.
        fixed_in: The release that fixes the bug.
        script: A file that reproduces the bug without this plugin.
        test: A regular expression for pytest's node ids of the tests in which the bug shows; empty
            for all tests.
        until: The last day on which a failure is expected: ``2026-12-01``; empty for no end.
        strict: Whether each test that the issue covers must fail.
        where: The place of the entry, for messages: ``known issues my.toml: issue 2 (my-id)``.
        requirements: ``packages``, parsed.
    """

    id: str
    link: str
    reason: str
    check: tuple[str, ...]
    match: str
    also: str = ""
    kind: str = "fails"
    packages: tuple[str, ...] = ()
    drivers: tuple[str, ...] = ()
    cells: tuple[Mapping[str, FacetValue], ...] = ({},)
    device: str = ""
    fixed_in: str = ""
    script: str = ""
    test: str = ""
    until: str = ""
    strict: bool = True
    where: str = field(default="", compare=False)
    requirements: tuple[Requirement, ...] = field(
        default=(),
        compare=False,
        repr=False,
    )

    def applies_on(self, device: str) -> bool:
        """Tell whether the installed packages have the bug on this device."""
        return not self.missing_requirements(device)

    @property
    def ended(self) -> bool:
        """Tell whether the day ``until`` is over."""
        return self.expectations[0].ended

    def missing_requirements(self, device: str) -> tuple[str, ...]:
        """Return what does not fit here: requirements that are not met, and the issue's device.

        ``("accelerate>=1.7", "cuda")`` on the CPU with accelerate 1.6; empty if the issue applies.
        """
        missing: list[str] = []
        for text, requirement in zip(self.packages, self.requirements, strict=True):
            if not _is_met(requirement):
                missing.append(text)
        if self.device not in {"", device}:
            missing.append(self.device)
        return tuple(missing)

    @functools.cached_property
    def expectations(self) -> tuple[Expectation, ...]:
        """Expectations: one for each check and each entry of ``cells``.

        Raises UsageProblem for an entry that is wrong, such as an unknown facet.
        """
        # Cached, because every test item reads all issues.
        if self.also and "refuse" in self.kind:
            raise UsageProblem(f"also is for what checks find; kind {self.kind!r} has one error")
        reason = self.reason
        if self.link:
            reason = f"{reason} ({self.link})"
        texts = {"match": self.match, "reason": reason, "until": self.until}
        if self.also:
            texts["also"] = self.also
        make = KINDS[self.kind]
        expectations = []
        for check in self.check:
            for facets in self.cells:
                expectation = make(check, **texts, **facets)
                strict = expectation.strict and self.strict
                expectations.append(replace(expectation, strict=strict, of_known_issue=True))
        return tuple(expectations)

    def matches_test(self, nodeid: str) -> bool:
        """Tell whether ``test`` matches a node id; without a ``test`` the issue matches all."""
        return re.search(self.test, nodeid) is not None

    def expectation_for(self, nodeid: str, cell: Cell | None) -> Expectation | None:
        """Return the expectation for a marked test, None if the issue does not cover it.

        A marked test has no driver and no check, so an issue that names one of these does not cover
        it. Nor does one of a kind other than ``fails``.

        Args:
            nodeid: pytest's node id of the test.
            cell: The cell of the test; None if it names none.
        """
        if self.drivers or self.check != (EVERY,) or not self.matches_test(nodeid):
            return None
        for expectation in self.expectations:
            if expectation.kind != "fails":
                continue
            # An issue without facets is about all tests, also those without a cell.
            if not expectation.facets:
                return expectation
            if cell is not None and expectation.covers(cell, EVERY):
                return expectation
        return None


def _is_met(requirement: Requirement) -> bool:
    """Tell whether the installed version meets a requirement, such as ``accelerate>=1.7``."""
    # A marker is a condition after a semicolon, such as ``python_version < "3.12"``.
    if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
        return False
    return fits(requirement, version_of(requirement.name))
