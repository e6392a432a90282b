"""Phase of a test on one rank, as the rank's log has it, and how the rank ends after it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pytest_distcompat.decode import prepare
from pytest_distcompat.events import Event
from pytest_distcompat.excerpt import encodable

#: The kinds of error of a rank that skipped while other ranks did not, and of one that failed as its xfail mark expects.
SKIPPED_ELSEWHERE, XFAILED = "skip", "xfail"


@dataclass(frozen=True)
class Phase(Event, name="phase"):
    """A phase of an item on one rank, or a subtest within one.

    Attributes:
        when: ``setup``, ``call`` or ``teardown``.
        outcome: ``passed``, ``failed``, ``skipped`` or ``xfailed``.
        subtest: The name of the subtest; empty for a whole phase.
        lost: Whether it failed only because another rank is gone.
        assertion: Whether it failed by an assertion or ``pytest.fail``.
    """

    when: str
    outcome: str
    message: str = ""
    text: str = ""
    location: tuple[str, int, str] | None = None
    sections: tuple[tuple[str, str], ...] = ()
    properties: tuple[tuple[str, Any], ...] = ()
    subtest: str = ""
    lost: bool = False
    assertion: bool = False

    def own_fields(self) -> dict[str, Any]:
        """Return the fields as plain data. Lone surrogates are escaped: one in a report ends a whole session of xdist."""
        # Not ``dataclasses.asdict``: it copies each text by functions that a test may patch.
        fields: dict[str, Any] = _encodable(super().own_fields())
        return fields

    @property
    def ending(self) -> tuple[str, str] | None:
        """The kind and message of the error that ends the rank after this phase; None if the rank goes on.

        A skip ends the rank if other ranks go on. A subtest ends nothing: it counts when its phase is over.
        """
        if self.subtest:
            return None
        where = "" if self.when == "call" else f" in {self.when}"
        return {
            "failed": ("failed", f"failed{where}: {self.message}"),
            "xfailed": (XFAILED, f"xfailed: {self.message}"),
            "skipped": (SKIPPED_ELSEWHERE, f"skipped ({self.message}) while other ranks went on"),
        }.get(self.outcome)


def _encodable(value: Any) -> Any:
    if isinstance(value, str):
        return encodable(value)
    if isinstance(value, dict):
        return {key: _encodable(item) for key, item in value.items()}
    return type(value)(map(_encodable, value)) if isinstance(value, (list, tuple)) else value


prepare(Phase)
