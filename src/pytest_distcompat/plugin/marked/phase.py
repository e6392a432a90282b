"""Phases: what one rank logs of a marked test.

A test with ``@pytest.mark.distcompat`` runs on *ranks*, the processes of a process group. On each
of them pytest runs the item and makes a report of its setup, its call and its teardown. Ranks have
no terminal. So ``rank_reporter`` turns each report into a ``Phase`` (``marked.reports``) and writes
that to the rank's log, as a line of JSON such as ``{"event": "phase", "when": "call", "outcome":
"passed", ...}``. Afterwards ``marked.merge`` reads the phases of all ranks in pytest's process.

A rank may have *lost its peer*: it failed only because another rank is gone, as with "Connection
reset by peer". Then it is no cause of the test's failure. A *subtest* is a part of a test with a
report of its own, by pytest's fixture ``subtests``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pytest_distcompat.decode import prepare
from pytest_distcompat.events import Event
from pytest_distcompat.excerpt import encodable

#: The ``kind`` of the error that a rank logs if it skipped while other ranks did not, and if it
#: failed as its xfail mark expects. Such a rank ends before its test does, but is not the cause.
SKIPPED_ELSEWHERE, XFAILED = "skip", "xfail"

#: Output in a report: title and content of each section, as ``("Captured stdout call", "...")``.
Sections = tuple[tuple[str, str], ...]

#: The user's properties of a test (``record_property``): the name and the value of each.
Properties = tuple[tuple[str, Any], ...]

#: Captured output is cut in the middle to this many characters; all of it is in the run's
#: directory.
SECTION_CHARACTERS = 65536

#: How pytest begins the text of a test that passed in spite of a strict xfail mark.
STRICT_XPASS = "[XPASS(strict)]"


@dataclass(frozen=True)
class Phase(Event, name="phase"):
    """A phase of an item on one rank, or a subtest within one.

    Attributes:
        when: ``setup``, ``call`` or ``teardown``.
        outcome: ``passed``, ``failed``, ``skipped`` or ``xfailed``.
        message: One line: the first of the exception, or the reason of a skip or an xfail.
        text: pytest's whole text, with the traceback.
        location: The path, the line (from 1) and the message of a failure or a skip; None where
            pytest does not know them.
        sections: The captured output to show.
        properties: The properties that the test recorded up to now.
        subtest: The name of the subtest; empty for a whole phase.
        lost: Whether it failed only because another rank is gone.
        assertion: Whether it failed by an assertion or ``pytest.fail``.
    """

    when: str
    outcome: str
    message: str = ""
    text: str = ""
    location: tuple[str, int, str] | None = None
    sections: Sections = ()
    properties: Properties = ()
    subtest: str = ""
    lost: bool = False
    assertion: bool = False

    def own_fields(self) -> dict[str, Any]:
        """Return the fields as plain data, for the line in the log.

        Lone surrogates, characters that UTF-8 cannot encode, are escaped: one in a report ends a
        whole session of xdist.
        """
        # Not ``dataclasses.asdict``: it copies each text by functions that a test may patch.
        fields: dict[str, Any] = _encodable(super().own_fields())
        return fields

    @property
    def ending(self) -> tuple[str, str] | None:
        """The kind and message of the error that ends the rank after this phase.

        For example ``("failed", "failed in setup: RuntimeError: no GPU")``. None if the rank goes
        on to its next phase. A skip and an xfail end the rank only if other ranks do otherwise
        (``rank_reporter``). A subtest ends nothing: it counts when its phase is over.
        """
        if self.subtest:
            return None
        if self.outcome == "failed":
            where = "" if self.when == "call" else f" in {self.when}"
            return "failed", f"failed{where}: {self.message}"
        if self.outcome == "xfailed":
            return XFAILED, f"xfailed: {self.message}"
        if self.outcome == "skipped":
            return SKIPPED_ELSEWHERE, f"skipped ({self.message}) while other ranks went on"
        return None


def _encodable(value: Any) -> Any:
    """Return the value with its texts escaped, those in containers too."""
    if isinstance(value, str):
        return encodable(value)
    if isinstance(value, dict):
        return {key: _encodable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [_encodable(item) for item in value]
        return type(value)(items)
    return value


# Have phases decoded by annotations that are read now: a test may break ``sys.modules``, say.
prepare(Phase)
